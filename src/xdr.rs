//! The XDR stream of libtirpc as far as the boundary needs it: the layout of `struct XDR` and of an xdrproc.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `enum xdr_op`.
pub const XDR_ENCODE: c_int = 0;
/// `enum xdr_op`.
pub const XDR_DECODE: c_int = 1;
/// `enum xdr_op`.
pub const XDR_FREE: c_int = 2;

/// `struct xdr_ops`; never looked into here.
#[repr(C)]
pub struct XdrOps {
    slots: [*const c_void; 9],
}

/// `struct XDR` (48 bytes).
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct XDR {
    pub x_op: c_int,
    pub x_ops: *const XdrOps,
    pub x_public: *mut c_char,
    pub x_private: *mut c_void,
    pub x_base: *mut c_void,
    pub x_handy: c_uint,
}

/// `xdrproc_t`, in its two-argument form.
pub type XdrProc = Option<unsafe extern "C" fn(*mut XDR, *mut c_void) -> c_int>;

const _: () = assert!(size_of::<XDR>() == 48);
