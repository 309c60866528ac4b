//! `per_token_group_quant_fp8`: e4m3 codes with one f32 scale per row and group of 128 columns.

use rayon::prelude::*;

use super::math;
use crate::Activation;
use crate::error::{Error, Result, check_at_least};

/// Columns that share a scale. The last group of a row is what remains.
pub(super) const GROUP: usize = 128;

/// Smallest scale.
const FLOOR: f32 = 1e-12;

/// Result of a quantiser: value = code · scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// e4m3 codes [rows, cols].
    pub codes: Vec<u8>,
    /// Scales [rows, ceil(cols/128)].
    pub scales: Vec<f32>,
}

/// Quantises bf16 x [rows, cols], whose rows start `stride` elements apart.
///
/// Of a group: amax is the largest magnitude that is no NaN, 0 if there is none; scale = amax/448, but at least 1e-12;
/// code = e4m3 of a/scale, saturating. A NaN, and an infinity (whose group has the scale infinity), give 0x7F.
pub fn per_token_group_quant_fp8(x: &[u16], rows: usize, cols: usize, stride: usize) -> Result<Quantized> {
    if stride < cols {
        return Err(Error::argument("stride", stride, format!("at least cols = {cols}")));
    }
    if rows > 0 {
        let needed = (rows - 1).checked_mul(stride).and_then(|before| before.checked_add(cols));
        let needed = needed.ok_or_else(|| Error::argument("rows", rows, "a buffer that fits the address space"))?;
        check_at_least("x", x.len(), needed)?;
    }
    let quantized = (0..rows)
        .into_par_iter()
        .map(|row| x[row * stride..][..cols].chunks(GROUP).map(group).collect::<Vec<_>>())
        .collect::<Vec<_>>();
    let mut result = Quantized { codes: Vec::new(), scales: Vec::new() };
    for (codes, scale) in quantized.into_iter().flatten() {
        result.codes.extend(codes);
        result.scales.push(scale);
    }
    Ok(result)
}

/// Codes and scale of one group.
fn group(x: &[u16]) -> (Vec<u8>, f32) {
    let values = x.iter().map(|&bits| math::to_f32(Activation::Bf16, bits)).collect::<Vec<_>>();
    let amax = values.iter().filter(|value| !value.is_nan()).fold(0f32, |amax, value| amax.max(value.abs()));
    let scale = amax / 448.0;
    let scale = if scale < FLOOR { FLOOR } else { scale };
    (values.iter().map(|value| math::to_e4m3(value / scale)).collect(), scale)
}
