//! Builds the kernels to PTX, once per GPU architecture, and embeds them.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    // The lock file decides which versions the device build resolves to.
    let sources = ["cuda_std".into(), "Cargo.lock".into()];
    match cuda_builder::embed(Path::new("kernels-gpu"), &sources, &cuda_builder::Arch::ALL) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={}", error.to_string().replace('\n', "\ncargo::error="));
            ExitCode::FAILURE
        }
    }
}
