//! The operations that can be compared, each with its answer on the CPU and on a device.

use super::case::{Case, Random};
use super::draw::{self, Family};
use super::probe;
use crate::device::{Buffer, DeviceHandle, Grid, launch};
use crate::error::{Error, Result, check_len};
use crate::formats::scales::{LinearScales, SwizzledScales};
use crate::formats::{NVFP4_BLOCK, e4m3};
use crate::reference::{Mode, Status, math, mma};
use crate::types::{Activation, Gating, LayerOptions, LayerShape, WeightFormat};
use kernels_gpu::layout::scale::swizzled_len;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An operation by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// The routed experts of a layer with NVFP4 weights.
    Nvfp4Layer,
    /// The routed experts of a layer with MXFP4 weights.
    Mxfp4Layer,
    /// What joins gate and up in such a layer, through its kernels: bf16 of silu(gate)·up or of gpt-oss's form, -0 as +0.
    Swiglu,
    /// e^x in f32.
    Exp,
    /// f32 to e4m3 codes.
    #[serde(rename = "e4m3_encode")]
    E4m3Encode,
    /// e4m3 codes to f32.
    #[serde(rename = "e4m3_decode")]
    E4m3Decode,
    /// E2M1 codes to f32.
    #[serde(rename = "e2m1_decode")]
    E2m1Decode,
    /// Row-major block scales into the 128x4 swizzle.
    Swizzle,
    /// One element of a tensor-core product: c plus sixteen products.
    #[serde(rename = "mma_m16n8k16")]
    Mma,
}

impl Op {
    /// All operations.
    pub const ALL: [Op; 9] = [
        Op::Nvfp4Layer,
        Op::Mxfp4Layer,
        Op::Swiglu,
        Op::Exp,
        Op::E4m3Encode,
        Op::E4m3Decode,
        Op::E2m1Decode,
        Op::Swizzle,
        Op::Mma,
    ];

    /// Format of the weights of a layer; `None` for the other operations.
    pub const fn weights(self) -> Option<WeightFormat> {
        match self {
            Op::Nvfp4Layer => Some(WeightFormat::Nvfp4),
            Op::Mxfp4Layer => Some(WeightFormat::Mxfp4),
            _ => None,
        }
    }

    /// Its name on the command line and in case files.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Nvfp4Layer => "nvfp4_layer",
            Op::Mxfp4Layer => "mxfp4_layer",
            Op::Swiglu => "swiglu",
            Op::Exp => "exp",
            Op::E4m3Encode => "e4m3_encode",
            Op::E4m3Decode => "e4m3_decode",
            Op::E2m1Decode => "e2m1_decode",
            Op::Swizzle => "swizzle",
            Op::Mma => "mma_m16n8k16",
        }
    }

    /// Whether the embedded modules have kernels that compute it. The others run on the CPU and the emulator alone.
    pub const fn runs_on_gpu(self) -> bool {
        matches!(self, Op::Nvfp4Layer | Op::Mxfp4Layer | Op::Swiglu)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One operation with its input.
#[derive(Clone, Debug)]
pub enum OpCase {
    /// [`Op::Nvfp4Layer`] or [`Op::Mxfp4Layer`].
    Layer(Box<Case>),
    /// [`Op::Swiglu`].
    Swiglu {
        /// Gates.
        gate: Vec<f32>,
        /// Ups, as many.
        up: Vec<f32>,
        /// What joins them, with its clamp.
        gating: Gating,
    },
    /// [`Op::Exp`].
    Exp {
        /// Arguments.
        x: Vec<f32>,
    },
    /// [`Op::E4m3Encode`].
    E4m3Encode {
        /// Values.
        x: Vec<f32>,
    },
    /// [`Op::E4m3Decode`].
    E4m3Decode {
        /// Format of the operands that the codes become.
        activation: Activation,
        /// Codes.
        codes: Vec<u8>,
    },
    /// [`Op::E2m1Decode`].
    E2m1Decode {
        /// Format of the operands that the codes become.
        activation: Activation,
        /// Codes, one a byte, in the low four bits.
        codes: Vec<u8>,
    },
    /// [`Op::Swizzle`].
    Swizzle {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// [rows, cols].
        scales: Vec<u8>,
    },
    /// [`Op::Mma`].
    Mma {
        /// Format of `a` and `b`.
        activation: Activation,
        /// [n, 16] bits.
        a: Vec<u16>,
        /// [n, 16] bits.
        b: Vec<u16>,
        /// `[n]`.
        c: Vec<f32>,
    },
}

/// Type of the elements of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// E2M1 codes, two a byte.
    Code,
    /// Bytes: e4m3 codes.
    Byte,
    /// bf16 bits.
    Bf16,
    /// f16 bits.
    F16,
    /// f32.
    F32,
    /// i32.
    I32,
}

impl Element {
    /// Hexadecimal digits of an element's bits.
    pub const fn digits(self) -> usize {
        match self {
            Element::Code => 1,
            Element::Byte => 2,
            Element::Bf16 | Element::F16 => 4,
            Element::F32 | Element::I32 => 8,
        }
    }

    /// The value that bits stand for; that of an e4m3 code for a byte.
    pub fn value(self, bits: u32) -> f64 {
        f64::from(match self {
            Element::Code => math::e2m1(bits as u8),
            Element::Byte => math::e4m3(bits as u8),
            Element::Bf16 => math::to_f32(Activation::Bf16, bits as u16),
            Element::F16 => math::to_f32(Activation::F16, bits as u16),
            Element::F32 => f32::from_bits(bits),
            Element::I32 => return f64::from(bits as i32),
        })
    }

    /// Place of the value in the order of all values of the type, so that neighbours differ by 1 and both zeros are 0. `None`
    /// for NaN.
    pub fn rank(self, bits: u32) -> Option<i64> {
        if self == Element::I32 {
            return Some(i64::from(bits as i32));
        }
        if self.value(bits).is_nan() {
            return None;
        }
        let sign = 1 << (4 * self.digits() - 1);
        let magnitude = i64::from(bits & (sign - 1));
        Some(if bits & sign == 0 { magnitude } else { -magnitude })
    }
}

/// What a back end has computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Type of the elements.
    pub element: Element,
    /// Elements of a row (of a token, for a layer).
    pub columns: usize,
    /// Bits of all elements.
    pub bits: Vec<u32>,
    /// Status bits of a layer.
    pub status: Status,
}

impl Output {
    fn plain(element: Element, bits: impl IntoIterator<Item = u32>) -> Self {
        Output { element, columns: 1, bits: bits.into_iter().collect(), status: Status::default() }
    }

    fn f32(values: impl IntoIterator<Item = f32>) -> Self {
        Self::plain(Element::F32, values.into_iter().map(|value| math::canonical(value).to_bits()))
    }

    /// Names an element: token and column where there are columns.
    pub fn place(&self, index: usize) -> String {
        match self.columns {
            1 => format!("element {index}"),
            columns => format!("token {}, column {}", index / columns, index % columns),
        }
    }
}

impl OpCase {
    /// Which operation.
    pub fn op(&self) -> Op {
        match self {
            OpCase::Layer(case) => match case.options.format {
                WeightFormat::Nvfp4 => Op::Nvfp4Layer,
                WeightFormat::Mxfp4 => Op::Mxfp4Layer,
            },
            OpCase::Swiglu { .. } => Op::Swiglu,
            OpCase::Exp { .. } => Op::Exp,
            OpCase::E4m3Encode { .. } => Op::E4m3Encode,
            OpCase::E4m3Decode { .. } => Op::E4m3Decode,
            OpCase::E2m1Decode { .. } => Op::E2m1Decode,
            OpCase::Swizzle { .. } => Op::Swizzle,
            OpCase::Mma { .. } => Op::Mma,
        }
    }

    /// Sizes and options in words.
    pub fn describe(&self) -> String {
        match self {
            OpCase::Layer(case) => {
                let LayerShape { hidden, intermediate, output, experts, top_k } = case.shape;
                let LayerOptions { activation, order, gating, .. } = case.options;
                let biases = if case.b13.is_some() || case.b2.is_some() { ", biases" } else { "" };
                format!(
                    "{} tokens, hidden {hidden}, intermediate {intermediate}, output {output}, {experts} experts, top-k {top_k}, \
                     {}, order {order}{}{biases}",
                    case.tokens,
                    name_of(activation),
                    describe_gating(gating),
                )
            }
            OpCase::Swiglu { gate, gating, .. } => format!("{} elements{}", gate.len(), describe_gating(*gating)),
            OpCase::Exp { x } | OpCase::E4m3Encode { x } => format!("{} elements", x.len()),
            OpCase::E4m3Decode { activation, codes } | OpCase::E2m1Decode { activation, codes } => {
                format!("{} elements, {}", codes.len(), name_of(*activation))
            }
            OpCase::Swizzle { rows, cols, .. } => format!("{rows} rows, {cols} columns"),
            OpCase::Mma { activation, c, .. } => format!("{} elements, {}", c.len(), name_of(*activation)),
        }
    }

    /// Checks lengths and sizes that the arrays' owner can get wrong. The error names the argument.
    pub fn check(&self) -> Result<()> {
        match self {
            OpCase::Layer(case) => {
                crate::plan::check(&case.shape, &case.options)?;
                case.view().check()?;
                case.inputs().check(&case.shape, case.options.activation)
            }
            OpCase::Swiglu { gate, up, gating } => {
                check_len("up", up.len(), gate.len())?;
                at_most("count", gate.len(), crate::plan::MAX_EXPERTS)?;
                gating.check()
            }
            OpCase::Swizzle { rows, cols, scales } => {
                at_most("rows", *rows, 1 << 20)?;
                at_most("cols", *cols, 1 << 16)?;
                at_most("rows * cols", rows * cols, MAX_ELEMENTS)?;
                check_len("scales", scales.len(), rows * cols)
            }
            OpCase::Mma { a, b, c, .. } => {
                at_most("count", c.len(), MAX_ELEMENTS)?;
                check_len("a", a.len(), 16 * c.len())?;
                check_len("b", b.len(), 16 * c.len())
            }
            OpCase::Exp { x } | OpCase::E4m3Encode { x } => at_most("count", x.len(), MAX_ELEMENTS),
            OpCase::E4m3Decode { codes, .. } | OpCase::E2m1Decode { codes, .. } => {
                at_most("count", codes.len(), MAX_ELEMENTS)
            }
        }
    }

    /// The answer of the exact CPU reference.
    pub fn on_cpu(&self) -> Result<Output> {
        self.check()?;
        Ok(match self {
            OpCase::Layer(case) => {
                let result = case.run(Mode::Exact)?;
                layer_output(result.out, case.shape.output, result.status)
            }
            OpCase::Swiglu { gate, up, gating } => {
                let h = |(&gate, &up)| match math::from_f32(Activation::Bf16, math::gated(*gating, gate, up)) {
                    // What leaves a layer went through a sum, and a sum of zeros is +0.
                    0x8000 => 0,
                    bits => u32::from(bits),
                };
                Output::plain(Element::Bf16, gate.iter().zip(up).map(h))
            }
            OpCase::Exp { x } => Output::f32(x.iter().map(|&x| math::exp(x))),
            OpCase::E4m3Encode { x } => Output::plain(Element::Byte, x.iter().map(|&x| u32::from(e4m3::encode(x)))),
            OpCase::E4m3Decode { codes, .. } => Output::f32(codes.iter().map(|&code| math::e4m3(code))),
            OpCase::E2m1Decode { codes, .. } => Output::f32(codes.iter().map(|&code| math::e2m1(code))),
            OpCase::Swizzle { rows, cols, scales } => {
                let linear = LinearScales::new("scales", *rows, *cols, scales.as_slice())?;
                let swizzled = SwizzledScales::swizzle("scales", &[linear])?;
                Output::plain(Element::Byte, swizzled.bytes().iter().map(|&byte| u32::from(byte)))
            }
            OpCase::Mma { activation, a, b, c } => {
                let words = |of: &[u16], i: usize| std::array::from_fn(|k| of[16 * i + k]);
                let d = |i: usize| mma::mma16(*activation, &words(a, i), &words(b, i), c[i].to_bits());
                Output::plain(Element::F32, (0..c.len()).map(d))
            }
        })
    }

    /// The answer of the kernels on `device`.
    pub fn on_device(&self, device: &DeviceHandle) -> Result<Output> {
        self.check()?;
        let grid = |elements: usize, each: usize| Grid { blocks: elements.div_ceil(each) as u32, shared_bytes: 0 };
        let threads = probe::THREADS as usize;
        match self {
            OpCase::Layer(case) => {
                let result = case.run_on(device)?;
                Ok(layer_output(result.out, case.shape.output, result.status))
            }
            OpCase::Swiglu { gate, up, gating } => {
                let case = swiglu_layer(gate, up, *gating);
                let result = case.run_on(device)?;
                Ok(Output::plain(Element::Bf16, result.out.into_iter().map(u32::from)))
            }
            OpCase::Exp { x } => {
                let y = Buffer::<f32>::new(device, x.len())?;
                let input = Buffer::from_slice(device, x)?;
                device.prepare(probe::exp::probe_exp.into(), 0)?;
                let args = probe::exp::Args { x: input.as_ref(), y: y.as_mut(), n: x.len() as u32 };
                launch(&**device, probe::exp::probe_exp, grid(x.len(), threads), args)?;
                Ok(Output::f32(y.download()?))
            }
            OpCase::E4m3Encode { x } => {
                let codes = Buffer::<u8>::new(device, x.len())?;
                let input = Buffer::from_slice(device, x)?;
                let kernel = probe::e4m3_encode::probe_e4m3_encode;
                device.prepare(kernel.into(), 0)?;
                let args = probe::e4m3_encode::Args { x: input.as_ref(), codes: codes.as_mut(), n: x.len() as u32 };
                launch(&**device, kernel, grid(x.len(), threads), args)?;
                Ok(Output::plain(Element::Byte, codes.download()?.into_iter().map(u32::from)))
            }
            OpCase::E4m3Decode { activation, codes } | OpCase::E2m1Decode { activation, codes } => {
                use probe::decode::*;
                let kernel = match (self.op(), activation) {
                    (Op::E4m3Decode, Activation::Bf16) => probe_e4m3_decode_bf16,
                    (Op::E4m3Decode, Activation::F16) => probe_e4m3_decode_f16,
                    (_, Activation::Bf16) => probe_e2m1_decode_bf16,
                    (_, Activation::F16) => probe_e2m1_decode_f16,
                };
                let y = Buffer::<f32>::new(device, codes.len())?;
                let input = Buffer::from_slice(device, codes)?;
                device.prepare(kernel.into(), 0)?;
                let args = Args { codes: input.as_ref(), y: y.as_mut(), n: codes.len() as u32 };
                launch(&**device, kernel, grid(codes.len(), threads), args)?;
                Ok(Output::f32(y.download()?))
            }
            OpCase::Swizzle { rows, cols, scales } => {
                let kernel = probe::swizzle::probe_swizzle;
                let linear = Buffer::from_slice(device, scales)?;
                let swizzled = Buffer::<u8>::new(device, swizzled_len(*rows, *cols))?;
                swizzled.fill(0)?;
                device.prepare(kernel.into(), 0)?;
                let (r, c) = (*rows as u32, *cols as u32);
                let args =
                    probe::swizzle::Args { linear: linear.as_ref(), swizzled: swizzled.as_mut(), rows: r, cols: c };
                launch(&**device, kernel, grid(scales.len(), threads), args)?;
                Ok(Output::plain(Element::Byte, swizzled.download()?.into_iter().map(u32::from)))
            }
            OpCase::Mma { activation, a, b, c } => {
                let kernel = match activation {
                    Activation::Bf16 => probe::mma::probe_mma_bf16,
                    Activation::F16 => probe::mma::probe_mma_f16,
                };
                let d = Buffer::<f32>::new(device, c.len())?;
                let n = c.len() as u32;
                let [a, b] = [Buffer::from_slice(device, a)?, Buffer::from_slice(device, b)?];
                let c = Buffer::from_slice(device, c)?;
                device.prepare(kernel.into(), 0)?;
                let args = probe::mma::Args { a: a.as_ref(), b: b.as_ref(), c: c.as_ref(), d: d.as_mut(), n };
                launch(&**device, kernel, grid(n as usize, probe::MMA_ELEMENTS), args)?;
                Ok(Output::f32(d.download()?))
            }
        }
    }

    /// Where bits need not be equal: how far each element may be from the reference's. Only layers have such a bound.
    pub fn bound(&self) -> Result<Option<Vec<f32>>> {
        match self {
            OpCase::Layer(case) => crate::reference::layer_bound(&case.view(), &case.options, &case.inputs()).map(Some),
            _ => Ok(None),
        }
    }
}

/// Most elements of an operation on single values.
const MAX_ELEMENTS: usize = 1 << 26;

fn at_most(name: &'static str, value: usize, most: usize) -> Result<()> {
    if value <= most { Ok(()) } else { Err(Error::argument(name, value, format!("at most {most}"))) }
}

/// What is not the default, each after a comma.
fn describe_gating(gating: Gating) -> String {
    let limit = gating.limit().map_or(String::new(), |limit| format!(", limit {limit}"));
    match gating {
        Gating::Silu { .. } => limit,
        Gating::SwigluOai { alpha, .. } => format!(", swiglu_oai with alpha {alpha}{limit}"),
    }
}

/// `bf16` or `f16`.
pub const fn name_of(activation: Activation) -> &'static str {
    match activation {
        Activation::Bf16 => "bf16",
        Activation::F16 => "f16",
    }
}

fn layer_output(out: Vec<u16>, columns: usize, status: Status) -> Output {
    Output { element: Element::Bf16, columns, bits: out.into_iter().map(u32::from).collect(), status }
}

/// A layer whose output is h of given gates and ups: element i is token i on expert i, the only code of each row is met by a 1
/// and the global scales are the values themselves. A global scale must be finite: an infinity comes from a sum that overflows,
/// a NaN from a block scale.
fn swiglu_layer(gate: &[f32], up: &[f32], gating: Gating) -> Case {
    const GATE_K: usize = 0;
    const UP_K: usize = 1;
    let shape =
        LayerShape { hidden: NVFP4_BLOCK, intermediate: NVFP4_BLOCK, output: 1, experts: gate.len().max(1), top_k: 1 };
    let mut case = Case::blank(shape, gate.len());
    case.options.gating = gating;
    for (i, (&gate, &up)) in gate.iter().zip(up).enumerate() {
        case.set_id(i, 0, i as i32, 1.0);
        case.set_w2(i, 0, 0, 0x2);
        for (value, row, k, alpha) in [(up, 0, UP_K, 0), (gate, shape.intermediate, GATE_K, 1)] {
            case.set_x(i, k, 1.0);
            case.set_w13(i, row, k, 0x2);
            case.alpha1[i][alpha] = value;
            if value.is_infinite() {
                // 3e38 · 6 · 448 is beyond f32.
                case.set_x(i, k, 3e38);
                case.set_w13(i, row, k, 0x7);
                case.set_s13(i, row, 0, 0x7e);
                case.alpha1[i][alpha] = value.signum();
            }
            if value.is_nan() {
                case.set_s13(i, row, 0, 0x7f);
                case.alpha1[i][alpha] = 1.0;
            }
        }
    }
    case
}

/// What a drawn case is made of, beyond its operation and seed.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawOptions {
    /// Family of values.
    pub family: Family,
    /// Sizes of a layer.
    pub shape: LayerShape,
    /// Tokens of a layer; elements of other operations; rows of a swizzle.
    pub tokens: usize,
    /// Arithmetic of a layer; the activation also selects the format of operands. The operation decides the weights' format.
    pub options: LayerOptions,
    /// Whether a layer has biases.
    pub biases: bool,
}

/// A case drawn from `seed`. Errors name the first size that is outside its limits.
pub fn draw_op(op: Op, draw: &DrawOptions, seed: u64) -> Result<OpCase> {
    let DrawOptions { family, shape, tokens, options, biases } = draw;
    let mut random = Random(seed);
    let activation = options.activation;
    if op.weights().is_none() {
        at_most("tokens", *tokens, 1 << 22)?;
    }
    let floats = |random: &mut Random, n: usize| -> Vec<f32> { (0..n).map(|_| draw_f32(*family, random)).collect() };
    let case = match op {
        Op::Nvfp4Layer | Op::Mxfp4Layer => {
            let options = LayerOptions { format: op.weights().unwrap_or_default(), ..*options };
            crate::plan::check(shape, &options)?;
            at_most("tokens", *tokens, crate::plan::MAX_PAIRS / shape.top_k)?;
            check_memory(shape, *tokens)?;
            let mut case = draw::draw_in(options.format, *family, *shape, *tokens, seed);
            case.options = options;
            if *biases {
                case.add_biases(seed);
            }
            if activation == Activation::F16 {
                case = case.fit_f16();
            }
            OpCase::Layer(Box::new(case))
        }
        Op::Swiglu => {
            let gate = floats(&mut random, *tokens);
            let up = floats(&mut random, *tokens);
            OpCase::Swiglu { gate, up, gating: options.gating }
        }
        Op::Exp => OpCase::Exp { x: floats(&mut random, *tokens) },
        Op::E4m3Encode => OpCase::E4m3Encode { x: floats(&mut random, *tokens) },
        Op::E4m3Decode | Op::E2m1Decode => {
            // All codes in order, then random ones.
            let codes = (0..*tokens).map(|i| if i < 256 { i as u8 } else { random.next() as u8 });
            match op {
                Op::E4m3Decode => OpCase::E4m3Decode { activation, codes: codes.collect() },
                _ => OpCase::E2m1Decode { activation, codes: codes.map(|code| code & 15).collect() },
            }
        }
        Op::Swizzle => {
            let (rows, cols) = (*tokens, shape.hidden.div_ceil(NVFP4_BLOCK));
            at_most("rows * cols", rows.saturating_mul(cols), MAX_ELEMENTS)?;
            OpCase::Swizzle { rows, cols, scales: (0..rows * cols).map(|_| random.next() as u8).collect() }
        }
        Op::Mma => {
            let mut words = |n: usize| -> Vec<u16> {
                (0..n).map(|_| math::from_f32(activation, draw_f32(*family, &mut random))).collect()
            };
            let (a, b) = (words(16 * tokens), words(16 * tokens));
            OpCase::Mma { activation, a, b, c: floats(&mut random, *tokens) }
        }
    };
    case.check()?;
    Ok(case)
}

/// An error where the arrays of a layer and a batch pass 16 GiB: a slip in a size should not fill the machine.
pub(super) fn check_memory(shape: &LayerShape, tokens: usize) -> Result<()> {
    let weights = 3 * shape.experts as u128 * shape.intermediate as u128 * shape.hidden.max(shape.output) as u128 / 2;
    let batch = tokens as u128 * (2 * shape.hidden + 8 * shape.top_k + 8 * shape.output) as u128;
    let most = 16u128 << 30;
    if weights + batch <= most {
        return Ok(());
    }
    Err(Error::argument("shape", format!("{shape:?}, {tokens} tokens"), "arrays of at most 16 GiB"))
}

fn draw_f32(family: Family, random: &mut Random) -> f32 {
    let uniform = random.in_range(-1.0, 1.0);
    let exponent =
        |low: i32, high: i32, random: &mut Random| 2f32.powi(low + (random.next() % (high - low) as u64) as i32);
    match family {
        Family::Subnormal => uniform * exponent(-20, -5, random) * exponent(-120, 10, random),
        Family::Extreme => uniform * exponent(10, 127, random),
        Family::Special => match random.next() % 16 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => 0.0,
            4 => -0.0,
            _ => f32::from_bits(random.next() as u32),
        },
        // The range of exp, silu and e4m3 in which results are neither 0 nor saturated.
        _ => uniform * exponent(-8, 8, random),
    }
}
