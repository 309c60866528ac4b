//! The memory of an emulated device.

use super::block::At;
use super::shadow::Page;
use crate::kernel::{DeviceMut, DeviceRef};
use crate::memory::Element;
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a page: the unit in which the shadow of written buffers is allocated and locked.
pub(super) const PAGE: usize = 4096;
/// What allocations are aligned to, as `cuMemAlloc` does.
const ALIGN: usize = 256;
/// Bytes between allocations that belong to nobody.
const GAP: u64 = 65_536;
/// Operations that a block may do unless told otherwise.
const OPERATIONS: u64 = 200_000_000;

/// Host memory as aligned as the device addresses that it stands for.
#[derive(Clone)]
#[repr(C, align(256))]
struct Line([u8; ALIGN]);

/// The bytes of one allocation.
pub(super) struct Storage {
    /// Device address of the first byte.
    pub address: u64,
    /// Bytes.
    pub len: usize,
    data: Box<[UnsafeCell<Line>]>,
    /// One bit a byte: written at least once.
    written: Box<[AtomicU64]>,
    /// Every bit of `written` is set.
    complete: AtomicBool,
    /// For each page, the latest launch that could write to it: accesses of that launch are tracked.
    tracked_by: Box<[AtomicU64]>,
    /// Who accessed what, by page.
    pages: Box<[Mutex<Option<Box<Page>>>]>,
}

// SAFETY: `data` is reached through `base` alone. Bytes of a buffer that a launch writes are accessed under the lock of
// their page; other bytes are only read while a launch runs, since `DeviceRef::new` and `DeviceMut::new` have the caller
// promise that nobody else writes them meanwhile, and host copies go through `&mut` or that same promise.
unsafe impl Sync for Storage {}

impl Storage {
    pub fn new(address: u64, len: usize) -> Self {
        // 0xFF: a NaN in every float format, and no likely index.
        let data = (0..len.div_ceil(ALIGN)).map(|_| UnsafeCell::new(Line([0xFF; ALIGN]))).collect();
        Storage {
            address,
            len,
            data,
            written: (0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            complete: AtomicBool::new(len == 0),
            tracked_by: (0..len.div_ceil(PAGE)).map(|_| AtomicU64::new(0)).collect(),
            pages: (0..len.div_ceil(PAGE)).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// Pointer to the first byte.
    #[inline(always)]
    pub fn base(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.data.as_ptr()).cast()
    }

    /// Launch `launch` may write to these bytes.
    pub fn track(&self, offset: usize, len: usize, launch: u64) {
        for page in &self.tracked_by[offset / PAGE..(offset + len).div_ceil(PAGE)] {
            page.store(launch, Relaxed);
        }
    }

    /// Whether launch `launch` may write to the page of byte `offset`.
    #[inline(always)]
    pub fn is_tracked(&self, offset: usize, launch: u64) -> bool {
        self.tracked_by[offset / PAGE].load(Relaxed) == launch
    }

    /// Locks the page of byte `offset`.
    #[inline]
    pub fn page(&self, offset: usize) -> MutexGuard<'_, Option<Box<Page>>> {
        self.pages[offset / PAGE].lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline(always)]
    fn mask(offset: usize, len: usize) -> u64 {
        (u64::MAX >> (64 - len)) << (offset % 64)
    }

    /// Whether the `len` (at most 16, not across a multiple of 16) bytes at `offset` were all written.
    #[inline(always)]
    pub fn is_written(&self, offset: usize, len: usize) -> bool {
        let mask = Self::mask(offset, len);
        self.written[offset / 64].load(Relaxed) & mask == mask
    }

    /// Marks bytes as written; `len` as for [`Storage::is_written`].
    #[inline(always)]
    pub fn set_written(&self, offset: usize, len: usize) {
        let (word, mask) = (&self.written[offset / 64], Self::mask(offset, len));
        if word.load(Relaxed) & mask != mask {
            word.fetch_or(mask, Relaxed);
        }
    }

    /// First unwritten byte of a range.
    pub fn first_unwritten(&self, offset: usize, len: usize) -> Option<usize> {
        if self.complete.load(Relaxed) {
            return None;
        }
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let missing = Self::mask(at, count) & !self.written[at / 64].load(Relaxed);
            if missing != 0 {
                return Some(at / 64 * 64 + missing.trailing_zeros() as usize);
            }
            at += count;
        }
        if offset == 0 && len == self.len {
            self.complete.store(true, Relaxed);
        }
        None
    }

    fn set_range(&self, offset: usize, len: usize, written: bool) {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let mask = Self::mask(at, count);
            if written {
                self.written[at / 64].fetch_or(mask, Relaxed);
            } else {
                self.written[at / 64].fetch_and(!mask, Relaxed);
            }
            at += count;
        }
        if !written && len > 0 {
            self.complete.store(false, Relaxed);
        }
    }
}

/// A host access to device memory that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No single allocation holds these bytes.
    #[error("{len} bytes at device address {address:#x} are in no allocation")]
    Unallocated {
        /// First address.
        address: u64,
        /// Bytes.
        len: usize,
    },
    /// Nobody wrote this byte.
    #[error("byte {offset} of the {len} at device address {address:#x} was never written")]
    Uninitialised {
        /// First address of the range.
        address: u64,
        /// Bytes of the range.
        len: usize,
        /// First byte of it that was never written.
        offset: usize,
    },
}

struct Memory {
    next: u64,
    /// By first address.
    allocations: BTreeMap<u64, Arc<Storage>>,
}

/// A launch that may still run when an early one starts.
#[derive(Clone)]
pub(super) struct Running {
    pub id: u64,
    pub kernel: &'static str,
    /// What lets it still run although launches have come since.
    pub because: Option<Hasty>,
}

/// A call of `launch_dependents` before the thread's own wait.
#[derive(Clone, Copy)]
pub(super) struct Hasty {
    pub kernel: &'static str,
    pub block: u32,
    pub thread: u32,
    pub at: At,
}

struct Shared {
    memory: Mutex<Memory>,
    /// Launches that may still run, oldest first.
    running: Mutex<Vec<Running>>,
    operations: AtomicU64,
}

/// An emulated device: memory, and nothing else that outlives a launch.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("allocations", &self.memory().allocations.len()).finish()
    }
}

impl Default for Device {
    fn default() -> Self {
        Device::new()
    }
}

impl Device {
    /// A device without allocations.
    pub fn new() -> Self {
        Device(Arc::new(Shared {
            memory: Mutex::new(Memory { next: 0x7F00_0000_0000, allocations: BTreeMap::new() }),
            running: Mutex::default(),
            operations: AtomicU64::new(OPERATIONS),
        }))
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `bytes` bytes that count as uninitialised, 256-byte aligned. Addresses are never used twice.
    pub fn alloc(&self, bytes: usize) -> Allocation {
        let mut memory = self.memory();
        let address = memory.next;
        memory.next += (bytes.next_multiple_of(ALIGN) as u64) + GAP;
        let storage = Arc::new(Storage::new(address, bytes));
        memory.allocations.insert(address, storage.clone());
        drop(memory);
        Allocation { device: self.clone(), storage }
    }

    /// A new allocation that holds `data`.
    pub fn upload<T: Element>(&self, data: &[T]) -> Allocation {
        let allocation = self.alloc(size_of_val(data));
        allocation.copy_in(0, bytes_of(data));
        allocation
    }

    /// The host has waited for all launches, or copies in order with them: none of them runs any more. Copies and fills by
    /// the host do this by themselves.
    pub fn synchronize(&self) {
        self.set_running(Vec::new());
    }

    /// The launches that may still run when an early one starts now.
    pub(super) fn running(&self) -> Vec<Running> {
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_running(&self, running: Vec<Running>) {
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) = running;
    }

    /// Operations (accesses, warp operations, barriers) that a block may do before it counts as hanging. 200 million
    /// unless set.
    pub fn set_operation_budget(&self, operations: u64) {
        self.0.operations.store(operations.max(1), Relaxed);
    }

    pub(super) fn operation_budget(&self) -> u64 {
        self.0.operations.load(Relaxed)
    }

    /// The allocation that holds all of a range, and the offset in it.
    pub(super) fn find(&self, address: u64, len: usize) -> Result<(Arc<Storage>, usize), MemoryError> {
        let memory = self.memory();
        let (_, storage) =
            memory.allocations.range(..=address).next_back().ok_or(MemoryError::Unallocated { address, len })?;
        let offset = usize::try_from(address - storage.address).unwrap_or(usize::MAX);
        if offset > storage.len || len > storage.len - offset {
            return Err(MemoryError::Unallocated { address, len });
        }
        Ok((storage.clone(), offset))
    }

    /// Writes `data` at a device address.
    ///
    /// # Safety
    /// No launch that runs at the same time accesses these bytes.
    pub unsafe fn write(&self, address: u64, data: &[u8]) -> Result<(), MemoryError> {
        self.synchronize();
        let (storage, offset) = self.find(address, data.len())?;
        storage.copy_in(offset, data);
        Ok(())
    }

    /// Reads bytes at a device address, all of which must have been written.
    ///
    /// # Safety
    /// No launch that runs at the same time writes these bytes.
    pub unsafe fn read(&self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        self.synchronize();
        let len = out.len();
        let (storage, start) = self.find(address, len)?;
        if let Some(at) = storage.first_unwritten(start, len) {
            return Err(MemoryError::Uninitialised { address, len, offset: at - start });
        }
        storage.copy_out(start, out);
        Ok(())
    }

    /// Sets `len` bytes at a device address to `value`; they count as initialised.
    ///
    /// # Safety
    /// No launch that runs at the same time accesses these bytes.
    pub unsafe fn fill(&self, address: u64, len: usize, value: u8) -> Result<(), MemoryError> {
        self.synchronize();
        let (storage, offset) = self.find(address, len)?;
        storage.fill(offset, len, value);
        Ok(())
    }

    /// Makes `len` bytes at a device address count as never written.
    ///
    /// # Safety
    /// No launch that runs at the same time accesses these bytes.
    pub unsafe fn forget(&self, address: u64, len: usize) -> Result<(), MemoryError> {
        self.synchronize();
        let (storage, offset) = self.find(address, len)?;
        storage.fill(offset, len, 0xFF);
        storage.set_range(offset, len, false);
        Ok(())
    }
}

impl Storage {
    fn copy_in(&self, offset: usize, data: &[u8]) {
        assert!(offset <= self.len && data.len() <= self.len - offset, "copy within the allocation");
        // SAFETY: the range was checked, and nobody else accesses these bytes (see `Sync`).
        unsafe { self.base().add(offset).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        self.set_range(offset, data.len(), true);
    }

    fn copy_out(&self, offset: usize, out: &mut [u8]) {
        assert!(offset <= self.len && out.len() <= self.len - offset, "copy within the allocation");
        // SAFETY: the range was checked, and nobody writes these bytes (see `Sync`).
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(self.base().add(offset), out.len()) };
    }

    fn fill(&self, offset: usize, len: usize, value: u8) {
        assert!(offset <= self.len && len <= self.len - offset, "fill within the allocation");
        // SAFETY: the range was checked, and nobody else accesses these bytes (see `Sync`).
        unsafe { self.base().add(offset).write_bytes(value, len) };
        self.set_range(offset, len, true);
    }
}

/// The bytes of a slice.
fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements are plain bits without padding.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// Memory of a [`Device`], freed when dropped.
pub struct Allocation {
    device: Device,
    storage: Arc<Storage>,
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Allocation").field("address", &self.storage.address).field("len", &self.storage.len).finish()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.memory().allocations.remove(&self.storage.address);
    }
}

impl Allocation {
    /// Device address of the first byte.
    pub fn address(&self) -> u64 {
        self.storage.address
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.storage.len
    }

    /// All of it for reading, as elements of type `T` (what does not fill an element is left off).
    pub fn as_ref<T: Element>(&self) -> DeviceRef<'_, T> {
        // SAFETY: the allocation lives as long as the borrow, which also keeps `&mut self` writers away.
        unsafe { DeviceRef::new(self.address(), self.len() / size_of::<T>()) }
    }

    /// All of it for writing, as elements of type `T`.
    pub fn as_mut<T: Element>(&mut self) -> DeviceMut<'_, T> {
        // SAFETY: the allocation lives as long as the borrow, which is exclusive.
        unsafe { DeviceMut::new(self.address(), self.len() / size_of::<T>()) }
    }

    fn copy_in(&self, offset: usize, data: &[u8]) {
        self.device.synchronize();
        self.storage.copy_in(offset, data);
    }

    /// Writes elements from byte `offset` on.
    pub fn upload<T: Element>(&mut self, offset: usize, data: &[T]) -> Result<(), MemoryError> {
        let len = size_of_val(data);
        if offset > self.len() || len > self.len() - offset {
            return Err(MemoryError::Unallocated { address: self.address().saturating_add(offset as u64), len });
        }
        self.copy_in(offset, bytes_of(data));
        Ok(())
    }

    /// All whole elements of type `T`. An error where a byte was never written.
    pub fn download<T: Element>(&self) -> Result<Vec<T>, MemoryError> {
        let len = self.len() / size_of::<T>() * size_of::<T>();
        match self.storage.first_unwritten(0, len) {
            Some(offset) => Err(MemoryError::Uninitialised { address: self.address(), len, offset }),
            None => Ok(self.download_raw()),
        }
    }

    /// All whole elements of type `T`; bytes that were never written are 0xFF.
    pub fn download_raw<T: Element>(&self) -> Vec<T> {
        self.device.synchronize();
        let mut bytes = vec![0; self.len() / size_of::<T>() * size_of::<T>()];
        self.storage.copy_out(0, &mut bytes);
        bytes.chunks_exact(size_of::<T>()).map(T::from_bytes).collect()
    }

    /// Sets every byte to `value`; they count as initialised.
    pub fn fill(&mut self, value: u8) {
        self.device.synchronize();
        self.storage.fill(0, self.len(), value);
    }

    /// Makes every byte count as never written.
    pub fn forget(&mut self) {
        self.device.synchronize();
        self.storage.fill(0, self.len(), 0xFF);
        self.storage.set_range(0, self.len(), false);
    }
}
