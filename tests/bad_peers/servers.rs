//! Bad clients, and a server that must go on serving.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rpcrdma::provider::iwarp::ddp::{ENOUGH, Fault, Header, Opcode, ReadRequest};
use rpcrdma::provider::iwarp::mpa::Which;
use rpcrdma::wire::header::{self, Body, Proc, RdmaError, Versions};
use rpcrdma::wire::lists::{Chunk, Lists};
use rpcrdma::wire::{Segment, Xid};

use crate::peer::*;
use crate::programs::Server;

const CRC: &[&str] = &["RPCRDMA_CRC=yes"];
pub const NO_CRC: &[&str] = &["RPCRDMA_CRC=no"];

pub fn full() -> bool {
    std::env::var_os("BAD_PEERS").is_some_and(|value| value == "full")
}

/// What each byte is XORed with.
pub fn flips() -> Vec<u8> {
    if full() { (1..=255).collect() } else { vec![0x01, 0x80, 0xff] }
}

/// One thing wrong with a frame.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    /// Cut after this many bytes; then FIN.
    Cut(usize),
    /// Cut after this many bytes; then RST.
    CutReset(usize),
    /// A byte XORed, under the CRC that the right frame had.
    Stale(usize, u8),
    /// A byte XORed, under a CRC that is right for it.
    Sealed(usize, u8),
}

impl Damage {
    fn to(self, mut frame: Vec<u8>) -> Vec<u8> {
        match self {
            Damage::Cut(at) | Damage::CutReset(at) => frame.truncate(at),
            Damage::Stale(at, flip) => frame[at] ^= flip,
            Damage::Sealed(at, flip) => {
                frame[at] ^= flip;
                seal(&mut frame);
            }
        }
        frame
    }

    /// Every damage to a frame of `length` bytes.
    fn all(length: usize, seal: bool) -> Vec<Damage> {
        // In a long frame, only places that differ in kind: headers, pad and CRC, and some of the payload.
        let near = |at: &usize| length < 256 || *at < 80 || *at + 16 > length || at / 499 * 499 == *at;
        let places: Vec<usize> = (0..length).filter(near).collect();
        let mut all: Vec<Damage> =
            places.iter().flat_map(|&at| [Damage::Cut(at), Damage::CutReset(at)]).collect();
        for flip in flips() {
            all.extend(places.iter().map(|&at| Damage::Stale(at, flip)));
            if seal {
                all.extend(places.iter().filter(|&at| at + 4 < length).map(|&at| Damage::Sealed(at, flip)));
            }
        }
        all
    }
}

// ------------------------------------------------------------------------------------------------------- startup

#[test]
fn any_damage_to_the_mpa_request_ends_in_a_reply_or_a_close() {
    let mut server = Server::start(CRC);
    let request = request();
    for damage in Damage::all(request.len(), false) {
        let mut peer = Peer::connect(server.port);
        peer.push(&damage.to(request.clone()));
        if let Damage::CutReset(_) = damage {
            peer.reset();
            server.settle();
            continue;
        }
        peer.finish();
        match (peer.start_frame(Which::Reply), damage) {
            (Ok(_), Damage::Cut(_)) => panic!("{damage:?}: a reply to half a Request"),
            (Ok(_), Damage::Stale(at, _)) => assert!(at >= 16, "{damage:?}: a reply to another key"),
            _ => {}
        }
        server.settle();
    }
    server.end();
}

#[test]
fn a_request_for_markers_is_rejected_in_a_reply() {
    let mut server = Server::start(CRC);
    let mut peer = Peer::connect(server.port);
    let mut bytes = request();
    bytes[16] |= 0x80;
    peer.push(&bytes);
    assert!(peer.start_frame(Which::Reply).expect("a Reply").reject);
    assert!(peer.frame().is_err());
    server.settle();
    server.end();
}

#[test]
fn bytes_behind_the_request_are_refused() {
    let server = Server::start(CRC);
    let mut peer = Peer::connect(server.port);
    let mut bytes = request();
    bytes.extend(send(1, &inline_call(1, NULL, b"")));
    peer.push(&bytes);
    assert!(peer.frame().is_err());
    drop(peer);
    server.end();
}

/// The only case that waits for a timeout: ten seconds for the MPA Request.
#[test]
fn silent_peers_keep_nobody_waiting_and_only_half_a_request_times_out() {
    let mut server = Server::start(CRC);
    let call = send(1, &inline_call(1, NULL, b""));
    let mut nothing = Peer::connect(server.port);
    let mut half_request = Peer::connect(server.port);
    half_request.push(&request()[..20]);
    let mut no_call = Peer::open(server.port);
    let mut half_call = Peer::open(server.port);
    half_call.push(&call[..call.len() / 2]);
    let mut half_header = Peer::open(server.port);
    half_header.push(&call[..1]);
    for _ in 0..100 {
        server.settle();
    }
    assert_eq!(half_request.frame().unwrap_err(), End::Closed, "the startup has no limit");
    server.settle();

    // The others were only slow.
    nothing.push(&request());
    nothing.start_frame(Which::Reply).expect("an MPA Reply");
    nothing.null();
    no_call.null();
    half_call.push(&call[call.len() / 2..]);
    half_call.message();
    half_header.push(&call[1..]);
    half_header.message();
    drop((nothing, half_request, no_call, half_call, half_header));
    server.end();
}

/// The same time applies where only MPA is spoken.
#[test]
fn peers_that_never_say_a_word_are_dropped_on_netid_rdma() {
    let mut server = Server::start_on("rdma", CRC);
    let mut silent = [(); 3].map(|()| Peer::connect(server.port));
    let mut slow = Peer::connect(server.port);
    slow.push(&request()[..1]);
    server.settle();
    slow.push(&request()[1..]);
    slow.start_frame(Which::Reply).expect("an MPA Reply");
    slow.null();
    for peer in &mut silent {
        assert_eq!(peer.frame().unwrap_err(), End::Closed, "the first byte has no limit");
    }
    slow.null();
    drop((silent, slow));
    server.end();
}

#[test]
fn a_client_that_sends_byte_by_byte_is_served() {
    let mut server = Server::start(CRC);
    let mut peer = Peer::connect(server.port);
    for byte in request() {
        peer.push(&[byte]);
        server.settle();
    }
    peer.start_frame(Which::Reply).expect("an MPA Reply");
    for byte in send(1, &inline_call(5, ECHO, &opaque(b"slowly"))) {
        peer.push(&[byte]);
        server.settle();
    }
    let answer = peer.message();
    assert!(answer.ends_with(&rpc_reply(5, &opaque(b"slowly"))), "{answer:02x?}");
    drop(peer);
    server.end();
}

#[test]
fn two_hundred_half_open_connections_do_not_keep_a_good_client_waiting() {
    let mut server = Server::start(CRC);
    let request = request();
    let mut half_open = Vec::new();
    for n in 0..200 {
        let mut peer = Peer::connect(server.port);
        peer.push(&request[..n % request.len()]);
        half_open.push(peer);
        server.settle();
    }
    Peer::open(server.port).null();
    for (n, mut peer) in half_open.into_iter().enumerate() {
        // Half of them were only slow.
        if n % 2 == 0 {
            peer.push(&request[n % request.len()..]);
            peer.start_frame(Which::Reply).expect("an MPA Reply");
            peer.null();
        } else {
            peer.reset();
        }
        server.settle();
    }
    server.end();
}

// --------------------------------------------------------------------------------------------------------- calls

/// A conversation in which one frame of the client is damaged.
pub struct Case<'a> {
    pub crc: bool,
    pub call: Vec<u8>,
    /// The contents of the client's Read chunk.
    pub memory: &'a [u8],
    /// Which frame is damaged: 0 the Call, 1 the first Read Response.
    pub damaged: usize,
}

/// The memory that a Call exposes: Read segments, and segments to be written.
fn offered(frame: &[u8]) -> (Vec<Segment>, Vec<Segment>) {
    let offered = || {
        let (header, length) = Header::decode(frame.first_chunk::<ENOUGH>()?).ok()?;
        let message = frame.get(header.len()..header.len() + length)?;
        let body = header::decode(message, Versions::BOTH).ok()?.body;
        let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = body else {
            return None;
        };
        let writes = chunks.writes().chain(chunks.reply()).flat_map(|chunk| chunk.iter()).collect();
        Some((chunks.reads().map(|read| read.target).collect(), writes))
    };
    offered().unwrap_or_default()
}

fn within(segments: &[Segment], stag: u32, to: u64, length: usize) -> bool {
    segments.iter().any(|segment| {
        let at = to.wrapping_sub(segment.offset);
        segment.handle.0 == stag
            && at <= u64::from(segment.length)
            && length as u64 <= u64::from(segment.length) - at
    })
}

/// Holds the conversation. Returns everything that the server said, which must be well-formed and touch only what was
/// offered.
pub fn converse(server: &mut Server, case: &Case, damage: Option<Damage>) -> Vec<Frame> {
    let mut peer = Peer::open_with(server.port, case.crc);
    let damaged = |frame: Vec<u8>, number: usize| match damage {
        Some(damage) if number == case.damaged => damage.to(frame),
        _ => frame,
    };
    let call = damaged(send(1, &case.call), 0);
    peer.push(&call);
    let (readable, writable) = offered(&call);
    let mut heard = Vec::new();
    let mut ended = false;
    let mut responses = 1;
    loop {
        // Closing our half of the connection makes the server's last word the last.
        let cut = matches!(damage, Some(Damage::Cut(_) | Damage::CutReset(_))) && responses > case.damaged;
        server.settle();
        if cut {
            break;
        }
        let before = heard.len();
        ended = peer.available(&mut heard);
        let mut answered = false;
        for frame in &heard[before..] {
            let Frame::ReadRequest(read) = frame else { continue };
            // Nothing outside of our memory can be read, whatever a damaged Call may have offered.
            let end = read.source_to.saturating_add(u64::from(read.size));
            let Some(bytes) = (end <= case.memory.len() as u64)
                .then(|| &case.memory[read.source_to as usize..][..read.size as usize])
            else {
                continue;
            };
            let pieces = bytes.chunks(60_000).count().max(1);
            for (n, piece) in bytes.chunks(60_000).enumerate() {
                let to = read.sink_to + 60_000 * n as u64;
                peer.push(&damaged(read_response(read.sink_stag, to, piece, n + 1 == pieces), responses));
                responses += 1;
            }
            answered = true;
        }
        if ended || !answered {
            break;
        }
    }
    if let Some(Damage::CutReset(_)) = damage {
        peer.reset();
        server.settle();
    } else if !ended {
        peer.finish();
        heard.extend(peer.rest().0);
        server.settle();
    }
    for (n, frame) in heard.iter().enumerate() {
        match frame {
            Frame::Write { stag, to, bytes } => {
                assert!(within(&writable, *stag, *to, bytes.len()), "{damage:?}: wrote {stag:#x}+{to:#x}");
            }
            Frame::ReadRequest(read) => {
                let asked = within(&readable, read.source_stag, read.source_to, read.size as usize);
                assert!(asked, "{damage:?}: asked for {read:?}");
            }
            Frame::Send { bytes, .. } => {
                let decoded = header::decode(bytes, Versions::BOTH);
                assert!(decoded.is_ok(), "{damage:?}: {bytes:02x?}");
            }
            Frame::Terminate(_) => assert_eq!(n + 1, heard.len(), "{damage:?}: more after a Terminate"),
            Frame::ReadResponse(_) => panic!("{damage:?}: a Read Response that nobody asked for"),
        }
    }
    heard
}

/// Whether a frame is a Call of a procedure by which the server's program harms itself or its other clients, which is no
/// defect.
pub fn asks_for_harm(frame: &[u8]) -> bool {
    /// The server ends; it uses a transport later that may be gone by then (three procedures); it works for as long as it is
    /// told to; it ends if its reply does not fit.
    const REPLY_AND_EXIT: u32 = 10;
    const DEFER: u32 = 23;
    const RELEASE: u32 = 24;
    const THREAD_REPLIES: u32 = 25;
    const WORK: u32 = 26;
    const LAST_SOURCE: u32 = 27;
    [REPLY_AND_EXIT, DEFER, RELEASE, THREAD_REPLIES, WORK, LAST_SOURCE].into_iter().any(|procedure| {
        let harmful = words(&[PROGRAM, VERSION, procedure]);
        frame.windows(harmful.len()).any(|window| window == harmful)
    })
}

/// Holds the conversation without damage, then with every damage to the frame.
fn every_damage(case: &Case) {
    let settings = if case.crc { CRC } else { NO_CRC };
    let mut server = Server::start(settings);
    let good = converse(&mut server, case, None);
    assert!(matches!(good.last(), Some(Frame::Send { .. })), "the undamaged call is not answered: {good:?}");
    let whole = match case.damaged {
        0 => send(1, &case.call),
        _ => read_response(0, 0, case.memory, true),
    };
    for (n, damage) in Damage::all(whole.len(), case.crc).into_iter().enumerate() {
        // A new server after every five thousand: the number of TCP ports is limited.
        if n % 5000 == 4999 {
            server.end();
            server = Server::start(settings);
        }
        if matches!(damage, Damage::Stale(..) | Damage::Sealed(..))
            && asks_for_harm(&damage.to(whole.clone()))
        {
            continue;
        }
        let heard = converse(&mut server, case, Some(damage));
        if case.crc && matches!(damage, Damage::Stale(..)) {
            let after = heard.iter().filter(|frame| !matches!(frame, Frame::Terminate(_))).count();
            assert_eq!(after, case.damaged, "{damage:?}: an FPDU with a wrong CRC was used: {heard:?}");
        }
    }
    server.end();
}

/// With CRCs, and without, when the layers above see all damage.
fn in_both_modes(call: Vec<u8>, memory: &[u8], damaged: usize) {
    for crc in [true, false] {
        every_damage(&Case { crc, call: call.clone(), memory, damaged });
    }
}

#[test]
fn any_damage_to_an_inline_call_hurts_its_own_connection_only() {
    in_both_modes(inline_call(7, ECHO, &opaque(b"inline")), b"", 0);
}

#[test]
fn any_damage_to_a_long_call_hurts_its_own_connection_only() {
    let memory = rpc_call(8, SINK, &opaque(&[0x5a; 200]));
    let half = memory.len() as u32 / 2;
    let rest = memory.len() as u32 - half;
    let chunk = [segment(0x1111_0001, half, 0), segment(0x1111_0001, rest, u64::from(half))];
    in_both_modes(long_call(8, &chunk), &memory, 0);
}

#[test]
fn any_damage_to_a_read_response_hurts_its_own_connection_only() {
    // The longer one is not gathered in the read-ahead buffer but placed directly.
    for length in [100, 30_000] {
        let memory = rpc_call(8, SINK, &opaque(&vec![0x5a; length]));
        in_both_modes(long_call(8, &[segment(0x1111_0001, memory.len() as u32, 0)]), &memory, 1);
    }
}

#[test]
fn any_damage_to_a_call_with_a_reply_chunk_hurts_its_own_connection_only() {
    let chunk = [segment(0x2222_0001, 5000, 64), segment(0x2222_0002, 5000, 1 << 40)];
    in_both_modes(call_with_reply_chunk(9, SOURCE, &words(&[6000]), &chunk), b"", 0);
}

// ------------------------------------------------------------------------------------------------------- headers

/// What the server answers to one message; the connection lives on.
pub fn answers(server: &mut Server, message: &[u8]) -> Vec<Vec<u8>> {
    let mut peer = server.open();
    peer.send(message);
    server.settle();
    let mut frames = Vec::new();
    assert!(!peer.available(&mut frames), "the connection ended: {frames:?}");
    let mut messages = Vec::new();
    for frame in frames {
        match frame {
            Frame::Send { bytes, .. } => messages.push(bytes),
            other => panic!("{other:?} to {message:02x?}"),
        }
    }
    peer.null();
    messages
}

pub fn error_of(message: &[u8]) -> (Xid, u32, RdmaError) {
    let version = u32::from_be_bytes(*message[4..].first_chunk().expect("a version"));
    let header = header::decode(message, Versions::ONE).expect("a valid header");
    match header.body {
        Body::Error(error) => (header.xid, version, error),
        other => panic!("{other:?} where an RDMA_ERROR was due"),
    }
}

#[test]
fn other_versions_are_answered_with_err_vers_and_their_own_version() {
    let mut server = Server::start(NO_CRC);
    for version in [0, 2, 3, u32::MAX] {
        let mut call = inline_call(11, NULL, b"");
        call[4..8].copy_from_slice(&version.to_be_bytes());
        let answers = answers(&mut server, &call);
        assert_eq!(answers.len(), 1);
        let error = RdmaError::Version { low: 1, high: 1 };
        assert_eq!(error_of(&answers[0]), (Xid(11), version, error));
    }
    server.end();
}

#[test]
fn calls_that_cannot_be_used_are_answered_with_err_chunk() {
    let mut server = Server::start(NO_CRC);
    let null = rpc_call(12, NULL, b"");
    let fixed = |proc: u32| words(&[12, 1, 32, proc]);
    let with = |proc: u32, rest: &[u32]| [fixed(proc), words(rest), null.clone()].concat();
    let huge = |length| segment(1, length, 0);
    for (what, call) in [
        ("2^32-1 segments in a Write chunk", with(0, &[0, 1, u32::MAX])),
        ("2^32-1 segments in the Reply chunk", with(0, &[0, 0, 1, u32::MAX])),
        ("as many segments as overflow 32 bits", with(0, &[0, 0, 1, 0x1000_0000])),
        ("a Read list without end", [fixed(0), words(&[1, 4, 1, 4, 0, 0, 1, 4])].concat()),
        ("a discriminator of 2", with(0, &[2, 0, 0])),
        ("a Position that is no multiple of four", with(0, &[1, 6, 1, 4, 0, 0, 0, 0, 0])),
        ("a Position beyond the end", with(0, &[1, 4000, 1, 4, 0, 0, 0, 0, 0])),
        ("a procedure that does not exist", with(5, &[0, 0, 0])),
        ("RDMA_MSGP", with(2, &[0, 0, 0, 0, 0])),
        ("RDMA_NOMSG without a chunk", [fixed(1), words(&[0, 0, 0])].concat()),
        ("a Call of 4 GiB", long_call(12, &[huge(u32::MAX)])),
        ("a Call of 64 GiB", long_call(12, &vec![huge(u32::MAX); 16])),
        ("a Call of no bytes", long_call(12, &[huge(0)])),
        (
            "another XID in the RPC message",
            message(12, 1, Proc::Msg, &Lists::default(), &rpc_call(13, 0, b"")),
        ),
    ] {
        let answers = answers(&mut server, &call);
        assert_eq!(answers.len(), 1, "{what}");
        assert_eq!(error_of(&answers[0]), (Xid(12), 1, RdmaError::BadHeader), "{what}");
    }
    server.end();
}

#[test]
fn chunks_of_absurd_sizes_that_are_not_needed_come_back_unused() {
    let mut server = Server::start(NO_CRC);
    let absurd = Chunk::from(&[segment(1, u32::MAX, u64::MAX), segment(2, u32::MAX, 0)][..]);
    let lists = Lists { reads: vec![], writes: vec![absurd.clone(); 3], reply: Some(absurd.clone()) };
    let answers = answers(&mut server, &message(14, u32::MAX, Proc::Msg, &lists, &rpc_call(14, NULL, b"")));
    let header = header::decode(&answers[0], Versions::ONE).expect("a valid header");
    let Body::Msg { chunks, payload } = header.body else { panic!("{header}") };
    assert_eq!(payload, rpc_reply(14, b""));
    let returned = chunks.to_lists();
    assert_eq!((returned.writes.len(), returned.reply.as_ref().map(|chunk| chunk.len())), (3, Some(2)));
    assert!(returned.writes.iter().flatten().chain(returned.reply.iter().flatten()).all(|s| s.length == 0));
    server.end();
}

#[test]
fn a_read_chunk_of_no_bytes_does_not_hold_up_the_connection() {
    let mut server = Server::start(NO_CRC);
    let mut call = words(&[15, 1, 32, 0, 1, 44, 1, 0, 0, 0, 0, 0, 0]);
    call.extend(rpc_call(15, ECHO, &opaque(b"")));
    let answers = answers(&mut server, &call);
    assert!(answers[0].ends_with(&rpc_reply(15, &opaque(b""))), "{answers:02x?}");
    server.end();
}

#[test]
fn a_reply_that_fits_nowhere_is_err_chunk_and_the_connection_lives_on() {
    let mut server = Server::start(NO_CRC);
    let tiny = [segment(1, 100, 0), segment(2, 0, 0)];
    for call in [
        inline_call(16, SOURCE, &words(&[10_000])),
        call_with_reply_chunk(16, SOURCE, &words(&[10_000]), &tiny),
        call_with_reply_chunk(16, SOURCE, &words(&[10_000]), &[]),
    ] {
        let answers = answers(&mut server, &call);
        assert_eq!(error_of(&answers[0]), (Xid(16), 1, RdmaError::BadHeader));
    }
    server.end();
}

#[test]
fn messages_that_are_to_be_discarded_are_and_a_flood_of_them_holds_up_nobody() {
    let mut server = Server::start(NO_CRC);
    let mut error = Vec::new();
    header::encode_error(&mut error, (Xid(17), 1, RdmaError::BadHeader), rpcrdma::wire::Credits(1));
    let done = words(&[17, 1, 1, 3, 0, 0, 0]);
    for discarded in [&error[..], &done, &words(&[17, 1, 1, 4, 9]), &words(&[17, 1]), b"", b"x"] {
        assert_eq!(answers(&mut server, discarded), Vec::<Vec<u8>>::new(), "{discarded:02x?}");
    }
    // Empty Sends, as fast as the socket takes them, for as long as the good client makes its calls.
    let port = server.port;
    let empty = send(0, b"");
    let flood: Vec<u8> = (1..=3_000_000u32)
        .flat_map(|msn| [&empty[..12], &msn.to_be_bytes(), &empty[16..]].concat())
        .collect();
    beside(
        |stop| {
            let mut peer = Peer::open_with(port, false);
            let closed = flood.chunks(1 << 20).any(|part| !peer.push_if_open(part));
            assert!(closed, "three million messages that are no calls were taken");
            while !stop.load(Relaxed) {
                let mut peer = Peer::open_with(port, false);
                while !stop.load(Relaxed) && peer.push_if_open(&flood[..1 << 20]) {}
            }
        },
        || at_once(&mut server),
    );
    server.end();
}

// ------------------------------------------------------------------------------------------------------- RDMA

/// A connection that has already carried a call: before the first one a server may not even send a Terminate.
pub fn used(server: &Server) -> Peer {
    let mut peer = Peer::open(server.port);
    peer.null();
    peer
}

/// Checks that the connection ends: with this Terminate, or with a reset that overtook it.
pub fn refused(server: &mut Server, mut peer: Peer, fault: Fault, what: &str) {
    server.settle();
    let (frames, end) = peer.rest();
    match frames.last() {
        Some(Frame::Terminate(told)) => assert_eq!(*told, fault, "{what}"),
        None => assert_eq!(end, End::Reset, "{what}: closed without a word"),
        other => panic!("{what}: {other:?}"),
    }
    server.settle();
}

#[test]
fn rdma_to_memory_of_the_server_is_refused() {
    let mut server = Server::start(CRC);
    for stag in [0, 1, 0x100, 0x1234_5678, u32::MAX] {
        let mut peer = used(&server);
        peer.push(&write(stag, 0, b"x"));
        refused(&mut server, peer, Fault::STAG, "an RDMA Write");
        let mut peer = used(&server);
        let read = ReadRequest { sink_stag: 1, sink_to: 0, size: 1, source_stag: stag, source_to: 0 };
        peer.push(&read_request(1, read));
        refused(&mut server, peer, Fault::READ_STAG, "an RDMA Read");
        let mut peer = used(&server);
        peer.push(&read_response(stag, 0, b"x", true));
        refused(&mut server, peer, Fault::OPCODE, "a Read Response to nothing");
        let mut peer = used(&server);
        peer.push(&send_as(Opcode::SendInvalidate, stag, 2, &inline_call(1, NULL, b"")));
        refused(&mut server, peer, Fault::CANNOT_INVALIDATE, "an invalidation");
    }
    server.end();
}

#[test]
fn read_responses_that_were_not_asked_for_are_refused() {
    let mut server = Server::start(CRC);
    let memory = rpc_call(18, SINK, &opaque(&[1; 100]));
    let length = memory.len() as u32;
    type Response = fn(&ReadRequest, &[u8]) -> Vec<u8>;
    let wrong: [(&str, Fault, Response); 7] = [
        ("another STag", Fault::STAG, |r, m| read_response(r.sink_stag ^ 1, r.sink_to, m, true)),
        ("the STag of our own chunk", Fault::STAG, |r, m| read_response(r.source_stag, r.sink_to, m, true)),
        ("another offset", Fault::BOUNDS, |r, m| read_response(r.sink_stag, r.sink_to + 4, m, true)),
        ("an offset that wraps", Fault::WRAP, |r, m| read_response(r.sink_stag, u64::MAX, m, true)),
        ("too few bytes", Fault::BOUNDS, |r, m| read_response(r.sink_stag, r.sink_to, &m[1..], true)),
        ("none at all", Fault::BOUNDS, |r, _| read_response(r.sink_stag, r.sink_to, b"", true)),
        ("too many bytes", Fault::BOUNDS, |r, m| {
            read_response(r.sink_stag, r.sink_to, &[m, b"more"].concat(), true)
        }),
    ];
    let asked = |server: &Server| {
        let mut peer = used(server);
        peer.send(&long_call(18, &[segment(7, length, 0)]));
        match peer.frame() {
            Ok(Frame::ReadRequest(request)) => (peer, request),
            other => panic!("{other:?}"),
        }
    };
    for (what, fault, response) in wrong {
        let (mut peer, request) = asked(&server);
        peer.push(&response(&request, &memory));
        refused(&mut server, peer, fault, what);
    }
    // A Write to the sink of a Read: its STag is valid only for the Read Response.
    let (mut peer, request) = asked(&server);
    peer.push(&write(request.sink_stag, request.sink_to, &memory));
    refused(&mut server, peer, Fault::STAG, "a Write to the sink of a Read");
    // No response at all: calls after it on the connection wait, and nobody else does.
    let (mut peer, request) = asked(&server);
    peer.send(&inline_call(19, NULL, b""));
    server.settle();
    let mut frames = Vec::new();
    assert!(!peer.available(&mut frames) && frames.is_empty(), "{frames:?}");
    peer.push(&read_response(request.sink_stag, request.sink_to, &memory, true));
    for xid in [18, 19] {
        assert_eq!(header::decode(&peer.message(), Versions::ONE).expect("a reply").xid, Xid(xid));
    }
    drop(peer);
    // Or a reset instead of a response.
    let (peer, _) = asked(&server);
    peer.reset();
    server.end();
}

#[test]
fn sequence_numbers_queues_and_offsets_that_are_wrong_are_refused() {
    let mut server = Server::start(&["RPCRDMA_CRC=yes", "RPCRDMA_INLINE=4096"]);
    let call = inline_call(20, NULL, b"");
    let untagged =
        |msn, mo| fpdu(Header::Untagged { opcode: Opcode::Send, last: true, invalidate: 0, msn, mo }, &call);
    let mut queue = untagged(2, 0);
    queue[11] = 3;
    seal(&mut queue);
    let long = send(2, &[0; 4097]);
    for (what, fault, bytes) in [
        ("MSN 0", Fault::MSN, untagged(0, 0)),
        ("an MSN again", Fault::MSN, untagged(1, 0)),
        ("an MSN left out", Fault::MSN, untagged(3, 0)),
        ("MSN 2^32-1", Fault::MSN, untagged(u32::MAX, 0)),
        ("an offset", Fault::OFFSET, untagged(2, 4)),
        ("an offset of 2^32-1", Fault::OFFSET, untagged(2, u32::MAX)),
        ("a queue that does not exist", Fault::QUEUE, queue),
        ("a Send longer than the threshold", Fault::TOO_LONG, long),
    ] {
        let mut peer = used(&server);
        peer.push(&bytes);
        refused(&mut server, peer, fault, what);
    }
    server.end();
}

// ------------------------------------------------------------------------------------------------------- floods

/// Runs `bad` in a thread while `good` runs here; then tells it to stop.
pub fn beside(bad: impl FnOnce(&AtomicBool) + Send, good: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| bad(&stop));
        // Also when `good` fails: the scope waits for the thread.
        let _stop = Stop(&stop);
        good();
    });
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Lets the good client make calls for a second and a half, none of which may take long.
fn at_once(server: &mut Server) {
    let begin = Instant::now();
    let mut longest = Duration::ZERO;
    while begin.elapsed() < Duration::from_millis(1500) {
        let start = Instant::now();
        server.good.null();
        longest = longest.max(start.elapsed());
    }
    assert!(longest < patient(Duration::from_secs(1)), "a good client waited {longest:?}");
}

#[test]
fn calls_beyond_the_grant_are_served_or_end_the_connection() {
    let mut server = Server::start(CRC);
    for calls in [40, 200, 2000] {
        let mut peer = Peer::open(server.port);
        let flood: Vec<u8> = (1..=calls).flat_map(|n| send(n, &inline_call(n, NULL, b""))).collect();
        peer.push(&flood);
        server.settle();
        peer.finish();
        let (frames, _) = peer.rest();
        let replies = frames.iter().filter(|frame| matches!(frame, Frame::Send { .. })).count() as u32;
        assert!(replies <= calls, "{replies} replies to {calls} calls");
        server.settle();
    }
    server.end();
}

#[test]
fn a_peer_that_stops_reading_its_replies_holds_up_nobody_and_is_closed() {
    let mut server = Server::start(NO_CRC);
    let chunk = [segment(1, 2 << 20, 0)];
    // Long replies, and short ones that hold a page each; so many that the socket does not take them all.
    let long = |n| send(n, &call_with_reply_chunk(n, SOURCE, &words(&[1 << 20]), &chunk));
    let wrong = |n| send(n, &words(&[n, 9, 1, 0, 0, 0, 0]));
    let frames: [&dyn Fn(u32) -> Vec<u8>; 2] = [&long, &wrong];
    for (frame, batch) in frames.into_iter().zip([1, 30]) {
        let mut peer = Peer::open(server.port);
        let mut msn = 0;
        let mut waited = 0;
        while peer.push_if_open(&(msn + 1..=msn + batch).flat_map(frame).collect::<Vec<u8>>()) {
            msn += batch;
            let start = Instant::now();
            server.good.null();
            waited += u32::from(start.elapsed() > patient(Duration::from_millis(15)));
            assert!(msn < 1_000_000, "nothing stops this peer");
        }
        // The server waits 20 ms for one reply; any other delay is the machine's.
        assert!(waited < 20, "the good client waited {waited} times in {msn} calls");
        drop(peer);
        server.settle();
    }
    server.end();
}

/// Descriptors run short, and the client that was idle longest has not taken its replies: nobody waits for it to do so.
#[test]
fn idle_peers_that_do_not_read_make_room_at_once() {
    let mut server = Server::start_with("rdma", &["-d", "64"], NO_CRC);
    let chunk = [segment(1, 2 << 20, 0)];
    let long = |n| send(n, &call_with_reply_chunk(n, SOURCE, &words(&[1 << 20]), &chunk));
    let mut peers = Vec::new();
    for _ in 0..52 {
        let mut stopped = server.open();
        stopped.push(&(1..=8).flat_map(long).collect::<Vec<u8>>());
        server.good.null();
        peers.push(stopped);
    }
    let start = Instant::now();
    for _ in 0..10 {
        let mut fresh = server.open();
        fresh.null();
        server.good.null();
        peers.push(fresh);
    }
    let time = start.elapsed();
    assert!(time < patient(Duration::from_secs(2)), "ten clients have waited {time:?} in all");
    drop(peers);
    server.end();
}

#[test]
fn a_busy_client_does_not_keep_others_waiting() {
    // With polling: the server looks for the next request of a connection before it sleeps.
    let mut server = Server::start(&["RPCRDMA_CRC=no", "RPCRDMA_POLL=1000"]);
    let port = server.port;
    beside(
        |stop| {
            let mut busy = Peer::open(port);
            while !stop.load(Relaxed) {
                busy.null();
            }
        },
        || at_once(&mut server),
    );
    server.end();
}

#[test]
fn calls_without_reply_are_served_though_the_client_leaves_at_once() {
    const ONE_WAY: u32 = 6;
    const COUNTER: u32 = 7;
    let mut server = Server::start(CRC);
    for _ in 0..20 {
        let mut peer = Peer::open(server.port);
        let calls: Vec<u8> = (1..=10).flat_map(|n| send(n, &inline_call(n, ONE_WAY, &words(&[1])))).collect();
        peer.push(&calls);
        drop(peer);
        server.settle();
    }
    let mut peer = Peer::open(server.port);
    peer.send(&inline_call(1, COUNTER, b""));
    let answer = peer.message();
    assert!(answer.ends_with(&rpc_reply(1, &words(&[200]))), "{answer:02x?}");
    drop(peer);
    server.end();
}

#[test]
fn resets_at_every_step_leave_nothing_behind() {
    let mut server = Server::start(CRC);
    let chunk = [segment(1, 2 << 20, 0)];
    let memory = rpc_call(3, SINK, &opaque(&[7; 50_000]));
    let steps: [&dyn Fn(&mut Peer); 7] = [
        &|peer| peer.send(&inline_call(1, NULL, b"")),
        &|peer| peer.push(&send(1, &inline_call(1, NULL, b""))[..50]),
        &|peer| peer.send(&call_with_reply_chunk(2, SOURCE, &words(&[1 << 20]), &chunk)),
        &|peer| {
            peer.send(&call_with_reply_chunk(2, SOURCE, &words(&[1 << 20]), &chunk));
            peer.frame().expect("the first Write");
        },
        &|peer| peer.send(&long_call(3, &[segment(1, memory.len() as u32, 0)])),
        &|peer| {
            peer.send(&long_call(3, &[segment(1, memory.len() as u32, 0)]));
            let Ok(Frame::ReadRequest(read)) = peer.frame() else { panic!("an RDMA Read was due") };
            peer.push(&read_response(read.sink_stag, 0, &memory[..30_000], false));
            peer.push(&read_response(read.sink_stag, 30_000, &memory[30_000..], true)[..9000]);
        },
        &|_| {},
    ];
    for step in steps {
        for settle in [false, true] {
            for _ in 0..10 {
                let mut peer = Peer::open(server.port);
                step(&mut peer);
                if settle {
                    server.settle();
                }
                peer.reset();
                server.good.null();
            }
        }
    }
    server.end();
}
