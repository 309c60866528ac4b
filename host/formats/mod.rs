//! Number formats and the containers of quantised expert weights.
//!
//! Every type says which layout it holds: scales are either [`LinearScales`] or [`SwizzledScales`], and a per-tensor
//! scale is a [`GlobalScale`] that carries its convention, so that neither can be taken for the other.

pub mod e2m1;
pub mod e4m3;
pub mod float16;
pub mod nvfp4;
pub mod quantize;
pub mod scales;

pub use nvfp4::{ExpertShape, ExpertTensors, GlobalScale, Nvfp4Buffers, Nvfp4Experts, Nvfp4Matrix};
pub use scales::{LinearScales, SwizzledScales};

/// Consecutive elements along k that share one NVFP4 block scale.
pub const NVFP4_BLOCK: usize = 16;
