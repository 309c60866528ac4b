//! Barriers.

use crate::imp;

/// Waits for all threads of the block and orders their memory accesses (`bar.sync 0`).
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    imp::sync_threads()
}

/// Waits for `threads` threads (whole warps) at barrier `id`, 1 to 15, and orders their memory accesses
/// (`barrier.sync id, threads`).
#[inline(always)]
#[track_caller]
pub fn sync_named(id: u32, threads: u32) {
    imp::sync_named(id, threads)
}

/// Waits for all lanes of the warp and orders their memory accesses (`bar.warp.sync -1`).
#[inline(always)]
#[track_caller]
pub fn sync_warp() {
    imp::sync_warp()
}

/// The convergence guard: keeps LLVM from copying the `mma` beside it into divergent branches. Same instruction as
/// [`sync_warp`], but kernels may not rely on it to order memory, and the emulator does not let them.
#[inline(always)]
#[track_caller]
pub fn converge() {
    imp::converge()
}
