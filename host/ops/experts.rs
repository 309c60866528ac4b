//! Tables of device addresses, one entry an expert.

use crate::device::{Buffer, DeviceHandle, Element};
use crate::error::{Error, Result};
use cuda_std::kernel::DeviceRef;
use std::sync::Arc;

/// One buffer of equal length for each expert that is resident on the device, by address. Kernels read the addresses, so that
/// weights may lie anywhere; an expert that is not resident has address 0.
#[derive(Debug)]
pub struct ExpertTable<T> {
    addresses: Buffer<u64>,
    resident: Vec<bool>,
    len: usize,
    /// Keeps what the addresses name alive.
    _buffers: Vec<Option<Arc<Buffer<T>>>>,
}

impl<T: Element> ExpertTable<T> {
    /// A table of `buffers`, each of exactly `len` elements on `device`. Errors name the table as `name`.
    pub fn new(
        name: &'static str,
        device: &DeviceHandle,
        len: usize,
        buffers: Vec<Option<Arc<Buffer<T>>>>,
    ) -> Result<Self> {
        for buffer in buffers.iter().flatten() {
            buffer.check_exact(name, device, len)?;
        }
        let addresses: Vec<u64> =
            buffers.iter().map(|buffer| buffer.as_ref().map_or(0, |buffer| buffer.address())).collect();
        Self::with_addresses(device, len, addresses, buffers)
    }

    /// A table over one buffer that holds the experts one after the other.
    pub fn split(name: &'static str, buffer: Arc<Buffer<T>>, experts: usize) -> Result<Self> {
        if experts == 0 || !buffer.len().is_multiple_of(experts) {
            let needed = format!("equal parts for {experts} experts");
            return Err(Error::argument(name, format!("{} elements", buffer.len()), needed));
        }
        let len = buffer.len() / experts;
        let addresses = (0..experts).map(|expert| buffer.address() + (expert * len * size_of::<T>()) as u64).collect();
        let device = buffer.device().clone();
        Self::with_addresses(&device, len, addresses, vec![Some(buffer)])
    }

    /// A table of experts of `len` elements each that lie one after the other; those that are not resident are left out of
    /// `buffer`, which has room for exactly the others.
    pub(crate) fn packed(buffer: Arc<Buffer<T>>, len: usize, resident: &[bool]) -> Result<Self> {
        let device = buffer.device().clone();
        let mut address = buffer.address();
        let mut next = |here: &bool| {
            let this = if *here { address } else { 0 };
            address += if *here { (len * size_of::<T>()) as u64 } else { 0 };
            this
        };
        let addresses = resident.iter().map(&mut next).collect();
        Self::with_addresses(&device, len, addresses, vec![Some(buffer)])
    }

    fn with_addresses(
        device: &DeviceHandle,
        len: usize,
        addresses: Vec<u64>,
        buffers: Vec<Option<Arc<Buffer<T>>>>,
    ) -> Result<Self> {
        let resident = addresses.iter().map(|&address| address != 0).collect();
        Ok(ExpertTable { addresses: Buffer::from_slice(device, &addresses)?, resident, len, _buffers: buffers })
    }

    /// Number of experts E.
    pub fn experts(&self) -> usize {
        self.resident.len()
    }

    /// Elements of each expert.
    pub fn elements(&self) -> usize {
        self.len
    }

    /// Which experts are resident.
    pub fn resident(&self) -> &[bool] {
        &self.resident
    }

    /// `Err` naming the table as `name` unless it is of `device`, has `experts` entries and `len` elements an expert.
    pub(crate) fn check(&self, name: &'static str, device: &DeviceHandle, experts: usize, len: usize) -> Result<()> {
        self.addresses.check(name, device, 0)?;
        if self.experts() != experts {
            return Err(Error::argument(name, format!("{} experts", self.experts()), format!("{experts} experts")));
        }
        if self.len != len {
            let needed = format!("{len} elements an expert");
            return Err(Error::argument(name, format!("{} elements an expert", self.len), needed));
        }
        Ok(())
    }

    /// The addresses as a kernel argument.
    pub(crate) fn as_ref(&self) -> DeviceRef<'_, u64> {
        self.addresses.as_ref()
    }
}

/// The addresses of a table, whatever its experts are made of.
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a>(&'a Buffer<u64>);

impl<'a, T> From<&'a ExpertTable<T>> for Addresses<'a> {
    fn from(table: &'a ExpertTable<T>) -> Self {
        Addresses(&table.addresses)
    }
}

/// One address an expert, 0 where there is none.
impl<'a> From<&'a Buffer<u64>> for Addresses<'a> {
    fn from(addresses: &'a Buffer<u64>) -> Self {
        Addresses(addresses)
    }
}

impl<'a> Addresses<'a> {
    /// As a kernel argument, null where there is no table. `Err` naming the table as `name` unless it has `experts` entries.
    pub(crate) fn of(
        table: Option<Self>,
        name: &'static str,
        device: &DeviceHandle,
        experts: usize,
    ) -> Result<DeviceRef<'a, u64>> {
        let Some(Addresses(addresses)) = table else {
            return Ok(DeviceRef::null());
        };
        addresses.check_exact(name, device, experts)?;
        Ok(addresses.as_ref())
    }
}
