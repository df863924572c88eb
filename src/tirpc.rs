//! libtirpc's side of the boundary: its structures, its constants, and what it records about creations that failed.
//!
//! Owned here: the `#[repr(C)]` twins of the structures in `/usr/include/tirpc`, each with its size and offsets
//! asserted at compile time (x86-64, libtirpc.so.3), and the constants that those headers define. The words are libtirpc's
//! own, so that a reader can lay its headers beside this file.
//!
//! Left to other modules: [`library()`] finds libtirpc's functions and variables; [`netid`] knows the netids "rdma" and "rdma6"
//! and their addresses; [`interpose`] holds the functions that stand in front of libtirpc's; [`client`] and `transport` are the
//! two vtables, and [`server`] creates the transports; `lending` says what they leave in the program's memory, and `auth` for
//! which parts of a call its AUTH must not be shared.
//!
//! Invariant: data symbols (`svc_pollfd`, `svc_max_pollfd`, `svc_fdset`) stay libtirpc's own objects: programs copy-relocate
//! them.
#![allow(unsafe_code)]
#![allow(non_camel_case_types, clippy::upper_case_acronyms)]

use std::ffi::{c_char, c_int, c_uint, c_ushort, c_void};
use std::mem::offset_of;
use std::ptr::{null, null_mut};

use crate::error::{Error, Kind, clnt_stat};
use crate::per_thread::{self, Owned};
use crate::xdr::{XDR, XdrProc};
use crate::{ffi, log_error};

pub mod adapters;
mod auth;
mod bare;
mod beside;
pub mod callback;
pub mod client;
mod handover;
mod idle;
pub mod interpose;
mod jobs;
mod left;
mod lending;
pub mod library;
pub mod netid;
mod programs;
mod progress;
mod run;
mod seat;
pub mod server;
mod sniff;
mod threads;
mod transport;
mod workers;

use library::createerr;
pub use library::{library, real};

/// `bool_t`.
pub type bool_t = c_int;
/// A program number.
pub type rpcprog_t = u32;
/// A version of a program.
pub type rpcvers_t = u32;
/// `TRUE`.
pub const TRUE: bool_t = 1;

/// `struct netbuf`: a transport address.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct netbuf {
    pub maxlen: c_uint,
    pub len: c_uint,
    pub buf: *mut c_void,
}

/// `struct t_bind`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct t_bind {
    pub addr: netbuf,
    pub qlen: c_uint,
}

/// `struct netconfig`: one transport of the machine.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct netconfig {
    pub nc_netid: *mut c_char,
    pub nc_semantics: libc::c_ulong,
    pub nc_flag: libc::c_ulong,
    pub nc_protofmly: *mut c_char,
    pub nc_proto: *mut c_char,
    pub nc_device: *mut c_char,
    pub nc_nlookups: libc::c_ulong,
    pub nc_lookups: *mut *mut c_char,
    pub nc_unused: [libc::c_ulong; 9],
}

/// `struct __rpc_sockinfo`: what socket(2) wants to know about a netid.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct __rpc_sockinfo {
    pub si_af: c_int,
    pub si_proto: c_int,
    pub si_socktype: c_int,
    pub si_alen: c_int,
}

/// `struct opaque_auth`: a credential or a verifier.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct opaque_auth {
    pub oa_flavor: c_int,
    pub oa_base: *mut c_char,
    pub oa_length: c_uint,
}

/// `AUTH`: a client's authenticator.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct AUTH {
    pub ah_cred: opaque_auth,
    pub ah_verf: opaque_auth,
    pub ah_key: [u8; 8],
    pub ah_ops: *const auth_ops,
    pub ah_private: *mut c_void,
}

/// `struct auth_ops`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct auth_ops {
    pub ah_nextverf: Option<unsafe extern "C" fn(*mut AUTH)>,
    pub ah_marshal: Option<unsafe extern "C" fn(*mut AUTH, *mut XDR) -> bool_t>,
    pub ah_validate: Option<unsafe extern "C" fn(*mut AUTH, *mut opaque_auth) -> bool_t>,
    pub ah_refresh: Option<unsafe extern "C" fn(*mut AUTH, *mut c_void) -> bool_t>,
    pub ah_destroy: Option<unsafe extern "C" fn(*mut AUTH)>,
    pub ah_wrap: Option<unsafe extern "C-unwind" fn(*mut AUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t>,
    pub ah_unwrap: Option<unsafe extern "C-unwind" fn(*mut AUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t>,
}

/// `CLIENT`: a client handle.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct CLIENT {
    pub cl_auth: *mut AUTH,
    pub cl_ops: *const clnt_ops,
    pub cl_private: *mut c_void,
    pub cl_netid: *mut c_char,
    pub cl_tp: *mut c_char,
}

/// `struct clnt_ops`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct clnt_ops {
    /// The calling thread may be cancelled in here.
    pub cl_call: Option<
        unsafe extern "C-unwind" fn(
            *mut CLIENT,
            u32,
            XdrProc,
            *mut c_void,
            XdrProc,
            *mut c_void,
            libc::timeval,
        ) -> c_uint,
    >,
    pub cl_abort: Option<unsafe extern "C" fn(*mut CLIENT)>,
    pub cl_geterr: Option<unsafe extern "C" fn(*mut CLIENT, *mut rpc_err)>,
    pub cl_freeres: Option<unsafe extern "C-unwind" fn(*mut CLIENT, XdrProc, *mut c_void) -> bool_t>,
    pub cl_destroy: Option<unsafe extern "C" fn(*mut CLIENT)>,
    pub cl_control: Option<unsafe extern "C" fn(*mut CLIENT, c_uint, *mut c_void) -> bool_t>,
}

/// `struct rpc_err`: the outcome of the last call.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct rpc_err {
    pub re_status: c_uint,
    pub ru: rpc_err_ru,
}

/// The union in [`rpc_err`].
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union rpc_err_ru {
    pub re_errno: c_int,
    pub re_why: c_uint,
    pub re_vers: [u32; 2],
    pub re_lb: [i32; 2],
}

impl rpc_err {
    /// An outcome without details, or with an errno.
    pub const fn new(status: u32, errno: c_int) -> rpc_err {
        rpc_err { re_status: status, ru: rpc_err_ru { re_lb: [errno, 0] } }
    }
}

/// `struct rpc_createerr`: why the last creation of this thread failed.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct rpc_createerr {
    pub cf_stat: c_uint,
    pub cf_error: rpc_err,
}

/// `SVCXPRT`: a server's transport.
#[repr(C)]
#[allow(missing_docs)]
pub struct SVCXPRT {
    pub xp_fd: c_int,
    pub xp_port: c_ushort,
    pub xp_ops: *const xp_ops,
    pub xp_addrlen: c_int,
    pub xp_raddr: libc::sockaddr_in6,
    pub xp_ops2: *const xp_ops2,
    pub xp_tp: *mut c_char,
    pub xp_netid: *mut c_char,
    pub xp_ltaddr: netbuf,
    pub xp_rtaddr: netbuf,
    pub xp_verf: opaque_auth,
    pub xp_p1: *mut c_void,
    pub xp_p2: *mut c_void,
    pub xp_p3: *mut c_void,
    pub xp_type: c_int,
}

/// `struct xp_ops`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct xp_ops {
    pub xp_recv: Option<unsafe extern "C-unwind" fn(*mut SVCXPRT, *mut rpc_msg) -> bool_t>,
    pub xp_stat: Option<unsafe extern "C" fn(*mut SVCXPRT) -> c_uint>,
    pub xp_getargs: Option<unsafe extern "C-unwind" fn(*mut SVCXPRT, XdrProc, *mut c_void) -> bool_t>,
    pub xp_reply: Option<unsafe extern "C-unwind" fn(*mut SVCXPRT, *mut rpc_msg) -> bool_t>,
    pub xp_freeargs: Option<unsafe extern "C-unwind" fn(*mut SVCXPRT, XdrProc, *mut c_void) -> bool_t>,
    pub xp_destroy: Option<unsafe extern "C" fn(*mut SVCXPRT)>,
}

/// `struct xp_ops2`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct xp_ops2 {
    pub xp_control: Option<unsafe extern "C" fn(*mut SVCXPRT, c_uint, *mut c_void) -> bool_t>,
}

/// `SVCXPRT_EXT`: what `xp_p3` must point to; `_gss_authenticate` writes it unconditionally.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct SVCXPRT_EXT {
    pub flags: c_int,
    pub xp_auth: SVCAUTH,
}

/// `SVCAUTH`: a server's authenticator of one transport.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct SVCAUTH {
    pub svc_ah_ops: *const svc_auth_ops,
    pub svc_ah_private: *mut c_void,
}

/// `struct svc_auth_ops`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct svc_auth_ops {
    pub svc_ah_wrap:
        Option<unsafe extern "C-unwind" fn(*mut SVCAUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t>,
    pub svc_ah_unwrap:
        Option<unsafe extern "C-unwind" fn(*mut SVCAUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t>,
    pub svc_ah_destroy: Option<unsafe extern "C" fn(*mut SVCAUTH) -> bool_t>,
}

/// `struct svc_req`: what a dispatch routine is told about a request.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct svc_req {
    pub rq_prog: u32,
    pub rq_vers: u32,
    pub rq_proc: u32,
    pub rq_cred: opaque_auth,
    pub rq_clntcred: *mut c_void,
    pub rq_xprt: *mut SVCXPRT,
    pub rq_clntname: *mut c_char,
    pub rq_svcname: *mut c_char,
}

/// `struct rpc_msg`: a call or a reply.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct rpc_msg {
    pub rm_xid: u32,
    pub rm_direction: c_uint,
    pub ru: rpc_msg_ru,
}

/// The union in [`rpc_msg`].
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union rpc_msg_ru {
    pub rm_call: call_body,
    pub rm_reply: reply_body,
}

/// `struct call_body`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct call_body {
    pub cb_rpcvers: u32,
    pub cb_prog: u32,
    pub cb_vers: u32,
    pub cb_proc: u32,
    pub cb_cred: opaque_auth,
    pub cb_verf: opaque_auth,
}

/// `struct reply_body`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct reply_body {
    pub rp_stat: c_uint,
    pub ru: reply_body_ru,
}

/// The union in [`reply_body`].
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union reply_body_ru {
    pub rp_ar: accepted_reply,
    pub rp_dr: rejected_reply,
}

/// `struct accepted_reply`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct accepted_reply {
    pub ar_verf: opaque_auth,
    pub ar_stat: c_uint,
    pub ru: accepted_reply_ru,
}

/// The union in [`accepted_reply`].
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union accepted_reply_ru {
    pub ar_vers: [u32; 2],
    pub ar_results: ar_results,
}

/// `ar_results` of [`accepted_reply`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ar_results {
    pub r#where: *mut c_char,
    pub r#proc: XdrProc,
}

/// `struct rejected_reply`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct rejected_reply {
    pub rj_stat: c_uint,
    pub ru: rejected_reply_ru,
}

/// The union in [`rejected_reply`].
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union rejected_reply_ru {
    pub rj_vers: [u32; 2],
    pub rj_why: c_uint,
}

/// `RPCB`: one mapping of rpcbind.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct rpcb {
    pub r_prog: u32,
    pub r_vers: u32,
    pub r_netid: *mut c_char,
    pub r_addr: *mut c_char,
    pub r_owner: *mut c_char,
}

/// A dispatch routine.
pub type dispatch_t = Option<unsafe extern "C" fn(*mut svc_req, *mut SVCXPRT)>;

/// A procedure of `rpc_reg`.
pub type registered_t = Option<unsafe extern "C" fn(*mut c_char) -> *mut c_char>;

/// Direction and status words of `struct rpc_msg` (`enum msg_type`, `reply_stat`, `accept_stat`).
#[allow(missing_docs)]
pub mod msg {
    pub const CALL: u32 = 0;
    pub const REPLY: u32 = 1;
    pub const MSG_ACCEPTED: u32 = 0;
    /// `accept_stat` SUCCESS.
    pub const SUCCESS: u32 = 0;
    pub const RPC_MSG_VERSION: u32 = 2;
}

/// The header of a successful accepted reply with an empty verifier, after its XID (RFC 5531 §9): direction, reply_stat, flavor
/// and length of the verifier, accept_stat.
pub const PLAIN_REPLY: [u8; 20] = {
    let mut words = [0; 20];
    words[3] = msg::REPLY as u8;
    words
};

/// `enum auth_stat`, the values that we report or compare.
#[allow(missing_docs)]
pub mod auth_stat {
    pub const AUTH_OK: u32 = 0;
    pub const AUTH_INVALIDRESP: u32 = 6;
    /// Flavour numbers.
    pub const AUTH_NONE: i32 = 0;
    pub const AUTH_SYS: i32 = 1;
    pub const AUTH_SHORT: i32 = 2;
    pub const RPCSEC_GSS: i32 = 6;
    pub const MAX_AUTH_BYTES: usize = 400;
}

/// `enum xprt_stat`.
#[allow(missing_docs)]
pub mod xprt_stat {
    pub const XPRT_DIED: u32 = 0;
    pub const XPRT_MOREREQS: u32 = 1;
    pub const XPRT_IDLE: u32 = 2;
}

/// Requests of `clnt_control` and `SVC_CONTROL`.
#[allow(missing_docs)]
pub mod control {
    pub const CLSET_TIMEOUT: u32 = 1;
    pub const CLGET_TIMEOUT: u32 = 2;
    pub const CLGET_SERVER_ADDR: u32 = 3;
    pub const CLGET_FD: u32 = 6;
    pub const CLGET_SVC_ADDR: u32 = 7;
    pub const CLSET_FD_CLOSE: u32 = 8;
    pub const CLSET_FD_NCLOSE: u32 = 9;
    pub const CLGET_XID: u32 = 10;
    pub const CLSET_XID: u32 = 11;
    pub const CLGET_VERS: u32 = 12;
    pub const CLSET_VERS: u32 = 13;
    pub const CLGET_PROG: u32 = 14;
    pub const CLSET_PROG: u32 = 15;
}

/// Semantics and flags of `struct netconfig`.
#[allow(missing_docs)]
pub mod nc {
    pub const NC_TPI_COTS_ORD: u64 = 3;
    pub const NC_NOFLAG: u64 = 0;
    pub const NC_VISIBLE: u64 = 1;
}

/// "Make the descriptor yourself": `RPC_ANYFD`.
pub const RPC_ANYFD: c_int = -1;

/// rpcbind's own program number.
pub const RPCBPROG: u32 = 100_000;

const _: () = {
    assert!(size_of::<netbuf>() == 16 && offset_of!(netbuf, buf) == 8);
    assert!(size_of::<t_bind>() == 24 && offset_of!(t_bind, qlen) == 16);
    assert!(size_of::<netconfig>() == 136);
    assert!(offset_of!(netconfig, nc_semantics) == 8 && offset_of!(netconfig, nc_flag) == 16);
    assert!(offset_of!(netconfig, nc_protofmly) == 24 && offset_of!(netconfig, nc_proto) == 32);
    assert!(offset_of!(netconfig, nc_device) == 40 && offset_of!(netconfig, nc_nlookups) == 48);
    assert!(offset_of!(netconfig, nc_lookups) == 56 && offset_of!(netconfig, nc_unused) == 64);
    assert!(size_of::<__rpc_sockinfo>() == 16 && offset_of!(__rpc_sockinfo, si_socktype) == 8);
    assert!(size_of::<opaque_auth>() == 24 && offset_of!(opaque_auth, oa_base) == 8);
    assert!(offset_of!(opaque_auth, oa_length) == 16);
    assert!(size_of::<AUTH>() == 72 && offset_of!(AUTH, ah_verf) == 24 && offset_of!(AUTH, ah_key) == 48);
    assert!(offset_of!(AUTH, ah_ops) == 56 && offset_of!(AUTH, ah_private) == 64);
    assert!(size_of::<auth_ops>() == 56 && offset_of!(auth_ops, ah_wrap) == 40);
    assert!(size_of::<CLIENT>() == 40 && offset_of!(CLIENT, cl_ops) == 8 && offset_of!(CLIENT, cl_tp) == 32);
    assert!(size_of::<clnt_ops>() == 48 && offset_of!(clnt_ops, cl_control) == 40);
    assert!(size_of::<rpc_err>() == 12 && offset_of!(rpc_err, ru) == 4);
    assert!(size_of::<rpc_createerr>() == 16 && offset_of!(rpc_createerr, cf_error) == 4);
    assert!(size_of::<SVCXPRT>() == 160);
    assert!(offset_of!(SVCXPRT, xp_port) == 4 && offset_of!(SVCXPRT, xp_ops) == 8);
    assert!(offset_of!(SVCXPRT, xp_addrlen) == 16 && offset_of!(SVCXPRT, xp_raddr) == 20);
    assert!(offset_of!(SVCXPRT, xp_ops2) == 48 && offset_of!(SVCXPRT, xp_tp) == 56);
    assert!(offset_of!(SVCXPRT, xp_netid) == 64 && offset_of!(SVCXPRT, xp_ltaddr) == 72);
    assert!(offset_of!(SVCXPRT, xp_rtaddr) == 88 && offset_of!(SVCXPRT, xp_verf) == 104);
    assert!(offset_of!(SVCXPRT, xp_p1) == 128 && offset_of!(SVCXPRT, xp_p3) == 144);
    assert!(offset_of!(SVCXPRT, xp_type) == 152);
    assert!(size_of::<xp_ops>() == 48 && offset_of!(xp_ops, xp_destroy) == 40);
    assert!(size_of::<xp_ops2>() == 8);
    assert!(size_of::<SVCXPRT_EXT>() == 24 && offset_of!(SVCXPRT_EXT, xp_auth) == 8);
    assert!(size_of::<SVCAUTH>() == 16 && size_of::<svc_auth_ops>() == 24);
    assert!(size_of::<svc_req>() == 72 && offset_of!(svc_req, rq_cred) == 16);
    assert!(offset_of!(svc_req, rq_xprt) == 48 && offset_of!(svc_req, rq_svcname) == 64);
    assert!(size_of::<rpc_msg>() == 72 && offset_of!(rpc_msg, ru) == 8);
    assert!(size_of::<call_body>() == 64 && offset_of!(call_body, cb_verf) == 40);
    assert!(size_of::<reply_body>() == 56 && offset_of!(reply_body, ru) == 8);
    assert!(size_of::<accepted_reply>() == 48 && offset_of!(accepted_reply, ru) == 32);
    assert!(size_of::<rejected_reply>() == 12 && offset_of!(rejected_reply, ru) == 4);
    assert!(size_of::<rpcb>() == 32);
};

/// Records why a creation failed: the status in `*__rpc_createerr()` for every reader, the text for [`creation_explanation`].
pub fn creation_failed(error: &Error) {
    let inner = match error.kind() {
        // Printed as "Port mapper failure - " followed by the text of this status.
        Kind::Rpcbind => clnt_stat::SYSTEMERROR,
        _ => error.clnt_stat(),
    };
    let why = rpc_createerr { cf_stat: error.clnt_stat(), cf_error: rpc_err::new(inner, error.errno()) };
    if let Some(place) = createerr() {
        // SAFETY: only this thread writes it.
        unsafe { place.write(why) };
    }
    // After this kind of failure libtirpc goes on to the next netid and restores the status of the previous failure. So the text
    // is restored too.
    let before = per_thread::take(&EXPLANATION).filter(|_| error.kind() == Kind::NoAddress);
    let text = before.unwrap_or_else(|| (why.cf_stat, error.text().to_owned()));
    let _ = per_thread::put(&EXPLANATION, text);
}

/// What this thread's latest creation recorded, in libtirpc and here, for [`creation_record`] to put back after creations of our
/// own.
pub fn creation_recorded() -> (Option<rpc_createerr>, Option<(u32, String)>) {
    // SAFETY: only this thread writes it.
    let status = createerr().map(|place| unsafe { place.read() });
    (status, per_thread::get(&EXPLANATION))
}

/// Puts back what [`creation_recorded`] returned.
pub fn creation_record((status, text): (Option<rpc_createerr>, Option<(u32, String)>)) {
    if let (Some(place), Some(status)) = (createerr(), status) {
        // SAFETY: only this thread writes it.
        unsafe { place.write(status) };
    }
    creation_started();
    if let Some(text) = text {
        let _ = per_thread::put(&EXPLANATION, text);
    }
}

/// Adds a text to what libtirpc itself has recorded in `*__rpc_createerr()`.
pub fn creation_explained(text: String) {
    // SAFETY: only this thread writes it.
    let status = createerr().map_or(clnt_stat::SUCCESS, |place| unsafe { place.read() }.cf_stat);
    let _ = per_thread::put(&EXPLANATION, (status, text));
}

/// Forgets the text of a creation that failed.
pub fn creation_started() {
    per_thread::take(&EXPLANATION);
}

/// Our text for what `*__rpc_createerr()` says now, if it is still what we recorded.
pub fn creation_explanation() -> Option<String> {
    let explanation = per_thread::get(&EXPLANATION)?;
    // SAFETY: only this thread writes it.
    let stays = createerr().is_none_or(|place| unsafe { place.read() }.cf_stat == explanation.0);
    stays.then_some(explanation.1)
}

thread_local! {
    static EXPLANATION: Owned<(u32, String)> = const { Owned::new() };
}

/// libtirpc's own `xprt_register`, for our transports; the one in `interpose` watches for libtirpc's.
///
/// # Errors
/// When libtirpc cannot be found.
///
/// # Safety
/// As for libtirpc's function.
pub unsafe fn xprt_register(xprt: *mut SVCXPRT) -> Result<(), Error> {
    let real = real::XPRT_REGISTER.get()?;
    // SAFETY: a live transport (contract).
    let fd = unsafe { (*xprt).xp_fd };
    run::register(fd, || {
        // SAFETY: by the contract.
        unsafe { real(xprt) };
        true
    });
    Ok(())
}

/// The same, but only beside other transports; returns whether it registered this one. As the only transport it would keep
/// svc_run going after svc_exit(3).
///
/// # Errors
/// As [`xprt_register`].
///
/// # Safety
/// As for libtirpc's function.
unsafe fn xprt_register_beside(xprt: *mut SVCXPRT) -> Result<bool, Error> {
    let real = real::XPRT_REGISTER.get()?;
    // SAFETY: a live transport (contract).
    let fd = unsafe { (*xprt).xp_fd };
    Ok(run::register(fd, || {
        let beside = !nothing_is_registered();
        if beside {
            // SAFETY: by the contract.
            unsafe { real(xprt) };
        }
        beside
    }))
}

/// libtirpc's own `xprt_unregister`, for transports of ours and for those that we replace.
///
/// # Safety
/// As for libtirpc's function.
pub unsafe fn xprt_unregister(xprt: *mut SVCXPRT) {
    match real::XPRT_UNREGISTER.get() {
        Ok(real) => {
            // SAFETY: NULL or alive (contract).
            let fd = unsafe { ffi::reference(xprt) }.map_or(-1, |made| made.xp_fd);
            // SAFETY: by the contract.
            run::unregister(fd, || unsafe { real(xprt) });
        }
        Err(error) => log_error!("{error}"),
    }
}

/// Destroys a transport of any kind, as the macro of libtirpc's headers does.
///
/// # Safety
/// `xprt` is a live transport.
unsafe fn svc_destroy(xprt: *mut SVCXPRT) {
    // SAFETY: alive (contract).
    let ops = unsafe { (*xprt).xp_ops };
    // SAFETY: operations are static, whatever the kind of transport.
    if let Some(destroy) = unsafe { (*ops).xp_destroy } {
        // SAFETY: the transport's own operation.
        unsafe { destroy(xprt) };
    }
}

/// The descriptors that libtirpc's loop polls.
///
/// # Safety
/// No other thread registers transports while the iterator lives, nor does this one. libtirpc's own loop, which reads the set in
/// the same way, needs the same.
unsafe fn polled() -> impl Iterator<Item = c_int> {
    let (set, count) = polled_table();
    // SAFETY: libtirpc's array has `count` entries; it changes only in xprt_register (contract).
    (0..count).map(move |index| unsafe { set.wrapping_add(index).read() }.fd).filter(|fd| *fd >= 0)
}

/// libtirpc's `svc_pollfd` and its number of entries. Empty without libtirpc: then nothing is registered with it either.
fn polled_table() -> (*const libc::pollfd, usize) {
    let Ok(library) = library() else { return (null(), 0) };
    // SAFETY: libtirpc's own variable, read as its users read it.
    let count = unsafe { *library.svc_max_pollfd };
    // SAFETY: as above.
    let set = unsafe { *library.svc_pollfd }.cast_const();
    (set, if set.is_null() { 0 } else { usize::try_from(count).unwrap_or(0) })
}

/// Whether libtirpc's loop polls nothing at all, not even a listener: the loop then ends, or svc_exit(3) has ended it.
fn nothing_is_registered() -> bool {
    // SAFETY: libtirpc's own variable, read as its users read it.
    library().map_or(0, |library| unsafe { *library.svc_max_pollfd }) == 0
}

/// Whether an address lies in libtirpc's shared object.
pub fn is_libtirpcs(address: *const c_void) -> bool {
    let Ok(known) = real::XPRT_REGISTER.get() else { return false };
    object(address).is_some_and(|base| Some(base) == object(known as *const c_void))
}

/// The base address of the object that holds `address`.
fn object(address: *const c_void) -> Option<usize> {
    let mut info =
        libc::Dl_info { dli_fname: null(), dli_fbase: null_mut(), dli_sname: null(), dli_saddr: null_mut() };
    // SAFETY: dladdr accepts any address; info is writable.
    let found = unsafe { libc::dladdr(address, &mut info) };
    if found == 0 { None } else { Some(info.dli_fbase.addr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::library::Real;
    use std::ffi::CStr;

    #[test]
    fn a_name_that_libtirpc_lacks_is_an_error_and_no_crash() {
        // SAFETY: never called; the look-up fails.
        static MISSING: Real<unsafe extern "C" fn()> = unsafe { Real::new(c"clnt_no_such_function") };
        let error = MISSING.get().expect_err("no such function");
        assert!(error.text().contains("clnt_no_such_function"));
    }

    #[test]
    fn an_explanation_lasts_as_long_as_the_status_that_it_explains() {
        creation_failed(&Error::new(Kind::NotRegistered, "nothing there"));
        assert_eq!(creation_explanation().as_deref(), Some("nothing there"));
        let place = createerr().expect("libtirpc is linked");
        // SAFETY: this thread's own structure.
        unsafe { (*place).cf_stat = clnt_stat::TIMEDOUT };
        assert_eq!(creation_explanation(), None);
        creation_failed(&Error::new(Kind::NoAddress, "no IPv6"));
        // SAFETY: as above.
        unsafe { (*place).cf_stat = clnt_stat::PROGNOTREGISTERED };
        assert_eq!(creation_explanation().as_deref(), Some("nothing there"));
        creation_started();
        assert_eq!(creation_explanation(), None);
    }

    #[test]
    fn the_real_function_is_libtirpcs_and_not_glibcs_old_one() {
        let function = real::CLNT_TLI_CREATE.get().expect("libtirpc is linked");
        // SAFETY: all zero is a valid Dl_info.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: dladdr takes any address; info is writable.
        assert_ne!(unsafe { libc::dladdr(function as *const c_void, &mut info) }, 0);
        // SAFETY: dladdr succeeded, so dli_fname names the object.
        let object = unsafe { CStr::from_ptr(info.dli_fname) };
        assert!(object.to_string_lossy().contains("libtirpc.so.3"), "{object:?}");
    }
}
