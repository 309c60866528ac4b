//! Differential tests: the kernels on the emulator, and on the GPU where there is one, against the exact reference, bit for bit. One
//! file an operation, and one for public bug reports. One executable, since every executable embeds the kernels of each architecture.

mod cases;
mod combine;
mod common;
mod fc1;
mod fc2;
mod gate_topk;
mod gemm;
mod grouped_layer;
mod layer;
mod quant;
mod route_prep;
mod router;
mod scale;
mod silu_mul;
mod sort;
mod topk;
mod unpermute;
mod worklist;
