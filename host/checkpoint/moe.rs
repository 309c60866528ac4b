//! A whole mixture-of-experts block: routed experts in any format, router, shared expert, and how they are joined.

use safetensors::tensor::Dtype;

use super::config::ModelConfig;
use super::dense::{self, Kind};
use super::experts::{self, MoeBlock, floats};
use super::store::{Tensor, TensorStore};
use crate::error::{Error, Result};
use crate::formats::{DenseExperts, DenseFormat, ExpertShape, Fp4Experts, RouterWeights, SharedExpert};
use crate::types::{Gating, LayerShape};

/// Routed experts, in the format that they are stored in.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "there is one a layer, and what matters lies on the heap")]
pub enum Experts {
    /// NVFP4 or MXFP4.
    Fp4(Fp4Experts),
    /// bf16, or e4m3 with one scale for each 128x128 block.
    Dense(DenseExperts),
}

impl Experts {
    /// Dimensions.
    pub fn shape(&self) -> ExpertShape {
        match self {
            Experts::Fp4(experts) => experts.shape(),
            Experts::Dense(experts) => experts.shape(),
        }
    }

    /// `nvfp4`, `mxfp4`, `bf16` or `fp8`.
    pub fn format(&self) -> &'static str {
        match self {
            Experts::Fp4(experts) => experts.format().name(),
            Experts::Dense(experts) => experts.format().name(),
        }
    }
}

/// The shared expert of a layer, in the format that it is stored in, which need not be that of the routed ones.
#[derive(Clone, Debug, PartialEq)]
pub enum SharedWeights {
    /// bf16 or e4m3.
    Dense(SharedExpert),
    /// NVFP4.
    Fp4 {
        /// A set of one expert.
        expert: Fp4Experts,
        /// bf16 bits `[hidden]`; the output is multiplied by the sigmoid of its dot product with x.
        gate: Option<Vec<u16>>,
    },
}

impl SharedWeights {
    /// Its intermediate size.
    pub fn intermediate(&self) -> usize {
        match self {
            SharedWeights::Dense(shared) => shared.intermediate,
            SharedWeights::Fp4 { expert, .. } => expert.shape().intermediate,
        }
    }

    /// Gate on its output, bf16 bits `[hidden]`.
    pub fn gate(&self) -> Option<&[u16]> {
        match self {
            SharedWeights::Dense(SharedExpert { gate, .. }) | SharedWeights::Fp4 { gate, .. } => gate.as_deref(),
        }
    }
}

/// Everything that a mixture-of-experts block of a checkpoint is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeWeights {
    /// Number of the layer.
    pub layer: usize,
    /// Dimensions of the routed experts, and experts per token.
    pub shape: LayerShape,
    /// Routed experts.
    pub experts: Experts,
    /// Router; `None` if the file has none.
    pub router: Option<RouterWeights>,
    /// Shared expert; `None` if the model has none.
    pub shared: Option<SharedWeights>,
    /// What joins gate and up.
    pub gating: Gating,
}

/// The routed experts of a block, whatever their format.
pub(super) fn load_experts(store: &TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<Experts> {
    Ok(match dense::kind(store, block)? {
        Kind::Nvfp4 => Experts::Fp4(experts::load_nvfp4(store, block, config)?),
        Kind::Mxfp4 => Experts::Fp4(experts::load_mxfp4(store, block, config)?),
        Kind::Dense(format) => Experts::Dense(dense::load(store, block, config, format)?),
    })
}

/// See [`super::Checkpoint::load_moe`].
pub(super) fn load(store: &TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<MoeWeights> {
    let gating = config.gating()?;
    let top_k = config.top_k()?;
    // What is small is read first, so that its faults show at once.
    let count = config.experts;
    let router = router(store, block, config)?;
    let shared = shared(store, block, config)?;
    let experts = load_experts(store, block, config)?;
    let shape = experts.shape();
    if let Some((router, weight)) = &router {
        weight.expect(Dtype::BF16, &[count.unwrap_or(shape.experts), shape.hidden])?;
        router.check(shape.experts, shape.hidden).map_err(|error| weight.error(error.to_string()))?;
    }
    if let Some((shared, hidden, tensor)) = &shared
        && *hidden != shape.hidden
    {
        let problem =
            format!("{hidden} columns of a shared expert {} wide, {} needed", shared.intermediate(), shape.hidden);
        return Err(experts::block_error(store, tensor, problem));
    }
    Ok(MoeWeights {
        layer: block.layer,
        shape: shape.with_top_k(top_k),
        experts,
        router: router.map(|(router, _)| router),
        shared: shared.map(|(shared, ..)| shared),
        gating,
    })
}

/// What lies beside the experts begins with this.
fn beside(block: &MoeBlock) -> &str {
    block.prefix.strip_suffix("experts").unwrap_or(&block.prefix)
}

/// Router of a block, and the tensor of its weight.
fn router<'a>(
    store: &'a TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
) -> Result<Option<(RouterWeights, Tensor<'a>)>> {
    let beside = beside(block);
    let find = |names: &[&str]| -> Result<Option<Tensor<'a>>> {
        let mut found = names.iter().filter_map(|name| store.find(&format!("{beside}{name}")));
        match (found.next(), found.next()) {
            (Some(tensor), Some(other)) => Err(tensor.error(format!("there is `{}` too", other.name))),
            (tensor, _) => Ok(tensor),
        }
    };
    let Some(weight) = find(&["gate.weight", "router.weight"])? else { return Ok(None) };
    let [experts, _] = weight.dims(Dtype::BF16)?;
    let vector = |names: &[&str], needed: bool| -> Result<Option<Vec<f32>>> {
        match find(names)? {
            Some(tensor) => floats(&tensor, &[experts]).map(Some).map_err(|fault| tensor.error(fault.problem)),
            // Left out it would give plausible, wrong choices.
            None if needed => Err(Error::Tensor {
                path: store.path().to_path_buf(),
                tensor: format!("{beside}{}", names[0]),
                problem: format!("missing, but models of type `{}` have it", config.model_type),
            }),
            None => Ok(None),
        }
    };
    let router = RouterWeights {
        bias: vector(&["router.bias", "gate.bias"], config.has_router_bias())?,
        correction_bias: vector(
            &["gate.e_score_correction_bias", "router.e_score_correction_bias"],
            config.has_correction_bias(),
        )?,
        weight: weight.bf16()?,
        routing: config.routing()?,
    };
    Ok(Some((router, weight)))
}

/// Shared expert of a block, its hidden size, and the name that its tensors begin with.
fn shared(
    store: &TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
) -> Result<Option<(SharedWeights, usize, String)>> {
    let beside = beside(block);
    let [plural, singular] = ["shared_experts", "shared_expert"].map(|name| format!("{beside}{name}"));
    let has = |base: &str| store.with_prefix(&format!("{base}.")).next().is_some();
    let base = match (has(&plural), has(&singular)) {
        (true, true) => {
            return Err(experts::block_error(store, &format!("{plural}.*"), format!("there is `{singular}.*` too")));
        }
        (true, false) => plural,
        (false, true) => singular,
        (false, false) if config.shared_experts > 0 => {
            let problem = format!("missing, but config.json has `n_shared_experts` {}", config.shared_experts);
            return Err(experts::block_error(store, &format!("{plural}.*"), problem));
        }
        (false, false) => return Ok(None),
    };
    if let Some(bias) = store.with_prefix(&format!("{base}.")).find(|tensor| tensor.name.ends_with("bias")) {
        return Err(bias.error("biases of a shared expert are not supported"));
    }
    let gate = match store.find(&format!("{beside}shared_expert_gate.weight")) {
        Some(tensor) => {
            let columns = tensor.shape.last().copied().unwrap_or(0);
            tensor.expect(Dtype::BF16, &[1, config.hidden.unwrap_or(columns)])?;
            Some(tensor.bf16()?)
        }
        None => None,
    };
    let kind = dense::kind_of_expert(store, &base).unwrap_or_else(|| {
        let seen = experts::seen(store, &base);
        Err(experts::block_error(store, &format!("{base}.*"), format!("no weights that are known: {seen}")))
    })?;
    let (shared, hidden) = match kind {
        Kind::Nvfp4 | Kind::Mxfp4 => {
            let expert = Fp4Experts::pack(&[experts::nvfp4_expert(store, &base, config.hidden)?])?;
            let hidden = expert.shape().hidden;
            (SharedWeights::Fp4 { expert, gate }, hidden)
        }
        Kind::Dense(format) => {
            if format == DenseFormat::Fp8 {
                config.check_fp8_block()?;
            }
            let (intermediate, columns) = dense::gate_size(store, &base).unwrap_or((0, 0));
            let hidden = config.hidden.unwrap_or(columns);
            let expert = dense::expert(store, &base, format, (intermediate, hidden))?;
            let shared = SharedExpert { intermediate, expert, gate };
            shared.check(hidden, hidden).map_err(|error| experts::block_error(store, &base, error.to_string()))?;
            (SharedWeights::Dense(shared), hidden)
        }
    };
    Ok(Some((shared, hidden, format!("{base}.*"))))
}
