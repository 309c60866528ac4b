//! E2M1 codes and block scales into mma operands.
//!
//! Decoding by bit arithmetic gives a code times a small power of two; a packed product makes it whole ([`Seed`](crate::order::Seed) and all MXFP4
//! weights), or the block scale takes the power in ([`Decode`](crate::order::Decode) with NVFP4 weights, which saves that product).

use crate::order::Order;
use cuda_std::arch::Arch;
use cuda_std::cvt;
use cuda_std::memory::Element;
use cuda_std::mma::{Bf16, F16, MmaType};

/// Activation format of a layer: operand type of the mma and type of x and h.
pub trait Activation: MmaType {
    /// What the total of a folding order is multiplied by: the inverse of the power of two in its weights.
    const UNFOLD: f32;
    /// Eight codes (k0 in the low nibble) as the pairs of the order, times the power of two that decoding leaves.
    fn decode<O: Order, A: Arch>(codes: u32) -> [u32; 4];
    /// A decoded pair without that power of two.
    fn whole<A: Arch>(pair: u32) -> u32;
    /// Two e4m3 codes, each in both halves of a register.
    fn e4m3<A: Arch>(codes: u16) -> [u32; 2];
    /// As [`Activation::e4m3`], times what turns decoded codes into products over [`Activation::UNFOLD`].
    fn folded_e4m3<A: Arch>(codes: u16) -> [u32; 2];
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
    /// All of them 0.
    const NO_SCALES: Self::Scales;
    /// Whether a folding order folds these scales.
    const FOLDS: bool;
    /// Those scales as operands, for the first and the second 16 k, each in both halves of a register.
    fn scales<T: Activation, O: Order, A: Arch>(scales: Self::Scales) -> [u32; 2];
}

/// Whether weights of format `F` are folded in the order `O`.
#[inline(always)]
pub const fn folds<F: Format, O: Order>() -> bool {
    F::FOLDS && O::FOLDS
}

/// What the total of a sum of products is multiplied by.
#[inline(always)]
pub const fn unfold<T: Activation, F: Format, O: Order>() -> f32 {
    if folds::<F, O>() { T::UNFOLD } else { 1.0 }
}

/// Eight codes under `scale` as mma operands, in the pairs of the order.
#[inline(always)]
pub fn weights<T: Activation, F: Format, O: Order, A: Arch>(codes: u32, scale: u32) -> [u32; 4] {
    let pairs = T::decode::<O, A>(codes);
    let pairs = if folds::<F, O>() { pairs } else { pairs.map(T::whole::<A>) };
    pairs.map(|pair| T::mul(pair, scale))
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
    const NO_SCALES: u16 = 0;
    const FOLDS: bool = true;
    #[inline(always)]
    fn scales<T: Activation, O: Order, A: Arch>(scales: u16) -> [u32; 2] {
        if folds::<Self, O>() { T::folded_e4m3::<A>(scales) } else { T::e4m3::<A>(scales) }
    }
}

impl Format for Mxfp4 {
    const BLOCK: u32 = 32;
    type Scales = u8;
    const NO_SCALES: u8 = 0;
    // A scale may be any power of two, and times the power of two of the codes it could leave the format.
    const FOLDS: bool = false;
    #[inline(always)]
    fn scales<T: Activation, O: Order, A: Arch>(scales: u8) -> [u32; 2] {
        [T::e8m0(scales); 2]
    }
}

#[inline(always)]
fn in_both_halves(bits: u16) -> u32 {
    bits as u32 | (bits as u32) << 16
}

impl Activation for F16 {
    const UNFOLD: f32 = 128.0;
    #[inline(always)]
    fn decode<O: Order, A: Arch>(codes: u32) -> [u32; 4] {
        if A::E2M1_CVT {
            // The instruction yields neighbours (k0, k1), (k2, k3), …: regroup.
            let q = [0, 8, 16, 24].map(|shift| cvt::e2m1x2_to_f16x2::<A>((codes >> shift) as u8));
            let [first, second] = if O::PAIRS[0].1 == 4 { [(0, 2), (1, 3)] } else { [(0, 1), (2, 3)] };
            [
                cvt::permute_bytes(q[first.0], q[first.1], 0x5410),
                cvt::permute_bytes(q[first.0], q[first.1], 0x7632),
                cvt::permute_bytes(q[second.0], q[second.1], 0x5410),
                cvt::permute_bytes(q[second.0], q[second.1], 0x7632),
            ]
        } else if O::PAIRS[0].1 == 4 {
            // Sign, exponent and mantissa of each code go to the upper byte of an f16: value·2^-14. The sign bits and the rest
            // are merged for four codes at once, and what lies between them is masked away as the bytes are spread.
            let odd = cvt::select_bits(0x8080_8080, codes, codes >> 3);
            let even = cvt::select_bits(0x8080_8080, codes << 4, codes << 1);
            [even << 8, odd << 8, even, odd].map(|bytes| bytes & 0x8E00_8E00)
        } else {
            let odd = (codes & 0x8080_8080) | ((codes >> 3) & 0x0E0E_0E0E);
            let even = ((codes << 4) & 0x8080_8080) | ((codes << 1) & 0x0E0E_0E0E);
            [
                cvt::permute_bytes(even, 0, 0x1404),
                cvt::permute_bytes(odd, 0, 0x1404),
                cvt::permute_bytes(even, 0, 0x3424),
                cvt::permute_bytes(odd, 0, 0x3424),
            ]
        }
    }
    #[inline(always)]
    fn whole<A: Arch>(pair: u32) -> u32 {
        if A::E2M1_CVT { pair } else { cvt::mul_f16x2(pair, 0x7400_7400) }
    }
    #[inline(always)]
    fn folded_e4m3<A: Arch>(codes: u16) -> [u32; 2] {
        // Codes come as value·2^-14, or whole from the instruction: times 2^7 or 2^-7.
        let factor = if A::E2M1_CVT { 0x2000_2000 } else { 0x5800_5800 };
        let pair = cvt::mul_f16x2(cvt::e4m3x2_to_f16x2::<A>(codes), factor);
        [cvt::duplicate_low(pair), cvt::duplicate_high(pair)]
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
    const UNFOLD: f32 = 256.0;
    #[inline(always)]
    fn decode<O: Order, A: Arch>(codes: u32) -> [u32; 4] {
        // Sign to bit 15, exponent and mantissa to bits 6 to 8: value·2^-126, bf16 subnormals included.
        if O::PAIRS[0].1 == 4 {
            // A product moves a code to two places at once.
            let late = codes >> 8;
            let low = |codes: u32| (codes & 0x000F_000F).wrapping_mul((1 << 12) + (1 << 6)) & 0x81C0_81C0;
            let high = |codes: u32| (codes & 0x00F0_00F0).wrapping_mul((1 << 8) + (1 << 2)) & 0x81C0_81C0;
            return [low(codes), high(codes), low(late), high(late)];
        }
        let pair = |sign: u32, rest: u32| (sign & 0x8000_8000) | (rest & 0x01C0_01C0);
        let low = cvt::permute_bytes(codes, 0, 0x4140);
        let high = cvt::permute_bytes(codes, 0, 0x4342);
        [pair(low << 12, low << 6), pair(low << 8, low << 2), pair(high << 12, high << 6), pair(high << 8, high << 2)]
    }
    #[inline(always)]
    fn whole<A: Arch>(pair: u32) -> u32 {
        cvt::mul_bf16x2(pair, 0x7E80_7E80)
    }
    #[inline(always)]
    fn folded_e4m3<A: Arch>(codes: u16) -> [u32; 2] {
        // 2^118: with the 2^-126 of the codes, 2^-8 is left.
        let pair = cvt::e4m3x2_to_f16x2::<A>(codes);
        let pair = cvt::f32x2_to_bf16x2(cvt::f16_to_f32(pair as u16), cvt::f16_to_f32((pair >> 16) as u16));
        let pair = cvt::mul_bf16x2(pair, 0x7A80_7A80);
        [cvt::duplicate_low(pair), cvt::duplicate_high(pair)]
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
        let bits = ((byte as u16) << 7).max(0x0040) | if byte == 0xFF { 0x007F } else { 0 };
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
