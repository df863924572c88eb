//! The receiving half of a queue pair: reads FPDUs from the stream, checks them, and puts their payload where it belongs.
//!
//! **Copies.** A payload goes from the socket straight into its place by one scattered read. Only what was read ahead is
//! copied, and the read-ahead is sized so that large FPDUs arrive without a copy. FPDUs below 8 KiB are copied once,
//! while their CRC is computed. Consequence: a large FPDU is placed before its CRC is known. RFC 5044 §8 has the FPDU
//! verified first; here a wrong CRC ends the connection before anything of that FPDU is delivered, and nothing is ever
//! written outside memory that this peer may write. (The Linux siw driver does the same.)
//!
//! Read first: RFC 5040 §5 and §7, RFC 5041 §7, RFC 5044 §7.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::io;
use std::sync::Mutex;

use super::ddp::{self, Fault, Header, Opcode, ReadRequest};
use super::{Exposed, Iwarp, Posted, lost, mpa};
use crate::error::{Error, Kind};
use crate::memory::{IoVecMut, Region, Sink};
use crate::provider::Completion;
use crate::stats::{self, Counter};
use crate::wire::Handle;

/// FPDUs below this length are gathered in the read-ahead buffer; larger ones go straight to their place.
pub(super) const SMALL: usize = 8 << 10;
/// Bytes of the read-ahead buffer: more than any FPDU below [`SMALL`] and a read-ahead together.
const BUFFER: usize = 64 << 10;
/// Most read-ahead buffers that are kept for the next connection that has something to read.
const BUFFERS: usize = 16;
/// How far one system call reads ahead where FPDUs are large; where they are small it fills the buffer.
const AHEAD: usize = 2 << 10;
/// Up to this length an FPDU is read together with its header, if the one before would have been: a copy costs less than
/// a system call.
const AHEAD_MOST: usize = 16 << 10;
/// Bytes that one `poll` receives at most, so that a peer that writes as fast as we read cannot hold the caller.
const POLL: usize = 4 << 20;
/// What arrives in one go counts as at least this much: through memory, a peer may deliver byte after byte as fast as they are
/// taken.
const POLL_LEAST: usize = 64 << 10;

/// Read-ahead buffers in which no connection has anything.
static IDLE: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// The receiving half.
pub(super) struct Receive {
    /// Of [`BUFFER`] bytes; empty while it would hold nothing, so that an idle connection has none.
    pub(super) buffer: Box<[u8]>,
    pub(super) start: usize,
    pub(super) end: usize,
    /// Bytes that the FPDU at `start` still lacks before anything can be done with it.
    missing: usize,
    /// A large FPDU, of which `buffer` holds nothing.
    placing: Option<Placing>,
    /// The last FPDU was a large one inside a message: the next will be too.
    in_run: bool,
    /// The last read got less than it asked for: the socket is empty. Holds until `poll` has returned `None`.
    pub(super) drained: bool,
    pub(super) send_msn: u32,
    pub(super) read_msn: u32,
    /// The Send of which some segments are here: its opcode, and the handle that it invalidates (RsvdULP).
    sending: Option<(Opcode, u32)>,
    placed: usize,
    /// All bytes received as FPDUs and startup frames, in step with [`Shared::received`].
    pub(super) total: u64,
    /// Whether TCP's segments hold small FPDUs only.
    pub(super) small_path: bool,
    /// How far a read goes beyond what is known to come, unless `small_path`.
    ahead: usize,
}

/// Where a segment's payload goes.
pub(super) enum Target {
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
pub(super) enum End {
    /// The peer broke a rule: the error, and the FPDU that showed it.
    Breach(Fault, Vec<u8>),
    /// The peer sent a Terminate, or the connection is gone.
    Lost(Error),
}

impl Iwarp {
    /// Receives until there is a completion, nothing is left, or [`POLL`] bytes have come.
    pub(super) fn advance(&mut self) -> Result<(), End> {
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

    /// Whether this process is the one that receives. One that has missed bytes never will again.
    #[inline(always)]
    pub(super) fn may_receive(&mut self) -> Result<bool, End> {
        let has_all = self.shared.received() == self.receive.total;
        if has_all && !self.forked { Ok(true) } else { self.may_receive_beside(has_all) }
    }

    /// The same where another process has the connection too.
    #[cold]
    fn may_receive_beside(&mut self, has_all: bool) -> Result<bool, End> {
        if !self.forked {
            // The connection goes on there.
            self.forked = !self.shared.has_reader_ended();
            return Err(End::Lost(lost("a forked process has read from this connection")));
        }
        // Unless another child has taken over, or a process has ended in the midst of reading.
        Ok(has_all && self.shared.caller() == self.caller && !self.shared.has_lost_bytes())
    }

    pub(super) fn count_received(&mut self, bytes: usize) {
        self.received = true;
        self.receive.total += bytes as u64;
        self.shared.set_received(self.receive.total);
        if self.forked {
            self.shared.note_reader();
        }
    }

    /// Makes one system call: the rest of a large FPDU goes into its place, and what follows into the buffer.
    pub(super) fn fill(&mut self) -> Result<usize, End> {
        self.receive.have_buffer().map_err(End::Lost)?;
        self.shared.begin_to_read();
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
        if let Ok(n @ 1..) = result {
            self.count_received(n);
        }
        self.shared.end_to_read();
        match result {
            Ok(0) => Err(End::Lost(lost(if self.receive.is_between_messages() {
                "the peer closed the connection"
            } else {
                "the peer closed the connection in the middle of a message"
            }))),
            Ok(n) => {
                self.receive.drained = n < asked;
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

    /// Processes the buffer until there is a completion or bytes are lacking.
    pub(super) fn process(&mut self) -> Result<(), End> {
        let buffer = std::mem::take(&mut self.receive.buffer);
        let result = self.process_buffer(&buffer);
        self.receive.buffer = buffer;
        result
    }

    pub(super) fn process_buffer(&mut self, buffer: &[u8]) -> Result<(), End> {
        while self.completions.is_empty() && self.receive.placing.is_none() {
            let bytes = &buffer[self.receive.start..self.receive.end];
            self.receive.missing = ddp::ENOUGH.saturating_sub(bytes.len());
            let Some((length, _)) = bytes.split_first_chunk::<2>() else { return Ok(()) };
            let ulpdu = usize::from(u16::from_be_bytes(*length));
            let breach = |fault| End::Breach(fault, bytes[..bytes.len().min(ddp::READ_REQUEST)].to_vec());
            // Reported before the rest is there: the rest of such an FPDU may be shorter than a header.
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

    /// Takes an FPDU that lies in the buffer as a whole.
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

    /// Takes a Send of one segment, as nearly every short message is, if nothing is wrong with it: does what `admit` and
    /// `commit` amount to for it. Returns false for any other, and has changed nothing then.
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

    /// Begins a large FPDU of which only a part is in the buffer: places that part; the rest will follow by itself.
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

    /// Checks a segment against the state of its stream, and returns where its payload goes. Changes nothing, except that
    /// a Receive gets its memory.
    fn admit(&mut self, header: &Header, length: usize) -> Result<(Target, usize), Fault> {
        match *header {
            // RFC 5041 §5.2: "The STag and TO fields MUST NOT be checked for a zero-length Tagged DDP Message."
            Header::Tagged { opcode: Opcode::Write, .. } if length == 0 => Ok((Target::Nowhere, 0)),
            Header::Tagged { opcode: Opcode::Write, stag, to, .. } => {
                let (size, target) = match self.exposed.get(&stag) {
                    Some(Exposed::Sink(sink)) => (sink.len(), Target::Memory(sink.clone())),
                    Some(Exposed::Discard(size)) => (*size, Target::Nowhere),
                    // DDP has no code for a missing right: the STag is not valid for this access.
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
                // TCP keeps the order, so a message can only be the next one, and a segment only the next of its message.
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

    /// Notes that a valid segment has been placed, and delivers the message that it ends.
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
        // What the peer could have taken by itself it may also ask for.
        let to = request.source_to.wrapping_sub(self.stream.base(region));
        let at = range(to, size, region.len(), Fault::READ_WRAP, Fault::READ_BOUNDS)?;
        Ok(Some(region.slice(at, size)))
    }

    fn count_read_ahead(&mut self, bytes: usize) {
        self.copied_bytes += bytes as u64;
        stats::add(Counter::BytesReadAhead, bytes as u64);
    }

    pub(super) fn count_copied(&mut self, bytes: usize) {
        self.copied_bytes += bytes as u64;
        stats::add(Counter::BytesCopied, bytes as u64);
    }
}

impl Receive {
    pub(super) fn new() -> Receive {
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

    pub(super) fn have_buffer(&mut self) -> Result<(), Error> {
        if self.buffer.is_empty() {
            // Nobody waits for the lock: in a forked child its holder may be a thread of the parent.
            self.buffer = match IDLE.try_lock().ok().and_then(|mut idle| idle.pop()) {
                Some(idle) => idle,
                None => {
                    let mut fresh = Vec::new();
                    // Longer than any block of the reserve: a refusal is an error, and does not end the process.
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

    /// Keeps what is left of `bytes`, which have been processed, in the buffer, which is empty.
    pub(super) fn keep(&mut self, bytes: &[u8]) -> Result<(), End> {
        let left = &bytes[self.start..self.end];
        (self.start, self.end) = (0, left.len());
        if !left.is_empty() {
            self.have_buffer().map_err(End::Lost)?;
            self.buffer[..left.len()].copy_from_slice(left);
        }
        Ok(())
    }

    /// Leaves the buffer, of which nothing is needed any more, to whichever connection reads next.
    pub(super) fn lend_buffer(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        (self.start, self.end) = (0, 0);
        if !buffer.is_empty()
            && let Ok(mut idle) = IDLE.try_lock()
            && idle.len() < BUFFERS
        {
            idle.push(buffer);
        }
    }

    /// What has been read ahead.
    pub(super) fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Whether a large FPDU is on its way into its place.
    pub(super) fn is_placing(&self) -> bool {
        self.placing.is_some()
    }

    /// Whether a Send has been begun and is not complete yet.
    pub(super) fn is_inside_message(&self) -> bool {
        let placing = self.placing.as_ref();
        self.sending.is_some()
            || placing.is_some_and(|placing| matches!(placing.header, Header::Untagged { .. }))
    }

    /// Bytes of a Read Response that are in their place already, although their frame is not complete.
    pub(super) fn pulling(&self) -> usize {
        let arriving =
            self.placing.as_ref().filter(|placing| placing.header.opcode() == Opcode::ReadResponse);
        arriving.map_or(0, |placing| placing.payload - placing.left)
    }

    pub(super) fn is_between_messages(&self) -> bool {
        self.start == self.end && self.placing.is_none() && self.sending.is_none()
    }

    /// Changes where the rest of a half-received Write goes.
    pub(super) fn retarget(&mut self, handle: u32, target: Target) {
        if let Some(placing) = &mut self.placing
            && matches!(placing.header, Header::Tagged { opcode: Opcode::Write, stag, .. } if stag == handle)
        {
            placing.target = target;
        }
    }

    /// Throws away the rest of a half-received Read Response, if its place is memory that was lent.
    pub(super) fn release_lent(&mut self) {
        if let Some(Placing { header: Header::Tagged { opcode: Opcode::ReadResponse, .. }, target, .. }) =
            &mut self.placing
            && matches!(target, Target::Memory(sink) if sink.is_lent())
        {
            *target = Target::Nowhere;
        }
    }

    /// Ends receiving.
    pub(super) fn clear(&mut self) {
        self.placing = None;
        self.lend_buffer();
    }
}

/// The offset at which a peer's range begins in a buffer of `size` bytes.
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
