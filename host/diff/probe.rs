//! Kernels that apply one function of the real kernels to many values. They are not part of the embedded modules: only the emulator
//! runs them.

use cuda_std::arch::Arch;
use cuda_std::memory::{In, Out};
use cuda_std::mma::m16n8k16;
use cuda_std::thread::{WARP, block_dim, block_idx, lane, thread_idx};
use cuda_std::{cvt, kernels, math, sync};
use kernels_gpu::dequant::Activation;
use kernels_gpu::layout::scale::{padded_cols, swizzled_offset};
use kernels_gpu::order::Seed;

/// Threads of a block of the element-wise kernels.
pub const THREADS: u32 = 128;
/// Elements of a block of the mma kernels: one for each column of a result.
pub const MMA_ELEMENTS: usize = 8;

pub use cuda_std::mma::{Bf16, F16};

/// The element of this thread; may lie beyond the end.
fn element() -> usize {
    block_idx() as usize * block_dim() as usize + thread_idx() as usize
}

kernels! {
    /// e^x.
    pub mod exp(
        /// Arguments.
        x: In<f32>,
        /// Results.
        y: Out<f32>,
        /// Number of elements.
        n: u32,
    );
    probe_exp[THREADS, 1] = |_A| exp_body;
}

fn exp_body(x: In<f32>, y: Out<f32>, n: u32) {
    let i = element();
    if i < n as usize {
        y.store(i, math::exp(x.load(i)));
    }
}

kernels! {
    /// f32 to e4m3.
    pub mod e4m3_encode(
        /// Values.
        x: In<f32>,
        /// Codes.
        codes: Out<u8>,
        /// Number of elements.
        n: u32,
    );
    probe_e4m3_encode[THREADS, 1] = |A| e4m3_encode_body::<A>;
}

fn e4m3_encode_body<A: Arch>(x: In<f32>, codes: Out<u8>, n: u32) {
    let i = element();
    if i < n as usize {
        // Either half of the packed form has its turn.
        let value = x.load(i);
        let code = if i.is_multiple_of(2) {
            cvt::f32x2_to_e4m3x2::<A>(value, 1.0)
        } else {
            cvt::f32x2_to_e4m3x2::<A>(1.0, value) >> 8
        };
        codes.store(i, code as u8);
    }
}

kernels! {
    /// Codes to f32, as the mma operands of a layer are made: e4m3 block scales, or E2M1 weights (one a byte).
    pub mod decode(
        /// Codes.
        codes: In<u8>,
        /// Values.
        y: Out<f32>,
        /// Number of elements.
        n: u32,
    );
    probe_e4m3_decode_bf16[THREADS, 1] = |A| e4m3_decode_body::<Bf16, A>;
    probe_e4m3_decode_f16[THREADS, 1] = |A| e4m3_decode_body::<F16, A>;
    probe_e2m1_decode_bf16[THREADS, 1] = |A| e2m1_decode_body::<Bf16, A>;
    probe_e2m1_decode_f16[THREADS, 1] = |A| e2m1_decode_body::<F16, A>;
}

fn e4m3_decode_body<T: Activation, A: Arch>(codes: In<u8>, y: Out<f32>, n: u32) {
    let i = element();
    if i < n as usize {
        let code = codes.load(i) as u16;
        let pair = if i.is_multiple_of(2) { T::e4m3::<A>(code)[0] } else { T::e4m3::<A>(code << 8)[1] };
        y.store(i, T::widen(pair as u16));
    }
}

fn e2m1_decode_body<T: Activation, A: Arch>(codes: In<u8>, y: Out<f32>, n: u32) {
    let i = element();
    if i < n as usize {
        // Every place of a word of eight has its turn; the results are the pairs (0, 2), (1, 3), (4, 6), (5, 7).
        let place = i % 8;
        let pairs = T::decode::<Seed, A>((codes.load(i) as u32 & 0xf) << (4 * place)).map(T::whole::<A>);
        let pair = pairs[place / 4 * 2 + place % 2];
        y.store(i, T::widen(if place % 4 < 2 { pair as u16 } else { (pair >> 16) as u16 }));
    }
}

kernels! {
    /// Row-major scales into the 128x4 swizzle; padding stays as it is.
    pub mod swizzle(
        /// [rows, cols] bytes.
        linear: In<u8>,
        /// Swizzled bytes.
        swizzled: Out<u8>,
        /// Rows.
        rows: u32,
        /// Columns.
        cols: u32,
    );
    probe_swizzle[THREADS, 1] = |_A| swizzle_body;
}

fn swizzle_body(linear: In<u8>, swizzled: Out<u8>, rows: u32, cols: u32) {
    let i = element();
    if i < rows as usize * cols as usize {
        let (row, col) = (i / cols as usize, i % cols as usize);
        swizzled.store(swizzled_offset(row, col, padded_cols(cols as usize)), linear.load(i));
    }
}

kernels! {
    /// d[i] = c[i] + Σ a[i][k]·b[i][k]: element i is the diagonal element i mod 8 of one m16n8k16.
    pub mod mma(
        /// [n, 16].
        a: In<u16>,
        /// [n, 16].
        b: In<u16>,
        /// `[n]`.
        c: In<f32>,
        /// `[n]`.
        d: Out<f32>,
        /// Number of elements.
        n: u32,
    );
    probe_mma_bf16[WARP, 1] = |_A| mma_body::<Bf16>;
    probe_mma_f16[WARP, 1] = |_A| mma_body::<F16>;
}

fn mma_body<T: Activation>(a: In<u16>, b: In<u16>, c: In<f32>, d: Out<f32>, n: u32) {
    let first = block_idx() as usize * MMA_ELEMENTS;
    let (g, t) = ((lane() / 4) as usize, (lane() % 4) as usize);
    // Rows 8 to 15 of A repeat rows 0 to 7, in the order backwards.
    let pair = |from: In<u16>, row: usize, k: usize| {
        let at = (first + row) * 16 + k;
        if first + row < n as usize { from.load(at) as u32 | (from.load(at + 1) as u32) << 16 } else { 0 }
    };
    let other = MMA_ELEMENTS - 1 - g;
    let a = [pair(a, g, 2 * t), pair(a, other, 2 * t), pair(a, g, 2 * t + 8), pair(a, other, 2 * t + 8)];
    let b = [pair(b, g, 2 * t), pair(b, g, 2 * t + 8)];
    let start = |column: usize| if first + column < n as usize { c.load(first + column) } else { 0.0 };
    let c = [start(2 * t), start(2 * t + 1), start(2 * t), start(2 * t + 1)];
    sync::converge();
    let sum = m16n8k16::<T>(a, b, c);
    // Even elements come from the upper half of the tile, odd ones from the lower.
    let mut i = 0;
    while i < 2 {
        let column = 2 * t + i;
        let row = if column % 2 == 0 { g } else { other };
        if row == column && first + column < n as usize {
            d.store(first + column, if column % 2 == 0 { sum[i] } else { sum[2 + i] });
        }
        i += 1;
    }
}
