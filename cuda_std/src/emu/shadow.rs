//! Who accessed what.

/// Shadow of one page of a written buffer.
pub(super) struct Page;
