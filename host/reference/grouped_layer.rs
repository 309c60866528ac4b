//! The routed experts of a layer with FP8 or BF16 weights: the references of its operations, one after the other.

use super::{
    GemmKind, GroupedGemm, LayerInputs, LayerResult, Operand, Quantized, Sorted, Status, per_token_group_quant_fp8,
    silu_mul, silu_mul_quant_fp8, sort_by_expert, unpermute_reduce,
};
use crate::error::{Error, Result, check_len};
use crate::formats::{DenseExpert, DenseExperts, DenseMatrix};
use crate::{GroupedArithmetic, GroupedOptions, XType};

/// One forward pass, with the bits of an H200. `resident` `[E]` says which experts take part; `None`: all.
///
/// Sort by expert; gate and up GEMM (bf16 each); [`silu_mul`]; down GEMM (bf16); [`unpermute_reduce`]. With
/// [`GroupedArithmetic::W8a8`] the input of each GEMM is quantised: x once a token, h in rows of pairs.
pub fn grouped_layer(
    experts: &DenseExperts,
    resident: Option<&[bool]>,
    top_k: usize,
    options: &GroupedOptions,
    inputs: &LayerInputs<'_>,
) -> Result<LayerResult> {
    let shape = experts.shape().with_top_k(top_k);
    options.arithmetic.check(experts.format())?;
    options.gating.check()?;
    if inputs.x_type != XType::Bf16 {
        return Err(Error::argument("x_type", "f16", "bf16"));
    }
    inputs.check(&shape, crate::Activation::Bf16)?;
    let everywhere = vec![true; shape.experts];
    let resident = resident.unwrap_or(&everywhere);
    check_len("resident", resident.len(), shape.experts)?;

    let sorted = sort_by_expert(inputs.topk_ids, top_k, resident)?;
    let status = Status { bad_id: sorted.bad_expert_id, f16_range: false };
    if inputs.tokens == 0 {
        return Ok(LayerResult { out: Vec::new(), status });
    }
    let pass = Pass { experts, resident, options, sorted: &sorted };
    let (hidden, intermediate) = (shape.hidden, shape.intermediate);
    let gate_up = |a: Operand<'_>| -> Result<[Vec<u16>; 2]> {
        let ids = Some(&sorted.sorted_token_ids[..]);
        Ok([
            pass.gemm(|expert| &expert.gate, 0, intermediate, hidden, a, ids)?,
            pass.gemm(|expert| &expert.up, 1, intermediate, hidden, a, ids)?,
        ])
    };
    let down = |h: Operand<'_>| pass.gemm(|expert| &expert.down, 2, shape.output, intermediate, h, None);
    let y = match options.arithmetic {
        GroupedArithmetic::W8a8 => {
            let x = per_token_group_quant_fp8(inputs.x, inputs.tokens, hidden, hidden)?;
            let [gate, up] = gate_up(e4m3(&x))?;
            let rows = gate.len() / intermediate;
            down(e4m3(&silu_mul_quant_fp8(&gate, &up, rows, intermediate, &options.gating)?))?
        }
        GroupedArithmetic::W8a16 | GroupedArithmetic::Bf16 => {
            let [gate, up] = gate_up(Operand::Bf16(inputs.x))?;
            down(Operand::Bf16(&silu_mul(&gate, &up, &options.gating)?))?
        }
    };
    let live = sorted.expert_offsets[shape.experts];
    let out = unpermute_reduce(&y, shape.output, &sorted.token_to_perm, inputs.topk_w, top_k, live)?;
    Ok(LayerResult { out, status })
}

fn e4m3(quantized: &Quantized) -> Operand<'_> {
    Operand::E4m3 { codes: &quantized.codes, scales: &quantized.scales }
}

/// What the three GEMMs of a pass share.
struct Pass<'a> {
    experts: &'a DenseExperts,
    resident: &'a [bool],
    options: &'a GroupedOptions,
    sorted: &'a Sorted,
}

impl Pass<'_> {
    /// The GEMM with one matrix of the experts and the bias of that number: one row a pair, +0 where no expert gives one.
    fn gemm(
        &self,
        matrix: impl Fn(&DenseExpert) -> &DenseMatrix,
        bias: usize,
        n: usize,
        k: usize,
        a: Operand<'_>,
        sorted_token_ids: Option<&[i32]>,
    ) -> Result<Vec<u16>> {
        let experts = self.experts.experts();
        let weights = experts.iter().zip(self.resident).map(|(expert, &resident)| {
            resident.then(|| match matrix(expert) {
                DenseMatrix::Bf16(values) => Operand::Bf16(values),
                DenseMatrix::Fp8 { codes, scales } => Operand::E4m3 { codes, scales },
            })
        });
        let biases = experts.iter().filter_map(|expert| expert.biases.as_ref());
        let biases = biases.flat_map(|biases| &biases[bias]).copied().collect::<Vec<_>>();
        let gemm = GroupedGemm {
            kind: match self.options.arithmetic {
                GroupedArithmetic::W8a8 => GemmKind::W8a8,
                GroupedArithmetic::W8a16 => GemmKind::Fp8,
                GroupedArithmetic::Bf16 => GemmKind::Bf16,
            },
            n,
            k,
            expert_offsets: &self.sorted.expert_offsets,
            sorted_token_ids,
            a,
            weights: &weights.collect::<Vec<_>>(),
            bias: self.experts.has_biases().then_some(&biases),
        };
        let mut out = vec![0; self.sorted.sorted_pairs.len() * n];
        gemm.run(&mut out)?;
        Ok(out)
    }
}
