//! The NVFP4 router against the reference: logits, and the choice of experts in one launch and in two.

use crate::common::{any_emulator, argument_of, devices, gpu, scale};
use crate::router::values;
use crate::topk::{Chosen, GUARD, bits, difference, outputs, taken};
use half::bf16;
use megamoe::device::{Buffer, DeviceHandle, Emulator};
use megamoe::diff::Random;
use megamoe::ops::gate_topk::{GateLogits, GateTopK, GateWeights};
use megamoe::reference;

/// A router and hidden states.
struct Gate {
    x: Vec<u16>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    scale2: f32,
    hidden: usize,
    experts: usize,
}

impl Gate {
    /// `hostile`: every scale byte and every bit pattern of x; else what a router holds.
    fn draw(random: &mut Random, tokens: usize, experts: usize, hidden: usize, hostile: bool) -> Self {
        let scale = |random: &mut Random| match (hostile, random.next() as u8) {
            // NaN scales seldom: they would else be in every row.
            (true, byte) if byte & 0x7F == 0x7F && !random.next().is_multiple_of(8) => 0x38,
            (true, byte) => byte,
            (false, byte) => 0x28 + byte % 0x20,
        };
        Gate {
            x: values(random, tokens * hidden, if hostile { 2 } else { 0 }),
            codes: (0..experts * hidden / 2).map(|_| random.next() as u8).collect(),
            scales: (0..experts * hidden / 16).map(|_| scale(random)).collect(),
            scale2: if hostile { random.in_range(-3.0, 3.0) } else { 0.01 },
            hidden,
            experts,
        }
    }

    fn tokens(&self) -> usize {
        self.x.len() / self.hidden
    }

    fn wanted_logits(&self) -> Vec<u32> {
        bits(&reference::gate_logits(&self.x, &self.codes, &self.scales, self.scale2, self.hidden).unwrap())
    }

    fn wanted(&self, top_k: usize, normalize: bool) -> Chosen {
        let Gate { x, codes, scales, scale2, hidden, .. } = self;
        let result = reference::gate_topk(x, codes, scales, *scale2, *hidden, top_k, normalize).unwrap();
        (result.ids, bits(&result.weights))
    }

    #[track_caller]
    fn logits(&self, device: &DeviceHandle) -> Vec<u32> {
        let len = self.tokens() * self.experts;
        let logits = Buffer::from_slice(device, &vec![f32::from_bits(u32::MAX); len + GUARD]).unwrap();
        let (x, codes, scales) = self.upload(device);
        let weights = GateWeights { codes: &codes, scales: &scales, scale2: self.scale2 };
        let op = GateLogits::new(device, self.hidden, self.experts).unwrap();
        op.launch(&x, weights, self.tokens(), &logits).unwrap();
        let mut got = bits(&logits.download().unwrap());
        assert!(got.split_off(len).iter().all(|&bits| bits == u32::MAX), "written behind the last logit");
        got
    }

    fn upload(&self, device: &DeviceHandle) -> (Buffer<u16>, Buffer<u8>, Buffer<u8>) {
        (
            Buffer::from_slice(device, &self.x).unwrap(),
            Buffer::from_slice(device, &self.codes).unwrap(),
            Buffer::from_slice(device, &self.scales).unwrap(),
        )
    }

    /// By one launch, and by two.
    #[track_caller]
    fn chosen(&self, device: &DeviceHandle, top_k: usize, normalize: bool) -> [Chosen; 2] {
        let (x, codes, scales) = self.upload(device);
        let weights = GateWeights { codes: &codes, scales: &scales, scale2: self.scale2 };
        let op = GateTopK::new(device, self.hidden, self.experts, top_k, normalize).unwrap();
        let (tokens, pairs) = (self.tokens(), self.tokens() * top_k);
        let (fused, two) = (outputs(device, pairs), outputs(device, pairs));
        op.launch(&x, weights, tokens, &fused.0, &fused.1).unwrap();
        let logits = Buffer::new(device, tokens * self.experts).unwrap();
        op.launch_in_two(&x, weights, tokens, &logits, &two.0, &two.1).unwrap();
        [taken(fused, pairs), taken(two, pairs)]
    }
}

#[test]
fn equals_the_reference() {
    let mut random = Random(31);
    let shapes =
        [(1, 1, 16), (1, 3, 32), (2, 4, 48), (3, 60, 528), (4, 33, 512), (5, 130, 1040), (9, 7, 1536), (2, 520, 64)];
    for (number, (tokens, experts, hidden)) in shapes.into_iter().enumerate() {
        for hostile in [false, true] {
            for device in std::iter::once(any_emulator(number)).chain(gpu()) {
                let gate = Gate::draw(&mut random, tokens, experts, hidden, hostile);
                assert_eq!(gate.logits(&device), gate.wanted_logits(), "{tokens} x {experts} x {hidden}");
                for normalize in [true, false] {
                    let top_k = 1 + random.next() as usize % experts.min(32);
                    let wanted = gate.wanted(top_k, normalize);
                    for got in gate.chosen(&device, top_k, normalize) {
                        let difference = difference(&wanted, &got, top_k);
                        assert_eq!(difference, None, "{tokens} x {experts} x {hidden}, top-{top_k}, {normalize}");
                    }
                }
            }
        }
    }
}

/// Rows of x that do not fit in 48 KB, many experts, and on the GPU more tokens than blocks that are resident.
#[test]
fn large_sizes() {
    let mut random = Random(32);
    for (number, (experts, hidden)) in [(5, 32_768), (4096, 16), (256, 7168)].into_iter().enumerate() {
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            let (tokens, experts) = (scale(&device, 1, 300), scale(&device, experts.min(600), experts));
            let gate = Gate::draw(&mut random, tokens, experts, scale(&device, hidden.min(32_768), hidden), false);
            let wanted = gate.wanted(4, true);
            for got in gate.chosen(&device, 4, true) {
                assert_eq!(difference(&wanted, &got, 4), None, "{experts} experts, hidden {hidden}");
            }
        }
    }
}

/// logit[e] = (37·e mod E) / 16 by the base-4 digits of 37·e mod E.
fn c5(experts: usize, tokens: usize) -> Gate {
    let x = [1.0 / 16.0, 0.25, 1.0, 4.0, 16.0].map(|x| bf16::from_f32(x).to_bits());
    let x: Vec<u16> = x.into_iter().chain([0; 11]).collect();
    let mut codes = vec![0; experts * 8];
    for (e, row) in codes.chunks_mut(8).enumerate() {
        let code = |digit: usize| [0u8, 2, 4, 5][(37 * e % experts) >> (2 * digit) & 3];
        (row[0], row[1], row[2]) = (code(0) | code(1) << 4, code(2) | code(3) << 4, code(4));
    }
    Gate { x: x.repeat(tokens), codes, scales: vec![0x38; experts], scale2: 1.0, hidden: 16, experts }
}

#[test]
fn c5_expert_counts_that_are_no_powers_of_two() {
    for (_, device) in devices() {
        for (experts, ids) in [
            (160, [147, 134, 121, 108, 95, 82, 69, 56]),
            (384, [83, 166, 249, 332, 31, 114, 197, 280]),
            (60, [47, 34, 21, 8, 55, 42, 29, 16]),
        ] {
            for tokens in [1, scale(&device, 3, 33), scale(&device, 1, 65_537)] {
                let gate = c5(experts, tokens);
                for (got, weights) in gate.chosen(&device, 8, true) {
                    assert_eq!(got, ids.repeat(tokens), "{experts} experts, {tokens} tokens");
                    assert_eq!(weights, weights[..8].repeat(tokens));
                }
                if tokens == 1 {
                    let wanted: Vec<f32> = (0..experts).map(|e| (37 * e % experts) as f32 / 16.0).collect();
                    assert_eq!(gate.logits(&device), bits(&wanted));
                }
            }
        }
    }
}

#[test]
fn c1_nan_logits_give_distinct_experts() {
    let mut gate = c5(256, 1);
    for (_, device) in devices() {
        gate.x[0] = 0x7FC0;
        for normalize in [true, false] {
            for (ids, weights) in gate.chosen(&device, 8, normalize) {
                assert_eq!((ids, weights), ((0..8).collect(), vec![0x7FFF_FFFF; 8]));
            }
        }
        // One expert by its scale: it comes last.
        gate.x[0] = 0x3F80;
        gate.scales[147] = 0x7F;
        for (ids, _) in gate.chosen(&device, 32, true) {
            assert!(!ids.contains(&147));
        }
        gate.scales[147] = 0x38;
    }
}

/// -inf for every expert: the weights are finite.
#[test]
fn c3_weights_are_never_0_by_0() {
    let mut gate = c5(8, 1);
    gate.codes.fill(0x02);
    gate.x.fill(0);
    gate.x[0] = 0xFF80;
    gate.codes.iter_mut().for_each(|byte| *byte = 0x22);
    for (_, device) in devices() {
        assert!(gate.logits(&device).iter().all(|&bits| bits == 0xFF80_0000));
        for got in gate.chosen(&device, 4, true) {
            assert_eq!(got, (vec![0, 1, 2, 3], bits(&[0.25; 4])));
        }
    }
}

#[test]
fn c7_top_k_and_expert_counts_out_of_range() {
    let device = Emulator::new();
    let refused =
        |hidden, experts, top_k| argument_of(&GateTopK::new(&device, hidden, experts, top_k, true).unwrap_err());
    assert_eq!(refused(16, 4, 8), "top_k");
    assert_eq!(refused(16, 4, 0), "top_k");
    assert_eq!(refused(16, 0, 1), "num_experts");
    assert_eq!(refused(24, 4, 1), "hidden");
    assert_eq!(refused(0, 4, 1), "hidden");
    let gate = c5(4, 1);
    for (_, device) in devices() {
        for (ids, _) in gate.chosen(&device, 4, true) {
            // 37·e mod 4 is e mod 4.
            assert_eq!(ids, [3, 2, 1, 0]);
        }
    }
}

/// Exactly top_k ids of 32 bits.
#[test]
fn c9_ids_are_32_bits() {
    let gate = c5(60, 1);
    for (_, device) in devices() {
        for top_k in [1, 8, 32] {
            // `chosen` checks the guards.
            for (ids, weights) in gate.chosen(&device, top_k, false) {
                assert_eq!((ids.len(), weights.len(), ids[0], weights[0]), (top_k, top_k, 47, 1f32.to_bits()));
            }
        }
    }
}

#[test]
fn f5_hidden_sizes_off_the_step() {
    for hidden in [16, 528, 1040] {
        let experts = 5;
        let gate = Gate {
            x: vec![0x3F80; 2 * hidden],
            codes: vec![0x22; experts * hidden / 2],
            scales: vec![0x38; experts * hidden / 16],
            scale2: 1.0,
            hidden,
            experts,
        };
        for (_, device) in devices() {
            assert_eq!(gate.logits(&device), [(hidden as f32).to_bits(); 10]);
        }
    }
}

#[test]
fn arguments_are_checked() {
    let (device, other) = (Emulator::new(), Emulator::new());
    let gate = c5(8, 3);
    let (x, codes, scales) = gate.upload(&device);
    let bytes = |device: &DeviceHandle, len| Buffer::from_slice(device, &vec![0u8; len]).unwrap();
    let op = GateTopK::new(&device, 16, 8, 2, true).unwrap();
    let (ids, weights) = outputs(&device, 6);
    let logits = Buffer::from_slice(&device, &[0f32; 24]).unwrap();
    let good = GateWeights { codes: &codes, scales: &scales, scale2: 1.0 };
    op.launch(&x, good, 3, &ids, &weights).unwrap();
    let refused = |x: &Buffer<u16>, given: GateWeights<'_>, tokens| {
        let name = argument_of(&op.launch(x, given, tokens, &ids, &weights).unwrap_err());
        let in_two = op.launch_in_two(x, given, tokens, &logits, &ids, &weights).unwrap_err();
        assert_eq!(argument_of(&in_two), name);
        name
    };
    let short = Buffer::from_slice(&device, &[0u16; 47]).unwrap();
    assert_eq!(refused(&short, good, 3), "x");
    for codes in [bytes(&device, 63), bytes(&device, 65), bytes(&other, 64)] {
        assert_eq!(refused(&x, GateWeights { codes: &codes, ..good }, 3), "codes");
    }
    for scales in [bytes(&device, 7), bytes(&device, 9), bytes(&other, 8)] {
        assert_eq!(refused(&x, GateWeights { scales: &scales, ..good }, 3), "scales");
    }
    assert_eq!(refused(&x, GateWeights { scale2: f32::INFINITY, ..good }, 3), "scale2");
    assert_eq!(refused(&x, good, 1 << 31), "tokens");
    let few = Buffer::from_slice(&device, &[0i32; 5]).unwrap();
    let few_weights = Buffer::from_slice(&device, &[0f32; 5]).unwrap();
    assert_eq!(argument_of(&op.launch(&x, good, 3, &few, &weights).unwrap_err()), "expert_indices");
    assert_eq!(argument_of(&op.launch(&x, good, 3, &ids, &few_weights).unwrap_err()), "expert_weights");
    assert_eq!(argument_of(&op.launch_in_two(&x, good, 3, &logits, &few, &weights).unwrap_err()), "expert_indices");
    assert_eq!(argument_of(&op.launch_in_two(&x, good, 3, &few_weights, &ids, &weights).unwrap_err()), "logits");
    op.launch(&x, good, 0, &few, &few_weights).unwrap();
    op.launch_in_two(&x, good, 0, &few_weights, &few, &few_weights).unwrap();
}

/// A scale in another place, a code in the other nibble: both change logits that the comparison sees.
#[test]
fn planted_faults_are_noticed() {
    let mut random = Random(33);
    let device = Emulator::new();
    let mut gate = Gate::draw(&mut random, 2, 6, 48, false);
    let wanted = gate.wanted_logits();
    assert_eq!(gate.logits(&device), wanted);
    gate.codes[30] = gate.codes[30].rotate_left(4) ^ 0x01;
    assert_ne!(gate.logits(&device), wanted);
    let mut gate = Gate::draw(&mut Random(33), 2, 6, 48, false);
    gate.scales[4] ^= 0x08;
    assert_ne!(gate.logits(&device), wanted);
}
