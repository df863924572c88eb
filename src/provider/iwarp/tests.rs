//! A pair of queue pairs over TCP loopback, and queue pairs against a hand-made peer whose bytes are built here.

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

#[test]
fn a_receive_takes_memory_when_a_message_begins_to_arrive() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let block = || memory.slab().unwrap().into_sink(1).address();
    let page = || memory.header().unwrap().into_sink(1).address();
    // The one idle block of either length: who takes one gets it.
    let (idle, short) = (block(), page());
    for small in [false, true] {
        let mut pair = if small { Pair::small() } else { Pair::plain() };
        for _ in 0..1000 {
            pair.b.post_recv_of(&memory, 64 << 10).unwrap();
        }
        assert_eq!(block(), idle, "a thousand Receives hold nothing");
        for len in [0, 100, 4096, 5000, 40_000, 64 << 10] {
            let message = pattern(len, 3);
            pair.a.post(WorkRequest::Send { gather: smallvec![region(&message)], invalidate: None });
            pair.run(|p| !p.got_b.is_empty());
            match pair.got_b.pop_front() {
                Some(Completion::Received { sink, len, .. }) => {
                    let counts = memory.own_received();
                    assert!(counts == len || len <= 4096 && counts == 0, "{counts} of {len}");
                    let got = bytes(sink, len);
                    // Of a message that begins in one of several segments nothing tells how long it is.
                    let fits = len <= 4096 && (!small || got.as_ptr().addr() == short);
                    assert!(got[..] == message[..]);
                    assert_eq!(got.as_ptr().addr(), if fits { short } else { idle }, "{len}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!((block(), page(), memory.own_received()), (idle, short, 0), "given back");
        }
    }
}

#[test]
fn a_connection_without_bytes_that_it_waits_for_has_no_read_ahead_buffer() {
    let mut pair = Pair::plain();
    let message = pattern(3000, 1);
    pair.a.post(WorkRequest::Send { gather: smallvec![region(&message)], invalidate: None });
    pair.b.post_recv(sink(3000));
    assert_eq!(drain(&mut pair.a).unwrap().len(), 0);
    let mut got = Vec::new();
    while got.is_empty() {
        got = drain(&mut pair.b).unwrap();
    }
    assert!(received(got.remove(0)).0 == message);
    assert!(pair.a.receive.buffer.is_empty() && pair.b.receive.buffer.is_empty());
    // A half of an FPDU stays where it is, whoever else reads meanwhile.
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(100));
    let fpdu = untagged(SEND, b"first and second");
    assert!(bench.give(&fpdu[..20]).unwrap().is_empty() && !bench.qp.receive.buffer.is_empty());
    pair.send(&[7; 5000], 1);
    assert_eq!(received(bench.give(&fpdu[20..]).unwrap().remove(0)).0, b"first and second");
    assert!(bench.qp.receive.buffer.is_empty());
}

#[test]
fn a_connection_has_no_read_ahead_buffer_while_its_startup_or_its_first_message_is_awaited() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let x = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (y, _) = listener.accept().unwrap();
    let mut b = Iwarp::responder(y.as_raw_fd(), Options::default()).unwrap();
    assert!(!b.establish().unwrap() && b.receive.buffer.is_empty());
    let mut a = Iwarp::initiator(x.as_raw_fd(), Options::default()).unwrap();
    while !(b.establish().unwrap() & a.establish().unwrap()) {
        std::thread::yield_now();
    }
    assert!(a.receive.buffer.is_empty() && b.receive.buffer.is_empty());
}

#[test]
fn a_message_that_is_longer_than_its_receive_ends_the_connection_before_it_has_memory() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let mut pair = Pair::plain();
    let held = memory.slab().unwrap();
    pair.b.post_recv_of(&memory, 1024).unwrap();
    pair.a.post(WorkRequest::Send { gather: smallvec![region(&[0; 1028])], invalidate: None });
    let error = loop {
        match pair.b.poll() {
            Ok(completion) => assert!(completion.is_none()),
            Err(error) => break error,
        }
    };
    assert!(error.text().contains("too long"), "{error}");
    let idle = held.as_ptr();
    drop(held);
    assert_eq!(memory.slab().unwrap().as_ptr(), idle, "no other block was taken and given back");
}

// ---------------------------------------------------------------------------------------------------------- helpers

fn region(bytes: &[u8]) -> Region {
    Region::copy_from(bytes).unwrap()
}

fn sink(len: usize) -> Sink {
    Buf::with_capacity(len).unwrap().into_sink(len)
}

/// Bytes that depend on their place.
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

/// Everything that `poll` has to say now.
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

    /// `a` writes `data` into the middle of memory of `b`, then tells it so.
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

    /// `a` reads `data` out of the middle of memory of `b`, into the middle of its own.
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

/// A queue pair whose peer is this test, byte by byte.
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

    /// A responder after `request`, and what its handshake says.
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

    /// Feeds bytes and returns all completions that they give.
    fn give(&mut self, bytes: &[u8]) -> Result<Vec<Completion>, Error> {
        self.feed(bytes);
        drain(&mut self.qp)
    }

    /// What the queue pair has sent since the last look.
    fn sent(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        match self.peer.read_to_end(&mut all) {
            Err(e) if e.kind() != ErrorKind::WouldBlock => panic!("{e}"),
            _ => all,
        }
    }

    /// Feeds bytes that break the protocol: the Terminate that they cause as (layer, type, code, header flags), and
    /// the error that `poll` gives then and for ever.
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

/// The payloads of the FPDUs with this opcode, one after the other; all CRCs are right.
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

// ------------------------------------------------------------------------------------------------------ good manners

#[test]
fn a_send_and_a_write_go_out_as_the_vectors() {
    let mut bench = Bench::initiator();
    bench
        .qp
        .post(WorkRequest::Send { gather: smallvec![region(&[1, 2, 3]), region(&[4, 5])], invalidate: None });
    assert_eq!(
        bench.sent(),
        hex!("0017 4143 00000000 00000000 00000001 00000000 0102030405 000000 16053efb")
    );
    let handle = Handle(0x1234_5678);
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"abcd")], invalidate: Some(handle) });
    assert_eq!(bench.sent(), hex!("0016 4144 12345678 00000000 00000002 00000000 61626364 ea5e61fb"));
    let to = Segment { handle, length: 4, offset: 0x1000 };
    bench.qp.post(WorkRequest::Write { gather: smallvec![region(b"WXYZ")], to });
    assert!(bench.qp.wants_write() && bench.qp.unsent() == 4);
    assert!(bench.qp.flush().unwrap());
    assert_eq!(bench.sent(), hex!("0012 c140 12345678 0000000000001000 5758595a c3f72578"));
    assert!(!bench.qp.wants_write() && bench.qp.unsent() == 0);
}

#[test]
fn a_read_request_goes_out_as_the_vector_but_for_its_random_handle() {
    let mut bench = Bench::initiator();
    let from = Segment { handle: Handle(0x1122_3300), length: 4096, offset: 0x3000 };
    bench.qp.post(WorkRequest::Read { id: WorkId(1), sink: sink(4096), at: 0, from });
    bench.qp.flush().unwrap();
    let mut sent = bench.sent();
    let stag = u32::from_be_bytes(sent[20..24].try_into().unwrap());
    assert_ne!(stag, 0);
    sent[20..24].copy_from_slice(&hex!("aabbcc00"));
    sent[24..32].copy_from_slice(&hex!("0000000000002000"));
    reseal(&mut sent);
    assert_eq!(
        sent,
        hex!(
            "002e 4141 00000000 00000001 00000001 00000000 aabbcc00 0000000000002000 00001000 11223300"
            "0000000000003000 7f768c49"
        )
    );
}

fn sizes(fpdu: usize) -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 8191, 8192, 8193];
    for n in [1, 2, 3] {
        for payload in [fpdu - 20, fpdu - 24] {
            sizes.extend([n * payload - 5, n * payload - 1, n * payload, n * payload + 1, n * payload + 4]);
        }
    }
    sizes
}

fn exercise(pair: &mut Pair) {
    for _ in 0..2 {
        let fpdu = pair.a.transmit.fpdu();
        for (seed, size) in sizes(fpdu).into_iter().chain([1 << 20]).enumerate() {
            let data = pattern(size, seed);
            pair.send(&data, 1);
            pair.send(&data, 7);
            pair.write(&data, 3);
            pair.read(&data);
        }
        pair.swap();
    }
}

#[test]
fn every_operation_carries_every_size_both_ways_in_large_fpdus() {
    exercise(&mut Pair::plain());
}

#[test]
fn every_operation_carries_every_size_both_ways_in_small_fpdus() {
    exercise(&mut Pair::small());
}

#[test]
fn sixteen_mebibytes_arrive_whole_by_each_operation() {
    let data = pattern(16 << 20, 3);
    let mut pair = Pair::plain();
    pair.send(&data, 3000);
    pair.write(&data, 2);
    pair.read(&data);
    pair.swap();
    pair.read(&data);
}

#[test]
fn the_contract_is_kept() {
    let sockets = std::cell::RefCell::new(Vec::new());
    contract::check(&|| {
        let Pair { a, b, _sockets, .. } = Pair::plain();
        sockets.borrow_mut().push(_sockets);
        [Box::new(a), Box::new(b)]
    });
}

#[test]
fn a_device_says_that_it_has_handed_over_all_when_nothing_is_left_to_do() {
    let mut pair = Pair::plain();
    for _ in 0..4 {
        pair.b.post_recv(sink(100));
    }
    let polled = |end: &mut Iwarp| loop {
        if let Some(completion) = end.poll().unwrap() {
            return received(completion).0;
        }
        wait::until(end.fd(), wait::IN, Some(Duration::from_secs(10)), None).unwrap();
    };
    for message in [b"one", b"two"] {
        pair.a.post(WorkRequest::Send { gather: smallvec![region(message)], invalidate: None });
    }
    assert_eq!((polled(&mut pair.b), pair.b.drained()), (b"one".to_vec(), false));
    assert_eq!((polled(&mut pair.b), pair.b.drained()), (b"two".to_vec(), true));
    // From here on it would have to look.
    assert!(!pair.b.drained());
    // An RDMA Read of the peer comes with what is received, and is to be answered.
    let from = pair.b.expose_source(region(&pattern(1 << 20, 1))).unwrap();
    pair.a.post(WorkRequest::Send { gather: smallvec![region(b"three")], invalidate: None });
    pair.a.post(WorkRequest::Read { id: WorkId(9), sink: sink(1 << 20), at: 0, from });
    pair.a.flush().unwrap();
    assert_eq!((polled(&mut pair.b), pair.b.drained()), (b"three".to_vec(), false));
    pair.run(|p| !p.got_a.is_empty());
}

#[test]
fn without_crc_on_either_side_the_word_is_zero_and_not_checked() {
    let none = Options { crc: false, ..Options::default() };
    let mut pair = Pair::new(none.clone(), none.clone());
    assert!(!pair.a.crc() && !pair.b.crc());
    pair.write(&pattern(100_000, 1), 1);
    pair.read(&pattern(100_000, 2));
    let request = hex!("4d504120494420526571204672616d65 10 02 0004 0010 0010");
    let (mut bench, reply) = Bench::responder_to(&request, none);
    assert_eq!(reply[16], 0x10);
    bench.qp.post_recv(sink(8));
    let mut send = untagged(SEND, b"x");
    let at = send.len() - 1;
    send[at] ^= 1;
    assert_eq!(bench.give(&send).unwrap().len(), 1);
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"y")], invalidate: None });
    let sent = bench.sent();
    assert_eq!(sent[sent.len() - 4..], [0; 4]);
}

#[test]
fn one_side_that_wants_crc_gets_it() {
    for (a, b) in [(true, false), (false, true)] {
        let pair =
            Pair::new(Options { crc: a, ..Options::default() }, Options { crc: b, ..Options::default() });
        assert!(pair.a.crc() && pair.b.crc());
    }
}

#[test]
fn an_rdma_write_of_a_mebibyte_is_hardly_copied_by_its_receiver() {
    let mut pair = Pair::plain();
    // TCP's segments grow with the first data.
    pair.write(&pattern(4 << 20, 0), 1);
    let (copied, calls) = (pair.b.copied_bytes, pair.b.syscalls);
    pair.write(&pattern(1 << 20, 1), 1);
    let (copied, calls) = (pair.b.copied_bytes - copied, pair.b.syscalls - calls);
    assert!(copied < 4096, "{copied} bytes copied");
    assert!(copied > 0, "read-ahead copies a little: is the counter alive?");
    assert!(calls < 100, "{calls} system calls");
    assert!(pair.a.copied_bytes < 4096);
}

#[test]
fn small_fpdus_are_read_many_at_a_time() {
    let mut pair = Pair::small();
    let calls = pair.b.syscalls;
    pair.write(&pattern(1 << 20, 1), 1);
    // 730 FPDUs.
    assert!(pair.b.syscalls - calls < 200, "{}", pair.b.syscalls - calls);
}

#[test]
fn many_requests_in_flight_complete_in_order() {
    let mut pair = Pair::new(
        Options { max_fpdu: Some(2000), ..Options::default() },
        Options { ird: 3, max_fpdu: Some(2000), ..Options::default() },
    );
    assert_eq!(pair.a.limits().read_depth, 16, "the responder raises its IRD");
    pair.a.transmit.ord = 3;
    let data: Vec<_> = (0..20).map(|i| pattern(5000 + i, i)).collect();
    let mut memory = Vec::new();
    for (i, data) in data.iter().enumerate() {
        let from = pair.b.expose_source(region(data)).unwrap();
        let to = sink(data.len());
        memory.push(to.clone());
        pair.a.post(WorkRequest::Read { id: WorkId(i as u64), sink: to, at: 0, from });
        pair.b.post_recv(sink(10));
        pair.a.post(WorkRequest::Send { gather: smallvec![region(&[i as u8])], invalidate: None });
    }
    // The Sends did not wait for the Reads that stepped aside.
    assert_eq!((pair.a.transmit.outstanding.len(), pair.a.unsent()), (3, 0));
    assert!(!pair.a.flush().unwrap() && !pair.a.wants_write());
    pair.run(|p| p.got_a.len() == 20 && p.got_b.len() == 20);
    for (i, completion) in pair.got_a.drain(..).enumerate() {
        assert!(matches!(completion, Completion::Read { id } if id.0 == i as u64));
    }
    for (i, completion) in pair.got_b.drain(..).enumerate() {
        assert_eq!(received(completion).0, [i as u8]);
    }
    for (memory, data) in memory.into_iter().zip(data) {
        assert_eq!(bytes(memory, data.len())[..], data);
    }
    assert!(pair.a.flush().unwrap());
}

#[test]
fn a_read_sees_the_write_that_was_posted_before_it() {
    let mut pair = Pair::plain();
    let memory = sink(200_000);
    let to = pair.b.expose_sink(memory).unwrap();
    let data = pattern(200_000, 5);
    let source = pair.b.expose_source(region(&data)).unwrap();
    let got = sink(200_000);
    pair.b.post_recv(sink(1));
    pair.a.post(WorkRequest::Write { gather: smallvec![region(&data)], to });
    pair.a.post(WorkRequest::Read { id: WorkId(0), sink: got.clone(), at: 0, from: source });
    pair.a.flush().unwrap();
    pair.run(|p| p.got_a.len() == 1);
    assert_eq!(bytes(got, data.len())[..], data);
}

#[test]
fn a_long_read_response_lets_sends_pass_and_a_write_waits_for_it() {
    let mut bench = Bench::responder_to(&REQUEST, Options { max_fpdu: Some(1000), ..Options::default() }).0;
    let source = bench.qp.expose_source(region(&pattern(4000, 1))).unwrap();
    bench.qp.post_recv(sink(0));
    bench.give(&untagged(SEND, b"")).unwrap();
    // Queued together: a response of five frames, then a Send of three and a Write of two.
    let to = Segment { handle: Handle(7), length: 1500, offset: 0 };
    bench.qp.transmit.blocked = true;
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(2500, 2))], invalidate: None });
    bench.qp.post(WorkRequest::Write { gather: smallvec![region(&pattern(1500, 3))], to });
    bench.qp.transmit.may_send = false;
    bench.feed(&read_request(1, 0xAB, 0, 4000, source.handle.0, 0));
    bench.qp.fill().ok().unwrap();
    bench.qp.process().ok().unwrap();
    assert_eq!(drain(&mut bench.qp).unwrap().len(), 0);
    let order: Vec<_> =
        parse(&bench.sent()).iter().map(|(f, crc)| (f[3] & 15, f[2] & 0x40 != 0, *crc)).collect();
    let (response, send, write) = (2, 3, 0);
    let expected = [
        (send, false),
        (response, false),
        (send, false),
        (response, false),
        (send, true),
        (response, false),
        (response, false),
        (response, true),
        (write, false),
        (write, true),
    ];
    assert_eq!(order, expected.map(|(opcode, last)| (opcode, last, true)));
}

#[test]
fn a_read_response_waits_for_the_end_of_a_write() {
    let mut bench = Bench::initiator();
    let source = bench.qp.expose_source(region(b"answer")).unwrap();
    let to = Segment { handle: Handle(7), length: 1 << 20, offset: 0 };
    bench.qp.post(WorkRequest::Write { gather: smallvec![region(&pattern(1 << 20, 3))], to });
    assert!(!bench.qp.flush().unwrap());
    bench.give(&read_request(1, 0xAB, 0, 6, source.handle.0, 0)).unwrap();
    let mut stream = Vec::new();
    while !bench.qp.flush().unwrap() {
        stream.extend(bench.sent());
    }
    stream.extend(bench.sent());
    let fpdus = parse(&stream);
    let (answer, write) = fpdus.split_last().unwrap();
    assert_eq!(answer.0[16..], *b"answer");
    assert!(write.iter().all(|(fpdu, crc)| fpdu[3] == 0x40 && *crc));
}

#[test]
fn inside_a_run_of_large_fpdus_only_a_header_is_read_ahead() {
    let mut bench = Bench::initiator();
    let to = bench.qp.expose_sink(sink(120_000)).unwrap().handle.0;
    bench.give(&tagged(0, false, to, 0, &pattern(40_000, 1))).unwrap();
    let before = bench.qp.copied_bytes;
    bench.give(&tagged(0, false, to, 40_000, &pattern(40_000, 2))).unwrap();
    assert_eq!(bench.qp.copied_bytes - before, 4, "20 bytes are read, of which 16 are a header");
}

#[test]
fn sequence_numbers_wrap_to_zero() {
    let mut pair = Pair::plain();
    for queue in [0, 1] {
        pair.a.shared.set_msn(queue, u32::MAX);
    }
    (pair.b.receive.send_msn, pair.b.receive.read_msn) = (u32::MAX, u32::MAX);
    for i in 0..3 {
        pair.send(&[i], 1);
        pair.read(&[i]);
    }
    assert_eq!(pair.b.receive.send_msn, 2);
}

#[test]
fn every_kind_of_send_is_received() {
    let mut bench = Bench::responder();
    let handle = bench.qp.expose_sink(sink(10)).unwrap().handle.0;
    let other = bench.qp.expose_source(region(b"x")).unwrap().handle.0;
    for (i, opcode) in [3, 5, 4, 6].into_iter().enumerate() {
        let invalidate = if i < 2 { 0 } else { [handle, other][i - 2] };
        bench.qp.post_recv(sink(10));
        let send = Untagged { opcode, invalidate, msn: i as u32 + 1, ..SEND };
        let got = bench.give(&untagged(send, b"abc")).unwrap().pop().unwrap();
        assert_eq!(received(got), (b"abc".to_vec(), (i >= 2).then_some(invalidate)));
    }
    // Invalidated handles are gone.
    bench.qp.post_recv(sink(10));
    let again = Untagged { opcode: 4, invalidate: handle, msn: 5, ..SEND };
    bench.expect_fault(&untagged(again, b""), Fault::CANNOT_INVALIDATE);
}

#[test]
fn work_that_cannot_be_is_refused_with_an_error_and_no_panic() {
    let bad = |request: WorkRequest| {
        let mut bench = Bench::initiator();
        bench.qp.post(request);
        assert_eq!(bench.qp.poll().unwrap_err().kind(), Kind::Invalid);
        assert!(bench.qp.expose_source(region(b"x")).is_err());
    };
    let from = Segment { handle: Handle(1), length: 10, offset: 0 };
    bad(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: 1, from });
    bad(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: usize::MAX, from });
    bad(WorkRequest::Write { gather: smallvec![region(b"123")], to: from });
    let mut bench = Bench::initiator();
    bench.qp.transmit.ord = 0;
    bench.qp.post(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: 0, from });
    assert_eq!(bench.qp.poll().unwrap_err().kind(), Kind::Invalid);
    let too_long = Options { private_data: vec![0; 249], ..Options::default() };
    assert_eq!(Iwarp::responder(0, too_long).err().unwrap().kind(), Kind::Invalid);
}

#[test]
fn when_the_peer_closes_everything_complete_is_delivered_first() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"one"));
    bench.feed(&untagged(Untagged { msn: 2, ..SEND }, b"two")[..20]);
    let Bench { mut qp, _socket, peer } = bench;
    drop(peer);
    // Sending fails first: that must not hide what has arrived.
    qp.transmit.may_send = true;
    qp.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: None });
    assert!(qp.flush().is_err());
    assert_eq!(received(qp.poll().unwrap().unwrap()).0, b"one");
    let error = qp.poll().unwrap_err();
    assert_eq!(error.kind(), Kind::ConnectionLost);
}

#[test]
fn a_full_socket_is_waited_for_and_nothing_is_lost() {
    let mut bench = Bench::initiator();
    let data = pattern(3 << 20, 9);
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&data)], invalidate: None });
    assert!(bench.qp.wants_write() && !bench.qp.flush().unwrap());
    assert!(bench.qp.unsent() > 1 << 20 && bench.qp.unsent() <= data.len());
    let mut stream = Vec::new();
    for _ in 0..10_000 {
        stream.extend(bench.sent());
        if bench.qp.flush().unwrap() {
            break;
        }
    }
    stream.extend(bench.sent());
    assert_eq!(bench.qp.unsent(), 0);
    let fpdus = parse(&stream);
    assert!(fpdus.iter().all(|(f, crc)| *crc && f.len() <= 2 + 64768));
    let got: Vec<u8> = fpdus.iter().flat_map(|(f, _)| f[20..].to_vec()).collect();
    assert!(got == data);
}

#[test]
fn fpdus_fit_the_segments_of_the_path() {
    let mut pair = Pair::plain();
    pair.write(&pattern(4 << 20, 0), 1);
    let before = pair.a.transmit.fpdu();
    // TCP raises it step by step, so what we know may be an earlier value.
    let socket = pair.a.fd();
    let Iwarp { transmit, stream, .. } = &mut pair.a;
    transmit.look_at_path(stream);
    let mss = socket::tcp_mss(socket).unwrap();
    let fpdu = pair.a.transmit.fpdu();
    assert!(fpdu >= before && fpdu <= mss && fpdu + 800 > mss, "FPDUs of {fpdu}, segments of {mss}");
}

// ------------------------------------------------------------------------------------------------------------ startup

#[test]
fn private_data_reaches_both_ends_and_depths_are_agreed() {
    let pair = Pair::new(
        Options { private_data: b"from a".to_vec(), ird: 5, ord: 40, ..Options::default() },
        Options { private_data: b"from b".to_vec(), ird: 2, ord: 9, ..Options::default() },
    );
    assert_eq!((pair.a.private_data(), pair.b.private_data()), (&b"from b"[..], &b"from a"[..]));
    assert_eq!((pair.a.limits().read_depth, pair.a.ird), (40, 5));
    assert_eq!((pair.b.limits().read_depth, pair.b.ird), (5, 40));
}

#[test]
fn a_peer_of_revision_one_is_answered_in_revision_one() {
    let request = hex!("4d504120494420526571204672616d65 40 01 0003 616263");
    let options = Options { private_data: b"xyz".to_vec(), ..Options::default() };
    let (bench, reply) = Bench::responder_to(&request, options);
    assert_eq!(reply, hex!("4d504120494420526570204672616d65 40 01 0003 78797a"));
    assert_eq!((bench.qp.private_data(), bench.qp.limits().read_depth), (&b"abc"[..], 16));
    let one = Options { revision: 1, ..Options::default() };
    let mut pair = Pair::new(one, Options::default());
    pair.read(&pattern(70_000, 1));
}

#[test]
fn an_rtr_write_or_read_opens_a_peer_to_peer_connection() {
    let request = hex!("4d504120494420526571204672616d65 50 02 0004 8000 4000");
    for read in [false, true] {
        let options = Options { ird: 0, ord: 0, ..Options::default() };
        let (mut bench, reply) = Bench::responder_to(&request, options);
        assert_eq!(reply[16..], hex!("50 02 0004 8001 c000"));
        // Nothing leaves before the first FPDU of the peer.
        bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"first")], invalidate: None });
        assert!(drain(&mut bench.qp).unwrap().is_empty());
        assert!(!bench.qp.flush().unwrap() && bench.sent().is_empty() && !bench.qp.wants_write());
        let rtr = if read { read_request(1, 1, 0, 0, 1, 0) } else { tagged(0, true, 1, 0, b"") };
        assert!(bench.give(&rtr).unwrap().is_empty());
        let mut sent: Vec<_> = parse(&bench.sent()).into_iter().map(|(fpdu, _)| fpdu).collect();
        sent.sort_by_key(|fpdu| fpdu[3]);
        if read {
            assert_eq!(sent.remove(0), hex!("000e c142 00000001 0000000000000000"));
        }
        assert_eq!(sent[0][20..], *b"first");
    }
}

#[test]
fn a_request_in_any_number_of_pieces_is_taken() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut qp = Iwarp::responder(ours.as_raw_fd(), Options::default()).unwrap();
    for (i, byte) in REQUEST.iter().enumerate() {
        theirs.write_all(&[*byte]).unwrap();
        assert_eq!(qp.establish().unwrap(), i + 1 == REQUEST.len());
    }
}

#[test]
fn a_peer_that_closes_during_the_startup_is_told_apart_from_one_that_talks_rubbish() {
    for n in [0, 1, 16, 19, 23] {
        let (mut bench, _) = Bench::unreplied(Options::default());
        bench.feed(&REPLY[..n]);
        let Bench { mut qp, _socket, peer } = bench;
        drop(peer);
        assert_eq!(qp.establish().unwrap_err().kind(), Kind::ConnectionLost, "after {n} bytes");
        assert_eq!(qp.establish().unwrap_err().kind(), Kind::ConnectionLost);
    }
    let (mut bench, _) = Bench::unreplied(Options::default());
    bench.feed(b"HTTP/1.1 400");
    assert_eq!(bench.qp.establish().unwrap_err().kind(), Kind::Protocol);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = Iwarp::initiator(ours.as_raw_fd(), Options::default()).err().unwrap();
    assert_eq!(error.kind(), Kind::ConnectionLost);
}

#[test]
fn bytes_after_the_request_are_an_error_and_after_the_reply_are_fpdus() {
    let mut early = REQUEST.to_vec();
    early.extend(untagged(SEND, b"x"));
    let (mut bench, done) = Bench::unanswered(&early, Options::default());
    assert_eq!(done.unwrap_err().kind(), Kind::Protocol);
    assert!(bench.sent().is_empty());

    let (mut bench, _) = Bench::unreplied(Options::default());
    let mut reply = REPLY.to_vec();
    reply.extend(untagged(SEND, b"at once"));
    bench.feed(&reply);
    bench.qp.post_recv(sink(10));
    assert!(bench.qp.establish().unwrap());
    assert_eq!(received(drain(&mut bench.qp).unwrap().pop().unwrap()).0, b"at once");
}

#[test]
fn a_request_for_markers_is_rejected_and_a_rejected_request_is_the_peers_fault() {
    let mut request = REQUEST;
    request[16] |= 0x80;
    let (mut bench, done) = Bench::unanswered(&request, Options::default());
    assert_eq!(done.unwrap_err().kind(), Kind::Protocol);
    assert_eq!(bench.sent()[16..18], hex!("70 02"));
    let (mut bench, _) = Bench::unreplied(Options::default());
    let mut reply = REPLY;
    reply[16] |= 0x20;
    bench.feed(&reply);
    assert_eq!(bench.qp.establish().unwrap_err().kind(), Kind::Peer);
}

#[test]
fn a_reply_that_wants_more_reads_than_we_serve_is_terminated() {
    let (mut bench, _) = Bench::unreplied(Options::default());
    let mut reply = REPLY;
    reply[23] = 17;
    bench.feed(&reply);
    assert_eq!(bench.qp.establish().unwrap_err().kind(), Kind::Protocol);
    let sent = parse(&bench.sent());
    assert_eq!(sent[0].0[20..], hex!("20060000"));
}

// -------------------------------------------------------------------------------------------------------------- fork

#[test]
fn a_forked_child_replies_and_the_parent_goes_on() {
    let mut pair = Pair::plain();
    pair.swap();
    for round in 0..3u8 {
        // Work that the parent has queued and not sent is not sent twice.
        pair.b.post_recv(sink(10));
        pair.b.post_recv(sink(10));
        pair.a.transmit.blocked = true;
        pair.a.post(WorkRequest::Send { gather: smallvec![region(&[round, 0])], invalidate: None });
        let a = &mut pair.a;
        let child = fork::testing::fork(|| {
            a.post(WorkRequest::Send { gather: smallvec![region(&[round, 1])], invalidate: None });
            a.terminate();
            a.unsent() == 0
        });
        assert!(child.succeeded());
        pair.run(|p| p.got_b.len() == 2);
        assert_eq!(received(pair.got_b.pop_front().unwrap()).0, [round, 1]);
        assert_eq!(received(pair.got_b.pop_front().unwrap()).0, [round, 0]);
        pair.send(&pattern(100_000, 1), 1);
        pair.read(b"still here");
        pair.swap();
        pair.send(b"and back", 1);
        pair.swap();
    }
}

#[test]
fn a_child_waits_while_its_parent_is_inside_a_message_and_notices_its_end() {
    let mut bench = Bench::initiator();
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(1 << 20, 0))], invalidate: None });
    assert!(bench.qp.transmit.is_inside_message());
    let mut stream = bench.sent();
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        qp.post(WorkRequest::Send { gather: smallvec![region(b"later")], invalidate: None });
        qp.wants_write() && !qp.flush().unwrap() && qp.unsent() >= 5
    });
    assert!(child.succeeded());
    // The socket had room all the time.
    assert!(bench.sent().is_empty());
    while !bench.qp.flush().unwrap() {
        stream.extend(bench.sent());
    }
    stream.extend(bench.sent());
    assert!(parse(&stream).iter().all(|(_, crc)| *crc));
    // The other way round: a child that ends inside a message leaves a stream that nobody can use.
    let mut bench = Bench::initiator();
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(1 << 20, 0))], invalidate: None });
        qp.transmit.is_inside_message()
    });
    let id = child.id();
    child.wait_for_zombie();
    assert!(fork::process_gone(id));
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: None });
    assert_eq!(bench.qp.flush().unwrap_err().kind(), Kind::ConnectionLost);
    assert_eq!(drain(&mut bench.qp).unwrap_err().kind(), Kind::ConnectionLost);
    assert!(child.succeeded());
}

#[test]
fn whoever_reads_first_after_a_fork_goes_on_reading_and_the_other_notices() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"x"));
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| drain(qp).unwrap().len() == 1);
    assert!(child.succeeded());
    bench.feed(&untagged(Untagged { msn: 2, ..SEND }, b"y"));
    assert_eq!(drain(&mut bench.qp).unwrap_err().kind(), Kind::ConnectionLost);

    let mut bench = Bench::responder();
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    bench.qp.post_recv(sink(10));
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        theirs.read_exact(&mut [0]).unwrap();
        drain(qp).unwrap().is_empty()
    });
    assert_eq!(bench.give(&untagged(SEND, b"x")).unwrap().len(), 1);
    bench.feed(&untagged(Untagged { msn: 2, ..SEND }, b"y"));
    ours.write_all(b"!").unwrap();
    assert!(child.succeeded());
}

#[test]
fn calls_belong_to_one_process_and_are_taken_over_from_one_that_has_ended() {
    let sends =
        |qp: &mut Iwarp| qp.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: None });
    // While the parent lives, no child has them; and the parent keeps them.
    let mut bench = Bench::initiator();
    let qp = &mut bench.qp;
    assert!(fork::testing::fork(|| !qp.claim()).succeeded());
    assert!(bench.qp.claim());
    for sent_after in [false, true] {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let parent = fork::testing::fork(|| {
            let mut bench = Bench::initiator();
            sends(&mut bench.qp);
            let parent = fork::process_id();
            let qp = &mut bench.qp;
            let _child = fork::testing::fork(|| {
                while !fork::process_gone(parent) {
                    std::thread::yield_now();
                }
                // Of two that inherit it one is first.
                let claimed = qp.claim();
                let other = fork::testing::fork(|| qp.claim()).succeeded();
                theirs.write_all(&[u8::from(claimed), u8::from(other)]).unwrap();
                true
            });
            if sent_after {
                // The child knows nothing of this one.
                sends(&mut bench.qp);
            }
            true
        });
        assert!(parent.succeeded());
        let mut claimed = [9; 2];
        ours.read_exact(&mut claimed).unwrap();
        assert_eq!(claimed, [u8::from(!sent_after), 0]);
    }
    // Who has missed bytes can make nothing of what follows, whoever it is.
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"x"));
    let qp = &mut bench.qp;
    assert!(fork::testing::fork(|| drain(qp).unwrap().len() == 1).succeeded());
    assert!(!bench.qp.claim());
}

// --------------------------------------------------------------------------------------------------- taking back

#[test]
fn a_source_was_read_when_all_of_it_was_asked_for_and_is_framed() {
    let mut bench = Bench::responder();
    let source = bench.qp.expose_source(region(&pattern(1 << 20, 1))).unwrap();
    let stag = source.handle.0;
    assert_eq!(bench.qp.was_read(source.handle), Some(false));
    bench.give(&read_request(1, 5, 0, 1000, stag, 0)).unwrap();
    assert_eq!(bench.qp.was_read(source.handle), Some(false));
    bench.give(&read_request(2, 6, 0, (1 << 20) - 1000, stag, 1000)).unwrap();
    // The socket does not take all of it at once.
    assert_eq!(bench.qp.was_read(source.handle), Some(false));
    while !bench.qp.transmit.is_all_framed() {
        bench.sent();
        let _ = bench.qp.flush().unwrap();
    }
    assert_eq!(bench.qp.was_read(source.handle), Some(true));
    bench.qp.invalidate(source.handle).unwrap();
    assert_eq!(bench.qp.was_read(source.handle), Some(true), "nothing is left");
    assert!(bench.qp.failed.is_none());
}

#[test]
fn a_handle_works_until_it_is_taken_back() {
    let mut bench = Bench::responder();
    let memory = sink(100);
    let to = bench.qp.expose_sink(memory.clone()).unwrap();
    assert_eq!((to.length, to.offset), (100, 0));
    bench.give(&tagged(0, true, to.handle.0, 0, b"here")).unwrap();
    let memory = memory.into_buf(100).unwrap_err();
    bench.qp.invalidate(to.handle).unwrap();
    bench.qp.invalidate(to.handle).unwrap();
    assert_eq!(bytes(memory, 100)[..5], *b"here\0");
    bench.expect_fault(&tagged(0, true, to.handle.0, 0, b"here"), Fault::STAG);
}

/// rule 105
#[test]
fn handles_are_random_and_each_its_own() {
    let mut bench = Bench::responder();
    let mut all: Vec<_> = (0..1000).map(|_| bench.qp.expose_source(region(b"x")).unwrap().handle.0).collect();
    assert!(all.windows(2).filter(|w| w[1] > w[0]).count() < 700, "they do not count up");
    all.sort_unstable();
    all.dedup();
    assert!(all.len() == 1000 && all[0] != 0);
    assert!(all.iter().fold(0, |bits, stag| bits | stag) == u32::MAX);
}

#[test]
fn a_write_under_way_stops_when_its_handle_is_taken_back() {
    for detach in [false, true] {
        let mut bench = Bench::initiator();
        let mut program = Program::new(&[0; 40_000]);
        let to = bench.qp.expose_sink(program.sink()).unwrap();
        let write = tagged(0, true, to.handle.0, 0, &pattern(40_000, 1));
        bench.give(&write[..20_000]).unwrap();
        assert!(bench.qp.receive.is_placing());
        if detach {
            bench.qp.detach(to.handle).unwrap();
        } else {
            bench.qp.invalidate(to.handle).unwrap();
        }
        let memory = program.bytes();
        assert!(memory[100] != 0 && memory[20_000..].iter().all(|b| *b == 0));
        memory.fill(0);
        if detach {
            // The peer notices nothing, also in another Write, and the stream stays in step.
            bench.give(&write[20_000..]).unwrap();
            bench.give(&tagged(0, true, to.handle.0, 39_990, b"1234567890")).unwrap();
            let big = tagged(0, true, to.handle.0, 0, &pattern(39_999, 1));
            for part in big.chunks(15_000) {
                bench.give(part).unwrap();
            }
            bench.qp.post_recv(sink(1));
            assert_eq!(bench.give(&untagged(SEND, b"x")).unwrap().len(), 1);
            bench.expect_fault(&tagged(0, true, to.handle.0, 39_991, b"1234567890"), Fault::BOUNDS);
        } else {
            bench.expect_fault(&write[20_000..20_010], Fault::STAG);
        }
        assert!(program.bytes().iter().all(|b| *b == 0));
    }
}

#[test]
fn receives_are_withdrawn_but_for_the_one_that_a_message_has_begun_to_fill() {
    let part = |bytes: &[u8]| untagged(Untagged { last: false, ..SEND }, bytes);
    let rest = |mo, bytes: &[u8]| untagged(Untagged { mo, ..SEND }, bytes);
    let large = rest(0, &pattern(20_000, 1));
    // What has come of the first message, what is to come, its bytes, and whether its Receive has to stay.
    let cases = [
        (vec![], rest(0, b"whole"), b"whole".to_vec(), false),
        (rest(0, b"whole")[..25].to_vec(), rest(0, b"whole")[25..].to_vec(), b"whole".to_vec(), false),
        (part(b"one, "), rest(5, b"two"), b"one, two".to_vec(), true),
        (large[..9_000].to_vec(), large[9_000..].to_vec(), pattern(20_000, 1), true),
        (
            [part(b"one, "), rest(5, &pattern(20_000, 1))[..9_000].to_vec()].concat(),
            rest(5, &pattern(20_000, 1))[9_000..].to_vec(),
            [b"one, ".to_vec(), pattern(20_000, 1)].concat(),
            true,
        ),
    ];
    for (before, after, message, begun) in cases {
        let mut bench = Bench::responder();
        let first = sink(20_005);
        bench.qp.post_recv(first.clone());
        (0..3).for_each(|_| bench.qp.post_recv(sink(10)));
        assert!(bench.give(&before).unwrap().is_empty());
        let qp = &mut bench.qp;
        assert!(fork::testing::fork(|| qp.withdraw() == 0).succeeded());
        assert_eq!(bench.qp.withdraw(), if begun { 3 } else { 4 });
        assert_eq!(first.into_buf(0).is_err(), begun);
        assert_eq!(bench.qp.withdraw(), 0);
        (0..2).for_each(|_| bench.qp.post_recv(sink(30_000)));
        let got = bench.give(&after).unwrap();
        assert!(received(got.into_iter().next().unwrap()).0 == message);
        let long = untagged(Untagged { msn: 2, ..SEND }, &pattern(30_000, 2));
        assert!(received(bench.give(&long).unwrap().remove(0)).0 == pattern(30_000, 2));
        assert_eq!(bench.qp.withdraw(), usize::from(begun));
    }
    // A Write under way has nothing to do with them.
    let mut bench = Bench::responder();
    let to = bench.qp.expose_sink(sink(20_000)).unwrap();
    bench.qp.post_recv(sink(10));
    bench.give(&tagged(0, true, to.handle.0, 0, &pattern(20_000, 1))[..9_000]).unwrap();
    assert_eq!(bench.qp.withdraw(), 1);
}

#[test]
fn memory_that_is_being_read_is_taken_back_by_ending_the_connection() {
    let mut bench = Bench::responder();
    let mut program = Program::new(&pattern(3 << 20, 1));
    let from = bench.qp.expose_source(program.source()).unwrap();
    bench.give(&read_request(1, 0xAB, 0, 3 << 20, from.handle.0, 0)).unwrap();
    assert!(bench.qp.transmit.is_half_sent(), "the socket is full");
    // Now it has room, but there can be no Terminate inside an FPDU.
    let stream = bench.sent();
    assert!(stream.len() > 100_000 && stream[2..4] == hex!("8142"));
    bench.qp.invalidate(from.handle).unwrap();
    assert_eq!(bench.qp.poll().unwrap_err().kind(), Kind::ConnectionLost);
    assert!(bench.sent().is_empty());
    assert!(program.is_back());
}

#[test]
fn what_is_framed_already_goes_out_from_a_copy_when_its_handle_is_taken_back() {
    let mut bench = Bench::responder();
    let data = pattern(150_000, 1);
    let mut program = Program::new(&data);
    let from = bench.qp.expose_source(program.source()).unwrap();
    // Fill the socket first, then ask.
    bench.qp.transmit.may_send = true;
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(300_000, 2))], invalidate: None });
    bench.give(&read_request(1, 0xAB, 7, 150_000, from.handle.0, 0)).unwrap();
    assert!(!bench.qp.flush().unwrap());
    assert!(bench.qp.transmit.is_all_framed(), "framed");
    assert!(bench.qp.transmit.is_inside_message(), "and not sent");
    let copied = bench.qp.copied_bytes;
    bench.qp.invalidate(from.handle).unwrap();
    assert_eq!(bench.qp.copied_bytes - copied, 150_000);
    program.bytes().fill(0);
    assert!(payloads(&bench.sent_to_the_end(), 2) == data);
}

#[test]
fn a_detached_source_is_served_from_a_copy() {
    for options in [Options::default(), Options { max_fpdu: Some(1448), ..Options::default() }] {
        let mut bench = Bench::responder_to(&REQUEST, options).0;
        let data = pattern(3 << 20, 1);
        let mut program = Program::new(&data);
        let from = bench.qp.expose_source(program.source()).unwrap();
        // Half a response has left, another one waits.
        bench.give(&read_request(1, 0xAB, 0, (3 << 20) - 1, from.handle.0, 1)).unwrap();
        bench.give(&read_request(2, 0xAB, 0, 7000, from.handle.0, 3000)).unwrap();
        assert!(bench.qp.transmit.is_half_sent());
        bench.qp.detach(from.handle).unwrap();
        program.bytes().fill(0);
        let copied = bench.qp.copied_bytes;
        bench.qp.detach(from.handle).unwrap();
        assert_eq!(bench.qp.copied_bytes, copied, "the second time there is nothing to do");
        assert!(payloads(&bench.sent_to_the_end(), 2) == [&data[1..], &data[3000..10_000]].concat());
        bench.give(&read_request(3, 0xAB, 0, 5, from.handle.0, 1)).unwrap();
        assert_eq!(payloads(&bench.sent(), 2), data[1..6]);
    }
}

#[test]
fn a_detached_source_of_our_own_is_not_copied() {
    let mut bench = Bench::responder();
    let from = bench.qp.expose_source(region(b"frozen")).unwrap();
    bench.qp.detach(from.handle).unwrap();
    assert_eq!(bench.qp.copied_bytes, 0);
    bench.give(&read_request(1, 0xAB, 0, 6, from.handle.0, 0)).unwrap();
    assert_eq!(payloads(&bench.sent(), 2), b"frozen");
}

// ------------------------------------------------------------------------------------------------------ lent memory

#[test]
fn kept_work_goes_out_from_copies_of_what_the_socket_has_not_taken() {
    for options in [Options::default(), Options { max_fpdu: Some(1448), ..Options::default() }] {
        let mut bench = Bench::responder_to(&REQUEST, options).0;
        bench.qp.post_recv(sink(0));
        bench.give(&untagged(SEND, b"")).unwrap();
        let data: Vec<_> = (0..6).map(|i| pattern((1 << 20) - i, i)).collect();
        let mut programs: Vec<_> = data.iter().map(|data| Program::new(data)).collect();
        let own = region(b"own");
        let lent: Vec<_> = programs.iter_mut().map(Program::source).collect();
        // A Send of many pieces, of which the first are gone when the socket is full, then a Write and a Send in
        // the queue, and a Read Response between the frames.
        let from = bench.qp.expose_source(lent[5].clone()).unwrap();
        let mut first = vec![own.clone(), lent[0].slice(0, 3), lent[0].slice(3, 20_000)];
        let middle = lent[1].len() / 10_000;
        first.extend((0..middle).map(|i| lent[1].slice(i * 10_000, 10_000)));
        first.push(lent[1].slice(middle * 10_000, lent[1].len() - middle * 10_000));
        first.push(own.clone());
        let to = Segment { handle: Handle(7), length: data[2].len() as u32 + 3, offset: 0 };
        let last = vec![lent[3].clone(), own.clone(), lent[4].slice(0, 0)];
        bench.qp.post(WorkRequest::Send { gather: first.into(), invalidate: None });
        bench.qp.post(WorkRequest::Write { gather: smallvec![own, lent[2].clone()], to });
        bench.qp.post(WorkRequest::Send { gather: last.into(), invalidate: None });
        bench.give(&read_request(1, 0xAB, 0, 1_000_000, from.handle.0, 0)).unwrap();
        drop(lent);
        let mut stream = Vec::new();
        for _ in 0..2 {
            stream.extend(bench.sent());
            assert!(!bench.qp.flush().unwrap());
        }
        assert!(bench.qp.transmit.is_half_sent());
        let (unsent, copied) = (bench.qp.unsent(), bench.qp.copied_bytes);
        assert!(unsent < 3 << 20, "the first pieces are gone");
        let counted = || stats::snapshot()[Counter::BytesCopied as usize];
        let before = counted();
        let kept = bench.qp.release_lent().unwrap();
        assert!(counted() - before >= kept as u64);
        // What is left of a frame counts whole; the last piece of each list is our own; one Send is in the queue.
        let left = unsent - transmit::PAGE;
        assert!((left - 9..=left).contains(&kept), "{kept} bytes copied of {left} left");
        assert_eq!(bench.qp.copied_bytes - copied, kept as u64);
        assert_eq!((bench.qp.release_lent().unwrap(), bench.qp.unsent()), (0, unsent));
        for program in &mut programs[..5] {
            program.bytes().fill(0xEE);
        }
        assert!(!programs[5].is_back(), "handles are not touched");
        bench.qp.detach(from.handle).unwrap();
        programs[5].bytes().fill(0xEE);
        stream.extend(bench.sent_to_the_end());
        let sends = [b"own", &data[0][..20_003], &data[1], b"own", &data[3], b"own"].concat();
        assert!(payloads(&stream, 3) == sends);
        assert!(payloads(&stream, 0) == [b"own", &data[2][..]].concat());
        assert!(payloads(&stream, 2) == data[5][..1_000_000]);
    }
}

#[test]
fn reads_into_lent_memory_complete_without_it_after_keep() {
    let mut bench = Bench::initiator();
    bench.qp.transmit.ord = 2;
    let mut programs: Vec<_> = (0..4).map(|_| Program::new(&[0; 40_000])).collect();
    let own = sink(40_000);
    let from = Segment { handle: Handle(0x77), length: 40_000, offset: 0 };
    // Of the five, two are asked for, two find no room, and the last one is in the queue.
    let read = |qp: &mut Iwarp, id, sink| qp.post(WorkRequest::Read { id: WorkId(id), sink, at: 0, from });
    for (id, program) in (0..).zip(&mut programs[..3]) {
        read(&mut bench.qp, id, program.sink());
    }
    read(&mut bench.qp, 3, own.clone());
    bench.qp.post(WorkRequest::Send { gather: smallvec![], invalidate: None });
    read(&mut bench.qp, 4, programs[3].sink());
    let stags = |sent: &[u8]| -> Vec<u32> {
        let requests: Vec<_> = parse(sent).into_iter().filter(|(f, _)| f[3] & 15 == 1).collect();
        requests.iter().map(|(f, _)| u32::from_be_bytes(f[20..24].try_into().unwrap())).collect()
    };
    let mut asked: VecDeque<_> = stags(&bench.sent()).into();
    assert_eq!(asked.len(), 2);
    let response = |stag| tagged(2, true, stag, 0, &pattern(40_000, 9));
    let first = response(asked.pop_front().unwrap());
    bench.give(&first[..20_000]).unwrap();
    assert!(bench.qp.receive.is_placing());
    assert_eq!(bench.qp.release_lent().unwrap(), 0);
    assert!(programs[0].bytes()[..10_000] == pattern(40_000, 9)[..10_000]);
    for program in &mut programs {
        program.bytes().fill(0);
    }
    let mut done = bench.give(&first[20_000..]).unwrap();
    while done.len() < 5 {
        asked.extend(stags(&bench.sent()));
        done.extend(bench.give(&response(asked.pop_front().expect("a Read is asked for"))).unwrap());
    }
    for (id, completion) in (0..).zip(done) {
        assert!(matches!(completion, Completion::Read { id: WorkId(done) } if done == id));
    }
    assert!(programs.iter_mut().all(|program| program.bytes().iter().all(|byte| *byte == 0)));
    assert!(bytes(own, 40_000)[..] == pattern(40_000, 9));
}

#[test]
fn a_remote_invalidation_ends_the_loan_or_the_connection() {
    for owed in [false, true] {
        let mut bench = Bench::responder();
        bench.qp.post_recv(sink(0));
        bench.qp.post_recv(sink(0));
        let (mut source, mut target) = (Program::new(&pattern(3 << 20, 1)), Program::new(&[0; 100]));
        let from = bench.qp.expose_source(source.source()).unwrap().handle.0;
        let to = bench.qp.expose_sink(target.sink()).unwrap().handle.0;
        let size = if owed { 3 << 20 } else { 50_000 };
        bench.give(&read_request(1, 0xAB, 0, size, from, 0)).unwrap();
        let end = |msn, invalidate| untagged(Untagged { opcode: 4, invalidate, msn, ..SEND }, b"");
        assert_eq!(bench.give(&end(1, to)).unwrap().len(), 1);
        assert!(target.is_back() && !source.is_back());
        let result = bench.give(&end(2, from));
        source.bytes().fill(0);
        if owed {
            let error = result.expect_err("the peer gives up what it waits for");
            assert!(error.text().contains(&Fault::CANNOT_INVALIDATE.to_string()), "{error}");
        } else {
            assert_eq!(result.unwrap().len(), 1);
            assert!(payloads(&bench.sent_to_the_end(), 2) == pattern(50_000, 1));
        }
    }
}

/// A queue pair that holds lent memory in every way: exposed, half read by the peer, half written by it, queued
/// and half sent. Also the rest of what the peer writes.
fn laden() -> (Bench, Vec<Program>, Vec<u8>) {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(0));
    bench.give(&untagged(SEND, b"")).unwrap();
    let mut programs: Vec<_> = (0..6).map(|i| Program::new(&pattern(1 << 20, i))).collect();
    let from = bench.qp.expose_source(programs[0].source()).unwrap().handle.0;
    let to = bench.qp.expose_sink(programs[1].sink()).unwrap().handle.0;
    let theirs = Segment { handle: Handle(7), length: 1 << 20, offset: 0 };
    for (id, n) in [(WorkId(1), 2), (WorkId(2), 3)] {
        bench.qp.post(WorkRequest::Read { id, sink: programs[n].sink(), at: 0, from: theirs });
    }
    bench.qp.post(WorkRequest::Send { gather: smallvec![programs[4].source()], invalidate: None });
    bench.qp.post(WorkRequest::Write { gather: smallvec![programs[5].source()], to: theirs });
    bench.give(&read_request(1, 0xAB, 0, 1 << 20, from, 0)).unwrap();
    let mut write = tagged(0, true, to, 0, &pattern(40_000, 1));
    let rest = write.split_off(20_000);
    bench.give(&write).unwrap();
    assert!(bench.qp.receive.is_placing() && bench.qp.transmit.is_half_sent());
    assert!(programs.iter().all(|program| !program.is_back()));
    (bench, programs, rest)
}

#[test]
fn every_end_of_the_connection_ends_all_loans() {
    type End = fn(&mut Bench, Vec<u8>);
    let ends: [(&str, End); 5] = [
        ("close", |bench, _| bench.qp.close()),
        ("drop", |bench, _| bench.qp = Bench::responder().qp),
        ("the peer closes", |bench, _| {
            bench.peer.shutdown(std::net::Shutdown::Write).unwrap();
            bench.qp.poll().unwrap_err();
        }),
        ("the peer terminates", |bench, rest| {
            assert!(bench.give(&rest).unwrap().is_empty());
            bench.feed(&hex!("0016 4147 00000000 00000002 00000001 00000000 20020000 7fe42585"));
            assert!(bench.qp.poll().unwrap_err().text().contains("terminated"));
        }),
        ("a wrong CRC", |bench, mut rest| {
            *rest.last_mut().unwrap() ^= 1;
            assert_eq!(bench.give(&rest).unwrap_err().kind(), Kind::Protocol);
        }),
    ];
    for (what, end) in ends {
        let (mut bench, programs, rest) = laden();
        end(&mut bench, rest);
        assert!(programs.iter().all(Program::is_back), "{what}");
    }
}

// -------------------------------------------------------------------------------------------------- hostile peers

/// A responder with memory exposed and a Read outstanding, and the messages of a peer that uses all of it well.
struct Scene {
    bench: Bench,
    written: Sink,
    read: Sink,
    messages: Vec<Vec<u8>>,
}

const EXPOSED: usize = 600;

impl Scene {
    fn new() -> Scene {
        let mut bench = Bench::responder();
        for _ in 0..3 {
            bench.qp.post_recv(sink(300));
        }
        // The exposed parts lie between guards of the same blocks.
        let (written, read) = (sink(EXPOSED + 200), sink(EXPOSED + 200));
        let to = bench.qp.expose_sink(written.part(100, EXPOSED)).unwrap().handle.0;
        let source = bench.qp.expose_source(region(&pattern(EXPOSED, 8)).slice(50, 500)).unwrap().handle.0;
        let from = Segment { handle: Handle(0x77), length: EXPOSED as u32, offset: 0x1000 };
        bench.qp.transmit.may_send = true;
        bench.qp.post(WorkRequest::Read { id: WorkId(5), sink: read.clone(), at: 100, from });
        bench.qp.flush().unwrap();
        let request = bench.sent();
        let stag = u32::from_be_bytes(request[20..24].try_into().unwrap());
        let messages = vec![
            tagged(0, true, 1, 0, b""),
            tagged(0, false, to, 0, &pattern(301, 1)),
            untagged(Untagged { last: false, ..SEND }, &pattern(100, 2)),
            tagged(0, true, to, 301, &pattern(299, 3)),
            untagged(Untagged { mo: 100, ..SEND }, &pattern(99, 4)),
            tagged(2, false, stag, 0, &pattern(400, 5)),
            read_request(1, 0xDEAD, 0xBEEF, 500, source, 0),
            tagged(2, true, stag, 400, &pattern(200, 6)),
            untagged(Untagged { opcode: 5, msn: 2, ..SEND }, b""),
            untagged(Untagged { opcode: 4, msn: 3, invalidate: to, ..SEND }, b"end"),
        ];
        Scene { bench, written, read, messages }
    }

    /// Everything has happened exactly as it should.
    fn check(mut self, completions: Vec<Completion>) {
        let mut completions = completions.into_iter();
        let first = received(completions.next().unwrap());
        assert!(first.0[..100] == pattern(100, 2) && first.0[100..] == pattern(99, 4));
        assert!(matches!(completions.next(), Some(Completion::Read { id: WorkId(5) })));
        assert_eq!(received(completions.next().unwrap()).0, b"");
        let (end, invalidated) = received(completions.next().unwrap());
        assert!(end == b"end" && invalidated.is_some() && completions.next().is_none());
        let written = bytes(self.written, EXPOSED + 200);
        assert!(written[100..401] == pattern(301, 1) && written[401..700] == pattern(299, 3));
        let read = bytes(self.read, EXPOSED + 200);
        assert!(read[100..500] == pattern(400, 5) && read[500..700] == pattern(200, 6));
        guards(&written);
        guards(&read);
        let sent = parse(&self.bench.sent());
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0].0[2..16], hex!("c142 0000dead 000000000000beef"));
        assert!(sent[0].0[16..] == pattern(EXPOSED, 8)[50..550]);
    }

    /// Nothing has been written beside what was exposed.
    fn check_guards(mut self) {
        self.bench.qp.terminate();
        while self.bench.qp.poll().is_ok() {}
        for sink in [self.written, self.read] {
            guards(&bytes(sink, EXPOSED + 200));
        }
    }
}

fn guards(memory: &[u8]) {
    assert!(memory[..100].iter().chain(&memory[100 + EXPOSED..]).all(|b| *b == 0), "guard bytes");
}

#[test]
fn a_stream_may_be_split_at_every_byte() {
    let length = Scene::new().messages.concat().len();
    for at in 0..=length {
        let mut scene = Scene::new();
        let stream = scene.messages.concat();
        let mut got = scene.bench.give(&stream[..at]).unwrap();
        got.extend(scene.bench.give(&stream[at..]).unwrap());
        scene.check(got);
    }
    let mut scene = Scene::new();
    let mut got = Vec::new();
    for byte in scene.messages.concat() {
        got.extend(scene.bench.give(&[byte]).unwrap());
    }
    scene.check(got);
}

#[test]
fn large_fpdus_may_be_split_anywhere() {
    let data = pattern(30_001, 1);
    let more = pattern(20_000, 2);
    let whole = {
        let first = tagged(0, false, 0, 0, &data).len();
        let second = tagged(0, true, 0, 0, &more).len();
        [1, 2, 15, 16, 17, 19, 20, 21, 40, 2047, 2048, 2049, 8191, 8192, 8193]
            .into_iter()
            .chain(first - 25..first + 25)
            .chain(first + second - 30..first + second + 20)
            .collect::<Vec<_>>()
    };
    for at in whole {
        let mut bench = Bench::responder();
        let memory = sink(60_000);
        let to = bench.qp.expose_sink(memory.part(5_000, 50_001)).unwrap().handle;
        bench.qp.post_recv(sink(3));
        let mut stream = tagged(0, false, to.0, 0, &data);
        stream.extend(tagged(0, true, to.0, 30_001, &more));
        stream.extend(untagged(SEND, b"end"));
        let mut got = bench.give(&stream[..at]).unwrap();
        got.extend(bench.give(&stream[at..]).unwrap());
        assert_eq!(received(got.pop().unwrap()).0, b"end", "split at {at}");
        bench.qp.invalidate(to).unwrap();
        let memory = bytes(memory, 60_000);
        assert!(memory[5_000..35_001] == data && memory[35_001..55_001] == more, "split at {at}");
        assert!(memory[..5_000].iter().chain(&memory[55_001..]).all(|b| *b == 0));
    }
}

#[test]
fn a_stream_that_ends_at_any_byte_is_a_lost_connection() {
    let length = Scene::new().messages.concat().len();
    for at in 0..length {
        let mut scene = Scene::new();
        let stream = scene.messages.concat();
        scene.bench.feed(&stream[..at]);
        scene.bench.peer.shutdown(std::net::Shutdown::Write).unwrap();
        let error = loop {
            match scene.bench.qp.poll() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), Kind::ConnectionLost, "{at}: {error}");
        scene.check_guards();
    }
}

/// Feeds the scene with one message changed; returns whether that ended the connection.
fn with_message(index: usize, change: impl Fn(&mut Vec<u8>)) -> bool {
    let mut scene = Scene::new();
    change(&mut scene.messages[index]);
    let stream = scene.messages.concat();
    let result = scene.bench.give(&stream);
    scene.check_guards();
    result.is_err()
}

#[test]
fn a_changed_byte_with_a_stale_crc_always_ends_the_connection() {
    let lengths: Vec<_> = Scene::new().messages.iter().map(Vec::len).collect();
    for (index, length) in lengths.into_iter().enumerate() {
        for at in (0..length).filter(|at| *at < 52 || at % 7 == 0 || *at + 8 > length) {
            for bit in [1, 0x10, 0x80] {
                let ended = with_message(index, |message| message[at] ^= bit);
                // A longer length field may swallow the messages that follow and wait for more.
                assert!(ended || at < 2, "message {index}, byte {at}, bit {bit:#x}");
            }
        }
    }
}

#[test]
fn a_changed_byte_with_a_right_crc_is_harmless_or_ends_the_connection() {
    let lengths: Vec<_> = Scene::new().messages.iter().map(Vec::len).collect();
    let (mut ended, mut harmless) = (0, 0);
    for (index, length) in lengths.into_iter().enumerate() {
        for at in 0..length.min(52) {
            for value in [0x00, 0x01, 0x41, 0x7F, 0x80, 0xFF] {
                let end = with_message(index, |message| {
                    message[at] = value;
                    reseal(message);
                });
                *(if end { &mut ended } else { &mut harmless }) += 1;
            }
        }
    }
    assert!(ended > 500 && harmless > 100, "{ended} ended, {harmless} harmless");
}

#[test]
fn a_changed_byte_of_a_large_fpdu_writes_nothing_outside() {
    for at in (0..20).chain([10_000, 20_019, 20_020, 20_021, 20_022]) {
        for with_crc in [false, true] {
            let mut bench = Bench::responder();
            let memory = sink(40_000);
            let to = bench.qp.expose_sink(memory.part(10_000, 20_000)).unwrap().handle.0;
            let mut write = tagged(0, true, to, 0, &pattern(20_000, 1));
            let at = at.min(write.len() - 1);
            write[at] ^= 0x41;
            if with_crc {
                reseal(&mut write);
            }
            let result = bench.give(&write);
            assert!(result.is_err() || at < 2 || with_crc && at > 15, "byte {at}");
            bench.qp.terminate();
            let memory = bytes(memory, 40_000);
            assert!(memory[..10_000].iter().chain(&memory[30_000..]).all(|b| *b == 0), "byte {at}");
        }
    }
}

/// rule 103: what RFC 5042 asks of handles: their bounds, their rights, their connection, and an end.
#[test]
fn a_handle_gives_its_own_range_and_right_on_its_own_connection_only() {
    let fault = |bytes: &dyn Fn(u32, u32) -> Vec<u8>, fault: Fault| {
        let mut bench = Bench::responder();
        let to = bench.qp.expose_sink(sink(100)).unwrap().handle.0;
        let from = bench.qp.expose_source(region(&[1; 100])).unwrap().handle.0;
        // The responder may answer with a Terminate once it has seen one FPDU.
        bench.give(&tagged(0, true, 0, 0, b"")).unwrap();
        bench.expect_fault(&bytes(to, from), fault);
    };
    let mut other = Bench::responder();
    let foreign_sink = other.qp.expose_sink(sink(100)).unwrap().handle.0;
    let foreign_source = other.qp.expose_source(region(&[1; 100])).unwrap().handle.0;
    let write = |stag, to, len: usize| tagged(0, true, stag, to, &vec![9; len]);
    let read = |stag, to, len| read_request(1, 1, 0, len, stag, to);
    fault(&|_, _| write(foreign_sink, 0, 4), Fault::STAG);
    fault(&|_, _| write(0, 0, 4), Fault::STAG);
    fault(&|to, _| write(to ^ 1, 0, 4), Fault::STAG);
    fault(&|_, from| write(from, 0, 4), Fault::STAG);
    fault(&|to, _| write(to, 97, 4), Fault::BOUNDS);
    fault(&|to, _| write(to, 100, 1), Fault::BOUNDS);
    fault(&|to, _| write(to, 0, 101), Fault::BOUNDS);
    fault(&|to, _| write(to, 0, 20_000), Fault::BOUNDS);
    fault(&|to, _| write(to, 1 << 32, 4), Fault::BOUNDS);
    fault(&|to, _| write(to, u64::MAX - 4, 4), Fault::BOUNDS);
    fault(&|to, _| write(to, u64::MAX - 3, 4), Fault::WRAP);
    fault(&|to, _| write(to, u64::MAX, 4), Fault::WRAP);
    fault(&|_, _| read(foreign_source, 0, 4), Fault::READ_STAG);
    fault(&|to, _| read(to, 0, 4), Fault::READ_RIGHTS);
    fault(&|_, from| read(from, 97, 4), Fault::READ_BOUNDS);
    fault(&|_, from| read(from, 0, u32::MAX), Fault::READ_BOUNDS);
    fault(&|_, from| read(from, u64::MAX, 4), Fault::READ_WRAP);
    // Zero bytes are checked against nothing.
    let mut bench = Bench::responder();
    assert!(bench.give(&write(0xBAD, u64::MAX, 0)).unwrap().is_empty());
    assert!(bench.give(&read(0xBAD, u64::MAX, 0)).unwrap().is_empty());
    assert_eq!(parse(&bench.sent())[0].0, hex!("000e c142 00000001 0000000000000000"));
}

#[test]
fn sends_that_do_not_fit_their_stream_are_refused() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    // Of memory that is there before, and of such as is taken when something comes.
    let fault = |bytes: &[u8], fault: Fault| {
        for lazily in [false, true] {
            let mut bench = Bench::responder();
            for size in [1, 50, 50] {
                match lazily {
                    true => bench.qp.post_recv_of(&memory, size).unwrap(),
                    false => bench.qp.post_recv(sink(size)),
                }
            }
            bench.give(&untagged(SEND, b"x")).unwrap();
            bench.give(&untagged(Untagged { msn: 2, last: false, ..SEND }, b"part")).unwrap();
            bench.expect_fault(bytes, fault);
        }
    };
    // The same of one that nothing is the beginning of.
    let alone = |bytes: &[u8], fault: Fault| {
        let mut bench = Bench::responder();
        (0..2).for_each(|_| bench.qp.post_recv_of(&memory, 50).unwrap());
        bench.give(&untagged(SEND, b"x")).unwrap();
        bench.expect_fault(bytes, fault);
    };
    alone(&untagged(Untagged { msn: 3, ..SEND }, b"x"), Fault::MSN);
    alone(&untagged(Untagged { msn: 2, mo: 1, ..SEND }, b"x"), Fault::OFFSET);
    let next = || Untagged { msn: 2, mo: 4, ..SEND };
    for msn in [0, 1, 3, u32::MAX] {
        fault(&untagged(Untagged { msn, ..next() }, b"x"), Fault::MSN);
    }
    for mo in [0, 3, 5, u32::MAX] {
        fault(&untagged(Untagged { mo, ..next() }, b"x"), Fault::OFFSET);
    }
    fault(&untagged(next(), &[0; 47]), Fault::TOO_LONG);
    fault(&untagged(next(), &[0; 60_000]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 5, ..next() }, b"x"), Fault::OPCODE);
    fault(&untagged(Untagged { invalidate: 9, ..next() }, b"x"), Fault::UNSPECIFIED);
    fault(&untagged(Untagged { queue: 1, ..next() }, b"x"), Fault::QUEUE);
    fault(&untagged(Untagged { queue: 3, ..next() }, b"x"), Fault::QUEUE);
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(4));
    bench.give(&untagged(SEND, b"last")).unwrap();
    bench.expect_fault(&untagged(Untagged { msn: 2, ..SEND }, b""), Fault::NO_BUFFER);
}

#[test]
fn an_exactly_full_receive_is_filled() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(20_000));
    bench.give(&untagged(Untagged { last: false, ..SEND }, &pattern(19_000, 1))).unwrap();
    let got = bench.give(&untagged(Untagged { mo: 19_000, ..SEND }, &pattern(1_000, 2))).unwrap();
    let got = received(got.into_iter().next().unwrap()).0;
    assert!(got[..19_000] == pattern(19_000, 1) && got[19_000..] == pattern(1_000, 2));
}

#[test]
fn read_responses_must_match_the_oldest_read() {
    let fault = |bytes: &dyn Fn(u32) -> Vec<u8>, fault: Fault| {
        let mut bench = Bench::initiator();
        let from = Segment { handle: Handle(1), length: 10, offset: 0 };
        bench.qp.post(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: 0, from });
        bench.qp.flush().unwrap();
        let stag = u32::from_be_bytes(bench.sent()[20..24].try_into().unwrap());
        bench.expect_fault(&bytes(stag), fault);
    };
    fault(&|stag| tagged(2, true, stag ^ 1, 0, &[0; 10]), Fault::STAG);
    fault(&|stag| tagged(2, false, stag, 1, &[0; 9]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, 0, &[0; 11]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, 0, &[0; 9]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, 0, &[]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, u64::MAX, &[0; 2]), Fault::WRAP);
    // The handle of a Read is no target of Writes.
    fault(&|stag| tagged(0, true, stag, 0, &[0; 10]), Fault::STAG);
    let mut bench = Bench::initiator();
    bench.expect_fault(&tagged(2, true, 1, 0, b""), Fault::OPCODE);
}

#[test]
fn read_requests_that_are_malformed_or_too_many_are_refused() {
    let fault = |bytes: &[u8], fault: Fault| Bench::initiator().expect_fault(bytes, fault);
    let request = Untagged { opcode: 1, queue: 1, ..SEND };
    fault(&untagged(Untagged { msn: 2, ..request }, &[0; 28]), Fault::MSN);
    fault(&untagged(Untagged { opcode: 1, queue: 1, mo: 4, ..SEND }, &[0; 28]), Fault::OFFSET);
    fault(&untagged(Untagged { opcode: 1, queue: 1, ..SEND }, &[0; 27]), Fault::TOO_SHORT);
    fault(&untagged(Untagged { opcode: 1, queue: 1, ..SEND }, &[0; 29]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 1, queue: 1, ..SEND }, &[0; 60_000]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 1, queue: 1, last: false, ..SEND }, &[0; 28]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 1, queue: 0, ..SEND }, &[0; 28]), Fault::QUEUE);
    // 16 requests are served at a time; answered ones make room.
    let mut bench = Bench::initiator();
    for msn in 1..=40 {
        bench.give(&read_request(msn, 1, 0, 0, 0, 0)).unwrap();
    }
    assert_eq!(parse(&bench.sent()).len(), 40);
    let from = bench.qp.expose_source(region(&pattern(3 << 20, 0))).unwrap().handle.0;
    for msn in 41..=56 {
        bench.give(&read_request(msn, 1, 0, 3 << 20, from, 0)).unwrap();
    }
    let error = bench.give(&read_request(57, 1, 0, 3 << 20, from, 0)).unwrap_err();
    assert!(error.text().contains("no buffer"), "{error}");
}

#[test]
fn the_terminate_of_a_refused_read_returns_its_headers() {
    let mut bench = Bench::initiator();
    let request = read_request(1, 0xAB, 3, 4, 0xBAD, 0);
    bench.feed(&request);
    drain(&mut bench.qp).unwrap_err();
    let terminate = parse(&bench.sent()).remove(0).0;
    assert_eq!(terminate[20..26], hex!("01 00 e0 00 002e"));
    assert_eq!(terminate[26..], request[2..48]);
}

#[test]
fn length_fields_have_their_limits() {
    for ulpdu in 0..14 {
        let mut bench = Bench::initiator();
        bench.expect_fault(&seal(&vec![0x41; ulpdu]), Fault::TOO_SHORT);
    }
    for ulpdu in 14..18 {
        let mut bytes = vec![0; ulpdu];
        (bytes[0], bytes[1]) = (0x41, 0x43);
        Bench::initiator().expect_fault(&seal(&bytes), Fault::TOO_SHORT);
    }
    // Larger than we send, as siw does on loopback.
    let mut bench = Bench::responder();
    let memory = sink(65_521);
    let to = bench.qp.expose_sink(memory.clone()).unwrap().handle;
    bench.give(&tagged(0, true, to.0, 0, &pattern(65_521, 1))).unwrap();
    bench.qp.invalidate(to).unwrap();
    assert!(bytes(memory, 65_521)[..] == pattern(65_521, 1));
}

#[test]
fn a_wrong_crc_is_terminated_with_the_code_of_mpa() {
    let mut bench = Bench::initiator();
    let mut send = untagged(SEND, b"abc");
    send[21] ^= 1;
    bench.expect_fault(&send, Fault::CRC);
    let mut bench = Bench::initiator();
    let to = bench.qp.expose_sink(sink(50_000)).unwrap().handle.0;
    let mut write = tagged(0, true, to, 0, &pattern(50_000, 0));
    write[30_000] ^= 1;
    bench.expect_fault(&write, Fault::CRC);
}

#[test]
fn a_responder_says_nothing_about_a_bad_first_fpdu() {
    let mut bench = Bench::responder();
    let mut send = untagged(SEND, b"abc");
    send[21] ^= 1;
    assert_eq!(bench.give(&send).unwrap_err().kind(), Kind::Protocol);
    assert!(bench.sent().is_empty());
}

#[test]
fn a_terminate_is_reported_and_not_answered() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(3));
    bench.feed(&untagged(SEND, b"abc"));
    bench.feed(&hex!("0016 4147 00000000 00000002 00000001 00000000 20020000 7fe42585"));
    assert_eq!(received(bench.qp.poll().unwrap().unwrap()).0, b"abc");
    let error = bench.qp.poll().unwrap_err();
    assert_eq!(error.kind(), Kind::ConnectionLost);
    assert!(error.text().contains("CRC mismatch (2/0/02)"), "{error}");
    assert!(bench.sent().is_empty());
}

#[test]
fn terminating_sends_a_terminate_and_ends_everything() {
    let mut bench = Bench::initiator();
    let memory = sink(10);
    bench.qp.expose_sink(memory.clone()).unwrap();
    bench.qp.post_recv(memory.clone());
    bench.qp.terminate();
    assert_eq!(bench.sent()[..24], hex!("0016 4147 00000000 00000002 00000001 00000000 00000000"));
    assert!(bench.qp.poll().is_err() && bench.qp.flush().is_err());
    bytes(memory, 10);
    bench.qp.terminate();
    bench.qp.post(WorkRequest::Send { gather: smallvec![], invalidate: None });
    assert!(bench.sent().is_empty());
}

#[test]
fn random_streams_never_panic_or_write_outside() {
    let mut state = 7u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    for _ in 0..1500 {
        let mut scene = Scene::new();
        let mut stream = Vec::new();
        for _ in 0..6 {
            let mut message = scene.messages[random() % scene.messages.len()].clone();
            for _ in 0..random() % 3 {
                let at = random() % message.len().min(48);
                message[at] = [0, 1, 2, 0x40, 0x41, 0x80, 0xFF][random() % 7];
            }
            reseal(&mut message);
            stream.extend(message);
        }
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let (part, after) = rest.split_at((1 + random() % 700).min(rest.len()));
            rest = after;
            if scene.bench.give(part).is_err() {
                break;
            }
        }
        scene.check_guards();
    }
}

// ------------------------------------------------------------------------------------------------------ shared memory

#[test]
fn a_peer_that_gives_byte_after_byte_through_memory_keeps_nobody() {
    let (own, seen) = Own::new().unwrap();
    let (peer, file) = Own::new().unwrap();
    let seen = Theirs::new(seen).unwrap();
    let mut bench = Bench::responder();
    bench.qp.stream.share(local::Rings::new(own, Theirs::new(file).unwrap(), true));
    // FPDUs of which none ends a message.
    let part = pattern(60_000, 5);
    let fpdu = |n: u32| untagged(Untagged { last: false, mo: n * part.len() as u32, ..SEND }, &part);
    let stream: Vec<u8> = (0..30).flat_map(fpdu).collect();
    bench.qp.post_recv(sink(30 * part.len()));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (at, byte) in (0u64..).zip(&stream) {
                peer.fill((at, false), &IoVec::from_slice(&[*byte]), 0, 1);
                peer.word(Word::Produced).store(at + 1, SeqCst);
                while seen.get(Word::Consumed) + 8 <= at && !over.load(Relaxed) {}
            }
        });
        let until = Instant::now() + Duration::from_secs(2);
        let mut most = 0;
        while bench.qp.receive.total < stream.len() as u64 && Instant::now() < until {
            let before = bench.qp.receive.total;
            assert!(bench.qp.poll().unwrap().is_none());
            most = most.max(bench.qp.receive.total - before);
        }
        over.store(true, Relaxed);
        assert!(most <= 4096, "{most} bytes were taken one by one, while others waited");
    });
}

/// What a thread that sleeps on the stream takes comes in pieces of any size, and from a peer that keeps to nothing.
#[test]
fn what_a_sleep_on_the_stream_brings_comes_to_the_same_as_what_is_polled_for() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let bench = || {
        let mut bench = Bench::initiator();
        (0..3).for_each(|_| bench.qp.post_recv_of(&memory, 1000).unwrap());
        assert!(bench.qp.poll().unwrap().is_none() && bench.dozes());
        bench
    };
    let (first, second) = (pattern(100, 1), pattern(300, 2));
    let mut stream = untagged(SEND, &first);
    stream.extend(untagged(Untagged { msn: 2, ..SEND }, &second));
    for cut in 0..=stream.len() {
        let mut bench = bench();
        let before = bench.qp.receive.total;
        bench.qp.arrived(Some(&stream[..cut]));
        assert!(cut == 0 || cut == stream.len() || !bench.dozes(), "{cut}: there is something to do");
        let mut got = drain(&mut bench.qp).unwrap();
        got.extend(bench.give(&stream[cut..]).unwrap());
        let got: Vec<_> = got.into_iter().map(|completion| received(completion).0).collect();
        assert!(got == [first.clone(), second.clone()], "{cut}");
        let counted = before + stream.len() as u64;
        assert_eq!((bench.qp.receive.total, bench.qp.shared.received()), (counted, counted));
    }
    // As much as one takes: there may be more behind it.
    let mut bench = Bench::initiator();
    bench.qp.post_recv_of(&memory, 2 * NAP_BYTES).unwrap();
    assert!(bench.qp.poll().unwrap().is_none() && bench.dozes());
    let sent = pattern(NAP_BYTES + 400, 3);
    let long = untagged(SEND, &sent);
    bench.feed(&long[NAP_BYTES..]);
    bench.qp.arrived(Some(&long[..NAP_BYTES]));
    let got = bench.qp.poll().unwrap().map(|completion| received(completion).0);
    assert!(got.as_deref() == Some(&sent[..]), "it had to be asked for twice");
    // One that breaks the protocol.
    let mut bench = self::Bench::initiator();
    bench.qp.post_recv_of(&memory, 1000).unwrap();
    let mut wrong = untagged(SEND, &first);
    wrong[50] ^= 1;
    bench.qp.arrived(Some(&wrong));
    assert!(bench.qp.poll().is_err() && !bench.dozes());
    bench.qp.arrived(Some(&stream));
    assert!(bench.qp.poll().is_err());
}

#[test]
fn what_another_process_has_read_in_between_ends_the_connection() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let mut bench = Bench::initiator();
    bench.qp.post_recv_of(&memory, 1000).unwrap();
    bench.qp.shared.set_received(bench.qp.receive.total + 30);
    bench.qp.arrived(Some(&untagged(SEND, b"of another place")));
    assert!(bench.qp.poll().is_err());
}

impl Bench {
    /// Whether a thread may sleep on the stream.
    fn dozes(&mut self) -> bool {
        self.qp.doze().is_some()
    }
}
