//! Warp-wide operations. All 32 lanes must take part.

use crate::imp;

/// A 32-bit value that lanes exchange.
pub trait Word: Copy {
    /// Its bits.
    fn to_bits(self) -> u32;
    /// The value of these bits.
    fn from_bits(bits: u32) -> Self;
}

impl Word for u32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
}

impl Word for i32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self as u32
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits as i32
    }
}

impl Word for f32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

/// The value that lane `source` (mod 32) holds (`shfl.sync.idx`).
#[inline(always)]
#[track_caller]
pub fn shfl<T: Word>(value: T, source: u32) -> T {
    T::from_bits(imp::shfl_idx(value.to_bits(), source))
}

/// The value of lane `lane ^ mask` (`shfl.sync.bfly`).
#[inline(always)]
#[track_caller]
pub fn shfl_xor<T: Word>(value: T, mask: u32) -> T {
    T::from_bits(imp::shfl_bfly(value.to_bits(), mask))
}

/// The value of lane `lane + delta`; lanes without one keep their own (`shfl.sync.down`).
#[inline(always)]
#[track_caller]
pub fn shfl_down<T: Word>(value: T, delta: u32) -> T {
    T::from_bits(imp::shfl_down(value.to_bits(), delta))
}

/// The value of lane `lane - delta`; lanes without one keep their own (`shfl.sync.up`).
#[inline(always)]
#[track_caller]
pub fn shfl_up<T: Word>(value: T, delta: u32) -> T {
    T::from_bits(imp::shfl_up(value.to_bits(), delta))
}

/// Bit i is set where lane i's `predicate` holds (`vote.sync.ballot`).
#[inline(always)]
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    imp::ballot(predicate)
}

/// Whether any lane's `predicate` holds.
#[inline(always)]
#[track_caller]
pub fn any(predicate: bool) -> bool {
    imp::ballot(predicate) != 0
}

/// Whether every lane's `predicate` holds.
#[inline(always)]
#[track_caller]
pub fn all(predicate: bool) -> bool {
    imp::ballot(predicate) == u32::MAX
}

/// Lanes that hold the same value as this one (`match.sync.any`).
#[inline(always)]
#[track_caller]
pub fn match_any(value: u32) -> u32 {
    imp::match_any(value)
}

/// Sum over the warp, modulo 2^32 (`redux.sync.add`).
#[inline(always)]
#[track_caller]
pub fn sum(value: u32) -> u32 {
    imp::redux_add(value)
}

/// Largest value of the warp (`redux.sync.max.u32`).
#[inline(always)]
#[track_caller]
pub fn max(value: u32) -> u32 {
    imp::redux_max(value)
}

/// Smallest value of the warp (`redux.sync.min.u32`).
#[inline(always)]
#[track_caller]
pub fn min(value: u32) -> u32 {
    imp::redux_min(value)
}

/// Inclusive prefix sum over the lanes, modulo 2^32.
#[inline(always)]
#[track_caller]
pub fn inclusive_scan(value: u32) -> u32 {
    let lane = crate::thread::lane();
    let mut total = value;
    let mut delta = 1;
    while delta < 32 {
        let below = shfl_up(total, delta);
        if lane >= delta {
            total = total.wrapping_add(below);
        }
        delta *= 2;
    }
    total
}
