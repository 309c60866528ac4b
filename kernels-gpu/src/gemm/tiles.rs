//! The copying side of a grouped GEMM: work items, and the ring of stages that both operands pass through.
//!
//! All threads of a block share the ring. The copies run ahead of the products by all but one stage of the ring, across the end of an
//! item, so that the memory never waits for an epilogue.

use super::operand::{Operand, STAGE_K, element, piece_at, pieces};
use super::shape::Shape;
use cuda_std::copy;
use cuda_std::memory::In;
use cuda_std::shared::Shared;
use cuda_std::thread::thread_idx;

/// Words of a work item: expert, first sorted row, rows, column tile.
pub const ITEM_WORDS: u32 = 4;
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
pub struct Problem<L: Operand, R: Operand> {
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
    /// Elements from one row of `a` to the next, all of which count: at least k.
    pub a_stride: u32,
    /// Rows of `a`: an id that is none of them counts as a row of zeros.
    pub a_rows: u32,
    right: core::marker::PhantomData<R>,
}

impl<L: Operand, R: Operand> Problem<L, R> {
    /// See the fields.
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
            a_stride: k,
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

    /// The same with rows of `a` that lie further apart.
    #[inline(always)]
    pub fn with_stride(self, a_stride: u32) -> Self {
        Problem { a_stride, ..self }
    }

    /// Whether the expert's weights are on the device.
    #[inline(always)]
    pub fn is_resident(&self, expert: u32) -> bool {
        let [second, _] = self.second;
        self.weights.load(expert as usize) != 0 && (second.is_null() || second.load(expert as usize) != 0)
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

impl<L: Operand, R: Operand, T: Shape> Ring<L, R, T> {
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

    /// Starts copying the first `there` elements of a piece of row `row` of the stage's operand at byte `base`.
    #[inline(always)]
    fn copy<const ALIGNED: bool>(from: In<O::Element>, index: usize, there: u32, base: u32, row: u32) {
        let to = piece_at::<O>(base, row, thread_idx() % pieces::<O>());
        if ALIGNED || O::PADDED {
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
pub struct Copier<L: Operand, R: Operand, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool> {
    problem: Problem<L, R>,
    source: S,
    /// Next item of the block, stages of the current one that are copied and
    /// their number, elements of its rows that are left, place in the ring.
    step: u32,
    stage: u32,
    stages: u32,
    left: u32,
    slot: u32,
    /// This thread's pieces of the left operand: elements of the next stage, and all bits set where the row exists.
    left_at: [usize; MOST],
    left_there: [u32; MOST],
    /// Its row's scales.
    scale_at: usize,
    scale_bytes: u32,
    /// Its pieces of the right operand: the matrix of each product, element of the first piece, and all bits set where the column exists.
    matrix: [In<R::Element>; 2],
    right_at: usize,
    right_there: [u32; MOST],
    /// Scales of the weights, of the product that this thread copies them for.
    scales: In<f32>,
    block_at: usize,
    block_bytes: u32,
    /// The item after the current one, and its rows of `a`, negative for none: loaded one item early, so that nothing waits.
    next_item: Option<Item>,
    next_rows: [i32; MOST],
    next_scale_row: i32,
    tile: core::marker::PhantomData<T>,
}

impl<L: Operand, R: Operand, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool>
    Copier<L, R, T, S, FOLD, ALIGNED>
{
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
            assert!(T::ROWS <= T::THREADS && (2 * Self::RIGHT_EACH).is_multiple_of(T::PRODUCTS_REPEAT));
        }
        let mut copier = Copier {
            problem,
            source,
            step: 0,
            stage: 0,
            stages: 0,
            left: 0,
            slot: 0,
            left_at: [0; MOST],
            left_there: [0; MOST],
            scale_at: 0,
            scale_bytes: 0,
            matrix: [In::at(0, 0); 2],
            right_at: 0,
            right_there: [0; MOST],
            scales: In::at(0, 0),
            block_at: 0,
            block_bytes: 0,
            next_item: None,
            next_rows: [-1; MOST],
            next_scale_row: -1,
            tile: core::marker::PhantomData,
        };
        copier.look_ahead();
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

    /// Row of `a` behind row `row` of the tile, negative for none.
    #[inline(always)]
    fn source_row(&self, item: Item, row: u32) -> i32 {
        if row >= item.rows {
            return -1;
        }
        let sorted = item.first + row;
        let ids = self.problem.sorted_token_ids;
        let id = if ids.is_null() { sorted as i32 } else { ids.load(sorted as usize) };
        if (id as u32) < self.problem.a_rows { id } else { -1 }
    }

    /// Loads what the item after the current one needs.
    #[inline(always)]
    fn look_ahead(&mut self) {
        self.next_item = self.source.item(self.step);
        self.step += 1;
        if let Some(item) = self.next_item {
            macro_rules! row {
                ($i:literal) => {
                    if $i * Self::LEFT_EACH < T::ROWS {
                        self.next_rows[$i] = self.source_row(item, Share::<L>::row() + $i * Self::LEFT_EACH);
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
            if FOLD == 64 {
                self.next_scale_row = self.source_row(item, thread_idx());
            }
        }
    }

    /// Goes to the next item.
    #[inline(always)]
    fn advance(&mut self) {
        let Some(item) = self.next_item else {
            self.stages = 0;
            return;
        };
        let Problem { weights, scales, second, n, k, a_stride, .. } = self.problem;
        self.left = k;
        self.stage = 0;
        self.stages = 2 * self.problem.pairs();
        macro_rules! row {
            ($i:literal) => {
                let row = self.next_rows[$i];
                self.left_there[$i] = if row >= 0 { u32::MAX } else { 0 };
                self.left_at[$i] = row.max(0) as usize * a_stride as usize + Share::<L>::element() as usize;
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
        self.scale_at = self.next_scale_row.max(0) as usize * blocks;
        self.scale_bytes = if self.next_scale_row >= 0 { 4 } else { 0 };

        let resident = self.problem.is_resident(item.expert);
        let column = item.column * T::COLUMNS + T::column(Share::<R>::row()).1;
        self.matrix[0] = self.problem.matrix(weights, item.expert);
        if T::PAIRED {
            self.matrix[1] = self.problem.matrix(second[0], item.expert);
        }
        self.right_at = column as usize * k as usize + Share::<R>::element() as usize;
        macro_rules! column {
            ($i:literal) => {
                let exists = resident && column + Self::right_piece($i).1 < n;
                self.right_there[$i] = if exists { u32::MAX } else { 0 };
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
            self.scales = self.problem.block_scales(table, item.expert);
            self.block_at = (item.column * T::COLUMNS / BLOCK) as usize * blocks;
            self.block_bytes = if resident { 4 } else { 0 };
        }
        self.look_ahead();
    }

    /// Starts copying the next stage into the next place of the ring. Nothing behind the last item. The second stage of a pair may
    /// lie behind the last k: it is zeros, and so are its scales, whatever those of its block are.
    #[inline(always)]
    pub fn copy(&mut self) {
        if self.stage < self.stages {
            let base = self.slot * Ring::<L, R, T>::STAGE_BYTES;
            let exists = self.left > 0;
            let padding = if exists { self.problem.a_stride - self.problem.k } else { 0 };
            let there = Share::<L>::there(self.left + padding);
            macro_rules! left {
                ($i:literal) => {
                    if $i * Self::LEFT_EACH < T::ROWS {
                        let row = Share::<L>::row() + $i * Self::LEFT_EACH;
                        let there = there & self.left_there[$i];
                        Share::<L>::copy::<ALIGNED>(self.problem.a, self.left_at[$i], there, base, row);
                        self.left_at[$i] += STAGE_K as usize;
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
            let right = base + Ring::<L, R, T>::LEFT_BYTES;
            macro_rules! right {
                ($i:literal) => {
                    if $i * Self::RIGHT_EACH < T::RIGHT_ROWS {
                        let row = Share::<R>::row() + $i * Self::RIGHT_EACH;
                        let (product, column) = Self::right_piece($i);
                        let matrix = if T::PAIRED && product == 1 { self.matrix[1] } else { self.matrix[0] };
                        let at = self.right_at + column as usize * self.problem.k as usize;
                        Share::<R>::copy::<ALIGNED>(matrix, at, there & self.right_there[$i], right, row);
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
            self.right_at += STAGE_K as usize;

            let scales = Shared::<f32>::at(base + Ring::<L, R, T>::SCALES_AT, T::ROWS + 4);
            let block = (self.stage * STAGE_K / BLOCK) as usize;
            if FOLD == 64 && thread_idx() < T::ROWS {
                copy::async4_zfill(
                    scales,
                    thread_idx(),
                    self.problem.a_scale,
                    self.scale_at + block,
                    if exists { self.scale_bytes } else { 0 },
                );
            }
            if FOLD != 0 && thread_idx() < if T::PAIRED { 2 } else { 1 } {
                copy::async4_zfill(
                    scales,
                    T::ROWS + thread_idx(),
                    self.scales,
                    self.block_at + block,
                    self.block_bytes,
                );
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
