//! Builds the kernels to PTX, once per GPU architecture, and embeds them.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    // For work on a kernel: fewer architectures, faster builds. Others then have no module.
    println!("cargo::rerun-if-env-changed=MEGAMOE_ARCHS");
    let wanted = std::env::var("MEGAMOE_ARCHS").ok();
    let archs: Vec<_> = cuda_builder::Arch::ALL
        .into_iter()
        .filter(|arch| wanted.as_ref().is_none_or(|list| list.split(',').any(|name| name == arch.to_string())))
        .collect();
    // The lock file decides which versions the device build resolves to.
    let sources = ["cuda_std".into(), "Cargo.lock".into()];
    match cuda_builder::embed(Path::new("kernels-gpu"), &sources, &archs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={}", error.to_string().replace('\n', "\ncargo::error="));
            ExitCode::FAILURE
        }
    }
}
