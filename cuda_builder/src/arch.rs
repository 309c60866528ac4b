//! The GPU architectures that a kernel crate is built for.

use std::fmt;

/// One target of the device compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// Ampere (A100), and by forward compatibility 8.6 and 8.7.
    Sm80,
    /// Ada (L40, RTX 40).
    Sm89,
    /// Hopper (H100, H200), with its architecture-specific instructions: runs on 9.0 only.
    Sm90a,
    /// The Blackwell data-centre family (10.x).
    Sm100f,
    /// The Blackwell workstation family (12.x).
    Sm120f,
}

impl Arch {
    /// Every architecture, oldest first.
    pub const ALL: [Arch; 5] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm100f, Arch::Sm120f];

    /// The name that rustc's `-Ctarget-cpu`, ptxas's `-arch` and the cfg `cuda_arch` use.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100f => "sm_100f",
            Arch::Sm120f => "sm_120f",
        }
    }

    /// Compute capability (major, minor).
    pub const fn compute(self) -> (u32, u32) {
        match self {
            Arch::Sm80 => (8, 0),
            Arch::Sm89 => (8, 9),
            Arch::Sm90a => (9, 0),
            Arch::Sm100f => (10, 0),
            Arch::Sm120f => (12, 0),
        }
    }

    /// The PTX version to emit. The lowest that has every instruction used, so that old drivers load it: 8.4 needs
    /// driver 550, and the family targets (`f`) exist from 8.8, driver 575.
    pub(crate) const fn ptx_feature(self) -> &'static str {
        match self {
            Arch::Sm80 | Arch::Sm89 | Arch::Sm90a => "ptx84",
            Arch::Sm100f | Arch::Sm120f => "ptx88",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
