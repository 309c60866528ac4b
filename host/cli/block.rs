//! A whole mixture-of-experts block as `run` computes it: router, routed experts, shared expert, on the CPU and on devices.

use megamoe::checkpoint::{Experts, MoeWeights, SharedWeights};
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::formats::{DenseExperts, Fp4Experts, RouterWeights};
use megamoe::grouped_layer::{GroupedInputs, GroupedLayer, GroupedPlan};
use megamoe::layer::{Hidden, Inputs, Layer};
use megamoe::ops::router::RouterGemm;
use megamoe::ops::topk::{Logits, TopK};
use megamoe::ops::unpermute::{self, SharedExpert, SharedGate};
use megamoe::plan::Plan;
use megamoe::reference::{self, Fp4View, LayerInputs, LayerResult, Mode, Status};
use megamoe::workspace::Workspace;
use megamoe::{Gating, GroupedArithmetic, GroupedOptions, LayerOptions, LayerShape, Result, XType};

/// What is computed.
pub struct Block {
    pub shape: LayerShape,
    experts: Experts,
    gating: Gating,
    /// Decides on ids and weights; without it the batch does.
    router: Option<RouterWeights>,
    /// Added to the sum of the routed experts.
    shared: Option<Shared>,
    /// Whether FP8 experts get e4m3 activations.
    quantise: bool,
}

struct Shared {
    /// A set of one expert.
    expert: Experts,
    /// bf16 [hidden].
    gate: Option<Vec<u16>>,
}

/// Hidden states, and the ids and weights to use where there is no router.
#[derive(Clone, Copy)]
pub struct BlockInputs<'a> {
    pub tokens: usize,
    pub x: &'a [u16],
    pub topk_ids: &'a [i32],
    pub topk_weights: &'a [f32],
}

/// Output, and the ids and weights that it came from.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockResult {
    pub layer: LayerResult,
    pub topk_ids: Vec<i32>,
    pub topk_weights: Vec<f32>,
}

impl Block {
    /// The parts of `weights` that are asked for, as far as there are any.
    pub fn new(weights: MoeWeights, with_router: bool, with_shared: bool, quantise: bool) -> Result<Self> {
        let MoeWeights { shape, experts, router, shared, gating, .. } = weights;
        let gate = |gate: Option<&[u16]>| gate.map(<[u16]>::to_vec);
        let shared = shared.filter(|_| with_shared).map(|weights| {
            let gate = gate(weights.gate());
            let expert = match weights {
                SharedWeights::Fp4 { expert, .. } => Experts::Fp4(expert),
                SharedWeights::Dense(shared) => {
                    let all = vec![shared.expert];
                    Experts::Dense(DenseExperts::new(shape.hidden, shared.intermediate, shape.output, all)?)
                }
            };
            Ok(Shared { expert, gate })
        });
        Ok(Block {
            shape,
            experts,
            gating,
            router: router.filter(|_| with_router),
            shared: shared.transpose()?,
            quantise,
        })
    }

    /// Whether the shared expert takes part.
    pub fn has_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Whether activations of some experts are e4m3.
    pub fn quantises(&self) -> bool {
        let shared = self.shared.iter().map(|shared| &shared.expert);
        let mut all = std::iter::once(&self.experts).chain(shared);
        all.any(|experts| matches!(experts, Experts::Dense(dense) if self.grouped(dense).arithmetic == GroupedArithmetic::W8a8))
    }

    /// FP4 experts whose result is the block's, to which a bound applies.
    pub fn only_fp4(&self) -> Option<(Fp4View<'_>, LayerOptions)> {
        match (&self.experts, &self.shared) {
            (Experts::Fp4(experts), None) => Some((view(experts, self.shape.top_k), self.fp4(experts))),
            _ => None,
        }
    }

    fn fp4(&self, experts: &Fp4Experts) -> LayerOptions {
        LayerOptions { format: experts.format(), gating: self.gating, ..Default::default() }
    }

    fn grouped(&self, experts: &DenseExperts) -> GroupedOptions {
        let arithmetic = match GroupedArithmetic::of(experts.format()) {
            GroupedArithmetic::W8a8 if !self.quantise => GroupedArithmetic::W8a16,
            arithmetic => arithmetic,
        };
        GroupedOptions { arithmetic, gating: self.gating }
    }

    fn experts_on_cpu(&self, experts: &Experts, top_k: usize, inputs: &LayerInputs<'_>) -> Result<LayerResult> {
        match experts {
            Experts::Fp4(experts) => reference::layer(&view(experts, top_k), &self.fp4(experts), inputs, Mode::Exact),
            Experts::Dense(experts) => reference::grouped_layer(experts, None, top_k, &self.grouped(experts), inputs),
        }
    }

    /// The exact reference.
    pub fn on_cpu(&self, inputs: &BlockInputs<'_>) -> Result<BlockResult> {
        let LayerShape { hidden, experts, top_k, .. } = self.shape;
        let BlockInputs { tokens, x, .. } = *inputs;
        let (topk_ids, topk_weights) = match &self.router {
            Some(router) => {
                let logits = reference::router_gemm(x, &router.weight, router.bias.as_deref(), hidden)?;
                let chosen = reference::topk(&logits, experts, router.correction_bias.as_deref(), &router.routing)?;
                (chosen.ids, chosen.weights)
            }
            None => (inputs.topk_ids.to_vec(), inputs.topk_weights.to_vec()),
        };
        let with = |ids: &[i32], weights: &[f32], experts: &Experts, top_k: usize| {
            let inputs = LayerInputs { tokens, x, x_type: XType::Bf16, topk_ids: ids, topk_w: weights };
            self.experts_on_cpu(experts, top_k, &inputs)
        };
        let mut layer = with(&topk_ids, &topk_weights, &self.experts, top_k)?;
        if let Some(Shared { expert, gate }) = &self.shared {
            let shared = with(&vec![0; tokens], &vec![1.0; tokens], expert, 1)?;
            let gate = reference::shared_gate(x, gate.as_deref(), hidden)?;
            layer.out = reference::blend(&layer.out, &shared.out, &gate)?;
        }
        Ok(BlockResult { layer, topk_ids, topk_weights })
    }

    /// Everything uploaded and ready.
    pub fn on(&self, device: &DeviceHandle, inputs: &BlockInputs<'_>) -> Result<OnDevice> {
        let LayerShape { hidden, output, experts, top_k, .. } = self.shape;
        let tokens = inputs.tokens;
        unpermute::prepare(device)?;
        let optional = |values: &Option<Vec<f32>>| values.as_ref().map(|v| Buffer::from_slice(device, v)).transpose();
        let router = self.router.as_ref().map(|router| {
            Ok(RouterOnDevice {
                gemm: RouterGemm::new(device, hidden, experts)?,
                topk: TopK::new(device, experts, router.routing)?,
                weight: Buffer::from_slice(device, &router.weight)?,
                bias: optional(&router.bias)?,
                correction_bias: optional(&router.correction_bias)?,
                logits: Buffer::new(device, tokens * experts)?,
            })
        });
        let shared = self.shared.as_ref().map(|Shared { expert, gate }| {
            Ok(SharedOnDevice {
                expert: self.experts_on(device, expert, 1, tokens)?,
                gate: gate.as_ref().map(|gate| Buffer::from_slice(device, gate)).transpose()?,
                ids: Buffer::from_slice(device, &vec![0; tokens])?,
                weights: Buffer::from_slice(device, &vec![1.0; tokens])?,
                out: Buffer::new(device, tokens * output)?,
            })
        });
        let on = OnDevice {
            shape: self.shape,
            tokens,
            router: router.transpose()?,
            shared: shared.transpose()?,
            experts: self.experts_on(device, &self.experts, top_k, tokens)?,
            x: Buffer::from_slice(device, inputs.x)?,
            topk_ids: Buffer::new(device, tokens * top_k)?,
            topk_weights: Buffer::new(device, tokens * top_k)?,
            out: Buffer::new(device, tokens * output)?,
        };
        if self.router.is_none() {
            on.topk_ids.upload(inputs.topk_ids)?;
            on.topk_weights.upload(inputs.topk_weights)?;
        }
        // An output that a kernel leaves alone shows up as NaN.
        on.out.fill(0xff)?;
        Ok(on)
    }

    fn experts_on(
        &self,
        device: &DeviceHandle,
        experts: &Experts,
        top_k: usize,
        tokens: usize,
    ) -> Result<ExpertsOnDevice> {
        Ok(match experts {
            Experts::Fp4(experts) => {
                let layer = Layer::new(device, experts, top_k, self.fp4(experts))?;
                let plan = layer.plan(tokens)?;
                ExpertsOnDevice::Fp4 { workspace: Workspace::new(device, &plan)?, layer, plan }
            }
            Experts::Dense(experts) => {
                let layer = GroupedLayer::new(device, experts, top_k, self.grouped(experts))?;
                let plan = Box::new(layer.plan(tokens)?);
                ExpertsOnDevice::Dense { workspace: Workspace::for_grouped(device, &plan)?, layer, plan }
            }
        })
    }
}

fn view(experts: &Fp4Experts, top_k: usize) -> Fp4View<'_> {
    Fp4View {
        shape: experts.shape().with_top_k(top_k),
        format: experts.format(),
        w13: experts.w13(),
        s13: experts.s13().bytes(),
        alpha1: experts.alpha1(),
        b13: experts.b13(),
        w2: experts.w2(),
        s2: experts.s2().bytes(),
        alpha2: experts.alpha2(),
        b2: experts.b2(),
    }
}

/// A block and a batch on a device.
pub struct OnDevice {
    shape: LayerShape,
    tokens: usize,
    router: Option<RouterOnDevice>,
    shared: Option<SharedOnDevice>,
    experts: ExpertsOnDevice,
    x: Buffer<u16>,
    topk_ids: Buffer<i32>,
    topk_weights: Buffer<f32>,
    out: Buffer<u16>,
}

struct RouterOnDevice {
    gemm: RouterGemm,
    topk: TopK,
    weight: Buffer<u16>,
    bias: Option<Buffer<f32>>,
    correction_bias: Option<Buffer<f32>>,
    logits: Buffer<f32>,
}

struct SharedOnDevice {
    expert: ExpertsOnDevice,
    gate: Option<Buffer<u16>>,
    ids: Buffer<i32>,
    weights: Buffer<f32>,
    out: Buffer<u16>,
}

enum ExpertsOnDevice {
    Fp4 { layer: Layer, plan: Plan, workspace: Workspace },
    Dense { layer: GroupedLayer, plan: Box<GroupedPlan>, workspace: Workspace },
}

impl ExpertsOnDevice {
    fn forward(
        &self,
        tokens: usize,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        out: &Buffer<u16>,
    ) -> Result<()> {
        match self {
            ExpertsOnDevice::Fp4 { layer, plan, workspace } => {
                let inputs = Inputs { tokens, x: Hidden::Bf16(x), topk_ids, topk_weights };
                layer.forward(plan, workspace, inputs, out)
            }
            ExpertsOnDevice::Dense { layer, plan, workspace } => {
                let inputs = GroupedInputs { tokens, x, topk_ids, topk_weights };
                layer.forward(plan, workspace, inputs, out)
            }
        }
    }

    fn take_status(&self) -> Result<Status> {
        let (ExpertsOnDevice::Fp4 { workspace, .. } | ExpertsOnDevice::Dense { workspace, .. }) = self;
        let status = workspace.take_status()?;
        Ok(Status { bad_id: status.bad_expert_id, f16_range: status.f16_range })
    }
}

impl OnDevice {
    /// Enqueues the block.
    pub fn forward(&self) -> Result<()> {
        let OnDevice { tokens, x, topk_ids, topk_weights, out, .. } = self;
        let tokens = *tokens;
        if let Some(RouterOnDevice { gemm, topk, weight, bias, correction_bias, logits }) = &self.router {
            gemm.launch(x, weight, bias.as_ref(), tokens, logits)?;
            topk.launch(Logits::F32(logits), correction_bias.as_ref(), tokens, topk_ids, topk_weights)?;
        }
        self.experts.forward(tokens, x, topk_ids, topk_weights, out)?;
        if let Some(shared) = &self.shared {
            shared.expert.forward(tokens, x, &shared.ids, &shared.weights, &shared.out)?;
            let gate = shared.gate.as_ref().map(|gate_w| SharedGate { x, gate_w, hidden: self.shape.hidden });
            let shared = SharedExpert { shared: &shared.out, gate };
            unpermute::blend(out.device(), tokens, self.shape.output, out, shared, out)?;
        }
        Ok(())
    }

    /// Waits, and takes the result.
    pub fn take(&self) -> Result<BlockResult> {
        let layer = LayerResult { out: self.out.download()?, status: self.experts.take_status()? };
        Ok(BlockResult { layer, topk_ids: self.topk_ids.download()?, topk_weights: self.topk_weights.download()? })
    }
}
