//! The H200's tensor-core accumulate for bf16 and f16 operands (`mma.sync` m16n8k8 and m16n8k16, and `wgmma` k16):
//! one output element is `c` plus 8 or 16 products, and its bits are exactly specified.
//!
//! The rule, as measured:
//! 1. The exponent of a product is e(a) + e(b), where e is the exponent *field* without bias (a subnormal has the
//!    smallest normal's); the product is not renormalised. The exponent of `c` is its field's. Zeros are no terms.
//! 2. Every term is truncated toward zero to a multiple of 2^(emax-25), emax being the largest exponent.
//! 3. The truncated terms are added exactly, so their order inside one instruction does not matter.
//! 4. The sum is truncated toward zero to f32; from 2^128 on it is infinite.
//! 5. A zero result is +0, whatever the signs; a negative sum that underflows gives +0 too.
//! 6. NaN, 0·inf and inf - inf give 0x7FFFFFFF; otherwise an infinity propagates.
//!
//! [`mma16`] says this in integers. [`chain_exact`] gives the same bits much faster: it takes operands
//! that were decoded once ([`Tile`], [`Row`]) and works on [`LANES`] rows side by side in f64.

use std::ops::Range;

use crate::Activation;

/// The one NaN that the tensor cores produce.
pub const NAN: u32 = 0x7fff_ffff;

/// Products of one m16n8k16 instruction.
pub const STEP: usize = 16;

/// Rows that a [`Tile`] holds side by side.
pub const LANES: usize = 8;

/// Places below the largest exponent that survive alignment.
const GRID: i32 = 25;

/// Mantissa bits, exponent bias and special exponent field of a 16-bit format.
const fn layout(format: Activation) -> (u32, i32, u32) {
    match format {
        Activation::Bf16 => (7, 127, 255),
        Activation::F16 => (10, 15, 31),
    }
}

/// One operand taken apart: (-1)^negative · significand · 2^(exponent - mantissa bits).
struct Unpacked {
    negative: bool,
    exponent: i32,
    significand: u64,
    infinite: bool,
    nan: bool,
}

fn unpack(format: Activation, bits: u16) -> Unpacked {
    let (mantissa_bits, bias, special) = layout(format);
    let bits = u32::from(bits);
    let field = (bits >> mantissa_bits) & special;
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let implicit = if field == 0 { 0 } else { 1 << mantissa_bits };
    Unpacked {
        negative: bits >> 15 == 1,
        exponent: field.max(1) as i32 - bias,
        significand: u64::from(mantissa | implicit),
        infinite: field == special && mantissa == 0,
        nan: field == special && mantissa != 0,
    }
}

/// A finite nonzero term of the sum: (-1)^negative · significand · 2^lsb, aligned by `exponent`.
struct Term {
    negative: bool,
    exponent: i32,
    significand: u64,
    lsb: i32,
}

/// `significand` in units of 2^-shift, truncated.
fn shifted(significand: u64, shift: i32) -> u64 {
    if shift >= 0 { significand << shift } else { significand.checked_shr(shift.unsigned_abs()).unwrap_or(0) }
}

/// The integer model: c + Σ a·b over all N products of one instruction. `c` and the result are f32 bits.
/// N is 16 (m16n8k16, wgmma k16) or 8 (m16n8k8).
pub fn mma<const N: usize>(format: Activation, a: &[u16; N], b: &[u16; N], c: u32) -> u32 {
    let mantissa_bits = layout(format).0 as i32;
    let mut terms = Vec::with_capacity(N + 1);
    let mut nan = false;
    let mut infinities = [false; 2];

    let (c_negative, c_field, c_mantissa) = (c >> 31 == 1, (c >> 23) & 255, c & 0x7f_ffff);
    if c_field == 255 {
        nan = c_mantissa != 0;
        infinities[usize::from(c_negative)] |= c_mantissa == 0;
    } else if c_field != 0 || c_mantissa != 0 {
        let exponent = c_field.max(1) as i32 - 127;
        let implicit = if c_field == 0 { 0 } else { 0x80_0000 };
        let significand = u64::from(c_mantissa | implicit);
        terms.push(Term { negative: c_negative, exponent, significand, lsb: exponent - 23 });
    }
    for (&a, &b) in a.iter().zip(b) {
        let (a, b) = (unpack(format, a), unpack(format, b));
        let negative = a.negative != b.negative;
        if a.nan || b.nan {
            nan = true;
        } else if a.infinite || b.infinite {
            // An infinity's significand is not 0, so this is 0·inf alone.
            nan |= a.significand == 0 || b.significand == 0;
            infinities[usize::from(negative)] = true;
        } else if a.significand != 0 && b.significand != 0 {
            let exponent = a.exponent + b.exponent;
            let significand = a.significand * b.significand;
            terms.push(Term { negative, exponent, significand, lsb: exponent - 2 * mantissa_bits });
        }
    }
    if nan || infinities == [true; 2] {
        return NAN;
    }
    match infinities {
        [true, _] => return 0x7f80_0000,
        [_, true] => return 0xff80_0000,
        _ => {}
    }

    let Some(emax) = terms.iter().map(|term| term.exponent).max() else { return 0 };
    let grid = emax - GRID;
    let total: i64 = terms
        .iter()
        .map(|term| {
            let magnitude = shifted(term.significand, term.lsb - grid) as i64;
            if term.negative { -magnitude } else { magnitude }
        })
        .sum();
    truncated_to_f32(total, grid)
}

/// total · 2^grid truncated toward zero to f32 bits; zero is +0.
fn truncated_to_f32(total: i64, grid: i32) -> u32 {
    if total == 0 {
        return 0;
    }
    let sign = u32::from(total < 0) << 31;
    let magnitude = total.unsigned_abs();
    let exponent = magnitude.ilog2() as i32 + grid;
    let lsb = exponent.max(-126) - 23;
    let significand = shifted(magnitude, grid - lsb) as u32;
    if significand == 0 {
        0
    } else if exponent > 127 {
        sign | 0x7f80_0000
    } else if significand < 0x80_0000 {
        sign | significand
    } else {
        sign | ((exponent + 127) as u32) << 23 | (significand & 0x7f_ffff)
    }
}

/// The integer model of one m16n8k16 output.
pub fn mma16(format: Activation, a: &[u16; 16], b: &[u16; 16], c: u32) -> u32 {
    mma(format, a, b, c)
}

/// Exponent of a zero operand: a sum with it stays below every real exponent.
const ZERO_EXPONENT: i16 = -8192;

/// A 16-bit operand decoded for the fast form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// The value, exact in f32.
    pub value: f32,
    /// Exponent field without bias; far below every real one for a zero.
    exponent: i16,
    /// The bits that it was decoded from.
    pub bits: u16,
    /// NaN or infinite: only the integer model may use it.
    special: bool,
}

impl Operand {
    /// Decodes `bits`.
    pub fn decode(format: Activation, bits: u16) -> Self {
        let parts = unpack(format, bits);
        let zero = parts.significand == 0;
        Operand {
            value: super::math::to_f32(format, bits),
            exponent: if zero { ZERO_EXPONENT } else { parts.exponent as i16 },
            bits,
            special: parts.nan || parts.infinite,
        }
    }
}

/// [`LANES`] rows of one operand, decoded and interleaved: all lanes of position 0, then of position 1, …
pub struct Tile {
    format: Activation,
    value: Vec<[f64; LANES]>,
    exponent: Vec<[i16; LANES]>,
    bits: Vec<[u16; LANES]>,
    /// Per step: holds something that only the integer model may use.
    special: Vec<bool>,
}

impl Tile {
    /// A tile of `steps` instructions; `operand(lane, position)` for positions 0..16·steps.
    pub fn new(format: Activation, steps: usize, operand: impl Fn(usize, usize) -> Operand) -> Self {
        let len = steps * STEP;
        let mut tile = Tile {
            format,
            value: vec![[0.0; LANES]; len],
            exponent: vec![[ZERO_EXPONENT; LANES]; len],
            bits: vec![[0; LANES]; len],
            special: vec![false; steps],
        };
        for position in 0..len {
            for lane in 0..LANES {
                let operand = operand(lane, position);
                tile.value[position][lane] = f64::from(operand.value);
                tile.exponent[position][lane] = operand.exponent;
                tile.bits[position][lane] = operand.bits;
                tile.special[position / STEP] |= operand.special;
            }
        }
        tile
    }
}

/// One row of the other operand, decoded.
pub struct Row {
    value: Vec<f32>,
    exponent: Vec<i16>,
    bits: Vec<u16>,
    special: Vec<bool>,
}

impl Row {
    /// A row of `steps` instructions; `operand(position)` for positions 0..16·steps.
    pub fn new(steps: usize, operand: impl Fn(usize) -> Operand) -> Self {
        let operands = (0..steps * STEP).map(operand).collect::<Vec<_>>();
        Row {
            value: operands.iter().map(|operand| operand.value).collect(),
            exponent: operands.iter().map(|operand| operand.exponent).collect(),
            bits: operands.iter().map(|operand| operand.bits).collect(),
            special: operands.chunks(STEP).map(|step| step.iter().any(|operand| operand.special)).collect(),
        }
    }
}

/// The instructions `steps`, ascending, chained through `acc`: for each,
/// `acc[lane] = mma16(lane of tile, row, acc[lane])`.
/// `steps` must lie inside both.
pub fn chain_exact(tile: &Tile, row: &Row, steps: Range<usize>, acc: &mut [f32; LANES]) {
    let range = steps.start * STEP..steps.end * STEP;
    let tile_values = tile.value[range.clone()].as_chunks::<STEP>().0;
    let tile_exponents = tile.exponent[range.clone()].as_chunks::<STEP>().0;
    let row_values = row.value[range.clone()].as_chunks::<STEP>().0;
    let row_exponents = row.exponent[range].as_chunks::<STEP>().0;
    for (i, step) in steps.enumerate() {
        let finite = acc.iter().all(|c| c.to_bits() & 0x7f80_0000 != 0x7f80_0000);
        if finite && !tile.special[step] && !row.special[step] {
            step_fast(&tile_values[i], &tile_exponents[i], &row_values[i], &row_exponents[i], acc);
        } else {
            step_integer(tile, row, step, acc);
        }
    }
}

/// One instruction for all lanes by the integer model.
fn step_integer(tile: &Tile, row: &Row, step: usize, acc: &mut [f32; LANES]) {
    let first = step * STEP;
    let b: [u16; STEP] = std::array::from_fn(|k| row.bits[first + k]);
    for (lane, c) in acc.iter_mut().enumerate() {
        let a: [u16; STEP] = std::array::from_fn(|k| tile.bits[first + k][lane]);
        *c = f32::from_bits(mma16(tile.format, &a, &b, c.to_bits()));
    }
}

/// 2^exponent for a normal exponent.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// One instruction for all lanes, finite operands only. Products have at most 22 significant bits and exponents between
/// -2·149 and 256, so every product and every scaling by a power of two below is exact in f64.
fn step_fast(
    a: &[[f64; LANES]; STEP],
    a_exponent: &[[i16; LANES]; STEP],
    b: &[f32; STEP],
    b_exponent: &[i16; STEP],
    acc: &mut [f32; LANES],
) {
    let mut emax: [i16; LANES] = std::array::from_fn(|lane| {
        let bits = acc[lane].to_bits() & 0x7fff_ffff;
        // Field 0 with a nonzero mantissa is a subnormal: it counts as field 1.
        if bits == 0 { ZERO_EXPONENT } else { (bits >> 23).max(1) as i16 - 127 }
    });
    for (a, &b) in a_exponent.iter().zip(b_exponent) {
        for lane in 0..LANES {
            emax[lane] = emax[lane].max(a[lane] + b);
        }
    }
    // Without any term all that follows is 0 at whatever scale; -300 is below every real exponent.
    let emax = emax.map(|exponent| i32::from(exponent.max(-300)));
    let up = emax.map(|exponent| power_of_two(GRID - exponent));
    let down = emax.map(|exponent| power_of_two(exponent - GRID));

    // The sums are kept at 1.5·2^52 + integer, where adding rounds to the nearest integer. Taking just under 1/2 off a
    // term's magnitude first turns that into truncation: a term of at least 1/2 has no bit below 2^-24 and is below
    // 2^27, so subtracting 1/2 - 2^-26 is exact and never leaves a tie; a smaller term ends within 1/2 of 0.
    const INTEGERS: f64 = 1.5 * (1u64 << 52) as f64;
    const UNDER_HALF: f64 = 0.5 - 1.0 / (1u64 << 26) as f64;
    let mut sum = [INTEGERS; LANES];
    for (a, &b) in a.iter().zip(b) {
        let b = f64::from(b);
        for lane in 0..LANES {
            let term = a[lane] * b * up[lane];
            sum[lane] += term - UNDER_HALF.copysign(term);
        }
    }
    for lane in 0..LANES {
        let term = f64::from(acc[lane]) * up[lane];
        sum[lane] += term - UNDER_HALF.copysign(term);
    }

    let exact: [f64; LANES] = std::array::from_fn(|lane| (sum[lane] - INTEGERS) * down[lane]);
    // Dropping 29 of 52 mantissa bits truncates to a normal f32; what is below those goes the long way.
    *acc = exact.map(|x| f64::from_bits(x.to_bits() & !((1 << 29) - 1)) as f32);
    if exact.iter().any(|x| x.abs() < f64::from(f32::MIN_POSITIVE) && *x != 0.0) {
        for (c, x) in acc.iter_mut().zip(exact) {
            if x.abs() < f64::from(f32::MIN_POSITIVE) {
                let magnitude = (x.abs() * power_of_two(149)) as u32;
                let sign = u32::from(x < 0.0 && magnitude != 0) << 31;
                *c = f32::from_bits(sign | magnitude);
            }
        }
    }
}

/// Σ a·b over the positions of `steps` in plain f64, in ascending order: for comparisons with an error bound.
pub fn chain_plain(tile: &Tile, row: &Row, steps: Range<usize>) -> [f64; LANES] {
    let range = steps.start * STEP..steps.end * STEP;
    let mut acc = [0.0; LANES];
    for (a, &b) in tile.value[range.clone()].iter().zip(&row.value[range]) {
        for lane in 0..LANES {
            acc[lane] += a[lane] * f64::from(b);
        }
    }
    acc
}
