//! `megamoe info`: devices, embedded modules, kernels and the choices of plans.

use super::Verdict;
use super::backend::{BackEnd, open_emulator, open_gpu};
use super::inspect::{Launch, launches};
use super::output;
use comfy_table::Cell;
use console::style;
use cuda_std::arch::ArchId;
use megamoe::bench::SHAPES;
use megamoe::device::{DeviceHandle, ErasedKernel, Gpu, MODULES, Properties, choose_module};
use megamoe::plan::Plan;
use megamoe::{LayerOptions, LayerShape, Result};
use serde::Serialize;
use std::sync::Arc;

/// Options of `info`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Numbers of tokens for which plans are shown.
const TOKENS: [usize; 3] = [1, 16, 128];

#[derive(Serialize)]
struct Report {
    version: &'static str,
    devices: Vec<DeviceInfo>,
    /// Why there is no GPU.
    no_gpu: Option<String>,
    modules: Vec<ModuleInfo>,
    kernels: Vec<KernelRow>,
    plans: Vec<PlanInfo>,
}

#[derive(Serialize)]
struct DeviceInfo {
    backend: BackEnd,
    name: String,
    compute: (u32, u32),
    multiprocessors: u32,
    shared_per_block: u32,
    shared_per_multiprocessor: u32,
    /// The embedded module that it runs.
    module: Option<&'static str>,
}

#[derive(Serialize)]
struct ModuleInfo {
    arch: &'static str,
    compute: (u32, u32),
    bytes: usize,
    entries: usize,
}

#[derive(Serialize)]
struct KernelRow {
    kernel: &'static str,
    threads: u32,
    min_blocks: u32,
    /// As the driver loaded it; null without a GPU.
    registers: Option<i32>,
    local_bytes: Option<i32>,
    blocks_per_multiprocessor: Option<i32>,
}

#[derive(Serialize)]
struct PlanInfo {
    shape: &'static str,
    tokens: usize,
    variant: String,
    workspace_bytes: usize,
    launches: Vec<Launch>,
}

/// Every kernel of a layer.
fn kernels() -> Vec<ErasedKernel> {
    fn all<F>(kernels: &[cuda_std::kernel::Kernel<F>]) -> impl Iterator<Item = ErasedKernel> + '_ {
        kernels.iter().map(|&kernel| kernel.into())
    }
    all(kernels_gpu::route_prep::route_prep::KERNELS)
        .chain(all(kernels_gpu::fc1::fc1::KERNELS))
        .chain(all(kernels_gpu::fc2::fc2::KERNELS))
        .chain(all(kernels_gpu::combine::combine::KERNELS))
        .collect()
}

pub fn info(args: &Args) -> Result<Verdict> {
    let emulator = open_emulator(0, ArchId::Sm90);
    let gpu = open_gpu();
    let mut devices = vec![describe(BackEnd::Emulator, emulator.properties(), None)];
    if let Ok(gpu) = &gpu {
        let properties = (gpu.clone() as DeviceHandle).properties().clone();
        let module = choose_module(properties.compute).map(|module| module.arch);
        devices.push(describe(BackEnd::Gpu, &properties, module));
    }
    let kernels = kernels().into_iter().map(|kernel| row(kernel, gpu.as_ref().ok())).collect();
    let device = gpu.as_ref().map_or(emulator, |gpu| gpu.clone() as DeviceHandle);
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        devices,
        no_gpu: gpu.as_ref().err().map(ToString::to_string),
        modules: MODULES
            .iter()
            .map(|module| ModuleInfo {
                arch: module.arch,
                compute: module.compute,
                bytes: module.ptx.len(),
                entries: module.ptx.matches(".visible .entry").count(),
            })
            .collect(),
        kernels,
        plans: plans(&device)?,
    };
    if args.json {
        output::say_json(&report);
    } else {
        print(&report, &device);
    }
    Ok(Verdict::Agreed)
}

fn describe(backend: BackEnd, properties: &Properties, module: Option<&'static str>) -> DeviceInfo {
    let Properties { name, compute, multiprocessors, shared_per_block, shared_per_multiprocessor } = properties.clone();
    DeviceInfo { backend, name, compute, multiprocessors, shared_per_block, shared_per_multiprocessor, module }
}

/// Registers and occupancy are the driver's word, so they need a GPU. Shared memory, which a plan decides, is left out of the latter.
fn row(kernel: ErasedKernel, gpu: Option<&Arc<Gpu>>) -> KernelRow {
    let loaded = gpu.and_then(|gpu| gpu.kernel_info(kernel, 0).ok());
    KernelRow {
        kernel: kernel.name,
        threads: kernel.threads,
        min_blocks: kernel.min_blocks,
        registers: loaded.map(|info| info.registers),
        local_bytes: loaded.map(|info| info.local_bytes),
        blocks_per_multiprocessor: loaded.map(|info| info.blocks_per_multiprocessor),
    }
}

fn plans(device: &DeviceHandle) -> Result<Vec<PlanInfo>> {
    let mut plans = Vec::new();
    for shape in &SHAPES {
        for tokens in TOKENS {
            let layer = LayerShape {
                hidden: shape.hidden,
                intermediate: shape.intermediate,
                output: shape.hidden,
                experts: shape.experts,
                top_k: shape.top_k,
            };
            let plan = Plan::new(device, layer, LayerOptions::default(), tokens)?;
            let variant = megamoe::plan::choose_variant(&layer, tokens, device.properties());
            plans.push(PlanInfo {
                shape: shape.name,
                tokens,
                variant: variant.name(LayerOptions::default().order),
                workspace_bytes: plan.workspace_bytes(),
                launches: launches(&plan, tokens),
            });
        }
    }
    Ok(plans)
}

fn print(report: &Report, device: &DeviceHandle) {
    output::say(format!("{} {}", style("megamoe").bold(), report.version));
    for info in &report.devices {
        let (major, minor) = info.compute;
        output::say(format!(
            "{}: {}, compute capability {major}.{minor}, {} multiprocessors, {} shared memory a block{}",
            style(info.backend).bold(),
            info.name,
            info.multiprocessors,
            output::bytes(info.shared_per_block.into()),
            info.module.map_or(String::new(), |arch| format!(", module {arch}")),
        ));
    }
    if let Some(why) = &report.no_gpu {
        output::say(format!("{}: {why}", style(BackEnd::Gpu).bold()));
    }
    output::say(style("\nEmbedded modules").bold());
    let mut table = output::table(["architecture", "from compute capability", "PTX", "kernels"]);
    for module in &report.modules {
        let (major, minor) = module.compute;
        table.add_row([
            Cell::new(module.arch),
            Cell::new(format!("{major}.{minor}")),
            Cell::new(output::bytes(module.bytes as u64)),
            Cell::new(module.entries),
        ]);
    }
    output::say_table(&table);
    output::say(style("\nKernels of a layer").bold());
    let mut table =
        output::table(["kernel", "threads", "least blocks an SM", "registers", "local memory", "blocks an SM"]);
    for kernel in &report.kernels {
        let number = |value: Option<i32>| value.map_or("–".into(), |value| value.to_string());
        table.add_row([
            Cell::new(kernel.kernel),
            Cell::new(kernel.threads),
            Cell::new(kernel.min_blocks),
            Cell::new(number(kernel.registers)),
            Cell::new(number(kernel.local_bytes)),
            Cell::new(number(kernel.blocks_per_multiprocessor)),
        ]);
    }
    output::say_table(&table);
    output::say(style(format!("\nPlans on {}", device.properties().name)).bold());
    let mut table = output::table(["shape", "tokens", "variant", "workspace", "blocks of each kernel"]);
    for plan in &report.plans {
        let blocks = plan.launches.iter().map(|launch| launch.blocks.to_string()).collect::<Vec<_>>().join(", ");
        table.add_row([
            Cell::new(plan.shape),
            Cell::new(plan.tokens),
            Cell::new(&plan.variant),
            Cell::new(output::bytes(plan.workspace_bytes as u64)),
            Cell::new(blocks),
        ]);
    }
    output::say_table(&table);
}
