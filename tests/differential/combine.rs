//! The sum over a token's experts, against the reference.

use crate::common::{any_emulator, gpu, is_emulated};
use kernels_gpu::combine::combine as family;
use megamoe::Error;
use megamoe::device::{Buffer, DeviceHandle, Grid, launch};
use megamoe::diff::Random;
use megamoe::reference::{combine, route_prep};

fn run(
    device: &DeviceHandle,
    ids: &[i32],
    y: &[f32],
    top_k: usize,
    experts: usize,
    output: usize,
    blocks: u32,
) -> Vec<u16> {
    let tokens = ids.len() / top_k;
    let topk_ids = Buffer::from_slice(device, ids).unwrap();
    let y = Buffer::from_slice(device, y).unwrap();
    // 64 elements behind the last row must stay as they are.
    let out = Buffer::from_slice(device, &vec![0xA5A5_u16; tokens * output + 64]).unwrap();
    device.prepare(family::combine_f32_bf16.into(), 0).unwrap();
    let args = family::Args {
        topk_ids: topk_ids.as_ref(),
        y: y.as_ref(),
        out: out.as_mut(),
        tokens: tokens as u32,
        top_k: top_k as u32,
        experts: experts as u32,
        output: output as u32,
    };
    launch(&**device, family::combine_f32_bf16, Grid { blocks, shared_bytes: 0 }, args).unwrap();
    let mut out = out.download().unwrap();
    assert!(out.split_off(tokens * output).iter().all(|&bits| bits == 0xA5A5), "written behind the last row");
    out
}

/// Values over many powers of two, of both signs, with few special ones.
fn values(random: &mut Random, count: usize) -> Vec<f32> {
    let value = |random: &mut Random| match random.next() % 64 {
        0 => f32::NAN,
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        3 => -0.0,
        4 => f32::from_bits(random.next() as u32 & 0x007F_FFFF),
        5 => f32::MAX,
        _ => random.in_range(-1.0, 1.0) * 2f32.powi((random.next() % 24) as i32 - 12),
    };
    (0..count).map(|_| value(random)).collect()
}

#[test]
fn sums_over_every_top_k_and_width() {
    let mut random = Random(1);
    for top_k in 1..=32 {
        for output in [1, 2, 3, 4, 17, 20, 100, 264] {
            let (experts, tokens) = (5, 1 + top_k % 5);
            let pairs = tokens * top_k;
            // -2 to 6: some are skipped.
            let ids: Vec<i32> = (0..pairs).map(|_| (random.next() % 9) as i32 - 2).collect();
            let y = values(&mut random, pairs * output);
            let route = route_prep(&ids, top_k, experts).unwrap();
            let wanted = combine(&y, output, &route).unwrap();
            for device in std::iter::once(any_emulator(top_k)).chain(gpu()) {
                let got = run(&device, &ids, &y, top_k, experts, output, 1 + top_k as u32 % 3);
                assert_eq!(got, wanted, "top_k {top_k}, output {output}");
            }
        }
    }
}

/// Rows of skipped pairs are read by nobody, and so may hold anything: the emulator would report a read of what was never written.
#[test]
fn rows_of_skipped_pairs_are_not_read() {
    let ids = [0, 2, -1, 9, 3, i32::MIN];
    for device in std::iter::once(any_emulator(1)).chain(gpu()) {
        for output in [4, 3] {
            let topk_ids = Buffer::from_slice(&device, &ids).unwrap();
            let y = Buffer::<f32>::new(&device, 6 * output).unwrap();
            if !is_emulated(&device) {
                y.fill(0xFF).unwrap();
            }
            y.upload(&[vec![2.0; output], vec![3.0; output]].concat()).unwrap();
            let out = Buffer::<u16>::new(&device, 3 * output).unwrap();
            device.prepare(family::combine_f32_bf16.into(), 0).unwrap();
            let args = |experts| family::Args {
                topk_ids: topk_ids.as_ref(),
                y: y.as_ref(),
                out: out.as_mut(),
                tokens: 3,
                top_k: 2,
                experts,
                output: output as u32,
            };
            launch(&*device, family::combine_f32_bf16, Grid { blocks: 1, shared_bytes: 0 }, args(3)).unwrap();
            assert_eq!(out.download().unwrap(), [0x40A0, 0, 0].map(|bits| vec![bits; output]).concat());
            // With one expert more pair 4 is live, and its row is missing.
            let faulty = launch(&*device, family::combine_f32_bf16, Grid { blocks: 1, shared_bytes: 0 }, args(4));
            if is_emulated(&device) {
                assert!(matches!(faulty, Err(Error::Fault(_))), "{faulty:?}");
            } else {
                faulty.unwrap();
                assert_eq!(out.download().unwrap()[2 * output], 0x7FFF);
            }
        }
    }
}

/// The order of the slots counts, and the sum starts at +0.
#[test]
fn slots_are_added_in_order() {
    let (a, b) = (2f32.powi(24), 1.0);
    for device in std::iter::once(any_emulator(2)).chain(gpu()) {
        for (y, wanted) in [([a, b, b, -a], 0x0000), ([a, -a, b, b], 0x4000), ([-0.0, -0.0, -0.0, -0.0], 0x0000)] {
            assert_eq!(run(&device, &[0, 1, 2, 3], &y, 4, 4, 1, 1), [wanted], "{y:?}");
        }
        // The sum in another order would be noticed.
        assert_ne!(
            run(&device, &[0, 1, 2, 3], &[a, b, b, -a], 4, 4, 1, 1),
            run(&device, &[0, 1, 2, 3], &[b, b, a, -a], 4, 4, 1, 1)
        );
    }
}

/// More work than threads: each thread takes several columns.
#[test]
fn any_grid() {
    let mut random = Random(7);
    let (tokens, top_k, output) = (9, 2, 300);
    let ids: Vec<i32> = (0..tokens * top_k).map(|_| (random.next() % 4) as i32).collect();
    let y = values(&mut random, tokens * top_k * output);
    let wanted = combine(&y, output, &route_prep(&ids, top_k, 4).unwrap()).unwrap();
    for blocks in [1, 2, 3, 50] {
        assert_eq!(run(&any_emulator(blocks as usize), &ids, &y, top_k, 4, output, blocks), wanted);
    }
    let Some(gpu) = gpu() else { return };
    let (tokens, output) = (3000, 2880);
    let ids: Vec<i32> = (0..tokens * top_k).map(|_| (random.next() % 5) as i32 - 1).collect();
    let y = values(&mut random, tokens * top_k * output);
    let wanted = combine(&y, output, &route_prep(&ids, top_k, 4).unwrap()).unwrap();
    assert_eq!(run(&gpu, &ids, &y, top_k, 4, output, 264), wanted);
}
