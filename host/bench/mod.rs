//! Benchmarks on a GPU: decode layers against recorded figures of other implementations, and the memory's own speed.
//!
//! Protocol of the decode table: one CUDA graph holds several calls, each with its own hidden states, routing (uniform top-k
//! without replacement) and weight set, so that at least 240 MB of other weights are read before a set comes back (four times an
//! H200's L2). Events around replays of the graph; the median of several samples, divided by the calls. The router table does the
//! same with single operations, of which at most 48 are in a graph: where their inputs are small they lie in L2.

mod decode;
mod gemm;
mod grouped;
mod ops;
mod recorded;
mod router;
mod timing;

pub use decode::{DecodeOptions, DecodeRow, DrawnRouting, ReadRow, StageTimes, decode, read_floor};
pub use gemm::{GEMM_SHAPES, GemmOptions, GemmRow, GemmShape, TimedGemm, gemm, multiply_rate};
pub use grouped::{GroupedBenchOptions, GroupedRow, grouped};
pub use ops::{OpsOptions, OpsRow, ops};
pub use recorded::{
    BenchShape, GROUPED_TOKENS, RECORDED_GROUPED, RECORDED_READ, RECORDED_TOPK, ROUTER_TOKENS, Recorded,
    RecordedGrouped, RecordedTopK, SHAPES, TOKENS,
};
pub use router::{RouterOperation, RouterOptions, RouterRow, router};
