//! The CPU reference against answers known beforehand: public bug reports turned into inputs, definitions spelled out
//! a second time, and f64.

use kernels_gpu::layout::scale::{padded_cols, swizzled_offset};
use megamoe::diff::{Case as Probe, Family, ONE, Random, SHAPE, draw_in, floats};
use megamoe::formats::fp4::up_gate_biases;
use megamoe::formats::quantize::quantize_mxfp4;
use megamoe::formats::{ExpertTensors, Fp4Experts};
use megamoe::reference::mma::{NAN, mma16};
use megamoe::reference::{
    Fp4View, LayerInputs, Mode, Status, combine, fc1, fc2, layer, layer_bound, math, route_prep, sum_bound,
};
use megamoe::{Activation, Error, Gating, LayerOptions, LayerShape, Order, Split, WeightFormat, XType};
use rayon::prelude::*;

const ACTIVATIONS: [Activation; 2] = [Activation::Bf16, Activation::F16];
const MODES: [Mode; 2] = [Mode::Exact, Mode::Fast];
/// The default and `decode`.
const ORDERS: [Order; 2] = [Order::Seed { split: Split::S4 }, Order::Decode];

fn options(activation: Activation, order: Order) -> LayerOptions {
    LayerOptions { activation, order, ..Default::default() }
}

/// The output of an exact probe, after checking that all orders, activations and modes agree on it and set no status.
fn answer(probe: &Probe) -> Vec<f32> {
    let mut probe = probe.clone();
    let gating = probe.options.gating;
    let wanted = probe.run(Mode::Exact).unwrap();
    for activation in ACTIVATIONS {
        for order in Order::ALL {
            for mode in MODES {
                probe.options = LayerOptions { gating, ..options(activation, order) };
                assert_eq!(probe.run(mode).unwrap(), wanted, "{activation:?} {order} {mode:?}");
            }
        }
    }
    assert_eq!(wanted.status, Status::default());
    floats(&wanted.out)
}

/// `first`, then zeros, for every token.
fn assert_first_column(probe: &Probe, first: &[f32]) {
    let out = answer(probe);
    let width = probe.shape.output;
    assert_eq!(out.len(), first.len() * width);
    for (token, (row, &first)) in out.chunks(width).zip(first).enumerate() {
        assert_eq!(row[0].to_bits(), first.to_bits(), "token {token}: {} instead of {first}", row[0]);
        assert!(row[1..].iter().all(|y| y.to_bits() == 0), "token {token}");
    }
}

fn argument_of(error: Error) -> &'static str {
    match error {
        Error::Argument { name, .. } | Error::BufferLength { name, .. } | Error::Experts { name, .. } => name,
        other => panic!("{other}"),
    }
}

#[test]
fn probe() {
    assert_first_column(&Probe::new(), &[128.0]);
}

#[test]
fn a1_each_half_has_its_own_global_scale() {
    let mut probe = Probe::new();
    probe.alpha1 = vec![[0.5, 1.0]; 4];
    assert_first_column(&probe, &[64.0]);
}

#[test]
fn a5_alphas_that_are_not_finite_are_all_named() {
    let mut probe = Probe::new();
    probe.alpha1 = vec![[1.0; 2], [1.0; 2], [1.0, f32::NAN], [f32::INFINITY, 1.0]];
    let error = probe.run(Mode::Exact).unwrap_err();
    assert!(matches!(&error, Error::Experts { name: "alpha1", experts, .. } if *experts == [2, 3]), "{error}");
    let mut probe = Probe::new();
    probe.alpha2[3] = f32::NAN;
    assert_eq!(argument_of(probe.run(Mode::Exact).unwrap_err()), "alpha2");
    probe.alpha2[3] = 0.0;
    assert_first_column(&probe, &[128.0]);
}

#[test]
fn a7_subnormal_block_scale() {
    let mut probe = Probe::new();
    probe.set_up(1, 0, 0, 0x6);
    probe.set_s13(1, 0, 0, 0x01);
    assert_first_column(&probe, &[2.0]);
}

#[test]
fn a7_all_block_scales() {
    for (byte, value) in [(0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x80, -0.0), (0xb8, -1.0), (0x7e, 448.0)] {
        assert_eq!(math::e4m3(byte), value);
    }
    let shape = LayerShape { hidden: 32, intermediate: 16, output: 2, ..SHAPE };
    for byte in 0..=255u8 {
        let mut probe = Probe::with_shape(shape, 1);
        probe.set_up(1, 0, 0, 0x2);
        probe.set_s13(1, 0, 0, byte);
        // The value by a table of exponents: 2^-9 · mantissa, doubled for each exponent step above the subnormals.
        let (exponent, mantissa) = (byte >> 3 & 15, byte & 7);
        let magnitude = match exponent {
            0 => f32::from(mantissa) / 512.0,
            _ => (f32::from(mantissa) + 8.0) / 512.0 * 2f32.powi(i32::from(exponent) - 1),
        };
        let wanted = if byte & 0x7f == 0x7f {
            f32::from_bits(NAN)
        } else if magnitude == 0.0 {
            0.0 // the tensor cores' zeros are +0
        } else {
            256.0 * if byte & 0x80 == 0 { magnitude } else { -magnitude }
        };
        if wanted.is_nan() {
            let out = probe.run(Mode::Exact).unwrap().out;
            // h[0] is NaN, and every output row has a weight for it: 0·NaN.
            assert!(out.iter().all(|&y| y == 0x7fff), "{byte:02x}");
        } else if wanted.abs() <= 448.0 * 128.0 {
            assert_first_column(&probe, &[wanted]);
        } else {
            assert_eq!(floats(&probe.run(Mode::Exact).unwrap().out)[0], wanted, "{byte:02x}");
        }
    }
}

#[test]
fn b1_up_rows_come_first() {
    let mut probe = Probe::new();
    probe.set_up(1, 0, 0, 0x9);
    assert_first_column(&probe, &[-128.0]);
    probe.set_s13(1, 0, 0, 0x30);
    assert_first_column(&probe, &[-64.0]);
}

#[test]
fn b7_even_k_in_the_low_nibble() {
    let mut probe = Probe::new();
    probe.w13[1 << 17] = 0x24;
    assert_first_column(&probe, &[512.0]);
}

fn d1_weights(top_k: usize, tokens: usize) -> Probe {
    let mut probe = Probe::with_shape(LayerShape { top_k, ..SHAPE }, tokens);
    for (expert, code) in [1, 2, 4, 5].into_iter().enumerate() {
        probe.set_w2(expert, 0, 0, code);
    }
    probe
}

#[test]
fn d1_skipped_pairs() {
    let mut probe = d1_weights(2, 3);
    probe.topk_ids = vec![1, -1, -1, -1, -1, 2];
    probe.topk_w = vec![0.5, 0.25, 9.0, 9.0, 1.0, 2.0];
    assert_first_column(&probe, &[64.0, 0.0, 512.0]);
    // Any id below 0 is skipped and remarked by nobody; one from E on is skipped and sets the status.
    probe.topk_ids[1] = i32::MIN;
    assert_first_column(&probe, &[64.0, 0.0, 512.0]);
    for bad in [4, 5, i32::MAX] {
        probe.topk_ids[1] = bad;
        for mode in MODES {
            let result = probe.run(mode).unwrap();
            assert_eq!(result.status, Status { bad_id: true, f16_range: false });
            assert_eq!(floats(&result.out)[0], 64.0);
        }
    }
}

#[test]
fn d1_combine_does_not_read_rows_of_skipped_pairs() {
    let route = route_prep(&[1, -1, -1, -1, -1, 2], 2, 4).unwrap();
    let nan = f32::NAN;
    let out = combine(&[64.0, nan, nan, nan, nan, 512.0], 1, &route).unwrap();
    assert_eq!(floats(&out), [64.0, 0.0, 512.0]);
    // The sum starts at +0.
    assert_eq!(combine(&[-0.0, nan, nan, nan, nan, -0.0], 1, &route).unwrap(), [0, 0, 0]);
}

#[test]
fn d3_an_expert_twice_for_one_token() {
    let mut probe = d1_weights(2, 1);
    probe.topk_ids = vec![2, 2];
    probe.topk_w = vec![0.25, 0.5];
    assert_first_column(&probe, &[192.0]);
    let mut probe = d1_weights(8, 9);
    probe.topk_ids.fill(2);
    probe.topk_w.fill(0.125);
    assert_first_column(&probe, &[256.0; 9]);
}

#[test]
fn e1_no_tokens() {
    let probe = Probe::with_shape(SHAPE, 0);
    for mode in MODES {
        let result = probe.run(mode).unwrap();
        assert_eq!((result.out.len(), result.status), (0, Status::default()));
    }
    assert_eq!(layer_bound(&probe.view(), &probe.options, &probe.inputs()).unwrap(), [0.0; 0]);
    assert_first_column(&Probe::new(), &[128.0]);
}

#[test]
fn e5_all_tokens_on_the_last_expert() {
    for tokens in [9, 4096] {
        let mut probe = Probe::with_shape(LayerShape { experts: 384, ..SHAPE }, tokens);
        probe.topk_ids.fill(383);
        probe.set_up(383, 0, 0, 0);
        probe.set_up(383, 0, 1, 1);
        for token in 0..tokens {
            probe.set_x(token, 1, (2 * (token % 16)) as f32);
        }
        let out = floats(&probe.run(Mode::Exact).unwrap().out);
        for (token, row) in out.chunks(128).enumerate() {
            assert_eq!(row[0], (32 * (token % 16)) as f32);
            assert!(row[1..].iter().all(|y| y.to_bits() == 0));
        }
    }
}

/// Every k and every intermediate row counts once: G = 32 from the last eight k, U = K, so out = 32·K·I.
#[test]
fn f_shapes_off_the_tile_grid() {
    for hidden in [16, 32, 112, 128, 144, 256, 272, 528] {
        for (intermediate, output) in [(16, 1), (48, 7), (128, 130), (160, 64), (320, 3)] {
            let shape = LayerShape { hidden, intermediate, output, experts: 3, top_k: 1 };
            let mut probe = Probe::blank(shape, 2);
            probe.fill_padding(0x7f);
            probe.topk_ids = vec![2, 0];
            probe.x.fill(0x3f80);
            for expert in 0..3 {
                for n in 0..intermediate {
                    (0..hidden).for_each(|k| probe.set_up(expert, n, k, 2));
                    (hidden - 8..hidden).for_each(|k| probe.set_gate(expert, n, k, 6));
                    (0..output).for_each(|row| probe.set_w2(expert, row, n, 2));
                }
            }
            let out = answer_in_bf16(&probe);
            let wanted = (32 * hidden * intermediate) as f32;
            let wanted = math::to_f32(Activation::Bf16, math::from_f32(Activation::Bf16, wanted));
            assert!(out.iter().all(|&y| y == wanted), "{shape:?}: {wanted} {out:?}");
        }
    }
}

/// Like [`answer`] where h leaves f16's range.
fn answer_in_bf16(probe: &Probe) -> Vec<f32> {
    let mut probe = probe.clone();
    let wanted = probe.run(Mode::Exact).unwrap();
    for order in Order::ALL {
        for mode in MODES {
            probe.options = options(Activation::Bf16, order);
            assert_eq!(probe.run(mode).unwrap(), wanted, "{order} {mode:?}");
        }
    }
    floats(&wanted.out)
}

#[test]
fn g5_expert_counts_around_a_block_size() {
    for experts in [1, 1023, 1024, 1025, 4096] {
        let shape = LayerShape { experts, hidden: 32, intermediate: 16, output: 2, top_k: 1 };
        let mut probe = Probe::with_shape(shape, 1);
        probe.topk_ids.fill(experts as i32 - 1);
        assert_first_column(&probe, &[128.0]);
    }
}

fn h1() -> Probe {
    let mut probe = Probe::new();
    probe.set_x(0, 0, 80.0);
    probe.set_up(1, 0, 0, 0x6);
    probe.set_w2(1, 0, 0, 0x1);
    probe.alpha2.fill(1.0 / 1024.0);
    probe
}

#[test]
fn h1_h_above_the_range_of_f16() {
    let mut probe = h1();
    assert_eq!(answer_in_bf16(&probe)[0], 50.0);
    probe.options.activation = Activation::F16;
    for mode in MODES {
        let result = probe.run(mode).unwrap();
        assert_eq!(result.status, Status { bad_id: false, f16_range: true });
        assert_eq!(floats(&result.out)[0], f32::INFINITY);
    }
}

#[test]
fn h1_x_above_the_range_of_f16() {
    let mut probe = Probe::with_shape(SHAPE, 2);
    probe.options.activation = Activation::F16;
    probe.set_x(1, 900, 65536.0);
    assert!(probe.run(Mode::Exact).unwrap().status.f16_range);
    // A token that no expert sees is not converted; an infinity was none before.
    probe.topk_ids[1] = -1;
    assert!(!probe.run(Mode::Exact).unwrap().status.f16_range);
    probe.topk_ids[1] = 1;
    probe.set_x(1, 900, f32::INFINITY);
    assert!(!probe.run(Mode::Exact).unwrap().status.f16_range);
    // Hidden states that are f16 already.
    let mut probe = Probe { x_type: XType::F16, ..Probe::new() };
    probe.set_x(0, 0, 8.0);
    assert_eq!(argument_of(probe.run(Mode::Exact).unwrap_err()), "x_type");
    probe.options.activation = Activation::F16;
    assert_eq!(floats(&probe.run(Mode::Exact).unwrap().out)[0], 128.0);
}

#[test]
fn h3_silu_of_a_large_negative_gate() {
    for gate in [-88.0, -89.0, -200.0, -1e30] {
        let y = math::gated(Gating::default(), gate, 3.0);
        assert!(y.abs() <= 1e-35, "{gate}: {y}");
    }
    assert_eq!(math::gated(Gating::default(), f32::NEG_INFINITY, 3.0).to_bits(), NAN);
    let mut probe = Probe::new();
    probe.alpha1 = vec![[1.0, -1e30]; 4];
    assert_first_column(&probe, &[0.0]);
}

#[test]
fn h5_bytes_in_the_padding_of_the_scales() {
    for shape in [
        LayerShape { hidden: 2880, intermediate: 160, output: 2880, experts: 2, top_k: 2 },
        LayerShape { hidden: 48, intermediate: 32, output: 5, experts: 3, top_k: 1 },
    ] {
        let mut probe = Probe::random(shape, 2, 5);
        probe.topk_ids.fill(1);
        let wanted = probe.run(Mode::Exact).unwrap();
        assert!(floats(&wanted.out).iter().all(|y| y.is_finite()));
        for byte in [0x00, 0x7f, 0xff, 0x7e] {
            probe.fill_padding(byte);
            assert_eq!(probe.run(Mode::Exact).unwrap(), wanted);
        }
        // And a byte that is not padding does count.
        probe.set_s13(1, 2 * shape.intermediate - 1, shape.hidden / 16 - 1, 0x7f);
        assert!(floats(&probe.run(Mode::Exact).unwrap().out).iter().all(|y| y.is_nan()));
    }
}

#[test]
fn h6_clamp() {
    let mut probe = Probe::new();
    probe.options.gating = Gating::Silu { limit: Some(1.0) };
    probe.set_up(1, 0, 0, 0x6);
    assert_first_column(&probe, &[0.730_468_75]);
    probe.set_up(1, 0, 0, 0xe);
    probe.set_gate(1, 0, 0, 0xe);
    for activation in ACTIVATIONS {
        probe.options.activation = activation;
        assert!(floats(&probe.run(Mode::Exact).unwrap().out)[0].abs() <= 1e-6);
    }
    // A limit that is infinite is no limit; a NaN passes through the clamp.
    let mut probe = Probe::new();
    probe.options.gating = Gating::Silu { limit: Some(f32::INFINITY) };
    assert_first_column(&probe, &[128.0]);
    assert_eq!(math::gated(Gating::Silu { limit: Some(1.0) }, f32::NAN, 1.0).to_bits(), NAN);
    assert_eq!(math::gated(Gating::Silu { limit: Some(1.0) }, 1.0, f32::NAN).to_bits(), NAN);
    for limit in [0.0, -1.0, f32::NAN, f32::NEG_INFINITY] {
        probe.options.gating = Gating::Silu { limit: Some(limit) };
        assert_eq!(argument_of(probe.run(Mode::Exact).unwrap_err()), "limit");
    }
}

#[test]
fn k1_order_of_the_final_sum() {
    let mut probe = Probe::with_shape(LayerShape { top_k: 4, ..SHAPE }, 1);
    probe.topk_ids = vec![0, 1, 2, 3];
    probe.topk_w = [17, -7, -7, 17].map(|e| 2f32.powi(e)).to_vec();
    probe.topk_w[3] *= -1.0;
    assert_first_column(&probe, &[0.0]);
    probe.topk_w.swap(1, 3);
    assert_first_column(&probe, &[2.0]);
}

/// The two scalars are multiplied first: 2^-100 · 2^-100 is 0 in f32, whatever follows.
#[test]
fn fc2_multiplies_alpha_and_weight_first() {
    let mut probe = Probe::new();
    probe.alpha2.fill(2f32.powi(-100));
    probe.topk_w.fill(2f32.powi(-100));
    probe.alpha1 = vec![[2f32.powi(110), 1.0]; 4];
    assert_eq!(answer_in_bf16(&probe)[0], 0.0);
    probe.topk_w.fill(1.0);
    assert_eq!(answer_in_bf16(&probe)[0], 128.0 * 2f32.powi(10));
}

#[test]
fn l6_nan_rows_stay_by_themselves() {
    let shape = LayerShape { hidden: 96, intermediate: 48, output: 40, experts: 4, top_k: 2 };
    let mut probe = Probe::random(shape, 8, 6);
    probe.topk_ids = (0..16).map(|pair| pair % 4).collect();
    let real = probe.tokens_only(0..5).run(Mode::Exact).unwrap().out;
    probe.x[5 * 96..].fill(0x7fc1);
    let out = probe.run(Mode::Exact).unwrap().out;
    assert_eq!(out[..real.len()], real);
    assert!(out[real.len()..].iter().all(|&y| y == 0x7fff));
    probe.topk_ids[10..].fill(-1);
    let out = probe.run(Mode::Exact).unwrap().out;
    assert_eq!(out[..real.len()], real);
    assert!(out[real.len()..].iter().all(|&y| y == 0));
}

#[test]
fn m1_each_buffer_one_short() {
    let shape = LayerShape { hidden: 32, intermediate: 16, output: 3, experts: 2, top_k: 2 };
    let probe = Probe::with_shape(shape, 2);
    probe.run(Mode::Exact).unwrap();
    type Shorten = fn(&mut Probe);
    let buffers: [(&str, Shorten); 9] = [
        ("x", |p| p.x.truncate(p.x.len() - 1)),
        ("topk_ids", |p| p.topk_ids.truncate(p.topk_ids.len() - 1)),
        ("topk_w", |p| p.topk_w.truncate(p.topk_w.len() - 1)),
        ("w13", |p| p.w13.truncate(p.w13.len() - 1)),
        ("s13", |p| p.s13.truncate(p.s13.len() - 1)),
        ("alpha1", |p| p.alpha1.truncate(p.alpha1.len() - 1)),
        ("w2", |p| p.w2.truncate(p.w2.len() - 1)),
        ("s2", |p| p.s2.truncate(p.s2.len() - 1)),
        ("alpha2", |p| p.alpha2.truncate(p.alpha2.len() - 1)),
    ];
    for (name, shorten) in buffers {
        let mut probe = probe.clone();
        shorten(&mut probe);
        for mode in MODES {
            assert_eq!(argument_of(probe.run(mode).unwrap_err()), name);
        }
        assert_eq!(argument_of(layer_bound(&probe.view(), &probe.options, &probe.inputs()).unwrap_err()), name);
    }
}

#[test]
fn shapes_outside_the_limits_name_the_argument() {
    let mut probe = Probe::new();
    let huge = usize::MAX;
    let cases: [(&str, LayerShape); 13] = [
        ("experts", LayerShape { experts: 0, ..SHAPE }),
        ("experts", LayerShape { experts: 4097, ..SHAPE }),
        ("top_k", LayerShape { top_k: 0, ..SHAPE }),
        ("top_k", LayerShape { top_k: 33, ..SHAPE }),
        ("hidden", LayerShape { hidden: 0, ..SHAPE }),
        ("hidden", LayerShape { hidden: 1000, ..SHAPE }),
        ("hidden", LayerShape { hidden: huge & !15, ..SHAPE }),
        ("intermediate", LayerShape { intermediate: 8, ..SHAPE }),
        ("intermediate", LayerShape { intermediate: huge & !15, ..SHAPE }),
        ("output", LayerShape { output: 0, ..SHAPE }),
        ("output", LayerShape { output: huge, ..SHAPE }),
        ("w13", LayerShape { hidden: 1 << 30, intermediate: 1 << 30, experts: 4096, ..SHAPE }),
        ("w13", LayerShape { hidden: 2048, ..SHAPE }),
    ];
    for (name, shape) in cases {
        probe.shape = shape;
        assert_eq!(argument_of(probe.run(Mode::Exact).unwrap_err()), name, "{shape:?}");
    }
    probe.shape = SHAPE;
    let inputs = LayerInputs { tokens: 1 << 31, ..probe.inputs() };
    assert_eq!(argument_of(inputs.check(&SHAPE, Activation::Bf16).unwrap_err()), "tokens");
    assert_eq!(argument_of(route_prep(&[0, 1, 2], 2, 4).unwrap_err()), "topk_ids");
    let route = route_prep(&[0], 1, 5).unwrap();
    let result = fc1(&probe.view(), &probe.options, &probe.x, &route, Mode::Exact);
    assert_eq!(argument_of(result.unwrap_err()), "route");
}

#[test]
fn route_prep_is_stable_and_splits_at_eight() {
    let mut ids = vec![3, -1, 0, 7, 3, 4];
    ids.extend([0; 8]);
    let route = route_prep(&ids, 2, 4).unwrap();
    assert!(route.bad_id_seen());
    assert_eq!(route.tokens(), 7);
    let entries = route.entries().iter().map(|entry| (entry.expert, entry.pairs)).collect::<Vec<_>>();
    let wanted =
        [(0, [2, 6, 7, 8, 9, 10, 11, 12]), (0, [13, -1, -1, -1, -1, -1, -1, -1]), (3, [0, 4, -1, -1, -1, -1, -1, -1])];
    assert_eq!(entries, wanted);
    assert!(!route_prep(&[3, -5], 1, 4).unwrap().bad_id_seen());
}

/// The definition once more, one output at a time: (h, ypart).
fn by_the_book(probe: &Probe) -> (Vec<u16>, Vec<f32>) {
    let LayerShape { hidden, intermediate, output, experts, top_k } = probe.shape;
    let LayerOptions { format, activation, order, gating } = probe.options;
    let block = format.block();
    let fold = match (order, format, activation) {
        (Order::Decode, WeightFormat::Nvfp4, Activation::Bf16) => 8,
        (Order::Decode, WeightFormat::Nvfp4, Activation::F16) => 7,
        _ => 0,
    };
    let weight = |codes: &[u8], scales: &[u8], row: usize, k: usize, cols: usize| -> u16 {
        if k >= cols {
            return 0;
        }
        let code = codes[row * cols / 2 + k / 2] >> (4 * (k % 2)) & 15;
        let scale = scales[swizzled_offset(row, k / block, padded_cols(cols / block))];
        let scale = match format {
            WeightFormat::Nvfp4 => math::e4m3(scale),
            WeightFormat::Mxfp4 if scale == 255 => f32::NAN,
            WeightFormat::Mxfp4 => 2f64.powi(i32::from(scale) - 127) as f32,
        };
        math::from_f32(activation, math::e2m1(code) * scale * 2f32.powi(-fold))
    };
    let chain = |weight: &dyn Fn(usize) -> u16, x: &dyn Fn(usize) -> u16, chunks: Vec<usize>| {
        let mut c = 0;
        for chunk in chunks {
            for j in 0..8 {
                let (mut a, mut b) = ([0; 16], [0; 16]);
                for t in 0..4 {
                    for i in 0..4 {
                        let k = match order {
                            Order::Seed { .. } => 128 * chunk + 32 * t + 4 * j + i,
                            Order::Decode => 128 * chunk + 32 * t + 8 * (j / 2) + 2 * (j % 2) + [0, 1, 4, 5][i],
                        };
                        (a[4 * t + i], b[4 * t + i]) = (weight(k), x(k));
                    }
                }
                c = mma16(activation, &a, &b, c);
            }
        }
        f32::from_bits(c)
    };
    let pairs = probe.tokens * top_k;
    let (mut h, mut ypart) = (vec![0; pairs * intermediate], vec![0.0; pairs * output]);
    for pair in 0..pairs {
        let id = probe.topk_ids[pair];
        if id < 0 || id >= experts as i32 {
            continue;
        }
        let e = id as usize;
        let part = |all: usize| all / experts * e..all / experts * (e + 1);
        let (w13, s13) = (&probe.w13[part(probe.w13.len())], &probe.s13[part(probe.s13.len())]);
        let (w2, s2) = (&probe.w2[part(probe.w2.len())], &probe.s2[part(probe.s2.len())]);
        let x = |k: usize| match probe.x[pair / top_k * hidden..][..hidden].get(k) {
            None => 0,
            Some(&x) if activation == Activation::Bf16 => x,
            Some(&x) => math::from_f32(Activation::F16, math::to_f32(Activation::Bf16, x)),
        };
        for n in 0..intermediate {
            let sum = |row: usize| {
                let segments = hidden.div_ceil(256);
                let mut total = None;
                let s = if let Order::Seed { split } = order { split.count() } else { 4 };
                for i in 0..s {
                    let belongs = |chunk: &usize| match order {
                        Order::Seed { .. } => (i * segments / s..(i + 1) * segments / s).contains(&(chunk / 2)),
                        Order::Decode => chunk / 2 % 4 == i,
                    };
                    let chunks = (0..hidden.div_ceil(128)).filter(belongs).collect();
                    let part = chain(&|k| weight(w13, s13, row, k, hidden), &x, chunks);
                    total = Some(total.map_or(part, |total: f32| total + part));
                }
                total.unwrap() * 2f32.powi(fold)
            };
            let [alpha_up, alpha_gate] = probe.alpha1[e];
            let (mut u, mut g) = (alpha_up * sum(n), alpha_gate * sum(intermediate + n));
            if let Some(b13) = &probe.b13 {
                let b13 = &b13[e * 2 * intermediate..];
                (u, g) = (u + b13[n], g + b13[intermediate + n]);
            }
            if let Some(limit) = gating.limit() {
                // Comparisons with NaN are false: it stays.
                g = if g > limit { limit } else { g };
                u = if u > limit { limit } else { u };
                u = if u < -limit { -limit } else { u };
            }
            let joined = match gating {
                Gating::Silu { .. } => g / (1.0 + math::exp(-g)) * u,
                Gating::SwigluOai { alpha, .. } => (u + 1.0) * (g * (1.0 / (1.0 + math::exp(-(alpha * g))))),
            };
            h[pair * intermediate + n] = math::from_f32(activation, joined);
        }
        let (alpha, topk_w) = (probe.alpha2[e], probe.topk_w[pair]);
        for row in 0..output {
            let h = |k: usize| if k < intermediate { h[pair * intermediate + k] } else { 0 };
            let y = chain(&|k| weight(w2, s2, row, k, intermediate), &h, (0..intermediate.div_ceil(128)).collect());
            let y = y * 2f32.powi(fold);
            ypart[pair * output + row] = match &probe.b2 {
                Some(b2) => (alpha * y + b2[e * output + row]) * topk_w,
                None => alpha * topk_w * y,
            };
        }
    }
    (h, ypart)
}

const ODD_SHAPES: [LayerShape; 5] = [
    LayerShape { hidden: 16, intermediate: 16, output: 1, experts: 1, top_k: 1 },
    LayerShape { hidden: 272, intermediate: 48, output: 9, experts: 3, top_k: 2 },
    LayerShape { hidden: 1040, intermediate: 32, output: 24, experts: 2, top_k: 3 },
    LayerShape { hidden: 640, intermediate: 144, output: 17, experts: 5, top_k: 4 },
    LayerShape { hidden: 2048, intermediate: 16, output: 8, experts: 2, top_k: 1 },
];

#[test]
fn exact_mode_equals_the_definition() {
    let mut checked = 0;
    for (seed, shape) in ODD_SHAPES.into_iter().enumerate() {
        for activation in ACTIVATIONS {
            for order in Order::ALL {
                let mut probe = Probe::random(shape, 3, seed as u64);
                probe.options =
                    LayerOptions { gating: Gating::Silu { limit: Some(0.75) }, ..options(activation, order) };
                if seed == 1 {
                    probe.set_x(1, 100, f32::NAN);
                    probe.set_x(2, 271, f32::INFINITY);
                }
                checked += check_by_the_book(&probe);
            }
        }
    }
    assert!(checked > 500, "{checked}");
}

/// h, weighted results and output of the exact mode are the definition's; how many outputs are not 0.
#[track_caller]
fn check_by_the_book(probe: &Probe) -> usize {
    let (shape, options) = (probe.shape, probe.options);
    let (h, ypart) = by_the_book(probe);
    let route = route_prep(&probe.topk_ids, shape.top_k, shape.experts).unwrap();
    let (x, _) = megamoe::reference::convert_x(&probe.inputs(), &shape, options.activation, &route).unwrap();
    let (got_h, _) = fc1(&probe.view(), &options, &x, &route, Mode::Exact).unwrap();
    assert_eq!(got_h, h, "{shape:?} {options:?}");
    let got = fc2(&probe.view(), &options, &h, &probe.topk_w, &route, Mode::Exact).unwrap();
    let bits = |y: &[f32]| y.iter().map(|&y| math::canonical(y).to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&ypart), "{shape:?} {options:?}");
    assert!(got.iter().filter(|y| y.is_nan()).all(|y| y.to_bits() == NAN));
    let out = combine(&ypart, shape.output, &route).unwrap();
    assert_eq!(probe.run(Mode::Exact).unwrap().out, out);
    out.iter().filter(|&&y| y != 0).count()
}

const MXFP4_SHAPES: [LayerShape; 4] = [
    LayerShape { hidden: 32, intermediate: 32, output: 1, experts: 1, top_k: 1 },
    LayerShape { hidden: 288, intermediate: 64, output: 9, experts: 3, top_k: 2 },
    LayerShape { hidden: 1056, intermediate: 32, output: 24, experts: 2, top_k: 3 },
    LayerShape { hidden: 640, intermediate: 160, output: 17, experts: 5, top_k: 4 },
];

/// A case with MXFP4 weights, and biases and gating by turns.
fn mxfp4_case(family: Family, shape: LayerShape, tokens: usize, activation: Activation, turn: usize) -> Probe {
    let mut probe = draw_in(WeightFormat::Mxfp4, family, shape, tokens, turn as u64);
    let gating = [Gating::GPT_OSS, Gating::Silu { limit: Some(0.75) }, Gating::Silu { limit: None }][turn % 3];
    let order = Order::ALL[turn % 5];
    probe.options = LayerOptions { activation, order, gating, ..probe.options };
    if turn.is_multiple_of(2) {
        probe.add_biases(turn as u64);
    }
    if activation == Activation::F16 { probe.fit_f16() } else { probe }
}

#[test]
fn exact_mode_equals_the_definition_with_mxfp4() {
    let (mut checked, mut turn) = (0, 0);
    for family in [Family::Random, Family::Codes, Family::Subnormal, Family::Special, Family::Extreme] {
        for shape in MXFP4_SHAPES {
            for activation in ACTIVATIONS {
                checked += check_by_the_book(&mxfp4_case(family, shape, 3, activation, turn));
                turn += 1;
            }
        }
    }
    // NVFP4 with biases and gpt-oss's gating.
    for (seed, shape) in ODD_SHAPES.into_iter().enumerate() {
        for order in ORDERS {
            let mut probe = Probe::random(shape, 3, seed as u64);
            probe.add_biases(seed as u64);
            (probe.options.gating, probe.options.order) = (Gating::GPT_OSS, order);
            checked += check_by_the_book(&probe);
        }
    }
    assert!(checked > 500, "{checked}");
}

#[test]
fn gpt_oss_gating_of_special_values() {
    let oai = |alpha, limit| Gating::SwigluOai { alpha, limit };
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    // sigmoid(17) is 1 - 4e-8, which rounds to 1; the clamps act on gate from above, on up on both sides.
    assert_eq!(math::gated(oai(1.702, 20.0), 17.0, 3.0), 68.0);
    assert_eq!(math::gated(oai(1.702, 20.0), 100.0, 100.0), 420.0);
    assert_eq!(math::gated(oai(1.702, 20.0), 20.0, -100.0), -380.0);
    assert_eq!(math::gated(oai(1.702, 7.0), -1000.0, 5.0), -0.0);
    // Up is -1: nothing comes through, whatever the gate, but for what is not a number.
    assert_eq!(math::gated(Gating::GPT_OSS, 5.0, -1.0), 0.0);
    assert_eq!(math::gated(oai(0.0, 7.0), 6.0, 1.0), 6.0);
    for (gate, up) in [(nan, 1.0), (1.0, nan), (nan, nan), (f32::NEG_INFINITY, 1.0)] {
        assert_eq!(math::gated(Gating::GPT_OSS, gate, up).to_bits(), NAN, "{gate}, {up}");
    }
    assert_eq!(math::gated(oai(1.0, inf), inf, 1.0), inf);
    assert_eq!(math::gated(oai(1.0, inf), 1.0, -inf), -inf);
    // -1 times infinity less 1 is 0 times infinity.
    assert_eq!(math::gated(oai(1.0, inf), inf, -1.0).to_bits(), NAN);
    // A clamp bounds infinities.
    assert!(math::gated(Gating::GPT_OSS, inf, inf).is_finite());
}

/// Weights from our own quantiser, interleaved as gpt-oss's files have them, then a layer in plain f32 on the dequantised weights, by
/// another program than the reference: biases, clamps and sizes as in gpt-oss, scaled down.
#[test]
fn mxfp4_layers_are_near_a_plain_one() {
    let shape = LayerShape { hidden: 288, intermediate: 96, output: 288, experts: 6, top_k: 3 };
    let LayerShape { hidden, intermediate, output, experts, top_k } = shape;
    let mut random = Random(77);
    let mut normal = |scale: f32| (0..4).map(|_| random.in_range(-1.0, 1.0)).sum::<f32>() * scale;
    let mut bf16 = |len: usize, scale: f32| -> Vec<u16> {
        (0..len).map(|_| math::from_f32(Activation::Bf16, normal(scale))).collect()
    };
    let mut tensors = vec![];
    let mut weights = vec![];
    for _ in 0..experts {
        let gate_up =
            quantize_mxfp4("gate_up", &bf16(2 * intermediate * hidden, 0.15), 2 * intermediate, hidden).unwrap();
        let down = quantize_mxfp4("down", &bf16(output * intermediate, 0.15), output, intermediate).unwrap();
        weights.push((gate_up.dequantize(), down.dequantize()));
        let [gate, up] = gate_up.split_interleaved().unwrap();
        tensors.push(ExpertTensors { gate, up, down });
    }
    let tokens = 9;
    let x = bf16(tokens * hidden, 1.0);
    let bias = |len: usize, normal: &mut dyn FnMut(f32) -> f32| -> Vec<f32> { (0..len).map(|_| normal(0.5)).collect() };
    let mut gate_up_bias = bias(experts * 2 * intermediate, &mut normal);
    // So large that both clamps act in every token.
    (gate_up_bias[0], gate_up_bias[1]) = (9.0, -8.5);
    let down_bias = bias(experts * output, &mut normal);
    let packed = Fp4Experts::pack(&tensors)
        .unwrap()
        .with_biases(Some(up_gate_biases(&gate_up_bias, experts, intermediate).unwrap()), Some(down_bias.clone()))
        .unwrap();
    let topk_ids: Vec<i32> = (0..tokens * top_k).map(|pair| ((pair * 5 + pair / 7) % experts) as i32).collect();
    let topk_w: Vec<f32> = (0..tokens * top_k).map(|pair| 0.1 + 0.05 * (pair % 11) as f32).collect();

    let plain: Vec<f32> = (0..tokens)
        .into_par_iter()
        .flat_map(|token| {
            let x: Vec<f32> =
                x[token * hidden..][..hidden].iter().map(|&x| math::to_f32(Activation::Bf16, x)).collect();
            let mut out = vec![0.0f32; output];
            for pair in token * top_k..(token + 1) * top_k {
                let e = topk_ids[pair] as usize;
                let (gate_up, down) = &weights[e];
                let row = |w: &[f32], x: &[f32], r: usize| {
                    w[r * x.len()..][..x.len()].iter().zip(x).map(|(w, x)| w * x).sum::<f32>()
                };
                let h: Vec<f32> = (0..intermediate)
                    .map(|n| {
                        let bias = &gate_up_bias[e * 2 * intermediate..];
                        let gate = (row(gate_up, &x, 2 * n) + bias[2 * n]).min(7.0);
                        let up = (row(gate_up, &x, 2 * n + 1) + bias[2 * n + 1]).clamp(-7.0, 7.0);
                        gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
                    })
                    .collect();
                for (r, out) in out.iter_mut().enumerate() {
                    *out += topk_w[pair] * (row(down, &h, r) + down_bias[e * output + r]);
                }
            }
            out
        })
        .collect();
    let distance = |a: &[f32], b: &[f32]| {
        let square = |all: &mut dyn Iterator<Item = f32>| all.map(|x| f64::from(x).powi(2)).sum::<f64>();
        (square(&mut a.iter().zip(b).map(|(a, b)| a - b)) / square(&mut b.iter().copied())).sqrt()
    };
    let view = Fp4View {
        shape,
        format: packed.format(),
        w13: packed.w13(),
        s13: packed.s13().bytes(),
        alpha1: packed.alpha1(),
        b13: packed.b13(),
        w2: packed.w2(),
        s2: packed.s2().bytes(),
        alpha2: packed.alpha2(),
        b2: packed.b2(),
    };
    let inputs = LayerInputs { tokens, x: &x, x_type: XType::Bf16, topk_ids: &topk_ids, topk_w: &topk_w };
    for (activation, most) in [(Activation::Bf16, 4e-3), (Activation::F16, 2.5e-3)] {
        for mode in MODES {
            let arithmetic =
                |gating| LayerOptions { format: WeightFormat::Mxfp4, activation, gating, ..Default::default() };
            let run = |view: &Fp4View, gating| floats(&layer(view, &arithmetic(gating), &inputs, mode).unwrap().out);
            let error = distance(&run(&view, Gating::GPT_OSS), &plain);
            assert!(error < most, "{activation:?} {mode:?}: {error}");
            // Nothing that a mistake in the layout would give is as near.
            let wrong = [
                run(&view, Gating::Silu { limit: Some(7.0) }),
                run(&Fp4View { b13: None, ..view }, Gating::GPT_OSS),
                run(&Fp4View { b13: Some(&gate_up_bias), ..view }, Gating::GPT_OSS),
                run(&Fp4View { b2: None, ..view }, Gating::GPT_OSS),
            ];
            assert!(wrong.iter().all(|wrong| distance(wrong, &plain) > 10.0 * most));
        }
    }
}

#[test]
fn fast_mode_stays_within_the_stated_bound_with_mxfp4() {
    let mut turn = 0;
    for family in [Family::Random, Family::Codes, Family::Subnormal, Family::OneExpert] {
        for shape in MXFP4_SHAPES {
            for activation in ACTIVATIONS {
                let probe = mxfp4_case(family, shape, 6, activation, turn);
                turn += 1;
                let bound = layer_bound(&probe.view(), &probe.options, &probe.inputs()).unwrap();
                let exact = probe.run(Mode::Exact).unwrap().out;
                let fast = probe.run(Mode::Fast).unwrap().out;
                let what = format!("{family} {shape:?} {:?}", probe.options);
                for (i, ((a, b), bound)) in floats(&exact).iter().zip(floats(&fast)).zip(&bound).enumerate() {
                    let same = a.to_bits() == b.to_bits();
                    assert!(same || bound.is_infinite() || (a - b).abs() <= *bound, "{what}, {i}: {a}, {b}, {bound}");
                }
                if family == Family::Random {
                    let mut swapped = probe.clone();
                    swapped.w13.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
                    assert!(!within(&exact, &swapped.run(Mode::Fast).unwrap().out, &bound), "{what}");
                }
            }
        }
    }
}

/// Orders are different sums: order and split are part of what the bits depend on.
#[test]
fn orders_give_different_bits() {
    let shape = LayerShape { hidden: 2048, intermediate: 64, output: 64, experts: 2, top_k: 2 };
    let mut probe = Probe::random(shape, 8, 3);
    probe.alpha1.fill([0.002, 0.002]);
    let results = Order::ALL.map(|order| {
        probe.options = options(Activation::F16, order);
        probe.run(Mode::Exact).unwrap().out
    });
    for (i, out) in results.iter().enumerate() {
        assert!(results[..i].iter().all(|other| other != out), "{}", Order::ALL[i]);
    }
}

#[test]
fn tokens_do_not_depend_on_their_batch() {
    let shape = LayerShape { hidden: 272, intermediate: 48, output: 20, experts: 3, top_k: 2 };
    for order in ORDERS {
        let mut probe = Probe::random(shape, 40, 11);
        probe.options.order = order;
        let whole = probe.run(Mode::Exact).unwrap().out;
        for token in 0..40 {
            let alone = probe.tokens_only(token..token + 1).run(Mode::Exact).unwrap().out;
            assert_eq!(alone, whole[token * 20..(token + 1) * 20], "{order}, token {token}");
        }
    }
}

const FORMATS: [(WeightFormat, Activation); 4] = [
    (WeightFormat::Nvfp4, Activation::Bf16),
    (WeightFormat::Nvfp4, Activation::F16),
    (WeightFormat::Mxfp4, Activation::Bf16),
    (WeightFormat::Mxfp4, Activation::F16),
];

/// 2^exponent, subnormals included.
fn power(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

/// A power of two as a block scale.
fn scale(format: WeightFormat, exponent: i32) -> u8 {
    match format {
        WeightFormat::Nvfp4 if exponent < -6 => 1 << (exponent + 9),
        WeightFormat::Nvfp4 => ((exponent + 7) << 3) as u8,
        WeightFormat::Mxfp4 => (exponent + 127) as u8,
    }
}

/// Sums of products, one of each row of `values` (k and value; the others are 0), with `cols` weights of 2^`weight`: what FC2 gives where
/// alpha and the pair's weight are 1.
fn sums(
    (format, activation): (WeightFormat, Activation),
    order: Order,
    cols: usize,
    weight: i32,
    values: &[Vec<(usize, f32)>],
) -> Vec<f32> {
    let shape = LayerShape { hidden: 32, intermediate: cols, output: 1, experts: 1, top_k: 1 };
    let mut probe = Probe::blank_in(format, shape, values.len());
    probe.options = LayerOptions { format, ..options(activation, order) };
    // 0.5 times twice the power; 4 times a quarter of it where that is too large for a scale.
    let (code, exponent) = if weight < 8 { (1, weight + 1) } else { (6, weight - 2) };
    (0..cols).for_each(|k| probe.set_w2(0, 0, k, code));
    (0..cols / format.block()).for_each(|block| probe.set_s2(0, 0, block, scale(format, exponent)));
    let mut h = vec![0; values.len() * cols];
    for (row, values) in values.iter().enumerate() {
        values.iter().for_each(|&(k, value)| h[row * cols + k] = math::from_f32(activation, value));
    }
    let route = route_prep(&probe.topk_ids, 1, 1).unwrap();
    fc2(&probe.view(), &probe.options, &h, &probe.topk_w, &route, Mode::Exact).unwrap()
}

/// The same for sums of FC1, which are taken from h = 32·sum: gate is 32 in every row. k = 1 is for the gate alone.
fn fc1_sums(
    (format, activation): (WeightFormat, Activation),
    order: Order,
    cols: usize,
    weight: i32,
    values: &[Vec<(usize, f32)>],
) -> Vec<f32> {
    let shape = LayerShape { hidden: cols, intermediate: 32, output: 1, experts: 1, top_k: 1 };
    let mut probe = Probe::blank_in(format, shape, values.len());
    probe.options = LayerOptions { format, ..options(activation, order) };
    let (code, exponent) = if weight < 8 { (1, weight + 1) } else { (6, weight - 2) };
    (0..cols).filter(|k| *k != 1).for_each(|k| probe.set_up(0, 0, k, code));
    (0..cols / format.block()).for_each(|block| probe.set_s13(0, 0, block, scale(format, exponent)));
    probe.set_gate(0, 0, 1, 6);
    probe.set_s13(0, 32, 0, scale(format, 3));
    let mut x = vec![0; values.len() * cols];
    for (row, values) in values.iter().enumerate() {
        x[row * cols + 1] = math::from_f32(activation, 1.0);
        values.iter().for_each(|&(k, value)| x[row * cols + k] = math::from_f32(activation, value));
    }
    let route = route_prep(&probe.topk_ids, 1, 1).unwrap();
    let (h, _) = fc1(&probe.view(), &probe.options, &x, &route, Mode::Exact).unwrap();
    h.iter().step_by(32).map(|&h| math::to_f32(activation, h) / 32.0).collect()
}

/// Beside a sum of `LARGE`, `SMALL` is nothing: an mma truncates it, an f32 addition rounds it away.
const LARGE: f32 = (1 << 15) as f32;
const SMALL: f32 = 1.0 / (1 << 12) as f32;

/// Which k an mma takes: of LARGE and -LARGE in one mma nothing is left, and of SMALL only where it comes in a later one.
#[test]
fn decode_takes_the_k_of_a_word_in_two_instructions() {
    let cols = 384;
    let mut rows = vec![];
    for large in 0..32 {
        let small = (0..cols).filter(|small| *small != large && *small != large + 32);
        rows.extend(small.map(|small| (large, small)));
    }
    let values: Vec<_> =
        rows.iter().map(|&(large, small)| vec![(large, LARGE), (large + 32, -LARGE), (small, SMALL)]).collect();
    for (formats, order) in FORMATS.into_iter().flat_map(|formats| ORDERS.map(|order| (formats, order))) {
        // The two mma of a word, and which offsets the second has.
        let second: [usize; 4] = if order == Order::Decode { [2, 3, 6, 7] } else { [4, 5, 6, 7] };
        let mma = |k: usize| 8 * (k / 128) + 2 * (k % 32 / 8) + usize::from(second.contains(&(k % 8)));
        let sums = sums(formats, order, cols, 0, &values);
        for (&(large, small), sum) in rows.iter().zip(sums) {
            let wanted = if mma(small) > mma(large) { SMALL } else { 0.0 };
            assert_eq!(sum, wanted, "{formats:?} {order}: large at {large}, small at {small}");
        }
    }
}

/// FC2 is one chain, however long: nothing between LARGE and -LARGE is left, and all that comes after them is.
#[test]
fn decode_has_one_chain_in_fc2() {
    for formats in FORMATS {
        // 17 segments; the last has 32 k.
        let cols = 16 * 256 + 32;
        let values: Vec<_> = (1..16).map(|s| vec![(3, LARGE), (256 * s, SMALL), (cols - 1, -LARGE)]).collect();
        assert!(sums(formats, Order::Decode, cols, 0, &values).iter().all(|&sum| sum == 0.0), "{formats:?}");
        let values: Vec<_> = (1..17).map(|s| vec![(3, LARGE), (256 * s - 1, -LARGE), (256 * s, SMALL)]).collect();
        assert!(sums(formats, Order::Decode, cols, 0, &values).iter().all(|&sum| sum == SMALL), "{formats:?}");
    }
}

/// Which partial sum a segment of FC1 belongs to, in which order a partial takes its segments, and in which order partials are added:
/// LARGE, SMALL and -LARGE in all ways in three of ten segments, the last of which K does not fill.
#[test]
fn decode_gives_segments_to_four_partials_in_turn() {
    let mut places = vec![];
    for (a, b, c) in (0..1000).map(|i| (i / 100, i / 10 % 10, i % 10)) {
        if a != b && b != c && a != c {
            places.push([(a, LARGE), (b, SMALL), (c, -LARGE)]);
        }
    }
    let values: Vec<Vec<_>> =
        places.iter().map(|place| place.iter().map(|&(s, value)| (256 * s + 9, value)).collect()).collect();
    // f32 additions lose SMALL where the mma do.
    let wanted = |place: &[(usize, f32); 3]| {
        let mut partials = [0.0; 4];
        let mut place = *place;
        place.sort_by_key(|(s, _)| *s);
        place.iter().for_each(|(s, value)| partials[s % 4] += value);
        ((partials[0] + partials[1]) + partials[2]) + partials[3]
    };
    for (a, b, c, sum) in [
        (0, 1, 8, SMALL), // 0 and 8 are of partial 0
        (0, 4, 8, 0.0),
        (0, 8, 4, SMALL),
        (4, 0, 8, 0.0),
        (0, 2, 1, SMALL), // p0 + p1 is 0
        (0, 1, 2, 0.0),
        (2, 0, 3, 0.0), // p2 + p3 comes too late
        (1, 9, 5, SMALL),
        (5, 1, 9, 0.0),
    ] {
        assert_eq!(wanted(&[(a, LARGE), (b, SMALL), (c, -LARGE)]), sum);
    }
    for (format, activation) in FORMATS {
        let cols = 9 * 256 + format.block();
        let sums = fc1_sums((format, activation), Order::Decode, cols, 0, &values);
        for (place, sum) in places.iter().zip(sums) {
            assert_eq!(sum, wanted(place), "{format} {activation:?} {place:?}");
        }
    }
}

/// Partial sums are added with rounding to nearest: 2^8 + 1.5·2^-16 is 2^8 + 2^-15 then.
#[test]
fn decode_rounds_sums_of_partials_to_nearest() {
    for formats in FORMATS {
        let values = [vec![(8, 256.0), (256, 1.5 / 65_536.0), (512, -256.0)]];
        assert_eq!(fc1_sums(formats, Order::Decode, 768, 0, &values), [1.0 / 32_768.0], "{formats:?}");
    }
}

/// One to four segments: each is a partial sum of its own, and those that have none add nothing.
#[test]
fn decode_has_four_partials_however_short_k_is() {
    for (format, activation) in FORMATS {
        for segments in 1..5 {
            // The last segment has one block; LARGE and -LARGE fit into it.
            let cols = 256 * (segments - 1) + format.block();
            let last = cols - format.block();
            let rows = |small: usize| vec![(small, SMALL), (last + 5, LARGE), (last + 7, -LARGE)];
            let values: Vec<_> = (0..segments).map(|s| rows(256 * s)).collect();
            let sums = fc1_sums((format, activation), Order::Decode, cols, 0, &values);
            for (s, sum) in sums.into_iter().enumerate() {
                // In its own partial SMALL meets LARGE. 5 and 7 are in two mma.
                let wanted = if s == segments - 1 { 0.0 } else { SMALL };
                assert_eq!(sum, wanted, "{format} {activation:?}, {segments} segments, small in {s}");
            }
        }
    }
}

/// A weight of 2^-10 is 2^-17 in an f16 mma. That is subnormal and counts as if it were of the size of 2^-14, so everything from
/// 2^-40 on is lost beside it: 2^-33 of the sum. Unfolded, and in MXFP4, which is not folded, it is normal.
#[test]
fn decode_folds_f16_weights_by_2_to_the_7() {
    let values: Vec<_> = [-22, -23].map(|e| vec![(0, 1.0), (1, power(e))]).into();
    let whole = [power(-10) + power(-32), power(-10) + power(-33)];
    let lost = [whole[0], power(-10)];
    for (format, order, wanted) in [
        (WeightFormat::Nvfp4, Order::Decode, lost),
        (WeightFormat::Nvfp4, Order::Seed { split: Split::S4 }, whole),
        (WeightFormat::Mxfp4, Order::Decode, whole),
    ] {
        assert_eq!(sums((format, Activation::F16), order, 32, -10, &values), wanted, "{format} {order}");
    }
}

/// With a weight of 2^-10, folded 2^-18, the accumulator holds 2^-149 for a product of 2^-141, and 0 for half of that.
#[test]
fn decode_folds_bf16_weights_by_2_to_the_8() {
    let values: Vec<_> = [-131, -132].map(|e| vec![(0, power(e))]).into();
    let [whole, lost] = [[power(-141), power(-142)], [power(-141), 0.0]];
    for (format, order, wanted) in [
        (WeightFormat::Nvfp4, Order::Decode, lost),
        (WeightFormat::Nvfp4, Order::Seed { split: Split::S4 }, whole),
        (WeightFormat::Mxfp4, Order::Decode, whole),
    ] {
        assert_eq!(sums((format, Activation::Bf16), order, 32, -10, &values), wanted, "{format} {order}");
    }
}

/// The factor belongs to the total, not to its parts and not to what follows: sums of 2^128 cancel on their way, and become infinite
/// where they are the total, whatever alpha is.
#[test]
fn decode_unfolds_the_total() {
    let huge = power(118);
    for (format, order, cancelled) in [
        (WeightFormat::Nvfp4, Order::Decode, 0.0),
        (WeightFormat::Nvfp4, Order::Seed { split: Split::S4 }, f32::INFINITY),
        (WeightFormat::Mxfp4, Order::Decode, f32::INFINITY),
    ] {
        let formats = (format, Activation::Bf16);
        // In one accumulator, and in two partial sums.
        let values = [vec![(0, huge), (8, -huge)], vec![(0, huge)]];
        assert_eq!(sums(formats, order, 32, 10, &values), [cancelled, f32::INFINITY], "{format} {order}");
        let h = fc1_sums(formats, order, 512, 10, &[vec![(0, huge), (256, -huge)], vec![(0, huge)]]);
        if format == WeightFormat::Nvfp4 && order == Order::Decode {
            assert_eq!(h, [0.0, f32::INFINITY]);
        } else {
            assert!(h[0].is_nan() && h[1] == f32::INFINITY, "{format} {order}: {h:?}");
        }
    }
    let shape = LayerShape { hidden: 16, intermediate: 16, output: 1, experts: 1, top_k: 1 };
    let mut probe = Probe::blank(shape, 1);
    probe.options.order = Order::Decode;
    let tiny = power(-20);
    (probe.alpha1[0], probe.alpha2[0], probe.topk_w[0]) = ([tiny; 2], tiny, tiny);
    // 2^118·2^10 in an up row and in w2; the gate is 32.
    for (row, exponent, code) in [(0, 8, 6), (16, 8, 6)] {
        probe.set_w13(0, row, row / 16, code);
        probe.set_s13(0, row, 0, scale(WeightFormat::Nvfp4, exponent));
    }
    probe.set_w2(0, 0, 0, 6);
    probe.set_s2(0, 0, 0, scale(WeightFormat::Nvfp4, 8));
    probe.set_x(0, 0, huge);
    probe.set_x(0, 1, 32_768.0);
    let route = route_prep(&[0], 1, 1).unwrap();
    let (h, _) = fc1(&probe.view(), &probe.options, &probe.x, &route, Mode::Exact).unwrap();
    assert_eq!(h[0], 0x7f80);
    let mut h = [0; 16];
    h[0] = math::from_f32(Activation::Bf16, huge);
    for b2 in [None, Some(vec![1.0])] {
        probe.b2 = b2;
        let y = fc2(&probe.view(), &probe.options, &h, &probe.topk_w, &route, Mode::Exact).unwrap();
        assert_eq!(y, [f32::INFINITY]);
    }
}

/// Every family of values against the definition, with the order `decode`.
#[test]
fn decode_equals_the_definition() {
    let mut checked = 0;
    for family in [Family::Codes, Family::Subnormal, Family::Special, Family::Extreme] {
        for (seed, shape) in ODD_SHAPES.into_iter().enumerate() {
            for (format, activation) in FORMATS {
                let size = |n: usize| n.next_multiple_of(format.block());
                let shape = LayerShape { hidden: size(shape.hidden), intermediate: size(shape.intermediate), ..shape };
                let mut probe = draw_in(format, family, shape, 3, seed as u64);
                probe.options = LayerOptions { format, ..options(activation, Order::Decode) };
                if activation == Activation::F16 {
                    probe = probe.fit_f16();
                }
                if seed % 2 == 1 {
                    probe.add_biases(seed as u64);
                }
                checked += check_by_the_book(&probe);
            }
        }
    }
    assert!(checked > 1000, "{checked}");
}

/// A layer in f64, on weights decoded once more and without any rounding on the way.
fn f64_layer(probe: &Probe) -> Vec<f64> {
    let LayerShape { hidden, intermediate, output, top_k, .. } = probe.shape;
    let LayerOptions { format, activation, .. } = probe.options;
    let block = format.block();
    let weight = |codes: &[u8], scales: &[u8], row: usize, k: usize, cols: usize| -> f64 {
        let code = codes[row * cols / 2 + k / 2] >> (4 * (k % 2)) & 15;
        let scale = scales[swizzled_offset(row, k / block, padded_cols(cols / block))];
        let scale = match format {
            WeightFormat::Nvfp4 => f64::from(math::e4m3(scale)),
            WeightFormat::Mxfp4 => 2f64.powi(i32::from(scale) - 127),
        };
        f64::from(math::e2m1(code)) * scale
    };
    let mut out = vec![0.0; probe.tokens * output];
    for (pair, &id) in probe.topk_ids.iter().enumerate() {
        let Some(e) = usize::try_from(id).ok().filter(|&e| e < probe.shape.experts) else { continue };
        let part = |all: usize| all / probe.shape.experts * e..all / probe.shape.experts * (e + 1);
        let (w13, s13) = (&probe.w13[part(probe.w13.len())], &probe.s13[part(probe.s13.len())]);
        let (w2, s2) = (&probe.w2[part(probe.w2.len())], &probe.s2[part(probe.s2.len())]);
        let token = pair / top_k;
        let x = |k: usize| {
            let x = math::to_f32(Activation::Bf16, probe.x[token * hidden + k]);
            f64::from(math::to_f32(activation, math::from_f32(activation, x)))
        };
        let sum = |row: usize| (0..hidden).map(|k| weight(w13, s13, row, k, hidden) * x(k)).sum::<f64>();
        let h = |n: usize| {
            let [up, gate] = probe.alpha1[e].map(f64::from);
            let (u, g) = (up * sum(n), gate * sum(intermediate + n));
            g / (1.0 + (-g).exp()) * u
        };
        let h = (0..intermediate).map(h).collect::<Vec<_>>();
        let factor = f64::from(probe.alpha2[e]) * f64::from(probe.topk_w[pair]);
        for row in 0..output {
            let y = h.iter().enumerate().map(|(k, h)| weight(w2, s2, row, k, intermediate) * h).sum::<f64>();
            out[token * output + row] += factor * y;
        }
    }
    out
}

/// Exact and fast mode of `decode` are near a layer in f64, as near as the bound says; with another exponent of two they would not be.
#[test]
fn decode_is_near_a_layer_in_f64() {
    for (seed, shape) in ODD_SHAPES.into_iter().enumerate().filter(|(_, shape)| shape.hidden > 256) {
        for (format, activation) in FORMATS {
            let size = |n: usize| n.next_multiple_of(format.block());
            let shape = LayerShape { hidden: size(shape.hidden), intermediate: size(shape.intermediate), ..shape };
            let mut probe = Probe::random_in(format, shape, 4, 300 + seed as u64);
            probe.options = LayerOptions { format, ..options(activation, Order::Decode) };
            if format == WeightFormat::Mxfp4 && activation == Activation::F16 {
                probe = probe.fit_f16();
            }
            let plain = f64_layer(&probe);
            let bound = layer_bound(&probe.view(), &probe.options, &probe.inputs()).unwrap();
            assert!(bound.iter().all(|bound| bound.is_finite()));
            let near = |out: &[u16]| {
                let far = |((a, b), bound): ((&f32, &f64), &f32)| (f64::from(*a) - b).abs() > f64::from(*bound);
                floats(out).iter().zip(&plain).zip(&bound).filter(|&all| far(all)).count()
            };
            for mode in MODES {
                assert_eq!(near(&probe.run(mode).unwrap().out), 0, "{format} {activation:?} {shape:?} {mode:?}");
            }
            let mut wrong = probe.clone();
            wrong.topk_w.iter_mut().for_each(|w| *w *= 2.0);
            assert!(near(&wrong.run(Mode::Exact).unwrap().out) > 0, "{format} {activation:?} {shape:?}");
        }
    }
}

/// The bound knows that an accumulator's smallest number stands for 2^8 of it: 16 products of 2^-142, one in each mma, are 2^-150 there
/// and lost.
#[test]
fn the_bound_covers_what_folding_loses() {
    let shape = LayerShape { hidden: 256, intermediate: 16, output: 1, experts: 1, top_k: 1 };
    let mut probe = Probe::blank(shape, 1);
    probe.options.order = Order::Decode;
    probe.alpha1[0] = [power(127), 1.0];
    (0..255).for_each(|k| probe.set_up(0, 0, k, 1));
    (0..16).for_each(|block| probe.set_s13(0, 0, block, scale(WeightFormat::Nvfp4, -9)));
    // Word w of lane w, in both chunks.
    for word in (0..32).filter(|word| word % 4 == word / 4 % 4) {
        for offset in [0, 2] {
            probe.set_x(0, 8 * word + offset, power(-132));
        }
    }
    // The gate is 32.
    probe.set_x(0, 255, 1.0);
    probe.set_gate(0, 0, 255, 6);
    probe.set_s13(0, 16, 15, scale(WeightFormat::Nvfp4, 3));
    probe.set_w2(0, 0, 0, 2);
    let [exact, fast] = MODES.map(|mode| floats(&probe.run(mode).unwrap().out)[0]);
    assert_eq!((exact, fast), (0.0, power(4 - 142 + 127 + 5)));
    let bound = layer_bound(&probe.view(), &probe.options, &probe.inputs()).unwrap()[0];
    assert!(fast <= bound && bound < 8.0 * fast, "{fast:e} {bound:e}");
}

fn within(a: &[u16], b: &[u16], bound: &[f32]) -> bool {
    assert_eq!((a.len(), b.len()), (bound.len(), bound.len()));
    floats(a).iter().zip(floats(b)).zip(bound).all(|((a, b), bound)| (a - b).abs() <= *bound)
}

#[test]
fn fast_mode_stays_within_the_stated_bound() {
    for (seed, shape) in ODD_SHAPES.into_iter().enumerate() {
        for activation in ACTIVATIONS {
            for (limit, order) in [None, Some(0.3)].into_iter().flat_map(|limit| ORDERS.map(|order| (limit, order))) {
                let mut probe = Probe::random(shape, 6, 100 + seed as u64);
                probe.options = LayerOptions { gating: Gating::Silu { limit }, ..options(activation, order) };
                let bound = layer_bound(&probe.view(), &probe.options, &probe.inputs()).unwrap();
                let exact = probe.run(Mode::Exact).unwrap().out;
                let fast = probe.run(Mode::Fast).unwrap().out;
                assert!(within(&exact, &fast, &bound), "{shape:?} {activation:?}");
                // The bound says something: a wrong nibble order, or gate for up, is outside of it.
                let mut swapped = probe.clone();
                swapped.w13.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
                assert!(!within(&exact, &swapped.run(Mode::Fast).unwrap().out, &bound), "{shape:?} {activation:?}");
            }
        }
    }
}

/// One sum on its own: FC2 with h given. The bound is tight enough to notice one product of hundreds.
#[test]
fn one_sum_stays_within_its_bound() {
    let shape = LayerShape { hidden: 16, intermediate: 528, output: 40, experts: 1, top_k: 1 };
    let mut random = Random(9);
    for activation in ACTIVATIONS {
        let mut probe = Probe::random(shape, 20, 21);
        probe.options.activation = activation;
        probe.alpha2.fill(1.0);
        probe.topk_w.fill(1.0);
        probe.topk_ids.fill(0);
        (0..40).for_each(|row| probe.set_s2(0, row, 32, ONE));
        let h = (0..20 * 528).map(|_| math::from_f32(activation, random.in_range(0.5, 1.0))).collect::<Vec<_>>();
        let route = route_prep(&probe.topk_ids, 1, 1).unwrap();
        let run = |probe: &Probe, h: &[u16], mode| {
            fc2(&probe.view(), &probe.options, h, &probe.topk_w, &route, mode).unwrap()
        };
        let (exact, fast) = (run(&probe, &h, Mode::Exact), run(&probe, &h, Mode::Fast));
        // Without the codes' signs the sum is Σ|w|·|h|.
        let mut positive = probe.clone();
        positive.w2.iter_mut().for_each(|byte| *byte &= 0x77);
        let magnitudes = run(&positive, &h, Mode::Fast);
        let outside = |other: &[f32]| {
            let near = |(a, b): (&f32, &f32), magnitude: &f32| {
                (f64::from(*a) - f64::from(*b)).abs() <= sum_bound(528, 1, f64::from(*magnitude))
            };
            exact.iter().zip(other).zip(&magnitudes).filter(|&(pair, magnitude)| !near(pair, magnitude)).count()
        };
        assert_eq!(outside(&fast), 0);
        assert!(exact.iter().zip(&fast).any(|(a, b)| a != b));
        let mut lacking = h.clone();
        lacking.iter_mut().skip(527).step_by(528).for_each(|h| *h = 0);
        let caught = outside(&run(&probe, &lacking, Mode::Fast));
        assert!(caught > 600, "{caught}");
    }
}

/// The worst case nearly happens: 1, then 527 products just below the grid that 1 imposes, each truncated to nothing.
#[test]
fn the_bound_of_one_sum_is_nearly_reached() {
    let shape = LayerShape { hidden: 16, intermediate: 528, output: 1, experts: 1, top_k: 1 };
    let mut probe = Probe::blank(shape, 1);
    (0..528).for_each(|k| probe.set_w2(0, 0, k, 2));
    let tiny = math::from_f32(Activation::Bf16, 1.99 * 2f32.powi(-26));
    let mut h = [tiny; 528];
    h[0] = 0x3f80;
    let route = route_prep(&[0], 1, 1).unwrap();
    let run = |mode| f64::from(fc2(&probe.view(), &probe.options, &h, &[1.0], &route, mode).unwrap()[0]);
    let (difference, bound) = (run(Mode::Fast) - run(Mode::Exact), sum_bound(528, 1, run(Mode::Fast)));
    assert!(0.6 * bound < difference && difference <= bound, "{difference:e} {bound:e}");
}

/// Largest error of `candidate` against f64, in ulp of the f32 result, over every `stride`-th f32 of |x| <= 110.
fn largest_exp_error(candidate: impl Fn(f32) -> f32 + Sync, stride: usize) -> f64 {
    let last = 110f32.to_bits();
    let error = |bits: u32| {
        let x = f32::from_bits(bits);
        let exact = f64::from(x).exp();
        let (y, largest) = (candidate(x), f64::from(f32::MAX));
        if exact >= largest {
            return if y == f32::INFINITY || y == f32::MAX { 0.0 } else { f64::INFINITY };
        }
        let ulp = 2f64.powi((exact.log2().floor() as i32).max(-126) - 23);
        (f64::from(y) - exact).abs() / ulp
    };
    let magnitudes = (0..last + 1).into_par_iter().step_by(stride);
    magnitudes.map(|bits| error(bits).max(error(bits | 1 << 31))).reduce(|| 0.0, f64::max)
}

#[test]
fn exp_is_within_one_ulp() {
    let largest = largest_exp_error(math::exp, 211);
    assert!(largest <= 0.991, "{largest}");
    assert!(largest > 0.9, "{largest}");
    // What most would write first, exp2 of a rounded product, is caught.
    assert!(largest_exp_error(|x| (x * std::f32::consts::LOG2_E).exp2(), 20_011) > 10.0);
}

/// The bits themselves, pinned by a separate implementation with a rounding written after each operation: FNV-1a over the
/// result words of the multiples of 1/2048 from -110 to 110.
#[test]
fn exp_has_the_specified_bits() {
    for (x, bits) in [(1.0, 0x402d_f854), (-1.0, 0x3ebc_5ab2), (88.5, 0x7f4c_dcc4), (-87.5, 0x6c_b2bc), (-100.0, 0x1b)]
    {
        assert_eq!(math::exp(x).to_bits(), bits, "exp({x})");
    }
    let hash = (-110 * 2048..=110 * 2048)
        .map(|i| u64::from(math::exp(i as f32 / 2048.0).to_bits()))
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01b3));
    assert_eq!(hash, 0xaed7_dd48_97c3_6da6);
}

#[test]
fn exp_at_special_values() {
    assert_eq!(math::exp(f32::NAN).to_bits(), NAN);
    assert_eq!(math::exp(f32::from_bits(0xffc0_0001)).to_bits(), NAN);
    for (x, y) in [
        (0.0, 1.0),
        (-0.0, 1.0),
        (f32::MIN_POSITIVE, 1.0),
        (f32::INFINITY, f32::INFINITY),
        (f32::MAX, f32::INFINITY),
        (88.722_85, f32::INFINITY),
        (f32::NEG_INFINITY, 0.0),
        (f32::MIN, 0.0),
        (-104.000_01, 0.0),
    ] {
        assert_eq!(math::exp(x).to_bits(), y.to_bits(), "exp({x})");
    }
    assert!(math::exp(88.722_83).is_finite());
    assert!(math::exp(-103.0) > 0.0);
    assert_eq!(math::silu(32.0), 32.0);
    assert_eq!(math::sigmoid(0.0), 0.5);
    assert_eq!(math::sigmoid(-200.0), 0.0);
    assert_eq!(math::silu(-200.0).to_bits(), (-0.0f32).to_bits());
}

/// Rounding to 16 bits against its definition: of the neighbouring values the nearest, ties to the even code.
#[test]
fn rounding_to_16_bits_is_to_nearest_even() {
    for format in ACTIVATIONS {
        let infinity = if format == Activation::Bf16 { 0x7f80u16 } else { 0x7c00 };
        for code in 0..infinity {
            let low = f64::from(math::to_f32(format, code));
            // What would follow the largest finite value stands for infinity.
            let high = if code + 1 == infinity {
                low + (low - f64::from(math::to_f32(format, code - 1)))
            } else {
                f64::from(math::to_f32(format, code + 1))
            };
            assert!(low < high);
            let middle = (low + high) / 2.0;
            let even = code + (code & 1);
            let ulp_down = |x: f64| f32::from_bits((x as f32).to_bits() - 1);
            let ulp_up = |x: f64| f32::from_bits((x as f32).to_bits() + 1);
            for (x, wanted) in
                [(low as f32, code), (middle as f32, even), (ulp_down(middle), code), (ulp_up(middle), code + 1)]
            {
                assert_eq!(math::from_f32(format, x), wanted, "{x:e}");
                assert_eq!(math::from_f32(format, -x), wanted | 0x8000, "-{x:e}");
            }
        }
        assert_eq!(math::from_f32(format, f32::from_bits(0xff80_0001)), 0x7fff);
        assert_eq!(math::from_f32(format, f32::INFINITY), infinity);
    }
}

/// Each weight fits both formats exactly, and the sixteen codes are what they are.
#[test]
fn weights_are_exact_in_both_formats() {
    let codes = (0..16).map(math::e2m1).collect::<Vec<_>>();
    assert_eq!(codes[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert!((0..8).all(|code| codes[code + 8].to_bits() == (-codes[code]).to_bits()));
    for format in ACTIVATIONS {
        for (scale, code) in (0..=255).flat_map(|scale| (0..16).map(move |code| (scale, code))) {
            // As they are, and folded as the order `decode` has them.
            for fold in [0, if format == Activation::Bf16 { 8 } else { 7 }] {
                let weight = math::e2m1(code) * math::e4m3(scale) * 2f32.powi(-fold);
                let back = math::to_f32(format, math::from_f32(format, weight));
                assert_eq!(back.to_bits(), math::canonical(weight).to_bits());
            }
        }
    }
}

#[test]
fn min_and_max_pass_nan() {
    for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::from_bits(0xffff_ffff), f32::NAN)] {
        assert_eq!((math::min(a, b).to_bits(), math::max(a, b).to_bits()), (NAN, NAN));
    }
    assert_eq!((math::min(1.0, 2.0), math::max(1.0, 2.0)), (1.0, 2.0));
}
