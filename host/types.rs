//! Shapes, options and weights that every part of the library shares.

use crate::formats::DenseFormat;

/// Dimensions of a layer's routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Hidden size K: columns of w13.
    pub hidden: usize,
    /// Intermediate size I: columns of w2; w13 has 2·I rows.
    pub intermediate: usize,
    /// Output width H: rows of w2 (equals `hidden` in published models).
    pub output: usize,
    /// Number of experts E.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
}

/// Format in which activations enter the tensor cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x and h are bf16 (no range problem).
    #[default]
    Bf16,
    /// x and h are f16; a finite value that becomes infinite sets a status bit.
    F16,
}

/// Format of the experts' weights. Both hold E2M1 codes, two a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One e4m3 scale per 16 consecutive k, and f32 scales of whole matrices.
    #[default]
    Nvfp4,
    /// One e8m0 scale, a power of two, per 32 consecutive k.
    Mxfp4,
}

impl WeightFormat {
    /// All formats.
    pub const ALL: [WeightFormat; 2] = [WeightFormat::Nvfp4, WeightFormat::Mxfp4];

    /// Consecutive k with one scale.
    pub const fn block(self) -> usize {
        match self {
            WeightFormat::Nvfp4 => 16,
            WeightFormat::Mxfp4 => 32,
        }
    }

    /// Its name in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            WeightFormat::Nvfp4 => "nvfp4",
            WeightFormat::Mxfp4 => "mxfp4",
        }
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Element type of the hidden states handed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum XType {
    /// bf16 bits.
    Bf16,
    /// f16 bits (only with [`Activation::F16`]).
    F16,
}

/// K split of FC1: number of partial sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Split {
    /// One chain.
    S1,
    /// Two partial sums.
    S2,
    /// Four partial sums (the default).
    #[default]
    S4,
    /// Eight partial sums.
    S8,
}

impl Split {
    /// All splits, ascending.
    pub const ALL: [Split; 4] = [Split::S1, Split::S2, Split::S4, Split::S8];

    /// Number of partial sums.
    pub const fn count(self) -> usize {
        match self {
            Split::S1 => 1,
            Split::S2 => 2,
            Split::S4 => 4,
            Split::S8 => 8,
        }
    }
}

/// Named order of the sums of a layer. The bits of a result are a function of the inputs, the activation and this; docs/bits.md
/// defines each order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// 128-k chunks ascending, eight mma a chunk, 256-k segments divided among `split` partial sums.
    Seed {
        /// Partial sums of FC1.
        split: Split,
    },
    /// The same chunks, other k in each mma; segment s of FC1 belongs to partial sum s mod 4, of which there are always four. NVFP4
    /// weights enter divided by 2^8 (bf16) or 2^7 (f16), and the finished sums are multiplied by that.
    #[default]
    Decode,
}

impl Order {
    /// All orders: `seed` by ascending split, `decode`.
    pub const ALL: [Order; 5] = [
        Order::Seed { split: Split::S1 },
        Order::Seed { split: Split::S2 },
        Order::Seed { split: Split::S4 },
        Order::Seed { split: Split::S8 },
        Order::Decode,
    ];

    /// Its name in small letters, without the split.
    pub const fn name(self) -> &'static str {
        match self {
            Order::Seed { .. } => "seed",
            Order::Decode => "decode",
        }
    }

    /// Partial sums of FC1.
    pub const fn partials(self) -> usize {
        match self {
            Order::Seed { split } => split.count(),
            Order::Decode => 4,
        }
    }
}

/// The name, and the split of the order `seed`.
impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Order::Seed { split } => write!(f, "seed, split {}", split.count()),
            Order::Decode => f.write_str("decode"),
        }
    }
}

/// What selects the arithmetic of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerOptions {
    /// Format of the weights, which must be that of the experts.
    pub format: WeightFormat,
    /// bf16 or f16 activations.
    pub activation: Activation,
    /// Order of the sums.
    pub order: Order,
    /// What joins gate and up, with its clamp.
    pub gating: Gating,
}

/// Operands of the grouped GEMMs of a layer whose experts are FP8 or BF16, and with them the order of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedArithmetic {
    /// FP8 experts; activations are quantised to e4m3 before each GEMM.
    W8a8,
    /// FP8 experts, bf16 activations.
    W8a16,
    /// BF16 experts and activations.
    Bf16,
}

impl GroupedArithmetic {
    /// All of them.
    pub const ALL: [GroupedArithmetic; 3] =
        [GroupedArithmetic::W8a8, GroupedArithmetic::W8a16, GroupedArithmetic::Bf16];

    /// Its name in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            GroupedArithmetic::W8a8 => "w8a8",
            GroupedArithmetic::W8a16 => "w8a16",
            GroupedArithmetic::Bf16 => "bf16",
        }
    }

    /// Format of the experts that it takes.
    pub const fn weights(self) -> DenseFormat {
        match self {
            GroupedArithmetic::W8a8 | GroupedArithmetic::W8a16 => DenseFormat::Fp8,
            GroupedArithmetic::Bf16 => DenseFormat::Bf16,
        }
    }

    /// The first choice for experts of `format`.
    pub const fn of(format: DenseFormat) -> Self {
        match format {
            DenseFormat::Fp8 => GroupedArithmetic::W8a8,
            DenseFormat::Bf16 => GroupedArithmetic::Bf16,
        }
    }

    /// `Err` naming `arithmetic` unless it takes experts of `format`.
    pub(crate) fn check(self, format: DenseFormat) -> crate::Result<()> {
        if self.weights() == format {
            return Ok(());
        }
        let needed = format!("one for {format} experts");
        Err(crate::Error::argument("arithmetic", self, needed))
    }
}

impl std::fmt::Display for GroupedArithmetic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// What selects the arithmetic of a layer with FP8 or BF16 experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedOptions {
    /// Operands of the GEMMs; must be for the experts' format.
    pub arithmetic: GroupedArithmetic,
    /// What joins gate and up, with its clamp.
    pub gating: Gating,
}

/// Score that a router gives an expert, and how weights come from the scores of the chosen ones. `l` is a logit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// Softmax over all experts; the weight is the probability.
    Softmax,
    /// Top-k logits first, then softmax over those alone.
    SelectedSoftmax,
    /// sigmoid(l).
    Sigmoid,
    /// sqrt(softplus(l)).
    SqrtSoftplus,
}

/// Limits the choice of experts to the best groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Groups of consecutive experts; divides the number of experts.
    pub count: usize,
    /// Groups that stay: those with the largest sums of their two best scores.
    pub keep: usize,
}

/// How logits become expert ids and weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Scores.
    pub scoring: Scoring,
    /// Experts of a token.
    pub top_k: usize,
    /// Whether the weights are divided by their sum.
    pub renormalize: bool,
    /// Restriction to groups of experts.
    pub groups: Option<Groups>,
    /// Factor on the weights, after renormalising.
    pub scale: f32,
}

/// What joins gate and up, with its clamp: gate from above, up on both sides, before the activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gating {
    /// (g · sigmoid(g)) · u.
    Silu {
        /// Clamp, > 0. `None`: none.
        limit: Option<f32>,
    },
    /// (u + 1) · (g · sigmoid(alpha · g)).
    SwigluOai {
        /// Factor inside the sigmoid (1.702 in gpt-oss).
        alpha: f32,
        /// Clamp, > 0 (7 in gpt-oss).
        limit: f32,
    },
}

impl Gating {
    /// SwiGLU as gpt-oss has it.
    pub const GPT_OSS: Gating = Gating::SwigluOai { alpha: 1.702, limit: 7.0 };

    /// The clamp.
    pub const fn limit(self) -> Option<f32> {
        match self {
            Gating::Silu { limit } => limit,
            Gating::SwigluOai { limit, .. } => Some(limit),
        }
    }

    /// `Err` naming `limit` or `alpha` where it is outside its range.
    pub fn check(self) -> crate::Result<()> {
        if let Some(limit) = self.limit()
            && (limit.is_nan() || limit <= 0.0)
        {
            let needed = "a positive number, or None for no clamp";
            return Err(crate::Error::argument("limit", limit, needed));
        }
        match self {
            Gating::SwigluOai { alpha, .. } if !alpha.is_finite() => {
                Err(crate::Error::argument("alpha", alpha, "a finite number"))
            }
            _ => Ok(()),
        }
    }
}

impl Default for Gating {
    fn default() -> Self {
        Gating::Silu { limit: None }
    }
}
