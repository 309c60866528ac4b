//! `mma` against results that were measured on an H200, through real launches.
#![cfg(not(target_arch = "nvptx64"))]
#![allow(missing_docs)]

use cuda_std::arch::ArchId;
use cuda_std::emu::{Device, Launch};
use cuda_std::kernel::{Family, Kernel};
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, F16, MmaType, m16n8k16};
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

/// `steps` dependent mmas a warp.
fn chain<T: MmaType>(steps: u32, d: Out<f32>) {
    let mut c = [0.0; 4];
    let a = [0x3C01_3F80 + lane(), 0x3F80_BC00, 0x4000_3E80 ^ lane(), 0x3F80_3F81];
    for step in 0..steps {
        converge();
        c = m16n8k16::<T>(a, [0x3F80_3F80 ^ step % 7, 0x3E00_BE00], c);
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
        cases += 1;
    }
    assert_eq!(cases, 197);
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
