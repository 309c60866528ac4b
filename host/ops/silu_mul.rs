//! Gated activation of gate and up, alone or with the quantiser.

use super::{Rows, check_columns, check_rows, quant};
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::types::Gating;
use kernels_gpu::quant::{COLUMNS, THREADS, in_vectors};
use kernels_gpu::silu_mul::{self as kernel, IN_FLIGHT};

/// Gate and up: two buffers, or two parts of one.
#[derive(Clone, Copy, Debug)]
pub struct GateUp<'a> {
    /// Gate.
    pub gate: Rows<'a>,
    /// Up.
    pub up: Rows<'a>,
}

impl<'a> GateUp<'a> {
    /// The halves of one [rows, 2·cols] buffer: gate, then up.
    pub fn halves(buffer: &'a Buffer<u16>, cols: usize) -> Self {
        let half = |offset| Rows { buffer, offset, stride: 2 * cols };
        GateUp { gate: half(0), up: half(cols) }
    }
}

/// Readies the kernels.
pub fn prepare(device: &DeviceHandle) -> Result<()> {
    kernel::silu_mul::KERNELS.iter().try_for_each(|&kernel| device.prepare(kernel.into(), 0))?;
    kernel::silu_mul_quant_fp8::KERNELS.iter().try_for_each(|&kernel| device.prepare(kernel.into(), 0))
}

/// What kernels want to know of a gating: which of three, alpha and limit.
fn parameters(gating: Gating) -> Result<(usize, f32, f32)> {
    match gating {
        Gating::Silu { limit: None } => Ok((0, 1.0, f32::INFINITY)),
        Gating::Silu { limit: Some(limit) } if limit.is_nan() || limit <= 0.0 => {
            Err(Error::argument("limit", limit, "a positive number, or None for no clamp"))
        }
        Gating::Silu { limit: Some(limit) } => Ok((1, 1.0, limit)),
        Gating::SwigluOai { limit, .. } if limit.is_nan() || limit <= 0.0 => {
            Err(Error::argument("limit", limit, "a positive number"))
        }
        Gating::SwigluOai { alpha, .. } if alpha == 0.0 || !alpha.is_finite() => {
            Err(Error::argument("alpha", alpha, "a finite number other than 0"))
        }
        Gating::SwigluOai { alpha, limit } => Ok((2, alpha, limit)),
    }
}

fn check(device: &DeviceHandle, from: GateUp<'_>, rows: usize, cols: usize) -> Result<bool> {
    check_columns("cols", cols)?;
    check_rows("rows", rows)?;
    from.gate.check("gate", device, rows, cols)?;
    from.up.check("up", device, rows, cols)?;
    let in_vectors = |rows: Rows<'_>| in_vectors(cols as u32, rows.offset as u64, rows.stride as u64);
    Ok(in_vectors(from.gate) && in_vectors(from.up))
}

/// `Err` where `out` is the buffer of an input that lies otherwise: elements would be overwritten before they are read.
fn check_overlap(name: &'static str, out: &Buffer<u16>, from: GateUp<'_>, rows: usize, cols: usize) -> Result<()> {
    for (input, layout) in [("gate", from.gate), ("up", from.up)] {
        let same_layout = layout.offset == 0 && (layout.stride == cols || rows <= 1);
        if std::ptr::eq(layout.buffer, out) && !same_layout {
            let value = format!("the buffer of `{input}` in another layout");
            return Err(Error::argument(name, value, "another buffer, or rows that lie as the result's do"));
        }
    }
    Ok(())
}

/// Enqueues out [rows, cols] bf16. `out` may be gate's or up's buffer if that is contiguous. Errors name the argument.
pub fn enqueue(
    device: &DeviceHandle,
    gating: Gating,
    from: GateUp<'_>,
    rows: usize,
    cols: usize,
    out: &Buffer<u16>,
) -> Result<()> {
    enqueue_with_blocks(device, gating, from, rows, cols, out, None)
}

/// As [`enqueue`] with a given number of blocks, on which no result depends.
pub fn enqueue_with_blocks(
    device: &DeviceHandle,
    gating: Gating,
    from: GateUp<'_>,
    rows: usize,
    cols: usize,
    out: &Buffer<u16>,
    number: Option<u32>,
) -> Result<()> {
    use kernel::silu_mul::*;
    let (which, alpha, limit) = parameters(gating)?;
    let vectors = check(device, from, rows, cols)?;
    out.check("out", device, rows * cols)?;
    check_overlap("out", out, from, rows, cols)?;
    if rows == 0 {
        return Ok(());
    }
    let kernels = match vectors {
        true => [silu_mul_vector, silu_mul_clamped_vector, silu_mul_oai_vector],
        false => [silu_mul_any, silu_mul_clamped_any, silu_mul_oai_any],
    };
    let kernel = kernels[which];
    let places = rows * cols.div_ceil(COLUMNS as usize);
    let most = kernel.min_blocks * device.properties().multiprocessors;
    let blocks = number.unwrap_or(places.div_ceil((THREADS * IN_FLIGHT) as usize).min(most as usize) as u32);
    let args = Args {
        gate: from.gate.buffer.as_ref(),
        gate_offset: from.gate.offset as u64,
        gate_stride: from.gate.stride as u64,
        up: from.up.buffer.as_ref(),
        up_offset: from.up.offset as u64,
        up_stride: from.up.stride as u64,
        out: out.as_mut(),
        rows: rows as u32,
        cols: cols as u32,
        alpha,
        limit,
    };
    launch(&**device, kernel, Grid { blocks, shared_bytes: 0 }, args)
}

/// Where the result of [`enqueue_quant`] goes.
#[derive(Clone, Copy, Debug)]
pub struct Quantised<'a> {
    /// [rows, cols] e4m3 codes.
    pub codes: &'a Buffer<u8>,
    /// [rows, ceil(cols / 128)] scales.
    pub scales: &'a Buffer<f32>,
    /// [rows, cols] bf16: what is quantised. May be gate's or up's buffer if that is contiguous.
    pub copy: Option<&'a Buffer<u16>>,
}

/// Enqueues the activation and its quantisation in one pass: the bytes of [`enqueue`] followed by [`quant::enqueue`]. Errors
/// name the argument.
pub fn enqueue_quant(
    device: &DeviceHandle,
    gating: Gating,
    from: GateUp<'_>,
    rows: usize,
    cols: usize,
    to: Quantised<'_>,
) -> Result<()> {
    enqueue_quant_with_blocks(device, gating, from, rows, cols, to, None)
}

/// As [`enqueue_quant`] with a given number of blocks, on which no result depends.
pub fn enqueue_quant_with_blocks(
    device: &DeviceHandle,
    gating: Gating,
    from: GateUp<'_>,
    rows: usize,
    cols: usize,
    to: Quantised<'_>,
    number: Option<u32>,
) -> Result<()> {
    use kernel::silu_mul_quant_fp8::*;
    let (which, alpha, limit) = parameters(gating)?;
    let vectors = check(device, from, rows, cols)?;
    to.codes.check("codes", device, rows * cols)?;
    to.scales.check("scales", device, rows * quant::scales_per_row(cols))?;
    if let Some(copy) = to.copy {
        copy.check("copy", device, rows * cols)?;
        check_overlap("copy", copy, from, rows, cols)?;
    }
    if rows == 0 {
        return Ok(());
    }
    let kernels = match vectors {
        true => [silu_mul_quant_fp8_vector, silu_mul_quant_fp8_clamped_vector, silu_mul_quant_fp8_oai_vector],
        false => [silu_mul_quant_fp8_any, silu_mul_quant_fp8_clamped_any, silu_mul_quant_fp8_oai_any],
    };
    let kernel = kernels[which];
    let blocks = number.unwrap_or_else(|| quant::blocks(device, rows, cols, IN_FLIGHT, kernel.min_blocks));
    let args = Args {
        gate: from.gate.buffer.as_ref(),
        gate_offset: from.gate.offset as u64,
        gate_stride: from.gate.stride as u64,
        up: from.up.buffer.as_ref(),
        up_offset: from.up.offset as u64,
        up_stride: from.up.stride as u64,
        codes: to.codes.as_mut(),
        scales: to.scales.as_mut(),
        copy: to.copy.map_or(cuda_std::kernel::DeviceMut::null(), Buffer::as_mut),
        rows: rows as u32,
        cols: cols as u32,
        alpha,
        limit,
    };
    launch(&**device, kernel, Grid { blocks, shared_bytes: 0 }, args)
}
