//! This library's own C API: the source of `include/rpcrdma.h`.
//!
//! Owned here: the functions that libtirpc has no name for. What a program reaches under libtirpc's names is in
//! `tirpc::interpose`, and the two constructors here end up there too. The doc comments are written for C programmers:
//! cbindgen copies them into the header, which is committed and which a test compares (`tests/header.rs`).
//!
//! Invariants:
//! - Raw pointers in every signature; NULL is an error and not a crash; out-parameters are written on success only. Each
//!   function starts with `guard`.
//! - Every failure is one that C programs know how to print: a constructor returns NULL and `clnt_spcreateerror` says
//!   why, for a server's constructor too.
//! - What is here stays: names, values and the order of `struct rpcrdma_stats` are the ABI.
#![allow(unsafe_code)]
#![allow(non_camel_case_types)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::ptr::null;
use std::sync::Arc;

use libc::timeval;

use crate::binding::{Stop, Walk, Walked, Walker};
use crate::connection::characteristics::Wish;
use crate::driver::Peer;
use crate::error::{Error, Kind};
use crate::ffi::{OrMinusOne, guard, guard_in_steps_cancellable};
use crate::memory::registered;
use crate::socket::Sockaddr;
use crate::tirpc::interpose::{clnt_tli_create, creation, svc_tli_create};
use crate::tirpc::netid::Netid;
use crate::tirpc::{
    CLIENT, RPC_ANYFD, RPCBPROG, SVCXPRT, bool_t, callback, client, creation_explanation, creation_failed,
    creation_started, netbuf, rpcprog_t, rpcvers_t, server, svc_req,
};
use crate::{config, driver, socket, stats};

/// clnt_control: sets the longest reply that later calls of a CLIENT make room for, in bytes of results.
/// Takes a pointer to size_t, of at most 1 GiB. The default is the setting max_reply: 16 MiB, or over an adapter 256 KiB
/// for a program with bindings.
pub const CLSET_RDMA_MAXREPLY: c_uint = 0x52444d01;

/// clnt_control: gets the longest reply that calls of a CLIENT make room for, as a size_t. FALSE means that the
/// CLIENT does not use RDMA.
pub const CLGET_RDMA_MAXREPLY: c_uint = 0x52444d02;

/// clnt_control: sets how many calls on this connection may be outstanding at a time, up to what the peer grants;
/// with a CLIENT of rpcrdma_clnt_reverse(), how many callbacks. Takes a pointer to unsigned, 1 to 4096. The
/// defaults are the settings credits and reverse_credits. Over an adapter, the Receives that it has room for limit
/// both directions together.
pub const CLSET_RDMA_CREDITS: c_uint = 0x52444d03;

/// clnt_control: gets the number that CLSET_RDMA_CREDITS sets, as now in force.
pub const CLGET_RDMA_CREDITS: c_uint = 0x52444d04;

/// clnt_control: sets how many callbacks this connection grants to its server, once a program is served. Takes a
/// pointer to unsigned, 1 to 4096. The default is the setting reverse_credits.
pub const CLSET_RDMA_REVERSE_CREDITS: c_uint = 0x52444d05;

/// clnt_control: gets the number that CLSET_RDMA_REVERSE_CREDITS sets, as now in force: 1 before a program is served.
pub const CLGET_RDMA_REVERSE_CREDITS: c_uint = 0x52444d06;

/// clnt_control: sets whether callbacks over this connection that do not fit in one Send may use chunks.
/// Takes a pointer to bool_t. The default is the setting reverse_chunks. Without chunks, longer callbacks fail at
/// the caller, and the end that serves callbacks answers any that has chunks with ERR_CHUNK (RFC 8167 section 5.3).
pub const CLSET_RDMA_REVERSE_CHUNKS: c_uint = 0x52444d07;

/// clnt_control: gets how many times the connection of this CLIENT has been established, as an unsigned. When the
/// number has grown, the server's program no longer knows its client: register with it again.
pub const CLGET_RDMA_CONNECTIONS: c_uint = 0x52444d08;

/// clnt_control: makes our own Receives longer, and tells the peer; see rpcrdma_clnt_peer(). Takes a pointer to
/// unsigned, in bytes: at least what the peer was told before, at most the setting max_inline. Fails in Version One.
pub const CLSET_RDMA_RECEIVE_SIZE: c_uint = 0x52444d09;

/// clnt_control: gets the size that the peer believes our Receives to have, as an unsigned.
pub const CLGET_RDMA_RECEIVE_SIZE: c_uint = 0x52444d0a;

/// SVC_CONTROL: sets how many calls an accepted connection grants to its client. Takes a pointer to unsigned, 1 to
/// 4096. The default is the setting credits.
pub const SVCSET_RDMA_CREDITS: c_uint = 0x52444d11;

/// SVC_CONTROL: gets the number that SVCSET_RDMA_CREDITS sets, as now in force.
pub const SVCGET_RDMA_CREDITS: c_uint = 0x52444d12;

/// What this process has done since it began; see rpcrdma_stats_get(). The counters only ever grow.
#[repr(C)]
pub struct rpcrdma_stats {
    /// Calls given to the transport by this process as a client.
    pub calls: u64,
    /// Replies that completed such a call.
    pub replies: u64,
    /// Requests handed to a program of this process as a server.
    pub served: u64,
    /// Payload bytes sent or received inside RDMA_MSG.
    pub bytes_inline: u64,
    /// Bytes moved by our RDMA Reads.
    pub bytes_read: u64,
    /// Bytes moved by our RDMA Writes.
    pub bytes_written: u64,
    /// Payload bytes copied in user space, beyond what the device does.
    pub bytes_copied: u64,
    /// Payload bytes copied out of a socket's read-ahead buffer; not part of `bytes_copied`.
    pub bytes_read_ahead: u64,
    /// Registrations of memory with a device, for a handle given to a peer or for a request of our own.
    pub registrations: u64,
    /// Handles that were invalidated, by us or by the peer.
    pub invalidations: u64,
    /// Sends posted.
    pub sends: u64,
    /// Receives completed.
    pub receives: u64,
    /// System calls on the data path.
    pub syscalls: u64,
    /// Connections established, both ends counted.
    pub connections: u64,
    /// Calls that had to wait for a credit.
    pub credits_waited: u64,
    /// RDMA_ERROR messages sent.
    pub errors_sent: u64,
    /// RDMA_ERROR messages received.
    pub errors_received: u64,
    /// Connections re-established for a CLIENT that had lost its connection.
    pub reconnects: u64,
    /// Clients that fell back from rdma to tcp.
    pub fallbacks: u64,
    /// Calls that timed out with their credit still out.
    pub orphans: u64,
    /// Chains of requests that were handed to an adapter, each with one doorbell.
    pub doorbells: u64,
    /// Memory windows bound, in such a chain: handles for memory that is already registered.
    pub binds: u64,
}

/// The version of the loaded library, such as "0.1.0". The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_version() -> *const c_char {
    guard(|| Ok(VERSION.as_ptr()))
}

/// cbindgen:ignore
///
/// For an rpcrdma-run of the same version: whether the settings in the environment and in the files are understood. If not,
/// `why` gets the reasons: at most `size` bytes of text including the final NUL, one line for each error.
///
/// # Safety
/// `why` is NULL or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_settings_check(why: *mut c_char, size: usize) -> bool_t {
    guard(|| {
        let lines: Vec<String> =
            config::check().iter().map(|error| error.text().replace('\0', " ")).collect();
        let text = lines.join("\n");
        if let Some(room) = size.checked_sub(1).filter(|_| !why.is_null()) {
            let length = text.len().min(room);
            // SAFETY: `why` has room for `length` bytes and one more, by the contract; the text is ours.
            unsafe { why.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length) };
            // SAFETY: as above.
            unsafe { why.wrapping_add(length).write(0) };
        }
        Ok(bool_t::from(lines.is_empty()))
    })
}

/// Copies the counters of this process to *stats. `size` is sizeof *stats as the program was compiled, so that the
/// program and the library need not be of the same age: counters that the library does not have become 0.
/// FALSE, and *stats untouched, for NULL or a size that is not a multiple of a counter's.
///
/// # Safety
/// `stats` is NULL or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_stats_get(stats: *mut rpcrdma_stats, size: usize) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        unsafe { hand_out("rpcrdma_stats_get", stats::snapshot(), stats.cast(), size) }?;
        Ok(1)
    })
}

/// Creates a CLIENT for a program at the RDMA listener `raddr`, as clnt_vc_create() does for TCP. It uses RDMA or
/// fails.
///
/// `fd` is a TCP socket, connected or not, on which nothing has been sent. It remains the caller's unless
/// clnt_control(CLSET_FD_CLOSE) gives it to the CLIENT. With RPC_ANYFD a socket is created, which belongs to the CLIENT.
/// `raddr` may be NULL if `fd` is connected. CLIENTs created on one socket share its connection. The buffer sizes have
/// no meaning over RDMA, and any value is accepted.
///
/// NULL on failure: clnt_pcreateerror() prints why.
///
/// # Safety
/// `raddr` is NULL or a netbuf whose buffer holds `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_rdma_create(
    fd: c_int,
    raddr: *const netbuf,
    prog: rpcprog_t,
    vers: rpcvers_t,
    sendsz: c_uint,
    recvsz: c_uint,
) -> *mut CLIENT {
    guard(|| {
        creation_started();
        let (netid, mut address) = creation(|| {
            config::get()?;
            if prog == RPCBPROG {
                return Err(Error::new(Kind::Invalid, "clnt_rdma_create: rpcbind is served over tcp only"));
            }
            if fd != RPC_ANYFD {
                tcp_socket("clnt_rdma_create", fd)?;
            }
            // SAFETY: by the contract.
            let wanted = unsafe { client::address_bytes(raddr) };
            let to = Sockaddr::parse(&wanted).or_else(|| socket::peer(fd)).ok_or_else(|| {
                Error::new(Kind::Invalid, "clnt_rdma_create: no internet address and no connected socket")
            })?;
            Ok((Netid::of_address(to), Sockaddr::from(to)))
        })?;
        let mut address = address.netbuf();
        // SAFETY: the entry is static, the address lives across the call, and `fd` is a socket or RPC_ANYFD.
        Ok(unsafe { clnt_tli_create(fd, netid.entry(), &mut address, prog, vers, sendsz, recvsz) })
    })
}

/// Creates a transport that serves RDMA, as svc_vc_create() does for TCP.
///
/// `fd` is a TCP socket. A bound one becomes a listener if it is not one yet; of a connected one, only that connection
/// is served, as under inetd. The socket belongs to the transport. With RPC_ANYFD an IPv4 socket is created on a port
/// chosen by the system. The transport's xp_netid is "rdma" or "rdma6"; svc_reg() with the netconfig of that netid
/// registers the service with rpcbind. The buffer sizes have no meaning over RDMA.
///
/// NULL on failure, and `fd` remains the caller's: clnt_spcreateerror() says why.
///
/// # Safety
/// Unless it fails, the caller gives up `fd`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_rdma_create(fd: c_int, sendsize: c_uint, recvsize: c_uint) -> *mut SVCXPRT {
    guard(|| {
        creation_started();
        let netid = creation(|| {
            config::get()?;
            if fd == RPC_ANYFD {
                return Ok(Netid::Rdma);
            }
            let local = tcp_socket("svc_rdma_create", fd)?;
            if socket::peer(fd).is_none() && !socket::listens(fd) {
                socket::listen(fd)?;
            }
            Ok(Netid::of_address(local))
        })?;
        // SAFETY: the entry is static; `fd` is a socket or RPC_ANYFD.
        let xprt = unsafe { svc_tli_create(fd, netid.entry(), null(), sendsize, recvsize) };
        if xprt.is_null() && creation_explanation().is_none() {
            // libtirpc's own part does not say why it failed.
            creation_failed(&Error::from(std::io::Error::last_os_error()));
        }
        Ok(xprt)
    })
}

/// Creates a CLIENT for callbacks to the client of an accepted connection; `xprt` is the transport that its requests
/// come with. The client's program must have said that it serves `prog`: calling one that does not may cost the
/// connection (RFC 8167 section 6). In Version Two a client says whether it takes callbacks, and a callback to one that
/// does not fails at once.
///
/// clnt_call() and the rest work as with any CLIENT, with AUTHs of any flavour. Calls may be made inside a dispatch
/// routine, between requests, and from other threads. While a call waits in the thread of the service loop, that
/// thread dispatches further requests of the same connection, because the client may have to make a call before it can
/// answer: dispatch routines that make callbacks must be ready to be entered again.
///
/// The CLIENT outlives the connection. A call that is outstanding when the connection breaks ends with RPC_CANTRECV.
/// From then until rpcrdma_clnt_rebind(), calls fail with RPC_CANTSEND in the thread of the service loop, and wait in
/// other threads, up to their timeout.
///
/// The longest reply is what fits in one Send; CLSET_RDMA_MAXREPLY makes room for more, with a Reply chunk, which Linux
/// peers cannot handle. NULL on failure: clnt_pcreateerror() prints why.
///
/// # Safety
/// `xprt` is NULL or a live transport.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_clnt_reverse(
    xprt: *mut SVCXPRT,
    prog: rpcprog_t,
    vers: rpcvers_t,
) -> *mut CLIENT {
    guard(|| {
        creation_started();
        creation(|| {
            // SAFETY: by the contract.
            let (connection, address) = unsafe { server::accepted(xprt) }?;
            client::reverse(connection, &server::HOOKS, address, prog, vers)
        })
    })
}

/// Moves a CLIENT of rpcrdma_clnt_reverse() to another accepted connection: the one over which its client has come
/// back, which only the program's own protocol can tell. Calls that wait for the client then proceed.
///
/// FALSE on failure: clnt_perror() prints why.
///
/// # Safety
/// `clnt` is NULL or a live CLIENT; `xprt` is NULL or a live transport.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_clnt_rebind(clnt: *mut CLIENT, xprt: *mut SVCXPRT) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let done = unsafe { server::accepted(xprt) }.and_then(|(connection, _)| {
            // SAFETY: by the contract.
            unsafe { client::rebind(clnt, connection) }
        });
        // SAFETY: by the contract.
        Ok(done.map_err(|error| unsafe { client::record(clnt, &error) }).is_ok().into())
    })
}

/// A dispatch routine, as for svc_register().
pub type rpcrdma_dispatch = Option<unsafe extern "C" fn(request: *mut svc_req, xprt: *mut SVCXPRT)>;

/// Serves a program to the server of this CLIENT's connection: the server's callbacks are passed to `dispatch`, as
/// svc_run() does in a server, and svc_getargs(), svc_sendreply() and the rest work as they do there. Call it before
/// telling the server that it may call back. A NULL `dispatch` ends the service: this function then waits until the
/// routine no longer runs, unless it is called inside a routine.
///
/// Callbacks are served by any thread that waits for a reply on the connection, by rpcrdma_clnt_poll(), and by
/// svc_run() (or the program's own loop over svc_pollfd) if this process, not a child of it, runs one. They are served
/// one at a time, but a callback that itself makes calls on the connection serves others while it waits. While a call
/// with RPCSEC_GSS waits, a callback cannot make another such call on the same connection. clnt_destroy() waits for a
/// callback that another thread serves on its connection. Inside a routine it waits for nothing: what is still under
/// way with the CLIENT goes on, and the last of it to end frees the CLIENT.
///
/// From now on the connection is kept up: when it is lost, whichever of these three serves next makes it anew.
/// CLGET_RDMA_CONNECTIONS shows that. The first call over a new connection is to procedure 0 of the CLIENT's program.
/// CLIENTs on one socket share the programs that are served.
///
/// FALSE on failure: clnt_perror() prints why.
///
/// # Safety
/// `clnt` is NULL or a live CLIENT; `dispatch` stays valid as long as the program is served.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_clnt_serve(
    clnt: *mut CLIENT,
    prog: rpcprog_t,
    vers: rpcvers_t,
    dispatch: rpcrdma_dispatch,
) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let done = unsafe { client::opened(clnt) }
            .and_then(|(connection, forward)| callback::serve(&connection, forward, prog, vers, dispatch));
        // SAFETY: by the contract.
        Ok(done.map_err(|error| unsafe { client::record(clnt, &error) }).is_ok().into())
    })
}

/// Waits for callbacks, for at most `timeout`, and serves those that have arrived. Returns how many it served: 0 if
/// none came, or as soon as a lost connection has been made anew (see CLGET_RDMA_CONNECTIONS). -1 if no program is
/// served, or if the connection was lost and could not be made anew in time: clnt_perror() prints why. Signal handlers
/// run during the wait, and do not end it.
///
/// # Safety
/// `clnt` is NULL or a live CLIENT.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rpcrdma_clnt_poll(clnt: *mut CLIENT, timeout: timeval) -> c_int {
    guard_in_steps_cancellable(|| {
        // SAFETY: by the contract.
        let served = unsafe { client::poll(clnt, timeout) };
        Ok(served.map_or(-1, |served| c_int::try_from(served).unwrap_or(c_int::MAX)))
    })
}

/// Serves as svc_run() does, with `threads` threads: the calling one, and others created for it. Requests of all transports
/// are served concurrently, including those of one connection over RDMA, up to its credits. Each request over RDMA has an
/// SVCXPRT of its own, which is valid until its routine returns or, if the routine does not reply, until the reply; the
/// latest 64 unanswered requests of a connection can be replied to in this way. Requests with RPCSEC_GSS are served one at
/// a time on each connection, and so are requests of each of libtirpc's own transports. Dispatch routines must lock what they
/// share; rpcgen's code must be made with -M, so that it does not return results in static memory.
///
/// Returns TRUE after svc_exit(), when all routines have returned. FALSE if it cannot begin: clnt_pcreateerror() prints why.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_svc_run(threads: c_uint) -> bool_t {
    guard(|| {
        // SAFETY: the caller's dispatch routines may run in several threads.
        match unsafe { server::run_in_threads(threads) } {
            Ok(()) => Ok(1),
            Err(error) => {
                creation_failed(&error);
                Ok(0)
            }
        }
    })
}

/// The peer has not said whether it takes callbacks.
pub const RPCRDMA_BACKWARD_UNKNOWN: u32 = 0;

/// The peer takes no callbacks.
pub const RPCRDMA_BACKWARD_NONE: u32 = 1;

/// The peer takes callbacks, or replies to its own, if they fit in one Send.
pub const RPCRDMA_BACKWARD_SIZE_LIMITED: u32 = 2;

/// The peer takes callbacks, or replies to its own, of any length.
pub const RPCRDMA_BACKWARD_GENERAL: u32 = 3;

/// A characteristic: the minimum size of each Receive, in bytes.
pub const RPCRDMA_RECEIVE_SIZE: u32 = 1;

/// A characteristic: whether replies may invalidate memory of the requester, 0 or 1.
pub const RPCRDMA_REMOTE_INVALIDATION: u32 = 2;

/// A characteristic: what the peer takes in the reverse direction, RPCRDMA_BACKWARD_UNKNOWN and so on.
pub const RPCRDMA_BACKWARD: u32 = 3;

/// The peer now has the value asked for.
pub const RPCRDMA_DONE: c_int = 1;

/// The peer has refused.
pub const RPCRDMA_REJECTED: c_int = 0;

/// The timeout has expired. The request stands: the peer may still answer it.
pub const RPCRDMA_PENDING: c_int = 2;

/// What is known of the other end of a connection; see rpcrdma_clnt_peer().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_peer {
    /// The version of RPC-over-RDMA: 1 or 2; 0 before one is agreed.
    pub version: u32,
    /// Whether the peer supports the transport characteristics: 1 no, 2 yes, 0 not known yet.
    pub extension: u32,
    /// The most bytes that one Send to the peer may have, header included.
    pub receive_size: u32,
    /// Whether replies to the peer may invalidate its memory.
    pub remote_invalidation: u32,
    /// What the peer takes in the reverse direction: RPCRDMA_BACKWARD_UNKNOWN and so on.
    pub backward: u32,
    /// How many times the peer has announced characteristics on this connection.
    pub updates: u32,
    /// The most bytes that one Send from the peer may have, as far as the peer knows.
    pub own_receive_size: u32,
}

impl From<&Peer> for rpcrdma_peer {
    fn from(peer: &Peer) -> rpcrdma_peer {
        rpcrdma_peer {
            version: peer.version.unwrap_or(0),
            extension: peer.extension.map_or(0, |known| 1 + u32::from(known)),
            receive_size: peer.endpoint.receive_size as u32,
            remote_invalidation: peer.endpoint.remote_invalidation.into(),
            backward: peer.endpoint.backward as u32,
            updates: peer.updates,
            own_receive_size: peer.own_receive_size as u32,
        }
    }
}

/// Copies to *peer what is known about the server of this CLIENT, or about the client that a CLIENT of
/// rpcrdma_clnt_reverse() calls back. Looks at what has arrived, but does not wait. `size` is sizeof *peer
/// as the program was compiled, as with rpcrdma_stats_get().
///
/// In Version One the numbers are those that were agreed when the connection was made, and `backward` is not
/// known. Before a version is agreed, almost nothing is known; creating the CLIENT waits for that, unless the
/// server is slow.
///
/// FALSE, and *peer untouched, for NULL, an invalid size, or a connection that is lost: clnt_perror() prints why.
///
/// # Safety
/// `clnt` is NULL or a live CLIENT; `peer` is NULL or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_clnt_peer(
    clnt: *mut CLIENT,
    peer: *mut rpcrdma_peer,
    size: usize,
) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let done = unsafe { client::peer(clnt) }.and_then(|known| {
            // SAFETY: by the contract.
            unsafe { hand_out("rpcrdma_clnt_peer", rpcrdma_peer::from(&known), peer, size) }
        });
        // SAFETY: by the contract.
        Ok(done.map_err(|error| unsafe { client::record(clnt, &error) }).is_ok().into())
    })
}

/// Copies to *peer what is known about the client of an accepted connection; `xprt` is the transport that its requests
/// come with. `size` is as with rpcrdma_clnt_peer(). FALSE, and *peer untouched, where that function fails, and for any other
/// SVCXPRT.
///
/// # Safety
/// `xprt` is NULL or a live transport; `peer` is NULL or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_svc_peer(
    xprt: *mut SVCXPRT,
    peer: *mut rpcrdma_peer,
    size: usize,
) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let (connection, _) = unsafe { server::accepted(xprt) }?;
        let known = rpcrdma_peer::from(&driver::peer_of(&connection)?);
        // SAFETY: by the contract.
        unsafe { hand_out("rpcrdma_svc_peer", known, peer, size) }?;
        Ok(1)
    })
}

/// Asks the peer to set the characteristic `which` (RPCRDMA_RECEIVE_SIZE and so on) to `value`. Waits for the outcome,
/// for at most `timeout`, and returns it: RPCRDMA_DONE, RPCRDMA_REJECTED, or RPCRDMA_PENDING when the timeout has
/// expired. The peer may still comply then: rpcrdma_clnt_peer() shows whether it has, and repeating the request resumes
/// the wait. A connection has one request outstanding at a time.
///
/// -1 if the connection speaks Version One or is lost, if an earlier request is not settled, if the peer does not support
/// the extension, or if there is no such characteristic or value: clnt_perror() prints why.
///
/// # Safety
/// `clnt` is NULL or a live CLIENT.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rpcrdma_clnt_request(
    clnt: *mut CLIENT,
    which: u32,
    value: u32,
    timeout: timeval,
) -> c_int {
    guard_in_steps_cancellable(|| {
        // SAFETY: by the contract.
        Ok(OrMinusOne(match unsafe { client::request(clnt, which, value, timeout) }? {
            Wish::Done => RPCRDMA_DONE,
            Wish::Rejected => RPCRDMA_REJECTED,
            Wish::Asked | Wish::Pending => RPCRDMA_PENDING,
        }))
    })
    .0
}

/// The routine that rpcrdma_clnt_on_update() registers.
pub type rpcrdma_told =
    Option<unsafe extern "C-unwind" fn(clnt: *mut CLIENT, peer: *const rpcrdma_peer, closure: *mut c_void)>;

/// Has `told` called when the peer has announced characteristics since the last time, or since this function was
/// called. `told` runs in the thread in which a clnt_call(), rpcrdma_clnt_poll() or rpcrdma_clnt_request() with this
/// CLIENT ends, just before that returns. It may make calls, but must not destroy the CLIENT. A NULL `told` ends this.
///
/// FALSE for a CLIENT of another transport.
///
/// # Safety
/// `clnt` is NULL or a live CLIENT; `told` and `closure` stay valid until this function or clnt_destroy() is called next.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_clnt_on_update(
    clnt: *mut CLIENT,
    told: rpcrdma_told,
    closure: *mut c_void,
) -> bool_t {
    guard(|| {
        let closure = closure.expose_provenance();
        let told = told.map(|told| -> client::Told {
            Arc::new(move |clnt, peer| {
                let closure = std::ptr::with_exposed_provenance_mut(closure);
                // SAFETY: the program's function and closure, as they were given; the handle is alive.
                unsafe { told(clnt, &rpcrdma_peer::from(peer), closure) };
            })
        });
        // SAFETY: by the contract.
        unsafe { client::on_update(clnt, told) }?;
        Ok(1)
    })
}

/// Registers memory of the program: what an RPC encodes from it is sent from where it lies, without being copied
/// first.
///
/// Whatever an xdrproc encodes from registered memory must stay valid and unchanged until clnt_call() or
/// svc_sendreply() returns, so it must be nothing that the xdrproc itself frees or reuses. Results that lie in
/// registered memory are received in place too: see rpcrdma_binding_register(). The memory still belongs to the
/// program; unregister it before it is freed.
///
/// FALSE for NULL, a length of 0, or memory that overlaps what is registered already.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_mem_register(address: *const c_void, length: usize) -> bool_t {
    guard(|| Ok(registered::add(address.addr(), length).into()))
}

/// Ends a registration; `address` is where it begins. Outstanding calls are not affected. FALSE if there is no such
/// registration.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_mem_unregister(address: *const c_void) -> bool_t {
    guard(|| Ok(registered::remove(address.addr()).into()))
}

/// Gets the argument of the request being dispatched that came in a Read chunk of its own, where it lies in
/// memory of this library. A dispatch routine that sets the pointer of its counted opaque to *address before
/// svc_getargs() gets the argument without a copy. It may only be read, and only until the reply is sent; the pointer
/// must be NULL again before svc_freeargs(), which would free it.
///
/// FALSE if there is none: the request is short, came in another way, or not over RDMA. svc_getargs() then allocates
/// memory, as usual.
///
/// # Safety
/// `xprt` is a live transport; `address` and `length` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_svc_placed(
    xprt: *mut SVCXPRT,
    address: *mut *mut c_void,
    length: *mut usize,
) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let Some((at, bytes)) = (unsafe { server::placed(xprt) }) else { return Ok(0) };
        if address.is_null() || length.is_null() {
            return Err(Error::new(Kind::Invalid, "rpcrdma_svc_placed: NULL"));
        }
        // SAFETY: by the contract.
        unsafe { address.write(at.cast_mut().cast()) };
        // SAFETY: by the contract.
        unsafe { length.write(bytes) };
        Ok(1)
    })
}

/// A walk over the arguments or the results of one message; see rpcrdma_binding_register().
pub struct rpcrdma_walk {
    /// From the `&mut Walk` of the caller, for as long as the program's function runs.
    walk: *mut c_void,
    stop: Option<Stop>,
}

/// Walks the arguments or the results of a procedure, in wire order; `closure` is the binding's. Returns FALSE if a
/// step returned FALSE.
pub type rpcrdma_walker =
    Option<unsafe extern "C" fn(walk: *mut rpcrdma_walk, closure: *mut c_void) -> bool_t>;

/// Which items of a procedure may travel in chunks of their own, directly between the memory of the two programs.
#[repr(C)]
pub struct rpcrdma_binding {
    /// sizeof (struct rpcrdma_binding).
    pub size: usize,
    /// Program number.
    pub program: rpcprog_t,
    /// Version number.
    pub version: rpcvers_t,
    /// Procedure number.
    pub procedure: u32,
    /// Walks the arguments. NULL: nothing in them is eligible, and nothing is known about the reply's length.
    pub arguments: rpcrdma_walker,
    /// Walks the results of a successful reply. NULL: nothing in them is eligible.
    pub results: rpcrdma_walker,
    /// Passed to both walkers.
    pub closure: *mut c_void,
}

/// Registers the binding of one procedure for this process, as client and as server (RFC 8166 section 6).
///
/// A walker goes through the encoded message with the rpcrdma_walk_ functions and marks the counted opaques that are
/// eligible with rpcrdma_walk_item(). While walking arguments it also says how large eligible results may be, with
/// rpcrdma_walk_result(), and how long the rest of the results may be, with rpcrdma_walk_reply(). It must depend on
/// nothing but the message and `closure`, must make no RPC calls, and may run in any thread. It also runs on messages
/// from peers.
///
/// A client that puts its own buffer into its results beforehand (everything zeroed except data_val, which points to
/// the buffer, and data_len, which is the buffer's size) gets the result there without a copy.
///
/// Both ends should have the same binding; where only one has it, calls work without it. FALSE, and
/// clnt_spcreateerror() says why, for a procedure that has a binding already, for NULL, an invalid size, or settings that
/// cannot be read.
///
/// # Safety
/// `binding` is NULL or points to a binding; its functions and its closure stay valid for the life of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_binding_register(binding: *const rpcrdma_binding) -> bool_t {
    guard(|| {
        creation_started();
        creation(|| {
            config::get()?;
            // SAFETY: by the contract.
            let given = unsafe { crate::ffi::reference(binding) };
            let given =
                given.filter(|given| given.size == size_of::<rpcrdma_binding>()).ok_or_else(|| {
                    Error::new(Kind::Invalid, "rpcrdma_binding_register: NULL or an invalid size")
                })?;
            let rpcrdma_binding { program, version, procedure, arguments, results, closure, .. } = *given;
            config::bindings().add(
                program,
                version,
                procedure,
                walker(arguments, closure),
                walker(results, closure),
            )
        })?;
        Ok(1)
    })
}

/// Wraps a walker of the program in one of ours.
fn walker(function: rpcrdma_walker, closure: *mut c_void) -> Walker {
    let closure = closure.expose_provenance();
    Box::new(move |walk: &mut Walk<'_>| -> Walked {
        let Some(function) = function else { return Ok(()) };
        let mut handle = rpcrdma_walk { walk: std::ptr::from_mut(walk).cast(), stop: None };
        // SAFETY: the program's function and closure, as registered; the handle lives across the call.
        let done = unsafe { function(&mut handle, std::ptr::with_exposed_provenance_mut(closure)) };
        match handle.stop {
            Some(stop) => Err(stop),
            None if done == 0 => Err(Stop::Unknown),
            None => Ok(()),
        }
    })
}

/// One step of a walk.
///
/// # Safety
/// `walk` is NULL or what a walker was given, while it runs.
unsafe fn step<T>(walk: *mut rpcrdma_walk, step: impl FnOnce(&mut Walk<'_>) -> Result<T, Stop>) -> Option<T> {
    // SAFETY: by the contract; this pointer is all that the program has.
    let handle = unsafe { walk.as_mut() }?;
    if handle.stop.is_some() {
        return None;
    }
    // SAFETY: set by `walker` from a `&mut Walk` that nobody uses while the program's function runs. Its lifetime is
    // shortened to that of this call.
    let walk = unsafe { &mut *handle.walk.cast::<Walk<'_>>() };
    match step(walk) {
        Ok(value) => Some(value),
        Err(stop) => {
            handle.stop = Some(stop);
            None
        }
    }
}

/// Walks over one word (int, unsigned, bool, enum). `value` may be NULL.
///
/// # Safety
/// `walk` is NULL or what a walker was given, while it runs; `value` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_word(walk: *mut rpcrdma_walk, value: *mut u32) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let word = unsafe { step(walk, |walk| walk.word()) };
        if let Some(word) = word
            && !value.is_null()
        {
            // SAFETY: by the contract.
            unsafe { value.write(word) };
        }
        Ok(word.is_some().into())
    })
}

/// Walks over a hyper. `value` may be NULL.
///
/// # Safety
/// As rpcrdma_walk_word().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_hyper(walk: *mut rpcrdma_walk, value: *mut u64) -> bool_t {
    guard(|| {
        // SAFETY: by the contract.
        let hyper = unsafe { step(walk, |walk| walk.hyper()) };
        if let Some(hyper) = hyper
            && !value.is_null()
        {
            // SAFETY: by the contract.
            unsafe { value.write(hyper) };
        }
        Ok(hyper.is_some().into())
    })
}

/// Walks over a fixed opaque of `bytes` bytes and its pad.
///
/// # Safety
/// `walk` is NULL or what a walker was given, while it runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_skip(walk: *mut rpcrdma_walk, bytes: usize) -> bool_t {
    // SAFETY: by the contract.
    guard(|| Ok(unsafe { step(walk, |walk| walk.skip(bytes)) }.is_some().into()))
}

/// Walks over a counted opaque or a string that is not eligible.
///
/// # Safety
/// As rpcrdma_walk_skip().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_opaque(walk: *mut rpcrdma_walk) -> bool_t {
    // SAFETY: by the contract.
    guard(|| Ok(unsafe { step(walk, |walk| walk.opaque()) }.is_some().into()))
}

/// Walks over a counted opaque or a string that is eligible.
///
/// # Safety
/// As rpcrdma_walk_skip().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_item(walk: *mut rpcrdma_walk) -> bool_t {
    // SAFETY: by the contract.
    guard(|| Ok(unsafe { step(walk, |walk| walk.item()) }.is_some().into()))
}

/// While walking arguments: the results may hold an eligible opaque of at most `most` bytes. Call it for each such
/// opaque, in order. rpcrdma_walk_reply() need not count them.
///
/// # Safety
/// As rpcrdma_walk_skip().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_result(walk: *mut rpcrdma_walk, most: usize) -> bool_t {
    guard(|| {
        let said = |walk: &mut Walk<'_>| {
            walk.result(most);
            Ok(())
        };
        // SAFETY: by the contract.
        Ok(unsafe { step(walk, said) }.is_some().into())
    })
}

/// While walking arguments: the results have at most `bytes` more bytes. If it is never called, their length is not
/// known, and calls make room for the CLIENT's maximum reply.
///
/// # Safety
/// As rpcrdma_walk_skip().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_walk_reply(walk: *mut rpcrdma_walk, bytes: usize) -> bool_t {
    guard(|| {
        let said = |walk: &mut Walk<'_>| {
            walk.reply(bytes);
            Ok(())
        };
        // SAFETY: by the contract.
        Ok(unsafe { step(walk, said) }.is_some().into())
    })
}

/// Copies `known`, which consists only of words, to the program's structure of `size` bytes. Fields that only the
/// program knows become 0.
///
/// # Errors
/// `Invalid` for NULL, or a size that is not a multiple of a word's.
///
/// # Safety
/// `place` is NULL or has room for `size` bytes; it may be misaligned.
unsafe fn hand_out<T: Copy>(function: &str, known: T, place: *mut T, size: usize) -> Result<(), Error> {
    if place.is_null() || size == 0 || !size.is_multiple_of(align_of::<T>()) {
        return Err(Error::new(Kind::Invalid, format!("{function}: NULL or an invalid size")));
    }
    let (place, both) = (place.cast::<u8>(), size.min(size_of::<T>()));
    // SAFETY: `both` bytes are readable at `known`, and writable at `place` by the contract.
    unsafe { std::ptr::from_ref(&known).cast::<u8>().copy_to(place, both) };
    // SAFETY: these are the rest of the `size` bytes.
    unsafe { place.wrapping_add(both).write_bytes(0, size - both) };
    Ok(())
}

/// The local address of a TCP socket.
fn tcp_socket(function: &str, fd: c_int) -> Result<SocketAddr, Error> {
    socket::local(fd)
        .filter(|_| socket::is_stream(fd))
        .ok_or_else(|| Error::new(Kind::Invalid, format!("{function}: fd {fd} is not a TCP socket")))
}

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no NUL in it"),
};

const _: () = {
    assert!(CLSET_RDMA_MAXREPLY == client::CLSET_RDMA_MAXREPLY);
    assert!(CLGET_RDMA_MAXREPLY == client::CLGET_RDMA_MAXREPLY);
    assert!(CLSET_RDMA_CREDITS == client::CLSET_RDMA_CREDITS);
    assert!(CLGET_RDMA_CREDITS == client::CLGET_RDMA_CREDITS);
    assert!(CLSET_RDMA_REVERSE_CREDITS == client::CLSET_RDMA_REVERSE_CREDITS);
    assert!(CLGET_RDMA_REVERSE_CREDITS == client::CLGET_RDMA_REVERSE_CREDITS);
    assert!(CLSET_RDMA_REVERSE_CHUNKS == client::CLSET_RDMA_REVERSE_CHUNKS);
    assert!(CLGET_RDMA_CONNECTIONS == client::CLGET_RDMA_CONNECTIONS);
    assert!(CLSET_RDMA_RECEIVE_SIZE == client::CLSET_RDMA_RECEIVE_SIZE);
    assert!(CLGET_RDMA_RECEIVE_SIZE == client::CLGET_RDMA_RECEIVE_SIZE);
    assert!(SVCSET_RDMA_CREDITS == server::SVCSET_RDMA_CREDITS);
    assert!(SVCGET_RDMA_CREDITS == server::SVCGET_RDMA_CREDITS);
    assert!(size_of::<rpcrdma_stats>() == stats::COUNT * size_of::<u64>());
    assert!(size_of::<rpcrdma_peer>() == 7 * size_of::<u32>());
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and documentation line of each entry of the table that begins at `from` in a source.
    fn entries<'a>(
        source: &'a str,
        from: &str,
        name: impl Fn(&'a str) -> Option<&'a str>,
    ) -> Vec<(&'a str, &'a str)> {
        let table = source.split(from).nth(1).expect("the table is there");
        let mut entries = Vec::new();
        let mut doc = "";
        for line in table.lines().map(str::trim).take_while(|line| *line != "}") {
            if let Some(text) = line.strip_prefix("/// ") {
                doc = text;
            } else if let Some(name) = name(line) {
                entries.push((name, doc));
            }
        }
        entries
    }

    #[test]
    fn the_c_structure_has_the_counters_of_the_table_in_its_order_with_its_words() {
        let structure = entries(include_str!("capi.rs"), "pub struct rpcrdma_stats {\n", |line| {
            line.strip_prefix("pub ")?.strip_suffix(": u64,")
        });
        let table = entries(include_str!("stats.rs"), "\ncounters! {\n", |line| line.split('"').nth(1));
        assert_eq!(structure, table);
        assert_eq!(structure.iter().map(|(name, _)| *name).collect::<Vec<_>>(), stats::NAMES);
    }

    #[test]
    fn programs_older_and_newer_than_the_library_get_what_both_know() {
        stats::add(stats::Counter::Calls, 1);
        let mut small = [u64::MAX; 2];
        // SAFETY: one counter has room.
        assert_eq!(unsafe { rpcrdma_stats_get(small.as_mut_ptr().cast(), 8) }, 1);
        assert!(small[0] < u64::MAX && small[1] == u64::MAX);
        let mut large = [u64::MAX; stats::COUNT + 2];
        // SAFETY: room for all of `large`.
        assert_eq!(unsafe { rpcrdma_stats_get(large.as_mut_ptr().cast(), size_of_val(&large)) }, 1);
        assert_eq!(large[stats::COUNT..], [0, 0]);
        for size in [0, 7, 9] {
            // SAFETY: refused before anything is written.
            assert_eq!(unsafe { rpcrdma_stats_get(large.as_mut_ptr().cast(), size) }, 0);
        }
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { rpcrdma_stats_get(std::ptr::null_mut(), 8) }, 0);
    }
}
