//! One block: its lanes as coroutines, their schedule, and where they meet.

use super::device::{PAGE, Storage};
use super::fault::{Fault, FaultKind, Party, Report, Source};
use super::shadow::{Access, Conflict, Kind, Page, Shadow, Stamp};
use super::tensor;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, Yielder};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

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
    pub kernel: &'static str,
    pub grid: u32,
    pub threads: u32,
    pub shared_bytes: u32,
    pub seed: u64,
    pub operations: u64,
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

/// Operations at which the lanes of a warp meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meet {
    ShflIdx,
    ShflBfly,
    ShflDown,
    ShflUp,
    Ballot,
    MatchAny,
    ReduxAdd,
    ReduxMax,
    ReduxMin,
    Ldmatrix,
    MmaBf16,
    MmaF16,
    SyncWarp,
    Converge,
    SyncThreads,
    SyncNamed { id: u32, threads: u32 },
}

impl Meet {
    fn is_barrier(self) -> bool {
        matches!(self, Meet::SyncThreads | Meet::SyncNamed { .. })
    }

    fn barrier(self, block_threads: u32) -> (usize, u32) {
        match self {
            Meet::SyncNamed { id, threads } => (id as usize, threads),
            _ => (0, block_threads),
        }
    }
}

impl std::fmt::Display for Meet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Meet::ShflIdx => "shfl",
            Meet::ShflBfly => "shfl_xor",
            Meet::ShflDown => "shfl_down",
            Meet::ShflUp => "shfl_up",
            Meet::Ballot => "a vote",
            Meet::MatchAny => "match_any",
            Meet::ReduxAdd => "sum",
            Meet::ReduxMax => "max",
            Meet::ReduxMin => "min",
            Meet::Ldmatrix => "ldmatrix",
            Meet::MmaBf16 => "mma bf16",
            Meet::MmaF16 => "mma f16",
            Meet::SyncWarp => "sync_warp",
            Meet::Converge => "converge",
            Meet::SyncThreads => "sync_threads",
            Meet::SyncNamed { id, threads } => return write!(f, "sync_named({id}, {threads})"),
        };
        f.write_str(name)
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
}

impl Lane {
    fn new() -> Self {
        Lane { coroutine: None, yielder: std::ptr::null(), copies: VecDeque::new(), groups: VecDeque::new(), open: 0 }
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
    stop: *const AtomicBool,
    warps: Vec<Warp>,
    /// Warps with a lane that can run.
    ready: u32,
    lanes: Vec<Lane>,
    barriers: [Option<Barrier>; 16],
    pub shared_bytes: u32,
    shared: Vec<u128>,
    shadow: Shadow,
    /// For each warp, the epoch of each warp up to which accesses are ordered before what it does now. Its own entry is
    /// the epoch that it is in.
    clocks: Box<[[u32; WARP]; WARP]>,
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
            stop: std::ptr::null(),
            warps: Vec::new(),
            ready: 0,
            lanes: Vec::new(),
            barriers: [None; 16],
            shared_bytes: 0,
            shared: Vec::new(),
            shadow: Shadow::new(),
            clocks: Box::new([[0; WARP]; WARP]),
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
        unsafe {
            (*block).abandoned = true;
            let lanes = (&(*block).lanes).len();
            for lane in 0..lanes {
                let coroutine = (&mut (*block).lanes)[lane].coroutine.take();
                if let Some(mut coroutine) = coroutine {
                    coroutine.force_unwind();
                    (&mut (*block).stacks).push(coroutine.into_stack());
                }
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
        self.stop = job.stop;
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
        self.base = (0..WARP).map(|w| self.clocks[w][w]).max().unwrap_or(0);
        if self.base > u32::MAX / 2 {
            self.base = 0;
            self.shadow.clear(0);
        }
        for (w, clock) in self.clocks.iter_mut().enumerate() {
            *clock = [self.base; WARP];
            clock[w] += 1;
        }
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
        }
        Ok(())
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

    /// The running lane comes to a meeting of its warp. Returns whether it has to wait.
    fn come(&mut self, meet: Meet, at: At, input: &[u32]) -> bool {
        let (w, lane) = (self.current as usize / WARP, self.current as usize % WARP);
        let warp = &mut self.warps[w];
        if warp.alive != FULL {
            let gone = w * WARP + warp.alive.trailing_ones() as usize;
            let message = format!("waits at {meet}, but thread {gone} has finished");
            let other = self.party(gone as u32, None);
            self.raise(divergence(meet, meet), at, Some(other), message);
        }
        if warp.arrived == 0 {
            warp.meet = meet;
            warp.at = at;
        } else if warp.meet != meet || !same_place(warp.at, at) {
            let (there, place) = (warp.meet, warp.at);
            let first = w * WARP + warp.arrived.trailing_zeros() as usize;
            let message = format!("is at {meet} while thread {first} of its warp is at {there}");
            let other = self.party(first as u32, Some(place));
            self.raise(divergence(meet, there), at, Some(other), message);
        }
        warp.inputs[lane][..input.len()].copy_from_slice(input);
        warp.arrived |= 1 << lane;
        if warp.arrived == FULL {
            if meet.is_barrier() {
                warp.ready = 0;
                self.ready &= !(1 << w);
                self.arrive(w, meet, at);
                return self.warps[w].ready == 0;
            }
            self.perform(w, meet, at);
            let warp = &mut self.warps[w];
            warp.arrived = 0;
            warp.ready = FULL;
            self.ready |= 1 << w;
            return false;
        }
        warp.ready &= !(1 << lane);
        if warp.ready == 0 {
            self.ready &= !(1 << w);
        }
        true
    }

    /// Warp `w` arrives at a barrier as a whole.
    fn arrive(&mut self, w: usize, meet: Meet, at: At) {
        let (id, threads) = meet.barrier(self.threads);
        if let Some(there) = self.barriers[id]
            && (there.meet != meet || (meet == Meet::SyncThreads && !same_place(there.at, at)))
        {
            let first = there.warps.trailing_zeros() * WARP as u32;
            let message = format!("is at {meet} while thread {first} is at {}", there.meet);
            let other = self.party(first, Some(there.at));
            self.raise(FaultKind::DivergentBarrier, at, Some(other), message);
        }
        if meet == Meet::SyncThreads
            && let Some(gone) = self.warps.iter().position(|warp| warp.alive != FULL)
        {
            let gone = (gone * WARP) as u32 + self.warps[gone].alive.trailing_ones();
            let message = format!("waits at {meet}, but thread {gone} has finished");
            let other = self.party(gone, None);
            self.raise(FaultKind::DivergentBarrier, at, Some(other), message);
        }
        let barrier = self.barriers[id].get_or_insert(Barrier { warps: 0, meet, at });
        barrier.warps |= 1 << w;
        let warps = barrier.warps;
        if warps.count_ones() * WARP as u32 == threads {
            self.barriers[id] = None;
            let mut joined = [0; WARP];
            for w in (0..WARP).filter(|w| warps & 1 << w != 0) {
                joined = std::array::from_fn(|i| joined[i].max(self.clocks[w][i]));
            }
            for w in (0..WARP).filter(|w| warps & 1 << w != 0) {
                self.clocks[w] = joined;
                self.clocks[w][w] += 1;
            }
            for (i, warp) in self.warps.iter_mut().enumerate() {
                if warps & 1 << i != 0 {
                    warp.arrived = 0;
                    warp.ready = FULL;
                }
            }
            self.ready |= warps;
        }
    }

    /// The running lane has finished.
    fn exit(&mut self) {
        let (w, lane) = (self.current as usize / WARP, self.current as usize % WARP);
        let gone = self.party(self.current, None);
        let warp = &mut self.warps[w];
        warp.alive &= !(1 << lane);
        warp.ready &= !(1 << lane);
        if warp.ready == 0 {
            self.ready &= !(1 << w);
        }
        if warp.arrived != 0 {
            let (meet, at) = (warp.meet, warp.at);
            let waiting = w as u32 * WARP as u32 + warp.arrived.trailing_zeros();
            let message = format!("waits at {meet}, but thread {} has finished", self.current);
            self.report(divergence(meet, meet), waiting, Some(at), Some(gone), message);
        } else if let Some(barrier) = self.barriers[0] {
            let waiting = barrier.warps.trailing_zeros() * WARP as u32;
            let message = format!("waits at {}, but thread {} has finished", barrier.meet, self.current);
            self.report(FaultKind::DivergentBarrier, waiting, Some(barrier.at), Some(gone), message);
        }
    }

    /// No lane can run: either all have finished or some wait for ever.
    fn finished(&mut self) -> Result<(), Fault> {
        let mut waiting = self.barriers.iter().flatten();
        let Some(first) = waiting.next() else { return Ok(()) };
        let thread = |barrier: &Barrier| barrier.warps.trailing_zeros() * WARP as u32;
        let other = waiting.next().map(|barrier| self.party(thread(barrier), Some(barrier.at)));
        let arrived = first.warps.count_ones() * WARP as u32;
        let message = format!("waits for ever at {}: {arrived} threads have come", first.meet);
        let (thread, at) = (thread(first), first.at);
        self.report(FaultKind::DivergentBarrier, thread, Some(at), other, message);
        Err(self.fault.take().expect("just reported"))
    }

    /// All lanes of warp `w` are at `meet`.
    fn perform(&mut self, w: usize, meet: Meet, at: At) {
        if meet == Meet::Ldmatrix {
            return self.ldmatrix(w, at);
        }
        if meet == Meet::SyncWarp {
            self.clocks[w][w] += 1;
            return;
        }
        let warp = &mut self.warps[w];
        let (inputs, outputs) = (&warp.inputs, &mut warp.outputs);
        match meet {
            Meet::ShflIdx | Meet::ShflBfly | Meet::ShflDown | Meet::ShflUp => {
                for lane in 0..WARP {
                    let [value, by] = [inputs[lane][0], inputs[lane][1] % WARP as u32];
                    let source = match meet {
                        Meet::ShflIdx => Some(by as usize),
                        Meet::ShflBfly => Some(lane ^ by as usize),
                        Meet::ShflDown => Some(lane + by as usize).filter(|&source| source < WARP),
                        _ => lane.checked_sub(by as usize),
                    };
                    outputs[lane][0] = source.map_or(value, |source| inputs[source][0]);
                }
            }
            Meet::MatchAny => {
                for lane in 0..WARP {
                    let same = |other: &usize| inputs[*other][0] == inputs[lane][0];
                    outputs[lane][0] = (0..WARP).filter(same).map(|other| 1 << other).sum();
                }
            }
            Meet::Ballot | Meet::ReduxAdd | Meet::ReduxMax | Meet::ReduxMin => {
                let values = inputs.iter().map(|input| input[0]);
                let result = match meet {
                    Meet::Ballot => values.enumerate().map(|(lane, holds)| holds << lane).sum(),
                    Meet::ReduxAdd => values.fold(0, u32::wrapping_add),
                    Meet::ReduxMax => values.max().unwrap_or(0),
                    _ => values.min().unwrap_or(0),
                };
                for output in outputs {
                    output[0] = result;
                }
            }
            Meet::MmaBf16 => tensor::m16n8k16::<true>(inputs, outputs),
            Meet::MmaF16 => tensor::m16n8k16::<false>(inputs, outputs),
            _ => {}
        }
    }

    fn ldmatrix(&mut self, w: usize, at: At) {
        for matrix in 0..4 {
            for row in 0..8 {
                let from = self.warps[w].inputs[8 * matrix + row][0];
                for t in 0..4 {
                    // The lane that gets a word is the one that reads it.
                    let (lane, offset) = (4 * row + t, from + 4 * t as u32);
                    self.watch_shared((w * WARP + lane) as u32, offset, 4, Kind::Read, at);
                    let word = self.shared()[offset as usize..][..4].try_into().expect("4 bytes");
                    self.warps[w].outputs[lane][matrix] = u32::from_le_bytes(word);
                }
            }
        }
    }

    fn shared(&mut self) -> &mut [u8] {
        // SAFETY: any bytes are bytes; the vector holds at least `shared_bytes` of them.
        unsafe { std::slice::from_raw_parts_mut(self.shared.as_mut_ptr().cast(), self.shared_bytes as usize) }
    }

    fn stamp(&self, thread: u32, block: u32, kind: Kind, at: At) -> Stamp {
        let warp = thread / WARP as u32;
        let epoch = self.clocks[warp as usize][warp as usize];
        Stamp { at: Some(at), block, epoch, lanes: 1 << (thread % WARP as u32), warp: warp as u8, kind }
    }

    /// Checks that `len` bytes of shared memory exist at `offset`, a multiple of `len`.
    #[inline]
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
    #[inline]
    fn watch_shared(&mut self, thread: u32, offset: u32, len: u32, kind: Kind, at: At) {
        let stamp = self.stamp(thread, 0, kind, at);
        let clock = &self.clocks[usize::from(stamp.warp)];
        let access = Access { stamp, clock, base: self.base, written_only: true };
        if let Err(conflict) = self.shadow.access(offset as usize..(offset + len) as usize, &access) {
            self.conflict(conflict, &stamp, &format!("{len} bytes at offset {offset} of shared memory"));
        }
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
    #[inline]
    pub fn load_shared<const N: usize>(&mut self, offset: u32, at: At) -> [u8; N] {
        self.check_shared(offset, N as u32, at);
        self.watch_shared(self.current, offset, N as u32, Kind::Read, at);
        self.shared()[offset as usize..][..N].try_into().expect("N bytes")
    }

    /// Stores to shared memory.
    #[inline]
    pub fn store_shared<const N: usize>(&mut self, offset: u32, value: [u8; N], at: At) {
        self.check_shared(offset, N as u32, at);
        self.watch_shared(self.current, offset, N as u32, Kind::Write, at);
        self.shared()[offset as usize..][..N].copy_from_slice(&value);
    }

    /// Accesses `len` bytes of a buffer, which exist at `offset` and are at most 16 and aligned: `act` gets a pointer to
    /// them. Where the launch may write the buffer, the bytes are locked meanwhile.
    #[inline]
    pub fn global<R>(
        &mut self,
        storage: &Storage,
        offset: usize,
        len: usize,
        kind: Kind,
        at: At,
        act: impl FnOnce(*mut u8) -> R,
    ) -> R {
        if kind != Kind::Write && !storage.is_written(offset, len) {
            let place = place(storage, offset, len);
            self.conflict(Conflict::Unwritten, &self.stamp(self.current, self.index, kind, at), &place);
        }
        // SAFETY: the caller's range is inside.
        let pointer = unsafe { storage.base().add(offset) };
        if kind == Kind::Read && !self.tracks(storage) {
            return act(pointer);
        }
        let stamp = self.stamp(self.current, self.index, kind, at);
        let clock = &self.clocks[usize::from(stamp.warp)];
        let access = Access { stamp, clock, base: 0, written_only: false };
        let mut page = storage.page(offset);
        let page = &mut **page.get_or_insert_with(|| Box::new(Page { launch: 0, shadow: Shadow::new() }));
        if page.launch != self.launch {
            page.launch = self.launch;
            page.shadow.clear(PAGE);
        }
        let start = offset % PAGE;
        if let Err(conflict) = page.shadow.access(start..start + len, &access) {
            self.conflict(conflict, &stamp, &place(storage, offset, len));
        }
        if kind == Kind::Write {
            storage.set_written(offset, len);
        }
        act(pointer)
    }

    /// Whether the launch may write the allocation.
    pub fn tracks(&self, storage: &Storage) -> bool {
        storage.tracked_by.load(Relaxed) == self.launch
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

/// Names bytes of global memory.
fn place(storage: &Storage, offset: usize, len: usize) -> String {
    let address = storage.address + offset as u64;
    format!("{len} bytes at device address {address:#x} (byte {offset} of {})", storage.len)
}

/// The fault when lanes are at two different operations.
fn divergence(a: Meet, b: Meet) -> FaultKind {
    if a.is_barrier() || b.is_barrier() { FaultKind::DivergentBarrier } else { FaultKind::DivergentWarp }
}

/// The same call may have several `Location`s, one a copy of the code around it.
fn same_place(a: At, b: At) -> bool {
    std::ptr::eq(a, b) || a == b
}
