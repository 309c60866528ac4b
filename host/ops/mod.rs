//! Checked launchers of the single operations, one file an operation, named as its kernel, its reference and its test.
//!
//! Every launcher checks all arguments before anything is launched; errors name the argument, its value and what is needed. Zero
//! rows or tokens launch nothing. `prepare` readies the kernels on a device, after which a launch allocates and waits for
//! nothing and can be captured in a graph.

mod experts;
pub mod gate_topk;
pub mod gemm;
pub mod quant;
pub mod router;
mod rows;
pub mod silu_mul;
pub mod sort;
pub mod topk;
pub mod unpermute;
pub mod worklist;

pub use experts::{Addresses, ExpertTable};
pub use rows::Rows;
use rows::{check_columns, check_rows};
