//! Grouped GEMMs: the rows of each expert times its weights, `out[r] = a[row of r] · weights[expert]^T`.
//!
//! Rows are sorted by expert; a work item is a tile of one expert's rows by a tile of columns. Sums walk k in ascending groups of
//! 16, each one an mma:
//!
//! | kernel | a | weights | block scales enter |
//! |---|---|---|---|
//! | `moe_w8a8_grouped_gemm_e4m3_native` | e4m3 | e4m3 | the same |
//! | `moe_fp8_grouped_gemm` | bf16 | e4m3 | every 128 k: `outer += inner · b_scale` |
//! | `moe_w8a8_grouped_gemm`, `…_pm4`, `…_e4m3_gu`, `…_e4m3_dn` | e4m3 | e4m3 | every 64 k: `outer += inner · (a_scale · b_scale)` |
//! | `moe_bf16_grouped_gemm` | bf16 | bf16 | never |
//!
//! Product and sum of a fold are two roundings. Grid, tile sizes and the order of items have no influence on the bits: the four W8A8
//! kernels differ in nothing else. e4m3 enters the tensor cores as f16 or bf16, exactly, NaN codes included, but for `…_native` on
//! architectures with [`Arch::E4M3_MMA`]: there it is one mma for 32 k, with that instruction's own sums; elsewhere it gives the bits
//! of the other four. The `_narrow` forms are
//! for rows whose length in bytes is no multiple of 16.
//!
//! The inner loop is [`Shape::multiply`], the copies are in [`tiles`], the fragments in [`operand`].

pub mod operand;
pub mod shape;
pub mod tiles;

use cuda_std::arch::Arch;
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_idx, grid_dim};
use cuda_std::{copy, kernels, sync};
use operand::{Bf16Pairs, Bf16Quads, E4m3, E4m3AsBf16, E4m3Native, Left, Right};
use shape::{Joined, Output, Shape, Tile};
use tiles::{Copier, Item, Problem, Ring, Source};

/// Tile of the dense grid.
pub type Dense = Tile<2, 2, 2, 2, 4>;
/// Tile of `moe_w8a8_grouped_gemm_pm4`: one block a multiprocessor.
pub type Pm4 = Tile<2, 4, 4, 2, 4>;
/// Tile of `moe_w8a8_grouped_gemm_e4m3_gu`: for few rows an expert.
pub type GateUp = Tile<2, 4, 2, 2, 4>;
/// Tile of `moe_w8a8_grouped_gemm_e4m3_dn`: two blocks a multiprocessor.
pub type Down = Tile<2, 2, 4, 2, 4>;
/// Tile of `moe_fp8_grouped_gemm`.
pub type Fp8 = Tile<2, 4, 4, 2, 4>;
/// Tile of `moe_bf16_grouped_gemm`.
pub type Bf16 = Tile<2, 4, 4, 2, 4>;

/// Tile of `moe_w8a8_gateup_silu_e4m3_w1`: one block a multiprocessor.
pub type Paired1 = Tile<2, 4, 1, 4, 4, true>;
/// Tile of `moe_w8a8_gateup_silu_e4m3_w2`: two blocks.
pub type Paired2 = Tile<1, 4, 1, 4, 4, true>;

/// Bytes of shared memory of a W8A8 kernel with tile `T`.
pub const fn w8a8_shared_bytes<T: Shape>() -> u32 {
    Ring::<E4m3, E4m3, T>::BYTES
}

/// Bytes of shared memory of `moe_fp8_grouped_gemm`.
pub const FP8_SHARED_BYTES: u32 = Ring::<Bf16Quads, E4m3AsBf16, Fp8>::BYTES;
/// Bytes of shared memory of `moe_bf16_grouped_gemm`.
pub const BF16_SHARED_BYTES: u32 = Ring::<Bf16Pairs, Bf16Pairs, Bf16>::BYTES;

kernels! {
    /// e4m3 activations, e4m3 weights, items from a work-list.
    pub mod w8a8(
        /// [items, ITEM_WORDS] work-list.
        worklist: In<u32>,
        /// `[1]` number of items.
        total: In<u32>,
        /// [rows, k] codes.
        a: In<u8>,
        /// [rows, ceil(k/128)] scales.
        a_scale: In<f32>,
        /// Row of `a` for each sorted row; null for the same.
        sorted_token_ids: In<i32>,
        /// `[E]` addresses of [n, k] codes.
        weights: In<u64>,
        /// `[E]` addresses of [ceil(n/128), ceil(k/128)] scales.
        scales: In<u64>,
        /// [E, n] biases; null for none.
        bias: In<f32>,
        /// [sorted rows, n] bf16.
        out: Out<u16>,
        /// Columns of the output.
        n: u32,
        /// Columns of `a` and of the weights.
        k: u32,
        /// Rows of `a`.
        a_rows: u32,
        /// Rows of `out`.
        rows: u32,
        /// Items that the work-list has room for.
        capacity: u32,
    );
    moe_w8a8_grouped_gemm_pm4[Pm4::THREADS, 1] = |A, Params| w8a8_body::<A, E4m3, Pm4, true>;
    moe_w8a8_grouped_gemm_e4m3_gu[GateUp::THREADS, 1] = |A, Params| w8a8_body::<A, E4m3, GateUp, true>;
    moe_w8a8_grouped_gemm_e4m3_dn[Down::THREADS, 2] = |A, Params| w8a8_body::<A, E4m3, Down, true>;
    moe_w8a8_grouped_gemm_listed_narrow[Down::THREADS, 2] = |A, Params| w8a8_body::<A, E4m3, Down, false>;
    moe_w8a8_grouped_gemm_e4m3_native[Down::THREADS, 2] = |Native, Params| w8a8_body::<Native, E4m3Native, Down, true>;
    moe_w8a8_grouped_gemm_e4m3_native_narrow[Down::THREADS, 2] = |Native, Params| w8a8_body::<Native, E4m3Native, Down, false>;
}

kernels! {
    /// e4m3 activations, e4m3 weights, one block for each possible tile: ceil(n / 64) · max_m_tiles · E blocks.
    pub mod w8a8_dense(
        /// [E + 1] first sorted row of each expert.
        expert_offsets: In<i32>,
        /// [rows, k] codes.
        a: In<u8>,
        /// [rows, ceil(k/128)] scales.
        a_scale: In<f32>,
        /// Row of `a` for each sorted row; null for the same.
        sorted_token_ids: In<i32>,
        /// `[E]` addresses of [n, k] codes.
        weights: In<u64>,
        /// `[E]` addresses of [ceil(n/128), ceil(k/128)] scales.
        scales: In<u64>,
        /// [E, n] biases; null for none.
        bias: In<f32>,
        /// [sorted rows, n] bf16.
        out: Out<u16>,
        /// Columns of the output.
        n: u32,
        /// Columns of `a` and of the weights.
        k: u32,
        /// Rows of `a`.
        a_rows: u32,
        /// Rows of `out`.
        rows: u32,
        /// Row tiles of each expert that have a block.
        max_m_tiles: u32,
    );
    moe_w8a8_grouped_gemm[Dense::THREADS, 2] = |A, Params| dense_body::<A, true>;
    moe_w8a8_grouped_gemm_narrow[Dense::THREADS, 2] = |A, Params| dense_body::<A, false>;
}

kernels! {
    /// bf16 activations, e4m3 weights.
    pub mod fp8(
        /// [items, ITEM_WORDS] work-list.
        worklist: In<u32>,
        /// `[1]` number of items.
        total: In<u32>,
        /// [rows, k] bf16.
        a: In<u16>,
        /// Row of `a` for each sorted row; null for the same.
        sorted_token_ids: In<i32>,
        /// `[E]` addresses of [n, k] codes.
        weights: In<u64>,
        /// `[E]` addresses of [ceil(n/128), ceil(k/128)] scales.
        scales: In<u64>,
        /// [E, n] biases; null for none.
        bias: In<f32>,
        /// [sorted rows, n] bf16.
        out: Out<u16>,
        /// Columns of the output.
        n: u32,
        /// Columns of `a` and of the weights.
        k: u32,
        /// Rows of `a`.
        a_rows: u32,
        /// Rows of `out`.
        rows: u32,
        /// Items that the work-list has room for.
        capacity: u32,
    );
    moe_fp8_grouped_gemm[Fp8::THREADS, 1] = |A, Params| fp8_body::<A, true>;
    moe_fp8_grouped_gemm_narrow[Fp8::THREADS, 1] = |A, Params| fp8_body::<A, false>;
}

kernels! {
    /// bf16 activations, bf16 weights.
    pub mod bf16(
        /// [items, ITEM_WORDS] work-list.
        worklist: In<u32>,
        /// `[1]` number of items.
        total: In<u32>,
        /// [rows, k] bf16.
        a: In<u16>,
        /// Row of `a` for each sorted row; null for the same.
        sorted_token_ids: In<i32>,
        /// `[E]` addresses of [n, k] bf16.
        weights: In<u64>,
        /// [E, n] biases; null for none.
        bias: In<f32>,
        /// [sorted rows, n] bf16.
        out: Out<u16>,
        /// Columns of the output.
        n: u32,
        /// Columns of `a` and of the weights.
        k: u32,
        /// Rows of `a`.
        a_rows: u32,
        /// Rows of `out`.
        rows: u32,
        /// Items that the work-list has room for.
        capacity: u32,
    );
    moe_bf16_grouped_gemm[Bf16::THREADS, 1] = |A, Params| bf16_body::<A, true>;
    moe_bf16_grouped_gemm_narrow[Bf16::THREADS, 1] = |A, Params| bf16_body::<A, false>;
}

kernels! {
    /// Gate and up in one pass over the activations, joined by silu and quantised: the bytes of two products and
    /// `silu_mul_quant_fp8`. An item is one group of 128 columns wide.
    pub mod gateup_silu(
        /// [items, ITEM_WORDS] work-list.
        worklist: In<u32>,
        /// `[1]` number of items.
        total: In<u32>,
        /// [rows, k] codes.
        a: In<u8>,
        /// [rows, ceil(k/128)] scales.
        a_scale: In<f32>,
        /// Row of `a` for each sorted row; null for the same.
        sorted_token_ids: In<i32>,
        /// `[E]` addresses of gate's [n, k] codes.
        gate: In<u64>,
        /// `[E]` addresses of gate's [ceil(n/128), ceil(k/128)] scales.
        gate_scales: In<u64>,
        /// `[E]` addresses of up's codes.
        up: In<u64>,
        /// `[E]` addresses of up's scales.
        up_scales: In<u64>,
        /// [sorted rows, n] codes.
        out: Out<u8>,
        /// [sorted rows, ceil(n/128)] scales.
        out_scale: Out<f32>,
        /// Columns of each product.
        n: u32,
        /// Columns of `a` and of the weights.
        k: u32,
        /// Clamp; infinite for none.
        limit: f32,
        /// Rows of `a`.
        a_rows: u32,
        /// Rows of `out`.
        rows: u32,
        /// Items that the work-list has room for.
        capacity: u32,
    );
    moe_w8a8_gateup_silu_e4m3_w1[Paired1::THREADS, 1] = |A, Params| gateup_silu_body::<A, Paired1, true>;
    moe_w8a8_gateup_silu_e4m3_w1_narrow[Paired1::THREADS, 1] = |A, Params| gateup_silu_body::<A, Paired1, false>;
    moe_w8a8_gateup_silu_e4m3_w2[Paired2::THREADS, 2] = |A, Params| gateup_silu_body::<A, Paired2, true>;
}

/// Bytes of shared memory of a gateup_silu kernel with tile `T`: the ring, and a value for each row and warp.
pub const fn gateup_silu_shared_bytes<T: Shape>() -> u32 {
    Ring::<E4m3, E4m3, T>::BYTES + T::ROWS * LARGEST * 4
}

/// Warps along the columns of a gateup_silu tile.
const LARGEST: u32 = 4;

#[inline(always)]
fn gateup_silu_body<A: Arch, T: Shape, const ALIGNED: bool>(p: gateup_silu::Params) {
    let problem =
        Problem::<E4m3, E4m3>::new(p.a, p.a_scale, p.sorted_token_ids, p.gate, p.gate_scales, p.n, p.k, p.a_rows)
            .with_second(p.up, p.up_scales);
    let source = Listed::new(p.worklist, p.total, p.capacity, p.rows);
    let output = Joined { codes: p.out, scales: p.out_scale, n: p.n, limit: p.limit };
    let largest = Shared::<f32>::at(Ring::<E4m3, E4m3, T>::BYTES, T::ROWS * LARGEST);
    run::<A, E4m3, E4m3, T, _, 64, ALIGNED>(problem, source, |sums, item| T::join::<A>(sums, output, largest, item));
}

/// Items `block, block + grid, …` of a work-list.
#[derive(Clone, Copy)]
struct Listed {
    worklist: In<u32>,
    total: u32,
    /// Rows of the output: none beyond are worked on.
    rows: u32,
}

impl Listed {
    /// As many items as `total` holds, but no more than the list has room for.
    #[inline(always)]
    fn new(worklist: In<u32>, total: In<u32>, capacity: u32, rows: u32) -> Self {
        Listed { worklist, total: total.load(0).min(capacity), rows }
    }
}

impl Source for Listed {
    #[inline(always)]
    fn item(self, step: u32) -> Option<Item> {
        let index = block_idx() as u64 + step as u64 * grid_dim() as u64;
        if index >= self.total as u64 {
            return None;
        }
        let item = Item::load(self.worklist, index as u32);
        Some(Item { rows: item.rows.min(self.rows.saturating_sub(item.first)), ..item })
    }
}

/// The one tile of a block of the dense grid, if it has rows.
#[derive(Clone, Copy)]
struct OneTile {
    item: Item,
}

impl Source for OneTile {
    #[inline(always)]
    fn item(self, step: u32) -> Option<Item> {
        if step == 0 && self.item.rows > 0 { Some(self.item) } else { None }
    }
}

#[inline(always)]
fn w8a8_body<A: Arch, O: Left<Element = u8> + Right, T: Shape, const ALIGNED: bool>(p: w8a8::Params) {
    let problem = Problem::<O, O>::new(p.a, p.a_scale, p.sorted_token_ids, p.weights, p.scales, p.n, p.k, p.a_rows);
    let source = Listed::new(p.worklist, p.total, p.capacity, p.rows);
    let output = Output { bias: p.bias, out: p.out, n: p.n };
    run::<A, O, O, T, _, 64, ALIGNED>(problem, source, |sums, item| T::store(sums, output, item));
}

#[inline(always)]
fn dense_body<A: Arch, const ALIGNED: bool>(p: w8a8_dense::Params) {
    let columns = p.n.div_ceil(Dense::COLUMNS).max(1);
    let (column, tile) = (block_idx() % columns, block_idx() / columns);
    let (m, expert) = (tile % p.max_m_tiles.max(1), tile / p.max_m_tiles.max(1));
    let first = p.expert_offsets.load(expert as usize) as u32 as u64 + m as u64 * Dense::ROWS as u64;
    let end = (p.expert_offsets.load(expert as usize + 1) as u32).min(p.rows) as u64;
    let rows = end.saturating_sub(first).min(Dense::ROWS as u64) as u32;
    let item = Item { expert, first: first as u32, rows, column };
    let problem =
        Problem::<E4m3, E4m3>::new(p.a, p.a_scale, p.sorted_token_ids, p.weights, p.scales, p.n, p.k, p.a_rows);
    let output = Output { bias: p.bias, out: p.out, n: p.n };
    run::<A, E4m3, E4m3, Dense, _, 64, ALIGNED>(problem, OneTile { item }, |sums, item| {
        Dense::store(sums, output, item)
    });
}

#[inline(always)]
fn fp8_body<A: Arch, const ALIGNED: bool>(p: fp8::Params) {
    let none = In::at(0, 0);
    let problem =
        Problem::<Bf16Quads, E4m3AsBf16>::new(p.a, none, p.sorted_token_ids, p.weights, p.scales, p.n, p.k, p.a_rows);
    let source = Listed::new(p.worklist, p.total, p.capacity, p.rows);
    let output = Output { bias: p.bias, out: p.out, n: p.n };
    run::<A, Bf16Quads, E4m3AsBf16, Fp8, _, 128, ALIGNED>(problem, source, |sums, item| Fp8::store(sums, output, item));
}

#[inline(always)]
fn bf16_body<A: Arch, const ALIGNED: bool>(p: bf16::Params) {
    let (none, no_scales) = (In::at(0, 0), In::at(0, 0));
    let problem =
        Problem::<Bf16Pairs, Bf16Pairs>::new(p.a, none, p.sorted_token_ids, p.weights, no_scales, p.n, p.k, p.a_rows);
    let source = Listed::new(p.worklist, p.total, p.capacity, p.rows);
    let output = Output { bias: p.bias, out: p.out, n: p.n };
    run::<A, Bf16Pairs, Bf16Pairs, Bf16, _, 0, ALIGNED>(problem, source, |sums, item| Bf16::store(sums, output, item));
}

/// All items of a block. Scales enter every `FOLD` k (64: those of rows and columns; 128: those of columns), or never (0).
#[inline(always)]
fn run<A: Arch, L: Left, R: Right, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool>(
    problem: Problem<L, R>,
    source: S,
    epilogue: impl Fn(T::Sums, Item),
) {
    let mut copier = Copier::<L, R, T, S, FOLD, ALIGNED>::start(problem, source);
    let pairs = problem.pairs();
    let mut slot = 0;
    let mut step = 0;
    while let Some(item) = source.item(step) {
        step += 1;
        let mut outer = T::ZERO;
        let mut inner = T::ZERO;
        let mut pair = 0;
        while pair < pairs {
            // This thread's copies of the pair of stages have landed, and behind the barrier everybody's; what is overwritten next has
            // been read by all.
            wait_for_oldest::<T>();
            sync::sync_threads();
            let mut second = 0;
            while second < 2 {
                let left = (slot + second) * Ring::<L, R, T>::STAGE_BYTES;
                let right = left + Ring::<L, R, T>::LEFT_BYTES;
                inner = T::multiply::<A, L, R>(left, right, 0, inner);
                // Copies are issued while the tensor cores are busy.
                copier.copy();
                inner = T::multiply::<A, L, R>(left, right, 1, inner);
                let scales = Shared::<f32>::at(left + Ring::<L, R, T>::SCALES_AT, T::ROWS + 4);
                if FOLD == 64 {
                    outer = T::fold::<true>(outer, inner, scales);
                    inner = T::ZERO;
                }
                second += 1;
            }
            copy::commit();
            if FOLD == 128 {
                // The first stage's: the second may lie behind the last k.
                let scales =
                    Shared::<f32>::at(slot * Ring::<L, R, T>::STAGE_BYTES + Ring::<L, R, T>::SCALES_AT, T::ROWS + 4);
                outer = T::fold::<false>(outer, inner, scales);
                inner = T::ZERO;
            }
            slot = if slot + 2 == T::STAGES { 0 } else { slot + 2 };
            pair += 1;
        }
        // Rows of an expert that is not resident are left as they are.
        let item = Item { rows: if problem.is_resident(item.expert) { item.rows } else { 0 }, ..item };
        // Rows without activations count as zeros.
        let is_missing = |row| row < item.rows && problem.source_row(item.first + row).is_none();
        epilogue(T::clear(if FOLD == 0 { inner } else { outer }, is_missing), item);
    }
    copy::wait::<0>();
}

/// Waits until the oldest pair of stages of the ring has landed.
#[inline(always)]
fn wait_for_oldest<T: Shape>() {
    match T::STAGES {
        4 => copy::wait::<0>(),
        6 => copy::wait::<1>(),
        _ => copy::wait::<2>(),
    }
}
