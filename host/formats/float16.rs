//! bf16 and f16 as raw bits: round to nearest even, and one NaN.
//!
//! The GPU's conversions give 0x7FFF for every NaN, so the CPU drops sign and payload too.

use half::{bf16, f16};

/// The only NaN of bf16 and of f16.
pub const NAN16: u16 = 0x7FFF;

/// The only NaN of f32.
pub const F32_NAN: u32 = 0x7FFF_FFFF;

/// `value` with every NaN replaced by 0x7FFFFFFF.
pub fn canonical_f32(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(F32_NAN) } else { value }
}

/// bf16 bits of `value`, rounded to nearest even; every NaN gives 0x7FFF.
pub fn bf16_from_f32(value: f32) -> u16 {
    if value.is_nan() { NAN16 } else { bf16::from_f32(value).to_bits() }
}

/// Exact value of bf16 bits; every NaN gives 0x7FFFFFFF.
pub fn bf16_to_f32(bits: u16) -> f32 {
    canonical_f32(f32::from_bits(u32::from(bits) << 16))
}

/// f16 bits of `value`, rounded to nearest even; from ±65520 on ±infinity; every NaN gives 0x7FFF.
pub fn f16_from_f32(value: f32) -> u16 {
    if value.is_nan() { NAN16 } else { f16::from_f32(value).to_bits() }
}

/// Exact value of f16 bits; every NaN gives 0x7FFFFFFF.
pub fn f16_to_f32(bits: u16) -> f32 {
    canonical_f32(f16::from_bits(bits).to_f32())
}
