//! `gate_topk`: a router whose weights are NVFP4, and its choice of experts.
//!
//! Codes are e2m1 [E, K/2], even k in the low nibble; scales are e4m3 [E, K/16], row-major, not swizzled; `scale2` is one
//! f32 for all.

use rayon::prelude::*;

use super::topk::{TopK, exponentials, topk};
use super::{math, rows_of, tree};
use crate::error::{Error, Result, check_len};
use crate::{Activation, Routing, Scoring};

/// f32 logits [M, E] of x [M, K] (bf16).
///
/// 32 partial sums: partial l takes the blocks of 16 k whose number is ≡ l (mod 32), ascending, and of a block its eight
/// bytes ascending. With sc = scale·scale2: `p = p + (x_even·(low·sc) + x_odd·(high·sc))`. Then the tree.
pub fn gate_logits(x: &[u16], codes: &[u8], scales: &[u8], scale2: f32, hidden: usize) -> Result<Vec<f32>> {
    let experts = num_experts(codes, hidden)?;
    rows_of("x", x.len(), "hidden", hidden)?;
    check_len("scales", scales.len(), experts * (hidden / 16))?;
    let logit = |x: &[f32], e: usize| {
        let mut partials = [0.0; 32];
        for (block, (x, codes)) in x.chunks(16).zip(codes[e * (hidden / 2)..].chunks(8)).enumerate() {
            let scale = math::e4m3(scales[e * (hidden / 16) + block]) * scale2;
            for (x, &code) in x.chunks(2).zip(codes) {
                let (low, high) = (math::e2m1(code & 15) * scale, math::e2m1(code >> 4) * scale);
                partials[block % 32] += x[0] * low + x[1] * high;
            }
        }
        math::canonical(tree(partials))
    };
    let logits = x
        .par_chunks(hidden)
        .flat_map_iter(|x| {
            let x = x.iter().map(|&bits| math::to_f32(Activation::Bf16, bits)).collect::<Vec<_>>();
            (0..experts).map(move |e| logit(&x, e))
        })
        .collect();
    Ok(logits)
}

/// [`gate_logits`], then [`topk`] with [`Scoring::SelectedSoftmax`]. Without `normalize` the weights are exp(v - v of the
/// first slot) as they are; where every logit is -inf they are 1/top_k in both forms.
pub fn gate_topk(
    x: &[u16],
    codes: &[u8],
    scales: &[u8],
    scale2: f32,
    hidden: usize,
    top_k: usize,
    normalize: bool,
) -> Result<TopK> {
    let experts = num_experts(codes, hidden)?;
    let routing =
        Routing { scoring: Scoring::SelectedSoftmax, top_k, renormalize: normalize, groups: None, scale: 1.0 };
    super::topk::check_routing(experts, &routing)?;
    let logits = gate_logits(x, codes, scales, scale2, hidden)?;
    let mut result = topk(&logits, experts, None, &routing)?;
    if !normalize {
        let tokens = logits.chunks(experts).zip(result.ids.chunks(top_k)).zip(result.weights.chunks_mut(top_k));
        for ((logits, ids), weights) in tokens {
            if logits.iter().any(|&logit| logit != f32::NEG_INFINITY) {
                let values = ids.iter().map(|&id| logits[id as usize]).collect::<Vec<_>>();
                weights.copy_from_slice(&exponentials(&values));
            }
        }
    }
    Ok(result)
}

/// Rows of `codes`, at least one.
fn num_experts(codes: &[u8], hidden: usize) -> Result<usize> {
    if hidden == 0 || !hidden.is_multiple_of(16) {
        return Err(Error::argument("hidden", hidden, "a positive multiple of 16"));
    }
    match rows_of("codes", codes.len(), "hidden / 2", hidden / 2)? {
        0 => Err(Error::argument("num_experts", 0, "at least 1")),
        experts => Ok(experts),
    }
}
