//! Mixture-of-experts layers for NVIDIA GPUs whose kernels are written in Rust.

pub mod checkpoint;
pub mod error;
pub mod formats;
pub mod reference;
pub mod types;

pub use error::{Error, Result};
pub use types::*;
