//! The kernels of megamoe.
#![cfg_attr(target_arch = "nvptx64", no_std)]

pub mod layout;
