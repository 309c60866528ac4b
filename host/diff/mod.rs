//! Differential tests: one input, every back end, the same bits.

mod case;

pub use case::{Case, DeviceCase, ONE, Random, SHAPE, floats};
