//! A queue pair of software iWARP whose peer breaks rules: what it sends has right CRCs and numbers unless stated otherwise,
//! so that it gets as far as the checks of handles, bounds and states.
//!
//! What the queue pair sends is read too: it must be whole frames that follow each other as the RFCs say, without a byte of
//! memory that the peer has no handle for.
//!
//! ```text
//! flags | flags of the startup | operations ..
//! ```

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use rpcrdma::fuzz::{Buf, Region, Sink};
use rpcrdma::provider::iwarp::ddp::{self, Header, Opcode, ReadRequest};
use rpcrdma::provider::iwarp::mpa::{self, Offer, StartFrame, Which};
use rpcrdma::provider::iwarp::{Iwarp, Options};
use rpcrdma::provider::{Completion, QueuePair, WorkId, WorkRequest};
use rpcrdma::wire::{Handle, Segment};

use crate::input::Input;

/// Bytes before and after what is exposed, which nobody may write.
const GUARD: usize = 64;

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let Some(mut bench) = Bench::start(&mut input) else { return };
    while !input.is_empty() && !bench.ended {
        bench.step(&mut input);
    }
    bench.end();
}

/// Memory that the peer has a handle for.
struct Exposed {
    segment: Segment,
    memory: Memory,
    /// Bytes still move through its memory.
    live: bool,
    /// The peer may name it, if only to end it.
    named: bool,
}

enum Memory {
    /// A whole block, and the ranges that the peer has been allowed to write.
    Sink(Sink, Vec<(usize, usize)>),
    Source(Vec<u8>),
}

/// A Read of the peer's, and where its bytes are if it may have them.
struct Asked {
    sink_stag: u32,
    left: usize,
    to: u64,
    bytes: Option<Vec<u8>>,
}

struct Bench {
    qp: Iwarp,
    _ours: UnixStream,
    peer: UnixStream,
    crc: bool,
    ended: bool,
    /// Something was sent that is not tracked.
    raw: bool,
    /// The next message of each queue, of ours and of the peer's.
    msn: [u32; 3],
    their_msn: [u32; 3],
    exposed: Vec<Exposed>,
    receives: usize,
    reads: VecDeque<(WorkId, Sink)>,
    /// Read Requests of the queue pair: where it wants its bytes, and how many of them it has received.
    requested: VecDeque<(ReadRequest, u32)>,
    asked: VecDeque<Asked>,
    /// The part of a frame that has come.
    begun: Vec<u8>,
    terminated: bool,
    ids: u64,
}

impl Bench {
    fn start(input: &mut Input<'_>) -> Option<Bench> {
        let (flags, startup) = (input.byte(), input.byte());
        let (ours, peer) = UnixStream::pair().expect("sockets");
        peer.set_nonblocking(true).expect("a socket");
        let options = Options {
            crc: flags & 1 != 0,
            ird: u16::from(flags >> 4),
            ord: 16,
            private_data: if flags & 2 != 0 { b"12345678".to_vec() } else { Vec::new() },
            max_fpdu: (flags & 4 != 0).then_some(1500),
            ..Options::default()
        };
        let initiates = flags & 8 != 0;
        let made = if initiates { Iwarp::initiator } else { Iwarp::responder };
        let mut qp = made(ours.as_raw_fd(), options).expect("options as they may be");
        let mut frame =
            StartFrame::request(&Offer { crc: startup & 1 != 0, ird: 16, ord: 16 }, 2, b"hello678");
        if initiates {
            frame.which = Which::Reply;
        }
        if startup & 6 == 6 {
            (frame.revision, frame.enhanced) = (1, None);
        }
        frame.markers = startup & 0x38 == 0x38;
        let mut bytes = frame.encode();
        if startup & 0xC0 == 0xC0 {
            bytes = input.bytes(600).to_vec();
        }
        (&peer).write_all(&bytes).expect("room for a frame");
        let mut open = false;
        for _ in 0..4 {
            open = open || qp.establish().ok()?;
        }
        // What it has sent so far is MPA's.
        let mut said = [0; 1024];
        let length = (&peer).read(&mut said).unwrap_or(0);
        if !open {
            return None;
        }
        let which = if initiates { Which::Request } else { Which::Reply };
        let (_, whole) =
            StartFrame::decode(&said[..length], which).expect("our own frame").expect("all of it");
        assert_eq!(whole, length, "an FPDU before its time");
        Some(Bench {
            crc: qp.crc(),
            qp,
            _ours: ours,
            peer,
            ended: false,
            raw: false,
            msn: [1; 3],
            their_msn: [1; 3],
            exposed: Vec::new(),
            receives: 0,
            reads: VecDeque::new(),
            requested: VecDeque::new(),
            asked: VecDeque::new(),
            begun: Vec::new(),
            terminated: false,
            ids: 0,
        })
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let operation = input.byte();
        match operation % 16 {
            0 => {
                let length = usize::from(input.byte());
                self.raw = true;
                self.send(input.bytes(length));
            }
            1..=5 => self.fpdu(operation, input),
            6 => self.expose_sink(1 + usize::from(input.half())),
            7 => self.expose_source(1 + usize::from(input.half())),
            8 => self.take_back(operation & 0x10 != 0, input),
            9 => {
                let length = input.one_of(&[16, 1024, 4096, 65536]);
                self.qp.post_recv(Buf::with_capacity(length).expect("memory").into_sink(length));
                self.receives += 1;
            }
            10 => {
                let message = Region::copy_from(&vec![0x5E; usize::from(input.half())]).expect("memory");
                let invalidate = (operation & 0x10 != 0).then_some(Handle(7));
                self.qp.post(WorkRequest::Send { gather: [message].into_iter().collect(), invalidate });
            }
            11 => {
                let message = Region::copy_from(&vec![0x5E; usize::from(input.half())]).expect("memory");
                let (handle, offset) = (Handle(9), u64::from(input.byte()) << 56);
                let to = Segment { handle, length: message.len() as u32, offset };
                self.qp.post(WorkRequest::Write { gather: [message].into_iter().collect(), to });
            }
            12 => {
                let length = 1 + usize::from(input.half());
                let block = Buf::with_capacity(length + 2 * GUARD).expect("memory");
                let sink = block.into_sink(length + 2 * GUARD);
                self.ids += 1;
                self.reads.push_back((WorkId(self.ids), sink.clone()));
                let from = Segment { handle: Handle(5), length: length as u32, offset: 0 };
                self.qp.post(WorkRequest::Read { id: WorkId(self.ids), sink, at: GUARD, from });
                self.ended |= self.qp.flush().is_err();
            }
            13 => match operation >> 4 & 3 {
                0 => self.receives -= self.qp.withdraw(),
                1 => self.ended |= self.qp.release_lent().is_err(),
                2 => self.listen(),
                _ => self.qp.nudge(),
            },
            _ => self.poll(),
        }
        self.ended |= self.terminated;
    }

    fn send(&mut self, bytes: &[u8]) {
        // A peer that does not read what it is sent can still send.
        let sent = (&self.peer).write(bytes).unwrap_or(0);
        self.ended |= sent < bytes.len();
    }

    /// A handle, and where in it and how much: one that is exposed, one that was, or one of nothing.
    fn pick(&self, input: &mut Input<'_>) -> (Segment, Option<usize>) {
        let choice = input.byte();
        if self.exposed.is_empty() || choice & 0xF == 0xF {
            return (Segment { handle: Handle(input.word()), length: 100, offset: 0 }, None);
        }
        let index = usize::from(choice >> 2) % self.exposed.len();
        let mut segment = self.exposed[index].segment;
        if choice & 3 == 3 {
            segment.handle.0 = segment.handle.0.wrapping_add(1);
        }
        (segment, (choice & 3 != 3).then_some(index))
    }

    /// One FPDU, mostly a right one.
    fn fpdu(&mut self, operation: u8, input: &mut Input<'_>) {
        let kind = input.byte();
        let opcode = [0u8, 1, 2, 3, 4, 5, 6, 7, 3, 0, 2, 1][usize::from(kind % 12)];
        let last = kind & 0x80 == 0;
        let mut length = usize::from(input.byte()) * if kind & 0x40 != 0 { 64 } else { 1 };
        let tagged = matches!(opcode, 0 | 2);
        let mut bytes =
            vec![0, 0, if tagged { 0x81 } else { 1 } | if last { 0x40 } else { 0 }, 0x40 | opcode];
        let mut allowed = None;
        if tagged {
            let (stag, start, index) = match self.requested.front() {
                // An answer to a Read of the queue pair.
                Some((request, done)) if opcode == 2 && operation & 0x10 == 0 => {
                    if operation & 0x20 == 0 {
                        length = length.min((request.size - done) as usize);
                    }
                    (request.sink_stag, u64::from(*done), None)
                }
                _ => {
                    let (segment, index) = self.pick(input);
                    (segment.handle.0, segment.offset, index)
                }
            };
            let to = start.wrapping_add(match input.byte() {
                254 => u64::MAX - 3,
                255 => u64::from(input.word()),
                by if opcode == 2 => u64::from(by == 253),
                by => u64::from(by),
            });
            bytes.extend_from_slice(&stag.to_be_bytes());
            bytes.extend_from_slice(&to.to_be_bytes());
            allowed = index.filter(|_| opcode == 0).map(|index| (index, to, length));
        } else {
            let invalidate = if matches!(opcode, 4 | 6) { self.pick(input).0.handle.0 } else { 0 };
            let queue = match opcode {
                1 => 1,
                7 => 2,
                _ => 0,
            };
            let wrong = input.byte();
            let named = if wrong & 0xF == 0xF { u32::from(wrong) } else { queue };
            let number = &mut self.msn[queue as usize];
            let msn = if wrong & 0xF0 == 0xF0 { number.wrapping_add(u32::from(wrong)) } else { *number };
            *number = number.wrapping_add(u32::from(last));
            let offset = if wrong & 3 == 2 { u32::from(input.half()) } else { 0 };
            for word in [invalidate, named, msn, offset] {
                bytes.extend_from_slice(&word.to_be_bytes());
            }
        }
        if opcode == 1 && kind & 0x20 == 0 {
            let request = self.read_request(input);
            bytes.extend_from_slice(&request.encode());
        } else {
            let fill = input.byte() | 1;
            bytes.resize(bytes.len() + length.min(60_000), fill);
            // Anything may lie where a Read Request does.
            self.raw |= opcode == 1;
        }
        self.finish(bytes, input.byte(), allowed);
        if opcode == 2
            && operation & 0x10 == 0
            && let Some((request, done)) = self.requested.front_mut()
        {
            *done = done.saturating_add(length as u32);
            if last || *done > request.size {
                self.requested.pop_front();
            }
        }
    }

    fn read_request(&mut self, input: &mut Input<'_>) -> ReadRequest {
        let (sink_stag, sink_to) = (input.word(), u64::from(input.half()));
        let (segment, index) = self.pick(input);
        let wrong = input.byte();
        let size =
            if wrong & 7 == 7 { input.word() } else { segment.length.saturating_sub(u32::from(wrong >> 3)) };
        let source_to = segment.offset.wrapping_add(if wrong & 7 == 6 { u64::from(wrong) } else { 0 });
        let bytes =
            index.map(|index| &self.exposed[index]).filter(|exposed| exposed.live).and_then(|exposed| {
                let Memory::Source(bytes) = &exposed.memory else { return None };
                bytes.get(source_to as usize..)?.get(..size as usize).map(<[u8]>::to_vec)
            });
        self.asked.push_back(Asked { sink_stag, left: size as usize, to: sink_to, bytes });
        ReadRequest { sink_stag, sink_to, size, source_stag: segment.handle.0, source_to }
    }

    /// Adds length, pad and CRC, and sends it.
    fn finish(&mut self, mut bytes: Vec<u8>, wrong: u8, allowed: Option<(usize, u64, usize)>) {
        let length = (bytes.len() - 2) as u16;
        let length = if wrong == 0xFE { length.wrapping_add(3) } else { length };
        bytes[..2].copy_from_slice(&length.to_be_bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let crc = self.crc.then(|| crc32c::crc32c(&bytes));
        bytes.extend_from_slice(&mpa::crc_word(crc));
        match wrong {
            0xFC => bytes.truncate(bytes.len() / 2),
            0xFD => *bytes.last_mut().expect("a CRC") ^= 1,
            _ => {}
        }
        // From here on frames do not begin where they should.
        self.raw |= matches!(wrong, 0xFC | 0xFE) && !self.crc;
        if let Some((index, to, length)) = allowed
            && self.exposed[index].live
            && let Memory::Sink(_, ranges) = &mut self.exposed[index].memory
            && let Ok(to) = usize::try_from(to)
        {
            // The bytes that a wrong length adds are named too, and may be placed before the CRC shows that it is wrong.
            let beyond = if wrong == 0xFE { 3 } else { 0 };
            ranges.push((to, to.saturating_add(length + beyond)));
        }
        self.send(&bytes);
    }

    fn expose_sink(&mut self, length: usize) {
        let block = Buf::with_capacity(length + 2 * GUARD).expect("memory");
        let sink = block.into_sink(length + 2 * GUARD);
        if let Ok(segment) = self.qp.expose_sink(sink.part(GUARD, length)) {
            assert_eq!(segment.length as usize, length);
            self.exposed.push(Exposed {
                segment,
                memory: Memory::Sink(sink, Vec::new()),
                live: true,
                named: true,
            });
        }
    }

    fn expose_source(&mut self, length: usize) {
        let seed = self.exposed.len();
        let bytes: Vec<u8> = (0..length).map(|at| (at * 5 + seed * 17 + (at >> 8)) as u8).collect();
        // What surrounds it in the same block is not exposed.
        let block =
            Region::copy_from(&[&[0xDD; GUARD], &bytes[..], &[0xDD; GUARD]].concat()).expect("memory");
        if let Ok(segment) = self.qp.expose_source(block.slice(GUARD, length)) {
            self.exposed.push(Exposed { segment, memory: Memory::Source(bytes), live: true, named: true });
        }
    }

    fn take_back(&mut self, invalidate: bool, input: &mut Input<'_>) {
        let index = input.below(self.exposed.len());
        let Some(exposed) = self.exposed.get_mut(index) else { return };
        let handle = exposed.segment.handle;
        if invalidate {
            self.qp.invalidate(handle).expect("a software device can");
            (exposed.live, exposed.named) = (false, false);
        } else {
            self.qp.detach(handle).expect("nothing is lent");
            // A source of ours stays.
            exposed.live &= matches!(exposed.memory, Memory::Source(_));
        }
        if !exposed.live {
            self.let_go(index);
        }
    }

    /// Checks the memory of a handle that has ended: nothing outside of what the peer named was written, and nothing will
    /// be.
    fn let_go(&mut self, index: usize) {
        let raw = self.raw;
        let Memory::Sink(sink, ranges) = &mut self.exposed[index].memory else { return };
        let empty = Memory::Source(Vec::new());
        let (sink, ranges) = (sink.clone(), std::mem::take(ranges));
        self.exposed[index].memory = empty;
        let length = sink.len();
        let bytes = sink.into_buf(length).expect("the device holds a clone of what was taken back");
        let (guard, exposed) = bytes.split_at(GUARD);
        let (exposed, behind) = exposed.split_at(length - 2 * GUARD);
        assert!(guard.iter().chain(behind).all(|byte| *byte == 0), "bytes outside of what was exposed");
        let mut written = vec![false; exposed.len()];
        // A write that leaves the memory is refused before a byte of it is placed.
        for (from, to) in ranges.into_iter().filter(|range| range.1 <= exposed.len()) {
            written[from..to].fill(true);
        }
        let stray = exposed.iter().zip(&written).position(|(byte, written)| *byte != 0 && !written);
        assert!(raw || stray.is_none(), "byte {stray:?} was written by nobody");
    }

    fn poll(&mut self) {
        for _ in 0..4 {
            match self.qp.poll() {
                Ok(Some(completion)) => self.completed(completion),
                Ok(None) => break,
                Err(_) => {
                    self.ended = true;
                    break;
                }
            }
        }
        self.listen();
        let _ =
            (self.qp.wants_write(), self.qp.unsent(), self.qp.moved(), self.qp.taken(), self.qp.drained());
    }

    fn completed(&mut self, completion: Completion) {
        match completion {
            Completion::Received { sink, len, invalidated } => {
                self.receives -= 1;
                assert!(len <= sink.len());
                assert!(sink.into_buf(len).is_ok(), "the device holds a clone");
                for index in 0..self.exposed.len() {
                    if Some(self.exposed[index].segment.handle) == invalidated {
                        assert!(self.exposed[index].named || self.raw, "invalidated twice");
                        (self.exposed[index].live, self.exposed[index].named) = (false, false);
                        self.let_go(index);
                    }
                }
            }
            Completion::Read { id } => {
                let (expected, sink) = self.reads.pop_front().expect("a Read that was posted");
                assert_eq!(id, expected, "in the order of their posting");
                let length = sink.len();
                let bytes = sink.into_buf(length).expect("the device holds a clone");
                let (before, behind) = (&bytes[..GUARD], &bytes[length - GUARD..]);
                assert!(before.iter().chain(behind).all(|byte| *byte == 0), "bytes outside of a Read");
                let all = bytes[GUARD..length - GUARD].iter().all(|byte| *byte != 0);
                assert!(all || self.raw, "a Read is complete without all its bytes");
            }
        }
    }

    /// Reads what the queue pair has sent.
    fn listen(&mut self) {
        let mut bytes = [0; 16 << 10];
        for _ in 0..64 {
            match (&self.peer).read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => self.begun.extend_from_slice(&bytes[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        let begun = std::mem::take(&mut self.begun);
        let mut rest = &begun[..];
        while let Some(length) = rest.first_chunk::<2>() {
            let total = mpa::fpdu_len(usize::from(u16::from_be_bytes(*length)));
            let Some((frame, behind)) = rest.split_at_checked(total) else { break };
            self.heard(frame);
            rest = behind;
        }
        self.begun = rest.to_vec();
    }

    fn heard(&mut self, frame: &[u8]) {
        assert!(!self.terminated, "something follows a Terminate");
        let (covered, word) = frame.split_at(frame.len() - 4);
        assert_eq!(word, mpa::crc_word(self.crc.then(|| crc32c::crc32c(covered))));
        let start = frame.first_chunk().expect("no frame is shorter");
        let (header, length) = Header::decode(start).expect("a right header");
        let payload = &covered[header.len()..header.len() + length];
        assert!(covered[header.len() + length..].iter().all(|byte| *byte == 0), "a pad is zero");
        match header {
            Header::Untagged { opcode, last, msn, .. } => {
                let queue = opcode.queue() as usize;
                assert_eq!(msn, self.their_msn[queue]);
                self.their_msn[queue] = msn.wrapping_add(u32::from(last));
                match opcode {
                    Opcode::Terminate => self.terminated = true,
                    Opcode::ReadRequest => {
                        let request = ReadRequest::decode(payload).expect("a whole request");
                        self.requested.push_back((request, 0));
                    }
                    _ => assert!(payload.iter().all(|byte| *byte == 0x5E)),
                }
            }
            Header::Tagged { opcode: Opcode::Write, .. } => assert!(payload.iter().all(|byte| *byte == 0x5E)),
            Header::Tagged { last, stag, to, .. } if !self.raw => {
                let asked = self.asked.front_mut().expect("an answer to nothing");
                assert_eq!((stag, to), (asked.sink_stag, asked.to));
                let all = asked.bytes.as_deref().unwrap_or(&[]);
                let from = all.len() - asked.left.min(all.len());
                assert!(all[from..].starts_with(payload), "other bytes than were asked for");
                asked.left -= payload.len();
                asked.to = asked.to.wrapping_add(payload.len() as u64);
                assert_eq!(last, asked.left == 0);
                if last {
                    self.asked.pop_front();
                }
            }
            Header::Tagged { .. } => {}
        }
        assert!(frame.len() <= ddp::UNTAGGED + (64 << 10));
    }

    /// Whatever has happened: after the end the device holds nothing.
    fn end(mut self) {
        for _ in 0..8 {
            match self.qp.poll() {
                Ok(Some(completion)) => self.completed(completion),
                Ok(None) => {}
                Err(_) => break,
            }
        }
        self.listen();
        self.qp.close();
        while let Ok(Some(completion)) = self.qp.poll() {
            self.completed(completion);
        }
        let first = self.qp.poll().expect_err("it is closed").to_string();
        assert_eq!(self.qp.poll().expect_err("it is closed").to_string(), first);
        for index in 0..self.exposed.len() {
            self.let_go(index);
        }
        for (_, sink) in std::mem::take(&mut self.reads) {
            let length = sink.len();
            let bytes = sink.into_buf(length).expect("the device holds a clone after its end");
            let (before, behind) = (&bytes[..GUARD], &bytes[length - GUARD..]);
            assert!(before.iter().chain(behind).all(|byte| *byte == 0), "bytes outside of a Read");
        }
    }
}
