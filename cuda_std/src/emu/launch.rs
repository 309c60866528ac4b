//! Launches on the emulator.

use super::block::{self, Job};
use super::device::{Device, Running, Storage};
use super::fault::{Fault, FaultKind};
use super::{Buffer, RawElement, RawIn, RawOut};
use crate::arch::ArchId;
use crate::kernel::Packed;
use rayon::prelude::*;
use std::marker::PhantomData;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Most threads of a block.
const MAX_THREADS: u32 = 1024;
/// Most dynamic shared memory of a block: 227 KiB, as on an H200.
const MAX_SHARED: u32 = 232_448;
/// Most blocks in x.
const MAX_GRID: u32 = 0x7FFF_FFFF;

/// One launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Whose memory the kernel uses.
    pub device: &'a Device,
    /// Number of blocks, at least 1.
    pub grid: u32,
    /// Threads of a block: whole warps, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Whose instruction paths the kernel takes.
    pub arch: ArchId,
    /// Decides the order in which lanes and blocks run.
    pub seed: u64,
}

impl Launch<'_> {
    /// The buffer that `packed` names.
    pub fn resolve_in<T: RawElement>(&self, packed: Packed) -> Result<RawIn<T>, Fault> {
        Ok(RawIn { buffer: self.resolve(packed)?, element: PhantomData })
    }

    /// The buffer that `packed` names, for writing.
    pub fn resolve_out<T: RawElement>(&self, packed: Packed) -> Result<RawOut<T>, Fault> {
        Ok(RawOut { buffer: self.resolve(packed)?, element: PhantomData })
    }

    fn resolve(&self, packed: Packed) -> Result<Buffer, Fault> {
        let Packed::Pointer { address, len, element, .. } = packed else {
            return Err(Fault::launch(FaultKind::InvalidArgument, "", "a scalar where a buffer belongs".to_owned()));
        };
        if address == 0 {
            return Ok(Buffer::NONE);
        }
        if !address.is_multiple_of(element as u64) {
            let message = format!("device address {address:#x} is no multiple of the element size {element}");
            return Err(Fault::launch(FaultKind::Misaligned, "", message));
        }
        let bytes = len.checked_mul(element).ok_or_else(|| {
            let message = format!("a buffer of {len} elements of {element} bytes");
            Fault::launch(FaultKind::InvalidArgument, "", message)
        })?;
        let (storage, offset) = match self.device.find(address, bytes) {
            Ok(found) => found,
            // Nothing can be accessed through it, so it need not lie anywhere.
            Err(_) if bytes == 0 => {
                return Ok(Buffer { storage: &raw const **EMPTY, offset: 0, bytes: 0 });
            }
            Err(error) => return Err(Fault::launch(FaultKind::OutOfBounds, "", error.to_string())),
        };
        // The caller of `DeviceRef::new` or `DeviceMut::new` promised that the allocation outlives the launch.
        Ok(Buffer { storage: &raw const *storage, offset, bytes })
    }
}

/// What empty buffers that lie nowhere point to.
static EMPTY: std::sync::LazyLock<Box<Storage>> = std::sync::LazyLock::new(|| Box::new(Storage::new(0, 0)));

/// Runs `body` once for each thread of the launch. `args` are the arguments that `body` was made from: what they name as
/// writable is watched for races. An `early` launch may start while those ahead of it still run.
pub fn run(
    launch: &Launch<'_>,
    args: &[Packed],
    name: &'static str,
    early: bool,
    body: &(dyn Fn() + Sync),
) -> Result<(), Fault> {
    let invalid = |message| Err(Fault::launch(FaultKind::InvalidArgument, name, message));
    if launch.grid == 0 || launch.grid > MAX_GRID {
        return invalid(format!("a grid of {} blocks; 1 to {MAX_GRID} are possible", launch.grid));
    }
    if launch.threads == 0 || launch.threads > MAX_THREADS || !launch.threads.is_multiple_of(32) {
        return invalid(format!("{} threads a block; whole warps, 32 to {MAX_THREADS}, are possible", launch.threads));
    }
    if launch.shared_bytes > MAX_SHARED {
        return invalid(format!("{} bytes of shared memory; {MAX_SHARED} are possible", launch.shared_bytes));
    }
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    let id = LAUNCHES.fetch_add(1, Relaxed);
    let mut writable = Vec::new();
    for arg in args {
        if let Packed::Pointer { address, len, element, writable: true } = *arg
            && let Some(bytes) = len.checked_mul(element)
            && let Ok((storage, offset)) = launch.device.find(address, bytes)
            && bytes > 0
        {
            storage.track(offset, bytes, id);
            writable.push(address..address + bytes as u64);
        }
    }

    let mut running = if early { launch.device.running() } else { Vec::new() };
    let hasty = Mutex::new(None);
    let stop = AtomicBool::new(false);
    let first: Mutex<Option<(u32, Fault)>> = Mutex::new(None);
    let job = Job {
        id,
        device: launch.device,
        kernel: name,
        grid: launch.grid,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        seed: launch.seed,
        operations: launch.device.operation_budget(),
        writable: &writable,
        early,
        ahead: &running,
        hasty: &hasty,
        body,
        stop: &stop,
    };
    let order = Order::new(launch.grid, launch.seed);
    let one = |i| {
        if stop.load(Relaxed) {
            return;
        }
        let block = order.at(i);
        if let Err(fault) = block::run(&job, block) {
            stop.store(true, Relaxed);
            let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
            if first.as_ref().is_none_or(|(earlier, _)| block < *earlier) {
                *first = Some((block, fault));
            }
        }
    };
    if rayon::current_thread_index().is_some() {
        // Waiting for a parallel loop, a thread of the pool would take up other work of its pool, perhaps another launch,
        // while its caller holds the device.
        (0..launch.grid).for_each(one);
    } else {
        (0..launch.grid).into_par_iter().for_each(one);
    }
    let fault = first.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, fault)) = fault {
        launch.device.synchronize();
        return Err(fault);
    }
    match hasty.into_inner().unwrap_or_else(PoisonError::into_inner) {
        // The next launch can start as soon as this one has.
        Some(hasty) => running.iter_mut().for_each(|ahead| ahead.because = ahead.because.or(Some(hasty))),
        // The next launch starts when this one has waited for all that were ahead of it.
        None => running.clear(),
    }
    running.push(Running { id, kernel: name, because: None });
    launch.device.set_running(running);
    Ok(())
}

/// A seeded order of the blocks that needs no memory: i -> start + i * step, modulo the grid.
struct Order {
    grid: u64,
    start: u64,
    step: u64,
}

impl Order {
    fn new(grid: u32, seed: u64) -> Self {
        let mut random = block::Random::new(seed, u64::MAX);
        let grid = u64::from(grid);
        let start = random.next() % grid;
        let mut step = random.next() % grid;
        let coprime = |mut a: u64, mut b: u64| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a == 1
        };
        while !coprime(grid, step) {
            step = (step + 1) % grid.max(2);
        }
        Order { grid, start, step }
    }

    fn at(&self, i: u32) -> u32 {
        ((self.start + u64::from(i) * self.step) % self.grid) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::Order;

    #[test]
    fn the_order_of_blocks_is_a_permutation() {
        for grid in (1..200).chain([1000, 4096, 65_537]) {
            for seed in 0..4 {
                let order = Order::new(grid, seed);
                let mut seen = vec![false; grid as usize];
                for i in 0..grid {
                    assert!(!std::mem::replace(&mut seen[order.at(i) as usize], true), "grid {grid} seed {seed}");
                }
            }
        }
    }
}
