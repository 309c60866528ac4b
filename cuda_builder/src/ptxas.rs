//! Runs NVIDIA's assembler, where there is one, to see what a kernel really costs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Arch;

/// Names a ptxas to use instead of the ones that are searched for.
pub const OVERRIDE: &str = "MEGAMOE_PTXAS";

/// A found assembler.
#[derive(Clone, Debug)]
pub struct Ptxas {
    path: PathBuf,
}

/// What `ptxas -v` says about one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of stack frame per thread.
    pub stack: u32,
    /// Bytes of spill stores.
    pub spill_stores: u32,
    /// Bytes of spill loads.
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
    /// Named barriers.
    pub barriers: u32,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum PtxasError {
    /// It could not be run.
    #[error("cannot run {path}: {source}")]
    Run {
        /// The program or file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It refused the text.
    #[error("ptxas -arch={arch} refuses the module:\n{message}")]
    Refused {
        /// The architecture asked for.
        arch: Arch,
        /// What it printed.
        message: String,
    },
    /// It printed something that is not understood.
    #[error("cannot read ptxas's line `{line}`")]
    Output {
        /// The line.
        line: String,
    },
}

impl Ptxas {
    /// The override variable's, the one that `cargo xtask setup` fetched, or the one on PATH.
    pub fn find() -> Option<Self> {
        if let Some(path) = std::env::var_os(OVERRIDE).filter(|value| !value.is_empty()) {
            return Some(Self { path: path.into() });
        }
        let fetched = tools_dir().join("ptxas");
        let on_path = std::env::var_os("PATH")
            .into_iter()
            .flat_map(|path| std::env::split_paths(&path).map(|dir| dir.join("ptxas")).collect::<Vec<_>>());
        std::iter::once(fetched).chain(on_path).find(|path| path.is_file()).map(|path| Self { path })
    }

    /// The program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Assembles `ptx` for `arch` and returns each kernel's resources by name.
    ///
    /// # Errors
    /// See [`PtxasError`].
    pub fn assemble(&self, ptx: &str, arch: Arch) -> Result<BTreeMap<String, Resources>, PtxasError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = format!("cuda_builder-{}-{}.ptx", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let input = std::env::temp_dir().join(unique);
        std::fs::write(&input, ptx).map_err(|source| PtxasError::Run { path: input.clone(), source })?;
        let output = Command::new(&self.path)
            .args(["-v", &format!("-arch={arch}"), "-o", "/dev/null"])
            .arg(&input)
            .output()
            .map_err(|source| PtxasError::Run { path: self.path.clone(), source });
        // A file left behind in the temporary folder is no reason to fail.
        let _ = std::fs::remove_file(&input);
        let output = output?;
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            return Err(PtxasError::Refused { arch, message: text });
        }
        parse(&text)
    }
}

/// Where `cargo xtask setup` puts NVIDIA's tools: `tools` in the target folder.
pub fn tools_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from)
        .join("tools")
}

fn parse(text: &str) -> Result<BTreeMap<String, Resources>, PtxasError> {
    let mut kernels = BTreeMap::<String, Resources>::new();
    // Properties of device functions come between those of kernels and must not be taken for theirs.
    let mut entry: Option<String> = None;
    let mut section: Option<String> = None;
    for line in text.lines() {
        let bad = || PtxasError::Output { line: line.to_string() };
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().ok_or_else(bad)?.to_string();
            kernels.entry(name.clone()).or_default();
            entry = Some(name);
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            section = Some(name.trim().to_string());
        } else if line.contains("bytes stack frame") {
            if section.is_some() && section == entry {
                let kernel = entry.as_ref().and_then(|name| kernels.get_mut(name)).ok_or_else(bad)?;
                kernel.stack = number_before(line, "bytes stack frame").ok_or_else(bad)?;
                kernel.spill_stores = number_before(line, "bytes spill stores").ok_or_else(bad)?;
                kernel.spill_loads = number_before(line, "bytes spill loads").ok_or_else(bad)?;
            }
        } else if line.contains("Used ") && line.contains(" registers") {
            let kernel = entry.as_ref().and_then(|name| kernels.get_mut(name)).ok_or_else(bad)?;
            kernel.registers = number_before(line, "registers").ok_or_else(bad)?;
            kernel.barriers = number_before(line, "barriers").unwrap_or(0);
            kernel.shared = number_before(line, "bytes smem").unwrap_or(0);
        }
    }
    // Zero registers would mean that a kernel's line was never seen.
    match kernels.iter().find(|(_, resources)| resources.registers == 0) {
        Some((name, _)) => Err(PtxasError::Output { line: format!("(no register count for kernel `{name}`)") }),
        None => Ok(kernels),
    }
}

fn number_before(line: &str, what: &str) -> Option<u32> {
    line.split_once(what)?.0.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "\
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'scale' for 'sm_90a'
ptxas info    : Function properties for scale
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 8 bytes cumulative stack size
ptxas info    : Compile time = 5.576 ms
ptxas info    : Function properties for helper
    512 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'fill' for 'sm_90a'
ptxas info    : Function properties for fill
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
";

    #[test]
    fn reads_every_number() {
        let kernels = parse(SAMPLE).unwrap();
        let scale = Resources { registers: 40, stack: 8, spill_stores: 4, spill_loads: 12, shared: 1024, barriers: 1 };
        assert_eq!(kernels["scale"], scale);
        assert_eq!(kernels["fill"], Resources { registers: 10, ..Resources::default() });
        assert_eq!(kernels.len(), 2);
    }

    #[test]
    fn a_missing_count_is_an_error() {
        let text = SAMPLE.replace("Used 10 registers", "Used a few");
        assert!(matches!(parse(&text), Err(PtxasError::Output { .. })));
    }
}
