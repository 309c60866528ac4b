//! `unpermute_reduce`, `shared_gate`, `blend`, `unpermute_blend`, `weighted_sum_blend`: the weighted sum of a token's rows, and
//! the shared expert's part. All rows are bf16 of `width` elements; sums are f32.

use rayon::prelude::*;

use super::{math, rows_of, tree};
use crate::Activation;
use crate::error::{Error, Result, check_at_least, check_len};

fn widen(bits: u16) -> f32 {
    math::to_f32(Activation::Bf16, bits)
}

fn narrow(x: f32) -> u16 {
    math::from_f32(Activation::Bf16, x)
}

/// out [M, width]: `bf16((0 + w_0·y_0) + w_1·y_1 …)` over the slots of a token, ascending. `token_to_perm` [M, top_k] is the
/// row of y of each pair; a pair whose row is < 0 or >= `live_rows` is skipped and its row is not read. A weight of 0 is
/// not a skip.
pub fn unpermute_reduce(
    y: &[u16],
    width: usize,
    token_to_perm: &[i32],
    weights: &[f32],
    top_k: usize,
    live_rows: i32,
) -> Result<Vec<u16>> {
    Ok(sums(y, width, token_to_perm, weights, top_k, live_rows)?.into_iter().map(narrow).collect())
}

/// The sums before their rounding to bf16.
fn sums(
    y: &[u16],
    width: usize,
    token_to_perm: &[i32],
    weights: &[f32],
    top_k: usize,
    live_rows: i32,
) -> Result<Vec<f32>> {
    rows_of("y", y.len(), "width", width)?;
    rows_of("token_to_perm", token_to_perm.len(), "top_k", top_k)?;
    check_len("weights", weights.len(), token_to_perm.len())?;
    let live_rows = usize::try_from(live_rows).map_err(|_| Error::argument("live_rows", live_rows, "not negative"))?;
    check_at_least("y", y.len() / width, live_rows)?;
    let token = |(rows, weights): (&[i32], &[f32])| {
        let mut sums = vec![0.0; width];
        for (&row, weight) in rows.iter().zip(weights) {
            if let Some(row) = usize::try_from(row).ok().filter(|&row| row < live_rows) {
                for (sum, &y) in sums.iter_mut().zip(&y[row * width..][..width]) {
                    *sum += weight * widen(y);
                }
            }
        }
        sums
    };
    Ok(token_to_perm.par_chunks(top_k).zip(weights.par_chunks(top_k)).flat_map_iter(token).collect())
}

/// The shared expert's factor for each row of x [M, hidden]: sigmoid of x·`gate_weight`, or 1 without one.
///
/// The dot product has 256 partial sums, partial i of the products with k ≡ i (mod 256), ascending. Each 32 partials are
/// added in the tree, and the eight sums in order from 0.
pub fn shared_gate(x: &[u16], gate_weight: Option<&[u16]>, hidden: usize) -> Result<Vec<f32>> {
    let rows = rows_of("x", x.len(), "hidden", hidden)?;
    let Some(gate_weight) = gate_weight else { return Ok(vec![1.0; rows]) };
    check_len("gate_weight", gate_weight.len(), hidden)?;
    let gate = |x: &[u16]| {
        let mut partials = [[0.0; 32]; 8];
        for (k, (&x, &w)) in x.iter().zip(gate_weight).enumerate() {
            partials[k % 256 / 32][k % 32] += widen(x) * widen(w);
        }
        let mut dot = 0.0;
        for warp in partials {
            dot += tree(warp);
        }
        math::sigmoid(dot)
    };
    Ok(x.par_chunks(hidden).map(gate).collect())
}

/// `bf16(out + g·shared)` of each element; out and shared are bf16 [M, width], and row t has the factor `gate[t]`.
pub fn blend(out: &[u16], shared: &[u16], gate: &[f32]) -> Result<Vec<u16>> {
    blended(&out.iter().map(|&bits| widen(bits)).collect::<Vec<_>>(), shared, gate)
}

fn blended(out: &[f32], shared: &[u16], gate: &[f32]) -> Result<Vec<u16>> {
    check_len("shared", shared.len(), out.len())?;
    if gate.is_empty() {
        check_len("out", out.len(), 0)?;
        return Ok(Vec::new());
    }
    if !out.len().is_multiple_of(gate.len()) {
        let needed = format!("one for each row of the {} elements of out", out.len());
        return Err(Error::argument("gate", format!("of {} elements", gate.len()), needed));
    }
    let width = out.len() / gate.len();
    Ok(out
        .iter()
        .zip(shared)
        .enumerate()
        .map(|(i, (out, &shared))| narrow(out + gate[i / width] * widen(shared)))
        .collect())
}

/// [`unpermute_reduce`], then [`blend`]: two roundings to bf16.
#[expect(clippy::too_many_arguments, reason = "those of the two operations that it is")]
pub fn unpermute_blend(
    y: &[u16],
    width: usize,
    token_to_perm: &[i32],
    weights: &[f32],
    top_k: usize,
    live_rows: i32,
    shared: &[u16],
    gate: &[f32],
) -> Result<Vec<u16>> {
    blend(&unpermute_reduce(y, width, token_to_perm, weights, top_k, live_rows)?, shared, gate)
}

/// As [`unpermute_blend`], but the sum stays f32 until the shared part is added: one rounding to bf16.
#[expect(clippy::too_many_arguments, reason = "those of the two operations that it joins")]
pub fn weighted_sum_blend(
    y: &[u16],
    width: usize,
    token_to_perm: &[i32],
    weights: &[f32],
    top_k: usize,
    live_rows: i32,
    shared: &[u16],
    gate: &[f32],
) -> Result<Vec<u16>> {
    blended(&sums(y, width, token_to_perm, weights, top_k, live_rows)?, shared, gate)
}
