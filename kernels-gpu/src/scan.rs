//! Prefix sum over the threads of a block.

use cuda_std::shared::Shared;
use cuda_std::thread::{lane, warp};
use cuda_std::{sync, warp as lanes};

/// Threads of a block.
pub const THREADS: u32 = 1024;
/// Words of shared memory that a sum takes.
pub const WORDS: u32 = 64;

/// Sum of `own` over the threads before this one, and over all. All [`THREADS`] threads take part, and what they wrote to shared memory
/// before is seen by all of them behind it.
#[inline(always)]
pub fn exclusive(own: u32, sums: Shared<u32>) -> (u32, u32) {
    let through = lanes::inclusive_scan(own);
    if lane() == 31 {
        sums.store(warp(), through);
    }
    sync::sync_threads();
    if warp() == 0 {
        let sum = sums.load(lane());
        let before_warp = lanes::inclusive_scan(sum) - sum;
        sums.store(lane(), before_warp);
        if lane() == 31 {
            sums.store(32, before_warp + sum);
        }
    }
    sync::sync_threads();
    (sums.load(warp()) + through - own, sums.load(32))
}
