//! The SVCXPRTs of connections that were accepted over RDMA: how they are made and given to the program's loop, and what
//! the rest of the library asks of them.
//!
//! Connections over TCP begin in `sniff`, those over an adapter in `adapters`. The SVCXPRT itself is in `transport`, what wakes
//! the loop besides readable connections is in `progress`, and `idle` decides which connections are closed when there is no room.
#![allow(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;

use crate::driver::reverse::Hooks;
use crate::driver::{Server, Shared, service_loop};
use crate::error::{Error, Kind};
use crate::socket;
use crate::tirpc::callback::waker;
use crate::tirpc::left::{serve_fd, wake_left};
use crate::tirpc::netid::Netid;
use crate::tirpc::transport::{ANY, Transport, addresses, copied, transport};
pub use crate::tirpc::transport::{SVCGET_RDMA_CREDITS, SVCSET_RDMA_CREDITS};
use crate::tirpc::{
    RPC_ANYFD, SVCXPRT, idle, polled, progress, run, svc_destroy, threads, xprt_register, xprt_unregister,
};

/// Destroys a listener that libtirpc has just made and that its caller will never see. As in libtirpc, a descriptor that is the
/// caller's stays open.
///
/// # Safety
/// `xprt` is a live, registered transport of libtirpc's that nobody knows.
pub unsafe fn discard(xprt: *mut SVCXPRT, with_descriptor: bool) {
    // SAFETY: alive and registered (contract).
    unsafe { xprt_unregister(xprt) };
    if !with_descriptor {
        // SAFETY: alive (contract).
        let fd = unsafe { (*xprt).xp_fd };
        // RPC_ANYFD would say "do not close", but makes libtirpc read before the start of its table of transports.
        let other = socket::duplicate(fd).unwrap_or(RPC_ANYFD);
        // SAFETY: as above.
        unsafe { (*xprt).xp_fd = other };
    }
    // SAFETY: alive (contract).
    unsafe { svc_destroy(xprt) };
}

/// A transport on the descriptor of `stock`, with its addresses.
///
/// # Safety
/// `stock` is a live connection.
pub(super) unsafe fn like(stock: *mut SVCXPRT, server: Server, rdma_only: bool) -> Arc<Transport> {
    let fd = server.fd();
    // SAFETY: alive (contract).
    let stock = unsafe { &*stock };
    // The netid is that of the listener, since programs and libtirpc compare the two: a moved server's is "tcp".
    let netid = match socket::local(fd) {
        Some(local) if rdma_only => Netid::of_address(local).name(),
        // SAFETY: libtirpc's own string.
        _ => unsafe { crate::ffi::cstr(stock.xp_netid) }.unwrap_or(c"tcp"),
    };
    // SAFETY: libtirpc's own netbuf.
    let remote = unsafe { copied(&stock.xp_rtaddr) };
    // SAFETY: as above.
    let local = unsafe { copied(&stock.xp_ltaddr) };
    Transport::new(server, netid, local, remote, (stock.xp_raddr, stock.xp_addrlen))
}

/// Hands the transport to the program's loop, with a reference to it that lasts until `svc_destroy`. `expendable`: it may be
/// closed when it is idle and descriptors run short.
///
/// # Safety
/// It is not registered.
pub(super) unsafe fn register(own: Arc<Transport>, expendable: bool) -> Result<(), Error> {
    let fd = own.fd();
    // SAFETY: complete (contract).
    unsafe { xprt_register(own.xprt()) }?;
    // SAFETY: our caller registers transports, and the loop's lock keeps others from doing so.
    if !run::locked(|| unsafe { polled() }.any(|it| it == fd)) {
        // libtirpc silently drops what does not fit into its table.
        let text = format!("fd {fd} is above what libtirpc's table of transports holds");
        return Err(Error::new(Kind::Os(libc::EMFILE), text));
    }
    own.watch_progress();
    // SAFETY: the loop is our caller.
    unsafe { idle::own(fd, own.watched(), expendable) };
    let _ = Arc::into_raw(own);
    Ok(())
}

/// Hands the program's loop a connection that has come in through a device.
///
/// # Safety
/// No other thread registers transports meanwhile, as for a listener of libtirpc.
pub(super) unsafe fn serve(
    server: Server,
    rdma_only: bool,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
) -> Result<(), Error> {
    let (local, peer) = (local.unwrap_or(ANY), peer.unwrap_or(ANY));
    let netid = match Netid::of_address(local) {
        own if rdma_only => own.name(),
        Netid::Rdma => c"tcp",
        Netid::Rdma6 => c"tcp6",
    };
    let (own, remote, address) = addresses(local, peer);
    let transport = Transport::new(server, netid, own, remote, address);
    // SAFETY: just made, complete.
    unsafe { register(transport, idle::are_expendable()) }
}

/// The program enters libtirpc's loop, whose frame is at `frame`. It may have jumped out of an earlier one.
pub(super) fn enter_loop(frame: usize) {
    // Before anything is registered for it: svc_exit(3) may come at any time.
    run::enter();
    service_loop::PROGRAM.unwound_to(frame);
    waker::enter_loop();
    progress::enter_loop();
    if service_loop::PROGRAM.has_left() {
        wake_left();
    }
}

/// The program has left libtirpc's loop, whose frame is at `frame`. If the loop has not `returned`, the program has thrown an
/// exception: it will come back with what it has registered.
pub(super) fn left_loop(frame: usize, returned: bool) {
    service_loop::PROGRAM.unwound_to(frame);
    run::leave();
    waker::leave_loop();
    service_loop::PROGRAM.is_away();
    if returned {
        progress::left_loop();
    }
}

/// Serves with `count` threads until svc_exit(3).
///
/// # Errors
/// As [`threads::claim`] and [`threads::Threads::run`].
///
/// # Safety
/// As libtirpc's `svc_run`; the program's routines may run in several threads at a time.
pub unsafe fn run_in_threads(count: u32) -> Result<(), Error> {
    let place = 0u8;
    let frame = (&raw const place).addr();
    let threads = threads::claim(count)?;
    enter_loop(frame);
    // SAFETY: by the contract.
    let done = unsafe { threads.run() };
    left_loop(frame, true);
    done
}

/// The argument of the request under way that came in a Read chunk of its own: address and length. It stays there until
/// the request is done with.
///
/// # Safety
/// `xprt` is NULL or a live transport of any kind.
pub unsafe fn placed(xprt: *mut SVCXPRT) -> Option<(*const u8, usize)> {
    // SAFETY: by the contract.
    unsafe { transport(xprt) }.ok()?.placed()
}

/// What a callback needs from the loop.
pub static HOOKS: Hooks = Hooks { serve: serve_fd, wake: wake_left, ring: waker::ring };

/// The connection of an SVCXPRT, for callbacks; and the address of its peer.
///
/// # Errors
/// `Invalid` for any SVCXPRT other than that of a connection that was accepted over RDMA.
///
/// # Safety
/// `xprt` is NULL or a live transport of any kind.
pub unsafe fn accepted(xprt: *mut SVCXPRT) -> Result<(Arc<Shared>, Box<[u8]>), Error> {
    // SAFETY: by the contract.
    let own = unsafe { transport(xprt) }?;
    let text = "the SVCXPRT is not that of an accepted connection";
    let server = own.accepted().cloned().ok_or_else(|| Error::new(Kind::Invalid, text))?;
    // SAFETY: alive; nobody writes there once it is made.
    let peer = unsafe { (*own.xprt()).xp_rtaddr };
    // SAFETY: our own netbuf, from `copied`.
    let address = unsafe { crate::ffi::bytes(peer.buf.cast(), peer.len as usize) }.unwrap_or_default();
    Ok((server, address.into()))
}
