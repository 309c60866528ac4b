//! Reading experts in bf16, and in e4m3 with one scale for each 128x128 block.

use safetensors::tensor::Dtype;

use super::config::ModelConfig;
use super::experts::{
    DOWN, ExpertLayout, FUSED_DOWN, FUSED_GATE_UP, Fault, Found, GATE, MoeBlock, UP, biases, block_error, check_count,
    collect, dims, fault_of, per_expert, seen, spelling, unknown, unknown_form,
};
use super::store::{Tensor, TensorStore};
use crate::error::{Error, Result};
use crate::formats::{DenseExpert, DenseExperts, DenseFormat, DenseMatrix, ExpertShape, FP8_BLOCK, e4m3, float16};

/// Format of weights, told by the tensors alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Nvfp4,
    Mxfp4,
    Dense(DenseFormat),
}

/// Format of the first weight of a block that has one, which all others then need.
pub(super) fn kind(store: &TensorStore, block: &MoeBlock) -> Result<Kind> {
    let found = match block.layout {
        Some(ExpertLayout::Fused) => {
            let bases = [FUSED_GATE_UP, FUSED_DOWN].map(|name| format!("{}.{name}", block.prefix));
            if bases.iter().any(|base| store.find(&format!("{base}_blocks")).is_some()) {
                return Ok(Kind::Mxfp4);
            }
            bases.iter().find_map(|base| kind_of(store, base, &["_weight_packed", ".weight_packed", "", ".weight"]))
        }
        _ => block.ids.iter().find_map(|id| kind_of_expert(store, &format!("{}.{id}", block.prefix))),
    };
    found.unwrap_or_else(|| Err(unknown(store, block, "no weights in bf16, e4m3, NVFP4 or MXFP4")))
}

/// Format of the first weight of one expert.
pub(super) fn kind_of_expert(store: &TensorStore, base: &str) -> Option<Result<Kind>> {
    let names = [GATE, UP, DOWN].into_iter().flatten();
    names.map(|name| format!("{base}.{name}")).find_map(|base| kind_of(store, &base, &[".weight_packed", ".weight"]))
}

fn kind_of(store: &TensorStore, base: &str, suffixes: &[&str]) -> Option<Result<Kind>> {
    let tensor = suffixes.iter().find_map(|suffix| store.find(&format!("{base}{suffix}")))?;
    Some(match tensor.dtype {
        Dtype::U8 => Ok(Kind::Nvfp4),
        Dtype::BF16 => Ok(Kind::Dense(DenseFormat::Bf16)),
        Dtype::F8_E4M3 => Ok(Kind::Dense(DenseFormat::Fp8)),
        dtype => Err(tensor.error(format!("{dtype}; BF16, F8_E4M3 or four bits in U8 needed"))),
    })
}

/// The experts of a block, all in one format, with their biases.
pub(super) fn load(
    store: &TensorStore,
    block: &MoeBlock,
    config: &ModelConfig,
    format: DenseFormat,
) -> Result<DenseExperts> {
    if format == DenseFormat::Fp8 {
        config.check_fp8_block()?;
    }
    let (matrices, hidden, intermediate) = match block.layout {
        Some(ExpertLayout::PerExpert) => {
            let first = |base: &str| gate_size(store, base);
            let matrices = per_expert(store, block, config, first, |base, size| matrix(store, base, format, size))?;
            let first = first(&format!("{}.0", block.prefix)).unwrap_or((0, 0));
            (matrices, config.hidden.unwrap_or(first.1), config.intermediate.unwrap_or(first.0))
        }
        Some(ExpertLayout::Fused) if format == DenseFormat::Bf16 => fused(store, block, config)?,
        Some(ExpertLayout::Fused) => {
            return Err(unknown(
                store,
                block,
                "fused experts in e4m3 are not supported, but one set of tensors an expert",
            ));
        }
        None => return Err(unknown_form(store, block)),
    };
    let shape = ExpertShape { experts: matrices.len(), hidden, intermediate, output: hidden };
    let biases = biases(store, block, config, shape)?;
    let mut biases = biases.into_iter().flatten();
    let experts = matrices.into_iter().map(|[gate, up, down]| DenseExpert { gate, up, down, biases: biases.next() });
    DenseExperts::new(hidden, intermediate, hidden, experts.collect())
}

/// Rows and columns of the gate of an expert.
pub(super) fn gate_size(store: &TensorStore, base: &str) -> Option<(usize, usize)> {
    let base = spelling(store, base, GATE).ok()?;
    match store.find(&format!("{base}.weight"))?.shape {
        &[rows, cols] => Some((rows, cols)),
        _ => None,
    }
}

/// The gate, up and down of one expert, for shared experts.
pub(super) fn expert(
    store: &TensorStore,
    base: &str,
    format: DenseFormat,
    (intermediate, hidden): (usize, usize),
) -> Result<DenseExpert> {
    let part = |names, size| {
        spelling(store, base, names)
            .and_then(|base| matrix(store, &base, format, size))
            .map_err(|fault| block_error(store, &fault.tensor, fault.problem))
    };
    Ok(DenseExpert {
        gate: part(GATE, (intermediate, hidden))?,
        up: part(UP, (intermediate, hidden))?,
        down: part(DOWN, (hidden, intermediate))?,
        biases: None,
    })
}

/// One matrix, checked.
fn matrix(store: &TensorStore, base: &str, format: DenseFormat, (rows, cols): (usize, usize)) -> Found<DenseMatrix> {
    let name = format!("{base}.weight");
    let weight = store.find(&name).ok_or_else(|| Fault::new(name, format!("missing: {}", seen(store, base))))?;
    let of_tensor = |error: Error| fault_of(&weight, error);
    match format {
        DenseFormat::Bf16 => {
            weight.expect(Dtype::BF16, &[rows, cols]).map_err(of_tensor)?;
            Ok(DenseMatrix::Bf16(weight.bf16().map_err(of_tensor)?))
        }
        DenseFormat::Fp8 => {
            weight.expect(Dtype::F8_E4M3, &[rows, cols]).map_err(of_tensor)?;
            if let Some(at) = weight.bytes.iter().position(|&code| e4m3::is_nan(code)) {
                let problem = format!("NaN code 0x{:02X} at row {}, column {}", weight.bytes[at], at / cols, at % cols);
                return Err(Fault::new(weight.name, problem));
            }
            let scales = block_scales(store, base, [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)])?;
            Ok(DenseMatrix::Fp8 { codes: weight.bytes.to_vec(), scales })
        }
    }
}

/// Scales of the blocks, finite: transformers' `weight_scale_inv` or compressed-tensors' `weight_scale`. Both are factors.
fn block_scales(store: &TensorStore, base: &str, grid: [usize; 2]) -> Found<Vec<f32>> {
    let [inv, plain] = ["weight_scale_inv", "weight_scale"].map(|name| format!("{base}.{name}"));
    let tensor = match (store.find(&inv), store.find(&plain)) {
        (Some(tensor), None) | (None, Some(tensor)) => tensor,
        (Some(tensor), Some(other)) => {
            return Err(Fault::new(tensor.name, format!("there is `{}` too", other.name)));
        }
        (None, None) => {
            let problem = format!("missing, and there is no `{plain}` either: {}", seen(store, base));
            return Err(Fault::new(inv, problem));
        }
    };
    // transformers saves a grid with an axis of length 1 without that axis.
    let squeezed =
        tensor.shape.len() < 2 && grid.contains(&1) && tensor.shape.iter().product::<usize>() == grid[0] * grid[1];
    if tensor.shape != grid && !squeezed {
        let problem =
            format!("{:?}, {grid:?} needed: one scale for each {FP8_BLOCK} x {FP8_BLOCK} block", tensor.shape);
        return Err(Fault::new(tensor.name, problem));
    }
    let scales: Vec<f32> = match tensor.dtype {
        Dtype::F32 => tensor.f32(),
        Dtype::BF16 => tensor.bf16().map(|bits| bits.into_iter().map(float16::bf16_to_f32).collect()),
        dtype => Err(tensor.error(format!("{dtype}, F32 or BF16 needed"))),
    }
    .map_err(|error| fault_of(&tensor, error))?;
    match scales.iter().position(|scale| !scale.is_finite()) {
        Some(at) => {
            let problem = format!("{} at block [{}, {}], finite scales needed", scales[at], at / grid[1], at % grid[1]);
            Err(Fault::new(tensor.name, problem))
        }
        None => Ok(scales),
    }
}

/// Matrices, hidden and intermediate size of fused bf16 experts: `gate_up_proj` [E, 2I, H] with the rows of gate first and
/// `down_proj` [E, H, I], or those of gpt-oss: [E, H, 2I] with gate in the even columns and up in the odd ones, and [E, I, H].
fn fused(store: &TensorStore, block: &MoeBlock, config: &ModelConfig) -> Result<(Vec<[DenseMatrix; 3]>, usize, usize)> {
    let transposed = config.interleaved();
    let load = |name: &str| {
        let base = format!("{}.{name}", block.prefix);
        let tensor = ["", ".weight"].iter().find_map(|suffix| store.find(&format!("{base}{suffix}")));
        let tensor = tensor.ok_or_else(|| unknown(store, block, &format!("`{base}` is missing")))?;
        let dims: [usize; 3] = dims(&tensor, Dtype::BF16).map_err(|fault| tensor.error(fault.problem))?;
        Ok((tensor, dims))
    };
    let ((gate_up, [experts, rows, cols]), (down, _)) = (load(FUSED_GATE_UP)?, load(FUSED_DOWN)?);
    let (of_hidden, of_both) = if transposed { (rows, cols) } else { (cols, rows) };
    let hidden = config.hidden.unwrap_or(of_hidden);
    let intermediate = config.intermediate.unwrap_or(of_both / 2);
    let count = config.experts.unwrap_or(experts);
    check_count(store, block, count)?;
    if hidden == 0 || intermediate == 0 {
        return Err(gate_up.error(format!("{:?}: hidden and intermediate size of at least 1 needed", gate_up.shape)));
    }
    let both = intermediate.saturating_mul(2);
    for (tensor, [rows, cols]) in [(gate_up, [both, hidden]), (down, [hidden, intermediate])] {
        let needed = if transposed { [count, cols, rows] } else { [count, rows, cols] };
        tensor.expect(Dtype::BF16, &needed)?;
    }
    let matrices = collect(store, count, |expert| {
        let gate_up = words(&gate_up, expert, both * hidden);
        let down = words(&down, expert, hidden * intermediate);
        let [gate, up, down] = if transposed {
            // Column `first` + `step`·row of a matrix with `width` columns becomes a row.
            let columns = |words: &[[u8; 2]], width: usize, first: usize, step: usize| {
                let rows = (first..width).step_by(step);
                rows.flat_map(|row| words.iter().skip(row).step_by(width)).copied().map(u16::from_le_bytes).collect()
            };
            [columns(gate_up, both, 0, 2), columns(gate_up, both, 1, 2), columns(down, hidden, 0, 1)]
        } else {
            let (gate, up) = gate_up.split_at(intermediate * hidden);
            [gate, up, down].map(|words| words.iter().copied().map(u16::from_le_bytes).collect::<Vec<u16>>())
        };
        [gate, up, down].map(|bits| Ok(DenseMatrix::Bf16(bits)))
    })?;
    Ok((matrices, hidden, intermediate))
}

/// The `len` two-byte words of one expert.
fn words<'a>(tensor: &Tensor<'a>, expert: usize, len: usize) -> &'a [[u8; 2]] {
    &tensor.bytes.as_chunks().0[expert * len..][..len]
}
