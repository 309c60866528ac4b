//! The table of operations around the GEMMs: microseconds, and how near they come to a copy of as many bytes.

use super::recorded::recorded_op;
use super::timing::{ROTATION, noise, time};
use crate::device::{Buffer, DeviceHandle, Gpu, Grid, launch};
use crate::diff::Random;
use crate::error::Result;
use crate::ops::silu_mul::{GateUp, Quantised, SiluMul};
use crate::ops::sort::{SortInputs, SortOutputs, SortPlan};
use crate::ops::unpermute::{Rounding, Routed, SharedExpert, SharedGate};
use crate::ops::worklist::{self, Items, WorklistInputs};
use crate::ops::{Rows, quant, unpermute};
use crate::types::Gating;
use kernels_gpu::bandwidth;
use serde::Serialize;
use std::sync::Arc;

/// Experts of a token.
const TOP_K: usize = 8;
/// Calls in one graph.
const CALLS: usize = 12;
/// Tile of the work-lists: rows and columns.
const TILE: (usize, usize) = (64, 128);

/// What to measure.
#[derive(Clone, Debug)]
pub struct OpsOptions {
    /// Numbers of tokens. Activations are measured on eight rows a token.
    pub tokens: Vec<usize>,
    /// Hidden sizes.
    pub hidden: Vec<usize>,
    /// Intermediate sizes.
    pub intermediate: Vec<usize>,
    /// Numbers of experts.
    pub experts: Vec<usize>,
}

impl Default for OpsOptions {
    fn default() -> Self {
        OpsOptions {
            tokens: vec![1, 64, 1024, 8192],
            hidden: vec![2048, 7168],
            intermediate: vec![768, 2048],
            experts: vec![128, 256],
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct OpsRow {
    /// Operation.
    pub operation: &'static str,
    /// Its width or number of experts.
    pub size: usize,
    /// Tokens.
    pub tokens: usize,
    /// Microseconds of one call.
    pub microseconds: f32,
    /// Bytes read and written once.
    pub bytes: usize,
    /// Microseconds of a copy that reads half as many bytes and writes the other half.
    pub copy_microseconds: Option<f32>,
    /// Recorded microseconds of another implementation.
    pub recorded_microseconds: Option<f32>,
    /// Its name.
    pub recorded_name: Option<&'static str>,
}

/// Memory that all measurements share.
struct Bench<'a> {
    gpu: &'a Arc<Gpu>,
    device: DeviceHandle,
    /// Values of about normal distribution.
    values: Buffer<u16>,
    /// What the copy writes.
    sink: Buffer<u8>,
}

impl Bench<'_> {
    /// Operands whose calls come back only after [`ROTATION`] bytes.
    fn sets(bytes: usize) -> usize {
        ROTATION.div_ceil(bytes.max(1)).clamp(2, CALLS)
    }

    /// First element of the input of call `call`, of `len` elements.
    fn offset(&self, call: usize, len: usize) -> usize {
        let places = (self.values.len() / len.next_multiple_of(128)).max(1);
        call % places * len.next_multiple_of(128)
    }

    fn time(&self, mut call: impl FnMut(usize) -> Result<()>) -> Result<f32> {
        time(self.gpu, CALLS, || (0..CALLS).try_for_each(&mut call))
    }

    /// A copy that moves `bytes` bytes in all.
    fn copy(&self, bytes: usize) -> Result<f32> {
        let kernel = bandwidth::copy::copy_bytes;
        self.device.prepare(kernel.into(), 0)?;
        let blocks = (bytes / 2).div_ceil(bandwidth::BLOCK_BYTES);
        let half = blocks * bandwidth::BLOCK_BYTES;
        let place = |call: usize, len: usize| call % (len / half).max(1) * half;
        self.time(|call| {
            let args = bandwidth::copy::Args {
                from: self.values.part::<u8>(place(call, self.values.len() * 2), half).into(),
                to: self.sink.part(place(call % Self::sets(bytes), self.sink.len()), half),
            };
            launch(&*self.device, kernel, Grid { blocks: blocks as u32, shared_bytes: 0 }, args)
        })
    }

    fn row(&self, operation: &'static str, size: usize, tokens: usize, us: f32, bytes: usize) -> Result<OpsRow> {
        // What sorts and lists move is too little to be compared with a copy.
        let copies = !matches!(operation, "sort_by_expert" | "tile_worklist");
        let recorded = recorded_op(operation, size, tokens);
        Ok(OpsRow {
            operation,
            size,
            tokens,
            microseconds: us,
            bytes,
            copy_microseconds: if copies { Some(self.copy(bytes)?) } else { None },
            recorded_microseconds: recorded.map(|(us, _)| us),
            recorded_name: recorded.map(|(_, name)| name),
        })
    }

    fn quant(&self, tokens: usize, cols: usize) -> Result<OpsRow> {
        let (elements, scales) = (tokens * cols, tokens * quant::scales_per_row(cols));
        let bytes = elements * 3 + scales * 4;
        let sets = Self::sets(bytes);
        let outputs = (0..sets)
            .map(|_| Ok((Buffer::new(&self.device, elements)?, Buffer::new(&self.device, scales)?)))
            .collect::<Result<Vec<_>>>()?;
        quant::prepare(&self.device)?;
        let us = self.time(|call| {
            let x = Rows { buffer: &self.values, offset: self.offset(call, elements), stride: cols };
            let (codes, scales) = &outputs[call % sets];
            quant::enqueue(&self.device, x, tokens, cols, codes, scales)
        })?;
        self.row("per_token_group_quant_fp8", cols, tokens, us, bytes)
    }

    /// Gate and up as the two halves of each row.
    fn gate_up(&self, call: usize, rows: usize, cols: usize) -> GateUp<'_> {
        let offset = self.offset(call, rows * cols * 2);
        let half = |offset| Rows { buffer: &self.values, offset, stride: 2 * cols };
        GateUp { gate: half(offset), up: half(offset + cols) }
    }

    fn silu_mul(&self, tokens: usize, cols: usize) -> Result<[OpsRow; 2]> {
        let rows = tokens * TOP_K;
        let silu_mul = SiluMul::new(&self.device, Gating::default())?;
        let (elements, scales) = (rows * cols, rows * quant::scales_per_row(cols));
        let bytes = elements * 6;
        let sets = Self::sets(bytes);
        let outputs = (0..sets).map(|_| Buffer::new(&self.device, elements)).collect::<Result<Vec<_>>>()?;
        let us = self.time(|call| {
            let from = self.gate_up(call, rows, cols);
            silu_mul.enqueue(from, rows, cols, &outputs[call % sets])
        })?;
        drop(outputs);
        let alone = self.row("silu_mul", cols, tokens, us, bytes)?;
        let bytes = elements * 5 + scales * 4;
        let sets = Self::sets(bytes);
        let outputs = (0..sets)
            .map(|_| Ok((Buffer::new(&self.device, elements)?, Buffer::new(&self.device, scales)?)))
            .collect::<Result<Vec<_>>>()?;
        let us = self.time(|call| {
            let (codes, scales) = &outputs[call % sets];
            let to = Quantised { codes, scales, copy: None };
            silu_mul.enqueue_quant(self.gate_up(call, rows, cols), rows, cols, to)
        })?;
        Ok([alone, self.row("silu_mul_quant_fp8", cols, tokens, us, bytes)?])
    }

    /// `tokens` tokens with distinct experts, uniformly.
    fn ids(&self, tokens: usize, experts: usize) -> Vec<i32> {
        let mut random = Random(tokens as u64);
        let mut ids = Vec::with_capacity(tokens * TOP_K);
        for token in 0..tokens {
            while ids.len() < (token + 1) * TOP_K {
                let id = (random.next() % experts as u64) as i32;
                if !ids[token * TOP_K..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        ids
    }

    fn sort(&self, tokens: usize, experts: usize) -> Result<[OpsRow; 2]> {
        let device = &self.device;
        let pairs = tokens * TOP_K;
        let ids = Buffer::from_slice(device, &self.ids(tokens, experts))?;
        let list = || Buffer::<i32>::new(device, pairs);
        let (sorted_token_ids, sorted_pairs, token_to_perm) = (list()?, list()?, list()?);
        let expert_offsets = Buffer::new(device, experts + 1)?;
        let status = Buffer::from_slice(device, &[0u32])?;
        let plan = SortPlan::new(device, tokens, TOP_K, experts)?;
        let outputs = SortOutputs {
            expert_offsets: &expert_offsets,
            sorted_token_ids: &sorted_token_ids,
            sorted_pairs: &sorted_pairs,
            token_to_perm: &token_to_perm,
            status: &status,
        };
        let us =
            self.time(|_| plan.enqueue(SortInputs { tokens, ids: &ids, gate: None, up: None, down: None }, outputs))?;
        let sort = self.row("sort_by_expert", experts, tokens, us, pairs * 16)?;

        let n_tiles = 2048 / TILE.1;
        let capacity = worklist::capacity(pairs, experts, n_tiles, TILE.0).unwrap_or(0);
        let items = Buffer::new(device, capacity * Items::Wide.words())?;
        let total = Buffer::<u32>::new(device, 1)?;
        worklist::prepare(device)?;
        let inputs = WorklistInputs {
            pairs,
            experts,
            expert_offsets: &expert_offsets,
            gate: None,
            up: None,
            n_tiles,
            m_tile: TILE.0,
        };
        let us = self.time(|_| worklist::enqueue(device, Items::Wide, inputs, &items, &total))?;
        let bytes = total.download()?[0] as usize * 16;
        Ok([sort, self.row("tile_worklist", experts, tokens, us, bytes)?])
    }

    /// The way back to tokens: alone, the shared expert's part alone, and both in one pass with two roundings and with one.
    fn unpermute(&self, tokens: usize, output: usize) -> Result<[OpsRow; 4]> {
        let device = &self.device;
        let (pairs, width) = (tokens * TOP_K, output * 2);
        let reduced = reduced_bytes(tokens, output);
        let sets = Self::sets(reduced);
        let mut random = Random(1);
        let mut rows: Vec<i32> = (0..pairs as i32).collect();
        for i in (1..pairs).rev() {
            rows.swap(i, random.next() as usize % (i + 1));
        }
        let token_to_perm = Buffer::from_slice(device, &rows)?;
        let weights = Buffer::from_slice(device, &vec![1.0 / TOP_K as f32; pairs])?;
        let expert_offsets = Buffer::from_slice(device, &[0, pairs as i32])?;
        let gate_w = Buffer::from_slice(device, &vec![0x3C00u16; output])?;
        let buffers = (0..sets)
            .map(|set| {
                Ok((
                    noise::<u16>(device, pairs * output, set as u32, bandwidth::E4M3_SCALES)?,
                    Buffer::new(device, tokens * output)?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        unpermute::prepare(device)?;
        let routed = |y| Routed {
            tokens,
            top_k: TOP_K,
            experts: 1,
            output,
            y,
            token_to_perm: &token_to_perm,
            weights: &weights,
            expert_offsets: &expert_offsets,
        };
        // Rows of x, of the shared expert and of a routed sum.
        let rows_of = |call| {
            let len = tokens * output;
            self.values.view::<u16>(self.offset(call, len) * 2, len)
        };
        let reduce = self.time(|call| {
            let (y, out) = &buffers[call % sets];
            unpermute::reduce(device, routed(y), out)
        })?;
        let with_shared = |call: usize, then: &dyn Fn(SharedExpert<'_>, &Buffer<u16>) -> Result<()>| {
            let (x, shared) = (rows_of(3 * call), rows_of(3 * call + 1));
            let gate = Some(SharedGate { x: &x, gate_w: &gate_w, hidden: output });
            then(SharedExpert { shared: &shared, gate }, &rows_of(3 * call + 2))
        };
        let blend = self.time(|call| {
            let out = &buffers[call % sets].1;
            with_shared(call, &|shared, sum| unpermute::blend(device, tokens, output, sum, shared, out))
        })?;
        let both = |rounding| {
            self.time(|call| {
                let (y, out) = &buffers[call % sets];
                with_shared(call, &|shared, _| unpermute::reduce_blend(device, rounding, routed(y), shared, out))
            })
        };
        let (twice, once) = (both(Rounding::Twice)?, both(Rounding::Once)?);
        drop(buffers);
        let joined = joined_bytes(tokens, output);
        Ok([
            self.row("unpermute_reduce", output, tokens, reduce, reduced)?,
            self.row("blend", output, tokens, blend, (4 * tokens + 1) * width)?,
            self.row("unpermute_blend", output, tokens, twice, joined)?,
            self.row("weighted_sum_blend", output, tokens, once, joined)?,
        ])
    }
}

/// Bytes that the weighted sum of `tokens` tokens moves: rows, sums, rows' places and weights.
fn reduced_bytes(tokens: usize, output: usize) -> usize {
    tokens * (TOP_K + 1) * output * 2 + tokens * TOP_K * 8
}

/// The same together with the shared expert's part: its rows, its gate's operands.
fn joined_bytes(tokens: usize, output: usize) -> usize {
    reduced_bytes(tokens, output) + (2 * tokens + 1) * output * 2
}

/// Measures everything in `options`; `report` sees each row as it is done.
pub fn ops(gpu: &Arc<Gpu>, options: &OpsOptions, mut report: impl FnMut(&OpsRow)) -> Result<Vec<OpsRow>> {
    let device: DeviceHandle = gpu.clone();
    let most = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(1);
    let tokens = most(&options.tokens);
    let widest = (2 * TOP_K * most(&options.intermediate)).max(most(&options.hidden));
    let moved = joined_bytes(tokens, most(&options.hidden)).max(tokens * widest * 4);
    let len = (tokens * widest).max(moved.div_ceil(4)).max(ROTATION / 2) + bandwidth::BLOCK_BYTES;
    let mut random = Random(1);
    let mut values: Vec<u16> = (0..1 << 20)
        .map(|_| half::bf16::from_f32((0..4).map(|_| random.in_range(-1.0, 1.0)).sum()).to_bits())
        .collect();
    while values.len() < len {
        values.extend_from_within(..values.len().min(len - values.len()));
    }
    let sink = Buffer::new(&device, len * 2)?;
    let bench = Bench { gpu, values: Buffer::from_slice(&device, &values)?, sink, device };
    let mut rows = Vec::new();
    let mut done = |row: OpsRow, rows: &mut Vec<OpsRow>| {
        report(&row);
        rows.push(row);
    };
    for &experts in &options.experts {
        for &tokens in &options.tokens {
            bench.sort(tokens, experts)?.into_iter().for_each(|row| done(row, &mut rows));
        }
    }
    for &hidden in &options.hidden {
        for &tokens in &options.tokens {
            done(bench.quant(tokens, hidden)?, &mut rows);
        }
    }
    for &intermediate in &options.intermediate {
        for &tokens in &options.tokens {
            bench.silu_mul(tokens, intermediate)?.into_iter().for_each(|row| done(row, &mut rows));
        }
    }
    for &hidden in &options.hidden {
        for &tokens in &options.tokens {
            bench.unpermute(tokens, hidden)?.into_iter().for_each(|row| done(row, &mut rows));
        }
    }
    Ok(rows)
}
