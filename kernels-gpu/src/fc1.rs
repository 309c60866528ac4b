//! Gate and up projections and what joins them. With g = min(alpha·gate + bias, limit) and u = clamp(alpha·up + bias, ±limit):
//! h = (g / (1 + exp(-g))) · u ([`SILU`]) or h = (u + 1) · (g · (1 / (1 + exp(-(factor·g))))) ([`SWIGLU_OAI`]).
//!
//! A unit of work is one entry (up to 8 pairs of one expert, or 16 for the wide kernels) times 8 or 16 intermediate columns: each 16
//! rows of the tile are eight of up and the same eight of gate, so that both halves of an output sit in one lane. The `SPLIT` warps
//! of a block share a unit along k, each with the segments that the order gives it, and the partial sums are added as
//! ((p0 + p1) + p2) + … . Blocks are persistent: block b takes units b, b + grid, … .

use crate::dequant::{Activation, Format, Mxfp4, Nvfp4, folds};
use crate::layout::permute::{position, row_stride};
use crate::layout::tile::tile_rows;
use crate::order::{Decode, Order, Seed};
use crate::route_prep::{GROUP, RECORD_WORDS, SLOT_WORDS};
use crate::schedule::{Entries, Rows, Schedule, Tiles, Unit, Work};
use crate::status;
use crate::stream::{Feed, SEGMENT, Weights, ring_bytes};
use crate::tensor::{self, multiply, reload};
use cuda_std::arch::Arch;
use cuda_std::math::{exp, max_nan, min_nan};
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_idx, grid_dim, lane, warp};
use cuda_std::{dependent, kernels, sync};

/// Intermediate columns of a unit whose tile has `tiles` times 16 rows.
pub const fn unit_columns(tiles: u32) -> u32 {
    8 * tiles
}
/// Warps that a multiprocessor holds.
const WARPS_PER_SM: u32 = 16;

/// Bytes of shared memory of a block: the rings, and two sets of partial sums.
pub const fn shared_bytes<F: Format>(split: u32, tiles: u32, groups: u32) -> u32 {
    split * (ring_bytes::<F>(tiles) + 2 * tiles * groups * PARTIAL_BYTES)
}

/// Joins gate and up by silu(g)·u.
pub const SILU: u32 = 0;
/// Joins gate and up as gpt-oss does: (u + 1)·(g·sigmoid(factor·g)).
pub const SWIGLU_OAI: u32 = 1;

/// A warp's partial sums: 16 rows by 8 columns of f32.
const PARTIAL_BYTES: u32 = 32 * 16;

kernels! {
    /// First projection and activation function.
    pub mod fc1(
        /// `[1]` number of entries.
        entry_count: In<u32>,
        /// [entries, RECORD_WORDS] records.
        entries: In<u32>,
        /// [entries, 8 or 16, SLOT_WORDS] slots.
        slots: In<u32>,
        /// [M, row_stride(hidden)] activations in tensor-core order.
        x: In<u16>,
        /// [E, 2·intermediate, hidden/2] codes: up rows, then gate rows.
        w13: In<u8>,
        /// [E, …] swizzled scales of w13.
        s13: In<u8>,
        /// [E, 2·intermediate] biases in the order of the rows of w13, or null.
        b13: In<f32>,
        /// [M·top_k, row_stride(intermediate)] result in tensor-core order.
        h: Out<u16>,
        /// `[1]` status bits.
        status: Out<u32>,
        /// Hidden size K.
        hidden: u32,
        /// Intermediate size I.
        intermediate: u32,
        /// [`SILU`] or [`SWIGLU_OAI`].
        gating: u32,
        /// Factor inside the sigmoid: 1 for [`SILU`].
        factor: f32,
        /// Clamp of gate and up; infinite for none.
        limit: f32,
    );
    fc1_seed_bf16_split1[32, WARPS_PER_SM, early] = |A| body::<Bf16, Nvfp4, Seed, A, 1, 1, 1>;
    fc1_seed_bf16_split2[64, WARPS_PER_SM / 2, early] = |A| body::<Bf16, Nvfp4, Seed, A, 2, 1, 1>;
    fc1_seed_bf16_split4[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Nvfp4, Seed, A, 4, 1, 1>;
    fc1_seed_bf16_split8[256, WARPS_PER_SM / 8, early] = |A| body::<Bf16, Nvfp4, Seed, A, 8, 1, 1>;
    fc1_seed_f16_split1[32, WARPS_PER_SM, early] = |A| body::<F16, Nvfp4, Seed, A, 1, 1, 1>;
    fc1_seed_f16_split2[64, WARPS_PER_SM / 2, early] = |A| body::<F16, Nvfp4, Seed, A, 2, 1, 1>;
    fc1_seed_f16_split4[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Nvfp4, Seed, A, 4, 1, 1>;
    fc1_seed_f16_split8[256, WARPS_PER_SM / 8, early] = |A| body::<F16, Nvfp4, Seed, A, 8, 1, 1>;
    fc1_seed_mxfp4_bf16_split1[32, WARPS_PER_SM, early] = |A| body::<Bf16, Mxfp4, Seed, A, 1, 1, 1>;
    fc1_seed_mxfp4_bf16_split2[64, WARPS_PER_SM / 2, early] = |A| body::<Bf16, Mxfp4, Seed, A, 2, 1, 1>;
    fc1_seed_mxfp4_bf16_split4[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Mxfp4, Seed, A, 4, 1, 1>;
    fc1_seed_mxfp4_bf16_split8[256, WARPS_PER_SM / 8, early] = |A| body::<Bf16, Mxfp4, Seed, A, 8, 1, 1>;
    fc1_seed_mxfp4_f16_split1[32, WARPS_PER_SM, early] = |A| body::<F16, Mxfp4, Seed, A, 1, 1, 1>;
    fc1_seed_mxfp4_f16_split2[64, WARPS_PER_SM / 2, early] = |A| body::<F16, Mxfp4, Seed, A, 2, 1, 1>;
    fc1_seed_mxfp4_f16_split4[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Mxfp4, Seed, A, 4, 1, 1>;
    fc1_seed_mxfp4_f16_split8[256, WARPS_PER_SM / 8, early] = |A| body::<F16, Mxfp4, Seed, A, 8, 1, 1>;
    fc1_decode_bf16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Nvfp4, Decode, A, 4, 1, 1>;
    fc1_decode_bf16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Nvfp4, Decode, A, 4, 2, 1>;
    fc1_decode_bf16_wide[128, 3, early] = |A| body::<Bf16, Nvfp4, Decode, A, 4, 2, 2>;
    fc1_decode_f16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Nvfp4, Decode, A, 4, 1, 1>;
    fc1_decode_f16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Nvfp4, Decode, A, 4, 2, 1>;
    fc1_decode_f16_wide[128, 3, early] = |A| body::<F16, Nvfp4, Decode, A, 4, 2, 2>;
    fc1_decode_mxfp4_bf16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Mxfp4, Decode, A, 4, 1, 1>;
    fc1_decode_mxfp4_bf16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Mxfp4, Decode, A, 4, 2, 1>;
    fc1_decode_mxfp4_bf16_wide[128, 2, early] = |A| body::<Bf16, Mxfp4, Decode, A, 4, 2, 2>;
    fc1_decode_mxfp4_f16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Mxfp4, Decode, A, 4, 1, 1>;
    fc1_decode_mxfp4_f16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Mxfp4, Decode, A, 4, 2, 1>;
    fc1_decode_mxfp4_f16_wide[128, 3, early] = |A| body::<F16, Mxfp4, Decode, A, 4, 2, 2>;
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<T: Activation, F: Format, O: Order, A: Arch, const SPLIT: u32, const TILES: usize, const GROUPS: usize>(
    entry_count: In<u32>,
    entries: In<u32>,
    slots: In<u32>,
    x: In<u16>,
    w13: In<u8>,
    s13: In<u8>,
    b13: In<f32>,
    h: Out<u16>,
    status: Out<u32>,
    hidden: u32,
    intermediate: u32,
    gating: u32,
    factor: f32,
    limit: f32,
) {
    // Each part of a tile's sums is added up by a warp of its own.
    const { assert!(TILES * GROUPS <= SPLIT as usize) };
    // FC2 reads the routing table before this kernel has ended: only after the wait is that complete.
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    let weights = Weights { codes: w13, scales: s13, rows: 2 * intermediate, k: hidden };
    let segments = O::segments(warp(), SPLIT, hidden.div_ceil(SEGMENT));
    let (begin, step, count) = segments;

    let unit_columns = unit_columns(TILES as u32);
    let (schedule, first) = Schedule::new(entry_count.load(0), intermediate / unit_columns, grid_dim(), block_idx());
    let work = Entries { schedule, entries, tiles: UpAndGate { unit_columns, intermediate } };
    let ring = warp() * ring_bytes::<F>(TILES as u32);
    let mut feed = Feed::<F, O, _, TILES>::start(ring, weights, work, first, segments);

    let (g, t) = (lane() / 4, lane() % 4);
    // 32 bits: one register instead of two through the loop.
    let (stride, h_stride) = (row_stride(hidden as usize) as u32, row_stride(intermediate as usize) as u32);
    let slot_of = |entry: u32, slot: u32| ((entry * GROUPS as u32 * GROUP + slot) * SLOT_WORDS) as usize;
    let token_of = |unit: Unit, group: u32| slots.load(slot_of(unit.entry, group * GROUP + g) + 1);
    let row_of = |token: u32| x.skip(token as usize * stride as usize + (begin * SEGMENT + t * 8) as usize);

    let mut unit = first;
    let mut tokens = [0; GROUPS];
    let mut at = [x; GROUPS];
    let mut columns = [[[0; 4]; 4]; GROUPS];
    // Whether the second eight columns hold pairs.
    let mut used = GROUPS > 1 && work.has(unit) && work.count(unit) > GROUP;
    if work.has(unit) && count > 0 {
        let mut group = 0;
        while group < GROUPS {
            at[group] = row_of(token_of(unit, group as u32));
            columns[group] = tensor::columns(at[group]);
            group += 1;
        }
    }
    let mut turn = 0;
    let mut overflow = false;
    while work.has(unit) {
        let next = work.next(unit);
        let more = work.has(next);
        if more {
            let mut group = 0;
            while group < GROUPS {
                tokens[group] = token_of(next, group as u32);
                group += 1;
            }
        }
        let mut sums = [[[0.0; 4]; GROUPS]; TILES];
        let mut left = count;
        while left > 0 {
            left -= 1;
            feed.wait();
            let chunk = feed.read::<0>();
            let second = at.map(|row| row.skip(SEGMENT as usize / 2));
            multiply::<T, F, O, A, TILES, GROUPS>(
                &chunk,
                &mut columns,
                |x, w| reload(x, second, w, used),
                used,
                &mut sums,
            );
            let chunk = feed.read::<1>();
            feed.refill();
            let next_used = if left == 0 && more { GROUPS > 1 && work.count(next) > GROUP } else { used };
            let mut group = 0;
            while group < GROUPS {
                if left > 0 {
                    at[group] = at[group].skip((step * SEGMENT) as usize);
                } else if more {
                    at[group] = row_of(tokens[group]);
                }
                group += 1;
            }
            multiply::<T, F, O, A, TILES, GROUPS>(
                &chunk,
                &mut columns,
                |x, w| reload(x, at, w, next_used),
                used,
                &mut sums,
            );
            used = next_used;
        }

        // Two sets of partial sums and reducing warps that move on: one barrier a unit.
        let parts = (TILES * GROUPS) as u32;
        let partials = Shared::<f32>::at(
            SPLIT * ring_bytes::<F>(TILES as u32) + turn % 2 * SPLIT * parts * PARTIAL_BYTES,
            SPLIT * parts * PARTIAL_BYTES / 4,
        );
        let partial = |part: u32, warp: u32| ((part * SPLIT + warp) * 32 + lane()) * 4;
        let mut sum = sums[0][0];
        if SPLIT > 1 {
            let mut part = 0;
            while part < TILES * GROUPS {
                let sum = sums[part % TILES][part / TILES].map(f32::to_bits);
                partials.store_v4(partial(part as u32, warp()), sum);
                part += 1;
            }
            sync::sync_threads();
        }
        let part = (warp() + turn) % SPLIT;
        if part < parts {
            if SPLIT > 1 {
                sum = partials.load_v4(partial(part, 0)).map(f32::from_bits);
                let mut w = 1;
                while w < SPLIT {
                    let p = partials.load_v4(partial(part, w)).map(f32::from_bits);
                    sum = [sum[0] + p[0], sum[1] + p[1], sum[2] + p[2], sum[3] + p[3]];
                    w += 1;
                }
            }
            if folds::<F, O>() {
                sum = sum.map(|sum| sum * T::UNFOLD);
            }
            let (tile, group) = (part % TILES as u32, part / TILES as u32);
            let entry = unit.entry;
            let [expert, count, up, gate] = entries.load_v4((entry * RECORD_WORDS) as usize);
            let (column, step) = tile_rows(unit.tile, g % 4, unit_columns, intermediate);
            let column = (column + (2 * tile + g / 4) * step) as usize;
            let (up, gate) = (f32::from_bits(up), f32::from_bits(gate));
            sum = [up * sum[0], up * sum[1], gate * sum[2], gate * sum[3]];
            if !b13.is_null() {
                let at = (2 * expert) as usize * intermediate as usize + column;
                let (up, gate) = (b13.load(at), b13.load(at + intermediate as usize));
                sum = [sum[0] + up, sum[1] + up, sum[2] + gate, sum[3] + gate];
            }
            macro_rules! finish {
                ($up:expr, $gate:expr, $slot:expr) => {
                    if $slot < count {
                        let pair = slots.load(slot_of(entry, $slot));
                        let value = join($up, $gate, gating, factor, limit);
                        let bits = T::round(value);
                        overflow |= !T::BF16 && value.abs() < f32::INFINITY && bits & 0x7FFF == 0x7C00;
                        h.store(pair as usize * h_stride as usize + position::<O>(column), bits);
                    }
                };
            }
            finish!(sum[0], sum[2], group * GROUP + 2 * t);
            finish!(sum[1], sum[3], group * GROUP + 2 * t + 1);
        }
        turn += 1;
        unit = next;
    }
    if overflow {
        status.atomic_or(0, status::F16_RANGE);
    }
}

/// Rows of up, and the same of gate.
#[derive(Clone, Copy)]
pub(crate) struct UpAndGate {
    /// Intermediate columns of a tile.
    pub(crate) unit_columns: u32,
    pub(crate) intermediate: u32,
}

impl Tiles for UpAndGate {
    #[inline(always)]
    fn rows(&self, tile: u32, j: u32) -> Rows {
        let (up, step) = tile_rows(tile, j, self.unit_columns, self.intermediate);
        Rows { first: [up, self.intermediate + up], step, next: 2, last: u32::MAX }
    }
}

/// h before its rounding, left to right, NaN kept.
#[inline(always)]
pub(crate) fn join(up: f32, gate: f32, gating: u32, factor: f32, limit: f32) -> f32 {
    let gate = min_nan(gate, limit);
    let up = min_nan(max_nan(up, -limit), limit);
    let oai = gating == SWIGLU_OAI;
    // One exp and one division for both: a product with 1 changes nothing.
    let quotient = if oai { 1.0 } else { gate } / (1.0 + exp(-(factor * gate)));
    if oai { (up + 1.0) * (gate * quotient) } else { quotient * up }
}
