//! The table of whole layers with FP8 and BF16 experts.

use super::decode::Batch;
use super::gemm::GemmShape;
use super::recorded::recorded_grouped;
use super::timing::{ROTATION, noise, time};
use crate::device::{Buffer, DeviceHandle, Gpu};
use crate::diff::Random;
use crate::error::Result;
use crate::grouped_layer::{GroupedInputs, GroupedLayer, Matrices};
use crate::ops::ExpertTable;
use crate::types::{Gating, GroupedArithmetic, GroupedOptions, LayerShape};
use crate::workspace::Workspace;
use kernels_gpu::bandwidth;
use serde::Serialize;
use std::sync::Arc;

/// Calls in one graph, up to 128 tokens and beyond.
const CALLS: [usize; 2] = [12, 2];

/// What to measure.
#[derive(Clone, Debug)]
pub struct GroupedBenchOptions {
    /// Layers.
    pub shapes: Vec<GemmShape>,
    /// Numbers of tokens.
    pub tokens: Vec<usize>,
    /// Operands of the GEMMs.
    pub arithmetics: Vec<GroupedArithmetic>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct GroupedRow {
    /// Layer.
    pub shape: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// "w8a8", "w8a16" or "bf16".
    pub arithmetic: &'static str,
    /// "same", "own" or "fused": the plan's own choice.
    pub tiles: &'static str,
    /// Microseconds of a layer, from bf16 hidden states and top-k ids to bf16 output.
    pub microseconds: f32,
    /// Mean number of distinct experts.
    pub experts: f32,
    /// Bytes of the active experts' weights and scales.
    pub bytes: f64,
    /// TFLOP/s of the rows that count.
    pub tflops: f32,
    /// Recorded microseconds of another implementation with the same weights.
    pub recorded_microseconds: Option<f32>,
    /// Its name.
    pub recorded_name: Option<&'static str>,
}

/// Bytes of an expert's weights and scales.
fn bytes_per_expert(shape: &LayerShape, arithmetic: GroupedArithmetic) -> usize {
    let matrix = shape.hidden * shape.intermediate;
    3 * match arithmetic {
        GroupedArithmetic::Bf16 => 2 * matrix,
        _ => matrix + 4 * shape.hidden.div_ceil(128) * shape.intermediate.div_ceil(128),
    }
}

/// A layer of noise.
fn random_layer(
    device: &DeviceHandle,
    shape: LayerShape,
    arithmetic: GroupedArithmetic,
    seed: u32,
) -> Result<GroupedLayer> {
    let LayerShape { hidden, intermediate, experts, .. } = shape;
    let elements = experts * hidden * intermediate;
    let matrices = |i: u32| -> Result<Matrices> {
        if arithmetic == GroupedArithmetic::Bf16 {
            let values = Arc::new(noise::<u16>(device, elements, seed + i, bandwidth::E4M3_SCALES)?);
            return Ok(Matrices::Bf16(ExpertTable::split("weights", values, experts)?));
        }
        let codes = Arc::new(noise::<u8>(device, elements, seed + i, bandwidth::E4M3_SCALES)?);
        let scales = vec![1.0 / 64.0; experts * hidden.div_ceil(128) * intermediate.div_ceil(128)];
        let scales = Arc::new(Buffer::from_slice(device, &scales)?);
        Ok(Matrices::Fp8 {
            codes: ExpertTable::split("weights", codes, experts)?,
            scales: ExpertTable::split("b_scale", scales, experts)?,
        })
    };
    let options = GroupedOptions { arithmetic, gating: Gating::default() };
    GroupedLayer::from_matrices(device, shape, options, [matrices(0)?, matrices(1)?, matrices(2)?], None)
}

/// Measures everything in `options`; `report` sees each row as it is done. As in the decode table each call of a graph has its own hidden
/// states and routing, and sets of weights rotate, so that the L2 cache is cold.
pub fn grouped(
    gpu: &Arc<Gpu>,
    options: &GroupedBenchOptions,
    mut report: impl FnMut(&GroupedRow),
) -> Result<Vec<GroupedRow>> {
    let device: DeviceHandle = gpu.clone();
    let mut rows = Vec::new();
    for bench in &options.shapes {
        let GemmShape { hidden, intermediate, experts, top_k, .. } = *bench;
        let shape = LayerShape { hidden, intermediate, output: hidden, experts, top_k };
        for &arithmetic in &options.arithmetics {
            let mut layers = vec![random_layer(&device, shape, arithmetic, 1)?];
            for &tokens in &options.tokens {
                let calls = CALLS[usize::from(tokens > 128)];
                let mut random = Random(tokens as u64);
                let batches = (0..calls)
                    .map(|_| Batch::draw(&device, &shape, tokens, Default::default(), &mut random))
                    .collect::<Result<Vec<_>>>()?;
                let active = batches.iter().map(|batch| batch.experts).sum::<usize>() as f32 / calls as f32;
                let bytes = f64::from(active) * bytes_per_expert(&shape, arithmetic) as f64;
                let sets = ((ROTATION as f64 / bytes).ceil() as usize + 1).clamp(2, calls);
                while layers.len() < sets {
                    layers.push(random_layer(&device, shape, arithmetic, 1 + 3 * layers.len() as u32)?);
                }
                let plan = layers[0].plan(tokens)?;
                let plans = layers.iter().map(|layer| layer.plan(tokens)).collect::<Result<Vec<_>>>()?;
                let workspace = Workspace::for_grouped(&device, &plan)?;
                let out = Buffer::<u16>::new(&device, tokens * hidden)?;
                let microseconds = time(gpu, calls, || {
                    batches.iter().enumerate().try_for_each(|(i, batch)| {
                        let Batch { x, topk_ids, topk_weights, .. } = batch;
                        let inputs = GroupedInputs { tokens, x, topk_ids, topk_weights };
                        layers[i % sets].forward(&plans[i % sets], &workspace, inputs, &out)
                    })
                })?;
                let weights = if arithmetic == GroupedArithmetic::Bf16 { "bf16" } else { "fp8" };
                let recorded = recorded_grouped(bench.name, weights, tokens);
                let row = GroupedRow {
                    shape: bench.name,
                    tokens,
                    arithmetic: arithmetic.name(),
                    tiles: plan.tiles().name(),
                    microseconds,
                    experts: active,
                    bytes,
                    tflops: 6.0 * (tokens * top_k * hidden) as f32 * intermediate as f32 / microseconds / 1e6,
                    recorded_microseconds: recorded.map(|(us, _)| us),
                    recorded_name: recorded.map(|(_, name)| name),
                };
                report(&row);
                rows.push(row);
            }
        }
    }
    Ok(rows)
}
