//! E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats 1.0): sign, two exponent bits, one mantissa bit.
//!
//! Two codes share a byte: the even element lies in the low nibble, the odd one in the high nibble.

/// Values of the codes 0..=7; bit 3 of a code is the sign, so code 8 is -0.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Value of the code in the low four bits of `code`; the upper four are ignored.
pub fn decode(code: u8) -> f32 {
    let magnitude = MAGNITUDES[(code & 7) as usize];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Code of the nearest value, ties to the even code; beyond ±6 it saturates. A value that rounds to zero keeps its
/// sign. E2M1 has no NaN: NaN gives code 7, as `cvt.rn.satfinite.e2m1x2` does.
pub fn encode(value: f32) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let a = value.abs();
    // The bounds are the midpoints of neighbouring values. Where the lower code is even the midpoint belongs to it.
    let magnitude = if a <= 0.25 {
        0
    } else if a < 0.75 {
        1
    } else if a <= 1.25 {
        2
    } else if a < 1.75 {
        3
    } else if a <= 2.5 {
        4
    } else if a < 3.5 {
        5
    } else if a <= 5.0 {
        6
    } else {
        7
    };
    magnitude | if value.is_sign_negative() { 8 } else { 0 }
}

/// The codes of a byte: (even element, odd element).
pub const fn unpack(byte: u8) -> (u8, u8) {
    (byte & 0xF, byte >> 4)
}

/// The byte that holds two codes.
pub const fn pack(even: u8, odd: u8) -> u8 {
    (even & 0xF) | (odd << 4)
}
