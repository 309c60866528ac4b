//! Down projection: `y[pair] = (alpha2 · weight) · (w2 · h[pair])`, with biases `(alpha2 · (w2 · h[pair]) + bias) · weight`.
//!
//! A unit of work is one entry times a tile of 16 or 32 output rows, done by one warp with one accumulator over all of I. Warps are
//! persistent and independent; how many share a block has no influence on the bits.

use crate::dequant::{Activation, Format, Mxfp4, Nvfp4, folds};
use crate::layout::permute::row_stride;
use crate::layout::tile::tile_rows;
use crate::order::{Decode, Order, Seed};
use crate::route_prep::{GROUP, RECORD_WORDS, SLOT_WORDS};
use crate::schedule::{Entries, Rows, Schedule, Tiles, Unit, Work};
use crate::stream::{Feed, ROWS, SEGMENT, Weights, ring_bytes};
use crate::tensor::{self, multiply, reload};
use cuda_std::arch::Arch;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16};
use cuda_std::thread::{block_idx, grid_dim, lane, warp};
use cuda_std::{dependent, kernels, warp as lanes};

/// Warps that a multiprocessor holds.
const WARPS_PER_SM: u32 = 16;

/// Bytes of shared memory of a block of `warps` warps with tiles of `tiles` times 16 rows.
pub const fn shared_bytes<F: Format>(warps: u32, tiles: u32) -> u32 {
    warps * ring_bytes::<F>(tiles)
}

kernels! {
    /// Second projection.
    pub mod fc2(
        /// `[1]` number of entries.
        entry_count: In<u32>,
        /// [entries, RECORD_WORDS] records.
        entries: In<u32>,
        /// [entries, 8 or 16, SLOT_WORDS] slots.
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
    fc2_seed_bf16_warps1[32, WARPS_PER_SM, early] = |A| body::<Bf16, Nvfp4, Seed, A, 1, 1, 1>;
    fc2_seed_bf16_warps2[64, WARPS_PER_SM / 2, early] = |A| body::<Bf16, Nvfp4, Seed, A, 2, 1, 1>;
    fc2_seed_bf16_warps4[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Nvfp4, Seed, A, 4, 1, 1>;
    fc2_seed_bf16_warps8[256, WARPS_PER_SM / 8, early] = |A| body::<Bf16, Nvfp4, Seed, A, 8, 1, 1>;
    fc2_seed_f16_warps1[32, WARPS_PER_SM, early] = |A| body::<F16, Nvfp4, Seed, A, 1, 1, 1>;
    fc2_seed_f16_warps2[64, WARPS_PER_SM / 2, early] = |A| body::<F16, Nvfp4, Seed, A, 2, 1, 1>;
    fc2_seed_f16_warps4[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Nvfp4, Seed, A, 4, 1, 1>;
    fc2_seed_f16_warps8[256, WARPS_PER_SM / 8, early] = |A| body::<F16, Nvfp4, Seed, A, 8, 1, 1>;
    fc2_seed_mxfp4_bf16_warps4[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Mxfp4, Seed, A, 4, 1, 1>;
    fc2_seed_mxfp4_f16_warps4[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Mxfp4, Seed, A, 4, 1, 1>;
    fc2_decode_bf16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Nvfp4, Decode, A, 4, 1, 1>;
    fc2_decode_bf16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Nvfp4, Decode, A, 4, 2, 1>;
    fc2_decode_bf16_wide[128, 3, early] = |A| body::<Bf16, Nvfp4, Decode, A, 4, 2, 2>;
    fc2_decode_f16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Nvfp4, Decode, A, 4, 1, 1>;
    fc2_decode_f16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Nvfp4, Decode, A, 4, 2, 1>;
    fc2_decode_f16_wide[128, 3, early] = |A| body::<F16, Nvfp4, Decode, A, 4, 2, 2>;
    fc2_decode_mxfp4_bf16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Mxfp4, Decode, A, 4, 1, 1>;
    fc2_decode_mxfp4_bf16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<Bf16, Mxfp4, Decode, A, 4, 2, 1>;
    fc2_decode_mxfp4_bf16_wide[128, 3, early] = |A| body::<Bf16, Mxfp4, Decode, A, 4, 2, 2>;
    fc2_decode_mxfp4_f16_rows16[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Mxfp4, Decode, A, 4, 1, 1>;
    fc2_decode_mxfp4_f16_rows32[128, WARPS_PER_SM / 4, early] = |A| body::<F16, Mxfp4, Decode, A, 4, 2, 1>;
    fc2_decode_mxfp4_f16_wide[128, 3, early] = |A| body::<F16, Mxfp4, Decode, A, 4, 2, 2>;
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<T: Activation, F: Format, O: Order, A: Arch, const WARPS: u32, const TILES: usize, const GROUPS: usize>(
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
    let segments = (0, 1, intermediate.div_ceil(SEGMENT));
    let (_, _, count) = segments;
    // Neighbouring units go to different multiprocessors.
    let worker = warp() * grid_dim() + block_idx();
    let unit_rows = ROWS * TILES as u32;
    let (schedule, first) = Schedule::new(entry_count.load(0), output.div_ceil(unit_rows), grid_dim() * WARPS, worker);
    let work = Entries { schedule, entries, tiles: OutputRows { unit_rows, output } };
    let ring = warp() * ring_bytes::<F>(TILES as u32);
    let mut feed = Feed::<F, O, _, TILES>::start(ring, weights, work, first, segments);

    let (g, t) = (lane() / 4, lane() % 4);
    let stride = row_stride(intermediate as usize) as u32;
    // Slot g of each group: pair, weight, and the pair to read: slots without one read another of the same expert, and their
    // columns are never stored.
    let slot_of = |unit: Unit, group: u32| {
        let slot = unit.entry * GROUPS as u32 * GROUP + group * GROUP + g;
        let [pair, _, weight, read] = slots.load_v4((slot * SLOT_WORDS) as usize);
        [pair, weight, read]
    };
    let row_of = |pair: u32| h.skip(pair as usize * stride as usize + (t * 8) as usize);

    let mut unit = first;
    let mut held = [[0; 3]; GROUPS];
    let mut at = [h; GROUPS];
    let mut columns = [[[0; 4]; 4]; GROUPS];
    // Whether the second eight columns hold pairs.
    let mut used = GROUPS > 1 && work.has(unit) && work.count(unit) > GROUP;
    let mut group = 0;
    while work.has(unit) && group < GROUPS {
        held[group] = slot_of(unit, group as u32);
        at[group] = row_of(held[group][2]);
        group += 1;
    }
    // Weights are on their way, and the routing table was complete before FC1 let this kernel start; h is complete from here on.
    dependent::wait::<A>();
    dependent::launch_dependents::<A>();
    let mut group = 0;
    while work.has(unit) && group < GROUPS {
        columns[group] = tensor::columns(at[group]);
        group += 1;
    }
    while work.has(unit) {
        let next = work.next(unit);
        let more = work.has(next);
        let now = held;
        let record = (unit.entry * RECORD_WORDS) as usize;
        let alpha = f32::from_bits(entries.load(record + 4));
        let expert = entries.load(record) as usize;
        if more {
            let mut group = 0;
            while group < GROUPS {
                held[group] = slot_of(next, group as u32);
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
                    at[group] = at[group].skip(SEGMENT as usize);
                } else if more {
                    at[group] = row_of(held[group][2]);
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

        let (row, step) = tile_rows(unit.tile, g % 4, unit_rows, output);
        let scaled = |sum: f32, weight: f32, row: u32| {
            let sum = if folds::<F, O>() { sum * T::UNFOLD } else { sum };
            if b2.is_null() {
                alpha * weight * sum
            } else {
                // Where registers are few, the expert is loaded again.
                let expert = if GROUPS > 1 { entries.load(record) as usize } else { expert };
                (alpha * sum + b2.load(expert * output as usize + row as usize)) * weight
            }
        };
        let mut group = 0;
        while group < GROUPS {
            // Column 2t and 2t+1 are slots of other lanes.
            macro_rules! finish {
                ($column:literal) => {
                    let lane_of = 4 * (2 * t + $column);
                    let pair = lanes::shfl(now[group][0], lane_of);
                    let weight = f32::from_bits(lanes::shfl(now[group][1], lane_of));
                    if pair != u32::MAX {
                        let to = pair as usize * output as usize;
                        let mut tile = 0;
                        while tile < TILES {
                            let upper = row + (4 * tile as u32 + g / 4) * step;
                            let lower = upper + 2 * step;
                            let sum = sums[tile][group];
                            if upper < output {
                                y.store(to + upper as usize, scaled(sum[$column], weight, upper));
                            }
                            if lower < output {
                                y.store(to + lower as usize, scaled(sum[$column + 2], weight, lower));
                            }
                            tile += 1;
                        }
                    }
                };
            }
            finish!(0);
            finish!(1);
            group += 1;
        }
        unit = next;
    }
}

/// Output rows. Those past the end are copied from the last row and never stored.
#[derive(Clone, Copy)]
pub(crate) struct OutputRows {
    /// Rows of a tile.
    pub(crate) unit_rows: u32,
    pub(crate) output: u32,
}

impl Tiles for OutputRows {
    #[inline(always)]
    fn rows(&self, tile: u32, j: u32) -> Rows {
        let (first, step) = tile_rows(tile, j, self.unit_rows, self.output);
        Rows { first: [first, first + 2 * step], step, next: 4, last: self.output - 1 }
    }
}
