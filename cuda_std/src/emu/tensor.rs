//! `mma.sync.m16n8k16` as an H200 does it: each output is one fused sum of C and 16 products.
//!
//! With e(x) the exponent field of x (a subnormal has that of the smallest normal number), a product's exponent is e(a) +
//! e(b). Every term that is not zero is cut toward zero to a multiple of 2^(emax - 25), emax being the largest exponent
//! of all terms; the cut terms are added exactly; the sum is cut toward zero to f32. A zero result is +0. NaN, 0 * Inf
//! and Inf - Inf give 0x7FFFFFFF, and other infinities pass through.

/// Rows of A and D.
const M: usize = 16;
/// Columns of B and D.
const N: usize = 8;
/// Products of one output.
const K: usize = 16;
/// Exponent of a zero: small enough that no sum of two reaches that of a number, large enough for i16.
const ZERO: i16 = -16_000;
/// Bits kept below the largest exponent.
const GRID: i32 = 25;

/// A row of A or a column of B.
#[derive(Clone, Copy)]
struct Vector {
    value: [f64; K],
    exponent: [i16; K],
    /// No infinity and no NaN in it.
    finite: bool,
}

impl Vector {
    const EMPTY: Vector = Vector { value: [0.0; K], exponent: [0; K], finite: true };

    fn set<const BF16: bool>(&mut self, k: usize, bits: u16) {
        let (value, exponent, finite) = if BF16 {
            let field = (bits >> 7 & 0xFF) as i16;
            (f32::from_bits(u32::from(bits) << 16), field.max(1) - 127, field != 0xFF)
        } else {
            let field = (bits >> 10 & 0x1F) as i16;
            (super::f16_to_f32(bits), field.max(1) - 15, field != 0x1F)
        };
        self.value[k] = f64::from(value);
        self.exponent[k] = if bits & 0x7FFF == 0 { ZERO } else { exponent };
        self.finite &= finite;
    }
}

/// 2^n for |n| < 1023.
fn power_of_two(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// C plus the products of `a` and `b`.
fn output(a: &Vector, b: &Vector, c: f32) -> f32 {
    if !(a.finite && b.finite && c.is_finite()) {
        return special(a, b, c);
    }
    // Wrapping additions, since overflow checks would keep the loops from being vectorised; nothing can overflow.
    let mut emax = i16::MIN;
    for k in 0..K {
        emax = emax.max(a.exponent[k].wrapping_add(b.exponent[k]));
    }
    if c != 0.0 {
        emax = emax.max((c.to_bits() >> 23 & 0xFF).max(1) as i16 - 127);
    }
    if i32::from(emax) < i32::from(ZERO) / 2 {
        return 0.0;
    }
    let scale = power_of_two(GRID - i32::from(emax));
    // A product is below 2^(e + 2), so a term is below 2^27: four of them fit an i32, 17 do not.
    let mut sums = [0i32; 4];
    for k in 0..K {
        // SAFETY: finite and below 2^27 by the line above.
        let term = unsafe { (a.value[k] * b.value[k] * scale).to_int_unchecked::<i32>() };
        sums[k % 4] = sums[k % 4].wrapping_add(term);
    }
    let mut sum = (f64::from(c) * scale) as i64;
    for part in sums {
        sum += i64::from(part);
    }
    cut(sum as f64 * power_of_two(i32::from(emax) - GRID))
}

/// Cuts toward zero to f32; zero is +0.
fn cut(value: f64) -> f32 {
    if value.abs() >= power_of_two(128) {
        return f32::INFINITY.copysign(value as f32);
    }
    let nearest = value as f32;
    let bits = nearest.to_bits() - u32::from(f64::from(nearest).abs() > value.abs());
    if bits << 1 == 0 { 0.0 } else { f32::from_bits(bits) }
}

/// An output with a NaN or an infinity among its inputs.
#[cold]
fn special(a: &Vector, b: &Vector, c: f32) -> f32 {
    let mut terms = (0..K).map(|k| a.value[k] * b.value[k]).chain([f64::from(c)]).filter(|term| !term.is_finite());
    let first = terms.next().unwrap_or(f64::NAN);
    // Two opposite infinities add to NaN, and so does anything with NaN.
    let sum = terms.fold(first, |sum, term| sum + term);
    if sum.is_nan() { f32::from_bits(super::convert::NAN) } else { sum as f32 }
}

/// D = A B + C over the registers of 32 lanes: inputs are A (4 words), B (2) and C (4).
pub(super) fn m16n8k16<const BF16: bool>(inputs: &[[u32; 10]; 32], outputs: &mut [[u32; 4]; 32]) {
    let mut a = [Vector::EMPTY; M];
    let mut b = [Vector::EMPTY; N];
    for (lane, registers) in inputs.iter().enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        for half in 0..2 {
            let bits = |register: usize| (registers[register] >> (16 * half)) as u16;
            let k = 2 * t + half;
            a[g].set::<BF16>(k, bits(0));
            a[g + 8].set::<BF16>(k, bits(1));
            a[g].set::<BF16>(k + 8, bits(2));
            a[g + 8].set::<BF16>(k + 8, bits(3));
            b[g].set::<BF16>(k, bits(4));
            b[g].set::<BF16>(k + 8, bits(5));
        }
    }
    for (lane, (registers, out)) in inputs.iter().zip(outputs).enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        for i in 0..4 {
            let (row, column) = (g + i / 2 * 8, 2 * t + i % 2);
            out[i] = output(&a[row], &b[column], f32::from_bits(registers[6 + i])).to_bits();
        }
    }
}
