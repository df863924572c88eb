//! Version Two and its transport characteristics: bad servers and a client that offers it, bad clients and servers with
//! every choice of versions.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use rpcrdma::provider::iwarp::ddp::{self, Fault, Opcode};
use rpcrdma::wire::characteristics::{self as operations, Backward, Characteristic, Kind, Operation};
use rpcrdma::wire::header::{self, Body, Direction, Header, RdmaError, Versions};
use rpcrdma::wire::lists::Lists;
use rpcrdma::wire::v2;
use rpcrdma::wire::{Credits, Position, ReadSegment, Segment, Xid};

use crate::clients::*;
use crate::peer::*;
use crate::programs::{Outcome, Server};
use crate::servers;

const AUTO: &str = "RPCRDMA_VERSION=auto";
const TWO: &str = "RPCRDMA_VERSION=2";
/// Receives that are short enough for a Send to be too long.
const SHORT: &str = "RPCRDMA_INLINE=4096";

fn decoded(message: &[u8]) -> Header<'_> {
    header::decode(message, Versions::BOTH).unwrap_or_else(|_| panic!("{message:02x?}"))
}

/// A message of an extension.
fn optional(xid: u32, direction: Direction, kind: u32, info: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    v2::encode_optional(&mut bytes, Xid(xid), Credits(32), direction, kind, info);
    bytes
}

fn size(bytes: u32) -> Characteristic {
    Characteristic::ReceiveSize(bytes)
}

fn init(xid: u32, bytes: u32) -> Vec<u8> {
    let start = [size(bytes), Characteristic::Backward(Backward::SizeLimited)];
    optional(xid, Direction::Call, Kind::Init as u32, &operations::init(&start, 0))
}

fn request(xid: u32, want: &[Characteristic]) -> Vec<u8> {
    optional(xid, Direction::Call, Kind::Request as u32, &operations::request(want))
}

fn response(xid: u32) -> Vec<u8> {
    optional(xid, Direction::Reply, Kind::Response as u32, &operations::response(1, 0, 0))
}

fn update(xid: u32, bytes: u32, settled: bool) -> Vec<u8> {
    optional(xid, Direction::Call, Kind::Update as u32, &operations::update(size(bytes), settled))
}

/// An error, with this word for its version.
fn error(xid: u32, version: u32, error: RdmaError) -> Vec<u8> {
    let mut bytes = Vec::new();
    header::encode_error(&mut bytes, (Xid(xid), version, error), Credits(32));
    bytes
}

fn versions(low: u32, high: u32) -> RdmaError {
    RdmaError::Version { low, high }
}

fn changed(mut message: Vec<u8>, at: usize, word: u32) -> Vec<u8> {
    message[4 * at..4 * at + 4].copy_from_slice(&word.to_be_bytes());
    message
}

/// Messages that are wrong or come at the wrong time, and the error that answers each, if any.
fn strange(xid: u32) -> Vec<(&'static str, Vec<u8>, Option<RdmaError>)> {
    let wants = |want| optional(xid, Direction::Call, Kind::Request as u32, want);
    let bad = Some(RdmaError::BadHeader);
    let unknown = Some(RdmaError::InvalidOption);
    let mut strange = vec![
        ("Receives of 1023 bytes", init(xid, 1023), bad),
        ("Receives of no bytes", init(xid, 0), bad),
        ("an update to 1023 bytes", update(xid, 1023, false), bad),
        ("an update that settles nothing", update(xid, 4096, true), None),
        ("an answer to nothing", response(xid), None),
        ("a direction of 2", changed(request(xid, &[size(4096)]), 4, 2), bad),
        ("a length past the end", changed(request(xid, &[size(4096)]), 6, 400), bad),
        ("a length of 4 GiB", changed(request(xid, &[size(4096)]), 6, u32::MAX), bad),
        ("a length that ends inside", changed(request(xid, &[size(4096)]), 6, 12), bad),
        ("4 Gi characteristics", wants(&words(&[u32::MAX, 1, 4, 4096])), bad),
        ("a characteristic of 4 GiB", wants(&words(&[1, 9, u32::MAX, 4096])), bad),
        ("bytes behind the characteristics", wants(&words(&[1, 1, 4, 4096, 7])), bad),
        ("a bool of 2", wants(&words(&[1, 2, 4, 2])), bad),
        ("a support of 4", wants(&words(&[1, 3, 4, 4])), bad),
        ("a value of no bytes", wants(&words(&[1, 1, 0])), bad),
        ("a procedure that does not exist", changed(init(xid, 4096), 3, 6), bad),
        ("half a header", init(xid, 4096)[..20].to_vec(), bad),
        ("an error that does not exist", changed(error(xid, 2, RdmaError::BadHeader), 4, 9), None),
        ("an error about nothing", error(xid, 2, RdmaError::InvalidOption), None),
        ("versions that nobody asked for", error(xid, 2, versions(1, 1)), None),
    ];
    for kind in [0, 5, 6, 1 << 31, u32::MAX] {
        strange.push(("an unknown kind", optional(xid, Direction::Call, kind, &[0; 400]), unknown));
        strange.push(("an unknown kind that answers", optional(xid, Direction::Reply, kind, b""), unknown));
    }
    strange
}

/// The messages of a good peer.
fn good(xid: u32) -> [Vec<u8>; 4] {
    [init(xid, 8192), request(xid, &[size(8192)]), update(xid, 16384, false), response(xid)]
}

// ------------------------------------------------------------------------------------------------------- clients

/// Takes part in the startup and takes the offer, which must be a valid first message; returns its XID.
fn offer(peer: &mut Peer) -> u32 {
    accept(peer);
    let message = peer.message();
    let Header { version, xid, body: Body::Optional { kind, info }, .. } = decoded(&message) else {
        panic!("{message:02x?} where an offer was due");
    };
    assert_eq!((version, Kind::of(kind)), (v2::VERSION, Some(Kind::Init)));
    assert!(operations::decode(Kind::Init, info).is_ok() && message.len() <= 1024, "{message:02x?}");
    xid.0
}

/// A call of a client.
struct Asked {
    version: u32,
    xid: u32,
    /// It came without a Read chunk.
    inline: bool,
}

/// The next message, in however many segments; `None` at the end of the connection.
fn whole_message(peer: &mut Peer) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        match peer.frame() {
            Ok(Frame::Send { last, bytes }) => {
                whole.extend(bytes);
                if last {
                    return Some(whole);
                }
            }
            Ok(Frame::Terminate(_)) | Err(_) => return None,
            // An empty RDMA Write, by which a client nudges a peer that is slow to answer.
            Ok(Frame::Write { bytes, .. }) if bytes.is_empty() => {}
            other => panic!("{other:?} where a message was due"),
        }
    }
}

/// The next call; `None` at the end of the connection. Anything else that the client sends must be valid, and is skipped.
fn asked(peer: &mut Peer) -> Option<Asked> {
    loop {
        let whole = whole_message(peer)?;
        let Header { version, xid, direction, body, .. } = decoded(&whole);
        let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = body else { continue };
        if direction == Some(Direction::Call) {
            return Some(Asked { version, xid: xid.0, inline: chunks.read_count() == 0 });
        }
    }
}

fn reply_to(call: &Asked, results: &[u8]) -> Vec<u8> {
    let payload = rpc_reply(call.xid, results);
    message_in(call.version, call.xid, Direction::Reply, &Lists::default(), Some(&payload))
}

/// Answers the NULL calls of a client until it ends; all must be of this version.
fn serve(peer: &mut Peer, version: u32) {
    while let Some(call) = asked(peer) {
        assert_eq!(call.version, version);
        peer.send(&reply_to(&call, b""));
    }
}

/// Runs a caller against `serve`, and counts its connections.
fn offered(settings: &[&str], steps: &[&str], serve: impl Fn(Peer, usize) + Sync) -> (Outcome, usize) {
    let connections = AtomicUsize::new(0);
    let outcome = against_with(settings, steps, false, |peer, number| {
        connections.fetch_add(1, Relaxed);
        serve(peer, number);
    });
    (outcome, connections.into_inner())
}

#[test]
fn an_offer_that_is_refused_leaves_the_connection_to_version_one() {
    for (version, refusal) in [
        (1, versions(1, 1)),
        (2, versions(1, 1)),
        (77, versions(1, 1)),
        (2, versions(0, 1)),
        (2, versions(1, u32::MAX)),
        // The server has looked at the procedure first.
        (1, RdmaError::BadHeader),
    ] {
        let (outcome, connections) = offered(&[AUTO], &["20000", "null", "null"], |mut peer, _| {
            let xid = offer(&mut peer);
            peer.send(&error(xid, version, refusal));
            serve(&mut peer, 1);
        });
        assert_eq!(outcome.statuses, [SUCCESS; 2], "{version} {refusal:?}: {}", outcome.text);
        assert_eq!(connections, 1, "{version} {refusal:?}");
    }
}

#[test]
fn a_server_that_goes_away_at_the_offer_is_called_in_version_one_over_a_second_connection() {
    type Way<'a> = &'a (dyn Fn(Peer, u32) + Sync);
    let ways: [(&str, Way); 7] = [
        ("a close", &|_, _| {}),
        ("a reset", &|peer, _| peer.reset()),
        ("a Terminate", &|mut peer, _| peer.push(&terminate(Fault::QUEUE))),
        ("half an answer", &|mut peer, xid| peer.push(&send(1, &init(xid, 4096))[..30])),
        ("garbage", &|mut peer, _| {
            peer.push(&[0xee; 200]);
            until_end(&mut peer);
        }),
        ("an answer too long for any Receive", &|mut peer, xid| {
            peer.push(&send(1, &[init(xid, 4096), vec![0; 4096]].concat()));
            until_end(&mut peer);
        }),
        ("a Write to nowhere", &|mut peer, _| {
            peer.push(&write(1, 0, b"x"));
            until_end(&mut peer);
        }),
    ];
    for (what, go) in ways {
        let (outcome, connections) =
            offered(&[AUTO, SHORT], &["20000", "null", "null", "null"], |mut peer, number| {
                if number == 0 {
                    let xid = offer(&mut peer);
                    return go(peer, xid);
                }
                accept(&mut peer);
                serve(&mut peer, 1);
            });
        assert_eq!(outcome.statuses, [SUCCESS; 3], "{what}: {}", outcome.text);
        assert_eq!(connections, 2, "{what}");
    }
}

#[test]
fn a_server_that_refuses_and_goes_away_at_once_is_called_in_version_one() {
    for version in [1, 2] {
        let (outcome, connections) = offered(&[AUTO], &["20000", "null", "null"], |mut peer, number| {
            if number == 0 {
                let xid = offer(&mut peer);
                return peer.last(&send(1, &error(xid, version, versions(1, 1))));
            }
            accept(&mut peer);
            serve(&mut peer, 1);
        });
        assert_eq!(outcome.statuses, [SUCCESS; 2], "{}", outcome.text);
        assert_eq!(connections, 2);
    }
}

#[test]
fn a_server_that_always_goes_away_ends_the_call_after_the_second_connection() {
    // A caller that insists gets no client: one status instead of two.
    for (setting, wanted) in [(AUTO, (2, 2)), (TWO, (1, 1))] {
        for reset in [false, true] {
            let (outcome, connections) = offered(&[setting], &["20000", "null", "null"], |mut peer, _| {
                accept(&mut peer);
                peer.frame().expect("an offer, or a call");
                if reset {
                    peer.reset();
                }
            });
            assert!(!outcome.statuses.contains(&SUCCESS), "{}", outcome.text);
            assert_eq!((outcome.statuses.len(), connections), wanted, "{setting}: {}", outcome.text);
            assert!(outcome.took < hang() / 4, "{:?}", outcome.took);
        }
    }
    // The second connection does not even get through the startup.
    let (outcome, connections) = offered(&[AUTO], &["20000", "null", "null"], |mut peer, number| {
        if number == 0 {
            offer(&mut peer);
        }
    });
    assert!(!outcome.statuses.contains(&SUCCESS), "{}", outcome.text);
    assert_eq!((outcome.statuses.len(), connections), (1, 2), "no client: {}", outcome.text);
}

#[test]
fn a_client_that_insists_names_both_versions_and_the_remedy() {
    for version in [1, 2] {
        let (outcome, connections) = offered(&[TWO], &["20000", "null", "null"], |mut peer, _| {
            let xid = offer(&mut peer);
            peer.send(&error(xid, version, versions(1, 1)));
            assert!(asked(&mut peer).is_none(), "a call that the server cannot understand");
        });
        assert!(!outcome.statuses.contains(&SUCCESS), "{}", outcome.text);
        assert_eq!((outcome.statuses.len(), connections), (1, 1), "no client: {}", outcome.text);
        assert!(outcome.text.contains("versions 1 to 1, not 2"), "{}", outcome.text);
        assert!(outcome.text.contains("set RPCRDMA_VERSION=auto"), "{}", outcome.text);
    }
}

#[test]
fn versions_without_sense_are_no_reason_to_ask_for_ever() {
    for (low, high) in [(0, 0), (3, 9), (2, 1), (2, 2), (u32::MAX, u32::MAX)] {
        for (setting, wanted) in [(AUTO, (2, 2)), (TWO, (1, 1))] {
            let (outcome, connections) = offered(&[setting], &["20000", "null", "null"], |mut peer, _| {
                accept(&mut peer);
                // Answers whatever the client sends.
                while let Ok(frame) = peer.frame() {
                    if let Frame::Send { bytes, .. } = frame {
                        let Header { xid, version, .. } = decoded(&bytes);
                        peer.send(&error(xid.0, version, versions(low, high)));
                    }
                }
            });
            assert!(!outcome.statuses.contains(&SUCCESS), "{low}..{high}: {}", outcome.text);
            assert!(outcome.text.contains(&format!("versions {low} to {high}")), "{}", outcome.text);
            assert_eq!((outcome.statuses.len(), connections), wanted, "{low}..{high} {}", outcome.text);
            assert!(outcome.took < hang() / 4, "{low}..{high}: {:?}", outcome.took);
        }
    }
}

/// The only case that waits for an offer to time out: five seconds.
#[test]
fn an_offer_that_is_not_answered_ends_and_the_call_goes_in_version_one() {
    let silent = |mut peer: Peer, number| {
        if number == 0 {
            offer(&mut peer);
            assert!(asked(&mut peer).is_none(), "a message behind the offer");
            return;
        }
        accept(&mut peer);
        serve(&mut peer, 1);
    };
    let short = ["=1000", "null", "null", "null", "null", "null", "null", "null", "null"];
    thread::scope(|scope| {
        let patient = scope.spawn(|| offered(&[AUTO], &["20000", "null", "null"], silent));
        let insisting = scope.spawn(|| offered(&[TWO], &["=1000", "null"], silent));
        let (outcome, connections) = offered(&[AUTO], &short, silent);
        let late = outcome.statuses.iter().position(|status| *status != TIMEDOUT).expect("a later call");
        assert!(late > 0 && outcome.statuses[late..].iter().all(|s| *s == SUCCESS), "{}", outcome.text);
        assert_eq!(connections, 2);
        assert!(
            outcome.text.contains("no answer to the offer of RPC-over-RDMA version 2"),
            "{}",
            outcome.text
        );
        let (outcome, connections) = patient.join().expect("no panic");
        assert_eq!((&outcome.statuses[..], connections), (&[SUCCESS; 2][..], 2), "{}", outcome.text);
        assert!(outcome.took < hang() / 2, "{:?}", outcome.took);
        let (outcome, connections) = insisting.join().expect("no panic");
        assert_eq!((&outcome.statuses[..], connections), (&[TIMEDOUT][..], 1), "{}", outcome.text);
    });
}

#[test]
fn a_server_without_the_characteristics_is_called_in_version_two() {
    for setting in [AUTO, TWO] {
        for refusal in [RdmaError::InvalidOption, RdmaError::BadHeader] {
            let (outcome, connections) = offered(&[setting], &["20000", "null", "null"], |mut peer, _| {
                let xid = offer(&mut peer);
                peer.send(&error(xid, 2, refusal));
                serve(&mut peer, 2);
            });
            assert_eq!(outcome.statuses, [SUCCESS; 2], "{refusal:?}: {}", outcome.text);
            assert_eq!(connections, 1, "{refusal:?}");
        }
    }
}

#[test]
fn calls_are_as_long_as_the_server_has_said_and_no_longer() {
    const LENGTHS: [usize; 5] = [900, 1100, 3900, 4100, 200_000];
    let steps: Vec<String> = LENGTHS.iter().map(|length| format!("sink:{length}")).collect();
    let steps: Vec<&str> = std::iter::once("20000").chain(steps.iter().map(|step| &step[..])).collect();
    for (told, limit) in [(1023, 4096), (1024, 1024), (4096, 4096), (8191, 8191), (u32::MAX, usize::MAX)] {
        let (outcome, connections) = offered(&[AUTO], &steps, |mut peer, _| {
            let xid = offer(&mut peer);
            peer.send(&init(xid, told));
            for length in LENGTHS {
                let call = asked(&mut peer).expect("a call");
                // Header, Reply chunk, RPC Call and argument.
                let whole = 32 + 20 + 40 + 4 + length;
                assert_eq!((call.version, call.inline), (2, whole <= limit), "{told}: {length}");
                peer.send(&reply_to(&call, &words(&[0; 4])));
            }
            assert!(asked(&mut peer).is_none());
        });
        assert_eq!(outcome.statuses, [SUCCESS; 5], "{told}: {}", outcome.text);
        assert_eq!(connections, 1);
    }
}

/// An error of a client, which grants one credit.
fn answer_of_client(xid: u32, what: RdmaError) -> Vec<u8> {
    let mut bytes = Vec::new();
    header::encode_error(&mut bytes, (Xid(xid), v2::VERSION, what), Credits(1));
    bytes
}

/// What a client does not expect is answered or ignored, and its calls go on meanwhile.
#[test]
fn messages_that_make_no_sense_do_not_disturb_the_calls_of_a_client() {
    let count = strange(0).len();
    let steps: Vec<&str> = std::iter::once("20000").chain(std::iter::repeat_n("null", count)).collect();
    let (outcome, connections) = offered(&[AUTO], &steps, |mut peer, _| {
        let own = offer(&mut peer);
        peer.send(&init(own, 4096));
        let mut call = asked(&mut peer);
        // With the XID of none of the client's messages, and with that of the INIT_XCHAR of either end.
        for n in 0..count {
            let Some(now) = call else { panic!("the connection ended before call {n}") };
            for xid in [0x7000_0000, own] {
                let (what, message, answer) = strange(xid).swap_remove(n);
                peer.send(&message);
                // It serves nothing, so it need not say that a header is invalid.
                if let Some(answer) = answer.filter(|_| header::decode(&message, Versions::BOTH).is_ok()) {
                    assert_eq!(peer.message(), answer_of_client(xid, answer), "{what}");
                }
            }
            peer.send(&reply_to(&now, b""));
            call = asked(&mut peer);
        }
        assert!(call.is_none());
    });
    assert_eq!(outcome.statuses, vec![SUCCESS; count], "{}", outcome.text);
    assert_eq!(connections, 1);
}

#[test]
fn a_client_answers_requests_and_calls_back_in_the_midst_of_its_own() {
    let (outcome, _) = offered(&[AUTO], &["20000", "null", "null"], |mut peer, _| {
        let own = offer(&mut peer);
        peer.send(&init(own, 4096));
        let first = asked(&mut peer).expect("a call");
        peer.send(&init(own, 1 << 20));
        let want = [size(8192), size(1023), Characteristic::RemoteInvalidation(true), size(u32::MAX)];
        peer.send(&request(first.xid, &want));
        let answer = peer.message();
        let Header { xid, direction, body: Body::Optional { kind, info }, .. } = decoded(&answer) else {
            panic!("{answer:02x?}");
        };
        assert_eq!((xid.0, direction), (first.xid, Some(Direction::Reply)));
        let Ok(Operation::Response { done, rejected, pending }) =
            operations::decode(Kind::of(kind).expect("a kind"), info)
        else {
            panic!("{answer:02x?}");
        };
        assert!((1..4).all(|place| !pending.contains(place)) && rejected.contains(1) && rejected.contains(3));
        assert!(done.contains(0) != pending.contains(0));
        // A call back, with the XID of its own call, to a program that is not there (PROG_UNAVAIL).
        peer.send(&null_call(2, first.xid));
        loop {
            let message = peer.message();
            // The size of its Receives may change meanwhile.
            if let Body::Optional { .. } = decoded(&message).body {
                continue;
            }
            let unavailable = words(&[first.xid, 1, 0, 0, 0, 1]);
            let mut wanted =
                message_in(2, first.xid, Direction::Reply, &Lists::default(), Some(&unavailable));
            wanted[8..12].copy_from_slice(&1u32.to_be_bytes());
            assert_eq!(message, wanted);
            break;
        }
        // Replies of the other version, and of the other direction.
        let reply = reply_to(&first, b"");
        peer.send(&reply_to(&Asked { version: 1, ..first }, b""));
        peer.send(&changed(reply.clone(), 4, 0));
        peer.send(&reply);
        serve(&mut peer, 2);
    });
    assert_eq!(outcome.statuses, [SUCCESS; 2], "{}", outcome.text);
}

#[test]
fn a_client_that_is_flooded_with_requests_holds_little_memory_and_ends_its_call_in_time() {
    let floods: [fn(u32) -> Vec<u8>; 4] = [
        |n| request(n, &[size(4096)]),
        |n| optional(n, Direction::Call, 77, b""),
        |n| init(n, 4096 + n % 2),
        |n| null_call(2, n),
    ];
    for flood in floods {
        for batch in [1, 10_000] {
            let steps = ["1000", "null", "memory:40000"];
            let (outcome, connections) = offered(&[AUTO], &steps, |mut peer, _| {
                let own = offer(&mut peer);
                peer.send(&init(own, 4096));
                asked(&mut peer).expect("a call");
                // Until the client ends the connection; its answers are not read.
                for from in (0..).step_by(batch) {
                    let bytes: Vec<u8> =
                        (from..from + batch as u32).flat_map(|n| send(n + 2, &flood(n))).collect();
                    if !peer.push_if_open(&bytes) {
                        return;
                    }
                }
            });
            assert!(matches!(outcome.statuses[..], [TIMEDOUT | CANTRECV, 0]), "{batch}: {}", outcome.text);
            assert_eq!(connections, 1);
            assert!(outcome.took < hang() / 4, "{:?}", outcome.took);
        }
    }
}

/// Every flip and every cut of what a server sends, each followed by the right message: no call is lost.
#[test]
fn damaged_messages_of_a_server_end_no_connection_and_no_call_without_its_answer() {
    let step = if servers::full() { 1 } else { 3 };
    let whole = good(7).map(|message| message.len());
    let reply = reply_to(&Asked { version: 2, xid: 0, inline: true }, b"").len();
    let lengths = whole.into_iter().chain([reply]);
    for (kind, length) in lengths.enumerate() {
        // A hundred for each call: a client closes the connection to a server that floods it.
        let parts = (servers::flips().len() + 1).div_ceil(100);
        let places: Vec<(usize, usize)> =
            (0..length).step_by(step).flat_map(|at| (0..parts).map(move |part| (at, part))).collect();
        let steps: Vec<&str> = std::iter::once("20000").chain(places.iter().map(|_| "null")).collect();
        let (outcome, connections) = offered(&[AUTO], &steps, |mut peer, _| {
            let own = offer(&mut peer);
            let mut call = None;
            for (at, part) in &places {
                // The offer is first answered by the damaged INIT_XCHARs.
                let xid = call.as_ref().map_or(own, |call: &Asked| call.xid);
                let message = match (kind, &call) {
                    (4, Some(call)) => reply_to(call, b""),
                    (4, None) => init(own, 4096),
                    (kind, _) => good(xid)[kind].clone(),
                };
                for damaged in damages(&message, *at).iter().skip(100 * part).take(100) {
                    peer.send(damaged);
                }
                if call.is_none() {
                    peer.send(&init(own, 4096));
                    call = asked(&mut peer);
                }
                let now = call.expect("the connection goes on");
                peer.send(&reply_to(&now, b""));
                call = asked(&mut peer);
            }
        });
        // A reply whose RPC message is damaged is still a reply, and an answer with the XID of a call may become an error.
        let lost =
            outcome.statuses.iter().filter(|status| matches!(**status, TIMEDOUT | CANTRECV | 3)).count();
        assert_eq!((outcome.statuses.len(), lost), (places.len(), 0), "{kind}: {}", outcome.text);
        assert!(kind >= 3 || outcome.statuses.iter().all(|s| *s == SUCCESS), "{kind}: {}", outcome.text);
        assert_eq!(connections, 1);
    }
}

/// A message with each flip of a byte, and cut there.
fn damages(message: &[u8], at: usize) -> Vec<Vec<u8>> {
    let flipped = |flip: u8| {
        let mut message = message.to_vec();
        message[at] ^= flip;
        message
    };
    let mut all: Vec<Vec<u8>> = servers::flips().into_iter().map(flipped).collect();
    all.push(message[..at].to_vec());
    all
}

// ------------------------------------------------------------------------------------------------------- servers

fn server(setting: &str) -> Server {
    Server::start(&["RPCRDMA_CRC=no", SHORT, setting])
}

/// Requires that the answer to message `xid` is this error, with this word for its version.
fn refusal(answer: &[u8], xid: u32, version: u32, what: RdmaError) {
    assert_eq!(answer, error(xid, version, what), "{what:?} to message {xid} of version {version}");
}

#[test]
fn a_server_answers_what_makes_no_sense_and_serves_the_next_call() {
    for setting in [AUTO, TWO] {
        let mut server = server(setting);
        for first in [false, true] {
            for (what, message, answer) in strange(0x11) {
                let mut peer = server.open();
                if !first {
                    peer.version = 2;
                    peer.null();
                }
                peer.send(&message);
                server.settle();
                let mut frames = Vec::new();
                assert!(!peer.available(&mut frames), "{what} ends the connection: {frames:?}");
                let mut frames = frames.into_iter();
                if let Some(answer) = answer {
                    let Some(Frame::Send { bytes, .. }) = frames.next() else { panic!("{what}: no answer") };
                    refusal(&bytes, 0x11, 2, answer);
                }
                // The server may announce its own characteristics, once the client has used the extension.
                for frame in frames {
                    let Frame::Send { bytes, .. } = &frame else { panic!("{what}: {frame:?}") };
                    assert!(
                        matches!(decoded(bytes).body, Body::Optional { kind: 1, .. }),
                        "{what}: {frame:?}"
                    );
                }
                peer.null();
                peer.version = 2;
                peer.null();
            }
        }
        server.end();
    }
}

#[test]
fn every_call_is_answered_in_its_version_or_told_which_ones_are_spoken() {
    for (setting, low, high) in [("RPCRDMA_VERSION=1", 1, 1), (AUTO, 1, 2), (TWO, 2, 2)] {
        let mut server = server(setting);
        // Many calls at once, with mixed versions, and with each as the first.
        for first in [1, 2, 3, 0, u32::MAX] {
            let mut peer = server.open();
            let calls = [first, 1, 2, 2, 1, 3, 2, 1];
            for (n, version) in calls.iter().enumerate() {
                let call = match version {
                    1 => null_call(1, n as u32),
                    other => changed(null_call(2, n as u32), 1, *other),
                };
                peer.send(&call);
            }
            // A refusal does not wait for the calls before it.
            for _ in calls {
                let answer = peer.message();
                let xid = decoded(&answer).xid.0;
                let version = calls[xid as usize];
                if (low..=high).contains(&version) {
                    let payload = rpc_reply(xid, b"");
                    let wanted =
                        message_in(version, xid, Direction::Reply, &Lists::default(), Some(&payload));
                    assert_eq!(answer, wanted, "{setting}: call {xid} of version {version}");
                } else {
                    refusal(&answer, xid, version, versions(low, high));
                }
            }
            // Errors are not answered, whatever they are, and neither is what is too short for a header.
            for silent in [
                error(1, 1, versions(1, 1)),
                error(1, 2, versions(1, 1)),
                error(1, 1, RdmaError::BadHeader),
                words(&[1, 2, 3]),
            ] {
                peer.send(&silent);
            }
            peer.null();
        }
        server.settle();
        server.end();
    }
}

#[test]
fn a_server_of_version_one_refuses_every_message_of_version_two() {
    let mut server = server("RPCRDMA_VERSION=1");
    let long = message_in(2, 7, Direction::Call, &reads(&[segment(1, 100, 0)]), None);
    for message in good(7).into_iter().chain([null_call(2, 7), long]) {
        let answers = servers::answers(&mut server, &message);
        assert_eq!(answers.len(), 1, "{message:02x?}");
        refusal(&answers[0], 7, 2, versions(1, 1));
    }
    server.end();
}

/// Lists with a Position-Zero Read chunk.
fn reads(chunk: &[Segment]) -> Lists {
    let reads = chunk.iter().map(|&target| ReadSegment { position: Position(0), target }).collect();
    Lists { reads, ..Lists::default() }
}

#[test]
fn any_damage_to_a_message_of_version_two_hurts_its_own_connection_only() {
    let echo =
        message_in(2, 7, Direction::Call, &Lists::default(), Some(&rpc_call(7, ECHO, &opaque(b"two"))));
    let memory = rpc_call(7, SINK, &opaque(&[0x5a; 100]));
    let half = memory.len() as u32 / 2;
    let chunk = [segment(0x1111_0001, half, 0), segment(0x1111_0001, half, u64::from(half))];
    let long = message_in(2, 7, Direction::Call, &reads(&chunk), None);
    let lists = Lists { reply: Some([segment(0x2222_0001, 9000, 1 << 40)].into()), ..Lists::default() };
    let source = rpc_call(7, SOURCE, &words(&[8000]));
    let written = message_in(2, 7, Direction::Call, &lists, Some(&source));
    let step = if servers::full() { 1 } else { 2 };
    let mut server = server(AUTO);
    let mut tried = 0;
    for message in good(7).into_iter().chain([echo, long, written]) {
        let mut say = |call: Vec<u8>| {
            let case = servers::Case { crc: false, call, memory: &memory, damaged: 0 };
            servers::converse(&mut server, &case, None)
        };
        let heard = say(message.clone());
        assert!(matches!(heard.last(), Some(Frame::Send { .. })), "{message:02x?}: {heard:?}");
        for damaged in (0..message.len()).step_by(step).flat_map(|at| damages(&message, at)) {
            if !servers::asks_for_harm(&damaged) {
                say(damaged);
                tried += 1;
            }
        }
        // The number of TCP ports is limited.
        if tried > 5000 {
            server.end();
            (server, tried) = (self::server(AUTO), 0);
        }
    }
    server.end();
}

#[test]
fn replies_are_as_long_as_the_client_has_said_and_no_longer() {
    let server = server(AUTO);
    for (told, limit) in [(1023, 4096), (1024, 1024), (8192, 8192), (u32::MAX, usize::MAX)] {
        let mut peer = server.open();
        peer.send(&init(1, told));
        let answer = peer.message();
        match decoded(&answer).body {
            Body::Error(RdmaError::BadHeader) => assert_eq!(told, 1023),
            Body::Optional { kind: 1, .. } => assert!(told > 1023),
            other => panic!("{other:?}"),
        }
        for length in [900, 4000, 8000, 1_000_000] {
            let call = rpc_call(2, SOURCE, &words(&[length]));
            peer.send(&message_in(2, 2, Direction::Call, &Lists::default(), Some(&call)));
            let reply = whole_message(&mut peer).expect("an answer");
            match decoded(&reply).body {
                Body::Msg { payload, .. } => assert_eq!(payload.len(), 24 + 4 + length as usize),
                Body::Error(RdmaError::BadHeader) => assert!(32 + 24 + 4 + length as usize > limit),
                other => panic!("{told}: {length}: {other:?}"),
            }
            assert!(reply.len() <= limit, "{told}: {length}");
        }
    }
    server.end();
}

/// Sends a message in several segments.
fn send_whole(peer: &mut Peer, message: &[u8]) {
    let msn = peer.next_msn();
    for (n, piece) in message.chunks(30_000).enumerate() {
        let at = 30_000 * n;
        let last = at + piece.len() == message.len();
        peer.push(&fpdu(
            ddp::Header::Untagged { opcode: Opcode::Send, last, invalidate: 0, msn, mo: at as u32 },
            piece,
        ));
    }
}

#[test]
fn receives_have_the_size_that_was_told_after_every_change() {
    let server = server(AUTO);
    let mut peer = server.open();
    peer.version = 2;
    peer.send(&init(1, 4096));
    peer.message();
    const MOST: u32 = 256 << 10;
    for (bytes, longest) in
        [(65_536, 65_536), (MOST, MOST), (MOST + 1, MOST), (u32::MAX, MOST), (1024, 1024), (5000, 5000)]
    {
        peer.send(&request(2, &[size(bytes)]));
        let mut settled = false;
        while !settled {
            let answer = peer.message();
            let Body::Optional { kind, info } = decoded(&answer).body else { panic!("{answer:02x?}") };
            settled = match operations::decode(Kind::of(kind).expect("a kind"), info) {
                Ok(Operation::Response { done, rejected, pending }) => {
                    assert_eq!(rejected.contains(0), bytes != longest, "{bytes}");
                    // Traffic consumes the Receives that are too short.
                    if pending.contains(0) {
                        (0..64).for_each(|n| {
                            peer.send(&optional(100 + n, Direction::Reply, 3, &words(&[0; 3])))
                        });
                    }
                    done.contains(0) || rejected.contains(0)
                }
                Ok(Operation::Update { settled, .. }) => settled,
                other => panic!("{other:?}"),
            };
        }
        let payload = vec![7; longest as usize - 32 - 40 - 4];
        let call = rpc_call(3, SINK, &opaque(&payload[..payload.len() / 4 * 4]));
        let call = message_in(2, 3, Direction::Call, &Lists::default(), Some(&call));
        assert!(call.len() + 4 > longest as usize);
        send_whole(&mut peer, &call);
        assert!(matches!(decoded(&peer.message()).body, Body::Msg { .. }));
    }
    // Longer than the agreed size.
    peer.send(&message_in(2, 4, Direction::Call, &Lists::default(), Some(&[0; 5001])));
    let (frames, _) = peer.rest();
    assert!(matches!(frames[..], [] | [Frame::Terminate(Fault::TOO_LONG)]), "{frames:?}");
    drop(peer);
    server.end();
}

#[test]
fn thousands_of_requests_whose_answers_nobody_reads_hold_up_nobody() {
    let floods: [fn(u32) -> Vec<u8>; 5] = [
        |n| request(n, &[size(4096 + n % 2)]),
        |n| request(n, &[size(65_536); 60]),
        |n| optional(n, Direction::Call, 77, b""),
        |n| init(n, 1023),
        |n| init(n, 4096 + n % 2),
    ];
    let mut server = server(AUTO);
    for (n, flood) in floods.into_iter().enumerate() {
        let mut peer = server.open();
        // As many as TCP has room for the answers to: with more, this client may get stuck itself.
        for sent in (0..20_000).step_by(30) {
            let batch: Vec<u8> = (sent + 1..=sent + 30).flat_map(|n| send(n, &flood(n))).collect();
            assert!(peer.push_if_open(&batch), "{sent} messages of flood {n} end the connection");
            server.good.null();
        }
        drop(peer);
        server.settle();
    }
    // A crowd that asks for the longest Receives.
    let mut crowd: Vec<Peer> = (0..50).map(|_| server.open()).collect();
    for peer in &mut crowd {
        peer.send(&init(1, u32::MAX));
        peer.send(&request(2, &[size(65_536)]));
        server.settle();
    }
    drop(crowd);
    server.settle();
    assert!(server.peak() < 64 << 10, "{} kB", server.peak());
    server.end();
}
