//! FC1 with SwiGLU on tables made by hand, against the reference's h, bit for bit.

use crate::common::{Table, any_emulator, cancel_w13, from_tensor_order, gpu, in_tensor_order};
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::dequant::{Mxfp4, Nvfp4};
use kernels_gpu::fc1::{SILU, SWIGLU_OAI, fc1 as family, shared_bytes};
use kernels_gpu::layout::permute::row_stride;
use kernels_gpu::status;
use megamoe::device::{Buffer, DeviceHandle, Grid, launch};
use megamoe::diff::{Case, Family, Random, draw};
use megamoe::reference::{Mode, Route, convert_x, fc1, math, route_prep};
use megamoe::{Activation, Gating, LayerOptions, LayerShape, Order, Split, WeightFormat};

const UNTOUCHED: u16 = 0xA5A5;

fn kernel(weights: WeightFormat, activation: Activation, split: Split) -> Kernel<family::Family> {
    let weights = if weights == WeightFormat::Mxfp4 { "mxfp4_" } else { "" };
    let format = if activation == Activation::Bf16 { "bf16" } else { "f16" };
    let name = format!("fc1_seed_{weights}{format}_split{}", split.count());
    *family::KERNELS.iter().find(|kernel| kernel.name == name).unwrap()
}

/// h [pairs, I] and the status.
fn expected(case: &Case, route: &Route, mode: Mode) -> (Vec<u16>, u32) {
    let (x, _) = convert_x(&case.inputs(), &case.shape, case.options.activation, route).unwrap();
    let (h, overflow) = fc1(&case.view(), &case.options, &x, route, mode).unwrap();
    (h, if overflow { status::F16_RANGE } else { 0 })
}

/// The kernel's h, with `UNTOUCHED` where it wrote nothing, and the status.
fn run(case: &Case, route: &Route, device: &DeviceHandle, blocks: u32, seed: u64) -> (Vec<u16>, u32) {
    let LayerShape { hidden, intermediate, .. } = case.shape;
    let LayerOptions { format, activation, order: Order::Seed { split }, gating } = case.options;
    let (x, _) = convert_x(&case.inputs(), &case.shape, activation, route).unwrap();
    let table = Table::new(device, case, route, seed);
    let x = Buffer::from_slice(device, &in_tensor_order(&x, hidden)).unwrap();
    let w13 = Buffer::from_slice(device, &case.w13).unwrap();
    let s13 = Buffer::from_slice(device, &case.s13).unwrap();
    let b13 = case.b13.as_ref().map(|b13| Buffer::from_slice(device, b13).unwrap());
    let stride = row_stride(intermediate);
    let h = Buffer::from_slice(device, &vec![UNTOUCHED; route.pairs() * stride]).unwrap();
    let status = Buffer::from_slice(device, &[0u32]).unwrap();
    let kernel = kernel(format, activation, split);
    let split = split.count() as u32;
    let shared_bytes = match format {
        WeightFormat::Nvfp4 => shared_bytes::<Nvfp4>(split),
        WeightFormat::Mxfp4 => shared_bytes::<Mxfp4>(split),
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
    for row in h.chunks(stride) {
        assert!(row[intermediate..].iter().all(|&bits| bits == UNTOUCHED));
    }
    (from_tensor_order(&h, intermediate), status.download().unwrap()[0])
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
fn check(case: &Case, device: &DeviceHandle, blocks: u32, seed: u64) {
    let route = route_prep(&case.topk_ids, case.shape.top_k, case.shape.experts).unwrap();
    let wanted = expected(case, &route, Mode::Exact);
    let got = run(case, &route, device, blocks, seed);
    if let Some(difference) = difference(&route, case.shape.intermediate, &wanted, &got) {
        panic!("{:?}, {:?}, {blocks} blocks: {difference}", case.shape, case.options);
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
        for split in Split::ALL {
            for (hidden, intermediate) in SIZES {
                let shape = LayerShape { hidden, intermediate, output: 1, experts: 3, top_k: 2 };
                let mut case = draw(Family::ALL[turn % 7], shape, 5, turn as u64);
                let gating = Gating::Silu { limit: (turn % 5 == 0).then_some(0.75) };
                case.options = LayerOptions { activation, order: Order::Seed { split }, gating, ..case.options };
                check(&case, &any_emulator(turn), 1 + turn as u32 % 7, turn as u64);
                gpu().iter().for_each(|gpu| check(&case, gpu, 1 + turn as u32 * 37 % 500, turn as u64));
                turn += 1;
            }
        }
    }
}

/// Sums of which nothing but the roundings remains: any other order of terms gives entirely other bits.
#[test]
fn sums_that_cancel() {
    for (turn, hidden) in [32, 96, 256, 288, 544, 1056, 2880].into_iter().enumerate() {
        for activation in [Activation::Bf16, Activation::F16] {
            for split in Split::ALL {
                let shape = LayerShape { hidden, intermediate: 16, output: 1, experts: 2, top_k: 1 };
                let mut case = draw(Family::Random, shape, 6, turn as u64);
                cancel_w13(&mut case);
                case.options = LayerOptions { activation, order: Order::Seed { split }, ..case.options };
                check(&case, &any_emulator(turn + split.count()), 2, 1);
                gpu().iter().for_each(|gpu| check(&case, gpu, 64, 1));
            }
        }
    }
}

/// And so a comparison of cancelling sums notices other splits and plain sums, at almost every element.
#[test]
fn another_order_of_sums_is_caught() {
    let shape = LayerShape { hidden: 2880, intermediate: 32, output: 1, experts: 2, top_k: 1 };
    let mut case = draw(Family::Random, shape, 6, 3);
    cancel_w13(&mut case);
    case.topk_ids.fill(1);
    let route = route_prep(&case.topk_ids, 1, 2).unwrap();
    let mut results = vec![expected(&case, &route, Mode::Fast).0];
    for split in Split::ALL {
        case.options.order = Order::Seed { split };
        results.push(expected(&case, &route, Mode::Exact).0);
    }
    for (i, a) in results.iter().enumerate() {
        for b in &results[..i] {
            let other = a.iter().zip(b).filter(|(a, b)| a != b).count();
            assert!(other * 2 > a.len(), "{other} of {}", a.len());
        }
    }
}

/// Without entries nothing is written, and one block or very many make no difference.
#[test]
fn any_grid() {
    let shape = LayerShape { hidden: 272, intermediate: 144, output: 1, experts: 3, top_k: 2 };
    let mut case = draw(Family::Random, shape, 9, 3);
    for blocks in [1, 2, 17, 200] {
        check(&case, &any_emulator(blocks as usize), blocks, 4);
    }
    case.topk_ids.fill(-1);
    check(&case, &any_emulator(1), 3, 4);
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
        let (h, _) = run(&case, &route, &any_emulator(1), 2, 0);
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
    let right = run(&case, &route, &any_emulator(1), 2, 0);
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
            check(&case, &device, 5, 0);
            let (h, _) = run(&case, &route, &device, 3, 0);
            for (&(gate, up), row) in pairs.iter().zip(h.chunks(16)) {
                assert_eq!(row[0], math::from_f32(activation, ways[0](gate, up)), "{activation:?}: {gate}, {up}");
            }
        }
    }
}
