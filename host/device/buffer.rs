//! Typed device memory.

use super::DeviceHandle;
use crate::error::{Error, Result, check_at_least, check_len};
use cuda_std::kernel::{DeviceMut, DeviceRef};
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// Plain element types that can be copied to and from a device.
pub trait Element: cuda_std::memory::Element + bytemuck::Pod {}
impl<T: cuda_std::memory::Element + bytemuck::Pod> Element for T {}

/// `len` elements on a device. Freed on drop.
#[derive(Debug)]
pub struct Buffer<T> {
    device: DeviceHandle,
    address: u64,
    len: usize,
    /// Not where it is a part of another buffer, see [`View`].
    owned: bool,
    element: PhantomData<T>,
}

/// A part of another buffer as a buffer of its own, for as long as that one is borrowed.
pub(crate) struct View<'a, T> {
    part: Buffer<T>,
    whole: PhantomData<&'a ()>,
}

impl<T> Deref for View<'_, T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        &self.part
    }
}

impl<T: Element> Buffer<T> {
    /// Uninitialised memory.
    pub fn new(device: &DeviceHandle, len: usize) -> Result<Self> {
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or_else(|| Error::argument("len", len, "a size in bytes below 2^64"))?;
        let address = device.allocate(bytes)?;
        Ok(Buffer { device: device.clone(), address, len, owned: true, element: PhantomData })
    }

    /// A copy of `data`.
    pub fn from_slice(device: &DeviceHandle, data: &[T]) -> Result<Self> {
        let buffer = Self::new(device, data.len())?;
        device.upload(buffer.address, bytemuck::cast_slice(data))?;
        Ok(buffer)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that owns it.
    pub fn device(&self) -> &DeviceHandle {
        &self.device
    }

    /// `Err` naming the buffer as `name` unless it belongs to `device` and has at least `needed` elements.
    pub(crate) fn check(&self, name: &'static str, device: &DeviceHandle, needed: usize) -> Result<()> {
        if !std::ptr::addr_eq(Arc::as_ptr(&self.device), Arc::as_ptr(device)) {
            let given = format!("on {}", self.device.properties().name);
            let needed = format!("a buffer of the layer's own device handle, {}", device.properties().name);
            return Err(Error::argument(name, given, needed));
        }
        check_at_least(name, self.len, needed)
    }

    /// As [`Buffer::check`] for exactly `needed` elements.
    pub(crate) fn check_exact(&self, name: &'static str, device: &DeviceHandle, needed: usize) -> Result<()> {
        self.check(name, device, needed)?;
        check_len(name, self.len, needed)
    }

    /// Overwrites the first `data.len()` elements.
    pub fn upload(&self, data: &[T]) -> Result<()> {
        if data.len() > self.len {
            return Err(Error::argument("data", format!("{} elements", data.len()), format!("at most {}", self.len)));
        }
        self.device.upload(self.address, bytemuck::cast_slice(data))
    }

    /// All elements, after everything launched before.
    pub fn download(&self) -> Result<Vec<T>> {
        let mut data = vec![T::zeroed(); self.len];
        self.device.download(self.address, bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) -> Result<()> {
        self.device.fill(self.address, byte, self.len * size_of::<T>())
    }

    /// As a kernel argument to read.
    pub fn as_ref(&self) -> DeviceRef<'_, T> {
        // SAFETY: the allocation is this long and lives as long as the borrow.
        unsafe { DeviceRef::new(self.address, self.len) }
    }

    /// As a kernel argument to write. Device memory is shared by nature: launches on one stream run in order.
    pub fn as_mut(&self) -> DeviceMut<'_, T> {
        // SAFETY: as above.
        unsafe { DeviceMut::new(self.address, self.len) }
    }

    /// `len` elements of type `U` from byte `offset` on, as a kernel argument.
    pub(crate) fn part<U: Element>(&self, offset: usize, len: usize) -> DeviceMut<'_, U> {
        let address = self.part_address::<U>(offset, len);
        // SAFETY: inside the allocation, which lives as long as the borrow.
        unsafe { DeviceMut::new(address, len) }
    }

    /// `len` elements of type `U` from byte `offset` on, as a buffer.
    pub(crate) fn view<U: Element>(&self, offset: usize, len: usize) -> View<'_, U> {
        let address = self.part_address::<U>(offset, len);
        let part = Buffer { device: self.device.clone(), address, len, owned: false, element: PhantomData };
        View { part, whole: PhantomData }
    }

    fn part_address<U: Element>(&self, offset: usize, len: usize) -> u64 {
        let end = offset + len * size_of::<U>();
        assert!(end <= self.len * size_of::<T>() && offset.is_multiple_of(align_of::<U>()), "part outside its buffer");
        self.address + offset as u64
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.owned {
            self.device.free(self.address);
        }
    }
}
