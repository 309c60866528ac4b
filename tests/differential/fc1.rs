//! FC1 with what joins gate and up on tables made by hand, against the reference's h, bit for bit.

use crate::common::{Table, any_emulator, cancel_w13, from_tensor_order, gpu, in_tensor_order, place};
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::dequant::{Mxfp4, Nvfp4};
use kernels_gpu::fc1::{SILU, SWIGLU_OAI, fc1 as family, shared_bytes};
use kernels_gpu::layout::permute::row_stride;
use kernels_gpu::status;
use megamoe::device::{Buffer, DeviceHandle, Grid, launch};
use megamoe::diff::{Case, Family, Random, draw, draw_in};
use megamoe::plan::Tile;
use megamoe::reference::{Mode, Route, convert_x, fc1, math, route_prep};
use megamoe::{Activation, Gating, LayerOptions, LayerShape, Order, Split, WeightFormat};

const UNTOUCHED: u16 = 0xA5A5;

/// A kernel by its order and, for decode, its tile.
fn kernel(weights: WeightFormat, activation: Activation, order: Order, tile: Tile) -> Kernel<family::Family> {
    let weights = if weights == WeightFormat::Mxfp4 { "mxfp4_" } else { "" };
    let format = if activation == Activation::Bf16 { "bf16" } else { "f16" };
    let name = match order {
        Order::Seed { split } => format!("fc1_seed_{weights}{format}_split{}", split.count()),
        Order::Decode => format!("fc1_decode_{weights}{format}_{}", tile.name()),
    };
    *family::KERNELS.iter().find(|kernel| kernel.name == name).unwrap()
}

/// Every order, decode with every tile.
fn orders() -> impl Iterator<Item = (Order, Tile)> {
    let seeds = Split::ALL.map(|split| (Order::Seed { split }, Tile::Rows16));
    seeds.into_iter().chain(Tile::OF_EXPERTS.map(|tile| (Order::Decode, tile)))
}

/// h [pairs, I] and the status.
fn expected(case: &Case, route: &Route, mode: Mode) -> (Vec<u16>, u32) {
    let (x, _) = convert_x(&case.inputs(), &case.shape, case.options.activation, route).unwrap();
    let (h, overflow) = fc1(&case.view(), &case.options, &x, route, mode).unwrap();
    (h, if overflow { status::F16_RANGE } else { 0 })
}

/// The kernel's h, with `UNTOUCHED` where it wrote nothing, and the status.
fn run(case: &Case, route: &Route, tile: Tile, device: &DeviceHandle, blocks: u32, seed: u64) -> (Vec<u16>, u32) {
    let LayerShape { hidden, intermediate, .. } = case.shape;
    let LayerOptions { format, activation, order, gating } = case.options;
    let (tiles, groups) = match tile {
        Tile::Rows16 | Tile::Direct => (1, 1),
        Tile::Rows32 => (2, 1),
        Tile::Wide => (2, 2),
    };
    let (x, _) = convert_x(&case.inputs(), &case.shape, activation, route).unwrap();
    let table = Table::new(device, case, route, groups as usize, seed);
    let x = Buffer::from_slice(device, &in_tensor_order(&x, hidden, order)).unwrap();
    let w13 = Buffer::from_slice(device, &case.w13).unwrap();
    let s13 = Buffer::from_slice(device, &case.s13).unwrap();
    let b13 = case.b13.as_ref().map(|b13| Buffer::from_slice(device, b13).unwrap());
    let stride = row_stride(intermediate);
    let h = Buffer::from_slice(device, &vec![UNTOUCHED; route.pairs() * stride]).unwrap();
    let status = Buffer::from_slice(device, &[0u32]).unwrap();
    let kernel = kernel(format, activation, order, tile);
    let split = order.partials() as u32;
    let shared_bytes = match format {
        WeightFormat::Nvfp4 => shared_bytes::<Nvfp4>(split, tiles, groups),
        WeightFormat::Mxfp4 => shared_bytes::<Mxfp4>(split, tiles, groups),
    };
    let grid = Grid { blocks, shared_bytes };
    device.prepare(kernel.into(), grid.shared_bytes).unwrap();
    let args = family::Args {
        entry_count: table.entry_count.as_ref(),
        entries: table.entries.as_ref(),
        slots: table.slots.as_ref(),
        x: x.as_ref(),
        w13: w13.as_ref(),
        s13: s13.as_ref(),
        b13: b13.as_ref().map_or(DeviceRef::null(), Buffer::as_ref),
        h: h.as_mut(),
        status: status.as_mut(),
        hidden: hidden as u32,
        intermediate: intermediate as u32,
        gating: if matches!(gating, Gating::Silu { .. }) { SILU } else { SWIGLU_OAI },
        factor: if let Gating::SwigluOai { alpha, .. } = gating { alpha } else { 1.0 },
        limit: gating.limit().unwrap_or(f32::INFINITY),
    };
    launch(&**device, kernel, grid, args).unwrap();
    let h = h.download().unwrap();
    // The padding is not this kernel's to write.
    let mut columns = vec![false; stride];
    (0..intermediate).for_each(|column| columns[place(column, order)] = true);
    for row in h.chunks(stride) {
        assert!(row.iter().zip(&columns).all(|(&bits, column)| *column || bits == UNTOUCHED));
    }
    (from_tensor_order(&h, intermediate, order), status.download().unwrap()[0])
}

/// Where `got` is not `wanted`; rows of skipped pairs must be untouched.
fn difference(route: &Route, intermediate: usize, wanted: &(Vec<u16>, u32), got: &(Vec<u16>, u32)) -> Option<String> {
    for (pair, (wanted, got)) in wanted.0.chunks(intermediate).zip(got.0.chunks(intermediate)).enumerate() {
        for (column, (&wanted, &got)) in wanted.iter().zip(got).enumerate() {
            let wanted = if route.expert_of(pair).is_some() { wanted } else { UNTOUCHED };
            if wanted != got {
                return Some(format!("pair {pair}, column {column}: {got:#06x}, not {wanted:#06x}"));
            }
        }
    }
    (wanted.1 != got.1).then(|| format!("status {}, not {}", got.1, wanted.1))
}

#[track_caller]
fn check(case: &Case, tile: Tile, device: &DeviceHandle, blocks: u32, seed: u64) {
    let route = route_prep(&case.topk_ids, case.shape.top_k, case.shape.experts).unwrap();
    let wanted = expected(case, &route, Mode::Exact);
    let got = run(case, &route, tile, device, blocks, seed);
    if let Some(difference) = difference(&route, case.shape.intermediate, &wanted, &got) {
        panic!("{:?}, {:?}, {tile:?}, {blocks} blocks: {difference}", case.shape, case.options);
    }
}

const SIZES: [(usize, usize); 12] = [
    (16, 16),
    (48, 32),
    (112, 16),
    (128, 128),
    (144, 48),
    (256, 16),
    (272, 80),
    (512, 32),
    (528, 160),
    (1040, 16),
    (1152, 32),
    (2880, 16),
];

/// Every kernel at every size, with data by turns.
#[test]
fn every_kernel_at_every_size() {
    let mut turn = 0;
    for activation in [Activation::Bf16, Activation::F16] {
        for (order, tile) in orders() {
            for (hidden, intermediate) in SIZES {
                let shape = LayerShape { hidden, intermediate, output: 1, experts: 3, top_k: 2 };
                let mut case = draw(Family::ALL[turn % 7], shape, 5, turn as u64);
                let gating = Gating::Silu { limit: (turn % 5 == 0).then_some(0.75) };
                case.options = LayerOptions { activation, order, gating, ..case.options };
                check(&case, tile, &any_emulator(turn), 1 + turn as u32 % 7, turn as u64);
                gpu().iter().for_each(|gpu| check(&case, tile, gpu, 1 + turn as u32 * 37 % 500, turn as u64));
                turn += 1;
            }
        }
    }
}

const MXFP4_SIZES: [(usize, usize); 10] =
    [(32, 32), (96, 32), (128, 128), (160, 64), (256, 32), (288, 96), (512, 32), (544, 160), (1056, 32), (2880, 32)];

const GATINGS: [Gating; 5] = [
    Gating::Silu { limit: None },
    Gating::GPT_OSS,
    Gating::Silu { limit: Some(0.75) },
    Gating::SwigluOai { alpha: -0.5, limit: 0.5 },
    Gating::SwigluOai { alpha: 1.0, limit: f32::INFINITY },
];

/// Every MXFP4 kernel at every size, with data, gatings and biases by turns. The kernel takes any scale with f16 activations too.
#[test]
fn every_mxfp4_kernel_at_every_size() {
    let mut turn = 0;
    for activation in [Activation::Bf16, Activation::F16] {
        for (order, tile) in orders() {
            for (hidden, intermediate) in MXFP4_SIZES {
                let shape = LayerShape { hidden, intermediate, output: 1, experts: 3, top_k: 2 };
                let mut case = draw_in(WeightFormat::Mxfp4, Family::ALL[turn % 7], shape, 5, turn as u64);
                if turn % 2 == 0 {
                    case.add_biases(turn as u64);
                }
                let gating = GATINGS[turn % 5];
                case.options = LayerOptions { activation, order, gating, ..case.options };
                check(&case, tile, &any_emulator(turn), 1 + turn as u32 % 7, turn as u64);
                gpu().iter().for_each(|gpu| check(&case, tile, gpu, 1 + turn as u32 * 37 % 500, turn as u64));
                turn += 1;
            }
        }
    }
}

/// NVFP4 experts with biases, and with gpt-oss's gating.
#[test]
fn biases_and_gatings_with_nvfp4() {
    for (turn, (hidden, intermediate)) in SIZES.into_iter().chain(SIZES).enumerate() {
        let shape = LayerShape { hidden, intermediate, output: 1, experts: 3, top_k: 2 };
        let mut case = draw(Family::ALL[turn % 7], shape, 5, 900 + turn as u64);
        if turn % 3 != 0 {
            case.add_biases(turn as u64);
        }
        let activation = [Activation::Bf16, Activation::F16][turn / 12];
        let (order, tile) = orders().nth(turn % 7).unwrap();
        case.options = LayerOptions { activation, order, gating: GATINGS[turn % 5], ..case.options };
        check(&case, tile, &any_emulator(turn), 1 + turn as u32 % 7, turn as u64);
        gpu().iter().for_each(|gpu| check(&case, tile, gpu, 1 + turn as u32 * 37 % 500, turn as u64));
    }
}

/// Every MXFP4 code under every scale byte, each alone in its row of up and met by a 1: h is (code·scale + 1)·c.
#[test]
fn every_mxfp4_code_under_every_scale() {
    let codes = [0.0f64, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    // Column n of expert e has code n mod 16 in k = 0 under scale 2e + n / 16.
    let shape = LayerShape { hidden: 32, intermediate: 32, output: 1, experts: 128, top_k: 1 };
    let mut case = Case::blank_in(WeightFormat::Mxfp4, shape, 128);
    for e in 0..128 {
        case.set_id(e, 0, e as i32, 1.0);
        case.set_x(e, 0, 1.0);
        for n in 0..32 {
            case.set_up(e, n, 0, n as u8 % 16);
            case.set_s13(e, n, 0, (2 * e + n / 16) as u8);
        }
    }
    // Gates of 64: silu of that is 64.
    case.b13 = Some([[0.0; 32], [64.0; 32]].concat().repeat(128));
    let route = route_prep(&case.topk_ids, 1, 128).unwrap();
    for activation in [Activation::Bf16, Activation::F16] {
        case.options.activation = activation;
        for device in (0..3).map(any_emulator).chain(gpu()) {
            check(&case, Tile::Rows32, &device, 7, 0);
            let (h, _) = run(&case, &route, Tile::Rows16, &device, 5, 0);
            for (i, bits) in h.into_iter().enumerate() {
                let (scale, code) = (i / 16, i % 16);
                let exact = codes[code] * 2f64.powi(scale as i32 - 127);
                let exponents = scale as i32 - 127;
                if scale == 255 {
                    assert_eq!(bits, 0x7FFF, "{activation:?}: code {code} under NaN");
                } else if activation == Activation::Bf16 {
                    // From 2^128 on a product is infinite; those of 64 and a smaller one may be too.
                    let product =
                        if exact.abs() < 2f64.powi(128) { exact as f32 } else { exact.signum() as f32 * f32::INFINITY };
                    let wanted = math::from_f32(activation, 64.0 * product + 0.0);
                    assert_eq!(bits & 0x7FFF, wanted & 0x7FFF, "code {code} under 2^{exponents}");
                } else if (-23..=13).contains(&exponents) {
                    let wanted = math::from_f32(activation, 64.0 * exact as f32);
                    assert_eq!(bits & 0x7FFF, wanted & 0x7FFF, "code {code} under 2^{exponents}");
                }
            }
        }
    }
}

/// Sums of which nothing but the roundings remains: any other order of terms gives entirely other bits.
#[test]
fn sums_that_cancel() {
    let nvfp4 = [32, 96, 256, 288, 544, 1056, 2880].map(|hidden| (WeightFormat::Nvfp4, hidden, 16));
    let mxfp4 = [64, 320, 576, 1088, 2880].map(|hidden| (WeightFormat::Mxfp4, hidden, 32));
    for (turn, (format, hidden, intermediate)) in nvfp4.into_iter().chain(mxfp4).enumerate() {
        for activation in [Activation::Bf16, Activation::F16] {
            for (i, (order, tile)) in orders().enumerate() {
                let shape = LayerShape { hidden, intermediate, output: 1, experts: 2, top_k: 1 };
                let mut case = draw_in(format, Family::Random, shape, 6, turn as u64);
                cancel_w13(&mut case);
                case.options = LayerOptions { activation, order, ..case.options };
                check(&case, tile, &any_emulator(turn + i), 2, 1);
                gpu().iter().for_each(|gpu| check(&case, tile, gpu, 64, 1));
            }
        }
    }
}

/// And so a comparison of cancelling sums notices other splits and plain sums, at almost every element.
#[test]
fn another_order_of_sums_is_caught() {
    for format in WeightFormat::ALL {
        let shape = LayerShape { hidden: 2880, intermediate: 32, output: 1, experts: 2, top_k: 1 };
        let mut case = draw_in(format, Family::Random, shape, 6, 3);
        cancel_w13(&mut case);
        case.topk_ids.fill(1);
        let route = route_prep(&case.topk_ids, 1, 2).unwrap();
        let mut results = vec![expected(&case, &route, Mode::Fast).0];
        for order in Order::ALL {
            case.options.order = order;
            results.push(expected(&case, &route, Mode::Exact).0);
        }
        for (i, a) in results.iter().enumerate() {
            for b in &results[..i] {
                let other = a.iter().zip(b).filter(|(a, b)| a != b).count();
                assert!(other * 2 > a.len(), "{format}: {other} of {}", a.len());
            }
        }
    }
}

/// Without entries nothing is written, and one block or very many make no difference.
#[test]
fn any_grid() {
    let shape = LayerShape { hidden: 272, intermediate: 144, output: 1, experts: 3, top_k: 2 };
    let mut case = draw(Family::Random, shape, 9, 3);
    for blocks in [1, 2, 17, 200] {
        for (order, tile) in orders() {
            case.options.order = order;
            check(&case, tile, &any_emulator(blocks as usize), blocks, 4);
        }
    }
    case.topk_ids.fill(-1);
    check(&case, Tile::Wide, &any_emulator(1), 3, 4);
}

/// Rows and tiles at stride 32: a unit takes columns of up and of gate that belong together.
#[test]
fn each_column_is_its_own() {
    for intermediate in [16, 128, 144, 320] {
        let shape = LayerShape { hidden: 16, intermediate, output: 1, experts: 1, top_k: 1 };
        let mut case = Case::blank(shape, 1);
        case.set_x(0, 0, 1.0);
        let marked = |column: usize| column * 7 % 16;
        for column in 0..intermediate {
            case.set_up(0, column, 0, marked(column) as u8);
            case.set_gate(0, column, 0, 0x6);
        }
        // silu(32·4) is 128 in bf16 too.
        case.alpha1.fill([1.0, 32.0]);
        let route = route_prep(&case.topk_ids, 1, 1).unwrap();
        let (h, _) = run(&case, &route, Tile::Rows32, &any_emulator(1), 2, 0);
        let codes = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (column, bits) in h.into_iter().enumerate() {
            let code = marked(column);
            let wanted = codes[code % 8] * if code < 8 { 128.0 } else { -128.0 };
            assert_eq!(f32::from_bits(u32::from(bits) << 16), wanted, "column {column} of {intermediate}");
        }
    }
}

/// Rows of h that the comparison must not accept.
#[test]
fn planted_faults_are_caught() {
    let shape = LayerShape { hidden: 144, intermediate: 48, output: 1, experts: 3, top_k: 2 };
    let case = draw(Family::Ids, shape, 7, 3);
    let route = route_prep(&case.topk_ids, 2, 3).unwrap();
    let wanted = expected(&case, &route, Mode::Exact);
    let right = run(&case, &route, Tile::Wide, &any_emulator(1), 2, 0);
    assert_eq!(difference(&route, 48, &wanted, &right), None);
    type Plant = fn(&mut Case);
    let faults: [(&str, Plant); 4] = [
        ("nibbles swapped", |case| case.w13.iter_mut().for_each(|byte| *byte = byte.rotate_left(4))),
        ("halves swapped", |case| case.w13.chunks_mut(48 * 144).for_each(|expert| expert.rotate_left(24 * 144))),
        ("no clamp", |case| case.options.gating = Gating::Silu { limit: Some(0.05) }),
        ("scales of the neighbouring block", |case| case.s13.rotate_left(1)),
    ];
    for (name, plant) in faults {
        let mut faulty = case.clone();
        plant(&mut faulty);
        assert!(difference(&route, 48, &expected(&faulty, &route, Mode::Exact), &right).is_some(), "{name}");
    }
    // A row of a skipped pair that was written, and a status that was not set.
    let skipped = (0..14).find(|&pair| route.expert_of(pair).is_none()).unwrap();
    let mut written = right.clone();
    written.0[skipped * 48] = 0;
    assert!(difference(&route, 48, &wanted, &written).is_some());
    assert!(difference(&route, 48, &wanted, &(right.0, 2)).is_some());
}

/// SwiGLU of arbitrary f32, and of such pairs that other ways to write it, or another exp, would round to other bits: gate and up are
/// global scales times 1, one pair an expert.
#[test]
fn swiglu_bit_by_bit() {
    let ways: [fn(f32, f32) -> f32; 5] = [
        |gate, up| gate / (1.0 + math::exp(-gate)) * up,
        |gate, up| gate * (1.0 / (1.0 + math::exp(-gate))) * up,
        |gate, up| gate * up / (1.0 + math::exp(-gate)),
        |gate, up| gate / (1.0 + (-gate).exp()) * up,
        |gate, up| gate / (1.0 + (-gate * std::f32::consts::LOG2_E).exp2()) * up,
    ];
    let mut random = Random(1);
    for activation in [Activation::Bf16, Activation::F16] {
        let mut pairs: Vec<(f32, f32)> = vec![];
        let edges =
            [0.0, 1e-40, 1e-20, 1.0, 17.0, 88.0, 88.722_83, 88.722_85, 103.0, 103.98, 104.1, 1e4, 1e30, f32::MAX];
        for gate in edges {
            pairs.extend([(gate, 1.5), (-gate, 1.5), (-gate, f32::MAX), (gate, -1e-38)]);
        }
        for other in &ways[1..] {
            let wanted = pairs.len() + 24;
            while pairs.len() < wanted {
                let (gate, up) = (random.in_range(-12.0, 12.0), random.in_range(-2.0, 2.0));
                let [right, wrong] = [ways[0], *other].map(|way| math::from_f32(activation, way(gate, up)));
                if right != wrong {
                    pairs.push((gate, up));
                }
            }
        }
        let shape = LayerShape { hidden: 16, intermediate: 16, output: 1, experts: pairs.len(), top_k: 1 };
        let mut case = Case::blank(shape, pairs.len());
        case.options.activation = activation;
        for (expert, &(gate, up)) in pairs.iter().enumerate() {
            case.topk_ids[expert] = expert as i32;
            case.alpha1[expert] = [up, gate];
            case.set_x(expert, 0, 1.0);
            case.set_up(expert, 0, 0, 0x2);
            case.set_gate(expert, 0, 0, 0x2);
        }
        let route = route_prep(&case.topk_ids, 1, pairs.len()).unwrap();
        for device in std::iter::once(any_emulator(1)).chain(gpu()) {
            check(&case, Tile::Rows16, &device, 5, 0);
            let (h, _) = run(&case, &route, Tile::Rows32, &device, 3, 0);
            for (&(gate, up), row) in pairs.iter().zip(h.chunks(16)) {
                assert_eq!(row[0], math::from_f32(activation, ways[0](gate, up)), "{activation:?}: {gate}, {up}");
            }
        }
    }
}

/// gpt-oss's gating of arbitrary f32, and of such pairs that other ways to write it would round to other bits: the biases of codes
/// that are 0, one pair an expert, in both formats.
#[test]
fn gpt_oss_gating_bit_by_bit() {
    const ALPHA: f32 = 1.702;
    let sigmoid = |x: f32| 1.0 / (1.0 + math::exp(-x));
    let ways: [&dyn Fn(f32, f32) -> f32; 5] = [
        &|gate, up| (up + 1.0) * (gate * sigmoid(ALPHA * gate)),
        &|gate, up| (up + 1.0) * gate * sigmoid(ALPHA * gate),
        &|gate, up| (up + 1.0) * (gate / (1.0 + math::exp(-(ALPHA * gate)))),
        &|gate, up| up.mul_add(gate * sigmoid(ALPHA * gate), gate * sigmoid(ALPHA * gate)),
        &|gate, up| (up + 1.0) * (gate * (1.0 / (1.0 + (-ALPHA * gate).exp()))),
    ];
    let mut random = Random(1);
    let mut pairs: Vec<(f32, f32)> = vec![(7.5, -8.5), (9.0, 9.0), (-9.0, -9.0), (7.0, -7.0), (-7.0, 7.0)];
    for gate in [0.0, 1e-40, 1e-20, 1.0, 17.0, 52.1, 52.2, 61.0, 61.2, 1e4, 1e30, f32::MAX] {
        pairs.extend([(gate, 1.5), (-gate, 1.5), (-gate, f32::MAX), (gate, -1.0), (gate, -1e-38)]);
    }
    for other in &ways[1..] {
        for activation in [Activation::Bf16, Activation::F16] {
            let wanted = pairs.len() + 5;
            while pairs.len() < wanted {
                let (gate, up) = (random.in_range(-7.0, 7.0), random.in_range(-2.0, 2.0));
                if math::from_f32(activation, ways[0](gate, up)) != math::from_f32(activation, other(gate, up)) {
                    pairs.push((gate, up));
                }
            }
        }
    }
    for (format, limit) in WeightFormat::ALL.into_iter().zip([7.0, f32::INFINITY]) {
        let clamped = |gate: f32, up: f32| (gate.min(limit), up.clamp(-limit, limit));
        for activation in [Activation::Bf16, Activation::F16] {
            let shape = LayerShape { hidden: 32, intermediate: 32, output: 1, experts: pairs.len(), top_k: 1 };
            let mut case = Case::blank_in(format, shape, pairs.len());
            let (order, gating) = (Order::Seed { split: Split::S1 }, Gating::SwigluOai { alpha: ALPHA, limit });
            case.options = LayerOptions { format, activation, order, gating };
            let mut b13 = vec![0.0; pairs.len() * 64];
            for (expert, &(gate, up)) in pairs.iter().enumerate() {
                case.topk_ids[expert] = expert as i32;
                (b13[64 * expert], b13[64 * expert + 32]) = (up, gate);
            }
            case.b13 = Some(b13);
            let route = route_prep(&case.topk_ids, 1, pairs.len()).unwrap();
            let by_reference = expected(&case, &route, Mode::Exact);
            for device in std::iter::once(any_emulator(1)).chain(gpu()) {
                let got = run(&case, &route, Tile::Rows32, &device, 3, 0);
                assert_eq!(difference(&route, 32, &by_reference, &got), None, "{activation:?} {format}");
                for (&(gate, up), row) in pairs.iter().zip(got.0.chunks(32)) {
                    // 0 + (-0) is +0.
                    let (g, u) = clamped(gate + 0.0, up + 0.0);
                    let wanted = math::from_f32(activation, ways[0](g, u));
                    assert_eq!(row[0], wanted, "{activation:?} {format}: {gate}, {up}");
                }
            }
        }
    }
}

/// Faults of biases and gating that the comparison must not accept.
#[test]
fn planted_faults_in_biases_and_gating_are_caught() {
    let shape = LayerShape { hidden: 160, intermediate: 64, output: 1, experts: 3, top_k: 2 };
    let mut case = draw_in(WeightFormat::Mxfp4, Family::Random, shape, 7, 3);
    case.add_biases(1);
    case.options.gating = Gating::GPT_OSS;
    let route = route_prep(&case.topk_ids, 2, 3).unwrap();
    let right = run(&case, &route, Tile::Wide, &any_emulator(1), 2, 0);
    assert_eq!(difference(&route, 64, &expected(&case, &route, Mode::Exact), &right), None);
    type Plant = fn(&mut Case);
    let faults: [(&str, Plant); 7] = [
        ("no biases", |case| case.b13 = None),
        ("biases of gate and up swapped", |case| {
            case.b13.iter_mut().flat_map(|b13| b13.chunks_mut(128)).for_each(|row| row.rotate_left(64))
        }),
        ("biases of another expert", |case| case.b13.iter_mut().for_each(|b13| b13.rotate_left(128))),
        ("silu", |case| case.options.gating = Gating::Silu { limit: Some(7.0) }),
        ("another alpha", |case| case.options.gating = Gating::SwigluOai { alpha: 1.7, limit: 7.0 }),
        ("another limit", |case| case.options.gating = Gating::SwigluOai { alpha: 1.702, limit: 1.0 }),
        ("scales of the neighbouring block", |case| case.s13.rotate_left(1)),
    ];
    for (name, plant) in faults {
        let mut faulty = case.clone();
        plant(&mut faulty);
        assert!(difference(&route, 64, &expected(&faulty, &route, Mode::Exact), &right).is_some(), "{name}");
    }
}
