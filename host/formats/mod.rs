//! Number formats and the containers of expert weights: NVFP4, MXFP4, block-scaled fp8, bf16.
//!
//! Every type says which layout it holds: scales are either [`LinearScales`] or [`SwizzledScales`], and a per-tensor
//! scale is a [`GlobalScale`] that carries its convention, so that neither can be taken for the other.

pub mod dense;
pub mod e2m1;
pub mod e4m3;
pub mod e8m0;
pub mod float16;
pub mod fp4;
pub mod quantize;
pub mod scales;

pub use dense::{DenseExpert, DenseExperts, DenseFormat, DenseMatrix, FP8_BLOCK, RouterWeights, SharedExpert};
pub use fp4::{ExpertShape, ExpertTensors, Fp4Buffers, Fp4Experts, Fp4Matrix, GlobalScale};
pub use scales::{LinearScales, SwizzledScales};

/// Consecutive elements along k that share one NVFP4 block scale.
pub const NVFP4_BLOCK: usize = 16;
