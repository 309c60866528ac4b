//! Gate and up projections and what joins them. With g = min(alpha·gate + bias, limit) and u = clamp(alpha·up + bias, ±limit):
//! h = (g / (1 + exp(-g))) · u ([`SILU`]) or h = (u + 1) · (g · (1 / (1 + exp(-(factor·g))))) ([`SWIGLU_OAI`]).
//!
//! A unit of work is one entry (up to eight pairs of one expert) times eight intermediate columns: a tile of eight rows of up and
//! the same eight rows of gate, so that both halves of an output sit in one lane. The `SPLIT` warps of a block share a unit along
//! k: warp i takes the 256-k segments floor(i·n/SPLIT) to floor((i+1)·n/SPLIT) of n. The partial sums are added in the order
//! ((p0 + p1) + p2) + … . Blocks are persistent: block b takes units b, b + grid, … .

use crate::dequant::{Activation, Format, Mxfp4, Nvfp4};
use crate::layout::permute::{position, row_stride};
use crate::layout::tile::tile_row;
use crate::route_prep::{ENTRY_SLOTS, RECORD_WORDS, SLOT_WORDS};
use crate::schedule::{Schedule, Unit};
use crate::status;
use crate::stream::{Feed, ROWS, Ring, SEGMENT, Weights};
use crate::tensor::{columns, multiply};
use cuda_std::arch::Arch;
use cuda_std::kernels;
use cuda_std::math::{exp, max_nan, min_nan};
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16};
use cuda_std::shared::Shared;
use cuda_std::sync;
use cuda_std::thread::{block_idx, grid_dim, lane, warp};

/// Stages of a warp's ring.
pub const STAGES: u32 = 3;
/// Intermediate columns of a unit.
pub const UNIT_COLUMNS: u32 = ROWS / 2;
/// Warps that a multiprocessor holds.
const WARPS_PER_SM: u32 = 16;

/// Bytes of shared memory of a block: the rings, and two sets of partial sums.
pub const fn shared_bytes<F: Format>(split: u32) -> u32 {
    split * Ring::<F, STAGES>::BYTES + 2 * split * PARTIAL_BYTES
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
        /// [entries, 8, SLOT_WORDS] slots.
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
    fc1_seed_bf16_split1[32, WARPS_PER_SM] = |A| body::<Bf16, Nvfp4, A, 1>;
    fc1_seed_bf16_split2[64, WARPS_PER_SM / 2] = |A| body::<Bf16, Nvfp4, A, 2>;
    fc1_seed_bf16_split4[128, WARPS_PER_SM / 4] = |A| body::<Bf16, Nvfp4, A, 4>;
    fc1_seed_bf16_split8[256, WARPS_PER_SM / 8] = |A| body::<Bf16, Nvfp4, A, 8>;
    fc1_seed_f16_split1[32, WARPS_PER_SM] = |A| body::<F16, Nvfp4, A, 1>;
    fc1_seed_f16_split2[64, WARPS_PER_SM / 2] = |A| body::<F16, Nvfp4, A, 2>;
    fc1_seed_f16_split4[128, WARPS_PER_SM / 4] = |A| body::<F16, Nvfp4, A, 4>;
    fc1_seed_f16_split8[256, WARPS_PER_SM / 8] = |A| body::<F16, Nvfp4, A, 8>;
    fc1_seed_mxfp4_bf16_split1[32, WARPS_PER_SM] = |A| body::<Bf16, Mxfp4, A, 1>;
    fc1_seed_mxfp4_bf16_split2[64, WARPS_PER_SM / 2] = |A| body::<Bf16, Mxfp4, A, 2>;
    fc1_seed_mxfp4_bf16_split4[128, WARPS_PER_SM / 4] = |A| body::<Bf16, Mxfp4, A, 4>;
    fc1_seed_mxfp4_bf16_split8[256, WARPS_PER_SM / 8] = |A| body::<Bf16, Mxfp4, A, 8>;
    fc1_seed_mxfp4_f16_split1[32, WARPS_PER_SM] = |A| body::<F16, Mxfp4, A, 1>;
    fc1_seed_mxfp4_f16_split2[64, WARPS_PER_SM / 2] = |A| body::<F16, Mxfp4, A, 2>;
    fc1_seed_mxfp4_f16_split4[128, WARPS_PER_SM / 4] = |A| body::<F16, Mxfp4, A, 4>;
    fc1_seed_mxfp4_f16_split8[256, WARPS_PER_SM / 8] = |A| body::<F16, Mxfp4, A, 8>;
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<T: Activation, F: Format, A: Arch, const SPLIT: u32>(
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
    let weights = Weights { codes: w13, scales: s13, rows: 2 * intermediate, k: hidden };
    let segments = hidden.div_ceil(SEGMENT);
    let begin = warp() * segments / SPLIT;
    let end = (warp() + 1) * segments / SPLIT;

    let (schedule, first) = Schedule::new(entry_count, intermediate / UNIT_COLUMNS, grid_dim(), block_idx());
    let row_of = |unit: Unit, r: u32| {
        let column = tile_row(unit.tile, r % UNIT_COLUMNS, UNIT_COLUMNS, intermediate);
        if r < UNIT_COLUMNS { column } else { intermediate + column }
    };

    let ring = Ring::new(weights, warp() * Ring::<F, STAGES>::BYTES);
    let mut feed = Feed::<F, STAGES>::start(ring, schedule, first, entries, (begin, end), row_of);

    let (g, t) = (lane() / 4, lane() % 4);
    // 32 bits: one register instead of two through the loop.
    let (stride, h_stride) = (row_stride(hidden as usize) as u32, row_stride(intermediate as usize) as u32);
    let token_of = |unit: Unit| slots.load(((unit.entry * ENTRY_SLOTS + g) * SLOT_WORDS + 1) as usize);
    let mut unit = first;
    let mut token = if schedule.has(unit) { token_of(unit) } else { 0 };
    let mut turn = 0;
    let mut overflow = false;
    while schedule.has(unit) {
        let next = schedule.next(unit);
        let row = token as usize * stride as usize + t as usize * 32;
        if schedule.has(next) {
            token = token_of(next);
        }
        let mut sum = [0.0; 4];
        let mut segment = begin;
        while segment < end {
            let at = row + (segment * SEGMENT) as usize;
            let columns = [columns(x, at), columns(x, at + SEGMENT as usize / 2)];
            let stage = feed.take::<{ STAGES - 1 }>(row_of);
            sum = multiply::<T, F, A>(stage.codes[0], stage.scales[0], columns[0], sum);
            sum = multiply::<T, F, A>(stage.codes[1], stage.scales[1], columns[1], sum);
            segment += 1;
        }

        // Two sets of partial sums and a reducing warp that moves on: one barrier a unit.
        let partials = Shared::<f32>::at(
            SPLIT * Ring::<F, STAGES>::BYTES + turn % 2 * SPLIT * PARTIAL_BYTES,
            SPLIT * PARTIAL_BYTES / 4,
        );
        if SPLIT > 1 {
            partials.store_v4((warp() * 32 + lane()) * 4, sum.map(f32::to_bits));
            sync::sync_threads();
        }
        if warp() == turn % SPLIT {
            if SPLIT > 1 {
                sum = partials.load_v4(lane() * 4).map(f32::from_bits);
                let mut w = 1;
                while w < SPLIT {
                    let p = partials.load_v4((w * 32 + lane()) * 4).map(f32::from_bits);
                    sum = [sum[0] + p[0], sum[1] + p[1], sum[2] + p[2], sum[3] + p[3]];
                    w += 1;
                }
            }
            let entry = unit.entry;
            let [expert, count, up, gate] = entries.load_v4((entry * RECORD_WORDS) as usize);
            let row = row_of(unit, g);
            let column = position(row as usize);
            let (up, gate) = (f32::from_bits(up), f32::from_bits(gate));
            sum = [up * sum[0], up * sum[1], gate * sum[2], gate * sum[3]];
            if !b13.is_null() {
                let at = (2 * expert) as usize * intermediate as usize + row as usize;
                let (up, gate) = (b13.load(at), b13.load(at + intermediate as usize));
                sum = [sum[0] + up, sum[1] + up, sum[2] + gate, sum[3] + gate];
            }
            macro_rules! finish {
                ($up:expr, $gate:expr, $slot:expr) => {
                    if $slot < count {
                        let pair = slots.load(((entry * ENTRY_SLOTS + $slot) * SLOT_WORDS) as usize);
                        let value = join($up, $gate, gating, factor, limit);
                        let bits = T::round(value);
                        overflow |= !T::BF16 && value.abs() < f32::INFINITY && bits & 0x7FFF == 0x7C00;
                        h.store(pair as usize * h_stride as usize + column, bits);
                    }
                };
            }
            finish!(sum[0], sum[2], 2 * t);
            finish!(sum[1], sum[3], 2 * t + 1);
        }
        turn += 1;
        unit = next;
    }
    if overflow {
        status.atomic_or(0, status::F16_RANGE);
    }
}

/// h before its rounding, left to right, NaN kept.
#[inline(always)]
fn join(up: f32, gate: f32, gating: u32, factor: f32, limit: f32) -> f32 {
    let gate = min_nan(gate, limit);
    let up = min_nan(max_nan(up, -limit), limit);
    let oai = gating == SWIGLU_OAI;
    // One exp and one division for both: a product with 1 changes nothing.
    let quotient = if oai { 1.0 } else { gate } / (1.0 + exp(-(factor * gate)));
    if oai { (up + 1.0) * (gate * quotient) } else { quotient * up }
}
