//! The CUDA driver API, loaded when it is first called.
//!
//! `cust` links with `-lcuda`, so that a program that uses it neither links without CUDA nor starts without a driver. Here
//! the linker finds an empty `libcuda.a` instead (`.cargo/config.toml` points `CUDA_LIBRARY_PATH` at `driver/cuda`), and
//! this crate defines every function that `cust_raw` declares. Each is a trampoline: the first call loads
//! `libcuda.so.1`, every call jumps to the driver's function with all arguments as they are. Without a driver they return
//! `CUDA_ERROR_NO_DEVICE`; a function that the driver lacks returns `CUDA_ERROR_NOT_FOUND`.
//!
//! A crate that uses `cust` must name this one in its source (a call of [`available`] will do), else rustc does not link
//! it. On a `CUresult` print `{:?}`: cust's `Display` asks the driver for the text and panics without one.

mod launch;
mod names;
mod trampoline;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

pub use launch::EarlyLaunch;

const SUCCESS: c_int = 0;

/// The driver's library, loaded once and never unloaded.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            // SAFETY: the driver's initialisers are meant to run in any process, and it stays loaded.
            unsafe { Library::new("libcuda.so.1") }.map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(String::as_str)
}

/// The address of a driver function, for those that are newer than cust's bindings. The caller knows its type.
pub fn symbol(name: &str) -> Option<*const c_void> {
    // SAFETY: only the address is taken, so its type does not matter; the library is never unloaded.
    let symbol = unsafe { library().ok()?.get::<*const c_void>(name.as_bytes()) }.ok()?;
    // SAFETY: as above.
    Some(unsafe { symbol.try_as_raw_ptr() }?.cast_const())
}

/// Whether kernels can run: the driver loads, initialises and sees a GPU.
///
/// # Errors
/// The reason why not, for people.
pub fn available() -> Result<(), String> {
    library().map_err(|error| format!("no CUDA driver: {error}"))?;
    let missing = |name: &str| format!("the CUDA driver has no function {name}");
    let init = symbol("cuInit").ok_or_else(|| missing("cuInit"))?;
    // SAFETY: the driver API declares `CUresult cuInit(unsigned int)`, an int by its ABI.
    let init: extern "C" fn(c_uint) -> c_int = unsafe { std::mem::transmute(init) };
    match init(0) {
        SUCCESS => {}
        code => return Err(format!("cuInit fails: {}", error_name(code))),
    }
    let count = symbol("cuDeviceGetCount").ok_or_else(|| missing("cuDeviceGetCount"))?;
    // SAFETY: the driver API declares `CUresult cuDeviceGetCount(int *)`.
    let count: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(count) };
    let mut devices = 0;
    // SAFETY: the pointer is to a live int.
    match unsafe { count(&mut devices) } {
        SUCCESS if devices > 0 => Ok(()),
        SUCCESS => Err("the CUDA driver sees no GPU".into()),
        code => Err(format!("cuDeviceGetCount fails: {}", error_name(code))),
    }
}

/// The driver's name of an error code with its number; the number alone where the driver does not know it.
pub fn error_name(code: i32) -> String {
    let Some(function) = symbol("cuGetErrorName") else { return format!("error {code}") };
    // SAFETY: the driver API declares `CUresult cuGetErrorName(CUresult, const char **)`; CUresult is an int by its ABI.
    let function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int = unsafe { std::mem::transmute(function) };
    let mut text = std::ptr::null();
    // SAFETY: the pointer is to a live pointer.
    if unsafe { function(code, &mut text) } != SUCCESS || text.is_null() {
        return format!("error {code}");
    }
    // SAFETY: on success the driver gives a NUL-terminated string that it never frees.
    format!("{} ({code})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}
