//! The emulator as a device: the same kernels and plans, run on the CPU with every access checked.

use super::{Device, DeviceHandle, ErasedKernel, Grid, Properties};
use crate::error::{Error, Result};
use cuda_std::arch::ArchId;
use cuda_std::emu;
use cuda_std::kernel::Packed;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an emulated device looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatorOptions {
    /// Which architecture's paths the kernels take.
    pub arch: ArchId,
    /// Multiprocessors: how many persistent blocks a plan launches. Small numbers make blocks loop over many units.
    pub multiprocessors: u32,
    /// Decides the order in which lanes and blocks run; each launch takes a new one derived from it.
    pub seed: u64,
}

impl Default for EmulatorOptions {
    fn default() -> Self {
        EmulatorOptions { arch: ArchId::Sm90, multiprocessors: 2, seed: 0 }
    }
}

/// An emulated device. A fault in a kernel is an [`Error::Fault`] of the launch that ran it.
#[derive(Debug)]
pub struct Emulator {
    device: emu::Device,
    properties: Properties,
    options: EmulatorOptions,
    launches: AtomicU64,
    allocations: Mutex<HashMap<u64, emu::Allocation>>,
}

impl Emulator {
    /// A device with [`EmulatorOptions::default`].
    #[allow(clippy::new_ret_no_self)] // Buffers and plans hold devices by handle.
    pub fn new() -> DeviceHandle {
        Self::with_options(EmulatorOptions::default())
    }

    /// A device with `options`.
    pub fn with_options(options: EmulatorOptions) -> DeviceHandle {
        let (compute, shared_per_block, shared_per_multiprocessor) = match options.arch {
            ArchId::Sm80 => ((8, 0), 163 * 1024, 164 * 1024),
            ArchId::Sm90 => ((9, 0), 227 * 1024, 228 * 1024),
            ArchId::Sm100 => ((10, 0), 227 * 1024, 228 * 1024),
            ArchId::Sm120 => ((12, 0), 99 * 1024, 100 * 1024),
        };
        Arc::new(Emulator {
            device: emu::Device::new(),
            properties: Properties {
                name: format!("emulator ({:?})", options.arch),
                compute,
                multiprocessors: options.multiprocessors.max(1),
                shared_per_block,
                shared_per_multiprocessor,
            },
            options,
            launches: AtomicU64::new(0),
            allocations: Mutex::default(),
        })
    }

    fn allocations(&self) -> MutexGuard<'_, HashMap<u64, emu::Allocation>> {
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn memory_error(error: emu::MemoryError) -> Error {
    Error::Fault(error.to_string())
}

impl Device for Emulator {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let allocation = self.device.alloc(bytes);
        let address = allocation.address();
        self.allocations().insert(address, allocation);
        Ok(address)
    }

    fn free(&self, address: u64) {
        self.allocations().remove(&address);
    }

    fn upload(&self, address: u64, data: &[u8]) -> Result<()> {
        let _alone = self.allocations();
        // SAFETY: launches and other copies hold the same lock, so none runs now.
        unsafe { self.device.write(address, data) }.map_err(memory_error)
    }

    fn download(&self, address: u64, data: &mut [u8]) -> Result<()> {
        let _alone = self.allocations();
        // SAFETY: as in `upload`.
        unsafe { self.device.read(address, data) }.map_err(memory_error)
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        let _alone = self.allocations();
        // SAFETY: as in `upload`.
        unsafe { self.device.fill(address, bytes, byte) }.map_err(memory_error)
    }

    fn prepare(&self, kernel: ErasedKernel, shared_bytes: u32) -> Result<()> {
        if shared_bytes > self.properties.shared_per_block {
            let needed = format!("at most {} for {}", self.properties.shared_per_block, kernel.name);
            return Err(Error::argument("shared_bytes", shared_bytes, needed));
        }
        Ok(())
    }

    fn launch_erased(&self, kernel: ErasedKernel, grid: Grid, args: &[Packed]) -> Result<()> {
        // A launch waits for its end and keeps the memory for itself.
        let _alone = self.allocations();
        let number = self.launches.fetch_add(1, Ordering::Relaxed);
        let launch = emu::Launch {
            device: &self.device,
            grid: grid.blocks,
            threads: kernel.threads,
            shared_bytes: grid.shared_bytes,
            arch: self.options.arch,
            seed: self.options.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(number),
        };
        (kernel.emulate)(&launch, args).map_err(|fault| Error::Fault(fault.to_string()))
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize();
        Ok(())
    }
}
