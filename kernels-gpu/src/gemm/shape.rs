//! Sizes of a tile, and what a warp does with its part of it.

use super::operand::{Left, Right};
use super::tiles::Item;
use crate::quant::{GROUP, Scale};
use crate::silu_mul::clamped_silu;
use cuda_std::arch::Arch;
use cuda_std::memory::{In, Out};
use cuda_std::mma;
use cuda_std::shared::Shared;
use cuda_std::thread::{lane, warp};
use cuda_std::{cvt, sync, warp as lanes};

/// A tile and the warps that share it: `WM` by `WN` warps, each with `TM` times 16 rows and `TN` times 16 columns, and a ring of
/// `STAGES` stages, which come in pairs. If `PAIRED`, the first half of a warp's columns belongs to the first product and the second half to the second.
#[derive(Clone, Copy, Debug)]
pub struct Tile<
    const WM: u32,
    const WN: u32,
    const TM: usize,
    const TN: usize,
    const STAGES: u32,
    const PAIRED: bool = false,
>;

/// Sums of a lane: for each 16-row and 16-column tile of its warp the two 8-column halves.
pub type Sums<const TM: usize, const TN: usize> = [[[[f32; 4]; 2]; TN]; TM];

/// Where the output goes.
#[derive(Clone, Copy)]
pub struct Output {
    /// [E, n] biases; null for none.
    pub bias: In<f32>,
    /// [sorted rows, n] bf16.
    pub out: Out<u16>,
    /// Columns.
    pub n: u32,
}

/// Where the output of two joined products goes.
#[derive(Clone, Copy)]
pub struct Joined {
    /// [sorted rows, n] e4m3 codes.
    pub codes: Out<u8>,
    /// [sorted rows, ceil(n/128)] scales.
    pub scales: Out<f32>,
    /// Columns.
    pub n: u32,
    /// Clamp; infinite for none.
    pub limit: f32,
}

/// A [`Tile`] with its sizes hidden.
pub trait Shape: Copy + Send + Sync + 'static {
    /// Rows.
    const ROWS: u32;
    /// Columns of an item.
    const COLUMNS: u32;
    /// Whether each warp computes its columns of two products, whose sums an epilogue joins.
    const PAIRED: bool;
    /// Rows of the right operand in a stage: the columns of all products.
    const RIGHT_ROWS: u32;
    /// Threads of a block.
    const THREADS: u32;
    /// Stages of the ring.
    const STAGES: u32;
    /// Sums of a lane.
    type Sums: Copy;
    /// No sums.
    const ZERO: Self::Sums;
    /// Product and column of the item behind a row of the right operand.
    fn column(row: u32) -> (u32, u32);
    /// Adds half `half` of a stage whose operands lie at bytes `left` and `right`: for each 16 k ascending (32 where operands enter as
    /// codes), every 16-row tile of the warp times every 8-column tile.
    fn multiply<A: Arch, L: Left, R: Right>(left: u32, right: u32, half: u32, sums: Self::Sums) -> Self::Sums;
    /// `outer + inner · s`, where s is the scale of the weights, one for each product behind the row scales, times the row's own if
    /// those count.
    fn fold<const ROW_SCALES: bool>(outer: Self::Sums, inner: Self::Sums, scales: Shared<f32>) -> Self::Sums;
    /// Sets the sums of the rows that `is_missing` names to zero.
    fn clear(sums: Self::Sums, is_missing: impl Fn(u32) -> bool) -> Self::Sums;
    /// The epilogue of a paired tile, one group of 128 columns wide: gate and up rounded to bf16, joined by silu with a clamp, rounded,
    /// and quantised as [`crate::quant`] does. `largest` holds a value for each row and warp.
    fn join<A: Arch>(sums: Self::Sums, output: Joined, largest: Shared<f32>, item: Item);
    /// Rounds the sums to bf16, after the expert's biases, and stores those inside the matrix.
    fn store(sums: Self::Sums, output: Output, item: Item);
}

impl<const WM: u32, const WN: u32, const TM: usize, const TN: usize, const STAGES: u32, const PAIRED: bool>
    Tile<WM, WN, TM, TN, STAGES, PAIRED>
{
    /// First row and column of this warp's part.
    #[inline(always)]
    fn origin() -> (u32, u32) {
        (warp() / WN * (TM as u32 * 16), warp() % WN * (TN as u32 * 16))
    }
}

impl<const WM: u32, const WN: u32, const TM: usize, const TN: usize, const STAGES: u32, const PAIRED: bool> Shape
    for Tile<WM, WN, TM, TN, STAGES, PAIRED>
{
    const ROWS: u32 = WM * TM as u32 * 16;
    const COLUMNS: u32 = if PAIRED { WN * TN as u32 * 8 } else { WN * TN as u32 * 16 };
    const PAIRED: bool = PAIRED;
    const RIGHT_ROWS: u32 = WN * TN as u32 * 16;
    const THREADS: u32 = WM * WN * 32;
    const STAGES: u32 = STAGES;
    type Sums = Sums<TM, TN>;
    const ZERO: Self::Sums = [[[[0.0; 4]; 2]; TN]; TM];

    #[inline(always)]
    fn column(row: u32) -> (u32, u32) {
        if !PAIRED {
            return (0, row);
        }
        let half = TN as u32 * 8;
        (row / half % 2, row / (2 * half) * half + row % half)
    }

    #[inline(always)]
    fn multiply<A: Arch, L: Left, R: Right>(left: u32, right: u32, half: u32, mut sums: Self::Sums) -> Self::Sums {
        let (row, column) = Self::origin();
        sync::converge();
        let codes = L::as_codes::<A>();
        let multiply = |a, b, c| if codes { mma::m16n8k32_e4m3(a, b, c) } else { mma::m16n8k16::<L::Mma>(a, b, c) };
        let mut columns = [[[[0; 2]; 2]; 2]; TN];
        let mut j = 0;
        while j < TN {
            columns[j] = R::columns16::<A>(right, column + j as u32 * 16, half);
            j += 1;
        }
        // Eight mma or more between two that add to the same sums: two tiles of rows at a time where one has fewer.
        let mut i = 0;
        while i < TM {
            let both = TN < 4 && i + 1 < TM;
            let upper = L::rows16::<A>(left, row + i as u32 * 16, half);
            let lower = if both { L::rows16::<A>(left, row + i as u32 * 16 + 16, half) } else { upper };
            let mut group = 0;
            while group < if codes { 1 } else { 2 } {
                let mut j = 0;
                while j < TN {
                    let [first, second] = columns[j][group];
                    sums[i][j][0] = multiply(upper[group], first, sums[i][j][0]);
                    sums[i][j][1] = multiply(upper[group], second, sums[i][j][1]);
                    if both {
                        sums[i + 1][j][0] = multiply(lower[group], first, sums[i + 1][j][0]);
                        sums[i + 1][j][1] = multiply(lower[group], second, sums[i + 1][j][1]);
                    }
                    j += 1;
                }
                group += 1;
            }
            i += if both { 2 } else { 1 };
        }
        sums
    }

    #[inline(always)]
    fn fold<const ROW_SCALES: bool>(mut outer: Self::Sums, inner: Self::Sums, scales: Shared<f32>) -> Self::Sums {
        let (row, _) = Self::origin();
        let first = scales.load(Self::ROWS);
        let second = if PAIRED { scales.load(Self::ROWS + 1) } else { first };
        let mut i = 0;
        while i < TM {
            let (mut upper, mut lower) = (1.0, 1.0);
            if ROW_SCALES {
                let at = row + i as u32 * 16 + lane() / 4;
                (upper, lower) = (scales.load(at), scales.load(at + 8));
            }
            let mut j = 0;
            while j < TN {
                let column = if PAIRED && j >= TN / 2 { second } else { first };
                let (upper, lower) = if ROW_SCALES { (upper * column, lower * column) } else { (column, column) };
                let mut half = 0;
                while half < 2 {
                    let (sum, new) = (outer[i][j][half], inner[i][j][half]);
                    outer[i][j][half] = [
                        sum[0] + new[0] * upper,
                        sum[1] + new[1] * upper,
                        sum[2] + new[2] * lower,
                        sum[3] + new[3] * lower,
                    ];
                    half += 1;
                }
                j += 1;
            }
            i += 1;
        }
        outer
    }

    #[inline(always)]
    fn clear(mut sums: Self::Sums, is_missing: impl Fn(u32) -> bool) -> Self::Sums {
        let (row, _) = Self::origin();
        let mut i = 0;
        while i < TM {
            let upper = is_missing(row + i as u32 * 16 + lane() / 4);
            let lower = is_missing(row + i as u32 * 16 + lane() / 4 + 8);
            let mut j = 0;
            while j < TN {
                let mut half = 0;
                while half < 2 {
                    let sum = sums[i][j][half];
                    let [a, b] = if upper { [0.0; 2] } else { [sum[0], sum[1]] };
                    let [c, d] = if lower { [0.0; 2] } else { [sum[2], sum[3]] };
                    sums[i][j][half] = [a, b, c, d];
                    half += 1;
                }
                j += 1;
            }
            i += 1;
        }
        sums
    }

    #[inline(always)]
    fn store(sums: Self::Sums, output: Output, item: Item) {
        let Output { bias, out, n } = output;
        let Item { expert, first, rows, column } = item;
        let column = column * Self::COLUMNS;
        let (warp_row, warp_column) = Self::origin();
        let (g, t) = (lane() / 4, lane() % 4);
        let mut i = 0;
        while i < TM {
            let mut j = 0;
            while j < TN {
                let mut half = 0;
                while half < 2 {
                    let column = column + warp_column + j as u32 * 16 + half as u32 * 8 + 2 * t;
                    let sum = sums[i][j][half];
                    let (mut left, mut right) = ([sum[0], sum[2]], [sum[1], sum[3]]);
                    if !bias.is_null() {
                        let at = expert as usize * n as usize + column as usize;
                        if column < n {
                            let b = bias.load(at);
                            left = [left[0] + b, left[1] + b];
                        }
                        if column + 1 < n {
                            let b = bias.load(at + 1);
                            right = [right[0] + b, right[1] + b];
                        }
                    }
                    let row = warp_row + i as u32 * 16 + g;
                    macro_rules! one {
                        ($row:expr, $r:literal) => {
                            if $row < rows {
                                let to = (first + $row) as usize * n as usize + column as usize;
                                if n % 2 == 0 && column < n {
                                    out.store_word(to, cvt::f32x2_to_bf16x2(left[$r], right[$r]));
                                } else {
                                    if column < n {
                                        out.store(to, cvt::f32_to_bf16(left[$r]));
                                    }
                                    if column + 1 < n {
                                        out.store(to + 1, cvt::f32_to_bf16(right[$r]));
                                    }
                                }
                            }
                        };
                    }
                    one!(row, 0);
                    one!(row + 8, 1);
                    half += 1;
                }
                j += 1;
            }
            i += 1;
        }
    }

    #[inline(always)]
    fn join<A: Arch>(mut sums: Self::Sums, output: Joined, largest: Shared<f32>, item: Item) {
        let Joined { codes, scales, n, limit } = output;
        let (warp_row, _) = Self::origin();
        let warp_column = warp() % WN * (TN as u32 * 8);
        let (g, t) = (lane() / 4, lane() % 4);
        let bf16 = |value: f32| cvt::bf16_to_f32(cvt::f32_to_bf16(value));
        // The results replace the sums of gate.
        let mut i = 0;
        while i < TM {
            let (mut upper, mut lower) = (0.0f32, 0.0f32);
            let mut j = 0;
            while j < TN / 2 {
                let mut half = 0;
                while half < 2 {
                    let (gate, up) = (sums[i][j][half], sums[i][j + TN / 2][half]);
                    let joined =
                        [0, 1, 2, 3].map(|r| bf16(clamped_silu(cvt::f32_to_bf16(gate[r]), bf16(up[r]), limit)));
                    sums[i][j][half] = joined;
                    // f32::max drops a NaN. Columns past the end are 0.
                    upper = upper.max(joined[0].abs()).max(joined[1].abs());
                    lower = lower.max(joined[2].abs()).max(joined[3].abs());
                    half += 1;
                }
                j += 1;
            }
            upper = upper.max(lanes::shfl_xor(upper, 1));
            upper = upper.max(lanes::shfl_xor(upper, 2));
            lower = lower.max(lanes::shfl_xor(lower, 1));
            lower = lower.max(lanes::shfl_xor(lower, 2));
            if t == 0 {
                let row = warp_row + i as u32 * 16 + g;
                largest.store(row * WN + warp() % WN, upper);
                largest.store((row + 8) * WN + warp() % WN, lower);
            }
            i += 1;
        }
        sync::sync_threads();
        let groups = n.div_ceil(GROUP) as usize;
        let mut i = 0;
        while i < TM {
            macro_rules! one {
                ($row:expr, $r:literal) => {
                    let row = $row;
                    let mut amax = 0.0f32;
                    let mut w = 0;
                    while w < WN {
                        amax = amax.max(largest.load(row * WN + w));
                        w += 1;
                    }
                    let scale = Scale::of(amax);
                    let to = (item.first + row) as usize;
                    if row < item.rows && t == 0 && warp() % WN == 0 {
                        scales.store(to * groups + item.column as usize, scale.value);
                    }
                    let mut j = 0;
                    while j < TN / 2 {
                        let mut half = 0;
                        while half < 2 {
                            let column =
                                item.column * Self::COLUMNS + warp_column + j as u32 * 16 + half as u32 * 8 + 2 * t;
                            let value = sums[i][j][half];
                            let pair =
                                cvt::f32x2_to_e4m3x2::<A>(scale.divide(-value[$r]), scale.divide(-value[$r + 1]));
                            // Two lanes' columns make a word.
                            let other = lanes::shfl_xor(pair as u32, 1);
                            let at = to * n as usize + column as usize;
                            if row < item.rows {
                                if n % 4 == 0 {
                                    if t % 2 == 0 && column < n {
                                        codes.store_word(at, pair as u32 | other << 16);
                                    }
                                } else {
                                    if column < n {
                                        codes.store(at, pair as u8);
                                    }
                                    if column + 1 < n {
                                        codes.store(at + 1, (pair >> 8) as u8);
                                    }
                                }
                            }
                            half += 1;
                        }
                        j += 1;
                    }
                };
            }
            one!(warp_row + i as u32 * 16 + g, 0);
            one!(warp_row + i as u32 * 16 + g + 8, 2);
            i += 1;
        }
    }
}
