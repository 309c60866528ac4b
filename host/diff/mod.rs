//! Differential tests: one input, every back end, the same bits.

mod case;
mod compare;
mod draw;
mod file;
mod op;
mod probe;

pub use case::{Case, DeviceCase, ONE, Random, SHAPE, floats, one};
pub use compare::{Comparison, LOWEST, Mismatch, UlpHistogram};
pub use draw::{Family, draw, draw_in};
pub use file::CaseFile;
pub use op::{DrawOptions, Element, Op, OpCase, Output, draw_op, name_of};
