//! Choice of experts and weights on inputs, against the reference.

use crate::common::{any_emulator, argument_of, devices, gpu, own_gpu, scale};
use half::bf16;
use megamoe::device::{Buffer, DeviceHandle, Emulator};
use megamoe::diff::Random;
use megamoe::ops::gate_topk::{GateTopK, GateWeights};
use megamoe::ops::router::{RouterGemm, RouterGemmStrict};
use megamoe::ops::topk::{Logits, ScaleRows, TopK};
use megamoe::reference;
use megamoe::{Groups, Routing, Scoring};

pub const SCORINGS: [Scoring; 4] =
    [Scoring::Softmax, Scoring::SelectedSoftmax, Scoring::Sigmoid, Scoring::SqrtSoftplus];

/// Ids and weights by bits.
pub type Chosen = (Vec<i32>, Vec<u32>);

pub fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|weight| weight.to_bits()).collect()
}

pub fn plain(scoring: Scoring, top_k: usize) -> Routing {
    Routing { scoring, top_k, renormalize: false, groups: None, scale: 1.0 }
}

/// Elements behind an output that must stay as they are.
pub const GUARD: usize = 64;

/// Outputs of `pairs` pairs, of bytes 0xFF, with guards behind.
pub fn outputs(device: &DeviceHandle, pairs: usize) -> (Buffer<i32>, Buffer<f32>) {
    let ids = Buffer::from_slice(device, &vec![-1; pairs + GUARD]).unwrap();
    let weights = Buffer::from_slice(device, &vec![f32::from_bits(u32::MAX); pairs + GUARD]).unwrap();
    (ids, weights)
}

/// What was written, whose guards must be whole.
#[track_caller]
pub fn taken((ids, weights): (Buffer<i32>, Buffer<f32>), pairs: usize) -> Chosen {
    let (mut ids, mut weights) = (ids.download().unwrap(), bits(&weights.download().unwrap()));
    assert!(ids.split_off(pairs).iter().all(|&id| id == -1), "ids written behind the last pair");
    assert!(weights.split_off(pairs).iter().all(|&weight| weight == u32::MAX), "weights written behind the last pair");
    (ids, weights)
}

#[track_caller]
fn run(op: &TopK, device: &DeviceHandle, logits: Logits<'_>, bias: Option<&[f32]>, tokens: usize) -> Chosen {
    let pairs = tokens * op.routing().top_k;
    let bias = bias.map(|bias| Buffer::from_slice(device, bias).unwrap());
    let out = outputs(device, pairs);
    op.launch(logits, bias.as_ref(), tokens, &out.0, &out.1).unwrap();
    taken(out, pairs)
}

/// With f32 logits.
#[track_caller]
fn chosen(device: &DeviceHandle, logits: &[f32], experts: usize, routing: Routing) -> Chosen {
    let op = TopK::new(device, experts, routing).unwrap();
    let given = Buffer::from_slice(device, logits).unwrap();
    run(&op, device, Logits::F32(&given), None, logits.len() / experts)
}

fn wanted(logits: &[f32], experts: usize, bias: Option<&[f32]>, routing: Routing) -> Chosen {
    let result = reference::topk(logits, experts, bias, &routing).unwrap();
    (result.ids, bits(&result.weights))
}

/// First difference of two results, if there is one.
pub fn difference(wanted: &Chosen, got: &Chosen, top_k: usize) -> Option<String> {
    if (wanted.0.len(), wanted.1.len()) != (got.0.len(), got.1.len()) {
        return Some(format!("{} ids and {} weights", got.0.len(), got.1.len()));
    }
    let at = (0..wanted.0.len()).find(|&i| wanted.0[i] != got.0[i] || wanted.1[i] != got.1[i])?;
    let row = at / top_k * top_k..(at / top_k + 1) * top_k;
    let show = |(ids, weights): &Chosen| {
        let weights = weights[row.clone()].iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>();
        format!("{:?} {weights:?}", &ids[row.clone()])
    };
    Some(format!("token {}: {}, not {}", at / top_k, show(got), show(wanted)))
}

/// A row of logits of one of several kinds.
fn row(random: &mut Random, experts: usize) -> Vec<f32> {
    let kind = random.next() % 10;
    (0..experts)
        .map(|_| match (kind, random.next() % 16) {
            (0, _) => f32::NEG_INFINITY,
            (1, _) => f32::NAN,
            // Ties.
            (2, n) => (n % 3) as f32 - 1.0,
            (3, n) => [0.0, -0.0][n as usize % 2],
            // Mostly the same, so that the order of ids decides.
            (4, n) => f32::from(n == 0),
            (5, 0) => f32::NAN,
            (5, 1) => f32::NEG_INFINITY,
            (6, 0..=3) => f32::NEG_INFINITY,
            (6, 4..=5) => -f32::NAN,
            (6, 6) => f32::INFINITY,
            (7, _) => random.in_range(-1.0, 1.0) * 2f32.powi((random.next() % 40) as i32 - 20),
            (8, _) => random.in_range(-200.0, 200.0),
            _ => random.in_range(-4.0, 4.0),
        })
        .collect()
}

fn bias(random: &mut Random, experts: usize) -> Vec<f32> {
    (0..experts)
        .map(|_| match random.next() % 40 {
            0 => f32::NEG_INFINITY,
            1 => 0.0,
            2 => -0.0,
            _ => random.in_range(-0.5, 0.5),
        })
        .collect()
}

/// Every divisor of `experts` that leaves room for `top_k`, with a number to keep.
fn groups(random: &mut Random, experts: usize, top_k: usize) -> Option<Groups> {
    let divisors: Vec<usize> = (1..=experts).filter(|count| experts.is_multiple_of(*count)).collect();
    let count = divisors[random.next() as usize % divisors.len()];
    let least = top_k.div_ceil(experts / count);
    Some(Groups { count, keep: least + random.next() as usize % (count - least + 1) })
}

#[test]
fn equals_the_reference() {
    let mut random = Random(11);
    let sizes =
        [1, 2, 3, 8, 31, 32, 33, 60, 64, 127, 128, 129, 160, 192, 256, 257, 384, 511, 512, 513, 896, 1000, 2048, 4096];
    for (number, experts) in sizes.into_iter().enumerate() {
        for (turn, scoring) in SCORINGS.into_iter().enumerate() {
            for variant in 0..4 {
                let device = match (variant, gpu()) {
                    (3, Some(gpu)) => gpu,
                    _ => any_emulator(number + turn + variant),
                };
                let top_k = 1 + random.next() as usize % experts.min(32);
                let routing = Routing {
                    scoring,
                    top_k,
                    renormalize: random.next().is_multiple_of(2),
                    groups: if variant >= 2 { groups(&mut random, experts, top_k) } else { None },
                    scale: [1.0, 2.5, -0.75][random.next() as usize % 3],
                };
                let bias = (variant % 2 == 1).then(|| bias(&mut random, experts));
                let tokens = scale(&device, if experts > 600 { 3 } else { 11 }, (1_000_000 / experts).min(3001));
                let mut logits: Vec<f32> = (0..tokens).flat_map(|_| row(&mut random, experts)).collect();
                let narrow = random.next().is_multiple_of(3);
                let narrowed: Vec<u16> = logits.iter().map(|&l| bf16::from_f32(l).to_bits()).collect();
                if narrow {
                    logits = narrowed.iter().map(|&l| bf16::from_bits(l).to_f32()).collect();
                }
                let wanted = wanted(&logits, experts, bias.as_deref(), routing);
                let wide = Buffer::from_slice(&device, &logits).unwrap();
                let narrowed = Buffer::from_slice(&device, &narrowed).unwrap();
                let logits = if narrow { Logits::Bf16(&narrowed) } else { Logits::F32(&wide) };
                let op = TopK::new(&device, experts, routing).unwrap();
                for op in [op.clone(), op.with_general_kernel().unwrap()] {
                    let got = run(&op, &device, logits, bias.as_deref(), tokens);
                    if let Some(difference) = difference(&wanted, &got, top_k) {
                        panic!("{experts} experts, bias {}, bf16 {narrow}, {routing:?}: {difference}", bias.is_some());
                    }
                }
            }
        }
    }
}

/// What published models ask for.
#[test]
fn routings_of_models() {
    let mut random = Random(5);
    let deepseek = Routing {
        scoring: Scoring::Sigmoid,
        top_k: 8,
        renormalize: true,
        groups: Some(Groups { count: 8, keep: 4 }),
        scale: 2.5,
    };
    for (experts, biased, routing) in [
        (128, false, Routing { renormalize: true, ..plain(Scoring::Softmax, 8) }),
        (512, false, Routing { renormalize: true, ..plain(Scoring::Softmax, 10) }),
        (256, true, deepseek),
        (160, true, Routing { groups: None, ..deepseek }),
        (896, true, Routing { groups: None, top_k: 16, ..deepseek }),
        (384, true, Routing { scoring: Scoring::SqrtSoftplus, groups: None, scale: 1.5, top_k: 6, ..deepseek }),
        (32, false, plain(Scoring::SelectedSoftmax, 4)),
        (16, false, plain(Scoring::Sigmoid, 1)),
        (768, true, plain(Scoring::Softmax, 12)),
    ] {
        let logits: Vec<f32> = (0..experts * 9).map(|_| random.in_range(-6.0, 6.0)).collect();
        let bias: Option<Vec<f32>> = biased.then(|| (0..experts).map(|_| random.in_range(-0.1, 0.1)).collect());
        let wanted = wanted(&logits, experts, bias.as_deref(), routing);
        for (name, device) in devices() {
            let op = TopK::new(&device, experts, routing).unwrap();
            let given = Buffer::from_slice(&device, &logits).unwrap();
            let got = run(&op, &device, Logits::F32(&given), bias.as_deref(), 9);
            assert_eq!(difference(&wanted, &got, routing.top_k), None, "{name}, {experts} experts");
        }
    }
}

#[test]
fn c1_nan_logits_give_distinct_experts() {
    for scoring in SCORINGS {
        for (_, device) in devices() {
            let (ids, weights) = chosen(&device, &[f32::NAN; 256], 256, plain(scoring, 8));
            assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7]);
            assert_eq!(weights, [0x7FFF_FFFF; 8], "{scoring:?}");
            // Numbers come first, whatever they are.
            let mut logits = [f32::NAN; 256];
            (logits[200], logits[100]) = (f32::NEG_INFINITY, -7.0);
            assert_eq!(chosen(&device, &logits, 256, plain(scoring, 4)).0, [100, 200, 0, 1], "{scoring:?}");
        }
    }
}

#[test]
fn c3_weights_are_never_0_by_0() {
    let inf = f32::NEG_INFINITY;
    for (_, device) in devices() {
        for scoring in [Scoring::Softmax, Scoring::SelectedSoftmax] {
            let routing = |top_k| Routing { renormalize: true, ..plain(scoring, top_k) };
            let (ids, weights) = chosen(&device, &[0.0, inf, 0.0, inf, inf], 5, routing(4));
            assert_eq!((ids, weights), (vec![0, 2, 1, 3], bits(&[0.5, 0.5, 0.0, 0.0])));
            let (ids, weights) = chosen(&device, &[1000.0, 999.0, -1000.0], 3, routing(2));
            assert_eq!(ids, [0, 1]);
            for (weight, near) in weights.into_iter().zip([0.731059, 0.268941]) {
                assert!((f32::from_bits(weight) - near).abs() < 1e-6);
            }
            assert_eq!(bits(&[1.0]), chosen(&device, &[1000.0, 999.0, -1000.0], 3, routing(1)).1);
        }
        for scoring in SCORINGS {
            for renormalize in [false, true] {
                let routing = Routing { renormalize, scale: 2.0, ..plain(scoring, 3) };
                let got = chosen(&device, &[inf; 5], 5, routing);
                assert_eq!(got, (vec![0, 1, 2], bits(&[2.0 / 3.0; 3])), "{scoring:?}");
            }
        }
    }
}

#[test]
fn c5_expert_counts_that_are_no_powers_of_two() {
    for (_, device) in devices() {
        for (experts, ids) in [
            (160, [147, 134, 121, 108, 95, 82, 69, 56]),
            (384, [83, 166, 249, 332, 31, 114, 197, 280]),
            (60, [47, 34, 21, 8, 55, 42, 29, 16]),
        ] {
            let logits: Vec<f32> = (0..experts).map(|e| (37 * e % experts) as f32 / 16.0).collect();
            for tokens in [1, 33, scale(&device, 66, 65_537)] {
                let (got, weights) = chosen(&device, &logits.repeat(tokens), experts, plain(Scoring::Softmax, 8));
                assert_eq!(got, ids.repeat(tokens), "{experts} experts, {tokens} tokens");
                assert_eq!(weights, weights[..8].repeat(tokens));
            }
        }
    }
}

#[test]
fn c7_top_k_and_expert_counts_out_of_range() {
    let device = Emulator::new();
    let refused = |experts, routing| argument_of(&TopK::new(&device, experts, routing).unwrap_err());
    assert_eq!(refused(4, plain(Scoring::Softmax, 8)), "top_k");
    assert_eq!(refused(4, plain(Scoring::Softmax, 0)), "top_k");
    assert_eq!(refused(0, plain(Scoring::Softmax, 1)), "num_experts");
    assert_eq!(refused(64, plain(Scoring::Softmax, 33)), "top_k");
    assert_eq!(refused(4097, plain(Scoring::Softmax, 1)), "num_experts");
    let with = |count, keep| Routing { groups: Some(Groups { count, keep }), ..plain(Scoring::Sigmoid, 8) };
    for (count, keep) in [(0, 1), (7, 2), (8, 0), (8, 9), (64, 7)] {
        assert_eq!(refused(64, with(count, keep)), "groups");
    }
    TopK::new(&device, 64, with(64, 8)).unwrap();
    assert_eq!(refused(64, Routing { scale: f32::NAN, ..plain(Scoring::Sigmoid, 8) }), "scale");
    let error = TopK::new(&device, 4, plain(Scoring::Softmax, 8)).unwrap_err().to_string();
    assert!(error.contains("`top_k` is 8"), "{error}");
    for (_, device) in devices() {
        for scoring in SCORINGS {
            let (ids, _) = chosen(&device, &[0.5, 2.0, -1.0, 1.0], 4, plain(scoring, 4));
            assert_eq!(ids, [1, 3, 0, 2]);
        }
    }
}

/// Exactly top_k ids of 32 bits a token; an `i64` buffer does not compile.
#[test]
fn c9_ids_are_32_bits() {
    for (_, device) in devices() {
        for top_k in [1, 2, 5, 32] {
            for tokens in [1, 3] {
                let logits: Vec<f32> = (0..40 * tokens).map(|e| -(e as f32)).collect();
                // `run` checks the guards.
                let (ids, _) = chosen(&device, &logits, 40, plain(Scoring::Softmax, top_k));
                assert_eq!(ids, (0..top_k as i32).collect::<Vec<_>>().repeat(tokens));
            }
        }
    }
}

#[test]
fn arguments_are_checked() {
    let (device, other) = (Emulator::new(), Emulator::new());
    let op = TopK::new(&device, 4, plain(Scoring::Softmax, 2)).unwrap();
    let floats = |device: &DeviceHandle, len| Buffer::from_slice(device, &vec![0f32; len]).unwrap();
    let ids = |device: &DeviceHandle, len| Buffer::from_slice(device, &vec![0i32; len]).unwrap();
    let (logits, bias, index, weight) = (floats(&device, 12), floats(&device, 4), ids(&device, 6), floats(&device, 6));
    let refused =
        |logits: &Buffer<f32>, bias: Option<&Buffer<f32>>, tokens: usize, ids: &Buffer<i32>, weights: &Buffer<f32>| {
            argument_of(&op.launch(Logits::F32(logits), bias, tokens, ids, weights).unwrap_err())
        };
    op.launch(Logits::F32(&logits), Some(&bias), 3, &index, &weight).unwrap();
    assert_eq!(refused(&floats(&device, 11), None, 3, &index, &weight), "logits");
    assert_eq!(refused(&floats(&other, 12), None, 3, &index, &weight), "logits");
    for bias in [floats(&device, 3), floats(&device, 5), floats(&other, 4)] {
        assert_eq!(refused(&logits, Some(&bias), 3, &index, &weight), "bias");
    }
    assert_eq!(refused(&logits, None, 3, &ids(&device, 5), &weight), "expert_indices");
    assert_eq!(refused(&logits, None, 3, &ids(&other, 6), &weight), "expert_indices");
    assert_eq!(refused(&logits, None, 3, &index, &floats(&device, 5)), "expert_weights");
    assert_eq!(refused(&logits, None, 1 << 30, &index, &weight), "tokens");
    assert_eq!(refused(&logits, None, usize::MAX, &index, &weight), "tokens");
    let narrow = Buffer::from_slice(&device, &[0u16; 11]).unwrap();
    let error = op.launch(Logits::Bf16(&narrow), None, 3, &index, &weight).unwrap_err();
    assert_eq!(argument_of(&error), "logits");
    // No tokens: nothing is launched, nothing written.
    let empty = floats(&device, 0);
    op.launch(Logits::F32(&empty), None, 0, &ids(&device, 0), &empty).unwrap();
    assert_eq!(run(&op, &device, Logits::F32(&empty), None, 0), (vec![], vec![]));
}

/// Launches can be captured from the first on, and a replay reads what the buffers hold then.
#[test]
fn routers_in_a_graph() {
    let Some(gpu) = own_gpu() else { return };
    let device: DeviceHandle = gpu.clone();
    let (tokens, experts, hidden) = (5, 64, 512);
    let mut random = Random(41);
    let mut draw = |len| crate::router::values(&mut random, len, 0);
    let w = draw(experts * hidden);
    let gate_codes: Vec<u8> = draw(experts * hidden / 4).into_iter().flat_map(u16::to_le_bytes).collect();
    let gate_scales = vec![0x38; experts * hidden / 16];
    let routing = Routing { renormalize: true, ..plain(Scoring::Softmax, 8) };
    let x = Buffer::from_slice(&device, &draw(tokens * hidden)).unwrap();
    let weight = Buffer::from_slice(&device, &w).unwrap();
    let codes = Buffer::from_slice(&device, &gate_codes).unwrap();
    let scales = Buffer::from_slice(&device, &gate_scales).unwrap();
    let gate_weights = GateWeights { codes: &codes, scales: &scales, scale2: 0.5 };
    let logits = Buffer::<f32>::new(&device, tokens * experts).unwrap();
    let strict_logits = Buffer::<u16>::new(&device, tokens * experts).unwrap();
    let (router, strict) =
        (RouterGemm::new(&device, hidden, experts).unwrap(), RouterGemmStrict::new(&device, hidden, experts).unwrap());
    let choice = TopK::new(&device, experts, routing).unwrap();
    let gate = GateTopK::new(&device, hidden, experts, 8, true).unwrap();
    let [first, second, third] = [(); 3].map(|()| outputs(&device, tokens * 8));
    let graph = gpu
        .capture(|| {
            router.launch(&x, &weight, None, tokens, &logits)?;
            choice.launch(Logits::F32(&logits), None, tokens, &first.0, &first.1)?;
            strict.launch(&x, &weight, tokens, &strict_logits)?;
            choice.launch(Logits::Bf16(&strict_logits), None, tokens, &second.0, &second.1)?;
            gate.launch(&x, gate_weights, tokens, &third.0, &third.1)
        })
        .unwrap();
    for _ in 0..2 {
        let now = draw(tokens * hidden);
        x.upload(&now).unwrap();
        graph.launch().unwrap();
        let of = |out: &(Buffer<i32>, Buffer<f32>)| {
            let (mut ids, mut weights) = (out.0.download().unwrap(), bits(&out.1.download().unwrap()));
            ids.truncate(tokens * 8);
            weights.truncate(tokens * 8);
            (ids, weights)
        };
        let logits = reference::router_gemm(&now, &w, None, hidden).unwrap();
        assert_eq!(difference(&wanted(&logits, experts, None, routing), &of(&first), 8), None);
        let narrow = reference::router_gemm_strict(&now, &w, hidden).unwrap();
        let logits: Vec<f32> = narrow.into_iter().map(|l| bf16::from_bits(l).to_f32()).collect();
        assert_eq!(difference(&wanted(&logits, experts, None, routing), &of(&second), 8), None);
        let result = reference::gate_topk(&now, &gate_codes, &gate_scales, 0.5, hidden, 8, true).unwrap();
        assert_eq!(difference(&(result.ids, bits(&result.weights)), &of(&third), 8), None);
    }
}

/// The comparison notices an exchange of two experts and a last place of a weight.
#[test]
fn planted_faults_are_noticed() {
    let good: Chosen = (vec![3, 1, 0, 2], bits(&[0.5, 0.25, 0.75, 0.125]));
    assert_eq!(difference(&good, &good, 2), None);
    let mut exchanged = good.clone();
    exchanged.0.swap(2, 3);
    assert!(difference(&good, &exchanged, 2).unwrap().starts_with("token 1"));
    let mut off = good.clone();
    off.1[0] += 1;
    assert!(difference(&good, &off, 2).unwrap().starts_with("token 0"));
    let short = (good.0[..3].to_vec(), good.1[..3].to_vec());
    assert!(difference(&good, &short, 2).is_some());
    // A guard behind the ids.
    let device = Emulator::new();
    let (ids, weights) = outputs(&device, 2);
    ids.upload(&[0, 1, 7]).unwrap();
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| taken((ids, weights), 2))).is_err());
    // The reference's own order matters: with the logits reversed it chooses others.
    let logits = [1.0, 1.0, 0.0];
    let reversed = [0.0, 1.0, 1.0];
    let routing = plain(Scoring::Softmax, 2);
    assert_ne!(chosen(&device, &logits, 3, routing), wanted(&reversed, 3, None, routing));
}

#[test]
fn scaled_rows_equal_the_reference() {
    let mut random = Random(3);
    for (number, (hidden, top_k, tokens)) in
        [(1, 1, 3), (7, 2, 5), (8, 1, 9), (40, 3, 4), (264, 1, 17), (100, 32, 2)].into_iter().enumerate()
    {
        for device in std::iter::once(any_emulator(number)).chain(gpu()) {
            let (experts, pairs) = (6, tokens * top_k);
            let x: Vec<u16> = (0..tokens * hidden).map(|_| random.next() as u16).collect();
            let ids: Vec<i32> = (0..pairs).map(|_| (random.next() % 9) as i32 - 2).collect();
            let weights: Vec<f32> = (0..pairs)
                .map(|_| match random.next() % 8 {
                    0 => f32::NAN,
                    1 => f32::INFINITY,
                    2 => -0.0,
                    _ => random.in_range(-2.0, 2.0),
                })
                .collect();
            let wanted = reference::scale_rows(&x, hidden, &ids, &weights, top_k, experts).unwrap();
            let op = ScaleRows::new(&device, hidden, experts, top_k).unwrap();
            let out = Buffer::from_slice(&device, &vec![0xA5A5u16; pairs * hidden + GUARD]).unwrap();
            let (x, ids) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &ids).unwrap());
            let weights = Buffer::from_slice(&device, &weights).unwrap();
            op.launch(&x, &ids, &weights, tokens, &out).unwrap();
            let mut got = out.download().unwrap();
            assert!(got.split_off(pairs * hidden).iter().all(|&bits| bits == 0xA5A5), "written behind the last row");
            assert_eq!(got, wanted, "hidden {hidden}, top-{top_k}");
        }
    }
    let device = Emulator::new();
    assert_eq!(argument_of(&ScaleRows::new(&device, 0, 4, 1).unwrap_err()), "hidden");
    assert_eq!(argument_of(&ScaleRows::new(&device, 8, 0, 1).unwrap_err()), "num_experts");
    assert_eq!(argument_of(&ScaleRows::new(&device, 8, 4, 33).unwrap_err()), "top_k");
    let op = ScaleRows::new(&device, 8, 4, 2).unwrap();
    let narrow = |len: usize| Buffer::from_slice(&device, &vec![0u16; len]).unwrap();
    let (ids, weights) = outputs(&device, 0);
    let few = Buffer::from_slice(&device, &[0i32; 3]).unwrap();
    let few_weights = Buffer::from_slice(&device, &[0f32; 3]).unwrap();
    let refused = |x: &Buffer<u16>, ids: &Buffer<i32>, weights: &Buffer<f32>, out: &Buffer<u16>| {
        argument_of(&op.launch(x, ids, weights, 2, out).unwrap_err())
    };
    assert_eq!(refused(&narrow(15), &ids, &weights, &narrow(32)), "x");
    assert_eq!(refused(&narrow(16), &few, &weights, &narrow(32)), "topk_ids");
    assert_eq!(refused(&narrow(16), &ids, &few_weights, &narrow(32)), "topk_weights");
    assert_eq!(refused(&narrow(16), &ids, &weights, &narrow(31)), "out");
    op.launch(&narrow(0), &few, &few_weights, 0, &narrow(0)).unwrap();
    // Weights belong to slots: exchanged, they give other rows.
    let x = [0x3F80u16; 8];
    let of = |weights: [f32; 2]| reference::scale_rows(&x, 8, &[0, 1], &weights, 2, 4).unwrap();
    assert_ne!(of([1.0, 2.0]), of([2.0, 1.0]));
}
