//! Formats and packing. Every expectation here is written down or found by search, not by the code under test.

use megamoe::formats::fp4::{alphas_from_processed, up_gate_biases};
use megamoe::formats::quantize::{
    amax, global_scale, quantize, quantize_expert, quantize_expert_mxfp4, quantize_mxfp4,
};
use megamoe::formats::{
    DenseExpert, DenseExperts, DenseMatrix, ExpertShape, ExpertTensors, Fp4Buffers, Fp4Experts, Fp4Matrix, GlobalScale,
    LinearScales, RouterWeights, SharedExpert, SwizzledScales, e2m1, e4m3, e8m0, float16,
};
use megamoe::{Error, Routing, Scoring, WeightFormat};
use proptest::prelude::*;

/// Magnitudes of E2M1.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Magnitudes of the E4M3 codes 0..=0x7E, by walking up: the step doubles with each binade but the first, which has
/// the step of the subnormals.
fn e4m3_magnitudes() -> Vec<f64> {
    let (mut value, mut step) = (0.0, 1.0 / 512.0);
    (0..0x7F)
        .map(|code| {
            let this = value;
            value += step;
            if code > 8 && code % 8 == 7 {
                step *= 2.0;
            }
            this
        })
        .collect()
}

/// Code of the nearest magnitude, the even one of two that are equally near.
fn nearest(magnitudes: &[f64], value: f64) -> u8 {
    // Far beyond the largest magnitude all distances would round to the same number.
    let a = value.abs().min(1e6);
    let distance = |code: usize| (magnitudes[code] - a).abs();
    (0..magnitudes.len())
        .min_by(|&x, &y| distance(x).total_cmp(&distance(y)).then((x % 2).cmp(&(y % 2))))
        .expect("codes") as u8
}

fn f16_value(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 0 { magnitude } else { -magnitude }
}

/// Every bf16 and every f16 value, as f32.
fn all_16_bit_values() -> impl Iterator<Item = f32> {
    let bf16 = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
    bf16.chain((0..=u16::MAX).map(|bits| f16_value(bits) as f32))
}

fn encode_mismatches(magnitudes: &[f64], sign: u8, nan: u8, encode: impl Fn(f32) -> u8) -> usize {
    all_16_bit_values()
        .filter(|&value| {
            let expected = match (value.is_nan(), value.is_sign_negative()) {
                (true, _) => nan,
                (false, true) => nearest(magnitudes, f64::from(value)) | sign,
                (false, false) => nearest(magnitudes, f64::from(value)),
            };
            encode(value) != expected
        })
        .count()
}

#[test]
fn e2m1_all_codes() {
    for (code, magnitude) in E2M1.into_iter().enumerate() {
        assert_eq!(f64::from(e2m1::decode(code as u8)), magnitude);
        assert_eq!(e2m1::decode(code as u8 | 8).to_bits(), (-magnitude as f32).to_bits());
        assert_eq!(e2m1::encode(magnitude as f32), code as u8);
        assert_eq!(e2m1::encode(-magnitude as f32), code as u8 | 8);
    }
    for byte in 0..=u8::MAX {
        let (even, odd) = e2m1::unpack(byte);
        assert_eq!((even, odd), (byte % 16, byte / 16));
        assert_eq!(e2m1::pack(even, odd), byte);
    }
}

#[test]
fn e2m1_encodes_every_16_bit_value_to_the_nearest() {
    assert_eq!(encode_mismatches(&E2M1, 8, 7, e2m1::encode), 0);
    // The check must see a tie that goes the wrong way: 2.5 to 3.
    assert!(encode_mismatches(&E2M1, 8, 7, |x| if x == 2.5 { 5 } else { e2m1::encode(x) }) > 0);
}

#[test]
fn e4m3_all_codes() {
    let magnitudes = e4m3_magnitudes();
    assert_eq!((magnitudes[8], magnitudes[0x38], magnitudes[0x7E]), (1.0 / 64.0, 1.0, 448.0));
    for (code, &magnitude) in magnitudes.iter().enumerate() {
        let code = code as u8;
        assert_eq!(e4m3::decode(code).to_bits(), (magnitude as f32).to_bits());
        assert_eq!(e4m3::decode(code | 0x80).to_bits(), (-magnitude as f32).to_bits());
        assert_eq!(e4m3::encode(e4m3::decode(code)), code);
        assert_eq!(e4m3::encode(e4m3::decode(code | 0x80)), code | 0x80);
    }
    for nan in [0x7F, 0xFF] {
        assert_eq!(e4m3::decode(nan).to_bits(), 0x7FFF_FFFF);
    }
    assert_eq!((0..=u8::MAX).filter(|&code| e4m3::is_nan(code)).collect::<Vec<_>>(), [0x7F, 0xFF]);
}

#[test]
fn e4m3_encodes_every_16_bit_value_to_the_nearest() {
    let magnitudes = e4m3_magnitudes();
    assert_eq!(encode_mismatches(&magnitudes, 0x80, 0x7F, e4m3::encode), 0);
    // The check must see subnormals that are flushed, and a NaN that saturates.
    let flushing = |x: f32| if x.abs() < 1.0 / 64.0 { e4m3::encode(x) & 0x80 } else { e4m3::encode(x) };
    assert!(encode_mismatches(&magnitudes, 0x80, 0x7F, flushing) > 0);
    assert!(encode_mismatches(&magnitudes, 0x80, 0x7F, |x| e4m3::encode(if x.is_nan() { 448.0 } else { x })) > 0);
}

#[test]
fn e4m3_encode_special_values() {
    for (value, code) in [
        (0.0, 0x00),
        (-0.0, 0x80),
        (448.0, 0x7E),
        (464.0, 0x7E),
        (1e30, 0x7E),
        (f32::INFINITY, 0x7E),
        (f32::NEG_INFINITY, 0xFE),
        (-500.0, 0xFE),
        (f32::NAN, 0x7F),
        (-f32::NAN, 0x7F),
        (f32::MIN_POSITIVE / 2.0, 0x00),
        (1.0 / 1024.0, 0x00),
        (1.5 / 512.0, 0x02),
        (f32::from_bits(0x3A80_0001), 0x01),
    ] {
        assert_eq!(e4m3::encode(value), code, "{value}");
    }
}

proptest! {
    #[test]
    fn e4m3_encodes_any_f32_to_the_nearest(bits in any::<u32>()) {
        let value = f32::from_bits(bits);
        prop_assume!(!value.is_nan());
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        prop_assert_eq!(e4m3::encode(value), nearest(&e4m3_magnitudes(), f64::from(value)) | sign);
    }
}

/// Rounding to a 16-bit float is right if it is right at, just below and just above every midpoint of neighbours.
fn rounding_faults(max: u16, value: impl Fn(u16) -> f64, from_f32: impl Fn(f32) -> u16) -> usize {
    let mut faults = 0;
    for bits in 0..=max {
        let (low, step) = (value(bits), value(bits) - value(bits.saturating_sub(1)));
        // Beyond the largest finite value the grid goes on, and its next point stands for infinity.
        let high = if bits == max { low + step } else { value(bits + 1) };
        let middle = ((low + high) / 2.0) as f32;
        assert_eq!(f64::from(middle), (low + high) / 2.0, "a midpoint is exact");
        let even = if bits % 2 == 0 { bits } else { bits + 1 };
        for (x, expected) in
            [(low as f32, bits), (middle.next_down(), bits), (middle, even), (middle.next_up(), bits + 1)]
        {
            faults += usize::from(from_f32(x) != expected) + usize::from(from_f32(-x) != expected | 0x8000);
        }
    }
    faults
}

#[test]
fn bf16_rounds_to_nearest_even() {
    let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    assert_eq!(rounding_faults(0x7F7F, value, float16::bf16_from_f32), 0);
    assert!(rounding_faults(0x7F7F, value, |x| (x.to_bits() >> 16) as u16) > 0, "truncation must be seen");
}

#[test]
fn f16_rounds_to_nearest_even() {
    assert_eq!(rounding_faults(0x7BFF, f16_value, float16::f16_from_f32), 0);
    assert!(rounding_faults(0x7BFF, f16_value, |x| float16::f16_from_f32(x.next_down())) > 0);
    assert_eq!(float16::f16_from_f32(65520.0), 0x7C00);
    assert_eq!(float16::f16_from_f32(65520f32.next_down()), 0x7BFF);
}

#[test]
fn sixteen_bit_values_widen_exactly_and_nan_is_one() {
    for bits in 0..=u16::MAX {
        let bf16 = f32::from_bits(u32::from(bits) << 16);
        let expected = if bf16.is_nan() { 0x7FFF_FFFF } else { bf16.to_bits() };
        assert_eq!(float16::bf16_to_f32(bits).to_bits(), expected);
        let f16 = f16_value(bits);
        let expected = if f16.is_nan() { 0x7FFF_FFFF } else { (f16 as f32).to_bits() };
        assert_eq!(float16::f16_to_f32(bits).to_bits(), expected);
    }
    for nan in [0x7F80_0001, 0x7FC0_0000, 0xFFC0_0000, 0xFFFF_FFFF, 0xFF80_0001u32].map(f32::from_bits) {
        assert_eq!((float16::bf16_from_f32(nan), float16::f16_from_f32(nan)), (0x7FFF, 0x7FFF));
        assert_eq!(float16::canonical_f32(nan).to_bits(), 0x7FFF_FFFF);
    }
}

// ---- scales -------------------------------------------------------------------------------------------------------

#[test]
fn b2_swizzle_of_rows_and_columns_off_the_tile() {
    let bytes: Vec<u8> = (0..320 * 22).map(|i| (i % 255 + 1) as u8).collect();
    let linear = LinearScales::new("s", 320, 22, bytes.clone()).unwrap();
    let swizzled = SwizzledScales::swizzle("s", std::slice::from_ref(&linear)).unwrap();
    assert_eq!(swizzled.bytes().len(), 9216);
    for (row, col, offset) in [(1, 0, 16), (32, 0, 4), (33, 5, 533), (127, 21, 3069), (128, 0, 3072), (319, 21, 9205)] {
        assert_eq!(swizzled.bytes()[offset], bytes[row * 22 + col], "({row}, {col})");
        assert_eq!(swizzled.get(0, row, col), bytes[row * 22 + col]);
    }
    assert_eq!(swizzled.bytes().iter().filter(|&&byte| byte == 0).count(), 9216 - 320 * 22, "padding is 0");
    assert_eq!(swizzled.unswizzle(0), linear);
    // Eight columns, no padding of columns.
    let bytes: Vec<u8> = (0..256 * 8).map(|i| (i * 7 % 251) as u8).collect();
    let linear = LinearScales::new("s", 256, 8, bytes.clone()).unwrap();
    let swizzled = SwizzledScales::swizzle("s", &[linear]).unwrap();
    assert_eq!(swizzled.bytes()[1042], bytes[129 * 8 + 2]);
    assert_eq!(swizzled.bytes()[2047], bytes[255 * 8 + 7]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn swizzle_is_a_bijection(experts in 1usize..4, rows in 1usize..400, cols in 1usize..40, seed in any::<u64>()) {
        let byte = |i: usize| (seed.wrapping_mul(i as u64 * 2 + 1) >> 32) as u8 | 1;
        let matrices: Vec<LinearScales> = (0..experts)
            .map(|e| LinearScales::new("s", rows, cols, (0..rows * cols).map(|i| byte(e * 31 + i)).collect::<Vec<_>>()).unwrap())
            .collect();
        let swizzled = SwizzledScales::swizzle("s", &matrices).unwrap();
        prop_assert_eq!(swizzled.stride(), rows.div_ceil(128) * 128 * cols.div_ceil(4) * 4);
        prop_assert_eq!(swizzled.bytes().len(), experts * swizzled.stride());
        // No scale is 0, so as many bytes are set as there are scales only if no two share a place.
        prop_assert_eq!(swizzled.bytes().iter().filter(|&&b| b != 0).count(), experts * rows * cols);
        for (e, matrix) in matrices.iter().enumerate() {
            prop_assert_eq!(&swizzled.unswizzle(e), matrix);
        }
        let again = SwizzledScales::from_bytes("s", swizzled.bytes().to_vec(), experts, rows, cols).unwrap();
        prop_assert_eq!(again, swizzled);
    }
}

#[test]
fn scales_of_a_wrong_length_name_the_buffer() {
    let name = |error| match error {
        Error::BufferLength { name, given, needed } => (name, given, needed),
        other => panic!("{other}"),
    };
    assert_eq!(name(LinearScales::new("up", 3, 4, vec![0; 11]).unwrap_err()), ("up", 11, 12));
    assert_eq!(name(SwizzledScales::from_bytes("s2", vec![0; 511], 1, 3, 4).unwrap_err()), ("s2", 511, 512));
    for error in [
        SwizzledScales::from_bytes("s13", vec![], usize::MAX, 128, 4).unwrap_err(),
        SwizzledScales::from_bytes("s13", vec![], 1, usize::MAX, 4).unwrap_err(),
        SwizzledScales::zeroed("s13", 2, usize::MAX / 256, usize::MAX / 4).unwrap_err(),
        SwizzledScales::zeroed("s13", 1, 1 << 61, 4).unwrap_err(),
        SwizzledScales::zeroed("s13", 1, 1 << 58, 4).unwrap_err(),
        LinearScales::new("s13", usize::MAX, 2, vec![]).unwrap_err(),
        SwizzledScales::swizzle("s13", &[]).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Argument { name: "s13", .. }), "{error}");
    }
}

// ---- the packer, on the probe of the public bug reports -----------------------------------------------------------

const E: usize = 4;
const K: usize = 1024;
const I: usize = 128;
const H: usize = 128;

/// A matrix of zeros with all block scales 1, and the bytes that are set in it.
struct Zeros {
    rows: usize,
    cols: usize,
    codes: Vec<(usize, u8)>,
    scales: Vec<(usize, u8)>,
    global: GlobalScale,
}

impl Zeros {
    fn new(rows: usize, cols: usize, first_byte: u8, global: GlobalScale) -> Self {
        Zeros { rows, cols, codes: vec![(0, first_byte)], scales: vec![], global }
    }

    fn build(&self) -> Fp4Matrix<'static> {
        let mut codes = vec![0; self.rows * self.cols / 2];
        let mut scales = vec![0x38; self.rows * self.cols / 16];
        self.codes.iter().for_each(|&(at, byte)| codes[at] = byte);
        self.scales.iter().for_each(|&(at, byte)| scales[at] = byte);
        let scales = LinearScales::new("scales", self.rows, self.cols / 16, scales).unwrap();
        Fp4Matrix::new(self.rows, self.cols, codes, scales, self.global).unwrap()
    }
}

const ONE: GlobalScale = GlobalScale::Multiplier(1.0);

/// Gate, up and down of the probe's experts.
fn probe() -> [Zeros; 3] {
    [Zeros::new(I, K, 0x06, ONE), Zeros::new(I, K, 0x01, ONE), Zeros::new(H, I, 0x02, ONE)]
}

fn pack(parts: &[Zeros; 3]) -> Fp4Experts {
    let [gate, up, down] = parts.each_ref().map(Zeros::build);
    Fp4Experts::pack(&vec![ExpertTensors { gate, up, down }; E]).unwrap()
}

/// out[0] of one token with x = `x` from k = 0 on, routed to expert 1, read from the packed bytes by the published
/// layout: [up; gate] rows, low nibble first, 128x4 swizzle.
fn probe_out(experts: &Fp4Experts, x: &[f64]) -> f32 {
    let e4m3 = e4m3_magnitudes();
    let dot = |codes: &[u8], scales: &[u8], cols: usize, expert: usize, rows: usize, row: usize, x: &[f64]| -> f64 {
        let blocks = cols / 16;
        let stride = rows.div_ceil(128) * 128 * blocks;
        x.iter()
            .enumerate()
            .map(|(k, x)| {
                let byte = codes[(expert * rows + row) * cols / 2 + k / 2];
                let code = if k % 2 == 0 { byte & 15 } else { byte >> 4 };
                let c = k / 16;
                let at = (row / 128 * (blocks / 4) + c / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + c % 4;
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                sign * E2M1[usize::from(code & 7)] * e4m3[usize::from(scales[expert * stride + at])] * x
            })
            .sum()
    };
    let [up_alpha, gate_alpha] = experts.alpha1()[1].map(f64::from);
    let h: Vec<f64> = (0..I)
        .map(|row| {
            let up = up_alpha * dot(experts.w13(), experts.s13().bytes(), K, 1, 2 * I, row, x);
            let gate = gate_alpha * dot(experts.w13(), experts.s13().bytes(), K, 1, 2 * I, I + row, x);
            gate / (1.0 + (-gate).exp()) * up
        })
        .collect();
    (f64::from(experts.alpha2()[1]) * dot(experts.w2(), experts.s2().bytes(), I, 1, H, 0, &h)) as f32
}

#[test]
fn probe_gives_128() {
    assert_eq!(probe_out(&pack(&probe()), &[8.0]), 128.0);
}

#[test]
fn a1_each_half_has_its_own_global_scale() {
    let mut parts = probe();
    parts[1].global = GlobalScale::Multiplier(0.5);
    let experts = pack(&parts);
    assert_eq!(experts.alpha1(), [[0.5, 1.0]; E]);
    assert_eq!(probe_out(&experts, &[8.0]), 64.0);
}

#[test]
fn a3_divisor_and_multiplier_give_the_same_bits() {
    let mut results = Vec::new();
    for global in [GlobalScale::Divisor(4.0), GlobalScale::Multiplier(0.25)] {
        let mut parts = probe();
        parts[0].global = global;
        parts[1].global = global;
        let experts = pack(&parts);
        assert_eq!(probe_out(&experts, &[32.0]), 128.0);
        results.push(experts);
    }
    assert_eq!(results[0], results[1]);
}

#[test]
fn a5_missing_scales_are_named_with_all_experts() {
    let bad = [0.125, 0.0, f32::NAN, f32::INFINITY];
    match alphas_from_processed(&[1.0; 4], &bad).unwrap_err() {
        Error::Experts { name: "input_scale", experts, .. } => assert_eq!(experts, [1, 2, 3]),
        other => panic!("{other}"),
    }
    assert_eq!(alphas_from_processed(&[0.25, 0.0], &[0.125, 2.0]).unwrap(), [2.0, 0.0]);

    let with_alpha1 = |alpha1: [f32; 4]| {
        let experts = pack(&probe());
        let shape = experts.shape();
        let alpha1 = alpha1.map(|alpha| [alpha, alpha]).to_vec();
        Fp4Experts::new(shape, Fp4Buffers { alpha1, ..experts.into_buffers() })
    };
    match with_alpha1([1.0, 1.0, f32::NAN, f32::INFINITY]).unwrap_err() {
        Error::Experts { name: "alpha1", experts, .. } => assert_eq!(experts, [2, 3]),
        other => panic!("{other}"),
    }
    let dead = with_alpha1([1.0, 0.0, 1.0, 1.0]).expect("alpha 0 is a dead expert");
    assert_eq!(probe_out(&dead, &[8.0]), 0.0);

    // The packer takes no scale that a checkpoint cannot mean, and says of which experts.
    let [gate, up, down] = probe().map(|part| part.build());
    let mut experts = vec![ExpertTensors { gate, up, down }; E];
    for (expert, global) in [(1, GlobalScale::Divisor(0.0)), (3, GlobalScale::Divisor(f32::NAN))] {
        experts[expert].up = Zeros::new(I, K, 1, global).build();
    }
    match Fp4Experts::pack(&experts).unwrap_err() {
        Error::Experts { name: "weight_global_scale", experts, problem } => {
            assert_eq!(experts, [1, 3]);
            assert!(problem.contains("up"), "{problem}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a7_subnormal_block_scale() {
    let mut parts = probe();
    parts[1] = Zeros { scales: vec![(0, 0x01)], ..Zeros::new(I, K, 0x06, ONE) };
    assert_eq!(probe_out(&pack(&parts), &[8.0]), 2.0);
    for (code, value) in [(0x01, 1.0 / 512.0), (0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x80, -0.0), (0xB8, -1.0)] {
        assert_eq!(e4m3::decode(code).to_bits(), f32::to_bits(value));
    }
}

#[test]
fn a_nan_block_scale_makes_its_block_nan_and_no_other() {
    for nan in [0x7F, 0xFF] {
        let matrix = Zeros { scales: vec![(1, nan)], ..Zeros::new(I, K, 0x96, ONE) }.build();
        let weights = matrix.dequantize();
        assert!(weights[16..32].iter().all(|weight| weight.to_bits() == 0x7FFF_FFFF), "{:?}", &weights[16..32]);
        assert_eq!(weights.iter().filter(|weight| weight.is_nan()).count(), 16);
        assert_eq!(weights[..2], [4.0, -0.5]);
    }
}

#[test]
fn b1_up_comes_first_in_codes_and_scales() {
    let mut parts = probe();
    parts[1] = Zeros::new(I, K, 0x09, ONE);
    assert_eq!(probe_out(&pack(&parts), &[8.0]), -128.0);
    parts[1].scales = vec![(0, 0x30)];
    assert_eq!(probe_out(&pack(&parts), &[8.0]), -64.0);
}

#[test]
fn b5_padding_rule_of_the_scales_is_that_of_the_layout() {
    let shape = ExpertShape { experts: 2, hidden: 64, intermediate: 1856, output: 64 };
    let scales = |rows: usize| SwizzledScales::from_bytes("s13", vec![0; 2 * rows * 4], 2, 3712, 4);
    let buffers = |s13| Fp4Buffers {
        format: WeightFormat::Nvfp4,
        b13: None,
        b2: None,
        w13: vec![0; 2 * 3712 * 32],
        s13,
        alpha1: vec![[1.0; 2]; 2],
        w2: vec![0; 2 * 64 * 928],
        s2: SwizzledScales::zeroed("s2", 2, 64, 116).unwrap(),
        alpha2: vec![1.0; 2],
    };
    Fp4Experts::new(shape, buffers(scales(3712).unwrap())).unwrap();
    let error = scales(3840).unwrap_err();
    assert!(matches!(error, Error::BufferLength { name: "s13", given: 30720, needed: 29696 }), "{error}");
    let wide = SwizzledScales::from_bytes("s13", vec![0; 2 * 3840 * 4], 2, 3840, 4).unwrap();
    let error = Fp4Experts::new(shape, buffers(wide)).unwrap_err();
    assert!(matches!(error, Error::Argument { name: "s13", .. }) && error.to_string().contains("3840"), "{error}");
}

#[test]
fn b7_low_nibble_is_the_even_element() {
    let mut parts = probe();
    parts[1] = Zeros::new(I, K, 0x24, ONE);
    assert_eq!(probe_out(&pack(&parts), &[8.0, 0.0]), 512.0);
    assert_eq!(parts[1].build().dequantize()[..3], [2.0, 1.0, 0.0]);
}

#[test]
fn wrong_shapes_and_lengths_name_the_argument() {
    let good = pack(&probe());
    let shape = good.shape();
    let argument = |shape: ExpertShape| match Fp4Experts::new(shape, good.clone().into_buffers()).unwrap_err() {
        Error::Argument { name, .. } => name,
        other => panic!("{other}"),
    };
    for experts in [0, 4097, usize::MAX] {
        assert_eq!(argument(ExpertShape { experts, ..shape }), "experts");
    }
    for size in [0, 8, 1000, usize::MAX] {
        assert_eq!(argument(ExpertShape { hidden: size, ..shape }), "hidden");
        assert_eq!(argument(ExpertShape { intermediate: size, ..shape }), "intermediate");
    }
    assert_eq!(argument(ExpertShape { output: 0, ..shape }), "output");
    assert_eq!(argument(ExpertShape { hidden: usize::MAX - 15, ..shape }), "w13");
    assert_eq!(argument(ExpertShape { output: usize::MAX, ..shape }), "w2");

    let with = |change: &dyn Fn(&mut Fp4Buffers)| {
        let mut buffers = good.clone().into_buffers();
        change(&mut buffers);
        match Fp4Experts::new(shape, buffers).unwrap_err() {
            Error::BufferLength { name, .. } | Error::Argument { name, .. } | Error::Experts { name, .. } => name,
            other => panic!("{other}"),
        }
    };
    assert_eq!(with(&|b| b.w13.truncate(b.w13.len() - 1)), "w13");
    assert_eq!(with(&|b| b.w2.push(0)), "w2");
    assert_eq!(with(&|b| b.alpha1.truncate(3)), "alpha1");
    assert_eq!(with(&|b| b.alpha2.push(1.0)), "alpha2");
    assert_eq!(with(&|b| b.alpha2[2] = f32::NEG_INFINITY), "alpha2");
    assert_eq!(with(&|b| b.alpha1[0][1] = f32::NAN), "alpha1");
    assert_eq!(with(&|b| std::mem::swap(&mut b.s13, &mut b.s2)), "s13");
    assert_eq!(with(&|b| b.s2 = b.s13.clone()), "s2");

    let [gate, up, down] = probe().map(|part| part.build());
    let tall = Zeros::new(I + 16, K, 0, ONE).build();
    let expert = ExpertTensors { gate, up, down };
    let odd = ExpertTensors { up: tall, ..expert.clone() };
    match Fp4Experts::pack(&[expert.clone(), odd.clone(), expert, odd]).unwrap_err() {
        Error::Experts { name: "up", experts, .. } => assert_eq!(experts, [1, 3]),
        other => panic!("{other}"),
    }
    assert!(Fp4Experts::pack(&[]).is_err());
}

// ---- quantiser ----------------------------------------------------------------------------------------------------

fn bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| float16::bf16_from_f32(value)).collect()
}

#[test]
fn quantiser_by_hand() {
    // amax 2688 makes the global scale 1. Block 0: amax 2688, scale 448. Block 1: amax 6, scale 1.
    // Block 2: zeros of both signs. Block 3: amax 2^-13, below the smallest scale's reach.
    let mut weights = vec![0f32; 64];
    weights[0] = 2688.0;
    weights[1] = -224.0;
    weights[2] = -100.0;
    weights[16..24].copy_from_slice(&[6.0, 5.0, 2.5, 0.25, -0.25, -0.75, 1.75, -3.5]);
    weights[32] = -0.0;
    weights[48] = -(0.5f32.powi(13));
    let matrix = quantize("w", &bf16(&weights), 2, 32, global_scale(2688.0)).unwrap();
    assert_eq!(matrix.global(), GlobalScale::Multiplier(1.0));
    assert_eq!(matrix.scales().bytes(), [0x7E, 0x38, 0x00, 0x01]);
    let mut codes = [0u8; 32];
    codes[0] = 0x97; // 6, then -224/448 = -0.5
    codes[1] = 0x08; // -100/448 rounds to -0
    codes[8..12].copy_from_slice(&[0x67, 0x04, 0xA8, 0xE4]);
    codes[24] = 0x08; // -2^-13/2^-9 = -1/16 rounds to -0
    assert_eq!(matrix.codes(), codes);
    assert_eq!(matrix.dequantize()[..2], [2688.0, -224.0]);
}

#[test]
fn quantiser_refuses_what_it_cannot_represent() {
    let argument = |result: megamoe::Result<_>| match result.map(|_: Fp4Matrix| ()).unwrap_err() {
        Error::Argument { name, .. } | Error::BufferLength { name, .. } => name,
        other => panic!("{other}"),
    };
    assert_eq!(argument(quantize("gate", &bf16(&[f32::NAN; 16]), 1, 16, 1.0)), "gate");
    assert_eq!(argument(quantize("gate", &bf16(&[f32::INFINITY; 16]), 1, 16, 1.0)), "gate");
    assert_eq!(argument(quantize("gate", &[0; 15], 1, 16, 1.0)), "gate");
    assert_eq!(argument(quantize("gate", &[0; 24], 1, 24, 1.0)), "cols");
    for global in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(argument(quantize("gate", &[0; 16], 1, 16, global)), "global");
    }
    assert!(quantize_expert(&[], &[], &[], 16, 0).is_err());
    assert!(quantize_expert(&[0; 256], &[0; 256], &[0; 250], 16, 16).is_err());
}

proptest! {
    #[test]
    fn quantised_weights_are_near_and_zeros_stay(
        gate in prop::collection::vec(-4.0f32..4.0, 16 * 32),
        up in prop::collection::vec(-0.5f32..0.5, 16 * 32),
        zero_block in 0usize..32,
    ) {
        let mut gate = bf16(&gate);
        gate[zero_block * 16..][..16].fill(0);
        let up = bf16(&up);
        let expert = quantize_expert(&gate, &up, &gate, 32, 16).unwrap();
        prop_assert_eq!(expert.gate.global(), expert.up.global());
        prop_assert_eq!(
            expert.gate.global().stored(),
            amax("gate", &gate).unwrap().max(amax("up", &up).unwrap()) / 2688.0
        );
        prop_assert_eq!(expert.gate.scales().bytes()[zero_block], 0);
        for (matrix, source) in [(&expert.gate, &gate), (&expert.up, &up), (&expert.down, &gate)] {
            for (block, source) in matrix.dequantize().chunks(16).zip(source.chunks(16)) {
                let source: Vec<f32> = source.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect();
                let block_amax = source.iter().fold(0f32, |a, x| a.max(x.abs()));
                for (q, w) in block.iter().zip(&source) {
                    // Half the widest step (2 of 6), the scale's own rounding (1/16), and the smallest scale's reach.
                    let bound = block_amax * (1.0 / 6.0 + 1.0 / 15.0) + matrix.global().stored() / 512.0;
                    prop_assert!((q - w).abs() <= bound, "{q} for {w}, largest {block_amax}");
                }
            }
        }
    }

    #[test]
    fn unpacking_gives_what_was_packed(seed in any::<u64>(), experts in 1usize..4, i in 1usize..10, k in 1usize..6, h in 1usize..20) {
        let mut state = seed | 1;
        let mut byte = || { state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); (state >> 56) as u8 };
        let (i, k) = (i * 16, k * 16);
        let mut matrix = |rows: usize, cols: usize| {
            let codes: Vec<u8> = (0..rows * cols / 2).map(|_| byte()).collect();
            let scales: Vec<u8> = (0..rows * cols / 16).map(|_| byte()).collect();
            let global = GlobalScale::Multiplier(f32::from(byte()) + 0.5);
            Fp4Matrix::new(rows, cols, codes, LinearScales::new("s", rows, cols / 16, scales).unwrap(), global).unwrap()
        };
        let tensors: Vec<ExpertTensors> =
            (0..experts).map(|_| ExpertTensors { gate: matrix(i, k), up: matrix(i, k), down: matrix(h, i) }).collect();
        let packed = Fp4Experts::pack(&tensors).unwrap();
        prop_assert_eq!(packed.shape(), ExpertShape { experts, hidden: k, intermediate: i, output: h });
        for (e, expert) in tensors.iter().enumerate() {
            prop_assert_eq!(&packed.unpack(e), expert);
        }
    }
}

// ---- MXFP4 --------------------------------------------------------------------------------------------------------

#[test]
fn e8m0_all_bytes() {
    for byte in 0..255u8 {
        assert_eq!(f64::from(e8m0::decode(byte)), 2f64.powi(i32::from(byte) - 127), "{byte}");
    }
    assert_eq!(e8m0::decode(255).to_bits(), 0x7FFF_FFFF);
    assert_eq!(e8m0::decode(e8m0::ONE), 1.0);
    // Products with all codes are f16 numbers in this range, and not all of them just outside.
    let exact = |byte: u8| {
        E2M1.into_iter().all(|code| {
            let product = code * 2f64.powi(i32::from(byte) - 127);
            product.abs() <= 65504.0 && f16_value(float16::f16_from_f32(product as f32)) == product
        })
    };
    let range = e8m0::EXACT_IN_F16;
    assert!(!exact(range.start() - 1) && !exact(range.end() + 1));
    assert!(range.into_iter().all(exact));
}

/// The rule of the format's standard by search: the largest power of two that is at most the largest magnitude, over 4.
fn mxfp4_scale(amax: f64) -> u8 {
    if amax == 0.0 {
        return 127;
    }
    (0..255u8).rev().find(|&byte| 4.0 * 2f64.powi(i32::from(byte) - 127) <= amax).unwrap_or(0)
}

#[test]
fn mxfp4_quantiser_by_hand() {
    let mut weights = vec![0f32; 5 * 32];
    // Largest 6: scale 1. Ties to the even code, both signs, -0.
    weights[..10].copy_from_slice(&[6.0, 5.0, 2.5, 0.25, -0.25, -0.75, 1.75, -3.5, -0.0, 0.0]);
    // Largest 7.5, still scale 1: it saturates at 6. 8 would be scale 2.
    weights[32..34].copy_from_slice(&[7.5, -7.0]);
    weights[64..66].copy_from_slice(&[8.0, -1.0]);
    // The smallest bf16, 2^-133: scale 2^-127, of which it is 1/64. And the largest, 255·2^120: scale 2^125.
    weights[96] = f32::from_bits(0x0001_0000);
    weights[97] = f32::from_bits(0x0020_0000);
    weights[128] = f32::from_bits(0x7F7F_0000);
    let matrix = quantize_mxfp4("w", &bf16(&weights), 1, 160).unwrap();
    assert_eq!(matrix.format(), WeightFormat::Mxfp4);
    assert_eq!(matrix.scales().bytes(), [127, 127, 128, 0, 252]);
    let mut codes = [0u8; 80];
    codes[..5].copy_from_slice(&[0x67, 0x04, 0xA8, 0xE4, 0x08]);
    codes[16] = 0xF7;
    codes[32] = 0x96;
    // 2^-133 over 2^-127 rounds to 0; 2^-128 over it is 0.5.
    codes[48] = 0x10;
    codes[64] = 0x07;
    assert_eq!(matrix.codes(), codes);
    assert_eq!(matrix.dequantize()[..2], [6.0, 4.0]);
    assert_eq!(matrix.dequantize()[97].to_bits(), 0x0020_0000);
    let zeros = quantize_mxfp4("w", &bf16(&[0.0, -0.0].repeat(16)), 1, 32).unwrap();
    assert_eq!((zeros.scales().bytes(), zeros.codes()[0]), ([127].as_slice(), 0x80));
}

#[test]
fn mxfp4_quantiser_refuses_what_it_cannot_represent() {
    let argument = |result: megamoe::Result<Fp4Matrix>| match result.unwrap_err() {
        Error::Argument { name, .. } | Error::BufferLength { name, .. } => name,
        other => panic!("{other}"),
    };
    assert_eq!(argument(quantize_mxfp4("gate", &bf16(&[f32::NAN; 32]), 1, 32)), "gate");
    assert_eq!(argument(quantize_mxfp4("gate", &bf16(&[f32::INFINITY; 32]), 1, 32)), "gate");
    assert_eq!(argument(quantize_mxfp4("gate", &[0; 31], 1, 32)), "gate");
    assert_eq!(argument(quantize_mxfp4("gate", &[0; 48], 1, 48)), "cols");
    assert_eq!(argument(quantize_mxfp4("gate", &[], 1, 0)), "cols");
    assert!(quantize_expert_mxfp4(&[], &[], &[], 32, 0).is_err());
}

/// What gpt-oss's files hold: rows of gate and up by turns, and biases in the same manner.
#[test]
fn interleaved_rows_and_biases_come_apart() {
    // Row r has code r mod 16 everywhere and scale 100 + r.
    let codes: Vec<u8> = (0..6).flat_map(|r| [r | r << 4; 32]).collect();
    let scales: Vec<u8> = (0..6).flat_map(|r| [100 + r; 2]).collect();
    let fused = Fp4Matrix::mxfp4(6, 64, codes, LinearScales::new("s", 6, 2, scales).unwrap()).unwrap();
    let [gate, up] = fused.split_interleaved().unwrap();
    for (matrix, rows) in [(&gate, [0u8, 2, 4]), (&up, [1, 3, 5])] {
        assert_eq!((matrix.rows(), matrix.cols(), matrix.format()), (3, 64, WeightFormat::Mxfp4));
        assert_eq!(matrix.codes(), rows.map(|r| [r | r << 4; 32]).concat());
        assert_eq!(matrix.scales().bytes(), rows.map(|r| [100 + r; 2]).concat());
    }
    let odd = Fp4Matrix::mxfp4(3, 32, vec![0; 48], LinearScales::new("s", 3, 1, vec![0; 3]).unwrap()).unwrap();
    assert!(matches!(odd.split_interleaved().unwrap_err(), Error::Argument { name: "rows", .. }));
    // Gate at even, up at odd places; up comes first in b13.
    let biases = up_gate_biases(&[0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0], 2, 2).unwrap();
    assert_eq!(biases, [10.0, 11.0, 0.0, 1.0, 12.0, 13.0, 2.0, 3.0]);
    assert!(up_gate_biases(&[0.0; 7], 2, 2).is_err());
}

/// Sizes, formats, biases and alphas that do not fit are named.
#[test]
fn mxfp4_experts_are_checked() {
    let mx = |rows: usize, cols: usize| {
        let scales = LinearScales::new("s", rows, cols / 32, vec![127; rows * cols / 32]).unwrap();
        Fp4Matrix::mxfp4(rows, cols, vec![0x22; rows * cols / 2], scales).unwrap()
    };
    let nv = |rows: usize, cols: usize| {
        let scales = LinearScales::new("s", rows, cols / 16, vec![0x38; rows * cols / 16]).unwrap();
        Fp4Matrix::new(rows, cols, vec![0; rows * cols / 2], scales, GlobalScale::Multiplier(1.0)).unwrap()
    };
    let name = |error: Error| match error {
        Error::Argument { name, .. } | Error::BufferLength { name, .. } | Error::Experts { name, .. } => name,
        other => panic!("{other}"),
    };
    let expert = || ExpertTensors { gate: mx(32, 64), up: mx(32, 64), down: mx(5, 32) };
    let experts = Fp4Experts::pack(&[expert(), expert()]).unwrap();
    assert_eq!(experts.format(), WeightFormat::Mxfp4);
    assert_eq!((experts.s13().cols(), experts.s2().cols()), (2, 1));
    assert_eq!((experts.alpha1(), experts.alpha2()), ([[1.0; 2]; 2].as_slice(), [1.0; 2].as_slice()));
    assert_eq!(experts.unpack(1), expert());
    experts.check_f16().unwrap();
    // A block of 48 is fine for NVFP4's 16, not for 32.
    let (gate, up) = (mx(48, 64), mx(48, 64));
    let error = Fp4Experts::pack(&[ExpertTensors { gate, up, down: nv(5, 48) }]).unwrap_err();
    assert_eq!(name(error), "intermediate");
    let scales = || LinearScales::new("s", 1, 3, vec![0; 3]).unwrap();
    assert_eq!(name(Fp4Matrix::mxfp4(1, 48, vec![0; 24], scales()).unwrap_err()), "cols");
    assert_eq!(name(Fp4Matrix::mxfp4(1, 64, vec![0; 32], scales()).unwrap_err()), "scales");
    assert_eq!(name(Fp4Matrix::mxfp4(1, 96, vec![0; 32], scales()).unwrap_err()), "codes");
    // Formats may not mix.
    let mixed = ExpertTensors { down: nv(5, 32), ..expert() };
    match Fp4Experts::pack(&[expert(), mixed]).unwrap_err() {
        Error::Experts { name: "down", experts, .. } => assert_eq!(experts, [1]),
        other => panic!("{other}"),
    }
    // Biases of the right number, finite; an alpha is 1.
    let with = |b13: Vec<f32>, b2: Vec<f32>| experts.clone().with_biases(Some(b13), Some(b2));
    let biased = with(vec![0.5; 128], vec![0.25; 10]).unwrap();
    assert_eq!((biased.b13().unwrap().len(), biased.b2().unwrap().len()), (128, 10));
    assert_eq!(name(with(vec![0.5; 127], vec![0.25; 10]).unwrap_err()), "b13");
    assert_eq!(name(with(vec![0.5; 128], vec![0.25; 11]).unwrap_err()), "b2");
    let mut nan = vec![0.0; 128];
    nan[70] = f32::NAN;
    match with(nan, vec![0.25; 10]).unwrap_err() {
        Error::Experts { name: "b13", experts, .. } => assert_eq!(experts, [1]),
        other => panic!("{other}"),
    }
    let mut buffers = experts.clone().into_buffers();
    buffers.alpha2[1] = 2.0;
    assert_eq!(name(Fp4Experts::new(experts.shape(), buffers).unwrap_err()), "alpha2");
    // A NaN scale is seen.
    let scales = LinearScales::new("s", 1, 2, vec![0x7F, 0xFF]).unwrap();
    assert!(Fp4Matrix::mxfp4(1, 64, vec![0; 32], scales).unwrap().has_nan_scale());
    assert!(!mx(1, 64).has_nan_scale());
}

proptest! {
    #[test]
    fn mxfp4_codes_are_the_nearest_under_the_standards_scale(
        mantissas in prop::collection::vec(-1.0f32..1.0, 64),
        exponents in prop::collection::vec(-6i32..1, 64),
        size in -130i32..120,
    ) {
        let weights: Vec<f32> = mantissas.iter().zip(&exponents).map(|(m, e)| m * 2f32.powi(*e) * 2f32.powi(size)).collect();
        let bits = bf16(&weights);
        let weights: Vec<f64> = bits.iter().map(|&bits| f64::from(f32::from_bits(u32::from(bits) << 16))).collect();
        let matrix = quantize_mxfp4("w", &bits, 2, 32).unwrap();
        for (row, weights) in weights.chunks(32).enumerate() {
            let scale = mxfp4_scale(weights.iter().fold(0.0, |a: f64, w| a.max(w.abs())));
            prop_assert_eq!(matrix.scales().get(row, 0), scale);
            for (i, w) in weights.iter().enumerate() {
                let byte = matrix.codes()[row * 16 + i / 2];
                let code = if i % 2 == 0 { byte & 15 } else { byte >> 4 };
                let wanted = nearest(&E2M1, w / 2f64.powi(i32::from(scale) - 127));
                prop_assert_eq!(code & 7, wanted, "{} under {}", w, scale);
                prop_assert_eq!(code & 8 != 0, w.is_sign_negative());
                let value = f64::from(matrix.dequantize()[row * 32 + i]);
                prop_assert_eq!(value.abs(), E2M1[usize::from(wanted)] * 2f64.powi(i32::from(scale) - 127));
            }
        }
    }
}

// ---- bf16 and fp8 experts -----------------------------------------------------------------------------------------

/// Two experts with biases: hidden 130, intermediate 2, output 129, so that blocks are cut at both edges.
fn dense_experts(fp8: bool) -> Vec<DenseExpert> {
    let matrix = |rows: usize, cols: usize| {
        if fp8 {
            let codes = (0..rows * cols).map(|i| (i % 0x7F) as u8).collect();
            let blocks = rows.div_ceil(128) * cols.div_ceil(128);
            DenseMatrix::Fp8 { codes, scales: (0..blocks).map(|block| 0.3 + block as f32).collect() }
        } else {
            DenseMatrix::Bf16((0..rows * cols).map(|i| (i % 0x7F00) as u16).collect())
        }
    };
    let expert = DenseExpert {
        gate: matrix(2, 130),
        up: matrix(2, 130),
        down: matrix(129, 2),
        biases: Some([vec![0.5; 2], vec![0.25; 2], vec![-1.0; 129]]),
    };
    vec![expert; 2]
}

#[test]
fn fp8_blocks_are_cut_at_the_edges() {
    let codes: Vec<u8> = (0..129 * 130).map(|i| if i % 2 == 0 { 0x38 } else { 0xC0 }).collect();
    let matrix = DenseMatrix::Fp8 { codes, scales: vec![1.0, 2.0, 4.0, 8.0] };
    let values = matrix.dequantize(129, 130).unwrap();
    for (i, value) in values.iter().enumerate() {
        let (row, col) = (i / 130, i % 130);
        let scale = [[1.0, 2.0], [4.0, 8.0]][usize::from(row == 128)][usize::from(col >= 128)];
        assert_eq!(*value, if i % 2 == 0 { scale } else { -2.0 * scale }, "row {row}, column {col}");
    }
    // The product is rounded once.
    let matrix = DenseMatrix::Fp8 { codes: vec![0x39], scales: vec![0.1] };
    assert_eq!(matrix.dequantize(1, 1).unwrap()[0].to_bits(), (1.125f32 * 0.1f32).to_bits());
    let nan = DenseMatrix::Fp8 { codes: vec![0xFF], scales: vec![1.0] };
    assert_eq!(nan.dequantize(1, 1).unwrap()[0].to_bits(), 0x7FFF_FFFF);
    let plain = DenseMatrix::Bf16(vec![0x3F80, 0xC000, 0xFFC1]);
    let bits: Vec<u32> = plain.dequantize(1, 3).unwrap().iter().map(|value| value.to_bits()).collect();
    assert_eq!(bits, [0x3F80_0000, 0xC000_0000, 0x7FFF_FFFF]);
    assert!(plain.dequantize(2, 2).is_err());
}

#[test]
fn dense_experts_are_checked_and_all_bad_ones_listed() {
    for fp8 in [false, true] {
        let experts = DenseExperts::new(130, 2, 129, dense_experts(fp8)).unwrap();
        assert_eq!((experts.hidden(), experts.intermediate(), experts.output()), (130, 2, 129));
        assert_eq!(experts.format().name(), if fp8 { "fp8" } else { "bf16" });
        assert!(experts.has_biases() && experts.into_experts() == dense_experts(fp8));
    }
    /// Error of two experts that `change` was applied to.
    fn fault(fp8: bool, experts: &[usize], change: impl Fn(&mut DenseExpert)) -> (&'static str, Vec<usize>, String) {
        let mut changed = dense_experts(fp8);
        experts.iter().for_each(|&expert| change(&mut changed[expert]));
        match DenseExperts::new(130, 2, 129, changed) {
            Err(Error::Experts { name, experts, problem }) => (name, experts, problem),
            other => panic!("{other:?}"),
        }
    }
    let shorten = |matrix: &mut DenseMatrix| match matrix {
        DenseMatrix::Bf16(bits) => drop(bits.pop()),
        DenseMatrix::Fp8 { codes, .. } => drop(codes.pop()),
    };
    for fp8 in [false, true] {
        let (name, experts, problem) = fault(fp8, &[0, 1], |e| shorten(&mut e.down));
        assert!(name == "down" && experts == [0, 1] && problem.contains("257"), "{problem}");
        let (name, experts, problem) = fault(fp8, &[1], |e| shorten(&mut e.up));
        assert!(name == "up" && experts == [1] && problem.contains("259"), "{problem}");
    }
    let (name, experts, problem) = fault(true, &[1], |e| e.gate = dense_experts(false)[0].gate.clone());
    assert!(name == "gate" && experts == [1] && problem.contains("bf16"), "{problem}");
    let (name, experts, problem) = fault(true, &[0, 1], |e| {
        let DenseMatrix::Fp8 { codes, .. } = &mut e.up else { unreachable!() };
        codes[7] = 0xFF;
    });
    assert!(name == "up" && experts == [0, 1] && problem.contains("0xFF at element 7"), "{problem}");
    for bad in [f32::NAN, f32::INFINITY] {
        let (name, _, problem) = fault(true, &[1], |e| {
            let DenseMatrix::Fp8 { scales, .. } = &mut e.down else { unreachable!() };
            scales[1] = bad;
        });
        assert!(name == "down" && problem.contains("block 1"), "{problem}");
        let (name, _, problem) = fault(false, &[1], |e| e.biases.as_mut().unwrap()[2][128] = bad);
        assert!(name == "biases" && problem.contains("row 128 of down"), "{problem}");
    }
    let (name, _, problem) = fault(true, &[0], |e| {
        let DenseMatrix::Fp8 { scales, .. } = &mut e.gate else { unreachable!() };
        scales.push(1.0);
    });
    assert!(name == "gate" && problem.contains("3 scales, 2 needed"), "{problem}");
    assert_eq!(fault(false, &[1], |e| e.biases = None).1, [1]);
    assert_eq!(fault(false, &[0], |e| e.biases = None).1, [1]);
    let (_, _, problem) = fault(false, &[0], |e| e.biases.as_mut().unwrap()[1].truncate(1));
    assert!(problem.contains("1 for up, 2 needed"), "{problem}");
    for (sizes, name) in [([0, 2, 129], "hidden"), ([130, 0, 129], "intermediate"), ([130, 2, 0], "output")] {
        let error = DenseExperts::new(sizes[0], sizes[1], sizes[2], dense_experts(false)).unwrap_err();
        assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
    }
    assert!(DenseExperts::new(130, 2, 129, Vec::new()).unwrap_err().to_string().contains("`experts`"));
    assert!(DenseExperts::new(usize::MAX / 2, 2, 129, dense_experts(false)).is_err());
}

#[test]
fn routers_and_shared_experts_are_checked() {
    let routing = Routing { scoring: Scoring::Softmax, top_k: 2, renormalize: true, groups: None, scale: 1.0 };
    let good = RouterWeights { weight: vec![0; 12], bias: Some(vec![0.0; 3]), correction_bias: None, routing };
    good.check(3, 4).unwrap();
    assert!(good.check(3, 5).unwrap_err().to_string().contains("router weight"));
    let bad = RouterWeights { bias: Some(vec![0.0; 2]), ..good.clone() };
    assert!(bad.check(3, 4).unwrap_err().to_string().contains("router bias"));
    let bad = RouterWeights { correction_bias: Some(vec![f32::NAN, 0.0, f32::INFINITY]), ..good.clone() };
    let error = bad.check(3, 4).unwrap_err().to_string();
    assert!(error.contains("correction_bias") && error.contains("[0, 2]"), "{error}");
    for top_k in [0, 4] {
        let bad = RouterWeights { routing: Routing { top_k, ..routing }, ..good.clone() };
        assert!(bad.check(3, 4).unwrap_err().to_string().contains("top_k"));
    }

    let expert = dense_experts(true).remove(0);
    let shared = SharedExpert { intermediate: 2, expert, gate: Some(vec![0; 130]) };
    shared.check(130, 129).unwrap();
    assert!(shared.check(131, 129).unwrap_err().to_string().contains("gate"));
    let short = SharedExpert { gate: Some(vec![0; 129]), ..shared };
    assert!(short.check(130, 129).unwrap_err().to_string().contains("shared expert gate"));
}
