//! What the emulator reports.

use std::fmt;
use std::ops::Deref;
use std::panic::Location;

/// What a kernel did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside a buffer, outside shared memory or outside a view of it.
    OutOfBounds,
    /// An address that is no multiple of the access size.
    Misaligned,
    /// A read of bytes that nobody wrote.
    Uninitialised,
    /// Two accesses to the same byte, one of them a write, that nothing orders.
    Race,
    /// An access to bytes on which an asynchronous copy is in flight.
    PendingCopy,
    /// A non-coherent load from a buffer that the same launch may write.
    StreamOfWritable,
    /// Lanes of a warp that do not meet in the same warp operation.
    DivergentWarp,
    /// Threads that do not meet at the same barrier.
    DivergentBarrier,
    /// A thread of an early kernel that, before its wait, writes global memory or reads what a kernel writes that may still
    /// run.
    EarlyAccess,
    /// A thread of an early kernel that ends without having waited.
    MissingWait,
    /// A block that used up its budget of operations.
    Hang,
    /// The kernel panicked.
    Panic,
    /// An argument that the operation or the launch does not take.
    InvalidArgument,
}

impl FaultKind {
    fn text(self) -> &'static str {
        match self {
            FaultKind::OutOfBounds => "out of bounds",
            FaultKind::Misaligned => "misaligned access",
            FaultKind::Uninitialised => "uninitialised read",
            FaultKind::Race => "race",
            FaultKind::PendingCopy => "asynchronous copy not waited for",
            FaultKind::StreamOfWritable => "non-coherent load of a writable buffer",
            FaultKind::DivergentWarp => "divergent warp operation",
            FaultKind::DivergentBarrier => "divergent barrier",
            FaultKind::EarlyAccess => "access before the wait for kernels ahead",
            FaultKind::MissingWait => "no wait for kernels ahead",
            FaultKind::Hang => "hang",
            FaultKind::Panic => "panic",
            FaultKind::InvalidArgument => "invalid argument",
        }
    }
}

/// A line of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// File, as the compiler names it.
    pub file: String,
    /// Line.
    pub line: u32,
}

impl From<&Location<'_>> for Source {
    fn from(location: &Location<'_>) -> Self {
        Source { file: location.file().to_owned(), line: location.line() }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A thread at a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// Index of the block.
    pub block: u32,
    /// Index of the thread in its block.
    pub thread: u32,
    /// Where it was; none if it had finished or not begun.
    pub source: Option<Source>,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} thread {} (warp {} lane {})", self.block, self.thread, self.thread / 32, self.thread % 32)?;
        match &self.source {
            Some(source) => write!(f, " at {source}"),
            None => Ok(()),
        }
    }
}

/// Everything about one fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What happened.
    pub kind: FaultKind,
    /// Symbol of the kernel; empty while its arguments were being resolved.
    pub kernel: &'static str,
    /// Who did it; none if the launch itself is wrong.
    pub party: Option<Party>,
    /// The other thread: of a race, a copy in flight, a divergence.
    pub other: Option<Party>,
    /// Values: index, length, offset, operations.
    pub message: String,
}

/// A kernel's fault. Its fields are those of [`Report`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(Box<Report>);

impl Fault {
    pub(super) fn new(report: Report) -> Self {
        Fault(Box::new(report))
    }

    /// A launch that cannot start.
    pub(super) fn launch(kind: FaultKind, kernel: &'static str, message: String) -> Self {
        Fault::new(Report { kind, kernel, party: None, other: None, message })
    }

    /// The same fault, of kernel `name`.
    #[doc(hidden)]
    pub fn of_kernel(mut self, name: &'static str) -> Self {
        self.0.kernel = name;
        self
    }
}

impl Deref for Fault {
    type Target = Report;
    fn deref(&self) -> &Report {
        &self.0
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in kernel `{}`", self.kind.text(), self.kernel)?;
        if let Some(party) = &self.party {
            write!(f, ", {party}")?;
        }
        write!(f, ": {}", self.message)?;
        match &self.other {
            Some(other) => write!(f, "; the other: {other}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Fault {}
