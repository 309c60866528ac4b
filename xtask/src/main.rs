//! `cargo xtask`: set-up, demonstration, checks and the GPU bundle.

mod bundle;
mod setup;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};

const USAGE: &str = "\
cargo xtask <command>

  setup              install what is missing: the device compiler, and ptxas where there is Python
  demo [OPTIONS]     run the MoE layer of a real checkpoint on every back end that is present
                     (options go to `megamoe run`)
  test               formatting, lints, every test, documentation
  check-ptx [--bless]
                     the assertions on the kernels' PTX; --bless accepts the present instruction counts
  gpu-bundle [--archs LIST]
                     a folder that tests everything on a machine that has a driver and nothing else;
                     a comma-separated list (sm_90a,sm_100f) limits the kernels that it holds
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match dispatch(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the command that `args` name; `false` if they name none.
fn dispatch(args: &[&str]) -> Result<bool> {
    match args {
        ["setup"] => {
            setup::device_compiler()?;
            setup::nvidia_tools()?;
        }
        ["demo", options @ ..] => demo(options)?,
        ["test"] => test()?,
        ["check-ptx"] => check_ptx(false)?,
        ["check-ptx", "--bless"] => check_ptx(true)?,
        ["gpu-bundle"] => bundle::make(None)?,
        ["gpu-bundle", "--archs", list] => bundle::make(Some(list))?,
        ["help" | "--help" | "-h"] => print!("{USAGE}"),
        _ => return Ok(false),
    }
    Ok(true)
}

fn demo(options: &[&str]) -> Result<()> {
    setup::device_compiler()?;
    let checkpoint = "testdata/qwen3moe-nvfp4-modelopt";
    let given = options.contains(&"--checkpoint");
    let mut command = cargo(&["run", "--release", "--", "run"]);
    if !given {
        command.args(["--checkpoint", checkpoint]);
    }
    if !options.contains(&"--backend") {
        command.args(["--backend", "all"]);
    }
    step("megamoe run", command.args(options))
}

fn test() -> Result<()> {
    setup::device_compiler()?;
    setup::nvidia_tools()?;
    setup::component("rustfmt", "fmt")?;
    setup::component("clippy", "clippy")?;
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("lints", &mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    step("tests", &mut cargo(&["test", "--workspace"]))?;
    step("documentation", cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
}

fn check_ptx(bless: bool) -> Result<()> {
    setup::device_compiler()?;
    setup::nvidia_tools()?;
    let mut command = cargo(&["test", "--package", "megamoe", "--test", "ptx", "--", "--nocapture"]);
    if bless {
        command.env("BLESS", "1");
    }
    step("PTX", &mut command)
}

/// The workspace's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// The cargo that runs this program, in the workspace's root.
fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Runs one step of a command, says how long it took and fails if it fails.
fn step(name: &str, command: &mut Command) -> Result<()> {
    eprintln!("== {name}");
    let start = Instant::now();
    let status = command.status().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let seconds = start.elapsed().as_secs_f64();
    if !status.success() {
        bail!("{name} failed ({status}) after {seconds:.0} s");
    }
    eprintln!("== {name}: fine ({seconds:.0} s)");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_commands_are_refused_before_anything_runs() {
        for args in [&[][..], &["tset"], &["test", "--bless"], &["setup", "x"], &["check-ptx", "--Bless"]] {
            assert!(!dispatch(args).unwrap(), "{args:?}");
        }
        assert!(dispatch(&["help"]).unwrap());
    }

    #[test]
    fn a_failing_step_is_an_error() {
        assert!(step("true", &mut Command::new("true")).is_ok());
        assert!(step("false", &mut Command::new("false")).is_err());
        assert!(step("missing", &mut Command::new("/nonexistent/program")).is_err());
    }

    #[test]
    fn the_root_holds_the_kernels() {
        assert!(root().join("kernels-gpu/Cargo.toml").is_file());
    }
}
