//! What a kernel may call.
//!
//! One set of functions with two implementations: for `nvptx64` they are PTX instructions, on the CPU they are a SIMT
//! emulator that runs the same kernel source and reports what a GPU would let pass silently (see [`emu`]).
//!
//! | module | what | PTX ISA section |
//! |---|---|---|
//! | [`thread`] | indices of thread, warp and block | special registers |
//! | [`sync`] | block, warp and named barriers; the convergence guard | `bar.sync`, `bar.warp.sync` |
//! | [`warp`] | shuffles, votes, matches, reductions | `shfl.sync`, `vote.sync`, `match.sync`, `redux.sync` |
//! | [`memory`] | typed global buffers | `ld.global`, `ld.global.nc`, `st.global`, `atom.global` |
//! | [`shared`] | dynamic shared memory | `ld.shared`, `st.shared`, `ldmatrix` |
//! | [`copy`] | asynchronous copies from global to shared memory | `cp.async` |
//! | [`dependent`] | kernels that start before the one ahead has ended | `griddepcontrol` |
//! | [`cvt`] | conversions and packed products | `cvt`, `mul.f16x2`, `mul.bf16x2` |
//! | [`mma`] | tensor cores | `mma.sync` |
//! | [`math`] | the explicit `exp` and NaN-keeping clamps | `min.NaN`, `max.NaN` |
//! | [`arch`] | which instructions an architecture has | `.target` |
//!
//! # Convergence
//! LLVM treats inline assembly as freely duplicable, also into divergent branches. Collective instructions are therefore
//! either convergent LLVM intrinsics (shuffles, votes, barriers), or stand in a straight-line region with
//! [`sync::converge`]. The wrappers for shuffles, votes, matches and `ldmatrix` bring the guard themselves; around `mma`
//! the kernel places one per k-step.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, link_llvm_intrinsics, abi_unadjusted),
    allow(internal_features)
)]

pub mod arch;
pub mod copy;
pub mod cvt;
pub mod dependent;
pub mod kernel;
pub mod math;
pub mod memory;
pub mod mma;
pub mod shared;
pub mod sync;
pub mod thread;
pub mod warp;

#[cfg(target_arch = "nvptx64")]
mod ptx;
#[cfg(target_arch = "nvptx64")]
use ptx as imp;

#[cfg(not(target_arch = "nvptx64"))]
pub mod emu;
#[cfg(not(target_arch = "nvptx64"))]
use emu as imp;
