//! A device without memory that runs nothing: it keeps what would be launched.

use crate::device::{Device, ErasedKernel, Grid, Properties};
use crate::error::{Error, Result};
use cuda_std::kernel::Packed;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Kernels and grids, in order.
pub(crate) type Launches = Vec<(&'static str, Grid)>;

#[derive(Debug)]
pub(crate) struct DryRun {
    properties: Properties,
    /// Next address. Nobody follows one.
    next: AtomicU64,
    launches: Mutex<Launches>,
}

impl DryRun {
    /// A device like the one that has `properties`.
    pub(crate) fn new(properties: Properties) -> Self {
        DryRun { properties, next: AtomicU64::new(1 << 20), launches: Mutex::default() }
    }

    /// What was launched since this was called last.
    pub(crate) fn take(&self) -> Launches {
        std::mem::take(&mut *self.launches.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Device for DryRun {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let bytes = (bytes as u64).max(1).next_multiple_of(256);
        Ok(self.next.fetch_add(bytes, Ordering::Relaxed))
    }

    fn free(&self, _address: u64) {}

    fn upload(&self, _address: u64, _data: &[u8]) -> Result<()> {
        Ok(())
    }

    fn download(&self, _address: u64, data: &mut [u8]) -> Result<()> {
        data.fill(0);
        Ok(())
    }

    fn fill(&self, _address: u64, _byte: u8, _bytes: usize) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, kernel: ErasedKernel, shared_bytes: u32) -> Result<()> {
        if shared_bytes > self.properties.shared_per_block {
            let needed = format!("at most {} for {}", self.properties.shared_per_block, kernel.name);
            return Err(Error::argument("shared_bytes", shared_bytes, needed));
        }
        Ok(())
    }

    fn launch_erased(&self, kernel: ErasedKernel, grid: Grid, _args: &[Packed]) -> Result<()> {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner).push((kernel.name, grid));
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
