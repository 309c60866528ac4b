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
    /// Columns of the output.
    pub n: u32,
    /// Columns of `a` and of the weights.
    pub k: u32,
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
        Problem { a, a_scale, sorted_token_ids, weights, scales, n, k, a_rows, right: core::marker::PhantomData }
    }

    /// Stages of an item.
    #[inline(always)]
    pub fn stages(&self) -> u32 {
        self.k.div_ceil(STAGE_K)
    }

    /// Block scales along k.
    #[inline(always)]
    pub fn blocks(&self) -> u32 {
        self.k.div_ceil(BLOCK)
    }

    /// The weights of an expert; null where it is not resident.
    #[inline(always)]
    fn matrix(&self, expert: u32) -> In<R::Element> {
        In::at(self.weights.load(expert as usize), self.n as usize * self.k as usize)
    }
}

/// The stages of a tile `T` in shared memory: left operand, right operand, row scales, scale of the weights.
pub struct Ring<L, R, T>(core::marker::PhantomData<(L, R, T)>);

impl<L: Operand, R: Operand, T: Shape> Ring<L, R, T> {
    /// Bytes of the left operand of a stage; the right one follows.
    pub const LEFT_BYTES: u32 = T::ROWS * L::ROW_BYTES;
    /// Where a stage's row scales lie, then the block scale of the weights.
    pub const SCALES_AT: u32 = Self::LEFT_BYTES + T::COLUMNS * R::ROW_BYTES;
    /// Bytes of a stage.
    pub const STAGE_BYTES: u32 = Self::SCALES_AT + T::ROWS * 4 + 16;
    /// Bytes of shared memory.
    pub const BYTES: u32 = T::STAGES * Self::STAGE_BYTES;
}

/// Most pieces of one operand that a thread copies for a stage.
const MOST: usize = 4;

/// The rows that a thread copies for an item: row of `a`, or negative for none.
type Rows = [i32; MOST];

/// The copying side.
pub struct Copier<L: Operand, R: Operand, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool> {
    problem: Problem<L, R>,
    source: S,
    /// Item that is copied, its index among the block's, the stage that is next, and the place in the ring.
    item: Option<Item>,
    step: u32,
    stage: u32,
    slot: u32,
    matrix: In<R::Element>,
    scales: In<f32>,
    rows: Rows,
    /// Row whose scale this thread copies.
    scale_row: i32,
    /// The same of the item after, loaded one item early so that nothing waits for it.
    next_item: Option<Item>,
    next_rows: Rows,
    next_scale_row: i32,
    tile: core::marker::PhantomData<T>,
}

impl<L: Operand, R: Operand, T: Shape, S: Source, const FOLD: u32, const ALIGNED: bool>
    Copier<L, R, T, S, FOLD, ALIGNED>
{
    /// Starts at the block's first item and fills all but one stage.
    #[inline(always)]
    pub fn start(problem: Problem<L, R>, source: S) -> Self {
        let mut copier = Copier {
            problem,
            source,
            item: None,
            step: 0,
            stage: 0,
            slot: 0,
            matrix: In::at(0, 0),
            scales: In::at(0, 0),
            rows: [-1; MOST],
            scale_row: -1,
            next_item: None,
            next_rows: [-1; MOST],
            next_scale_row: -1,
            tile: core::marker::PhantomData,
        };
        copier.look_ahead();
        copier.advance();
        let mut i = 0;
        while i < T::STAGES - 1 {
            copier.copy();
            i += 1;
        }
        copier
    }

    /// Row of `a` behind row `row` of the tile.
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
            let each = T::THREADS / pieces::<L>();
            macro_rules! row {
                ($i:literal) => {
                    if $i * each < T::ROWS {
                        self.next_rows[$i] = self.source_row(item, thread_idx() / pieces::<L>() + $i * each);
                    }
                };
            }
            row!(0);
            row!(1);
            row!(2);
            row!(3);
            if FOLD == 64 && thread_idx() < T::ROWS {
                self.next_scale_row = self.source_row(item, thread_idx());
            }
        }
    }

    /// Goes to the next item.
    #[inline(always)]
    fn advance(&mut self) {
        self.item = self.next_item;
        self.rows = self.next_rows;
        self.scale_row = self.next_scale_row;
        self.stage = 0;
        if let Some(item) = self.item {
            self.matrix = self.problem.matrix(item.expert);
            if FOLD != 0 {
                let blocks = self.problem.n.div_ceil(BLOCK) as usize * self.problem.blocks() as usize;
                self.scales = In::at(self.problem.scales.load(item.expert as usize), blocks);
            }
            self.look_ahead();
        }
    }

    /// Copies one 16-byte piece of a row, of which `left` elements exist, to byte `to` of shared memory.
    #[inline(always)]
    fn piece<O: Operand>(from: In<O::Element>, index: usize, left: u32, to: u32) {
        let elements = 16 / size_of::<O::Element>() as u32;
        if ALIGNED {
            let bytes = if left < elements { left } else { elements } * size_of::<O::Element>() as u32;
            copy::async16_zfill(Shared::<O::Element>::at(to, elements), 0, from, index, bytes);
        } else {
            // Rows that start anywhere: element by element.
            let mut words = [0u32; 4];
            macro_rules! word {
                ($w:literal) => {
                    let each = elements / 4;
                    let mut i = 0;
                    while i < each {
                        let at = $w * each + i;
                        if at < left {
                            words[$w] |= element::<O>(from, index + at as usize) << (32 / each * i);
                        }
                        i += 1;
                    }
                };
            }
            word!(0);
            word!(1);
            word!(2);
            word!(3);
            Shared::<u32>::at(to, 4).store_v4(0, words);
        }
    }

    /// Starts copying the next stage into the next place of the ring, as one group of copies. Empty behind the last item.
    #[inline(always)]
    pub fn copy(&mut self) {
        if let Some(item) = self.item {
            let Problem { a, a_scale, n, k, .. } = self.problem;
            let base = self.slot * Ring::<L, R, T>::STAGE_BYTES;
            let k0 = self.stage * STAGE_K;
            let left = k - k0;
            let thread = thread_idx();

            let each = T::THREADS / pieces::<L>();
            let piece = thread % pieces::<L>();
            let at = piece * (16 / size_of::<L::Element>() as u32);
            macro_rules! left {
                ($i:literal) => {
                    if $i * each < T::ROWS {
                        let row = self.rows[$i];
                        let there = if row >= 0 { left.saturating_sub(at) } else { 0 };
                        let index = if row >= 0 { row as usize * k as usize } else { 0 } + (k0 + at) as usize;
                        let to = piece_at::<L>(base, thread / pieces::<L>() + $i * each, piece);
                        Self::piece::<L>(a, index, there, to);
                    }
                };
            }
            left!(0);
            left!(1);
            left!(2);
            left!(3);

            let each = T::THREADS / pieces::<R>();
            let piece = thread % pieces::<R>();
            let at = piece * (16 / size_of::<R::Element>() as u32);
            let base = base + Ring::<L, R, T>::LEFT_BYTES;
            // Nothing is read of an expert that is not resident.
            let columns = if self.matrix.is_null() { 0 } else { n };
            macro_rules! right {
                ($i:literal) => {
                    if $i * each < T::COLUMNS {
                        let row = thread / pieces::<R>() + $i * each;
                        let column = item.column * T::COLUMNS + row;
                        let there = if column < columns { left.saturating_sub(at) } else { 0 };
                        let index =
                            if column < columns { column as usize * k as usize } else { 0 } + (k0 + at) as usize;
                        Self::piece::<R>(self.matrix, index, there, piece_at::<R>(base, row, piece));
                    }
                };
            }
            right!(0);
            right!(1);
            right!(2);
            right!(3);

            let base = self.slot * Ring::<L, R, T>::STAGE_BYTES + Ring::<L, R, T>::SCALES_AT;
            let (block, blocks) = ((k0 / BLOCK) as usize, self.problem.blocks() as usize);
            let scales = Shared::<f32>::at(base, T::ROWS + 4);
            if FOLD == 64 && thread < T::ROWS {
                let row = self.scale_row;
                let index = if row >= 0 { row as usize * blocks + block } else { 0 };
                copy::async4_zfill(scales, thread, a_scale, index, if row >= 0 { 4 } else { 0 });
            }
            if FOLD != 0 && thread == 0 {
                let row = (item.column * T::COLUMNS / BLOCK) as usize;
                copy::async4_zfill(scales, T::ROWS, self.scales, row * blocks + block, 4);
            }

            self.slot = if self.slot + 1 == T::STAGES { 0 } else { self.slot + 1 };
            self.stage += 1;
            if self.stage == self.problem.stages() {
                self.advance();
            }
        }
        copy::commit();
    }
}
