//! Results at sorted rows back to tokens, and the shared expert.

use super::{check_columns, check_rows};
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::plan::{MAX_EXPERTS, MAX_TOP_K};
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::unpermute::{self as kernel, COLUMNS, SHARED_BYTES, THREADS};

/// Results of the experts at sorted rows.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// Number of tokens M. 0 does nothing.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Number of experts E.
    pub experts: usize,
    /// Output width H.
    pub output: usize,
    /// [M·top_k, H] bf16; rows behind the last live one are not read.
    pub y: &'a Buffer<u16>,
    /// [M·top_k] row of each pair; below 0, or not below the number of live rows: skipped.
    pub token_to_perm: &'a Buffer<i32>,
    /// [M·top_k] weights. A weight of 0 is not a skip.
    pub weights: &'a Buffer<f32>,
    /// `[E + 1]`; the last is the number of live rows.
    pub expert_offsets: &'a Buffer<i32>,
}

/// The shared expert's results.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert<'a> {
    /// [M, H] bf16.
    pub shared: &'a Buffer<u16>,
    /// What decides how much of it a token gets; without it, all.
    pub gate: Option<SharedGate<'a>>,
}

/// sigmoid(x · gate_w) of each token.
#[derive(Clone, Copy, Debug)]
pub struct SharedGate<'a> {
    /// [M, hidden] bf16.
    pub x: &'a Buffer<u16>,
    /// `[hidden]` bf16.
    pub gate_w: &'a Buffer<u16>,
    /// Columns of x.
    pub hidden: usize,
}

/// Where routed and shared results meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// The routed sum is rounded to bf16 first: the bytes of [`reduce`] followed by [`blend`].
    Twice,
    /// One rounding of the whole sum.
    Once,
}

/// Readies the kernels.
pub fn prepare(device: &DeviceHandle) -> Result<()> {
    device.prepare(kernel::unpermute_reduce::unpermute_reduce_bf16.into(), 0)?;
    device.prepare(kernel::blend::blend_bf16.into(), SHARED_BYTES)?;
    kernel::unpermute_blend::KERNELS.iter().try_for_each(|&kernel| device.prepare(kernel.into(), SHARED_BYTES))
}

impl Routed<'_> {
    fn check(&self, device: &DeviceHandle) -> Result<()> {
        let Routed { tokens, top_k, experts, output, .. } = *self;
        check_columns("output", output)?;
        check_rows("tokens", tokens)?;
        if !(1..=MAX_TOP_K).contains(&top_k) {
            return Err(Error::argument("top_k", top_k, format!("1 to {MAX_TOP_K}")));
        }
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(Error::argument("experts", experts, format!("1 to {MAX_EXPERTS}")));
        }
        let pairs = tokens * top_k;
        check_rows("tokens", pairs)?;
        self.y.check("y", device, pairs * output)?;
        self.token_to_perm.check("token_to_perm", device, pairs)?;
        self.weights.check("weights", device, pairs)?;
        self.expert_offsets.check("expert_offsets", device, experts + 1)
    }
}

impl SharedExpert<'_> {
    fn check(&self, device: &DeviceHandle, tokens: usize, output: usize) -> Result<()> {
        self.shared.check("shared", device, tokens * output)?;
        if let Some(SharedGate { x, gate_w, hidden }) = self.gate {
            check_columns("hidden", hidden)?;
            x.check("x", device, tokens * hidden)?;
            gate_w.check("gate_w", device, hidden)?;
        }
        Ok(())
    }

    /// x, gate_w and hidden as kernel arguments.
    fn gate(&self) -> (DeviceRef<'_, u16>, DeviceRef<'_, u16>, u32) {
        match self.gate {
            Some(SharedGate { x, gate_w, hidden }) => (x.as_ref(), gate_w.as_ref(), hidden as u32),
            None => (DeviceRef::null(), DeviceRef::null(), 0),
        }
    }
}

/// One block a token, as many as can be resident twice over.
fn token_blocks<F>(device: &DeviceHandle, kernel: Kernel<F>, tokens: usize) -> u32 {
    tokens.min((2 * kernel.min_blocks * device.properties().multiprocessors) as usize) as u32
}

/// Enqueues out [M, H] = sum over a token's experts in the order of its slots. Errors name the argument.
pub fn reduce(device: &DeviceHandle, routed: Routed<'_>, out: &Buffer<u16>) -> Result<()> {
    reduce_with_blocks(device, routed, out, None)
}

/// As [`reduce`] with a given number of blocks, on which no result depends.
pub fn reduce_with_blocks(
    device: &DeviceHandle,
    routed: Routed<'_>,
    out: &Buffer<u16>,
    number: Option<u32>,
) -> Result<()> {
    use kernel::unpermute_reduce::*;
    routed.check(device)?;
    let Routed { tokens, top_k, experts, output, y, token_to_perm, weights, expert_offsets } = routed;
    out.check("out", device, tokens * output)?;
    if tokens == 0 {
        return Ok(());
    }
    let kernel = unpermute_reduce_bf16;
    let columns = if output.is_multiple_of(COLUMNS as usize) { COLUMNS as usize } else { 1 };
    let work = tokens * (output / columns);
    let most = 2 * kernel.min_blocks * device.properties().multiprocessors;
    let blocks = number.unwrap_or(work.div_ceil(THREADS as usize).min(most as usize) as u32);
    let args = Args {
        y: y.as_ref(),
        token_to_perm: token_to_perm.as_ref(),
        weights: weights.as_ref(),
        expert_offsets: expert_offsets.as_ref(),
        out: out.as_mut(),
        tokens: tokens as u32,
        top_k: top_k as u32,
        experts: experts as u32,
        output: output as u32,
    };
    launch(&**device, kernel, Grid { blocks, shared_bytes: 0 }, args)
}

/// Enqueues out [M, H] = routed + g · shared, rounded once; `out` may be `routed`. Errors name the argument.
pub fn blend(
    device: &DeviceHandle,
    tokens: usize,
    output: usize,
    routed: &Buffer<u16>,
    shared: SharedExpert<'_>,
    out: &Buffer<u16>,
) -> Result<()> {
    use kernel::blend::*;
    check_columns("output", output)?;
    check_rows("tokens", tokens)?;
    routed.check("routed", device, tokens * output)?;
    shared.check(device, tokens, output)?;
    out.check("out", device, tokens * output)?;
    if tokens == 0 {
        return Ok(());
    }
    let (x, gate_w, hidden) = shared.gate();
    let args = Args {
        routed: routed.as_ref(),
        shared: shared.shared.as_ref(),
        x,
        gate_w,
        out: out.as_mut(),
        tokens: tokens as u32,
        output: output as u32,
        hidden,
    };
    let grid = Grid { blocks: token_blocks(device, blend_bf16, tokens), shared_bytes: SHARED_BYTES };
    launch(&**device, blend_bf16, grid, args)
}

/// Enqueues sum over experts and shared expert in one pass: out [M, H]. Errors name the argument.
pub fn reduce_blend(
    device: &DeviceHandle,
    rounding: Rounding,
    routed: Routed<'_>,
    shared: SharedExpert<'_>,
    out: &Buffer<u16>,
) -> Result<()> {
    reduce_blend_with_blocks(device, rounding, routed, shared, out, None)
}

/// As [`reduce_blend`] with a given number of blocks, on which no result depends.
pub fn reduce_blend_with_blocks(
    device: &DeviceHandle,
    rounding: Rounding,
    routed: Routed<'_>,
    shared: SharedExpert<'_>,
    out: &Buffer<u16>,
    number: Option<u32>,
) -> Result<()> {
    use kernel::unpermute_blend::*;
    routed.check(device)?;
    let Routed { tokens, top_k, experts, output, y, token_to_perm, weights, expert_offsets } = routed;
    shared.check(device, tokens, output)?;
    out.check("out", device, tokens * output)?;
    if tokens == 0 {
        return Ok(());
    }
    let kernel = match rounding {
        Rounding::Twice => unpermute_blend_bf16,
        Rounding::Once => weighted_sum_blend_bf16,
    };
    let (x, gate_w, hidden) = shared.gate();
    let args = Args {
        y: y.as_ref(),
        token_to_perm: token_to_perm.as_ref(),
        weights: weights.as_ref(),
        expert_offsets: expert_offsets.as_ref(),
        shared: shared.shared.as_ref(),
        x,
        gate_w,
        out: out.as_mut(),
        tokens: tokens as u32,
        top_k: top_k as u32,
        experts: experts as u32,
        output: output as u32,
        hidden,
    };
    let blocks = number.unwrap_or_else(|| token_blocks(device, kernel, tokens));
    launch(&**device, kernel, Grid { blocks, shared_bytes: SHARED_BYTES }, args)
}
