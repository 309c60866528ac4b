//! Rows sorted by expert.

use super::Addresses;
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::plan::{MAX_EXPERTS, MAX_TOP_K};
use kernels_gpu::sort::{
    self, THREADS, count_shared_bytes, counting_warps, sort_by_expert, sort_count, sort_shared_bytes,
};

/// Most pairs (tokens times top-k) that are sorted.
pub const MAX_PAIRS: usize = i32::MAX as usize;
/// Up to so many pairs one block is fastest: more need a launch for their counts.
const ONE_BLOCK: usize = 4096;
/// Counters that each block may read of the others'.
const COUNTERS: usize = 1 << 22;

/// What is sorted.
#[derive(Clone, Copy, Debug)]
pub struct SortInputs<'a> {
    /// Number of tokens M. 0 does nothing.
    pub tokens: usize,
    /// [M, top_k] expert ids; any i32. A pair is live where its id is in 0..E and no given table has a 0 there.
    pub ids: &'a Buffer<i32>,
    /// `[E]` addresses of gate weights, 0 for an expert that is not resident.
    pub gate: Option<Addresses<'a>>,
    /// As `gate`, of up.
    pub up: Option<Addresses<'a>>,
    /// As `gate`, of down.
    pub down: Option<Addresses<'a>>,
}

/// Where the result goes.
#[derive(Clone, Copy, Debug)]
pub struct SortOutputs<'a> {
    /// `[E + 1]` first row of each expert, then the number of live pairs.
    pub expert_offsets: &'a Buffer<i32>,
    /// [M·top_k] token of each row, -1 behind the last.
    pub sorted_token_ids: &'a Buffer<i32>,
    /// [M·top_k] pair of each row, -1 behind the last.
    pub sorted_pairs: &'a Buffer<i32>,
    /// [M·top_k] row of each pair, -1 where it is not live.
    pub token_to_perm: &'a Buffer<i32>,
    /// `[1]` status bits of [`kernels_gpu::status`]; an id >= E sets one. Bits stay until the caller clears them.
    pub status: &'a Buffer<u32>,
}

/// A sort for up to a number of tokens: ready kernels, and scratch memory for counts.
#[derive(Debug)]
pub struct SortPlan {
    sizes: SortSizes,
    counts: Buffer<u32>,
}

/// As [`SortPlan`], without the scratch memory.
#[derive(Clone, Debug)]
pub(crate) struct SortSizes {
    device: DeviceHandle,
    max_tokens: usize,
    top_k: usize,
    experts: usize,
    blocks: usize,
}

impl SortPlan {
    /// Errors name `experts`, `top_k` or `max_tokens`.
    pub fn new(device: &DeviceHandle, max_tokens: usize, top_k: usize, experts: usize) -> Result<Self> {
        Self::with_counts(SortSizes::new(device, max_tokens, top_k, experts)?)
    }

    /// As [`SortPlan::new`] with a given most number of blocks, on which no result depends.
    pub fn with_blocks(
        device: &DeviceHandle,
        max_tokens: usize,
        top_k: usize,
        experts: usize,
        blocks: usize,
    ) -> Result<Self> {
        Self::with_counts(SortSizes::with_blocks(device, max_tokens, top_k, experts, blocks)?)
    }

    fn with_counts(sizes: SortSizes) -> Result<Self> {
        let counts = Buffer::new(&sizes.device, sizes.counters())?;
        Ok(SortPlan { sizes, counts })
    }

    /// Bytes of scratch memory.
    pub fn workspace_bytes(&self) -> usize {
        self.counts.len() * 4
    }

    /// Most tokens of a sort.
    pub fn max_tokens(&self) -> usize {
        self.sizes.max_tokens
    }

    /// Enqueues the sort. Errors name the argument.
    pub fn enqueue(&self, inputs: SortInputs<'_>, outputs: SortOutputs<'_>) -> Result<()> {
        self.sizes.enqueue(inputs, outputs, &self.counts)
    }
}

impl SortSizes {
    /// Errors name `experts`, `top_k` or `max_tokens`.
    pub(crate) fn new(device: &DeviceHandle, max_tokens: usize, top_k: usize, experts: usize) -> Result<Self> {
        let resident = device.properties().multiprocessors as usize;
        Self::with_blocks(device, max_tokens, top_k, experts, resident.min((COUNTERS / experts.max(1)).isqrt()))
    }

    fn with_blocks(
        device: &DeviceHandle,
        max_tokens: usize,
        top_k: usize,
        experts: usize,
        blocks: usize,
    ) -> Result<Self> {
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(Error::argument("experts", experts, format!("1 to {MAX_EXPERTS}")));
        }
        if !(1..=MAX_TOP_K).contains(&top_k) {
            return Err(Error::argument("top_k", top_k, format!("1 to {MAX_TOP_K}")));
        }
        if max_tokens > MAX_PAIRS / top_k {
            let needed = format!("at most {} for top_k {top_k}", MAX_PAIRS / top_k);
            return Err(Error::argument("max_tokens", max_tokens, needed));
        }
        if blocks == 0 {
            return Err(Error::argument("blocks", blocks, "at least 1"));
        }
        // The most shared memory that any number of pairs takes.
        let limit = device.properties().shared_per_block;
        let warps = counting_warps(u32::MAX, experts as u32, limit);
        device.prepare(sort_count::sort_count_i32.into(), count_shared_bytes(warps, experts as u32))?;
        device.prepare(sort_by_expert::sort_by_expert_i32.into(), sort_shared_bytes(warps, experts as u32))?;
        Ok(SortSizes { device: device.clone(), max_tokens, top_k, experts, blocks })
    }

    /// Chunks that up to `pairs` pairs can be divided into, 0 where one is enough.
    fn most_chunks(pairs: usize, blocks: usize) -> usize {
        if blocks == 1 || pairs <= ONE_BLOCK { 0 } else { blocks.min(pairs.div_ceil(THREADS as usize)) }
    }

    /// Pairs of a chunk.
    fn chunk(&self, pairs: usize) -> usize {
        if Self::most_chunks(pairs, self.blocks) == 0 {
            pairs
        } else {
            pairs.div_ceil(self.blocks).next_multiple_of(THREADS as usize)
        }
    }

    /// Elements of scratch memory.
    pub(crate) fn counters(&self) -> usize {
        Self::most_chunks(self.max_tokens * self.top_k, self.blocks) * self.experts
    }

    /// Enqueues the sort with `counts` as scratch memory. Errors name the argument.
    pub(crate) fn enqueue(&self, inputs: SortInputs<'_>, outputs: SortOutputs<'_>, counts: &Buffer<u32>) -> Result<()> {
        let SortSizes { device, top_k, experts, .. } = self;
        if inputs.tokens > self.max_tokens {
            let needed = format!("at most {}, the plan's maximum", self.max_tokens);
            return Err(Error::argument("tokens", inputs.tokens, needed));
        }
        let pairs = inputs.tokens * top_k;
        inputs.ids.check("ids", device, pairs)?;
        let gate = Addresses::of(inputs.gate, "gate", device, *experts)?;
        let up = Addresses::of(inputs.up, "up", device, *experts)?;
        let down = Addresses::of(inputs.down, "down", device, *experts)?;
        outputs.expert_offsets.check("expert_offsets", device, experts + 1)?;
        outputs.sorted_token_ids.check("sorted_token_ids", device, pairs)?;
        outputs.sorted_pairs.check("sorted_pairs", device, pairs)?;
        outputs.token_to_perm.check("token_to_perm", device, pairs)?;
        outputs.status.check("status", device, 1)?;
        counts.check("counts", device, self.counters())?;
        if pairs == 0 {
            return Ok(());
        }
        let chunk = self.chunk(pairs);
        let blocks = pairs.div_ceil(chunk) as u32;
        let (chunk, experts) = (chunk as u32, *experts as u32);
        let warps = counting_warps(chunk, experts, device.properties().shared_per_block);
        if blocks > 1 {
            let grid = Grid { blocks, shared_bytes: count_shared_bytes(warps, experts) };
            let args = sort_count::Args {
                ids: inputs.ids.as_ref(),
                counts: counts.as_mut(),
                pairs: pairs as u32,
                experts,
                chunk,
                warps,
            };
            launch(&**device, sort_count::sort_count_i32, grid, args)?;
        }
        let grid = Grid { blocks, shared_bytes: sort_shared_bytes(warps, experts) };
        let args = sort::sort_by_expert::Args {
            ids: inputs.ids.as_ref(),
            gate,
            up,
            down,
            counts: counts.as_ref(),
            expert_offsets: outputs.expert_offsets.as_mut(),
            sorted_token_ids: outputs.sorted_token_ids.as_mut(),
            sorted_pairs: outputs.sorted_pairs.as_mut(),
            token_to_perm: outputs.token_to_perm.as_mut(),
            status: outputs.status.as_mut(),
            pairs: pairs as u32,
            top_k: *top_k as u32,
            experts,
            chunk,
            warps,
        };
        launch(&**device, sort_by_expert::sort_by_expert_i32, grid, args)
    }
}
