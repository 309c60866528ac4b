//! `sort_by_expert`: pairs grouped by expert, the pairs of an expert in ascending order.

use super::rows_of;
use crate::error::{Error, Result};

/// Where the pairs of all tokens go. A *sorted row* is a place in that order; expert e has the rows
/// `expert_offsets[e]..expert_offsets[e + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sorted {
    /// First row of each expert, and the number of live rows at the end: `[E + 1]`.
    pub expert_offsets: Vec<i32>,
    /// Token of each row, -1 from the number of live rows on: [M·top_k].
    pub sorted_token_ids: Vec<i32>,
    /// Pair of each row, -1 from the number of live rows on: [M·top_k].
    pub sorted_pairs: Vec<i32>,
    /// Row of each pair, -1 for a pair that is not live: [M·top_k].
    pub token_to_perm: Vec<i32>,
    /// Whether an id was >= E.
    pub bad_expert_id: bool,
}

/// Sorts the pairs (pair = token·top_k + slot) of `ids` [M, top_k]. A pair is live if its id is in 0..E and that expert is
/// `resident` (`[E]`).
pub fn sort_by_expert(ids: &[i32], top_k: usize, resident: &[bool]) -> Result<Sorted> {
    let experts = resident.len();
    if !(1..=4096).contains(&experts) {
        return Err(Error::argument("num_experts", experts, "1..=4096"));
    }
    rows_of("ids", ids.len(), "top_k", top_k)?;
    if ids.len() > i32::MAX as usize {
        return Err(Error::argument("ids", format!("of {} elements", ids.len()), "below 2^31"));
    }
    let mut sorted = Sorted {
        expert_offsets: vec![0],
        sorted_token_ids: vec![-1; ids.len()],
        sorted_pairs: vec![-1; ids.len()],
        token_to_perm: vec![-1; ids.len()],
        bad_expert_id: ids.iter().any(|&id| id >= experts as i32),
    };
    let mut pairs_of = vec![Vec::new(); experts];
    for (pair, &id) in ids.iter().enumerate() {
        if let Ok(expert) = usize::try_from(id)
            && resident.get(expert) == Some(&true)
        {
            pairs_of[expert].push(pair);
        }
    }
    let mut row = 0;
    for pairs in pairs_of {
        for pair in pairs {
            sorted.sorted_token_ids[row] = (pair / top_k) as i32;
            sorted.sorted_pairs[row] = pair as i32;
            sorted.token_to_perm[pair] = row as i32;
            row += 1;
        }
        sorted.expert_offsets.push(row as i32);
    }
    Ok(sorted)
}
