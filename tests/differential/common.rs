//! What the differential tests share: the devices that are present, and the comparison of results.
// Each test executable uses a part of it.
#![allow(dead_code)]

use cuda_std::arch::ArchId;
use kernels_gpu::layout::permute::row_stride;
use megamoe::device::{Buffer, Device, DeviceHandle, Emulator, EmulatorOptions, Gpu};
use megamoe::diff::{Case, Random};
use megamoe::reference::{LayerResult, Mode, Route, math};
use megamoe::{Activation, Error, LayerShape, Order, WeightFormat};
use std::sync::{Arc, LazyLock};

/// Every architecture whose paths a kernel can take.
pub const ARCHS: [ArchId; 3] = [ArchId::Sm80, ArchId::Sm90, ArchId::Sm100];

/// A fresh emulated device. `seed` decides the order of lanes and blocks.
pub fn emulator(arch: ArchId, multiprocessors: u32, seed: u64) -> DeviceHandle {
    Emulator::with_options(EmulatorOptions { arch, multiprocessors, seed })
}

/// The `number`-th of a sequence of emulated devices: all architectures, 1 to 4 multiprocessors, ever new seeds.
pub fn any_emulator(number: usize) -> DeviceHandle {
    emulator(ARCHS[number % 3], 1 + (number / 3 % 4) as u32, number as u64)
}

/// A GPU with a stream of its own, whatever its architecture.
fn open_gpu() -> Option<Arc<Gpu>> {
    match Gpu::new(0) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var("MEGAMOE_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            panic!("a GPU is required: {error}")
        }
        Err(Error::NoGpu(_)) => {
            println!("skipped: no GPU");
            None
        }
        Err(error) => panic!("there is a GPU, but {error}"),
    }
}

/// The bits are those of compute capability 9.0, whose tensor cores the reference models.
fn has_the_bits(gpu: &Arc<Gpu>) -> bool {
    let properties = gpu.properties();
    let same = properties.compute == (9, 0);
    if !same {
        println!("skipped: the bits of {} are not modelled", properties.name);
    }
    same
}

/// A GPU of this caller alone, on whose stream nothing else happens: a capture needs that, and it has nothing prepared yet.
pub fn own_gpu() -> Option<Arc<Gpu>> {
    open_gpu().filter(has_the_bits)
}

/// A GPU whose bits differ from the reference's within the stated bound.
pub fn approximate_gpu() -> Option<DeviceHandle> {
    open_gpu().filter(|gpu| gpu.properties().compute != (9, 0)).map(|gpu| gpu as DeviceHandle)
}

/// The GPU that all tests of an executable share.
pub fn gpu() -> Option<DeviceHandle> {
    static GPU: LazyLock<Option<Arc<Gpu>>> = LazyLock::new(open_gpu);
    match &*GPU {
        Some(gpu) => has_the_bits(gpu).then(|| gpu.clone() as DeviceHandle),
        None => {
            println!("skipped: no GPU");
            None
        }
    }
}

/// An emulator of each architecture, and the GPU where there is one.
pub fn devices() -> Vec<(String, DeviceHandle)> {
    let emulators = (0..3).map(any_emulator).chain(gpu());
    emulators.map(|device| (device.properties().name.clone(), device)).collect()
}

/// `small` for the emulator, `large` for the GPU.
pub fn scale(device: &DeviceHandle, small: usize, large: usize) -> usize {
    if is_emulated(device) { small } else { large }
}

/// Whether `device` is an emulator.
pub fn is_emulated(device: &DeviceHandle) -> bool {
    device.properties().name.starts_with("emulator")
}

/// Where `got` is not `wanted`, if anywhere: bits of the output, then the status.
pub fn difference(shape: &LayerShape, wanted: &LayerResult, got: &LayerResult) -> Option<String> {
    if wanted.out.len() != got.out.len() {
        return Some(format!("{} outputs, not {}", got.out.len(), wanted.out.len()));
    }
    let wrong: Vec<usize> = (0..wanted.out.len()).filter(|&i| wanted.out[i] != got.out[i]).collect();
    if let Some(&i) = wrong.first() {
        let (token, column) = (i / shape.output, i % shape.output);
        let (g, w) = (got.out[i], wanted.out[i]);
        return Some(format!("{} outputs, first token {token}, column {column}: {g:#06x}, not {w:#06x}", wrong.len()));
    }
    (wanted.status != got.status).then(|| format!("{:?}, not {:?}", got.status, wanted.status))
}

/// `got` is `wanted`, bit for bit.
#[track_caller]
pub fn assert_same(what: &str, shape: &LayerShape, wanted: &LayerResult, got: &LayerResult) {
    if let Some(difference) = difference(shape, wanted, got) {
        panic!("{what}, {shape:?}: {difference}");
    }
}

/// `device` gives the reference's bits for `case`.
#[track_caller]
pub fn check(case: &Case, device: &DeviceHandle) {
    let wanted = case.run(Mode::Exact).unwrap();
    let got = case.run_on(device).unwrap();
    assert_same(&device.properties().name, &case.shape, &wanted, &got);
}

/// What each back end gives for `case`: the reference, every emulator and the GPU, by name.
pub fn everywhere(case: &Case) -> Vec<(String, LayerResult)> {
    let reference = ("reference".to_owned(), case.run(Mode::Exact).unwrap());
    let others = devices().into_iter().map(|(name, device)| {
        let result = case.run_on(&device).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, result)
    });
    std::iter::once(reference).chain(others).collect()
}

/// The argument that an error names.
#[track_caller]
pub fn argument_of(error: &Error) -> &'static str {
    match error {
        Error::Argument { name, .. } | Error::BufferLength { name, .. } | Error::Experts { name, .. } => name,
        other => panic!("an error that names no argument: {other}"),
    }
}

/// A routing table on a device, made by hand.
pub struct Table {
    pub entry_count: Buffer<u32>,
    pub entries: Buffer<u32>,
    pub slots: Buffer<u32>,
}

impl Table {
    /// The entries of `route`, two neighbours of an expert in one where `groups` is 2, in the order that `seed` gives: no kernel may
    /// depend on it.
    pub fn new(device: &DeviceHandle, case: &Case, route: &Route, groups: usize, seed: u64) -> Self {
        let of_expert = route.entries().chunk_by(|a, b| a.expert == b.expert);
        let mut order: Vec<(usize, Vec<i32>)> = of_expert
            .flat_map(|entries| entries.chunks(groups))
            .map(|entries| {
                let mut pairs: Vec<i32> = entries.iter().flat_map(|entry| entry.pairs).collect();
                pairs.resize(8 * groups, -1);
                (entries[0].expert as usize, pairs)
            })
            .collect();
        let mut random = Random(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, random.next() as usize % (i + 1));
        }
        let (mut entries, mut slots) = (vec![], vec![]);
        for (expert, pairs) in &order {
            let expert = *expert;
            let count = pairs.iter().filter(|&&pair| pair >= 0).count() as u32;
            let [up, gate] = case.alpha1[expert].map(f32::to_bits);
            entries.extend([expert as u32, count, up, gate, case.alpha2[expert].to_bits(), 0, 0, 0]);
            let first = pairs[0] as u32;
            for &pair in pairs {
                let (to_read, weight) = if pair < 0 { (first, 0.0) } else { (pair as u32, case.topk_w[pair as usize]) };
                slots.extend([pair as u32, to_read / case.shape.top_k as u32, weight.to_bits(), to_read]);
            }
        }
        Table {
            entry_count: Buffer::from_slice(device, &[order.len() as u32]).unwrap(),
            entries: Buffer::from_slice(device, &entries).unwrap(),
            slots: Buffer::from_slice(device, &slots).unwrap(),
        }
    }
}

/// Rows of `width` elements in the order of the tensor cores, zeros behind the last.
pub fn in_tensor_order(rows: &[u16], width: usize, order: Order) -> Vec<u16> {
    let stride = row_stride(width);
    let mut out = vec![0; rows.len() / width * stride];
    for (i, &bits) in rows.iter().enumerate() {
        out[i / width * stride + place(i % width, order)] = bits;
    }
    out
}

/// The inverse: rows of `width` elements from rows in the order of the tensor cores.
pub fn from_tensor_order(rows: &[u16], width: usize, order: Order) -> Vec<u16> {
    let stride = row_stride(width);
    rows.chunks(stride).flat_map(|row| (0..width).map(|k| row[place(k, order)])).collect()
}

/// Where element k lies: in seed the middle ones of each four change places, in decode the halves of each eight alternate; and the
/// 4x4 eights of each 128 are transposed.
pub fn place(k: usize, order: Order) -> usize {
    let places = match order {
        Order::Seed { .. } => [0, 2, 1, 3, 4, 6, 5, 7],
        Order::Decode => [0, 2, 4, 6, 1, 3, 5, 7],
    };
    let (chunk, eight) = (k / 128, k / 8 % 16);
    128 * chunk + 8 * (4 * (eight % 4) + eight / 4) + places[k % 8]
}

/// Makes the sums of w13 cancel: the second half of every row repeats the first, and the second half of x is the negative of the
/// first. What is left comes from the order in which terms are added and cut off alone. Needs a hidden size that is a multiple of two
/// blocks of scales.
pub fn cancel_w13(case: &mut Case) {
    let LayerShape { hidden, intermediate, experts, .. } = case.shape;
    let half = hidden / 2;
    for row in case.w13.chunks_mut(hidden / 2) {
        row.copy_within(..half / 2, half / 2);
    }
    let mut random = Random(half as u64);
    for (expert, row) in (0..experts).flat_map(|expert| (0..2 * intermediate).map(move |row| (expert, row))) {
        for block in 0..half / case.block() {
            let byte = match case.options.format {
                WeightFormat::Nvfp4 => 0x10 + (random.next() % 0x40) as u8,
                WeightFormat::Mxfp4 => 122 + (random.next() % 10) as u8,
            };
            case.set_s13(expert, row, block, byte);
            case.set_s13(expert, row, block + half / case.block(), byte);
        }
    }
    for row in case.x.chunks_mut(hidden) {
        for k in 0..half {
            row[k + half] = row[k] ^ 0x8000;
        }
    }
    // The rest is about 2^-24 of the terms.
    match case.options.format {
        WeightFormat::Nvfp4 => case.alpha1.fill([2f32.powi(20), 2f32.powi(20)]),
        WeightFormat::Mxfp4 => {
            case.x.iter_mut().for_each(|x| {
                *x = math::from_f32(Activation::Bf16, math::to_f32(Activation::Bf16, *x) * 2f32.powi(10))
            });
            case.s13.iter_mut().for_each(|byte| *byte = byte.saturating_add(10).min(254));
        }
    }
}
