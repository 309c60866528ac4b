//! Conversions between the formats and exact packed products. Rounding is to nearest even; every NaN becomes 0x7FFF
//! (f16, bf16) or 0x7F (e4m3); f16 overflows to infinity, e4m3 saturates at 448.
//!
//! A packed `u32` holds the element of lower index in its low half.

use crate::arch::Arch;
use crate::imp;

/// bf16 bits of an f32 (`cvt.rn.bf16.f32`).
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    imp::f32_to_bf16(value)
}

/// f16 bits of an f32 (`cvt.rn.f16.f32`).
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    imp::f32_to_f16(value)
}

/// The f32 of bf16 bits, exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The f32 of f16 bits, exact (`cvt.f32.f16`).
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    imp::f16_to_f32(bits)
}

/// Packs two f32 as bf16x2 (`cvt.rn.bf16x2.f32`).
#[inline(always)]
pub fn f32x2_to_bf16x2(low: f32, high: f32) -> u32 {
    imp::f32x2_to_bf16x2(low, high)
}

/// Product of two f16 pairs, each rounded (`mul.rn.f16x2`).
#[inline(always)]
pub fn mul_f16x2(a: u32, b: u32) -> u32 {
    imp::mul_f16x2(a, b)
}

/// Product of two bf16 pairs, each rounded, subnormals kept (`mul.rn.bf16x2`; on sm_80 `fma.rn.bf16x2` with -0).
#[inline(always)]
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    imp::mul_bf16x2(a, b)
}

/// Bytes chosen from `a` (bytes 0 to 3) and `b` (bytes 4 to 7): byte i of the result is the one that nibble i of
/// `selector` names, 0 to 7 (`prmt.b32`).
#[inline(always)]
pub fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    imp::permute_bytes(a, b, selector)
}

/// The bits of `a` where `mask` has ones, else those of `b` (`lop3.b32`). The compiler does not look into it, so that masks behind
/// it stay where they are.
#[inline(always)]
pub fn select_bits(mask: u32, a: u32, b: u32) -> u32 {
    imp::select_bits(mask, a, b)
}

/// The low half of a pair in both halves. As an operand of a packed product it costs no instruction.
#[inline(always)]
pub fn duplicate_low(pair: u32) -> u32 {
    imp::duplicate_low(pair)
}

/// The high half of a pair in both halves, as [`duplicate_low`].
#[inline(always)]
pub fn duplicate_high(pair: u32) -> u32 {
    imp::duplicate_high(pair)
}

/// Two e4m3 codes (bits 0 to 7 and 8 to 15 of `codes`) as f16x2, exact (`cvt.rn.f16x2.e4m3x2` where the architecture
/// has it).
#[inline(always)]
pub fn e4m3x2_to_f16x2<A: Arch>(codes: u16) -> u32 {
    if A::E4M3_CVT {
        imp::e4m3x2_to_f16x2(codes)
    } else {
        // Sign to bit 15, exponent and mantissa below it: an f16 that is the value times 2^-8, made whole by an exact
        // product. The product cannot make the two NaN codes, so they are put in by hand.
        let spread = permute_bytes(codes as u32, 0, 0x1404);
        let scaled = (spread & 0x8000_8000) | ((spread & 0x7F00_7F00) >> 1);
        let value = mul_f16x2(scaled, 0x5C00_5C00);
        let low = if codes & 0x7F == 0x7F { 0x7FFF } else { value & 0xFFFF };
        let high = if codes & 0x7F00 == 0x7F00 { 0x7FFF_0000 } else { value & 0xFFFF_0000 };
        low | high
    }
}

/// Four e4m3 codes (code i in byte i) as the f16 pairs (0, 1) and (2, 3), exact.
#[inline(always)]
pub fn e4m3x4_to_f16x4<A: Arch>(codes: u32) -> [u32; 2] {
    [e4m3x2_to_f16x2::<A>(codes as u16), e4m3x2_to_f16x2::<A>((codes >> 16) as u16)]
}

/// Four e4m3 codes (code i in byte i) as the bf16 pairs (0, 1) and (2, 3), exact.
#[inline(always)]
pub fn e4m3x4_to_bf16x4<A: Arch>(codes: u32) -> [u32; 2] {
    e4m3x4_to_f16x4::<A>(codes).map(|pair| f32x2_to_bf16x2(f16_to_f32(pair as u16), f16_to_f32((pair >> 16) as u16)))
}

/// Two f32 as e4m3 codes, `low` in bits 0 to 7 (`cvt.rn.satfinite.e4m3x2.f32` where the architecture has it).
#[inline(always)]
pub fn f32x2_to_e4m3x2<A: Arch>(low: f32, high: f32) -> u16 {
    if A::E4M3_CVT {
        imp::f32x2_to_e4m3x2(low, high)
    } else {
        f32_to_e4m3_bits(low) as u16 | (f32_to_e4m3_bits(high) as u16) << 8
    }
}

/// e4m3 code of an f32 by bit arithmetic.
#[inline(always)]
fn f32_to_e4m3_bits(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = (bits >> 24 & 0x80) as u8;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return 0x7F;
    }
    // 448 is the largest code, and everything above saturates to it.
    if magnitude >= 0x43E0_0000 {
        return sign | 0x7E;
    }
    // The grid is 2^-9 for subnormals and 2^(exponent-3) above: adding 1.5·2^23 grids rounds to it, to nearest even.
    let exponent = (magnitude >> 23).max(121);
    let anchor = f32::from_bits((exponent + 20) << 23) * 1.5;
    let rounded = (f32::from_bits(magnitude) + anchor) - anchor;
    let out = rounded.to_bits();
    if out < 121 << 23 {
        // Subnormal: value / 2^-9, which is 0 to 7.
        return sign | (rounded * 512.0) as u8;
    }
    sign | ((out >> 20) - ((127 - 7) << 3)) as u8
}

/// Two E2M1 codes (bits 0 to 3 and 4 to 7 of `codes`) as f16x2 (`cvt.rn.f16x2.e2m1x2`). Only for architectures with
/// [`Arch::E2M1_CVT`]; elsewhere kernels decode eight codes at a time by bit arithmetic.
#[inline(always)]
pub fn e2m1x2_to_f16x2<A: Arch>(codes: u8) -> u32 {
    if A::E2M1_CVT {
        imp::e2m1x2_to_f16x2(codes)
    } else {
        let pair = codes as u32 & 0xF | (codes as u32 & 0xF0) << 12;
        mul_f16x2((pair & 0x0008_0008) << 12 | (pair & 0x0007_0007) << 9, 0x7400_7400)
    }
}
