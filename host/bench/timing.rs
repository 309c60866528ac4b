//! Timing of single operations, as every table does it.

use crate::device::{Buffer, DeviceHandle, Element, Gpu, Grid, launch};
use crate::diff::Random;
use crate::error::Result;
use kernels_gpu::bandwidth;
use std::sync::Arc;

/// Bytes of other data that are read before an input comes back.
pub(super) const ROTATION: usize = 240_000_000;
/// Samples of which the median counts.
const SAMPLES: usize = 7;
/// Least length of a sample, milliseconds.
const SAMPLE_MS: f32 = 3.0;

/// Median microseconds of one of the `calls` calls that `work` enqueues, which are captured in one graph.
pub(super) fn time(gpu: &Arc<Gpu>, calls: usize, work: impl FnOnce() -> Result<()>) -> Result<f32> {
    let graph = gpu.capture(work)?;
    graph.launch()?;
    let once = gpu.elapsed_ms(|| graph.launch())?;
    let replays = (SAMPLE_MS / once.max(1e-3)).ceil().clamp(1.0, 100.0) as usize;
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let ms = gpu.elapsed_ms(|| (0..replays).try_for_each(|_| graph.launch()))?;
        samples.push(ms * 1e3 / (replays * calls) as f32);
    }
    samples.sort_by(f32::total_cmp);
    Ok(samples[SAMPLES / 2])
}

/// Sets of inputs of `bytes` bytes each that a graph goes through, from `least` to `most`: enough for [`ROTATION`] where that is
/// possible. Each is one call.
pub(super) fn sets(bytes: usize, least: usize, most: usize) -> usize {
    (ROTATION.div_ceil(bytes.max(1)) + 1).clamp(least, most)
}

/// A buffer of noise, made on the device; see [`bandwidth::fill`] for what its bytes are.
pub(super) fn noise<T: Element>(device: &DeviceHandle, len: usize, seed: u32, bytes_are: u32) -> Result<Buffer<T>> {
    let bytes = len * size_of::<T>();
    let buffer = Buffer::<T>::new(device, len.next_multiple_of(16))?;
    let words = bytes.next_multiple_of(16) / 4;
    let kernel = bandwidth::fill::fill_noise;
    device.prepare(kernel.into(), 0)?;
    launch(
        &**device,
        kernel,
        Grid { blocks: 1024, shared_bytes: 0 },
        bandwidth::fill::Args { to: buffer.part(0, words), words: words as u64, seed, bytes_are },
    )?;
    Ok(buffer)
}

/// `len` numbers that look normally distributed, of standard deviation `deviation`: a million of them, over and over.
pub(super) fn normal(len: usize, deviation: f32, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    // The sum of four has a variance of 4/3.
    let factor = deviation * 0.75f32.sqrt();
    let period: Vec<f32> =
        (0..len.min(1 << 20)).map(|_| factor * (0..4).map(|_| random.in_range(-1.0, 1.0)).sum::<f32>()).collect();
    period.into_iter().cycle().take(len).collect()
}

/// As [`normal`], as bf16 bits.
pub(super) fn normal_bf16(len: usize, deviation: f32, seed: u64) -> Vec<u16> {
    let period = normal(len.min(1 << 20), deviation, seed);
    let period: Vec<u16> = period.into_iter().map(|x| half::bf16::from_f32(x).to_bits()).collect();
    period.into_iter().cycle().take(len).collect()
}
