//! Expert weights that are not four bits wide: bf16, and e4m3 with one f32 scale for each 128x128 block. With them what surrounds
//! routed experts in a checkpoint: router and shared expert.

use super::fp4::{ExpertShape, MAX_EXPERTS};
use super::scales::product;
use super::{e4m3, float16};
use crate::error::{Error, Result, check_len};
use crate::types::Routing;

/// Rows and columns of a block with one scale.
pub const FP8_BLOCK: usize = 128;

/// A matrix of one expert, row-major [rows, cols], in the format it is stored in.
#[derive(Clone, Debug, PartialEq)]
pub enum DenseMatrix {
    /// bf16 bits.
    Bf16(Vec<u16>),
    /// e4m3 codes with one f32 scale for each 128x128 block, [ceil(rows/128), ceil(cols/128)]: value = code · scale.
    Fp8 {
        /// Codes, [rows, cols].
        codes: Vec<u8>,
        /// Scales of the blocks; those at the right and lower edge may be cut.
        scales: Vec<f32>,
    },
}

/// Format of a [`DenseMatrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenseFormat {
    /// [`DenseMatrix::Bf16`].
    Bf16,
    /// [`DenseMatrix::Fp8`].
    Fp8,
}

impl DenseFormat {
    /// Its name in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            DenseFormat::Bf16 => "bf16",
            DenseFormat::Fp8 => "fp8",
        }
    }
}

impl std::fmt::Display for DenseFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// One expert.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseExpert {
    /// [intermediate, hidden].
    pub gate: DenseMatrix,
    /// [intermediate, hidden].
    pub up: DenseMatrix,
    /// [output, intermediate].
    pub down: DenseMatrix,
    /// Biases of gate and up `[intermediate]` and of down `[output]`.
    pub biases: Option<[Vec<f32>; 3]>,
}

/// All experts of a layer, all matrices of one format.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseExperts {
    hidden: usize,
    intermediate: usize,
    output: usize,
    format: DenseFormat,
    experts: Vec<DenseExpert>,
}

/// Router of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterWeights {
    /// bf16 bits [E, hidden].
    pub weight: Vec<u16>,
    /// Bias of the logits `[E]` (gpt-oss).
    pub bias: Option<Vec<f32>>,
    /// Correction bias `[E]`: takes part in the choice of experts alone.
    pub correction_bias: Option<Vec<f32>>,
    /// How logits become ids and weights.
    pub routing: Routing,
}

/// Shared expert.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    /// Its own intermediate size.
    pub intermediate: usize,
    /// Its weights.
    pub expert: DenseExpert,
    /// bf16 bits `[hidden]`; the output is multiplied by the sigmoid of its dot product with x (Qwen2-MoE, Qwen3-Next).
    pub gate: Option<Vec<u16>>,
}

impl DenseMatrix {
    /// Its format.
    pub const fn format(&self) -> DenseFormat {
        match self {
            DenseMatrix::Bf16(_) => DenseFormat::Bf16,
            DenseMatrix::Fp8 { .. } => DenseFormat::Fp8,
        }
    }

    /// f32 weights [rows, cols]: bf16 widened, or code · scale. Every NaN gives 0x7FFFFFFF. Errors name `rows` or the buffer whose
    /// length does not fit.
    pub fn dequantize(&self, rows: usize, cols: usize) -> Result<Vec<f32>> {
        if let Some(problem) = self.length_problem(rows, cols)? {
            return Err(Error::argument("rows", format!("{rows} with {cols} columns"), problem));
        }
        Ok(match self {
            DenseMatrix::Bf16(bits) => bits.iter().map(|&bits| float16::bf16_to_f32(bits)).collect(),
            DenseMatrix::Fp8 { codes, scales } => {
                let mut out = Vec::with_capacity(codes.len());
                let blocks = cols.div_ceil(FP8_BLOCK);
                for (row, codes) in codes.chunks_exact(cols.max(1)).enumerate() {
                    let scales = &scales[row / FP8_BLOCK * blocks..][..blocks];
                    for (codes, &scale) in codes.chunks(FP8_BLOCK).zip(scales) {
                        out.extend(codes.iter().map(|&code| float16::canonical_f32(e4m3::decode(code) * scale)));
                    }
                }
                out
            }
        })
    }

    /// What is wrong with the lengths for `rows` x `cols` weights.
    fn length_problem(&self, rows: usize, cols: usize) -> Result<Option<String>> {
        let weights = product("weights", &[rows, cols])?;
        let wrong = |what: &str, given: usize, needed: usize| {
            (given != needed).then(|| format!("{given} {what}, {needed} needed for {rows} x {cols} weights"))
        };
        Ok(match self {
            DenseMatrix::Bf16(bits) => wrong("weights", bits.len(), weights),
            DenseMatrix::Fp8 { codes, scales } => wrong("codes", codes.len(), weights).or_else(|| {
                let needed = rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK);
                wrong("scales", scales.len(), needed)
            }),
        })
    }

    /// What is wrong with codes and scales, each of which must stand for a number. bf16 may hold anything.
    fn value_problem(&self) -> Option<String> {
        let DenseMatrix::Fp8 { codes, scales } = self else { return None };
        if let Some(at) = codes.iter().position(|&code| e4m3::is_nan(code)) {
            return Some(format!("NaN code 0x{:02X} at element {at}", codes[at]));
        }
        let at = scales.iter().position(|scale| !scale.is_finite())?;
        Some(format!("scale {} of block {at}, finite scales needed", scales[at]))
    }
}

/// Picks one matrix of an expert.
type Part = fn(&DenseExpert) -> &DenseMatrix;

/// The matrices of an expert, by name.
const PARTS: [(&str, Part); 3] = [("gate", |e| &e.gate), ("up", |e| &e.up), ("down", |e| &e.down)];

impl DenseExperts {
    /// Checks 1 to 4096 experts, sizes that are not 0, the length of every buffer, that all matrices have the format of the first
    /// gate, that no code is NaN, that scales and biases are finite, and that all experts or none have biases. Errors name the
    /// dimension, or the matrix with every expert in which it is wrong.
    pub fn new(hidden: usize, intermediate: usize, output: usize, experts: Vec<DenseExpert>) -> Result<Self> {
        if !(1..=MAX_EXPERTS).contains(&experts.len()) {
            return Err(Error::argument("experts", experts.len(), format!("1 to {MAX_EXPERTS} needed")));
        }
        for (name, value) in [("hidden", hidden), ("intermediate", intermediate), ("output", output)] {
            if value == 0 {
                return Err(Error::argument(name, 0, "at least 1 needed"));
            }
        }
        product("gate_up", &[experts.len(), 2, intermediate, hidden, 2])?;
        product("down", &[experts.len(), output, intermediate, 2])?;
        let format = experts[0].gate.format();
        for (name, part) in PARTS {
            let (rows, cols) = if name == "down" { (output, intermediate) } else { (intermediate, hidden) };
            check(name, &experts, |expert| {
                let matrix = part(expert);
                if matrix.format() != format {
                    return Ok(Some(format!("{}, but the first gate is {format}", matrix.format())));
                }
                Ok(matrix.length_problem(rows, cols)?.or_else(|| matrix.value_problem()))
            })?;
        }
        let biased = experts[0].biases.is_some();
        check("biases", &experts, |expert| {
            let Some(biases) = &expert.biases else {
                return Ok(biased.then(|| "missing, but expert 0 has biases".into()));
            };
            if !biased {
                return Ok(Some("there, but expert 0 has none".into()));
            }
            for ((name, _), (values, needed)) in
                PARTS.iter().zip(biases.iter().zip([intermediate, intermediate, output]))
            {
                if values.len() != needed {
                    return Ok(Some(format!("{} for {name}, {needed} needed", values.len())));
                }
                if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                    return Ok(Some(format!("{} for row {at} of {name}, finite numbers needed", values[at])));
                }
            }
            Ok(None)
        })?;
        Ok(DenseExperts { hidden, intermediate, output, format, experts })
    }

    /// Hidden size: columns of gate and up.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Intermediate size: rows of gate and of up, columns of down.
    pub fn intermediate(&self) -> usize {
        self.intermediate
    }

    /// Output width: rows of down.
    pub fn output(&self) -> usize {
        self.output
    }

    /// Dimensions.
    pub fn shape(&self) -> ExpertShape {
        let DenseExperts { hidden, intermediate, output, .. } = *self;
        ExpertShape { experts: self.experts.len(), hidden, intermediate, output }
    }

    /// Format of all matrices.
    pub fn format(&self) -> DenseFormat {
        self.format
    }

    /// Whether the experts have biases.
    pub fn has_biases(&self) -> bool {
        self.experts[0].biases.is_some()
    }

    /// The experts.
    pub fn experts(&self) -> &[DenseExpert] {
        &self.experts
    }

    /// The experts, to be changed and checked again.
    pub fn into_experts(self) -> Vec<DenseExpert> {
        self.experts
    }
}

/// `Err` naming `name` and every expert that has a problem, with the first problem.
fn check(
    name: &'static str,
    experts: &[DenseExpert],
    problem: impl Fn(&DenseExpert) -> Result<Option<String>>,
) -> Result<()> {
    let mut wrong = Vec::new();
    let mut first = None;
    for (index, expert) in experts.iter().enumerate() {
        if let Some(problem) = problem(expert)? {
            wrong.push(index);
            first.get_or_insert_with(|| format!("expert {index}: {problem}"));
        }
    }
    match first {
        Some(problem) => Err(Error::Experts { name, experts: wrong, problem }),
        None => Ok(()),
    }
}

impl RouterWeights {
    /// Checks the lengths for `experts` experts, that biases are finite, and 1 <= top-k <= `experts`. Errors name the field.
    pub fn check(&self, experts: usize, hidden: usize) -> Result<()> {
        check_len("router weight", self.weight.len(), product("router weight", &[experts, hidden])?)?;
        for (name, values) in [("router bias", &self.bias), ("correction_bias", &self.correction_bias)] {
            let Some(values) = values else { continue };
            check_len(name, values.len(), experts)?;
            let wrong: Vec<usize> = (0..experts).filter(|&expert| !values[expert].is_finite()).collect();
            if let Some(&expert) = wrong.first() {
                let problem = format!("{}, finite numbers needed", values[expert]);
                return Err(Error::Experts { name, experts: wrong, problem });
            }
        }
        if !(1..=experts).contains(&self.routing.top_k) {
            return Err(Error::argument("top_k", self.routing.top_k, format!("1 to {experts} needed")));
        }
        Ok(())
    }
}

impl SharedExpert {
    /// Checks the weights as [`DenseExperts::new`] does, and the length of the gate. Errors name the dimension, the matrix or the
    /// gate.
    pub fn check(&self, hidden: usize, output: usize) -> Result<()> {
        DenseExperts::new(hidden, self.intermediate, output, vec![self.expert.clone()])?;
        self.gate.as_ref().map_or(Ok(()), |gate| check_len("shared expert gate", gate.len(), hidden))
    }
}
