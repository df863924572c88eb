//! The C API of this library's own: the source of `include/rpcrdma.h`.
//!
//! Owned here: the functions that exist under no name of libtirpc. What a program reaches under libtirpc's names is in
//! `tirpc::interpose`. The doc comments are written for C programmers: cbindgen copies them into the header, which is
//! committed and compared by a test (`tests/header.rs`).
//!
//! Invariants: raw pointers in every signature; NULL is an error and no crash; out-parameters are written on success
//! only; `_free(NULL)` does nothing. Each function starts with `guard`.
#![allow(unsafe_code)]

use std::ffi::c_char;

use crate::ffi::guard;

/// The version of the library that is loaded, such as "0.1.0". It is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_version() -> *const c_char {
    guard(|| Ok(VERSION.as_ptr()))
}

const VERSION: &std::ffi::CStr =
    match std::ffi::CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => panic!("a version has no NUL in it"),
    };
