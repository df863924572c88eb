//! A pair of queue pairs over TCP loopback, and queue pairs against a hand-made peer whose bytes are built here.

mod forked;
mod handles;
mod hostile;
mod lent;
mod operations;
mod receives;
mod sleep;
mod startup;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use hex_literal::hex;

use smallvec::smallvec;

use super::ddp::ReadRequest;
use super::*;
use crate::memory::shared::{Own, Theirs, Word};
use crate::memory::{Buf, IoVec, Program};
use crate::provider::WorkId;
use crate::provider::fault::contract;
use crate::wait;

fn region(bytes: &[u8]) -> Region {
    Region::copy_from(bytes).unwrap()
}

fn sink(len: usize) -> Sink {
    Buf::with_capacity(len).unwrap().into_sink(len)
}

/// Bytes that depend on their position.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8).wrapping_mul(7) ^ seed) as u8).collect()
}

/// Takes a sink's memory back; there must be no other holder.
fn bytes(sink: Sink, len: usize) -> Buf {
    sink.into_buf(len).expect("the device holds a clone")
}

fn received(completion: Completion) -> (Vec<u8>, Option<u32>) {
    match completion {
        Completion::Received { sink, len, invalidated } => {
            (bytes(sink, len).to_vec(), invalidated.map(|handle| handle.0))
        }
        other => panic!("not a Receive: {other:?}"),
    }
}

/// Everything that `poll` returns now.
fn drain(qp: &mut Iwarp) -> Result<Vec<Completion>, Error> {
    let mut all = Vec::new();
    loop {
        match qp.poll()? {
            Some(completion) => all.push(completion),
            None => return Ok(all),
        }
    }
}

/// Two queue pairs over TCP.
struct Pair {
    a: Iwarp,
    b: Iwarp,
    _sockets: (TcpStream, TcpStream),
    got_a: VecDeque<Completion>,
    got_b: VecDeque<Completion>,
}

impl Pair {
    fn new(a: Options, b: Options) -> Pair {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let x = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (y, _) = listener.accept().unwrap();
        let mut a = Iwarp::initiator(x.as_raw_fd(), a).unwrap();
        let mut b = Iwarp::responder(y.as_raw_fd(), b).unwrap();
        let (mut a_done, mut b_done) = (false, false);
        for _ in 0..1000 {
            b_done = b_done || b.establish().unwrap();
            a_done = a_done || a.establish().unwrap();
            if a_done && b_done {
                let mut pair =
                    Pair { a, b, _sockets: (x, y), got_a: VecDeque::new(), got_b: VecDeque::new() };
                // The responder may not send before it has heard from the initiator.
                pair.b.post_recv(sink(16));
                pair.a.post(WorkRequest::Send { gather: smallvec![region(b"hello")], invalidate: None });
                pair.run(|p| !p.got_b.is_empty());
                assert_eq!(received(pair.got_b.pop_front().unwrap()).0, b"hello");
                return pair;
            }
            let mut fds = [
                wait::PollFd::new(x.as_raw_fd(), true, false),
                wait::PollFd::new(y.as_raw_fd(), true, false),
            ];
            wait::poll(&mut fds, Some(Duration::from_secs(1)), None).unwrap();
        }
        panic!("the startup does not end");
    }

    fn plain() -> Pair {
        Pair::new(Options::default(), Options::default())
    }

    fn small() -> Pair {
        let options = Options { max_fpdu: Some(1448), ..Options::default() };
        Pair::new(options.clone(), options)
    }

    fn swap(&mut self) {
        std::mem::swap(&mut self.a, &mut self.b);
        std::mem::swap(&mut self.got_a, &mut self.got_b);
    }

    /// Drives both ends until `done`.
    fn run(&mut self, done: impl Fn(&Pair) -> bool) {
        for _ in 0..100_000 {
            self.got_a.extend(drain(&mut self.a).unwrap());
            self.got_b.extend(drain(&mut self.b).unwrap());
            if done(self) {
                return;
            }
            let mut fds = [
                wait::PollFd::new(self.a.fd(), true, self.a.wants_write()),
                wait::PollFd::new(self.b.fd(), true, self.b.wants_write()),
            ];
            assert!(wait::poll(&mut fds, Some(Duration::from_secs(10)), None).unwrap() > 0, "nothing moves");
        }
        panic!("it does not end");
    }

    /// `a` sends `message` to `b`, as `pieces` pieces.
    fn send(&mut self, message: &[u8], pieces: usize) {
        self.b.post_recv(sink(message.len()));
        let gather = split(message, pieces);
        self.a.post(WorkRequest::Send { gather: gather.into(), invalidate: None });
        self.run(|p| !p.got_b.is_empty());
        let (got, invalidated) = received(self.got_b.pop_front().unwrap());
        assert!(got == message && invalidated.is_none(), "Send of {} bytes", message.len());
    }

    /// `a` writes `data` into the middle of `b`'s memory, then tells `b` so.
    fn write(&mut self, data: &[u8], pieces: usize) {
        let guard = 5;
        let memory = sink(data.len() + 2 * guard);
        let to = self.b.expose_sink(memory.clone()).unwrap();
        let to = Segment { offset: to.offset + guard as u64, length: data.len() as u32, ..to };
        self.b.post_recv(sink(8));
        self.a.post(WorkRequest::Write { gather: split(data, pieces).into(), to });
        self.a.post(WorkRequest::Send { gather: smallvec![], invalidate: Some(to.handle) });
        self.run(|p| !p.got_b.is_empty());
        let (got, invalidated) = received(self.got_b.pop_front().unwrap());
        assert_eq!((got.len(), invalidated), (0, Some(to.handle.0)));
        let memory = bytes(memory, data.len() + 2 * guard);
        assert!(memory[guard..guard + data.len()] == *data, "Write of {} bytes", data.len());
        assert!(memory[..guard] == [0; 5] && memory[guard + data.len()..] == [0; 5], "guards");
    }

    /// `a` reads `data` out of the middle of `b`'s memory, into the middle of its own.
    fn read(&mut self, data: &[u8]) {
        let source = [b"<<<", data, b">>>"].concat();
        let from = self.b.expose_source(region(&source)).unwrap();
        let from = Segment { offset: from.offset + 3, length: data.len() as u32, ..from };
        let memory = sink(data.len() + 10);
        self.a.post(WorkRequest::Read { id: WorkId(9), sink: memory.clone(), at: 5, from });
        self.run(|p| !p.got_a.is_empty());
        assert!(matches!(self.got_a.pop_front(), Some(Completion::Read { id: WorkId(9) })));
        let memory = bytes(memory, data.len() + 10);
        assert!(memory[5..5 + data.len()] == *data, "Read of {} bytes", data.len());
        assert!(memory[..5] == [0; 5] && memory[5 + data.len()..] == [0; 5], "guards");
        self.b.invalidate(from.handle).unwrap();
    }
}

fn split(bytes: &[u8], pieces: usize) -> Vec<Region> {
    let size = bytes.len().div_ceil(pieces).max(1);
    bytes.chunks(size).map(region).collect()
}

/// A queue pair whose peer is this test, which handles every byte itself.
struct Bench {
    qp: Iwarp,
    _socket: UnixStream,
    peer: UnixStream,
}

const REQUEST: [u8; 24] = hex!("4d504120494420526571204672616d65 50 02 0004 0010 0010");
const REPLY: [u8; 24] = hex!("4d504120494420526570204672616d65 50 02 0004 0010 0010");

impl Bench {
    /// The queue pair is the responder.
    fn responder() -> Bench {
        Bench::responder_to(&REQUEST, Options::default()).0
    }

    fn responder_to(request: &[u8], options: Options) -> (Bench, Vec<u8>) {
        let (mut bench, done) = Bench::unanswered(request, options);
        assert!(done.unwrap());
        let reply = bench.sent();
        (bench, reply)
    }

    /// A responder that has got `request`, and what its handshake returns.
    fn unanswered(request: &[u8], options: Options) -> (Bench, Result<bool, Error>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut qp = Iwarp::responder(ours.as_raw_fd(), options).unwrap();
        assert!(!qp.establish().unwrap());
        theirs.set_nonblocking(true).unwrap();
        (&theirs).write_all(request).unwrap();
        let done = qp.establish();
        (Bench { qp, _socket: ours, peer: theirs }, done)
    }

    fn initiator() -> Bench {
        let (mut bench, request) = Bench::unreplied(Options::default());
        assert_eq!(request, REQUEST);
        bench.feed(&REPLY);
        assert!(bench.qp.establish().unwrap());
        bench
    }

    /// An initiator without a Reply, and its Request.
    fn unreplied(options: Options) -> (Bench, Vec<u8>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let qp = Iwarp::initiator(ours.as_raw_fd(), options).unwrap();
        let mut bench = Bench { qp, _socket: ours, peer: theirs };
        assert!(!bench.qp.establish().unwrap());
        let request = bench.sent();
        (bench, request)
    }

    fn feed(&mut self, bytes: &[u8]) {
        self.peer.write_all(bytes).unwrap();
    }

    /// Feeds bytes and returns all completions that result.
    fn give(&mut self, bytes: &[u8]) -> Result<Vec<Completion>, Error> {
        self.feed(bytes);
        drain(&mut self.qp)
    }

    /// What the queue pair has sent since the last call.
    fn sent(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        match self.peer.read_to_end(&mut all) {
            Err(e) if e.kind() != ErrorKind::WouldBlock => panic!("{e}"),
            _ => all,
        }
    }

    /// Feeds bytes that break the protocol. Returns the Terminate that they cause, as (layer, type, code, header flags),
    /// and the error that `poll` returns from then on.
    fn breach(&mut self, bytes: &[u8]) -> ((u8, u8, u8, u8), Error) {
        self.sent();
        let error = self.give(bytes).expect_err("no error");
        assert_eq!(self.qp.poll().unwrap_err().text(), error.text(), "sticky");
        let fpdus = parse(&self.sent());
        let [(t, crc_good)] = &fpdus[..] else { panic!("{} FPDUs instead of a Terminate", fpdus.len()) };
        assert!(*crc_good);
        assert_eq!(t[2..20], hex!("4147 00000000 00000002 00000001 00000000"), "Terminate's header");
        ((t[20] >> 4, t[20] & 15, t[21], t[22]), error)
    }

    /// What the queue pair sends until nothing is left to send.
    fn sent_to_the_end(&mut self) -> Vec<u8> {
        let mut stream = Vec::new();
        while !self.qp.flush().unwrap() {
            stream.extend(self.sent());
        }
        stream.extend(self.sent());
        stream
    }

    fn expect_fault(&mut self, bytes: &[u8], fault: Fault) {
        let ((layer, kind, code, _), error) = self.breach(bytes);
        assert_eq!((layer, kind, code), (fault.layer, fault.kind, fault.code), "{error}, expected {fault}");
        assert_eq!(error.kind(), Kind::Protocol);
    }
}

/// Cuts a stream into FPDUs, without pad and CRC; says whether each CRC is right.
fn parse(mut stream: &[u8]) -> Vec<(Vec<u8>, bool)> {
    let mut all = Vec::new();
    while !stream.is_empty() {
        let length = 2 + usize::from(u16::from_be_bytes([stream[0], stream[1]]));
        let padded = length.next_multiple_of(4);
        let crc = u32::from_le_bytes(stream[padded..padded + 4].try_into().unwrap());
        assert!(stream[length..padded].iter().all(|b| *b == 0), "pad");
        all.push((stream[..length].to_vec(), crc == crc32c::crc32c(&stream[..padded])));
        stream = &stream[padded + 4..];
    }
    all
}

/// The payloads of the FPDUs with this opcode, one after the other; all CRCs must be right.
fn payloads(stream: &[u8], opcode: u8) -> Vec<u8> {
    let fpdus = parse(stream);
    assert!(fpdus.iter().all(|(_, crc_good)| *crc_good));
    let of = fpdus.iter().filter(|(f, _)| f[3] & 15 == opcode);
    of.flat_map(|(f, _)| f[if f[2] & 0x80 != 0 { 16 } else { 20 }..].to_vec()).collect()
}

/// Puts length, pad and CRC around a ULPDU.
fn seal(ulpdu: &[u8]) -> Vec<u8> {
    let mut fpdu = (ulpdu.len() as u16).to_be_bytes().to_vec();
    fpdu.extend_from_slice(ulpdu);
    fpdu.resize(fpdu.len().next_multiple_of(4), 0);
    fpdu.extend_from_slice(&crc32c::crc32c(&fpdu).to_le_bytes());
    fpdu
}

/// Makes the CRC right again after a change.
fn reseal(fpdu: &mut [u8]) {
    let at = fpdu.len() - 4;
    let crc = crc32c::crc32c(&fpdu[..at]);
    fpdu[at..].copy_from_slice(&crc.to_le_bytes());
}

struct Untagged {
    opcode: u8,
    last: bool,
    invalidate: u32,
    queue: u32,
    msn: u32,
    mo: u32,
}

const SEND: Untagged = Untagged { opcode: 3, last: true, invalidate: 0, queue: 0, msn: 1, mo: 0 };

fn untagged(u: Untagged, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![if u.last { 0x41 } else { 0x01 }, 0x40 | u.opcode];
    for word in [u.invalidate, u.queue, u.msn, u.mo] {
        bytes.extend_from_slice(&word.to_be_bytes());
    }
    bytes.extend_from_slice(payload);
    seal(&bytes)
}

fn tagged(opcode: u8, last: bool, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![if last { 0xC1 } else { 0x81 }, 0x40 | opcode];
    bytes.extend_from_slice(&stag.to_be_bytes());
    bytes.extend_from_slice(&to.to_be_bytes());
    bytes.extend_from_slice(payload);
    seal(&bytes)
}

fn read_request(
    msn: u32,
    sink_stag: u32,
    sink_to: u64,
    size: u32,
    source_stag: u32,
    source_to: u64,
) -> Vec<u8> {
    let request = ReadRequest { sink_stag, sink_to, size, source_stag, source_to };
    untagged(Untagged { opcode: 1, queue: 1, msn, ..SEND }, &request.encode())
}
