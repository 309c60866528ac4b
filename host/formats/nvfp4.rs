//! NVFP4 expert weights: E2M1 codes, one E4M3 scale per 16 consecutive k, one f32 scale per matrix.

use std::borrow::Cow;

use rayon::prelude::*;

use super::scales::{LinearScales, SwizzledScales, product, write_swizzled};
use super::{NVFP4_BLOCK, e2m1, e4m3, float16};
use crate::error::{Error, Result, check_len};
use crate::types::LayerShape;

/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 4096;

/// Dimensions of a layer's expert weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Number of experts E.
    pub experts: usize,
    /// Hidden size K: columns of gate and up.
    pub hidden: usize,
    /// Intermediate size I: rows of gate and of up, columns of down.
    pub intermediate: usize,
    /// Output width H: rows of down.
    pub output: usize,
}

impl ExpertShape {
    /// The shape of a layer that gives each token `top_k` of these experts.
    pub fn with_top_k(self, top_k: usize) -> LayerShape {
        let ExpertShape { experts, hidden, intermediate, output } = self;
        LayerShape { hidden, intermediate, output, experts, top_k }
    }

    /// Checks the limits of NVFP4: 1..=4096 experts, `hidden` and `intermediate` positive multiples of 16, `output`
    /// positive, buffers that fit 64 bits. The error names the dimension.
    pub fn check_nvfp4(&self) -> Result<()> {
        if !(1..=MAX_EXPERTS).contains(&self.experts) {
            return Err(Error::argument("experts", self.experts, format!("1 to {MAX_EXPERTS} needed")));
        }
        for (name, value) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            if value == 0 || !value.is_multiple_of(NVFP4_BLOCK) {
                return Err(Error::argument(name, value, format!("a positive multiple of {NVFP4_BLOCK} is needed")));
            }
        }
        if self.output == 0 {
            return Err(Error::argument("output", 0, "at least 1 needed"));
        }
        self.w13_len()?;
        self.w2_len()?;
        Ok(())
    }

    /// Bytes of w13, [E, 2I, K/2].
    fn w13_len(&self) -> Result<usize> {
        product("w13", &[self.experts, 2, self.intermediate, self.hidden / 2])
    }

    /// Bytes of w2, [E, H, I/2].
    fn w2_len(&self) -> Result<usize> {
        product("w2", &[self.experts, self.output, self.intermediate / 2])
    }
}

impl From<LayerShape> for ExpertShape {
    fn from(shape: LayerShape) -> Self {
        let LayerShape { hidden, intermediate, output, experts, .. } = shape;
        ExpertShape { experts, hidden, intermediate, output }
    }
}

/// The f32 scale of a whole matrix, with the convention that its file uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GlobalScale {
    /// Weights are multiplied by it: ModelOpt's `weight_scale_2`, amax/2688.
    Multiplier(f32),
    /// Weights are divided by it: compressed-tensors' `weight_global_scale`, 2688/amax.
    Divisor(f32),
}

impl GlobalScale {
    /// Name of the tensor that has this convention.
    pub const fn tensor_name(self) -> &'static str {
        match self {
            GlobalScale::Multiplier(_) => "weight_scale_2",
            GlobalScale::Divisor(_) => "weight_global_scale",
        }
    }

    /// The number as stored.
    pub const fn stored(self) -> f32 {
        match self {
            GlobalScale::Multiplier(value) | GlobalScale::Divisor(value) => value,
        }
    }

    /// The factor that weights are multiplied by.
    pub fn multiplier(self) -> f32 {
        match self {
            GlobalScale::Multiplier(value) => value,
            GlobalScale::Divisor(value) => 1.0 / value,
        }
    }

    /// Are both the stored number and the factor finite and positive?
    pub fn is_valid(self) -> bool {
        [self.stored(), self.multiplier()].iter().all(|value| value.is_finite() && *value > 0.0)
    }

    /// f32 value of a block scale with the global scale applied, in the order that the convention's tools use. A weight
    /// is its code times this.
    pub fn apply(self, block_scale: u8) -> f32 {
        match self {
            GlobalScale::Multiplier(value) => e4m3::decode(block_scale) * value,
            GlobalScale::Divisor(value) => e4m3::decode(block_scale) / value,
        }
    }
}

/// One NVFP4 matrix as checkpoints store it.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Matrix<'a> {
    rows: usize,
    cols: usize,
    codes: Cow<'a, [u8]>,
    scales: LinearScales<'a>,
    global: GlobalScale,
}

impl<'a> Nvfp4Matrix<'a> {
    /// Takes `rows` x `cols`/2 bytes of codes (low nibble = even column), `rows` x `cols`/16 scales and the global scale.
    pub fn new(
        rows: usize,
        cols: usize,
        codes: impl Into<Cow<'a, [u8]>>,
        scales: LinearScales<'a>,
        global: GlobalScale,
    ) -> Result<Self> {
        if cols == 0 || !cols.is_multiple_of(NVFP4_BLOCK) {
            return Err(Error::argument("cols", cols, format!("a positive multiple of {NVFP4_BLOCK} is needed")));
        }
        let codes = codes.into();
        check_len("codes", codes.len(), product("codes", &[rows, cols / 2])?)?;
        if (scales.rows(), scales.cols()) != (rows, cols / NVFP4_BLOCK) {
            return Err(Error::argument(
                "scales",
                format!("{} x {}", scales.rows(), scales.cols()),
                format!("{rows} x {} needed", cols / NVFP4_BLOCK),
            ));
        }
        Ok(Self { rows, cols, codes, scales, global })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Packed codes, row-major, `cols`/2 bytes a row.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Block scales.
    pub fn scales(&self) -> &LinearScales<'a> {
        &self.scales
    }

    /// Scale of the whole matrix.
    pub fn global(&self) -> GlobalScale {
        self.global
    }

    /// Is one of the block scales NaN?
    pub fn has_nan_scale(&self) -> bool {
        self.scales.bytes().iter().any(|&byte| e4m3::is_nan(byte))
    }

    /// f32 weights [rows, cols]: code·(scale·multiplier) or code·(scale/divisor), the bits of the convention's own tool
    /// (but for the code of -0, which ModelOpt turns into +0). A NaN scale gives 0x7FFFFFFF.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.rows * self.cols);
        for (block, &scale) in self.codes.chunks_exact(NVFP4_BLOCK / 2).zip(self.scales.bytes()) {
            let scale = self.global.apply(scale);
            for &byte in block {
                let (even, odd) = e2m1::unpack(byte);
                out.extend([even, odd].map(|code| float16::canonical_f32(e2m1::decode(code) * scale)));
            }
        }
        out
    }
}

/// The three matrices of one expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertTensors<'a> {
    /// [I, K].
    pub gate: Nvfp4Matrix<'a>,
    /// [I, K].
    pub up: Nvfp4Matrix<'a>,
    /// [H, I].
    pub down: Nvfp4Matrix<'a>,
}

/// The buffers of [`Nvfp4Experts`], by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Buffers {
    /// Codes of up and gate, [E, 2I, K/2]: rows 0..I are up, I..2I gate; the low nibble is the even k.
    pub w13: Vec<u8>,
    /// Block scales of w13: 2I rows, K/16 columns.
    pub s13: SwizzledScales,
    /// Global scales of w13 as multipliers: `[e][0]` of up, `[e][1]` of gate.
    pub alpha1: Vec<[f32; 2]>,
    /// Codes of down, [E, H, I/2].
    pub w2: Vec<u8>,
    /// Block scales of w2: H rows, I/16 columns.
    pub s2: SwizzledScales,
    /// Global scales of w2 as multipliers, `[E]`.
    pub alpha2: Vec<f32>,
}

/// NVFP4 weights of a layer's routed experts, checked, in the layout that kernels read.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Experts {
    shape: ExpertShape,
    buffers: Nvfp4Buffers,
}

impl Nvfp4Experts {
    /// Checks the shape (see [`ExpertShape::check_nvfp4`]), the length of each buffer and that the alphas are finite.
    /// An alpha of 0 is a dead expert and legal. Errors name the dimension or the buffer, and list every bad expert.
    pub fn new(shape: ExpertShape, buffers: Nvfp4Buffers) -> Result<Self> {
        shape.check_nvfp4()?;
        let ExpertShape { experts, hidden, intermediate, output } = shape;
        check_len("w13", buffers.w13.len(), shape.w13_len()?)?;
        check_scales("s13", &buffers.s13, [experts, 2 * intermediate, hidden / NVFP4_BLOCK])?;
        check_len("alpha1", buffers.alpha1.len(), experts)?;
        check_len("w2", buffers.w2.len(), shape.w2_len()?)?;
        check_scales("s2", &buffers.s2, [experts, output, intermediate / NVFP4_BLOCK])?;
        check_len("alpha2", buffers.alpha2.len(), experts)?;
        check_alphas("alpha1", &buffers.alpha1)?;
        check_alphas("alpha2", &buffers.alpha2.iter().map(|&alpha| [alpha]).collect::<Vec<_>>())?;
        Ok(Self { shape, buffers })
    }

    /// Packs experts as checkpoints store them. All need the shapes of the first, and global scales that are finite and
    /// positive; each half of w13 keeps its own.
    pub fn pack(experts: &[ExpertTensors<'_>]) -> Result<Self> {
        let first = experts.first().ok_or_else(|| Error::argument("experts", 0, "at least 1 needed"))?;
        let shape = ExpertShape {
            experts: experts.len(),
            hidden: first.gate.cols,
            intermediate: first.gate.rows,
            output: first.down.rows,
        };
        shape.check_nvfp4()?;
        let ExpertShape { hidden, intermediate, output, .. } = shape;
        for (name, part, needed) in [
            ("gate", (|e| &e.gate) as Part, (intermediate, hidden)),
            ("up", |e| &e.up, (intermediate, hidden)),
            ("down", |e| &e.down, (output, intermediate)),
        ] {
            let wrong = indices_where(experts, |e| (part(e).rows, part(e).cols) != needed);
            if let Some(&e) = wrong.first() {
                let problem = format!(
                    "expert {e} has {} x {}, {} x {} needed",
                    part(&experts[e]).rows,
                    part(&experts[e]).cols,
                    needed.0,
                    needed.1
                );
                return Err(Error::Experts { name, experts: wrong, problem });
            }
            check_global_scales(name, experts.iter().map(|e| part(e).global))?;
        }

        let mut w13 = vec![0; shape.w13_len()?];
        let half = intermediate * (hidden / 2);
        w13.par_chunks_mut(2 * half).zip(experts).for_each(|(out, expert)| {
            out[..half].copy_from_slice(&expert.up.codes);
            out[half..].copy_from_slice(&expert.gate.codes);
        });
        let mut w2 = vec![0; shape.w2_len()?];
        w2.par_chunks_mut(output * (intermediate / 2)).zip(experts).for_each(|(out, expert)| {
            out.copy_from_slice(&expert.down.codes);
        });
        let mut s13 = SwizzledScales::zeroed("s13", experts.len(), 2 * intermediate, hidden / NVFP4_BLOCK)?;
        s13.experts_mut().zip(experts).for_each(|(out, expert)| {
            write_swizzled(out, 0, &expert.up.scales);
            write_swizzled(out, intermediate, &expert.gate.scales);
        });
        let mut s2 = SwizzledScales::zeroed("s2", experts.len(), output, intermediate / NVFP4_BLOCK)?;
        s2.experts_mut().zip(experts).for_each(|(out, expert)| write_swizzled(out, 0, &expert.down.scales));
        let alpha1 = experts.iter().map(|e| [e.up.global.multiplier(), e.gate.global.multiplier()]).collect();
        let alpha2 = experts.iter().map(|e| e.down.global.multiplier()).collect();
        Self::new(shape, Nvfp4Buffers { w13, s13, alpha1, w2, s2, alpha2 })
    }

    /// Dimensions.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// Codes of up and gate, [E, 2I, K/2]: rows 0..I are up, I..2I gate; the low nibble is the even k.
    pub fn w13(&self) -> &[u8] {
        &self.buffers.w13
    }

    /// Block scales of w13: 2I rows, K/16 columns.
    pub fn s13(&self) -> &SwizzledScales {
        &self.buffers.s13
    }

    /// Global scales of w13 as multipliers: `[e][0]` of up, `[e][1]` of gate.
    pub fn alpha1(&self) -> &[[f32; 2]] {
        &self.buffers.alpha1
    }

    /// Codes of down, [E, H, I/2].
    pub fn w2(&self) -> &[u8] {
        &self.buffers.w2
    }

    /// Block scales of w2: H rows, I/16 columns.
    pub fn s2(&self) -> &SwizzledScales {
        &self.buffers.s2
    }

    /// Global scales of w2 as multipliers, `[E]`.
    pub fn alpha2(&self) -> &[f32] {
        &self.buffers.alpha2
    }

    /// The buffers, for example to change one and check again with [`Nvfp4Experts::new`].
    pub fn into_buffers(self) -> Nvfp4Buffers {
        self.buffers
    }

    /// One expert as checkpoints store it, with multipliers: the inverse of [`Nvfp4Experts::pack`] but for the
    /// convention. Panics if there is no such expert, as indexing does.
    pub fn unpack(&self, expert: usize) -> ExpertTensors<'_> {
        let ExpertShape { hidden, intermediate, output, .. } = self.shape;
        let half = intermediate * (hidden / 2);
        let down_len = output * (intermediate / 2);
        let w13 = &self.w13()[expert * 2 * half..][..2 * half];
        let s13 = self.s13().unswizzle(expert).bytes().to_vec();
        let (up_scales, gate_scales) = s13.split_at(s13.len() / 2);
        let [up_alpha, gate_alpha] = self.alpha1()[expert];
        let half_matrix = |codes, scales: &[u8], alpha| Nvfp4Matrix {
            rows: intermediate,
            cols: hidden,
            codes: Cow::Borrowed(codes),
            scales: LinearScales::new("s13", intermediate, hidden / NVFP4_BLOCK, scales.to_vec())
                .expect("half of an expert's scales"),
            global: GlobalScale::Multiplier(alpha),
        };
        ExpertTensors {
            up: half_matrix(&w13[..half], up_scales, up_alpha),
            gate: half_matrix(&w13[half..], gate_scales, gate_alpha),
            down: Nvfp4Matrix {
                rows: output,
                cols: intermediate,
                codes: Cow::Borrowed(&self.w2()[expert * down_len..][..down_len]),
                scales: self.s2().unswizzle(expert),
                global: GlobalScale::Multiplier(self.alpha2()[expert]),
            },
        }
    }
}

/// Picks one matrix of an expert.
type Part = for<'e, 'a> fn(&'e ExpertTensors<'a>) -> &'e Nvfp4Matrix<'a>;

/// Weight-only alphas from the processed ones that serving engines keep, `weight_scale_2`·`input_scale`: the quotient.
///
/// Only here is an `input_scale` read: a weight-only checkpoint needs none. It must be finite and positive for every
/// expert; the error lists all that are not.
pub fn alphas_from_processed(processed: &[f32], input_scale: &[f32]) -> Result<Vec<f32>> {
    check_len("input_scale", input_scale.len(), processed.len())?;
    let wrong = indices_where(input_scale, |scale| !scale.is_finite() || *scale <= 0.0);
    if !wrong.is_empty() {
        let values: Vec<f32> = wrong.iter().map(|&e| input_scale[e]).collect();
        let problem = format!("{values:?}, finite and positive numbers needed");
        return Err(Error::Experts { name: "input_scale", experts: wrong, problem });
    }
    let alphas: Vec<f32> = processed.iter().zip(input_scale).map(|(alpha, scale)| alpha / scale).collect();
    check_alphas("alpha", &alphas.iter().map(|&alpha| [alpha]).collect::<Vec<_>>())?;
    Ok(alphas)
}

/// `Err` listing every expert whose global scale is not finite and positive. `matrix` says of which matrix.
fn check_global_scales(matrix: &str, scales: impl Iterator<Item = GlobalScale>) -> Result<()> {
    let wrong: Vec<(usize, GlobalScale)> = scales.enumerate().filter(|(_, scale)| !scale.is_valid()).collect();
    let Some((_, first)) = wrong.first() else { return Ok(()) };
    let values: Vec<f32> = wrong.iter().map(|(_, scale)| scale.stored()).collect();
    Err(Error::Experts {
        name: first.tensor_name(),
        experts: wrong.iter().map(|(expert, _)| *expert).collect(),
        problem: format!("{values:?} for {matrix}, finite and positive numbers with finite reciprocals needed"),
    })
}

fn check_alphas<const N: usize>(name: &'static str, alphas: &[[f32; N]]) -> Result<()> {
    let wrong = indices_where(alphas, |alpha| alpha.iter().any(|value| !value.is_finite()));
    if wrong.is_empty() {
        return Ok(());
    }
    let values: Vec<[f32; N]> = wrong.iter().map(|&e| alphas[e]).collect();
    Err(Error::Experts { name, experts: wrong, problem: format!("{values:?}, finite numbers needed") })
}

fn check_scales(name: &'static str, scales: &SwizzledScales, needed: [usize; 3]) -> Result<()> {
    let given = [scales.experts(), scales.rows(), scales.cols()];
    if given == needed {
        return Ok(());
    }
    let text = |[experts, rows, cols]: [usize; 3]| format!("{experts} experts of {rows} x {cols} scales");
    Err(Error::argument(name, text(given), format!("{} needed", text(needed))))
}

fn indices_where<T>(items: &[T], wrong: impl Fn(&T) -> bool) -> Vec<usize> {
    items.iter().enumerate().filter(|(_, item)| wrong(item)).map(|(index, _)| index).collect()
}
