//! Where the lanes of a warp and the warps of a block meet.

use super::{At, Barrier, Block, FULL, WARP};
use crate::emu::fault::{Fault, FaultKind};
use crate::emu::shadow::Kind;
use crate::emu::tensor;

/// Operations at which the lanes of a warp meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::emu) enum Meet {
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

impl Block {
    /// The running lane comes to a meeting of its warp. Returns whether it has to wait.
    pub(super) fn come(&mut self, meet: Meet, at: At, input: &[u32]) -> bool {
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
            self.clocks.barrier(warps);
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
    pub(super) fn exit(&mut self) {
        let (w, lane) = (self.current as usize / WARP, self.current as usize % WARP);
        let gone = self.party(self.current, None);
        if !self.lanes[self.current as usize].waited {
            let message = "has ended without a wait, so kernels that come are not behind those ahead".to_owned();
            self.report(FaultKind::MissingWait, self.current, None, None, message);
        }
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
    pub(super) fn finished(&mut self) -> Result<(), Fault> {
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
            self.clocks.sync_warp(w);
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
}

/// The fault when lanes are at two different operations.
fn divergence(a: Meet, b: Meet) -> FaultKind {
    if a.is_barrier() || b.is_barrier() { FaultKind::DivergentBarrier } else { FaultKind::DivergentWarp }
}

/// The same call may have several `Location`s, one a copy of the code around it.
fn same_place(a: At, b: At) -> bool {
    std::ptr::eq(a, b) || a == b
}
