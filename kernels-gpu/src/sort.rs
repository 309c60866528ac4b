//! Rows sorted by expert, from top-k ids: a stable counting sort.
//!
//! Pair i = token·top_k + slot is *live* where its id is in 0..E and no given table has a 0 for that expert. Live pairs get rows
//! by ascending expert, and within an expert by ascending i; `expert_offsets[e]` is the first row of expert e.
//!
//! Pairs are divided into one chunk a block, and a chunk into one range a warp, each with its own table of counters. With several
//! blocks, [`mod@sort_count`] first writes every chunk's counts, and each block of [`mod@sort_by_expert`] adds up those of the
//! chunks before its own. Few pairs take one block and one launch. No result depends on the division.

use crate::{scan, status};
use core::num::NonZeroU32;
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_dim, block_idx, grid_dim, lane, thread_idx, warp};
use cuda_std::{sync, warp as lanes};

/// Threads of a block.
pub const THREADS: u32 = scan::THREADS;
/// Row of a pair that is not live, and the token of a row that does not exist.
pub const NONE: i32 = -1;

/// Marks an expert whose pairs have no rows.
const ABSENT: u32 = u32::MAX;

/// Bytes of shared memory of [`mod@sort_count`] with `warps` counting warps.
pub const fn count_shared_bytes(warps: u32, experts: u32) -> u32 {
    warps * experts * 4
}

/// Bytes of shared memory of [`mod@sort_by_expert`] with `warps` counting warps.
pub const fn sort_shared_bytes(warps: u32, experts: u32) -> u32 {
    count_shared_bytes(warps, experts) + (2 * part_words(experts) + scan::WORDS) * 4
}

/// Words of a table of partial sums over chunks: one an expert, or one a thread.
const fn part_words(experts: u32) -> u32 {
    if experts > THREADS { experts } else { THREADS }
}

/// Warps that count pairs of a chunk: as many as there is work for, and as `shared_limit` bytes have room for.
pub const fn counting_warps(chunk: u32, experts: u32, shared_limit: u32) -> u32 {
    let mut warps = 1;
    while warps < 32 && warps * 32 < chunk && sort_shared_bytes(warps + 1, experts) <= shared_limit {
        warps += 1;
    }
    warps
}

kernels! {
    /// Pairs of each expert in each chunk. Grid: one block a chunk.
    pub mod sort_count(
        /// [M, top_k] expert ids.
        ids: In<i32>,
        /// [chunks, E] counts.
        counts: Out<u32>,
        /// Number of pairs.
        pairs: u32,
        /// Number of experts E.
        experts: u32,
        /// Pairs of a chunk.
        chunk: u32,
        /// Warps that count, see [`counting_warps`].
        warps: u32,
    );
    sort_count_i32[THREADS, 1] = |_A| count_body;
}

kernels! {
    /// Rows by expert. Grid: one block a chunk.
    pub mod sort_by_expert(
        /// [M, top_k] expert ids.
        ids: In<i32>,
        /// `[E]` addresses of gate weights, 0 for an expert that is not resident. May be null.
        gate: In<u64>,
        /// As `gate`, of up.
        up: In<u64>,
        /// As `gate`, of down.
        down: In<u64>,
        /// [chunks, E] counts. Not read where there is one chunk.
        counts: In<u32>,
        /// `[E + 1]` first row of each expert, then the number of live pairs.
        expert_offsets: Out<i32>,
        /// [M·top_k] token of each row, [`NONE`] behind the last.
        sorted_token_ids: Out<i32>,
        /// [M·top_k] pair of each row, [`NONE`] behind the last.
        sorted_pairs: Out<i32>,
        /// [M·top_k] row of each pair, [`NONE`] where it is not live.
        token_to_perm: Out<i32>,
        /// `[1]` status bits.
        status: Out<u32>,
        /// Number of pairs.
        pairs: u32,
        /// Experts of a token.
        top_k: u32,
        /// Number of experts E.
        experts: u32,
        /// Pairs of a chunk.
        chunk: u32,
        /// Warps that count, see [`counting_warps`].
        warps: u32,
    );
    sort_by_expert_i32[THREADS, 1] = |_A| sort_body;
}

/// The pairs of a warp.
#[derive(Clone, Copy)]
struct Range {
    begin: u32,
    end: u32,
}

impl Range {
    #[inline(always)]
    fn of_warp(pairs: u32, chunk: u32, warps: u32) -> Self {
        let first = block_idx() * chunk;
        let last = (first + chunk).min(pairs);
        let passes = (chunk + warps * 32 - 1) / NonZeroU32::new(warps * 32).unwrap_or(NonZeroU32::MIN);
        let begin = (first + warp() * passes * 32).min(last);
        let end = if warp() < warps { (begin + passes * 32).min(last) } else { begin };
        Range { begin, end }
    }
}

/// 32 neighbouring pairs, one a lane.
#[derive(Clone, Copy)]
struct Group {
    expert: u32,
    valid: bool,
    bad: bool,
    /// Lanes with the same expert.
    peers: u32,
}

impl Group {
    #[inline(always)]
    fn load(ids: In<i32>, at: u32, end: u32, experts: u32) -> Self {
        let pair = at + lane();
        let id = if pair < end { ids.load(pair as usize) } else { -1 };
        let expert = id as u32;
        let valid = expert < experts;
        Group { expert, valid, bad: id >= 0 && !valid, peers: lanes::match_any(expert) }
    }

    /// Whether this lane is the first of its peers.
    #[inline(always)]
    fn leads(&self) -> bool {
        self.valid && self.peers.trailing_zeros() == lane()
    }
}

/// Counts each warp's pairs in its own table; returns whether the warp saw an id that is too large, and its first 32 pairs.
#[inline(always)]
fn count(ids: In<i32>, counts: Shared<u32>, range: Range, experts: u32, warps: u32) -> (bool, Group) {
    // The first pairs are under way while the tables are zeroed, and are kept for the second pass.
    let held = Group::load(ids, range.begin, range.end, experts);
    let mut i = thread_idx();
    while i < warps * experts {
        counts.store(i, 0);
        i += THREADS;
    }
    sync::sync_threads();
    let mut bad = false;
    let mut group = held;
    let mut at = range.begin;
    while at < range.end {
        bad |= group.bad;
        if group.leads() {
            let count = warp() * experts + group.expert;
            counts.store(count, counts.load(count) + group.peers.count_ones());
        }
        sync::sync_warp();
        at += 32;
        if at < range.end {
            group = Group::load(ids, at, range.end, experts);
        }
    }
    sync::sync_threads();
    (bad, held)
}

#[inline(always)]
fn count_body(ids: In<i32>, counts: Out<u32>, pairs: u32, experts: u32, chunk: u32, warps: u32) {
    let of_warps = Shared::<u32>::at(0, warps * experts);
    count(ids, of_warps, Range::of_warp(pairs, chunk, warps), experts, warps);
    let to = block_idx() as usize * experts as usize;
    let mut expert = thread_idx();
    while expert < experts {
        let mut total = 0;
        let mut w = 0;
        while w < warps {
            let found = [0, 1, 2, 3, 4, 5, 6, 7]
                .map(|i| if w + i < warps { of_warps.load((w + i) * experts + expert) } else { 0 });
            total += found[0] + found[1] + found[2] + found[3] + found[4] + found[5] + found[6] + found[7];
            w += 8;
        }
        counts.store(to + expert as usize, total);
        expert += THREADS;
    }
}

/// Whether a table, where there is one, has the expert.
#[inline(always)]
fn resident(table: In<u64>, expert: u32) -> bool {
    table.is_null() || table.load(expert as usize) != 0
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn sort_body(
    ids: In<i32>,
    gate: In<u64>,
    up: In<u64>,
    down: In<u64>,
    counts: In<u32>,
    expert_offsets: Out<i32>,
    sorted_token_ids: Out<i32>,
    sorted_pairs: Out<i32>,
    token_to_perm: Out<i32>,
    status: Out<u32>,
    pairs: u32,
    top_k: u32,
    experts: u32,
    chunk: u32,
    warps: u32,
) {
    // of_warps[warp][expert]: pairs in the warp's range, later those of the chunk before them.
    let of_warps = Shared::<u32>::at(0, warps * experts);
    let words = part_words(experts);
    let after_counts = count_shared_bytes(warps, experts);
    // Sums over chunks, in parts; later the first row of this chunk's pairs of an expert, and the pairs of the expert.
    let before = Shared::<u32>::at(after_counts, words);
    let all = Shared::<u32>::at(after_counts + words * 4, words);
    let sums = Shared::<u32>::at(after_counts + 2 * words * 4, scan::WORDS);

    let chunks = grid_dim();
    let range = Range::of_warp(pairs, chunk, warps);
    let (bad, held) = count(ids, of_warps, range, experts, warps);
    if lanes::any(bad) && lane() == 0 {
        status.atomic_or(0, status::BAD_EXPERT_ID);
    }

    // Threads side by side take experts side by side; those left over take other parts of the chunks.
    let width = (experts.div_ceil(32) * 32).min(THREADS);
    let by_width = NonZeroU32::new(width).unwrap_or(NonZeroU32::MIN);
    let parts = if chunks > 1 { THREADS / by_width } else { 0 };
    let part = thread_idx() / by_width;
    if part < parts {
        let by_parts = NonZeroU32::new(parts).unwrap_or(NonZeroU32::MIN);
        let (first, last) = (part * chunks / by_parts, (part + 1) * chunks / by_parts);
        let mut expert = thread_idx() % by_width;
        while expert < experts {
            let (mut sum_before, mut sum_all) = (0, 0);
            let mut c = first;
            while c < last {
                let found = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15].map(|i| {
                    if c + i < last { counts.load((c + i) as usize * experts as usize + expert as usize) } else { 0 }
                });
                let mut i = 0;
                while i < 16 {
                    sum_all += found[i as usize];
                    sum_before += if c + i < block_idx() { found[i as usize] } else { 0 };
                    i += 1;
                }
                c += 16;
            }
            before.store(part * experts + expert, sum_before);
            all.store(part * experts + expert, sum_all);
            expert += width;
        }
    }
    sync::sync_threads();

    // Each thread owns a run of experts: where the warps' pairs start, then the rows before the run.
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
                .map(|i| if w + i < warps { of_warps.load((w + i) * experts + expert) } else { 0 });
            let mut i = 0;
            while i < 8 {
                if w + i < warps {
                    of_warps.store((w + i) * experts + expert, total);
                }
                total += found[i as usize];
                i += 1;
            }
            w += 8;
        }
        let mut earlier = 0;
        if parts > 0 {
            total = 0;
            let mut p = 0;
            while p < parts {
                earlier += before.load(p * experts + expert);
                total += all.load(p * experts + expert);
                p += 1;
            }
        }
        if !(resident(gate, expert) && resident(up, expert) && resident(down, expert)) {
            earlier = ABSENT;
            total = 0;
        }
        before.store(expert, earlier);
        all.store(expert, total);
        own += total;
        expert += 1;
    }
    let (mut next, live) = scan::exclusive(own, sums);
    let mut expert = first;
    while expert < last {
        if block_idx() == 0 {
            expert_offsets.store(expert as usize, next as i32);
        }
        let earlier = before.load(expert);
        if earlier != ABSENT {
            before.store(expert, next + earlier);
        }
        next += all.load(expert);
        expert += 1;
    }
    if block_idx() == 0 && thread_idx() == 0 {
        expert_offsets.store(experts as usize, live as i32);
    }
    sync::sync_threads();

    let per_token = NonZeroU32::new(top_k).unwrap_or(NonZeroU32::MIN);
    let mut group = held;
    let mut at = range.begin;
    while at < range.end {
        let count = warp() * experts + if group.valid { group.expert } else { 0 };
        let start = of_warps.load(count);
        sync::sync_warp();
        if group.leads() {
            of_warps.store(count, start + group.peers.count_ones());
        }
        sync::sync_warp();
        let pair = at + lane();
        if pair < range.end {
            let first_row = if group.valid { before.load(group.expert) } else { ABSENT };
            if first_row != ABSENT {
                let row = first_row + start + (group.peers & ((1 << lane()) - 1)).count_ones();
                sorted_token_ids.store(row as usize, (pair / per_token) as i32);
                sorted_pairs.store(row as usize, pair as i32);
                token_to_perm.store(pair as usize, row as i32);
            } else {
                token_to_perm.store(pair as usize, NONE);
            }
        }
        at += 32;
        if at < range.end {
            group = Group::load(ids, at, range.end, experts);
        }
    }

    let mut row = live + block_idx() * block_dim() + thread_idx();
    while row < pairs {
        sorted_token_ids.store(row as usize, NONE);
        sorted_pairs.store(row as usize, NONE);
        row += grid_dim() * block_dim();
    }
}
