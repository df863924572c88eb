//! RDMA beside a datagram transport: on the TCP port of the same number (`RPCRDMA_REDIRECT=udp`).
//!
//! Many servers register udp first and then bind that TCP port themselves (rquotad, mountd and statd do): it must not be taken
//! from them. So a registration is only noted here, and dealt with in the first turn of the program's loop, through `progress`,
//! when the program has its transports and is the process that serves:
//!
//! - The program listens there itself. Its listener stays what it is, and its connections are watched for MPA Requests
//!   as those of a moved tcp listener are (`interpose::moved`).
//! - Nobody does: a listener of netid "rdma" is made there.
//! - Somebody else does. The registration of "rdma" with rpcbind is withdrawn, for it would lead there.
//!
//! # Invariants
//! - No lock is held while libtirpc or rpcbind is asked for anything, and [`withdrawn`] waits for none, since signal handlers of
//!   programs reach it.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::null;
use std::sync::MutexGuard;
use std::time::Instant;

use crate::error::os_text;
use crate::ffi::guard;
use crate::fork;
use crate::socket::Sockaddr;
use crate::tirpc::interpose::{listeners, svc_tli_create};
use crate::tirpc::netid::Netid;
use crate::tirpc::progress::{self, Errand};
use crate::tirpc::{polled, real};
use crate::{log_info, log_warn, socket};

/// A datagram transport's address, and the programs that are registered there.
struct Wanted {
    netid: Netid,
    local: SocketAddr,
    programs: Vec<(u32, u32)>,
}

static WANTED: fork::Lock<Vec<Wanted>> = fork::Lock::new();

fn table() -> MutexGuard<'static, Vec<Wanted>> {
    WANTED.lock()
}

/// Notes that a program serves datagrams at `local`, and is registered at the same address of `netid`.
pub fn registered(netid: Netid, local: SocketAddr, prog: u32, vers: u32) {
    let mut table = table();
    match table.iter_mut().find(|wanted| wanted.local == local) {
        Some(wanted) => wanted.programs.push((prog, vers)),
        None => table.push(Wanted { netid, local, programs: vec![(prog, vers)] }),
    }
    drop(table);
    progress::call_at(Errand::Beside, Instant::now(), || {
        guard(|| {
            open_all();
            Ok(())
        });
    });
}

/// Forgets a registration that is withdrawn before the loop has begun.
pub fn withdrawn(netid: Netid, prog: u32, vers: u32) {
    // A signal handler that finds the table locked has interrupted this thread in one of these functions and must not wait for
    // it: the row stays until the loop begins.
    let Some(mut table) = WANTED.try_lock() else { return };
    for wanted in table.iter_mut().filter(|wanted| wanted.netid == netid) {
        wanted.programs.retain(|program| *program != (prog, vers));
    }
    table.retain(|wanted| !wanted.programs.is_empty());
}

/// Deals with what was noted: called from the program's loop, in the process that serves.
fn open_all() {
    let noted = std::mem::take(&mut *table());
    for Wanted { netid, local, programs } in noted {
        let error = match open(netid, local) {
            Ok(how) => {
                log_info!("listening at {local} beside the datagram transport: {how}");
                continue;
            }
            Err(error) => os_text(&error),
        };
        log_warn!("not listening at {local} beside the datagram transport: {error}; netid rdma is withdrawn");
        for (prog, vers) in programs {
            let Ok(unset) = real::RPCB_UNSET.get() else { return };
            // SAFETY: the entry is static.
            unsafe { unset(prog, vers, netid.entry()) };
        }
    }
}

/// Has connections to `local` served over RDMA. Returns how.
fn open(netid: Netid, local: SocketAddr) -> io::Result<&'static str> {
    const OWN: &str = "the program's own TCP listener is watched";
    if listeners::accepted(local) {
        return Ok("a listener of netid rdma is there");
    }
    let same = |at: &SocketAddr| {
        let place = at.ip().is_unspecified() || at.ip() == local.ip();
        at.port() == local.port() && at.is_ipv4() == local.is_ipv4() && place
    };
    if registered_listeners().any(|at| same(&at)) {
        return Ok(OWN);
    }
    let socket = match listening(netid, local) {
        // The program's listener is for both families, or for some addresses only.
        Err(error)
            if error.raw_os_error() == Some(libc::EADDRINUSE)
                && registered_listeners().any(|at| at.port() == local.port()) =>
        {
            return Ok(OWN);
        }
        made => made?,
    };
    // SAFETY: the descriptor is open and listens; the entry is static.
    let xprt = unsafe { svc_tli_create(socket.as_raw_fd(), netid.entry(), null(), 0, 0) };
    if xprt.is_null() {
        return Err(io::Error::other("no transport could be made"));
    }
    // It belongs to the transport now.
    let _ = socket.into_raw_fd();
    Ok("a listener of its own")
}

/// Where the program's loop listens for connections.
fn registered_listeners() -> impl Iterator<Item = SocketAddr> {
    // SAFETY: called in the loop's thread.
    let fds: Vec<c_int> = unsafe { polled() }.collect();
    let listen = |fd: &c_int| socket::is_stream(*fd) && socket::listens(*fd);
    fds.into_iter().filter(listen).filter_map(socket::local)
}

/// A listening TCP socket on `local`.
///
/// The workers of a server that has forked before its first turn each make one: they share the port as they would share a
/// listener that was made before the fork.
fn listening(netid: Netid, local: SocketAddr) -> io::Result<OwnedFd> {
    let info = netid.sockinfo();
    // SAFETY: socket has no preconditions.
    let fd = unsafe { libc::socket(info.si_af, info.si_socktype | libc::SOCK_CLOEXEC, info.si_proto) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened above, and given to nobody.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let on: c_int = 1;
    let mut options = vec![(libc::SOL_SOCKET, libc::SO_REUSEADDR), (libc::SOL_SOCKET, libc::SO_REUSEPORT)];
    if local.is_ipv6() {
        options.push((libc::IPPROTO_IPV6, libc::IPV6_V6ONLY));
    }
    for (level, option) in options {
        // SAFETY: the value is an int, and its size is passed.
        unsafe { libc::setsockopt(fd, level, option, (&raw const on).cast(), size_of::<c_int>() as u32) };
    }
    let address = Sockaddr::from(local);
    let bytes = address.as_bytes();
    // SAFETY: the bytes are a socket address of that length.
    if unsafe { libc::bind(fd, bytes.as_ptr().cast(), bytes.len() as u32) } != 0 {
        return Err(io::Error::last_os_error());
    }
    socket::listen(fd)?;
    Ok(socket)
}
