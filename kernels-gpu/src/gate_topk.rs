//! A router whose weights are NVFP4: logits, and the experts of a token in the same launch.
//!
//! Codes are [E, K/2] with the even element in the low nibble, scales e4m3 [E, K/16] row after row (no swizzle), and one factor
//! `scale2` belongs to the matrix. A logit is 32 partial sums, that of lane i over the blocks of 16 k number i, i + 32, … ascending,
//! from +0; in a block byte after byte p = p + (x_even·w_even + x_odd·w_odd), where w = e2m1·(e4m3·scale2), every operation rounded
//! once. The partials are joined by the tree `p[i] + p[i ^ d]`, d = 16, 8, 4, 2, 1. What follows is `topk` with SelectedSoftmax, or
//! without the division by the sum.
//!
//! A lane's block is eight bytes of codes and a byte of scale, so that a warp reads both in whole sectors; x comes from L1.

use crate::dequant::Activation;
use crate::order::Seed;
use crate::topk::{Weighing, select, tree};
use core::num::NonZeroU32;
use cuda_std::arch::Arch;
use cuda_std::cvt::{e4m3x2_to_f16x2, f16_to_f32};
use cuda_std::memory::{In, Out};
use cuda_std::mma::Bf16;
use cuda_std::shared::Shared;
use cuda_std::thread::{block_idx, grid_dim, lane, warp};
use cuda_std::{kernels, sync};

/// Threads of a block of the fused kernel.
pub const FUSED_THREADS: u32 = 1024;
/// Warps of a block of `gate_logits`.
pub const WARPS: u32 = 4;
/// Tokens of a warp of `gate_logits_tokens4`.
pub const TOKENS: u32 = 4;

/// Bytes of shared memory of a block of the fused kernel: a logit and a key for each expert.
pub const fn shared_bytes(experts: u32) -> u32 {
    8 * experts
}

kernels! {
    /// Experts and weights of tokens. A block has a token. Grid: any.
    pub mod gate_topk(
        /// [M, K] bf16.
        x: In<u16>,
        /// [E, K/16] words of 16 codes.
        codes: In<u64>,
        /// [E, K/16] e4m3.
        scales: In<u8>,
        /// [M, top_k] experts.
        ids: Out<i32>,
        /// [M, top_k] weights.
        weights: Out<f32>,
        /// Factor of the whole matrix.
        scale2: f32,
        /// Number of tokens M.
        tokens: u32,
        /// Number of experts E.
        experts: u32,
        /// K/16.
        blocks: u32,
        /// Experts of a token, at most 32 and E.
        top_k: u32,
        /// [`crate::topk::scoring::SELECTED_SOFTMAX`] or [`crate::topk::scoring::SELECTED_EXP`].
        scoring: u32,
    );
    moe_gate_topk_fused[FUSED_THREADS, 1] = |A| one_token::<A>;
}

kernels! {
    /// Logits alone. A warp has an expert and one or four tokens. Grid: any.
    pub mod gate_logits(
        /// [M, K] bf16.
        x: In<u16>,
        /// [E, K/16] words of 16 codes.
        codes: In<u64>,
        /// [E, K/16] e4m3.
        scales: In<u8>,
        /// [M, E].
        logits: Out<f32>,
        /// Factor of the whole matrix.
        scale2: f32,
        /// Number of tokens M.
        tokens: u32,
        /// Number of experts E.
        experts: u32,
        /// K/16.
        blocks: u32,
    );
    gate_logits_tokens1[32 * WARPS, 8] = |A| some_tokens::<A, 1>;
    gate_logits_tokens4[32 * WARPS, 4] = |A| some_tokens::<A, { TOKENS as usize }>;
}

/// The matrix.
#[derive(Clone, Copy)]
struct Gate {
    codes: In<u64>,
    scales: In<u8>,
    scale2: f32,
    blocks: u32,
}

/// Sixteen weights of a row: those of the eight low and the eight high nibbles' bytes apart.
#[inline(always)]
fn weights_of<A: Arch>(codes: u32, scale: f32) -> [f32; 8] {
    let [a, b, c, d] = Bf16::decode::<Seed, A>(codes).map(Bf16::whole::<A>);
    let low = |pair: u32| f32::from_bits(pair << 16) * scale;
    let high = |pair: u32| f32::from_bits(pair & 0xFFFF_0000) * scale;
    [low(a), low(b), high(a), high(b), low(c), low(d), high(c), high(d)]
}

/// Eight products of bf16 with f32, added to `sum` by pairs.
#[inline(always)]
fn add_pairs(sum: f32, x: [u32; 4], w: [f32; 8]) -> f32 {
    let pair =
        |word: u32, even: f32, odd: f32| f32::from_bits(word << 16) * even + f32::from_bits(word & 0xFFFF_0000) * odd;
    let sum = sum + pair(x[0], w[0], w[1]);
    let sum = sum + pair(x[1], w[2], w[3]);
    let sum = sum + pair(x[2], w[4], w[5]);
    sum + pair(x[3], w[6], w[7])
}

impl Gate {
    /// Logits of `R` experts for `T` tokens, whose rows of x begin at the given elements.
    #[inline(always)]
    fn logits<A: Arch, const R: usize, const T: usize>(
        self,
        x: In<u16>,
        from: [usize; T],
        experts: [u32; R],
    ) -> [[f32; T]; R] {
        let mut sums = [[0.0; T]; R];
        let mut block = lane();
        while block < self.blocks {
            let rows = experts.map(|expert| {
                let at = expert as usize * self.blocks as usize + block as usize;
                let scale = f16_to_f32(e4m3x2_to_f16x2::<A>(self.scales.load(at) as u16) as u16);
                (self.codes.load(at), scale * self.scale2)
            });
            let mut half = 0;
            while half < 2 {
                let xs = from.map(|from| x.load_v4(from + block as usize * 16 + half * 8));
                let mut r = 0;
                while r < R {
                    let (codes, scale) = rows[r];
                    let w = weights_of::<A>((codes >> (32 * half)) as u32, scale);
                    let mut t = 0;
                    while t < T {
                        sums[r][t] = add_pairs(sums[r][t], xs[t], w);
                        t += 1;
                    }
                    r += 1;
                }
                half += 1;
            }
            block += 32;
        }
        sums.map(|row| row.map(tree))
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn some_tokens<A: Arch, const T: usize>(
    x: In<u16>,
    codes: In<u64>,
    scales: In<u8>,
    logits: Out<f32>,
    scale2: f32,
    tokens: u32,
    experts: u32,
    blocks: u32,
) {
    let gate = Gate { codes, scales, scale2, blocks };
    let row = blocks as usize * 16;
    let of_tokens = tokens.div_ceil(T as u32);
    let divisor = NonZeroU32::new(experts).unwrap_or(NonZeroU32::MIN);
    // At most 2^31 / T · 2^12 units: more than fit in 32 bits.
    let units = of_tokens as u64 * experts as u64;
    let mut unit = block_idx() as u64 * WARPS as u64 + warp() as u64;
    while unit < units {
        let wide = core::num::NonZeroU64::from(divisor);
        let (first, expert) = ((unit / wide) as u32 * T as u32, (unit % wide) as u32);
        // Tokens that are not there repeat the last one.
        let mut from = [0; T];
        let mut t = 0;
        while t < T {
            from[t] = (first + t as u32).min(tokens - 1) as usize * row;
            t += 1;
        }
        let [sums] = gate.logits::<A, 1, T>(x, from, [expert]);
        let mut t = 0;
        while t < T {
            if lane() == t as u32 && first + (t as u32) < tokens {
                logits.store((first + t as u32) as usize * experts as usize + expert as usize, sums[t]);
            }
            t += 1;
        }
        unit += grid_dim() as u64 * WARPS as u64;
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn one_token<A: Arch>(
    x: In<u16>,
    codes: In<u64>,
    scales: In<u8>,
    ids: Out<i32>,
    weights: Out<f32>,
    scale2: f32,
    tokens: u32,
    experts: u32,
    blocks: u32,
    top_k: u32,
    scoring: u32,
) {
    // Four experts of a warp share the loads of x.
    const EXPERTS: u32 = 4;
    let gate = Gate { codes, scales, scale2, blocks };
    let logits = Shared::<f32>::at(0, experts);
    let keys = Shared::<u32>::at(4 * experts, experts);
    let mut token = block_idx();
    while token < tokens {
        let from = token as usize * blocks as usize * 16;
        let mut first = warp() * EXPERTS;
        while first < experts {
            // Experts that are not there repeat the last one.
            let sums = gate.logits::<A, { EXPERTS as usize }, 1>(
                x,
                [from],
                [0, 1, 2, 3].map(|i| (first + i).min(experts - 1)),
            );
            let own = match lane() {
                0 => sums[0][0],
                1 => sums[1][0],
                2 => sums[2][0],
                _ => sums[3][0],
            };
            if lane() < EXPERTS && first + lane() < experts {
                logits.store(first + lane(), own);
            }
            first += FUSED_THREADS / 32 * EXPERTS;
        }
        sync::sync_threads();
        if warp() == 0 {
            let weighing = Weighing { top_k, scoring, renormalize: false, scale: 1.0 };
            select(logits, keys, experts, weighing, ids, weights, token as usize * top_k as usize);
        }
        // The next token's logits may not overwrite what warp 0 still reads.
        sync::sync_threads();
        token += grid_dim();
    }
}
