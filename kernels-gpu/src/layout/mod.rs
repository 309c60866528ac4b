//! Index formulas that packer, reference and kernels share. `const fn` only: no arithmetic on values, no unsafe.

pub mod scale;
