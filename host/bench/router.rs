//! The router table: projections in both orders, and the choice of experts.

use super::recorded::{RECORDED_TOPK, ROUTER_TOKENS};
use super::timing::{noise, normal, normal_bf16, sets, time};
use crate::device::{Buffer, DeviceHandle, Gpu};
use crate::error::Result;
use crate::ops::gate_topk::{GateTopK, GateWeights};
use crate::ops::router::{RouterGemm, RouterGemmStrict};
use crate::ops::topk::{Logits, TopK};
use crate::types::{Routing, Scoring};
use kernels_gpu::bandwidth;
use serde::Serialize;
use std::sync::Arc;

/// Calls in a graph, at least and at most.
const CALLS: (usize, usize) = (3, 48);
/// Experts of a token.
const TOP_K: usize = 8;

/// What to measure.
#[derive(Clone, Debug)]
pub struct RouterOptions {
    /// Operations.
    pub operations: Vec<RouterOperation>,
    /// Numbers of tokens.
    pub tokens: Vec<usize>,
    /// Numbers of experts.
    pub experts: Vec<usize>,
    /// Hidden sizes, of the projections.
    pub hidden: Vec<usize>,
}

impl Default for RouterOptions {
    fn default() -> Self {
        RouterOptions {
            operations: RouterOperation::ALL.to_vec(),
            tokens: ROUTER_TOKENS.to_vec(),
            experts: vec![128, 256],
            hidden: vec![2048, 4096, 7168],
        }
    }
}

/// An operation of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterOperation {
    /// f32 logits from 32 partial sums.
    RouterGemm,
    /// bf16 logits, one sum over ascending k.
    RouterGemmStrict,
    /// NVFP4 weights: logits, choice and weights in one launch.
    MoeGateTopkFused,
    /// Softmax top-k of f32 logits, renormalised.
    TopkF32,
    /// Softmax top-k of bf16 logits, renormalised.
    TopkBf16,
}

impl RouterOperation {
    /// All of them.
    pub const ALL: [RouterOperation; 5] = [
        RouterOperation::RouterGemm,
        RouterOperation::RouterGemmStrict,
        RouterOperation::MoeGateTopkFused,
        RouterOperation::TopkF32,
        RouterOperation::TopkBf16,
    ];

    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            RouterOperation::RouterGemm => "router_gemm",
            RouterOperation::RouterGemmStrict => "router_gemm_strict",
            RouterOperation::MoeGateTopkFused => "moe_gate_topk_fused",
            RouterOperation::TopkF32 => "topk_f32",
            RouterOperation::TopkBf16 => "topk_bf16",
        }
    }

    /// Whether it has a hidden size.
    pub const fn has_hidden(self) -> bool {
        !matches!(self, RouterOperation::TopkF32 | RouterOperation::TopkBf16)
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RouterRow {
    /// Operation.
    pub operation: RouterOperation,
    /// Number of experts.
    pub experts: usize,
    /// Hidden size; 0 where the operation has none.
    pub hidden: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Microseconds of a call.
    pub microseconds: f32,
    /// Bytes read and written, each once.
    pub bytes: f64,
    /// Products and additions.
    pub operations: f64,
    /// Recorded microseconds of vLLM's operation, where there are any.
    pub recorded: Option<f32>,
}

/// Measures everything in `options`; `report` sees each row as it is done. Each call of a graph has inputs of its own.
pub fn router(gpu: &Arc<Gpu>, options: &RouterOptions, mut report: impl FnMut(&RouterRow)) -> Result<Vec<RouterRow>> {
    let device: DeviceHandle = gpu.clone();
    let mut rows = Vec::new();
    for &operation in &options.operations {
        let none = [0];
        for &hidden in if operation.has_hidden() { &options.hidden[..] } else { &none } {
            for &experts in &options.experts {
                for &tokens in &options.tokens {
                    let (microseconds, bytes) = match operation {
                        RouterOperation::RouterGemm | RouterOperation::RouterGemmStrict => {
                            projection(gpu, operation, tokens, experts, hidden)?
                        }
                        RouterOperation::MoeGateTopkFused => fused(gpu, &device, tokens, experts, hidden)?,
                        RouterOperation::TopkF32 | RouterOperation::TopkBf16 => {
                            choice(gpu, &device, operation == RouterOperation::TopkBf16, tokens, experts)?
                        }
                    };
                    let row = RouterRow {
                        operation,
                        experts,
                        hidden,
                        tokens,
                        microseconds,
                        bytes: bytes as f64,
                        operations: 2.0 * (tokens * experts * hidden) as f64,
                        recorded: recorded(operation, experts, tokens),
                    };
                    report(&row);
                    rows.push(row);
                }
            }
        }
    }
    Ok(rows)
}

fn recorded(operation: RouterOperation, experts: usize, tokens: usize) -> Option<f32> {
    let column = ROUTER_TOKENS.iter().position(|&t| t == tokens)?;
    let row = RECORDED_TOPK.iter().find(|row| row.operation == operation.name() && row.experts == experts)?;
    Some(row.microseconds[column])
}

/// Microseconds of a call and its bytes.
fn projection(
    gpu: &Arc<Gpu>,
    operation: RouterOperation,
    tokens: usize,
    experts: usize,
    hidden: usize,
) -> Result<(f32, usize)> {
    let device: DeviceHandle = gpu.clone();
    let inputs = 2 * (tokens + experts) * hidden;
    let calls = sets(inputs, CALLS.0, CALLS.1);
    let x = normal_bf16(tokens * hidden, 1.0, 1);
    let w = normal_bf16(experts * hidden, 0.02, 2);
    let sets = (0..calls)
        .map(|_| Ok((Buffer::from_slice(&device, &x)?, Buffer::from_slice(&device, &w)?)))
        .collect::<Result<Vec<_>>>()?;
    let outputs = tokens * experts;
    if operation == RouterOperation::RouterGemm {
        let op = RouterGemm::new(&device, hidden, experts)?;
        let logits = Buffer::<f32>::new(&device, outputs)?;
        let us = time(gpu, calls, || sets.iter().try_for_each(|(x, w)| op.launch(x, w, None, tokens, &logits)))?;
        Ok((us, inputs + 4 * outputs))
    } else {
        let op = RouterGemmStrict::new(&device, hidden, experts)?;
        let logits = Buffer::<u16>::new(&device, outputs)?;
        let us = time(gpu, calls, || sets.iter().try_for_each(|(x, w)| op.launch(x, w, tokens, &logits)))?;
        Ok((us, inputs + 2 * outputs))
    }
}

/// Microseconds of a call and its bytes.
fn fused(gpu: &Arc<Gpu>, device: &DeviceHandle, tokens: usize, experts: usize, hidden: usize) -> Result<(f32, usize)> {
    let (codes, scales) = (experts * hidden / 2, experts * hidden / 16);
    let inputs = 2 * tokens * hidden + codes + scales;
    let calls = sets(inputs, CALLS.0, CALLS.1);
    let x = normal_bf16(tokens * hidden, 1.0, 1);
    let sets = (0..calls as u32)
        .map(|set| {
            // `noise` rounds lengths up, and the operation wants them exact.
            let exact = |len, bytes_are| {
                Buffer::from_slice(device, &noise::<u8>(device, len, set, bytes_are)?.download()?[..len])
            };
            Ok((Buffer::from_slice(device, &x)?, exact(codes, bandwidth::ANY)?, exact(scales, bandwidth::E4M3_SCALES)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let op = GateTopK::new(device, hidden, experts, TOP_K, true)?;
    let ids = Buffer::<i32>::new(device, tokens * TOP_K)?;
    let weights = Buffer::<f32>::new(device, tokens * TOP_K)?;
    let us = time(gpu, calls, || {
        sets.iter().try_for_each(|(x, codes, scales)| {
            let of_router = GateWeights { codes, scales, scale2: 1.0 / 64.0 };
            op.launch(x, of_router, tokens, &ids, &weights)
        })
    })?;
    Ok((us, inputs + 8 * tokens * TOP_K))
}

/// Microseconds of a call and its bytes.
fn choice(gpu: &Arc<Gpu>, device: &DeviceHandle, narrow: bool, tokens: usize, experts: usize) -> Result<(f32, usize)> {
    let len = tokens * experts;
    let inputs = len * if narrow { 2 } else { 4 };
    let calls = sets(inputs, CALLS.0, CALLS.1);
    let routing = Routing { scoring: Scoring::Softmax, top_k: TOP_K, renormalize: true, groups: None, scale: 1.0 };
    let op = TopK::new(device, experts, routing)?;
    let ids = Buffer::<i32>::new(device, tokens * TOP_K)?;
    let weights = Buffer::<f32>::new(device, tokens * TOP_K)?;
    let us = if narrow {
        let values = normal_bf16(len, 2.0, 3);
        let sets = (0..calls).map(|_| Buffer::from_slice(device, &values)).collect::<Result<Vec<_>>>()?;
        time(gpu, calls, || {
            sets.iter().try_for_each(|logits| op.launch(Logits::Bf16(logits), None, tokens, &ids, &weights))
        })?
    } else {
        let values = normal(len, 2.0, 3);
        let sets = (0..calls).map(|_| Buffer::from_slice(device, &values)).collect::<Result<Vec<_>>>()?;
        time(gpu, calls, || {
            sets.iter().try_for_each(|logits| op.launch(Logits::F32(logits), None, tokens, &ids, &weights))
        })?
    };
    Ok((us, inputs + 8 * tokens * TOP_K))
}
