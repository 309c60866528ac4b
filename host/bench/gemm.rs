//! The table of grouped GEMMs.

use super::timing::{noise, time};
use crate::device::{Buffer, DeviceHandle, Gpu, Grid, launch};
use crate::diff::Random;
use crate::error::Result;
use crate::ops::ExpertTable;
use crate::ops::gemm::{Activations, GateUpSilu, GateUpSiluArgs, GemmArgs, GemmKernel, GroupedGemm, Tiles, Weights};
use kernels_gpu::bandwidth;
use serde::Serialize;
use std::sync::Arc;

/// Experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct GemmShape {
    /// Name.
    pub name: &'static str,
    /// Hidden size.
    pub hidden: usize,
    /// Intermediate size.
    pub intermediate: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
}

/// The layers of the table.
pub const GEMM_SHAPES: [GemmShape; 5] = [
    GemmShape { name: "qwen3_235b", hidden: 4096, intermediate: 1536, experts: 128, top_k: 8 },
    GemmShape { name: "qwen3_30b", hidden: 2048, intermediate: 768, experts: 128, top_k: 8 },
    GemmShape { name: "qwen36_35b", hidden: 2048, intermediate: 512, experts: 256, top_k: 8 },
    GemmShape { name: "dsv3_tp8", hidden: 7168, intermediate: 256, experts: 256, top_k: 8 },
    GemmShape { name: "dsv3_full", hidden: 7168, intermediate: 2048, experts: 256, top_k: 8 },
];

/// A kernel of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimedGemm {
    /// One product.
    Product(GemmKernel),
    /// Gate, up, activation and quantiser, by the blocks of a multiprocessor.
    GateUpSilu {
        /// Two, not one.
        two_blocks: bool,
    },
}

impl TimedGemm {
    /// All of them.
    pub fn all() -> Vec<TimedGemm> {
        let fused = [false, true].map(|two_blocks| TimedGemm::GateUpSilu { two_blocks });
        GemmKernel::ALL.into_iter().map(TimedGemm::Product).chain(fused).collect()
    }

    /// Its kernel's name.
    pub const fn name(self) -> &'static str {
        match self {
            TimedGemm::Product(kernel) => kernel.name(),
            TimedGemm::GateUpSilu { two_blocks: false } => "moe_w8a8_gateup_silu_e4m3_w1",
            TimedGemm::GateUpSilu { two_blocks: true } => "moe_w8a8_gateup_silu_e4m3_w2",
        }
    }

    /// Rows of the table for each number of tokens.
    pub const fn projections(self) -> usize {
        if matches!(self, TimedGemm::Product(_)) { 2 } else { 1 }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct GemmOptions {
    /// Layers.
    pub shapes: Vec<GemmShape>,
    /// Numbers of tokens.
    pub tokens: Vec<usize>,
    /// Kernels.
    pub kernels: Vec<TimedGemm>,
    /// All tokens choose experts from the first `top_k` alone.
    pub crowded: bool,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct GemmRow {
    /// Layer.
    pub shape: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Kernel.
    pub kernel: &'static str,
    /// "gate" (k = hidden, n = intermediate, gathered rows), "down" (k = intermediate, n = hidden), or "gate+up" for both of the first
    /// kind with what joins them.
    pub projection: &'static str,
    /// Microseconds of one launch.
    pub microseconds: f32,
    /// TFLOP/s of the rows that count.
    pub tflops: f32,
    /// Share of the rate of a register-only loop.
    pub share: f32,
}

/// TFLOP/s of mma on registers alone.
pub fn multiply_rate(gpu: &Arc<Gpu>) -> Result<f32> {
    use bandwidth::multiply::*;
    let device: DeviceHandle = gpu.clone();
    device.prepare(multiply_f16.into(), 0)?;
    let sink = Buffer::<f32>::new(&device, 1)?;
    let (blocks, rounds) = (device.properties().multiprocessors * 2, 4096);
    let microseconds = time(gpu, 1, || {
        launch(&*device, multiply_f16, Grid { blocks, shared_bytes: 0 }, Args { rounds, sink: sink.as_mut() })
    })?;
    let warps = (blocks * bandwidth::THREADS / 32) as f32;
    Ok(warps * (rounds * bandwidth::ROUND) as f32 * (2 * 16 * 8 * 16) as f32 / microseconds / 1e6)
}

/// Rows of each expert, and the items of a work-list with tiles of `m_tile` rows.
fn items(counts: &[usize], m_tile: usize, n_tiles: usize) -> Vec<u32> {
    let mut items = Vec::new();
    let mut first = 0;
    for (expert, &count) in counts.iter().enumerate() {
        for tile in 0..count.div_ceil(m_tile) {
            let rows = (count - tile * m_tile).min(m_tile);
            for column in 0..n_tiles {
                items.extend([expert, first + tile * m_tile, rows, column].map(|word| word as u32));
            }
        }
        first += count;
    }
    items
}

/// Measures everything in `options`; `report` sees each row as it is done.
pub fn gemm(gpu: &Arc<Gpu>, options: &GemmOptions, mut report: impl FnMut(&GemmRow)) -> Result<(f32, Vec<GemmRow>)> {
    let device: DeviceHandle = gpu.clone();
    let rate = multiply_rate(gpu)?;
    let mut rows = Vec::new();
    for shape in &options.shapes {
        let GemmShape { hidden, intermediate, experts, top_k, .. } = *shape;
        let matrix = hidden * intermediate;
        // One copy of the weights: larger than the L2 at any real size.
        let codes = Arc::new(noise::<u8>(&device, experts * matrix, 1, bandwidth::E4M3_SCALES)?);
        let codes = ExpertTable::split("weights", codes, experts)?;
        let has = |wanted: fn(&TimedGemm) -> bool| options.kernels.iter().any(wanted);
        let fused = has(|kernel| matches!(kernel, TimedGemm::GateUpSilu { .. }));
        let ups = if fused { experts * matrix } else { experts };
        let ups = Arc::new(noise::<u8>(&device, ups, 5, bandwidth::E4M3_SCALES)?);
        let ups = ExpertTable::split("up", ups, experts)?;
        let wide =
            if has(|kernel| *kernel == TimedGemm::Product(GemmKernel::Bf16)) { experts * matrix } else { experts };
        let wide =
            ExpertTable::split("weights", Arc::new(noise::<u16>(&device, wide, 2, bandwidth::E4M3_SCALES)?), experts)?;
        let scale_blocks = hidden.div_ceil(128) * intermediate.div_ceil(128);
        let scales = Arc::new(Buffer::from_slice(&device, &vec![1.0 / 64.0; experts * scale_blocks])?);
        let scales = ExpertTable::split("b_scale", scales, experts)?;
        for &tokens in &options.tokens {
            let mut random = Random(tokens as u64);
            let mut of_expert = vec![Vec::new(); experts];
            for token in 0..tokens {
                let mut chosen = Vec::with_capacity(top_k);
                while chosen.len() < top_k {
                    let among = if options.crowded { top_k } else { experts };
                    let id = (random.next() % among as u64) as usize;
                    if !chosen.contains(&id) {
                        chosen.push(id);
                        of_expert[id].push(token as i32);
                    }
                }
            }
            let counts: Vec<usize> = of_expert.iter().map(Vec::len).collect();
            let ids = Buffer::from_slice(&device, &of_expert.concat())?;
            let mut offsets = vec![0i32];
            for &count in &counts {
                offsets.push(offsets[offsets.len() - 1] + count as i32);
            }
            let offsets = Buffer::from_slice(&device, &offsets)?;
            let pairs = tokens * top_k;
            for (projection, n, k, a_rows) in
                [("gate", intermediate, hidden, tokens), ("down", hidden, intermediate, pairs)]
            {
                let a8 = noise::<u8>(&device, a_rows * k, 3, bandwidth::E4M3_SCALES)?;
                let a16 = noise::<u16>(&device, a_rows * k, 4, bandwidth::E4M3_SCALES)?;
                let a_scales = Buffer::from_slice(&device, &vec![1.0f32 / 64.0; a_rows * k.div_ceil(128)])?;
                let out = Buffer::<u16>::new(&device, pairs * n)?;
                let mut done = |kernel: TimedGemm, projection, products: usize, microseconds: f32| {
                    let tflops = 2.0 * (products * pairs * n * k) as f32 / microseconds / 1e6;
                    let name = kernel.name();
                    let row = GemmRow {
                        shape: shape.name,
                        tokens,
                        kernel: name,
                        projection,
                        microseconds,
                        tflops,
                        share: tflops / rate,
                    };
                    report(&row);
                    rows.push(row);
                };
                // Padded to the list's capacity.
                let listed = |m_tile: u32, n_tiles: u32| -> Result<(Buffer<u32>, Buffer<u32>)> {
                    let (m_tile, n_tiles) = (m_tile as usize, n_tiles as usize);
                    let mut list = items(&counts, m_tile, n_tiles);
                    let total = Buffer::from_slice(&device, &[list.len() as u32 / 4])?;
                    list.resize(4 * (pairs.div_ceil(m_tile) + experts.min(pairs)) * n_tiles, 0);
                    Ok((Buffer::from_slice(&device, &list)?, total))
                };
                for &timed in &options.kernels {
                    let kernel = match timed {
                        TimedGemm::Product(kernel) => kernel,
                        TimedGemm::GateUpSilu { .. } if projection == "down" => continue,
                        TimedGemm::GateUpSilu { two_blocks } => {
                            let op = GateUpSilu::new(&device, two_blocks, experts, n, k)?;
                            let (worklist, total) = listed(op.m_tile(), op.n_tiles())?;
                            let out = Buffer::<u8>::new(&device, pairs * n)?;
                            let out_scale = Buffer::<f32>::new(&device, pairs * n.div_ceil(128))?;
                            let args = GateUpSiluArgs {
                                worklist: &worklist,
                                total: &total,
                                a: &a8,
                                a_scale: &a_scales,
                                a_rows,
                                sorted_token_ids: Some(&ids),
                                gate: &codes,
                                gate_scale: &scales,
                                up: &ups,
                                up_scale: &scales,
                                limit: None,
                                out: &out,
                                out_scale: &out_scale,
                                rows: pairs,
                            };
                            let microseconds = time(gpu, 2, || (0..2).try_for_each(|_| op.launch(args)))?;
                            done(timed, "gate+up", 2, microseconds);
                            continue;
                        }
                    };
                    let op = GroupedGemm::new(&device, kernel, experts, n, k)?;
                    let (worklist, total) = listed(op.m_tile(), op.n_tiles())?;
                    let args = GemmArgs {
                        tiles: match kernel {
                            GemmKernel::W8a8 => Tiles::Dense {
                                expert_offsets: &offsets,
                                // A caller that does not wait for the routing has to allow for the fullest expert possible.
                                max_m_tiles: pairs.div_ceil(op.m_tile() as usize),
                            },
                            _ => Tiles::Listed { worklist: &worklist, total: &total },
                        },
                        a: match kernel {
                            GemmKernel::Fp8 | GemmKernel::Bf16 => Activations::Bf16(&a16),
                            _ => Activations::E4m3 { codes: &a8, scales: &a_scales },
                        },
                        a_rows,
                        sorted_token_ids: (projection == "gate").then_some(&ids),
                        weights: match kernel {
                            GemmKernel::Bf16 => Weights::Bf16(&wide),
                            _ => Weights::E4m3 { codes: &codes, scales: &scales },
                        },
                        bias: None,
                        out: &out,
                        rows: pairs,
                    };
                    let microseconds = time(gpu, 2, || (0..2).try_for_each(|_| op.launch(args)))?;
                    done(timed, projection, 1, microseconds);
                }
            }
        }
    }
    Ok((rate, rows))
}
