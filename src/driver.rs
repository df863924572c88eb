//! Joins the engine and a device, and waits: the only clock, fd and blocking wait of the library.
//!
//! [`Link`] is the joint: it carries out what the engine asks for and feeds it what the device reports. Around it
//!
//! - [`Client`] is a requester's connection, shared by the threads and CLIENTs that use its socket. **Whoever waits
//!   does the work**: one thread drives, the others sleep until it wakes them with their reply or with the driver's
//!   seat. There is no thread of our own.
//! - [`Server`] is a responder's connection, driven by the program's own loop.
//!
//! Waiting first spins, if that has paid lately (`Spin`): on two idle processors a reply comes sooner than a sleep
//! takes. A spin that finds nothing makes the next waits sleep at once.
//!
//! # Invariants
//! - A lock is never held while sleeping, except to replace a connection without credits, and no C code of the
//!   program runs under it but the walks of bindings, which call nothing.
//! - Memory of the program that a call or a reply lends is not used any more when the call or the reply is over.
//! - After every input to the engine its output is drained (`Link::pump`).
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crate::binding::Registry;
use crate::config::{Config, Crc, Provider};
use crate::connection::{
    Connection, Expect, Output, RECEIVE_MARGIN, RPC_HEADER_MAX, Request, RequestId, Role, Settings, chunks,
};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Memory, Message, Region, Sink};
use crate::process::{self, Identity};
use crate::provider::iwarp::{self, Iwarp, Options};
use crate::provider::{Completion, QueuePair, WorkRequest, verbs};
use crate::stats::{self, Counter};
use crate::sys;
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Xid, v1};
use crate::xdr::LEND_MIN;
use crate::{log_debug, log_error, log_info, log_warn, log_wire, socket};

/// How long the passive side waits for the MPA Request and the first message of a peer (RFC 5044 §7.1.2: "SHOULD").
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Least time that a connection gets which replaces one without credits.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// When a peer that has not answered the first call is nudged, and how often: Linux's siw may overlook what comes right
/// behind its answer to the startup until more comes.
const NUDGE_AFTER: Duration = Duration::from_millis(100);
const NUDGES: u32 = 10;

/// How long `xp_reply` waits for a peer that does not take its reply, before the rest is queued.
const REPLY_WAIT: Duration = Duration::from_millis(20);

/// The same in a forked child, which may exit right after its reply: nobody would send a queue.
const REPLY_WAIT_CHILD: Duration = Duration::from_secs(30);

/// Most bytes queued for a peer that does not take its replies; beyond, the connection closes.
const QUEUE_MAX: usize = 64 << 20;

/// Messages of a peer that are taken in one go, beyond several times those that its credits allow.
const RECEIVES_SPARE: u32 = 256;

/// How long RDMA Reads may stall while other connections wait for the memory that they hold.
const PULL_STALL: Duration = Duration::from_secs(5);

/// Bytes that must come within that time: less is a stall too.
const PULL_LEAST: u64 = 64 << 10;

/// How often a connection that waits for such memory tries again.
const PULL_RETRY: Duration = Duration::from_millis(20);

/// Requests of one connection that are found by spinning before the program's loop looks at the others again.
const TURN: u32 = 64;

/// The pools that all software connections of the process share.
pub fn memory(config: &Config) -> Arc<Memory> {
    static MEMORY: OnceLock<Arc<Memory>> = OnceLock::new();
    MEMORY
        .get_or_init(|| Memory::new(config.inline, config.max_reply(false) + REPLY_HEADER, config.max_pulled))
        .clone()
}

/// The bindings of the process: the built-in ones, those of the text files, and what programs register.
pub fn bindings(config: &Config) -> &'static Arc<Registry> {
    static BINDINGS: OnceLock<Arc<Registry>> = OnceLock::new();
    if let Some(bindings) = BINDINGS.get() {
        return bindings;
    }
    // Read outside the OnceLock: a fork(2) of another thread in between would leave the child waiting for ever.
    let registry = Registry::built_in();
    let mut errors = Vec::new();
    process::keeping_errno(|| {
        for (path, text) in config.binding_texts() {
            match text {
                Ok(text) => errors.extend(registry.add_text(&path.display().to_string(), &text)),
                Err(error) => errors.push(error.to_string()),
            }
        }
    });
    let mut first = false;
    let bindings = BINDINGS.get_or_init(|| {
        first = true;
        Arc::new(registry)
    });
    for error in errors.iter().filter(|_| first) {
        log_error!("binding left out: {error}");
    }
    bindings
}

/// Room beside the results of a procedure without a binding: a reply's header, and what RPCSEC_GSS wraps around results.
pub const REPLY_HEADER: usize = 4096;

// ---------------------------------------------------------------------------------------------------------- link

/// An engine and a device.
pub struct Link {
    role: Role,
    credits: u32,
    engine: Connection,
    device: Box<dyn QueuePair>,
    memory: Arc<Memory>,
    inline: usize,
    /// The peer has sent something.
    heard: bool,
    /// Calls that ended, for whoever collects them.
    done: Vec<(Xid, Result<Vec<Region>, Error>)>,
}

impl Link {
    /// Joins a connected device with a fresh engine and posts the Receives.
    pub fn new(role: Role, config: &Config, device: Box<dyn QueuePair>, memory: &Arc<Memory>) -> Link {
        let peer = PrivateData::find(device.private_data()).unwrap_or(PrivateData::ABSENT);
        let limits = device.limits();
        let credits = config.credits.min(limits.receives.saturating_sub(RECEIVE_MARGIN));
        let memory = device.slabs().map_or_else(|| memory.clone(), |slabs| memory.with(slabs));
        let settings = Settings {
            credits,
            receives: limits.receives,
            reverse_chunks: config.reverse_chunks,
            inline: config.inline,
            max_call: config.max_call,
            many_chunks: config.many_chunks,
            remote_invalidation: limits.remote_invalidation,
        };
        let engine = Connection::new(role, settings, peer, memory.clone(), bindings(config).clone());
        stats::add(Counter::Connections, 1);
        let mut link = Link {
            role,
            credits,
            engine,
            device,
            memory,
            inline: config.inline,
            heard: false,
            done: Vec::new(),
        };
        link.drain();
        link
    }

    /// What the connection runs on and what was agreed, in words for the log.
    fn describe(&self) -> String {
        let (send, receive) = self.engine.thresholds();
        format!("{}, inline {send} bytes out and {receive} in", self.device.describe())
    }

    /// Carries out what the engine wants.
    fn drain(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Receive => match self.memory.slab() {
                    Ok(buf) => self.device.post_recv(buf.into_sink(self.inline)),
                    Err(error) => self.fail(error.into()),
                },
                Output::Post(request) => {
                    note(&request, self.device.fd());
                    self.device.post(request);
                }
                Output::Done { xid, outcome } => self.done.push((xid, outcome)),
                Output::Close(error) => self.fail(error),
            }
        }
    }

    /// Moves everything that moves without waiting.
    fn pump(&mut self) {
        self.drain();
        // What answers no call or makes no request takes no Receive for good, so nothing else bounds its number; and
        // while it comes faster than it is read, this loop would not end.
        let mut left = RECEIVES_SPARE + 4 * self.credits;
        while self.engine.closed().is_none() {
            match self.device.poll() {
                Ok(Some(Completion::Received { sink, len, invalidated })) => {
                    stats::add(Counter::Receives, 1);
                    self.heard = true;
                    left = left.saturating_sub(1);
                    match sink.into_buf(len) {
                        Ok(message) => self.receive(message, invalidated),
                        Err(_) => {
                            self.fail(Error::new(
                                Kind::Protocol,
                                "the device still holds a completed Receive",
                            ));
                        }
                    }
                }
                Ok(Some(Completion::Read { id })) => self.engine.handle_read(id),
                Ok(None) => break,
                Err(error) => self.fail(error),
            }
            self.drain();
            if left == 0 {
                self.fail(Error::new(
                    Kind::Protocol,
                    "the peer floods us with messages that are none of an RPC",
                ));
            }
        }
        self.limit_queue();
    }

    /// Closes the connection of a peer that does not take what it asked for.
    fn limit_queue(&mut self) {
        let unsent = self.device.unsent();
        if self.role == Role::Server && unsent > QUEUE_MAX {
            self.fail(Error::new(
                Kind::NotSent,
                format!("the peer does not take its replies: {unsent} bytes wait, {QUEUE_MAX} is the limit"),
            ));
        }
    }

    fn receive(&mut self, message: Buf, invalidated: Option<Handle>) {
        log_wire!("fd {} < {}", self.device.fd(), describe(&message));
        self.engine.handle_receive(message, invalidated, &mut *self.device);
    }

    fn nudge(&mut self) {
        if self.engine.closed().is_none() {
            self.device.nudge();
        }
    }

    /// Sends what the device takes. True when nothing is left to send.
    fn flush(&mut self) -> bool {
        self.drain();
        if self.engine.closed().is_some() {
            return true;
        }
        match self.device.flush() {
            Ok(all) => all,
            Err(error) => {
                self.fail(error);
                self.drain();
                true
            }
        }
    }

    /// Closes the connection if it still uses memory that the program gets back now: a defect, but no corruption.
    fn end(&mut self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            let text = "a defect of librpcrdma: memory of the program was in use after its time";
            log_error!("fd {}: {text}", self.device.fd());
            self.fail(Error::new(Kind::Panic, text));
            self.drain();
        }
    }

    fn fail(&mut self, error: Error) {
        if self.engine.closed().is_none() {
            log_info!("fd {}: connection closed: {error}", self.device.fd());
            // RFC 8166 §4.5.4: closing is what tells the peer that a reply was lost, and what protects memory that could
            // not be invalidated.
            self.device.close();
            self.engine.handle_closed(error);
        }
    }
}

fn note(request: &WorkRequest, fd: RawFd) {
    match request {
        WorkRequest::Send { gather, .. } => {
            stats::add(Counter::Sends, 1);
            let bytes: usize = gather.iter().map(|r| r.len()).sum();
            stats::add(Counter::BytesInline, bytes as u64);
            log_wire!("fd {fd} > {}", {
                let message: Vec<u8> = gather.iter().flat_map(|region| region.iter().copied()).collect();
                describe(&message)
            });
        }
        WorkRequest::Write { to, .. } => {
            stats::add(Counter::BytesWritten, u64::from(to.length));
            log_wire!("fd {fd} > RDMA Write {to}");
        }
        WorkRequest::Read { from, .. } => {
            stats::add(Counter::BytesRead, u64::from(from.length));
            log_wire!("fd {fd} > RDMA Read {from}");
        }
    }
}

fn describe(message: &[u8]) -> String {
    match v1::decode(message) {
        Ok(header) => header.to_string(),
        Err(error) => error.to_string(),
    }
}

/// What a connection over an adapter is made with.
pub fn adapter_options(config: &Config) -> verbs::Options {
    verbs::Options {
        inline: config.inline,
        credits: config.credits,
        margin: RECEIVE_MARGIN,
        iwarp: config.provider == Provider::Verbs,
    }
}

/// Drives a startup until it is done. False when it is not by `deadline`.
fn establish(device: &mut dyn QueuePair, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error> {
    while !device.establish()? {
        let events = if device.wants_write() { sys::IN | sys::OUT } else { sys::IN };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        sys::wait(device.fd(), events, Some(left), mask)?;
    }
    Ok(true)
}

/// What the MPA startup of a socket offers.
fn options(config: &Config, fd: RawFd) -> Options {
    // The CRC protects what TCP's checksum lets through on a wire; towards this host's own address there is no wire,
    // and the kernel computes no TCP checksum there either.
    let own_host = sys::own_host(fd);
    let crc = match config.crc {
        Crc::Yes => true,
        Crc::No => false,
        Crc::Auto => !own_host,
    };
    let private_data = PrivateData {
        remote_invalidation: iwarp::REMOTE_INVALIDATION,
        send_size: config.inline,
        receive_size: config.inline,
    };
    Options { crc, private_data: private_data.encode().to_vec(), ..Options::default() }
}

// ---------------------------------------------------------------------------------------------------------- spin

/// Whether spinning before a sleep has paid lately.
///
/// It pays only where the peer has a processor of its own. A spin that finds something although the thread lost its
/// processor meanwhile has found what it had kept the peer from sending: when that is the rule it counts as a failure.
#[derive(Default)]
struct Spin {
    /// Waits that sleep at once before the next spin.
    skip: u32,
    /// What the next failure costs: 1, 2, 4 ... 1024 waits; a success halves it.
    penalty: u32,
    /// [`sys::preemptions`] at the end of the latest spin.
    preemptions: i64,
    /// Rises with each spin in which the processor was lost, falls with each other one.
    crowded: u32,
}

impl Spin {
    /// How long to spin now.
    fn allowed(&mut self, config: &Config) -> Option<Duration> {
        if config.poll.is_zero() {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        // After many failures the peer may sleep before each message too, and takes longer than a spin: one of us must
        // wait for the other now and then, or both sleep for ever.
        Some(if self.penalty >= 64 { config.poll * 3 } else { config.poll })
    }

    fn found(&mut self) {
        let before = std::mem::replace(&mut self.preemptions, sys::preemptions());
        if self.preemptions == before {
            self.penalty /= 2;
            self.crowded = self.crowded.saturating_sub(1);
            return;
        }
        self.crowded += 4;
        if self.crowded >= 16 {
            self.crowded = 0;
            self.failed();
        }
    }

    fn failed(&mut self) {
        self.skip = self.penalty.max(1);
        self.penalty = (self.skip * 2).min(1024);
    }
}

/// A spin under way: it goes on as long as bytes move, and its limit beyond, but never longer than [`Patience::MOST`]
/// limits: somebody else may wait for this thread.
struct Patience {
    limit: Duration,
    until: Instant,
    end: Instant,
    moved: u64,
}

/// Threads of this process that spin: one processor is left to others.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

impl Patience {
    const MOST: u32 = 40;

    /// `None` when as many threads spin already as there are processors to spare.
    fn new(limit: Duration, link: &Link) -> Option<Patience> {
        if SPINNING.fetch_add(1, Relaxed) + 1 >= processors() {
            SPINNING.fetch_sub(1, Relaxed);
            return None;
        }
        let now = Instant::now();
        Some(Patience {
            limit,
            until: now + limit,
            end: now + limit * Patience::MOST,
            moved: link.device.moved(),
        })
    }

    fn is_over(&mut self, link: &Link) -> bool {
        let moved = link.device.moved();
        let now = Instant::now();
        if std::mem::replace(&mut self.moved, moved) != moved {
            self.until = self.end.min(now + self.limit);
        }
        now >= self.until
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Relaxed);
    }
}

fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

// -------------------------------------------------------------------------------------------------------- client

/// A requester's connection.
pub struct Client {
    /// The socket that it is known by, and that it runs over unless an adapter does.
    fd: RawFd,
    /// Where it goes over an adapter.
    adapter: Option<SocketAddr>,
    config: &'static Config,
    memory: Arc<Memory>,
    state: Mutex<Waiting>,
}

/// A connection over an adapter that is being made.
pub struct Attempt {
    device: Box<dyn QueuePair>,
    to: SocketAddr,
    config: &'static Config,
}

impl Attempt {
    /// Whether there is an adapter of a kind that the configuration allows.
    pub fn is_possible(config: &Config) -> bool {
        match config.provider {
            Provider::Auto => verbs::present(false),
            Provider::Verbs => true,
            Provider::Iwarp => false,
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// No adapter leads there.
    pub fn start(to: SocketAddr, config: &'static Config) -> Result<Attempt, Error> {
        Ok(Attempt { device: verbs::connect(to, &adapter_options(config))?, to, config })
    }

    /// Waits for its end. False when it has none by `deadline`.
    ///
    /// # Errors
    /// It has failed.
    pub fn wait(&mut self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error> {
        establish(&mut *self.device, deadline, mask)
    }

    /// The connection, when `wait` has said that it is there. `fd` is the socket that it is known by.
    pub fn into_client(self, fd: RawFd) -> Arc<Client> {
        let Attempt { device, to, config } = self;
        let memory = memory(config);
        let link = Link::new(Role::Client, config, device, &memory);
        Client::with(fd, Some(to), config, link)
    }
}

struct Waiting {
    link: Link,
    outcomes: HashMap<Xid, Result<Vec<Region>, Error>>,
    /// Threads in `wait`, by call. Each sleeps on its own condition unless it drives.
    sleepers: HashMap<Xid, Arc<Condvar>>,
    /// Who polls the socket: one, except as [`Waiting::seat_is_free`] says.
    drivers: Vec<Driver>,
    spin: Spin,
    next_xid: u32,
    /// The file behind `fd`: a number that is another file by now is not this connection.
    identity: Option<Identity>,
    /// How often the peer was nudged before its first message.
    nudges: u32,
}

/// A thread that polls the socket.
struct Driver {
    thread: usize,
    /// It will wake when the socket takes bytes.
    writes: bool,
}

/// Names the calling thread among those that live.
fn this_thread() -> usize {
    thread_local! {
        static MARK: Cell<u8> = const { Cell::new(0) };
    }
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

/// The signal mask of the caller, in force while it sleeps.
pub type Mask<'a> = Option<&'a sys::SignalMask>;

impl Client {
    /// Sends the MPA Request on a connected socket and waits for the Reply.
    ///
    /// # Errors
    /// `ConnectionLost` when the peer closed without a Reply (it does not speak MPA), `Timeout` when it stayed silent
    /// until `deadline`, `Peer` when it refused.
    pub fn open(
        fd: RawFd,
        config: &'static Config,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Arc<Client>, Error> {
        let link = Client::start(fd, config, &memory(config), deadline, mask)?;
        Ok(Client::with(fd, None, config, link))
    }

    fn with(fd: RawFd, adapter: Option<SocketAddr>, config: &'static Config, link: Link) -> Arc<Client> {
        let memory = link.memory.clone();
        let state = Waiting {
            link,
            outcomes: HashMap::new(),
            sleepers: HashMap::new(),
            drivers: Vec::new(),
            spin: Spin::default(),
            next_xid: sys::random_u32(),
            identity: process::identify(fd),
            nudges: 0,
        };
        Arc::new(Client { fd, adapter, config, memory, state: Mutex::new(state) })
    }

    fn start(
        fd: RawFd,
        config: &Config,
        memory: &Arc<Memory>,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Link, Error> {
        let mut device = Iwarp::initiator(fd, options(config, fd))?;
        if !establish(&mut device, deadline, mask)? {
            return Err(Error::new(Kind::Timeout, "the peer did not answer the MPA Request in time"));
        }
        Ok(Link::new(Role::Client, config, Box::new(device), memory))
    }

    /// The same way once more.
    fn start_anew(&self, deadline: Instant) -> Result<Link, Error> {
        let Some(to) = self.adapter else {
            sys::reconnect(self.fd, deadline)?;
            return Client::start(self.fd, self.config, &memory(self.config), deadline, None);
        };
        let mut attempt = Attempt::start(to, self.config)?;
        if !attempt.wait(deadline, None)? {
            return Err(Error::new(Kind::Timeout, "the peer did not accept the new connection in time"));
        }
        Ok(Link::new(Role::Client, self.config, attempt.device, &memory(self.config)))
    }

    /// The socket.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether the descriptor is still this connection's socket.
    pub fn alive(&self) -> bool {
        let state = self.lock();
        state.identity.is_some() && state.identity == process::identify(self.fd)
    }

    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn message(&self) -> Result<Buf, Error> {
        match self.adapter {
            // A new connection brings new memory with it.
            Some(_) => Ok(self.lock().link.memory.message()?),
            None => Ok(self.memory.message()?),
        }
    }

    /// What the connection runs on and what was agreed, in words for the log.
    pub fn describe(&self) -> String {
        self.lock().link.describe()
    }

    /// Whether it goes over an adapter.
    pub fn adapter(&self) -> bool {
        self.adapter.is_some()
    }

    /// Results from this length on are received in the program's own memory: an adapter has to register it.
    pub fn place_min(&self) -> usize {
        if self.adapter() { 64 << 10 } else { LEND_MIN }
    }

    /// An XID that no call of this connection uses.
    pub fn fresh_xid(&self) -> Xid {
        let mut state = self.lock();
        loop {
            state.next_xid = state.next_xid.wrapping_add(1);
            let xid = Xid(state.next_xid);
            if !state.link.engine.knows(xid) {
                return xid;
            }
        }
    }

    /// Makes a call: `message` begins with `xid`. Returns the RPC reply in stream order.
    ///
    /// `max_reply` bytes are made room for where no binding bounds the reply; eligible results go into `places`, in their
    /// order. When this returns and its reply is dropped, nothing of `message` and `places` is held any more.
    ///
    /// # Errors
    /// `Timeout` at `deadline` (the call becomes an orphan, the connection lives on), or why the call failed.
    pub fn call(
        &self,
        xid: Xid,
        message: impl Into<Message>,
        max_reply: usize,
        places: Vec<Sink>,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error> {
        stats::add(Counter::Calls, 1);
        // Over an adapter nothing else would tell that the program has closed the socket.
        if self.adapter() && !self.alive() {
            return Err(Error::new(Kind::NotSent, "the descriptor was closed"));
        }
        let mut state = self.lock();
        state.link.pump_input();
        self.replace_starved(&mut state, deadline)?;
        let Waiting { link, .. } = &mut *state;
        link.engine.call(xid, message, Expect::Reply { max: max_reply, places }, &mut *link.device)?;
        if link.engine.credits_left() == 0 && !link.engine.transmitted(xid) {
            stats::add(Counter::CreditsWaited, 1);
        }
        link.flush();
        state.settle();
        let outcome = self.wait(state, xid, deadline, mask);
        stats::add(Counter::Replies, outcome.is_ok().into());
        outcome
    }

    /// Sends a call that has no reply, or whose reply nobody awaits (batching).
    ///
    /// Never takes the last credit, which only a reply gives back: then a call of procedure 0 of the same program goes
    /// first, whose reply shows that the earlier ones were consumed. A message too long for one Send is followed by
    /// such a call too, so that the peer has pulled it when this returns.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_one_way(
        &self,
        xid: Xid,
        message: Message,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<(), Error> {
        stats::add(Counter::Calls, 1);
        let null = null_call(message.body());
        let long = {
            let mut state = self.lock();
            state.link.pump_input();
            state.settle();
            chunks::HEADER_MIN + message.len() > state.link.engine.thresholds().0
        };
        if self.lock().link.engine.credits_left() <= 1 {
            self.null(&null, deadline, mask)?;
        }
        let mut state = self.lock();
        if state.link.engine.granted() == 1 {
            // It would hold the only credit, and nothing would ever give it back.
            return Err(Error::new(
                Kind::NotSent,
                "the server grants one credit: a call without a reply needs two; raise RPCRDMA_CREDITS there",
            ));
        }
        let Waiting { link, .. } = &mut *state;
        link.engine.call(xid, message, Expect::Nothing, &mut *link.device)?;
        link.flush();
        state.settle();
        self.wait(state, xid, deadline, mask)?;
        if long {
            self.null(&null, deadline, mask)?;
        }
        Ok(())
    }

    fn null(&self, call: &[u8; 40], deadline: Instant, mask: Mask<'_>) -> Result<(), Error> {
        let xid = self.fresh_xid();
        let mut message = self.message()?;
        message.extend(call)?;
        message[..4].copy_from_slice(&xid.0.to_be_bytes());
        let reply = self.call(xid, message, RPC_HEADER_MAX, Vec::new(), deadline, mask)?;
        drop(reply);
        Ok(())
    }

    /// Waits for the end of a call, driving the connection when nobody else does.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        xid: Xid,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error> {
        let mut condition: Option<Arc<Condvar>> = None;
        loop {
            if let Some(outcome) = state.outcomes.remove(&xid) {
                state.leave(xid);
                return outcome;
            }
            let now = Instant::now();
            if now >= deadline {
                let Waiting { link, .. } = &mut *state;
                link.engine.abandon(xid, &mut *link.device);
                link.drain();
                state.settle();
                state.leave(xid);
                stats::add(Counter::Orphans, 1);
                return Err(Error::new(Kind::Timeout, "no reply within the time of the call"));
            }
            if !state.seat_is_free() {
                let own = condition.get_or_insert_with(|| Arc::new(Condvar::new())).clone();
                state.sleepers.insert(xid, own.clone());
                state = own
                    .wait_timeout(state, deadline - now)
                    .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
            } else {
                state = self.drive(state, xid, deadline, mask);
            }
        }
    }

    /// Spins, then sleeps once, then moves what has come.
    fn drive<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        xid: Xid,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Waiting> {
        if !state.link.engine.transmitted(xid) && self.replace_starved(&mut state, deadline).is_err() {
            // The call has ended with the reason.
            return state;
        }
        state.drivers.push(Driver { thread: this_thread(), writes: false });
        let patience = state.spin.allowed(self.config).and_then(|limit| Patience::new(limit, &state.link));
        if let Some(mut patience) = patience {
            loop {
                state.link.pump();
                state.settle();
                if state.outcomes.contains_key(&xid) {
                    state.spin.found();
                    state.stand_up();
                    return state;
                }
                if patience.is_over(&state.link) {
                    state.spin.failed();
                    break;
                }
                drop(state);
                std::hint::spin_loop();
                state = self.lock();
            }
        }
        let (fd, writes) = (state.link.device.fd(), state.link.device.wants_write());
        let events = if writes { sys::IN | sys::OUT } else { sys::IN };
        if let Some(driver) = state.own_seat() {
            state.drivers[driver].writes = writes;
        }
        let nudges = state.nudges < NUDGES && !state.link.heard;
        drop(state);
        let mut left = deadline.saturating_duration_since(Instant::now());
        if nudges {
            left = left.min(NUDGE_AFTER);
        }
        // An error of poll(2) itself shows up in the next pump, as an error of the device; EINTR is no error here.
        let came = sys::wait(fd, events, Some(left), mask);
        let mut state = self.lock();
        if nudges && matches!(came, Ok(false)) && !state.link.heard {
            state.nudges += 1;
            state.link.nudge();
        }
        state.link.pump();
        state.settle();
        state.stand_up();
        state
    }

    /// A new connection when calls that nobody waits for hold every credit of this one.
    ///
    /// The lock is kept: no other thread could do anything meanwhile. Signals are not let through, for a handler could
    /// call on this connection.
    fn replace_starved(&self, state: &mut MutexGuard<'_, Waiting>, deadline: Instant) -> Result<(), Error> {
        if !state.drivers.is_empty() {
            return Ok(());
        }
        match state.link.engine.closed() {
            // A call that timed out has ended it, since the device could not take its memory back otherwise.
            Some(error) if error.kind() == Kind::Timeout => {
                log_warn!("fd {}: connecting anew: {error}", self.fd);
            }
            None if state.link.engine.starved() => {
                log_warn!("fd {}: timed-out calls hold every credit: connecting anew", self.fd);
            }
            _ => return Ok(()),
        }
        if state.identity.is_none() || state.identity != process::identify(self.fd) {
            // Another file has the number by now, and would be replaced.
            let error = Error::new(Kind::NotSent, "the descriptor was closed");
            state.link.engine.handle_closed(error.clone());
            state.link.drain();
            state.settle();
            return Err(error);
        }
        // However little time this call has: a startup given up halfway would leave no connection at all.
        let limit = deadline.max(Instant::now() + RECONNECT_TIMEOUT).min(Instant::now() + START_TIMEOUT);
        let fresh = self.start_anew(limit);
        state.identity = process::identify(self.fd);
        stats::add(Counter::Reconnects, 1);
        match fresh {
            Ok(link) => {
                // The old socket is closed already: its number is the new one's. Nobody awaits what was sent on it; what
                // was not sent goes over the new one.
                let waiting = state.link.engine.take_waiting();
                state.link = link;
                let Waiting { link, .. } = &mut **state;
                for (xid, message, expect) in waiting {
                    link.engine.call(xid, message, expect, &mut *link.device)?;
                }
                Ok(())
            }
            Err(error) => {
                state.link.fail(error.clone());
                state.link.drain();
                state.settle();
                Err(error)
            }
        }
    }

    /// Sees to it that memory which the program gets back is not used any more.
    pub fn end(&self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            let mut state = self.lock();
            state.link.end(loans);
            state.settle();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock means that a thread panicked inside: the connection is closed and stays so. Those who sleep
        // are told, since perhaps it was their driver.
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.link.fail(Error::new(Kind::Panic, "a defect of librpcrdma ended this connection"));
            state.link.drain();
            state.settle();
            state
        })
    }
}

impl Link {
    /// Takes in what has arrived: replies to orphans give credits back before they are missed.
    fn pump_input(&mut self) {
        if self.engine.credits_left() <= 1 {
            self.pump();
        }
    }
}

impl Waiting {
    /// Hands outcomes to their waiters.
    fn settle(&mut self) {
        for (xid, outcome) in self.link.done.drain(..) {
            if let Some(condition) = self.sleepers.get(&xid) {
                condition.notify_one();
            }
            self.outcomes.insert(xid, outcome);
        }
    }

    /// Whether this thread may poll the socket.
    ///
    /// Beside another one it does so in two cases. That one sleeps until something comes, and there is something to
    /// send by now. Or that one is this very thread, in whose sleep a signal handler makes a call: it cannot go on
    /// before the handler ends.
    fn seat_is_free(&self) -> bool {
        self.lacks_driver() || self.own_seat().is_some()
    }

    fn lacks_driver(&self) -> bool {
        self.drivers.is_empty()
            || (self.link.device.wants_write() && !self.drivers.iter().any(|driver| driver.writes))
    }

    /// The latest seat of this thread.
    fn own_seat(&self) -> Option<usize> {
        let thread = this_thread();
        self.drivers.iter().rposition(|driver| driver.thread == thread)
    }

    fn stand_up(&mut self) {
        if let Some(driver) = self.own_seat() {
            self.drivers.remove(driver);
        }
    }

    /// This thread waits no more: somebody else takes the driver's seat if it is empty.
    fn leave(&mut self, xid: Xid) {
        self.sleepers.remove(&xid);
        if self.lacks_driver()
            && let Some(condition) =
                self.sleepers.iter().find(|(x, _)| !self.outcomes.contains_key(x)).map(|(_, c)| c)
        {
            condition.notify_one();
        }
    }
}

/// A Call of procedure 0 with the program and version of `call`, AUTH_NONE, XID still to be set (RFC 5531 §9, §12.1).
fn null_call(call: &[u8]) -> [u8; 40] {
    let mut null = [0; 40];
    let same = call.len().min(20);
    null[..same].copy_from_slice(&call[..same]);
    null
}

// -------------------------------------------------------------------------------------------------------- server

/// A responder's connection, driven by the loop of the program through `receive`, `reply` and `more`.
pub struct Server {
    fd: RawFd,
    peer: Option<SocketAddr>,
    config: &'static Config,
    phase: Phase,
    spin: Spin,
    /// Requests found by spinning since the program's loop had its last chance to look at other connections.
    turn: u32,
    /// Distinguishes connections in [`quiet`].
    id: usize,
    /// When the startup must be complete.
    start_by: Instant,
    /// While RDMA Reads are under way: bytes pulled when they last got on, and when that was.
    pulling: Option<(u64, Instant)>,
    /// Since when a long Call waits for memory, and when to try again.
    retry: Option<(Instant, Instant)>,
    generation: u64,
}

enum Phase {
    Starting(Box<dyn QueuePair>),
    Open(Box<Link>),
    Failed(Error),
}

impl Server {
    /// Waits for the MPA Request on an accepted socket.
    ///
    /// # Errors
    /// When the device cannot be set up.
    pub fn accept(fd: RawFd, config: &'static Config) -> Result<Server, Error> {
        let device = Iwarp::responder(fd, options(config, fd))?;
        Ok(Server::with(fd, Box::new(device), socket::peer(fd), config))
    }

    /// Waits for the end of a startup. The connection gets a descriptor of its own, which belongs to the caller.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn new(
        device: Box<dyn QueuePair>,
        peer: Option<SocketAddr>,
        config: &'static Config,
    ) -> Result<Server, Error> {
        Ok(Server::with(socket::duplicate(device.fd())?, device, peer, config))
    }

    fn with(
        fd: RawFd,
        device: Box<dyn QueuePair>,
        peer: Option<SocketAddr>,
        config: &'static Config,
    ) -> Server {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Server {
            fd,
            peer,
            config,
            phase: Phase::Starting(device),
            spin: Spin::default(),
            turn: 0,
            id: NEXT.fetch_add(1, Relaxed),
            start_by: Instant::now() + START_TIMEOUT,
            pulling: None,
            retry: None,
            generation: sys::fork_generation(),
        }
    }

    /// Moves what has come, and hands out the oldest complete request.
    pub fn receive(&mut self) -> Option<Request> {
        if let Phase::Starting(device) = &mut self.phase {
            match device.establish() {
                Ok(false) => return None,
                Ok(true) => self.open(),
                Err(error) => {
                    log_info!("fd {}: startup failed: {error}", self.fd);
                    self.phase = Phase::Failed(error);
                    return None;
                }
            }
        }
        let Phase::Open(link) = &mut self.phase else { return None };
        if !link.engine.request_ready() {
            link.pump();
        }
        let request = link.engine.poll_request();
        // Handing it up made room: Reads of the next long Calls may start.
        link.drain();
        self.note_pulls();
        let request = request?;
        stats::add(Counter::Served, 1);
        active(self.id);
        Some(request)
    }

    /// Notes how the Reads get on.
    fn note_pulls(&mut self) {
        let Phase::Open(link) = &mut self.phase else { return };
        if !link.engine.pulling() {
            self.pulling = None;
        } else {
            let pulled = link.device.pulled();
            match self.pulling {
                Some((before, _)) if pulled.wrapping_sub(before) < PULL_LEAST => {}
                _ => self.pulling = Some((pulled, Instant::now())),
            }
        }
        let now = Instant::now();
        let since = self.retry.map_or(now, |(since, _)| since);
        self.retry = link.engine.waits_for_memory().then_some((since, now + PULL_RETRY));
    }

    /// Whether RDMA Reads are under way, which hold memory that other connections may wait for.
    pub fn pulling(&self) -> bool {
        self.pulling.is_some()
    }

    /// Since when a long Call waits for memory that other connections hold.
    pub fn waits_for_memory(&self) -> Option<Instant> {
        self.retry.map(|(since, _)| since)
    }

    /// Sees to it that memory which the program gets back is not used any more.
    pub fn end(&mut self, loans: &[Loan]) {
        if let Phase::Open(link) = &mut self.phase {
            link.end(loans);
        }
    }

    /// Closes the connection if its Reads have not got on for a while: others wait for the memory that they hold.
    pub fn give_way(&mut self) {
        let stalled = self.pulling.is_some_and(|(_, since)| since.elapsed() >= PULL_STALL);
        if let Phase::Open(link) = &mut self.phase
            && stalled
        {
            let text = "the peer does not answer RDMA Reads, and others wait for the memory of its call";
            link.fail(Error::new(Kind::Timeout, text));
        }
    }

    fn open(&mut self) {
        let closed = Phase::Failed(Error::new(Kind::ConnectionLost, "closed"));
        if let Phase::Starting(device) = std::mem::replace(&mut self.phase, closed) {
            let link = Link::new(Role::Server, self.config, device, &memory(self.config));
            let peer = self.peer.map_or_else(|| "a peer".to_owned(), |at| at.to_string());
            log_info!("fd {}: accepted {peer} over rdma ({})", self.fd, link.describe());
            self.phase = Phase::Open(Box::new(link));
        }
    }

    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn message(&self) -> Result<Buf, Error> {
        match &self.phase {
            Phase::Open(link) => Ok(link.memory.message()?),
            Phase::Starting(_) | Phase::Failed(_) => Ok(memory(self.config).message()?),
        }
    }

    /// Sends a reply: the kernel has every byte when this returns, unless the peer is too slow to take them.
    ///
    /// # Errors
    /// As [`Connection::reply`]; the reason of the close when the connection is closed.
    ///
    /// No memory that was lent to `message` is in use when this returns.
    pub fn reply(&mut self, id: RequestId, message: Message) -> Result<(), Error> {
        let forked = self.forked();
        let Phase::Open(link) = &mut self.phase else {
            return Err(Error::new(Kind::NotSent, "the connection is closed"));
        };
        // A peer that has let one reply wait is not waited for again until it has taken all.
        let behind = link.device.unsent() > 0 && !forked;
        let lent = message.lent().next().is_some();
        let sent = link.engine.reply(id, message);
        if !link.flush() {
            let wait = if forked { REPLY_WAIT_CHILD } else { REPLY_WAIT };
            let deadline = Instant::now() + if behind { Duration::ZERO } else { wait };
            // Reading goes on: two ends that only write would wait for each other. A forked child leaves it to its parent.
            let events = if forked { sys::OUT } else { sys::IN | sys::OUT };
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let _ = sys::wait(self.fd, events, Some(left), None);
                if !forked {
                    link.pump();
                }
                if link.flush() {
                    break;
                }
            }
            link.limit_queue();
        }
        if lent {
            // What the peer has not taken goes out from a copy: the program gets its results back.
            match link.device.keep() {
                Ok(copied) if copied > 0 => log_debug!("fd {}: {copied} bytes kept for a slow peer", self.fd),
                Ok(_) => {}
                Err(error) => link.fail(error),
            }
            if !forked {
                link.pump();
            }
        }
        sent?;
        match link.engine.closed() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// The request gets no reply.
    pub fn discard(&mut self, id: RequestId) {
        if let Phase::Open(link) = &mut self.phase {
            link.engine.discard(id);
            link.flush();
        }
    }

    /// Whether a complete request lies in memory, after waiting for one as long as spinning pays.
    pub fn more(&mut self) -> bool {
        let Phase::Open(link) = &mut self.phase else { return false };
        if link.engine.request_ready() {
            return true;
        }
        if self.generation != sys::fork_generation() || !quiet(self.id) {
            return false;
        }
        if self.turn >= TURN {
            self.turn = 0;
            return false;
        }
        let patience = self.spin.allowed(self.config).and_then(|limit| Patience::new(limit, link));
        let Some(mut patience) = patience else { return false };
        loop {
            link.pump();
            if link.engine.request_ready() {
                self.spin.found();
                self.turn += 1;
                return true;
            }
            if link.engine.closed().is_some() {
                return false;
            }
            if patience.is_over(link) {
                self.spin.failed();
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// Why the connection is closed, if it is. A startup that takes too long closes it.
    pub fn closed(&mut self) -> Option<Error> {
        match &self.phase {
            Phase::Starting(_) if Instant::now() >= self.start_by => {
                let error = Error::new(Kind::Timeout, "the peer did not complete the startup in time");
                self.phase = Phase::Failed(error.clone());
                Some(error)
            }
            Phase::Starting(_) => None,
            Phase::Open(link) => link.engine.closed().cloned(),
            Phase::Failed(error) => Some(error.clone()),
        }
    }

    /// When `closed` must be asked again though nothing arrived.
    pub fn deadline(&self) -> Option<Instant> {
        if matches!(self.phase, Phase::Starting(_)) {
            Some(self.start_by)
        } else {
            self.retry.map(|(_, at)| at)
        }
    }

    /// Whether unsent bytes wait for the socket to become writable.
    pub fn wants_write(&self) -> bool {
        match &self.phase {
            Phase::Starting(device) => device.wants_write(),
            Phase::Open(link) => link.engine.closed().is_none() && link.device.wants_write(),
            Phase::Failed(_) => false,
        }
    }

    /// Sends what the socket takes now.
    pub fn push(&mut self) {
        match &mut self.phase {
            Phase::Open(link) => {
                link.engine.resume();
                link.flush();
                self.note_pulls();
            }
            Phase::Starting(device) => {
                if let Ok(true) = device.establish() {
                    self.open();
                }
            }
            Phase::Failed(_) => {}
        }
    }

    /// What to wait for.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether this process inherited the connection from the one that accepted it.
    pub fn forked(&self) -> bool {
        self.generation != sys::fork_generation()
    }
}

/// The connection that served last, and since when no other one has, in nanoseconds of [`now_ns`].
static LAST: AtomicUsize = AtomicUsize::new(0);
static SINCE: AtomicU64 = AtomicU64::new(0);

fn active(id: usize) {
    if LAST.swap(id, Relaxed) != id {
        SINCE.store(now_ns(), Relaxed);
    }
}

/// Whether no other connection was active in the last millisecond: a spin then keeps nobody else waiting.
fn quiet(id: usize) -> bool {
    LAST.load(Relaxed) == id && now_ns().saturating_sub(SINCE.load(Relaxed)) > 1_000_000
}

fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// A connection whose client gives the kernel little room.
    fn pair() -> io::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        sys::testing::shrink_buffers(listener.as_raw_fd());
        let client = TcpStream::connect(listener.local_addr()?)?;
        sys::testing::shrink_buffers(client.as_raw_fd());
        let (server, _) = listener.accept()?;
        Ok((client, server))
    }

    /// Any message will do: the server of these tests answers with it.
    fn message(client: &Client, xid: Xid, len: usize) -> Buf {
        let mut bytes = vec![7; len];
        bytes[..4].copy_from_slice(&xid.0.to_be_bytes());
        let mut message = client.message().unwrap();
        message.extend(&bytes).unwrap();
        message
    }

    fn call(client: &Client, len: usize) -> Result<Vec<Region>, Error> {
        let xid = client.fresh_xid();
        client.call(xid, message(client, xid, len), 1024, Vec::new(), Instant::now() + PATIENCE, None)
    }

    fn until(client: &Client, so: impl Fn(&Waiting) -> bool) {
        while !so(&client.lock()) {
            std::thread::yield_now();
        }
    }

    /// The next request, or `None` when none comes for two seconds.
    fn next(server: &mut Server) -> Option<Request> {
        loop {
            if let Some(request) = server.receive() {
                return Some(request);
            }
            if !sys::wait(server.fd(), sys::IN, Some(Duration::from_secs(2)), None).unwrap() {
                return None;
            }
        }
    }

    fn answer(server: &mut Server, request: Request) {
        let Request { id, message, .. } = request;
        let mut reply = server.message().unwrap();
        reply.extend(&message[0][..40]).unwrap();
        server.reply(id, reply.into()).unwrap();
    }

    #[test]
    fn a_call_that_the_socket_does_not_take_at_once_goes_out_while_another_thread_waits_for_its_reply() {
        const CALLERS: usize = 24;
        // Without spinning, a driver that others can see sleeps.
        let mut config = Config::default();
        config.poll = Duration::ZERO;
        let config: &'static Config = Box::leak(Box::new(config));
        let (to_server, to_client) = pair().unwrap();
        let mut server = Server::accept(to_client.as_raw_fd(), config).unwrap();
        let shared = OnceLock::new();
        std::thread::scope(|scope| {
            let (opened, open) = mpsc::channel();
            let fd = to_server.as_raw_fd();
            scope.spawn(move || {
                let client = Client::open(fd, config, Instant::now() + PATIENCE, None).unwrap();
                call(&client, 40).unwrap();
                opened.send(client).unwrap();
            });
            let first = next(&mut server).unwrap();
            answer(&mut server, first);
            let client: &Arc<Client> = shared.get_or_init(|| open.recv().unwrap());
            // One call is under way, and its caller sleeps: nothing but the end of another call will wake it.
            scope.spawn(move || call(client, 40).unwrap());
            let mut held = vec![next(&mut server).unwrap()];
            until(client, |state| !state.drivers.is_empty());
            for _ in 0..CALLERS {
                scope.spawn(move || call(client, 3800).unwrap());
            }
            until(client, |state| state.link.engine.credits_left() == config.credits - 1 - CALLERS as u32);
            assert!(client.lock().link.device.unsent() > 0, "the socket has taken all");
            while held.len() < 1 + CALLERS {
                match next(&mut server) {
                    Some(request) => held.push(request),
                    None => break,
                }
            }
            let came = held.len();
            for request in held {
                answer(&mut server, request);
            }
            // Whoever was held up is let go, so that a failure does not hang.
            while let Some(request) = next(&mut server) {
                answer(&mut server, request);
            }
            assert_eq!(came, 1 + CALLERS);
        });
    }

    /// Linux's siw looks at what comes right behind its answer to the startup only when more comes.
    #[test]
    fn a_peer_that_does_not_answer_the_first_call_is_nudged_by_a_write_of_no_bytes() {
        let config: &'static Config = Box::leak(Box::default());
        let (to_server, mut peer) = pair().unwrap();
        std::thread::scope(|scope| {
            let fd = to_server.as_raw_fd();
            scope.spawn(move || {
                let client = Client::open(fd, config, Instant::now() + PATIENCE, None).unwrap();
                assert_eq!(call(&client, 40).unwrap_err().kind(), Kind::ConnectionLost);
            });
            let mut request = [0; 32];
            peer.read_exact(&mut request).unwrap();
            assert_eq!(request[..16], *b"MPA ID Req Frame");
            // No CRC, revision 2, read depths of 16 and no private data.
            peer.write_all(b"MPA ID Rep Frame\x10\x02\x00\x04\x00\x10\x00\x10").unwrap();
            let mut fpdu = || {
                let mut length = [0; 2];
                peer.read_exact(&mut length).unwrap();
                let length = usize::from(u16::from_be_bytes(length));
                let mut rest = vec![0; (length + 2).next_multiple_of(4) - 2 + 4];
                peer.read_exact(&mut rest).unwrap();
                rest.truncate(length);
                rest
            };
            // An untagged Send, and, since it has no answer, a tagged RDMA Write to nowhere.
            assert_eq!(fpdu()[..2], [0x41, 0x43]);
            assert_eq!(fpdu()[..], [0xc1, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            drop(peer);
        });
    }
}
