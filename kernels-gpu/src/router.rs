//! Router projections: logits of bf16 hidden states [M, K] and bf16 weights [E, K], without tensor cores, whose order of sums is
//! not ours to choose.
//!
//! `router_gemm`: f32 logits. A logit is 32 partial sums, that of lane i over k = i, i + 32, … ascending, p = p + x·w from +0, then the
//! tree `p[i] + p[i ^ d]` for d = 16, 8, 4, 2, 1, then a bias if there is one. `router_gemm_strict`: one sum over k ascending, rounded to
//! bf16 at the end.
//!
//! Product and sum are rounded apart, so a product costs two instructions: at least 2·M·E·K / (128 lanes · multiprocessors · clock),
//! which is 1 ms for M = 8192, E = 256, K = 7168 on an H200. But a product of two bf16 has 16 significant bits, and where it is also
//! in the range of f32 its rounding changes nothing: then one fma gives the same bits. The kernel for many tokens looks at the operands of
//! each chunk of k and takes the fma where all of them are 0 or in 2^-64 to 2^64.
//!
//! In `router_gemm` a lane holds partial sums of TM x TN logits, so that its TM + TN loads from shared memory serve TM·TN products. Rows come
//! through a ring of stages with `cp.async`; consecutive lanes read consecutive bf16 of a row, which hits every bank once. What lies
//! outside the matrices is 0 and changes no sum: one that began at +0 is never -0. How logits are divided among lanes, warps and
//! blocks leaves the bits alone.

use core::num::NonZeroU32;
use cuda_std::cvt::{bf16_to_f32, f32_to_bf16};
use cuda_std::math::fma;
use cuda_std::memory::{In, Out};
use cuda_std::shared::Shared;
use cuda_std::thread::{block_idx, lane, thread_idx, warp as warp_idx};
use cuda_std::{copy, kernels, sync, warp};

/// How a kernel divides the logits: a block has `tokens` x `experts` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Tokens of a block.
    pub tokens: u32,
    /// Experts of a block.
    pub experts: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
}

impl Tile {
    const fn new(tokens: u32, experts: u32, pitch: u32, stages: u32) -> Self {
        Tile { tokens, experts, shared_bytes: (tokens + experts) * pitch * 2 * stages }
    }

    /// With room for the flags of `warps` warps.
    const fn with_flags(self, warps: u32) -> Self {
        Tile { shared_bytes: self.shared_bytes + 2 * warps * 4, ..self }
    }

    /// Blocks for M tokens and E experts.
    pub const fn blocks(self, tokens: u32, experts: u32) -> u64 {
        tokens.div_ceil(self.tokens) as u64 * experts.div_ceil(self.experts) as u64
    }
}

/// Of `router_gemm_1x2`.
pub const TILE_1X2: Tile = Tile::new(1, 2, 512, 8);
/// Of `router_gemm_4x8`.
pub const TILE_4X8: Tile = Tile::new(4, 8, 256, 6);
/// Of `router_gemm_8x8`.
pub const TILE_8X8: Tile = Tile::new(8, 8, 256, 4);
/// Of `router_gemm_32x32`.
pub const TILE_32X32: Tile = Tile::new(32, 32, 128, 4).with_flags(16);
/// Of `router_gemm_strict_4x32`.
pub const STRICT_4X32: Tile = Tile::new(4, 32, 128 + 8, 4);
/// Of `router_gemm_strict_32x64`.
pub const STRICT_32X64: Tile = Tile::new(32, 64, 64 + 8, 3);

kernels! {
    /// f32 logits from 32 partial sums each. Grid: [`Tile::blocks`].
    pub mod router_gemm(
        /// [M, K] bf16.
        x: In<u16>,
        /// [E, K] bf16.
        w: In<u16>,
        /// `[E]`, or null.
        bias: In<f32>,
        /// [M, E].
        logits: Out<f32>,
        /// Number of tokens M.
        tokens: u32,
        /// Number of experts E.
        experts: u32,
        /// Hidden size K.
        hidden: u32,
    );
    router_gemm_1x2[64, 8] = |_A| partials::<1, 1, 1, 1, 2, 512, 8, 6, false>;
    router_gemm_4x8[128, 4] = |_A| partials::<4, 2, 8, 1, 4, 256, 6, 4, false>;
    router_gemm_8x8[128, 4] = |_A| partials::<4, 4, 16, 2, 2, 256, 4, 2, false>;
    router_gemm_32x32[512, 1] = |_A| partials::<8, 8, 64, 4, 4, 128, 4, 2, true>;
}

kernels! {
    /// bf16 logits from one sum each. Grid: [`Tile::blocks`].
    pub mod router_gemm_strict(
        /// [M, K] bf16.
        x: In<u16>,
        /// [E, K] bf16.
        w: In<u16>,
        /// [M, E] bf16.
        logits: Out<u16>,
        /// Number of tokens M.
        tokens: u32,
        /// Number of experts E.
        experts: u32,
        /// Hidden size K.
        hidden: u32,
    );
    router_gemm_strict_4x32[128, 4] = |_A| strict::<1, 1, 1, 4, 32, 128, 4, 2>;
    router_gemm_strict_32x64[128, 4] = |_A| strict::<4, 4, 16, 8, 16, 64, 3, 1>;
}

/// The rows of a block's tile, on their way through shared memory in stages of `KC` columns.
#[derive(Clone, Copy)]
struct Rows {
    x: In<u16>,
    w: In<u16>,
    first_token: u32,
    first_expert: u32,
    block_tokens: u32,
    block_experts: u32,
    tokens: u32,
    experts: u32,
    hidden: u32,
}

impl Rows {
    /// Issues chunk `chunk` of `chunks` to stage `slot`, rows `pitch` elements apart. Behind the last one there is nothing to do,
    /// but a group is closed all the same.
    #[inline(always)]
    fn issue<const KC: usize>(self, slot: u32, chunk: u32, chunks: u32, pitch: u32, threads: u32) {
        let all = self.block_tokens + self.block_experts;
        let to = Shared::<u16>::at(slot * all * pitch * 2, all * pitch);
        let pieces = KC as u32 / 8;
        let total = if chunk < chunks { all * pieces } else { 0 };
        let k0 = chunk * KC as u32;
        let mut at = thread_idx();
        while at < total {
            let (row, k) = (at / pieces, k0 + at % pieces * 8);
            let of_x = row < self.block_tokens;
            let row_of = if of_x { self.first_token + row } else { self.first_expert + (row - self.block_tokens) };
            let rows = if of_x { self.tokens } else { self.experts };
            let from = if of_x { self.x } else { self.w };
            let inside = row_of < rows && k < self.hidden;
            let start = if inside { row_of as usize * self.hidden as usize + k as usize } else { 0 };
            let index = row * pitch + at % pieces * 8;
            if self.hidden.is_multiple_of(8) {
                copy::async16_zfill(to, index, from, start, if inside { 16 } else { 0 });
            } else {
                // Rows of another length begin anywhere.
                let left = if inside { self.hidden - k } else { 0 };
                let pair = |i: u32| {
                    let one = |i: u32| if i < left { from.load(start + i as usize) as u32 } else { 0 };
                    one(i) | one(i + 1) << 16
                };
                to.store_v4(index, [pair(0), pair(2), pair(4), pair(6)]);
            }
            at += threads;
        }
        copy::commit();
    }
}

/// One of five steps of the tree: of `count` sums a lane keeps the half that its bit `d` names, as long as there is more than one.
#[inline(always)]
fn halve<const C: usize>(sums: &mut [f32; C], count: usize, d: u32) {
    let high = lane() & d != 0;
    if count > 1 {
        let half = count / 2;
        let mut i = 0;
        while i < half {
            let (low_sum, high_sum) = (sums[i], sums[i + half]);
            let (kept, sent) = if high { (high_sum, low_sum) } else { (low_sum, high_sum) };
            sums[i] = kept + warp::shfl_xor(sent, d);
            i += 1;
        }
    } else {
        sums[0] += warp::shfl_xor(sums[0], d);
    }
}

/// `count` after `steps` of [`halve`].
const fn left(count: usize, steps: u32) -> usize {
    if count >> steps == 0 { 1 } else { count >> steps }
}

/// Bits that are set where one of two bf16 is neither 0 nor in 2^-64 to 2^64, which is an exponent field of 63 to 190.
#[inline(always)]
fn out_of_range(pair: u32) -> u32 {
    // No sum carries from one half to the other.
    let magnitude = pair & 0x7FFF_7FFF;
    // The field plus 1 is 64 to 191: its two upper bits differ.
    let field = magnitude + 0x0080_0080;
    let inside = field ^ field << 1;
    let not_zero = (magnitude + 0x7FFF_7FFF) >> 1;
    not_zero & !inside & 0x4000_4000
}

/// Adds the products of KC columns to a lane's sums. `of_x` and `of_w` are its elements of the first rows in the stage.
#[inline(always)]
fn add_chunk<const TM: usize, const TN: usize, const C: usize, const KC: usize>(
    sums: &mut [f32; C],
    stage: Shared<u16>,
    of_x: u32,
    of_w: u32,
    add: impl Fn(f32, f32, f32) -> f32,
) {
    let mut k = 0;
    while k < KC as u32 {
        let mut xs = [0.0; TM];
        let mut t = 0;
        while t < TM {
            xs[t] = bf16_to_f32(stage.load(of_x + (t * KC) as u32 + k));
            t += 1;
        }
        let mut ws = [0.0; TN];
        let mut e = 0;
        while e < TN {
            ws[e] = bf16_to_f32(stage.load(of_w + (e * KC) as u32 + k));
            e += 1;
        }
        let mut i = 0;
        while i < C {
            sums[i] = add(sums[i], xs[i / TN], ws[i % TN]);
            i += 1;
        }
        k += 32;
    }
}

/// A warp has TM x TN = C logits, a block WM x WN warps; KC columns are a stage. FUSE: whether it looks for chunks in which an fma
/// does.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn partials<
    const TM: usize,
    const TN: usize,
    const C: usize,
    const WM: usize,
    const WN: usize,
    const KC: usize,
    const STAGES: u32,
    const PENDING: u32,
    const FUSE: bool,
>(
    x: In<u16>,
    w: In<u16>,
    bias: In<f32>,
    logits: Out<f32>,
    tokens: u32,
    experts: u32,
    hidden: u32,
) {
    const { assert!(C == TM * TN && C.is_power_of_two() && PENDING + 2 == STAGES && KC.is_multiple_of(32)) };
    let (block_tokens, block_experts) = ((TM * WM) as u32, (TN * WN) as u32);
    let threads = (32 * WM * WN) as u32;
    let columns = NonZeroU32::new(experts.div_ceil(block_experts)).unwrap_or(NonZeroU32::MIN);
    let rows = Rows {
        x,
        w,
        first_token: block_idx() / columns * block_tokens,
        first_expert: block_idx() % columns * block_experts,
        block_tokens,
        block_experts,
        tokens,
        experts,
        hidden,
    };
    let chunks = hidden.div_ceil(KC as u32);
    let mut issued = 0;
    while issued < STAGES - 1 {
        rows.issue::<KC>(issued, issued, chunks, KC as u32, threads);
        issued += 1;
    }

    let lane = lane();
    let (wm, wn) = (warp_idx() / WN as u32, warp_idx() % WN as u32);
    let stage = (block_tokens + block_experts) * KC as u32;
    let mut sums = [0.0f32; C];
    let (mut slot, mut free) = (0, STAGES - 1);
    // A flag a warp, of this chunk and the one before.
    let flags = Shared::<u32>::at(STAGES * stage * 2, 2 * (WM * WN) as u32);
    let mut chunk = 0;
    while chunk < chunks {
        copy::wait::<PENDING>();
        let at = Shared::<u16>::at(slot * stage * 2, stage);
        let of_chunk = chunk % 2 * (WM * WN) as u32;
        if FUSE {
            // What this thread itself has copied.
            let mut outside = 0;
            let mut piece = thread_idx();
            while piece < (block_tokens + block_experts) * (KC / 8) as u32 {
                let words = at.load_v4(piece * 8).map(out_of_range);
                outside |= words[0] | words[1] | words[2] | words[3];
                piece += threads;
            }
            let outside = warp::any(outside != 0);
            if lane == 0 {
                flags.store(of_chunk + warp_idx(), outside as u32);
            }
        }
        // Also: all warps are through with the stage that is filled next.
        sync::sync_threads();
        rows.issue::<KC>(free, chunk + STAGES - 1, chunks, KC as u32, threads);
        let of_x = wm * (TM * KC) as u32 + lane;
        let of_w = (block_tokens + wn * TN as u32) * KC as u32 + lane;
        if FUSE && !warp::any(flags.load(of_chunk + lane % (WM * WN) as u32) != 0) {
            add_chunk::<TM, TN, C, KC>(&mut sums, at, of_x, of_w, |sum, x, w| fma(x, w, sum));
        } else {
            add_chunk::<TM, TN, C, KC>(&mut sums, at, of_x, of_w, |sum, x, w| sum + x * w);
        }
        slot = if slot == STAGES - 1 { 0 } else { slot + 1 };
        free = if free == STAGES - 1 { 0 } else { free + 1 };
        chunk += 1;
    }

    halve(&mut sums, C, 16);
    halve(&mut sums, left(C, 1), 8);
    halve(&mut sums, left(C, 2), 4);
    halve(&mut sums, left(C, 3), 2);
    halve(&mut sums, left(C, 4), 1);
    // Bits 4, 3, … of the lane chose halves: it has C / 32 neighbours, or 32 / C lanes have the same one.
    let own = left(C, 5);
    let sharing = if C >= 32 { 1 } else { 32 / C as u32 };
    let mut i = 0;
    while i < own {
        let index = lane / sharing * own as u32 + i as u32;
        let token = rows.first_token + wm * TM as u32 + index / TN as u32;
        let expert = rows.first_expert + wn * TN as u32 + index % TN as u32;
        if lane.is_multiple_of(sharing) && token < tokens && expert < experts {
            let sum = if bias.is_null() { sums[i] } else { sums[i] + bias.load(expert as usize) };
            logits.store(token as usize * experts as usize + expert as usize, sum);
        }
        i += 1;
    }
}

/// A thread has RM x RN = C logits, a block PM x PN threads; a thread's logits are PM tokens and PN experts apart, so that neighbours
/// have neighbouring rows of w. Rows are eight elements longer than KC: 16 bytes at the same column of eight rows hit every bank once.
#[inline(always)]
fn strict<
    const RM: usize,
    const RN: usize,
    const C: usize,
    const PM: usize,
    const PN: usize,
    const KC: usize,
    const STAGES: u32,
    const PENDING: u32,
>(
    x: In<u16>,
    w: In<u16>,
    logits: Out<u16>,
    tokens: u32,
    experts: u32,
    hidden: u32,
) {
    const { assert!(C == RM * RN && PENDING + 2 == STAGES && KC.is_multiple_of(8)) };
    let (block_tokens, block_experts) = ((RM * PM) as u32, (RN * PN) as u32);
    let (threads, pitch) = ((PM * PN) as u32, KC as u32 + 8);
    let columns = NonZeroU32::new(experts.div_ceil(block_experts)).unwrap_or(NonZeroU32::MIN);
    let rows = Rows {
        x,
        w,
        first_token: block_idx() / columns * block_tokens,
        first_expert: block_idx() % columns * block_experts,
        block_tokens,
        block_experts,
        tokens,
        experts,
        hidden,
    };
    let chunks = hidden.div_ceil(KC as u32);
    let mut issued = 0;
    while issued < STAGES - 1 {
        rows.issue::<KC>(issued, issued, chunks, pitch, threads);
        issued += 1;
    }

    let (pm, pn) = (thread_idx() / PN as u32, thread_idx() % PN as u32);
    let stage = (block_tokens + block_experts) * pitch;
    let mut sums = [0.0f32; C];
    let (mut slot, mut free) = (0, STAGES - 1);
    let mut chunk = 0;
    while chunk < chunks {
        copy::wait::<PENDING>();
        sync::sync_threads();
        rows.issue::<KC>(free, chunk + STAGES - 1, chunks, pitch, threads);
        let at = Shared::<u16>::at(slot * stage * 2, stage);
        let (of_x, of_w) = (pm * pitch, (block_tokens + pn) * pitch);
        let mut k = 0;
        while k < KC as u32 {
            let mut xs = [[0; 4]; RM];
            let mut t = 0;
            while t < RM {
                xs[t] = at.load_v4(of_x + (t * PM) as u32 * pitch + k);
                t += 1;
            }
            let mut ws = [[0; 4]; RN];
            let mut e = 0;
            while e < RN {
                ws[e] = at.load_v4(of_w + (e * PN) as u32 * pitch + k);
                e += 1;
            }
            let mut word = 0;
            while word < 4 {
                let mut i = 0;
                while i < C {
                    sums[i] += low(xs[i / RN][word]) * low(ws[i % RN][word]);
                    i += 1;
                }
                let mut i = 0;
                while i < C {
                    sums[i] += high(xs[i / RN][word]) * high(ws[i % RN][word]);
                    i += 1;
                }
                word += 1;
            }
            k += 8;
        }
        slot = if slot == STAGES - 1 { 0 } else { slot + 1 };
        free = if free == STAGES - 1 { 0 } else { free + 1 };
        chunk += 1;
    }
    let mut i = 0;
    while i < C {
        let token = rows.first_token + pm + (i / RN * PM) as u32;
        let expert = rows.first_expert + pn + (i % RN * PN) as u32;
        if token < tokens && expert < experts {
            logits.store(token as usize * experts as usize + expert as usize, f32_to_bf16(sums[i]));
        }
        i += 1;
    }
}

/// The f32 of the lower bf16 of a word.
#[inline(always)]
fn low(word: u32) -> f32 {
    f32::from_bits(word << 16)
}

/// The f32 of the upper bf16 of a word.
#[inline(always)]
fn high(word: u32) -> f32 {
    f32::from_bits(word & 0xFFFF_0000)
}
