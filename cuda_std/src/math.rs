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

/// Square root, correctly rounded (`sqrt.rn.f32`). NaN for a negative argument; -0 gives -0.
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    imp::sqrt(x)
}

/// Natural logarithm: the mantissa is brought between sqrt(1/2) and sqrt(2), a degree-9 polynomial taken by Horner's rule
/// (coefficients as in Cephes' `logf`), the exponent times a two-part ln 2 added. NaN for a negative argument, -inf for a
/// zero.
#[inline(always)]
// The constants as they are published: rounding them to f32 is the compiler's part.
#[allow(clippy::excessive_precision, clippy::approx_constant)]
pub fn ln(x: f32) -> f32 {
    if x.is_nan() || x < 0.0 {
        return f32::from_bits(0x7FFF_FFFF);
    }
    if x == 0.0 {
        return f32::NEG_INFINITY;
    }
    if x == f32::INFINITY {
        return x;
    }
    // A subnormal is made normal first; 2^25 is exact.
    let (x, below) = if x < f32::MIN_POSITIVE { (x * 33_554_432.0, 25) } else { (x, 0) };
    let bits = x.to_bits();
    // x = mantissa·2^exponent with a mantissa from 1/2 to 1.
    let exponent = (bits >> 23) as i32 - 126 - below;
    let mantissa = f32::from_bits((bits & 0x007F_FFFF) | 126 << 23);
    let small = mantissa < 0.707_106_781_186_547_524;
    let e = (if small { exponent - 1 } else { exponent }) as f32;
    let f = if small { (mantissa + mantissa) - 1.0 } else { mantissa - 1.0 };
    let z = f * f;
    let mut p = 7.037_683_629_2e-2;
    p = p * f - 1.151_461_031_0e-1;
    p = p * f + 1.167_699_874_0e-1;
    p = p * f - 1.242_014_084_6e-1;
    p = p * f + 1.424_932_278_7e-1;
    p = p * f - 1.666_805_766_5e-1;
    p = p * f + 2.000_071_476_5e-1;
    p = p * f - 2.499_999_399_3e-1;
    p = p * f + 3.333_333_117_4e-1;
    let mut y = p * f * z;
    y += e * -2.121_944_4e-4;
    y += z * -0.5;
    (f + y) + e * 0.693_359_375
}

/// ln(1 + e^x); x itself above 20, where the two are the same to an f32.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { ln(1.0 + exp(x)) }
}
