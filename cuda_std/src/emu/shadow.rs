//! Who accessed which byte, and what orders it.
//!
//! Each warp counts epochs: a barrier ends one. A warp's clock says, for each warp of the block, up to which epoch that
//! warp's accesses are ordered before what this warp does now; barriers join the clocks of the warps that meet. Within a
//! warp and an epoch only a lane's own accesses are ordered. Blocks are never ordered.
//!
//! The shadow has a cell for each word. A word of which a part was accessed is split into a cell for each byte, until the
//! whole word is written again.

use super::block::At;
use super::device::{PAGE, Running};
use std::ops::Range;

/// Warps of a block at most.
const WARPS: usize = 32;

/// For each warp of a block, the epoch of each warp up to which accesses are ordered before what it does now. Its own entry
/// is the epoch that it is in.
pub(super) struct Clocks([[u32; WARPS]; WARPS]);

impl Clocks {
    pub const fn new() -> Self {
        Clocks([[0; WARPS]; WARPS])
    }

    /// Starts a block, all of whose epochs are later than `base`.
    pub fn begin(&mut self, base: u32) {
        for (warp, clock) in self.0.iter_mut().enumerate() {
            *clock = [base; WARPS];
            clock[warp] += 1;
        }
    }

    /// The latest epoch of any warp.
    pub fn latest(&self) -> u32 {
        (0..WARPS).map(|warp| self.0[warp][warp]).max().unwrap_or(0)
    }

    #[inline(always)]
    pub fn epoch(&self, warp: usize) -> u32 {
        self.0[warp][warp]
    }

    #[inline(always)]
    pub fn of(&self, warp: u8) -> &[u32; WARPS] {
        &self.0[usize::from(warp)]
    }

    /// The lanes of a warp have met.
    pub fn sync_warp(&mut self, warp: usize) {
        self.0[warp][warp] += 1;
    }

    /// The warps of a mask have met.
    pub fn barrier(&mut self, warps: u32) {
        let members = || (0..WARPS).filter(move |warp| warps & 1 << warp != 0);
        let mut joined = [0; WARPS];
        for warp in members() {
            joined = std::array::from_fn(|i| joined[i].max(self.0[warp][i]));
        }
        for warp in members() {
            self.0[warp] = joined;
            self.0[warp][warp] += 1;
        }
    }
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    /// A read and a write that does not conflict with its like.
    Atomic,
    /// The write of an asynchronous copy that has not landed.
    Pending,
}

/// Accesses of one kind by lanes of one warp in one epoch.
#[derive(Clone, Copy)]
pub(super) struct Stamp {
    /// None: no access.
    pub at: Option<At>,
    pub block: u32,
    pub epoch: u32,
    /// Lanes of the warp, one bit each.
    pub lanes: u32,
    pub warp: u8,
    pub kind: Kind,
}

impl Stamp {
    const NONE: Stamp = Stamp { at: None, block: 0, epoch: 0, lanes: 0, warp: 0, kind: Kind::Read };

    #[inline(always)]
    fn same_group(&self, other: &Stamp) -> bool {
        self.epoch == other.epoch
            && self.warp == other.warp
            && self.block == other.block
            && self.kind == other.kind
            && self.at.is_some()
    }

    /// A thread among `lanes`, preferably none of `but`.
    pub fn thread(&self, but: u32) -> u32 {
        let others = self.lanes & !but;
        let lanes = if others == 0 { self.lanes } else { others };
        u32::from(self.warp) * 32 + lanes.trailing_zeros()
    }
}

/// The access that is being made: its stamp, and what is ordered before it.
pub(super) struct Access<'a> {
    pub stamp: Stamp,
    /// The warp's clock.
    pub clock: &'a [u32; WARPS],
    /// Epochs up to this one belong to earlier blocks, whose accesses no longer count.
    pub base: u32,
    /// Whether a byte that nobody wrote may not be read.
    pub written_only: bool,
}

impl Access<'_> {
    #[inline(always)]
    fn live(&self, stamp: &Stamp) -> bool {
        stamp.at.is_some() && stamp.epoch > self.base
    }

    /// Whether `stamp`, which is live, is ordered before this access.
    #[inline(always)]
    fn follows(&self, stamp: &Stamp) -> bool {
        if stamp.block != self.stamp.block {
            false
        } else if stamp.warp == self.stamp.warp {
            stamp.epoch < self.stamp.epoch || stamp.lanes == self.stamp.lanes
        } else {
            self.clock[usize::from(stamp.warp)] >= stamp.epoch
        }
    }

    /// Whether the two must be ordered and are not.
    #[inline(always)]
    fn races(&self, stamp: &Stamp) -> bool {
        let harmless = matches!((self.stamp.kind, stamp.kind), (Kind::Read, Kind::Read) | (Kind::Atomic, Kind::Atomic));
        !harmless && self.live(stamp) && !self.follows(stamp)
    }
}

/// Why an access is a fault.
pub(super) enum Conflict {
    Race(Stamp),
    Pending(Stamp),
    Unwritten,
}

/// The accesses to a word or a byte that can still matter.
#[derive(Clone, Copy)]
struct Cell {
    /// The latest write.
    write: Stamp,
    /// Reads or atomics since then, of one group.
    other: Stamp,
    /// 0, or one more than the index of the list of the other groups.
    list: u32,
}

const EMPTY: Cell = Cell { write: Stamp::NONE, other: Stamp::NONE, list: 0 };

/// Shadow of a range of memory.
pub(super) struct Shadow {
    words: Vec<Cell>,
    /// One a byte, once there is a split word.
    bytes: Vec<Cell>,
    /// One bit a word.
    split: Vec<u64>,
    lists: Lists,
}

struct Lists(Vec<Vec<Stamp>>);

impl Shadow {
    pub const fn new() -> Self {
        Shadow { words: Vec::new(), bytes: Vec::new(), split: Vec::new(), lists: Lists(Vec::new()) }
    }

    /// Covers `len` bytes and forgets all accesses.
    pub fn clear(&mut self, len: usize) {
        let words = len.div_ceil(4);
        self.words.clear();
        self.words.resize(words, EMPTY);
        self.bytes.clear();
        self.split.clear();
        self.split.resize(words.div_ceil(64), 0);
        self.lists.0.clear();
    }

    /// Covers `len` bytes. What was accessed stays, with epochs that the next block's base makes void.
    pub fn next_block(&mut self, len: usize) {
        let words = len.div_ceil(4);
        if self.words.len() < words {
            self.words.resize(words, EMPTY);
            self.split.resize(words.div_ceil(64), 0);
            if !self.bytes.is_empty() {
                self.bytes.resize(self.words.len() * 4, EMPTY);
            }
        }
        self.split.fill(0);
    }

    /// Makes an access to `range`, which lies inside.
    #[inline(always)]
    pub fn access(&mut self, range: Range<usize>, access: &Access<'_>) -> Result<(), Conflict> {
        if range.start.is_multiple_of(4) && range.end.is_multiple_of(4) {
            for word in range.start / 4..range.end / 4 {
                if self.split[word / 64] >> (word % 64) & 1 == 0 {
                    self.words[word].access(access, &mut self.lists)?;
                } else {
                    self.access_split(word, access)?;
                }
            }
            Ok(())
        } else {
            self.access_bytes(range, access)
        }
    }

    /// A write or an atomic that was made to `range`, which lies inside.
    pub fn written(&self, range: Range<usize>) -> Option<Stamp> {
        range.into_iter().find_map(|byte| {
            let word = byte / 4;
            let split = self.split[word / 64] >> (word % 64) & 1 != 0;
            let cell = if split { &self.bytes[byte] } else { &self.words[word] };
            let list = if cell.list == 0 { &[][..] } else { &self.lists.0[cell.list as usize - 1] };
            let changes = |stamp: &&Stamp| stamp.at.is_some() && matches!(stamp.kind, Kind::Write | Kind::Atomic);
            [&cell.write, &cell.other].into_iter().chain(list).find(changes).copied()
        })
    }

    /// An asynchronous copy to `range` (whole words) has landed: its write is `stamp`.
    pub fn land(&mut self, range: Range<usize>, stamp: Stamp) {
        for cell in &mut self.words[range.start / 4..range.end / 4] {
            cell.write = stamp;
        }
    }

    #[inline(never)]
    fn access_split(&mut self, word: usize, access: &Access<'_>) -> Result<(), Conflict> {
        for byte in word * 4..word * 4 + 4 {
            self.bytes[byte].access(access, &mut self.lists)?;
        }
        if matches!(access.stamp.kind, Kind::Write | Kind::Pending) {
            // All four bytes are in the same state again.
            let list = self.words[word].list;
            self.words[word] = Cell { list, ..self.bytes[word * 4] };
            self.lists.clear(list);
            self.split[word / 64] &= !(1 << (word % 64));
        }
        Ok(())
    }

    #[inline(never)]
    fn access_bytes(&mut self, range: Range<usize>, access: &Access<'_>) -> Result<(), Conflict> {
        for byte in range {
            let word = byte / 4;
            if self.split[word / 64] >> (word % 64) & 1 == 0 {
                if self.bytes.is_empty() {
                    self.bytes.resize(self.words.len() * 4, EMPTY);
                }
                let from = self.words[word];
                for cell in &mut self.bytes[word * 4..word * 4 + 4] {
                    *cell = Cell { list: cell.list, ..from };
                    self.lists.copy(from.list, &mut cell.list);
                }
                self.split[word / 64] |= 1 << (word % 64);
            }
            self.bytes[byte].access(access, &mut self.lists)?;
        }
        Ok(())
    }
}

impl Cell {
    #[inline(always)]
    fn access(&mut self, access: &Access<'_>, lists: &mut Lists) -> Result<(), Conflict> {
        if access.live(&self.write) {
            if self.write.kind == Kind::Pending {
                return Err(Conflict::Pending(self.write));
            }
            if !access.follows(&self.write) {
                return Err(Conflict::Race(self.write));
            }
        } else if access.written_only && access.stamp.kind == Kind::Read {
            return Err(Conflict::Unwritten);
        }
        if matches!(access.stamp.kind, Kind::Write | Kind::Pending) {
            if access.races(&self.other) {
                return Err(Conflict::Race(self.other));
            }
            if self.list != 0 {
                if let Some(stamp) = lists.of(self.list).iter().find(|stamp| access.races(stamp)) {
                    return Err(Conflict::Race(*stamp));
                }
                lists.clear(self.list);
            }
            self.write = access.stamp;
            self.other = Stamp::NONE;
            return Ok(());
        }
        if self.list == 0 && self.other.same_group(&access.stamp) {
            self.other.lanes |= access.stamp.lanes;
            return Ok(());
        }
        self.join(access, lists)
    }

    /// Adds a read or an atomic to those since the last write.
    #[inline(never)]
    fn join(&mut self, access: &Access<'_>, lists: &mut Lists) -> Result<(), Conflict> {
        let stamp = access.stamp;
        if access.races(&self.other) {
            return Err(Conflict::Race(self.other));
        }
        // A group of the same kind that is ordered before this one adds nothing to it: what follows this one follows both.
        let void = |old: &Stamp| !access.live(old) || (old.kind == stamp.kind && access.follows(old));
        if self.list == 0 {
            if void(&self.other) {
                self.other = stamp;
                return Ok(());
            }
            lists.0.push(Vec::new());
            self.list = lists.0.len() as u32;
        }
        let list = lists.of(self.list);
        if let Some(old) = list.iter().find(|old| access.races(old)) {
            return Err(Conflict::Race(*old));
        }
        if let Some(group) = list.iter_mut().chain([&mut self.other]).find(|group| group.same_group(&stamp)) {
            group.lanes |= stamp.lanes;
            return Ok(());
        }
        list.retain(|old| !void(old));
        if void(&self.other) {
            self.other = stamp;
            return Ok(());
        }
        // Two blocks are enough: whatever conflicts with a third conflicts with one of them.
        let same: Vec<_> = list.iter().chain([&self.other]).filter(|old| old.kind == stamp.kind).collect();
        let two_blocks = same.iter().any(|old| old.block != same[0].block);
        if !two_blocks {
            list.push(stamp);
        }
        Ok(())
    }
}

impl Lists {
    fn of(&mut self, list: u32) -> &mut Vec<Stamp> {
        &mut self.0[list as usize - 1]
    }

    fn clear(&mut self, list: u32) {
        if list != 0 {
            self.of(list).clear();
        }
    }

    /// Makes list `to` (made if need be) hold what list `from` holds.
    fn copy(&mut self, from: u32, to: &mut u32) {
        self.clear(*to);
        if from == 0 || self.of(from).is_empty() {
            return;
        }
        if *to == 0 {
            self.0.push(Vec::new());
            *to = self.0.len() as u32;
        }
        let stamps = self.of(from).clone();
        *self.of(*to) = stamps;
    }
}

/// Shadow of one page of a buffer.
pub(super) struct Page {
    /// The launch whose accesses it holds.
    pub launch: u64,
    pub shadow: Shadow,
    /// Those of launches that may still run when the present one starts.
    past: Vec<(u64, Shadow)>,
}

impl Page {
    pub fn new() -> Self {
        Page { launch: 0, shadow: Shadow::new(), past: Vec::new() }
    }

    /// The accesses of `launch` follow, for which those of the launches `ahead` still matter.
    pub fn begin(&mut self, launch: u64, ahead: &[Running]) {
        let matters = |id: u64| ahead.iter().any(|ahead| ahead.id == id);
        self.past.retain(|(id, _)| matters(*id));
        if matters(self.launch) {
            let shadow = std::mem::replace(&mut self.shadow, Shadow::new());
            self.past.push((self.launch, shadow));
        }
        self.launch = launch;
        self.shadow.clear(PAGE);
    }

    /// The accesses of a launch, if there are some.
    pub fn of(&self, launch: u64) -> Option<&Shadow> {
        if self.launch == launch {
            return Some(&self.shadow);
        }
        self.past.iter().find(|(id, _)| *id == launch).map(|(_, shadow)| shadow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emu::block::Random;
    use std::panic::Location;

    const LANES: usize = 3;
    const BLOCK_WARPS: usize = 3;
    const BLOCKS: usize = 2;
    const BYTES: usize = 12;

    /// The definition, taken literally: every access of the past, and for each lane the set of those that are ordered
    /// before what it does next.
    struct Past {
        accesses: Vec<(Kind, usize, usize)>,
        ordered: Vec<Vec<bool>>,
    }

    impl Past {
        fn new() -> Self {
            Past { accesses: Vec::new(), ordered: vec![Vec::new(); BLOCKS * BLOCK_WARPS * LANES] }
        }

        /// Whether an access would race with an earlier one.
        fn races(&mut self, lane: usize, kind: Kind, start: usize, len: usize) -> bool {
            let ordered = &mut self.ordered[lane];
            ordered.resize(self.accesses.len(), false);
            self.accesses.iter().zip(&*ordered).any(|(&(other, from, count), &ordered)| {
                let overlap = start < from + count && from < start + len;
                let harmless = kind == other && kind != Kind::Write;
                overlap && !harmless && !ordered
            })
        }

        fn access(&mut self, lane: usize, kind: Kind, start: usize, len: usize) {
            self.accesses.push((kind, start, len));
            self.ordered[lane].push(true);
        }

        fn meet(&mut self, lanes: &[usize]) {
            let mut all = vec![false; self.accesses.len()];
            for &lane in lanes {
                for (all, &one) in all.iter_mut().zip(&self.ordered[lane]) {
                    *all |= one;
                }
            }
            for &lane in lanes {
                self.ordered[lane] = all.clone();
            }
        }
    }

    /// Random programs: the shadow reports a race exactly when there is one.
    #[test]
    fn finds_every_race_and_nothing_else() {
        let mut random = Random::new(1, 2);
        let mut draw = move |n: usize| (random.next() >> 33) as usize % n;
        let (mut raced, mut whole) = (0, 0);
        let mut shadow = Shadow::new();
        let mut base = 0;
        for program in 0..30_000 {
            // Some programs go on in the shadow of the one before, as a block follows another.
            let blocks = 1 + program / 2 % BLOCKS;
            if program % 2 == 0 {
                shadow.clear(BYTES);
                base = 0;
            } else {
                shadow.next_block(BYTES);
            }
            let mut clocks: Vec<Clocks> = (0..blocks).map(|_| Clocks::new()).collect();
            for clocks in &mut clocks {
                clocks.begin(base);
            }
            let mut past = Past::new();
            // Programs with many barriers, with few, with many writes, with few.
            let (barriers, writes) = (1 + draw(12), 1 + draw(12));
            for step in 0..80 {
                let (block, warp, lane) = (draw(blocks), draw(BLOCK_WARPS), draw(LANES));
                let lane_of = |warp: usize, lane: usize| (block * BLOCK_WARPS + warp) * LANES + lane;
                match draw(16) {
                    0 if draw(barriers) > 0 => {
                        clocks[block].sync_warp(warp);
                        past.meet(&[0, 1, 2].map(|lane| lane_of(warp, lane)));
                        continue;
                    }
                    1..4 if draw(barriers) > 0 => {
                        let other = draw(BLOCK_WARPS);
                        let mask = if draw(2) == 0 { 7 } else { 1 << warp | 1 << other };
                        clocks[block].barrier(mask);
                        let members = (0..BLOCK_WARPS).filter(|warp| mask & 1 << warp != 0);
                        let lanes: Vec<_> = members.flat_map(|w| (0..LANES).map(move |l| (w, l))).collect();
                        past.meet(&lanes.iter().map(|&(warp, lane)| lane_of(warp, lane)).collect::<Vec<_>>());
                        continue;
                    }
                    _ => {}
                }
                let kind = match draw(16) {
                    n if n < writes => Kind::Write,
                    15 => Kind::Atomic,
                    _ => Kind::Read,
                };
                let len = [1, 2, 4, 8][draw(4)];
                let start = draw(BYTES / len) * len;
                let races = past.races(lane_of(warp, lane), kind, start, len);
                // Most races are left out, so that programs get long.
                if races && draw(8) > 0 {
                    continue;
                }
                let epoch = clocks[block].epoch(warp);
                let stamp = Stamp {
                    at: Some(Location::caller()),
                    block: block as u32,
                    epoch,
                    lanes: 1 << lane,
                    warp: warp as u8,
                    kind,
                };
                let access = Access { stamp, clock: clocks[block].of(warp as u8), base, written_only: false };
                let found = shadow.access(start..start + len, &access).is_err();
                assert_eq!(found, races, "program {program} step {step}");
                if races {
                    raced += 1;
                    break;
                }
                past.access(lane_of(warp, lane), kind, start, len);
                whole += usize::from(step == 79);
            }
            base = clocks.iter().map(Clocks::latest).max().unwrap_or(0);
        }
        // Both outcomes are common.
        assert!(raced > 1_000 && whole > 1_000, "{raced} {whole}");
    }
}
