//! Indices. Launches are one-dimensional: grids go to 2^31-1 blocks in x, and the 65,535 limit of y and z never applies.

use crate::imp;

/// Lanes of a warp.
pub const WARP: u32 = 32;

/// Index of this thread in its block.
#[inline(always)]
pub fn thread_idx() -> u32 {
    imp::thread_idx()
}

/// Threads of a block.
#[inline(always)]
pub fn block_dim() -> u32 {
    imp::block_dim()
}

/// Index of this block in the grid.
#[inline(always)]
pub fn block_idx() -> u32 {
    imp::block_idx()
}

/// Blocks of the grid.
#[inline(always)]
pub fn grid_dim() -> u32 {
    imp::grid_dim()
}

/// Index of this thread in its warp, 0 to 31.
#[inline(always)]
pub fn lane() -> u32 {
    thread_idx() % WARP
}

/// Index of this warp in its block.
#[inline(always)]
pub fn warp() -> u32 {
    thread_idx() / WARP
}
