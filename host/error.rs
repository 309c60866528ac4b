//! The one error type of the library. Every message names the argument, the value and what is needed.

use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Raised before anything is launched, except for [`Error::Driver`] and [`Error::Fault`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A scalar argument or a shape outside its limits.
    #[error("argument `{name}` is {value}: {needed}")]
    Argument {
        /// Name of the argument as in the public function or struct.
        name: &'static str,
        /// The offending value.
        value: String,
        /// What would be accepted.
        needed: String,
    },
    /// A buffer of the wrong length.
    #[error("buffer `{name}` has {given} elements: {needed} needed")]
    BufferLength {
        /// Name of the buffer.
        name: &'static str,
        /// Elements given.
        given: usize,
        /// Elements needed.
        needed: usize,
    },
    /// Values that are wrong for some experts; all of them are listed.
    #[error("`{name}` of experts {experts:?}: {problem}")]
    Experts {
        /// Name of the argument or tensor kind.
        name: &'static str,
        /// Every offending expert.
        experts: Vec<usize>,
        /// What is wrong, with the values.
        problem: String,
    },
    /// A tensor of a checkpoint that is missing or malformed.
    #[error("tensor `{tensor}` in {}: {problem}", path.display())]
    Tensor {
        /// File or folder.
        path: PathBuf,
        /// Full tensor name, or the pattern that was looked for.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A checkpoint file that cannot be used.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// File or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Reading or writing a file failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The CUDA driver refused a call.
    #[error("CUDA driver: {call} failed with {code} ({name})")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// CUresult as a number.
        code: i32,
        /// Its name, where known.
        name: String,
    },
    /// A GPU was asked for and there is none that can be used.
    #[error("no usable GPU: {0}")]
    NoGpu(String),
    /// The emulator caught a kernel doing something that it must not do.
    #[error("emulator: {0}")]
    Fault(String),
    /// The device's status word was set by a kernel.
    #[error("`{name}`: {problem}")]
    Status {
        /// Argument that caused it.
        name: &'static str,
        /// What was seen.
        problem: String,
    },
}

impl Error {
    /// [`Error::Argument`] from anything printable.
    pub fn argument(name: &'static str, value: impl std::fmt::Display, needed: impl Into<String>) -> Self {
        Error::Argument { name, value: value.to_string(), needed: needed.into() }
    }
}

/// `Err` naming `name` unless `given` is exactly `needed`.
pub fn check_len(name: &'static str, given: usize, needed: usize) -> Result<()> {
    if given == needed { Ok(()) } else { Err(Error::BufferLength { name, given, needed }) }
}

/// `Err` naming `name` where `given` is less than `needed`.
pub fn check_at_least(name: &'static str, given: usize, needed: usize) -> Result<()> {
    if given >= needed { Ok(()) } else { Err(Error::BufferLength { name, given, needed }) }
}
