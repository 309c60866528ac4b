//! E4M3 in its finite-and-NaN form ("fn", OCP 8-bit floating point): bias 7, largest value 448, smallest normal 2^-6,
//! subnormal step 2^-9, no infinity, NaN at 0x7F and 0xFF.

/// Largest finite value (0x7E).
pub const MAX: f32 = 448.0;

/// The NaN that encoding gives.
pub const NAN: u8 = 0x7F;

/// Is `code` one of the two NaN codes?
pub const fn is_nan(code: u8) -> bool {
    code & 0x7F == 0x7F
}

/// Value of a code, exact. Both NaN codes give 0x7FFFFFFF.
pub fn decode(code: u8) -> f32 {
    if is_nan(code) {
        return f32::from_bits(super::float16::F32_NAN);
    }
    let exponent = u32::from(code >> 3) & 0xF;
    let mantissa = u32::from(code & 7);
    let magnitude = if exponent == 0 {
        mantissa as f32 / 512.0
    } else {
        // Same fields as f32 with another bias (7 against 127) and 20 mantissa bits fewer.
        f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Code of the nearest value, ties to even, subnormals included. Beyond ±448, infinities included, it saturates;
/// NaN gives 0x7F whatever its sign; -0 gives 0x80.
pub fn encode(value: f32) -> u8 {
    if value.is_nan() {
        return NAN;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let a = value.abs();
    let magnitude = if a >= MAX {
        0x7E
    } else if a < 1.0 / 64.0 {
        // On the grid of 2^-9; 8 is the code of 2^-6, so rounding up out of the subnormals needs no case of its own.
        (a * 512.0).round_ties_even() as u8
    } else {
        let bits = a.to_bits();
        let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
        // At most 0x7E: a < 448 is below the midpoint of 448 and the next step, which would be NaN's code.
        ((rounded >> 20) - (120 << 3)) as u8
    };
    sign | magnitude
}
