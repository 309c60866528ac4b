//! A layer with FP8 or BF16 experts on a device: single operations, one after the other, in one workspace.
//!
//! Sort by expert -> work-list -> gate and up GEMM -> gated activation -> work-list -> down GEMM -> weighted sum. With
//! [`GroupedArithmetic::W8a8`] x is quantised once a token, and what joins gate and up is quantised for the down GEMM.
//! [`crate::reference::grouped_layer`] gives the bits.

use crate::device::{Buffer, DeviceHandle, Element, Grid, Properties, View};
use crate::dry_run::DryRun;
use crate::error::{Error, Result, check_len};
use crate::formats::{DenseExpert, DenseExperts, DenseMatrix};
use crate::ops::gemm::{Activations, GateUpSilu, GateUpSiluArgs, GemmArgs, GemmKernel, GroupedGemm, Tiles, Weights};
use crate::ops::silu_mul::{GateUp, Quantised, SiluMul};
use crate::ops::sort::{SortInputs, SortOutputs, SortSizes};
use crate::ops::unpermute::{self, Routed};
use crate::ops::worklist::{self, Items, WorklistInputs};
use crate::ops::{Addresses, ExpertTable, Rows, quant};
use crate::plan::{MAX_PAIRS, MAX_TOP_K, MAX_WIDTH};
use crate::types::{Gating, GroupedArithmetic, GroupedOptions, LayerShape};
use crate::workspace::{ALIGNMENT, Workspace};
use std::sync::Arc;

/// Kernels of the GEMMs with e4m3 activations. Every choice gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedTiles {
    /// One kernel for all; the only choice of the other arithmetics.
    Same,
    /// Tiles of one shape for gate and up and of another for down.
    Own,
    /// As `Own`, and gate, up, activation and quantiser in one kernel. Only for [`Gating::Silu`] without biases.
    Fused,
}

impl GroupedTiles {
    /// All of them.
    pub const ALL: [GroupedTiles; 3] = [GroupedTiles::Same, GroupedTiles::Own, GroupedTiles::Fused];

    /// Its name in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            GroupedTiles::Same => "same",
            GroupedTiles::Own => "own",
            GroupedTiles::Fused => "fused",
        }
    }
}

/// From so many pairs on fused gate and up run two blocks a multiprocessor.
const TWO_BLOCKS: usize = 3072;

/// Which tiles are best for up to `max_tokens` tokens.
fn choose_tiles(shape: &LayerShape, options: &GroupedOptions, biased: bool, max_tokens: usize) -> GroupedTiles {
    let fusible = !biased && matches!(options.gating, Gating::Silu { .. });
    match options.arithmetic {
        GroupedArithmetic::W8a16 | GroupedArithmetic::Bf16 => GroupedTiles::Same,
        // Few rows an expert are bound by the weights, which all kernels read once.
        GroupedArithmetic::W8a8 if max_tokens * shape.top_k < 8 * shape.experts => GroupedTiles::Same,
        GroupedArithmetic::W8a8 if fusible => GroupedTiles::Fused,
        GroupedArithmetic::W8a8 => GroupedTiles::Own,
    }
}

/// What one forward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct GroupedInputs<'a> {
    /// Number of tokens M, at most the plan's. 0 does nothing.
    pub tokens: usize,
    /// [M, hidden] bf16.
    pub x: &'a Buffer<u16>,
    /// [M, top_k] expert ids. A pair whose id is outside 0..E, or whose expert is not resident, is skipped; an id >= E also sets a
    /// status bit.
    pub topk_ids: &'a Buffer<i32>,
    /// [M, top_k] weights, as they multiply the experts' outputs.
    pub topk_weights: &'a Buffer<f32>,
}

/// One of the three matrices of all experts, on a device.
#[derive(Debug)]
pub(crate) enum Matrices {
    Bf16(ExpertTable<u16>),
    Fp8 { codes: ExpertTable<u8>, scales: ExpertTable<f32> },
}

#[derive(Debug)]
struct LayerWeights {
    device: DeviceHandle,
    gate: Matrices,
    up: Matrices,
    down: Matrices,
    /// Of gate, up and down.
    biases: Option<[Buffer<f32>; 3]>,
    silu: SiluMul,
}

/// The routed experts of a layer with FP8 or BF16 weights, on a device.
#[derive(Clone, Debug)]
pub struct GroupedLayer {
    shape: LayerShape,
    options: GroupedOptions,
    weights: Arc<LayerWeights>,
}

/// One after the other, without those that are not resident.
fn upload<'a, T: Element>(
    device: &DeviceHandle,
    resident: &[bool],
    len: usize,
    expert: impl Fn(usize) -> &'a [T],
) -> Result<ExpertTable<T>> {
    let experts = (0..resident.len()).filter(|&e| resident[e]).collect::<Vec<_>>();
    let buffer = Buffer::<T>::new(device, experts.len() * len)?;
    for (place, &e) in experts.iter().enumerate() {
        buffer.view::<T>(place * len * size_of::<T>(), len).upload(expert(e))?;
    }
    ExpertTable::packed(Arc::new(buffer), len, resident)
}

impl Matrices {
    fn new(
        device: &DeviceHandle,
        experts: &DenseExperts,
        resident: &[bool],
        matrix: fn(&DenseExpert) -> &DenseMatrix,
    ) -> Result<Self> {
        let experts = experts.experts();
        let values = |e: usize| match matrix(&experts[e]) {
            DenseMatrix::Bf16(values) => &values[..],
            DenseMatrix::Fp8 { .. } => &[],
        };
        let codes = |e: usize| match matrix(&experts[e]) {
            DenseMatrix::Fp8 { codes, .. } => &codes[..],
            DenseMatrix::Bf16(_) => &[],
        };
        let scales = |e: usize| match matrix(&experts[e]) {
            DenseMatrix::Fp8 { scales, .. } => &scales[..],
            DenseMatrix::Bf16(_) => &[],
        };
        // All experts have matrices of one format and size.
        Ok(match matrix(&experts[0]) {
            DenseMatrix::Bf16(first) => Matrices::Bf16(upload(device, resident, first.len(), values)?),
            DenseMatrix::Fp8 { codes: first, scales: of_first } => Matrices::Fp8 {
                codes: upload(device, resident, first.len(), codes)?,
                scales: upload(device, resident, of_first.len(), scales)?,
            },
        })
    }

    fn weights(&self) -> Weights<'_> {
        match self {
            Matrices::Bf16(table) => Weights::Bf16(table),
            Matrices::Fp8 { codes, scales } => Weights::E4m3 { codes, scales },
        }
    }

    fn addresses(&self) -> Addresses<'_> {
        match self {
            Matrices::Bf16(table) => table.into(),
            Matrices::Fp8 { codes, .. } => codes.into(),
        }
    }

    /// Codes and scales, of FP8 experts.
    fn fp8(&self) -> Option<(&ExpertTable<u8>, &ExpertTable<f32>)> {
        match self {
            Matrices::Fp8 { codes, scales } => Some((codes, scales)),
            Matrices::Bf16(_) => None,
        }
    }
}

/// Errors that name the first size outside its limits.
fn check_shape(shape: &LayerShape) -> Result<()> {
    for (name, value, most) in [
        ("experts", shape.experts, crate::plan::MAX_EXPERTS),
        ("top_k", shape.top_k, MAX_TOP_K),
        ("hidden", shape.hidden, MAX_WIDTH),
        ("intermediate", shape.intermediate, MAX_WIDTH),
        ("output", shape.output, MAX_WIDTH),
    ] {
        if !(1..=most).contains(&value) {
            return Err(Error::argument(name, value, format!("1 to {most}")));
        }
    }
    Ok(())
}

impl GroupedLayer {
    /// Uploads all experts. Errors name `top_k`, a size beyond the kernels' limits, or an option: `arithmetic` if it is for experts of
    /// another format, `limit`, `alpha`. Otherwise the experts are valid by construction.
    pub fn new(device: &DeviceHandle, experts: &DenseExperts, top_k: usize, options: GroupedOptions) -> Result<Self> {
        Self::with_resident(device, experts, top_k, options, &vec![true; experts.experts().len()])
    }

    /// Uploads only the experts that are `resident` `[E]`; pairs of the others are skipped, as other devices compute them.
    pub fn with_resident(
        device: &DeviceHandle,
        experts: &DenseExperts,
        top_k: usize,
        options: GroupedOptions,
        resident: &[bool],
    ) -> Result<Self> {
        let shape = experts.shape().with_top_k(top_k);
        check_shape(&shape)?;
        options.arithmetic.check(experts.format())?;
        options.gating.check()?;
        check_len("resident", resident.len(), shape.experts)?;
        let bias = |number: usize| {
            let biases = experts.experts().iter().filter_map(|expert| expert.biases.as_ref());
            Buffer::from_slice(device, &biases.flat_map(|biases| &biases[number]).copied().collect::<Vec<f32>>())
        };
        let biases = if experts.has_biases() { Some([bias(0)?, bias(1)?, bias(2)?]) } else { None };
        let weights = LayerWeights {
            device: device.clone(),
            gate: Matrices::new(device, experts, resident, |expert| &expert.gate)?,
            up: Matrices::new(device, experts, resident, |expert| &expert.up)?,
            down: Matrices::new(device, experts, resident, |expert| &expert.down)?,
            biases,
            silu: SiluMul::new(device, options.gating)?,
        };
        Ok(GroupedLayer { shape, options, weights: Arc::new(weights) })
    }

    /// A layer of gate, up and down, and their biases, that are on `device` already, in the format and of the sizes that options and
    /// shape ask for.
    pub(crate) fn from_matrices(
        device: &DeviceHandle,
        shape: LayerShape,
        options: GroupedOptions,
        [gate, up, down]: [Matrices; 3],
        biases: Option<[Buffer<f32>; 3]>,
    ) -> Result<Self> {
        let silu = SiluMul::new(device, options.gating)?;
        let weights = LayerWeights { device: device.clone(), gate, up, down, biases, silu };
        Ok(GroupedLayer { shape, options, weights: Arc::new(weights) })
    }

    /// Dimensions.
    pub fn shape(&self) -> LayerShape {
        self.shape
    }

    /// Arithmetic.
    pub fn options(&self) -> GroupedOptions {
        self.options
    }

    fn biased(&self) -> bool {
        self.weights.biases.is_some()
    }

    /// A plan for up to `max_tokens` tokens. Errors name `max_tokens`.
    pub fn plan(&self, max_tokens: usize) -> Result<GroupedPlan> {
        self.plan_with(max_tokens, choose_tiles(&self.shape, &self.options, self.biased(), max_tokens))
    }

    /// A plan with given tiles. The error names `tiles` where the layer has no such kernels.
    pub fn plan_with(&self, max_tokens: usize, tiles: GroupedTiles) -> Result<GroupedPlan> {
        GroupedPlan::new(self, max_tokens, tiles)
    }

    /// Enqueues the layer: out [M, output] bf16. Allocates nothing and waits for nothing, so it can be captured in a graph, which
    /// may be replayed with other tokens, routings and weights of experts in the same buffers.
    ///
    /// All arguments are checked before anything is launched. Errors name the argument: `plan` for another layer's, `tokens` above
    /// the plan's, a buffer that is too short or of another device, `workspace`.
    pub fn forward(
        &self,
        plan: &GroupedPlan,
        workspace: &Workspace,
        inputs: GroupedInputs<'_>,
        out: &Buffer<u16>,
    ) -> Result<()> {
        let (device, weights) = (&self.weights.device, &*self.weights);
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        let GroupedInputs { tokens, x, topk_ids, topk_weights } = inputs;
        plan.check_layer(self)?;
        if tokens > plan.max_tokens {
            let needed = format!("at most {}, the plan's maximum", plan.max_tokens);
            return Err(Error::argument("tokens", tokens, needed));
        }
        let pairs = tokens * top_k;
        x.check("x", device, tokens * hidden)?;
        topk_ids.check("topk_ids", device, pairs)?;
        topk_weights.check("topk_weights", device, pairs)?;
        out.check("out", device, tokens * output)?;
        workspace.memory().check("workspace", device, plan.workspace_bytes())?;
        if tokens == 0 {
            return Ok(());
        }

        let scratch = plan.scratch(workspace, tokens);
        let (gate_table, up_table) = (weights.gate.addresses(), weights.up.addresses());
        plan.sort.enqueue(
            SortInputs {
                tokens,
                ids: topk_ids,
                gate: Some(gate_table),
                up: Some(up_table),
                down: Some(weights.down.addresses()),
            },
            SortOutputs {
                expert_offsets: &scratch.expert_offsets,
                sorted_token_ids: &scratch.sorted_token_ids,
                sorted_pairs: &scratch.sorted_pairs,
                token_to_perm: &scratch.token_to_perm,
                status: &scratch.status,
            },
            &scratch.counts,
        )?;
        let list = |gate, up, (m_tile, n_tiles): (u32, u32)| {
            let (n_tiles, m_tile) = (n_tiles as usize, m_tile as usize);
            let expert_offsets = &*scratch.expert_offsets;
            let inputs = WorklistInputs { pairs, experts, expert_offsets, gate, up, n_tiles, m_tile };
            worklist::enqueue(device, Items::Wide, inputs, &scratch.worklist, &scratch.total)
        };
        let tiles = Tiles::Listed { worklist: &scratch.worklist, total: &scratch.total };
        let bias = |number: usize| weights.biases.as_ref().map(|biases| &biases[number]);
        let sorted_token_ids = Some(&*scratch.sorted_token_ids);

        let quantised = self.options.arithmetic == GroupedArithmetic::W8a8;
        if quantised {
            quant::enqueue(device, Rows::contiguous(x, hidden), tokens, hidden, &scratch.x_codes, &scratch.x_scales)?;
        }
        list(Some(gate_table), Some(up_table), plan.gate_up_tiles())?;
        if let (Some(fused), Some(gate), Some(up)) = (&plan.fused, weights.gate.fp8(), weights.up.fp8()) {
            fused.launch(GateUpSiluArgs {
                worklist: &scratch.worklist,
                total: &scratch.total,
                a: &scratch.x_codes,
                a_scale: &scratch.x_scales,
                a_rows: tokens,
                sorted_token_ids,
                gate: gate.0,
                gate_scale: gate.1,
                up: up.0,
                up_scale: up.1,
                limit: self.options.gating.limit(),
                out: &scratch.h_codes,
                out_scale: &scratch.h_scales,
                rows: pairs,
            })?;
        } else {
            let a = match quantised {
                false => Activations::Bf16(x),
                true => Activations::E4m3 { codes: &scratch.x_codes, scales: &scratch.x_scales },
            };
            let both = [(&weights.gate, 0, &scratch.gate), (&weights.up, 1, &scratch.up)];
            for (matrices, number, out) in both {
                plan.gate_up.launch(GemmArgs {
                    tiles,
                    a,
                    a_rows: tokens,
                    sorted_token_ids,
                    weights: matrices.weights(),
                    bias: bias(number),
                    out,
                    rows: pairs,
                })?;
            }
            let from = GateUp {
                gate: Rows::contiguous(&scratch.gate, intermediate),
                up: Rows::contiguous(&scratch.up, intermediate),
            };
            if quantised {
                let to = Quantised { codes: &scratch.h_codes, scales: &scratch.h_scales, copy: None };
                weights.silu.enqueue_quant(from, pairs, intermediate, to)?;
            } else {
                // In place: h is where gate was.
                weights.silu.enqueue(from, pairs, intermediate, &scratch.gate)?;
            }
        }

        list(Some(weights.down.addresses()), None, (plan.down.m_tile(), plan.down.n_tiles()))?;
        let a = match quantised {
            false => Activations::Bf16(&scratch.gate),
            true => Activations::E4m3 { codes: &scratch.h_codes, scales: &scratch.h_scales },
        };
        plan.down.launch(GemmArgs {
            tiles,
            a,
            a_rows: pairs,
            sorted_token_ids: None,
            weights: weights.down.weights(),
            bias: bias(2),
            out: &scratch.y,
            rows: pairs,
        })?;
        let routed = Routed {
            tokens,
            top_k,
            experts,
            output,
            y: &scratch.y,
            token_to_perm: &scratch.token_to_perm,
            weights: topk_weights,
            expert_offsets: &scratch.expert_offsets,
        };
        unpermute::reduce(device, routed, out)
    }
}

/// What a pass of a layer would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedDescription {
    /// Exact size of the workspace of a plan for so many tokens.
    pub workspace_bytes: usize,
    /// The plan's tiles.
    pub tiles: GroupedTiles,
    /// Kernels and grids of a pass, in order.
    pub launches: Vec<(&'static str, Grid)>,
}

/// What a pass of `tokens` tokens would be on a device with such properties, of a layer whose weights are nowhere; with biases if
/// `biased`. Errors name `tokens`, a size or an option, or `shared_bytes` where a kernel does not fit the device.
pub fn describe(
    properties: &Properties,
    shape: LayerShape,
    options: GroupedOptions,
    biased: bool,
    tokens: usize,
) -> Result<GroupedDescription> {
    check_shape(&shape)?;
    options.gating.check()?;
    let LayerShape { hidden, intermediate, output, experts, top_k } = shape;
    if tokens > MAX_PAIRS / top_k {
        let needed = format!("at most {} for top_k {top_k}", MAX_PAIRS / top_k);
        return Err(Error::argument("tokens", tokens, needed));
    }
    let dry = Arc::new(DryRun::new(properties.clone()));
    let device: DeviceHandle = dry.clone();
    let matrices = |rows: usize, cols: usize| -> Result<Matrices> {
        fn table<T: Element>(device: &DeviceHandle, experts: usize, len: usize) -> Result<ExpertTable<T>> {
            ExpertTable::split("weights", Arc::new(Buffer::new(device, experts * len)?), experts)
        }
        Ok(match options.arithmetic {
            GroupedArithmetic::Bf16 => Matrices::Bf16(table(&device, experts, rows * cols)?),
            GroupedArithmetic::W8a8 | GroupedArithmetic::W8a16 => Matrices::Fp8 {
                codes: table(&device, experts, rows * cols)?,
                scales: table(&device, experts, rows.div_ceil(128) * cols.div_ceil(128))?,
            },
        })
    };
    let biases = match biased {
        true => {
            let bias = |width: usize| Buffer::new(&device, experts * width);
            Some([bias(intermediate)?, bias(intermediate)?, bias(output)?])
        }
        false => None,
    };
    let all = [matrices(intermediate, hidden)?, matrices(intermediate, hidden)?, matrices(output, intermediate)?];
    let layer = GroupedLayer::from_matrices(&device, shape, options, all, biases)?;
    let plan = layer.plan(tokens)?;
    let workspace = Workspace::for_grouped(&device, &plan)?;
    let (x, out) = (Buffer::new(&device, tokens * hidden)?, Buffer::new(&device, tokens * output)?);
    let (topk_ids, topk_weights) = (Buffer::new(&device, tokens * top_k)?, Buffer::new(&device, tokens * top_k)?);
    dry.take();
    let inputs = GroupedInputs { tokens, x: &x, topk_ids: &topk_ids, topk_weights: &topk_weights };
    layer.forward(&plan, &workspace, inputs, &out)?;
    Ok(GroupedDescription { workspace_bytes: plan.workspace_bytes(), tiles: plan.tiles(), launches: dry.take() })
}

/// How a [`GroupedLayer`] runs for up to a number of tokens: ready kernels, and the parts of a workspace.
#[derive(Clone, Debug)]
pub struct GroupedPlan {
    device: DeviceHandle,
    shape: LayerShape,
    options: GroupedOptions,
    biased: bool,
    max_tokens: usize,
    tiles: GroupedTiles,
    sort: SortSizes,
    gate_up: GroupedGemm,
    fused: Option<GateUpSilu>,
    down: GroupedGemm,
    parts: Parts,
}

impl GroupedPlan {
    fn new(layer: &GroupedLayer, max_tokens: usize, tiles: GroupedTiles) -> Result<Self> {
        let (device, shape, options) = (&layer.weights.device, layer.shape, layer.options);
        let LayerShape { hidden, intermediate, output, experts, top_k } = shape;
        if max_tokens > MAX_PAIRS / top_k {
            let needed = format!("at most {} for top_k {top_k}", MAX_PAIRS / top_k);
            return Err(Error::argument("max_tokens", max_tokens, needed));
        }
        let fits = match tiles {
            GroupedTiles::Same => true,
            GroupedTiles::Own => options.arithmetic == GroupedArithmetic::W8a8,
            GroupedTiles::Fused => {
                let silu = matches!(options.gating, Gating::Silu { .. });
                options.arithmetic == GroupedArithmetic::W8a8 && silu && !layer.biased()
            }
        };
        if !fits {
            let needed = "Same, or a choice that this arithmetic, gating and biases have kernels for";
            return Err(Error::argument("tiles", format!("{tiles:?}"), needed));
        }
        let [of_gate_up, of_down] = match (options.arithmetic, tiles) {
            (GroupedArithmetic::Bf16, _) => [GemmKernel::Bf16; 2],
            (GroupedArithmetic::W8a16, _) => [GemmKernel::Fp8; 2],
            (GroupedArithmetic::W8a8, GroupedTiles::Same) => [GemmKernel::W8a8Pm4; 2],
            (GroupedArithmetic::W8a8, _) => [GemmKernel::W8a8GateUp, GemmKernel::W8a8Down],
        };
        let two_blocks = max_tokens * top_k >= TWO_BLOCKS;
        let fused = (tiles == GroupedTiles::Fused)
            .then(|| GateUpSilu::new(device, two_blocks, experts, intermediate, hidden))
            .transpose()?;
        let mut plan = GroupedPlan {
            device: device.clone(),
            shape,
            options,
            biased: layer.biased(),
            max_tokens,
            tiles,
            sort: SortSizes::new(device, max_tokens, top_k, experts)?,
            gate_up: GroupedGemm::new(device, of_gate_up, experts, intermediate, hidden)?,
            fused,
            down: GroupedGemm::new(device, of_down, experts, output, intermediate)?,
            parts: Parts::default(),
        };
        worklist::prepare(device)?;
        quant::prepare(device)?;
        unpermute::prepare(device)?;
        let needed = "a workspace below 2^64 bytes, work-lists below 2^31 items";
        plan.parts = Parts::of(&plan).ok_or_else(|| Error::argument("max_tokens", max_tokens, needed))?;
        Ok(plan)
    }

    /// Most tokens of a pass.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Exact size of the workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.parts.end
    }

    /// The tiles in use.
    pub fn tiles(&self) -> GroupedTiles {
        self.tiles
    }

    /// Rows of a tile and column tiles of gate and up.
    fn gate_up_tiles(&self) -> (u32, u32) {
        match &self.fused {
            Some(fused) => (fused.m_tile(), fused.n_tiles()),
            None => (self.gate_up.m_tile(), self.gate_up.n_tiles()),
        }
    }

    /// Items that lists for `pairs` pairs have room for; `None` where they are too many.
    fn list_items(&self, pairs: usize) -> Option<usize> {
        let items = |(m_tile, n_tiles): (u32, u32)| {
            let items = worklist::capacity(pairs, self.shape.experts, n_tiles as usize, m_tile as usize)?;
            (items <= i32::MAX as usize).then_some(items)
        };
        Some(items(self.gate_up_tiles())?.max(items((self.down.m_tile(), self.down.n_tiles()))?))
    }

    fn check_layer(&self, layer: &GroupedLayer) -> Result<()> {
        let same_device = std::ptr::addr_eq(Arc::as_ptr(&self.device), Arc::as_ptr(&layer.weights.device));
        if same_device && (self.shape, self.options, self.biased) == (layer.shape, layer.options, layer.biased()) {
            return Ok(());
        }
        let needed = format!("a plan of this layer, {:?} with {:?}", layer.shape, layer.options);
        Err(Error::argument("plan", format!("for {:?} with {:?}", self.shape, self.options), needed))
    }

    /// The parts of `workspace` that a pass of `tokens` tokens uses.
    fn scratch<'a>(&self, workspace: &'a Workspace, tokens: usize) -> Scratch<'a> {
        let (memory, at) = (workspace.memory(), self.parts);
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        let pairs = tokens * top_k;
        let sizes = Sizes::of(self);
        // `Parts::of` has checked those for the most tokens.
        let items = self.list_items(pairs).unwrap_or(0);
        let (x_scales, h_scales) = (quant::scales_per_row(hidden), quant::scales_per_row(intermediate));
        Scratch {
            status: memory.view(0, 1),
            counts: memory.view(at.counts, self.sort.counters()),
            expert_offsets: memory.view(at.expert_offsets, experts + 1),
            sorted_token_ids: memory.view(at.sorted_token_ids, pairs),
            sorted_pairs: memory.view(at.sorted_pairs, pairs),
            token_to_perm: memory.view(at.token_to_perm, pairs),
            total: memory.view(at.total, 1),
            worklist: memory.view(at.worklist, items * Items::Wide.words()),
            x_codes: memory.view(at.x_codes, tokens * hidden * sizes.quantised),
            x_scales: memory.view(at.x_scales, tokens * x_scales * sizes.quantised),
            gate: memory.view(at.gate, pairs * intermediate * sizes.gate_up),
            up: memory.view(at.up, pairs * intermediate * sizes.gate_up),
            h_codes: memory.view(at.h_codes, pairs * intermediate * sizes.quantised),
            h_scales: memory.view(at.h_scales, pairs * h_scales * sizes.quantised),
            y: memory.view(at.y, pairs * output),
        }
    }
}

/// Which parts of a workspace there are: 1 or 0.
struct Sizes {
    quantised: usize,
    gate_up: usize,
}

impl Sizes {
    fn of(plan: &GroupedPlan) -> Self {
        Sizes {
            quantised: usize::from(plan.options.arithmetic == GroupedArithmetic::W8a8),
            gate_up: usize::from(plan.tiles != GroupedTiles::Fused),
        }
    }
}

/// The parts of a workspace as buffers.
struct Scratch<'a> {
    status: View<'a, u32>,
    counts: View<'a, u32>,
    expert_offsets: View<'a, i32>,
    sorted_token_ids: View<'a, i32>,
    sorted_pairs: View<'a, i32>,
    token_to_perm: View<'a, i32>,
    total: View<'a, u32>,
    worklist: View<'a, u32>,
    x_codes: View<'a, u8>,
    x_scales: View<'a, f32>,
    gate: View<'a, u16>,
    up: View<'a, u16>,
    h_codes: View<'a, u8>,
    h_scales: View<'a, f32>,
    y: View<'a, u16>,
}

/// Byte offsets of the parts of a workspace, and its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    counts: usize,
    expert_offsets: usize,
    sorted_token_ids: usize,
    sorted_pairs: usize,
    token_to_perm: usize,
    total: usize,
    worklist: usize,
    x_codes: usize,
    x_scales: usize,
    gate: usize,
    up: usize,
    h_codes: usize,
    h_scales: usize,
    y: usize,
    end: usize,
}

impl Parts {
    /// `None` where a size overflows.
    fn of(plan: &GroupedPlan) -> Option<Self> {
        let LayerShape { hidden, intermediate, output, experts, top_k } = plan.shape;
        let tokens = plan.max_tokens;
        let pairs = tokens.checked_mul(top_k)?;
        let sizes = Sizes::of(plan);
        let items = plan.list_items(pairs)?;
        let mut end = 0usize;
        let mut part = |rows: usize, elements: usize, bytes: usize| {
            let at = end;
            let len = rows.checked_mul(elements)?.checked_mul(bytes)?;
            end = end.checked_add(len)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(at)
        };
        // The status word comes first: see `Workspace`.
        part(1, 1, 4)?;
        Some(Parts {
            counts: part(plan.sort.counters(), 1, 4)?,
            expert_offsets: part(experts + 1, 1, 4)?,
            sorted_token_ids: part(pairs, 1, 4)?,
            sorted_pairs: part(pairs, 1, 4)?,
            token_to_perm: part(pairs, 1, 4)?,
            total: part(1, 1, 4)?,
            worklist: part(items, Items::Wide.words(), 4)?,
            x_codes: part(tokens, hidden * sizes.quantised, 1)?,
            x_scales: part(tokens, quant::scales_per_row(hidden) * sizes.quantised, 4)?,
            gate: part(pairs, intermediate * sizes.gate_up, 2)?,
            up: part(pairs, intermediate * sizes.gate_up, 2)?,
            h_codes: part(pairs, intermediate * sizes.quantised, 1)?,
            h_scales: part(pairs, quant::scales_per_row(intermediate) * sizes.quantised, 4)?,
            y: part(pairs, output, 2)?,
            end,
        })
    }
}
