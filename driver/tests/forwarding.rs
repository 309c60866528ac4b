//! Calls reach a driver that is there: a stand-in library, built here, takes the driver's place in a child process.

use std::path::Path;
use std::process::Command;

/// Three functions of the driver API and none of the others.
const STAND_IN: &str = r#"
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> i32 { if flags == 0 { 0 } else { 1 } }
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut i32) -> i32 { unsafe { *count = 3 }; 0 }
#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: *mut i32) -> i32 { unsafe { *version = 13_010 }; 0 }
"#;

const IN_CHILD: &str = "CUDA_DRIVER_TEST_CHILD";

#[test]
fn calls_reach_the_driver() {
    if std::env::var_os(IN_CHILD).is_some() {
        use cust::error::CudaError;
        cuda_driver::available().unwrap();
        cust::init(cust::CudaFlags::empty()).unwrap();
        assert_eq!(cust::device::Device::num_devices(), Ok(3));
        assert_eq!(cust::CudaApiVersion::get().unwrap().major(), 13);
        // A function that this driver lacks.
        assert_eq!(cust::device::Device::get_device(0).map(|_| ()), Err(CudaError::NotFound));
        return;
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = dir.join("stand_in.rs");
    std::fs::write(&source, STAND_IN).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "-o"])
        .arg(dir.join("libcuda.so.1"))
        .arg(&source)
        .status();
    match built {
        Ok(status) => assert!(status.success()),
        // The executable may have been carried to a machine without a compiler.
        Err(error) => return println!("skipped: no rustc here ({error})"),
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "calls_reach_the_driver", "--nocapture"])
        .env(IN_CHILD, "1")
        .env("LD_LIBRARY_PATH", dir)
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}
