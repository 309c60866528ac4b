//! Turns what rustc emits into what the driver shall load.
//!
//! No attribute of Rust reaches the launch-bound directives of PTX, so a kernel states its bounds in a static beside it:
//! `BOUNDS_<kernel>: [u32; 2] = [threads per block, least resident blocks per multiprocessor]`. Here the statics become
//! `.reqntid` and `.minnctapersm` of the kernel with that name and vanish.

use std::collections::BTreeMap;

use crate::BuildError;

/// Prefix of the statics that hold launch bounds.
const PREFIX: &str = "BOUNDS_";

/// Launch bounds of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Threads of a block, exactly.
    pub threads: u32,
    /// Blocks that shall fit on one multiprocessor.
    pub min_blocks: u32,
}

/// Writes launch bounds into `ptx` and strips comments and empty lines.
///
/// # Errors
/// A kernel without bounds, bounds without a kernel, bounds out of range, or text of an unknown shape.
pub fn postprocess(ptx: &str) -> Result<String, BuildError> {
    let mut bounds = BTreeMap::new();
    let mut lines = Vec::new();
    for line in ptx.lines() {
        let line = line.trim_end();
        if line.is_empty() || line.trim_start().starts_with("//") {
            continue;
        }
        match parse_bounds(line)? {
            Some((kernel, found)) => {
                if bounds.insert(kernel.to_string(), found).is_some() {
                    return Err(malformed(format!("bounds of kernel `{kernel}` appear twice")));
                }
            }
            None => lines.push(line),
        }
    }

    let mut out = String::with_capacity(ptx.len());
    let mut kernel: Option<&str> = None;
    for line in lines {
        if let Some(name) = entry_name(line) {
            kernel = Some(name);
        }
        // The parameter list ends before the line of the opening brace, and so do the directives.
        if line.starts_with('{')
            && let Some(name) = kernel.take()
        {
            let Bounds { threads, min_blocks } =
                bounds.remove(name).ok_or_else(|| BuildError::NoBounds { kernel: name.to_string() })?;
            out.push_str(&format!(".reqntid {threads}, 1, 1\n.minnctapersm {min_blocks}\n"));
        }
        out.push_str(line);
        out.push('\n');
    }
    if let Some(name) = kernel {
        return Err(malformed(format!("kernel `{name}` has no body")));
    }
    if let Some((name, _)) = bounds.pop_first() {
        return Err(BuildError::NoKernel { kernel: name });
    }
    check_shared_declared_first(&out)?;
    Ok(out)
}

/// The name in a line that opens a kernel.
fn entry_name(line: &str) -> Option<&str> {
    let rest = line.trim_start();
    let rest = rest.strip_prefix(".visible").map_or(rest, str::trim_start).strip_prefix(".entry")?;
    let name = rest.trim_start();
    Some(&name[..name.find(['(', ' ', '\t']).unwrap_or(name.len())])
}

/// Parses `.visible .global .align 4 .b8 BOUNDS_name[8] = {…};` or the same as `.b32 BOUNDS_name[2]`. Trailing zero
/// elements are left out by the compiler.
fn parse_bounds(line: &str) -> Result<Option<(&str, Bounds)>, BuildError> {
    if !line.trim_start().starts_with('.') {
        return Ok(None);
    }
    let Some((declaration, name)) = line
        .split_whitespace()
        .zip(line.split_whitespace().skip(1))
        .find_map(|(ty, name)| Some((ty, name.strip_prefix(PREFIX)?)))
    else {
        return Ok(None);
    };
    let bad = || malformed(format!("cannot read launch bounds: {}", line.trim()));
    let (name, rest) = name.split_once('[').ok_or_else(bad)?;
    let width = match (declaration, rest) {
        (".b8" | ".u8", "8]") => 1,
        (".b32" | ".u32", "2]") => 4,
        _ => return Err(bad()),
    };
    let (_, values) = line.split_once('{').ok_or_else(bad)?;
    let (values, _) = values.split_once('}').ok_or_else(bad)?;
    let mut bytes = Vec::with_capacity(8);
    for value in values.split(',') {
        let value: u32 = value.trim().parse().map_err(|_| bad())?;
        if width == 1 && value > 0xFF {
            return Err(bad());
        }
        bytes.extend_from_slice(&value.to_le_bytes()[..width]);
    }
    bytes.resize(bytes.len().max(8), 0);
    let [a, b, c, d, e, f, g, h] = bytes[..] else { return Err(bad()) };
    let found = Bounds { threads: u32::from_le_bytes([a, b, c, d]), min_blocks: u32::from_le_bytes([e, f, g, h]) };
    // 2,048 threads is what a multiprocessor holds at most; more resident threads than that can never be met.
    let resident = u64::from(found.threads) * u64::from(found.min_blocks);
    if !(1..=1024).contains(&found.threads) || !(1..=32).contains(&found.min_blocks) || resident > 2048 {
        return Err(BuildError::BadBounds {
            kernel: name.to_string(),
            threads: found.threads,
            min_blocks: found.min_blocks,
        });
    }
    Ok(Some((name, found)))
}

/// ptxas wants the dynamic shared array declared above its first use; module-level assembly does not promise that.
fn check_shared_declared_first(ptx: &str) -> Result<(), BuildError> {
    const NAME: &str = "DYNAMIC_SHARED";
    match ptx.lines().find(|line| line.contains(NAME)) {
        Some(line) if !(line.contains(".extern") && line.contains(".shared")) => {
            Err(malformed(format!("`{NAME}` is used before it is declared: {}", line.trim())))
        }
        _ => Ok(()),
    }
}

fn malformed(message: String) -> BuildError {
    BuildError::Malformed { message }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.4\n.target sm_90a\n.address_size 64\n";

    fn kernel(name: &str) -> String {
        format!(".visible .entry {name}(\n\t.param .u32 {name}_param_0\n)\n{{\n\tret;\n\n}}\n")
    }

    #[test]
    fn bytes_become_directives() {
        let input = format!(
            "//\n// Generated\n//\n{HEAD}\n\t// .globl\tfc1\n.visible .global .align 4 .b8 BOUNDS_fc1[8] = {{0, 1, 0, 0, 2}};\n{}",
            kernel("fc1")
        );
        let expected = format!(
            "{HEAD}.visible .entry fc1(\n\t.param .u32 fc1_param_0\n)\n.reqntid 256, 1, 1\n.minnctapersm 2\n{{\n\tret;\n}}\n"
        );
        assert_eq!(postprocess(&input).unwrap(), expected);
    }

    #[test]
    fn words_become_directives() {
        let input = format!("{HEAD}.visible .global .align 4 .b32 BOUNDS_fc1[2] = {{384, 1}};\n{}", kernel("fc1"));
        assert!(postprocess(&input).unwrap().contains(")\n.reqntid 384, 1, 1\n.minnctapersm 1\n{"));
    }

    #[test]
    fn each_kernel_gets_its_own_bounds_wherever_the_static_stands() {
        let input = format!(
            "{HEAD}{}.visible .global .align 4 .b8 BOUNDS_b[8] = {{64, 0, 0, 0, 8, 0, 0, 0}};\n{}\
             .visible .global .align 4 .b8 BOUNDS_a[8] = {{32, 0, 0, 0, 1}};\n",
            kernel("a"),
            kernel("b")
        );
        let out = postprocess(&input).unwrap();
        assert!(out.contains("a_param_0\n)\n.reqntid 32, 1, 1\n.minnctapersm 1\n{"));
        assert!(out.contains("b_param_0\n)\n.reqntid 64, 1, 1\n.minnctapersm 8\n{"));
        assert!(!out.contains("BOUNDS_"));
    }

    #[test]
    fn a_kernel_without_parameters_is_found() {
        let input = format!(
            "{HEAD}.visible .global .align 4 .b8 BOUNDS_k[8] = {{32, 0, 0, 0, 1}};\n.visible .entry k()\n{{\n\tret;\n}}\n"
        );
        assert!(postprocess(&input).unwrap().contains(".entry k()\n.reqntid 32, 1, 1\n"));
    }

    #[test]
    fn mismatches_are_errors() {
        let bounds = ".visible .global .align 4 .b8 BOUNDS_fc1[8] = {0, 1, 0, 0, 1};\n";
        assert!(
            matches!(postprocess(&format!("{HEAD}{}", kernel("fc1"))), Err(BuildError::NoBounds { kernel }) if kernel == "fc1")
        );
        assert!(
            matches!(postprocess(&format!("{HEAD}{bounds}")), Err(BuildError::NoKernel { kernel }) if kernel == "fc1")
        );
        assert!(matches!(
            postprocess(&format!("{HEAD}{bounds}{bounds}{}", kernel("fc1"))),
            Err(BuildError::Malformed { .. })
        ));
    }

    #[test]
    fn impossible_or_unreadable_bounds_are_errors() {
        for values in ["{0, 0, 0, 0, 1}", "{1, 4, 0, 0, 1}", "{0, 4, 0, 0, 3}", "{32, 0, 0, 0}", "{32, 0, 0, 0, 33}"] {
            let input = format!("{HEAD}.visible .global .align 4 .b8 BOUNDS_k[8] = {values};\n{}", kernel("k"));
            assert!(matches!(postprocess(&input), Err(BuildError::BadBounds { .. })), "{values}");
        }
        for text in [
            ".b8 BOUNDS_k[4] = {1}",
            ".b8 BOUNDS_k[8]",
            ".b8 BOUNDS_k[8] = {256}",
            ".b8 BOUNDS_k[8] = {x}",
            ".b64 BOUNDS_k[1] = {1}",
        ] {
            let input = format!("{HEAD}.visible .global .align 4 {text};\n{}", kernel("k"));
            assert!(matches!(postprocess(&input), Err(BuildError::Malformed { .. })), "{text}");
        }
    }

    #[test]
    fn shared_memory_is_declared_before_use() {
        let bounds = ".visible .global .align 4 .b8 BOUNDS_k[8] = {32, 0, 0, 0, 1};\n";
        let declaration = ".extern .shared .align 128 .b8 DYNAMIC_SHARED[];\n";
        let body = ".visible .entry k()\n{\n\tmov.u32 %r1, DYNAMIC_SHARED;\n\tret;\n}\n";
        assert!(postprocess(&format!("{HEAD}{declaration}{bounds}{body}")).unwrap().contains(declaration));
        assert!(matches!(
            postprocess(&format!("{HEAD}{bounds}{body}{declaration}")),
            Err(BuildError::Malformed { .. })
        ));
    }
}
