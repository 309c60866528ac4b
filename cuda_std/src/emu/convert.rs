//! Conversions and scalar functions, bit for bit as the instructions give them.

/// The NaN that every f32 instruction gives.
pub(super) const NAN: u32 = 0x7FFF_FFFF;
/// The NaN of both 16-bit formats.
const NAN16: u16 = 0x7FFF;

/// Rounds to a format with `exponent` and `mantissa` bits, to nearest even; overflow gives infinity.
fn round16<const MANTISSA: u32, const BIAS: i32>(value: f64) -> u16 {
    if value.is_nan() {
        return NAN16;
    }
    let sign = ((value.to_bits() >> 48) & 0x8000) as u16;
    let magnitude = value.abs();
    let infinity = ((1u32 << (15 - MANTISSA)) - 1) << MANTISSA;
    if magnitude == f64::INFINITY {
        return sign | infinity as u16;
    }
    // Exponent of the last place: that of a normal result, or of the subnormal grid.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - BIAS);
    let grid = exponent - MANTISSA as i32;
    // Exact: a power of two, and no result is near the ends of f64's range.
    let scaled = magnitude * f64::from_bits(((1023 - grid) as u64) << 52);
    // In units of the grid a normal significand is 2^MANTISSA or more, which is the exponent field's own unit.
    let units = scaled.round_ties_even() as u32;
    let code = (((exponent + BIAS - 1) as u32) << MANTISSA) + units;
    sign | code.min(infinity) as u16
}

/// bf16 bits of an f32.
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return NAN16;
    }
    // Half of the last place, less one where the kept part is even: ties go to even.
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

/// f16 bits of an f32.
pub fn f32_to_f16(value: f32) -> u16 {
    round16::<10, 15>(f64::from(value))
}

/// The f32 of f16 bits.
pub fn f16_to_f32(bits: u16) -> f32 {
    let (sign, exponent, mantissa) = (u32::from(bits >> 15) << 31, u32::from(bits >> 10 & 31), u32::from(bits & 0x3FF));
    match exponent {
        0 => f32::from_bits(sign | (mantissa as f32 * f32::from_bits((127 - 24) << 23)).to_bits()),
        31 if mantissa != 0 => f32::from_bits(NAN),
        31 => f32::from_bits(sign | 0x7F80_0000),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | mantissa << 13),
    }
}

/// Two f32 as bf16x2.
pub fn f32x2_to_bf16x2(low: f32, high: f32) -> u32 {
    u32::from(f32_to_bf16(low)) | u32::from(f32_to_bf16(high)) << 16
}

fn halves(a: u32, b: u32, product: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(product(a as u16, b as u16)) | u32::from(product((a >> 16) as u16, (b >> 16) as u16)) << 16
}

/// Products of two f16 pairs.
pub fn mul_f16x2(a: u32, b: u32) -> u32 {
    // 22 significant bits: exact in f32, whose range also holds every product.
    halves(a, b, |a, b| f32_to_f16(f16_to_f32(a) * f16_to_f32(b)))
}

/// Products of two bf16 pairs.
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    let wide = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    // 16 significant bits, but a range beyond f32's: exact in f64 only.
    halves(a, b, |a, b| round16::<7, 127>(wide(a) * wide(b)))
}

/// Bytes of `a` and `b` that the nibbles of `selector` name.
pub fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    (0..4).fold(0, |out, i| {
        let nibble = selector >> (4 * i) & 0xF;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        // The nibble's top bit asks for copies of the byte's sign.
        let byte = if nibble & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | u32::from(byte) << (8 * i)
    })
}

/// Bits of `a` where `mask` has ones, else of `b`.
pub fn select_bits(mask: u32, a: u32, b: u32) -> u32 {
    (a & mask) | (b & !mask)
}

/// The low half twice.
pub fn duplicate_low(pair: u32) -> u32 {
    (pair & 0xFFFF) * 0x1_0001
}

/// The high half twice.
pub fn duplicate_high(pair: u32) -> u32 {
    (pair >> 16) * 0x1_0001
}

fn e4m3_to_f16(code: u8) -> u16 {
    let (sign, magnitude) = (u16::from(code & 0x80) << 8, code & 0x7F);
    let value = match (magnitude >> 3, magnitude & 7) {
        (15, 7) => return NAN16,
        (0, mantissa) => f32::from(mantissa) / 512.0,
        (exponent, mantissa) => (8.0 + f32::from(mantissa)) * f32::from_bits((u32::from(exponent) + 127 - 10) << 23),
    };
    sign | f32_to_f16(value)
}

/// Two e4m3 codes as f16x2.
pub fn e4m3x2_to_f16x2(codes: u16) -> u32 {
    u32::from(e4m3_to_f16(codes as u8)) | u32::from(e4m3_to_f16((codes >> 8) as u8)) << 16
}

fn f32_to_e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7F;
    }
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = f64::from(value.abs()).min(448.0);
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-6);
    let units = (magnitude * f64::from_bits(((1023 + 3 - exponent) as u64) << 52)).round_ties_even() as u8;
    sign | ((((exponent + 6) as u8) << 3) + units)
}

/// Two f32 as e4m3 codes, saturating.
pub fn f32x2_to_e4m3x2(low: f32, high: f32) -> u16 {
    u16::from(f32_to_e4m3(low)) | u16::from(f32_to_e4m3(high)) << 8
}

/// Two E2M1 codes as f16x2.
pub fn e2m1x2_to_f16x2(codes: u8) -> u32 {
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    const VALUES: [u16; 8] = [0, 0x3800, 0x3C00, 0x3E00, 0x4000, 0x4200, 0x4400, 0x4600];
    let value = |code: u8| u32::from(VALUES[usize::from(code & 7)] | u16::from(code & 8) << 12);
    value(codes & 15) | value(codes >> 4) << 16
}

/// The larger value, or NaN.
pub fn max_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return f32::from_bits(NAN);
    }
    // +0 is larger than -0.
    if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

/// The smaller value, or NaN.
pub fn min_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return f32::from_bits(NAN);
    }
    if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

/// a·b + c, rounded once.
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let out = a.mul_add(b, c);
    if out.is_nan() { f32::from_bits(NAN) } else { out }
}

/// Square root, rounded once. Like the host's other f32 arithmetic it may give any NaN.
pub fn sqrt(x: f32) -> f32 {
    x.sqrt()
}
