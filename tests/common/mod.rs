//! What the differential tests share: the devices that are present, and the comparison of results.
// Each test executable uses a part of it.
#![allow(dead_code)]

use cuda_std::arch::ArchId;
use megamoe::device::{DeviceHandle, Emulator, EmulatorOptions, Gpu};
use megamoe::diff::Case;
use megamoe::reference::{LayerResult, Mode};
use megamoe::{Error, LayerShape};
use std::sync::{Arc, LazyLock};

/// Every architecture whose paths a kernel can take.
pub const ARCHS: [ArchId; 3] = [ArchId::Sm80, ArchId::Sm90, ArchId::Sm100];

/// A fresh emulated device. `seed` decides the order of lanes and blocks.
pub fn emulator(arch: ArchId, multiprocessors: u32, seed: u64) -> DeviceHandle {
    Emulator::with_options(EmulatorOptions { arch, multiprocessors, seed })
}

/// The `number`-th of a sequence of emulated devices: all architectures, 1 to 4 multiprocessors, ever new seeds.
pub fn any_emulator(number: usize) -> DeviceHandle {
    emulator(ARCHS[number % 3], 1 + (number / 3 % 4) as u32, number as u64)
}

/// The GPU itself, for what only a GPU has. One for all tests of an executable.
pub fn cuda() -> Option<Arc<Gpu>> {
    static GPU: LazyLock<Option<Arc<Gpu>>> = LazyLock::new(|| match Gpu::new(0) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var("MEGAMOE_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            panic!("a GPU is required: {error}")
        }
        Err(Error::NoGpu(_)) => None,
        Err(error) => panic!("there is a GPU, but {error}"),
    });
    if GPU.is_none() {
        println!("skipped: no GPU");
    }
    GPU.clone()
}

/// The GPU as a device.
pub fn gpu() -> Option<DeviceHandle> {
    cuda().map(|gpu| gpu as DeviceHandle)
}

/// An emulator of each architecture, and the GPU where there is one.
pub fn devices() -> Vec<(String, DeviceHandle)> {
    let emulators = (0..3).map(any_emulator).chain(gpu());
    emulators.map(|device| (device.properties().name.clone(), device)).collect()
}

/// `small` for the emulator, `large` for the GPU.
pub fn scale(device: &DeviceHandle, small: usize, large: usize) -> usize {
    if is_emulated(device) { small } else { large }
}

/// Whether `device` is an emulator.
pub fn is_emulated(device: &DeviceHandle) -> bool {
    device.properties().name.starts_with("emulator")
}

/// Where `got` is not `wanted`, if anywhere: bits of the output, then the status.
pub fn difference(shape: &LayerShape, wanted: &LayerResult, got: &LayerResult) -> Option<String> {
    if wanted.out.len() != got.out.len() {
        return Some(format!("{} outputs, not {}", got.out.len(), wanted.out.len()));
    }
    let wrong: Vec<usize> = (0..wanted.out.len()).filter(|&i| wanted.out[i] != got.out[i]).collect();
    if let Some(&i) = wrong.first() {
        let (token, column) = (i / shape.output, i % shape.output);
        let (g, w) = (got.out[i], wanted.out[i]);
        return Some(format!("{} outputs, first token {token}, column {column}: {g:#06x}, not {w:#06x}", wrong.len()));
    }
    (wanted.status != got.status).then(|| format!("{:?}, not {:?}", got.status, wanted.status))
}

/// `got` is `wanted`, bit for bit.
#[track_caller]
pub fn assert_same(what: &str, shape: &LayerShape, wanted: &LayerResult, got: &LayerResult) {
    if let Some(difference) = difference(shape, wanted, got) {
        panic!("{what}, {shape:?}: {difference}");
    }
}

/// `device` gives the reference's bits for `case`.
#[track_caller]
pub fn check(case: &Case, device: &DeviceHandle) {
    let wanted = case.run(Mode::Exact).unwrap();
    let got = case.run_on(device).unwrap();
    assert_same(&device.properties().name, &case.shape, &wanted, &got);
}

/// What each back end gives for `case`: the reference, every emulator and the GPU, by name.
pub fn everywhere(case: &Case) -> Vec<(String, LayerResult)> {
    let reference = ("reference".to_owned(), case.run(Mode::Exact).unwrap());
    let others = devices().into_iter().map(|(name, device)| {
        let result = case.run_on(&device).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, result)
    });
    std::iter::once(reference).chain(others).collect()
}

/// The argument that an error names.
#[track_caller]
pub fn argument_of(error: &Error) -> &'static str {
    match error {
        Error::Argument { name, .. } | Error::BufferLength { name, .. } | Error::Experts { name, .. } => name,
        other => panic!("an error that names no argument: {other}"),
    }
}
