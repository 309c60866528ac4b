//! What a kernel may call.
