//! What an operand of a grouped GEMM looks like in memory, in shared memory and as mma fragments.
//!
//! A stage of shared memory holds [`STAGE_K`] k of each row of a tile. The 16-byte piece p of row r lies at piece
//! p xor [`Operand::swizzle`], so that no two of the lanes that read together share a bank. Inside a group of 16 k the order is
//! free (the tensor cores add a group as one exact sum), so fragments take whichever k a lane has loaded, the same on both sides.

use cuda_std::arch::Arch;
use cuda_std::cvt;
use cuda_std::memory::{Element, In};
use cuda_std::mma::{Bf16, F16, MmaType};
use cuda_std::shared::Shared;
use cuda_std::thread::lane;

/// k of a stage.
pub const STAGE_K: u32 = 64;

/// An operand format.
pub trait Operand: Copy + Send + Sync + 'static {
    /// Element in memory.
    type Element: Element;
    /// Bytes of a row of a stage.
    const ROW_BYTES: u32;
    /// Which bits of a 16-byte piece's number the row flips.
    fn swizzle(row: u32) -> u32;
    /// The bits of an element, zero-extended.
    fn bits(value: Self::Element) -> u32;
}

/// A format of activations, together with the mma type that it enters as.
pub trait Left: Operand {
    /// Type of the mma.
    type Mma: MmaType;
    /// The fragments of 16 rows from `row` on for the 32 k of half `half` of a stage: for each 16 k, the registers of
    /// (rows g, rows g+8) x (first, second pair of a lane).
    fn rows16<A: Arch>(stage: u32, row: u32, half: u32) -> [[u32; 4]; 2];
    /// Whether fragments, those of the weights too, are codes of 32 k, for an mma that takes e4m3: the first of each pair holds them, the
    /// second nothing.
    #[inline(always)]
    fn as_codes<A: Arch>() -> bool {
        false
    }
}

/// A format of weights.
pub trait Right: Operand {
    /// The fragments of 16 columns (rows of the stage) from `row` on: for each 16 k, the two registers of columns g and of
    /// columns g+8.
    fn columns16<A: Arch>(stage: u32, row: u32, half: u32) -> [[[u32; 2]; 2]; 2];
}

/// Pieces of 16 bytes of a row.
#[inline(always)]
pub const fn pieces<O: Operand>() -> u32 {
    O::ROW_BYTES / 16
}

/// Where piece `piece` of row `row` of a stage's operand at byte `base` lies.
#[inline(always)]
pub fn piece_at<O: Operand>(base: u32, row: u32, piece: u32) -> u32 {
    base + row * O::ROW_BYTES + (piece ^ O::swizzle(row)) * 16
}

/// Element `index` of 16-byte aligned data.
#[inline(always)]
pub fn element<O: Operand>(from: In<O::Element>, index: usize) -> u32 {
    O::bits(from.stream(index))
}

#[inline(always)]
fn ldmatrix(byte: u32) -> [u32; 4] {
    Shared::<u16>::at(byte, 8).ldmatrix_x4(0)
}

/// e4m3 that enters as f16: exact, NaN codes included.
#[derive(Clone, Copy, Debug)]
pub struct E4m3;
/// e4m3 that enters as it is where the architecture has such an mma, elsewhere as [`E4m3`].
#[derive(Clone, Copy, Debug)]
pub struct E4m3Native;
/// e4m3 that enters as bf16: exact, NaN codes included.
#[derive(Clone, Copy, Debug)]
pub struct E4m3AsBf16;
/// bf16 whose partner is [`E4m3AsBf16`]: a lane's k of a group are 4t to 4t+3, as bytes come.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Quads;
/// bf16.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Pairs;

/// Where lane i's row of four 8x8 matrices lies: matrices 0 and 1 are rows 0 to 7 and 8 to 15 of piece `piece`, 2 and 3 those of
/// the next piece.
#[inline(always)]
fn rows_first<O: Operand>(stage: u32, row: u32, piece: u32) -> u32 {
    let lane = lane();
    piece_at::<O>(stage, row + lane % 16, piece + lane / 16)
}

/// As [`rows_first`], with matrices 0 and 1 being both pieces of rows 0 to 7.
#[inline(always)]
fn pieces_first<O: Operand>(stage: u32, row: u32, piece: u32) -> u32 {
    let lane = lane();
    piece_at::<O>(stage, row + lane % 8 + lane / 16 * 8, piece + lane / 8 % 2)
}

impl Operand for E4m3 {
    type Element = u8;
    const ROW_BYTES: u32 = STAGE_K;
    #[inline(always)]
    fn swizzle(row: u32) -> u32 {
        row / 2 % 4
    }
    #[inline(always)]
    fn bits(value: u8) -> u32 {
        value as u32
    }
}

impl Left for E4m3 {
    type Mma = F16;
    #[inline(always)]
    fn rows16<A: Arch>(stage: u32, row: u32, half: u32) -> [[u32; 4]; 2] {
        let codes = ldmatrix(rows_first::<Self>(stage, row, 2 * half));
        let group = |upper, lower| {
            let (upper, lower) = (cvt::e4m3x4_to_f16x4::<A>(upper), cvt::e4m3x4_to_f16x4::<A>(lower));
            [upper[0], lower[0], upper[1], lower[1]]
        };
        [group(codes[0], codes[1]), group(codes[2], codes[3])]
    }
}

impl Right for E4m3 {
    #[inline(always)]
    fn columns16<A: Arch>(stage: u32, row: u32, half: u32) -> [[[u32; 2]; 2]; 2] {
        let codes = ldmatrix(pieces_first::<Self>(stage, row, 2 * half)).map(cvt::e4m3x4_to_f16x4::<A>);
        [[codes[0], codes[2]], [codes[1], codes[3]]]
    }
}

impl Operand for E4m3Native {
    type Element = u8;
    const ROW_BYTES: u32 = STAGE_K;
    #[inline(always)]
    fn swizzle(row: u32) -> u32 {
        E4m3::swizzle(row)
    }
    #[inline(always)]
    fn bits(value: u8) -> u32 {
        value as u32
    }
}

impl Left for E4m3Native {
    type Mma = F16;
    #[inline(always)]
    fn rows16<A: Arch>(stage: u32, row: u32, half: u32) -> [[u32; 4]; 2] {
        if A::E4M3_MMA {
            [ldmatrix(rows_first::<Self>(stage, row, 2 * half)), [0; 4]]
        } else {
            E4m3::rows16::<A>(stage, row, half)
        }
    }
    #[inline(always)]
    fn as_codes<A: Arch>() -> bool {
        A::E4M3_MMA
    }
}

impl Right for E4m3Native {
    #[inline(always)]
    fn columns16<A: Arch>(stage: u32, row: u32, half: u32) -> [[[u32; 2]; 2]; 2] {
        if A::E4M3_MMA {
            let codes = ldmatrix(pieces_first::<Self>(stage, row, 2 * half));
            [[[codes[0], codes[1]], [codes[2], codes[3]]], [[0; 2]; 2]]
        } else {
            E4m3::columns16::<A>(stage, row, half)
        }
    }
}

impl Operand for E4m3AsBf16 {
    type Element = u8;
    const ROW_BYTES: u32 = STAGE_K;
    #[inline(always)]
    fn swizzle(row: u32) -> u32 {
        E4m3::swizzle(row)
    }
    #[inline(always)]
    fn bits(value: u8) -> u32 {
        value as u32
    }
}

impl Right for E4m3AsBf16 {
    #[inline(always)]
    fn columns16<A: Arch>(stage: u32, row: u32, half: u32) -> [[[u32; 2]; 2]; 2] {
        let codes = ldmatrix(pieces_first::<Self>(stage, row, 2 * half)).map(cvt::e4m3x4_to_bf16x4::<A>);
        [[codes[0], codes[2]], [codes[1], codes[3]]]
    }
}

impl Operand for Bf16Quads {
    type Element = u16;
    const ROW_BYTES: u32 = 2 * STAGE_K;
    #[inline(always)]
    fn swizzle(row: u32) -> u32 {
        // Half a warp reads two neighbouring pieces of four rows at once.
        row % 4 * 2
    }
    #[inline(always)]
    fn bits(value: u16) -> u32 {
        value as u32
    }
}

impl Left for Bf16Quads {
    type Mma = Bf16;
    #[inline(always)]
    fn rows16<A: Arch>(stage: u32, row: u32, half: u32) -> [[u32; 4]; 2] {
        let (g, t) = (lane() / 4, lane() % 4);
        let quad = |row: u32, piece: u32| {
            Shared::<u32>::at(piece_at::<Self>(stage, row + g, piece + t / 2) + t % 2 * 8, 2).load_v2(0)
        };
        let group = |piece| {
            let (upper, lower) = (quad(row, piece), quad(row + 8, piece));
            [upper[0], lower[0], upper[1], lower[1]]
        };
        [group(4 * half), group(4 * half + 2)]
    }
}

impl Operand for Bf16Pairs {
    type Element = u16;
    const ROW_BYTES: u32 = 2 * STAGE_K;
    #[inline(always)]
    fn swizzle(row: u32) -> u32 {
        row % 8
    }
    #[inline(always)]
    fn bits(value: u16) -> u32 {
        value as u32
    }
}

impl Left for Bf16Pairs {
    type Mma = Bf16;
    #[inline(always)]
    fn rows16<A: Arch>(stage: u32, row: u32, half: u32) -> [[u32; 4]; 2] {
        [0, 2].map(|piece| ldmatrix(rows_first::<Self>(stage, row, 4 * half + piece)))
    }
}

impl Right for Bf16Pairs {
    #[inline(always)]
    fn columns16<A: Arch>(stage: u32, row: u32, half: u32) -> [[[u32; 2]; 2]; 2] {
        [0, 2].map(|piece| {
            let m = ldmatrix(pieces_first::<Self>(stage, row, 4 * half + piece));
            [[m[0], m[1]], [m[2], m[3]]]
        })
    }
}
