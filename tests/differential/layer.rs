//! The whole layer: kernels on every device against the exact reference, bit for bit.

use crate::common::{
    any_emulator, approximate_gpu, argument_of, assert_same, devices, difference, emulator, gpu, is_emulated, scale,
};
use cuda_std::arch::ArchId;
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::{Case, DeviceCase, DrawOptions, Family, Op, Random, draw, draw_in, draw_op, floats};
use megamoe::layer::{BiasBuffers, Hidden, Inputs, Layer};
use megamoe::plan::{self, Fc2Warps, Plan, Tile, Variant};
use megamoe::reference::{LayerResult, Mode, Status, layer_bound};
use megamoe::workspace::Workspace;
use megamoe::{Activation, Error, Gating, LayerOptions, LayerShape, Order, Split, WeightFormat};

const fn shape(hidden: usize, intermediate: usize, output: usize, experts: usize, top_k: usize) -> LayerShape {
    LayerShape { hidden, intermediate, output, experts, top_k }
}

/// Kinds of shapes that models and their tensor-parallel shards have, scaled down, with numbers of tokens. Hidden and intermediate
/// sizes on and off 128 and 256, rows that are no multiple of 16 bytes, one to eleven segments of 256 k, outputs that are
/// no multiple of 4 or 16, and experts with more than eight pairs.
const SHAPES: [(LayerShape, usize); 17] = [
    (shape(16, 16, 1, 1, 1), 1),
    (shape(48, 48, 17, 3, 2), 5),
    (shape(144, 16, 144, 5, 3), 7),
    (shape(256, 80, 100, 5, 2), 9),
    (shape(272, 96, 17, 3, 8), 6),
    (shape(512, 160, 100, 5, 1), 3),
    (shape(528, 48, 528, 3, 2), 3),
    (shape(1040, 32, 17, 1, 1), 11),
    (shape(1152, 80, 1, 5, 4), 1),
    (shape(2880, 16, 40, 5, 2), 2),
    (shape(16, 16, 2880, 2, 1), 4),
    (shape(144, 320, 17, 3, 1), 2),
    (shape(48, 704, 33, 3, 1), 2),
    (shape(48, 16, 17, 160, 8), 12),
    (shape(32, 16, 8, 5, 32), 6),
    (shape(80, 32, 24, 5, 22), 4),
    (shape(32, 16, 20, 3, 1), 40),
];

/// Number of combinations that [`variant`] tells apart.
const VARIANTS: usize = 3 * 20;

/// Sets activation, type of x and order, and gives the rest of variant `number`: four splits and four block sizes of seed, and the
/// variants of decode. The numbers from 0 to `VARIANTS` are all there are.
fn variant(case: Case, number: usize) -> (Case, Variant) {
    let mut case = if number % 3 == 2 { case.x_as_f16() } else { case };
    case.options.activation = if number.is_multiple_of(3) { Activation::Bf16 } else { Activation::F16 };
    let number = number / 3 % 20;
    match number.checked_sub(16) {
        None => {
            case.options.order = Order::Seed { split: Split::ALL[number % 4] };
            (case, Variant { fc2_warps: Fc2Warps::ALL[number / 4], ..plan::VARIANTS[0] })
        }
        Some(number) => {
            case.options.order = Order::Decode;
            (case, plan::VARIANTS[number])
        }
    }
}

#[track_caller]
fn check_variant(case: Case, number: usize, device: &DeviceHandle, what: &str) {
    let (mut case, variant) = variant(case, number);
    // One case in three is clamped.
    case.options.gating = Gating::Silu { limit: (number % 7 < 2).then_some(0.5) };
    let wanted = case.run(Mode::Exact).unwrap();
    let run = |on_device: DeviceCase| {
        if number.is_multiple_of(2) {
            // Poisons scratch memory and output first.
            return on_device.run();
        }
        // Fresh memory: the emulator reports a read of anything that no kernel has written.
        on_device.forward()?;
        on_device.take()
    };
    let got = DeviceCase::new(&case, device, variant).and_then(run).unwrap_or_else(|error| {
        panic!("{what}, {:?}, {variant:?}, {:?}: {error}", case.options, case.shape);
    });
    assert_same(&format!("{what}, {:?}, {variant:?}", case.options), &case.shape, &wanted, &got);
}

/// Every shape with data of `family`. Variants and emulated devices go by turns, so that each shape meets others in each family;
/// the GPU gets every variant.
fn every_shape(family: Family) {
    let turn = Family::ALL.iter().position(|&f| f == family).unwrap();
    for (i, (shape, tokens)) in SHAPES.into_iter().chain(SHAPES).enumerate() {
        let number = 2 * turn * SHAPES.len() + i;
        let case = draw(family, shape, tokens, number as u64);
        // 11 is prime to the number of variants.
        check_variant(case, 11 * number, &any_emulator(number), &format!("{family} on emulator {number}"));
    }
    let Some(gpu) = gpu() else { return };
    for (i, (shape, tokens)) in SHAPES.into_iter().enumerate() {
        for number in 0..VARIANTS {
            let tokens = tokens + number * 3 % 17;
            let case = draw(family, shape, tokens, (i * VARIANTS + number) as u64);
            check_variant(case, number, &gpu, &format!("{family} {number}"));
        }
    }
}

#[test]
fn random_data() {
    every_shape(Family::Random);
}

#[test]
fn every_code_and_scale() {
    every_shape(Family::Codes);
}

#[test]
fn subnormal_numbers() {
    every_shape(Family::Subnormal);
}

#[test]
fn nan_and_infinity() {
    every_shape(Family::Special);
}

#[test]
fn overflow_and_cancellation() {
    every_shape(Family::Extreme);
}

#[test]
fn ids_of_every_kind() {
    every_shape(Family::Ids);
}

#[test]
fn all_pairs_on_one_expert() {
    every_shape(Family::OneExpert);
}

/// Each variant on one shape, with two partial chunks and more segments than none and fewer than eight.
#[test]
fn every_variant() {
    for number in 0..VARIANTS {
        let case = draw(Family::Random, shape(784, 48, 40, 3, 2), 5, number as u64);
        check_variant(case, number, &any_emulator(number), &format!("variant {number}"));
    }
}

/// One to four tokens straight from the ids: every shape and family, three kinds of activations, both formats, biases and gatings.
#[test]
fn few_tokens_straight_from_the_ids() {
    for (i, (format, shape)) in SHAPES
        .into_iter()
        .map(|(shape, _)| (WeightFormat::Nvfp4, shape))
        .chain(MXFP4_SHAPES.into_iter().map(|(shape, _)| (WeightFormat::Mxfp4, shape)))
        .enumerate()
    {
        for (turn, family) in Family::ALL.into_iter().enumerate() {
            let number = 7 * i + turn;
            let mut case = draw_in(format, family, shape, 1 + number % 4, number as u64);
            if number % 3 == 2 {
                case = case.x_as_f16();
            }
            case.options.activation = if number.is_multiple_of(3) { Activation::Bf16 } else { Activation::F16 };
            if format == WeightFormat::Mxfp4 && case.options.activation == Activation::F16 {
                case = case.fit_f16();
            }
            case.options.gating =
                [Gating::Silu { limit: None }, Gating::GPT_OSS, Gating::Silu { limit: Some(0.5) }][number % 3];
            if number % 4 == 1 {
                case.add_biases(number as u64);
            }
            let wanted = case.run(Mode::Exact).unwrap();
            for device in std::iter::once(any_emulator(number)).chain(gpu()) {
                let on_device = DeviceCase::new(&case, &device, Variant::DIRECT).unwrap();
                // Fresh memory first: the emulator reports a read of anything that no kernel has written.
                on_device.forward().unwrap();
                let fresh = on_device.take().unwrap();
                assert_same(&format!("{family}, {:?}", case.options), &shape, &wanted, &fresh);
                let again = on_device.run().unwrap();
                assert_same(&format!("again, {family}, {:?}", case.options), &shape, &wanted, &again);
            }
        }
    }
}

/// Ids of every kind for one token: none, all alike, out of range on either side, with up to 32 slots.
#[test]
fn any_ids_of_one_token() {
    for (turn, top_k) in [1, 2, 7, 8, 9, 22, 32].into_iter().enumerate() {
        let shape = shape(272, 48, 40, 5, top_k);
        for (number, id) in [None, Some(-1), Some(3), Some(5), Some(i32::MAX), Some(i32::MIN)].into_iter().enumerate() {
            let mut case = draw(Family::Ids, shape, 1, (turn * 6 + number) as u64);
            case.options.activation = [Activation::Bf16, Activation::F16][turn % 2];
            if let Some(id) = id {
                case.topk_ids.fill(id);
            }
            let wanted = case.run(Mode::Exact).unwrap();
            for device in std::iter::once(any_emulator(turn)).chain(gpu()) {
                let got = DeviceCase::new(&case, &device, Variant::DIRECT).unwrap().run().unwrap();
                assert_same(&format!("top {top_k}, {id:?}"), &shape, &wanted, &got);
            }
        }
    }
}

/// What the variants need is named: as many pairs in both tiles, and few tokens for the direct one.
#[test]
fn variants_are_checked() {
    let device = any_emulator(1);
    let case = draw(Family::Random, shape(64, 32, 8, 2, 1), 5, 1);
    for (fc1, fc2, argument) in [
        (Tile::Wide, Tile::Rows16, Some("fc2")),
        (Tile::Rows32, Tile::Wide, Some("fc2")),
        (Tile::Direct, Tile::Rows16, Some("fc2")),
        (Tile::Rows16, Tile::Direct, Some("fc2")),
        (Tile::Direct, Tile::Direct, Some("max_tokens")),
        (Tile::Rows16, Tile::Rows32, None),
    ] {
        let made = DeviceCase::new(&case, &device, Variant::tiles(fc1, fc2));
        assert_eq!(made.err().map(|error| argument_of(&error)), argument, "{fc1:?}, {fc2:?}");
    }
}

/// Sizes of published models, in full width but with few experts. Only a GPU is fast enough.
#[test]
fn full_width_on_the_gpu() {
    let Some(gpu) = gpu() else { return };
    for (i, (shape, tokens)) in [
        (shape(2048, 512, 2048, 16, 8), 16),
        (shape(2880, 2880, 2880, 4, 4), 3),
        (shape(2688, 1856, 2688, 8, 6), 4),
        (shape(2816, 704, 2816, 16, 8), 9),
        (shape(7168, 2048, 7168, 4, 2), 2),
        (shape(1024, 2688, 1024, 32, 22), 5),
        (shape(4096, 1408, 4096, 8, 2), 33),
    ]
    .into_iter()
    .enumerate()
    {
        for number in [i, i + 13, i + 26] {
            let case = draw(Family::ALL[number % 7], shape, tokens, number as u64);
            check_variant(case, number, &gpu, &format!("full width {number}"));
        }
    }
}

/// On a GPU whose tensor cores are not modelled, results stay within the stated bound.
#[test]
fn within_the_bound_on_other_gpus() {
    let Some(gpu) = approximate_gpu() else { return };
    for (i, (shape, tokens)) in SHAPES.into_iter().enumerate() {
        for number in 0..VARIANTS {
            let (case, variant) = variant(draw(Family::Random, shape, tokens, (i * VARIANTS + number) as u64), number);
            let bound = layer_bound(&case.view(), &case.options, &case.inputs()).unwrap();
            let wanted = floats(&case.run(Mode::Exact).unwrap().out);
            let got = floats(&DeviceCase::new(&case, &gpu, variant).unwrap().run().unwrap().out);
            for (at, ((wanted, got), bound)) in wanted.iter().zip(&got).zip(&bound).enumerate() {
                assert!((wanted - got).abs() <= *bound, "{shape:?}, {variant:?}, {at}: {got}, not {wanted}");
            }
        }
    }
}

/// The order in which lanes and blocks run, the number of blocks, and the choice of a variant leave every bit alone.
#[test]
fn bits_depend_on_neither_schedule_nor_grid_nor_variant() {
    let case = draw(Family::Random, shape(272, 96, 100, 3, 3), 9, 5);
    let wanted = case.run(Mode::Exact).unwrap();
    let mut turn = 0;
    for arch in crate::common::ARCHS {
        for multiprocessors in 1..=4 {
            let variant = plan::VARIANTS[turn % 4];
            turn += 1;
            let device = emulator(arch, multiprocessors, 1000 + turn as u64);
            let got = DeviceCase::new(&case, &device, variant).unwrap().run().unwrap();
            assert_same(&format!("{arch:?}, {multiprocessors}, {variant:?}"), &case.shape, &wanted, &got);
        }
    }
    // A device that has run before goes on with another order.
    let device = emulator(ArchId::Sm90, 3, 7);
    let on_device = case.on(&device).unwrap();
    for pass in 0..3 {
        assert_same(&format!("pass {pass}"), &case.shape, &wanted, &on_device.run().unwrap());
    }
}

/// Whatever a workspace and an output held before, the bits are the same.
#[test]
fn stale_bytes_never_count() {
    let mut case = draw(Family::Ids, shape(144, 48, 17, 5, 3), 11, 2);
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        let wanted = case.run(Mode::Exact).unwrap();
        for (_, device) in devices() {
            let on_device = case.on(&device).unwrap();
            for byte in [0x00, 0x01, 0x3C, 0x7F, 0x80, 0xFF] {
                on_device.workspace.poison(byte).unwrap();
                on_device.out.fill(byte).unwrap();
                on_device.forward().unwrap();
                assert_same(&format!("{byte:#04x}"), &case.shape, &wanted, &on_device.take().unwrap());
            }
        }
    }
}

/// One workspace, one set of buffers, many passes: token counts go down and up, ids and activations change, and two layers of other
/// sizes take turns.
#[test]
fn a_workspace_is_used_again_and_again() {
    let wide = draw(Family::Random, shape(272, 48, 40, 5, 3), 24, 1);
    let narrow = draw(Family::Random, shape(48, 16, 100, 3, 2), 24, 2);
    for (name, device) in devices() {
        let layers = [&wide, &narrow].map(|case| {
            let layer = Layer::new(&device, &case.experts().unwrap(), case.shape.top_k, case.options).unwrap();
            let plan = layer.plan(24).unwrap();
            (layer, plan)
        });
        let larger = layers.iter().map(|(_, plan)| plan).max_by_key(|plan| plan.workspace_bytes()).unwrap();
        let workspace = Workspace::new(&device, larger).unwrap();
        let x = Buffer::new(&device, 24 * 272).unwrap();
        let topk_ids = Buffer::new(&device, 24 * 3).unwrap();
        let topk_weights = Buffer::new(&device, 24 * 3).unwrap();
        let out = Buffer::new(&device, 24 * 100).unwrap();
        for (pass, tokens) in [24, 3, 17, 1, 0, 24, 8, 9].into_iter().enumerate() {
            for ((layer, plan), weights) in layers.iter().zip([&wide, &narrow]) {
                let batch = draw(Family::ALL[pass % 7], weights.shape, tokens, 10 + pass as u64);
                let Case { x: new_x, topk_ids: new_ids, topk_w: new_weights, .. } = batch;
                let case = Case { tokens, x: new_x, topk_ids: new_ids, topk_w: new_weights, ..weights.clone() };
                x.upload(&case.x).unwrap();
                topk_ids.upload(&case.topk_ids).unwrap();
                topk_weights.upload(&case.topk_w).unwrap();
                out.fill(0xFF).unwrap();
                let inputs = Inputs { tokens, x: Hidden::Bf16(&x), topk_ids: &topk_ids, topk_weights: &topk_weights };
                layer.forward(plan, &workspace, inputs, &out).unwrap();
                let status = workspace.take_status().unwrap();
                let got = LayerResult {
                    out: out.download().unwrap()[..tokens * case.shape.output].to_vec(),
                    status: Status { bad_id: status.bad_expert_id, f16_range: status.f16_range },
                };
                assert_same(&format!("{name}, pass {pass}"), &case.shape, &case.run(Mode::Exact).unwrap(), &got);
            }
        }
    }
}

/// Rows behind the last token of a pass are not touched.
#[test]
fn only_the_rows_of_tokens_are_written() {
    let case = draw(Family::Random, shape(48, 16, 17, 3, 2), 8, 4);
    for (name, device) in devices() {
        let mut on_device = case.on(&device).unwrap();
        on_device.out = Buffer::new(&device, 8 * 17 + 64).unwrap();
        on_device.tokens = 5;
        let got = on_device.run().unwrap().out;
        assert_eq!(got[..5 * 17], case.run(Mode::Exact).unwrap().out[..5 * 17], "{name}");
        assert!(got[5 * 17..].iter().all(|&bits| bits == 0xFFFF), "{name}");
    }
}

/// The status word gathers the bits of all passes until it is taken.
#[test]
fn status_stays_until_it_is_taken() {
    let good = Case::with_shape(shape(32, 16, 8, 4, 1), 3);
    for (name, device) in devices() {
        let on_device = good.on(&device).unwrap();
        on_device.topk_ids.upload(&[1, 4, 1]).unwrap();
        on_device.forward().unwrap();
        on_device.topk_ids.upload(&[1, 2, 1]).unwrap();
        on_device.forward().unwrap();
        assert!(on_device.workspace.take_status().unwrap().bad_expert_id, "{name}");
        on_device.forward().unwrap();
        assert!(!on_device.workspace.take_status().unwrap().bad_expert_id, "{name}");
    }
}

/// Tokens `order` of a case, in that order.
fn reordered(case: &Case, order: &[usize]) -> Case {
    let LayerShape { hidden, top_k, .. } = case.shape;
    let rows = |width: usize| order.iter().flat_map(move |&token| token * width..(token + 1) * width);
    Case {
        tokens: order.len(),
        x: rows(hidden).map(|i| case.x[i]).collect(),
        topk_ids: rows(top_k).map(|i| case.topk_ids[i]).collect(),
        topk_w: rows(top_k).map(|i| case.topk_w[i]).collect(),
        ..case.clone()
    }
}

/// A token's bits depend on neither the other tokens nor its place among them.
#[test]
fn tokens_do_not_depend_on_their_batch() {
    let output = 17;
    let case = draw(Family::Special, shape(272, 48, output, 3, 2), 20, 9);
    for (name, device) in devices() {
        let whole = case.run_on(&device).unwrap().out;
        let row = |token: usize| &whole[token * output..(token + 1) * output];
        for token in (0..20).step_by(scale(&device, 4, 1)) {
            let alone = case.tokens_only(token..token + 1).run_on(&device).unwrap().out;
            assert_eq!(alone, row(token), "{name}, token {token} alone");
        }
        let mut random = Random(3);
        for _ in 0..scale(&device, 2, 50) {
            let order: Vec<usize> = (0..40).map(|_| (random.next() % 20) as usize).collect();
            let shuffled = reordered(&case, &order).run_on(&device).unwrap().out;
            for (place, (got, &token)) in shuffled.chunks(output).zip(&order).enumerate() {
                assert_eq!(got, row(token), "{name}, token {token} at {place}");
            }
        }
    }
}

/// One token has the same bits in every batch from 1 to 128, whichever variants the plans choose: every kind of tile is among them.
#[test]
fn one_token_in_batches_of_every_size() {
    for device in std::iter::once(emulator(ArchId::Sm90, 2, 5)).chain(gpu()) {
        let shape = if is_emulated(&device) { shape(272, 48, 40, 6, 3) } else { shape(2048, 768, 2048, 32, 8) };
        let sizes: &[usize] = if is_emulated(&device) { &[1, 2, 3, 9, 40] } else { &[1, 2, 3, 4, 8, 16, 33, 64, 128] };
        let most = *sizes.last().unwrap();
        for activation in [Activation::Bf16, Activation::F16] {
            let mut case = draw(Family::Random, shape, most, 21);
            case.options.activation = activation;
            let layer = case.on(&device).unwrap();
            let choice = |tokens| plan::choose_variant(&shape, tokens, device.properties()).name(Order::Decode);
            let kinds = sizes.iter().map(|&tokens| choice(tokens));
            assert_eq!(kinds.collect::<std::collections::BTreeSet<_>>().len(), 3);
            let whole = layer.run().unwrap().out;
            for &tokens in sizes {
                let got = case.tokens_only(0..tokens).run_on(&device).unwrap().out;
                assert_eq!(got, whole[..got.len()], "{activation:?}, {tokens} tokens");
            }
            let wanted = case.tokens_only(0..1).run(Mode::Exact).unwrap().out;
            assert_eq!(wanted, whole[..wanted.len()], "{activation:?}");
        }
    }
}

/// Faults such as a kernel could have, in the reference: each must show in each shape, or the comparisons above prove little.
#[test]
fn planted_faults_are_caught() {
    type Plant = fn(&mut Case);
    let faults: [(&str, Plant); 9] = [
        ("nibbles swapped in w13", |case| case.w13.iter_mut().for_each(|byte| *byte = byte.rotate_left(4))),
        ("nibbles swapped in w2", |case| case.w2.iter_mut().for_each(|byte| *byte = byte.rotate_left(4))),
        ("gate and up swapped", |case| {
            let half = case.shape.intermediate * case.shape.hidden / 2;
            case.w13.chunks_mut(2 * half).for_each(|expert| expert.rotate_left(half));
        }),
        ("alpha of up for both", |case| case.alpha1.iter_mut().for_each(|alpha| alpha[1] = alpha[0])),
        ("last block of k dropped", |case| {
            let last = case.shape.hidden - 16;
            for row in 0..2 * case.shape.intermediate * case.shape.experts {
                (last..last + 16).for_each(|k| case.set_w13(0, row, k, 0));
            }
        }),
        ("last column of h dropped", |case| {
            let last = case.shape.intermediate - 1;
            (0..case.shape.output * case.shape.experts).for_each(|row| case.set_w2(0, row, last, 0));
        }),
        ("one block scale off by one code", |case| {
            let rows = 2 * case.shape.intermediate;
            for expert in 0..case.shape.experts {
                case.set_s13(expert, rows - 1, case.shape.hidden / 16 - 1, 0x3c);
            }
        }),
        ("the last pair lost", |case| {
            let live = case.topk_ids.iter().rposition(|&id| id >= 0).unwrap();
            case.topk_ids[live] = -1;
        }),
        ("weights of one token shifted", |case| {
            let top_k = case.shape.top_k;
            let live = case.topk_ids.iter().rposition(|&id| id >= 0).unwrap() / top_k;
            case.topk_w[live * top_k..(live + 1) * top_k].iter_mut().for_each(|weight| *weight *= 1.02);
        }),
    ];
    for (i, (shape, tokens)) in SHAPES.into_iter().enumerate() {
        // A single output may be the same by chance.
        let mut case = draw(Family::Random, shape, tokens.max(8), 500 + i as u64);
        // Where a single pair is skipped nothing else can show.
        case.topk_ids.iter_mut().for_each(|id| *id = (*id).max(0));
        let wanted = case.run(Mode::Exact).unwrap();
        for (name, plant) in faults {
            let mut faulty = case.clone();
            plant(&mut faulty);
            let got = faulty.run(Mode::Exact).unwrap();
            assert!(difference(&shape, &wanted, &got).is_some(), "{name} is not noticed in {shape:?}");
        }
    }
    let case = draw(Family::Ids, SHAPES[1].0, 8, 1);
    let wanted = case.run(Mode::Exact).unwrap();
    let mut got = wanted.clone();
    got.status.bad_id = !got.status.bad_id;
    assert!(difference(&case.shape, &wanted, &got).is_some());
}

/// A sum in another order is another result: the comparisons see a wrong split, and a plain sum.
#[test]
fn another_order_of_sums_is_caught() {
    let mut case = draw(Family::Random, shape(2880, 64, 256, 2, 2), 40, 3);
    case.options.activation = Activation::F16;
    let wanted = case.run(Mode::Exact).unwrap();
    assert!(difference(&case.shape, &wanted, &case.run(Mode::Fast).unwrap()).is_some());
    for order in Order::ALL.into_iter().filter(|&order| order != case.options.order).collect::<Vec<_>>() {
        case.options.order = order;
        assert!(difference(&case.shape, &wanted, &case.run(Mode::Exact).unwrap()).is_some(), "{order:?}");
    }
}

/// As `variant` and `check_variant`, for MXFP4: three kinds of activations, the orders, three gatings, with and without biases.
#[track_caller]
fn check_mxfp4(case: Case, number: usize, device: &DeviceHandle, what: &str) {
    let (mut case, variant) = variant(case, number);
    let variant = Variant { fc2_warps: Fc2Warps::W4, ..variant };
    if case.options.activation == Activation::F16 {
        case = case.fit_f16();
    }
    case.options.gating =
        [Gating::GPT_OSS, Gating::Silu { limit: None }, Gating::Silu { limit: Some(0.5) }][number / 7 % 3];
    if !number.is_multiple_of(5) {
        case.add_biases(number as u64);
    }
    let wanted = case.run(Mode::Exact).unwrap();
    let got = DeviceCase::new(&case, device, variant).and_then(|on_device| {
        if number.is_multiple_of(2) {
            return on_device.run();
        }
        on_device.forward()?;
        on_device.take()
    });
    let what = format!("{what}, {:?}", case.options);
    assert_same(&what, &case.shape, &wanted, &got.unwrap_or_else(|error| panic!("{what}: {error}")));
}

/// Combinations that [`check_mxfp4`] tells apart, but for biases.
const MXFP4_VARIANTS: usize = 3 * 20;

const MXFP4_SHAPES: [(LayerShape, usize); 12] = [
    (shape(32, 32, 1, 1, 1), 1),
    (shape(96, 64, 17, 3, 2), 5),
    (shape(160, 32, 144, 5, 3), 7),
    (shape(256, 96, 100, 5, 2), 9),
    (shape(288, 96, 17, 3, 8), 6),
    (shape(512, 160, 100, 5, 1), 3),
    (shape(544, 64, 544, 3, 2), 3),
    (shape(1056, 32, 17, 1, 1), 11),
    (shape(2880, 32, 40, 5, 4), 2),
    (shape(32, 704, 33, 3, 1), 2),
    (shape(64, 32, 17, 160, 8), 12),
    (shape(32, 32, 20, 3, 1), 40),
];

#[test]
fn mxfp4_with_every_family() {
    for (turn, family) in Family::ALL.into_iter().enumerate() {
        for (i, (shape, tokens)) in MXFP4_SHAPES.into_iter().enumerate() {
            let number = turn * MXFP4_SHAPES.len() + i;
            let case = draw_in(WeightFormat::Mxfp4, family, shape, tokens, number as u64);
            // 11 is prime to the number of variants.
            check_mxfp4(case, 11 * number, &any_emulator(number), &format!("{family} on emulator {number}"));
        }
    }
    let Some(gpu) = gpu() else { return };
    for (turn, family) in Family::ALL.into_iter().enumerate() {
        for (i, (shape, tokens)) in MXFP4_SHAPES.into_iter().enumerate() {
            for number in 0..MXFP4_VARIANTS {
                let seed = (turn * MXFP4_SHAPES.len() + i) * MXFP4_VARIANTS + number;
                let case = draw_in(WeightFormat::Mxfp4, family, shape, tokens + number * 3 % 17, seed as u64);
                check_mxfp4(case, seed, &gpu, &format!("{family} {number}"));
            }
        }
    }
}

/// gpt-oss-120b's and DeepSeek-V4-Flash's sizes with few experts. Only a GPU is fast enough.
#[test]
fn mxfp4_in_full_width_on_the_gpu() {
    let Some(gpu) = gpu() else { return };
    for (i, (shape, tokens)) in
        [(shape(2880, 2880, 2880, 4, 4), 3), (shape(4096, 2048, 4096, 6, 6), 5)].into_iter().enumerate()
    {
        for number in [i, i + 13, i + 26] {
            let case = draw_in(WeightFormat::Mxfp4, Family::ALL[number % 7], shape, tokens, number as u64);
            check_mxfp4(case, number, &gpu, &format!("full width {number}"));
        }
    }
}

/// NVFP4 experts with biases, and with gpt-oss's gating.
#[test]
fn biases_and_gatings_with_nvfp4() {
    for (i, (shape, tokens)) in SHAPES.into_iter().enumerate() {
        let (mut case, variant) = variant(draw(Family::ALL[i % 7], shape, tokens, i as u64), 5 * i);
        case.add_biases(i as u64);
        match i % 4 {
            0 => case.b13 = None,
            1 => case.b2 = None,
            _ => {}
        }
        case.options.gating = [Gating::GPT_OSS, Gating::Silu { limit: Some(2.0) }][i % 2];
        let wanted = case.run(Mode::Exact).unwrap();
        for device in std::iter::once(any_emulator(i)).chain(gpu()) {
            let got = DeviceCase::new(&case, &device, variant).unwrap().run().unwrap();
            assert_same(&format!("{:?}, {variant:?}", case.options), &shape, &wanted, &got);
        }
    }
}

/// An exact layer: gate = 8·0.5 + 28, up = 8·0.5 - 1, each in row 0, h = (3 + 1)·32·sigmoid(54.464) = 128, out = (128 - 64)·0.25 there
/// and 2·0.25 from the bias alone in column 1.
#[test]
fn an_mxfp4_layer_by_hand() {
    let shape = shape(64, 32, 3, 2, 1);
    let mut case = Case::blank_in(WeightFormat::Mxfp4, shape, 1);
    case.options.gating = Gating::SwigluOai { alpha: 1.702, limit: 100.0 };
    case.set_id(0, 0, 1, 0.25);
    // x = 8 in the second block of k, under 2^-2 with the code of 2.
    case.set_x(0, 40, 8.0);
    for row in [0, 32] {
        case.set_w13(1, row, 40, 0x4);
        case.set_s13(1, row, 1, 125);
        // The first block is NaN for nobody: another row, that of expert 0.
        case.set_s13(0, row, 0, 0xff);
    }
    let mut b13 = vec![0.0; 2 * 64];
    (b13[64], b13[96]) = (-1.0, 28.0);
    case.b13 = Some(b13);
    case.set_w2(1, 0, 0, 0x1);
    case.set_s2(1, 0, 0, 128);
    let mut b2 = vec![0.0; 2 * 3];
    (b2[3], b2[4]) = (-64.0, 2.0);
    case.b2 = Some(b2);
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        assert_eq!(floats(&case.run(Mode::Exact).unwrap().out), [16.0, 0.5, 0.0]);
        for (name, device) in devices() {
            assert_eq!(floats(&case.run_on(&device).unwrap().out), [16.0, 0.5, 0.0], "{name} {activation:?}");
        }
    }
    // Such a comparison sees another block of scales, codes or biases.
    for plant in [
        (|case: &mut Case| case.set_s13(1, 32, 1, 126)) as fn(&mut Case),
        |case| case.set_w13(1, 32, 40, 0x3),
        |case| case.b2 = None,
        |case| case.options.gating = Gating::Silu { limit: Some(100.0) },
    ] {
        let mut faulty = case.clone();
        plant(&mut faulty);
        assert_ne!(floats(&faulty.run(Mode::Exact).unwrap().out), [16.0, 0.5, 0.0]);
    }
}

/// f16 activations take MXFP4 scales from 2^-23 to 2^13; others are refused with the names of all experts that have one, when the
/// layer is made or given other options, and by the reference. NaN and padding are no such scales, bf16 takes all.
#[test]
fn scales_beyond_f16_are_refused() {
    let shape = shape(96, 32, 5, 3, 2);
    let mut fits = draw_in(WeightFormat::Mxfp4, Family::Random, shape, 4, 1);
    fits.options.activation = Activation::F16;
    fits.fill_padding(0);
    fits.set_s13(0, 63, 2, 127 - 23);
    fits.set_s2(2, 4, 0, 127 + 13);
    fits.set_s13(1, 0, 0, 0xff);
    type Plant = fn(&mut Case);
    let beyond: [(&str, &[usize], Plant); 4] = [
        ("s13", &[0, 2], |case| {
            case.set_s13(0, 63, 2, 127 - 24);
            case.set_s13(2, 0, 0, 0);
        }),
        ("s13", &[1], |case| case.set_s13(1, 17, 1, 127 + 14)),
        ("s2", &[2], |case| case.set_s2(2, 4, 0, 127 + 14)),
        ("s2", &[0], |case| case.set_s2(0, 0, 0, 254)),
    ];
    let from_buffers = |device: &DeviceHandle, case: &Case| {
        let buffer = |bytes: &[u8]| Buffer::from_slice(device, bytes).unwrap();
        let floats = |floats: &[f32]| Buffer::from_slice(device, floats).unwrap();
        let (w13, s13, w2, s2) = (buffer(&case.w13), buffer(&case.s13), buffer(&case.w2), buffer(&case.s2));
        let (alpha1, alpha2) = (floats(case.alpha1.as_flattened()), floats(&case.alpha2));
        Layer::from_buffers(shape, case.options, w13, s13, alpha1, w2, s2, alpha2, BiasBuffers::default())
    };
    for (_, device) in devices() {
        crate::common::check(&fits, &device);
        from_buffers(&device, &fits).unwrap();
        for (name, experts, plant) in &beyond {
            let mut case = fits.clone();
            plant(&mut case);
            let mut bf16 = case.clone();
            bf16.options.activation = Activation::Bf16;
            crate::common::check(&bf16, &device);
            let on_bf16 = from_buffers(&device, &bf16).unwrap();
            for error in [
                case.on(&device).unwrap_err(),
                from_buffers(&device, &case).unwrap_err(),
                on_bf16.with_options(case.options).unwrap_err(),
                case.run(Mode::Exact).unwrap_err(),
                case.run(Mode::Fast).unwrap_err(),
                layer_bound(&case.view(), &case.options, &case.inputs()).unwrap_err(),
            ] {
                match error {
                    Error::Experts { name: n, experts: e, .. } => assert_eq!((&n, e.as_slice()), (name, *experts)),
                    other => panic!("{other}"),
                }
            }
        }
    }
}

/// A format that is not the weights' own, sizes off its blocks, and a variant that it has no kernel for.
#[test]
fn mxfp4_arguments_are_named() {
    let device = any_emulator(1);
    let case = draw_in(WeightFormat::Mxfp4, Family::Random, shape(64, 32, 8, 2, 1), 2, 1);
    let nvfp4 = LayerOptions { format: WeightFormat::Nvfp4, ..case.options };
    let layer = Layer::new(&device, &case.experts().unwrap(), 1, case.options).unwrap();
    let named = |error: Error| argument_of(&error);
    assert_eq!(named(Layer::new(&device, &case.experts().unwrap(), 1, nvfp4).unwrap_err()), "format");
    assert_eq!(named(layer.with_options(nvfp4).unwrap_err()), "format");
    assert_eq!(
        named(megamoe::reference::layer(&case.view(), &nvfp4, &case.inputs(), Mode::Exact).unwrap_err()),
        "format"
    );
    // A plan of the other format.
    let plan = Plan::new(&device, case.shape, nvfp4, 2).unwrap();
    let mut on_device = case.on(&device).unwrap();
    on_device.plan = plan;
    assert_eq!(named(on_device.forward().unwrap_err()), "plan");
    for fc2_warps in Fc2Warps::ALL {
        let made = DeviceCase::new(&case, &device, Variant { fc2_warps, ..plan::VARIANTS[0] });
        assert_eq!(made.err().map(|error| argument_of(&error)), (fc2_warps != Fc2Warps::W4).then_some("fc2_warps"));
    }
    for (name, shape) in [("hidden", shape(48, 32, 8, 2, 1)), ("intermediate", shape(64, 16, 8, 2, 1))] {
        assert_eq!(named(Plan::new(&device, shape, case.options, 2).unwrap_err()), name);
        let mut view = case.view();
        view.shape = shape;
        assert_eq!(named(view.check().unwrap_err()), name);
    }
    for alpha in [f32::NAN, f32::INFINITY] {
        let options = LayerOptions { gating: Gating::SwigluOai { alpha, limit: 7.0 }, ..case.options };
        assert_eq!(named(layer.with_options(options).unwrap_err()), "alpha");
    }
    for limit in [0.0, -1.0, f32::NAN] {
        let options = LayerOptions { gating: Gating::SwigluOai { alpha: 1.0, limit }, ..case.options };
        assert_eq!(named(layer.with_options(options).unwrap_err()), "limit");
    }
    let mut infinite = case.clone();
    infinite.add_biases(1);
    infinite.b2.as_mut().unwrap()[3] = f32::INFINITY;
    assert_eq!(named(infinite.on(&device).unwrap_err()), "b2");
    assert_eq!(named(infinite.run(Mode::Exact).unwrap_err()), "b2");
}

/// What joins gate and up, of every kind of f32, NaN and infinities too, through the layer's kernels.
#[test]
fn gatings_of_every_kind_of_number() {
    for (turn, family) in [Family::Random, Family::Subnormal, Family::Special, Family::Extreme].into_iter().enumerate()
    {
        for gating in [
            Gating::GPT_OSS,
            Gating::SwigluOai { alpha: 1.702, limit: f32::INFINITY },
            Gating::SwigluOai { alpha: -2.5, limit: 20.0 },
            Gating::SwigluOai { alpha: 0.0, limit: f32::INFINITY },
            Gating::Silu { limit: None },
        ] {
            let options = LayerOptions { gating, ..Default::default() };
            let shape = shape(16, 16, 1, 1, 1);
            let draw = DrawOptions { family, shape, tokens: 250, options, biases: false };
            let case = draw_op(Op::Swiglu, &draw, turn as u64).unwrap();
            let wanted = case.on_cpu().unwrap();
            for device in std::iter::once(any_emulator(turn)).chain(gpu()) {
                let got = case.on_device(&device).unwrap();
                let wrong = wanted.bits.iter().zip(&got.bits).position(|(wanted, got)| wanted != got);
                assert_eq!(wrong, None, "{family} {gating:?}");
            }
        }
    }
}
