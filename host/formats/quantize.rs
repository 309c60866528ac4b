//! bf16 weights to NVFP4, with the bits of NVIDIA ModelOpt's exporter.
//!
//! In f32: global = amax/2688, block scale = e4m3(max(block amax/(6·global), 2^-9)), code = nearest-even e2m1 of
//! w/(scale·global); a block of zeros gets the scale 0 (ModelOpt: 1) and the codes 0. gate and up of an expert share the global scale, because ModelOpt quantises the fused matrix.
//!
//! And bf16 weights to MXFP4 by the rule of OCP's Microscaling Formats 1.0: the scale is 2^(floor(log2 of the block amax) - 2), at least
//! 2^-127, and code = nearest-even e2m1 of w/scale, saturating at ±6. A block of zeros gets the scale 1.

use super::fp4::{ExpertTensors, Fp4Matrix, GlobalScale};
use super::scales::{LinearScales, product};
use super::{NVFP4_BLOCK, e2m1, e4m3, e8m0, float16};
use crate::error::{Error, Result, check_len};
use crate::types::WeightFormat;

/// Largest code times largest block scale: 6·448.
const RANGE: f32 = 2688.0;

/// Smallest positive block scale, 2^-9.
const SMALLEST: f32 = 1.0 / 512.0;

/// Largest magnitude of bf16 weights; an error naming `name` if one of them is NaN or infinite.
pub fn amax(name: &'static str, weights: &[u16]) -> Result<f32> {
    let mut amax = 0f32;
    for (index, &bits) in weights.iter().enumerate() {
        let a = float16::bf16_to_f32(bits).abs();
        if !a.is_finite() {
            return Err(Error::argument(name, format!("{a} at element {index}"), "finite weights needed"));
        }
        amax = amax.max(a);
    }
    Ok(amax)
}

/// Global scale for weights of the given largest magnitude: amax/2688, or 1 where all weights are zero.
pub fn global_scale(amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { amax / RANGE }
}

/// Quantises bf16 weights [rows, cols] with a given global scale (finite and positive). `name` is what an error calls
/// the weights.
pub fn quantize(
    name: &'static str,
    weights: &[u16],
    rows: usize,
    cols: usize,
    global: f32,
) -> Result<Fp4Matrix<'static>> {
    if cols == 0 || !cols.is_multiple_of(NVFP4_BLOCK) {
        return Err(Error::argument("cols", cols, format!("a positive multiple of {NVFP4_BLOCK} is needed")));
    }
    if !(global.is_finite() && global > 0.0) {
        return Err(Error::argument("global", global, "a finite positive number is needed"));
    }
    check_len(name, weights.len(), product(name, &[rows, cols])?)?;
    amax(name, weights)?;

    let mut codes = Vec::with_capacity(weights.len() / 2);
    let mut scales = Vec::with_capacity(weights.len() / NVFP4_BLOCK);
    for block in weights.chunks_exact(NVFP4_BLOCK) {
        let block_amax = block.iter().map(|&bits| float16::bf16_to_f32(bits).abs()).fold(0.0, f32::max);
        // Only a block of zeros gets the scale 0: the smallest scale keeps what it can of a block of tiny weights.
        let scale = if block_amax == 0.0 { 0 } else { e4m3::encode((block_amax / (6.0 * global)).max(SMALLEST)) };
        scales.push(scale);
        let step = e4m3::decode(scale) * global;
        // A weight of -0 loses its sign, a small negative weight keeps it.
        let code = |bits| match float16::bf16_to_f32(bits) {
            0.0 => 0,
            weight => e2m1::encode(weight / step),
        };
        codes.extend(block.chunks_exact(2).map(|pair| e2m1::pack(code(pair[0]), code(pair[1]))));
    }
    let scales = LinearScales::new("scales", rows, cols / NVFP4_BLOCK, scales)?;
    Fp4Matrix::new(rows, cols, codes, scales, GlobalScale::Multiplier(global))
}

/// Quantises an expert: gate and up [I, K] with one global scale, down [H, I] with its own.
pub fn quantize_expert(
    gate: &[u16],
    up: &[u16],
    down: &[u16],
    hidden: usize,
    intermediate: usize,
) -> Result<ExpertTensors<'static>> {
    if intermediate == 0 {
        return Err(Error::argument("intermediate", 0, "at least 1 needed"));
    }
    let fused = global_scale(amax("gate", gate)?.max(amax("up", up)?));
    Ok(ExpertTensors {
        gate: quantize("gate", gate, intermediate, hidden, fused)?,
        up: quantize("up", up, intermediate, hidden, fused)?,
        down: quantize("down", down, down.len() / intermediate, intermediate, global_scale(amax("down", down)?))?,
    })
}

/// Quantises bf16 weights [rows, cols] to MXFP4. `name` is what an error calls the weights.
pub fn quantize_mxfp4(name: &'static str, weights: &[u16], rows: usize, cols: usize) -> Result<Fp4Matrix<'static>> {
    let block = WeightFormat::Mxfp4.block();
    if cols == 0 || !cols.is_multiple_of(block) {
        return Err(Error::argument("cols", cols, format!("a positive multiple of {block} is needed")));
    }
    check_len(name, weights.len(), product(name, &[rows, cols])?)?;
    amax(name, weights)?;

    let mut codes = Vec::with_capacity(weights.len() / 2);
    let mut scales = Vec::with_capacity(weights.len() / block);
    for block in weights.chunks_exact(block) {
        let block_amax = block.iter().map(|&bits| float16::bf16_to_f32(bits).abs()).fold(0.0, f32::max);
        // Every bf16 is a normal f64, whose exponent field is the floor of the logarithm. 6 is 1.5·2^2.
        let exponent = (f64::from(block_amax).to_bits() >> 52) as i32 - 1023 - 2;
        let scale = if block_amax == 0.0 { e8m0::ONE } else { (exponent.max(-127) + 127) as u8 };
        scales.push(scale);
        let code = |bits| e2m1::encode(float16::bf16_to_f32(bits) / e8m0::decode(scale));
        codes.extend(block.chunks_exact(2).map(|pair| e2m1::pack(code(pair[0]), code(pair[1]))));
    }
    let scales = LinearScales::new("scales", rows, cols / block, scales)?;
    Fp4Matrix::mxfp4(rows, cols, codes, scales)
}

/// Quantises an expert to MXFP4: gate and up [I, K], down [H, I].
pub fn quantize_expert_mxfp4(
    gate: &[u16],
    up: &[u16],
    down: &[u16],
    hidden: usize,
    intermediate: usize,
) -> Result<ExpertTensors<'static>> {
    if intermediate == 0 {
        return Err(Error::argument("intermediate", 0, "at least 1 needed"));
    }
    Ok(ExpertTensors {
        gate: quantize_mxfp4("gate", gate, intermediate, hidden)?,
        up: quantize_mxfp4("up", up, intermediate, hidden)?,
        down: quantize_mxfp4("down", down, down.len() / intermediate, intermediate)?,
    })
}
