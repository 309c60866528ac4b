//! A pipelined matrix product as kernels write it: asynchronous copies into a ring of stages, `ldmatrix`, `mma`, one
//! barrier a step. It must pass under every schedule with the right result, and each of its classic mistakes must not.
#![cfg(not(target_arch = "nvptx64"))]
#![allow(missing_docs)]

use cuda_std::arch::ArchId;
use cuda_std::copy;
use cuda_std::cvt::f32_to_bf16;
use cuda_std::emu::{Device, Fault, FaultKind, Launch};
use cuda_std::kernel::{Family, Kernel};
use cuda_std::kernels;
use cuda_std::memory::{In, Out};
use cuda_std::mma::{Bf16, m16n8k16};
use cuda_std::shared::Shared;
use cuda_std::sync::{converge, sync_threads};
use cuda_std::thread::{block_idx, lane, thread_idx, warp};

/// Rows of A of a block: 16 a warp.
const ROWS: u32 = 64;
/// Rows of B, columns of C.
const COLUMNS: u32 = 8;
/// k of a stage.
const STEP: u32 = 32;
const STAGES: u32 = 3;
const STAGE_BYTES: u32 = (ROWS + COLUMNS) * STEP * 2;

/// What the kernel does wrong.
const RIGHT: u32 = 0;
const REFILL_BEFORE_BARRIER: u32 = 1;
const WAIT_TOO_LITTLE: u32 = 2;
const NO_BARRIER: u32 = 3;
const NO_TAIL: u32 = 4;

kernels! {
    pub mod product(
        /// [ROWS · blocks, k] bf16.
        a: In<u16>,
        /// [COLUMNS, k] bf16.
        b: In<u16>,
        /// [ROWS · blocks, COLUMNS].
        c: Out<f32>,
        k: u32,
    );
    right[128, 1] = |_A| body::<RIGHT>;
    refill_before_barrier[128, 1] = |_A| body::<REFILL_BEFORE_BARRIER>;
    wait_too_little[128, 1] = |_A| body::<WAIT_TOO_LITTLE>;
    no_barrier[128, 1] = |_A| body::<NO_BARRIER>;
    no_tail[128, 1] = |_A| body::<NO_TAIL>;
}

fn body<const FORM: u32>(a: In<u16>, b: In<u16>, c: Out<f32>, k: u32) {
    let steps = k.div_ceil(STEP);
    let first_row = block_idx() * ROWS;
    let stage = |index: u32| Shared::<u16>::at(index % STAGES * STAGE_BYTES, STAGE_BYTES / 2);
    // Row r of a stage is row r of A, or row r - ROWS of B; a piece is 8 elements of it.
    let fill = |step: u32| {
        if step < steps {
            let to = stage(step);
            let mut piece = thread_idx();
            while piece < (ROWS + COLUMNS) * STEP / 8 {
                let (row, at) = (piece / 4, step * STEP + piece % 4 * 8);
                let bytes = if FORM == NO_TAIL { 16 } else { (2 * k).saturating_sub(2 * at).min(16) };
                if row < ROWS {
                    copy::async16_zfill(to, piece * 8, a, ((first_row + row) * k + at) as usize, bytes);
                } else {
                    copy::async16_zfill(to, piece * 8, b, ((row - ROWS) * k + at) as usize, bytes);
                }
                piece += 128;
            }
        }
        copy::commit();
    };
    fill(0);
    fill(1);
    let (g, t) = (lane() / 4, lane() % 4);
    let mut sum = [0.0; 4];
    for step in 0..steps {
        if FORM == REFILL_BEFORE_BARRIER {
            fill(step + 2);
            copy::wait::<2>();
        } else if FORM == WAIT_TOO_LITTLE {
            copy::wait::<2>();
        } else {
            copy::wait::<1>();
        }
        if FORM != NO_BARRIER {
            sync_threads();
        }
        if FORM != REFILL_BEFORE_BARRIER {
            // The stage that was read in the step before: every warp is behind it.
            fill(step + 2);
        }
        let tile = stage(step);
        for half in 0..STEP / 16 {
            let row = warp() * 16 + lane() % 16;
            let fa = tile.ldmatrix_x4(row * STEP + half * 16 + lane() / 16 * 8);
            let words = Shared::<u32>::at(tile.byte(0), STAGE_BYTES / 4);
            let at = ((ROWS + g) * STEP + half * 16) / 2 + t;
            let fb = [words.load(at), words.load(at + 4)];
            converge();
            sum = m16n8k16::<Bf16>(fa, fb, sum);
        }
    }
    let row = (first_row + warp() * 16 + g) as usize;
    for (i, value) in sum.into_iter().enumerate() {
        c.store((row + i / 2 * 8) * COLUMNS as usize + 2 * t as usize + i % 2, value);
    }
}

struct Case {
    a: Vec<u16>,
    b: Vec<u16>,
    k: u32,
    blocks: u32,
}

impl Case {
    /// Small integers, so that every order of the sum gives the same bits.
    fn new(k: u32, blocks: u32) -> Self {
        let value = |i: u32| f32_to_bf16((i.wrapping_mul(2_654_435_761) >> 28) as f32 - 8.0);
        let a = (0..blocks * ROWS * k).map(value).collect();
        let b = (0..COLUMNS * k).map(|i| value(i + 1_000_000)).collect();
        Case { a, b, k, blocks }
    }

    fn run(&self, kernel: Kernel<product::Family>, arch: ArchId, seed: u64) -> Result<Vec<f32>, Fault> {
        let device = Device::new();
        let (a, b) = (device.upload(&self.a), device.upload(&self.b));
        let mut c = device.alloc((self.blocks * ROWS * COLUMNS) as usize * 4);
        let args = product::Args { a: a.as_ref(), b: b.as_ref(), c: c.as_mut(), k: self.k };
        let (grid, shared_bytes) = (self.blocks, STAGES * STAGE_BYTES);
        let launch = Launch { device: &device, grid, threads: kernel.threads, shared_bytes, arch, seed };
        (kernel.emulate)(&launch, product::Family::pack(args).as_slice())?;
        Ok(c.download().expect("every element is written"))
    }

    fn expected(&self) -> Vec<f32> {
        let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        let k = self.k as usize;
        let dot = |a: &[u16], b: &[u16]| a.iter().zip(b).map(|(&a, &b)| value(a) * value(b)).sum();
        self.a.chunks(k).flat_map(|a| self.b.chunks(k).map(move |b| dot(a, b))).collect()
    }
}

#[test]
fn the_right_form_passes_under_every_schedule() {
    for (k, blocks) in [(32, 1), (8, 1), (128, 2), (40, 3), (264, 2)] {
        let case = Case::new(k, blocks);
        let expected = case.expected();
        for seed in 0..6 {
            for arch in ArchId::ALL {
                let got = case.run(product::right, arch, seed).unwrap_or_else(|fault| panic!("k {k}: {fault}"));
                assert_eq!(got, expected, "k {k} seed {seed}");
            }
        }
    }
}

#[test]
fn the_wrong_forms_do_not() {
    let case = Case::new(256, 2);
    for seed in 0..10 {
        let kind = |kernel| case.run(kernel, ArchId::Sm90, seed).expect_err("a planted fault").kind;
        let raced = |kind| matches!(kind, FaultKind::Race | FaultKind::PendingCopy);
        assert!(raced(kind(product::refill_before_barrier)));
        assert_eq!(kind(product::wait_too_little), FaultKind::PendingCopy);
        // A warp that runs ahead can also read what no copy has been issued for.
        let early = kind(product::no_barrier);
        assert!(raced(early) || early == FaultKind::Uninitialised);
    }
    // Tails: the last row of B ends inside a stage.
    let fault = Case::new(40, 1).run(product::no_tail, ArchId::Sm90, 0).expect_err("reads beyond B");
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
}
