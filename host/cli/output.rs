//! What all commands print with. Results go to stdout, progress and complaints to stderr.

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, TableComponent, presets};
use console::style;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

/// Prints a line to stdout. A reader that has gone away is no error; a result that cannot be written ends the program with 2.
pub fn say(text: impl Display) {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            complain(format!("standard output: {error}"));
            std::process::exit(2);
        }
        _ => {}
    }
}

/// Prints an error to stderr.
pub fn complain(error: impl Display) {
    let _ = writeln!(std::io::stderr(), "{} {error}", style("error:").red().bold().for_stderr());
}

/// Prints something that the user should know to stderr.
pub fn note(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{} {text}", style("note:").yellow().bold().for_stderr());
}

/// Prints a table, without the spaces that fill its last column.
pub fn say_table(table: &Table) {
    for line in table.lines() {
        say(line.trim_end());
    }
}

/// Prints `value` as the one JSON object of stdout.
pub fn say_json(value: &impl Serialize) {
    say(serde_json::to_string_pretty(value).expect("plain structures with string keys"));
}

/// An empty table with the given column heads: a line below the heads and no other.
pub fn table<const N: usize>(heads: [&str; N]) -> Table {
    let mut table = Table::new();
    if !console::colors_enabled() {
        table.force_no_tty();
    }
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─')
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(heads.map(|head| Cell::new(head).add_attribute(Attribute::Bold)));
    table
}

/// A cell that says whether things are well.
pub fn verdict_cell(text: impl ToString, good: Option<bool>) -> Cell {
    let cell = Cell::new(text.to_string());
    match good {
        Some(true) => cell.fg(Color::Green),
        Some(false) => cell.fg(Color::Red),
        None => cell.fg(Color::Yellow),
    }
}

/// A sentence that ends a command, green or red on a terminal.
pub fn conclude(good: bool, text: impl Display) {
    let text = style(text).bold();
    say(if good { text.green() } else { text.red() });
}

/// Shows on a terminal's stderr what is being done; gone when dropped.
pub struct Progress(ProgressBar);

impl Progress {
    /// A wheel that turns.
    pub fn start(what: impl Into<String>) -> Self {
        let bar = ProgressBar::new_spinner().with_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(100));
        Progress(bar)
    }

    /// A bar of `len` steps.
    pub fn steps(len: u64, what: impl Into<String>) -> Self {
        let bar = ProgressBar::new(len).with_message(what.into());
        if let Ok(style) = ProgressStyle::with_template("{bar:30.green} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// What is being done now.
    pub fn now(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }

    /// One step done.
    pub fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A duration in a unit that suits it.
pub fn duration(milliseconds: f64) -> String {
    match milliseconds {
        ms if ms < 1.0 => format!("{:.1} µs", ms * 1e3),
        ms if ms < 1e3 => format!("{ms:.1} ms"),
        ms => format!("{:.2} s", ms / 1e3),
    }
}

/// A number of bytes in a unit that suits it.
pub fn bytes(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

/// A number without a long row of zeros.
pub fn number(value: f64) -> String {
    let plain = value == 0.0 || !value.is_finite() || (1e-4..1e7).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}
