//! `megamoe run`: the mixture-of-experts block of one layer of a checkpoint, on every back end.

use super::Verdict;
use super::backend::{BackEnd, Choice, has_exact_bits, open_emulator, open_gpu};
use super::block::{Block, BlockInputs, BlockResult, OnDevice};
use super::output::{self, Progress, verdict_cell};
use console::style;
use cuda_std::arch::ArchId;
use megamoe::checkpoint::{Checkpoint, ExpertFormat, Reference};
use megamoe::device::DeviceHandle;
use megamoe::diff::{Random, floats};
use megamoe::formats::float16;
use megamoe::reference::{LayerInputs, layer_bound};
use megamoe::{Error, LayerShape, Result, XType};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Tokens where neither a reference nor an option says how many.
const DEFAULT_TOKENS: usize = 16;

/// The largest relative distance (L2) from the reference output that counts as agreement: it was computed with activations in f32.
const MAX_REL_L2: f64 = 2e-2;

/// The same with e4m3 activations, whose codes have three bits behind the point: x and what joins gate and up are rounded by up to
/// 1/16 each.
const MAX_REL_L2_E4M3: f64 = 8e-2;

/// The largest relative distance from the CPU's result on a GPU with other tensor cores, where no bound of the single values is
/// known.
const MAX_REL_L2_TO_CPU: f64 = 1e-2;

/// Where expert ids and weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum RoutingFrom {
    /// The checkpoint's router, from the hidden states.
    Router,
    /// The reference file.
    Reference,
    /// Drawn at random: neither is there.
    #[value(skip)]
    Random,
}

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and safetensors files.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Layer to run [default: the first one with routed experts].
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// Where to run it.
    #[arg(long, value_enum, default_value_t = Choice::All)]
    backend: Choice,
    /// Number of tokens [default: all of the reference's, or 16 random ones].
    #[arg(long, value_name = "M")]
    tokens: Option<usize>,
    /// Where expert ids and weights come from [default: the checkpoint's router, where it has one].
    #[arg(long, value_enum)]
    routing: Option<RoutingFrom>,
    /// Quantise activations to e4m3 before FP8 experts, instead of leaving them bf16.
    #[arg(long)]
    fp8_activations: bool,
    /// Seed of random inputs and of the emulator's scheduling.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// File with inputs and the expected output [default: reference.safetensors in DIR, if there is one].
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    /// As text: a path need not be UTF-8.
    checkpoint: String,
    layer: usize,
    format: &'static str,
    shape: Shape,
    tokens: usize,
    routing: RoutingFrom,
    /// Whether each token has the reference's experts on every back end that ran; null where the router did not choose, or without
    /// a reference.
    topk_sets_equal: Option<bool>,
    /// Whether the output has the shared expert in it.
    shared_expert: bool,
    results: Vec<Outcome>,
}

#[derive(Debug, Serialize)]
struct Shape {
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
}

/// How one back end fared.
#[derive(Debug, Serialize)]
struct Outcome {
    backend: BackEnd,
    status: State,
    message: String,
    bits_equal_to_cpu: Option<bool>,
    max_abs_error: Option<f64>,
    rel_l2_error: Option<f64>,
    milliseconds: Option<f64>,
    #[serde(skip)]
    agrees: bool,
    #[serde(skip)]
    topk_sets_equal: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Skipped,
    Error,
}

/// The batch, and what should come out where a reference says so.
struct Batch {
    tokens: usize,
    x: Vec<u16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    expected: Option<Vec<f32>>,
    /// Ids of the reference.
    expected_ids: Option<Vec<i32>>,
    /// For people: where it came from.
    source: String,
}

impl Batch {
    fn inputs(&self) -> LayerInputs<'_> {
        LayerInputs {
            tokens: self.tokens,
            x: &self.x,
            x_type: XType::Bf16,
            topk_ids: &self.topk_ids,
            topk_w: &self.topk_weights,
        }
    }

    fn block_inputs(&self) -> BlockInputs<'_> {
        BlockInputs { tokens: self.tokens, x: &self.x, topk_ids: &self.topk_ids, topk_weights: &self.topk_weights }
    }
}

pub fn run(args: &Args) -> Result<Verdict> {
    if args.backend == Choice::Gpu {
        // Whoever asks for a GPU alone learns at once that there is none.
        open_gpu()?;
    }
    let progress = Progress::start(format!("reading {}", args.checkpoint.display()));
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let number = args.layer.map_or_else(|| checkpoint.default_layer(), Ok)?;
    let reference = find_reference(args, number)?;
    let writer = format_of(&checkpoint, number);
    progress.now(format!("loading layer {number}"));
    let weights = checkpoint.load_moe(number)?;
    let shape = weights.shape;
    let format = weights.experts.format();
    let routing = match (args.routing, &weights.router, &reference) {
        (Some(RoutingFrom::Router), None, _) => {
            return Err(Error::argument("routing", "router", "a checkpoint that has a router"));
        }
        (Some(RoutingFrom::Reference), _, None) => {
            return Err(Error::argument("routing", "reference", "a reference file"));
        }
        (Some(RoutingFrom::Router) | None, Some(_), _) => RoutingFrom::Router,
        (Some(RoutingFrom::Reference) | None, _, Some(_)) => RoutingFrom::Reference,
        _ => RoutingFrom::Random,
    };
    // An older reference file has the routed experts' output alone.
    let with_shared = reference.as_ref().is_none_or(|(_, reference)| reference.out.is_some());
    let block = Block::new(weights, routing == RoutingFrom::Router, with_shared, args.fp8_activations)?;
    let batch = match &reference {
        Some((path, reference)) => from_reference(path, reference, &shape, args.tokens, block.has_shared())?,
        None => random(&shape, args.tokens.unwrap_or(DEFAULT_TOKENS), args.seed)?,
    };
    batch.inputs().check(&shape, megamoe::Activation::Bf16)?;

    let run = Run { block: &block, batch: &batch, routing };
    progress.now("computing the exact reference on the CPU");
    let cpu = timed(|| run.on_cpu())?;
    let mut results = Vec::new();
    for &backend in args.backend.back_ends() {
        progress.now(format!("running on the {backend}"));
        let outcome = match backend {
            BackEnd::Cpu => run.judge(backend, &cpu.0, &cpu, &Wanted::Bits),
            BackEnd::Emulator => {
                run.on_device(backend, &open_emulator(args.seed, ArchId::Sm90), &cpu.0, |_, work| timed(work))
            }
            BackEnd::Gpu => match open_gpu() {
                Ok(gpu) => run.on_device(backend, &(gpu.clone() as DeviceHandle), &cpu.0, |case, work| {
                    let (result, _) = timed(work)?;
                    // Once more for the time, now that everything is loaded and warm.
                    let ms = gpu.elapsed_ms(|| case.forward())?;
                    Ok((result, f64::from(ms)))
                }),
                Err(error @ Error::NoGpu(_)) if args.backend == Choice::All => Outcome {
                    backend,
                    status: State::Skipped,
                    message: error.to_string(),
                    bits_equal_to_cpu: None,
                    max_abs_error: None,
                    rel_l2_error: None,
                    milliseconds: None,
                    agrees: true,
                    topk_sets_equal: None,
                },
                Err(error) => failed(backend, &error),
            },
        };
        results.push(outcome);
    }
    drop(progress);

    let agreed = results.iter().all(|outcome| outcome.agrees);
    let LayerShape { hidden, intermediate, experts, top_k, .. } = shape;
    let report = Report {
        checkpoint: args.checkpoint.display().to_string(),
        layer: number,
        format,
        shape: Shape { hidden, intermediate, experts, top_k },
        tokens: batch.tokens,
        routing,
        topk_sets_equal: results.iter().filter_map(|outcome| outcome.topk_sets_equal).reduce(|a, b| a && b),
        shared_expert: block.has_shared(),
        results,
    };
    if args.json {
        output::say_json(&report);
    } else {
        print(&report, writer.as_ref(), &batch, run.max_rel_l2());
    }
    Ok(if agreed { Verdict::Agreed } else { Verdict::Disagreed })
}

/// The reference that belongs to `layer`, with its path.
fn find_reference(args: &Args, layer: usize) -> Result<Option<(PathBuf, Reference)>> {
    let beside = args.checkpoint.join("reference.safetensors");
    let path = match &args.reference {
        Some(path) => path.clone(),
        None if beside.exists() => beside,
        None => return Ok(None),
    };
    let reference = Reference::open(&path)?;
    let says_layer = reference.tensors().metadata("moe_layer_index").is_some();
    if says_layer && reference.layer != layer {
        let problem = format!("belongs to layer {}, not to layer {layer}", reference.layer);
        if args.reference.is_some() {
            return Err(Error::Checkpoint { path, problem });
        }
        output::note(format!("{} {problem}: random inputs instead", path.display()));
        return Ok(None);
    }
    Ok(Some((path, reference)))
}

/// The format of a layer's experts with its writer's name, as far as names and types tell.
fn format_of(checkpoint: &Checkpoint, layer: usize) -> Option<ExpertFormat> {
    let info = checkpoint.inspect().layers.into_iter().find(|info| info.layer == layer)?;
    info.moe?.formats.into_iter().find(|format| !matches!(format, ExpertFormat::Other(_)))
}

fn from_reference(
    path: &Path,
    reference: &Reference,
    shape: &LayerShape,
    tokens: Option<usize>,
    with_shared: bool,
) -> Result<Batch> {
    let wrong =
        |tensor: &str, problem: String| Error::Tensor { path: path.to_path_buf(), tensor: tensor.into(), problem };
    if reference.hidden != shape.hidden {
        let problem = format!("{} columns, {} needed, the layer's hidden size", reference.hidden, shape.hidden);
        return Err(wrong("x", problem));
    }
    if shape.output != shape.hidden {
        let problem = format!("{} columns, {} needed, the layer's output width", reference.hidden, shape.output);
        return Err(wrong("routed_out_f32", problem));
    }
    if reference.top_k != shape.top_k {
        let problem = format!("{} columns, {} needed, the layer's experts per token", reference.top_k, shape.top_k);
        return Err(wrong("topk_ids", problem));
    }
    let tokens = match tokens {
        Some(tokens) if tokens > reference.tokens => {
            let needed = format!("at most {}, the tokens of {}", reference.tokens, path.display());
            return Err(Error::argument("tokens", tokens, needed));
        }
        tokens => tokens.unwrap_or(reference.tokens),
    };
    let pairs = tokens * shape.top_k;
    // Without a shared expert both are the same output.
    let expected = reference.out.as_ref().filter(|_| with_shared).unwrap_or(&reference.routed_out);
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(Batch {
        tokens,
        x: reference.x[..tokens * shape.hidden].to_vec(),
        topk_ids: reference.topk_ids[..pairs].to_vec(),
        topk_weights: reference.topk_weights[..pairs].to_vec(),
        expected: Some(expected[..tokens * shape.output].to_vec()),
        expected_ids: Some(reference.topk_ids[..pairs].to_vec()),
        source: format!("of {name}"),
    })
}

/// Hidden states around 1, distinct experts for each token, weights that sum to 1.
fn random(shape: &LayerShape, tokens: usize, seed: u64) -> Result<Batch> {
    let LayerShape { hidden, experts, top_k, .. } = *shape;
    if top_k > experts {
        return Err(Error::argument("top_k", top_k, format!("at most {experts}, the number of experts")));
    }
    // Beside the arrays here, results in f32 and scratch memory grow with it.
    const MOST: usize = 1 << 20;
    if tokens > MOST {
        return Err(Error::argument("tokens", tokens, format!("at most {MOST}")));
    }
    let mut random = Random(seed);
    let x = (0..tokens * hidden).map(|_| float16::bf16_from_f32(random.in_range(-2.0, 2.0))).collect();
    let (mut topk_ids, mut topk_weights) = (Vec::new(), Vec::new());
    let mut all: Vec<i32> = (0..experts as i32).collect();
    for _ in 0..tokens {
        for slot in 0..top_k {
            let chosen = slot + (random.next() % (experts - slot) as u64) as usize;
            all.swap(slot, chosen);
        }
        topk_ids.extend(&all[..top_k]);
        let scores: Vec<f32> = (0..top_k).map(|_| random.in_range(0.1, 1.0)).collect();
        let sum: f32 = scores.iter().sum();
        topk_weights.extend(scores.iter().map(|score| score / sum));
    }
    Ok(Batch {
        tokens,
        x,
        topk_ids,
        topk_weights,
        expected: None,
        expected_ids: None,
        source: format!("at random, seed {seed}"),
    })
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    let value = work()?;
    Ok((value, start.elapsed().as_secs_f64() * 1e3))
}

/// One block and one batch, to be run anywhere.
struct Run<'a> {
    block: &'a Block,
    batch: &'a Batch,
    routing: RoutingFrom,
}

impl Run<'_> {
    fn on_cpu(&self) -> Result<BlockResult> {
        self.block.on_cpu(&self.batch.block_inputs())
    }

    /// The distance from a reference that counts as agreement.
    fn max_rel_l2(&self) -> f64 {
        if self.block.quantises() { MAX_REL_L2_E4M3 } else { MAX_REL_L2 }
    }

    /// How far each value may be from the CPU's on tensor cores that sum otherwise, where that is known.
    fn bound(&self, cpu: &BlockResult) -> Result<Option<Vec<f32>>> {
        let Some((view, options)) = self.block.only_fp4() else { return Ok(None) };
        let BlockResult { topk_ids, topk_weights, .. } = cpu;
        let inputs = LayerInputs { topk_ids, topk_w: topk_weights, ..self.batch.inputs() };
        layer_bound(&view, &options, &inputs).map(Some)
    }

    /// Uploads everything, runs it through `time` and compares. A failure here is the back end's, not the input's.
    fn on_device(
        &self,
        backend: BackEnd,
        device: &DeviceHandle,
        cpu: &BlockResult,
        time: impl FnOnce(&OnDevice, &dyn Fn() -> Result<BlockResult>) -> Result<(BlockResult, f64)>,
    ) -> Outcome {
        let work = || {
            let case = self.block.on(device, &self.batch.block_inputs())?;
            time(&case, &|| {
                case.forward()?;
                case.take()
            })
        };
        let judged = work().and_then(|result| {
            let wanted = if has_exact_bits(backend, device) {
                Wanted::Bits
            } else {
                self.bound(cpu)?.map_or(Wanted::Near, Wanted::Within)
            };
            Ok(self.judge(backend, cpu, &result, &wanted))
        });
        judged.unwrap_or_else(|error| failed(backend, &error))
    }

    /// Compares with the CPU's result as `wanted` says, and with the reference.
    fn judge(
        &self,
        backend: BackEnd,
        cpu: &BlockResult,
        (result, milliseconds): &(BlockResult, f64),
        wanted: &Wanted,
    ) -> Outcome {
        let mut messages = Vec::new();
        // Routers use no tensor cores: everything has their bits.
        let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
        let same_routing = cpu.topk_ids == result.topk_ids && bits(&cpu.topk_weights) == bits(&result.topk_weights);
        let topk_sets_equal = self
            .batch
            .expected_ids
            .as_ref()
            .filter(|_| self.routing == RoutingFrom::Router)
            .map(|expected| same_sets(&result.topk_ids, expected, self.block.shape.top_k));
        let (cpu, result) = (&cpu.layer, &result.layer);
        let different = cpu.out.iter().zip(&result.out).filter(|(a, b)| a != b).count();
        let comparable = same_routing && cpu.out.len() == result.out.len() && cpu.status == result.status;
        let bits_equal = different == 0 && comparable;
        let agrees_with_cpu = match wanted {
            Wanted::Bits => bits_equal,
            Wanted::Within(bound) => {
                let beyond = beyond(&floats(&cpu.out), &floats(&result.out), bound);
                messages.push(format!("compared by the bound for other tensor cores' sums: {beyond} values beyond it"));
                beyond == 0 && comparable
            }
            Wanted::Near => {
                let Distance { rel_l2, unlike, .. } = Distance::of(&floats(&result.out), &floats(&cpu.out));
                messages.push(format!("{rel_l2:.1e} (relative L2) from the CPU's; other tensor cores sum otherwise"));
                rel_l2 <= MAX_REL_L2_TO_CPU && unlike == 0 && comparable
            }
        };
        let mut agrees = agrees_with_cpu;
        if !same_routing {
            messages.push("ids or weights of experts differ from the CPU's".into());
        }
        if topk_sets_equal == Some(false) {
            messages.push("some tokens have other experts than in the reference".into());
        }
        if different > 0 {
            messages.push(format!("{different} of {} values differ from the CPU's", cpu.out.len()));
        }
        if cpu.status != result.status {
            messages.push(format!("status {:?}, the CPU's is {:?}", result.status, cpu.status));
        } else if cpu.status.bad_id {
            messages.push("`topk_ids` holds ids beyond the last expert; their pairs were skipped".into());
        }
        let distance = self.batch.expected.as_ref().map(|expected| Distance::of(&floats(&result.out), expected));
        if let Some(Distance { unlike, rel_l2, .. }) = distance {
            let most = self.max_rel_l2();
            if rel_l2.is_nan() || rel_l2 > most {
                agrees = false;
                messages.push(format!("further than {most} (relative L2) from the reference"));
            }
            if unlike > 0 {
                agrees = false;
                messages.push(format!("{unlike} values are not finite here or in the reference"));
            }
        }
        Outcome {
            backend,
            status: State::Ok,
            message: messages.join("; "),
            bits_equal_to_cpu: Some(bits_equal),
            max_abs_error: distance.map(|distance| distance.max_abs),
            rel_l2_error: distance.map(|distance| distance.rel_l2),
            milliseconds: Some(*milliseconds),
            agrees,
            topk_sets_equal,
        }
    }
}

/// What a back end owes the CPU's result.
enum Wanted {
    /// Its bits.
    Bits,
    /// Each value no further away than this.
    Within(Vec<f32>),
    /// A small distance of the whole.
    Near,
}

/// Whether each token has the same experts, in whatever order.
fn same_sets(a: &[i32], b: &[i32], top_k: usize) -> bool {
    let sorted = |ids: &[i32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    a.len() == b.len() && a.chunks(top_k).zip(b.chunks(top_k)).all(|(a, b)| sorted(a) == sorted(b))
}

fn failed(backend: BackEnd, error: &Error) -> Outcome {
    Outcome {
        backend,
        status: State::Error,
        message: error.to_string(),
        bits_equal_to_cpu: None,
        max_abs_error: None,
        rel_l2_error: None,
        milliseconds: None,
        agrees: false,
        topk_sets_equal: None,
    }
}

/// Number of values that are further apart than `bound` allows. NaN agrees with NaN.
fn beyond(a: &[f32], b: &[f32], bound: &[f32]) -> usize {
    let apart = |((a, b), bound): &((&f32, &f32), &f32)| {
        let close = a == b || (a.is_nan() && b.is_nan()) || (*a - *b).abs() <= **bound || bound.is_infinite();
        !close
    };
    a.iter().zip(b).zip(bound).filter(apart).count()
}

/// How far an output is from the expected one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Distance {
    max_abs: f64,
    /// |out - expected| / |expected|, both L2 norms; 0 if both are 0.
    rel_l2: f64,
    /// Values that are not finite on one side and another on the other. They take no part in the norms.
    unlike: usize,
}

impl Distance {
    fn of(out: &[f32], expected: &[f32]) -> Self {
        let (mut max_abs, mut error, mut norm, mut unlike) = (0f64, 0f64, 0f64, 0);
        for (&a, &b) in out.iter().zip(expected) {
            if !(a.is_finite() && b.is_finite()) {
                unlike += usize::from(a != b && !(a.is_nan() && b.is_nan()));
                continue;
            }
            let difference = (f64::from(a) - f64::from(b)).abs();
            max_abs = max_abs.max(difference);
            error += difference * difference;
            norm += f64::from(b) * f64::from(b);
        }
        let rel_l2 = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
        Distance { max_abs, rel_l2, unlike }
    }
}

fn print(report: &Report, writer: Option<&ExpertFormat>, batch: &Batch, max_rel_l2: f64) {
    let Shape { hidden, intermediate, experts, top_k } = report.shape;
    let format = writer.map_or(report.format.into(), ToString::to_string);
    output::say(format!(
        "{}, layer {}: {format}, {experts} experts ({top_k} a token), hidden {hidden}, intermediate {intermediate}",
        style(&report.checkpoint).bold(),
        report.layer,
    ));
    let routing = match report.routing {
        RoutingFrom::Router => "experts chosen by the router",
        RoutingFrom::Reference => "experts as in the reference",
        RoutingFrom::Random => "experts at random",
    };
    let shared = if report.shared_expert { ", with the shared expert" } else { "" };
    output::say(format!("{} tokens {}, {routing}{shared}\n", report.tokens, batch.source));
    let mut table = output::table(["back end", "result", "bits", "relative L2", "largest error", "time"]);
    for outcome in &report.results {
        let number = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.3e}"));
        let state = match outcome.status {
            State::Ok => verdict_cell(if outcome.agrees { "ok" } else { "wrong" }, Some(outcome.agrees)),
            State::Skipped => verdict_cell("skipped", None),
            State::Error => verdict_cell("failed", Some(false)),
        };
        let bits = match (outcome.backend, outcome.bits_equal_to_cpu) {
            (BackEnd::Cpu, _) => verdict_cell("the reference", Some(true)),
            (_, Some(true)) => verdict_cell("equal", Some(true)),
            (_, Some(false)) => verdict_cell("differ", outcome.agrees.then_some(true).or(Some(false))),
            (_, None) => comfy_table::Cell::new("–"),
        };
        table.add_row(vec![
            comfy_table::Cell::new(outcome.backend),
            state,
            bits,
            comfy_table::Cell::new(number(outcome.rel_l2_error)),
            comfy_table::Cell::new(number(outcome.max_abs_error)),
            comfy_table::Cell::new(outcome.milliseconds.map_or("–".into(), output::duration)),
        ]);
    }
    output::say_table(&table);
    output::say("");
    for outcome in report.results.iter().filter(|outcome| !outcome.message.is_empty()) {
        output::say(format!("{}: {}", outcome.backend, outcome.message));
    }
    let (good, sentence) = conclusion(report, max_rel_l2);
    output::conclude(good, sentence);
}

/// The last sentence, and whether it is good news.
fn conclusion(report: &Report, max_rel_l2: f64) -> (bool, String) {
    let good = report.results.iter().all(|outcome| outcome.agrees);
    let ran: Vec<&Outcome> = report.results.iter().filter(|outcome| outcome.status == State::Ok).collect();
    let names = ran.iter().map(|outcome| outcome.backend.to_string()).collect::<Vec<_>>().join(", ");
    let equal = ran.iter().all(|outcome| outcome.bits_equal_to_cpu == Some(true));
    let bits = match (good, equal, &ran[..]) {
        (true, true, [only]) if only.backend == BackEnd::Cpu => {
            "The CPU reference ran; nothing was compared with it.".into()
        }
        (true, true, _) => format!("All bits agree ({names}; the CPU's are the reference)."),
        (true, false, _) => "All results are within the bound for this GPU's architecture.".into(),
        (false, ..) => "The results DISAGREE; see the table.".into(),
    };
    let worst = ran.iter().filter_map(|outcome| outcome.rel_l2_error).reduce(f64::max);
    let distance = match worst {
        Some(rel) => format!(
            " The output is {:.3} % (relative L2) from the reference output of the checkpoint's own tools; up to {} % counts as agreement.",
            rel * 100.0,
            max_rel_l2 * 100.0,
        ),
        None => " There was no reference output to compare with.".into(),
    };
    let chosen = match report.topk_sets_equal {
        Some(true) => " Every token has the reference's experts.",
        Some(false) => " Some tokens have other experts than in the reference.",
        None => "",
    };
    (good, bits + &distance + chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use megamoe::checkpoint::{Experts, MoeWeights};

    #[test]
    fn distances() {
        let distance = Distance::of(&[3.0, 4.5, 0.0], &[3.0, 4.0, 0.0]);
        assert_eq!(distance, Distance { max_abs: 0.5, rel_l2: 0.1, unlike: 0 });
        assert_eq!(Distance::of(&[0.0], &[0.0]).rel_l2, 0.0);
        assert_eq!(Distance::of(&[1.0], &[0.0]).rel_l2, f64::INFINITY);
        let special = Distance::of(&[f32::NAN, f32::NAN, f32::INFINITY, 1.0], &[f32::NAN, 1.0, f32::INFINITY, 1.0]);
        assert_eq!((special.unlike, special.rel_l2), (1, 0.0));
    }

    #[test]
    fn bounds() {
        assert_eq!(beyond(&[1.0, f32::NAN, 2.0], &[1.5, f32::NAN, f32::NAN], &[0.5, 0.0, 1.0]), 1);
        assert_eq!(beyond(&[1.0], &[1.5], &[0.25]), 1);
        assert_eq!(beyond(&[1.0], &[f32::NAN], &[f32::INFINITY]), 0);
    }

    #[test]
    fn verdicts() {
        let case = megamoe::diff::Case::new();
        let batch = Batch {
            tokens: 1,
            x: case.x.clone(),
            topk_ids: case.topk_ids.clone(),
            topk_weights: case.topk_w.clone(),
            expected: None,
            expected_ids: None,
            source: String::new(),
        };
        let weights = MoeWeights {
            layer: 0,
            shape: case.shape,
            experts: Experts::Fp4(case.experts().unwrap()),
            router: None,
            shared: None,
            gating: case.options.gating,
        };
        let block = Block::new(weights, true, true, false).unwrap();
        let run = Run { block: &block, batch: &batch, routing: RoutingFrom::Reference };
        let cpu = run.on_cpu().unwrap();
        let judge = |result: &BlockResult, wanted: Wanted| {
            let outcome = run.judge(BackEnd::Gpu, &cpu, &(result.clone(), 1.0), &wanted);
            (outcome.agrees, outcome.bits_equal_to_cpu)
        };
        assert_eq!(judge(&cpu, Wanted::Bits), (true, Some(true)));
        // 128 becomes 129.
        let mut other = cpu.clone();
        other.layer.out[0] += 1;
        assert_eq!(judge(&other, Wanted::Bits), (false, Some(false)));
        assert_eq!(judge(&other, Wanted::Within(vec![1.0; 128])), (true, Some(false)));
        assert_eq!(judge(&other, Wanted::Within(vec![0.5; 128])), (false, Some(false)));
        assert_eq!(judge(&other, Wanted::Near), (true, Some(false)));
        other.layer.out[0] += 3;
        assert_eq!(judge(&other, Wanted::Near), (false, Some(false)));
        let mut status = cpu.clone();
        status.layer.status.f16_range = true;
        assert_eq!(judge(&status, Wanted::Bits), (false, Some(false)));
        let mut routed = cpu.clone();
        routed.topk_weights[0] = f32::from_bits(routed.topk_weights[0].to_bits() + 1);
        assert_eq!(judge(&routed, Wanted::Near), (false, Some(false)));
        let failed = failed(BackEnd::Emulator, &Error::Fault("race".into()));
        assert_eq!((failed.agrees, failed.status, failed.message.as_str()), (false, State::Error, "emulator: race"));
    }

    #[test]
    fn sets_of_experts() {
        assert!(same_sets(&[3, 1, 0, 2], &[1, 3, 0, 2], 2));
        assert!(!same_sets(&[3, 1, 0, 2], &[0, 2, 3, 1], 2));
        assert!(!same_sets(&[3, 1], &[3, 1, 0, 2], 2));
    }

    #[test]
    fn random_batches_have_distinct_experts_and_normalised_weights() {
        let shape = LayerShape { hidden: 32, intermediate: 16, output: 32, experts: 6, top_k: 4 };
        let batch = random(&shape, 50, 3).unwrap();
        for (ids, weights) in batch.topk_ids.chunks(4).zip(batch.topk_weights.chunks(4)) {
            assert!(ids.iter().all(|id| (0..6).contains(id)));
            assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        }
        let error = random(&LayerShape { top_k: 7, ..shape }, 1, 0).err().unwrap().to_string();
        assert!(error.contains("top_k"), "{error}");
    }
}
