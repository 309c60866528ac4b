//! The quantiser, against the reference: codes and bits of scales.

use crate::common::{any_emulator, argument_of, devices, gpu, scale};
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::{Rows, quant};
use megamoe::reference::{Quantized, per_token_group_quant_fp8};

/// Codes and scales on `device`, of rows that begin at `offset` and lie `stride` apart.
pub fn run(
    device: &DeviceHandle,
    x: &[u16],
    rows: usize,
    cols: usize,
    (offset, stride): (usize, usize),
    blocks: Option<u32>,
) -> Quantized {
    let x = Buffer::from_slice(device, x).unwrap();
    let outputs = Outputs::new(device, rows, cols);
    quant::prepare(device).unwrap();
    let x = Rows { buffer: &x, offset, stride };
    quant::enqueue_with_blocks(device, x, rows, cols, &outputs.codes, &outputs.scales, blocks).unwrap();
    outputs.result()
}

/// Codes and scales with 64 elements behind them that must stay as they are.
pub struct Outputs {
    pub codes: Buffer<u8>,
    pub scales: Buffer<f32>,
}

impl Outputs {
    pub fn new(device: &DeviceHandle, rows: usize, cols: usize) -> Self {
        let scales = rows * quant::scales_per_row(cols);
        Outputs {
            codes: Buffer::from_slice(device, &vec![0xA5; rows * cols + 64]).unwrap(),
            scales: Buffer::from_slice(device, &vec![-7.0; scales + 64]).unwrap(),
        }
    }

    #[track_caller]
    pub fn result(&self) -> Quantized {
        let (mut codes, mut scales) = (self.codes.download().unwrap(), self.scales.download().unwrap());
        assert!(codes.split_off(codes.len() - 64).iter().all(|&code| code == 0xA5), "written behind the codes");
        assert!(scales.split_off(scales.len() - 64).iter().all(|&scale| scale == -7.0), "written behind the scales");
        Quantized { codes, scales }
    }
}

/// What is different, if anything.
pub fn difference(wanted: &Quantized, got: &Quantized) -> Option<String> {
    if (wanted.codes.len(), wanted.scales.len()) != (got.codes.len(), got.scales.len()) {
        return Some(format!("{} codes and {} scales", got.codes.len(), got.scales.len()));
    }
    let bits = |scales: &[f32]| scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>();
    let (w, g) = (bits(&wanted.scales), bits(&got.scales));
    if let Some(i) = (0..w.len()).find(|&i| w[i] != g[i]) {
        return Some(format!("scale {i} is {:e}, not {:e}", got.scales[i], wanted.scales[i]));
    }
    let i = (0..wanted.codes.len()).find(|&i| wanted.codes[i] != got.codes[i])?;
    Some(format!("code {i} is {:#04x}, not {:#04x}", got.codes[i], wanted.codes[i]))
}

#[track_caller]
fn check(device: &DeviceHandle, x: &[u16], rows: usize, cols: usize, layout: (usize, usize), blocks: Option<u32>) {
    let wanted = per_token_group_quant_fp8(&x[layout.0..], rows, cols, layout.1).unwrap();
    let got = run(device, x, rows, cols, layout, blocks);
    let what = format!("{}, {rows} x {cols} at {layout:?}, {blocks:?} blocks", device.properties().name);
    assert_eq!(difference(&wanted, &got), None, "{what}");
}

/// All bit patterns: NaN, infinities and subnormals too; but most rows of ordinary size.
pub fn values(random: &mut Random, count: usize) -> Vec<u16> {
    (0..count)
        .map(|i| {
            let bits = random.next() as u16;
            if i / 512 % 8 == 7 { bits } else { bits & 0x80FF | (0x3C00 + (random.next() % 12) as u16 * 0x80) }
        })
        .collect()
}

#[test]
fn rows_of_every_kind() {
    let mut random = Random(31);
    for (number, (rows, cols)) in [
        (1, 1),
        (1, 7),
        (3, 8),
        (2, 120),
        (5, 127),
        (5, 128),
        (4, 129),
        (3, 136),
        (7, 1000),
        (33, 384),
        (2, 2056),
        (65, 130),
    ]
    .into_iter()
    .enumerate()
    {
        let x = values(&mut random, (rows + 2) * (cols + 40));
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            // Contiguous; rows apart, whole vectors and not; half of a wider matrix.
            for layout in [(0, cols), (8, cols.next_multiple_of(8) + 8), (0, cols + 3), (5, cols + 8)] {
                check(&device, &x, rows, cols, layout, None);
            }
            for blocks in [1, 2, 7] {
                check(&device, &x, rows, cols, (0, cols), Some(blocks));
            }
        }
    }
    let Some(gpu) = gpu() else { return };
    for (rows, cols) in [(8192, 2048), (1000, 7168), (70_000, 130)] {
        check(&gpu, &values(&mut random, rows * cols), rows, cols, (0, cols), None);
    }
}

/// bf16 of a significand 128 to 255 and a biased exponent.
fn bf16(significand: u16, exponent: u16) -> u16 {
    exponent << 7 | (significand - 128)
}

/// Every significand of the scale with every significand and all exponents of an element that matter: the proof that the kernel's
/// product with a reciprocal gives the code of the quotient. Powers of two change neither, which three exponents of amax show.
#[test]
fn every_quotient() {
    let mut x = Vec::new();
    for exponent in [97, 127, 254] {
        for largest in 128..256 {
            let mut elements = Vec::new();
            for difference in 0..22 {
                for significand in 128..256 {
                    let significand = if difference == 0 { significand.min(largest) } else { significand };
                    let sign = ((significand + difference) % 2) << 15;
                    elements.push(sign | bf16(significand, exponent - difference));
                }
            }
            for group in elements.chunks(127) {
                x.push(bf16(largest, exponent));
                x.extend(group);
                x.resize(x.len().next_multiple_of(128), 0);
            }
        }
    }
    // Scales of 1e-12: each element alone in its group, down to the smallest.
    for bits in 0..bf16(128, 97) {
        x.extend([bits ^ bits << 15, 0, 0, 0, 0, 0, 0, 0]);
    }
    x.resize(x.len().next_multiple_of(128), 0);
    let wanted = per_token_group_quant_fp8(&x, 1, x.len(), x.len());
    // More columns than a launcher takes become rows.
    let (rows, cols) = (x.len() / 128, 128);
    let wanted = Quantized { codes: wanted.as_ref().unwrap().codes.clone(), scales: wanted.unwrap().scales };
    for device in std::iter::once(any_emulator(1)).chain(gpu()) {
        let got = run(&device, &x, rows, cols, (0, cols), None);
        assert_eq!(difference(&wanted, &got), None, "{}", device.properties().name);
    }
}

/// One code or one bit of a scale would be noticed.
#[test]
fn differences_are_seen() {
    let wanted = per_token_group_quant_fp8(&[0x3F80; 256], 1, 256, 256).unwrap();
    let mut code = wanted.clone();
    code.codes[200] ^= 1;
    assert_eq!(difference(&wanted, &code).unwrap(), "code 200 is 0x7f, not 0x7e");
    let mut scale = wanted.clone();
    scale.scales[1] = f32::from_bits(scale.scales[1].to_bits() + 1);
    assert!(difference(&wanted, &scale).unwrap().starts_with("scale 1 is"));
}

/// A reciprocal alone does not give the quotient's codes: the kernel's correction is needed, and `every_quotient` would see it
/// missing.
#[test]
fn a_reciprocal_alone_is_not_enough() {
    let wrong = (128..256u16)
        .flat_map(|largest| (128..256u16).map(move |significand| (largest, significand)))
        .filter(|&(largest, significand)| {
            let value = |significand: u16| f32::from_bits(u32::from(bf16(significand, 127)) << 16);
            let (amax, a) = (value(largest), value(significand) / 8.0);
            let scale = amax / 448.0;
            let wanted = per_token_group_quant_fp8(&[bf16(largest, 127), bf16(significand, 124)], 1, 2, 2).unwrap();
            megamoe::formats::e4m3::encode(a * (1.0 / scale)) != wanted.codes[1]
        })
        .count();
    assert!(wrong > 0);
}

/// Case I1: a group of zeros, of either sign, beside a group of ones.
#[test]
fn i1_a_group_of_zeros() {
    for zero in [0x0000, 0x8000] {
        let x = [vec![zero; 128], vec![0x3F80; 128]].concat();
        for (_, device) in devices() {
            let got = run(&device, &x, 1, 256, (0, 256), None);
            assert_eq!(got.codes[..128], [(zero >> 8) as u8; 128]);
            assert_eq!(got.codes[128..], [0x7E; 128]);
            assert_eq!(got.scales, [1e-12, 1.0 / 448.0]);
            check(&device, &x, 1, 256, (0, 256), None);
        }
    }
}

/// Case I3: nothing to do is done, and no columns are an error.
#[test]
fn i3_zero_rows() {
    for (_, device) in devices() {
        let x = Buffer::<u16>::new(&device, 0).unwrap();
        for (rows, cols) in [(0, 128), (0, 0), (3, 0)] {
            let outputs = Outputs::new(&device, rows, cols);
            quant::prepare(&device).unwrap();
            let x = Rows::contiguous(&x, cols);
            let result = quant::enqueue(&device, x, rows, cols, &outputs.codes, &outputs.scales);
            if cols == 0 {
                assert_eq!(argument_of(&result.unwrap_err()), "cols");
            } else {
                result.unwrap();
            }
            assert!(outputs.result().codes.is_empty());
        }
        check(&device, &[0x3F80; 128], 1, 128, (0, 128), None);
    }
}

/// Case E1.
#[test]
fn e1_zero_tokens() {
    i3_zero_rows();
}

/// Case I5: groups of tiny values give the same bytes however they lie, and are off by no more than a sixteenth or the floor.
#[test]
fn i5_tiny_groups() {
    let tiny = |amax: f32| half::bf16::from_f32(amax).to_bits();
    for largest in [tiny(1e-12), tiny(1e-30), 1, 0x2EF0, 0x2FF6, 0x2FF7, 0x2FF8] {
        let row: Vec<u16> = (0..256u16).map(|i| (largest - largest.min(i % 3 * 40)) | ((i % 2) << 15)).collect();
        let wanted = per_token_group_quant_fp8(&row, 1, 256, 256).unwrap();
        for (i, (&bits, &code)) in row.iter().zip(&wanted.codes).enumerate() {
            let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
            let back = megamoe::formats::e4m3::decode(code) * wanted.scales[i / 128];
            let off = (back - value(bits)).abs();
            assert!(off <= (value(largest) / 16.0).max(1e-12), "{largest:#06x}, {i}: off by {off:e}");
        }
        for (_, device) in devices() {
            let strided = [&[0x7FC0; 3][..], &row, &[0x7FC0; 5]].concat();
            let apart = [&[0x7FC0; 8][..], &row, &[0x7FC0; 8]].concat();
            for (x, layout) in [(&row, (0, 256)), (&strided, (3, 263)), (&apart, (8, 264))] {
                let got = run(&device, x, 1, 256, layout, None);
                assert_eq!(difference(&wanted, &got), None, "{largest:#06x} at {layout:?}");
            }
        }
    }
}

/// NaN and infinities: what they turn into, and that they stay in their group.
#[test]
fn nan_and_infinity() {
    let mut x = vec![0x3F80; 384];
    (x[3], x[130], x[131]) = (0xFFC1, 0xFF80, 0xBF80);
    for (_, device) in devices() {
        let got = run(&device, &x, 1, 384, (0, 384), None);
        assert_eq!((got.codes[2], got.codes[3], got.scales[0]), (0x7E, 0x7F, 1.0 / 448.0));
        assert_eq!((got.codes[129], got.codes[130], got.codes[131]), (0x00, 0x7F, 0x80));
        assert_eq!((got.scales[1], got.scales[2]), (f32::INFINITY, 1.0 / 448.0));
        let nan = run(&device, &[0x7F81; 128], 1, 128, (0, 128), None);
        assert_eq!((nan.codes, nan.scales), (vec![0x7F; 128], vec![1e-12]));
    }
}

/// A row's bytes do not depend on the rows around it.
#[test]
fn rows_stand_alone() {
    let mut random = Random(33);
    for (_, device) in devices() {
        let (rows, cols) = (scale(&device, 20, 3000), 200);
        let x = values(&mut random, rows * cols);
        let all = run(&device, &x, rows, cols, (0, cols), None);
        for row in [0, rows / 2, rows - 1] {
            let alone = run(&device, &x[row * cols..][..cols], 1, cols, (0, cols), None);
            assert_eq!(alone.codes, all.codes[row * cols..][..cols]);
            assert_eq!(alone.scales, all.scales[row * 2..][..2]);
        }
    }
}

#[test]
fn m1_short_buffers_and_bad_sizes() {
    for (_, device) in devices() {
        let (rows, cols) = (3, 200);
        let x = Buffer::from_slice(&device, &vec![0u16; 2 * 210 + 4 + cols]).unwrap();
        let short_x = Buffer::from_slice(&device, &vec![0u16; 2 * 210 + 4 + cols - 1]).unwrap();
        let (codes, scales) = (Buffer::new(&device, rows * cols).unwrap(), Buffer::new(&device, rows * 2).unwrap());
        let short_codes = Buffer::new(&device, rows * cols - 1).unwrap();
        let short_scales = Buffer::new(&device, rows * 2 - 1).unwrap();
        quant::prepare(&device).unwrap();
        let at = |buffer, stride| Rows { buffer, offset: 4, stride };
        quant::enqueue(&device, at(&x, 210), rows, cols, &codes, &scales).unwrap();
        let wrong = [
            ("x", at(&short_x, 210), rows, cols, &codes, &scales),
            ("x", at(&x, cols - 1), rows, cols, &codes, &scales),
            ("x", at(&x, usize::MAX), rows, cols, &codes, &scales),
            ("codes", at(&x, 210), rows, cols, &short_codes, &scales),
            ("scales", at(&x, 210), rows, cols, &codes, &short_scales),
            ("rows", at(&x, 210), 1 << 31, cols, &codes, &scales),
            ("cols", at(&x, 210), rows, (1 << 20) + 1, &codes, &scales),
        ];
        for (name, x, rows, cols, codes, scales) in wrong {
            let error = quant::enqueue(&device, x, rows, cols, codes, scales).unwrap_err();
            assert_eq!(argument_of(&error), name);
        }
        check(&device, &[0x3F80; 128], 1, 128, (0, 128), None);
    }
}
