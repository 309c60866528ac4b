//! Mixture-of-experts layers for NVIDIA GPUs whose kernels are written in Rust.
//!
//! | module | what |
//! |---|---|
//! | [`checkpoint`] | mixture-of-experts blocks of other tools' checkpoints |
//! | [`formats`] | E2M1, e4m3, e8m0, scale layouts, packing and quantising experts to NVFP4 and MXFP4; bf16 and fp8 experts |
//! | [`device`] | a GPU or the emulator behind one trait, and typed buffers |
//! | [`layer`] | FP4 weights on a device, and the forward pass |
//! | [`grouped_layer`] | the same for FP8 and BF16 weights |
//! | [`ops`] | the single operations, each with a checked launcher |
//! | [`plan`], [`workspace`] | kernels, grids and scratch memory of a pass; limits |
//! | [`mod@reference`] | what a pass must give, bit for bit |
//! | [`diff`], [`mod@bench`] | inputs for differential tests, benchmarks |
//!
//! In short: [`formats::Fp4Experts`] -> [`layer::Layer::new`] -> [`layer::Layer::plan`] -> [`workspace::Workspace::new`] ->
//! [`layer::Layer::forward`]. README.md has a program that does it, docs/bits.md the definition of the results.
//!
//! Whatever is outside the limits gives an [`Error`] that names the argument, its value and what is needed.

pub mod bench;
pub mod checkpoint;
pub mod device;
pub mod diff;
mod dry_run;
pub mod error;
pub mod formats;
pub mod grouped_layer;
pub mod layer;
pub mod ops;
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
