//! libibverbs and librdmacm, loaded when they are first needed.
//!
//! Our own library has no NEEDED entry for either, so programs can load it where rdma-core is not installed. What is called
//! more often than once a connection (`ibv_post_send`, `ibv_poll_cq` and the like) is not a function of these libraries, but
//! one of the device's driver, behind a table in its context.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};

use rdma_sys::*;

use once_cell::race::OnceBox;

use crate::error::{Error, Kind};
use crate::process;

macro_rules! functions {
    ($($library:ident: fn $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The entry points that are used, with the types of their headers.
        #[allow(missing_docs)]
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            fn load() -> Result<Library, Error> {
                let verbs = open(c"libibverbs.so.1")?;
                let cm = open(c"librdmacm.so.1")?;
                let handle = |which| match which { Which::Verbs => verbs, Which::Cm => cm };
                Ok(Library {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let found = find(handle(Which::$library), name)?;
                        // SAFETY: the function of this name has this type in rdma-core's headers, which keep it for as
                        // long as the libraries keep their names.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    Verbs: fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    Verbs: fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    Verbs: fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    Verbs: fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    Verbs: fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
    Verbs: fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    Verbs: fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    Verbs: fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    Verbs: fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
    Verbs: fn ibv_destroy_qp(*mut ibv_qp) -> c_int;
    Verbs: fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    Verbs: fn ibv_ack_cq_events(*mut ibv_cq, u32) -> ();
    Cm: fn rdma_create_event_channel() -> *mut rdma_event_channel;
    Cm: fn rdma_destroy_event_channel(*mut rdma_event_channel) -> ();
    Cm: fn rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space::Type) -> c_int;
    Cm: fn rdma_destroy_id(*mut rdma_cm_id) -> c_int;
    Cm: fn rdma_migrate_id(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
    Cm: fn rdma_set_option(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
    Cm: fn rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    Cm: fn rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
    Cm: fn rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    Cm: fn rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
    Cm: fn rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
    Cm: fn rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    Cm: fn rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    Cm: fn rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
    Cm: fn rdma_disconnect(*mut rdma_cm_id) -> c_int;
    Cm: fn rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    Cm: fn rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
}

enum Which {
    Verbs,
    Cm,
}

/// The libraries, loaded at the first call.
///
/// # Errors
/// One of them is missing or too old; the error is the same at every call.
pub fn get() -> Result<&'static Library, Error> {
    static LIBRARY: OnceBox<Result<Library, Error>> = OnceBox::new();
    #[cfg(any(test, feature = "fuzz"))]
    if let Some(mock) = super::mock::installed() {
        return Ok(mock);
    }
    if LIBRARY.get().is_none() {
        let loaded = process::keeping_errno(Library::load);
        let _ = LIBRARY.set(Box::new(loaded));
    }
    match LIBRARY.get() {
        Some(Ok(library)) => Ok(library),
        Some(Err(error)) => Err(error.clone()),
        None => Err(Error::new(Kind::Panic, "rdma-core was loaded and is gone")),
    }
}

fn open(name: &CStr) -> Result<*mut c_void, Error> {
    // SAFETY: a string; the initialisers of rdma-core's libraries touch nothing of ours. They stay loaded.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() { Err(missing("is rdma-core installed?")) } else { Ok(handle) }
}

/// `name` ends in NUL.
fn find(library: *mut c_void, name: &'static str) -> Result<*mut c_void, Error> {
    let symbol: *const c_char = name.as_ptr().cast();
    // SAFETY: an open library, and a string that the macro has terminated.
    let found = unsafe { libc::dlsym(library, symbol) };
    if found.is_null() { Err(missing("rdma-core is too old")) } else { Ok(found) }
}

/// The error, in dlerror(3)'s own words, which name the file or the symbol.
fn missing(remedy: &str) -> Error {
    // SAFETY: no preconditions.
    let said = unsafe { libc::dlerror() };
    // SAFETY: NULL, or a string that lives until this thread's next call of the dl family.
    let said =
        unsafe { crate::ffi::cstr(said) }.map_or_else(|| "no reason given".into(), CStr::to_string_lossy);
    Error::new(Kind::Os(libc::ENOSYS), format!("verbs cannot be used: {said}; {remedy}"))
}
