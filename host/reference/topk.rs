//! `topk` and `scale_rows`: a router's choice of experts and their weights, in f32 with every rounding written out.
//!
//! An expert is chosen by the order "larger choice first, equal choices by id, NaN after all numbers". Here the experts are
//! sorted by it; nothing of that has a rounding. Weights are always formed from the chosen experts in slot order.

use std::cmp::Ordering;

use rayon::prelude::*;

use super::{math, rows_of, tree};
use crate::error::{Error, Result, check_len};
use crate::{Activation, Groups, Routing, Scoring};

/// Experts of M tokens and their weights, both [M, top_k].
#[derive(Clone, Debug, PartialEq)]
pub struct TopK {
    /// Expert ids, the best choice first. Never twice the same in a token.
    pub ids: Vec<i32>,
    /// Weights of the same slots.
    pub weights: Vec<f32>,
}

/// Chooses experts from logits [M, E].
///
/// The choice of an expert is its score plus its `bias` `[E]` where one is given; the score is the logit l itself, or
/// sigmoid(l), or sqrt(softplus(l)). Only [`Scoring::Softmax`] with a bias chooses by p + bias, with p = exp(l - m)/den.
/// The weight never contains the bias.
pub fn topk(logits: &[f32], experts: usize, bias: Option<&[f32]>, routing: &Routing) -> Result<TopK> {
    check_routing(experts, routing)?;
    let tokens = rows_of("logits", logits.len(), "num_experts", experts)?;
    if let Some(bias) = bias {
        check_len("bias", bias.len(), experts)?;
    }
    let rows = logits.par_chunks(experts).map(|logits| token(logits, bias, routing)).collect::<Vec<_>>();
    let mut result = TopK { ids: Vec::new(), weights: Vec::new() };
    for (ids, weights) in rows {
        result.ids.extend(ids.into_iter().map(|id| id as i32));
        result.weights.extend(weights);
    }
    debug_assert_eq!(result.ids.len(), tokens * routing.top_k);
    Ok(result)
}

/// `Err` naming what is outside its limits.
pub(super) fn check_routing(experts: usize, routing: &Routing) -> Result<()> {
    let &Routing { top_k, groups, .. } = routing;
    if experts == 0 || experts > i32::MAX as usize {
        return Err(Error::argument("num_experts", experts, "1 to 2^31 - 1"));
    }
    if top_k == 0 || top_k > experts {
        return Err(Error::argument("top_k", top_k, format!("1..={experts}, the number of experts")));
    }
    if let Some(Groups { count, keep }) = groups {
        if count == 0 || !experts.is_multiple_of(count) {
            return Err(Error::argument("groups", count, format!("a number of groups that divides {experts} experts")));
        }
        if keep == 0 || keep > count || keep * (experts / count) < top_k {
            let needed = format!("1..={count} groups with at least {top_k} experts together");
            return Err(Error::argument("groups", format!("to keep {keep} of {count}"), needed));
        }
    }
    Ok(())
}

/// Larger values first, NaN last; -0 equals +0.
fn descending(a: f32, b: f32) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
        (a, b) => a.cmp(&b),
    }
}

/// Indices from best to worst. The sort is stable, so equal ones keep their ascending order.
fn ranked(values: &[f32]) -> Vec<usize> {
    let mut indices = (0..values.len()).collect::<Vec<_>>();
    indices.sort_by(|&a, &b| descending(values[a], values[b]));
    indices
}

/// Ids and weights of one token.
fn token(logits: &[f32], bias: Option<&[f32]>, routing: &Routing) -> (Vec<usize>, Vec<f32>) {
    let &Routing { scoring, top_k, renormalize, groups, scale } = routing;
    let probabilities = if scoring == Scoring::Softmax { softmax(logits) } else { Vec::new() };
    let choices = logits
        .iter()
        .enumerate()
        .map(|(e, &logit)| {
            let score = match (scoring, bias) {
                (Scoring::Softmax, Some(_)) => probabilities[e],
                (Scoring::Softmax | Scoring::SelectedSoftmax, _) => logit,
                _ => score(scoring, logit),
            };
            bias.map_or(score, |bias| score + bias[e])
        })
        .collect::<Vec<_>>();

    let kept = kept_groups(&choices, groups);
    let size = choices.len() / kept.len();
    let mut ids = ranked(&choices);
    ids.retain(|&e| kept[e / size]);
    ids.truncate(top_k);

    let mut weights = if logits.iter().all(|&logit| logit == f32::NEG_INFINITY) {
        vec![1.0 / top_k as f32; top_k]
    } else {
        match scoring {
            Scoring::Softmax => {
                let weights = ids.iter().map(|&e| probabilities[e]).collect();
                if renormalize { divided_by_sum(weights, 0.0) } else { weights }
            }
            Scoring::SelectedSoftmax => {
                divided_by_sum(exponentials(&ids.iter().map(|&e| logits[e]).collect::<Vec<_>>()), 0.0)
            }
            Scoring::Sigmoid | Scoring::SqrtSoftplus => {
                let weights = ids.iter().map(|&e| score(scoring, logits[e])).collect();
                if renormalize { divided_by_sum(weights, 1e-20) } else { weights }
            }
        }
    };
    for weight in &mut weights {
        *weight = math::canonical(*weight * scale);
    }
    (ids, weights)
}

/// The score that needs no other expert's logit.
fn score(scoring: Scoring, logit: f32) -> f32 {
    match scoring {
        Scoring::Softmax | Scoring::SelectedSoftmax => logit,
        Scoring::Sigmoid => math::sigmoid(logit),
        Scoring::SqrtSoftplus => math::softplus(logit).sqrt(),
    }
}

/// exp(l - m)/den of all logits: m is the largest that is no NaN, den the sum in 32 partials and a tree.
fn softmax(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().filter(|logit| !logit.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    let exponentials = logits.iter().map(|&logit| math::exp(logit - largest)).collect::<Vec<_>>();
    let mut partials = [0.0; 32];
    for (e, exponential) in exponentials.iter().enumerate() {
        partials[e % 32] += exponential;
    }
    let den = tree(partials);
    exponentials.into_iter().map(|exponential| exponential / den).collect()
}

/// exp(v - first v) of each.
pub(super) fn exponentials(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| math::exp(value - values[0])).collect()
}

/// Each divided by (their sum in order, plus `more` unless that is 0).
fn divided_by_sum(mut weights: Vec<f32>, more: f32) -> Vec<f32> {
    let mut sum = weights[0];
    for weight in &weights[1..] {
        sum += weight;
    }
    if more != 0.0 {
        sum += more;
    }
    for weight in &mut weights {
        *weight /= sum;
    }
    weights
}

/// Which groups' experts can be chosen: those with the largest sums of their two best choices. Without groups there is one.
fn kept_groups(choices: &[f32], groups: Option<Groups>) -> Vec<bool> {
    let Some(Groups { count, keep }) = groups else { return vec![true] };
    let scores = choices
        .chunks(choices.len() / count)
        .map(|group| match ranked(group)[..] {
            [best, second, ..] => group[best] + group[second],
            _ => group[0],
        })
        .collect::<Vec<_>>();
    let mut kept = vec![false; count];
    for &group in &ranked(&scores)[..keep] {
        kept[group] = true;
    }
    kept
}

/// Rows of x [M, hidden] (bf16) times their weights, one row a pair: `out[t·top_k + s] = bf16(x[t]·w[t, s])`. The row of an
/// id outside 0..E is +0.
pub fn scale_rows(
    x: &[u16],
    hidden: usize,
    ids: &[i32],
    weights: &[f32],
    top_k: usize,
    experts: usize,
) -> Result<Vec<u16>> {
    let tokens = rows_of("x", x.len(), "hidden", hidden)?;
    if experts == 0 {
        return Err(Error::argument("num_experts", experts, "at least 1"));
    }
    if top_k == 0 {
        return Err(Error::argument("top_k", top_k, "at least 1"));
    }
    check_len("ids", ids.len(), tokens * top_k)?;
    check_len("weights", weights.len(), tokens * top_k)?;
    let mut out = Vec::with_capacity(ids.len() * hidden);
    for (pair, (&id, &weight)) in ids.iter().zip(weights).enumerate() {
        let live = usize::try_from(id).is_ok_and(|id| id < experts);
        out.extend(x[pair / top_k * hidden..][..hidden].iter().map(|&x| {
            let x = math::to_f32(Activation::Bf16, x);
            if live { math::from_f32(Activation::Bf16, x * weight) } else { 0 }
        }));
    }
    Ok(out)
}
