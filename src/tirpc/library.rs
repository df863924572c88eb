//! libtirpc itself, found when it is needed.
//!
//! This library has no NEEDED entry for libtirpc: preloaded into every program of a session, it does not bring libtirpc, and with
//! it Kerberos, into those that make no RPCs. Calls come here from libtirpc or from a program that uses it, so that libtirpc is
//! there; [`library`] and [`Real`] look up its names at their first use, not at startup: a plugin or a name service may have
//! brought it since. Where only this library is linked (a program may name no functions but ours), libtirpc is loaded then.
//!
//! # Invariants
//! - Names that [`interpose`](super::interpose) defines are reached through [`real`]; all others through [`library`].
//! - A name is found where libtirpc finds it, too: in the global scope first, since a program may have put something between, and
//!   data are often the program's own copies (copy relocations); then in libtirpc. It is looked up with libtirpc's symbol
//!   version: glibc still carries the old sunrpc under the same names, with different structures.
//! - Once found, libtirpc stays loaded.
//! - No lock of ours: a child forked in the middle of a look-up does its own, unless the loader's lock was held at the fork: the
//!   C library leaves it held.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, transmute_copy};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use once_cell::race::OnceBox;

use super::{
    __rpc_sockinfo, AUTH, CLIENT, SVCXPRT, bool_t, dispatch_t, netbuf, netconfig, opaque_auth, registered_t,
    rpc_createerr, rpc_err, rpc_msg, svc_req, t_bind,
};
use crate::error::{Error, Kind};
use crate::xdr::{XDR, XdrProc};
use crate::{ffi, process};

macro_rules! names {
    (
        functions { $($abi:literal $function:ident($($argument:ty),*) $(-> $result:ty)?;)* }
        data { $($variable:ident: $kind:ty, $version:literal;)* }
    ) => {
        /// What is used of libtirpc, with the types of its headers.
        #[allow(missing_docs)]
        pub struct Library {
            $(pub $function: unsafe extern $abi fn($($argument),*) $(-> $result)?,)*
            $(pub $variable: *mut $kind,)*
        }

        impl Library {
            fn find() -> Result<Library, Error> {
                handle()?;
                Ok(Library {
                    $($function: {
                        let found = required(concat!(stringify!($function), "\0"), "TIRPC_0.3.0\0")?;
                        // SAFETY: the function of this name and version has this type in libtirpc's headers.
                        unsafe {
                            transmute_copy::<*mut c_void, unsafe extern $abi fn($($argument),*) $(-> $result)?>(&found)
                        }
                    },)*
                    $($variable: required(concat!(stringify!($variable), "\0"), concat!($version, "\0"))?.cast(),)*
                })
            }
        }
    };
}

names! {
    functions {
        "C" _rpc_dtablesize() -> c_int;
        "C" rpc_control(c_int, *mut c_void) -> bool_t;
        "C" _gss_authenticate(*mut svc_req, *mut rpc_msg, *mut bool_t) -> c_uint;
        "C" svcerr_auth(*mut SVCXPRT, c_uint);
        "C" svcerr_noprog(*mut SVCXPRT);
        "C" svcerr_progvers(*mut SVCXPRT, u32, u32);
        "C" xdr_callmsg(*mut XDR, *mut rpc_msg) -> bool_t;
        "C" xdr_replymsg(*mut XDR, *mut rpc_msg) -> bool_t;
        "C" xdr_bool(*mut XDR, *mut bool_t) -> bool_t;
        "C" xdr_opaque_auth(*mut XDR, *mut opaque_auth) -> bool_t;
        "C" xdr_free(XdrProc, *mut c_void);
        "C" _seterr_reply(*mut rpc_msg, *mut rpc_err);
        "C" authnone_create() -> *mut AUTH;
        // Of the type of the program's own procedures, or running those. xdr_void takes no arguments in C; passing two to it is
        // what every caller of an xdrproc does. The object of xdr_rpcb is a `*mut rpcb`.
        "C-unwind" svc_getreq_common(c_int);
        "C-unwind" svc_getreq_poll(*mut libc::pollfd, c_int);
        "C-unwind" xdr_void(*mut XDR, *mut c_void) -> bool_t;
        "C-unwind" xdr_rpcb(*mut XDR, *mut c_void) -> bool_t;
    }
    data {
        svc_pollfd: *mut libc::pollfd, "TIRPC_0.3.3";
        svc_max_pollfd: c_int, "TIRPC_0.3.3";
        svc_fdset: libc::fd_set, "TIRPC_0.3.0";
    }
}

// SAFETY: addresses of functions and of variables, which are written and read as libtirpc's users do.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// libtirpc.
///
/// # Errors
/// When it cannot be loaded, or lacks something. The failure is not remembered.
#[inline]
pub fn library() -> Result<&'static Library, Error> {
    static LIBRARY: OnceBox<Library> = OnceBox::new();
    #[cold]
    fn find() -> Result<Box<Library>, Error> {
        process::keeping_errno(Library::find).map(Box::new)
    }
    LIBRARY.get_or_try_init(find)
}

/// This thread's `rpc_createerr`. It is looked up by itself, so that it can tell of a libtirpc that lacks something else.
pub fn createerr() -> Option<*mut rpc_createerr> {
    // SAFETY: the type is the C prototype of the name.
    static CREATEERR: Real<unsafe extern "C" fn() -> *mut rpc_createerr> =
        unsafe { Real::new(c"__rpc_createerr") };
    // SAFETY: takes nothing; returns the thread's own structure.
    CREATEERR.get().ok().map(|function| unsafe { function() })
}

/// A single function of libtirpc: one behind a name that this library exports, or one that is needed even if others are missing.
///
/// # Invariants
/// `F` is the type of the C function `name`, as libtirpc's headers declare it.
pub struct Real<F> {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
    kind: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    /// # Safety
    /// `F` must be an `unsafe extern "C" fn` type with the signature of libtirpc's `name`.
    pub const unsafe fn new(name: &'static CStr) -> Real<F> {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        // INVARIANT: by the contract of this function.
        Real { name, found: AtomicPtr::new(null_mut()), kind: PhantomData }
    }

    /// The function.
    ///
    /// # Errors
    /// When libtirpc cannot be loaded, or lacks it.
    pub fn get(&self) -> Result<F, Error> {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            found = self.look_up()?;
            self.found.store(found, Ordering::Relaxed);
        }
        // SAFETY: `found` is the address of the function `name`, whose type is `F` by the type's invariant.
        Ok(unsafe { transmute_copy::<*mut c_void, F>(&found) })
    }

    fn look_up(&self) -> Result<*mut c_void, Error> {
        process::keeping_errno(|| {
            let library = handle()?;
            let name = self.name.to_string_lossy();
            // Not our own. This finds nothing if libtirpc comes before us in the link order, or was loaded privately.
            find(libc::RTLD_NEXT, self.name, c"TIRPC_0.3.0")
                .or_else(|| find(library, self.name, c"TIRPC_0.3.0"))
                .ok_or_else(|| missing(&name, "TIRPC_0.3.0"))
        })
    }
}

impl<F> fmt::Debug for Real<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Real").field(&self.name).finish()
    }
}

/// A handle of libtirpc, which stays loaded. If it is loaded already, this opens no file.
fn handle() -> Result<*mut c_void, Error> {
    static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let mut handle = HANDLE.load(Ordering::Relaxed);
    if handle.is_null() {
        let name = c"libtirpc.so.3".as_ptr();
        // SAFETY: a string; what is loaded already has run its initialisers.
        handle = unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            show_ourselves();
            // SAFETY: a string; neither libtirpc's initialisers nor those of what it needs touch anything of ours.
            handle = unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_LOCAL) };
        }
        if handle.is_null() {
            // SAFETY: no preconditions.
            let said = unsafe { libc::dlerror() };
            // SAFETY: NULL, or a string that lives until this thread's next call of the dl family.
            let said = unsafe { ffi::cstr(said) };
            let said = said.map_or_else(|| "no reason given".into(), CStr::to_string_lossy);
            return Err(Error::new(Kind::Os(libc::ENOSYS), format!("libtirpc cannot be loaded: {said}")));
        }
        // Another thread may have stored it already: it is the same handle.
        HANDLE.store(handle, Ordering::Relaxed);
    }
    Ok(handle)
}

/// Puts this library into the global scope, if the program has loaded it privately: libtirpc's own calls of functions that
/// [`interpose`](super::interpose) defines have to find them there.
fn show_ourselves() {
    let mut found = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: an address of ours, and room for what is said of it.
    if unsafe { libc::dladdr((handle as fn() -> _ as *const c_void).cast(), found.as_mut_ptr()) } == 0 {
        return;
    }
    // SAFETY: written, as the result says.
    let name = unsafe { found.assume_init() }.dli_fname;
    let open = |more| {
        // SAFETY: a string that lives as long as this library, which is loaded.
        unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_NOLOAD | more) }
    };
    // If we are part of the program itself, its name cannot be opened like this, but it is in the global scope anyway.
    let own = open(0);
    let mut space: libc::Lmid_t = libc::LM_ID_NEWLM;
    // SAFETY: an open handle, and room for what is asked for.
    if !own.is_null() && unsafe { libc::dlinfo(own, libc::RTLD_DI_LMID, (&raw mut space).cast()) } == 0 {
        // In other namespaces (dlmopen(3)) everything sees what was loaded first, and glibc crashes at this.
        if space == libc::LM_ID_BASE {
            open(libc::RTLD_GLOBAL);
        }
    }
}

/// A name that this library does not define itself. Both strings end in NUL.
fn required(name: &'static str, version: &'static str) -> Result<*mut c_void, Error> {
    let text = |string: &'static str| CStr::from_bytes_with_nul(string.as_bytes()).unwrap_or(c"");
    let (name, version) = (text(name), text(version));
    find(libc::RTLD_DEFAULT, name, version)
        .or_else(|| find(handle().ok()?, name, version))
        .ok_or_else(|| missing(&name.to_string_lossy(), &version.to_string_lossy()))
}

fn find(place: *mut c_void, name: &CStr, version: &CStr) -> Option<*mut c_void> {
    // SAFETY: a pseudo-handle or an open one, and two strings.
    let found = unsafe { libc::dlvsym(place, name.as_ptr(), version.as_ptr()) };
    if found.is_null() {
        // Clears the error: the program asks dlerror(3) only about its own calls.
        // SAFETY: no preconditions.
        unsafe { libc::dlerror() };
        return None;
    }
    Some(found)
}

fn missing(name: &str, version: &str) -> Error {
    Error::new(Kind::Os(libc::ENOSYS), format!("libtirpc.so.3 has no {name}@{version}"))
}

/// The functions of libtirpc that [`interpose`](super::interpose) stands in front of.
#[allow(missing_docs)]
pub mod real {
    use super::*;

    macro_rules! real {
        ($($static:ident = $name:ident($($arg:ty),*) $(-> $ret:ty)?;)*) => {$(
            // SAFETY: the type is the C prototype of the name.
            pub static $static: Real<unsafe extern "C" fn($($arg),*) $(-> $ret)?> = unsafe {
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => Real::new(name),
                    Err(_) => unreachable!(),
                }
            };
        )*};
    }

    /// The program's procedures run in it: they may throw.
    pub static RPC_CALL: Real<RpcCall> =
        // SAFETY: the type is the C prototype of the name.
        unsafe { Real::new(c"rpc_call") };

    /// `rpc_call`.
    pub type RpcCall = unsafe extern "C-unwind" fn(
        *const c_char,
        u32,
        u32,
        u32,
        XdrProc,
        *const c_char,
        XdrProc,
        *mut c_char,
        *const c_char,
    ) -> c_uint;

    real! {
        GETNETCONFIGENT = getnetconfigent(*const c_char) -> *mut netconfig;
        RPC_SETCONF = __rpc_setconf(*const c_char) -> *mut c_void;
        RPC_GETCONF = __rpc_getconf(*mut c_void) -> *mut netconfig;
        RPC_ENDCONF = __rpc_endconf(*mut c_void);
        RPC_NCONF2SOCKINFO = __rpc_nconf2sockinfo(*const netconfig, *mut __rpc_sockinfo) -> c_int;
        CLNT_CREATE = clnt_create(*const c_char, u32, u32, *const c_char) -> *mut CLIENT;
        CLNT_CREATE_TIMED = clnt_create_timed(
            *const c_char, u32, u32, *const c_char, *const libc::timeval) -> *mut CLIENT;
        CLNT_CREATE_VERS = clnt_create_vers(
            *const c_char, u32, *mut u32, u32, u32, *const c_char) -> *mut CLIENT;
        CLNT_CREATE_VERS_TIMED = clnt_create_vers_timed(
            *const c_char, u32, *mut u32, u32, u32, *const c_char, *const libc::timeval) -> *mut CLIENT;
        CLNT_TP_CREATE = clnt_tp_create(*const c_char, u32, u32, *const netconfig) -> *mut CLIENT;
        CLNT_TP_CREATE_TIMED = clnt_tp_create_timed(
            *const c_char, u32, u32, *const netconfig, *const libc::timeval) -> *mut CLIENT;
        CLNT_TLI_CREATE = clnt_tli_create(
            c_int, *const netconfig, *mut netbuf, u32, u32, c_uint, c_uint) -> *mut CLIENT;
        CLNTTCP_CREATE = clnttcp_create(
            *mut libc::sockaddr_in, u32, u32, *mut c_int, c_uint, c_uint) -> *mut CLIENT;
        CLNT_VC_CREATE = clnt_vc_create(c_int, *const netbuf, u32, u32, c_uint, c_uint) -> *mut CLIENT;
        RPCB_GETADDR = rpcb_getaddr(u32, u32, *const netconfig, *mut netbuf, *const c_char) -> bool_t;
        RPCB_SET = rpcb_set(u32, u32, *const netconfig, *const netbuf) -> bool_t;
        RPCB_UNSET = rpcb_unset(u32, u32, *const netconfig) -> bool_t;
        RPC_REG = rpc_reg(u32, u32, u32, registered_t, XdrProc, XdrProc, *mut c_char) -> c_int;
        SVC_CREATE = svc_create(dispatch_t, u32, u32, *const c_char) -> c_int;
        SVC_TP_CREATE = svc_tp_create(dispatch_t, u32, u32, *const netconfig) -> *mut SVCXPRT;
        SVCTCP_CREATE = svctcp_create(c_int, c_uint, c_uint) -> *mut SVCXPRT;
        SVC_EXIT = svc_exit();
        SVC_REG = svc_reg(*mut SVCXPRT, u32, u32, dispatch_t, *const netconfig) -> bool_t;
        SVC_REGISTER = svc_register(*mut SVCXPRT, c_ulong, c_ulong, dispatch_t, c_int) -> bool_t;
        SVC_UNREG = svc_unreg(u32, u32);
        SVC_UNREGISTER = svc_unregister(c_ulong, c_ulong);
        SVC_TLI_CREATE = svc_tli_create(
            c_int, *const netconfig, *const t_bind, c_uint, c_uint) -> *mut SVCXPRT;
        XPRT_REGISTER = xprt_register(*mut SVCXPRT);
        XPRT_UNREGISTER = xprt_unregister(*mut SVCXPRT);
        CLNT_SPERROR = clnt_sperror(*mut CLIENT, *const c_char) -> *mut c_char;
        CLNT_SPCREATEERROR = clnt_spcreateerror(*const c_char) -> *mut c_char;
    }
}
