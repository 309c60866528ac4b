//! Conversions and scalar functions against formulas that share nothing with them: a search in the table of all values of
//! a format.
#![cfg(not(target_arch = "nvptx64"))]

use cuda_std::arch::{Sm80, Sm90, Sm100};
use cuda_std::cvt::{
    bf16_to_f32, e2m1x2_to_f16x2, e4m3x2_to_f16x2, f16_to_f32, f32_to_bf16, f32_to_f16, f32x2_to_bf16x2,
    f32x2_to_e4m3x2, mul_bf16x2, mul_f16x2, permute_bytes,
};
use cuda_std::math::{exp, fma, ln, max_nan, min_nan, sigmoid, softplus, sqrt};

/// All values from +0 upwards by code; the last is where infinity would be if the format went on.
struct Format {
    values: Vec<f64>,
    nan: u32,
    sign: u32,
}

impl Format {
    fn new(exponent_bits: u32, mantissa_bits: u32, codes: u32, nan: u32) -> Self {
        let bias = (1i32 << (exponent_bits - 1)) - 1;
        let value = |code: u32| {
            let (exponent, mantissa) = ((code >> mantissa_bits) as i32, f64::from(code % (1 << mantissa_bits)));
            let unit = f64::from(1u32 << mantissa_bits);
            let (significand, exponent) =
                if exponent == 0 { (mantissa / unit, 1) } else { (1.0 + mantissa / unit, exponent) };
            significand * 2f64.powi(exponent - bias)
        };
        let values = (0..codes).map(value).collect();
        Format { values, nan, sign: 1 << (exponent_bits + mantissa_bits) }
    }

    fn f16() -> Self {
        Format::new(5, 10, 0x7C01, 0x7FFF)
    }

    fn bf16() -> Self {
        Format::new(8, 7, 0x7F81, 0x7FFF)
    }

    /// Up to 448; nothing larger exists.
    fn e4m3() -> Self {
        Format::new(4, 3, 0x7F, 0x7F)
    }

    fn e2m1() -> Self {
        Format::new(2, 1, 8, u32::MAX)
    }

    /// The code of the nearest value, that of an even code if two are as near.
    fn nearest(&self, value: f64) -> u32 {
        if value.is_nan() {
            return self.nan;
        }
        let magnitude = value.abs();
        let above = self.values.partition_point(|&v| v < magnitude);
        let code = if above == self.values.len() {
            above - 1
        } else if self.values[above] == magnitude {
            above
        } else {
            let (down, up) = (magnitude - self.values[above - 1], self.values[above] - magnitude);
            if down < up || (down == up && above % 2 == 1) { above - 1 } else { above }
        };
        code as u32 | if value.is_sign_negative() { self.sign } else { 0 }
    }

    fn value(&self, code: u32) -> f64 {
        let magnitude = (code & (self.sign - 1)) as usize;
        let value = if magnitude + 1 == self.values.len() && self.sign == 0x8000 {
            f64::INFINITY
        } else {
            self.values.get(magnitude).copied().unwrap_or(f64::NAN)
        };
        if code & self.sign != 0 { -value } else { value }
    }
}

/// f32 on and around every value of a format, and around what is half way between neighbours; and many others.
fn inputs(format: &Format) -> impl Iterator<Item = f32> + '_ {
    let near = format.values.windows(2).flat_map(|pair| [pair[0], (pair[0] + pair[1]) / 2.0]).flat_map(|value| {
        let bits = (value as f32).to_bits();
        [bits.saturating_sub(1), bits, bits + 1]
    });
    let special = [0x7F80_0000, 0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0x7F7F_FFFF, 1, 0x0080_0000];
    let spread = (0..0x8000_0000u32).step_by(4099);
    near.chain(special).chain(spread).flat_map(|bits| [bits, bits | 1 << 31]).map(f32::from_bits)
}

/// A linear congruential sequence.
fn random() -> impl Iterator<Item = u32> {
    let mut state = 0x1234_5678_9ABC_DEF1u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    })
}

#[test]
fn f32_to_16_bits() {
    let (f16, bf16) = (Format::f16(), Format::bf16());
    for x in inputs(&f16).chain(inputs(&bf16)) {
        assert_eq!(u32::from(f32_to_f16(x)), f16.nearest(f64::from(x)), "{x:e}");
        assert_eq!(u32::from(f32_to_bf16(x)), bf16.nearest(f64::from(x)), "{x:e}");
    }
    assert_eq!(f32_to_f16(65519.996), 0x7BFF);
    assert_eq!(f32_to_f16(65520.0), 0x7C00);
    assert_eq!(f32_to_bf16(f32::MAX), 0x7F80);
    assert_eq!(f32_to_bf16(-0.0), 0x8000);
    assert_eq!(f32_to_bf16(f32::from_bits(0xFF80_0001)), 0x7FFF);
    assert_eq!(f32x2_to_bf16x2(1.0, -2.0), 0xC000_3F80);
}

#[test]
fn f32_from_16_bits() {
    let (f16, bf16) = (Format::f16(), Format::bf16());
    for code in 0..=u16::MAX {
        let (a, b) = (f16_to_f32(code), f16.value(code.into()));
        assert!(f64::from(a).to_bits() == b.to_bits() || (a.to_bits() == 0x7FFF_FFFF && b.is_nan()), "{code:04x}");
        let (a, b) = (bf16_to_f32(code), bf16.value(code.into()));
        assert!(f64::from(a).to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{code:04x}");
    }
}

#[test]
fn e4m3_decodes_every_code_on_every_path() {
    let (e4m3, f16) = (Format::e4m3(), Format::f16());
    let expected = |code: u16| f16.nearest(e4m3.value(code.into()));
    for codes in 0..=u16::MAX {
        let pair = expected(codes & 0xFF) | expected(codes >> 8) << 16;
        assert_eq!(e4m3x2_to_f16x2::<Sm90>(codes), pair, "{codes:04x}");
        assert_eq!(e4m3x2_to_f16x2::<Sm80>(codes), pair, "{codes:04x}");
    }
    assert_eq!(e4m3x2_to_f16x2::<Sm90>(0x7E38), 0x5F00_3C00);
    assert_eq!(e4m3x2_to_f16x2::<Sm80>(0xFF7F), 0x7FFF_7FFF);
}

#[test]
fn e4m3_encodes_every_16_bit_float_and_many_others_on_every_path() {
    let e4m3 = Format::e4m3();
    let sixteen = (0..=u16::MAX).flat_map(|code| [f16_to_f32(code), bf16_to_f32(code)]);
    for (x, y) in sixteen.chain(inputs(&e4m3)).zip(random().map(f32::from_bits)) {
        let expected = e4m3.nearest(f64::from(x)) | e4m3.nearest(f64::from(y)) << 8;
        assert_eq!(u32::from(f32x2_to_e4m3x2::<Sm90>(x, y)), expected, "{x:e} {y:e}");
        assert_eq!(u32::from(f32x2_to_e4m3x2::<Sm80>(x, y)), expected, "{x:e} {y:e}");
    }
    assert_eq!(f32x2_to_e4m3x2::<Sm90>(f32::NEG_INFINITY, -f32::NAN), 0x7FFE);
    assert_eq!(f32x2_to_e4m3x2::<Sm80>(-0.0, 464.0), 0x7E80);
}

#[test]
fn e2m1_decodes_every_code_on_every_path() {
    let (e2m1, f16) = (Format::e2m1(), Format::f16());
    for codes in 0..=u8::MAX {
        let expected = |code: u8| f16.nearest(e2m1.value(code.into()));
        let pair = expected(codes & 15) | expected(codes >> 4) << 16;
        assert_eq!(e2m1x2_to_f16x2::<Sm100>(codes), pair, "{codes:02x}");
        assert_eq!(e2m1x2_to_f16x2::<Sm80>(codes), pair, "{codes:02x}");
    }
    assert_eq!(e2m1x2_to_f16x2::<Sm100>(0xF7), 0xC600_4600);
}

#[test]
fn products_round_once() {
    let (f16, bf16) = (Format::f16(), Format::bf16());
    let check = |a: u32, b: u32| {
        for (format, product) in [(&f16, mul_f16x2 as fn(u32, u32) -> u32), (&bf16, mul_bf16x2)] {
            // At most 22 significant bits and exponents within f64's: exact.
            let half = |a: u32, b: u32| format.nearest(format.value(a) * format.value(b));
            let expected = half(a & 0xFFFF, b & 0xFFFF) | half(a >> 16, b >> 16) << 16;
            assert_eq!(product(a, b), expected, "{a:08x} {b:08x}");
        }
    };
    let mut random = random();
    for _ in 0..1_000_000 {
        check(random.next().expect("endless"), random.next().expect("endless"));
    }
    let corners = [0, 1, 2, 0x3FF, 0x400, 0x80, 0x7F, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7FFF, 0x7E00];
    for a in corners {
        for b in 0..=0xFFFF {
            check(a | (a | 0x8000) << 16, b | b << 16);
        }
    }
}

#[test]
fn bytes_are_chosen_by_nibbles() {
    assert_eq!(permute_bytes(0x3322_1100, 0x7766_5544, 0x3210), 0x3322_1100);
    assert_eq!(permute_bytes(0x3322_1100, 0x7766_5544, 0x7654), 0x7766_5544);
    assert_eq!(permute_bytes(0x3322_1100, 0x7766_5544, 0x0742), 0x0077_4422);
    assert_eq!(permute_bytes(0x80, 0x7F00, 0x00D8), 0x8080_00FF);
}

#[test]
fn clamps_keep_nan_and_order_zeros() {
    let nan = 0x7FFF_FFFF;
    for other in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        for x in [f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001)] {
            for result in [max_nan(x, other), max_nan(other, x), min_nan(x, other), min_nan(other, x)] {
                assert_eq!(result.to_bits(), nan);
            }
        }
    }
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(max_nan(a, b).to_bits(), 0);
        assert_eq!(min_nan(a, b).to_bits(), 0x8000_0000);
    }
    for (a, b) in random().map(f32::from_bits).zip(random().skip(7).map(f32::from_bits)).take(100_000) {
        if !a.is_nan() && !b.is_nan() {
            assert_eq!((min_nan(a, b), max_nan(a, b)), if a < b { (a, b) } else { (b, a) });
        }
    }
    assert_eq!(fma(f32::INFINITY, 0.0, 1.0).to_bits(), nan);
    // Rounded once: the product alone would round to 1 + 2^-11.
    let x = 1.0 + f32::EPSILON * 2048.0;
    assert_eq!(fma(x, x, -(x * x)), f32::EPSILON * f32::EPSILON * 2048.0 * 2048.0 - (x * x - x * x));
}

#[test]
fn exp_is_within_an_ulp() {
    let mut worst = 0f64;
    for bits in (0..0x7F80_0000u32).step_by(1021).flat_map(|bits| [bits, bits | 1 << 31]) {
        let x = f32::from_bits(bits);
        let (got, exact) = (exp(x), f64::from(x).exp());
        if x.abs() > 110.0 {
            assert_eq!(got, if x > 0.0 { f32::INFINITY } else { 0.0 });
        } else if exact < f64::from(f32::MAX) && (-104.0..=88.72284).contains(&x) {
            let last_place = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            worst = worst.max((f64::from(got) - exact).abs() / last_place);
        }
    }
    assert!(worst < 1.0, "{worst}");
    assert_eq!(exp(f32::NAN).to_bits(), 0x7FFF_FFFF);
    assert_eq!((exp(88.73), exp(-104.1), exp(0.0)), (f32::INFINITY, 0.0, 1.0));
    assert_eq!((sigmoid(0.0), sigmoid(f32::NEG_INFINITY), sigmoid(f32::INFINITY)), (0.5, 0.0, 1.0));
}

#[test]
fn ln_is_within_an_ulp() {
    // Near 1 the result is small and the error counts in its own last places.
    let near_one = (0x3F70_0000..0x3F90_0000u32).step_by(7);
    let mut worst = 0f64;
    for x in (1..0x7F80_0000u32).step_by(1021).chain(near_one).map(f32::from_bits) {
        let (got, exact) = (ln(x), f64::from(x).ln());
        let last_place = f64::from((exact.abs() as f32).next_up()) - f64::from(exact.abs() as f32);
        worst = worst.max((f64::from(got) - exact).abs() / last_place);
    }
    assert!(worst < 1.0, "{worst}");
    assert_eq!((ln(1.0).to_bits(), ln(0.0), ln(-0.0)), (0, f32::NEG_INFINITY, f32::NEG_INFINITY));
    assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    for x in [f32::NAN, -f32::NAN, -1.0, f32::NEG_INFINITY, -f32::from_bits(1)] {
        assert_eq!(ln(x).to_bits(), 0x7FFF_FFFF);
    }
}

#[test]
fn softplus_and_sqrt() {
    for x in (0..=4000).map(|i| i as f32 / 50.0 - 40.0) {
        let exact = f64::from(x).exp().ln_1p();
        // Below about -17 the sum 1 + e^x has no more of e^x than its last place.
        let got = f64::from(softplus(x));
        assert!((got - exact).abs() <= 2e-7 * exact.max(1.0), "{x}: {got}, not {exact}");
    }
    assert_eq!((softplus(20.5), softplus(f32::INFINITY), softplus(f32::NEG_INFINITY)), (20.5, f32::INFINITY, 0.0));
    assert_eq!(softplus(f32::NAN).to_bits(), 0x7FFF_FFFF);
    assert!([f32::NAN, -1.0, f32::NEG_INFINITY].map(sqrt).iter().all(|root| root.is_nan()));
    assert_eq!((sqrt(2.0), sqrt(-0.0).to_bits(), sqrt(f32::INFINITY)), (f32::sqrt(2.0), 1 << 31, f32::INFINITY));
    // sqrt of a subnormal: 2^-149 = 2·2^-150.
    assert_eq!(sqrt(f32::from_bits(1)), f32::from_bits(0x1A35_04F3));
}
