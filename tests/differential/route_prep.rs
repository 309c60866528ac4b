//! The routing table, the reordered activations and the zeroed padding of `route_prep`, against a model that shares nothing with the
//! kernel.

use crate::common::{ARCHS, emulator, gpu, place};
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::layout::permute::row_stride;
use kernels_gpu::route_prep::{DECODE, SEED, counting_warps, max_entries, route_prep as family, shared_bytes};
use kernels_gpu::status;
use megamoe::Error;
use megamoe::device::{Buffer, DeviceHandle, Grid, launch};
use megamoe::diff::Random;
use megamoe::reference::math;
use megamoe::{Activation, Order, Split, XType};

/// What `route_prep` is given.
#[derive(Clone)]
struct Batch {
    tokens: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    intermediate: usize,
    from: XType,
    to: Activation,
    /// Groups of eight slots of an entry.
    groups: usize,
    order: Order,
    ids: Vec<i32>,
    weights: Vec<f32>,
    alpha1: Vec<f32>,
    alpha2: Vec<f32>,
    x: Vec<u16>,
}

/// What it makes. Whatever lies behind the last entry is left out.
#[derive(Clone, Debug, PartialEq)]
struct Table {
    /// Expert, pairs, bits of alpha1 of up and of gate, bits of alpha2, zeros; by entry.
    entries: Vec<[u32; 8]>,
    /// Pair, token, bits of the weight, pair to read; of slots without a pair only that they have none.
    slots: Vec<[u32; 4]>,
    x: Vec<u16>,
    status: u32,
}

const NO_PAIR: [u32; 4] = [u32::MAX, 0, 0, 0];

impl Batch {
    /// Random ids from -2 to `experts` (so some are too large), weights, alphas, and hidden states of any bits.
    fn new(tokens: usize, top_k: usize, experts: usize, seed: u64) -> Self {
        let (hidden, intermediate) = (48, 16);
        let mut random = Random(seed);
        Batch {
            tokens,
            top_k,
            experts,
            hidden,
            intermediate,
            from: XType::Bf16,
            to: Activation::Bf16,
            groups: 1 + seed as usize % 2,
            order: if (seed / 2).is_multiple_of(2) { Order::Decode } else { Order::Seed { split: Split::S1 } },
            ids: (0..tokens * top_k).map(|_| (random.next() % (experts as u64 + 3)) as i32 - 2).collect(),
            weights: (0..tokens * top_k).map(|_| random.in_range(-2.0, 2.0)).collect(),
            alpha1: (0..2 * experts).map(|_| random.in_range(-1.0, 1.0)).collect(),
            alpha2: (0..experts).map(|_| random.in_range(-1.0, 1.0)).collect(),
            x: (0..tokens * hidden).map(|_| random.next() as u16).collect(),
        }
    }

    /// The table by definition: an expert's pairs in ascending order, cut into entries of eight or sixteen.
    fn expected(&self) -> Table {
        let mut table = Table { entries: vec![], slots: vec![], x: vec![], status: 0 };
        let mut pairs_of = vec![vec![]; self.experts];
        for (pair, &id) in self.ids.iter().enumerate() {
            if id >= self.experts as i32 {
                table.status |= status::BAD_EXPERT_ID;
            } else if id >= 0 {
                pairs_of[id as usize].push(pair);
            }
        }
        for (expert, pairs) in pairs_of.iter().enumerate() {
            for entry in pairs.chunks(8 * self.groups) {
                let [up, gate] = [0, 1].map(|half| self.alpha1[2 * expert + half].to_bits());
                let down = self.alpha2[expert].to_bits();
                table.entries.push([expert as u32, entry.len() as u32, up, gate, down, 0, 0, 0]);
                let slot = |&pair: &usize| {
                    [pair as u32, (pair / self.top_k) as u32, self.weights[pair].to_bits(), pair as u32]
                };
                table.slots.extend((0..8 * self.groups).map(|number| entry.get(number).map_or(NO_PAIR, slot)));
            }
        }
        // A row is filled with zeros.
        let stride = row_stride(self.hidden);
        table.x = vec![0; self.tokens * stride];
        for (i, &bits) in self.x.iter().enumerate() {
            let (token, k) = (i / self.hidden, i % self.hidden);
            let moved = place(k, self.order);
            table.x[token * stride + moved] = self.converted(bits);
            // Of tokens without experts nobody sees the hidden states.
            let live = |&id: &i32| (0..self.experts as i32).contains(&id);
            if self.leaves_range(bits) && self.ids[token * self.top_k..][..self.top_k].iter().any(live) {
                table.status |= status::F16_RANGE;
            }
        }
        table
    }

    fn converted(&self, bits: u16) -> u16 {
        match (self.from, self.to) {
            (XType::Bf16, Activation::F16) => math::from_f32(Activation::F16, math::to_f32(Activation::Bf16, bits)),
            _ => bits,
        }
    }

    fn leaves_range(&self, bits: u16) -> bool {
        let finite = bits & 0x7F80 != 0x7F80;
        self.from == XType::Bf16 && self.to == Activation::F16 && finite && self.converted(bits) & 0x7FFF == 0x7C00
    }

    /// The kernel's table. `extra` rewriting blocks beside the first.
    fn run(&self, device: &DeviceHandle, warps: u32, blocks: u32) -> Result<Table, Error> {
        let kernel: Kernel<family::Family> = match (self.from, self.to) {
            (XType::Bf16, Activation::Bf16) => family::route_prep_bf16_bf16,
            (XType::Bf16, Activation::F16) => family::route_prep_bf16_f16,
            (XType::F16, Activation::F16) => family::route_prep_f16_f16,
            (XType::F16, Activation::Bf16) => unreachable!("there is no such kernel"),
        };
        let pairs = self.tokens * self.top_k;
        let most = max_entries(pairs, self.experts, 8 * self.groups);
        let (x_stride, h_stride) = (row_stride(self.hidden), row_stride(self.intermediate));
        let poisoned = |words: usize| -> Result<Buffer<u32>, Error> {
            let buffer = Buffer::new(device, words)?;
            buffer.fill(0xA5)?;
            Ok(buffer)
        };
        let (entry_count, entries, slots) = (poisoned(1)?, poisoned(8 * most)?, poisoned(8 * 4 * self.groups * most)?);
        let x_permuted = Buffer::from_slice(device, &vec![0xA5A5_u16; self.tokens * x_stride])?;
        let h = Buffer::from_slice(device, &vec![0xA5A5_u16; pairs * h_stride])?;
        let status = Buffer::from_slice(device, &[0u32])?;
        let ids = Buffer::from_slice(device, &self.ids)?;
        let weights = Buffer::from_slice(device, &self.weights)?;
        let alpha1 = Buffer::from_slice(device, &self.alpha1)?;
        let alpha2 = Buffer::from_slice(device, &self.alpha2)?;
        let x = Buffer::from_slice(device, &self.x)?;
        let grid = Grid { blocks, shared_bytes: shared_bytes(warps, self.experts as u32) };
        device.prepare(kernel.into(), grid.shared_bytes)?;
        launch(
            &**device,
            kernel,
            grid,
            family::Args {
                topk_ids: ids.as_ref(),
                topk_weights: weights.as_ref(),
                alpha1: alpha1.as_ref(),
                alpha2: alpha2.as_ref(),
                x: x.as_ref(),
                entry_count: entry_count.as_mut(),
                entries: entries.as_mut(),
                slots: slots.as_mut(),
                x_permuted: x_permuted.as_mut(),
                h: h.as_mut(),
                status: status.as_mut(),
                tokens: self.tokens as u32,
                top_k: self.top_k as u32,
                experts: self.experts as u32,
                hidden: self.hidden as u32,
                intermediate: self.intermediate as u32,
                warps,
                groups: self.groups as u32,
                order: if self.order == Order::Decode { DECODE } else { SEED },
            },
        )?;
        // The padding of every row of h is zero, and nothing else of it is touched.
        let mut elements = vec![false; h_stride];
        (0..self.intermediate).for_each(|k| elements[place(k, self.order)] = true);
        for (i, &bits) in h.download()?.iter().enumerate() {
            let wanted = if elements[i % h_stride] { 0xA5A5 } else { 0 };
            assert_eq!(bits, wanted, "element {} of row {} of h", i % h_stride, i / h_stride);
        }
        let count = entry_count.download()?[0] as usize;
        assert!(count <= most, "{count} entries where {most} fit");
        // Behind the last entry nothing is written.
        let (mut entries, mut slots) = (entries.download()?, slots.download()?);
        assert!(
            entries
                .split_off(8 * count)
                .iter()
                .chain(&slots.split_off(32 * self.groups * count))
                .all(|&word| word == 0xA5A5_A5A5)
        );
        let entries = entries.as_chunks().0.to_vec();
        let mut slots: Vec<[u32; 4]> = slots.as_chunks().0.to_vec();
        for (number, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| slot[0] == u32::MAX) {
            // What is read in place of a pair must be there: a token, and a pair of the same expert.
            let entry: &[u32; 8] = &entries[number / (8 * self.groups)];
            assert!((slot[1] as usize) < self.tokens, "{slot:?}");
            assert_eq!(self.ids[slot[3] as usize] as u32, entry[0], "{slot:?}");
            *slot = NO_PAIR;
        }
        Ok(Table { entries, slots, x: x_permuted.download()?, status: status.download()?[0] })
    }

    /// As many warps as a plan would take.
    fn warps(&self, device: &DeviceHandle) -> u32 {
        counting_warps(self.tokens * self.top_k, self.experts, device.properties().shared_per_block)
    }

    #[track_caller]
    fn check(&self, device: &DeviceHandle, warps: u32, blocks: u32) {
        let got = self.run(device, warps, blocks).unwrap_or_else(|error| panic!("{error}"));
        let Batch { tokens, top_k, experts, .. } = self;
        assert_eq!(got, self.expected(), "{tokens} tokens, top {top_k} of {experts}, {warps} warps, {blocks} blocks");
    }
}

#[test]
fn small_tables() {
    let mut devices: Vec<_> = (0..).zip(ARCHS).map(|(seed, arch)| emulator(arch, 2, seed)).collect();
    devices.extend(gpu());
    for (number, (tokens, top_k, experts)) in
        [(1, 1, 1), (1, 32, 5), (3, 2, 4), (9, 8, 3), (40, 1, 2), (33, 3, 160), (6, 32, 1), (64, 4, 17)]
            .into_iter()
            .enumerate()
    {
        let batch = Batch::new(tokens, top_k, experts, number as u64);
        let device = &devices[number % 3];
        batch.check(device, batch.warps(device), 2 + number as u32 % 3);
        devices.iter().skip(3).for_each(|gpu| batch.check(gpu, batch.warps(gpu), 9));
    }
}

/// Counters per thread: none, one and more of 1024 threads own an expert; and more pairs than any block has threads.
#[test]
fn many_experts_and_many_pairs() {
    let device = emulator(cuda_std::arch::ArchId::Sm90, 1, 3);
    for (tokens, top_k, experts) in
        [(7, 8, 1023), (7, 8, 1024), (7, 8, 1025), (40, 8, 2049), (50, 8, 4095), (64, 8, 4096), (600, 8, 12)]
    {
        let mut batch = Batch::new(tokens, top_k, experts, (tokens + experts) as u64);
        // The last expert, and the first, in any case.
        batch.ids[0] = experts as i32 - 1;
        batch.ids[tokens * top_k - 1] = 0;
        batch.check(&device, batch.warps(&device), 2);
        gpu().iter().for_each(|gpu| batch.check(gpu, batch.warps(gpu), 64));
    }
    let Some(gpu) = gpu() else { return };
    for (tokens, top_k, experts) in [(4097, 8, 256), (8192, 32, 4096), (65_536, 8, 384), (100_000, 1, 1)] {
        let batch = Batch::new(tokens, top_k, experts, tokens as u64);
        batch.check(&gpu, batch.warps(&gpu), 200);
    }
}

/// The table does not depend on how many warps share the counting.
#[test]
fn any_number_of_counting_warps() {
    let batch = Batch::new(30, 6, 9, 11);
    for warps in [1, 2, 3, 5, 8, 31, 32] {
        batch.check(&emulator(cuda_std::arch::ArchId::Sm90, 1, u64::from(warps)), warps, 2);
    }
}

#[test]
fn all_on_one_expert_none_at_all_and_duplicates() {
    let device = emulator(cuda_std::arch::ArchId::Sm80, 1, 5);
    for id in [0, 6, -1, i32::MIN, 7, i32::MAX] {
        let mut batch = Batch::new(21, 3, 7, 1);
        batch.ids.fill(id);
        batch.check(&device, batch.warps(&device), 2);
        // An id of E or more is remarked, one below 0 is not.
        assert_eq!(batch.expected().status, if id >= 7 { status::BAD_EXPERT_ID } else { 0 });
    }
}

/// Rows with and without padding, and every way to convert every value.
#[test]
fn activations_are_reordered_and_converted() {
    let device = emulator(cuda_std::arch::ArchId::Sm100, 2, 8);
    for (number, (from, to)) in
        [(XType::Bf16, Activation::Bf16), (XType::Bf16, Activation::F16), (XType::F16, Activation::F16)]
            .into_iter()
            .enumerate()
    {
        for (hidden, intermediate) in [(16, 16), (112, 128), (128, 144), (144, 320), (272, 48)] {
            let base = Batch::new(3, 2, 4, number as u64);
            let mut random = Random(hidden as u64);
            let x = (0..3 * hidden).map(|_| random.next() as u16).collect();
            let batch = Batch { hidden, intermediate, from, to, x, ..base };
            batch.check(&device, 1, 2);
            gpu().iter().for_each(|gpu| batch.check(gpu, 1, 5));
        }
        // All 65,536 values, NaN and subnormal ones among them.
        let x = (0..=u16::MAX).collect();
        let batch = Batch { hidden: 4096, from, to, x, ..Batch::new(16, 1, 2, 4) };
        batch.check(&device, 1, 4);
        gpu().iter().for_each(|gpu| batch.check(gpu, 1, 4));
    }
}

/// A finite value that becomes infinite in f16 sets the status, where an expert sees it; an infinity or a NaN does not.
#[test]
fn the_range_of_f16() {
    let device = emulator(cuda_std::arch::ArchId::Sm90, 1, 2);
    let range = status::F16_RANGE;
    // 65280 and 65536, infinity, NaN.
    for (bits, status) in [(0x477F, 0), (0x4780, range), (0xC780, range), (0x7F80, 0), (0x7FC0, 0)] {
        let mut batch = Batch { to: Activation::F16, ..Batch::new(2, 2, 2, 4) };
        batch.ids = vec![0, 0, -1, 1];
        batch.x.fill(0x3F80);
        batch.x[70] = bits;
        assert_eq!(batch.run(&device, 1, 2).unwrap().status, status, "{bits:#06x}");
        batch.ids = vec![0, 0, -1, -5];
        assert_eq!(batch.run(&device, 1, 2).unwrap().status, 0, "{bits:#06x} of a token without experts");
    }
}

/// Each part of the comparison can fail.
#[test]
fn planted_faults_are_caught() {
    let device = emulator(cuda_std::arch::ArchId::Sm90, 1, 2);
    let batch = Batch::new(20, 3, 4, 9);
    let right = batch.run(&device, 2, 2).unwrap();
    assert_eq!(right, batch.expected());
    type Plant = fn(&mut Batch);
    let faults: [(&str, Plant); 7] = [
        ("two pairs in another order", |batch| {
            let first = batch.ids.iter().position(|&id| id == 1).unwrap();
            let second = first + 1 + batch.ids[first + 1..].iter().position(|&id| id == 2).unwrap();
            batch.ids.swap(first, second);
        }),
        ("a pair skipped", |batch| {
            let last = batch.ids.iter().rposition(|&id| (0..4).contains(&id)).unwrap();
            batch.ids[last] = -1;
        }),
        ("a bad id unseen", |batch| batch.ids.iter_mut().filter(|id| **id == 4).for_each(|id| *id = -1)),
        ("halves of alpha1 swapped", |batch| batch.alpha1.swap(2, 3)),
        ("alpha2 of a neighbour", |batch| batch.alpha2.swap(0, 1)),
        ("weights shifted by one", |batch| batch.weights.rotate_left(1)),
        ("elements 1 and 2 not exchanged", |batch| batch.x.swap(1, 2)),
    ];
    for (name, plant) in faults {
        let mut faulty = batch.clone();
        plant(&mut faulty);
        assert_ne!(right, faulty.expected(), "{name}");
    }
}

/// A null buffer is a fault of the emulator, not a crash.
#[test]
fn a_missing_buffer_is_reported() {
    let device = emulator(cuda_std::arch::ArchId::Sm90, 1, 2);
    let word = Buffer::from_slice(&device, &[0u32; 32]).unwrap();
    let (x, h) = (Buffer::new(&device, 256).unwrap(), Buffer::new(&device, 256).unwrap());
    let result = launch(
        &*device,
        family::route_prep_bf16_bf16,
        Grid { blocks: 2, shared_bytes: shared_bytes(1, 1) },
        family::Args {
            topk_ids: DeviceRef::null(),
            topk_weights: DeviceRef::null(),
            alpha1: DeviceRef::null(),
            alpha2: DeviceRef::null(),
            x: DeviceRef::null(),
            entry_count: word.as_mut(),
            entries: word.as_mut(),
            slots: word.as_mut(),
            x_permuted: x.as_mut(),
            h: h.as_mut(),
            status: word.as_mut(),
            tokens: 1,
            top_k: 1,
            experts: 1,
            hidden: 16,
            intermediate: 16,
            warps: 1,
            groups: 1,
            order: SEED,
        },
    );
    let Err(Error::Fault(message)) = result else { panic!("{result:?}") };
    assert!(message.contains("route_prep_bf16_bf16"), "{message}");
}
