//! What must hold for the kernels' PTX on every architecture, and proof that each check can fail.
//!
//! LLVM may copy inline assembly into both arms of a divergent branch, which a run on the CPU cannot show. Such a copy
//! changes a kernel's number of collectives; `ptx_counts.txt` holds the numbers that were looked at, and
//! `cargo xtask check-ptx --bless` accepts new ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use cuda_builder::{Arch, Ptxas, Resources};
use cuda_std::kernel::Kernel;

include!(concat!(env!("OUT_DIR"), "/ptx_modules.rs"));

/// Registers that a kernel whose name starts so may use, on any architecture. The kernels that stream weights need
/// 16 warps on a multiprocessor, hence 128, or, with 16 pairs of an expert, 12; the others are short and must not hold back occupancy.
const REGISTER_CEILINGS: [(&str, u32); 33] = [
    ("combine", 64),
    ("copy", 64),
    ("fc1_decode_bf16_wide", 168),
    ("fc1_decode_f16_wide", 168),
    // Eight warps: it has no room for twelve.
    ("fc1_decode_mxfp4_bf16_wide", 255),
    ("fc1_decode_mxfp4_f16_wide", 168),
    ("fc1", 128),
    ("fc2_decode_bf16_wide", 168),
    ("fc2_decode_f16_wide", 168),
    ("fc2_decode_mxfp4_bf16_wide", 168),
    ("fc2_decode_mxfp4_f16_wide", 168),
    ("fc2", 128),
    // Two sets of sums for each output: block scales enter between them.
    ("moe_fp8", 255),
    ("moe_w8a8", 255),
    ("moe_bf16", 255),
    ("multiply", 128),
    ("fill", 64),
    ("read", 64),
    ("route_prep", 64),
    ("gate_logits", 128),
    ("moe_gate_topk", 64),
    ("router_gemm", 128),
    ("scale_rows", 64),
    ("topk_512", 80),
    ("topk", 64),
    ("blend", 64),
    ("per_token_group_quant", 64),
    ("sigmoid_table", 64),
    ("silu_mul", 64),
    ("sort", 64),
    ("tile_worklist", 64),
    ("unpermute", 80),
    ("weighted_sum_blend", 80),
];

/// Threads and least resident blocks of a kernel, and whether it may start early.
type Bounds = (u32, u32, bool);
/// Kernel -> kind of collective -> number.
type Counts = BTreeMap<String, BTreeMap<String, usize>>;

/// Name and bounds of each kernel. Evaluated at compile time, so that what else a [`Kernel`] refers to, the emulation of
/// every kernel, is not compiled into this test.
const fn bounds_of<F, const N: usize>(kernels: &[Kernel<F>]) -> [(&'static str, Bounds); N] {
    let mut all = [("", (0, 0, false)); N];
    let mut i = 0;
    while i < N {
        all[i] = (kernels[i].name, (kernels[i].threads, kernels[i].min_blocks, kernels[i].early));
        i += 1;
    }
    all
}

/// Every kernel as the host knows it: the launcher reads these bounds, the driver those in the PTX.
fn declared() -> BTreeMap<&'static str, Bounds> {
    macro_rules! bounds {
        ($($file:ident::$family:ident),+ $(,)?) => {
            [$({
                use kernels_gpu::$file::$family::KERNELS;
                const TABLE: &[(&str, Bounds)] = &bounds_of::<_, { KERNELS.len() }>(KERNELS);
                TABLE
            }),+]
        };
    }
    let families = bounds!(
        bandwidth::copy,
        bandwidth::fill,
        bandwidth::multiply,
        bandwidth::read,
        combine::combine,
        direct::fc1_direct,
        direct::fc2_direct,
        fc1::fc1,
        fc2::fc2,
        gemm::bf16,
        gemm::fp8,
        gemm::gateup_silu,
        gemm::w8a8,
        gemm::w8a8_dense,
        gate_topk::gate_logits,
        gate_topk::gate_topk,
        route_prep::route_prep,
        router::router_gemm,
        router::router_gemm_strict,
        topk::scale_rows,
        topk::topk,
        quant::per_token_group_quant_fp8,
        silu_mul::sigmoid_table,
        silu_mul::silu_mul,
        silu_mul::silu_mul_quant_fp8,
        sort::sort_by_expert,
        sort::sort_count,
        unpermute::blend,
        unpermute::unpermute_blend,
        unpermute::unpermute_reduce,
        worklist::tile_worklist,
    );
    families.into_iter().flatten().copied().collect()
}

/// The guard that keeps LLVM from copying its neighbours. It moves no data, and compilers emit different numbers of it, so
/// it must be there beside an mma, but is not counted.
const GUARD: &str = "bar.warp.sync";

fn counts_of(module: &cuda_builder::Module) -> Counts {
    module
        .kernels()
        .map(|kernel| {
            let counted = kernel.collectives.iter().filter(|(kind, _)| **kind != GUARD);
            (kernel.name.clone(), counted.map(|(kind, count)| (kind.to_string(), *count)).collect())
        })
        .collect()
}

/// What is wrong with the text of a module, one line each.
fn structure(ptx: &str, arch: &str, declared: &BTreeMap<&str, Bounds>, expected: Option<&Counts>) -> Vec<String> {
    let module = match cuda_builder::Module::parse(ptx) {
        Ok(module) => module,
        Err(error) => return vec![error.to_string()],
    };
    let mut wrong = Vec::new();
    if module.target != arch {
        wrong.push(format!("built for {}, not {arch}", module.target));
    }
    for name in declared.keys().filter(|name| module.kernel(name).is_none()) {
        wrong.push(format!("{name}: declared, but not in the module"));
    }
    for function in &module.functions {
        let name = &function.name;
        if !function.is_kernel {
            wrong.push(format!("{name}: a function that was not inlined"));
            continue;
        }
        match (function.threads, function.min_blocks, declared.get(name.as_str())) {
            (Some(threads), Some(blocks), Some(bounds)) if (threads, blocks) == (bounds.0, bounds.1) => {}
            (threads, blocks, bounds) => {
                wrong.push(format!("{name}: launch bounds {threads:?}, {blocks:?}; declared {bounds:?}"))
            }
        }
        if function.collectives.contains_key("mma") && !function.collectives.contains_key(GUARD) {
            wrong.push(format!("{name}: mma without a convergence guard"));
        }
        // Where there is no such instruction kernels start in turn; elsewhere every thread of an early kernel must wait.
        let early = declared.get(name.as_str()).is_some_and(|bounds| bounds.2);
        let has_instructions = !matches!(arch, "sm_80" | "sm_89");
        if early && has_instructions && function.dependency_waits == 0 {
            wrong.push(format!("{name}: declared early, but without griddepcontrol.wait"));
        }
        if (!early || !has_instructions) && function.dependency_waits != 0 {
            wrong.push(format!("{name}: griddepcontrol.wait in a kernel that does not start early on {arch}"));
        }
        if !has_instructions && function.dependent_launches != 0 {
            wrong.push(format!("{name}: griddepcontrol.launch_dependents, which {arch} lacks"));
        }
        for (what, count) in
            [("local memory", function.local), ("generic accesses", function.generic), ("calls", function.calls)]
        {
            if count != 0 {
                wrong.push(format!("{name}: {what}: {count}"));
            }
        }
    }
    if let Some(expected) = expected {
        let found = counts_of(&module);
        for name in found.keys().chain(expected.keys().filter(|name| !found.contains_key(*name))) {
            let (found, expected) = (found.get(name), expected.get(name));
            if found != expected {
                wrong.push(format!("{name}: collectives {found:?}, expected {expected:?}"));
            }
        }
    }
    wrong
}

/// What is wrong with what ptxas says.
fn resources(found: &BTreeMap<String, Resources>, declared: &BTreeMap<&str, Bounds>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, (threads, blocks, _)) in declared {
        let Some(used) = found.get(*name) else {
            wrong.push(format!("{name}: not assembled"));
            continue;
        };
        if (used.stack, used.spill_stores, used.spill_loads) != (0, 0, 0) {
            wrong.push(format!("{name}: stack or spills: {used:?}"));
        }
        match REGISTER_CEILINGS.iter().find(|(prefix, _)| name.starts_with(prefix)) {
            Some((_, ceiling)) if used.registers <= *ceiling => {}
            Some((_, ceiling)) => wrong.push(format!("{name}: {} registers, ceiling {ceiling}", used.registers)),
            None => wrong.push(format!("{name}: no register ceiling is stated")),
        }
        // Registers are given out to whole warps in units of 8 a thread; a multiprocessor has 65,536.
        let resident = used.registers.next_multiple_of(8) * threads.next_multiple_of(32) * blocks;
        if used.registers > 255 || resident > 65_536 {
            wrong.push(format!("{name}: {} registers do not fit {blocks} blocks of {threads}", used.registers));
        }
    }
    wrong
}

fn counts_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ptx_counts.txt")
}

/// Reads `arch kernel kind=number …` lines.
fn read_counts(text: &str) -> BTreeMap<String, Counts> {
    let mut all = BTreeMap::<String, Counts>::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let mut words = line.split_whitespace();
        let (arch, kernel) = words.next().zip(words.next()).unwrap_or_else(|| panic!("bad line: {line}"));
        let counts = words.map(|word| {
            let (kind, number) = word.split_once('=').unwrap_or_else(|| panic!("bad line: {line}"));
            (kind.to_string(), number.parse().unwrap_or_else(|_| panic!("bad line: {line}")))
        });
        all.entry(arch.into()).or_default().insert(kernel.into(), counts.collect());
    }
    all
}

fn write_counts(all: &BTreeMap<String, Counts>) -> String {
    let mut text = String::from(
        "# Collectives of each kernel: architecture, kernel, kind=number. Written by `cargo xtask check-ptx --bless`.\n",
    );
    for (arch, kernels) in all {
        for (kernel, counts) in kernels {
            write!(text, "{arch} {kernel}").expect("a string can be written to");
            for (kind, number) in counts {
                write!(text, " {kind}={number}").expect("a string can be written to");
            }
            text.push('\n');
        }
    }
    text
}

fn ptxas() -> Option<Ptxas> {
    let found = Ptxas::find();
    if found.is_none() {
        assert!(std::env::var_os("MEGAMOE_REQUIRE_PTXAS").is_none(), "ptxas is required: run `cargo xtask setup`");
        println!("skipped: no ptxas here, `cargo xtask setup` fetches it");
    }
    found
}

fn arch_of(module: &Module) -> Arch {
    Arch::ALL.into_iter().find(|arch| arch.name() == module.arch).expect("an architecture of the builder")
}

#[test]
fn every_architecture_is_embedded() {
    if std::env::var_os("MEGAMOE_ARCHS").is_some() {
        println!("skipped: MEGAMOE_ARCHS limits what is built");
        return;
    }
    let names: Vec<&str> = MODULES.iter().map(|module| module.arch).collect();
    assert_eq!(names, Arch::ALL.map(Arch::name));
    assert!(MODULES.iter().zip(Arch::ALL).all(|(module, arch)| module.compute == arch.compute()));
}

#[test]
fn text_has_the_shape_that_was_looked_at() {
    let declared = declared();
    if std::env::var_os("BLESS").is_some() {
        let parse = |module: &Module| cuda_builder::Module::parse(module.ptx).expect("parses");
        // Architectures that are not built now keep their lines.
        let mut all = std::fs::read_to_string(counts_file()).map(|text| read_counts(&text)).unwrap_or_default();
        all.extend(MODULES.iter().map(|module| (module.arch.to_string(), counts_of(&parse(module)))));
        std::fs::write(counts_file(), write_counts(&all)).expect("the table can be written");
    }
    let expected = read_counts(&std::fs::read_to_string(counts_file()).expect("the table of counts"));
    let none = Counts::new();
    let wrong: Vec<String> = MODULES
        .iter()
        .flat_map(|module| {
            let wrong = structure(module.ptx, module.arch, &declared, Some(expected.get(module.arch).unwrap_or(&none)));
            wrong.into_iter().map(|line| format!("{} {line}", module.arch))
        })
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn assembles_without_stack_or_spills() {
    let Some(ptxas) = ptxas() else { return };
    let declared = declared();
    let mut wrong = Vec::new();
    for module in MODULES {
        match ptxas.assemble(module.ptx, arch_of(module)) {
            Ok(found) => {
                let highest = found.iter().max_by_key(|(_, used)| used.registers).expect("a kernel");
                println!(
                    "{}: {} kernels, most registers {} ({})",
                    module.arch,
                    found.len(),
                    highest.1.registers,
                    highest.0
                );
                wrong.extend(resources(&found, &declared).into_iter().map(|line| format!("{} {line}", module.arch)));
            }
            Err(error) => wrong.push(error.to_string()),
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The first line of `ptx` that starts with `opcode`, after `after`.
fn line_starting<'a>(ptx: &'a str, after: &str, opcode: &str) -> &'a str {
    let start = ptx.find(after).expect("the place to look from");
    ptx[start..].lines().find(|line| line.trim_start().starts_with(opcode)).expect("such a line")
}

/// Each fault is planted into the real text, and must be the only thing that is found wrong.
#[test]
fn planted_faults_in_the_text_are_found() {
    let module = MODULES.last().expect("a module");
    let declared = declared();
    let clean = cuda_builder::Module::parse(module.ptx).unwrap();
    let expected = counts_of(&clean);
    let check = |ptx: &str| structure(ptx, module.arch, &declared, Some(&expected));
    assert_eq!(check(module.ptx), Vec::<String>::new());

    let kernel = clean.kernels().find(|kernel| kernel.collectives.contains_key("mma")).expect("a kernel with mma");
    let header = format!(".entry {}(", kernel.name);
    let planted = |old: &str, new: &str| {
        let start = module.ptx.find(&header).unwrap();
        let (head, tail) = module.ptx.split_at(start);
        assert!(tail.contains(old), "{old}");
        format!("{head}{}", tail.replacen(old, new, 1))
    };
    let mma = line_starting(module.ptx, &header, "mma.");
    let load = line_starting(module.ptx, &header, "ld.global");
    let bounds = line_starting(module.ptx, &header, ".minnctapersm");
    let threads = line_starting(module.ptx, &header, ".reqntid");
    for (what, ptx) in [
        ("collectives", planted(mma, &format!("{mma}\n{mma}"))),
        ("collectives", planted(mma, "")),
        ("launch bounds", planted(bounds, "")),
        ("launch bounds", planted(threads, ".reqntid 96, 1, 1")),
        ("local memory", planted(mma, &format!(".local .align 16 .b8 depot[64];\n{mma}"))),
        ("generic accesses", planted(load, &load.replacen("ld.global", "ld", 1))),
    ] {
        let wrong = check(&ptx);
        assert!(wrong.len() == 1 && wrong[0].contains(what), "{what}: {wrong:?}");
        assert!(wrong[0].starts_with(&kernel.name), "{wrong:?}");
    }
    let unguarded = module.ptx.replace("bar.warp.sync", "// bar.warp.sync");
    assert!(check(&unguarded).contains(&format!("{}: mma without a convergence guard", kernel.name)));
    let function = ".func helper()\n{\nret;\n}\n";
    assert_eq!(check(&format!("{}{function}", module.ptx)), ["helper: a function that was not inlined"]);
    let renamed = module.ptx.replace(&header, ".entry other(");
    assert!(check(&renamed).iter().any(|line| line.contains("not in the module")));
    assert_eq!(structure(module.ptx, "sm_75", &declared, None).len(), 1);
}

#[test]
fn early_kernels_wait_where_the_architecture_can() {
    let text = |target: &str, body: &str| {
        format!(
            ".version 8.4\n.target {target}\n.address_size 64\n.visible .entry k()\n.reqntid 64, 1, 1\n.minnctapersm 1\n\
             {{\n{body}\tret;\n}}\n"
        )
    };
    let (wait, launch) = ("\tgriddepcontrol.wait;\n", "\tgriddepcontrol.launch_dependents;\n");
    let both = format!("{wait}{launch}");
    let check = |target: &str, early: bool, body: &str| {
        structure(&text(target, body), target, &BTreeMap::from([("k", (64, 1, early))]), None)
    };
    for target in ["sm_90a", "sm_100f", "sm_120f"] {
        assert_eq!(check(target, true, &both), Vec::<String>::new());
        assert_eq!(check(target, false, launch), Vec::<String>::new());
        assert_eq!(check(target, true, launch).len(), 1);
        assert_eq!(check(target, false, wait).len(), 1);
    }
    for target in ["sm_80", "sm_89"] {
        assert_eq!(check(target, true, ""), Vec::<String>::new());
        assert_eq!(check(target, true, &both).len(), 2);
        assert_eq!(check(target, false, launch).len(), 1);
    }
}

#[test]
fn planted_faults_in_the_resources_are_found() {
    let declared = BTreeMap::from([("fc1_x", (256, 2, false))]);
    let used = Resources { registers: 128, ..Resources::default() };
    let check = |used: Resources| resources(&BTreeMap::from([("fc1_x".to_string(), used)]), &declared);
    assert_eq!(check(used), Vec::<String>::new());
    assert_eq!(check(Resources { stack: 8, ..used }).len(), 1);
    assert_eq!(check(Resources { spill_loads: 4, ..used }).len(), 1);
    // Over the ceiling, and too many for two blocks.
    assert_eq!(check(Resources { registers: 129, ..used }).len(), 2);
    assert_eq!(resources(&BTreeMap::new(), &declared), ["fc1_x: not assembled"]);
    let unknown = BTreeMap::from([("new_kernel", (32, 1, false))]);
    assert_eq!(resources(&BTreeMap::from([("new_kernel".to_string(), used)]), &unknown).len(), 1);
}

/// A kernel that indexes a local array at run time has a stack frame, and ptxas's report of it must be read as one.
#[test]
fn a_stack_frame_is_seen() {
    let Some(ptxas) = ptxas() else { return };
    let ptx = "\
.version 8.4
.target sm_80
.address_size 64
.visible .entry fc1_x(.param .u64 fc1_x_param_0)
.reqntid 32, 1, 1
.minnctapersm 1
{
    .local .align 16 .b8 depot[256];
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [fc1_x_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u64 %rd3, depot;
    ld.global.b32 %r1, [%rd2];
    ld.global.b32 %r2, [%rd2+4];
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd3, %rd4;
    st.local.b32 [%rd5], %r2;
    mul.wide.u32 %rd6, %r2, 4;
    add.s64 %rd7, %rd3, %rd6;
    ld.local.b32 %r3, [%rd7];
    st.global.b32 [%rd2], %r3;
    ret;
}
";
    let declared = BTreeMap::from([("fc1_x", (32, 1, false))]);
    let wrong = resources(&ptxas.assemble(ptx, Arch::Sm80).expect("assembles"), &declared);
    assert!(wrong.len() == 1 && wrong[0].contains("stack: 256"), "{wrong:?}");
    assert_eq!(structure(ptx, "sm_80", &declared, None), ["fc1_x: local memory: 3"]);
    // And a text that is no PTX is refused.
    assert!(ptxas.assemble(&ptx.replace("ret;", "retreat;"), Arch::Sm80).is_err());
}
