//! Down projection: `y[pair] = (alpha2 · weight) · (w2 · h[pair])`, with biases `(alpha2 · (w2 · h[pair]) + bias) · weight`.
//!
//! A unit of work is one entry times a tile of 16 output rows, done by one warp with one accumulator over all of I. Warps are
//! persistent and independent; how many share a block has no influence on the bits.

use crate::dequant::{Activation, Format, Mxfp4, Nvfp4};
use crate::layout::permute::row_stride;
use crate::layout::tile::tile_row;
use crate::route_prep::{ENTRY_SLOTS, RECORD_WORDS, SLOT_WORDS};
use crate::schedule::{Schedule, Unit};
use crate::stream::{Feed, ROWS, Ring, SEGMENT, Weights};
use crate::tensor::{columns, multiply};
use cuda_std::arch::Arch;
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16};
use cuda_std::thread::{block_idx, grid_dim, lane, warp};

/// Stages of a warp's ring.
pub const STAGES: u32 = 3;
/// Warps that a multiprocessor holds.
const WARPS_PER_SM: u32 = 16;

/// Bytes of shared memory of a block of `warps` warps.
pub const fn shared_bytes<F: Format>(warps: u32) -> u32 {
    warps * Ring::<F, STAGES>::BYTES
}

kernels! {
    /// Second projection.
    pub mod fc2(
        /// `[1]` number of entries.
        entry_count: In<u32>,
        /// [entries, RECORD_WORDS] records.
        entries: In<u32>,
        /// [entries, 8, SLOT_WORDS] slots.
        slots: In<u32>,
        /// [M·top_k, row_stride(intermediate)] activations in tensor-core order.
        h: In<u16>,
        /// [E, output, intermediate/2] codes.
        w2: In<u8>,
        /// [E, …] swizzled scales of w2.
        s2: In<u8>,
        /// [E, output] biases, or null.
        b2: In<f32>,
        /// [M·top_k, output] weighted results.
        y: Out<f32>,
        /// Intermediate size I.
        intermediate: u32,
        /// Output width H.
        output: u32,
    );
    fc2_seed_bf16_warps1[32, WARPS_PER_SM] = |A| body::<Bf16, Nvfp4, A, 1>;
    fc2_seed_bf16_warps2[64, WARPS_PER_SM / 2] = |A| body::<Bf16, Nvfp4, A, 2>;
    fc2_seed_bf16_warps4[128, WARPS_PER_SM / 4] = |A| body::<Bf16, Nvfp4, A, 4>;
    fc2_seed_bf16_warps8[256, WARPS_PER_SM / 8] = |A| body::<Bf16, Nvfp4, A, 8>;
    fc2_seed_f16_warps1[32, WARPS_PER_SM] = |A| body::<F16, Nvfp4, A, 1>;
    fc2_seed_f16_warps2[64, WARPS_PER_SM / 2] = |A| body::<F16, Nvfp4, A, 2>;
    fc2_seed_f16_warps4[128, WARPS_PER_SM / 4] = |A| body::<F16, Nvfp4, A, 4>;
    fc2_seed_f16_warps8[256, WARPS_PER_SM / 8] = |A| body::<F16, Nvfp4, A, 8>;
    fc2_seed_mxfp4_bf16_warps4[128, WARPS_PER_SM / 4] = |A| body::<Bf16, Mxfp4, A, 4>;
    fc2_seed_mxfp4_f16_warps4[128, WARPS_PER_SM / 4] = |A| body::<F16, Mxfp4, A, 4>;
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<T: Activation, F: Format, A: Arch, const WARPS: u32>(
    entry_count: In<u32>,
    entries: In<u32>,
    slots: In<u32>,
    h: In<u16>,
    w2: In<u8>,
    s2: In<u8>,
    b2: In<f32>,
    y: Out<f32>,
    intermediate: u32,
    output: u32,
) {
    let weights = Weights { codes: w2, scales: s2, rows: output, k: intermediate };
    let segments = intermediate.div_ceil(SEGMENT);
    // Neighbouring units go to different multiprocessors.
    let worker = warp() * grid_dim() + block_idx();
    let (schedule, first) = Schedule::new(entry_count, output.div_ceil(ROWS), grid_dim() * WARPS, worker);
    let row_of = |unit: Unit, r: u32| tile_row(unit.tile, r, ROWS, output);
    // Rows past the end are copied from the last row and never stored.
    let source_row = |unit: Unit, r: u32| row_of(unit, r).min(output - 1);

    let ring = Ring::new(weights, warp() * Ring::<F, STAGES>::BYTES);
    let mut feed = Feed::<F, STAGES>::start(ring, schedule, first, entries, (0, segments), source_row);

    let (g, t) = (lane() / 4, lane() % 4);
    let stride = row_stride(intermediate as usize) as u32;
    // Slots without a pair read another of the same expert; their columns are never stored.
    let pair_of = |unit: Unit| slots.load(((unit.entry * ENTRY_SLOTS + g) * SLOT_WORDS + 3) as usize);
    let mut unit = first;
    let mut pair = if schedule.has(unit) { pair_of(unit) } else { 0 };
    while schedule.has(unit) {
        let next = schedule.next(unit);
        let row = pair as usize * stride as usize + t as usize * 32;
        if schedule.has(next) {
            pair = pair_of(next);
        }
        let mut sum = [0.0; 4];
        let mut segment = 0;
        while segment < segments {
            let at = row + (segment * SEGMENT) as usize;
            let columns = [columns(h, at), columns(h, at + SEGMENT as usize / 2)];
            let stage = feed.take::<{ STAGES - 1 }>(source_row);
            sum = multiply::<T, F, A>(stage.codes[0], stage.scales[0], columns[0], sum);
            sum = multiply::<T, F, A>(stage.codes[1], stage.scales[1], columns[1], sum);
            segment += 1;
        }

        let record = (unit.entry * RECORD_WORDS) as usize;
        let alpha = f32::from_bits(entries.load(record + 4));
        let (upper, lower) = (row_of(unit, g), row_of(unit, g + 8));
        let scaled = |sum: f32, weight: f32, row: u32| {
            if b2.is_null() {
                alpha * weight * sum
            } else {
                let bias = b2.load(entries.load(record) as usize * output as usize + row as usize);
                (alpha * sum + bias) * weight
            }
        };
        macro_rules! finish {
            ($upper:expr, $lower:expr, $slot:expr) => {
                let [pair, _, weight, _] = slots.load_v4(((unit.entry * ENTRY_SLOTS + $slot) * SLOT_WORDS) as usize);
                if pair != u32::MAX {
                    let weight = f32::from_bits(weight);
                    let to = pair as usize * output as usize;
                    if upper < output {
                        y.store(to + upper as usize, scaled($upper, weight, upper));
                    }
                    if lower < output {
                        y.store(to + lower as usize, scaled($lower, weight, lower));
                    }
                }
            };
        }
        finish!(sum[0], sum[2], 2 * t);
        finish!(sum[1], sum[3], 2 * t + 1);
        unit = next;
    }
}
