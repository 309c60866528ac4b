//! E2M1 codes and e4m3 block scales into mma operands, exactly.

use cuda_std::arch::Arch;
use cuda_std::cvt;
use cuda_std::mma::{Bf16, F16, MmaType};

/// Activation format of a layer: operand type of the mma and type of x and h.
pub trait Activation: MmaType {
    /// Eight codes (k0 in the low nibble) as the pairs (k0, k2), (k1, k3), (k4, k6), (k5, k7).
    fn decode<A: Arch>(codes: u32) -> [u32; 4];
    /// Two block scales, each in both halves of a register.
    fn scales<A: Arch>(codes: u16) -> [u32; 2];
    /// Product of two pairs.
    fn mul(a: u32, b: u32) -> u32;
    /// Nearest value of the format.
    fn round(value: f32) -> u16;
    /// The value of an element.
    fn widen(bits: u16) -> f32;
}

impl Activation for F16 {
    #[inline(always)]
    fn decode<A: Arch>(codes: u32) -> [u32; 4] {
        if A::E2M1_CVT {
            // The instruction yields neighbours (k0, k1), (k2, k3), …: regroup.
            let q = [0, 8, 16, 24].map(|shift| cvt::e2m1x2_to_f16x2::<A>((codes >> shift) as u8));
            [
                cvt::permute_bytes(q[0], q[1], 0x5410),
                cvt::permute_bytes(q[0], q[1], 0x7632),
                cvt::permute_bytes(q[2], q[3], 0x5410),
                cvt::permute_bytes(q[2], q[3], 0x7632),
            ]
        } else {
            // Sign, exponent and mantissa of each code go to the upper byte of an f16: value·2^-14, then times 2^14.
            let odd = (codes & 0x8080_8080) | ((codes >> 3) & 0x0E0E_0E0E);
            let even = ((codes << 4) & 0x8080_8080) | ((codes << 1) & 0x0E0E_0E0E);
            let whole = |pair| cvt::mul_f16x2(pair, 0x7400_7400);
            [
                whole(cvt::permute_bytes(even, 0, 0x1404)),
                whole(cvt::permute_bytes(odd, 0, 0x1404)),
                whole(cvt::permute_bytes(even, 0, 0x3424)),
                whole(cvt::permute_bytes(odd, 0, 0x3424)),
            ]
        }
    }
    #[inline(always)]
    fn scales<A: Arch>(codes: u16) -> [u32; 2] {
        let pair = cvt::e4m3x2_to_f16x2::<A>(codes);
        [cvt::permute_bytes(pair, 0, 0x1010), cvt::permute_bytes(pair, 0, 0x3232)]
    }
    #[inline(always)]
    fn mul(a: u32, b: u32) -> u32 {
        cvt::mul_f16x2(a, b)
    }
    #[inline(always)]
    fn round(value: f32) -> u16 {
        cvt::f32_to_f16(value)
    }
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        cvt::f16_to_f32(bits)
    }
}

impl Activation for Bf16 {
    #[inline(always)]
    fn decode<A: Arch>(codes: u32) -> [u32; 4] {
        // Sign to bit 15, exponent and mantissa to bits 6 to 8: value·2^-126 (bf16 subnormals included), then times 2^126.
        let low = cvt::permute_bytes(codes, 0, 0x4140);
        let high = cvt::permute_bytes(codes, 0, 0x4342);
        let whole = |sign: u32, rest: u32| cvt::mul_bf16x2((sign & 0x8000_8000) | (rest & 0x01C0_01C0), 0x7E80_7E80);
        [
            whole(low << 12, low << 6),
            whole(low << 8, low << 2),
            whole(high << 12, high << 6),
            whole(high << 8, high << 2),
        ]
    }
    #[inline(always)]
    fn scales<A: Arch>(codes: u16) -> [u32; 2] {
        let pair = cvt::e4m3x2_to_f16x2::<A>(codes);
        let low = cvt::f16_to_f32(pair as u16);
        let high = cvt::f16_to_f32((pair >> 16) as u16);
        [cvt::f32x2_to_bf16x2(low, low), cvt::f32x2_to_bf16x2(high, high)]
    }
    #[inline(always)]
    fn mul(a: u32, b: u32) -> u32 {
        cvt::mul_bf16x2(a, b)
    }
    #[inline(always)]
    fn round(value: f32) -> u16 {
        cvt::f32_to_bf16(value)
    }
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        cvt::bf16_to_f32(bits)
    }
}
