//! The CPU reference: what every back end's results are measured against.
//!
//! It is written to be read, straight from the definition of each operation, and shares no arithmetic with the kernels
//! (only the index formulas of `kernels_gpu::layout`). [`Mode::Exact`] gives the bits of an H200, through the model of
//! its tensor cores in [`mma`]. [`Mode::Fast`] sums plainly in f64 and comes with a bound, [`layer_bound`].

mod bound;
mod fp4;
mod gate_topk;
mod gemm;
mod grouped_layer;
pub mod math;
pub mod mma;
mod quant;
mod router;
mod silu_mul;
mod sort;
mod topk;
mod unpermute;
mod worklist;

pub use bound::{layer_bound, sum_bound};
pub use fp4::*;
pub use gate_topk::*;
pub use gemm::*;
pub use grouped_layer::*;
pub use quant::*;
pub use router::*;
pub use silu_mul::*;
pub use sort::*;
pub use topk::*;
pub use unpermute::*;
pub use worklist::*;

use crate::error::{Error, Result};

/// Rows of a buffer of `len` elements with `width` elements each; `Err` naming `width_name` if that is 0, and `name` if
/// the last row is not whole.
fn rows_of(name: &'static str, len: usize, width_name: &'static str, width: usize) -> Result<usize> {
    if width == 0 {
        return Err(Error::argument(width_name, 0, "at least 1"));
    }
    if !len.is_multiple_of(width) {
        let needed = format!("a multiple of {width_name} = {width} elements");
        return Err(Error::argument(name, format!("of {len} elements"), needed));
    }
    Ok(len / width)
}

/// Sum of a warp's 32 partial sums as all its lanes form it: p[l] + p[l^d] for d = 16, 8, 4, 2, 1.
fn tree(mut partials: [f32; 32]) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        partials = std::array::from_fn(|lane| partials[lane] + partials[lane ^ distance]);
    }
    partials[0]
}
