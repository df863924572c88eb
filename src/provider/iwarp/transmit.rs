//! The sending half of a queue pair: cuts messages into FPDUs as the socket takes them.
//!
//! Nothing is materialised: a frame is its header, a cursor into the caller's memory and its CRC word; at most
//! [`BATCH`] bytes are framed ahead of the socket. The CRC is computed when a frame is made, just before the kernel
//! copies the same bytes.
//!
//! A write ends between two FPDUs, unless one of them has more pieces than a system call takes, or the socket takes less than
//! it is offered. Linux's siw (6.1 to 7.3) ends a connection when a pad and its CRC reach it in two pieces: where that
//! happens depends on how TCP cuts its segments, and is beyond our control.
//!
//! Two streams feed the frames: our own work, in the order in which it was posted, and the Read Responses that the
//! peer has asked for, in the order of its requests. They take turns frame by frame while one of them is untagged;
//! two tagged messages never interleave (siw drops such a connection), so there they take turns message by message.
//! A Read for which the peer has no room steps aside and lets later Sends pass (RFC 5040 §5.5 rule 4: a ULP that cares
//! must wait for the Read).
//!
//! What a write changes and a forked child must know is kept in [`Shared`] words: the next MSN of each queue, and which
//! process has an unfinished message on the stream. Any other process finds the socket "full" until that message is
//! finished.
//!
//! # Invariants
//! - `Shared::owner` is this process whenever `frames` is not empty or a message has been begun and not finished.
//! - `frame_bytes` is the sum of what the frames have left to send.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use smallvec::SmallVec;

use super::ddp::{self, Header, Opcode, ReadRequest};
use super::stream::Stream;
use super::{lost, mpa};
use crate::error::{Error, Kind};
use crate::fork;
use crate::memory::{IoVec, Region, Regions, Sink};
use crate::provider::WorkId;
use crate::wire::Segment;

/// Bytes framed ahead of the socket; also about what one system call hands over.
const BATCH: usize = 256 << 10;
/// Frames made ahead of the socket.
const BATCH_FRAMES: usize = 256;
/// Bytes that one call of [`Transmit::run`] sends at most, so that a peer that reads as fast as we write cannot hold
/// the caller.
const RUN: usize = 8 << 20;

/// The longest FPDU that goes out in one piece from the stack, where one copy costs less than keeping track of the
/// pieces.
const SHORT: usize = 512;

/// Pieces of the frames of one system call: usually few.
type IoVecs<'a> = SmallVec<[IoVec<'a>; 16]>;

/// Bytes of the longest pad and the CRC word.
const MAX_TAIL: usize = 7;

/// The least that a queued Send holds.
pub(super) const PAGE: usize = 4096;

/// What forked processes share. The owner of the stream writes the words, except for those that say who reads, how much was
/// received, and who makes calls. Which process is the owner changes only under the lock, unless nobody else can have the words.
pub(super) struct Shared {
    words: fork::SharedWords,
}

impl Shared {
    const MSN: usize = 0;
    const OWNER: usize = 2;
    const CLOSED: usize = 3;
    const RECEIVED: usize = 4;
    const CALLER: usize = 5;
    const READER: usize = 6;
    const READING: usize = 7;

    pub(super) fn new() -> io::Result<Shared> {
        let shared = Shared { words: fork::SharedWords::new()? };
        shared.set(Shared::CALLER, u64::from(fork::process_id()));
        // RFC 5041 §4.3: "The initial value for MSN MUST be one."
        shared.set(Shared::MSN, 1);
        shared.set(Shared::MSN + 1, 1);
        Ok(shared)
    }

    /// Whether this process makes the calls on the connection: it does already, or `may` lets it take over from a process
    /// that has ended.
    pub(super) fn claim(&self, may: impl Fn(&Shared) -> bool) -> bool {
        let (caller, us) = (self.get(Shared::CALLER), u64::from(fork::process_id()));
        if caller == us {
            return true;
        }
        // Of several children, only one takes over, and none whose sibling has begun to read.
        let takes =
            |from, to| self.words.word(Shared::CALLER).compare_exchange(from, to, SeqCst, Relaxed).is_ok();
        fork::process_gone(caller as u32)
            && may(self)
            && takes(caller, us)
            && (may(self) || {
                takes(us, caller);
                false
            })
    }

    /// This process, a child that has not taken over, reads.
    pub(super) fn note_reader(&self) {
        self.set(Shared::READER, u64::from(fork::process_id()));
    }

    /// This process is about to read, and count what it has read.
    #[inline]
    pub(super) fn begin_to_read(&self) {
        self.set(Shared::READING, u64::from(fork::process_id()));
    }

    /// It has done so.
    #[inline]
    pub(super) fn end_to_read(&self) {
        self.set(Shared::READING, 0);
    }

    /// Whether a process has ended in the midst of that, perhaps with bytes that were not counted.
    pub(super) fn has_lost_bytes(&self) -> bool {
        let reading = self.get(Shared::READING) as u32;
        reading != 0 && fork::process_gone(reading)
    }

    /// Whether the child that has read has ended.
    pub(super) fn has_reader_ended(&self) -> bool {
        fork::process_gone(self.get(Shared::READER) as u32)
    }

    /// The process that the connection belongs to.
    pub(super) fn caller(&self) -> u64 {
        self.get(Shared::CALLER)
    }

    /// Takes the number of the next message of a queue.
    fn take_msn(&self, queue: u32) -> u32 {
        let word = Shared::MSN + queue as usize;
        let msn = self.get(word) as u32;
        // RFC 5041 §4.3: "The MSN value MUST wrap to 0 after a value of 0xFFFFFFFF."
        self.set(word, u64::from(msn.wrapping_add(1)));
        msn
    }

    #[cfg(test)]
    pub(super) fn set_msn(&self, queue: u32, msn: u32) {
        self.set(Shared::MSN + queue as usize, u64::from(msn));
    }

    /// No process sends on this connection any more: its stream is broken, or it has ended with a Terminate.
    pub(super) fn close(&self) {
        self.set(Shared::CLOSED, 1);
    }

    /// Bytes received so far by whichever process receives. A process whose own count differs has missed some, and can
    /// make nothing of what follows.
    pub(super) fn received(&self) -> u64 {
        self.get(Shared::RECEIVED)
    }

    pub(super) fn set_received(&self, bytes: u64) {
        self.set(Shared::RECEIVED, bytes);
    }

    /// Runs `work` with the stream to itself, if this process may write to it. `work` returns its result, and whether the
    /// stream is inside a message then. `None`: another process is in the middle of a message.
    ///
    /// # Errors
    /// When the stream is broken for ever.
    pub(super) fn with_stream<T>(&self, work: impl FnOnce(&Shared) -> (T, bool)) -> Result<Option<T>, Error> {
        let us = u64::from(fork::process_id());
        let owner = self.words.word(Shared::OWNER);
        // Nearly always nobody else has the words, and nothing is locked. A child forked after the exchange finds its parent
        // to be the owner; one forked before it is noticed by the second check.
        let before = owner.load(Relaxed);
        if (before == 0 || before == us)
            && self.words.are_unshared()
            && !self.is_closed()
            && reached(self, Point::Looked)
            && owner.compare_exchange(before, us, SeqCst, Relaxed).is_ok()
        {
            reached(self, Point::Taken);
            if self.words.are_unshared() {
                return Ok(Some(self.own_stream(work)));
            }
            // Meanwhile nobody can have taken the stream from the owner that was there before.
            owner.store(before, Release);
        }
        let Some(lock) = self.words.lock()? else { return Ok(None) };
        if self.is_closed() {
            return Err(lost("another process has ended the connection"));
        }
        let before = owner.load(Acquire);
        if before != 0 && (lock.owner_died() || (before != us && fork::process_gone(before as u32))) {
            self.close();
            return Err(lost("a forked process ended in the middle of sending a message"));
        }
        if before != 0 && before != us {
            return Ok(None);
        }
        reached(self, Point::Locked);
        // Before the first byte: should this process end inside the call, the others must know.
        // The owner word may also have changed unseen: a parent may be about to find out that we were forked.
        if owner.compare_exchange(before, us, SeqCst, Relaxed).is_err() {
            return Ok(None);
        }
        Ok(Some(self.own_stream(work)))
    }

    /// Runs `work` as the owner of the stream.
    #[inline]
    fn own_stream<T>(&self, work: impl FnOnce(&Shared) -> (T, bool)) -> T {
        let (done, inside) = work(self);
        if !inside {
            self.words.word(Shared::OWNER).store(0, Release);
        }
        done
    }

    fn is_closed(&self) -> bool {
        self.get(Shared::CLOSED) != 0
    }

    fn get(&self, word: usize) -> u64 {
        self.words.word(word).load(Relaxed)
    }

    fn set(&self, word: usize, value: u64) {
        self.words.word(word).store(value, Relaxed);
    }
}

/// A point between two steps of [`Shared::with_stream`], for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// Nobody else has the words, as far as has been seen.
    Looked,
    /// The stream is taken, without the lock.
    Taken,
    /// The stream is free, with the lock.
    Locked,
}

#[cfg(not(test))]
#[inline(always)]
fn reached(_: &Shared, _: Point) -> bool {
    true
}

#[cfg(test)]
thread_local! {
    static REACHED: std::cell::Cell<fn(&Shared, Point)> = const { std::cell::Cell::new(|_, _| ()) };
}

#[cfg(test)]
fn reached(shared: &Shared, point: Point) -> bool {
    REACHED.get()(shared, point);
    true
}

/// Work of our own.
pub(super) enum Work {
    Send { gather: Arc<[Region]>, len: usize, invalidate: Option<u32> },
    Write { gather: Arc<[Region]>, to: Segment },
    Read(Read),
}

/// An RDMA Read of ours, waiting for its turn or for its response.
pub(super) struct Read {
    pub(super) id: WorkId,
    /// `None`: the sink was lent and has been taken back.
    pub(super) sink: Option<Sink>,
    pub(super) at: usize,
    pub(super) from: Segment,
    /// Names the sink on the stream, for this Read only.
    pub(super) stag: u32,
    /// Bytes of the response that have been placed.
    pub(super) done: u32,
}

impl Read {
    /// Gives up a sink that was lent.
    fn take_back(&mut self) {
        self.sink = self.sink.take().filter(|sink| !sink.is_lent());
    }
}

/// A Read Response that we owe the peer.
struct Response {
    request: ReadRequest,
    /// The requested bytes, as one region.
    bytes: Arc<[Region]>,
    done: u32,
}

/// A message of ours of which at least one segment has been framed, with more to come.
struct Current {
    work: Work,
    msn: u32,
    done: usize,
    cursor: Cursor,
}

/// A place in a gather list.
#[derive(Clone)]
struct Cursor {
    gather: Arc<[Region]>,
    piece: usize,
    at: usize,
}

struct Frame {
    head: [u8; ddp::READ_REQUEST],
    head_len: u8,
    /// Pad and CRC.
    tail: [u8; MAX_TAIL],
    tail_len: u8,
    from: Cursor,
    payload: usize,
    sent: usize,
    /// The handle of ours that the payload is read from, if it belongs to a Read Response.
    source: Option<u32>,
    /// The last frame of a Read Response: once it has gone, the peer may send one more request.
    ends_response: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feed {
    Own,
    Response,
}

/// The state of the sending half.
pub(super) struct Transmit {
    frames: VecDeque<Frame>,
    frame_bytes: usize,
    current: Option<Current>,
    queue: VecDeque<Work>,
    /// Reads that found no room at the peer, in order.
    stalled: VecDeque<Read>,
    /// Reads on the stream, oldest first: responses come in this order.
    pub(super) outstanding: VecDeque<Read>,
    responses: VecDeque<Response>,
    /// Requests of the peer whose response has not left completely.
    inbound: usize,
    own_last: bool,
    /// Payload bytes of own work that the socket has not taken.
    unsent: usize,
    /// Sends in `queue`.
    sends_queued: usize,
    /// Sends and Reads that were numbered in this process, or in the one that it was forked from.
    numbered: [u32; 2],
    /// Reads that the latter had not begun at the fork.
    left: VecDeque<Read>,
    empty: Arc<[Region]>,
    /// Whether the socket (or another process) keeps us from sending.
    pub(super) blocked: bool,
    pub(super) crc: bool,
    pub(super) ord: usize,
    /// RFC 5044 §7.1.2 rule 4: a responder sends nothing before it has received an FPDU.
    pub(super) may_send: bool,
    ulpdu: usize,
    max_fpdu: Option<usize>,
    /// Bytes that the socket has taken so far.
    pub(super) sent: u64,
    /// Bytes until the segment size is checked again, and how many after that: the size grows with TCP's window right
    /// after the connection is made, and rarely changes later.
    until_look: usize,
    next_look: usize,
}

impl Transmit {
    pub(super) fn new(max_fpdu: Option<usize>) -> Transmit {
        Transmit {
            frames: VecDeque::new(),
            frame_bytes: 0,
            current: None,
            queue: VecDeque::new(),
            stalled: VecDeque::new(),
            outstanding: VecDeque::new(),
            responses: VecDeque::new(),
            inbound: 0,
            own_last: false,
            unsent: 0,
            sends_queued: 0,
            numbered: [0; 2],
            left: VecDeque::new(),
            empty: Arc::from([]),
            blocked: false,
            sent: 0,
            crc: true,
            ord: 0,
            may_send: false,
            ulpdu: 0,
            max_fpdu,
            until_look: 0,
            next_look: 64 << 10,
        }
    }

    pub(super) fn post(&mut self, work: Work) {
        self.unsent += match &work {
            Work::Send { len, .. } => {
                self.sends_queued += 1;
                *len
            }
            Work::Write { to, .. } => to.length as usize,
            Work::Read(_) => 0,
        };
        self.queue.push_back(work);
    }

    /// Whether a Send of these pieces is one FPDU, and nothing is to go out before it.
    pub(super) fn may_send_at_once(&mut self, stream: &Stream, gather: &[Region]) -> bool {
        let len = gather.iter().map(|piece| piece.len()).sum::<usize>();
        let own = gather.iter().all(|piece| !piece.is_lent());
        let free = self.may_send && !self.blocked && self.is_idle();
        own && free && len <= self.segment(stream, ddp::UNTAGGED)
    }

    /// Sends what [`Transmit::may_send_at_once`] has allowed, and queues what the socket does not take.
    ///
    /// # Errors
    /// When the stream is broken.
    pub(super) fn send_at_once(
        &mut self,
        (stream, shared): (&mut Stream, &Shared),
        gather: Regions,
        invalidate: Option<u32>,
        calls: &mut u64,
    ) -> Result<(), Error> {
        let payload = gather.iter().map(|piece| piece.len()).sum::<usize>();
        let (mut head, mut tail) = ([0; ddp::UNTAGGED], [0; MAX_TAIL]);
        let pad = mpa::pad_len(head.len() - 2 + payload);
        let tail = &mut tail[..pad + 4];
        let whole = head.len() + payload + tail.len();
        let sent = shared.with_stream(|shared| {
            send_header(self.number_send(shared), invalidate, true, 0).encode(payload, &mut head);
            let crc = self.crc.then(|| {
                let head = crc32c::crc32c(&head);
                let all = gather.iter().fold(head, |crc, piece| crc32c::crc32c_append(crc, piece));
                crc32c::crc32c_append(all, &tail[..pad])
            });
            tail[pad..].copy_from_slice(&mpa::crc_word(crc));
            *calls += 1;
            let sent = if whole <= SHORT {
                let (mut fpdu, mut end) = ([0; SHORT], head.len());
                fpdu[..end].copy_from_slice(&head);
                for piece in &gather {
                    fpdu[end..end + piece.len()].copy_from_slice(piece);
                    end += piece.len();
                }
                fpdu[end..whole].copy_from_slice(tail);
                offer(stream, &[IoVec::from_slice(&fpdu[..whole])])
            } else {
                let mut pieces = IoVecs::new();
                pieces.push(IoVec::from_slice(&head));
                pieces.extend(gather.iter().map(|piece| IoVec::from_slice(piece)));
                pieces.push(IoVec::from_slice(tail));
                offer(stream, &pieces)
            };
            let inside = !matches!(sent, Ok(sent) if sent == whole);
            (sent, inside)
        })?;
        self.blocked = true;
        match sent.transpose()? {
            None => self.post(Work::Send { gather: list(gather), len: payload, invalidate }),
            Some(sent) if sent == whole => {
                self.sent += sent as u64;
                self.blocked = false;
            }
            Some(sent) => {
                self.sent += sent as u64;
                self.unsent += payload;
                self.frame_bytes += whole - sent;
                let from = Cursor { gather: list(gather), piece: 0, at: 0 };
                let mut frame = Frame::new(from, payload);
                frame.head[..head.len()].copy_from_slice(&head);
                frame.head_len = head.len() as u8;
                frame.tail[..tail.len()].copy_from_slice(tail);
                frame.tail_len = tail.len() as u8;
                frame.sent = sent;
                self.frames.push_back(frame);
            }
        }
        Ok(())
    }

    /// The number of the next Send.
    fn number_send(&mut self, shared: &Shared) -> u32 {
        self.number(shared, ddp::SEND_QUEUE)
    }

    fn number(&mut self, shared: &Shared, queue: u32) -> u32 {
        let numbered = &mut self.numbered[queue as usize];
        *numbered = numbered.wrapping_add(1);
        shared.take_msn(queue)
    }

    /// Queues the response to a request; `bytes` is what it asked for.
    pub(super) fn respond(&mut self, request: ReadRequest, bytes: Option<Region>) {
        let bytes = bytes.map_or_else(|| self.empty.clone(), |region| Arc::from([region]));
        self.inbound += 1;
        self.responses.push_back(Response { request, bytes, done: 0 });
    }

    /// Requests of the peer that are not answered yet.
    pub(super) fn inbound(&self) -> usize {
        self.inbound
    }

    /// Bytes of own Sends and Writes that the socket has not taken, plus a page for each Send in the queue, which is what
    /// a short Send holds.
    pub(super) fn unsent(&self) -> usize {
        self.unsent + self.sends_queued * PAGE
    }

    /// Whether nothing at all is left to send.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.frames.is_empty()
            && self.current.is_none()
            && self.queue.is_empty()
            && self.stalled.is_empty()
            && self.responses.is_empty()
    }

    /// Whether there is something that could be sent if the socket took it.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        // Asked several times for each call, mostly when there is nothing.
        !self.is_idle() && (!self.frames.is_empty() || self.next().is_some())
    }

    /// Whether no other process has sent anything that we do not know of.
    pub(super) fn has_numbered_last(&self, shared: &Shared) -> bool {
        [ddp::SEND_QUEUE, ddp::READ_QUEUE].into_iter().all(|queue| self.has_last_number(shared, queue))
    }

    fn has_last_number(&self, shared: &Shared, queue: u32) -> bool {
        shared.get(Shared::MSN + queue as usize) as u32 == self.numbered[queue as usize].wrapping_add(1)
    }

    /// Whether the stream stands inside an FPDU of ours.
    pub(super) fn is_half_sent(&self) -> bool {
        self.frames.front().is_some_and(|frame| frame.sent > 0)
    }

    /// Whether a message of ours has been begun and not finished: nobody else may send until it is finished.
    pub(super) fn is_inside_message(&self) -> bool {
        !self.frames.is_empty()
            || self.current.is_some()
            || self.responses.front().is_some_and(|response| response.done > 0)
    }

    #[cfg(test)]
    pub(super) fn is_all_framed(&self) -> bool {
        self.current.is_none() && self.queue.is_empty() && self.responses.is_empty()
    }

    /// Leaves what is to be sent to the process that we were forked from. The responses to its Reads come to whichever process
    /// reads; and what it has not begun it may never begin.
    pub(super) fn leave_to_parent(&mut self) {
        let [mut outstanding, mut left] = [&mut self.outstanding, &mut self.left].map(std::mem::take);
        left.append(&mut self.stalled);
        left.extend(self.queue.drain(..).filter_map(|work| match work {
            Work::Read(read) => Some(read),
            Work::Send { .. } | Work::Write { .. } => None,
        }));
        outstanding.iter_mut().chain(&mut left).for_each(Read::take_back);
        self.clear();
        (self.outstanding, self.left) = (outstanding, left);
    }

    /// That process has ended. Queues the Reads that no process has begun. Returns false if it has begun some: nobody knows which
    /// responses are to come.
    pub(super) fn take_over(&mut self, shared: &Shared) -> bool {
        let left = std::mem::take(&mut self.left);
        let knows = self.has_last_number(shared, ddp::READ_QUEUE);
        if knows {
            left.into_iter().for_each(|read| self.post(Work::Read(read)));
        }
        knows
    }

    /// Forgets everything: the connection is over.
    pub(super) fn clear(&mut self) {
        self.left.clear();
        self.frames.clear();
        self.current = None;
        self.queue.clear();
        self.stalled.clear();
        self.outstanding.clear();
        self.responses.clear();
        (self.frame_bytes, self.inbound, self.unsent, self.blocked) = (0, 0, 0, false);
        self.sends_queued = 0;
    }

    /// Looks up the segment size that the path now has.
    pub(super) fn look_at_path(&mut self, stream: &Stream) {
        let mss = stream.segment().unwrap_or(usize::MAX).min(self.max_fpdu.unwrap_or(usize::MAX));
        self.ulpdu = mpa::mulpdu(mss);
        self.until_look = self.next_look;
        self.next_look = (self.next_look * 2).min(1 << 20);
    }

    /// Largest FPDU that we now send.
    pub(super) fn fpdu(&self) -> usize {
        mpa::fpdu_len(self.ulpdu)
    }

    /// Sends until nothing is left, the socket is full, or [`RUN`] bytes are gone.
    ///
    /// # Errors
    /// When the stream is broken.
    pub(super) fn run(
        &mut self,
        (stream, shared): (&mut Stream, &Shared),
        calls: &mut u64,
    ) -> Result<(), Error> {
        self.blocked = false;
        if !self.has_work() {
            return Ok(());
        }
        let result = shared.with_stream(|shared| {
            let result = self.pump(stream, shared, calls);
            (result, self.is_inside_message())
        })?;
        match result {
            Some(result) => result,
            None => {
                self.blocked = true;
                Ok(())
            }
        }
    }

    fn pump(&mut self, stream: &mut Stream, shared: &Shared, calls: &mut u64) -> Result<(), Error> {
        let mut budget = RUN;
        loop {
            while self.frame_bytes < BATCH && self.frames.len() < BATCH_FRAMES {
                match self.next() {
                    Some(Feed::Own) => self.frame_own(stream, shared),
                    Some(Feed::Response) => self.frame_response(stream),
                    None => break,
                }
            }
            if self.frames.is_empty() {
                return Ok(());
            }
            let mut pieces = IoVecs::new();
            let mut offered = 0;
            for frame in &self.frames {
                let before = pieces.len();
                let added = frame.pieces(&mut pieces);
                // What does not fit into one system call as a whole begins the next.
                if before > 0 && frame.sent + added < frame.len() {
                    pieces.truncate(before);
                    break;
                }
                offered += added;
            }
            *calls += 1;
            let sent = offer(stream, &pieces)?;
            drop(pieces);
            self.sent += sent as u64;
            self.take_sent(sent);
            budget = budget.saturating_sub(sent);
            if sent < offered || budget == 0 {
                self.blocked = true;
                return Ok(());
            }
        }
    }

    /// Which feed may frame its next segment.
    fn next(&self) -> Option<Feed> {
        if !self.may_send {
            return None;
        }
        let own_is_tagged = match &self.current {
            Some(current) => Some(matches!(current.work, Work::Write { .. })),
            None => self.next_own().map(|i| matches!(self.queue.get(i), Some(Work::Write { .. }))),
        };
        let in_response = self.responses.front().is_some_and(|response| response.done > 0);
        let in_write = self.current.is_some() && own_is_tagged == Some(true);
        let own = own_is_tagged.is_some_and(|tagged| !(tagged && in_response));
        let response = !self.responses.is_empty() && !in_write;
        match (own, response) {
            (true, true) => Some(if self.own_last { Feed::Response } else { Feed::Own }),
            (true, false) => Some(Feed::Own),
            (false, true) => Some(Feed::Response),
            (false, false) => None,
        }
    }

    /// Index in `queue` of the own work to begin next, skipping Reads for which there is no room; `usize::MAX` stands for
    /// the oldest stalled Read.
    fn next_own(&self) -> Option<usize> {
        let room = self.outstanding.len() < self.ord;
        if room && !self.stalled.is_empty() {
            return Some(usize::MAX);
        }
        // Stalled Reads are moved away when work is begun, so this looks at a few entries at most.
        let wait = !room || !self.stalled.is_empty();
        self.queue.iter().position(|work| !(wait && matches!(work, Work::Read(_))))
    }

    /// Takes the own work to begin next out of the queue.
    fn take_own(&mut self) -> Option<Work> {
        let index = self.next_own()?;
        if index == usize::MAX {
            return self.stalled.pop_front().map(Work::Read);
        }
        for _ in 0..index {
            if let Some(Work::Read(read)) = self.queue.pop_front() {
                self.stalled.push_back(read);
            }
        }
        let work = self.queue.pop_front()?;
        self.sends_queued -= usize::from(matches!(work, Work::Send { .. }));
        Some(work)
    }

    fn frame_own(&mut self, stream: &Stream, shared: &Shared) {
        self.own_last = true;
        let mut current = match self.current.take() {
            Some(current) => current,
            None => match self.take_own() {
                Some(Work::Read(read)) => return self.frame_read(stream, shared, read),
                Some(work) => {
                    let (gather, msn) = match &work {
                        Work::Send { gather, .. } => (gather, self.number_send(shared)),
                        Work::Write { gather, .. } => (gather, 0),
                        Work::Read(_) => return,
                    };
                    let cursor = Cursor { gather: gather.clone(), piece: 0, at: 0 };
                    Current { work, msn, done: 0, cursor }
                }
                None => return,
            },
        };
        let (len, header_len) = match &current.work {
            Work::Send { len, .. } => (*len, ddp::UNTAGGED),
            Work::Write { to, .. } => (to.length as usize, ddp::TAGGED),
            Work::Read(_) => return,
        };
        let payload = (len - current.done).min(self.segment(stream, header_len));
        let last = current.done + payload == len;
        let header = match &current.work {
            Work::Write { to, .. } => Header::Tagged {
                opcode: Opcode::Write,
                last,
                stag: to.handle.0,
                to: to.offset.wrapping_add(current.done as u64),
            },
            Work::Send { invalidate, .. } => send_header(current.msn, *invalidate, last, current.done),
            Work::Read(_) => return,
        };
        let from = current.cursor.clone();
        current.cursor.advance(payload);
        current.done += payload;
        self.push(header, &[], from, payload);
        if !last {
            self.current = Some(current);
        }
    }

    fn frame_read(&mut self, stream: &Stream, shared: &Shared, read: Read) {
        self.segment(stream, ddp::UNTAGGED);
        let request = ReadRequest {
            sink_stag: read.stag,
            sink_to: 0,
            size: read.from.length,
            source_stag: read.from.handle.0,
            source_to: read.from.offset,
        };
        let header = Header::Untagged {
            opcode: Opcode::ReadRequest,
            last: true,
            invalidate: 0,
            msn: self.number(shared, ddp::READ_QUEUE),
            mo: 0,
        };
        let nothing = self.nothing();
        self.push(header, &request.encode(), nothing, 0);
        self.outstanding.push_back(read);
    }

    fn frame_response(&mut self, stream: &Stream) {
        self.own_last = false;
        let most = self.segment(stream, ddp::TAGGED);
        let Some(response) = self.responses.front_mut() else { return };
        let payload = ((response.request.size - response.done) as usize).min(most);
        let from = Cursor { gather: response.bytes.clone(), piece: 0, at: response.done as usize };
        // RFC 5040 §4.4 has the sink's STag and offset copied from the request; also when nothing is sent.
        let to = response.request.sink_to.wrapping_add(u64::from(response.done));
        response.done += payload as u32;
        let last = response.done == response.request.size;
        let request = response.request;
        let header = Header::Tagged { opcode: Opcode::ReadResponse, last, stag: request.sink_stag, to };
        if last {
            self.responses.pop_front();
        }
        self.push(header, &[], from, payload);
        if let Some(frame) = self.frames.back_mut() {
            frame.source = Some(request.source_stag);
            frame.ends_response = last;
        }
    }

    /// Payload bytes of the largest segment with this header that the path takes. Together with its header it is a
    /// multiple of four, so that only last segments are padded.
    fn segment(&mut self, stream: &Stream, header_len: usize) -> usize {
        if self.until_look == 0 {
            self.look_at_path(stream);
        }
        let payload = (2 + self.ulpdu - header_len) & !3;
        self.until_look = self.until_look.saturating_sub(payload);
        payload
    }

    fn push(&mut self, header: Header, extra: &[u8], from: Cursor, payload: usize) {
        let mut frame = Frame::new(from, payload);
        let at = header.encode(extra.len() + payload, &mut frame.head);
        frame.head[at..at + extra.len()].copy_from_slice(extra);
        frame.head_len = (at + extra.len()) as u8;
        let pad = mpa::pad_len(usize::from(frame.head_len) - 2 + payload);
        let crc = self.crc.then(|| {
            let mut crc = crc32c::crc32c(&frame.head[..usize::from(frame.head_len)]);
            frame.from.for_each(payload, |region, at, n| {
                crc = crc32c::crc32c_append(crc, &region[at..at + n]);
            });
            crc32c::crc32c_append(crc, &frame.tail[..pad])
        });
        frame.tail[pad..pad + 4].copy_from_slice(&mpa::crc_word(crc));
        frame.tail_len = (pad + 4) as u8;
        self.frame_bytes += frame.len();
        self.frames.push_back(frame);
    }

    fn take_sent(&mut self, mut bytes: usize) {
        self.frame_bytes -= bytes;
        while let Some(frame) = self.frames.front_mut() {
            let n = (frame.len() - frame.sent).min(bytes);
            frame.sent += n;
            bytes -= n;
            if frame.sent < frame.len() {
                return;
            }
            if frame.source.is_none() {
                self.unsent -= frame.payload;
            }
            if frame.ends_response {
                self.inbound -= 1;
            }
            self.frames.pop_front();
        }
    }

    /// Whether the peer is owed bytes of a handle that are not framed yet.
    pub(super) fn owes(&self, stag: u32) -> bool {
        self.responses.iter().any(|r| r.request.source_stag == stag && r.request.size > 0)
    }

    /// Lets go of the memory behind a handle that is no longer exposed. What is framed already goes out from a copy;
    /// returns the length of that copy. `None`: the peer is owed more bytes of the memory than are framed.
    pub(super) fn release(&mut self, stag: u32) -> io::Result<Option<usize>> {
        if self.owes(stag) {
            return Ok(None);
        }
        self.copy_frames(stag).map(Some)
    }

    /// Redirects all that is owed from a handle to `copy`, a copy of its whole region. Returns the bytes copied.
    pub(super) fn redirect(&mut self, stag: u32, copy: &Region) -> io::Result<usize> {
        for response in self.responses.iter_mut().filter(|r| r.request.source_stag == stag) {
            if response.request.size > 0 {
                // Checked when the request was accepted: the range lies in the region.
                let at = response.request.source_to as usize;
                response.bytes = Arc::from([copy.slice(at, response.request.size as usize)]);
            }
        }
        self.copy_frames(stag)
    }

    /// Lets go of the lent memory that own work names. What has not left goes out from copies, whose length is returned,
    /// and what Reads still bring is thrown away.
    pub(super) fn release_lent(&mut self) -> io::Result<usize> {
        let mut copies = Copies::default();
        for frame in self.frames.iter_mut().filter(|frame| frame.source.is_none()) {
            copies.redirect(&mut frame.from)?;
        }
        if let Some(Current { work, cursor, .. }) = &mut self.current {
            copies.redirect(cursor)?;
            if let Work::Send { gather, .. } | Work::Write { gather, .. } = work {
                *gather = cursor.gather.clone();
            }
        }
        for work in &mut self.queue {
            match work {
                Work::Send { gather, .. } | Work::Write { gather, .. } => {
                    let mut cursor = Cursor { gather: gather.clone(), piece: 0, at: 0 };
                    copies.redirect(&mut cursor)?;
                    *gather = cursor.gather;
                }
                Work::Read(read) => read.take_back(),
            }
        }
        self.stalled.iter_mut().chain(&mut self.outstanding).for_each(Read::take_back);
        Ok(copies.bytes)
    }

    fn copy_frames(&mut self, stag: u32) -> io::Result<usize> {
        let mut copied = 0;
        let empty = self.empty.clone();
        for frame in self.frames.iter_mut().filter(|f| f.source == Some(stag)) {
            let from = &frame.from;
            let gather = match from.gather.get(from.piece) {
                Some(region) if frame.payload > 0 => {
                    copied += frame.payload;
                    Arc::from([Region::copy_from(&region[from.at..from.at + frame.payload])?])
                }
                _ => empty.clone(),
            };
            frame.from = Cursor { gather, piece: 0, at: 0 };
        }
        Ok(copied)
    }

    fn nothing(&self) -> Cursor {
        Cursor { gather: self.empty.clone(), piece: 0, at: 0 }
    }
}

impl Cursor {
    /// Calls `each` with the pieces of the next `len` bytes.
    fn for_each<'a>(&'a self, len: usize, mut each: impl FnMut(&'a Region, usize, usize)) {
        let (mut left, mut at) = (len, self.at);
        for region in &self.gather[self.piece.min(self.gather.len())..] {
            if left == 0 {
                return;
            }
            let n = left.min(region.len() - at);
            each(region, at, n);
            left -= n;
            at = 0;
        }
    }

    fn advance(&mut self, mut len: usize) {
        while let Some(region) = self.gather.get(self.piece) {
            let n = len.min(region.len() - self.at);
            self.at += n;
            len -= n;
            if self.at < region.len() {
                return;
            }
            (self.piece, self.at) = (self.piece + 1, 0);
        }
    }
}

/// Replaces the gather lists that hold lent memory.
#[derive(Default)]
struct Copies {
    /// The first cursor into the latest list, before its change, and the copy of what lies from there on.
    latest: Option<(Cursor, Arc<[Region]>)>,
    /// Bytes copied so far.
    bytes: usize,
}

impl Copies {
    /// Moves a cursor to its place in a copy of its list. Cursors into one list come one after the other, in order, so
    /// that one copy serves them all and what lies before the first is not copied.
    fn redirect(&mut self, cursor: &mut Cursor) -> io::Result<()> {
        if !self.latest.as_ref().is_some_and(|(first, _)| Arc::ptr_eq(&first.gather, &cursor.gather)) {
            if !cursor.gather.iter().any(Region::is_lent) {
                return Ok(());
            }
            let mut copies = Vec::with_capacity(cursor.gather.len() - cursor.piece);
            let mut at = cursor.at;
            for region in &cursor.gather[cursor.piece..] {
                let rest = region.slice(at, region.len() - at);
                self.bytes += if rest.is_lent() { rest.len() } else { 0 };
                copies.push(rest.owned()?);
                at = 0;
            }
            self.latest = Some((cursor.clone(), Arc::from(copies)));
        }
        if let Some((first, copies)) = &self.latest {
            let skipped = if cursor.piece == first.piece { first.at } else { 0 };
            *cursor =
                Cursor { gather: copies.clone(), piece: cursor.piece - first.piece, at: cursor.at - skipped };
        }
        Ok(())
    }
}

impl Frame {
    fn new(from: Cursor, payload: usize) -> Frame {
        Frame {
            head: [0; ddp::READ_REQUEST],
            head_len: 0,
            tail: [0; MAX_TAIL],
            tail_len: 0,
            from,
            payload,
            sent: 0,
            source: None,
            ends_response: false,
        }
    }

    fn len(&self) -> usize {
        usize::from(self.head_len) + self.payload + usize::from(self.tail_len)
    }

    /// Adds what is left to send to `pieces`, as far as one system call takes them; returns the bytes added.
    fn pieces<'a>(&'a self, pieces: &mut IoVecs<'a>) -> usize {
        let mut skip = self.sent;
        let mut added = 0;
        let mut add = |len: usize, piece: &dyn Fn(usize) -> Option<IoVec<'a>>| {
            let skipped = skip.min(len);
            skip -= skipped;
            if skipped < len
                && pieces.len() < crate::socket::IOV_MAX
                && let Some(piece) = piece(skipped)
            {
                added += piece.len();
                pieces.push(piece);
            }
        };
        let head = &self.head[..usize::from(self.head_len)];
        add(head.len(), &|skip| Some(IoVec::from_slice(&head[skip..])));
        self.from.for_each(self.payload, |region, at, n| {
            add(n, &|skip| region.iovec(at + skip, n - skip));
        });
        let tail = &self.tail[..usize::from(self.tail_len)];
        add(tail.len(), &|skip| Some(IoVec::from_slice(&tail[skip..])));
        added
    }
}

/// The header of a segment of a Send that begins with byte `mo` of its message.
fn send_header(msn: u32, invalidate: Option<u32>, last: bool, mo: usize) -> Header {
    Header::Untagged {
        opcode: if invalidate.is_some() { Opcode::SendInvalidate } else { Opcode::Send },
        last,
        invalidate: invalidate.unwrap_or(0),
        msn,
        // RFC 5041 §5.2: "the MO MUST be set to the octet offset from the first octet in the associated ULP Message (which
        // is defined to be zero) to the first octet in the ULP Payload contained in the DDP Segment."
        mo: mo as u32,
    }
}

/// Sends what the socket takes now.
fn offer(stream: &mut Stream, pieces: &[IoVec<'_>]) -> Result<usize, Error> {
    match stream.send(pieces) {
        Ok(sent) => Ok(sent),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(lost("the peer closed the connection")),
        Err(e) => Err(lost(format!("sending failed: {e}"))),
    }
}

/// Checks a gather list against the length that its message claims.
pub(super) fn gather(pieces: Regions, len: Option<usize>) -> Result<(Arc<[Region]>, usize), Error> {
    let mut sum = 0usize;
    for piece in &pieces {
        sum = sum.saturating_add(piece.len());
    }
    // RFC 5041 §5.2: "The ULP Message Length MUST be less than 2^32."
    if sum > u32::MAX as usize || len.is_some_and(|len| len != sum) {
        return Err(Error::new(
            Kind::Invalid,
            format!("a gather list of {sum} bytes does not fit its message"),
        ));
    }
    Ok((list(pieces), sum))
}

/// A list that frames share.
fn list(pieces: Regions) -> Arc<[Region]> {
    match pieces.into_inner() {
        Ok(one) => Arc::new(one),
        Err(more) => Arc::from(more.into_vec()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::os::unix::process::parent_id;

    use super::*;
    use crate::fork::testing::fork;

    /// The writes in which messages of these numbers of pieces go out: each write arrives as a datagram of its own.
    fn writes(messages: &[usize]) -> Vec<Vec<u8>> {
        let (ours, peers) = UnixDatagram::pair().unwrap();
        peers.set_nonblocking(true).unwrap();
        let shared = Shared::new().unwrap();
        let mut transmit = Transmit::new(None);
        transmit.may_send = true;
        for &pieces in messages {
            let gather = vec![Region::copy_from(b"x").unwrap(); pieces].into();
            transmit.post(Work::Send { gather, len: pieces, invalidate: None });
        }
        transmit.run((&mut Stream::new(ours.as_raw_fd()), &shared), &mut 0).unwrap();
        assert!(transmit.is_idle());
        let mut writes = Vec::new();
        let mut write = [0; 1 << 16];
        while let Ok(len) = peers.recv(&mut write) {
            writes.push(write[..len].to_vec());
        }
        writes
    }

    #[test]
    fn a_stream_is_locked_once_a_child_was_forked_that_has_it_too_and_its_owner_is_known_before() {
        // In a child, where no other test forks.
        let alone = fork(|| {
            let shared = Shared::new().unwrap();
            let owned = || shared.get(Shared::OWNER) == u64::from(crate::fork::process_id());
            let used = |inside| matches!(shared.with_stream(|_| ((), inside)), Ok(Some(())));
            let refused = || matches!(shared.with_stream(|_| ((), false)), Ok(None));
            let lock = shared.words.lock().unwrap();
            // Inside a message, a child finds the owner, though nothing was locked.
            let free = used(false) && shared.get(Shared::OWNER) == 0 && used(true) && owned();
            drop(lock);
            let child = fork(refused).succeeded();
            let shared_now = used(false) && shared.get(Shared::OWNER) == 0;
            let lock = shared.words.lock().unwrap();
            let locked = lock.is_some() && refused();
            drop(lock);
            let goes_on = fork(|| used(false)).succeeded() && used(false);
            free && child && shared_now && locked && goes_on
        });
        assert!(alone.succeeded());
    }

    #[test]
    fn a_child_that_is_forked_while_its_parent_takes_the_stream_does_not_write_beside_it() {
        const SEEN: usize = 6;
        const HAS: usize = 7;
        fn until(what: impl Fn() -> bool) {
            let end = std::time::Instant::now() + std::time::Duration::from_millis(500);
            while !what() && std::time::Instant::now() < end {
                std::thread::yield_now();
            }
        }
        // The parent has seen no child. A child is forked that sees the stream free; the parent takes the stream, then the
        // child does; then the parent finds out about the child.
        fn of_child(shared: &Shared, point: Point) {
            if point == Point::Locked {
                shared.set(SEEN, 1);
                until(|| shared.get(Shared::OWNER) != 0);
            }
        }
        fn of_parent(shared: &Shared, point: Point) {
            match point {
                Point::Looked => {
                    // The child ends with the test, and nobody waits for it.
                    let _child = fork(|| {
                        REACHED.set(of_child);
                        let has = matches!(shared.with_stream(|_| ((), true)), Ok(Some(())));
                        shared.set(HAS, if has { 1 } else { 2 });
                        until(|| shared.get(HAS) == 3);
                        true
                    });
                    until(|| shared.get(SEEN) == 1);
                }
                Point::Taken => until(|| shared.get(HAS) != 0),
                Point::Locked => {}
            }
        }
        let alone = fork(|| {
            let shared = Shared::new().unwrap();
            REACHED.set(of_parent);
            let ours = matches!(shared.with_stream(|_| ((), true)), Ok(Some(())));
            let theirs = shared.get(HAS) == 1;
            shared.set(HAS, 3);
            ours != theirs
        });
        assert!(alone.succeeded(), "both are in the midst of a message");
    }

    /// Where the FPDUs of a stream end, and where the pad and the CRC of each begin.
    fn tails(mut stream: &[u8]) -> Vec<(usize, usize)> {
        let (mut at, mut tails) = (0, Vec::new());
        while let Some(length) = stream.first_chunk() {
            let covered = 2 + usize::from(u16::from_be_bytes(*length));
            let whole = covered.next_multiple_of(4) + 4;
            tails.push((at + covered, at + whole));
            (at, stream) = (at + whole, &stream[whole..]);
        }
        tails
    }

    #[test]
    fn a_write_ends_between_two_fpdus_and_never_inside_a_pad_and_crc() {
        let most = crate::socket::IOV_MAX;
        for pieces in most - 6..most + 6 {
            for messages in [&[pieces][..], &[3, pieces, 3], &[600, 600, 600], &[1; 400], &[pieces, pieces]] {
                let writes = writes(messages);
                let tails = tails(&writes.concat());
                assert_eq!(tails.len(), messages.len());
                let mut at = 0;
                for write in &writes {
                    at += write.len();
                    let inside = tails.iter().any(|&(tail, end)| tail < at && at < end);
                    assert!(!inside, "{messages:?}: a write ends at {at}");
                    // A message whose pieces go into one write is not cut.
                    let fit = messages.iter().all(|&pieces| pieces + 2 <= most);
                    assert!(!fit || tails.iter().any(|&(_, end)| end == at), "{messages:?}: at {at}");
                }
            }
        }
    }

    /// What the peer gets of a message that was sent at once or through the queue, in the middle of others: when the socket takes
    /// it; when the socket is full; when it takes a part; when another process is inside a message. Sent from the stack, and from
    /// where the pieces lie.
    #[test]
    fn a_send_of_one_fpdu_goes_out_as_it_does_through_the_queue() {
        let (short, long) =
            ([(30, None), (3, Some(5)), (33, None)], [(60_001, None), (600, Some(5)), (60_002, None)]);
        for (lengths, full, other, small) in [
            (short, false, false, false),
            (short, true, false, false),
            (short, false, true, false),
            (long, false, false, false),
            (long, true, false, false),
            (long, false, true, false),
            (long, false, false, true),
        ] {
            let [at_once, queued] = [true, false].map(|at_once| {
                let (ours, mut peers) = UnixStream::pair().unwrap();
                for socket in [&ours, &peers] {
                    socket.set_nonblocking(true).unwrap();
                }
                let (mut stream, shared) = (Stream::new(ours.as_raw_fd()), Shared::new().unwrap());
                let mut transmit = Transmit::new(None);
                transmit.may_send = true;
                if small {
                    crate::socket::testing::set_buffers(ours.as_raw_fd(), 16 << 10);
                }
                let filled = if full { fill(&ours) } else { 0 };
                let waits = full || other || small;
                shared.set(Shared::OWNER, if other { u64::from(parent_id()) } else { 0 });
                for (length, invalidate) in lengths {
                    let gather = vec![
                        Region::copy_from(&[7; 30]).unwrap(),
                        Region::copy_from(&vec![8; length]).unwrap(),
                    ];
                    if at_once && transmit.may_send_at_once(&stream, &gather) {
                        transmit
                            .send_at_once((&mut stream, &shared), gather.into(), invalidate, &mut 0)
                            .unwrap();
                        assert_eq!((transmit.blocked, transmit.unsent() > 0), (waits, waits));
                        assert_eq!(transmit.is_inside_message(), full || small);
                        assert_eq!(transmit.is_half_sent(), small);
                    } else {
                        transmit.post(Work::Send { gather: gather.into(), len: 30 + length, invalidate });
                        transmit.run((&mut stream, &shared), &mut 0).unwrap();
                    }
                }
                let mut came = Vec::new();
                let end = peers.read_to_end(&mut came).unwrap_err();
                assert_eq!((end.kind(), came.len() <= filled), (io::ErrorKind::WouldBlock, full || other));
                if other {
                    shared.set(Shared::OWNER, 0);
                }
                while transmit.has_work() {
                    transmit.run((&mut stream, &shared), &mut 0).unwrap();
                    let _ = peers.read_to_end(&mut came);
                }
                assert!(transmit.is_idle() && transmit.unsent() == 0 && transmit.frame_bytes == 0);
                (came.split_off(filled), transmit.sent, transmit.numbered)
            });
            assert!(at_once == queued, "{lengths:?}: full {full}, other {other}, small {small}");
            assert_eq!(tails(&at_once.0).len(), 3);
        }
    }

    /// Writes until nothing more is taken; returns how many bytes that was.
    fn fill(mut socket: &UnixStream) -> usize {
        std::iter::from_fn(|| socket.write(&[0; 4096]).ok()).sum()
    }
}
