//! The copying side of a grouped GEMM: work items, and the ring of stages that both operands pass through.
//!
//! All threads of a block share the ring. The copies run ahead of the products by all but one pair of its stages, across the
//! end of an item, so that the memory never waits for an epilogue.

use super::operand::{Left, Operand, Right, STAGE_K, element, piece_at, pieces};
use super::shape::Shape;
use crate::worklist::ITEM_WORDS;
use cuda_std::copy;
use cuda_std::memory::In;
use cuda_std::shared::Shared;
use cuda_std::thread::thread_idx;

/// Columns and k that share one block scale.
pub const BLOCK: u32 = 128;

/// One tile of the output.
#[derive(Clone, Copy)]
pub struct Item {
    /// Expert.
    pub expert: u32,
    /// First sorted row.
    pub first: u32,
    /// Rows, at most the tile's.
    pub rows: u32,
    /// Column tile.
    pub column: u32,
}

impl Item {
    /// Item `index` of a work-list.
    #[inline(always)]
    pub fn load(worklist: In<u32>, index: u32) -> Self {
        let [expert, first, rows, column] = worklist.load_v4(index as usize * ITEM_WORDS as usize);
        Item { expert, first, rows, column }
    }
}

/// Which items a block works on.
pub trait Source: Copy {
    /// The `step`-th item of this block.
    fn item(self, step: u32) -> Option<Item>;
}

/// What is multiplied.
#[derive(Clone, Copy)]
pub struct Problem<L: Left, R: Right> {
    /// [rows, k] activations.
    pub a: In<L::Element>,
    /// [rows, ceil(k/128)] scales of the activations; null for none.
    pub a_scale: In<f32>,
    /// Row of `a` for each sorted row; null for the same.
    pub sorted_token_ids: In<i32>,
    /// `[E]` addresses of [n, k] weights.
    pub weights: In<u64>,
    /// `[E]` addresses of [ceil(n/128), ceil(k/128)] scales; null for none.
    pub scales: In<u64>,
    /// Weights and scales of a second product with the same rows; null for none.
    pub second: [In<u64>; 2],
    /// Columns of the output.
    pub n: u32,
    /// Columns of `a` and of the weights.
    pub k: u32,
    /// Rows of `a`: an id that is none of them counts as a row of zeros.
    pub a_rows: u32,
    right: core::marker::PhantomData<R>,
}

impl<L: Left, R: Right> Problem<L, R> {
    /// See the fields.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub fn new(
        a: In<L::Element>,
        a_scale: In<f32>,
        sorted_token_ids: In<i32>,
        weights: In<u64>,
        scales: In<u64>,
        n: u32,
        k: u32,
        a_rows: u32,
    ) -> Self {
        let second = [In::at(0, 0); 2];
        Problem {
            a,
            a_scale,
            sorted_token_ids,
            weights,
            scales,
            second,
            n,
            k,
            a_rows,
            right: core::marker::PhantomData,
        }
    }

    /// Pairs of stages of an item: one for each block of 128 k.
    #[inline(always)]
    pub fn pairs(&self) -> u32 {
        self.k.div_ceil(2 * STAGE_K)
    }

    /// Block scales along k.
    #[inline(always)]
    pub fn blocks(&self) -> u32 {
        self.k.div_ceil(BLOCK)
    }

    /// The same with a second product, for a tile with [`Shape::PAIRED`].
    #[inline(always)]
    pub fn with_second(self, weights: In<u64>, scales: In<u64>) -> Self {
        Problem { second: [weights, scales], ..self }
    }

    /// Whether the expert's weights are on the device.
    #[inline(always)]
    pub fn is_resident(&self, expert: u32) -> bool {
        let [second, _] = self.second;
        self.weights.load(expert as usize) != 0 && (second.is_null() || second.load(expert as usize) != 0)
    }

    /// Row of `a` behind a sorted row, if there is one.
    #[inline(always)]
    pub fn source_row(&self, sorted: u32) -> Option<u32> {
        let ids = self.sorted_token_ids;
        let row = if ids.is_null() { sorted } else { ids.load(sorted as usize) as u32 };
        if row < self.a_rows { Some(row) } else { None }
    }

    /// The weights of an expert, by the table.
    #[inline(always)]
    fn matrix(&self, table: In<u64>, expert: u32) -> In<R::Element> {
        In::at(table.load(expert as usize), self.n as usize * self.k as usize)
    }

    /// Their block scales, by the table.
    #[inline(always)]
    fn block_scales(&self, table: In<u64>, expert: u32) -> In<f32> {
        In::at(table.load(expert as usize), self.n.div_ceil(BLOCK) as usize * self.blocks() as usize)
    }
}

/// The stages of a tile `T` in shared memory: left operand, right operand, row scales, scales of the weights.
pub struct Ring<L, R, T>(core::marker::PhantomData<(L, R, T)>);

impl<L: Left, R: Right, T: Shape> Ring<L, R, T> {
    /// Bytes of the left operand of a stage; the right one follows.
    pub const LEFT_BYTES: u32 = T::ROWS * L::ROW_BYTES;
    /// Where a stage's row scales lie, then the block scales of the weights.
    pub const SCALES_AT: u32 = Self::LEFT_BYTES + T::RIGHT_ROWS * R::ROW_BYTES;
    /// Bytes of a stage.
    pub const STAGE_BYTES: u32 = Self::SCALES_AT + T::ROWS * 4 + 16;
    /// Bytes of shared memory.
    pub const BYTES: u32 = T::STAGES * Self::STAGE_BYTES;
}

/// Most pieces of one operand that a thread copies for a stage.
const MOST: usize = 8;

/// Rows of one operand whose pieces a thread copies: piece `thread mod pieces` of every so-manieth row.
#[derive(Clone, Copy)]
struct Share<O>(core::marker::PhantomData<O>);

impl<O: Operand> Share<O> {
    /// First row.
    #[inline(always)]
    fn row() -> u32 {
        thread_idx() / pieces::<O>()
    }

    /// First element of the piece.
    #[inline(always)]
    fn element() -> u32 {
        thread_idx() % pieces::<O>() * Self::ELEMENTS
    }

    /// Elements of a piece.
    const ELEMENTS: u32 = 16 / size_of::<O::Element>() as u32;

    /// Elements of the piece that exist, `left` being those of the row from the stage's first k on.
    #[inline(always)]
    fn there(left: u32) -> u32 {
        left.saturating_sub(Self::element()).min(Self::ELEMENTS)
    }

    /// Starts copying the first `there` elements of a piece, from element `index` on, to row `row` of the stage's operand at byte
    /// `base`.
    #[inline(always)]
    fn copy<const ALIGNED: bool>(from: In<O::Element>, index: usize, there: u32, base: u32, row: u32) {
        let to = piece_at::<O>(base, row, thread_idx() % pieces::<O>());
        if ALIGNED {
            let bytes = there * size_of::<O::Element>() as u32;
            copy::async16_zfill(Shared::<O::Element>::at(to, Self::ELEMENTS), 0, from, index, bytes);
            return;
        }
        // Rows that start anywhere: element by element.
        let word = |w: u32| {
            let each = Self::ELEMENTS / 4;
            let mut word = 0;
            let mut i = 0;
            while i < each {
                let at = w * each + i;
                if at < there {
                    word |= element::<O>(from, index + at as usize) << (32 / each * i);
                }
                i += 1;
            }
            word
        };
        Shared::<u32>::at(to, 4).store_v4(0, [word(0), word(1), word(2), word(3)]);
    }
}

/// The copying side.
///
/// Rows and columns that do not exist are zeros.
pub struct Copier<L: Left, R: Right, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool> {
    problem: Problem<L, R>,
    source: S,
    /// Next item of the block, stages of the current one that are copied and their number, elements of its rows that are left, place
    /// in the ring.
    step: u32,
    stage: u32,
    stages: u32,
    left: u32,
    slot: u32,
    /// This thread's pieces of the left operand, from their first k on.
    rows: [In<L::Element>; MOST],
    /// Weights that even and odd pieces belong to, and the element of the first piece.
    matrix: [In<R::Element>; 2],
    right_at: usize,
    /// Bit i: the i-th row exists, and in the upper half the i-th column.
    exist: u32,
    /// Scales of a row, and of the weights of the product that this thread copies them for.
    row_scales: In<f32>,
    scales: In<f32>,
    tile: core::marker::PhantomData<T>,
}

impl<L: Left, R: Right, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool> Copier<L, R, T, S, FOLD, ALIGNED> {
    /// Rows between two of a thread's pieces.
    const LEFT_EACH: u32 = T::THREADS / pieces::<L>();
    const RIGHT_EACH: u32 = T::THREADS / pieces::<R>();

    /// Product of the `i`-th piece of the right operand, and its column from that of the first piece on.
    #[inline(always)]
    fn right_piece(i: u32) -> (u32, u32) {
        // The remainder tells the compiler what the number of threads says already.
        let first = Share::<R>::row() % Self::RIGHT_EACH;
        let (product, column) = T::column(first + i * Self::RIGHT_EACH);
        (product, column - T::column(first).1)
    }

    /// Starts at the block's first item and fills all but one pair of stages.
    #[inline(always)]
    pub fn start(problem: Problem<L, R>, source: S) -> Self {
        const {
            assert!(T::ROWS <= MOST as u32 * Self::LEFT_EACH && T::RIGHT_ROWS <= MOST as u32 * Self::RIGHT_EACH);
            assert!(T::ROWS <= T::THREADS && T::STAGES.is_multiple_of(2));
        }
        let mut copier = Copier {
            problem,
            source,
            step: 0,
            stage: 0,
            stages: 0,
            left: 0,
            slot: 0,
            rows: [In::at(0, 0); MOST],
            matrix: [In::at(0, 0); 2],
            right_at: 0,
            exist: 0,
            row_scales: In::at(0, 0),
            scales: In::at(0, 0),
            tile: core::marker::PhantomData,
        };
        copier.advance();
        let mut i = 0;
        while i < T::STAGES - 2 {
            copier.copy();
            copier.copy();
            copy::commit();
            i += 2;
        }
        copier
    }

    /// Goes to the next item.
    #[inline(always)]
    fn advance(&mut self) {
        self.stage = 0;
        let Some(item) = self.source.item(self.step) else {
            self.stages = 0;
            return;
        };
        self.step += 1;
        let Problem { a, a_scale, weights, scales, second, n, k, .. } = self.problem;
        self.stages = 2 * self.problem.pairs();
        let resident = self.problem.is_resident(item.expert);
        // Nothing is read where there are no weights, or no activations.
        self.left = if resident && self.problem.a_rows > 0 { k } else { 0 };
        if self.left == 0 {
            return;
        }
        self.exist = 0;
        let problem = self.problem;
        let source_row = |row: u32| if row < item.rows { problem.source_row(item.first + row) } else { None };
        macro_rules! row {
            ($i:literal) => {
                if $i * Self::LEFT_EACH < T::ROWS {
                    let row = source_row(Share::<L>::row() + $i * Self::LEFT_EACH);
                    self.exist |= (row.is_some() as u32) << $i;
                    self.rows[$i] = a.skip(row.unwrap_or(0) as usize * k as usize);
                }
            };
        }
        row!(0);
        row!(1);
        row!(2);
        row!(3);
        row!(4);
        row!(5);
        row!(6);
        row!(7);
        let blocks = self.problem.blocks() as usize;
        if FOLD == 64 {
            self.row_scales = a_scale.skip(source_row(thread_idx()).unwrap_or(0) as usize * blocks);
        }

        self.matrix[0] = self.problem.matrix(weights, item.expert);
        if T::PAIRED {
            let other = self.problem.matrix(second[0], item.expert);
            let matrix = self.matrix[0];
            self.matrix[0] = if Self::right_piece(0).0 == 0 { matrix } else { other };
            self.matrix[1] = if Self::right_piece(1).0 == 0 { matrix } else { other };
        }
        let first = item.column * T::COLUMNS + T::column(Share::<R>::row()).1;
        self.right_at = first as usize * k as usize + Share::<R>::element() as usize;
        macro_rules! column {
            ($i:literal) => {
                if $i * Self::RIGHT_EACH < T::RIGHT_ROWS {
                    self.exist |= ((first + Self::right_piece($i).1 < n) as u32) << ($i + 16);
                }
            };
        }
        column!(0);
        column!(1);
        column!(2);
        column!(3);
        column!(4);
        column!(5);
        column!(6);
        column!(7);
        if FOLD != 0 {
            let table = if T::PAIRED && thread_idx() == 1 { second[1] } else { scales };
            let row = (item.column * T::COLUMNS / BLOCK) as usize;
            self.scales = self.problem.block_scales(table, item.expert).skip(row * blocks);
        }
    }

    /// Starts copying the next stage into the next place of the ring. Nothing behind the last item. The second stage of a pair may
    /// lie behind the last k: it is zeros, and so are its scales, whatever those of its block are.
    #[inline(always)]
    pub fn copy(&mut self) {
        if self.stage < self.stages {
            let base = self.slot * Ring::<L, R, T>::STAGE_BYTES;
            let k0 = self.stage * STAGE_K;
            let exists = self.left > 0;
            let there = Share::<L>::there(self.left);
            let index = (k0 + Share::<L>::element()) as usize;
            macro_rules! left {
                ($i:literal) => {
                    if $i * Self::LEFT_EACH < T::ROWS {
                        let row = Share::<L>::row() + $i * Self::LEFT_EACH;
                        // A small tile has fewer pieces than the block has threads.
                        if ($i + 1) * Self::LEFT_EACH <= T::ROWS || row < T::ROWS {
                            let there = if self.exist >> $i & 1 != 0 { there } else { 0 };
                            Share::<L>::copy::<ALIGNED>(self.rows[$i], index, there, base, row);
                        }
                    }
                };
            }
            left!(0);
            left!(1);
            left!(2);
            left!(3);
            left!(4);
            left!(5);
            left!(6);
            left!(7);

            let there = Share::<R>::there(self.left);
            let index = self.right_at + k0 as usize;
            let right = base + Ring::<L, R, T>::LEFT_BYTES;
            macro_rules! right {
                ($i:literal) => {
                    if $i * Self::RIGHT_EACH < T::RIGHT_ROWS {
                        let row = Share::<R>::row() + $i * Self::RIGHT_EACH;
                        let there = if self.exist >> ($i + 16) & 1 != 0 { there } else { 0 };
                        let matrix = if T::PAIRED && $i % 2 == 1 { self.matrix[1] } else { self.matrix[0] };
                        let index = index + Self::right_piece($i).1 as usize * self.problem.k as usize;
                        Share::<R>::copy::<ALIGNED>(matrix, index, there, right, row);
                    }
                };
            }
            right!(0);
            right!(1);
            right!(2);
            right!(3);
            right!(4);
            right!(5);
            right!(6);
            right!(7);

            let scales = Shared::<f32>::at(base + Ring::<L, R, T>::SCALES_AT, T::ROWS + 4);
            let (block, bytes) = ((k0 / BLOCK) as usize, if exists { 4 } else { 0 });
            if FOLD == 64 && thread_idx() < T::ROWS {
                copy::async4_zfill(scales, thread_idx(), self.row_scales, block, bytes);
            }
            if FOLD != 0 && thread_idx() < if T::PAIRED { 2 } else { 1 } {
                copy::async4_zfill(scales, T::ROWS + thread_idx(), self.scales, block, bytes);
            }

            self.slot = if self.slot + 1 == T::STAGES { 0 } else { self.slot + 1 };
            self.stage += 1;
            self.left = self.left.saturating_sub(STAGE_K);
            if self.stage == self.stages {
                self.advance();
            }
        }
    }
}
