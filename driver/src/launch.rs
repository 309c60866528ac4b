//! `cuLaunchKernelEx`, which is newer than cust's bindings: a launch with attributes.

use std::ffi::{c_int, c_uint, c_void};

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
/// First driver (CUDA 12.3) whose stream captures record such launches.
const DRIVER: c_int = 12_030;

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: c_uint,
    pad: [u8; 4],
    /// A union of 64 bytes; the int at its start is all that is used here.
    value: [c_int; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *const Attribute,
    number: c_uint,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Attribute>() == 72 && std::mem::offset_of!(Attribute, value) == 8);
    assert!(size_of::<Config>() == 56 && std::mem::offset_of!(Config, stream) == 32);
    assert!(std::mem::offset_of!(Config, attributes) == 40 && std::mem::offset_of!(Config, number) == 48);
};

/// `cuLaunchKernelEx`.
type LaunchKernelEx = unsafe extern "C" fn(*const Config, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> c_int;

/// Launches kernels that may start before the kernel ahead of them in the stream has ended.
#[derive(Clone, Copy, Debug)]
pub struct EarlyLaunch(LaunchKernelEx);

impl EarlyLaunch {
    /// None where the driver cannot, also in a stream capture.
    pub fn find() -> Option<Self> {
        let version = crate::symbol("cuDriverGetVersion")?;
        // SAFETY: the driver API declares `CUresult cuDriverGetVersion(int *)`.
        let version: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(version) };
        let mut number = 0;
        // SAFETY: the pointer is to a live int.
        if unsafe { version(&mut number) } != crate::SUCCESS || number < DRIVER {
            return None;
        }
        let launch = crate::symbol("cuLaunchKernelEx")?;
        // SAFETY: the driver API declares `CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **)`.
        Some(EarlyLaunch(unsafe { std::mem::transmute::<*const c_void, LaunchKernelEx>(launch) }))
    }

    /// `cuLaunchKernelEx` of a one-dimensional grid, with programmatic stream serialisation. The driver's result.
    ///
    /// # Safety
    /// As for `cuLaunchKernel`: handles of the current context, and a pointer to a value for each parameter.
    pub unsafe fn launch(
        self,
        function: *mut c_void,
        blocks: u32,
        threads: u32,
        shared_bytes: u32,
        stream: *mut c_void,
        parameters: *mut *mut c_void,
    ) -> i32 {
        let mut value = [0; 16];
        value[0] = 1;
        let attribute = Attribute { id: PROGRAMMATIC_STREAM_SERIALIZATION, pad: [0; 4], value };
        let config = Config {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes,
            stream,
            attributes: &attribute,
            number: 1,
        };
        // SAFETY: the caller's promise; configuration and attribute live through the call, which copies them.
        unsafe { (self.0)(&config, function, parameters, std::ptr::null_mut()) }
    }
}
