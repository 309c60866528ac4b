//! Public bug reports about these operations, each turned into an input with a known answer, on the CPU reference, the emulator and
//! the GPU. The name of a test begins with the name of its case; the letter is the kind of fault:
//! A scale conventions, B layouts, D expert ids, E nothing to do and everything on one expert, F shapes off the tile grid,
//! G offsets and launch limits, H special values, K determinism, L graphs, M bindings.

use crate::common::{any_emulator, argument_of, devices, everywhere, gpu, own_gpu, scale};
use cuda_std::kernel::{Family as _, Packed};
use cuda_std::memory::{In, Out};
use megamoe::device::{Buffer, DeviceHandle, Grid, launch};
use megamoe::diff::{Case, DeviceCase, Family, ONE, SHAPE, draw, floats};
use megamoe::formats::fp4::{Fp4Matrix, GlobalScale, alphas_from_processed};
use megamoe::formats::{ExpertTensors, Fp4Experts, SwizzledScales};
use megamoe::layer::{BiasBuffers, Hidden, Inputs, Layer, WeightLengths};
use megamoe::plan::{Fc2Warps, MAX_PAIRS, Plan, VARIANTS, Variant};
use megamoe::reference::{Mode, Status};
use megamoe::workspace::Workspace;
use megamoe::{Activation, Error, Gating, LayerOptions, LayerShape, WeightFormat};

const NAN: u16 = 0x7FFF;

/// What is wrong with the answers to an exact case: every back end must give `first` in column 0, one number a token, +0 everywhere
/// else, and no status. In bf16, and in f16 where `f16` is set.
fn wrong_in(case: &Case, first: &[f32], f16: bool) -> Option<String> {
    let mut case = case.clone();
    let formats = [Activation::Bf16, Activation::F16];
    for activation in &formats[..if f16 { 2 } else { 1 }] {
        case.options.activation = *activation;
        for (name, result) in everywhere(&case) {
            let out = floats(&result.out);
            if out.len() != first.len() * case.shape.output {
                return Some(format!("{name}: {} outputs", out.len()));
            }
            for (token, (row, first)) in out.chunks(case.shape.output).zip(first).enumerate() {
                let bad = |column: usize| {
                    let wanted = if column == 0 { *first } else { 0.0 };
                    row[column].to_bits() != wanted.to_bits()
                };
                if let Some(column) = (0..row.len()).find(|&column| bad(column)) {
                    let value = row[column];
                    return Some(format!("{name}, {activation:?}: {value} in token {token}, column {column}"));
                }
            }
            if result.status != Status::default() {
                return Some(format!("{name}, {activation:?}: {:?}", result.status));
            }
        }
    }
    None
}

fn wrong(case: &Case, first: &[f32]) -> Option<String> {
    wrong_in(case, first, true)
}

#[track_caller]
fn assert_first(case: &Case, first: &[f32]) {
    if let Some(problem) = wrong(case, first) {
        panic!("{problem}, where column 0 should be {first:?}");
    }
}

/// All back ends give the same bits; they are returned.
#[track_caller]
fn agreed(case: &Case) -> megamoe::reference::LayerResult {
    let mut results = everywhere(case);
    let (_, wanted) = results.swap_remove(0);
    for (name, result) in &results {
        crate::common::assert_same(name, &case.shape, &wanted, result);
    }
    wanted
}

#[track_caller]
fn assert_probe_works(device: &DeviceHandle) {
    let out = floats(&Case::new().run_on(device).unwrap().out);
    assert_eq!(out[0], 128.0);
    assert!(out[1..].iter().all(|y| y.to_bits() == 0));
}

#[test]
fn the_probe() {
    assert_first(&Case::new(), &[128.0]);
    // Not only on expert 1.
    for id in [0, 2, 3] {
        let mut case = Case::new();
        case.topk_ids = vec![id];
        assert_first(&case, &[128.0]);
    }
}

/// `case` packed anew from checkpoint tensors with these global scales of gate and up.
fn packed(case: &Case, gate: GlobalScale, up: GlobalScale) -> Case {
    let experts = case.experts().unwrap();
    fn rescaled<'a>(matrix: &Fp4Matrix<'a>, global: GlobalScale) -> Fp4Matrix<'a> {
        let codes = matrix.codes().to_vec();
        Fp4Matrix::new(matrix.rows(), matrix.cols(), codes, matrix.scales().clone(), global).unwrap()
    }
    let tensors: Vec<_> = (0..case.shape.experts).map(|expert| experts.unpack(expert)).collect();
    let tensors: Vec<ExpertTensors<'_>> = tensors
        .iter()
        .map(|expert| ExpertTensors {
            gate: rescaled(&expert.gate, gate),
            up: rescaled(&expert.up, up),
            down: expert.down.clone(),
        })
        .collect();
    let buffers = Fp4Experts::pack(&tensors).unwrap().into_buffers();
    Case {
        w13: buffers.w13,
        s13: buffers.s13.into_bytes(),
        alpha1: buffers.alpha1,
        w2: buffers.w2,
        s2: buffers.s2.into_bytes(),
        alpha2: buffers.alpha2,
        ..case.clone()
    }
}

#[test]
fn a1_each_half_of_w13_has_its_own_scale() {
    let case = packed(&Case::new(), GlobalScale::Multiplier(1.0), GlobalScale::Multiplier(0.5));
    assert_first(&case, &[64.0]);
    // The faults of the report: the gate's scale for both, the mean, up's for both.
    for (alpha, faulty) in [([1.0, 1.0], 128.0), ([0.75, 0.75], 72.0), ([0.5, 0.5], 32.0)] {
        let mut case = case.clone();
        case.alpha1.fill(alpha);
        assert!(wrong(&case, &[64.0]).is_some());
        assert_eq!(floats(&case.run(Mode::Exact).unwrap().out)[0], faulty);
    }
}

#[test]
fn a3_stored_reciprocal() {
    let mut probe = Case::new();
    probe.set_x(0, 0, 32.0);
    let divided = packed(&probe, GlobalScale::Divisor(4.0), GlobalScale::Divisor(4.0));
    let multiplied = packed(&probe, GlobalScale::Multiplier(0.25), GlobalScale::Multiplier(0.25));
    assert_first(&divided, &[128.0]);
    assert_first(&multiplied, &[128.0]);
    assert_eq!(agreed(&divided), agreed(&multiplied));
    let misread = packed(&probe, GlobalScale::Multiplier(4.0), GlobalScale::Multiplier(4.0));
    assert!(wrong(&misread, &[128.0]).is_some());
}

#[test]
fn a5_missing_scales_of_experts_are_all_named() {
    let error = alphas_from_processed(&[1.0; 4], &[0.125, 0.0, f32::NAN, f32::INFINITY]).unwrap_err();
    assert!(matches!(&error, Error::Experts { name: "input_scale", experts, .. } if *experts == [1, 2, 3]), "{error}");
    assert_eq!(alphas_from_processed(&[0.5; 2], &[0.25, 2.0]).unwrap(), [2.0, 0.25]);
    let mut case = Case::new();
    case.alpha1 = vec![[1.0; 2], [1.0; 2], [f32::NAN; 2], [f32::INFINITY; 2]];
    for (name, device) in devices() {
        let error = case.run_on(&device).unwrap_err();
        let expected = matches!(&error, Error::Experts { name: "alpha1", experts, .. } if *experts == [2, 3]);
        assert!(expected, "{name}: {error}");
        assert_probe_works(&device);
    }
    // An alpha of 0 is a dead expert and legal.
    case.alpha1[2..].fill([0.0; 2]);
    case.topk_ids = vec![2];
    assert_first(&case, &[0.0]);
}

#[test]
fn a7_subnormal_block_scale() {
    let mut case = Case::new();
    case.set_up(1, 0, 0, 0x6);
    case.set_s13(1, 0, 0, 0x01);
    assert_first(&case, &[2.0]);
    // Decoded by the formula of normal numbers, or flushed to zero.
    assert!(wrong(&case, &[9.0]).is_some());
    case.set_s13(1, 0, 0, 0x00);
    assert!(wrong(&case, &[2.0]).is_some());
}

/// Every byte as the scale of an up row, one expert each: out = 16·scale.
#[test]
fn a7_all_block_scales() {
    let shape = LayerShape { hidden: 16, intermediate: 16, output: 2, experts: 256, top_k: 1 };
    let mut case = Case::with_shape(shape, 256);
    case.alpha1.fill([1.0 / 16.0, 1.0]);
    for byte in 0..=255 {
        case.topk_ids[usize::from(byte)] = i32::from(byte);
        case.set_up(usize::from(byte), 0, 0, 0x2);
        case.set_s13(usize::from(byte), 0, 0, byte);
    }
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        for (name, result) in everywhere(&case) {
            for (byte, row) in result.out.chunks(2).enumerate() {
                // The value by its definition: steps of 2^-9, doubled for each exponent above 1.
                let (exponent, mantissa) = (byte >> 3 & 15, (byte & 7) as f32);
                let magnitude = match exponent {
                    0 => mantissa / 512.0,
                    _ => (mantissa + 8.0) / 512.0 * 2f32.powi(exponent as i32 - 1),
                };
                let wanted = match byte & 0x7F {
                    0x7F => [NAN; 2],
                    // The zeros of the tensor cores are +0.
                    0x00 => [0; 2],
                    _ => [(16.0 * magnitude).to_bits() >> 16, 0].map(|bits| bits as u16 | (byte as u16 & 0x80) << 8),
                };
                assert_eq!(row[0], wanted[0], "{name}, {activation:?}, {byte:#04x}");
                assert_eq!(row[1], wanted[1] & !0x8000, "{name}, {activation:?}, {byte:#04x}");
            }
        }
    }
}

#[test]
fn b1_up_rows_come_first() {
    let mut case = Case::new();
    case.set_up(1, 0, 0, 0x9);
    assert_first(&case, &[-128.0]);
    case.set_s13(1, 0, 0, 0x30);
    assert_first(&case, &[-64.0]);
    // Swapped halves, codes and scales, give silu(-2)·32.
    let mut swapped = case.clone();
    swapped.set_up(1, 0, 0, 0x6);
    swapped.set_gate(1, 0, 0, 0x9);
    swapped.set_s13(1, 0, 0, ONE);
    swapped.set_s13(1, 128, 0, 0x30);
    assert!(wrong(&swapped, &[-64.0]).is_some());
}

#[test]
fn b2_scales_of_rows_and_columns_off_the_swizzle() {
    // 320 rows and 22 columns; s2 has 100 rows and 10 columns.
    let shape = LayerShape { hidden: 352, intermediate: 160, output: 100, experts: 2, top_k: 1 };
    let case = draw(Family::Codes, shape, 3, 1);
    assert_eq!(case.s13.len(), 2 * 9216);
    let scales = SwizzledScales::from_bytes("s13", case.s13.clone(), 2, 320, 22).unwrap();
    for expert in 0..2 {
        let linear = scales.unswizzle(expert);
        let again = SwizzledScales::swizzle("s13", std::slice::from_ref(&linear)).unwrap();
        assert_eq!(again.unswizzle(0), linear);
        for ((row, col), offset) in
            [((1, 0), 16), ((32, 0), 4), ((33, 5), 533), ((127, 21), 3069), ((128, 0), 3072), ((319, 21), 9205)]
        {
            assert_eq!(linear.get(row, col), case.s13[expert * 9216 + offset], "({row}, {col})");
        }
        // The padding is written as zeros.
        let padding = 9216 - 320 * 22;
        assert!(again.bytes().iter().filter(|&&byte| byte == 0).count() >= padding);
    }
    agreed(&case);
    // Each scale has its place: a row at a time, one column after the other, counts once.
    let mut probe = Case::blank(shape, 1);
    probe.topk_ids.fill(1);
    probe.fill_padding(0x7F);
    for (row, k) in [(127, 21), (128, 0), (159, 21), (33, 5)] {
        let mut probe = probe.clone();
        probe.set_x(0, 16 * k, 8.0);
        probe.set_gate(1, row, 16 * k, 0x6);
        probe.set_up(1, row, 16 * k, 0x1);
        probe.set_w2(1, 0, row, 0x2);
        probe.set_s13(1, row, k, 0x30);
        assert_first(&probe, &[64.0]);
        probe.set_s13(1, row, k ^ 1, 0x30);
        probe.set_s13(1, row, k, ONE);
        assert!(wrong(&probe, &[64.0]).is_some());
    }
}

#[test]
fn b5_host_and_kernel_agree_on_the_padding() {
    // 3712 rows are 29·128. A buffer for 3840 would put the second expert elsewhere.
    let shape = LayerShape { hidden: 32, intermediate: 1856, output: 16, experts: 2, top_k: 1 };
    let mut case = draw(Family::Random, shape, 2, 1);
    case.topk_ids = vec![1, 0];
    assert_eq!(case.s13.len(), 2 * 3712 * 4);
    agreed(&case);
    case.s13 = vec![ONE; 2 * 3840 * 4];
    assert_eq!(argument_of(&case.run(Mode::Exact).unwrap_err()), "s13");
    assert_eq!(argument_of(&case.experts().unwrap_err()), "s13");
    for (_, device) in devices() {
        let error = from_buffers(&device, &case).unwrap_err();
        let expected = Error::BufferLength { name: "s13", given: 2 * 3840 * 4, needed: 2 * 3712 * 4 };
        assert_eq!(error.to_string(), expected.to_string());
        assert_probe_works(&device);
    }
}

#[test]
fn b7_even_k_in_the_low_nibble() {
    let mut case = Case::new();
    let row = 256 * 512;
    case.w13[row] = 0x24;
    assert_first(&case, &[512.0]);
    case.w13[row] = 0x42;
    assert!(wrong(&case, &[512.0]).is_some());
}

/// The probe in MXFP4, and what a mistake with its blocks of 32 would change.
#[test]
fn b_mxfp4_has_a_scale_per_32_k() {
    let mut case = Case::with_shape_in(WeightFormat::Mxfp4, SHAPE, 1);
    assert_first(&case, &[128.0]);
    // The scale of the block behind it, of the row of up, of another expert, and padding: all the same.
    for (expert, row, block) in [(1, 128, 1), (1, 129, 0), (0, 128, 0)] {
        case.set_s13(expert, row, block, 0xff);
    }
    case.fill_padding(0xff);
    case.set_gate(1, 1, 0, 0);
    let mut nan_elsewhere = case.clone();
    // Row 1 of gate is NaN now: h[1], and with it every output of the token.
    nan_elsewhere.set_w2(1, 0, 1, 0x2);
    assert!(wrong(&nan_elsewhere, &[128.0]).is_some());
    case.set_s13(1, 129, 0, 127);
    case.set_s13(1, 128, 1, 127);
    assert_first(&case, &[128.0]);
    // The last k of a block and the first of the next have scales of their own.
    for (k, block) in [(31, 0), (32, 1), (1023, 31)] {
        let mut case = Case::with_shape_in(WeightFormat::Mxfp4, SHAPE, 1);
        case.set_x(0, 0, 0.0);
        case.set_x(0, k, 8.0);
        case.set_gate(1, 0, k, 0x6);
        case.set_up(1, 0, k, 0x1);
        case.set_s13(1, 0, block, 126);
        assert_first(&case, &[64.0]);
        case.set_s13(1, 0, block, 127);
        case.set_s13(1, 0, block ^ 1, 126);
        assert_first(&case, &[128.0]);
    }
    // And those of w2, whose I of 128 has four.
    let mut case = Case::with_shape_in(WeightFormat::Mxfp4, SHAPE, 1);
    case.set_s2(1, 0, 0, 130);
    assert_first(&case, &[1024.0]);
}

/// The probe's weights, but w2 codes for 0.5, 1, 2 and 3 in experts 0 to 3.
fn d1_weights(top_k: usize, tokens: usize) -> Case {
    let mut case = Case::with_shape(LayerShape { top_k, ..SHAPE }, tokens);
    for (expert, code) in [1, 2, 4, 5].into_iter().enumerate() {
        case.set_w2(expert, 0, 0, code);
    }
    case
}

#[test]
fn d1_ids_below_zero_and_above_the_last() {
    let mut case = d1_weights(2, 3);
    case.topk_ids = vec![1, -1, -1, -1, -1, 2];
    case.topk_w = vec![0.5, 0.25, 9.0, 9.0, 1.0, 2.0];
    let right = [64.0, 0.0, 512.0];
    assert_first(&case, &right);
    case.topk_ids[1] = i32::MIN;
    assert_first(&case, &right);
    for bad in [4, 5, i32::MAX] {
        case.topk_ids[1] = bad;
        let result = agreed(&case);
        assert_eq!(result.status, Status { bad_id: true, f16_range: false });
        assert_eq!([0, 128, 256].map(|i| floats(&result.out)[i]), right);
    }
    // Were -1 taken for an expert, token 1 would not be zero.
    case.topk_ids = vec![1, -1, 0, -1, -1, 2];
    assert!(wrong(&case, &right).is_some());
}

/// Output between guards, everything that may be stale full of NaN.
#[test]
fn d1_nothing_stale_and_nothing_outside() {
    let mut case = d1_weights(2, 3);
    case.topk_ids = vec![1, -1, -1, -1, -1, 2];
    for (name, device) in devices() {
        let mut on_device = case.on(&device).unwrap();
        on_device.out = Buffer::new(&device, 3 * 128 + 128).unwrap();
        let out = on_device.run().unwrap().out;
        assert_eq!([0, 128, 256].map(|i| floats(&out)[i]), [128.0, 0.0, 256.0], "{name}");
        assert!(out[3 * 128..].iter().all(|&bits| bits == 0xFFFF), "{name}");
    }
}

#[test]
fn d3_an_expert_twice_for_one_token() {
    let mut case = d1_weights(2, 1);
    case.topk_ids = vec![2, 2];
    case.topk_w = vec![0.25, 0.5];
    assert_first(&case, &[192.0]);
    // A slot lost.
    for slot in [0, 1] {
        let mut lost = case.clone();
        lost.topk_ids[slot] = -1;
        assert!(wrong(&lost, &[192.0]).is_some());
    }
    let mut case = d1_weights(8, 9);
    case.topk_ids.fill(2);
    case.topk_w.fill(0.125);
    assert_first(&case, &[256.0; 9]);
}

#[test]
fn e1_no_tokens() {
    let none = Case::with_shape(SHAPE, 0);
    for (name, result) in everywhere(&none) {
        assert_eq!((result.out.len(), result.status), (0, Status::default()), "{name}");
    }
    for (_, device) in devices() {
        // On a plan with room, no output is touched and no memory is needed.
        let mut on_device = Case::new().on(&device).unwrap();
        on_device.tokens = 0;
        assert!(on_device.run().unwrap().out.iter().all(|&bits| bits == 0xFFFF));
        none.run_on(&device).unwrap();
        device.synchronize().unwrap();
        on_device.tokens = 1;
        assert_eq!(floats(&on_device.run().unwrap().out)[0], 128.0);
    }
}

#[test]
fn e5_all_tokens_on_the_last_expert() {
    let shape = LayerShape { experts: 384, ..SHAPE };
    let case = |tokens: usize| {
        let mut case = Case::with_shape(shape, tokens);
        case.topk_ids.fill(383);
        case.set_up(383, 0, 0, 0);
        case.set_up(383, 0, 1, 1);
        for token in 0..tokens {
            case.set_x(token, 1, (2 * (token % 16)) as f32);
        }
        case
    };
    for device in [any_emulator(4)].into_iter().chain(gpu()) {
        for tokens in [9, scale(&device, 33, 4096)] {
            let case = case(tokens);
            for result in [case.run_on(&device).unwrap(), case.run(Mode::Exact).unwrap()] {
                for (token, row) in floats(&result.out).chunks(128).enumerate() {
                    assert_eq!(row[0], (32 * (token % 16)) as f32, "token {token} of {tokens}");
                    assert!(row[1..].iter().all(|y| y.to_bits() == 0), "token {token} of {tokens}");
                }
            }
        }
    }
}

/// Every weight and activation is 1, except for the gates: 4 in the last eight k. So gate = 32, up = K and out = 32·K·I for a token
/// of ones; token t holds 2^(t mod 3) times that in up, by its weight.
fn ones(shape: LayerShape, tokens: usize) -> (Case, Vec<f32>) {
    let LayerShape { hidden, intermediate, output, experts, .. } = shape;
    let mut case = Case::blank(shape, tokens);
    case.fill_padding(0x7F);
    case.x.fill(0x3F80);
    case.w13.fill(0x22);
    case.w2.fill(0x22);
    for expert in 0..experts {
        for row in 0..intermediate {
            (0..hidden).for_each(|k| case.set_gate(expert, row, k, if k + 8 < hidden { 0 } else { 6 }));
        }
    }
    case.alpha1.fill([2f32.powi(-11), 1.0]);
    case.topk_w = (0..tokens * shape.top_k).map(|pair| 2f32.powi((pair % 3) as i32)).collect();
    case.topk_ids.fill(experts as i32 - 1);
    let value = |token: usize| (32 * hidden * intermediate) as f32 / 2048.0 * 2f32.powi((token % 3) as i32);
    let wanted = (0..tokens).flat_map(|token| vec![value(token); output]).collect();
    (case, wanted)
}

fn wrong_ones(case: &Case, wanted: &[f32]) -> Option<String> {
    everywhere(case).into_iter().find_map(|(name, result)| {
        let out = floats(&result.out);
        // The products are exact, their sum is rounded to bf16.
        let round =
            |value: f32| megamoe::formats::float16::bf16_to_f32(megamoe::formats::float16::bf16_from_f32(value));
        let bad = out.iter().zip(wanted).position(|(got, &wanted)| *got != round(wanted))?;
        Some(format!("{name}, {:?}: {} at {bad}, not {}", case.shape, out[bad], wanted[bad]))
    })
}

#[track_caller]
fn assert_ones(hidden: usize, intermediate: usize, output: usize, tokens: usize) {
    let shape = LayerShape { hidden, intermediate, output, experts: 2, top_k: 1 };
    let (mut case, wanted) = ones(shape, tokens);
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        if let Some(problem) = wrong_ones(&case, &wanted) {
            panic!("{problem}");
        }
    }
    // The last block of either sum dropped, or half of it.
    for (k, i) in [(hidden - 16, intermediate), (hidden - 8, intermediate), (hidden, intermediate - 16)] {
        let mut short = case.clone();
        for row in 0..intermediate {
            (k..hidden).for_each(|k| short.set_up(1, row, k, 0));
        }
        for row in 0..output {
            (i..intermediate).for_each(|i| short.set_w2(1, row, i, 0));
        }
        assert!(wrong_ones(&short, &wanted).is_some(), "{shape:?}: {k} of K, {i} of I");
    }
}

#[test]
fn f1_intermediate_sizes_off_the_block() {
    for intermediate in [16, 80, 192, 320] {
        assert_ones(32, intermediate, 3, 2);
    }
}

#[test]
fn f4_outputs_smaller_than_or_off_the_tile() {
    for output in [1, 63, 65, 96] {
        assert_ones(16, 16, output, 5);
    }
}

#[test]
fn f5_hidden_sizes_off_the_step() {
    for hidden in [16, 48, 80, 192, 320, 528, 1040] {
        assert_ones(hidden, 16, 2, 1);
    }
}

#[test]
fn f8_tokens_off_the_entry() {
    for tokens in [1, 7, 8, 9, 17, 63] {
        assert_ones(16, 16, 4, tokens);
    }
}

/// A layer from device buffers that hold the arrays of `case`.
fn from_buffers(device: &DeviceHandle, case: &Case) -> Result<Layer, Error> {
    let biases = |biases: &Option<Vec<f32>>| biases.as_ref().map(|all| Buffer::from_slice(device, all)).transpose();
    Layer::from_buffers(
        case.shape,
        case.options,
        Buffer::from_slice(device, &case.w13)?,
        Buffer::from_slice(device, &case.s13)?,
        Buffer::from_slice(device, case.alpha1.as_flattened())?,
        Buffer::from_slice(device, &case.w2)?,
        Buffer::from_slice(device, &case.s2)?,
        Buffer::from_slice(device, &case.alpha2)?,
        BiasBuffers { b13: biases(&case.b13)?, b2: biases(&case.b2)? },
    )
}

/// Codes beyond 2^31 bytes: 2.7 GB, so on a GPU only.
#[test]
fn g1_offsets_beyond_2_to_the_31() {
    let Some(gpu) = gpu() else { return };
    for hidden in [5120, 4096] {
        let shape = LayerShape { hidden, intermediate: 1024, output: 128, experts: 512, top_k: 1 };
        let mut case = Case::blank(shape, 1);
        case.topk_ids = vec![511];
        case.set_x(0, 0, 8.0);
        case.set_up(511, 1023, 0, 0x1);
        case.set_gate(511, 1023, 0, 0x6);
        case.set_w2(511, 127, 1023, 0x2);
        let layer = from_buffers(&gpu, &case).unwrap();
        let plan = layer.plan(1).unwrap();
        let workspace = Workspace::new(&gpu, &plan).unwrap();
        let x = Buffer::from_slice(&gpu, &case.x).unwrap();
        let topk_ids = Buffer::from_slice(&gpu, &case.topk_ids).unwrap();
        let topk_weights = Buffer::from_slice(&gpu, &case.topk_w).unwrap();
        let out = Buffer::new(&gpu, 128).unwrap();
        let inputs = Inputs { tokens: 1, x: Hidden::Bf16(&x), topk_ids: &topk_ids, topk_weights: &topk_weights };
        layer.forward(&plan, &workspace, inputs, &out).unwrap();
        let out = floats(&out.download().unwrap());
        assert_eq!(out[127], 128.0, "hidden {hidden}");
        assert!(out[..127].iter().all(|y| y.to_bits() == 0), "hidden {hidden}");
        assert_eq!(floats(&case.run(Mode::Exact).unwrap().out), out, "hidden {hidden}");
    }
}

#[test]
fn g5_expert_counts_around_a_block_size() {
    for experts in [1, 1023, 1024, 1025, 4096] {
        let shape = LayerShape { experts, hidden: 16, intermediate: 16, output: 2, top_k: 2 };
        let mut case = Case::with_shape(shape, 2);
        case.topk_ids = vec![experts as i32 - 1, -1, 0, experts as i32 - 1];
        assert_first(&case, &[128.0, 256.0]);
        // The expert before it has other weights.
        if experts > 1 {
            case.set_w2(experts - 2, 0, 0, 0);
            case.topk_ids[0] = experts as i32 - 2;
            assert!(wrong(&case, &[128.0, 256.0]).is_some());
        }
    }
}

#[test]
fn h1_h_above_the_range_of_f16() {
    let mut case = Case::new();
    case.set_x(0, 0, 80.0);
    case.set_up(1, 0, 0, 0x6);
    case.set_w2(1, 0, 0, 0x1);
    case.alpha2.fill(1.0 / 1024.0);
    assert_eq!(wrong_in(&case, &[50.0], false), None);
    case.options.activation = Activation::F16;
    let result = agreed(&case);
    assert_eq!(result.status, Status { bad_id: false, f16_range: true });
    assert_eq!(floats(&result.out)[0], f32::INFINITY);
    assert!(wrong(&case, &[50.0]).is_some());
}

#[test]
fn h1_x_above_the_range_of_f16() {
    let mut case = Case::with_shape(SHAPE, 2);
    case.options.activation = Activation::F16;
    let range = |case: &Case| agreed(case).status.f16_range;
    assert!(!range(&case));
    case.set_x(1, 900, 65536.0);
    assert!(range(&case));
    // A token that no expert sees does not count, and an infinity was one before.
    case.topk_ids[1] = -1;
    assert!(!range(&case));
    case.topk_ids[1] = 1;
    case.set_x(1, 900, f32::INFINITY);
    assert!(!range(&case));
    // In bf16 there is no such range.
    case.set_x(1, 900, 65536.0);
    case.options.activation = Activation::Bf16;
    assert!(!range(&case));
}

#[test]
fn h3_silu_of_a_large_negative_gate() {
    for gate in [-88.0, -89.0, -200.0, -1e30f32] {
        let mut case = Case::new();
        case.alpha1.fill([0.75, gate / 32.0]);
        for activation in [Activation::Bf16, Activation::F16] {
            case.options.activation = activation;
            let out = floats(&agreed(&case).out);
            assert!(out[0].abs() <= 1e-35, "{gate}: {}", out[0]);
        }
    }
    // -88 still gives a number in bf16.
    let mut case = Case::new();
    case.alpha1.fill([0.75, -88.0 / 32.0]);
    assert!(floats(&agreed(&case).out)[0] < 0.0);
    // A gate of minus infinity is NaN by the formula: -inf / (1 + inf).
    case.alpha1.fill([0.75, -3e38]);
    assert!(agreed(&case).out.iter().all(|&bits| bits == NAN));
}

#[test]
fn h5_bytes_in_the_padding_of_the_scales() {
    for (shape, tokens) in [
        (LayerShape { hidden: 48, intermediate: 160, output: 2880, experts: 2, top_k: 2 }, 1),
        (LayerShape { hidden: 2880, intermediate: 16, output: 40, experts: 2, top_k: 1 }, 2),
    ] {
        let mut case = draw(Family::Random, shape, tokens, 5);
        case.topk_ids.fill(1);
        case.fill_padding(0);
        let wanted = agreed(&case);
        assert!(floats(&wanted.out).iter().all(|y| y.is_finite()));
        for byte in [0x7F, 0xFF, 0x7E] {
            let before = case.s13.clone();
            case.fill_padding(byte);
            assert_ne!(case.s13, before, "there is padding");
            assert_eq!(agreed(&case), wanted, "{byte:#04x}");
        }
        // The last byte that is not padding does count.
        case.set_s13(1, 2 * shape.intermediate - 1, shape.hidden / 16 - 1, 0x7F);
        assert!(agreed(&case).out.iter().all(|&bits| bits == NAN));
    }
}

#[test]
fn h6_clamp() {
    let mut case = Case::new();
    case.options.gating = Gating::Silu { limit: Some(1.0) };
    case.set_up(1, 0, 0, 0x6);
    assert_first(&case, &[0.730_468_75]);
    // Ignored, the limit gives 1024.
    let mut ignored = case.clone();
    ignored.options.gating = Gating::default();
    assert!(wrong(&ignored, &[0.730_468_75]).is_some());
    // No clamp of the gate from below: silu(-32)·-1, where silu(-1)·-1 would be 0.27.
    case.set_up(1, 0, 0, 0xE);
    case.set_gate(1, 0, 0, 0xE);
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        assert!(floats(&agreed(&case).out)[0].abs() <= 1e-6);
    }
    // A clamp keeps NaN.
    case.set_x(0, 0, f32::NAN);
    assert!(agreed(&case).out.iter().all(|&bits| bits == NAN));
}

#[test]
fn k1_order_of_the_final_sum() {
    let mut case = Case::with_shape(LayerShape { top_k: 4, ..SHAPE }, 1);
    case.topk_ids = vec![0, 1, 2, 3];
    case.topk_w = [17, -7, -7, 17].map(|e| 2f32.powi(e)).to_vec();
    case.topk_w[3] *= -1.0;
    assert_first(&case, &[0.0]);
    for (_, device) in devices() {
        // Each pass on an emulator takes another order of blocks and lanes.
        let on_device = case.on(&device).unwrap();
        for pass in 0..scale(&device, 20, 1000) {
            on_device.forward().unwrap();
            let out = on_device.out.download().unwrap();
            assert!(out.iter().all(|&bits| bits == 0), "pass {pass}: {}", floats(&out)[0]);
        }
    }
    // Another order of the same terms is noticed.
    case.topk_w.swap(1, 3);
    assert!(wrong(&case, &[0.0]).is_some());
}

/// A captured pass reads its buffers when it is replayed.
#[test]
fn l1_replay_reads_its_inputs_anew() {
    let Some(gpu) = own_gpu() else { return };
    let device: DeviceHandle = gpu.clone();
    let shape = LayerShape { hidden: 272, intermediate: 96, output: 100, experts: 5, top_k: 4 };
    for activation in [Activation::Bf16, Activation::F16] {
        let mut first = draw(Family::Random, shape, 8, 1);
        first.options.activation = activation;
        // One entry at capture.
        first.topk_ids.fill(-1);
        first.topk_ids[3] = 2;
        let captured = first.on(&device).unwrap();
        let graph = gpu.capture(|| captured.forward()).unwrap();
        for (replay, family) in Family::ALL.into_iter().cycle().take(30).enumerate() {
            let batch = draw(family, shape, 8, replay as u64);
            let case = Case { x: batch.x, topk_ids: batch.topk_ids, topk_w: batch.topk_w, ..first.clone() };
            captured.x.upload(&case.x).unwrap();
            captured.topk_ids.upload(&case.topk_ids).unwrap();
            captured.topk_weights.upload(&case.topk_w).unwrap();
            captured.workspace.poison(0xFF).unwrap();
            captured.out.fill(0xFF).unwrap();
            graph.launch().unwrap();
            let replayed = captured.take().unwrap();
            crate::common::assert_same(&format!("replay {replay}"), &shape, &case.run(Mode::Exact).unwrap(), &replayed);
            crate::common::assert_same(&format!("eager {replay}"), &shape, &case.run_on(&device).unwrap(), &replayed);
        }
    }
}

/// A pass whose kernels were never readied, inside a capture: an error that says so, and a stream that works afterwards.
#[test]
fn l3_first_pass_inside_a_capture() {
    // Nothing was prepared on it.
    let Some(gpu) = own_gpu() else { return };
    let device: DeviceHandle = gpu.clone();
    let case = Case::new();
    let layer = from_buffers(&device, &case).unwrap();
    let elsewhere = Plan::new(&any_emulator(1), case.shape, case.options, 1).unwrap();
    let workspace = Workspace::new(&device, &elsewhere).unwrap();
    let x = Buffer::from_slice(&device, &case.x).unwrap();
    let topk_ids = Buffer::from_slice(&device, &case.topk_ids).unwrap();
    let topk_weights = Buffer::from_slice(&device, &case.topk_w).unwrap();
    let out = Buffer::new(&device, 128).unwrap();
    let inputs = || Inputs { tokens: 1, x: Hidden::Bf16(&x), topk_ids: &topk_ids, topk_weights: &topk_weights };
    let error = gpu.capture(|| layer.forward(&elsewhere, &workspace, inputs(), &out)).unwrap_err();
    assert!(error.to_string().contains("prepared"), "{error}");
    // With its plan the same pass is captured, and launched twice.
    let plan = layer.plan(1).unwrap();
    let graph = gpu.capture(|| layer.forward(&plan, &workspace, inputs(), &out)).unwrap();
    for _ in 0..2 {
        out.fill(0xFF).unwrap();
        graph.launch().unwrap();
        let out = floats(&out.download().unwrap());
        assert_eq!(out[0], 128.0);
        assert!(out[1..].iter().all(|y| y.to_bits() == 0));
    }
    // Allocating and waiting inside a capture ends it, and the stream goes on.
    let _ = gpu.capture(|| Case::new().run_on(&device).map(|_| ()));
    assert_probe_works(&device);
}

#[test]
fn l6_nan_in_padded_rows() {
    let shape = LayerShape { hidden: 272, intermediate: 48, output: 40, experts: 4, top_k: 2 };
    let mut case = draw(Family::Random, shape, 8, 6);
    case.topk_ids = (0..16).map(|pair| pair % 4).collect();
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        let real = agreed(&case.tokens_only(0..5)).out;
        let padded_with = |case: &Case, padding: u16| -> bool {
            let out = agreed(case).out;
            out[..real.len()] == real && out[real.len()..].iter().all(|&bits| bits == padding)
        };
        case.x[5 * 272..].fill(0x7FC1);
        assert!(padded_with(&case, NAN));
        let mut skipped = case.clone();
        skipped.topk_ids[10..].fill(-1);
        assert!(padded_with(&skipped, 0));
        // A NaN that reached a real row would be seen.
        skipped.x[4 * 272] = 0x7FC1;
        assert!(!padded_with(&skipped, 0));
    }
}

/// Each buffer one element short, in turn.
#[test]
fn m1_each_buffer_one_short() {
    let shape = LayerShape { hidden: 32, intermediate: 16, output: 3, experts: 2, top_k: 2 };
    let mut case = Case::with_shape(shape, 2);
    case.add_biases(1);
    let lengths = WeightLengths::of(&shape, case.options.format).unwrap();
    for (_, device) in devices() {
        // Weights.
        type Shorten = fn(&mut Case);
        let weights: [(&str, usize, Shorten); 7] = [
            ("w13", lengths.w13, |case| case.w13.truncate(case.w13.len() - 1)),
            ("s13", lengths.s13, |case| case.s13.truncate(case.s13.len() - 1)),
            ("w2", lengths.w2, |case| case.w2.truncate(case.w2.len() - 1)),
            ("s2", lengths.s2, |case| case.s2.truncate(case.s2.len() - 1)),
            ("alpha2", lengths.alpha2, |case| case.alpha2.truncate(case.alpha2.len() - 1)),
            ("b13", lengths.b13, |case| case.b13.as_mut().map(Vec::pop).map_or((), |_| ())),
            ("b2", lengths.b2, |case| case.b2.as_mut().map(Vec::pop).map_or((), |_| ())),
        ];
        for (name, needed, shorten) in weights {
            let mut short = case.clone();
            shorten(&mut short);
            assert_length(from_buffers(&device, &short).unwrap_err(), name, needed - 1, needed);
            assert_length(short.experts().unwrap_err(), name, needed - 1, needed);
        }
        let alpha1 = Buffer::from_slice(&device, &[1.0; 3]).unwrap();
        let buffer = |bytes: &[u8]| Buffer::from_slice(&device, bytes).unwrap();
        let alpha2 = Buffer::from_slice(&device, &case.alpha2).unwrap();
        let (w13, s13, w2, s2) = (buffer(&case.w13), buffer(&case.s13), buffer(&case.w2), buffer(&case.s2));
        let none = BiasBuffers::default();
        let error = Layer::from_buffers(shape, case.options, w13, s13, alpha1, w2, s2, alpha2, none).unwrap_err();
        assert_length(error, "alpha1", 3, 4);

        // What a pass is given.
        let short = |change: &dyn Fn(&mut DeviceCase)| {
            let mut on_device = case.on(&device).unwrap();
            change(&mut on_device);
            let error = on_device.forward().unwrap_err();
            // Nothing was launched.
            device.synchronize().unwrap();
            error
        };
        let error = short(&|on| on.x = Buffer::new(&device, 63).unwrap());
        assert_length(error, "x", 63, 64);
        let error = short(&|on| on.topk_ids = Buffer::new(&device, 3).unwrap());
        assert_length(error, "topk_ids", 3, 4);
        let error = short(&|on| on.topk_weights = Buffer::new(&device, 3).unwrap());
        assert_length(error, "topk_weights", 3, 4);
        let error = short(&|on| on.out = Buffer::new(&device, 5).unwrap());
        assert_length(error, "out", 5, 6);
        let smaller = Plan::new(&device, shape, case.options, 1).unwrap();
        let needed = Plan::new(&device, shape, case.options, 2).unwrap().workspace_bytes();
        let error = short(&|on| on.workspace = Workspace::new(&device, &smaller).unwrap());
        assert_length(error, "workspace", smaller.workspace_bytes(), needed);
        assert_probe_works(&device);
    }
}

#[track_caller]
fn assert_length(error: Error, name: &str, given: usize, needed: usize) {
    assert!(
        matches!(&error, Error::BufferLength { name: n, given: g, needed: w } if (*n, *g, *w) == (name, given, needed)),
        "{error}, where `{name}` has {given} of {needed}"
    );
}

cuda_std::kernels! {
    /// Writes its arguments back.
    pub mod echo(
        /// Nothing before it is 8 bytes long.
        a: u32,
        /// Behind 4 bytes.
        b: u64,
        /// Signed.
        c: i32,
        /// Not a bit pattern of an integer.
        d: f32,
        /// A long stride.
        e: u64,
        /// Odd.
        f: u32,
        /// Read.
        input: In<u32>,
        /// Written: 8 words.
        out: Out<u32>,
    );
    echo_all[32, 1] = |_A| write_back;
}

#[allow(clippy::too_many_arguments)]
fn write_back(a: u32, b: u64, c: i32, d: f32, e: u64, f: u32, input: In<u32>, out: Out<u32>) {
    if cuda_std::thread::thread_idx() == 0 {
        let words = [a, b as u32, (b >> 32) as u32, c as u32, d.to_bits(), e as u32, (e >> 32) as u32, f];
        for (i, word) in words.into_iter().enumerate() {
            out.store(i, word ^ input.load(0));
        }
    }
}

/// Every scalar reaches the kernel with all its bits, wherever it stands among the others.
#[test]
fn m3_scalars_and_pointers_by_value() {
    let device = any_emulator(1);
    let input = Buffer::from_slice(&device, &[0x5555_5555u32]).unwrap();
    let out = Buffer::<u32>::new(&device, 8).unwrap();
    let args = echo::Args {
        a: 0x8001_0203,
        b: 0x1122_3344_5566_7788,
        c: -0x0708_090A,
        d: 0.1,
        e: 0xFFFF_FFFF_0000_0001,
        f: 0xFEDC_BA98,
        input: input.as_ref(),
        out: out.as_mut(),
    };
    launch(&*device, echo::echo_all, Grid { blocks: 1, shared_bytes: 0 }, args).unwrap();
    let words = out.download().unwrap();
    let wanted = [0x8001_0203, 0x5566_7788, 0x1122_3344, 0xF8F7_F6F6, 0x3DCC_CCCD, 1, 0xFFFF_FFFF, 0xFEDC_BA98u32];
    assert_eq!(words, wanted.map(|word| word ^ 0x5555_5555));
    // What a GPU is handed: sizes and bits, pointers with their lengths.
    let packed = echo::Family::pack(args);
    let scalars = [(0x8001_0203, 4), (0x1122_3344_5566_7788, 8), (0xF8F7_F6F6, 4), (0x3DCC_CCCD, 4)];
    for (i, (bits, size)) in scalars.into_iter().enumerate() {
        assert_eq!(packed.as_slice()[i], Packed::Scalar { bits, size }, "argument {i}");
    }
    let (input, out) = (input.as_ref(), out.as_mut());
    let pointer = |address, len, writable| Packed::Pointer { address, len, element: 4, writable };
    assert_eq!(packed.as_slice()[6..], [pointer(input.address, 1, false), pointer(out.address, 8, true)]);
}

/// A buffer of another device names addresses that mean nothing, or something else, on the layer's: an error, not a launch.
#[test]
fn m1_buffers_of_another_device() {
    let case = Case::new();
    let (device, other) = (any_emulator(0), any_emulator(1));
    let (here, there) = (case.on(&device).unwrap(), case.on(&other).unwrap());
    let forward =
        |workspace: &Workspace, x: &Buffer<u16>, ids: &Buffer<i32>, weights: &Buffer<f32>, out: &Buffer<u16>| {
            let inputs = Inputs { tokens: 1, x: Hidden::Bf16(x), topk_ids: ids, topk_weights: weights };
            here.layer.forward(&here.plan, workspace, inputs, out)
        };
    let named = |result: megamoe::Result<()>| argument_of(&result.unwrap_err());
    let DeviceCase { workspace, x, topk_ids, topk_weights, out, .. } = &here;
    assert_eq!(named(forward(&there.workspace, x, topk_ids, topk_weights, out)), "workspace");
    assert_eq!(named(forward(workspace, &there.x, topk_ids, topk_weights, out)), "x");
    assert_eq!(named(forward(workspace, x, &there.topk_ids, topk_weights, out)), "topk_ids");
    assert_eq!(named(forward(workspace, x, topk_ids, &there.topk_weights, out)), "topk_weights");
    assert_eq!(named(forward(workspace, x, topk_ids, topk_weights, &there.out)), "out");
    forward(workspace, x, topk_ids, topk_weights, out).unwrap();
    assert_eq!(floats(&here.take().unwrap().out)[0], 128.0);
}

/// Only the refused call is an error; the next one is right, and none is left behind.
#[test]
fn m5_errors_surface_at_their_own_call() {
    for (name, device) in devices() {
        let on_device = Case::new().on(&device).unwrap();
        let inputs = |tokens| Inputs {
            tokens,
            x: Hidden::Bf16(&on_device.x),
            topk_ids: &on_device.topk_ids,
            topk_weights: &on_device.topk_weights,
        };
        let DeviceCase { layer, plan, workspace, out, .. } = &on_device;
        let error = layer.forward(plan, workspace, inputs(2), out).unwrap_err();
        assert_eq!(argument_of(&error), "tokens", "{name}");
        layer.forward(plan, workspace, inputs(1), out).unwrap();
        assert_eq!(floats(&out.download().unwrap())[0], 128.0, "{name}");
        device.synchronize().unwrap();
        assert_eq!(argument_of(&layer.plan(MAX_PAIRS + 1).unwrap_err()), "max_tokens", "{name}");
        device.synchronize().unwrap();
        assert_probe_works(&device);
    }
}

/// Everything outside its limits, refused by name before anything is launched or allocated.
#[test]
fn arguments_outside_their_limits() {
    let options = LayerOptions::default();
    let huge = usize::MAX & !15;
    let shapes: [(&str, LayerShape); 15] = [
        ("experts", LayerShape { experts: 0, ..SHAPE }),
        ("experts", LayerShape { experts: 4097, ..SHAPE }),
        ("top_k", LayerShape { top_k: 0, ..SHAPE }),
        ("top_k", LayerShape { top_k: 33, ..SHAPE }),
        ("hidden", LayerShape { hidden: 0, ..SHAPE }),
        ("hidden", LayerShape { hidden: 24, ..SHAPE }),
        ("hidden", LayerShape { hidden: huge, ..SHAPE }),
        ("intermediate", LayerShape { intermediate: 0, ..SHAPE }),
        ("intermediate", LayerShape { intermediate: 8, ..SHAPE }),
        ("intermediate", LayerShape { intermediate: 100, ..SHAPE }),
        ("intermediate", LayerShape { intermediate: huge, ..SHAPE }),
        ("output", LayerShape { output: 0, ..SHAPE }),
        ("output", LayerShape { output: huge, ..SHAPE }),
        ("experts", LayerShape { experts: huge, ..SHAPE }),
        ("top_k", LayerShape { top_k: huge, ..SHAPE }),
    ];
    for device in [any_emulator(1)].into_iter().chain(gpu()) {
        for (name, shape) in shapes {
            let error = Plan::new(&device, shape, options, 1).unwrap_err();
            assert_eq!(argument_of(&error), name, "{shape:?}");
            assert!(matches!(error, Error::Argument { .. }), "{error}");
        }
        for limit in [0.0, -0.0, -1.0, f32::NAN, f32::NEG_INFINITY] {
            let options = LayerOptions { gating: Gating::Silu { limit: Some(limit) }, ..options };
            let error = Plan::new(&device, SHAPE, options, 1).unwrap_err();
            assert_eq!(argument_of(&error), "limit", "{limit}");
            assert!(error.to_string().contains(&limit.to_string()), "{error}");
            let mut case = Case::new();
            case.options = options;
            assert_eq!(argument_of(&case.run_on(&device).unwrap_err()), "limit");
            assert_eq!(argument_of(&case.run(Mode::Exact).unwrap_err()), "limit");
        }
        for max_tokens in [MAX_PAIRS + 1, usize::MAX] {
            let error = Plan::new(&device, SHAPE, options, max_tokens).unwrap_err();
            assert_eq!(argument_of(&error), "max_tokens");
        }
        let wide = LayerShape { top_k: 32, ..SHAPE };
        let error = Plan::new(&device, wide, options, MAX_PAIRS / 32 + 1).unwrap_err();
        assert_eq!(argument_of(&error), "max_tokens");
        Plan::new(&device, wide, options, MAX_PAIRS / 32).unwrap();

        // f16 hidden states need an f16 layer.
        let case = Case::new().x_as_f16();
        assert_eq!(argument_of(&case.run_on(&device).unwrap_err()), "x");
        assert_eq!(argument_of(&case.run(Mode::Exact).unwrap_err()), "x_type");

        // A plan of another layer.
        let mut on_device = Case::new().on(&device).unwrap();
        for (shape, options) in [
            (LayerShape { top_k: 2, ..SHAPE }, options),
            (SHAPE, LayerOptions { activation: Activation::F16, ..options }),
        ] {
            let variant = Variant { fc2_warps: Fc2Warps::W1, ..VARIANTS[0] };
            on_device.plan = Plan::with_variant(&device, shape, options, 1, variant).unwrap();
            assert_eq!(argument_of(&on_device.forward().unwrap_err()), "plan");
        }
        assert_probe_works(&device);
    }
}
