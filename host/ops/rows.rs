//! Rows inside a buffer, and the limits on their number and width.

use crate::device::{Buffer, DeviceHandle};
use crate::error::{Error, Result};
use crate::plan::MAX_WIDTH;

/// Rows of bf16 in a buffer: row r begins at element `offset + r·stride`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Where they are.
    pub buffer: &'a Buffer<u16>,
    /// First element of the first row.
    pub offset: usize,
    /// Elements from row to row, at least the number of columns.
    pub stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows of `cols` columns without gaps.
    pub fn contiguous(buffer: &'a Buffer<u16>, cols: usize) -> Self {
        Rows { buffer, offset: 0, stride: cols }
    }

    /// `Err` naming the rows as `name` unless `rows` rows of `cols` columns lie in a buffer of `device` and apart.
    pub(crate) fn check(&self, name: &'static str, device: &DeviceHandle, rows: usize, cols: usize) -> Result<()> {
        if self.stride < cols && rows > 1 {
            let needed = format!("at least {cols}, the number of columns");
            return Err(Error::argument(name, format!("rows at a stride of {}", self.stride), needed));
        }
        let end = match rows {
            0 => Some(0),
            _ => (rows - 1).checked_mul(self.stride).and_then(|last| last.checked_add(self.offset)?.checked_add(cols)),
        };
        let end = end.ok_or_else(|| {
            let value = format!("rows from {} on at a stride of {}", self.offset, self.stride);
            Error::argument(name, value, "an end below 2^64")
        })?;
        self.buffer.check(name, device, end)
    }
}

/// `Err` naming `name` unless it is a number of columns that kernels take.
pub(crate) fn check_columns(name: &'static str, cols: usize) -> Result<()> {
    let fits = (1..=MAX_WIDTH).contains(&cols);
    if fits { Ok(()) } else { Err(Error::argument(name, cols, format!("1 to {MAX_WIDTH}"))) }
}

/// `Err` naming `name` where there are more rows than kernels take.
pub(crate) fn check_rows(name: &'static str, rows: usize) -> Result<()> {
    let fits = rows <= i32::MAX as usize;
    if fits { Ok(()) } else { Err(Error::argument(name, rows, "below 2^31")) }
}
