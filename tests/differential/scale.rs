//! Every operation of a layer with FP8 or BF16 experts at the sizes of models, on the GPU: all forms of an operation against each
//! other in full, and against the exact reference where that can be computed, in full at one layer and on samples at the others.
//!
//! The operations run one after the other as a layer has them, each on what the one before it gave. What is compared is a
//! [`Results`], so that a fault can be planted in it; the emulator runs the same code on small layers.

use crate::common::{any_emulator, gpu};
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::Random;
use megamoe::ops::gemm::{Activations, GateUpSilu, GateUpSiluArgs, GemmArgs, GemmKernel, GroupedGemm, Tiles, Weights};
use megamoe::ops::router::{RouterGemm, RouterGemmStrict};
use megamoe::ops::silu_mul::{GateUp, Quantised, SiluMul, Tuning};
use megamoe::ops::sort::{SortInputs, SortOutputs, SortPlan};
use megamoe::ops::topk::{Logits, TopK};
use megamoe::ops::unpermute::{self, Rounding, Routed, SharedExpert, SharedGate};
use megamoe::ops::worklist::{self, Items, WorklistInputs};
use megamoe::ops::{ExpertTable, Rows, quant};
use megamoe::reference::{self, GemmKind, Operand, Quantized, Sorted};
use megamoe::{Gating, Routing, Scoring};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The kernels that must all give the bits of W8A8.
const W8A8: [GemmKernel; 4] = [GemmKernel::W8a8, GemmKernel::W8a8Pm4, GemmKernel::W8a8GateUp, GemmKernel::W8a8Down];

/// What every byte of an output is before a launch.
const UNTOUCHED: u8 = 0x5A;

/// Experts with weights of their own; the others point to the same memory.
const DISTINCT: usize = 16;

/// Rows and tokens of a sample, and its columns: one group that shares a scale.
const SAMPLE: usize = 64;
const COLUMNS: usize = 128;

const GATING: Gating = Gating::Silu { limit: None };

/// A layer that people run, or a small one.
#[derive(Clone, Copy, Debug)]
struct Layer {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
}

/// Where tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    /// To the experts that the router chooses; every 61st pair to none.
    Routed,
    /// All pairs to one expert.
    OneExpert,
}

/// One e4m3 matrix of each distinct expert.
struct Fp8 {
    codes: Vec<Vec<u8>>,
    scales: Vec<Vec<f32>>,
}

/// Weights of a layer.
struct Experts {
    gate: Fp8,
    up: Fp8,
    down: Fp8,
    gate16: Vec<Vec<u16>>,
    down16: Vec<Vec<u16>>,
    /// Distinct weights of each expert. Neighbours differ, and so do experts 16 apart.
    of: Vec<usize>,
    /// [E, hidden].
    router: Vec<u16>,
}

/// `len` elements, made in parallel, four of each 64 random bits.
fn drawn<T: Copy + Default + Send>(seed: u64, len: usize, four: impl Fn(u64) -> [T; 4] + Sync) -> Vec<T> {
    let mut all = vec![T::default(); len];
    all.par_chunks_mut(1 << 14).enumerate().for_each(|(part, elements)| {
        let mut random = Random(seed << 32 | part as u64);
        for to in elements.chunks_mut(4) {
            to.copy_from_slice(&four(random.next())[..to.len()]);
        }
    });
    all
}

/// e4m3 codes of all kinds but NaN.
fn codes(seed: u64, len: usize) -> Vec<u8> {
    let code = |bits: u64| if bits as u8 & 0x7F == 0x7F { bits as u8 ^ 1 } else { bits as u8 };
    drawn(seed, len, |bits| [0, 8, 16, 24].map(|shift| code(bits >> shift)))
}

/// bf16 of both signs over four powers of two, below 2^`end`.
fn values(seed: u64, len: usize, end: i32) -> Vec<u16> {
    let first = (127 + end - 4) as u16;
    let value = |bits: u16| (bits & 0x807F) | (first + (bits >> 7 & 3)) << 7;
    drawn(seed, len, |bits| [0, 16, 32, 48].map(|shift| value((bits >> shift) as u16)))
}

impl Fp8 {
    /// Matrices [n, k] whose products with activations of size 1 are of size 1 too.
    fn new(seed: u64, count: usize, n: usize, k: usize) -> Self {
        let matrix = |i: usize| codes(seed + i as u64, n * k);
        let scale = |i: usize| {
            let mut random = Random(seed ^ i as u64);
            (0..n.div_ceil(128) * k.div_ceil(128)).map(|_| (1 + random.next() % 64) as f32 / 131_072.0).collect()
        };
        Fp8 { codes: (0..count).map(matrix).collect(), scales: (0..count).map(scale).collect() }
    }

    fn operands(&self, of: &[usize]) -> Vec<Option<Operand<'_>>> {
        of.iter().map(|&i| Some(Operand::E4m3 { codes: &self.codes[i], scales: &self.scales[i] })).collect()
    }
}

impl Experts {
    fn new(layer: Layer) -> Self {
        let Layer { hidden, intermediate, experts, .. } = layer;
        let distinct = experts.min(DISTINCT);
        let wide = |seed: u64| (0..distinct).map(|i| values(seed + i as u64, hidden * intermediate, -5)).collect();
        Experts {
            gate: Fp8::new(100, distinct, intermediate, hidden),
            up: Fp8::new(200, distinct, intermediate, hidden),
            down: Fp8::new(300, distinct, hidden, intermediate),
            gate16: wide(400),
            down16: wide(500),
            of: (0..experts).map(|expert| (expert + expert / DISTINCT) % distinct).collect(),
            router: values(600, experts * hidden, -4),
        }
    }
}

/// Tables of one matrix of all experts.
fn table<T: megamoe::device::Element>(device: &DeviceHandle, of: &[usize], matrices: &[Vec<T>]) -> ExpertTable<T> {
    let buffers: Vec<_> = matrices.iter().map(|m| Arc::new(Buffer::from_slice(device, m).unwrap())).collect();
    let len = matrices[0].len();
    ExpertTable::new("weights", device, len, of.iter().map(|&i| Some(buffers[i].clone())).collect()).unwrap()
}

/// Codes and scales.
type Fp8Tables = (ExpertTable<u8>, ExpertTable<f32>);

/// The same on a device.
struct OnDevice {
    layer: Layer,
    device: DeviceHandle,
    gate: Fp8Tables,
    up: Fp8Tables,
    down: Fp8Tables,
    gate16: ExpertTable<u16>,
    down16: ExpertTable<u16>,
    router: Buffer<u16>,
    silu: SiluMul,
}

/// One projection: what the GEMMs over it have in common.
struct Projection<'a> {
    n: usize,
    k: usize,
    a_rows: usize,
    ids: Option<&'a Buffer<i32>>,
    offsets: &'a Buffer<i32>,
    rows: usize,
    /// Rows of the fullest expert.
    fullest: usize,
}

/// A work-list as a device made it.
#[derive(Clone)]
struct List {
    m_tile: u32,
    n_tiles: u32,
    words: Vec<u32>,
}

/// Results of the forms of one operation, by the form's name.
type Forms<T> = Vec<(&'static str, T)>;

/// What the operations of a layer gave, and what they were given.
#[derive(Clone)]
struct Results {
    tokens: usize,
    x: Vec<u16>,
    gate_w: Vec<u16>,
    logits: Vec<f32>,
    strict: Vec<u16>,
    chosen: reference::TopK,
    /// What was sorted: `chosen`, or another spread.
    ids: Vec<i32>,
    sorted: Sorted,
    lists: Vec<List>,
    packed: Vec<List>,
    x8: Quantized,
    gate: Forms<Vec<u16>>,
    up: Vec<u16>,
    activated: Forms<Vec<u16>>,
    activated8: Forms<Quantized>,
    down: Forms<Vec<u16>>,
    fp8: [Vec<u16>; 2],
    bf16: [Vec<u16>; 2],
    reduced: Vec<u16>,
    /// With one rounding, and with two.
    blended: [Vec<u16>; 2],
}

impl OnDevice {
    fn new(device: &DeviceHandle, layer: Layer, experts: &Experts) -> Self {
        let fp8 = |m: &Fp8| (table(device, &experts.of, &m.codes), table(device, &experts.of, &m.scales));
        quant::prepare(device).unwrap();
        worklist::prepare(device).unwrap();
        unpermute::prepare(device).unwrap();
        OnDevice {
            layer,
            device: device.clone(),
            gate: fp8(&experts.gate),
            up: fp8(&experts.up),
            down: fp8(&experts.down),
            gate16: table(device, &experts.of, &experts.gate16),
            down16: table(device, &experts.of, &experts.down16),
            router: Buffer::from_slice(device, &experts.router).unwrap(),
            silu: SiluMul::new(device, GATING).unwrap(),
        }
    }

    /// A buffer whose bytes are all [`UNTOUCHED`].
    fn untouched<T: megamoe::device::Element>(&self, len: usize) -> Buffer<T> {
        let buffer = Buffer::new(&self.device, len).unwrap();
        buffer.fill(UNTOUCHED).unwrap();
        buffer
    }

    /// The work-list that a kernel takes, on the device and as it is; its items in the packed form too, where there is one.
    fn list(
        &self,
        projection: &Projection<'_>,
        (m_tile, n_tiles): (u32, u32),
        results: &mut Results,
    ) -> (Buffer<u32>, Buffer<u32>) {
        let (m, n) = (m_tile as usize, n_tiles as usize);
        let inputs = WorklistInputs {
            pairs: projection.rows,
            experts: self.layer.experts,
            expert_offsets: projection.offsets,
            gate: None,
            up: None,
            n_tiles: n,
            m_tile: m,
        };
        let capacity = worklist::capacity(projection.rows, self.layer.experts, n, m).unwrap();
        let make = |items: Items| {
            let (list, total) = (self.untouched::<u32>(capacity * items.words()), self.untouched::<u32>(1));
            worklist::enqueue(&self.device, items, inputs, &list, &total).unwrap();
            let count = total.download().unwrap()[0] as usize;
            let mut words = list.download().unwrap();
            words.truncate(count * items.words());
            (list, total, List { m_tile, n_tiles, words })
        };
        if n <= 64 {
            results.packed.push(make(Items::Packed6).2);
        }
        let (list, total, made) = make(Items::Wide);
        results.lists.push(made);
        (list, total)
    }

    fn gemm(
        &self,
        kernel: GemmKernel,
        projection: &Projection<'_>,
        a: Activations<'_>,
        weights: Weights<'_>,
        results: &mut Results,
    ) -> Buffer<u16> {
        let Projection { n, k, a_rows, ids, offsets, rows, fullest } = *projection;
        let op = GroupedGemm::new(&self.device, kernel, self.layer.experts, n, k).unwrap();
        let out = self.untouched(rows * n);
        let (worklist, total);
        let tiles = match kernel {
            GemmKernel::W8a8 => {
                Tiles::Dense { expert_offsets: offsets, max_m_tiles: fullest.div_ceil(op.m_tile() as usize) }
            }
            _ => {
                (worklist, total) = self.list(projection, (op.m_tile(), op.n_tiles()), results);
                Tiles::Listed { worklist: &worklist, total: &total }
            }
        };
        op.launch(GemmArgs { tiles, a, a_rows, sorted_token_ids: ids, weights, bias: None, out: &out, rows }).unwrap();
        out
    }

    /// The whole layer on `tokens` tokens.
    fn run(&self, tokens: usize, spread: Spread, seed: u64) -> Results {
        let Layer { hidden, intermediate, experts, top_k, .. } = self.layer;
        let (device, pairs) = (&self.device, tokens * top_k);
        let (x, gate_w) = (values(seed, tokens * hidden, 1), values(seed + 1, hidden, -4));
        let on_device = Buffer::from_slice(device, &x).unwrap();
        let gate_on_device = Buffer::from_slice(device, &gate_w).unwrap();

        let router = RouterGemm::new(device, hidden, experts).unwrap();
        let logits = self.untouched(tokens * experts);
        router.launch(&on_device, &self.router, None, tokens, &logits).unwrap();
        let strict = self.untouched(tokens * experts);
        let router = RouterGemmStrict::new(device, hidden, experts).unwrap();
        router.launch(&on_device, &self.router, tokens, &strict).unwrap();
        let (ids, weights) = (self.untouched::<i32>(pairs), self.untouched::<f32>(pairs));
        let topk = TopK::new(device, experts, routing(top_k)).unwrap();
        topk.launch(Logits::F32(&logits), None, tokens, &ids, &weights).unwrap();
        let chosen = reference::TopK { ids: ids.download().unwrap(), weights: weights.download().unwrap() };
        let ids = match spread {
            Spread::Routed => {
                let live = |(pair, &id): (usize, &i32)| if pair % 61 == 60 { -1 } else { id };
                chosen.ids.iter().enumerate().map(live).collect()
            }
            Spread::OneExpert => vec![experts as i32 * 2 / 3; pairs],
        };

        let lists: [Buffer<i32>; 3] = std::array::from_fn(|_| self.untouched(pairs));
        let [sorted_token_ids, sorted_pairs, token_to_perm] = &lists;
        let offsets = self.untouched::<i32>(experts + 1);
        let status = Buffer::from_slice(device, &[0]).unwrap();
        let on_device_ids = Buffer::from_slice(device, &ids).unwrap();
        let sort = SortPlan::new(device, tokens, top_k, experts).unwrap();
        let expert_offsets = &offsets;
        let to = SortOutputs { expert_offsets, sorted_token_ids, sorted_pairs, token_to_perm, status: &status };
        sort.enqueue(SortInputs { tokens, ids: &on_device_ids, gate: None, up: None, down: None }, to).unwrap();
        let sorted = Sorted {
            expert_offsets: offsets.download().unwrap(),
            sorted_token_ids: sorted_token_ids.download().unwrap(),
            sorted_pairs: sorted_pairs.download().unwrap(),
            token_to_perm: token_to_perm.download().unwrap(),
            bad_expert_id: status.download().unwrap()[0] != 0,
        };
        let fullest = sorted.expert_offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as usize;

        let (x_codes, x_scales) =
            (self.untouched::<u8>(tokens * hidden), self.untouched::<f32>(tokens * hidden.div_ceil(128)));
        let rows = Rows::contiguous(&on_device, hidden);
        quant::enqueue(device, rows, tokens, hidden, &x_codes, &x_scales).unwrap();
        let mut results = Results {
            tokens,
            logits: logits.download().unwrap(),
            strict: strict.download().unwrap(),
            chosen,
            ids,
            sorted,
            lists: vec![],
            packed: vec![],
            x8: Quantized { codes: x_codes.download().unwrap(), scales: x_scales.download().unwrap() },
            gate: vec![],
            up: vec![],
            activated: vec![],
            activated8: vec![],
            down: vec![],
            fp8: Default::default(),
            bf16: Default::default(),
            reduced: vec![],
            blended: Default::default(),
            x,
            gate_w,
        };

        let ids = Some(sorted_token_ids);
        let first =
            Projection { n: intermediate, k: hidden, a_rows: tokens, ids, offsets: &offsets, rows: pairs, fullest };
        let e4m3 = Activations::E4m3 { codes: &x_codes, scales: &x_scales };
        let [gate_weights, up_weights, down_weights] =
            [&self.gate, &self.up, &self.down].map(|(codes, scales)| Weights::E4m3 { codes, scales });
        let mut gate = None;
        for kernel in W8A8 {
            let out = self.gemm(kernel, &first, e4m3, gate_weights, &mut results);
            results.gate.push((kernel.name(), out.download().unwrap()));
            gate = Some(out);
        }
        let gate = gate.unwrap();
        let up = self.gemm(GemmKernel::W8a8GateUp, &first, e4m3, up_weights, &mut results);
        results.up = up.download().unwrap();

        let from = GateUp { gate: Rows::contiguous(&gate, intermediate), up: Rows::contiguous(&up, intermediate) };
        let (width, groups) = (intermediate, intermediate.div_ceil(128));
        let activated = self.untouched::<u16>(pairs * width);
        for (name, in_table) in [("silu_mul, table", true), ("silu_mul", false)] {
            activated.fill(UNTOUCHED).unwrap();
            let tuning = Tuning { table: Some(in_table), ..Tuning::default() };
            self.silu.enqueue_with(from, pairs, width, &activated, tuning).unwrap();
            results.activated.push((name, activated.download().unwrap()));
        }
        let (codes, scales) = (self.untouched::<u8>(pairs * width), self.untouched::<f32>(pairs * groups));
        let take = || Quantized { codes: codes.download().unwrap(), scales: scales.download().unwrap() };
        let clear = || {
            codes.fill(UNTOUCHED).unwrap();
            scales.fill(UNTOUCHED).unwrap();
        };
        for (name, in_table) in [("silu_mul_quant_fp8, table", true), ("silu_mul_quant_fp8", false)] {
            clear();
            let tuning = Tuning { table: Some(in_table), ..Tuning::default() };
            let to = Quantised { codes: &codes, scales: &scales, copy: None };
            self.silu.enqueue_quant_with(from, pairs, width, to, tuning).unwrap();
            results.activated8.push((name, take()));
        }
        clear();
        quant::enqueue(device, Rows::contiguous(&activated, width), pairs, width, &codes, &scales).unwrap();
        results.activated8.push(("silu_mul and per_token_group_quant_fp8", take()));
        for (name, two_blocks) in [("moe_w8a8_gateup_silu_e4m3_w1", false), ("moe_w8a8_gateup_silu_e4m3_w2", true)] {
            clear();
            let op = GateUpSilu::new(device, two_blocks, experts, intermediate, hidden).unwrap();
            let (worklist, total) = self.list(&first, (op.m_tile(), op.n_tiles()), &mut results);
            op.launch(GateUpSiluArgs {
                worklist: &worklist,
                total: &total,
                a: &x_codes,
                a_scale: &x_scales,
                a_rows: tokens,
                sorted_token_ids: ids,
                gate: &self.gate.0,
                gate_scale: &self.gate.1,
                up: &self.up.0,
                up_scale: &self.up.1,
                limit: None,
                out: &codes,
                out_scale: &scales,
                rows: pairs,
            })
            .unwrap();
            results.activated8.push((name, take()));
        }

        let second = Projection {
            n: hidden,
            k: intermediate,
            a_rows: pairs,
            ids: None,
            offsets: &offsets,
            rows: pairs,
            fullest,
        };
        let e4m3 = Activations::E4m3 { codes: &codes, scales: &scales };
        let mut y = None;
        for kernel in W8A8 {
            let out = self.gemm(kernel, &second, e4m3, down_weights, &mut results);
            results.down.push((kernel.name(), out.download().unwrap()));
            y = Some(out);
        }
        let y = y.unwrap();

        let narrow = [Activations::Bf16(&on_device), Activations::Bf16(&activated)];
        results.fp8 = [(0, &first, gate_weights), (1, &second, down_weights)].map(|(i, projection, weights)| {
            self.gemm(GemmKernel::Fp8, projection, narrow[i], weights, &mut results).download().unwrap()
        });
        results.bf16 = [(0, &first, &self.gate16), (1, &second, &self.down16)].map(|(i, projection, weights)| {
            let weights = Weights::Bf16(weights);
            self.gemm(GemmKernel::Bf16, projection, narrow[i], weights, &mut results).download().unwrap()
        });

        let routed = Routed {
            tokens,
            top_k,
            experts,
            output: hidden,
            y: &y,
            token_to_perm,
            weights: &weights,
            expert_offsets: &offsets,
        };
        let out = self.untouched::<u16>(tokens * hidden);
        unpermute::reduce(device, routed, &out).unwrap();
        results.reduced = out.download().unwrap();
        let gate = SharedGate { x: &on_device, gate_w: &gate_on_device, hidden };
        // Any rows will do as the shared expert's.
        let shared = SharedExpert { shared: &on_device, gate: Some(gate) };
        results.blended = [Rounding::Once, Rounding::Twice].map(|rounding| {
            out.fill(UNTOUCHED).unwrap();
            unpermute::reduce_blend(device, rounding, routed, shared, &out).unwrap();
            out.download().unwrap()
        });
        results
    }
}

fn routing(top_k: usize) -> Routing {
    Routing { scoring: Scoring::Softmax, top_k, renormalize: true, groups: None, scale: 1.0 }
}

/// How much of what takes the CPU long is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    Full,
    /// [`SAMPLE`] tokens, and [`SAMPLE`] rows by [`COLUMNS`] columns of each kind of expert.
    Sample(u64),
}

/// Rows and columns of an output.
struct Part {
    what: &'static str,
    rows: Vec<usize>,
    columns: Range<usize>,
}

/// Where two lists differ first, found in parallel.
fn first_difference<T: PartialEq + Sync>(wanted: &[T], got: &[T]) -> Option<usize> {
    if wanted.len() != got.len() {
        return Some(wanted.len().min(got.len()));
    }
    let part = 1 << 16;
    let parts = wanted.par_chunks(part).zip(got.par_chunks(part)).enumerate();
    parts.find_map_first(|(i, (wanted, got))| Some(i * part + wanted.iter().zip(got).position(|(w, g)| w != g)?))
}

/// `Err` that says where `got` is not `wanted`; rows of `width` elements.
fn same<T: PartialEq + Sync>(what: &str, width: usize, wanted: &[T], got: &[T]) -> Result<(), String> {
    match first_difference(wanted, got) {
        Some(i) => Err(format!("{what}: row {}, column {}", i / width, i % width)),
        None => Ok(()),
    }
}

fn bits(values: &[f32]) -> &[u32] {
    bytemuck::cast_slice(values)
}

fn same_quantized(what: &str, width: usize, wanted: &Quantized, got: &Quantized) -> Result<(), String> {
    same(&format!("{what}, scales"), width.div_ceil(128), bits(&wanted.scales), bits(&got.scales))?;
    same(&format!("{what}, codes"), width, &wanted.codes, &got.codes)
}

/// Rows `rows` of a matrix of `width` columns.
fn rows_of<T: Copy>(values: &[T], width: usize, rows: &[usize]) -> Vec<T> {
    rows.iter().flat_map(|&row| &values[row * width..][..width]).copied().collect()
}

impl Results {
    fn live(&self) -> usize {
        self.sorted.expert_offsets.last().map_or(0, |&rows| rows as usize)
    }

    /// `count` of 0..`of`, first and last among them; all where there are no more.
    fn pick(random: &mut Random, of: Range<usize>, count: usize) -> Vec<usize> {
        if of.len() <= count {
            return of.collect();
        }
        let mut chosen: Vec<_> = (2..count).map(|_| of.start + random.next() as usize % of.len()).collect();
        chosen.extend([of.start, of.end - 1]);
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    fn tokens_of(&self, extent: Extent) -> Vec<usize> {
        match extent {
            Extent::Full => (0..self.tokens).collect(),
            Extent::Sample(seed) => Self::pick(&mut Random(seed), 0..self.tokens, SAMPLE),
        }
    }

    /// Live rows of what kinds of experts, and columns of `n`.
    fn parts(&self, extent: Extent, n: usize) -> Vec<Part> {
        let Extent::Sample(seed) = extent else {
            return vec![Part { what: "everything", rows: (0..self.live()).collect(), columns: 0..n }];
        };
        let random = &mut Random(seed ^ n as u64);
        let full: Vec<_> = self.sorted.expert_offsets.windows(2).map(|w| w[0] as usize..w[1] as usize).collect();
        let full: Vec<_> = full.into_iter().filter(|rows| !rows.is_empty()).collect();
        let Some(fullest) = full.iter().max_by_key(|rows| rows.len()) else { return vec![] };
        // The last row of an expert is in a tile that is not full, but for one in 128.
        let mut tails: Vec<_> = full.iter().map(|rows| rows.end - 1).collect();
        while tails.len() > SAMPLE {
            tails.swap_remove(random.next() as usize % tails.len());
        }
        let groups = n.div_ceil(COLUMNS);
        let part =
            |what, rows, group: usize| Part { what, rows, columns: group * COLUMNS..n.min((group + 1) * COLUMNS) };
        let anywhere = random.next() as usize % groups;
        let [first, last, fullest] =
            [&full[0], &full[full.len() - 1], fullest].map(|rows| Self::pick(random, rows.clone(), SAMPLE));
        vec![
            part("the first expert", first, 0),
            part("the last expert", last, groups - 1),
            part("the fullest expert", fullest, anywhere),
            part("last rows of experts", tails, groups - 1),
        ]
    }

    /// `Err` that names the first result that is wrong.
    fn check(&self, layer: Layer, experts: &Experts, extent: Extent) -> Result<(), String> {
        self.check_forms(layer)?;
        self.check_routing(layer, experts, extent)?;
        self.check_rows(layer, extent)?;
        self.check_gemms(layer, experts, extent)
    }

    /// All forms of an operation give the same, and leave dead rows alone.
    fn check_forms(&self, layer: Layer) -> Result<(), String> {
        let Layer { hidden, intermediate, .. } = layer;
        for (forms, n) in [(&self.gate, intermediate), (&self.down, hidden), (&self.activated, intermediate)] {
            for (name, form) in &forms[1..] {
                same(&format!("{name} and {}, {n} columns", forms[0].0), n, &forms[0].1, form)?;
            }
        }
        let live = self.live();
        let words = u16::from_ne_bytes([UNTOUCHED; 2]);
        let gemms = [(&self.gate[0].1, intermediate), (&self.up, intermediate), (&self.down[0].1, hidden)];
        let others = [(&self.fp8[0], intermediate), (&self.fp8[1], hidden)];
        let wide = [(&self.bf16[0], intermediate), (&self.bf16[1], hidden)];
        for (out, n) in gemms.into_iter().chain(others).chain(wide) {
            if out.len() != n * self.ids.len() || out[live * n..].iter().any(|&word| word != words) {
                return Err(format!("rows from {live} on are no longer as they were"));
            }
        }
        let groups = intermediate.div_ceil(128);
        for (name, form) in &self.activated8[1..] {
            // Fused kernels leave dead rows alone, the others quantise whatever lies there.
            let cut = |q: &Quantized| Quantized {
                codes: q.codes[..live * intermediate].to_vec(),
                scales: q.scales[..live * groups].to_vec(),
            };
            let (first, form) = (&self.activated8[0], form);
            same_quantized(&format!("{name} and {}", first.0), intermediate, &cut(&first.1), &cut(form))?;
        }
        Ok(())
    }

    /// Router, choice of experts, sort and work-lists.
    fn check_routing(&self, layer: Layer, experts: &Experts, extent: Extent) -> Result<(), String> {
        let Layer { hidden, top_k, .. } = layer;
        let tokens = self.tokens_of(extent);
        let x = rows_of(&self.x, hidden, &tokens);
        let wanted = reference::router_gemm(&x, &experts.router, None, hidden).unwrap();
        same("router_gemm", layer.experts, bits(&wanted), bits(&rows_of(&self.logits, layer.experts, &tokens)))?;
        let wanted = reference::router_gemm_strict(&x, &experts.router, hidden).unwrap();
        same("router_gemm_strict", layer.experts, &wanted, &rows_of(&self.strict, layer.experts, &tokens))?;
        let wanted = reference::topk(&self.logits, layer.experts, None, &routing(top_k)).unwrap();
        same("topk, ids", top_k, &wanted.ids, &self.chosen.ids)?;
        same("topk, weights", top_k, bits(&wanted.weights), bits(&self.chosen.weights))?;

        let resident = vec![true; layer.experts];
        let wanted = reference::sort_by_expert(&self.ids, top_k, &resident).unwrap();
        if wanted != self.sorted {
            return Err("sort_by_expert".to_owned());
        }
        for List { m_tile, n_tiles, words } in &self.lists {
            let wanted = reference::tile_worklist(&wanted.expert_offsets, &resident, *n_tiles, *m_tile).unwrap();
            same("tile_worklist", 4, wanted.as_flattened(), words)?;
        }
        for List { m_tile, n_tiles, words } in &self.packed {
            let offsets = &wanted.expert_offsets;
            let wanted = reference::tile_worklist_packed6(offsets, &resident, *n_tiles, *m_tile).unwrap();
            same("tile_worklist_packed6", 2, wanted.as_flattened(), words)?;
        }
        Ok(())
    }

    /// Quantisers, activation and weighted sums: whole rows.
    fn check_rows(&self, layer: Layer, extent: Extent) -> Result<(), String> {
        let Layer { hidden, intermediate, top_k, .. } = layer;
        let tokens = self.tokens_of(extent);
        let pick = |quantized: &Quantized, cols: usize, rows: &[usize]| Quantized {
            codes: rows_of(&quantized.codes, cols, rows),
            scales: rows_of(&quantized.scales, cols.div_ceil(128), rows),
        };
        let x = rows_of(&self.x, hidden, &tokens);
        let wanted = reference::per_token_group_quant_fp8(&x, tokens.len(), hidden, hidden).unwrap();
        same_quantized("per_token_group_quant_fp8", hidden, &wanted, &pick(&self.x8, hidden, &tokens))?;

        let live = self.live();
        let rows = match extent {
            Extent::Full => (0..live).collect(),
            Extent::Sample(seed) => Self::pick(&mut Random(seed + 1), 0..live, 2 * SAMPLE),
        };
        let [gate, up] = [&self.gate[0].1, &self.up].map(|values| rows_of(values, intermediate, &rows));
        let wanted = reference::silu_mul(&gate, &up, &GATING).unwrap();
        same("silu_mul", intermediate, &wanted, &rows_of(&self.activated[0].1, intermediate, &rows))?;
        let wanted = reference::silu_mul_quant_fp8(&gate, &up, rows.len(), intermediate, &GATING).unwrap();
        let got = pick(&self.activated8[0].1, intermediate, &rows);
        same_quantized("silu_mul_quant_fp8", intermediate, &wanted, &got)?;

        let perm = rows_of(&self.sorted.token_to_perm, top_k, &tokens);
        let weights = rows_of(&self.chosen.weights, top_k, &tokens);
        let y = &self.down[0].1;
        let live = live as i32;
        let wanted = reference::unpermute_reduce(y, hidden, &perm, &weights, top_k, live).unwrap();
        same("unpermute_reduce", hidden, &wanted, &rows_of(&self.reduced, hidden, &tokens))?;
        let gates = reference::shared_gate(&x, Some(&self.gate_w), hidden).unwrap();
        let once = reference::weighted_sum_blend(y, hidden, &perm, &weights, top_k, live, &x, &gates).unwrap();
        same("weighted_sum_blend", hidden, &once, &rows_of(&self.blended[0], hidden, &tokens))?;
        let twice = reference::unpermute_blend(y, hidden, &perm, &weights, top_k, live, &x, &gates).unwrap();
        same("unpermute_blend", hidden, &twice, &rows_of(&self.blended[1], hidden, &tokens))
    }

    /// Grouped GEMMs.
    fn check_gemms(&self, layer: Layer, experts: &Experts, extent: Extent) -> Result<(), String> {
        let Layer { hidden, intermediate, .. } = layer;
        let Experts { of, gate, up, down, gate16, down16, .. } = experts;
        let activated8 = &self.activated8[0].1;
        let x8 = Operand::E4m3 { codes: &self.x8.codes, scales: &self.x8.scales };
        let activated8 = Operand::E4m3 { codes: &activated8.codes, scales: &activated8.scales };
        let (x, activated) = (Operand::Bf16(&self.x), Operand::Bf16(&self.activated[0].1));
        let [gate, up, down] = [gate, up, down].map(|matrices| matrices.operands(of));
        let [gate16, down16] =
            [gate16, down16].map(|matrices| of.iter().map(|&i| Some(Operand::Bf16(&matrices[i]))).collect::<Vec<_>>());
        for (name, kind, a, weights, out, first) in [
            ("moe_w8a8_grouped_gemm, gate", GemmKind::W8a8, x8, &gate, &self.gate[0].1, true),
            ("moe_w8a8_grouped_gemm_e4m3_gu, up", GemmKind::W8a8, x8, &up, &self.up, true),
            ("moe_w8a8_grouped_gemm, down", GemmKind::W8a8, activated8, &down, &self.down[0].1, false),
            ("moe_fp8_grouped_gemm, gate", GemmKind::Fp8, x, &gate, &self.fp8[0], true),
            ("moe_fp8_grouped_gemm, down", GemmKind::Fp8, activated, &down, &self.fp8[1], false),
            ("moe_bf16_grouped_gemm, gate", GemmKind::Bf16, x, &gate16, &self.bf16[0], true),
            ("moe_bf16_grouped_gemm, down", GemmKind::Bf16, activated, &down16, &self.bf16[1], false),
        ] {
            let (n, k) = if first { (intermediate, hidden) } else { (hidden, intermediate) };
            let gemm = reference::GroupedGemm {
                kind,
                n,
                k,
                expert_offsets: &self.sorted.expert_offsets,
                sorted_token_ids: first.then_some(&self.sorted.sorted_token_ids),
                a,
                weights,
                bias: None,
            };
            for Part { what, rows, columns } in self.parts(extent, n) {
                let wanted = gemm.at(&rows, columns.clone()).unwrap();
                for (row, wanted) in rows.into_iter().zip(wanted) {
                    let got = &out[row * n..][columns.clone()];
                    if let Some(i) = first_difference(&wanted, got) {
                        let (column, got, wanted) = (columns.start + i, got[i], wanted[i]);
                        return Err(format!(
                            "{name}, {what}: row {row}, column {column}: {got:#06x}, not {wanted:#06x}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Small layers, for the emulator: experts with columns off the groups of 128, and on them.
const SMALL: [Layer; 2] = [
    Layer { name: "small", hidden: 256, intermediate: 144, experts: 5, top_k: 2 },
    Layer { name: "smaller", hidden: 128, intermediate: 256, experts: 18, top_k: 3 },
];

/// Where there is no GPU, this is what runs the code of the large ones.
#[test]
fn small_layers() {
    for (number, layer) in SMALL.into_iter().enumerate() {
        let experts = Experts::new(layer);
        for (turn, tokens) in [1, 23].into_iter().enumerate() {
            let device = any_emulator(number + turn);
            let on_device = OnDevice::new(&device, layer, &experts);
            for spread in [Spread::Routed, Spread::OneExpert] {
                let results = on_device.run(tokens, spread, 7);
                for extent in [Extent::Full, Extent::Sample(3)] {
                    let result = results.check(layer, &experts, extent);
                    assert_eq!(result, Ok(()), "{layer:?}, {tokens} tokens, {spread:?}, {extent:?}");
                }
            }
        }
    }
}

/// One bit of any result is noticed: of one form alone, and of all of them where the reference computes it.
#[test]
fn planted_faults_are_noticed() {
    let layer = SMALL[0];
    let Layer { hidden, intermediate, .. } = layer;
    let experts = Experts::new(layer);
    let results = OnDevice::new(&any_emulator(1), layer, &experts).run(40, Spread::Routed, 8);
    let dead = results.live() * intermediate;
    assert!(dead < results.up.len(), "no dead rows");
    for extent in [Extent::Full, Extent::Sample(5)] {
        let finds = |what: &str, plant: &dyn Fn(&mut Results)| {
            let mut wrong = results.clone();
            plant(&mut wrong);
            let error = wrong.check(layer, &experts, extent).expect_err(what);
            assert!(error.contains(what), "{what}: {error}");
        };
        assert_eq!(results.check(layer, &experts, extent), Ok(()));
        for (form, kernel) in W8A8.iter().enumerate().skip(1) {
            finds(kernel.name(), &|r| r.gate[form].1[dead - 1] ^= 1);
            finds(kernel.name(), &|r| r.down[form].1[3] ^= 1);
        }
        for form in 1..results.activated8.len() {
            finds(results.activated8[form].0, &|r| r.activated8[form].1.codes[dead - 1] ^= 1);
            finds("scales", &|r| r.activated8[form].1.scales[0] *= 2.0);
        }
        finds("silu_mul, table", &|r| r.activated[1].1[0] ^= 1);
        finds("no longer as they were", &|r| r.up[dead] ^= 1);
        finds("no longer as they were", &|r| r.bf16[1].truncate(9));
        finds("router_gemm:", &|r| r.logits[layer.experts + 1] += 0.5);
        finds("router_gemm_strict:", &|r| r.strict[layer.experts + 1] ^= 1);
        finds("topk, ids", &|r| r.chosen.ids.swap(2, 3));
        finds("topk, weights", &|r| r.chosen.weights[5] += 0.25);
        finds("sort_by_expert", &|r| r.sorted.sorted_pairs.swap(0, 1));
        finds("tile_worklist", &|r| r.lists[1].words[3] ^= 1);
        finds("tile_worklist_packed6", &|r| r.packed[2].words[1] ^= 1);
        finds("per_token_group_quant_fp8", &|r| r.x8.codes[9 * hidden] ^= 1);
        finds("silu_mul:", &|r| r.activated.iter_mut().for_each(|form| form.1[1] ^= 1));
        finds("silu_mul_quant_fp8", &|r| r.activated8.iter_mut().for_each(|form| form.1.codes[2] ^= 1));
        finds("unpermute_reduce", &|r| r.reduced[hidden] ^= 1);
        finds("weighted_sum_blend", &|r| r.blended[0][hidden] ^= 1);
        finds("unpermute_blend", &|r| r.blended[1][hidden] ^= 1);
        // In each part of a product.
        for (name, n) in [
            ("moe_fp8_grouped_gemm, gate", intermediate),
            ("moe_fp8_grouped_gemm, down", hidden),
            ("moe_bf16_grouped_gemm, gate", intermediate),
            ("moe_bf16_grouped_gemm, down", hidden),
        ] {
            for part in results.parts(extent, n) {
                let at = part.rows[part.rows.len() - 1] * n + part.columns.end - 1;
                finds(name, &|r| {
                    let outputs = if name.contains("fp8") { &mut r.fp8 } else { &mut r.bf16 };
                    outputs[usize::from(n == hidden)][at] ^= 1;
                });
            }
        }
        // Weights that are not those of the expert.
        let mut others = Experts::new(layer);
        others.of.rotate_left(1);
        let error = results.check(layer, &others, extent).unwrap_err();
        assert!(error.starts_with("moe_w8a8_grouped_gemm, gate"), "{error}");
    }
}

/// `layer` on the GPU, one at a time: the largest takes ten gigabytes on either side.
#[track_caller]
fn large(layer: Layer, tokens: &[usize], extent: Extent) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let Some(device) = gpu() else { return };
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let experts = Experts::new(layer);
    let on_device = OnDevice::new(&device, layer, &experts);
    for &tokens in tokens {
        for spread in [Spread::Routed, Spread::OneExpert] {
            let start = Instant::now();
            let results = on_device.run(tokens, spread, tokens as u64);
            let ran = start.elapsed();
            let result = results.check(layer, &experts, extent);
            println!("{}, {tokens} tokens, {spread:?}: {ran:.1?}, checked {:.1?}", layer.name, start.elapsed() - ran);
            assert_eq!(result, Ok(()), "{layer:?}, {tokens} tokens, {spread:?}");
        }
    }
}

const TOKENS: [usize; 4] = [1, 64, 1024, 8192];

#[test]
fn e256_in_full() {
    let layer = Layer { name: "e256", hidden: 2048, intermediate: 512, experts: 256, top_k: 8 };
    large(layer, &[1, 64, 300], Extent::Full);
}

#[test]
fn qwen3_30b() {
    let layer = Layer { name: "qwen3_30b", hidden: 2048, intermediate: 768, experts: 128, top_k: 8 };
    large(layer, &TOKENS, Extent::Sample(11));
}

#[test]
fn glm45_air() {
    let layer = Layer { name: "glm45_air", hidden: 4096, intermediate: 1408, experts: 128, top_k: 8 };
    large(layer, &TOKENS, Extent::Sample(12));
}

#[test]
fn qwen3_235b() {
    let layer = Layer { name: "qwen3_235b", hidden: 4096, intermediate: 1536, experts: 128, top_k: 8 };
    large(layer, &TOKENS, Extent::Sample(13));
}

#[test]
fn dsv3_tp8() {
    let layer = Layer { name: "dsv3_tp8", hidden: 7168, intermediate: 256, experts: 256, top_k: 8 };
    large(layer, &TOKENS, Extent::Sample(14));
}

#[test]
fn dsv3_full() {
    let layer = Layer { name: "dsv3_full", hidden: 7168, intermediate: 2048, experts: 256, top_k: 8 };
    large(layer, &TOKENS, Extent::Sample(15));
}
