//! `megamoe bench`: times on a GPU, beside recorded figures of others.

use super::Verdict;
use super::backend::open_gpu;
use super::output::{Progress, say, say_json, say_table, table};
use clap::Subcommand;
use comfy_table::{Cell, CellAlignment};
use megamoe::bench::{
    self, BenchShape, DecodeOptions, DecodeRow, DrawnRouting, GEMM_SHAPES, GemmOptions, GemmRow, GemmShape, ReadRow,
    Recorded, RouterOperation, RouterOptions, RouterRow, SHAPES, TOKENS, TimedGemm,
};
use megamoe::device::{Device, Properties};
use megamoe::plan::variants;
use megamoe::{Activation, Error, LayerOptions, Order, Result};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Decode layers: microseconds in a CUDA graph, cold weights, from bf16 hidden states and top-k ids to bf16 output.
    Decode(DecodeArgs),
    /// Grouped GEMMs: TFLOP/s of the rows that count, beside a loop of mma on registers alone.
    Gemm(GemmArgs),
    /// Layers with FP8 and BF16 experts: microseconds from bf16 hidden states and top-k ids to bf16 output, beside recorded figures.
    Grouped(super::bench_grouped::GroupedArgs),
    /// Router: projections in both orders, the NVFP4 router and the choice of experts, microseconds in a CUDA graph.
    Router(RouterArgs),
    /// Operations around the GEMMs: sort, work-list, quantisers, activation, unpermute, shared expert, beside a copy of as many bytes.
    Ops(super::bench_ops::OpsArgs),
    /// A read-only kernel over cold memory at three sizes: how fast the card is.
    Read {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Args)]
struct DecodeArgs {
    /// Shapes, by name (default: all). `megamoe bench decode --list` names them.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// List the shapes and stop.
    #[arg(long, conflicts_with = "json")]
    list: bool,
    /// Numbers of tokens.
    #[arg(long, value_delimiter = ',', default_values_t = TOKENS)]
    tokens: Vec<usize>,
    /// Activations: bf16, f16.
    #[arg(long, value_delimiter = ',', default_value = "f16,bf16")]
    activations: Vec<String>,
    /// Orders of the sums: decode, seed1, seed2, seed4, seed8 (seed with that K split).
    #[arg(long, value_delimiter = ',', default_value = "decode")]
    orders: Vec<String>,
    /// Measure every variant of a plan, not only its own choice.
    #[arg(long)]
    variants: bool,
    /// Time each kernel alone too.
    #[arg(long)]
    stages: bool,
    /// How tokens choose their experts: uniform, zipf (expert e with a weight of 1/(e + 1)), crowded (always the first top-k).
    #[arg(long, default_value = "uniform")]
    routing: String,
    /// A BF16 router with softmax top-k chooses the experts, as part of the layer: the time runs from hidden states alone.
    #[arg(long, conflicts_with = "routing")]
    router: bool,
    /// Seed of routings and data.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct GemmArgs {
    /// Layers, by name (default: all).
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Numbers of tokens.
    #[arg(long, value_delimiter = ',', default_value = "64,512,2048,8192")]
    tokens: Vec<usize>,
    /// Kernels, by name (default: all).
    #[arg(long, value_delimiter = ',')]
    kernels: Vec<String>,
    /// All tokens choose the first top-k experts.
    #[arg(long)]
    crowded: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct GemmOutput<'a> {
    gpu: &'a str,
    multiply_tflops: f32,
    rows: &'a [GemmRow],
}

#[derive(Debug, clap::Args)]
struct RouterArgs {
    /// Operations (default: all): router_gemm, router_gemm_strict, moe_gate_topk_fused, topk_f32,
    /// topk_bf16.
    #[arg(long, value_delimiter = ',')]
    operations: Vec<String>,
    /// Numbers of tokens (default: those that were recorded).
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Numbers of experts.
    #[arg(long, value_delimiter = ',', default_value = "128,256")]
    experts: Vec<usize>,
    /// Hidden sizes.
    #[arg(long, value_delimiter = ',', default_value = "2048,4096,7168")]
    hidden: Vec<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct RouterOutput<'a> {
    gpu: &'a str,
    rows: &'a [RouterRow],
}

#[derive(Serialize)]
struct Output<'a> {
    gpu: &'a str,
    read: &'a [ReadRow],
    rows: &'a [DecodeRow],
}

pub fn run(args: &Args) -> Result<Verdict> {
    match &args.what {
        What::Decode(args) => decode(args),
        What::Gemm(args) => gemm(args),
        What::Grouped(args) => super::bench_grouped::run(args),
        What::Router(args) => router(args),
        What::Ops(args) => super::bench_ops::run(args),
        What::Read { json } => {
            let gpu = open_gpu()?;
            let rows = bench::read_floor(&gpu)?;
            if *json {
                say_json(&Output { gpu: &gpu.properties().name, read: &rows, rows: &[] });
            } else {
                say_read(gpu.properties(), &rows);
            }
            Ok(Verdict::Agreed)
        }
    }
}

/// Recorded time of a read-only kernel of about so many bytes.
fn recorded_read(bytes: usize) -> Option<f32> {
    bench::RECORDED_READ.iter().find(|(megabytes, _)| bytes.abs_diff(megabytes * 1_000_000) < bytes / 10).map(|r| r.1)
}

fn say_read(gpu: &Properties, rows: &[ReadRow]) {
    let mut out = table(["read-only", "µs", "GB/s", "x recorded time"]);
    for row in rows {
        let rate = row.bytes as f32 / row.microseconds / 1e3;
        let ratio = recorded_read(row.bytes).map_or("-".into(), |us| format!("{:.3}", row.microseconds / us));
        out.add_row(right([
            format!("{} MB", row.bytes / 1_000_000),
            format!("{:.2}", row.microseconds),
            format!("{rate:.0}"),
            ratio,
        ]));
    }
    say(format!("{}, {} multiprocessors", gpu.name, gpu.multiprocessors));
    say_table(&out);
}

pub(super) fn right<const N: usize>(cells: [String; N]) -> Vec<Cell> {
    cells.into_iter().map(|cell| Cell::new(cell).set_alignment(CellAlignment::Right)).collect()
}

pub(super) fn named<T: Copy, N: ToString>(name: &'static str, wanted: &[N], all: &[(String, T)]) -> Result<Vec<T>> {
    wanted
        .iter()
        .map(|wanted| {
            let found = all.iter().find(|(name, _)| *name == wanted.to_string());
            found.map(|&(_, value)| value).ok_or_else(|| {
                let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
                Error::argument(name, wanted.to_string(), names.join(", "))
            })
        })
        .collect()
}

fn gemm(args: &GemmArgs) -> Result<Verdict> {
    let shapes: Vec<_> = GEMM_SHAPES.iter().map(|shape| (shape.name.to_owned(), *shape)).collect();
    let kernels: Vec<_> = TimedGemm::all().into_iter().map(|kernel| (kernel.name().to_owned(), kernel)).collect();
    if let Some(tokens) = args.tokens.iter().find(|&&tokens| tokens == 0) {
        return Err(Error::argument("tokens", tokens, "at least 1"));
    }
    let options = GemmOptions {
        shapes: if args.shapes.is_empty() { GEMM_SHAPES.to_vec() } else { named("shapes", &args.shapes, &shapes)? },
        tokens: args.tokens.clone(),
        kernels: if args.kernels.is_empty() { TimedGemm::all() } else { named("kernels", &args.kernels, &kernels)? },
        crowded: args.crowded,
    };
    let gpu = open_gpu()?;
    let rows: usize = options.kernels.iter().map(|kernel| kernel.projections()).sum();
    let steps = options.shapes.len() * options.tokens.len() * rows;
    let progress = Progress::steps(steps as u64, "measuring");
    let (rate, rows) = bench::gemm(&gpu, &options, |row| {
        progress.now(format!("{} M={} {}", row.shape, row.tokens, row.kernel));
        progress.step();
    })?;
    drop(progress);
    if args.json {
        say_json(&GemmOutput { gpu: &gpu.properties().name, multiply_tflops: rate, rows: &rows });
        return Ok(Verdict::Agreed);
    }
    say(format!("{}: mma on registers alone {rate:.0} TFLOP/s", gpu.properties().name));
    for shape in &options.shapes {
        let GemmShape { name, hidden, intermediate, experts, top_k } = *shape;
        say(format!("\n{name}: hidden {hidden}, intermediate {intermediate}, experts {experts}, top-{top_k}"));
        let mut out = table(["M", "projection", "kernel", "µs", "TFLOP/s", "% of mma"]);
        for row in rows.iter().filter(|row| row.shape == name) {
            let left = |text: &str| Cell::new(text);
            let mut cells = vec![Cell::new(row.tokens).set_alignment(CellAlignment::Right)];
            cells.extend([left(row.projection), left(row.kernel)]);
            cells.extend(right([
                format!("{:.1}", row.microseconds),
                format!("{:.1}", row.tflops),
                format!("{:.1}", 100.0 * row.share),
            ]));
            out.add_row(cells);
        }
        say_table(&out);
    }
    Ok(Verdict::Agreed)
}

fn decode(args: &DecodeArgs) -> Result<Verdict> {
    let shapes: Vec<_> = SHAPES.iter().map(|shape| (shape.name.to_owned(), *shape)).collect();
    if args.list {
        let mut out = table(["shape", "weights", "hidden", "intermediate", "experts", "top-k"]);
        for shape in SHAPES {
            let sizes = [shape.hidden, shape.intermediate, shape.experts, shape.top_k].map(|size| size.to_string());
            out.add_row([shape.name, shape.format.name()].map(str::to_owned).into_iter().chain(sizes));
        }
        say_table(&out);
        return Ok(Verdict::Agreed);
    }
    let orders = Order::ALL.map(|order| match order {
        Order::Seed { split } => (format!("seed{}", split.count()), order),
        Order::Decode => ("decode".to_owned(), order),
    });
    let routings = DrawnRouting::ALL.map(|routing| (routing.name().to_owned(), routing));
    let activations = [("f16".to_owned(), Activation::F16), ("bf16".to_owned(), Activation::Bf16)];
    if let Some(tokens) = args.tokens.iter().find(|&&tokens| tokens == 0) {
        return Err(Error::argument("tokens", tokens, "at least 1"));
    }
    let options = DecodeOptions {
        shapes: if args.shapes.is_empty() { SHAPES.to_vec() } else { named("shapes", &args.shapes, &shapes)? },
        tokens: args.tokens.clone(),
        activations: named("activations", &args.activations, &activations)?,
        orders: named("orders", &args.orders, &orders)?,
        variants: args.variants,
        stages: args.stages,
        routing: named("routing", std::slice::from_ref(&args.routing), &routings)?[0],
        router: args.router,
        seed: args.seed,
    };
    let gpu = open_gpu()?;
    let read = bench::read_floor(&gpu)?;
    let each = |order, tokens| match options.variants {
        true => variants(&LayerOptions { order, ..Default::default() }, tokens).len(),
        false => 1,
    };
    let of_tokens = |tokens| options.orders.iter().map(|&order| each(order, tokens)).sum::<usize>();
    let rows = options.tokens.iter().map(|&tokens| of_tokens(tokens)).sum::<usize>();
    let steps = rows * options.activations.len() * options.shapes.len();
    let progress = Progress::steps(steps as u64, "measuring");
    let rows = bench::decode(&gpu, &options, |row| {
        progress.now(format!("{} M={}", row.shape, row.tokens));
        progress.step();
    })?;
    drop(progress);
    if args.json {
        say_json(&Output { gpu: &gpu.properties().name, read: &read, rows: &rows });
        return Ok(Verdict::Agreed);
    }
    say_read(gpu.properties(), &read);
    // The read bandwidth that shares refer to: the largest of the three sizes.
    let bandwidth = read.iter().map(|row| row.bytes as f32 / row.microseconds).fold(0.0, f32::max);
    for shape in &options.shapes {
        let BenchShape { name, format, hidden, intermediate, experts, top_k, .. } = *shape;
        say(format!(
            "\n{name}: {format}, hidden {hidden}, intermediate {intermediate}, experts {experts}, top-{top_k}"
        ));
        say_table(&decode_table(shape, rows.iter().filter(|row| row.shape == name), bandwidth, options.stages));
    }
    if options.router {
        say("\nRouter and top-k are part of these layers, and not of the recorded ones.");
    }
    say(
        "\n* the layer's default. floor: a read-only kernel over the same bytes; CUDA: a CUDA C++ kernel with the same order of sums, its best split; best: the fastest other 4-bit implementation (all recorded figures).",
    );
    Ok(Verdict::Agreed)
}

fn router(args: &RouterArgs) -> Result<Verdict> {
    let all: Vec<_> = RouterOperation::ALL.iter().map(|&op| (op.name().to_owned(), op)).collect();
    let mut options =
        RouterOptions { experts: args.experts.clone(), hidden: args.hidden.clone(), ..RouterOptions::default() };
    if !args.operations.is_empty() {
        options.operations = named("operations", &args.operations, &all)?;
    }
    if !args.tokens.is_empty() {
        options.tokens = args.tokens.clone();
    }
    if options.tokens.contains(&0) {
        return Err(Error::argument("tokens", 0, "at least 1"));
    }
    let gpu = open_gpu()?;
    let progress = Progress::steps(
        options
            .operations
            .iter()
            .map(|op| {
                options.tokens.len() * options.experts.len() * if op.has_hidden() { options.hidden.len() } else { 1 }
            })
            .sum::<usize>() as u64,
        "measuring",
    );
    let rows = bench::router(&gpu, &options, |row| {
        progress.now(format!("{} M={}", row.operation.name(), row.tokens));
        progress.step();
    })?;
    drop(progress);
    if args.json {
        say_json(&RouterOutput { gpu: &gpu.properties().name, rows: &rows });
        return Ok(Verdict::Agreed);
    }
    say(format!("{}, {} multiprocessors", gpu.properties().name, gpu.properties().multiprocessors));
    let mut out = table(["operation", "experts", "hidden", "M", "µs", "GB/s", "GFLOP/s", "vLLM µs", "x vLLM"]);
    for row in &rows {
        let us = f64::from(row.microseconds);
        let or_dash = |there: bool, text: String| if there { text } else { "-".into() };
        let mut cells = right([
            row.experts.to_string(),
            or_dash(row.hidden != 0, row.hidden.to_string()),
            row.tokens.to_string(),
            format!("{us:.1}"),
            format!("{:.0}", row.bytes / us / 1e3),
            or_dash(row.hidden != 0, format!("{:.0}", row.operations / us / 1e3)),
            row.recorded.map_or("-".into(), |recorded| format!("{recorded:.1}")),
            row.recorded.map_or("-".into(), |recorded| format!("{:.2}", row.microseconds / recorded)),
        ]);
        cells.insert(0, Cell::new(row.operation.name()));
        out.add_row(cells);
    }
    say_table(&out);
    say("\nx vLLM: this time over the recorded one of vLLM's fused softmax top-8, measured on another day.");
    Ok(Verdict::Agreed)
}

fn decode_table<'a>(
    shape: &BenchShape,
    rows: impl Iterator<Item = &'a DecodeRow>,
    bandwidth: f32,
    stages: bool,
) -> comfy_table::Table {
    let mut heads = vec![
        "M",
        "type",
        "order",
        "variant",
        "µs",
        "GB/s",
        "% of read",
        "x floor",
        "CUDA µs",
        "x CUDA",
        "best µs",
        "best/ours",
    ];
    if stages {
        heads.extend(["prep", "fc1", "fc2", "combine"]);
    }
    let mut out = table([""; 0]);
    out.set_header(heads);
    for row in rows {
        let rate = row.bytes as f32 / row.microseconds;
        let recorded = |figures: fn(&Recorded) -> [f32; 8]| {
            Some(figures(shape.recorded.as_ref()?)[BenchShape::column(row.tokens)?])
        };
        let (floor, cuda, best) = (recorded(|all| all.read_floor), recorded(|all| all.cuda), recorded(|all| all.best));
        let ratio = |value: Option<f32>| value.map_or("-".into(), |value| format!("{value:.2}"));
        let time = |value: Option<f32>| value.map_or("-".into(), |value| format!("{value:.1}"));
        let mut cells = vec![
            row.tokens.to_string(),
            row.activation.to_owned(),
            row.order.clone(),
            format!("{}{}", row.variant, if row.default { "*" } else { "" }),
            format!("{:.1}", row.microseconds),
            format!("{:.0}", rate / 1e3),
            format!("{:.0}", 100.0 * rate / bandwidth),
            ratio(floor.map(|floor| row.microseconds / floor)),
            time(cuda),
            ratio(cuda.map(|cuda| row.microseconds / cuda)),
            time(best),
            ratio(best.map(|best| best / row.microseconds)),
        ];
        if let Some(stage) = row.stages {
            cells.extend([stage.route_prep, stage.fc1, stage.fc2, stage.combine].map(|us| format!("{us:.1}")));
        }
        out.add_row(cells.into_iter().map(|cell| Cell::new(cell).set_alignment(CellAlignment::Right)));
    }
    out
}
