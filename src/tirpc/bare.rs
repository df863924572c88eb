//! An SVCXPRT that is not a connection: it wakes the program's loop when its descriptor is readable.
#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::os::fd::RawFd;
use std::ptr::{null, null_mut};

use crate::ffi::guard;
use crate::tirpc::{SVCAUTH, SVCXPRT, SVCXPRT_EXT, bool_t, rpc_msg, xp_ops, xp_ops2, xprt_stat};
use crate::xdr::XdrProc;

/// With it nothing can be decoded or answered.
pub const NO_AUTH: SVCAUTH = SVCAUTH { svc_ah_ops: null(), svc_ah_private: null_mut() };

static OPS2: xp_ops2 = xp_ops2 { xp_control: Some(no_control) };

/// Operations of a transport that is not a connection and is never destroyed.
pub const LISTENING: xp_ops = xp_ops {
    xp_recv: Some(no_recv),
    xp_stat: Some(idle_stat),
    xp_getargs: Some(no_args),
    xp_reply: Some(no_reply),
    xp_freeargs: Some(no_args),
    xp_destroy: Some(stay),
};

/// A transport with nothing but a descriptor. It lives for ever: libtirpc's loop may be about to look at it.
pub fn bare(fd: RawFd, ops: &'static xp_ops) -> *mut SVCXPRT {
    // SAFETY: all zero is a valid SVCXPRT: NULL pointers and plain numbers.
    let mut xprt: SVCXPRT = unsafe { std::mem::zeroed() };
    xprt.xp_fd = fd;
    xprt.xp_ops = ops;
    xprt.xp_ops2 = &OPS2;
    xprt.xp_p3 = Box::into_raw(Box::new(SVCXPRT_EXT { flags: 0, xp_auth: NO_AUTH })).cast();
    Box::into_raw(Box::new(xprt))
}

unsafe extern "C" fn no_control(_: *mut SVCXPRT, _: c_uint, _: *mut c_void) -> bool_t {
    guard(|| Ok(0))
}

unsafe extern "C-unwind" fn no_recv(_: *mut SVCXPRT, _: *mut rpc_msg) -> bool_t {
    guard(|| Ok(0))
}

unsafe extern "C" fn idle_stat(_: *mut SVCXPRT) -> c_uint {
    guard(|| Ok(xprt_stat::XPRT_IDLE))
}

unsafe extern "C-unwind" fn no_args(_: *mut SVCXPRT, _: XdrProc, _: *mut c_void) -> bool_t {
    guard(|| Ok(0))
}

unsafe extern "C-unwind" fn no_reply(_: *mut SVCXPRT, _: *mut rpc_msg) -> bool_t {
    guard(|| Ok(0))
}

unsafe extern "C" fn stay(_: *mut SVCXPRT) {
    guard(|| Ok(()));
}
