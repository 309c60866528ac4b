//! Results back to tokens and the shared expert, against the reference.

use crate::common::{any_emulator, argument_of, devices, gpu, is_emulated, scale};
use crate::quant::values;
use megamoe::Error;
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::unpermute::{self, Rounding, Routed, SharedExpert, SharedGate};
use megamoe::reference;

/// One batch.
#[derive(Clone, Debug)]
struct Batch {
    tokens: usize,
    top_k: usize,
    output: usize,
    hidden: usize,
    y: Vec<u16>,
    token_to_perm: Vec<i32>,
    weights: Vec<f32>,
    live: i32,
    shared: Vec<u16>,
    x: Vec<u16>,
    gate_w: Vec<u16>,
}

const EXPERTS: usize = 3;

impl Batch {
    /// Rows in any order, one in five skipped; values with few NaN and infinities.
    fn draw(random: &mut Random, tokens: usize, top_k: usize, output: usize, hidden: usize) -> Self {
        let pairs = tokens * top_k;
        let live = (pairs - pairs / 5) as i32;
        let mut rows: Vec<i32> = (0..pairs as i32).map(|row| if row < live { row } else { -1 - row % 2 * 9 }).collect();
        for i in (1..pairs).rev() {
            rows.swap(i, random.next() as usize % (i + 1));
        }
        Batch {
            tokens,
            top_k,
            output,
            hidden,
            y: values(random, pairs * output),
            token_to_perm: rows,
            weights: (0..pairs).map(|_| random.in_range(-1.0, 1.0)).collect(),
            live,
            shared: values(random, tokens * output),
            x: (0..tokens * hidden).map(|_| half::bf16::from_f32(random.in_range(-1.0, 1.0)).to_bits()).collect(),
            gate_w: (0..hidden).map(|_| half::bf16::from_f32(random.in_range(-0.2, 0.2)).to_bits()).collect(),
        }
    }

    fn gates(&self, gated: bool) -> Vec<f32> {
        reference::shared_gate(&self.x, gated.then_some(&self.gate_w[..]), self.hidden).unwrap()
    }
}

/// A batch on a device. y holds the live rows alone: what lies behind was never written.
struct OnDevice {
    y: Buffer<u16>,
    token_to_perm: Buffer<i32>,
    weights: Buffer<f32>,
    expert_offsets: Buffer<i32>,
    shared: Buffer<u16>,
    x: Buffer<u16>,
    gate_w: Buffer<u16>,
    out: Buffer<u16>,
}

impl OnDevice {
    fn new(device: &DeviceHandle, batch: &Batch) -> Self {
        let y = Buffer::new(device, batch.y.len()).unwrap();
        if !is_emulated(device) {
            y.fill(0xFF).unwrap();
        }
        y.upload(&batch.y[..batch.live.max(0) as usize * batch.output]).unwrap();
        let on = |x: &[u16]| Buffer::from_slice(device, x).unwrap();
        unpermute::prepare(device).unwrap();
        OnDevice {
            y,
            token_to_perm: Buffer::from_slice(device, &batch.token_to_perm).unwrap(),
            weights: Buffer::from_slice(device, &batch.weights).unwrap(),
            expert_offsets: Buffer::from_slice(device, &[0, 0, 0, batch.live]).unwrap(),
            shared: on(&batch.shared),
            x: on(&batch.x),
            gate_w: on(&batch.gate_w),
            out: on(&vec![0xA5A5; batch.tokens * batch.output + 64]),
        }
    }

    fn routed(&self, batch: &Batch) -> Routed<'_> {
        Routed {
            tokens: batch.tokens,
            top_k: batch.top_k,
            experts: EXPERTS,
            output: batch.output,
            y: &self.y,
            token_to_perm: &self.token_to_perm,
            weights: &self.weights,
            expert_offsets: &self.expert_offsets,
        }
    }

    fn shared(&self, batch: &Batch, gated: bool) -> SharedExpert<'_> {
        let gate = SharedGate { x: &self.x, gate_w: &self.gate_w, hidden: batch.hidden };
        SharedExpert { shared: &self.shared, gate: gated.then_some(gate) }
    }

    fn take(&self, batch: &Batch) -> Vec<u16> {
        let mut out = self.out.download().unwrap();
        let guards = out.split_off(batch.tokens * batch.output);
        assert!(guards.iter().all(|&bits| bits == 0xA5A5), "written behind the last row");
        out
    }
}

fn difference(wanted: &[u16], got: &[u16]) -> Option<String> {
    if wanted.len() != got.len() {
        return Some(format!("{} elements, not {}", got.len(), wanted.len()));
    }
    let i = (0..wanted.len()).find(|&i| wanted[i] != got[i])?;
    Some(format!("element {i} is {:#06x}, not {:#06x}", got[i], wanted[i]))
}

/// Every form of the operation on `device` is the reference's; the one in one pass is the two in a row.
#[track_caller]
fn check(device: &DeviceHandle, batch: &Batch, blocks: Option<u32>) {
    let Batch { tokens, top_k, output, hidden, .. } = *batch;
    let what = format!("{}, {tokens} x {output}, top-{top_k}, hidden {hidden}", device.properties().name);
    let Batch { y, token_to_perm, weights, live, shared, .. } = batch;
    let on = OnDevice::new(device, batch);

    let sum = reference::unpermute_reduce(y, output, token_to_perm, weights, top_k, *live).unwrap();
    unpermute::reduce_with_blocks(device, on.routed(batch), &on.out, blocks).unwrap();
    assert_eq!(difference(&sum, &on.take(batch)), None, "reduce, {what}");

    for gated in [false, true] {
        let gate = batch.gates(gated);
        let twice = reference::unpermute_blend(y, output, token_to_perm, weights, top_k, *live, shared, &gate).unwrap();
        let once =
            reference::weighted_sum_blend(y, output, token_to_perm, weights, top_k, *live, shared, &gate).unwrap();
        // In place, on the sum that is there.
        on.out.upload(&sum).unwrap();
        unpermute::blend(device, tokens, output, &on.out, on.shared(batch, gated), &on.out).unwrap();
        let in_two = on.take(batch);
        assert_eq!(difference(&reference::blend(&sum, shared, &gate).unwrap(), &in_two), None, "blend, {what}");
        for (rounding, wanted) in [(Rounding::Twice, &twice), (Rounding::Once, &once)] {
            let routed = on.routed(batch);
            let shared = on.shared(batch, gated);
            unpermute::reduce_blend_with_blocks(device, rounding, routed, shared, &on.out, blocks).unwrap();
            let got = on.take(batch);
            assert_eq!(difference(wanted, &got), None, "{rounding:?}, gated {gated}, {what}");
            if rounding == Rounding::Twice {
                assert_eq!(difference(&in_two, &got), None, "one pass and two, {what}");
            }
        }
    }
}

#[test]
fn every_top_k_and_width() {
    let mut random = Random(51);
    for (number, (tokens, top_k, output, hidden)) in [
        (1, 1, 1, 1),
        (3, 2, 8, 5),
        (5, 8, 17, 256),
        (2, 9, 64, 257),
        (4, 32, 100, 700),
        (9, 3, 264, 1024),
        (2, 8, 2056, 1100),
        (7, 17, 33, 31),
    ]
    .into_iter()
    .enumerate()
    {
        let batch = Batch::draw(&mut random, tokens, top_k, output, hidden);
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            for blocks in [None, Some(1), Some(3)] {
                check(&device, &batch, blocks);
            }
        }
    }
    let Some(gpu) = gpu() else { return };
    for (tokens, output, hidden) in [(1024, 2048, 2048), (300, 7168, 7168), (500, 2881, 100)] {
        check(&gpu, &Batch::draw(&mut random, tokens, 8, output, hidden), None);
    }
}

/// Case D6: rows behind the last live one are not read, whatever their weight; the emulator would report it. A weight of 0 on a
/// live row is no skip.
#[test]
fn d6_rows_behind_the_last_are_skipped() {
    let batch = Batch {
        tokens: 4,
        top_k: 2,
        output: 8,
        hidden: 1,
        y: [vec![0x3F80; 4 * 8], vec![0x7FC0; 8], vec![0x7FC0; 3 * 8]].concat(),
        token_to_perm: vec![0, 5, 1, 6, 7, 2, 3, 4],
        weights: vec![1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0],
        live: 5,
        shared: vec![0; 4 * 8],
        x: vec![0; 4],
        gate_w: vec![0],
    };
    for (_, device) in devices() {
        let on = OnDevice::new(&device, &batch);
        unpermute::reduce(&device, on.routed(&batch), &on.out).unwrap();
        let wanted = [0x3F80u16, 0x4000, 0x4040, 0x7FFF].map(|bits| [bits; 8]).concat();
        assert_eq!(difference(&wanted, &on.take(&batch)), None);
        check(&device, &batch, None);
        // With one live row more, the first token's second pair is read.
        on.expert_offsets.upload(&[0, 0, 0, 6]).unwrap();
        let result = unpermute::reduce(&device, on.routed(&batch), &on.out);
        if is_emulated(&device) {
            assert!(matches!(result, Err(Error::Fault(_))), "{result:?}");
        } else {
            result.unwrap();
            assert_ne!(difference(&wanted, &on.take(&batch)), None);
        }
    }
}

/// Case D1: tokens with few experts or none.
#[test]
fn d1_skipped_pairs() {
    let mut random = Random(52);
    let mut batch = Batch::draw(&mut random, 3, 2, 16, 8);
    batch.token_to_perm = vec![0, -1, -1, -1, -1, 1];
    batch.live = 2;
    for (_, device) in devices() {
        check(&device, &batch, None);
        let on = OnDevice::new(&device, &batch);
        unpermute::reduce(&device, on.routed(&batch), &on.out).unwrap();
        assert_eq!(on.take(&batch)[16..32], [0; 16]);
    }
}

/// Case K1: the sum is in the order of the slots, from +0.
#[test]
fn k1_order_of_the_sum() {
    let batch = |y: [u16; 4], weights: [f32; 4]| Batch {
        tokens: 1,
        top_k: 4,
        output: 1,
        hidden: 1,
        y: y.to_vec(),
        token_to_perm: vec![0, 1, 2, 3],
        weights: weights.to_vec(),
        live: 4,
        shared: vec![0],
        x: vec![0],
        gate_w: vec![0],
    };
    let (large, small) = (2f32.powi(17), 2f32.powi(-7));
    for (_, device) in devices() {
        let sum = |batch: &Batch| {
            let on = OnDevice::new(&device, batch);
            unpermute::reduce(&device, on.routed(batch), &on.out).unwrap();
            on.take(batch)[0]
        };
        // Terms 2^24, 1, 1, -2^24.
        let case = batch([0x4300; 4], [large, small, small, -large]);
        for _ in 0..scale(&device, 3, 1000) {
            assert_eq!(sum(&case), 0);
        }
        check(&device, &case, None);
        // Another order of the same terms gives 2: the order would be noticed.
        assert_eq!(sum(&batch([0x4300; 4], [large, -large, small, small])), 0x4000);
        assert_eq!(sum(&batch([0x8000; 4], [1.0; 4])), 0);
    }
}

/// A token's bits do not depend on the tokens around it.
#[test]
fn tokens_stand_alone() {
    let mut random = Random(53);
    for (_, device) in devices() {
        let batch = Batch::draw(&mut random, 6, 4, 72, 300);
        let on = OnDevice::new(&device, &batch);
        let run = |on: &OnDevice, batch: &Batch| {
            let (routed, shared) = (on.routed(batch), on.shared(batch, true));
            unpermute::reduce_blend(&device, Rounding::Once, routed, shared, &on.out).unwrap();
            on.take(batch)
        };
        let all = run(&on, &batch);
        let token = 4;
        let alone = Batch {
            tokens: 1,
            token_to_perm: batch.token_to_perm[token * 4..][..4].to_vec(),
            weights: batch.weights[token * 4..][..4].to_vec(),
            shared: batch.shared[token * 72..][..72].to_vec(),
            x: batch.x[token * 300..][..300].to_vec(),
            ..batch.clone()
        };
        let one = OnDevice::new(&device, &Batch { y: batch.y.clone(), ..alone.clone() });
        assert_eq!(run(&one, &alone), all[token * 72..][..72]);
    }
}

#[test]
fn differences_are_seen() {
    assert_eq!(difference(&[1, 2], &[1, 3]).unwrap(), "element 1 is 0x0003, not 0x0002");
    assert!(difference(&[1, 2], &[1]).is_some());
    // One rounding and two are not the same thing.
    let batch = Batch::draw(&mut Random(54), 20, 2, 64, 8);
    let Batch { y, output, token_to_perm, weights, top_k, live, shared, .. } = &batch;
    let gate = batch.gates(true);
    let twice = reference::unpermute_blend(y, *output, token_to_perm, weights, *top_k, *live, shared, &gate).unwrap();
    let once = reference::weighted_sum_blend(y, *output, token_to_perm, weights, *top_k, *live, shared, &gate).unwrap();
    assert!(difference(&twice, &once).is_some());
}

/// Case E1.
#[test]
fn e1_zero_tokens() {
    for (_, device) in devices() {
        let mut random = Random(55);
        let full = Batch::draw(&mut random, 1, 2, 8, 8);
        let batch = Batch {
            tokens: 0,
            y: vec![],
            token_to_perm: vec![],
            weights: vec![],
            live: 0,
            shared: vec![],
            x: vec![],
            ..full.clone()
        };
        let on = OnDevice::new(&device, &batch);
        unpermute::reduce(&device, on.routed(&batch), &on.out).unwrap();
        unpermute::blend(&device, 0, 8, &on.out, on.shared(&batch, true), &on.out).unwrap();
        for rounding in [Rounding::Once, Rounding::Twice] {
            let (routed, shared) = (on.routed(&batch), on.shared(&batch, true));
            unpermute::reduce_blend(&device, rounding, routed, shared, &on.out).unwrap();
        }
        assert!(on.take(&batch).is_empty());
        check(&device, &full, None);
    }
}

#[test]
fn m1_short_buffers_and_bad_sizes() {
    for (_, device) in devices() {
        let mut random = Random(56);
        let batch = Batch::draw(&mut random, 3, 2, 10, 12);
        let on = OnDevice::new(&device, &batch);
        let words = |len: usize| Buffer::from_slice(&device, &vec![0u16; len]).unwrap();
        let integers = |len: usize| Buffer::from_slice(&device, &vec![0i32; len]).unwrap();
        let (y, perm, offsets) = (words(6 * 10 - 1), integers(5), integers(EXPERTS));
        let weights = Buffer::from_slice(&device, &[0f32; 5]).unwrap();
        let (out, x, gate_w) = (words(29), words(35), words(11));
        let (routed, shared) = (on.routed(&batch), on.shared(&batch, true));
        let gate = shared.gate.unwrap();
        let with = |gate| SharedExpert { gate: Some(gate), ..shared };
        let cases = [
            ("y", Routed { y: &y, ..routed }, shared, &on.out),
            ("token_to_perm", Routed { token_to_perm: &perm, ..routed }, shared, &on.out),
            ("weights", Routed { weights: &weights, ..routed }, shared, &on.out),
            ("expert_offsets", Routed { expert_offsets: &offsets, ..routed }, shared, &on.out),
            ("top_k", Routed { top_k: 0, ..routed }, shared, &on.out),
            ("top_k", Routed { top_k: 33, ..routed }, shared, &on.out),
            ("experts", Routed { experts: 0, ..routed }, shared, &on.out),
            ("output", Routed { output: 0, ..routed }, shared, &on.out),
            ("tokens", Routed { tokens: 1 << 30, ..routed }, shared, &on.out),
            ("out", routed, shared, &out),
            ("shared", routed, SharedExpert { shared: &out, ..shared }, &on.out),
            ("x", routed, with(SharedGate { x: &x, ..gate }), &on.out),
            ("gate_w", routed, with(SharedGate { gate_w: &gate_w, ..gate }), &on.out),
            ("hidden", routed, with(SharedGate { hidden: 0, ..gate }), &on.out),
        ];
        for (i, (name, routed, shared, out)) in cases.into_iter().enumerate() {
            for rounding in [Rounding::Once, Rounding::Twice] {
                let error = unpermute::reduce_blend(&device, rounding, routed, shared, out).unwrap_err();
                assert_eq!(argument_of(&error), name);
            }
            if i < 10 {
                assert_eq!(argument_of(&unpermute::reduce(&device, routed, out).unwrap_err()), name);
            } else {
                let error = unpermute::blend(&device, 3, 10, &on.out, shared, out).unwrap_err();
                assert_eq!(argument_of(&error), name);
            }
        }
        let error = unpermute::blend(&device, 3, 10, &out, shared, &on.out).unwrap_err();
        assert_eq!(argument_of(&error), "routed");
        check(&device, &batch, None);
    }
}
