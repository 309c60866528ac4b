//! Shapes, options and weights that every part of the library shares.

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

/// Named order of the sums of a layer. The bits of a result are a function of the inputs, the activation and this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// 128-k chunks ascending, eight mma a chunk, 256-k segments divided among `split` partial sums.
    Seed {
        /// Partial sums of FC1.
        split: Split,
    },
}

impl Default for Order {
    fn default() -> Self {
        Order::Seed { split: Split::S4 }
    }
}

/// What selects the arithmetic of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerOptions {
    /// bf16 or f16 activations.
    pub activation: Activation,
    /// Order of the sums.
    pub order: Order,
    /// SwiGLU clamp: gate from above, up on both sides. `None`: no clamp. Must be > 0.
    pub limit: Option<f32>,
}
