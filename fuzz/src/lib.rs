//! What the fuzz targets do: one module each, with a function that takes an input and panics if a property does not hold.
//!
//! They are a library so that the corpora can be replayed by a plain test, without libFuzzer.

pub mod bind;
pub mod end;
pub mod engine;
pub mod input;
pub mod iwarp;
pub mod mpa;
pub mod pair;
pub mod rings;
pub mod rpc;
pub mod text;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod wire;
pub mod xdrs;

/// A target, with its name, which is also that of its corpus.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("wire", wire::run),
    ("mpa", mpa::run),
    ("iwarp", iwarp::run),
    ("bind", bind::run),
    ("rpc", rpc::run),
    ("text", text::run),
    ("xdrs", xdrs::run),
    ("rings", rings::run),
    ("engine", engine::run),
    ("pair", pair::run),
    #[cfg(feature = "verbs")]
    ("verbs", verbs::run),
];
