//! Sum over a token's experts: `out[token] = bf16(((0 + y[pair 0]) + y[pair 1]) + …)`, f32, in the order of the slots.
//! Pairs whose id is outside 0..E are skipped, and their rows of y are never read: nothing has written them.

use core::num::NonZeroUsize;
use cuda_std::arch::Arch;
use cuda_std::cvt::f32_to_bf16;
use cuda_std::memory::{In, Out};
use cuda_std::thread::{block_dim, block_idx, grid_dim, thread_idx};
use cuda_std::{dependent, kernels};

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Columns of a thread where the output width is a multiple of it.
pub const COLUMNS: u32 = 4;

kernels! {
    /// Sum over experts.
    pub mod combine(
        /// [M, top_k] expert ids.
        topk_ids: In<i32>,
        /// [M·top_k, output] weighted results.
        y: In<f32>,
        /// [M, output] bf16.
        out: Out<u16>,
        /// Number of tokens M.
        tokens: u32,
        /// Experts of a token.
        top_k: u32,
        /// Number of experts E.
        experts: u32,
        /// Output width H.
        output: u32,
    );
    combine_f32_bf16[THREADS, 4, early] = |A| body::<A>;
}

#[inline(always)]
fn body<A: Arch>(topk_ids: In<i32>, y: In<f32>, out: Out<u16>, tokens: u32, top_k: u32, experts: u32, output: u32) {
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    let columns = if output.is_multiple_of(COLUMNS) { COLUMNS } else { 1 };
    // Dividing by a NonZero needs no check for zero, and so no panic in the kernel.
    let groups = NonZeroUsize::new((output / columns) as usize).unwrap_or(NonZeroUsize::MIN);
    let total = tokens as usize * groups.get();
    let step = grid_dim() as usize * block_dim() as usize;
    let mut at = block_idx() as usize * block_dim() as usize + thread_idx() as usize;
    while at < total {
        let token = at / groups;
        let column = (at % groups) * columns as usize;
        let mut sum = [0.0f32; 4];
        let mut slot = 0;
        while slot < top_k {
            // Eight pairs at a time: all their loads are under way before the first sum waits for one.
            let pairs = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| {
                let pair = token * top_k as usize + (slot + i) as usize;
                let used = slot + i < top_k && (topk_ids.load(pair) as u32) < experts;
                (pair * output as usize + column, used)
            });
            let values = pairs.map(|(from, used)| {
                if !used {
                    [0; 4]
                } else if columns == COLUMNS {
                    y.load_v4(from)
                } else {
                    [y.load(from).to_bits(), 0, 0, 0]
                }
            });
            let mut i = 0;
            while i < 8 {
                if pairs[i].1 {
                    let value = values[i].map(f32::from_bits);
                    sum = [sum[0] + value[0], sum[1] + value[1], sum[2] + value[2], sum[3] + value[3]];
                }
                i += 1;
            }
            slot += 8;
        }
        let to = token * output as usize + column;
        out.store(to, f32_to_bf16(sum[0]));
        if columns == COLUMNS {
            out.store(to + 1, f32_to_bf16(sum[1]));
            out.store(to + 2, f32_to_bf16(sum[2]));
            out.store(to + 3, f32_to_bf16(sum[3]));
        }
        at += step;
    }
}
