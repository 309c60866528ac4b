//! Weight tiles through shared memory: each warp has a ring of two stages of its own, so no block barrier stands between a copy
//! and its use. A stage is refilled as soon as its last chunk is in registers.
//!
//! A stage holds 16 or 32 rows by 256 k: for each 16 rows 128 bytes of codes a row, then a scale per block ([`Format`]) a row. The
//! 16-byte piece p of row r lies at piece p xor 4·(r mod 2), so that eight lanes that read two rows hit all 32 banks once.

use crate::dequant::Format;
use crate::layout::permute;
use crate::layout::scale::{padded_cols, swizzled_len, swizzled_offset};
use crate::order::Order;
use crate::schedule::{Unit, Work};
use core::marker::PhantomData;
use cuda_std::memory::In;
use cuda_std::shared::Shared;
use cuda_std::thread::{WARP, lane};
use cuda_std::{copy, sync};

/// k of a stage.
pub const SEGMENT: u32 = permute::SEGMENT as u32;
/// Rows of a tile that share an mma.
pub const ROWS: u32 = 16;
/// Bytes of the codes of 16 rows.
const CODE_BYTES: u32 = ROWS * SEGMENT / 2;
/// Stages of a ring.
const STAGES: u32 = 2;

/// Bytes of 16 rows of a stage: codes, then scales.
const fn tile_bytes<F: Format>() -> u32 {
    CODE_BYTES + ROWS * SEGMENT / F::BLOCK
}

/// Bytes of shared memory of a warp's ring whose stages hold `tiles` times 16 rows.
pub const fn ring_bytes<F: Format>(tiles: u32) -> u32 {
    STAGES * tiles * tile_bytes::<F>()
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

/// What one lane needs of a 128-k chunk of a stage, by 16 rows and by row g or g+8.
#[derive(Clone, Copy)]
pub struct Fragments<F: Format, const TILES: usize> {
    /// 32 codes: k 32t to 32t+31 of the chunk.
    pub codes: [[[u32; 4]; 2]; TILES],
    /// The block scales of these 32 k.
    pub scales: [[F::Scales; 2]; TILES],
}

/// A persistent warp's ring and its copying side, which runs two stages ahead of the computing side, from one unit of work into the
/// next.
pub struct Feed<F, O, W, const TILES: usize> {
    weights: Weights,
    work: W,
    /// First segment of a unit, distance to the next, and how many.
    segments: (u32, u32, u32),
    /// Segments that lie whole in every row.
    whole: u32,
    /// The unit that is copied next, and its expert: loaded a unit ahead.
    unit: Unit,
    expert: u32,
    /// Segments of the present unit that are not yet copied, and the last that was.
    left: u32,
    segment: u32,
    /// This lane's pieces of that segment: codes of four rows, scales of two (or one, where all scales of 16 rows are but one word a
    /// lane).
    codes: [[In<u8>; 4]; TILES],
    scales: [[In<u8>; 2]; TILES],
    /// Byte offset of the stage that is read and refilled next, and the sum of both offsets.
    stage: u32,
    stages: u32,
    kind: PhantomData<(F, O)>,
}

impl<F: Format, O: Order, W: Work, const TILES: usize> Feed<F, O, W, TILES> {
    /// Bytes of a stage.
    const STAGE: u32 = TILES as u32 * tile_bytes::<F>();
    /// Words of four scales of a row of a stage.
    const SCALE_WORDS: u32 = SEGMENT / F::BLOCK / 4;
    /// Rows whose scales a warp copies with one instruction.
    const SCALE_ROWS: u32 = WARP / Self::SCALE_WORDS;

    /// Starts the first two copies into the ring at byte `base` of shared memory, for a warp that takes `segments` of each of its units,
    /// from `first` on.
    #[inline(always)]
    pub fn start(base: u32, weights: Weights, work: W, first: Unit, segments: (u32, u32, u32)) -> Self {
        let Weights { codes, scales, k, .. } = weights;
        let mut feed = Feed {
            weights,
            work,
            segments,
            whole: if F::BLOCK == 32 || k.is_multiple_of(32) { k / SEGMENT } else { 0 },
            unit: first,
            expert: 0,
            left: 0,
            segment: 0,
            codes: [[codes; 4]; TILES],
            scales: [[scales; 2]; TILES],
            stage: base,
            stages: 2 * base + Self::STAGE,
            kind: PhantomData,
        };
        if work.has(first) {
            feed.expert = work.expert(first);
        }
        feed.copy();
        feed.copy();
        feed
    }

    /// Waits for the present stage, the oldest that was copied.
    #[inline(always)]
    pub fn wait(&self) {
        copy::wait::<{ STAGES - 1 }>();
        sync::sync_warp();
    }

    /// This lane's fragments of a 128-k chunk of the present stage.
    #[inline(always)]
    pub fn read<const CHUNK: u32>(&self) -> Fragments<F, TILES> {
        let (g, t) = (lane() / 4, lane() % 4);
        let mut fragments = Fragments { codes: [[[0; 4]; 2]; TILES], scales: [[F::NO_SCALES; 2]; TILES] };
        let mut tile = 0;
        while tile < TILES {
            let (codes, scales) = self.memory(tile as u32);
            let scales = Shared::<F::Scales>::at(scales.byte(0), scales.len() / F::LANE_SCALES);
            // Rows g and g+8 have the same parity.
            let piece = |row: u32| codes.load_v4(row * 128 + ((CHUNK * 4 + t) ^ (g % 2 * 4)) * 16);
            let scale = |row: u32| scales.load(row * 8 + CHUNK * 4 + t);
            fragments.codes[tile] = [piece(g), piece(g + 8)];
            fragments.scales[tile] = [scale(g), scale(g + 8)];
            tile += 1;
        }
        fragments
    }

    /// Starts another copy in place of the present stage, which has been read, and turns to the other.
    #[inline(always)]
    pub fn refill(&mut self) {
        sync::sync_warp();
        self.copy();
    }

    /// Codes and scales of 16 rows of the present stage.
    #[inline(always)]
    fn memory(&self, tile: u32) -> (Shared<u8>, Shared<u8>) {
        let base = self.stage + tile * tile_bytes::<F>();
        (Shared::at(base, CODE_BYTES), Shared::at(base + CODE_BYTES, tile_bytes::<F>() - CODE_BYTES))
    }

    /// Starts the next copy into the present stage, as one group (an empty one where nothing is left), and turns to the other.
    #[inline(always)]
    fn copy(&mut self) {
        let (begin, step, count) = self.segments;
        if self.left > 0 || (count > 0 && self.work.has(self.unit)) {
            if self.left == 0 {
                self.seek();
                self.left = count;
                self.segment = begin;
                self.unit = self.work.next(self.unit);
                if self.work.has(self.unit) {
                    self.expert = self.work.expert(self.unit);
                }
            } else {
                self.segment += step;
                let mut tile = 0;
                while tile < TILES {
                    self.codes[tile] = self.codes[tile].map(|row| row.skip(step as usize * 128));
                    self.scales[tile] =
                        self.scales[tile].map(|row| row.skip((step * Self::SCALE_WORDS) as usize * 512));
                    tile += 1;
                }
            }
            self.left -= 1;
            let mut tile = 0;
            if self.segment < self.whole {
                while tile < TILES {
                    self.copy_whole(tile);
                    tile += 1;
                }
            } else {
                while tile < TILES {
                    self.copy_partial(tile);
                    tile += 1;
                }
            }
        }
        copy::commit();
        self.stage = self.stages - self.stage;
    }

    /// Finds this lane's pieces of the first segment of the next unit.
    #[inline(always)]
    fn seek(&mut self) {
        let Weights { codes, scales, rows: height, k } = self.weights;
        let (segment, _, _) = self.segments;
        let (lane, expert) = (lane(), self.expert as usize);
        // 32 bits as long as nothing is multiplied by them: half the instructions.
        let (row_bytes, columns) = (k / 2, k / F::BLOCK);
        let scale_words = padded_cols(columns as usize) as u32 / 4;
        let codes = codes.skip(expert * height as usize * row_bytes as usize);
        let scales = scales.skip(expert * swizzled_len(height as usize, columns as usize));

        let of_codes = self.work.rows(self.unit, lane / 8);
        let piece = (segment * 128 + lane % 8 * 16) as usize;
        let scale_row = lane / Self::SCALE_WORDS;
        let of_scales = self.work.rows(self.unit, scale_row % 4);
        let word = segment * Self::SCALE_WORDS + lane % Self::SCALE_WORDS;
        let scales_of = |row: u32| {
            const { assert!(swizzled_offset(1 + 32 + 128, 4, 8) == (2 + 1) * 512 + 16 + 4) };
            let block = row / 128 * scale_words + word;
            scales.skip(block as usize * 512 + (row % 32 * 16 + row / 32 % 4 * 4) as usize)
        };
        let mut tile = 0;
        while tile < TILES {
            let n = tile as u32;
            let codes_of = |half, i| codes.skip(of_codes.at(half, n, i) as usize * row_bytes as usize + piece);
            self.codes[tile] = [codes_of(0, 0), codes_of(0, 1), codes_of(1, 0), codes_of(1, 1)];
            let (upper, lower) = (of_scales.at(0, n, scale_row % 8 / 4), of_scales.at(1, n, scale_row % 8 / 4));
            self.scales[tile] = if Self::SCALE_ROWS < ROWS {
                [scales_of(upper), scales_of(lower)]
            } else {
                [scales_of(if scale_row < 8 { upper } else { lower }); 2]
            };
            tile += 1;
        }
    }

    #[inline(always)]
    fn copy_whole(&self, tile: usize) {
        let (codes, scales) = self.memory(tile as u32);
        let lane = lane();
        // Rows r and r + 4 have the same parity, so the piece is the same for all four rows.
        let to = lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
        copy::async16(codes, to, self.codes[tile][0], 0);
        copy::async16(codes, to + 4 * 128, self.codes[tile][1], 0);
        copy::async16(codes, to + 8 * 128, self.codes[tile][2], 0);
        copy::async16(codes, to + 12 * 128, self.codes[tile][3], 0);
        copy::async4_zfill(scales, lane * 4, self.scales[tile][0], 0, 4);
        if Self::SCALE_ROWS < ROWS {
            copy::async4_zfill(scales, lane * 4 + 128, self.scales[tile][1], 0, 4);
        }
    }

    /// Rows that are no multiple of 16 bytes, and the end of a row: zeros behind the last k, for codes and scales.
    #[inline(always)]
    fn copy_partial(&self, tile: usize) {
        let (codes, scales) = self.memory(tile as u32);
        let lane = lane();
        let left = |used: u32, unit: u32| unit.saturating_sub(used);
        let to = lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
        let bytes = left(self.segment * 128 + lane % 8 * 16, self.weights.k / 2);
        let first = self.segment * (SEGMENT / F::BLOCK) + lane % Self::SCALE_WORDS * 4;
        let columns = left(first, self.weights.k / F::BLOCK);
        let [a, b, c, d] = self.codes[tile];
        if F::BLOCK == 32 {
            // Whole pieces of codes, and all scales of a row in words.
            copy::async16_zfill(codes, to, a, 0, bytes.min(16));
            copy::async16_zfill(codes, to + 4 * 128, b, 0, bytes.min(16));
            copy::async16_zfill(codes, to + 8 * 128, c, 0, bytes.min(16));
            copy::async16_zfill(codes, to + 12 * 128, d, 0, bytes.min(16));
            copy::async4_zfill(scales, lane * 4, self.scales[tile][0], 0, columns.min(4));
            return;
        }
        let second = left(8, bytes).min(8);
        macro_rules! halves {
            ($q:literal, $row:expr) => {
                copy::async8_zfill(codes, to + $q * 512, $row, 0, bytes.min(8));
                copy::async8_zfill(codes, to + $q * 512 + 8, $row, 8, second);
            };
        }
        halves!(0, a);
        halves!(1, b);
        halves!(2, c);
        halves!(3, d);
        let mut column = 0;
        while column < 4 {
            let kept = column < columns;
            let up = if kept { self.scales[tile][0].stream(column as usize) } else { 0 };
            let down = if kept { self.scales[tile][1].stream(column as usize) } else { 0 };
            scales.store(lane * 4 + column, up);
            scales.store(lane * 4 + 128 + column, down);
            column += 1;
        }
    }
}
