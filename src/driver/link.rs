//! The joint of an engine and a device: carries out what the engine asks for and feeds it what the device reports.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use smallvec::smallvec;

use crate::config::{self, Config};
use crate::connection::{
    Connection, Expect, Output, Request, Role, Settings, Started, Taken, receive_margin,
};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Memory, Message, Payload, Regions};
use crate::provider::{Completion, QueuePair, WorkRequest};
use crate::stats::layout::Slot;
use crate::stats::{self, Counter, Facts, Figures, Recent};
use crate::wire::characteristics;
use crate::wire::header::{self, Body, Versions};
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Xid, v1};
use crate::{fork, process, socket};
use crate::{log_error, log_info, log_wire};

use super::backlog;
use super::pulls::Place;
use super::timing::Timing;

/// How long a connection that follows one without a reply has for its own first reply, before a call that timed out and holds
/// the only credit has it replaced. Twice as long after each further one: otherwise a server that is slower than the calls'
/// time would see a new connection with each of them.
pub(super) const FIRST_REPLY: Duration = Duration::from_millis(50);

const FIRST_REPLY_MAX: Duration = Duration::from_secs(2);

/// How long a peer has to answer an offer of Version Two. The draft (version-two-01, section 5.2) has a client take a peer
/// that drops the offer for one that speaks Version One only; but a server may also be busy with another request.
const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often what waits for memory tries again.
const MEMORY_RETRY: Duration = Duration::from_millis(20);

/// How often a thread that waits beside the loop checks whether it is its connection's turn.
const TURN_RETRY: Duration = Duration::from_millis(1);

/// Messages of a peer that are taken in one go, beyond several times those that its credits allow.
const RECEIVES_SPARE: u32 = 256;

/// How a call has ended.
pub(super) type Outcome = (Xid, Result<Payload, Error>);

/// An engine and a device.
pub struct Link {
    /// Unique in this process.
    pub(super) serial: u64,
    role: Role,
    pub(super) engine: Connection,
    pub(super) device: Box<dyn QueuePair>,
    pub(super) memory: Arc<Memory>,
    pub(super) born: Instant,
    /// For how long calls that nobody waits for may hold the only credit of a connection without a reply.
    pub(super) first_reply: Duration,
    /// The peer has sent something.
    pub(super) heard: bool,
    /// Somebody takes the requests up. Otherwise they are declined here, because the program is not served.
    pub(super) serves: bool,
    /// It does not read on before a request is handed out: many are waiting, and there is little memory.
    pub(super) paused: bool,
    /// Sending has failed, and what had come before is read.
    reads_out: bool,
    /// If more bytes than this are unsent, the peer is taken to talk without reading.
    pub(super) talk_max: usize,
    /// Where its long Calls wait for their turn to be pulled: at the end that serves them in the program's loop.
    pub(super) place: Option<Place>,
    /// Calls that ended, for whoever collects them.
    pub(super) done: Vec<Outcome>,
    /// What others may see of it.
    pub(super) shown: stats::Connection,
    /// Whether the program's settings allow that.
    watchable: bool,
    /// The descriptor that the program knows it by, and the other end.
    known_as: (RawFd, Option<SocketAddr>),
    /// When requests were handed up: nothing is noted in a process that nobody can watch.
    pub(super) timing: Timing,
    /// Where the last request was counted.
    pub(super) recent: Recent,
}

/// What a connection runs on and what was agreed, for the command `rpcrdma`.
#[cfg(feature = "tool")]
#[derive(Clone, Debug)]
pub struct Agreed {
    /// The configuration's word for the device.
    pub name: &'static str,
    /// How the device describes itself.
    pub device: String,
    /// As in the log, including the device.
    pub text: String,
    /// The version of RPC-over-RDMA; `None` before it is agreed.
    pub version: Option<u32>,
    /// Most bytes of one Send: of one of ours, and of one of the peer's.
    pub inline: (usize, usize),
    /// Credits that are requested, and that the peer has granted by its last reply (1 before the first).
    pub credits: (u32, u32),
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
            inline: config.inline(device.traits().locked_memory),
            versions,
            receive,
            receive_max,
            first_xid: process::random_u32(),
            max_call: config.max_call,
            many_chunks: config.many_chunks,
            remote_invalidation: limits.remote_invalidation && config.remote_invalidation,
        };
        let engine = Connection::new(role, settings, peer, memory.clone(), config::bindings().clone());
        stats::add(Counter::Connections, 1);
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let mut link = Link {
            serial: SERIAL.fetch_add(1, Relaxed),
            role,
            engine,
            device,
            memory,
            born: Instant::now(),
            first_reply: Duration::ZERO,
            heard: false,
            serves: role == Role::Server,
            paused: false,
            reads_out: false,
            talk_max: backlog::TALK,
            place: None,
            done: Vec::new(),
            shown: stats::Connection::default(),
            watchable: config.stats,
            known_as: (-1, None),
            timing: Timing::default(),
            recent: Recent::default(),
        };
        link.drain();
        link
    }

    /// Sets what the program knows the connection by, and where it leads: from here on others may see the connection.
    pub(super) fn known_as(&mut self, fd: RawFd, peer: Option<SocketAddr>) {
        self.known_as = (fd, peer);
        self.show();
    }

    /// Makes sure that others may see it, also when a forked child goes on with it.
    #[inline]
    fn show_again(&mut self) {
        if self.shown.is_stale() {
            self.show();
        }
    }

    #[cold]
    fn show(&mut self) {
        // Before there is a page: the fork handler gives a child a page of its own.
        fork::generation();
        if self.watchable {
            stats::begin();
        }
        let (fd, peer) = self.known_as;
        self.shown.show(|| Facts {
            accepted: self.role == Role::Server,
            fd,
            device: self.device.describe(),
            peer,
            local: socket::local(fd).filter(|local| !local.ip().is_unspecified()),
        });
        self.show_terms();
        self.show_figures();
    }

    /// Shows what has changed with a message.
    #[inline]
    fn show_figures(&self) {
        let engine = &self.engine;
        self.shown.set(Figures {
            granted: engine.granted(),
            in_flight: engine.in_flight(),
            open: engine.working(),
            placed: engine.placed(),
        });
    }

    /// As [`Connection::ask`].
    pub(super) fn ask(&mut self, credits: u32) -> u32 {
        let credits = self.engine.ask(credits, &mut *self.device);
        self.show_terms();
        credits
    }

    /// As [`Connection::grant`].
    pub(super) fn grant(&mut self, credits: u32) -> u32 {
        let credits = self.engine.grant(credits);
        self.show_terms();
        credits
    }

    /// Shows what was agreed on, asked for and granted.
    fn show_terms(&self) {
        self.shown.put(Slot::Version, self.engine.version().unwrap_or(0).into());
        self.shown.put(Slot::Asked, self.engine.asked().into());
        self.shown.put(Slot::Granting, self.engine.granting().into());
    }

    /// A request is handed up, `now` by [`stats::clock`].
    #[inline]
    pub(super) fn handed_up(&mut self, request: &Request, now: u64) {
        self.show_again();
        self.shown.add(Slot::Served, 1);
        if stats::is_watched() {
            self.timing.handed_up(request, now);
        }
    }

    /// A request has got its reply, or will get none.
    #[inline]
    pub(super) fn answered(&self) {
        self.shown.put(Slot::Open, self.engine.working() as u64);
    }

    /// What the connection runs on and what was agreed, in words for the log.
    pub(super) fn describe(&self) -> String {
        let device = self.device.describe();
        match (self.engine.version(), self.engine.thresholds()) {
            (None, _) => format!("{device}, RPC-over-RDMA version 2 if the peer speaks it"),
            (Some(_), (send, receive)) => format!("{device}, inline {send} bytes out and {receive} in"),
        }
    }

    /// The same, for programs.
    #[cfg(feature = "tool")]
    pub(super) fn agreed(&self) -> Agreed {
        Agreed {
            name: self.device.traits().name,
            device: self.device.describe(),
            text: self.describe(),
            version: self.engine.version(),
            inline: self.engine.thresholds(),
            credits: (self.engine.asked(), self.engine.granted()),
        }
    }

    /// Why the connection is lost, unless it only has to be re-established to agree on a version.
    pub(super) fn lost(&self) -> Option<&Error> {
        self.engine.closed().filter(|_| !self.engine.must_fall_back())
    }

    /// As [`Caller::raise_receives`].
    pub(super) fn raise_receives(&mut self, bytes: u32) -> Result<(), Error> {
        if self.engine.version() == Some(v1::VERSION) {
            let text = "in RPC-over-RDMA version 1 the size of Receives is fixed: set RPCRDMA_INLINE, \
                        or RPCRDMA_VERSION=auto at both ends";
            return Err(Error::new(Kind::Peer, text));
        }
        self.engine.raise_receives(bytes as usize, &mut *self.device)?;
        self.flush();
        Ok(())
    }

    /// The same on a new connection, where it may not be possible.
    pub(super) fn raise_again(&mut self, bytes: Option<u32>) {
        if let Some(Err(error)) = bytes.map(|bytes| self.raise_receives(bytes)) {
            log_info!("fd {}: Receives keep their size: {error}", self.device.fd());
        }
    }

    /// Why a call has not ended within its time.
    pub(super) fn why_no_reply(&self, xid: Xid) -> String {
        let text = match (self.role, self.engine.version(), self.engine.lacks_room(xid)) {
            (Role::Client, None, _) => {
                "no answer to the offer of RPC-over-RDMA version 2 within the time of the call"
            }
            (_, _, Some(why)) => {
                return format!(
                    "{why}; make fewer calls at a time, or lower CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY"
                );
            }
            (Role::Client, Some(_), None) => "no reply within the time of the call",
            (Role::Server, _, None) => "no reply to the call back within its time",
        };
        text.to_owned()
    }

    /// Nobody waits for the call any more.
    pub(super) fn abandon(&mut self, xid: Xid) {
        self.engine.abandon(xid, &mut *self.device);
        self.drain();
    }

    /// When an offer of Version Two that gets no answer is given up.
    pub(super) fn offer_ends(&self) -> Option<Instant> {
        self.engine.may_fall_back().then(|| self.born + OFFER_TIMEOUT)
    }

    /// Until when the first reply is waited for, though calls that nobody waits for hold the only credit.
    pub(super) fn first_reply_due(&self) -> Option<Instant> {
        (self.engine.starved() && !self.engine.knows_credits()).then(|| self.born + self.first_reply)
    }

    /// Whether only a new connection can bring credits.
    pub(super) fn starved(&self) -> bool {
        self.engine.starved() && self.first_reply_due().is_none_or(|due| due <= Instant::now())
    }

    /// How long the connection that follows this one will have for its first reply.
    pub(super) fn first_reply_of_next(&self) -> Duration {
        match self.engine.knows_credits() {
            true => Duration::ZERO,
            false => (2 * self.first_reply).clamp(FIRST_REPLY, FIRST_REPLY_MAX),
        }
    }

    /// Carries out what the engine wants: mostly nothing, though anything that happens may give it something.
    #[inline]
    pub(super) fn drain(&mut self) {
        if self.engine.has_output() {
            self.carry_out();
        }
        if self.engine.asks() > 0 || self.awaits_turn() {
            self.take_turn();
        }
    }

    /// Whether a long Call waits for its turn to be pulled.
    #[inline]
    pub(super) fn awaits_turn(&self) -> bool {
        self.place.as_ref().is_some_and(Place::is_taken)
    }

    /// From now on, long Calls are pulled only when it is their turn.
    pub(super) fn pull_in_turn(&mut self, place: Place) {
        self.place = Some(place);
        self.engine.pull_in_turn();
    }

    #[cold]
    fn take_turn(&mut self) {
        // The bytes of a Call come to the process that receives.
        let Some(place) = self.place.as_mut().filter(|_| self.device.is_receiver()) else { return };
        // What came earlier is no answer to what is asked for now.
        place.has_brought(self.device.pulled(), stats::clock());
        loop {
            let bytes = self.engine.asks();
            if bytes == 0 {
                place.leave();
                break;
            }
            let Some(pass) = place.ask(bytes, stats::clock()) else { break };
            self.engine.pull(pass);
        }
        // Also where one Call may be pulled now, and another one behind it goes on waiting.
        self.carry_out();
    }

    #[inline(never)]
    fn carry_out(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Receive(bytes) => {
                    if let Err(error) = self.device.post_recv_of(&self.memory, bytes) {
                        self.fail(error);
                    }
                }
                Output::Post(request) => {
                    note(&request, self.device.fd(), &self.shown);
                    self.device.post(request);
                }
                Output::Done { xid, outcome } => {
                    if outcome.is_err() {
                        self.shown.add(Slot::Errors, 1);
                    }
                    self.done.push((xid, outcome));
                }
                Output::Close(error) => self.fail(error),
            }
        }
    }

    /// When `pump` or `retry` must be called, or this be asked again, though nothing arrives: something waits for memory that
    /// others hold, or the peer may overlook what it was sent.
    ///
    /// The others let go of memory in any thread, in the middle of the program's own procedures: nobody there could wake the
    /// thread that waits here, which may sleep in poll(2) on this connection. This is rare, and a look is cheap.
    pub(super) fn retry_at(&mut self) -> Option<Instant> {
        let memory = self.engine.waits().then(|| Instant::now() + MEMORY_RETRY);
        let turn = self.awaits_turn().then(|| Instant::now() + TURN_RETRY);
        sooner(sooner(memory, turn), self.device.remind())
    }

    /// Goes on with what waits for memory, if there is some now.
    pub(super) fn retry(&mut self) {
        if self.engine.waits() {
            self.engine.resume(&mut *self.device);
            self.flush();
        } else if self.awaits_turn() {
            self.flush();
        }
    }

    /// Moves everything that can move without waiting. A server with requests to hand out reads no more of them while memory
    /// is short, unless the program waits for something that comes behind them.
    pub(super) fn pump(&mut self) {
        self.advance(true);
    }

    /// The same, but without a pause, where nobody takes the requests: the peer may read only when it has written everything.
    pub(super) fn pump_on(&mut self) {
        self.advance(false);
    }

    fn advance(&mut self, pauses: bool) {
        // Nothing is sent any more where only what had come is read.
        if !self.reads_out {
            self.retry();
        }
        self.drain();
        // A message that neither answers a call nor makes a request takes no Receive for good, so nothing else bounds the
        // number of these; and while they come faster than they are read, this loop would not end.
        let mut left = RECEIVES_SPARE.saturating_add(4 * self.engine.asked().max(self.engine.granting()));
        let mut looked = false;
        while self.engine.closed().is_none() {
            if self.memory.is_flooded() {
                let text =
                    format!("the peer sends messages faster than they are taken: {}", self.memory.flood());
                self.fail(Error::new(Kind::Peer, text));
                break;
            }
            if pauses
                && self.role == Role::Server
                && self.memory.is_full()
                && self.request_ready()
                && !self.engine.is_awaiting()
            {
                self.paused = true;
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
                Ok(Some(Completion::Read { id })) => {
                    log_wire!("fd {} < RDMA Read Response", self.device.fd());
                    self.engine.handle_read(id);
                }
                Ok(None) if self.engine.refused() => {
                    // A device that has just taken the last bytes has not yet looked for the end of the stream behind them.
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
            if self.device.drained() && !self.engine.refused() {
                break;
            }
        }
        self.limit_talk();
        self.pace();
    }

    fn receive(&mut self, message: Buf, invalidated: Option<Handle>) {
        log_wire!("fd {} < {}{}", self.device.fd(), describe(&message), Invalidates(invalidated));
        let mut message = message.freeze();
        // A request that nobody takes up is declined below.
        if self.serves || self.role == Role::Client {
            match self.engine.take_plain(message, invalidated, &mut *self.device) {
                Taken::Call => return self.show_figures(),
                Taken::Reply { xid, reply, receive } => {
                    if let Err(error) = self.device.post_recv_of(&self.memory, receive) {
                        self.fail(error);
                    }
                    self.done.push((xid, Ok(Payload { pieces: smallvec![reply], rest: None })));
                    return self.show_figures();
                }
                Taken::Not(back) => message = back,
            }
        }
        let (version, updates) = (self.engine.version(), self.engine.characteristics().updates());
        self.engine.handle_message(message, invalidated, &mut *self.device);
        self.show_figures();
        if (self.engine.version(), self.engine.characteristics().updates()) != (version, updates) {
            self.show_terms();
            self.log_terms();
        }
        while !self.serves
            && let Some(request) = self.engine.poll_request()
        {
            self.decline(request);
        }
        // Bounds the answers to a peer that talks of itself or calls back without end, and takes none of them.
        self.limit_talk();
    }

    /// Logs what was agreed on, when that has changed.
    fn log_terms(&self) {
        let (send, receive) = self.engine.thresholds();
        let (fd, version) = (self.device.fd(), self.engine.version().unwrap_or_default());
        log_info!("fd {fd}: RPC-over-RDMA version {version}, inline {send} bytes out and {receive} in");
    }

    /// Answers that there is no such program here (RFC 5531 §9: PROG_UNAVAIL).
    pub(super) fn decline(&mut self, request: Request) {
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
    pub(super) fn begin(&mut self, xid: Xid, message: Message, expect: Expect) -> Result<(), Error> {
        self.show_again();
        // All that are under way may end at once.
        self.done
            .try_reserve(self.engine.calls() + 1)
            .map_err(|_| Error::new(Kind::Os(libc::ENOMEM), "no memory for one more call"))?;
        match self.engine.start(xid, message, &expect, &mut *self.device) {
            Started::Sent(gather) => self.send(gather, None),
            Started::Failed => {}
            Started::Not(message) => self.engine.call(xid, message, expect, &mut *self.device)?,
        }
        self.shown.add(Slot::Calls, 1);
        if self.engine.credits_left() == 0 && !self.engine.transmitted(xid) {
            stats::add(Counter::CreditsWaited, 1);
            self.shown.add(Slot::Waited, 1);
        }
        self.shown.put(Slot::InFlight, self.engine.in_flight().into());
        self.flush();
        Ok(())
    }

    /// Posts a Send, which may invalidate a handle of the peer.
    pub(super) fn send(&mut self, gather: Regions, invalidate: Option<Handle>) {
        let send = WorkRequest::Send { gather, invalidate };
        note(&send, self.device.fd(), &self.shown);
        self.device.post(send);
    }

    pub(super) fn nudge(&mut self) {
        if self.engine.closed().is_none() {
            self.device.nudge();
        }
    }

    /// Sends what the device takes. Returns true when nothing is left to send.
    pub(super) fn flush(&mut self) -> bool {
        self.drain();
        if self.engine.closed().is_some() {
            return true;
        }
        match self.device.flush() {
            Ok(all) => all,
            Err(error) => {
                // The client takes nothing more, but what it has sent before that counts: if it has given the connection up, it may
                // have made calls on it to which it wants no reply.
                let reads = self.role == Role::Server && self.device.is_receiver();
                if reads && !std::mem::replace(&mut self.reads_out, true) {
                    self.pump_on();
                }
                self.fail(error);
                self.drain();
                true
            }
        }
    }

    /// Closes the connection if it still uses memory that now goes back to the program: a defect, but no corruption.
    pub(super) fn end(&mut self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            let text = "a defect of librpcrdma: memory of the program was in use after its time";
            log_error!("fd {}: {text}", self.device.fd());
            self.fail(Error::new(Kind::Panic, text));
            self.drain();
        }
    }

    pub(super) fn fail(&mut self, error: Error) {
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

/// The earlier of two times, if there are any.
pub(super) fn sooner(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn note(request: &WorkRequest, fd: RawFd, shown: &stats::Connection) {
    match request {
        WorkRequest::Send { gather, invalidate } => {
            stats::add(Counter::Sends, 1);
            let bytes: usize = gather.iter().map(|r| r.len()).sum();
            stats::add(Counter::BytesInline, bytes as u64);
            shown.add(Slot::BytesInline, bytes as u64);
            log_wire!(
                "fd {fd} > {}{}",
                {
                    let message: Vec<u8> = gather.iter().flat_map(|region| region.iter().copied()).collect();
                    describe(&message)
                },
                Invalidates(*invalidate)
            );
        }
        WorkRequest::Write { to, .. } => {
            stats::add(Counter::BytesWritten, u64::from(to.length));
            shown.add(Slot::BytesWritten, u64::from(to.length));
            log_wire!("fd {fd} > RDMA Write {to}");
        }
        WorkRequest::Read { from, .. } => {
            stats::add(Counter::BytesRead, u64::from(from.length));
            shown.add(Slot::BytesRead, u64::from(from.length));
            log_wire!("fd {fd} > RDMA Read {from}");
        }
    }
}

/// What a Send with Invalidate adds to its line in the log.
struct Invalidates(Option<Handle>);

impl fmt::Display for Invalidates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |handle| write!(f, " invalidates {:#010x}", handle.0))
    }
}

fn describe(message: &[u8]) -> String {
    let header = match header::decode(message, Versions::BOTH) {
        Ok(header) => header,
        Err(error) => return error.to_string(),
    };
    if let Body::Optional { kind, info, .. } = header.body
        && let Some(kind) = characteristics::Kind::of(kind)
        && let Ok(operation) = characteristics::decode(kind, info)
    {
        return format!("{header} {operation}");
    }
    header.to_string()
}
