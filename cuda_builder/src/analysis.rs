//! Reads PTX text far enough to judge it: which kernels there are, and how many of each warp- or block-wide
//! instruction every one of them holds.
//!
//! The counts matter because inline assembly is not convergent for LLVM: an optimisation may copy a collective into both
//! arms of a divergent branch. That shows as a changed count.

use std::collections::BTreeMap;

/// A PTX module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// Argument of `.version`.
    pub version: String,
    /// Argument of `.target`.
    pub target: String,
    /// Kernels and device functions, in the order of the text.
    pub functions: Vec<Function>,
}

/// A kernel or device function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// Its symbol.
    pub name: String,
    /// Whether it is a kernel (`.entry`).
    pub is_kernel: bool,
    /// Number of parameters.
    pub parameters: usize,
    /// `.reqntid`, x only (y and z are 1).
    pub threads: Option<u32>,
    /// `.minnctapersm`.
    pub min_blocks: Option<u32>,
    /// Collectives by kind, as [`collective`] names them. Kinds that do not occur are absent.
    pub collectives: BTreeMap<&'static str, usize>,
    /// Declarations of, loads from and stores to local memory.
    pub local: usize,
    /// Loads, stores and atomics whose state space is not known at compile time.
    pub generic: usize,
    /// Calls of device functions.
    pub calls: usize,
    /// `griddepcontrol.wait`.
    pub dependency_waits: usize,
    /// `griddepcontrol.launch_dependents`.
    pub dependent_launches: usize,
}

/// Text that is not PTX of the expected shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {message}")]
pub struct ParseError {
    /// 1-based line.
    pub line: usize,
    /// What is wrong with it.
    pub message: String,
}

impl Module {
    /// Parses PTX text.
    ///
    /// # Errors
    /// Missing header, unbalanced braces, a body without a header, or two functions of one name.
    pub fn parse(ptx: &str) -> Result<Self, ParseError> {
        Parser::default().run(ptx)
    }

    /// The kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.is_kernel)
    }

    /// The kernel called `name`.
    pub fn kernel(&self, name: &str) -> Option<&Function> {
        self.kernels().find(|kernel| kernel.name == name)
    }
}

/// The kind under which an opcode is counted, if all lanes of a warp, a warp group or a block take part in it, or if it
/// belongs to the asynchronous copies whose number must match their waits.
pub fn collective(opcode: &str) -> Option<&'static str> {
    let mut parts = opcode.split('.');
    let (first, second, third) = (parts.next()?, parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    Some(match (first, second, third) {
        ("mma", ..) => "mma",
        ("wgmma", "mma_async", _) => "wgmma.mma_async",
        ("wgmma", "fence", _) => "wgmma.fence",
        ("wgmma", "commit_group", _) => "wgmma.commit_group",
        ("wgmma", "wait_group", _) => "wgmma.wait_group",
        ("bar", "warp", _) => "bar.warp.sync",
        ("bar" | "barrier", "cluster", _) => "barrier.cluster",
        ("bar" | "barrier", "arrive", _) | ("bar" | "barrier", "cta", "arrive") => "bar.arrive",
        ("bar" | "barrier", "red", _) | ("bar" | "barrier", "cta", "red") => "bar.red",
        ("bar" | "barrier", ..) => "bar.sync",
        ("shfl", ..) => "shfl",
        ("vote", ..) => "vote",
        ("match", ..) => "match",
        ("redux", ..) => "redux",
        ("elect", ..) => "elect",
        ("activemask", ..) => "activemask",
        ("ldmatrix", ..) => "ldmatrix",
        ("stmatrix", ..) => "stmatrix",
        ("movmatrix", ..) => "movmatrix",
        ("setmaxnreg", ..) => "setmaxnreg",
        ("cp", "async", "commit_group") => "cp.async.commit_group",
        ("cp", "async", "wait_group" | "wait_all") => "cp.async.wait_group",
        ("cp", "async", "mbarrier") => "cp.async.mbarrier",
        ("cp", "async", "bulk") => "cp.async.bulk",
        ("cp", "async", _) => "cp.async",
        ("mbarrier", ..) => "mbarrier",
        ("griddepcontrol", ..) => "griddepcontrol",
        _ => return None,
    })
}

fn is_generic_access(opcode: &str) -> bool {
    const SPACES: [&str; 5] = ["global", "shared", "local", "param", "const"];
    let mut parts = opcode.split('.');
    matches!(parts.next(), Some("ld" | "ldu" | "st" | "atom" | "red"))
        && !parts.any(|part| SPACES.iter().any(|space| part == *space || part.starts_with(&format!("{space}::"))))
}

#[derive(Default)]
struct Parser {
    module: Module,
    /// The function whose header or body is being read.
    current: Option<Function>,
    /// Depth of braces: 0 outside of bodies; a parameter list is tracked by `in_parameters`.
    depth: usize,
    in_parameters: bool,
}

impl Parser {
    fn run(mut self, ptx: &str) -> Result<Module, ParseError> {
        let mut last = 0;
        for (index, line) in ptx.lines().enumerate() {
            last = index + 1;
            let line = line.split_once("//").map_or(line, |(code, _)| code).trim();
            let result = if self.depth == 0 { self.outside(line) } else { self.inside(line) };
            result.map_err(|message| ParseError { line: last, message })?;
        }
        let end = |message: &str| Err(ParseError { line: last, message: message.into() });
        if self.depth != 0 || self.current.is_some() {
            return end("the text ends inside a function");
        }
        if self.module.version.is_empty() || self.module.target.is_empty() {
            return end("`.version` or `.target` is missing");
        }
        Ok(self.module)
    }

    fn outside(&mut self, line: &str) -> Result<(), String> {
        if let Some(version) = line.strip_prefix(".version") {
            self.module.version = version.trim().to_string();
        } else if let Some(target) = line.strip_prefix(".target") {
            self.module.target = target.trim().to_string();
        }
        if self.current.is_none()
            && let Some(header) = function_header(line)
        {
            self.in_parameters = line.contains('(') && !line.trim_end().ends_with(')');
            self.current = Some(header);
        }
        let Some(function) = &mut self.current else {
            return if line.starts_with('{') { Err("a body without a header".into()) } else { Ok(()) };
        };
        function.parameters += line.matches(".param").count();
        for (directive, slot) in [(".reqntid", &mut function.threads), (".minnctapersm", &mut function.min_blocks)] {
            if let Some((_, value)) = line.split_once(directive) {
                let value = value.trim().split([',', ' ', '{']).next().unwrap_or("");
                *slot = Some(value.parse().map_err(|_| format!("cannot read `{line}`"))?);
            }
        }
        if line.ends_with(')') {
            self.in_parameters = false;
        }
        // A declaration without a body.
        if !self.in_parameters && line.ends_with(';') {
            self.current = None;
        } else if let Some(at) = line.find('{') {
            self.depth = 1;
            return self.inside(&line[at + 1..]);
        }
        Ok(())
    }

    fn inside(&mut self, line: &str) -> Result<(), String> {
        let mut statement_start = 0;
        for (at, byte) in line.bytes().enumerate() {
            if matches!(byte, b'{' | b'}' | b';') {
                self.statement(&line[statement_start..at], byte)?;
                statement_start = at + 1;
            }
        }
        let rest = line[statement_start..].trim();
        // Labels stand alone on a line; anything else unfinished is the first line of a multi-line call or a list.
        if !rest.is_empty() && !rest.ends_with(':') && self.depth > 0 {
            self.statement(rest, b' ')?;
        }
        Ok(())
    }

    fn statement(&mut self, text: &str, end: u8) -> Result<(), String> {
        if self.depth == 0 {
            return Err("text after the end of a body".into());
        }
        let function = self.current.as_mut().ok_or("a statement outside a function")?;
        count(function, text);
        // Braces around operands (vectors) end a statement only in this scan: the depth returns to what it was.
        match end {
            b'{' => self.depth += 1,
            b'}' => self.depth -= 1,
            _ => {}
        }
        if self.depth == 0 {
            let function = self.current.take().ok_or("a body without a header")?;
            if self.module.functions.iter().any(|other| other.name == function.name) {
                return Err(format!("function `{}` appears twice", function.name));
            }
            self.module.functions.push(function);
        }
        Ok(())
    }
}

/// Counts one piece of text that starts at a statement's start or inside its operands; operands never look like an
/// opcode, because they start with `%`, `[`, a comma or a number.
fn count(function: &mut Function, text: &str) {
    let mut text = text.trim();
    while let Some((label, rest)) = text.split_once(':')
        && !label.is_empty()
        && !rest.starts_with(':')
        && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$'))
    {
        text = rest.trim_start();
    }
    if text.starts_with('@') {
        text = text.split_once(char::is_whitespace).map_or("", |(_, rest)| rest.trim_start());
    }
    let opcode = text.split(char::is_whitespace).next().unwrap_or("");
    if opcode.starts_with('.') {
        function.local += usize::from(opcode == ".local");
        return;
    }
    if !opcode.starts_with(|first: char| first.is_ascii_lowercase()) {
        return;
    }
    if let Some(kind) = collective(opcode) {
        *function.collectives.entry(kind).or_default() += 1;
    }
    function.local += usize::from(opcode.split('.').any(|part| part == "local"));
    function.generic += usize::from(is_generic_access(opcode));
    function.dependency_waits += usize::from(opcode.trim_end_matches(';') == "griddepcontrol.wait");
    function.dependent_launches += usize::from(opcode.trim_end_matches(';') == "griddepcontrol.launch_dependents");
    function.calls += usize::from(opcode == "call" || opcode.starts_with("call."));
}

fn function_header(line: &str) -> Option<Function> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| matches!(*word, ".entry" | ".func"))?;
    let is_kernel = words[at] == ".entry";
    let rest = line.split_once(words[at])?.1.trim_start();
    // A function's result stands in parentheses before its name.
    let rest = if rest.starts_with('(') { rest.split_once(')')?.1.trim_start() } else { rest };
    let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')).collect();
    (!name.is_empty()).then(|| Function { name, is_kernel, ..Function::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "\
.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 DYNAMIC_SHARED[];
.func  (.param .b32 func_retval0) helper(
\t.param .b32 helper_param_0
)
{
\tshfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;
\tret;
}
.visible .entry fc1(
\t.param .u64 .ptr .align 1 fc1_param_0,
\t.param .u32 fc1_param_1
)
.reqntid 256, 1, 1
.minnctapersm 2
{
\t.local .align 16 .b8 __local_depot0[16];
\t.reg .b32 %r<9>;
\tld.param.b64 %rd1, [fc1_param_0];
$L__BB0_1:
\t// mma.sync in a comment does not count
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
\t{ .reg .pred p; @p bar.sync 1, 64; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {a}, {b}, {c}, {d}; }
\t@%p1 bra $L__BB0_1;
\tbarrier.cta.sync.aligned.all 0;
\tbar.warp.sync -1;
\tcp.async.cg.shared.global [%r1], [%rd1], 16;
\tcp.async.commit_group;
\tcp.async.wait_group 0;
\tld.b32 %r1, [%rd1];
\tst.volatile.shared::cta.b32 [%r1], %r2;
\tst.local.b32 [%r1], %r2;
\tatom.add.u32 %r1, [%rd1], 1;
\tatom.global.gpu.add.u32 %r1, [%rd1], 1;
\tvote.sync.ballot.b32 %r1, %p1, -1; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
\tcall.uni (retval0), helper, (param0);
\tret;
}
";

    #[test]
    fn counts_what_is_there() {
        let module = Module::parse(SAMPLE).unwrap();
        assert_eq!((module.version.as_str(), module.target.as_str()), ("8.4", "sm_90a"));
        assert_eq!(module.functions.len(), 2);
        let helper = &module.functions[0];
        assert_eq!((helper.name.as_str(), helper.is_kernel), ("helper", false));
        assert_eq!(helper.collectives, BTreeMap::from([("shfl", 1)]));
        let fc1 = module.kernel("fc1").unwrap();
        assert_eq!((fc1.parameters, fc1.threads, fc1.min_blocks), (2, Some(256), Some(2)));
        assert_eq!(
            fc1.collectives,
            BTreeMap::from([
                ("mma", 2),
                ("bar.sync", 2),
                ("bar.warp.sync", 1),
                ("cp.async", 1),
                ("cp.async.commit_group", 1),
                ("cp.async.wait_group", 1),
                ("vote", 1),
                ("ldmatrix", 1),
            ])
        );
        // The depot and the store; the load and one atomic.
        assert_eq!((fc1.local, fc1.generic, fc1.calls), (2, 2, 1));
    }

    #[test]
    fn bad_text_is_an_error() {
        let end = SAMPLE.trim_end().trim_end_matches('}');
        assert!(Module::parse(end).is_err(), "cut short");
        assert!(Module::parse(&SAMPLE.replace(".version 8.4\n", "")).is_err(), "no version");
        assert!(Module::parse(&format!("{SAMPLE}{{\nret;\n}}\n")).is_err(), "body without header");
        let body = &SAMPLE[SAMPLE.find(".visible").unwrap()..];
        assert!(Module::parse(&format!("{SAMPLE}{body}")).is_err(), "twice");
        assert!(Module::parse("").is_err());
    }

    #[test]
    fn opcodes_are_classified() {
        for (opcode, kind) in [
            ("bar.sync", Some("bar.sync")),
            ("barrier.cta.red.popc.aligned.all.u32", Some("bar.red")),
            ("barrier.cluster.arrive", Some("barrier.cluster")),
            ("match.any.sync.b32", Some("match")),
            ("cp.async.bulk.tensor.2d", Some("cp.async.bulk")),
            ("cp.async.ca.shared.global", Some("cp.async")),
            ("wgmma.mma_async.sync.aligned", Some("wgmma.mma_async")),
            ("mul.rn.f32", None),
        ] {
            assert_eq!(collective(opcode), kind, "{opcode}");
        }
        for (opcode, generic) in [
            ("ld.b32", true),
            ("ld.relaxed.gpu.b32", true),
            ("ld.global.nc.v4.b32", false),
            ("st.shared::cta.b32", false),
            ("red.add.u32", true),
            ("ldmatrix.sync", false),
        ] {
            assert_eq!(is_generic_access(opcode), generic, "{opcode}");
        }
    }
}
