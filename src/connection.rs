//! The RPC-over-RDMA engine of one connection: pure state, no clock, no socket, no raw pointer.
//!
//! # Contract
//! - Getters tell state: [`Connection::credits_left`], [`Connection::starved`], [`Connection::request_ready`].
//! - Input: `take_plain` and `handle_message`, `handle_read`, `handle_quiet`, `handle_closed`.
//! - Commands: `call`, `abandon`, `ask` (requester); `poll_request`, `reply`, `defer`, `discard`, `pull`, `hold`,
//!   `grant` (responder); `resume` (either, while [`Connection::waits`]); `request`, `raise_receives` (either, in Version Two).
//! - Output: `poll_output`. **Every input and command is followed by draining `poll_output` until `None`.**
//!
//! Memory is exposed and invalidated while a command runs, through the [`Registrar`] argument: a plan needs the
//! handles. Everything else a device must do comes out as [`Output::Post`], in the order in which it must be posted.
//!
//! # Both directions
//! Either end is both requester and responder (RFC 8167): the client of the forward direction, which opened the connection, is
//! the responder of the reverse direction. The two directions share nothing but the Receives: each has XIDs, calls and credits of
//! its own, and the RPC message inside tells which direction a message belongs to. A server makes no call before `ask`, and a
//! client has no Receives for calls before `grant`: no end calls back without being told that it may.
//!
//! # Both versions
//! A call is answered in the version that it came in. The version of our own calls is agreed on first: `two`. Messages of both
//! versions are decoded into one type, [`Header`].
//!
//! # Rules
//! - Credits (RFC 8166 §3.3.1): one before the first reply, then the grant. A call holds its credit until its reply or an error;
//!   a one-way call, which has neither, until the reply to a later call shows that the responder is past it. A responder that
//!   serves several requests at a time may still be pulling the chunks of the one-way call then, so they stay exposed for a
//!   while.
//! - A timed-out call becomes an orphan: the responder may still be at work on it, so its credit and its exposures stay. A late
//!   RDMA operation finds live handles and the connection survives; the memory behind them is released where the device can do
//!   that. When only such calls are under way, [`Connection::starved`] says so.
//! - The `binding` of a procedure tells which items of its messages are eligible for chunks of their own. What a peer does with
//!   nonstandard bindings is learned from its replies.
//! - Once [`Output::Close`] is out, only [`Output::Done`] follows.
//! - Requests are handed up in the order of their Sends, each only when all its Reads are done.
//!
//! `requester` and `responder` hold the two halves, `common` what both work with, `window` the credits of both directions, `life`
//! the stages from the agreement on a version to the end, `chunks` the plan of a message.
//!
//! Read RFC 8166 §3.3 and §4.5 first.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::binding::Registry;
use crate::error::{Error, Kind};
use crate::log_wire;
#[cfg(any(test, feature = "fuzz"))]
use crate::memory::Buf;
use crate::memory::shared::Shown;
use crate::memory::{Memory, Message, Pass, Payload, Region, Regions, Sink};
use crate::provider::{QueuePair, WorkId, WorkRequest};
use crate::wire::characteristics::Backward;
use crate::wire::header::{self, Body, Direction, Header, Versions};
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Segment, Xid, v1, v2};

pub mod characteristics;
pub mod chunks;
mod common;
mod life;
mod requester;
mod responder;
mod two;
mod window;

use characteristics::{Characteristics, Endpoint, Note};
use common::{Common, VersionOne};
use life::Life;
use requester::Requester;
use responder::Responder;
pub use responder::{Fate, Request, RequestId};
use window::Window;

/// Which end of the connection we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// We opened the connection: requester, and responder of the reverse direction.
    Client,
    /// We accepted it: responder, and requester of the reverse direction.
    Server,
}

/// What is fixed for the life of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Credits of the forward direction: asked for by a client, granted by a server. At least 1.
    pub credits: u32,
    /// Most Receives that the device holds, [`RECEIVE_MARGIN`] included.
    pub receives: u32,
    /// Calls and replies of the reverse direction may have chunks.
    pub reverse_chunks: bool,
    /// Largest Send that we take and make in Version One, in bytes: 1024..=262144.
    pub inline: usize,
    /// Versions that we speak.
    pub versions: Versions,
    /// Bytes of the first Receives: at least `inline`, and [`v2::INLINE_DEFAULT`] where Version Two is spoken.
    pub receive: usize,
    /// Largest Receives that a peer may ask for, in bytes.
    pub receive_max: usize,
    /// Where the XIDs of messages without an RPC message begin: anywhere.
    pub first_xid: u32,
    /// Largest Call that we pull from a requester, in bytes, and most bytes of pulled Calls that wait to be handed up.
    pub max_call: usize,
    /// Calls may have more chunks than RFC 8267 §4.3 asks a server to accept. See [`chunks::Limits::many`].
    pub many_chunks: bool,
    /// The peer may invalidate every handle of ours, as we have told it (RFC 8797 §4.1, XCHAR_RQREMINV).
    pub remote_invalidation: bool,
}

/// Most bytes of an RPC reply before its results: six words, and a verifier of at most 400 bytes (RFC 5531 §9).
pub const RPC_HEADER_MAX: usize = 24 + 400 + 4;

/// The part of [`QueuePair`] that the engine calls itself, to expose memory while it plans a message.
pub trait Registrar {
    /// See [`QueuePair::expose_source`].
    ///
    /// # Errors
    /// The same as there.
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error>;
    /// See [`QueuePair::expose_sink`].
    ///
    /// # Errors
    /// The same as there.
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error>;
    /// See [`QueuePair::invalidate`].
    ///
    /// # Errors
    /// The same as there.
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error>;
    /// See [`QueuePair::detach`].
    ///
    /// # Errors
    /// The same as there.
    fn detach(&mut self, handle: Handle) -> Result<(), Error>;
    /// See [`QueuePair::was_read`].
    fn was_read(&self, handle: Handle) -> Option<bool>;
    /// See [`QueuePair::withdraw`].
    fn withdraw(&mut self) -> usize;
    /// Most bytes of one segment.
    fn max_segment(&self) -> usize;
    /// Reads that the peer serves at a time; 0 for none.
    fn read_depth(&self) -> u32;
    /// See [`QueuePair::shown`].
    fn shown(&mut self, _segment: Segment) -> Option<Shown> {
        None
    }
    /// See [`QueuePair::show`].
    fn show(&mut self, _address: usize, _handle: Handle) -> Option<u64> {
        None
    }
    /// See [`QueuePair::keep`].
    fn keep(&mut self, _region: Region, _handle: Handle) {}
}

impl<T: QueuePair + ?Sized> Registrar for T {
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        QueuePair::expose_source(self, region)
    }
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        QueuePair::expose_sink(self, sink)
    }
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        log_wire!("fd {}: invalidated {:#010x}", self.fd(), handle.0);
        QueuePair::invalidate(self, handle)
    }
    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        QueuePair::detach(self, handle)
    }
    fn was_read(&self, handle: Handle) -> Option<bool> {
        QueuePair::was_read(self, handle)
    }
    fn withdraw(&mut self) -> usize {
        QueuePair::withdraw(self)
    }
    fn max_segment(&self) -> usize {
        self.limits().max_segment as usize
    }
    fn read_depth(&self) -> u32 {
        self.limits().read_depth
    }
    fn shown(&mut self, segment: Segment) -> Option<Shown> {
        QueuePair::shown(self, segment)
    }
    fn show(&mut self, address: usize, handle: Handle) -> Option<u64> {
        QueuePair::show(self, address, handle)
    }
    fn keep(&mut self, region: Region, handle: Handle) {
        QueuePair::keep(self, region, handle);
    }
}

/// What the driver must do or report.
#[derive(Debug)]
pub enum Output {
    /// Post one more Receive of this many bytes.
    Receive(usize),
    /// Post this.
    Post(WorkRequest),
    /// A call has ended. For a one-way call: it was sent, and the message is empty.
    Done {
        /// The call.
        xid: Xid,
        /// The RPC reply in stream order, from its XID on; or why there is none.
        outcome: Result<Payload, Error>,
    },
    /// The connection cannot go on: close it.
    Close(Error),
}

/// What the caller of [`Connection::call`] wants back.
#[derive(Debug)]
pub enum Expect {
    /// A reply.
    Reply {
        /// Its maximum length in bytes, from the XID on, where no binding gives a more exact bound.
        max: usize,
        /// Memory for eligible results, in their order. A place that is too short is not used.
        places: Vec<Sink>,
    },
    /// Nothing: done when it is sent (batching).
    Nothing,
}

/// What [`Connection::start`] has made of a call.
pub enum Started {
    /// It is under way: this is the Send to be posted.
    Sent(Regions),
    /// It has ended, as the output says.
    Failed,
    /// Nothing: pass it to [`Connection::call`].
    Not(Message),
}

/// What [`Connection::answer`] has made of a reply.
pub enum Answered {
    /// It is answered: post a Receive of `receive` bytes, then this Send, which invalidates that handle of the peer, if any.
    #[allow(missing_docs)]
    Sent { gather: Regions, receive: usize, invalidate: Option<Handle> },
    /// It cannot be answered, as the output says too.
    Failed(Error),
    /// Nothing: pass it to [`Connection::reply`].
    Not(Message),
}

/// What [`Connection::take_plain`] has made of a message.
#[derive(Debug)]
pub enum Taken {
    /// A request is ready.
    Call,
    /// A call has ended: with the RPC reply, from its XID on. Post a Receive of `receive` bytes.
    #[allow(missing_docs)]
    Reply { xid: Xid, reply: Region, receive: usize },
    /// Nothing: pass it to [`Connection::handle_message`].
    Not(Region),
}

/// See the module's documentation.
pub struct Connection {
    common: Common,
    requester: Requester,
    responder: Responder,
    /// XID of the latest message without an RPC message.
    next_xid: u32,
}

/// Receives beyond the credits: for stray messages, such as the reply to a one-way call whose credit was given back.
pub const RECEIVE_MARGIN: u32 = 8;

/// Further Receives for Version Two, whose extension messages no credit counts. From the peer: one without a reply and a
/// REQ_XCHAR; in answer to a REQ_XCHAR of ours, the RESP_XCHAR and an UPD_XCHAR for each characteristic; an error.
const OPTIONAL_MARGIN: u32 = 8;

/// Receives beyond the credits.
pub fn receive_margin(versions: Versions) -> u32 {
    RECEIVE_MARGIN + if versions.include(v2::VERSION) { OPTIONAL_MARGIN } else { 0 }
}

impl Connection {
    /// The engine of an established connection. Drain `poll_output` at once: it posts the Receives.
    pub fn new(
        role: Role,
        settings: Settings,
        peer: PrivateData,
        memory: Arc<Memory>,
        bindings: Arc<Registry>,
    ) -> Connection {
        let one = VersionOne::new(&settings, &peer);
        // The draft of Version Two, section 2.3: every receiver takes 4096 bytes, and more if it has said so by other means.
        let two = |one: usize, backward| Endpoint {
            receive_size: one.max(v2::INLINE_DEFAULT),
            remote_invalidation: false,
            backward,
        };
        let characteristics = Characteristics::new(
            Endpoint {
                remote_invalidation: settings.remote_invalidation,
                ..two(one.receive, Backward::None)
            },
            two(one.send, Backward::SizeLimited),
            settings.receive.max(settings.inline),
            settings.receive_max,
        );
        let two_is_possible = settings.versions.include(v2::VERSION);
        let capacity = settings.receives.saturating_sub(receive_margin(settings.versions));
        let mut connection = Connection {
            common: Common {
                role,
                memory,
                bindings,
                life: Life::new((!two_is_possible).then_some(v1::VERSION)),
                one,
                characteristics,
                window: Window::new(role, settings.credits, capacity),
                output: VecDeque::new(),
                scratch: Cell::default(),
                settings,
            },
            requester: Requester::default(),
            responder: Responder::new(),
            next_xid: settings.first_xid,
        };
        connection.update_backward();
        connection.responder.replenish(&mut connection.common);
        if two_is_possible && role == Role::Client {
            // The draft of Version Two, section 5: the first message has at most 1024 bytes, and is the only one until it is
            // answered. An INIT_XCHAR has no reply, but serves the purpose: a peer that knows it answers with its own, and any
            // other refuses it in a way that tells which versions it speaks.
            let xid = connection.fresh_xid();
            connection.send_note(Note::Init, xid);
        }
        connection
    }

    /// Asks for `credits` credits with every call from now on. Returns how many it will be: the device's Receives bound both
    /// directions together, and each direction leaves one to the other. A server makes calls from its first `ask` on.
    pub fn ask(&mut self, credits: u32, registrar: &mut (impl Registrar + ?Sized)) -> u32 {
        let credits = self.common.window.ask(credits);
        self.responder.replenish(&mut self.common);
        // There may be no later event that would transmit the calls that wait for a credit.
        self.requester.transmit_waiting(&mut self.common, registrar);
        credits
    }

    /// Grants `credits` credits with every reply from now on. Returns how many, as `ask` does. A client serves from its first
    /// `grant` on.
    pub fn grant(&mut self, credits: u32) -> u32 {
        let credits = self.common.window.grant(credits);
        // RFC 8166 §3.3.1: "The Responder MUST ensure that an increase in receive resources is effected before the next
        // RPC Reply message is sent."
        self.responder.replenish(&mut self.common);
        self.update_backward();
        credits
    }

    /// Whether messages of the reverse direction may have chunks.
    pub fn set_reverse_chunks(&mut self, allowed: bool) {
        self.common.settings.reverse_chunks = allowed;
        self.update_backward();
    }

    /// Whether there is something to do.
    #[inline]
    pub fn has_output(&self) -> bool {
        !self.common.output.is_empty()
    }

    /// The next thing to do. See the contract.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.common.output.pop_front()
    }

    /// Inline thresholds in bytes: of our Sends and of the peer's. Until a version is agreed, those of the first message.
    pub fn thresholds(&self) -> (usize, usize) {
        self.common.thresholds()
    }

    /// The version that our calls are made in; `None` before it is agreed.
    pub fn version(&self) -> Option<u32> {
        self.common.version()
    }

    /// What the peer is like: as it has said itself, or as Version One tells.
    pub fn peer(&self) -> Endpoint {
        self.common.peer()
    }

    /// Largest RPC messages that can be sent and received without chunks, in bytes.
    pub fn largest_short(&self) -> (usize, usize) {
        let (send, receive) = self.thresholds();
        let header = chunks::header_min(self.version().unwrap_or(v2::VERSION));
        (send.saturating_sub(header), receive.saturating_sub(header))
    }

    // ------------------------------------------------------------------------------------------------ requester

    /// Calls that may be transmitted now.
    pub fn credits_left(&self) -> u32 {
        self.common.credits_left()
    }

    /// Credits that we ask for.
    pub fn asked(&self) -> u32 {
        self.common.window.asked()
    }

    /// Credits that we grant.
    pub fn granting(&self) -> u32 {
        self.common.window.told(Direction::Reply).0
    }

    /// The grant of the last reply (1 before the first).
    pub fn granted(&self) -> u32 {
        self.common.window.granted()
    }

    /// Calls of ours under way, each with a credit.
    pub fn in_flight(&self) -> u32 {
        self.common.window.in_flight()
    }

    /// Calls of ours that have not ended, sent or not.
    pub fn calls(&self) -> usize {
        self.requester.calls()
    }

    /// Requests of the peer under way: received, and neither answered nor given up.
    pub fn working(&self) -> usize {
        self.responder.working()
    }

    /// Bytes that the peer has moved from and to memory that our calls named, as far as its replies tell.
    pub fn placed(&self) -> u64 {
        self.requester.placed()
    }

    /// Whether a reply has told how many credits there are.
    pub fn knows_credits(&self) -> bool {
        self.common.window.is_told()
    }

    /// Whether none of our own calls is under way.
    pub fn is_idle(&self) -> bool {
        self.requester.is_idle()
    }

    /// Whether anyone waits for something that the peer has yet to send: a reply, a credit, or its answer to a request of the
    /// extension.
    pub fn is_awaiting(&self) -> bool {
        self.requester.is_awaiting() || self.common.characteristics.is_asking()
    }

    /// Whether calls wait for a credit that only a new connection can bring.
    pub fn holds_back(&self) -> bool {
        self.starved() && self.requester.has_waiting()
    }

    /// Whether calls wait for a credit, or for room.
    pub fn has_waiting(&self) -> bool {
        self.requester.has_waiting()
    }

    /// Whether calls that nobody waits for hold every credit: only a new connection helps.
    ///
    /// False while a call that somebody waits for is under way, as after a smaller grant: its reply may help.
    pub fn starved(&self) -> bool {
        self.common.window.starved()
    }

    /// Whether something with this XID is under way.
    pub fn knows(&self, xid: Xid) -> bool {
        self.requester.knows(xid) || self.common.characteristics.holds(xid)
    }

    /// Takes back the calls that wait for a credit, for another connection.
    pub fn take_waiting(&mut self) -> Vec<(Xid, Message, Expect)> {
        self.requester.take_waiting()
    }

    /// Why a call that has a credit waits for room, if it does.
    pub fn lacks_room(&self, xid: Xid) -> Option<String> {
        self.requester.lacks_room(xid, &self.common)
    }

    /// Whether the call was handed to the device.
    pub fn transmitted(&self, xid: Xid) -> bool {
        self.requester.transmitted(xid)
    }

    /// Starts a call of `message` (an RPC Call whose first word is `xid`), now or as soon as it has a credit.
    ///
    /// Ends with [`Output::Done`].
    ///
    /// # Errors
    /// `Invalid` when the XID is in use or not that of the message; `NotSent`, with the reason of the close, when the
    /// connection is closed.
    pub fn call(
        &mut self,
        xid: Xid,
        message: impl Into<Message>,
        expect: Expect,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<(), Error> {
        match self.start(xid, message.into(), &expect, registrar) {
            Started::Sent(gather) => {
                let send = WorkRequest::Send { gather, invalidate: None };
                self.common.output.push_back(Output::Post(send));
                Ok(())
            }
            Started::Failed => Ok(()),
            Started::Not(message) => self.requester.call(xid, message, expect, &mut self.common, registrar),
        }
    }

    /// Starts a call that needs no plan except for a Reply chunk and can go at once, as nearly every short call can. The caller
    /// must post what `call` would have posted.
    pub fn start(
        &mut self,
        xid: Xid,
        message: Message,
        expect: &Expect,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Started {
        self.requester.start(xid, message, expect, &mut self.common, registrar)
    }

    /// Nobody waits for the call any more: it is forgotten if it was not sent, or else becomes an orphan. Once this has returned
    /// and its output is drained, no memory of the program is held, nor is memory for the reply where the device can discard what
    /// the peer still writes.
    pub fn abandon(&mut self, xid: Xid, registrar: &mut (impl Registrar + ?Sized)) {
        self.requester.abandon(xid, &mut self.common, registrar);
    }

    // ------------------------------------------------------------------------------------------------ responder

    /// Whether `poll_request` would return one.
    pub fn request_ready(&self) -> bool {
        self.responder.request_ready()
    }

    /// Requests received and not yet handed up, ready or not.
    #[cfg(test)]
    pub fn requests_queued(&self) -> usize {
        self.responder.requests_queued()
    }

    /// The oldest request, once all of it has arrived.
    pub fn poll_request(&mut self) -> Option<Request> {
        self.responder.poll_request(&mut self.common)
    }

    /// Bytes that RDMA Reads have asked for so far, if some are under way.
    pub fn pulling(&self) -> Option<u64> {
        self.responder.pulling()
    }

    /// From now on the Reads of each Call begin when `pull` says so, after [`Connection::asks`].
    pub fn pull_in_turn(&mut self) {
        self.responder.pull_in_turn();
    }

    /// Bytes of the Call whose Reads wait for `pull`, and for nothing else; 0 if there is none.
    #[inline]
    pub fn asks(&self) -> usize {
        self.responder.asks()
    }

    /// Begins the Reads of that Call. The pass lives as long as the Call's memory.
    pub fn pull(&mut self, pass: Pass) {
        self.responder.pull(pass, &mut self.common);
    }

    /// Holds back the Reads of further Calls, or lets them start again: a peer that does not take replies gets no memory for
    /// more Calls.
    pub fn hold(&mut self, held: bool) {
        self.responder.hold(held, &mut self.common);
    }

    /// Answers a request with the RPC Reply `message` (first word: the XID).
    ///
    /// # Errors
    /// `TooLong` when the reply fits nowhere: the requester is told with ERR_CHUNK. `Invalid` when the request was
    /// answered before, or the message has another XID (the request can still be answered). The reason of the close
    /// when the connection is closed.
    pub fn reply(&mut self, id: RequestId, message: impl Into<Message>) -> Result<(), Error> {
        match self.answer(id, message.into()) {
            Answered::Sent { gather, receive, invalidate } => {
                let send = Output::Post(WorkRequest::Send { gather, invalidate });
                self.common.output.extend([Output::Receive(receive), send]);
                Ok(())
            }
            Answered::Failed(error) => Err(error),
            Answered::Not(message) => self.responder.reply(id, message, &mut self.common),
        }
    }

    /// Answers a request with a reply in the outbox, from which the requester fetches it. Returns the message where it must go
    /// through [`Connection::reply`] instead.
    ///
    /// # Errors
    /// The same as there.
    pub fn reply_shown(
        &mut self,
        id: RequestId,
        message: Message,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Option<Message>, Error> {
        self.responder.reply_shown(id, message, &mut self.common, registrar)
    }

    /// Answers a request with a reply that needs no plan, which is nearly every short one. The caller must post what `reply`
    /// would have posted.
    pub fn answer(&mut self, id: RequestId, message: Message) -> Answered {
        self.responder.answer(id, message, &mut self.common)
    }

    /// The request has no reply yet, and may never get one (a one-way call): its Receive is free again. The latest such
    /// request can still be answered until the next one is handed up.
    pub fn defer(&mut self, id: RequestId) {
        self.responder.defer(id, &mut self.common);
    }

    /// Keeps up to `late` deferred requests answerable, whatever is handed up meanwhile.
    pub fn keep_deferred(&mut self, late: usize) {
        self.responder.keep_deferred(late);
    }

    /// From now on a forked process may answer requests too.
    pub fn shares(&mut self) {
        self.responder.shares(&mut self.common);
    }

    /// Another process has answered this request.
    pub fn answered_elsewhere(&mut self, id: RequestId) {
        self.responder.answered_elsewhere(id);
    }

    /// What has become of a request that was deferred.
    pub fn fate(&self, id: RequestId) -> Fate {
        self.responder.fate(id)
    }

    /// Deferred requests that can still be answered.
    pub fn deferred(&self) -> impl Iterator<Item = RequestId> {
        self.responder.deferred()
    }

    /// Whether a request that was handed up, perhaps before a fork, is not answered yet.
    pub fn owes_replies(&self) -> bool {
        self.responder.has_handed() || self.responder.deferred().next().is_some()
    }

    /// Whether a request has been handed up and is neither answered nor deferred.
    pub fn has_handed(&self) -> bool {
        self.responder.has_handed()
    }

    /// The request gets no reply: its Receive is free again.
    pub fn discard(&mut self, id: RequestId) {
        self.responder.discard(id, &mut self.common);
    }

    /// An RDMA Read is done: the oldest one.
    pub fn handle_read(&mut self, id: WorkId) {
        self.responder.handle_read(id, &mut self.common);
    }

    // ----------------------------------------------------------------------------------------------------- both

    /// Whether to try `resume` again: calls, ours or the peer's, wait for memory that others hold.
    pub fn waits(&self) -> bool {
        self.closed().is_none() && (self.requester.is_crowded() || self.responder.waits())
    }

    /// Whether a Call waits for memory that other connections hold. `resume` tries again.
    pub fn waits_for_memory(&self) -> bool {
        self.responder.waits()
    }

    /// Continues what had to wait for memory, if there is some now.
    pub fn resume(&mut self, registrar: &mut (impl Registrar + ?Sized)) {
        if self.closed().is_none() {
            self.responder.start_pulls(&mut self.common);
            self.requester.transmit_waiting(&mut self.common, registrar);
        }
    }

    /// A Send of the peer has arrived: `message` is what the Receive holds. Nearly every one is a plain Call or reply of Version
    /// One from which nothing else follows. With such a message this does what `handle_message` would do, and returns the result.
    /// `invalidated` is as there.
    pub fn take_plain(
        &mut self,
        message: Region,
        invalidated: Option<Handle>,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Taken {
        let Connection { common, requester, responder, .. } = self;
        let open = common.version() == Some(v1::VERSION) && common.life.is_open() && common.output.is_empty();
        let Some(plain) = header::decode_plain(&message).filter(|_| open) else { return Taken::Not(message) };
        match plain.direction() {
            Some(Direction::Call)
                if invalidated.is_none() && responder.take_call(&message, &plain, common, registrar) =>
            {
                Taken::Call
            }
            Some(Direction::Reply) if first_xid(plain.payload) == Some(plain.xid) => {
                let receive = if responder.working() == 0 { common.next_receive(0) } else { None };
                match receive {
                    Some(receive) if requester.take_reply(&plain, invalidated, common, registrar) => {
                        let (xid, length) = (plain.xid, plain.payload.len());
                        let reply = message.slice(message.len() - length, length);
                        Taken::Reply { xid, reply, receive }
                    }
                    _ => Taken::Not(message),
                }
            }
            _ => Taken::Not(message),
        }
    }

    /// Does what [`Self::take_plain`] and [`Self::handle_message`] do, and puts all that follows into the output.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn handle_receive(
        &mut self,
        message: Buf,
        invalidated: Option<Handle>,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        let mut message = message.freeze();
        match self.take_plain(message, invalidated, registrar) {
            Taken::Call => return,
            Taken::Reply { xid, reply, receive } => {
                let outcome = Ok(Payload { pieces: smallvec::smallvec![reply], rest: None });
                return self.common.output.extend([Output::Receive(receive), Output::Done { xid, outcome }]);
            }
            Taken::Not(back) => message = back,
        }
        self.handle_message(message, invalidated, registrar);
    }

    /// A Send of the peer has arrived that [`Self::take_plain`] did not take.
    ///
    /// `invalidated`: the handle of ours that it invalidated (Send with Invalidate).
    pub fn handle_message(
        &mut self,
        message: Region,
        invalidated: Option<Handle>,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        if self.closed().is_some() {
            return;
        }
        self.common.characteristics.consumed();
        let header = header::decode(&message, self.common.settings.versions);
        if let Ok(header) = &header {
            self.agree(header);
        }
        let direction = header.as_ref().map(|header| self.direction(header));
        if let Some(handle) = invalidated {
            // RFC 8797 §4.1: "Each RDMA Send with Invalidate MUST invalidate an STag associated only with the Transaction
            // ID (XID) in the rdma_xid field of the RPC-over-RDMA Transport Header it carries."
            let named = header.as_ref().is_ok_and(|header| self.requester.names(header.xid, handle));
            if !named || direction != Ok(Direction::Reply) {
                let text = "the peer invalidated a handle that the call of its reply did not name";
                return self.common.close(Error::new(Kind::Protocol, text));
            }
        }
        match header {
            Ok(header) => match (header.body, direction) {
                (Body::Optional { kind, info }, _) => self.handle_optional(&header, kind, info, registrar),
                (Body::Error(_), _) if self.common.characteristics.refused(header.xid) => {}
                (_, Ok(Direction::Call)) => {
                    self.responder.handle_call(&message, &header, &mut self.common, registrar);
                }
                _ => self.requester.handle_reply(&message, &header, &mut self.common, registrar),
            },
            // RFC 8166 §4.5: "If other errors are detected in the RPC-over-RDMA header of an RPC Call message, a Responder
            // MUST send an RDMA_ERROR message back to the Requester." In a Reply they are silently discarded.
            Err(error) => {
                if let Some(answer) = error.answer()
                    && self.common.window.serves()
                    && !self.transmitted(answer.0)
                {
                    self.responder.send_error(answer, &mut self.common);
                }
            }
        }
        self.responder.replenish(&mut self.common);
        // Before the calls, which may lead to calls back: this tells the peer that it may make them.
        self.speak();
        self.requester.transmit_waiting(&mut self.common, registrar);
    }

    /// The direction of a message: as it says itself, or else by the context.
    fn direction(&self, header: &Header<'_>) -> Direction {
        header.direction.unwrap_or_else(|| {
            // A message that does not say is a reply if it ends a call of ours, or if this end opened the connection.
            if self.common.role == Role::Client || self.transmitted(header.xid) {
                Direction::Reply
            } else {
                Direction::Call
            }
        })
    }

    /// The connection is gone: every call ends, every request that is not ready is dropped.
    pub fn handle_closed(&mut self, error: Error) {
        let Connection { common, requester, responder, .. } = self;
        if common.life.closed().is_none() && common.may_fall_back() {
            // Nothing but the offer was sent yet, and closing the connection may be the peer's answer to it.
            responder.handle_closed();
            common.output.clear();
            return common.life.end(error);
        }
        if common.life.closed().is_some() && requester.is_idle() {
            return;
        }
        requester.handle_closed(&error, common);
        responder.handle_closed();
        common.output.retain(|output| matches!(output, Output::Done { .. }));
        common.life.end(error);
    }

    /// Why the connection is closed, if it is.
    pub fn closed(&self) -> Option<&Error> {
        self.common.life.closed()
    }
}

/// The XID with which an RPC message begins; its word may span several pieces.
fn payload_xid(message: &[Region]) -> Option<Xid> {
    let mut bytes = message.iter().flat_map(|piece| piece.iter().copied());
    let word = [bytes.next()?, bytes.next()?, bytes.next()?, bytes.next()?];
    Some(Xid(u32::from_be_bytes(word)))
}

/// The XID with which a message of ours begins.
fn first_xid(message: &[u8]) -> Option<Xid> {
    message.first_chunk().map(|word| Xid(u32::from_be_bytes(*word)))
}

#[cfg(test)]
mod tests;
