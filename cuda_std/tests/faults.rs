//! Kernels with a planted fault, and their corrected twins. Each fault must be caught under every seed and every set of
//! paths, with the kernel, the block, the thread and the line; no twin may be reported.
//!
//! A line is named by the comment `fault: NAME` on it, `other: NAME` marks the other party's.
#![cfg(not(target_arch = "nvptx64"))]
#![allow(missing_docs)]

use cuda_std::arch::{Arch, ArchId};
use cuda_std::emu::{Allocation, Device, Fault, FaultKind, Launch, MemoryError};
use cuda_std::kernel::{DeviceMut, DeviceRef, Family, Kernel};
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16, m16n8k16};
use cuda_std::shared::Shared;
use cuda_std::sync::{converge, sync_named, sync_threads, sync_warp};
use cuda_std::thread::{block_idx, lane, thread_idx, warp};
use cuda_std::{copy, dependent, kernels, warp as lanes};

/// Elements of `input` and of `output`.
const LEN: u32 = 64;
/// Bytes of shared memory.
const SHARED: u32 = 1024;

kernels! {
    pub mod case(input: In<u32>, output: Out<u32>, status: Out<u32>);
    global_load_bad[64, 1] = |_A| global_load::<true>;
    global_load_ok[64, 1] = |_A| global_load::<false>;
    global_store_bad[64, 1] = |_A| global_store::<true>;
    global_store_ok[64, 1] = |_A| global_store::<false>;
    shared_end_bad[64, 1] = |_A| shared_end::<true>;
    shared_end_ok[64, 1] = |_A| shared_end::<false>;
    shared_view_bad[64, 1] = |_A| shared_view::<true>;
    shared_view_ok[64, 1] = |_A| shared_view::<false>;
    copy_view_bad[32, 1] = |_A| copy_view::<true>;
    copy_view_ok[32, 1] = |_A| copy_view::<false>;
    misaligned_bad[32, 1] = |_A| misaligned::<true>;
    misaligned_ok[32, 1] = |_A| misaligned::<false>;
    shared_uninitialised_bad[64, 1] = |_A| shared_uninitialised::<true>;
    shared_uninitialised_ok[64, 1] = |_A| shared_uninitialised::<false>;
    copy_input[64, 1] = |_A| copy_to_output;
    block_barrier_bad[64, 1] = |_A| block_barrier::<true>;
    block_barrier_ok[64, 1] = |_A| block_barrier::<false>;
    warp_barrier_bad[32, 1] = |_A| warp_barrier::<true>;
    warp_barrier_ok[32, 1] = |_A| warp_barrier::<false>;
    global_barrier_bad[64, 1] = |_A| global_barrier::<true>;
    global_barrier_ok[64, 1] = |_A| global_barrier::<false>;
    matrix_barrier_bad[32, 1] = |_A| matrix_barrier::<true>;
    matrix_barrier_ok[32, 1] = |_A| matrix_barrier::<false>;
    broadcast_bad[128, 1] = |_A| broadcast::<true>;
    broadcast_ok[128, 1] = |_A| broadcast::<false>;
    halves_bad[64, 1] = |_A| halves::<true>;
    halves_ok[64, 1] = |_A| halves::<false>;
    copy_wait_bad[32, 1] = |_A| copy_wait::<true>;
    copy_wait_ok[32, 1] = |_A| copy_wait::<false>;
    copy_groups_bad[32, 1] = |_A| copy_groups::<1>;
    copy_groups_ok[32, 1] = |_A| copy_groups::<0>;
    copy_barrier_bad[32, 1] = |_A| copy_barrier::<true>;
    copy_barrier_ok[32, 1] = |_A| copy_barrier::<false>;
    copy_refill_bad[32, 1] = |_A| copy_refill::<true>;
    copy_refill_ok[32, 1] = |_A| copy_refill::<false>;
    copy_unwaited[32, 1] = |_A| copy_never_waited_for;
    barrier_lanes_bad[64, 1] = |_A| barrier_lanes::<true>;
    barrier_lanes_ok[64, 1] = |_A| barrier_lanes::<false>;
    barrier_exit_bad[64, 1] = |_A| barrier_exit::<true>;
    barrier_exit_ok[64, 1] = |_A| barrier_exit::<false>;
    barrier_lines_bad[64, 1] = |_A| barrier_lines::<true>;
    barrier_lines_ok[64, 1] = |_A| barrier_lines::<false>;
    barrier_warp_bad[64, 1] = |_A| barrier_warp::<true>;
    barrier_warp_ok[64, 1] = |_A| barrier_warp::<false>;
    named_count_bad[64, 1] = |_A| named_count::<true>;
    named_count_ok[64, 1] = |_A| named_count::<false>;
    named_short_bad[128, 1] = |_A| named_short::<true>;
    named_short_ok[128, 1] = |_A| named_short::<false>;
    named_groups_bad[128, 1] = |_A| named_groups::<true>;
    named_groups_ok[128, 1] = |_A| named_groups::<false>;
    named_id_bad[32, 1] = |_A| named_id::<true>;
    named_id_ok[32, 1] = |_A| named_id::<false>;
    mma_types_bad[32, 1] = |_A| mma_types::<true>;
    mma_types_ok[32, 1] = |_A| mma_types::<false>;
    mma_lanes_bad[32, 1] = |_A| mma_lanes::<true>;
    mma_lanes_ok[32, 1] = |_A| mma_lanes::<false>;
    shuffle_lines_bad[32, 1] = |_A| shuffle_lines::<true>;
    shuffle_lines_ok[32, 1] = |_A| shuffle_lines::<false>;
    spin_bad[64, 1] = |_A| spin::<true>;
    spin_ok[64, 1] = |_A| spin::<false>;
    blocks_write_bad[32, 1] = |_A| blocks_write::<true>;
    blocks_write_ok[32, 1] = |_A| blocks_write::<false>;
    blocks_read_bad[32, 1] = |_A| blocks_read::<true>;
    blocks_read_ok[32, 1] = |_A| blocks_read::<false>;
    blocks_atomic_bad[32, 1] = |_A| blocks_atomic::<true>;
    blocks_atomic_ok[32, 1] = |_A| blocks_atomic::<false>;
    panics_bad[64, 1] = |_A| panics::<true>;
    panics_ok[64, 1] = |_A| panics::<false>;
    overflow_bad[64, 1] = |_A| overflow::<true>;
    overflow_ok[64, 1] = |_A| overflow::<false>;
    one_block_bad[32, 1] = |_A| one_block::<true>;
    one_block_ok[32, 1] = |_A| one_block::<false>;
    stream[32, 1] = |_A| stream_input;
    load_alias[32, 1] = |_A| load_alias_of_output;
    null_probe[32, 1] = |_A| null_input;
    paths[32, 1] = |A| arch_paths::<A>;
}

kernels! {
    pub mod chain(constant: In<u32>, from: In<u32>, to: Out<u32>);
    produce[64, 1] = |A| produces::<A>;
    follow[64, 1, early] = |A| follows::<A>;
    hasty[64, 1, early] = |A| is_hasty::<A>;
    eager[64, 1, early] = |A| reads_early::<A>;
    eager_copy[64, 1, early] = |A| copies_early::<A>;
    eager_store[64, 1, early] = |A| stores_early::<A>;
    eager_atomic[64, 1, early] = |A| atomic_early::<A>;
    deserter[64, 1, early] = |A| deserts::<A>;
}

/// Index of the thread in the grid.
fn of_grid() -> usize {
    (block_idx() * 64 + thread_idx()) as usize
}

/// Not early: its writes come after it has let the next kernel start.
fn produces<A: Arch>(constant: In<u32>, _: In<u32>, to: Out<u32>) {
    dependent::launch_dependents::<A>();
    let value = constant.load(of_grid());
    to.store(of_grid(), value); // other: produce
}

fn follows<A: Arch>(constant: In<u32>, from: In<u32>, to: Out<u32>) {
    let early = constant.load(of_grid());
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    to.store(of_grid(), early + from.load(of_grid()));
}

fn is_hasty<A: Arch>(constant: In<u32>, from: In<u32>, to: Out<u32>) {
    let early = constant.load(of_grid());
    dependent::launch_dependents::<A>(); // cause: hasty
    dependent::wait::<A>();
    to.store(of_grid(), early + from.load(of_grid()));
}

fn reads_early<A: Arch>(constant: In<u32>, from: In<u32>, to: Out<u32>) {
    let early = from.load(of_grid()); // fault: eager
    dependent::wait::<A>();
    to.store(of_grid(), early + constant.load(of_grid()));
}

fn copies_early<A: Arch>(_: In<u32>, from: In<u32>, to: Out<u32>) {
    let shared = Shared::<u32>::at(0, 64);
    copy::async4_zfill(shared, thread_idx(), from, of_grid(), 4); // fault: eager_copy
    copy::commit();
    dependent::wait::<A>();
    copy::wait::<0>();
    to.store(of_grid(), shared.load(thread_idx()));
}

fn stores_early<A: Arch>(_: In<u32>, _: In<u32>, to: Out<u32>) {
    to.store(of_grid(), 1); // fault: eager_store
    dependent::wait::<A>();
}

fn atomic_early<A: Arch>(_: In<u32>, _: In<u32>, to: Out<u32>) {
    to.atomic_or(of_grid(), 1); // fault: eager_atomic
    dependent::wait::<A>();
}

fn deserts<A: Arch>(_: In<u32>, _: In<u32>, to: Out<u32>) {
    if t() != 7 {
        dependent::wait::<A>();
        to.store(of_grid(), 1);
    }
}

fn t() -> usize {
    thread_idx() as usize
}

fn global_load<const FAULTY: bool>(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let index = if FAULTY { t() + 1 } else { t() };
    let value = input.load(index); // fault: global_load
    output.store(t(), value);
}

fn global_store<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let index = if FAULTY && t() == 5 { usize::MAX / 4 } else { t() };
    output.store(index, 1); // fault: global_store
}

fn shared_end<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let base = if FAULTY { SHARED - 252 } else { SHARED - 256 };
    let shared = Shared::<u32>::at(base, LEN);
    shared.store(thread_idx(), 1); // fault: shared_end
    output.store(t(), shared.load(thread_idx()));
}

fn shared_view<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let view = Shared::<u32>::at(0, if FAULTY { 40 } else { LEN });
    view.store(thread_idx(), 1); // fault: shared_view
    output.store(t(), view.load(thread_idx()));
}

fn copy_view<const FAULTY: bool>(input: In<u32>, _: Out<u32>, _: Out<u32>) {
    let view = Shared::<u32>::at(0, if FAULTY { 30 } else { 32 });
    if lane() < 8 {
        copy::async16(view, lane() * 4, input, 0); // fault: copy_view
    }
}

fn misaligned<const FAULTY: bool>(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let index = if FAULTY && t() == 3 { 6 } else { 4 };
    let value = input.load_v4(index); // fault: misaligned
    output.store(t(), value[0]);
}

fn shared_uninitialised<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, LEN);
    if !FAULTY || t() != 40 {
        shared.store(thread_idx(), 1);
    }
    sync_threads();
    output.store(t(), shared.load(thread_idx() ^ 1)); // fault: shared_uninitialised
}

fn copy_to_output(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let value = input.load(t()); // fault: copy_input
    output.store(t(), value);
}

fn block_barrier<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, LEN);
    shared.store(thread_idx(), 0);
    sync_threads();
    shared.store(thread_idx(), thread_idx()); // other: block_barrier
    if !FAULTY {
        sync_threads();
    } else {
        sync_warp();
    }
    output.store(t(), shared.load((thread_idx() + 32) % 64)); // fault: block_barrier
}

/// What lanes exchange by shuffles and votes orders no memory.
fn warp_barrier<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, LEN);
    shared.store(lane(), 0);
    sync_warp();
    shared.store(lane(), lane()); // other: warp_barrier
    if !FAULTY {
        sync_warp();
    }
    converge();
    let next = lanes::shfl(lane() + 1, lane()) % 32;
    output.store(t(), shared.load(next)); // fault: warp_barrier
}

fn global_barrier<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    output.store(t(), 1); // other: global_barrier
    if !FAULTY {
        sync_threads();
    }
    if t() == 0 {
        let mut sum = 0;
        for i in [0, 63] {
            sum += output.load(i); // fault: global_barrier
        }
        output.store(0, sum);
    }
}

fn matrix_barrier<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u16>::at(0, 256);
    let words = Shared::<u32>::at(0, 128);
    words.store_v4(lane() * 4, [0; 4]);
    sync_warp();
    words.store_v4(lane() * 4, [lane(); 4]); // other: matrix_barrier
    if !FAULTY {
        sync_warp();
    }
    let got = shared.ldmatrix_x4(lane() * 8); // fault: matrix_barrier
    output.store(t(), got[0]);
}

/// Every warp reads a word; then one lane writes it.
fn broadcast<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, LEN);
    if t() == 0 {
        shared.store(3, 7);
    }
    sync_threads();
    let value = shared.load(3); // fault: broadcast
    if !FAULTY {
        sync_threads();
    }
    if t() == 64 {
        shared.store(3, 8); // other: broadcast
    }
    if t() < 64 {
        output.store(t(), value);
    }
}

/// Neighbours write the two halves of a word: no race, unless one writes the whole.
fn halves<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u16>::at(0, 64);
    let bytes = Shared::<u8>::at(128, 64);
    if FAULTY && t() == 9 {
        Shared::<u32>::at(0, 32).store(4, 0); // fault: halves
    } else {
        shared.store(thread_idx(), thread_idx() as u16); // other: halves
    }
    bytes.store(thread_idx(), thread_idx() as u8);
    sync_threads();
    let whole = Shared::<u32>::at(0, 32).load(thread_idx() / 2);
    output.store(t(), whole + u32::from(bytes.load(63 - thread_idx())));
}

fn copy_wait<const FAULTY: bool>(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, 128);
    copy::async8_zfill(shared, lane() * 2, input, t() * 2, 8); // other: copy_wait
    copy::commit();
    if !FAULTY {
        copy::wait::<0>();
    }
    output.store(t(), shared.load(lane() * 2)); // fault: copy_wait
}

fn copy_groups<const PENDING: u32>(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, 128);
    copy::async4_zfill(shared, lane(), input, t(), 4);
    copy::commit();
    copy::async4_zfill(shared, 32 + lane(), input, t(), 4); // other: copy_groups
    copy::commit();
    copy::wait::<PENDING>();
    let first = shared.load(lane());
    output.store(t(), first + shared.load(32 + lane())); // fault: copy_groups
}

/// The wait is for the issuing lane alone: others need a barrier.
fn copy_barrier<const FAULTY: bool>(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, 128);
    copy::async4_zfill(shared, lane(), input, t(), 4); // other: copy_barrier
    copy::commit();
    copy::wait::<0>();
    if !FAULTY || lane() == 40 {
        sync_warp();
    }
    let own = shared.load(lane());
    converge();
    output.store(t(), own + shared.load(lane() ^ 1)); // fault: copy_barrier
}

/// A ring of one stage: nothing may be copied into it before all lanes have read it.
fn copy_refill<const FAULTY: bool>(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, 128);
    let mut sum = 0;
    for _ in 0..3 {
        copy::async4_zfill(shared, lane(), input, t(), 4); // fault: copy_refill
        copy::commit();
        copy::wait::<0>();
        sync_warp();
        sum += shared.load(lane() ^ 1); // other: copy_refill
        if !FAULTY {
            sync_warp();
        }
    }
    output.store(t(), sum);
}

fn copy_never_waited_for(input: In<u32>, _: Out<u32>, _: Out<u32>) {
    copy::async4_zfill(Shared::<u32>::at(0, 128), lane(), input, t(), 4);
}

fn barrier_lanes<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if !FAULTY || thread_idx() < 48 {
        sync_threads(); // fault: barrier_lanes
    }
}

fn barrier_exit<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if FAULTY && warp() == 1 {
        return;
    }
    sync_threads(); // fault: barrier_exit
}

#[allow(clippy::if_same_then_else)]
fn barrier_lines<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if FAULTY && warp() == 1 {
        sync_threads(); // fault: barrier_lines
    } else {
        sync_threads(); // other: barrier_lines
    }
}

fn barrier_warp<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if FAULTY && lane() < 7 {
        sync_threads(); // fault: barrier_warp
    }
    sync_warp(); // other: barrier_warp
}

fn named_count<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if FAULTY && warp() == 1 {
        sync_named(3, 32); // fault: named_count
    } else {
        sync_named(3, 64); // other: named_count
    }
}

fn named_short<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if !FAULTY || warp() < 3 {
        sync_named(2, 128); // fault: named_short
    }
}

/// Two groups of two warps, each with its own barrier, over several rounds.
fn named_groups<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let shared = Shared::<u32>::at(0, 128);
    shared.store(thread_idx(), 0);
    sync_threads();
    let group = warp() / 2;
    let mut sum = 0;
    for round in 0..4 {
        shared.store(thread_idx(), round); // other: named_groups
        sync_named(1 + group, 64);
        let from = if FAULTY { thread_idx() ^ 64 } else { thread_idx() ^ 32 };
        sum += shared.load(from); // fault: named_groups
        sync_named(1 + group, 64);
    }
    sync_threads();
    if t() < 64 {
        output.store(t(), sum);
    }
}

fn named_id<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    sync_named(if FAULTY { 16 } else { 15 }, 32); // fault: named_id
}

fn mma_types<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if FAULTY && lane() >= 20 {
        m16n8k16::<F16>([0; 4], [0; 2], [0.0; 4]); // fault: mma_types
    } else {
        m16n8k16::<Bf16>([0; 4], [0; 2], [0.0; 4]); // other: mma_types
    }
}

fn mma_lanes<const FAULTY: bool>(_: In<u32>, _: Out<u32>, _: Out<u32>) {
    if !FAULTY || lane() != 13 {
        m16n8k16::<F16>([0; 4], [0; 2], [0.0; 4]); // fault: mma_lanes
    }
}

#[allow(clippy::if_same_then_else)]
fn shuffle_lines<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let value = if FAULTY && lane() % 2 == 1 {
        lanes::shfl(lane(), 3) // fault: shuffle_lines
    } else {
        lanes::shfl(lane(), 3) // other: shuffle_lines
    };
    output.store(t(), value);
}

fn spin<const FAULTY: bool>(_: In<u32>, output: Out<u32>, status: Out<u32>) {
    output.store(t(), 0);
    if t() == 33 {
        let mut polls = 0;
        while FAULTY || polls < 10_000 {
            polls += status.load(0) + 1; // fault: spin
        }
    }
    sync_threads();
}

fn blocks_write<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    if lane() == 4 {
        output.store(if FAULTY { 9 } else { block_idx() as usize }, 1); // fault: blocks_write
    }
}

/// Block b writes element b; reading a neighbour's is a race.
fn blocks_read<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    if lane() == 0 {
        let own = block_idx() as usize;
        output.store(own, 1); // other: blocks_read
        output.store(32 + own, output.load(if FAULTY { (own + 1) % 8 } else { own })); // fault: blocks_read
    }
}

fn blocks_atomic<const FAULTY: bool>(_: In<u32>, output: Out<u32>, status: Out<u32>) {
    status.atomic_or(0, 1 << lane()); // other: blocks_atomic
    if FAULTY && lane() == 0 {
        output.store(block_idx() as usize, status.load(0)); // fault: blocks_atomic
    }
}

fn panics<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let table = [1u32; 50];
    let index = if FAULTY { t() } else { t() % 50 };
    output.store(t(), table[index]); // fault: panics
}

fn overflow<const FAULTY: bool>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    let value = if FAULTY { u32::MAX - 50 } else { 0 };
    output.store(t(), value + thread_idx()); // fault: overflow
}

/// Only thread 17 of block 3 is wrong.
fn one_block<const FAULTY: bool>(input: In<u32>, _: Out<u32>, _: Out<u32>) {
    let wrong = FAULTY && block_idx() == 3 && thread_idx() == 17;
    input.load(if wrong { LEN as usize } else { t() }); // fault: one_block
}

fn stream_input(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let value = input.stream_v4(t() / 4 * 4); // fault: stream
    output.store(t(), value[0]);
}

/// The input is the output's second half, which thread 31 also writes.
fn load_alias_of_output(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    let value = input.load(0); // fault: load_alias
    if t() == 31 {
        output.store(32, value); // other: load_alias
    }
}

fn null_input(input: In<u32>, output: Out<u32>, _: Out<u32>) {
    assert!(!output.is_null());
    if !input.is_null() {
        output.store(t(), 1);
    } else if t() == 2 {
        output.store(t(), input.load(0)); // fault: null_probe
    }
}

kernels! {
    pub mod table(addresses: In<u64>, len: u32, output: Out<u32>);
    by_address[64, 1] = |_A| sum_by_address;
}

/// Each entry of a table is a buffer of `len` elements, or none.
fn sum_by_address(addresses: In<u64>, len: u32, output: Out<u32>) {
    let mut sum = 0;
    for entry in 0..2 {
        let input = In::<u32>::at(addresses.load(entry), len as usize); // fault: table_entry
        if !input.is_null() {
            sum += input.stream(t()) + input.stream_v4(t() / 4 * 4)[t() % 4]; // fault: table_read
        }
    }
    output.store(t(), sum);
}

fn arch_paths<A: Arch>(_: In<u32>, output: Out<u32>, _: Out<u32>) {
    output.store(t(), u32::from(A::E4M3_CVT) + 2 * u32::from(A::E2M1_CVT));
}

/// The line that a comment marks.
fn line(mark: &str) -> u32 {
    let mut lines = include_str!("faults.rs").lines().zip(1..).filter(|(line, _)| line.ends_with(mark));
    let (_, number) = lines.next().unwrap_or_else(|| panic!("no line ends with {mark}"));
    assert!(lines.next().is_none(), "several lines end with {mark}");
    number
}

struct Memory {
    device: Device,
    input: Allocation,
    output: Allocation,
    status: Allocation,
}

impl Memory {
    fn new() -> Self {
        let device = Device::new();
        device.set_operation_budget(1_000_000);
        let input = device.upload(&(0..LEN).collect::<Vec<u32>>());
        let output = device.upload(&[0u32; LEN as usize]);
        let status = device.upload(&[0u32]);
        Memory { device, input, output, status }
    }

    fn run(&mut self, kernel: Kernel<case::Family>, grid: u32, seed: u64, arch: ArchId) -> Result<(), Fault> {
        let args =
            case::Args { input: self.input.as_ref(), output: self.output.as_mut(), status: self.status.as_mut() };
        launch(&self.device, kernel, args, grid, seed, arch)
    }
}

fn launch(
    device: &Device,
    kernel: Kernel<case::Family>,
    args: case::Args<'_>,
    grid: u32,
    seed: u64,
    arch: ArchId,
) -> Result<(), Fault> {
    let launch = Launch { device, grid, threads: kernel.threads, shared_bytes: SHARED, arch, seed };
    (kernel.emulate)(&launch, case::Family::pack(args).as_slice())
}

fn every_schedule(mut each: impl FnMut(u64, ArchId)) {
    for seed in 0..8 {
        for arch in ArchId::ALL {
            each(seed, arch);
        }
    }
}

/// The threads that may be the one at fault, and whether there must be another party.
struct Expected<'a> {
    kind: FaultKind,
    mark: &'a str,
    grid: u32,
    threads: &'a [u32],
    other: bool,
}

fn caught(kernel: Kernel<case::Family>, expected: &Expected<'_>) {
    every_schedule(|seed, arch| {
        let fault = Memory::new().run(kernel, expected.grid, seed, arch).expect_err(kernel.name);
        check(&fault, kernel, expected, seed);
    });
}

fn check(fault: &Fault, kernel: Kernel<case::Family>, expected: &Expected<'_>, seed: u64) {
    let context = format!("seed {seed}: {fault}");
    assert_eq!(fault.kind, expected.kind, "{context}");
    assert_eq!(fault.kernel, kernel.name, "{context}");
    let mut parties: Vec<_> = fault.party.iter().collect();
    if expected.other {
        parties.push(fault.other.as_ref().unwrap_or_else(|| panic!("no other party, {context}")));
        assert_ne!(
            (parties[0].block, parties[0].thread),
            (parties[1].block, parties[1].thread),
            "the parties are two threads, {context}"
        );
    }
    let marked = [format!("fault: {}", expected.mark), format!("other: {}", expected.mark)];
    let has_other = include_str!("faults.rs").lines().any(|line| line.ends_with(&marked[1]));
    let lines: Vec<u32> = marked[..1 + usize::from(has_other)].iter().map(|mark| line(mark)).collect();
    for (i, party) in parties.iter().enumerate() {
        assert!(party.block < expected.grid, "{context}");
        match &party.source {
            Some(source) => {
                assert!(source.file.ends_with("faults.rs"), "{context}");
                assert!(lines.contains(&source.line), "line {} is none of {lines:?}, {context}", source.line);
            }
            None => assert!(i == 1, "the party has no line, {context}"),
        }
    }
    assert!(expected.threads.contains(&parties[0].thread), "{context}");
    // What a person reads names it all.
    let text = fault.to_string();
    for part in [kernel.name, "block", "thread", "warp", "lane", "faults.rs:"] {
        assert!(text.contains(part), "no {part} in: {text}");
    }
}

fn passes(kernel: Kernel<case::Family>, grid: u32) {
    every_schedule(|seed, arch| {
        Memory::new().run(kernel, grid, seed, arch).unwrap_or_else(|fault| panic!("seed {seed} {arch:?}: {fault}"));
    });
}

const ALL: &[u32] = &{
    let mut threads = [0; 128];
    let mut i = 0;
    while i < 128 {
        threads[i] = i as u32;
        i += 1;
    }
    threads
};

macro_rules! planted {
    ($($name:ident: $bad:ident, $ok:ident, $kind:ident, $grid:literal, $threads:expr, $other:literal;)+) => {$(
        #[test]
        fn $name() {
            let mark = stringify!($bad).trim_end_matches("_bad");
            let (kind, threads): (_, &[u32]) = (FaultKind::$kind, $threads);
            caught(case::$bad, &Expected { kind, mark, grid: $grid, threads, other: $other });
            passes(case::$ok, $grid);
        }
    )+};
}

planted! {
    global_load_out_of_bounds: global_load_bad, global_load_ok, OutOfBounds, 1, &[63], false;
    global_store_out_of_bounds: global_store_bad, global_store_ok, OutOfBounds, 1, &[5], false;
    beyond_shared_memory: shared_end_bad, shared_end_ok, OutOfBounds, 1, &[63], false;
    beyond_a_view: shared_view_bad, shared_view_ok, OutOfBounds, 1, &ALL[40..64], false;
    copy_beyond_a_view: copy_view_bad, copy_view_ok, OutOfBounds, 1, &[7], false;
    misaligned_vector: misaligned_bad, misaligned_ok, Misaligned, 1, &[3], false;
    uninitialised_shared_read: shared_uninitialised_bad, shared_uninitialised_ok, Uninitialised, 1, &[41], false;
    missing_sync_threads: block_barrier_bad, block_barrier_ok, Race, 1, ALL, true;
    missing_sync_warp: warp_barrier_bad, warp_barrier_ok, Race, 1, ALL, true;
    missing_sync_threads_for_global_memory: global_barrier_bad, global_barrier_ok, Race, 1, ALL, true;
    missing_sync_warp_before_ldmatrix: matrix_barrier_bad, matrix_barrier_ok, Race, 1, ALL, true;
    write_after_reads_of_all_warps: broadcast_bad, broadcast_ok, Race, 1, ALL, true;
    missing_copy_wait: copy_wait_bad, copy_wait_ok, PendingCopy, 1, ALL, false;
    wait_for_too_few_groups: copy_groups_bad, copy_groups_ok, PendingCopy, 1, ALL, false;
    part_of_a_word: halves_bad, halves_ok, Race, 1, &[8, 9], true;
    barrier_for_some_lanes: barrier_lanes_bad, barrier_lanes_ok, DivergentBarrier, 1, ALL, true;
    barrier_without_a_warp: barrier_exit_bad, barrier_exit_ok, DivergentBarrier, 1, ALL, true;
    barriers_at_two_lines: barrier_lines_bad, barrier_lines_ok, DivergentBarrier, 1, ALL, true;
    barrier_and_warp_barrier: barrier_warp_bad, barrier_warp_ok, DivergentBarrier, 1, ALL, true;
    named_barrier_with_two_counts: named_count_bad, named_count_ok, DivergentBarrier, 1, ALL, false;
    named_barrier_that_lacks_a_warp: named_short_bad, named_short_ok, DivergentBarrier, 1, ALL, false;
    named_barriers_order_only_who_meets: named_groups_bad, named_groups_ok, Race, 1, ALL, true;
    named_barrier_out_of_range: named_id_bad, named_id_ok, InvalidArgument, 1, ALL, false;
    lanes_disagree_on_an_mma: mma_types_bad, mma_types_ok, DivergentWarp, 1, ALL, true;
    a_lane_misses_an_mma: mma_lanes_bad, mma_lanes_ok, DivergentWarp, 1, ALL, true;
    shuffles_at_two_lines: shuffle_lines_bad, shuffle_lines_ok, DivergentWarp, 1, ALL, true;
    a_spin_that_never_ends: spin_bad, spin_ok, Hang, 1, &[33], false;
    blocks_write_the_same_element: blocks_write_bad, blocks_write_ok, Race, 8, &[4], true;
    blocks_read_what_another_writes: blocks_read_bad, blocks_read_ok, Race, 8, &[0], true;
    blocks_read_what_others_change_atomically: blocks_atomic_bad, blocks_atomic_ok, Race, 8, ALL, true;
    array_index_out_of_bounds: panics_bad, panics_ok, Panic, 1, &ALL[50..64], false;
    integer_overflow: overflow_bad, overflow_ok, Panic, 1, &ALL[51..64], false;
}

/// Whether it is seen as a race or as a copy in flight depends on who comes first.
fn caught_as_either(kernel: Kernel<case::Family>, mark: &str) {
    let mut seen = std::collections::HashSet::new();
    every_schedule(|seed, arch| {
        let fault = Memory::new().run(kernel, 1, seed, arch).expect_err(kernel.name);
        let kind = if fault.kind == FaultKind::PendingCopy { FaultKind::PendingCopy } else { FaultKind::Race };
        check(&fault, kernel, &Expected { kind, mark, grid: 1, threads: ALL, other: true }, seed);
        seen.insert(kind);
    });
    assert!(!seen.is_empty());
}

#[test]
fn missing_barrier_after_a_copy_wait() {
    caught_as_either(case::copy_barrier_bad, "copy_barrier");
    passes(case::copy_barrier_ok, 1);
}

#[test]
fn copy_into_a_stage_that_is_still_read() {
    caught_as_either(case::copy_refill_bad, "copy_refill");
    passes(case::copy_refill_ok, 1);
}

#[test]
fn a_kernel_may_end_with_copies_in_flight() {
    passes(case::copy_unwaited, 4);
}

#[test]
fn uninitialised_global_read() {
    every_schedule(|seed, arch| {
        let mut memory = Memory::new();
        memory.input = memory.device.alloc(LEN as usize * 4);
        memory.input.upload(0, &[1u32; 37]).expect("in range");
        let fault = memory.run(case::copy_input, 1, seed, arch).expect_err("elements 37 to 63 are uninitialised");
        let expected = Expected {
            kind: FaultKind::Uninitialised,
            mark: "copy_input",
            grid: 1,
            threads: &ALL[37..64],
            other: false,
        };
        check(&fault, case::copy_input, &expected, seed);
        memory.input.fill(0xFF);
        memory.run(case::copy_input, 1, seed, arch).expect("filled memory counts as initialised");
        memory.input.forget();
        memory.run(case::copy_input, 1, seed, arch).expect_err("forgotten memory does not");
    });
}

#[test]
fn the_block_is_named() {
    every_schedule(|seed, arch| {
        let fault = Memory::new().run(case::one_block_bad, 50, seed, arch).expect_err("planted");
        let expected =
            Expected { kind: FaultKind::OutOfBounds, mark: "one_block", grid: 50, threads: &[17], other: false };
        check(&fault, case::one_block_bad, &expected, seed);
        assert_eq!(fault.party.as_ref().map(|party| party.block), Some(3));
    });
    passes(case::one_block_ok, 50);
}

#[test]
fn stream_of_a_buffer_that_the_launch_writes() {
    every_schedule(|seed, arch| {
        let mut memory = Memory::new();
        memory.run(case::stream, 1, seed, arch).expect("another allocation");
        memory.output.fill(0);
        let (status, output) = (memory.status.as_mut(), memory.output.as_mut());
        // SAFETY: the whole of a live allocation, which only this launch uses.
        let input = unsafe { DeviceRef::new(output.address, LEN as usize) };
        let fault = launch(&memory.device, case::stream, case::Args { input, output, status }, 1, seed, arch)
            .expect_err("the output's allocation");
        let expected =
            Expected { kind: FaultKind::StreamOfWritable, mark: "stream", grid: 1, threads: ALL, other: false };
        check(&fault, case::stream, &expected, seed);
        // One allocation, of which the kernel reads one part and writes the other.
        memory.output.fill(0);
        let address = memory.output.address();
        // SAFETY: two parts of a live allocation, which only this launch uses.
        let (input, output) = unsafe { (DeviceRef::new(address, 32), DeviceMut::new(address + 128, 32)) };
        let args = case::Args { input, output, status: memory.status.as_mut() };
        launch(&memory.device, case::stream, args, 1, seed, arch).expect("the parts do not overlap");
    });
}

#[test]
fn buffers_by_address() {
    let run = |device: &Device, entries: [u64; 2], len: u32, output: &mut Allocation, seed, arch| {
        let addresses = device.upload(&entries);
        let args = table::Args { addresses: addresses.as_ref(), len, output: output.as_mut() };
        let launch = Launch { device, grid: 1, threads: 64, shared_bytes: 0, arch, seed };
        (table::by_address.emulate)(&launch, table::Family::pack(args).as_slice())
    };
    every_schedule(|seed, arch| {
        let device = Device::new();
        let input = device.upload(&[7u32; 64]);
        let mut output = device.alloc(256);
        let here = input.address();
        run(&device, [here, 0], 64, &mut output, seed, arch).expect("one entry, and none");
        assert_eq!(output.download::<u32>().unwrap(), [14; 64]);

        let freed = device.alloc(256).address();
        let own = output.address();
        for (entries, len, kind, mark) in [
            ([here, 16], 64, FaultKind::OutOfBounds, "table_entry"),
            ([here, freed], 64, FaultKind::OutOfBounds, "table_entry"),
            ([here, here + 4], 64, FaultKind::OutOfBounds, "table_entry"),
            ([here + 2, 0], 32, FaultKind::Misaligned, "table_entry"),
            ([here, 0], 63, FaultKind::OutOfBounds, "table_read"),
            ([0, own], 64, FaultKind::StreamOfWritable, "table_read"),
        ] {
            let fault = run(&device, entries, len, &mut output, seed, arch).expect_err(mark);
            assert_eq!(fault.kind, kind, "{fault}");
            let source = fault.party.as_ref().and_then(|party| party.source.clone()).expect("a line");
            assert_eq!(source.line, line(mark), "{fault}");
        }
    });
}

#[test]
fn an_input_inside_the_output_takes_part_in_races() {
    every_schedule(|seed, arch| {
        let mut memory = Memory::new();
        memory.output.fill(0);
        let (status, output) = (memory.status.as_mut(), memory.output.as_mut());
        // SAFETY: inside a live allocation, which only this launch uses.
        let input = unsafe { DeviceRef::new(output.address + 128, 32) };
        let fault = launch(&memory.device, case::load_alias, case::Args { input, output, status }, 1, seed, arch)
            .expect_err("one thread writes what all read");
        let expected = Expected { kind: FaultKind::Race, mark: "load_alias", grid: 1, threads: ALL, other: true };
        check(&fault, case::load_alias, &expected, seed);
    });
}

#[test]
fn a_null_buffer_can_be_asked_about_but_not_read() {
    let mut memory = Memory::new();
    let args = case::Args { input: DeviceRef::null(), output: memory.output.as_mut(), status: memory.status.as_mut() };
    let fault = launch(&memory.device, case::null_probe, args, 1, 0, ArchId::Sm90).expect_err("reads a null buffer");
    let expected = Expected { kind: FaultKind::OutOfBounds, mark: "null_probe", grid: 1, threads: &[2], other: false };
    check(&fault, case::null_probe, &expected, 0);
}

#[test]
fn a_sub_buffer_is_bounded_by_its_own_length() {
    let mut memory = Memory::new();
    for (offset, len, fits) in [(0, 64, true), (0, 63, false), (64, 48, false), (4, 63, false)] {
        // SAFETY: inside a live allocation, which only this launch uses.
        let input = unsafe { DeviceRef::new(memory.input.address() + offset, len) };
        let args = case::Args { input, output: memory.output.as_mut(), status: memory.status.as_mut() };
        let result = launch(&memory.device, case::copy_input, args, 1, 0, ArchId::Sm90);
        assert_eq!(result.is_ok(), fits, "{offset} {len}: {result:?}");
        if let Err(fault) = result {
            assert_eq!(fault.kind, FaultKind::OutOfBounds);
        }
    }
}

#[test]
fn launches_with_wrong_arguments_do_not_start() {
    let mut memory = Memory::new();
    let freed = memory.device.alloc(256).address();
    for (address, len, kind) in [
        (freed, 64, FaultKind::OutOfBounds),
        (memory.input.address(), 65, FaultKind::OutOfBounds),
        (memory.input.address() + 2, 4, FaultKind::Misaligned),
        (memory.input.address(), usize::MAX, FaultKind::InvalidArgument),
        (8, 1, FaultKind::OutOfBounds),
    ] {
        // SAFETY: the launch must refuse it, so that nothing is accessed.
        let input = unsafe { DeviceRef::new(address, len) };
        let args = case::Args { input, output: memory.output.as_mut(), status: memory.status.as_mut() };
        let fault = launch(&memory.device, case::copy_input, args, 1, 0, ArchId::Sm90).expect_err("refused");
        assert_eq!((fault.kind, fault.kernel), (kind, "copy_input"), "{fault}");
    }
    for (grid, threads, shared_bytes) in
        [(0, 64, 0), (1, 0, 0), (1, 33, 0), (1, 2048, 0), (1, 64, 300_000), (u32::MAX, 32, 0)]
    {
        let args =
            case::Args { input: memory.input.as_ref(), output: memory.output.as_mut(), status: memory.status.as_mut() };
        let launch = Launch { device: &memory.device, grid, threads, shared_bytes, arch: ArchId::Sm90, seed: 0 };
        let result = (case::copy_input.emulate)(&launch, case::Family::pack(args).as_slice());
        assert_eq!(result.expect_err("refused").kind, FaultKind::InvalidArgument);
    }
}

#[test]
fn the_device_is_usable_after_a_fault() {
    let mut memory = Memory::new();
    memory.run(case::panics_bad, 1, 1, ArchId::Sm80).expect_err("planted");
    memory.run(case::copy_input, 1, 1, ArchId::Sm80).expect("a correct kernel");
    assert_eq!(memory.output.download::<u32>(), Ok((0..LEN).collect()));
}

#[test]
fn downloads_name_the_first_uninitialised_byte() {
    let device = Device::new();
    let mut memory = device.alloc(100);
    let address = memory.address();
    let missing = |offset| Some(MemoryError::Uninitialised { address, len: 100, offset });
    assert_eq!(memory.download::<u32>().err(), missing(0));
    memory.upload(0, &[1u8; 70]).expect("in range");
    assert_eq!(memory.download::<u32>().err(), missing(70));
    assert_eq!(memory.download_raw::<u8>()[69..71], [1, 0xFF]);
    memory.upload(71, &[2u8; 29]).expect("in range");
    assert_eq!(memory.download::<u8>().err(), missing(70));
    memory.upload(70, &[3u8]).expect("in range");
    assert_eq!(memory.download::<u8>().expect("complete").len(), 100);
    memory.upload(72, &[0u64; 4]).expect_err("beyond the end");
}

#[test]
fn each_architecture_takes_its_paths() {
    for (arch, paths) in [(ArchId::Sm80, 0), (ArchId::Sm90, 1), (ArchId::Sm100, 3), (ArchId::Sm120, 3)] {
        let mut memory = Memory::new();
        memory.output.fill(0);
        memory.run(case::paths, 1, 0, arch).expect("correct");
        assert_eq!(memory.output.download::<u32>().expect("filled")[..32], [paths; 32]);
    }
}

/// Three buffers of two blocks' elements, launches of [`chain`] on them, and constants from the host.
struct Chain {
    device: Device,
    constant: Allocation,
    buffers: [Allocation; 4],
    seed: u64,
    arch: ArchId,
}

impl Chain {
    fn new(seed: u64, arch: ArchId) -> Self {
        let device = Device::new();
        let constant = device.upload(&(0..128u32).collect::<Vec<_>>());
        let buffers = std::array::from_fn(|_| device.upload(&[0u32; 128]));
        Chain { device, constant, buffers, seed, arch }
    }

    fn run(&mut self, kernel: Kernel<chain::Family>, from: usize, to: usize) -> Result<(), Fault> {
        let Chain { device, constant, buffers, seed, arch } = self;
        let [from, to] = buffers.get_disjoint_mut([from, to]).expect("two buffers");
        let args = chain::Args { constant: constant.as_ref(), from: from.as_ref(), to: to.as_mut() };
        let launch =
            Launch { device, grid: 2, threads: kernel.threads, shared_bytes: SHARED, arch: *arch, seed: *seed };
        (kernel.emulate)(&launch, chain::Family::pack(args).as_slice())
    }
}

/// Runs `last` after `first`; where kernels start early, it must be caught at its mark, else it must pass.
fn caught_in_chain(
    first: &[(Kernel<chain::Family>, usize, usize)],
    last: (Kernel<chain::Family>, usize, usize),
    kind: FaultKind,
    mark: &str,
    names: &[&str],
) {
    every_schedule(|seed, arch| {
        let mut chain = Chain::new(seed, arch);
        for &(kernel, from, to) in first {
            chain.run(kernel, from, to).unwrap_or_else(|fault| panic!("seed {seed} {arch:?}: {fault}"));
        }
        let result = chain.run(last.0, last.1, last.2);
        if arch == ArchId::Sm80 {
            return result.unwrap_or_else(|fault| panic!("kernels start in turn: {fault}"));
        }
        let fault = result.expect_err(mark);
        assert_eq!((fault.kind, fault.kernel), (kind, last.0.name), "{fault}");
        if kind == FaultKind::EarlyAccess {
            let source = fault.party.as_ref().and_then(|party| party.source.as_ref()).expect("a line");
            assert_eq!(source.line, line(&format!("fault: {mark}")), "{fault}");
        }
        let text = fault.to_string();
        for name in names {
            assert!(text.contains(name), "no {name} in: {text}");
        }
    });
}

#[test]
fn a_read_before_the_wait_of_what_the_kernel_ahead_writes() {
    let other = format!("faults.rs:{}", line("other: produce"));
    let names = ["`produce`", &other];
    for (kernel, mark) in [(chain::eager, "eager"), (chain::eager_copy, "eager_copy")] {
        caught_in_chain(&[(chain::produce, 1, 0)], (kernel, 0, 1), FaultKind::EarlyAccess, mark, &names);
    }
    // The reader's own output in the same page changes nothing, and neither does an early kernel that is ahead.
    let first = [(chain::produce, 1, 0), (chain::follow, 0, 2)];
    caught_in_chain(&first, (chain::eager, 2, 1), FaultKind::EarlyAccess, "eager", &["`follow`"]);
}

#[test]
fn a_middle_kernel_that_lets_the_next_start_before_its_wait() {
    let cause = format!("faults.rs:{}", line("cause: hasty"));
    let names = ["`produce`", "`hasty`", &cause];
    let first = [(chain::produce, 1, 0), (chain::hasty, 0, 2)];
    caught_in_chain(&first, (chain::eager, 0, 3), FaultKind::EarlyAccess, "eager", &names);
    // Two such kernels: three launches may run at once.
    let first = [(chain::produce, 1, 0), (chain::hasty, 0, 2), (chain::hasty, 0, 3)];
    caught_in_chain(&first, (chain::eager, 0, 1), FaultKind::EarlyAccess, "eager", &names);
    // Also where the middle kernel has written the page since: the launch ahead of it may still write there.
    let first = [(chain::produce, 1, 0), (chain::hasty, 2, 0)];
    caught_in_chain(&first, (chain::eager, 0, 1), FaultKind::EarlyAccess, "eager", &["`hasty`"]);
}

#[test]
fn a_write_before_the_wait() {
    for (kernel, mark) in [(chain::eager_store, "eager_store"), (chain::eager_atomic, "eager_atomic")] {
        caught_in_chain(&[], (kernel, 0, 1), FaultKind::EarlyAccess, mark, &["faults.rs:"]);
        caught_in_chain(&[(chain::produce, 1, 0)], (kernel, 0, 1), FaultKind::EarlyAccess, mark, &["faults.rs:"]);
    }
}

#[test]
fn a_thread_that_ends_without_a_wait() {
    caught_in_chain(&[], (chain::deserter, 0, 1), FaultKind::MissingWait, "", &["thread 7 "]);
}

#[test]
fn chains_in_order_pass() {
    every_schedule(|seed, arch| {
        let mut chain = Chain::new(seed, arch);
        let mut run = |kernel, from, to| {
            chain.run(kernel, from, to).unwrap_or_else(|fault| panic!("seed {seed} {arch:?}: {fault}"));
        };
        run(chain::produce, 1, 0);
        run(chain::follow, 0, 1);
        // What the kernel before the last wrote is complete, since the last has waited before it let others start.
        run(chain::eager, 0, 2);
        run(chain::follow, 2, 3);
        assert_eq!(chain.buffers[3].download::<u32>().unwrap(), (0..128).map(|i| 3 * i).collect::<Vec<_>>());
        // The host has waited: everything is complete.
        chain.run(chain::eager, 3, 0).unwrap();
        chain.run(chain::hasty, 3, 1).unwrap();
        chain.device.synchronize();
        chain.run(chain::eager, 1, 2).unwrap();
        assert_eq!(chain.buffers[2].download::<u32>().unwrap(), (0..128).map(|i| 5 * i).collect::<Vec<_>>());
    });
}

#[test]
fn a_kernel_that_is_not_early_completes_what_is_ahead() {
    every_schedule(|seed, arch| {
        let mut chain = Chain::new(seed, arch);
        chain.run(chain::produce, 1, 0).unwrap();
        chain.run(chain::hasty, 0, 1).unwrap();
        chain.run(chain::produce, 1, 2).unwrap();
        chain.run(chain::eager, 0, 3).unwrap();
        let early = chain::KERNELS.iter().filter(|kernel| kernel.early).count();
        assert_eq!((early, chain::KERNELS.len()), (7, 8));
    });
}
