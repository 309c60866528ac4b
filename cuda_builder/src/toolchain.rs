//! Finds a compiler that can build core for nvptx64.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::BuildError;

/// The rustup toolchain that the kernels are developed with.
pub const NIGHTLY: &str = "nightly-2026-05-20";
/// The commit of [`NIGHTLY`]'s rustc: how the same compiler is recognised under the plain name `nightly`.
const NIGHTLY_COMMIT: &str = "e50aa6fba4e63ab34c72bf9acfd2c307c1155d1a";
/// The release of Debian's `rustc-web` that is known to build the kernels.
const DEBIAN_RELEASE: &str = "1.96.";
/// Names a rustc to use instead of the ones that are searched for.
pub const OVERRIDE: &str = "MEGAMOE_DEVICE_RUSTC";

/// A usable pair of rustc and cargo, with the source of core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// Path of rustc.
    pub rustc: PathBuf,
    /// Path of the cargo that belongs to it.
    pub cargo: PathBuf,
    /// What `rustc -vV` prints: the compiler's identity.
    pub version: String,
}

impl Toolchain {
    /// The override variable's compiler, else the pinned nightly, else Debian's package.
    ///
    /// # Errors
    /// [`BuildError::Override`] if the variable names something unusable, [`BuildError::NoToolchain`] if nothing is found.
    pub fn find() -> Result<Self, BuildError> {
        if let Some(rustc) = std::env::var_os(OVERRIDE).filter(|value| !value.is_empty()) {
            let rustc = PathBuf::from(rustc);
            return Self::probe(&rustc).map_err(|reason| BuildError::Override { rustc, reason });
        }
        let mut tried = Vec::new();
        for (rustc, accepts) in candidates() {
            match Self::probe(&rustc) {
                Ok(found) if accepts(&found.version) => return Ok(found),
                Ok(_) => tried.push(format!("{}: another version", rustc.display())),
                Err(reason) => tried.push(format!("{}: {reason}", rustc.display())),
            }
        }
        Err(BuildError::NoToolchain { tried: tried.join("\n  ") })
    }

    /// Checks that `rustc` runs, has the source of core and a cargo beside it.
    fn probe(rustc: &Path) -> Result<Self, String> {
        let version = output(rustc, &["-vV"])?;
        let sysroot = output(rustc, &["--print", "sysroot"])?;
        let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
        if !library.join("core/src/lib.rs").is_file() {
            return Err("has no source of core (component rust-src)".into());
        }
        let beside = rustc.with_file_name("cargo");
        let inside = Path::new(sysroot.trim()).join("bin/cargo");
        let cargo = [beside, inside]
            .into_iter()
            .find(|cargo| cargo.is_file())
            .ok_or_else(|| "has no cargo beside it".to_string())?;
        Ok(Self { rustc: rustc.to_path_buf(), cargo, version })
    }

    /// Whether unstable features need `RUSTC_BOOTSTRAP`.
    pub(crate) fn needs_bootstrap(&self) -> bool {
        let release = field(&self.version, "release").unwrap_or_default();
        !release.contains("nightly") && !release.contains("dev")
    }
}

type Accepts = fn(&str) -> bool;

fn candidates() -> Vec<(PathBuf, Accepts)> {
    let rustup_home = std::env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".rustup")));
    let mut names: Vec<String> = rustup_home
        .iter()
        .filter_map(|home| std::fs::read_dir(home.join("toolchains")).ok())
        .flat_map(|entries| entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()))
        .filter(|name| name.starts_with("nightly"))
        .collect();
    // The pinned name first; its commit is checked all the same, since the name alone proves nothing.
    names.sort_by_key(|name| (!name.starts_with(NIGHTLY), name.clone()));
    let is_pinned: Accepts = |version| field(version, "commit-hash") == Some(NIGHTLY_COMMIT);
    let is_debian: Accepts = |version| field(version, "release").is_some_and(|r| r.starts_with(DEBIAN_RELEASE));
    let mut all: Vec<(PathBuf, Accepts)> = Vec::new();
    for (name, home) in names.iter().zip(rustup_home.iter().cycle()) {
        all.push((home.join("toolchains").join(name).join("bin/rustc"), is_pinned));
    }
    if Path::new("/usr/bin/rustc").exists() {
        all.push((PathBuf::from("/usr/bin/rustc"), is_debian));
    }
    all
}

/// The value of `key` in the output of `rustc -vV`.
fn field<'a>(version: &'a str, key: &str) -> Option<&'a str> {
    version.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
}

fn output(program: &Path, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(program);
    crate::clean_environment(&mut command);
    let output = command.args(args).output().map_err(|error| format!("does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!("fails: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8(output.stdout).map_err(|_| "prints something that is not UTF-8".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "rustc 1.96.0\nbinary: rustc\ncommit-hash: abc\nrelease: 1.96.0\nLLVM version: 22.1.8\n";

    #[test]
    fn reads_version_fields() {
        assert_eq!(field(VERSION, "release"), Some("1.96.0"));
        assert_eq!(field(VERSION, "commit-hash"), Some("abc"));
        assert_eq!(field(VERSION, "commit-date"), None);
    }

    #[test]
    fn only_stable_compilers_need_bootstrap() {
        let toolchain = |release: &str| Toolchain {
            rustc: PathBuf::new(),
            cargo: PathBuf::new(),
            version: format!("release: {release}\n"),
        };
        assert!(toolchain("1.96.0").needs_bootstrap());
        assert!(!toolchain("1.97.0-nightly").needs_bootstrap());
    }

    #[test]
    fn a_program_that_is_no_compiler_is_refused() {
        assert!(Toolchain::probe(Path::new("/bin/false")).is_err());
        assert!(Toolchain::probe(Path::new("/nonexistent/rustc")).unwrap_err().contains("does not run"));
    }
}
