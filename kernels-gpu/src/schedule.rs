//! Which unit of work a persistent worker takes next. Unit u is tile u mod `tiles` of entry u / `tiles`; a worker that starts at
//! unit `first` goes on in steps of the number of workers. Fixed in advance: no atomics, no influence on any bit.

use core::num::NonZeroU32;
use cuda_std::memory::In;

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
    /// `tiles` tiles for each of `entry_count[0]` entries, shared by `workers` workers; and the unit of worker `first`.
    #[inline(always)]
    pub fn new(entry_count: In<u32>, tiles: u32, workers: u32, first: u32) -> (Self, Unit) {
        // Dividing by a NonZero needs no check for zero, and so no panic in the kernel.
        let divisor = NonZeroU32::new(tiles).unwrap_or(NonZeroU32::MIN);
        let schedule = Schedule {
            entries: entry_count.load(0),
            tiles,
            step_entries: workers / divisor,
            step_tiles: workers % divisor,
        };
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
