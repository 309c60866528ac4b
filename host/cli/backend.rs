//! Back ends by name.

use clap::ValueEnum;
use megamoe::Result;
use megamoe::device::{DeviceHandle, Emulator, Gpu};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// A back end as an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// The exact CPU reference.
    Cpu,
    /// The kernels on the CPU, every access checked.
    Emulator,
    /// The kernels on a GPU.
    Gpu,
    /// All three; without a GPU that one is skipped.
    All,
}

impl Choice {
    pub fn back_ends(self) -> &'static [BackEnd] {
        match self {
            Choice::Cpu => &[BackEnd::Cpu],
            Choice::Emulator => &[BackEnd::Emulator],
            Choice::Gpu => &[BackEnd::Gpu],
            Choice::All => &[BackEnd::Cpu, BackEnd::Emulator, BackEnd::Gpu],
        }
    }
}

/// One back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BackEnd {
    Cpu,
    Emulator,
    Gpu,
}

impl fmt::Display for BackEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            BackEnd::Cpu => "CPU",
            BackEnd::Emulator => "emulator",
            BackEnd::Gpu => "GPU",
        })
    }
}

/// The first GPU.
pub fn open_gpu() -> Result<Arc<Gpu>> {
    Gpu::new(0)
}

/// An emulator whose lanes and blocks run in an order that `seed` decides.
pub fn open_emulator(seed: u64) -> DeviceHandle {
    Emulator::with_options(megamoe::device::EmulatorOptions { seed, ..Default::default() })
}

/// Whether a device must give the reference's bits. Others have tensor cores that sum in another way.
pub fn has_exact_bits(device: &DeviceHandle) -> bool {
    device.properties().compute == (9, 0)
}
