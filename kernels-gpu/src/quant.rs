//! Quantiser: rows of bf16 to e4m3 codes, with one f32 scale for each group of 128 columns. The last group of a row is what is left.
//!
//! `scale = amax / 448`, where amax is the largest magnitude of the group without its NaN, and at least 1e-12;
//! `code = e4m3(a / scale)`, a true division, saturating. A NaN gives 0x7F; an infinity makes the scale infinite, itself 0x7F and
//! finite elements of its group ±0.
//!
//! Sixteen lanes take a group, eight columns each: one 16-byte load, four shuffles, one 8-byte store.

use core::num::NonZeroU32;
use cuda_std::arch::Arch;
use cuda_std::cvt::{bf16_to_f32, f32x2_to_e4m3x2};
use cuda_std::kernels;
use cuda_std::math::fma;
use cuda_std::memory::{In, Out};
use cuda_std::thread::{block_dim, block_idx, grid_dim, lane, thread_idx};
use cuda_std::warp as lanes;

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Columns that share a scale.
pub const GROUP: u32 = 128;
/// Columns of a lane.
pub const COLUMNS: u32 = 8;
/// Lanes of a group.
pub const LANES: u32 = GROUP / COLUMNS;
/// Groups of a lane that are under way at the same time, in whole vectors.
pub const IN_FLIGHT: u32 = 4;

kernels! {
    /// Quantiser. Grid: any.
    pub mod per_token_group_quant_fp8(
        /// bf16; row r begins at element offset + r·stride.
        x: In<u16>,
        /// First element.
        offset: u64,
        /// Elements from row to row.
        stride: u64,
        /// [rows, cols] e4m3 codes.
        codes: Out<u8>,
        /// [rows, ceil(cols / 128)] scales.
        scales: Out<f32>,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
    );
    per_token_group_quant_fp8_vector[THREADS, 4] = |A| body::<true, { IN_FLIGHT as usize }, A>;
    per_token_group_quant_fp8_any[THREADS, 4] = |A| body::<false, 2, A>;
}

/// Whether rows of `cols` columns can be read and written in whole vectors: then the kernels named `vector` may be used.
pub const fn in_vectors(cols: u32, offset: u64, stride: u64) -> bool {
    cols.is_multiple_of(COLUMNS) && offset.is_multiple_of(COLUMNS as u64) && stride.is_multiple_of(COLUMNS as u64)
}

/// Rows of bf16 that may lie apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub data: In<u16>,
    pub offset: u64,
    pub stride: u64,
}

impl Rows {
    /// Eight columns from `column` on, two a word; zeros where there are none, and everywhere unless `used`.
    #[inline(always)]
    pub fn load<const VECTOR: bool>(self, row: u32, column: u32, cols: u32, used: bool) -> [u32; 4] {
        let at = self.offset as usize + row as usize * self.stride as usize + column as usize;
        if VECTOR {
            return if used && column < cols { self.data.load_v4(at) } else { [0; 4] };
        }
        let element = |i: u32| if used && column + i < cols { self.data.load(at + i as usize) as u32 } else { 0 };
        [0, 2, 4, 6].map(|i| element(i) | element(i + 1) << 16)
    }
}

/// Row and group of half a warp, which advance by a fixed step: one division at the start instead of one a group.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub row: u32,
    pub group: u32,
    groups: NonZeroU32,
    step: u32,
}

impl Place {
    #[inline(always)]
    pub fn first(cols: u32) -> Self {
        let groups = NonZeroU32::new(cols.div_ceil(GROUP)).unwrap_or(NonZeroU32::MIN);
        let unit = block_idx() * (block_dim() / LANES) + thread_idx() / LANES;
        Place { row: unit / groups, group: unit % groups, groups, step: grid_dim() * (block_dim() / LANES) }
    }

    /// This place, which it leaves for the next.
    #[inline(always)]
    pub fn take(&mut self) -> Place {
        let place = *self;
        self.row += self.step / self.groups;
        self.group += self.step % self.groups;
        if self.group >= self.groups.get() {
            self.row += 1;
            self.group -= self.groups.get();
        }
        place
    }

    /// First column of this lane.
    #[inline(always)]
    pub fn column(&self) -> u32 {
        self.group * GROUP + lane() % LANES * COLUMNS
    }

    /// Writes codes and scale of the group whose eight elements here are `words`. All lanes of the warp take part.
    #[inline(always)]
    pub fn quantise<const VECTOR: bool, A: Arch>(
        &self,
        words: [u32; 4],
        codes: Out<u8>,
        scales: Out<f32>,
        rows: u32,
        cols: u32,
    ) {
        // Negated, as `Scale::divide` wants them.
        let values = words.map(|word| {
            let word = word ^ 0x8000_8000;
            [bf16_to_f32(word as u16), f32::from_bits(word & 0xFFFF_0000)]
        });
        // f32::max drops a NaN.
        let largest = values.map(|[low, high]| low.abs().max(high.abs()));
        let mut amax = 0.0f32.max(largest[0]).max(largest[1]).max(largest[2]).max(largest[3]);
        let mut distance = LANES / 2;
        while distance > 0 {
            amax = amax.max(lanes::shfl_xor(amax, distance));
            distance /= 2;
        }
        let scale = Scale::of(amax);
        let pairs = values.map(|[low, high]| f32x2_to_e4m3x2::<A>(scale.divide(low), scale.divide(high)) as u32);
        // Conditions at the stores: a branch around them would be taken by half a warp.
        let inside = self.row < rows;
        if inside && lane().is_multiple_of(LANES) {
            scales.store(self.row as usize * self.groups.get() as usize + self.group as usize, scale.value);
        }
        let column = self.column();
        let to = self.row as usize * cols as usize + column as usize;
        if VECTOR {
            if inside && column < cols {
                codes.store_v2(to, [pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16]);
            }
        } else {
            let put = |i: u32, code: u32| {
                if inside && column + i < cols {
                    codes.store(to + i as usize, code as u8);
                }
            };
            put(0, pairs[0]);
            put(1, pairs[0] >> 8);
            put(2, pairs[1]);
            put(3, pairs[1] >> 8);
            put(4, pairs[2]);
            put(5, pairs[2] >> 8);
            put(6, pairs[3]);
            put(7, pairs[3] >> 8);
        }
    }
}

/// A scale, and what divides by it.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub value: f32,
    negated_reciprocal: f32,
    divisor: f32,
}

impl Scale {
    /// amax / 448, at least 1e-12.
    ///
    /// 1/448 is the sum of two f32 within 2^-56, so the fused sum is the correctly rounded quotient: sevenths lie no nearer to the
    /// middle between two f32 than 1/14 of their distance. Both parts are positive, which keeps an infinity.
    #[inline(always)]
    pub fn of(amax: f32) -> Self {
        const HIGH: f32 = f32::from_bits(0x3B12_4924);
        const LOW: f32 = ((1.0 - 448.0 * HIGH as f64) / 448.0) as f32;
        const { assert!(LOW > 0.0 && LOW < 2e-10) };
        // Negative throughout: 1/x costs less than -1/x.
        let quotient = fma(amax, -HIGH, amax * -LOW);
        let negated = if quotient > -1e-12 { -1e-12 } else { quotient };
        // With an infinite scale the reciprocal is 0, and the correction below must not meet 0·inf.
        let divisor = if negated == f32::NEG_INFINITY { 1.0 } else { -negated };
        Scale { value: -negated, negated_reciprocal: 1.0 / negated, divisor }
    }

    /// A value with the e4m3 code of a / scale, from -a, in three instructions: the product with the reciprocal, corrected once by
    /// its remainder.
    ///
    /// That the code is the same is a finite statement. A scale is (bf16 magnitude) / 448 or 1e-12, so it has one of 129
    /// significands; a has one of 128. Nothing here is subnormal or overflows where a is at least 2^-10 scales, hence all
    /// operations commute with powers of two, and only the exponents' difference remains, of which 20 values matter: below,
    /// every code is ±0. The tests go through all combinations. A zero keeps its sign, since its remainder is +0 and enters negated.
    #[inline(always)]
    pub fn divide(self, negated: f32) -> f32 {
        let product = negated * self.negated_reciprocal;
        let excess = fma(product, self.divisor, negated);
        fma(excess, self.negated_reciprocal, product)
    }
}

#[inline(always)]
fn body<const VECTOR: bool, const MANY: usize, A: Arch>(
    x: In<u16>,
    offset: u64,
    stride: u64,
    codes: Out<u8>,
    scales: Out<f32>,
    rows: u32,
    cols: u32,
) {
    let x = Rows { data: x, offset, stride };
    let mut next = Place::first(cols);
    // The lanes of a warp stay together: shuffles.
    while lanes::any(next.row < rows) {
        let places = [0; MANY].map(|_| next.take());
        let words = places.map(|place| x.load::<VECTOR>(place.row, place.column(), cols, place.row < rows));
        let mut i = 0;
        while i < MANY {
            places[i].quantise::<VECTOR, A>(words[i], codes, scales, rows, cols);
            i += 1;
        }
    }
}
