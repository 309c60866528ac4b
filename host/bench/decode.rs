//! The decode table.

use super::recorded::{BenchShape, TOKENS};
use super::timing::{ROTATION, noise, normal_bf16, time};
use crate::device::{Buffer, DeviceHandle, Gpu, Grid, launch};
use crate::diff::Random;
use crate::error::Result;
use crate::layer::{BiasBuffers, Hidden, Inputs, Layer, Stage, WeightLengths};
use crate::ops::router::RouterGemm;
use crate::ops::topk::{Logits, TopK};
use crate::plan::{Plan, choose_variant, variants};
use crate::types::{Activation, LayerOptions, LayerShape, Order, Routing, Scoring, WeightFormat};
use crate::workspace::Workspace;
use kernels_gpu::bandwidth;
use serde::Serialize;
use std::sync::Arc;

/// Calls in one graph.
const CALLS: usize = 12;

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DrawnRouting {
    /// Every expert alike.
    #[default]
    Uniform,
    /// Expert e with a weight of 1 / (e + 1).
    Zipf,
    /// Always the first top-k experts.
    Crowded,
}

impl DrawnRouting {
    /// All of them.
    pub const ALL: [DrawnRouting; 3] = [DrawnRouting::Uniform, DrawnRouting::Zipf, DrawnRouting::Crowded];

    /// Its name in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            DrawnRouting::Uniform => "uniform",
            DrawnRouting::Zipf => "zipf",
            DrawnRouting::Crowded => "crowded",
        }
    }

    /// The `slot`-th choice of a token, which may have been made before.
    fn expert(self, experts: usize, slot: usize, random: &mut Random) -> usize {
        match self {
            DrawnRouting::Uniform => random.next() as usize % experts,
            DrawnRouting::Crowded => slot,
            DrawnRouting::Zipf => {
                let total: f32 = (1..=experts).map(|rank| 1.0 / rank as f32).sum();
                let mut left = random.in_range(0.0, total);
                let below = |e: &usize| {
                    left -= 1.0 / (e + 1) as f32;
                    left < 0.0
                };
                (0..experts).find(below).unwrap_or(experts - 1)
            }
        }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct DecodeOptions {
    /// Layers.
    pub shapes: Vec<BenchShape>,
    /// Numbers of tokens.
    pub tokens: Vec<usize>,
    /// Activations.
    pub activations: Vec<Activation>,
    /// Orders of the sums.
    pub orders: Vec<Order>,
    /// Measure every variant of a plan, not only its own choice.
    pub variants: bool,
    /// Also time each kernel alone.
    pub stages: bool,
    /// How tokens choose their experts.
    pub routing: DrawnRouting,
    /// Let a BF16 router and its softmax top-k choose them instead, as part of the layer.
    pub router: bool,
    /// Seed of routings and data.
    pub seed: u64,
}

/// Microseconds of each kernel alone.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StageTimes {
    /// Routing table and reordered activations.
    pub route_prep: f32,
    /// First projection.
    pub fc1: f32,
    /// Second projection.
    pub fc2: f32,
    /// Sum over experts.
    pub combine: f32,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeRow {
    /// Shape.
    pub shape: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// "bf16" or "f16".
    pub activation: &'static str,
    /// Order of the sums.
    pub order: String,
    /// Variant of the plan.
    pub variant: String,
    /// Whether a layer uses this by default.
    pub default: bool,
    /// Microseconds of a layer, from bf16 hidden states and top-k ids (or, with a router, hidden states alone) to bf16 output.
    pub microseconds: f32,
    /// Mean number of distinct experts.
    pub experts: f32,
    /// Bytes of the active experts' codes and scales.
    pub bytes: f64,
    /// Kernels alone, where asked for.
    pub stages: Option<StageTimes>,
}

/// Time of a read-only kernel over cold memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReadRow {
    /// Bytes read.
    pub bytes: usize,
    /// Microseconds, launch included.
    pub microseconds: f32,
}

/// Times a read-only kernel at three sizes. A slow card shows here.
pub fn read_floor(gpu: &Arc<Gpu>) -> Result<Vec<ReadRow>> {
    let device: DeviceHandle = gpu.clone();
    let kernel = bandwidth::read::read_bytes;
    device.prepare(kernel.into(), 0)?;
    let sink = Buffer::<u32>::new(&device, 1)?;
    let memory = noise::<u8>(&device, 2 << 30, 1, bandwidth::ANY)?;
    let mut rows = Vec::new();
    for megabytes in [21, 85, 512] {
        let blocks = megabytes * 1_000_000 / bandwidth::BLOCK_BYTES;
        let bytes = blocks * bandwidth::BLOCK_BYTES;
        let regions = (memory.len() / bytes).min(CALLS);
        let grid = Grid { blocks: blocks as u32, shared_bytes: 0 };
        let microseconds = time(gpu, regions, || {
            (0..regions).try_for_each(|i| {
                let from = memory.part::<u8>(i * bytes, bytes).into();
                launch(&*device, kernel, grid, bandwidth::read::Args { from, sink: sink.as_mut() })
            })
        })?;
        rows.push(ReadRow { bytes, microseconds });
    }
    Ok(rows)
}

/// One call's inputs.
pub(super) struct Batch {
    pub(super) x: Buffer<u16>,
    pub(super) topk_ids: Buffer<i32>,
    pub(super) topk_weights: Buffer<f32>,
    /// Distinct experts.
    pub(super) experts: usize,
}

impl Batch {
    /// Normal-looking hidden states, `top_k` distinct experts a token, weights 1 / top_k.
    pub(super) fn draw(
        device: &DeviceHandle,
        shape: &LayerShape,
        tokens: usize,
        routing: DrawnRouting,
        random: &mut Random,
    ) -> Result<Self> {
        let x: Vec<u16> = (0..tokens * shape.hidden)
            .map(|_| {
                let sum: f32 = (0..4).map(|_| random.in_range(-1.0, 1.0)).sum();
                half::bf16::from_f32(sum).to_bits()
            })
            .collect();
        let mut used = vec![false; shape.experts];
        let mut ids = Vec::with_capacity(tokens * shape.top_k);
        for _ in 0..tokens {
            let first = ids.len();
            while ids.len() - first < shape.top_k {
                let id = routing.expert(shape.experts, ids.len() - first, random) as i32;
                if !ids[first..].contains(&id) {
                    ids.push(id);
                    used[id as usize] = true;
                }
            }
        }
        Ok(Batch {
            x: Buffer::from_slice(device, &x)?,
            topk_weights: Buffer::from_slice(device, &vec![1.0 / shape.top_k as f32; ids.len()])?,
            topk_ids: Buffer::from_slice(device, &ids)?,
            experts: used.iter().filter(|&&used| used).count(),
        })
    }
}

fn random_layer(device: &DeviceHandle, bench: &BenchShape, shape: LayerShape, seed: u32) -> Result<Layer> {
    let &BenchShape { format, gating, biases, .. } = bench;
    let len = WeightLengths::of(&shape, format)?;
    // Keeps gate, up and the output near 1.
    let alpha = |width: usize| match format {
        WeightFormat::Nvfp4 => 0.5 / (width as f32).sqrt(),
        WeightFormat::Mxfp4 => 1.0,
    };
    let scales = match format {
        WeightFormat::Nvfp4 => bandwidth::E4M3_SCALES,
        WeightFormat::Mxfp4 => bandwidth::E8M0_SCALES,
    };
    let bias = |len: usize| biases.then(|| Buffer::from_slice(device, &vec![0.25; len])).transpose();
    Layer::from_buffers(
        shape,
        LayerOptions { format, gating, ..Default::default() },
        noise(device, len.w13, seed, bandwidth::ANY)?,
        noise(device, len.s13, seed + 1, scales)?,
        Buffer::from_slice(device, &vec![alpha(shape.hidden); len.alpha1])?,
        noise(device, len.w2, seed + 2, bandwidth::ANY)?,
        noise(device, len.s2, seed + 3, scales)?,
        Buffer::from_slice(device, &vec![alpha(shape.intermediate); len.alpha2])?,
        BiasBuffers { b13: bias(len.b13)?, b2: bias(len.b2)? },
    )
}

/// Chooses the experts of each call's tokens, with weights of its own for each.
struct Router {
    gemm: RouterGemm,
    topk: TopK,
    weights: Vec<Buffer<u16>>,
    logits: Buffer<f32>,
}

impl Router {
    fn new(device: &DeviceHandle, shape: &LayerShape, tokens: usize) -> Result<Self> {
        let LayerShape { hidden, experts, top_k, .. } = *shape;
        let routing = Routing { scoring: Scoring::Softmax, top_k, renormalize: true, groups: None, scale: 1.0 };
        let weights = |call| Buffer::from_slice(device, &normal_bf16(experts * hidden, 0.02, call));
        Ok(Router {
            gemm: RouterGemm::new(device, hidden, experts)?,
            topk: TopK::new(device, experts, routing)?,
            weights: (0..CALLS as u64).map(weights).collect::<Result<_>>()?,
            logits: Buffer::new(device, tokens * experts)?,
        })
    }

    /// Fills in `batch`'s ids and weights.
    fn launch(&self, call: usize, tokens: usize, batch: &Batch) -> Result<()> {
        self.gemm.launch(&batch.x, &self.weights[call], None, tokens, &self.logits)?;
        self.topk.launch(Logits::F32(&self.logits), None, tokens, &batch.topk_ids, &batch.topk_weights)
    }

    /// Runs once for each batch, and counts again how many experts are distinct.
    fn choose(&self, tokens: usize, batches: &mut [Batch]) -> Result<()> {
        for (call, batch) in batches.iter_mut().enumerate() {
            self.launch(call, tokens, batch)?;
            let mut ids = batch.topk_ids.download()?;
            ids.sort_unstable();
            ids.dedup();
            batch.experts = ids.len();
        }
        Ok(())
    }
}

/// Measures everything in `options`; `report` sees each row as it is done.
pub fn decode(gpu: &Arc<Gpu>, options: &DecodeOptions, mut report: impl FnMut(&DecodeRow)) -> Result<Vec<DecodeRow>> {
    let device: DeviceHandle = gpu.clone();
    let mut rows = Vec::new();
    for bench in &options.shapes {
        let shape = LayerShape {
            hidden: bench.hidden,
            intermediate: bench.intermediate,
            output: bench.hidden,
            experts: bench.experts,
            top_k: bench.top_k,
        };
        let mut layers = vec![random_layer(&device, bench, shape, 1)?];
        let per_expert = layers[0].bytes_per_expert();
        for &tokens in &options.tokens {
            let mut random = Random(options.seed + tokens as u64);
            let mut batches = (0..CALLS)
                .map(|_| Batch::draw(&device, &shape, tokens, options.routing, &mut random))
                .collect::<Result<Vec<_>>>()?;
            let router = if options.router { Some(Router::new(&device, &shape, tokens)?) } else { None };
            if let Some(router) = &router {
                router.choose(tokens, &mut batches)?;
            }
            let experts = batches.iter().map(|batch| batch.experts).sum::<usize>() as f32 / CALLS as f32;
            let active = experts as f64 * per_expert as f64;
            let sets = ((ROTATION as f64 / active).ceil() as usize + 1).clamp(2, CALLS);
            while layers.len() < sets {
                layers.push(random_layer(&device, bench, shape, 1 + 4 * layers.len() as u32)?);
            }
            let out = Buffer::<u16>::new(&device, tokens * shape.output)?;
            for &activation in &options.activations {
                for &order in &options.orders {
                    let usual = LayerOptions { format: bench.format, gating: bench.gating, ..Default::default() };
                    let arithmetic = LayerOptions { activation, order, ..usual };
                    let layers =
                        layers.iter().map(|layer| layer.with_options(arithmetic)).collect::<Result<Vec<_>>>()?;
                    let own = choose_variant(&shape, tokens, device.properties());
                    let variants = if options.variants { variants(&arithmetic, tokens) } else { vec![own] };
                    for variant in variants {
                        let plan = Plan::with_variant(&device, shape, arithmetic, tokens, variant)?;
                        let workspace = Workspace::new(&device, &plan)?;
                        let call = |router: Option<&Router>, stages: &[Stage]| {
                            batches.iter().enumerate().try_for_each(|(i, batch)| {
                                if let Some(router) = router {
                                    router.launch(i, tokens, batch)?;
                                }
                                let (topk_ids, topk_weights) = (&batch.topk_ids, &batch.topk_weights);
                                let inputs = Inputs { tokens, x: Hidden::Bf16(&batch.x), topk_ids, topk_weights };
                                layers[i % sets].enqueue(&plan, &workspace, inputs, &out, stages)
                            })
                        };
                        let microseconds = time(gpu, CALLS, || call(router.as_ref(), &Stage::ALL))?;
                        let alone = |stage| time(gpu, CALLS, || call(None, &[stage]));
                        let stages = match options.stages {
                            true => Some(StageTimes {
                                route_prep: alone(Stage::RoutePrep)?,
                                fc1: alone(Stage::Fc1)?,
                                fc2: alone(Stage::Fc2)?,
                                combine: alone(Stage::Combine)?,
                            }),
                            false => None,
                        };
                        let row = DecodeRow {
                            shape: bench.name,
                            tokens,
                            activation: if activation == Activation::Bf16 { "bf16" } else { "f16" },
                            order: order.to_string(),
                            variant: variant.name(order),
                            default: arithmetic == usual && variant == own,
                            microseconds,
                            experts,
                            bytes: active,
                            stages,
                        };
                        report(&row);
                        rows.push(row);
                    }
                }
            }
        }
    }
    Ok(rows)
}

impl BenchShape {
    /// Index of `tokens` in the recorded figures.
    pub fn column(tokens: usize) -> Option<usize> {
        TOKENS.iter().position(|&t| t == tokens)
    }
}
