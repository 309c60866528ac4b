//! `router_gemm` and `router_gemm_strict`: logits of all experts, without tensor cores. x [M, K] and weight [E, K] are bf16.

use rayon::prelude::*;

use super::{math, rows_of, tree};
use crate::Activation;
use crate::error::{Error, Result, check_len};

/// f32 logits [M, E]: 32 partial sums, partial l of the products with k ≡ l (mod 32), k ascending, then the tree; plus
/// `bias` `[E]` where one is given.
pub fn router_gemm(x: &[u16], weight: &[u16], bias: Option<&[f32]>, hidden: usize) -> Result<Vec<f32>> {
    let experts = num_experts(weight, hidden)?;
    if let Some(bias) = bias {
        check_len("bias", bias.len(), experts)?;
    }
    logits(x, weight, hidden, |e, products| {
        let mut partials = [0.0; 32];
        for (k, product) in products.enumerate() {
            partials[k % 32] += product;
        }
        let sum = tree(partials);
        math::canonical(bias.map_or(sum, |bias| sum + bias[e]))
    })
}

/// bf16 logits [M, E]: one f32 sum over k strictly ascending, from +0, rounded once.
pub fn router_gemm_strict(x: &[u16], weight: &[u16], hidden: usize) -> Result<Vec<u16>> {
    num_experts(weight, hidden)?;
    logits(x, weight, hidden, |_, products| {
        let mut sum = 0.0;
        for product in products {
            sum += product;
        }
        math::from_f32(Activation::Bf16, sum)
    })
}

/// Rows of `weight`, at least one.
fn num_experts(weight: &[u16], hidden: usize) -> Result<usize> {
    match rows_of("weight", weight.len(), "hidden", hidden)? {
        0 => Err(Error::argument("num_experts", 0, "at least 1")),
        experts => Ok(experts),
    }
}

/// `logit(expert, products)` of every token and expert; the products x·w, each rounded to f32, come with k ascending.
fn logits<T: Send>(
    x: &[u16],
    weight: &[u16],
    hidden: usize,
    logit: impl Fn(usize, &mut dyn Iterator<Item = f32>) -> T + Sync,
) -> Result<Vec<T>> {
    rows_of("x", x.len(), "hidden", hidden)?;
    let widen = |values: &[u16]| values.iter().map(|&bits| math::to_f32(Activation::Bf16, bits)).collect::<Vec<_>>();
    let weight = widen(weight);
    let logits = x
        .par_chunks(hidden)
        .flat_map_iter(|x| {
            let x = widen(x);
            let row = weight.chunks(hidden).enumerate();
            row.map(|(e, w)| logit(e, &mut x.iter().zip(w).map(|(x, w)| x * w))).collect::<Vec<_>>()
        })
        .collect();
    Ok(logits)
}
