//! `router_gemm` and `router_gemm_strict`: logits of bf16 hidden states and bf16 router weights.

use super::topk::{check_range, optional};
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result};
use crate::plan::{MAX_EXPERTS, MAX_WIDTH};
use cuda_std::kernel::Kernel;
use kernels_gpu::router as kernels;

/// Most tokens of a launch.
const MAX_TOKENS: usize = 1 << 28;

/// Logits of a block of `router_gemm`: tokens by experts. Leaves the bits alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterTile {
    /// One token, two experts.
    T1x2,
    /// Four tokens, eight experts.
    T4x8,
    /// Eight tokens, eight experts.
    T8x8,
    /// 32 tokens, 32 experts.
    T32x32,
}

impl RouterTile {
    /// All of them.
    pub const ALL: [RouterTile; 4] = [RouterTile::T1x2, RouterTile::T4x8, RouterTile::T8x8, RouterTile::T32x32];

    fn kernel(self) -> (Kernel<kernels::router_gemm::Family>, kernels::Tile) {
        match self {
            RouterTile::T1x2 => (kernels::router_gemm::router_gemm_1x2, kernels::TILE_1X2),
            RouterTile::T4x8 => (kernels::router_gemm::router_gemm_4x8, kernels::TILE_4X8),
            RouterTile::T8x8 => (kernels::router_gemm::router_gemm_8x8, kernels::TILE_8X8),
            RouterTile::T32x32 => (kernels::router_gemm::router_gemm_32x32, kernels::TILE_32X32),
        }
    }
}

/// Logits of a block of `router_gemm_strict`: tokens by experts. Leaves the bits alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StrictTile {
    /// Four tokens, 32 experts, one logit a thread.
    T4x32,
    /// 32 tokens, 64 experts, sixteen logits a thread.
    T32x64,
}

impl StrictTile {
    /// Both.
    pub const ALL: [StrictTile; 2] = [StrictTile::T4x32, StrictTile::T32x64];

    fn kernel(self) -> (Kernel<kernels::router_gemm_strict::Family>, kernels::Tile) {
        match self {
            StrictTile::T4x32 => (kernels::router_gemm_strict::router_gemm_strict_4x32, kernels::STRICT_4X32),
            StrictTile::T32x64 => (kernels::router_gemm_strict::router_gemm_strict_32x64, kernels::STRICT_32X64),
        }
    }
}

fn check_shape(hidden: usize, experts: usize) -> Result<()> {
    check_range("hidden", hidden, MAX_WIDTH)?;
    check_range("num_experts", experts, MAX_EXPERTS)
}

/// A grid of `tile`s, one block each.
fn grid(tile: kernels::Tile, tokens: usize, experts: usize) -> Result<Grid> {
    let blocks = tile.blocks(tokens as u32, experts as u32);
    match i32::try_from(blocks) {
        Ok(blocks) => Ok(Grid { blocks: blocks as u32, shared_bytes: tile.shared_bytes }),
        Err(_) => Err(Error::argument("tokens", tokens, "fewer for tiles of this size")),
    }
}

fn check_tokens(tokens: usize) -> Result<()> {
    if tokens <= MAX_TOKENS { Ok(()) } else { Err(Error::argument("tokens", tokens, "at most 2^28")) }
}

/// Whether tiles of this size occupy most of the device.
fn fills(device: &DeviceHandle, tile: kernels::Tile, tokens: usize, experts: usize) -> bool {
    4 * tile.blocks(tokens as u32, experts as u32) >= 3 * u64::from(device.properties().multiprocessors)
}

/// f32 logits, the sum of 32 partial sums each.
#[derive(Clone, Debug)]
pub struct RouterGemm {
    device: DeviceHandle,
    hidden: usize,
    experts: usize,
}

impl RouterGemm {
    /// Readies the kernels. Errors name `hidden` (1 to 2^20) or `num_experts` (1 to 4096).
    pub fn new(device: &DeviceHandle, hidden: usize, experts: usize) -> Result<Self> {
        check_shape(hidden, experts)?;
        for tile in RouterTile::ALL {
            let (kernel, tile) = tile.kernel();
            device.prepare(kernel.into(), tile.shared_bytes)?;
        }
        Ok(RouterGemm { device: device.clone(), hidden, experts })
    }

    /// The tile that [`RouterGemm::launch`] takes.
    pub fn choose(&self, tokens: usize) -> RouterTile {
        match tokens {
            0..=2 => RouterTile::T1x2,
            3..=32 => RouterTile::T4x8,
            _ if fills(&self.device, kernels::TILE_32X32, tokens.min(MAX_TOKENS), self.experts) => RouterTile::T32x32,
            _ => RouterTile::T8x8,
        }
    }

    /// Enqueues logits [M, E] of x [M, K] and w [E, K], plus `bias` `[E]`. Errors name `tokens`, `x`, `w`, `bias` or `logits`.
    pub fn launch(
        &self,
        x: &Buffer<u16>,
        w: &Buffer<u16>,
        bias: Option<&Buffer<f32>>,
        tokens: usize,
        logits: &Buffer<f32>,
    ) -> Result<()> {
        self.launch_tile(self.choose(tokens), x, w, bias, tokens, logits)
    }

    /// As [`RouterGemm::launch`] with a tile of the caller's choice.
    pub fn launch_tile(
        &self,
        tile: RouterTile,
        x: &Buffer<u16>,
        w: &Buffer<u16>,
        bias: Option<&Buffer<f32>>,
        tokens: usize,
        logits: &Buffer<f32>,
    ) -> Result<()> {
        let RouterGemm { device, hidden, experts } = self;
        check_tokens(tokens)?;
        x.check("x", device, tokens * hidden)?;
        w.check_exact("w", device, experts * hidden)?;
        if let Some(bias) = bias {
            bias.check_exact("bias", device, *experts)?;
        }
        logits.check("logits", device, tokens * experts)?;
        let (kernel, tile) = tile.kernel();
        let grid = grid(tile, tokens, *experts)?;
        launch(
            &**device,
            kernel,
            grid,
            kernels::router_gemm::Args {
                x: x.as_ref(),
                w: w.as_ref(),
                bias: optional(bias),
                logits: logits.as_mut(),
                tokens: tokens as u32,
                experts: *experts as u32,
                hidden: *hidden as u32,
            },
        )
    }
}

/// bf16 logits, one sum over ascending k each.
#[derive(Clone, Debug)]
pub struct RouterGemmStrict {
    device: DeviceHandle,
    hidden: usize,
    experts: usize,
}

impl RouterGemmStrict {
    /// Readies the kernels. Errors name `hidden` (1 to 2^20) or `num_experts` (1 to 4096).
    pub fn new(device: &DeviceHandle, hidden: usize, experts: usize) -> Result<Self> {
        check_shape(hidden, experts)?;
        for tile in StrictTile::ALL {
            let (kernel, tile) = tile.kernel();
            device.prepare(kernel.into(), tile.shared_bytes)?;
        }
        Ok(RouterGemmStrict { device: device.clone(), hidden, experts })
    }

    /// The tile that [`RouterGemmStrict::launch`] takes.
    pub fn choose(&self, tokens: usize) -> StrictTile {
        if fills(&self.device, kernels::STRICT_32X64, tokens.min(MAX_TOKENS), self.experts) {
            StrictTile::T32x64
        } else {
            StrictTile::T4x32
        }
    }

    /// Enqueues logits [M, E], bf16, of x [M, K] and w [E, K]. Errors name `tokens`, `x`, `w` or `logits`.
    pub fn launch(&self, x: &Buffer<u16>, w: &Buffer<u16>, tokens: usize, logits: &Buffer<u16>) -> Result<()> {
        self.launch_tile(self.choose(tokens), x, w, tokens, logits)
    }

    /// As [`RouterGemmStrict::launch`] with a tile of the caller's choice.
    pub fn launch_tile(
        &self,
        tile: StrictTile,
        x: &Buffer<u16>,
        w: &Buffer<u16>,
        tokens: usize,
        logits: &Buffer<u16>,
    ) -> Result<()> {
        let RouterGemmStrict { device, hidden, experts } = self;
        check_tokens(tokens)?;
        x.check("x", device, tokens * hidden)?;
        w.check_exact("w", device, experts * hidden)?;
        logits.check("logits", device, tokens * experts)?;
        let (kernel, tile) = tile.kernel();
        let grid = grid(tile, tokens, *experts)?;
        launch(
            &**device,
            kernel,
            grid,
            kernels::router_gemm_strict::Args {
                x: x.as_ref(),
                w: w.as_ref(),
                logits: logits.as_mut(),
                tokens: tokens as u32,
                experts: *experts as u32,
                hidden: *hidden as u32,
            },
        )
    }
}
