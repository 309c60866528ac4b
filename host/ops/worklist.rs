//! Work-list of a grouped GEMM.

use super::Addresses;
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::plan::MAX_EXPERTS;
use kernels_gpu::worklist::{ITEM_WORDS, PACKED_TILES, PACKED_WORDS, THREADS, shared_bytes, tile_worklist};

/// Form of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Items {
    /// Four words: expert, first sorted row, rows of the tile, column tile.
    Wide,
    /// Two words: expert, m-tile · 64 + column tile. At most 64 column tiles, less than 2^26 m-tiles.
    Packed6,
}

impl Items {
    /// Words of an item.
    pub const fn words(self) -> usize {
        match self {
            Items::Wide => ITEM_WORDS as usize,
            Items::Packed6 => PACKED_WORDS as usize,
        }
    }
}

/// What a list is made of.
#[derive(Clone, Copy, Debug)]
pub struct WorklistInputs<'a> {
    /// Number of sorted rows that there is room for: tokens times top-k. 0 does nothing.
    pub pairs: usize,
    /// Number of experts E.
    pub experts: usize,
    /// `[E + 1]` first row of each expert.
    pub expert_offsets: &'a Buffer<i32>,
    /// `[E]` addresses of weights; an expert with 0 has no items.
    pub gate: Option<Addresses<'a>>,
    /// As `gate`.
    pub up: Option<Addresses<'a>>,
    /// Column tiles.
    pub n_tiles: usize,
    /// Rows of a tile.
    pub m_tile: usize,
}

/// Most items that `pairs` rows over `experts` experts can have. `None` where it overflows.
pub fn capacity(pairs: usize, experts: usize, n_tiles: usize, m_tile: usize) -> Option<usize> {
    (pairs.div_ceil(m_tile) + experts.min(pairs)).checked_mul(n_tiles)
}

/// Readies the kernels.
pub fn prepare(device: &DeviceHandle) -> Result<()> {
    tile_worklist::KERNELS
        .iter()
        .try_for_each(|&kernel| device.prepare(kernel.into(), shared_bytes(MAX_EXPERTS as u32)))
}

/// Enqueues the list: items by ascending expert, m-tile and column tile, and their number. Errors name the argument.
pub fn enqueue(
    device: &DeviceHandle,
    items: Items,
    inputs: WorklistInputs<'_>,
    worklist: &Buffer<u32>,
    total: &Buffer<u32>,
) -> Result<()> {
    let blocks = device.properties().multiprocessors;
    enqueue_with_blocks(device, items, inputs, worklist, total, blocks)
}

/// As [`enqueue`] with a given most number of blocks, on which no result depends.
pub fn enqueue_with_blocks(
    device: &DeviceHandle,
    items: Items,
    inputs: WorklistInputs<'_>,
    worklist: &Buffer<u32>,
    total: &Buffer<u32>,
    blocks: u32,
) -> Result<()> {
    let WorklistInputs { pairs, experts, expert_offsets, gate, up, n_tiles, m_tile } = inputs;
    if !(1..=MAX_EXPERTS).contains(&experts) {
        return Err(Error::argument("experts", experts, format!("1 to {MAX_EXPERTS}")));
    }
    if pairs > i32::MAX as usize {
        return Err(Error::argument("pairs", pairs, "below 2^31"));
    }
    if m_tile == 0 || m_tile > i32::MAX as usize {
        return Err(Error::argument("m_tile", m_tile, "1 to 2^31 - 1"));
    }
    if n_tiles == 0 {
        return Err(Error::argument("n_tiles", n_tiles, "at least 1"));
    }
    if items == Items::Packed6 {
        if n_tiles > PACKED_TILES as usize {
            return Err(Error::argument("n_tiles", n_tiles, format!("at most {PACKED_TILES} in a packed list")));
        }
        if pairs.div_ceil(m_tile) > 1 << 26 {
            let needed = format!("a packed list of at most 2^26 m-tiles: {pairs} rows are more, by {m_tile}");
            return Err(Error::argument("n_tiles", n_tiles, needed));
        }
    }
    let capacity = capacity(pairs, experts, n_tiles, m_tile)
        .filter(|&capacity| capacity <= i32::MAX as usize)
        .ok_or_else(|| Error::argument("n_tiles", n_tiles, "a list of less than 2^31 items"))?;
    expert_offsets.check("expert_offsets", device, experts + 1)?;
    let gate = Addresses::of(gate, "gate", device, experts)?;
    let up = Addresses::of(up, "up", device, experts)?;
    worklist.check("worklist", device, capacity * items.words())?;
    total.check("total", device, 1)?;
    if pairs == 0 {
        return Ok(());
    }
    let kernel = match items {
        Items::Wide => tile_worklist::tile_worklist_u32x4,
        Items::Packed6 => tile_worklist::tile_worklist_packed6,
    };
    let grid = Grid {
        blocks: (capacity as u32).div_ceil(THREADS).min(blocks.max(1)),
        shared_bytes: shared_bytes(experts as u32),
    };
    let args = tile_worklist::Args {
        expert_offsets: expert_offsets.as_ref(),
        gate,
        up,
        worklist: worklist.as_mut(),
        total: total.as_mut(),
        capacity: capacity as u32,
        experts: experts as u32,
        n_tiles: n_tiles as u32,
        m_tile: m_tile as u32,
    };
    launch(&**device, kernel, grid, args)
}
