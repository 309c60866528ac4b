//! Layers with FP8 and BF16 experts: kernels on every device against the exact reference, bit for bit.

use crate::common::{any_emulator, argument_of, assert_same, devices, difference, gpu, own_gpu, scale};
use cuda_std::kernel::Packed;
use megamoe::device::{Buffer, Device, DeviceHandle, Emulator, ErasedKernel, Grid, Properties};
use megamoe::diff::Random;
use megamoe::formats::{DenseExpert, DenseExperts, DenseMatrix, FP8_BLOCK};
use megamoe::grouped_layer::{GroupedInputs, GroupedLayer, GroupedPlan, GroupedTiles, describe};
use megamoe::reference::{self, LayerInputs, LayerResult, Status, math};
use megamoe::workspace::Workspace;
use megamoe::{Activation, Gating, GroupedArithmetic, GroupedOptions, LayerShape, XType};
use std::ops::Range;
use std::sync::{Arc, Mutex};

const fn shape(hidden: usize, intermediate: usize, output: usize, experts: usize, top_k: usize) -> LayerShape {
    LayerShape { hidden, intermediate, output, experts, top_k }
}

/// Sizes on and off 16, 64 and 128, rows of weights that are no multiple of 16 bytes, many experts with few pairs and few with many.
const SHAPES: [(LayerShape, usize); 7] = [
    (shape(16, 16, 1, 1, 1), 1),
    (shape(33, 19, 24, 3, 2), 5),
    (shape(320, 48, 40, 4, 2), 6),
    (shape(48, 320, 33, 3, 1), 4),
    (shape(136, 72, 100, 5, 3), 7),
    (shape(64, 16, 17, 40, 8), 9),
    (shape(48, 144, 65, 2, 2), 70),
];

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routes {
    Uniform,
    /// Half of all pairs on expert 0.
    Skewed,
    /// All pairs on the last expert.
    OneExpert,
    /// Ids below 0 and above the last expert between others.
    AnyId,
}

const ROUTES: [Routes; 4] = [Routes::Uniform, Routes::Skewed, Routes::OneExpert, Routes::AnyId];

/// A layer and a batch.
#[derive(Clone)]
struct Case {
    shape: LayerShape,
    options: GroupedOptions,
    experts: DenseExperts,
    resident: Vec<bool>,
    tokens: usize,
    x: Vec<u16>,
    topk_ids: Vec<i32>,
    topk_w: Vec<f32>,
}

fn bf16(value: f32) -> u16 {
    math::from_f32(Activation::Bf16, value)
}

fn matrix(random: &mut Random, arithmetic: GroupedArithmetic, rows: usize, cols: usize) -> DenseMatrix {
    match arithmetic {
        GroupedArithmetic::Bf16 => {
            DenseMatrix::Bf16((0..rows * cols).map(|_| bf16(random.in_range(-0.4, 0.4))).collect())
        }
        GroupedArithmetic::W8a8 | GroupedArithmetic::W8a16 => DenseMatrix::Fp8 {
            // Every number but NaN.
            codes: (0..rows * cols)
                .map(|_| {
                    let code = random.next() as u8;
                    if code & 0x7F == 0x7F { 0 } else { code }
                })
                .collect(),
            scales: (0..rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK))
                .map(|_| random.in_range(0.001, 0.004))
                .collect(),
        },
    }
}

impl Case {
    fn draw(
        arithmetic: GroupedArithmetic,
        shape: LayerShape,
        tokens: usize,
        routes: Routes,
        biased: bool,
        seed: u64,
    ) -> Self {
        let LayerShape { hidden, intermediate, output, experts, .. } = shape;
        let random = &mut Random(seed);
        let mut expert = |_| DenseExpert {
            gate: matrix(random, arithmetic, intermediate, hidden),
            up: matrix(random, arithmetic, intermediate, hidden),
            down: matrix(random, arithmetic, output, intermediate),
            biases: biased.then(|| {
                [intermediate, intermediate, output]
                    .map(|len| (0..len).map(|_| random.in_range(-1.0, 1.0)).collect::<Vec<_>>())
            }),
        };
        let all = (0..experts).map(&mut expert).collect();
        let mut case = Case {
            shape,
            options: GroupedOptions { arithmetic, gating: Gating::default() },
            experts: DenseExperts::new(hidden, intermediate, output, all).unwrap(),
            resident: vec![true; experts],
            tokens,
            x: Vec::new(),
            topk_ids: Vec::new(),
            topk_w: Vec::new(),
        };
        case.draw_batch(tokens, routes, seed);
        case
    }

    fn draw_batch(&mut self, tokens: usize, routes: Routes, seed: u64) {
        let LayerShape { hidden, experts, top_k, .. } = self.shape;
        let random = &mut Random(seed ^ 0x5eed);
        self.tokens = tokens;
        self.x = (0..tokens * hidden).map(|_| bf16(random.in_range(-2.0, 2.0))).collect();
        self.topk_ids = (0..tokens * top_k)
            .map(|_| {
                let any = (random.next() % experts as u64) as i32;
                match routes {
                    Routes::Uniform => any,
                    Routes::Skewed if random.next().is_multiple_of(2) => 0,
                    Routes::Skewed => any,
                    Routes::OneExpert => experts as i32 - 1,
                    Routes::AnyId => [any, any, -1, experts as i32, i32::MAX, i32::MIN][(random.next() % 6) as usize],
                }
            })
            .collect();
        self.topk_w = (0..tokens * top_k).map(|_| random.in_range(-0.5, 1.0)).collect();
    }

    fn run(&self) -> LayerResult {
        let Case { tokens, x, topk_ids, topk_w, .. } = self;
        let inputs = LayerInputs { tokens: *tokens, x, x_type: XType::Bf16, topk_ids, topk_w };
        let Case { experts, resident, shape, options, .. } = self;
        reference::grouped_layer(experts, Some(resident), shape.top_k, options, &inputs).unwrap()
    }

    /// Tiles that the layer has kernels for.
    fn tiles(&self) -> &'static [GroupedTiles] {
        match (self.options.arithmetic, self.options.gating) {
            (GroupedArithmetic::W8a8, Gating::Silu { .. }) if !self.experts.has_biases() => &GroupedTiles::ALL,
            (GroupedArithmetic::W8a8, _) => &GroupedTiles::ALL[..2],
            _ => &GroupedTiles::ALL[..1],
        }
    }

    fn on(&self, device: &DeviceHandle, tiles: GroupedTiles) -> OnDevice {
        let Case { experts, resident, shape, options, .. } = self;
        let layer = GroupedLayer::with_resident(device, experts, shape.top_k, *options, resident).unwrap();
        let plan = layer.plan_with(self.tokens, tiles).unwrap();
        OnDevice {
            workspace: Workspace::for_grouped(device, &plan).unwrap(),
            layer,
            plan,
            tokens: self.tokens,
            x: Buffer::from_slice(device, &self.x).unwrap(),
            topk_ids: Buffer::from_slice(device, &self.topk_ids).unwrap(),
            topk_weights: Buffer::from_slice(device, &self.topk_w).unwrap(),
            out: Buffer::from_slice(device, &vec![0xFFFF; self.tokens * shape.output + 16]).unwrap(),
        }
    }

    /// Every form of the layer on `device` gives the reference's bits.
    #[track_caller]
    fn check(&self, device: &DeviceHandle, what: &str) {
        let wanted = self.run();
        for &tiles in self.tiles() {
            let what = format!("{what}, {}, {:?}, {tiles:?}", device.properties().name, self.options);
            assert_same(&what, &self.shape, &wanted, &self.on(device, tiles).run());
        }
    }

    fn tokens_only(&self, tokens: Range<usize>) -> Case {
        let LayerShape { hidden, top_k, .. } = self.shape;
        let pairs = tokens.start * top_k..tokens.end * top_k;
        Case {
            tokens: tokens.len(),
            x: self.x[tokens.start * hidden..tokens.end * hidden].to_vec(),
            topk_ids: self.topk_ids[pairs.clone()].to_vec(),
            topk_w: self.topk_w[pairs].to_vec(),
            ..self.clone()
        }
    }
}

/// A case on a device.
struct OnDevice {
    layer: GroupedLayer,
    plan: GroupedPlan,
    workspace: Workspace,
    tokens: usize,
    x: Buffer<u16>,
    topk_ids: Buffer<i32>,
    topk_weights: Buffer<f32>,
    out: Buffer<u16>,
}

impl OnDevice {
    fn forward(&self) -> megamoe::Result<()> {
        let OnDevice { tokens, x, topk_ids, topk_weights, .. } = self;
        let inputs = GroupedInputs { tokens: *tokens, x, topk_ids, topk_weights };
        self.layer.forward(&self.plan, &self.workspace, inputs, &self.out)
    }

    fn take(&self) -> LayerResult {
        let mut out = self.out.download().unwrap();
        let behind = out.split_off(self.tokens * self.layer.shape().output);
        assert!(behind.iter().all(|&bits| bits == 0xFFFF), "written behind the last token");
        let status = self.workspace.take_status().unwrap();
        LayerResult { out, status: Status { bad_id: status.bad_expert_id, f16_range: status.f16_range } }
    }

    fn run(&self) -> LayerResult {
        self.forward().unwrap();
        self.take()
    }

    fn upload(&self, case: &Case) {
        self.x.upload(&case.x).unwrap();
        self.topk_ids.upload(&case.topk_ids).unwrap();
        self.topk_weights.upload(&case.topk_w).unwrap();
    }
}

/// Every shape and way of routing; biases, gatings and absent experts by turns.
fn every_shape(arithmetic: GroupedArithmetic) {
    for (i, (shape, tokens)) in SHAPES.into_iter().enumerate() {
        for (j, routes) in ROUTES.into_iter().enumerate() {
            let number = i * ROUTES.len() + j;
            if number % 2 == 1 && shape.experts > 3 && gpu().is_none() {
                // The emulator has half of the large ones.
                continue;
            }
            let mut case = Case::draw(arithmetic, shape, tokens, routes, number % 3 == 1, number as u64);
            case.options.gating = [
                Gating::Silu { limit: None },
                Gating::GPT_OSS,
                Gating::Silu { limit: Some(0.5) },
                Gating::Silu { limit: None },
            ][number % 4];
            if shape.experts > 1 && number % 5 == 4 {
                case.resident[number % shape.experts] = false;
            }
            for device in std::iter::once(any_emulator(number)).chain(gpu()) {
                case.check(&device, &format!("{routes:?}, {tokens} tokens"));
            }
        }
    }
}

#[test]
fn fp8_experts_with_fp8_activations() {
    every_shape(GroupedArithmetic::W8a8);
}

#[test]
fn fp8_experts_with_bf16_activations() {
    every_shape(GroupedArithmetic::W8a16);
}

#[test]
fn bf16_experts() {
    every_shape(GroupedArithmetic::Bf16);
}

/// Sizes of published models with few experts, and more pairs than one block sorts. Only a GPU is fast enough.
#[test]
fn full_width_on_the_gpu() {
    let Some(gpu) = gpu() else { return };
    for (i, (shape, tokens)) in
        [(shape(2048, 768, 2048, 8, 2), 20), (shape(2880, 2880, 2880, 4, 4), 3), (shape(272, 64, 48, 24, 8), 700)]
            .into_iter()
            .enumerate()
    {
        for arithmetic in GroupedArithmetic::ALL {
            Case::draw(arithmetic, shape, tokens, ROUTES[i], false, i as u64).check(&gpu, "full width");
        }
    }
}

/// NaN and infinities in x, and weights of 0 and NaN.
#[test]
fn special_values() {
    for (i, arithmetic) in GroupedArithmetic::ALL.into_iter().enumerate() {
        let mut case = Case::draw(arithmetic, shape(144, 32, 20, 3, 2), 6, Routes::Uniform, false, 40 + i as u64);
        for (at, bits) in [(3, 0x7FC1), (150, 0x7F80), (300, 0xFF80), (301, 0x0001), (450, 0x7F7F)] {
            case.x[at] = bits;
        }
        case.topk_w[9] = 0.0;
        case.topk_w[10] = f32::NAN;
        for device in std::iter::once(any_emulator(i)).chain(gpu()) {
            case.check(&device, "special");
        }
    }
}

/// What lies in workspace and output has no influence, pass after pass, for fewer tokens than planned too.
#[test]
fn a_workspace_is_used_again() {
    for (name, device) in devices().into_iter().skip(1) {
        for arithmetic in GroupedArithmetic::ALL {
            let mut case = Case::draw(arithmetic, shape(48, 32, 17, 4, 2), 8, Routes::AnyId, false, 3);
            for &tiles in case.clone().tiles() {
                let whole = case.on(&device, tiles);
                for (pass, (tokens, byte)) in [(8, 0xFF), (3, 0x7F), (0, 0x80), (8, 0x00)].into_iter().enumerate() {
                    case.draw_batch(tokens, ROUTES[pass], 70 + pass as u64);
                    whole.upload(&case);
                    whole.workspace.poison(byte).unwrap();
                    whole.out.fill(0xFF).unwrap();
                    let OnDevice { layer, plan, workspace, x, topk_ids, topk_weights, out, .. } = &whole;
                    let inputs = GroupedInputs { tokens, x, topk_ids, topk_weights };
                    layer.forward(plan, workspace, inputs, out).unwrap();
                    let status = workspace.take_status().unwrap();
                    let mut bits = out.download().unwrap();
                    let behind = bits.split_off(tokens * case.shape.output);
                    assert!(behind.iter().all(|&bits| bits == 0xFFFF), "{name}");
                    let status = Status { bad_id: status.bad_expert_id, f16_range: status.f16_range };
                    let got = LayerResult { out: bits, status };
                    assert_same(&format!("{name}, {tiles:?}, pass {pass}"), &case.shape, &case.run(), &got);
                }
            }
        }
    }
}

/// A token's bits depend on neither the other tokens nor its place among them.
#[test]
fn tokens_do_not_depend_on_their_batch() {
    for (i, arithmetic) in GroupedArithmetic::ALL.into_iter().enumerate() {
        let case = Case::draw(arithmetic, shape(144, 48, 17, 3, 2), 12, Routes::Skewed, false, 9);
        for device in std::iter::once(any_emulator(i)).chain(gpu()) {
            for &tiles in case.tiles() {
                let whole = case.on(&device, tiles).run().out;
                for token in (i..12).step_by(scale(&device, 5, 1)) {
                    let alone = case.tokens_only(token..token + 1).on(&device, tiles).run().out;
                    assert_eq!(alone, whole[token * 17..][..17], "{tiles:?}, token {token}");
                }
            }
        }
    }
}

/// Skipped pairs add nothing: a token without a live pair is +0, and experts that are not resident are as ids below 0.
#[test]
fn skipped_pairs() {
    for arithmetic in GroupedArithmetic::ALL {
        let mut case = Case::draw(arithmetic, shape(48, 32, 17, 4, 2), 5, Routes::Uniform, true, 5);
        case.topk_ids.copy_from_slice(&[0, 1, 2, 3, -1, -7, 3, 3, 1, 2]);
        case.resident = vec![true, false, true, false];
        let mut without = case.clone();
        without.resident = vec![true; 4];
        without.topk_ids.copy_from_slice(&[0, -1, 2, -1, -1, -1, -1, -1, -1, 2]);
        assert_eq!(case.run(), without.run());
        for device in std::iter::once(any_emulator(2)).chain(gpu()) {
            case.check(&device, "not resident");
            without.check(&device, "ids of -1");
        }
        let out = case.run().out;
        assert!(out[2 * 17..4 * 17].iter().all(|&bits| bits == 0));
        assert!(out[..17].iter().any(|&bits| bits != 0));
        // Nothing resident, nothing live.
        case.resident = vec![false; 4];
        case.check(&any_emulator(3), "none resident");
        assert!(case.run().out.iter().all(|&bits| bits == 0));
    }
}

/// An exact layer: silu(32) = 32, so that all of it can be done by hand.
#[test]
fn a_layer_by_hand() {
    let (hidden, intermediate, output) = (130, 20, 3);
    let at = |rows: usize, cols: usize, set: &[(usize, usize, u8)]| {
        let mut codes = vec![0; rows * cols];
        set.iter().for_each(|&(row, col, code)| codes[row * cols + col] = code);
        let mut scales = vec![1.0; rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK)];
        scales[cols / FP8_BLOCK] = 4.0;
        DenseMatrix::Fp8 { codes, scales }
    };
    // e4m3 0x38 is 1, 0x40 is 2, 0x28 is 0.25.
    let expert = DenseExpert {
        gate: at(intermediate, hidden, &[(19, 129, 0x38)]),
        up: at(intermediate, hidden, &[(19, 129, 0x28)]),
        down: at(output, intermediate, &[(2, 19, 0x28)]),
        biases: Some([vec![0.0; intermediate], vec![0.0; intermediate], vec![0.0, 2.0, 0.0]]),
    };
    for arithmetic in [GroupedArithmetic::W8a8, GroupedArithmetic::W8a16] {
        let mut case = Case::draw(arithmetic, shape(hidden, intermediate, output, 2, 1), 1, Routes::Uniform, true, 1);
        case.experts = DenseExperts::new(hidden, intermediate, output, vec![expert.clone(), expert.clone()]).unwrap();
        (case.topk_ids, case.topk_w) = (vec![1], vec![0.25]);
        case.x.fill(0);
        // 8 in the second group of 128: gate = 8·1·4 = 32, up = 8·0.25·4 = 8, h = 256, down = 256·0.25·4 = 256.
        case.x[129] = bf16(8.0);
        let wanted = [bf16(0.0), bf16(0.5), bf16(64.0)];
        assert_eq!(case.run().out, wanted);
        for (name, device) in devices() {
            for &tiles in case.tiles() {
                assert_eq!(case.on(&device, tiles).run().out, wanted, "{name}, {tiles:?}");
            }
        }
    }
}

/// A captured pass reads its buffers when it is replayed.
#[test]
fn replay_reads_its_inputs_anew() {
    let Some(gpu) = own_gpu() else { return };
    let device: DeviceHandle = gpu.clone();
    for arithmetic in GroupedArithmetic::ALL {
        let mut case = Case::draw(arithmetic, shape(272, 96, 100, 5, 4), 9, Routes::OneExpert, false, 1);
        for &tiles in case.clone().tiles() {
            let captured = case.on(&device, tiles);
            let graph = gpu.capture(|| captured.forward()).unwrap();
            for (replay, routes) in ROUTES.into_iter().cycle().take(12).enumerate() {
                case.draw_batch(9, routes, 100 + replay as u64);
                captured.upload(&case);
                captured.workspace.poison(0xFF).unwrap();
                captured.out.fill(0xFF).unwrap();
                graph.launch().unwrap();
                let what = format!("{tiles:?}, replay {replay}");
                assert_same(&what, &case.shape, &case.run(), &captured.take());
            }
        }
    }
}

/// Case E1: no tokens, on a plan for none and on one with room.
#[test]
fn e1_no_tokens() {
    for (name, device) in devices() {
        for arithmetic in GroupedArithmetic::ALL {
            let none = Case::draw(arithmetic, shape(16, 16, 8, 2, 2), 0, Routes::Uniform, false, 1);
            let empty = LayerResult { out: vec![], status: Status::default() };
            assert_eq!(none.run(), empty);
            for &tiles in none.tiles() {
                assert_eq!(none.on(&device, tiles).run(), empty, "{name}");
                let mut some = Case::draw(arithmetic, none.shape, 2, Routes::Uniform, false, 1).on(&device, tiles);
                some.tokens = 0;
                assert_eq!(some.run(), empty, "{name}");
            }
        }
    }
}

/// Case M1: every wrong argument is named, and nothing is launched.
#[test]
fn m1_arguments_are_named() {
    let case = Case::draw(GroupedArithmetic::W8a8, shape(32, 16, 8, 2, 2), 2, Routes::Uniform, false, 1);
    let (device, other) = (any_emulator(0), any_emulator(1));
    let named = |result: megamoe::Result<()>| argument_of(&result.unwrap_err());
    type Change<'a> = &'a dyn Fn(&mut OnDevice);
    let changes: [(&str, Change<'_>); 12] = [
        ("tokens", &|on| on.tokens = 3),
        ("x", &|on| on.x = Buffer::new(&device, 63).unwrap()),
        ("topk_ids", &|on| on.topk_ids = Buffer::new(&device, 3).unwrap()),
        ("topk_weights", &|on| on.topk_weights = Buffer::new(&device, 3).unwrap()),
        ("out", &|on| on.out = Buffer::new(&device, 15).unwrap()),
        ("workspace", &|on| {
            let smaller = on.layer.plan_with(0, GroupedTiles::Same).unwrap();
            on.workspace = Workspace::for_grouped(&device, &smaller).unwrap();
        }),
        ("x", &|on| on.x = Buffer::new(&other, 64).unwrap()),
        ("topk_ids", &|on| on.topk_ids = Buffer::new(&other, 4).unwrap()),
        ("topk_weights", &|on| on.topk_weights = Buffer::new(&other, 4).unwrap()),
        ("out", &|on| on.out = Buffer::new(&other, 16).unwrap()),
        ("workspace", &|on| on.workspace = Workspace::for_grouped(&other, &on.plan).unwrap()),
        ("plan", &|on| on.plan = case.on(&other, GroupedTiles::Same).plan),
    ];
    for (number, (name, change)) in changes.into_iter().enumerate() {
        let mut on = case.on(&device, GroupedTiles::Fused);
        change(&mut on);
        assert_eq!(named(on.forward()), name, "{number}");
        if !matches!(name, "out") {
            assert!(on.out.download().unwrap().iter().all(|&bits| bits == 0xFFFF), "{number}");
        }
    }
    let on = case.on(&device, GroupedTiles::Same);
    let mut another = case.on(&device, GroupedTiles::Same);
    let gating = Gating::Silu { limit: Some(1.0) };
    let options = GroupedOptions { gating, ..case.options };
    another.layer = GroupedLayer::new(&device, &case.experts, 2, options).unwrap();
    assert_eq!(named(another.forward()), "plan");
    assert_eq!(on.run(), case.run());

    // Making layers and plans.
    let layer =
        |top_k: usize, options: GroupedOptions| GroupedLayer::new(&device, &case.experts, top_k, options).map(|_| ());
    assert_eq!(named(layer(0, case.options)), "top_k");
    assert_eq!(named(layer(33, case.options)), "top_k");
    let bf16 = GroupedOptions { arithmetic: GroupedArithmetic::Bf16, ..case.options };
    assert_eq!(named(layer(1, bf16)), "arithmetic");
    for (name, gating) in [
        ("limit", Gating::Silu { limit: Some(0.0) }),
        ("limit", Gating::SwigluOai { alpha: 1.0, limit: f32::NAN }),
        ("alpha", Gating::SwigluOai { alpha: f32::INFINITY, limit: 7.0 }),
    ] {
        assert_eq!(named(layer(1, GroupedOptions { gating, ..case.options })), name);
    }
    let short = GroupedLayer::with_resident(&device, &case.experts, 1, case.options, &[true]);
    assert_eq!(named(short.map(|_| ())), "resident");
    assert_eq!(named(on.layer.plan(usize::MAX / 2).map(|_| ())), "max_tokens");
    let oai = GroupedOptions { gating: Gating::GPT_OSS, ..case.options };
    let oai = GroupedLayer::new(&device, &case.experts, 2, oai).unwrap();
    assert_eq!(named(oai.plan_with(2, GroupedTiles::Fused).map(|_| ())), "tiles");
    let wide = GroupedOptions { arithmetic: GroupedArithmetic::W8a16, ..case.options };
    let wide = GroupedLayer::new(&device, &case.experts, 2, wide).unwrap();
    assert_eq!(named(wide.plan_with(2, GroupedTiles::Own).map(|_| ())), "tiles");

    // The reference.
    let inputs =
        |tokens, x_type| LayerInputs { tokens, x: &case.x, x_type, topk_ids: &case.topk_ids, topk_w: &case.topk_w };
    let reference = |options: &GroupedOptions, inputs: LayerInputs<'_>, resident: Option<&[bool]>| {
        reference::grouped_layer(&case.experts, resident, 2, options, &inputs).map(|_| ())
    };
    assert_eq!(named(reference(&bf16, inputs(2, XType::Bf16), None)), "arithmetic");
    assert_eq!(named(reference(&case.options, inputs(2, XType::F16), None)), "x_type");
    assert_eq!(named(reference(&case.options, inputs(3, XType::Bf16), None)), "x");
    assert_eq!(named(reference(&case.options, inputs(2, XType::Bf16), Some(&[true]))), "resident");
}

/// Faults such as a chain of operations could have: each must show, or the comparisons above prove little.
#[test]
fn planted_faults_are_caught() {
    type Plant = fn(&mut Case);
    let change = |case: &mut Case, change: &dyn Fn(&mut DenseExpert)| {
        let LayerShape { hidden, intermediate, output, .. } = case.shape;
        let mut experts = case.experts.clone().into_experts();
        experts.iter_mut().for_each(change);
        case.experts = DenseExperts::new(hidden, intermediate, output, experts).unwrap();
    };
    let swap: fn(&mut DenseExpert) = |expert| std::mem::swap(&mut expert.gate, &mut expert.up);
    let bias: fn(&mut DenseExpert) = |expert| {
        if let Some(biases) = &mut expert.biases {
            biases.iter_mut().for_each(|values| *values.last_mut().unwrap() += 0.25);
        }
    };
    let batch: [(&str, Plant); 5] = [
        ("ids of the last token", |case| *case.topk_ids.last_mut().unwrap() ^= 1),
        ("weights of the first token", |case| case.topk_w[0] *= 1.05),
        ("one absent expert", |case| case.resident[1] = false),
        ("a clamp", |case| case.options.gating = Gating::Silu { limit: Some(0.25) }),
        ("last column of x", |case| case.x.iter_mut().skip(143).step_by(144).for_each(|x| *x ^= 0x8000)),
    ];
    for arithmetic in GroupedArithmetic::ALL {
        let case = Case::draw(arithmetic, shape(144, 48, 40, 2, 2), 9, Routes::Uniform, true, 8);
        let wanted = case.run();
        let mut faulty: Vec<(&str, Case)> = batch
            .iter()
            .map(|&(name, plant)| {
                let mut case = case.clone();
                plant(&mut case);
                (name, case)
            })
            .collect();
        for (name, with) in [("gate and up swapped", swap), ("biases", bias)] {
            let mut other = case.clone();
            change(&mut other, &with);
            faulty.push((name, other));
        }
        for (name, faulty) in faulty {
            assert!(difference(&case.shape, &wanted, &faulty.run()).is_some(), "{name} is not noticed in {arithmetic}");
        }
    }
    // The two arithmetics of FP8 experts are not the same.
    let case = Case::draw(GroupedArithmetic::W8a8, shape(144, 48, 40, 2, 2), 9, Routes::Uniform, false, 8);
    let mut wide = case.clone();
    wide.options.arithmetic = GroupedArithmetic::W8a16;
    assert!(difference(&case.shape, &case.run(), &wide.run()).is_some());
}

/// An emulator that keeps what was launched.
#[derive(Debug)]
struct Watched {
    device: DeviceHandle,
    launches: Mutex<Vec<(&'static str, Grid)>>,
}

impl Device for Watched {
    fn properties(&self) -> &Properties {
        self.device.properties()
    }
    fn allocate(&self, bytes: usize) -> megamoe::Result<u64> {
        self.device.allocate(bytes)
    }
    fn free(&self, address: u64) {
        self.device.free(address);
    }
    fn upload(&self, address: u64, data: &[u8]) -> megamoe::Result<()> {
        self.device.upload(address, data)
    }
    fn download(&self, address: u64, data: &mut [u8]) -> megamoe::Result<()> {
        self.device.download(address, data)
    }
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> megamoe::Result<()> {
        self.device.fill(address, byte, bytes)
    }
    fn prepare(&self, kernel: ErasedKernel, shared_bytes: u32) -> megamoe::Result<()> {
        self.device.prepare(kernel, shared_bytes)
    }
    fn launch_erased(&self, kernel: ErasedKernel, grid: Grid, args: &[Packed]) -> megamoe::Result<()> {
        self.launches.lock().unwrap().push((kernel.name, grid));
        self.device.launch_erased(kernel, grid, args)
    }
    fn synchronize(&self) -> megamoe::Result<()> {
        self.device.synchronize()
    }
}

/// A description without weights is what a layer does.
#[test]
fn descriptions_are_what_is_launched() {
    for (shape, tokens) in [(shape(64, 48, 33, 3, 2), 5), (shape(128, 256, 64, 2, 2), 70)] {
        for (arithmetic, biases) in GroupedArithmetic::ALL.into_iter().flat_map(|a| [(a, false), (a, true)]) {
            let case = Case::draw(arithmetic, shape, tokens, Routes::Uniform, biases, 5);
            let watched = Arc::new(Watched { device: Emulator::new(), launches: Mutex::default() });
            let device: DeviceHandle = watched.clone();
            let layer = GroupedLayer::new(&device, &case.experts, shape.top_k, case.options).unwrap();
            let tiles = layer.plan(tokens).unwrap().tiles();
            let on = case.on(&device, tiles);
            watched.launches.lock().unwrap().clear();
            on.forward().unwrap();
            let description = describe(device.properties(), shape, case.options, biases, tokens).unwrap();
            assert_eq!(description.launches, *watched.launches.lock().unwrap(), "{arithmetic:?}, biases {biases}");
            assert_eq!(description.workspace_bytes, on.plan.workspace_bytes());
            assert_eq!(description.tiles, tiles);
        }
    }
    // What does not fit is refused, as a plan would be.
    let mut small = Emulator::new().properties().clone();
    let options = GroupedOptions { arithmetic: GroupedArithmetic::Bf16, gating: Gating::default() };
    let named = |properties: &Properties, shape, tokens| {
        argument_of(&describe(properties, shape, options, false, tokens).unwrap_err())
    };
    assert_eq!(named(&small, shape(64, 48, 33, 3, 33), 1), "top_k");
    assert_eq!(named(&small, shape(0, 48, 33, 3, 1), 1), "hidden");
    assert_eq!(named(&small, shape(64, 48, 33, 3, 2), usize::MAX), "tokens");
    small.shared_per_block = 99 * 1024;
    assert_eq!(named(&small, shape(64, 48, 33, 3, 2), 1), "shared_bytes");
}
