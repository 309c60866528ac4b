//! `moe_gate_topk_fused` and `gate_logits`: a router whose weights are NVFP4.

use super::topk::{Logits, TopK, check_pairs, check_range, check_top_k};
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::plan::{MAX_EXPERTS, MAX_WIDTH};
use crate::types::{Routing, Scoring};
use kernels_gpu::gate_topk as kernels;
use kernels_gpu::topk::scoring;

/// NVFP4 weights [E, K] of a router on a device.
#[derive(Clone, Copy, Debug)]
pub struct GateWeights<'a> {
    /// Codes [E, K/2], the even element in the low nibble.
    pub codes: &'a Buffer<u8>,
    /// e4m3 scales [E, K/16], row after row.
    pub scales: &'a Buffer<u8>,
    /// Factor of the whole matrix, finite.
    pub scale2: f32,
}

impl GateWeights<'_> {
    fn check(&self, device: &DeviceHandle, hidden: usize, experts: usize) -> Result<()> {
        self.codes.check_exact("codes", device, experts * (hidden / 2))?;
        self.scales.check_exact("scales", device, experts * (hidden / 16))?;
        if self.scale2.is_finite() { Ok(()) } else { Err(Error::argument("scale2", self.scale2, "a finite number")) }
    }
}

/// Logits of an NVFP4 router.
#[derive(Clone, Debug)]
pub struct GateLogits {
    device: DeviceHandle,
    hidden: usize,
    experts: usize,
}

impl GateLogits {
    /// Readies the kernels. Errors name `hidden` (a multiple of 16 up to 2^20) or `num_experts` (1 to 4096).
    pub fn new(device: &DeviceHandle, hidden: usize, experts: usize) -> Result<Self> {
        check_range("hidden", hidden, MAX_WIDTH)?;
        if !hidden.is_multiple_of(16) {
            return Err(Error::argument("hidden", hidden, "a multiple of 16"));
        }
        check_range("num_experts", experts, MAX_EXPERTS)?;
        for kernel in kernels::gate_logits::KERNELS {
            device.prepare((*kernel).into(), 0)?;
        }
        Ok(GateLogits { device: device.clone(), hidden, experts })
    }

    /// Enqueues logits [M, E] of x [M, K]. Errors name `tokens`, `x`, `codes`, `scales`, `scale2` or `logits`.
    pub fn launch(&self, x: &Buffer<u16>, weights: GateWeights<'_>, tokens: usize, logits: &Buffer<f32>) -> Result<()> {
        let GateLogits { device, hidden, experts } = self;
        check_pairs(tokens, 1)?;
        x.check("x", device, tokens * hidden)?;
        weights.check(device, *hidden, *experts)?;
        logits.check("logits", device, tokens * experts)?;
        if tokens == 0 {
            return Ok(());
        }
        let (kernel, of_warp) = match tokens {
            0..4 => (kernels::gate_logits::gate_logits_tokens1, 1),
            _ => (kernels::gate_logits::gate_logits_tokens4, kernels::TOKENS as usize),
        };
        let blocks = (tokens.div_ceil(of_warp) * experts).div_ceil(kernels::WARPS as usize).min(1 << 20) as u32;
        launch(
            &**device,
            kernel,
            Grid { blocks, shared_bytes: 0 },
            kernels::gate_logits::Args {
                x: x.as_ref(),
                codes: weights.codes.part(0, weights.codes.len() / 8).into(),
                scales: weights.scales.as_ref(),
                logits: logits.as_mut(),
                scale2: weights.scale2,
                tokens: tokens as u32,
                experts: *experts as u32,
                blocks: (hidden / 16) as u32,
            },
        )
    }
}

/// Experts and weights of tokens by an NVFP4 router.
#[derive(Clone, Debug)]
pub struct GateTopK {
    logits: GateLogits,
    choice: TopK,
    scoring: u32,
}

impl GateTopK {
    /// Readies the kernels. Weights are the softmax over the chosen logits where `normalize`, else exp(v - v of slot 0). Errors name
    /// `hidden`, `num_experts` or `top_k`.
    pub fn new(device: &DeviceHandle, hidden: usize, experts: usize, top_k: usize, normalize: bool) -> Result<Self> {
        check_top_k(top_k, experts)?;
        let logits = GateLogits::new(device, hidden, experts)?;
        let scoring = Scoring::SelectedSoftmax;
        let choice =
            TopK::new(device, experts, Routing { scoring, top_k, renormalize: normalize, groups: None, scale: 1.0 })?;
        device.prepare(kernels::gate_topk::moe_gate_topk_fused.into(), kernels::shared_bytes(experts as u32))?;
        let scoring = if normalize { scoring::SELECTED_SOFTMAX } else { scoring::SELECTED_EXP };
        Ok(GateTopK { logits, choice, scoring })
    }

    /// Enqueues ids and weights, [M, top_k] each, in one launch with one block a token. Errors name `tokens`, `x`, `codes`, `scales`,
    /// `scale2`, `expert_indices` or `expert_weights`.
    pub fn launch(
        &self,
        x: &Buffer<u16>,
        weights: GateWeights<'_>,
        tokens: usize,
        expert_indices: &Buffer<i32>,
        expert_weights: &Buffer<f32>,
    ) -> Result<()> {
        let GateLogits { device, hidden, experts } = &self.logits;
        let top_k = self.choice.routing().top_k;
        let pairs = check_pairs(tokens, top_k)?;
        x.check("x", device, tokens * hidden)?;
        weights.check(device, *hidden, *experts)?;
        expert_indices.check("expert_indices", device, pairs)?;
        expert_weights.check("expert_weights", device, pairs)?;
        let grid = Grid { blocks: tokens.min(1 << 20) as u32, shared_bytes: kernels::shared_bytes(*experts as u32) };
        launch(
            &**device,
            kernels::gate_topk::moe_gate_topk_fused,
            grid,
            kernels::gate_topk::Args {
                x: x.as_ref(),
                codes: weights.codes.part(0, weights.codes.len() / 8).into(),
                scales: weights.scales.as_ref(),
                ids: expert_indices.as_mut(),
                weights: expert_weights.as_mut(),
                scale2: weights.scale2,
                tokens: tokens as u32,
                experts: *experts as u32,
                blocks: (hidden / 16) as u32,
                top_k: top_k as u32,
                scoring: self.scoring,
            },
        )
    }

    /// The same bits in two launches, of which the first spreads the experts of a token over the whole device, which is faster.
    /// `logits` is scratch memory, [M, E]. Errors as for [`GateTopK::launch`], and name `logits`.
    pub fn launch_in_two(
        &self,
        x: &Buffer<u16>,
        weights: GateWeights<'_>,
        tokens: usize,
        logits: &Buffer<f32>,
        expert_indices: &Buffer<i32>,
        expert_weights: &Buffer<f32>,
    ) -> Result<()> {
        // What the second launch needs is checked before the first.
        let pairs = check_pairs(tokens, self.choice.routing().top_k)?;
        expert_indices.check("expert_indices", &self.logits.device, pairs)?;
        expert_weights.check("expert_weights", &self.logits.device, pairs)?;
        self.logits.launch(x, weights, tokens, logits)?;
        self.choice.enqueue(self.scoring, Logits::F32(logits), None, tokens, expert_indices, expert_weights)
    }
}
