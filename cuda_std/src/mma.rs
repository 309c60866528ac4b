//! Tensor cores: `mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32`.
//!
//! Lane 4g+t holds, of A (16 rows by 16 k): registers 0 to 3 = (row g, k 2t and 2t+1), (row g+8, same k),
//! (row g, k 2t+8 and 2t+9), (row g+8, same); of B (16 k by 8 columns): (k 2t and 2t+1, column g), (k 2t+8 and 2t+9,
//! column g); of C and D (16 by 8): (row g, columns 2t and 2t+1), (row g+8, same).

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
