//! Warp operations, `ldmatrix`, asynchronous copies and stores give what the instructions give.
#![cfg(not(target_arch = "nvptx64"))]
#![allow(missing_docs)]

use cuda_std::arch::ArchId;
use cuda_std::emu::{Device, Launch};
use cuda_std::kernel::Family;
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::sync::{sync_threads, sync_warp};
use cuda_std::thread::{block_dim, block_idx, grid_dim, lane, thread_idx, warp};
use cuda_std::{copy, warp as lanes};
use std::collections::HashSet;
use std::sync::Mutex;
use std::thread::ThreadId;

kernels! {
    pub mod operations(input: In<u32>, output: Out<u32>);
    shuffles[32, 1] = |_A| shuffle;
    votes[32, 1] = |_A| vote;
    matrices[32, 1] = |_A| matrix;
    copies[32, 1] = |_A| copy_kinds;
    indices[96, 1] = |_A| index;
    blocks[32, 1] = |_A| slow;
    orders[256, 1] = |_A| order;
}

kernels! {
    pub mod floats(input: In<f32>, output: Out<f32>, seen: Out<u32>);
    nan[32, 1] = |_A| store_nan;
}

/// Row `row` of the output, one element a lane.
fn put(output: Out<u32>, row: usize, value: u32) {
    output.store(row * 32 + lane() as usize, value);
}

fn shuffle(input: In<u32>, output: Out<u32>) {
    let value = input.load(lane() as usize);
    for (row, by) in [0, 1, 5, 31, 32, 33, lane()].into_iter().enumerate() {
        put(output, 4 * row, lanes::shfl(value, by));
        put(output, 4 * row + 1, lanes::shfl_xor(value, by % 32));
        put(output, 4 * row + 2, lanes::shfl_down(value, by % 32));
        put(output, 4 * row + 3, lanes::shfl_up(value, by % 32));
    }
}

fn vote(input: In<u32>, output: Out<u32>) {
    let value = input.load(lane() as usize);
    put(output, 0, lanes::ballot(value.is_multiple_of(3)));
    put(output, 1, u32::from(lanes::any(value == 7)) + 2 * u32::from(lanes::any(value == 1000)));
    put(output, 2, u32::from(lanes::all(value < 100)) + 2 * u32::from(lanes::all(value != 7)));
    put(output, 3, lanes::match_any(value % 5));
    put(output, 4, lanes::sum(value.wrapping_mul(0x2000_0001)));
    put(output, 5, lanes::max(value ^ 0x8000_0000));
    put(output, 6, lanes::min(value ^ 0x8000_0000));
    put(output, 7, lanes::inclusive_scan(value));
}

fn matrix(_: In<u32>, output: Out<u32>) {
    let shared = Shared::<u16>::at(64, 4 * 8 * 24);
    for i in 0..24 {
        shared.store(lane() * 24 + i, (lane() * 24 + i) as u16);
    }
    sync_warp();
    // Row r of matrix j, with a pitch of 24 elements and the rows in reverse.
    let row = 31 - lane();
    let got = shared.ldmatrix_x4(row * 24 + lane() / 8 % 2 * 8);
    for (j, word) in got.into_iter().enumerate() {
        put(output, j, word);
    }
}

fn copy_kinds(input: In<u32>, output: Out<u32>) {
    let shared = Shared::<u32>::at(0, 32 * 8);
    let at = lane() * 8;
    for i in 0..8 {
        shared.store(at + i, 0xAAAA_AAAA);
    }
    copy::async16_zfill(shared, at, input, 4 * (lane() as usize % 8), lane() % 17);
    copy::async8_zfill(shared, at + 4, input, 2 * lane() as usize, lane() % 9);
    copy::commit();
    copy::async4_zfill(shared, at + 6, input, lane() as usize, lane() % 2 * 4);
    copy::commit();
    copy::wait::<0>();
    for i in 0..8 {
        put(output, i as usize, shared.load(at + i));
    }
}

fn index(_: In<u32>, output: Out<u32>) {
    let at = (block_idx() * block_dim() + thread_idx()) as usize;
    output.store(at, (grid_dim() << 24) + (block_idx() << 16) + (warp() << 8) + lane());
}

/// The order in which lanes come, which the seed decides.
fn order(_: In<u32>, output: Out<u32>) {
    let shared = Shared::<u32>::at(0, 256);
    shared.store(thread_idx(), thread_idx());
    sync_threads();
    let mut sum = 0;
    for i in 0..256 {
        sum += shared.load(i) * (i ^ thread_idx());
    }
    output.store(thread_idx() as usize, sum);
}

fn store_nan(input: In<f32>, output: Out<f32>, seen: Out<u32>) {
    let shared = Shared::<f32>::at(0, 32);
    let value = input.load(lane() as usize);
    output.store(lane() as usize, value);
    shared.store(lane(), value);
    seen.store(lane() as usize, Shared::<u32>::at(0, 32).load(lane()));
}

fn run(kernel: cuda_std::kernel::Kernel<operations::Family>, grid: u32, input: &[u32], output: usize) -> Vec<u32> {
    let mut results = ArchId::ALL.into_iter().zip(0..).map(|(arch, seed)| {
        let device = Device::new();
        let input = device.upload(input);
        let mut output = device.alloc(output * 4);
        let launch = Launch { device: &device, grid, threads: kernel.threads, shared_bytes: 8192, arch, seed };
        let args = operations::Args { input: input.as_ref(), output: output.as_mut() };
        (kernel.emulate)(&launch, operations::Family::pack(args).as_slice()).unwrap_or_else(|fault| panic!("{fault}"));
        output.download::<u32>().expect("every element is written")
    });
    let first = results.next().expect("several");
    assert!(results.all(|result| result == first), "the seed changes nothing");
    first
}

#[test]
fn shuffles_move_values() {
    let input: Vec<u32> = (0..32).map(|i| i * i + 100).collect();
    let output = run(operations::shuffles, 1, &input, 7 * 4 * 32);
    for lane in 0..32usize {
        for (row, by) in [0, 1, 5, 31, 32, 33, lane].into_iter().enumerate() {
            let got = |form: usize| output[(4 * row + form) * 32 + lane];
            let small = by % 32;
            assert_eq!(got(0), input[small], "lane {lane} by {by}");
            assert_eq!(got(1), input[lane ^ small], "lane {lane} by {by}");
            assert_eq!(got(2), input[if lane + small < 32 { lane + small } else { lane }], "lane {lane} by {by}");
            assert_eq!(got(3), input[if lane >= small { lane - small } else { lane }], "lane {lane} by {by}");
        }
    }
}

#[test]
fn votes_and_reductions() {
    let input: Vec<u32> = (0..32).map(|i| (i * 13 + 5) % 32).collect();
    let output = run(operations::votes, 1, &input, 8 * 32);
    let bits = |holds: &dyn Fn(u32) -> bool| -> u32 { (0..32).map(|i| u32::from(holds(input[i])) << i).sum() };
    let mut scan = 0;
    for lane in 0..32 {
        scan += input[lane];
        let expected = [
            bits(&|value| value % 3 == 0),
            1,
            1,
            bits(&|value| value % 5 == input[lane] % 5),
            input.iter().fold(0, |sum, value| value.wrapping_mul(0x2000_0001).wrapping_add(sum)),
            31 ^ 0x8000_0000,
            0x8000_0000,
            scan,
        ];
        for (row, value) in expected.into_iter().enumerate() {
            assert_eq!(output[row * 32 + lane], value, "row {row} lane {lane}");
        }
    }
}

#[test]
fn ldmatrix_distributes_rows() {
    let output = run(operations::matrices, 1, &[0], 4 * 32);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for j in 0..4 {
            let start = (31 - (8 * j + g)) * 24 + j % 2 * 8;
            let element = |i: usize| (start + 2 * t + i) as u32;
            assert_eq!(output[j * 32 + lane], element(0) | element(1) << 16, "matrix {j} lane {lane}");
        }
    }
}

#[test]
fn copies_fill_with_zeros() {
    let input: Vec<u32> = (0..64u32).map(|i| 0x0101_0101u32.wrapping_mul(i + 1)).collect();
    let bytes: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
    let output = run(operations::copies, 1, &input, 8 * 32);
    for lane in 0..32 {
        let mut expected = [0xAA; 32];
        let mut copy = |to: usize, size: usize, from: usize, count: usize| {
            expected[to..to + size].fill(0);
            expected[to..to + count].copy_from_slice(&bytes[from..from + count]);
        };
        copy(0, 16, lane % 8 * 16, lane % 17);
        copy(16, 8, lane * 8, lane % 9);
        copy(24, 4, lane * 4, lane % 2 * 4);
        for (i, word) in expected.chunks(4).enumerate() {
            assert_eq!(output[i * 32 + lane].to_le_bytes(), *word, "word {i} lane {lane}");
        }
    }
}

#[test]
fn every_thread_of_every_block_runs_once() {
    let output = run(operations::indices, 200, &[0], 200 * 96);
    for (at, value) in output.into_iter().enumerate() {
        let (block, thread) = (at as u32 / 96, at as u32 % 96);
        assert_eq!(value, (200 << 24) + (block << 16) + ((thread / 32) << 8) + thread % 32);
    }
}

/// Threads that ran a block of `slow`, with the launch's tag.
static RAN: Mutex<Vec<(u32, ThreadId)>> = Mutex::new(Vec::new());

/// Leaves others time to take up the next block.
fn slow(input: In<u32>, _: Out<u32>) {
    let tag = input.load(0);
    if thread_idx() == 0 {
        RAN.lock().expect("nobody panics").push((tag, std::thread::current().id()));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A thread of the pool that waited for the others would meanwhile begin other work of its pool, perhaps a launch of the
/// device that its caller has locked.
#[test]
fn a_launch_on_a_thread_of_the_pool_stays_there() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().expect("threads");
    let threads = |tag| {
        let ran = RAN.lock().expect("nobody panics");
        let of_launch: Vec<_> = ran.iter().filter(|(other, _)| *other == tag).collect();
        assert_eq!(of_launch.len(), ArchId::ALL.len() * 16, "every block of every set of paths");
        of_launch.iter().map(|(_, thread)| *thread).collect::<HashSet<_>>()
    };
    let inside = pool.install(|| {
        run(operations::blocks, 16, &[1], 0);
        std::thread::current().id()
    });
    assert_eq!(threads(1), HashSet::from([inside]));
    run(operations::blocks, 16, &[2], 0);
    assert!(!threads(2).contains(&std::thread::current().id()), "elsewhere it is the pool that runs blocks");
}

#[test]
fn the_seed_does_not_change_a_correct_kernel() {
    let output = run(operations::orders, 1, &[0], 256);
    let sum: u32 = (0..256).map(|i| i * (i ^ 77)).sum();
    assert_eq!(output[77], sum);
}

#[test]
fn stores_of_f32_have_one_nan() {
    let device = Device::new();
    let values: Vec<f32> = (0..32)
        .map(|i| f32::from_bits([0x7FC0_0000, 0xFFC0_0001, 0x7F80_0001, 0x3F80_0000, 0x8000_0000][i % 5]))
        .collect();
    let input = device.upload(&values);
    let (mut output, mut seen) = (device.alloc(128), device.alloc(128));
    let kernel = floats::nan;
    let launch = Launch { device: &device, grid: 1, threads: 32, shared_bytes: 128, arch: ArchId::default(), seed: 3 };
    let args = floats::Args { input: input.as_ref(), output: output.as_mut(), seen: seen.as_mut() };
    (kernel.emulate)(&launch, floats::Family::pack(args).as_slice()).expect("correct");
    let expected: Vec<u32> =
        values.iter().map(|value| if value.is_nan() { 0x7FFF_FFFF } else { value.to_bits() }).collect();
    assert_eq!(output.download::<u32>().as_ref(), Ok(&expected));
    assert_eq!(seen.download::<u32>().as_ref(), Ok(&expected));
}
