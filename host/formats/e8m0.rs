//! E8M0, the block scale of MXFP4 (OCP Microscaling Formats 1.0): a power of two, 2^(byte - 127); 0xFF is NaN. There is neither a
//! sign nor a zero.

/// The NaN.
pub const NAN: u8 = 0xFF;

/// The byte of 1.
pub const ONE: u8 = 127;

/// Bytes under which every E2M1 code is exact in f16: 2^-23 (0.5 becomes f16's smallest number) to 2^13 (6 becomes 49,152).
pub const EXACT_IN_F16: std::ops::RangeInclusive<u8> = 127 - 23..=127 + 13;

/// Value of a byte, exact. The NaN gives 0x7FFFFFFF.
pub fn decode(byte: u8) -> f32 {
    match byte {
        // 2^-127 is half of the smallest normal number.
        0 => f32::from_bits(0x0040_0000),
        NAN => f32::from_bits(super::float16::F32_NAN),
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}
