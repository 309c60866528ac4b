//! Where kernels run: a GPU or the emulator, behind one trait, so that a plan is the same code on both.

mod buffer;
mod emulated;
mod gpu;

pub(crate) use buffer::View;
pub use buffer::{Buffer, Element};
pub use emulated::{Emulator, EmulatorOptions};
pub use gpu::{Gpu, Graph, KernelInfo, MODULES, Module, choose_module};

use crate::error::{Error, Result};
use cuda_std::emu;
use cuda_std::kernel::{Family, Kernel, Packed};
use std::fmt::Debug;
use std::sync::Arc;

/// What a plan needs to know of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Name as the driver gives it.
    pub name: String,
    /// Compute capability.
    pub compute: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of a block, bytes.
    pub shared_per_block: u32,
    /// Shared memory of a multiprocessor, bytes.
    pub shared_per_multiprocessor: u32,
}

/// A kernel of any family, as a device launches it.
#[derive(Clone, Copy, Debug)]
pub struct ErasedKernel {
    /// Symbol in the PTX.
    pub name: &'static str,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that must fit on one multiprocessor.
    pub min_blocks: u32,
    /// May start before the kernel ahead of it has ended.
    pub early: bool,
    /// The emulated form.
    pub emulate: fn(&emu::Launch<'_>, &[Packed]) -> std::result::Result<(), emu::Fault>,
}

impl<F> From<Kernel<F>> for ErasedKernel {
    fn from(kernel: Kernel<F>) -> Self {
        let Kernel { name, threads, min_blocks, early, emulate, .. } = kernel;
        ErasedKernel { name, threads, min_blocks, early, emulate }
    }
}

/// Size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
}

/// A device: memory, launches and waiting. Everything happens in order on the device's one stream.
///
/// Addresses are device addresses; [`Buffer`] is the typed, checked way to use them.
pub trait Device: Debug + Send + Sync {
    /// What it is.
    fn properties(&self) -> &Properties;
    /// Allocates `bytes` bytes, at least 256-byte aligned. 0 bytes give a valid address that must still be freed.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    /// Frees an allocation.
    fn free(&self, address: u64);
    /// Copies to the device and waits.
    fn upload(&self, address: u64, data: &[u8]) -> Result<()>;
    /// Waits for all launches and copies to the host.
    fn download(&self, address: u64, data: &mut [u8]) -> Result<()>;
    /// Sets bytes, in order with the launches.
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()>;
    /// Makes a kernel ready: finds it in the module and sets its shared memory limit. Launches need nothing else.
    fn prepare(&self, kernel: ErasedKernel, shared_bytes: u32) -> Result<()>;
    /// Launches a prepared kernel with arguments of its own family; [`launch`] is the typed way.
    fn launch_erased(&self, kernel: ErasedKernel, grid: Grid, args: &[Packed]) -> Result<()>;
    /// Waits for everything and reports what failed meanwhile.
    fn synchronize(&self) -> Result<()>;
}

/// Launches `kernel`. The arguments' type comes from the kernel's declaration.
pub fn launch<F: Family>(device: &dyn Device, kernel: Kernel<F>, grid: Grid, args: F::Args<'_>) -> Result<()> {
    if grid.blocks == 0 {
        return Ok(());
    }
    if grid.blocks > i32::MAX as u32 {
        return Err(Error::argument("blocks", grid.blocks, "at most 2^31 - 1"));
    }
    device.launch_erased(kernel.into(), grid, F::pack(args).as_slice())
}

/// A device shared by buffers, layers and plans.
pub type DeviceHandle = Arc<dyn Device>;
