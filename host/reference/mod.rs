//! The CPU reference: what every back end's results are measured against.
//!
//! It is written to be read, straight from the definition of each operation, and shares no arithmetic with the kernels
//! (only the index formulas of `kernels_gpu::layout`). [`Mode::Exact`] gives the bits of an H200, through the model of
//! its tensor cores in [`mma`]. [`Mode::Fast`] sums plainly in f64 and comes with a bound, [`layer_bound`].

mod bound;
mod fp4;
pub mod math;
pub mod mma;

pub use bound::{layer_bound, sum_bound};
pub use fp4::*;
