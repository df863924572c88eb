//! The CLIENT of a connection over RDMA: `clnt_call` and its kin, as libtirpc's stream transport does them.
//!
//! A handle is a thin thing: program, version, timeout and the last error. The connection belongs to the socket:
//! CLIENTs made on one descriptor share it, as they may with libtirpc (`connections`), and calls of several threads
//! are pipelined. The CLIENT of a server, which calls back over a connection that it has accepted, differs in nothing
//! but the connection.
//!
//! Owned here: the vtable, the order of a call (XID, header, AUTH, arguments; reply, AUTH, results, refresh), and the
//! way back to tcp. Left to others: waiting, credits, and which device (`driver`), names (`netid`).
//!
//! - What of a call its AUTH must have to itself is up to `auth`: never the program's own procedures with AUTH_NONE and
//!   AUTH_SYS, the whole call with RPCSEC_GSS, within the time of the call.
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

use crate::binding::{Binding, Head};
use crate::config::{self, Config};
use crate::connection::RPC_HEADER_MAX;
use crate::connection::characteristics::Wish;
use crate::driver::start::{self, Failure, START_TIMEOUT};
use crate::driver::{self, Callee, Caller, Client, Peer, Reverse, Room, Shared};
use crate::error::{Error, Kind, clnt_stat};
use crate::ffi::{guard, guard_in_steps, guard_in_steps_cancellable, step};
use crate::memory::{Loan, Message, Region, Sink, registered};
use crate::signals::BlockedSignals;
use crate::socket::Sockaddr;
use crate::stats::{self, Counter};
use crate::tirpc::auth::{self, Held, Share};
use crate::tirpc::callback::{self, waker};
use crate::tirpc::lending::{self, lending};
use crate::tirpc::{
    _null_auth, _seterr_reply, AUTH, CLIENT, PLAIN_REPLY, RPCBPROG, accepted_reply, accepted_reply_ru,
    ar_results, auth_ops, auth_stat, bool_t, clnt_ops, control, msg, netbuf, reply_body, reply_body_ru,
    rpc_err, rpc_err_ru, rpc_msg, rpc_msg_ru, xdr_opaque_auth, xdr_replymsg,
};
use crate::wire::Xid;
use crate::wire::characteristics::Characteristic;
use crate::xdr::{Decoder, Encoder, LEND_MIN, XDR, XdrProc, op};
use crate::{fork, log_debug, log_error, log_info, log_warn, signals, socket, thread, xdr};

/// What the creator of a CLIENT asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Netid "rdma": RDMA or an error.
    Required,
    /// `RPCRDMA_REDIRECT=tcp`: RDMA if the server answers to it.
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
/// Sets and gets the credits that are granted for calls back: an `unsigned`.
pub const CLSET_RDMA_REVERSE_CREDITS: c_uint = 0x5244_4d05;
/// See [`CLSET_RDMA_REVERSE_CREDITS`].
pub const CLGET_RDMA_REVERSE_CREDITS: c_uint = 0x5244_4d06;
/// Sets whether calls back may have chunks: a `bool_t`.
pub const CLSET_RDMA_REVERSE_CHUNKS: c_uint = 0x5244_4d07;
/// Gets how often the connection was made: an `unsigned`.
pub const CLGET_RDMA_CONNECTIONS: c_uint = 0x5244_4d08;
/// Sets and gets the bytes of our Receives, as the peer is told: an `unsigned`.
pub const CLSET_RDMA_RECEIVE_SIZE: c_uint = 0x5244_4d09;
/// See [`CLSET_RDMA_RECEIVE_SIZE`].
pub const CLGET_RDMA_RECEIVE_SIZE: c_uint = 0x5244_4d0a;

/// How long a moved client waits for a peer that neither answers nor closes (a stock server closes at once).
const TRY_TIMEOUT: Duration = Duration::from_millis(500);

/// Time to send a call whose own time is zero, if the handle has none.
const SEND_TIMEOUT: Duration = Duration::from_secs(25);

/// Times that a refused call is made again with a refreshed AUTH, as in libtirpc.
const REFRESHES: u32 = 2;

/// One CLIENT. libtirpc sees the first member.
///
/// The program has a share of it until `clnt_destroy`, and so has each entry under way: whoever is last frees it.
#[repr(C)]
struct Handle {
    /// libtirpc and the program read and write here, inside the functions too that a call runs.
    client: UnsafeCell<CLIENT>,
    connection: Connected,
    /// The peer's address, as `CLGET_SVC_ADDR` shows it.
    address: Box<[u8]>,
    control: Mutex<Control>,
    /// The program is to be told what the peer says of itself.
    listens: AtomicBool,
    /// Shared with the other CLIENTs on the descriptor.
    uses: Arc<Uses>,
    destroyed: AtomicBool,
}

// SAFETY: what the pointers in `client` name is the program's, or libtirpc's; it is used by their rules.
unsafe impl Send for Handle {}
// SAFETY: as above; the rest is behind a lock, atomic, or does not change.
unsafe impl Sync for Handle {}

/// Nobody uses it any more.
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

/// What a CLIENT makes its calls on.
pub enum Connected {
    /// One that it has opened.
    Forward(Arc<Client>),
    /// One that its server has accepted.
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

/// The calls that run on one descriptor. Destruction of a CLIENT waits for its own, and for those of others where it closes
/// the descriptor: what they still read and write there would be another file's, as soon as the number is used again.
#[derive(Default)]
struct Uses {
    table: Mutex<UseTable>,
    ended: Condvar,
}

#[derive(Default)]
struct UseTable {
    next: u64,
    running: Vec<Use>,
    /// Destructions that wait.
    waiting: usize,
    /// Destructions that are left to the last call that they would have to wait for.
    left: Vec<(Destruction, Calls)>,
}

/// A call that runs.
struct Use {
    /// In the order in which they began.
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

    /// Has a CLIENT destroyed when no call runs on it any more; if it closes the descriptor, when all have ended that had
    /// begun there by now. That is waited for, but not in a routine (see [`callback::in_routine`]), nor inside a call with
    /// the CLIENT, which an xdrproc may be in: false if the last of these calls sees to it.
    fn end(&self, destruction: Destruction) -> bool {
        let mut table = self.table();
        let mut calls = Calls {
            handle: Arc::as_ptr(&destruction.handle).addr(),
            before: if destruction.closes { table.next } else { 0 },
            // What the calling thread is in the midst of cannot end while it waits.
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

/// The calls that a destruction comes after.
struct Calls {
    /// Those on this handle.
    handle: usize,
    /// And those with lower numbers than this, but for this thread's.
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
    /// No call runs on the handle. `waits`: for a routine that another thread runs on the connection.
    fn carry_out(self, waits: bool) {
        // Of two CLIENTs that are destroyed at a time one closes it.
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

/// Tells the program of a CLIENT what its peer has said of itself.
pub type Told = Arc<dyn Fn(*mut CLIENT, &Peer) + Send + Sync>;

struct Listener {
    told: Told,
    /// The connection, and how often the peer had said something on it, when the program was told last.
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
        // It could not be connected again if the server does not speak RDMA.
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
    let timeout = if intent == Intent::Try { TRY_TIMEOUT } else { START_TIMEOUT };
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
            // The stock transport connects it again. It may have lost its peer by now, and is not fresh for that.
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

/// A CLIENT for calls back over a connection that was accepted; `address` is its peer's.
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

/// Has the CLIENT of a server go on over another connection.
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

/// Waits for callbacks and serves them; how many.
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

/// What is known of the peer of a CLIENT's connection.
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

/// Asks the peer to change a characteristic, and waits for the outcome.
///
/// # Errors
/// `Invalid` for what there is not; as [`Caller::request`].
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

/// Has the program told of what the peer says of itself from now on; `None` ends it.
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
        Handle { client, connection, address, control, listens, uses, destroyed }
    });
    // The program's share.
    Arc::into_raw(handle).cast_mut().cast()
}

/// The connections of this process, by descriptor: CLIENTs made on one of them share it.
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
        // Asking a connection may take as long as it is made anew: not under the lock of all of them.
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

    /// Forgets it, unless the number is another connection's by now.
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

/// The handle behind a CLIENT, which lives on until the entry that asks for it returns.
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

    /// What the program is to be told, if the peer has said something of itself since the last time.
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

/// What the program is told at the end of a call. Calls that it makes there have outcomes of their own: that of this one is
/// put back.
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

/// Does what waits for the peer as a call does: with signals let through only while it sleeps, and while the program is told
/// of something; else a handler that makes a call on the same CLIENT could wait for a lock of the thread that it interrupts.
/// Destruction of the handle waits for it.
///
/// In [`step`]s, as `work` is.
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

/// As [`run`], for `work` that is one step, and keeps an error for `clnt_perror`: when this returns, the CLIENT may be gone.
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

/// A cancellation point, as libtirpc's is: what has come meanwhile takes effect when the call has ended.
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
                // Whoever has left it does not wait: see `in_routine`.
                destruction.carry_out(false);
            }
        }
    }
}

struct Call<'a> {
    handle: &'a Handle,
    auth: *mut AUTH,
    proc: u32,
    encode: XdrProc,
    args: *mut c_void,
    decode: XdrProc,
    results: *mut c_void,
    signals: &'a BlockedSignals,
}

/// What all attempts at a call have in common, and what they lead to.
struct Terms {
    program: (u32, u32),
    /// Nobody waits for a reply.
    one_way: bool,
    limit: Duration,
    max_reply: usize,
    /// How often it may be made again with a refreshed AUTH.
    refreshes: u32,
    /// Of a call that has to wait for a connection.
    until: Option<Instant>,
}

/// `ah_wrap` and `ah_unwrap`.
type Wrap = unsafe extern "C-unwind" fn(*mut AUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t;

/// A Call before its arguments.
struct Begun {
    encoder: Encoder,
    xid: Xid,
    /// Its credential is one of RPCSEC_GSS.
    gss: bool,
    binding: Option<Binding>,
    /// None when it could not be marshalled.
    wrap: Option<Wrap>,
    limit: Duration,
    held: Option<Held>,
}

/// A Call that is ready to go.
struct Encoded {
    message: Message,
    xid: Xid,
    gss: bool,
    limit: Duration,
    held: Option<Held>,
}

/// Where the program's own buffer for the first eligible result lies is found out by encoding the results.
struct Probe {
    encoder: Encoder,
    decode: unsafe extern "C-unwind" fn(*mut XDR, *mut c_void) -> c_int,
    /// The longest such result.
    most: usize,
    /// The buffer need not be registered.
    preset: bool,
}

/// What the program finds as the outcome of a call that something has left which it has thrown itself.
struct Thrown<'a> {
    handle: &'a Handle,
    status: c_uint,
}

impl Thrown<'_> {
    fn not(self) {
        std::mem::forget(self);
    }
}

impl Drop for Thrown<'_> {
    fn drop(&mut self) {
        self.handle.control().error = rpc_err::new(self.status, libc::EINVAL);
    }
}

/// Memory of the program that is in use until this is dropped, and not longer.
struct Loans<'a> {
    connection: &'a dyn Caller,
    loans: Vec<Loan>,
}

impl Drop for Loans<'_> {
    fn drop(&mut self) {
        self.connection.end(&self.loans);
    }
}

/// A reply before its results.
struct Received<'a> {
    decoder: Decoder,
    message: rpc_msg,
    /// It is an RPC reply.
    readable: bool,
    error: rpc_err,
    /// How its results are decoded.
    unwrap: Option<Wrap>,
    _loans: Loans<'a>,
    _held: Option<Held>,
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        if self.readable {
            let xdrs = self.decoder.xdr();
            // SAFETY: the stream is alive; the verifier belongs to the message.
            unsafe { free_verifier(xdrs, &mut self.message) };
        }
    }
}

/// How a call goes on.
enum Next {
    /// The arguments are encoded: memory for the results is to be found first.
    Probe,
    /// The final `clnt_stat`; it is recorded.
    Status(c_uint),
    /// The results are to be decoded.
    Results,
    /// It is to be made again: the AUTH was refreshed, or there is a new connection.
    Again,
}

/// What a call has in use while the program is asked.
#[derive(Default)]
struct Parts<'a> {
    begun: Option<Begun>,
    encoded: Option<Encoded>,
    probe: Option<Probe>,
    received: Option<Received<'a>>,
}

impl<'a> Call<'a> {
    /// # Safety
    /// As `clnt_call`: the AUTH is alive, and each procedure fits its object.
    unsafe fn run(&self, timeout: libc::timeval) -> Result<c_uint, Error> {
        let (mut terms, mut parts) = (None, Parts::default());
        // SAFETY: by the contract.
        step(|| unsafe { self.begin(terms.insert(self.terms(&timeout)?), &mut parts) })?;
        let Some(mut terms) = terms else { return Ok(clnt_stat::FAILED) };
        loop {
            let mut wrapped = false;
            if let Some(Begun { encoder, wrap: Some(wrap), .. }) = &mut parts.begun {
                let thrown = Thrown { handle: self.handle, status: clnt_stat::CANTENCODEARGS };
                // SAFETY: the procedure fits its object (contract); the stream outlives the call, and nothing of ours is
                // locked or borrowed but the stream.
                wrapped = unsafe { wrap(self.auth, encoder.xdr(), self.encode, self.args) } != 0;
                thrown.not();
            }
            // SAFETY: by the contract.
            let mut next = step(|| unsafe { self.finish(wrapped, &mut terms, &mut parts) })?;
            if let (Next::Probe, Some(probe)) = (&next, &mut parts.probe) {
                let thrown = Thrown { handle: self.handle, status: clnt_stat::CANTDECODERES };
                // SAFETY: results that can be decoded into are zeroed, or hold memory of the program's; the procedure fits
                // them (contract). Its answer is of no interest: it is stopped at the item.
                unsafe { (probe.decode)(probe.encoder.xdr(), self.results) };
                thrown.not();
                // SAFETY: by the contract.
                next = step(|| unsafe { self.exchange(&mut terms, &mut parts) })?;
            }
            match next {
                Next::Status(status) => return Ok(status),
                Next::Results => break,
                // SAFETY: by the contract.
                Next::Again | Next::Probe => step(|| unsafe { self.begin(&terms, &mut parts) })?,
            }
        }
        let mut decoded = false;
        if let Some(Received { decoder, unwrap: Some(unwrap), .. }) = &mut parts.received {
            let thrown = Thrown { handle: self.handle, status: clnt_stat::CANTDECODERES };
            // SAFETY: the procedure fits its object (contract); the stream is alive, and nothing of ours is locked or
            // borrowed but the stream.
            decoded = unsafe { unwrap(self.auth, decoder.xdr(), self.decode, self.results) } != 0;
            thrown.not();
        }
        step(|| {
            if let Some(received) = parts.received.as_mut().filter(|_| !decoded) {
                received.error = rpc_err::new(clnt_stat::CANTDECODERES, libc::EINVAL);
            }
            Ok(self.conclude(&mut parts, None))
        })
    }

    fn terms(&self, timeout: &libc::timeval) -> Result<Terms, Error> {
        let mut control = self.handle.control();
        // A defect inside must not leave the handle saying "Success".
        control.error = rpc_err::new(clnt_stat::FAILED, libc::ENOTRECOVERABLE);
        if self.auth.is_null() {
            return Err(Error::new(Kind::Invalid, "the CLIENT has no AUTH"));
        }
        let one_way = timeout.tv_sec == 0 && timeout.tv_usec == 0;
        if !control.fixed && valid(timeout) {
            control.timeout = *timeout;
        }
        let limit = match duration(&control.timeout) {
            // The call must be sent nevertheless: within the handle's time.
            limit if one_way && limit.is_zero() => SEND_TIMEOUT,
            limit => limit,
        };
        let (program, max_reply) = ((control.program, control.version), control.max_reply);
        Ok(Terms { program, one_way, limit, max_reply, refreshes: REFRESHES, until: None })
    }

    /// The AUTH for the whole call, if it must have it, and how long that took: a part of the time of the call.
    ///
    /// # Safety
    /// The AUTH is alive.
    unsafe fn for_the_call(
        &self,
        until: Option<Instant>,
        limit: Duration,
    ) -> Result<(Option<Held>, Duration), Error> {
        // SAFETY: by the contract.
        if unsafe { auth::share(self.auth) } != Share::Call {
            return Ok((None, Duration::ZERO));
        }
        let start = Instant::now();
        let held = auth::lock(self.auth, until.unwrap_or(start + limit), self.signals.before())?;
        Ok((held, start.elapsed()))
    }

    /// The AUTH for a step that does nothing but look into it, or write it.
    ///
    /// # Safety
    /// The AUTH is alive.
    unsafe fn for_a_step(&self) -> Option<Held> {
        // SAFETY: by the contract.
        match unsafe { auth::share(self.auth) } {
            Share::Steps => auth::step(self.auth),
            Share::Nothing | Share::Call => None,
        }
    }

    /// # Safety
    /// The AUTH is alive.
    unsafe fn ops(&self) -> &auth_ops {
        // SAFETY: by the contract.
        let ops = unsafe { (*self.auth).ah_ops };
        // SAFETY: libtirpc's static operations.
        unsafe { &*ops }
    }

    fn xid(&self) -> Xid {
        let mut control = self.handle.control();
        let xid = match control.next_xid.take() {
            Some(wanted) => Xid(wanted),
            None => self.handle.connection.fresh_xid(),
        };
        control.last_xid = xid.0;
        xid
    }

    /// # Safety
    /// As [`Call::run`]; `exchange` sees to the loans of the message.
    unsafe fn begin(&self, terms: &Terms, parts: &mut Parts<'a>) -> Result<(), Error> {
        // SAFETY: by the contract.
        let (held, waited) = unsafe { self.for_the_call(terms.until, terms.limit) }?;
        let limit = terms.limit.saturating_sub(waited);
        let xid = self.xid();
        let config = config::get()?;
        let mut encoder = Encoder::new(self.handle.connection.message()?);
        let program = terms.program;
        let head = [xid.0, msg::CALL, msg::RPC_MSG_VERSION, program.0, program.1, self.proc];
        let mut bytes = [0u8; 24];
        for (place, word) in bytes.chunks_exact_mut(4).zip(head) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        let put = encoder.put(&bytes);
        // SAFETY: by the contract.
        let ops = unsafe { self.ops() };
        // SAFETY: as above.
        let for_a_step = unsafe { self.for_a_step() };
        // SAFETY: as above; the stream outlives the call.
        let marshalled = put && unsafe { ops.ah_marshal.is_some_and(|f| f(self.auth, encoder.xdr()) != 0) };
        // SAFETY: as above. One of RPCSEC_GSS says so only now.
        let gss = unsafe { (*self.auth).ah_cred.oa_flavor } == auth_stat::RPCSEC_GSS;
        drop(for_a_step);
        let wrapped = gss && Head::of(&[encoder.encoded()]).is_none_or(|head| head.wrapped);
        let binding = config::bindings().find(program.0, program.1, self.proc).filter(|_| !wrapped);
        // Nobody waits until it is sent: all of it is copied.
        if !terms.one_way
            && !wrapped
            && let Some(lending) = lending(config, binding.as_ref(), LEND_MIN, |b, call| b.call(call).items)
        {
            // SAFETY: the arguments are the program's until `clnt_call` returns, which sees to the loans before.
            unsafe { encoder.lend(lending) };
        }
        let wrap = ops.ah_wrap.filter(|_| marshalled);
        parts.begun = Some(Begun { encoder, xid, gss, binding, wrap, limit, held });
        Ok(())
    }

    /// Goes on when the program has encoded its arguments.
    ///
    /// # Safety
    /// As [`Call::run`].
    unsafe fn finish(&self, wrapped: bool, terms: &mut Terms, parts: &mut Parts<'a>) -> Result<Next, Error> {
        let Some(begun) = parts.begun.take() else { return Ok(Next::Again) };
        let Begun { encoder, xid, gss, binding, limit, held, .. } = begun;
        stats::add(Counter::BytesCopied, encoder.copied());
        let message = encoder.finish()?;
        if !wrapped {
            return Err(Error::new(Kind::Encode, "the arguments could not be encoded"));
        }
        parts.probe = match &binding {
            Some(binding) if !terms.one_way => self.probe(binding, &message)?,
            _ => None,
        };
        parts.encoded = Some(Encoded { message, xid, gss, limit, held });
        if parts.probe.is_some() {
            return Ok(Next::Probe);
        }
        // SAFETY: by the contract.
        unsafe { self.exchange(terms, parts) }
    }

    /// A stream to find memory of the program's for the first eligible result with, if there may be some: an opaque that it
    /// has put into its results, and that is not empty. The results' procedure tells, by encoding them.
    fn probe(&self, binding: &Binding, call: &Message) -> Result<Option<Probe>, Error> {
        let Some(decode) = self.decode.filter(|_| !self.results.is_null()) else { return Ok(None) };
        let most = binding.call(&[call.body()]).results.first().copied().unwrap_or(0);
        let preset = binding.preset();
        if most < self.handle.connection.place_min() || !(preset || registered::any()) {
            return Ok(None);
        }
        let mut encoder = Encoder::new(self.handle.connection.message()?);
        let put = encoder.put(&[&[0; 4], &PLAIN_REPLY[..]].concat());
        // SAFETY: nothing is sent from there: only the address is asked for.
        unsafe { encoder.lend(lending::probe(binding, LEND_MIN, |b, reply| b.reply(reply).items)) };
        Ok(put.then_some(Probe { encoder, decode, most, preset }))
    }

    /// Sends the Call, and waits for the reply.
    ///
    /// # Safety
    /// As [`Call::run`]; the results' procedure has encoded to the probe.
    unsafe fn exchange(&self, terms: &mut Terms, parts: &mut Parts<'a>) -> Result<Next, Error> {
        let Some(encoded) = parts.encoded.take() else { return Ok(Next::Again) };
        let Encoded { message, xid, gss, limit, held } = encoded;
        // SAFETY: by the contract.
        let place = parts.probe.take().and_then(|probe| unsafe { probe.found(&message) });
        let places: Vec<Sink> = place.into_iter().collect();
        let mut loans = message.loans();
        loans.extend(places.iter().map(Sink::loan));
        let connection: &'a dyn Caller = &*self.handle.connection;
        let loans = Loans { connection, loans };
        if terms.one_way {
            let deadline = Instant::now() + limit;
            connection.call_one_way(xid, message, deadline, Some(self.signals.before()))?;
            let status = if self.decode.is_none() { clnt_stat::SUCCESS } else { clnt_stat::TIMEDOUT };
            let mut control = self.handle.control();
            control.error = rpc_err::new(status, 0);
            control.explanation = None;
            return Ok(Next::Status(status));
        }
        // RFC 5531 §12.1: procedure 0 has no results; only RPCSEC_GSS puts its own into replies to it.
        let header = connection.reply_header();
        let room = if self.proc == 0 && !gss { RPC_HEADER_MAX } else { terms.max_reply + header };
        let deadline = terms.until.unwrap_or(Instant::now() + limit);
        let fd = connection.fd();
        let length = message.len();
        let (program, version) = terms.program;
        log_debug!(
            "fd {fd}: call {xid}: program {program} version {version} procedure {}, {length} bytes",
            self.proc
        );
        let mask = Some(self.signals.before());
        let reply = match connection.call(xid, message, room, places, deadline, mask) {
            Err(error) if error.kind() == Kind::NotSent => {
                drop((loans, held));
                // A server that closes one connection after the other is not asked for more than one.
                let enough = terms.until.is_some() && matches!(self.handle.connection, Connected::Forward(_));
                if enough || !connection.await_reconnect(deadline, mask)? {
                    return Err(error);
                }
                log_debug!("call {xid} was not sent, and is made again: {error}");
                terms.until = Some(deadline);
                return Ok(Next::Again);
            }
            reply => reply?,
        };
        log_debug!("fd {fd}: reply {xid}: {} bytes", reply.iter().map(|part| part.len()).sum::<usize>());
        // SAFETY: by the contract.
        let next = unsafe { self.receive((reply, gss), terms, (loans, held), parts) };
        if let Next::Again = next {
            log_debug!("call {xid} is made again with a refreshed AUTH");
        }
        Ok(next)
    }

    /// The reply up to its results, with what is in use until they are decoded.
    ///
    /// # Safety
    /// As [`Call::run`].
    unsafe fn receive(
        &self,
        (reply, gss): (Vec<Region>, bool),
        terms: &mut Terms,
        (_loans, _held): (Loans<'a>, Option<Held>),
        parts: &mut Parts<'a>,
    ) -> Next {
        let (decoder, message) = (Decoder::new(reply), empty_reply());
        let error = rpc_err::new(clnt_stat::CANTDECODERES, libc::EINVAL);
        let readable = false;
        let received = parts.received.insert(Received {
            decoder,
            message,
            readable,
            error,
            unwrap: None,
            _loans,
            _held,
        });
        // Nearly every reply: accepted, without a verifier, and successful, which is what the message is set up as.
        let xid = &mut received.message.rm_xid;
        received.readable = received.decoder.take_if(|header: &[u8; 24]| {
            let (first, rest) = header.split_at(4);
            *xid = first.try_into().map_or(0, u32::from_be_bytes);
            *rest == PLAIN_REPLY
        });
        if !received.readable {
            // SAFETY: the stream outlives the call, and the message is set up as a decoder expects it.
            received.readable = unsafe { xdr_replymsg(received.decoder.xdr(), &mut received.message) } != 0;
        }
        if !received.readable {
            let explanation = Some("the reply is not an RPC reply".to_owned());
            return Next::Status(self.conclude(parts, explanation));
        }
        // SAFETY: the message was decoded; `error` is writable.
        unsafe { _seterr_reply(&mut received.message, &mut received.error) };
        // SAFETY: by the contract.
        let ops = unsafe { self.ops() };
        if received.error.re_status == clnt_stat::SUCCESS {
            // SAFETY: accepted, so this member of both unions is in force.
            let verifier = unsafe { &raw mut received.message.ru.rm_reply.ru.rp_ar.ar_verf };
            // SAFETY: the AUTH is alive (contract).
            let held = unsafe { self.for_a_step() };
            // SAFETY: as above; the verifier is decoded.
            let valid = unsafe { ops.ah_validate.is_some_and(|f| f(self.auth, verifier) != 0) };
            drop(held);
            if valid {
                received.unwrap = ops.ah_unwrap;
                return Next::Results;
            }
            received.error.re_status = clnt_stat::AUTHERROR;
            received.error.ru = rpc_err_ru { re_why: auth_stat::AUTH_INVALIDRESP };
        } else if !gss && terms.refreshes > 0 {
            terms.refreshes -= 1;
            // SAFETY: the AUTH is alive (contract).
            let held = unsafe { self.for_a_step() };
            let message = (&raw mut received.message).cast();
            // SAFETY: as above; the message is libtirpc's `struct rpc_msg`.
            let refreshed = ops.ah_refresh.is_some_and(|f| unsafe { f(self.auth, message) } != 0);
            drop(held);
            if refreshed {
                parts.received = None;
                return Next::Again;
            }
        }
        Next::Status(self.conclude(parts, None))
    }

    /// Records the outcome, and ends what was in use for it.
    fn conclude(&self, parts: &mut Parts<'_>, explanation: Option<String>) -> c_uint {
        let Some(received) = &parts.received else { return clnt_stat::FAILED };
        stats::add(Counter::BytesCopied, received.decoder.copied());
        let error = received.error;
        let mut control = self.handle.control();
        control.error = error;
        control.explanation = explanation;
        drop(control);
        parts.received = None;
        error.re_status
    }
}

impl Probe {
    /// Memory of the program for the eligible result.
    ///
    /// # Safety
    /// The results are the program's, to be written until `clnt_call` returns, which sees to the loan of the place.
    unsafe fn found(self, call: &Message) -> Option<Sink> {
        let most = self.most;
        let own = |at: &(*const u8, usize)| self.preset || registered::cover(at.0.addr(), most);
        // A program may pass one buffer for both: then results are copied, for nothing is read and written at a time.
        let apart = |at: &(*const u8, usize)| !call.lends_of(at.0.addr(), most);
        let place = self.encoder.first_lent().filter(|(_, len)| *len >= most).filter(own).filter(apart);
        // SAFETY: by the contract.
        place.map(|(at, _)| unsafe { Sink::lend(at.cast_mut(), most) })
    }
}

/// A reply to decode into: no memory of its own for the verifier, and no results.
fn empty_reply() -> rpc_msg {
    unsafe extern "C-unwind" fn nothing(_: *mut XDR, _: *mut c_void) -> bool_t {
        guard(|| Ok(1))
    }
    // SAFETY: libtirpc's constant; it is never written.
    let ar_verf = unsafe { _null_auth };
    let results = ar_results { r#where: null_mut(), r#proc: Some(nothing) };
    let accepted = accepted_reply { ar_verf, ar_stat: 0, ru: accepted_reply_ru { ar_results: results } };
    let reply = reply_body { rp_stat: 0, ru: reply_body_ru { rp_ar: accepted } };
    rpc_msg { rm_xid: 0, rm_direction: msg::REPLY, ru: rpc_msg_ru { rm_reply: reply } }
}

/// # Safety
/// `reply` was decoded by `xdr_replymsg`; `xdrs` is alive.
unsafe fn free_verifier(xdrs: *mut XDR, reply: &mut rpc_msg) {
    // SAFETY: every decoded reply has this member.
    if unsafe { reply.ru.rm_reply.rp_stat } != msg::MSG_ACCEPTED {
        return;
    }
    // SAFETY: every decoded reply has this member.
    let body = unsafe { &mut reply.ru.rm_reply };
    // SAFETY: accepted, so this member is in force.
    let accepted = unsafe { &mut body.ru.rp_ar };
    let verifier = &mut accepted.ar_verf;
    if verifier.oa_base.is_null() {
        return;
    }
    // SAFETY: the stream is alive (contract).
    unsafe { (*xdrs).x_op = op::FREE };
    // SAFETY: the verifier's memory came from decoding.
    unsafe { xdr_opaque_auth(xdrs, verifier) };
}

unsafe extern "C" fn abort(_: *mut CLIENT) {
    guard(|| Ok(()));
}

unsafe extern "C" fn geterr(client: *mut CLIENT, error: *mut rpc_err) {
    guard(|| {
        // SAFETY: the program's handle.
        let handle = unsafe { handle(client) }?;
        if !error.is_null() {
            // SAFETY: not NULL, and the program's to be written.
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
        unsafe { xdr::free(decode, results) };
        Ok(1)
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
            // At least nothing new begins.
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

/// What is asked of the reverse direction of a connection. False: it is not for this CLIENT, or not known.
///
/// # Safety
/// `info` points to an `unsigned`, of `CLSET_RDMA_REVERSE_CHUNKS` to a `bool_t`.
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

/// Most credits that can be set.
pub const CREDITS_MAX: u32 = 4096;

/// The largest maximum reply that a CLIENT accepts: that of the setting max_reply.
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

/// libtirpc's `time_not_ok`, the other way round.
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
