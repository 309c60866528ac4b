//! e4m3 activations to f16, exactly, in the order that [`super::operand::Widened`] is read in. A row serves the tiles of all its
//! experts, so this costs little beside the products.

use super::operand::widened_stride;
use core::num::NonZeroUsize;
use cuda_std::arch::Arch;
use cuda_std::memory::{In, Out};
use cuda_std::thread::{block_dim, block_idx, grid_dim, thread_idx};
use cuda_std::{cvt, kernels};

/// Threads of a block.
pub const THREADS: u32 = 256;

kernels! {
    /// Widens whole rows. Grid: any.
    pub mod widen_e4m3(
        /// [rows, k] codes.
        codes: In<u8>,
        /// [rows, widened_stride(k)] f16.
        out: Out<u16>,
        /// Rows.
        rows: u32,
        /// Columns.
        k: u32,
    );
    widen_e4m3_f16[THREADS, 4] = |A| body::<A>;
}

#[inline(always)]
fn body<A: Arch>(codes: In<u8>, out: Out<u16>, rows: u32, k: u32) {
    let (k, stride) = (k as usize, widened_stride(k as usize));
    let groups = NonZeroUsize::new(stride / 16).unwrap_or(NonZeroUsize::MIN);
    let total = rows as usize * groups.get();
    let step = grid_dim() as usize * block_dim() as usize;
    let mut at = block_idx() as usize * block_dim() as usize + thread_idx() as usize;
    while at < total {
        let (row, group) = (at / groups, at % groups * 16);
        let from = row * k + group;
        let words = if k.is_multiple_of(16) {
            codes.load_v4(from)
        } else {
            let byte = |i: usize| if group + i < k { codes.load(from + i) as u32 } else { 0 };
            [0, 4, 8, 12].map(|i| byte(i) | byte(i + 1) << 8 | byte(i + 2) << 16 | byte(i + 3) << 24)
        };
        let [a, b, c, d] = words.map(cvt::e4m3x4_to_f16x4::<A>);
        out.store_v4(row * stride + group, [a[0], b[0], c[0], d[0]]);
        out.store_v4(row * stride + group + 8, [a[1], b[1], c[1], d[1]]);
        at += step;
    }
}
