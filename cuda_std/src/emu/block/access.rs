//! The accesses of lanes to shared and global memory, and asynchronous copies.

use super::{At, Block, Copy, Unwound, WARP};
use crate::emu::device::{Hasty, PAGE, Running, Storage};
use crate::emu::fault::{FaultKind, Party, Source};
use crate::emu::shadow::{Access, Conflict, Kind, Page, Stamp};
use std::panic::resume_unwind;
use std::sync::{MutexGuard, PoisonError};

impl Block {
    #[inline(always)]
    pub(super) fn shared(&mut self) -> &mut [u8] {
        // SAFETY: any bytes are bytes; the vector holds at least `shared_bytes` of them.
        unsafe { std::slice::from_raw_parts_mut(self.shared.as_mut_ptr().cast(), self.shared_bytes as usize) }
    }

    #[inline(always)]
    fn stamp(&self, thread: u32, block: u32, kind: Kind, at: At) -> Stamp {
        let warp = thread / WARP as u32;
        Stamp {
            at: Some(at),
            block,
            epoch: self.clocks.epoch(warp as usize),
            lanes: 1 << (thread % WARP as u32),
            warp: warp as u8,
            kind,
        }
    }

    /// Checks that `len` bytes of shared memory exist at `offset`, a multiple of `len`.
    #[inline(always)]
    pub fn check_shared(&mut self, offset: u32, len: u32, at: At) {
        if u64::from(offset) + u64::from(len) > u64::from(self.shared_bytes) {
            let message = format!("{len} bytes at {offset} of {} bytes of shared memory", self.shared_bytes);
            self.raise(FaultKind::OutOfBounds, at, None, message);
        }
        if !offset.is_multiple_of(len) {
            let message = format!("{len} bytes at offset {offset} of shared memory");
            self.raise(FaultKind::Misaligned, at, None, message);
        }
    }

    /// `thread` accesses shared memory.
    #[inline(never)]
    pub(super) fn watch_shared(&mut self, thread: u32, offset: u32, len: u32, kind: Kind, at: At) {
        let stamp = self.stamp(thread, 0, kind, at);
        let clock = self.clocks.of(stamp.warp);
        let access = Access { stamp, clock, base: self.base, written_only: true };
        if let Err(conflict) = self.shadow.access(offset as usize..(offset + len) as usize, &access) {
            self.shared_conflict(conflict, &stamp, offset, len);
        }
    }

    #[cold]
    #[inline(never)]
    fn shared_conflict(&mut self, conflict: Conflict, stamp: &Stamp, offset: u32, len: u32) -> ! {
        self.conflict(conflict, stamp, &format!("{len} bytes at offset {offset} of shared memory"));
    }

    /// Reports what speaks against an access, and leaves the running lane.
    #[cold]
    #[inline(never)]
    fn conflict(&mut self, conflict: Conflict, stamp: &Stamp, place: &str) -> ! {
        let verb = |kind| match kind {
            Kind::Read => "reads",
            Kind::Write => "writes",
            Kind::Atomic => "atomically changes",
            Kind::Pending => "asynchronously writes",
        };
        let thread = stamp.thread(0);
        let this = verb(stamp.kind);
        let (kind, other, message) = match conflict {
            Conflict::Unwritten => (FaultKind::Uninitialised, None, format!("{this} {place}, not all of it written")),
            Conflict::Pending(other) => (
                FaultKind::PendingCopy,
                Some(other),
                format!("{this} {place}, where an asynchronous copy is in flight"),
            ),
            Conflict::Race(other) => {
                let missing = if other.block != stamp.block {
                    "nothing orders blocks"
                } else if other.warp == stamp.warp {
                    "no sync_warp or barrier is between"
                } else {
                    "no barrier is between"
                };
                let that = verb(other.kind);
                (FaultKind::Race, Some(other), format!("{this} {place}, which another thread {that}, and {missing}"))
            }
        };
        let other = other.map(|other| Party {
            // Shared memory is stamped with block 0, whichever it is.
            block: if other.block == stamp.block { self.index } else { other.block },
            thread: other.thread(stamp.lanes),
            source: other.at.map(Source::from),
        });
        self.report(kind, thread, stamp.at, other, message);
        resume_unwind(Box::new(Unwound));
    }

    /// Loads from shared memory.
    #[inline(always)]
    pub fn load_shared<const N: usize>(&mut self, offset: u32, at: At) -> [u8; N] {
        self.check_shared(offset, N as u32, at);
        self.watch_shared(self.current, offset, N as u32, Kind::Read, at);
        self.shared()[offset as usize..][..N].try_into().expect("N bytes")
    }

    /// Stores to shared memory.
    #[inline(always)]
    pub fn store_shared<const N: usize>(&mut self, offset: u32, value: [u8; N], at: At) {
        self.check_shared(offset, N as u32, at);
        self.watch_shared(self.current, offset, N as u32, Kind::Write, at);
        self.shared()[offset as usize..][..N].copy_from_slice(&value);
    }

    /// Accesses `len` bytes of a buffer, which exist at `offset` and are at most 16 and aligned: `act` gets a pointer to
    /// them. Where the launch may write the buffer, the bytes are locked meanwhile.
    #[inline(always)]
    pub fn global<R>(
        &mut self,
        storage: &Storage,
        offset: usize,
        len: usize,
        kind: Kind,
        at: At,
        act: impl FnOnce(*mut u8) -> R,
    ) -> R {
        if self.early && !self.lanes[self.current as usize].waited {
            self.before_wait(storage, offset, len, kind, at);
        }
        if kind != Kind::Write && !storage.is_written(offset, len) {
            let stamp = self.stamp(self.current, self.index, kind, at);
            self.global_conflict(Conflict::Unwritten, &stamp, storage, offset, len);
        }
        assert!(offset <= storage.len && len <= storage.len - offset, "callers look at the buffer's bounds");
        // SAFETY: just checked.
        let pointer = unsafe { storage.base().add(offset) };
        if kind == Kind::Read && !storage.is_tracked(offset, self.launch) {
            return act(pointer);
        }
        let _page = self.watch_global(storage, offset, len, kind, at);
        act(pointer)
    }

    /// The running lane accesses bytes that the launch may write. They stay locked until the result is dropped.
    #[inline(never)]
    fn watch_global<'a>(
        &mut self,
        storage: &'a Storage,
        offset: usize,
        len: usize,
        kind: Kind,
        at: At,
    ) -> MutexGuard<'a, Option<Box<Page>>> {
        let stamp = self.stamp(self.current, self.index, kind, at);
        let clock = self.clocks.of(stamp.warp);
        let access = Access { stamp, clock, base: 0, written_only: false };
        let mut guard = storage.page(offset);
        let page = &mut **guard.get_or_insert_with(|| Box::new(Page::new()));
        if page.launch != self.launch {
            // SAFETY: belongs to the launch, which outlives its blocks.
            page.begin(self.launch, unsafe { &*self.ahead });
        }
        let start = offset % PAGE;
        if let Err(conflict) = page.shadow.access(start..start + len, &access) {
            drop(guard);
            self.global_conflict(conflict, &stamp, storage, offset, len);
        }
        if kind == Kind::Write {
            storage.set_written(offset, len);
        }
        guard
    }

    /// The running lane, which has not waited for the launches ahead, accesses bytes.
    #[inline(never)]
    fn before_wait(&mut self, storage: &Storage, offset: usize, len: usize, kind: Kind, at: At) {
        let place = || {
            let address = storage.address + offset as u64;
            format!("{len} bytes at device address {address:#x} (byte {offset} of {})", storage.len)
        };
        if kind != Kind::Read {
            let message = format!("writes {} before its wait: kernels ahead may still use them", place());
            self.raise(FaultKind::EarlyAccess, at, None, message);
        }
        // SAFETY: belongs to the launch, which outlives its blocks.
        let ahead = unsafe { &*self.ahead };
        if ahead.is_empty() {
            return;
        }
        let start = offset % PAGE;
        let written = |running: &Running| {
            let page = storage.page(offset);
            page.as_ref()?.of(running.id)?.written(start..start + len)
        };
        // The last one that writes is the one whose data is missed.
        let Some((running, stamp)) = ahead.iter().rev().find_map(|running| Some((running, written(running)?))) else {
            return;
        };
        let mut message =
            format!("reads {} before its wait, where kernel `{}` writes, which may still run", place(), running.kernel);
        if let Some(Hasty { kernel, block, thread, at }) = running.because {
            message += &format!(
                ", because kernel `{kernel}` after it calls launch_dependents before its own wait (block {block} thread \
                 {thread} at {})",
                Source::from(at)
            );
        }
        let other = Party { block: stamp.block, thread: stamp.thread(0), source: stamp.at.map(Source::from) };
        self.raise(FaultKind::EarlyAccess, at, Some(other), message);
    }

    /// The running lane waits for the launches ahead, all of which have run.
    pub fn dependency_wait(&mut self) {
        self.lanes[self.current as usize].waited = true;
    }

    /// The running lane lets the next launch start.
    pub fn launch_dependents(&mut self, at: At) {
        if self.lanes[self.current as usize].waited {
            return;
        }
        let this = Hasty { kernel: self.kernel, block: self.index, thread: self.current, at };
        // SAFETY: belongs to the launch, which outlives its blocks.
        let mut hasty = unsafe { &*self.hasty }.lock().unwrap_or_else(PoisonError::into_inner);
        if hasty.is_none_or(|first| (this.block, this.thread) < (first.block, first.thread)) {
            *hasty = Some(this);
        }
    }

    #[cold]
    #[inline(never)]
    fn global_conflict(
        &mut self,
        conflict: Conflict,
        stamp: &Stamp,
        storage: &Storage,
        offset: usize,
        len: usize,
    ) -> ! {
        let address = storage.address + offset as u64;
        let place = format!("{len} bytes at device address {address:#x} (byte {offset} of {})", storage.len);
        self.conflict(conflict, stamp, &place)
    }

    /// Whether the launch may write some of the 16 bytes at `address`.
    pub fn may_write(&self, address: u64) -> bool {
        // SAFETY: the ranges belong to the launch, which outlives its blocks.
        let writable = unsafe { &*self.writable };
        writable.iter().any(|range| address < range.end && range.start < address + 16)
    }

    /// Issues an asynchronous copy of the `bytes` bytes that exist at `from`.
    pub fn copy(&mut self, to: u32, size: u32, from: Option<(&Storage, usize)>, bytes: u32, at: At) {
        self.check_shared(to, size, at);
        if let Some((storage, offset)) = from {
            // Read later, but it must be there already.
            self.global(storage, offset, bytes as usize, Kind::Read, at, |_| ());
        }
        self.watch_shared(self.current, to, size, Kind::Pending, at);
        let from = from.map_or((std::ptr::null(), 0), |(storage, offset)| (&raw const *storage, offset));
        let lane = &mut self.lanes[self.current as usize];
        lane.copies.push_back(Copy { to, size, from, bytes, at });
        lane.open += 1;
    }

    /// Closes the running lane's group of copies.
    pub fn commit(&mut self) {
        let lane = &mut self.lanes[self.current as usize];
        lane.groups.push_back(std::mem::take(&mut lane.open));
    }

    /// Lands all but the running lane's latest `pending` groups.
    pub fn wait(&mut self, pending: u32) {
        let thread = self.current as usize;
        while self.lanes[thread].groups.len() > pending as usize {
            for _ in 0..self.lanes[thread].groups.pop_front().unwrap_or(0) {
                let Some(copy) = self.lanes[thread].copies.pop_front() else { break };
                let mut value = [0u8; 16];
                let Copy { to, size, from: (storage, offset), bytes, at } = copy;
                // SAFETY: null, or alive while the launch runs, as when the copy was issued.
                if let Some(storage) = unsafe { storage.as_ref() } {
                    let len = bytes as usize;
                    // SAFETY: `global` passes a pointer to `len` bytes, at most 16.
                    let read = |from: *mut u8| unsafe { value.as_mut_ptr().copy_from_nonoverlapping(from, len) };
                    self.global(storage, offset, len, Kind::Read, at, read);
                }
                let (to, size) = (to as usize, size as usize);
                self.shared()[to..][..size].copy_from_slice(&value[..size]);
                let stamp = self.stamp(self.current, 0, Kind::Write, at);
                self.shadow.land(to..to + size, stamp);
            }
        }
    }
}
