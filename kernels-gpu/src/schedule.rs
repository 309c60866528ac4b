//! Which unit of work a persistent worker takes next, and where its weights lie ([`Work`]).
//!
//! [`Schedule`]: Unit u is tile u mod `tiles` of entry u / `tiles`; a worker that starts at
//! unit `first` goes on in steps of the number of workers. Fixed in advance: no atomics, no influence on any bit.

use crate::route_prep::RECORD_WORDS;
use core::num::NonZeroU32;
use cuda_std::memory::In;

/// What a persistent warp works through.
pub trait Work: Copy {
    /// Whether there is such a unit.
    fn has(&self, unit: Unit) -> bool;
    /// The warp's next unit.
    fn next(&self, unit: Unit) -> Unit;
    /// The expert whose matrix a unit reads.
    fn expert(&self, unit: Unit) -> u32;
    /// The rows of a unit's tile for the lanes with r mod 4 = `j`.
    fn rows(&self, unit: Unit, j: u32) -> Rows;
}

/// Matrix rows of a tile for the lanes with r mod 4 = j: row 4i + j of half 0 (rows 0 to 7) or 1 (rows 8 to 15) of 16 rows number
/// n is `first[half]` + (n·`next` + i)·step, for i = 0 and 1, but at most `last`.
#[derive(Clone, Copy)]
pub struct Rows {
    /// First row of each half.
    pub first: [u32; 2],
    /// Distance of neighbours.
    pub step: u32,
    /// Neighbours from one 16 rows to the next.
    pub next: u32,
    /// Rows past this one are copied from it (and never used).
    pub last: u32,
}

impl Rows {
    /// Row i of a half of 16 rows number `tile`.
    #[inline(always)]
    pub fn at(self, half: usize, tile: u32, i: u32) -> u32 {
        (self.first[half] + (tile * self.next + i) * self.step).min(self.last)
    }
}

/// Which matrix rows a tile has.
pub trait Tiles: Copy {
    /// Those of tile `tile` for the lanes with r mod 4 = `j`.
    fn rows(&self, tile: u32, j: u32) -> Rows;
}

/// Units that are entries of the routing table times tiles.
#[derive(Clone, Copy)]
pub struct Entries<T> {
    /// Their order.
    pub schedule: Schedule,
    /// [entries, RECORD_WORDS] records.
    pub entries: In<u32>,
    /// The tiles.
    pub tiles: T,
}

impl<T> Entries<T> {
    /// Pairs of a unit.
    #[inline(always)]
    pub fn count(&self, unit: Unit) -> u32 {
        self.entries.load((unit.entry * RECORD_WORDS) as usize + 1)
    }
}

impl<T: Tiles> Work for Entries<T> {
    #[inline(always)]
    fn has(&self, unit: Unit) -> bool {
        self.schedule.has(unit)
    }
    #[inline(always)]
    fn next(&self, unit: Unit) -> Unit {
        self.schedule.next(unit)
    }
    #[inline(always)]
    fn expert(&self, unit: Unit) -> u32 {
        self.entries.load((unit.entry * RECORD_WORDS) as usize)
    }
    #[inline(always)]
    fn rows(&self, unit: Unit, j: u32) -> Rows {
        self.tiles.rows(unit.tile, j)
    }
}

/// All units of a launch.
#[derive(Clone, Copy)]
pub struct Schedule {
    entries: u32,
    tiles: u32,
    step_entries: u32,
    step_tiles: u32,
}

/// One unit of work.
#[derive(Clone, Copy)]
pub struct Unit {
    /// Entry of the routing table.
    pub entry: u32,
    /// Tile of the matrix.
    pub tile: u32,
}

impl Schedule {
    /// `tiles` tiles for each of `entries` entries, shared by `workers` workers; and the unit of worker `first`.
    #[inline(always)]
    pub fn new(entries: u32, tiles: u32, workers: u32, first: u32) -> (Self, Unit) {
        // Dividing by a NonZero needs no check for zero, and so no panic in the kernel.
        let divisor = NonZeroU32::new(tiles).unwrap_or(NonZeroU32::MIN);
        let schedule = Schedule { entries, tiles, step_entries: workers / divisor, step_tiles: workers % divisor };
        (schedule, Unit { entry: first / divisor, tile: first % divisor })
    }

    /// Whether there is such a unit.
    #[inline(always)]
    pub fn has(&self, unit: Unit) -> bool {
        unit.entry < self.entries
    }

    /// The worker's next unit.
    #[inline(always)]
    pub fn next(&self, unit: Unit) -> Unit {
        let (entry, tile) = (unit.entry + self.step_entries, unit.tile + self.step_tiles);
        if tile < self.tiles { Unit { entry, tile } } else { Unit { entry: entry + 1, tile: tile - self.tiles } }
    }
}
