//! `topk` and `scale_rows`: experts and weights of tokens from their logits, and weights on the input of experts.

use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::plan::{MAX_EXPERTS, MAX_TOP_K, MAX_WIDTH};
use crate::types::{Routing, Scoring};
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::topk::{self as kernels, scoring};

/// Logits on a device, row-major [M, E].
#[derive(Clone, Copy, Debug)]
pub enum Logits<'a> {
    /// f32.
    F32(&'a Buffer<f32>),
    /// bf16 bits.
    Bf16(&'a Buffer<u16>),
}

/// Choice of experts, for one number of experts and one [`Routing`].
#[derive(Clone, Debug)]
pub struct TopK {
    device: DeviceHandle,
    experts: usize,
    routing: Routing,
    kernel: Kernel<kernels::topk::Family>,
}

/// `Err` unless `value` is 1 to `most`.
pub(crate) fn check_range(name: &'static str, value: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&value) { Ok(()) } else { Err(Error::argument(name, value, format!("1 to {most}"))) }
}

/// Number of pairs, below 2^31.
pub(crate) fn check_pairs(tokens: usize, top_k: usize) -> Result<usize> {
    match tokens.checked_mul(top_k) {
        Some(pairs) if pairs <= i32::MAX as usize => Ok(pairs),
        _ => Err(Error::argument("tokens", tokens, format!("at most (2^31 - 1) / {top_k}, experts of a token"))),
    }
}

pub(crate) fn check_top_k(top_k: usize, experts: usize) -> Result<()> {
    check_range("num_experts", experts, MAX_EXPERTS)?;
    check_range("top_k", top_k, experts.min(MAX_TOP_K))
}

/// Where a reference to a buffer may be missing.
pub(crate) fn optional(buffer: Option<&Buffer<f32>>) -> DeviceRef<'_, f32> {
    buffer.map_or(DeviceRef::null(), Buffer::as_ref)
}

impl TopK {
    /// Readies the kernel. Errors name `num_experts` (1 to 4096), `top_k` (1 to 32, at most the experts that groups leave), `groups` or
    /// `scale` (finite).
    pub fn new(device: &DeviceHandle, experts: usize, routing: Routing) -> Result<Self> {
        check_top_k(routing.top_k, experts)?;
        if let Some(groups) = routing.groups {
            let given = || format!("{} of {}", groups.keep, groups.count);
            if groups.count == 0 || !experts.is_multiple_of(groups.count) {
                return Err(Error::argument("groups", given(), format!("a number that divides {experts} experts")));
            }
            if !(1..=groups.count).contains(&groups.keep) {
                return Err(Error::argument("groups", given(), "1 to all of them kept"));
            }
            let left = groups.keep * (experts / groups.count);
            if left < routing.top_k {
                let needed = format!("at least {} experts in the groups kept, not {left}", routing.top_k);
                return Err(Error::argument("groups", given(), needed));
            }
        }
        if !routing.scale.is_finite() {
            return Err(Error::argument("scale", routing.scale, "a finite number"));
        }
        let many_groups = routing.groups.is_some_and(|groups| groups.count > kernels::MAX_GROUPS as usize);
        let kernel = match experts {
            _ if many_groups => kernels::topk::topk_any,
            0..=128 => kernels::topk::topk_128,
            129..=256 => kernels::topk::topk_256,
            257..=512 => kernels::topk::topk_512,
            _ => kernels::topk::topk_any,
        };
        Self { device: device.clone(), experts, routing, kernel }.ready()
    }

    /// The same with the kernel for any number of experts and groups.
    pub fn with_general_kernel(self) -> Result<Self> {
        Self { kernel: kernels::topk::topk_any, ..self }.ready()
    }

    fn ready(self) -> Result<Self> {
        self.device.prepare(self.kernel.into(), self.grid(1).shared_bytes)?;
        Ok(self)
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// How experts are chosen.
    pub fn routing(&self) -> Routing {
        self.routing
    }

    fn grid(&self, tokens: usize) -> Grid {
        let groups = self.routing.groups.map_or(0, |groups| groups.count);
        let (of_block, shared_bytes) = if self.kernel.name == kernels::topk::topk_any.name {
            (kernels::TOKENS_ANY, kernels::shared_bytes(self.experts as u32, groups as u32))
        } else {
            (kernels::TOKENS, 0)
        };
        Grid { blocks: tokens.div_ceil(of_block as usize).min(1 << 20) as u32, shared_bytes }
    }

    /// Enqueues ids and weights of `tokens` tokens, [M, top_k] each. `bias` `[E]` is added to the scores for the choice alone. Buffers
    /// may be longer; nothing behind what is needed is written. Errors name `tokens`, `logits`, `bias`, `expert_indices` or
    /// `expert_weights`.
    pub fn launch(
        &self,
        logits: Logits<'_>,
        bias: Option<&Buffer<f32>>,
        tokens: usize,
        expert_indices: &Buffer<i32>,
        expert_weights: &Buffer<f32>,
    ) -> Result<()> {
        let code = match self.routing.scoring {
            Scoring::Softmax => scoring::SOFTMAX,
            Scoring::SelectedSoftmax => scoring::SELECTED_SOFTMAX,
            Scoring::Sigmoid => scoring::SIGMOID,
            Scoring::SqrtSoftplus => scoring::SQRT_SOFTPLUS,
        };
        self.enqueue(code, logits, bias, tokens, expert_indices, expert_weights)
    }

    /// As [`TopK::launch`] with a scoring of the kernel's own.
    pub(crate) fn enqueue(
        &self,
        scoring: u32,
        logits: Logits<'_>,
        bias: Option<&Buffer<f32>>,
        tokens: usize,
        expert_indices: &Buffer<i32>,
        expert_weights: &Buffer<f32>,
    ) -> Result<()> {
        let Routing { top_k, renormalize, groups, scale, .. } = self.routing;
        let pairs = check_pairs(tokens, top_k)?;
        let (device, len) = (&self.device, tokens * self.experts);
        let (wide, narrow) = match logits {
            Logits::F32(logits) => {
                logits.check("logits", device, len)?;
                (logits.as_ref(), DeviceRef::null())
            }
            Logits::Bf16(logits) => {
                logits.check("logits", device, len)?;
                (DeviceRef::null(), logits.as_ref())
            }
        };
        if let Some(bias) = bias {
            bias.check_exact("bias", device, self.experts)?;
        }
        expert_indices.check("expert_indices", device, pairs)?;
        expert_weights.check("expert_weights", device, pairs)?;
        if tokens == 0 {
            return Ok(());
        }
        launch(
            &**device,
            self.kernel,
            self.grid(tokens),
            kernels::topk::Args {
                logits: wide,
                logits_bf16: narrow,
                bias: optional(bias),
                ids: expert_indices.as_mut(),
                weights: expert_weights.as_mut(),
                tokens: tokens as u32,
                experts: self.experts as u32,
                top_k: top_k as u32,
                scoring,
                groups: groups.map_or(0, |groups| groups.count as u32),
                keep: groups.map_or(0, |groups| groups.keep as u32),
                renormalize: renormalize.into(),
                scale,
            },
        )
    }
}

/// Rows of x times the weights of their experts, for layers that weight inputs instead of outputs.
#[derive(Clone, Debug)]
pub struct ScaleRows {
    device: DeviceHandle,
    hidden: usize,
    experts: usize,
    top_k: usize,
}

impl ScaleRows {
    /// Readies the kernel. Errors name `hidden`, `num_experts` or `top_k`.
    pub fn new(device: &DeviceHandle, hidden: usize, experts: usize, top_k: usize) -> Result<Self> {
        check_range("hidden", hidden, MAX_WIDTH)?;
        check_range("num_experts", experts, MAX_EXPERTS)?;
        check_range("top_k", top_k, MAX_TOP_K)?;
        device.prepare(kernels::scale_rows::scale_rows_bf16.into(), 0)?;
        Ok(ScaleRows { device: device.clone(), hidden, experts, top_k })
    }

    /// Enqueues `out[t·top_k + s] = bf16(x[t]·w[t, s])`, [M·top_k, hidden]; a row whose id is outside 0..E is +0. Errors name `tokens`, `x`,
    /// `topk_ids`, `topk_weights` or `out`.
    pub fn launch(
        &self,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        tokens: usize,
        out: &Buffer<u16>,
    ) -> Result<()> {
        let (device, pairs) = (&self.device, check_pairs(tokens, self.top_k)?);
        x.check("x", device, tokens * self.hidden)?;
        topk_ids.check("topk_ids", device, pairs)?;
        topk_weights.check("topk_weights", device, pairs)?;
        out.check("out", device, pairs * self.hidden)?;
        if tokens == 0 {
            return Ok(());
        }
        let columns = if self.hidden.is_multiple_of(8) { 8 } else { 1 };
        let kernel = kernels::scale_rows::scale_rows_bf16;
        let resident = (device.properties().multiprocessors * 8) as usize;
        let blocks = (pairs * (self.hidden / columns)).div_ceil(kernel.threads as usize).min(resident) as u32;
        launch(
            &**device,
            kernel,
            Grid { blocks, shared_bytes: 0 },
            kernels::scale_rows::Args {
                x: x.as_ref(),
                ids: topk_ids.as_ref(),
                weights: topk_weights.as_ref(),
                out: out.as_mut(),
                tokens: tokens as u32,
                top_k: self.top_k as u32,
                experts: self.experts as u32,
                hidden: self.hidden as u32,
            },
        )
    }
}
