//! Checked launchers of the single operations, one file an operation, named as its kernel, its reference and its test.
//!
//! Every launcher checks all arguments before anything is launched; errors name the argument, its value and what is needed. Zero
//! rows or tokens launch nothing. `prepare` readies the kernels on a device, after which a launch allocates and waits for
//! nothing and can be captured in a graph.

mod experts;
pub mod gate_topk;
pub mod gemm;
pub mod router;
pub mod topk;

pub use experts::ExpertTable;
