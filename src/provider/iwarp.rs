//! Software iWARP: a queue pair over a connected TCP socket, in user space.
//!
//! Owns the handles that the peer may use, and the life of the connection from the MPA Request to the first error: the
//! beginning is in `startup`, the two halves of what follows are `receive` and `transmit`; `mpa` and `ddp` hold the bytes.
//! The socket stays the caller's: it is never closed, shut down or put into another mode here, and may be in blocking mode.
//!
//! **Handles** are random, belong to one connection, name exactly the bytes given, and carry one right. Taking one back
//! while the bytes behind it are being sent to the peer ends the connection, unless all that remains is framed already:
//! then it goes out from a private copy.
//!
//! **Fork.** Both parent and child go on sending (see `transmit::Shared`); a child sends no Terminate. Receiving is for one
//! process: the first that reads after the fork keeps that role, and the others notice, and leave it the connection. Calls,
//! too, are for one process, because XIDs, credits and handles are in its memory; [`QueuePair::claim`] tells which before
//! anything is sent. When that process has ended, a child that has missed nothing takes over, with its Reads: those on the
//! stream are answered, and those that it has not begun are sent.
//!
//! Read first: RFC 5040 §5 and §7, RFC 5041 §7, RFC 5044 §7.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::config::Crc;
use crate::error::{Error, Kind};
use crate::fork;
use crate::log_info;
use crate::memory::shared::Shown;
use crate::memory::{Areas, Buf, Memory, Region, Regions, Sink};
use crate::process;
use crate::provider::{
    self, Completion, Device, Doze, Limits, NAP, NAP_BYTES, QueuePair, Traits, Way, WorkRequest,
};
use crate::socket;
use crate::stats::{self, Counter};
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Segment};

use super::local::{self, Asked, Offered, Sharing, Trust};
use ddp::Fault;
use mpa::StartFrame;
use receive::{End, Receive, Target};
use startup::Stage;
use stream::Stream;
use transmit::{Read, Shared, Transmit, Work};

pub mod ddp;
pub mod mpa;
mod receive;
mod startup;
mod stream;
mod transmit;

/// How often we check how long a sleep on the socket lasts, in nanoseconds.
const LOOK: u64 = 100_000_000;
/// Longest exposure, Read and Write.
const MAX_SEGMENT: u32 = 1 << 30;
/// Whether the peer may invalidate every handle that it gets: a handle is a number in a table of ours, whatever it
/// stands for (RFC 8797 §4.1, the R flag).
pub const REMOTE_INVALIDATION: bool = true;
/// Most private data that a caller may hand us: what siw can receive, less the enhanced part.
const MAX_PRIVATE_DATA: usize = 248;

/// What the layers above know about it.
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
    /// Ask for CRCs. They are off only when neither end asks.
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

/// An iWARP queue pair. Dropping it releases its memory and leaves the socket alone.
pub struct Iwarp {
    stream: Stream,
    /// A thread may sleep in recvfrom(2) on the socket, for [`NAP`].
    naps: bool,
    /// When the sleep was last seen to end after that time, by [`stats::tick`]; 0: not yet.
    patience_seen: u64,
    /// What one end or the other waits for, if the two ends of the connection may share memory.
    asked: Option<Asked>,
    offered: Option<Box<Offered>>,
    options: Options,
    stage: Stage,
    generation: u64,
    /// The connection is another process's: we were forked from it, or it was forked from us and reads.
    forked: bool,
    /// The [`Shared::caller`] that this process, or the one that it was forked from, has left.
    caller: u64,
    /// This process has received something on it.
    received: bool,
    shared: Shared,
    transmit: Transmit,
    receive: Receive,
    exposed: FxHashMap<u32, Exposed>,
    /// Bytes that went beside the stream, from outboxes, either way.
    beside: u64,
    receives: VecDeque<Posted>,
    /// Where Receives that have no memory yet get it from.
    memory: Option<Arc<Memory>>,
    completions: VecDeque<Completion>,
    /// Bytes of our own Reads whose segments have come.
    pulled: u64,
    /// Reads of the peer that we serve at a time, as agreed.
    ird: usize,
    private_data: Vec<u8>,
    tokens: Tokens,
    /// Sending failed: what arrived before is still delivered, then this error ends the connection.
    broken: Option<Error>,
    failed: Option<Error>,
    /// What [`QueuePair::unsent`] says after the end.
    left: usize,
    /// Payload bytes copied in user space since the start.
    pub copied_bytes: u64,
    /// System calls that moved bytes since the start.
    pub syscalls: u64,
}

/// A Receive.
enum Posted {
    Sink(Sink),
    /// This many bytes, of memory that is taken when a message comes: an idle connection holds none.
    Bytes(usize),
}

/// What a handle names. The first byte has offset 0.
enum Exposed {
    /// And how many of its bytes the peer has asked for.
    Source(Region, u64),
    Sink(Sink),
    /// Bytes that nobody wants any more, but whose writer does not know it yet.
    Discard(usize),
}

impl Iwarp {
    /// Active side: sends the MPA Request in one system call.
    ///
    /// # Errors
    /// `ConnectionLost` when the peer has closed already, `Invalid` for options that no frame can carry.
    pub fn initiator(socket: RawFd, options: Options) -> Result<Iwarp, Error> {
        let mut iwarp = Iwarp::new(socket, options, Stage::AwaitReply)?;
        if iwarp.options.sharing != Sharing::Never {
            // Without sharing, the connection is like any other, and the peer is not asked.
            let must = iwarp.options.sharing == Sharing::Must;
            let from = if must { Trust::ANYBODY } else { Trust::own() };
            iwarp.asked = match Asked::new(&mut iwarp.options.private_data, from) {
                Ok(asked) => Some(asked),
                Err(e) if must => return Err(local::cannot("asking for shared memory", e)),
                Err(e) => {
                    log_info!("the server is not asked for memory: {e}");
                    None
                }
            };
        }
        let o = &iwarp.options;
        let request = StartFrame::request(&o.offer(), o.revision, &o.private_data).encode();
        // One call: a stock RPC server takes the first four bytes for a record mark and closes at once, but it would wait
        // for more if the frame were split.
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
            caller: u64::from(fork::process_id()),
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
    /// Checked only every [`LOOK`], since the check costs what the sleep saves.
    fn is_patient(&mut self) -> bool {
        let now = stats::tick();
        if now.saturating_sub(self.patience_seen) >= LOOK {
            self.patience_seen = now;
            // The kernel rounds to ticks: somewhat more.
            self.naps = matches!(socket::patience(self.stream.socket), Ok(Some(time)) if time <= 2 * NAP);
        }
        self.naps
    }

    /// Whether it is the turn of the peer, with which memory is shared.
    fn has_nothing_to_do(&self) -> bool {
        // The peer wakes us only if there was no room.
        let goes_on = self.transmit.has_work() && self.may_transmit() && !self.stream.wants_room();
        self.completions.is_empty() && !goes_on
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

    /// Takes back a handle and lets go of its memory. False if the peer is still owed bytes of it.
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
                self.receive.retarget(stag, Target::Revoked);
                true
            }
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
            // Nobody can finish what we began: the stream is of no use to any process.
            self.shared.close();
        }
        self.left = self.transmit.unsent();
        self.stream.end();
        self.transmit.clear();
        self.exposed.clear();
        self.receives.clear();
        self.receive.clear();
        self.failed = Some(error.clone());
        error
    }

    /// As [`Iwarp::fail`], for the reason why receiving ended.
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

    /// Notices that this process is a forked child.
    #[inline(always)]
    fn check_fork(&mut self) {
        if self.generation != fork::generation() {
            self.begin_child();
        }
    }

    #[cold]
    fn begin_child(&mut self) {
        self.generation = fork::generation();
        (self.forked, self.received) = (true, false);
        self.transmit.leave_to_parent();
        self.tokens = Tokens::default();
    }

    /// Sends what there is to send: usually nothing, which should cost nothing.
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
        // The next message may be long in coming, and so may the rest of the startup.
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

    /// siw reads what comes with or right after its MPA Reply only when more arrives.
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

    /// What the peer's TCP has acknowledged: a send buffer of some MiB takes long to report that it has room again.
    fn taken(&self) -> u64 {
        self.transmit.sent.saturating_sub(self.stream.unacknowledged())
    }

    fn pulled(&self) -> u64 {
        self.pulled + self.receive.pulling() as u64
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
                self.receive.retarget(stag, Target::Nowhere);
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
        self.receive.release_lent();
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
        // A child does not know whether it or its parent will go on receiving.
        if self.forked {
            return 0;
        }
        let before = self.receives.len();
        // Messages come one after the other: only the oldest Receive can have been begun.
        self.receives.truncate(usize::from(self.receive.is_inside_message()));
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
        // Requests that have just arrived may be answered at once.
        if !self.transmit.blocked {
            self.pump();
        }
        if self.receive.unread().is_empty() {
            self.receive.lend_buffer();
        }
        // More may have come by the next call.
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
        let all = self.receive.drained && self.receive.unread().is_empty() && !self.receive.is_placing();
        let rest = self.failed.is_some() || self.broken.is_some() || self.transmit.has_work();
        let drained = all && self.completions.is_empty() && !rest && self.stream.drained();
        if drained {
            self.receive.lend_buffer();
            // More may have come by the next call.
            self.receive.drained = false;
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

    fn claim(&mut self, answers: bool) -> bool {
        self.check_fork();
        // A process that has missed bytes can make nothing of what follows.
        let has_all = |shared: &Shared| shared.received() == self.receive.total && !shared.has_lost_bytes();
        let may = |shared: &Shared| has_all(shared) && (answers || self.transmit.has_numbered_last(shared));
        let claimed = has_all(&self.shared) && self.shared.claim(may);
        if claimed && self.forked {
            (self.forked, self.received, self.caller) = (false, true, self.shared.caller());
            if !self.transmit.take_over(&self.shared) {
                self.broken =
                    Some(lost("a process that has ended has asked for bytes that this one does not know of"));
            }
            self.stream.claim();
        }
        claimed
    }

    fn has_missed(&mut self) -> bool {
        self.check_fork();
        self.forked && !matches!(self.may_receive(), Ok(true))
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
        if self.failed.is_some() || !matches!(self.stage, Stage::Open) || self.has_missed() {
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
        if bytes.is_empty() || self.failed.is_some() {
            return;
        }
        // If another process has read from the socket, those bytes are missing here.
        match self.may_receive() {
            Ok(true) => {}
            Ok(false) => return,
            Err(end) => {
                self.end(end);
                return;
            }
        }
        debug_assert!(
            self.receive.is_between_messages(),
            "somebody has read while a thread slept on the stream"
        );
        self.receive.drained = bytes.len() < NAP_BYTES;
        self.count_received(bytes.len());
        // Processed where they are: nearly always they are one message, and nothing of them is kept.
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
        // In a child, the inherited frames are the parent's, which will finish them.
        if self.generation == fork::generation() && self.transmit.is_inside_message() {
            self.shared.close();
        }
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
