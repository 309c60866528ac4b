//! An NVIDIA GPU as a device. cust opens the device and its context; this file adds, by raw driver calls, what cust 0.3.2 lacks:
//! non-blocking streams, function attributes, compile logs, graphs, and errors that carry the driver's number.
//!
//! The driver is loaded when first used: without one, [`Gpu::new`] is an error and nothing else happens.

use super::{Device, ErasedKernel, Grid, Properties};
use crate::error::{Error, Result};
use cuda_std::kernel::{MAX_PARAMS, Packed};
use cust::sys::{self, CUresult};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

include!(concat!(env!("OUT_DIR"), "/ptx_modules.rs"));

/// One GPU with one stream, on which everything happens in order.
#[derive(Debug)]
pub struct Gpu {
    properties: Properties,
    module: sys::CUmodule,
    stream: sys::CUstream,
    functions: Mutex<HashMap<&'static str, Function>>,
    /// Launches early kernels early; none where GPU, module or driver cannot.
    early: Option<cuda_driver::EarlyLaunch>,
    early_allowed: AtomicBool,
    /// Keeps the primary context alive; dropped last.
    context: cust::context::Context,
}

#[derive(Clone, Copy, Debug)]
struct Function {
    handle: sys::CUfunction,
    shared_limit: u32,
}

// SAFETY: driver handles may be used from any thread once the context is current there, which every call sees to.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for Gpu {}

/// Registers, shared memory and occupancy of a kernel as the driver loaded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Registers of a thread.
    pub registers: i32,
    /// Local memory of a thread, bytes.
    pub local_bytes: i32,
    /// Blocks that fit on one multiprocessor.
    pub blocks_per_multiprocessor: i32,
}

fn check(call: &'static str, code: CUresult) -> Result<()> {
    let code = code as i32;
    if code == 0 { Ok(()) } else { Err(Error::Driver { call, code, name: cuda_driver::error_name(code) }) }
}

/// The embedded module for a GPU: the newest of its own family, else the newest that is portable to it.
pub fn choose_module(compute: (u32, u32)) -> Option<&'static Module> {
    let runs = |module: &&Module| match module.arch {
        // sm_90a runs on 9.0 alone, the f targets on their family.
        "sm_90a" => compute == (9, 0),
        arch if arch.ends_with('f') => compute.0 == module.compute.0 && compute >= module.compute,
        _ => compute >= module.compute,
    };
    MODULES.iter().rev().find(runs)
}

impl Gpu {
    /// GPU number `ordinal`. [`Error::NoGpu`] where there is no driver, no such GPU, or none of the embedded modules runs on it.
    pub fn new(ordinal: u32) -> Result<Arc<Self>> {
        Self::open(ordinal, None)
    }

    /// As [`Gpu::new`] with another build of the same kernels, for work on them.
    pub fn with_ptx(ordinal: u32, ptx: &str) -> Result<Arc<Self>> {
        Self::open(ordinal, Some(ptx))
    }

    fn open(ordinal: u32, ptx: Option<&str>) -> Result<Arc<Self>> {
        cuda_driver::available().map_err(Error::NoGpu)?;
        let device = cust::device::Device::get_device(ordinal)
            .map_err(|error| Error::NoGpu(format!("device {ordinal}: {error:?}")))?;
        let context = cust::context::Context::new(device)
            .map_err(|error| Error::NoGpu(format!("context of device {ordinal}: {error:?}")))?;
        let attribute = |attribute: sys::CUdevice_attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: writes one int.
            check("cuDeviceGetAttribute", unsafe {
                sys::cuDeviceGetAttribute(&mut value, attribute, device.as_raw())
            })?;
            Ok(value as u32)
        };
        use sys::CUdevice_attribute_enum as a;
        let properties = Properties {
            name: device.name().unwrap_or_else(|_| "unnamed".into()),
            compute: (
                attribute(a::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(a::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(a::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block: attribute(a::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_multiprocessor: attribute(a::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        };
        let embedded = choose_module(properties.compute).ok_or_else(|| {
            let (major, minor) = properties.compute;
            Error::NoGpu(format!("{}: no kernels for compute capability {major}.{minor}", properties.name))
        });
        let (name, text) = match ptx {
            Some(ptx) => ("given", ptx),
            None => embedded.map(|module| (module.arch, module.ptx))?,
        };
        let module = load_module(name, text)?;
        // A module for an older architecture has kernels that do not wait, wherever they run.
        let waits = properties.compute >= (9, 0) && target(text).is_some_and(|target| target >= 90);
        let early = if waits { cuda_driver::EarlyLaunch::find() } else { None };
        let early_allowed = AtomicBool::new(true);
        let mut stream = null_mut();
        // SAFETY: writes one handle; flag 1 is CU_STREAM_NON_BLOCKING.
        check("cuStreamCreateWithPriority", unsafe { sys::cuStreamCreateWithPriority(&mut stream, 1, 0) })?;
        Ok(Arc::new(Gpu { properties, module, stream, functions: Mutex::default(), early, early_allowed, context }))
    }

    /// Whether kernels that are declared `early` are launched so: the GPU, the module and the driver can, and
    /// [`Gpu::allow_early`] has not switched it off.
    pub fn launches_early(&self) -> bool {
        self.early.is_some() && self.early_allowed.load(Ordering::Relaxed)
    }

    /// Lets kernels that are declared `early` start before the kernel ahead has ended (as after opening), or not: to measure
    /// what it gives. Results are the same. Counts for launches and captures from now on.
    pub fn allow_early(&self, allowed: bool) {
        self.early_allowed.store(allowed, Ordering::Relaxed);
    }

    fn enter(&self) -> Result<()> {
        cust::context::CurrentContext::set_current(&self.context).map_err(|error| Error::Driver {
            call: "cuCtxSetCurrent",
            code: error as i32,
            name: format!("{error:?}"),
        })
    }

    fn functions(&self) -> MutexGuard<'_, HashMap<&'static str, Function>> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what `work` enqueues instead of running it. The capture ends in any case, and the stream is usable afterwards.
    pub fn capture(self: &Arc<Self>, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and idle or ordered.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })?;
        let done = work();
        let mut graph = null_mut();
        // SAFETY: ends the capture begun above.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) });
        let result = done.and(ended).and_then(|()| {
            let mut executable = null_mut();
            // SAFETY: a graph that was just captured.
            check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) })?;
            Ok(Graph { gpu: self.clone(), executable })
        });
        if !graph.is_null() {
            // SAFETY: the executable graph, if any, is independent of it.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        result
    }

    /// Milliseconds between two events around what `work` enqueues; waits for it.
    pub fn elapsed_ms(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.enter()?;
        let event = || -> Result<sys::CUevent> {
            let mut event = null_mut();
            // SAFETY: writes one handle.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
            Ok(event)
        };
        let (start, stop) = (event()?, event()?);
        let timed = (|| {
            // SAFETY: events and stream of this context.
            check("cuEventRecord", unsafe { sys::cuEventRecord(start, self.stream) })?;
            work()?;
            // SAFETY: as above.
            check("cuEventRecord", unsafe { sys::cuEventRecord(stop, self.stream) })?;
            // SAFETY: as above.
            check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(stop) })?;
            let mut ms = 0.0;
            // SAFETY: both events are recorded.
            check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime(&mut ms, start, stop) })?;
            Ok(ms)
        })();
        // SAFETY: ours, and not used again.
        unsafe {
            sys::cuEventDestroy_v2(start);
            sys::cuEventDestroy_v2(stop);
        }
        timed
    }

    /// Registers and occupancy of a prepared kernel.
    pub fn kernel_info(&self, kernel: ErasedKernel, shared_bytes: u32) -> Result<KernelInfo> {
        self.prepare(kernel, shared_bytes)?;
        let function = self.function(kernel.name)?.handle;
        let read = |attribute| -> Result<i32> {
            let mut value = 0;
            // SAFETY: writes one int.
            check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut value, attribute, function) })?;
            Ok(value)
        };
        let mut blocks = 0;
        // SAFETY: writes one int.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function,
                kernel.threads as i32,
                shared_bytes as usize,
            )
        })?;
        use sys::CUfunction_attribute_enum as a;
        Ok(KernelInfo {
            registers: read(a::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: read(a::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            blocks_per_multiprocessor: blocks,
        })
    }

    fn function(&self, name: &'static str) -> Result<Function> {
        self.functions()
            .get(name)
            .copied()
            .ok_or_else(|| Error::argument("kernel", name, "a kernel that was prepared before its first launch"))
    }
}

/// The number in `.target sm_NN`.
fn target(ptx: &str) -> Option<u32> {
    let line = ptx.lines().find_map(|line| line.trim_start().strip_prefix(".target"))?;
    let number = line.trim_start().strip_prefix("sm_")?;
    number[..number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len())].parse().ok()
}

fn load_module(name: &str, ptx: &str) -> Result<sys::CUmodule> {
    let text = CString::new(ptx).map_err(|_| Error::NoGpu(format!("the {} module is damaged", name)))?;
    let mut log = vec![0u8; 8192];
    use sys::CUjit_option_enum as o;
    let mut options = [o::CU_JIT_ERROR_LOG_BUFFER, o::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
    let mut module = null_mut();
    // SAFETY: a terminated text; the log buffer is as long as the second option says and outlives the call.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    check("cuModuleLoadDataEx", code).map_err(|error| {
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        Error::NoGpu(format!("{error} for the {} module: {}", name, String::from_utf8_lossy(&log[..end])))
    })?;
    Ok(module)
}

impl Device for Gpu {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: writes one address. The driver refuses 0 bytes, for which one will do.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) })?;
        Ok(address)
    }

    fn free(&self, address: u64) {
        if self.enter().is_ok() {
            // SAFETY: from `allocate`. The driver waits for launches that may use it.
            unsafe { sys::cuMemFree_v2(address) };
        }
    }

    fn upload(&self, address: u64, data: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's allocation is at least this long; the copy is over before `data` goes.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, data.as_ptr().cast(), data.len(), self.stream)
        })?;
        self.synchronize()
    }

    fn download(&self, address: u64, data: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: as above.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), address, data.len(), self.stream)
        })?;
        self.synchronize()
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's allocation is at least this long.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, byte, bytes, self.stream) })
    }

    fn prepare(&self, kernel: ErasedKernel, shared_bytes: u32) -> Result<()> {
        self.enter()?;
        if shared_bytes > self.properties.shared_per_block {
            let needed = format!("at most {} for {}", self.properties.shared_per_block, kernel.name);
            return Err(Error::argument("shared_bytes", shared_bytes, needed));
        }
        let mut functions = self.functions();
        let function = match functions.get_mut(kernel.name) {
            Some(function) => function,
            None => {
                let name = CString::new(kernel.name)
                    .map_err(|_| Error::argument("kernel", kernel.name, "a name without zero bytes"))?;
                let mut handle = null_mut();
                // SAFETY: the module lives as long as `self`.
                check("cuModuleGetFunction", unsafe {
                    sys::cuModuleGetFunction(&mut handle, self.module, name.as_ptr())
                })?;
                functions.entry(kernel.name).or_insert(Function { handle, shared_limit: 0 })
            }
        };
        if shared_bytes > function.shared_limit {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of this module.
            check("cuFuncSetAttribute", unsafe {
                sys::cuFuncSetAttribute(function.handle, attribute, shared_bytes as i32)
            })?;
            function.shared_limit = shared_bytes;
        }
        Ok(())
    }

    fn launch_erased(&self, kernel: ErasedKernel, grid: Grid, args: &[Packed]) -> Result<()> {
        self.enter()?;
        let function = self.function(kernel.name)?;
        if grid.shared_bytes > function.shared_limit {
            let needed = format!("at most {}, which {} was prepared for", function.shared_limit, kernel.name);
            return Err(Error::argument("shared_bytes", grid.shared_bytes, needed));
        }
        // Every parameter is a pointer or a scalar of at most eight bytes, little-endian.
        let mut values = [0u64; MAX_PARAMS];
        let mut pointers = [null_mut::<c_void>(); MAX_PARAMS];
        for (i, arg) in args.iter().enumerate() {
            values[i] = match *arg {
                Packed::Pointer { address, .. } => address,
                Packed::Scalar { bits, .. } => bits,
            };
            pointers[i] = (&raw mut values[i]).cast();
        }
        if let Some(early) = self.early.filter(|_| kernel.early && self.launches_early()) {
            // SAFETY: as below.
            let code = unsafe {
                early.launch(
                    function.handle.cast(),
                    grid.blocks,
                    kernel.threads,
                    grid.shared_bytes,
                    self.stream.cast(),
                    pointers.as_mut_ptr(),
                )
            };
            return if code == 0 {
                Ok(())
            } else {
                Err(Error::Driver { call: "cuLaunchKernelEx", code, name: cuda_driver::error_name(code) })
            };
        }
        // SAFETY: the arguments are those of the kernel's declaration, of which the PTX was built; the values live through
        // the call, which copies them.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function.handle,
                grid.blocks,
                1,
                1,
                kernel.threads,
                1,
                1,
                grid.shared_bytes,
                self.stream,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        })
    }

    fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: our stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            // SAFETY: nothing uses them any more; errors of earlier work were reported where it was waited for.
            unsafe {
                sys::cuStreamSynchronize(self.stream);
                sys::cuStreamDestroy_v2(self.stream);
                sys::cuModuleUnload(self.module);
            }
        }
    }
}

/// A captured sequence of launches.
#[derive(Debug)]
pub struct Graph {
    gpu: Arc<Gpu>,
    executable: sys::CUgraphExec,
}

// SAFETY: as for `Gpu`.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues everything that was captured, with the buffers' present contents.
    pub fn launch(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: an instantiated graph on its stream.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.executable, self.gpu.stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: waits for launches in flight before the graph goes.
            unsafe {
                sys::cuStreamSynchronize(self.gpu.stream);
                sys::cuGraphExecDestroy(self.executable);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MODULES, target};

    #[test]
    fn the_target_of_a_module_is_read() {
        assert_eq!(target("//\n.version 8.4\n.target sm_90a\n"), Some(90));
        assert_eq!(target(".version 8.8\n.target\tsm_100f, debug"), Some(100));
        assert_eq!(target(".version 8.4\n.target sm_89"), Some(89));
        assert_eq!(target("nothing"), None);
        for module in MODULES {
            assert_eq!(target(module.ptx), Some(module.compute.0 * 10 + module.compute.1), "{}", module.arch);
        }
    }
}
