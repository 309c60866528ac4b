//! One layer with NVFP4 or MXFP4 weights and one batch, as raw arrays into which any value can be written, and that every back end can be given.

use crate::device::{Buffer, DeviceHandle};
use crate::error::Result;
use crate::formats::fp4::{ExpertShape, Fp4Buffers, Fp4Experts};
use crate::formats::scales::SwizzledScales;
use crate::layer::{Hidden, Inputs, Layer};
use crate::plan::{Plan, Variant, choose_variant};
use crate::reference::{Fp4View, LayerInputs, LayerResult, Mode, Status, layer, math};
use crate::types::{Activation, LayerOptions, LayerShape, WeightFormat, XType};
use crate::workspace::Workspace;
use kernels_gpu::layout::scale::{padded_cols, swizzled_len, swizzled_offset};

/// e4m3 code of 1.0.
pub const ONE: u8 = 0x38;

/// The block scale 1.0.
pub const fn one(format: WeightFormat) -> u8 {
    match format {
        WeightFormat::Nvfp4 => ONE,
        WeightFormat::Mxfp4 => 127,
    }
}

/// All arrays of one layer and one batch. Fields are public: a test may also set whole arrays.
#[derive(Clone, Debug)]
pub struct Case {
    /// Sizes.
    pub shape: LayerShape,
    /// Arithmetic.
    pub options: LayerOptions,
    /// Number of tokens M.
    pub tokens: usize,
    /// Element type of `x`.
    pub x_type: XType,
    /// [M, K] hidden states.
    pub x: Vec<u16>,
    /// [M, top_k] expert ids.
    pub topk_ids: Vec<i32>,
    /// [M, top_k] weights.
    pub topk_w: Vec<f32>,
    /// [E, 2I, K/2] codes: up rows, then gate rows.
    pub w13: Vec<u8>,
    /// Swizzled scales of `w13`.
    pub s13: Vec<u8>,
    /// [E][up, gate] global scales; 1 for MXFP4.
    pub alpha1: Vec<[f32; 2]>,
    /// [E, 2I] biases.
    pub b13: Option<Vec<f32>>,
    /// [E, H, I/2] codes.
    pub w2: Vec<u8>,
    /// Swizzled scales of `w2`.
    pub s2: Vec<u8>,
    /// `[E]` global scales; 1 for MXFP4.
    pub alpha2: Vec<f32>,
    /// [E, H] biases.
    pub b2: Option<Vec<f32>>,
}

/// Shape of the plain probe.
pub const SHAPE: LayerShape = LayerShape { hidden: 1024, intermediate: 128, output: 128, experts: 4, top_k: 1 };

impl Default for Case {
    fn default() -> Self {
        Case::new()
    }
}

impl Case {
    /// The plain probe: exact in every format. In each expert gate = 32 and up = 4 in row 0, `h[0]` = 128, `out[0]` = 128 and
    /// all other outputs are 0. One token on expert 1 with weight 1.
    pub fn new() -> Self {
        Case::with_shape(SHAPE, 1)
    }

    /// The plain probe's weights and hidden states in another shape (K, I and H at least 16, 16 and 1), every pair on
    /// expert 1 (or 0 if there is but one).
    pub fn with_shape(shape: LayerShape, tokens: usize) -> Self {
        Case::with_shape_in(WeightFormat::Nvfp4, shape, tokens)
    }

    /// As [`Case::with_shape`], in `format` (K and I at least its block).
    pub fn with_shape_in(format: WeightFormat, shape: LayerShape, tokens: usize) -> Self {
        let mut probe = Case::blank_in(format, shape, tokens);
        probe.topk_ids.fill(i32::from(shape.experts > 1));
        for token in 0..tokens {
            probe.set_x(token, 0, 8.0);
        }
        for expert in 0..shape.experts {
            probe.set_gate(expert, 0, 0, 0x6);
            probe.set_up(expert, 0, 0, 0x1);
            probe.set_w2(expert, 0, 0, 0x2);
        }
        probe
    }

    /// NVFP4 codes 0, block scales 1 (their padding 0), alphas and weights 1, hidden states 0, ids 0, no clamp, no biases.
    pub fn blank(shape: LayerShape, tokens: usize) -> Self {
        Case::blank_in(WeightFormat::Nvfp4, shape, tokens)
    }

    /// As [`Case::blank`], in `format`.
    pub fn blank_in(format: WeightFormat, shape: LayerShape, tokens: usize) -> Self {
        let block = format.block();
        let LayerShape { hidden, intermediate, output, experts, top_k } = shape;
        let mut probe = Case {
            shape,
            options: LayerOptions { format, ..Default::default() },
            tokens,
            x_type: XType::Bf16,
            x: vec![0; tokens * hidden],
            topk_ids: vec![0; tokens * top_k],
            topk_w: vec![1.0; tokens * top_k],
            w13: vec![0; experts * 2 * intermediate * hidden / 2],
            s13: vec![one(format); experts * swizzled_len(2 * intermediate, hidden / block)],
            alpha1: vec![[1.0; 2]; experts],
            b13: None,
            w2: vec![0; experts * output * intermediate / 2],
            s2: vec![one(format); experts * swizzled_len(output, intermediate / block)],
            alpha2: vec![1.0; experts],
            b2: None,
        };
        probe.fill_padding(0);
        probe
    }

    /// Random codes, scales, alphas, hidden states, weights and ids (one in eight of them skipped). Block scales and hidden
    /// states spread over many powers of two: sums of values of one size are exact and would hide how they are formed.
    pub fn random(shape: LayerShape, tokens: usize, seed: u64) -> Self {
        Case::random_in(WeightFormat::Nvfp4, shape, tokens, seed)
    }

    /// As [`Case::random`], in `format`.
    pub fn random_in(format: WeightFormat, shape: LayerShape, tokens: usize, seed: u64) -> Self {
        let mut probe = Case::blank_in(format, shape, tokens);
        let mut random = Random(seed);
        probe.w13.fill_with(|| random.next() as u8);
        probe.w2.fill_with(|| random.next() as u8);
        // From 2^-6 to just below 2^2; in MXFP4, which has no alpha, keeps gate and up near 1.
        let down = shape.hidden.ilog2() as u8 / 2;
        let scale = |random: &mut Random| match format {
            WeightFormat::Nvfp4 => 0x08 + (random.next() % 64) as u8,
            WeightFormat::Mxfp4 => 127 - down - (random.next() % 6) as u8,
        };
        probe.s13.fill_with(|| scale(&mut random));
        probe.s2.fill_with(|| scale(&mut random));
        probe.fill_padding(format_nan(format));
        let mut wide = || random.in_range(-2.0, 2.0) * 2f32.powi(-((random.next() % 16) as i32));
        probe.x.fill_with(|| math::from_f32(Activation::Bf16, wide()));
        if format == WeightFormat::Nvfp4 {
            // Keeps gate and up near 1.
            let alpha = 0.5 / (shape.hidden as f32).sqrt();
            probe.alpha1.fill_with(|| [random.in_range(alpha, 2.0 * alpha), random.in_range(alpha, 2.0 * alpha)]);
            probe.alpha2.fill_with(|| random.in_range(0.5, 1.0));
        }
        probe.topk_w.fill_with(|| random.in_range(0.0, 1.0));
        probe.topk_ids.fill_with(|| match random.next() % 8 {
            0 => -1,
            _ => (random.next() % shape.experts as u64) as i32,
        });
        probe
    }

    /// Random biases, of the size of gate, up and down in [`Case::random`], some of them 0.
    pub fn add_biases(&mut self, seed: u64) {
        let LayerShape { intermediate, output, experts, .. } = self.shape;
        let mut random = Random(seed ^ 0xb1a5);
        let mut biases = |len: usize| -> Vec<f32> {
            let mut bias = || match random.next() % 8 {
                0 => [0.0, -0.0][(random.next() % 2) as usize],
                _ => random.in_range(-2.0, 2.0),
            };
            (0..len).map(|_| bias()).collect()
        };
        self.b13 = Some(biases(experts * 2 * intermediate));
        self.b2 = Some(biases(experts * output));
    }

    /// Moves those MXFP4 scales into the range that f16 activations need, 2^-23 to 2^13, which are outside. NaNs stay.
    pub fn fit_f16(mut self) -> Self {
        if self.options.format == WeightFormat::Mxfp4 {
            // What comes to w13 is small: an h that overflows would hide everything else.
            for (scales, number) in [(&mut self.s13, 21), (&mut self.s2, 37)] {
                for byte in scales.iter_mut().filter(|byte| !(104..=140).contains(*byte) && **byte != 0xff) {
                    *byte = 104 + *byte % number;
                }
            }
        }
        self
    }

    /// Element k of a token.
    pub fn set_x(&mut self, token: usize, k: usize, value: f32) {
        let format = if self.x_type == XType::Bf16 { Activation::Bf16 } else { Activation::F16 };
        self.x[token * self.shape.hidden + k] = math::from_f32(format, value);
    }

    /// Id and weight of slot k of a token.
    pub fn set_id(&mut self, token: usize, k: usize, id: i32, weight: f32) {
        self.topk_ids[token * self.shape.top_k + k] = id;
        self.topk_w[token * self.shape.top_k + k] = weight;
    }

    /// Code of row `row` of 2I: up rows first, then gate rows.
    pub fn set_w13(&mut self, expert: usize, row: usize, k: usize, code: u8) {
        let rows = 2 * self.shape.intermediate;
        set_code(&mut self.w13, (expert * rows + row) * self.shape.hidden + k, code);
    }

    /// Code of an up row.
    pub fn set_up(&mut self, expert: usize, row: usize, k: usize, code: u8) {
        self.set_w13(expert, row, k, code);
    }

    /// Code of a gate row.
    pub fn set_gate(&mut self, expert: usize, row: usize, k: usize, code: u8) {
        self.set_w13(expert, self.shape.intermediate + row, k, code);
    }

    /// Code of a row of w2.
    pub fn set_w2(&mut self, expert: usize, row: usize, k: usize, code: u8) {
        set_code(&mut self.w2, (expert * self.shape.output + row) * self.shape.intermediate + k, code);
    }

    /// Scale byte of row `row` of 2I and block `block` of k.
    pub fn set_s13(&mut self, expert: usize, row: usize, block: usize, byte: u8) {
        let (rows, cols) = (2 * self.shape.intermediate, self.shape.hidden / self.block());
        self.s13[expert * swizzled_len(rows, cols) + swizzled_offset(row, block, padded_cols(cols))] = byte;
    }

    /// Scale byte of a row of w2.
    pub fn set_s2(&mut self, expert: usize, row: usize, block: usize, byte: u8) {
        let (rows, cols) = (self.shape.output, self.shape.intermediate / self.block());
        self.s2[expert * swizzled_len(rows, cols) + swizzled_offset(row, block, padded_cols(cols))] = byte;
    }

    /// Sets every scale byte that belongs to no weight.
    pub fn fill_padding(&mut self, byte: u8) {
        let (block, LayerShape { hidden, intermediate, output, .. }) = (self.block(), self.shape);
        fill_padding(&mut self.s13, 2 * intermediate, hidden / block, byte);
        fill_padding(&mut self.s2, output, intermediate / block, byte);
    }

    /// k with one scale.
    pub fn block(&self) -> usize {
        self.options.format.block()
    }

    /// The weights, for the reference.
    pub fn view(&self) -> Fp4View<'_> {
        Fp4View {
            shape: self.shape,
            format: self.options.format,
            w13: &self.w13,
            s13: &self.s13,
            alpha1: &self.alpha1,
            b13: self.b13.as_deref(),
            w2: &self.w2,
            s2: &self.s2,
            alpha2: &self.alpha2,
            b2: self.b2.as_deref(),
        }
    }

    /// The batch, for the reference.
    pub fn inputs(&self) -> LayerInputs<'_> {
        LayerInputs {
            tokens: self.tokens,
            x: &self.x,
            x_type: self.x_type,
            topk_ids: &self.topk_ids,
            topk_w: &self.topk_w,
        }
    }

    /// The reference's answer.
    pub fn run(&self, mode: Mode) -> Result<LayerResult> {
        layer(&self.view(), &self.options, &self.inputs(), mode)
    }

    /// The weights, packed.
    pub fn experts(&self) -> Result<Fp4Experts> {
        let (block, LayerShape { hidden, intermediate, output, experts, .. }) = (self.block(), self.shape);
        let scales =
            |name, bytes: &[u8], rows, cols| SwizzledScales::from_bytes(name, bytes.to_vec(), experts, rows, cols);
        Fp4Experts::new(
            ExpertShape { experts, hidden, intermediate, output },
            Fp4Buffers {
                format: self.options.format,
                w13: self.w13.clone(),
                s13: scales("s13", &self.s13, 2 * intermediate, hidden / block)?,
                alpha1: self.alpha1.clone(),
                b13: self.b13.clone(),
                w2: self.w2.clone(),
                s2: scales("s2", &self.s2, output, intermediate / block)?,
                alpha2: self.alpha2.clone(),
                b2: self.b2.clone(),
            },
        )
    }

    /// The batch and the layer on a device, ready to run.
    pub fn on(&self, device: &DeviceHandle) -> Result<DeviceCase> {
        DeviceCase::new(self, device, choose_variant(&self.shape, self.tokens, device.properties()))
    }

    /// The answer of a device's kernels. Scratch memory and output are poisoned first.
    pub fn run_on(&self, device: &DeviceHandle) -> Result<LayerResult> {
        self.on(device)?.run()
    }

    /// The tokens `range` alone.
    pub fn tokens_only(&self, range: std::ops::Range<usize>) -> Self {
        let LayerShape { hidden, top_k, .. } = self.shape;
        let pairs = range.start * top_k..range.end * top_k;
        Case {
            tokens: range.len(),
            x: self.x[range.start * hidden..range.end * hidden].to_vec(),
            topk_ids: self.topk_ids[pairs.clone()].to_vec(),
            topk_w: self.topk_w[pairs].to_vec(),
            ..self.clone()
        }
    }
}

/// A [`Case`] whose arrays are on a device.
#[derive(Debug)]
pub struct DeviceCase {
    /// The weights.
    pub layer: Layer,
    /// The plan.
    pub plan: Plan,
    /// Scratch memory.
    pub workspace: Workspace,
    /// Hidden states.
    pub x: Buffer<u16>,
    /// Their type.
    pub x_type: XType,
    /// Expert ids.
    pub topk_ids: Buffer<i32>,
    /// Weights.
    pub topk_weights: Buffer<f32>,
    /// Output.
    pub out: Buffer<u16>,
    /// Number of tokens.
    pub tokens: usize,
}

impl DeviceCase {
    /// Uploads `case` and plans for its number of tokens with `variant`.
    pub fn new(case: &Case, device: &DeviceHandle, variant: Variant) -> Result<Self> {
        let layer = Layer::new(device, &case.experts()?, case.shape.top_k, case.options)?;
        let plan = Plan::with_variant(device, case.shape, case.options, case.tokens, variant)?;
        Ok(DeviceCase {
            workspace: Workspace::new(device, &plan)?,
            x: Buffer::from_slice(device, &case.x)?,
            x_type: case.x_type,
            topk_ids: Buffer::from_slice(device, &case.topk_ids)?,
            topk_weights: Buffer::from_slice(device, &case.topk_w)?,
            out: Buffer::new(device, case.tokens * case.shape.output)?,
            tokens: case.tokens,
            layer,
            plan,
        })
    }

    /// Enqueues the layer.
    pub fn forward(&self) -> Result<()> {
        let x = match self.x_type {
            XType::Bf16 => Hidden::Bf16(&self.x),
            XType::F16 => Hidden::F16(&self.x),
        };
        let (topk_ids, topk_weights) = (&self.topk_ids, &self.topk_weights);
        self.layer.forward(
            &self.plan,
            &self.workspace,
            Inputs { tokens: self.tokens, x, topk_ids, topk_weights },
            &self.out,
        )
    }

    /// Poisons scratch memory and output, runs the layer and takes output and status.
    pub fn run(&self) -> Result<LayerResult> {
        self.workspace.poison(0xFF)?;
        self.out.fill(0xFF)?;
        self.forward()?;
        self.take()
    }

    /// Output and status of the passes so far.
    pub fn take(&self) -> Result<LayerResult> {
        let out = self.out.download()?;
        let status = self.workspace.take_status()?;
        Ok(LayerResult { out, status: Status { bad_id: status.bad_expert_id, f16_range: status.f16_range } })
    }
}

/// A block scale that is NaN.
const fn format_nan(format: WeightFormat) -> u8 {
    match format {
        WeightFormat::Nvfp4 => 0x7f,
        WeightFormat::Mxfp4 => 0xff,
    }
}

/// bf16 bits as numbers.
pub fn floats(bf16: &[u16]) -> Vec<f32> {
    bf16.iter().map(|&bits| math::to_f32(Activation::Bf16, bits)).collect()
}

fn set_code(codes: &mut [u8], index: usize, code: u8) {
    let byte = &mut codes[index / 2];
    *byte = if index.is_multiple_of(2) { (*byte & 0xf0) | code } else { (*byte & 0x0f) | code << 4 };
}

fn fill_padding(scales: &mut [u8], rows: usize, cols: usize, byte: u8) {
    let len = swizzled_len(rows, cols);
    let mut used = vec![false; len];
    for row in 0..rows {
        for col in 0..cols {
            used[swizzled_offset(row, col, padded_cols(cols))] = true;
        }
    }
    for expert in scales.chunks_mut(len) {
        for (scale, _) in expert.iter_mut().zip(&used).filter(|(_, used)| !**used) {
            *scale = byte;
        }
    }
}

/// A reproducible stream of numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [low, high).
    pub fn in_range(&mut self, low: f32, high: f32) -> f32 {
        low + (self.next() >> 40) as f32 / (1 << 24) as f32 * (high - low)
    }
}
