//! One block: its lanes as coroutines, their schedule, and where they meet.

use super::Buffer;
use super::device::{Device, Hasty, Running, Storage};
use super::fault::{Fault, FaultKind, Party, Report, Source};
use super::shadow::{Clocks, Shadow};
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, Yielder};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once};

mod access;
mod meet;

pub(super) use meet::Meet;

pub(super) type At = &'static Location<'static>;

const WARP: usize = 32;
const FULL: u32 = u32::MAX;
/// Stack of a lane. Only the pages that a kernel touches are ever backed by memory; a guard page follows.
const STACK: usize = 128 * 1024;
/// Operations between two looks at the budget, at which a lane also lets others run.
const QUANTUM: u32 = 4096;

/// What all blocks of a launch share.
pub(super) struct Job<'a> {
    pub id: u64,
    pub device: &'a Device,
    pub kernel: &'static str,
    pub grid: u32,
    pub threads: u32,
    pub shared_bytes: u32,
    pub seed: u64,
    pub operations: u64,
    /// Device addresses that the launch may write.
    pub writable: &'a [Range<u64>],
    /// It may have started while the launches `ahead` still ran.
    pub early: bool,
    pub ahead: &'a [Running],
    /// The first thread that called `launch_dependents` before its wait.
    pub hasty: &'a Mutex<Option<Hasty>>,
    pub body: &'a (dyn Fn() + Sync),
    pub stop: &'a AtomicBool,
}

/// splitmix64.
pub(super) struct Random(u64);

impl Random {
    pub fn new(seed: u64, stream: u64) -> Self {
        Random(seed ^ stream.wrapping_mul(0xD6E8_FEB8_6659_FD93))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

struct Warp {
    /// Lanes that can run.
    ready: u32,
    /// Lanes that have not finished.
    alive: u32,
    /// Lanes that wait at `meet`.
    arrived: u32,
    meet: Meet,
    at: At,
    inputs: [[u32; 10]; WARP],
    outputs: [[u32; 4]; WARP],
}

#[derive(Clone, Copy)]
struct Barrier {
    /// Warps that wait.
    warps: u32,
    meet: Meet,
    at: At,
}

/// An asynchronous copy in flight.
struct Copy {
    to: u32,
    size: u32,
    /// Allocation and offset of what is read; null where nothing is.
    from: (*const Storage, usize),
    /// Bytes that are read; the rest is filled with zeros.
    bytes: u32,
    at: At,
}

struct Lane {
    coroutine: Option<Coroutine<(), (), (), DefaultStack>>,
    yielder: *const Yielder<(), ()>,
    /// Copies that were issued and have not landed, oldest first.
    copies: VecDeque<Copy>,
    /// Sizes of the committed groups, oldest first.
    groups: VecDeque<usize>,
    /// Copies since the last commit.
    open: usize,
    /// Launches ahead are complete for this lane.
    waited: bool,
}

impl Lane {
    fn new() -> Self {
        Lane {
            coroutine: None,
            yielder: std::ptr::null(),
            copies: VecDeque::new(),
            groups: VecDeque::new(),
            open: 0,
            waited: true,
        }
    }
}

/// A block while it runs. Reached by its lanes through [`CURRENT`].
pub(super) struct Block {
    pub launch: u64,
    kernel: &'static str,
    pub index: u32,
    pub grid: u32,
    pub threads: u32,
    /// The thread that runs.
    pub current: u32,
    fuel: u32,
    operations: u64,
    total_operations: u64,
    body: *const (dyn Fn() + Sync),
    writable: *const [Range<u64>],
    early: bool,
    ahead: *const [Running],
    hasty: *const Mutex<Option<Hasty>>,
    stop: *const AtomicBool,
    device: *const Device,
    /// Allocations that the kernel found by their addresses: alive until the block ends, whatever the host does.
    found: Vec<Arc<Storage>>,
    warps: Vec<Warp>,
    /// Warps with a lane that can run.
    ready: u32,
    lanes: Vec<Lane>,
    barriers: [Option<Barrier>; 16],
    pub shared_bytes: u32,
    shared: Vec<u128>,
    shadow: Shadow,
    clocks: Box<Clocks>,
    /// Epochs up to this one belong to blocks that ran in this place before.
    base: u32,
    random: Random,
    fault: Option<Fault>,
    /// A fault in another block has ended the launch.
    stopped: bool,
    /// Set while lanes are unwound: what they report then is no fault of the kernel.
    abandoned: bool,
    stacks: Vec<DefaultStack>,
}

thread_local! {
    static CURRENT: Cell<*mut Block> = const { Cell::new(std::ptr::null_mut()) };
    static IN_LANE: Cell<bool> = const { Cell::new(false) };
    static PANIC: RefCell<Option<(String, Option<Source>)>> = const { RefCell::new(None) };
    static IDLE: Cell<Option<Box<Block>>> = const { Cell::new(None) };
}

/// What a faulting lane unwinds with.
struct Unwound;

/// Keeps the message of a kernel's panic, which becomes a fault, from the terminal.
fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if IN_LANE.get() {
                let message = info.payload_as_str().unwrap_or("no message").to_owned();
                PANIC.set(Some((message, info.location().map(Source::from))));
            } else {
                previous(info);
            }
        }));
    });
}

/// The block whose lane calls.
#[inline(always)]
#[track_caller]
pub(super) fn current() -> &'static mut Block {
    let block = CURRENT.get();
    if block.is_null() {
        outside();
    }
    // SAFETY: `run` sets the pointer to a block that lives while its lanes run, all on this OS thread. A lane holds the
    // reference between two switches only, and the scheduler holds none while a lane runs.
    unsafe { &mut *block }
}

/// Counts an operation of the running lane, and gives its block.
#[inline(always)]
#[track_caller]
pub(super) fn operation(at: At) -> &'static mut Block {
    let block = current();
    block.fuel -= 1;
    if block.fuel == 0 {
        return refuel(at);
    }
    block
}

#[cold]
#[inline(never)]
fn refuel(at: At) -> &'static mut Block {
    let block = current();
    // SAFETY: the flag belongs to the launch, which outlives its blocks.
    if unsafe { &*block.stop }.load(Relaxed) {
        block.stopped = true;
        resume_unwind(Box::new(Unwound));
    }
    if block.operations <= u64::from(QUANTUM) {
        let message = format!("the block's budget of {} operations is used up", block.total_operations);
        block.raise(FaultKind::Hang, at, None, message);
    }
    block.operations -= u64::from(QUANTUM);
    block.fuel = QUANTUM;
    std::thread::yield_now();
    suspend();
    current()
}

/// Lets others run; returns when the scheduler comes back to this lane.
fn suspend() {
    let block = current();
    let yielder = block.lanes[block.current as usize].yielder;
    // SAFETY: set by this lane's own `lane_main`, whose frame lives as long as the lane.
    unsafe { (*yielder).suspend(()) };
}

/// The running lane meets the others of its warp. Returns when all have come and the operation is done.
pub(super) fn meet(meet: Meet, at: At, input: &[u32]) -> [u32; 4] {
    if operation(at).come(meet, at, input) {
        suspend();
    }
    let block = current();
    block.warps[block.current as usize / WARP].outputs[block.current as usize % WARP]
}

#[cold]
#[inline(never)]
#[track_caller]
fn outside() -> ! {
    panic!("called outside of a kernel launch");
}

/// Runs block `index` of a launch.
pub(super) fn run(job: &Job<'_>, index: u32) -> Result<(), Fault> {
    install_hook();
    let block = Box::into_raw(IDLE.take().unwrap_or_else(|| Box::new(Block::new())));
    let outer = CURRENT.replace(block);
    // SAFETY: the block is alive until the box is made again, and nothing else refers to it.
    let result = unsafe {
        let result = Block::prepare(block, job, index).and_then(|()| schedule(block));
        Block::clear(block);
        result
    };
    CURRENT.set(outer);
    // SAFETY: made by `into_raw` above; no lane is left.
    IDLE.set(Some(unsafe { Box::from_raw(block) }));
    result
}

/// Runs the lanes of a prepared block to their end or to the first fault.
///
/// # Safety
/// `block` must be valid and referred to by nobody else; [`CURRENT`] must point to it.
unsafe fn schedule(block: *mut Block) -> Result<(), Fault> {
    loop {
        // SAFETY: no lane runs, so this is the only reference.
        let b = unsafe { &mut *block };
        if b.ready == 0 {
            return b.finished();
        }
        let random = b.random.next();
        let warp = nth_bit(b.ready, random as u32 % b.ready.count_ones());
        let (start, step) = ((random >> 32) as usize, (random >> 40) as usize | 1);
        for i in 0..WARP {
            let lane = start.wrapping_add(i * step) % WARP;
            // SAFETY: as above; the reference ends before the lane is resumed.
            let coroutine = unsafe {
                let b = &mut *block;
                if b.warps[warp].ready & 1 << lane == 0 {
                    continue;
                }
                b.current = (warp * WARP + lane) as u32;
                &raw mut b.lanes[warp * WARP + lane].coroutine
            };
            let outer = IN_LANE.replace(true);
            // SAFETY: a ready lane has a coroutine, and lanes never touch their own `coroutine` field.
            unsafe { (*coroutine).as_mut().expect("ready lanes have not finished").resume(()) };
            IN_LANE.set(outer);
            // SAFETY: the lane is suspended or done, so this is the only reference.
            let b = unsafe { &mut *block };
            if let Some(fault) = b.fault.take() {
                return Err(fault);
            }
            if b.stopped {
                return Ok(());
            }
        }
    }
}

fn nth_bit(mut mask: u32, n: u32) -> usize {
    for _ in 0..n {
        mask &= mask - 1;
    }
    mask.trailing_zeros() as usize
}

/// What a coroutine runs.
fn lane_main(block: *mut Block, thread: usize, yielder: &Yielder<(), ()>) {
    // SAFETY: the block outlives its lanes, and the scheduler holds no reference while one runs.
    let body = unsafe {
        let b = &mut *block;
        b.lanes[thread].yielder = yielder;
        &*b.body
    };
    let result = catch_unwind(AssertUnwindSafe(body));
    // SAFETY: as above.
    let b = unsafe { &mut *block };
    if b.abandoned {
        return;
    }
    match result {
        Ok(()) => b.exit(),
        Err(payload) if payload.is::<Unwound>() => {}
        Err(_) => {
            let (message, source) = PANIC.take().unwrap_or_else(|| ("no message".to_owned(), None));
            let party = Party { block: b.index, thread: thread as u32, source };
            b.fault.get_or_insert(Fault::new(Report {
                kind: FaultKind::Panic,
                kernel: b.kernel,
                party: Some(party),
                other: None,
                message,
            }));
        }
    }
}

impl Block {
    fn new() -> Self {
        fn nothing() {}
        let body: *const fn() = &(nothing as fn());
        Block {
            launch: 0,
            kernel: "",
            index: 0,
            grid: 0,
            threads: 0,
            current: 0,
            fuel: 0,
            operations: 0,
            total_operations: 0,
            body: body as *const (dyn Fn() + Sync),
            writable: &[],
            early: false,
            ahead: &[],
            hasty: std::ptr::null(),
            stop: std::ptr::null(),
            device: std::ptr::null(),
            found: Vec::new(),
            warps: Vec::new(),
            ready: 0,
            lanes: Vec::new(),
            barriers: [None; 16],
            shared_bytes: 0,
            shared: Vec::new(),
            shadow: Shadow::new(),
            clocks: Box::new(Clocks::new()),
            base: 0,
            random: Random(0),
            fault: None,
            stopped: false,
            abandoned: false,
            stacks: Vec::new(),
        }
    }

    /// # Safety
    /// `block` must be valid, referred to by nobody else, and without lanes.
    unsafe fn prepare(block: *mut Block, job: &Job<'_>, index: u32) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { &mut *block }.reset(job, index)?;
        for thread in 0..job.threads as usize {
            let main = move |yielder: &Yielder<(), ()>, ()| lane_main(block, thread, yielder);
            // SAFETY: as above; no lane runs yet.
            let b = unsafe { &mut *block };
            let stack = b.stacks.pop().expect("as many stacks as lanes");
            b.lanes[thread].coroutine = Some(Coroutine::with_stack(stack, main));
        }
        Ok(())
    }

    /// Ends what lanes are left and keeps their stacks.
    ///
    /// # Safety
    /// `block` must be valid and referred to by nobody else.
    unsafe fn clear(block: *mut Block) {
        // SAFETY: the caller's promise; each reference ends before a lane is unwound.
        let b = || unsafe { &mut *block };
        b().abandoned = true;
        b().device = std::ptr::null();
        for lane in 0..b().lanes.len() {
            let coroutine = b().lanes[lane].coroutine.take();
            if let Some(mut coroutine) = coroutine {
                coroutine.force_unwind();
                b().stacks.push(coroutine.into_stack());
            }
        }
    }

    fn reset(&mut self, job: &Job<'_>, index: u32) -> Result<(), Fault> {
        self.launch = job.id;
        self.kernel = job.kernel;
        self.index = index;
        self.grid = job.grid;
        self.threads = job.threads;
        self.fuel = QUANTUM;
        self.operations = job.operations;
        self.total_operations = job.operations;
        // SAFETY: only the lifetime changes; `run` clears the block before the job ends.
        self.body = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(job.body) };
        self.writable = job.writable;
        self.early = job.early;
        self.ahead = job.ahead;
        self.hasty = job.hasty;
        self.stop = job.stop;
        self.device = job.device;
        self.found.clear();
        self.random = Random::new(job.seed, u64::from(index));
        self.fault = None;
        self.stopped = false;
        self.abandoned = false;
        self.barriers = [None; 16];
        self.shared_bytes = job.shared_bytes;
        let words = job.shared_bytes.div_ceil(16) as usize;
        if self.shared.len() < words {
            self.shared.resize(words, 0);
        }
        self.base = self.clocks.latest();
        if self.base > u32::MAX / 2 {
            self.base = 0;
            self.shadow.clear(0);
        }
        self.clocks.begin(self.base);
        self.shadow.next_block(words * 16);
        let warps = job.threads as usize / WARP;
        let here = Location::caller();
        self.warps.clear();
        self.warps.extend((0..warps).map(|_| Warp {
            ready: FULL,
            alive: FULL,
            arrived: 0,
            meet: Meet::Converge,
            at: here,
            inputs: [[0; 10]; WARP],
            outputs: [[0; 4]; WARP],
        }));
        self.ready = FULL >> (32 - warps);
        let threads = job.threads as usize;
        if self.lanes.len() < threads {
            self.lanes.resize_with(threads, Lane::new);
        }
        while self.stacks.len() < threads {
            match DefaultStack::new(STACK) {
                Ok(stack) => self.stacks.push(stack),
                Err(error) => {
                    let message = format!("no memory for the stacks of {threads} lanes: {error}");
                    return Err(Fault::launch(FaultKind::InvalidArgument, job.kernel, message));
                }
            }
        }
        for lane in &mut self.lanes {
            lane.copies.clear();
            lane.groups.clear();
            lane.open = 0;
            lane.waited = !job.early;
        }
        Ok(())
    }

    /// The `len` elements of `size` bytes at a device address.
    pub fn find(&mut self, address: u64, len: usize, size: usize, at: At) -> Buffer {
        if !address.is_multiple_of(size as u64) {
            let message = format!("device address {address:#x} is no multiple of the element size {size}");
            self.raise(FaultKind::Misaligned, at, None, message);
        }
        let Some(bytes) = len.checked_mul(size) else {
            let message = format!("a buffer of {len} elements of {size} bytes");
            self.raise(FaultKind::InvalidArgument, at, None, message);
        };
        // SAFETY: the launch holds the device while its lanes run.
        match unsafe { &*self.device }.find(address, bytes) {
            Ok((storage, offset)) => {
                let buffer = Buffer { storage: Arc::as_ptr(&storage), offset, bytes };
                if !self.found.iter().any(|known| Arc::ptr_eq(known, &storage)) {
                    self.found.push(storage);
                }
                buffer
            }
            Err(error) => self.raise(FaultKind::OutOfBounds, at, None, error.to_string()),
        }
    }

    fn party(&self, thread: u32, at: Option<At>) -> Party {
        Party { block: self.index, thread, source: at.map(Source::from) }
    }

    fn report(&mut self, kind: FaultKind, thread: u32, at: Option<At>, other: Option<Party>, message: String) {
        let party = Some(self.party(thread, at));
        self.fault.get_or_insert(Fault::new(Report { kind, kernel: self.kernel, party, other, message }));
    }

    /// Reports a fault of the running lane and leaves it.
    #[cold]
    #[inline(never)]
    pub fn raise(&mut self, kind: FaultKind, at: At, other: Option<Party>, message: String) -> ! {
        self.report(kind, self.current, Some(at), other, message);
        resume_unwind(Box::new(Unwound));
    }
}
