//! Builds a kernel crate to PTX and checks it.
