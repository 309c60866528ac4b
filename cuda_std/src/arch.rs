//! Which instructions an architecture has. Kernels take an [`Arch`] as a type parameter, so that the emulator
//! can run the paths of every architecture.

/// Instructions that not every target has.
pub trait Arch: Copy + Send + Sync + 'static {
    /// `cvt.rn.f16x2.e4m3x2` and `cvt.rn.satfinite.e4m3x2.f32` (sm_89 and later).
    const E4M3_CVT: bool;
    /// `cvt.rn.f16x2.e2m1x2` (the sm_100 and sm_120 families).
    const E2M1_CVT: bool;
    /// `mma.m16n8k32` with e4m3 operands as an instruction of its own (the sm_120 family). sm_90 makes it of two f16 mma, which
    /// gains nothing; how others do it is not known.
    const E4M3_MMA: bool;
    /// `griddepcontrol` (sm_90 and later): a kernel may start before the one ahead of it has ended.
    const DEPENDENT_LAUNCH: bool;
}

macro_rules! arches {
    ($($(#[$doc:meta])* $name:ident: e4m3 $e4m3:literal, e2m1 $e2m1:literal, mma $mma:literal,
        dependent $dependent:literal;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;
        impl Arch for $name {
            const E4M3_CVT: bool = $e4m3;
            const E2M1_CVT: bool = $e2m1;
            const E4M3_MMA: bool = $mma;
            const DEPENDENT_LAUNCH: bool = $dependent;
        }
    )+};
}

arches! {
    /// sm_80: bit arithmetic for both formats.
    Sm80: e4m3 false, e2m1 false, mma false, dependent false;
    /// sm_89: e4m3 in hardware, E2M1 by bit arithmetic. Not emulated by itself: [`Sm90`] has its conversions, [`Sm80`] its
    /// launches.
    Sm89: e4m3 true, e2m1 false, mma false, dependent false;
    /// sm_90a: as sm_89, and kernels that start early.
    Sm90: e4m3 true, e2m1 false, mma false, dependent true;
    /// sm_100f: both in hardware.
    Sm100: e4m3 true, e2m1 true, mma false, dependent true;
    /// sm_120f: both in hardware, and e4m3 in mma.
    Sm120: e4m3 true, e2m1 true, mma true, dependent true;
}

/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", cuda_arch = "sm_80"))]
pub type Target = Sm80;
/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", cuda_arch = "sm_100f"))]
pub type Target = Sm100;
/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", cuda_arch = "sm_120f"))]
pub type Target = Sm120;
/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", cuda_arch = "sm_89"))]
pub type Target = Sm89;
/// The paths of the architecture that is being compiled for.
#[cfg(all(
    target_arch = "nvptx64",
    not(any(cuda_arch = "sm_80", cuda_arch = "sm_89", cuda_arch = "sm_100f", cuda_arch = "sm_120f"))
))]
pub type Target = Sm90;

/// An [`Arch`] as a value: which paths an emulated launch takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ArchId {
    /// [`Sm80`].
    Sm80,
    /// [`Sm90`].
    #[default]
    Sm90,
    /// [`Sm100`].
    Sm100,
    /// [`Sm120`].
    Sm120,
}

impl ArchId {
    /// Every set of paths.
    pub const ALL: [ArchId; 4] = [ArchId::Sm80, ArchId::Sm90, ArchId::Sm100, ArchId::Sm120];

    /// [`Arch::DEPENDENT_LAUNCH`] of these paths.
    pub const fn dependent_launch(self) -> bool {
        match self {
            ArchId::Sm80 => Sm80::DEPENDENT_LAUNCH,
            ArchId::Sm90 => Sm90::DEPENDENT_LAUNCH,
            ArchId::Sm100 => Sm100::DEPENDENT_LAUNCH,
            ArchId::Sm120 => Sm120::DEPENDENT_LAUNCH,
        }
    }
}
