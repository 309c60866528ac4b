//! Index formulas that packer, reference and kernels share. `const fn` only: no arithmetic on values, no unsafe.

pub mod permute;
pub mod scale;
pub mod tile;
