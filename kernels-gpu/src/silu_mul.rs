//! What joins gate and up, element by element, rounded once to bf16, alone or followed by the quantiser of [`crate::quant`].
//!
//! - silu: `(g · sigmoid(g)) · u`
//! - silu with a clamp: the same after `g = min(g, limit)`, `u = min(max(u, -limit), limit)`
//! - swiglu_oai: clamped, then `(u + 1) · (g · sigmoid(alpha · g))`
//!
//! with `sigmoid(x) = 1 / (1 + exp(-x))`. NaN passes through the clamps.

use crate::quant::{COLUMNS, Place, Rows, THREADS};
use core::num::NonZeroU32;
use cuda_std::arch::Arch;
use cuda_std::cvt::{bf16_to_f32, f32x2_to_bf16x2};
use cuda_std::kernels;
use cuda_std::math::{fma, max_nan, min_nan};
use cuda_std::memory::{In, Out};
use cuda_std::thread::{block_idx, grid_dim, thread_idx};
use cuda_std::warp as lanes;

/// Groups of a lane that are under way at the same time.
pub const IN_FLIGHT: u32 = 2;

const SILU: u32 = 0;
const SILU_CLAMPED: u32 = 1;
const SWIGLU_OAI: u32 = 2;

kernels! {
    /// Gated activation. Grid: any.
    pub mod silu_mul(
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
#[allow(clippy::excessive_precision, clippy::approx_constant)]
fn one_over_one_plus_exp(x: f32) -> f32 {
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

/// The activation, not rounded.
#[inline(always)]
fn activate<const GATING: u32>(mut g: f32, mut u: f32, alpha: f32, limit: f32) -> f32 {
    if GATING != SILU {
        g = min_nan(g, limit);
        u = min_nan(max_nan(u, -limit), limit);
    }
    // A NaN of g is lost in the sigmoid and is in the product all the same.
    if GATING == SWIGLU_OAI {
        (u + 1.0) * (g * one_over_one_plus_exp(-(alpha * g)))
    } else {
        (g * one_over_one_plus_exp(-g)) * u
    }
}

/// Eight elements, two a word.
#[inline(always)]
fn activate8<const GATING: u32>(gate: [u32; 4], up: [u32; 4], alpha: f32, limit: f32) -> [u32; 4] {
    [0, 1, 2, 3].map(|i: usize| {
        let low = activate::<GATING>(bf16_to_f32(gate[i] as u16), bf16_to_f32(up[i] as u16), alpha, limit);
        let (g, u) = (f32::from_bits(gate[i] & 0xFFFF_0000), f32::from_bits(up[i] & 0xFFFF_0000));
        f32x2_to_bf16x2(low, activate::<GATING>(g, u, alpha, limit))
    })
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

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<const GATING: u32, const VECTOR: bool>(
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
    let words = NonZeroU32::new(cols.div_ceil(COLUMNS)).unwrap_or(NonZeroU32::MIN);
    let start = block_idx() * THREADS + thread_idx();
    let step = grid_dim() * THREADS;
    let (mut row, mut word) = (start / words, start % words);
    let (rows_on, words_on) = (step / words, step % words);
    while row < rows {
        let places = [0, 1].map(|_| {
            let place = (row, word * COLUMNS);
            row += rows_on;
            word += words_on;
            if word >= words.get() {
                row += 1;
                word -= words.get();
            }
            place
        });
        let g = places.map(|(row, column)| gate.load::<VECTOR>(row, column, cols, row < rows));
        let u = places.map(|(row, column)| up.load::<VECTOR>(row, column, cols, row < rows));
        let mut i = 0;
        while i < 2 {
            let (row, column) = places[i];
            if row < rows {
                store8::<VECTOR>(out, row, column, cols, activate8::<GATING>(g[i], u[i], alpha, limit));
            }
            i += 1;
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn quant_body<const GATING: u32, const VECTOR: bool, A: Arch>(
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
    let mut next = Place::first(cols);
    // The lanes of a warp stay together: shuffles.
    while lanes::any(next.row < rows) {
        let places = [0; IN_FLIGHT as usize].map(|_| next.take());
        let g = places.map(|place| gate.load::<VECTOR>(place.row, place.column(), cols, place.row < rows));
        let u = places.map(|place| up.load::<VECTOR>(place.row, place.column(), cols, place.row < rows));
        let mut i = 0;
        while i < IN_FLIGHT as usize {
            let place = places[i];
            // Columns behind the last are gate 0, up 0, which swiglu_oai turns into 0 too.
            let words = activate8::<GATING>(g[i], u[i], alpha, limit);
            if !copy.is_null() && place.row < rows {
                store8::<VECTOR>(copy, place.row, place.column(), cols, words);
            }
            place.quantise::<VECTOR, A>(words, codes, scales, rows, cols);
            i += 1;
        }
    }
}
