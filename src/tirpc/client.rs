//! The CLIENT of a connection over RDMA: `clnt_call` and its kin, as libtirpc's stream transport does them.
//!
//! A handle holds little: program, version, timeout and the last error. The connection belongs to the socket: CLIENTs made on one
//! descriptor share it, as they may with libtirpc (`connections`), and calls of several threads are pipelined. The CLIENT of a
//! server, which calls back over a connection that the server has accepted, differs only in its connection.
//!
//! Owned here: the vtable, a handle's settings, its end, and the fallback to tcp. Left to others: the order of a call (`call`);
//! waiting, credits, and the choice of device (`driver`); names (`netid`).
//!
//! - `auth` decides for which part of a call its AUTH must not be shared: with AUTH_NONE and AUTH_SYS never while the program's
//!   own procedures run, with RPCSEC_GSS for the whole call. Waiting for the AUTH is part of the time of the call.
//! - Signals are blocked during a call, as in libtirpc, but let through while it sleeps.
//! - The transport header is not part of the XDR stream: RPCSEC_GSS signs from position 0 on.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::size_of;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::config::{self, Config};
use crate::connection::characteristics::Wish;
use crate::driver::start::{self, Failure, START_TIMEOUT};
use crate::driver::{self, Callee, Caller, Client, Peer, Reverse, Room, Shared};
use crate::error::{Error, Kind, clnt_stat};
use crate::ffi::{guard, guard_in_steps, guard_in_steps_cancellable, step};
use crate::signals::BlockedSignals;
use crate::socket::Sockaddr;
use crate::stats::{self, Counter};
use crate::tirpc::auth;
use crate::tirpc::callback::{self, waker};
use crate::tirpc::{CLIENT, RPCBPROG, bool_t, clnt_ops, control, netbuf, rpc_err};
use crate::wire::Xid;
use crate::wire::characteristics::Characteristic;
use crate::xdr::XdrProc;
use crate::{fork, log_error, log_info, log_warn, signals, socket, thread, xdr};

use call::Call;

mod call;

/// What the creator of a CLIENT asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Netid "rdma": RDMA or an error.
    Required,
    /// `RPCRDMA_REDIRECT=tcp`: RDMA if the server speaks it.
    Try,
}

/// Sets and gets the largest reply of later calls on a CLIENT, in bytes of results: a `size_t`.
pub const CLSET_RDMA_MAXREPLY: c_uint = 0x5244_4d01;
/// See [`CLSET_RDMA_MAXREPLY`].
pub const CLGET_RDMA_MAXREPLY: c_uint = 0x5244_4d02;
/// Sets and gets the credits that the calls of a CLIENT ask for: an `unsigned`.
pub const CLSET_RDMA_CREDITS: c_uint = 0x5244_4d03;
/// See [`CLSET_RDMA_CREDITS`].
pub const CLGET_RDMA_CREDITS: c_uint = 0x5244_4d04;
/// Sets and gets the credits that are granted for callbacks: an `unsigned`.
pub const CLSET_RDMA_REVERSE_CREDITS: c_uint = 0x5244_4d05;
/// See [`CLSET_RDMA_REVERSE_CREDITS`].
pub const CLGET_RDMA_REVERSE_CREDITS: c_uint = 0x5244_4d06;
/// Sets whether callbacks may have chunks: a `bool_t`.
pub const CLSET_RDMA_REVERSE_CHUNKS: c_uint = 0x5244_4d07;
/// Gets how often the connection was established: an `unsigned`.
pub const CLGET_RDMA_CONNECTIONS: c_uint = 0x5244_4d08;
/// Sets and gets the size of our Receives in bytes, as the peer is told: an `unsigned`.
pub const CLSET_RDMA_RECEIVE_SIZE: c_uint = 0x5244_4d09;
/// See [`CLSET_RDMA_RECEIVE_SIZE`].
pub const CLGET_RDMA_RECEIVE_SIZE: c_uint = 0x5244_4d0a;

/// How long a moved client that may fall back to tcp waits for a peer that neither answers nor closes (a stock server closes
/// at once).
const TRY_TIMEOUT: Duration = Duration::from_millis(500);

/// One CLIENT. libtirpc sees the first member.
///
/// The program owns a share until `clnt_destroy`, and so does each entry under way: whoever drops the last one frees the handle.
#[repr(C)]
struct Handle {
    /// libtirpc and the program read and write here, also inside the functions that a call runs.
    client: UnsafeCell<CLIENT>,
    connection: Connected,
    /// The peer's address, as `CLGET_SVC_ADDR` shows it.
    address: Box<[u8]>,
    control: Mutex<Control>,
    /// The program is to be told what the peer says about itself.
    listens: AtomicBool,
    /// The latest Call was longer than what goes inline.
    long: AtomicBool,
    /// Shared with the other CLIENTs on the descriptor.
    uses: Arc<Uses>,
    destroyed: AtomicBool,
}

// SAFETY: what the pointers in `client` point to belongs to the program or to libtirpc, and is used under their rules.
unsafe impl Send for Handle {}
// SAFETY: as above; the rest is behind a lock, atomic, or does not change.
unsafe impl Sync for Handle {}

/// Nobody uses the handle any more.
impl Drop for Handle {
    fn drop(&mut self) {
        let client = self.client.get_mut();
        for string in [client.cl_netid, client.cl_tp] {
            // SAFETY: NULL, or a C string that clnt_tli_create put there: "" (static) or strdup'ed.
            if !string.is_null() && unsafe { *string } != 0 {
                // SAFETY: strdup'ed, see above.
                unsafe { libc::free(string.cast()) };
            }
        }
    }
}

/// The connection on which a CLIENT makes its calls.
pub enum Connected {
    /// A connection that the CLIENT has opened.
    Forward(Arc<Client>),
    /// A connection that the CLIENT's server has accepted.
    Reverse(Arc<Reverse>),
}

impl Deref for Connected {
    type Target = dyn Caller;

    fn deref(&self) -> &(dyn Caller + 'static) {
        match self {
            Connected::Forward(client) => &**client,
            Connected::Reverse(reverse) => &**reverse,
        }
    }
}

/// The calls that run on one descriptor. Destruction of a CLIENT waits for that CLIENT's calls, and for those of others if it
/// closes the descriptor: as soon as the number is used again, they would read and write another file.
#[derive(Default)]
struct Uses {
    table: Mutex<UseTable>,
    ended: Condvar,
}

#[derive(Default)]
struct UseTable {
    next: u64,
    running: Vec<Use>,
    /// Number of destructions that are waiting.
    waiting: usize,
    /// Destructions that are left to the last call that they would have to wait for.
    left: Vec<(Destruction, Calls)>,
}

/// A call that runs.
struct Use {
    /// Calls are numbered in the order in which they began.
    number: u64,
    /// Address of the handle.
    handle: usize,
    thread: usize,
    /// A forked child has none of the threads of its parent.
    generation: u64,
}

impl Uses {
    fn table(&self) -> MutexGuard<'_, UseTable> {
        self.table.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Destroys a CLIENT when no call runs on it any more; if this closes the descriptor, when all calls that have begun there by
    /// now have ended. Waits for them, but not in a routine (see [`callback::in_routine`]), nor inside a call with the CLIENT,
    /// where an xdrproc may be: then returns false if calls are under way, and the last of them destroys the CLIENT.
    fn end(&self, destruction: Destruction) -> bool {
        let mut table = self.table();
        let mut calls = Calls {
            handle: Arc::as_ptr(&destruction.handle).addr(),
            before: if destruction.closes { table.next } else { 0 },
            // A call that the calling thread is in cannot end while the thread waits.
            but: Some(thread::this()),
            generation: fork::generation(),
        };
        let own = |it: &Use| calls.have(it) && calls.but == Some(it.thread);
        let waits = !callback::in_routine() && !table.running.iter().any(own);
        if !waits {
            calls.but = None;
        }
        let under_way = |table: &UseTable| table.running.iter().any(|it| calls.have(it));
        if !waits && under_way(&table) {
            table.left.push((destruction, calls));
            return false;
        }
        table.waiting += 1;
        while under_way(&table) {
            table = self.ended.wait(table).unwrap_or_else(|e| e.into_inner());
        }
        table.waiting -= 1;
        drop(table);
        destruction.carry_out(waits);
        true
    }
}

/// The calls that must end before a destruction.
struct Calls {
    /// Those on this handle.
    handle: usize,
    /// And those with lower numbers than this, except those of the thread `but`.
    before: u64,
    but: Option<usize>,
    generation: u64,
}

impl Calls {
    fn have(&self, it: &Use) -> bool {
        let others = it.number < self.before && self.but != Some(it.thread);
        it.generation == self.generation && (it.handle == self.handle || others)
    }
}

/// A CLIENT that the program has given up.
struct Destruction {
    handle: Arc<Handle>,
    /// It closes the descriptor.
    closes: bool,
}

impl Destruction {
    /// No call runs on the handle. `waits`: whether to wait for a routine that another thread runs on the connection.
    fn carry_out(self, waits: bool) {
        // Of two CLIENTs that are destroyed at the same time, one closes it.
        if self.closes
            && let Connected::Forward(connection) = &self.handle.connection
            && connection.shut(waits)
        {
            connections::remove(Caller::fd(&**connection), connection);
        }
    }
}

struct Control {
    program: u32,
    version: u32,
    /// Set by `CLSET_TIMEOUT`, or by the latest call as long as `fixed` is not set.
    timeout: libc::timeval,
    fixed: bool,
    close: bool,
    /// XID of the latest call, and the one that `CLSET_XID` wants next.
    last_xid: u32,
    next_xid: Option<u32>,
    max_reply: usize,
    error: rpc_err,
    explanation: Option<String>,
    listener: Option<Listener>,
}

impl Control {
    /// The XID of a call that begins: `fresh`, unless the program wants another one.
    fn next(&mut self, fresh: Xid) -> Xid {
        let xid = self.next_xid.take().map_or(fresh, Xid);
        self.last_xid = xid.0;
        xid
    }
}

/// Tells the program that has a CLIENT what the peer has said about itself.
pub type Told = Arc<dyn Fn(*mut CLIENT, &Peer) + Send + Sync>;

struct Listener {
    told: Told,
    /// The connection, and how many updates the peer had sent on it, when the program was last told.
    heard: (usize, u32),
}

static OPS: clnt_ops = clnt_ops {
    cl_call: Some(call),
    cl_abort: Some(abort),
    cl_geterr: Some(geterr),
    cl_freeres: Some(freeres),
    cl_destroy: Some(destroy),
    cl_control: Some(control),
};

// ------------------------------------------------------------------------------------------------------ creation

/// Stands in for `clnt_vc_create`, whose buffer sizes have no meaning here; `None` asks for the stock transport.
///
/// # Errors
/// When the system refuses, and when RDMA is required and the server does not speak it.
///
/// # Safety
/// As `clnt_vc_create`: `raddr` is NULL or points to a netbuf.
pub unsafe fn vc_create(
    fd: c_int,
    raddr: *const netbuf,
    prog: u32,
    vers: u32,
    intent: Intent,
) -> Result<Option<*mut CLIENT>, Error> {
    if prog == RPCBPROG && intent == Intent::Try {
        return Ok(None);
    }
    let config = match config::get() {
        Ok(config) => config,
        // A broken configuration moves nobody, but "fallback = no" is understood: RDMA or an error.
        Err(_) if intent == Intent::Try && config::understood().fallback => return Ok(None),
        Err(error) => return Err(error),
    };
    // SAFETY: by the contract.
    let address = unsafe { address_bytes(raddr) };
    if let Some((connection, uses)) = connections::find(fd) {
        return Ok(Some(new(Connected::Forward(connection), uses, address, prog, vers, config)));
    }
    let refuse = |error: Error| if intent == Intent::Try { Ok(None) } else { Err(error) };
    if !socket::is_stream(fd) || socket::local(fd).is_none() {
        return refuse(Error::new(Kind::Invalid, format!("fd {fd} is not a TCP socket")));
    }
    let connected = socket::peer(fd);
    if connected.is_some() && intent == Intent::Try {
        // It could not be reconnected if the server does not speak RDMA.
        log_info!("fd {fd}: program {prog} version {vers} goes over tcp: the program connected it itself");
        return Ok(None);
    }
    let Some(to) = connected.or(Sockaddr::parse(&address)) else {
        return refuse(Error::new(Kind::Invalid, "no internet address to connect to"));
    };
    if intent == Intent::Try && start::is_stock(to) {
        log_info!("fd {fd}: program {prog} version {vers} goes over tcp: so did {to} a moment ago");
        return Ok(None);
    }
    let signals = BlockedSignals::all();
    let room = if config::bindings().knows(prog, vers) { Room::Little } else { Room::Same };
    let timeout = if intent == Intent::Try && config.fallback { TRY_TIMEOUT } else { START_TIMEOUT };
    let mask = Some(signals.before());
    let opened =
        start::open(fd, to, connected.is_some(), timeout, room, config, mask).and_then(|connection| {
            connection.agree(mask).map_err(Failure::Start)?;
            Ok(connection)
        });
    drop(signals);
    match opened {
        Ok(connection) => {
            let how = connection.describe();
            log_info!("fd {fd}: program {prog} version {vers} goes over rdma to {to} ({how})");
            let uses = connections::add(fd, connection.clone());
            Ok(Some(new(Connected::Forward(connection), uses, address, prog, vers, config)))
        }
        Err(Failure::Connect(error)) => Err(error),
        Err(Failure::Start(error)) if intent == Intent::Try && config.fallback => {
            log_info!("fd {fd}: program {prog} version {vers} goes over tcp: {error}");
            stats::add(Counter::Fallbacks, 1);
            if error.kind() != Kind::Timeout {
                start::note_stock(to);
            }
            // The stock transport connects the socket again. Even if it has lost its peer by now, it must be disconnected first.
            socket::disconnect(fd)?;
            Ok(None)
        }
        Err(Failure::Start(error)) => {
            let remedy = match (intent, error.kind()) {
                (Intent::Try, _) => "; RPCRDMA_FALLBACK=no forbids tcp",
                (Intent::Required, Kind::ConnectionLost | Kind::Refused) => {
                    "; its server must run with librpcrdma, and have descriptors left for its clients"
                }
                (Intent::Required, _) => "",
            };
            let text = format!("no RDMA connection to {to}: {error}{remedy}");
            let kind = match error.kind() {
                Kind::ConnectionLost => Kind::Os(libc::ECONNRESET),
                kind => kind,
            };
            Err(Error::new(kind, text))
        }
    }
}

/// A CLIENT for callbacks over an accepted connection; `address` is the peer's.
///
/// # Errors
/// As [`Reverse::new`].
pub fn reverse(
    server: Arc<Shared>,
    hooks: &'static driver::reverse::Hooks,
    address: Box<[u8]>,
    prog: u32,
    vers: u32,
) -> Result<*mut CLIENT, Error> {
    let config = config::get()?;
    waker::registered()?;
    let reverse = Reverse::new(server, config, hooks)?;
    Ok(new(Connected::Reverse(reverse), Arc::default(), address, prog, vers, config))
}

/// Moves the CLIENT of a server to another connection.
///
/// # Errors
/// `Invalid` for any other CLIENT; as [`Reverse::rebind`].
///
/// # Safety
/// `client` is NULL or a live handle of any transport.
pub unsafe fn rebind(client: *mut CLIENT, server: Arc<Shared>) -> Result<(), Error> {
    // SAFETY: by the contract.
    match &unsafe { handle(client) }?.connection {
        Connected::Reverse(reverse) => reverse.rebind(server),
        Connected::Forward(_) => {
            Err(Error::new(Kind::Invalid, "the CLIENT was not made by rpcrdma_clnt_reverse"))
        }
    }
}

/// The connection that a CLIENT has opened, and its program and version.
///
/// # Errors
/// `Invalid` for the CLIENT of a server.
///
/// # Safety
/// `client` is NULL or a live handle of any transport.
pub unsafe fn opened(client: *mut CLIENT) -> Result<(Arc<Client>, (u32, u32)), Error> {
    // SAFETY: by the contract.
    let handle = unsafe { handle(client) }?;
    let Connected::Forward(connection) = &handle.connection else {
        let text = "the CLIENT calls back: it serves nothing itself";
        return Err(Error::new(Kind::Invalid, text));
    };
    let control = handle.control();
    Ok((connection.clone(), (control.program, control.version)))
}

/// Waits for callbacks and serves them. Returns how many it served.
///
/// # Errors
/// `Invalid` for a CLIENT that serves nothing; as [`Client::poll_callbacks`].
///
/// # Safety
/// As [`opened`].
pub unsafe fn poll(client: *mut CLIENT, timeout: libc::timeval) -> Result<usize, Error> {
    // SAFETY: by the contract.
    let handle = step(|| unsafe { handle(client) })?;
    run_recorded(handle, client, |_, signals| {
        // SAFETY: by the contract.
        let (connection, _) = unsafe { opened(client) }?;
        if !connection.is_serving() {
            return Err(Error::new(Kind::Invalid, "no program is served: call rpcrdma_clnt_serve first"));
        }
        if !valid(&timeout) {
            return Err(Error::new(Kind::Invalid, "rpcrdma_clnt_poll: invalid timeout"));
        }
        connection.poll_callbacks(Instant::now() + duration(&timeout), Some(signals.before()))
    })
}

/// What is known about the peer of a CLIENT's connection.
///
/// # Errors
/// `Invalid` for the CLIENT of another transport; as [`Caller::peer`].
///
/// # Safety
/// `client` is NULL or a live handle of any transport.
pub unsafe fn peer(client: *mut CLIENT) -> Result<Peer, Error> {
    // SAFETY: by the contract.
    unsafe { handle(client) }?.connection.peer(true)
}

/// What the connection of a CLIENT runs on, and what was agreed for it.
///
/// # Errors
/// `Invalid` for the CLIENT of another transport, and for one that calls back.
///
/// # Safety
/// As [`peer`].
#[cfg(feature = "tool")]
pub unsafe fn agreed(client: *mut CLIENT) -> Result<crate::driver::Agreed, Error> {
    // SAFETY: by the contract.
    match &unsafe { handle(client) }?.connection {
        Connected::Forward(connection) => Ok(connection.agreed()),
        Connected::Reverse(_) => Err(Error::new(Kind::Invalid, "the CLIENT calls back")),
    }
}

/// Asks the peer to change a characteristic, and waits for the outcome.
///
/// # Errors
/// `Invalid` for a characteristic or value that does not exist, and for an invalid timeout; as [`Caller::request`].
///
/// # Safety
/// As [`peer`].
pub unsafe fn request(
    client: *mut CLIENT,
    which: u32,
    value: u32,
    timeout: libc::timeval,
) -> Result<Wish, Error> {
    // SAFETY: by the contract.
    let handle = step(|| unsafe { handle(client) })?;
    run_recorded(handle, client, |handle, signals| {
        let what = Characteristic::of(which, value).ok_or_else(|| {
            let text =
                format!("rpcrdma_clnt_request: there is no characteristic {which} with the value {value}");
            Error::new(Kind::Invalid, text)
        })?;
        if !valid(&timeout) {
            return Err(Error::new(Kind::Invalid, "rpcrdma_clnt_request: invalid timeout"));
        }
        handle.connection.request(what, Instant::now() + duration(&timeout), Some(signals.before()))
    })
}

/// From now on tells the program what the peer says about itself; `None` ends this.
///
/// # Errors
/// `Invalid` for the CLIENT of another transport.
///
/// # Safety
/// As [`peer`].
pub unsafe fn on_update(client: *mut CLIENT, told: Option<Told>) -> Result<(), Error> {
    // SAFETY: by the contract.
    let handle = unsafe { handle(client) }?;
    let heard = handle.connection.peer(false).map_or((0, 0), |peer| (peer.connection, peer.updates));
    let mut control = handle.control();
    handle.listens.store(told.is_some(), Relaxed);
    control.listener = told.map(|told| Listener { told, heard });
    Ok(())
}

/// Keeps an error for `clnt_perror`.
///
/// # Safety
/// As [`opened`].
pub unsafe fn record(client: *mut CLIENT, error: &Error) {
    // SAFETY: by the contract.
    if let Ok(handle) = unsafe { handle(client) } {
        handle.record(error);
    }
}

fn new(
    connection: Connected,
    uses: Arc<Uses>,
    address: Box<[u8]>,
    prog: u32,
    vers: u32,
    config: &Config,
) -> *mut CLIENT {
    let cl_auth = auth::none();
    let control = Control {
        program: prog,
        version: vers,
        timeout: libc::timeval { tv_sec: 0, tv_usec: 0 },
        fixed: false,
        close: false,
        last_xid: 0,
        next_xid: None,
        max_reply: connection.max_reply(config),
        error: rpc_err::new(clnt_stat::SUCCESS, 0),
        explanation: None,
        listener: None,
    };
    let mut client =
        CLIENT { cl_auth, cl_ops: &OPS, cl_private: null_mut(), cl_netid: null_mut(), cl_tp: null_mut() };
    let handle = Arc::new_cyclic(|this: &Weak<Handle>| {
        // The address of the handle, which does not move.
        client.cl_private = this.as_ptr().cast_mut().cast();
        let (client, control) = (UnsafeCell::new(client), Mutex::new(control));
        let (listens, destroyed) = (AtomicBool::new(false), AtomicBool::new(false));
        Handle {
            client,
            connection,
            address,
            control,
            listens,
            long: AtomicBool::new(false),
            uses,
            destroyed,
        }
    });
    // The program's share.
    Arc::into_raw(handle).cast_mut().cast()
}

/// The connections of this process, by descriptor: CLIENTs made on one descriptor share its connection.
///
/// An entry outlives its CLIENTs when the program keeps the descriptor (`CLSET_FD_NCLOSE`): the stream is in full
/// operation and cannot start anew. A number that is another file by now is recognised by its inode.
mod connections {
    use super::*;

    type Table = HashMap<c_int, (Arc<Client>, Arc<Uses>)>;

    fn table() -> MutexGuard<'static, Table> {
        static TABLE: fork::Lock<Table> = fork::Lock::new();
        TABLE.lock()
    }

    pub fn find(fd: c_int) -> Option<(Arc<Client>, Arc<Uses>)> {
        // A connection that is being re-established may be slow to answer: not under the lock of all of them.
        let (connection, uses) = table().get(&fd).cloned()?;
        if connection.alive() {
            return Some((connection, uses));
        }
        remove(fd, &connection);
        None
    }

    pub fn add(fd: c_int, connection: Arc<Client>) -> Arc<Uses> {
        let uses = Arc::<Uses>::default();
        table().insert(fd, (connection, uses.clone()));
        uses
    }

    /// Forgets a connection, unless the number is another connection's by now.
    pub fn remove(fd: c_int, connection: &Arc<Client>) {
        let mut table = table();
        if table.get(&fd).is_some_and(|(known, _)| Arc::ptr_eq(known, connection)) {
            table.remove(&fd);
        }
    }
}

/// # Safety
/// `address` is NULL or points to a netbuf whose `buf` is readable for `len` bytes.
pub(crate) unsafe fn address_bytes(address: *const netbuf) -> Box<[u8]> {
    // SAFETY: by the contract.
    let Some(netbuf) = (unsafe { crate::ffi::reference(address) }) else { return Box::default() };
    // SAFETY: by the contract.
    let bytes = unsafe { crate::ffi::bytes(netbuf.buf.cast(), netbuf.len as usize) };
    bytes.unwrap_or_default().into()
}

// ------------------------------------------------------------------------------------------------------- the ops

/// The handle behind a CLIENT, kept alive until the entry that asks for it returns.
///
/// # Safety
/// `client` is NULL or a live handle of any transport.
unsafe fn handle(client: *mut CLIENT) -> Result<Arc<Handle>, Error> {
    if client.is_null() || !client.is_aligned() {
        return Err(Error::new(Kind::Invalid, "CLIENT is NULL"));
    }
    // SAFETY: alive (contract); no reference is made, for the program may write to it meanwhile.
    let ops = unsafe { (*client).cl_ops };
    if !std::ptr::eq(ops, &OPS) {
        return Err(Error::new(Kind::Invalid, "the CLIENT is not one of librpcrdma"));
    }
    let own = client.cast::<Handle>().cast_const();
    // SAFETY: our ops are only ever in the first member of a Handle inside an Arc; alive (contract), so somebody else owns a
    // share.
    unsafe { Arc::increment_strong_count(own) };
    // SAFETY: the share that was just made.
    Ok(unsafe { Arc::from_raw(own) })
}

impl Handle {
    /// Whether the next Call is likely to be longer than what goes inline, as the latest was.
    fn is_long(&self) -> bool {
        self.long.load(Relaxed)
    }

    /// Notes the length of the latest Call.
    fn tell_length(&self, bytes: usize) {
        let long = bytes > config::INLINE;
        if self.long.load(Relaxed) != long {
            self.long.store(long, Relaxed);
        }
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn record(&self, error: &Error) -> c_uint {
        let status = error.clnt_stat();
        let mut control = self.control();
        control.error = rpc_err::new(status, error.errno());
        control.explanation = Some(error.text().to_owned());
        status
    }

    /// What the program is to be told, if the peer has said something about itself since the last time.
    fn news(&self) -> Option<News<'_>> {
        let peer = self.connection.peer(false).ok()?;
        let heard = (peer.connection, peer.updates);
        let mut control = self.control();
        let listener = control.listener.as_mut().filter(|it| it.heard != heard)?;
        listener.heard = heard;
        let told = listener.told.clone();
        // A new connection on which nothing was said yet is no news.
        if peer.updates == 0 {
            return None;
        }
        let outcome = (control.error, control.explanation.take());
        Some(News { handle: self, told, peer, outcome })
    }
}

/// What the program is told at the end of a call. Calls that it makes meanwhile have outcomes of their own, so the outcome of
/// this call is put back.
struct News<'a> {
    handle: &'a Handle,
    told: Told,
    peer: Peer,
    outcome: (rpc_err, Option<String>),
}

impl Drop for News<'_> {
    fn drop(&mut self) {
        let mut control = self.handle.control();
        (control.error, control.explanation) = (self.outcome.0, self.outcome.1.take());
    }
}

/// Runs `work`, which waits for the peer as a call does. Signals are let through only while it sleeps, and while the program is
/// being told something: otherwise a handler that makes a call on the same CLIENT could wait for a lock of the thread that it
/// interrupts. Destruction of the handle waits for the end of this.
///
/// Runs in [`step`]s, as does `work`.
fn run<T>(
    handle: Arc<Handle>,
    client: *mut CLIENT,
    work: impl FnOnce(&Handle, &BlockedSignals) -> Result<T, Error>,
) -> Result<T, Error> {
    let signals = BlockedSignals::all();
    let running = step(|| Ok(Running::start(handle)))?;
    let handle = &*running.handle;
    let outcome = work(handle, &signals);
    if handle.listens.load(Relaxed)
        && let Some(news) = step(|| Ok(handle.news()))?
    {
        signals::under_mask(signals.before(), || (news.told)(client, &news.peer));
        step(|| {
            drop(news);
            Ok(())
        })?;
    }
    step(|| {
        drop(running);
        outcome
    })
}

/// As [`run`], for `work` that is one step. Also keeps an error for `clnt_perror`: when this returns, the CLIENT may be gone.
fn run_recorded<T>(
    handle: Arc<Handle>,
    client: *mut CLIENT,
    work: impl FnOnce(&Handle, &BlockedSignals) -> Result<T, Error>,
) -> Result<T, Error> {
    run(handle, client, |handle, signals| {
        step(|| {
            work(handle, signals).inspect_err(|error| {
                handle.record(error);
            })
        })
    })
}

/// A cancellation point, as libtirpc's is: a cancellation that comes during the call takes effect when the call has ended.
unsafe extern "C-unwind" fn call(
    client: *mut CLIENT,
    proc: u32,
    encode: XdrProc,
    args: *mut c_void,
    decode: XdrProc,
    results: *mut c_void,
    timeout: libc::timeval,
) -> c_uint {
    guard_in_steps_cancellable(|| {
        // SAFETY: the program's handle.
        let handle = step(|| unsafe { handle(client) })?;
        // SAFETY: alive: it is the first member of `handle`.
        let auth = unsafe { (*client).cl_auth };
        run(handle, client, |handle, signals| {
            let call = Call { handle, auth, proc, encode, args, decode, results, signals };
            // SAFETY: procedures and objects are the program's, as `clnt_call` asks for them.
            match unsafe { call.run(timeout) } {
                Ok(status) => Ok(status),
                Err(error) => step(|| {
                    log_error!("fd {}: a call of procedure {proc} failed: {error}", handle.connection.fd());
                    Ok(handle.record(&error))
                }),
            }
        })
    })
}

/// A call that runs: destruction of its handle waits for it.
struct Running {
    handle: Arc<Handle>,
    number: u64,
}

impl Running {
    fn start(handle: Arc<Handle>) -> Running {
        let mut table = handle.uses.table();
        let number = table.next;
        table.next += 1;
        table.running.push(Use {
            number,
            handle: Arc::as_ptr(&handle).addr(),
            thread: thread::this(),
            generation: fork::generation(),
        });
        drop(table);
        Running { handle, number }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let uses = &self.handle.uses;
        let mut table = uses.table();
        if let Some(at) = table.running.iter().position(|it| it.number == self.number) {
            table.running.swap_remove(at);
        }
        // Waking costs a system call even where nobody sleeps.
        if table.waiting > 0 {
            uses.ended.notify_all();
        }
        if !table.left.is_empty() {
            let UseTable { running, left, .. } = &mut *table;
            let over = |(_, calls): &mut (Destruction, Calls)| {
                calls.generation == fork::generation() && !running.iter().any(|it| calls.have(it))
            };
            let over: Vec<_> = left.extract_if(.., over).collect();
            drop(table);
            for (destruction, _) in over {
                // The thread that left it here does not wait: see `in_routine`.
                destruction.carry_out(false);
            }
        }
    }
}

unsafe extern "C" fn abort(_: *mut CLIENT) {
    guard(|| Ok(()));
}

unsafe extern "C" fn geterr(client: *mut CLIENT, error: *mut rpc_err) {
    guard(|| {
        // SAFETY: the program's handle.
        let handle = unsafe { handle(client) }?;
        if !error.is_null() {
            // SAFETY: not NULL, and the program lets it be written.
            unsafe { error.write(handle.control().error) };
        }
        Ok(())
    });
}

unsafe extern "C-unwind" fn freeres(client: *mut CLIENT, decode: XdrProc, results: *mut c_void) -> bool_t {
    guard_in_steps(|| {
        // SAFETY: the program's handle.
        step(|| unsafe { handle(client) })?;
        // SAFETY: procedure and object are the program's and fit each other.
        Ok(unsafe { xdr::free(decode, results) })
    })
}

unsafe extern "C" fn destroy(client: *mut CLIENT) {
    guard(|| {
        // SAFETY: the program's handle.
        let handle = unsafe { handle(client) }?;
        if handle.destroyed.swap(true, Relaxed) {
            return Ok(());
        }
        // SAFETY: the share that `new` gave to the program, which does not use it any more.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(&handle)) };
        // The number of a socket that the program has closed itself may belong to another file by now.
        let closes = match &handle.connection {
            Connected::Forward(connection) => handle.control().close && connection.alive(),
            Connected::Reverse(_) => false,
        };
        let uses = handle.uses.clone();
        let connection = match &handle.connection {
            Connected::Forward(connection) if closes => Some(connection.clone()),
            _ => None,
        };
        if !uses.end(Destruction { handle, closes })
            && let Some(connection) = connection
        {
            // At least no new callback is served.
            connection.stop_serving();
        }
        Ok(())
    });
}

unsafe extern "C" fn control(client: *mut CLIENT, request: c_uint, info: *mut c_void) -> bool_t {
    guard(|| {
        // SAFETY: the program's handle.
        let handle = unsafe { handle(client) }?;
        let mut control = handle.control();
        match request {
            control::CLSET_FD_CLOSE => control.close = true,
            control::CLSET_FD_NCLOSE => control.close = false,
            _ if info.is_null() => return Ok(0),
            control::CLSET_TIMEOUT => {
                // SAFETY: not NULL; libtirpc's contract for this request.
                let timeout = unsafe { info.cast::<libc::timeval>().read_unaligned() };
                if !valid(&timeout) {
                    return Ok(0);
                }
                control.timeout = timeout;
                control.fixed = true;
            }
            // SAFETY: not NULL; libtirpc's contract for this request.
            control::CLGET_TIMEOUT => unsafe {
                info.cast::<libc::timeval>().write_unaligned(control.timeout)
            },
            // SAFETY: not NULL, with room for a sockaddr; libtirpc's contract for this request.
            control::CLGET_SERVER_ADDR => unsafe {
                std::ptr::copy_nonoverlapping(handle.address.as_ptr(), info.cast(), handle.address.len());
            },
            control::CLGET_SVC_ADDR => {
                let length = handle.address.len() as c_uint;
                let buf = handle.address.as_ptr().cast_mut().cast();
                let address = netbuf { maxlen: length, len: length, buf };
                // SAFETY: not NULL; libtirpc's contract for this request.
                unsafe { info.cast::<netbuf>().write_unaligned(address) };
            }
            // SAFETY: not NULL; libtirpc's contract for this request.
            control::CLGET_FD => unsafe { info.cast::<c_int>().write_unaligned(handle.connection.fd()) },
            // SAFETY: not NULL; libtirpc's contract for these requests: a 32-bit number.
            control::CLGET_XID => unsafe { info.cast::<u32>().write_unaligned(control.last_xid) },
            // SAFETY: as above.
            control::CLSET_XID => control.next_xid = Some(unsafe { info.cast::<u32>().read_unaligned() }),
            // SAFETY: as above.
            control::CLGET_VERS => unsafe { info.cast::<u32>().write_unaligned(control.version) },
            // SAFETY: as above.
            control::CLSET_VERS => control.version = unsafe { info.cast::<u32>().read_unaligned() },
            // SAFETY: as above.
            control::CLGET_PROG => unsafe { info.cast::<u32>().write_unaligned(control.program) },
            // SAFETY: as above.
            control::CLSET_PROG => control.program = unsafe { info.cast::<u32>().read_unaligned() },
            // SAFETY: not NULL; our own contract for these requests: a size_t.
            CLGET_RDMA_MAXREPLY => unsafe { info.cast::<usize>().write_unaligned(control.max_reply) },
            CLSET_RDMA_MAXREPLY => {
                // SAFETY: as above.
                let bytes = unsafe { info.cast::<usize>().read_unaligned() };
                if bytes > MAX_REPLY {
                    log_warn!("CLSET_RDMA_MAXREPLY: {bytes} bytes are refused: at most {MAX_REPLY}");
                    return Ok(0);
                }
                control.max_reply = bytes;
            }
            // SAFETY: as above: an unsigned.
            CLSET_RDMA_CREDITS => match unsafe { info.cast::<u32>().read_unaligned() } {
                credits @ 1..=CREDITS_MAX => drop(handle.connection.credits(Some(credits))),
                _ => return Ok(0),
            },
            // SAFETY: as above.
            CLGET_RDMA_CREDITS => unsafe {
                info.cast::<u32>().write_unaligned(handle.connection.credits(None));
            },
            CLSET_RDMA_RECEIVE_SIZE => {
                drop(control);
                // SAFETY: as above: an unsigned.
                let bytes = unsafe { info.cast::<u32>().read_unaligned() };
                let raised = handle.connection.raise_receives(bytes);
                return Ok(raised.map_err(|error| handle.record(&error)).is_ok().into());
            }
            CLGET_RDMA_RECEIVE_SIZE => {
                let bytes = handle.connection.peer(false)?.own_receive_size as u32;
                // SAFETY: as above.
                unsafe { info.cast::<u32>().write_unaligned(bytes) };
            }
            _ => {
                drop(control);
                // SAFETY: not NULL; our own contract for these requests.
                return Ok(unsafe { reverse_control(&handle, request, info) }.into());
            }
        }
        Ok(1)
    })
}

/// Requests that concern the reverse direction of a connection, and how often it was made. False if the request is not for this
/// CLIENT, or unknown.
///
/// # Safety
/// `info` points to an `unsigned`, or to a `bool_t` for `CLSET_RDMA_REVERSE_CHUNKS`.
unsafe fn reverse_control(handle: &Handle, request: c_uint, info: *mut c_void) -> bool {
    let info = info.cast::<u32>();
    match (request, &handle.connection) {
        (CLSET_RDMA_REVERSE_CHUNKS, connection) => {
            // SAFETY: by the contract.
            let allowed = unsafe { info.read_unaligned() } != 0;
            match connection {
                Connected::Forward(client) => client.set_reverse_chunks(allowed),
                Connected::Reverse(reverse) => reverse.set_chunks(allowed),
            }
        }
        (CLSET_RDMA_REVERSE_CREDITS, Connected::Forward(client)) => {
            // SAFETY: by the contract.
            match unsafe { info.read_unaligned() } {
                credits @ 1..=CREDITS_MAX => drop(client.grants(Some(credits))),
                _ => return false,
            }
        }
        (CLGET_RDMA_REVERSE_CREDITS, Connected::Forward(client)) => {
            // SAFETY: by the contract.
            unsafe { info.write_unaligned(client.grants(None)) };
        }
        (CLGET_RDMA_CONNECTIONS, Connected::Forward(client)) => {
            // SAFETY: by the contract.
            unsafe { info.write_unaligned(client.connections()) };
        }
        _ => return false,
    }
    true
}

/// The most credits that can be set.
pub const CREDITS_MAX: u32 = 4096;

/// The largest maximum reply that a CLIENT accepts, as for the setting max_reply.
const MAX_REPLY: usize = 1 << 30;

/// Our text for the last error of `client`, if it is one of ours.
///
/// # Safety
/// `client` is a live handle of any transport.
pub unsafe fn explanation(client: *mut CLIENT) -> Option<String> {
    // SAFETY: by the contract.
    let handle = unsafe { handle(client) }.ok()?;
    handle.control().explanation.clone()
}

/// The opposite of libtirpc's `time_not_ok`.
fn valid(time: &libc::timeval) -> bool {
    (0..=100_000_000).contains(&time.tv_sec) && (0..=1_000_000).contains(&time.tv_usec)
}

fn duration(time: &libc::timeval) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let micros = u64::try_from(time.tv_usec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(micros)
}

const _: () = {
    assert!(std::mem::offset_of!(Handle, client) == 0);
    assert!(size_of::<libc::timeval>() == 16);
};
