//! Sizes of a tile, and what a warp does with its part of it.

use super::operand::Operand;
use cuda_std::arch::Arch;
use cuda_std::memory::{In, Out};
use cuda_std::mma;
use cuda_std::shared::Shared;
use cuda_std::thread::{lane, warp};
use cuda_std::{cvt, sync};

/// A tile and the warps that share it: `WM` by `WN` warps, each with `TM` times 16 rows and `TN` times 16 columns, and a ring of
/// `STAGES` stages.
#[derive(Clone, Copy, Debug)]
pub struct Tile<const WM: u32, const WN: u32, const TM: usize, const TN: usize, const STAGES: u32>;

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

/// A [`Tile`] with its sizes hidden.
pub trait Shape: Copy + Send + Sync + 'static {
    /// Rows.
    const ROWS: u32;
    /// Columns.
    const COLUMNS: u32;
    /// Threads of a block.
    const THREADS: u32;
    /// Stages of the ring.
    const STAGES: u32;
    /// Sums of a lane.
    type Sums: Copy;
    /// No sums.
    const ZERO: Self::Sums;
    /// Adds a stage, whose operands lie at bytes `left` and `right`: for each 16 k ascending, every 16-row tile of the warp times
    /// every 8-column tile.
    fn multiply<A: Arch, L: Operand, R: Operand>(left: u32, right: u32, sums: Self::Sums) -> Self::Sums;
    /// `outer + inner · s`, where s is `column_scale`, times the row's of `row_scales` if they count.
    fn fold<const ROW_SCALES: bool>(
        outer: Self::Sums,
        inner: Self::Sums,
        row_scales: Shared<f32>,
        column_scale: f32,
    ) -> Self::Sums;
    /// Rounds the sums of `rows` rows from `first` on to bf16, after the expert's biases, and stores those inside the matrix.
    fn store(sums: Self::Sums, output: Output, expert: u32, first: u32, rows: u32, column: u32);
}

impl<const WM: u32, const WN: u32, const TM: usize, const TN: usize, const STAGES: u32> Tile<WM, WN, TM, TN, STAGES> {
    /// First row and column of this warp's part.
    #[inline(always)]
    fn origin() -> (u32, u32) {
        (warp() / WN * (TM as u32 * 16), warp() % WN * (TN as u32 * 16))
    }
}

impl<const WM: u32, const WN: u32, const TM: usize, const TN: usize, const STAGES: u32> Shape
    for Tile<WM, WN, TM, TN, STAGES>
{
    const ROWS: u32 = WM * TM as u32 * 16;
    const COLUMNS: u32 = WN * TN as u32 * 16;
    const THREADS: u32 = WM * WN * 32;
    const STAGES: u32 = STAGES;
    type Sums = Sums<TM, TN>;
    const ZERO: Self::Sums = [[[[0.0; 4]; 2]; TN]; TM];

    #[inline(always)]
    fn multiply<A: Arch, L: Operand, R: Operand>(left: u32, right: u32, mut sums: Self::Sums) -> Self::Sums {
        let (row, column) = Self::origin();
        sync::converge();
        let mut half = 0;
        while half < 2 {
            let mut columns = [[[[0; 2]; 2]; 2]; TN];
            let mut j = 0;
            while j < TN {
                columns[j] = R::columns16::<A>(right, column + j as u32 * 16, half);
                j += 1;
            }
            let mut i = 0;
            while i < TM {
                let rows = L::rows16::<A>(left, row + i as u32 * 16, half);
                let mut group = 0;
                while group < 2 {
                    let mut j = 0;
                    while j < TN {
                        let [first, second] = columns[j][group];
                        sums[i][j][0] = mma::m16n8k16::<L::Mma>(rows[group], first, sums[i][j][0]);
                        sums[i][j][1] = mma::m16n8k16::<L::Mma>(rows[group], second, sums[i][j][1]);
                        j += 1;
                    }
                    group += 1;
                }
                i += 1;
            }
            half += 1;
        }
        sums
    }

    #[inline(always)]
    fn fold<const ROW_SCALES: bool>(
        mut outer: Self::Sums,
        inner: Self::Sums,
        row_scales: Shared<f32>,
        column_scale: f32,
    ) -> Self::Sums {
        let (row, _) = Self::origin();
        let mut i = 0;
        while i < TM {
            let (mut upper, mut lower) = (column_scale, column_scale);
            if ROW_SCALES {
                let at = row + i as u32 * 16 + lane() / 4;
                upper = row_scales.load(at) * column_scale;
                lower = row_scales.load(at + 8) * column_scale;
            }
            let mut j = 0;
            while j < TN {
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
    fn store(sums: Self::Sums, output: Output, expert: u32, first: u32, rows: u32, column: u32) {
        let Output { bias, out, n } = output;
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
}
