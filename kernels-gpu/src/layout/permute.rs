//! The order in which activations lie in memory for the tensor cores.
//!
//! Lane t of a four-lane group owns k 32t to 32t+31 of a 128-k chunk: one 16-byte load of E2M1 codes. Eight codes of a 32-bit
//! word feed two mma of four k each, and decoding yields the pairs (k0, k2), (k1, k3), (k4, k6), (k5, k7). Activations are stored
//! in the order of these pairs, so that one 16-byte load is the B fragment of both mma. Within the k of one mma the order
//! has no influence on the bits.

use super::scale::round_up;

/// k that a warp takes from memory at a time: two chunks.
pub const SEGMENT: usize = 256;

/// Position of element `k` of a row.
#[inline(always)]
pub const fn position(k: usize) -> usize {
    k & !3 | (k & 1) << 1 | (k >> 1) & 1
}

/// Elements of a stored row of `k` elements: whole segments, zeros behind the last element.
#[inline(always)]
pub const fn row_stride(k: usize) -> usize {
    round_up(k, SEGMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_written_by_hand() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(position), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!((row_stride(16), row_stride(256), row_stride(130)), (256, 256, 256));
    }

    #[test]
    fn its_own_inverse() {
        assert!((0..1024).all(|k| position(position(k)) == k));
    }
}
