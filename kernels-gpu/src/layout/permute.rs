//! The order in which activations lie in memory for the tensor cores.
//!
//! Lane t of a four-lane group owns k 32t to 32t+31 of a 128-k chunk: one 16-byte load of E2M1 codes, four words of eight. Eight
//! codes of a word feed two mma of four k each, and decoding yields pairs ([`Order::PAIRS`]). Activations are stored in the order
//! of these pairs, so that one 16-byte load is the B fragment of both mma; and word w of all four lanes is stored before word w+1,
//! so that they read 64 consecutive bytes. Within the k of one mma the order has no influence on the bits.

use super::scale::round_up;
use crate::order::Order;

/// k that a warp takes from memory at a time: two chunks.
pub const SEGMENT: usize = 256;

/// Position of word `word` of eight elements of a row, counted in such words: of the sixteen words 4t + w of a chunk, w is the slower.
#[inline(always)]
pub const fn word_position(word: usize) -> usize {
    word & !15 | (word & 3) << 2 | (word >> 2) & 3
}

/// Position of element `k` of a row.
#[inline(always)]
pub const fn position<O: Order>(k: usize) -> usize {
    // Both orders pair k with k + distance; the pairs of one half of the word follow each other.
    let distance = const { O::PAIRS[0].1 };
    let within = if distance == 4 { (k & 3) << 1 | (k >> 2) & 1 } else { k & 4 | (k & 1) << 1 | (k >> 1) & 1 };
    word_position(k / 8) * 8 + within
}

/// Elements of a stored row of `k` elements: whole segments, zeros behind the last element.
#[inline(always)]
pub const fn row_stride(k: usize) -> usize {
    round_up(k, SEGMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{Decode, Seed};

    #[test]
    fn positions_written_by_hand() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(position::<Seed>), [0, 2, 1, 3, 4, 6, 5, 7, 32, 34]);
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(position::<Decode>), [0, 2, 4, 6, 1, 3, 5, 7, 32, 34]);
        assert_eq!([24, 32, 40, 120, 127, 128, 168].map(position::<Decode>), [96, 8, 40, 120, 127, 128, 168]);
        assert_eq!((row_stride(16), row_stride(256), row_stride(130)), (256, 256, 256));
    }

    fn follows_the_pairs<O: Order>() {
        for (i, (low, high)) in O::PAIRS.into_iter().enumerate() {
            assert_eq!((position::<O>(low), position::<O>(high)), (2 * i, 2 * i + 1));
        }
        let mut seen = [false; 1024];
        (0..1024).for_each(|k| assert!(!std::mem::replace(&mut seen[position::<O>(k)], true)));
    }

    #[test]
    fn a_permutation_in_the_order_of_the_pairs() {
        follows_the_pairs::<Seed>();
        follows_the_pairs::<Decode>();
    }
}
