//! The SIMT emulator: runs a kernel's own Rust code on the CPU and reports what a GPU would let pass silently.
//!
//! [`Device`] holds memory under addresses like a GPU's. A [`Launch`] runs each lane of a block as a coroutine; blocks run
//! in parallel on rayon (in turn where the launch itself runs on a thread of the pool), one at a time on an
//! operating-system thread. Warp operations and barriers are meetings: an
//! operation is done when all have come. `seed` decides the order in which lanes and blocks run.
//!
//! ```
//! use cuda_std::emu::{Device, FaultKind, Launch};
//! use cuda_std::kernel::Family;
//! use cuda_std::memory::{In, Out};
//! use cuda_std::{arch::ArchId, kernels, thread};
//!
//! fn body(x: In<f32>, y: Out<f32>, n: u32) {
//!     let i = thread::block_idx() * thread::block_dim() + thread::thread_idx();
//!     if i < n {
//!         y.store(i as usize, 2.0 * x.load(i as usize));
//!     }
//! }
//!
//! kernels! {
//!     /// Doubles.
//!     pub mod double(x: In<f32>, y: Out<f32>, n: u32);
//!     double_f32[128, 1] = |_A| body;
//! }
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let device = Device::new();
//!     let x = device.upload(&[1.0f32; 300]);
//!     let mut y = device.alloc(300 * 4);
//!     let kernel = double::double_f32;
//!     let launch =
//!         Launch { device: &device, grid: 3, threads: kernel.threads, shared_bytes: 0, arch: ArchId::Sm90, seed: 7 };
//!     let args = double::Args { x: x.as_ref(), y: y.as_mut(), n: 300 };
//!     (kernel.emulate)(&launch, double::Family::pack(args).as_slice())?;
//!     assert_eq!(y.download::<f32>()?, [2.0; 300]);
//!
//!     // One element too many: block 2, thread 44.
//!     let args = double::Args { x: x.as_ref(), y: y.as_mut(), n: 301 };
//!     let fault = (kernel.emulate)(&launch, double::Family::pack(args).as_slice()).unwrap_err();
//!     assert_eq!(fault.kind, FaultKind::OutOfBounds);
//!     let party = fault.party.as_ref().unwrap();
//!     assert_eq!((party.block, party.thread), (2, 44));
//!     Ok(())
//! }
//! ```
//!
//! # What is reported
//! A [`Fault`] names kernel, block, thread and source line, and the other thread where there is one.
//!
//! | fault | found |
//! |---|---|
//! | [`FaultKind::OutOfBounds`] | beyond a buffer's own length (also of a part of an allocation), a view of shared memory, shared memory itself; a buffer that was not passed |
//! | [`FaultKind::Misaligned`] | vector accesses and asynchronous copies, buffers whose address does not suit their element |
//! | [`FaultKind::Uninitialised`] | reads of bytes that nobody wrote, in shared and global memory, byte by byte |
//! | [`FaultKind::Race`] | see below |
//! | [`FaultKind::PendingCopy`] | any access to bytes on which an asynchronous copy is in flight |
//! | [`FaultKind::StreamOfWritable`] | [`crate::memory::In::stream_v4`] of bytes that the launch has as an output too |
//! | [`FaultKind::DivergentWarp`] | lanes of a warp at different operations or lines, or finished while others wait |
//! | [`FaultKind::DivergentBarrier`] | threads at different barriers (`sync_threads`: also at different lines), part of a warp at one, threads that finished, a barrier that can never be complete |
//! | [`FaultKind::EarlyAccess`] | in an early kernel before a thread's wait ([`crate::dependent`]): writes, and reads of what a launch writes that may still run |
//! | [`FaultKind::MissingWait`] | a thread of an early kernel that ends without having waited |
//! | [`FaultKind::Hang`] | a block that used up its budget of operations ([`Device::set_operation_budget`]) |
//! | [`FaultKind::Panic`] | the kernel's own panic, arithmetic overflow included where overflow checks are on |
//! | [`FaultKind::InvalidArgument`] | barrier ids and counts, sizes of copies, launch dimensions |
//!
//! **Races** are judged by what orders accesses, not by what happened to be first, so any schedule that makes both accesses
//! shows one. Two accesses to a byte, one of them a write, are ordered if the same lane makes them, or if a barrier that both
//! warps took part in lies between, or, within a warp, a [`crate::sync::sync_warp`]. Shuffles, votes, matches, reductions,
//! `mma`, `ldmatrix` and [`crate::sync::converge`] order no memory. Blocks are never ordered. Atomics do not race with each
//! other; with other accesses they do. Global memory is watched where the launch has it as an output, inputs that overlap
//! with it included.
//!
//! **Asynchronous copies** are made at the latest moment that the program allows: at the issuing lane's wait for their group,
//! where the source is read and the destination written. Until then the destination may not be touched. After it the write
//! counts as made by the issuing lane, so that other lanes need a barrier on top. For races it also counts when issued.
//!
//! # What is not
//! - Only the accesses that a run makes are judged: a branch that is not taken is not seen.
//! - One launch at a time: launches are not checked against each other or against host copies, except for what early
//!   kernels do before their wait. An output that overlaps
//!   with another is checked as one memory.
//! - Lanes that meet at the same line in different iterations of a loop are taken for lanes that agree, as on a GPU.
//! - A source of an asynchronous copy that is written between issue and wait, with barriers around the write, gives the new
//!   bytes instead of a fault.
//! - An `ldmatrix` reads each word for the lane that receives it: a lane that itself wrote the word is taken as ordered.
//! - After two blocks have read a word, further readers are not remembered. That hides no race, only who else takes part.
//! - A loop that calls nothing of this crate runs for ever, and a lane that needs more than 128 KiB of stack ends the process.
//! - A block that waits for one that has not begun hangs, which a GPU does not promise to avoid either.
//! - Weak ordering, bank conflicts, registers, occupancy and everything the compiler does for the GPU.
//!
//! # Bits
//! Conversions, `min`/`max`, `fma` and `mma` give the bits of an H200; for `mma` on every architecture. f32 arithmetic in a
//! kernel is the host's, which differs in the bits of NaN alone: storing an f32 turns every NaN into 0x7FFFFFFF, as the GPU's
//! instructions give it. Bits that a kernel takes from an f32 by `to_bits` are left as they are.
//!
//! A kernel's panic is caught by a panic hook, which this module installs at the first launch; it hands on all other panics.

mod block;
mod convert;
mod device;
mod fault;
mod launch;
mod shadow;
mod tensor;

pub use convert::{
    duplicate_high, duplicate_low, e2m1x2_to_f16x2, e4m3x2_to_f16x2, f16_to_f32, f32_to_bf16, f32_to_f16,
    f32x2_to_bf16x2, f32x2_to_e4m3x2, fma, max_nan, min_nan, mul_bf16x2, mul_f16x2, permute_bytes, select_bits, sqrt,
};
pub use device::{Allocation, Device, MemoryError};
pub use fault::{Fault, FaultKind, Party, Report, Source};
pub use launch::{Launch, run};

use block::{At, Block, Meet, meet, operation};
use device::Storage;
use shadow::Kind;
use std::marker::PhantomData;
use std::panic::Location;

/// Index of the running thread in its block.
#[inline]
#[track_caller]
pub fn thread_idx() -> u32 {
    block::current().current
}

/// Threads of a block.
#[inline]
#[track_caller]
pub fn block_dim() -> u32 {
    block::current().threads
}

/// Index of the running block.
#[inline]
#[track_caller]
pub fn block_idx() -> u32 {
    block::current().index
}

/// Blocks of the grid.
#[inline]
#[track_caller]
pub fn grid_dim() -> u32 {
    block::current().grid
}

/// Barrier of the block.
#[track_caller]
pub fn sync_threads() {
    meet(Meet::SyncThreads, Location::caller(), &[]);
}

/// Barrier `id` of `threads` threads.
#[track_caller]
pub fn sync_named(id: u32, threads: u32) {
    let at = Location::caller();
    let block = block::current();
    if !(1..16).contains(&id) || threads == 0 || !threads.is_multiple_of(32) || threads > block.threads {
        let message = format!("sync_named({id}, {threads}): ids are 1 to 15, threads whole warps of {}", block.threads);
        block.raise(FaultKind::InvalidArgument, at, None, message);
    }
    meet(Meet::SyncNamed { id, threads }, at, &[]);
}

/// Barrier of the warp.
#[track_caller]
pub fn sync_warp() {
    meet(Meet::SyncWarp, Location::caller(), &[]);
}

/// The convergence guard: lanes meet, but memory is not ordered.
#[track_caller]
pub fn converge() {
    meet(Meet::Converge, Location::caller(), &[]);
}

/// Waits for the launches ahead.
#[track_caller]
pub fn dependency_wait() {
    operation(Location::caller()).dependency_wait();
}

/// Lets the next launch start.
#[track_caller]
pub fn launch_dependents() {
    let at = Location::caller();
    operation(at).launch_dependents(at);
}

macro_rules! warp_operations {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),+) = $meet:ident;)+) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $name($($arg: u32),+) -> u32 {
            meet(Meet::$meet, Location::caller(), &[$($arg),+])[0]
        }
    )+};
}
warp_operations! {
    /// The value of lane `lane` mod 32.
    shfl_idx(value, lane) = ShflIdx;
    /// The value of this lane xor `mask`.
    shfl_bfly(value, mask) = ShflBfly;
    /// The value of this lane plus `delta`, or the own.
    shfl_down(value, delta) = ShflDown;
    /// The value of this lane minus `delta`, or the own.
    shfl_up(value, delta) = ShflUp;
    /// The lanes that hold the same value.
    match_any(value) = MatchAny;
    /// Sum over the warp.
    redux_add(value) = ReduxAdd;
    /// Largest value of the warp.
    redux_max(value) = ReduxMax;
    /// Smallest value of the warp.
    redux_min(value) = ReduxMin;
}

/// The lanes whose predicate holds.
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    meet(Meet::Ballot, Location::caller(), &[u32::from(predicate)])[0]
}

/// Four 8x8 matrices from shared memory.
#[track_caller]
pub fn ldmatrix_x4(offset: u32) -> [u32; 4] {
    let at = Location::caller();
    block::current().check_shared(offset, 16, at);
    meet(Meet::Ldmatrix, at, &[offset])
}

macro_rules! mma {
    ($($(#[$doc:meta])* $name:ident = $meet:ident;)+) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $name(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
            let [c0, c1, c2, c3] = c.map(f32::to_bits);
            let input = [a[0], a[1], a[2], a[3], b[0], b[1], c0, c1, c2, c3];
            meet(Meet::$meet, Location::caller(), &input).map(f32::from_bits)
        }
    )+};
}
mma! {
    /// D = A·B + C, bf16 operands.
    mma_m16n8k16_bf16 = MmaBf16;
    /// D = A·B + C, f16 operands.
    mma_m16n8k16_f16 = MmaF16;
}

/// Elements that can cross between registers and memory.
pub trait RawElement: Copy {
    #[doc(hidden)]
    fn from_bytes(bytes: &[u8]) -> Self;
    #[doc(hidden)]
    fn read(access: impl Access) -> Self;
    #[doc(hidden)]
    fn write(self, access: impl Access);
}

/// One access, of a size that its element chooses.
#[doc(hidden)]
pub trait Access {
    fn read<const N: usize>(self) -> [u8; N];
    fn write<const N: usize>(self, value: [u8; N]);
}

macro_rules! elements {
    ($($t:ty, $stored:expr;)+) => {$(
        impl RawElement for $t {
            fn from_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("an element's bytes"))
            }
            #[inline(always)]
            fn read(access: impl Access) -> Self {
                Self::from_le_bytes(access.read())
            }
            #[inline(always)]
            fn write(self, access: impl Access) {
                access.write(($stored)(self).to_le_bytes())
            }
        }
    )+};
}
elements! {
    u8, |value| value;
    u16, |value| value;
    u32, |value| value;
    u64, |value| value;
    i32, |value| value;
    // Instructions give one NaN; the host's give several.
    f32, |value: f32| if value.is_nan() { f32::from_bits(convert::NAN) } else { value };
}

/// Checks that `elements` elements from `index` on are inside a view of `len`.
#[inline]
#[track_caller]
pub fn check_view(index: u32, elements: u32, len: u32) {
    if u64::from(index) + u64::from(elements) > u64::from(len) {
        let message = format!("element {index} and the {elements} from it on, in a view of {len} elements");
        block::current().raise(FaultKind::OutOfBounds, Location::caller(), None, message);
    }
}

struct SharedAccess {
    offset: u32,
    at: At,
}

impl Access for SharedAccess {
    #[inline(always)]
    fn read<const N: usize>(self) -> [u8; N] {
        operation(self.at).load_shared(self.offset, self.at)
    }
    #[inline(always)]
    fn write<const N: usize>(self, value: [u8; N]) {
        operation(self.at).store_shared(self.offset, value, self.at);
    }
}

/// Loads an element of shared memory.
#[inline]
#[track_caller]
pub fn load_shared<T: RawElement>(offset: u32) -> T {
    T::read(SharedAccess { offset, at: Location::caller() })
}

/// Stores an element of shared memory.
#[inline]
#[track_caller]
pub fn store_shared<T: RawElement>(offset: u32, value: T) {
    value.write(SharedAccess { offset, at: Location::caller() });
}

/// Loads 16 bytes of shared memory.
#[inline]
#[track_caller]
pub fn load_shared_v4(offset: u32) -> [u32; 4] {
    words(SharedAccess { offset, at: Location::caller() }.read())
}

/// Loads 8 bytes of shared memory.
#[inline]
#[track_caller]
pub fn load_shared_v2(offset: u32) -> [u32; 2] {
    let value = u64::from_le_bytes(SharedAccess { offset, at: Location::caller() }.read());
    [value as u32, (value >> 32) as u32]
}

/// Stores 16 bytes of shared memory.
#[inline]
#[track_caller]
pub fn store_shared_v4(offset: u32, value: [u32; 4]) {
    SharedAccess { offset, at: Location::caller() }.write(bytes(value));
}

#[inline(always)]
fn words(bytes: [u8; 16]) -> [u32; 4] {
    std::array::from_fn(|i| u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]))
}

#[inline(always)]
fn bytes(words: [u32; 4]) -> [u8; 16] {
    std::array::from_fn(|i| words[i / 4].to_le_bytes()[i % 4])
}

/// A range of an allocation, as a kernel argument.
#[derive(Clone, Copy)]
struct Buffer {
    /// Null for no buffer.
    storage: *const Storage,
    offset: usize,
    bytes: usize,
}

// SAFETY: a shared reference to a `Storage`, which is `Sync`; `DeviceRef::new` and `DeviceMut::new` have their caller
// promise that it outlives the launch.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    const NONE: Buffer = Buffer { storage: std::ptr::null(), offset: 0, bytes: 0 };

    #[inline(always)]
    fn storage(&self) -> Option<&Storage> {
        // SAFETY: null, or alive while the launch runs (see `Sync`).
        unsafe { self.storage.as_ref() }
    }

    /// The allocation, and the offset in it of `len` bytes at element `index` of `size` bytes.
    #[inline(always)]
    fn locate(&self, block: &mut Block, index: usize, size: usize, len: usize, at: At) -> (&Storage, usize) {
        let elements = self.bytes / size;
        let Some(storage) = self.storage().filter(|_| index < elements && self.bytes - index * size >= len) else {
            self.outside(block, index, size, len, at)
        };
        let offset = self.offset + index * size;
        if !offset.is_multiple_of(len) {
            let address = storage.address + offset as u64;
            let message = format!("{len} bytes at element {index}, device address {address:#x}");
            block.raise(FaultKind::Misaligned, at, None, message);
        }
        (storage, offset)
    }

    #[cold]
    fn outside(&self, block: &mut Block, index: usize, size: usize, len: usize, at: At) -> ! {
        let message = if self.storage.is_null() {
            format!("element {index} of a buffer that was not passed")
        } else {
            format!("{len} bytes at element {index} of a buffer of {} elements", self.bytes / size)
        };
        block.raise(FaultKind::OutOfBounds, at, None, message)
    }
}

struct GlobalAccess<'a> {
    buffer: &'a Buffer,
    index: usize,
    size: usize,
    at: At,
}

impl Access for GlobalAccess<'_> {
    #[inline(always)]
    fn read<const N: usize>(self) -> [u8; N] {
        let block = operation(self.at);
        let (storage, offset) = self.buffer.locate(block, self.index, self.size, N, self.at);
        // SAFETY: `global` passes a pointer to N bytes, locked if others may write them.
        let read = |from: *mut u8| unsafe { from.cast::<[u8; N]>().read() };
        block.global(storage, offset, N, Kind::Read, self.at, read)
    }
    #[inline(always)]
    fn write<const N: usize>(self, value: [u8; N]) {
        let block = operation(self.at);
        let (storage, offset) = self.buffer.locate(block, self.index, self.size, N, self.at);
        // SAFETY: `global` passes a pointer to N bytes, locked since others may access them.
        let write = |to: *mut u8| unsafe { to.cast::<[u8; N]>().write(value) };
        block.global(storage, offset, N, Kind::Write, self.at, write);
    }
}

/// A buffer that a kernel reads.
pub struct RawIn<T> {
    buffer: Buffer,
    element: PhantomData<fn() -> T>,
}

/// A buffer that a kernel writes.
pub struct RawOut<T> {
    buffer: Buffer,
    element: PhantomData<fn(T) -> T>,
}

impl<T> Clone for RawIn<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RawIn<T> {}
impl<T> Clone for RawOut<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RawOut<T> {}

macro_rules! loads {
    ($name:ident) => {
        /// Whether no buffer was passed.
        pub fn is_null(self) -> bool {
            self.buffer.storage.is_null()
        }

        /// Element `index`.
        #[inline]
        #[track_caller]
        pub fn load(self, index: usize) -> T {
            T::read(self.access(index, Location::caller()))
        }

        #[inline(always)]
        fn access(&self, index: usize, at: At) -> GlobalAccess<'_> {
            GlobalAccess { buffer: &self.buffer, index, size: size_of::<T>(), at }
        }
    };
}

impl<T: RawElement> RawIn<T> {
    loads!(RawIn);

    /// The `len` elements at a device address, all of which must lie in one allocation.
    #[track_caller]
    pub fn at(address: u64, len: usize) -> Self {
        let at = Location::caller();
        let block = operation(at);
        let buffer = if address == 0 { Buffer::NONE } else { block.find(address, len, size_of::<T>(), at) };
        RawIn { buffer, element: PhantomData }
    }

    /// The buffer from element `elements` on, which may be its end.
    #[track_caller]
    pub fn skip(self, elements: usize) -> Self {
        let Buffer { storage, offset, bytes } = self.buffer;
        let skipped = elements.saturating_mul(size_of::<T>()).min(bytes);
        let buffer = Buffer { storage, offset: offset + skipped, bytes: bytes - skipped };
        RawIn { buffer, element: PhantomData }
    }

    /// 16 bytes at element `index`.
    #[inline]
    #[track_caller]
    pub fn load_v4(self, index: usize) -> [u32; 4] {
        words(self.access(index, Location::caller()).read())
    }

    /// As `load_v4`.
    #[inline]
    #[track_caller]
    pub fn fetch_v4(self, index: usize) -> [u32; 4] {
        self.load_v4(index)
    }

    /// Element `index`, which nobody writes during the launch.
    #[inline]
    #[track_caller]
    pub fn stream(self, index: usize) -> T {
        self.check_constant(index);
        self.load(index)
    }

    /// 16 bytes at element `index`, which nobody writes during the launch.
    #[inline]
    #[track_caller]
    pub fn stream_v4(self, index: usize) -> [u32; 4] {
        self.check_constant(index);
        self.load_v4(index)
    }

    #[inline]
    #[track_caller]
    fn check_constant(self, index: usize) {
        let block = block::current();
        if let Some(storage) = self.buffer.storage().filter(|_| index < self.buffer.bytes / size_of::<T>()) {
            let address = storage.address + (self.buffer.offset + index * size_of::<T>()) as u64;
            if block.may_write(address) {
                let message = format!("element {index}, device address {address:#x}, which the launch may write");
                block.raise(FaultKind::StreamOfWritable, Location::caller(), None, message);
            }
        }
    }
}

impl<T: RawElement> RawOut<T> {
    loads!(RawOut);

    /// Writes element `index`.
    #[inline]
    #[track_caller]
    pub fn store(self, index: usize, value: T) {
        value.write(self.access(index, Location::caller()));
    }

    /// Writes 16 bytes at element `index`.
    #[inline]
    #[track_caller]
    pub fn store_v4(self, index: usize, value: [u32; 4]) {
        self.access(index, Location::caller()).write(bytes(value));
    }

    /// Writes 8 bytes at element `index`.
    #[inline]
    #[track_caller]
    pub fn store_v2(self, index: usize, value: [u32; 2]) {
        let value = u64::from(value[0]) | u64::from(value[1]) << 32;
        self.access(index, Location::caller()).write(value.to_le_bytes());
    }

    /// Writes 4 bytes at element `index`.
    #[inline]
    #[track_caller]
    pub fn store_word(self, index: usize, value: u32) {
        self.access(index, Location::caller()).write(value.to_le_bytes());
    }
}

impl RawOut<u32> {
    /// Ors bits into element `index` atomically.
    #[track_caller]
    pub fn atomic_or(self, index: usize, bits: u32) {
        let at = Location::caller();
        let block = operation(at);
        let (storage, offset) = self.buffer.locate(block, index, 4, 4, at);
        // SAFETY: `global` passes a pointer to 4 aligned bytes, locked since others may access them.
        let or = |word: *mut u8| unsafe { *word.cast::<u32>() |= bits };
        block.global(storage, offset, 4, Kind::Atomic, at, or);
    }
}

fn cp_async<T>(to: u32, size: u32, from: RawIn<T>, index: usize, bytes: u32, at: At) {
    let block = operation(at);
    if bytes > size {
        let message = format!("an asynchronous copy of {bytes} of {size} bytes");
        block.raise(FaultKind::InvalidArgument, at, None, message);
    }
    let element = size_of::<T>();
    if let Some(storage) = from.buffer.storage() {
        // The address of a copy that reads nothing may lie anywhere, but not misaligned.
        let address =
            (storage.address + from.buffer.offset as u64).wrapping_add((index as u64).wrapping_mul(element as u64));
        if !address.is_multiple_of(u64::from(size)) {
            let message =
                format!("an asynchronous copy of {size} bytes from element {index}, device address {address:#x}");
            block.raise(FaultKind::Misaligned, at, None, message);
        }
    }
    let source = (bytes > 0).then(|| {
        let inside = index < from.buffer.bytes / element && from.buffer.bytes - index * element >= bytes as usize;
        let Some(storage) = from.buffer.storage().filter(|_| inside) else {
            from.buffer.outside(block, index, element, bytes as usize, at)
        };
        (storage, from.buffer.offset + index * element)
    });
    block.copy(to, size, source, bytes, at);
}

macro_rules! copies {
    ($($name:ident, $size:literal;)+) => {$(
        /// Issues an asynchronous copy of `bytes` bytes, filled up with zeros.
        #[track_caller]
        pub fn $name<T>(to: u32, from: RawIn<T>, index: usize, bytes: u32) {
            cp_async(to, $size, from, index, bytes, Location::caller());
        }
    )+};
}
copies! {
    cp_async16, 16;
    cp_async8, 8;
    cp_async4, 4;
}

/// Closes a group of asynchronous copies.
#[track_caller]
pub fn cp_async_commit() {
    operation(Location::caller()).commit();
}

/// Waits until at most `PENDING` groups are in flight.
#[track_caller]
pub fn cp_async_wait<const PENDING: u32>() {
    operation(Location::caller()).wait(PENDING);
}
