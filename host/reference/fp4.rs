//! The routed experts of one MoE layer with NVFP4 or MXFP4 weights and 16-bit activations:
//! `route_prep`, FC1 with what joins gate and up, FC2, combine.
//!
//! Every sum of products walks k in instructions of 16 ([`mma::mma16`]). A row is consumed in chunks of 128 k, eight
//! instructions each. In chunk c lane t (0..4) owns k = 128c + 32t .. +32 as four words of eight, and two instructions take word
//! w of every lane: in the order `seed` offsets 0 to 3, then 4 to 7; in `decode` 0, 1, 4, 5, then 2, 3, 6, 7. A last chunk that K
//! does not fill is completed with zeros, whatever bytes lie there.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use kernels_gpu::layout::scale::{padded_cols, swizzled_len, swizzled_offset};
use rayon::prelude::*;

use super::math;
use super::mma::{self, LANES, Operand, Row, STEP, Tile};
use crate::error::{Error, Result, check_len};
use crate::{Activation, LayerOptions, LayerShape, Order, WeightFormat, XType};

/// Weights of all experts of a layer, borrowed. Codes are e2m1, two a byte, even k in the low nibble; scales (NVFP4: e4m3, one
/// per 16 consecutive k; MXFP4: e8m0, one per 32) lie in the 128x4 swizzle, padded once per expert to 128 rows and 4 columns.
#[derive(Clone, Copy, Debug)]
pub struct Fp4View<'a> {
    /// Sizes.
    pub shape: LayerShape,
    /// Format of codes and scales.
    pub format: WeightFormat,
    /// Codes [E, 2I, K/2]: rows 0..I are up, I..2I gate.
    pub w13: &'a [u8],
    /// Scales of `w13`: E times `swizzled_len(2I, K/block)` bytes.
    pub s13: &'a [u8],
    /// Global scales of `w13`, [E][up, gate]. Finite; 0 is legal.
    pub alpha1: &'a [[f32; 2]],
    /// Biases [E, 2I] of up and gate, which are added after the global scales.
    pub b13: Option<&'a [f32]>,
    /// Codes [E, H, I/2].
    pub w2: &'a [u8],
    /// Scales of `w2`: E times `swizzled_len(H, I/block)` bytes.
    pub s2: &'a [u8],
    /// Global scales of `w2`, `[E]`. Finite; 0 is legal.
    pub alpha2: &'a [f32],
    /// Biases [E, H].
    pub b2: Option<&'a [f32]>,
}

/// What one forward pass is given.
#[derive(Clone, Copy, Debug)]
pub struct LayerInputs<'a> {
    /// Number of tokens M; 0 is legal.
    pub tokens: usize,
    /// Hidden states [M, K], bits of `x_type`.
    pub x: &'a [u16],
    /// Element type of `x`.
    pub x_type: XType,
    /// Expert ids [M, top_k]. A pair whose id is outside 0..E is skipped; an id >= E also sets [`Status::bad_id`].
    pub topk_ids: &'a [i32],
    /// Weights [M, top_k].
    pub topk_w: &'a [f32],
}

/// How sums of products are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The bits of an H200.
    Exact,
    /// Plain f64 sums, rounded once; [`super::layer_bound`] says how far from [`Mode::Exact`] the result can be.
    Fast,
}

/// What the device's status word would hold after one forward pass that found it clear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// An id of `topk_ids` was >= E.
    pub bad_id: bool,
    /// On the f16 path a finite value became infinite: a hidden state of a token with at least one live pair, or an
    /// element of h.
    pub f16_range: bool,
}

/// Result of [`layer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerResult {
    /// bf16 bits [M, H].
    pub out: Vec<u16>,
    /// Status bits set by this pass.
    pub status: Status,
}

/// Largest hidden size, intermediate size and output width: keeps every product of sizes within 64 bits.
const MAX_SIZE: usize = 1 << 30;

impl Fp4View<'_> {
    /// `Err` naming the first argument that is outside its limits or of the wrong length.
    pub fn check(&self) -> Result<()> {
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        let block = self.format.block();
        if !(1..=4096).contains(&experts) {
            return Err(Error::argument("experts", experts, "1..=4096"));
        }
        if !(1..=32).contains(&top_k) {
            return Err(Error::argument("top_k", top_k, "1..=32"));
        }
        for (name, size) in [("hidden", hidden), ("intermediate", intermediate)] {
            if size == 0 || !size.is_multiple_of(block) || size > MAX_SIZE {
                return Err(Error::argument(name, size, format!("a multiple of {block} in {block}..={MAX_SIZE}")));
            }
        }
        if !(1..=MAX_SIZE).contains(&output) {
            return Err(Error::argument("output", output, format!("1..={MAX_SIZE}")));
        }
        let all = |name, each: usize| {
            each.checked_mul(experts).ok_or_else(|| Error::argument(name, each, "a buffer that fits the address space"))
        };
        check_len("w13", self.w13.len(), all("w13", 2 * intermediate * (hidden / 2))?)?;
        check_len("s13", self.s13.len(), all("s13", swizzled_len(2 * intermediate, hidden / block))?)?;
        check_len("alpha1", self.alpha1.len(), experts)?;
        check_len("w2", self.w2.len(), all("w2", output * (intermediate / 2))?)?;
        check_len("s2", self.s2.len(), all("s2", swizzled_len(output, intermediate / block))?)?;
        check_len("alpha2", self.alpha2.len(), experts)?;
        check_finite("alpha1", self.alpha1.iter().map(|alpha| alpha.as_slice()))?;
        check_finite("alpha2", self.alpha2.iter().map(std::slice::from_ref))?;
        if let Some(b13) = self.b13 {
            check_len("b13", b13.len(), all("b13", 2 * intermediate)?)?;
            check_finite("b13", b13.chunks(2 * intermediate))?;
        }
        if let Some(b2) = self.b2 {
            check_len("b2", b2.len(), all("b2", output)?)?;
            check_finite("b2", b2.chunks(output))?;
        }
        Ok(())
    }

    /// `Err` naming `format` where `options` are for another one, and naming `s13` or `s2` where activations are f16 and a block
    /// scale is outside 2^-23 to 2^13, so that f16 does not hold its products. A NaN is no such scale.
    pub(super) fn check_with(&self, options: &LayerOptions) -> Result<()> {
        check_options(options)?;
        if options.format != self.format {
            return Err(Error::argument("format", options.format, format!("{}, the weights' own", self.format)));
        }
        if (self.format, options.activation) != (WeightFormat::Mxfp4, Activation::F16) {
            return Ok(());
        }
        let LayerShape { experts, intermediate, output, .. } = self.shape;
        for (name, rows) in [("s13", 2 * intermediate), ("s2", output)] {
            let bad = |&expert: &usize| {
                let matrix = if name == "s13" { self.fc1(expert) } else { self.fc2(expert) };
                let bytes = matrix.scale_bytes(rows);
                bytes.into_iter().any(|byte| byte != 0xff && !(-23..=13).contains(&(i32::from(byte) - 127)))
            };
            let experts = (0..experts).filter(bad).collect::<Vec<_>>();
            if !experts.is_empty() {
                let problem = "a block scale outside 2^-23 to 2^13, which f16 activations do not allow".into();
                return Err(Error::Experts { name, experts, problem });
            }
        }
        Ok(())
    }

    /// One expert's w13.
    pub(super) fn fc1(&self, expert: usize) -> Matrix<'_> {
        Matrix::of_expert(self.format, self.w13, self.s13, expert, 2 * self.shape.intermediate, self.shape.hidden)
    }

    /// One expert's w2.
    pub(super) fn fc2(&self, expert: usize) -> Matrix<'_> {
        Matrix::of_expert(self.format, self.w2, self.s2, expert, self.shape.output, self.shape.intermediate)
    }
}

fn check_finite<'a>(name: &'static str, alphas: impl Iterator<Item = &'a [f32]>) -> Result<()> {
    let bad = alphas.enumerate().filter(|(_, alpha)| !alpha.iter().all(|a| a.is_finite())).collect::<Vec<_>>();
    if bad.is_empty() {
        return Ok(());
    }
    let values = bad.iter().map(|(_, alpha)| *alpha).collect::<Vec<_>>();
    Err(Error::Experts {
        name,
        experts: bad.iter().map(|(expert, _)| *expert).collect(),
        problem: format!("{values:?} where finite values are needed"),
    })
}

pub(super) fn check_options(options: &LayerOptions) -> Result<()> {
    options.gating.check()
}

impl LayerInputs<'_> {
    /// `Err` naming the first argument that does not fit `shape` or `activation`.
    pub fn check(&self, shape: &LayerShape, activation: Activation) -> Result<()> {
        let pairs = self.tokens.checked_mul(shape.top_k).filter(|&pairs| pairs <= i32::MAX as usize);
        let pairs = pairs.ok_or_else(|| Error::argument("tokens", self.tokens, "tokens * top_k below 2^31"))?;
        check_len("x", self.x.len(), self.tokens.saturating_mul(shape.hidden))?;
        check_len("topk_ids", self.topk_ids.len(), pairs)?;
        check_len("topk_w", self.topk_w.len(), pairs)?;
        if self.x_type == XType::F16 && activation == Activation::Bf16 {
            return Err(Error::argument("x_type", "F16", "Bf16, or activation F16"));
        }
        Ok(())
    }
}

/// Up to eight pairs of one expert: what a block of the kernels handles together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Expert id.
    pub expert: i32,
    /// Pair indices token·top_k + k in ascending order; -1 in unused slots.
    pub pairs: [i32; 8],
}

/// Where each (token, k) pair goes. Made by [`route_prep`] alone, so that it always fits its own experts and pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    experts: usize,
    top_k: usize,
    expert_of: Vec<Option<usize>>,
    entries: Vec<Entry>,
    bad_id_seen: bool,
}

impl Route {
    /// Entries by ascending expert; an expert's pairs fill its entries in ascending order, all but its last to eight.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Whether an id was >= E.
    pub fn bad_id_seen(&self) -> bool {
        self.bad_id_seen
    }

    /// Number of pairs, skipped ones included.
    pub fn pairs(&self) -> usize {
        self.expert_of.len()
    }

    /// Number of tokens M.
    pub fn tokens(&self) -> usize {
        self.pairs() / self.top_k
    }

    /// The expert of a pair; `None` if the pair is skipped or there is no such pair.
    pub fn expert_of(&self, pair: usize) -> Option<usize> {
        self.expert_of.get(pair).copied().flatten()
    }

    /// Whether any pair of `token` is live.
    fn token_is_live(&self, token: usize) -> bool {
        (0..self.top_k).any(|k| self.expert_of(token * self.top_k + k).is_some())
    }

    /// The pairs of each expert that has any, experts and pairs ascending.
    fn by_expert(&self) -> Vec<(usize, Vec<usize>)> {
        let mut pairs_of = vec![Vec::new(); self.experts];
        for (pair, expert) in self.expert_of.iter().enumerate() {
            if let Some(expert) = *expert {
                pairs_of[expert].push(pair);
            }
        }
        pairs_of.into_iter().enumerate().filter(|(_, pairs)| !pairs.is_empty()).collect()
    }

    fn check(&self, shape: &LayerShape) -> Result<()> {
        if self.experts != shape.experts || self.top_k != shape.top_k {
            let given = format!("for {} experts and top-k {}", self.experts, self.top_k);
            let needed = format!("one for {} experts and top-k {}", shape.experts, shape.top_k);
            return Err(Error::argument("route", given, needed));
        }
        Ok(())
    }
}

/// Groups the pairs by expert, keeping their order. An id outside 0..E skips its pair; one >= E is also recorded.
pub fn route_prep(topk_ids: &[i32], top_k: usize, experts: usize) -> Result<Route> {
    if !(1..=32).contains(&top_k) {
        return Err(Error::argument("top_k", top_k, "1..=32"));
    }
    if !(1..=4096).contains(&experts) {
        return Err(Error::argument("experts", experts, "1..=4096"));
    }
    if !topk_ids.len().is_multiple_of(top_k) || topk_ids.len() > i32::MAX as usize {
        let needed = format!("a length that is a multiple of top_k = {top_k} and below 2^31");
        return Err(Error::argument("topk_ids", format!("of length {}", topk_ids.len()), needed));
    }
    let expert_of = topk_ids.iter().map(|&id| usize::try_from(id).ok().filter(|&id| id < experts)).collect::<Vec<_>>();
    let bad_id_seen = topk_ids.iter().any(|&id| id >= experts as i32);
    let mut route = Route { experts, top_k, expert_of, entries: Vec::new(), bad_id_seen };
    for (expert, pairs) in route.by_expert() {
        for slots in pairs.chunks(8) {
            let pairs = std::array::from_fn(|slot| slots.get(slot).map_or(-1, |&pair| pair as i32));
            route.entries.push(Entry { expert: expert as i32, pairs });
        }
    }
    Ok(route)
}

/// One expert's weight matrix: rows of `cols` codes with a scale per block.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    weights: WeightFormat,
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

impl<'a> Matrix<'a> {
    fn of_expert(
        weights: WeightFormat,
        codes: &'a [u8],
        scales: &'a [u8],
        expert: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        let (codes_len, scales_len) = (rows * (cols / 2), swizzled_len(rows, cols / weights.block()));
        Matrix {
            weights,
            codes: &codes[expert * codes_len..][..codes_len],
            scales: &scales[expert * scales_len..][..scales_len],
            cols,
        }
    }

    fn scale(&self, row: usize, block: usize) -> u8 {
        self.scales[swizzled_offset(row, block, padded_cols(self.cols / self.weights.block()))]
    }

    /// The scales of the first `rows` rows.
    fn scale_bytes(&self, rows: usize) -> Vec<u8> {
        let blocks = self.cols / self.weights.block();
        (0..rows * blocks).map(|i| self.scale(i / blocks, i % blocks)).collect()
    }

    /// What the sixteen codes stand for in (row, block).
    fn block(&self, table: &'static WeightTable, row: usize, block: usize) -> &'static [Operand; 16] {
        &table.weights[usize::from(self.scale(row, block))]
    }

    fn code(&self, row: usize, k: usize) -> usize {
        let byte = self.codes[row * (self.cols / 2) + k / 2];
        usize::from(if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
    }

    /// The weights' operands in `order`.
    fn table(&self, order: Order, format: Activation) -> &'static WeightTable {
        match (order, self.weights) {
            (Order::Decode, WeightFormat::Nvfp4) => &FOLDED[format as usize],
            _ => &WEIGHTS[self.weights as usize][format as usize],
        }
    }

    /// One row's weights, k ascending.
    pub(super) fn row(&self, format: Activation, row: usize) -> Vec<f64> {
        let (table, size) = (&WEIGHTS[self.weights as usize][format as usize], self.weights.block());
        (0..self.cols).map(|k| f64::from(self.block(table, row, k / size)[self.code(row, k)].value)).collect()
    }

    /// Rows first..first+LANES of the matrix, but none from `end` on, in the order of the instructions.
    fn tile(&self, order: Order, format: Activation, first: usize, end: usize) -> Tile {
        let (table, size) = (self.table(order, format), self.weights.block());
        let blocks: [Vec<_>; LANES] = std::array::from_fn(|lane| {
            let row = first + lane;
            let blocks = if row < end { self.cols / size } else { 0 };
            (0..blocks).map(|block| self.block(table, row, block)).collect()
        });
        Tile::new(format, steps(self.cols), |lane, position| {
            let k = k_of(order, position);
            blocks[lane].get(k / size).map_or(table.zero, |block| block[self.code(first + lane, k)])
        })
    }
}

/// Every weight there is: the product of each scale byte and each code in a 16-bit format, divided by what the order unfolds.
struct WeightTable {
    weights: Vec<[Operand; 16]>,
    zero: Operand,
}

/// By `WeightFormat as usize` and `Activation as usize`.
static WEIGHTS: [[LazyLock<WeightTable>; 2]; 2] = [
    [
        LazyLock::new(|| weight_table(WeightFormat::Nvfp4, Activation::Bf16, 1.0)),
        LazyLock::new(|| weight_table(WeightFormat::Nvfp4, Activation::F16, 1.0)),
    ],
    [
        LazyLock::new(|| weight_table(WeightFormat::Mxfp4, Activation::Bf16, 1.0)),
        LazyLock::new(|| weight_table(WeightFormat::Mxfp4, Activation::F16, 1.0)),
    ],
];

/// NVFP4 weights in the order `decode`, by `Activation as usize`.
static FOLDED: [LazyLock<WeightTable>; 2] = [
    LazyLock::new(|| weight_table(WeightFormat::Nvfp4, Activation::Bf16, nvfp4_fold(Activation::Bf16))),
    LazyLock::new(|| weight_table(WeightFormat::Nvfp4, Activation::F16, nvfp4_fold(Activation::F16))),
];

/// By what the order `decode` divides NVFP4 weights before the sum, and multiplies the sum.
const fn nvfp4_fold(format: Activation) -> f32 {
    match format {
        Activation::Bf16 => 256.0,
        Activation::F16 => 128.0,
    }
}

/// What a finished sum of products with weights in `weights` is multiplied by, a power of two.
pub(super) fn unfold(order: Order, weights: WeightFormat, format: Activation) -> f32 {
    match (order, weights) {
        (Order::Decode, WeightFormat::Nvfp4) => nvfp4_fold(format),
        (Order::Seed { .. }, _) | (Order::Decode, WeightFormat::Mxfp4) => 1.0,
    }
}

/// A weight is code·scale, of which both are numbers of the 16-bit format, rounded to it to nearest even, subnormals kept. NVFP4's
/// scales and products are exact in both formats, divided by `unfold` too. MXFP4's are in bf16, but for products from 2^128 on,
/// which are infinite; in f16 a scale outside 2^-24 to 2^15 is 0 or infinite, and products are exact from 2^-23 to 2^13.
fn weight_table(weights: WeightFormat, format: Activation, unfold: f32) -> WeightTable {
    let weight = |scale: u8, code: usize| {
        let scale = match weights {
            WeightFormat::Nvfp4 => math::e4m3(scale),
            WeightFormat::Mxfp4 => math::to_f32(format, math::from_f32(format, math::e8m0(scale))),
        };
        // Exact in f32, or infinite there too.
        let value = math::e2m1(code as u8) * scale / unfold;
        Operand::decode(format, math::from_f32(format, value))
    };
    WeightTable {
        weights: (0..=255).map(|scale| std::array::from_fn(|code| weight(scale, code))).collect(),
        zero: Operand::decode(format, 0),
    }
}

/// Instructions of a row of `cols` k: eight per started chunk of 128.
pub(super) fn steps(cols: usize) -> usize {
    cols.div_ceil(128) * 8
}

/// The k of operand position `position`, where position 16·s + i is product i of instruction s.
fn k_of(order: Order, position: usize) -> usize {
    let (step, product) = (position / STEP, position % STEP);
    let (chunk, word, second) = (step / 8, step % 8 / 2, step % 2);
    let (t, i) = (product / 4, product % 4);
    let offset = match order {
        Order::Seed { .. } => [[0, 2, 1, 3], [4, 6, 5, 7]][second][i],
        Order::Decode => [[0, 4, 1, 5], [2, 6, 3, 7]][second][i],
    };
    128 * chunk + 32 * t + 8 * word + offset
}

/// How the rows of one projection are summed.
struct Sum {
    /// Instructions of each partial sum, in the order in which they are chained.
    partials: Vec<Vec<Range<usize>>>,
    /// Instructions of a row.
    steps: usize,
    /// Factor of the total.
    unfold: f32,
}

impl Sum {
    /// FC1. Of n = ceil(K/256) segments of 256 k, partial i of S has in the order `seed` those from floor(i·n/S) to
    /// floor((i+1)·n/S), in `decode` segments i, i + 4, …
    fn fc1(options: &LayerOptions, weights: WeightFormat, cols: usize) -> Self {
        let segments = cols.div_ceil(256);
        let segment = |i: usize| 16 * i..(16 * (i + 1)).min(steps(cols));
        let of_partial = |i: usize| -> Vec<_> {
            match options.order {
                Order::Seed { split } => {
                    let s = split.count();
                    (i * segments / s..(i + 1) * segments / s).map(segment).collect()
                }
                Order::Decode => (i..segments).step_by(4).map(segment).collect(),
            }
        };
        let partials = (0..options.order.partials()).map(of_partial).collect();
        Sum { partials, ..Self::fc2(options, weights, cols) }
    }

    /// FC2: one chain.
    fn fc2(options: &LayerOptions, weights: WeightFormat, cols: usize) -> Self {
        let steps = steps(cols);
        let whole: Range<usize> = 0..steps;
        Sum { partials: vec![vec![whole]], steps, unfold: unfold(options.order, weights, options.activation) }
    }

    /// Σ w·x for all lanes: one chain per partial from +0, the partials added in order, the total multiplied by the factor.
    fn dot(&self, mode: Mode, tile: &Tile, row: &Row) -> [f32; LANES] {
        match mode {
            Mode::Exact => {
                let mut total: Option<[f32; LANES]> = None;
                for partial in &self.partials {
                    let mut acc = [0.0; LANES];
                    for steps in partial {
                        mma::chain_exact(tile, row, steps.clone(), &mut acc);
                    }
                    total = Some(match total {
                        None => acc,
                        Some(total) => std::array::from_fn(|lane| math::canonical(total[lane] + acc[lane])),
                    });
                }
                total.unwrap_or_default().map(|total| math::canonical(total * self.unfold))
            }
            Mode::Fast => {
                let sums = mma::chain_plain(tile, row, 0..self.steps);
                sums.map(|sum| math::canonical((sum * f64::from(self.unfold)) as f32))
            }
        }
    }
}

/// Row `index` of a [_, cols] matrix of 16-bit values, in the order of the instructions.
fn activation_row(options: &LayerOptions, values: &[u16], index: usize, cols: usize) -> Row {
    let values = &values[index * cols..][..cols];
    let value = |position| values.get(k_of(options.order, position)).copied().unwrap_or(0);
    Row::new(steps(cols), |position| Operand::decode(options.activation, value(position)))
}

/// Fills `into[pair][row]` for all live pairs. `work` is called with an expert, the first of up to LANES rows, and the
/// expert's pairs, and gives one [T; LANES] per pair.
pub(super) fn for_all_rows<T: Copy + Send>(
    route: &Route,
    rows: usize,
    into: &mut [T],
    work: impl Fn(usize, usize, &[usize]) -> Vec<[T; LANES]> + Sync,
) {
    let by_expert = route.by_expert();
    let tiles = rows.div_ceil(LANES);
    let results = (0..by_expert.len() * tiles)
        .into_par_iter()
        .map(|task| {
            let (expert, pairs) = &by_expert[task / tiles];
            work(*expert, task % tiles * LANES, pairs)
        })
        .collect::<Vec<_>>();
    for (task, lanes) in results.iter().enumerate() {
        let first = task % tiles * LANES;
        let width = LANES.min(rows - first);
        for (pair, lanes) in by_expert[task / tiles].1.iter().zip(lanes) {
            into[pair * rows + first..][..width].copy_from_slice(&lanes[..width]);
        }
    }
}

/// `width` zeros per pair, or `Err` where memory cannot hold them.
pub(super) fn zeros<T: Clone>(zero: T, route: &Route, width: usize) -> Result<Vec<T>> {
    let len = route.pairs().saturating_mul(width);
    let mut zeros = Vec::new();
    let reserved = zeros.try_reserve_exact(len);
    reserved.map_err(|_| Error::argument("tokens", route.tokens(), format!("memory for {len} intermediate values")))?;
    zeros.resize(len, zero);
    Ok(zeros)
}

/// Hidden states in the activation format [M, K], and whether a finite one of a live token became infinite.
/// Rows of tokens without a live pair are converted too, but are never read.
pub fn convert_x<'a>(
    inputs: &LayerInputs<'a>,
    shape: &LayerShape,
    activation: Activation,
    route: &Route,
) -> Result<(Cow<'a, [u16]>, bool)> {
    route.check(shape)?;
    inputs.check(shape, activation)?;
    check_len("topk_ids", route.pairs(), inputs.topk_ids.len())?;
    if inputs.x_type == XType::F16 || activation == Activation::Bf16 {
        return Ok((Cow::Borrowed(inputs.x), false));
    }
    let mut out_of_range = false;
    let mut converted = Vec::with_capacity(inputs.x.len());
    for (i, &bits) in inputs.x.iter().enumerate() {
        let x = math::to_f32(Activation::Bf16, bits);
        let x16 = math::from_f32(Activation::F16, x);
        out_of_range |= became_infinite(x, x16) && route.token_is_live(i / shape.hidden);
        converted.push(x16);
    }
    Ok((Cow::Owned(converted), out_of_range))
}

fn became_infinite(x: f32, x16: u16) -> bool {
    x.is_finite() && x16 & 0x7fff == 0x7c00
}

/// FC1: h [M·top_k, I] in the activation format, and whether on the f16 path a finite element became infinite.
///
/// `x` [M, K] is in the activation format ([`convert_x`]). In f32: `g = alpha1[e][1]·G + b13[e][I + i]`,
/// `u = alpha1[e][0]·U + b13[e][i]` (without biases the product alone), both clamped, h by [`math::gated`], rounded once. Rows
/// of skipped pairs are 0 and stand for "not computed". Any block scale is taken, also where [`layer`] refuses it.
pub fn fc1(
    view: &Fp4View<'_>,
    options: &LayerOptions,
    x: &[u16],
    route: &Route,
    mode: Mode,
) -> Result<(Vec<u16>, bool)> {
    view.check()?;
    check_options(options)?;
    route.check(&view.shape)?;
    let LayerShape { hidden, intermediate, top_k, .. } = view.shape;
    check_len("x", x.len(), route.tokens() * hidden)?;

    let (order, format) = (options.order, options.activation);
    let sum = Sum::fc1(options, view.format, hidden);
    let rows_of_x = (0..route.tokens())
        .into_par_iter()
        .map(|token| route.token_is_live(token).then(|| activation_row(options, x, token, hidden)))
        .collect::<Vec<_>>();
    let out_of_range = AtomicBool::new(false);
    let mut h = zeros(0, route, intermediate)?;
    for_all_rows(route, intermediate, &mut h, |expert, first, pairs| {
        let matrix = view.fc1(expert);
        let up = matrix.tile(order, format, first, intermediate);
        let gate = matrix.tile(order, format, intermediate + first, 2 * intermediate);
        let [alpha_up, alpha_gate] = view.alpha1[expert];
        let biased = |value: f32, row: usize| match view.b13 {
            Some(b13) => value + b13[expert * 2 * intermediate + row.min(2 * intermediate - 1)],
            None => value,
        };
        let rows = pairs.iter().filter_map(|pair| rows_of_x[pair / top_k].as_ref());
        rows.map(|x| {
            let gates = sum.dot(mode, &gate, x);
            let ups = sum.dot(mode, &up, x);
            std::array::from_fn(|lane| {
                let u = biased(alpha_up * ups[lane], first + lane);
                let g = biased(alpha_gate * gates[lane], intermediate + first + lane);
                let h = math::gated(options.gating, g, u);
                let h16 = math::from_f32(format, h);
                if format == Activation::F16 && became_infinite(h, h16) {
                    out_of_range.store(true, Ordering::Relaxed);
                }
                h16
            })
        })
        .collect()
    });
    Ok((h, out_of_range.into_inner()))
}

/// FC2: ypart \[M·top_k, H\], per pair `(alpha2[e]·w)·y` with y one chain over I; with biases `(alpha2[e]·y + b2[e])·w`. Rows of
/// skipped pairs are 0 and stand for "not computed".
pub fn fc2(
    view: &Fp4View<'_>,
    options: &LayerOptions,
    h: &[u16],
    topk_w: &[f32],
    route: &Route,
    mode: Mode,
) -> Result<Vec<f32>> {
    view.check()?;
    route.check(&view.shape)?;
    let LayerShape { intermediate, output, .. } = view.shape;
    check_len("h", h.len(), route.pairs() * intermediate)?;
    check_len("topk_w", topk_w.len(), route.pairs())?;

    let sum = Sum::fc2(options, view.format, intermediate);
    let rows_of_h = (0..route.pairs())
        .into_par_iter()
        .map(|pair| route.expert_of(pair).map(|_| activation_row(options, h, pair, intermediate)))
        .collect::<Vec<_>>();
    let mut ypart = zeros(0.0, route, output)?;
    for_all_rows(route, output, &mut ypart, |expert, first, pairs| {
        let tile = view.fc2(expert).tile(options.order, options.activation, first, output);
        let rows = pairs.iter().filter_map(|&pair| rows_of_h[pair].as_ref().map(|h| (topk_w[pair], h)));
        rows.map(|(w, h)| {
            let alpha = view.alpha2[expert];
            let y = sum.dot(mode, &tile, h);
            std::array::from_fn(|lane| {
                math::canonical(match view.b2 {
                    Some(b2) => (alpha * y[lane] + b2[expert * output + (first + lane).min(output - 1)]) * w,
                    None => (alpha * w) * y[lane],
                })
            })
        })
        .collect()
    });
    Ok(ypart)
}

/// out [M, H] in bf16: f32 sum from +0 over a token's live pairs, k ascending. Rows of skipped pairs are not read.
pub fn combine(ypart: &[f32], output: usize, route: &Route) -> Result<Vec<u16>> {
    let needed = route.pairs().checked_mul(output);
    let needed = needed.ok_or_else(|| Error::argument("output", output, "a buffer that fits the address space"))?;
    check_len("ypart", ypart.len(), needed)?;
    let mut out = Vec::with_capacity(route.tokens() * output);
    for token in 0..route.tokens() {
        for column in 0..output {
            let mut sum = 0.0;
            for pair in token * route.top_k..(token + 1) * route.top_k {
                if route.expert_of(pair).is_some() {
                    sum += ypart[pair * output + column];
                }
            }
            out.push(math::from_f32(Activation::Bf16, sum));
        }
    }
    Ok(out)
}

/// The whole layer. Errors name the argument; nothing is computed then. No tokens give an empty output.
pub fn layer(view: &Fp4View<'_>, options: &LayerOptions, inputs: &LayerInputs<'_>, mode: Mode) -> Result<LayerResult> {
    view.check()?;
    view.check_with(options)?;
    inputs.check(&view.shape, options.activation)?;
    let route = route_prep(inputs.topk_ids, view.shape.top_k, view.shape.experts)?;
    let (x, x_range) = convert_x(inputs, &view.shape, options.activation, &route)?;
    let (h, h_range) = fc1(view, options, &x, &route, mode)?;
    let ypart = fc2(view, options, &h, inputs.topk_w, &route, mode)?;
    let out = combine(&ypart, view.shape.output, &route)?;
    Ok(LayerResult { out, status: Status { bad_id: route.bad_id_seen, f16_range: x_range || h_range } })
}
