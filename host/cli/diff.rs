//! `megamoe diff`: one operation, or all of them, on every back end, compared bit for bit.

use super::Verdict;
use super::backend::{BackEnd, Choice, has_exact_bits, open_emulator, open_gpu};
use super::html;
use super::output::{self, Progress, number, verdict_cell};
use clap::ValueEnum;
use comfy_table::Cell;
use console::style;
use cuda_std::arch::ArchId;
use megamoe::device::DeviceHandle;
use megamoe::diff::{CaseFile, Comparison, DrawOptions, Family, Op, Output, Random, UlpHistogram, draw_op};
use megamoe::{Activation, Error, Gating, LayerOptions, LayerShape, Order, Result, Split};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Options of `diff`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Operation to compare.
    #[arg(long, value_name = "NAME", value_parser = parse_op, required_unless_present_any = ["all", "case"])]
    op: Option<Op>,
    /// Input from a case file (or measured mma results, .tsv).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["all", "shape", "family", "activation", "order", "split", "gating", "limit", "biases"])]
    case: Option<PathBuf>,
    /// Compare every operation with every family of values.
    #[arg(long, conflicts_with = "op")]
    all: bool,
    /// Cases of each operation and family, with `--all`.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    cases: u64,
    /// Seed of the values and of the emulator's scheduling.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Sizes: hidden=256,intermediate=128,output=256,experts=8,top_k=2,tokens=8. Operations on single values take count= (or
    /// rows= and cols=). With `--all`, random ones by default.
    #[arg(long, value_name = "SIZES")]
    shape: Option<String>,
    /// Format of activations and operands.
    #[arg(long, value_enum)]
    activation: Option<ActivationName>,
    /// Order of the sums.
    #[arg(long, value_enum)]
    order: Option<OrderName>,
    /// K split of the first projection in the order seed, which it implies.
    #[arg(long, value_parser = parse_split, value_name = "1|2|4|8")]
    split: Option<Split>,
    /// What joins gate and up: silu, or swiglu_oai (gpt-oss: alpha 1.702, clamp 7 unless --limit says another).
    #[arg(long, value_enum)]
    gating: Option<GatingName>,
    /// Clamp of gate and up.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    limit: Option<f32>,
    /// Give a drawn layer biases.
    #[arg(long)]
    biases: bool,
    /// Kind of values: random, codes, subnormal, special, extreme, ids or one-expert.
    #[arg(long)]
    family: Option<Family>,
    /// Architecture whose paths the emulator takes.
    #[arg(long, value_enum, default_value_t = ArchName::Sm90)]
    arch: ArchName,
    /// Where to run it. The CPU's result is what the others are compared with.
    #[arg(long, value_enum, default_value_t = Choice::All)]
    backend: Choice,
    /// Write an HTML report.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Write the case to a file. A drawn case that fails is always written, by default to diff-<op>-<seed>.json (with --all
    /// diff-<op>-<family>-<seed>.json).
    #[arg(long, value_name = "FILE.json", conflicts_with = "all")]
    save: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ArchName {
    #[value(name = "sm_80")]
    Sm80,
    #[value(name = "sm_90")]
    Sm90,
    #[value(name = "sm_100")]
    Sm100,
    #[value(name = "sm_120")]
    Sm120,
}

impl From<ArchName> for ArchId {
    fn from(name: ArchName) -> Self {
        match name {
            ArchName::Sm80 => ArchId::Sm80,
            ArchName::Sm90 => ArchId::Sm90,
            ArchName::Sm100 => ArchId::Sm100,
            ArchName::Sm120 => ArchId::Sm120,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ActivationName {
    Bf16,
    F16,
}

impl From<ActivationName> for Activation {
    fn from(name: ActivationName) -> Self {
        match name {
            ActivationName::Bf16 => Activation::Bf16,
            ActivationName::F16 => Activation::F16,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum GatingName {
    Silu,
    #[value(name = "swiglu_oai")]
    SwigluOai,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderName {
    Seed,
    Decode,
}

/// The order that the options ask for; `free` where they ask for none. Without a split, the order seed has that of `free`, or the usual.
fn order(args: &Args, free: Order) -> Result<Order> {
    match (args.order, args.split) {
        (None, None) => Ok(free),
        (None | Some(OrderName::Seed), Some(split)) => Ok(Order::Seed { split }),
        (Some(OrderName::Seed), None) => Ok(match free {
            Order::Seed { .. } => free,
            Order::Decode => Order::Seed { split: Split::default() },
        }),
        (Some(OrderName::Decode), None) => Ok(Order::Decode),
        (Some(OrderName::Decode), Some(split)) => {
            Err(Error::argument("split", split.count(), "none with the order decode, which has four partial sums"))
        }
    }
}

fn gating(name: GatingName, limit: Option<f32>) -> Gating {
    match (name, Gating::GPT_OSS) {
        (GatingName::SwigluOai, Gating::SwigluOai { alpha, limit: usual }) => {
            Gating::SwigluOai { alpha, limit: limit.unwrap_or(usual) }
        }
        _ => Gating::Silu { limit },
    }
}

fn parse_op(name: &str) -> std::result::Result<Op, String> {
    let known = || Op::ALL.map(Op::name).join(", ");
    Op::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| format!("one of {} needed", known()))
}

fn parse_split(text: &str) -> std::result::Result<Split, String> {
    Split::ALL.into_iter().find(|split| split.count().to_string() == text).ok_or_else(|| "1, 2, 4 or 8 needed".into())
}

/// A back end that is to run, or why it cannot.
struct Device {
    backend: BackEnd,
    handle: std::result::Result<DeviceHandle, String>,
}

/// What one back end did with one case.
#[derive(Debug, Serialize)]
struct Ran {
    backend: BackEnd,
    status: &'static str,
    message: String,
    milliseconds: Option<f64>,
    /// Bits of the output, hexadecimal, one string a row.
    bits: Vec<String>,
    #[serde(skip)]
    output: Option<Output>,
}

/// A comparison of two outputs.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// What was expected: `cpu`, or `expected` for the values of a case file.
    pub reference: String,
    /// What was compared with it.
    pub backend: String,
    /// What came out.
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// One row of the report: a case, or all cases of an operation and family.
#[derive(Debug, Serialize)]
pub struct Section {
    /// Operation.
    pub op: Op,
    /// Where the values came from, in words.
    pub source: String,
    /// Sizes of the case, or how many there were.
    pub description: String,
    /// One for each pair.
    pub comparisons: Vec<Pair>,
    /// Back ends that failed, and why.
    pub failures: Vec<String>,
    /// Files that replay what failed.
    pub replays: Vec<PathBuf>,
}

impl Section {
    /// Nothing is wrong and nothing failed.
    pub fn agrees(&self) -> bool {
        self.failures.is_empty() && self.comparisons.iter().all(|pair| pair.comparison.agrees())
    }
}

pub fn diff(args: &Args) -> Result<Verdict> {
    order(args, Order::default())?;
    let devices = open_devices(args)?;
    if args.all { diff_all(args, &devices) } else { diff_one(args, &devices) }
}

fn open_devices(args: &Args) -> Result<Vec<Device>> {
    let mut devices = Vec::new();
    for &backend in args.backend.back_ends() {
        let handle = match backend {
            BackEnd::Cpu => continue,
            BackEnd::Emulator => Ok(open_emulator(args.seed, args.arch.into())),
            BackEnd::Gpu => match open_gpu() {
                Ok(gpu) => Ok(gpu as DeviceHandle),
                Err(error @ Error::NoGpu(_)) if args.backend == Choice::All => Err(error.to_string()),
                Err(error) => return Err(error),
            },
        };
        devices.push(Device { backend, handle });
    }
    Ok(devices)
}

/// What all back ends make of one case. An error is one of the input.
fn run_case(file: &CaseFile, devices: &[Device]) -> Result<(Vec<Ran>, Vec<Pair>)> {
    let op = file.case.op();
    let start = Instant::now();
    let cpu = file.case.on_cpu()?;
    let mut ran = vec![Ran {
        backend: BackEnd::Cpu,
        status: "ok",
        message: String::new(),
        milliseconds: Some(start.elapsed().as_secs_f64() * 1e3),
        bits: Vec::new(),
        output: Some(cpu.clone()),
    }];
    let mut pairs = Vec::new();
    for Device { backend, handle } in devices {
        let skip = |message| Ran {
            backend: *backend,
            status: "skipped",
            message,
            milliseconds: None,
            bits: Vec::new(),
            output: None,
        };
        let device = match handle {
            Err(why) => {
                ran.push(skip(why.clone()));
                continue;
            }
            Ok(_) if *backend == BackEnd::Gpu && !op.runs_on_gpu() => {
                ran.push(skip(format!("no kernel of the embedded modules computes {op} alone")));
                continue;
            }
            Ok(device) => device,
        };
        let start = Instant::now();
        match file.case.on_device(device) {
            Ok(output) => {
                let milliseconds = Some(start.elapsed().as_secs_f64() * 1e3);
                let bound = if has_exact_bits(*backend, device) { None } else { file.case.bound()? };
                pairs.push(pair("cpu", *backend, Comparison::of(&cpu, &output, bound.as_deref())));
                let message = if bound.is_some() { "compared by the bound for other tensor cores' sums" } else { "" };
                let (message, output) = (message.into(), Some(output));
                ran.push(Ran { backend: *backend, status: "ok", message, milliseconds, bits: Vec::new(), output });
            }
            Err(error) => ran.push(Ran { status: "error", ..skip(error.to_string()) }),
        }
    }
    if let Some(bits) = &file.expected {
        let expected = Output { bits: bits.clone(), ..cpu };
        for ran in &ran {
            if let Some(output) = &ran.output {
                // A case file says nothing about the status word.
                let expected = Output { status: output.status, ..expected.clone() };
                pairs.push(pair("expected", ran.backend, Comparison::of(&expected, output, None)));
            }
        }
    }
    Ok((ran, pairs))
}

fn pair(reference: &str, backend: BackEnd, comparison: Comparison) -> Pair {
    Pair { reference: reference.into(), backend: backend.to_string().to_lowercase(), comparison }
}

fn diff_one(args: &Args, devices: &[Device]) -> Result<Verdict> {
    let (file, source) = match &args.case {
        Some(path) => {
            let file = CaseFile::read(path)?;
            let op = file.case.op();
            if args.op.is_some_and(|wanted| wanted != op) {
                return Err(Error::argument(
                    "op",
                    args.op.expect("just seen"),
                    format!("{op}, the operation of {}", path.display()),
                ));
            }
            (file, path.display().to_string())
        }
        None => {
            let op = args.op.expect("required by the options");
            let draw = draw_options(args)?;
            let case = draw_op(op, &draw, args.seed)?;
            let source = format!("family {}, seed {}", draw.family, args.seed);
            (CaseFile { case, expected: None, comment: None }, source)
        }
    };
    let op = file.case.op();
    if args.backend == Choice::Gpu && !op.runs_on_gpu() {
        return Err(Error::argument("backend", "gpu", format!("cpu or emulator: no kernel computes {op} alone")));
    }
    let progress = Progress::start(format!("running {op}"));
    let (mut ran, comparisons) = run_case(&file, devices)?;
    drop(progress);
    let failures = failures(&ran);
    let mut section =
        Section { op, source, description: file.case.describe(), comparisons, failures, replays: Vec::new() };
    if let Some(path) = &args.save {
        file.write(path)?;
        section.replays.push(path.clone());
    } else if !section.agrees() && args.case.is_none() {
        section.replays.push(save_failure(&file, &format!("{op}-{}", args.seed))?);
    }
    if let Some(path) = &args.report {
        html::write(path, std::slice::from_ref(&section), &about(args, devices))?;
    }
    let agrees = section.agrees();
    if args.json {
        for ran in &mut ran {
            if let Some(output) = &ran.output {
                ran.bits = rows(output).collect();
            }
        }
        #[derive(Serialize)]
        struct Report<'a> {
            #[serde(flatten)]
            section: &'a Section,
            comment: Option<&'a str>,
            results: &'a [Ran],
            agreed: bool,
        }
        let comment = file.comment.as_deref();
        output::say_json(&Report { section: &section, comment, results: &ran, agreed: agrees });
    } else {
        print_one(&section, &file, &ran);
    }
    Ok(if agrees { Verdict::Agreed } else { Verdict::Disagreed })
}

fn failures(ran: &[Ran]) -> Vec<String> {
    ran.iter().filter(|ran| ran.status == "error").map(|ran| format!("{}: {}", ran.backend, ran.message)).collect()
}

fn save_failure(file: &CaseFile, name: &str) -> Result<PathBuf> {
    let path = PathBuf::from(format!("diff-{name}.json"));
    file.write(&path)?;
    Ok(path)
}

/// Rows of an output in hexadecimal; an output without rows in lines of 16.
fn rows(output: &Output) -> impl Iterator<Item = String> + '_ {
    let digits = output.element.digits();
    let columns = if output.columns > 1 { output.columns } else { 16 };
    output
        .bits
        .chunks(columns)
        .map(move |row| row.iter().map(|bits| format!("{bits:0digits$x}")).collect::<Vec<_>>().join(" "))
}

fn diff_all(args: &Args, devices: &[Device]) -> Result<Verdict> {
    let plain = [Family::Random, Family::Subnormal, Family::Special, Family::Extreme];
    let mut plan = Vec::new();
    for op in Op::ALL {
        let families: &[Family] = match op {
            Op::Nvfp4Layer | Op::Mxfp4Layer => &Family::ALL,
            Op::E4m3Decode | Op::E2m1Decode | Op::Swizzle => &[Family::Random],
            _ => &plain,
        };
        let families = families.iter().filter(|family| args.family.is_none_or(|only| only == **family));
        plan.extend(families.map(|&family| (op, family)));
    }
    let progress = Progress::steps(args.cases.saturating_mul(plan.len() as u64), "");
    let mut sections = Vec::new();
    for (op, family) in plan {
        progress.now(format!("{op}, {family}"));
        let mut section = Section {
            op,
            source: format!(
                "family {family}, seeds {} to {}",
                args.seed,
                args.seed.wrapping_add(args.cases.max(1) - 1)
            ),
            description: format!("{} cases", args.cases),
            comparisons: Vec::new(),
            failures: Vec::new(),
            replays: Vec::new(),
        };
        for number in 0..args.cases {
            let seed = args.seed.wrapping_add(number);
            let draw = match args.shape {
                Some(_) => DrawOptions { family, ..draw_options(args)? },
                None => random_draw(args, op, family, seed)?,
            };
            let file = CaseFile { case: draw_op(op, &draw, seed)?, expected: None, comment: None };
            let (ran, pairs) = run_case(&file, devices)?;
            let failed = failures(&ran);
            if !failed.is_empty() || pairs.iter().any(|pair| !pair.comparison.agrees()) {
                // One replay for each operation and family is enough to start with.
                if section.replays.is_empty() {
                    section.replays.push(save_failure(&file, &format!("{op}-{family}-{seed}"))?);
                }
            }
            section.failures.extend(failed);
            for new in pairs {
                let same = |pair: &&mut Pair| pair.reference == new.reference && pair.backend == new.backend;
                match section.comparisons.iter_mut().find(same) {
                    Some(pair) => pair.comparison.add(&new.comparison),
                    None => section.comparisons.push(new),
                }
            }
            progress.step();
        }
        sections.push(section);
    }
    drop(progress);
    let about = about(args, devices);
    if let Some(path) = &args.report {
        html::write(path, &sections, &about)?;
    }
    let agreed = sections.iter().all(Section::agrees);
    if args.json {
        output::say_json(&serde_json::json!({ "sections": sections, "agreed": agreed }));
    } else {
        print_all(&sections, devices);
    }
    Ok(if agreed { Verdict::Agreed } else { Verdict::Disagreed })
}

/// Facts for the head of a report.
fn about(args: &Args, devices: &[Device]) -> Vec<(String, String)> {
    let mut about = vec![("Seed".to_string(), args.seed.to_string()), ("CPU".into(), "exact reference".into())];
    for Device { backend, handle } in devices {
        let text = match handle {
            Ok(device) => {
                let properties = device.properties();
                let (major, minor) = properties.compute;
                format!(
                    "{}, compute capability {major}.{minor}, {} multiprocessors",
                    properties.name, properties.multiprocessors
                )
            }
            Err(why) => format!("skipped: {why}"),
        };
        about.push((backend.to_string(), text));
    }
    about.push(("megamoe".into(), env!("CARGO_PKG_VERSION").into()));
    about
}

const DEFAULT_SHAPE: LayerShape = LayerShape { hidden: 256, intermediate: 128, output: 256, experts: 8, top_k: 2 };

fn draw_options(args: &Args) -> Result<DrawOptions> {
    let (shape, tokens) = parse_shape(args.shape.as_deref().unwrap_or(""))?;
    let options = LayerOptions {
        activation: args.activation.map_or_else(Activation::default, Activation::from),
        order: order(args, Order::default())?,
        gating: gating(args.gating.unwrap_or(GatingName::Silu), args.limit),
        ..Default::default()
    };
    let family = args.family.unwrap_or(Family::Random);
    Ok(DrawOptions { family, shape, tokens, options, biases: args.biases })
}

/// `name=value,…` over the default sizes. The output width is the hidden size unless it is given.
fn parse_shape(text: &str) -> Result<(LayerShape, usize)> {
    let (mut shape, mut tokens, mut output) = (DEFAULT_SHAPE, 8, None);
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let wrong = || {
            let names = "hidden, intermediate, output, experts, top_k, tokens (or count, or rows and cols)";
            Error::argument("shape", part, format!("name=number with a name of {names}"))
        };
        let (name, value) = part.split_once('=').ok_or_else(wrong)?;
        let value: usize = value.trim().parse().map_err(|_| wrong())?;
        match name.trim() {
            "hidden" => shape.hidden = value,
            "intermediate" => shape.intermediate = value,
            "output" => output = Some(value),
            "experts" => shape.experts = value,
            "top_k" => shape.top_k = value,
            "tokens" | "count" | "rows" => tokens = value,
            "cols" => shape.hidden = value.checked_mul(16).ok_or_else(wrong)?,
            _ => return Err(wrong()),
        }
    }
    shape.output = output.unwrap_or(shape.hidden);
    Ok((shape, tokens))
}

/// Small sizes, most of them off every tile; options that take turns.
fn random_draw(args: &Args, op: Op, family: Family, seed: u64) -> Result<DrawOptions> {
    let mut random = Random(seed ^ 0x5bd1_e995);
    let mut below = |n: usize| (random.next() % n as u64) as usize;
    let block = op.weights().unwrap_or_default().block();
    let experts = 1 + below(24);
    let shape = LayerShape {
        hidden: block * (1 + below(640 / block)),
        intermediate: block * (1 + below(192 / block)),
        output: 1 + below(150),
        experts,
        top_k: 1 + below(experts.min(8)),
    };
    let tokens = if op.weights().is_some() { below(20) } else { 256 + below(500) };
    let activation = [Activation::Bf16, Activation::F16][below(2)];
    let limit = [None, None, Some(1.0), Some(7.0)][below(4)];
    let orders = Order::ALL;
    let drawn = orders[below(orders.len())];
    let joined = [GatingName::Silu, GatingName::Silu, GatingName::SwigluOai][below(3)];
    let biases = below(3) == 0;
    let options = LayerOptions {
        activation: args.activation.map_or(activation, Activation::from),
        order: order(args, drawn)?,
        gating: gating(args.gating.unwrap_or(joined), args.limit.or(limit)),
        ..Default::default()
    };
    Ok(DrawOptions { family, shape, tokens, options, biases: args.biases || biases })
}

fn print_one(section: &Section, file: &CaseFile, ran: &[Ran]) {
    output::say(format!("{}: {}", style(section.op).bold(), section.description));
    output::say(&section.source);
    if let Some(comment) = &file.comment {
        output::say(comment);
    }
    output::say("");
    for ran in ran {
        let time = ran.milliseconds.map_or(String::new(), |ms| format!(" ({})", output::duration(ms)));
        match &ran.output {
            Some(result) => {
                output::say(format!("{}{time}", style(ran.backend).bold()));
                if !ran.message.is_empty() {
                    output::say(&ran.message);
                }
                print_bits(result);
            }
            None => output::say(format!("{}: {}: {}", style(ran.backend).bold(), ran.status, ran.message)),
        }
    }
    if !section.comparisons.is_empty() {
        output::say("");
        print_comparisons(std::slice::from_ref(section), false);
    }
    print_end(std::slice::from_ref(section));
}

/// The first elements of the first rows.
fn print_bits(output: &Output) {
    const ROWS: usize = 8;
    const COLUMNS: usize = 16;
    let digits = output.element.digits();
    let columns = if output.columns > 1 { output.columns } else { COLUMNS };
    for row in output.bits.chunks(columns).take(ROWS) {
        let shown = &row[..row.len().min(COLUMNS)];
        let bits = shown.iter().map(|bits| format!("{bits:0digits$x}")).collect::<Vec<_>>().join(" ");
        let more =
            if row.len() > shown.len() { format!(" … {} more", row.len() - shown.len()) } else { String::new() };
        let value = number(shown.first().map_or(0.0, |&bits| output.element.value(bits)));
        output::say(format!(
            "  {bits}{more}   {}",
            style(format!("({value}{})", if row.len() > 1 { " …" } else { "" })).dim()
        ));
    }
    let left = output.bits.chunks(columns).len().saturating_sub(ROWS);
    if left > 0 {
        output::say(format!("  … {left} more rows (all of them with --json)"));
    }
}

fn print_all(sections: &[Section], devices: &[Device]) {
    for Device { backend, handle } in devices {
        if let Err(why) = handle {
            output::say(format!("{backend}: skipped: {why}"));
        }
    }
    print_comparisons(sections, true);
    print_end(sections);
}

fn print_comparisons(sections: &[Section], with_source: bool) {
    let mut table =
        output::table(["operation", "compared", "elements", "different", "wrong", "largest difference", "result"]);
    for section in sections {
        let name = if with_source { format!("{}: {}", section.op, section.source) } else { section.op.to_string() };
        for Pair { reference, backend, comparison } in &section.comparisons {
            let agrees = comparison.agrees();
            let verdict = match (agrees, comparison.bounded) {
                (true, false) => "equal bits",
                (true, true) => "within the bound",
                (false, _) if comparison.wrong == 0 => "status differs",
                (false, _) => "WRONG",
            };
            table.add_row(vec![
                Cell::new(&name),
                Cell::new(format!("{backend} with {reference}")),
                Cell::new(comparison.elements),
                Cell::new(comparison.different),
                Cell::new(comparison.wrong),
                Cell::new(format!("{:.3e}", comparison.max_abs)),
                verdict_cell(verdict, Some(agrees)),
            ]);
        }
    }
    output::say_table(&table);
    output::say("");
}

/// First mismatches, histograms and files of what went wrong, and the last sentence.
fn print_end(sections: &[Section]) {
    for section in sections {
        for failure in &section.failures {
            output::say(format!("{}: {}", section.op, style(failure).red()));
        }
        for Pair { reference, backend, comparison } in &section.comparisons {
            if let Some(first) = &comparison.first {
                output::say(format!(
                    "{}, first mismatch: {}: {backend} has {} ({}), {reference} has {} ({})",
                    section.op,
                    first.place,
                    first.got,
                    number(first.got_value),
                    first.expected,
                    number(first.expected_value),
                ));
            }
            if comparison.different > 0 {
                let UlpHistogram { buckets, nan } = &comparison.ulps;
                let counts = buckets.iter().enumerate().filter(|(_, count)| **count > 0);
                let counts: Vec<String> =
                    counts.map(|(bucket, count)| format!("{}: {count}", UlpHistogram::label(bucket))).collect();
                let nan = if *nan > 0 { format!(", NaN on one side: {nan}") } else { String::new() };
                output::say(format!("  elements by distance in ulps: {}{nan}", counts.join(", ")));
            }
        }
        for path in &section.replays {
            let again = format!("megamoe diff --op {} --case {}", section.op, path.display());
            output::say(format!("Written to {}; again: {}", path.display(), style(again).bold()));
        }
    }
    let agreed = sections.iter().all(Section::agrees);
    let compared = sections.iter().any(|section| !section.comparisons.is_empty());
    let sentence = match (agreed, compared) {
        (true, true) => "Every comparison agrees.",
        (true, false) => "Nothing was compared: only the CPU reference ran.",
        (false, _) => "The back ends DISAGREE.",
    };
    output::conclude(agreed, sentence);
}

#[cfg(test)]
mod tests {
    use super::*;
    use megamoe::diff::OpCase;

    #[test]
    fn shapes() {
        let (shape, tokens) = parse_shape("hidden=512, experts=4,tokens=3").unwrap();
        assert_eq!((shape.hidden, shape.output, shape.experts, shape.top_k, tokens), (512, 512, 4, 2, 3));
        assert_eq!(parse_shape("output=20").unwrap().0.output, 20);
        for wrong in ["hidden", "hidden=x", "width=3", "hidden=-1"] {
            let error = parse_shape(wrong).unwrap_err().to_string();
            assert!(error.contains("shape") && error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn a_back_end_that_disagrees_is_not_agreement() {
        let case = OpCase::Exp { x: vec![1.0, 2.0] };
        let mut bits = case.on_cpu().unwrap().bits;
        let agreed = |bits: &[u32]| {
            let file = CaseFile { case: case.clone(), expected: Some(bits.to_vec()), comment: None };
            let (ran, pairs) = run_case(&file, &[]).unwrap();
            failures(&ran).is_empty() && pairs.iter().all(|pair| pair.comparison.agrees())
        };
        assert!(agreed(&bits));
        bits[1] ^= 1;
        assert!(!agreed(&bits));
    }
}
