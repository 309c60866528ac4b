//! Asynchronous copies from global to shared memory (`cp.async`, PTX ISA "Data Movement: Non-bulk copy"). A copy has
//! landed for the issuing thread after [`wait`], and for other threads after a barrier on top of it.

use crate::imp;
use crate::memory::{Element, In};
use crate::shared::Shared;

/// Copies the 16 bytes at element `from` to shared element `to` past L1, and has L2 fetch 128 bytes
/// (`cp.async.cg.shared.global.L2::128B`). Both 16-byte aligned.
#[inline(always)]
#[track_caller]
pub fn async16<D: Element, S: Element>(to: Shared<D>, to_index: u32, from: In<S>, from_index: usize) {
    to.check_bytes(to_index, 16);
    imp::cp_async16(to.byte(to_index), from.0, from_index, 16)
}

/// As [`async16`], but only the first `bytes` (0 to 16) are read and the rest is filled with zeros.
#[inline(always)]
#[track_caller]
pub fn async16_zfill<D: Element, S: Element>(to: Shared<D>, to_index: u32, from: In<S>, from_index: usize, bytes: u32) {
    to.check_bytes(to_index, 16);
    imp::cp_async16(to.byte(to_index), from.0, from_index, bytes)
}

/// Copies `bytes` (0 to 8) of the 8 bytes at element `from` and fills the rest with zeros. Both 8-byte aligned
/// (`cp.async.ca`).
#[inline(always)]
#[track_caller]
pub fn async8_zfill<D: Element, S: Element>(to: Shared<D>, to_index: u32, from: In<S>, from_index: usize, bytes: u32) {
    to.check_bytes(to_index, 8);
    imp::cp_async8(to.byte(to_index), from.0, from_index, bytes)
}

/// Copies `bytes` (0 to 4) of the 4 bytes at element `from` and fills the rest with zeros. Both 4-byte aligned
/// (`cp.async.ca`).
#[inline(always)]
#[track_caller]
pub fn async4_zfill<D: Element, S: Element>(to: Shared<D>, to_index: u32, from: In<S>, from_index: usize, bytes: u32) {
    to.check_bytes(to_index, 4);
    imp::cp_async4(to.byte(to_index), from.0, from_index, bytes)
}

/// Closes this thread's current group of copies (`cp.async.commit_group`).
#[inline(always)]
#[track_caller]
pub fn commit() {
    imp::cp_async_commit()
}

/// Waits until at most `PENDING` of this thread's latest groups are in flight (`cp.async.wait_group`).
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: u32>() {
    imp::cp_async_wait::<PENDING>()
}
