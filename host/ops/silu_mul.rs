//! Gated activation of gate and up, alone or with the quantiser.

use super::{Rows, check_columns, check_rows, quant};
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::types::Gating;
use cuda_std::kernel::{DeviceMut, Kernel};
use kernels_gpu::quant::{COLUMNS, LANES, THREADS, in_vectors};
use kernels_gpu::silu_mul::{
    self as kernel, IN_FLIGHT, SILU, SILU_CLAMPED, SWIGLU_OAI, TABLE, TABLE_BYTES, TABLE_THREADS, table_holds,
};

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

/// Choices that leave the bits alone. `None`: by size.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    /// Number of blocks.
    pub blocks: Option<u32>,
    /// Whether sigmoids are looked up. They are computed all the same where rows are not whole vectors, or alpha is outside of
    /// what a table holds.
    pub table: Option<bool>,
}

/// From so many elements a multiprocessor on a table pays for its way to shared memory.
const TABLE_PAYS: usize = 1 << 13;

/// A gated activation on a device: ready kernels, and a table of sigmoids.
#[derive(Debug)]
pub struct SiluMul {
    device: DeviceHandle,
    /// Which of the kernels.
    gating: usize,
    alpha: f32,
    limit: f32,
    sigmoids: Buffer<f32>,
}

/// What kernels want to know of a gating: which of three, alpha and limit.
fn parameters(gating: Gating) -> Result<(u32, f32, f32)> {
    gating.check()?;
    match gating {
        Gating::Silu { limit: None } => Ok((SILU, 1.0, f32::INFINITY)),
        Gating::Silu { limit: Some(limit) } => Ok((SILU_CLAMPED, 1.0, limit)),
        Gating::SwigluOai { alpha: 0.0, .. } => Err(Error::argument("alpha", 0.0, "a finite number other than 0")),
        Gating::SwigluOai { alpha, limit } => Ok((SWIGLU_OAI, alpha, limit)),
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

/// Where the result of [`SiluMul::enqueue_quant`] goes.
#[derive(Clone, Copy, Debug)]
pub struct Quantised<'a> {
    /// [rows, cols] e4m3 codes.
    pub codes: &'a Buffer<u8>,
    /// [rows, ceil(cols / 128)] scales.
    pub scales: &'a Buffer<f32>,
    /// [rows, cols] bf16: what is quantised. May be gate's or up's buffer if that is contiguous.
    pub copy: Option<&'a Buffer<u16>>,
}

/// Kernels of one gating: sigmoids looked up, computed in whole vectors, computed in rows of any kind.
type Forms<F> = [Kernel<F>; 3];

impl SiluMul {
    /// Readies the kernels and fills the table. Errors name `limit` or `alpha`.
    pub fn new(device: &DeviceHandle, gating: Gating) -> Result<Self> {
        let (gating, alpha, limit) = parameters(gating)?;
        let sigmoids = Buffer::new(device, TABLE as usize)?;
        let shared = |name: &str| if name.ends_with("_table") { TABLE_BYTES } else { 0 };
        for &kernel in kernel::silu_mul::KERNELS {
            device.prepare(kernel.into(), shared(kernel.name))?;
        }
        for &kernel in kernel::silu_mul_quant_fp8::KERNELS {
            device.prepare(kernel.into(), shared(kernel.name))?;
        }
        let fill = kernel::sigmoid_table::sigmoid_table_f32;
        device.prepare(fill.into(), 0)?;
        let args = kernel::sigmoid_table::Args { table: sigmoids.as_mut(), alpha, limit };
        launch(&**device, fill, Grid { blocks: TABLE.div_ceil(THREADS), shared_bytes: 0 }, args)?;
        Ok(SiluMul { device: device.clone(), gating: gating as usize, alpha, limit, sigmoids })
    }

    /// The form to use, and its grid for work of `threads` threads.
    fn choose<F>(
        &self,
        forms: Forms<F>,
        vectors: bool,
        elements: usize,
        threads: usize,
        tuning: Tuning,
    ) -> (Kernel<F>, Grid) {
        let multiprocessors = self.device.properties().multiprocessors as usize;
        let table =
            vectors && table_holds(self.alpha) && tuning.table.unwrap_or(elements >= TABLE_PAYS * multiprocessors);
        let kernel = forms[if table { 0 } else { 2 - usize::from(vectors) }];
        let of_block = if table { TABLE_THREADS } else { THREADS * IN_FLIGHT } as usize;
        let most = kernel.min_blocks as usize * multiprocessors;
        let blocks = tuning.blocks.unwrap_or(threads.div_ceil(of_block).min(most) as u32);
        (kernel, Grid { blocks, shared_bytes: if table { TABLE_BYTES } else { 0 } })
    }

    /// Enqueues out [rows, cols] bf16. `out` may be gate's or up's buffer if that is contiguous. Errors name the argument.
    pub fn enqueue(&self, from: GateUp<'_>, rows: usize, cols: usize, out: &Buffer<u16>) -> Result<()> {
        self.enqueue_with(from, rows, cols, out, Tuning::default())
    }

    /// As [`SiluMul::enqueue`] with given choices.
    pub fn enqueue_with(
        &self,
        from: GateUp<'_>,
        rows: usize,
        cols: usize,
        out: &Buffer<u16>,
        tuning: Tuning,
    ) -> Result<()> {
        use kernel::silu_mul::*;
        let device = &self.device;
        let vectors = check(device, from, rows, cols)?;
        out.check("out", device, rows * cols)?;
        check_overlap("out", out, from, rows, cols)?;
        if rows == 0 {
            return Ok(());
        }
        let forms = [
            [silu_mul_table, silu_mul_vector, silu_mul_any],
            [silu_mul_clamped_table, silu_mul_clamped_vector, silu_mul_clamped_any],
            [silu_mul_oai_table, silu_mul_oai_vector, silu_mul_oai_any],
        ][self.gating];
        let threads = rows * cols.div_ceil(COLUMNS as usize);
        let (kernel, grid) = self.choose(forms, vectors, rows * cols, threads, tuning);
        let args = Args {
            sigmoids: self.sigmoids.as_ref(),
            gate: from.gate.buffer.as_ref(),
            gate_offset: from.gate.offset as u64,
            gate_stride: from.gate.stride as u64,
            up: from.up.buffer.as_ref(),
            up_offset: from.up.offset as u64,
            up_stride: from.up.stride as u64,
            out: out.as_mut(),
            rows: rows as u32,
            cols: cols as u32,
            alpha: self.alpha,
            limit: self.limit,
        };
        launch(&**device, kernel, grid, args)
    }

    /// Enqueues the activation and its quantisation in one pass: the bytes of [`SiluMul::enqueue`] followed by
    /// [`quant::enqueue`]. Errors name the argument.
    pub fn enqueue_quant(&self, from: GateUp<'_>, rows: usize, cols: usize, to: Quantised<'_>) -> Result<()> {
        self.enqueue_quant_with(from, rows, cols, to, Tuning::default())
    }

    /// As [`SiluMul::enqueue_quant`] with given choices.
    pub fn enqueue_quant_with(
        &self,
        from: GateUp<'_>,
        rows: usize,
        cols: usize,
        to: Quantised<'_>,
        tuning: Tuning,
    ) -> Result<()> {
        use kernel::silu_mul_quant_fp8::*;
        let device = &self.device;
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
        let forms = [
            [silu_mul_quant_fp8_table, silu_mul_quant_fp8_vector, silu_mul_quant_fp8_any],
            [silu_mul_quant_fp8_clamped_table, silu_mul_quant_fp8_clamped_vector, silu_mul_quant_fp8_clamped_any],
            [silu_mul_quant_fp8_oai_table, silu_mul_quant_fp8_oai_vector, silu_mul_quant_fp8_oai_any],
        ][self.gating];
        let threads = rows * quant::scales_per_row(cols) * LANES as usize;
        let (kernel, grid) = self.choose(forms, vectors, rows * cols, threads, tuning);
        let args = Args {
            sigmoids: self.sigmoids.as_ref(),
            gate: from.gate.buffer.as_ref(),
            gate_offset: from.gate.offset as u64,
            gate_stride: from.gate.stride as u64,
            up: from.up.buffer.as_ref(),
            up_offset: from.up.offset as u64,
            up_stride: from.up.stride as u64,
            codes: to.codes.as_mut(),
            scales: to.scales.as_mut(),
            copy: to.copy.map_or(DeviceMut::null(), Buffer::as_mut),
            rows: rows as u32,
            cols: cols as u32,
            alpha: self.alpha,
            limit: self.limit,
        };
        launch(&**device, kernel, grid, args)
    }
}
