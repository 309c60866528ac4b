//! The grouped GEMMs against the reference, and against each other.

use crate::common::{any_emulator, emulator, gpu, is_emulated, scale};
use cuda_std::arch::ArchId;
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::ExpertTable;
use megamoe::ops::gemm::{Activations, GateUpSilu, GateUpSiluArgs, GemmArgs, GemmKernel, GroupedGemm, Tiles, Weights};
use megamoe::reference::{self, GemmKind, Operand, Quantized};
use megamoe::{Error, Gating};
use std::sync::Arc;

/// The kernels that must all give the bits of W8A8.
const W8A8: [GemmKernel; 5] =
    [GemmKernel::W8a8, GemmKernel::W8a8Pm4, GemmKernel::W8a8GateUp, GemmKernel::W8a8Down, GemmKernel::W8a8Native];

/// What lies in an output before a launch, and must stay where nothing is written.
const UNTOUCHED: u16 = 0x5A5A;

/// Codes, the same as bf16 values, and block scales.
type ExpertData = (Vec<u8>, Vec<u16>, Vec<f32>);

/// A grouped GEMM with all its data, every form of it.
#[derive(Clone)]
struct Problem {
    n: usize,
    k: usize,
    offsets: Vec<i32>,
    ids: Option<Vec<i32>>,
    a_rows: usize,
    a8: Vec<u8>,
    a16: Vec<u16>,
    a_scales: Vec<f32>,
    /// Per expert; `None` for one that is not resident.
    experts: Vec<Option<ExpertData>>,
    bias: Option<Vec<f32>>,
    /// Rows of the output, some behind the last expert's.
    rows: usize,
}

fn bf16(value: f32) -> u16 {
    half::bf16::from_f32(value).to_bits()
}

impl Problem {
    /// `counts` rows of each expert, all values as `value` makes them.
    fn new(counts: &[usize], n: usize, k: usize, mut code: impl FnMut() -> u8, mut scale: impl FnMut() -> f32) -> Self {
        let mut offsets = vec![0];
        for &count in counts {
            offsets.push(offsets[offsets.len() - 1] + count as i32);
        }
        let rows = offsets[counts.len()] as usize;
        let (blocks, n_blocks) = (k.div_ceil(128), n.div_ceil(128));
        let mut codes = |count: usize| -> Vec<u8> { (0..count).map(|_| code()).collect() };
        let wide = |codes: &[u8]| -> Vec<u16> { codes.iter().map(|&code| bf16(reference::math::e4m3(code))).collect() };
        let a8 = codes(rows * k);
        let a16 = wide(&a8);
        let experts = counts
            .iter()
            .map(|_| {
                let weights = codes(n * k);
                let values = wide(&weights);
                Some((weights, values, (0..n_blocks * blocks).map(|_| scale()).collect()))
            })
            .collect();
        let a_scales = (0..rows * blocks).map(|_| scale()).collect();
        Problem { n, k, offsets, ids: None, a_rows: rows, a8, a16, a_scales, experts, bias: None, rows: rows + 2 }
    }

    /// Random codes of all kinds but NaN, scales of (1..64) / 4096.
    fn random(counts: &[usize], n: usize, k: usize, seed: u64) -> Self {
        let (mut codes, mut scales) = (Random(seed), Random(seed + 1));
        let code = move || {
            let code = codes.next() as u8;
            if code & 0x7F == 0x7F { code ^ 1 } else { code }
        };
        Self::new(counts, n, k, code, move || (1 + scales.next() % 64) as f32 / 4096.0)
    }

    /// With rows of `a` in another order: half as many rows, each used several times, some none.
    fn gathered(mut self, seed: u64) -> Self {
        let mut random = Random(seed);
        self.a_rows = self.a_rows.div_ceil(2).max(1);
        self.a8.resize(self.a_rows * self.k, 0x38);
        self.a16.resize(self.a_rows * self.k, 0x3F80);
        self.a_scales.resize(self.a_rows * self.k.div_ceil(128), 1.0);
        let live = self.rows - 2;
        let id = |random: &mut Random| match random.next() % 9 {
            0 => -1 - (random.next() % 5) as i32,
            _ => (random.next() % self.a_rows as u64) as i32,
        };
        self.ids = Some((0..self.rows).map(|row| if row < live { id(&mut random) } else { i32::MAX }).collect());
        self
    }

    fn with_bias(mut self, seed: u64) -> Self {
        let mut random = Random(seed);
        self.bias = Some((0..self.experts.len() * self.n).map(|_| random.in_range(-2.0, 2.0)).collect());
        self
    }

    fn reference(&self, kernel: GemmKernel) -> Vec<u16> {
        let mut out = vec![UNTOUCHED; self.rows * self.n];
        self.gemm(kernel, &self.operands(kernel == GemmKernel::Bf16)).run(&mut out).unwrap();
        out
    }

    fn operands(&self, bf16: bool) -> Vec<Option<Operand<'_>>> {
        self.experts
            .iter()
            .map(|expert| {
                expert.as_ref().map(|(codes, values, scales)| match bf16 {
                    true => Operand::Bf16(values),
                    false => Operand::E4m3 { codes, scales },
                })
            })
            .collect()
    }

    fn gemm<'a>(&'a self, kernel: GemmKernel, weights: &'a [Option<Operand<'a>>]) -> reference::GroupedGemm<'a> {
        let (kind, a) = match kernel {
            GemmKernel::Fp8 => (GemmKind::Fp8, Operand::Bf16(&self.a16)),
            GemmKernel::Bf16 => (GemmKind::Bf16, Operand::Bf16(&self.a16)),
            _ => (GemmKind::W8a8, Operand::E4m3 { codes: &self.a8, scales: &self.a_scales }),
        };
        let sorted_token_ids = self.ids.as_deref();
        let (n, k, expert_offsets, bias) = (self.n, self.k, self.offsets.as_slice(), self.bias.as_deref());
        reference::GroupedGemm { kind, n, k, expert_offsets, sorted_token_ids, a, weights, bias }
    }

    fn resident(&self) -> Vec<bool> {
        self.experts.iter().map(Option::is_some).collect()
    }

    /// The output on a device, from a list that is longer than needed.
    fn run(&self, device: &DeviceHandle, kernel: GemmKernel) -> Vec<u16> {
        let on = OnDevice::new(self, device);
        let op = GroupedGemm::new(device, kernel, self.experts.len(), self.n, self.k).unwrap();
        let out = Buffer::from_slice(device, &vec![UNTOUCHED; self.rows * self.n]).unwrap();
        let (worklist, total) = self.worklist(device, op.m_tile(), op.n_tiles());
        op.launch(on.args(self, kernel, &worklist, &total, &out)).unwrap();
        out.download().unwrap()
    }

    fn worklist(&self, device: &DeviceHandle, m_tile: u32, n_tiles: u32) -> (Buffer<u32>, Buffer<u32>) {
        let items = reference::tile_worklist(&self.offsets, &self.resident(), n_tiles, m_tile).unwrap();
        let total = Buffer::from_slice(device, &[items.len() as u32]).unwrap();
        let mut words = items.as_flattened().to_vec();
        let room = reference::worklist_capacity(self.rows, self.experts.len(), n_tiles, m_tile);
        words.resize(4 * room + 4, u32::MAX);
        (Buffer::from_slice(device, &words).unwrap(), total)
    }

    #[track_caller]
    fn check(&self, what: &str, kernels: &[GemmKernel]) {
        for &kernel in kernels {
            let wanted = self.reference(kernel);
            for (i, device) in [any_emulator(self.n + self.k)].into_iter().chain(gpu()).enumerate() {
                let got = self.run(&device, kernel);
                assert_rows(&format!("{what}, {} on device {i}", kernel.name()), self.n, &got, &wanted);
            }
        }
    }
}

#[track_caller]
fn assert_rows<T: PartialEq + std::fmt::LowerHex>(what: &str, n: usize, got: &[T], wanted: &[T]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let wrong: Vec<usize> = (0..got.len()).filter(|&i| got[i] != wanted[i]).collect();
    if let Some(&i) = wrong.first() {
        let (row, column) = (i / n, i % n);
        panic!("{what}: {} wrong, first row {row}, column {column}: {:#x}, not {:#x}", wrong.len(), got[i], wanted[i]);
    }
}

/// All operands on a device.
struct OnDevice {
    a8: Buffer<u8>,
    a16: Buffer<u16>,
    a_scales: Buffer<f32>,
    ids: Option<Buffer<i32>>,
    offsets: Buffer<i32>,
    codes: ExpertTable<u8>,
    values: ExpertTable<u16>,
    scales: ExpertTable<f32>,
    bias: Option<Buffer<f32>>,
}

impl OnDevice {
    fn new(problem: &Problem, device: &DeviceHandle) -> Self {
        let &Problem { n, k, .. } = problem;
        let upload = |data: &[u8]| Buffer::from_slice(device, data).unwrap();
        let a8 = upload(&problem.a8);
        let each = problem.experts.iter();
        let codes = each.clone().map(|e| e.as_ref().map(|e| Arc::new(upload(&e.0)))).collect();
        let values = each.clone().map(|e| e.as_ref().map(|e| Arc::new(Buffer::from_slice(device, &e.1).unwrap())));
        let scales = each.map(|e| e.as_ref().map(|e| Arc::new(Buffer::from_slice(device, &e.2).unwrap())));
        OnDevice {
            a8,
            a16: Buffer::from_slice(device, &problem.a16).unwrap(),
            a_scales: Buffer::from_slice(device, &problem.a_scales).unwrap(),
            ids: problem.ids.as_ref().map(|ids| Buffer::from_slice(device, ids).unwrap()),
            offsets: Buffer::from_slice(device, &problem.offsets).unwrap(),
            codes: ExpertTable::new("weights", device, n * k, codes).unwrap(),
            values: ExpertTable::new("weights", device, n * k, values.collect()).unwrap(),
            scales: ExpertTable::new("b_scale", device, n.div_ceil(128) * k.div_ceil(128), scales.collect()).unwrap(),
            bias: problem.bias.as_ref().map(|bias| Buffer::from_slice(device, bias).unwrap()),
        }
    }

    fn args<'a>(
        &'a self,
        problem: &Problem,
        kernel: GemmKernel,
        worklist: &'a Buffer<u32>,
        total: &'a Buffer<u32>,
        out: &'a Buffer<u16>,
    ) -> GemmArgs<'a> {
        let fullest = problem.offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as usize;
        GemmArgs {
            tiles: match kernel {
                GemmKernel::W8a8 => Tiles::Dense { expert_offsets: &self.offsets, max_m_tiles: fullest.div_ceil(64) },
                _ => Tiles::Listed { worklist, total },
            },
            a: match kernel {
                GemmKernel::Fp8 | GemmKernel::Bf16 => Activations::Bf16(&self.a16),
                _ => Activations::E4m3 { codes: &self.a8, scales: &self.a_scales },
            },
            a_rows: problem.a_rows,
            sorted_token_ids: self.ids.as_ref(),
            weights: match kernel {
                GemmKernel::Bf16 => Weights::Bf16(&self.values),
                _ => Weights::E4m3 { codes: &self.codes, scales: &self.scales },
            },
            bias: self.bias.as_ref(),
            out,
            rows: problem.rows,
        }
    }
}

#[test]
fn every_kernel_on_tails_of_every_size() {
    // Rows about the tiles', n and k off every grid; k = 20 and 330 take the narrow copies of e4m3, 330 those of bf16 too.
    for (seed, (counts, n, k)) in [
        (vec![1, 0, 17], 96, 64),
        (vec![63, 2], 65, 128),
        (vec![5], 1, 16),
        (vec![3, 66], 63, 20),
        (vec![2, 1, 1, 130], 136, 192),
        (vec![9, 9], 128, 330),
        (vec![16], 260, 144),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = Problem::random(&counts, n, k, 100 * seed as u64);
        problem.check(&format!("{counts:?}, n {n}, k {k}"), &GemmKernel::ALL);
        let problem = problem.gathered(7).with_bias(8);
        problem.check(&format!("{counts:?}, n {n}, k {k}, gathered with bias"), &GemmKernel::ALL);
    }
}

#[test]
fn experts_that_are_not_resident_keep_their_rows() {
    let mut problem = Problem::random(&[4, 20, 3], 72, 80, 3);
    problem.experts[1] = None;
    problem.check("expert 1 absent", &GemmKernel::ALL);
    problem.experts = vec![None, None, None];
    problem.check("none", &GemmKernel::ALL);
}

#[test]
fn nan_codes_reach_their_row_or_column_alone() {
    let mut problem = Problem::random(&[6, 7], 40, 160, 5);
    problem.a8[3 * 160 + 100] = 0x7F;
    problem.a16[3 * 160 + 100] = 0x7FFF;
    if let Some((codes, values, _)) = &mut problem.experts[1] {
        codes[11 * 160 + 3] = 0xFF;
        values[11 * 160 + 3] = 0x7FFF;
    }
    problem.check("NaN codes", &GemmKernel::ALL);
    let out = problem.reference(GemmKernel::W8a8);
    let nans = out.iter().filter(|&&bits| bits == 0x7FFF).count();
    assert_eq!(nans, 40 + 7, "one row, and one column of the second expert");
}

/// The four W8A8 kernels are one definition: with all codes, at sizes where each of them loops over many items.
#[test]
fn w8a8_kernels_agree() {
    for device in [any_emulator(3)].into_iter().chain(gpu()) {
        let counts: Vec<usize> = match is_emulated(&device) {
            true => vec![40, 0, 129],
            false => vec![300, 0, 1, 700, 64, 65, 128],
        };
        let (n, k) = (scale(&device, 192, 1536), scale(&device, 256, 2048));
        let mut random = Random(9);
        let mut problem = Problem::random(&counts, n, k, 9).gathered(4);
        for code in &mut problem.a8 {
            *code = random.next() as u8;
        }
        let all: Vec<_> = W8A8.iter().map(|&kernel| problem.run(&device, kernel)).collect();
        for (kernel, out) in W8A8.iter().zip(&all) {
            assert_rows(kernel.name(), n, out, &all[0]);
        }
    }
}

/// `…_native` sums as the instruction does where there is one, here as an H200 makes it of others; elsewhere it is the other
/// kernels' chain.
#[test]
fn native_e4m3_on_architectures_that_have_it() {
    let kernel = GemmKernel::W8a8Native;
    let mut apart = 0;
    for (seed, (counts, n, k)) in
        [(vec![1, 0, 17], 96, 64), (vec![3, 130], 65, 400), (vec![40], 136, 20), (vec![9, 9], 128, 330)]
            .into_iter()
            .enumerate()
    {
        let problem = Problem::random(&counts, n, k, 50 + seed as u64).gathered(2);
        // What is left where the sums cancel shows more of their order than bf16 does.
        let chain = problem.reference(kernel);
        let mut problem = problem.with_bias(3);
        if let Some(bias) = &mut problem.bias {
            for (bias, &bits) in bias.iter_mut().zip(&chain[..n]) {
                *bias = -half::bf16::from_bits(bits).to_f32();
            }
        }
        let chain = problem.reference(kernel);
        let mut native = vec![UNTOUCHED; problem.rows * n];
        let weights: Vec<_> = problem.operands(false);
        let gemm = reference::GroupedGemm { kind: GemmKind::W8a8Native, ..problem.gemm(kernel, &weights) };
        gemm.run(&mut native).unwrap();
        apart += chain.iter().zip(&native).filter(|(chain, native)| chain != native).count();
        for (arch, wanted) in [(ArchId::Sm120, &native), (ArchId::Sm100, &chain), (ArchId::Sm80, &chain)] {
            let got = problem.run(&emulator(arch, 2, seed as u64), kernel);
            assert_rows(&format!("{counts:?}, n {n}, k {k}, {arch:?}"), n, &got, wanted);
        }
    }
    assert!(apart > 20, "{apart} outputs tell the two orders apart");
}

/// Neither other rows nor the order of an expert's rows have an influence.
#[test]
fn rows_do_not_depend_on_each_other() {
    let problem = Problem::random(&[70, 9], 64, 192, 12);
    let mut turned = problem.clone();
    // Rows of the first expert in reverse.
    turned.ids = Some((0..problem.rows as i32).map(|row| if row < 70 { 69 - row } else { row }).collect());
    let mut alone = problem.clone();
    alone.offsets = vec![0, 1, 1];
    for device in [any_emulator(4)].into_iter().chain(gpu()) {
        for kernel in GemmKernel::ALL {
            let out = problem.run(&device, kernel);
            let row = |out: &[u16], row: usize| out[row * 64..][..64].to_vec();
            let reversed = turned.run(&device, kernel);
            assert!((0..70).all(|r| row(&reversed, r) == row(&out, 69 - r)), "{}", kernel.name());
            assert_eq!(row(&alone.run(&device, kernel), 0), row(&out, 0), "{}", kernel.name());
        }
    }
}

#[test]
fn gateup_silu_is_two_products_and_a_quantiser() {
    for (seed, (counts, n, k)) in
        [(vec![3, 40], 128, 128), (vec![66, 0, 1], 200, 80), (vec![5], 64, 192), (vec![7, 33], 130, 36)]
            .into_iter()
            .enumerate()
    {
        let mut gate = Problem::random(&counts, n, k, 31 * seed as u64).gathered(3);
        if seed % 2 == 1 {
            // NaN and infinities on their way through activation and quantiser.
            gate.a8[5] = 0x7F;
            if let Some((_, _, scales)) = &mut gate.experts[0] {
                scales[0] = 3e36;
            }
        }
        let mut up = gate.clone();
        up.experts = Problem::random(&counts, n, k, 77 + seed as u64).experts;
        up.experts[counts.len() - 1] = if seed == 1 { None } else { up.experts[counts.len() - 1].take() };
        for limit in [None, Some(0.75)] {
            let groups = n.div_ceil(128);
            let mut wanted = Quantized { codes: vec![0x5A; gate.rows * n], scales: vec![0.5; gate.rows * groups] };
            let weights = |problem: &Problem| -> Vec<Option<(Vec<u8>, Vec<f32>)>> {
                problem.experts.iter().map(|e| e.as_ref().map(|e| (e.0.clone(), e.2.clone()))).collect()
            };
            let (gates, ups) = (weights(&gate), weights(&up));
            fn operands(of: &[Option<(Vec<u8>, Vec<f32>)>]) -> Vec<Option<Operand<'_>>> {
                of.iter().map(|e| e.as_ref().map(|(codes, scales)| Operand::E4m3 { codes, scales })).collect()
            }
            let (g, u) = (operands(&gates), operands(&ups));
            let kernel = GemmKernel::W8a8GateUp;
            let gating = Gating::Silu { limit };
            reference::gateup_silu(&gate.gemm(kernel, &g), &up.gemm(kernel, &u), &gating, &mut wanted).unwrap();
            let special = wanted.codes.contains(&0x7F) && wanted.scales.contains(&f32::INFINITY);
            assert_eq!(special, seed % 2 == 1 && limit.is_none(), "{counts:?}");
            for (i, device) in [any_emulator(seed)].into_iter().chain(gpu()).enumerate() {
                for two_blocks in [false, true] {
                    let (on, second) = (OnDevice::new(&gate, &device), OnDevice::new(&up, &device));
                    let op = GateUpSilu::new(&device, two_blocks, counts.len(), n, k).unwrap();
                    let (worklist, total) = up.worklist(&device, op.m_tile(), op.n_tiles());
                    let out = Buffer::from_slice(&device, &vec![0x5A_u8; gate.rows * n]).unwrap();
                    let out_scale = Buffer::from_slice(&device, &vec![0.5_f32; gate.rows * groups]).unwrap();
                    let args = GateUpSiluArgs {
                        worklist: &worklist,
                        total: &total,
                        a: &on.a8,
                        a_scale: &on.a_scales,
                        a_rows: gate.a_rows,
                        sorted_token_ids: on.ids.as_ref(),
                        gate: &on.codes,
                        gate_scale: &on.scales,
                        up: &second.codes,
                        up_scale: &second.scales,
                        limit,
                        out: &out,
                        out_scale: &out_scale,
                        rows: gate.rows,
                    };
                    op.launch(args).unwrap();
                    let what =
                        format!("{counts:?}, n {n}, k {k}, limit {limit:?}, two blocks {two_blocks}, device {i}");
                    assert_rows(&what, n, &out.download().unwrap(), &wanted.codes);
                    let bits = |scales: &[f32]| scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
                    assert_rows(&what, groups, &bits(&out_scale.download().unwrap()), &bits(&wanted.scales));
                }
            }
        }
    }
}

/// A constant problem: all codes 1.0, all scales 1.
fn ones(counts: &[usize], n: usize, k: usize) -> Problem {
    Problem::new(counts, n, k, || 0x38, || 1.0)
}

/// Value of row r, column n for every kernel of `kernels` on every device.
#[track_caller]
fn check_values(problem: &Problem, kernels: &[GemmKernel], value: impl Fn(usize, usize) -> f32) {
    problem.check("values", kernels);
    let live = problem.rows - 2;
    for &kernel in kernels {
        let out = problem.reference(kernel);
        for row in 0..live {
            for column in 0..problem.n {
                assert_eq!(out[row * problem.n + column], bf16(value(row, column)), "row {row}, column {column}");
            }
        }
        assert!(out[live * problem.n..].iter().all(|&bits| bits == UNTOUCHED));
    }
}

/// Everything with e4m3 weights.
const E4M3: [GemmKernel; 5] =
    [GemmKernel::Fp8, GemmKernel::W8a8, GemmKernel::W8a8Pm4, GemmKernel::W8a8GateUp, GemmKernel::W8a8Down];

#[test]
fn e3_empty_experts_among_full_ones() {
    let counts = [0, 1, 0, 65, 0, 128, 0];
    let mut problem = ones(&counts, 128, 128);
    for (e, expert) in problem.experts.iter_mut().enumerate() {
        let code = [0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E][e];
        *expert = (counts[e] > 0).then(|| (vec![code; 128 * 128], vec![bf16((e + 1) as f32); 128 * 128], vec![1.0]));
    }
    check_values(&problem, &GemmKernel::ALL, |row, _| {
        if row < 1 {
            256.0
        } else if row < 66 {
            512.0
        } else {
            768.0
        }
    });
}

#[test]
fn f1_half_a_scale_block() {
    for (k, scales, value) in [(320, vec![1.0, 2.0, 4.0], 640.0), (192, vec![1.0, 2.0], 256.0), (80, vec![1.0], 80.0)] {
        let mut problem = ones(&[1], 128, k);
        if let Some(expert) = &mut problem.experts[0] {
            expert.2 = scales;
        }
        check_values(&problem, &E4M3, |_, _| value);
    }
}

#[test]
fn f4_columns_off_the_tile() {
    for n in [96, 1, 63, 65] {
        let mut problem = ones(&[5], n, 128);
        for row in 0..5 {
            let code = [0x38, 0x40, 0x44, 0x48, 0x4A][row];
            problem.a8[row * 128..][..128].fill(code);
            problem.a16[row * 128..][..128].fill(bf16((row + 1) as f32));
        }
        check_values(&problem, &GemmKernel::ALL, |row, _| 128.0 * (row + 1) as f32);
    }
}

#[test]
fn f8_rows_off_the_tile() {
    for rows in [1, 63, 64, 65, 127, 129] {
        let mut problem = ones(&[rows], 16, 384);
        for r in 0..rows {
            for g in 0..3 {
                problem.a_scales[3 * r + g] = 2f32.powi(((r + g) % 4) as i32);
            }
        }
        let value = |r: usize| (0..3).map(|g| 128.0 * 2f32.powi(((r + g) % 4) as i32)).sum();
        check_values(&problem, &W8A8, |row, _| value(row));
        assert_eq!([0, 1, 2, 3].map(value), [896.0, 1792.0, 1664.0, 1408.0]);
    }
}

#[test]
fn j1_scales_of_a_second_wave_of_rows() {
    let mut problem = ones(&[256], 256, 128);
    for row in 0..256 {
        problem.a_scales[row] = if row < 128 { 2.0 } else { 4.0 };
    }
    if let Some(expert) = &mut problem.experts[0] {
        expert.2 = vec![1.0, 2.0];
    }
    let value = |row, column| 128.0 * if row < 128 { 2.0 } else { 4.0 } * if column < 128 { 1.0 } else { 2.0 };
    check_values(&problem, &W8A8, value);
}

#[test]
fn j3_scales_are_not_transposed() {
    let mut problem = ones(&[3], 256, 256);
    for row in 0..3 {
        problem.a8[row * 256 + 128..][..128].fill(0);
        problem.a16[row * 256 + 128..][..128].fill(0);
    }
    if let Some(expert) = &mut problem.experts[0] {
        expert.2 = vec![1.0, 2.0, 4.0, 8.0];
    }
    check_values(&problem, &E4M3, |_, column| if column < 128 { 128.0 } else { 512.0 });
    if let Some((codes, values, _)) = &mut problem.experts[0] {
        codes[128 * 256..].fill(0);
        values[128 * 256..].fill(0);
    }
    check_values(&problem, &E4M3, |_, column| if column < 128 { 128.0 } else { 0.0 });
}

#[test]
fn j5_scales_advance_along_k() {
    let mut problem = ones(&[2], 64, 512);
    if let Some(expert) = &mut problem.experts[0] {
        expert.2 = vec![1.0, 2.0, 4.0, 8.0];
    }
    check_values(&problem, &E4M3, |_, _| 1920.0);
    problem.a_scales = [8.0, 4.0, 2.0, 1.0].repeat(2);
    check_values(&problem, &W8A8, |_, _| 4096.0);
}

/// Scales enter every 64 k: a sum that cancels between the halves of a block shows where.
#[test]
fn scales_enter_every_64_k() {
    let mut problem = ones(&[1], 8, 128);
    // 28,224 + 2^-9 and -28,224 in the halves: a third of each is rounded to 2^-10 where scales enter every 64 k.
    problem.a8[..64].fill(0x7E);
    problem.a8[64..].fill(0xFE);
    (problem.a8[1], problem.a8[127]) = (0x01, 0x00);
    problem.a_scales = vec![1.0];
    if let Some(expert) = &mut problem.experts[0] {
        expert.2 = vec![1.0 / 3.0];
    }
    problem.check("cancelling halves", &W8A8);
    let folded = problem.reference(GemmKernel::W8a8);
    problem.a16 = problem.a8.iter().map(|&code| bf16(reference::math::e4m3(code))).collect();
    assert_ne!(folded, problem.reference(GemmKernel::Fp8), "a fold every 128 gives other bits");
}

#[test]
fn e1_no_rows() {
    for device in [any_emulator(1)].into_iter().chain(gpu()) {
        let problem = Problem::random(&[0, 0], 32, 64, 1);
        for kernel in GemmKernel::ALL {
            assert!(problem.run(&device, kernel).iter().all(|&bits| bits == UNTOUCHED));
            let mut none = problem.clone();
            none.rows = 0;
            assert!(none.run(&device, kernel).is_empty());
        }
        Problem::random(&[1], 32, 64, 1).check("afterwards", &GemmKernel::ALL);
    }
}

#[test]
fn g3_more_row_tiles_than_a_grid_has_in_y() {
    let problem = ones(&[3], 16, 64);
    let Some(device) = gpu() else {
        // A block for each of 65,536 tiles takes the emulator too long; the limit is arithmetic of the host.
        let device = any_emulator(1);
        let op = GroupedGemm::new(&device, GemmKernel::W8a8, 4096, 1 << 20, 16).unwrap();
        let on = OnDevice::new(&problem, &device);
        let out = Buffer::<u16>::new(&device, 5 * 16).unwrap();
        let none = Buffer::new(&device, 1).unwrap();
        let args = GemmArgs {
            tiles: Tiles::Dense { expert_offsets: &on.offsets, max_m_tiles: 65_536 },
            ..on.args(&problem, GemmKernel::W8a8, &none, &none, &out)
        };
        assert!(op.launch(args).is_err());
        return;
    };
    for max_m_tiles in [65_535, 65_536] {
        let on = OnDevice::new(&problem, &device);
        let op = GroupedGemm::new(&device, GemmKernel::W8a8, 1, 16, 64).unwrap();
        let out = Buffer::from_slice(&device, &[UNTOUCHED; 5 * 16]).unwrap();
        let (worklist, total) = problem.worklist(&device, 64, 1);
        let mut args = on.args(&problem, GemmKernel::W8a8, &worklist, &total, &out);
        args.tiles = Tiles::Dense { expert_offsets: &on.offsets, max_m_tiles };
        op.launch(args).unwrap();
        assert_eq!(out.download().unwrap()[..48], [bf16(64.0); 48]);
    }
}

#[test]
fn m1_buffers_that_are_too_short_are_named() {
    let device = any_emulator(0);
    let problem = Problem::random(&[3, 2], 24, 160, 2).gathered(1).with_bias(1);
    for kernel in GemmKernel::ALL {
        let op = GroupedGemm::new(&device, kernel, 2, 24, 160).unwrap();
        let (worklist, total) = problem.worklist(&device, op.m_tile(), op.n_tiles());
        let out = Buffer::<u16>::new(&device, problem.rows * 24).unwrap();
        let shorter = |change: &dyn Fn(&mut Problem)| {
            let mut problem = problem.clone();
            change(&mut problem);
            problem
        };
        let refused = |name: &str, given: &Problem, worklist: &Buffer<u32>, out: &Buffer<u16>| {
            let on = OnDevice::new(given, &device);
            let args = on.args(&problem, kernel, worklist, &total, out);
            match op.launch(args) {
                Err(Error::BufferLength { name: found, .. }) => assert_eq!(found, name, "{}", kernel.name()),
                other => panic!("{name} of {}: {other:?}", kernel.name()),
            }
        };
        let a = shorter(&|problem| {
            problem.a8.pop();
            problem.a16.pop();
        });
        refused("a", &a, &worklist, &out);
        if W8A8.contains(&kernel) {
            refused("a_scale", &shorter(&|problem| assert!(problem.a_scales.pop().is_some())), &worklist, &out);
        }
        refused(
            "sorted_token_ids",
            &shorter(&|problem| assert!(problem.ids.as_mut().unwrap().pop().is_some())),
            &worklist,
            &out,
        );
        refused("bias", &shorter(&|problem| assert!(problem.bias.as_mut().unwrap().pop().is_some())), &worklist, &out);
        refused("out", &problem, &worklist, &Buffer::new(&device, problem.rows * 24 - 1).unwrap());
        match kernel {
            GemmKernel::W8a8 => {
                let offsets = shorter(&|problem| assert!(problem.offsets.pop().is_some()));
                refused("expert_offsets", &offsets, &worklist, &out);
            }
            _ => refused("worklist", &problem, &Buffer::new(&device, 7).unwrap(), &out),
        }
        // Tables of another size, and activations of another kind.
        let on = OnDevice::new(&problem, &device);
        let wrong = GroupedGemm::new(&device, kernel, 2, 24, 176).unwrap();
        let error = wrong.launch(GemmArgs { a_rows: 1, ..on.args(&problem, kernel, &worklist, &total, &out) });
        assert!(error.unwrap_err().to_string().contains("weights"));
        let takes_bf16 = matches!(kernel, GemmKernel::Fp8 | GemmKernel::Bf16);
        let other = if takes_bf16 { GemmKernel::W8a8 } else { GemmKernel::Bf16 };
        let a = on.args(&problem, other, &worklist, &total, &out).a;
        let error = op.launch(GemmArgs { a, ..on.args(&problem, kernel, &worklist, &total, &out) });
        assert!(error.unwrap_err().to_string().contains("argument `a`"));
        problem.run(&device, kernel);
    }
    for (name, experts, n, k) in [("num_experts", 0, 1, 1), ("n", 1, 0, 1), ("k", 1, 1, 0), ("num_experts", 4097, 1, 1)]
    {
        let error = GroupedGemm::new(&device, GemmKernel::Bf16, experts, n, k).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
