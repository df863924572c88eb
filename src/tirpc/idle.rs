//! Which accepted connections are idle, and which of them are closed for it.
//!
//! - A connection to a listener of netid "rdma" whose peer never sends an MPA Request: after [`START_TIMEOUT`], like one that
//!   sends half of it.
//! - When descriptors run short, the connections that libtirpc would close if they were its own tcp connections. When it has
//!   accepted one and four fifths of its table are taken, it closes those that were idle for [`IDLE`], or else the one that was
//!   idle longest; but only non-blocking connections: those of a program that has set `RPC_SVC_CONNMAXREC_SET`. It recognises its
//!   connections by their operations, so it would miss ours, and those whose first byte is still awaited. A connection over an
//!   adapter has one place in the table, but takes several descriptors; some take one together for memory that is shared.
//! - When an adapter has no memory left for another connection, one of its connections: first one that has made no call yet, then
//!   one that has been idle for [`IDLE`], in each case the one that was idle longest. Connections that are not established yet
//!   have a part of the memory to themselves, where the oldest makes room for the next.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::driver::{START_TIMEOUT, Stage};
use crate::fork;
use crate::memory::pins;
use crate::provider::Shortage;
use crate::reserve::as_many_as_fit;
use crate::tirpc::progress::{self, Wants, Watched};
use crate::tirpc::run;
use crate::tirpc::{SVCXPRT, library, polled, polled_table, svc_destroy};
use crate::{log_info, socket};

/// The same as libtirpc's.
const IDLE: Duration = Duration::from_secs(15);

/// Descriptors of a connection over an adapter: the channel of its events, the channel of its completions, a set of both, and the
/// one that the loop waits for.
const ADAPTERS: usize = 4;

/// How long a connection over an adapter has for its first call before it may be closed to make room for others.
const FIRST_CALL: Duration = Duration::from_secs(1);

enum Known {
    Silent(Arc<Silent>),
    /// One of ours: whether libtirpc would close it when it is idle, and whether it is over an adapter.
    Own(Weak<dyn Watched>, bool, bool),
}

/// A stock transport on which no byte has arrived yet.
struct Silent {
    fd: RawFd,
    /// The address of its SVCXPRT.
    xprt: usize,
    since: Instant,
}

impl Silent {
    /// Whether its time is over and nothing has arrived. If the loop was busy elsewhere, what has arrived is still unread, and is
    /// looked at next.
    fn is_over(&self) -> bool {
        let nothing = || matches!(socket::peek(self.fd), Err(error) if error.kind() == ErrorKind::WouldBlock);
        self.since.elapsed() >= START_TIMEOUT && nothing()
    }
}

impl Watched for Silent {
    fn wake(&self, _: bool) {
        if self.is_over() {
            log_info!("fd {}: closed: no MPA Request has come", self.fd);
            // SAFETY: alive: it is in the table; registered.
            unsafe { svc_destroy(self.xprt()) };
        }
    }

    fn idle_since(&self) -> Option<Instant> {
        Some(self.since)
    }

    fn xprt(&self) -> *mut SVCXPRT {
        std::ptr::with_exposed_provenance_mut(self.xprt)
    }
}

#[derive(Default)]
struct Table {
    /// A tree: it takes small blocks, which the memory reserve can supply too.
    known: BTreeMap<RawFd, Known>,
    /// How many are over adapters.
    adapters: usize,
}

impl Table {
    fn add(&mut self, fd: RawFd, known: Known) {
        self.remove(fd);
        self.adapters += usize::from(matches!(known, Known::Own(_, _, true)));
        self.known.insert(fd, known);
    }

    fn remove(&mut self, fd: RawFd) -> bool {
        let gone = self.known.remove(&fd);
        self.adapters -= usize::from(matches!(gone, Some(Known::Own(_, _, true))));
        gone.is_some()
    }
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: fork::Lock<Table> = fork::Lock::new();
    TABLE.lock()
}

/// Whether libtirpc has made an accepted connection non-blocking.
pub fn is_expendable(fd: RawFd) -> bool {
    socket::is_nonblocking(fd)
}

/// Whether libtirpc would do so with a connection that it has not accepted itself.
pub fn are_expendable() -> bool {
    const CONNMAXREC_GET: i32 = 1;
    let mut most = 0i32;
    // SAFETY: an int is what this request writes.
    library().is_ok_and(|it| unsafe { (it.rpc_control)(CONNMAXREC_GET, (&raw mut most).cast()) } != 0)
        && most != 0
}

/// A connection was accepted, and its first byte is awaited, though not for ever if it must be one of ours (`rdma_only`).
///
/// # Safety
/// `xprt` is alive until [`forget`]; the caller is the program's loop.
pub unsafe fn silent(fd: RawFd, xprt: *mut SVCXPRT, rdma_only: bool) {
    let since = Instant::now();
    let silent = Arc::new(Silent { fd, xprt: xprt.expose_provenance(), since });
    let weak = Arc::downgrade(&silent);
    table().add(fd, Known::Silent(silent));
    if rdma_only {
        let deadline = Some(since + START_TIMEOUT);
        progress::want(fd, Wants { deadline, ..Wants::default() }, || weak);
    }
    // SAFETY: by the contract.
    unsafe { make_room(fd) };
}

/// The connection is one of ours now.
///
/// # Safety
/// The caller is the program's loop.
pub unsafe fn own(fd: RawFd, transport: Weak<dyn Watched>, expendable: bool) {
    let adapter = transport.upgrade().is_some_and(|transport| stage(&*transport).is_some());
    table().add(fd, Known::Own(transport, expendable, adapter));
    // SAFETY: by the contract.
    unsafe { make_room(fd) };
}

/// As [`crate::driver::Server::stage`].
fn stage(transport: &dyn Watched) -> Option<(Stage, Option<IpAddr>)> {
    transport.accepted()?.lock().unwrap_or_else(|e| e.into_inner()).stage()
}

/// Gives up what still waits for the peer, so that `svc_destroy` does not wait for it.
fn give_up(transport: &dyn Watched) {
    if let Some(server) = transport.accepted() {
        server.lock().unwrap_or_else(|e| e.into_inner()).shut();
    }
}

/// Whether `fd` is still the descriptor of a connection of ours.
pub fn is_own(fd: RawFd) -> bool {
    matches!(table().known.get(&fd), Some(Known::Own(transport, ..)) if transport.strong_count() > 0)
}

/// Whether the first byte on `fd` is still awaited.
pub fn is_silent(fd: RawFd) -> bool {
    matches!(table().known.get(&fd), Some(Known::Silent(_)))
}

/// The first byte has arrived, or the connection is gone.
pub fn forget(fd: RawFd) {
    if table().remove(fd) {
        progress::forget(fd);
    }
}

/// As [`forget`], by the stock transport: its program may have taken the descriptor away from it.
///
/// # Safety
/// It is alive.
pub unsafe fn forget_silent(xprt: *mut SVCXPRT) {
    let own = |known: &Known| matches!(known, Known::Silent(it) if it.xprt == xprt.addr());
    // SAFETY: alive (contract).
    let usual = unsafe { (*xprt).xp_fd };
    let table = table();
    let fd = match table.known.get(&usual) {
        Some(known) if own(known) => Some(usual),
        _ => table.known.iter().find(|(_, known)| own(known)).map(|(fd, _)| *fd),
    };
    drop(table);
    fd.into_iter().for_each(forget);
}

/// Closes a connection over an adapter to make room for one from `peer`. Returns false when none may be closed.
///
/// # Safety
/// The caller is the program's loop.
pub unsafe fn make_room_on_devices(shortage: Shortage, peer: IpAddr) -> bool {
    let now = Instant::now();
    let known = {
        let table = table();
        let own = |(fd, known): (&RawFd, &Known)| match known {
            Known::Own(transport, ..) => Some((*fd, transport.upgrade()?)),
            Known::Silent(_) => None,
        };
        as_many_as_fit(table.known.iter().filter_map(own))
    };
    let look = |(fd, transport): (RawFd, Arc<dyn Watched>)| {
        let (stage, peer) = stage(&*transport)?;
        let idle = now.saturating_duration_since(transport.idle_since()?);
        Some((Idle { stage, peer, idle }, fd, transport))
    };
    let candidates = as_many_as_fit(known.into_iter().filter_map(look));
    let idle = as_many_as_fit(candidates.iter().map(|(idle, ..)| *idle));
    let Some(at) = choose(shortage, peer, &idle) else { return false };
    let (Idle { stage, idle, .. }, fd, transport) = &candidates[at];
    let what = match stage {
        Stage::Starting => "it is not established",
        Stage::Unused => "no call has come",
        Stage::Used => "it is idle",
    };
    let seconds = idle.as_secs();
    log_info!("fd {fd}: closed after {seconds} s: {what}, and adapters have no room for another one");
    give_up(&**transport);
    // SAFETY: alive: `transport` is a reference to it; registered.
    unsafe { svc_destroy(transport.xprt()) };
    true
}

/// A connection over an adapter that may be closed.
#[derive(Clone, Copy)]
struct Idle {
    stage: Stage,
    peer: Option<IpAddr>,
    idle: Duration,
}

/// Which of them is closed to make room for one from `peer`.
fn choose(shortage: Shortage, peer: IpAddr, all: &[Idle]) -> Option<usize> {
    let starting = |it: &Idle| it.stage == Stage::Starting;
    if shortage == Shortage::Starting {
        let count = all.iter().filter(|it| starting(it)).count();
        let own = all.iter().filter(|it| starting(it) && it.peer == Some(peer)).count();
        // A peer that has half of them keeps out nobody but itself.
        if own > 1 && 2 * own >= count {
            return None;
        }
    }
    let may_go = |it: &Idle| match (shortage, it.stage) {
        (Shortage::Starting, stage) => stage == Stage::Starting,
        (Shortage::Memory, Stage::Starting | Stage::Unused) => it.idle >= FIRST_CALL,
        (Shortage::Memory, Stage::Used) => it.idle >= IDLE,
    };
    let idle = all.iter().enumerate().filter(|(_, it)| may_go(it));
    idle.max_by_key(|(_, it)| (it.stage != Stage::Used, it.idle)).map(|(at, _)| at)
}

/// Closes idle connections if descriptors run short; not `newest`.
///
/// # Safety
/// The caller is the program's loop.
unsafe fn make_room(newest: RawFd) {
    let Ok(library) = library() else { return };
    // SAFETY: takes nothing.
    let most = usize::try_from(unsafe { (library._rpc_dtablesize)() }).unwrap_or(0);
    let table = table();
    let beside = table.adapters * (ADAPTERS - 1) + pins::descriptors();
    // Places of the table, including free ones.
    let (_, places) = polled_table();
    // SAFETY: by the contract; the loop's lock keeps other threads from registering.
    let are_many = || run::locked(|| unsafe { polled() }.count()) + beside >= most / 5 * 4;
    if places + beside < most / 5 * 4 || !are_many() {
        return;
    }
    let others = table.known.iter().filter(|(fd, _)| **fd != newest);
    let candidate = |(fd, known): (&RawFd, &Known)| -> Option<(RawFd, Arc<dyn Watched>)> {
        match known {
            Known::Silent(silent) if socket::is_nonblocking(*fd) => Some((*fd, silent.clone())),
            Known::Own(transport, true, _) => Some((*fd, transport.upgrade()?)),
            Known::Silent(_) | Known::Own(_, false, _) => None,
        }
    };
    let candidates = as_many_as_fit(others.filter_map(candidate));
    drop(table);
    let now = Instant::now();
    let idle_for = |(fd, candidate): (RawFd, Arc<dyn Watched>)| {
        let since = candidate.idle_since()?;
        Some((now.saturating_duration_since(since), fd, candidate))
    };
    let mut idle = as_many_as_fit(candidates.into_iter().filter_map(idle_for));
    idle.sort_unstable_by_key(|(time, fd, _)| (std::cmp::Reverse(*time), *fd));
    // libtirpc counts whole seconds.
    let overdue = idle.iter().take_while(|(time, ..)| time.as_secs() > IDLE.as_secs()).count();
    for (time, fd, candidate) in idle.into_iter().take(overdue.max(1)) {
        log_info!("fd {fd}: closed after {} s without a word: descriptors run short", time.as_secs());
        // Its peer may have read nothing of a reply for that long: the loop does not wait for it.
        give_up(&*candidate);
        // SAFETY: alive: it is in the table, or `candidate` is a reference to it; registered.
        unsafe { svc_destroy(candidate.xprt()) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_peer_that_the_loop_was_too_late_for_has_not_been_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let silent = |ago| Silent { fd: accepted.as_raw_fd(), xprt: 0, since: Instant::now() - ago };
        assert!(!silent(START_TIMEOUT - Duration::from_secs(5)).is_over());
        assert!(silent(START_TIMEOUT).is_over());
        peer.write_all(b"M").unwrap();
        accepted.peek(&mut [0]).unwrap();
        assert!(!silent(START_TIMEOUT).is_over());
        // The loop is told of a peer that is gone, too.
        accepted.try_clone().unwrap().read_exact(&mut [0]).unwrap();
        assert!(silent(START_TIMEOUT).is_over());
        drop(peer);
        accepted.peek(&mut [0]).unwrap();
        assert!(!silent(START_TIMEOUT).is_over());
    }

    #[test]
    fn who_makes_room_on_an_adapter_is_who_misses_it_least() {
        let [one, other] = [1, 2].map(|n| IpAddr::from([10, 0, 0, n]));
        let idle = |stage, peer, secs| Idle { stage, peer: Some(peer), idle: Duration::from_secs(secs) };
        use Stage::{Starting, Unused, Used};
        let memory = |all: &[Idle]| choose(Shortage::Memory, one, all);
        // A connection that has made no call goes first, unless it is quite new.
        assert_eq!(memory(&[idle(Used, one, 99), idle(Unused, other, 1), idle(Unused, other, 2)]), Some(2));
        assert_eq!(memory(&[idle(Used, one, 16), idle(Unused, other, 0), idle(Used, other, 17)]), Some(2));
        assert_eq!(memory(&[idle(Used, one, 14), idle(Unused, other, 0), idle(Starting, other, 0)]), None);
        assert_eq!(memory(&[]), None);
        // Connections that are being established have a part of the memory to themselves, where a peer keeps out nobody but
        // itself.
        let starting = |peer, all: &[Idle]| choose(Shortage::Starting, peer, all);
        let flood = [idle(Used, one, 99), idle(Starting, other, 0), idle(Starting, other, 3)];
        assert_eq!(starting(one, &flood), Some(2));
        assert_eq!(starting(other, &flood), None);
        assert_eq!(starting(one, &flood[..1]), None);
    }
}
