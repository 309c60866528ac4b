//! What joins gate and up, element by element, rounded once to bf16, alone or followed by the quantiser of [`crate::quant`].
//!
//! - silu: `(g · sigmoid(g)) · u`
//! - silu with a clamp: the same after `g = min(g, limit)`, `u = min(max(u, -limit), limit)`
//! - swiglu_oai: clamped, then `(u + 1) · (g · sigmoid(alpha · g))`
//!
//! with `sigmoid(x) = 1 / (1 + exp(-x))`. NaN passes through the clamps.
//!
//! A sigmoid takes some thirty instructions, more than memory leaves time for. The kernels named `table` look it up: a gate is one
//! of 2^16 values, and outside 2^-27 to 2^7 all magnitudes of a sign share one sigmoid. [`mod@sigmoid_table`] writes the others
//! once, and each block brings them to its shared memory.

use crate::quant::{COLUMNS, Place, Rows, THREADS};
use core::num::NonZeroU32;
use cuda_std::arch::Arch;
use cuda_std::cvt::{bf16_to_f32, f32x2_to_bf16x2};
use cuda_std::kernels;
use cuda_std::math::{fma, max_nan, min_nan};
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_dim, block_idx, grid_dim, thread_idx};
use cuda_std::{sync, warp as lanes};

/// Groups of a lane that are under way at the same time.
pub const IN_FLIGHT: u32 = 2;

/// Threads of a block of the kernels with a table: one table serves them all.
pub const TABLE_THREADS: u32 = 1024;
/// Least magnitude of a gate with a sigmoid of its own, 2^-27, in bf16 bits.
const LOWEST: u32 = (127 - 27) << 7;
/// Least magnitude above that again shares one, 2^7.
const HIGHEST: u32 = (127 + 7) << 7;
/// Entries of one sign: those below, one a magnitude, those above.
const ENTRIES: u32 = HIGHEST - LOWEST + 2;
/// Elements of a table: gates from 0 up, then those from -0 down.
pub const TABLE: u32 = 2 * ENTRIES;
/// Bytes of shared memory of the kernels with a table.
pub const TABLE_BYTES: u32 = TABLE * 4;
const _: () = assert!(TABLE.is_multiple_of(4));

/// silu.
pub const SILU: u32 = 0;
/// silu with a clamp.
pub const SILU_CLAMPED: u32 = 1;
/// swiglu_oai.
pub const SWIGLU_OAI: u32 = 2;

/// Factors in the sigmoid for which a table holds: gates below its least have sigmoid 1/2, those above its largest 0 or 1.
pub const fn table_holds(alpha: f32) -> bool {
    alpha.abs() >= 0.82 && alpha.abs() <= 4.0
}

kernels! {
    /// Sigmoids of gates for the kernels named `table`. Grid: any.
    pub mod sigmoid_table(
        /// [`TABLE`] sigmoids of (clamped) gates times alpha.
        table: Out<f32>,
        /// Factor in the sigmoid, 1 unless swiglu_oai.
        alpha: f32,
        /// Clamp, infinite for silu.
        limit: f32,
    );
    sigmoid_table_f32[THREADS, 4] = |_A| table_body;
}

kernels! {
    /// Gated activation. Grid: any.
    pub mod silu_mul(
        /// [`TABLE`] sigmoids, which the kernels named `table` read.
        sigmoids: In<f32>,
        /// bf16; row r begins at element gate_offset + r·gate_stride.
        gate: In<u16>,
        /// First element of gate.
        gate_offset: u64,
        /// Elements from row to row.
        gate_stride: u64,
        /// As gate. May be the same buffer.
        up: In<u16>,
        /// First element of up.
        up_offset: u64,
        /// Elements from row to row.
        up_stride: u64,
        /// [rows, cols] bf16. May be gate's or up's buffer if that has the same layout.
        out: Out<u16>,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
        /// Factor in the sigmoid (swiglu_oai).
        alpha: f32,
        /// Clamp (all but silu).
        limit: f32,
    );
    silu_mul_table[TABLE_THREADS, 1] = |_A| looked_up_body::<SILU>;
    silu_mul_clamped_table[TABLE_THREADS, 1] = |_A| looked_up_body::<SILU_CLAMPED>;
    silu_mul_oai_table[TABLE_THREADS, 1] = |_A| looked_up_body::<SWIGLU_OAI>;
    silu_mul_vector[THREADS, 4] = |_A| body::<SILU, true>;
    silu_mul_any[THREADS, 4] = |_A| body::<SILU, false>;
    silu_mul_clamped_vector[THREADS, 4] = |_A| body::<SILU_CLAMPED, true>;
    silu_mul_clamped_any[THREADS, 4] = |_A| body::<SILU_CLAMPED, false>;
    silu_mul_oai_vector[THREADS, 4] = |_A| body::<SWIGLU_OAI, true>;
    silu_mul_oai_any[THREADS, 4] = |_A| body::<SWIGLU_OAI, false>;
}

kernels! {
    /// Gated activation and quantiser: the bytes of the two operations. Grid: any.
    pub mod silu_mul_quant_fp8(
        /// [`TABLE`] sigmoids, which the kernels named `table` read.
        sigmoids: In<f32>,
        /// bf16; row r begins at element gate_offset + r·gate_stride.
        gate: In<u16>,
        /// First element of gate.
        gate_offset: u64,
        /// Elements from row to row.
        gate_stride: u64,
        /// As gate. May be the same buffer.
        up: In<u16>,
        /// First element of up.
        up_offset: u64,
        /// Elements from row to row.
        up_stride: u64,
        /// [rows, cols] e4m3 codes.
        codes: Out<u8>,
        /// [rows, ceil(cols / 128)] scales.
        scales: Out<f32>,
        /// [rows, cols] bf16, what is quantised. May be null, and gate's or up's buffer if that has the same layout.
        copy: Out<u16>,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
        /// Factor in the sigmoid (swiglu_oai).
        alpha: f32,
        /// Clamp (all but silu).
        limit: f32,
    );
    silu_mul_quant_fp8_table[TABLE_THREADS, 1] = |A| looked_up_quant_body::<SILU, A>;
    silu_mul_quant_fp8_clamped_table[TABLE_THREADS, 1] = |A| looked_up_quant_body::<SILU_CLAMPED, A>;
    silu_mul_quant_fp8_oai_table[TABLE_THREADS, 1] = |A| looked_up_quant_body::<SWIGLU_OAI, A>;
    silu_mul_quant_fp8_vector[THREADS, 4] = |A| quant_body::<SILU, true, A>;
    silu_mul_quant_fp8_any[THREADS, 4] = |A| quant_body::<SILU, false, A>;
    silu_mul_quant_fp8_clamped_vector[THREADS, 4] = |A| quant_body::<SILU_CLAMPED, true, A>;
    silu_mul_quant_fp8_clamped_any[THREADS, 4] = |A| quant_body::<SILU_CLAMPED, false, A>;
    silu_mul_quant_fp8_oai_vector[THREADS, 4] = |A| quant_body::<SWIGLU_OAI, true, A>;
    silu_mul_quant_fp8_oai_any[THREADS, 4] = |A| quant_body::<SWIGLU_OAI, false, A>;
}

/// 1 / (1 + exp(x)) with the bits that [`cuda_std::math::exp`] gives, for any x but NaN, in fewer steps and without a branch.
///
/// - Up to -17.4 the sum is 1, and from 88.73 on it is infinite: x between -20 and 89 stands for all.
/// - n has 8 bits and the first constant 9, so their product is exact and may be fused with the difference.
/// - y lies within 0.7 to 1.42 and n within -29 to 128: y·2^(n-1) is y with another exponent field, and doubling it in the sum
///   overflows exactly where exp does.
#[inline(always)]
// The constants as they are published: rounding them to f32 is the compiler's part.
#[allow(clippy::excessive_precision, clippy::approx_constant, clippy::manual_clamp)]
fn one_over_one_plus_exp(x: f32) -> f32 {
    // One instruction each, which clamp is not.
    let x = x.max(-20.0).min(89.0);
    let biased = x * 1.442_695_04 + 12_582_912.0;
    let n = biased - 12_582_912.0;
    let r = fma(n, -0.693_359_375, x) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_15e-4;
    p = p * r + 1.398_199_950_7e-3;
    p = p * r + 8.333_451_907_3e-3;
    p = p * r + 4.166_579_589_4e-2;
    p = p * r + 1.666_666_545_9e-1;
    p = p * r + 5.000_000_120_1e-1;
    let y = (p * (r * r) + r) + 1.0;
    // The low bits of `biased` are n.
    let half = f32::from_bits(y.to_bits().wrapping_add(biased.to_bits() << 23).wrapping_sub(1 << 23));
    1.0 / fma(half, 2.0, 1.0)
}

/// Where the sigmoid of a gate comes from.
trait Sigmoid: Copy {
    /// sigmoid(x), where x is alpha times the clamped gate, and `bits` are those of the gate itself.
    fn of(self, x: f32, bits: u32) -> f32;
}

/// From x.
#[derive(Clone, Copy)]
struct Computed;

impl Sigmoid for Computed {
    #[inline(always)]
    fn of(self, x: f32, _: u32) -> f32 {
        // A NaN is lost here, and is in the product all the same.
        one_over_one_plus_exp(-x)
    }
}

/// From the table.
#[derive(Clone, Copy)]
struct LookedUp(Shared<f32>);

impl LookedUp {
    /// Brings the table into shared memory. A barrier stands between this and the first look.
    #[inline(always)]
    fn fetch(sigmoids: In<f32>) -> Self {
        let table = Shared::<f32>::at(0, TABLE);
        let mut at = thread_idx() * 4;
        while at < TABLE {
            table.store_v4(at, sigmoids.load_v4(at as usize));
            at += block_dim() * 4;
        }
        LookedUp(table)
    }
}

impl Sigmoid for LookedUp {
    #[inline(always)]
    fn of(self, _: f32, bits: u32) -> f32 {
        let entry = ((bits & 0x7FFF) as i32 - (LOWEST as i32 - 1)).max(0).min(ENTRIES as i32 - 1) as u32;
        self.0.load(if bits & 0x8000 != 0 { entry + ENTRIES } else { entry })
    }
}

#[inline(always)]
fn table_body(table: Out<f32>, alpha: f32, limit: f32) {
    let mut at = block_idx() * block_dim() + thread_idx();
    while at < TABLE {
        let entry = at % ENTRIES;
        // 0 stands for what is below.
        let magnitude = if entry == 0 { 0 } else { LOWEST - 1 + entry };
        let gate = bf16_to_f32((magnitude | (at / ENTRIES) << 15) as u16);
        table.store(at as usize, one_over_one_plus_exp(-(alpha * min_nan(gate, limit))));
        at += grid_dim() * block_dim();
    }
}

/// What an activation is computed with.
#[derive(Clone, Copy)]
struct Gating<S> {
    sigmoid: S,
    alpha: f32,
    limit: f32,
}

/// silu of the gate with these bf16 bits, after the clamp, times `up`; not rounded.
#[inline(always)]
pub(crate) fn clamped_silu(gate: u16, up: f32, limit: f32) -> f32 {
    Gating { sigmoid: Computed, alpha: 1.0, limit }.activate::<SILU_CLAMPED>(gate as u32, up)
}

impl<S: Sigmoid> Gating<S> {
    /// The activation of the gate with these bits (higher ones are ignored), not rounded.
    #[inline(always)]
    fn activate<const GATING: u32>(self, bits: u32, mut u: f32) -> f32 {
        let mut g = bf16_to_f32(bits as u16);
        if GATING != SILU {
            g = min_nan(g, self.limit);
            u = min_nan(max_nan(u, -self.limit), self.limit);
        }
        if GATING == SWIGLU_OAI {
            (u + 1.0) * (g * self.sigmoid.of(self.alpha * g, bits))
        } else {
            (g * self.sigmoid.of(g, bits)) * u
        }
    }

    /// Eight elements, two a word.
    #[inline(always)]
    fn activate8<const GATING: u32>(self, gate: [u32; 4], up: [u32; 4]) -> [u32; 4] {
        [0, 1, 2, 3].map(|i: usize| {
            let low = self.activate::<GATING>(gate[i], bf16_to_f32(up[i] as u16));
            let high = self.activate::<GATING>(gate[i] >> 16, f32::from_bits(up[i] & 0xFFFF_0000));
            f32x2_to_bf16x2(low, high)
        })
    }
}

/// Writes eight columns, or those that there are.
#[inline(always)]
fn store8<const VECTOR: bool>(out: Out<u16>, row: u32, column: u32, cols: u32, words: [u32; 4]) {
    let to = row as usize * cols as usize + column as usize;
    if VECTOR {
        if column < cols {
            out.store_v4(to, words);
        }
        return;
    }
    let put = |i: u32, bits: u32| {
        if column + i < cols {
            out.store(to + i as usize, bits as u16);
        }
    };
    put(0, words[0]);
    put(1, words[0] >> 16);
    put(2, words[1]);
    put(3, words[1] >> 16);
    put(4, words[2]);
    put(5, words[2] >> 16);
    put(6, words[3]);
    put(7, words[3] >> 16);
}

/// Row and word of eight columns, which advance by a fixed step: one division at the start instead of one a word.
#[derive(Clone, Copy)]
struct Word {
    row: u32,
    word: u32,
    words: NonZeroU32,
    step: u32,
}

impl Word {
    #[inline(always)]
    fn first(cols: u32) -> Self {
        let words = NonZeroU32::new(cols.div_ceil(COLUMNS)).unwrap_or(NonZeroU32::MIN);
        let start = block_idx() * block_dim() + thread_idx();
        Word { row: start / words, word: start % words, words, step: grid_dim() * block_dim() }
    }

    /// This word, which it leaves for the next.
    #[inline(always)]
    fn take(&mut self) -> Word {
        let word = *self;
        self.row += self.step / self.words;
        self.word += self.step % self.words;
        if self.word >= self.words.get() {
            self.row += 1;
            self.word -= self.words.get();
        }
        word
    }

    #[inline(always)]
    fn load<const VECTOR: bool>(&self, from: Rows, rows: u32, cols: u32) -> [u32; 4] {
        from.load::<VECTOR>(self.row, self.word * COLUMNS, cols, self.row < rows)
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<const GATING: u32, const VECTOR: bool>(
    _: In<f32>,
    gate: In<u16>,
    gate_offset: u64,
    gate_stride: u64,
    up: In<u16>,
    up_offset: u64,
    up_stride: u64,
    out: Out<u16>,
    rows: u32,
    cols: u32,
    alpha: f32,
    limit: f32,
) {
    let gate = Rows { data: gate, offset: gate_offset, stride: gate_stride };
    let up = Rows { data: up, offset: up_offset, stride: up_stride };
    let gating = Gating { sigmoid: Computed, alpha, limit };
    let mut next = Word::first(cols);
    while next.row < rows {
        let places = [0; IN_FLIGHT as usize].map(|_| next.take());
        let g = places.map(|place| place.load::<VECTOR>(gate, rows, cols));
        let u = places.map(|place| place.load::<VECTOR>(up, rows, cols));
        let mut i = 0;
        while i < IN_FLIGHT as usize {
            let Word { row, word, .. } = places[i];
            if row < rows {
                store8::<VECTOR>(out, row, word * COLUMNS, cols, gating.activate8::<GATING>(g[i], u[i]));
            }
            i += 1;
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn looked_up_body<const GATING: u32>(
    sigmoids: In<f32>,
    gate: In<u16>,
    gate_offset: u64,
    gate_stride: u64,
    up: In<u16>,
    up_offset: u64,
    up_stride: u64,
    out: Out<u16>,
    rows: u32,
    cols: u32,
    alpha: f32,
    limit: f32,
) {
    let gate = Rows { data: gate, offset: gate_offset, stride: gate_stride };
    let up = Rows { data: up, offset: up_offset, stride: up_stride };
    let mut next = Word::first(cols);
    // The first elements are under way with the table, later ones while their predecessors are computed.
    let mut place = next.take();
    let (mut g, mut u) = (place.load::<true>(gate, rows, cols), place.load::<true>(up, rows, cols));
    let gating = Gating { sigmoid: LookedUp::fetch(sigmoids), alpha, limit };
    sync::sync_threads();
    let finish = |place: Word, g, u| {
        if place.row < rows {
            store8::<true>(out, place.row, place.word * COLUMNS, cols, gating.activate8::<GATING>(g, u));
        }
    };
    // Two in turn, so that nothing moves from register to register.
    while place.row < rows {
        let other = next.take();
        let (other_g, other_u) = (other.load::<true>(gate, rows, cols), other.load::<true>(up, rows, cols));
        finish(place, g, u);
        place = next.take();
        (g, u) = (place.load::<true>(gate, rows, cols), place.load::<true>(up, rows, cols));
        finish(other, other_g, other_u);
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn quant_body<const GATING: u32, const VECTOR: bool, A: Arch>(
    _: In<f32>,
    gate: In<u16>,
    gate_offset: u64,
    gate_stride: u64,
    up: In<u16>,
    up_offset: u64,
    up_stride: u64,
    codes: Out<u8>,
    scales: Out<f32>,
    copy: Out<u16>,
    rows: u32,
    cols: u32,
    alpha: f32,
    limit: f32,
) {
    let gate = Rows { data: gate, offset: gate_offset, stride: gate_stride };
    let up = Rows { data: up, offset: up_offset, stride: up_stride };
    let gating = Gating { sigmoid: Computed, alpha, limit };
    let mut next = Place::first(cols);
    // The lanes of a warp stay together: shuffles.
    while lanes::any(next.row < rows) {
        let places = [0; IN_FLIGHT as usize].map(|_| next.take());
        let g = places.map(|place| gate.load::<VECTOR>(place.row, place.column(), cols, place.row < rows));
        let u = places.map(|place| up.load::<VECTOR>(place.row, place.column(), cols, place.row < rows));
        let mut i = 0;
        while i < IN_FLIGHT as usize {
            let place = places[i];
            // Columns behind the last are gate 0, up 0, which every gating turns into 0.
            let words = gating.activate8::<GATING>(g[i], u[i]);
            if !copy.is_null() && place.row < rows {
                store8::<VECTOR>(copy, place.row, place.column(), cols, words);
            }
            place.quantise::<VECTOR, A>(words, codes, scales, rows, cols);
            i += 1;
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn looked_up_quant_body<const GATING: u32, A: Arch>(
    sigmoids: In<f32>,
    gate: In<u16>,
    gate_offset: u64,
    gate_stride: u64,
    up: In<u16>,
    up_offset: u64,
    up_stride: u64,
    codes: Out<u8>,
    scales: Out<f32>,
    copy: Out<u16>,
    rows: u32,
    cols: u32,
    alpha: f32,
    limit: f32,
) {
    let gate = Rows { data: gate, offset: gate_offset, stride: gate_stride };
    let up = Rows { data: up, offset: up_offset, stride: up_stride };
    let load = |from: Rows, place: Place| from.load::<true>(place.row, place.column(), cols, place.row < rows);
    let mut next = Place::first(cols);
    // As in `looked_up_body`.
    let mut place = next.take();
    let (mut g, mut u) = (load(gate, place), load(up, place));
    let gating = Gating { sigmoid: LookedUp::fetch(sigmoids), alpha, limit };
    sync::sync_threads();
    let finish = |place: Place, g, u| {
        let words = gating.activate8::<GATING>(g, u);
        if !copy.is_null() && place.row < rows {
            store8::<true>(copy, place.row, place.column(), cols, words);
        }
        place.quantise::<true, A>(words, codes, scales, rows, cols);
    };
    while lanes::any(place.row < rows) {
        let other = next.take();
        let (other_g, other_u) = (load(gate, other), load(up, other));
        finish(place, g, u);
        place = next.take();
        (g, u) = (load(gate, place), load(up, place));
        finish(other, other_g, other_u);
    }
}
