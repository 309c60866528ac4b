//! `mma` against results that were measured on an H200, through real launches.
#![cfg(not(target_arch = "nvptx64"))]
#![allow(missing_docs)]

use cuda_std::arch::ArchId;
use cuda_std::arch::Sm120;
use cuda_std::cvt::e4m3x2_to_f16x2;
use cuda_std::emu::{Device, Launch};
use cuda_std::kernel::{Family, Kernel};
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16, MmaType, m16n8k16, m16n8k32_e4m3};
use cuda_std::sync::converge;
use cuda_std::thread::{lane, warp};
use std::time::{Duration, Instant};

/// One warp: row-major A (16 by 16) and C, column-major B (16 by 8).
fn one<T: MmaType>(a: In<u16>, b: In<u16>, c: In<f32>, d: Out<f32>) {
    let (g, t) = (lane() as usize / 4, lane() as usize % 4);
    let pair = |x: In<u16>, at: usize| u32::from(x.load(at)) | u32::from(x.load(at + 1)) << 16;
    let fa = [(0, 0), (8, 0), (0, 8), (8, 8)].map(|(row, k)| pair(a, (g + row) * 16 + 2 * t + k));
    let fb = [0, 8].map(|k| pair(b, g * 16 + 2 * t + k));
    let at = [0, 1, 2, 3].map(|i| (g + i / 2 * 8) * 8 + 2 * t + i % 2);
    converge();
    let out = m16n8k16::<T>(fa, fb, at.map(|i| c.load(i)));
    for i in 0..4 {
        d.store(at[i], out[i]);
    }
}

kernels! {
    /// One mma.
    pub mod single(a: In<u16>, b: In<u16>, c: In<f32>, d: Out<f32>);
    single_f16[32, 1] = |A| one::<F16>;
    single_bf16[32, 1] = |A| one::<Bf16>;
}

/// The same for row-major A (16 by 32) and column-major B (32 by 8) of codes.
fn one_e4m3(a: In<u8>, b: In<u8>, c: In<f32>, d: Out<f32>) {
    let (g, t) = (lane() as usize / 4, lane() as usize % 4);
    let four = |x: In<u8>, at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| x.load(at + i)));
    let fa = [(0, 0), (8, 0), (0, 16), (8, 16)].map(|(row, k)| four(a, (g + row) * 32 + 4 * t + k));
    let fb = [0, 16].map(|k| four(b, g * 32 + 4 * t + k));
    let at = [0, 1, 2, 3].map(|i| (g + i / 2 * 8) * 8 + 2 * t + i % 2);
    converge();
    let out = m16n8k32_e4m3(fa, fb, at.map(|i| c.load(i)));
    for i in 0..4 {
        d.store(at[i], out[i]);
    }
}

kernels! {
    /// One mma.
    pub mod single_codes(a: In<u8>, b: In<u8>, c: In<f32>, d: Out<f32>);
    single_e4m3[32, 1] = |A| one_e4m3;
}

/// `steps` dependent mmas a warp.
fn chain<T: MmaType>(steps: u32, d: Out<f32>) {
    let mut c = [0.0; 4];
    let a = [0x3C01_3F80 + lane(), 0x3F80_BC00, 0x4000_3E80 ^ lane(), 0x3F80_3F81];
    for step in 0..steps {
        converge();
        c = m16n8k16::<T>(a, [0x3F80_3F80 ^ (step % 7), 0x3E00_BE00], c);
    }
    d.store((warp() * 32 + lane()) as usize, c[0] + c[1] + c[2] + c[3]);
}

kernels! {
    /// Many mmas.
    pub mod many(steps: u32, d: Out<f32>);
    many_bf16[256, 1] = |A| chain::<Bf16>;
    many_f16[256, 1] = |A| chain::<F16>;
}

fn launch<F: Family>(device: &Device, kernel: Kernel<F>, args: F::Args<'_>, seed: u64) {
    let launch = Launch { device, grid: 1, threads: kernel.threads, shared_bytes: 0, arch: ArchId::Sm90, seed };
    (kernel.emulate)(&launch, F::pack(args).as_slice()).unwrap_or_else(|fault| panic!("{fault}"));
}

#[test]
fn every_measured_case() {
    let device = Device::new();
    let mut cases = 0;
    for line in include_str!("golden/hmma_m16n8k16_h200.tsv").lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let halves = |text: &str| -> Vec<u16> {
            text.split(' ').map(|code| u16::from_str_radix(code, 16).expect("hex")).collect()
        };
        let (a, b) = (halves(fields[2]), halves(fields[3]));
        let bits = |text: &str| u32::from_str_radix(text, 16).expect("hex");
        let (c, expected) = (bits(fields[4]), bits(fields[5]));
        // The case stands in one row and one column; other rows and columns hold other values, so that a fragment map
        // with rows, columns or k confused gives another result.
        let (row, column) = (cases * 5 % 16, cases * 3 % 8);
        let other = |i: usize| (i as u16).wrapping_mul(0x1337) & 0x3FFF;
        let mut full_a: Vec<u16> = (0..256).map(other).collect();
        let mut full_b: Vec<u16> = (0..128).map(|i| other(i + 999)).collect();
        full_a[row * 16..][..16].copy_from_slice(&a);
        full_b[column * 16..][..16].copy_from_slice(&b);
        let mut full_c = vec![1.5f32; 128];
        full_c[row * 8 + column] = f32::from_bits(c);
        let (a, b, c) = (device.upload(&full_a), device.upload(&full_b), device.upload(&full_c));
        let mut d = device.alloc(128 * 4);
        let kernel = if fields[0] == "bf16" { single::single_bf16 } else { single::single_f16 };
        let args = single::Args { a: a.as_ref(), b: b.as_ref(), c: c.as_ref(), d: d.as_mut() };
        launch(&device, kernel, args, cases as u64);
        let got = d.download::<f32>().expect("every element is written")[row * 8 + column].to_bits();
        assert_eq!(got, expected, "{line}: {got:08x}");
        let (mantissa, bias) = if fields[0] == "bf16" { (7, 127) } else { (10, 15) };
        assert_eq!(model(mantissa, bias, &halves(fields[2]), &halves(fields[3]), bits(fields[4])), expected, "{line}");
        cases += 1;
    }
    assert_eq!(cases, 197);
}

/// One output by integers alone: 17 terms on the grid 2^(emax - 25), cut toward zero.
fn model(mantissa: i32, bias: i32, a: &[u16], b: &[u16], c: u32) -> u32 {
    let special = (1 << (15 - mantissa)) - 1;
    let parts = |x: u16| {
        let (field, fraction) = (i32::from(x >> mantissa) & special, i128::from(x & ((1 << mantissa) - 1)));
        let significand = fraction | i128::from(field != 0) << mantissa;
        (x >> 15 != 0, field, field.max(1) - bias, significand, fraction)
    };
    // Exponent, value in units of 2^(exponent - places), places.
    let mut terms: Vec<(i32, i128, i32)> = Vec::new();
    let (mut nan, mut infinite) = (false, [false; 2]);
    let (field, fraction) = ((c >> 23 & 0xFF) as i32, i128::from(c & 0x7F_FFFF));
    let sign = |negative: bool, value: i128| if negative { -value } else { value };
    if field == 255 {
        nan |= fraction != 0;
        infinite[(c >> 31) as usize] |= fraction == 0;
    } else {
        let significand = fraction | i128::from(field != 0) << 23;
        terms.push((field.max(1) - 127, sign(c >> 31 != 0, significand), 23));
    }
    for (&x, &y) in a.iter().zip(b) {
        let (x_negative, x_field, x_exponent, x, x_fraction) = parts(x);
        let (y_negative, y_field, y_exponent, y, y_fraction) = parts(y);
        let negative = x_negative != y_negative;
        if x_field == special || y_field == special {
            let x_nan = x_field == special && x_fraction != 0;
            let y_nan = y_field == special && y_fraction != 0;
            nan |= x_nan || y_nan || (x_field != special && x == 0) || (y_field != special && y == 0);
            infinite[usize::from(negative)] |= !nan;
        } else {
            terms.push((x_exponent + y_exponent, sign(negative, x * y), 2 * mantissa));
        }
    }
    if nan || infinite == [true; 2] {
        return 0x7FFF_FFFF;
    }
    if infinite != [false; 2] {
        return if infinite[1] { 0xFF80_0000 } else { 0x7F80_0000 };
    }
    terms.retain(|term| term.1 != 0);
    let Some(emax) = terms.iter().map(|term| term.0).max() else { return 0 };
    let grid = emax - 25;
    let shift = |value: i128, by: i32| match by {
        0.. => value << by.min(100),
        // Division cuts toward zero.
        _ => value / (1 << (-by).min(120)),
    };
    let sum: i128 = terms.iter().map(|&(exponent, value, places)| shift(value, exponent - places - grid)).sum();
    let magnitude = sum.unsigned_abs() as i128;
    if magnitude == 0 {
        return 0;
    }
    let leading = magnitude.ilog2() as i32 + grid;
    let last = leading.max(-126) - 23;
    let kept = shift(magnitude, grid - last) as u32;
    let bits = if leading > 127 {
        0x7F80_0000
    } else if kept < 1 << 23 {
        kept
    } else {
        ((leading + 127) as u32) << 23 | (kept & 0x7F_FFFF)
    };
    if bits == 0 { 0 } else { bits | u32::from(sum < 0) << 31 }
}

/// Operands and C of several characters, all drawn from `next`.
fn draw(family: u32, mantissa: i32, next: &mut impl FnMut() -> u32) -> (Vec<u16>, Vec<u16>, Vec<u32>) {
    let bias = (1 << (14 - mantissa)) - 1;
    let mut operand = |exponents: u32, around: u32| {
        let exponent = around + next() % exponents;
        (next() as u16 & 0x8000) | (exponent << mantissa) as u16 | (next() as u16 & ((1 << mantissa) - 1))
    };
    let all = 2 * bias + 1;
    let mut many = |count: usize| -> Vec<u16> {
        (0..count)
            .map(|_| match family {
                // Narrow, wide, subnormal or nearly, every code, mostly zero, near the largest.
                0 => operand(3, bias),
                1 => operand(12, bias - 6),
                2 => operand(3, 0),
                3 => operand(all + 1, 0),
                4 => operand(8, bias) * u16::from(operand(1, 0) % 4 == 0),
                _ => operand(3, all - 3),
            })
            .collect()
    };
    let (a, b) = (many(256), many(128));
    let c = (0..128)
        .map(|_| {
            let bits = next();
            let exponent = match next() % 5 {
                0 => 0,
                1 => bits >> 23 & 0xFF,
                2 => 254,
                _ => 110 + bits % 40,
            };
            let fraction = if next().is_multiple_of(4) { 0 } else { bits & 0x7F_FFFF };
            (bits & 1 << 31) | exponent << 23 | fraction
        })
        .collect();
    (a, b, c)
}

#[test]
fn agrees_with_the_integer_model() {
    let device = Device::new();
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 ^ (state >> 13) as u32
    };
    let (mut finite, mut infinite, mut nan, mut zero, mut subnormal) = (0, 0, 0, 0, 0);
    for round in 0..300 {
        for (kernel, mantissa, bias) in [(single::single_f16, 10, 15), (single::single_bf16, 7, 127)] {
            let (a, b, c) = draw(round % 6, mantissa, &mut next);
            let (da, db, dc) = (device.upload(&a), device.upload(&b), device.upload(&c));
            let mut d = device.alloc(128 * 4);
            let args = single::Args { a: da.as_ref(), b: db.as_ref(), c: dc.as_ref(), d: d.as_mut() };
            launch(&device, kernel, args, u64::from(round));
            let got = d.download::<u32>().expect("every element is written");
            for i in 0..128 {
                let (row, column) = (i / 8, i % 8);
                let expected = model(mantissa, bias, &a[row * 16..][..16], &b[column * 16..][..16], c[i]);
                assert_eq!(got[i], expected, "{kernel:?} round {round} output {i}: {:08x} {expected:08x}", got[i]);
                match f32::from_bits(expected).classify() {
                    std::num::FpCategory::Nan => nan += 1,
                    std::num::FpCategory::Infinite => infinite += 1,
                    std::num::FpCategory::Zero => zero += 1,
                    std::num::FpCategory::Subnormal => subnormal += 1,
                    std::num::FpCategory::Normal => finite += 1,
                }
            }
        }
    }
    println!("normal {finite}, subnormal {subnormal}, zero {zero}, infinite {infinite}, NaN {nan}");
    assert!([finite, infinite, nan, zero, subnormal].iter().all(|&count| count > 100), "every kind of result occurs");
}

/// Two instructions with f16 operands and a rounded sum, the k of each written out; of all codes, and of sums that cancel.
#[test]
fn e4m3_is_two_of_f16() {
    let device = Device::new();
    let mut state = 5u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let first: [usize; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29];
    let (mut nan, mut apart) = (0, 0);
    for round in 0..100 {
        let mut code = |round: u32| match round % 4 {
            0 => next() as u8,
            1 => (0x30 + (next() % 16) as u8) | (next() as u8 & 0x80),
            2 => (next() % 12) as u8 | (next() as u8 & 0x80),
            _ => (0x70 + (next() % 15) as u8) | (next() as u8 & 0x80),
        };
        let (a, b): (Vec<u8>, Vec<u8>) =
            ((0..512).map(|_| code(round)).collect(), (0..256).map(|_| code(round)).collect());
        let c: Vec<f32> =
            (0..128).map(|_| (next() as f32 / 1e9 - 2.0) * [1.0, 300.0, 1e-3, 1e5][round as usize % 4]).collect();
        let (da, db, dc) = (device.upload(&a), device.upload(&b), device.upload(&c));
        let mut d = device.alloc(128 * 4);
        let args = single_codes::Args { a: da.as_ref(), b: db.as_ref(), c: dc.as_ref(), d: d.as_mut() };
        launch(&device, single_codes::single_e4m3, args, u64::from(round));
        let got = d.download::<u32>().expect("every element is written");
        for i in 0..128 {
            let f16 = |codes: &[u8], k: usize| e4m3x2_to_f16x2::<Sm120>(u16::from(codes[k])) as u16;
            let half = |k: [usize; 16], sum| {
                let (a, b) = (k.map(|k| f16(&a[i / 8 * 32..], k)), k.map(|k| f16(&b[i % 8 * 32..], k)));
                model(10, 15, &a, &b, sum)
            };
            let sum = f32::from_bits(half(first.map(|k| k + 2), half(first, 0)));
            let wanted = (c[i] + sum).to_bits();
            assert_eq!(got[i], wanted, "round {round}, output {i}");
            nan += usize::from(f32::from_bits(wanted).is_nan());
            // The other order, into C.
            let ascending = |from: usize, sum| half(std::array::from_fn(|k| from + k), sum);
            apart += usize::from(ascending(16, ascending(0, c[i].to_bits())) != wanted);
        }
    }
    assert!(nan > 100 && apart > 1000, "{nan} NaN, {apart} that a chain of two would sum otherwise");
}

#[test]
fn a_block_of_256_lanes_does_1000_mma_a_warp_in_under_a_second() {
    let device = Device::new();
    for kernel in [many::many_bf16, many::many_f16] {
        let mut d = device.alloc(256 * 4);
        let begin = Instant::now();
        launch(&device, kernel, many::Args { steps: 1000, d: d.as_mut() }, 1);
        let took = begin.elapsed();
        println!("{kernel:?}: {took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}
