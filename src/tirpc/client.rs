//! The CLIENT of a connection over RDMA.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};

use crate::tirpc::{CLIENT, netbuf};

/// What the creator of a CLIENT asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Netid "rdma": RDMA or an error.
    Required,
    /// `RPCRDMA_REDIRECT=tcp`: RDMA if the server answers to it.
    Try,
}

/// Stands in for `clnt_vc_create`; `None` asks for the stock transport, `Some(NULL)` is a failure that is recorded
/// with [`super::creation_failed`].
///
/// # Safety
/// As `clnt_vc_create`: `raddr` points to a netbuf.
pub unsafe fn vc_create(
    _fd: c_int,
    _raddr: *const netbuf,
    _prog: u32,
    _vers: u32,
    _sendsz: c_uint,
    _recvsz: c_uint,
    _intent: Intent,
) -> Option<*mut CLIENT> {
    None
}

/// Our text for the last error of `clnt`, if it is one of ours.
///
/// # Safety
/// `clnt` is a live handle of any transport.
pub unsafe fn explanation(_clnt: *mut CLIENT) -> Option<String> {
    None
}
