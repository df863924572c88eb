//! Bad clients of a server that knows which data may be placed directly: chunks for data that is not eligible, of wrong
//! lengths, or at wrong places; memory that changes while it is read; and results that are read late or never.

use std::time::{Duration, Instant};

use rpcrdma::provider::iwarp::ddp::{Fault, ReadRequest};
use rpcrdma::wire::header::{self, Body, Proc, RdmaError, Versions};
use rpcrdma::wire::lists::{Chunk, Lists};
use rpcrdma::wire::{Position, ReadSegment, Segment, Xid};

use crate::peer::*;
use crate::programs::{Server, bindings};
use crate::servers::error_of;

/// ECHO, SINK, SOURCE and STATIC_SOURCE of the suite.
const BINDINGS: &str = "\
    0x20005355 2 1 arguments=data results=data<4M>\n\
    0x20005355 2 3 arguments=data results=int,hyper\n\
    0x20005355 2 4 arguments=count results=data\n\
    0x20005355 2 22 arguments=int results=data<1M>\n";

/// Where the only argument of ECHO and SINK begins: after ten words of the Call and the argument's length.
const DATA: u32 = 44;

fn start(settings: &[&str]) -> Server {
    let bindings = bindings("placement", BINDINGS);
    Server::start(&[settings, &["RPCRDMA_CRC=no", &bindings]].concat())
}

/// A segment of the chunk at a Position; its offset says which bytes of the Call it holds.
fn part(position: u32, offset: u32, length: u32) -> ReadSegment {
    ReadSegment { position: Position(position), target: segment(7, length, offset.into()) }
}

fn read(position: u32, length: u32) -> ReadSegment {
    part(position, position, length)
}

/// A Call with a part of its arguments in Read chunks; the rest is inline.
fn reduced(xid: u32, procedure: u32, rest: &[u32], reads: Vec<ReadSegment>, writes: Vec<Chunk>) -> Vec<u8> {
    let lists = Lists { reads, writes, reply: None };
    message(xid, 32, Proc::Msg, &lists, &rpc_call(xid, procedure, &words(rest)))
}

/// A SOURCE of `length` bytes into these chunks.
fn source(xid: u32, length: u32, writes: Vec<Chunk>, reply: Option<Chunk>) -> Vec<u8> {
    let lists = Lists { reads: Vec::new(), writes, reply };
    message(xid, 32, Proc::Msg, &lists, &rpc_call(xid, SOURCE, &words(&[length])))
}

/// Sends a message and answers RDMA Reads with `memory`, until the server has nothing more to say.
fn converse(
    server: &mut Server,
    peer: &mut Peer,
    message: &[u8],
    mut memory: impl FnMut(&ReadRequest) -> Vec<u8>,
) -> Vec<Frame> {
    peer.send(message);
    let mut heard = Vec::new();
    loop {
        server.settle();
        let before = heard.len();
        let ended = peer.available(&mut heard);
        for frame in &heard[before..] {
            let Frame::ReadRequest(request) = frame else { continue };
            peer.push(&answer(request, &memory(request), false));
        }
        if ended || heard.len() == before {
            return heard;
        }
    }
}

/// The only message among these frames.
fn message_in<'a>(frames: &'a [Frame], what: &str) -> &'a [u8] {
    let messages: Vec<&[u8]> = frames
        .iter()
        .filter_map(|f| if let Frame::Send { bytes, .. } = f { Some(&bytes[..]) } else { None })
        .collect();
    let [message] = messages[..] else { panic!("{what}: {frames:?}") };
    message
}

fn no_memory(request: &ReadRequest) -> Vec<u8> {
    panic!("{request:?} where nothing was to be read")
}

#[test]
fn chunks_that_have_no_place_in_the_call_are_refused_unread() {
    let mut server = start(&[]);
    let mut peer = Peer::open(server.port);
    for (what, length, chunks) in [
        ("a chunk of 4 GiB", u32::MAX, vec![read(DATA, u32::MAX)]),
        ("a chunk of 400 GiB", 100, vec![read(DATA, u32::MAX); 100]),
        ("a Position inside a word", 100, vec![read(DATA + 2, 100)]),
        ("a Position just beyond the end", 100, vec![read(DATA + 4, 100)]),
        ("a Position far beyond the end", 100, vec![read(u32::MAX - 3, 100)]),
        ("a Position inside of another chunk", 100, vec![read(DATA, 100), read(DATA + 4, 100)]),
        ("a Position in the pad of another chunk", 97, vec![read(DATA, 97), read(DATA + 96, 4)]),
        ("chunks in another order that overlap", 100, vec![read(DATA + 96, 8), read(DATA, 100)]),
        ("Position zero beside an inline payload", 100, vec![read(0, 100)]),
    ] {
        let call = reduced(21, SINK, &[length], chunks, vec![]);
        let frames = converse(&mut server, &mut peer, &call, no_memory);
        assert_eq!(error_of(message_in(&frames, what)), (Xid(21), 1, RdmaError::BadHeader), "{what}");
        peer.null();
    }
    drop(peer);
    server.end();
}

#[test]
fn a_chunk_must_be_exactly_one_eligible_item() {
    let mut server = start(&[]);
    let mut peer = Peer::open(server.port);
    let (accepted, garbage, refused) = (Some(0), Some(4), None);
    // rule 60: what is taken out of the stream must be eligible, and be the whole item. A stream that ends inside the item
    // is for the program to refuse.
    for (what, procedure, rest, chunks, end) in [
        ("the item", SINK, &[97][..], vec![read(DATA, 97)], accepted),
        ("the item with its pad", SINK, &[97], vec![read(DATA, 100)], accepted),
        ("in pieces", SINK, &[97], vec![read(DATA, 1), part(DATA, 45, 90), part(DATA, 135, 6)], accepted),
        ("too short", SINK, &[97], vec![read(DATA, 92)], garbage),
        ("too short by a byte", SINK, &[97], vec![read(DATA, 96)], garbage),
        ("too short, the rest inline", SINK, &[97, 1, 2], vec![read(DATA, 92)], refused),
        ("with one byte of the pad", SINK, &[97], vec![read(DATA, 98)], refused),
        ("too long", SINK, &[97], vec![read(DATA, 104)], refused),
        ("for an item of 4 GiB", SINK, &[u32::MAX], vec![read(DATA, 100)], garbage),
        ("half of the item", SINK, &[100], vec![read(DATA, 52), read(DATA + 52, 48)], refused),
        ("behind the item", SINK, &[100], vec![read(DATA, 100), read(DATA + 100, 8)], refused),
        ("the length of the item", SINK, &[4], vec![read(DATA - 4, 4)], refused),
        ("the length and the item", SINK, &[100], vec![read(DATA - 4, 104)], refused),
        ("an argument that is not eligible", SOURCE, &[0], vec![read(DATA - 4, 4)], refused),
        ("the credential", SINK, &[0], vec![read(24, 8)], refused),
    ] {
        // The Call as it was before it was taken apart, with something after it.
        let whole = [rpc_call(22, procedure, &words(rest)[..4]), vec![0x55; 1000]].concat();
        let mut read = 0;
        let frames = converse(
            &mut server,
            &mut peer,
            &reduced(22, procedure, rest, chunks.clone(), vec![]),
            |request| {
                read += request.size;
                whole[request.source_to as usize..][..request.size as usize].to_vec()
            },
        );
        assert_eq!(read, chunks.iter().map(|part| part.target.length).sum(), "{what}");
        let answer = message_in(&frames, what);
        match end {
            None => assert_eq!(error_of(answer), (Xid(22), 1, RdmaError::BadHeader), "{what}"),
            Some(status) => assert_eq!(answer[28 + 20..28 + 24], u32::to_be_bytes(status), "{what}"),
        }
        peer.null();
    }
    drop(peer);
    server.end();
}

#[test]
fn memory_that_changes_is_read_once_and_used_as_it_came() {
    const LENGTH: u32 = 5 << 19;
    let mut server = start(&[]);
    let mut peer = Peer::open(server.port);
    // Two segments name the same memory, which the answer to each Read changes.
    let target = segment(7, LENGTH / 2, 0);
    let chunk = vec![ReadSegment { position: Position(DATA), target }; 2];
    let place = segment(8, LENGTH, 1 << 20);
    let mut sent = Vec::new();
    let frames = converse(
        &mut server,
        &mut peer,
        &reduced(23, ECHO, &[LENGTH], chunk, vec![[place].into()]),
        |request| {
            let bytes = vec![sent.len() as u8 + 1; request.size as usize];
            sent.push((request.source_to, bytes.clone()));
            bytes
        },
    );
    let mut next = 0;
    for (at, bytes) in &sent {
        assert_eq!(*at, next, "Reads in order, none twice");
        next = (next + bytes.len() as u64) % u64::from(LENGTH / 2);
    }
    let sent: Vec<u8> = sent.into_iter().flat_map(|(_, bytes)| bytes).collect();
    let mut came = vec![0; LENGTH as usize];
    for frame in &frames {
        if let Frame::Write { stag: 8, to, bytes } = frame {
            came[(to - place.offset) as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }
    assert!(came == sent, "the server's argument is not what it read");
    let Body::Msg { chunks, payload } =
        header::decode(message_in(&frames, "ECHO"), Versions::ONE).expect("a valid header").body
    else {
        panic!("{frames:?}")
    };
    assert_eq!(
        (chunks.to_lists().writes, payload),
        (vec![[place].into()], &rpc_reply(23, &words(&[LENGTH]))[..])
    );

    // The length, the item and the Call around it are all read before any of them is looked at.
    let whole = rpc_call(24, ECHO, &opaque(&[1; 100]));
    let call = long_call(24, &[segment(7, 44, 0), segment(7, 4, 40), segment(7, 96, 48)]);
    let frames = converse(&mut server, &mut peer, &call, |request| {
        let at = request.source_to as usize;
        // What was the length is now the start of the item.
        if at == 40 { vec![9; 4] } else { whole[at..][..request.size as usize].to_vec() }
    });
    let item = [&[9; 4][..], &[1; 96]].concat();
    assert!(message_in(&frames, "a long ECHO").ends_with(&rpc_reply(24, &opaque(&item))), "{frames:?}");
    drop(peer);
    server.end();
}

/// How a SOURCE into Write chunks may end.
enum Then {
    Refused,
    /// Bytes in the segments of the Write chunk, and whether the data is in the message.
    Used(Vec<u32>, bool),
}

#[test]
fn write_chunks_of_every_form_get_their_result_or_the_call_is_refused() {
    let mut server = start(&["RPCRDMA_INLINE=65536"]);
    let many =
        |n: u32, length| (0..n).map(|at| segment(at + 1, length, u64::from(at) << 40)).collect::<Vec<_>>();
    let filled = |lengths: &[u32]| Then::Used(lengths.to_vec(), false);
    let mut peer = Peer::open(server.port);
    for (what, length, chunk, reply, then) in [
        ("as long as the result", 999, many(1, 999), None, filled(&[999])),
        ("much too long", 999, many(1, u32::MAX), None, filled(&[999])),
        ("a byte too short", 999, many(1, 998), None, Then::Refused),
        ("segments of no bytes", 999, many(3, 0), None, Then::Refused),
        ("no segment", 999, vec![], None, Then::Used(vec![], true)),
        ("no segment, and no room for the result", 9999, vec![], None, Then::Refused),
        ("no segment, and too short a Reply chunk", 9999, vec![], Some(many(1, 9999)), Then::Refused),
        (
            "too short, though the Reply chunk has room",
            9999,
            many(1, 99),
            Some(many(1, 99_999)),
            Then::Refused,
        ),
        ("of one byte each", 100, many(120, 1), None, filled(&[[1; 100].as_slice(), &[0; 20]].concat())),
        ("2000 segments, which do not fit the reply's header", 2000, many(2000, 1), None, Then::Refused),
    ] {
        let frames = converse(
            &mut server,
            &mut peer,
            &source(25, length, vec![Chunk::from_slice(&chunk)], reply.map(Chunk::from_vec)),
            no_memory,
        );
        let answer = message_in(&frames, what);
        let Then::Used(lengths, inline) = then else {
            assert_eq!(error_of(answer), (Xid(25), 1, RdmaError::BadHeader), "{what}");
            assert_eq!(frames.len(), 1, "{what}: {frames:?}");
            peer.null();
            continue;
        };
        let Body::Msg { chunks, payload } =
            header::decode(answer, Versions::ONE).expect("a valid header").body
        else {
            panic!("{what}: {frames:?}")
        };
        let returned: Chunk =
            chunk.iter().zip(lengths).map(|(offered, length)| Segment { length, ..*offered }).collect();
        assert_eq!(chunks.to_lists().writes.as_slice(), std::slice::from_ref(&returned), "{what}");
        assert_eq!(
            payload.len(),
            if inline { 28 + length.next_multiple_of(4) as usize } else { 28 },
            "{what}"
        );
        // Neither the pad nor anything else is written besides.
        let written: Vec<(u32, u64, u32)> = frames[..frames.len() - 1]
            .iter()
            .map(|frame| match frame {
                Frame::Write { stag, to, bytes } => (*stag, *to, bytes.len() as u32),
                other => panic!("{what}: {other:?}"),
            })
            .collect();
        let used = returned.iter().filter(|s| s.length > 0).map(|s| (s.handle.0, s.offset, s.length));
        assert_eq!(written, used.collect::<Vec<_>>(), "{what}");
    }
    drop(peer);
    server.end();
}

#[test]
fn handles_that_do_not_exist_end_the_connection_that_named_them() {
    let mut server = start(&[]);
    let call = reduced(26, SINK, &[9000], vec![read(DATA, 9000)], vec![]);
    let into = source(26, 9000, vec![[segment(7, 9000, 0)].into()], None);
    for (call, fault) in [(call, Fault::READ_STAG), (into, Fault::STAG)] {
        let mut peer = Peer::open(server.port);
        peer.send(&call);
        assert!(matches!(peer.frame(), Ok(Frame::ReadRequest(_) | Frame::Write { .. })));
        peer.push(&terminate(fault));
        let (frames, _) = peer.rest();
        assert!(!frames.iter().any(|frame| matches!(frame, Frame::Terminate(_))), "{frames:?}");
        server.settle();
    }
    assert!(server.log().contains("invalid STag"), "{}", server.log());
    server.end();
}

#[test]
fn a_client_that_reads_late_gets_the_result_as_it_was() {
    const LENGTH: u32 = 1 << 20;
    const RESULTS: u32 = 16;
    let mut server = start(&["RPCRDMA_LOG=debug"]);
    let call = |n: u32| {
        let lists = Lists { writes: vec![[segment(n, LENGTH, 0)].into()], ..Lists::default() };
        message(n, 32, Proc::Msg, &lists, &rpc_call(n, STATIC_SOURCE, &words(&[n])))
    };
    let mut slow = Peer::open_with(server.port, false);
    let mut waits = Vec::new();
    for n in 1..=RESULTS {
        slow.send(&call(n));
        let start = Instant::now();
        server.settle();
        waits.push(start.elapsed());
    }
    // The server waits 20 ms for a reply that is stuck; after that nothing of the program's may be in use.
    let long = waits.iter().filter(|wait| **wait > patient(Duration::from_millis(15))).count();
    let longest = waits.into_iter().max().unwrap_or_default();
    println!("a slow client: of {RESULTS} calls of the good client {long} wait, {longest:?} at most");
    assert!(
        longest < patient(Duration::from_millis(200)) && long <= RESULTS as usize / 2,
        "{long} calls waited, {longest:?} at most"
    );
    assert!(server.log().contains("bytes kept for a slow peer"), "the socket has taken all");

    let mut came = vec![0; RESULTS as usize + 1];
    for _ in 0..RESULTS {
        let n = loop {
            match slow.frame() {
                Ok(Frame::Write { stag, bytes, .. }) => {
                    assert!(bytes.iter().all(|byte| u32::from(*byte) == stag), "result {stag} has changed");
                    came[stag as usize] += bytes.len();
                }
                Ok(Frame::Send { bytes, .. }) => {
                    break header::decode(&bytes, Versions::ONE).expect("a valid header").xid.0;
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(came[n as usize], LENGTH as usize, "result {n}");
    }

    // A client that never reads gets hardly more of its requests served than the sockets hold; and if it goes on after its
    // credits are used up, it is cut off.
    let results = |log: &str| log.lines().filter(|l| l.contains(": reply ") && l.contains(": 10486")).count();
    assert_eq!(results(&server.log()), RESULTS as usize);
    let (mut n, mut made) = (RESULTS, 0);
    while slow.push_if_open(&send(n + 1, &call(n + 1))) {
        n += 1;
        server.settle();
        if n == RESULTS + 30 {
            made = results(&server.log()) - RESULTS as usize;
        }
        assert!(n < 200, "nothing stops this client");
    }
    let log = server.log();
    assert!(log.contains("connection closed: iWARP: the peer broke the protocol"), "{log}");
    println!(
        "of 30 results of 1 MiB that nobody takes, {made} were made; {} could be asked for",
        n - RESULTS
    );
    assert!((1..16).contains(&made), "{made} results of 30 were made");
    drop(slow);
    server.end();
}
