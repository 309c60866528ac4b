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
