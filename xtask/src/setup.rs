//! Installs what a build or a check needs and a machine lacks. What is there already is left alone.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use cuda_builder::{BuildError, NIGHTLY, Ptxas, Toolchain, tools_dir};

use crate::step;

/// Debian's packages with a compiler that builds the kernels too.
const DEBIAN_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// NVIDIA's packages on the Python index, each with the program wanted from it. ptxas is pinned: its register counts are
/// what the checks compare, and the release matches the oldest driver supported for the newest architectures.
const NVIDIA_PACKAGES: [(&str, &str); 3] = [
    ("nvidia-cuda-nvcc==13.0.*", "ptxas"),
    ("nvidia-cuda-cuobjdump==13.*", "cuobjdump"),
    ("nvidia-cuda-nvdisasm==13.*", "nvdisasm"),
];

/// Makes sure that a compiler for the kernels is there.
pub fn device_compiler() -> Result<()> {
    match Toolchain::find() {
        Ok(_) => return Ok(()),
        // Whoever named a compiler wants that one or an error.
        Err(error @ BuildError::Override { .. }) => bail!(error),
        Err(_) => {}
    }
    let install = ["toolchain", "install", NIGHTLY, "--profile", "minimal", "--component", "rust-src"];
    let by_rustup = step("device compiler with rustup", Command::new("rustup").args(install).arg("--no-self-update"));
    if let Err(error) = by_rustup {
        eprintln!("{error:#}; trying Debian's packages");
        apt_install(&DEBIAN_PACKAGES)?;
    }
    let found = Toolchain::find()?;
    eprintln!("device compiler: {}", found.rustc.display());
    Ok(())
}

/// Makes sure that NVIDIA's assembler and disassembler are there, if they can be had.
///
/// # Errors
/// If ptxas cannot be had although `MEGAMOE_REQUIRE_PTXAS` is set. Without the variable that is only said.
pub fn nvidia_tools() -> Result<()> {
    if Ptxas::find().is_some() {
        return Ok(());
    }
    match fetch_nvidia_tools() {
        Ok(()) => Ok(()),
        Err(error) if std::env::var_os("MEGAMOE_REQUIRE_PTXAS").is_some() => {
            Err(error.context("ptxas is required and cannot be had"))
        }
        Err(error) => {
            eprintln!("no ptxas ({error:#}): what needs it will say that it was skipped");
            Ok(())
        }
    }
}

/// Makes sure that `cargo <subcommand>` works.
pub fn component(name: &str, subcommand: &str) -> Result<()> {
    let works = crate::cargo(&[subcommand, "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if works {
        return Ok(());
    }
    step(name, Command::new("rustup").args(["component", "add", name]).current_dir(crate::root()))
}

fn fetch_nvidia_tools() -> Result<()> {
    if !quiet(Command::new("python3").args(["-m", "pip", "--version"])) {
        apt_install(&["python3-pip"]).context("there is no python3 with pip")?;
    }
    let tools = tools_dir();
    let download = tools.join("download");
    std::fs::create_dir_all(&download).with_context(|| download.display().to_string())?;
    let result = fetch_into(&tools, &download);
    std::fs::remove_dir_all(&download).with_context(|| download.display().to_string())?;
    result
}

fn fetch_into(tools: &Path, download: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"]).arg(download);
    step("NVIDIA's assembler with pip", pip.args(NVIDIA_PACKAGES.map(|(package, _)| package)))?;
    for wheel in std::fs::read_dir(download)? {
        let wheel = wheel?.path();
        if wheel.extension().is_some_and(|extension| extension == "whl") {
            // A wheel is a zip archive; Python is here anyway and can unpack it.
            let mut unpack = Command::new("python3");
            unpack.args(["-m", "zipfile", "-e"]).args([&wheel, &download.to_path_buf()]);
            if !quiet(&mut unpack) {
                bail!("cannot unpack {}", wheel.display());
            }
        }
    }
    for (package, program) in NVIDIA_PACKAGES {
        let (from, to) = (download.join("nvidia/cu13/bin").join(program), tools.join(program));
        std::fs::copy(&from, &to).with_context(|| format!("package {package} has no {program}"))?;
        make_executable(&to)?;
    }
    Ok(())
}

/// Sets the permission to execute, which unpacking with Python loses.
pub fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).with_context(|| path.display().to_string())
}

fn apt_install(packages: &[&str]) -> Result<()> {
    if !quiet(Command::new("apt-get").arg("--version")) {
        bail!("there is no apt-get to install {} with", packages.join(", "));
    }
    // Package lists may be old; a failure to renew them shows when the installation fails.
    let _ = quiet(Command::new("apt-get").arg("update"));
    let mut install = Command::new("apt-get");
    install.args(["install", "--yes", "--no-install-recommends"]).args(packages);
    step(&format!("packages {}", packages.join(", ")), install.env("DEBIAN_FRONTEND", "noninteractive"))
}

fn quiet(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
