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

/// The programs in README.md and docs/ compile and run as documentation tests.
#[cfg(doctest)]
mod programs_in_the_docs {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/emulator.md")]
    struct Emulator;
    #[doc = include_str!("../docs/add-a-kernel.md")]
    struct AddAKernel;
}
