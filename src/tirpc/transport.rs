//! The SVCXPRT of a connection over RDMA, as libtirpc's loop and the program's dispatch routines use it.
//!
//! It is driven by whatever loop the program has. `xp_recv` processes what has arrived and hands out one request; `xp_stat` says
//! whether more requests are already in memory; `xp_reply` sends before it returns. Whatever else must wake the loop, such as a
//! socket that becomes writable or a startup that takes too long, goes through `progress`.
//!
//! The same SVCXPRT, with other operations, serves the callbacks that a server makes over a connection that this process has
//! opened: see `callback`.
//!
//! # Invariants
//! - A request is on the stack `open` from the `xp_recv` that returned TRUE to the `xp_stat` after its dispatch. The stack
//!   is deeper than one only if the program runs the loop again meanwhile: in a dispatch routine, or in an xdrproc, by a
//!   callback.
//! - A request that has no reply by then may be answered later, as over libtirpc's own tcp, which keeps the request's XID until
//!   the next one comes. The arguments are gone by then, there as here. Over tcp, a client of libtirpc sends nothing more before
//!   it has its reply; here it may, for another of its threads. So the SVCXPRT belongs to the unanswered request until that has
//!   its reply, and each request that comes meanwhile gets an SVCXPRT of its own ([`Transport::lend`]). Exceptions are requests
//!   with RPCSEC_GSS, whose contexts libtirpc keeps at the SVCXPRT of the connection, and those for programs that are not known
//!   here. A request put off before one of these exceptions can be answered again once the latter has had its reply, unless the
//!   former has an authenticator that the SVCXPRT would have to remember; beside a call of an unknown program, another thread can
//!   answer it at any time. A verifier that it was to return is not remembered.
//! - No lock and no exclusive borrow of a `Transport` is held while a function of the program runs: that function may re-enter
//!   through any operation of the SVCXPRT.
//! - libtirpc, each entry under way and each open request own a share of the transport: `svc_destroy` gives up libtirpc's, and
//!   whoever drops the last one frees the transport.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence};
use std::sync::{Arc, TryLockError, Weak};

use crate::sync::{Mutex, MutexGuard, is_poisoned};
use std::time::{Duration, Instant};

use crate::binding::Binding;
use crate::connection::{Request, RequestId};
use crate::driver::{self, Callee, Next, Server, Shared, Wait, busy, pulls, send_rest, service_loop, start};
use crate::error::{Error, Kind};
use crate::ffi::{guard, guard_passing_in_steps, step};
use crate::memory::{PassStage, Region};
use crate::socket::Sockaddr;
use crate::tirpc::bare::{LISTENING, NO_AUTH};
use crate::tirpc::callback::waker;
use crate::tirpc::client::CREDITS_MAX;
use crate::tirpc::jobs::Place;
use crate::tirpc::left::{self, wake_left};
use crate::tirpc::netid::Netid;
use crate::tirpc::programs::{self, Dispatch, Found};
use crate::tirpc::progress::{self, Errand, Watched};
use crate::tirpc::{
    SVCAUTH, SVCXPRT, SVCXPRT_EXT, auth_stat, bool_t, idle, library, netbuf, opaque_auth, polled, rpc_msg,
    run, svc_req, threads, xp_ops, xp_ops2, xprt_register, xprt_stat, xprt_unregister,
};
use crate::xdr::Decoder;
use crate::{fork, log_debug, log_info, socket, thread, wait};

mod parts;
mod routine;

pub use self::parts::outlive;
use self::parts::{Beside, Parts};
use self::routine::{freeargs, getargs, reply};

/// An SVCXPRT of ours, and what belongs to it. libtirpc sees the first member.
#[repr(C)]
pub struct Transport {
    /// libtirpc and the program write here, between calls of our operations and inside the functions that these call.
    xprt: UnsafeCell<SVCXPRT>,
    extension: UnsafeCell<SVCXPRT_EXT>,
    /// Memory for `xp_verf`, for flavours that write there.
    verifier: UnsafeCell<[u8; auth_stat::MAX_AUTH_BYTES]>,
    this: Weak<Transport>,
    /// The connection's transport, if this one serves single requests of the connection ([`Transport::lend`]).
    whole: Option<Weak<Transport>>,
    /// Transports for single requests.
    parts: Mutex<Parts>,
    /// Some of [`Parts::late`] have been answered.
    answered_late: AtomicBool,
    /// Which requests of the connection forked children have answered.
    children: Arc<fork::Answered>,
    /// How many requests threads have, or are to have.
    handed_out: AtomicUsize,
    /// Fork generation of the process that made the transport.
    generation: u64,
    /// Fork generation of the process, a child, that has found its locks free: no thread of the parent has them.
    found_free: AtomicU64,
    /// A thread of a forked child that forks itself has waited for its locks in vain.
    in_vain: AtomicBool,
    /// The turn ([`Place`]) of the latest request that was handed out.
    turn: AtomicU64,
    fd: RawFd,
    /// The connection whose requests are answered here.
    responder: Weak<dyn Callee>,
    /// The same connection, if this process has accepted it: keeps it alive.
    server: Option<Arc<Shared>>,
    state: Mutex<State>,
    /// The latest reply was longer than what goes inline.
    long: AtomicBool,
    /// The latest `xp_recv` returned FALSE, so the `xp_stat` after it ends no request.
    empty: AtomicBool,
    /// It returned FALSE because a thread is forking: what has arrived is looked at later.
    left_alone: AtomicBool,
    /// To be closed: a request was not an RPC call, or a panic of ours has poisoned a lock.
    broken: AtomicBool,
    /// No loop of this process looks at it, since another process reads from the connection; but replies are owed.
    left_out: AtomicBool,
    destroyed: AtomicBool,
    /// The connection was closed; shares of the transport may remain.
    closed: AtomicBool,
    /// Number of late replies under way.
    answering: AtomicUsize,
    /// Whether [`progress`] knows of something to wait for; changed with the connection locked.
    in_table: AtomicBool,
}

// SAFETY: what the pointers in `xprt` and `extension` point to belongs to the transport. These two and `verifier` are used under
// libtirpc's rules: by one thread at a time.
unsafe impl Send for Transport {}
// SAFETY: as above; the rest is behind a lock, or atomic.
unsafe impl Sync for Transport {}

fn lock_if_free<T>(lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match lock.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[derive(Default)]
struct State {
    /// Requests handed up and not yet past their `xp_stat`.
    open: Vec<Open>,
    /// The latest request that is past its `xp_stat` without a reply.
    deferred: Option<Unanswered>,
    gss: Option<Gss>,
}

struct Open {
    /// The loop is told when this ends. `None` for a callback, which is in nobody's loop.
    dispatching: Option<service_loop::Dispatching>,
    /// The request's share of its transport.
    _transport: Arc<Transport>,
    unanswered: Option<Unanswered>,
    id: RequestId,
    /// `None` while the program decodes from it.
    arguments: Option<Decoder>,
    /// `gss_proc` of an RPCSEC_GSS credential.
    gss: Option<u32>,
    /// The argument that came in a Read chunk.
    placed: Option<Region>,
    /// Verifier and authenticator of the request that this one interrupts, and since when.
    interrupted: Option<(opaque_auth, SVCAUTH, Instant)>,
    put_off: Option<Box<PutOff>>,
}

/// The request that was put off before another came on the same SVCXPRT, if its authenticator is a plain one.
struct PutOff {
    unanswered: Option<Unanswered>,
    auth: SVCAUTH,
    /// The loop's thread, in which libtirpc answers a call of a program that is not registered.
    thread: usize,
}

/// What a reply needs of its request.
#[derive(Clone)]
struct Unanswered {
    id: RequestId,
    xid: u32,
    binding: Option<Binding>,
    /// RPCSEC_GSS wraps the results: they are encoded from temporaries.
    wrapped: bool,
    /// Its flavour does not change the results once they are encoded.
    plain: bool,
}

impl State {
    /// The request with this id, if it is still open.
    fn find(&mut self, id: RequestId) -> Option<&mut Open> {
        self.open.iter_mut().rev().find(|request| request.id == id)
    }

    /// The request that `xp_reply` answers now.
    fn unanswered(&self) -> Option<&Unanswered> {
        let Some(request) = self.open.last() else { return self.deferred.as_ref() };
        match &request.put_off {
            // The top request has its reply, so another thread's reply is for the one put off. Not with RPCSEC_GSS, whose request
            // has the authenticator.
            Some(put_off)
                if request.gss.is_none()
                    && request.unanswered.is_none()
                    && put_off.thread != thread::this() =>
            {
                put_off.unanswered.as_ref()
            }
            _ => request.unanswered.as_ref(),
        }
    }

    /// Whether another thread's reply may be for the request that was put off: libtirpc is about to refuse the request that has
    /// come since, if its program is not registered. But a routine that was registered bypassing this library may have it, too.
    fn is_in_doubt(&self) -> bool {
        self.open.last().is_some_and(|request| {
            let another = |put_off: &PutOff| put_off.unanswered.is_some() && put_off.thread != thread::this();
            request.gss.is_none()
                && request.unanswered.is_some()
                && request.put_off.as_deref().is_some_and(another)
        })
    }

    /// Marks the request as answered. False if it was already.
    fn answer(&mut self, id: RequestId) -> bool {
        if let Some(request) = self.find(id) {
            return request.unanswered.take().is_some();
        }
        let put_off = self.open.last_mut().and_then(|request| request.put_off.as_mut());
        let late = put_off.map_or(&mut self.deferred, |put_off| &mut put_off.unanswered);
        late.take_if(|request| request.id == id).is_some()
    }
}

/// The latest RPCSEC_GSS context of the transport. libtirpc caches contexts by the transport's address.
struct Gss {
    auth: SVCAUTH,
    used: Instant,
}

/// After 300 s of idleness libtirpc itself frees a cached context.
const GSS_CACHED: Duration = Duration::from_secs(290);

static OPS: xp_ops = xp_ops {
    xp_recv: Some(recv),
    xp_stat: Some(stat),
    xp_getargs: Some(getargs),
    xp_reply: Some(reply),
    xp_freeargs: Some(freeargs),
    xp_destroy: Some(destroy),
};

/// Operations for callbacks over a connection that this process has opened.
static CALLBACK: xp_ops =
    xp_ops { xp_getargs: Some(getargs), xp_reply: Some(reply), xp_freeargs: Some(freeargs), ..LISTENING };

static OPS2: xp_ops2 = xp_ops2 { xp_control: Some(xp_control) };

impl Transport {
    /// A transport for callbacks over `responder`, a connection to `peer`.
    pub fn callback(responder: Weak<dyn Callee>, fd: RawFd, peer: Option<SocketAddr>) -> Arc<Transport> {
        let local = socket::local(fd).unwrap_or(ANY);
        let netid = Netid::of_address(local).name();
        let (own, remote, address) = addresses(local, peer.unwrap_or(ANY));
        Transport::with(None, responder, None, (fd, &CALLBACK), netid, own, remote, address)
    }

    /// A transport for a connection that this process has accepted.
    pub fn new(
        server: Server,
        netid: &CStr,
        local: netbuf,
        remote: netbuf,
        address: (libc::sockaddr_in6, c_int),
    ) -> Arc<Transport> {
        let fd = server.fd();
        let server = server.shared();
        let responder = Arc::downgrade(&server);
        let own = Transport::with(None, responder, Some(server), (fd, &OPS), netid, local, remote, address);
        threads::accepted(&own);
        own
    }

    /// Whether the calling thread, which is about to fork, need not wait for locks of the connection: they are free; or the
    /// connection is inherited and its locks have never been free in this process, for which it, or an earlier fork, has waited so
    /// long (`is_late`) that a thread of the parent may have held one at the fork, which nobody here gives back.
    pub fn may_fork(&self, is_late: bool) -> bool {
        let is_free = self.is_free() && self.are_lent_free();
        let in_vain = !is_free && (self.in_vain.load(Relaxed) || is_late) && self.may_be_lost();
        self.in_vain.store(in_vain, Relaxed);
        is_free || in_vain
    }

    fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Whether no thread holds a lock of the connection just now.
    fn is_free(&self) -> bool {
        self.server.as_ref().is_none_or(|server| lock_if_free(server).is_some())
            && lock_if_free(&self.state).is_some()
            && lock_if_free(&self.parts).is_some()
            && self.whole.as_ref().and_then(Weak::upgrade).is_none_or(|whole| whole.is_free())
    }

    /// Whether a child that the calling thread is about to fork may answer a request of this connection: one that was put off and
    /// not left to another child, or `any`. Also true if another thread holds the connection just now, since nothing rules it
    /// out.
    pub fn concerns_child(&self, any: bool) -> bool {
        let concerns =
            |server: &Arc<Shared>| lock_if_free(server).is_none_or(|server| server.concerns_child(any));
        !self.closed.load(Relaxed) && self.server.as_ref().is_some_and(concerns)
    }

    /// Lets this process learn what such a child answers.
    pub fn share(&self) {
        if self.server.is_some() {
            self.children.share();
        }
    }

    /// The place of its next request among those that wait for threads.
    pub fn next_place(&self, now: u64) -> Place {
        let place = Place::next(now, self.turn.load(Relaxed));
        self.turn.store(place.turn, Relaxed);
        place
    }

    /// A thread is done with a request.
    pub fn request_done(&self) {
        if self.is_lost() {
            return;
        }
        let left = self.handed_out.fetch_sub(1, AcqRel) - 1;
        if left == 0 {
            // One of the two sees the other: `destroy` sets its flag before it asks whether threads have requests.
            fence(SeqCst);
            self.outlive_connection();
        }
        let closed = self.server().is_some_and(|mut server| server.closed().is_some());
        if left == 0 && (closed || self.broken.load(Relaxed)) {
            // Only the loop ends the connection.
            service_loop::PROGRAM.leave(self.fd);
            waker::ring();
        } else {
            self.tell_loop();
        }
        pull_on();
    }

    /// Whether another request has come; waits for one as long as spinning pays. Called by the loop while threads serve.
    pub fn finds_more(&self) -> bool {
        let Some(server) = self.server.as_ref().filter(|_| !self.is_destroyed()) else { return false };
        service_loop::PROGRAM.look();
        let next = driver::next(server, || others_wait([self.fd, -1]), None);
        service_loop::PROGRAM.look_for_others();
        if matches!(next, Next::Later) {
            service_loop::PROGRAM.leave(self.fd);
            wake_left();
        }
        matches!(next, Next::Request)
    }

    /// What has come is no RPC call: nothing that follows on this connection can be trusted.
    fn breaks(&self) {
        if self.server.is_none() {
            return log_info!("fd {}: a call back is not an RPC call: dropped", self.fd);
        }
        log_info!("fd {}: closed: a request is not an RPC call", self.fd);
        self.broken.store(true, Relaxed);
    }

    /// The transport of the connection.
    pub fn whole(&self) -> Weak<Transport> {
        self.whole.as_ref().unwrap_or(&self.this).clone()
    }

    #[allow(clippy::too_many_arguments)]
    fn with(
        whole: Option<Weak<Transport>>,
        responder: Weak<dyn Callee>,
        server: Option<Arc<Shared>>,
        (fd, ops): (RawFd, &'static xp_ops),
        netid: &CStr,
        local: netbuf,
        remote: netbuf,
        (xp_raddr, xp_addrlen): (libc::sockaddr_in6, c_int),
    ) -> Arc<Transport> {
        let mut xprt = SVCXPRT {
            xp_fd: fd,
            xp_port: 0,
            xp_ops: ops,
            xp_addrlen,
            xp_raddr,
            xp_ops2: &OPS2,
            // SAFETY: a C string.
            xp_tp: unsafe { libc::strdup(c"-".as_ptr()) },
            // SAFETY: a C string.
            xp_netid: unsafe { libc::strdup(netid.as_ptr()) },
            xp_ltaddr: local,
            xp_rtaddr: remote,
            xp_verf: opaque_auth { oa_flavor: 0, oa_base: null_mut(), oa_length: 0 },
            xp_p1: null_mut(),
            xp_p2: null_mut(),
            xp_p3: null_mut(),
            xp_type: 3,
        };
        let children = match (whole.as_ref().and_then(Weak::upgrade), &server) {
            (Some(whole), _) => whole.children.clone(),
            (None, Some(server)) => driver::locked(server).answered(),
            (None, None) => Arc::default(),
        };
        Arc::new_cyclic(|this: &Weak<Transport>| {
            // Addresses of the first member and of the two beside it: the transport does not move.
            let own = this.as_ptr().cast_mut();
            xprt.xp_p1 = own.cast();
            // SAFETY: `own` points to memory of a Transport: only the address of a member is taken.
            xprt.xp_p3 = unsafe { &raw mut (*own).extension }.cast();
            // SAFETY: as above.
            xprt.xp_verf.oa_base = unsafe { &raw mut (*own).verifier }.cast();
            Transport {
                xprt: UnsafeCell::new(xprt),
                extension: UnsafeCell::new(SVCXPRT_EXT { flags: 0, xp_auth: NO_AUTH }),
                verifier: UnsafeCell::new([0; auth_stat::MAX_AUTH_BYTES]),
                this: this.clone(),
                whole,
                parts: Mutex::default(),
                answered_late: AtomicBool::new(false),
                children,
                handed_out: AtomicUsize::new(0),
                generation: fork::generation(),
                found_free: AtomicU64::new(0),
                in_vain: AtomicBool::new(false),
                turn: AtomicU64::new(0),
                fd,
                responder,
                server,
                state: Mutex::default(),
                long: AtomicBool::new(false),
                empty: AtomicBool::new(false),
                left_alone: AtomicBool::new(false),
                broken: AtomicBool::new(false),
                left_out: AtomicBool::new(false),
                destroyed: AtomicBool::new(false),
                closed: AtomicBool::new(false),
                answering: AtomicUsize::new(0),
                in_table: AtomicBool::new(false),
            }
        })
    }

    /// The pointer by which libtirpc and the program know the transport.
    pub fn xprt(&self) -> *mut SVCXPRT {
        // Not derived from the member: a pointer that comes back is used for the whole Transport.
        self.this.as_ptr().cast_mut().cast()
    }

    /// The authenticator of the request that was dispatched last.
    fn auth(&self) -> *mut SVCAUTH {
        // SAFETY: alive; only the address of a member is taken.
        unsafe { &raw mut (*self.extension.get()).xp_auth }
    }

    /// A number that all transports of this connection have, and those of no other connection.
    #[inline]
    pub fn number(&self) -> usize {
        self.responder.as_ptr().addr()
    }

    /// In a forked child, whether a thread of the parent held the connection at the fork: nothing can be done with it then.
    #[inline]
    fn is_lost(&self) -> bool {
        self.may_be_lost() && !self.finds_free()
    }

    /// In a forked child, whether nobody has found its locks free yet.
    #[inline]
    fn may_be_lost(&self) -> bool {
        self.is_inherited() && self.found_free.load(Relaxed) != fork::generation()
    }

    /// Looks whether its locks are free, in a child, where nobody releases one that a thread of the parent held at the fork.
    /// Others here may be looking at the same time, or hold one for a moment; and a signal handler may have interrupted the thread
    /// that holds it.
    #[cold]
    fn finds_free(&self) -> bool {
        const PATIENCE: Duration = Duration::from_millis(100);
        let until = Instant::now() + PATIENCE;
        while self.may_be_lost() {
            if self.is_free() {
                self.found_free.store(fork::generation(), Relaxed);
            } else if Instant::now() >= until {
                return false;
            } else {
                std::thread::yield_now();
            }
        }
        true
    }

    /// The connection, if this process has accepted it.
    fn server(&self) -> Option<MutexGuard<'_, Server>> {
        Some(driver::locked(self.server.as_ref()?))
    }

    #[inline]
    fn state(&self) -> MutexGuard<'_, State> {
        fork::lock(&self.state, self.number())
    }

    /// The same for a single request, where the caller holds another lock: a thread that forks waits for that lock, not for this
    /// one.
    fn state_beside(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A panic of ours has happened while the connection was in use.
    fn is_poisoned(&self) -> bool {
        is_poisoned(&self.state)
            || match &self.server {
                Some(server) => is_poisoned(server),
                None => self.responder.upgrade().is_none_or(|responder| responder.is_poisoned()),
            }
    }

    fn is_destroyed(&self) -> bool {
        self.destroyed.load(Relaxed)
    }

    /// Whether the connection was closed: its descriptor may be another file by then. Called with the connection locked.
    fn is_closed(&self) -> bool {
        match &self.whole {
            Some(whole) => whole.upgrade().is_none_or(|whole| whole.closed.load(SeqCst)),
            None => self.closed.load(SeqCst),
        }
    }

    /// Its descriptor.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// The connection, if this process has accepted it.
    pub fn accepted(&self) -> Option<&Arc<Shared>> {
        self.server.as_ref()
    }

    /// The connection's transport, for those that watch it.
    pub fn watched(&self) -> Weak<dyn Watched> {
        self.whole()
    }

    /// See [`crate::tirpc::server::placed`].
    pub fn placed(&self) -> Option<(*const u8, usize)> {
        let (at, len, pulled) = {
            let state = self.state();
            let region = state.open.last()?.placed.as_ref()?;
            (region.as_ptr(), region.len(), region.reach(PassStage::Decoded))
        };
        if pulled {
            pull_next();
        }
        Some((at, len))
    }

    /// Tells [`progress`] what else may wake this connection.
    pub fn watch_progress(&self) {
        let Some(server) = self.server().filter(|_| !self.is_closed()) else { return };
        if !(server.is_quiet() && self.whole.is_none() && !self.in_table.load(Relaxed)) {
            self.want_progress(server);
        }
    }

    #[cold]
    fn want_progress(&self, server: MutexGuard<'_, Server>) {
        let wants = progress::Wants {
            write: server.wants_write(),
            deadline: server.deadline(),
            pulling: server.pulling(),
            memory: server.waits_for_memory(),
            stands: server.stands_since(),
        };
        if pulls::are_waiting() {
            pull_in_time();
        }
        let watched = wants != progress::Wants::default();
        let shared = self.whole.as_ref().map(Weak::upgrade);
        let whole = match &shared {
            Some(Some(whole)) => whole,
            Some(None) => return,
            None => self,
        };
        // With the connection locked, so that what is found out later is also reported later.
        if whole.in_table.swap(watched, Relaxed) || watched {
            progress::want(server.fd(), wants, || self.watched());
        }
    }

    /// Has the loop look at requests that became ready with the reply to a request that was put off, and at what could not be
    /// sent; in a forked child that serves, also at what has come meanwhile. The loop may run in another thread, and sleep.
    fn tell_loop(&self) {
        let is_there = |server: &MutexGuard<'_, Server>| !server.is_left_to_parent() && !self.is_closed();
        let Some(mut server) = self.server().filter(is_there) else { return };
        // Of room in shared memory no descriptor tells the loop unless it has said that it waits.
        let wants_write = server.wants_write();
        let look = server.request_ready() || server.forked() || (server.awaits_peer() && !wants_write);
        let is_done = self.is_inherited() && server.has_missed() && !server.owes_replies();
        drop(server);
        if is_done
            && let Some(whole) = self.whole().upgrade()
            && whole.left_out.swap(false, Relaxed)
            // SAFETY: alive.
            && let Err(error) = unsafe { xprt_register(whole.xprt()) }
        {
            log_info!("fd {}: is not closed: {error}", self.fd);
        }
        let home = &service_loop::PROGRAM;
        if look {
            home.leave(self.fd);
        }
        match home.is_mine() {
            true if look => wake_left(),
            false if look || wants_write || home.has_left() => waker::ring(),
            _ => {}
        }
    }

    /// Ends the request on top of the stack. `returned`: its routine has returned, and libtirpc's verifier is still there.
    fn end_request(&self, returned: bool) {
        threads::ends();
        if self.is_lost() {
            return;
        }
        let mut state = self.state();
        if let Some(request) = state.open.pop() {
            self.close(request, state, returned);
        }
    }

    /// Ends a request that was on top of the stack. `in_place`: in libtirpc's loop, where the verifier is still there.
    fn close(&self, mut request: Open, mut state: MutexGuard<'_, State>, in_place: bool) {
        // SAFETY: alive; libtirpc writes there in `_gss_authenticate`, which its loop calls between our entries.
        let auth = unsafe { self.auth().read() };
        // RPCSEC_GSS_DESTROY (RFC 2203 §5.2.2): libtirpc has freed the context.
        let ended = request.gss == Some(3);
        if ended {
            state.gss = None;
            let all = state.open.iter_mut().chain([&mut request]);
            for interrupted in all.filter_map(|open| open.interrupted.as_mut()) {
                interrupted.1 = NO_AUTH;
            }
        } else if request.gss.is_some() && !auth.svc_ah_private.is_null() {
            state.gss = Some(Gss { auth, used: Instant::now() });
        }
        let unanswered = request.unanswered.take();
        let id = unanswered.as_ref().map(|request| request.id);
        if id > state.deferred.as_ref().map(|request| request.id) {
            state.deferred = unanswered;
            if request.interrupted.is_none() && !ended && in_place {
                // SAFETY: libtirpc's loop calls `xp_stat` before it leaves the frame in which the verifier may lie.
                unsafe { self.keep_verifier() };
            }
        }
        if state.deferred.is_some() {
            threads::put_off();
        }
        let put_off = request.put_off.take().filter(|it| it.unanswered.is_some() && state.deferred.is_none());
        let returns = put_off.is_some();
        if let Some(put_off) = put_off {
            state.deferred = put_off.unanswered;
            // SAFETY: alive; libtirpc writes there in `_gss_authenticate`, which its loop calls between our entries.
            unsafe { self.auth().write(put_off.auth) };
        }
        drop(state);
        if returns || !in_place {
            let none = opaque_auth { oa_flavor: 0, oa_base: self.verifier.get().cast(), oa_length: 0 };
            // SAFETY: alive; libtirpc writes there between our entries.
            unsafe { (*self.xprt()).xp_verf = none };
        }
        if let Some((verifier, auth, since)) = request.interrupted.take() {
            // libtirpc may have freed a context that was unused for that long.
            let auth = if since.elapsed() < GSS_CACHED { auth } else { NO_AUTH };
            // SAFETY: alive; as above.
            unsafe { (*self.xprt()).xp_verf = verifier };
            // SAFETY: as above.
            unsafe { self.auth().write(auth) };
        }
        if let Some(id) = id
            && let Some(responder) = self.responder.upgrade()
        {
            responder.defer(id, threads::has_forked());
        }
        // Only in libtirpc's loop: threads do this themselves.
        if request.dispatching.take().is_some()
            && let Some(whole) = &self.whole
            && let Some(part) = self.this.upgrade()
        {
            match whole.upgrade() {
                Some(whole) => {
                    // A loop run by the routine may have changed this flag.
                    whole.empty.store(true, Relaxed);
                    whole.take_back(part);
                }
                None => outlive(std::iter::once(part)),
            }
        }
        self.outlive_connection();
    }

    /// Keeps the transport of a destroyed connection while a request of it may still be answered: the program need not know that
    /// the connection has ended. A client whose first call has timed out opens another connection, since it has no credit left.
    fn outlive_connection(&self) {
        let is_unanswered = || {
            let state = self.state();
            state.open.is_empty() && state.deferred.is_some()
        };
        if self.is_destroyed()
            && self.is_idle()
            && is_unanswered()
            && let Some(own) = self.this.upgrade().filter(|_| self.whole.is_none())
            && self.close_connection()
        {
            let parts = std::mem::take(&mut *self.parts());
            drop(parts);
            outlive(std::iter::once(own));
        }
    }

    /// Closes the connection and its descriptor, unless that was done already. A program that keeps the descriptor has set
    /// `xp_fd` to -1; a callback's descriptor belongs to its CLIENT.
    fn close_connection(&self) -> bool {
        let Some(mut server) = self.server().filter(|_| self.whole.is_none()) else { return false };
        if self.closed.swap(true, SeqCst) {
            return false;
        }
        self.forget_fd();
        // Callbacks end here.
        server.shut();
        drop(server);
        self.children.end();
        self.end_context();
        self.close_fd();
        true
    }

    /// Closes the descriptor of a connection that [`Transport::is_lost`]. If no other process has it open, the connection ends.
    fn close_lost(&self) {
        if !self.closed.swap(true, SeqCst) {
            self.forget_fd();
            self.close_fd();
        }
    }

    fn forget_fd(&self) {
        idle::forget(self.fd);
        progress::forget(self.fd);
        self.in_table.store(false, Relaxed);
        busy::leave(|fd| fd == self.fd);
    }

    fn close_fd(&self) {
        let fd = self.without_fd();
        if fd >= 0 {
            socket::close(fd);
        }
    }

    /// Takes the descriptor out of the SVCXPRT: its number is another file's once the connection has ended.
    fn without_fd(&self) -> RawFd {
        // SAFETY: alive; by libtirpc's rules nobody else uses a destroyed transport, except for its replies.
        std::mem::replace(unsafe { &mut (*self.xprt()).xp_fd }, -1)
    }

    /// Has libtirpc destroy the RPCSEC_GSS context, which no reply needs any more.
    fn end_context(&self) {
        if self.answering.load(SeqCst) > 0 {
            // The context goes with the last share.
            return;
        }
        let Some(mut gss) = self.state().gss.take() else { return };
        // SAFETY: alive; libtirpc writes there in `_gss_authenticate`, which its loop calls between our entries.
        unsafe { self.auth().write(NO_AUTH) };
        let is_known = gss.used.elapsed() >= GSS_CACHED || {
            // SAFETY: libtirpc's static operations of a context that it still holds.
            let destroy = unsafe { (*gss.auth.svc_ah_ops).svc_ah_destroy };
            // SAFETY: the context is alive: it was used less than libtirpc's cache time ago.
            destroy.is_some_and(|destroy| unsafe { destroy(&mut gss.auth) } == 0)
        };
        if is_known {
            // libtirpc may or may not have freed the context: its cache may still know this address, so the memory stays
            // allocated.
            std::mem::forget(self.this.clone());
        }
    }

    /// Copies the verifier of the reply into memory of ours: libtirpc's is gone when its loop goes on.
    ///
    /// # Safety
    /// `xp_verf` is as libtirpc's loop has left it, and what it points to is readable.
    unsafe fn keep_verifier(&self) {
        let own = self.verifier.get().cast::<u8>();
        // SAFETY: alive; libtirpc writes there between our entries.
        let verifier = unsafe { (*self.xprt()).xp_verf };
        let length = verifier.oa_length as usize;
        if (1..=auth_stat::MAX_AUTH_BYTES).contains(&length) && verifier.oa_base.cast() != own {
            // SAFETY: readable (contract); room for every verifier, which lies elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(verifier.oa_base.cast(), own, length) };
            // SAFETY: as above.
            unsafe { (*self.xprt()).xp_verf.oa_base = own.cast() };
        }
    }
}

impl Watched for Transport {
    fn wake(&self, crowded: bool) {
        if self.is_lost() {
            return;
        }
        let Some(mut server) = self.server() else { return };
        if crowded {
            server.give_way();
        }
        server.push();
        let (closed, ready) = (server.closed().is_some(), server.request_ready());
        drop(server);
        pull_on();
        if closed && !ready {
            // SAFETY: alive: `progress` has a share of it meanwhile.
            return unsafe { destroy(self.xprt()) };
        }
        self.watch_progress();
        if ready {
            // A request that was held back until the peer had taken replies. Nothing else tells the loop about it.
            service_loop::PROGRAM.leave(self.fd);
            wake_left();
        }
    }

    fn accepted(&self) -> Option<&Arc<Shared>> {
        self.server.as_ref()
    }

    fn idle_since(&self) -> Option<Instant> {
        if self.is_idle() { self.server()?.idle_since() } else { None }
    }

    fn xprt(&self) -> *mut SVCXPRT {
        self.xprt()
    }
}

impl service_loop::Owner for Transport {
    /// Treats the request like one whose routine has returned without a reply: libtirpc's loop never called `xp_stat`.
    fn thrown(&self, serial: u64) {
        if self.is_lost() {
            return;
        }
        let mut state = self.state();
        let left = |it: &mut Open| it.dispatching.as_ref().is_some_and(|routine| routine.serial() == serial);
        let Some(request) = state.open.pop_if(left) else { return };
        log_info!("fd {}: a dispatch routine was left by an exception, or with its thread", self.fd);
        self.close(request, state, false);
        // Nobody has looked for more requests since.
        self.look_again();
        busy::leave_all();
        if service_loop::PROGRAM.has_left() {
            wake_left();
        }
    }

    fn ended(&self, returned: bool) {
        self.end_request(returned);
    }

    fn look_again(&self) {
        if self.server().is_some_and(|mut server| server.request_ready() || !server.rests()) {
            service_loop::PROGRAM.leave(self.fd);
        }
    }
}

/// Nobody knows the transport any more: it is not registered, and no request is open.
impl Drop for Transport {
    fn drop(&mut self) {
        if self.whole.is_none() {
            threads::gone(self);
        }
        let xprt = self.xprt.get_mut();
        for string in [xprt.xp_netid, xprt.xp_tp] {
            // SAFETY: strdup'ed, or replaced by the program with malloc'ed memory, as libtirpc's own are.
            unsafe { libc::free(string.cast()) };
        }
        for address in [xprt.xp_ltaddr.buf, xprt.xp_rtaddr.buf] {
            // SAFETY: NULL or malloc'ed in `copied`.
            unsafe { libc::free(address) };
        }
        if self.is_lost() {
            return;
        }
        self.end_context();
        self.close_connection();
    }
}

/// A netbuf with a copy of the bytes; never with a NULL buffer, which libtirpc's users do not expect.
///
/// # Safety
/// `from.buf` is NULL or readable for `from.len` bytes.
pub unsafe fn copied(from: &netbuf) -> netbuf {
    // SAFETY: by the contract.
    let bytes = unsafe { crate::ffi::bytes(from.buf.cast(), from.len as usize) }.unwrap_or_default();
    let room = bytes.len().max(size_of::<libc::sockaddr_in6>());
    // SAFETY: no memory is passed.
    let buf = unsafe { libc::calloc(1, room) };
    if buf.is_null() {
        return netbuf { maxlen: 0, len: 0, buf };
    }
    // SAFETY: room for `bytes.len()` bytes, just made.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast::<u8>(), bytes.len()) };
    netbuf { maxlen: room as c_uint, len: bytes.len() as c_uint, buf }
}

/// Whether a descriptor of libtirpc's loop, other than these two, is ready.
fn others_wait(except: [RawFd; 2]) -> bool {
    /// Polling more than this would take longer than what is spun for.
    const MOST: usize = 64;
    if let Some(wait) = run::others_wait(except) {
        return wait;
    }
    let mut others = [wait::PollFd::new(-1, false, false); MOST];
    let mut count = 0;
    // SAFETY: called by the loop's own thread.
    for fd in unsafe { polled() }.filter(|fd| !except.contains(fd)) {
        // More than can be polled: one of the rest may be ready.
        let Some(place) = others.get_mut(count) else { return true };
        *place = wait::PollFd::new(fd, true, false);
        count += 1;
    }
    wait::poll(&mut others[..count], Some(Duration::ZERO), None).is_ok_and(|n| n > 0)
}

/// Whether libtirpc's loop polls a descriptor. Called in the loop's thread.
fn is_polled(fd: RawFd) -> bool {
    match library() {
        // SAFETY: libtirpc's own variable, read as its users read it; the descriptor has a bit there.
        Ok(library) if fd < libc::FD_SETSIZE as RawFd => unsafe { libc::FD_ISSET(fd, library.svc_fdset) },
        // SAFETY: the calling thread is the loop's.
        _ => unsafe { polled() }.any(|it| it == fd),
    }
}

/// What xprt_register(3) and xprt_unregister(3) are to work on: the SVCXPRT of a request stands for that of its connection.
/// `None` if the connection has ended.
///
/// # Safety
/// `xprt` is NULL or a live transport of any kind.
pub unsafe fn to_register(xprt: *mut SVCXPRT) -> Option<*mut SVCXPRT> {
    // SAFETY: by the contract.
    let Ok(own) = (unsafe { transport(xprt) }) else { return Some(xprt) };
    own.whole().upgrade().filter(|whole| !whole.is_destroyed()).map(|whole| whole.xprt())
}

/// The program has put the transport back into its loop: the descriptor does not signal what was read already.
///
/// # Safety
/// As [`to_register`].
pub unsafe fn registered_again(xprt: *mut SVCXPRT) {
    // SAFETY: by the contract.
    if let Ok(own) = unsafe { transport(xprt) } {
        own.tell_loop();
    }
}

/// The transport behind an SVCXPRT, kept alive until the entry that asks for it returns.
///
/// # Errors
/// If it is not one of ours, or [`Transport::is_lost`].
///
/// # Safety
/// `xprt` is NULL or a live transport of any kind.
#[inline(always)]
pub unsafe fn transport(xprt: *mut SVCXPRT) -> Result<Arc<Transport>, Error> {
    // SAFETY: by the contract.
    let own = unsafe { perhaps_lost(xprt) }?;
    if own.is_lost() {
        return Err(Error::new(
            Kind::NotSent,
            "another thread of the parent used the connection at the fork",
        ));
    }
    Ok(own)
}

/// The same, whether or not the connection is of any use to this process.
///
/// # Safety
/// As [`transport`].
#[inline(always)]
unsafe fn perhaps_lost(xprt: *mut SVCXPRT) -> Result<Arc<Transport>, Error> {
    // SAFETY: alive or NULL (contract); no reference is made, for the program may write to it meanwhile.
    let ours = !xprt.is_null() && {
        // SAFETY: as above.
        let ops = unsafe { (*xprt).xp_ops };
        std::ptr::eq(ops, &OPS) || std::ptr::eq(ops, &CALLBACK)
    };
    if !ours {
        return Err(Error::new(Kind::Invalid, "the SVCXPRT is not one of librpcrdma"));
    }
    let own = xprt.cast::<Transport>().cast_const();
    // SAFETY: our ops are only ever in the first member of a Transport inside an Arc; alive (contract), so somebody else
    // owns a share.
    unsafe { Arc::increment_strong_count(own) };
    // SAFETY: the share that was just made.
    Ok(unsafe { Arc::from_raw(own) })
}

unsafe extern "C-unwind" fn recv(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> bool_t {
    guard_passing_in_steps(|| {
        // The message lies in the dispatcher's stack frame.
        let frame = message.addr();
        let mut beside = None;
        let received = guard(|| {
            // SAFETY: libtirpc's loop and its transport.
            let own = unsafe { transport(xprt) }?;
            own.empty.store(true, Relaxed);
            if fork::is_still_under_way(own.number(), || others_wait([own.fd, progress::fd()])) {
                own.left_alone.store(true, Relaxed);
                return Ok(0);
            }
            if threads::serve() {
                return Ok(hand_out(&own));
            }
            // A forked child that serves: the waker in libtirpc's table is its parent's.
            if own.is_inherited()
                && let Err(error) = waker::registered()
            {
                log_info!("fd {}: requests may be late: {error}", own.fd);
            }
            service_loop::PROGRAM.look();
            // Perhaps the program's own loop has caught what a dispatch routine threw.
            service_loop::PROGRAM.dispatches(frame);
            // A lock that is poisoned was held during a panic of ours: what it guards is not to be trusted.
            if own.is_poisoned() {
                own.broken.store(true, Relaxed);
            }
            if own.is_destroyed() || own.broken.load(Relaxed) {
                return Ok(0);
            }
            let mut more = false;
            let request = own.server().and_then(|mut server| {
                let put_off =
                    !service_loop::is_nested() && server.puts_off(|| others_wait([own.fd, progress::fd()]));
                if put_off {
                    return None;
                }
                server.keep_deferred();
                let request = server.receive();
                more = server.request_ready();
                request
            });
            let Some(request) = request else {
                own.watch_progress();
                pull_on();
                return Ok(0);
            };
            left::begins(more);
            // Routines that are registered in a way not known here are for libtirpc to find.
            if let Some(part) = own.lend_beside(&request, |program, version| {
                !matches!(programs::find(program, version), Err(None))
            }) {
                beside = Some(Beside { part, request });
                return Ok(0);
            }
            let this: Weak<Transport> = own.this.clone();
            let dispatching = service_loop::PROGRAM.begin(frame, this);
            // SAFETY: the caller's message, with room for credential and verifier as libtirpc's loop provides it.
            if !unsafe { own.open(request, message, Some(dispatching)) } {
                return Ok(0);
            }
            own.empty.store(false, Relaxed);
            Ok(1)
        });
        if let Some(beside) = beside {
            beside.serve(frame)?;
        }
        Ok(received)
    })
}

/// A dispatch routine that may throw.
type Throwing = unsafe extern "C-unwind" fn(*mut svc_req, *mut SVCXPRT);

/// Hands the requests that have come on a connection to threads.
fn hand_out(own: &Arc<Transport>) -> bool_t {
    /// At most this many at a time, so that others have their turn.
    const MOST: usize = 64;
    service_loop::PROGRAM.look_for_others();
    if own.is_poisoned() {
        own.broken.store(true, Relaxed);
    }
    if own.whole.is_some() || own.is_destroyed() || own.broken.load(Relaxed) {
        return 0;
    }
    for _ in 0..MOST {
        let Some(mut server) = own.server() else { return 0 };
        server.keep_deferred();
        let Some(request) = server.receive() else {
            if server.rests() {
                return 0;
            }
            break;
        };
        drop(server);
        own.handed_out.fetch_add(1, AcqRel);
        threads::hand_out(own.clone(), request);
    }
    service_loop::PROGRAM.leave(own.fd);
    wake_left();
    0
}

impl Transport {
    /// Gives a request to the routine of its program, as libtirpc's `svc_getreq_common` does, and ends it. The routine may throw
    /// or longjmp if no guard of the caller encloses this call.
    pub fn dispatch<R>(
        self: Arc<Self>,
        request: Request,
        find: impl FnOnce(u32, u32) -> Found<R>,
        dispatching: Option<service_loop::Dispatching>,
    ) {
        /// Whose request it is. In the loop, a jump may skip the destructor and must leave no share behind.
        enum Of {
            Loop(u64),
            Caller(Arc<Transport>),
        }

        /// Ends the request; `true` when the routine has returned.
        struct Close(Of, bool);

        impl Drop for Close {
            fn drop(&mut self) {
                let Close(of, returned) = self;
                guard(|| {
                    match of {
                        Of::Caller(own) => own.end_request(*returned),
                        Of::Loop(serial) => {
                            let owner = service_loop::PROGRAM.owner(*serial).as_ref().and_then(Weak::upgrade);
                            owner.inspect(|owner| owner.ended(*returned));
                        }
                    }
                    Ok(())
                });
            }
        }

        let serial = dispatching.as_ref().map(service_loop::Dispatching::serial);
        // Where libtirpc's functions decode a credential, a verifier, and what a flavour makes of the credential.
        let mut area = [[0u64; auth_stat::MAX_AUTH_BYTES / 8]; 3];
        let [credential, verifier, cooked] = area.each_mut().map(|part| part.as_mut_ptr());
        let room = |base: *mut u64| opaque_auth { oa_flavor: 0, oa_base: base.cast(), oa_length: 0 };
        // SAFETY: all zero is a valid message.
        let mut message: rpc_msg = unsafe { std::mem::zeroed() };
        message.ru.rm_call.cb_cred = room(credential);
        message.ru.rm_call.cb_verf = room(verifier);
        let Ok(library) = library() else { return };
        // SAFETY: room for credential and verifier was made above.
        if !step(|| Ok(unsafe { self.open(request, &mut message, dispatching) })).unwrap_or(false) {
            return;
        }
        let xprt = self.xprt();
        let mut close = Close(serial.map_or(Of::Caller(self), Of::Loop), false);
        // SAFETY: decoded as a call, so this member of the union is in force.
        let call = unsafe { message.ru.rm_call };
        let mut request = svc_req {
            rq_prog: call.cb_prog,
            rq_vers: call.cb_vers,
            rq_proc: call.cb_proc,
            rq_cred: call.cb_cred,
            rq_clntcred: cooked.cast(),
            rq_xprt: xprt,
            rq_clntname: std::ptr::null_mut(),
            rq_svcname: std::ptr::null_mut(),
        };
        let mut answered = 0;
        // SAFETY: request, message and transport are as libtirpc's own loop makes them.
        let why = unsafe { (library._gss_authenticate)(&mut request, &mut message, &mut answered) };
        if why != auth_stat::AUTH_OK {
            // SAFETY: the transport is alive, with a request open.
            unsafe { (library.svcerr_auth)(xprt, why) };
        } else if answered == 0 {
            match step(|| Ok(find(call.cb_prog, call.cb_vers))).unwrap_or(Err(None)) {
                Ok((routine, running)) => {
                    // SAFETY: the same convention; the routine may throw.
                    let routine = unsafe { std::mem::transmute::<Dispatch, Throwing>(routine) };
                    // SAFETY: the program's dispatch routine, with what it expects.
                    unsafe { routine(&mut request, xprt) };
                    drop(running);
                }
                // SAFETY: the transport is alive, with a request open.
                Err(Some((low, high))) => unsafe { (library.svcerr_progvers)(xprt, low, high) },
                // SAFETY: as above.
                Err(None) => unsafe { (library.svcerr_noprog)(xprt) },
            }
        }
        close.1 = true;
    }

    /// Whether no request is open on it.
    pub fn is_idle(&self) -> bool {
        // Requests handed to threads that no longer exist, in a forked child or after svc_exit(3), do not count.
        self.state().open.is_empty() && (self.handed_out.load(Acquire) == 0 || !threads::serve())
    }

    /// Puts a request on the stack and decodes its header into `message`. False when it is not an RPC Call; it is
    /// discarded then.
    ///
    /// # Safety
    /// `message` is writable, with room for credential and verifier.
    unsafe fn open(
        self: &Arc<Self>,
        request: Request,
        message: *mut rpc_msg,
        dispatching: Option<service_loop::Dispatching>,
    ) -> bool {
        let Request { id, xid, message: payload, binding, wrapped, placed } = request;
        let mut arguments = Decoder::new(payload);
        // SAFETY: by the contract.
        if !library().is_ok_and(|library| unsafe { (library.xdr_callmsg)(arguments.xdr(), message) } != 0) {
            if let Some(responder) = self.responder.upgrade() {
                responder.discard(id);
            }
            // libtirpc's own transport does the same.
            self.whole().upgrade().inspect(|whole| whole.breaks());
            return false;
        }
        // SAFETY: decoded above.
        let message = unsafe { &*message };
        // SAFETY: decoded as a call, so this member of the union is in force.
        let call = unsafe { message.ru.rm_call };
        let credential = call.cb_cred;
        let plain = matches!(
            credential.oa_flavor,
            auth_stat::AUTH_NONE | auth_stat::AUTH_SYS | auth_stat::AUTH_SHORT
        );
        let gss = if credential.oa_flavor == auth_stat::RPCSEC_GSS && credential.oa_length >= 8 {
            // RFC 2203 §5.3.1: the version, then gss_proc.
            // SAFETY: the credential was decoded to `oa_length` bytes at `oa_base`.
            let bytes = unsafe { crate::ffi::bytes(credential.oa_base.cast(), 8) }.unwrap_or_default();
            bytes.last_chunk().map(|word| u32::from_be_bytes(*word))
        } else {
            None
        };
        log_debug!(
            "fd {}: request {xid}: program {} version {} procedure {}",
            self.fd,
            call.cb_prog,
            call.cb_vers,
            call.cb_proc
        );
        let xid = xid.0;
        threads::begins();
        let mut state = self.state();
        let interrupted = if state.open.is_empty() {
            None
        } else {
            // SAFETY: alive; libtirpc writes there in `_gss_authenticate`, which its loop calls between our entries.
            let verifier = unsafe { (*self.xprt()).xp_verf };
            // SAFETY: as above.
            Some((verifier, unsafe { self.auth().read() }, Instant::now()))
        };
        // The authenticator belongs to this request until it ends.
        let put_off = state.deferred.take().filter(|it| it.plain && interrupted.is_none()).map(|it| {
            // SAFETY: alive, as above.
            let auth = unsafe { self.auth().read() };
            Box::new(PutOff { unanswered: Some(it), auth, thread: thread::this() })
        });
        state.open.push(Open {
            dispatching,
            _transport: self.clone(),
            unanswered: Some(Unanswered { id, xid, binding, wrapped, plain }),
            id,
            arguments: Some(arguments),
            gss,
            placed,
            interrupted,
            put_off,
        });
        true
    }
}

unsafe extern "C" fn stat(xprt: *mut SVCXPRT) -> c_uint {
    guard(|| {
        // SAFETY: libtirpc's loop and its transport.
        let Ok(own) = (unsafe { transport(xprt) }) else { return Ok(xprt_stat::XPRT_DIED) };
        if !own.empty.swap(false, Relaxed) {
            own.end_request(true);
        }
        pull_on();
        progress::cool_down();
        if own.left_alone.swap(false, Relaxed) || !own.is_destroyed() && fork::is_under_way(own.number()) {
            // Others have their turn. Perhaps nothing else will announce what has come already.
            service_loop::PROGRAM.leave(own.fd);
            wake_left();
            return Ok(xprt_stat::XPRT_IDLE);
        }
        if own.is_inherited()
            && let Some(mut server) = own.server()
            && server.has_missed()
        {
            // Its descriptor would report again and again what is not for this process.
            if !server.owes_replies() {
                log_info!("fd {}: closed: another process reads from the connection", own.fd);
                return Ok(xprt_stat::XPRT_DIED);
            }
            own.left_out.store(true, Relaxed);
            drop(server);
            // SAFETY: alive.
            unsafe { xprt_unregister(own.xprt()) };
            return Ok(xprt_stat::XPRT_IDLE);
        }
        if threads::serve() {
            let closed = own.broken.load(Relaxed)
                || own.is_poisoned()
                || own.server().is_some_and(|mut server| server.closed().is_some());
            own.watch_progress();
            let ends = closed && own.is_idle() && own.whole.is_none();
            if closed && !ends {
                // The thread that ends the last request has the loop end the transport. Until then the descriptor would report
                // the end again and again.
                run::mute(own.fd);
            }
            return Ok(if ends { xprt_stat::XPRT_DIED } else { xprt_stat::XPRT_IDLE });
        }
        if own.is_destroyed() {
            // Freed on return, if no other request is open: libtirpc's loop is done with it.
            return Ok(xprt_stat::XPRT_IDLE);
        }
        if service_loop::PROGRAM.has_left() {
            wake_left();
        }
        if own.broken.load(Relaxed) || own.is_poisoned() {
            return Ok(xprt_stat::XPRT_DIED);
        }
        let Some(server) = &own.server else { return Ok(xprt_stat::XPRT_IDLE) };
        let closed = if service_loop::is_nested() {
            // The callback that is waiting first checks whether it has its reply.
            own.server().is_some_and(|mut server| server.closed().is_some())
        } else {
            // Only in our one loop, and not where a routine runs a loop of its own.
            let looks_itself = run::is_alone_here() && !service_loop::PROGRAM.is_dispatching();
            match driver::next(server, || others_wait([own.fd, -1]), looks_itself.then_some(server)) {
                // A transport that the program has taken out of its loop waits until it is back: `registered_again`.
                Next::Request if is_polled(own.fd) => return Ok(xprt_stat::XPRT_MOREREQS),
                Next::Request => false,
                Next::Later => {
                    service_loop::PROGRAM.leave(own.fd);
                    own.watch_progress();
                    wake_left();
                    return Ok(xprt_stat::XPRT_IDLE);
                }
                Next::Arrival | Next::Soon => false,
                Next::Closed => true,
            }
        };
        // Freed when no other request is open. During a callback, the thread that waits for its reply sees to it.
        if closed && (own.is_idle() || !service_loop::is_nested()) {
            return Ok(xprt_stat::XPRT_DIED);
        }
        own.watch_progress();
        Ok(xprt_stat::XPRT_IDLE)
    })
}

unsafe extern "C" fn destroy(xprt: *mut SVCXPRT) {
    guard(|| {
        // SAFETY: libtirpc's loop or the program, with a live transport.
        let own = unsafe { perhaps_lost(xprt) }?;
        // The SVCXPRT of a request stands for that of its connection.
        let Some(own) = own.whole().upgrade() else { return Ok(()) };
        if own.destroyed.swap(true, Relaxed) {
            return Ok(());
        }
        if own.is_lost() {
            // SAFETY: alive.
            unsafe { xprt_unregister(own.xprt()) };
            // Its memory stays: nobody can take the locks of what it holds.
            log_info!("fd {}: closed: a thread of the parent was using the connection at the fork", own.fd);
            own.close_lost();
            return Ok(());
        }
        if let Some(server) = &own.server {
            send_rest(std::slice::from_ref(server), Wait::CLOSE);
        }
        // SAFETY: alive.
        unsafe { xprt_unregister(own.xprt()) };
        fence(SeqCst);
        own.outlive_connection();
        // SAFETY: the share that `register` gave to libtirpc, which does not know the transport any more.
        threads::bury(unsafe { Arc::from_raw(Arc::as_ptr(&own)) });
        if start::is_refused() {
            // A listener on a refused device accepts nobody any more.
            progress::again(Errand::Adapters, Instant::now());
        }
        Ok(())
    });
}

/// Sets and gets the credits that a connection grants: an `unsigned`.
pub const SVCSET_RDMA_CREDITS: c_uint = 0x5244_4d11;
/// See [`SVCSET_RDMA_CREDITS`].
pub const SVCGET_RDMA_CREDITS: c_uint = 0x5244_4d12;

unsafe extern "C" fn xp_control(xprt: *mut SVCXPRT, request: c_uint, info: *mut c_void) -> bool_t {
    guard(|| {
        // SVCGET_CONNMAXREC and its like belong to listeners, and those are libtirpc's own.
        if info.is_null() || !matches!(request, SVCSET_RDMA_CREDITS | SVCGET_RDMA_CREDITS) {
            return Ok(0);
        }
        // SAFETY: the program's live transport.
        let own = unsafe { transport(xprt) }?;
        let Some(responder) = own.responder.upgrade() else { return Ok(0) };
        let info = info.cast::<u32>();
        if request == SVCGET_RDMA_CREDITS {
            // SAFETY: not NULL; our own contract for this request.
            unsafe { info.write_unaligned(responder.grants(None)) };
            return Ok(1);
        }
        // SAFETY: as above.
        let credits = unsafe { info.read_unaligned() };
        if !(1..=CREDITS_MAX).contains(&credits) {
            return Ok(0);
        }
        responder.grants(Some(credits));
        Ok(1)
    })
}

pub const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// The addresses in an SVCXPRT: local, remote, and remote once more.
pub fn addresses(local: SocketAddr, peer: SocketAddr) -> (netbuf, netbuf, (libc::sockaddr_in6, c_int)) {
    let (mut local, mut peer) = (Sockaddr::from(local), Sockaddr::from(peer));
    // SAFETY: all zero is a valid address.
    let mut address: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    let length = peer.as_bytes().len();
    // SAFETY: a sockaddr_in6 is the longer of the two kinds of addresses; the buffers do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(peer.as_bytes().as_ptr(), (&raw mut address).cast::<u8>(), length);
    }
    // SAFETY: points to `local`, which is alive.
    let own = unsafe { copied(&local.netbuf()) };
    // SAFETY: points to `peer`, which is alive.
    let remote = unsafe { copied(&peer.netbuf()) };
    (own, remote, (address, length as c_int))
}

/// Starts pulling the long Calls whose turn has come: another one's memory may have been released.
fn pull_on() {
    if !pulls::are_waiting() {
        return;
    }
    let all = pulls::go_on();
    let home = &service_loop::PROGRAM;
    match home.is_mine() {
        _ if !home.has_left() => {}
        true => wake_left(),
        false => waker::ring(),
    }
    if !all {
        // Whoever holds the connection may have looked before this.
        progress::call_at(Errand::Pulls, Instant::now(), pull_later);
    } else {
        pull_in_time();
    }
}

/// The same when the program has decoded a Call: its routine may run for long.
#[cold]
fn pull_next() {
    pulls::decoded();
    pull_on();
}

/// The same after some time, in case no memory is released.
fn pull_in_time() {
    if let Some(time) = pulls::alarm() {
        progress::call_at(Errand::Pulls, time, pull_later);
    }
}

fn pull_later() {
    guard(|| {
        pulls::alarmed();
        pull_on();
        Ok(())
    });
}
