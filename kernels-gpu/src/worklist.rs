//! Work-list of a grouped GEMM: the tiles of output that there are, by ascending expert, then m-tile, then column tile.
//!
//! Expert e owns the sorted rows `expert_offsets[e]` to `expert_offsets[e + 1]`, in m-tiles of `m_tile` rows. An expert for which a
//! given table has a 0 is left out. Every block forms the same prefix sum over the experts, and each thread finds the expert of
//! its items in it: the list is written in parallel and is the one that a serial builder writes.

use crate::scan;
use core::num::NonZeroU32;
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::sync;
use cuda_std::thread::{block_dim, block_idx, grid_dim, thread_idx};

/// Threads of a block.
pub const THREADS: u32 = scan::THREADS;
/// Words of an item: expert, first sorted row, rows, column tile.
pub const ITEM_WORDS: u32 = 4;
/// Words of a packed item: expert, m-tile · 64 + column tile.
pub const PACKED_WORDS: u32 = 2;
/// Most column tiles of a packed list.
pub const PACKED_TILES: u32 = 64;

/// Bytes of shared memory.
pub const fn shared_bytes(experts: u32) -> u32 {
    (experts + scan::WORDS) * 4
}

kernels! {
    /// Work-list. Grid: any.
    pub mod tile_worklist(
        /// `[E + 1]` first row of each expert.
        expert_offsets: In<i32>,
        /// `[E]` addresses of weights, 0 for an expert that is not resident. May be null.
        gate: In<u64>,
        /// As `gate`.
        up: In<u64>,
        /// Items.
        worklist: Out<u32>,
        /// `[1]` number of items.
        total: Out<u32>,
        /// Items that `worklist` has room for.
        capacity: u32,
        /// Number of experts E.
        experts: u32,
        /// Column tiles.
        n_tiles: u32,
        /// Rows of a tile.
        m_tile: u32,
    );
    tile_worklist_u32x4[THREADS, 1] = |_A| body::<false>;
    tile_worklist_packed6[THREADS, 1] = |_A| body::<true>;
}

/// Rows of an expert.
#[inline(always)]
fn rows_of(expert_offsets: In<i32>, expert: u32) -> (i32, i32) {
    let first = expert_offsets.load(expert as usize);
    (first, expert_offsets.load(expert as usize + 1) - first)
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<const PACKED: bool>(
    expert_offsets: In<i32>,
    gate: In<u64>,
    up: In<u64>,
    worklist: Out<u32>,
    total: Out<u32>,
    capacity: u32,
    experts: u32,
    n_tiles: u32,
    m_tile: u32,
) {
    // m-tiles before each expert.
    let tiles_before = Shared::<u32>::at(0, experts);
    let sums = Shared::<u32>::at(experts * 4, scan::WORDS);
    let by_rows = NonZeroU32::new(m_tile).unwrap_or(NonZeroU32::MIN);
    let by_tiles = NonZeroU32::new(n_tiles).unwrap_or(NonZeroU32::MIN);

    let resident = |table: In<u64>, expert: u32| table.is_null() || table.load(expert as usize) != 0;
    let per_thread = experts.div_ceil(THREADS);
    let first = (thread_idx() * per_thread).min(experts);
    let last = (first + per_thread).min(experts);
    let mut own = 0;
    let mut expert = first;
    while expert < last {
        let (_, rows) = rows_of(expert_offsets, expert);
        let tiles = if rows > 0 && resident(gate, expert) && resident(up, expert) {
            (rows as u32 - 1) / by_rows + 1
        } else {
            0
        };
        tiles_before.store(expert, tiles);
        own += tiles;
        expert += 1;
    }
    let (mut next, all) = scan::exclusive(own, sums);
    let mut expert = first;
    while expert < last {
        let tiles = tiles_before.load(expert);
        tiles_before.store(expert, next);
        next += tiles;
        expert += 1;
    }
    // Offsets that are none, which only a foreign buffer can hold, end at the list's end.
    let items = (all as u64 * n_tiles as u64).min(capacity as u64) as u32;
    if block_idx() == 0 && thread_idx() == 0 {
        total.store(0, items);
    }
    sync::sync_threads();

    let mut item = block_idx() * block_dim() + thread_idx();
    while item < items {
        let (tile, column) = (item / by_tiles, item % by_tiles);
        // The last expert with no more m-tiles before it: those without tiles share their successor's number.
        let (mut low, mut high) = (0, experts);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if tiles_before.load(middle) <= tile {
                low = middle;
            } else {
                high = middle;
            }
        }
        let number = tile - tiles_before.load(low);
        if PACKED {
            let at = item as usize * PACKED_WORDS as usize;
            worklist.store_v2(at, [low, number << 6 | column]);
        } else {
            let (first, rows) = rows_of(expert_offsets, low);
            let done = number * m_tile;
            let at = item as usize * ITEM_WORDS as usize;
            worklist.store_v4(at, [low, first as u32 + done, (rows as u32 - done).min(m_tile), column]);
        }
        item += grid_dim() * block_dim();
    }
}
