//! The gated activation, alone and with the quantiser, against the reference.

use crate::common::{any_emulator, argument_of, devices, gpu};
use crate::quant::{self, Outputs, values};
use megamoe::Gating;
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::Rows;
use megamoe::ops::silu_mul::{GateUp, Quantised, SiluMul, Tuning};
use megamoe::reference;

const GATINGS: [Gating; 4] = [
    Gating::Silu { limit: None },
    Gating::Silu { limit: Some(1.5) },
    Gating::SwigluOai { alpha: 1.702, limit: 7.0 },
    Gating::SwigluOai { alpha: -0.3, limit: f32::INFINITY },
];

/// Where gate and up lie.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// Two buffers without gaps.
    Apart,
    /// The halves of one buffer.
    Halves,
    /// Two buffers, rows and starts at odd places.
    Odd,
}

const LAYOUTS: [Layout; 3] = [Layout::Apart, Layout::Halves, Layout::Odd];

/// Gate and up on a device.
struct Inputs {
    buffers: [Buffer<u16>; 2],
    layout: Layout,
    cols: usize,
}

impl Inputs {
    fn new(device: &DeviceHandle, gate: &[u16], up: &[u16], cols: usize, layout: Layout) -> Self {
        let rows = gate.len() / cols;
        let place = |x: &[u16], into: &mut Vec<u16>, offset: usize, stride: usize| {
            for row in 0..rows {
                into[offset + row * stride..][..cols].copy_from_slice(&x[row * cols..][..cols]);
            }
        };
        let (mut first, mut second) = (gate.to_vec(), up.to_vec());
        match layout {
            Layout::Apart => {}
            Layout::Halves => {
                first = vec![0; 2 * gate.len()];
                place(gate, &mut first, 0, 2 * cols);
                place(up, &mut first, cols, 2 * cols);
                second = vec![];
            }
            Layout::Odd => {
                first = vec![0x7FC0; 3 + rows * (cols + 5)];
                second = vec![0x7FC0; 1 + rows * (cols + 2)];
                place(gate, &mut first, 3, cols + 5);
                place(up, &mut second, 1, cols + 2);
            }
        }
        Inputs { buffers: [first, second].map(|x| Buffer::from_slice(device, &x).unwrap()), layout, cols }
    }

    fn get(&self) -> GateUp<'_> {
        let [gate, up] = &self.buffers;
        match self.layout {
            Layout::Apart => GateUp { gate: Rows::contiguous(gate, self.cols), up: Rows::contiguous(up, self.cols) },
            Layout::Halves => GateUp::halves(gate, self.cols),
            Layout::Odd => GateUp {
                gate: Rows { buffer: gate, offset: 3, stride: self.cols + 5 },
                up: Rows { buffer: up, offset: 1, stride: self.cols + 2 },
            },
        }
    }
}

fn run(
    device: &DeviceHandle,
    gating: Gating,
    gate: &[u16],
    up: &[u16],
    cols: usize,
    layout: Layout,
    tuning: Tuning,
) -> Vec<u16> {
    let inputs = Inputs::new(device, gate, up, cols, layout);
    let out = Buffer::from_slice(device, &vec![0xA5A5; gate.len() + 64]).unwrap();
    let op = SiluMul::new(device, gating).unwrap();
    op.enqueue_with(inputs.get(), gate.len() / cols, cols, &out, tuning).unwrap();
    let mut out = out.download().unwrap();
    assert!(out.split_off(gate.len()).iter().all(|&bits| bits == 0xA5A5), "written behind the last row");
    out
}

#[allow(clippy::too_many_arguments)]
fn run_quant(
    device: &DeviceHandle,
    gating: Gating,
    gate: &[u16],
    up: &[u16],
    cols: usize,
    layout: Layout,
    copy: Option<&Buffer<u16>>,
    tuning: Tuning,
) -> reference::Quantized {
    let inputs = Inputs::new(device, gate, up, cols, layout);
    let rows = gate.len() / cols;
    let outputs = Outputs::new(device, rows, cols);
    let to = Quantised { codes: &outputs.codes, scales: &outputs.scales, copy };
    SiluMul::new(device, gating).unwrap().enqueue_quant_with(inputs.get(), rows, cols, to, tuning).unwrap();
    outputs.result()
}

fn difference(wanted: &[u16], got: &[u16]) -> Option<String> {
    if wanted.len() != got.len() {
        return Some(format!("{} elements, not {}", got.len(), wanted.len()));
    }
    let i = (0..wanted.len()).find(|&i| wanted[i] != got[i])?;
    Some(format!("element {i} is {:#06x}, not {:#06x}", got[i], wanted[i]))
}

/// Both operations on `device` are the reference's, with a table of sigmoids and without; and one is the other with the quantiser
/// behind it.
#[track_caller]
fn check(device: &DeviceHandle, gating: Gating, gate: &[u16], up: &[u16], cols: usize, layout: Layout, blocks: u32) {
    let rows = gate.len() / cols;
    let wanted = reference::silu_mul(gate, up, &gating).unwrap();
    let wanted_codes = reference::silu_mul_quant_fp8(gate, up, rows, cols, &gating).unwrap();
    for table in [false, true] {
        let what = format!("{}, {gating:?}, {rows} x {cols}, {layout:?}, table {table}", device.properties().name);
        let tuning = Tuning { blocks: (blocks > 0).then_some(blocks), table: Some(table) };
        let got = run(device, gating, gate, up, cols, layout, tuning);
        assert_eq!(difference(&wanted, &got), None, "{what}");
        let copy = Buffer::from_slice(device, &vec![0u16; rows * cols]).unwrap();
        let fused = run_quant(device, gating, gate, up, cols, layout, Some(&copy), tuning);
        assert_eq!(quant::difference(&wanted_codes, &fused), None, "quantised, {what}");
        assert_eq!(difference(&wanted, &copy.download().unwrap()), None, "copy, {what}");
        let separate = quant::run(device, &got, rows, cols, (0, cols), None);
        assert_eq!(quant::difference(&separate, &fused), None, "one pass and two, {what}");
    }
}

#[test]
fn rows_of_every_kind() {
    let mut random = Random(41);
    for (number, (rows, cols)) in
        [(1, 1), (3, 8), (5, 127), (4, 128), (2, 129), (3, 320), (7, 768), (33, 136)].into_iter().enumerate()
    {
        let (gate, up) = (values(&mut random, rows * cols), values(&mut random, rows * cols));
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            for (i, gating) in GATINGS.into_iter().enumerate() {
                check(&device, gating, &gate, &up, cols, LAYOUTS[(i + number) % 3], [0, 1, 3][number % 3]);
            }
            check(&device, GATINGS[0], &gate, &up, cols, Layout::Halves, 2);
            let without = run_quant(&device, GATINGS[0], &gate, &up, cols, Layout::Apart, None, Tuning::default());
            let wanted = reference::silu_mul_quant_fp8(&gate, &up, rows, cols, &GATINGS[0]).unwrap();
            assert_eq!(quant::difference(&wanted, &without), None);
        }
    }
    let Some(gpu) = gpu() else { return };
    for (rows, cols) in [(8192, 2048), (65_536, 768), (3000, 130)] {
        let (gate, up) = (values(&mut random, rows * cols), values(&mut random, rows * cols));
        check(&gpu, GATINGS[0], &gate, &up, cols, Layout::Halves, 0);
        check(&gpu, GATINGS[2], &gate, &up, cols, Layout::Apart, 0);
    }
}

/// Every gate: the shortened exp has the bits of the definition's, also in NaN and infinities.
#[test]
fn every_gate() {
    let gate: Vec<u16> = (0..=u16::MAX).collect();
    for device in std::iter::once(any_emulator(1)).chain(gpu()) {
        let up = vec![0xC0A1; 1 << 16];
        let ends = [0.82, -4.0].map(|alpha| Gating::SwigluOai { alpha, limit: 1000.0 });
        for gating in GATINGS.into_iter().chain([Gating::Silu { limit: Some(150.0) }]).chain(ends) {
            let wanted = reference::silu_mul(&gate, &up, &gating).unwrap();
            for table in [false, true] {
                let tuning = Tuning { table: Some(table), blocks: None };
                let got = run(&device, gating, &gate, &up, 1024, Layout::Apart, tuning);
                assert_eq!(difference(&wanted, &got), None, "{gating:?}, table {table}");
            }
        }
    }
}

/// Products alpha · gate all about the ends of the range in which the sum 1 + exp is neither 1 nor infinite.
#[test]
fn about_the_ends_of_exp() {
    let mut random = Random(43);
    let gate: Vec<u16> = (0..4096).map(|i| if i % 2 == 0 { 0xC2B0 } else { 0x4188 } + i / 2 % 8).collect();
    let up = vec![0x3F80; gate.len()];
    for device in std::iter::once(any_emulator(2)).chain(gpu()) {
        for _ in 0..12 {
            let gating = Gating::SwigluOai { alpha: random.in_range(0.97, 1.03), limit: 1000.0 };
            let wanted = reference::silu_mul(&gate, &up, &gating).unwrap();
            for table in [false, true] {
                let tuning = Tuning { table: Some(table), blocks: None };
                let got = run(&device, gating, &gate, &up, 512, Layout::Apart, tuning);
                assert_eq!(difference(&wanted, &got), None, "{gating:?}, table {table}");
            }
        }
    }
}

/// One bit would be noticed, and so would an activation that clamps where it should not, or the other way round.
#[test]
fn differences_are_seen() {
    let (gate, up) = ([0x4080u16; 8], [0x4000u16; 8]);
    let wanted = reference::silu_mul(&gate, &up, &GATINGS[0]).unwrap();
    let mut wrong = wanted.clone();
    wrong[5] ^= 1;
    assert!(difference(&wanted, &wrong).unwrap().starts_with("element 5"));
    let clamped = run(&any_emulator(0), GATINGS[1], &gate, &up, 8, Layout::Apart, Tuning::default());
    assert!(difference(&wanted, &clamped).is_some());
}

/// Case H3: a large negative gate gives a value near 0, and -inf NaN, by the formula.
#[test]
fn h3_large_negative_gates() {
    let gate = [-88.0f32, -89.0, -200.0, -1e30, f32::NEG_INFINITY].map(|g| half::bf16::from_f32(g).to_bits());
    let up = [0x4040; 5];
    for (_, device) in devices() {
        let got = run(&device, GATINGS[0], &gate, &up, 5, Layout::Apart, Tuning::default());
        for &bits in &got[..4] {
            assert!(half::bf16::from_bits(bits).to_f32().abs() <= 1e-35, "{bits:#06x}");
        }
        assert_eq!(got[4], 0x7FFF);
        check(&device, GATINGS[0], &gate, &up, 5, Layout::Apart, 0);
    }
}

/// Case H6: the clamp holds the gate from above alone, and up on both sides, before the activation.
#[test]
fn h6_the_clamp() {
    let gating = Gating::Silu { limit: Some(1.0) };
    for (_, device) in devices() {
        let got = run(&device, gating, &[0x4200, 0xC200], &[0x4200, 0xC200], 2, Layout::Apart, Tuning::default());
        let got = got.into_iter().map(|bits| half::bf16::from_bits(bits).to_f32()).collect::<Vec<_>>();
        assert!((got[0] - 0.7305).abs() < 2e-3 && got[1].abs() < 1e-6, "{got:?}");
    }
}

/// Case I5, the fused path: tiny groups get the bytes of the quantiser.
#[test]
fn i5_tiny_groups() {
    for largest in [1e-12f32, 1e-30, 2f32.powi(-133)] {
        // silu(32) is 32, so that up·32 is the element.
        let up: Vec<u16> = (0..256).map(|i| half::bf16::from_f32(largest / 32.0 * (i % 5) as f32).to_bits()).collect();
        let gate = vec![0x4200; 256];
        for (_, device) in devices() {
            for layout in LAYOUTS {
                check(&device, GATINGS[0], &gate, &up, 256, layout, 0);
            }
        }
    }
}

/// The result may take the place of what it is made of, if that lies in the same way.
#[test]
fn in_place() {
    let mut random = Random(44);
    let (rows, cols) = (6, 264);
    let (gate, up) = (values(&mut random, rows * cols), values(&mut random, rows * cols));
    let wanted = reference::silu_mul(&gate, &up, &GATINGS[0]).unwrap();
    for (_, device) in devices() {
        let inputs = Inputs::new(&device, &gate, &up, cols, Layout::Apart);
        let [own_gate, own_up] = &inputs.buffers;
        let op = SiluMul::new(&device, GATINGS[0]).unwrap();
        let outputs = Outputs::new(&device, rows, cols);
        let to = Quantised { codes: &outputs.codes, scales: &outputs.scales, copy: Some(own_gate) };
        op.enqueue_quant(inputs.get(), rows, cols, to).unwrap();
        assert_eq!(difference(&wanted, &own_gate.download().unwrap()), None);
        own_gate.upload(&gate).unwrap();
        let table = Tuning { table: Some(true), blocks: None };
        op.enqueue_with(inputs.get(), rows, cols, own_up, table).unwrap();
        assert_eq!(difference(&wanted, &own_up.download().unwrap()), None);

        let halves = Inputs::new(&device, &gate, &up, cols, Layout::Halves);
        let error = op.enqueue(halves.get(), rows, cols, &halves.buffers[0]).unwrap_err();
        assert_eq!(argument_of(&error), "out");
    }
}

/// Case E1 and I3.
#[test]
fn e1_zero_tokens() {
    for (_, device) in devices() {
        let empty = Buffer::<u16>::new(&device, 0).unwrap();
        let from = GateUp { gate: Rows::contiguous(&empty, 8), up: Rows::contiguous(&empty, 8) };
        let outputs = Outputs::new(&device, 0, 8);
        let op = SiluMul::new(&device, GATINGS[0]).unwrap();
        op.enqueue(from, 0, 8, &empty).unwrap();
        let to = Quantised { codes: &outputs.codes, scales: &outputs.scales, copy: None };
        op.enqueue_quant(from, 0, 8, to).unwrap();
        outputs.result();
        check(&device, GATINGS[0], &[0x3F80; 8], &[0x4000; 8], 8, Layout::Apart, 0);
    }
}

#[test]
fn m1_short_buffers_and_bad_sizes() {
    for (_, device) in devices() {
        let (rows, cols) = (2, 130);
        let long = |len: usize| Buffer::from_slice(&device, &vec![0u16; len]).unwrap();
        let (gate, up, short) = (long(rows * cols), long(rows * cols), long(rows * cols - 1));
        let (out, codes) = (long(rows * cols), Buffer::new(&device, rows * cols).unwrap());
        let scales = Buffer::new(&device, rows * 2).unwrap();
        let short_codes = Buffer::new(&device, rows * cols - 1).unwrap();
        let short_scales = Buffer::new(&device, rows * 2 - 1).unwrap();
        let pair = |gate, up| GateUp { gate: Rows::contiguous(gate, cols), up: Rows::contiguous(up, cols) };
        let good = pair(&gate, &up);
        let op = SiluMul::new(&device, GATINGS[0]).unwrap();
        op.enqueue(good, rows, cols, &out).unwrap();
        for (name, from, rows, cols, out) in [
            ("gate", pair(&short, &up), rows, cols, &out),
            ("up", pair(&gate, &short), rows, cols, &out),
            ("out", good, rows, cols, &short),
            ("cols", good, rows, 0, &out),
            ("rows", good, 1 << 31, cols, &out),
        ] {
            assert_eq!(argument_of(&op.enqueue(from, rows, cols, out).unwrap_err()), name);
        }
        let silu = |limit| Gating::Silu { limit: Some(limit) };
        let oai = |alpha, limit| Gating::SwigluOai { alpha, limit };
        for (name, gating) in [
            ("limit", silu(0.0)),
            ("limit", silu(f32::NAN)),
            ("limit", oai(1.702, -7.0)),
            ("alpha", oai(f32::INFINITY, 7.0)),
            ("alpha", oai(0.0, 7.0)),
        ] {
            assert_eq!(argument_of(&SiluMul::new(&device, gating).unwrap_err()), name);
        }
        let to = Quantised { codes: &codes, scales: &scales, copy: Some(&out) };
        op.enqueue_quant(good, rows, cols, to).unwrap();
        for (name, from, to) in [
            ("gate", pair(&short, &up), to),
            ("up", pair(&gate, &short), to),
            ("codes", good, Quantised { codes: &short_codes, ..to }),
            ("scales", good, Quantised { scales: &short_scales, ..to }),
            ("copy", good, Quantised { copy: Some(&short), ..to }),
        ] {
            let error = op.enqueue_quant(from, rows, cols, to).unwrap_err();
            assert_eq!(argument_of(&error), name);
        }
        check(&device, GATINGS[0], &[0x3F80; 8], &[0x4000; 8], 8, Layout::Apart, 0);
    }
}
