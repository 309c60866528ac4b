//! Differential tests: one input, every back end, the same bits.

mod case;
mod draw;

pub use case::{Case, DeviceCase, ONE, Random, SHAPE, floats};
pub use draw::{Family, draw};
