//! Figures of other implementations, measured on one H200 (driver 580.159, CUDA 13.0) with the protocol of this module: the times that
//! a decode layer is compared with.

use crate::types::{Gating, WeightFormat};

/// Numbers of tokens in the tables.
pub const TOKENS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// Recorded times of a read-only kernel over cold memory: megabytes and microseconds.
pub const RECORDED_READ: [(usize, f32); 3] = [(21, 6.3), (85, 20.1), (512, 113.9)];

/// Recorded microseconds of a layer, for each of [`TOKENS`].
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    /// Mean number of distinct experts that the routing chose.
    pub experts: [f32; 8],
    /// A read-only kernel over the same weight bytes.
    pub read_floor: [f32; 8],
    /// A CUDA C++ kernel with the order of sums that is here called seed, its best K split and warps.
    pub cuda: [f32; 8],
    /// The fastest implementation with 4-bit weights and 16-bit activations.
    pub best: [f32; 8],
    /// Its name.
    pub best_name: [&'static str; 8],
}

/// A layer that people run.
#[derive(Clone, Copy, Debug)]
pub struct BenchShape {
    /// Short name.
    pub name: &'static str,
    /// Hidden size K, which is the output width too.
    pub hidden: usize,
    /// Intermediate size I.
    pub intermediate: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Format of the weights.
    pub format: WeightFormat,
    /// What joins gate and up.
    pub gating: Gating,
    /// Whether the experts have biases.
    pub biases: bool,
    /// What others reached, where it is recorded.
    pub recorded: Option<Recorded>,
}

/// An NVFP4 layer with top-8 of which nothing is recorded.
const UNRECORDED: BenchShape = BenchShape {
    name: "",
    hidden: 0,
    intermediate: 0,
    experts: 0,
    top_k: 8,
    format: WeightFormat::Nvfp4,
    gating: Gating::Silu { limit: None },
    biases: false,
    recorded: None,
};

/// All shapes of the decode table.
pub const SHAPES: [BenchShape; 9] = [
    BenchShape {
        name: "qwen3_30b",
        hidden: 2048,
        intermediate: 768,
        experts: 128,
        top_k: 8,
        format: WeightFormat::Nvfp4,
        gating: Gating::Silu { limit: None },
        biases: false,
        recorded: Some(Recorded {
            experts: [8.0, 15.2, 28.8, 51.8, 85.5, 111.4, 126.0, 128.0],
            read_floor: [6.3, 10.5, 18.3, 31.9, 51.6, 66.6, 75.0, 76.1],
            cuda: [27.4, 38.0, 60.3, 93.5, 139.1, 181.5, 230.3, 340.8],
            best: [27.4, 38.0, 54.7, 78.9, 114.3, 141.1, 157.2, 168.1],
            best_name: ["CUDA seed", "CUDA seed", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin"],
        }),
    },
    BenchShape {
        name: "glm45_air",
        hidden: 4096,
        intermediate: 1408,
        experts: 128,
        top_k: 8,
        format: WeightFormat::Nvfp4,
        gating: Gating::Silu { limit: None },
        biases: false,
        recorded: Some(Recorded {
            experts: [8.0, 15.2, 28.8, 51.8, 85.5, 111.4, 126.0, 128.0],
            read_floor: [18.6, 33.9, 63.1, 112.2, 183.4, 238.3, 269.2, 273.4],
            cuda: [64.3, 98.4, 163.7, 274.3, 434.2, 574.5, 700.6, 1019.2],
            best: [55.4, 80.8, 130.2, 208.6, 327.3, 415.1, 478.9, 508.2],
            best_name: ["Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin"],
        }),
    },
    BenchShape {
        name: "k4096_i1024",
        hidden: 4096,
        intermediate: 1024,
        experts: 128,
        top_k: 8,
        format: WeightFormat::Nvfp4,
        gating: Gating::Silu { limit: None },
        biases: false,
        recorded: Some(Recorded {
            experts: [8.0, 15.1, 28.9, 51.7, 85.7, 111.5, 126.1, 128.0],
            read_floor: [14.0, 25.2, 46.7, 81.8, 134.4, 174.1, 196.5, 199.5],
            cuda: [45.4, 74.0, 123.4, 199.9, 318.6, 421.3, 524.9, 765.2],
            best: [44.5, 65.5, 103.5, 160.8, 248.7, 315.9, 362.0, 384.2],
            best_name: ["Humming", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin"],
        }),
    },
    BenchShape {
        name: "qwen3_235b",
        hidden: 4096,
        intermediate: 1536,
        experts: 128,
        top_k: 8,
        format: WeightFormat::Nvfp4,
        gating: Gating::Silu { limit: None },
        biases: false,
        recorded: Some(Recorded {
            experts: [8.0, 15.2, 28.8, 51.8, 85.5, 111.4, 126.0, 128.0],
            read_floor: [20.1, 36.7, 68.7, 122.2, 199.8, 259.7, 293.5, 298.1],
            cuda: [66.7, 104.7, 176.7, 295.9, 468.5, 618.2, 751.6, 1077.1],
            best: [55.8, 84.6, 138.7, 224.5, 352.9, 451.1, 520.2, 554.1],
            best_name: ["Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin"],
        }),
    },
    BenchShape {
        name: "dsv3_tp8",
        hidden: 7168,
        intermediate: 256,
        experts: 256,
        top_k: 8,
        format: WeightFormat::Nvfp4,
        gating: Gating::Silu { limit: None },
        biases: false,
        recorded: Some(Recorded {
            experts: [8.0, 15.8, 30.3, 56.6, 101.8, 162.9, 221.1, 252.5],
            read_floor: [7.1, 12.4, 22.3, 39.8, 70.8, 112.2, 151.4, 172.5],
            cuda: [37.0, 48.1, 72.8, 122.3, 214.5, 347.4, 523.4, 765.3],
            best: [33.9, 48.1, 67.6, 101.3, 159.6, 240.6, 317.0, 367.1],
            best_name: ["Humming", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin"],
        }),
    },
    BenchShape {
        name: "dsv3_full",
        hidden: 7168,
        intermediate: 2048,
        experts: 256,
        top_k: 8,
        format: WeightFormat::Nvfp4,
        gating: Gating::Silu { limit: None },
        biases: false,
        recorded: Some(Recorded {
            experts: [8.0, 15.8, 30.3, 56.7, 102.6, 162.9, 222.7, 252.4],
            read_floor: [45.3, 87.5, 165.9, 307.9, 555.4, 879.8, 1201.1, 1361.1],
            cuda: [138.2, 240.8, 431.0, 776.2, 1374.9, 2219.5, 3079.0, 3679.8],
            best: [97.7, 165.4, 294.1, 516.6, 922.5, 1479.3, 2067.0, 2316.7],
            best_name: ["Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin", "Marlin"],
        }),
    },
    BenchShape {
        name: "gptoss_120b",
        hidden: 2880,
        intermediate: 2880,
        experts: 128,
        top_k: 4,
        format: WeightFormat::Mxfp4,
        gating: Gating::GPT_OSS,
        biases: true,
        recorded: None,
    },
    BenchShape { name: "qwen36_35b", hidden: 2048, intermediate: 512, experts: 256, ..UNRECORDED },
    BenchShape { name: "kimi_k2", hidden: 7168, intermediate: 2048, experts: 384, ..UNRECORDED },
];

/// Numbers of tokens in the table of layers with FP8 and BF16 experts.
pub const GROUPED_TOKENS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192];

/// Recorded microseconds of a layer with FP8 or BF16 experts: up to 128 tokens vLLM's Triton kernels, beyond the fastest with the same
/// weights.
#[derive(Clone, Copy, Debug)]
pub struct RecordedGrouped {
    /// Name of the layer, as in [`SHAPES`].
    pub shape: &'static str,
    /// "fp8" (e4m3 weights with 128x128 blocks) or "bf16".
    pub weights: &'static str,
    /// For each of [`GROUPED_TOKENS`].
    pub microseconds: [f32; 11],
    /// What was fastest at 512, 2048 and 8192 tokens.
    pub fastest: [&'static str; 3],
}

/// All of them.
pub const RECORDED_GROUPED: [RecordedGrouped; 6] = [
    RecordedGrouped {
        shape: "qwen3_30b",
        weights: "fp8",
        microseconds: [28.0, 35.9, 51.8, 83.4, 121.5, 152.2, 168.5, 176.7, 225.0, 419.0, 1065.0],
        fastest: ["Triton", "DeepGEMM", "DeepGEMM"],
    },
    RecordedGrouped {
        shape: "qwen3_30b",
        weights: "bf16",
        microseconds: [30.7, 46.8, 77.4, 133.6, 209.4, 264.5, 301.4, 304.9, 336.0, 502.0, 1457.0],
        fastest: ["Triton"; 3],
    },
    RecordedGrouped {
        shape: "qwen3_235b",
        weights: "fp8",
        microseconds: [54.4, 97.9, 149.8, 248.6, 394.8, 507.5, 578.7, 598.7, 725.0, 1282.0, 3315.0],
        fastest: ["Triton", "DeepGEMM", "DeepGEMM"],
    },
    RecordedGrouped {
        shape: "qwen3_235b",
        weights: "bf16",
        microseconds: [85.5, 149.0, 267.5, 461.2, 742.9, 962.2, 1101.7, 1131.7, 1220.0, 2037.0, 5400.0],
        fastest: ["Triton", "Triton", "torch"],
    },
    RecordedGrouped {
        shape: "dsv3_tp8",
        weights: "fp8",
        microseconds: [42.9, 49.7, 66.6, 103.5, 168.8, 295.8, 334.3, 384.8, 521.0, 823.0, 1823.0],
        fastest: ["Triton", "Triton", "DeepGEMM"],
    },
    RecordedGrouped {
        shape: "dsv3_tp8",
        weights: "bf16",
        microseconds: [46.1, 59.8, 97.0, 166.4, 285.8, 437.3, 649.8, 681.0, 761.0, 1006.0, 2396.0],
        fastest: ["Triton"; 3],
    },
];

/// Recorded microseconds of a layer with such weights, and of what.
pub(super) fn recorded_grouped(shape: &str, weights: &str, tokens: usize) -> Option<(f32, &'static str)> {
    let column = GROUPED_TOKENS.iter().position(|&t| t == tokens)?;
    let row = RECORDED_GROUPED.iter().find(|row| row.shape == shape && row.weights == weights)?;
    let name = column.checked_sub(GROUPED_TOKENS.len() - 3).map_or("Triton", |place| row.fastest[place]);
    Some((row.microseconds[column], name))
}

/// Numbers of tokens in the router table.
pub const ROUTER_TOKENS: [usize; 6] = [1, 8, 64, 512, 2048, 8192];

/// Recorded microseconds of vLLM 0.26's fused softmax top-8.
#[derive(Clone, Copy, Debug)]
pub struct RecordedTopK {
    /// Name of the operation here.
    pub operation: &'static str,
    /// Number of experts.
    pub experts: usize,
    /// For each of [`ROUTER_TOKENS`].
    pub microseconds: [f32; 6],
}

/// All of them.
pub const RECORDED_TOPK: [RecordedTopK; 4] = [
    RecordedTopK { operation: "topk_f32", experts: 128, microseconds: [3.7, 3.8, 4.0, 4.3, 6.2, 15.4] },
    RecordedTopK { operation: "topk_bf16", experts: 128, microseconds: [3.7, 3.8, 3.9, 4.0, 4.5, 10.1] },
    RecordedTopK { operation: "topk_f32", experts: 256, microseconds: [3.9, 4.2, 4.4, 4.8, 7.2, 18.6] },
    RecordedTopK { operation: "topk_bf16", experts: 256, microseconds: [3.9, 4.1, 4.3, 4.6, 7.0, 18.3] },
];
/// Numbers of tokens in the table of operations.
const OP_TOKENS: [usize; 6] = [1, 8, 64, 512, 2048, 8192];

/// Operation here, its width or number of experts, name of the other implementation (vLLM 0.26), microseconds for each of
/// [`OP_TOKENS`].
type RecordedOp = (&'static str, usize, &'static str, [f32; 6]);

const OPS: [RecordedOp; 10] = [
    ("sort_by_expert", 128, "moe_align_block_size", [4.4, 4.3, 4.5, 5.8, 10.6, 29.0]),
    ("sort_by_expert", 256, "moe_align_block_size", [4.4, 4.5, 4.9, 6.4, 9.7, 24.8]),
    ("per_token_group_quant_fp8", 2048, "group quant CUDA", [1.7, 1.8, 1.9, 3.7, 9.8, 34.3]),
    ("per_token_group_quant_fp8", 7168, "group quant CUDA", [1.7, 1.7, 2.6, 8.6, 30.1, 113.7]),
    ("silu_mul", 768, "silu_and_mul", [1.7, 1.7, 2.7, 6.4, 20.0, 72.0]),
    ("silu_mul", 2048, "silu_and_mul", [1.8, 1.8, 3.9, 14.0, 49.1, 186.7]),
    ("silu_mul_quant_fp8", 768, "Triton", [f32::NAN, f32::NAN, 2.4, 6.5, 20.9, 75.2]),
    ("silu_mul_quant_fp8", 2048, "Triton", [f32::NAN, f32::NAN, 3.5, 14.4, 51.4, 197.7]),
    ("unpermute_reduce", 2048, "moe_unpermute", [3.4, 3.4, 3.6, 7.7, 22.4, 77.0]),
    ("unpermute_reduce", 7168, "moe_unpermute", [9.3, 9.4, 17.7, 25.6, 70.3, 261.7]),
];

/// Recorded microseconds of an operation, and of what.
pub(super) fn recorded_op(operation: &str, size: usize, tokens: usize) -> Option<(f32, &'static str)> {
    let column = OP_TOKENS.iter().position(|&t| t == tokens)?;
    let (_, _, name, figures) = OPS.iter().find(|(op, at, ..)| *op == operation && *at == size)?;
    Some((figures[column], *name)).filter(|(us, _)| !us.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each row belongs to a layer of the table, and the columns to their names.
    #[test]
    fn recorded_layers_are_found() {
        for row in &RECORDED_GROUPED {
            assert!(super::super::GEMM_SHAPES.iter().any(|shape| shape.name == row.shape), "{}", row.shape);
        }
        assert_eq!(recorded_grouped("dsv3_tp8", "fp8", 128), Some((384.8, "Triton")));
        assert_eq!(recorded_grouped("dsv3_tp8", "fp8", 2048), Some((823.0, "Triton")));
        assert_eq!(recorded_grouped("dsv3_tp8", "fp8", 8192), Some((1823.0, "DeepGEMM")));
        assert_eq!(recorded_grouped("qwen3_235b", "bf16", 512), Some((1220.0, "Triton")));
        assert_eq!(recorded_grouped("qwen3_235b", "bf16", 513), None);
        assert_eq!(recorded_grouped("gptoss_120b", "bf16", 512), None);
    }
}
