//! Weight tiles through shared memory: each warp has a ring of stages of its own, so no block barrier stands between a copy
//! and its use. [`Feed`] keeps the ring full, [`Ring`] is the memory behind it.
//!
//! A stage holds 16 rows by 256 k: 128 bytes of codes and a scale per block ([`Format`]) a row. The 16-byte piece p of row r lies at
//! piece p xor 4·(r mod 2), so that eight lanes that read two rows hit all 32 banks once.

use crate::dequant::Format;
use crate::layout::permute;
use crate::layout::scale::{padded_cols, swizzled_len, swizzled_offset};
use crate::route_prep::RECORD_WORDS;
use crate::schedule::{Schedule, Unit};
use core::marker::PhantomData;
use cuda_std::memory::In;
use cuda_std::shared::Shared;
use cuda_std::thread::{WARP, lane};
use cuda_std::{copy, sync};

/// k of a stage.
pub const SEGMENT: u32 = permute::SEGMENT as u32;
/// Rows of a stage.
pub const ROWS: u32 = 16;
/// Bytes of codes of a stage.
const CODE_BYTES: u32 = ROWS * SEGMENT / 2;
/// Bytes of a stage: codes, then scales.
pub const fn stage_bytes<F: Format>() -> u32 {
    CODE_BYTES + ROWS * SEGMENT / F::BLOCK
}

/// The quantised matrix of each expert: codes [E, rows, k/2] and swizzled scales.
#[derive(Clone, Copy)]
pub struct Weights {
    /// E2M1 codes, element 2j in the low nibble of byte j of a row.
    pub codes: In<u8>,
    /// Block scales, 128x4-swizzled per expert.
    pub scales: In<u8>,
    /// Rows of the matrix.
    pub rows: u32,
    /// Columns of the matrix, a multiple of the block.
    pub k: u32,
}

/// A warp's ring of `STAGES` stages, and the place in the weights that is copied next.
#[derive(Clone, Copy)]
pub struct Ring<F, const STAGES: u32> {
    weights: Weights,
    base: u32,
    write: u32,
    read: u32,
    /// Byte offsets of this lane's pieces of the next segment: codes of four rows, scales of two (or one, where all scales of a
    /// stage are but one word a lane).
    codes: [usize; 4],
    scales: [usize; 2],
    segment: u32,
    format: PhantomData<F>,
}

impl<F: Format, const STAGES: u32> Ring<F, STAGES> {
    /// Bytes of shared memory of one ring.
    pub const BYTES: u32 = STAGES * stage_bytes::<F>();
    /// Words of four scales of a row of a stage.
    const SCALE_WORDS: u32 = SEGMENT / F::BLOCK / 4;
    /// Rows whose scales a warp copies with one instruction.
    const SCALE_ROWS: u32 = WARP / Self::SCALE_WORDS;

    /// An empty ring at byte `base` of shared memory.
    #[inline(always)]
    pub fn new(weights: Weights, base: u32) -> Self {
        Ring { weights, base, write: 0, read: 0, codes: [0; 4], scales: [0; 2], segment: 0, format: PhantomData }
    }

    /// Next comes segment `segment` of the tile of `expert` whose 16 rows are `row(0)` to `row(15)`.
    #[inline(always)]
    pub fn seek(&mut self, expert: u32, segment: u32, row: impl Fn(u32) -> u32) {
        let Weights { rows, k, .. } = self.weights;
        let row_bytes = k as usize / 2;
        let (lane, expert) = (lane(), expert as usize);
        let base = expert * rows as usize * row_bytes + segment as usize * 128 + (lane % 8) as usize * 16;
        self.codes = [0, 4, 8, 12].map(|r| base + row(r + lane / 8) as usize * row_bytes);
        let columns = (k / F::BLOCK) as usize;
        let base = expert * swizzled_len(rows as usize, columns);
        let column = (segment * (SEGMENT / F::BLOCK) + lane % Self::SCALE_WORDS * 4) as usize;
        let scale_row = |r: u32| row(r % ROWS + lane / Self::SCALE_WORDS) as usize;
        self.scales = [0, Self::SCALE_ROWS].map(|r| base + swizzled_offset(scale_row(r), column, padded_cols(columns)));
        self.segment = segment;
    }

    /// Starts copying the next segment into the next stage, as one group.
    #[inline(always)]
    pub fn copy(&mut self) {
        let k = self.weights.k;
        if (F::BLOCK == 32 || k.is_multiple_of(32)) && (self.segment + 1) * SEGMENT <= k {
            self.copy_whole();
        } else {
            self.copy_partial();
        }
        copy::commit();
        self.codes = self.codes.map(|offset| offset + 128);
        self.scales = self.scales.map(|offset| offset + Self::SCALE_WORDS as usize * 512);
        self.segment += 1;
        self.write = if self.write + 1 == STAGES { 0 } else { self.write + 1 };
    }

    /// Closes an empty group, so that every step of the ring waits for the same number of groups.
    #[inline(always)]
    pub fn skip(&mut self) {
        copy::commit();
    }

    #[inline(always)]
    fn stage(&self, index: u32) -> (Shared<u8>, Shared<u8>) {
        let base = self.base + index * stage_bytes::<F>();
        (Shared::at(base, CODE_BYTES), Shared::at(base + CODE_BYTES, stage_bytes::<F>() - CODE_BYTES))
    }

    #[inline(always)]
    fn copy_whole(&self) {
        let (codes, scales) = self.stage(self.write);
        let lane = lane();
        // r and lane / 8 have the same parity for r a multiple of 4, so the piece is the same for all four rows.
        let to = lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
        copy::async16(codes, to, self.weights.codes, self.codes[0]);
        copy::async16(codes, to + 4 * 128, self.weights.codes, self.codes[1]);
        copy::async16(codes, to + 8 * 128, self.weights.codes, self.codes[2]);
        copy::async16(codes, to + 12 * 128, self.weights.codes, self.codes[3]);
        copy::async4_zfill(scales, lane * 4, self.weights.scales, self.scales[0], 4);
        if Self::SCALE_ROWS < ROWS {
            copy::async4_zfill(scales, lane * 4 + 128, self.weights.scales, self.scales[1], 4);
        }
    }

    /// Rows that are no multiple of 16 bytes, and the end of a row: zeros behind the last k, for codes and scales.
    #[inline(always)]
    fn copy_partial(&self) {
        let (codes, scales) = self.stage(self.write);
        let lane = lane();
        let left = |used: u32, unit: u32| unit.saturating_sub(used);
        let to = lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
        let bytes = left(self.segment * 128 + lane % 8 * 16, self.weights.k / 2);
        let first = self.segment * (SEGMENT / F::BLOCK) + lane % Self::SCALE_WORDS * 4;
        let columns = left(first, self.weights.k / F::BLOCK);
        if F::BLOCK == 32 {
            // Whole pieces of codes, and all scales of a row in words.
            copy::async16_zfill(codes, to, self.weights.codes, self.codes[0], bytes.min(16));
            copy::async16_zfill(codes, to + 4 * 128, self.weights.codes, self.codes[1], bytes.min(16));
            copy::async16_zfill(codes, to + 8 * 128, self.weights.codes, self.codes[2], bytes.min(16));
            copy::async16_zfill(codes, to + 12 * 128, self.weights.codes, self.codes[3], bytes.min(16));
            copy::async4_zfill(scales, lane * 4, self.weights.scales, self.scales[0], columns.min(4));
            return;
        }
        let mut q = 0;
        while q < 4 {
            copy::async8_zfill(codes, to + q * 512, self.weights.codes, self.row_codes(q), bytes.min(8));
            let second = left(8, bytes).min(8);
            copy::async8_zfill(codes, to + q * 512 + 8, self.weights.codes, self.row_codes(q) + 8, second);
            q += 1;
        }
        let mut column = 0;
        while column < 4 {
            let kept = column < columns;
            let up = if kept { self.weights.scales.load(self.scales[0] + column as usize) } else { 0 };
            let down = if kept { self.weights.scales.load(self.scales[1] + column as usize) } else { 0 };
            scales.store(lane * 4 + column, up);
            scales.store(lane * 4 + 128 + column, down);
            column += 1;
        }
    }

    /// `codes[q]` by selection: a run-time index would put the array into local memory.
    #[inline(always)]
    fn row_codes(&self, q: u32) -> usize {
        if q == 0 {
            self.codes[0]
        } else if q == 1 {
            self.codes[1]
        } else if q == 2 {
            self.codes[2]
        } else {
            self.codes[3]
        }
    }

    /// Waits for the oldest stage and reads this lane's fragments of it. The stage is free again once all lanes are behind
    /// the barrier at the end.
    #[inline(always)]
    pub fn take<const PENDING: u32>(&mut self) -> Fragments<F> {
        const { assert!(PENDING + 1 == STAGES) };
        copy::wait::<PENDING>();
        sync::sync_warp();
        let (codes, scales) = self.stage(self.read);
        let scales = Shared::<F::Scales>::at(scales.byte(0), scales.len() / F::LANE_SCALES);
        let (g, t) = (lane() / 4, lane() % 4);
        // Rows g and g+8 have the same parity.
        let piece = |row: u32, half: u32| codes.load_v4(row * 128 + ((half * 4 + t) ^ (row % 2 * 4)) * 16);
        let scale = |row: u32, half: u32| scales.load(row * 8 + half * 4 + t);
        let fragments = Fragments {
            codes: [[piece(g, 0), piece(g + 8, 0)], [piece(g, 1), piece(g + 8, 1)]],
            scales: [[scale(g, 0), scale(g + 8, 0)], [scale(g, 1), scale(g + 8, 1)]],
        };
        sync::sync_warp();
        self.read = if self.read + 1 == STAGES { 0 } else { self.read + 1 };
        fragments
    }
}

/// What one lane needs of a stage, by 128-k chunk and by row g or g+8.
#[derive(Clone, Copy)]
pub struct Fragments<F: Format> {
    /// 32 codes: k 32t to 32t+31 of the chunk.
    pub codes: [[[u32; 4]; 2]; 2],
    /// The block scales of these 32 k.
    pub scales: [[F::Scales; 2]; 2],
}

/// The copying side of a persistent warp. It runs `STAGES` steps ahead of the computing side, from one unit of work into the next.
pub struct Feed<F, const STAGES: u32> {
    ring: Ring<F, STAGES>,
    schedule: Schedule,
    entries: In<u32>,
    begin: u32,
    end: u32,
    unit: Unit,
    segment: u32,
    /// Expert of `unit` before its first segment is copied, of the unit after it from then on: loaded long before it is needed.
    expert: u32,
}

impl<F: Format, const STAGES: u32> Feed<F, STAGES> {
    /// Starts the first `STAGES` copies of a warp that takes segments `begin` to `end` of each of its units, from `first` on. The
    /// experts are in `entries`, and `row(unit, r)` is row r of a unit's tile.
    #[inline(always)]
    pub fn start(
        ring: Ring<F, STAGES>,
        schedule: Schedule,
        first: Unit,
        entries: In<u32>,
        segments: (u32, u32),
        row: impl Fn(Unit, u32) -> u32,
    ) -> Self {
        let (begin, end) = segments;
        let mut feed = Feed { ring, schedule, entries, begin, end, unit: first, segment: begin, expert: 0 };
        if begin < end && schedule.has(first) {
            feed.expert = feed.expert_of(first);
        }
        let mut stage = 0;
        while stage < STAGES {
            feed.copy(&row);
            stage += 1;
        }
        feed
    }

    /// The oldest stage; another copy starts in its place. `PENDING` is `STAGES` - 1.
    #[inline(always)]
    pub fn take<const PENDING: u32>(&mut self, row: impl Fn(Unit, u32) -> u32) -> Fragments<F> {
        let fragments = self.ring.take::<PENDING>();
        self.copy(&row);
        fragments
    }

    #[inline(always)]
    fn expert_of(&self, unit: Unit) -> u32 {
        self.entries.load((unit.entry * RECORD_WORDS) as usize)
    }

    #[inline(always)]
    fn copy(&mut self, row: &impl Fn(Unit, u32) -> u32) {
        if self.begin < self.end && self.schedule.has(self.unit) {
            if self.segment == self.begin {
                let unit = self.unit;
                self.ring.seek(self.expert, self.begin, |r| row(unit, r));
                let after = self.schedule.next(unit);
                if self.schedule.has(after) {
                    self.expert = self.expert_of(after);
                }
            }
            self.ring.copy();
            self.segment += 1;
            if self.segment == self.end {
                self.unit = self.schedule.next(self.unit);
                self.segment = self.begin;
            }
        } else {
            self.ring.skip();
        }
    }
}
