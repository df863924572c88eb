//! The RPC-over-RDMA engine of one connection: pure state, no clock, no socket, no raw pointer.
//!
//! # Contract
//! - Getters tell state: [`Connection::credits_left`], [`Connection::starved`], [`Connection::request_ready`].
//! - Input: `handle_receive`, `handle_read`, `handle_quiet`, `handle_closed`.
//! - Commands: `call`, `abandon`, `ask` (requester); `poll_request`, `reply`, `defer`, `discard`, `hold`, `grant`
//!   (responder); `resume` (either, while [`Connection::waits`]); `request`, `raise_receives` (either, in Version Two).
//! - Output: `poll_output`. **Every input and command is followed by draining `poll_output` until `None`.**
//!
//! Memory is exposed and invalidated while a command runs, through the [`Registrar`] argument: a plan needs the
//! handles. Everything else a device must do comes out as [`Output::Post`], in the order in which it must be posted.
//!
//! # Both directions
//! Either end is requester and responder (RFC 8167): the client of the forward direction, which opened the connection, is
//! the responder of the reverse direction. The two have nothing in common but the Receives: XIDs, calls and credits are
//! apart, and what a message belongs to is told by the RPC message in it. A server makes no call before `ask`, and a
//! client has no Receives for calls before `grant`: nobody calls back who was not told that he may.
//!
//! # Both versions
//! A call is answered in the version that it came in. What our own calls are made in is agreed on first: `two`. The messages
//! of both are taken in as one kind, [`Header`].
//!
//! # What it keeps
//! - Credits (RFC 8166 §3.3.1): one before the first reply, then the grant. A call holds its credit until its reply or
//!   an error; a one-way call, which has neither, until the reply to a later call shows that the responder is past it.
//!   A responder that serves several requests at a time may still pull its chunks then: those stay exposed for a while.
//! - A timed-out call becomes an orphan: the responder may still be at work on it, so its credit and its exposures
//!   stay. A late RDMA finds live handles and the connection survives; the memory behind them is let go, where the device
//!   can do so. When nothing but such calls is under way, [`Connection::starved`] says so.
//! - Which items of a message are eligible for chunks of their own is asked of the `binding` of its procedure. What
//!   a peer does with bindings that are not standardised is learned from its replies.
//! - Once [`Output::Close`] is out, only [`Output::Done`] follows.
//! - Requests are handed up in the order of their Sends, each only when all its Reads are done.
//!
//! Read RFC 8166 §3.3 and §4.5 first; `chunks` holds the plan of a message.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::binding::{Binding, Head, Origin, Registry};
use crate::error::{Error, Kind, os_text};
use crate::log_warn;
use crate::memory::{Buf, Memory, Message, Region, Sink};
use crate::provider::{QueuePair, WorkId, WorkRequest};
use crate::stats::{self, Counter};
use crate::wire::characteristics::{self as operations, Backward, Characteristic};
use crate::wire::header::{self, Answer, Body, Direction, Header, Proc, RdmaError, Versions};
use crate::wire::lists::{ChunkLists, Lists};
use crate::wire::private_data::PrivateData;
use crate::wire::{Credits, Handle, Position, ReadSegment, Segment, Xid, v1, v2};

pub mod characteristics;
pub mod chunks;
mod two;

use characteristics::{Characteristics, Endpoint, Note};
use chunks::{Area, Assembly, Limits, Needs, Pull};

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
    /// Where the XIDs of messages begin that are of no RPC: anywhere.
    pub first_xid: u32,
    /// Largest Call that we pull from a requester, in bytes, and most bytes of pulled Calls that wait to be handed up.
    pub max_call: usize,
    /// Calls may have more chunks than RFC 8267 §4.3 asks a server to accept. See [`Limits::many`].
    pub many_chunks: bool,
    /// Every handle of ours may be invalidated by the peer, as we have told it (RFC 8797 §4.1, XCHAR_RQREMINV).
    pub remote_invalidation: bool,
}

impl Settings {
    fn margin(&self) -> u32 {
        receive_margin(self.versions)
    }
}

/// Most bytes of an RPC reply before its results: six words, and a verifier of at most 400 bytes (RFC 5531 §9).
pub const RPC_HEADER_MAX: usize = 24 + 400 + 4;

/// Exposing memory while a plan is made: the part of [`QueuePair`] that the engine calls itself.
pub trait Registrar {
    /// See [`QueuePair::expose_source`].
    ///
    /// # Errors
    /// As there.
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error>;
    /// See [`QueuePair::expose_sink`].
    ///
    /// # Errors
    /// As there.
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error>;
    /// See [`QueuePair::invalidate`].
    ///
    /// # Errors
    /// As there.
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error>;
    /// See [`QueuePair::detach`].
    ///
    /// # Errors
    /// As there.
    fn detach(&mut self, handle: Handle) -> Result<(), Error>;
    /// See [`QueuePair::was_read`].
    fn was_read(&self, handle: Handle) -> Option<bool>;
    /// See [`QueuePair::withdraw`].
    fn withdraw(&mut self) -> usize;
    /// Most bytes of one segment.
    fn max_segment(&self) -> usize;
    /// Reads that the peer serves at a time; 0 for none.
    fn read_depth(&self) -> u32;
}

impl<T: QueuePair + ?Sized> Registrar for T {
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        QueuePair::expose_source(self, region)
    }
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        QueuePair::expose_sink(self, sink)
    }
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
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
}

/// What the driver must do or tell.
#[derive(Debug)]
pub enum Output {
    /// Post one more Receive of so many bytes.
    Receive(usize),
    /// Post this.
    Post(WorkRequest),
    /// A call has ended. For a one-way call: it was sent, and the message is empty.
    Done {
        /// The call.
        xid: Xid,
        /// The RPC reply in stream order, from its XID on; or why there is none.
        outcome: Result<Vec<Region>, Error>,
    },
    /// The connection cannot go on: close it.
    Close(Error),
}

/// What the caller of [`Connection::call`] wants back.
#[derive(Debug)]
pub enum Expect {
    /// A reply.
    Reply {
        /// Most bytes of it, from the XID on, where no binding says more exactly.
        max: usize,
        /// Memory for eligible results, in their order; one that is too short is not used.
        places: Vec<Sink>,
    },
    /// Nothing: done when it is sent (batching).
    Nothing,
}

/// Names a request that was handed up.
///
/// A later request is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

/// A request for the upper layer.
pub struct Request {
    /// For `reply` or `discard`.
    pub id: RequestId,
    /// Of the RPC message.
    pub xid: Xid,
    /// The RPC Call in stream order, from its XID on.
    pub message: Vec<Region>,
    /// What is known of its procedure; nothing if RPCSEC_GSS wraps the arguments.
    pub binding: Option<Binding>,
    /// RPCSEC_GSS wraps arguments and results.
    pub wrapped: bool,
    /// The first argument that came in a Read chunk of its own, as it lies in memory: without pad.
    pub placed: Option<Region>,
}

/// See the module's first page.
pub struct Connection {
    role: Role,
    settings: Settings,
    memory: Arc<Memory>,
    bindings: Arc<Registry>,
    spoken: Spoken,
    /// Our offer of Version Two was refused, and nobody has said yet that no more has come.
    refused: bool,
    /// Version One: replies may invalidate a handle of the requester, for both ends have said so.
    invalidate: bool,
    /// Version One: largest Send that the peer takes, which is the call inline threshold of a client, the reply threshold
    /// of a server.
    send: usize,
    /// Version One: largest Send that the peer makes.
    receive: usize,
    /// Version Two, and the Receives of both.
    characteristics: Characteristics,
    requester: Requester,
    responder: Responder,
    output: VecDeque<Output>,
    /// [`Output::Close`] is out: nothing more is transmitted.
    closing: bool,
    /// Set once, by `handle_closed`; every later command fails with it.
    closed: Option<Error>,
}

/// What our own calls are made in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spoken {
    One,
    /// Not known yet. A client waits for the answer to its first message, an INIT_XCHAR of Version Two; a server, for the
    /// first message of the client.
    Unknown,
    Two,
}

#[derive(Default)]
struct Requester {
    /// Credits that we ask for; 0: we make no calls.
    asked: u32,
    /// Receives that we keep for replies: the most that we have asked for so far.
    receives: u32,
    /// Granted by the last reply; 1 before the first one.
    granted: u32,
    /// A reply has told that.
    told: bool,
    /// Calls transmitted and not ended: each holds a credit.
    in_flight: u32,
    /// Messages transmitted so far that are no replies: orders them, so that a reply tells which earlier ones the peer has
    /// consumed.
    transmitted: u64,
    /// XID of the next message that is of no RPC.
    next_xid: u32,
    calls: HashMap<Xid, Call>,
    /// Calls without a credit, or without room for their reply, oldest first.
    waiting: VecDeque<Xid>,
    /// Some of them have a credit, and lack room.
    lacks_room: bool,
    /// Transmitted calls that nobody waits for: orphans and one-way calls, each holding a credit.
    abandoned: u32,
    /// One-way calls that have given their credit back, oldest first: the peer may still read what they expose.
    past: VecDeque<Past>,
    /// Replies so far.
    replies: u64,
    /// By program and version: what the peer has shown of bindings that are not standardised.
    shown: HashMap<(u32, u32), Shown>,
}

/// What a peer has shown of a binding.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    /// It puts eligible results into Write chunks.
    Known,
    /// It left one out of its Write chunk, or refused the chunks of a Call.
    Unknown,
}

struct Call {
    /// `None` once transmitted.
    waiting: Option<(Message, Expect)>,
    /// Bytes of Reply chunks that there was no room for, when that was tried last.
    lacks: usize,
    fate: Fate,
    /// Place in the order of transmission; `None` while it waits for a credit.
    sequence: Option<u64>,
    /// In which it was transmitted.
    version: u32,
    /// What its header names.
    handles: Vec<Handle>,
    /// Bytes in its Read chunks.
    pulled: usize,
    writes: Vec<Area>,
    reply: Option<Area>,
    bound: Option<Bound>,
}

/// A one-way call whose credit was given back.
struct Past {
    xid: Xid,
    handles: Vec<Handle>,
    /// Bytes behind them: copies of our own.
    bytes: usize,
    /// [`Requester::replies`] when the credit was given back.
    since: u64,
}

/// The binding by which a Call was planned.
struct Bound {
    program: u32,
    version: u32,
    binding: Binding,
    /// The longest reply was told by it, and not by the caller.
    bounds: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Awaited,
    OneWay,
    Orphan,
}

#[derive(Default)]
struct Responder {
    /// Credits that we grant, never 0.
    grant: u32,
    /// Receives that we keep for calls: the most that we have granted so far. 0: we do not serve.
    receives: u32,
    next: u64,
    /// In the order of their Sends; the front is handed up next.
    queue: VecDeque<Pending>,
    /// Handed up, not yet answered or discarded.
    handed: HashMap<RequestId, Chunks>,
    /// The latest that was deferred, until the next one is handed up.
    deferred: Option<(RequestId, Chunks)>,
    /// Bytes of Calls in `queue` that were asked for.
    staged: usize,
    /// Bytes of each Read under way, in their order, and of all Reads so far.
    reads: VecDeque<usize>,
    asked: u64,
    /// Bytes that the peer has shown to send when they are asked for: no more are under way.
    window: usize,
    /// Most bytes that the device moves by one Read or Write; known with the first Call.
    transfer_max: usize,
    /// A Call waits for memory that other connections hold.
    waits: bool,
    /// No Reads of further Calls are started.
    held: bool,
}

/// A request on its way up.
struct Pending {
    id: RequestId,
    xid: Xid,
    chunks: Chunks,
    inline: Region,
    /// Bytes of staging memory that it holds: those that were asked for.
    staged: usize,
    state: State,
}

/// What the requester offers for the reply.
struct Chunks {
    xid: Xid,
    /// Of the Call, and so of the Reply.
    version: u32,
    writes: Vec<Vec<Segment>>,
    reply: Option<Vec<Segment>>,
    /// The only handle that the Call names, if there is exactly one.
    handle: Option<Handle>,
    /// Known when the Call is whole.
    binding: Option<Binding>,
    wrapped: bool,
}

enum State {
    /// RDMA Reads bring it.
    Pulling {
        assembly: Assembly,
        /// `None` before the first Read.
        staging: Option<Sink>,
        /// Reads that are not posted yet.
        rest: VecDeque<Pull>,
        /// Reads under way.
        left: usize,
    },
    Ready(Whole),
}

/// A Call of which every byte is here.
#[derive(Default)]
struct Whole {
    message: Vec<Region>,
    placed: Option<Region>,
}

/// Receives beyond the credits: for stray messages, such as the reply to a one-way call that gave its credit back.
pub const RECEIVE_MARGIN: u32 = 8;

/// Further Receives for Version Two, whose messages of extensions no credit counts. Of the peer: one without a reply and a
/// REQ_XCHAR; for a REQ_XCHAR of ours the RESP_XCHAR and an UPD_XCHAR for each characteristic; an error.
const OPTIONAL_MARGIN: u32 = 8;

/// Receives beyond the credits.
pub fn receive_margin(versions: Versions) -> u32 {
    RECEIVE_MARGIN + if versions.include(v2::VERSION) { OPTIONAL_MARGIN } else { 0 }
}

/// How much one-way calls whose credit was given back may keep exposed, in calls and in bytes; one of them always may.
const PAST_MAX: usize = 64;
const PAST_BYTES: usize = 16 << 20;

/// Replies after which they are taken for read, where the device cannot tell.
const PAST_REPLIES: u64 = 32;

/// Most bytes of one RDMA Read: between two of them other messages of the peer get their turn.
const PULL_MAX: usize = 1 << 20;

/// Most bytes of RDMA Reads under way: at first, for 1 MiB of arguments and the call's header, and when the peer has answered
/// such Reads. What a peer leaves unanswered counts as memory that is held.
const WINDOW_MIN: usize = PULL_MAX + 4096;
const WINDOW_MAX: usize = 8 << 20;

impl Connection {
    /// The engine of an established connection. Drain `poll_output` at once: it posts the Receives.
    pub fn new(
        role: Role,
        mut settings: Settings,
        peer: PrivateData,
        memory: Arc<Memory>,
        bindings: Arc<Registry>,
    ) -> Connection {
        // RFC 8166 §3.3.1: "The granted value MUST NOT be zero, since such a value would result in deadlock."
        settings.credits =
            settings.credits.min(settings.receives.saturating_sub(settings.margin() + 1)).max(1);
        let credits = settings.credits;
        let (asked, served) = if role == Role::Client { (credits, 0) } else { (0, credits) };
        // RFC 8166 §3.3.2: "The inline threshold value is the smaller of the largest number of bytes the sender can
        // post via a single RDMA Send operation and the largest number of bytes the receiver can accept via a single
        // RDMA Receive operation."
        let send = settings.inline.min(peer.receive_size);
        let receive = settings.inline.min(peer.send_size);
        // The draft of Version Two, section 2.3: every receiver takes 4096 bytes, and more if it has said so otherwise.
        let two = |one: usize, backward| Endpoint {
            receive_size: one.max(v2::INLINE_DEFAULT),
            remote_invalidation: false,
            backward,
        };
        let characteristics = Characteristics::new(
            Endpoint { remote_invalidation: settings.remote_invalidation, ..two(receive, Backward::None) },
            two(send, Backward::SizeLimited),
            settings.receive.max(settings.inline),
            settings.receive_max,
        );
        let two_is_possible = settings.versions.include(v2::VERSION);
        let mut connection = Connection {
            role,
            settings,
            memory,
            bindings,
            // RFC 8797 §4.1: "When both connection peers have set this bit flag in their CM Private Data, the responder MAY
            // use RDMA Send with Invalidate operations when transmitting RPC Replies."
            invalidate: settings.remote_invalidation && peer.remote_invalidation,
            send,
            receive,
            spoken: if two_is_possible { Spoken::Unknown } else { Spoken::One },
            refused: false,
            characteristics,
            // RFC 8166 §3.3.3: "a Requester MUST NOT assume more than one credit is available and MUST receive a valid
            // reply from the Responder carrying the actual number of available credits, prior to sending its next
            // request."
            requester: Requester {
                granted: 1,
                asked,
                receives: asked,
                next_xid: settings.first_xid,
                ..Requester::default()
            },
            responder: Responder {
                grant: served.max(1),
                receives: served,
                window: WINDOW_MIN,
                ..Responder::default()
            },
            output: VecDeque::new(),
            closing: false,
            closed: None,
        };
        connection.update_backward();
        connection.replenish();
        if two_is_possible && role == Role::Client {
            // The draft of Version Two, section 5: the first message has at most 1024 bytes, and is the only one until it is
            // answered. An INIT_XCHAR has no reply, but proves as much: whoever knows it answers with its own, and
            // others refuse it in a way that tells which versions they speak.
            let xid = connection.fresh_xid();
            connection.send_note(Note::Init, xid);
        }
        connection
    }

    /// Posts the Receives that are missing.
    ///
    /// RFC 8166 §3.3.1: "A Requester MUST maintain enough receive resources to accommodate expected replies." Every call
    /// whose reply is expected holds a credit, so credits bound the Receives of both ends. RFC 8167 §4.3.1: "a client
    /// endpoint posts enough additional Receive buffers to match its advertised reverse-direction credit value."
    ///
    /// A Call under way keeps its Receive. Credits that were taken back keep theirs to the end of the connection: nothing
    /// says when the peer has heard of it.
    fn replenish(&mut self) {
        let working = self.responder.queue.len() + self.responder.handed.len();
        let wanted = self.requester.receives + self.responder.receives + self.settings.margin();
        let open = !self.closing && self.closed.is_none();
        let held = self.characteristics.held() as usize;
        for _ in held..(wanted as usize).saturating_sub(working) {
            if open {
                let bytes = self.characteristics.posted();
                self.output.push_back(Output::Receive(bytes));
            }
        }
    }

    /// Asks for so many credits with every call from now on; returns how many it will be, for the device's Receives bound
    /// both directions together, and each leaves one to the other. A server makes calls from its first `ask` on.
    pub fn ask(&mut self, credits: u32) -> u32 {
        let room =
            self.settings.receives.saturating_sub(self.settings.margin() + self.responder.receives.max(1));
        let credits = credits.min(room).max(1);
        self.requester.asked = credits;
        self.requester.receives = self.requester.receives.max(credits);
        self.replenish();
        credits
    }

    /// Grants so many credits with every reply from now on; returns how many, as `ask` does. A client serves from its first
    /// `grant` on.
    pub fn grant(&mut self, credits: u32) -> u32 {
        let room =
            self.settings.receives.saturating_sub(self.settings.margin() + self.requester.receives.max(1));
        let credits = credits.min(room).max(1);
        self.responder.grant = credits;
        self.responder.receives = self.responder.receives.max(credits);
        // RFC 8166 §3.3.1: "The Responder MUST ensure that an increase in receive resources is effected before the next
        // RPC Reply message is sent."
        self.replenish();
        self.update_backward();
        credits
    }

    /// Whether messages of the reverse direction may have chunks.
    pub fn set_reverse_chunks(&mut self, allowed: bool) {
        self.settings.reverse_chunks = allowed;
        self.update_backward();
    }

    /// The next thing to do. See the contract.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.output.pop_front()
    }

    /// Inline thresholds in bytes: of our Sends, of the peer's Sends. Of the first message, until a version is agreed.
    pub fn thresholds(&self) -> (usize, usize) {
        match self.spoken {
            Spoken::One => (self.send, self.receive),
            Spoken::Unknown => (characteristics::RECEIVE_MIN, self.characteristics.own().receive_size),
            Spoken::Two => (self.characteristics.send_limit(), self.characteristics.own().receive_size),
        }
    }

    /// The version that our calls are made in; `None` before it is agreed.
    pub fn version(&self) -> Option<u32> {
        match self.spoken {
            Spoken::One => Some(v1::VERSION),
            Spoken::Unknown => None,
            Spoken::Two => Some(v2::VERSION),
        }
    }

    /// Largest RPC message that goes and comes without chunks, in bytes.
    pub fn largest_short(&self) -> (usize, usize) {
        let (send, receive) = self.thresholds();
        let header = chunks::header_min(self.version().unwrap_or(v2::VERSION));
        (send.saturating_sub(header), receive.saturating_sub(header))
    }

    /// What the peer is like: as it has said, or what Version One tells of it.
    pub fn peer(&self) -> Endpoint {
        let told = |receive_size, remote_invalidation| Endpoint {
            receive_size,
            remote_invalidation,
            backward: Backward::Unknown,
        };
        match self.spoken {
            Spoken::One => told(self.send, self.invalidate),
            Spoken::Unknown => told(characteristics::RECEIVE_MIN, false),
            Spoken::Two => *self.characteristics.peer(),
        }
    }

    /// Sends a message without a payload. False when there is no memory for it; the connection ends then.
    fn send_bytes(&mut self, bytes: &[u8]) -> bool {
        let region = self.memory.header().and_then(|mut buf| {
            buf.extend(bytes)?;
            Ok(buf.freeze())
        });
        match region {
            Ok(region) => {
                let send = WorkRequest::Send { gather: vec![region], invalidate: None };
                self.output.push_back(Output::Post(send));
                true
            }
            // RFC 8166 §4.5.4: "If a Responder is unable to construct and transmit an RPC Reply or RPC-over-RDMA error
            // message, the Responder MUST close the connection to signal to the Requester that a reply was lost."
            Err(error) => {
                self.close(error.into());
                false
            }
        }
    }

    // ------------------------------------------------------------------------------------------------ requester

    /// Calls that may be transmitted now.
    pub fn credits_left(&self) -> u32 {
        // RFC 8166 §3.3.1: "The number of allowed new requests the Requester may send is then the lower of the current
        // requested and granted credit values, minus the number of requests in flight."
        if self.spoken == Spoken::Unknown {
            return 0;
        }
        self.limit().saturating_sub(self.requester.in_flight)
    }

    /// Credits that we ask for.
    pub fn asked(&self) -> u32 {
        self.requester.asked
    }

    /// Credits that we grant.
    pub fn granting(&self) -> u32 {
        self.responder.grant
    }

    fn limit(&self) -> u32 {
        self.requester.asked.min(self.requester.granted)
    }

    /// The grant of the last reply (1 before the first).
    pub fn granted(&self) -> u32 {
        self.requester.granted
    }

    /// Whether a reply has told how many credits there are.
    pub fn knows_credits(&self) -> bool {
        self.requester.told
    }

    /// Whether nothing of our own calls is under way.
    pub fn is_idle(&self) -> bool {
        self.requester.calls.is_empty()
    }

    /// Whether calls wait for a credit that only a new connection brings.
    pub fn holds_back(&self) -> bool {
        self.starved() && !self.requester.waiting.is_empty()
    }

    /// Whether calls that nobody waits for hold every credit: only a new connection helps.
    ///
    /// Not while a call that somebody waits for is under way, as after a smaller grant: its reply may help.
    pub fn starved(&self) -> bool {
        let Requester { abandoned, in_flight, .. } = self.requester;
        abandoned >= self.limit() && abandoned == in_flight
    }

    /// Whether something with this XID is under way.
    pub fn knows(&self, xid: Xid) -> bool {
        self.requester.calls.contains_key(&xid)
            || self.requester.past.iter().any(|call| call.xid == xid)
            || self.characteristics.holds(xid)
    }

    /// Takes the calls back that wait for a credit: for another connection.
    pub fn take_waiting(&mut self) -> Vec<(Xid, Message, Expect)> {
        let waiting = std::mem::take(&mut self.requester.waiting);
        let mut taken = Vec::with_capacity(waiting.len());
        for xid in waiting {
            if let Some((message, expect)) = self.requester.calls.remove(&xid).and_then(|call| call.waiting) {
                taken.push((xid, message, expect));
            }
        }
        taken
    }

    /// Why a call waits for room, if it does and has a credit.
    pub fn lacks_room(&self, xid: Xid) -> Option<String> {
        let lacks = self.requester.calls.get(&xid).filter(|call| call.sequence.is_none())?.lacks;
        (lacks > 0 && self.credits_left() > 0)
            .then(|| format!("no room for a reply of {lacks} bytes: {}", self.memory.crowd()))
    }

    /// Whether the call was handed to the device.
    pub fn transmitted(&self, xid: Xid) -> bool {
        self.requester.calls.get(&xid).is_some_and(|c| c.sequence.is_some())
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
        let message = message.into();
        if let Some(error) = &self.closed {
            return Err(Error::new(Kind::NotSent, error.text().to_owned()));
        }
        if self.knows(xid) {
            return Err(Error::new(Kind::Invalid, format!("a call with XID {xid} is under way")));
        }
        // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
        if first_xid(message.body()) != Some(xid) {
            return Err(Error::new(Kind::Invalid, format!("the call does not begin with its XID {xid}")));
        }
        let fate = if matches!(expect, Expect::Nothing) { Fate::OneWay } else { Fate::Awaited };
        let call = Call {
            waiting: Some((message, expect)),
            lacks: 0,
            fate,
            sequence: None,
            version: v1::VERSION,
            handles: Vec::new(),
            pulled: 0,
            writes: Vec::new(),
            reply: None,
            bound: None,
        };
        self.requester.calls.insert(xid, call);
        self.requester.waiting.push_back(xid);
        self.transmit_waiting(registrar);
        Ok(())
    }

    /// Nobody waits for the call any more: it is forgotten if it was not sent, else it becomes an orphan. No memory of
    /// the program is held when this returns and its output is drained; nor is memory for the reply, where the device can
    /// throw away what the peer still writes.
    pub fn abandon(&mut self, xid: Xid, registrar: &mut (impl Registrar + ?Sized)) {
        let Some(call) = self.requester.calls.get_mut(&xid) else { return };
        if call.sequence.is_none() {
            self.requester.calls.remove(&xid);
            self.requester.waiting.retain(|w| *w != xid);
        } else if call.fate == Fate::Awaited {
            // Its credit stays with it. RFC 8166 §8.1.4 has a requester "keep the number of concurrent RPC transactions
            // at or under the number of credits granted per connection", and at the responder this one still is one.
            call.fate = Fate::Orphan;
            self.requester.abandoned += 1;
            // What the device cannot let go of is bounded by the credits, and takes no room of other calls.
            call.writes.iter().chain(&call.reply).for_each(|area| area.sink.uncount());
            (call.writes, call.reply) = (Vec::new(), None);
            for handle in call.handles.clone() {
                if let Err(error) = registrar.detach(handle) {
                    self.close(error);
                }
            }
        }
    }

    fn transmit_waiting(&mut self, registrar: &mut (impl Registrar + ?Sized)) {
        // RFC 8166 §3.3.1: "A Requester MUST NOT send unacknowledged requests in excess of the Responder's granted
        // credit limit."
        let mut next = 0;
        self.requester.lacks_room = false;
        while self.credits_left() > 0 && !self.closing {
            let Some(xid) = self.requester.waiting.get(next).copied() else { return };
            // Calls that lack room keep their order; those that need none go past them.
            if self.requester.lacks_room && self.requester.calls.get(&xid).is_some_and(|call| call.lacks > 0)
            {
                next += 1;
                continue;
            }
            let Some(mut call) = self.requester.calls.remove(&xid) else {
                self.requester.waiting.remove(next);
                continue;
            };
            let sent = match self.too_few_credits(&call) {
                Some(error) => Err(error),
                None => self.transmit(xid, &mut call, registrar),
            };
            match sent {
                Ok(Some(send)) => {
                    self.requester.transmitted += 1;
                    self.requester.in_flight += 1;
                    call.sequence = Some(self.requester.transmitted);
                    self.output.push_back(Output::Post(send));
                    if call.fate == Fate::OneWay {
                        self.requester.abandoned += 1;
                        self.output.push_back(Output::Done { xid, outcome: Ok(Vec::new()) });
                    }
                    self.requester.calls.insert(xid, call);
                }
                Ok(None) => {
                    self.requester.lacks_room = true;
                    self.requester.calls.insert(xid, call);
                    next += 1;
                    continue;
                }
                Err(error) => {
                    // RFC 8166 §4.5.4: "if a Requester is unable to construct and transmit an RPC Call message, the
                    // associated RPC transaction fails immediately."
                    self.release(&mut call.handles, registrar);
                    self.output.push_back(Output::Done { xid, outcome: Err(error) });
                }
            }
            self.requester.waiting.remove(next);
        }
    }

    /// Why a call without a reply would hold the only credit for ever.
    fn too_few_credits(&self, call: &Call) -> Option<Error> {
        if call.fate != Fate::OneWay || !self.requester.told || self.limit() > 1 {
            return None;
        }
        let setting = match self.role {
            Role::Client => "RPCRDMA_CREDITS",
            Role::Server => "RPCRDMA_REVERSE_CREDITS",
        };
        let text = if self.requester.asked == 1 {
            format!(
                "a call without a reply needs two credits, and this end asks for one: raise {setting} or \
                 CLSET_RDMA_CREDITS"
            )
        } else {
            format!(
                "a call without a reply needs two credits, and the peer grants one: raise {setting} there"
            )
        };
        Some(Error::new(Kind::NotSent, text))
    }

    /// Exposes what the plan needs and makes the Send. `None` when there is no room for the reply: the call waits.
    fn transmit(
        &mut self,
        xid: Xid,
        call: &mut Call,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Option<WorkRequest>, Error> {
        let (mut message, expect) =
            call.waiting.take().ok_or_else(|| Error::new(Kind::Encode, "call without a message"))?;
        let max = match &expect {
            Expect::Reply { max, .. } => *max,
            Expect::Nothing => 0,
        };
        call.version = self.version().unwrap_or(v1::VERSION);
        let plan = self.plan(call, &mut message, max, registrar.max_segment())?;
        stats::add(Counter::BytesCopied, plan.copied as u64);
        let needs = plan.reply.saturating_add(plan.writes.iter().sum());
        if needs > 0 && (self.requester.lacks_room || !self.memory.has_room(needs)) {
            (call.waiting, call.lacks) = (Some((message, expect)), needs);
            return Ok(None);
        }
        let places = match expect {
            Expect::Reply { places, .. } => places,
            Expect::Nothing => Vec::new(),
        };
        let total = message.len();
        let pieces = message.freeze();
        let rest = chunks::rest_of(total, &plan.reduced);

        let mut lists = Lists::default();
        let mut expose = |position: usize, source: Region, call: &mut Call| -> Result<(), Error> {
            for (at, len) in chunks::cut(source.len(), registrar.max_segment()) {
                let target = registrar.expose_source(source.slice(at, len))?;
                call.handles.push(target.handle);
                lists.reads.push(ReadSegment { position: Position(position as u32), target });
            }
            Ok(())
        };
        if plan.long {
            // RFC 8166 §3.5.3: "Every RDMA read segment in this chunk MUST contain zero in its Position field."
            for source in rest.iter().flat_map(|range| pieces.gather(range.clone())) {
                expose(0, source, call)?;
            }
        }
        for item in &plan.reduced {
            for source in pieces.gather(item.range()) {
                expose(item.position, source, call)?;
            }
        }
        call.pulled = lists.reads.iter().map(|read| read.target.length as usize).sum();
        let mut places = places.into_iter();
        for most in plan.writes {
            let place = places.next().filter(|place| place.len() >= most);
            let area = self.area(most, place, call, registrar)?;
            lists.writes.push(area.offered.iter().map(|(s, _)| *s).collect());
            call.writes.push(area);
        }
        if plan.reply > 0 {
            let area = self.area(plan.reply, None, call, registrar)?;
            lists.reply = Some(area.offered.iter().map(|(s, _)| *s).collect());
            call.reply = Some(area);
        }
        let proc = if plan.long { Proc::Nomsg } else { Proc::Msg };
        let mut gather = vec![self.header(call.version, xid, proc, Direction::Call, &lists)?];
        if !plan.long {
            gather.extend(rest.into_iter().flat_map(|range| pieces.gather(range)));
        }
        let (bytes, most) = (gather.iter().map(|piece| piece.len()).sum::<usize>(), self.thresholds().0);
        if bytes > most {
            let text = format!("the call's chunk lists alone exceed the inline threshold of {most} bytes");
            return Err(Error::new(Kind::TooLong, text));
        }
        Ok(Some(WorkRequest::Send { gather, invalidate: None }))
    }

    /// How a call travels, by what is known of its procedure and of the peer.
    fn plan(
        &self,
        call: &mut Call,
        message: &mut Message,
        max: usize,
        max_segment: usize,
    ) -> Result<chunks::CallPlan, Error> {
        // RFC 8166 §8.2.2.3: "a sender MUST NOT reduce a Payload stream when RPCSEC_GSS integrity or encryption services
        // are in use."
        let head = Head::of(&[message.body()]).filter(|head| !head.wrapped);
        call.bound = head.and_then(|Head { program, version, procedure, .. }| {
            let binding = self.bindings.find(program, version, procedure)?;
            Some(Bound { program, version, binding, bounds: false })
        });
        let shape = call.bound.as_ref().map(|bound| bound.binding.call(&[message.body()]));
        let shown = call.bound.as_ref().and_then(|b| self.requester.shown.get(&(b.program, b.version)));
        let standard = call.bound.as_ref().is_some_and(|b| b.binding.origin() == Origin::BuiltIn);
        let one_way = call.fate == Fate::OneWay;
        let (items, results) = match &shape {
            Some(shape) if shown != Some(&Shown::Unknown) => (&shape.items[..], &shape.results[..]),
            _ => (&[][..], &[][..]),
        };
        let max_reply = match shape.as_ref().and_then(|shape| shape.max_results) {
            Some(bytes) if !one_way => bytes.saturating_add(RPC_HEADER_MAX),
            _ => max,
        };
        if let Some(bound) = &mut call.bound {
            bound.bounds = shape.as_ref().is_some_and(|shape| shape.max_results.is_some());
        }
        let needs = Needs {
            items,
            results: if one_way { &[] } else { results },
            max_reply,
            reduces: standard || shown == Some(&Shown::Known),
        };
        let many = self.settings.many_chunks;
        let (send, receive) = self.thresholds();
        let limits = Limits { version: call.version, send, receive, max_segment, many };
        let allowed = match self.characteristics.peer().backward {
            _ if self.role == Role::Client => true,
            _ if call.version == v1::VERSION => self.settings.reverse_chunks,
            Backward::None => {
                let text = "the client has told that it takes no calls back (BRS is NONE)";
                return Err(Error::new(Kind::Peer, text));
            }
            // The draft would have a requester find out. Short messages are what every Version Two peer takes.
            Backward::Unknown | Backward::SizeLimited => false,
            Backward::General => self.settings.reverse_chunks,
        };
        if allowed {
            return chunks::plan_call(message, needs, limits);
        }
        // RFC 8167 §5.3: "When chunks are not implemented, RPC messages in the reverse direction are always sent using a
        // Short Message". A reply that does not fit inline is the peer's to refuse.
        let short = chunks::header_min(call.version) + message.len();
        if short > send {
            let text = format!(
                "a call back of {short} bytes, transport header included, exceeds the inline threshold of {send}, and the \
                 reverse direction is limited to short messages; allow chunks with CLSET_RDMA_REVERSE_CHUNKS or \
                 RPCRDMA_REVERSE_CHUNKS if the peer supports them"
            );
            return Err(Error::new(Kind::TooLong, text));
        }
        chunks::plan_call(message, Needs { items: &[], results: &[], max_reply: 0, reduces: true }, limits)
    }

    /// Exposes memory for at most `most` bytes of the reply: the program's own, if it gave some.
    fn area(
        &self,
        most: usize,
        place: Option<Sink>,
        call: &mut Call,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Area, Error> {
        let sink = match place {
            Some(place) => place,
            None => self.memory.reply_area(most).map_err(|error| {
                let text = format!(
                    "no memory for a reply of up to {most} bytes ({}): lower CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY",
                    os_text(&error)
                );
                Error::new(Error::from(error).kind(), text)
            })?,
        };
        let mut offered = Vec::new();
        for (at, len) in chunks::cut(most, registrar.max_segment()) {
            let segment = registrar.expose_sink(sink.part(at, len))?;
            call.handles.push(segment.handle);
            offered.push((segment, at));
        }
        Ok(Area { sink, offered })
    }

    fn header(
        &self,
        version: u32,
        xid: Xid,
        proc: Proc,
        direction: Direction,
        lists: &Lists,
    ) -> Result<Region, Error> {
        let mut bytes = Vec::with_capacity(header::header_len(version, lists));
        // RFC 8166 §3.3.1: "The granted value MUST NOT be zero": both are at least 1 here.
        let credits = match direction {
            Direction::Call => self.requester.asked,
            Direction::Reply => self.responder.grant,
        };
        header::encode(&mut bytes, version, xid, Credits(credits), proc, direction, lists);
        let mut buf = self.memory.header()?;
        buf.extend(&bytes)?;
        Ok(buf.freeze())
    }

    /// Ends exposures.
    fn release(&mut self, handles: &mut Vec<Handle>, registrar: &mut (impl Registrar + ?Sized)) {
        for handle in handles.drain(..) {
            if let Err(error) = registrar.invalidate(handle) {
                // RFC 8166 §4.5.4: "if it is unable to invalidate a memory region due to an unrecoverable problem, the
                // Requester MUST close the connection to protect that memory from Responder access before the
                // associated RPC transaction is complete."
                self.close(error);
            }
        }
    }

    fn handle_reply(
        &mut self,
        message: &Region,
        header: &Header<'_>,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        let xid = header.xid;
        let Some(call) = self.requester.calls.get(&xid) else {
            // An answer to a call that asked for none: it is done with.
            if let Some(at) = self.requester.past.iter().position(|call| call.xid == xid)
                && let Some(mut call) = self.requester.past.remove(at)
            {
                self.release(&mut call.handles, registrar);
            }
            return;
        };
        // Every call is answered in the version that it was made in, but an error may come in any.
        let answers = call.version == header.version || matches!(header.body, Body::Error(_));
        if call.sequence.is_none() || !answers {
            return;
        }
        let outcome = match header.body {
            // RFC 8166 §4.5: "If errors are detected in the RPC-over-RDMA header of an RPC Reply message, a Requester MUST
            // silently discard the message."
            // RFC 8166 §4.3.1: "Responders MUST leave the Read list empty in all replies."
            Body::Msg { chunks, .. } | Body::Nomsg { chunks } if chunks.read_count() > 0 => return,
            Body::Msg { chunks, payload } => {
                let payload = message.slice(message.len() - payload.len(), payload.len());
                // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
                if payload_xid(std::slice::from_ref(&payload)) != Some(xid) {
                    return;
                }
                Ok((Some(payload), chunks))
            }
            Body::Nomsg { chunks } if chunks.reply().is_none() => return,
            Body::Nomsg { chunks } => Ok((None, chunks)),
            Body::Error(error) => {
                stats::add(Counter::ErrorsReceived, 1);
                Err(error)
            }
            // RFC 8166 §4.6.1: "Requesters MUST silently discard the message." §4.6.2: "Receivers MUST silently
            // discard" RDMA_DONE.
            Body::Msgp | Body::Done | Body::Optional { .. } => return,
        };
        let Some(mut call) = self.requester.calls.remove(&xid) else { return };
        if outcome.is_ok() {
            // RFC 8166 §3.3.1: "The granted value MUST NOT be zero": a zero is taken as one, or nothing moves again.
            // RFC 8167 §4.1: "it is not possible for the receiver to tell with certainty whether the header credit value is a
            // request or grant. In such cases, the receiver MUST ignore the header's credit value.": so it is for an error.
            self.requester.granted = header.credits.0.max(1);
            self.requester.told = true;
        }
        self.requester.in_flight -= 1;
        if call.fate != Fate::Awaited {
            self.requester.abandoned -= 1;
        }
        // RFC 8166 §4.4.1: "the Requester must not access these memory regions while the Responder has access to them."
        self.release(&mut call.handles, registrar);
        if let Some(sequence) = call.sequence {
            self.give_back(sequence, registrar);
            self.characteristics.replied(sequence);
        }
        if call.fate == Fate::Awaited {
            let outcome = match outcome {
                Ok((inline, lists)) => self.rebuild(xid, call, inline, &lists),
                Err(error) => Err(self.explain(error, &call)),
            };
            self.output.push_back(Output::Done { xid, outcome });
        }
    }

    /// The RPC reply in stream order: what came inline or in the Reply chunk, with what came in Write chunks.
    fn rebuild(
        &mut self,
        xid: Xid,
        call: Call,
        inline: Option<Region>,
        lists: &ChunkLists<'_>,
    ) -> Result<Vec<Region>, Error> {
        let stream = match (inline, lists.reply()) {
            (Some(payload), _) => vec![payload],
            (None, Some(returned)) => {
                let none = || Error::new(Kind::Peer, "the reply lies in a Reply chunk, but none was offered");
                call.reply.ok_or_else(none)?.take(returned.iter())?
            }
            (None, None) => return Err(Error::new(Kind::Peer, "the reply has no payload")),
        };
        if payload_xid(&stream) != Some(xid) {
            return Err(Error::new(Kind::Peer, format!("the Reply chunk does not hold the reply {xid}")));
        }
        if lists.write_count() > call.writes.len() {
            return Err(Error::new(Kind::Peer, "the reply returns more Write chunks than were offered"));
        }
        let Some(bound) = call.bound.filter(|_| !call.writes.is_empty()) else { return Ok(stream) };
        // A Write list that does not come back counts as unused: some responders leave it out.
        let mut returned = lists.writes();
        let mut chunks = Vec::with_capacity(call.writes.len());
        for area in call.writes {
            chunks.push(area.take(returned.next().into_iter().flat_map(|chunk| chunk.iter()))?);
        }
        let lengths: Vec<Option<usize>> =
            chunks.iter().map(|pieces: &Vec<Region>| Some(pieces.iter().map(|p| p.len()).sum())).collect();
        let reduced = {
            let slices: Vec<&[u8]> = stream.iter().map(|piece| &piece[..]).collect();
            // RFC 8166 §6.1: "A Responder reduces a non-DDP-eligible result data item. The Requester MUST terminate the
            // pending RPC transaction and report an appropriate permanent error to the RPC consumer."
            bound.binding.reduced(&slices, &lengths)?
        };
        if reduced.unreduced {
            self.unreduced(&bound)?;
        } else if !reduced.placed.is_empty() {
            self.requester.shown.insert((bound.program, bound.version), Shown::Known);
        }
        if reduced.placed.is_empty() {
            return Ok(stream);
        }
        let mut pad = self.memory.header()?;
        pad.extend(&[0; 3])?;
        Ok(chunks::restore(stream, &reduced.placed, &chunks, &pad.freeze()))
    }

    /// The responder did not use a Write chunk for a result that is eligible.
    fn unreduced(&mut self, bound: &Bound) -> Result<(), Error> {
        let Bound { program, version, .. } = bound;
        if bound.binding.origin() == Origin::BuiltIn {
            // RFC 8166 §6.1: "A Responder does not reduce a DDP-eligible result data item into an available Write chunk.
            // The Requester MUST terminate the pending RPC transaction and report an appropriate permanent error to the RPC
            // consumer."
            let text = "the reply has a result outside of the Write chunk that was there for it";
            return Err(Error::new(Kind::Peer, text));
        }
        // A binding that is not a standard may be known at our end only. The data is here, whichever way it came.
        if self.requester.shown.insert((*program, *version), Shown::Unknown) != Some(Shown::Unknown) {
            log_warn!(
                "program {program} version {version}: the server has no binding for it; its results come without Write chunks"
            );
        }
        Ok(())
    }

    /// The reply to call `sequence` has come: the responder is past the one-way calls before it.
    ///
    /// Nothing else tells that a call without reply is done, so its credit is free. But a responder that serves several
    /// requests at a time (Linux) may still pull its Read chunks: they stay exposed until that is known to be done.
    fn give_back(&mut self, sequence: u64, registrar: &mut (impl Registrar + ?Sized)) {
        self.requester.replies += 1;
        self.forget_past(registrar);
        if self.requester.abandoned == 0 {
            return;
        }
        let past = |c: &Call| c.fate == Fate::OneWay && c.sequence.is_some_and(|s| s < sequence);
        let mut done: Vec<(u64, Xid)> = (self.requester.calls.iter().filter(|(_, c)| past(c)))
            .map(|(xid, call)| (call.sequence.unwrap_or_default(), *xid))
            .collect();
        done.sort_unstable_by_key(|(sequence, _)| *sequence);
        for (_, xid) in done {
            let Some(mut call) = self.requester.calls.remove(&xid) else { continue };
            match read_by_peer(&call.handles, registrar) {
                Some(true) => self.release(&mut call.handles, registrar),
                read if self.makes_room(call.pulled, read.is_none(), registrar) => {
                    let Call { handles, pulled: bytes, .. } = call;
                    self.requester.past.push_back(Past {
                        xid,
                        handles,
                        bytes,
                        since: self.requester.replies,
                    });
                }
                _ => {
                    self.requester.calls.insert(xid, call);
                    continue;
                }
            }
            self.requester.abandoned -= 1;
            self.requester.in_flight -= 1;
        }
    }

    /// Ends the exposures of one-way calls that are read by now, or old enough where the device cannot tell.
    fn forget_past(&mut self, registrar: &mut (impl Registrar + ?Sized)) {
        let now = self.requester.replies;
        for mut call in std::mem::take(&mut self.requester.past) {
            let old = now - call.since >= PAST_REPLIES;
            if read_by_peer(&call.handles, registrar).unwrap_or(old) {
                self.release(&mut call.handles, registrar);
            } else {
                self.requester.past.push_back(call);
            }
        }
    }

    /// Whether `bytes` more may stay exposed without a credit. `ends_oldest`: the oldest give way to it.
    fn makes_room(
        &mut self,
        bytes: usize,
        ends_oldest: bool,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> bool {
        loop {
            let Requester { past, .. } = &mut self.requester;
            let held: usize = past.iter().map(|call| call.bytes).sum();
            if past.is_empty() || (past.len() < PAST_MAX && held + bytes <= PAST_BYTES) {
                return true;
            }
            match past.pop_front() {
                Some(mut oldest) if ends_oldest => self.release(&mut oldest.handles, registrar),
                oldest => {
                    past.extend(oldest);
                    past.rotate_right(1);
                    return false;
                }
            }
        }
    }

    fn explain(&mut self, error: RdmaError, call: &Call) -> Error {
        let text = match error {
            RdmaError::Version { low, high } => two::versions_differ(low, high, &call.version.to_string()),
            RdmaError::InvalidOption => String::from("the peer took the call for a message of an extension"),
            RdmaError::BadHeader => {
                let name = error.name(call.version);
                let mut text = format!("the peer answered {name}: it cannot use the chunks of this call");
                let reduced = !call.writes.is_empty() || call.pulled > 0;
                if let Some(Bound { program, version, binding, .. }) = call.bound.as_ref().filter(|_| reduced)
                    && binding.origin() != Origin::BuiltIn
                {
                    self.requester.shown.insert((*program, *version), Shown::Unknown);
                    text += &format!(
                        "; perhaps the peer has no binding for program {program} version {version}, or another one: \
                         further calls do without"
                    );
                }
                let room = match &call.reply {
                    Some(area) => {
                        let room: u64 = area.offered.iter().map(|(s, _)| u64::from(s.length)).sum();
                        Some(format!("the Reply chunk of {room} bytes"))
                    }
                    None if call.writes.is_empty() => {
                        Some(format!("the inline threshold of {} bytes", self.thresholds().1))
                    }
                    None => None,
                };
                if let Some(room) = room {
                    text += &format!("; its reply probably exceeds {room}");
                    // Who made the room so small can make it larger.
                    text += &match call.bound.as_ref().filter(|bound| bound.bounds) {
                        Some(Bound { program, version, .. }) => format!(
                            ", the most that the binding of program {program} version {version} at this end allows for: \
                             is it right?"
                        ),
                        None if self.role == Role::Client => {
                            ": raise CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY".into()
                        }
                        None => {
                            ": raise CLSET_RDMA_MAXREPLY, and let the reverse direction use chunks".into()
                        }
                    };
                }
                if call.pulled > 0 {
                    text += "; or the call is longer than it accepts (RPCRDMA_MAX_CALL there)";
                }
                text
            }
        };
        Error::new(Kind::Peer, text)
    }

    // ------------------------------------------------------------------------------------------------ responder

    /// Whether `poll_request` would return one.
    pub fn request_ready(&self) -> bool {
        matches!(self.responder.queue.front(), Some(Pending { state: State::Ready(_), .. }))
    }

    /// Requests received and not yet handed up, ready or not.
    pub fn requests_queued(&self) -> usize {
        self.responder.queue.len()
    }

    /// The oldest request, when all of it is here.
    pub fn poll_request(&mut self) -> Option<Request> {
        if !self.request_ready() {
            return None;
        }
        let Pending { id, xid, chunks, staged, state, .. } = self.responder.queue.pop_front()?;
        let State::Ready(Whole { message, placed }) = state else { return None };
        let (binding, wrapped) = (chunks.binding.clone(), chunks.wrapped);
        self.responder.deferred = None;
        self.responder.handed.insert(id, chunks);
        self.responder.staged -= staged;
        self.start_pulls();
        Some(Request { id, xid, message, binding, wrapped, placed })
    }

    /// Bytes that RDMA Reads have asked for so far, if some are under way.
    pub fn pulling(&self) -> Option<u64> {
        (!self.responder.reads.is_empty()).then_some(self.responder.asked)
    }

    /// Whether `resume` is to be tried again: calls, ours or the peer's, wait for memory that others hold.
    pub fn waits(&self) -> bool {
        self.closed.is_none() && (self.requester.lacks_room || self.responder.waits)
    }

    /// Whether a Call waits for memory that other connections hold. `resume` tries again.
    pub fn waits_for_memory(&self) -> bool {
        self.responder.waits
    }

    /// Goes on with what had to wait for memory, if there is some now.
    pub fn resume(&mut self, registrar: &mut (impl Registrar + ?Sized)) {
        if self.closed.is_none() {
            self.start_pulls();
            self.transmit_waiting(registrar);
        }
    }

    /// Starts no Reads of further Calls from now on, or starts them again: a peer that does not take replies gets no memory for
    /// more.
    pub fn hold(&mut self, held: bool) {
        if std::mem::replace(&mut self.responder.held, held) && !held && self.closed.is_none() {
            self.start_pulls();
        }
    }

    /// Answers a request with the RPC Reply `message` (first word: the XID).
    ///
    /// # Errors
    /// `TooLong` when the reply fits nowhere: the requester is told with ERR_CHUNK. `Invalid` when the request was
    /// answered before, or the message has another XID (the request can still be answered). The reason of the close
    /// when the connection is closed.
    pub fn reply(&mut self, id: RequestId, message: impl Into<Message>) -> Result<(), Error> {
        let mut message = message.into();
        let deferred =
            self.responder.deferred.take_if(|(deferred, _)| *deferred == id).map(|(_, chunks)| chunks);
        let Some(chunks) = deferred.or_else(|| self.responder.handed.remove(&id)) else {
            return Err(Error::new(Kind::Invalid, "the request was answered before"));
        };
        // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
        if first_xid(message.body()) != Some(chunks.xid) {
            let text = format!("the reply does not begin with the XID {} of its call", chunks.xid);
            self.responder.handed.insert(id, chunks);
            return Err(Error::new(Kind::Invalid, text));
        }
        if let Some(error) = &self.closed {
            return Err(error.clone());
        }
        // Before the reply, which gives the credit back.
        self.replenish();
        // RFC 8166 §4.3.2: "When a Requester provides a Write list, the Responder MUST push data corresponding to
        // DDP-eligible result data items to Requester memory referenced in the Write list."
        let items = match &chunks.binding {
            Some(binding) if !chunks.writes.is_empty() => binding.reply(&[message.body()]).items,
            _ => Vec::new(),
        };
        let Chunks { version, ref writes, ref reply, .. } = chunks;
        let (max, send) = (self.responder.transfer_max, self.reply_limit(version));
        let plan =
            match chunks::plan_reply(version, &mut message, &items, writes, reply.as_deref(), send, max) {
                Ok(plan) => plan,
                Err(error) => {
                    self.send_error((chunks.xid, chunks.version, RdmaError::BadHeader));
                    return Err(error);
                }
            };
        stats::add(Counter::BytesCopied, plan.copied as u64);
        let proc = if plan.inline.is_some() { Proc::Msg } else { Proc::Nomsg };
        let header = match self.header(version, chunks.xid, proc, Direction::Reply, &plan.lists) {
            Ok(header) => header,
            Err(error) => {
                // RFC 8166 §4.5.4: "If a Responder is unable to construct and transmit an RPC Reply or RPC-over-RDMA
                // error message, the Responder MUST close the connection to signal to the Requester that a reply was
                // lost."
                self.close(error.clone());
                return Err(error);
            }
        };
        let pieces = message.freeze();
        for push in plan.pushes {
            let gather = push.from.into_iter().flat_map(|range| pieces.gather(range)).collect();
            self.output.push_back(Output::Post(WorkRequest::Write { gather, to: push.to }));
        }
        let mut gather = vec![header];
        gather.extend(plan.inline.into_iter().flatten().flat_map(|range| pieces.gather(range)));
        let invalidate = chunks.handle.filter(|_| self.may_invalidate(version));
        self.output.push_back(Output::Post(WorkRequest::Send { gather, invalidate }));
        Ok(())
    }

    /// Longest Send to the requester of a Call of this version.
    fn reply_limit(&self, version: u32) -> usize {
        if version == v2::VERSION { self.characteristics.send_limit() } else { self.send }
    }

    /// Whether a Reply may invalidate the handle of its Call.
    fn may_invalidate(&self, version: u32) -> bool {
        if version == v1::VERSION {
            return self.invalidate;
        }
        // The draft of the characteristics, section 3.2: "false" allows plain Sends only. Ours tells what our own device can
        // do. Which handle it may be is not said: one that the Call itself names, as in RFC 8797.
        self.settings.remote_invalidation && self.characteristics.peer().remote_invalidation
    }

    /// The request has no reply yet, and may never get one (a one-way call): its Receive is free again. The latest such
    /// request can still be answered until the next one is handed up.
    pub fn defer(&mut self, id: RequestId) {
        if let Some(chunks) = self.responder.handed.remove(&id)
            && self.responder.deferred.as_ref().is_none_or(|(other, _)| *other < id)
        {
            self.responder.deferred = Some((id, chunks));
        }
        self.replenish();
    }

    /// The request gets no reply: its Receive is free again.
    pub fn discard(&mut self, id: RequestId) {
        self.responder.handed.remove(&id);
        self.replenish();
    }

    fn handle_call(
        &mut self,
        message: &Region,
        header: &Header<'_>,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        self.responder.transfer_max = registrar.max_segment();
        let Header { xid, version, .. } = *header;
        let (lists, inline) = match header.body {
            Body::Msg { chunks, payload } => (chunks, payload.len()),
            Body::Nomsg { chunks } => (chunks, 0),
            // RFC 8166 §4.6.1: "Responders SHOULD reply with an RDMA_ERROR procedure, setting the rdma_err field to
            // ERR_CHUNK"
            Body::Msgp => return self.send_error((xid, version, RdmaError::BadHeader)),
            // RFC 8166 §4.2.4: "A Responder MUST silently discard RDMA_ERROR procedures."
            // RFC 8166 §4.6.2: "Receivers MUST silently discard RDMA_DONE messages."
            Body::Done | Body::Error(_) | Body::Optional { .. } => return,
        };
        // RFC 8167 §5.3: "If a reverse-direction requester provides a non-empty chunk list to a Responder that does not
        // support chunks, the Responder MUST reply with an RDMA_ERROR message with rdma_err field set to ERR_CHUNK."
        let chunks =
            self.role == Role::Server || (self.responder.receives > 0 && self.settings.reverse_chunks);
        if !chunks && !lists.is_empty() {
            return self.send_error((xid, version, RdmaError::BadHeader));
        }
        let id = RequestId(self.responder.next);
        self.responder.next += 1;
        let chunks = Chunks {
            xid,
            version,
            writes: lists.writes().map(|c| c.iter().collect()).collect(),
            reply: lists.reply().map(|c| c.iter().collect()),
            handle: only_handle(&lists),
            binding: None,
            wrapped: false,
        };
        let payload = message.slice(message.len() - inline, inline);
        // RFC 8166 §8.1.4: "A Responder is not obliged to pull Read chunks that are unreasonably large. The Responder can
        // use an RDMA_ERROR response to terminate RPCs with unreadable Read chunks."
        let Ok((assembly, pulls)) = Assembly::new(lists.reads(), inline, self.settings.max_call) else {
            return self.send_error((xid, version, RdmaError::BadHeader));
        };
        // Read chunks without a byte need no Read, and would wait for one for ever.
        let mut pending =
            Pending { id, xid, chunks, inline: payload, staged: 0, state: State::Ready(Whole::default()) };
        if pulls.is_empty() {
            if !self.complete(&mut pending, &assembly, None) {
                return self.send_error((xid, version, RdmaError::BadHeader));
            }
        } else if registrar.read_depth() > 0 {
            let most = self.responder.transfer_max.min(PULL_MAX);
            let parts = |Pull { at, from }| {
                transfers(from, most).map(move |(done, from)| Pull { at: at + done, from })
            };
            let rest = pulls.into_iter().flat_map(parts).collect();
            pending.state = State::Pulling { assembly, staging: None, rest, left: 0 };
        } else {
            return self.send_error((xid, version, RdmaError::BadHeader));
        }
        self.responder.queue.push_back(pending);
        self.start_pulls();
    }

    /// The Call is whole: finds its binding and its pieces. False when it must be refused.
    fn complete(&self, pending: &mut Pending, assembly: &Assembly, staging: Option<Buf>) -> bool {
        let inline = pending.inline.clone();
        let (message, placed) = match staging {
            Some(staging) => assembly.assemble(inline, staging),
            None => (vec![inline], None),
        };
        // RFC 8166 §4.5.2: "the value of the rdma_xid field does not match the value of the XID field in the
        // accompanying RPC message" is an XDR error.
        if payload_xid(&message) != Some(pending.xid) {
            return false;
        }
        let slices: Vec<&[u8]> = message.iter().map(|piece| &piece[..]).collect();
        // What is no RPC Call is the upper layer's to refuse.
        if let Some(head) = Head::of(&slices) {
            let Head { program, version, procedure, wrapped, .. } = head;
            let binding = self.bindings.find(program, version, procedure).filter(|_| !wrapped);
            if assembly.normal().next().is_some()
                && !may_be_reduced(&slices, wrapped, binding.as_ref(), assembly)
            {
                return false;
            }
            (pending.chunks.binding, pending.chunks.wrapped) = (binding, wrapped);
        }
        drop(slices);
        pending.state = State::Ready(Whole { message, placed });
        true
    }

    /// Asks for more of the Calls, the oldest first, as far as the peer answers and memory allows.
    fn start_pulls(&mut self) {
        let Responder { queue, staged, reads, asked, window, waits, held, .. } = &mut self.responder;
        let mut first = true;
        let mut under_way: usize = reads.iter().sum();
        *waits = false;
        for pending in queue {
            if let State::Pulling { assembly, staging, rest, left } = &mut pending.state {
                if *held && staging.is_none() {
                    return;
                }
                while let Some(Pull { at, from }) = rest.front().copied() {
                    let bytes = from.length as usize;
                    if under_way > 0 && under_way + bytes > *window {
                        return;
                    }
                    if !first && *staged + bytes > self.settings.max_call {
                        return;
                    }
                    let sink = match staging {
                        Some(sink) => sink,
                        None => match self.memory.staging(assembly.staging) {
                            Ok(sink) => staging.insert(sink),
                            // Out of memory with the Call half received: nothing can be answered in order any more.
                            Err(error) => return self.close(error.into()),
                        },
                    };
                    if !self.memory.may_pull(sink, bytes, first) {
                        *waits = true;
                        return;
                    }
                    let read = WorkRequest::Read { id: WorkId(pending.id.0), sink: sink.clone(), at, from };
                    self.output.push_back(Output::Post(read));
                    rest.pop_front();
                    reads.push_back(bytes);
                    *left += 1;
                    *asked += bytes as u64;
                    under_way += bytes;
                    *staged += bytes;
                    pending.staged += bytes;
                }
            }
            first = false;
        }
    }

    /// An RDMA Read is done: the oldest one.
    pub fn handle_read(&mut self, id: WorkId) {
        let Responder { queue, reads, window, .. } = &mut self.responder;
        let Some(at) = queue.iter().position(|p| p.id.0 == id.0) else { return };
        let State::Pulling { rest, left, .. } = &mut queue[at].state else { return };
        *window = (*window + reads.pop_front().unwrap_or(0)).min(WINDOW_MAX);
        *left = left.saturating_sub(1);
        if *left == 0 && rest.is_empty() {
            self.pulled(at);
        }
        self.start_pulls();
    }

    /// All of a Call is here.
    fn pulled(&mut self, at: usize) {
        let Some(mut pending) = self.responder.queue.remove(at) else { return };
        let State::Pulling { assembly, staging, .. } =
            std::mem::replace(&mut pending.state, State::Ready(Whole::default()))
        else {
            return;
        };
        let Some(staging) = staging.and_then(|sink| sink.into_buf(assembly.staging).ok()) else {
            let error = Error::new(Kind::Protocol, "the device still holds memory of finished RDMA Reads");
            return self.close(error);
        };
        if self.complete(&mut pending, &assembly, Some(staging)) {
            self.responder.queue.insert(at, pending);
        } else {
            self.responder.staged -= pending.staged;
            self.send_error((pending.xid, pending.chunks.version, RdmaError::BadHeader));
        }
    }

    /// Answers a message that is not handed up. Its Receive is free again before the peer hears of it.
    fn send_error(&mut self, answer: Answer) {
        self.replenish();
        // RFC 8166 §4.5: "The rdma_xid field MUST contain the same XID that was in the rdma_xid field in the failing
        // request" and "The rdma_vers field MUST contain the same version that was in the rdma_vers field in the
        // failing request".
        let mut bytes = Vec::new();
        header::encode_error(&mut bytes, answer, Credits(self.responder.grant));
        if self.send_bytes(&bytes) {
            stats::add(Counter::ErrorsSent, 1);
        }
    }

    // ----------------------------------------------------------------------------------------------------- both

    /// A Send of the peer has arrived: `message` is what the Receive holds.
    ///
    /// `invalidated`: the handle of ours that came with it (Send with Invalidate).
    pub fn handle_receive(
        &mut self,
        message: Buf,
        invalidated: Option<Handle>,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        if self.closed.is_some() {
            return;
        }
        self.characteristics.consumed();
        let message = message.freeze();
        let header = header::decode(&message, self.settings.versions);
        if let Ok(header) = &header {
            self.agree(header);
        }
        let direction = header.as_ref().map(|header| self.direction(header));
        if let Some(handle) = invalidated {
            // RFC 8797 §4.1: "Each RDMA Send with Invalidate MUST invalidate an STag associated only with the Transaction
            // ID (XID) in the rdma_xid field of the RPC-over-RDMA Transport Header it carries."
            let call = header.as_ref().ok().and_then(|header| self.requester.calls.get(&header.xid));
            let call = call.filter(|_| direction == Ok(Direction::Reply));
            if !call.is_some_and(|call| call.handles.contains(&handle)) {
                let text = "the peer invalidated a handle that the call of its reply did not name";
                return self.close(Error::new(Kind::Protocol, text));
            }
        }
        match header {
            Ok(header) => match (header.body, direction) {
                (Body::Optional { kind, info }, _) => self.handle_optional(&header, kind, info, registrar),
                (Body::Error(_), _) if self.characteristics.refused(header.xid) => {}
                (_, Ok(Direction::Call)) => self.handle_call(&message, &header, registrar),
                _ => self.handle_reply(&message, &header, registrar),
            },
            // RFC 8166 §4.5: "If other errors are detected in the RPC-over-RDMA header of an RPC Call message, a Responder
            // MUST send an RDMA_ERROR message back to the Requester." In a Reply they are silently discarded.
            Err(error) => {
                if let Some(answer) = error.answer()
                    && self.responder.receives > 0
                    && !self.transmitted(answer.0)
                {
                    self.send_error(answer);
                }
            }
        }
        self.replenish();
        // Before calls that may lead to calls back, which the peer is told here that it may make.
        self.speak();
        self.transmit_waiting(registrar);
    }

    /// Which way a message goes: as it says itself, or else by the context.
    fn direction(&self, header: &Header<'_>) -> Direction {
        header.direction.unwrap_or_else(|| {
            // What says nothing of itself ends a call of ours, or is what the opener of a connection expects: a reply.
            if self.role == Role::Client || self.transmitted(header.xid) {
                Direction::Reply
            } else {
                Direction::Call
            }
        })
    }

    /// The connection is gone: every call ends, every request that is not ready is dropped.
    pub fn handle_closed(&mut self, error: Error) {
        if self.closed.is_none() && self.may_fall_back() {
            // Nothing was sent yet but the offer, which this end of the connection may be the answer to.
            self.output.clear();
            self.closed = Some(error);
            return;
        }
        if self.closed.is_some() && self.requester.calls.is_empty() {
            return;
        }
        self.requester.past.clear();
        for (xid, call) in self.requester.calls.drain() {
            if call.fate == Fate::Awaited || call.sequence.is_none() {
                let kind = if call.sequence.is_some() { Kind::ConnectionLost } else { Kind::NotSent };
                let error = Error::new(kind, error.text().to_owned());
                self.output.push_back(Output::Done { xid, outcome: Err(error) });
            }
        }
        self.requester.waiting.clear();
        // What had come before is served, as far as its turn has come: a call without reply has no other chance.
        let ready = |pending: &&Pending| matches!(pending.state, State::Ready(_));
        let ready = self.responder.queue.iter().take_while(ready).count();
        self.responder.queue.truncate(ready);
        self.output.retain(|output| matches!(output, Output::Done { .. }));
        self.closed = Some(error);
    }

    /// Asks for the end of the connection, once; the driver answers with `handle_closed`.
    fn close(&mut self, error: Error) {
        if !self.closing {
            self.closing = true;
            self.output.push_back(Output::Close(error));
        }
    }

    /// Why the connection is closed, if it is.
    pub fn closed(&self) -> Option<&Error> {
        self.closed.as_ref()
    }
}

/// Whether the peer has read all that is behind the handles; `None` when that is not known of one of them.
fn read_by_peer(handles: &[Handle], registrar: &(impl Registrar + ?Sized)) -> Option<bool> {
    handles.iter().try_fold(true, |all, handle| Some(registrar.was_read(*handle)? && all))
}

/// The XID with which an RPC message begins; its word may lie in several pieces.
fn payload_xid(message: &[Region]) -> Option<Xid> {
    let mut bytes = message.iter().flat_map(|piece| piece.iter().copied());
    let word = [bytes.next()?, bytes.next()?, bytes.next()?, bytes.next()?];
    Some(Xid(u32::from_be_bytes(word)))
}

/// The XID with which a message of ours begins.
fn first_xid(message: &[u8]) -> Option<Xid> {
    message.first_chunk().map(|word| Xid(u32::from_be_bytes(*word)))
}

/// The handle that a Call names, if all its segments name the same one.
fn only_handle(lists: &ChunkLists<'_>) -> Option<Handle> {
    let reads = lists.reads().map(|read| read.target.handle);
    let writes = lists.writes().chain(lists.reply()).flat_map(|chunk| chunk.iter()).map(|s| s.handle);
    let mut handles = reads.chain(writes);
    let first = handles.next()?;
    handles.all(|handle| handle == first).then_some(first)
}

/// Whether every normal Read chunk of a whole Call is one eligible item, as far as its binding can tell.
fn may_be_reduced(call: &[&[u8]], wrapped: bool, binding: Option<&Binding>, chunks: &Assembly) -> bool {
    // RFC 8166 §8.2.2.3: "Effectively, no data item is DDP-eligible in this situation".
    if wrapped {
        return false;
    }
    let Some(shape) = binding.map(|binding| binding.call(call)) else { return true };
    // RFC 8166 §3.4.5.2: the chunk may contain the roundup padding. §3.4.4.4: "a chunk MUST contain exactly one XDR data
    // item."
    let is_item = |position: usize, bytes: usize| {
        let item = shape.items.iter().find(|item| item.position == position);
        item.is_some_and(|item| bytes == item.length || bytes == item.length.next_multiple_of(4))
    };
    // What was not understood may hold any item.
    !shape.complete || chunks.normal().all(|(position, bytes)| is_item(position, bytes))
}

/// The parts of `whole` that are moved one by one, each at most `max` bytes, with their places in it.
fn transfers(whole: Segment, max: usize) -> impl Iterator<Item = (usize, Segment)> {
    chunks::cut(whole.length as usize, max).map(move |(at, length)| {
        // An offset is opaque: one that wraps is the peer's mistake, found by its device.
        let offset = whole.offset.wrapping_add(at as u64);
        (at, Segment { length: length as u32, offset, ..whole })
    })
}

#[cfg(test)]
mod tests;
