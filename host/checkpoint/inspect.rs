//! What a checkpoint holds, from names, types and shapes alone: no weight is read.

use std::collections::BTreeSet;
use std::fmt;

use safetensors::tensor::Dtype;
use serde::{Serialize, Serializer};

use super::Checkpoint;
use super::config::ModelConfig;
use super::experts::{DOWN, ExpertLayout, FUSED_DOWN, FUSED_GATE_UP, GATE, MoeBlock, UP, first_bias, parse_number};

/// What a checkpoint holds.
#[derive(Clone, Debug, Serialize)]
pub struct Inspect {
    /// config.json.
    pub config: ModelConfig,
    /// Safetensors files.
    pub files: usize,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Every layer that has tensors, ascending.
    pub layers: Vec<LayerInfo>,
}

/// One layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerInfo {
    /// Its number.
    pub layer: usize,
    /// Its routed experts, if it has any.
    pub moe: Option<MoeInfo>,
}

/// The routed experts of a layer.
#[derive(Clone, Debug, Serialize)]
pub struct MoeInfo {
    /// Common prefix of their tensors.
    pub prefix: String,
    /// One set of tensors an expert, or fused. `None`: a form that is not known.
    pub layout: Option<ExpertLayout>,
    /// All formats that occur; one in a sound checkpoint.
    pub formats: Vec<ExpertFormat>,
    /// Experts that have tensors.
    pub experts: usize,
    /// Columns of the first gate, if its form is known.
    pub hidden: Option<usize>,
    /// Rows of the first gate, if its form is known.
    pub intermediate: Option<usize>,
    /// Do they have biases?
    pub biases: bool,
    /// Is there a shared expert beside them?
    pub shared_expert: bool,
}

/// Format of an expert's weights.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExpertFormat {
    /// NVFP4 as ModelOpt writes it: U8 `weight`, `weight_scale_2` multiplies.
    Nvfp4ModelOpt,
    /// NVFP4 as compressed-tensors writes it: `weight_packed`, `weight_global_scale` divides.
    Nvfp4CompressedTensors,
    /// MXFP4 as gpt-oss has it: `gate_up_proj_blocks` and `gate_up_proj_scales`.
    Mxfp4Blocks,
    /// E4M3 with `weight_scale_inv` (transformers).
    Fp8ScaleInv,
    /// E4M3 with `weight_scale` (compressed-tensors).
    Fp8Scale,
    /// Plain bf16.
    Bf16,
    /// Anything else, as type and shape of the weight.
    Other(String),
}

impl ExpertFormat {
    /// Can [`Checkpoint::load_nvfp4`] read it?
    pub fn is_nvfp4(&self) -> bool {
        matches!(self, ExpertFormat::Nvfp4ModelOpt | ExpertFormat::Nvfp4CompressedTensors)
    }
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExpertFormat::Nvfp4ModelOpt => "nvfp4 (modelopt)",
            ExpertFormat::Nvfp4CompressedTensors => "nvfp4 (compressed-tensors)",
            ExpertFormat::Mxfp4Blocks => "mxfp4 (blocks)",
            ExpertFormat::Fp8ScaleInv => "fp8 (weight_scale_inv)",
            ExpertFormat::Fp8Scale => "fp8 (weight_scale)",
            ExpertFormat::Bf16 => "bf16",
            ExpertFormat::Other(what) => what,
        })
    }
}

impl Serialize for ExpertFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

pub(super) fn inspect(checkpoint: &Checkpoint) -> Inspect {
    let store = checkpoint.tensors();
    let mut layers: BTreeSet<usize> = store.names().filter_map(layer_of).collect();
    layers.extend(checkpoint.moe_layers());
    Inspect {
        config: checkpoint.config().clone(),
        files: store.file_count(),
        tensors: store.names().count(),
        bytes: store.iter().map(|tensor| tensor.bytes.len() as u64).sum(),
        layers: layers
            .into_iter()
            .map(|layer| LayerInfo {
                layer,
                moe: checkpoint.block(layer).ok().map(|block| describe(checkpoint, block)),
            })
            .collect(),
    }
}

/// Number after the first `layers.` of a name.
fn layer_of(name: &str) -> Option<usize> {
    let mut parts = name.split('.');
    parts.find(|part| *part == "layers")?;
    parse_number(parts.next()?)
}

fn describe(checkpoint: &Checkpoint, block: &MoeBlock) -> MoeInfo {
    let store = checkpoint.tensors();
    let mut formats = BTreeSet::new();
    // Experts, rows and columns of the first gate.
    let mut first_gate: Option<(usize, usize, usize)> = None;
    match block.layout {
        Some(ExpertLayout::Fused) => {
            for name in [FUSED_GATE_UP, FUSED_DOWN] {
                let Some(weight) = describe_weight(checkpoint, &format!("{}.{name}", block.prefix)) else { continue };
                formats.insert(weight.format);
                if let (FUSED_GATE_UP, [experts, rows, cols]) = (name, &weight.dims[..]) {
                    let (both, hidden) = if weight.transposed { (cols, rows) } else { (rows, cols) };
                    first_gate = Some((*experts, both / 2, *hidden));
                }
            }
        }
        _ => {
            for id in &block.ids {
                for names in [GATE, UP, DOWN] {
                    let bases = names.map(|name| format!("{}.{id}.{name}", block.prefix));
                    let Some(weight) = bases.iter().find_map(|base| describe_weight(checkpoint, base)) else {
                        continue;
                    };
                    formats.insert(weight.format);
                    if let ([rows, cols], true) = (&weight.dims[..], names == GATE && first_gate.is_none()) {
                        first_gate = Some((block.ids.len(), *rows, *cols));
                    }
                }
            }
        }
    }
    let beside = block.prefix.strip_suffix("experts").unwrap_or(&block.prefix);
    MoeInfo {
        prefix: block.prefix.clone(),
        layout: block.layout,
        formats: formats.into_iter().collect(),
        experts: first_gate.map_or(block.ids.len(), |(experts, _, _)| experts),
        hidden: first_gate.map(|(_, _, cols)| cols),
        intermediate: first_gate.map(|(_, rows, _)| rows),
        biases: first_bias(store, block).is_some(),
        shared_expert: store.with_prefix(&format!("{beside}shared_expert")).next().is_some(),
    }
}

struct Weight {
    format: ExpertFormat,
    /// Dimensions in weights, not in bytes.
    dims: Vec<usize>,
    /// Columns before rows.
    transposed: bool,
}

fn describe_weight(checkpoint: &Checkpoint, base: &str) -> Option<Weight> {
    let store = checkpoint.tensors();
    let has = |suffix: &str| [".", "_"].iter().any(|joint| store.find(&format!("{base}{joint}{suffix}")).is_some());
    let find = |suffixes: &[&str]| suffixes.iter().find_map(|suffix| store.find(&format!("{base}{suffix}")));
    if let Some(blocks) = find(&["_blocks"]).filter(|tensor| tensor.dtype == Dtype::U8) {
        let mut dims = blocks.shape.to_vec();
        let bytes = dims.pop()?;
        *dims.last_mut()? = dims.last()?.saturating_mul(bytes).saturating_mul(2);
        return Some(Weight { format: ExpertFormat::Mxfp4Blocks, dims, transposed: false });
    }
    let packed = find(&[".weight_packed", "_weight_packed"]);
    let tensor = packed.or_else(|| find(&["", ".weight"]))?;
    let (format, per_element) = match tensor.dtype {
        Dtype::U8 if packed.is_some() && has("weight_global_scale") => (ExpertFormat::Nvfp4CompressedTensors, 2),
        Dtype::U8 if packed.is_none() && has("weight_scale_2") => (ExpertFormat::Nvfp4ModelOpt, 2),
        Dtype::F8_E4M3 if has("weight_scale_inv") => (ExpertFormat::Fp8ScaleInv, 1),
        Dtype::F8_E4M3 if has("weight_scale") => (ExpertFormat::Fp8Scale, 1),
        Dtype::BF16 => (ExpertFormat::Bf16, 1),
        dtype => (ExpertFormat::Other(format!("{dtype}")), 1),
    };
    let mut dims = tensor.shape.to_vec();
    if let Some(last) = dims.last_mut() {
        *last = last.saturating_mul(per_element);
    }
    let transposed = format == ExpertFormat::Bf16 && dims.len() == 3 && checkpoint.config().interleaved();
    Some(Weight { format, dims, transposed })
}
