//! f32 functions with the same bits everywhere: only IEEE additions, products and divisions, never contracted.

use crate::imp;

/// The larger value; NaN if either is (`max.NaN.f32`).
#[inline(always)]
pub fn max_nan(a: f32, b: f32) -> f32 {
    imp::max_nan(a, b)
}

/// The smaller value; NaN if either is (`min.NaN.f32`).
#[inline(always)]
pub fn min_nan(a: f32, b: f32) -> f32 {
    imp::min_nan(a, b)
}

/// a·b + c with one rounding (`fma.rn.f32`).
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    imp::fma(a, b, c)
}

/// e^x within 0.991 ulp: the argument is reduced by a two-part ln 2 and a degree-7 polynomial taken by Horner's rule
/// (coefficients as in Cephes' `expf`). NaN gives NaN; above 88.72284 the result is infinite, below -104 zero.
#[inline(always)]
// The constants as they are published: rounding them to f32 is the compiler's part.
#[allow(clippy::excessive_precision, clippy::approx_constant)]
pub fn exp(x: f32) -> f32 {
    if x.is_nan() {
        return f32::from_bits(0x7FFF_FFFF);
    }
    if x > 88.72284 {
        return f32::INFINITY;
    }
    if x < -104.0 {
        return 0.0;
    }
    // Adding 1.5·2^23 rounds to the nearest integer.
    let n = (x * 1.442_695_04 + 12_582_912.0) - 12_582_912.0;
    let r = (x - n * 0.693_359_375) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_15e-4;
    p = p * r + 1.398_199_950_7e-3;
    p = p * r + 8.333_451_907_3e-3;
    p = p * r + 4.166_579_589_4e-2;
    p = p * r + 1.666_666_545_9e-1;
    p = p * r + 5.000_000_120_1e-1;
    let y = (p * (r * r) + r) + 1.0;
    // Two factors, since 2^n alone can be outside f32's range.
    let n = n as i32;
    let half = n / 2;
    y * power_of_two(half) * power_of_two(n - half)
}

/// 2^n for -126 <= n <= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
