//! Software iWARP: a queue pair over a connected TCP socket, in user space.
//!
//! Owns the receiving half, the handles that the peer may use, and the life of the connection from the MPA Request to
//! the first error. The sending half is `transmit`; `mpa` and `ddp` hold the bytes. The socket stays the caller's: it
//! is never closed, shut down or put into another mode here, and may be in blocking mode.
//!
//! **Copies.** A payload goes from the socket straight into its place by one scattered read; only what was read ahead
//! is copied, and read-ahead is sized so that large FPDUs arrive without it. FPDUs below 8 KiB are copied once,
//! while their CRC is computed. Consequence: a large FPDU is placed before its CRC is known. RFC 5044 §8 has the FPDU
//! verified first; a wrong CRC ends the connection before anything of it is delivered, and nothing is ever written
//! outside memory that this peer may write. (The Linux siw driver does the same.)
//!
//! **Handles** are random, belong to one connection, name exactly the bytes given, and carry one right. Taking one
//! back while the peer is being sent the bytes behind it ends the connection, unless all the rest is framed already:
//! then that rest goes out from a private copy.
//!
//! **Fork.** Sending goes on in parent and child (see `transmit::Shared`); a child never sends a Terminate. Receiving
//! is for one process: the first that reads after the fork keeps that part, and the others notice. Calls are for one
//! process too, which [`QueuePair::claim`] tells before anything is sent: XIDs, credits and handles are in its memory.
//!
//! Read first: RFC 5040 §5 and §7, RFC 5041 §7, RFC 5044 §7.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::config::Crc;
use crate::error::{Error, Kind, os_text};
use crate::fork;
use crate::memory::shared::Shown;
use crate::memory::{Areas, Buf, IoVecMut, Memory, Region, Regions, Sink};
use crate::process;
use crate::provider::{
    self, Completion, Device, Doze, Limits, NAP, NAP_BYTES, QueuePair, Traits, Way, WorkRequest,
};
use crate::socket;
use crate::stats::{self, Counter};
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Segment};

use super::local::{self, Answer, Asked, Offered, Rings, Sharing};
use ddp::{Fault, Header, Opcode, ReadRequest};
use mpa::{Offer, Refusal, StartFrame, Terms, Which};
use stream::Stream;
use transmit::{Read, Shared, Transmit, Work};

pub mod ddp;
pub mod mpa;
mod stream;
mod transmit;

/// FPDUs below this length are gathered in the read-ahead buffer; larger ones go straight to their place.
const SMALL: usize = 8 << 10;
/// The read-ahead buffer, bytes. Longer than any FPDU below [`SMALL`] and a read-ahead together.
const BUFFER: usize = 64 << 10;
/// Most read-ahead buffers that are kept for the next connection that has something to read.
const BUFFERS: usize = 16;
/// How far one system call reads ahead where FPDUs are large; where they are small it fills the buffer.
const AHEAD: usize = 2 << 10;
/// Up to this length an FPDU is read with its header, if the one before would have been: a copy costs less than a system
/// call.
const AHEAD_MOST: usize = 16 << 10;
/// Bytes that one `poll` receives at most, so that a peer that writes as fast as we read cannot hold the caller.
const POLL: usize = 4 << 20;
/// What comes in one go counts for so much, at least: through memory a peer may give byte after byte as fast as they are taken.
const POLL_LEAST: usize = 64 << 10;
/// How often it is looked at how long a sleep on the socket lasts, in nanoseconds.
const LOOK: u64 = 100_000_000;
/// Longest exposure, Read and Write.
const MAX_SEGMENT: u32 = 1 << 30;
/// Whether the peer may invalidate every handle that it gets: a handle is a number in a table of ours, whatever it
/// stands for (RFC 8797 §4.1, the R flag).
pub const REMOTE_INVALIDATION: bool = true;
/// Most private data that a caller may hand us: what siw can receive, less the enhanced part.
const MAX_PRIVATE_DATA: usize = 248;

/// What the layers above know of it.
pub static TRAITS: Traits = Traits {
    name: "iwarp",
    title: "software iWARP",
    socket: true,
    locked_memory: false,
    own_memory: false,
    one_event: false,
    place_min: 0,
    loopback: true,
};

/// Software iWARP, the device that every machine has.
pub struct Software;

impl Device for Software {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn connect(
        &self,
        way: Way,
        options: &provider::Options,
        _areas: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error> {
        match way {
            Way::Socket(fd) => Ok(Box::new(Iwarp::initiator(fd, Options::of(options, fd))?)),
            Way::Address(_) => Err(way.unknown()),
        }
    }

    fn accept(&self, socket: RawFd, options: &provider::Options) -> Result<Box<dyn QueuePair>, Error> {
        Ok(Box::new(Iwarp::responder(socket, Options::of(options, socket))?))
    }
}

/// What a queue pair offers to its peer.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ask for CRCs. They are off only when both ends do not ask.
    ///
    /// RFC 5044 §4.4: "The default configuration for a connection MUST be to use CRCs."
    pub crc: bool,
    /// Reads of the peer that we serve at a time.
    pub ird: u16,
    /// Reads of ours that we want outstanding.
    pub ord: u16,
    /// RFC 8797 private data, at most 248 bytes.
    pub private_data: Vec<u8>,
    /// MPA revision of the Request: 2, or 1 for a peer that closed on a Request of revision 2.
    pub revision: u8,
    /// Longest FPDU to send, if shorter than the path's segments.
    pub max_fpdu: Option<usize>,
    /// Whether the stream may go through memory that is shared with the peer.
    pub sharing: Sharing,
    /// Whether a thread may then wait for the peer without sleeping.
    pub spins: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            crc: true,
            ird: 16,
            ord: 16,
            private_data: Vec::new(),
            revision: 2,
            max_fpdu: None,
            sharing: Sharing::Never,
            spins: false,
        }
    }
}

impl Options {
    /// What the MPA startup of a socket offers.
    pub fn of(options: &provider::Options, fd: RawFd) -> Options {
        // The CRC protects what TCP's checksum lets through on a wire; towards this host's own address there is no wire,
        // and the kernel computes no TCP checksum there either.
        let crc = match options.crc {
            Crc::Yes => true,
            Crc::No => false,
            Crc::Auto => !socket::own_host(fd),
        };
        let private_data = PrivateData {
            remote_invalidation: REMOTE_INVALIDATION && options.remote_invalidation,
            send_size: options.inline,
            receive_size: options.inline,
        };
        Options { crc, private_data: private_data.encode().to_vec(), ..Options::default() }
    }
}

/// An iWARP queue pair. Dropping it releases the memory that it holds and leaves the socket alone.
pub struct Iwarp {
    stream: Stream,
    /// A thread may sleep in recvfrom(2) on the socket, for [`NAP`].
    naps: bool,
    /// When it was seen last that the sleep ends after that time, by [`stats::tick`]; 0: never yet.
    patience_seen: u64,
    /// Of the two ends of a connection that may share memory: what the one waits for, or the other.
    asked: Option<Asked>,
    offered: Option<Box<Offered>>,
    options: Options,
    stage: Stage,
    generation: u64,
    /// We were forked from the process that made the connection.
    forked: bool,
    /// It has received something in this process.
    received: bool,
    shared: Shared,
    transmit: Transmit,
    receive: Receive,
    exposed: FxHashMap<u32, Exposed>,
    /// Bytes that went beside the stream, from outboxes, either way.
    beside: u64,
    receives: VecDeque<Posted>,
    /// Where Receives get their memory that have none yet.
    memory: Option<Arc<Memory>>,
    completions: VecDeque<Completion>,
    /// Bytes of our own Reads whose segments have come.
    pulled: u64,
    /// Reads of the peer that we serve at a time, as agreed.
    ird: usize,
    private_data: Vec<u8>,
    tokens: Tokens,
    /// Sending failed: what has arrived before is still delivered, then this ends the connection.
    broken: Option<Error>,
    failed: Option<Error>,
    /// What [`QueuePair::unsent`] says after the end.
    left: usize,
    /// Payload bytes copied in user space since the start.
    pub copied_bytes: u64,
    /// System calls that moved bytes since the start.
    pub syscalls: u64,
}

// As a byte of its own: each message asks.
#[repr(u8)]
enum Stage {
    AwaitRequest,
    AwaitReply,
    /// The Reply, how much of it the socket has taken, and what comes then.
    SendReply(Vec<u8>, usize, Result<Terms, Error>),
    /// For the peer to share memory, or not to.
    AwaitAnswer(Terms),
    /// For the peer, which has been given memory, to say whether it can use it.
    AwaitShared(Terms, Box<Rings>),
    Open,
}

/// A Receive.
enum Posted {
    Sink(Sink),
    /// So many bytes, of memory that is taken when a message comes: an idle connection holds none.
    Bytes(usize),
}

/// What a handle names. The first byte has offset 0.
enum Exposed {
    /// And how many bytes of it the peer has asked for.
    Source(Region, u64),
    Sink(Sink),
    /// Bytes that nobody wants any more, but whose writer does not know it yet.
    Discard(usize),
}

/// Read-ahead buffers that no connection has something in.
static IDLE: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// The receiving half.
struct Receive {
    /// Of [`BUFFER`] bytes; empty while it would hold nothing, so that an idle connection has none.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes that the FPDU at `start` still lacks before anything can be done with it.
    missing: usize,
    /// A large FPDU, of which `buffer` holds nothing.
    placing: Option<Placing>,
    /// The last FPDU was a large one inside a message: the next will be too.
    in_run: bool,
    /// The last read got less than it asked for: the socket is empty. Holds until `poll` has returned `None`.
    drained: bool,
    send_msn: u32,
    read_msn: u32,
    /// The Send of which some segments are here: what it is and how many bytes it has.
    sending: Option<(Opcode, u32)>,
    placed: usize,
    /// All bytes received as FPDUs and startup frames, in step with [`Shared::received`].
    total: u64,
    /// Whether TCP's segments hold small FPDUs only.
    small_path: bool,
    /// How far a read goes beyond what is known to come, unless they do.
    ahead: usize,
}

/// Where a segment's payload goes.
enum Target {
    Memory(Sink),
    Nowhere,
    /// The handle was taken back while the segment was arriving.
    Revoked,
}

/// A large FPDU on its way into its place.
struct Placing {
    head: [u8; ddp::ENOUGH],
    header: Header,
    payload: usize,
    target: Target,
    at: usize,
    left: usize,
    tail: [u8; 7],
    tail_have: usize,
    tail_len: usize,
    crc: u32,
}

/// Why receiving ends.
enum End {
    /// The peer broke a rule: the error, and the FPDU that showed it.
    Breach(Fault, Vec<u8>),
    /// The peer sent a Terminate, or the connection is gone.
    Lost(Error),
}

impl Iwarp {
    /// Active side: sends the MPA Request in one system call.
    ///
    /// # Errors
    /// `ConnectionLost` when the peer has closed already, `Invalid` for options that no frame can carry.
    pub fn initiator(socket: RawFd, options: Options) -> Result<Iwarp, Error> {
        let mut iwarp = Iwarp::new(socket, options, Stage::AwaitReply)?;
        if iwarp.options.sharing != Sharing::Never {
            // Without it the connection is as any other, and the peer is not asked.
            iwarp.asked = Asked::new(&mut iwarp.options.private_data).ok();
        }
        let o = &iwarp.options;
        let request = StartFrame::request(&o.offer(), o.revision, &o.private_data).encode();
        // One call: a stock RPC server takes the first four bytes for a record mark and closes at once, but would wait
        // for more of a split frame.
        match iwarp.send(&request) {
            Ok(n) if n == request.len() => Ok(iwarp),
            Ok(_) => Err(lost("the socket did not take the MPA Request at once")),
            Err(e) => Err(lost(format!("sending the MPA Request failed: {e}"))),
        }
    }

    /// Passive side: waits for the MPA Request.
    ///
    /// # Errors
    /// `Invalid` for options that no frame can carry.
    pub fn responder(socket: RawFd, options: Options) -> Result<Iwarp, Error> {
        Iwarp::new(socket, options, Stage::AwaitRequest)
    }

    fn new(socket: RawFd, options: Options, stage: Stage) -> Result<Iwarp, Error> {
        let depth_fits = |n| n < mpa::NOT_NEGOTIATED;
        if options.private_data.len() > MAX_PRIVATE_DATA
            || !matches!(options.revision, 1 | 2)
            || !depth_fits(options.ird)
            || !depth_fits(options.ord)
        {
            return Err(invalid("iWARP options: private data over 248 bytes, depth over 16382, or revision"));
        }
        socket::set_nodelay(socket)?;
        Ok(Iwarp {
            stream: Stream::new(socket),
            naps: false,
            patience_seen: 0,
            asked: None,
            offered: None,
            transmit: Transmit::new(options.max_fpdu),
            options,
            stage,
            generation: fork::generation(),
            forked: false,
            received: true,
            shared: Shared::new()?,
            receive: Receive::new(),
            exposed: FxHashMap::default(),
            beside: 0,
            receives: VecDeque::new(),
            memory: None,
            completions: VecDeque::new(),
            ird: 0,
            private_data: Vec::new(),
            tokens: Tokens::default(),
            broken: None,
            failed: None,
            left: 0,
            pulled: 0,
            copied_bytes: 0,
            syscalls: 0,
        })
    }

    /// Whether a sleep on the socket still ends after [`NAP`]: the program has the socket too, and may have set another time.
    /// Looked at every [`LOOK`] only, since looking costs what the sleep saves.
    fn is_patient(&mut self) -> bool {
        let now = stats::tick();
        if now.saturating_sub(self.patience_seen) >= LOOK {
            self.patience_seen = now;
            // In ticks: somewhat more.
            self.naps = matches!(socket::patience(self.stream.socket), Ok(Some(time)) if time <= 2 * NAP);
        }
        self.naps
    }

    /// Whether it is for the peer, with which memory is shared, to do something.
    fn has_nothing_to_do(&self) -> bool {
        // The peer wakes us only if there was no room.
        let goes_on = self.transmit.has_work() && self.may_transmit() && !self.stream.wants_room();
        self.completions.is_empty() && !goes_on
    }

    fn start(&mut self) -> Result<bool, Error> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Open) {
                Stage::Open => return Ok(true),
                Stage::SendReply(reply, sent, then) => {
                    let n = match self.send(&reply[sent..]) {
                        Ok(n) => n,
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                        Err(e) => return Err(lost(format!("sending the MPA Reply failed: {e}"))),
                    };
                    if sent + n < reply.len() {
                        self.stage = Stage::SendReply(reply, sent + n, then);
                        return Ok(false);
                    }
                    let terms = then?;
                    match self.offered {
                        Some(_) => self.stage = Stage::AwaitAnswer(terms),
                        None => self.agree(&terms)?,
                    }
                }
                Stage::AwaitAnswer(terms) => {
                    let spins = self.options.spins;
                    // It answers before it says anything here.
                    if startup(socket::peek(self.stream.socket).map(|said| said.map_or(0, |_| 1)))?.is_none()
                    {
                        self.stage = Stage::AwaitAnswer(terms);
                        return Ok(false);
                    }
                    let answer = self.offered.as_mut().map_or(Answer::Declined, |it| it.answer(spins));
                    match answer {
                        Answer::Nothing => {
                            let text = "the peer neither shares memory nor declines to";
                            return Err(Error::new(Kind::Protocol, text));
                        }
                        Answer::Accepted(rings) => {
                            startup(self.send(&[local::SHARED]))?;
                            self.stream.share(rings);
                        }
                        Answer::Useless => {
                            let mut called = [0];
                            startup(socket::receive(
                                self.stream.socket,
                                &mut [IoVecMut::from_mut(&mut called)],
                            ))?;
                            startup(self.send(&[0]))?;
                        }
                        Answer::Declined => {}
                    }
                    self.agree(&terms)?;
                }
                Stage::AwaitShared(terms, rings) => {
                    let mut said = [0];
                    let came = socket::receive(self.stream.socket, &mut [IoVecMut::from_mut(&mut said)]);
                    if startup(came)?.is_none() {
                        self.stage = Stage::AwaitShared(terms, rings);
                        return Ok(false);
                    }
                    if said == [local::SHARED] {
                        self.stream.share(*rings);
                    }
                    self.begin(&terms)?;
                }
                stage => {
                    let expected =
                        if matches!(stage, Stage::AwaitReply) { Which::Reply } else { Which::Request };
                    self.stage = stage;
                    let unread = &self.receive.buffer[self.receive.start..self.receive.end];
                    match StartFrame::decode(unread, expected)? {
                        Some((frame, length)) => {
                            self.receive.start += length;
                            self.take_start_frame(frame)?;
                        }
                        None => {
                            if !self.read_start_frame()? {
                                return Ok(false);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Reads a part of a startup frame; false when there is none now.
    fn read_start_frame(&mut self) -> Result<bool, Error> {
        self.receive.have_buffer()?;
        let end = self.receive.end;
        self.syscalls += 1;
        match socket::receive(self.stream.socket, &mut [IoVecMut::from_mut(&mut self.receive.buffer[end..])])
        {
            Ok(0) => Err(lost("the peer closed the connection during the MPA startup")),
            Ok(n) => {
                self.receive.end += n;
                self.count_received(n);
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(lost(format!("the connection was lost during the MPA startup: {}", os_text(&e)))),
        }
    }

    fn take_start_frame(&mut self, frame: StartFrame) -> Result<(), Error> {
        let offer = self.options.offer();
        if frame.which == Which::Reply {
            // What follows in the buffer are FPDUs.
            return match frame.accept(&offer, self.options.revision) {
                Ok(terms) => {
                    self.private_data = frame.private_data;
                    if let Some(asked) = self.asked.take()
                        && let Some(mut rings) = asked.end(&self.private_data, self.options.spins)
                    {
                        rings.call(self.stream.socket);
                        self.stage = Stage::AwaitShared(terms, Box::new(rings));
                        return Ok(());
                    }
                    self.begin(&terms)
                }
                Err(Refusal::Leave(error)) => Err(error),
                Err(Refusal::InsufficientIrd(error)) => {
                    self.transmit.crc = frame.crc || offer.crc;
                    self.transmit.may_send = true;
                    self.send_terminate(Fault::INSUFFICIENT_IRD, None);
                    Err(error)
                }
            };
        }
        // The initiator waits for the Reply before it sends an FPDU (RFC 5044 §7.1.2: "Since the receiver's ability to
        // deal with Markers is unknown until the Request and Reply Frames have been received, sending FPDUs before
        // this occurs is not possible.")
        if self.receive.start != self.receive.end {
            return Err(Error::new(Kind::Protocol, "MPA: bytes after the Request, before the Reply"));
        }
        if self.options.sharing != Sharing::Never && !frame.markers {
            self.offered = Offered::new(&frame.private_data, &mut self.options.private_data).map(Box::new);
        }
        let (reply, terms) = frame.answer(&offer, &self.options.private_data);
        let then = if reply.reject {
            Err(Error::new(Kind::Protocol, "MPA: the peer wants markers, which are not implemented"))
        } else {
            Ok(terms)
        };
        self.private_data = frame.private_data;
        self.stage = Stage::SendReply(reply.encode(), 0, then);
        Ok(())
    }

    /// The initiator's end of the startup.
    fn begin(&mut self, terms: &Terms) -> Result<(), Error> {
        self.agree(terms)?;
        self.transmit.may_send = true;
        self.naps = !self.stream.is_shared() && socket::set_patience(self.stream.socket, NAP).is_ok();
        Ok(())
    }

    fn agree(&mut self, terms: &Terms) -> Result<(), Error> {
        if self.options.sharing == Sharing::Must && !self.stream.is_shared() {
            return Err(local::missing());
        }
        (self.asked, self.offered) = (None, None);
        self.stage = Stage::Open;
        self.ird = usize::from(terms.ird);
        self.transmit.ord = usize::from(terms.ord);
        self.transmit.crc = terms.crc;
        self.transmit.look_at_path(&self.stream);
        self.receive.small_path = self.transmit.fpdu() < SMALL;
        Ok(())
    }

    /// Sends a Terminate, best effort, and ends the connection. In a forked child nothing is sent: the connection is
    /// the parent's.
    pub fn terminate(&mut self) {
        if self.failed.is_none() {
            self.check_fork();
            self.fail(lost("the connection was terminated by this side"), Some((Fault::LOCAL, &[])));
        }
    }

    /// Whether CRCs are in use.
    pub fn crc(&self) -> bool {
        self.transmit.crc
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.syscalls += 1;
        socket::send(self.stream.socket, &[crate::memory::IoVec::from_slice(bytes)])
    }

    // ------------------------------------------------------------------------------------------------- receiving

    /// Receives until there is a completion, nothing is left, or [`POLL`] bytes have come.
    fn advance(&mut self) -> Result<(), End> {
        let mut budget = POLL;
        loop {
            if self.receive.start < self.receive.end {
                self.process()?;
            } else {
                self.receive.missing = ddp::ENOUGH;
            }
            let drained = self.receive.drained && self.stream.drained();
            if !self.completions.is_empty() || budget == 0 || drained || !self.may_receive()? {
                return Ok(());
            }
            budget = budget.saturating_sub(self.fill()?.max(POLL_LEAST));
        }
    }

    /// Whether this process is the one that receives.
    fn may_receive(&self) -> Result<bool, End> {
        match (self.shared.received() == self.receive.total, self.forked) {
            (true, _) => Ok(true),
            (false, true) => Ok(false),
            (false, false) => Err(End::Lost(lost("a forked process has read from this connection"))),
        }
    }

    fn count_received(&mut self, bytes: usize) {
        self.received = true;
        self.receive.total += bytes as u64;
        self.shared.set_received(self.receive.total);
    }

    /// One system call: the rest of a large FPDU into its place, and what follows into the buffer.
    fn fill(&mut self) -> Result<usize, End> {
        self.receive.have_buffer().map_err(End::Lost)?;
        let ahead = if self.receive.small_path { BUFFER } else { self.receive.ahead };
        let Receive { buffer, start, end, missing, placing, in_run, .. } = &mut self.receive;
        let (result, asked) = match placing {
            Some(placing) => {
                // The buffer is empty while a large FPDU is placed.
                let ahead = if placing.header.is_last() { ahead } else { ddp::ENOUGH };
                let tail = &mut placing.tail[placing.tail_have..placing.tail_len];
                let (target, ahead) = match &placing.target {
                    Target::Memory(sink) => match sink.iovec(placing.at, placing.left) {
                        Some(target) => (target, &mut buffer[..ahead]),
                        None => return Err(End::Breach(Fault::BOUNDS, placing.head.to_vec())),
                    },
                    Target::Nowhere => {
                        let (scratch, rest) = buffer.split_at_mut(placing.left.min(BUFFER));
                        // The tail may follow only if all the payload fits.
                        let ahead = if scratch.len() == placing.left { ahead.min(rest.len()) } else { 0 };
                        (IoVecMut::from_mut(scratch), &mut rest[..ahead])
                    }
                    // RFC 5041 §7.1: "it MUST cease placing the remainder of the DDP Segment"
                    Target::Revoked => return Err(End::Breach(Fault::STAG, placing.head.to_vec())),
                };
                let asked = target.len() + tail.len() + ahead.len();
                let whole = target.len() == placing.left;
                let mut pieces = [target, IoVecMut::from_mut(tail), IoVecMut::from_mut(ahead)];
                let pieces = if whole { &mut pieces[..] } else { &mut pieces[..1] };
                (self.stream.receive(pieces), asked)
            }
            None => {
                if *start == *end {
                    (*start, *end) = (0, 0);
                } else if BUFFER - *end < *missing + ddp::ENOUGH {
                    buffer.copy_within(*start..*end, 0);
                    (*start, *end) = (0, *end - *start);
                }
                let ahead = if *in_run { 0 } else { ahead };
                let asked = (*missing).max(ddp::ENOUGH).max(ahead + *missing).min(BUFFER - *end);
                let to = &mut buffer[*end..*end + asked];
                (self.stream.receive(&mut [IoVecMut::from_mut(to)]), asked)
            }
        };
        self.syscalls += 1;
        match result {
            Ok(0) => Err(End::Lost(lost(if self.receive.is_between_messages() {
                "the peer closed the connection"
            } else {
                "the peer closed the connection in the middle of a message"
            }))),
            Ok(n) => {
                self.receive.drained = n < asked;
                self.count_received(n);
                self.take(n)?;
                Ok(n)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.receive.drained = true;
                Ok(0)
            }
            Err(e) => Err(End::Lost(lost(format!("the connection was lost: {e}")))),
        }
    }

    /// Accounts for `n` bytes that lie where `fill` asked for them.
    fn take(&mut self, mut n: usize) -> Result<(), End> {
        let crc_on = self.transmit.crc;
        let Receive { buffer, start, end, placing, .. } = &mut self.receive;
        let Some(p) = placing else {
            *end += n;
            return Ok(());
        };
        let placed = n.min(p.left);
        let mut scratch = 0;
        if let Target::Memory(sink) = &p.target {
            if crc_on {
                p.crc = sink.crc32c(p.crc, p.at, placed);
            }
        } else {
            p.crc = crc32c::crc32c_append(p.crc, &buffer[..placed]);
            scratch = p.left.min(BUFFER);
        }
        p.at += placed;
        p.left -= placed;
        n -= placed;
        let tail = n.min(p.tail_len - p.tail_have);
        p.tail_have += tail;
        n -= tail;
        if p.left == 0 && p.tail_have == p.tail_len {
            (*start, *end) = (scratch, scratch + n);
            if let Some(placing) = placing.take() {
                return self.finish_placing(placing);
            }
        }
        Ok(())
    }

    fn finish_placing(&mut self, placing: Placing) -> Result<(), End> {
        let Placing { head, header, payload, target, tail, tail_len, crc, .. } = placing;
        let pad = tail_len - 4;
        if self.transmit.crc {
            let crc = crc32c::crc32c_append(crc, &tail[..pad]);
            if tail[pad..tail_len] != mpa::crc_word(Some(crc)) {
                return Err(End::Breach(Fault::CRC, head.to_vec()));
            }
        }
        // A completed Receive is handed back with no clone of it left here.
        drop(target);
        self.receive.in_run = !header.is_last();
        self.transmit.may_send = true;
        self.commit(&header, payload).map_err(|fault| End::Breach(fault, head.to_vec()))
    }

    /// Works off the buffer until there is a completion or a lack of bytes.
    fn process(&mut self) -> Result<(), End> {
        let buffer = std::mem::take(&mut self.receive.buffer);
        let result = self.process_buffer(&buffer);
        self.receive.buffer = buffer;
        result
    }

    fn process_buffer(&mut self, buffer: &[u8]) -> Result<(), End> {
        while self.completions.is_empty() && self.receive.placing.is_none() {
            let bytes = &buffer[self.receive.start..self.receive.end];
            self.receive.missing = ddp::ENOUGH.saturating_sub(bytes.len());
            let Some((length, _)) = bytes.split_first_chunk::<2>() else { return Ok(()) };
            let ulpdu = usize::from(u16::from_be_bytes(*length));
            let breach = |fault| End::Breach(fault, bytes[..bytes.len().min(ddp::READ_REQUEST)].to_vec());
            // Told before the rest is there: the rest of such an FPDU may be less than a header.
            if ulpdu < ddp::TAGGED - 2 {
                return Err(breach(Fault::TOO_SHORT));
            }
            let Some(head) = bytes.first_chunk::<{ ddp::ENOUGH }>() else { return Ok(()) };
            let total = mpa::fpdu_len(ulpdu);
            if let Some(fpdu) = bytes.get(..total) {
                self.receive.in_run = false;
                self.take_whole(head, fpdu)?;
                self.receive.start += total;
                continue;
            }
            if !self.receive.in_run {
                self.receive.ahead = AHEAD + if total <= AHEAD_MOST { total } else { 0 };
            }
            if total < SMALL {
                self.receive.missing = total - bytes.len();
                return Ok(());
            }
            self.begin_placing(head, ulpdu, bytes).map_err(breach)?;
            (self.receive.start, self.receive.end) = (0, 0);
        }
        Ok(())
    }

    /// An FPDU that lies in the buffer as a whole.
    fn take_whole(&mut self, head: &[u8; ddp::ENOUGH], fpdu: &[u8]) -> Result<(), End> {
        let breach = |fault| End::Breach(fault, fpdu[..fpdu.len().min(ddp::READ_REQUEST)].to_vec());
        // RFC 5044 §4.4: "When an FPDU is received, and CRC checking is enabled, the receiver MUST first perform the
        // following: 1) Calculate the CRC of the incoming FPDU [...] 2) Verify that the calculated CRC-32c value is
        // the same as the received CRC-32c value found in the FPDU CRC field."
        let (covered, word) = fpdu.split_at(fpdu.len() - 4);
        if self.transmit.crc && word != mpa::crc_word(Some(crc32c::crc32c(covered))) {
            return Err(breach(Fault::CRC));
        }
        if let Some((msn, length)) = ddp::whole_send(head)
            && let Some(payload) = covered[ddp::UNTAGGED..].get(..length)
            && self.take_message(msn, payload)
        {
            return Ok(());
        }
        let (header, length) = Header::decode(head).map_err(breach)?;
        let payload = &covered[header.len()..header.len() + length];
        match header.opcode() {
            Opcode::Terminate => return Err(End::Lost(terminated(payload))),
            Opcode::ReadRequest => self.take_read_request(&header, payload).map_err(breach)?,
            _ => {
                let (target, at) = self.admit(&header, length).map_err(breach)?;
                if let Target::Memory(sink) = target {
                    if !sink.place(at, payload) {
                        return Err(breach(Fault::BOUNDS));
                    }
                    self.count_read_ahead(length);
                }
                self.commit(&header, length).map_err(breach)?;
            }
        }
        self.transmit.may_send = true;
        Ok(())
    }

    /// A Send of one segment, as nearly every short message is, that nothing is wrong with: what `admit` and `commit` come to
    /// for it. False for others, of which nothing has changed.
    fn take_message(&mut self, msn: u32, payload: &[u8]) -> bool {
        let receive = &self.receive;
        if msn != receive.send_msn || receive.sending.is_some() {
            return false;
        }
        let (Some(Posted::Bytes(size)), Some(memory)) = (self.receives.front(), &self.memory) else {
            return false;
        };
        if payload.len() > *size {
            return false;
        }
        let Ok(sink) = memory.receive(*size, payload.len()) else { return false };
        if !sink.place(0, payload) {
            return false;
        }
        self.receives.pop_front();
        // RFC 5041 §4.3: "The MSN value MUST wrap to 0 after a value of 0xFFFFFFFF."
        self.receive.send_msn = msn.wrapping_add(1);
        self.count_read_ahead(payload.len());
        self.completions.push_back(Completion::Received { sink, len: payload.len(), invalidated: None });
        self.transmit.may_send = true;
        true
    }

    /// A large FPDU of which only a part is in the buffer: places that part, and the rest will follow by itself.
    fn begin_placing(&mut self, head: &[u8; ddp::ENOUGH], ulpdu: usize, bytes: &[u8]) -> Result<(), Fault> {
        let (header, payload) = Header::decode(head)?;
        if matches!(header.opcode(), Opcode::ReadRequest | Opcode::Terminate) {
            return Err(Fault::TOO_LONG);
        }
        let (target, at) = self.admit(&header, payload)?;
        let (header_bytes, rest) = bytes.split_at(header.len());
        let (here, tail_here) = rest.split_at(rest.len().min(payload));
        let crc =
            if self.transmit.crc { crc32c::crc32c_append(crc32c::crc32c(header_bytes), here) } else { 0 };
        if let Target::Memory(sink) = &target {
            if !sink.place(at, here) {
                return Err(Fault::BOUNDS);
            }
            self.count_read_ahead(here.len());
        }
        let mut tail = [0; 7];
        tail[..tail_here.len()].copy_from_slice(tail_here);
        self.receive.placing = Some(Placing {
            head: *head,
            header,
            payload,
            target,
            at: at + here.len(),
            left: payload - here.len(),
            tail,
            tail_have: tail_here.len(),
            tail_len: mpa::pad_len(ulpdu) + 4,
            crc,
        });
        Ok(())
    }

    /// Checks a segment against the state of its stream: where its payload goes. Changes nothing, but that a Receive gets
    /// its memory.
    fn admit(&mut self, header: &Header, length: usize) -> Result<(Target, usize), Fault> {
        match *header {
            // RFC 5041 §5.2: "The STag and TO fields MUST NOT be checked for a zero-length Tagged DDP Message."
            Header::Tagged { opcode: Opcode::Write, .. } if length == 0 => Ok((Target::Nowhere, 0)),
            Header::Tagged { opcode: Opcode::Write, stag, to, .. } => {
                let (size, target) = match self.exposed.get(&stag) {
                    Some(Exposed::Sink(sink)) => (sink.len(), Target::Memory(sink.clone())),
                    Some(Exposed::Discard(size)) => (*size, Target::Nowhere),
                    // DDP has no code for a right that is missing: the STag is not valid for this.
                    Some(Exposed::Source(..)) | None => return Err(Fault::STAG),
                };
                Ok((target, range(to, length, size, Fault::WRAP, Fault::BOUNDS)?))
            }
            Header::Tagged { stag, to, .. } => {
                let Some(read) = self.transmit.outstanding.front() else { return Err(Fault::OPCODE) };
                if length == 0 {
                    return Ok((Target::Nowhere, 0));
                }
                // RFC 5040 §5.2.2: "The Data Sink MAY validate that the STag, Tagged Offset, and length of the RDMA
                // Read Response Message are the same as the STag, Tagged Offset, and length included in the
                // corresponding RDMA Read Request Message."
                if stag != read.stag {
                    return Err(Fault::STAG);
                }
                if to.checked_add(length as u64).is_none() {
                    return Err(Fault::WRAP);
                }
                let left = (read.from.length - read.done) as usize;
                if to != u64::from(read.done) || length > left {
                    return Err(Fault::BOUNDS);
                }
                let target = read.sink.clone().map_or(Target::Nowhere, Target::Memory);
                Ok((target, read.at + read.done as usize))
            }
            Header::Untagged { opcode, last, invalidate, msn, mo, .. } => {
                // TCP keeps the order, so a message can only be the next one and a segment only the next of it.
                if msn != self.receive.send_msn {
                    return Err(Fault::MSN);
                }
                let Some(posted) = self.receives.front_mut() else { return Err(Fault::NO_BUFFER) };
                if mo as usize != self.receive.placed {
                    return Err(Fault::OFFSET);
                }
                if self.receive.sending.is_some_and(|(first, _)| first != opcode) {
                    return Err(Fault::OPCODE);
                }
                // RFC 5041 §4.3: "Each DDP Segment within a specific DDP Message MUST contain the same value for the
                // RsvdULP field."
                if self.receive.sending.is_some_and(|(_, first)| first != invalidate) {
                    return Err(Fault::UNSPECIFIED);
                }
                let size = match posted {
                    Posted::Sink(sink) => sink.len(),
                    Posted::Bytes(bytes) => *bytes,
                };
                if length > size - self.receive.placed {
                    return Err(Fault::TOO_LONG);
                }
                if let Posted::Bytes(_) = posted {
                    let Some(memory) = &self.memory else { return Err(Fault::LOCAL) };
                    let most = if last { length } else { size };
                    *posted = Posted::Sink(memory.receive(size, most).map_err(|_| Fault::LOCAL)?);
                }
                let Posted::Sink(sink) = posted else { return Err(Fault::LOCAL) };
                Ok((Target::Memory(sink.clone()), self.receive.placed))
            }
        }
    }

    /// A valid segment has been placed: notes it, and delivers the message that it ends.
    fn commit(&mut self, header: &Header, length: usize) -> Result<(), Fault> {
        match *header {
            Header::Tagged { opcode: Opcode::Write, .. } => {}
            Header::Tagged { last, .. } => {
                let Some(read) = self.transmit.outstanding.front_mut() else { return Err(Fault::OPCODE) };
                read.done += length as u32;
                self.pulled += length as u64;
                if last {
                    if read.done != read.from.length {
                        return Err(Fault::BOUNDS);
                    }
                    if let Some(read) = self.transmit.outstanding.pop_front() {
                        self.completions.push_back(Completion::Read { id: read.id });
                    }
                }
            }
            Header::Untagged { opcode, last, invalidate, .. } => {
                self.receive.placed += length;
                self.receive.sending = Some((opcode, invalidate));
                if !last {
                    return Ok(());
                }
                let invalidated = opcode.invalidates().then_some(invalidate);
                if let Some(stag) = invalidated {
                    // RFC 5040 §5.3: "Invalidate the STag if it is associated with the RDMAP Stream; or issue a
                    // Terminate Message with the STag Cannot be Invalidated Terminate Error Code, if the STag is not
                    // associated with the RDMAP Stream."
                    if !self.exposed.contains_key(&stag) || !self.take_back(stag) {
                        return Err(Fault::CANNOT_INVALIDATE);
                    }
                    stats::add(Counter::Invalidations, 1);
                }
                let Some(Posted::Sink(sink)) = self.receives.pop_front() else {
                    return Err(Fault::NO_BUFFER);
                };
                let len = std::mem::take(&mut self.receive.placed);
                self.receive.sending = None;
                // RFC 5041 §4.3: "The MSN value MUST wrap to 0 after a value of 0xFFFFFFFF."
                self.receive.send_msn = self.receive.send_msn.wrapping_add(1);
                let invalidated = invalidated.map(Handle);
                self.completions.push_back(Completion::Received { sink, len, invalidated });
            }
        }
        Ok(())
    }

    fn take_read_request(&mut self, header: &Header, payload: &[u8]) -> Result<(), Fault> {
        let Header::Untagged { last, msn, mo, .. } = *header else { return Err(Fault::OPCODE) };
        if msn != self.receive.read_msn {
            return Err(Fault::MSN);
        }
        if mo != 0 {
            return Err(Fault::OFFSET);
        }
        // RFC 5040 §6.1: "For inbound RDMA Read Requests, the RDMAP layer MUST NOT exceed the maximum number of
        // outstanding, inbound RDMA Read Requests that were negotiated between the ULP and the Local Peer's RDMAP
        // layer." The queue has as many buffers as that.
        if self.transmit.inbound() >= self.ird {
            return Err(Fault::NO_BUFFER);
        }
        if !last || payload.len() > ddp::READ_REQUEST - ddp::UNTAGGED {
            return Err(Fault::TOO_LONG);
        }
        let Some(request) = ReadRequest::decode(payload) else { return Err(Fault::TOO_SHORT) };
        let bytes = self.readable(&request)?;
        self.receive.read_msn = self.receive.read_msn.wrapping_add(1);
        if let Some(Exposed::Source(_, asked)) = self.exposed.get_mut(&request.source_stag) {
            *asked += u64::from(request.size);
        }
        self.transmit.respond(request, bytes);
        Ok(())
    }

    /// The bytes that a request asks for.
    fn readable(&self, request: &ReadRequest) -> Result<Option<Region>, Fault> {
        // RFC 5040 §5.2.1, of a request for no bytes: "MUST NOT validate the Data Source STag and Data Source Tagged
        // Offset contained in the RDMA Read Request Header, and", "MUST respond with a zero-length RDMA Read Response
        // Message."
        if request.size == 0 {
            return Ok(None);
        }
        let region = match self.exposed.get(&request.source_stag) {
            Some(Exposed::Source(region, _)) => region,
            Some(Exposed::Sink(_) | Exposed::Discard(_)) => return Err(Fault::READ_RIGHTS),
            None => return Err(Fault::READ_STAG),
        };
        let size = request.size as usize;
        // What it could have taken by itself it may ask for all the same.
        let to = request.source_to.wrapping_sub(self.stream.base(region));
        let at = range(to, size, region.len(), Fault::READ_WRAP, Fault::READ_BOUNDS)?;
        Ok(Some(region.slice(at, size)))
    }

    fn count_read_ahead(&mut self, bytes: usize) {
        self.copied_bytes += bytes as u64;
        stats::add(Counter::BytesReadAhead, bytes as u64);
    }

    fn count_copied(&mut self, bytes: usize) {
        self.copied_bytes += bytes as u64;
        stats::add(Counter::BytesCopied, bytes as u64);
    }

    // --------------------------------------------------------------------------------------------------- handles

    fn expose(&mut self, memory: Exposed, length: usize) -> Result<Segment, Error> {
        self.check_fork();
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let length = match u32::try_from(length) {
            Ok(length) if length <= MAX_SEGMENT => length,
            _ => {
                return Err(Error::new(Kind::TooLong, format!("{length} bytes are too many for one handle")));
            }
        };
        let stag = self.fresh_stag()?;
        self.exposed.insert(stag, memory);
        stats::add(Counter::Registrations, 1);
        Ok(Segment { handle: Handle(stag), length, offset: 0 })
    }

    /// RFC 5040 §8 asks for handles that are hard to predict.
    fn fresh_stag(&mut self) -> Result<u32, Error> {
        loop {
            let stag = self.tokens.take()?;
            let taken = stag == 0
                || self.exposed.contains_key(&stag)
                || self.transmit.outstanding.iter().any(|read| read.stag == stag);
            if !taken {
                return Ok(stag);
            }
        }
    }

    /// Takes back a handle and lets go of its memory. False when the peer is owed bytes of it.
    fn take_back(&mut self, stag: u32) -> bool {
        match self.exposed.remove(&stag) {
            None => true,
            Some(Exposed::Source(..)) => match self.transmit.release(stag) {
                Ok(Some(copied)) => {
                    self.count_copied(copied);
                    true
                }
                // Unfinished, or no memory for the copy.
                Ok(None) | Err(_) => false,
            },
            Some(Exposed::Sink(_) | Exposed::Discard(_)) => {
                self.retarget(stag, Target::Revoked);
                true
            }
        }
    }

    /// Changes where the rest of a half-received Write goes.
    fn retarget(&mut self, handle: u32, target: Target) {
        if let Some(placing) = &mut self.receive.placing
            && matches!(placing.header, Header::Tagged { opcode: Opcode::Write, stag, .. } if stag == handle)
        {
            placing.target = target;
        }
    }

    // ------------------------------------------------------------------------------------------------ ends, forks

    /// Ends the connection: releases all memory, and sends a Terminate if that is possible. Returns the error that
    /// ended it, which is the first one.
    fn fail(&mut self, error: Error, say: Option<(Fault, &[u8])>) -> Error {
        if let Some(first) = &self.failed {
            return first.clone();
        }
        if let Some((fault, cause)) = say {
            self.send_terminate(fault, Some(cause));
        }
        if self.transmit.is_inside_message() {
            // What we began nobody can finish: the stream is of no use to any process.
            self.shared.close();
        }
        self.left = self.transmit.unsent();
        self.stream.end();
        self.transmit.clear();
        self.exposed.clear();
        self.receives.clear();
        self.receive.placing = None;
        self.receive.lend_buffer();
        self.failed = Some(error.clone());
        error
    }

    /// The same for what receiving has come to.
    #[cold]
    fn end(&mut self, end: End) -> Error {
        match end {
            End::Lost(error) => self.fail(error, None),
            End::Breach(fault, cause) => {
                let error = if fault == Fault::LOCAL {
                    Error::new(Kind::Os(libc::ENOMEM), "iWARP: there is no memory for what arrives")
                } else {
                    Error::new(Kind::Protocol, format!("iWARP: the peer broke the protocol: {fault}"))
                };
                self.fail(error, Some((fault, &cause)))
            }
        }
    }

    /// Sends a Terminate if the stream stands between two FPDUs and takes it whole.
    fn send_terminate(&mut self, fault: Fault, cause: Option<&[u8]>) {
        // RFC 5044 §7.1.2: "MPA Responder mode implementations MUST receive and validate at least one FPDU before
        // sending any FPDUs or Markers."
        if self.forked || !self.transmit.may_send || self.transmit.is_half_sent() {
            return;
        }
        let mut fpdu = [0; ddp::MAX_TERMINATE];
        let length = fault.encode_terminate(cause, &mut fpdu);
        let mut bytes = fpdu[..length].to_vec();
        let crc = self.transmit.crc.then(|| crc32c::crc32c(&bytes));
        bytes.extend_from_slice(&mpa::crc_word(crc));
        let stream = &mut self.stream;
        let sent = self.shared.with_stream(|shared| {
            // RFC 5040 §5.4: "After sending a Terminate Message on an RDMAP Stream, the Local Peer MUST NOT send any
            // more Messages on that specific RDMAP Stream."
            shared.close();
            (stream.send(&[crate::memory::IoVec::from_slice(&bytes)]), false)
        });
        drop(sent);
    }

    /// Notices that we are a forked child: what was queued is the parent's to send.
    fn check_fork(&mut self) {
        let generation = fork::generation();
        if generation != self.generation {
            self.generation = generation;
            (self.forked, self.received) = (true, false);
            self.transmit.clear();
            self.tokens = Tokens::default();
        }
    }

    /// Sends what there is to send: mostly nothing, which shall cost nothing.
    #[inline(always)]
    fn pump(&mut self) {
        if self.transmit.has_work() {
            if self.may_transmit() {
                self.transmit(Transmit::run);
            }
        } else {
            self.transmit.blocked = false;
        }
    }

    /// Whether the stream is there, and not broken.
    fn may_transmit(&self) -> bool {
        matches!(self.stage, Stage::Open) && self.broken.is_none()
    }

    fn transmit(
        &mut self,
        run: impl FnOnce(&mut Transmit, (&mut Stream, &Shared), &mut u64) -> Result<(), Error>,
    ) {
        let before = self.syscalls;
        if let Err(error) = run(&mut self.transmit, (&mut self.stream, &self.shared), &mut self.syscalls) {
            self.broken = Some(error);
        }
        stats::add(Counter::Syscalls, self.syscalls - before);
    }
}

impl QueuePair for Iwarp {
    fn establish(&mut self) -> Result<bool, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let done = self.start();
        // The next message may be long in coming, and the rest of the startup too.
        if self.receive.start == self.receive.end {
            self.receive.lend_buffer();
        }
        done.map_err(|error| self.fail(error, None))
    }

    fn traits(&self) -> &'static Traits {
        if self.stream.is_shared() { &local::TRAITS } else { &TRAITS }
    }

    fn rename(&mut self, socket: RawFd) {
        self.stream.socket = socket;
    }

    /// siw reads what comes with or right after its MPA Reply only when more comes.
    fn nudge(&mut self) {
        let nowhere = Segment { handle: Handle(0), length: 0, offset: 0 };
        self.post(WorkRequest::Write { gather: Regions::new(), to: nowhere });
    }

    fn limits(&self) -> Limits {
        Limits {
            read_depth: self.transmit.ord as u32,
            max_segment: MAX_SEGMENT,
            remote_invalidation: REMOTE_INVALIDATION,
            receives: u32::MAX,
        }
    }

    fn moved(&self) -> u64 {
        self.receive.total.wrapping_add(self.transmit.sent).wrapping_add(self.beside)
    }

    /// What the peer's TCP has acknowledged: a send buffer of some MiB takes long to say that it has room again.
    fn taken(&self) -> u64 {
        self.transmit.sent.saturating_sub(self.stream.unacknowledged())
    }

    fn pulled(&self) -> u64 {
        let arriving = self.receive.placing.as_ref().filter(|p| p.header.opcode() == Opcode::ReadResponse);
        self.pulled + arriving.map_or(0, |p| (p.payload - p.left) as u64)
    }

    fn close(&mut self) {
        self.terminate();
        if !self.forked {
            socket::shutdown(self.stream.socket);
        }
    }

    fn describe(&self) -> String {
        let crc = if self.transmit.crc { "on" } else { "off" };
        match self.stream.is_shared() {
            true => "shared memory".to_owned(),
            false => format!("software iWARP, CRC {crc}"),
        }
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        let length = region.len();
        let segment = self.expose(Exposed::Source(region.clone(), 0), length)?;
        let Some(offset) = self.stream.show(region.as_ptr().addr(), segment.handle.0) else {
            return Ok(segment);
        };
        self.beside += length as u64;
        Ok(Segment { offset, ..segment })
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        let length = sink.len();
        self.expose(Exposed::Sink(sink), length)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        self.check_fork();
        if self.failed.is_some() || !self.exposed.contains_key(&handle.0) {
            return Ok(());
        }
        stats::add(Counter::Invalidations, 1);
        if !self.take_back(handle.0) {
            // The peer was promised these bytes. RFC 5040 §7.2: a Read from an STag that is not valid is an error.
            self.fail(
                Error::new(Kind::ConnectionLost, "memory was taken back while the peer was reading it"),
                Some((Fault::READ_STAG, &[])),
            );
        }
        Ok(())
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        self.check_fork();
        let stag = handle.0;
        match self.exposed.get_mut(&stag) {
            None | Some(Exposed::Discard(_)) => Ok(()),
            Some(Exposed::Sink(sink)) => {
                let length = sink.len();
                self.exposed.insert(stag, Exposed::Discard(length));
                self.retarget(stag, Target::Nowhere);
                Ok(())
            }
            Some(Exposed::Source(region, _)) if !region.is_lent() => Ok(()),
            Some(Exposed::Source(region, _)) => {
                let copy = region.owned()?;
                *region = copy.clone();
                let framed = self.transmit.redirect(stag, &copy)?;
                self.count_copied(copy.len() + framed);
                Ok(())
            }
        }
    }

    fn was_read(&self, handle: Handle) -> Option<bool> {
        Some(match self.exposed.get(&handle.0) {
            Some(Exposed::Source(region, asked)) => {
                *asked >= region.len() as u64 && !self.transmit.owes(handle.0)
            }
            Some(Exposed::Sink(_) | Exposed::Discard(_)) | None => true,
        })
    }

    fn release_lent(&mut self) -> Result<usize, Error> {
        self.check_fork();
        let copied = self.transmit.release_lent()?;
        if let Some(Placing { header: Header::Tagged { opcode: Opcode::ReadResponse, .. }, target, .. }) =
            &mut self.receive.placing
            && matches!(target, Target::Memory(sink) if sink.is_lent())
        {
            *target = Target::Nowhere;
        }
        self.count_copied(copied);
        Ok(copied)
    }

    fn post_recv(&mut self, sink: Sink) {
        if self.failed.is_none() {
            self.receives.push_back(Posted::Sink(sink));
        }
    }

    fn post_recv_of(&mut self, memory: &Arc<Memory>, bytes: usize) -> Result<(), Error> {
        if self.failed.is_none() {
            self.receives.push_back(Posted::Bytes(bytes));
            if self.memory.is_none() {
                self.memory = Some(memory.clone());
            }
        }
        Ok(())
    }

    fn withdraw(&mut self) -> usize {
        self.check_fork();
        // A child does not know whether it or its parent goes on receiving.
        if self.forked {
            return 0;
        }
        let Receive { sending, placing, .. } = &self.receive;
        let placing = placing.as_ref().is_some_and(|p| matches!(p.header, Header::Untagged { .. }));
        let before = self.receives.len();
        // Messages come one after the other: only the oldest Receive can have been begun.
        self.receives.truncate(usize::from(placing || sending.is_some()));
        before - self.receives.len()
    }

    /// Queues work. A Send starts it; Writes and Reads wait for the Send, `poll` or `flush` that follows them, so that
    /// a reply and its RDMA Writes leave together.
    fn post(&mut self, request: WorkRequest) {
        self.check_fork();
        if self.failed.is_some() {
            return;
        }
        let work = match request {
            WorkRequest::Send { gather, invalidate }
                if self.may_transmit() && self.transmit.may_send_at_once(&self.stream, &gather) =>
            {
                let invalidate = invalidate.map(|handle| handle.0);
                return self.transmit(|transmit, stream, calls| {
                    transmit.send_at_once(stream, gather, invalidate, calls)
                });
            }
            WorkRequest::Send { gather, invalidate } => {
                transmit::gather(gather, None).map(|(gather, len)| Work::Send {
                    gather,
                    len,
                    invalidate: invalidate.map(|handle| handle.0),
                })
            }
            WorkRequest::Write { gather, to } => transmit::gather(gather, Some(to.length as usize))
                .map(|(gather, _)| Work::Write { gather, to }),
            WorkRequest::Read { id, sink, at, from } => {
                let end = at.checked_add(from.length as usize);
                if end.is_none_or(|end| end > sink.len()) {
                    Err(invalid("an RDMA Read is longer than its sink"))
                } else if self.transmit.ord == 0 && matches!(self.stage, Stage::Open) {
                    Err(invalid("the peer serves no RDMA Reads"))
                } else {
                    let sink = Some(sink);
                    self.fresh_stag().map(|stag| Work::Read(Read { id, sink, at, from, stag, done: 0 }))
                }
            }
        };
        match work {
            Ok(work) => {
                let starts = matches!(work, Work::Send { .. });
                self.transmit.post(work);
                if starts && !self.transmit.blocked {
                    self.pump();
                }
            }
            Err(error) => {
                self.fail(error, Some((Fault::LOCAL, &[])));
            }
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        self.check_fork();
        if let Some(completion) = self.completions.pop_front() {
            return Ok(Some(completion));
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if !matches!(self.stage, Stage::Open) {
            return Ok(None);
        }
        self.pump();
        let before = self.syscalls;
        let result = self.advance();
        stats::add(Counter::Syscalls, self.syscalls - before);
        if let Err(end) = result {
            return Err(self.end(end));
        }
        if let Some(completion) = self.completions.pop_front() {
            return Ok(Some(completion));
        }
        // Requests that have just come may be answered at once.
        if !self.transmit.blocked {
            self.pump();
        }
        if self.receive.start == self.receive.end {
            self.receive.lend_buffer();
        }
        // Until the next call more may have come.
        let drained = std::mem::take(&mut self.receive.drained);
        match self.broken.take() {
            Some(error) if drained || self.forked => Err(self.fail(error, None)),
            broken => {
                self.broken = broken;
                Ok(None)
            }
        }
    }

    fn drained(&mut self) -> bool {
        let receive = &mut self.receive;
        let all = receive.drained && receive.start == receive.end && receive.placing.is_none();
        let rest = self.failed.is_some() || self.broken.is_some() || self.transmit.has_work();
        let drained = all && self.completions.is_empty() && !rest && self.stream.drained();
        let receive = &mut self.receive;
        if drained {
            receive.lend_buffer();
            // Until the next call more may have come.
            receive.drained = false;
        }
        drained
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.check_fork();
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.pump();
        match &self.broken {
            Some(error) => Err(error.clone()),
            None => Ok(self.transmit.is_idle()),
        }
    }

    fn claim(&mut self) -> bool {
        // Who has missed bytes can make nothing of what follows.
        let claimed = self.shared.received() == self.receive.total
            && self.shared.claim(|shared| self.transmit.has_numbered_last(shared));
        if claimed {
            self.stream.claim();
        }
        claimed
    }

    fn fd(&self) -> RawFd {
        self.stream.socket
    }

    fn spin(&mut self) -> bool {
        self.stream.spin()
    }

    fn has_come(&self) -> bool {
        self.failed.is_some() || !self.completions.is_empty() || self.stream.has_come()
    }

    fn rest(&mut self) -> bool {
        if self.failed.is_some() || !matches!(self.stage, Stage::Open) {
            return true;
        }
        !self.stream.is_shared() || self.has_nothing_to_do() && self.stream.rest()
    }

    fn tell_company(&mut self, others: u32) {
        self.stream.tell_company(others);
    }

    fn company(&self) -> u32 {
        self.stream.company()
    }

    fn outbox(&mut self) -> Option<Buf> {
        match self.stage {
            Stage::Open if self.failed.is_none() && !self.forked => self.stream.outbox(),
            _ => None,
        }
    }

    fn show(&mut self, address: usize, handle: Handle) -> Option<u64> {
        if self.failed.is_some() { None } else { self.stream.show(address, handle.0) }
    }

    fn keep(&mut self, region: Region, handle: Handle) {
        self.beside += region.len() as u64;
        self.stream.keep(region, handle.0);
    }

    fn shown(&mut self, segment: Segment) -> Option<Shown> {
        let shown = self.stream.shown(segment)?;
        self.beside += shown.len() as u64;
        Some(shown)
    }

    fn is_receiver(&self) -> bool {
        self.received && self.generation == fork::generation()
    }

    fn wakes(&self) -> u64 {
        self.stream.wakes()
    }

    fn doze(&mut self) -> Option<Doze> {
        let may = self.failed.is_none() && matches!(self.stage, Stage::Open) && self.has_nothing_to_do();
        if !may {
            return None;
        }
        if self.stream.is_shared() {
            return self.stream.doze().map(Doze::Bell);
        }
        let naps = self.naps && !self.forked && self.receive.is_between_messages() && self.is_patient();
        naps.then_some(Doze::Stream(self.stream.socket))
    }

    fn arrived(&mut self, bytes: Option<&[u8]>) {
        self.check_fork();
        let Some(bytes) = bytes else {
            self.naps = false;
            return;
        };
        self.syscalls += 1;
        stats::add(Counter::Syscalls, 1);
        // What another process has read is missed: the next poll finds that out.
        if bytes.is_empty() || self.failed.is_some() || !matches!(self.may_receive(), Ok(true)) {
            return;
        }
        debug_assert!(
            self.receive.is_between_messages(),
            "somebody has read while a thread slept on the stream"
        );
        self.receive.drained = bytes.len() < NAP_BYTES;
        self.count_received(bytes.len());
        // From where they are: nearly always they are one message, and nothing of them is kept.
        (self.receive.start, self.receive.end) = (0, bytes.len());
        if let Err(end) = self.process_buffer(bytes).and_then(|()| self.receive.keep(bytes)) {
            self.end(end);
        }
    }

    fn remind(&mut self) -> Option<Instant> {
        if matches!(self.stage, Stage::Open) && self.failed.is_none() { self.stream.remind() } else { None }
    }

    fn wants_write(&self) -> bool {
        match self.stage {
            Stage::SendReply(..) => true,
            // The peer wakes us when there is room.
            Stage::Open if self.stream.is_shared() => false,
            Stage::Open => self.failed.is_none() && self.broken.is_none() && self.transmit.has_work(),
            _ => false,
        }
    }

    fn unsent(&self) -> usize {
        if self.failed.is_some() { self.left } else { self.transmit.unsent() }
    }
}

impl Drop for Iwarp {
    fn drop(&mut self) {
        self.receive.lend_buffer();
        // In a child the frames that it inherited are the parent's, which will finish them.
        if self.generation == fork::generation() && self.transmit.is_inside_message() {
            self.shared.close();
        }
    }
}

impl Options {
    fn offer(&self) -> Offer {
        Offer { crc: self.crc, ird: self.ird, ord: self.ord }
    }
}

impl Receive {
    fn new() -> Receive {
        Receive {
            buffer: Box::default(),
            start: 0,
            end: 0,
            missing: 0,
            placing: None,
            in_run: false,
            drained: false,
            send_msn: 1,
            read_msn: 1,
            sending: None,
            placed: 0,
            total: 0,
            small_path: false,
            ahead: AHEAD,
        }
    }

    fn have_buffer(&mut self) -> Result<(), Error> {
        if self.buffer.is_empty() {
            // Whoever has the lock, in a forked child perhaps a thread of its parent, is not waited for.
            self.buffer = match IDLE.try_lock().ok().and_then(|mut idle| idle.pop()) {
                Some(idle) => idle,
                None => {
                    let mut fresh = Vec::new();
                    // Longer than what the reserve has: a refusal is an error, and not the end of the process.
                    fresh.try_reserve_exact(BUFFER).map_err(|_| {
                        Error::new(Kind::Os(libc::ENOMEM), "no memory to read what the peer sends")
                    })?;
                    fresh.resize(BUFFER, 0);
                    fresh.into_boxed_slice()
                }
            };
        }
        Ok(())
    }

    /// Keeps what is left of `bytes`, which were worked off, in the buffer, which is empty.
    fn keep(&mut self, bytes: &[u8]) -> Result<(), End> {
        let left = &bytes[self.start..self.end];
        (self.start, self.end) = (0, left.len());
        if !left.is_empty() {
            self.have_buffer().map_err(End::Lost)?;
            self.buffer[..left.len()].copy_from_slice(left);
        }
        Ok(())
    }

    /// Leaves the buffer, of which nothing is needed any more, to whoever reads next.
    fn lend_buffer(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        (self.start, self.end) = (0, 0);
        if !buffer.is_empty()
            && let Ok(mut idle) = IDLE.try_lock()
            && idle.len() < BUFFERS
        {
            idle.push(buffer);
        }
    }

    fn is_between_messages(&self) -> bool {
        self.start == self.end && self.placing.is_none() && self.sending.is_none()
    }
}

/// Random handles, fetched a few at a time. A forked child throws them away, so as not to share them.
#[derive(Default)]
struct Tokens {
    words: Vec<u32>,
}

impl Tokens {
    fn take(&mut self) -> Result<u32, Error> {
        if self.words.is_empty() {
            let mut bytes = [0; 256];
            process::random(&mut bytes)?;
            self.words.extend(bytes.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])));
        }
        self.words.pop().ok_or_else(|| Error::new(Kind::Os(libc::EIO), "no random bytes"))
    }
}

/// The offset in a buffer of `size` bytes that a peer's range begins at.
fn range(to: u64, length: usize, size: usize, wrap: Fault, bounds: Fault) -> Result<usize, Fault> {
    // RFC 5041 §7.1: "A 64-bit unsigned sum of the DDP Segment payload length and the TO does not wrap."
    let end = to.checked_add(length as u64).ok_or(wrap)?;
    if end > size as u64 {
        return Err(bounds);
    }
    Ok(to as usize)
}

fn terminated(payload: &[u8]) -> Error {
    let text = match Fault::decode_terminate(payload) {
        Some((_, text)) => text,
        None => Cow::Borrowed("no reason given"),
    };
    lost(format!("the peer terminated the connection: {text}"))
}

/// What has come of a call on the socket in the startup; `None`: nothing yet.
fn startup(result: io::Result<usize>) -> Result<Option<usize>, Error> {
    match result {
        Ok(0) => Err(lost("the peer closed the connection during the startup")),
        Ok(n) => Ok(Some(n)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(lost(format!("the connection was lost during the startup: {e}"))),
    }
}

fn lost(text: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::ConnectionLost, text)
}

fn invalid(text: &'static str) -> Error {
    Error::new(Kind::Invalid, text)
}

/// For tests: what is inside.
#[cfg(test)]
impl Iwarp {
    pub(crate) fn posted_receives(&self) -> usize {
        self.receives.len()
    }

    pub(crate) fn exposes(&self, handle: Handle) -> bool {
        self.exposed.contains_key(&handle.0)
    }

    pub(crate) fn exposures(&self) -> usize {
        self.exposed.len()
    }
}

#[cfg(test)]
mod tests;
