//! Block scales: one byte per block of consecutive k, plain row-major or in CUTLASS's 128x4 swizzle.

use std::borrow::Cow;

use kernels_gpu::layout::scale;

use crate::error::{Error, Result, check_len};

/// Block scales of one matrix, row-major: `rows` x `cols` bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearScales<'a> {
    rows: usize,
    cols: usize,
    bytes: Cow<'a, [u8]>,
}

impl<'a> LinearScales<'a> {
    /// Takes `rows` x `cols` bytes. `name` is what an error calls the buffer.
    pub fn new(name: &'static str, rows: usize, cols: usize, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        check_len(name, bytes.len(), product(name, &[rows, cols])?)?;
        Ok(Self { rows, cols, bytes })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Blocks per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All bytes, row-major.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Scale of block `col` of `row`. Panics outside the matrix, as indexing does.
    pub fn get(&self, row: usize, col: usize) -> u8 {
        assert!(col < self.cols, "block {col} of {}", self.cols);
        self.bytes[row * self.cols + col]
    }
}

/// Block scales of all experts of a layer in the 128x4 swizzle.
///
/// Each expert is padded on its own, to a multiple of 128 rows and of 4 columns; the byte of (row, column) lies at
/// [`scale::swizzled_offset`] within its expert. Padding is 0 where this crate writes it and is never read for a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwizzledScales {
    experts: usize,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl SwizzledScales {
    /// Takes bytes that are swizzled already, for `experts` matrices of `rows` x `cols` scales. `name` is what an error
    /// calls the buffer.
    pub fn from_bytes(name: &'static str, bytes: Vec<u8>, experts: usize, rows: usize, cols: usize) -> Result<Self> {
        check_len(name, bytes.len(), product(name, &[experts, expert_len(name, rows, cols)?])?)?;
        Ok(Self { experts, rows, cols, bytes })
    }

    /// All scales 0. `name` is what an error calls the buffer; there is one too if memory does not suffice.
    pub fn zeroed(name: &'static str, experts: usize, rows: usize, cols: usize) -> Result<Self> {
        let len = product(name, &[experts, expert_len(name, rows, cols)?])?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(len)
            .map_err(|error| Error::argument(name, format!("{len} bytes"), error.to_string()))?;
        bytes.resize(len, 0);
        Ok(Self { experts, rows, cols, bytes })
    }

    /// Swizzles one matrix per expert; all have the shape of the first. `name` is what an error calls them.
    pub fn swizzle(name: &'static str, experts: &[LinearScales<'_>]) -> Result<Self> {
        let first = experts
            .first()
            .ok_or_else(|| Error::argument(name, "empty", "the scales of at least one expert are needed"))?;
        let mut swizzled = Self::zeroed(name, experts.len(), first.rows, first.cols)?;
        for (expert, linear) in experts.iter().enumerate() {
            if (linear.rows, linear.cols) != (first.rows, first.cols) {
                return Err(Error::argument(
                    name,
                    format!("{} x {} for expert {expert}", linear.rows, linear.cols),
                    format!("{} x {} as for expert 0", first.rows, first.cols),
                ));
            }
            let range = swizzled.range(expert);
            write_swizzled(&mut swizzled.bytes[range], 0, linear);
        }
        Ok(swizzled)
    }

    /// Row-major copy of one expert's scales. Panics if there is no such expert, as indexing does.
    pub fn unswizzle(&self, expert: usize) -> LinearScales<'static> {
        let bytes = self.expert(expert);
        let padded = scale::padded_cols(self.cols);
        let mut linear = Vec::with_capacity(self.rows * self.cols);
        for row in 0..self.rows {
            linear.extend((0..self.cols).map(|col| bytes[scale::swizzled_offset(row, col, padded)]));
        }
        LinearScales { rows: self.rows, cols: self.cols, bytes: linear.into() }
    }

    /// Experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Rows of an expert, without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Blocks per row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The whole buffer, padding included.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The whole buffer, padding included.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Bytes from one expert to the next.
    pub fn stride(&self) -> usize {
        scale::swizzled_len(self.rows, self.cols)
    }

    /// Bytes of one expert, padding included. Panics if there is no such expert, as indexing does.
    pub fn expert(&self, expert: usize) -> &[u8] {
        &self.bytes[self.range(expert)]
    }

    /// Scale of block `col` of `row` of `expert`. Panics outside the matrix, as indexing does.
    pub fn get(&self, expert: usize, row: usize, col: usize) -> u8 {
        assert!(row < self.rows && col < self.cols, "({row}, {col}) of {} x {}", self.rows, self.cols);
        self.expert(expert)[scale::swizzled_offset(row, col, scale::padded_cols(self.cols))]
    }

    fn range(&self, expert: usize) -> std::ops::Range<usize> {
        let stride = self.stride();
        expert * stride..(expert + 1) * stride
    }

    /// The experts' buffers, each to be filled with [`write_swizzled`].
    pub(super) fn experts_mut(&mut self) -> rayon::slice::ChunksMut<'_, u8> {
        let stride = self.stride().max(1);
        rayon::slice::ParallelSliceMut::par_chunks_mut(self.bytes.as_mut_slice(), stride)
    }
}

/// Writes `linear` into one expert's swizzled buffer from `first_row` on.
pub(super) fn write_swizzled(expert: &mut [u8], first_row: usize, linear: &LinearScales<'_>) {
    let padded = scale::padded_cols(linear.cols);
    for row in 0..linear.rows {
        for col in 0..linear.cols {
            expert[scale::swizzled_offset(first_row + row, col, padded)] = linear.bytes[row * linear.cols + col];
        }
    }
}

/// Bytes of one expert's swizzled scales, or an error naming `name` where they pass `usize`.
fn expert_len(name: &'static str, rows: usize, cols: usize) -> Result<usize> {
    let round_up = |value: usize, multiple| value.checked_next_multiple_of(multiple);
    match (round_up(rows, 128), round_up(cols, 4)) {
        (Some(rows), Some(cols)) => product(name, &[rows, cols]),
        _ => Err(Error::argument(name, format!("{rows} x {cols}"), "sizes that fit 64 bits")),
    }
}

/// Product of `factors`, or an error naming `name` where it passes `isize`, the most bytes of a buffer.
pub(super) fn product(name: &'static str, factors: &[usize]) -> Result<usize> {
    factors
        .iter()
        .try_fold(1usize, |product, &factor| product.checked_mul(factor))
        .filter(|&product| product <= isize::MAX as usize)
        .ok_or_else(|| Error::argument(name, format!("of size {factors:?}"), "sizes whose product fits 64 bits"))
}
