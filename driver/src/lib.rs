//! Answers `-lcuda` and loads the real driver when it is first used.
