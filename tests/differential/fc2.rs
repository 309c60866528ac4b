//! FC2 on tables made by hand, against the reference's weighted results, every bit of the f32.

use crate::common::{Table, any_emulator, gpu, in_tensor_order};
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::dequant::{Mxfp4, Nvfp4};
use kernels_gpu::fc2::{fc2 as family, shared_bytes};
use megamoe::device::{Buffer, DeviceHandle, Grid, launch};
use megamoe::diff::{Case, Family, Random, draw_in};
use megamoe::plan::{Fc2Warps, Tile, Variant};
use megamoe::reference::{Mode, Route, fc2, math, route_prep};
use megamoe::{Activation, LayerOptions, LayerShape, Order, Split, WeightFormat};

const UNTOUCHED: u32 = 0xA5A5_A5A5;

/// The kernels of a format: those of seed by their warps, those of decode by their tiles.
const KERNELS: usize = 7;

fn kernel(weights: WeightFormat, activation: Activation, number: usize) -> (Kernel<family::Family>, Order, Variant) {
    // MXFP4 has one of seed.
    let number = if weights == WeightFormat::Mxfp4 && number < 4 { 2 } else { number };
    let (order, variant, name) = if number < 4 {
        let variant = Variant { fc2_warps: Fc2Warps::ALL[number], ..Variant::tiles(Tile::Rows16, Tile::Rows16) };
        (Order::Seed { split: Split::S4 }, variant, format!("warps{}", variant.fc2_warps.count()))
    } else {
        let tile = Tile::OF_EXPERTS[number - 4];
        (Order::Decode, Variant::tiles(tile, tile), tile.name().to_owned())
    };
    let weights = if weights == WeightFormat::Mxfp4 { "mxfp4_" } else { "" };
    let format = if activation == Activation::Bf16 { "bf16" } else { "f16" };
    let name = format!("fc2_{}_{weights}{format}_{name}", order.name());
    (*family::KERNELS.iter().find(|kernel| kernel.name == name).unwrap(), order, variant)
}

/// A case and its h.
struct Work {
    case: Case,
    h: Vec<u16>,
    route: Route,
}

impl Work {
    /// h is random, with few special values where the family has some.
    fn new(family: Family, shape: LayerShape, tokens: usize, activation: Activation, seed: u64) -> Self {
        Work::new_in(WeightFormat::Nvfp4, family, shape, tokens, activation, seed)
    }

    fn new_in(
        format: WeightFormat,
        family: Family,
        shape: LayerShape,
        tokens: usize,
        activation: Activation,
        seed: u64,
    ) -> Self {
        let mut case = draw_in(format, family, shape, tokens, seed);
        case.options.activation = activation;
        let route = route_prep(&case.topk_ids, shape.top_k, shape.experts).unwrap();
        let mut random = Random(seed);
        let special = matches!(family, Family::Special);
        let h = (0..route.pairs() * shape.intermediate)
            .map(|_| match random.next() % 256 {
                0 if special => 0x7FFF,
                1 if special => 0x7C00,
                2 => 0x8000,
                3 => 0x0003,
                _ => {
                    math::from_f32(activation, random.in_range(-1.0, 1.0) * 2f32.powi((random.next() % 12) as i32 - 8))
                }
            })
            .collect();
        Work { case, h, route }
    }

    fn expected(&self, mode: Mode, number: usize) -> Vec<u32> {
        let Work { case, h, route } = self;
        let (_, order, _) = kernel(case.options.format, case.options.activation, number);
        let y = fc2(&case.view(), &LayerOptions { order, ..case.options }, h, &case.topk_w, route, mode).unwrap();
        let live = |i: usize| route.expert_of(i / case.shape.output).is_some();
        y.iter().enumerate().map(|(i, y)| if live(i) { y.to_bits() } else { UNTOUCHED }).collect()
    }

    fn run(&self, device: &DeviceHandle, number: usize, blocks: u32, seed: u64) -> Vec<u32> {
        let Work { case, h, route } = self;
        let LayerShape { intermediate, output, .. } = case.shape;
        let (kernel, order, variant) = kernel(case.options.format, case.options.activation, number);
        let (warps, tiles, groups) = match variant.fc2 {
            Tile::Rows16 | Tile::Direct => (variant.fc2_warps.count(), 1, 1),
            Tile::Rows32 => (4, 2, 1),
            Tile::Wide => (4, 2, 2),
        };
        let table = Table::new(device, case, route, groups, seed);
        let h = Buffer::from_slice(device, &in_tensor_order(h, intermediate, order)).unwrap();
        let w2 = Buffer::from_slice(device, &case.w2).unwrap();
        let s2 = Buffer::from_slice(device, &case.s2).unwrap();
        // 64 elements behind the last row must stay as they are.
        let y = Buffer::from_slice(device, &vec![f32::from_bits(UNTOUCHED); route.pairs() * output + 64]).unwrap();
        let b2 = case.b2.as_ref().map(|b2| Buffer::from_slice(device, b2).unwrap());
        let shared_bytes = match case.options.format {
            WeightFormat::Nvfp4 => shared_bytes::<Nvfp4>(warps, tiles),
            WeightFormat::Mxfp4 => shared_bytes::<Mxfp4>(warps, tiles),
        };
        let grid = Grid { blocks, shared_bytes };
        device.prepare(kernel.into(), grid.shared_bytes).unwrap();
        let args = family::Args {
            entry_count: table.entry_count.as_ref(),
            entries: table.entries.as_ref(),
            slots: table.slots.as_ref(),
            h: h.as_ref(),
            w2: w2.as_ref(),
            s2: s2.as_ref(),
            b2: b2.as_ref().map_or(DeviceRef::null(), Buffer::as_ref),
            y: y.as_mut(),
            intermediate: intermediate as u32,
            output: output as u32,
        };
        launch(&**device, kernel, grid, args).unwrap();
        let mut y: Vec<u32> = y.download().unwrap().iter().map(|y| y.to_bits()).collect();
        assert!(y.split_off(route.pairs() * output).iter().all(|&bits| bits == UNTOUCHED));
        y
    }

    #[track_caller]
    fn check(&self, device: &DeviceHandle, number: usize, blocks: u32, seed: u64) {
        let (wanted, got) = (self.expected(Mode::Exact, number), self.run(device, number, blocks, seed));
        if let Some(i) = (0..wanted.len()).find(|&i| wanted[i] != got[i]) {
            let (pair, row) = (i / self.case.shape.output, i % self.case.shape.output);
            let (got, wanted) = (got[i], wanted[i]);
            panic!("{:?}, kernel {number}, pair {pair}, row {row}: {got:#010x}, not {wanted:#010x}", self.case.shape);
        }
    }
}

const SIZES: [(usize, usize); 11] = [
    (16, 1),
    (16, 17),
    (48, 100),
    (80, 16),
    (96, 33),
    (128, 128),
    (160, 144),
    (272, 20),
    (320, 7),
    (704, 40),
    (1856, 15),
];

#[test]
fn every_kernel_at_every_size() {
    let mut turn = 0;
    for activation in [Activation::Bf16, Activation::F16] {
        for number in 0..KERNELS {
            for (intermediate, output) in SIZES {
                let shape = LayerShape { hidden: 16, intermediate, output, experts: 3, top_k: 2 };
                let work = Work::new(Family::ALL[turn % 7], shape, 5, activation, turn as u64);
                work.check(&any_emulator(turn), number, 1 + turn as u32 % 7, turn as u64);
                gpu().iter().for_each(|gpu| work.check(gpu, number, 1 + turn as u32 * 37 % 500, turn as u64));
                turn += 1;
            }
        }
    }
}

const MXFP4_SIZES: [(usize, usize); 10] =
    [(32, 1), (32, 17), (64, 100), (96, 33), (128, 128), (160, 144), (288, 20), (320, 7), (704, 40), (1888, 15)];

/// The MXFP4 kernels at every size, with and without biases. The kernel takes any scale with f16 activations too.
#[test]
fn every_mxfp4_kernel_at_every_size() {
    let mut turn = 0;
    for activation in [Activation::Bf16, Activation::F16] {
        for (intermediate, output) in MXFP4_SIZES.into_iter().chain(MXFP4_SIZES) {
            let shape = LayerShape { hidden: 32, intermediate, output, experts: 3, top_k: 2 };
            let family = Family::ALL[turn % 7];
            let mut work = Work::new_in(WeightFormat::Mxfp4, family, shape, 5, activation, turn as u64);
            if turn % 3 != 0 {
                work.case.add_biases(turn as u64);
            }
            let number = 3 + turn % 4;
            work.check(&any_emulator(turn), number, 1 + turn as u32 % 7, turn as u64);
            gpu().iter().for_each(|gpu| work.check(gpu, number, 1 + turn as u32 * 37 % 500, turn as u64));
            turn += 1;
        }
    }
}

/// NVFP4 experts with biases.
#[test]
fn biases_with_nvfp4() {
    for (turn, (intermediate, output)) in SIZES.into_iter().chain(SIZES).enumerate() {
        let shape = LayerShape { hidden: 16, intermediate, output, experts: 3, top_k: 2 };
        let activation = [Activation::Bf16, Activation::F16][turn / 11];
        let mut work = Work::new(Family::ALL[turn % 7], shape, 5, activation, turn as u64);
        work.case.add_biases(turn as u64);
        let number = turn % KERNELS;
        work.check(&any_emulator(turn), number, 1 + turn as u32 % 7, turn as u64);
        gpu().iter().for_each(|gpu| work.check(gpu, number, 1 + turn as u32 * 37 % 500, turn as u64));
    }
}

/// With a bias the weight comes last: (alpha2·y + b)·w, and not (alpha2·w)·y + b·w, nor without the rounding in between.
#[test]
fn the_weight_of_a_pair_comes_after_its_bias() {
    let shape = LayerShape { hidden: 16, intermediate: 16, output: 64, experts: 1, top_k: 1 };
    let mut work = Work::new(Family::OneExpert, shape, 8, Activation::Bf16, 3);
    work.case.add_biases(5);
    work.case.options.activation = Activation::Bf16;
    let right = work.run(&any_emulator(2), 2, 1, 0);
    assert_eq!(right, work.expected(Mode::Exact, 2));
    let mut plain = Work { case: work.case.clone(), h: work.h.clone(), route: work.route.clone() };
    (plain.case.b2, plain.case.alpha2, plain.case.topk_w) = (None, vec![1.0], vec![1.0; 8]);
    let y = plain.expected(Mode::Exact, 2);
    let (alpha, b2) = (work.case.alpha2[0], work.case.b2.clone().unwrap());
    type Way = fn(f32, f32, f32, f32) -> f32;
    let ways: [Way; 4] = [
        |alpha, y, b, w| (alpha * y + b) * w,
        |alpha, y, b, w| (alpha * w) * y + b * w,
        |alpha, y, b, w| alpha.mul_add(y, b) * w,
        |alpha, y, b, w| alpha * (y + b) * w,
    ];
    for (i, way) in ways.into_iter().enumerate() {
        let got = |at: usize| way(alpha, f32::from_bits(y[at]), b2[at % 64], work.case.topk_w[at / 64]).to_bits();
        let same = (0..y.len()).filter(|&at| got(at) == right[at]).count();
        assert_eq!(same == y.len(), i == 0, "way {i}: {same} of {}", y.len());
    }
}

/// More than one full entry of an expert, the number of blocks, and no entry at all.
#[test]
fn any_grid() {
    let shape = LayerShape { hidden: 16, intermediate: 272, output: 160, experts: 2, top_k: 3 };
    let mut work = Work::new(Family::OneExpert, shape, 9, Activation::F16, 3);
    for (blocks, number) in [(1, 3), (2, 0), (17, 1), (100, 2), (1, 4), (3, 5), (50, 6), (5, 6)] {
        work.check(&any_emulator(blocks as usize), number, blocks, 4);
    }
    work.route = route_prep(&[-1; 27], 3, 2).unwrap();
    work.check(&any_emulator(1), 6, 3, 4);
}

/// alpha2 and the weight are multiplied first: their product can be 0 or infinite where the result would not be.
#[test]
fn scale_of_a_slot_comes_from_the_table() {
    let shape = LayerShape { hidden: 16, intermediate: 16, output: 8, experts: 1, top_k: 1 };
    let mut work = Work::new(Family::OneExpert, shape, 2, Activation::Bf16, 3);
    work.case.alpha2.fill(2f32.powi(-100));
    work.case.topk_w.fill(2f32.powi(-100));
    work.check(&any_emulator(2), 5, 1, 0);
    assert!(work.expected(Mode::Exact, 5).iter().all(|&bits| bits << 1 == 0));
}

/// Sums of many terms: any other order of terms gives other bits.
#[test]
fn planted_faults_are_caught() {
    let shape = LayerShape { hidden: 16, intermediate: 528, output: 48, experts: 2, top_k: 2 };
    let work = Work::new(Family::Random, shape, 6, Activation::F16, 5);
    let right = work.run(&any_emulator(3), 5, 3, 0);
    assert_eq!(right, work.expected(Mode::Exact, 5));
    let plain = work.expected(Mode::Fast, 5);
    let other = right.iter().zip(&plain).filter(|(a, b)| a != b).count();
    assert!(other * 4 > right.len(), "{other} of {}", right.len());
    type Plant = fn(&mut Work);
    let faults: [(&str, Plant); 5] = [
        ("nibbles swapped", |work| work.case.w2.iter_mut().for_each(|byte| *byte = byte.rotate_left(4))),
        ("the last column dropped", |work| work.h.iter_mut().skip(527).step_by(528).for_each(|h| *h = 0)),
        ("rows shifted by one", |work| work.case.w2.rotate_left(264)),
        ("scales of a neighbour", |work| work.case.s2.rotate_left(1)),
        ("a pair too few", |work| {
            let last = work.case.topk_ids.iter().rposition(|&id| id >= 0).unwrap();
            work.case.topk_ids[last] = -1;
            work.route = route_prep(&work.case.topk_ids, 2, 2).unwrap();
        }),
    ];
    for (name, plant) in faults {
        let mut faulty = Work { case: work.case.clone(), h: work.h.clone(), route: work.route.clone() };
        plant(&mut faulty);
        assert_ne!(faulty.expected(Mode::Exact, 5), right, "{name}");
    }
}
