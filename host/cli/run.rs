//! `megamoe run`: the routed experts of one layer of a checkpoint, on every back end.

use super::Verdict;
use super::backend::{BackEnd, Choice, has_exact_bits, open_emulator, open_gpu};
use super::output::{self, Progress, verdict_cell};
use console::style;
use cuda_std::arch::ArchId;
use megamoe::checkpoint::{Checkpoint, ExpertFormat, Reference};
use megamoe::device::{Buffer, DeviceHandle};
use megamoe::diff::{Random, floats};
use megamoe::formats::{Fp4Experts, float16};
use megamoe::layer::{Hidden, Inputs, Layer};
use megamoe::reference::{Fp4View, LayerInputs, LayerResult, Mode, Status, layer, layer_bound};
use megamoe::workspace::Workspace;
use megamoe::{Error, Gating, LayerOptions, LayerShape, Result, XType};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Tokens where neither a reference nor an option says how many.
const DEFAULT_TOKENS: usize = 16;

/// The largest relative distance (L2) from the reference output that counts as agreement: it was computed with activations in f32.
const MAX_REL_L2: f64 = 2e-2;

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
    let options = options_of(&checkpoint)?;
    let writer = format_of(&checkpoint, number)?;
    progress.now(format!("loading the experts of layer {number}"));
    let experts = checkpoint.load_nvfp4(number)?;
    let shape = shape_of(&checkpoint, &experts, reference.as_ref())?;
    megamoe::plan::check(&shape, &options)?;
    let batch = match &reference {
        Some((path, reference)) => from_reference(path, reference, &shape, args.tokens)?,
        None => random(&shape, args.tokens.unwrap_or(DEFAULT_TOKENS), args.seed)?,
    };
    batch.inputs().check(&shape, options.activation)?;

    let run = Run { shape, options, experts: &experts, batch: &batch };
    progress.now("computing the exact reference on the CPU");
    let cpu = timed(|| run.on_cpu())?;
    let mut results = Vec::new();
    for &backend in args.backend.back_ends() {
        progress.now(format!("running on the {backend}"));
        let outcome = match backend {
            BackEnd::Cpu => run.judge(backend, &cpu.0, &cpu, None),
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
        format: "nvfp4",
        shape: Shape { hidden, intermediate, experts, top_k },
        tokens: batch.tokens,
        results,
    };
    if args.json {
        output::say_json(&report);
    } else {
        print(&report, writer.as_ref(), &batch);
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

/// The NVFP4 format of a layer's experts, as far as names and types tell. An error where they are in a known format that is not
/// NVFP4: the loader would only complain about missing tensors.
fn format_of(checkpoint: &Checkpoint, layer: usize) -> Result<Option<ExpertFormat>> {
    let info = checkpoint.inspect().layers.into_iter().find(|info| info.layer == layer);
    let formats = info.and_then(|info| info.moe).map_or(Vec::new(), |moe| moe.formats);
    let other = |format: &ExpertFormat| !format.is_nvfp4() && !matches!(format, ExpertFormat::Other(_));
    if !formats.is_empty() && formats.iter().all(other) {
        let formats = formats.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let problem = format!("the experts of layer {layer} are {formats}, NVFP4 needed");
        return Err(Error::Checkpoint { path: checkpoint.path().to_path_buf(), problem });
    }
    Ok(formats.into_iter().find(ExpertFormat::is_nvfp4))
}

/// The arithmetic that config.json asks for, or an error where it asks for another one than this layer's.
fn options_of(checkpoint: &Checkpoint) -> Result<LayerOptions> {
    let config = checkpoint.config();
    let other = |what: String| Error::Checkpoint {
        path: config.path().to_path_buf(),
        problem: format!("{what}: experts here compute silu(gate)·up"),
    };
    if config.model_type == "gpt_oss" {
        return Err(other("`model_type` is gpt_oss, whose activation is another".into()));
    }
    match config.activation.as_deref() {
        None | Some("silu" | "swiglu") => {}
        Some(name) => return Err(other(format!("`hidden_act` is {name}"))),
    }
    Ok(LayerOptions { gating: Gating::Silu { limit: config.swiglu_limit }, ..Default::default() })
}

/// Shape of the layer; experts per token come from config.json or, where it is silent, from the reference.
fn shape_of(
    checkpoint: &Checkpoint,
    experts: &Fp4Experts,
    reference: Option<&(PathBuf, Reference)>,
) -> Result<LayerShape> {
    match (checkpoint.config().top_k, reference) {
        (None, Some((_, reference))) => Ok(experts.shape().with_top_k(reference.top_k)),
        _ => checkpoint.layer_shape(experts),
    }
}

fn from_reference(path: &Path, reference: &Reference, shape: &LayerShape, tokens: Option<usize>) -> Result<Batch> {
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
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(Batch {
        tokens,
        x: reference.x[..tokens * shape.hidden].to_vec(),
        topk_ids: reference.topk_ids[..pairs].to_vec(),
        topk_weights: reference.topk_weights[..pairs].to_vec(),
        expected: Some(reference.routed_out[..tokens * shape.output].to_vec()),
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
    Ok(Batch { tokens, x, topk_ids, topk_weights, expected: None, source: format!("at random, seed {seed}") })
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    let value = work()?;
    Ok((value, start.elapsed().as_secs_f64() * 1e3))
}

/// One layer and one batch, to be run anywhere.
struct Run<'a> {
    shape: LayerShape,
    options: LayerOptions,
    experts: &'a Fp4Experts,
    batch: &'a Batch,
}

/// The layer and the batch on a device.
struct OnDevice {
    layer: Layer,
    plan: megamoe::plan::Plan,
    workspace: Workspace,
    tokens: usize,
    x: Buffer<u16>,
    topk_ids: Buffer<i32>,
    topk_weights: Buffer<f32>,
    out: Buffer<u16>,
}

impl OnDevice {
    fn forward(&self) -> Result<()> {
        let OnDevice { topk_ids, topk_weights, tokens, .. } = self;
        let inputs = Inputs { tokens: *tokens, x: Hidden::Bf16(&self.x), topk_ids, topk_weights };
        self.layer.forward(&self.plan, &self.workspace, inputs, &self.out)
    }

    fn take(&self) -> Result<LayerResult> {
        let out = self.out.download()?;
        let status = self.workspace.take_status()?;
        Ok(LayerResult { out, status: Status { bad_id: status.bad_expert_id, f16_range: status.f16_range } })
    }
}

impl Run<'_> {
    fn view(&self) -> Fp4View<'_> {
        Fp4View {
            shape: self.shape,
            format: self.experts.format(),
            w13: self.experts.w13(),
            s13: self.experts.s13().bytes(),
            alpha1: self.experts.alpha1(),
            b13: self.experts.b13(),
            w2: self.experts.w2(),
            s2: self.experts.s2().bytes(),
            alpha2: self.experts.alpha2(),
            b2: self.experts.b2(),
        }
    }

    fn on_cpu(&self) -> Result<LayerResult> {
        layer(&self.view(), &self.options, &self.batch.inputs(), Mode::Exact)
    }

    /// Uploads everything, runs it through `time` and compares. A failure here is the back end's, not the input's.
    fn on_device(
        &self,
        backend: BackEnd,
        device: &DeviceHandle,
        cpu: &LayerResult,
        time: impl FnOnce(&OnDevice, &dyn Fn() -> Result<LayerResult>) -> Result<(LayerResult, f64)>,
    ) -> Outcome {
        let work = || {
            let layer = Layer::new(device, self.experts, self.shape.top_k, self.options)?;
            let plan = layer.plan(self.batch.tokens)?;
            let case = OnDevice {
                workspace: Workspace::new(device, &plan)?,
                tokens: self.batch.tokens,
                x: Buffer::from_slice(device, &self.batch.x)?,
                topk_ids: Buffer::from_slice(device, &self.batch.topk_ids)?,
                topk_weights: Buffer::from_slice(device, &self.batch.topk_weights)?,
                out: Buffer::new(device, self.batch.tokens * self.shape.output)?,
                layer,
                plan,
            };
            // An output that a kernel leaves alone shows up as NaN.
            case.out.fill(0xff)?;
            time(&case, &|| {
                case.forward()?;
                case.take()
            })
        };
        match work() {
            Ok(result) => {
                let bound = (!has_exact_bits(backend, device))
                    .then(|| layer_bound(&self.view(), &self.options, &self.batch.inputs()))
                    .transpose();
                match bound {
                    Ok(bound) => self.judge(backend, cpu, &result, bound.as_deref()),
                    Err(error) => failed(backend, &error),
                }
            }
            Err(error) => failed(backend, &error),
        }
    }

    /// Compares with the CPU's bits, or, where `bound` is given, with how far its result may be from them; and with the reference.
    fn judge(
        &self,
        backend: BackEnd,
        cpu: &LayerResult,
        (result, milliseconds): &(LayerResult, f64),
        bound: Option<&[f32]>,
    ) -> Outcome {
        let mut messages = Vec::new();
        let different = cpu.out.iter().zip(&result.out).filter(|(a, b)| a != b).count();
        let bits_equal = different == 0 && cpu.out.len() == result.out.len() && cpu.status == result.status;
        let mut agrees = bits_equal;
        if let Some(bound) = bound {
            let beyond = beyond(&floats(&cpu.out), &floats(&result.out), bound);
            agrees = beyond == 0 && cpu.out.len() == result.out.len() && cpu.status == result.status;
            messages.push(format!("compared by the bound for other tensor cores' sums: {beyond} values beyond it"));
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
            if rel_l2.is_nan() || rel_l2 > MAX_REL_L2 {
                agrees = false;
                messages.push(format!("further than {MAX_REL_L2} (relative L2) from the reference"));
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
        }
    }
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

fn print(report: &Report, writer: Option<&ExpertFormat>, batch: &Batch) {
    let Shape { hidden, intermediate, experts, top_k } = report.shape;
    let format = writer.map_or("nvfp4".into(), ToString::to_string);
    output::say(format!(
        "{}, layer {}: {format}, {experts} experts ({top_k} a token), hidden {hidden}, intermediate {intermediate}",
        style(&report.checkpoint).bold(),
        report.layer,
    ));
    output::say(format!("{} tokens {}\n", report.tokens, batch.source));
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
    let (good, sentence) = conclusion(report);
    output::conclude(good, sentence);
}

/// The last sentence, and whether it is good news.
fn conclusion(report: &Report) -> (bool, String) {
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
            MAX_REL_L2 * 100.0,
        ),
        None => " There was no reference output to compare with.".into(),
    };
    (good, bits + &distance)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let experts = case.experts().unwrap();
        let batch = Batch {
            tokens: 1,
            x: case.x.clone(),
            topk_ids: case.topk_ids.clone(),
            topk_weights: case.topk_w.clone(),
            expected: None,
            source: String::new(),
        };
        let run = Run { shape: case.shape, options: case.options, experts: &experts, batch: &batch };
        let cpu = run.on_cpu().unwrap();
        let judge = |result: &LayerResult, bound: Option<&[f32]>| {
            let outcome = run.judge(BackEnd::Gpu, &cpu, &(result.clone(), 1.0), bound);
            (outcome.agrees, outcome.bits_equal_to_cpu)
        };
        assert_eq!(judge(&cpu, None), (true, Some(true)));
        // 128 becomes 129.
        let mut other = cpu.clone();
        other.out[0] += 1;
        assert_eq!(judge(&other, None), (false, Some(false)));
        assert_eq!(judge(&other, Some(&[1.0; 128])), (true, Some(false)));
        assert_eq!(judge(&other, Some(&[0.5; 128])), (false, Some(false)));
        let mut status = cpu.clone();
        status.status.f16_range = true;
        assert_eq!(judge(&status, None), (false, Some(false)));
        let failed = failed(BackEnd::Emulator, &Error::Fault("race".into()));
        assert_eq!((failed.agrees, failed.status, failed.message.as_str()), (false, State::Error, "emulator: race"));
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
