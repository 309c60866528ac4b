//! The commands of `megamoe`, one file each, and what they print.
//!
//! Exit codes: 0, everything ran and agreed; 1, a disagreement or a back end that failed; 2, bad input. Errors go to stderr.

mod backend;
mod bench;
mod bench_grouped;
mod bench_ops;
mod block;
mod diff;
mod html;
mod info;
mod inspect;
mod output;
mod run;

use clap::{Parser, Subcommand};
use megamoe::Error;
use std::process::ExitCode;

/// Mixture-of-experts layers for NVIDIA GPUs whose kernels are Rust, on GPU, emulator and CPU.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a layer of a checkpoint on several back ends and compare the results.
    Run(run::Args),
    /// Time layers on a GPU.
    Bench(bench::Args),
    /// Compare back ends bit for bit: one operation on given or drawn values, or all operations.
    Diff(diff::Args),
    /// Show what a checkpoint holds and which plans its layers get.
    Inspect(inspect::Args),
    /// Show devices, embedded modules, kernels and plans.
    Info(info::Args),
}

/// What a command that ran to its end has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Agreed,
    Disagreed,
}

pub fn main() -> ExitCode {
    // Bad usage exits with 2, as bad input does.
    let cli = Cli::parse();
    let verdict = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Diff(args) => diff::diff(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Info(args) => info::info(&args),
    };
    match verdict {
        Ok(Verdict::Agreed) => ExitCode::SUCCESS,
        Ok(Verdict::Disagreed) => ExitCode::from(1),
        Err(error) => {
            output::complain(&error);
            ExitCode::from(if is_bad_input(&error) { 2 } else { 1 })
        }
    }
}

/// Whether the user can do something about it, as opposed to a kernel or a driver that failed.
fn is_bad_input(error: &Error) -> bool {
    !matches!(error, Error::Driver { .. } | Error::Fault(_) | Error::Status { .. })
}
