//! Routing table from top-k ids, and activations into tensor-core order.
//!
//! Block 0 builds the table. Pair i = token·top_k + slot of expert e gets the rank r = number of pairs j < i with the same
//! expert. An expert with c pairs owns ceil(c / S) *entries* of S slots, S = 8 (the columns of an mma) or 16 (of two); entries lie by
//! ascending expert, and pair i sits in slot r mod S of the expert's entry r / S. Ids outside 0..E are skipped.
//!
//! The other blocks rewrite x row by row in the pairs of an [`Order`], and zero the padding of h.

use crate::dequant::Activation;
use crate::layout::permute::{row_stride, word_position};
use crate::order::{Decode, Order, Seed};
use crate::status;
use core::num::NonZeroU32;
use cuda_std::arch::Arch;
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_dim, block_idx, grid_dim, lane, thread_idx, warp};
use cuda_std::{dependent, sync, warp as lanes};

/// Threads of a block.
pub const THREADS: u32 = 1024;
/// Slots of each group of an entry: columns of an mma.
pub const GROUP: u32 = 8;
/// [`Seed`] as a parameter.
pub const SEED: u32 = 0;
/// [`Decode`] as a parameter.
pub const DECODE: u32 = 1;
/// Words of an entry's record: expert, number of pairs, alpha1 of up, alpha1 of gate, alpha2, and three unused.
pub const RECORD_WORDS: u32 = 8;
/// Words of a slot: its pair (-1 as u32 for none), token, weight, and a pair of the same expert to read where there is none. One
/// 16-byte store: scattered stores of one block are what this kernel's time consists of.
pub const SLOT_WORDS: u32 = 4;

/// Most entries of `slots` slots that `pairs` pairs over `experts` experts can have.
pub const fn max_entries(pairs: usize, experts: usize, slots: usize) -> usize {
    let spread = if pairs < experts { pairs } else { experts };
    let packed = (pairs + (slots - 1) * spread) / slots;
    if packed < pairs { packed } else { pairs }
}

/// Warps that count pairs. Each has its own table of `experts` counters, and all must fit into `shared_limit` bytes.
pub const fn counting_warps(pairs: usize, experts: usize, shared_limit: u32) -> u32 {
    let mut warps = 1;
    while warps < 32 && warps * 32 < pairs && shared_bytes(warps as u32 + 1, experts as u32) <= shared_limit {
        warps += 1;
    }
    warps as u32
}

/// Bytes of shared memory for `warps` counting warps.
pub const fn shared_bytes(warps: u32, experts: u32) -> u32 {
    ((warps + 2) * experts + 64) * 4
}

/// Whether a value is finite in bf16 or f16 bits.
#[inline(always)]
pub(crate) fn finite<T: Activation>(bits: u16) -> bool {
    let exponent = if T::BF16 { 0x7F80 } else { 0x7C00 };
    bits & exponent != exponent
}

kernels! {
    /// Routing table and reordered activations. Grid: block 0 and at least one more.
    pub mod route_prep(
        /// [M, top_k] expert ids.
        topk_ids: In<i32>,
        /// [M, top_k] weights of the experts.
        topk_weights: In<f32>,
        /// [E, 2] global scales of w13: up, gate.
        alpha1: In<f32>,
        /// [E] global scales of w2.
        alpha2: In<f32>,
        /// [M, hidden] activations.
        x: In<u16>,
        /// `[1]` number of entries.
        entry_count: Out<u32>,
        /// [entries, RECORD_WORDS] records.
        entries: Out<u32>,
        /// [entries, 8·groups, SLOT_WORDS] slots.
        slots: Out<u32>,
        /// [M, row_stride(hidden)] reordered activations.
        x_permuted: Out<u16>,
        /// [M·top_k, row_stride(intermediate)] the next kernel's output, whose padding is zeroed here.
        h: Out<u16>,
        /// `[1]` status bits.
        status: Out<u32>,
        /// Number of tokens M.
        tokens: u32,
        /// Experts of a token.
        top_k: u32,
        /// Number of experts E.
        experts: u32,
        /// Hidden size K.
        hidden: u32,
        /// Intermediate size I.
        intermediate: u32,
        /// Warps that count, see [`counting_warps`].
        warps: u32,
        /// Groups of eight slots of an entry, 1 or 2.
        groups: u32,
        /// Order of the pairs of x: [`SEED`] or [`DECODE`].
        order: u32,
    );
    route_prep_bf16_bf16[THREADS, 1, early] = |A| body::<Bf16, Bf16, A>;
    route_prep_bf16_f16[THREADS, 1, early] = |A| body::<Bf16, F16, A>;
    route_prep_f16_f16[THREADS, 1, early] = |A| body::<F16, F16, A>;
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<X: Activation, T: Activation, A: Arch>(
    topk_ids: In<i32>,
    topk_weights: In<f32>,
    alpha1: In<f32>,
    alpha2: In<f32>,
    x: In<u16>,
    entry_count: Out<u32>,
    entries: Out<u32>,
    slots: Out<u32>,
    x_permuted: Out<u16>,
    h: Out<u16>,
    status: Out<u32>,
    tokens: u32,
    top_k: u32,
    experts: u32,
    hidden: u32,
    intermediate: u32,
    warps: u32,
    groups: u32,
    order: u32,
) {
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    if block_idx() == 0 {
        let table = Table { entries, slots, alpha1, alpha2, slots_log2: 2 + groups };
        build_table(topk_ids, topk_weights, entry_count, table, status, tokens, top_k, experts, warps);
    } else {
        let live = |token: u32| {
            let mut slot = 0;
            while slot < top_k && topk_ids.load((token * top_k + slot) as usize) as u32 >= experts {
                slot += 1;
            }
            slot < top_k
        };
        permute_rows::<X, T>(x, x_permuted, status, tokens, hidden, order, live);
        zero_padding(h, tokens * top_k, intermediate);
    }
}

#[derive(Clone, Copy)]
struct Table {
    entries: Out<u32>,
    slots: Out<u32>,
    alpha1: In<f32>,
    alpha2: In<f32>,
    /// Slots of an entry, as a power of two: 3 or 4.
    slots_log2: u32,
}

impl Table {
    /// Entries of an expert with `pairs` pairs.
    #[inline(always)]
    fn entries_of(&self, pairs: u32) -> u32 {
        (pairs + (1 << self.slots_log2) - 1) >> self.slots_log2
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn build_table(
    topk_ids: In<i32>,
    topk_weights: In<f32>,
    entry_count: Out<u32>,
    table: Table,
    status: Out<u32>,
    tokens: u32,
    top_k: u32,
    experts: u32,
    warps: u32,
) {
    // counts[warp][expert]: pairs in the warp's range, later the rank of its next pair.
    let counts = Shared::<u32>::at(0, warps * experts);
    let totals = Shared::<u32>::at(warps * experts * 4, experts);
    let first_entry = Shared::<u32>::at((warps + 1) * experts * 4, experts);
    let warp_sums = Shared::<u32>::at((warps + 2) * experts * 4, 32);

    let per_token = NonZeroU32::new(top_k).unwrap_or(NonZeroU32::MIN);
    let pairs = tokens * top_k;
    let range = (pairs + warps * 32 - 1) / NonZeroU32::new(warps * 32).unwrap_or(NonZeroU32::MIN) * 32;
    let begin = warp() * range;
    let end = (begin + range).min(pairs);
    let counting = warp() < warps;

    // A warp keeps what it loads for its first 32 pairs: few tokens make no second pass over memory.
    let first_id = load_id(topk_ids, begin, if counting { end } else { 0 });
    let mut i = thread_idx();
    while i < warps * experts {
        counts.store(i, 0);
        i += THREADS;
    }
    sync::sync_threads();

    let mut held = Group::new(first_id, experts);
    if counting {
        held.load_weight(topk_weights, begin);
        let mut bad = false;
        let mut group = held;
        let mut at = begin;
        while at < end {
            bad |= group.bad;
            if group.leads() {
                let count = warp() * experts + group.expert;
                counts.store(count, counts.load(count) + group.peers.count_ones());
            }
            sync::sync_warp();
            at += 32;
            if at < end {
                group = Group::new(load_id(topk_ids, at, end), experts);
            }
        }
        if lanes::any(bad) && lane() == 0 {
            status.atomic_or(0, status::BAD_EXPERT_ID);
        }
    }
    sync::sync_threads();

    // Each thread owns a run of experts: ranks at which the warps start, then the entries before the run.
    let per_thread = experts.div_ceil(THREADS);
    let first = (thread_idx() * per_thread).min(experts);
    let last = (first + per_thread).min(experts);
    let mut own = 0;
    let mut expert = first;
    while expert < last {
        let mut total = 0;
        let mut w = 0;
        while w < warps {
            // Eight loads before the first store, which the hardware could not reorder.
            let found = [0, 1, 2, 3, 4, 5, 6, 7]
                .map(|i| if w + i < warps { counts.load((w + i) * experts + expert) } else { 0 });
            let mut i = 0;
            while i < 8 {
                if w + i < warps {
                    counts.store((w + i) * experts + expert, total);
                }
                total += found[i as usize];
                i += 1;
            }
            w += 8;
        }
        totals.store(expert, total);
        own += table.entries_of(total);
        expert += 1;
    }
    let through = lanes::inclusive_scan(own);
    if lane() == 31 {
        warp_sums.store(warp(), through);
    }
    sync::sync_threads();
    if warp() == 0 {
        let sum = warp_sums.load(lane());
        let before = lanes::inclusive_scan(sum) - sum;
        warp_sums.store(lane(), before);
        if lane() == 31 {
            entry_count.store(0, before + sum);
        }
    }
    sync::sync_threads();
    let mut next = warp_sums.load(warp()) + through - own;
    let mut expert = first;
    while expert < last {
        first_entry.store(expert, next);
        next += table.entries_of(totals.load(expert));
        expert += 1;
    }
    sync::sync_threads();

    if counting {
        let mut group = held;
        let mut at = begin;
        while at < end {
            let count = warp() * experts + if group.valid { group.expert } else { 0 };
            let start = counts.load(count);
            sync::sync_warp();
            if group.leads() {
                counts.store(count, start + group.peers.count_ones());
            }
            sync::sync_warp();
            if group.valid {
                let rank = start + (group.peers & ((1 << lane()) - 1)).count_ones();
                let total = totals.load(group.expert);
                let entry = first_entry.load(group.expert) + (rank >> table.slots_log2);
                let pair = at + lane();
                group.place(table, pair, pair / per_token, rank, total, entry);
            }
            at += 32;
            if at < end {
                group = Group::new(load_id(topk_ids, at, end), experts);
                group.load_weight(topk_weights, at);
            }
        }
    }
}

/// This lane's id of the 32 pairs from `at` on, -1 from `end` on.
#[inline(always)]
fn load_id(topk_ids: In<i32>, at: u32, end: u32) -> i32 {
    let pair = at + lane();
    if pair < end { topk_ids.load(pair as usize) } else { -1 }
}

/// 32 neighbouring pairs, one a lane.
#[derive(Clone, Copy)]
struct Group {
    expert: u32,
    valid: bool,
    bad: bool,
    /// Lanes with the same expert.
    peers: u32,
    /// Weight of this lane's pair.
    weight: f32,
}

impl Group {
    #[inline(always)]
    fn new(id: i32, experts: u32) -> Self {
        let expert = id as u32;
        Group {
            expert,
            valid: expert < experts,
            bad: id >= 0 && expert >= experts,
            peers: lanes::match_any(expert),
            weight: 0.0,
        }
    }

    #[inline(always)]
    fn load_weight(&mut self, topk_weights: In<f32>, at: u32) {
        if self.valid {
            self.weight = topk_weights.load((at + lane()) as usize);
        }
    }

    /// Whether this lane is the first of its peers.
    #[inline(always)]
    fn leads(&self) -> bool {
        self.valid && self.peers.trailing_zeros() == lane()
    }

    /// Writes the slot of this lane's pair, which is number `rank` of its expert's `total`. The first pair of an entry writes the
    /// record too, the last pair of an expert the unused slots.
    #[inline(always)]
    fn place(&self, table: Table, pair: u32, token: u32, rank: u32, total: u32, entry: u32) {
        let slots = 1 << table.slots_log2;
        let slot_of = |number: u32| ((entry * slots + number) * SLOT_WORDS) as usize;
        let number = rank % slots;
        table.slots.store_v4(slot_of(number), [pair, token, self.weight.to_bits(), pair]);
        if number == 0 {
            let expert = self.expert as usize;
            let up = table.alpha1.load(2 * expert).to_bits();
            let gate = table.alpha1.load(2 * expert + 1).to_bits();
            let down = table.alpha2.load(expert).to_bits();
            let record = (entry * RECORD_WORDS) as usize;
            table.entries.store_v4(record, [self.expert, (total - rank).min(slots), up, gate]);
            table.entries.store_v4(record + 4, [down, 0, 0, 0]);
        }
        if rank + 1 == total {
            let mut unused = number + 1;
            while unused < slots {
                table.slots.store_v4(slot_of(unused), [u32::MAX, token, 0, pair]);
                unused += 1;
            }
        }
    }
}

/// Rewrites x in tensor-core order, eight elements a thread and step. A finite element that becomes infinite is reported where its
/// token is `live`: rows that only pad a batch may hold anything.
#[inline(always)]
fn permute_rows<X: Activation, T: Activation>(
    x: In<u16>,
    x_permuted: Out<u16>,
    status: Out<u32>,
    tokens: u32,
    hidden: u32,
    order: u32,
    live: impl Fn(u32) -> bool,
) {
    let stride = row_stride(hidden as usize) as u32;
    // (token, word) advances by a fixed step: one division at the start instead of one an element.
    let words = NonZeroU32::new(stride / 8).unwrap_or(NonZeroU32::MIN);
    let start = (block_idx() - 1) * block_dim() + thread_idx();
    let step = (grid_dim() - 1) * block_dim();
    let (mut token, mut word) = (start / words, start % words);
    let mut overflow = false;
    while token < tokens {
        let mut out = [0u32; 4];
        if word * 8 < hidden {
            // hidden is a multiple of 16, so a group of eight is whole or absent.
            let v = x.load_v4(token as usize * hidden as usize + word as usize * 8);
            let element = |i: usize| (v[i / 2] >> (i % 2 * 16)) as u16;
            let convert = |i: usize| {
                if X::BF16 == T::BF16 {
                    (element(i), false)
                } else {
                    let to = T::round(X::widen(element(i)));
                    (to, finite::<X>(element(i)) && !finite::<T>(to))
                }
            };
            let mut infinite = false;
            let converted = [0, 1, 2, 3, 4, 5, 6, 7].map(convert);
            let pair = |(low, high): (usize, usize)| converted[low].0 as u32 | (converted[high].0 as u32) << 16;
            out = if order == DECODE { Decode::PAIRS.map(pair) } else { Seed::PAIRS.map(pair) };
            infinite |= converted.iter().any(|&(_, infinite)| infinite);
            overflow |= infinite && live(token);
        }
        x_permuted.store_v4(token as usize * stride as usize + word_position(word as usize) * 8, out);
        token += step / words;
        word += step % words;
        if word >= words.get() {
            token += 1;
            word -= words.get();
        }
    }
    if lanes::any(overflow) && lane() == 0 {
        status.atomic_or(0, status::F16_RANGE);
    }
}

/// Zeros behind the last element of each row of h. Its rows are written in whole groups of eight, as above.
#[inline(always)]
fn zero_padding(h: Out<u16>, rows: u32, intermediate: u32) {
    let stride = row_stride(intermediate as usize);
    let groups = (stride - intermediate as usize) as u32 / 8;
    let width = NonZeroU32::new(groups).unwrap_or(NonZeroU32::MIN);
    let start = (block_idx() - 1) * block_dim() + thread_idx();
    let step = (grid_dim() - 1) * block_dim();
    let (mut row, mut group) = (start / width, start % width);
    while groups > 0 && row < rows {
        let word = intermediate as usize / 8 + group as usize;
        h.store_v4(row as usize * stride + word_position(word) * 8, [0; 4]);
        row += step / width;
        group += step % width;
        if group >= groups {
            row += 1;
            group -= groups;
        }
    }
}
