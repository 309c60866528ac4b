//! `megamoe bench grouped`.

use super::Verdict;
use super::backend::open_gpu;
use super::bench::{named, right};
use super::output::{Progress, say, say_json, say_table, table};
use comfy_table::{Cell, CellAlignment};
use megamoe::bench::{self, GEMM_SHAPES, GroupedBenchOptions, GroupedRow};
use megamoe::device::Device;
use megamoe::{Error, GroupedArithmetic, Result};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub struct GroupedArgs {
    /// Layers, by name.
    #[arg(long, value_delimiter = ',', default_value = "qwen3_30b,qwen3_235b,dsv3_tp8")]
    shapes: Vec<String>,
    /// Numbers of tokens.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,128,512,2048,8192")]
    tokens: Vec<usize>,
    /// Operands of the GEMMs: w8a8, w8a16, bf16.
    #[arg(long, value_delimiter = ',', default_value = "w8a8,w8a16,bf16")]
    arithmetics: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Output<'a> {
    gpu: &'a str,
    rows: &'a [GroupedRow],
}

pub fn run(args: &GroupedArgs) -> Result<Verdict> {
    if let Some(tokens) = args.tokens.iter().find(|&&tokens| tokens == 0) {
        return Err(Error::argument("tokens", tokens, "at least 1"));
    }
    let shapes = GEMM_SHAPES.map(|shape| (shape.name.to_owned(), shape));
    let arithmetics = GroupedArithmetic::ALL.map(|arithmetic| (arithmetic.name().to_owned(), arithmetic));
    let options = GroupedBenchOptions {
        shapes: named("shapes", &args.shapes, &shapes)?,
        tokens: args.tokens.clone(),
        arithmetics: named("arithmetics", &args.arithmetics, &arithmetics)?,
    };
    let gpu = open_gpu()?;
    let steps = options.shapes.len() * options.tokens.len() * options.arithmetics.len();
    let progress = Progress::steps(steps as u64, "measuring");
    let rows = bench::grouped(&gpu, &options, |row| {
        progress.now(format!("{} M={} {}", row.shape, row.tokens, row.arithmetic));
        progress.step();
    })?;
    drop(progress);
    if args.json {
        say_json(&Output { gpu: &gpu.properties().name, rows: &rows });
        return Ok(Verdict::Agreed);
    }
    say(&gpu.properties().name);
    for shape in &options.shapes {
        let bench::GemmShape { name, hidden, intermediate, experts, top_k } = *shape;
        say(format!("\n{name}: hidden {hidden}, intermediate {intermediate}, experts {experts}, top-{top_k}"));
        let heads = ["M", "GEMMs", "tiles", "µs", "GB/s", "TFLOP/s", "experts", "recorded µs", "recorded/ours", "of"];
        let mut out = table(heads);
        for row in rows.iter().filter(|row| row.shape == name) {
            let text = |value: Option<String>| value.unwrap_or("-".into());
            let mut cells = vec![Cell::new(row.tokens).set_alignment(CellAlignment::Right)];
            cells.extend([row.arithmetic, row.tiles].map(Cell::new));
            cells.extend(right([
                format!("{:.1}", row.microseconds),
                format!("{:.0}", row.bytes / f64::from(row.microseconds) / 1e3),
                format!("{:.1}", row.tflops),
                format!("{:.1}", row.experts),
                text(row.recorded_microseconds.map(|us| format!("{us:.1}"))),
                text(row.recorded_microseconds.map(|us| format!("{:.2}", us / row.microseconds))),
            ]));
            cells.push(Cell::new(row.recorded_name.unwrap_or("-")));
            out.add_row(cells);
        }
        say_table(&out);
    }
    say(
        "\nGB/s: weights and scales of the chosen experts alone. recorded: layers with the same weights, measured on another day.",
    );
    Ok(Verdict::Agreed)
}
