//! Whole mixture-of-experts blocks of checkpoints: experts in every format, router, shared expert, gating.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use megamoe::checkpoint::{Checkpoint, ExpertFormat, Experts, MoeWeights, Reference, SharedWeights, TensorStore};
use megamoe::formats::quantize::quantize_mxfp4;
use megamoe::formats::{DenseExpert, DenseExperts, DenseMatrix, ExpertTensors, Fp4Experts, GlobalScale, e4m3, float16};
use megamoe::reference::topk;
use megamoe::{Error, Gating, Groups, Routing, Scoring, WeightFormat};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

// ---- what other tools wrote ---------------------------------------------------------------------------------------

/// The committed checkpoints, and those in the folder that MEGAMOE_CHECKPOINTS names.
fn folders() -> Vec<PathBuf> {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let names = ["qwen3moe-nvfp4-modelopt", "qwen3moe-nvfp4a16-ct", "deepseekv3-tiny-nvfp4a16-ct"];
    let mut folders: Vec<PathBuf> = names.map(|name| testdata.join(name)).to_vec();
    match std::env::var_os("MEGAMOE_CHECKPOINTS") {
        None => eprintln!("skipped: further checkpoints (MEGAMOE_CHECKPOINTS names no folder)"),
        Some(root) => {
            let entries =
                fs::read_dir(&root).expect("the folder of MEGAMOE_CHECKPOINTS").map(|entry| entry.unwrap().path());
            folders.extend(entries.filter(|path| path.join("reference.safetensors").exists()));
            assert!(folders.len() > names.len(), "no checkpoint in {root:?}");
        }
    }
    folders
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Gate, up and down of a dense expert as f32.
fn dequantize(expert: &DenseExpert, hidden: usize, intermediate: usize) -> [Vec<f32>; 3] {
    [
        expert.gate.dequantize(intermediate, hidden).unwrap(),
        expert.up.dequantize(intermediate, hidden).unwrap(),
        expert.down.dequantize(hidden, intermediate).unwrap(),
    ]
}

fn dequantize_fp4(expert: &ExpertTensors<'_>) -> [Vec<f32>; 3] {
    [&expert.gate, &expert.up, &expert.down].map(|matrix| matrix.dequantize())
}

/// Something for gate, up and down.
type Triple = [Vec<f32>; 3];

/// Matrices and biases of every routed expert.
fn routed(moe: &MoeWeights) -> Vec<(Triple, Triple)> {
    let (hidden, intermediate) = (moe.shape.hidden, moe.shape.intermediate);
    match &moe.experts {
        Experts::Dense(experts) => {
            let biases = |expert: &DenseExpert| expert.biases.clone().unwrap_or_default();
            experts.experts().iter().map(|e| (dequantize(e, hidden, intermediate), biases(e))).collect()
        }
        Experts::Fp4(experts) => {
            (0..moe.shape.experts).map(|e| (dequantize_fp4(&experts.unpack(e)), Default::default())).collect()
        }
    }
}

#[test]
fn expert_0_of_every_checkpoint_has_the_bits_of_its_tool() {
    for folder in folders() {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let reference = Reference::open(&folder).unwrap();
        let get = |name: String| reference.tensors().find(&name).map(|tensor| tensor.f32().unwrap());
        let expected = ["gate", "up", "down"].map(|name| get(format!("expert0.{name}_proj_f32")).unwrap());
        let shape = checkpoint.load_moe(reference.layer).unwrap().shape;
        match checkpoint.load_experts(reference.layer).unwrap() {
            Experts::Dense(experts) => {
                let expert = &experts.experts()[0];
                for (ours, theirs) in dequantize(expert, shape.hidden, shape.intermediate).iter().zip(&expected) {
                    assert!(bits(ours) == bits(theirs), "{}", folder.display());
                }
                let biases = ["gate", "up", "down"].map(|name| get(format!("expert0.{name}_bias_f32")));
                assert_eq!(expert.biases.is_some(), biases[0].is_some(), "{}", folder.display());
                for (ours, theirs) in expert.biases.iter().flatten().zip(biases.into_iter().flatten()) {
                    assert_eq!(bits(ours), bits(&theirs), "{}", folder.display());
                }
            }
            Experts::Fp4(_) => {
                let expert = &checkpoint.nvfp4_tensors(reference.layer).unwrap()[0];
                let multiplied = matches!(expert.gate.global(), GlobalScale::Multiplier(_));
                for (ours, theirs) in dequantize_fp4(expert).iter().zip(&expected) {
                    // ModelOpt's own table has +0 for the code of -0.
                    let equal = if multiplied { ours == theirs } else { bits(ours) == bits(theirs) };
                    assert!(equal, "{}", folder.display());
                }
            }
        }
        assert!(expected[0] != expected[1], "gate and up differ in the reference");
    }
}

fn dot(row: &[f32], x: &[f64]) -> f64 {
    row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Output of one expert, in f64.
fn mlp([gate, up, down]: &[Vec<f32>; 3], [bg, bu, bd]: &[Vec<f32>; 3], gating: Gating, x: &[f64]) -> Vec<f64> {
    let bias = |bias: &[f32], row: usize| bias.get(row).map_or(0.0, |&bias| f64::from(bias));
    let rows = gate.len() / x.len();
    let h: Vec<f64> = (0..rows)
        .map(|row| {
            let [g, u] = [(gate, bg), (up, bu)].map(|(w, b)| dot(&w[row * x.len()..][..x.len()], x) + bias(b, row));
            match gating {
                Gating::Silu { limit } => {
                    assert!(limit.is_none());
                    g * sigmoid(g) * u
                }
                Gating::SwigluOai { alpha, limit } => {
                    let limit = f64::from(limit);
                    let (g, u) = (g.min(limit), u.clamp(-limit, limit));
                    (u + 1.0) * (g * sigmoid(f64::from(alpha) * g))
                }
            }
        })
        .collect();
    down.chunks_exact(rows).enumerate().map(|(row, w)| dot(w, &h) + bias(bd, row)).collect()
}

fn widen(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|&bits| float16::bf16_to_f32(bits)).collect()
}

#[test]
fn every_checkpoint_gives_the_output_of_its_reference() {
    for folder in folders() {
        let name = folder.display();
        let reference = Reference::open(&folder).unwrap();
        let moe = Checkpoint::open(&folder).unwrap().load_moe(reference.layer).unwrap();
        let (hidden, experts, top_k) = (moe.shape.hidden, moe.shape.experts, moe.shape.top_k);
        let router = moe.router.as_ref().unwrap();
        let weight = widen(&router.weight);
        let x: Vec<Vec<f64>> =
            reference.x.chunks_exact(hidden).map(|x| widen(x).into_iter().map(f64::from).collect()).collect();

        // Logits, and the choice made of them.
        let logits: Vec<f32> = x
            .iter()
            .flat_map(|x| {
                let bias = |e: usize| router.bias.as_ref().map_or(0.0, |bias| f64::from(bias[e]));
                (0..experts)
                    .map(move |e| (e, bias(e)))
                    .map(|(e, b)| (dot(&weight[e * hidden..][..hidden], x) + b) as f32)
            })
            .collect();
        let theirs = reference.router_logits.as_ref().unwrap();
        let largest = theirs.iter().fold(0f32, |a, x| a.max(x.abs()));
        for (ours, theirs) in logits.iter().zip(theirs) {
            assert!((ours - theirs).abs() <= 1e-5 * largest, "{name}: logit {ours}, {theirs} in the reference");
        }
        assert_eq!(router.routing.top_k, reference.top_k);
        let chosen = topk(&logits, experts, router.correction_bias.as_deref(), &router.routing).unwrap();
        let sorted = |ids: &[i32], weights: &[f32]| {
            let mut pairs: Vec<(i32, f32)> = ids.iter().copied().zip(weights.iter().copied()).collect();
            pairs.sort_by_key(|pair| pair.0);
            pairs
        };
        for token in 0..reference.tokens {
            let range = token * top_k..(token + 1) * top_k;
            let ours = sorted(&chosen.ids[range.clone()], &chosen.weights[range.clone()]);
            let theirs = sorted(&reference.topk_ids[range.clone()], &reference.topk_weights[range]);
            for ((id, weight), (other, expected)) in ours.iter().zip(&theirs) {
                assert_eq!(id, other, "{name}, token {token}");
                assert!((weight - expected).abs() <= 1e-5, "{name}, token {token}: {weight}, {expected}");
            }
        }

        // Routed experts with the reference's choice, and the block with its shared expert.
        let weights = routed(&moe);
        let shared = moe.shared.as_ref().map(|shared| match shared {
            SharedWeights::Dense(shared) => dequantize(&shared.expert, hidden, shared.intermediate),
            SharedWeights::Fp4 { expert, .. } => dequantize_fp4(&expert.unpack(0)),
        });
        let (mut routed_worst, mut worst) = (0f64, 0f64);
        let out = reference.out.as_ref().unwrap();
        for (token, x) in x.iter().enumerate() {
            let mut sum = vec![0f64; hidden];
            for slot in token * top_k..(token + 1) * top_k {
                let (matrices, biases) = &weights[reference.topk_ids[slot] as usize];
                let y = mlp(matrices, biases, moe.gating, x);
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += f64::from(reference.topk_weights[slot]) * y);
            }
            let at = token * hidden..(token + 1) * hidden;
            for (ours, theirs) in sum.iter().zip(&reference.routed_out[at.clone()]) {
                routed_worst = routed_worst.max((ours - f64::from(*theirs)).abs());
            }
            if let Some(shared) = &shared {
                let y = mlp(shared, &Default::default(), moe.gating, x);
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
            }
            for (ours, theirs) in sum.iter().zip(&out[at]) {
                worst = worst.max((ours - f64::from(*theirs)).abs());
            }
        }
        let largest = |values: &[f32]| f64::from(values.iter().fold(0f32, |a, x| a.max(x.abs())));
        assert!(routed_worst <= 1e-5 * largest(&reference.routed_out), "{name}: {routed_worst}");
        assert!(worst <= 1e-5 * largest(out), "{name}: {worst}");
    }
}

#[test]
fn committed_checkpoints_have_these_routers() {
    let load = |index: usize, layer| Checkpoint::open(&folders()[index]).unwrap().load_moe(layer).unwrap();
    let qwen = load(0, 1);
    let router = qwen.router.unwrap();
    let routing = Routing { scoring: Scoring::Softmax, top_k: 2, renormalize: true, groups: None, scale: 1.0 };
    assert_eq!(router.routing, routing);
    assert!(router.bias.is_none() && router.correction_bias.is_none() && qwen.shared.is_none());
    assert_eq!((qwen.gating, qwen.layer, qwen.experts.format()), (Gating::default(), 1, "nvfp4"));
    let deepseek = load(2, 1);
    let router = deepseek.router.unwrap();
    let groups = Some(Groups { count: 4, keep: 2 });
    let routing = Routing { scoring: Scoring::Sigmoid, top_k: 4, renormalize: true, groups, scale: 2.5 };
    assert_eq!(router.routing, routing);
    assert_eq!(router.correction_bias.unwrap().len(), 16);
    let SharedWeights::Dense(shared) = deepseek.shared.unwrap() else { panic!("the shared expert is bf16") };
    assert_eq!((shared.intermediate, shared.gate), (96, None));
}

// ---- checkpoints made here ----------------------------------------------------------------------------------------

#[derive(Clone)]
struct Raw {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Raw {
    fn u8(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        Raw { dtype, shape: shape.to_vec(), bytes }
    }

    fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self::u8(Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    fn bf16(shape: &[usize], bits: &[u16]) -> Self {
        Self::u8(Dtype::BF16, shape, bits.iter().flat_map(|bits| bits.to_le_bytes()).collect())
    }
}

#[derive(Clone)]
struct Model {
    config: Value,
    tensors: BTreeMap<String, Raw>,
}

const MLP: &str = "model.layers.0.mlp";
const EXPERTS: usize = 3;
const HIDDEN: usize = 160;
const INTERMEDIATE: usize = 96;

/// bf16 bits of small numbers that differ from place to place.
fn pattern(seed: usize, len: usize) -> Vec<u16> {
    let value = |i: usize| ((i * 2654435761 + seed * 40503) >> 7 & 0x3FF) as f32 / 512.0 - 1.0;
    (0..len).map(|i| float16::bf16_from_f32(value(i))).collect()
}

/// Gate, up and down of an expert.
fn parts(expert: usize) -> [Vec<u16>; 3] {
    [0, 1, 2].map(|part| pattern(expert * 3 + part, HIDDEN * INTERMEDIATE))
}

/// Rows become columns.
fn transpose(bits: &[u16], cols: usize) -> Vec<u16> {
    (0..cols).flat_map(|col| bits.iter().skip(col).step_by(cols)).copied().collect()
}

impl Model {
    fn new(model_type: &str) -> Self {
        let config = json!({
            "model_type": model_type, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
            "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": true,
            "hidden_act": "silu",
        });
        let mut model = Model { config, tensors: BTreeMap::new() };
        model.insert("gate.weight", Raw::bf16(&[EXPERTS, HIDDEN], &pattern(99, EXPERTS * HIDDEN)));
        model
    }

    /// `name` is that behind the MLP's prefix.
    fn insert(&mut self, name: &str, raw: Raw) {
        self.tensors.insert(format!("{MLP}.{name}"), raw);
    }

    fn with(&self, name: &str, raw: Raw) -> Self {
        let mut model = self.clone();
        model.insert(name, raw);
        model
    }

    fn without(&self, name: &str) -> Self {
        let mut model = self.clone();
        assert!(model.tensors.remove(&format!("{MLP}.{name}")).is_some(), "{name}");
        model
    }

    fn set(&self, key: &str, value: Value) -> Self {
        let mut model = self.clone();
        model.config[key] = value;
        model
    }

    fn bf16() -> Self {
        let mut model = Self::new("qwen3_moe");
        for expert in 0..EXPERTS {
            model.dense_expert(&format!("experts.{expert}"), &parts(expert));
        }
        model
    }

    fn dense_expert(&mut self, base: &str, [gate, up, down]: &[Vec<u16>; 3]) {
        self.insert(&format!("{base}.gate_proj.weight"), Raw::bf16(&[INTERMEDIATE, HIDDEN], gate));
        self.insert(&format!("{base}.up_proj.weight"), Raw::bf16(&[INTERMEDIATE, HIDDEN], up));
        self.insert(&format!("{base}.down_proj.weight"), Raw::bf16(&[HIDDEN, INTERMEDIATE], down));
    }

    /// Codes of every e4m3 number, and scales that `scale` stores: [1, 2] for gate and up, [2, 1] for down.
    fn fp8(suffix: &str, scale: impl Fn(&[usize], &[f32]) -> Raw) -> Self {
        let mut model = Self::new("qwen3_moe");
        for expert in 0..EXPERTS {
            for (part, name) in ["gate", "up", "down"].into_iter().enumerate() {
                let (shape, grid) =
                    if name == "down" { ([HIDDEN, INTERMEDIATE], [2, 1]) } else { ([INTERMEDIATE, HIDDEN], [1, 2]) };
                let base = format!("experts.{expert}.{name}_proj");
                let codes = fp8_codes(expert, part);
                model.insert(&format!("{base}.weight"), Raw::u8(Dtype::F8_E4M3, &shape, codes));
                model.insert(&format!("{base}.{suffix}"), scale(&grid, &fp8_scales(expert, part)));
            }
        }
        model
    }

    /// As gpt-oss stores bf16 experts: transposed, gate and up by turns, with biases.
    fn gpt_oss() -> Self {
        let mut model = Self::gpt_oss_frame();
        let turns = |expert: usize| {
            let [gate, up, _] = parts(expert);
            let rows = gate.chunks(HIDDEN).zip(up.chunks(HIDDEN)).flat_map(|(gate, up)| [gate, up].concat());
            transpose(&rows.collect::<Vec<u16>>(), HIDDEN)
        };
        let gate_up: Vec<u16> = (0..EXPERTS).flat_map(turns).collect();
        let down: Vec<u16> = (0..EXPERTS).flat_map(|expert| transpose(&parts(expert)[2], INTERMEDIATE)).collect();
        model.insert("experts.gate_up_proj", Raw::bf16(&[EXPERTS, HIDDEN, 2 * INTERMEDIATE], &gate_up));
        model.insert("experts.down_proj", Raw::bf16(&[EXPERTS, INTERMEDIATE, HIDDEN], &down));
        model
    }

    /// What gpt-oss has beside its matrices.
    fn gpt_oss_frame() -> Self {
        let mut model = Self::new("gpt_oss").without("gate.weight");
        for key in ["moe_intermediate_size", "norm_topk_prob"] {
            model.config.as_object_mut().unwrap().remove(key);
        }
        model.insert("router.weight", Raw::bf16(&[EXPERTS, HIDDEN], &pattern(99, EXPERTS * HIDDEN)));
        model.insert("router.bias", Raw::bf16(&[EXPERTS], &pattern(98, EXPERTS)));
        model.insert("experts.gate_up_proj_bias", Raw::bf16(&[EXPERTS, 2 * INTERMEDIATE], &gate_up_biases()));
        model.insert("experts.down_proj_bias", Raw::bf16(&[EXPERTS, HIDDEN], &pattern(96, EXPERTS * HIDDEN)));
        model
    }

    /// gpt-oss as it is published: MXFP4 blocks.
    fn mxfp4() -> Self {
        let mut model = Self::gpt_oss_frame();
        let (mut gate_up, mut down) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for expert in 0..EXPERTS {
            let ExpertTensors { gate, up, down: d } = mxfp4_expert(expert);
            for row in 0..INTERMEDIATE {
                for half in [&gate, &up] {
                    gate_up[0].extend(&half.codes()[row * HIDDEN / 2..][..HIDDEN / 2]);
                    gate_up[1].extend(&half.scales().bytes()[row * HIDDEN / 32..][..HIDDEN / 32]);
                }
            }
            down[0].extend(d.codes());
            down[1].extend(d.scales().bytes());
        }
        for (name, rows, cols, [codes, scales]) in
            [("gate_up", 2 * INTERMEDIATE, HIDDEN, gate_up), ("down", HIDDEN, INTERMEDIATE, down)]
        {
            let base = format!("experts.{name}_proj");
            model.insert(&format!("{base}_blocks"), Raw::u8(Dtype::U8, &[EXPERTS, rows, cols / 32, 16], codes));
            model.insert(&format!("{base}_scales"), Raw::u8(Dtype::U8, &[EXPERTS, rows, cols / 32], scales));
        }
        model
    }

    fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let views = self
            .tensors
            .iter()
            .map(|(name, raw)| (name.as_str(), TensorView::new(raw.dtype, raw.shape.clone(), &raw.bytes).unwrap()));
        let metadata = Some(HashMap::from([("format".to_string(), "pt".to_string())]));
        fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, metadata).unwrap()).unwrap();
        folder
    }

    fn load(&self) -> Result<MoeWeights, Error> {
        Checkpoint::open(self.write().path())?.load_moe(0)
    }

    /// Tensor behind the MLP's prefix, and problem, of the error that loading gives. The file or its folder is named too.
    fn fault(&self) -> (String, String) {
        let folder = self.write();
        match Checkpoint::open(folder.path()).and_then(|checkpoint| checkpoint.load_moe(0)) {
            Err(Error::Tensor { path, tensor, problem }) => {
                let file = folder.path().join("model.safetensors");
                let there = self.tensors.contains_key(&tensor);
                assert!(
                    path == if there { file } else { folder.path().to_path_buf() } || tensor.contains('*'),
                    "{path:?}"
                );
                (tensor.strip_prefix(&format!("{MLP}.")).unwrap_or(&tensor).to_string(), problem)
            }
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn faulty(&self, name: &str, needle: &str) {
        let (tensor, problem) = self.fault();
        assert!(tensor == name && problem.contains(needle), "{tensor}: {problem}");
    }
}

/// Biases of gate and up by turns.
fn gate_up_biases() -> Vec<u16> {
    pattern(97, EXPERTS * 2 * INTERMEDIATE)
}

fn fp8_codes(expert: usize, part: usize) -> Vec<u8> {
    (0..HIDDEN * INTERMEDIATE).map(|i| ((i * 7 + expert * 5 + part) % 0x7F) as u8 | ((i % 2) << 7) as u8).collect()
}

/// Numbers that bf16 holds.
fn fp8_scales(expert: usize, part: usize) -> [f32; 2] {
    [0.0078125 * (expert + 1) as f32, 0.00390625 * (part + 3) as f32]
}

fn mxfp4_expert(expert: usize) -> ExpertTensors<'static> {
    let [gate, up, down] = parts(expert);
    ExpertTensors {
        gate: quantize_mxfp4("gate", &gate, INTERMEDIATE, HIDDEN).unwrap(),
        up: quantize_mxfp4("up", &up, INTERMEDIATE, HIDDEN).unwrap(),
        down: quantize_mxfp4("down", &down, HIDDEN, INTERMEDIATE).unwrap(),
    }
}

/// The experts of [`Model::bf16`].
fn bf16_experts() -> DenseExperts {
    let experts = (0..EXPERTS).map(|expert| {
        let [gate, up, down] = parts(expert).map(DenseMatrix::Bf16);
        DenseExpert { gate, up, down, biases: None }
    });
    DenseExperts::new(HIDDEN, INTERMEDIATE, HIDDEN, experts.collect()).unwrap()
}

fn dense(moe: &MoeWeights) -> &DenseExperts {
    match &moe.experts {
        Experts::Dense(experts) => experts,
        Experts::Fp4(_) => panic!("four bits"),
    }
}

#[test]
fn bf16_experts_in_all_spellings() {
    let model = Model::bf16();
    let moe = model.load().unwrap();
    assert!(*dense(&moe) == bf16_experts() && moe.experts.format() == "bf16");
    assert!(moe.router.unwrap().weight == pattern(99, EXPERTS * HIDDEN));
    let mut mixtral = model.clone();
    mixtral.config["model_type"] = "mixtral".into();
    for (from, to) in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"), (".mlp.", ".block_sparse_moe.")] {
        mixtral.tensors = mixtral.tensors.into_iter().map(|(name, raw)| (name.replace(from, to), raw)).collect();
        let moe = mixtral.load().unwrap();
        assert!(*dense(&moe) == bf16_experts() && moe.router.is_some(), "{to}");
    }
    // config.json need not tell the sizes.
    let mut silent = model.clone();
    for key in ["hidden_size", "moe_intermediate_size", "num_experts"] {
        silent.config.as_object_mut().unwrap().remove(key);
    }
    assert!(*dense(&silent.load().unwrap()) == bf16_experts());
    // Nor need there be a router.
    assert!(model.without("gate.weight").load().unwrap().router.is_none());
}

#[test]
fn fused_bf16_experts_and_those_of_gpt_oss() {
    let mut fused = Model::new("qwen3_moe");
    let gate_up: Vec<u16> = (0..EXPERTS).flat_map(|e| [parts(e)[0].clone(), parts(e)[1].clone()].concat()).collect();
    let down: Vec<u16> = (0..EXPERTS).flat_map(|e| parts(e)[2].clone()).collect();
    fused.insert("experts.gate_up_proj", Raw::bf16(&[EXPERTS, 2 * INTERMEDIATE, HIDDEN], &gate_up));
    fused.insert("experts.down_proj", Raw::bf16(&[EXPERTS, HIDDEN, INTERMEDIATE], &down));
    assert!(*dense(&fused.load().unwrap()) == bf16_experts());

    let moe = Model::gpt_oss().load().unwrap();
    let mut experts = dense(&moe).clone().into_experts();
    let both = gate_up_biases();
    for (expert, loaded) in experts.iter_mut().enumerate() {
        let [gate, up, down] = loaded.biases.take().unwrap();
        for row in 0..INTERMEDIATE {
            let place = expert * 2 * INTERMEDIATE + 2 * row;
            let expected = [both[place], both[place + 1]].map(float16::bf16_to_f32);
            assert_eq!([gate[row], up[row]], expected, "expert {expert}, row {row}");
        }
        assert_eq!(down, widen(&pattern(96, EXPERTS * HIDDEN)[expert * HIDDEN..][..HIDDEN]));
    }
    assert!(experts == bf16_experts().into_experts());
    assert_eq!(moe.gating, Gating::GPT_OSS);
    let router = moe.router.unwrap();
    assert_eq!((router.routing.scoring, router.routing.top_k), (Scoring::SelectedSoftmax, 2));
    assert_eq!(router.bias.unwrap(), widen(&pattern(98, EXPERTS)));
    let limited = Model::gpt_oss().set("swiglu_limit", json!(5.0)).load().unwrap();
    assert_eq!(limited.gating, Gating::SwigluOai { alpha: 1.702, limit: 5.0 });

    // The layout of one family under the name of the other.
    let (tensor, problem) = Model::gpt_oss()
        .set("model_type", "qwen3_moe".into())
        .set("moe_intermediate_size", INTERMEDIATE.into())
        .fault();
    assert!(tensor == "experts.gate_up_proj" && problem.contains("[3, 192, 160] needed"), "{tensor}: {problem}");
    let model = Model::gpt_oss();
    model.without("router.bias").faulty("router.bias", "missing");
    model.without("experts.down_proj_bias").faulty("experts.down_proj_bias", "missing");
    model.without("experts.gate_up_proj_bias").faulty("experts.gate_up_proj_bias", "missing");
    let short = Raw::bf16(&[EXPERTS, INTERMEDIATE], &pattern(1, EXPERTS * INTERMEDIATE));
    model.with("experts.gate_up_proj_bias", short).faulty("experts.gate_up_proj_bias", "[3, 192] needed");
    let (_, problem) = model.without("experts.down_proj").fault();
    assert!(problem.contains("down_proj` is missing") && problem.contains("gate_up_proj BF16"), "{problem}");
    let fp8 = Raw::u8(Dtype::F8_E4M3, &[EXPERTS, INTERMEDIATE, HIDDEN], vec![0x38; EXPERTS * INTERMEDIATE * HIDDEN]);
    model.with("experts.down_proj", fp8).faulty("experts.down_proj", "BF16");
}

#[test]
fn fp8_blocks_of_both_tools() {
    let f32_scales = |grid: &[usize], values: &[f32]| Raw::f32(grid, values);
    let squeezed = |_: &[usize], values: &[f32]| Raw::f32(&[2], values);
    let bf16 = |grid: &[usize], values: &[f32]| {
        Raw::bf16(grid, &values.iter().map(|&value| float16::bf16_from_f32(value)).collect::<Vec<_>>())
    };
    let models = [
        Model::fp8("weight_scale_inv", f32_scales),
        Model::fp8("weight_scale_inv", squeezed),
        Model::fp8("weight_scale", bf16),
    ];
    for model in &models {
        let moe = model.load().unwrap();
        assert_eq!(moe.experts.format(), "fp8");
        for (e, expert) in dense(&moe).experts().iter().enumerate() {
            for (part, values) in dequantize(expert, HIDDEN, INTERMEDIATE).iter().enumerate() {
                let (codes, scales) = (fp8_codes(e, part), fp8_scales(e, part));
                let cols = if part == 2 { INTERMEDIATE } else { HIDDEN };
                for (i, value) in values.iter().enumerate() {
                    let block = if part == 2 { i / cols / 128 } else { i % cols / 128 };
                    let expected = e4m3::decode(codes[i]) * scales[block];
                    assert_eq!(value.to_bits(), expected.to_bits(), "expert {e}, part {part}, element {i}");
                }
            }
        }
    }

    let model = &models[0];
    let base = "experts.1.up_proj";
    let scale = format!("{base}.weight_scale_inv");
    model.without(&scale).faulty(&scale, "missing");
    model.with(&format!("{base}.weight_scale"), Raw::f32(&[1, 2], &[1.0; 2])).faulty(&scale, "too");
    model.with(&scale, Raw::f32(&[2, 1], &[1.0; 2])).faulty(&scale, "[1, 2] needed");
    model.with(&scale, Raw::f32(&[3], &[1.0; 3])).faulty(&scale, "[1, 2] needed");
    model.with(&scale, Raw::f32(&[1, 2], &[1.0, f32::NAN])).faulty(&scale, "block [0, 1]");
    model.with(&scale, Raw::f32(&[1, 2], &[f32::INFINITY, 1.0])).faulty(&scale, "inf");
    model.with(&scale, Raw::u8(Dtype::F8_E4M3, &[1, 2], vec![0x38; 2])).faulty(&scale, "F32 or BF16");
    let weight = format!("{base}.weight");
    for nan in [0x7F, 0xFF] {
        let mut codes = fp8_codes(1, 1);
        codes[HIDDEN * 5 + 9] = nan;
        let bad = model.with(&weight, Raw::u8(Dtype::F8_E4M3, &[INTERMEDIATE, HIDDEN], codes));
        bad.faulty(&weight, &format!("NaN code 0x{nan:02X} at row 5, column 9 (expert 1)"));
    }
    let other = Raw::bf16(&[INTERMEDIATE, HIDDEN], &pattern(1, INTERMEDIATE * HIDDEN));
    model.with(&weight, other).faulty(&weight, "F8_E4M3");
    let blocks = |rows: usize| json!({"quant_method": "fp8", "weight_block_size": [rows, 128]});
    assert!(model.set("quantization_config", blocks(128)).load().is_ok());
    let error = model.set("quantization_config", blocks(64)).load().unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("`weight_block_size` is [64, 128]"), "{error}");
    // All experts with one fault are listed together.
    let (tensor, problem) =
        model.without("experts.0.down_proj.weight_scale_inv").without("experts.2.down_proj.weight_scale_inv").fault();
    assert!(tensor == "experts.*.down_proj.weight_scale_inv" && problem.contains("[0, 2]"), "{tensor}: {problem}");
}

#[test]
fn mxfp4_blocks_of_gpt_oss() {
    let moe = Model::mxfp4().load().unwrap();
    let Experts::Fp4(experts) = &moe.experts else { panic!("{}", moe.experts.format()) };
    assert_eq!((experts.format(), moe.gating), (WeightFormat::Mxfp4, Gating::GPT_OSS));
    for expert in 0..EXPERTS {
        assert!(experts.unpack(expert) == mxfp4_expert(expert), "expert {expert}");
    }
    // Up before gate.
    let (both, b13) = (gate_up_biases(), experts.b13().unwrap());
    for (place, bias) in b13.iter().enumerate() {
        let (expert, row) = (place / (2 * INTERMEDIATE), place % (2 * INTERMEDIATE));
        let source = expert * 2 * INTERMEDIATE + 2 * (row % INTERMEDIATE) + usize::from(row < INTERMEDIATE);
        assert_eq!(*bias, float16::bf16_to_f32(both[source]), "row {row} of expert {expert}");
    }
    assert_eq!(experts.b2().unwrap(), widen(&pattern(96, EXPERTS * HIDDEN)));

    let model = Model::mxfp4();
    let raw = |name: &str| model.tensors[&format!("{MLP}.{name}")].clone();
    let scales = "experts.gate_up_proj_scales";
    let mut bad = raw(scales);
    for expert in [0, 2] {
        bad.bytes[(expert * 2 * INTERMEDIATE + 7) * HIDDEN / 32 + 3] = 0xFF;
    }
    let (tensor, problem) = model.with(scales, bad).fault();
    assert_eq!(tensor, scales);
    assert!(problem.contains("0xFF at row 7, block 3") && problem.contains("[0, 2]"), "{problem}");
    model.without(scales).faulty(scales, "missing");
    model.without("experts.down_proj_blocks").faulty("experts.down_proj_blocks", "missing");
    let mut wrong = raw(scales);
    wrong.dtype = Dtype::F8_E4M3;
    model.with(scales, wrong).faulty(scales, "U8");
    for (key, value) in [("hidden_size", HIDDEN + 32), ("intermediate_size", INTERMEDIATE + 32)] {
        model.set(key, value.into()).faulty("experts.gate_up_proj_blocks", "needed");
    }
    let mut wrong = raw("experts.down_proj_blocks");
    wrong.shape = vec![EXPERTS, HIDDEN, INTERMEDIATE / 16, 8];
    model.with("experts.down_proj_blocks", wrong).faulty("experts.down_proj_blocks", "16 bytes");
    model.set("num_experts", (EXPERTS + 1).into()).faulty("experts.gate_up_proj_blocks", "4 needed");
}

#[test]
fn faults_of_bf16_experts_and_routers_are_named() {
    let model = Model::bf16();
    let weight = "experts.1.down_proj.weight";
    model.without(weight).faulty(weight, "no tensor at all");
    model.with(weight, Raw::f32(&[HIDDEN, INTERMEDIATE], &vec![0.0; HIDDEN * INTERMEDIATE])).faulty(weight, "BF16");
    let swapped = Raw::bf16(&[INTERMEDIATE, HIDDEN], &pattern(1, HIDDEN * INTERMEDIATE));
    model.with(weight, swapped).faulty(weight, "[160, 96] needed");
    let first = Raw::u8(Dtype::F16, &[INTERMEDIATE, HIDDEN], vec![0; 2 * HIDDEN * INTERMEDIATE]);
    model.with("experts.0.gate_proj.weight", first).faulty("experts.0.gate_proj.weight", "F16");
    let mut missing = model.clone();
    missing.tensors.retain(|name, _| !name.contains("experts.1."));
    missing.faulty("experts.*", "[1] are missing");
    model.with("experts.1.w2.weight", Raw::bf16(&[1], &[0])).faulty("experts.1.down_proj", "too");
    let bias = Raw::f32(&[INTERMEDIATE], &[0.0; INTERMEDIATE]);
    let (tensor, problem) = model.with("experts.1.up_proj.bias", bias).fault();
    assert!(tensor == "experts.*.gate_proj.bias" && problem.contains("[0, 1, 2]"), "{tensor}: {problem}");

    let short = Raw::bf16(&[EXPERTS - 1, HIDDEN], &pattern(1, (EXPERTS - 1) * HIDDEN));
    model.with("gate.weight", short).faulty("gate.weight", "[3, 160] needed");
    model.with("gate.weight", Raw::f32(&[EXPERTS, HIDDEN], &[0.0; EXPERTS * HIDDEN])).faulty("gate.weight", "BF16");
    let other = Raw::bf16(&[EXPERTS, HIDDEN], &pattern(1, EXPERTS * HIDDEN));
    model.with("router.weight", other).faulty("gate.weight", "too");
    let glm = model.set("model_type", "glm4_moe".into());
    glm.faulty("gate.e_score_correction_bias", "missing");
    let correction = "gate.e_score_correction_bias";
    glm.with(correction, Raw::f32(&[2], &[0.0; 2])).faulty(correction, "[3] needed");
    glm.with(correction, Raw::f32(&[3], &[0.0, f32::NAN, 0.0])).faulty(correction, "NaN at element 1");
    model.set("num_experts_per_tok", 4.into()).faulty("gate.weight", "top_k");
}

#[test]
fn routing_and_gating_follow_the_family() {
    let model = Model::bf16();
    let routing = |model: &Model| model.load().unwrap().router.unwrap().routing;
    let softmax = Routing { scoring: Scoring::Softmax, top_k: 2, renormalize: true, groups: None, scale: 1.0 };
    assert_eq!(routing(&model), softmax);
    assert_eq!(routing(&model.set("norm_topk_prob", false.into())), Routing { renormalize: false, ..softmax });
    // Without the key Qwen3's own code does not normalise, and Mixtral's always does.
    assert_eq!(routing(&model.set("norm_topk_prob", Value::Null)), Routing { renormalize: false, ..softmax });
    let mixtral = model.set("model_type", "mixtral".into()).set("norm_topk_prob", Value::Null);
    assert_eq!(routing(&mixtral), softmax);
    let correction = Raw::f32(&[EXPERTS], &[0.5, -0.25, 0.0]);
    for family in ["deepseek_v3", "glm4_moe"] {
        let model = model.set("model_type", family.into()).with("gate.e_score_correction_bias", correction.clone());
        let model = model.set("n_group", 3.into()).set("topk_group", 2.into()).set("routed_scaling_factor", json!(2.5));
        let groups = Some(Groups { count: 3, keep: 2 });
        assert_eq!(routing(&model), Routing { scoring: Scoring::Sigmoid, groups, scale: 2.5, ..softmax });
        assert_eq!(model.load().unwrap().router.unwrap().correction_bias.unwrap(), [0.5, -0.25, 0.0]);
        let message = |model: &Model| model.load().unwrap_err().to_string();
        assert!(message(&model.set("n_group", 2.into())).contains("`n_group` is 2"));
        let other = model.set("topk_method", "group_limited_greedy".into());
        assert!(message(&other).contains("`topk_method` is `group_limited_greedy`"));
    }
    let unknown = model.set("model_type", "frobnicate".into());
    let error = unknown.load().unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("`frobnicate`"), "{error}");
    assert_eq!(routing(&unknown.set("scoring_func", "softmax".into())), softmax);
    let error = model.set("hidden_act", "gelu".into()).load().unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("`hidden_act` is `gelu`"), "{error}");
    let limited = model.set("swiglu_limit", json!(4.0)).load().unwrap();
    assert_eq!(limited.gating, Gating::Silu { limit: Some(4.0) });
    assert!(model.set("swiglu_limit", json!(-4.0)).load().unwrap_err().to_string().contains("limit"));
}

#[test]
fn shared_experts_keep_their_own_format() {
    for name in ["shared_expert", "shared_experts"] {
        let mut model = Model::bf16();
        model.dense_expert(name, &parts(7));
        let moe = model.load().unwrap();
        let Some(SharedWeights::Dense(shared)) = &moe.shared else { panic!("{:?}", moe.shared) };
        assert_eq!((shared.intermediate, &shared.gate), (INTERMEDIATE, &None));
        assert!(
            [&shared.expert.gate, &shared.expert.up, &shared.expert.down]
                .into_iter()
                .cloned()
                .eq(parts(7).map(DenseMatrix::Bf16))
        );
        assert!(*dense(&moe) == bf16_experts(), "the routed ones are apart from it");

        let gated = model.with("shared_expert_gate.weight", Raw::bf16(&[1, HIDDEN], &pattern(5, HIDDEN)));
        assert_eq!(gated.load().unwrap().shared.unwrap().gate().unwrap(), pattern(5, HIDDEN));
        let wrong = model.with("shared_expert_gate.weight", Raw::bf16(&[1, 8], &pattern(5, 8)));
        wrong.faulty("shared_expert_gate.weight", "[1, 160] needed");
        let part = format!("{name}.up_proj.weight");
        model.without(&part).faulty(&part, "missing");
        model
            .with(&format!("{name}.up_proj.bias"), Raw::f32(&[1], &[0.0]))
            .faulty(&format!("{name}.up_proj.bias"), "biases");
    }
    let mut both = Model::bf16();
    both.dense_expert("shared_expert", &parts(7));
    both.dense_expert("shared_experts", &parts(7));
    both.faulty("shared_experts.*", "too");
    Model::bf16().set("n_shared_experts", 1.into()).faulty("shared_experts.*", "missing");

    // FP8 beside bf16, with an intermediate size of its own: the tensors of a routed fp8 expert.
    let mut model = Model::bf16();
    let fp8 = Model::fp8("weight_scale_inv", Raw::f32);
    for (name, raw) in &fp8.tensors {
        if let Some((_, rest)) = name.split_once(".experts.1.") {
            model.insert(&format!("shared_expert.{rest}"), raw.clone());
        }
    }
    let Some(SharedWeights::Dense(shared)) = model.load().unwrap().shared else { panic!("fp8") };
    assert!(shared.expert == dense(&fp8.load().unwrap()).experts()[1]);
    let scale = "shared_expert.down_proj.weight_scale_inv";
    model.without(scale).faulty(scale, "missing");

    // NVFP4 beside NVFP4: a routed expert of a committed checkpoint under the other name.
    let folder = &folders()[2];
    let store = TensorStore::open(folder).unwrap();
    let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut model = Model { config, tensors: BTreeMap::new() };
    for tensor in store.with_prefix("model.layers.1.mlp.") {
        let raw = Raw::u8(tensor.dtype, tensor.shape, tensor.bytes.to_vec());
        let name = tensor.name.replace("layers.1", "layers.0");
        if let Some((before, rest)) = name.split_once(".experts.3.") {
            model.tensors.insert(format!("{before}.shared_experts.{rest}"), raw.clone());
        }
        if !name.contains("shared_experts") {
            model.tensors.insert(name, raw);
        }
    }
    let Some(SharedWeights::Fp4 { expert, gate: None }) = model.load().unwrap().shared else { panic!("NVFP4") };
    let checkpoint = Checkpoint::open(folder).unwrap();
    let expected = Fp4Experts::pack(&checkpoint.nvfp4_tensors(1).unwrap()[3..4]).unwrap();
    assert!(expert == expected);
    let scale = "shared_experts.up_proj.weight_global_scale";
    model.without(scale).faulty(scale, "missing");
}

#[test]
fn experts_without_weights_are_errors() {
    let mut model = Model::gpt_oss().set("intermediate_size", 0.into());
    model.insert("experts.gate_up_proj", Raw::bf16(&[EXPERTS, HIDDEN, 0], &[]));
    model.insert("experts.down_proj", Raw::bf16(&[EXPERTS, 0, HIDDEN], &[]));
    model.insert("experts.gate_up_proj_bias", Raw::bf16(&[EXPERTS, 0], &[]));
    model.faulty("experts.gate_up_proj", "at least 1");
    let mut model = Model::mxfp4();
    for (name, shape) in [("blocks", &[EXPERTS, 0, 5, 16][..]), ("scales", &[EXPERTS, 0, 5])] {
        model.insert(&format!("experts.gate_up_proj_{name}"), Raw::u8(Dtype::U8, shape, Vec::new()));
    }
    model.set("intermediate_size", 0.into()).faulty("experts.gate_up_proj_blocks", "needed");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn damaged_numbers_never_panic(
        form in 0usize..4,
        which in any::<prop::sample::Index>(),
        number in prop_oneof![any::<u64>(), 0u64..600, Just(0)],
        key in prop::sample::select(vec!["hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "n_group", "num_experts_per_tok"]),
        of_config in any::<bool>(),
        silent in any::<bool>(),
    ) {
        let mut model = match form {
            0 => Model::bf16(),
            1 => Model::gpt_oss(),
            2 => Model::mxfp4(),
            _ => Model::fp8("weight_scale_inv", Raw::f32),
        };
        if silent {
            model.config = json!({"model_type": model.config["model_type"], "num_experts_per_tok": 2});
        }
        if of_config {
            model.config[key] = number.into();
        }
        let folder = model.write();
        if !of_config {
            // One number of a shape or an offset.
            let path = folder.path().join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
            let starts: Vec<usize> = header
                .char_indices()
                .filter(|&(i, c)| c.is_ascii_digit() && header[..i].ends_with(['[', ',']))
                .map(|(i, _)| i)
                .collect();
            let start = starts[which.index(starts.len())];
            let end = start + header[start..].find(|c: char| !c.is_ascii_digit()).unwrap();
            let damaged = format!("{}{number}{}", &header[..start], &header[end..]);
            let file = [&(damaged.len() as u64).to_le_bytes()[..], damaged.as_bytes(), &bytes[8 + length..]].concat();
            fs::write(&path, file).unwrap();
        }
        // The result does not matter, only that there is one.
        if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
            let _ = checkpoint.inspect();
            let _ = checkpoint.load_moe(0);
        }
    }
}

#[test]
fn inspect_names_every_format() {
    let fp8 = |suffix: &str| Model::fp8(suffix, Raw::f32);
    for (model, format, name) in [
        (Model::bf16(), ExpertFormat::Bf16, "bf16"),
        (Model::gpt_oss(), ExpertFormat::Bf16, "bf16"),
        (fp8("weight_scale_inv"), ExpertFormat::Fp8ScaleInv, "fp8 (weight_scale_inv)"),
        (fp8("weight_scale"), ExpertFormat::Fp8Scale, "fp8 (weight_scale)"),
        (Model::mxfp4(), ExpertFormat::Mxfp4Blocks, "mxfp4 (blocks)"),
    ] {
        let folder = model.write();
        let inspect = Checkpoint::open(folder.path()).unwrap().inspect();
        let moe = inspect.layers[0].moe.as_ref().unwrap();
        assert_eq!(moe.formats, [format]);
        assert_eq!(moe.formats[0].to_string(), name);
        assert_eq!((moe.experts, moe.hidden, moe.intermediate), (EXPERTS, Some(HIDDEN), Some(INTERMEDIATE)), "{name}");
        assert_eq!(moe.biases, model.config["model_type"] == "gpt_oss", "{name}");
    }
}
