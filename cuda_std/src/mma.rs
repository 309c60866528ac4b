//! Tensor cores: `mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32`, and m16n8k32 with e4m3 operands.
//!
//! Of m16n8k16, lane 4g+t holds, of A (16 rows by 16 k): registers 0 to 3 = (row g, k 2t and 2t+1), (row g+8, same k),
//! (row g, k 2t+8 and 2t+9), (row g+8, same); of B (16 k by 8 columns): (k 2t and 2t+1, column g), (k 2t+8 and 2t+9,
//! column g); of C and D (16 by 8): (row g, columns 2t and 2t+1), (row g+8, same). Of m16n8k32 it holds four codes where
//! m16n8k16 has two values: of A registers 0 to 3 = (row g, k 4t to 4t+3), (row g+8, same k), (row g, k 4t+16 to 4t+19),
//! (row g+8, same); of B (k 4t to 4t+3, column g), (k 4t+16 to 4t+19, column g); C and D are the same.

use crate::imp;

/// Operand type of an mma.
pub trait MmaType: Copy + Send + Sync + 'static {
    /// Whether operands are bf16 (else f16).
    const BF16: bool;
}

/// f16 operands.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// bf16 operands.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

impl MmaType for F16 {
    const BF16: bool = false;
}
impl MmaType for Bf16 {
    const BF16: bool = true;
}

/// D = A·B + C. The emulator gives the bits of an H200. Place [`crate::sync::converge`] in the same straight line.
#[inline(always)]
#[track_caller]
pub fn m16n8k16<T: MmaType>(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    if T::BF16 { imp::mma_m16n8k16_bf16(a, b, c) } else { imp::mma_m16n8k16_f16(a, b, c) }
}

/// D = A·B + C over 32 k of e4m3 codes, for architectures with [`Arch::E4M3_MMA`](crate::arch::Arch::E4M3_MMA). Place
/// [`crate::sync::converge`] in the same straight line.
///
/// The emulator gives the bits of an H200, which has no such instruction and makes it of two with f16 operands: an m16n8k16 from +0
/// over the codes in the lower halves of the registers (k 4q, 4q+1, 4q+16, 4q+17 for q = 0 to 3), into it a second one over those
/// in the upper halves (k 4q+2, 4q+3, 4q+18, 4q+19), and C plus the result, rounded to nearest even. How an architecture that has
/// the instruction sums is not known: expect other bits there.
#[inline(always)]
#[track_caller]
pub fn m16n8k32_e4m3(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    #[cfg(target_arch = "nvptx64")]
    return imp::mma_m16n8k32_e4m3(a, b, c);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let wide = |codes: u32| crate::cvt::e4m3x4_to_f16x4::<crate::arch::Sm120>(codes);
        let (a, b) = (a.map(wide), b.map(wide));
        let half = |i: usize, sum| imp::mma_m16n8k16_f16(a.map(|a| a[i]), b.map(|b| b[i]), sum);
        let sum = half(1, half(0, [0.0; 4]));
        [0, 1, 2, 3].map(|i| c[i] + sum[i])
    }
}
