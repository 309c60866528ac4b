//! Named orders of the sums of a decode layer: which k one mma takes, which partial sum a segment belongs to, and where powers of
//! two go.
//!
//! | | [`Seed`] | [`Decode`] |
//! |---|---|---|
//! | the two mma of a word of eight k | k 0, 1, 2, 3 and 4, 5, 6, 7 | k 0, 1, 4, 5 and 2, 3, 6, 7 |
//! | 256-k segments of FC1 | S runs of neighbours | segment s belongs to partial sum s mod 4 |
//! | NVFP4 weight in the mma | q·s | q·s·2^-7 (f16) or q·s·2^-8 (bf16), undone on the total |

/// A named order.
pub trait Order: Copy + Send + Sync + 'static {
    /// The offsets in a word of eight k that decoding yields as pairs: the first two pairs feed one mma, the others the next.
    const PAIRS: [(usize, usize); 4];
    /// Whether the weights of the mma carry a power of two that the total gives back.
    const FOLDS: bool;
    /// Segments of warp `warp` of the `split` that share a unit along k: the first, the distance to the next, and how many, of `n`.
    fn segments(warp: u32, split: u32, n: u32) -> (u32, u32, u32);
}

/// The order of the CUDA C++ kernels with which NVFP4 decode layers were first measured.
#[derive(Clone, Copy, Debug)]
pub struct Seed;

/// The order that needs the fewest instructions.
#[derive(Clone, Copy, Debug)]
pub struct Decode;

impl Order for Seed {
    const PAIRS: [(usize, usize); 4] = [(0, 2), (1, 3), (4, 6), (5, 7)];
    const FOLDS: bool = false;
    #[inline(always)]
    fn segments(warp: u32, split: u32, n: u32) -> (u32, u32, u32) {
        let (begin, end) = (warp * n / split, (warp + 1) * n / split);
        (begin, 1, end - begin)
    }
}

impl Order for Decode {
    const PAIRS: [(usize, usize); 4] = [(0, 4), (1, 5), (2, 6), (3, 7)];
    const FOLDS: bool = true;
    #[inline(always)]
    fn segments(warp: u32, split: u32, n: u32) -> (u32, u32, u32) {
        (warp, split, (n + split - 1 - warp) / split)
    }
}
