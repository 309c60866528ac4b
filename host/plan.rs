//! Plans: which kernels a layer uses, with which grids, and how much scratch memory they need. Pure functions of shape, options and
//! the device's properties; nothing here influences the bits of a result.

use crate::device::{Buffer, DeviceHandle, Grid, Properties};
use crate::error::{Error, Result};
use crate::layer::Hidden;
use crate::types::{Activation, LayerOptions, LayerShape, Order, Split, WeightFormat, XType};
use crate::workspace::{ALIGNMENT, Workspace};
use cuda_std::kernel::{DeviceMut, Kernel};
use kernels_gpu::dequant::{Mxfp4, Nvfp4};
use kernels_gpu::layout::permute::row_stride;
use kernels_gpu::{combine, direct, fc1, fc2, route_prep};

pub use crate::formats::fp4::MAX_EXPERTS;

/// Most experts of a token.
pub const MAX_TOP_K: usize = 32;
/// Largest hidden size, intermediate size and output width.
pub const MAX_WIDTH: usize = 1 << 20;
/// Most pairs (tokens times top-k) of a pass.
pub const MAX_PAIRS: usize = 1 << 28;

/// Warps of a block of FC2: 1, 2, 4 or 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fc2Warps {
    /// One.
    W1,
    /// Two.
    W2,
    /// Four.
    W4,
    /// Eight.
    W8,
}

impl Fc2Warps {
    /// All, ascending.
    pub const ALL: [Fc2Warps; 4] = [Fc2Warps::W1, Fc2Warps::W2, Fc2Warps::W4, Fc2Warps::W8];

    /// The number.
    pub const fn count(self) -> u32 {
        1 << self as u32
    }
}

/// Tile of a projection in the order `decode`: rows of the weights by pairs of an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 by 8.
    #[default]
    Rows16,
    /// 32 by 8.
    Rows32,
    /// 32 by 16: an expert's codes are decoded once for sixteen pairs.
    Wide,
    /// 16 by one pair, straight from the ids: two kernels instead of four, for at most [`DIRECT_TOKENS`] tokens.
    Direct,
}

/// Most tokens of [`Tile::Direct`].
pub const DIRECT_TOKENS: usize = 4;

impl Tile {
    /// The tiles of an expert's pairs.
    pub const OF_EXPERTS: [Tile; 3] = [Tile::Rows16, Tile::Rows32, Tile::Wide];

    /// Its name in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            Tile::Rows16 => "rows16",
            Tile::Rows32 => "rows32",
            Tile::Wide => "wide",
            Tile::Direct => "direct",
        }
    }

    /// Multiples of 16 rows.
    const fn tiles(self) -> u32 {
        if matches!(self, Tile::Rows32 | Tile::Wide) { 2 } else { 1 }
    }

    /// Multiples of 8 pairs.
    const fn groups(self) -> u32 {
        if matches!(self, Tile::Wide) { 2 } else { 1 }
    }
}

/// Free choices of a plan. Every choice gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Warps of a block of FC2 in the order `seed`. MXFP4 weights have a kernel with four alone.
    pub fc2_warps: Fc2Warps,
    /// Tile of FC1 in the order `decode`.
    pub fc1: Tile,
    /// Tile of FC2 in the order `decode`. Both tiles are wide or neither is, since they share the routing table; and both are direct or
    /// neither is.
    pub fc2: Tile,
}

impl Variant {
    /// Straight from the ids.
    pub const DIRECT: Variant = Variant::tiles(Tile::Direct, Tile::Direct);

    /// With these tiles.
    pub const fn tiles(fc1: Tile, fc2: Tile) -> Self {
        Variant { fc2_warps: Fc2Warps::W4, fc1, fc2 }
    }

    /// What sets it apart from the other variants of an order.
    pub fn name(self, order: Order) -> String {
        match order {
            Order::Seed { .. } => format!("warps{}", self.fc2_warps.count()),
            Order::Decode if self.fc1 == self.fc2 => self.fc1.name().into(),
            Order::Decode => format!("{}/{}", self.fc1.name(), self.fc2.name()),
        }
    }

    /// Groups of eight slots of an entry of the routing table.
    const fn groups(self, order: Order) -> u32 {
        match order {
            Order::Seed { .. } => 1,
            Order::Decode => self.fc1.groups(),
        }
    }
}

/// The variants of any number of tokens.
pub const VARIANTS: [Variant; 4] = [
    Variant::tiles(Tile::Rows16, Tile::Rows16),
    Variant::tiles(Tile::Rows16, Tile::Rows32),
    Variant::tiles(Tile::Rows32, Tile::Rows32),
    Variant::tiles(Tile::Wide, Tile::Wide),
];

/// Every variant of a layer with these options for `tokens` tokens.
pub fn variants(options: &LayerOptions, tokens: usize) -> Vec<Variant> {
    match (options.order, options.format) {
        (Order::Decode, _) if tokens <= DIRECT_TOKENS => [&[Variant::DIRECT], VARIANTS.as_slice()].concat(),
        (Order::Decode, _) => VARIANTS.to_vec(),
        (Order::Seed { .. }, WeightFormat::Mxfp4) => vec![VARIANTS[0]],
        (Order::Seed { .. }, WeightFormat::Nvfp4) => {
            Fc2Warps::ALL.map(|fc2_warps| Variant { fc2_warps, ..VARIANTS[0] }).to_vec()
        }
    }
}

/// Which variant is best for a shape, a number of tokens and a device.
pub fn choose_variant(shape: &LayerShape, tokens: usize, device: &Properties) -> Variant {
    let pairs = tokens * shape.top_k;
    // Every block of the direct FC1 brings all activations to shared memory: worth it while they are few.
    let shared = direct::fc1_shared_bytes::<Nvfp4>(tokens.min(DIRECT_TOKENS) as u32, shape.hidden as u32) + 1024;
    let resident = 4 * shared <= device.shared_per_multiprocessor;
    if resident && tokens <= 2 && tokens * shape.hidden <= 4096 {
        Variant::DIRECT
    } else if pairs > 6 * shape.experts {
        // Experts with more than eight pairs are common from here on.
        Variant::tiles(Tile::Wide, Tile::Wide)
    } else if tokens == 1 {
        Variant::tiles(Tile::Rows16, Tile::Rows16)
    } else {
        Variant::tiles(Tile::Rows32, Tile::Rows32)
    }
}

/// Errors that name the first size or option outside its limits.
pub fn check(shape: &LayerShape, options: &LayerOptions) -> Result<()> {
    let within = |name, value: usize, low: usize, high: usize| {
        if (low..=high).contains(&value) {
            Ok(())
        } else {
            Err(Error::argument(name, value, format!("{low} to {high}")))
        }
    };
    within("experts", shape.experts, 1, MAX_EXPERTS)?;
    within("top_k", shape.top_k, 1, MAX_TOP_K)?;
    let block = options.format.block();
    within("hidden", shape.hidden, block, MAX_WIDTH)?;
    within("intermediate", shape.intermediate, block, MAX_WIDTH)?;
    within("output", shape.output, 1, MAX_WIDTH)?;
    for (name, value) in [("hidden", shape.hidden), ("intermediate", shape.intermediate)] {
        if !value.is_multiple_of(block) {
            return Err(Error::argument(name, value, format!("a multiple of {block} for {} weights", options.format)));
        }
    }
    options.gating.check()
}

/// Byte offsets of the parts of a workspace, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    entry_count: usize,
    entries: usize,
    slots: usize,
    x_permuted: usize,
    h: usize,
    y: usize,
    end: usize,
}

/// The parts of a workspace as kernel arguments.
pub(crate) struct Table<'a> {
    pub status: DeviceMut<'a, u32>,
    pub entry_count: DeviceMut<'a, u32>,
    pub entries: DeviceMut<'a, u32>,
    pub slots: DeviceMut<'a, u32>,
    pub x_permuted: DeviceMut<'a, u16>,
    pub h: DeviceMut<'a, u16>,
    pub y: DeviceMut<'a, f32>,
}

/// Sizes of the launches of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launches {
    /// Routing table and reordered activations.
    pub route_prep: Grid,
    /// Warps that count pairs in `route_prep`.
    pub counting_warps: u32,
    /// Groups of eight slots of an entry of the routing table.
    pub groups: u32,
    /// First projection.
    pub fc1: Grid,
    /// Second projection.
    pub fc2: Grid,
    /// Sum over experts.
    pub combine: Grid,
}

/// How a layer of one shape runs for up to `max_tokens` tokens.
#[derive(Clone, Debug)]
pub struct Plan {
    shape: LayerShape,
    options: LayerOptions,
    max_tokens: usize,
    /// `None`: the best for each number of tokens.
    variant: Option<Variant>,
    device: Properties,
    parts: Parts,
}

impl Plan {
    /// A plan; readies its kernels on the device, so that a pass loads and sets nothing. Errors name `max_tokens` or a size.
    pub fn new(device: &DeviceHandle, shape: LayerShape, options: LayerOptions, max_tokens: usize) -> Result<Self> {
        Self::of(device, shape, options, max_tokens, None)
    }

    /// A plan with a given variant. The error names `fc2_warps` where the format of the weights has no such kernel, and `fc2` where
    /// only one of the tiles is wide.
    pub fn with_variant(
        device: &DeviceHandle,
        shape: LayerShape,
        options: LayerOptions,
        max_tokens: usize,
        variant: Variant,
    ) -> Result<Self> {
        if options.format == WeightFormat::Mxfp4 && variant.fc2_warps != Fc2Warps::W4 {
            return Err(Error::argument("fc2_warps", variant.fc2_warps.count(), "4 for mxfp4 weights"));
        }
        let kind = |tile: Tile| (tile.groups(), tile == Tile::Direct);
        if kind(variant.fc1) != kind(variant.fc2) {
            let needed = format!("a tile for as many pairs as that of fc1, {}", variant.fc1.name());
            return Err(Error::argument("fc2", variant.fc2.name(), needed));
        }
        if variant == Variant::DIRECT && max_tokens > DIRECT_TOKENS {
            let needed = format!("at most {DIRECT_TOKENS} for the variant direct");
            return Err(Error::argument("max_tokens", max_tokens, needed));
        }
        Self::of(device, shape, options, max_tokens, Some(variant))
    }

    fn of(
        device: &DeviceHandle,
        shape: LayerShape,
        options: LayerOptions,
        max_tokens: usize,
        variant: Option<Variant>,
    ) -> Result<Self> {
        check(&shape, &options)?;
        if max_tokens > MAX_PAIRS / shape.top_k {
            let needed = format!("at most {} for top_k {}", MAX_PAIRS / shape.top_k, shape.top_k);
            return Err(Error::argument("max_tokens", max_tokens, needed));
        }
        let parts = Parts::of(&shape, max_tokens)
            .ok_or_else(|| Error::argument("max_tokens", max_tokens, "a workspace below 2^64 bytes"))?;
        let plan = Plan { shape, options, max_tokens, variant, device: device.properties().clone(), parts };
        let candidates = match (variant, options.order) {
            (Some(variant), _) => vec![variant],
            (None, Order::Seed { .. }) => vec![plan.variant(max_tokens)],
            (None, Order::Decode) => {
                let mut chosen: Vec<Variant> = VARIANTS.to_vec();
                // Straight from the ids where that is the choice for some number of tokens.
                chosen.extend((1..=max_tokens.min(DIRECT_TOKENS)).map(|tokens| plan.variant(tokens)));
                chosen
            }
        };
        for variant in candidates {
            if plan.is_direct(variant) {
                let (fc1, fc2) = plan.direct_launches(max_tokens.min(DIRECT_TOKENS));
                for &kernel in direct::fc1_direct::KERNELS {
                    device.prepare(kernel.into(), fc1.shared_bytes)?;
                }
                device.prepare(plan.fc2_direct().into(), fc2.shared_bytes)?;
                continue;
            }
            let largest = plan.launches_of(variant, max_tokens.max(1));
            for &kernel in route_prep::route_prep::KERNELS {
                device.prepare(kernel.into(), largest.route_prep.shared_bytes)?;
            }
            device.prepare(plan.fc1_kernel(variant).into(), largest.fc1.shared_bytes)?;
            device.prepare(plan.fc2_kernel(variant).into(), largest.fc2.shared_bytes)?;
        }
        device.prepare(combine::combine::combine_f32_bf16.into(), 0)?;
        Ok(plan)
    }

    /// Most tokens of a pass.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Exact size of the workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.parts.end
    }

    /// The variant in use for `tokens` tokens.
    pub fn variant(&self, tokens: usize) -> Variant {
        self.variant.unwrap_or_else(|| choose_variant(&self.shape, tokens, &self.device))
    }

    /// The kernels of a pass, in order, with their launches for `tokens` tokens.
    pub fn describe(&self, tokens: usize) -> Vec<(&'static str, Grid)> {
        let variant = self.variant(tokens);
        if self.is_direct(variant) {
            let (fc1, fc2) = self.direct_launches(tokens);
            return vec![(self.fc1_direct(XType::Bf16).name, fc1), (self.fc2_direct().name, fc2)];
        }
        let size = self.launches(tokens);
        let prep = match self.options.activation {
            Activation::Bf16 => route_prep::route_prep::route_prep_bf16_bf16,
            Activation::F16 => route_prep::route_prep::route_prep_bf16_f16,
        };
        vec![
            (prep.name, size.route_prep),
            (self.fc1_kernel(variant).name, size.fc1),
            (self.fc2_kernel(variant).name, size.fc2),
            (combine::combine::combine_f32_bf16.name, size.combine),
        ]
    }

    /// Whether a variant goes straight from the ids.
    pub(crate) fn is_direct(&self, variant: Variant) -> bool {
        self.options.order == Order::Decode && variant == Variant::DIRECT
    }

    /// Sizes of the two launches of [`Variant::DIRECT`].
    pub(crate) fn direct_launches(&self, tokens: usize) -> (Grid, Grid) {
        let LayerShape { hidden, intermediate, output, top_k, .. } = self.shape;
        let (tokens, hidden, multiprocessors) = (tokens as u32, hidden as u32, self.device.multiprocessors as usize);
        let (fc1_shared, fc2_shared) = match self.options.format {
            WeightFormat::Nvfp4 => {
                (direct::fc1_shared_bytes::<Nvfp4>(tokens, hidden), direct::fc2_shared_bytes::<Nvfp4>())
            }
            WeightFormat::Mxfp4 => {
                (direct::fc1_shared_bytes::<Mxfp4>(tokens, hidden), direct::fc2_shared_bytes::<Mxfp4>())
            }
        };
        let fc1_units = tokens as usize * top_k * (intermediate / fc1::unit_columns(1) as usize);
        let fc1_resident = self.fc1_direct(XType::Bf16).min_blocks as usize * multiprocessors;
        let fc2_units = tokens as usize * output.div_ceil(kernels_gpu::stream::ROWS as usize);
        let fc2_resident = self.fc2_direct().min_blocks as usize * multiprocessors;
        let grid = |units: usize, most: usize, shared_bytes| Grid { blocks: units.clamp(1, most) as u32, shared_bytes };
        (grid(fc1_units, fc1_resident, fc1_shared), grid(fc2_units, fc2_resident, fc2_shared))
    }

    /// Sizes of the launches for `tokens` tokens, 1 to `max_tokens`, where the variant is not [`Variant::DIRECT`].
    pub fn launches(&self, tokens: usize) -> Launches {
        self.launches_of(self.variant(tokens), tokens)
    }

    fn launches_of(&self, variant: Variant, tokens: usize) -> Launches {
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        let pairs = tokens * top_k;
        let groups = variant.groups(self.options.order);
        let entries = route_prep::max_entries(pairs, experts, (groups * route_prep::GROUP) as usize);
        let multiprocessors = self.device.multiprocessors as usize;
        let blocks = |work: usize, most: usize| work.clamp(1, most.min(i32::MAX as usize)) as u32;

        let warps = route_prep::counting_warps(pairs, experts, self.device.shared_per_block);
        // Eight elements a thread and step.
        let rewritten = tokens * row_stride(hidden) + pairs * (row_stride(intermediate) - intermediate);
        let rewriting = blocks(rewritten.div_ceil(8 * route_prep::THREADS as usize), 2 * multiprocessors);
        let split = self.options.order.partials() as u32;
        let (warps2, tiles1, tiles2) = match self.options.order {
            Order::Seed { .. } => (variant.fc2_warps.count(), 1, 1),
            Order::Decode => (4, variant.fc1.tiles(), variant.fc2.tiles()),
        };
        let fc1_resident = self.fc1_kernel(variant).min_blocks as usize * multiprocessors;
        let fc2_resident = self.fc2_kernel(variant).min_blocks as usize * multiprocessors;
        let (fc1_shared, fc2_shared) = match self.options.format {
            WeightFormat::Nvfp4 => {
                (fc1::shared_bytes::<Nvfp4>(split, tiles1, groups), fc2::shared_bytes::<Nvfp4>(warps2, tiles2))
            }
            WeightFormat::Mxfp4 => {
                (fc1::shared_bytes::<Mxfp4>(split, tiles1, groups), fc2::shared_bytes::<Mxfp4>(warps2, tiles2))
            }
        };
        let fc1_units = entries * (intermediate / fc1::unit_columns(tiles1) as usize);
        let fc2_units = entries * output.div_ceil((tiles2 * kernels_gpu::stream::ROWS) as usize);
        let summed = tokens * if output.is_multiple_of(4) { output / 4 } else { output };
        Launches {
            route_prep: Grid { blocks: 1 + rewriting, shared_bytes: route_prep::shared_bytes(warps, experts as u32) },
            counting_warps: warps,
            groups,
            fc1: Grid { blocks: blocks(fc1_units, fc1_resident), shared_bytes: fc1_shared },
            fc2: Grid { blocks: blocks(fc2_units.div_ceil(warps2 as usize), fc2_resident), shared_bytes: fc2_shared },
            combine: Grid {
                blocks: blocks(summed.div_ceil(combine::THREADS as usize), 8 * multiprocessors),
                shared_bytes: 0,
            },
        }
    }

    pub(crate) fn fc1_kernel(&self, variant: Variant) -> Kernel<fc1::fc1::Family> {
        use fc1::fc1::*;
        let LayerOptions { format, activation, order, .. } = self.options;
        match (format, activation, order, variant.fc1) {
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { split: Split::S1 }, _) => fc1_seed_bf16_split1,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { split: Split::S2 }, _) => fc1_seed_bf16_split2,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { split: Split::S4 }, _) => fc1_seed_bf16_split4,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { split: Split::S8 }, _) => fc1_seed_bf16_split8,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Decode, Tile::Rows16 | Tile::Direct) => {
                fc1_decode_bf16_rows16
            }
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Decode, Tile::Rows32) => fc1_decode_bf16_rows32,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Decode, Tile::Wide) => fc1_decode_bf16_wide,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { split: Split::S1 }, _) => fc1_seed_f16_split1,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { split: Split::S2 }, _) => fc1_seed_f16_split2,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { split: Split::S4 }, _) => fc1_seed_f16_split4,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { split: Split::S8 }, _) => fc1_seed_f16_split8,
            (WeightFormat::Nvfp4, Activation::F16, Order::Decode, Tile::Rows16 | Tile::Direct) => fc1_decode_f16_rows16,
            (WeightFormat::Nvfp4, Activation::F16, Order::Decode, Tile::Rows32) => fc1_decode_f16_rows32,
            (WeightFormat::Nvfp4, Activation::F16, Order::Decode, Tile::Wide) => fc1_decode_f16_wide,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Seed { split: Split::S1 }, _) => fc1_seed_mxfp4_bf16_split1,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Seed { split: Split::S2 }, _) => fc1_seed_mxfp4_bf16_split2,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Seed { split: Split::S4 }, _) => fc1_seed_mxfp4_bf16_split4,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Seed { split: Split::S8 }, _) => fc1_seed_mxfp4_bf16_split8,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Decode, Tile::Rows16 | Tile::Direct) => {
                fc1_decode_mxfp4_bf16_rows16
            }
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Decode, Tile::Rows32) => fc1_decode_mxfp4_bf16_rows32,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Decode, Tile::Wide) => fc1_decode_mxfp4_bf16_wide,
            (WeightFormat::Mxfp4, Activation::F16, Order::Seed { split: Split::S1 }, _) => fc1_seed_mxfp4_f16_split1,
            (WeightFormat::Mxfp4, Activation::F16, Order::Seed { split: Split::S2 }, _) => fc1_seed_mxfp4_f16_split2,
            (WeightFormat::Mxfp4, Activation::F16, Order::Seed { split: Split::S4 }, _) => fc1_seed_mxfp4_f16_split4,
            (WeightFormat::Mxfp4, Activation::F16, Order::Seed { split: Split::S8 }, _) => fc1_seed_mxfp4_f16_split8,
            (WeightFormat::Mxfp4, Activation::F16, Order::Decode, Tile::Rows16 | Tile::Direct) => {
                fc1_decode_mxfp4_f16_rows16
            }
            (WeightFormat::Mxfp4, Activation::F16, Order::Decode, Tile::Rows32) => fc1_decode_mxfp4_f16_rows32,
            (WeightFormat::Mxfp4, Activation::F16, Order::Decode, Tile::Wide) => fc1_decode_mxfp4_f16_wide,
        }
    }

    pub(crate) fn fc2_kernel(&self, variant: Variant) -> Kernel<fc2::fc2::Family> {
        use fc2::fc2::*;
        let LayerOptions { format, activation, order, .. } = self.options;
        match (format, activation, order, variant.fc2_warps, variant.fc2) {
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { .. }, Fc2Warps::W1, _) => fc2_seed_bf16_warps1,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { .. }, Fc2Warps::W2, _) => fc2_seed_bf16_warps2,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { .. }, Fc2Warps::W4, _) => fc2_seed_bf16_warps4,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Seed { .. }, Fc2Warps::W8, _) => fc2_seed_bf16_warps8,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Decode, _, Tile::Rows16 | Tile::Direct) => {
                fc2_decode_bf16_rows16
            }
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Decode, _, Tile::Rows32) => fc2_decode_bf16_rows32,
            (WeightFormat::Nvfp4, Activation::Bf16, Order::Decode, _, Tile::Wide) => fc2_decode_bf16_wide,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { .. }, Fc2Warps::W1, _) => fc2_seed_f16_warps1,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { .. }, Fc2Warps::W2, _) => fc2_seed_f16_warps2,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { .. }, Fc2Warps::W4, _) => fc2_seed_f16_warps4,
            (WeightFormat::Nvfp4, Activation::F16, Order::Seed { .. }, Fc2Warps::W8, _) => fc2_seed_f16_warps8,
            (WeightFormat::Nvfp4, Activation::F16, Order::Decode, _, Tile::Rows16 | Tile::Direct) => {
                fc2_decode_f16_rows16
            }
            (WeightFormat::Nvfp4, Activation::F16, Order::Decode, _, Tile::Rows32) => fc2_decode_f16_rows32,
            (WeightFormat::Nvfp4, Activation::F16, Order::Decode, _, Tile::Wide) => fc2_decode_f16_wide,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Seed { .. }, ..) => fc2_seed_mxfp4_bf16_warps4,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Decode, _, Tile::Rows16 | Tile::Direct) => {
                fc2_decode_mxfp4_bf16_rows16
            }
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Decode, _, Tile::Rows32) => fc2_decode_mxfp4_bf16_rows32,
            (WeightFormat::Mxfp4, Activation::Bf16, Order::Decode, _, Tile::Wide) => fc2_decode_mxfp4_bf16_wide,
            (WeightFormat::Mxfp4, Activation::F16, Order::Seed { .. }, ..) => fc2_seed_mxfp4_f16_warps4,
            (WeightFormat::Mxfp4, Activation::F16, Order::Decode, _, Tile::Rows16 | Tile::Direct) => {
                fc2_decode_mxfp4_f16_rows16
            }
            (WeightFormat::Mxfp4, Activation::F16, Order::Decode, _, Tile::Rows32) => fc2_decode_mxfp4_f16_rows32,
            (WeightFormat::Mxfp4, Activation::F16, Order::Decode, _, Tile::Wide) => fc2_decode_mxfp4_f16_wide,
        }
    }

    pub(crate) fn fc1_direct(&self, x: XType) -> Kernel<direct::fc1_direct::Family> {
        use direct::fc1_direct::*;
        match (self.options.format, self.options.activation, x) {
            (WeightFormat::Nvfp4, Activation::Bf16, _) => fc1_direct_bf16_bf16,
            (WeightFormat::Nvfp4, Activation::F16, XType::Bf16) => fc1_direct_bf16_f16,
            (WeightFormat::Nvfp4, Activation::F16, XType::F16) => fc1_direct_f16_f16,
            (WeightFormat::Mxfp4, Activation::Bf16, _) => fc1_direct_mxfp4_bf16_bf16,
            (WeightFormat::Mxfp4, Activation::F16, XType::Bf16) => fc1_direct_mxfp4_bf16_f16,
            (WeightFormat::Mxfp4, Activation::F16, XType::F16) => fc1_direct_mxfp4_f16_f16,
        }
    }

    pub(crate) fn fc2_direct(&self) -> Kernel<direct::fc2_direct::Family> {
        use direct::fc2_direct::*;
        match (self.options.format, self.options.activation) {
            (WeightFormat::Nvfp4, Activation::Bf16) => fc2_direct_bf16,
            (WeightFormat::Nvfp4, Activation::F16) => fc2_direct_f16,
            (WeightFormat::Mxfp4, Activation::Bf16) => fc2_direct_mxfp4_bf16,
            (WeightFormat::Mxfp4, Activation::F16) => fc2_direct_mxfp4_f16,
        }
    }

    pub(crate) fn prep_kernel<'a>(
        &self,
        x: Hidden<'a>,
    ) -> Result<(&'a Buffer<u16>, Kernel<route_prep::route_prep::Family>)> {
        use route_prep::route_prep::*;
        match (x, self.options.activation) {
            (Hidden::Bf16(x), Activation::Bf16) => Ok((x, route_prep_bf16_bf16)),
            (Hidden::Bf16(x), Activation::F16) => Ok((x, route_prep_bf16_f16)),
            (Hidden::F16(x), Activation::F16) => Ok((x, route_prep_f16_f16)),
            (Hidden::F16(_), Activation::Bf16) => {
                Err(Error::argument("x", "f16", "bf16, or a layer with Activation::F16"))
            }
        }
    }

    pub(crate) fn check_layer(&self, shape: &LayerShape, options: &LayerOptions) -> Result<()> {
        let arithmetic = |options: &LayerOptions| (options.format, options.activation, options.order);
        if (self.shape, arithmetic(&self.options)) == (*shape, arithmetic(options)) {
            return Ok(());
        }
        Err(Error::argument("plan", format!("{:?}", self.shape), format!("a plan for {shape:?} with {options:?}")))
    }

    pub(crate) fn table<'a>(&self, workspace: &'a Workspace) -> Table<'a> {
        let LayerShape { hidden, intermediate, output, experts, top_k } = self.shape;
        let pairs = self.max_tokens * top_k;
        let (entries, slots) = table_sizes(pairs, experts);
        let (memory, at) = (workspace.memory(), self.parts);
        Table {
            status: memory.part(0, 1),
            entry_count: memory.part(at.entry_count, 1),
            entries: memory.part(at.entries, entries * route_prep::RECORD_WORDS as usize),
            slots: memory.part(at.slots, slots),
            x_permuted: memory.part(at.x_permuted, self.max_tokens * row_stride(hidden)),
            h: memory.part(at.h, pairs * row_stride(intermediate)),
            y: memory.part(at.y, pairs * output),
        }
    }
}

/// Most entries of a routing table, and most words of its slots, whatever the width of an entry.
fn table_sizes(pairs: usize, experts: usize) -> (usize, usize) {
    let entries = |slots| route_prep::max_entries(pairs, experts, slots);
    let (narrow, wide) = (entries(8), entries(16));
    (narrow, (8 * narrow).max(16 * wide) * route_prep::SLOT_WORDS as usize)
}

impl Parts {
    /// `None` where the size overflows.
    fn of(shape: &LayerShape, max_tokens: usize) -> Option<Self> {
        let pairs = max_tokens.checked_mul(shape.top_k)?;
        let (entries, slots) = table_sizes(pairs, shape.experts);
        let mut end = 0usize;
        let mut part = |elements: usize, bytes: usize| {
            let at = end;
            end = end.checked_add(elements.checked_mul(bytes)?)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(at)
        };
        // The status word comes first: see `Workspace`.
        part(1, 4)?;
        let entry_count = part(1, 4)?;
        let entries = part(entries * route_prep::RECORD_WORDS as usize, 4)?;
        let slots = part(slots, 4)?;
        let x_permuted = part(max_tokens.checked_mul(row_stride(shape.hidden))?, 2)?;
        let h = part(pairs.checked_mul(row_stride(shape.intermediate))?, 2)?;
        let y = part(pairs.checked_mul(shape.output)?, 4)?;
        Some(Parts { entry_count, entries, slots, x_permuted, h, y, end })
    }
}
