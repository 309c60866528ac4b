//! Grouped GEMMs over the experts of a layer; see [`kernels_gpu::gemm`] for the order of the sums.

use super::{ExpertTable, check_rows, worklist};
use crate::device::{Buffer, DeviceHandle, ErasedKernel, Grid, launch};
use crate::error::{Error, Result};
use crate::types::Gating;
use cuda_std::kernel::{DeviceRef, Kernel};
use kernels_gpu::gemm::shape::Shape;
use kernels_gpu::gemm::tiles::BLOCK;
use kernels_gpu::gemm::{self, Dense, Down, GateUp, Paired1, Paired2, Pm4, bf16, fp8, gateup_silu, w8a8, w8a8_dense};
use kernels_gpu::worklist::ITEM_WORDS;

/// A grouped GEMM by the name of its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmKernel {
    /// bf16 activations, e4m3 weights.
    Fp8,
    /// e4m3 activations and weights, a block for each possible tile.
    W8a8,
    /// The same bits from a work-list, 128x64 tiles.
    W8a8Pm4,
    /// The same bits, tiles for gate and up.
    W8a8GateUp,
    /// The same bits, tiles for down.
    W8a8Down,
    /// As [`GemmKernel::W8a8Down`], but where the architecture has an mma with e4m3 operands (12.x) with that, whose sums are
    /// its own: the same bits elsewhere alone.
    W8a8Native,
    /// bf16 activations and weights.
    Bf16,
}

impl GemmKernel {
    /// All of them.
    pub const ALL: [GemmKernel; 7] = [
        GemmKernel::Fp8,
        GemmKernel::W8a8,
        GemmKernel::W8a8Pm4,
        GemmKernel::W8a8GateUp,
        GemmKernel::W8a8Down,
        GemmKernel::W8a8Native,
        GemmKernel::Bf16,
    ];

    /// Its kernel's name.
    pub const fn name(self) -> &'static str {
        match self {
            GemmKernel::Fp8 => "moe_fp8_grouped_gemm",
            GemmKernel::W8a8 => "moe_w8a8_grouped_gemm",
            GemmKernel::W8a8Pm4 => "moe_w8a8_grouped_gemm_pm4",
            GemmKernel::W8a8GateUp => "moe_w8a8_grouped_gemm_e4m3_gu",
            GemmKernel::W8a8Down => "moe_w8a8_grouped_gemm_e4m3_dn",
            GemmKernel::W8a8Native => "moe_w8a8_grouped_gemm_e4m3_native",
            GemmKernel::Bf16 => "moe_bf16_grouped_gemm",
        }
    }

    /// What its activations are.
    const fn activations(self) -> &'static str {
        match self {
            GemmKernel::Fp8 | GemmKernel::Bf16 => "bf16",
            _ => "e4m3",
        }
    }

    /// Bytes of an element of the weights.
    const fn weight_bytes(self) -> usize {
        if matches!(self, GemmKernel::Bf16) { 2 } else { 1 }
    }
}

/// Which tiles a launch works on.
#[derive(Clone, Copy, Debug)]
pub enum Tiles<'a> {
    /// Items of a work-list that was built with the kernel's `m_tile` and `n_tiles`.
    Listed {
        /// [items, 4] items.
        worklist: &'a Buffer<u32>,
        /// `[1]` number of items.
        total: &'a Buffer<u32>,
    },
    /// Every possible tile ([`GemmKernel::W8a8`] alone).
    Dense {
        /// [E + 1] first sorted row of each expert.
        expert_offsets: &'a Buffer<i32>,
        /// Row tiles of each expert that get a block: at least those of the fullest expert, or its other rows are not computed.
        max_m_tiles: usize,
    },
}

/// Activations.
#[derive(Clone, Copy, Debug)]
pub enum Activations<'a> {
    /// [rows, k] bf16.
    Bf16(&'a Buffer<u16>),
    /// e4m3.
    E4m3 {
        /// [rows, k] codes.
        codes: &'a Buffer<u8>,
        /// [rows, ceil(k/128)] scales.
        scales: &'a Buffer<f32>,
    },
}

impl Activations<'_> {
    const fn name(&self) -> &'static str {
        match self {
            Activations::Bf16(_) => "bf16",
            Activations::E4m3 { .. } => "e4m3",
        }
    }
}

/// Weights of all experts.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// [n, k] bf16 each.
    Bf16(&'a ExpertTable<u16>),
    /// e4m3.
    E4m3 {
        /// [n, k] codes each.
        codes: &'a ExpertTable<u8>,
        /// [ceil(n/128), ceil(k/128)] scales each.
        scales: &'a ExpertTable<f32>,
    },
}

/// What a launch reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct GemmArgs<'a> {
    /// Tiles.
    pub tiles: Tiles<'a>,
    /// Activations.
    pub a: Activations<'a>,
    /// Rows of the activations.
    pub a_rows: usize,
    /// Row of `a` for each sorted row; one that is no row of `a` counts as zeros. `None`: the same row.
    pub sorted_token_ids: Option<&'a Buffer<i32>>,
    /// Weights.
    pub weights: Weights<'a>,
    /// [E, n] biases.
    pub bias: Option<&'a Buffer<f32>>,
    /// [rows, n] bf16, at sorted rows. Rows in no expert's range, and those of experts that are not resident, are left as they are.
    pub out: &'a Buffer<u16>,
    /// Sorted rows.
    pub rows: usize,
}

/// Items that a work-list must have room for, and room for so many items.
fn check_worklist(
    device: &DeviceHandle,
    list: &Buffer<u32>,
    total: &Buffer<u32>,
    (rows, experts): (usize, usize),
    (m_tile, n_tiles): (u32, u32),
) -> Result<u32> {
    let needed = worklist::capacity(rows, experts, n_tiles as usize, m_tile as usize).unwrap_or(usize::MAX);
    list.check("worklist", device, needed.saturating_mul(ITEM_WORDS as usize))?;
    total.check("total", device, 1)?;
    Ok((list.len() / ITEM_WORDS as usize).min(i32::MAX as usize) as u32)
}

/// Blocks of a launch over a work-list: as many as fit on the device at once, each of which takes every so-manieth item.
fn blocks(device: &DeviceHandle, kernel: ErasedKernel, shared_bytes: u32, capacity: u32) -> u32 {
    let properties = device.properties();
    let by_memory = properties.shared_per_multiprocessor / (shared_bytes + 1024);
    let resident = by_memory.clamp(1, kernel.min_blocks.max(1));
    (properties.multiprocessors * resident).min(capacity)
}

/// Errors that name a size of a grouped GEMM outside its limits.
fn check_sizes(experts: usize, n: usize, k: usize) -> Result<()> {
    for (name, value, most) in [
        ("num_experts", experts, crate::plan::MAX_EXPERTS),
        ("n", n, crate::plan::MAX_WIDTH),
        ("k", k, crate::plan::MAX_WIDTH),
    ] {
        if !(1..=most).contains(&value) {
            return Err(Error::argument(name, value, format!("1 to {most}")));
        }
    }
    Ok(())
}

/// Errors that name the e4m3 weights of `experts` matrices [n, k], or their scales.
fn check_e4m3(
    device: &DeviceHandle,
    names: [&'static str; 2],
    codes: &ExpertTable<u8>,
    scales: &ExpertTable<f32>,
    (experts, n, k): (usize, usize, usize),
) -> Result<()> {
    let block = BLOCK as usize;
    codes.check(names[0], device, experts, n * k)?;
    scales.check(names[1], device, experts, n.div_ceil(block) * k.div_ceil(block))?;
    match (0..experts).find(|&expert| codes.resident()[expert] && !scales.resident()[expert]) {
        Some(expert) => Err(Error::argument(names[1], format!("none for expert {expert}"), "scales for its weights")),
        None => Ok(()),
    }
}

/// A grouped GEMM of one size, ready on a device.
#[derive(Clone, Debug)]
pub struct GroupedGemm {
    device: DeviceHandle,
    kernel: GemmKernel,
    experts: usize,
    n: usize,
    k: usize,
}

impl GroupedGemm {
    /// Readies the kernel. Errors name `num_experts`, `n` or `k`.
    pub fn new(device: &DeviceHandle, kernel: GemmKernel, experts: usize, n: usize, k: usize) -> Result<Self> {
        check_sizes(experts, n, k)?;
        let gemm = GroupedGemm { device: device.clone(), kernel, experts, n, k };
        device.prepare(gemm.erased(), gemm.shared_bytes())?;
        Ok(gemm)
    }

    /// Which kernel.
    pub fn kernel(&self) -> GemmKernel {
        self.kernel
    }

    /// Rows, columns and shared memory of a tile.
    fn tile(&self) -> (u32, u32, u32) {
        const fn of<T: Shape>(shared_bytes: u32) -> (u32, u32, u32) {
            (T::ROWS, T::COLUMNS, shared_bytes)
        }
        match (self.kernel, self.aligned()) {
            (GemmKernel::Fp8, _) => of::<gemm::Fp8>(gemm::FP8_SHARED_BYTES),
            (GemmKernel::W8a8, _) => of::<Dense>(gemm::w8a8_shared_bytes::<Dense>()),
            (GemmKernel::W8a8Pm4, true) => of::<Pm4>(gemm::w8a8_shared_bytes::<Pm4>()),
            (GemmKernel::W8a8GateUp, true) => of::<GateUp>(gemm::w8a8_shared_bytes::<GateUp>()),
            (GemmKernel::W8a8Pm4 | GemmKernel::W8a8GateUp | GemmKernel::W8a8Down | GemmKernel::W8a8Native, _) => {
                of::<Down>(gemm::w8a8_shared_bytes::<Down>())
            }
            (GemmKernel::Bf16, _) => of::<gemm::Bf16>(gemm::BF16_SHARED_BYTES),
        }
    }

    /// Rows of a tile: the `m_tile` of its work-list.
    pub fn m_tile(&self) -> u32 {
        self.tile().0
    }

    /// Column tiles of its work-list.
    pub fn n_tiles(&self) -> u32 {
        self.n.div_ceil(self.tile().1 as usize) as u32
    }

    fn shared_bytes(&self) -> u32 {
        self.tile().2
    }

    /// Whether the rows that are copied begin at multiples of 16 bytes.
    fn aligned(&self) -> bool {
        (self.k * self.kernel.weight_bytes()).is_multiple_of(16)
    }

    fn w8a8_kernel(&self) -> Kernel<w8a8::Family> {
        use w8a8::*;
        match (self.kernel, self.aligned()) {
            (GemmKernel::W8a8Native, true) => moe_w8a8_grouped_gemm_e4m3_native,
            (GemmKernel::W8a8Native, false) => moe_w8a8_grouped_gemm_e4m3_native_narrow,
            // Rows that begin anywhere have one kernel: the bits are the same.
            (_, false) => moe_w8a8_grouped_gemm_listed_narrow,
            (GemmKernel::W8a8GateUp, _) => moe_w8a8_grouped_gemm_e4m3_gu,
            (GemmKernel::W8a8Down, _) => moe_w8a8_grouped_gemm_e4m3_dn,
            _ => moe_w8a8_grouped_gemm_pm4,
        }
    }

    fn dense_kernel(&self) -> Kernel<w8a8_dense::Family> {
        use w8a8_dense::*;
        if self.aligned() { moe_w8a8_grouped_gemm } else { moe_w8a8_grouped_gemm_narrow }
    }

    fn fp8_kernel(&self) -> Kernel<fp8::Family> {
        if self.aligned() { fp8::moe_fp8_grouped_gemm } else { fp8::moe_fp8_grouped_gemm_narrow }
    }

    fn bf16_kernel(&self) -> Kernel<bf16::Family> {
        if self.aligned() { bf16::moe_bf16_grouped_gemm } else { bf16::moe_bf16_grouped_gemm_narrow }
    }

    fn erased(&self) -> ErasedKernel {
        match self.kernel {
            GemmKernel::Fp8 => self.fp8_kernel().into(),
            GemmKernel::W8a8 => self.dense_kernel().into(),
            GemmKernel::W8a8Pm4 | GemmKernel::W8a8GateUp | GemmKernel::W8a8Down | GemmKernel::W8a8Native => {
                self.w8a8_kernel().into()
            }
            GemmKernel::Bf16 => self.bf16_kernel().into(),
        }
    }

    /// Enqueues the product. Errors name the argument; nothing is launched then. No rows: nothing to do.
    pub fn launch(&self, args: GemmArgs<'_>) -> Result<()> {
        let (device, n, k, experts) = (&self.device, self.n, self.k, self.experts);
        let limit = i32::MAX as usize;
        check_rows("rows", args.rows)?;
        check_rows("a_rows", args.a_rows)?;
        let k_blocks = k.div_ceil(BLOCK as usize);
        if let Some(ids) = args.sorted_token_ids {
            ids.check("sorted_token_ids", device, args.rows)?;
        }
        if let Some(bias) = args.bias {
            bias.check("bias", device, experts * n)?;
        }
        args.out.check("out", device, args.rows * n)?;
        if args.a.name() != self.kernel.activations() {
            let needed = format!("{} for {}", self.kernel.activations(), self.kernel.name());
            return Err(Error::argument("a", args.a.name(), needed));
        }
        match args.a {
            Activations::Bf16(a) => a.check("a", device, args.a_rows * k)?,
            Activations::E4m3 { codes, scales } => {
                codes.check("a", device, args.a_rows * k)?;
                scales.check("a_scale", device, args.a_rows * k_blocks)?;
            }
        }
        let weights = match (args.weights, self.kernel.weight_bytes()) {
            (Weights::Bf16(weights), 2) => {
                weights.check("weights", device, experts, n * k)?;
                (weights.as_ref(), DeviceRef::null())
            }
            (Weights::E4m3 { codes, scales }, 1) => {
                check_e4m3(device, ["weights", "b_scale"], codes, scales, (experts, n, k))?;
                (codes.as_ref(), scales.as_ref())
            }
            (Weights::Bf16(_), _) => {
                return Err(Error::argument("weights", "bf16", format!("e4m3 for {}", self.kernel.name())));
            }
            (Weights::E4m3 { .. }, _) => {
                return Err(Error::argument("weights", "e4m3", format!("bf16 for {}", self.kernel.name())));
            }
        };
        let sorted_token_ids = args.sorted_token_ids.map_or(DeviceRef::null(), Buffer::as_ref);
        let bias = args.bias.map_or(DeviceRef::null(), Buffer::as_ref);
        let (out, rows, a_rows) = (args.out.as_mut(), args.rows as u32, args.a_rows as u32);
        let (n, k) = (n as u32, k as u32);
        let shared_bytes = self.shared_bytes();

        let (worklist, total) = match args.tiles {
            Tiles::Dense { expert_offsets, max_m_tiles } => {
                let (GemmKernel::W8a8, Activations::E4m3 { codes, scales }) = (self.kernel, args.a) else {
                    return Err(Error::argument("tiles", "dense", format!("a work-list for {}", self.kernel.name())));
                };
                expert_offsets.check("expert_offsets", device, experts + 1)?;
                let blocks = (self.n_tiles() as usize).checked_mul(experts).and_then(|b| b.checked_mul(max_m_tiles));
                let Some(blocks) = blocks.filter(|&blocks| blocks <= limit) else {
                    let most = limit / (self.n_tiles() as usize * experts);
                    return Err(Error::argument("max_m_tiles", max_m_tiles, format!("at most {most}")));
                };
                if rows == 0 || blocks == 0 {
                    return Ok(());
                }
                return launch(
                    &**device,
                    self.dense_kernel(),
                    Grid { blocks: blocks as u32, shared_bytes },
                    w8a8_dense::Args {
                        expert_offsets: expert_offsets.as_ref(),
                        a: codes.as_ref(),
                        a_scale: scales.as_ref(),
                        sorted_token_ids,
                        weights: weights.0,
                        scales: weights.1,
                        bias,
                        out,
                        n,
                        k,
                        a_rows,
                        rows,
                        max_m_tiles: max_m_tiles as u32,
                    },
                );
            }
            Tiles::Listed { worklist, total } => (worklist, total),
        };
        if self.kernel == GemmKernel::W8a8 {
            return Err(Error::argument("tiles", "a work-list", "the dense grid for moe_w8a8_grouped_gemm"));
        }
        let tiles = (self.m_tile(), self.n_tiles());
        let capacity = check_worklist(device, worklist, total, (args.rows, experts), tiles)?;
        if rows == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: blocks(device, self.erased(), shared_bytes, capacity), shared_bytes };
        let (worklist, total) = (worklist.as_ref(), total.as_ref());
        let (weights, scales) = weights;
        match args.a {
            Activations::E4m3 { codes, scales: a_scale } => {
                let (a, a_scale) = (codes.as_ref(), a_scale.as_ref());
                let args = w8a8::Args {
                    worklist,
                    total,
                    a,
                    a_scale,
                    sorted_token_ids,
                    weights,
                    scales,
                    bias,
                    out,
                    n,
                    k,
                    a_rows,
                    rows,
                    capacity,
                };
                launch(&**device, self.w8a8_kernel(), grid, args)
            }
            Activations::Bf16(a) if self.kernel == GemmKernel::Fp8 => {
                let a = a.as_ref();
                let args = fp8::Args {
                    worklist,
                    total,
                    a,
                    sorted_token_ids,
                    weights,
                    scales,
                    bias,
                    out,
                    n,
                    k,
                    a_rows,
                    rows,
                    capacity,
                };
                launch(&**device, self.fp8_kernel(), grid, args)
            }
            Activations::Bf16(a) => {
                let a = a.as_ref();
                let args = bf16::Args {
                    worklist,
                    total,
                    a,
                    sorted_token_ids,
                    weights,
                    bias,
                    out,
                    n,
                    k,
                    a_rows,
                    rows,
                    capacity,
                };
                launch(&**device, self.bf16_kernel(), grid, args)
            }
        }
    }
}

/// Gate and up with the activation and the quantiser in one kernel, of one size, ready on a device.
#[derive(Clone, Debug)]
pub struct GateUpSilu {
    device: DeviceHandle,
    two_blocks: bool,
    experts: usize,
    n: usize,
    k: usize,
}

/// What a launch of [`GateUpSilu`] reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct GateUpSiluArgs<'a> {
    /// [items, 4] items, built with [`GateUpSilu::m_tile`] and [`GateUpSilu::n_tiles`].
    pub worklist: &'a Buffer<u32>,
    /// `[1]` number of items.
    pub total: &'a Buffer<u32>,
    /// [a_rows, k] codes.
    pub a: &'a Buffer<u8>,
    /// [a_rows, ceil(k/128)] scales.
    pub a_scale: &'a Buffer<f32>,
    /// Rows of the activations.
    pub a_rows: usize,
    /// Row of `a` for each sorted row; one that is no row of `a` counts as zeros. `None`: the same row.
    pub sorted_token_ids: Option<&'a Buffer<i32>>,
    /// Codes of gate.
    pub gate: &'a ExpertTable<u8>,
    /// Scales of gate.
    pub gate_scale: &'a ExpertTable<f32>,
    /// Codes of up.
    pub up: &'a ExpertTable<u8>,
    /// Scales of up.
    pub up_scale: &'a ExpertTable<f32>,
    /// Clamp, > 0.
    pub limit: Option<f32>,
    /// [rows, n] codes, at sorted rows.
    pub out: &'a Buffer<u8>,
    /// [rows, ceil(n/128)] scales, at sorted rows.
    pub out_scale: &'a Buffer<f32>,
    /// Sorted rows.
    pub rows: usize,
}

impl GateUpSilu {
    /// Readies the kernel: `…_w2`, two blocks a multiprocessor, if `two_blocks`, else `…_w1`. Both give the same bytes. Errors name
    /// `num_experts`, `n` or `k`.
    pub fn new(device: &DeviceHandle, two_blocks: bool, experts: usize, n: usize, k: usize) -> Result<Self> {
        check_sizes(experts, n, k)?;
        // Weights whose rows begin anywhere have one kernel.
        let two_blocks = two_blocks && k.is_multiple_of(16);
        let op = GateUpSilu { device: device.clone(), two_blocks, experts, n, k };
        device.prepare(op.kernel().into(), op.shared_bytes())?;
        Ok(op)
    }

    /// Rows of a tile: the `m_tile` of its work-list.
    pub fn m_tile(&self) -> u32 {
        if self.two_blocks { Paired2::ROWS } else { Paired1::ROWS }
    }

    /// Column tiles of its work-list: groups of 128 columns.
    pub fn n_tiles(&self) -> u32 {
        self.n.div_ceil(Paired1::COLUMNS as usize) as u32
    }

    /// Its kernel.
    pub fn kernel(&self) -> Kernel<gateup_silu::Family> {
        use gateup_silu::*;
        match (self.two_blocks, self.k.is_multiple_of(16)) {
            (false, true) => moe_w8a8_gateup_silu_e4m3_w1,
            (_, false) => moe_w8a8_gateup_silu_e4m3_w1_narrow,
            (true, true) => moe_w8a8_gateup_silu_e4m3_w2,
        }
    }

    fn shared_bytes(&self) -> u32 {
        if self.two_blocks {
            gemm::gateup_silu_shared_bytes::<Paired2>()
        } else {
            gemm::gateup_silu_shared_bytes::<Paired1>()
        }
    }

    /// Enqueues both products, the activation and the quantiser. Errors name the argument; nothing is launched then.
    pub fn launch(&self, args: GateUpSiluArgs<'_>) -> Result<()> {
        let (device, n, k, experts) = (&self.device, self.n, self.k, self.experts);
        check_rows("rows", args.rows)?;
        check_rows("a_rows", args.a_rows)?;
        args.a.check("a", device, args.a_rows * k)?;
        args.a_scale.check("a_scale", device, args.a_rows * k.div_ceil(BLOCK as usize))?;
        if let Some(ids) = args.sorted_token_ids {
            ids.check("sorted_token_ids", device, args.rows)?;
        }
        check_e4m3(device, ["gate", "gate_scale"], args.gate, args.gate_scale, (experts, n, k))?;
        check_e4m3(device, ["up", "up_scale"], args.up, args.up_scale, (experts, n, k))?;
        Gating::Silu { limit: args.limit }.check()?;
        args.out.check("out", device, args.rows * n)?;
        args.out_scale.check("out_scale", device, args.rows * n.div_ceil(BLOCK as usize))?;
        let tiles = (self.m_tile(), self.n_tiles());
        let capacity = check_worklist(device, args.worklist, args.total, (args.rows, experts), tiles)?;
        if args.rows == 0 {
            return Ok(());
        }
        let shared_bytes = self.shared_bytes();
        launch(
            &**device,
            self.kernel(),
            Grid { blocks: blocks(device, self.kernel().into(), shared_bytes, capacity), shared_bytes },
            gateup_silu::Args {
                worklist: args.worklist.as_ref(),
                total: args.total.as_ref(),
                a: args.a.as_ref(),
                a_scale: args.a_scale.as_ref(),
                sorted_token_ids: args.sorted_token_ids.map_or(DeviceRef::null(), Buffer::as_ref),
                gate: args.gate.as_ref(),
                gate_scales: args.gate_scale.as_ref(),
                up: args.up.as_ref(),
                up_scales: args.up_scale.as_ref(),
                out: args.out.as_mut(),
                out_scale: args.out_scale.as_mut(),
                n: n as u32,
                k: k as u32,
                limit: args.limit.unwrap_or(f32::INFINITY),
                a_rows: args.a_rows as u32,
                rows: args.rows as u32,
                capacity,
            },
        )
    }
}
