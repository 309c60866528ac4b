//! `silu_mul` and `silu_mul_quant_fp8`: what joins the gate and up of an expert that are rounded to bf16.

use super::math;
use super::quant::{Quantized, per_token_group_quant_fp8};
use crate::error::{Error, Result, check_len};
use crate::{Activation, Gating};

/// bf16 of the gated product, element by element; gate and up are bf16. First the clamp: the gate from above, up on both
/// sides. Then in f32, each operation rounded once:
/// - [`Gating::Silu`]: `(g·(1/(1 + exp(-g))))·u`
/// - [`Gating::SwigluOai`]: `(u + 1)·(g·(1/(1 + exp(-(alpha·g)))))`
pub fn silu_mul(gate: &[u16], up: &[u16], gating: &Gating) -> Result<Vec<u16>> {
    check_gating(gating)?;
    check_len("up", up.len(), gate.len())?;
    let widen = |bits| math::to_f32(Activation::Bf16, bits);
    Ok(gate
        .iter()
        .zip(up)
        .map(|(&g, &u)| math::from_f32(Activation::Bf16, gated(widen(g), widen(u), gating)))
        .collect())
}

/// [`silu_mul`] of [rows, cols], then [`per_token_group_quant_fp8`].
pub fn silu_mul_quant_fp8(gate: &[u16], up: &[u16], rows: usize, cols: usize, gating: &Gating) -> Result<Quantized> {
    let elements = rows.checked_mul(cols);
    let elements = elements.ok_or_else(|| Error::argument("rows", rows, "a buffer that fits the address space"))?;
    check_len("gate", gate.len(), elements)?;
    per_token_group_quant_fp8(&silu_mul(gate, up, gating)?, rows, cols, cols)
}

/// `Err` naming `limit` unless it is > 0, and `alpha` unless it is finite.
pub(super) fn check_gating(gating: &Gating) -> Result<()> {
    let limit = match *gating {
        Gating::Silu { limit } => limit,
        Gating::SwigluOai { alpha, .. } if !alpha.is_finite() => {
            return Err(Error::argument("alpha", alpha, "a finite value"));
        }
        Gating::SwigluOai { limit, .. } => Some(limit),
    };
    match limit {
        Some(limit) if limit.is_nan() || limit <= 0.0 => Err(Error::argument("limit", limit, "a value > 0")),
        _ => Ok(()),
    }
}

/// The gated product before its rounding to bf16.
fn gated(g: f32, u: f32, gating: &Gating) -> f32 {
    let clamp = |limit| (math::min(g, limit), math::min(math::max(u, -limit), limit));
    match *gating {
        Gating::Silu { limit } => {
            let (g, u) = limit.map_or((g, u), clamp);
            (g * math::sigmoid(g)) * u
        }
        Gating::SwigluOai { alpha, limit } => {
            let (g, u) = clamp(limit);
            (u + 1.0) * (g * math::sigmoid(alpha * g))
        }
    }
}
