//! `megamoe inspect`: what a checkpoint holds, and the plan that each of its layers would get.

use super::Verdict;
use super::backend::{open_emulator, open_gpu};
use super::output;
use comfy_table::Cell;
use console::style;
use cuda_std::arch::ArchId;
use megamoe::checkpoint::{Checkpoint, ExpertFormat, Inspect, LayerInfo, MoeInfo};
use megamoe::device::{DeviceHandle, Grid};
use megamoe::plan::Plan;
use megamoe::{GroupedArithmetic, GroupedOptions, LayerOptions, LayerShape, Result, WeightFormat, grouped_layer};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and safetensors files.
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// Number of tokens to plan for.
    #[arg(long, value_name = "M", default_value_t = 16)]
    tokens: usize,
    /// As `run` does with it: e4m3 activations before FP8 experts, instead of bf16 ones.
    #[arg(long)]
    fp8_activations: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    /// As text: a path need not be UTF-8.
    checkpoint: String,
    #[serde(flatten)]
    inspect: &'a Inspect,
    plans: Vec<LayerPlan>,
}

#[derive(Serialize)]
struct LayerPlan {
    layer: usize,
    device: String,
    tokens: usize,
    /// "nvfp4" or "mxfp4", or the operands of FP8 and BF16 experts: "w8a8", "w8a16", "bf16".
    arithmetic: Option<&'static str>,
    workspace_bytes: Option<usize>,
    kernels: Vec<Launch>,
    /// Why there is no plan.
    problem: Option<String>,
}

/// A kernel with the size of its launch.
#[derive(Serialize)]
pub struct Launch {
    pub kernel: &'static str,
    pub blocks: u32,
    pub shared_bytes: u32,
}

/// The launches of a pass of `plan`.
pub fn launches(plan: &Plan, tokens: usize) -> Vec<Launch> {
    as_launches(plan.describe(tokens))
}

fn as_launches(launches: impl IntoIterator<Item = (&'static str, Grid)>) -> Vec<Launch> {
    let launch = |(kernel, grid): (_, Grid)| Launch { kernel, blocks: grid.blocks, shared_bytes: grid.shared_bytes };
    launches.into_iter().map(launch).collect()
}

pub fn inspect(args: &Args) -> Result<Verdict> {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let inspect = checkpoint.inspect();
    let device = match open_gpu() {
        Ok(gpu) => gpu as DeviceHandle,
        Err(_) => open_emulator(0, ArchId::Sm90),
    };
    let plans: Vec<LayerPlan> =
        inspect.layers.iter().filter_map(|info| plan(&checkpoint, info, &device, args)).collect();
    if args.json {
        output::say_json(&Report { checkpoint: args.checkpoint.display().to_string(), inspect: &inspect, plans });
    } else {
        print(args, &inspect, &plans);
    }
    Ok(Verdict::Agreed)
}

/// The plan of a layer with routed experts; a plan that cannot be made says why.
fn plan(checkpoint: &Checkpoint, info: &LayerInfo, device: &DeviceHandle, args: &Args) -> Option<LayerPlan> {
    let moe = info.moe.as_ref()?;
    let tokens = args.tokens.max(1);
    let arithmetic = arithmetic_of(moe, args.fp8_activations);
    let made = arithmetic.clone().and_then(|arithmetic| {
        let shape = shape_of(checkpoint, moe)?;
        let planned = (|| {
            let gating = checkpoint.config().gating()?;
            Ok(match arithmetic {
                Arithmetic::Fp4(format) => {
                    let options = LayerOptions { format, gating, ..Default::default() };
                    let plan = Plan::new(device, shape, options, tokens)?;
                    (plan.workspace_bytes(), launches(&plan, tokens))
                }
                Arithmetic::Grouped(arithmetic) => {
                    let options = GroupedOptions { arithmetic, gating };
                    let plan = grouped_layer::describe(device.properties(), shape, options, moe.biases, tokens)?;
                    (plan.workspace_bytes, as_launches(plan.launches))
                }
            })
        })();
        planned.map_err(|error: megamoe::Error| error.to_string())
    });
    let (workspace_bytes, kernels, problem) = match made {
        Ok((workspace_bytes, kernels)) => (Some(workspace_bytes), kernels, None),
        Err(problem) => (None, Vec::new(), Some(problem)),
    };
    let device = device.properties().name.clone();
    let arithmetic = arithmetic.ok().map(Arithmetic::name);
    Some(LayerPlan { layer: info.layer, device, tokens: args.tokens, arithmetic, workspace_bytes, kernels, problem })
}

/// What a layer's sums are made of.
#[derive(Clone, Copy)]
enum Arithmetic {
    Fp4(WeightFormat),
    Grouped(GroupedArithmetic),
}

impl Arithmetic {
    fn name(self) -> &'static str {
        match self {
            Arithmetic::Fp4(format) => format.name(),
            Arithmetic::Grouped(arithmetic) => arithmetic.name(),
        }
    }
}

/// The arithmetic that `run` has for experts of the format that they are stored in.
fn arithmetic_of(moe: &MoeInfo, fp8_activations: bool) -> std::result::Result<Arithmetic, String> {
    let of = |format: &ExpertFormat| match format {
        ExpertFormat::Nvfp4ModelOpt | ExpertFormat::Nvfp4CompressedTensors => Ok(Arithmetic::Fp4(WeightFormat::Nvfp4)),
        ExpertFormat::Mxfp4Blocks => Ok(Arithmetic::Fp4(WeightFormat::Mxfp4)),
        ExpertFormat::Fp8ScaleInv | ExpertFormat::Fp8Scale if fp8_activations => {
            Ok(Arithmetic::Grouped(GroupedArithmetic::W8a8))
        }
        ExpertFormat::Fp8ScaleInv | ExpertFormat::Fp8Scale => Ok(Arithmetic::Grouped(GroupedArithmetic::W8a16)),
        ExpertFormat::Bf16 => Ok(Arithmetic::Grouped(GroupedArithmetic::Bf16)),
        ExpertFormat::Other(what) => Err(format!("no layer takes {what}")),
    };
    match &moe.formats[..] {
        [format] => of(format),
        [] => Err("the format of the experts is not known".into()),
        _ => Err("the experts are not all of one format".into()),
    }
}

fn shape_of(checkpoint: &Checkpoint, moe: &MoeInfo) -> std::result::Result<LayerShape, String> {
    let (Some(hidden), Some(intermediate)) = (moe.hidden, moe.intermediate) else {
        return Err("the layout of the experts is not known".into());
    };
    let top_k = checkpoint.config().top_k().map_err(|error| error.to_string())?;
    Ok(LayerShape { hidden, intermediate, output: hidden, experts: moe.experts, top_k })
}

fn print(args: &Args, inspect: &Inspect, plans: &[LayerPlan]) {
    let config = &inspect.config;
    output::say(style(args.checkpoint.display()).bold());
    let size = output::bytes(inspect.bytes);
    output::say(format!("{}: {} tensors in {} files, {size}", config.model_type, inspect.tensors, inspect.files));
    let number = |value: Option<usize>| value.map_or("?".into(), |value| value.to_string());
    output::say(format!(
        "hidden {}, {} experts of width {}, {} a token, scores by {:?}{}\n",
        number(config.hidden),
        number(config.experts),
        number(config.intermediate),
        number(config.top_k),
        config.scoring,
        config.swiglu_limit.map_or(String::new(), |limit| format!(", clamped at {limit}")),
    ));
    let mut table =
        output::table(["layer", "experts", "hidden", "intermediate", "format", "shared expert", "workspace"]);
    for info in &inspect.layers {
        let Some(moe) = &info.moe else {
            table.add_row([Cell::new(info.layer), Cell::new("dense")]);
            continue;
        };
        let formats = moe.formats.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let plan = plans.iter().find(|plan| plan.layer == info.layer);
        let workspace = match plan.map(|plan| (plan.workspace_bytes, &plan.problem)) {
            Some((Some(bytes), _)) => output::bytes(bytes as u64),
            Some((None, Some(problem))) => format!("no plan: {problem}"),
            _ => "–".into(),
        };
        table.add_row([
            Cell::new(info.layer),
            Cell::new(moe.experts),
            Cell::new(number(moe.hidden)),
            Cell::new(number(moe.intermediate)),
            Cell::new(formats),
            Cell::new(if moe.shared_expert { "yes" } else { "no" }),
            Cell::new(workspace),
        ]);
    }
    output::say_table(&table);
    // The first layer of each arithmetic.
    let mut seen = Vec::new();
    for plan in plans.iter().filter(|plan| plan.problem.is_none()) {
        let Some(arithmetic) = plan.arithmetic.filter(|arithmetic| !seen.contains(arithmetic)) else { continue };
        seen.push(arithmetic);
        let LayerPlan { layer, tokens, device, .. } = plan;
        output::say(format!("\nPlan of layer {layer} ({arithmetic}) for {tokens} tokens on {device}:"));
        print_launches(&plan.kernels);
    }
}

/// A table of launches.
pub fn print_launches(launches: &[Launch]) {
    let mut table = output::table(["kernel", "blocks", "shared memory"]);
    for launch in launches {
        table.add_row([
            Cell::new(launch.kernel),
            Cell::new(launch.blocks),
            Cell::new(output::bytes(launch.shared_bytes.into())),
        ]);
    }
    output::say_table(&table);
}
