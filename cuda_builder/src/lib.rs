//! Builds a kernel crate to PTX with rustc's own `nvptx64-nvidia-cuda` back end and checks the result.
//!
//! [`Builder`] finds a compiler ([`Toolchain`]), builds one crate for one [`Arch`] and writes the launch bounds into the
//! text ([`postprocess`]). [`embed`] does so for several architectures from a build script. [`Module`] counts what a
//! kernel holds and [`Ptxas`] says what it costs. No CUDA toolkit is needed to build.

mod analysis;
mod arch;
mod postprocess;
mod ptxas;
mod toolchain;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use analysis::{Function, Module, ParseError, collective};
pub use arch::Arch;
pub use postprocess::{Bounds, postprocess};
pub use ptxas::{OVERRIDE as PTXAS_OVERRIDE, Ptxas, PtxasError, Resources, tools_dir};
pub use toolchain::{NIGHTLY, OVERRIDE as RUSTC_OVERRIDE, Toolchain};

const TARGET: &str = "nvptx64-nvidia-cuda";

/// Why there is no PTX.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Nothing on this machine builds for nvptx64.
    #[error(
        "no device compiler found: run `cargo xtask setup`, which installs Rust {NIGHTLY} with rust-src \
         (or set MEGAMOE_DEVICE_RUSTC to a rustc that has the source of core)\n  {tried}"
    )]
    NoToolchain {
        /// Each candidate with what is wrong with it.
        tried: String,
    },
    /// The override variable names something unusable.
    #[error("MEGAMOE_DEVICE_RUSTC={}: {reason}", rustc.display())]
    Override {
        /// Its value.
        rustc: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file or program could not be used.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or program.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The crate does not compile.
    #[error("the kernels do not compile for {arch}:\n{message}")]
    Compile {
        /// For which architecture.
        arch: Arch,
        /// The compiler's words.
        message: String,
    },
    /// A kernel lacks its `BOUNDS_` static.
    #[error("kernel `{kernel}` has no launch bounds: add a static `BOUNDS_{kernel}: [u32; 2]`")]
    NoBounds {
        /// The kernel.
        kernel: String,
    },
    /// A `BOUNDS_` static names no kernel.
    #[error("`BOUNDS_{kernel}` names no kernel of the module")]
    NoKernel {
        /// The name that is missing.
        kernel: String,
    },
    /// Launch bounds that no GPU can meet.
    #[error(
        "`BOUNDS_{kernel}` = [{threads}, {min_blocks}]: threads must be 1..=1024, blocks 1..=32, their product at most 2048"
    )]
    BadBounds {
        /// The kernel.
        kernel: String,
        /// Threads of a block.
        threads: u32,
        /// Resident blocks.
        min_blocks: u32,
    },
    /// The PTX has an unexpected shape.
    #[error("unexpected PTX: {message}")]
    Malformed {
        /// What is wrong.
        message: String,
    },
}

fn io_error(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> BuildError {
    let path = path.into();
    move |source| BuildError::Io { path, source }
}

/// PTX of one crate for one architecture, with launch bounds written in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptx {
    /// What it was built for.
    pub arch: Arch,
    /// The text, not NUL-terminated.
    pub text: String,
}

/// Builds one kernel crate for one architecture.
#[derive(Clone, Debug)]
pub struct Builder {
    crate_dir: PathBuf,
    sources: Vec<PathBuf>,
    arch: Arch,
    target_dir: PathBuf,
}

impl Builder {
    /// A builder of the crate in `crate_dir` for [`Arch::Sm90a`], with build products under `crate_dir`/target.
    pub fn new(crate_dir: impl Into<PathBuf>) -> Self {
        let crate_dir = crate_dir.into();
        Self { target_dir: crate_dir.join("target"), sources: Vec::new(), arch: Arch::Sm90a, crate_dir }
    }

    /// Chooses the architecture.
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    /// Adds a file or folder whose change calls for a rebuild: the source of a path dependency, the lock file.
    pub fn source(mut self, path: impl Into<PathBuf>) -> Self {
        self.sources.push(path.into());
        self
    }

    /// Chooses where build products are kept. It must not be the target folder of a cargo that waits for this build.
    pub fn target_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.target_dir = path.into();
        self
    }

    /// Builds, or takes the text of an earlier build of the same sources, flags and compiler.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(&self) -> Result<Ptx, BuildError> {
        self.build_with(&Toolchain::find()?)
    }

    /// Builds with a given compiler.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build_with(&self, toolchain: &Toolchain) -> Result<Ptx, BuildError> {
        let flags = self.rustflags();
        // One folder per compiler, flags and crate: cargo does not notice when the assembly file, whose name has no hash,
        // was overwritten by a build with others.
        let crate_dir = self.crate_dir.canonicalize().map_err(io_error(&self.crate_dir))?;
        let identity = hash_of(&(&toolchain.version, &toolchain.rustc, &flags, &crate_dir));
        let dir = self.target_dir.join(format!("{}-{identity:016x}", self.arch));
        std::fs::create_dir_all(&dir).map_err(io_error(&dir))?;
        let lock = std::fs::File::create(dir.join("build.lock")).map_err(io_error(&dir))?;
        lock.lock().map_err(io_error(&dir))?;

        let (key_file, ptx_file) = (dir.join("key"), dir.join("raw.ptx"));
        let key = format!("{:016x}", self.hash_sources()?);
        let cached = std::fs::read_to_string(&key_file).is_ok_and(|old| old == key);
        let raw = match std::fs::read_to_string(&ptx_file) {
            Ok(text) if cached => text,
            _ => {
                let text = self.compile(toolchain, &flags, &dir)?;
                std::fs::write(&ptx_file, &text).map_err(io_error(&ptx_file))?;
                std::fs::write(&key_file, key).map_err(io_error(&key_file))?;
                text
            }
        };
        Ok(Ptx { arch: self.arch, text: postprocess(&raw)? })
    }

    fn rustflags(&self) -> String {
        let arch = self.arch.name();
        // Separated by 0x1f, so that quotes need no escape.
        [
            &format!("-Ctarget-cpu={arch}"),
            &format!("-Ctarget-feature=+{}", self.arch.ptx_feature()),
            // The assembly file is the product; the default linker is a component that need not be installed.
            "-Clinker=/bin/true",
            // Without it a tile of accumulators that is indexed by loops stays in local memory.
            "-Cllvm-args=-unroll-threshold=3000",
            "--cfg",
            &format!("cuda_arch=\"{arch}\""),
            "--check-cfg",
            "cfg(cuda_arch,values(any()))",
        ]
        .join("\x1f")
    }

    fn compile(&self, toolchain: &Toolchain, flags: &str, dir: &Path) -> Result<String, BuildError> {
        let manifest = self.crate_dir.join("Cargo.toml");
        let mut command = Command::new(&toolchain.cargo);
        clean_environment(&mut command);
        command
            .args(["rustc", "--lib", "--release", "-Zbuild-std=core", "--target", TARGET, "--crate-type", "cdylib"])
            .arg("--manifest-path")
            .arg(&manifest)
            .arg("--target-dir")
            .arg(dir)
            .args(["--", "--emit=asm"])
            .env("RUSTC", &toolchain.rustc)
            .env("RUSTC_WRAPPER", "")
            .env("CARGO_ENCODED_RUSTFLAGS", flags)
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false")
            .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false");
        if toolchain.needs_bootstrap() {
            command.env("RUSTC_BOOTSTRAP", "1");
        }
        let deps = dir.join(TARGET).join("release/deps");
        let output = command.output().map_err(io_error(&toolchain.cargo))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(BuildError::Compile { arch: self.arch, message });
        }
        let name = crate_name(&manifest)?;
        let assembly = deps.join(format!("{name}.s"));
        std::fs::read_to_string(&assembly).map_err(io_error(assembly))
    }

    fn hash_sources(&self) -> Result<u64, BuildError> {
        let mut hasher = DefaultHasher::new();
        for source in std::iter::once(&self.crate_dir).chain(&self.sources) {
            hash_tree(source, &mut hasher)?;
        }
        Ok(hasher.finish())
    }
}

/// The target folder's root, so that every profile of the outer build shares the result: `OUT_DIR` lies in
/// `<root>/<profile>/build/`. Its mark is not always there, and without either the result is not shared.
fn shared_target_dir(out_dir: &Path) -> &Path {
    let marked = out_dir.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file());
    let above_build = || out_dir.ancestors().find(|dir| dir.ends_with("build"))?.parent()?.parent();
    marked.or_else(above_build).unwrap_or(out_dir)
}

/// Hashes names and contents of everything under `path`, in a fixed order, build products and hidden files left out.
fn hash_tree(path: &Path, hasher: &mut DefaultHasher) -> Result<(), BuildError> {
    let metadata = std::fs::metadata(path).map_err(io_error(path))?;
    path.file_name().hash(hasher);
    if metadata.is_dir() {
        let mut entries: Vec<PathBuf> = std::fs::read_dir(path)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
            .map_err(io_error(path))?;
        entries.retain(|entry| {
            let name = entry.file_name().unwrap_or_default().to_string_lossy();
            name != "target" && !name.starts_with('.')
        });
        entries.sort();
        entries.len().hash(hasher);
        for entry in &entries {
            hash_tree(entry, hasher)?;
        }
    } else {
        std::fs::read(path).map_err(io_error(path))?.hash(hasher);
    }
    Ok(())
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The crate name that cargo derives from the first `name = "…"` of a manifest.
fn crate_name(manifest: &Path) -> Result<String, BuildError> {
    let text = std::fs::read_to_string(manifest).map_err(io_error(manifest))?;
    text.lines()
        .find_map(|line| {
            let value = line.trim().strip_prefix("name")?.trim_start().strip_prefix('=')?.trim();
            Some(value.trim_matches('"').replace('-', "_"))
        })
        .ok_or_else(|| BuildError::Malformed { message: format!("{} names no package", manifest.display()) })
}

/// Removes what an outer cargo or rustup sets for its own build, and keeps where things are and how the net is reached.
fn clean_environment(command: &mut Command) {
    const KEEP: [&str; 6] = ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR", "CARGO_SOURCE", "RUSTUP_HOME"];
    const DROP: [&str; 10] =
        ["CARGO", "RUST", "DEP_", "TARGET", "HOST", "OUT_DIR", "NUM_JOBS", "OPT_LEVEL", "PROFILE", "DEBUG"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        // Prefixes for the two families; whole names for the short words.
        let dropped =
            DROP.iter().enumerate().any(|(i, word)| if i < 3 { text.starts_with(word) } else { text == *word });
        if dropped && !KEEP.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
}

/// For a build script: builds the crate in `crate_dir` for every architecture of `archs` and writes, into `OUT_DIR`,
/// `<arch>.ptx` for each and `ptx_modules.rs`, to be included, which defines
/// `struct Module { arch: &'static str, compute: (u32, u32), ptx: &'static str }` and `MODULES: &[Module]`. Tells cargo to
/// run the script again when the crate or one of `sources` changes.
///
/// # Errors
/// The first architecture's that fails; see [`BuildError`].
pub fn embed(crate_dir: &Path, sources: &[PathBuf], archs: &[Arch]) -> Result<(), BuildError> {
    let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    for path in std::iter::once(crate_dir).chain(sources.iter().map(PathBuf::as_path)) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    println!("cargo::rerun-if-env-changed={}", toolchain::OVERRIDE);
    let toolchain = Toolchain::find()?;
    let target_dir = shared_target_dir(&out_dir).join("ptx");

    let jobs = std::thread::available_parallelism().map_or(1, usize::from).min(archs.len());
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(&arch) = archs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut builder = Builder::new(crate_dir).arch(arch).target_dir(&target_dir);
                    builder.sources = sources.to_vec();
                    let result = builder.build_with(&toolchain);
                    if result.is_err() {
                        // The others would most likely fail in the same words.
                        next.store(archs.len(), Ordering::Relaxed);
                    }
                    results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(result);
                }
            });
        }
    });
    let mut modules = results.into_inner().unwrap_or_default().into_iter().collect::<Result<Vec<Ptx>, _>>()?;
    modules.sort_by_key(|module| module.arch);

    let mut table = String::from(
        "/// One build of the kernels.\n\
         #[derive(Clone, Copy, Debug)]\n\
         pub struct Module {\n\
         \x20   /// Architecture, as ptxas names it.\n\
         \x20   pub arch: &'static str,\n\
         \x20   /// Its compute capability (major, minor).\n\
         \x20   pub compute: (u32, u32),\n\
         \x20   /// PTX text.\n\
         \x20   pub ptx: &'static str,\n\
         }\n\n\
         /// The kernels, built once per architecture, oldest first.\n\
         pub const MODULES: &[Module] = &[\n",
    );
    for Ptx { arch, text } in &modules {
        let file = out_dir.join(format!("{arch}.ptx"));
        std::fs::write(&file, text).map_err(io_error(&file))?;
        let (major, minor) = arch.compute();
        table.push_str(&format!(
            "    Module {{ arch: \"{arch}\", compute: ({major}, {minor}), \
             ptx: include_str!(concat!(env!(\"OUT_DIR\"), \"/{arch}.ptx\")) }},\n"
        ));
    }
    table.push_str("];\n");
    let file = out_dir.join("ptx_modules.rs");
    std::fs::write(&file, table).map_err(io_error(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crate_name_comes_from_the_manifest() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/Cargo.toml");
        assert_eq!(crate_name(&fixture).unwrap(), "fixture");
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        assert_eq!(crate_name(&here).unwrap(), "cuda_builder");
        assert!(crate_name(Path::new("/nonexistent/Cargo.toml")).is_err());
    }

    #[test]
    fn the_source_hash_sees_names_and_contents() {
        let dir = std::env::temp_dir().join(format!("cuda_builder-hash-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("src")).unwrap();
        let hash = || Builder::new(&dir).hash_sources().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        write("src/a.rs", "a");
        let first = hash();
        assert_eq!(first, hash());
        write("src/a.rs", "b");
        let changed = hash();
        assert_ne!(first, changed);
        std::fs::rename(dir.join("src/a.rs"), dir.join("src/b.rs")).unwrap();
        assert_ne!(changed, hash());
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(Builder::new(&dir).hash_sources().is_err());
    }

    #[test]
    fn profiles_share_one_folder() {
        let out = Path::new("/nonexistent/target/debug/build/megamoe-0/out");
        assert_eq!(shared_target_dir(out), Path::new("/nonexistent/target"));
        assert_eq!(shared_target_dir(Path::new("/nonexistent/out")), Path::new("/nonexistent/out"));
    }

    #[test]
    fn flags_name_the_architecture_everywhere() {
        let flags = Builder::new(".").arch(Arch::Sm120f).rustflags();
        assert!(flags.contains("-Ctarget-cpu=sm_120f\x1f"));
        assert!(flags.contains("\x1f--cfg\x1fcuda_arch=\"sm_120f\"\x1f"));
        assert!(flags.contains("+ptx88"));
    }
}
