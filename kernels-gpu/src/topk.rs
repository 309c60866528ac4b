//! From logits to the experts of a token and their weights, and weights on the input of experts.
//!
//! `topk`: a *score* for each expert from its logit l, a *choice* (score plus bias), the top-k experts by choice, a weight for each of
//! them. Softmax and SelectedSoftmax score l itself, Sigmoid 1 / (1 + exp(-l)), SqrtSoftplus sqrt(softplus(l)). Softmax with a bias
//! scores the probability p = exp(l - m) / den instead. Larger choices come first, equal ones (-0 is +0) by lower id, NaN after all
//! numbers. With groups only the experts of the best groups can be chosen: those with the largest sums of their two best choices.
//!
//! Weights: Softmax p, with m the largest logit that is no NaN, and den 32 partial sums of exp(l - m), that of lane i over experts
//! i, i + 32, … from +0, joined by the tree `p[i] + p[i ^ d]` for d = 16, 8, 4, 2, 1. SelectedSoftmax exp(l - l of slot 0), over their sum
//! in the order of slots. The others their score. Where they are renormalised they are divided by their sum in the order of slots,
//! to which Sigmoid and SqrtSoftplus add 1e-20. A row of -inf alone gives 1 / k each. Last comes the factor `scale`.
//!
//! A warp has a token, a lane every 32nd expert. Choices become keys whose unsigned order is the order above, so that a round of
//! the choice is two `redux.sync`: largest key, lowest id that has it.

use core::num::{NonZeroU32, NonZeroUsize};
use cuda_std::cvt::{bf16_to_f32, f32_to_bf16};
use cuda_std::math::{exp, sigmoid, softplus, sqrt};
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_dim, block_idx, grid_dim, lane, thread_idx, warp as warp_idx};
use cuda_std::{kernels, sync, warp};

/// Tokens, and warps, of a block of the kernels that hold choices in registers.
pub const TOKENS: u32 = 4;
/// Tokens, and warps, of a block of `topk_any`.
pub const TOKENS_ANY: u32 = 2;
/// Most groups of the kernels that hold choices in registers: a lane has one.
pub const MAX_GROUPS: u32 = 32;
/// Threads of a block of `scale_rows`.
pub const ROW_THREADS: u32 = 256;

/// Values of the parameter `scoring`.
pub mod scoring {
    /// Softmax over all experts.
    pub const SOFTMAX: u32 = 0;
    /// Softmax over the chosen experts.
    pub const SELECTED_SOFTMAX: u32 = 1;
    /// Sigmoid.
    pub const SIGMOID: u32 = 2;
    /// Square root of softplus.
    pub const SQRT_SOFTPLUS: u32 = 3;
    /// exp(l - l of slot 0), not divided by anything.
    pub const SELECTED_EXP: u32 = 4;
}

/// Bytes of shared memory of a block of `topk_any`: a key for each expert and group of each token.
pub const fn shared_bytes(experts: u32, groups: u32) -> u32 {
    TOKENS_ANY * 4 * (experts.next_multiple_of(32) + groups.next_multiple_of(32))
}

kernels! {
    /// Experts and weights of tokens. Grid: any.
    pub mod topk(
        /// [M, E] logits, or null.
        logits: In<f32>,
        /// [M, E] logits as bf16, where the others are null.
        logits_bf16: In<u16>,
        /// `[E]` added to scores for the choice, or null.
        bias: In<f32>,
        /// [M, top_k] experts.
        ids: Out<i32>,
        /// [M, top_k] weights.
        weights: Out<f32>,
        /// Number of tokens M.
        tokens: u32,
        /// Number of experts E.
        experts: u32,
        /// Experts of a token, at most 32 and E.
        top_k: u32,
        /// One of [`scoring`].
        scoring: u32,
        /// Number of groups, which divides E; 0 for none.
        groups: u32,
        /// Groups that stay.
        keep: u32,
        /// Whether weights are divided by their sum: 0 or 1.
        renormalize: u32,
        /// Factor on the weights.
        scale: f32,
    );
    topk_128[32 * TOKENS, 8] = |_A| in_registers::<4>;
    topk_256[32 * TOKENS, 8] = |_A| in_registers::<8>;
    topk_512[32 * TOKENS, 6] = |_A| in_registers::<16>;
    topk_any[32 * TOKENS_ANY, 8] = |_A| in_shared_memory;
}

kernels! {
    /// Rows of x times weights, one for each pair of a token and an expert, rounded once. Rows of ids outside 0..E are +0.
    pub mod scale_rows(
        /// [M, hidden] bf16.
        x: In<u16>,
        /// [M, top_k] experts.
        ids: In<i32>,
        /// [M, top_k] weights.
        weights: In<f32>,
        /// [M·top_k, hidden] bf16.
        out: Out<u16>,
        /// Number of tokens M.
        tokens: u32,
        /// Experts of a token.
        top_k: u32,
        /// Number of experts E.
        experts: u32,
        /// Columns.
        hidden: u32,
    );
    scale_rows_bf16[ROW_THREADS, 4] = |_A| rows;
}

/// Key of a NaN: below that of every number, above 0, which stands for what cannot be chosen.
const NAN_KEY: u32 = 1;

/// Unsigned integers in the order of choices.
#[inline(always)]
fn key(choice: f32) -> u32 {
    // Adding +0 makes +0 of -0.
    let bits = (choice + 0.0).to_bits();
    if choice.is_nan() {
        NAN_KEY
    } else if bits >> 31 != 0 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// The choice of a key.
#[inline(always)]
fn value(key: u32) -> f32 {
    f32::from_bits(if key == NAN_KEY {
        0x7FFF_FFFF
    } else if key >> 31 != 0 {
        key & 0x7FFF_FFFF
    } else {
        !key
    })
}

/// Key of a group by the keys of its two best experts, of which `second` is 0 where there is one expert.
#[inline(always)]
fn group_key(best: u32, second: u32) -> u32 {
    key(if second == 0 { value(best) } else { value(best) + value(second) })
}

/// Sum of one partial a lane, by the tree that is part of every definition here.
#[inline(always)]
pub(crate) fn tree(partial: f32) -> f32 {
    let mut sum = partial;
    sum += warp::shfl_xor(sum, 16);
    sum += warp::shfl_xor(sum, 8);
    sum += warp::shfl_xor(sum, 4);
    sum += warp::shfl_xor(sum, 2);
    sum + warp::shfl_xor(sum, 1)
}

/// What a row's logits have in common.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    /// Largest logit that is no NaN.
    largest: f32,
    /// Sum of exp(l - largest); of Softmax alone.
    sum: f32,
    /// Whether every logit is -inf.
    nothing: bool,
}

/// How weights come from logits.
#[derive(Clone, Copy)]
pub(crate) struct Weighing {
    pub top_k: u32,
    pub scoring: u32,
    pub renormalize: bool,
    pub scale: f32,
}

impl Weighing {
    /// What an expert is chosen by, before the bias.
    #[inline(always)]
    fn score(self, row: Row, logit: f32, biased: bool) -> f32 {
        match self.scoring {
            scoring::SOFTMAX if biased => exp(logit - row.largest) / row.sum,
            scoring::SIGMOID => sigmoid(logit),
            scoring::SQRT_SOFTPLUS => sqrt(softplus(logit)),
            _ => logit,
        }
    }

    /// Weight of lane t's expert, whose logit is `logit`, for slot t.
    #[inline(always)]
    fn weight(self, row: Row, logit: f32) -> f32 {
        let selected = self.scoring == scoring::SELECTED_SOFTMAX || self.scoring == scoring::SELECTED_EXP;
        let first = warp::shfl(logit, 0);
        let score = match self.scoring {
            scoring::SIGMOID => sigmoid(logit),
            scoring::SQRT_SOFTPLUS => sqrt(softplus(logit)),
            _ => exp(logit - if selected { first } else { row.largest }),
        };
        let mut weight = if self.scoring == scoring::SOFTMAX { score / row.sum } else { score };
        if self.scoring == scoring::SELECTED_SOFTMAX || (self.renormalize && !selected) {
            let mut sum = warp::shfl(weight, 0);
            let mut slot = 1;
            while slot < self.top_k {
                sum += warp::shfl(weight, slot);
                slot += 1;
            }
            let all = self.scoring == scoring::SOFTMAX || selected;
            weight /= if all { sum } else { sum + 1e-20 };
        }
        if row.nothing {
            weight = 1.0 / self.top_k as f32;
        }
        weight * self.scale
    }
}

/// The logits of a token, of either type.
#[derive(Clone, Copy)]
struct Logits {
    wide: In<f32>,
    narrow: In<u16>,
    from: usize,
}

impl Logits {
    #[inline(always)]
    fn load(self, expert: u32) -> f32 {
        let at = self.from + expert as usize;
        if self.narrow.is_null() { self.wide.load(at) } else { bf16_to_f32(self.narrow.load(at)) }
    }
}

/// Replaces each value.
#[inline(always)]
fn each<const N: usize>(values: &mut [f32; N], f: impl Fn(f32) -> f32) {
    let mut j = 0;
    while j < N {
        values[j] = f(values[j]);
        j += 1;
    }
}

/// Experts up to 32·N.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn in_registers<const N: usize>(
    logits: In<f32>,
    logits_bf16: In<u16>,
    bias: In<f32>,
    ids: Out<i32>,
    weights: Out<f32>,
    tokens: u32,
    experts: u32,
    top_k: u32,
    scoring: u32,
    groups: u32,
    keep: u32,
    renormalize: u32,
    scale: f32,
) {
    let weighing = Weighing { top_k, scoring, renormalize: renormalize != 0, scale };
    let lane = lane();
    let biased = !bias.is_null();
    let mut token = block_idx() * TOKENS + warp_idx();
    while token < tokens {
        let logits = Logits { wide: logits, narrow: logits_bf16, from: token as usize * experts as usize };
        let mut values = [f32::NEG_INFINITY; N];
        let mut j = 0;
        while j < N {
            let expert = lane + 32 * j as u32;
            if expert < experts {
                values[j] = logits.load(expert);
            }
            j += 1;
        }
        let mut row = Row { largest: f32::NEG_INFINITY, sum: 0.0, nothing: false };
        let mut nothing = true;
        let mut j = 0;
        while j < N {
            nothing &= values[j] == f32::NEG_INFINITY;
            row.largest = if values[j] > row.largest { values[j] } else { row.largest };
            j += 1;
        }
        row.nothing = warp::all(nothing);
        if scoring == scoring::SOFTMAX {
            row.largest = value(warp::max(key(row.largest)));
            let mut j = 0;
            while j < N {
                if lane + 32 * (j as u32) < experts {
                    row.sum += exp(values[j] - row.largest);
                }
                j += 1;
            }
            row.sum = tree(row.sum);
        }

        // One loop a scoring: with all of them in one, it would be too long to be unrolled.
        if scoring == scoring::SIGMOID {
            each(&mut values, |logit| Weighing { scoring: scoring::SIGMOID, ..weighing }.score(row, logit, biased));
        } else if scoring == scoring::SQRT_SOFTPLUS {
            each(&mut values, |logit| {
                Weighing { scoring: scoring::SQRT_SOFTPLUS, ..weighing }.score(row, logit, biased)
            });
        } else if scoring == scoring::SOFTMAX && biased {
            each(&mut values, |logit| Weighing { scoring: scoring::SOFTMAX, ..weighing }.score(row, logit, true));
        }
        let mut keys = [0; N];
        let mut j = 0;
        while j < N {
            let expert = lane + 32 * j as u32;
            if expert < experts {
                keys[j] = key(if biased { values[j] + bias.load(expert as usize) } else { values[j] });
            }
            j += 1;
        }
        if groups != 0 {
            keys = of_best_groups(keys, experts, groups, keep);
        }

        // Lane t keeps slot t.
        let mut mine = 0;
        let mut slot = 0;
        while slot < top_k {
            let mut best = keys[0];
            let mut j = 1;
            while j < N {
                best = best.max(keys[j]);
                j += 1;
            }
            let best = warp::max(best);
            let mut lowest = u32::MAX;
            let mut j = N;
            while j > 0 {
                j -= 1;
                if keys[j] == best {
                    lowest = lane + 32 * j as u32;
                }
            }
            let chosen = warp::min(lowest);
            let mut j = 0;
            while j < N {
                if chosen == lane + 32 * j as u32 {
                    keys[j] = 0;
                }
                j += 1;
            }
            if lane == slot {
                mine = chosen;
            }
            slot += 1;
        }
        let logit = if lane < top_k { logits.load(mine) } else { 0.0 };
        let weight = weighing.weight(row, logit);
        if lane < top_k {
            let to = token as usize * top_k as usize + lane as usize;
            ids.store(to, mine as i32);
            weights.store(to, weight);
        }
        token += grid_dim() * TOKENS;
    }
}

/// The keys without those of experts outside the `keep` best of `groups` groups, at most 32.
#[inline(always)]
fn of_best_groups<const N: usize>(mut keys: [u32; N], experts: u32, groups: u32, keep: u32) -> [u32; N] {
    let lane = lane();
    let size = experts / NonZeroU32::new(groups).unwrap_or(NonZeroU32::MIN);
    // Lane g keeps the key of group g.
    let mut mine = 0;
    let mut group = 0;
    while group < groups {
        // Experts below the group wrap around to large numbers.
        let offset = lane.wrapping_sub(group * size);
        let mut best = 0;
        let mut j = 0;
        while j < N {
            if offset.wrapping_add(32 * j as u32) < size {
                best = best.max(keys[j]);
            }
            j += 1;
        }
        let best = warp::max(best);
        let (mut count, mut below) = (0, 0);
        let mut j = 0;
        while j < N {
            if offset.wrapping_add(32 * j as u32) < size {
                if keys[j] == best {
                    count += 1;
                } else {
                    below = below.max(keys[j]);
                }
            }
            j += 1;
        }
        let (count, below) = (warp::sum(count), warp::max(below));
        if lane == group {
            mine = group_key(best, if count > 1 { best } else { below });
        }
        group += 1;
    }
    let mut better = 0;
    let mut group = 0;
    while group < groups {
        let other = warp::shfl(mine, group);
        if other > mine || (other == mine && group < lane) {
            better += 1;
        }
        group += 1;
    }
    let kept = warp::ballot(lane < groups && better < keep);
    let mut group = 0;
    while group < groups {
        if kept >> group & 1 == 0 {
            let offset = lane.wrapping_sub(group * size);
            let mut j = 0;
            while j < N {
                if offset.wrapping_add(32 * j as u32) < size {
                    keys[j] = 0;
                }
                j += 1;
            }
        }
        group += 1;
    }
    keys
}

/// Any number of experts and groups.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn in_shared_memory(
    logits: In<f32>,
    logits_bf16: In<u16>,
    bias: In<f32>,
    ids: Out<i32>,
    weights: Out<f32>,
    tokens: u32,
    experts: u32,
    top_k: u32,
    scoring: u32,
    groups: u32,
    keep: u32,
    renormalize: u32,
    scale: f32,
) {
    let weighing = Weighing { top_k, scoring, renormalize: renormalize != 0, scale };
    let lane = lane();
    let biased = !bias.is_null();
    let (of_keys, of_groups) = (experts.next_multiple_of(32), groups.next_multiple_of(32));
    let base = warp_idx() * (of_keys + of_groups) * 4;
    let keys = Shared::<u32>::at(base, of_keys);
    let best = Shared::<u32>::at(base + of_keys * 4, of_groups);
    let mut token = block_idx() * TOKENS_ANY + warp_idx();
    while token < tokens {
        let logits = Logits { wide: logits, narrow: logits_bf16, from: token as usize * experts as usize };
        let mut row = Row { largest: f32::NEG_INFINITY, sum: 0.0, nothing: false };
        let mut nothing = true;
        let mut expert = lane;
        while expert < experts {
            let logit = logits.load(expert);
            nothing &= logit == f32::NEG_INFINITY;
            row.largest = if logit > row.largest { logit } else { row.largest };
            expert += 32;
        }
        row.nothing = warp::all(nothing);
        if scoring == scoring::SOFTMAX {
            row.largest = value(warp::max(key(row.largest)));
            let mut expert = lane;
            while expert < experts {
                row.sum += exp(logits.load(expert) - row.largest);
                expert += 32;
            }
            row.sum = tree(row.sum);
        }
        let mut expert = lane;
        while expert < experts {
            let score = weighing.score(row, logits.load(expert), biased);
            keys.store(expert, key(if biased { score + bias.load(expert as usize) } else { score }));
            expert += 32;
        }
        if groups != 0 {
            keep_best_groups(keys, best, experts, groups, keep);
        }
        let mine = choose(keys, experts, top_k);
        let logit = if lane < top_k { logits.load(mine) } else { 0.0 };
        let weight = weighing.weight(row, logit);
        if lane < top_k {
            let to = token as usize * top_k as usize + lane as usize;
            ids.store(to, mine as i32);
            weights.store(to, weight);
        }
        token += grid_dim() * TOKENS_ANY;
    }
}

/// Sets the keys of experts outside the `keep` best groups to 0. `best` has room for a key a group.
#[inline(always)]
fn keep_best_groups(keys: Shared<u32>, best: Shared<u32>, experts: u32, groups: u32, keep: u32) {
    let lane = lane();
    let size = experts / NonZeroU32::new(groups).unwrap_or(NonZeroU32::MIN);
    sync::sync_warp();
    let mut group = lane;
    while group < groups {
        let (mut first, mut second) = (0, 0);
        let mut i = 0;
        while i < size {
            let key = keys.load(group * size + i);
            second = second.max(key.min(first));
            first = first.max(key);
            i += 1;
        }
        best.store(group, group_key(first, second));
        group += 32;
    }
    // The largest key that at least `keep` groups reach, bit by bit. A lane reads what it wrote.
    let mut least = 0u32;
    let mut bit = 1u32 << 31;
    while bit != 0 {
        if count_at_least(best, groups, least | bit) >= keep {
            least |= bit;
        }
        bit >>= 1;
    }
    // Groups above it stay, and of those that have it the first ones.
    let above = if least == u32::MAX { 0 } else { count_at_least(best, groups, least + 1) };
    let mut room = keep - above;
    let mut first = 0;
    while first < groups {
        let key = if first + lane < groups { best.load(first + lane) } else { 0 };
        let equal = warp::ballot(key == least);
        let before = (equal & ((1 << lane) - 1)).count_ones();
        if first + lane < groups {
            best.store(first + lane, (key > least || (key == least && before < room)) as u32);
        }
        room = room.saturating_sub(equal.count_ones());
        first += 32;
    }
    sync::sync_warp();
    let mut expert = lane;
    while expert < experts {
        if best.load(expert / NonZeroU32::new(size).unwrap_or(NonZeroU32::MIN)) == 0 {
            keys.store(expert, 0);
        }
        expert += 32;
    }
    // The next token's keys may not overwrite what another lane still reads.
    sync::sync_warp();
}

/// How many of `keys` are at least `least`, 1 or more.
#[inline(always)]
fn count_at_least(keys: Shared<u32>, len: u32, least: u32) -> u32 {
    let mut count = 0;
    let mut i = lane();
    while i < len {
        count += (keys.load(i) >= least) as u32;
        i += 32;
    }
    warp::sum(count)
}

/// The largest key of this lane's experts, the lowest of them that has it, 0 if none is left.
#[inline(always)]
fn best_of_lane(keys: Shared<u32>, experts: u32) -> (u32, u32) {
    let (mut best, mut lowest) = (0, u32::MAX);
    let mut expert = lane();
    while expert < experts {
        let key = keys.load(expert);
        if key > best {
            best = key;
            lowest = expert;
        }
        expert += 32;
    }
    (best, lowest)
}

/// The expert of slot t for lane t, by keys of which each lane accesses those of its own experts alone.
#[inline(always)]
fn choose(keys: Shared<u32>, experts: u32, top_k: u32) -> u32 {
    let lane = lane();
    let mut mine = 0;
    let (mut best, mut lowest) = best_of_lane(keys, experts);
    let mut slot = 0;
    while slot < top_k {
        let largest = warp::max(best);
        let chosen = warp::min(if best == largest { lowest } else { u32::MAX });
        if lowest == chosen {
            keys.store(chosen, 0);
            (best, lowest) = best_of_lane(keys, experts);
        }
        if lane == slot {
            mine = chosen;
        }
        slot += 1;
    }
    mine
}

/// Experts and weights from f32 logits in shared memory, by one warp; `keys` may lie where the logits do not. Both are in the order
/// of experts, and a barrier is behind what wrote the logits.
#[inline(always)]
pub(crate) fn select(
    logits: Shared<f32>,
    keys: Shared<u32>,
    experts: u32,
    weighing: Weighing,
    ids: Out<i32>,
    weights: Out<f32>,
    to: usize,
) {
    let lane = lane();
    let mut row = Row { largest: 0.0, sum: 0.0, nothing: true };
    let mut expert = lane;
    while expert < experts {
        let logit = logits.load(expert);
        row.nothing &= logit == f32::NEG_INFINITY;
        keys.store(expert, key(logit));
        expert += 32;
    }
    row.nothing = warp::all(row.nothing);
    let mine = choose(keys, experts, weighing.top_k);
    let logit = if lane < weighing.top_k { logits.load(mine) } else { 0.0 };
    let weight = weighing.weight(row, logit);
    if lane < weighing.top_k {
        ids.store(to + lane as usize, mine as i32);
        weights.store(to + lane as usize, weight);
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn rows(x: In<u16>, ids: In<i32>, weights: In<f32>, out: Out<u16>, tokens: u32, top_k: u32, experts: u32, hidden: u32) {
    let columns = if hidden.is_multiple_of(8) { 8 } else { 1 };
    let pieces = NonZeroUsize::new((hidden / columns) as usize).unwrap_or(NonZeroUsize::MIN);
    let slots = NonZeroUsize::new(top_k as usize).unwrap_or(NonZeroUsize::MIN);
    let total = tokens as usize * top_k as usize * pieces.get();
    let step = grid_dim() as usize * block_dim() as usize;
    let mut at = block_idx() as usize * block_dim() as usize + thread_idx() as usize;
    while at < total {
        let pair = at / pieces;
        let column = (at % pieces) * columns as usize;
        let from = pair / slots * hidden as usize + column;
        let to = pair * hidden as usize + column;
        let live = (ids.load(pair) as u32) < experts;
        let weight = if live { weights.load(pair) } else { 0.0 };
        if columns == 8 {
            let words = if live { x.load_v4(from) } else { [0; 4] };
            out.store_v4(
                to,
                words.map(|word| {
                    let product = |bits: u16| if live { f32_to_bf16(bf16_to_f32(bits) * weight) as u32 } else { 0 };
                    product(word as u16) | product((word >> 16) as u16) << 16
                }),
            );
        } else {
            out.store(to, if live { f32_to_bf16(bf16_to_f32(x.load(from)) * weight) } else { 0 });
        }
        at += step;
    }
}
