//! The engine's rules, each shown by two engines joined by devices of memory ([`pair`]): no clock, no socket, no thread.
//!
//! The rules named beside the tests are those of RFC 8166, numbered in the order of the project's list of them:
//! 1 to 21 framing, 22 to 38 credits, 56 to 72 errors, 88 to 98 Long messages, 99 to 107 memory. Those that must hold
//! at any time are checked by the pair after every step of every test.
#![forbid(unsafe_code)]

mod both;
mod pair;
mod placement;
mod simulation;
mod two;

use super::requester::*;
use super::responder::*;
use super::*;
use crate::memory::{Given, PassStage, Program};
use crate::reserve::testing::NoLongBlocks;
use crate::wire::characteristics::{self as operations, Characteristic};
use crate::wire::header::{Proc, RdmaError};
use crate::wire::lists::Lists;
use crate::wire::{Credits, Position, ReadSegment};
use pair::*;

// ----------------------------------------------------------------------------------------------- framing and header

/// rule 2, rule 3, rule 9, rule 21
#[test]
fn a_short_call_and_its_reply_are_seven_words_and_the_message() {
    let mut pair = Pair::new();
    pair.call(0x1234_5678, 40, 28);
    assert_eq!(unwords(&pair.last(Client)[..28]), [0x1234_5678, 1, 4, 0, 0, 0, 0]);
    assert_eq!(pair.last(Client)[28..], call_message(0x1234_5678, 40, 28, false));
    pair.drive();
    assert_eq!(unwords(&pair.last(Server)[..28]), [0x1234_5678, 1, 4, 0, 0, 0, 0]);
    assert_eq!(pair.last(Server)[28..], reply_message(0x1234_5678, 28));
    pair.succeeded(0x1234_5678);
}

/// rule 2, rule 21, rule 90, rule 97
#[test]
fn a_long_call_with_a_long_reply_has_its_lists_word_by_word() {
    let mut pair = Pair::with(Setup { max_segment: 1500, ..SETUP });
    pair.call(7, 2000, 1700);
    let call = unwords(pair.last(Client));
    let handles = &pair.made[&7].handles;
    let offset = offset_of(handles[0].0);
    let (hi, lo) = ((offset >> 32) as u32, offset as u32);
    assert_eq!(call[..4], [7, 1, 4, 1]);
    assert_eq!(call[4..10], [1, 0, handles[0].0, 1500, hi, lo]);
    assert_eq!(call[10..14], [1, 0, handles[1].0, 500]);
    assert_eq!(call[16..20], [0, 0, 1, 2]);
    assert_eq!((call[20], call[21], call[24], call[25]), (handles[2].0, 1500, handles[3].0, 200));
    assert_eq!(call.len(), 28);
    pair.drive();
    let reply = unwords(pair.last(Server));
    assert_eq!(reply[..8], [7, 1, 4, 1, 0, 0, 1, 2]);
    assert_eq!(reply[8..], call[20..]);
    pair.succeeded(7);
}

/// rule 10, rule 11, rule 19, rule 20, rule 58
#[test]
fn a_responder_takes_every_combination_of_lists_that_has_one_payload_and_refuses_the_others() {
    for lists in 0..8 {
        for proc in [0, 1] {
            for position in [0, 8] {
                let (with_reads, with_writes, with_reply) = (lists & 1 > 0, lists & 2 > 0, lists & 4 > 0);
                let mut pair = Pair::new();
                let source = pair.buf(&call_message(5, 64, 28, false));
                let source = pair.client.device.expose_source(source.freeze()).unwrap();
                let sink = |pair: &mut Pair| {
                    let sink = Buf::with_capacity(100).unwrap().into_sink(100);
                    pair.client.device.expose_sink(sink).unwrap()
                };
                let mut call = words(&[5, 1, 4, proc]);
                if with_reads {
                    call.extend([words(&[1, position]), segments(&[source])].concat());
                }
                call.extend(words(&[0]));
                let write = sink(&mut pair);
                if with_writes {
                    call.extend([words(&[1, 1]), segments(&[write])].concat());
                }
                call.extend(words(&[0]));
                let reply = sink(&mut pair);
                if with_reply {
                    call.extend([words(&[1, 1]), segments(&[reply])].concat());
                } else {
                    call.extend(words(&[0]));
                }
                if proc == 0 {
                    call.extend(call_message(5, 16, 28, false));
                }
                pair.inject(Server, &call);
                pair.settle();
                let good = if proc == 0 { !with_reads || position != 0 } else { with_reads && position == 0 };
                let what = format!("lists {lists:03b}, procedure {proc}, position {position}");
                assert_eq!(pair.server.engine.request_ready(), good, "{what}");
                if good {
                    assert!(pair.take() && pair.answer(0).is_ok());
                    let header = header::decode(pair.last(Server), Versions::ONE).unwrap();
                    let Body::Msg { chunks, .. } = header.body else { panic!("{what}: {header}") };
                    assert_eq!(chunks.write_count(), usize::from(with_writes));
                    assert!(chunks.writes().all(|c| c.iter().eq([Segment { length: 0, ..write }])));
                    assert_eq!(chunks.reply().is_some(), with_reply);
                } else {
                    assert_eq!(unwords(pair.last(Server)), [5, 1, 4, 4, 2], "{what}");
                }
                assert_eq!(pair.sends(Server), 1);
            }
        }
    }
}

/// rule 12, rule 13, rule 89, rule 91, rule 94: each side of every boundary.
#[test]
fn a_send_of_exactly_the_threshold_goes_inline_and_a_byte_more_goes_long() {
    for inline in [1024, 4096, 262_144] {
        for with_reply_chunk in [false, true] {
            let max_reply = if with_reply_chunk { inline - 27 } else { inline - 28 };
            let header = if with_reply_chunk { 28 + 4 + 16 } else { 28 };
            for (xid, (over, long)) in (1..).zip([(0, false), (1, true)]) {
                let mut pair = Pair::warm(setup(4, inline));
                pair.call(xid, inline - header + over, max_reply);
                let sent = header::decode(pair.last(Client), Versions::ONE).unwrap();
                assert_eq!(
                    matches!(sent.body, Body::Nomsg { .. }),
                    long,
                    "{inline} {with_reply_chunk} {over}"
                );
                assert_eq!(pair.last(Client).len() == inline, !long);
                assert_eq!(!offered(&pair).is_empty(), with_reply_chunk);
                pair.drive();
                pair.succeeded(xid);
            }
        }
    }
}

/// rule 31, rule 32, rule 33, rule 34, rule 96
#[test]
fn the_smaller_of_both_ends_bounds_each_direction_from_1024_bytes_to_256_kib() {
    let ends = [1024, 2048, 4096, 65_536, 262_144];
    for client in ends {
        for server in ends {
            let settings = |inline| Settings { inline, ..SETTINGS };
            let setup = Setup { client: settings(client), server: settings(server), ..SETUP };
            let mut pair = Pair::warm(setup);
            let inline = client.min(server);
            assert_eq!(pair.client.engine.thresholds(), (inline, inline));
            assert_eq!(pair.server.engine.thresholds(), (inline, inline));
            for (xid, len) in (1..).zip([4, 1000, inline - 28, inline - 27, inline + 1, 300_001]) {
                pair.call(xid, len, len);
                pair.drive();
                pair.succeeded(xid);
            }
        }
    }
}

/// rule 33
#[test]
fn a_peer_without_private_data_gets_and_sends_at_most_1024_bytes() {
    let memory = Memory::new(4096, 1 << 20, 1 << 26);
    for role in [Role::Client, Role::Server] {
        let settings = Settings { inline: 4096, ..SETTINGS };
        let engine = Connection::new(role, settings, PrivateData::ABSENT, memory.clone(), bindings());
        assert_eq!(engine.thresholds(), (1024, 1024));
    }
}

/// rule 6, rule 58: the same mistake inline and in the Position-Zero Read chunk.
#[test]
fn a_call_whose_message_has_another_xid_is_answered_with_err_chunk() {
    let mut pair = Pair::new();
    pair.inject(Server, &msg(5, 4, &call_message(6, 40, 28, false)));
    assert_eq!(unwords(pair.last(Server)), [5, 1, 4, 4, 2]);
    let source = pair.buf(&call_message(6, 2000, 28, false));
    let source = pair.client.device.expose_source(source.freeze()).unwrap();
    pair.inject(Server, &[words(&[7, 1, 4, 1, 1, 0]), segments(&[source]), words(&[0, 0, 0])].concat());
    pair.settle();
    assert_eq!(unwords(pair.last(Server)), [7, 1, 4, 4, 2]);
    assert_eq!(pair.server.engine.requests_queued(), 0);
    pair.still_serves(8);
}

/// rule 6, rule 58: a message too short to hold an XID.
#[test]
fn a_call_without_a_whole_xid_is_answered_with_err_chunk() {
    let mut pair = Pair::new();
    for len in 0..4 {
        pair.inject(Server, &msg(5, 4, &[0, 0, 0, 5][..len]));
        assert_eq!(unwords(pair.last(Server)), [5, 1, 4, 4, 2]);
    }
    let source = pair.buf(&[0, 0, 0]);
    let source = pair.client.device.expose_source(source.freeze()).unwrap();
    pair.inject(Server, &[words(&[7, 1, 4, 1, 1, 0]), segments(&[source]), words(&[0, 0, 0])].concat());
    pair.settle();
    assert_eq!(unwords(pair.last(Server)), [7, 1, 4, 4, 2]);
    assert_eq!(pair.sends(Server), 5);
    pair.still_serves(8);
}

/// rule 6: what our own upper layer must not do either.
#[test]
fn a_call_or_reply_that_does_not_begin_with_its_xid_is_not_sent() {
    let mut pair = Pair::new();
    for message in [&b""[..], b"\0\0\0", b"\0\0\0\x06"] {
        let message = pair.buf(message);
        let End { engine, device, .. } = &mut pair.client;
        let error = engine.call(Xid(5), message, reply_of(28), device).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(!engine.knows(Xid(5)) && engine.poll_output().is_none());
    }
    pair.call(5, 40, 28);
    pair.settle();
    assert!(pair.take());
    let id = pair.handed[0].id;
    for message in [&b""[..], b"\0\0\0", b"\0\0\0\x06"] {
        let message = pair.buf(message);
        assert_eq!(pair.server.engine.reply(id, message).unwrap_err().kind(), Kind::Invalid);
        assert!(pair.server.engine.poll_output().is_none());
    }
    pair.answer(0).unwrap();
    pair.drive();
    pair.succeeded(5);
}

#[test]
fn what_is_lent_of_a_short_message_is_copied_when_it_is_sent() {
    let mut pair = Pair::new();
    let lending = |pair: &Pair, whole: &[u8]| {
        let (own, tail) = whole.split_at(whole.len() - 8);
        let mut program = Program::new(tail);
        let body = pair.buf(&[own, &[0; 8]].concat());
        let message = Message::new(body, vec![(own.len(), program.source())]);
        (message, program)
    };
    let (message, program) = lending(&pair, &call_message(5, 40, 28, false));
    pair.note(5, 40, 28, false);
    let End { engine, device, .. } = &mut pair.client;
    engine.call(Xid(5), message, reply_of(28), device).unwrap();
    assert!(program.is_back(), "the device reads the program's memory");
    pair.drain(Client);
    pair.settle();
    assert!(pair.take(), "the call has come as it was");
    let (message, program) = lending(&pair, &reply_message(5, 28));
    let Request { id, .. } = pair.handed.remove(0);
    pair.server.engine.reply(id, message).unwrap();
    assert!(program.is_back(), "the device reads the program's memory");
    pair.drain(Server);
    pair.settle();
    pair.succeeded(5);
}

#[test]
fn a_request_whose_reply_was_not_sent_is_still_found_among_the_others() {
    let mut pair = Pair::new();
    pair.call(1, 40, 28);
    pair.drive();
    for xid in 2..6 {
        pair.call(xid, 40, 28);
    }
    pair.settle();
    while pair.take() {}
    assert_eq!(pair.handed.len(), 4);
    for at in [1, 0] {
        let (id, wrong) = (pair.handed[at].id, pair.buf(&reply_message(9, 28)));
        assert_eq!(pair.server.engine.reply(id, wrong).unwrap_err().kind(), Kind::Invalid);
    }
    for at in [2, 1, 0, 0] {
        pair.answer(at).unwrap();
    }
    pair.settle();
    (1..6).for_each(|xid| pair.succeeded(xid));
}

// -------------------------------------------------------------------------------------------- credits and Receives

/// rule 30
#[test]
fn the_first_call_goes_alone_until_its_reply_tells_the_grant() {
    let mut pair = Pair::new();
    for xid in 1..=6 {
        pair.call(xid, 40, 28);
    }
    assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (1, 0));
    assert!(pair.client.engine.transmitted(Xid(1)) && !pair.client.engine.transmitted(Xid(2)));
    pair.settle();
    assert_eq!(pair.sends(Client), 1);
    assert!(pair.serve());
    pair.settle();
    assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (1 + 4, 0));
    pair.drive();
    assert_eq!(pair.client.engine.credits_left(), 4);
    for xid in 1..=6 {
        pair.succeeded(xid);
    }
}

/// A call that nobody answers holds the only credit; nothing comes that would have the others go out.
#[test]
fn calls_that_wait_for_a_credit_go_out_when_more_are_asked_for() {
    let mut pair = Pair::warm(Setup { client: Settings { credits: 1, ..SETTINGS }, ..SETUP });
    pair.hold_replies = true;
    for xid in 1..=3 {
        pair.call(xid, 40, 28);
    }
    assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (1, 0));
    // What is told is constant in these tests but here.
    pair.client.settings.credits = 4;
    assert_eq!(pair.client.ask(4), 4);
    pair.drain(Client);
    assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (3, 1));
    pair.hold_replies = false;
    pair.drive();
    for xid in 1..=3 {
        pair.succeeded(xid);
    }
}

/// rule 30: an error is no valid reply.
#[test]
fn an_error_to_the_first_call_leaves_one_credit() {
    for error in [err_chunk(1), err_vers(1, 1, 1, 1)] {
        let mut pair = Pair::new();
        for xid in 1..=3 {
            pair.call(xid, 40, 28);
        }
        pair.inject(Client, &error);
        assert_eq!(pair.failure(1), Kind::Peer);
        assert_eq!((pair.client.engine.granted(), pair.sends(Client)), (1, 2));
    }
}

/// rule 22, rule 25: the constant stands in every header, whatever the load.
#[test]
fn credits_asked_and_granted_are_the_same_in_every_header() {
    let settings = |credits| Settings { credits, ..SETTINGS };
    let mut pair = Pair::with(Setup { client: settings(9), server: settings(5), ..SETUP });
    for xid in 0..40 {
        if xid % 10 == 9 {
            pair.one_way(xid, 40);
        } else {
            // A reply over the room for it ends in RDMA_ERROR, which carries the field as well.
            let max_reply = if xid % 10 == 8 { 28 } else { 3000 };
            pair.start(xid, 40 + 100 * xid as usize, 3000, reply_of(max_reply));
        }
        pair.step();
    }
    pair.drive();
    for (side, message) in &pair.wire {
        assert_eq!(unwords(&message[..16])[2], if *side == Client { 9 } else { 5 });
    }
    assert!(pair.wire.iter().any(|(_, message)| unwords(&message[..16])[3] == 4));
    assert!(pair.sends(Server) >= 36);
}

/// rule 22, rule 30
#[test]
fn a_setting_of_no_credits_is_taken_as_one() {
    let mut pair = Pair::with(setup(0, 1024));
    for xid in 1..=3 {
        pair.call(xid, 2000, 3000);
    }
    pair.drive();
    for xid in 1..=3 {
        pair.succeeded(xid);
    }
}

/// RFC 8167 §4.3.1: each direction has its Receives, whatever is asked for and in whatever order.
#[test]
fn both_directions_together_never_post_more_receives_than_the_device_holds() {
    for (credits, receives) in [(24, 32), (4096, 32), (4, 12), (1, 10)] {
        let settings = Settings { credits, receives, ..SETTINGS };
        let mut pair = Pair::with(Setup { client: settings, server: settings, ..SETUP });
        for wanted in [16, 4096, 1] {
            assert!(pair.client.engine.grant(wanted) >= 1 && pair.client.ask(wanted) >= 1);
            assert!(pair.server.ask(wanted) >= 1 && pair.server.engine.grant(wanted) >= 1);
            pair.settle();
            for device in [&pair.client.device, &pair.server.device] {
                assert!(device.receives <= receives, "{} of {receives}", device.receives);
            }
        }
    }
}

/// rule 22: the other end's mistake does not stop us for ever.
#[test]
fn a_grant_of_zero_is_taken_as_one() {
    let mut pair = Pair::new();
    pair.call(1, 40, 28);
    pair.call(2, 40, 28);
    pair.inject(Client, &msg(1, 0, &reply_message(1, 28)));
    assert_eq!((pair.client.engine.granted(), pair.sends(Client)), (1, 2));
}

/// rule 23, rule 24, rule 25
#[test]
fn a_grant_that_shrinks_holds_new_calls_back_and_one_that_rises_lets_them_go() {
    let mut pair = Pair::new();
    pair.hold_calls = true;
    for xid in 1..=12 {
        pair.call(xid, 40, 28);
    }
    let reply = |pair: &mut Pair, xid: u32, credits: u32| {
        pair.inject(Client, &msg(xid, credits, &reply_message(xid, 28)));
        (pair.sends(Client), pair.client.engine.credits_left())
    };
    assert_eq!(reply(&mut pair, 1, 4), (5, 0), "calls 2 to 5 are under way");
    assert_eq!(reply(&mut pair, 2, 2), (5, 0), "three under way, two granted");
    assert_eq!(reply(&mut pair, 3, 2), (5, 0));
    assert_eq!(reply(&mut pair, 4, 2), (6, 0));
    assert_eq!(reply(&mut pair, 5, 3), (8, 0));
    assert_eq!(reply(&mut pair, 6, u32::MAX), (10, 0), "never more than was asked for");
    for xid in 7..=12 {
        reply(&mut pair, xid, 4);
    }
    assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (12, 4));
}

/// rule 23: at the responder, the transaction of an orphan is under way like any other.
#[test]
fn an_orphan_keeps_its_credit_while_the_responder_may_be_at_work_on_it() {
    let mut pair = Pair::warm(setup(2, 1024));
    pair.call(1, 40, 28);
    pair.call(2, 40, 28);
    pair.settle();
    assert!(pair.take() && pair.take());
    pair.abandon(1);
    pair.answer(1).unwrap();
    pair.settle();
    pair.succeeded(2);
    pair.call(3, 40, 28);
    pair.call(4, 40, 28);
    assert!(pair.client.engine.transmitted(Xid(3)) && !pair.client.engine.transmitted(Xid(4)));
    pair.answer(0).unwrap();
    pair.settle();
    assert!(pair.client.engine.transmitted(Xid(4)), "the late reply gives the credit back");
    pair.drive();
    pair.succeeded(4);
}

/// rule 23, rule 100: the memory of a cancelled call is neither reused nor looked at before it is invalidated.
#[test]
fn a_late_reply_to_an_orphan_finds_its_memory_and_ends_its_exposure() {
    let mut pair = Pair::warm(SETUP);
    pair.call(1, 3000, 5000);
    pair.settle();
    pair.abandon(1);
    assert_eq!(pair.client.device.exposed.len(), 2);
    assert!(pair.client.engine.knows(Xid(1)));
    assert!(pair.serve());
    pair.settle();
    assert!(pair.server.engine.closed().is_none());
    assert!(pair.client.device.exposed.is_empty() && !pair.client.engine.knows(Xid(1)));
    assert_eq!(pair.client.device.invalidated.len(), 2);
    pair.still_serves(2);
}

/// rule 107: a server that hangs costs no more than its credits.
#[test]
fn an_orphan_lets_go_of_the_memory_for_its_reply() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.call(1, 3000, 5000);
    let areas: Vec<_> = pair
        .client
        .device
        .exposed
        .values()
        .filter_map(|exposed| match exposed {
            Exposed::Sink(area) => Some(area.loan()),
            Exposed::Source(_) => None,
        })
        .collect();
    assert!(areas.len() == 1 && !areas[0].is_over());
    pair.abandon(1);
    assert!(areas[0].is_over());
    pair.hold_calls = false;
    pair.drive();
    assert!(pair.server.engine.closed().is_none() && pair.client.device.exposed.is_empty());
    pair.still_serves(2);
}

/// rule 107: no call gets less room than it asked for; it waits, and what needs none goes past it.
#[test]
fn a_call_without_room_for_its_reply_waits_until_there_is_some() {
    let mut pair = Pair::warm(SETUP);
    let full = crate::memory::AREAS_MAX;
    let taken = pair.memory.reply_area(full).unwrap();
    assert!(taken.place(full - 1, b"x"));
    for (xid, reply) in [(1, 5000), (2, 6000), (3, 28), (4, 5000)] {
        pair.call(xid, 40, reply);
    }
    let sent = |pair: &Pair| [1, 2, 3, 4].map(|xid| pair.client.engine.transmitted(Xid(xid)));
    assert_eq!(sent(&pair), [false, false, true, false]);
    pair.drive();
    pair.succeeded(3);
    assert!(pair.client.engine.waits() && pair.client.engine.credits_left() == 4);
    let why = pair.client.engine.lacks_room(Xid(2)).unwrap();
    assert!(why.contains("no room for a reply of 6000 bytes") && why.contains(&full.to_string()), "{why}");
    pair.abandon(4);
    pair.resume();
    assert_eq!(sent(&pair)[..2], [false, false]);
    drop(taken);
    pair.resume();
    assert_eq!(sent(&pair)[..2], [true, true]);
    assert!(!pair.client.engine.waits() && pair.client.engine.lacks_room(Xid(1)).is_none());
    pair.drive();
    for xid in [1, 2] {
        pair.succeeded(xid);
    }
    assert!(!pair.client.engine.knows(Xid(4)));
}

/// rule 23, rule 107
#[test]
fn orphans_that_hold_every_credit_starve_the_connection_until_one_is_answered() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_replies = true;
    for xid in 1..=4 {
        pair.call(xid, 40, 28);
        assert!(!pair.client.engine.starved());
    }
    pair.drive();
    for xid in 1..=4 {
        assert!(!pair.client.engine.starved());
        pair.abandon(xid);
        pair.abandon(xid);
    }
    assert!(pair.client.engine.starved());
    pair.call(5, 40, 28);
    assert!(!pair.client.engine.transmitted(Xid(5)));
    pair.hold_replies = false;
    assert!(pair.deliver(Server));
    assert!(!pair.client.engine.starved());
    assert!(pair.client.engine.transmitted(Xid(5)));
    pair.drive();
    pair.succeeded(5);
}

/// rule 23: what was sent stays with its connection, what was not goes over the next.
#[test]
fn only_calls_that_wait_for_a_credit_are_taken_back() {
    let mut pair = Pair::new();
    for xid in 1..=3 {
        pair.call(xid, 40, 28);
    }
    let taken = pair.client.engine.take_waiting();
    assert_eq!(taken.iter().map(|(xid, ..)| *xid).collect::<Vec<_>>(), [Xid(2), Xid(3)]);
    assert!(
        taken.iter().all(
            |(_, message, expect)| message.len() == 40 && matches!(expect, Expect::Reply { max: 28, .. })
        )
    );
    assert!(pair.client.engine.knows(Xid(1)) && !pair.client.engine.knows(Xid(2)));
    pair.drive();
    pair.succeeded(1);
}

/// rule 24: after a smaller grant the calls that somebody waits for may still raise it.
#[test]
fn a_connection_with_an_awaited_call_under_way_is_not_starved() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    for xid in 1..=4 {
        pair.call(xid, 40, 28);
    }
    pair.abandon(1);
    pair.abandon(2);
    pair.inject(Client, &msg(3, 1, &reply_message(3, 28)));
    assert_eq!(pair.client.engine.granted(), 1);
    assert!(!pair.client.engine.starved());
    pair.abandon(4);
    assert!(pair.client.engine.starved());
}

/// rule 69
#[test]
fn an_abandoned_call_that_waits_for_a_credit_is_never_sent() {
    let mut pair = Pair::new();
    for xid in 1..=3 {
        pair.call(xid, 40, 28);
    }
    pair.abandon(2);
    assert!(!pair.client.engine.knows(Xid(2)));
    assert_eq!(pair.client.engine.requester.waiting(), &[Xid(3)], "nor does it take any room");
    pair.abandon(2);
    pair.drive();
    pair.succeeded(1);
    pair.succeeded(3);
    assert!(!pair.made[&2].posted);
}

/// rule 23, rule 24
#[test]
fn one_way_calls_hold_credits_until_a_later_call_is_answered() {
    let mut pair = Pair::warm(SETUP);
    for xid in 1..=3 {
        pair.one_way(xid, if xid == 2 { 3000 } else { 40 });
        pair.succeeded(xid);
    }
    assert_eq!((pair.client.engine.credits_left(), pair.client.device.exposed.len()), (1, 1));
    pair.drive();
    assert_eq!(pair.sends(Server), 0, "nobody answers a one-way call");
    assert_eq!((pair.client.engine.credits_left(), pair.client.device.exposed.len()), (1, 1));
    assert!(!pair.client.engine.starved());
    pair.call(4, 40, 28);
    pair.drive();
    pair.succeeded(4);
    assert_eq!((pair.client.engine.credits_left(), pair.client.device.exposed.len()), (4, 0));
    pair.still_serves(5);
}

/// rule 24
#[test]
fn a_call_without_reply_is_refused_where_it_would_hold_the_only_credit_and_the_text_says_whose_setting_it_is()
{
    for (asked, granted, text) in [
        (1, 4, "this end asks for one: raise RPCRDMA_CREDITS or CLSET_RDMA_CREDITS"),
        (4, 1, "the peer grants one: raise RPCRDMA_CREDITS there"),
    ] {
        let (client, server) = (setup(asked, 1024).client, setup(granted, 1024).server);
        let mut pair = Pair::warm(Setup { client, server, ..SETUP });
        pair.one_way(1, 40);
        let error = pair.made[&1].outcome.as_ref().unwrap().as_ref().unwrap_err();
        assert!(error.kind() == Kind::NotSent && error.text().ends_with(text), "{error}");
        pair.still_serves(2);
    }
    // Before the first reply nobody knows.
    let mut pair = Pair::new();
    pair.one_way(1, 40);
    pair.succeeded(1);
}

/// Linux answers the call behind while it still reads.
#[test]
fn what_a_one_way_call_exposes_stays_until_the_peer_has_read_it() {
    for tells_reads in [true, false] {
        let mut pair = Pair::warm(SETUP);
        pair.client.device.tells_reads = tells_reads;
        (pair.foreign, pair.hold_reads) = (true, true);
        pair.one_way(1, 3000);
        pair.call(2, 40, 28);
        pair.settle();
        pair.inject(Client, &msg(2, 4, &reply_message(2, 28)));
        pair.succeeded(2);
        assert_eq!((pair.client.engine.credits_left(), pair.client.device.exposed.len()), (4, 1));
        assert!(pair.client.engine.knows(Xid(1)), "a second one would be taken for it");
        pair.hold_reads = false;
        pair.drive();
        assert!(pair.client.closes.is_empty() && pair.server.closes.is_empty());
        // The next reply shows that it is over, or one of those that follow.
        let mut replies = 0;
        while !pair.client.device.exposed.is_empty() {
            let xid = 10 + replies;
            pair.call(xid, 40, 28);
            pair.drive();
            pair.succeeded(xid);
            replies += 1;
        }
        assert_eq!(u64::from(replies), if tells_reads { 1 } else { PAST_REPLIES });
        assert!(!pair.client.engine.knows(Xid(1)));
    }
}

#[test]
fn an_answer_to_a_one_way_call_whose_credit_is_back_ends_what_it_exposes() {
    let mut pair = Pair::warm(SETUP);
    (pair.foreign, pair.hold_reads) = (true, true);
    pair.one_way(1, 3000);
    pair.call(2, 40, 28);
    pair.inject(Client, &msg(2, 4, &reply_message(2, 28)));
    assert_eq!((pair.client.engine.credits_left(), pair.client.device.exposed.len()), (4, 1));
    pair.inject(Client, &msg(1, 4, &reply_message(1, 28)));
    assert_eq!((pair.client.engine.credits_left(), pair.client.device.exposed.len()), (4, 0));
}

/// RFC 5040 §5.3: a handle that is gone cannot be invalidated.
#[test]
fn a_reply_to_a_one_way_call_that_comes_after_a_later_one_invalidates_nothing() {
    let end = Settings { remote_invalidation: true, ..SETTINGS };
    for (in_order, plain) in [(true, false), (false, false), (false, true)] {
        let mut pair = Pair::warm(Setup { client: end, server: end, ..SETUP });
        if plain {
            // Calls that offer a Reply chunk, of which the later one is answered first.
            (pair.foreign, pair.hold_calls) = (true, false);
            let offer = Segment { handle: Handle(7), length: 3000, offset: 0 };
            let head = |xid| [words(&[xid, 1, 4, 0, 0, 0, 1, 1]), segments(&[offer])].concat();
            pair.deliver_to(Server, &[head(1), call_message(1, 40, 28, false)].concat());
            pair.deliver_to(Server, &[head(2), call_message(2, 40, 28, false)].concat());
            assert!(pair.take() && pair.take());
            for (at, handle) in [(1, Some(Handle(7))), (0, None)] {
                let _ = pair.answer(at);
                let sent = pair.server.sends.iter().rev().find_map(|request| match request {
                    WorkRequest::Send { invalidate, .. } => Some(*invalidate),
                    _ => None,
                });
                assert_eq!(sent, Some(handle), "at {at}");
            }
            continue;
        }
        pair.one_way(1, 3000);
        pair.call(2, 40, 28);
        pair.settle();
        while pair.take() {}
        if in_order {
            pair.answer_all_the_same(0, 28);
            assert!(pair.client.device.exposed.is_empty());
        }
        pair.answer(usize::from(!in_order)).unwrap();
        pair.settle();
        pair.succeeded(2);
        assert!(pair.client.device.exposed.is_empty());
        if !in_order {
            pair.answer_all_the_same(0, 28);
        }
        assert!(pair.client.closes.is_empty());
        pair.still_serves(3);
    }
}

#[test]
fn one_way_calls_that_the_peer_does_not_read_keep_their_credits_beyond_a_bound() {
    for tells_reads in [true, false] {
        let mut pair = Pair::warm(SETUP);
        pair.client.device.tells_reads = tells_reads;
        (pair.foreign, pair.hold_calls) = (true, true);
        let past = u32::try_from(PAST_MAX).unwrap();
        for n in 0..=past {
            pair.one_way(1000 + n, 3000);
            pair.call(2000 + n, 40, 28);
            pair.inject(Client, &msg(2000 + n, 4, &reply_message(2000 + n, 28)));
        }
        let held = pair.client.device.exposed.len();
        if tells_reads {
            assert_eq!((pair.client.engine.credits_left(), held), (3, PAST_MAX + 1));
        } else {
            assert!(pair.client.engine.credits_left() == 4 && held <= PAST_MAX, "{held}");
        }
        pair.close(Error::new(Kind::ConnectionLost, "cut"));
        assert!(pair.client.engine.requester.past() == 0);
    }
}

/// rule 24: only what was sent before the answered call is past.
#[test]
fn a_reply_gives_back_no_credit_of_a_later_one_way_call() {
    let mut pair = Pair::warm(SETUP);
    pair.one_way(1, 40);
    pair.call(2, 40, 28);
    pair.one_way(3, 40);
    pair.drive();
    assert_eq!(pair.client.engine.credits_left(), 3);
    // A reply that nobody waits for any more tells it just as well.
    pair.call(4, 40, 28);
    pair.abandon(4);
    pair.drive();
    assert_eq!(pair.client.engine.credits_left(), 4);
}

/// rule 23, rule 67
#[test]
fn a_reply_to_a_one_way_call_gives_its_credit_back_once() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.one_way(1, 40);
    pair.one_way(2, 40);
    pair.call(3, 40, 28);
    assert_eq!(pair.client.engine.credits_left(), 1);
    pair.inject(Client, &msg(2, 4, &reply_message(2, 28)));
    assert_eq!(pair.client.engine.credits_left(), 3, "calls 1 and 2");
    pair.inject(Client, &msg(3, 4, &reply_message(3, 28)));
    assert_eq!(pair.client.engine.credits_left(), 4);
    for xid in [1, 2, 3] {
        pair.inject(Client, &msg(xid, 4, &reply_message(xid, 28)));
        assert_eq!(pair.client.engine.credits_left(), 4, "late and repeated replies change nothing");
    }
}

/// rule 26, rule 36, rule 37, rule 27
#[test]
fn both_ends_post_a_receive_for_every_credit_before_anything_is_sent() {
    for credits in [1, 2, 32, 1000] {
        let pair = Pair::with(setup(credits, 1024));
        assert!(pair.client.device.receives >= credits && pair.server.device.receives >= credits);
    }
}

/// rule 26, rule 37
#[test]
fn receives_are_as_many_as_before_after_every_kind_of_message() {
    let mut pair = Pair::warm(SETUP);
    let before = (pair.client.device.receives, pair.server.device.receives);
    let after = |pair: &Pair, what: &str| {
        assert_eq!((pair.client.device.receives, pair.server.device.receives), before, "{what}");
    };
    pair.call(1, 40, 28);
    pair.call(2, 2000, 3000);
    pair.drive();
    after(&pair, "calls");
    pair.one_way(3, 40);
    pair.drive();
    after(&pair, "a one-way call");
    pair.start(4, 40, 3000, reply_of(28));
    pair.drive();
    after(&pair, "a reply that fits nowhere");
    pair.call(5, 40, 28);
    pair.settle();
    pair.take();
    pair.discard(0);
    after(&pair, "a discarded call");
    for message in
        [&[][..], &[0; 27], &[0xff; 28], &err_chunk(9), &err_vers(9, 1, 1, 1), &words(&[9, 1, 4, 77])]
    {
        pair.inject(Client, message);
        pair.inject(Server, message);
        pair.hold_replies = true;
        pair.settle();
        after(&pair, "a message that is none");
    }
    for proc in [2, 3] {
        pair.inject(Client, &words(&[9, 1, 4, proc, 0, 0, 0, 0]));
        pair.inject(Server, &words(&[9, 1, 4, proc, 0, 0, 0, 0]));
        after(&pair, "RDMA_MSGP and RDMA_DONE");
    }
}

/// rule 29
#[test]
fn calls_beyond_the_grant_are_served_while_receives_last() {
    let mut pair = Pair::new();
    let receives = pair.server.device.receives;
    for xid in 0..receives {
        pair.inject(Server, &msg(xid, 4, &call_message(xid, 40, 28, false)));
    }
    assert_eq!((pair.server.device.receives, pair.server.engine.requests_queued()), (0, receives as usize));
    pair.drive();
    assert_eq!((pair.server.device.receives, pair.sends(Server)), (receives, receives as usize));
}

/// Each call takes a place in tables until it is answered. Memory that runs out for these ends the connection, and no more.
#[test]
fn a_table_of_requests_that_gets_no_memory_ends_the_connection() {
    let requests = |refused: bool, handed: bool| {
        let mut pair = Pair::new();
        pair.server.device.receives = u32::MAX;
        let _none = refused.then(NoLongBlocks::from_here);
        for xid in 0..5000 {
            pair.inject(Server, &msg(xid, 4, &call_message(xid, 40, 28, false)));
            if let Some(error) = pair.server.engine.closed() {
                assert_eq!(error.kind(), Kind::Os(libc::ENOMEM), "{error}");
                return xid;
            }
            if handed {
                assert!(pair.server.engine.poll_request().is_some());
            }
        }
        5000
    };
    for handed in [false, true] {
        assert_eq!(requests(false, handed), 5000);
        assert!((10..5000).contains(&requests(true, handed)), "{handed}");
    }
}

// ---------------------------------------------------------------------------------------------------------- errors

/// rule 8, rule 9, rule 57, rule 62
#[test]
fn other_versions_are_answered_with_err_vers_that_echoes_them() {
    for version in [0, 2, u32::MAX] {
        let mut pair = Pair::new();
        let mut call = msg(0xaabb_ccdd, 4, &call_message(5, 40, 28, false));
        call[4..8].copy_from_slice(&version.to_be_bytes());
        pair.inject(Server, &call);
        assert_eq!(unwords(pair.last(Server)), [0xaabb_ccdd, version, 4, 4, 1, 1, 1]);
        pair.still_serves(6);
    }
}

/// rule 58, rule 62: whatever the procedure's number.
#[test]
fn unknown_procedures_are_answered_with_err_chunk_by_a_responder_and_dropped_by_a_requester() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.call(5, 40, 28);
    for proc in [5, 6, 255, u32::MAX] {
        let mut message = msg(5, 4, &reply_message(5, 28));
        message[12..16].copy_from_slice(&proc.to_be_bytes());
        pair.inject(Server, &message);
        assert_eq!(unwords(pair.last(Server)), [5, 1, 4, 4, 2]);
        pair.inject(Client, &message);
        assert!(pair.pending(5));
    }
}

/// rule 15, rule 16, rule 17, rule 18, rule 63
#[test]
fn dead_procedures_and_errors_are_answered_or_dropped_as_the_role_demands() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.hold_replies = true;
    pair.call(5, 40, 28);
    let tail = [words(&[0, 0, 0]), reply_message(5, 28)].concat();
    let (msgp, done) = ([words(&[5, 1, 4, 2]), tail.clone()].concat(), [words(&[5, 1, 4, 3]), tail].concat());
    for message in [&msgp, &done] {
        pair.inject(Client, message);
        assert!(pair.pending(5), "a requester drops it");
    }
    pair.inject(Server, &msgp);
    assert_eq!((unwords(pair.last(Server)), pair.sends(Server)), (vec![5, 1, 4, 4, 2], 1));
    for message in [&done, &err_chunk(5), &err_vers(5, 1, 1, 1), &words(&[5, 1, 4, 4, 77])] {
        pair.inject(Server, message);
    }
    assert_eq!(pair.sends(Server), 1, "a responder drops RDMA_DONE and every RDMA_ERROR");
    pair.hold_calls = false;
    pair.hold_replies = false;
    pair.foreign = true;
    // The answer to the injected RDMA_MSGP names a call that is under way, and ends it.
    pair.drive();
    assert_eq!(pair.failure(5), Kind::Peer);
    pair.still_serves(6);
}

/// rule 62, rule 65
#[test]
fn an_error_ends_the_call_that_it_names_and_no_other() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    for xid in 1..=4 {
        pair.call(xid, 3000, 3000);
    }
    pair.inject(Client, &err_chunk(2));
    assert_eq!(pair.failure(2), Kind::Peer);
    let text = pair.outcome(2).as_ref().unwrap_err().text().to_owned();
    assert!(
        text.contains("ERR_CHUNK") && text.contains("RPCRDMA_MAX_REPLY") && text.contains("RPCRDMA_MAX_CALL")
    );
    pair.inject(Client, &err_vers(3, 1, 2, 3));
    let text = pair.outcome(3).as_ref().unwrap_err().text().to_owned();
    assert!(text.contains("versions 2 to 3"), "{text}");
    // A responder that does not know our version echoes its own idea of the field.
    pair.inject(Client, &err_vers(4, 2, 2, 2));
    assert_eq!(pair.failure(4), Kind::Peer);
    assert!(pair.pending(1));
    assert_eq!((pair.client.engine.granted(), pair.client.engine.credits_left()), (4, 3));
    assert_eq!(pair.client.device.exposed.len(), 2, "those of call 1");
}

/// rule 64
#[test]
fn an_error_that_cannot_be_decoded_is_dropped() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.call(1, 40, 28);
    for error in [
        words(&[1, 1, 4, 4]),
        words(&[1, 1, 4, 4, 0]),
        words(&[1, 1, 4, 4, 3]),
        words(&[1, 1, 4, 4, 77, 0, 0]),
        words(&[1, 1, 4, 4, 1]),
        words(&[1, 1, 4, 4, 1, 1]),
        words(&[1, 2, 4, 4, 2]),
        err_chunk(1)[..19].to_vec(),
        err_vers(1, 1, 1, 1)[..27].to_vec(),
    ] {
        pair.inject(Client, &error);
        assert!(pair.pending(1), "{error:?}");
    }
    pair.inject(Client, &err_chunk(1));
    assert_eq!(pair.failure(1), Kind::Peer);
}

/// rule 66
#[test]
fn messages_of_0_to_27_bytes_are_dropped_without_a_word() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.call(5, 40, 28);
    for version in [1, 2] {
        for proc in [0, 1, 2, 3, 5] {
            let whole = words(&[5, version, 4, proc, 0, 0, 0]);
            for len in 0..28 {
                pair.inject(Server, &whole[..len]);
                pair.inject(Client, &whole[..len]);
            }
        }
    }
    assert_eq!(pair.sends(Server), 0);
    assert!(pair.pending(5));
    pair.still_serves(6);
}

/// rule 67: what a header may get wrong.
#[test]
fn a_reply_with_a_bad_header_is_dropped_and_the_good_one_still_counts() {
    let payload = reply_message(1, 28);
    let segment = Segment { handle: Handle(9), length: 4, offset: 0 };
    let read = [words(&[1, 8]), segments(&[segment])].concat();
    let bad: Vec<(&str, Vec<u8>)> = vec![
        ("a Read list", [words(&[1, 1, 4, 0]), read, words(&[0, 0, 0]), payload.clone()].concat()),
        ("another version", [words(&[1, 2, 4, 0, 0, 0, 0]), payload.clone()].concat()),
        ("another XID inside", msg(1, 4, &reply_message(2, 28))),
        ("no XID inside", msg(1, 4, b"\0\0")),
        ("no list", words(&[1, 1, 4, 1, 0, 0, 0])),
        ("a list that ends early", [words(&[1, 1, 4, 1, 0, 0, 1, 2]), segments(&[segment])].concat()),
        ("an absurd count", [words(&[1, 1, 4, 1, 0, 0, 1, u32::MAX]), segments(&[segment])].concat()),
        ("a flag that is none", words(&[1, 1, 4, 0, 0, 0, 2, 1])),
    ];
    for (what, reply) in bad {
        let mut pair = Pair::warm(SETUP);
        pair.hold_calls = true;
        pair.call(1, 3000, 3000);
        pair.inject(Client, &reply);
        assert!(pair.pending(1), "{what}");
        assert_eq!(pair.client.engine.granted(), 4);
        pair.inject(Client, &msg(1, 4, &payload));
        assert_eq!(*pair.outcome(1).as_ref().unwrap(), payload, "{what}");
        assert!(pair.client.device.exposed.is_empty());
    }
}

/// rule 67, rule 80: a header in order that returns another Reply chunk than was offered ends the call for good.
#[test]
fn a_reply_that_returns_another_reply_chunk_fails_its_call_and_nothing_else() {
    type Tamper = fn(&mut Vec<Segment>);
    let tampers: [(&str, Tamper); 8] = [
        ("nothing wrong", |_| ()),
        ("another handle", |s| s[0].handle = Handle(s[0].handle.0 ^ 1)),
        ("another offset", |s| s[1].offset += 4),
        ("more bytes than offered", |s| s[1].length += 1),
        ("the greatest length", |s| s[0].length = u32::MAX),
        ("a segment more", |s| s.push(s[0])),
        ("a segment less", |s| {
            s.pop();
        }),
        ("no byte", |s| s.iter_mut().for_each(|s| s.length = 0)),
    ];
    for (what, tamper) in tampers {
        let mut pair = Pair::warm(Setup { max_segment: 2000, ..SETUP });
        pair.hold_calls = true;
        pair.call(1, 40, 3000);
        pair.call(2, 40, 28);
        pair.wire.pop();
        let mut chunk = offered(&pair);
        let reply = reply_message(1, 3000);
        for (segment, part) in chunk.iter().zip(reply.chunks(2000)) {
            let Some((Exposed::Sink(sink), 0)) = pair.client.device.access(*segment) else { panic!() };
            assert!(sink.place(0, part));
        }
        tamper(&mut chunk);
        pair.inject(Client, &nomsg(1, 4, &chunk));
        match what {
            "nothing wrong" => assert!(*pair.outcome(1).as_ref().unwrap() == reply),
            _ => assert_eq!(pair.failure(1), Kind::Peer, "{what}"),
        }
        assert!(pair.client.device.exposed.is_empty(), "{what}");
        assert!(pair.pending(2));
        pair.inject(Client, &msg(2, 4, &reply_message(2, 28)));
        pair.succeeded(2);
    }
}

/// rule 67
#[test]
fn a_reply_in_a_chunk_that_was_not_offered_fails_its_call() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.call(1, 40, 28);
    pair.inject(Client, &nomsg(1, 4, &[]));
    assert_eq!(pair.failure(1), Kind::Peer);
}

/// rule 6, rule 67: the XID inside is checked across the segments' borders.
#[test]
fn a_reply_in_a_chunk_is_checked_for_its_xid_however_it_is_cut() {
    for (first, inside, good) in [(0, 1, true), (1, 1, true), (3, 1, true), (8, 1, true), (2, 9, false)] {
        let mut pair = Pair::warm(Setup { max_segment: 2000, ..SETUP });
        pair.hold_calls = true;
        pair.call(1, 40, 3000);
        let mut chunk = offered(&pair);
        let reply = reply_message(inside, 16);
        (chunk[0].length, chunk[1].length) = (first as u32, 16 - first as u32);
        for (segment, part) in chunk.iter().zip([&reply[..first], &reply[first..]]) {
            let Some((Exposed::Sink(sink), 0)) = pair.client.device.access(*segment) else { panic!() };
            assert!(sink.place(0, part));
        }
        pair.inject(Client, &nomsg(1, 4, &chunk));
        assert_eq!(pair.outcome(1).is_ok(), good, "{first}");
        if good {
            assert_eq!(*pair.outcome(1).as_ref().unwrap(), reply);
        }
    }
}

/// rule 28, rule 67
#[test]
fn replies_to_nobody_and_second_replies_change_nothing() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_calls = true;
    pair.call(1, 40, 28);
    let good = msg(1, 4, &reply_message(1, 28));
    for message in [msg(99, 1, &reply_message(99, 28)), nomsg(99, 1, &[]), err_chunk(99)] {
        pair.inject(Client, &message);
        assert!(pair.pending(1));
        assert_eq!((pair.client.engine.granted(), pair.client.engine.credits_left()), (4, 3));
    }
    pair.inject(Client, &good);
    pair.succeeded(1);
    pair.inject(Client, &good);
    pair.inject(Client, &err_chunk(1));
    assert_eq!(pair.client.engine.credits_left(), 4);
}

/// rule 30, rule 67: nothing was sent that it could answer.
#[test]
fn a_reply_to_a_call_that_still_waits_for_a_credit_is_dropped() {
    let mut pair = Pair::new();
    pair.hold_calls = true;
    pair.call(1, 40, 28);
    pair.call(2, 40, 28);
    pair.inject(Client, &msg(2, 4, &reply_message(2, 28)));
    pair.inject(Client, &err_chunk(2));
    assert!(pair.pending(2) && pair.client.engine.granted() == 1);
}

/// rule 58, rule 71, rule 98
#[test]
fn a_reply_that_fits_nowhere_is_answered_with_err_chunk() {
    let mut pair = Pair::warm(SETUP);
    for (xid, (max_reply, reply)) in (1..).zip([(28, 997), (3000, 3001), (996, 1 << 17)]) {
        pair.start(xid, 40, reply, reply_of(max_reply));
        pair.settle();
        assert!(pair.take());
        assert_eq!(pair.answer(0).unwrap_err().kind(), Kind::TooLong);
        pair.settle();
        assert_eq!(unwords(pair.last(Server)), [xid, 1, 4, 4, 2]);
        assert_eq!(pair.failure(xid), Kind::Peer);
    }
    pair.still_serves(9);
}

/// rule 58: a Reply needs room for the lists that it returns.
#[test]
fn a_call_with_lists_too_long_for_any_reply_is_answered_with_err_chunk() {
    // The server takes 2048 bytes and the client only 1024.
    let memory = Memory::new(4096, 1 << 20, 1 << 26);
    let settings = Settings { inline: 2048, ..SETTINGS };
    let peer = PrivateData { send_size: 2048, ..sizes(SETTINGS) };
    let mut pair = Pair::new();
    pair.server.engine = Connection::new(Role::Server, settings, peer, memory, bindings());
    pair.server.settings = settings;
    pair.drain(Server);
    let chunk: Vec<Segment> =
        (0..70).map(|n| Segment { handle: Handle(n), length: 1 << 20, offset: u64::MAX }).collect();
    let mut call = [words(&[1, 1, 4, 0, 0, 0, 1, 70]), segments(&chunk)].concat();
    call.extend(call_message(1, 40, 900, false));
    pair.inject(Server, &call);
    assert!(pair.take());
    assert_eq!(pair.answer(0).unwrap_err().kind(), Kind::TooLong);
    assert_eq!(unwords(pair.last(Server)), [1, 1, 4, 4, 2]);
}

/// rule 69
#[test]
fn a_call_that_cannot_be_built_fails_at_once_and_leaves_nothing_exposed() {
    let long = Setup { max_segment: 1000, ..SETUP };
    for exposures in 0..8 {
        let mut pair = Pair::warm(long);
        pair.client.device.exposures_left = exposures;
        // Four segments each for the call and for the reply.
        pair.call(1, 4000, 4000);
        assert_eq!(pair.failure(1), Kind::Os(libc::ENOMEM), "{exposures}");
        assert!(pair.client.device.exposed.is_empty());
        assert_eq!(pair.client.device.invalidated.len(), exposures as usize);
        assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (0, 4));
        pair.client.device.exposures_left = u32::MAX;
        pair.still_serves(2);
    }
}

/// rule 69: calls in line behind it go on.
#[test]
fn a_waiting_call_that_cannot_be_built_makes_room_for_the_next() {
    let mut pair = Pair::new();
    pair.call(1, 40, 28);
    pair.call(2, 4000, 28);
    pair.call(3, 40, 28);
    pair.client.device.exposures_left = 0;
    pair.drive();
    pair.succeeded(1);
    assert_eq!(pair.failure(2), Kind::Os(libc::ENOMEM));
    pair.succeeded(3);
}

/// A call goes at once, or from the queue of those that wait for a credit.
#[test]
fn a_call_that_waits_for_its_credit_goes_out_as_one_that_does_not() {
    for (len, reply, one_way) in
        [(40, 28, false), (4000, 28, false), (40, 5000, false), (3000, 3000, false), (40, 0, true)]
    {
        let sent = [true, false].map(|waits| {
            let mut pair = Pair::warm(Setup { client: Settings { credits: 1, ..SETTINGS }, ..SETUP });
            pair.hold_replies = true;
            let more = |pair: &mut Pair| {
                pair.client.settings.credits = 4;
                assert_eq!(pair.client.ask(4), 4);
                pair.drain(Client);
            };
            if waits {
                pair.call(1, 40, 28);
            } else {
                more(&mut pair);
            }
            match one_way {
                true => pair.one_way(2, len),
                false => pair.call(2, len, reply),
            }
            assert_eq!(pair.client.engine.transmitted(Xid(2)), !waits);
            if waits {
                more(&mut pair);
            }
            let sent = pair.wire.iter().rfind(|(from, _)| *from == Client).unwrap().1.clone();
            let credits = pair.client.engine.credits_left() + u32::from(waits);
            pair.hold_replies = false;
            pair.drive();
            if !one_way {
                pair.succeeded(2);
            }
            (sent, credits, pair.client.engine.credits_left())
        });
        assert_eq!(sent[0], sent[1], "{len} bytes, a reply of {reply}");
    }
}

/// rule 70
#[test]
fn a_region_that_cannot_be_invalidated_closes_the_connection_before_the_call_ends() {
    let mut pair = Pair::warm(SETUP);
    pair.call(1, 3000, 3000);
    pair.call(2, 40, 28);
    for xid in 3..=6 {
        pair.call(xid, 40, 28);
    }
    pair.client.device.fail_invalidate = true;
    pair.hold_replies = true;
    pair.drive();
    let sent = pair.sends(Client);
    let mut outputs = Vec::new();
    // By hand: the order of the outputs is what counts.
    let gather = loop {
        match pair.server.sends.pop_front() {
            Some(WorkRequest::Write { gather, to }) => {
                let Some((Exposed::Sink(sink), at)) = pair.client.device.access(to) else { panic!() };
                assert!(sink.place(at, &bytes(&gather)));
            }
            Some(WorkRequest::Send { gather, .. }) => break gather,
            other => panic!("{other:?}"),
        }
    };
    let mut buf = pair.memory.message().unwrap();
    buf.extend(&bytes(&gather)).unwrap();
    pair.client.engine.handle_receive(buf, None, &mut pair.client.device);
    while let Some(output) = pair.client.engine.poll_output() {
        outputs.push(output);
    }
    let close = outputs.iter().position(|o| matches!(o, Output::Close(_))).expect("no Close");
    let done = outputs.iter().position(|o| matches!(o, Output::Done { xid: Xid(1), .. })).expect("no Done");
    assert!(close < done);
    let closes = outputs.iter().filter(|o| matches!(o, Output::Close(_))).count();
    assert_eq!(closes, 1, "two regions, one close");
    assert!(!outputs[close..].iter().any(|o| matches!(o, Output::Post(_) | Output::Receive(_))));
    assert_eq!(pair.sends(Client), sent);
    pair.made.get_mut(&1).unwrap().outcome = Some(Ok(Vec::new()));
    pair.cut = true;
    pair.close(Error::new(Kind::ConnectionLost, "closed"));
    for xid in 2..=4 {
        assert_eq!(pair.failure(xid), Kind::ConnectionLost);
    }
    for xid in 5..=6 {
        assert_eq!(pair.failure(xid), Kind::NotSent);
    }
}

/// rule 70: the same when it is found while a call is given up or built.
#[test]
fn invalidation_that_fails_on_another_path_closes_the_connection_too() {
    let mut pair = Pair::warm(Setup { max_segment: 1000, ..SETUP });
    pair.client.device.exposures_left = 3;
    pair.client.device.fail_invalidate = true;
    pair.call(1, 4000, 28);
    assert_eq!(pair.failure(1), Kind::Os(libc::ENOMEM));
    assert_eq!(pair.client.closes.len(), 1);
    let mut pair = Pair::warm(SETUP);
    pair.one_way(1, 3000);
    pair.call(2, 40, 28);
    pair.client.device.fail_invalidate = true;
    pair.drive();
    pair.succeeded(1);
    pair.succeeded(2);
    assert_eq!(pair.client.closes.len(), 1);
    assert!(pair.client.engine.closed().is_some() && pair.server.engine.closed().is_some());
}

/// rule 71, rule 28
#[test]
fn a_request_is_answered_once() {
    let mut pair = Pair::warm(SETUP);
    pair.call(1, 40, 28);
    pair.settle();
    assert!(pair.take());
    let id = pair.handed[0].id;
    pair.answer(0).unwrap();
    let again = pair.buf(&reply_message(1, 28));
    assert_eq!(pair.server.engine.reply(id, again).unwrap_err().kind(), Kind::Invalid);
    pair.server.engine.discard(id);
    assert!(pair.server.engine.poll_output().is_none());
    assert_eq!(pair.sends(Server), 1);
    pair.drive();
    pair.succeeded(1);
    pair.call(2, 40, 28);
    pair.settle();
    assert!(pair.take());
    let id = pair.handed[0].id;
    pair.discard(0);
    let late = pair.buf(&reply_message(2, 28));
    assert_eq!(pair.server.engine.reply(id, late).unwrap_err().kind(), Kind::Invalid);
    assert!(pair.server.engine.poll_output().is_none());
    assert!(pair.pending(2));
}

/// As libtirpc keeps the XID of the latest request.
#[test]
fn the_latest_deferred_request_is_answered_until_the_next_one_is_handed_up() {
    let mut pair = Pair::warm(SETUP);
    let receives = pair.server.device.receives;
    let late = |pair: &mut Pair, at: usize| {
        let Request { id, xid, .. } = pair.handed.remove(at);
        let reply = pair.buf(&reply_message(xid.0, 28));
        pair.server.engine.reply(id, reply).unwrap_err().kind()
    };
    for (xid, reply) in [(1, 28), (2, 3000)] {
        pair.call(xid, 40, reply);
        pair.settle();
        assert!(pair.take());
        pair.defer(0);
        // A one-way call would never give it back.
        assert_eq!(pair.server.device.receives, receives);
        pair.answer(0).unwrap();
        pair.drive();
        pair.succeeded(xid);
        assert_eq!(pair.server.device.receives, receives);
    }
    // Two at once: the later one, whichever returns last.
    for (first, second) in [(0, 1), (1, 0)] {
        let xid = 3 + 2 * first as u32;
        pair.call(xid, 40, 28);
        pair.call(xid + 1, 40, 28);
        pair.settle();
        assert!(pair.take() && pair.take());
        pair.defer(first);
        pair.defer(second);
        assert_eq!(late(&mut pair, 0), Kind::Invalid);
        pair.answer(0).unwrap();
        pair.drive();
        pair.succeeded(xid + 1);
        assert!(pair.pending(xid));
    }
    pair.call(7, 40, 28);
    pair.settle();
    assert!(pair.take());
    pair.defer(0);
    pair.call(8, 40, 28);
    pair.settle();
    assert!(pair.take());
    assert_eq!(late(&mut pair, 0), Kind::Invalid);
    pair.answer(0).unwrap();
    pair.drive();
    pair.succeeded(8);
    assert!(pair.pending(7));
    assert_eq!(pair.server.device.receives, receives);
}

/// rule 71: the peer must not wait for what was lost for want of memory.
#[test]
fn a_reply_or_error_that_cannot_be_built_closes_the_connection() {
    for of_an_error in [false, true] {
        let mut pair = Pair::warm(SETUP);
        let before = pair.sends(Server);
        pair.call(1, 40, 28);
        pair.settle();
        assert!(pair.take());
        pair.server.engine.common.memory = pair.memory.without_headers();
        pair.cramped = true;
        if of_an_error {
            pair.deliver_to(Server, &words(&[2, 1, 4, 9, 0, 0, 0]));
        } else {
            assert_eq!(pair.answer(0).unwrap_err().kind(), Kind::Os(libc::ENOMEM));
        }
        assert_eq!(pair.server.closes.len(), 1);
        assert_eq!(pair.server.closes[0].kind(), Kind::Os(libc::ENOMEM));
        assert_eq!(pair.sends(Server), before, "nothing was sent");
        assert_eq!(pair.failure(1), Kind::ConnectionLost);
    }
}

/// rule 71
#[test]
fn a_reply_after_the_close_tells_why_and_sends_nothing() {
    let mut pair = Pair::warm(SETUP);
    pair.call(1, 40, 28);
    pair.call(2, 40, 28);
    pair.settle();
    assert!(pair.take() && pair.take());
    pair.close(Error::new(Kind::ConnectionLost, "gone"));
    let error = pair.answer(0).unwrap_err();
    assert_eq!((error.kind(), error.text()), (Kind::ConnectionLost, "gone"));
    pair.discard(0);
    assert_eq!(pair.sends(Server), 0);
    assert!(pair.server.engine.responder.working() == 0);
    assert_eq!(pair.failure(1), Kind::ConnectionLost);
    pair.call(3, 40, 28);
    assert_eq!(pair.failure(3), Kind::NotSent);
}

// --------------------------------------------------------------------------------------------------- Long messages

/// rule 89, rule 90, rule 91, rule 92, rule 94, rule 95
#[test]
fn long_calls_and_long_replies_arrive_whole_for_every_cut_into_segments() {
    let len = 4001;
    for max_segment in [250, 251, 252, 256, 300, 999, 1000, 2000, 4000, 4001, 4002, 1 << 20] {
        for (call, reply) in [(len, 28), (40, len), (len, len)] {
            let mut pair = Pair::warm(Setup { max_segment, ..SETUP });
            pair.call(1, call, reply);
            let cut = len.div_ceil(max_segment);
            if cut > chunks::SEGMENTS_MAX {
                assert_eq!(pair.failure(1), Kind::TooLong);
                assert!(pair.client.device.exposed.is_empty() && pair.sends(Client) == 0);
                continue;
            }
            assert_eq!(pair.made[&1].handles.len(), cut * if call == reply { 2 } else { 1 });
            assert!(pair.last(Client).len() <= 1024);
            pair.drive();
            pair.succeeded(1);
            assert!(pair.client.device.exposed.is_empty());
        }
    }
}

/// rule 42, rule 90, rule 102: segments of a byte, as another requester may cut them.
#[test]
fn a_long_call_in_segments_of_one_byte_is_joined_in_list_order() {
    let mut pair = Pair::with(setup(4, 4096));
    let message = call_message(5, 31, 28, false);
    let mut call = words(&[5, 1, 4, 1]);
    for byte in &message {
        let region = pair.buf(&[*byte]);
        let segment = pair.client.device.expose_source(region.freeze()).unwrap();
        call.extend([words(&[1, 0]), segments(&[segment])].concat());
    }
    call.extend(words(&[0, 0, 0]));
    pair.inject(Server, &call);
    pair.settle();
    assert!(pair.take());
    assert_eq!(bytes(&pair.handed[0].message), message);
}

/// rule 92, rule 94, rule 96, rule 97
#[test]
fn a_reply_uses_its_reply_chunk_exactly_when_it_does_not_fit_inline() {
    // The copied Reply chunk of one segment takes 20 bytes of the header.
    for (reply, long) in [(4, false), (1024 - 48, false), (1024 - 47, true), (3000, true)] {
        let mut pair = Pair::warm(SETUP);
        pair.start(1, 40, reply, reply_of(3000));
        let [segment] = offered(&pair)[..] else { panic!() };
        pair.drive();
        pair.succeeded(1);
        let header = header::decode(pair.last(Server), Versions::ONE).unwrap();
        let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = header.body else { panic!() };
        assert_eq!(matches!(header.body, Body::Nomsg { .. }), long, "{reply}");
        let length = if long { reply as u32 } else { 0 };
        assert!(chunks.reply().unwrap().iter().eq([Segment { length, ..segment }]));
    }
}

/// rule 153: what comes with a plain reply, or a plain Call, is looked at all the same.
#[test]
fn a_plain_message_invalidates_its_own_handle_or_ends_the_connection() {
    for (own, reply) in [(true, true), (false, true), (false, false)] {
        let mut pair = Pair::warm(SETUP);
        pair.foreign = true;
        pair.call(1, 40, 3000);
        let [segment] = offered(&pair)[..] else { panic!() };
        let unused = Segment { length: 0, ..segment };
        let handle = Some(if own { segment.handle } else { Handle(segment.handle.0 ^ 1) });
        if reply {
            let head = [words(&[1, 1, 4, 0, 0, 0, 1, 1]), segments(&[unused])].concat();
            pair.deliver_with(Client, &[head, reply_message(1, 28)].concat(), handle);
        } else {
            pair.deliver_with(Server, &msg(9, 4, &call_message(9, 40, 28, false)), handle);
        }
        assert_eq!((pair.client.closes.is_empty(), pair.server.closes.is_empty()), (own || !reply, reply));
        if own {
            pair.succeeded(1);
            assert!(pair.client.device.exposed.is_empty());
        }
    }
}

/// What a peer has placed, though it is of no use, counts; and memory for replies is held by calls only.
#[test]
fn what_chunks_have_moved_is_known_and_none_outlives_its_call() {
    // Bytes of the Call, and what a reply that comes inline says of its Reply chunk.
    for (call, returned) in [(40, 0), (40, 100), (3000, 0)] {
        let mut pair = Pair::warm(SETUP);
        pair.foreign = true;
        let before = pair.client.engine.placed();
        pair.call(1, call, 3000);
        let [segment] = offered(&pair)[..] else { panic!() };
        let head = words(&[1, 1, 4, 0, 0, 0, 1, 1]);
        let used = segments(&[Segment { length: returned, ..segment }]);
        pair.deliver_to(Client, &[head, used, reply_message(1, 28)].concat());
        pair.succeeded(1);
        let pulled = if call > 1024 { call as u64 } else { 0 };
        assert_eq!(pair.client.engine.placed() - before, pulled + u64::from(returned));
        assert!(pair.client.device.exposed.is_empty() && pair.client.engine.requester.holds_no_area());
    }
}

/// rule 95, rule 98
#[test]
fn a_reply_chunk_holds_exactly_the_reply_that_was_announced() {
    let mut pair = Pair::warm(Setup { max_segment: 2000, ..SETUP });
    pair.call(1, 40, 5001);
    assert_eq!(offered(&pair).iter().map(|s| s.length).collect::<Vec<_>>(), [2000, 2000, 1001]);
    pair.drive();
    pair.succeeded(1);
}

/// rule 94, rule 69: arithmetic on what the program asks for.
#[test]
fn an_absurd_maximum_reply_is_refused_before_memory_is_taken() {
    for max_reply in [usize::MAX, usize::MAX - 27, (16 << 20) + 1] {
        let mut pair = Pair::warm(SETUP);
        pair.start(1, 40, 28, reply_of(max_reply));
        assert_eq!(pair.failure(1), Kind::TooLong);
        assert_eq!(pair.client.device.next, 1, "nothing was exposed");
    }
}

/// rule 88, rule 93, rule 20: items that another requester reduced are put back, with their pads.
#[test]
fn read_chunks_at_other_positions_are_put_back_into_inline_and_long_calls() {
    for long in [false, true] {
        let mut pair = Pair::new();
        let whole = call_message(5, 64, 28, false);
        // 5 bytes at Position 16, whose pad stays away, and 8 bytes at Position 40.
        let rest = [&whole[..16], &whole[24..40], &whole[48..]].concat();
        let mut expected = whole.clone();
        expected[21..24].fill(0);
        let mut expose = |bytes: &[u8]| {
            let region = pair.buf(bytes);
            pair.client.device.expose_source(region.freeze()).unwrap()
        };
        let (first, second, payload) = (expose(&whole[16..21]), expose(&whole[40..48]), expose(&rest));
        let mut call = words(&[5, 1, 4, u32::from(long)]);
        for (position, segment) in [(40, second), (0, payload), (16, first)] {
            if position > 0 || long {
                call.extend([words(&[1, position]), segments(&[segment])].concat());
            }
        }
        call.extend(words(&[0, 0, 0]));
        if !long {
            call.extend(rest);
        }
        pair.inject(Server, &call);
        pair.settle();
        assert!(pair.take());
        assert_eq!(bytes(&pair.handed[0].message), expected);
    }
}

/// rule 102, rule 58: a chunk without a byte needs no Read, and no Read will come.
#[test]
fn read_chunks_of_no_bytes_do_not_block_the_requests_behind_them() {
    let mut pair = Pair::new();
    let empty = Segment { handle: Handle(77), length: 0, offset: 0 };
    let list =
        [words(&[1, 8]), segments(&[empty]), words(&[1, 8]), segments(&[empty]), words(&[0, 0, 0])].concat();
    pair.inject(Server, &[words(&[5, 1, 4, 0]), list, call_message(5, 40, 28, false)].concat());
    assert!(pair.take());
    assert_eq!(bytes(&pair.handed[0].message), call_message(5, 40, 28, false));
    pair.inject(Server, &[words(&[6, 1, 4, 1, 1, 0]), segments(&[empty]), words(&[0, 0, 0])].concat());
    assert_eq!(unwords(pair.last(Server)), [6, 1, 4, 4, 2], "a Long Call of no bytes has no XID");
    pair.answer(0).unwrap();
    pair.still_serves(7);
}

/// rule 58, rule 107, rule 102
#[test]
fn read_lists_without_sense_are_answered_with_err_chunk_before_memory_is_taken() {
    let segment = |length| Segment { handle: Handle(7), length, offset: u64::MAX };
    // Procedure, and Position and length of each segment.
    type Case = (&'static str, u32, Vec<(u32, u32)>);
    let cases: [Case; 9] = [
        ("4 GiB", 1, vec![(0, u32::MAX)]),
        ("4 GiB many times", 1, vec![(0, u32::MAX); 30]),
        ("a byte over the limit", 1, vec![(0, (1 << 20) + 1)]),
        ("beside the payload, over the limit", 0, vec![(8, 1 << 20)]),
        ("a Position that is no multiple of four", 0, vec![(6, 4)]),
        ("beyond the end", 0, vec![(44, 4)]),
        ("overlapping", 0, vec![(8, 8), (12, 4)]),
        ("the last Position", 0, vec![(u32::MAX - 3, 4)]),
        ("no Position zero", 1, vec![(4, 4)]),
    ];
    for (what, proc, list) in cases {
        let mut pair = Pair::new();
        let mut call = words(&[5, 1, 4, proc]);
        for (position, length) in list {
            call.extend([words(&[1, position]), segments(&[segment(length)])].concat());
        }
        call.extend(words(&[0, 0, 0]));
        if proc == 0 {
            call.extend(call_message(5, 40, 28, false));
        }
        pair.inject(Server, &call);
        assert_eq!(unwords(pair.last(Server)), [5, 1, 4, 4, 2], "{what}");
        assert!(pair.server.reads.is_empty() && pair.server.engine.responder.staged().0 == 0);
        pair.still_serves(6);
    }
}

/// rule 58, rule 107: counts that the message cannot hold.
#[test]
fn absurd_counts_are_answered_with_err_chunk() {
    let mut pair = Pair::new();
    for count in [2, 1 << 28, u32::MAX] {
        for lists in [vec![0, 1, count], vec![0, 0, 1, count]] {
            pair.inject(Server, &words(&[[5, 1, 4, 0].to_vec(), lists, vec![0; 3]].concat()));
            assert_eq!(unwords(pair.last(Server)), [5, 1, 4, 4, 2], "{count}");
        }
    }
    pair.still_serves(6);
}

/// rule 38
#[test]
fn a_responder_that_may_not_read_refuses_chunks_and_serves_the_rest() {
    let mut pair = Pair::with(Setup { read_depth: 0, ..SETUP });
    pair.call(1, 3000, 28);
    pair.drive();
    assert_eq!(pair.failure(1), Kind::Peer);
    pair.call(2, 40, 3000);
    pair.drive();
    pair.succeeded(2);
}

/// rule 38: what one request of the device may move.
#[test]
fn reads_and_writes_are_cut_to_what_the_responders_device_moves() {
    let mut pair = Pair::warm(SETUP);
    pair.server.device.max_segment = 700;
    pair.call(1, 3000, 3000);
    pair.settle();
    assert!(pair.take());
    pair.hold_replies = true;
    pair.answer(0).unwrap();
    assert_eq!(pair.server.sends.len(), 5 + 1, "five Writes and the Send");
    pair.hold_replies = false;
    pair.drive();
    pair.succeeded(1);
}

/// rule 38: long Reads let the other messages of the peer through.
#[test]
fn a_long_segment_is_read_in_parts() {
    let server = Settings { max_call: 8 << 20, ..SETTINGS };
    let mut pair = Pair::warm(Setup { server, max_segment: 4 << 20, ..SETUP });
    pair.hold_reads = true;
    pair.call(1, (2 << 20) + 5, 28);
    pair.settle();
    assert_eq!(std::iter::from_fn(|| pair.read().then_some(())).count(), 3);
    pair.hold_reads = false;
    pair.drive();
    pair.succeeded(1);
}

/// rule 14, rule 38
#[test]
fn requests_are_handed_up_in_the_order_of_their_sends_whatever_their_reads_do() {
    let mut pair = Pair::warm(SETUP);
    pair.hold_reads = true;
    pair.call(1, 3000, 28);
    pair.call(2, 40, 28);
    pair.call(3, 3000, 28);
    pair.settle();
    assert_eq!(pair.server.engine.requests_queued(), 3);
    assert!(!pair.server.engine.request_ready());
    // The second request's Read is done first: devices promise order, the engine does not need it.
    pair.server.reads.rotate_left(1);
    assert!(pair.read());
    assert!(!pair.server.engine.request_ready());
    assert!(pair.read());
    for xid in 1..=3 {
        assert!(pair.take());
        assert_eq!(pair.handed.last().unwrap().xid, Xid(xid));
    }
    assert!(!pair.take());
}

/// rule 107: what a peer announces costs nothing, and what it leaves unanswered little.
#[test]
fn a_peer_is_asked_for_more_as_it_answers() {
    const MIB: usize = 1 << 20;
    let many = Settings { max_call: 64 * MIB, ..SETTINGS };
    let mut pair = Pair::warm(Setup { client: many, server: many, ..SETUP });
    pair.hold_reads = true;
    for xid in 1..=2 {
        pair.call(xid, 12 * MIB, 28);
    }
    pair.settle();
    let under_way = |pair: &Pair| pair.server.engine.responder.reads().0;
    let mut most = Vec::new();
    while pair.server.engine.responder.reads().1 < 24 << 20 {
        assert_eq!(pair.server.engine.responder.staged().0, pair.server.engine.responder.reads().1 as usize);
        assert!(under_way(&pair) <= READS_MAX && pair.server.reads.len() == under_way(&pair) / MIB);
        most.push(under_way(&pair) / MIB);
        assert!(pair.read());
    }
    assert_eq!(most[..10], [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]);
    pair.hold_reads = false;
    pair.drive();
    for xid in 1..=2 {
        pair.succeeded(xid);
    }
    assert_eq!((pair.server.engine.responder.staged().0, pair.server.engine.pulling()), (0, None));
}

/// rule 14, rule 107: each of a connection that pulls in turn.
#[test]
fn reads_of_a_call_begin_when_it_gets_a_pass_and_the_pass_goes_with_its_memory() {
    let mut pair = Pair::warm(SETUP);
    pair.server.engine.pull_in_turn();
    let lengths = [3000, 40, 5000, 4000];
    for (xid, length) in (1..).zip(lengths) {
        pair.call(xid, length, 28);
    }
    pair.settle();
    let asked = |pair: &Pair| pair.server.engine.responder.reads().1;
    assert_eq!((pair.server.engine.asks(), asked(&pair)), (3000, 0));
    pair.server.engine.resume(&mut pair.server.device);
    assert_eq!((pair.server.engine.asks(), asked(&pair)), (3000, 0), "it is not its turn");
    let mut passes = Vec::new();
    for (length, next) in [(3000, 5000), (5000, 4000), (4000, 0)] {
        assert_eq!(pair.server.engine.asks(), length);
        let pass = Pass::default();
        let given = pass.given();
        pair.server.engine.pull(pass);
        // Without waiting for its Reads.
        assert_eq!(pair.server.engine.asks(), next);
        assert_eq!(given.stage(), PassStage::Coming);
        pair.drain(Server);
        pair.settle();
        assert_eq!(given.stage(), PassStage::Here);
        passes.push(given);
    }
    assert_eq!(asked(&pair), 12_000);
    pair.server.engine.pull(Pass::default());
    let live = |passes: &[Given]| passes.iter().filter(|it| it.stage() < PassStage::Decoded).count();
    for (xid, left) in [(1, 2), (2, 2), (3, 1), (4, 0)] {
        assert!(pair.take());
        assert_eq!(pair.handed.last().unwrap().xid, Xid(xid));
        assert_eq!(
            passes.iter().any(|it| it.stage() == PassStage::Dispatched),
            xid != 2,
            "the short one had none"
        );
        pair.answer(0).unwrap();
        assert_eq!(live(&passes), left);
    }
    pair.drive();
    (1..=4).for_each(|xid| pair.succeeded(xid));
    // Who waits when the connection ends asks no more.
    pair.call(5, 3000, 28);
    pair.settle();
    assert_eq!(pair.server.engine.asks(), 3000);
    pair.server.engine.handle_closed(Error::new(Kind::ConnectionLost, "gone"));
    assert_eq!(pair.server.engine.asks(), 0);
}

/// rule 102, rule 107
#[test]
fn calls_that_wait_to_be_handed_up_take_no_more_memory_than_one_largest_call() {
    let server = Settings { max_call: 10_001, ..SETTINGS };
    let mut pair = Pair::warm(Setup { server, ..SETUP });
    for xid in 1..=4 {
        pair.call(xid, if xid == 3 { 10_001 } else { 4000 }, 28);
    }
    pair.settle();
    assert_eq!(pair.server.engine.responder.staged().0, 8000, "two of them");
    assert_eq!(pair.server.engine.requests_queued(), 4);
    for xid in 1..=4 {
        pair.settle();
        assert!(pair.take());
        assert_eq!(pair.handed.last().unwrap().xid, Xid(xid));
    }
    assert_eq!(pair.server.engine.responder.staged().0, 0);
    while !pair.handed.is_empty() {
        pair.answer(0).unwrap();
    }
    pair.drive();
    for xid in 1..=4 {
        pair.succeeded(xid);
    }
}

// ---------------------------------------------------------------------------------------------------------- memory

/// rule 99, rule 100, rule 106
#[test]
fn memory_is_exposed_only_from_the_send_of_a_call_to_its_reply() {
    let mut pair = Pair::new();
    pair.call(1, 40, 28);
    pair.call(2, 3000, 3000);
    assert!(pair.client.device.exposed.is_empty(), "the second call still waits for its credit");
    pair.settle();
    assert!(pair.serve() && pair.deliver(Server));
    assert_eq!(pair.client.device.exposed.len(), 2);
    pair.settle();
    assert_eq!(pair.client.device.exposed.len(), 2, "the responder has it and has not answered");
    pair.drive();
    assert!(pair.client.device.exposed.is_empty());
}

/// rule 1
#[test]
fn the_greatest_handle_and_offset_are_used_as_they_are() {
    let mut pair = Pair::new();
    let segment = Segment { handle: Handle(u32::MAX), length: 4000, offset: u64::MAX - 4000 };
    let call = call_message(5, 40, 3000, false);
    pair.inject(Server, &[words(&[5, 1, 4, 0, 0, 0, 1, 1]), segments(&[segment]), call].concat());
    assert!(pair.take());
    let reply = pair.buf(&reply_message(5, 3000));
    pair.server.engine.reply(pair.handed[0].id, reply).unwrap();
    pair.drain(Server);
    let Some(WorkRequest::Write { to, .. }) = pair.server.sends.front() else { panic!() };
    assert_eq!(*to, Segment { length: 3000, ..segment });
    assert_eq!(pair.last(Server)[32..], segments(&[*to]));
    let read = Segment { length: 2000, ..segment };
    pair.inject(Server, &[words(&[6, 1, 4, 1, 1, 0]), segments(&[read]), words(&[0, 0, 0])].concat());
    let Some(WorkRequest::Read { from, .. }) = pair.server.reads.front() else { panic!() };
    assert_eq!(*from, read);
}

/// rule 104, rule 107: a responder that reaches beyond what it was given loses its connection, not our memory.
#[test]
fn a_handle_of_an_ended_call_is_dead() {
    let mut pair = Pair::warm(SETUP);
    pair.call(1, 40, 3000);
    let [segment] = offered(&pair)[..] else { panic!() };
    pair.drive();
    pair.succeeded(1);
    pair.call(2, 40, 3000);
    let gather = vec![pair.buf(&[0xee; 8]).freeze()];
    let to = Segment { length: 8, ..segment };
    pair.server.sends.push_front(WorkRequest::Write { gather: gather.into(), to });
    assert!(pair.deliver(Server));
    assert_eq!(pair.failure(2), Kind::ConnectionLost);
}

// ------------------------------------------------------------------------------------------------ ends of all sorts

/// rule 65, rule 100
#[test]
fn a_connection_cut_at_any_step_ends_every_call_once_and_exposes_nothing() {
    type Scenario = fn(&mut Pair);
    let scenarios: [(&str, Scenario); 9] = [
        ("a short call", |p| p.call(1, 40, 28)),
        ("a Long Call", |p| p.call(1, 3000, 28)),
        ("a Long Reply", |p| p.call(1, 40, 3000)),
        ("both, and more calls than credits", |p| {
            for xid in 1..=9 {
                p.call(xid, 3000, 3000);
            }
        }),
        ("one-way calls in between", |p| {
            p.call(1, 40, 28);
            p.one_way(2, 40);
            p.drive();
            p.one_way(3, 3000);
            p.call(4, 3000, 3000);
            p.one_way(5, 40);
            p.call(6, 40, 28);
        }),
        ("orphans, answered late", |p| {
            p.hold_replies = true;
            p.call(1, 3000, 3000);
            p.call(2, 40, 28);
            p.drive();
            p.abandon(1);
            p.abandon(2);
            p.call(3, 40, 3000);
            p.hold_replies = false;
        }),
        ("replies that fit nowhere", |p| {
            p.start(1, 40, 3000, reply_of(28));
            p.start(2, 3000, 3000, reply_of(2000));
        }),
        ("answers out of order, and none", |p| {
            p.call(1, 40, 28);
            p.drive();
            for xid in 2..=5 {
                p.call(xid, 2000, 2000);
            }
            p.settle();
            while p.take() {}
            if p.handed.len() == 4 {
                let _ = p.answer(3);
                p.discard(1);
            }
            while !p.handed.is_empty() {
                let _ = p.answer(p.handed.len() - 1);
            }
            p.settle();
            p.abandon(3);
        }),
        ("a call that cannot be built", |p| {
            p.client.device.exposures_left = 1;
            p.call(1, 3000, 3000);
            p.call(2, 40, 28);
        }),
    ];
    for (what, scenario) in scenarios {
        let mut cuts = 0;
        loop {
            let mut pair = Pair::with(Setup { max_segment: 1900, ..SETUP });
            pair.cut_at = Some(cuts + 1);
            scenario(&mut pair);
            pair.drive();
            let whole = !pair.cut;
            if whole {
                pair.close(Error::new(Kind::ConnectionLost, "the end"));
            }
            for (xid, made) in &pair.made {
                assert!(
                    made.outcome.is_some() != made.abandoned,
                    "{what}, cut at {cuts}: call {xid} has no end"
                );
            }
            assert!(pair.client.device.exposed.is_empty());
            if whole {
                break;
            }
            cuts += 1;
        }
        assert!(cuts >= 3, "{what}: {cuts}");
    }
}

/// rule 100: whatever was still to be posted.
#[test]
fn after_the_close_nothing_is_posted_and_every_call_is_told() {
    let mut pair = Pair::warm(SETUP);
    pair.client.engine.common.window.set_granted(Credits(2));
    let messages: Vec<Buf> = (1..=3).map(|xid| pair.buf(&call_message(xid, 3000, 3000, false))).collect();
    let End { engine, device, .. } = &mut pair.client;
    for (xid, message) in (1..=3).zip(messages) {
        engine.call(Xid(xid), message, reply_of(3000), device).unwrap();
    }
    engine.handle_closed(Error::new(Kind::ConnectionLost, "gone"));
    let mut ended = Vec::new();
    while let Some(output) = engine.poll_output() {
        let Output::Done { xid, outcome } = output else { panic!("{output:?} after the close") };
        ended.push((xid.0, outcome.unwrap_err().kind()));
    }
    ended.sort_unstable_by_key(|(xid, _)| *xid);
    // The Sends of the first two were on their way out: nobody can tell how far they got.
    assert_eq!(ended, [(1, Kind::ConnectionLost), (2, Kind::ConnectionLost), (3, Kind::NotSent)]);
    let late = pair.memory.message().unwrap();
    pair.client.engine.handle_receive(late, None, &mut pair.client.device);
    pair.client.engine.abandon(Xid(1), &mut pair.client.device);
    pair.client.engine.handle_read(WorkId(0));
    assert!(pair.client.engine.poll_output().is_none());
}

/// rule 67: losing a reply is losing nothing but that call.
#[test]
fn a_lost_reply_leaves_an_orphan_and_a_working_connection() {
    let mut pair = Pair::warm(SETUP);
    pair.lose_replies = true;
    pair.call(1, 3000, 3000);
    pair.drive();
    assert!(pair.pending(1));
    pair.abandon(1);
    pair.lose_replies = false;
    pair.still_serves(2);
    assert_eq!(pair.client.engine.credits_left(), 3);
}

/// rule 58, rule 66, rule 102
#[test]
fn calls_truncated_or_corrupted_anywhere_neither_harm_nor_stop_a_responder() {
    let mut next = 1000;
    let mut lived = 0;
    for case in 0..5 {
        let mut pair = hostile(case);
        let message = pair.wire.pop().unwrap().1;
        let header = message.len() - if case == 0 || case == 4 { 40 } else { 0 };
        for variant in variants(&message, header) {
            if pair.closing || case_spent(&pair) {
                pair = hostile(case);
            }
            next += 1;
            pair.inject(Server, &variant);
            pair.drive();
            if pair.closing {
                assert!(pair.server.closes.is_empty(), "only the device may end it: {variant:?}");
                continue;
            }
            pair.still_serves(next);
            lived += 1;
        }
    }
    assert!(lived > 300, "{lived}");
}

/// A pair and, as its newest Send, a Call that names memory which stays exposed.
fn hostile(case: u32) -> Pair {
    let mut pair = Pair::with(setup(4, 1024));
    pair.foreign = true;
    let source = pair.buf(&call_message(5, 2000, 28, false));
    let source = pair.client.device.expose_source(source.freeze()).unwrap();
    let sink = Buf::with_capacity(4000).unwrap().into_sink(4000);
    let sink = pair.client.device.expose_sink(sink).unwrap();
    let small = Segment { length: 8, ..source };
    let inline = call_message(5, 40, 28, false);
    let list = |position| [words(&[1, position]), segments(&[small])].concat();
    let message = match case {
        0 => msg(5, 4, &inline),
        1 => [words(&[5, 1, 4, 1, 1, 0]), segments(&[source]), words(&[0, 0, 0])].concat(),
        2 => [words(&[5, 1, 4, 1]), list(0), list(8), words(&[0, 0, 1, 1]), segments(&[sink])].concat(),
        3 => [words(&[5, 1, 4, 1]), list(0), words(&[0, 1, 1]), segments(&[sink]), words(&[0, 0])].concat(),
        _ => [words(&[5, 1, 4, 0]), list(8), words(&[0, 1, 1]), segments(&[sink]), words(&[0, 0]), inline]
            .concat(),
    };
    pair.wire.push((Client, message));
    pair
}

/// Whether so much was sent that the lists of the pair itself get long.
fn case_spent(pair: &Pair) -> bool {
    pair.made.len() > 50
}

/// Every truncation of a message, and every byte of its first `header` bytes changed in three ways.
fn variants(message: &[u8], header: usize) -> Vec<Vec<u8>> {
    let mut variants: Vec<Vec<u8>> = (0..message.len()).map(|len| message[..len].to_vec()).collect();
    for at in 0..header {
        for flip in [0x01, 0x80, 0xff] {
            let mut variant = message.to_vec();
            variant[at] ^= flip;
            variants.push(variant);
        }
    }
    variants
}

/// rule 64, rule 66, rule 67, rule 102
#[test]
fn replies_truncated_or_corrupted_anywhere_neither_harm_nor_stop_a_requester() {
    for case in 0..4 {
        let mut spare = Pair::warm(SETUP);
        let mut xid = 0;
        let mut count = 1;
        let mut n = 0;
        while n < count {
            xid += 1;
            if spare.closing || case_spent(&spare) {
                spare = Pair::warm(SETUP);
            }
            let pair = &mut spare;
            pair.hold_replies = true;
            pair.call(xid, 2000, if case == 1 { 3000 } else { 28 });
            pair.drive();
            let good = match case {
                2 => err_chunk(xid),
                3 => err_vers(xid, 1, 1, 1),
                _ => pair.last(Server).to_vec(),
            };
            while let Some(WorkRequest::Write { gather, to }) = pair.server.sends.pop_front() {
                let Some((Exposed::Sink(sink), at)) = pair.client.device.access(to) else { panic!() };
                assert!(sink.place(at, &bytes(&gather)));
            }
            let header = if case == 0 { 28 } else { good.len() };
            let all = variants(&good, header);
            count = all.len();
            pair.inject(Client, &all[n]);
            if pair.pending(xid) {
                pair.inject(Client, &good);
            }
            assert!(!pair.pending(xid));
            assert!(pair.client.device.exposed.is_empty());
            assert!(pair.client.engine.closed().is_none());
            xid += 1;
            // A corrupted grant holds until the next reply.
            spare.still_serves(xid);
            n += 1;
        }
        assert!(count > 70);
    }
}

// ---------------------------------------------------------------------------------------------------- random model

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// rule 6, rule 12, rule 22, rule 23, rule 24, rule 26, rule 27, rule 37, rule 100: all of them at every step.
#[test]
fn whatever_is_done_in_whatever_order_every_rule_holds_at_every_step() {
    const SEEDS: u64 = 20;
    const OPERATIONS: usize = 1000;
    let (mut replies, mut orphans, mut starved, mut refused) = (0, 0, 0, 0);
    for seed in 1..=SEEDS {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let settings = |random: &mut Random| Settings {
            many_chunks: random.below(2) == 1,
            remote_invalidation: random.below(2) == 1,
            credits: random.pick(&[1, 2, 3, 8, 32]),
            inline: random.pick(&[1024, 2048, 4096]),
            max_call: random.pick(&[9000, 20_000, 1 << 20]),
            ..SETTINGS
        };
        let setup = Setup {
            client: settings(&mut random),
            server: settings(&mut random),
            max_segment: random.pick(&[600, 1000, 4096, 1 << 20]),
            read_depth: 16,
        };
        let mut pair = Pair::with(setup);
        let inline = setup.client.inline.min(setup.server.inline);
        let sizes =
            [4, 8, 12, 100, inline - 49, inline - 48, inline - 47, inline - 28, inline - 27, inline, 8999];
        let mut xid = 0;
        for _ in 0..OPERATIONS {
            pair.wire.clear();
            match random.below(24) {
                0..=3 => {
                    xid += 1;
                    let (len, reply) = (random.pick(&sizes).max(12), random.pick(&sizes));
                    // Now and then the program underestimates its reply.
                    let max_reply = if random.below(5) == 0 { random.pick(&sizes) } else { reply };
                    pair.start(xid, len, reply, reply_of(max_reply));
                }
                // As a driver does: never with the last credit.
                4 if pair.client.engine.credits_left() > 1 => {
                    xid += 1;
                    pair.one_way(xid, random.pick(&sizes).max(12));
                }
                5 => {
                    let open: Vec<u32> =
                        pair.made.iter().filter(|(_, m)| m.outcome.is_none()).map(|(xid, _)| *xid).collect();
                    if !open.is_empty() && random.below(3) == 0 {
                        pair.abandon(random.pick(&open));
                        orphans += 1;
                    }
                }
                6 | 7 => drop(pair.deliver(Client)),
                8 | 9 => drop(pair.read()),
                10 | 11 => drop(pair.deliver(Server)),
                12..=15 => {
                    // One-way calls are done in their turn, as a loop does that serves one request at a time.
                    if pair.take() && pair.made[&pair.handed.last().unwrap().xid.0].one_way {
                        pair.discard(pair.handed.len() - 1);
                    }
                }
                _ if pair.handed.is_empty() => {}
                16 if random.below(4) == 0 => {
                    // The program drops a request; its caller loses patience.
                    let at = random.below(pair.handed.len());
                    let dropped = pair.handed[at].xid.0;
                    pair.discard(at);
                    if pair.pending(dropped) {
                        pair.abandon(dropped);
                    }
                }
                _ => {
                    let at = random.below(pair.handed.len());
                    match pair.answer(at) {
                        Ok(()) => replies += 1,
                        Err(error) => {
                            assert_eq!(error.kind(), Kind::TooLong);
                            refused += 1;
                        }
                    }
                }
            }
            if random.below(2) == 0 {
                pair.step();
            }
            assert!(!pair.closing);
            let idle = pair.handed.is_empty() && !pair.server.engine.request_ready();
            if pair.client.engine.starved() && idle && !pair.step() {
                starved += 1;
                assert_eq!(pair.client.engine.credits_left(), 0);
                pair.close(Error::new(Kind::ConnectionLost, "starved"));
                all_ended(&pair);
                pair = Pair::with(setup);
            }
        }
        while pair.step() || pair.take() || !pair.handed.is_empty() {
            if !pair.handed.is_empty() {
                let _ = pair.answer(0);
            }
        }
        if !pair.client.engine.starved() {
            all_ended(&pair);
            // One-way calls after the last reply and dropped calls hold their credits and their memory, nothing else.
            let unwanted = pair.client.engine.common.window.abandoned();
            assert_eq!(pair.client.engine.common.window.in_flight(), unwanted);
        }
        pair.close(Error::new(Kind::ConnectionLost, "the end"));
        all_ended(&pair);
    }
    // The mix is worth something only while it reaches everything.
    assert!(
        replies > 1000 && orphans > 100 && starved > 0 && refused > 20,
        "{replies} {orphans} {starved} {refused}"
    );
}

fn all_ended(pair: &Pair) {
    for (xid, made) in &pair.made {
        assert!(made.outcome.is_some() != made.abandoned, "call {xid} has no end");
    }
}

/// Several threads serve, and some calls take long: the reply to a later call gives back the credit of one without a reply.
#[test]
fn there_are_receives_for_the_credits_while_one_way_calls_are_served() {
    let mut pair = Pair::warm(SETUP);
    for n in 0..50 {
        pair.one_way(100 + n, 40);
        pair.call(200 + n, 40, 28);
        pair.settle();
        while pair.take() {}
        pair.answer(pair.handed.len() - 1).unwrap();
        pair.settle();
        assert!(pair.client.closes.is_empty() && pair.server.closes.is_empty(), "after {n} one-way calls");
        pair.succeeded(200 + n);
    }
    // And none more than can be posted.
    while !pair.handed.is_empty() {
        pair.discard(0);
    }
    pair.settle();
    pair.still_serves(300);
}

#[test]
fn there_are_receives_for_the_credits_while_one_way_calls_wait_beside_calls_that_are_refused() {
    let mut pair = Pair::warm(SETUP);
    // As many as there are credits: a peer that has more refused makes this end hold no more for it.
    for n in 0..SETTINGS.credits {
        pair.one_way(100 + n, 40);
        pair.call(200 + n, SETTINGS.max_call + 100, 28);
        pair.settle();
        assert_eq!(pair.failure(200 + n), Kind::Peer);
    }
    while pair.take() {
        pair.discard(0);
    }
    pair.settle();
    pair.still_serves(300);
}
