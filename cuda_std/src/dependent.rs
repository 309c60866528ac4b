//! Kernels that start before the kernel ahead of them has ended (`griddepcontrol`, PTX ISA "Parallel Synchronization").
//!
//! A kernel that is declared `early` (`name[threads, min_blocks, early]`, see [`crate::kernels!`]) may be started once every
//! block of the kernel ahead of it in the stream has called [`launch_dependents`] or ended. What it does before [`wait`]
//! then overlaps with the end of that kernel. The rules, which the emulator checks:
//! - Before its own [`wait`] a thread writes no global memory, and reads only what no kernel writes that may still run. That
//!   is the kernel ahead; and also those ahead of that one, if some thread of it calls [`launch_dependents`] before its
//!   [`wait`]. Data that the host has copied is always complete.
//! - Every thread of an early kernel calls [`wait`] before it ends: only then are the kernels after it behind those before it.
//!
//! A kernel ahead that never calls [`launch_dependents`] does so by ending. What a kernel writes is visible to the next one
//! after that one's [`wait`] alone, whether it was written before or after the call.
//!
//! Where the architecture has no such instructions both functions are nothing, and kernels start in turn.

use crate::arch::Arch;
use crate::imp;

/// Waits until all kernels ahead have ended and what they wrote can be read (`griddepcontrol.wait`). Nothing in a kernel
/// that is not declared `early`.
#[inline(always)]
#[track_caller]
pub fn wait<A: Arch>() {
    if A::DEPENDENT_LAUNCH {
        imp::dependency_wait()
    }
}

/// Lets an early kernel that comes next start, once all blocks have called this or ended
/// (`griddepcontrol.launch_dependents`). One thread's call counts for its block. It publishes no data.
#[inline(always)]
#[track_caller]
pub fn launch_dependents<A: Arch>() {
    if A::DEPENDENT_LAUNCH {
        imp::launch_dependents()
    }
}
