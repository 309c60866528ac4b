//! The routed experts of one MoE layer with NVFP4 weights and 16-bit activations:
//! `route_prep`, FC1 with SwiGLU, FC2, combine.
//!
//! Every sum of products walks k in instructions of 16 ([`mma::mma16`]). In the order `seed` a row is consumed in chunks
//! of 128 k; instruction j (0..8) of chunk c takes k = 128c + 32t + 4j + {0,1,2,3} for t = 0..4. A last chunk that K does
//! not fill is completed with zeros, whatever bytes lie there.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use kernels_gpu::layout::scale::{padded_cols, swizzled_len, swizzled_offset};
use rayon::prelude::*;

use super::math;
use super::mma::{self, LANES, Operand, Row, STEP, Tile};
use crate::error::{Error, Result, check_len};
use crate::{Activation, LayerOptions, LayerShape, Order, XType};

/// Weights of all experts of a layer, borrowed. Codes are e2m1, two a byte, even k in the low nibble; scales are e4m3,
/// one per 16 consecutive k, in the 128x4 swizzle, padded once per expert to 128 rows and 4 columns.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4View<'a> {
    /// Sizes.
    pub shape: LayerShape,
    /// Codes [E, 2I, K/2]: rows 0..I are up, I..2I gate.
    pub w13: &'a [u8],
    /// Scales of `w13`: E times `swizzled_len(2I, K/16)` bytes.
    pub s13: &'a [u8],
    /// Global scales of `w13`, [E][up, gate]. Finite; 0 is legal.
    pub alpha1: &'a [[f32; 2]],
    /// Codes [E, H, I/2].
    pub w2: &'a [u8],
    /// Scales of `w2`: E times `swizzled_len(H, I/16)` bytes.
    pub s2: &'a [u8],
    /// Global scales of `w2`, `[E]`. Finite; 0 is legal.
    pub alpha2: &'a [f32],
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

impl Nvfp4View<'_> {
    /// `Err` naming the first argument that is outside its limits or of the wrong length.
    pub fn check(&self) -> Result<()> {
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        if !(1..=4096).contains(&experts) {
            return Err(Error::argument("experts", experts, "1..=4096"));
        }
        if !(1..=32).contains(&top_k) {
            return Err(Error::argument("top_k", top_k, "1..=32"));
        }
        for (name, size) in [("hidden", hidden), ("intermediate", intermediate)] {
            if size == 0 || !size.is_multiple_of(16) || size > MAX_SIZE {
                return Err(Error::argument(name, size, format!("a multiple of 16 in 16..={MAX_SIZE}")));
            }
        }
        if !(1..=MAX_SIZE).contains(&output) {
            return Err(Error::argument("output", output, format!("1..={MAX_SIZE}")));
        }
        let all = |name, each: usize| {
            each.checked_mul(experts).ok_or_else(|| Error::argument(name, each, "a buffer that fits the address space"))
        };
        check_len("w13", self.w13.len(), all("w13", 2 * intermediate * (hidden / 2))?)?;
        check_len("s13", self.s13.len(), all("s13", swizzled_len(2 * intermediate, hidden / 16))?)?;
        check_len("alpha1", self.alpha1.len(), experts)?;
        check_len("w2", self.w2.len(), all("w2", output * (intermediate / 2))?)?;
        check_len("s2", self.s2.len(), all("s2", swizzled_len(output, intermediate / 16))?)?;
        check_len("alpha2", self.alpha2.len(), experts)?;
        check_finite("alpha1", self.alpha1.iter().map(|alpha| alpha.as_slice()))?;
        check_finite("alpha2", self.alpha2.iter().map(std::slice::from_ref))
    }

    /// One expert's w13.
    pub(super) fn fc1(&self, expert: usize) -> Matrix<'_> {
        Matrix::of_expert(self.w13, self.s13, expert, 2 * self.shape.intermediate, self.shape.hidden)
    }

    /// One expert's w2.
    pub(super) fn fc2(&self, expert: usize) -> Matrix<'_> {
        Matrix::of_expert(self.w2, self.s2, expert, self.shape.output, self.shape.intermediate)
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
    match options.limit {
        Some(limit) if limit.is_nan() || limit <= 0.0 => {
            Err(Error::argument("limit", limit, "a value > 0, or None for no clamp"))
        }
        _ => Ok(()),
    }
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

/// One expert's weight matrix: rows of `cols` codes with a scale per 16.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

impl<'a> Matrix<'a> {
    fn of_expert(codes: &'a [u8], scales: &'a [u8], expert: usize, rows: usize, cols: usize) -> Self {
        let (codes_len, scales_len) = (rows * (cols / 2), swizzled_len(rows, cols / 16));
        Matrix {
            codes: &codes[expert * codes_len..][..codes_len],
            scales: &scales[expert * scales_len..][..scales_len],
            cols,
        }
    }

    /// What the sixteen codes of (row, block) stand for.
    fn block(&self, table: &'static WeightTable, row: usize, block: usize) -> &'static [Operand; 16] {
        let scale = self.scales[swizzled_offset(row, block, padded_cols(self.cols / 16))];
        &table.weights[usize::from(scale)]
    }

    fn code(&self, row: usize, k: usize) -> usize {
        let byte = self.codes[row * (self.cols / 2) + k / 2];
        usize::from(if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
    }

    /// One row's weights, k ascending.
    pub(super) fn row(&self, format: Activation, row: usize) -> Vec<f64> {
        let table = &*WEIGHTS[format as usize];
        (0..self.cols).map(|k| f64::from(self.block(table, row, k / 16)[self.code(row, k)].value)).collect()
    }

    /// Rows first..first+LANES of the matrix, but none from `end` on, in the order of the instructions.
    fn tile(&self, format: Activation, first: usize, end: usize) -> Tile {
        let table = &*WEIGHTS[format as usize];
        let blocks: [Vec<_>; LANES] = std::array::from_fn(|lane| {
            let row = first + lane;
            let blocks = if row < end { self.cols / 16 } else { 0 };
            (0..blocks).map(|block| self.block(table, row, block)).collect()
        });
        Tile::new(format, steps(self.cols), |lane, position| {
            let k = seed_k(position);
            blocks[lane].get(k / 16).map_or(table.zero, |block| block[self.code(first + lane, k)])
        })
    }
}

/// Every weight there is: the product of each scale byte and each code, which both 16-bit formats hold exactly.
struct WeightTable {
    weights: Vec<[Operand; 16]>,
    zero: Operand,
}

/// By `Activation as usize`.
static WEIGHTS: [LazyLock<WeightTable>; 2] =
    [LazyLock::new(|| weight_table(Activation::Bf16)), LazyLock::new(|| weight_table(Activation::F16))];

fn weight_table(format: Activation) -> WeightTable {
    let weight = |scale: u8, code: usize| {
        let value = math::e2m1(code as u8) * math::e4m3(scale);
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

/// The k of operand position `position` in the order `seed`, where position 16·s + i is product i of instruction s.
fn seed_k(position: usize) -> usize {
    let (step, product) = (position / STEP, position % STEP);
    let (chunk, j) = (step / 8, step % 8);
    let (t, within) = (product / 4, product % 4);
    128 * chunk + 32 * t + 4 * j + within
}

/// The instructions of each partial sum of FC1: of n = ceil(K/256) segments, partial i of S has those from floor(i·n/S)
/// to floor((i+1)·n/S).
fn partials(cols: usize, split: usize) -> Vec<Range<usize>> {
    let segments = cols.div_ceil(256);
    let first_step = |i: usize| (i * segments / split * 16).min(steps(cols));
    (0..split).map(|i| first_step(i)..first_step(i + 1)).collect()
}

/// Σ w·x for all lanes: one chain per partial from +0, the partials added in order.
fn dot(mode: Mode, tile: &Tile, row: &Row, partials: &[Range<usize>]) -> [f32; LANES] {
    match mode {
        Mode::Exact => {
            let mut total: Option<[f32; LANES]> = None;
            for steps in partials {
                let mut acc = [0.0; LANES];
                mma::chain_exact(tile, row, steps.clone(), &mut acc);
                total = Some(match total {
                    None => acc,
                    Some(total) => std::array::from_fn(|lane| math::canonical(total[lane] + acc[lane])),
                });
            }
            total.unwrap_or_default()
        }
        Mode::Fast => {
            let end = partials.last().map_or(0, |last| last.end);
            mma::chain_plain(tile, row, 0..end).map(|sum| math::canonical(sum as f32))
        }
    }
}

/// Row `index` of a [_, cols] matrix of 16-bit values, in the order of the instructions.
fn activation_row(format: Activation, values: &[u16], index: usize, cols: usize) -> Row {
    let values = &values[index * cols..][..cols];
    Row::new(steps(cols), |position| Operand::decode(format, values.get(seed_k(position)).copied().unwrap_or(0)))
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

/// FC1 and SwiGLU: h [M·top_k, I] in the activation format, and whether on the f16 path a finite element became infinite.
///
/// `x` [M, K] is in the activation format ([`convert_x`]). In f32: `g = alpha1[e][1]·G`, `u = alpha1[e][0]·U`, both
/// clamped, `h = (g / (1 + exp(-g)))·u`, rounded once. Rows of skipped pairs are 0 and stand for "not computed".
pub fn fc1(
    view: &Nvfp4View<'_>,
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

    let format = options.activation;
    let Order::Seed { split } = options.order;
    let partials = partials(hidden, split.count());
    let rows_of_x = (0..route.tokens())
        .into_par_iter()
        .map(|token| route.token_is_live(token).then(|| activation_row(format, x, token, hidden)))
        .collect::<Vec<_>>();
    let out_of_range = AtomicBool::new(false);
    let mut h = zeros(0, route, intermediate)?;
    for_all_rows(route, intermediate, &mut h, |expert, first, pairs| {
        let matrix = view.fc1(expert);
        let up = matrix.tile(format, first, intermediate);
        let gate = matrix.tile(format, intermediate + first, 2 * intermediate);
        let [alpha_up, alpha_gate] = view.alpha1[expert];
        let rows = pairs.iter().filter_map(|pair| rows_of_x[pair / top_k].as_ref());
        rows.map(|x| {
            let gates = dot(mode, &gate, x, &partials);
            let ups = dot(mode, &up, x, &partials);
            std::array::from_fn(|lane| {
                let h = math::swiglu(alpha_gate * gates[lane], alpha_up * ups[lane], options.limit);
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

/// FC2: ypart \[M·top_k, H\], per pair `(alpha2[e]·w)·y` with y one chain over I. Rows of skipped pairs are 0 and stand for
/// "not computed".
pub fn fc2(
    view: &Nvfp4View<'_>,
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

    let format = options.activation;
    let whole = partials(intermediate, 1);
    let rows_of_h = (0..route.pairs())
        .into_par_iter()
        .map(|pair| route.expert_of(pair).map(|_| activation_row(format, h, pair, intermediate)))
        .collect::<Vec<_>>();
    let mut ypart = zeros(0.0, route, output)?;
    for_all_rows(route, output, &mut ypart, |expert, first, pairs| {
        let tile = view.fc2(expert).tile(format, first, output);
        let rows = pairs.iter().filter_map(|&pair| rows_of_h[pair].as_ref().map(|h| (topk_w[pair], h)));
        rows.map(|(w, h)| {
            let scale = view.alpha2[expert] * w;
            dot(mode, &tile, h, &whole).map(|y| math::canonical(scale * y))
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
pub fn layer(
    view: &Nvfp4View<'_>,
    options: &LayerOptions,
    inputs: &LayerInputs<'_>,
    mode: Mode,
) -> Result<LayerResult> {
    view.check()?;
    check_options(options)?;
    inputs.check(&view.shape, options.activation)?;
    let route = route_prep(inputs.topk_ids, view.shape.top_k, view.shape.experts)?;
    let (x, x_range) = convert_x(inputs, &view.shape, options.activation, &route)?;
    let (h, h_range) = fc1(view, options, &x, &route, mode)?;
    let ypart = fc2(view, options, &h, inputs.topk_w, &route, mode)?;
    let out = combine(&ypart, view.shape.output, &route)?;
    Ok(LayerResult { out, status: Status { bad_id: route.bad_id_seen, f16_range: x_range || h_range } })
}
