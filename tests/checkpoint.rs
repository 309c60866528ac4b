//! Checkpoints that other tools wrote, checkpoints made from them, and files that are meant to do harm.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use megamoe::Error;
use megamoe::checkpoint::{Checkpoint, ExpertFormat, ExpertLayout, Reference, Scoring, TensorStore};
use megamoe::formats::quantize::{amax, global_scale, quantize, quantize_expert};
use megamoe::formats::{ExpertShape, Fp4Matrix, GlobalScale, float16};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

const MODELOPT: &str = "qwen3moe-nvfp4-modelopt";
const COMPRESSED: &str = "qwen3moe-nvfp4a16-ct";
const DEEPSEEK: &str = "deepseekv3-tiny-nvfp4a16-ct";

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

/// The committed checkpoints, and the NVFP4 ones in the folder that MEGAMOE_CHECKPOINTS names.
fn nvfp4_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = [MODELOPT, COMPRESSED, DEEPSEEK].map(testdata).to_vec();
    match std::env::var_os("MEGAMOE_CHECKPOINTS") {
        None => eprintln!("skipped: further checkpoints (MEGAMOE_CHECKPOINTS names no folder)"),
        Some(root) => {
            let entries =
                fs::read_dir(&root).expect("the folder of MEGAMOE_CHECKPOINTS").map(|entry| entry.unwrap().path());
            let more: Vec<PathBuf> = entries
                .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().contains("nvfp4")))
                .collect();
            assert!(!more.is_empty(), "no nvfp4 checkpoint in {root:?}");
            folders.extend(more);
        }
    }
    folders
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn dequantised_expert_0_has_the_bits_of_the_tool() {
    for folder in nvfp4_folders() {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let reference = Reference::open(&folder).unwrap();
        let expert = &checkpoint.nvfp4_tensors(reference.layer).unwrap()[0];
        let expected =
            |name: &str| reference.tensors().get(&format!("expert0.{name}_proj_f32")).unwrap().f32().unwrap();
        for (name, matrix) in [("gate", &expert.gate), ("up", &expert.up), ("down", &expert.down)] {
            let (mut ours, theirs) = (matrix.dequantize(), expected(name));
            if let GlobalScale::Multiplier(_) = matrix.global() {
                // ModelOpt's own table has +0 for the code of -0, which no sum can tell.
                ours.iter_mut().zip(matrix.codes().iter().flat_map(|byte| [byte & 15, byte >> 4])).for_each(
                    |(value, code)| {
                        if code == 8 {
                            assert_eq!(value.to_bits(), (-0f32).to_bits());
                            *value = 0.0;
                        }
                    },
                );
            }
            assert!(bits(&ours) == bits(&theirs), "{name} of {}", folder.display());
        }
        assert!(bits(&expert.up.dequantize()) != bits(&expected("gate")), "up and gate differ in the reference");
    }
}

#[test]
fn packed_experts_give_the_output_of_the_reference() {
    for folder in nvfp4_folders() {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let reference = Reference::open(&folder).unwrap();
        assert_eq!(checkpoint.default_layer().unwrap(), reference.layer, "{}", folder.display());
        let experts = checkpoint.load_nvfp4(reference.layer).unwrap();
        let ExpertShape { hidden, intermediate, output, .. } = experts.shape();
        let shape = checkpoint.layer_shape(&experts).unwrap();
        assert_eq!((shape.top_k, shape.hidden), (reference.top_k, reference.hidden));

        let dot = |row: &[f32], x: &[f64]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let weights: Vec<_> = (0..shape.experts)
            .map(|e| experts.unpack(e))
            .map(|e| [&e.gate, &e.up, &e.down].map(Fp4Matrix::dequantize))
            .collect();
        let largest = reference.routed_out.iter().fold(0f32, |a, x| a.max(x.abs()));
        let mut worst = 0f64;
        for token in 0..reference.tokens {
            let x = &reference.x[token * hidden..][..hidden];
            let x: Vec<f64> = x.iter().map(|&bits| f64::from(float16::bf16_to_f32(bits))).collect();
            let mut out = vec![0f64; output];
            for slot in token * shape.top_k..(token + 1) * shape.top_k {
                let [gate, up, down] = &weights[reference.topk_ids[slot] as usize];
                let h: Vec<f64> = (0..intermediate)
                    .map(|row| {
                        let [gate, up] = [gate, up].map(|w| dot(&w[row * hidden..][..hidden], &x));
                        gate / (1.0 + (-gate).exp()) * up
                    })
                    .collect();
                for (row, out) in out.iter_mut().enumerate() {
                    let y = dot(&down[row * intermediate..][..intermediate], &h);
                    *out += f64::from(reference.topk_weights[slot]) * y;
                }
            }
            for (out, expected) in out.iter().zip(&reference.routed_out[token * hidden..]) {
                worst = worst.max((out - f64::from(*expected)).abs());
            }
        }
        assert!(worst <= 1e-5 * f64::from(largest), "{}: {worst} of {largest}", folder.display());
    }
}

#[test]
fn quantiser_gives_the_bits_of_modelopt() {
    let folder = testdata(MODELOPT);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let reference = Reference::open(&folder).unwrap();
    let source =
        |name: &str| reference.tensors().get(&format!("source.expert0.{name}_proj_bf16")).unwrap().bf16().unwrap();
    let [gate, up, down] = ["gate", "up", "down"].map(source);
    let theirs = &checkpoint.nvfp4_tensors(0).unwrap()[0];
    let (hidden, intermediate) = (theirs.gate.cols(), theirs.gate.rows());

    let ours = quantize("gate", &gate, intermediate, hidden, theirs.gate.global().stored()).unwrap();
    assert!(ours == theirs.gate, "gate");
    let ours = quantize("up", &up, intermediate, hidden, theirs.up.global().stored()).unwrap();
    assert!(ours == theirs.up, "up");
    let ours = quantize("down", &down, hidden, intermediate, theirs.down.global().stored()).unwrap();
    assert!(ours == theirs.down, "down");
    // Another scale gives other bits, so the equality above says something.
    let other = global_scale(amax("gate", &gate).unwrap() * 1.3);
    assert!(quantize("gate", &gate, intermediate, hidden, other).unwrap().codes() != theirs.gate.codes());

    let whole = quantize_expert(&gate, &up, &down, hidden, intermediate).unwrap();
    assert!(whole == *theirs, "the expert");
}

#[test]
fn shapes_and_router_settings_come_from_config_json() {
    let config = |name| Checkpoint::open(testdata(name)).unwrap().config().clone();
    let qwen = config(MODELOPT);
    assert_eq!((qwen.hidden, qwen.intermediate, qwen.experts, qwen.top_k), (Some(256), Some(128), Some(8), Some(2)));
    assert_eq!((qwen.scoring, qwen.normalize, qwen.scaling_factor, qwen.groups), (Scoring::Softmax, true, 1.0, 1));
    let quantization = qwen.quantization.unwrap();
    assert_eq!((quantization.method.as_deref(), quantization.algo.as_deref()), (Some("modelopt"), Some("NVFP4")));
    let deepseek = config(DEEPSEEK);
    assert_eq!((deepseek.experts, deepseek.intermediate, deepseek.first_moe_layer), (Some(16), Some(96), Some(1)));
    assert_eq!((deepseek.scoring, deepseek.scaling_factor), (Scoring::Sigmoid, 2.5));
    assert_eq!((deepseek.groups, deepseek.top_groups, deepseek.shared_experts), (4, 2, 1));
    assert_eq!(deepseek.quantization.unwrap().format.as_deref(), Some("nvfp4-pack-quantized"));
}

#[test]
fn inspect_says_what_each_layer_holds() {
    let inspect = Checkpoint::open(testdata(DEEPSEEK)).unwrap().inspect();
    assert_eq!(inspect.layers.len(), 2);
    assert!(inspect.layers[0].moe.is_none(), "layer 0 is dense");
    let moe = inspect.layers[1].moe.as_ref().unwrap();
    assert_eq!(moe.prefix, "model.layers.1.mlp.experts");
    assert_eq!(
        (moe.layout, moe.formats.as_slice()),
        (Some(ExpertLayout::PerExpert), &[ExpertFormat::Nvfp4CompressedTensors][..])
    );
    assert_eq!((moe.experts, moe.hidden, moe.intermediate, moe.shared_expert), (16, Some(192), Some(96), true));
    let inspect = Checkpoint::open(testdata(MODELOPT)).unwrap().inspect();
    let moe = inspect.layers[1].moe.as_ref().unwrap();
    assert_eq!((moe.formats.as_slice(), moe.shared_expert), (&[ExpertFormat::Nvfp4ModelOpt][..], false));
    let text = serde_json::to_string(&inspect).unwrap();
    assert!(text.contains("nvfp4 (modelopt)"), "{text}");
}

// ---- checkpoints made from the committed ones ---------------------------------------------------------------------

#[derive(Clone)]
struct Raw {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Raw {
    fn f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Raw { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    fn concat(shape: Vec<usize>, parts: &[&Raw]) -> Self {
        Raw { dtype: parts[0].dtype, shape, bytes: parts.iter().flat_map(|part| part.bytes.clone()).collect() }
    }
}

/// A checkpoint in memory, to be changed and written.
#[derive(Clone)]
struct Model {
    config: Value,
    tensors: BTreeMap<String, Raw>,
}

impl Model {
    /// Layer 0 of a committed checkpoint.
    fn read(name: &str) -> Self {
        let store = TensorStore::open(&testdata(name)).unwrap();
        let tensors = store
            .with_prefix("model.layers.0.")
            .map(|t| (t.name.to_string(), Raw { dtype: t.dtype, shape: t.shape.to_vec(), bytes: t.bytes.to_vec() }))
            .collect();
        let config = serde_json::from_slice(&fs::read(testdata(name).join("config.json")).unwrap()).unwrap();
        Model { config, tensors }
    }

    /// Two experts of 16 x 16 weights, as ModelOpt writes them.
    fn tiny() -> Self {
        let mut tensors = BTreeMap::new();
        for expert in 0..2u8 {
            for (index, name) in ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate() {
                let base = format!("model.layers.0.mlp.experts.{expert}.{name}");
                let codes = (0..128u8).map(|i| i.wrapping_mul(3).wrapping_add(expert + index as u8)).collect();
                tensors.insert(format!("{base}.weight"), Raw { dtype: Dtype::U8, shape: vec![16, 8], bytes: codes });
                let scales = vec![0x38 + index as u8; 16];
                let scales = Raw { dtype: Dtype::F8_E4M3, shape: vec![16, 1], bytes: scales };
                tensors.insert(format!("{base}.weight_scale"), scales);
                tensors.insert(format!("{base}.weight_scale_2"), Raw::f32(&[], &[0.5]));
            }
        }
        let config = json!({"model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1});
        Model { config, tensors }
    }

    fn bytes(tensors: &BTreeMap<String, Raw>) -> Vec<u8> {
        let views = tensors
            .iter()
            .map(|(name, raw)| (name.as_str(), TensorView::new(raw.dtype, raw.shape.clone(), &raw.bytes).unwrap()));
        safetensors::serialize(views, Some(HashMap::from([("format".to_string(), "pt".to_string())]))).unwrap()
    }

    fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.path().join("model.safetensors"), Self::bytes(&self.tensors)).unwrap();
        folder
    }

    /// Each tensor in one of `files` shards, so that an expert's matrices lie apart.
    fn write_shards(&self, files: usize) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let mut shards = vec![BTreeMap::new(); files];
        let mut weight_map = serde_json::Map::new();
        for (index, (name, raw)) in self.tensors.iter().enumerate() {
            shards[index % files].insert(name.clone(), raw.clone());
            weight_map.insert(name.clone(), shard_name(index % files).into());
        }
        for (index, shard) in shards.iter().enumerate() {
            fs::write(folder.path().join(shard_name(index)), Self::bytes(shard)).unwrap();
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        folder
    }

    fn rename(&mut self, change: impl Fn(&str) -> String) {
        self.tensors = std::mem::take(&mut self.tensors).into_iter().map(|(name, raw)| (change(&name), raw)).collect();
    }

    /// The experts of layer 0 as three-dimensional tensors, gate above up. `joint` stands between name and suffix.
    fn fuse(&self, codes: (&str, &str), global: &str, joint: &str) -> Self {
        let experts = self.config["num_local_experts"].as_u64().unwrap() as usize;
        let mut fused = BTreeMap::new();
        let of = |e: usize, proj: &str, suffix: &str| {
            &self.tensors[&format!("model.layers.0.mlp.experts.{e}.{proj}.{suffix}")]
        };
        for (name, projections) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"][..])]
        {
            let base = format!("model.layers.0.mlp.experts.{name}");
            for (suffix, new_name) in
                [(codes.0, format!("{base}{}", codes.1)), ("weight_scale", format!("{base}{joint}weight_scale"))]
            {
                let parts: Vec<&Raw> =
                    (0..experts).flat_map(|e| projections.iter().map(move |proj| of(e, proj, suffix))).collect();
                let shape = vec![experts, parts[0].shape[0] * projections.len(), parts[0].shape[1]];
                fused.insert(new_name, Raw::concat(shape, &parts));
            }
            let globals: Vec<&Raw> = (0..experts).map(|e| of(e, projections[0], global)).collect();
            fused.insert(format!("{base}{joint}{global}"), Raw::concat(vec![experts], &globals));
        }
        Model { config: self.config.clone(), tensors: fused }
    }
}

fn shard_name(index: usize) -> String {
    format!("model-{:05}.safetensors", index + 1)
}

fn load_error(model: &Model) -> Error {
    let folder = model.write();
    Checkpoint::open(folder.path()).and_then(|checkpoint| checkpoint.load_nvfp4(0)).expect_err("an error")
}

/// Tensor and problem of an [`Error::Tensor`].
fn tensor_error(error: Error) -> (String, String) {
    match error {
        Error::Tensor { tensor, problem, .. } => (tensor, problem),
        other => panic!("{other}"),
    }
}

#[test]
fn shards_give_the_same_experts_as_one_file() {
    let model = Model::read(MODELOPT);
    let whole = Checkpoint::open(testdata(MODELOPT)).unwrap().load_nvfp4(0).unwrap();
    let folder = model.write_shards(3);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.inspect().files, 3);
    assert!(checkpoint.load_nvfp4(0).unwrap() == whole);
}

#[test]
fn mixtral_spellings_give_the_same_experts() {
    let whole = Checkpoint::open(testdata(COMPRESSED)).unwrap().load_nvfp4(0).unwrap();
    let mut model = Model::read(COMPRESSED);
    model.config["model_type"] = "mixtral".into();
    model.rename(|name| name.replace(".mlp.", ".block_sparse_moe."));
    let load = |model: &Model| Checkpoint::open(model.write().path()).unwrap().load_nvfp4(0).unwrap();
    assert!(load(&model) == whole, "old block, new projections");
    model.rename(|name| name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"));
    assert!(load(&model) == whole, "old block, old projections");

    let scale = "model.layers.0.block_sparse_moe.experts.5.w3.weight_global_scale";
    model.tensors.insert(scale.to_string(), Raw::f32(&[1], &[0.0]));
    let (tensor, problem) = tensor_error(load_error(&model));
    assert!(tensor == scale && problem.starts_with("0,"), "{tensor}: {problem}");
}

#[test]
fn fused_experts_of_both_tools() {
    for (name, codes, global) in [
        (MODELOPT, ("weight", [("", "_"), (".weight", ".")]), "weight_scale_2"),
        (COMPRESSED, ("weight_packed", [("_weight_packed", "_"), (".weight_packed", ".")]), "weight_global_scale"),
    ] {
        let whole = Checkpoint::open(testdata(name)).unwrap().load_nvfp4(0).unwrap();
        for (suffix, joint) in codes.1 {
            let model = Model::read(name).fuse((codes.0, suffix), global, joint);
            let folder = model.write();
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            assert!(checkpoint.load_nvfp4(0).unwrap() == whole, "{name} {suffix}");
            let inspect = checkpoint.inspect();
            let moe = inspect.layers[0].moe.as_ref().unwrap();
            assert_eq!((moe.layout, moe.experts), (Some(ExpertLayout::Fused), 8));
            assert_eq!((moe.hidden, moe.intermediate), (Some(256), Some(128)));
            assert!(moe.formats.len() == 1 && moe.formats[0].is_nvfp4(), "{:?}", moe.formats);

            // A bad value is reported with its experts.
            let mut bad = model.clone();
            let key = format!("model.layers.0.mlp.experts.down_proj{joint}{global}");
            let values = bad.tensors.get_mut(&key).unwrap();
            values.bytes[4 * 2..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
            values.bytes[4 * 6..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
            let (tensor, problem) = tensor_error(load_error(&bad));
            assert!(tensor == key && problem.contains("[2, 6]"), "{tensor}: {problem}");
        }
    }
}

#[test]
fn fused_experts_of_another_form_list_the_names_seen() {
    let fused = Model::read(MODELOPT).fuse(("weight", ""), "weight_scale_2", "_");
    // Rows and columns swapped, as models that compute x·W store them.
    let mut swapped = fused.clone();
    let codes = swapped.tensors.get_mut("model.layers.0.mlp.experts.gate_up_proj").unwrap();
    codes.shape.swap(1, 2);
    let (tensor, problem) = tensor_error(load_error(&swapped));
    assert!(tensor.ends_with("gate_up_proj") && problem.contains("256 x 256"), "{tensor}: {problem}");
    // Unknown suffixes.
    let mut renamed = fused.clone();
    renamed.rename(|name| name.replace("weight_scale_2", "outer_scale"));
    let (_, problem) = tensor_error(load_error(&renamed));
    assert!(problem.contains("gate_up_proj_outer_scale"), "{problem}");
    // Experts in both forms.
    let mut both = fused.clone();
    both.tensors.extend(Model::read(MODELOPT).tensors);
    let (_, problem) = tensor_error(load_error(&both));
    assert!(problem.contains("tensors seen"), "{problem}");
    // No routed experts at all.
    let mut none = fused;
    none.rename(|name| name.replace(".experts.", ".specialists."));
    let (_, problem) = tensor_error(load_error(&none));
    assert!(problem.contains("specialists.gate_up_proj"), "{problem}");
}

// ---- faults -------------------------------------------------------------------------------------------------------

#[test]
fn a5_weight_only_loading_never_reads_input_scale() {
    let whole = Checkpoint::open(testdata(MODELOPT)).unwrap().load_nvfp4(0).unwrap();
    let mut model = Model::read(MODELOPT);
    let load = |model: &Model| Checkpoint::open(model.write().path()).unwrap().load_nvfp4(0).unwrap();
    let input_scales: Vec<String> =
        model.tensors.keys().filter(|name| name.ends_with("input_scale")).cloned().collect();
    assert!(input_scales.len() >= 24);
    for (index, name) in input_scales.iter().enumerate() {
        model.tensors.insert(name.clone(), Raw::f32(&[], &[[0.0, f32::NAN, f32::INFINITY][index % 3]]));
    }
    assert!(load(&model) == whole);
    input_scales.iter().for_each(|name| drop(model.tensors.remove(name)));
    assert!(load(&model) == whole);
}

#[test]
fn bad_global_scales_name_the_tensor_and_all_experts() {
    for (name, suffix, shape) in [(MODELOPT, "weight_scale_2", &[][..]), (COMPRESSED, "weight_global_scale", &[1][..])]
    {
        let key = |expert: usize| format!("model.layers.0.mlp.experts.{expert}.up_proj.{suffix}");
        for value in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-45] {
            let mut model = Model::read(name);
            for expert in [1, 4, 7] {
                model.tensors.insert(key(expert), Raw::f32(shape, &[value]));
            }
            if value == 1e-45 && name == MODELOPT {
                continue; // A tiny multiplier is legal; as a divisor it has no finite reciprocal.
            }
            let (tensor, problem) = tensor_error(load_error(&model));
            assert_eq!(tensor, format!("model.layers.0.mlp.experts.*.up_proj.{suffix}"));
            assert!(problem.contains("[1, 4, 7]"), "{problem}");
        }
        let mut model = Model::read(name);
        model.tensors.remove(&key(2));
        model.tensors.insert(key(5), Raw::f32(shape, &[f32::NAN]));
        let (tensor, problem) = tensor_error(load_error(&model));
        assert_eq!(tensor, format!("model.layers.0.mlp.experts.*.up_proj.{suffix}"));
        assert!(problem.contains("[2, 5]") && problem.contains("missing") && problem.contains("NaN"), "{problem}");

        let mut model = Model::read(name);
        model.tensors.insert(key(3), Raw::f32(&[2], &[1.0, 1.0]));
        let (tensor, problem) = tensor_error(load_error(&model));
        assert!(tensor == key(3) && problem.contains("2 values"), "{tensor}: {problem}");
    }
}

#[test]
fn a_nan_block_scale_is_an_error_and_a_zero_one_is_not() {
    let key = |expert| format!("model.layers.0.mlp.experts.{expert}.gate_proj.weight_scale");
    let with = |byte: u8| {
        let mut model = Model::read(COMPRESSED);
        for expert in [0, 6] {
            model.tensors.get_mut(&key(expert)).unwrap().bytes[16 * 3 + 5] = byte;
        }
        model
    };
    for nan in [0x7F, 0xFF] {
        let (tensor, problem) = tensor_error(load_error(&with(nan)));
        assert_eq!(tensor, "model.layers.0.mlp.experts.*.gate_proj.weight_scale");
        assert!(problem.contains("[0, 6]") && problem.contains("row 3, block 5"), "{problem}");
    }
    let folder = with(0).write();
    let experts = Checkpoint::open(folder.path()).unwrap().load_nvfp4(0).unwrap();
    assert_eq!(experts.unpack(6).gate.scales().get(3, 5), 0);
}

#[test]
fn wrong_tensors_are_named() {
    let base = "model.layers.0.mlp.experts.1.down_proj";
    let fault = |change: &dyn Fn(&mut Model)| {
        let mut model = Model::tiny();
        change(&mut model);
        tensor_error(load_error(&model))
    };
    let set = |name: &str, dtype, shape: &[usize], len| {
        let (name, raw) = (format!("{base}.{name}"), Raw { dtype, shape: shape.to_vec(), bytes: vec![0x38; len] });
        fault(&move |model| drop(model.tensors.insert(name.clone(), raw.clone())))
    };
    assert!(Checkpoint::open(Model::tiny().write().path()).unwrap().load_nvfp4(0).is_ok());

    let (tensor, problem) = set("weight_scale", Dtype::U8, &[16, 1], 16);
    assert!(tensor == format!("{base}.weight_scale") && problem.contains("F8_E4M3"), "{tensor}: {problem}");
    let (tensor, problem) = set("weight_scale", Dtype::F8_E4M3, &[1, 16], 16);
    assert!(tensor == format!("{base}.weight_scale") && problem.contains("[16, 1] needed"), "{tensor}: {problem}");
    let (tensor, _) = set("weight_scale", Dtype::F8_E4M3, &[16], 16);
    assert_eq!(tensor, format!("{base}.weight_scale"));
    let (tensor, problem) = set("weight_scale_2", Dtype::BF16, &[], 2);
    assert!(tensor == format!("{base}.weight_scale_2") && problem.contains("F32"), "{tensor}: {problem}");
    let (tensor, problem) = set("weight", Dtype::U8, &[32, 8], 256);
    assert!(tensor == format!("{base}.weight") && problem.contains("16 x 16"), "{tensor}: {problem}");
    let (tensor, _) = set("weight", Dtype::U8, &[16, 7], 112);
    assert_eq!(tensor, format!("{base}.weight"));
    let (tensor, _) = set("weight", Dtype::U8, &[128], 128);
    assert_eq!(tensor, format!("{base}.weight"));
    let (tensor, problem) = set("weight", Dtype::BF16, &[16, 16], 512);
    assert!(tensor.starts_with(base) && problem.contains("BF16 [16, 16]"), "{tensor}: {problem}");
    let (tensor, problem) = set("weight_packed", Dtype::U8, &[16, 8], 128);
    assert!(tensor.starts_with(base) && problem.contains("too"), "{tensor}: {problem}");

    let (tensor, problem) = fault(&|m| m.tensors.retain(|name, _| !name.contains("experts.0.")));
    assert!(tensor == "model.layers.0.mlp.experts.*" && problem.contains("[0]"), "{tensor}: {problem}");
    let (_, problem) = fault(&|m| m.config["num_experts"] = 5.into());
    assert!(problem.contains("[2, 3, 4] are missing"), "{problem}");
    let (_, problem) = fault(&|m| m.config["num_experts"] = 1.into());
    assert!(problem.contains("[1] are beyond"), "{problem}");
    let (_, problem) = fault(&|m| m.config["num_experts"] = u64::MAX.into());
    assert!(problem.contains("1 to 4096"), "{problem}");
    let (tensor, problem) = fault(&|m| m.config["hidden_size"] = 32.into());
    assert!(tensor.contains("*.gate_proj.weight") && problem.contains("16 x 32"), "{tensor}: {problem}");
    let (tensor, _) = fault(&|m| m.rename(|name| name.replace("experts.1.", "experts.18446744073709551615.")));
    assert_eq!(tensor, "model.layers.0.mlp.experts.*");

    // What config.json leaves out the tensors give.
    let mut model = Model::tiny();
    model.config = json!({});
    let folder = model.write();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let experts = checkpoint.load_nvfp4(0).unwrap();
    assert_eq!(experts.shape(), ExpertShape { experts: 2, hidden: 16, intermediate: 16, output: 16 });
    assert!(checkpoint.layer_shape(&experts).unwrap_err().to_string().contains("num_experts_per_tok"));
    assert!(checkpoint.load_nvfp4(3).is_err());
}

#[test]
fn bad_config_json_is_named() {
    let folder = Model::tiny().write();
    let path = folder.path().join("config.json");
    let open = || Checkpoint::open(folder.path()).map(|_| ()).unwrap_err().to_string();
    for (text, expected) in [
        ("", "config.json"),
        ("not JSON", "config.json"),
        ("[1, 2]", "config.json"),
        (&"[".repeat(100_000), "config.json"),
        (r#"{"hidden_size": -1}"#, "hidden_size"),
        (r#"{"hidden_size": "256"}"#, "hidden_size"),
        (r#"{"num_experts_per_tok": 1.5}"#, "num_experts_per_tok"),
        (r#"{"num_experts": 8, "num_local_experts": 16}"#, "num_experts"),
        (r#"{"routed_scaling_factor": 1e300}"#, "routed_scaling_factor"),
        (r#"{"scoring_func": "tanh"}"#, "scoring_func"),
        (r#"{"quantization_config": 4}"#, "quantization_config"),
    ] {
        fs::write(&path, text).unwrap();
        assert!(open().contains(expected), "{text:.60}: {}", open());
    }
    fs::write(&path, [0xFF, 0xFE, 0x00]).unwrap();
    assert!(open().contains("config.json"));
    fs::remove_file(&path).unwrap();
    assert!(matches!(Checkpoint::open(folder.path()).unwrap_err(), Error::Io { .. }));
}

/// A file of 8 bytes of length, the header and `data` zero bytes.
fn file_with(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(vec![0; data]);
    bytes
}

#[test]
fn hostile_safetensors_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let expect_error = |what: &str, bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        let error = TensorStore::open(&path).expect_err(what);
        assert!(matches!(error, Error::Checkpoint { .. }), "{what}: {error}");
        error.to_string()
    };
    let good = Model::bytes(&Model::tiny().tensors);
    expect_error("empty", vec![]);
    expect_error("seven bytes", vec![0; 7]);
    expect_error("no header", vec![0; 8]);
    for length in [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 40, good.len() as u64 - 7] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert!(expect_error("header beyond the file", bytes).contains(&length.to_string()));
    }
    expect_error("one byte short", good[..good.len() - 1].to_vec());
    expect_error("one byte more", [&good[..], &[0]].concat());

    let one =
        |shape: &str, offsets: &str| format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#);
    assert!(
        TensorStore::open(&{
            fs::write(&path, file_with(&one("[4]", "[0,4]"), 4)).unwrap();
            path.clone()
        })
        .is_ok()
    );
    for (what, header) in [
        ("beyond the data", one("[8]", "[0,8]")),
        ("far beyond the data", one("[18446744073709551615]", "[0,18446744073709551615]")),
        ("backwards", one("[4]", "[4,0]")),
        ("shape larger than the bytes", one("[1000000000000]", "[0,4]")),
        ("shape that overflows", one("[4294967296,4294967296,4]", "[0,4]")),
        ("negative", one("[-4]", "[0,4]")),
        ("a hole", one("[3]", "[1,4]")),
        ("unknown type", one("[4]", "[0,4]").replace("U8", "U7")),
        ("no JSON", "{".repeat(50_000)),
        ("no object", "[]".to_string()),
        (
            "overlap",
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#
                .to_string(),
        ),
        (
            "the same name twice",
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#
                .to_string(),
        ),
    ] {
        expect_error(what, file_with(&header, 4));
    }

    // Sizes that each fit 64 bits, and whose sum with the length of the header does not.
    let quarter = (1u64 << 61) - 1;
    let entries = |last: u64| {
        let mut entries: Vec<String> = (0..8)
            .map(|i| {
                format!(
                    r#""t{i}":{{"dtype":"U8","shape":[{quarter}],"data_offsets":[{},{}]}}"#,
                    i * quarter,
                    (i + 1) * quarter
                )
            })
            .collect();
        entries.push(format!(
            r#""u":{{"dtype":"U8","shape":[{last}],"data_offsets":[{},{}]}}"#,
            8 * quarter,
            8 * quarter + last
        ));
        format!("{{{}}}", entries.join(","))
    };
    let error = expect_error("a sum that overflows", file_with(&entries(7), 0));
    assert!(error.contains("ends at byte"), "{error}");

    assert!(TensorStore::open(folder.path().parent().unwrap().join("no such folder").as_path()).is_err());
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(TensorStore::open(folder.path()).is_err(), "a folder in place of the file");
}

#[test]
fn hostile_indices_are_errors() {
    let model = Model::tiny();
    let some = model.tensors.keys().next().unwrap().clone();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret.safetensors"), Model::bytes(&model.tensors)).unwrap();
    let with = |change: &dyn Fn(&mut Value, &Path)| {
        let folder = model.write_shards(2);
        let path = folder.path().join("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut index, folder.path());
        fs::write(&path, index.to_string()).unwrap();
        TensorStore::open(folder.path()).expect_err("an error").to_string()
    };
    let absolute = outside.path().join("secret.safetensors").display().to_string();
    let up = format!("../{}/secret.safetensors", outside.path().file_name().unwrap().to_string_lossy());
    for target in
        [absolute.as_str(), &up, "..", ".", "", "sub/model.safetensors", "./model-00001.safetensors", "a\\b", "a\0b"]
    {
        let error = with(&|index, _| index["weight_map"][&some] = target.into());
        assert!(error.contains("plain file name"), "{target}: {error}");
    }
    let error = with(&|index, _| index["weight_map"][&some] = "model-00009.safetensors".into());
    assert!(error.contains("model-00009.safetensors") && error.contains("missing"), "{error}");
    let error = with(&|_, folder| fs::remove_file(folder.join(shard_name(1))).unwrap());
    assert!(error.contains(&shard_name(1)), "{error}");
    let error = with(&|index, _| index["weight_map"][&some] = shard_name(1).into());
    assert!(error.contains(&some), "{error}");
    let error = with(&|index, _| drop(index["weight_map"].as_object_mut().unwrap().remove(&some)));
    assert!(error.contains(&some) && error.contains("stale"), "{error}");
    let error =
        with(&|_, folder| assert!(fs::copy(folder.join(shard_name(0)), folder.join(shard_name(1))).unwrap() > 0));
    assert!(error.contains("not in it"), "{error}");
    assert!(with(&|index, _| *index = json!({})).contains("weight_map"));
    assert!(with(&|index, _| index["weight_map"] = json!([1])).contains("index.json"));
    assert!(with(&|index, _| index["weight_map"][&some] = 3.into()).contains("index.json"));

    let folder = model.write_shards(1);
    let twice = format!(r#"{{"weight_map": {{"a": "{0}", "a": "{0}"}}}}"#, shard_name(0));
    fs::write(folder.path().join("model.safetensors.index.json"), twice).unwrap();
    assert!(TensorStore::open(folder.path()).unwrap_err().to_string().contains("twice"));
}

#[test]
fn bad_references_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reference.safetensors");
    let store = TensorStore::open(&testdata(MODELOPT).join("reference.safetensors")).unwrap();
    let tensors: BTreeMap<String, Raw> = store
        .iter()
        .filter(|t| !t.name.contains("expert0"))
        .map(|t| (t.name.to_string(), Raw { dtype: t.dtype, shape: t.shape.to_vec(), bytes: t.bytes.to_vec() }))
        .collect();
    let open = |tensors: &BTreeMap<String, Raw>| {
        fs::write(&path, Model::bytes(tensors)).unwrap();
        Reference::open(&path)
    };
    let good = open(&tensors).unwrap();
    assert_eq!((good.layer, good.tokens, good.hidden, good.top_k), (0, 16, 256, 2));
    assert_eq!((good.x.len(), good.topk_ids.len(), good.topk_weights.len()), (16 * 256, 32, 32));
    assert_eq!((good.out.unwrap().len(), good.router_logits.unwrap().len()), (16 * 256, 16 * 8));

    for name in ["x", "topk_ids", "topk_weights_f32", "routed_out_f32"] {
        let mut missing = tensors.clone();
        missing.remove(name);
        assert_eq!(tensor_error(open(&missing).unwrap_err()).0, name);
        let mut wrong = tensors.clone();
        wrong.insert(name.to_string(), Raw { dtype: Dtype::U8, shape: vec![16, 2], bytes: vec![0; 32] });
        assert_eq!(tensor_error(open(&wrong).unwrap_err()).0, name);
    }
    let mut wrong = tensors.clone();
    wrong.insert("topk_ids".into(), Raw { dtype: Dtype::I32, shape: vec![8, 2], bytes: vec![0; 64] });
    assert_eq!(tensor_error(open(&wrong).unwrap_err()).0, "topk_ids");
    let mut fewer = tensors;
    fewer.remove("out_f32");
    fewer.remove("router_logits_f32");
    assert!(open(&fewer).unwrap().out.is_none());
}

/// Opens, inspects and loads whatever is there. The result does not matter, only that there is one.
fn exercise(folder: &Path) {
    if let Ok(checkpoint) = Checkpoint::open(folder) {
        let _ = checkpoint.inspect();
        for layer in checkpoint.moe_layers() {
            let _ = checkpoint.load_nvfp4(layer);
            let _ = checkpoint.load_moe(layer);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(
        length in prop::option::of(any::<prop::sample::Index>()),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        sharded in any::<bool>(),
    ) {
        let folder = if sharded { Model::tiny().write_shards(2) } else { Model::tiny().write() };
        let target = if sharded { shard_name(0) } else { "model.safetensors".to_string() };
        let path = folder.path().join(target);
        let mut bytes = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (at, byte) in flips {
            bytes[at.index(header)] = byte;
        }
        if let Some(length) = length {
            bytes.truncate(length.index(bytes.len()));
        }
        fs::write(&path, bytes).unwrap();
        exercise(folder.path());
    }

    #[test]
    fn damaged_numbers_in_the_header_never_panic(
        which in any::<prop::sample::Index>(),
        number in prop_oneof![any::<u64>().prop_map(|n| n.to_string()), Just("-1".to_string()), Just("1e400".to_string()), (0u64..600).prop_map(|n| n.to_string())],
    ) {
        let bytes = Model::bytes(&Model::tiny().tensors);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
        // Replaces one number of a shape or an offset.
        let starts: Vec<usize> = header
            .char_indices()
            .filter(|&(i, c)| c.is_ascii_digit() && header[..i].ends_with(['[', ',']))
            .map(|(i, _)| i)
            .collect();
        let start = starts[which.index(starts.len())];
        let end = start + header[start..].find(|c: char| !c.is_ascii_digit()).unwrap();
        let damaged = format!("{}{number}{}", &header[..start], &header[end..]);
        let mut file = (damaged.len() as u64).to_le_bytes().to_vec();
        file.extend(damaged.bytes());
        file.extend(&bytes[8 + length..]);
        let folder = Model::tiny().write();
        fs::write(folder.path().join("model.safetensors"), file).unwrap();
        exercise(folder.path());
    }

    #[test]
    fn damaged_json_never_panics(
        index in any::<bool>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let folder = Model::tiny().write_shards(2);
        let path = folder.path().join(if index { "model.safetensors.index.json" } else { "config.json" });
        let mut bytes = fs::read(&path).unwrap();
        for (at, byte) in flips {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        fs::write(&path, bytes).unwrap();
        exercise(folder.path());
    }
}

#[test]
fn biases_of_experts_are_read_and_matrices_alone_are_refused() {
    let mut model = Model::tiny();
    let plain = Checkpoint::open(model.write().path()).unwrap().load_nvfp4(0).unwrap();
    assert!(plain.b13().is_none());
    let name = |expert: usize, part: &str| format!("model.layers.0.mlp.experts.{expert}.{part}_proj.bias");
    for expert in 0..2 {
        for (index, part) in ["gate", "up", "down"].into_iter().enumerate() {
            let values: Vec<f32> = (0..16).map(|row| (row + 100 * index + 1000 * expert) as f32).collect();
            model.tensors.insert(name(expert, part), Raw::f32(&[16], &values));
        }
    }
    let folder = model.write();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let experts = checkpoint.load_nvfp4(0).unwrap();
    // Up before gate, expert by expert.
    let (b13, b2) = (experts.b13().unwrap(), experts.b2().unwrap());
    assert_eq!((b13.len(), b2.len()), (64, 32));
    assert_eq!([b13[0], b13[16], b13[32 + 3], b13[48 + 5]], [100.0, 0.0, 1103.0, 1005.0]);
    assert_eq!([b2[7], b2[16]], [207.0, 1200.0]);
    assert!(experts.with_biases(None, None).unwrap() == plain);
    let (tensor, problem) = tensor_error(checkpoint.nvfp4_tensors(0).unwrap_err());
    assert!(tensor == name(0, "down") && problem.contains("biases"), "{tensor}: {problem}");

    let mut missing = model.clone();
    missing.tensors.remove(&name(1, "up"));
    let (tensor, problem) = tensor_error(load_error(&missing));
    assert!(tensor == name(1, "up") && problem.contains("missing"), "{tensor}: {problem}");
    for (raw, needle) in [(Raw::f32(&[15], &[0.5; 15]), "[16] needed"), (Raw::f32(&[16], &[f32::NAN; 16]), "NaN")] {
        model.tensors.insert(name(1, "up"), raw);
        let (tensor, problem) = tensor_error(load_error(&model));
        assert!(tensor == name(1, "up") && problem.contains(needle), "{tensor}: {problem}");
    }
}
