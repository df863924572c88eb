//! Bad clients, and a server that goes on serving.

use rpcrdma::provider::iwarp::ddp::{ENOUGH, Fault, Header, Opcode, ReadRequest, UNTAGGED};
use rpcrdma::provider::iwarp::mpa::{StartFrame, Which};
use rpcrdma::wire::v1::{self, Body, Lists, Proc, RdmaError};
use rpcrdma::wire::{Segment, Xid};

use crate::peer::*;
use crate::programs::Server;

const CRC: &[&str] = &["RPCRDMA_CRC=yes"];
const NO_CRC: &[&str] = &["RPCRDMA_CRC=no"];

fn full() -> bool {
    std::env::var_os("BAD_PEERS").is_some_and(|value| value == "full")
}

/// What each byte is XORed with.
fn flips() -> Vec<u8> {
    if full() { (1..=255).collect() } else { vec![0x01, 0x80, 0xff] }
}

/// One thing wrong with a frame.
#[derive(Clone, Copy, Debug)]
enum Damage {
    /// Cut after so many bytes; then FIN.
    Cut(usize),
    /// Cut after so many bytes; then RST.
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
        // Of a long frame, what differs in kind: headers, pad and CRC, and some of the payload.
        let near = |at: &usize| length < 256 || *at < 80 || *at + 16 > length || *at % 499 == 0;
        let places: Vec<usize> = (0..length).filter(near).collect();
        let mut all: Vec<Damage> = places.iter().flat_map(|&at| [Damage::Cut(at), Damage::CutReset(at)]).collect();
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

/// The one case that waits for a timeout: ten seconds for the MPA Request.
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
struct Case<'a> {
    crc: bool,
    call: Vec<u8>,
    /// What the client's Read chunk holds.
    memory: &'a [u8],
    /// Which frame is damaged: 0 the Call, 1 the first Read Response.
    damaged: usize,
}

/// The memory that a Call offers: Read segments, and segments to be written.
fn offered(frame: &[u8]) -> (Vec<Segment>, Vec<Segment>) {
    let offered = || {
        let (header, length) = Header::decode(frame.first_chunk::<ENOUGH>()?).ok()?;
        let message = frame.get(header.len()..header.len() + length)?;
        let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = v1::decode(message).ok()?.body else {
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
        segment.handle.0 == stag && at <= u64::from(segment.length) && length as u64 <= u64::from(segment.length) - at
    })
}

/// Has the conversation: all that the server said, which is always well-formed and touches only what was offered.
fn converse(server: &mut Server, case: &Case, damage: Option<Damage>) -> Vec<Frame> {
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
        // The end of our half makes the server's last word the last.
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
            // Outside of our memory nothing can be read, whatever a damaged Call may have offered.
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
                v1::decode(bytes).unwrap_or_else(|e| panic!("{damage:?}: {e}"));
            }
            Frame::Terminate(_) => assert_eq!(n + 1, heard.len(), "{damage:?}: more after a Terminate"),
            Frame::ReadResponse { .. } => panic!("{damage:?}: a Read Response that nobody asked for"),
        }
    }
    heard
}

/// The conversation without damage, then with every damage to the frame.
fn every_damage(case: &Case, length: usize) {
    let settings = if case.crc { CRC } else { NO_CRC };
    let mut server = Server::start(settings);
    let good = converse(&mut server, case, None);
    assert!(matches!(good.last(), Some(Frame::Send { .. })), "the undamaged call is not answered: {good:?}");
    for (n, damage) in Damage::all(length, case.crc).into_iter().enumerate() {
        // A server per five thousand: TCP's ports are not endless.
        if n % 5000 == 4999 {
            server.end();
            server = Server::start(settings);
        }
        let heard = converse(&mut server, case, Some(damage));
        if case.crc && matches!(damage, Damage::Stale(..)) {
            let after = heard.iter().filter(|frame| !matches!(frame, Frame::Terminate(_))).count();
            assert_eq!(after, case.damaged, "{damage:?}: an FPDU with a wrong CRC was used: {heard:?}");
        }
    }
    server.end();
}

/// With CRCs, and without, where the layers above see every damage.
fn in_both_modes(mut case: Case, length: usize) {
    every_damage(&case, length);
    case.crc = false;
    every_damage(&case, length);
}

#[test]
fn any_damage_to_an_inline_call_hurts_its_own_connection_only() {
    let call = inline_call(7, ECHO, &opaque(b"inline"));
    let length = send(1, &call).len();
    in_both_modes(Case { crc: true, call, memory: b"", damaged: 0 }, length);
}

fn long_case(memory: &[u8], damaged: usize) -> (Case<'_>, usize) {
    let half = memory.len() as u32 / 2 & !3;
    let rest = memory.len() as u32 - half;
    let chunk = [segment(0x1111_0001, half, 0), segment(0x1111_0001, rest, u64::from(half))];
    let call = long_call(8, &chunk);
    let first = half.min(60_000) as usize;
    let length = match damaged {
        0 => send(1, &call).len(),
        _ => read_response(0, 0, &memory[..first], true).len(),
    };
    (Case { crc: true, call, memory, damaged }, length)
}

#[test]
fn any_damage_to_a_long_call_hurts_its_own_connection_only() {
    let memory = rpc_call(8, SINK, &opaque(&[0x5a; 200]));
    let (case, length) = long_case(&memory, 0);
    in_both_modes(case, length);
}

#[test]
fn any_damage_to_a_read_response_hurts_its_own_connection_only() {
    let memory = rpc_call(8, SINK, &opaque(&[0x5a; 100]));
    let (mut case, _) = long_case(&memory, 1);
    // One segment: the response that is damaged is the only one.
    case.call = long_call(8, &[segment(0x1111_0001, memory.len() as u32, 0)]);
    let length = read_response(0, 0, &memory, true).len();
    in_both_modes(case, length);
}

#[test]
fn any_damage_to_a_read_response_that_is_placed_directly_hurts_its_own_connection_only() {
    // 30,000 bytes a segment: not gathered in the read-ahead buffer.
    let memory = rpc_call(8, SINK, &opaque(&[0x5a; 30_000]));
    let (mut case, _) = long_case(&memory, 1);
    case.call = long_call(8, &[segment(0x1111_0001, memory.len() as u32, 0)]);
    let length = read_response(0, 0, &memory, true).len();
    in_both_modes(case, length);
}

#[test]
fn any_damage_to_a_call_with_a_reply_chunk_hurts_its_own_connection_only() {
    let chunk = [segment(0x2222_0001, 5000, 64), segment(0x2222_0002, 5000, 1 << 40)];
    let call = call_with_reply_chunk(9, SOURCE, &words(&[6000]), &chunk);
    let length = send(1, &call).len();
    let case = Case { crc: true, call, memory: b"", damaged: 0 };
    in_both_modes(case, length);
}
