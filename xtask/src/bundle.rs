//! The GPU bundle: test executables, command line and test data in one folder for a machine that has only a driver.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use cuda_builder::Arch;
use serde_json::Value;

use crate::setup::{self, make_executable};
use crate::{cargo, root, step};

const LIMIT: u64 = 100 << 20;

/// Tests that say nothing about a GPU, or that need a compiler.
const LEFT_OUT: [&str; 7] = ["ptx", "checkpoint", "checkpoint_moe", "formats", "golden", "plan", "reference"];

/// Builds everything and writes `bundle/`, with the kernels for `archs` alone if there is such a list.
pub fn make(archs: Option<&str>) -> Result<()> {
    for name in archs.iter().flat_map(|list| list.split(',')) {
        if !Arch::ALL.iter().any(|arch| arch.name() == name) {
            bail!("--archs: no architecture `{name}`; there are {}", Arch::ALL.map(Arch::name).join(", "));
        }
    }
    setup::device_compiler()?;
    let limited = |mut command: Command| {
        if let Some(list) = archs {
            command.env("MEGAMOE_ARCHS", list);
        }
        command
    };
    let dir = root().join("bundle");
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    }
    std::fs::create_dir_all(dir.join("tests")).with_context(|| dir.display().to_string())?;

    let build = cargo(&["build", "--profile", "bundle", "--package", "megamoe", "--bins"]);
    step("command line", &mut limited(build))?;
    let build = cargo(&["test", "--package", "megamoe", "--tests", "--profile", "bundle", "--no-run"]);
    let output = limited(build)
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("the tests do not build");
    }
    let tests = executables(&String::from_utf8_lossy(&output.stdout));
    if tests.is_empty() {
        bail!("cargo named no test executable");
    }
    for (name, path) in &tests {
        std::fs::copy(path, dir.join("tests").join(name)).with_context(|| path.display().to_string())?;
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let command_line = target.join("bundle/megamoe");
    std::fs::copy(&command_line, dir.join("megamoe")).with_context(|| command_line.display().to_string())?;
    copy_tree(&root().join("testdata"), &dir.join("testdata"))?;
    let run_all = dir.join("run-all");
    std::fs::write(&run_all, RUN_ALL).with_context(|| run_all.display().to_string())?;
    make_executable(&run_all)?;

    let size = size_of(&dir)?;
    eprintln!("{} tests, {:.1} MiB in {}", tests.len(), size as f64 / (1 << 20) as f64, dir.display());
    if size > LIMIT {
        bail!("the bundle holds {size} bytes; the limit is {LIMIT} (`--archs` makes it smaller)");
    }
    Ok(())
}

/// Name and path of each test executable in cargo's messages about the root package, but for [`LEFT_OUT`].
fn executables(messages: &str) -> Vec<(String, PathBuf)> {
    let mut found: Vec<(String, PathBuf)> = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact" && message["profile"]["test"] == true)
        .filter_map(|message| {
            let path = PathBuf::from(message["executable"].as_str()?);
            let target = message["target"]["name"].as_str()?;
            let kind = message["target"]["kind"][0].as_str()?;
            (!LEFT_OUT.contains(&target)).then(|| (format!("megamoe.{target}.{kind}"), path))
        })
        .collect();
    found.sort();
    found
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target).with_context(|| entry.path().display().to_string())?;
        }
    }
    Ok(())
}

fn size_of(dir: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        size += if entry.file_type()?.is_dir() { size_of(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(size)
}

/// An executable that dies without a result line counts as failed, and so does one that ran no test at all.
const RUN_ALL: &str = r#"#!/bin/sh
# Runs every test executable of this folder, or those named, and prints a table. A GPU is required.
# Usage: ./run-all [NAME...]      Output of each goes to logs/NAME.log (LOGS=DIR changes the folder).
set -u
cd "$(dirname "$0")" || exit 2
MEGAMOE_REQUIRE_GPU=1
MEGAMOE_TESTDATA=$PWD/testdata
export MEGAMOE_REQUIRE_GPU MEGAMOE_TESTDATA
logs=${LOGS:-logs}
mkdir -p "$logs" || exit 2
[ $# -gt 0 ] || set -- $(ls tests)
bad=0
printf '%-36s %8s %8s %8s\n' name passed failed seconds
for name in "$@"; do
    start=$(date +%s)
    "./tests/$name" --include-ignored >"$logs/$name.log" 2>&1
    code=$?
    seconds=$(($(date +%s) - start))
    passed=$(sed -n 's/^test result: .*\. \([0-9]*\) passed;.*/\1/p' "$logs/$name.log" | tail -n 1)
    failed=$(sed -n 's/^test result: .* passed; \([0-9]*\) failed;.*/\1/p' "$logs/$name.log" | tail -n 1)
    printf '%-36s %8s %8s %8s\n' "$name" "${passed:--}" "${failed:-died}" "$seconds"
    if [ "$code" -ne 0 ] || [ "${failed:-1}" -ne 0 ]; then
        bad=1
        sed -n '/^failures:/,$p' "$logs/$name.log" | head -n 60
        [ -n "$failed" ] || tail -n 20 "$logs/$name.log"
    fi
done
[ "$bad" -eq 0 ] && echo 'all passed' || echo 'FAILED'
exit "$bad"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_architecture_is_refused_before_anything_runs() {
        let error = make(Some("sm_90a,sm_91")).unwrap_err().to_string();
        assert!(error.contains("`sm_91`") && error.contains("sm_100f"), "{error}");
    }

    #[test]
    fn test_executables_are_told_from_the_rest() {
        let message = |target: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"{target}","kind":["test"]}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let messages = [
            message("differential", true, "\"/t/differential-1\""),
            message("ptx", true, "\"/t/ptx-1\""),
            message("formats", true, "\"/t/formats-1\""),
            message("cuda_std", false, "null"),
            r#"{"reason":"build-finished","success":true}"#.into(),
            "no JSON".into(),
        ];
        let names: Vec<String> = executables(&messages.join("\n")).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["megamoe.differential.test"]);
    }

    /// The script must notice a failed test, a crash, and success; executables are played by scripts.
    #[test]
    fn run_all_tells_success_from_failure() {
        let dir = std::env::temp_dir().join(format!("megamoe-run-all-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("tests")).unwrap();
        let script = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).unwrap();
            make_executable(&path).unwrap();
        };
        script("run-all", RUN_ALL);
        script(
            "tests/good",
            "#!/bin/sh\n[ \"$MEGAMOE_REQUIRE_GPU\" = 1 ] || exit 1\necho 'test result: ok. 3 passed; 0 failed; 0 ignored'\n",
        );
        script("tests/bad", "#!/bin/sh\necho 'test result: FAILED. 1 passed; 2 failed; 0 ignored'\nexit 101\n");
        script("tests/crash", "#!/bin/sh\nkill -SEGV $$\n");
        script("tests/silent", "#!/bin/sh\nexit 0\n");
        let run = |names: &[&str]| {
            let output = Command::new(dir.join("run-all")).args(names).output().unwrap();
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        let (code, text) = run(&["good"]);
        assert!(code == Some(0) && text.contains("all passed"), "{text}");
        for name in ["bad", "crash", "silent"] {
            assert_eq!(run(&["good", name]).0, Some(1), "{name}");
        }
        let (code, text) = run(&[]);
        assert_eq!(code, Some(1));
        assert!(["good", "bad", "crash", "silent", "died", "FAILED"].iter().all(|word| text.contains(word)), "{text}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
