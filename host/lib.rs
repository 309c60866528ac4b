//! Mixture-of-experts layers for NVIDIA GPUs whose kernels are written in Rust.

pub mod bench;
pub mod checkpoint;
pub mod device;
pub mod diff;
pub mod error;
pub mod formats;
pub mod layer;
pub mod plan;
pub mod reference;
pub mod types;
pub mod workspace;

pub use error::{Error, Result};
pub use types::*;
