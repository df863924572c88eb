//! Bad servers, and a C program that must notice: with the right `clnt_stat`, a text that says what is wrong, and in time.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use rpcrdma::provider::iwarp::ddp::{Fault, Opcode, ReadRequest};
use rpcrdma::provider::iwarp::mpa::{Enhanced, Which};
use rpcrdma::wire::header::{self, Body, Proc, RdmaError, Versions};
use rpcrdma::wire::lists::{Chunk, Lists};
use rpcrdma::wire::{Credits, Handle, Position, ReadSegment, Segment, Xid};

use crate::peer::*;
use crate::programs::{self, Outcome};

/// `enum clnt_stat`.
pub const SUCCESS: i32 = 0;
pub const CANTDECODERES: i32 = 2;
pub const CANTRECV: i32 = 4;
pub const TIMEDOUT: i32 = 5;
pub const FAILED: i32 = 16;

/// Runs a caller against `serve`, which gets each connection that it makes, with its number.
fn against(arguments: &[&str], valgrind: bool, serve: impl Fn(Peer, usize) + Sync) -> Outcome {
    against_with(&[], arguments, valgrind, serve)
}

/// The same with settings of the caller, as `NAME=value`.
pub fn against_with(
    settings: &[&str],
    arguments: &[&str],
    valgrind: bool,
    serve: impl Fn(Peer, usize) + Sync,
) -> Outcome {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    programs::prepare();
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            for number in 0.. {
                let (stream, _) = listener.accept().expect("a connection");
                // The last connection is our own.
                let peer = Peer::new(stream);
                if peer.is_goodbye() {
                    return;
                }
                serve(peer, number);
            }
        });
        let ended = programs::start_caller(port, settings, arguments, valgrind).end();
        Peer::connect(port).goodbye();
        serving.join().expect("the bad server's part");
        ended.outcome()
    })
}

/// What a bad server does on a connection.
type Part<'a> = &'a (dyn Fn(Peer) + Sync);

/// One case: what the caller does, what the server does wrong, and how the caller's last steps end.
struct Case<'a> {
    what: &'a str,
    /// The milliseconds that a call may take, and the steps.
    arguments: &'a [&'a str],
    serve: Part<'a>,
    statuses: &'a [i32],
    /// A part of the text.
    says: &'a str,
}

fn check(cases: &[Case]) {
    check_with(&[], cases);
}

/// The same with settings of the caller.
fn check_with(settings: &[&str], cases: &[Case]) {
    // Only a sample of them runs under valgrind too, which is slow.
    let sample = if programs::valgrind() { 5 } else { usize::MAX };
    for (n, case) in cases.iter().enumerate() {
        for valgrind in [false, true] {
            if valgrind && n % sample != sample - 1 {
                continue;
            }
            let outcome = against_with(settings, case.arguments, valgrind, |peer, _| (case.serve)(peer));
            assert_eq!(outcome.statuses, case.statuses, "{}: {}", case.what, outcome.text);
            assert!(outcome.text.contains(case.says), "{}: {}", case.what, outcome.text);
            let limit = if valgrind { hang() } else { hang() / 4 };
            assert!(outcome.took < limit, "{}: {:?}", case.what, outcome.took);
        }
    }
}

/// The call that a client makes: its XID, and the segments of its Reply chunk, Read list and Write list.
struct Call {
    xid: u32,
    chunk: Vec<Segment>,
    sources: Vec<Segment>,
    places: Vec<Chunk>,
}

/// Takes part in the startup.
pub fn accept(peer: &mut Peer) {
    peer.start_frame(Which::Request).expect("an MPA Request");
    peer.push(&reply().encode());
}

fn call(peer: &mut Peer) -> Call {
    let bytes = peer.message();
    let header = header::decode(&bytes, Versions::ONE).expect("a valid header");
    let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = header.body else { panic!("{header}") };
    let chunk = chunks.reply().map(|chunk| chunk.iter().collect()).unwrap_or_default();
    let sources = chunks.reads().map(|read| read.target).collect();
    Call { xid: header.xid.0, chunk, sources, places: chunks.to_lists().writes }
}

/// Reads until the client ends the connection.
pub fn until_end(peer: &mut Peer) -> Vec<Frame> {
    peer.rest().0
}

fn inline_reply(xid: u32, credits: u32, results: &[u8]) -> Vec<u8> {
    message(xid, credits, Proc::Msg, &Lists::default(), &rpc_reply(xid, results))
}

/// The header of a reply in the Reply chunk that claims these lengths.
fn chunk_reply(xid: u32, chunk: &[Segment]) -> Vec<u8> {
    message(xid, 32, Proc::Nomsg, &Lists { reply: Some(Chunk::from(chunk)), ..Lists::default() }, b"")
}

fn error(xid: u32, version: u32, error: RdmaError) -> Vec<u8> {
    let mut bytes = Vec::new();
    header::encode_error(&mut bytes, (Xid(xid), version, error), Credits(32));
    bytes
}

// ------------------------------------------------------------------------------------------------------- startup

/// A server that answers the MPA Request with these bytes and waits for the end.
fn answers(bytes: Vec<u8>) -> impl Fn(Peer) + Sync {
    move |mut peer| {
        peer.start_frame(Which::Request).expect("an MPA Request");
        peer.push(&bytes);
        until_end(&mut peer);
    }
}

#[test]
fn a_reply_that_is_none_makes_no_client_and_says_why() {
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = reply().encode();
        change(&mut bytes);
        answers(bytes)
    };
    let plain = || {
        let mut reply = reply();
        reply.enhanced = None;
        reply.encode()
    };
    let greedy = || {
        let mut reply = reply();
        reply.enhanced = Some(Enhanced { ird: 16, ord: 500, ..Enhanced::default() });
        reply.encode()
    };
    let cases: [(&str, Part, &str); 13] = [
        ("rejected", &changed(&|b| b[16] |= 0x20), "rejected"),
        ("markers", &changed(&|b| b[16] |= 0x80), "markers"),
        ("a wrong key", &changed(&|b| b[15] ^= 1), "does not speak MPA"),
        ("a Request in reply", &changed(&|b| b[10] = b'q'), "MPA"),
        ("its own words back", &answers(request()), "same role"),
        ("revision 0", &changed(&|b| b[17] = 0), "revision 0"),
        ("revision 9", &changed(&|b| b[17] = 9), "revision 9"),
        ("private data of 64 kB", &changed(&|b| b[18] = 0xff), "private data"),
        ("too little for S", &changed(&|b| (b[18], b[19]) = (0, 2)), "private data"),
        ("a plain Reply", &answers(plain()), "plain Reply"),
        ("more Reads than we serve", &answers(greedy()), "500"),
        ("another protocol", &answers(b"220 mail ESMTP\r\n".to_vec()), "does not speak MPA"),
        ("a close", &|mut peer| drop(peer.start_frame(Which::Request)), "closed the connection"),
    ];
    for (what, serve, says) in cases {
        let outcome = against(&["1000", "null"], false, |peer, _| serve(peer));
        assert!(outcome.statuses.len() == 1 && outcome.statuses[0] < 0, "{what}: {}", outcome.text);
        assert!(outcome.text.contains(says), "{what}: {}", outcome.text);
        assert!(outcome.took < hang() / 4, "{what}: {:?}", outcome.took);
    }
}

#[test]
fn every_cut_and_every_flip_of_the_reply_makes_a_client_or_an_error() {
    let whole = reply().encode();
    let step = if crate::servers::full() { 1 } else { 5 };
    for at in (0..whole.len()).step_by(step) {
        for reset in [false, true] {
            let outcome = against(&["500", "null"], false, |mut peer, _| {
                peer.start_frame(Which::Request).expect("an MPA Request");
                peer.push(&whole[..at]);
                if reset {
                    peer.reset();
                }
            });
            assert!(outcome.statuses.len() == 1 && outcome.statuses[0] < 0, "{at}: {}", outcome.text);
        }
        let outcome = against(&["500", "null"], false, |mut peer, _| {
            peer.start_frame(Which::Request).expect("an MPA Request");
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            peer.push(&bytes);
            peer.finish();
            // The undamaged part may be enough to create a client, whose call then finds the end.
            let _ = peer.rest();
        });
        assert!(outcome.statuses[0] != SUCCESS, "{at}: {}", outcome.text);
    }
}

#[test]
fn silence_instead_of_a_reply_is_a_timeout() {
    let outcome = against(&["1000", "null"], false, |mut peer, _| {
        peer.start_frame(Which::Request).expect("an MPA Request");
        peer.push(&reply().encode()[..7]);
        let _ = peer.frame();
    });
    assert_eq!(outcome.statuses, [-TIMEDOUT], "{}", outcome.text);
    assert!(outcome.took < hang(), "{:?}", outcome.took);
}

/// A server that is too busy for half a second is not taken for one of tcp, if falling back to tcp is not allowed.
#[test]
fn a_moved_client_without_fallback_waits_for_a_server_that_is_slow_to_begin() {
    let settings = ["NETID=tcp", "RPCRDMA_REDIRECT=tcp", "RPCRDMA_FALLBACK=no", "RPCRDMA_PROVIDER=iwarp"];
    let outcome = against_with(&settings, &["5000", "null"], false, |mut peer, _| {
        peer.start_frame(Which::Request).expect("an MPA Request");
        if peer.stirs_within(Duration::from_secs(1)) {
            return;
        }
        peer.push(&reply().encode());
        let call = call(&mut peer);
        peer.send(&inline_reply(call.xid, 32, &[]));
        until_end(&mut peer);
    });
    assert_eq!(outcome.statuses, [SUCCESS], "{}", outcome.text);
}

#[test]
fn private_data_of_any_form_is_understood() {
    let block = reply().private_data;
    let mut version = block.clone();
    version[4] = 2;
    for (what, data, threshold) in [
        ("none", vec![], 1024),
        ("too short", block[..7].to_vec(), 1024),
        ("of version 2", version, 1024),
        ("at an offset", [&[1, 2, 3][..], &block].concat(), 4096),
        ("with zeros behind", [&block[..], &[0; 100]].concat(), 4096),
        ("of 508 bytes", [&[0xf6, 0xab][..], &[0; 498], &block].concat(), 4096),
    ] {
        for length in [900, 1100] {
            let outcome = against(&["5000", &format!("echo:{length}")], false, |mut peer, _| {
                peer.start_frame(Which::Request).expect("an MPA Request");
                let mut reply = reply();
                reply.private_data = data.clone();
                peer.push(&reply.encode());
                let call = call(&mut peer);
                // Header, Call and argument: 28, 40, 4 and the bytes; and the Reply chunk that is provided.
                assert_eq!(call.sources.is_empty(), length + 28 + 40 + 24 <= threshold, "{what}: {length}");
                peer.send(&inline_reply(call.xid, 32, &opaque(&vec![0x5a; length])));
                until_end(&mut peer);
            });
            assert_eq!(outcome.statuses, [SUCCESS], "{what}: {}", outcome.text);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- replies

#[test]
fn replies_that_are_none_end_in_the_right_status() {
    let with = |then: &'static (dyn Fn(&mut Peer, Call) + Sync)| {
        move |mut peer: Peer| {
            accept(&mut peer);
            let call = call(&mut peer);
            then(&mut peer, call);
            until_end(&mut peer);
        }
    };
    // Only cases that end by a timeout have a short one: a slow machine must not be an error.
    let waits: &[&str] = &["300", "null"];
    let null: &[&str] = &["20000", "null"];
    let long: &[&str] = &["20000", "source:8000"];
    let sent: &[&str] = &["20000", "echo:8000"];
    check(&[
        Case {
            what: "no reply",
            arguments: waits,
            serve: &with(&|_, _| {}),
            statuses: &[TIMEDOUT],
            says: "imed out",
        },
        Case {
            what: "another XID",
            arguments: waits,
            serve: &with(&|peer, call| peer.send(&inline_reply(call.xid ^ 1, 32, b""))),
            statuses: &[TIMEDOUT],
            says: "imed out",
        },
        Case {
            what: "another XID inside",
            arguments: waits,
            serve: &with(&|peer, call| {
                let inner = rpc_reply(call.xid ^ 1, b"");
                peer.send(&message(call.xid, 32, Proc::Msg, &Lists::default(), &inner));
            }),
            statuses: &[TIMEDOUT],
            says: "imed out",
        },
        Case {
            what: "a close",
            arguments: null,
            serve: &|mut peer| {
                accept(&mut peer);
                call(&mut peer);
            },
            statuses: &[CANTRECV],
            says: "closed",
        },
        Case {
            what: "a reset",
            arguments: null,
            serve: &|mut peer| {
                accept(&mut peer);
                call(&mut peer);
                peer.reset();
            },
            statuses: &[CANTRECV],
            says: "eset",
        },
        Case {
            what: "garbage",
            arguments: null,
            serve: &with(&|peer, _| peer.push(&[0xee; 200])),
            statuses: &[CANTRECV],
            says: "broke the protocol",
        },
        Case {
            what: "a reply that ends early",
            arguments: null,
            serve: &with(&|peer, call| {
                let whole = inline_reply(call.xid, 32, b"");
                peer.send(&whole[..whole.len() - 8]);
            }),
            statuses: &[CANTDECODERES],
            says: "an't decode",
        },
        Case {
            what: "results that are too short",
            arguments: &["20000", "source:100"],
            serve: &with(&|peer, call| peer.send(&inline_reply(call.xid, 32, &words(&[100, 1])))),
            statuses: &[CANTDECODERES],
            says: "an't decode",
        },
        Case {
            what: "a length of 256 MiB in the results",
            arguments: &["20000", "source:100"],
            serve: &with(&|peer, call| peer.send(&inline_reply(call.xid, 32, &words(&[1 << 28, 1])))),
            statuses: &[CANTDECODERES],
            says: "an't decode",
        },
        Case {
            what: "ERR_CHUNK",
            arguments: long,
            serve: &with(&|peer, call| peer.send(&error(call.xid, 1, RdmaError::BadHeader))),
            statuses: &[FAILED],
            says: "ERR_CHUNK",
        },
        Case {
            what: "ERR_VERS",
            arguments: null,
            serve: &with(&|peer, call| {
                peer.send(&error(call.xid, 1, RdmaError::Version { low: 2, high: 7 }))
            }),
            statuses: &[FAILED],
            says: "versions 2 to 7",
        },
        Case {
            what: "RDMA_MSGP, RDMA_DONE and strangers before the reply",
            arguments: null,
            serve: &with(&|peer, call| {
                for proc in [2, 3, 4, 5, 77] {
                    peer.send(&words(&[call.xid, 1, 1, proc, 0, 0, 0]));
                }
                peer.send(b"");
                peer.send(&inline_reply(call.xid, 32, b""));
            }),
            statuses: &[SUCCESS],
            says: "",
        },
        Case {
            what: "a Reply chunk that was not offered",
            arguments: null,
            serve: &with(&|peer, call| peer.send(&chunk_reply(call.xid, &[segment(1, 24, 0)]))),
            statuses: &[FAILED],
            says: "none was offered",
        },
        Case {
            what: "another segment in the Reply chunk",
            arguments: long,
            serve: &with(&|peer, call| {
                peer.send(&chunk_reply(call.xid, &[segment(call.chunk[0].handle.0 ^ 1, 24, 0)]));
            }),
            statuses: &[FAILED],
            says: "was not offered",
        },
        Case {
            what: "more bytes than the Reply chunk has",
            arguments: long,
            serve: &with(&|peer, call| {
                peer.send(&chunk_reply(call.xid, &[Segment { length: u32::MAX, ..call.chunk[0] }]));
            }),
            statuses: &[FAILED],
            says: "more bytes than",
        },
        Case {
            what: "a Reply chunk into which nothing was written",
            arguments: long,
            serve: &with(&|peer, call| {
                peer.send(&chunk_reply(call.xid, &[Segment { length: 8032, ..call.chunk[0] }]));
            }),
            statuses: &[FAILED],
            says: "does not hold the reply",
        },
        Case {
            what: "a Write beyond the end of the Reply chunk",
            arguments: long,
            serve: &with(&|peer, call| {
                let segment = call.chunk[0];
                peer.push(&write(segment.handle.0, segment.offset + u64::from(segment.length) - 3, b"four"));
            }),
            statuses: &[CANTRECV],
            says: "base or bounds",
        },
        Case {
            what: "a Write that wraps",
            arguments: long,
            serve: &with(&|peer, call| peer.push(&write(call.chunk[0].handle.0, u64::MAX - 1, b"four"))),
            statuses: &[CANTRECV],
            says: "wrap",
        },
        Case {
            what: "a Write into the memory of the Call",
            arguments: sent,
            serve: &with(&|peer, call| peer.push(&write(call.sources[0].handle.0, 0, b"four"))),
            statuses: &[CANTRECV],
            says: "invalid STag",
        },
        Case {
            what: "a Read of the Reply chunk",
            arguments: long,
            serve: &with(&|peer, call| {
                let source_stag = call.chunk[0].handle.0;
                let read = ReadRequest { sink_stag: 1, sink_to: 0, size: 4, source_stag, source_to: 0 };
                peer.push(&read_request(1, read));
                let frames = until_end(peer);
                assert!(matches!(frames[..], [Frame::Terminate(Fault::READ_RIGHTS)]), "{frames:?}");
            }),
            statuses: &[CANTRECV],
            says: "access rights",
        },
        Case {
            what: "a Read beyond the end of the Call",
            arguments: sent,
            serve: &with(&|peer, call| {
                let source = call.sources[0];
                let read = ReadRequest {
                    sink_stag: 1,
                    sink_to: 0,
                    size: source.length + 1,
                    source_stag: source.handle.0,
                    source_to: source.offset,
                };
                peer.push(&read_request(1, read));
                let frames = until_end(peer);
                assert!(matches!(frames[..], [Frame::Terminate(Fault::READ_BOUNDS)]), "{frames:?}");
            }),
            statuses: &[CANTRECV],
            says: "base or bounds",
        },
        Case {
            what: "a Terminate",
            arguments: null,
            serve: &with(&|peer, _| peer.push(&terminate(Fault::CRC))),
            statuses: &[CANTRECV],
            says: "CRC mismatch",
        },
        Case {
            what: "a wrong CRC",
            arguments: null,
            serve: &with(&|peer, call| {
                let msn = peer.next_msn();
                let mut fpdu = send(msn, &inline_reply(call.xid, 32, b""));
                fpdu[40] ^= 1;
                peer.push(&fpdu);
            }),
            statuses: &[CANTRECV],
            says: "CRC mismatch",
        },
        Case {
            what: "an invalidation of what is not exposed",
            arguments: null,
            serve: &with(&|peer, call| {
                let msn = peer.next_msn();
                peer.push(&send_as(Opcode::SendInvalidate, 77, msn, &inline_reply(call.xid, 32, b"")));
            }),
            statuses: &[CANTRECV],
            says: "cannot be invalidated",
        },
    ]);
}

#[test]
fn a_connection_survives_what_is_wrong_with_one_call_only() {
    let outcome = against(&["300", "null", "source:8000", "null", "null", "null"], false, |mut peer, _| {
        accept(&mut peer);
        // The same reply twice; no call waits for the second.
        let first = call(&mut peer);
        for _ in 0..2 {
            peer.send(&inline_reply(first.xid, u32::MAX, b""));
        }
        let second = call(&mut peer);
        peer.send(&chunk_reply(second.xid, &[segment(9, 9, 9)]));
        // A Reply chunk is gone with its call, and a Write to it would be refused, so none is sent here. No credits at all.
        for _ in 0..3 {
            let next = call(&mut peer);
            peer.send(&inline_reply(next.xid, 0, b""));
        }
        until_end(&mut peer);
    });
    assert_eq!(outcome.statuses, [SUCCESS, FAILED, SUCCESS, SUCCESS, SUCCESS], "{}", outcome.text);
}

#[test]
fn a_write_after_the_reply_is_refused() {
    let outcome = against(&["2000", "source:8000", "null"], false, |mut peer, _| {
        accept(&mut peer);
        let first = call(&mut peer);
        let reply = rpc_reply(first.xid, &opaque(&[1; 8000]));
        let segment = first.chunk[0];
        peer.push(&write(segment.handle.0, segment.offset, &reply));
        peer.send(&chunk_reply(first.xid, &[Segment { length: reply.len() as u32, ..segment }]));
        call(&mut peer);
        peer.push(&write(segment.handle.0, segment.offset, b"late"));
        let frames = until_end(&mut peer);
        assert!(matches!(frames[..], [Frame::Terminate(Fault::STAG)]), "{frames:?}");
    });
    assert_eq!(outcome.statuses, [SUCCESS, CANTRECV], "{}", outcome.text);
}

#[test]
fn a_late_write_for_a_call_that_timed_out_is_no_error() {
    let outcome = against(&["300", "null", "source:8000", "null"], false, |mut peer, _| {
        accept(&mut peer);
        let first = call(&mut peer);
        peer.send(&inline_reply(first.xid, 32, b""));
        let late = call(&mut peer);
        // This call comes when the one before it has timed out.
        let next = call(&mut peer);
        let reply = rpc_reply(late.xid, &opaque(&[1; 8000]));
        peer.push(&write(late.chunk[0].handle.0, late.chunk[0].offset, &reply));
        peer.send(&chunk_reply(late.xid, &[Segment { length: reply.len() as u32, ..late.chunk[0] }]));
        peer.send(&inline_reply(next.xid, 32, b""));
        until_end(&mut peer);
    });
    assert_eq!(outcome.statuses, [SUCCESS, TIMEDOUT, SUCCESS], "{}", outcome.text);
}

#[test]
fn a_server_that_floods_a_client_does_not_keep_it_beyond_its_time() {
    let outcome = against(&["500", "null"], false, |mut peer, _| {
        accept(&mut peer);
        let stranger = inline_reply(call(&mut peer).xid ^ 1, 32, b"");
        // As fast as the socket takes them, until the client ends the connection.
        let mut msn = 1;
        loop {
            let batch: Vec<u8> = (msn..msn + 1000).flat_map(|msn| send(msn, &stranger)).collect();
            msn += 1000;
            if !peer.push_if_open(&batch) {
                return;
            }
        }
    });
    assert!(matches!(outcome.statuses[..], [TIMEDOUT | CANTRECV]), "{}", outcome.text);
    assert!(outcome.took < hang() / 4, "{:?}", outcome.took);
}

/// RFC 8167 §6: no server may call back before the client has said that it is ready.
#[test]
fn a_client_that_serves_nothing_answers_calls_back_in_the_midst_of_its_own() {
    let outcome = against(&["2000", "null", "null"], false, |mut peer, _| {
        accept(&mut peer);
        let first = call(&mut peer);
        // With the XID of its own call, on purpose.
        peer.send(&inline_call(first.xid, 1, b""));
        let unavailable: Vec<u8> =
            [first.xid, 1, 0, 0, 0, 1].into_iter().flat_map(u32::to_be_bytes).collect();
        assert_eq!(peer.message(), message(first.xid, 1, Proc::Msg, &Lists::default(), &unavailable));
        let reads = vec![ReadSegment { position: Position(0), target: segment(7, 5000, 0) }];
        peer.send(&message(9, 32, Proc::Nomsg, &Lists { reads, ..Lists::default() }, b""));
        let bytes = peer.message();
        assert_eq!(
            header::decode(&bytes, Versions::ONE).expect("a header").to_string(),
            "RDMA_ERROR xid 0x00000009 credits 1 ERR_CHUNK"
        );
        // Not an RPC message; an invalid header; a reply to nobody.
        peer.send(&message(first.xid, 32, Proc::Msg, &Lists::default(), b"abc"));
        peer.send(&message(10, 32, Proc::Msg, &Lists::default(), b"")[..20]);
        peer.send(&inline_reply(11, 32, b""));
        peer.send(&inline_reply(first.xid, 32, b""));
        let second = call(&mut peer);
        peer.send(&inline_reply(second.xid, 32, b""));
        until_end(&mut peer);
    });
    assert_eq!(outcome.statuses, [SUCCESS, SUCCESS], "{}", outcome.text);
}

#[test]
fn a_server_that_calls_back_without_end_and_reads_no_answer_does_not_keep_a_client_beyond_its_time() {
    let outcome = against(&["500", "null"], false, |mut peer, _| {
        accept(&mut peer);
        let back = inline_call(call(&mut peer).xid, 1, b"");
        let mut msn = 1;
        loop {
            let batch: Vec<u8> = (msn..msn + 1000).flat_map(|msn| send(msn, &back)).collect();
            msn += 1000;
            if !peer.push_if_open(&batch) {
                return;
            }
        }
    });
    assert!(matches!(outcome.statuses[..], [TIMEDOUT | CANTRECV]), "{}", outcome.text);
    assert!(outcome.took < hang() / 4, "{:?}", outcome.took);
}

#[test]
fn every_cut_and_every_flip_of_a_reply_ends_in_an_error_or_the_reply() {
    let step = if crate::servers::full() { 1 } else { 7 };
    let length = send(1, &inline_reply(0, 32, &opaque(b"reply"))).len();
    for at in (0..length).step_by(step) {
        for (seal_it, cut) in [(false, false), (true, false), (false, true)] {
            let outcome = against(&["200", "source:5"], false, |mut peer, _| {
                accept(&mut peer);
                let call = call(&mut peer);
                let mut fpdu = send(1, &inline_reply(call.xid, 32, &opaque(b"reply")));
                match (cut, seal_it) {
                    (true, _) => fpdu.truncate(at),
                    (false, sealed) => {
                        fpdu[at] ^= 0xff;
                        if sealed {
                            seal(&mut fpdu);
                        }
                    }
                }
                peer.push(&fpdu);
                peer.finish();
                let _ = peer.rest();
            });
            let [status] = outcome.statuses[..] else { panic!("{}", outcome.text) };
            assert!(seal_it || status == CANTRECV, "{at}: {}", outcome.text);
            assert!(outcome.took < hang() / 4, "{at}: {:?}", outcome.took);
        }
    }
}

// ----------------------------------------------------------------------------------------------- direct placement

/// SINK and SOURCE of the suite.
const BINDINGS: &str = "\
    0x20005355 2 3 arguments=data results=int,hyper\n\
    0x20005355 2 4 arguments=count results=data preset\n";

/// A reply whose results lie partly in Write chunks.
fn placed_reply(xid: u32, writes: Vec<Chunk>, results: &[u8]) -> Vec<u8> {
    message(xid, 32, Proc::Msg, &Lists { writes, ..Lists::default() }, &rpc_reply(xid, results))
}

/// The only segment of the only Write chunk of a call.
fn place(call: &Call) -> Segment {
    let [chunk] = &call.places[..] else { panic!("{:?}", call.places) };
    let [segment] = chunk[..] else { panic!("{chunk:?}") };
    segment
}

fn unused(chunk: &[Segment]) -> Chunk {
    chunk.iter().map(|segment| Segment { length: 0, ..*segment }).collect()
}

#[test]
fn results_in_write_chunks_that_do_not_fit_together_end_in_the_right_status() {
    let bindings = programs::bindings("clients", BINDINGS);
    // What a server does with a SOURCE of 8000 bytes whose Write chunk is the Segment, the status, and a part of the text.
    type Reply<'a> = &'a (dyn Fn(&mut Peer, Call, Segment) + Sync);
    let returned = |change: &'static (dyn Fn(Segment) -> Vec<Chunk> + Sync), length: u32| {
        move |peer: &mut Peer, call: Call, place| {
            peer.send(&placed_reply(call.xid, change(place), &words(&[length])));
        }
    };
    let source: [(&str, Reply, i32, &str); 14] = [
        (
            "the result in its place",
            &|peer, call, place| {
                peer.push(&write(place.handle.0, place.offset, &[7; 8000]));
                peer.send(&placed_reply(call.xid, call.places, &words(&[8000])));
            },
            SUCCESS,
            "",
        ),
        (
            "an invalidation of what the call named",
            &|peer, call, place| {
                peer.push(&write(place.handle.0, place.offset, &[7; 8000]));
                let msn = peer.next_msn();
                let reply = placed_reply(call.xid, call.places, &words(&[8000]));
                peer.push(&send_as(Opcode::SendInvalidate, place.handle.0, msn, &reply));
            },
            SUCCESS,
            "",
        ),
        (
            "more bytes than were offered",
            &returned(&|place| vec![[Segment { length: 8001, ..place }].into()], 8001),
            FAILED,
            "more bytes than",
        ),
        (
            "another handle",
            &returned(&|place| vec![[Segment { handle: Handle(place.handle.0 ^ 1), ..place }].into()], 8000),
            FAILED,
            "was not offered",
        ),
        (
            "another offset",
            &returned(&|place| vec![[Segment { offset: place.offset + 4, length: 4, ..place }].into()], 4),
            FAILED,
            "was not offered",
        ),
        (
            "a segment too many",
            &returned(&|place| vec![vec![place; 2].into()], 8000),
            FAILED,
            "more segments than",
        ),
        (
            "a chunk too many",
            &returned(&|place| vec![[place].into(), [place].into()], 8000),
            FAILED,
            "more Write chunks than",
        ),
        (
            "a length of more than was written",
            &returned(&|place| vec![[Segment { length: 4000, ..place }].into()], 8000),
            FAILED,
            "Write chunk",
        ),
        (
            "a length of less than was written",
            &returned(&|place| vec![[place].into()], 4000),
            FAILED,
            "Write chunk",
        ),
        ("a length of 4 GiB", &returned(&|place| vec![[place].into()], u32::MAX), FAILED, "Write chunk"),
        ("no result at all", &returned(&|place| vec![unused(&[place])], 8000), CANTDECODERES, "decode"),
        (
            "data of a call that failed",
            &|peer, call, _| {
                let lists = Lists { writes: call.places, ..Lists::default() };
                // PROC_UNAVAIL
                let failure = words(&[call.xid, 1, 0, 0, 0, 3]);
                peer.send(&message(call.xid, 32, Proc::Msg, &lists, &failure));
            },
            FAILED,
            "no eligible result",
        ),
        (
            "a Write beyond the end of its chunk",
            &|peer, _, place| {
                peer.push(&write(place.handle.0, place.offset + u64::from(place.length) - 3, b"four"));
                let frames = until_end(peer);
                assert!(matches!(frames[..], [Frame::Terminate(Fault::BOUNDS)]), "{frames:?}");
            },
            CANTRECV,
            "base or bounds",
        ),
        (
            "more Writes than the chunk has room for",
            &|peer, _, place| {
                for at in 0..9 {
                    peer.push(&write(place.handle.0, place.offset + 1000 * at, &[7; 1000]));
                }
            },
            CANTRECV,
            "base or bounds",
        ),
    ];
    let read: [(&str, Reply, i32, &str); 2] = [
        (
            "data of READ in its place",
            &|peer, call, place| {
                peer.push(&write(place.handle.0, place.offset, &[7; 8000]));
                peer.send(&placed_reply(call.xid, call.places, &words(&[0, 0, 8000, 0, 8000])));
            },
            SUCCESS,
            "",
        ),
        (
            "data of READ in the message",
            &|peer, call, place| {
                let results = [words(&[0, 0, 50, 0]), opaque(&[7; 50])].concat();
                peer.send(&placed_reply(call.xid, vec![unused(&[place])], &results));
            },
            FAILED,
            "outside of the Write chunk",
        ),
    ];
    let source = source.into_iter().map(|case| (&["300", "source:8000"], case));
    let read = read.into_iter().map(|case| (&["300", "read:8000"], case));
    for (arguments, (what, reply, status, says)) in source.chain(read) {
        let serve: Part = &|mut peer| {
            accept(&mut peer);
            let call = call(&mut peer);
            let place = place(&call);
            reply(&mut peer, call, place);
            until_end(&mut peer);
        };
        check_with(&[&bindings], &[Case { what, arguments, serve, statuses: &[status], says }]);
    }
}

#[test]
fn a_server_without_the_binding_is_served_its_way() {
    let bindings = programs::bindings("unknown", BINDINGS);
    let outcome = against_with(&[&bindings], &["300", "source:8000", "source:8000"], false, |mut peer, _| {
        accept(&mut peer);
        for offered in [1, 0] {
            let call = call(&mut peer);
            assert_eq!(call.places.len(), offered, "Write chunks");
            let reply = rpc_reply(call.xid, &opaque(&[7; 8000]));
            let into = call.chunk[0];
            peer.push(&write(into.handle.0, into.offset, &reply));
            let writes = call.places.iter().map(|chunk| unused(chunk)).collect();
            let reply = Some([Segment { length: reply.len() as u32, ..into }].into());
            let lists = Lists { writes, reply, ..Lists::default() };
            peer.send(&message(call.xid, 32, Proc::Nomsg, &lists, b""));
        }
        until_end(&mut peer);
    });
    assert_eq!(outcome.statuses, [SUCCESS, SUCCESS], "{}", outcome.text);
}

#[test]
fn an_invalidation_of_what_another_call_named_ends_the_connection() {
    let bindings = programs::bindings("invalidation", BINDINGS);
    let steps = ["300", "null", "source:8000", "null"];
    let outcome = against_with(&[&bindings], &steps, false, |mut peer, _| {
        accept(&mut peer);
        let first = call(&mut peer);
        peer.send(&inline_reply(first.xid, 32, b""));
        let late = call(&mut peer);
        let next = call(&mut peer);
        let (msn, reply) = (peer.next_msn(), inline_reply(next.xid, 32, b""));
        peer.push(&send_as(Opcode::SendInvalidate, place(&late).handle.0, msn, &reply));
        until_end(&mut peer);
    });
    assert_eq!(outcome.statuses, [SUCCESS, TIMEDOUT, CANTRECV], "{}", outcome.text);
    assert!(outcome.text.contains("did not name"), "{}", outcome.text);
}

#[test]
fn nothing_that_comes_late_changes_a_buffer_of_the_program() {
    let bindings = programs::bindings("late", BINDINGS);
    let steps = ["300", "null", "preset:100000", "check", "null", "check", "null", "check", "preset:100000"];
    let outcome = against_with(&[&bindings], &steps, false, |mut peer, _| {
        accept(&mut peer);
        let first = call(&mut peer);
        peer.send(&inline_reply(first.xid, 32, b""));
        let late = call(&mut peer);
        let into = place(&late);
        assert_eq!(into.length, 100_000);
        // The call times out in the middle of an FPDU.
        let begun = write(into.handle.0, into.offset, &[7; 60_000]);
        peer.push(&begun[..20_000]);
        let next = call(&mut peer);
        peer.push(&begun[20_000..]);
        peer.push(&write(into.handle.0, into.offset + 60_000, &[8; 40_000]));
        peer.send(&inline_reply(next.xid, 32, b""));
        let next = call(&mut peer);
        peer.push(&write(into.handle.0, into.offset, &[9; 60_000]));
        peer.send(&placed_reply(late.xid, late.places, &words(&[100_000])));
        peer.send(&inline_reply(next.xid, 32, b""));
        // This one comes in time; the caller wants it in its own buffer.
        let last = call(&mut peer);
        let into = place(&last);
        for half in [0, 50_000] {
            peer.push(&write(into.handle.0, into.offset + half, &[7; 50_000]));
        }
        peer.send(&placed_reply(last.xid, last.places, &words(&[100_000])));
        until_end(&mut peer);
    });
    let wanted = [SUCCESS, TIMEDOUT, 0, SUCCESS, 0, SUCCESS, 0, SUCCESS];
    assert_eq!(outcome.statuses, wanted, "{}", outcome.text);
}

#[test]
fn arguments_that_are_read_late_are_those_of_the_call() {
    const LENGTH: u32 = 8 << 20;
    let bindings = programs::bindings("arguments", BINDINGS);
    let bell = TcpListener::bind("127.0.0.1:0").expect("a port");
    let ring = format!("bell:{}", bell.local_addr().expect("bound").port());
    let steps = ["300", "null", &format!("sink:{LENGTH}"), &ring, "null"];
    for in_time in [false, true] {
        let outcome = against_with(&[&bindings, "RPCRDMA_INLINE=4096"], &steps, false, |mut peer, _| {
            accept(&mut peer);
            let first = call(&mut peer);
            peer.send(&inline_reply(first.xid, 32, b""));
            let late = call(&mut peer);
            let [source] = late.sources[..] else { panic!("{:?}", late.sources) };
            let (source_stag, source_to) = (source.handle.0, source.offset);
            let request = ReadRequest { sink_stag: 1, sink_to: 0, size: LENGTH, source_stag, source_to };
            // More than the socket takes: the rest waits at the client, whose call ends meanwhile.
            if in_time {
                peer.push(&read_request(1, request));
            }
            bell.accept().expect("the call has ended, and its argument has changed");
            if !in_time {
                peer.push(&read_request(1, request));
            }
            let (mut came, mut next) = (0, None);
            while came < LENGTH as usize || next.is_none() {
                match peer.frame() {
                    Ok(Frame::ReadResponse(bytes)) => {
                        assert!(bytes.iter().all(|byte| *byte == 0x5a), "changed behind {came} bytes");
                        came += bytes.len();
                    }
                    Ok(Frame::Send { bytes, .. }) => {
                        next = Some(header::decode(&bytes, Versions::ONE).expect("a valid header").xid.0)
                    }
                    other => panic!("{other:?} behind {came} bytes"),
                }
            }
            peer.send(&inline_reply(next.unwrap_or_default(), 32, b""));
            until_end(&mut peer);
        });
        assert_eq!(outcome.statuses, [SUCCESS, TIMEDOUT, 0, SUCCESS], "{}", outcome.text);
    }
}
