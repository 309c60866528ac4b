//! Finding a layer's experts among the tensors, and reading those in four bits and all biases.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;
use safetensors::tensor::Dtype;
use serde::Serialize;

use super::config::ModelConfig;
use super::store::{Tensor, TensorStore};
use crate::error::{Error, Result};
use crate::formats::fp4::MAX_EXPERTS;
use crate::formats::{
    ExpertShape, ExpertTensors, Fp4Experts, Fp4Matrix, GlobalScale, LinearScales, NVFP4_BLOCK, e4m3, e8m0, float16,
};
use crate::types::WeightFormat;

/// The matrices of an expert, each with its names: as in most models, and as in Mixtral's.
pub(super) const GATE: [&str; 2] = ["gate_proj", "w1"];
pub(super) const UP: [&str; 2] = ["up_proj", "w3"];
pub(super) const DOWN: [&str; 2] = ["down_proj", "w2"];

/// The matrices of fused experts.
pub(super) const FUSED_GATE_UP: &str = "gate_up_proj";
pub(super) const FUSED_DOWN: &str = "down_proj";

/// Parts of a layer that hold experts.
const BLOCKS: [&str; 2] = ["mlp", "block_sparse_moe"];

/// How experts are laid out in tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertLayout {
    /// One set of tensors an expert: `experts.0.gate_proj.…`.
    PerExpert,
    /// One set of three-dimensional tensors: `experts.gate_up_proj…` (rows gate, then up) and `experts.down_proj…`.
    Fused,
}

/// Where the experts of a layer are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeBlock {
    /// Layer number.
    pub layer: usize,
    /// Common prefix of the tensors, for example `model.layers.0.mlp.experts`.
    pub prefix: String,
    /// One set of tensors an expert, or fused. `None`: neither of the two known forms, or both at once.
    pub layout: Option<ExpertLayout>,
    /// Numbers of the experts that have tensors of their own.
    pub ids: BTreeSet<usize>,
}

/// All blocks of routed experts, by layer.
pub(super) fn find_blocks(store: &TensorStore) -> Result<BTreeMap<usize, MoeBlock>> {
    let mut blocks: BTreeMap<usize, MoeBlock> = BTreeMap::new();
    for tensor in store.iter() {
        let Some((layer, prefix, rest)) = split_name(tensor.name) else { continue };
        let block = blocks.entry(layer).or_insert_with(|| MoeBlock {
            layer,
            prefix: prefix.to_string(),
            layout: None,
            ids: BTreeSet::new(),
        });
        if block.prefix != prefix {
            return Err(tensor.error(format!("layer {layer} has experts under `{}` too", block.prefix)));
        }
        if let Some(id) = rest.split('.').next().and_then(parse_number) {
            block.ids.insert(id);
        } else if rest.starts_with(FUSED_GATE_UP) || rest.starts_with(FUSED_DOWN) {
            block.layout = Some(ExpertLayout::Fused);
        }
    }
    for block in blocks.values_mut() {
        block.layout = match (block.layout, block.ids.is_empty()) {
            (None, false) => Some(ExpertLayout::PerExpert),
            (Some(_), false) => None,
            (layout, true) => layout,
        };
    }
    Ok(blocks)
}

/// Layer, prefix up to `experts`, and the rest of the name of a tensor of a routed expert.
fn split_name(name: &str) -> Option<(usize, &str, &str)> {
    // Heads for multi-token prediction number their layers from 0 again.
    if name.starts_with("mtp.") {
        return None;
    }
    let (head, rest) = name.split_once(".experts.")?;
    let (head, block) = head.rsplit_once('.')?;
    let (head, layer) = head.rsplit_once('.')?;
    let layers = head.rsplit('.').next()?;
    let prefix = &name[..name.len() - rest.len() - 1];
    (BLOCKS.contains(&block) && layers == "layers").then_some((parse_number(layer)?, prefix, rest))
}

/// A number as tensor names spell it: digits only, no leading zero.
pub(super) fn parse_number(text: &str) -> Option<usize> {
    let number: usize = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// What is wrong with one tensor.
pub(super) struct Fault {
    /// Name with the expert's number replaced by `*`.
    pattern: String,
    /// Full name.
    pub(super) tensor: String,
    pub(super) problem: String,
}

impl Fault {
    pub(super) fn new(tensor: impl Into<String>, problem: impl Into<String>) -> Self {
        let tensor = tensor.into();
        Fault { pattern: tensor.clone(), tensor, problem: problem.into() }
    }
}

/// Something read from tensors, or what is wrong with one of them.
pub(super) type Found<T> = std::result::Result<T, Fault>;

/// The NVFP4 experts of a block, without their biases.
fn nvfp4<'a>(store: &'a TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<Vec<ExpertTensors<'a>>> {
    let matrices = match block.layout {
        Some(ExpertLayout::PerExpert) => {
            // The first gate gives the sizes where config.json does not.
            let first = |base: &str| {
                let base = spelling(store, base, GATE).ok()?;
                matrix(store, &base, None).map(|matrix| (matrix.rows(), matrix.cols())).ok()
            };
            per_expert(store, block, config, first, |base, size| matrix(store, base, Some(size)))?
        }
        Some(ExpertLayout::Fused) => fused(store, block, config)?,
        None => return Err(unknown_form(store, block)),
    };
    Ok(matrices.into_iter().map(|[gate, up, down]| ExpertTensors { gate, up, down }).collect())
}

/// See [`super::Checkpoint::nvfp4_tensors`].
pub(super) fn nvfp4_tensors<'a>(
    store: &'a TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
) -> Result<Vec<ExpertTensors<'a>>> {
    // Leaving a bias out would give plausible, wrong numbers.
    if let Some(bias) = first_bias(store, block) {
        return Err(bias.error("experts with biases: their matrices alone are not the experts"));
    }
    nvfp4(store, block, config)
}

/// The NVFP4 experts of a block with their biases, packed.
pub(super) fn load_nvfp4(store: &TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<Fp4Experts> {
    pack(store, block, config, &nvfp4(store, block, config)?)
}

fn pack(
    store: &TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
    experts: &[ExpertTensors<'_>],
) -> Result<Fp4Experts> {
    let packed = Fp4Experts::pack(experts)?;
    let Some(biases) = biases(store, block, config, packed.shape())? else { return Ok(packed) };
    let b13 = biases.iter().flat_map(|[gate, up, _]| [up, gate]).flatten().copied().collect();
    let b2 = biases.iter().flat_map(|[_, _, down]| down).copied().collect();
    packed.with_biases(Some(b13), Some(b2))
}

/// Three of something of every expert, for gate, up and down: `read` is given the name up to the matrix, and the rows and columns
/// that config.json or else the `first` gate says.
pub(super) fn per_expert<T: Send>(
    store: &TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
    first: impl Fn(&str) -> Option<(usize, usize)>,
    read: impl Fn(&str, (usize, usize)) -> Found<T> + Send + Sync,
) -> Result<Vec<[T; 3]>> {
    let count = config.experts.unwrap_or(block.ids.len());
    check_count(store, block, count)?;
    let missing: Vec<usize> = (0..count).filter(|id| !block.ids.contains(id)).collect();
    let beyond: Vec<usize> = block.ids.range(count..).copied().collect();
    for (experts, problem) in [(missing, "missing"), (beyond, "beyond the expert count of config.json")] {
        if !experts.is_empty() {
            let problem = format!("experts {experts:?} are {problem}, which makes {count}");
            return Err(block_error(store, &format!("{}.*", block.prefix), problem));
        }
    }
    let (rows, cols) = match (config.intermediate, config.hidden) {
        (Some(rows), Some(cols)) => (rows, cols),
        _ => first(&format!("{}.0", block.prefix)).unwrap_or((0, 0)),
    };
    let hidden = config.hidden.unwrap_or(cols);
    let intermediate = config.intermediate.unwrap_or(rows);
    collect(store, count, |expert| {
        let base = format!("{}.{expert}", block.prefix);
        [(GATE, (intermediate, hidden)), (UP, (intermediate, hidden)), (DOWN, (hidden, intermediate))].map(
            |(names, size)| {
                spelling(store, &base, names).and_then(|base| read(&base, size)).map_err(|fault| Fault {
                    pattern: fault.tensor.replacen(&base, &format!("{}.*", block.prefix), 1),
                    ..fault
                })
            },
        )
    })
}

/// The matrices of every expert, or an error about all that are faulty.
pub(super) fn collect<T: Send, const N: usize>(
    store: &TensorStore,
    count: usize,
    matrices: impl Fn(usize) -> [Found<T>; N] + Send + Sync,
) -> Result<Vec<[T; N]>> {
    let results: Vec<_> = (0..count).into_par_iter().map(matrices).collect();
    let mut faults = Vec::new();
    let mut experts = Vec::with_capacity(count);
    for (expert, matrices) in results.into_iter().enumerate() {
        let mut good = Vec::with_capacity(N);
        for matrix in matrices {
            match matrix {
                Ok(matrix) => good.push(matrix),
                Err(fault) => faults.push((expert, fault)),
            }
        }
        experts.extend(<[T; N]>::try_from(good).ok());
    }
    report(store, faults).map_or(Ok(experts), Err)
}

/// One error for the first faulty kind of tensor, with all experts in which that kind is faulty.
fn report(store: &TensorStore, faults: Vec<(usize, Fault)>) -> Option<Error> {
    let (_, first) = faults.first()?;
    let (pattern, tensor, problem) = (first.pattern.clone(), first.tensor.clone(), first.problem.clone());
    let same: Vec<&(usize, Fault)> = faults.iter().filter(|(_, fault)| fault.pattern == pattern).collect();
    let experts: Vec<usize> = same.iter().map(|(expert, _)| *expert).collect();
    let (tensor, problem) = if same.len() == 1 {
        (tensor, format!("{problem} (expert {})", experts[0]))
    } else if same.iter().all(|(_, fault)| fault.problem == problem) {
        (pattern, format!("{problem} (experts {experts:?})"))
    } else {
        let each: Vec<String> =
            same.iter().map(|(expert, fault)| format!("expert {expert}: {}", fault.problem)).collect();
        (pattern, format!("experts {experts:?} are wrong; {}", each.join("; ")))
    };
    // The file where it is one, of several shards their folder.
    let mut files = same.iter().map(|(_, fault)| file_of(store, &fault.tensor));
    let path = files.next().filter(|first| files.all(|file| file == *first)).unwrap_or(store.path());
    Some(Error::Tensor { path: path.to_path_buf(), tensor, problem })
}

/// The file of a tensor; for one that is missing, what was opened.
fn file_of<'a>(store: &'a TensorStore, tensor: &str) -> &'a Path {
    store.find(tensor).map_or(store.path(), |tensor| tensor.path)
}

/// One NVFP4 expert at `base` of whatever intermediate size its gate has, for shared experts.
pub(super) fn nvfp4_expert<'a>(store: &'a TensorStore, base: &str, hidden: Option<usize>) -> Result<ExpertTensors<'a>> {
    let part = |names, size| spelling(store, base, names).and_then(|base| matrix(store, &base, size));
    let expert = || {
        let gate = part(GATE, None)?;
        let (rows, cols) = (gate.rows(), hidden.unwrap_or(gate.cols()));
        let gate = part(GATE, Some((rows, cols)))?;
        Ok(ExpertTensors { gate, up: part(UP, Some((rows, cols)))?, down: part(DOWN, Some((cols, rows)))? })
    };
    expert().map_err(|fault: Fault| block_error(store, &fault.tensor, fault.problem))
}

/// `base` with the one of the two names under which it has tensors.
pub(super) fn spelling(store: &TensorStore, base: &str, names: [&str; 2]) -> Found<String> {
    let [usual, other] = names.map(|name| format!("{base}.{name}"));
    let has = |base: &str| store.with_prefix(&format!("{base}.")).next().is_some();
    match (has(&usual), has(&other)) {
        (true, true) => Err(Fault::new(usual, format!("there is `{other}` too"))),
        (false, true) => Ok(other),
        _ => Ok(usual),
    }
}

/// One NVFP4 matrix of one expert, checked. `size` are the rows and columns needed.
fn matrix<'a>(store: &'a TensorStore, base: &str, size: Option<(usize, usize)>) -> Found<Fp4Matrix<'a>> {
    let parts = Parts::find(store, base, &[".weight_packed"], &[".weight"], &["."])?;
    let [rows, bytes] = dims(&parts.codes, Dtype::U8)?;
    let cols = check_size(&parts.codes, rows, bytes, size)?;
    let [scale_rows, scale_cols] = dims(&parts.scales, Dtype::F8_E4M3)?;
    if (scale_rows, scale_cols) != (rows, cols / NVFP4_BLOCK) {
        let needed = format!("[{scale_rows}, {scale_cols}], [{rows}, {}] needed", cols / NVFP4_BLOCK);
        return Err(Fault::new(parts.scales.name, needed));
    }
    let global = parts.global_values()?;
    if global.len() != 1 {
        return Err(Fault::new(parts.global.name, format!("{} values, one needed", global.len())));
    }
    assemble(&parts, rows, cols, parts.codes.bytes, parts.scales.bytes, global[0])
}

fn fused<'a>(store: &'a TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<Vec<[Fp4Matrix<'a>; 3]>> {
    if config.interleaved() {
        return Err(unknown(store, block, "fused NVFP4 experts of gpt-oss are not supported: MXFP4 or bf16 needed"));
    }
    let load = |name: &str, size: &dyn Fn(usize, usize) -> (usize, usize)| {
        let base = format!("{}.{name}", block.prefix);
        FusedMatrix::find(store, &base, size)
    };
    // Rows 0..I are gate, I..2I up. Where config.json is silent the tensor's own size stands.
    let gate_up = load(FUSED_GATE_UP, &|rows, cols| {
        (config.intermediate.map_or(rows, |size| size.saturating_mul(2)), config.hidden.unwrap_or(cols))
    })
    .map_err(|fault| fused_error(store, block, fault))?;
    if !gate_up.rows.is_multiple_of(2) {
        let problem = format!("{} rows, an even number needed: gate, then up", gate_up.rows);
        return Err(block_error(store, gate_up.parts.codes.name, problem));
    }
    let intermediate = gate_up.rows / 2;
    let down =
        load(FUSED_DOWN, &|_, _| (gate_up.cols, intermediate)).map_err(|fault| fused_error(store, block, fault))?;
    let count = config.experts.unwrap_or(gate_up.experts);
    check_count(store, block, count)?;
    for fused in [&gate_up, &down] {
        if fused.experts != count {
            let problem = format!("{} experts, {count} needed", fused.experts);
            return Err(block_error(store, fused.parts.codes.name, problem));
        }
    }
    collect(store, count, |expert| {
        [
            gate_up.part(expert, 0, intermediate),
            gate_up.part(expert, intermediate, intermediate),
            down.part(expert, 0, down.rows),
        ]
    })
}

/// The MXFP4 experts of a block, as gpt-oss stores them: `gate_up_proj_blocks` [E, 2I, H/32, 16] with gate in the even rows and up in
/// the odd ones, `down_proj_blocks` [E, H, I/32, 16], and `_scales` without the last dimension.
pub(super) fn load_mxfp4<'a>(store: &'a TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<Fp4Experts> {
    let find = |name: &str, size: &dyn Fn([usize; 2]) -> [usize; 2]| {
        Mxfp4Tensors::find(store, &format!("{}.{name}", block.prefix), size)
            .map_err(|fault| fused_error(store, block, fault))
    };
    let gate_up = find(FUSED_GATE_UP, &|[rows, cols]| {
        [config.intermediate.map_or(rows, |size| size.saturating_mul(2)), config.hidden.unwrap_or(cols)]
    })?;
    let down = find(FUSED_DOWN, &|_| [gate_up.cols, gate_up.rows / 2])?;
    if !gate_up.rows.is_multiple_of(2) {
        let problem = format!("{} rows, an even number needed: gate and up by turns", gate_up.rows);
        return Err(gate_up.codes.error(problem));
    }
    let count = config.experts.unwrap_or(gate_up.experts);
    check_count(store, block, count)?;
    for fused in [&gate_up, &down] {
        if fused.experts != count {
            return Err(fused.codes.error(format!("{} experts, {count} needed", fused.experts)));
        }
    }
    let matrices = collect(store, count, |expert| [gate_up.matrix(expert), down.matrix(expert)])?;
    let split = |[gate_up, down]: [Fp4Matrix<'a>; 2]| {
        let [gate, up] = gate_up.split_interleaved()?;
        Ok(ExpertTensors { gate, up, down })
    };
    let experts: Vec<ExpertTensors<'_>> = matrices.into_par_iter().map(split).collect::<Result<_>>()?;
    pack(store, block, config, &experts)
}

/// Codes and scales of one matrix of all experts, rows x cols weights each.
struct Mxfp4Tensors<'a> {
    codes: Tensor<'a>,
    scales: Tensor<'a>,
    experts: usize,
    rows: usize,
    cols: usize,
}

impl<'a> Mxfp4Tensors<'a> {
    /// `size` turns the tensor's rows and columns into those needed.
    fn find(store: &'a TensorStore, base: &str, size: impl Fn([usize; 2]) -> [usize; 2]) -> Found<Self> {
        let get = |suffix: &str| {
            let name = format!("{base}{suffix}");
            store.find(&name).ok_or_else(|| Fault::new(name, format!("missing: {}", seen(store, base))))
        };
        let (codes, scales) = (get("_blocks")?, get("_scales")?);
        let [experts, rows, blocks, bytes] = dims(&codes, Dtype::U8)?;
        let block = WeightFormat::Mxfp4.block();
        let cols = blocks.saturating_mul(block);
        let needed = size([rows, cols]);
        if [rows, cols] != needed || bytes != block / 2 || rows == 0 || cols == 0 {
            let problem = format!(
                "{:?}: {rows} x {cols} weights, {} x {} (out x in) in blocks of {} bytes needed",
                codes.shape,
                needed[0],
                needed[1],
                block / 2
            );
            return Err(Fault::new(codes.name, problem));
        }
        scales.expect(Dtype::U8, &[experts, rows, blocks]).map_err(|error| fault_of(&scales, error))?;
        Ok(Self { codes, scales, experts, rows, cols })
    }

    fn matrix(&self, expert: usize) -> Found<Fp4Matrix<'a>> {
        let Mxfp4Tensors { rows, cols, .. } = *self;
        let slice = |bytes: &'a [u8], row_bytes: usize| &bytes[expert * rows * row_bytes..][..rows * row_bytes];
        let blocks = cols / WeightFormat::Mxfp4.block();
        let scales = slice(self.scales.bytes, blocks);
        if let Some(index) = scales.iter().position(|&byte| byte == e8m0::NAN) {
            let problem = format!("NaN scale 0xFF at row {}, block {}", index / blocks, index % blocks);
            return Err(Fault::new(self.scales.name, problem));
        }
        LinearScales::new("scales", rows, blocks, scales)
            .and_then(|scales| Fp4Matrix::mxfp4(rows, cols, slice(self.codes.bytes, cols / 2), scales))
            .map_err(|error| fault_of(&self.codes, error))
    }
}

pub(super) fn first_bias<'a>(store: &'a TensorStore, block: &MoeBlock) -> Option<Tensor<'a>> {
    let prefix = format!("{}.", block.prefix);
    store.iter().find(|tensor| tensor.name.starts_with(&prefix) && tensor.name.ends_with("bias"))
}

/// Biases of gate, up and down of every expert, if one of them has any.
pub(super) fn biases(
    store: &TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
    shape: ExpertShape,
) -> Result<Option<Vec<[Vec<f32>; 3]>>> {
    let ExpertShape { experts, intermediate, output, .. } = shape;
    if first_bias(store, block).is_none() {
        return Ok(None);
    }
    if block.layout != Some(ExpertLayout::Fused) {
        let mut config = config.clone();
        (config.experts, config.hidden, config.intermediate) = (Some(experts), Some(output), Some(intermediate));
        return per_expert(
            store,
            block,
            &config,
            |_| None,
            |base, (rows, _)| {
                let name = format!("{base}.bias");
                let tensor =
                    store.find(&name).ok_or_else(|| Fault::new(name, "missing, but other biases are there"))?;
                floats(&tensor, &[rows])
            },
        )
        .map(Some);
    }
    let load = |name: &str, width: usize| {
        let base = format!("{}.{name}", block.prefix);
        let found = ["_bias", ".bias"].iter().find_map(|suffix| store.find(&format!("{base}{suffix}")));
        found
            .ok_or_else(|| Fault::new(format!("{base}_bias"), "missing, but other biases are there"))
            .and_then(|tensor| floats(&tensor, &[experts, width]))
            .map_err(|fault| fused_error(store, block, fault))
    };
    let (gate_up, down) = (load(FUSED_GATE_UP, 2 * intermediate)?, load(FUSED_DOWN, output)?);
    let both = gate_up.chunks_exact(2 * intermediate).zip(down.chunks_exact(output));
    Ok(Some(
        both.map(|(gate_up, down)| {
            let [gate, up] = if config.interleaved() {
                [0, 1].map(|first| gate_up.iter().copied().skip(first).step_by(2).collect())
            } else {
                [&gate_up[..intermediate], &gate_up[intermediate..]].map(<[f32]>::to_vec)
            };
            [gate, up, down.to_vec()]
        })
        .collect(),
    ))
}

/// The finite numbers of an F32 or BF16 tensor of this shape.
pub(super) fn floats(tensor: &Tensor<'_>, shape: &[usize]) -> Found<Vec<f32>> {
    let dtype = if tensor.dtype == Dtype::BF16 { Dtype::BF16 } else { Dtype::F32 };
    tensor.expect(dtype, shape).map_err(|error| fault_of(tensor, error))?;
    let values = match dtype {
        Dtype::BF16 => tensor.bf16().map(|bits| bits.into_iter().map(float16::bf16_to_f32).collect()),
        _ => tensor.f32(),
    };
    let values: Vec<f32> = values.map_err(|error| fault_of(tensor, error))?;
    match values.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(Fault::new(tensor.name, format!("{} at element {at}, finite numbers needed", values[at]))),
        None => Ok(values),
    }
}

/// One matrix of all experts in one tensor: [experts, rows, cols/2].
struct FusedMatrix<'a> {
    parts: Parts<'a>,
    experts: usize,
    rows: usize,
    cols: usize,
    global: Vec<f32>,
}

impl<'a> FusedMatrix<'a> {
    /// `size` turns the tensor's rows and columns into those needed.
    fn find(store: &'a TensorStore, base: &str, size: &dyn Fn(usize, usize) -> (usize, usize)) -> Found<Self> {
        // A fused parameter is no module: ModelOpt has the bare name for the codes and joins the suffixes with `_`.
        let parts = Parts::find(store, base, &[".weight_packed", "_weight_packed"], &["", ".weight"], &[".", "_"])?;
        let [experts, rows, bytes] = dims(&parts.codes, Dtype::U8)?;
        let needed = size(rows, bytes.saturating_mul(2));
        let cols = check_size(&parts.codes, rows, bytes, Some(needed))?;
        let scale_dims: [usize; 3] = dims(&parts.scales, Dtype::F8_E4M3)?;
        if scale_dims != [experts, rows, cols / NVFP4_BLOCK] {
            let needed = format!("{scale_dims:?}, [{experts}, {rows}, {}] needed", cols / NVFP4_BLOCK);
            return Err(Fault::new(parts.scales.name, needed));
        }
        let mut global = parts.global_values()?;
        if global.len() == 1 {
            global.resize(experts.min(MAX_EXPERTS), global[0]);
        } else if global.len() != experts {
            let problem = format!("{} values, 1 or {experts} needed", global.len());
            return Err(Fault::new(parts.global.name, problem));
        }
        Ok(Self { parts, experts, rows, cols, global })
    }

    /// `rows` rows of `expert` from `first` on.
    fn part(&self, expert: usize, first: usize, rows: usize) -> Found<Fp4Matrix<'a>> {
        let slice = |bytes: &'a [u8], row_bytes: usize| {
            let start = (expert * self.rows + first) * row_bytes;
            &bytes[start..start + rows * row_bytes]
        };
        let codes = slice(self.parts.codes.bytes, self.cols / 2);
        let scales = slice(self.parts.scales.bytes, self.cols / NVFP4_BLOCK);
        assemble(&self.parts, rows, self.cols, codes, scales, self.global[expert])
    }
}

/// The three tensors of a matrix, and which tool's convention they follow.
struct Parts<'a> {
    codes: Tensor<'a>,
    scales: Tensor<'a>,
    global: Tensor<'a>,
    /// compressed-tensors' convention: the global scale divides.
    divides: bool,
}

impl<'a> Parts<'a> {
    /// Codes at `base` plus one of `packed` (compressed-tensors), or plus one of `plain` and of type U8 (ModelOpt);
    /// scales at `base`, one of `joints` and the tool's suffix.
    fn find(store: &'a TensorStore, base: &str, packed: &[&str], plain: &[&str], joints: &[&str]) -> Found<Self> {
        let one_of = |suffixes: &[&str]| suffixes.iter().find_map(|suffix| store.find(&format!("{base}{suffix}")));
        let seen = || seen(store, base);
        let packed_codes = one_of(packed);
        let plain_codes = one_of(plain).filter(|tensor| tensor.dtype == Dtype::U8);
        let (codes, divides) = match (packed_codes, plain_codes) {
            (Some(tensor), None) => (tensor, true),
            (None, Some(tensor)) => (tensor, false),
            (Some(tensor), Some(other)) => {
                return Err(Fault::new(tensor.name, format!("there is the U8 tensor `{}` too", other.name)));
            }
            (None, None) => {
                let problem = format!("missing, and there is no U8 `{base}{}` either: {}", plain[0], seen());
                return Err(Fault::new(format!("{base}{}", packed[0]), problem));
            }
        };
        let suffix = |name: &str| {
            let names: Vec<String> = joints.iter().map(|joint| format!("{joint}{name}")).collect();
            one_of(&names.iter().map(String::as_str).collect::<Vec<_>>())
                .ok_or_else(|| Fault::new(format!("{base}{}", names[0]), format!("missing: {}", seen())))
        };
        let global_name = if divides { GlobalScale::Divisor(1.0) } else { GlobalScale::Multiplier(1.0) }.tensor_name();
        Ok(Self { codes, scales: suffix("weight_scale")?, global: suffix(global_name)?, divides })
    }

    fn global_values(&self) -> Found<Vec<f32>> {
        self.global.f32().map_err(|error| fault_of(&self.global, error))
    }
}

/// A matrix from slices of its parts: none of its scales may be NaN, and its global scale must be usable.
fn assemble<'a>(
    parts: &Parts<'a>,
    rows: usize,
    cols: usize,
    codes: &'a [u8],
    scales: &'a [u8],
    global: f32,
) -> Found<Fp4Matrix<'a>> {
    let global = if parts.divides { GlobalScale::Divisor(global) } else { GlobalScale::Multiplier(global) };
    if !global.is_valid() {
        let problem = format!("{}, a finite positive number with a finite reciprocal needed", global.stored());
        return Err(Fault::new(parts.global.name, problem));
    }
    let blocks = cols / NVFP4_BLOCK;
    if let Some(index) = scales.iter().position(|&byte| e4m3::is_nan(byte)) {
        let problem = format!("NaN scale at row {}, block {}", index / blocks, index % blocks);
        return Err(Fault::new(parts.scales.name, problem));
    }
    LinearScales::new("weight_scale", rows, blocks, scales)
        .and_then(|scales| Fp4Matrix::new(rows, cols, codes, scales, global))
        .map_err(|error| fault_of(&parts.codes, error))
}

/// The tensors at `base`, for a message about one that is not there.
pub(super) fn seen(store: &TensorStore, base: &str) -> String {
    let seen: Vec<String> = store
        .with_prefix(base)
        .filter(|tensor| tensor.name[base.len()..].starts_with(['.', '_']) || tensor.name.len() == base.len())
        .map(|tensor| format!("{} {} {:?}", &tensor.name[base.len()..], tensor.dtype, tensor.shape))
        .collect();
    if seen.is_empty() { "no tensor at all".to_string() } else { format!("only {}", list(&seen)) }
}

/// Columns of a matrix of `rows` x `bytes` packed codes, if they are legal and of the size needed.
fn check_size(tensor: &Tensor<'_>, rows: usize, bytes: usize, needed: Option<(usize, usize)>) -> Found<usize> {
    let cols = bytes.checked_mul(2).unwrap_or(0);
    if rows == 0 || cols == 0 || !cols.is_multiple_of(NVFP4_BLOCK) {
        let problem = format!("{:?}: rows and a multiple of {} bytes in each needed", tensor.shape, NVFP4_BLOCK / 2);
        return Err(Fault::new(tensor.name, problem));
    }
    match needed {
        Some((needed_rows, needed_cols)) if (rows, cols) != (needed_rows, needed_cols) => {
            let problem = format!("{rows} x {cols} weights, {needed_rows} x {needed_cols} (out x in) needed");
            Err(Fault::new(tensor.name, problem))
        }
        _ => Ok(cols),
    }
}

pub(super) fn dims<const N: usize>(tensor: &Tensor<'_>, dtype: Dtype) -> Found<[usize; N]> {
    tensor.dims(dtype).map_err(|error| fault_of(tensor, error))
}

pub(super) fn fault_of(tensor: &Tensor<'_>, error: Error) -> Fault {
    let problem = match error {
        Error::Tensor { problem, .. } => problem,
        other => other.to_string(),
    };
    Fault::new(tensor.name, problem)
}

pub(super) fn check_count(store: &TensorStore, block: &MoeBlock, count: usize) -> Result<()> {
    if (1..=MAX_EXPERTS).contains(&count) {
        return Ok(());
    }
    Err(block_error(
        store,
        &format!("{}.*", block.prefix),
        format!("{count} experts, 1 to {MAX_EXPERTS} are supported"),
    ))
}

pub(super) fn block_error(store: &TensorStore, tensor: &str, problem: String) -> Error {
    Error::Tensor { path: file_of(store, tensor).to_path_buf(), tensor: tensor.to_string(), problem }
}

/// A fault of fused experts, with the names that are there.
fn fused_error(store: &TensorStore, block: &MoeBlock, fault: Fault) -> Error {
    let seen = block_names(store, block);
    block_error(store, &fault.tensor, format!("{}; tensors of the block: {}", fault.problem, list(&seen)))
}

pub(super) fn unknown_form(store: &TensorStore, block: &MoeBlock) -> Error {
    unknown(store, block, "neither one set of tensors an expert nor fused experts")
}

/// An error about a whole block, with the names that are there.
pub(super) fn unknown(store: &TensorStore, block: &MoeBlock, problem: &str) -> Error {
    let seen = block_names(store, block);
    block_error(store, &format!("{}.*", block.prefix), format!("{problem}; tensors seen: {}", list(&seen)))
}

fn block_names(store: &TensorStore, block: &MoeBlock) -> Vec<String> {
    let prefix = format!("{}.", block.prefix);
    store.with_prefix(&prefix).map(|tensor| format!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape)).collect()
}

/// At most 24 names, and how many more there are.
pub(super) fn list<T: AsRef<str>>(names: &[T]) -> String {
    const MOST: usize = 24;
    let shown: Vec<&str> = names.iter().take(MOST).map(AsRef::as_ref).collect();
    let more = names.len().saturating_sub(MOST);
    match (shown.is_empty(), more) {
        (true, _) => "none".to_string(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}
