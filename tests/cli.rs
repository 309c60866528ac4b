//! The command line as scripts see it: exit codes, JSON, what stderr names, and that every check can fail.

use megamoe::device::Gpu;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const CHECKPOINTS: [(&str, usize); 3] =
    [("qwen3moe-nvfp4-modelopt", 0), ("qwen3moe-nvfp4a16-ct", 0), ("deepseekv3-tiny-nvfp4a16-ct", 1)];

/// Where a bundle keeps the test data, if this runs from one; the command line lies beside it.
fn bundle() -> Option<PathBuf> {
    std::env::var_os("MEGAMOE_TESTDATA").map(PathBuf::from)
}

fn testdata(name: &str) -> PathBuf {
    bundle().unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata")).join(name)
}

/// Whether there is no GPU, which is a failure where one is required.
fn no_gpu() -> bool {
    let Err(error) = Gpu::new(0) else { return false };
    let required = std::env::var("MEGAMOE_REQUIRE_GPU").is_ok_and(|value| value == "1");
    assert!(!required, "a GPU is required: {error}");
    true
}

fn megamoe(args: &[&str]) -> Output {
    megamoe_in(Path::new("."), args)
}

/// The command line: beside the test data in a bundle, else as cargo built it.
fn program() -> PathBuf {
    let beside = bundle().map(|testdata| testdata.with_file_name("megamoe"));
    beside.unwrap_or_else(|| env!("CARGO_BIN_EXE_megamoe").into())
}

fn megamoe_in(dir: &Path, args: &[&str]) -> Output {
    Command::new(program()).args(args).current_dir(dir).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The object on stdout of a run that must end with `code`.
#[track_caller]
fn json(output: &Output, code: i32) -> Value {
    assert_eq!(output.status.code(), Some(code), "{}{}", stdout(output), stderr(output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stdout(output)))
}

/// Bad input: code 2, nothing on stdout, no panic, and an error that holds all of `needed`.
#[track_caller]
fn refused(output: &Output, needed: &[&str]) {
    let error = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{}{error}", stdout(output));
    assert!(output.stdout.is_empty(), "{}", stdout(output));
    assert!(!error.contains("panicked"), "{error}");
    for needed in needed {
        assert!(error.contains(needed), "{error} lacks {needed}");
    }
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// A copy of a checkpoint that a test may damage.
fn copy(name: &str) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(testdata(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

/// Changes the bytes of one tensor of a safetensors file.
fn alter(file: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let mut bytes = std::fs::read(file).unwrap();
    let range = {
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let data = tensors.tensor(tensor).unwrap().data();
        let start = data.as_ptr() as usize - bytes.as_ptr() as usize;
        start..start + data.len()
    };
    change(&mut bytes[range]);
    std::fs::write(file, bytes).unwrap();
}

fn run(checkpoint: &Path, args: &[&str]) -> Output {
    let checkpoint = checkpoint.to_str().unwrap();
    megamoe(&[&["run", "--checkpoint", checkpoint], args].concat())
}

#[test]
fn run_compares_every_back_end_with_the_reference() {
    for (name, layer) in CHECKPOINTS {
        let report = json(&run(&testdata(name), &["--json"]), 0);
        let needed = [
            "checkpoint",
            "layer",
            "format",
            "shape",
            "tokens",
            "routing",
            "topk_sets_equal",
            "shared_expert",
            "results",
        ];
        assert_eq!(keys(&report), BTreeSet::from(needed));
        assert_eq!((&report["routing"], &report["topk_sets_equal"]), (&json!("router"), &json!(true)));
        assert_eq!(report["shared_expert"], name.starts_with("deepseek"));
        assert_eq!(keys(&report["shape"]), BTreeSet::from(["hidden", "intermediate", "experts", "top_k"]));
        assert_eq!((report["layer"].as_u64(), report["tokens"].as_u64()), (Some(layer as u64), Some(16)));
        assert_eq!(report["format"], "nvfp4");
        let results = report["results"].as_array().unwrap();
        let backends: Vec<&str> = results.iter().map(|result| result["backend"].as_str().unwrap()).collect();
        assert_eq!(backends, ["cpu", "emulator", "gpu"]);
        for result in results {
            let needed =
                ["backend", "status", "message", "bits_equal_to_cpu", "max_abs_error", "rel_l2_error", "milliseconds"];
            assert_eq!(keys(result), BTreeSet::from(needed));
            if result["backend"] == "gpu" && no_gpu() {
                assert_eq!((&result["status"], &result["rel_l2_error"]), (&json!("skipped"), &Value::Null));
                continue;
            }
            assert_eq!(result["status"], "ok", "{result}");
            if result["backend"] != "gpu" {
                assert_eq!(result["bits_equal_to_cpu"], true, "{result}");
            }
            let distance = result["rel_l2_error"].as_f64().unwrap();
            assert!(distance > 0.0 && distance < 5e-3, "{result}");
            assert!(result["milliseconds"].as_f64().unwrap() > 0.0);
        }
    }
}

/// The reference's ids and weights give nearly the same output as the router's; other ids than the reference's are said to be.
#[test]
fn run_takes_routing_from_router_or_reference() {
    let checkpoint = testdata("deepseekv3-tiny-nvfp4a16-ct");
    let run = |args: &[&str]| run(&checkpoint, &[&["--json", "--backend", "cpu"], args].concat());
    let report = json(&run(&["--routing", "reference"]), 0);
    assert_eq!((&report["routing"], &report["topk_sets_equal"]), (&json!("reference"), &Value::Null));
    let router = json(&run(&["--routing", "router"]), 0);
    assert_eq!((&router["routing"], &router["topk_sets_equal"]), (&json!("router"), &json!(true)));
    assert!(router["results"][0]["rel_l2_error"].as_f64().unwrap() < 5e-3, "{router}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("other.safetensors");
    std::fs::copy(checkpoint.join("reference.safetensors"), &file).unwrap();
    // The first token's first expert becomes its neighbour, which is not among its others.
    alter(&file, "topk_ids", |bytes| {
        let id = |slot: usize| i32::from_le_bytes(bytes[4 * slot..][..4].try_into().unwrap());
        let others = [id(1), id(2), id(3)];
        let other = (0..16).find(|other| *other != id(0) && !others.contains(other)).unwrap();
        bytes[..4].copy_from_slice(&other.to_le_bytes());
    });
    let file = file.to_str().unwrap();
    let report = json(&run(&["--reference", file]), 0);
    assert_eq!(report["topk_sets_equal"], json!(false));
    // With them the output is another one.
    json(&run(&["--reference", file, "--routing", "reference"]), 1);

    let alone = copy("qwen3moe-nvfp4-modelopt");
    std::fs::remove_file(alone.path().join("reference.safetensors")).unwrap();
    let alone = alone.path().to_str().unwrap();
    refused(&megamoe(&["run", "--checkpoint", alone, "--routing", "reference"]), &["`routing`", "reference file"]);
}

/// Every folder of MEGAMOE_CHECKPOINTS: bf16, fp8, nvfp4, with and without biases and shared experts.
#[test]
fn run_takes_checkpoints_of_every_format() {
    let Some(folders) = std::env::var_os("MEGAMOE_CHECKPOINTS") else {
        println!("skipped: MEGAMOE_CHECKPOINTS is not set");
        return;
    };
    let mut seen = 0;
    for folder in std::fs::read_dir(folders).unwrap().map(|entry| entry.unwrap().path()) {
        if !folder.join("reference.safetensors").exists() {
            continue;
        }
        seen += 1;
        let report = json(&run(&folder, &["--json", "--backend", "emulator"]), 0);
        let result = &report["results"][0];
        assert_eq!(
            (&report["topk_sets_equal"], &result["bits_equal_to_cpu"]),
            (&json!(true), &json!(true)),
            "{report}"
        );
        assert!(result["rel_l2_error"].as_f64().unwrap() < 1e-2, "{report}");
        if report["format"] == "fp8" {
            let report = json(&run(&folder, &["--json", "--backend", "emulator", "--fp8-activations"]), 0);
            let distance = report["results"][0]["rel_l2_error"].as_f64().unwrap();
            assert!(distance > 1e-2 && distance < 8e-2, "{report}");
        }
    }
    assert!(seen > 0, "no checkpoints there");
}

#[test]
fn run_says_in_words_that_bits_agree() {
    let output = run(&testdata("qwen3moe-nvfp4-modelopt"), &["--backend", "emulator"]);
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    for needed in ["All bits agree", "relative L2", "8 experts", "modelopt"] {
        assert!(text.contains(needed), "{text}");
    }
    assert!(!text.contains('\x1b'), "colours in a pipe");
}

#[test]
fn run_without_a_gpu() {
    if !no_gpu() {
        println!("skipped: there is a GPU");
        return;
    }
    refused(&run(&testdata("qwen3moe-nvfp4-modelopt"), &["--backend", "gpu", "--json"]), &["no usable GPU"]);
}

#[test]
fn run_takes_the_first_tokens_of_a_reference() {
    let checkpoint = testdata("qwen3moe-nvfp4-modelopt");
    let report = json(&run(&checkpoint, &["--json", "--backend", "emulator", "--tokens", "3"]), 0);
    assert_eq!((report["tokens"].as_u64(), report["results"].as_array().unwrap().len()), (Some(3), 1));
    json(&run(&checkpoint, &["--json", "--backend", "emulator", "--tokens", "0"]), 0);
    refused(&run(&checkpoint, &["--tokens", "17"]), &["`tokens` is 17", "16"]);
}

#[test]
fn run_draws_inputs_where_there_is_no_reference() {
    let checkpoint = copy("qwen3moe-nvfp4a16-ct");
    std::fs::remove_file(checkpoint.path().join("reference.safetensors")).unwrap();
    let report = json(&run(checkpoint.path(), &["--json", "--tokens", "5", "--seed", "7", "--backend", "emulator"]), 0);
    let result = &report["results"][0];
    assert_eq!((&result["rel_l2_error"], &result["max_abs_error"]), (&Value::Null, &Value::Null));
    assert_eq!((&result["bits_equal_to_cpu"], &report["tokens"]), (&json!(true), &json!(5)));
    refused(&run(checkpoint.path(), &["--tokens", "99999999999"]), &["`tokens`"]);
}

#[test]
fn a_reference_that_says_otherwise_is_a_disagreement() {
    let checkpoint = testdata("qwen3moe-nvfp4-modelopt");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("other.safetensors");
    let altered = |change: &dyn Fn(f32) -> f32, elements: usize| {
        std::fs::copy(checkpoint.join("reference.safetensors"), &file).unwrap();
        alter(&file, "routed_out_f32", |bytes| {
            for word in bytes.chunks_exact_mut(4).take(elements) {
                let value = f32::from_le_bytes(word.try_into().unwrap());
                word.copy_from_slice(&change(value).to_le_bytes());
            }
        });
        run(&checkpoint, &["--json", "--backend", "cpu", "--reference", file.to_str().unwrap()])
    };
    json(&altered(&|value| value, 0), 0);
    // 1 % is within what activations in bf16 may do, 3 % is not.
    json(&altered(&|value| value * 1.01, usize::MAX), 0);
    let report = json(&altered(&|value| value * 1.03, usize::MAX), 1);
    assert!(report["results"][0]["rel_l2_error"].as_f64().unwrap() > 2e-2);
    assert_eq!(report["results"][0]["status"], "ok");
    json(&altered(&|_| f32::NAN, 1), 1);
}

#[test]
fn references_that_do_not_fit_are_refused() {
    let checkpoint = testdata("qwen3moe-nvfp4-modelopt");
    let other = testdata("deepseekv3-tiny-nvfp4a16-ct");
    let reference = |args: &[&str]| run(&checkpoint, &[&["--reference"], args].concat());
    refused(&reference(&[other.join("reference.safetensors").to_str().unwrap()]), &["layer 1"]);
    refused(&reference(&["/nonexistent.safetensors"]), &["/nonexistent.safetensors"]);
    refused(&reference(&[checkpoint.join("config.json").to_str().unwrap()]), &["config.json"]);
    refused(&run(&checkpoint, &["--layer", "9"]), &["layers.9"]);

    let mixed = copy("qwen3moe-nvfp4-modelopt");
    let (from, to) = ("num_experts_per_tok\": 2", "num_experts_per_tok\": 3");
    let config = std::fs::read_to_string(mixed.path().join("config.json")).unwrap();
    assert!(config.contains(from));
    std::fs::write(mixed.path().join("config.json"), config.replace(from, to)).unwrap();
    refused(&run(mixed.path(), &[]), &["`topk_ids`", "3 needed"]);
}

#[test]
fn damaged_checkpoints_are_refused_by_name() {
    let name = "qwen3moe-nvfp4-modelopt";
    refused(&run(Path::new("/nonexistent"), &["--json"]), &["/nonexistent"]);

    for keep in [0, 7, 100, 500_000] {
        let truncated = copy(name);
        let file = truncated.path().join("model.safetensors");
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(keep).unwrap();
        refused(&run(truncated.path(), &["--json"]), &["model.safetensors"]);
    }

    let scale = copy(name);
    let tensor = "model.layers.0.mlp.experts.3.up_proj.weight_scale_2";
    alter(&scale.path().join("model.safetensors"), tensor, |bytes| bytes.copy_from_slice(&f32::NAN.to_le_bytes()));
    refused(&run(scale.path(), &[]), &["weight_scale_2", "3", "NaN"]);

    let config = copy(name);
    std::fs::write(config.path().join("config.json"), "{").unwrap();
    refused(&run(config.path(), &[]), &["config.json"]);

    let reference = copy(name);
    let file = reference.path().join("reference.safetensors");
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(300_000).unwrap();
    refused(&run(reference.path(), &[]), &["reference.safetensors"]);
}

#[test]
fn other_activations_and_formats_are_refused() {
    let gelu = copy("qwen3moe-nvfp4-modelopt");
    let config = std::fs::read_to_string(gelu.path().join("config.json")).unwrap();
    assert!(config.contains("\"silu\""));
    std::fs::write(gelu.path().join("config.json"), config.replace("\"silu\"", "\"gelu\"")).unwrap();
    refused(&run(gelu.path(), &[]), &["`hidden_act` is `gelu`"]);
}

#[test]
fn usage_errors_have_code_2() {
    for args in [
        &["run"][..],
        &["run", "--checkpoint", ".", "--backend", "tpu"],
        &["diff"],
        &["diff", "--op", "sin"],
        &["diff", "--op", "exp", "--all"],
        &["diff", "--op", "exp", "--split", "3"],
        &["diff", "--op", "nvfp4_layer", "--order", "fast"],
        &["diff", "--op", "exp", "--family", "odd"],
        &["nonsense"],
        &[],
    ] {
        assert_eq!(megamoe(args).status.code(), Some(2), "{args:?}");
    }
    refused(&megamoe(&["diff", "--op", "nvfp4_layer", "--shape", "hidden=24"]), &["`hidden` is 24"]);
    refused(&megamoe(&["diff", "--op", "nvfp4_layer", "--shape", "depth=24"]), &["`shape`", "depth=24"]);
    refused(&megamoe(&["diff", "--op", "nvfp4_layer", "--limit", "-1"]), &["`limit` is -1"]);
    refused(&megamoe(&["diff", "--op", "mxfp4_layer", "--shape", "hidden=48"]), &["`hidden` is 48", "multiple of 32"]);
    for what in [&["--op", "nvfp4_layer"][..], &["--all"]] {
        let decode = [&["diff", "--order", "decode", "--split", "4"], what].concat();
        refused(&megamoe(&decode), &["`split` is 4", "order decode"]);
    }
    let clamped = ["diff", "--op", "mxfp4_layer", "--gating", "swiglu_oai", "--limit", "0"];
    refused(&megamoe(&clamped), &["`limit` is 0"]);
    refused(&megamoe(&["diff", "--op", "swiglu", "--shape", "count=5000"]), &["`count` is 5000"]);
    let huge = "hidden=1048576,intermediate=1048576,experts=4096";
    refused(&megamoe(&["diff", "--op", "nvfp4_layer", "--shape", huge]), &["`shape`", "16 GiB"]);
}

fn probe() -> Value {
    serde_json::from_str(include_str!("../examples/probe.json")).unwrap()
}

fn diff_file(case: &Value, args: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("case.json"), case.to_string()).unwrap();
    megamoe_in(dir.path(), &[&["diff", "--case", "case.json"], args].concat())
}

#[test]
fn diff_runs_a_case_written_by_hand() {
    let report = json(&diff_file(&probe(), &["--json"]), 0);
    assert_eq!(report["agreed"], true);
    for result in report["results"].as_array().unwrap().iter().filter(|result| result["status"] == "ok") {
        // 128.0, then zeros.
        let row = result["bits"][0].as_str().unwrap();
        assert_eq!(row, format!("4300{}", " 0000".repeat(127)));
    }
    let statuses: Vec<&Value> = report["results"].as_array().unwrap().iter().map(|result| &result["status"]).collect();
    assert_eq!(statuses[..2], ["ok", "ok"]);

    // A negative up, and scales of one half on all of it.
    let mut case = probe();
    case["arrays"]["w13"]["set"][1][1] = json!("0x9");
    case["arrays"]["s13"] = json!({ "set": [[[1, 0, 0], "0x30"]], "padding": "0x7f" });
    case["expected"]["set"][0][1] = json!(-64.0);
    json(&diff_file(&case, &["--json"]), 0);
}

#[test]
fn diff_finds_a_wrong_value() {
    let mut case = probe();
    case["expected"]["set"][0] = json!([3, 128.0]);
    let output = diff_file(&case, &[]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    for needed in ["first mismatch: token 0, column 0", "0x4300", "0x0000", "DISAGREE"] {
        assert!(text.contains(needed), "{text}");
    }
    let report = json(&diff_file(&case, &["--json"]), 1);
    let compared = report["comparisons"].as_array().unwrap();
    let emulator = |reference: &str| {
        compared.iter().find(|pair| pair["reference"] == reference && pair["backend"] == "emulator").unwrap()
    };
    assert_eq!((emulator("cpu")["wrong"].as_u64(), emulator("expected")["wrong"].as_u64()), (Some(0), Some(2)));
}

#[test]
fn diff_refuses_wrong_case_files() {
    let mut case = probe();
    case["arrays"]["topk_ids"] = json!([1, 2]);
    refused(&diff_file(&case, &[]), &["case.json", "`topk_ids`", "1 needed"]);
    refused(&diff_file(&probe(), &["--op", "exp"]), &["`op` is exp", "nvfp4_layer"]);
    refused(&diff_file(&json!(3), &[]), &["case.json"]);
    refused(&megamoe(&["diff", "--case", "/nonexistent.json"]), &["/nonexistent.json"]);
    let mut case = probe();
    case["arrays"]["alpha1"] = json!({ "fill": "nan" });
    refused(&diff_file(&case, &[]), &["alpha1"]);
}

#[test]
fn saved_cases_replay() {
    let dir = tempfile::tempdir().unwrap();
    let shape = "hidden=48,intermediate=32,output=20,experts=5,top_k=3,tokens=6";
    let drawn = ["diff", "--op", "nvfp4_layer", "--family", "special", "--seed", "9", "--shape", shape, "--split", "2"];
    let options =
        ["--activation", "f16", "--limit", "3.5", "--save", "saved.json", "--report", "report.html", "--json"];
    let first = json(&megamoe_in(dir.path(), &[&drawn[..], &options].concat()), 0);
    let again = json(&megamoe_in(dir.path(), &["diff", "--case", "saved.json", "--json"]), 0);
    assert_eq!(first["description"], again["description"]);
    for (first, again) in first["results"].as_array().unwrap().iter().zip(again["results"].as_array().unwrap()) {
        assert_eq!((&first["backend"], &first["bits"]), (&again["backend"], &again["bits"]));
    }
    assert_eq!(first["results"][0]["bits"].as_array().unwrap().len(), 6);
    let page = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    for needed in ["Every comparison agrees", "nvfp4_layer", "split 2", "family special, seed 9"] {
        assert!(page.contains(needed), "{needed}");
    }
}

/// The order of sums is saved, and is not the usual one.
#[test]
fn saved_cases_keep_their_order_of_sums() {
    let dir = tempfile::tempdir().unwrap();
    // Long sums and f16: of short ones h and the output, which are rounded, show no order.
    let shape = "hidden=2048,intermediate=128,tokens=40";
    let drawn = ["--op", "nvfp4_layer", "--activation", "f16", "--shape", shape];
    let run = |options: &[&str]| {
        let layer = ["diff", "--backend", "cpu", "--json"];
        json(&megamoe_in(dir.path(), &[&layer[..], options].concat()), 0)
    };
    let first = run(&[&drawn[..], &["--order", "decode", "--save", "decode.json"]].concat());
    assert!(first["description"].as_str().unwrap().contains("order decode"), "{}", first["description"]);
    let again = run(&["--case", "decode.json"]);
    assert_eq!(
        (&first["description"], &first["results"][0]["bits"]),
        (&again["description"], &again["results"][0]["bits"])
    );
    let seed = run(&[&drawn[..], &["--order", "seed"]].concat());
    assert!(seed["description"].as_str().unwrap().contains("order seed, split 4"), "{}", seed["description"]);
    assert!(first["results"][0]["bits"] != seed["results"][0]["bits"]);
}

#[test]
fn saved_mxfp4_cases_replay() {
    let dir = tempfile::tempdir().unwrap();
    for activation in ["bf16", "f16"] {
        let shape = "hidden=96,intermediate=32,output=20,experts=5,top_k=3,tokens=6";
        let drawn = [
            "diff",
            "--op",
            "mxfp4_layer",
            "--gating",
            "swiglu_oai",
            "--biases",
            "--family",
            "codes",
            "--shape",
            shape,
        ];
        let options = ["--activation", activation, "--save", "saved.json", "--json"];
        let first = json(&megamoe_in(dir.path(), &[&drawn[..], &options].concat()), 0);
        let words = first["description"].as_str().unwrap();
        assert!(words.contains("swiglu_oai with alpha 1.702, limit 7, biases"), "{words}");
        let again = json(&megamoe_in(dir.path(), &["diff", "--case", "saved.json", "--json"]), 0);
        assert_eq!(
            (words, &first["results"][0]["bits"]),
            (again["description"].as_str().unwrap(), &again["results"][0]["bits"])
        );
        // The file is what is run: other biases, other bits.
        let text = std::fs::read_to_string(dir.path().join("saved.json")).unwrap();
        let mut file: Value = serde_json::from_str(&text).unwrap();
        file["arrays"]["b2"] = serde_json::json!({ "fill": 3 });
        std::fs::write(dir.path().join("other.json"), file.to_string()).unwrap();
        let other = json(&megamoe_in(dir.path(), &["diff", "--case", "other.json", "--json"]), 0);
        assert_ne!(first["results"][0]["bits"], other["results"][0]["bits"]);
    }
}

#[test]
fn diff_agrees_with_measured_products() {
    let golden = testdata("golden/hmma_m16n8k16_h200.tsv");
    let report = json(&megamoe(&["diff", "--case", golden.to_str().unwrap(), "--json", "--backend", "emulator"]), 0);
    let compared = report["comparisons"].as_array().unwrap();
    assert!(compared.iter().any(|pair| pair["reference"] == "expected" && pair["backend"] == "emulator"));

    // One bit of one result.
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(&golden).unwrap();
    assert!(text.contains("c8377614"));
    std::fs::write(dir.path().join("wrong.tsv"), text.replace("c8377614", "c8377615")).unwrap();
    let report = json(&megamoe_in(dir.path(), &["diff", "--case", "wrong.tsv", "--json"]), 1);
    let wrong = report["comparisons"].as_array().unwrap().iter().filter(|pair| pair["wrong"] == 1).count();
    assert!(wrong >= 2, "CPU and emulator differ from the file, not from each other");
}

#[test]
fn diff_all_compares_every_operation() {
    let dir = tempfile::tempdir().unwrap();
    let report = json(&megamoe_in(dir.path(), &["diff", "--all", "--cases", "1", "--json"]), 0);
    let sections = report["sections"].as_array().unwrap();
    let ops: BTreeSet<&str> = sections.iter().map(|section| section["op"].as_str().unwrap()).collect();
    assert_eq!(ops.len(), 9, "{ops:?}");
    for section in sections {
        let compared = section["comparisons"].as_array().unwrap();
        assert!(compared.iter().any(|pair| pair["backend"] == "emulator"), "{section}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a replay file although all agree");
}

#[test]
fn the_emulator_takes_every_architectures_paths() {
    for arch in ["sm_80", "sm_90", "sm_100", "sm_120"] {
        for op in ["e4m3_encode", "e4m3_decode", "e2m1_decode", "nvfp4_layer"] {
            let shape = "hidden=32,intermediate=16,experts=2,tokens=300";
            json(&megamoe(&["diff", "--op", op, "--arch", arch, "--shape", shape, "--json", "--activation", "f16"]), 0);
        }
    }
}

#[test]
fn inspect_shows_formats_and_plans() {
    let checkpoint = testdata("deepseekv3-tiny-nvfp4a16-ct");
    let report = json(&megamoe(&["inspect", checkpoint.to_str().unwrap(), "--json"]), 0);
    assert_eq!(report["layers"][1]["moe"]["formats"], json!(["nvfp4 (compressed-tensors)"]));
    assert_eq!((&report["layers"][0]["moe"], &report["plans"][0]["layer"]), (&Value::Null, &json!(1)));
    assert_eq!(report["plans"][0]["kernels"].as_array().unwrap().len(), 4);
    assert!(stdout(&megamoe(&["inspect", checkpoint.to_str().unwrap()])).contains("fc1_decode"));
    refused(&megamoe(&["inspect", "/nonexistent"]), &["/nonexistent"]);
}

/// A checkpoint of one layer whose experts are these tensors, all zeros.
fn checkpoint_of(model_type: &str, tensors: &[(&str, Dtype, &[usize])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": model_type, "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128, "num_experts": 2,
        "num_experts_per_tok": 2, "norm_topk_prob": true, "hidden_act": "silu",
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let zeros = vec![0; 1 << 18];
    let views = tensors.iter().map(|(name, dtype, shape)| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let name = format!("model.layers.0.mlp.experts.{name}");
        (name, TensorView::new(*dtype, shape.to_vec(), &zeros[..bytes]).unwrap())
    });
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    folder
}

/// Layers of every format that `run` takes have a plan, with the kernels that `run` launches.
#[test]
fn inspect_plans_every_format() {
    let (gate, down): (&[usize], &[usize]) = (&[128, 256], &[256, 128]);
    let of = |dtype: Dtype, scale: Option<&'static str>| {
        let mut names = Vec::new();
        for (expert, name) in (0..2).flat_map(|e| ["gate", "up", "down"].map(|name| (e, name))) {
            let (shape, blocks): (_, &[usize]) = if name == "down" { (down, &[2, 1]) } else { (gate, &[1, 2]) };
            names.push((format!("{expert}.{name}_proj.weight"), dtype, shape));
            if let Some(scale) = scale {
                names.push((format!("{expert}.{name}_proj.{scale}"), Dtype::F32, blocks));
            }
        }
        let borrowed: Vec<_> = names.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, *shape)).collect();
        checkpoint_of("qwen3_moe", &borrowed)
    };
    let mxfp4 = checkpoint_of(
        "gpt_oss",
        &[
            ("gate_up_proj_blocks", Dtype::U8, &[2, 256, 8, 16]),
            ("gate_up_proj_scales", Dtype::U8, &[2, 256, 8]),
            ("gate_up_proj_bias", Dtype::BF16, &[2, 256]),
            ("down_proj_blocks", Dtype::U8, &[2, 256, 4, 16]),
            ("down_proj_scales", Dtype::U8, &[2, 256, 4]),
            ("down_proj_bias", Dtype::BF16, &[2, 256]),
        ],
    );
    let bf16 = of(Dtype::BF16, None);
    let fp8 = of(Dtype::F8_E4M3, Some("weight_scale_inv"));
    let quantised: &[&str] = &["--fp8-activations", "--tokens", "1024"];
    for (folder, more, arithmetic, count, kernel) in [
        (&mxfp4, &[][..], "mxfp4", 4, "fc1_decode"),
        (&bf16, &[], "bf16", 8, "moe_bf16_grouped_gemm"),
        (&fp8, &[], "w8a16", 8, "moe_fp8_grouped_gemm"),
        (&fp8, quantised, "w8a8", 7, "moe_w8a8_gateup_silu_e4m3"),
    ] {
        let path = folder.path().to_str().unwrap();
        let text = stdout(&megamoe(&[&["inspect", path], more].concat()));
        assert!(text.contains(&format!("Plan of layer 0 ({arithmetic})")) && text.contains(kernel), "{text}");
        let report = json(&megamoe(&[&["inspect", path, "--json"], more].concat()), 0);
        let plan = &report["plans"][0];
        assert_eq!((&plan["arithmetic"], &plan["problem"]), (&json!(arithmetic), &Value::Null));
        assert!(plan["workspace_bytes"].as_u64() > Some(1000));
        let kernels = plan["kernels"].as_array().unwrap();
        assert_eq!(kernels.len(), count, "{kernels:?}");
        let name = |launch: &Value| launch["kernel"].as_str().unwrap().to_owned();
        assert!(kernels.iter().any(|launch| name(launch).starts_with(kernel)), "{kernels:?}");
        assert!(kernels.iter().all(|launch| launch["blocks"].as_u64() > Some(0)));
    }
    // What `run` does not take has no plan, and says why.
    let other = of(Dtype::I16, None);
    let report = json(&megamoe(&["inspect", other.path().to_str().unwrap(), "--json"]), 0);
    let plan = &report["plans"][0];
    assert_eq!((&plan["arithmetic"], &plan["kernels"]), (&Value::Null, &json!([])));
    assert!(plan["problem"].as_str().unwrap().contains("I16"), "{plan}");
}

#[test]
fn info_lists_modules_and_kernels() {
    let report = json(&megamoe(&["info", "--json"]), 0);
    assert!(report["modules"].as_array().unwrap().iter().all(|module| module["entries"].as_u64() > Some(10)));
    let kernels = report["kernels"].as_array().unwrap();
    assert!(kernels.iter().any(|kernel| kernel["kernel"] == "combine_f32_bf16" && kernel["threads"] == 256));
    assert_eq!(report["no_gpu"].is_string(), no_gpu());
}

/// A folder's name need not be UTF-8, and JSON must be.
#[cfg(unix)]
#[test]
fn json_of_a_path_that_is_no_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"bad\xff\xfe"));
    std::os::unix::fs::symlink(testdata("qwen3moe-nvfp4-modelopt"), &odd).unwrap();
    for command in [&["run", "--backend", "cpu", "--json", "--checkpoint"][..], &["inspect", "--json"]] {
        let output = Command::new(program()).args(command).arg(&odd).output().unwrap();
        assert!(json(&output, 0)["checkpoint"].as_str().unwrap().contains("bad"), "{command:?}");
    }
}

/// A result that cannot be written is an error; a reader that has gone away is none.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_noticed() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(program()).args(["info", "--json"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("standard output"), "{}", stderr(&output));
}

#[test]
fn no_cases_and_lists_as_json_are_refused() {
    assert_eq!(megamoe(&["diff", "--all", "--cases", "0"]).status.code(), Some(2));
    assert_eq!(megamoe(&["bench", "decode", "--list", "--json"]).status.code(), Some(2));
}

#[test]
fn options_of_tables_are_checked() {
    for (table, option, value, name) in [
        ("router", "--tokens", "8,0", "`tokens` is 0"),
        ("router", "--operations", "topk", "`operations` is topk"),
        ("grouped", "--tokens", "0", "`tokens` is 0"),
        ("grouped", "--shapes", "qwen", "`shapes` is qwen"),
        ("grouped", "--arithmetics", "w4a16", "`arithmetics` is w4a16"),
        ("gemm", "--kernels", "moe_w8a8_gateup_silu_e4m3", "moe_w8a8_gateup_silu_e4m3_w2"),
        ("ops", "--experts", "7", "`experts` is 7"),
    ] {
        let output = megamoe(&["bench", table, option, value]);
        assert_eq!(output.status.code(), Some(2), "{table} {option} {value}");
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
    }
}
