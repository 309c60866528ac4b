//! Expert weights in four bits: E2M1 codes with block scales. NVFP4 has one E4M3 scale per 16 consecutive k and one f32 scale per
//! matrix, MXFP4 one E8M0 scale per 32 consecutive k.

use std::borrow::Cow;

use rayon::prelude::*;

use super::scales::{LinearScales, SwizzledScales, product, write_swizzled};
use super::{e2m1, e4m3, e8m0, float16};
use crate::error::{Error, Result, check_len};
use crate::types::{LayerShape, WeightFormat};

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

    /// Checks the limits of a format: 1..=4096 experts, `hidden` and `intermediate` positive multiples of its block,
    /// `output` positive, buffers that fit 64 bits. The error names the dimension.
    pub fn check(&self, format: WeightFormat) -> Result<()> {
        if !(1..=MAX_EXPERTS).contains(&self.experts) {
            return Err(Error::argument("experts", self.experts, format!("1 to {MAX_EXPERTS} needed")));
        }
        for (name, value) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            check_blocks(name, value, format)?;
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

/// One matrix as checkpoints store it.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp4Matrix<'a> {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    codes: Cow<'a, [u8]>,
    scales: LinearScales<'a>,
    global: GlobalScale,
}

impl<'a> Fp4Matrix<'a> {
    /// An NVFP4 matrix from `rows` x `cols`/2 bytes of codes (low nibble = even column), `rows` x `cols`/16 scales and the
    /// global scale.
    pub fn new(
        rows: usize,
        cols: usize,
        codes: impl Into<Cow<'a, [u8]>>,
        scales: LinearScales<'a>,
        global: GlobalScale,
    ) -> Result<Self> {
        Self::checked(Fp4Matrix { format: WeightFormat::Nvfp4, rows, cols, codes: codes.into(), scales, global })
    }

    /// An MXFP4 matrix from `rows` x `cols`/2 bytes of codes (low nibble = even column) and `rows` x `cols`/32 scales.
    pub fn mxfp4(rows: usize, cols: usize, codes: impl Into<Cow<'a, [u8]>>, scales: LinearScales<'a>) -> Result<Self> {
        let global = GlobalScale::Multiplier(1.0);
        Self::checked(Fp4Matrix { format: WeightFormat::Mxfp4, rows, cols, codes: codes.into(), scales, global })
    }

    fn checked(self) -> Result<Self> {
        let Fp4Matrix { format, rows, cols, codes, scales, .. } = &self;
        check_blocks("cols", *cols, *format)?;
        check_len("codes", codes.len(), product("codes", &[*rows, cols / 2])?)?;
        if (scales.rows(), scales.cols()) != (*rows, cols / format.block()) {
            return Err(Error::argument(
                "scales",
                format!("{} x {}", scales.rows(), scales.cols()),
                format!("{rows} x {} needed", cols / format.block()),
            ));
        }
        Ok(self)
    }

    /// Format of codes and scales.
    pub fn format(&self) -> WeightFormat {
        self.format
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

    /// Scale of the whole matrix; 1 for MXFP4.
    pub fn global(&self) -> GlobalScale {
        self.global
    }

    /// Is one of the block scales NaN?
    pub fn has_nan_scale(&self) -> bool {
        self.scales.bytes().iter().any(|&byte| match self.format {
            WeightFormat::Nvfp4 => e4m3::is_nan(byte),
            WeightFormat::Mxfp4 => byte == e8m0::NAN,
        })
    }

    /// The matrix of the even rows and that of the odd rows: gate and up where a checkpoint interleaves them, as gpt-oss does.
    /// An error names `rows` if they are odd.
    pub fn split_interleaved(&self) -> Result<[Fp4Matrix<'static>; 2]> {
        if !self.rows.is_multiple_of(2) {
            return Err(Error::argument("rows", self.rows, "an even number, gate and up by turns"));
        }
        let rows = self.rows / 2;
        let pick = |bytes: &[u8], width: usize, first: usize| {
            bytes.chunks_exact(width).skip(first).step_by(2).flatten().copied().collect::<Vec<u8>>()
        };
        let half = |first: usize| {
            let scales = pick(self.scales.bytes(), self.scales.cols(), first);
            Ok(Fp4Matrix {
                rows,
                codes: pick(&self.codes, self.cols / 2, first).into(),
                scales: LinearScales::new("scales", rows, self.scales.cols(), scales)?,
                ..*self
            })
        };
        Ok([half(0)?, half(1)?])
    }

    /// f32 weights [rows, cols]: code·(scale·multiplier) or code·(scale/divisor), the bits of the convention's own tool
    /// (but for the code of -0, which ModelOpt turns into +0); code·scale for MXFP4. A NaN scale gives 0x7FFFFFFF.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.rows * self.cols);
        for (block, &scale) in self.codes.chunks_exact(self.format.block() / 2).zip(self.scales.bytes()) {
            let scale = match self.format {
                WeightFormat::Nvfp4 => self.global.apply(scale),
                WeightFormat::Mxfp4 => e8m0::decode(scale),
            };
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
    pub gate: Fp4Matrix<'a>,
    /// [I, K].
    pub up: Fp4Matrix<'a>,
    /// [H, I].
    pub down: Fp4Matrix<'a>,
}

/// The buffers of [`Fp4Experts`], by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp4Buffers {
    /// Format of codes and scales.
    pub format: WeightFormat,
    /// Codes of up and gate, [E, 2I, K/2]: rows 0..I are up, I..2I gate; the low nibble is the even k.
    pub w13: Vec<u8>,
    /// Block scales of w13: 2I rows, K/block columns.
    pub s13: SwizzledScales,
    /// Global scales of w13 as multipliers: `[e][0]` of up, `[e][1]` of gate. All 1 for MXFP4.
    pub alpha1: Vec<[f32; 2]>,
    /// Biases of up and gate, [E, 2I] in the order of the rows of w13.
    pub b13: Option<Vec<f32>>,
    /// Codes of down, [E, H, I/2].
    pub w2: Vec<u8>,
    /// Block scales of w2: H rows, I/block columns.
    pub s2: SwizzledScales,
    /// Global scales of w2 as multipliers, `[E]`. All 1 for MXFP4.
    pub alpha2: Vec<f32>,
    /// Biases of down, [E, H].
    pub b2: Option<Vec<f32>>,
}

/// Weights of a layer's routed experts, checked, in the layout that kernels read.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp4Experts {
    shape: ExpertShape,
    buffers: Fp4Buffers,
}

impl Fp4Experts {
    /// Checks the shape (see [`ExpertShape::check`]), the length of each buffer and that alphas and biases are finite.
    /// An alpha of 0 is a dead expert and legal; those of MXFP4 are 1. Errors name the dimension or the buffer, and list every
    /// bad expert.
    pub fn new(shape: ExpertShape, buffers: Fp4Buffers) -> Result<Self> {
        let Fp4Buffers { format, w13, s13, alpha1, b13, w2, s2, alpha2, b2 } = &buffers;
        shape.check(*format)?;
        let ExpertShape { experts, hidden, intermediate, output } = shape;
        check_len("w13", w13.len(), shape.w13_len()?)?;
        check_scales("s13", s13, [experts, 2 * intermediate, hidden / format.block()])?;
        check_len("alpha1", alpha1.len(), experts)?;
        check_len("w2", w2.len(), shape.w2_len()?)?;
        check_scales("s2", s2, [experts, output, intermediate / format.block()])?;
        check_len("alpha2", alpha2.len(), experts)?;
        check_alphas(*format, "alpha1", alpha1)?;
        check_alphas(*format, "alpha2", &alpha2.iter().map(|&alpha| [alpha]).collect::<Vec<_>>())?;
        check_biases("b13", b13.as_deref(), experts, 2 * intermediate)?;
        check_biases("b2", b2.as_deref(), experts, output)?;
        Ok(Self { shape, buffers })
    }

    /// The same experts with biases: `b13` [E, 2I], of up and then of gate (see [`up_gate_biases`] for interleaved ones), and
    /// `b2` [E, H].
    pub fn with_biases(mut self, b13: Option<Vec<f32>>, b2: Option<Vec<f32>>) -> Result<Self> {
        (self.buffers.b13, self.buffers.b2) = (b13, b2);
        Self::new(self.shape, self.buffers)
    }

    /// Packs experts as checkpoints store them, without biases. All need the shapes and the format of the first, and global
    /// scales that are finite and positive; each half of w13 keeps its own.
    pub fn pack(experts: &[ExpertTensors<'_>]) -> Result<Self> {
        let first = experts.first().ok_or_else(|| Error::argument("experts", 0, "at least 1 needed"))?;
        let shape = ExpertShape {
            experts: experts.len(),
            hidden: first.gate.cols,
            intermediate: first.gate.rows,
            output: first.down.rows,
        };
        let format = first.gate.format;
        shape.check(format)?;
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
            let wrong = indices_where(experts, |e| part(e).format != format);
            if !wrong.is_empty() {
                let problem = format!("not {format} as expert 0's gate");
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
        let mut s13 = SwizzledScales::zeroed("s13", experts.len(), 2 * intermediate, hidden / format.block())?;
        s13.experts_mut().zip(experts).for_each(|(out, expert)| {
            write_swizzled(out, 0, &expert.up.scales);
            write_swizzled(out, intermediate, &expert.gate.scales);
        });
        let mut s2 = SwizzledScales::zeroed("s2", experts.len(), output, intermediate / format.block())?;
        s2.experts_mut().zip(experts).for_each(|(out, expert)| write_swizzled(out, 0, &expert.down.scales));
        let alpha1 = experts.iter().map(|e| [e.up.global.multiplier(), e.gate.global.multiplier()]).collect();
        let alpha2 = experts.iter().map(|e| e.down.global.multiplier()).collect();
        Self::new(shape, Fp4Buffers { format, w13, s13, alpha1, b13: None, w2, s2, alpha2, b2: None })
    }

    /// Dimensions.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// Format of codes and scales.
    pub fn format(&self) -> WeightFormat {
        self.buffers.format
    }

    /// Codes of up and gate, [E, 2I, K/2]: rows 0..I are up, I..2I gate; the low nibble is the even k.
    pub fn w13(&self) -> &[u8] {
        &self.buffers.w13
    }

    /// Block scales of w13: 2I rows, K/block columns.
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

    /// Block scales of w2: H rows, I/block columns.
    pub fn s2(&self) -> &SwizzledScales {
        &self.buffers.s2
    }

    /// Global scales of w2 as multipliers, `[E]`.
    pub fn alpha2(&self) -> &[f32] {
        &self.buffers.alpha2
    }

    /// Biases of up and gate, [E, 2I].
    pub fn b13(&self) -> Option<&[f32]> {
        self.buffers.b13.as_deref()
    }

    /// Biases of down, [E, H].
    pub fn b2(&self) -> Option<&[f32]> {
        self.buffers.b2.as_deref()
    }

    /// Whether these weights can be used with f16 activations; see [`check_f16_scales`].
    pub fn check_f16(&self) -> Result<()> {
        check_f16_scales(self.format(), "s13", self.s13())?;
        check_f16_scales(self.format(), "s2", self.s2())
    }

    /// The buffers, for example to change one and check again with [`Fp4Experts::new`].
    pub fn into_buffers(self) -> Fp4Buffers {
        self.buffers
    }

    /// One expert as checkpoints store it, with multipliers and without biases: the inverse of [`Fp4Experts::pack`] but for
    /// the convention. Panics if there is no such expert, as indexing does.
    pub fn unpack(&self, expert: usize) -> ExpertTensors<'_> {
        let ExpertShape { hidden, intermediate, output, .. } = self.shape;
        let half = intermediate * (hidden / 2);
        let down_len = output * (intermediate / 2);
        let w13 = &self.w13()[expert * 2 * half..][..2 * half];
        let s13 = self.s13().unswizzle(expert).bytes().to_vec();
        let (up_scales, gate_scales) = s13.split_at(s13.len() / 2);
        let [up_alpha, gate_alpha] = self.alpha1()[expert];
        let format = self.format();
        let half_matrix = |codes, scales: &[u8], alpha| Fp4Matrix {
            format,
            rows: intermediate,
            cols: hidden,
            codes: Cow::Borrowed(codes),
            scales: LinearScales::new("s13", intermediate, hidden / format.block(), scales.to_vec())
                .expect("half of an expert's scales"),
            global: GlobalScale::Multiplier(alpha),
        };
        ExpertTensors {
            up: half_matrix(&w13[..half], up_scales, up_alpha),
            gate: half_matrix(&w13[half..], gate_scales, gate_alpha),
            down: Fp4Matrix {
                format,
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
type Part = for<'e, 'a> fn(&'e ExpertTensors<'a>) -> &'e Fp4Matrix<'a>;

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
    check_alphas(WeightFormat::Nvfp4, "alpha", &alphas.iter().map(|&alpha| [alpha]).collect::<Vec<_>>())?;
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

fn check_alphas<const N: usize>(format: WeightFormat, name: &'static str, alphas: &[[f32; N]]) -> Result<()> {
    let (right, needed): (fn(f32) -> bool, _) = match format {
        WeightFormat::Nvfp4 => (f32::is_finite, "finite numbers"),
        WeightFormat::Mxfp4 => (|value| value == 1.0, "1 for MXFP4"),
    };
    let wrong = indices_where(alphas, |alpha| !alpha.iter().all(|&value| right(value)));
    if wrong.is_empty() {
        return Ok(());
    }
    let values: Vec<[f32; N]> = wrong.iter().map(|&e| alphas[e]).collect();
    Err(Error::Experts { name, experts: wrong, problem: format!("{values:?}, {needed} needed") })
}

fn check_biases(name: &'static str, biases: Option<&[f32]>, experts: usize, width: usize) -> Result<()> {
    let Some(biases) = biases else { return Ok(()) };
    check_len(name, biases.len(), product(name, &[experts, width])?)?;
    let rows: Vec<&[f32]> = biases.chunks_exact(width).collect();
    let wrong = indices_where(&rows, |row| !row.iter().all(|bias| bias.is_finite()));
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Error::Experts { name, experts: wrong, problem: "NaN or infinite, finite numbers needed".into() })
}

/// `Err` naming `name` and every expert with a block scale under which f16 does not hold all codes exactly: 2^-23 to 2^13 are
/// needed ([`e8m0::EXACT_IN_F16`]; a NaN stays NaN). NVFP4 has no such scales. Padding does not count.
pub fn check_f16_scales(format: WeightFormat, name: &'static str, scales: &SwizzledScales) -> Result<()> {
    if format == WeightFormat::Nvfp4 {
        return Ok(());
    }
    let outside = |byte: u8| byte != e8m0::NAN && !e8m0::EXACT_IN_F16.contains(&byte);
    let found: Vec<Option<u8>> = (0..scales.experts())
        .into_par_iter()
        .map(|expert| scales.unswizzle(expert).bytes().iter().copied().find(|&byte| outside(byte)))
        .collect();
    let wrong = indices_where(&found, Option::is_some);
    let Some(byte) = wrong.first().and_then(|&expert| found[expert]) else { return Ok(()) };
    let problem = format!(
        "a scale of 2^{}: f16 activations need 2^-23 to 2^13, bf16 activations take every scale",
        i32::from(byte) - 127
    );
    Err(Error::Experts { name, experts: wrong, problem })
}

/// The biases of up and gate as [`Fp4Buffers::b13`] has them, from the interleaved ones of gpt-oss: [E, 2I] with gate at even and up
/// at odd places.
pub fn up_gate_biases(interleaved: &[f32], experts: usize, intermediate: usize) -> Result<Vec<f32>> {
    check_len("interleaved", interleaved.len(), product("interleaved", &[experts, 2, intermediate])?)?;
    let halves = |expert: &[f32]| {
        let of = |first: usize| expert.iter().copied().skip(first).step_by(2).collect::<Vec<f32>>();
        [of(1), of(0)].concat()
    };
    Ok(interleaved.chunks_exact((2 * intermediate).max(1)).flat_map(halves).collect())
}

/// `Err` naming `name` unless `value` is a positive multiple of the format's block.
fn check_blocks(name: &'static str, value: usize, format: WeightFormat) -> Result<()> {
    let block = format.block();
    if value == 0 || !value.is_multiple_of(block) {
        return Err(Error::argument(
            name,
            value,
            format!("a positive multiple of {block} is needed for {format} weights"),
        ));
    }
    Ok(())
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
