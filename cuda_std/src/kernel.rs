//! Declaring kernels. One declaration gives the GPU entry points with their launch bounds, the typed arguments that the
//! host must pass, and the emulated form.

/// A kernel parameter: a buffer ([`crate::memory::In`], [`crate::memory::Out`]) or a scalar.
#[cfg(target_arch = "nvptx64")]
pub trait Param: Copy {
    /// How it crosses the launch: a pointer or the scalar itself.
    type Abi;
    /// The parameter from what was passed.
    ///
    /// # Safety
    /// A pointer must be null or point to a buffer that is as long as the kernel's contract says.
    unsafe fn from_abi(abi: Self::Abi) -> Self;
}

#[cfg(target_arch = "nvptx64")]
mod device {
    use super::Param;
    use crate::memory::{In, Out};

    impl<T: Copy> Param for In<T> {
        type Abi = *const T;
        #[inline(always)]
        unsafe fn from_abi(abi: *const T) -> Self {
            In(crate::ptx::RawIn(abi))
        }
    }
    impl<T: Copy> Param for Out<T> {
        type Abi = *mut T;
        #[inline(always)]
        unsafe fn from_abi(abi: *mut T) -> Self {
            Out(crate::ptx::RawOut(abi))
        }
    }
    macro_rules! scalars {
        ($($t:ty),+) => {$(impl Param for $t {
            type Abi = $t;
            #[inline(always)]
            unsafe fn from_abi(abi: $t) -> Self {
                abi
            }
        })+};
    }
    scalars!(u32, i32, u64, f32);
}

#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use crate::emu::{Fault, Launch};
    use crate::memory::{Element, In, Out};
    use std::marker::PhantomData;

    /// A kernel parameter: a buffer ([`crate::memory::In`], [`crate::memory::Out`]) or a scalar.
    pub trait Param: Copy + Send + Sync + 'static {
        /// What the host passes.
        type Host<'a>: Copy;
        /// Type-erased form.
        fn pack(host: Self::Host<'_>) -> Packed;
        /// The parameter of an emulated launch: looks the buffer up in the emulated device's memory.
        fn unpack(packed: Packed, launch: &Launch<'_>) -> Result<Self, Fault>;
    }

    /// A device buffer handed to a kernel for reading: address and number of elements. May be null.
    #[derive(Debug)]
    pub struct DeviceRef<'a, T> {
        /// Device address, 0 for none.
        pub address: u64,
        /// Number of elements.
        pub len: usize,
        buffer: PhantomData<&'a [T]>,
    }

    /// A device buffer handed to a kernel for writing.
    #[derive(Debug)]
    pub struct DeviceMut<'a, T> {
        /// Device address, 0 for none.
        pub address: u64,
        /// Number of elements.
        pub len: usize,
        buffer: PhantomData<&'a [T]>,
    }

    macro_rules! device_pointers {
        ($($name:ident),+) => {$(
            impl<T> Clone for $name<'_, T> {
                fn clone(&self) -> Self {
                    *self
                }
            }
            impl<T> Copy for $name<'_, T> {}
            impl<T> $name<'_, T> {
                /// `len` elements at `address`, which stay allocated for the lifetime.
                ///
                /// # Safety
                /// The memory must belong to the device that the kernel is launched on and live as long as the launch.
                /// While it runs, nobody else may write what the launch reads, or access what it writes.
                pub const unsafe fn new(address: u64, len: usize) -> Self {
                    $name { address, len, buffer: PhantomData }
                }

                /// No buffer.
                pub const fn null() -> Self {
                    $name { address: 0, len: 0, buffer: PhantomData }
                }
            }
        )+};
    }
    device_pointers!(DeviceRef, DeviceMut);

    impl<'a, T> From<DeviceMut<'a, T>> for DeviceRef<'a, T> {
        fn from(buffer: DeviceMut<'a, T>) -> Self {
            DeviceRef { address: buffer.address, len: buffer.len, buffer: PhantomData }
        }
    }

    /// A parameter without its type.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Packed {
        /// A buffer.
        Pointer {
            /// Device address, 0 for none.
            address: u64,
            /// Elements.
            len: usize,
            /// Bytes of an element.
            element: usize,
            /// Whether the kernel may write it.
            writable: bool,
        },
        /// A scalar, in the low bytes.
        Scalar {
            /// Its bits.
            bits: u64,
            /// Its size in bytes.
            size: usize,
        },
    }

    /// Most parameters that a kernel has.
    pub const MAX_PARAMS: usize = 24;

    /// All parameters of a launch, without allocation.
    #[derive(Clone, Copy, Debug)]
    pub struct PackedArgs {
        items: [Packed; MAX_PARAMS],
        len: usize,
    }

    impl PackedArgs {
        /// From the parameters in order.
        pub fn new<const N: usize>(args: [Packed; N]) -> Self {
            const { assert!(N <= MAX_PARAMS, "kernel with more than MAX_PARAMS parameters") };
            let mut items = [Packed::Scalar { bits: 0, size: 4 }; MAX_PARAMS];
            items[..N].copy_from_slice(&args);
            PackedArgs { items, len: N }
        }

        /// The parameters in order.
        pub fn as_slice(&self) -> &[Packed] {
            &self.items[..self.len]
        }
    }

    impl<T: Element> Param for In<T> {
        type Host<'a> = DeviceRef<'a, T>;
        fn pack(host: DeviceRef<'_, T>) -> Packed {
            Packed::Pointer { address: host.address, len: host.len, element: size_of::<T>(), writable: false }
        }
        fn unpack(packed: Packed, launch: &Launch<'_>) -> Result<Self, Fault> {
            launch.resolve_in(packed).map(In)
        }
    }

    impl<T: Element> Param for Out<T> {
        type Host<'a> = DeviceMut<'a, T>;
        fn pack(host: DeviceMut<'_, T>) -> Packed {
            Packed::Pointer { address: host.address, len: host.len, element: size_of::<T>(), writable: true }
        }
        fn unpack(packed: Packed, launch: &Launch<'_>) -> Result<Self, Fault> {
            launch.resolve_out(packed).map(Out)
        }
    }

    macro_rules! scalars {
        ($($t:ty, $to:expr, $from:expr;)+) => {$(impl Param for $t {
            type Host<'a> = $t;
            fn pack(host: $t) -> Packed {
                Packed::Scalar { bits: ($to)(host), size: size_of::<$t>() }
            }
            fn unpack(packed: Packed, _: &Launch<'_>) -> Result<Self, Fault> {
                match packed {
                    Packed::Scalar { bits, .. } => Ok(($from)(bits)),
                    Packed::Pointer { .. } => unreachable!("packed by the same declaration"),
                }
            }
        })+};
    }
    scalars! {
        u32, u64::from, |bits| bits as u32;
        i32, |value| value as u32 as u64, |bits| bits as u32 as i32;
        u64, |value| value, |bits| bits;
        f32, |value: f32| value.to_bits() as u64, |bits| f32::from_bits(bits as u32);
    }

    /// A group of kernels with the same parameters.
    pub trait Family: 'static {
        /// What the host passes.
        type Args<'a>: Copy;
        /// Name of the family.
        const NAME: &'static str;
        /// The parameters in order.
        fn pack(args: Self::Args<'_>) -> PackedArgs;
    }

    /// One kernel of family `F`: its symbol, its launch bounds and its emulated form.
    pub struct Kernel<F> {
        /// Symbol in the PTX.
        pub name: &'static str,
        /// Threads of a block, exactly (`.reqntid`).
        pub threads: u32,
        /// Blocks that must fit on one multiprocessor (`.minnctapersm`).
        pub min_blocks: u32,
        /// May start before the kernel ahead of it has ended ([`crate::dependent`]).
        pub early: bool,
        /// Runs a launch on the emulator.
        pub emulate: fn(&Launch<'_>, &[Packed]) -> Result<(), Fault>,
        /// The family.
        pub family: PhantomData<fn(F)>,
    }

    impl<F> Clone for Kernel<F> {
        fn clone(&self) -> Self {
            *self
        }
    }
    impl<F> Copy for Kernel<F> {}
    impl<F> std::fmt::Debug for Kernel<F> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.name)
        }
    }
}

/// Declares a family of kernels.
///
/// ```ignore
/// kernels! {
///     /// Doubles.
///     pub mod double(x: In<f32>, y: Out<f32>, n: u32);
///     double_f32[128, 4] = |A| body::<A>;
/// }
/// ```
/// makes `double::Args { x, y, n }`, `double::KERNELS` and a constant `double::double_f32`. In brackets: threads of a block
/// and blocks a multiprocessor must hold, then `early` for a kernel that may start before the one ahead of it has ended
/// (`[128, 4, early]`, see [`crate::dependent`]). The body is a function (or closure) of the parameters; `A` names the
/// [`crate::arch::Arch`] that is compiled for or emulated. It is `_A` where a body does not ask, and `Native` where it asks for
/// [`crate::arch::Arch::E4M3_MMA`], so that the emulator's forms are compiled as often as they differ. With `|A, Params|` it is a
/// function of `double::Params { x, y, n }`, which
/// saves naming many parameters again.
#[macro_export]
macro_rules! kernels {
    (
        $(#[$doc:meta])*
        pub mod $family:ident $params:tt;
        $($name:ident[$threads:expr, $min_blocks:expr $(, $early:ident)?] = |$arch:ident $(, $whole:ident)?| $body:expr;)+
    ) => {
        $(#[$doc])*
        #[allow(non_upper_case_globals)]
        pub mod $family {
            use super::*;
            $crate::kernels!(@family $family $params);
            $($crate::kernels!(@kernel $name [$threads, $min_blocks $(, $early)?] $arch ($($whole)?) ($body) $params);)+

            /// Every kernel of the family.
            #[cfg(not(target_arch = "nvptx64"))]
            pub const KERNELS: &[$crate::kernel::Kernel<Family>] = &[$($name),+];
        }
    };
    (@family $family:ident ($($(#[$doc:meta])* $arg:ident: $ty:ty),+ $(,)?)) => {
        /// What a kernel gets.
        #[allow(missing_debug_implementations)]
        #[derive(Clone, Copy)]
        pub struct Params {
            $($(#[$doc])* pub $arg: $ty,)+
        }

        /// What the host passes.
        #[cfg(not(target_arch = "nvptx64"))]
        #[derive(Clone, Copy, Debug)]
        pub struct Args<'a> {
            $($(#[$doc])* pub $arg: <$ty as $crate::kernel::Param>::Host<'a>,)+
        }

        /// The family of these kernels.
        #[cfg(not(target_arch = "nvptx64"))]
        #[derive(Clone, Copy, Debug)]
        pub struct Family;

        #[cfg(not(target_arch = "nvptx64"))]
        impl $crate::kernel::Family for Family {
            type Args<'a> = Args<'a>;
            const NAME: &'static str = stringify!($family);
            fn pack(args: Args<'_>) -> $crate::kernel::PackedArgs {
                $crate::kernel::PackedArgs::new([$(<$ty as $crate::kernel::Param>::pack(args.$arg)),+])
            }
        }
    };
    (@early) => { false };
    (@early early) => { true };
    // Emulated forms of a body: one where it does not ask for the architecture, four where it asks for E4M3_MMA, else three.
    (@emulate _A, $launch:ident, $packed:ident, $name:ident, ($body:expr) $whole:tt ($($arg:ident),+)) => {{
        let early = EARLY && $launch.arch.dependent_launch();
        let body = move || $crate::kernels!(@call ($body) $whole ($($arg: $arg),+));
        $crate::emu::run($launch, $packed, stringify!($name), early, &body)
    }};
    (@emulate Native, $launch:ident, $packed:ident, $name:ident, $($body:tt)+) => {
        match $launch.arch {
            $crate::arch::ArchId::Sm80 => $crate::kernels!(@as Sm80 Native $launch $packed $name $($body)+),
            $crate::arch::ArchId::Sm90 => $crate::kernels!(@as Sm90 Native $launch $packed $name $($body)+),
            $crate::arch::ArchId::Sm100 => $crate::kernels!(@as Sm100 Native $launch $packed $name $($body)+),
            $crate::arch::ArchId::Sm120 => $crate::kernels!(@as Sm120 Native $launch $packed $name $($body)+),
        }
    };
    (@emulate $arch:ident, $launch:ident, $packed:ident, $name:ident, $($body:tt)+) => {
        match $launch.arch {
            $crate::arch::ArchId::Sm80 => $crate::kernels!(@as Sm80 $arch $launch $packed $name $($body)+),
            $crate::arch::ArchId::Sm90 => $crate::kernels!(@as Sm90 $arch $launch $packed $name $($body)+),
            $crate::arch::ArchId::Sm100 | $crate::arch::ArchId::Sm120 => {
                $crate::kernels!(@as Sm100 $arch $launch $packed $name $($body)+)
            }
        }
    };
    (@as $as:ident $arch:ident $launch:ident $packed:ident $name:ident ($body:expr) $whole:tt ($($arg:ident),+)) => {{
        #[allow(dead_code)]
        type $arch = $crate::arch::$as;
        let early = EARLY && <$arch as $crate::arch::Arch>::DEPENDENT_LAUNCH;
        let body = move || $crate::kernels!(@call ($body) $whole ($($arg: $arg),+));
        $crate::emu::run($launch, $packed, stringify!($name), early, &body)
    }};
    // Parameters one by one, or all of them.
    (@call ($body:expr) () ($($arg:ident: $value:expr),+)) => { ($body)($($value),+) };
    (@call ($body:expr) ($whole:ident) ($($arg:ident: $value:expr),+)) => { ($body)($whole { $($arg: $value),+ }) };
    (@kernel $name:ident [$threads:expr, $min_blocks:expr $(, $early:ident)?] $arch:ident $whole:tt ($body:expr)
        ($($(#[$doc:meta])* $arg:ident: $ty:ty),+ $(,)?)) => {
        /// Launch bounds, which the build moves into the entry point's directives.
        #[cfg(target_arch = "nvptx64")]
        const _: () = {
            #[used]
            #[unsafe(export_name = concat!("BOUNDS_", stringify!($name)))]
            pub static BOUNDS: [u32; 2] = [$threads, $min_blocks];
        };

        /// The entry point.
        ///
        /// # Safety
        /// Buffers as long as the family's contract says.
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #[allow(improper_ctypes_definitions)]
        pub unsafe extern "ptx-kernel" fn $name($($arg: <$ty as $crate::kernel::Param>::Abi),+) {
            #[allow(dead_code)]
            type $arch = $crate::arch::Target;
            // SAFETY: the launcher checked every buffer against the family's contract.
            unsafe {
                $crate::kernels!(@call ($body) $whole ($($arg: <$ty as $crate::kernel::Param>::from_abi($arg)),+))
            }
        }

        /// One kernel of the family.
        #[cfg(not(target_arch = "nvptx64"))]
        pub const $name: $crate::kernel::Kernel<Family> = {
            const EARLY: bool = $crate::kernels!(@early $($early)?);
            // A function, not a closure: it is compiled here and not again in every crate that names the kernel.
            #[inline(never)]
            fn emulate(
                launch: &$crate::emu::Launch<'_>,
                packed: &[$crate::kernel::Packed],
            ) -> core::result::Result<(), $crate::emu::Fault> {
                let mut next = packed.iter().copied();
                $(let $arg = <$ty as $crate::kernel::Param>::unpack(
                    next.next().expect("as many as declared"), launch)
                    .map_err(|fault| fault.of_kernel(stringify!($name)))?;)+
                $crate::kernels!(@emulate $arch, launch, packed, $name, ($body) $whole ($($arg),+))
            }
            $crate::kernel::Kernel {
                name: stringify!($name),
                threads: $threads,
                min_blocks: $min_blocks,
                early: EARLY,
                emulate,
                family: core::marker::PhantomData,
            }
        };
    };
}
