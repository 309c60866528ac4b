//! `megamoe bench ops`.

use super::Verdict;
use super::backend::open_gpu;
use super::bench::right;
use super::output::{Progress, say, say_json, say_table, table};
use comfy_table::Cell;
use megamoe::bench::{self, OpsOptions, OpsRow};
use megamoe::device::Device;
use megamoe::{Error, Result};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub struct OpsArgs {
    /// Numbers of tokens. Activations are measured on eight rows a token.
    #[arg(long, value_delimiter = ',', default_value = "1,64,1024,8192")]
    tokens: Vec<usize>,
    /// Hidden sizes.
    #[arg(long, value_delimiter = ',', default_value = "2048,7168")]
    hidden: Vec<usize>,
    /// Intermediate sizes.
    #[arg(long, value_delimiter = ',', default_value = "768,2048")]
    intermediate: Vec<usize>,
    /// Numbers of experts, at least 8.
    #[arg(long, value_delimiter = ',', default_value = "128,256")]
    experts: Vec<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Output<'a> {
    gpu: &'a str,
    rows: &'a [OpsRow],
}

pub fn run(args: &OpsArgs) -> Result<Verdict> {
    let sizes = [("tokens", &args.tokens, 1), ("hidden", &args.hidden, 1), ("intermediate", &args.intermediate, 1)];
    for (name, sizes, least) in sizes.into_iter().chain([("experts", &args.experts, 8)]) {
        if let Some(size) = sizes.iter().find(|&&size| size < least) {
            return Err(Error::argument(name, size, format!("at least {least}")));
        }
    }
    let OpsArgs { tokens, hidden, intermediate, experts, .. } = args;
    let options = OpsOptions {
        tokens: tokens.clone(),
        hidden: hidden.clone(),
        intermediate: intermediate.clone(),
        experts: experts.clone(),
    };
    let gpu = open_gpu()?;
    let progress =
        // Of a hidden size the quantiser and four ways back, of the others two operations each.
        Progress::steps((tokens.len() * (5 * hidden.len() + 2 * (intermediate.len() + experts.len()))) as u64, "measuring");
    let rows = bench::ops(&gpu, &options, |row| {
        progress.now(format!("{} M={}", row.operation, row.tokens));
        progress.step();
    })?;
    drop(progress);
    if args.json {
        say_json(&Output { gpu: &gpu.properties().name, rows: &rows });
        return Ok(Verdict::Agreed);
    }
    let mut out =
        table(["operation", "width or experts", "M", "µs", "GB/s", "% of copy", "recorded µs", "recorded/ours", "of"]);
    for row in &rows {
        let text = |value: Option<String>| value.unwrap_or("-".into());
        let mut cells = vec![Cell::new(row.operation)];
        cells.extend(right([
            row.size.to_string(),
            row.tokens.to_string(),
            format!("{:.1}", row.microseconds),
            format!("{:.0}", row.bytes as f32 / row.microseconds / 1e3),
            text(row.copy_microseconds.map(|us| format!("{:.0}", 100.0 * us / row.microseconds))),
            text(row.recorded_microseconds.map(|us| format!("{us:.1}"))),
            text(row.recorded_microseconds.map(|us| format!("{:.2}", us / row.microseconds))),
        ]));
        cells.push(Cell::new(row.recorded_name.unwrap_or("-")));
        out.add_row(cells);
    }
    say(format!("{}, top-8", gpu.properties().name));
    say_table(&out);
    Ok(Verdict::Agreed)
}
