//! Quantiser of activations: e4m3 codes with a scale for each group of 128 columns of a row.

use super::{Rows, check_columns, check_rows};
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::Result;
use kernels_gpu::quant::{GROUP, IN_FLIGHT, LANES, THREADS, in_vectors, per_token_group_quant_fp8};

/// Columns that share a scale.
pub const GROUP_COLUMNS: usize = GROUP as usize;

/// Scales of a row.
pub const fn scales_per_row(cols: usize) -> usize {
    cols.div_ceil(GROUP_COLUMNS)
}

/// Readies the kernels.
pub fn prepare(device: &DeviceHandle) -> Result<()> {
    per_token_group_quant_fp8::KERNELS.iter().try_for_each(|&kernel| device.prepare(kernel.into(), 0))
}

/// Blocks for rows of `cols` columns.
fn blocks(device: &DeviceHandle, rows: usize, cols: usize, min_blocks: u32) -> u32 {
    let of_block = (THREADS / LANES * IN_FLIGHT) as usize;
    let most = min_blocks * device.properties().multiprocessors;
    (rows * scales_per_row(cols)).div_ceil(of_block).min(most as usize) as u32
}

/// Enqueues codes [rows, cols] and scales [rows, ceil(cols / 128)] of x. Errors name `x`, `rows`, `cols`, `codes` or `scales`.
pub fn enqueue(
    device: &DeviceHandle,
    x: Rows<'_>,
    rows: usize,
    cols: usize,
    codes: &Buffer<u8>,
    scales: &Buffer<f32>,
) -> Result<()> {
    enqueue_with_blocks(device, x, rows, cols, codes, scales, None)
}

/// As [`enqueue`] with a given number of blocks, on which no result depends.
pub fn enqueue_with_blocks(
    device: &DeviceHandle,
    x: Rows<'_>,
    rows: usize,
    cols: usize,
    codes: &Buffer<u8>,
    scales: &Buffer<f32>,
    number: Option<u32>,
) -> Result<()> {
    check_columns("cols", cols)?;
    check_rows("rows", rows)?;
    x.check("x", device, rows, cols)?;
    codes.check("codes", device, rows * cols)?;
    scales.check("scales", device, rows * scales_per_row(cols))?;
    if rows == 0 {
        return Ok(());
    }
    let (offset, stride) = (x.offset as u64, x.stride as u64);
    let kernel = if in_vectors(cols as u32, offset, stride) {
        per_token_group_quant_fp8::per_token_group_quant_fp8_vector
    } else {
        per_token_group_quant_fp8::per_token_group_quant_fp8_any
    };
    let blocks = number.unwrap_or_else(|| blocks(device, rows, cols, kernel.min_blocks));
    let args = per_token_group_quant_fp8::Args {
        x: x.buffer.as_ref(),
        offset,
        stride,
        codes: codes.as_mut(),
        scales: scales.as_mut(),
        rows: rows as u32,
        cols: cols as u32,
    };
    launch(&**device, kernel, Grid { blocks, shared_bytes: 0 }, args)
}
