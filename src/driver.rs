//! Joins the engine and a device, and waits: the only clock, fd and blocking wait of the library.
//!
//! [`Link`] is the joint: it carries out what the engine asks for and feeds it what the device reports. Around it
//!
//! - [`Client`] is the connection of the end that opened it, shared by the threads and CLIENTs that use its socket.
//!   **Whoever waits does the work**: one thread drives, the others sleep until it wakes them with their reply or with
//!   the driver's seat. There is no thread of our own. What the server calls back is served by `callback`; a connection
//!   that is of no use any more is replaced by `renewal`.
//! - [`Server`] is the connection of the end that accepted it, driven by the program's own loop (`server`). Its calls back
//!   to the client are made by [`Reverse`].
//!
//! What either knows of its peer, and may ask of it, is in `peer`; what becomes of replies that it does not take, in
//! `backlog`.
//!
//! Waiting first spins, if that has paid lately (`spin`): on two idle processors a reply comes sooner than a sleep
//! takes. A spin that finds nothing makes the next waits sleep at once.
//!
//! # Invariants
//! - A lock is never held while sleeping, and no C code of the program runs under it but the walks of bindings, which call
//!   nothing.
//! - Memory of the program that a call or a reply lends is not used any more when the call or the reply is over.
//! - After every input to the engine its output is drained (`Link::pump`).
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crate::config::{self, Config, Crc, Provider, Version};
use crate::connection::characteristics::Wish;
use crate::connection::{
    Connection, Expect, Output, RPC_HEADER_MAX, Request, RequestId, Role, Settings, receive_margin,
};
use crate::error::{Error, Kind, os_text};
use crate::memory::{AREAS_MAX, Areas, Buf, Loan, Memory, Message, Region, Sink, areas};
use crate::process::{self, Identity};
use crate::provider::iwarp::{self, Iwarp, Options};
use crate::provider::{Completion, QueuePair, WorkRequest, verbs};
use crate::stats::{self, Counter};
use crate::sys::{self, PollFd};
use crate::wire::characteristics::{self, Characteristic};
use crate::wire::either::Versions;
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Xid, v1, v2};
use crate::xdr::LEND_MIN;
use crate::{log_debug, log_error, log_info, log_warn, log_wire, socket};

mod backlog;
pub mod callback;
#[cfg(test)]
mod load;
pub mod peer;
mod renewal;
pub mod reverse;
mod server;
mod spin;

use backlog::Backlog;
pub use backlog::{Wait, send_rest};
pub use peer::Peer;
use renewal::Renewal;
pub use reverse::{Reverse, service_loop};
pub use server::{Next, Server, Shared, Stage};
use server::{Phase, Turn, locked};
use spin::{Patience, Spin};

/// How long the passive side waits for the MPA Request and the first message of a peer (RFC 5044 §7.1.2: "SHOULD"), and
/// the active side for a startup.
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection that follows one without a reply has for its first reply, before a call that timed out, and holds
/// the only credit, has it replaced; twice as long after each further one. A server that is slower than the calls' time
/// would see a new connection with each of them.
const FIRST_REPLY: Duration = Duration::from_millis(50);
const FIRST_REPLY_MAX: Duration = Duration::from_secs(2);

/// When a peer that has not answered the first call is nudged, and how often: Linux's siw may overlook what comes right
/// behind its answer to the startup until more comes.
const NUDGE_AFTER: Duration = Duration::from_millis(100);
const NUDGES: u32 = 10;

/// How long a peer has to answer an offer of Version Two. The draft (version-two-01, section 5.2) has a client take one that
/// drops it for one that speaks Version One only; but a server may also be busy with another request.
const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the first wait for that answer is, while the CLIENT is made; the first call waits for the rest.
const AGREE_WAIT: Duration = Duration::from_secs(2);

/// How often what waits for memory tries again.
const MEMORY_RETRY: Duration = Duration::from_millis(20);

/// Messages of a peer that are taken in one go, beyond several times those that its credits allow.
const RECEIVES_SPARE: u32 = 256;

/// Requests of one connection that are served before the program's loop looks at the others again.
const TURN: u32 = 64;

/// The pools that all software connections of the process share.
pub fn memory(config: &Config) -> Arc<Memory> {
    static MEMORY: OnceLock<Arc<Memory>> = OnceLock::new();
    if let Some(memory) = MEMORY.get() {
        return memory.clone();
    }
    let (_, receive) = config.receive_sizes(false);
    // A process has one configuration, but for the tests.
    let receive = if cfg!(test) { receive.max(64 << 10) } else { receive };
    // Made outside the OnceLock: a fork(2) of another thread in between would leave the child waiting for ever.
    let memory = Memory::new(receive, config.max_reply(false) + REPLY_HEADER, config.max_pulled);
    MEMORY.get_or_init(|| memory).clone()
}

/// See [`Requester::reply_header`].
pub const REPLY_HEADER: usize = 4096;

// ---------------------------------------------------------------------------------------------------------- link

/// An engine and a device.
pub struct Link {
    engine: Connection,
    device: Box<dyn QueuePair>,
    memory: Arc<Memory>,
    born: Instant,
    /// For how long calls that nobody waits for may hold the only credit of a connection without a reply.
    first_reply: Duration,
    /// The peer has sent something.
    heard: bool,
    /// Somebody takes the requests up; else they are answered here: the program is not served.
    serves: bool,
    /// More unsent bytes than this, and the peer talks without reading.
    talk_max: usize,
    /// Calls that ended, for whoever collects them.
    done: Vec<(Xid, Result<Vec<Region>, Error>)>,
}

/// Calls that are waited for, of either end.
#[derive(Default)]
struct Calls {
    outcomes: HashMap<Xid, Result<Vec<Region>, Error>>,
    /// Threads that sleep until they are woken, each on its own condition.
    sleepers: HashMap<Waiter, Arc<Condvar>>,
    /// One of them may have to serve a request in the midst of its own: nobody else does.
    servant: Option<Arc<Condvar>>,
    next_xid: u32,
    /// What the peer is asked to be.
    requests: peer::Requests,
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Waiter {
    /// The end of a call.
    Call(Xid),
    /// The answer to a request for a characteristic.
    Peer(u32),
    /// A version, in this thread.
    Version(usize),
    /// Callbacks, in this thread.
    Callbacks(usize),
}

impl Calls {
    fn new() -> Calls {
        Calls { next_xid: sys::random_u32(), ..Calls::default() }
    }

    /// Hands outcomes to their waiters.
    fn settle(&mut self, link: &mut Link) {
        for (xid, outcome) in link.done.drain(..) {
            if let Some(condition) = self.sleepers.get(&Waiter::Call(xid)) {
                condition.notify_one();
            }
            self.outcomes.insert(xid, outcome);
        }
        if link.request_ready()
            && let Some(condition) = &self.servant
        {
            condition.notify_one();
        }
        if !self.requests.is_empty() {
            self.requests.settle(link);
            for (waiter, condition) in &self.sleepers {
                if matches!(waiter, Waiter::Peer(number) if self.requests.is_over(*number)) {
                    condition.notify_one();
                }
            }
        }
    }

    /// Whether what is waited for is there. Callbacks have no such end.
    fn is_over(&self, waiter: Waiter) -> bool {
        match waiter {
            Waiter::Call(xid) => self.outcomes.contains_key(&xid),
            Waiter::Peer(number) => self.requests.is_over(number),
            Waiter::Version(_) | Waiter::Callbacks(_) => false,
        }
    }

    /// An XID that no call of this direction of the connection uses.
    fn fresh_xid(&mut self, engine: &Connection) -> Xid {
        loop {
            self.next_xid = self.next_xid.wrapping_add(1);
            let xid = Xid(self.next_xid);
            if !engine.knows(xid) {
                return xid;
            }
        }
    }

    /// Wakes one of those who sleep without an outcome. False when there is none.
    fn wake_one(&self) -> bool {
        let sleeper = self.sleepers.iter().find(|(waiter, _)| !self.is_over(**waiter));
        let sleeper = sleeper.map(|(_, condition)| condition);
        sleeper.map(|condition| condition.notify_one()).is_some()
    }
}

/// Sleeps on a condition, at most until `deadline`.
fn sleep<'a, T>(condition: &Condvar, state: MutexGuard<'a, T>, deadline: Instant) -> MutexGuard<'a, T> {
    let left = deadline.saturating_duration_since(Instant::now());
    condition.wait_timeout(state, left).map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state)
}

/// Makes calls on a connection: the end that opened it, or the other one in the reverse direction.
pub trait Requester: Send + Sync {
    /// The descriptor that the program knows the connection by.
    fn fd(&self) -> RawFd;

    /// Whether it goes over an adapter.
    fn adapter(&self) -> bool;

    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn message(&self) -> Result<Buf, Error>;

    /// An XID that no call of this direction of the connection uses.
    fn fresh_xid(&self) -> Xid;

    /// Makes a call and waits for its end. See [`Requester::call`].
    ///
    /// # Errors
    /// As there.
    fn exchange(
        &self,
        xid: Xid,
        message: Message,
        expect: Expect,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error>;

    /// Takes in what has arrived, and tells how calls without a reply stand.
    fn standing(&self) -> Standing;

    /// What is known of the peer; with what has arrived of it by now, if that is `wanted`.
    ///
    /// # Errors
    /// Why the connection is lost.
    fn peer(&self, wanted: bool) -> Result<Peer, Error>;

    /// Asks the peer to change a characteristic, and waits until that is done or rejected: pending if it is not by
    /// `deadline`.
    ///
    /// # Errors
    /// `Invalid` when an earlier request is not settled; `Peer` when the peer does not know the extension, or not even
    /// Version Two; `ConnectionLost`.
    fn request(&self, what: Characteristic, deadline: Instant, mask: Mask<'_>) -> Result<Wish, Error>;

    /// Has our Receives grow to so many bytes, on the next connection too.
    ///
    /// # Errors
    /// As [`Connection::raise_receives`]; `Peer` in Version One.
    fn raise_receives(&self, bytes: u32) -> Result<(), Error>;

    /// Sees to it that memory which the program gets back is not used any more.
    fn end(&self, loans: &[Loan]);

    /// After a call that failed as `NotSent`: whether the connection is there again, or will be for the next call. Waits
    /// for that if somebody else has to see to it.
    ///
    /// # Errors
    /// `Timeout` at `deadline`.
    fn comes_back(&self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error>;

    /// Credits that are asked for; sets them if some are given.
    fn credits(&self, ask: Option<u32>) -> u32;

    /// Longest replies that calls make room for unless the program says more, in bytes of results.
    fn max_reply(&self, config: &Config) -> usize;

    /// Room beside the results of a procedure without a binding: a reply's header, and what RPCSEC_GSS wraps around results.
    fn reply_header(&self) -> usize {
        REPLY_HEADER
    }

    /// Results from this length on are received in the program's own memory: an adapter has to register it.
    fn place_min(&self) -> usize {
        if self.adapter() { 64 << 10 } else { LEND_MIN }
    }

    /// Makes a call: `message` begins with `xid`. Returns the RPC reply in stream order.
    ///
    /// `max_reply` bytes are made room for where no binding bounds the reply; eligible results go into `places`, in their
    /// order. When this returns and its reply is dropped, nothing of `message` and `places` is held any more.
    ///
    /// # Errors
    /// `Timeout` at `deadline` (the call becomes an orphan, the connection lives on), or why the call failed.
    fn call(
        &self,
        xid: Xid,
        message: Message,
        max_reply: usize,
        places: Vec<Sink>,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error> {
        stats::add(Counter::Calls, 1);
        let outcome = self.exchange(xid, message, Expect::Reply { max: max_reply, places }, deadline, mask);
        stats::add(Counter::Replies, outcome.is_ok().into());
        outcome
    }

    /// Sends a call that has no reply, or whose reply nobody awaits (batching).
    ///
    /// Does not take the last credit, which only a reply gives back: then a call of procedure 0 of the same program goes
    /// first, whose reply shows that the earlier ones were consumed. A message too long for one Send is followed by
    /// such a call too, so that the peer has pulled it when this returns.
    ///
    /// # Errors
    /// As [`Requester::call`]; `NotSent` when there is one credit in all.
    fn call_one_way(
        &self,
        xid: Xid,
        message: Message,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<(), Error> {
        stats::add(Counter::Calls, 1);
        let null = null_call(message.body());
        let standing = self.standing();
        let long = message.len() > standing.short;
        if standing.credits_left <= 1 {
            self.null(&null, deadline, mask)?;
        }
        self.exchange(xid, message, Expect::Nothing, deadline, mask)?;
        if long {
            self.null(&null, deadline, mask)?;
        }
        Ok(())
    }

    /// Makes a call of procedure 0.
    ///
    /// # Errors
    /// As [`Requester::call`].
    fn null(&self, call: &[u8; 40], deadline: Instant, mask: Mask<'_>) -> Result<(), Error> {
        let xid = self.fresh_xid();
        let message = with_xid(self.message()?, call, xid)?;
        drop(self.call(xid, message.into(), RPC_HEADER_MAX, Vec::new(), deadline, mask)?);
        Ok(())
    }
}

/// How a requester stands with its peer.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// Calls that may be transmitted now.
    credits_left: u32,
    /// Longest message that goes without chunks, bytes.
    short: usize,
}

impl Standing {
    fn of(engine: &Connection) -> Standing {
        Standing { credits_left: engine.credits_left(), short: engine.largest_short().0 }
    }
}

/// Answers calls of a connection: the end that accepted it, or the other one in the reverse direction.
pub trait Responder: Send + Sync {
    /// The descriptor that the program knows the connection by.
    fn fd(&self) -> RawFd;

    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn message(&self) -> Result<Buf, Error>;

    /// Sends a reply: the kernel has every byte when this returns, unless the peer is too slow to take them.
    ///
    /// # Errors
    /// As [`Connection::reply`]; the reason of the close when the connection is closed.
    ///
    /// No memory that was lent to `message` is in use when this returns.
    fn reply(&self, id: RequestId, message: Message) -> Result<(), Error>;

    /// The request has no reply yet: see [`Connection::defer`].
    fn defer(&self, id: RequestId);

    /// The request gets no reply.
    fn discard(&self, id: RequestId);

    /// Sees to it that memory which the program gets back is not used any more.
    fn end(&self, loans: &[Loan]);

    /// Credits that are granted; sets them if some are given.
    fn grants(&self, grant: Option<u32>) -> u32;

    /// A panic of ours has happened while the connection was in use: it is not to be trusted.
    fn is_poisoned(&self) -> bool;
}

impl Link {
    /// Joins a connected device with a fresh engine and posts the Receives.
    pub fn new(
        role: Role,
        config: &Config,
        versions: Versions,
        device: Box<dyn QueuePair>,
        memory: &Arc<Memory>,
    ) -> Link {
        let peer = PrivateData::find(device.private_data()).unwrap_or(PrivateData::ABSENT);
        let limits = device.limits();
        // Where the device holds few Receives, a quarter of them is left to the reverse direction.
        let room = limits.receives.saturating_sub(receive_margin(versions));
        let credits = config.credits.min(room - config.reverse_credits.min(room.div_ceil(4)));
        let (receive, receive_max) = match device.slabs() {
            Some(slabs) => (config.receive_sizes(true).0, slabs.size()),
            None => config.receive_sizes(false),
        };
        let memory = memory.connection(device.slabs(), device.areas());
        let settings = Settings {
            credits,
            receives: limits.receives,
            reverse_chunks: config.reverse_chunks,
            inline: config.inline,
            versions,
            receive,
            receive_max,
            first_xid: sys::random_u32(),
            max_call: config.max_call,
            many_chunks: config.many_chunks,
            remote_invalidation: limits.remote_invalidation && config.remote_invalidation,
        };
        let engine = Connection::new(role, settings, peer, memory.clone(), config::bindings().clone());
        stats::add(Counter::Connections, 1);
        let mut link = Link {
            engine,
            device,
            memory,
            born: Instant::now(),
            first_reply: Duration::ZERO,
            heard: false,
            serves: role == Role::Server,
            talk_max: backlog::TALK,
            done: Vec::new(),
        };
        link.drain();
        link
    }

    /// What the connection runs on and what was agreed, in words for the log.
    fn describe(&self) -> String {
        let device = self.device.describe();
        match (self.engine.version(), self.engine.thresholds()) {
            (None, _) => format!("{device}, RPC-over-RDMA version 2 if the peer speaks it"),
            (Some(_), (send, receive)) => format!("{device}, inline {send} bytes out and {receive} in"),
        }
    }

    /// Why the connection is lost, unless it only has to be made anew to agree on a version.
    fn lost(&self) -> Option<&Error> {
        self.engine.closed().filter(|_| !self.engine.must_fall_back())
    }

    /// As [`Requester::raise_receives`].
    fn raise_receives(&mut self, bytes: u32) -> Result<(), Error> {
        if self.engine.version() == Some(v1::VERSION) {
            let text = "in RPC-over-RDMA version 1 the size of Receives is fixed: set RPCRDMA_INLINE, \
                        or RPCRDMA_VERSION=auto at both ends";
            return Err(Error::new(Kind::Peer, text));
        }
        self.engine.raise_receives(bytes as usize, &mut *self.device)?;
        self.flush();
        Ok(())
    }

    /// The same on a new connection, where it may be out of place.
    fn raise_again(&mut self, bytes: Option<u32>) {
        if let Some(Err(error)) = bytes.map(|bytes| self.raise_receives(bytes)) {
            log_info!("fd {}: Receives keep their size: {error}", self.device.fd());
        }
    }

    /// Why a call has not ended within its time.
    fn why_no_reply(&self, xid: Xid) -> String {
        match (self.engine.version(), self.engine.lacks_room(xid)) {
            (None, _) => {
                "no answer to the offer of RPC-over-RDMA version 2 within the time of the call".to_owned()
            }
            (Some(_), Some(why)) => format!(
                "{why}; make fewer calls at a time, or lower CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY"
            ),
            (Some(_), None) => "no reply within the time of the call".to_owned(),
        }
    }

    /// When an offer of Version Two that is not answered is given up.
    fn offer_ends(&self) -> Option<Instant> {
        self.engine.may_fall_back().then(|| self.born + OFFER_TIMEOUT)
    }

    /// Until when the first reply is waited for though calls that nobody waits for hold the only credit.
    fn first_reply_due(&self) -> Option<Instant> {
        (self.engine.starved() && !self.engine.knows_credits()).then(|| self.born + self.first_reply)
    }

    /// Whether only a new connection brings credits.
    fn starved(&self) -> bool {
        self.engine.starved() && self.first_reply_due().is_none_or(|due| due <= Instant::now())
    }

    /// What the connection that follows this one has for its first reply.
    fn first_reply_of_next(&self) -> Duration {
        match self.engine.knows_credits() {
            true => Duration::ZERO,
            false => (2 * self.first_reply).clamp(FIRST_REPLY, FIRST_REPLY_MAX),
        }
    }

    /// Carries out what the engine wants.
    fn drain(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Receive(bytes) => match self.memory.slab() {
                    Ok(buf) => self.device.post_recv(buf.into_sink(bytes)),
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

    /// When `pump` or `retry` must be called though nothing arrives: something waits for memory that others hold.
    ///
    /// Others let go of it in any thread, in the middle of the program's own procedures: nobody there could wake the thread
    /// that waits here, which may sleep in poll(2) on this connection. This is rare, and a look is cheap.
    fn retry_at(&self) -> Option<Instant> {
        self.engine.waits().then(|| Instant::now() + MEMORY_RETRY)
    }

    /// Goes on with what waits for memory, if there is some now.
    fn retry(&mut self) {
        if self.engine.waits() {
            self.engine.resume(&mut *self.device);
            self.flush();
        }
    }

    /// Moves everything that moves without waiting.
    fn pump(&mut self) {
        self.retry();
        self.drain();
        // What answers no call or makes no request takes no Receive for good, so nothing else bounds its number; and
        // while it comes faster than it is read, this loop would not end.
        let mut left = RECEIVES_SPARE.saturating_add(4 * self.engine.asked().max(self.engine.granting()));
        let mut looked = false;
        while self.engine.closed().is_none() {
            if self.memory.is_flooded() {
                let text =
                    format!("the peer sends replies faster than they are taken: {}", self.memory.crowd());
                self.fail(Error::new(Kind::Peer, text));
                break;
            }
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
                Ok(None) if self.engine.refused() => {
                    // A device that has just taken the last bytes has not looked for an end behind them.
                    if looked {
                        self.engine.handle_quiet(&mut *self.device);
                        self.log_terms();
                    }
                    looked = true;
                }
                Ok(None) => break,
                Err(error) => self.fail(error),
            }
            self.drain();
            if left == 0 {
                self.fail(Error::new(
                    Kind::Protocol,
                    "the peer floods us with messages that belong to no call",
                ));
            }
        }
        self.limit_talk();
        self.pace();
    }

    fn receive(&mut self, message: Buf, invalidated: Option<Handle>) {
        log_wire!("fd {} < {}", self.device.fd(), describe(&message));
        let (version, updates) = (self.engine.version(), self.engine.characteristics().updates());
        self.engine.handle_receive(message, invalidated, &mut *self.device);
        if (self.engine.version(), self.engine.characteristics().updates()) != (version, updates) {
            self.log_terms();
        }
        while !self.serves
            && let Some(request) = self.engine.poll_request()
        {
            self.decline(request);
        }
        // Answers to a peer that talks of itself or calls back without end, and takes none of them.
        self.limit_talk();
    }

    /// What was agreed on, when that has changed.
    fn log_terms(&self) {
        let (send, receive) = self.engine.thresholds();
        let (fd, version) = (self.device.fd(), self.engine.version().unwrap_or_default());
        log_info!("fd {fd}: RPC-over-RDMA version {version}, inline {send} bytes out and {receive} in");
    }

    /// Answers that there is no such program here (RFC 5531 §9: PROG_UNAVAIL).
    fn decline(&mut self, request: Request) {
        let reply = [request.xid.0, 1, 0, 0, 0, 1].map(u32::to_be_bytes).concat();
        let sent = self.memory.message().map_err(Error::from).and_then(|mut message| {
            message.extend(&reply)?;
            self.engine.reply(request.id, message)
        });
        if let Err(error) = sent {
            self.engine.discard(request.id);
            log_info!("fd {}: a call back to no program was not answered: {error}", self.device.fd());
        }
    }

    /// Starts a call, and sends what the device takes.
    fn begin(&mut self, xid: Xid, message: Message, expect: Expect) -> Result<(), Error> {
        self.engine.call(xid, message, expect, &mut *self.device)?;
        if self.engine.credits_left() == 0 && !self.engine.transmitted(xid) {
            stats::add(Counter::CreditsWaited, 1);
        }
        self.flush();
        Ok(())
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
        } else if self.engine.must_fall_back() {
            // That has failed too.
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
        Err(error) => v2::decode(message).map_or_else(|_| error.to_string(), |header| describe_two(&header)),
    }
}

fn describe_two(header: &v2::Header<'_>) -> String {
    if let v2::Body::Optional { kind, info, .. } = header.body
        && let Some(kind) = characteristics::Kind::of(kind)
        && let Ok(operation) = characteristics::decode(kind, info)
    {
        return format!("{header} {operation}");
    }
    header.to_string()
}

/// The versions that the configuration allows.
fn versions(config: &Config) -> Versions {
    match config.version {
        Version::One => Versions::ONE,
        Version::Auto => Versions::BOTH,
        Version::Two => Versions::TWO,
    }
}

/// What a connection over an adapter is made with.
pub fn adapter_options(config: &Config) -> verbs::Options {
    let (receive, slab) = config.receive_sizes(true);
    verbs::Options {
        inline: config.inline,
        receive,
        slab,
        remote_invalidation: config.remote_invalidation,
        credits: config.credits.saturating_add(config.reverse_credits),
        margin: receive_margin(versions(config)),
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
        remote_invalidation: iwarp::REMOTE_INVALIDATION && config.remote_invalidation,
        send_size: config.inline,
        receive_size: config.inline,
    };
    Options { crc, private_data: private_data.encode().to_vec(), ..Options::default() }
}

// -------------------------------------------------------------------------------------------------------- client

/// A requester's connection.
pub struct Client {
    /// The socket that it is known by, and that it runs over unless an adapter does.
    fd: RawFd,
    /// Where it goes.
    to: Option<SocketAddr>,
    /// Changes with the state.
    adapter: AtomicBool,
    room: Room,
    config: &'static Config,
    memory: Arc<Memory>,
    state: Mutex<Waiting>,
    /// For who ends the connection: no callback is being served any more.
    quiet: Condvar,
}

/// The room for replies on a connection over an adapter, where no setting says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Little: the calls of the program that have long replies have bindings, it is to be hoped.
    Little,
    /// As much as over any other device: the program has no bindings.
    Same,
}

impl Room {
    /// Memory for it, which the connection has from its beginning.
    ///
    /// # Errors
    /// `ENOMEM`: so much cannot be locked. Where nothing but adapters may be used, it is less then.
    fn areas(self, config: &Config, most: usize) -> Result<Option<Arc<Areas>>, Error> {
        if self == Room::Little || config.max_reply.is_some() {
            return Ok(None);
        }
        let whole = config.max_reply(false) + REPLY_HEADER;
        if let Some(areas) = Areas::new(whole, most)? {
            return Ok(Some(areas));
        }
        let left = areas::left(most);
        if config.provider == Provider::Verbs {
            let less = left & !4095;
            return if less > config.max_reply(true) { Ok(Areas::new(less, most)?) } else { Ok(None) };
        }
        let text = format!(
            "{whole} bytes for replies cannot be locked, for which {left} are left of {most}: {}",
            verbs::NEEDS_ROOM
        );
        Err(Error::new(Kind::Os(libc::ENOMEM), text))
    }

    /// Bytes that this process may lock for replies: what slabs leave.
    fn most() -> usize {
        sys::lockable().map_or(AREAS_MAX, |bytes| AREAS_MAX.min(bytes - bytes / 2))
    }
}

/// A connection over an adapter that is being made.
pub struct Attempt {
    device: Box<dyn QueuePair>,
    to: SocketAddr,
    room: Room,
    config: &'static Config,
}

impl Attempt {
    /// Whether there is an adapter of a kind that the configuration allows.
    pub fn is_possible(config: &Config) -> bool {
        match config.provider {
            Provider::Auto => verbs::present(false) && !verbs::are_refused(),
            Provider::Verbs => true,
            Provider::Iwarp => false,
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// No adapter leads there. `ENOMEM`: there may be one, but not the room.
    pub fn start(to: SocketAddr, room: Room, config: &'static Config) -> Result<Attempt, Error> {
        let areas = room.areas(config, Room::most())?;
        Ok(Attempt { device: verbs::connect(to, &adapter_options(config), areas)?, to, room, config })
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
        let Attempt { device, to, room, config } = self;
        let memory = memory(config);
        let link = Link::new(Role::Client, config, versions(config), device, &memory);
        Client::with(fd, Some(to), Some(room), config, link)
    }
}

struct Waiting {
    link: Link,
    calls: Calls,
    /// Who polls the socket: one, except as [`Waiting::seat_is_free`] says.
    drivers: Vec<Driver>,
    spin: Spin,
    /// The file behind `fd`: a number that is another file by now is not this connection.
    identity: Option<Identity>,
    /// How often the peer was nudged before its first message.
    nudges: u32,
    /// How often the connection was made.
    connections: u32,
    /// The connection is of no use any more, and will be replaced.
    renewal: Option<Renewal>,
    /// XIDs of calls of procedure 0 that nobody waits for: their replies give credits.
    greetings: Vec<Xid>,
    /// Changes in a forked child.
    generation: u64,
    /// The program serves what the server calls back.
    serving: Option<callback::Serving>,
    /// Who serves a callback now. It may go on when the program serves no more, or has ended that and begun anew.
    server: Option<usize>,
    /// The descriptor is closed, or is about to be.
    shut: bool,
    /// It is to be closed by who serves the callback that `server` says.
    close_later: bool,
    wishes: Wishes,
}

/// What the program has asked for, on the next connection too.
struct Wishes {
    credits: u32,
    reverse_credits: u32,
    reverse_chunks: bool,
    versions: Versions,
    receive_size: Option<u32>,
}

/// A thread that polls the socket.
struct Driver {
    thread: usize,
    /// It will wake when the socket takes bytes.
    writes: bool,
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
        // Now: a peer that resets the connection at once leaves a socket without an address.
        let to = socket::peer(fd);
        let link = Client::start(fd, config, versions(config), deadline, mask)?;
        Ok(Client::with(fd, to, None, config, link))
    }

    fn with(
        fd: RawFd,
        to: Option<SocketAddr>,
        adapter: Option<Room>,
        config: &'static Config,
        link: Link,
    ) -> Arc<Client> {
        let (adapter, room) = (adapter.is_some(), adapter.unwrap_or(Room::Same));
        // That of an adapter knows the memory of its connection.
        let memory = if adapter { memory(config) } else { link.memory.clone() };
        let state = Waiting {
            link,
            calls: Calls::new(),
            drivers: Vec::new(),
            spin: Spin::default(),
            identity: process::identify(fd),
            nudges: 0,
            connections: 1,
            renewal: None,
            greetings: Vec::new(),
            generation: sys::fork_generation(),
            serving: None,
            server: None,
            shut: false,
            close_later: false,
            wishes: Wishes {
                credits: config.credits,
                reverse_credits: config.reverse_credits,
                reverse_chunks: config.reverse_chunks,
                versions: versions(config),
                receive_size: None,
            },
        };
        let adapter = AtomicBool::new(adapter);
        let state = Mutex::new(state);
        Arc::new(Client { fd, to, adapter, room, config, memory, state, quiet: Condvar::new() })
    }

    fn start(
        fd: RawFd,
        config: &Config,
        versions: Versions,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Link, Error> {
        let mut device = Iwarp::initiator(fd, options(config, fd))?;
        if !establish(&mut device, deadline, mask)? {
            return Err(Error::new(Kind::Timeout, "the peer did not answer the MPA Request in time"));
        }
        Ok(Link::new(Role::Client, config, versions, Box::new(device), &memory(config)))
    }

    /// Whether the descriptor is still this connection's socket.
    pub fn alive(&self) -> bool {
        let state = self.lock();
        !state.shut && state.is_own(self.fd)
    }

    /// Ends the connection for good and closes its descriptor, which nothing of ours touches any more: true for the one
    /// caller that does. False too when the number belongs to another file by now.
    ///
    /// A callback that another thread serves is waited for; or, unless this `waits`, the descriptor stays until it has been
    /// served, for the program may look at it until then.
    pub fn shut(&self, waits: bool) -> bool {
        let mut state = self.lock();
        if state.shut || !state.is_own(self.fd) {
            return false;
        }
        state.shut = true;
        let ended = state.serve_no_more();
        let elsewhere = |state: &Waiting| state.server.is_some_and(|thread| thread != sys::this_thread());
        while waits && elsewhere(&state) {
            state = self.quiet.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let why = Error::new(Kind::ConnectionLost, "the CLIENT was destroyed");
        if state.another_reads() || !state.calls.sleepers.is_empty() {
            // Calls that others have just begun: nothing else would wake who sleeps in poll(2).
            state.link.fail(why.clone());
        }
        // Nothing is sent: another process may have the connection. Twice: see `leave_to_others`.
        state.link.engine.handle_closed(why.clone());
        state.link.engine.handle_closed(why.clone());
        state.link.drain();
        state.settle();
        state.identity = None;
        state.calls.requests.end(&why);
        state.attempt_failed(why);
        state.wake_all();
        state.close_later = elsewhere(&state);
        let closes = !state.close_later;
        drop(state);
        // What ends with it needs other locks.
        drop(ended);
        if closes {
            socket::close(self.fd);
        }
        true
    }

    /// What the connection runs on and what was agreed, in words for the log.
    pub fn describe(&self) -> String {
        self.lock().link.describe()
    }

    /// Where it goes, if that is known.
    pub fn to(&self) -> Option<SocketAddr> {
        self.to
    }

    /// How often the connection was made.
    pub fn connections(&self) -> u32 {
        self.lock().connections
    }

    /// Whether calls back may have chunks.
    pub fn set_reverse_chunks(&self, allowed: bool) {
        let mut state = self.lock();
        state.wishes.reverse_chunks = allowed;
        state.link.engine.set_reverse_chunks(allowed);
    }

    /// Waits a while for a version to be agreed on, so that the program's calls need not. A server that is busy answers
    /// later.
    ///
    /// # Errors
    /// There is none that both ends speak, or the connection was lost.
    pub fn agree(&self, mask: Mask<'_>) -> Result<(), Error> {
        let deadline = Instant::now() + AGREE_WAIT;
        let waiter = Waiter::Version(sys::this_thread());
        let mut state = self.lock();
        let mut condition = None;
        let outcome = loop {
            let engine = &state.link.engine;
            match engine.closed() {
                Some(_) if engine.must_fall_back() => match self.connected(state, deadline, mask) {
                    Ok(connected) => state = connected,
                    // The first call waits for the rest.
                    Err(error) if error.kind() == Kind::Timeout => return Ok(()),
                    Err(error) => return Err(error),
                },
                Some(error) if error.kind() == Kind::ConnectionLost && engine.version().is_none() => {
                    let text =
                        format!("{error}, at the offer of RPC-over-RDMA version 2; set RPCRDMA_VERSION=auto");
                    break Err(Error::new(Kind::Peer, text));
                }
                Some(error) => break Err(error.clone()),
                None if engine.version().is_some() || Instant::now() >= deadline => break Ok(()),
                None => state = self.wait_once(state, waiter, &mut condition, deadline, mask),
            }
        };
        state.hand_over();
        outcome
    }

    /// Waits for the end of a call, driving the connection when nobody else does.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        xid: Xid,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error> {
        let waiter = Waiter::Call(xid);
        state = self.wait_for(state, waiter, deadline, mask);
        let outcome = state.calls.outcomes.remove(&xid).unwrap_or_else(|| {
            let Waiting { link, renewal, greetings, .. } = &mut *state;
            if let Some(renewal) = renewal.as_mut()
                && renewal.abandon(xid)
            {
                let text = format!("no new connection within the time of the call: {}", renewal.why());
                return Err(Error::new(Kind::Timeout, text));
            }
            let text = link.why_no_reply(xid);
            link.engine.abandon(xid, &mut *link.device);
            // A peer that did not answer this call keeps the credits of those too.
            for xid in greetings.drain(..) {
                link.engine.abandon(xid, &mut *link.device);
            }
            link.drain();
            state.settle();
            stats::add(Counter::Orphans, 1);
            Err(Error::new(Kind::Timeout, text))
        });
        state.hand_over();
        outcome
    }

    /// Waits until what is waited for is there, or until `deadline`.
    fn wait_for<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        waiter: Waiter,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Waiting> {
        let mut condition = None;
        while !state.calls.is_over(waiter) && Instant::now() < deadline {
            state = self.wait_once(state, waiter, &mut condition, deadline, mask);
        }
        state
    }

    /// One step of waiting: serves a callback, sleeps beside the driver, or drives.
    fn wait_once<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        waiter: Waiter,
        condition: &mut Option<Arc<Condvar>>,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Waiting> {
        if let Some(request) = state.callback() {
            return self.serve_one(state, request, mask);
        }
        if state.seat_is_free() {
            return self.drive(state, waiter, deadline, mask);
        }
        let own = condition.get_or_insert_with(|| Arc::new(Condvar::new())).clone();
        state.calls.sleepers.insert(waiter, own.clone());
        let servant = state.serves_here();
        if servant {
            state.calls.servant = Some(own.clone());
        }
        // Who drives may have gone to sleep before this began.
        let retry = state.link.retry_at();
        let mut state = sleep(&own, state, retry.map_or(deadline, |at| deadline.min(at)));
        // Awake it may serve a callback, whose own calls wait here too: to wake it would wake nobody.
        state.calls.sleepers.remove(&waiter);
        if servant {
            state.calls.servant = None;
        }
        if retry.is_some() {
            state.link.retry();
            state.settle();
        }
        state
    }

    /// Spins, then sleeps once, then moves what has come.
    fn drive<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        waiter: Waiter,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Waiting> {
        let held_up = match waiter {
            Waiter::Call(xid) => !state.link.engine.transmitted(xid),
            Waiter::Peer(_) | Waiter::Version(_) | Waiter::Callbacks(_) => {
                state.link.engine.version().is_none() || state.link.engine.holds_back()
            }
        };
        if held_up {
            self.look(&mut state);
        }
        if state.renewal.is_some() {
            return self.drive_renewal(state, waiter, deadline, mask);
        }
        if state.calls.is_over(waiter) {
            // It came with what was looked at.
            return state;
        }
        state.drivers.push(Driver { thread: sys::this_thread(), writes: false });
        let patience = state.spin.allowed(self.config).and_then(|limit| Patience::new(limit, &state.link));
        if let Some(mut patience) = patience {
            loop {
                state.link.pump();
                state.settle();
                if state.is_over_for(waiter) {
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
        let link = &state.link;
        let until = [link.offer_ends(), link.retry_at(), link.first_reply_due()].into_iter().flatten().min();
        let mut fds = vec![PollFd::new(fd, true, events & sys::OUT != 0)];
        fds.extend(state.alarm_fd().map(|alarm| PollFd::new(alarm, true, false)));
        drop(state);
        let mut left = deadline.saturating_duration_since(Instant::now());
        if nudges {
            left = left.min(NUDGE_AFTER);
        }
        if let Some(until) = until {
            left = left.min(until.saturating_duration_since(Instant::now()));
        }
        // An error of poll(2) itself shows up in the next pump, as an error of the device; EINTR is no error here.
        let came = sys::poll(&mut fds, Some(left), mask);
        let mut state = self.lock();
        if nudges && matches!(came, Ok(0)) && !state.link.heard {
            state.nudges += 1;
            state.link.nudge();
        }
        if fds.len() > 1 && fds[1].readable() {
            state.silence();
        }
        if state.another_reads() {
            // It was woken by the same bytes. Were they taken here, it would find none and sleep on, with its reply there.
            state.link.retry();
            state.link.flush();
        } else {
            state.link.pump();
        }
        state.settle();
        state.stand_up();
        state
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock means that a thread panicked inside: the connection is closed and stays so. Those who sleep
        // are told, since perhaps it was their driver.
        let mut state = self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.link.fail(Error::new(Kind::Panic, "a defect of librpcrdma ended this connection"));
            state.link.drain();
            state.settle();
            state
        });
        if state.generation != sys::fork_generation() {
            state.inherit();
        }
        state
    }
}

impl Requester for Client {
    fn fd(&self) -> RawFd {
        self.fd
    }

    fn adapter(&self) -> bool {
        self.adapter.load(Relaxed)
    }

    fn message(&self) -> Result<Buf, Error> {
        // Over an adapter a new connection brings new memory with it.
        if self.adapter() { Ok(self.lock().link.memory.message()?) } else { Ok(self.memory.message()?) }
    }

    fn fresh_xid(&self) -> Xid {
        let Waiting { calls, link, .. } = &mut *self.lock();
        calls.fresh_xid(&link.engine)
    }

    fn exchange(
        &self,
        xid: Xid,
        message: Message,
        expect: Expect,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error> {
        // Over an adapter nothing else would tell that the program has closed the socket.
        if self.adapter() && !self.alive() {
            return Err(Error::new(Kind::NotSent, "the descriptor was closed"));
        }
        let mut state = self.lock();
        state.take_in();
        self.look(&mut state);
        match &mut state.renewal {
            Some(renewal) => {
                renewal.park(xid, message, expect)?;
                if state.drivers.is_empty() {
                    // However little time this call has, it gets the next one on.
                    self.step(&mut state);
                }
            }
            None => {
                state.make_way(&message, &expect);
                state.link.begin(xid, message, expect)?;
            }
        }
        state.settle();
        self.wait(state, xid, deadline, mask)
    }

    fn standing(&self) -> Standing {
        let mut state = self.lock();
        state.take_in();
        Standing::of(&state.link.engine)
    }

    fn peer(&self, wanted: bool) -> Result<Peer, Error> {
        let mut state = self.lock();
        // Who sleeps until something comes takes it in, and would sleep on were it taken here.
        if wanted && !state.another_reads() {
            state.link.pump();
            state.link.flush();
            state.settle();
            state.rearm();
        }
        Peer::of(&state.link, state.connections as usize)
    }

    fn request(&self, what: Characteristic, deadline: Instant, mask: Mask<'_>) -> Result<Wish, Error> {
        let mut state = self.connected(self.lock(), deadline, mask)?;
        let Waiting { calls, link, .. } = &mut *state;
        let number = calls.requests.begin(link, what)?;
        let waiter = Waiter::Peer(number);
        state.settle();
        state = self.wait_for(state, waiter, deadline, mask);
        let outcome = state.calls.requests.take(number);
        state.hand_over();
        outcome
    }

    fn raise_receives(&self, bytes: u32) -> Result<(), Error> {
        let mut state = self.lock();
        if state.renewal.is_none() {
            state.link.raise_receives(bytes)?;
            state.settle();
        }
        state.wishes.receive_size = Some(bytes);
        Ok(())
    }

    fn end(&self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            let mut state = self.lock();
            state.link.end(loans);
            state.settle();
        }
    }

    fn comes_back(&self, deadline: Instant, _: Mask<'_>) -> Result<bool, Error> {
        // The next call itself makes the connection anew.
        Ok(self.lock().serving.is_some() && Instant::now() < deadline && self.alive())
    }

    fn credits(&self, ask: Option<u32>) -> u32 {
        let mut state = self.lock();
        if let Some(credits) = ask {
            state.wishes.credits = state.link.engine.ask(credits);
            state.link.drain();
        }
        state.link.engine.asked()
    }

    fn max_reply(&self, config: &Config) -> usize {
        let areas = config.max_reply.is_none().then(|| self.lock().link.device.areas()).flatten();
        let room = areas.map(|areas| config.max_reply(false).min(areas.size() - REPLY_HEADER));
        room.unwrap_or_else(|| config.max_reply(self.adapter()))
    }
}

impl Waiting {
    /// Whether this number is still the descriptor of the connection.
    fn is_own(&self, fd: RawFd) -> bool {
        self.identity.is_some() && self.identity == process::identify(fd)
    }

    /// Hands outcomes to their waiters.
    fn settle(&mut self) {
        let Waiting { calls, link, greetings, .. } = self;
        calls.settle(link);
        greetings.retain(|xid| calls.outcomes.remove(xid).is_none());
    }

    /// Takes in what has arrived: replies to orphans give credits back before they are missed.
    fn take_in(&mut self) {
        // Who sleeps until something comes would sleep on, with its reply there.
        if self.link.engine.credits_left() <= 1 && !self.another_reads() {
            self.link.pump();
            self.settle();
        }
    }

    fn is_over_for(&self, waiter: Waiter) -> bool {
        let agreed = matches!(waiter, Waiter::Version(_)) && self.link.engine.version().is_some();
        self.may_serve() || agreed || self.calls.is_over(waiter) || self.link.engine.closed().is_some()
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

    /// Whether another thread sleeps until something comes.
    fn another_reads(&self) -> bool {
        self.drivers.iter().any(|driver| driver.thread != sys::this_thread())
    }

    /// The latest seat of this thread.
    fn own_seat(&self) -> Option<usize> {
        let thread = sys::this_thread();
        self.drivers.iter().rposition(|driver| driver.thread == thread)
    }

    fn stand_up(&mut self) {
        if let Some(driver) = self.own_seat() {
            self.drivers.remove(driver);
        }
    }

    /// Sees to it that what this thread does not do, or waits for no more, is done: somebody else takes the driver's seat
    /// if it is empty, and serves what is left.
    fn hand_over(&self) {
        let serves = self.may_serve();
        if !self.lacks_driver() && !serves {
            return;
        }
        let woken = self.calls.wake_one();
        if serves && !woken {
            // Whoever sleeps in poll(2), or the program's loop.
            self.raise_alarm();
        }
    }
}

/// `call` with this XID.
fn with_xid(mut message: Buf, call: &[u8; 40], xid: Xid) -> Result<Buf, Error> {
    message.extend(call)?;
    message[..4].copy_from_slice(&xid.0.to_be_bytes());
    Ok(message)
}

/// A Call of procedure 0 with the program and version of `call`, AUTH_NONE, XID still to be set (RFC 5531 §9, §12.1).
fn null_call(call: &[u8]) -> [u8; 40] {
    let mut null = [0; 40];
    let same = call.len().min(20);
    null[..same].copy_from_slice(&call[..same]);
    null
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;

    use super::*;
    use crate::config::Version;

    pub(super) const PATIENCE: Duration = Duration::from_secs(10);

    /// A connection whose client gives the kernel little room.
    pub(super) fn pair() -> io::Result<(TcpStream, TcpStream)> {
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
        let mut message = Requester::message(client).unwrap();
        message.extend(&bytes).unwrap();
        message
    }

    fn call(client: &Client, len: usize) -> Result<Vec<Region>, Error> {
        let xid = client.fresh_xid();
        client.call(xid, message(client, xid, len).into(), 1024, Vec::new(), Instant::now() + PATIENCE, None)
    }

    pub(super) fn until(client: &Client, so: impl Fn(&Waiting) -> bool) {
        while !so(&client.lock()) {
            std::thread::yield_now();
        }
    }

    /// The next request, or `None` when none comes for two seconds.
    fn next(server: &Shared) -> Option<Request> {
        loop {
            if let Some(request) = locked(server).receive() {
                return Some(request);
            }
            if !sys::wait(Responder::fd(server), sys::IN, Some(Duration::from_secs(2)), None).unwrap() {
                return None;
            }
        }
    }

    fn answer(server: &Shared, request: Request) {
        let Request { id, message, .. } = request;
        let mut reply = server.message().unwrap();
        reply.extend(&message[0][..40]).unwrap();
        server.reply(id, reply.into()).unwrap();
    }

    #[test]
    fn the_peer_is_told_whether_it_may_invalidate() {
        let (socket, _peer) = pair().unwrap();
        for remote_invalidation in [true, false] {
            let config = Config { remote_invalidation, ..Config::default() };
            let told = PrivateData::find(&options(&config, socket.as_raw_fd()).private_data).unwrap();
            assert_eq!(told.remote_invalidation, remote_invalidation);
            assert_eq!(adapter_options(&config).remote_invalidation, remote_invalidation);
        }
    }

    #[test]
    fn a_program_without_bindings_has_the_same_room_over_an_adapter_or_is_told_what_lacks() {
        let _alone = areas::ALONE.lock().unwrap();
        let config = |provider| Config { provider, ..Config::default() };
        let (auto, only) = (config(Provider::Auto), config(Provider::Verbs));
        let whole = (16 << 20) + REPLY_HEADER;
        let size = |room: Room, config: &Config, most| {
            room.areas(config, most).map(|areas| areas.map(|areas| areas.size()))
        };
        assert_eq!(size(Room::Same, &auto, whole).unwrap(), Some(whole));
        assert_eq!(size(Room::Same, &only, whole).unwrap(), Some(whole));
        assert_eq!(size(Room::Little, &auto, 0).unwrap(), None);
        assert_eq!(
            size(Room::Same, &Config { max_reply: Some(1024), ..config(Provider::Auto) }, 0).unwrap(),
            None
        );
        let error = size(Room::Same, &auto, 4 << 20).unwrap_err();
        assert_eq!(error.kind(), Kind::Os(libc::ENOMEM));
        assert!(
            error
                .text()
                .starts_with("16781312 bytes for replies cannot be locked, for which 4194304 are left")
        );
        // Nothing else is there then.
        assert_eq!(size(Room::Same, &only, (4 << 20) + 5).unwrap(), Some(4 << 20));
        assert_eq!(size(Room::Same, &only, 256 << 10).unwrap(), None);
    }

    #[test]
    fn an_adapter_has_room_for_the_receives_that_a_peer_may_ask_for_and_says_nothing_of_it() {
        let max_inline = Some(16 << 10);
        let config = Config { inline: 1024, version: Version::Auto, max_inline, ..Config::default() };
        let verbs::Options { inline, receive, slab, .. } = adapter_options(&config);
        assert_eq!((inline, receive, slab), (1024, 4096, 16 << 10));
    }

    #[test]
    fn a_call_that_the_socket_does_not_take_at_once_goes_out_while_another_thread_waits_for_its_reply() {
        const CALLERS: usize = 24;
        // Without spinning, a driver that others can see sleeps.
        let config = Config { poll: Duration::ZERO, ..Config::default() };
        let config: &'static Config = Box::leak(Box::new(config));
        let (to_server, to_client) = pair().unwrap();
        let server = Mutex::new(Server::accept(to_client.as_raw_fd(), config).unwrap());
        let shared = OnceLock::new();
        std::thread::scope(|scope| {
            let (opened, open) = mpsc::channel();
            let fd = to_server.as_raw_fd();
            scope.spawn(move || {
                let client = Client::open(fd, config, Instant::now() + PATIENCE, None).unwrap();
                call(&client, 40).unwrap();
                opened.send(client).unwrap();
            });
            let first = next(&server).unwrap();
            answer(&server, first);
            let client: &Arc<Client> = shared.get_or_init(|| open.recv().unwrap());
            // One call is under way, and its caller sleeps: nothing but the end of another call will wake it.
            scope.spawn(move || call(client, 40).unwrap());
            let mut held = vec![next(&server).unwrap()];
            until(client, |state| !state.drivers.is_empty());
            for _ in 0..CALLERS {
                scope.spawn(move || call(client, 3800).unwrap());
            }
            until(client, |state| state.link.engine.credits_left() == config.credits - 1 - CALLERS as u32);
            assert!(client.lock().link.device.unsent() > 0, "the socket has taken all");
            while held.len() < 1 + CALLERS {
                match next(&server) {
                    Some(request) => held.push(request),
                    None => break,
                }
            }
            let came = held.len();
            for request in held {
                answer(&server, request);
            }
            // Whoever was held up is let go, so that a failure does not hang.
            while let Some(request) = next(&server) {
                answer(&server, request);
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
