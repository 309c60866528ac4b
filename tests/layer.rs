//! The whole NVFP4 layer: kernels on the emulator against the exact reference, bit for bit.

use cuda_std::arch::ArchId;
use megamoe::device::{DeviceHandle, Emulator, EmulatorOptions};
use megamoe::diff::Case;
use megamoe::plan::{Fc2Warps, Variant};
use megamoe::reference::Mode;
use megamoe::{Activation, LayerShape, Order, Split, XType};

fn emulator(arch: ArchId, seed: u64) -> DeviceHandle {
    Emulator::with_options(EmulatorOptions { arch, seed, multiprocessors: 1 })
}

#[track_caller]
fn check(case: &Case, device: &DeviceHandle) {
    let expected = case.run(Mode::Exact).unwrap();
    let got = case.run_on(device).unwrap();
    let different = (0..expected.out.len()).find(|&i| expected.out[i] != got.out[i]);
    if let Some(i) = different {
        let (token, column) = (i / case.shape.output, i % case.shape.output);
        panic!("token {token}, column {column}: {:#06x}, not {:#06x}", got.out[i], expected.out[i]);
    }
    assert_eq!(expected.status, got.status);
}

#[test]
fn probe() {
    check(&Case::new(), &emulator(ArchId::Sm90, 1));
}

#[test]
fn every_split_and_activation_on_random_data() {
    let shape = LayerShape { hidden: 272, intermediate: 48, output: 40, experts: 5, top_k: 3 };
    for activation in [Activation::Bf16, Activation::F16] {
        for split in Split::ALL {
            let mut case = Case::random(shape, 7, 3);
            case.options.activation = activation;
            case.options.order = Order::Seed { split };
            check(&case, &emulator(ArchId::Sm90, 2));
        }
    }
}
