//! A program that uses cust links and starts, with a driver or without one.

use cust::error::CudaError;

#[test]
fn cust_answers_with_or_without_a_driver() {
    match cuda_driver::available() {
        Ok(()) => {
            cust::init(cust::CudaFlags::empty()).unwrap();
            assert!(cust::device::Device::num_devices().unwrap() > 0);
            assert!(cuda_driver::symbol("cuDeviceGetCount").is_some());
            assert!(cuda_driver::error_name(100).contains("CUDA_ERROR_NO_DEVICE"));
        }
        Err(reason) => {
            assert!(std::env::var_os("MEGAMOE_REQUIRE_GPU").is_none(), "a GPU is required: {reason}");
            println!("no GPU here ({reason}): the functions must say so");
            // A driver may be there without a GPU; then its own codes come through.
            if reason.starts_with("no CUDA driver") {
                assert_eq!(cust::init(cust::CudaFlags::empty()), Err(CudaError::NoDevice));
                assert_eq!(cust::device::Device::num_devices(), Err(CudaError::NoDevice));
                assert_eq!(cuda_driver::symbol("cuInit"), None);
                assert_eq!(cuda_driver::error_name(100), "error 100");
            } else {
                assert!(cust::init(cust::CudaFlags::empty()).is_err() || cust::device::Device::num_devices() == Ok(0));
            }
        }
    }
    assert_eq!(cuda_driver::symbol("cuNoSuchFunction"), None);
}
