//! A layer for very few tokens in two kernels, straight from the top-k ids: no routing table, no partial results in memory. Every
//! pair is an entry of its own, so that two tokens of one expert read its weights twice (once from L2).
//!
//! The sums are those of [`crate::fc1`], [`crate::fc2`] and [`crate::combine`] in the order [`Decode`]: not a bit differs.
//!
//! FC1 as [`crate::fc1`]: four warps of a block share a tile of 16 rows along k. The tokens' activations lie in shared memory.
//! FC2: a block takes a tile of 16 output rows, warp w the slots w, w + 8, …; the block then adds the slots up in their order.

use crate::dequant::{Activation, Format, Mxfp4, Nvfp4, folds};
use crate::fc1::{UpAndGate, join, unit_columns};
use crate::fc2::OutputRows;
use crate::layout::permute::{position, row_stride, word_position};
use crate::layout::tile::tile_rows;
use crate::order::{Decode, Order};
use crate::route_prep::finite;
use crate::schedule::{Rows, Schedule, Tiles, Unit, Work};
use crate::status;
use crate::stream::{Feed, ROWS, SEGMENT, Weights, ring_bytes};
use crate::tensor::{self, multiply, reload};
use core::num::NonZeroU32;
use cuda_std::arch::Arch;
use cuda_std::cvt::f32_to_bf16;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_dim, block_idx, grid_dim, lane, thread_idx, warp};
use cuda_std::{dependent, kernels, sync};

/// Warps of a block of FC1: partial sums of a unit.
const SPLIT: u32 = 4;
/// Warps of a block of FC2.
const WARPS: u32 = 8;
/// Bytes of a warp's partial sums: 16 rows by 8 columns of f32.
const PARTIAL_BYTES: u32 = 32 * 16;
/// Most slots of a token.
const MAX_TOP_K: u32 = 32;
/// Bytes of one set of a tile's results: 16 rows a slot.
const RESULT_BYTES: u32 = MAX_TOP_K * ROWS * 4;

/// Bytes of shared memory of a block of FC1: rings, two sets of partial sums, the tokens' activations.
pub const fn fc1_shared_bytes<F: Format>(tokens: u32, hidden: u32) -> u32 {
    x_base::<F>() + tokens * row_stride(hidden as usize) as u32 * 2
}

/// Bytes of shared memory of a block of FC2: rings, two sets of results.
pub const fn fc2_shared_bytes<F: Format>() -> u32 {
    WARPS * ring_bytes::<F>(1) + 2 * RESULT_BYTES
}

const fn x_base<F: Format>() -> u32 {
    SPLIT * (ring_bytes::<F>(1) + 2 * PARTIAL_BYTES)
}

kernels! {
    /// First projection and activation function of few tokens.
    pub mod fc1_direct(
        /// [M, top_k] expert ids.
        topk_ids: In<i32>,
        /// [M, hidden] activations.
        x: In<u16>,
        /// [E, 2·intermediate, hidden/2] codes: up rows, then gate rows.
        w13: In<u8>,
        /// [E, …] swizzled scales of w13.
        s13: In<u8>,
        /// [E, 2] global scales of w13: up, gate.
        alpha1: In<f32>,
        /// [E, 2·intermediate] biases in the order of the rows of w13, or null.
        b13: In<f32>,
        /// [M·top_k, row_stride(intermediate)] result in tensor-core order, zeros behind the last column.
        h: Out<u16>,
        /// `[1]` status bits.
        status: Out<u32>,
        /// Number of tokens M.
        tokens: u32,
        /// Experts of a token.
        top_k: u32,
        /// Number of experts E.
        experts: u32,
        /// Hidden size K.
        hidden: u32,
        /// Intermediate size I.
        intermediate: u32,
        /// [`crate::fc1::SILU`] or [`crate::fc1::SWIGLU_OAI`].
        gating: u32,
        /// Factor inside the sigmoid: 1 for silu.
        factor: f32,
        /// Clamp of gate and up; infinite for none.
        limit: f32,
    );
    fc1_direct_bf16_bf16[32 * SPLIT, 4, early] = |A| fc1_body::<Bf16, Bf16, Nvfp4, A>;
    fc1_direct_bf16_f16[32 * SPLIT, 4, early] = |A| fc1_body::<Bf16, F16, Nvfp4, A>;
    fc1_direct_f16_f16[32 * SPLIT, 4, early] = |A| fc1_body::<F16, F16, Nvfp4, A>;
    fc1_direct_mxfp4_bf16_bf16[32 * SPLIT, 4, early] = |A| fc1_body::<Bf16, Bf16, Mxfp4, A>;
    fc1_direct_mxfp4_bf16_f16[32 * SPLIT, 4, early] = |A| fc1_body::<Bf16, F16, Mxfp4, A>;
    fc1_direct_mxfp4_f16_f16[32 * SPLIT, 4, early] = |A| fc1_body::<F16, F16, Mxfp4, A>;
}

kernels! {
    /// Second projection of few tokens, and the sum over their experts.
    pub mod fc2_direct(
        /// [M, top_k] expert ids.
        topk_ids: In<i32>,
        /// [M, top_k] weights of the experts.
        topk_weights: In<f32>,
        /// [M·top_k, row_stride(intermediate)] activations in tensor-core order.
        h: In<u16>,
        /// [E, output, intermediate/2] codes.
        w2: In<u8>,
        /// [E, …] swizzled scales of w2.
        s2: In<u8>,
        /// `[E]` global scales of w2.
        alpha2: In<f32>,
        /// [E, output] biases, or null.
        b2: In<f32>,
        /// [M, output] bf16.
        out: Out<u16>,
        /// Number of tokens M.
        tokens: u32,
        /// Experts of a token, at most 32.
        top_k: u32,
        /// Number of experts E.
        experts: u32,
        /// Intermediate size I.
        intermediate: u32,
        /// Output width H.
        output: u32,
    );
    fc2_direct_bf16[32 * WARPS, 2, early] = |A| fc2_body::<Bf16, Nvfp4, A>;
    fc2_direct_f16[32 * WARPS, 2, early] = |A| fc2_body::<F16, Nvfp4, A>;
    fc2_direct_mxfp4_bf16[32 * WARPS, 2, early] = |A| fc2_body::<Bf16, Mxfp4, A>;
    fc2_direct_mxfp4_f16[32 * WARPS, 2, early] = |A| fc2_body::<F16, Mxfp4, A>;
}

/// The units of a block of FC1: entries are pairs.
#[derive(Clone, Copy)]
struct Fc1 {
    schedule: Schedule,
    topk_ids: In<i32>,
    experts: u32,
    intermediate: u32,
}

impl Fc1 {
    /// The expert of a pair, or E and more for none.
    #[inline(always)]
    fn id(&self, pair: u32) -> u32 {
        self.topk_ids.load(pair as usize) as u32
    }
}

impl Work for Fc1 {
    #[inline(always)]
    fn has(&self, unit: Unit) -> bool {
        self.schedule.has(unit)
    }
    #[inline(always)]
    fn next(&self, unit: Unit) -> Unit {
        self.schedule.next(unit)
    }
    /// A skipped pair reads expert 0, and nothing of it is stored.
    #[inline(always)]
    fn expert(&self, unit: Unit) -> u32 {
        let id = self.id(unit.entry);
        if id < self.experts { id } else { 0 }
    }
    #[inline(always)]
    fn rows(&self, unit: Unit, j: u32) -> Rows {
        UpAndGate { unit_columns: unit_columns(1), intermediate: self.intermediate }.rows(unit.tile, j)
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn fc1_body<X: Activation, T: Activation, F: Format, A: Arch>(
    topk_ids: In<i32>,
    x: In<u16>,
    w13: In<u8>,
    s13: In<u8>,
    alpha1: In<f32>,
    b13: In<f32>,
    h: Out<u16>,
    status: Out<u32>,
    tokens: u32,
    top_k: u32,
    experts: u32,
    hidden: u32,
    intermediate: u32,
    gating: u32,
    factor: f32,
    limit: f32,
) {
    // FC2 reads the ids before this kernel has ended: only after the wait are they complete.
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    let weights = Weights { codes: w13, scales: s13, rows: 2 * intermediate, k: hidden };
    let segments = Decode::segments(warp(), SPLIT, hidden.div_ceil(SEGMENT));
    let (begin, step, count) = segments;
    let pairs = tokens * top_k;
    let (schedule, first) = Schedule::new(pairs, intermediate / unit_columns(1), grid_dim(), block_idx());
    let work = Fc1 { schedule, topk_ids, experts, intermediate };
    let mut feed = Feed::<F, Decode, _, 1>::start(warp() * ring_bytes::<F>(1), weights, work, first, segments);

    let x_stride = row_stride(hidden as usize) as u32;
    let shared_x = Shared::<u16>::at(x_base::<F>(), tokens * x_stride);
    let mut bits = 0;
    share_x::<X, T>(x, shared_x, tokens, hidden, |token| {
        let mut slot = 0;
        while slot < top_k && work.id(token * top_k + slot) >= experts {
            slot += 1;
        }
        if slot < top_k {
            bits |= status::F16_RANGE;
        }
    });
    let h_stride = row_stride(intermediate as usize) as u32;
    zero_h(h, pairs, intermediate, h_stride, |pair| work.id(pair) >= experts);
    if block_idx() == 0 && thread_idx() < pairs {
        let mut pair = thread_idx();
        while pair < pairs {
            let id = topk_ids.load(pair as usize);
            if id >= 0 && id as u32 >= experts {
                bits |= status::BAD_EXPERT_ID;
            }
            pair += block_dim();
        }
    }
    sync::sync_threads();

    let (g, t) = (lane() / 4, lane() % 4);
    let per_token = NonZeroU32::new(top_k).unwrap_or(NonZeroU32::MIN);
    let mut unit = first;
    let mut turn = 0;
    while work.has(unit) {
        let pair = unit.entry;
        let id = work.id(pair);
        let live = id < experts;
        let expert = if live { id as usize } else { 0 };
        let (alpha_up, alpha_gate) = (alpha1.load(2 * expert), alpha1.load(2 * expert + 1));
        // Every column is the same token, so that any of them is the result.
        let mut at = pair / per_token * x_stride + begin * SEGMENT + t * 8;
        let mut sums = [[[0.0; 4]; 1]; 1];
        let mut left = count;
        while left > 0 {
            left -= 1;
            feed.wait();
            let chunk = feed.read::<0>();
            let mut columns = [columns_of(shared_x, at)];
            multiply::<T, F, Decode, A, 1, 1>(&chunk, &mut columns, |_, _| {}, false, &mut sums);
            let chunk = feed.read::<1>();
            feed.refill();
            let mut columns = [columns_of(shared_x, at + SEGMENT / 2)];
            multiply::<T, F, Decode, A, 1, 1>(&chunk, &mut columns, |_, _| {}, false, &mut sums);
            at += step * SEGMENT;
        }

        // As in `fc1`: two sets of partial sums, and a reducing warp that moves on.
        let partials =
            Shared::<f32>::at(SPLIT * ring_bytes::<F>(1) + turn % 2 * SPLIT * PARTIAL_BYTES, SPLIT * PARTIAL_BYTES / 4);
        partials.store_v4((warp() * 32 + lane()) * 4, sums[0][0].map(f32::to_bits));
        sync::sync_threads();
        if warp() == turn % SPLIT {
            let part = |w: u32| partials.load_v4((w * 32 + lane()) * 4).map(f32::from_bits);
            let [a, b, c, d] = [part(0), part(1), part(2), part(3)];
            let (mut up, mut gate) = (a[0] + b[0] + c[0] + d[0], a[2] + b[2] + c[2] + d[2]);
            if folds::<F, Decode>() {
                (up, gate) = (up * T::UNFOLD, gate * T::UNFOLD);
            }
            let (column, step) = tile_rows(unit.tile, g % 4, unit_columns(1), intermediate);
            let column = (column + g / 4 * step) as usize;
            (up, gate) = (alpha_up * up, alpha_gate * gate);
            if !b13.is_null() {
                let at = 2 * expert * intermediate as usize + column;
                (up, gate) = (up + b13.load(at), gate + b13.load(at + intermediate as usize));
            }
            let value = join(up, gate, gating, factor, limit);
            let result = T::round(value);
            if live && t == 0 {
                if !T::BF16 && value.abs() < f32::INFINITY && result & 0x7FFF == 0x7C00 {
                    bits |= status::F16_RANGE;
                }
                h.store(pair as usize * h_stride as usize + position::<Decode>(column), result);
            }
        }
        turn += 1;
        unit = work.next(unit);
    }
    if bits != 0 {
        status.atomic_or(0, bits);
    }
}

/// A lane's activations of the chunk from element `at` on.
#[inline(always)]
fn columns_of(x: Shared<u16>, at: u32) -> tensor::Columns {
    [x.load_v4(at), x.load_v4(at + 32), x.load_v4(at + 64), x.load_v4(at + 96)]
}

/// Copies the tokens' activations into shared memory in tensor-core order, zeros behind the last. `overflows` is called with the
/// token of a finite element that becomes infinite.
#[inline(always)]
fn share_x<X: Activation, T: Activation>(
    x: In<u16>,
    shared: Shared<u16>,
    tokens: u32,
    hidden: u32,
    mut overflows: impl FnMut(u32),
) {
    let words = NonZeroU32::new(row_stride(hidden as usize) as u32 / 8).unwrap_or(NonZeroU32::MIN);
    let all = tokens * words.get();
    let mut first = thread_idx();
    while first < all {
        // Eight loads are under way before the first is used.
        let loaded = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| {
            let at = first + i * block_dim();
            // hidden is a multiple of 16, so a group of eight is whole or absent.
            if at < all && at % words * 8 < hidden {
                x.load_v4((at / words * hidden + at % words * 8) as usize)
            } else {
                [0; 4]
            }
        });
        let mut i = 0;
        while i < 8 {
            let at = first + i * block_dim();
            let v = loaded[i as usize];
            let convert = |i: usize| {
                let bits = (v[i / 2] >> (i % 2 * 16)) as u16;
                if X::BF16 == T::BF16 {
                    (bits, false)
                } else {
                    let to = T::round(X::widen(bits));
                    (to, finite::<X>(bits) && !finite::<T>(to))
                }
            };
            let converted = [0, 1, 2, 3, 4, 5, 6, 7].map(convert);
            let out = Decode::PAIRS.map(|(low, high)| converted[low].0 as u32 | (converted[high].0 as u32) << 16);
            if at < all {
                if converted.iter().any(|&(_, infinite)| infinite) {
                    overflows(at / words);
                }
                shared.store_v4(word_position(at as usize) as u32 * 8, out);
            }
            i += 1;
        }
        first += 8 * block_dim();
    }
}

/// Zeros behind the last element of each row of h, and in the whole row of a skipped pair: FC2 multiplies it by some weights.
#[inline(always)]
fn zero_h(h: Out<u16>, pairs: u32, intermediate: u32, stride: u32, skipped: impl Fn(u32) -> bool) {
    let words = NonZeroU32::new(stride / 8).unwrap_or(NonZeroU32::MIN);
    let mut at = block_idx() * block_dim() + thread_idx();
    while at < pairs * words.get() {
        let (pair, word) = (at / words, at % words);
        if word * 8 >= intermediate || skipped(pair) {
            h.store_v4(word_position(at as usize) * 8, [0; 4]);
        }
        at += grid_dim() * block_dim();
    }
}

/// The units of a warp of FC2: entry e of a unit is slot e of its token, and its tile counts the tiles of all tokens.
#[derive(Clone, Copy)]
struct Fc2 {
    topk_ids: In<i32>,
    /// Tiles of a token.
    tiles: NonZeroU32,
    /// Tiles of all tokens.
    all: u32,
    top_k: u32,
    experts: u32,
    output: u32,
}

impl Fc2 {
    #[inline(always)]
    fn pair(&self, unit: Unit) -> u32 {
        unit.tile / self.tiles * self.top_k + unit.entry
    }
    #[inline(always)]
    fn id(&self, pair: u32) -> u32 {
        self.topk_ids.load(pair as usize) as u32
    }
}

impl Work for Fc2 {
    #[inline(always)]
    fn has(&self, unit: Unit) -> bool {
        unit.tile < self.all && unit.entry < self.top_k
    }
    #[inline(always)]
    fn next(&self, unit: Unit) -> Unit {
        if unit.entry + WARPS < self.top_k {
            Unit { entry: unit.entry + WARPS, ..unit }
        } else {
            Unit { entry: warp(), tile: unit.tile + grid_dim() }
        }
    }
    #[inline(always)]
    fn expert(&self, unit: Unit) -> u32 {
        let id = self.id(self.pair(unit));
        if id < self.experts { id } else { 0 }
    }
    #[inline(always)]
    fn rows(&self, unit: Unit, j: u32) -> Rows {
        OutputRows { unit_rows: ROWS, output: self.output }.rows(unit.tile % self.tiles, j)
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn fc2_body<T: Activation, F: Format, A: Arch>(
    topk_ids: In<i32>,
    topk_weights: In<f32>,
    h: In<u16>,
    w2: In<u8>,
    s2: In<u8>,
    alpha2: In<f32>,
    b2: In<f32>,
    out: Out<u16>,
    tokens: u32,
    top_k: u32,
    experts: u32,
    intermediate: u32,
    output: u32,
) {
    let weights = Weights { codes: w2, scales: s2, rows: output, k: intermediate };
    let count = intermediate.div_ceil(SEGMENT);
    let tiles = NonZeroU32::new(output.div_ceil(ROWS)).unwrap_or(NonZeroU32::MIN);
    let work = Fc2 { topk_ids, tiles, all: tokens * tiles.get(), top_k, experts, output };
    let mut unit = Unit { entry: warp(), tile: block_idx() };
    let ring = warp() * ring_bytes::<F>(1);
    let mut feed = Feed::<F, Decode, _, 1>::start(ring, weights, work, unit, (0, 1, count));

    let (g, t) = (lane() / 4, lane() % 4);
    let stride = row_stride(intermediate as usize) as u32;
    let row_of = |unit: Unit| h.skip(work.pair(unit) as usize * stride as usize + (t * 8) as usize);
    let mut at = [row_of(unit)];
    let mut columns = [[[0; 4]; 4]];
    // Weights are on their way, and the ids were complete before FC1 let this kernel start; h is complete from here on.
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    if work.has(unit) {
        columns = [tensor::columns(at[0])];
    }
    let mut turn = 0;
    let mut tile = block_idx();
    while tile < work.all {
        let results = Shared::<f32>::at(WARPS * ring_bytes::<F>(1) + turn % 2 * RESULT_BYTES, RESULT_BYTES / 4);
        while unit.tile == tile && unit.entry < top_k {
            let next = work.next(unit);
            let more = work.has(next);
            let pair = work.pair(unit) as usize;
            let expert = work.expert(unit) as usize;
            let (alpha, weight) = (alpha2.load(expert), topk_weights.load(pair));
            let mut sums = [[[0.0; 4]; 1]; 1];
            let mut left = count;
            while left > 0 {
                left -= 1;
                feed.wait();
                let chunk = feed.read::<0>();
                let second = [at[0].skip(SEGMENT as usize / 2)];
                multiply::<T, F, Decode, A, 1, 1>(
                    &chunk,
                    &mut columns,
                    |x, w| reload(x, second, w, false),
                    false,
                    &mut sums,
                );
                let chunk = feed.read::<1>();
                feed.refill();
                if left > 0 {
                    at = [at[0].skip(SEGMENT as usize)];
                } else if more {
                    at = [row_of(next)];
                }
                multiply::<T, F, Decode, A, 1, 1>(
                    &chunk,
                    &mut columns,
                    |x, w| reload(x, at, w, false),
                    false,
                    &mut sums,
                );
            }
            // Every column is the same pair.
            if t == 0 {
                let (row, step) = tile_rows(tile % tiles, g % 4, ROWS, output);
                let scaled = |sum: f32, row: u32| {
                    let sum = if folds::<F, Decode>() { sum * T::UNFOLD } else { sum };
                    if b2.is_null() || row >= output {
                        alpha * weight * sum
                    } else {
                        (alpha * sum + b2.load(expert * output as usize + row as usize)) * weight
                    }
                };
                let [upper, _, lower, _] = sums[0][0];
                results.store(unit.entry * ROWS + g, scaled(upper, row + g / 4 * step));
                results.store(unit.entry * ROWS + g + 8, scaled(lower, row + (g / 4 + 2) * step));
            }
            unit = next;
        }
        // Two sets of results: one barrier a tile.
        sync::sync_threads();
        if thread_idx() < ROWS {
            let r = thread_idx();
            let (row, step) = tile_rows(tile % tiles, r % 4, ROWS, output);
            let row = row + r / 4 * step;
            let token = tile / tiles;
            let mut sum = 0.0;
            let mut slot = 0;
            while slot < top_k {
                if work.id(token * top_k + slot) < experts {
                    sum += results.load(slot * ROWS + r);
                }
                slot += 1;
            }
            if row < output {
                out.store(token as usize * output as usize + row as usize, f32_to_bf16(sum));
            }
        }
        turn += 1;
        tile += grid_dim();
    }
}
