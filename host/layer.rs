//! A layer on a device: weights uploaded once, plans that know their workspace, and the forward pass.

use crate::device::{Buffer, DeviceHandle, launch};
use crate::error::{Error, Result};
use crate::formats::fp4::check_f16_scales;
use crate::formats::{Fp4Experts, SwizzledScales};
use crate::plan::Plan;
use crate::types::{Activation, Gating, LayerOptions, LayerShape, Order, WeightFormat, XType};
use crate::workspace::Workspace;
use cuda_std::kernel::DeviceRef;
use kernels_gpu::{combine, direct, fc1, fc2, route_prep};
use std::sync::Arc;

/// Hidden states on a device, row-major [M, hidden].
#[derive(Clone, Copy, Debug)]
pub enum Hidden<'a> {
    /// bf16 bits.
    Bf16(&'a Buffer<u16>),
    /// f16 bits; needs [`crate::Activation::F16`].
    F16(&'a Buffer<u16>),
}

impl Hidden<'_> {
    fn x_type(self) -> XType {
        match self {
            Hidden::Bf16(_) => XType::Bf16,
            Hidden::F16(_) => XType::F16,
        }
    }
}

/// What one forward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Number of tokens M, at most the plan's. 0 does nothing.
    pub tokens: usize,
    /// Hidden states, M rows.
    pub x: Hidden<'a>,
    /// [M, top_k] expert ids. A pair whose id is outside 0..E is skipped; an id >= E also sets a status bit.
    pub topk_ids: &'a Buffer<i32>,
    /// [M, top_k] weights, as they multiply the experts' outputs.
    pub topk_weights: &'a Buffer<f32>,
}

/// The routed experts of a layer, on a device. One copy of the weights, in the layout that checkpoints' runtimes publish:
/// w13 rows are [up; gate], scales are 128x4-swizzled.
#[derive(Clone, Debug)]
pub struct Layer {
    shape: LayerShape,
    options: LayerOptions,
    weights: Arc<Weights>,
}

#[derive(Debug)]
struct Weights {
    device: DeviceHandle,
    w13: Buffer<u8>,
    s13: Buffer<u8>,
    alpha1: Buffer<f32>,
    b13: Option<Buffer<f32>>,
    w2: Buffer<u8>,
    s2: Buffer<u8>,
    alpha2: Buffer<f32>,
    b2: Option<Buffer<f32>>,
}

/// Biases of a layer that is made from buffers; `None` for none.
#[derive(Debug, Default)]
pub struct BiasBuffers {
    /// [E, 2I] f32 in the order of the rows of w13: up, then gate.
    pub b13: Option<Buffer<f32>>,
    /// [E, H] f32.
    pub b2: Option<Buffer<f32>>,
}

impl Layer {
    /// Uploads `experts`. Errors name `top_k` or an option: `format` if it is not that of the experts, `limit`, `alpha`; or `s13`
    /// or `s2` if activations are f16 and MXFP4 scales outside their range ([`Fp4Experts::check_f16`]). Otherwise the experts
    /// are valid by construction.
    pub fn new(device: &DeviceHandle, experts: &Fp4Experts, top_k: usize, options: LayerOptions) -> Result<Self> {
        let shape = experts.shape().with_top_k(top_k);
        crate::plan::check(&shape, &options)?;
        check_format(options.format, experts.format())?;
        if options.activation == Activation::F16 {
            experts.check_f16()?;
        }
        let biases = |biases: Option<&[f32]>| biases.map(|biases| Buffer::from_slice(device, biases)).transpose();
        let alpha1: &[f32] = experts.alpha1().as_flattened();
        let weights = Weights {
            device: device.clone(),
            w13: Buffer::from_slice(device, experts.w13())?,
            s13: Buffer::from_slice(device, experts.s13().bytes())?,
            alpha1: Buffer::from_slice(device, alpha1)?,
            b13: biases(experts.b13())?,
            w2: Buffer::from_slice(device, experts.w2())?,
            s2: Buffer::from_slice(device, experts.s2().bytes())?,
            alpha2: Buffer::from_slice(device, experts.alpha2())?,
            b2: biases(experts.b2())?,
        };
        Ok(Layer { shape, options, weights: Arc::new(weights) })
    }

    /// From buffers that are on the device already, in the format of `options`. Errors name the buffer and the needed and given
    /// length; a longer one is refused too, as its experts would lie elsewhere. MXFP4 needs alphas of 1. With it and f16 activations
    /// the scales are read back and checked as in [`Layer::new`].
    #[allow(clippy::too_many_arguments)]
    pub fn from_buffers(
        shape: LayerShape,
        options: LayerOptions,
        w13: Buffer<u8>,
        s13: Buffer<u8>,
        alpha1: Buffer<f32>,
        w2: Buffer<u8>,
        s2: Buffer<u8>,
        alpha2: Buffer<f32>,
        biases: BiasBuffers,
    ) -> Result<Self> {
        crate::plan::check(&shape, &options)?;
        let needed = WeightLengths::of(&shape, options.format)?;
        let BiasBuffers { b13, b2 } = biases;
        let device = w13.device().clone();
        w13.check_exact("w13", &device, needed.w13)?;
        s13.check_exact("s13", &device, needed.s13)?;
        alpha1.check_exact("alpha1", &device, needed.alpha1)?;
        w2.check_exact("w2", &device, needed.w2)?;
        s2.check_exact("s2", &device, needed.s2)?;
        alpha2.check_exact("alpha2", &device, needed.alpha2)?;
        for (name, buffer, needed) in [("b13", &b13, needed.b13), ("b2", &b2, needed.b2)] {
            if let Some(buffer) = buffer {
                buffer.check_exact(name, &device, needed)?;
            }
        }
        let weights = Weights { device, w13, s13, alpha1, b13, w2, s2, alpha2, b2 };
        let layer = Layer { shape, options, weights: Arc::new(weights) };
        layer.check_f16(options)?;
        Ok(layer)
    }

    /// The same weights with another arithmetic. Errors are those of [`Layer::from_buffers`].
    pub fn with_options(&self, options: LayerOptions) -> Result<Self> {
        crate::plan::check(&self.shape, &options)?;
        check_format(options.format, self.options.format)?;
        if self.options.activation != options.activation {
            self.check_f16(options)?;
        }
        Ok(Layer { options, ..self.clone() })
    }

    /// `Err` naming `s13` or `s2` where the weights on the device cannot be used with f16 activations, if `options` ask for them.
    fn check_f16(&self, options: LayerOptions) -> Result<()> {
        if (options.format, options.activation) != (WeightFormat::Mxfp4, Activation::F16) {
            return Ok(());
        }
        let LayerShape { hidden, intermediate, output, experts, .. } = self.shape;
        let block = options.format.block();
        for (name, scales, rows, cols) in [
            ("s13", &self.weights.s13, 2 * intermediate, hidden / block),
            ("s2", &self.weights.s2, output, intermediate / block),
        ] {
            let scales = SwizzledScales::from_bytes(name, scales.download()?, experts, rows, cols)?;
            check_f16_scales(options.format, name, &scales)?;
        }
        Ok(())
    }

    /// Dimensions.
    pub fn shape(&self) -> LayerShape {
        self.shape
    }

    /// Arithmetic.
    pub fn options(&self) -> LayerOptions {
        self.options
    }

    /// Bytes of codes and scales of one expert.
    pub fn bytes_per_expert(&self) -> usize {
        let Weights { w13, s13, w2, s2, .. } = &*self.weights;
        (w13.len() + s13.len() + w2.len() + s2.len()) / self.shape.experts
    }

    /// A plan for up to `max_tokens` tokens.
    pub fn plan(&self, max_tokens: usize) -> Result<Plan> {
        Plan::new(&self.weights.device, self.shape, self.options, max_tokens)
    }

    /// Enqueues the layer: out[M, output] bf16. Allocates nothing and waits for nothing, so it can be captured in a graph, which
    /// may be replayed with other tokens, routings and weights of experts in the same buffers. (Whoever writes MXFP4 scales there
    /// keeps them in the range of f16 activations: they are checked when the layer is made.)
    ///
    /// All arguments are checked before anything is launched. Errors name the argument: `tokens` above the plan's, a buffer that
    /// is too short or of another device, a workspace of another plan.
    pub fn forward(&self, plan: &Plan, workspace: &Workspace, inputs: Inputs<'_>, out: &Buffer<u16>) -> Result<()> {
        self.enqueue(plan, workspace, inputs, out, &Stage::ALL)
    }

    /// As [`Layer::forward`], but only some of its kernels, to time them alone. Each stage reads what the ones before it left in the
    /// workspace.
    pub fn enqueue(
        &self,
        plan: &Plan,
        workspace: &Workspace,
        inputs: Inputs<'_>,
        out: &Buffer<u16>,
        stages: &[Stage],
    ) -> Result<()> {
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        let tokens = inputs.tokens;
        plan.check_layer(&self.shape, &self.options)?;
        if tokens > plan.max_tokens() {
            return Err(Error::argument(
                "tokens",
                tokens,
                format!("at most {}, the plan's maximum", plan.max_tokens()),
            ));
        }
        let (x, prep_kernel) = plan.prep_kernel(inputs.x)?;
        let pairs = tokens * top_k;
        let owner = &self.weights.device;
        x.check("x", owner, tokens * hidden)?;
        inputs.topk_ids.check("topk_ids", owner, pairs)?;
        inputs.topk_weights.check("topk_weights", owner, pairs)?;
        out.check("out", owner, tokens * output)?;
        workspace.memory().check("workspace", owner, plan.workspace_bytes())?;
        if tokens == 0 {
            return Ok(());
        }

        let weights = &*self.weights;
        let device = &*weights.device;
        let table = plan.table(workspace);
        let variant = plan.variant(tokens);
        let order = match self.options.order {
            Order::Seed { .. } => route_prep::SEED,
            Order::Decode => route_prep::DECODE,
        };
        let (gating, factor) = match self.options.gating {
            Gating::Silu { .. } => (fc1::SILU, 1.0),
            Gating::SwigluOai { alpha, .. } => (fc1::SWIGLU_OAI, alpha),
        };
        let limit = self.options.gating.limit().unwrap_or(f32::INFINITY);
        if plan.is_direct(variant) {
            let (fc1_grid, fc2_grid) = plan.direct_launches(tokens);
            for stage in stages {
                match stage {
                    // Two kernels do it all.
                    Stage::RoutePrep | Stage::Combine => {}
                    Stage::Fc1 => launch(
                        device,
                        plan.fc1_direct(inputs.x.x_type()),
                        fc1_grid,
                        direct::fc1_direct::Args {
                            topk_ids: inputs.topk_ids.as_ref(),
                            x: x.as_ref(),
                            w13: weights.w13.as_ref(),
                            s13: weights.s13.as_ref(),
                            alpha1: weights.alpha1.as_ref(),
                            b13: or_null(&weights.b13),
                            h: table.h,
                            status: table.status,
                            tokens: tokens as u32,
                            top_k: top_k as u32,
                            experts: experts as u32,
                            hidden: hidden as u32,
                            intermediate: intermediate as u32,
                            gating,
                            factor,
                            limit,
                        },
                    )?,
                    Stage::Fc2 => launch(
                        device,
                        plan.fc2_direct(),
                        fc2_grid,
                        direct::fc2_direct::Args {
                            topk_ids: inputs.topk_ids.as_ref(),
                            topk_weights: inputs.topk_weights.as_ref(),
                            h: table.h.into(),
                            w2: weights.w2.as_ref(),
                            s2: weights.s2.as_ref(),
                            alpha2: weights.alpha2.as_ref(),
                            b2: or_null(&weights.b2),
                            out: out.as_mut(),
                            tokens: tokens as u32,
                            top_k: top_k as u32,
                            experts: experts as u32,
                            intermediate: intermediate as u32,
                            output: output as u32,
                        },
                    )?,
                }
            }
            return Ok(());
        }
        let size = plan.launches(tokens);
        for stage in stages {
            match stage {
                Stage::RoutePrep => launch(
                    device,
                    prep_kernel,
                    size.route_prep,
                    route_prep::route_prep::Args {
                        topk_ids: inputs.topk_ids.as_ref(),
                        topk_weights: inputs.topk_weights.as_ref(),
                        alpha1: weights.alpha1.as_ref(),
                        alpha2: weights.alpha2.as_ref(),
                        x: x.as_ref(),
                        entry_count: table.entry_count,
                        entries: table.entries,
                        slots: table.slots,
                        x_permuted: table.x_permuted,
                        h: table.h,
                        status: table.status,
                        tokens: tokens as u32,
                        top_k: top_k as u32,
                        experts: experts as u32,
                        hidden: hidden as u32,
                        intermediate: intermediate as u32,
                        warps: size.counting_warps,
                        groups: size.groups,
                        order,
                    },
                )?,
                Stage::Fc1 => launch(
                    device,
                    plan.fc1_kernel(variant),
                    size.fc1,
                    fc1::fc1::Args {
                        entry_count: table.entry_count.into(),
                        entries: table.entries.into(),
                        slots: table.slots.into(),
                        x: table.x_permuted.into(),
                        w13: weights.w13.as_ref(),
                        s13: weights.s13.as_ref(),
                        b13: or_null(&weights.b13),
                        h: table.h,
                        status: table.status,
                        hidden: hidden as u32,
                        intermediate: intermediate as u32,
                        gating,
                        factor,
                        limit,
                    },
                )?,
                Stage::Fc2 => launch(
                    device,
                    plan.fc2_kernel(variant),
                    size.fc2,
                    fc2::fc2::Args {
                        entry_count: table.entry_count.into(),
                        entries: table.entries.into(),
                        slots: table.slots.into(),
                        h: table.h.into(),
                        w2: weights.w2.as_ref(),
                        s2: weights.s2.as_ref(),
                        b2: or_null(&weights.b2),
                        y: table.y,
                        intermediate: intermediate as u32,
                        output: output as u32,
                    },
                )?,
                Stage::Combine => launch(
                    device,
                    combine::combine::combine_f32_bf16,
                    size.combine,
                    combine::combine::Args {
                        topk_ids: inputs.topk_ids.as_ref(),
                        y: DeviceRef::from(table.y),
                        out: out.as_mut(),
                        tokens: tokens as u32,
                        top_k: top_k as u32,
                        experts: experts as u32,
                        output: output as u32,
                    },
                )?,
            }
        }
        Ok(())
    }
}

fn or_null(buffer: &Option<Buffer<f32>>) -> DeviceRef<'_, f32> {
    buffer.as_ref().map_or(DeviceRef::null(), Buffer::as_ref)
}

fn check_format(given: WeightFormat, needed: WeightFormat) -> Result<()> {
    if given == needed {
        return Ok(());
    }
    Err(Error::argument("format", given, format!("{needed}, the experts' own")))
}

/// One kernel of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Routing table and reordered activations.
    RoutePrep,
    /// First projection, gate and up joined.
    Fc1,
    /// Second projection.
    Fc2,
    /// Sum over experts.
    Combine,
}

impl Stage {
    /// A whole pass, in order.
    pub const ALL: [Stage; 4] = [Stage::RoutePrep, Stage::Fc1, Stage::Fc2, Stage::Combine];
}

/// Lengths of the weight buffers of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightLengths {
    /// Codes [E, 2I, K/2].
    pub w13: usize,
    /// Swizzled scales of w13.
    pub s13: usize,
    /// [E, 2].
    pub alpha1: usize,
    /// Biases [E, 2I], where there are any.
    pub b13: usize,
    /// Codes [E, H, I/2].
    pub w2: usize,
    /// Swizzled scales of w2.
    pub s2: usize,
    /// `[E]`.
    pub alpha2: usize,
    /// Biases [E, H], where there are any.
    pub b2: usize,
}

impl WeightLengths {
    /// For a layer of `shape` whose weights are in `format`. An error where a length overflows.
    pub fn of(shape: &LayerShape, format: WeightFormat) -> Result<Self> {
        use kernels_gpu::layout::scale::swizzled_len;
        let LayerShape { hidden, intermediate, output, experts, .. } = *shape;
        let each = |name, bytes: usize| {
            bytes
                .checked_mul(experts)
                .ok_or_else(|| Error::argument("experts", experts, format!("a size of `{name}` below 2^64")))
        };
        Ok(WeightLengths {
            w13: each("w13", 2 * intermediate * (hidden / 2))?,
            s13: each("s13", swizzled_len(2 * intermediate, hidden / format.block()))?,
            alpha1: 2 * experts,
            b13: each("b13", 2 * intermediate)?,
            w2: each("w2", output * (intermediate / 2))?,
            s2: each("s2", swizzled_len(output, intermediate / format.block()))?,
            alpha2: experts,
            b2: each("b2", output)?,
        })
    }
}
