//! `cargo xtask`: set-up, demo, tests, GPU bundle.

fn main() {}
