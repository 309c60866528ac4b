//! E2M1 codes and block scales into mma operands.

use cuda_std::arch::Arch;
use cuda_std::cvt;
use cuda_std::memory::Element;
use cuda_std::mma::{Bf16, F16, MmaType};

/// Activation format of a layer: operand type of the mma and type of x and h.
pub trait Activation: MmaType {
    /// Eight codes (k0 in the low nibble) as the pairs (k0, k2), (k1, k3), (k4, k6), (k5, k7).
    fn decode<A: Arch>(codes: u32) -> [u32; 4];
    /// Two e4m3 codes, each in both halves of a register.
    fn e4m3<A: Arch>(codes: u16) -> [u32; 2];
    /// The power of two of an e8m0 byte, 2^(byte-127) rounded to the format, in both halves of a register; NaN for 0xFF.
    fn e8m0(byte: u8) -> u32;
    /// Product of two pairs.
    fn mul(a: u32, b: u32) -> u32;
    /// Nearest value of the format.
    fn round(value: f32) -> u16;
    /// The value of an element.
    fn widen(bits: u16) -> f32;
}

/// Format of the weights: E2M1 codes, and what their block scales are.
pub trait Format: Copy + Send + Sync + 'static {
    /// Consecutive k with one scale.
    const BLOCK: u32;
    /// Scales of the 32 k that a lane owns of a chunk.
    const LANE_SCALES: u32 = 32 / Self::BLOCK;
    /// Those scales as they lie in memory.
    type Scales: Element;
    /// Those scales as operands, for the first and the second 16 k, each in both halves of a register.
    fn scales<T: Activation, A: Arch>(scales: Self::Scales) -> [u32; 2];
}

/// One e4m3 scale per 16 k.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4;

/// One e8m0 scale, a power of two, per 32 k.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4;

impl Format for Nvfp4 {
    const BLOCK: u32 = 16;
    type Scales = u16;
    #[inline(always)]
    fn scales<T: Activation, A: Arch>(scales: u16) -> [u32; 2] {
        T::e4m3::<A>(scales)
    }
}

impl Format for Mxfp4 {
    const BLOCK: u32 = 32;
    type Scales = u8;
    #[inline(always)]
    fn scales<T: Activation, A: Arch>(scales: u8) -> [u32; 2] {
        [T::e8m0(scales); 2]
    }
}

#[inline(always)]
fn in_both_halves(bits: u16) -> u32 {
    bits as u32 | (bits as u32) << 16
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
    fn e4m3<A: Arch>(codes: u16) -> [u32; 2] {
        let pair = cvt::e4m3x2_to_f16x2::<A>(codes);
        [cvt::permute_bytes(pair, 0, 0x1010), cvt::permute_bytes(pair, 0, 0x3232)]
    }
    #[inline(always)]
    fn e8m0(byte: u8) -> u32 {
        // The f32 of byte 0 would be 0 instead of 2^-127, but both are 0 in f16.
        let bits = cvt::f32_to_f16(f32::from_bits((byte as u32) << 23));
        in_both_halves(if byte == 0xFF { 0x7FFF } else { bits })
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
    fn e4m3<A: Arch>(codes: u16) -> [u32; 2] {
        let pair = cvt::e4m3x2_to_f16x2::<A>(codes);
        let low = cvt::f16_to_f32(pair as u16);
        let high = cvt::f16_to_f32((pair >> 16) as u16);
        [cvt::f32x2_to_bf16x2(low, low), cvt::f32x2_to_bf16x2(high, high)]
    }
    #[inline(always)]
    fn e8m0(byte: u8) -> u32 {
        // The byte is the exponent field, but for the NaN and for 2^-127, the half of the smallest normal number.
        let bits = match byte {
            0 => 0x0040,
            0xFF => 0x7FFF,
            _ => (byte as u16) << 7,
        };
        in_both_halves(bits)
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
