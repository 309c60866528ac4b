//! The kernels of megamoe: one file an operation.
//!
//! | file | operation | kernels |
//! |---|---|---|
//! | [`route_prep`] | routing table from top-k ids, activations into tensor-core order | one per pair of input and activation type |
//! | [`fc1`] | gate and up projections, joined | weights x activation x K split |
//! | [`fc2`] | down projection, one row of partial results a pair | weights x activation x warps a block |
//! | [`direct`] | one or two tokens: FC1 and FC2 with the sum, straight from the ids | weights x activation |
//! | [`gemm`] | grouped GEMMs over tables of weights: FP8 and BF16 experts | activation x weights x tile |
//! | [`combine`] | sum over a token's experts | one |
//! | [`router`] | router projection, f32 or strictly ordered | by the tile of a block |
//! | [`gate_topk`] | NVFP4 router, with or without the choice of experts | fused, and logits alone |
//! | [`topk`] | experts and weights of a token from its logits; weights on inputs | by the number of experts |
//! | [`sort`] | rows by expert, from top-k ids | count and place |
//! | [`worklist`] | tiles of a grouped GEMM | two item formats |
//! | [`quant`] | bf16 to e4m3 with a scale per 128 | any columns, or whole vectors |
//! | [`silu_mul`] | gated activation, alone or with the quantiser | gating x columns |
//! | [`unpermute`] | sum over a token's experts at sorted rows, and the shared expert | sum, blend, both |
//! | [`bandwidth`] | reads, copies and noise for benchmarks | three |
//!
//! Shared pieces: [`stream`] moves weight tiles through shared memory, [`tensor`] is the inner loop, [`dequant`] turns codes and scales into mma operands,
//! [`schedule`] deals out the work, [`order`] names the orders of sums, [`scan`] adds up over a block, [`layout`] holds the index formulas.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_ptx, asm_experimental_arch))]

pub mod bandwidth;
pub mod combine;
pub mod dequant;
pub mod direct;
pub mod fc1;
pub mod fc2;
pub mod gate_topk;
pub mod gemm;
pub mod layout;
pub mod order;
pub mod quant;
pub mod route_prep;
pub mod router;
pub mod scan;
pub mod schedule;
pub mod silu_mul;
pub mod sort;
pub mod stream;
pub mod tensor;
pub mod topk;
pub mod unpermute;
pub mod worklist;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: stops the kernel with an error that the host sees; there is nobody to report a message to.
    unsafe {
        core::arch::asm!("trap;");
        core::hint::unreachable_unchecked()
    }
}

/// Bits of the status word. Kernels set them, the host reads and clears them.
pub mod status {
    /// An expert id at or above the number of experts was seen (its pair was skipped).
    pub const BAD_EXPERT_ID: u32 = 1;
    /// A finite value became infinite in f16.
    pub const F16_RANGE: u32 = 2;
}
