//! Builds the fixture crate for every architecture with the compiler that is installed, and assembles the result.

use std::path::{Path, PathBuf};
use std::time::Instant;

use cuda_builder::{Arch, BuildError, Builder, Module, Ptxas, Toolchain};

fn fixture(arch: Arch) -> Builder {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture");
    Builder::new(dir).arch(arch).target_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("ptx"))
}

#[test]
fn every_architecture_builds_and_assembles() {
    let ptxas = Ptxas::find();
    if ptxas.is_none() {
        assert!(std::env::var_os("MEGAMOE_REQUIRE_PTXAS").is_none(), "ptxas is required and was not found");
        println!("skipped: no ptxas, so the PTX is built but not assembled");
    }
    for arch in Arch::ALL {
        let ptx = fixture(arch).build().unwrap();
        assert!(!ptx.text.contains("BOUNDS_"));
        let module = Module::parse(&ptx.text).unwrap();
        assert_eq!(module.target, arch.name());
        assert_eq!(module.kernels().count(), 2);
        let scale = module.kernel("scale").unwrap();
        assert_eq!((scale.threads, scale.min_blocks, scale.parameters), (Some(128), Some(2), 4));
        assert_eq!((scale.collectives["bar.sync"], scale.local, scale.generic), (1, 0, 0));
        assert_eq!(module.kernel("fill").unwrap().threads, Some(1024));
        if let Some(ptxas) = &ptxas {
            let resources = ptxas.assemble(&ptx.text, arch).unwrap();
            assert_eq!(resources.len(), 2);
            assert!(resources.values().all(|kernel| kernel.stack == 0 && kernel.registers <= 64), "{resources:?}");
            // The checker must be able to say no.
            assert!(ptxas.assemble(&ptx.text.replace("bar.sync", "bar.sink"), arch).is_err());
        }
    }
    // Only sm_80's build leaves out the doubling, which shows that the cfg reaches the crate.
    let adds = |arch| fixture(arch).build().unwrap().text.matches("add.rn.f32").count();
    assert_eq!((adds(Arch::Sm80), adds(Arch::Sm90a)), (0, 1));

    let start = Instant::now();
    fixture(Arch::Sm90a).build().unwrap();
    assert!(start.elapsed().as_secs_f64() < 2.0, "a second build of the same sources must cost nothing");
}

#[test]
fn a_crate_that_does_not_compile_is_an_error_with_the_compilers_words() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("broken");
    std::fs::create_dir_all(dir.join("src")).unwrap();
    std::fs::write(dir.join("Cargo.toml"), "[package]\nname = \"broken\"\nedition = \"2024\"\n[workspace]\n").unwrap();
    std::fs::write(dir.join("src/lib.rs"), "#![no_std]\nfn f() -> u32 { missing_name }\n").unwrap();
    match Builder::new(&dir).build() {
        Err(BuildError::Compile { arch: Arch::Sm90a, message }) => {
            assert!(message.contains("missing_name"), "{message}")
        }
        other => panic!("expected a compile error, got {other:?}"),
    }
}

#[test]
fn the_compiler_that_is_found_has_a_version() {
    assert!(Toolchain::find().unwrap().version.contains("LLVM version"));
}
