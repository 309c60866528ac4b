//! Scalar arithmetic of the layers, with every rounding written out. No operation here is ever fused.

use crate::{Activation, Gating};

/// The NaN of every f32 result.
pub const NAN: f32 = f32::from_bits(super::mma::NAN);

/// `x`, with any NaN replaced by the one NaN of the contracts (0x7FFFFFFF).
pub fn canonical(x: f32) -> f32 {
    if x.is_nan() { NAN } else { x }
}

/// exp(x) as one explicit f32 algorithm, at most 0.991 ulp off for |x| <= 110.
/// NaN for NaN, +inf above 88.72284, 0 below -104. Cody-Waite reduction, a polynomial of degree 7, and a scaling by
/// two powers of two so that no intermediate over- or underflows.
#[expect(clippy::excessive_precision, clippy::approx_constant, reason = "the constants as they are specified")]
pub fn exp(x: f32) -> f32 {
    if x.is_nan() {
        return NAN;
    }
    if x > 88.722_84 {
        return f32::INFINITY;
    }
    if x < -104.0 {
        return 0.0;
    }
    // Adding and subtracting 1.5·2^23 rounds to the nearest integer.
    let n = (x * 1.442_695_04 + 12_582_912.0) - 12_582_912.0;
    let r = (x - n * 0.693_359_375) - n * (-2.121_944_40e-4);
    let p = 1.987_569_150_0e-4;
    let p = p * r + 1.398_199_950_7e-3;
    let p = p * r + 8.333_451_907_3e-3;
    let p = p * r + 4.166_579_589_4e-2;
    let p = p * r + 1.666_666_545_9e-1;
    let p = p * r + 5.000_000_120_1e-1;
    let y = (p * (r * r) + r) + 1.0;
    let n = n as i32;
    let half = n / 2;
    y * power_of_two(half) * power_of_two(n - half)
}

/// 2^exponent for a normal f32 exponent.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// ln(x) as one explicit f32 algorithm (Cephes logf), at most 0.830 ulp off for every positive x, subnormals included.
/// -inf for a zero, NaN for NaN and for what is negative, +inf for +inf. With x = m·2^e and m in [sqrt(1/2), sqrt(2)),
/// a polynomial of degree 8 in m - 1, and e·ln 2 in two parts.
#[expect(clippy::excessive_precision, clippy::approx_constant, reason = "the constants as they are specified")]
pub fn ln(x: f32) -> f32 {
    if x.is_nan() || x < 0.0 {
        return NAN;
    }
    if x == 0.0 {
        return f32::NEG_INFINITY;
    }
    if x == f32::INFINITY {
        return x;
    }
    // A subnormal is made normal first, which is exact.
    let (bits, shift) = if x < f32::MIN_POSITIVE { ((x * 8_388_608.0).to_bits(), 23) } else { (x.to_bits(), 0) };
    // x = m·2^e with m in [1/2, 1).
    let m = f32::from_bits(bits & 0x7f_ffff | 0x3f00_0000);
    let e = (bits >> 23) as i32 - 126 - shift;
    let (r, e) = if m < 0.707_106_781_186_547_524 { ((m + m) - 1.0, e - 1) } else { (m - 1.0, e) };
    let e = e as f32;
    let z = r * r;
    let p = 7.037_683_629_2e-2;
    let p = p * r - 1.151_461_031_0e-1;
    let p = p * r + 1.167_699_874_0e-1;
    let p = p * r - 1.242_014_084_6e-1;
    let p = p * r + 1.424_932_278_7e-1;
    let p = p * r - 1.666_805_766_5e-1;
    let p = p * r + 2.000_071_476_5e-1;
    let p = p * r - 2.499_999_399_3e-1;
    let p = p * r + 3.333_333_117_4e-1;
    let y = (p * r) * z;
    let y = y + -2.121_944_40e-4 * e;
    let y = y + -0.5 * z;
    (r + y) + 0.693_359_375 * e
}

/// ln(1 + exp(x)); x itself above 20. NaN for NaN.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { ln(1.0 + exp(x)) }
}

/// 1 / (1 + exp(-x)) with an IEEE division.
pub fn sigmoid(x: f32) -> f32 {
    canonical(1.0 / (1.0 + exp(-x)))
}

/// x / (1 + exp(-x)). -inf gives NaN, by the formula (-inf / inf).
pub fn silu(x: f32) -> f32 {
    canonical(x / (1.0 + exp(-x)))
}

/// The smaller of both; NaN if either is NaN.
pub fn min(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { NAN } else { a.min(b) }
}

/// The larger of both; NaN if either is NaN.
pub fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { NAN } else { a.max(b) }
}

/// Gate and up clamped, the gate from above only, and joined: silu(g)·u or (u + 1)·(g·sigmoid(alpha·g)), left to right.
pub fn gated(gating: Gating, gate: f32, up: f32) -> f32 {
    let (gate, up) = match gating.limit() {
        Some(limit) => (min(gate, limit), min(max(up, -limit), limit)),
        None => (gate, up),
    };
    canonical(match gating {
        Gating::Silu { .. } => silu(gate) * up,
        Gating::SwigluOai { alpha, .. } => (up + 1.0) * (gate * sigmoid(alpha * gate)),
    })
}

/// f32 to bf16 or f16 bits, nearest even. Every NaN becomes 0x7FFF.
pub fn from_f32(format: Activation, x: f32) -> u16 {
    if x.is_nan() {
        return 0x7fff;
    }
    match format {
        Activation::Bf16 => half::bf16::from_f32(x).to_bits(),
        Activation::F16 => half::f16::from_f32(x).to_bits(),
    }
}

/// bf16 or f16 bits to f32 (exact). Every NaN becomes 0x7FFFFFFF.
pub fn to_f32(format: Activation, bits: u16) -> f32 {
    canonical(match format {
        Activation::Bf16 => half::bf16::from_bits(bits).to_f32(),
        Activation::F16 => half::f16::from_bits(bits).to_f32(),
    })
}

/// Value of an e4m3 (fn) code: 1-4-3, bias 7, no infinities, NaN for 0x7F and 0xFF.
pub fn e4m3(code: u8) -> f32 {
    let (field, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (field, code & 7) {
        (15, 7) => return NAN,
        (0, _) => mantissa * power_of_two(-9),
        _ => (8.0 + mantissa) * power_of_two(field - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Value of an e8m0 byte: 2^(byte - 127), NaN for 0xFF.
pub fn e8m0(byte: u8) -> f32 {
    match byte {
        0xff => NAN,
        // The least exponent is below f32's normal numbers.
        _ => power_of_two((i32::from(byte) - 127).max(-126)) * if byte == 0 { 0.5 } else { 1.0 },
    }
}

/// Value of an e2m1 code (the low four bits): 0, 0.5, 1, 1.5, 2, 3, 4, 6, then their negatives.
pub fn e2m1(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Code of the e4m3 value nearest to `x`; of two equally near ones the even code. Magnitudes above 448 saturate,
/// infinities too. Every NaN becomes 0x7F; a zero keeps its sign.
pub fn to_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = x.abs();
    // The first code whose value is not below it: that one is nearest, or the one before it is.
    let (mut code, mut end) = (0u8, 0x7e);
    while code < end {
        let middle = (code + end) / 2;
        if e4m3(middle) < magnitude { code = middle + 1 } else { end = middle }
    }
    if code > 0 {
        // The differences of neighbours on this grid are exact in f64.
        let above = f64::from(e4m3(code)) - f64::from(magnitude);
        let below = f64::from(magnitude) - f64::from(e4m3(code - 1));
        if below < above || below == above && code % 2 == 1 {
            code -= 1;
        }
    }
    code | if x.is_sign_negative() { 0x80 } else { 0 }
}
