//! Results at sorted rows back to tokens, and the shared expert.
//!
//! Pair p = token·top_k + slot has its result in row `token_to_perm[p]` of y. A row below 0, or not below the number of live rows
//! `expert_offsets[E]`, is skipped and not read; a weight of 0 is no reason to skip.
//!
//! - unpermute_reduce: `out = bf16(((0 + w·y[slot 0]) + w·y[slot 1]) + …)`, f32, slots ascending.
//! - blend: `out = bf16(out + g·shared)`.
//! - unpermute_blend: the two, with the bytes of the two.
//! - weighted_sum_blend: the sum of unpermute_reduce, then `+ g·shared`, with one rounding.
//!
//! g is sigmoid(x · gate_w), or 1 without gate_w. The dot product has 256 partial sums, k ≡ i modulo 256 ascending; 32 of them are
//! added by a tree of distances 16, 8, 4, 2, 1, and the eight results in order.

use core::num::NonZeroU32;
use cuda_std::cvt::{bf16_to_f32, f32_to_bf16, f32x2_to_bf16x2};
use cuda_std::kernels;
use cuda_std::math::sigmoid;
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_idx, grid_dim, lane, thread_idx, warp};
use cuda_std::{sync, warp as lanes};

/// Threads of a block: partial sums of the dot product.
pub const THREADS: u32 = 256;
/// Columns of a thread where the output width is a multiple of it.
pub const COLUMNS: u32 = 8;
/// Bytes of shared memory where there is a dot product: one sum a warp.
pub const SHARED_BYTES: u32 = THREADS / 32 * 4;

kernels! {
    /// Sum over a token's experts. Grid: any.
    pub mod unpermute_reduce(
        /// [rows, output] bf16 results at sorted rows.
        y: In<u16>,
        /// [M·top_k] row of each pair.
        token_to_perm: In<i32>,
        /// [M·top_k] weights.
        weights: In<f32>,
        /// `[E + 1]`; the last is the number of live rows.
        expert_offsets: In<i32>,
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
    unpermute_reduce_bf16[THREADS, 3] = |_A| reduce_body;
}

kernels! {
    /// Adds the shared expert. Grid: any.
    pub mod blend(
        /// [M, output] bf16.
        routed: In<u16>,
        /// [M, output] bf16.
        shared: In<u16>,
        /// [M, hidden] bf16.
        x: In<u16>,
        /// `[hidden]` bf16. May be null.
        gate_w: In<u16>,
        /// [M, output] bf16, the same as `routed` if you like.
        out: Out<u16>,
        /// Number of tokens M.
        tokens: u32,
        /// Output width H.
        output: u32,
        /// Columns of x.
        hidden: u32,
    );
    blend_bf16[THREADS, 4] = |_A| blend_body;
}

kernels! {
    /// Sum over a token's experts and the shared expert. Grid: any.
    pub mod unpermute_blend(
        /// [rows, output] bf16 results at sorted rows.
        y: In<u16>,
        /// [M·top_k] row of each pair.
        token_to_perm: In<i32>,
        /// [M·top_k] weights.
        weights: In<f32>,
        /// `[E + 1]`; the last is the number of live rows.
        expert_offsets: In<i32>,
        /// [M, output] bf16.
        shared: In<u16>,
        /// [M, hidden] bf16.
        x: In<u16>,
        /// `[hidden]` bf16. May be null.
        gate_w: In<u16>,
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
        /// Columns of x.
        hidden: u32,
    );
    unpermute_blend_bf16[THREADS, 3] = |_A| unpermute_blend_body::<false>;
    weighted_sum_blend_bf16[THREADS, 3] = |_A| unpermute_blend_body::<true>;
}

/// Results at sorted rows.
#[derive(Clone, Copy)]
struct Routed {
    y: In<u16>,
    token_to_perm: In<i32>,
    weights: In<f32>,
    top_k: u32,
    output: u32,
    /// Number of live rows.
    live: i32,
}

impl Routed {
    /// Weighted sum of a token's results, eight columns or one from `column` on.
    #[inline(always)]
    fn sum(self, token: u32, column: u32, wide: bool) -> [f32; 8] {
        let mut sum = [0.0f32; 8];
        let first = token as usize * self.top_k as usize;
        let mut slot = 0;
        while slot < self.top_k {
            // Eight pairs at a time: all their loads are under way before the first sum waits for one.
            let rows = [0, 1, 2, 3, 4, 5, 6, 7]
                .map(|i| if slot + i < self.top_k { self.token_to_perm.load(first + (slot + i) as usize) } else { -1 });
            let used = rows.map(|row| row >= 0 && row < self.live);
            let weights = [0, 1, 2, 3, 4, 5, 6, 7]
                .map(|i| if used[i] { self.weights.load(first + slot as usize + i) } else { 0.0 });
            let values = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| {
                let at = rows[i] as u32 as usize * self.output as usize + column as usize;
                if used[i] { load8(self.y, at, wide) } else { [0; 4] }
            });
            let mut i = 0;
            while i < 8 {
                if used[i] {
                    let v = widen8(values[i]);
                    let w = weights[i];
                    sum = [
                        sum[0] + w * v[0],
                        sum[1] + w * v[1],
                        sum[2] + w * v[2],
                        sum[3] + w * v[3],
                        sum[4] + w * v[4],
                        sum[5] + w * v[5],
                        sum[6] + w * v[6],
                        sum[7] + w * v[7],
                    ];
                }
                i += 1;
            }
            slot += 8;
        }
        sum
    }
}

/// Eight elements, two a word, or one.
#[inline(always)]
fn load8(from: In<u16>, at: usize, wide: bool) -> [u32; 4] {
    if wide { from.load_v4(at) } else { [from.load(at) as u32, 0, 0, 0] }
}

#[inline(always)]
fn store8(out: Out<u16>, at: usize, wide: bool, values: [f32; 8]) {
    if wide {
        out.store_v4(at, round8(values));
    } else {
        out.store(at, f32_to_bf16(values[0]));
    }
}

#[inline(always)]
fn widen8(words: [u32; 4]) -> [f32; 8] {
    [0, 1, 2, 3, 4, 5, 6, 7].map(|i: usize| {
        let word = words[i / 2];
        if i.is_multiple_of(2) { bf16_to_f32(word as u16) } else { f32::from_bits(word & 0xFFFF_0000) }
    })
}

#[inline(always)]
fn round8(values: [f32; 8]) -> [u32; 4] {
    [0, 2, 4, 6].map(|i| f32x2_to_bf16x2(values[i], values[i + 1]))
}

/// routed + g·shared.
#[inline(always)]
fn add8(routed: [f32; 8], g: f32, shared: [f32; 8]) -> [f32; 8] {
    [0, 1, 2, 3, 4, 5, 6, 7].map(|i| routed[i] + g * shared[i])
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn reduce_body(
    y: In<u16>,
    token_to_perm: In<i32>,
    weights: In<f32>,
    expert_offsets: In<i32>,
    out: Out<u16>,
    tokens: u32,
    top_k: u32,
    experts: u32,
    output: u32,
) {
    let wide = output.is_multiple_of(COLUMNS);
    let columns = if wide { COLUMNS } else { 1 };
    let routed = Routed { y, token_to_perm, weights, top_k, output, live: expert_offsets.load(experts as usize) };
    // (token, place) advances by a fixed step: one division at the start instead of one a place.
    let places = NonZeroU32::new(output / columns).unwrap_or(NonZeroU32::MIN);
    let start = block_idx() * THREADS + thread_idx();
    let step = grid_dim() * THREADS;
    let (mut token, mut place) = (start / places, start % places);
    while token < tokens {
        let column = place * columns;
        let to = token as usize * output as usize + column as usize;
        store8(out, to, wide, routed.sum(token, column, wide));
        token += step / places;
        place += step % places;
        if place >= places.get() {
            token += 1;
            place -= places.get();
        }
    }
}

/// How much of the shared expert a token gets. All threads of the block take part.
#[inline(always)]
fn shared_gate(x: In<u16>, gate_w: In<u16>, token: u32, hidden: u32) -> f32 {
    if gate_w.is_null() {
        return 1.0;
    }
    let sums = Shared::<f32>::at(0, THREADS / 32);
    let row = token as usize * hidden as usize;
    let mut partial = 0.0f32;
    let mut k = thread_idx();
    while k < hidden {
        // Four at a time, so that their loads are under way together.
        let products = [0, 1, 2, 3].map(|i| {
            let k = k + i * THREADS;
            if k < hidden { (x.load(row + k as usize), gate_w.load(k as usize)) } else { (0, 0) }
        });
        let mut i = 0;
        while i < 4 {
            if k + i * THREADS < hidden {
                partial += bf16_to_f32(products[i as usize].0) * bf16_to_f32(products[i as usize].1);
            }
            i += 1;
        }
        k += 4 * THREADS;
    }
    let mut distance = 16;
    while distance > 0 {
        partial += lanes::shfl_xor(partial, distance);
        distance /= 2;
    }
    if lane() == 0 {
        sums.store(warp(), partial);
    }
    sync::sync_threads();
    let mut dot = 0.0f32;
    let mut w = 0;
    while w < THREADS / 32 {
        dot += sums.load(w);
        w += 1;
    }
    // The next token's sums may not overwrite what others still read.
    sync::sync_threads();
    sigmoid(dot)
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn blend_body(
    routed: In<u16>,
    shared: In<u16>,
    x: In<u16>,
    gate_w: In<u16>,
    out: Out<u16>,
    tokens: u32,
    output: u32,
    hidden: u32,
) {
    let wide = output.is_multiple_of(COLUMNS);
    let columns = if wide { COLUMNS } else { 1 };
    let mut token = block_idx();
    while token < tokens {
        let g = shared_gate(x, gate_w, token, hidden);
        let mut column = thread_idx() * columns;
        while column < output {
            let at = token as usize * output as usize + column as usize;
            let sum = add8(widen8(load8(routed, at, wide)), g, widen8(load8(shared, at, wide)));
            store8(out, at, wide, sum);
            column += THREADS * columns;
        }
        token += grid_dim();
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn unpermute_blend_body<const ONE_ROUNDING: bool>(
    y: In<u16>,
    token_to_perm: In<i32>,
    weights: In<f32>,
    expert_offsets: In<i32>,
    shared: In<u16>,
    x: In<u16>,
    gate_w: In<u16>,
    out: Out<u16>,
    tokens: u32,
    top_k: u32,
    experts: u32,
    output: u32,
    hidden: u32,
) {
    let wide = output.is_multiple_of(COLUMNS);
    let columns = if wide { COLUMNS } else { 1 };
    let routed = Routed { y, token_to_perm, weights, top_k, output, live: expert_offsets.load(experts as usize) };
    let mut token = block_idx();
    while token < tokens {
        let g = shared_gate(x, gate_w, token, hidden);
        let mut column = thread_idx() * columns;
        while column < output {
            let at = token as usize * output as usize + column as usize;
            let other = load8(shared, at, wide);
            let mut sum = routed.sum(token, column, wide);
            if !ONE_ROUNDING {
                sum = widen8(round8(sum));
            }
            store8(out, at, wide, add8(sum, g, widen8(other)));
            column += THREADS * columns;
        }
        token += grid_dim();
    }
}
