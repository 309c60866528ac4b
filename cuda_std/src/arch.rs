//! Which conversion instructions an architecture has. Kernels take an [`Arch`] as a type parameter, so that the emulator
//! can run the paths of every architecture.

/// Instructions that not every target has.
pub trait Arch: Copy + Send + Sync + 'static {
    /// `cvt.rn.f16x2.e4m3x2` and `cvt.rn.satfinite.e4m3x2.f32` (sm_89 and later).
    const E4M3_CVT: bool;
    /// `cvt.rn.f16x2.e2m1x2` (the sm_100 and sm_120 families).
    const E2M1_CVT: bool;
}

macro_rules! arches {
    ($($(#[$doc:meta])* $name:ident: e4m3 $e4m3:literal, e2m1 $e2m1:literal;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;
        impl Arch for $name {
            const E4M3_CVT: bool = $e4m3;
            const E2M1_CVT: bool = $e2m1;
        }
    )+};
}

arches! {
    /// sm_80: bit arithmetic for both formats.
    Sm80: e4m3 false, e2m1 false;
    /// sm_89 and sm_90a: e4m3 in hardware, E2M1 by bit arithmetic.
    Sm90: e4m3 true, e2m1 false;
    /// sm_100f and sm_120f: both in hardware.
    Sm100: e4m3 true, e2m1 true;
}

/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", cuda_arch = "sm_80"))]
pub type Target = Sm80;
/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", any(cuda_arch = "sm_100f", cuda_arch = "sm_120f")))]
pub type Target = Sm100;
/// The paths of the architecture that is being compiled for.
#[cfg(all(target_arch = "nvptx64", not(any(cuda_arch = "sm_80", cuda_arch = "sm_100f", cuda_arch = "sm_120f"))))]
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
}

impl ArchId {
    /// Every set of paths.
    pub const ALL: [ArchId; 3] = [ArchId::Sm80, ArchId::Sm90, ArchId::Sm100];
}
