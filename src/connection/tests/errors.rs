//! What ends a call, what is answered with an error, and what is dropped.
#![forbid(unsafe_code)]

use super::*;

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

/// rule 67, rule 80: a well-formed header that returns a Reply chunk other than the one offered ends the call for good.
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
        // A one-way call would never give its Receive back.
        assert_eq!(pair.server.device.receives, receives);
        pair.answer(0).unwrap();
        pair.drive();
        pair.succeeded(xid);
        assert_eq!(pair.server.device.receives, receives);
    }
    // Two at once: the later one can be answered, whichever returns last.
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

/// Where another process answers requests as well.
#[test]
fn of_deferred_requests_it_is_known_which_wait_for_their_answer() {
    let mut pair = Pair::warm(SETUP);
    pair.server.engine.keep_deferred(1);
    pair.server.engine.shares();
    let receives = pair.server.device.receives;
    for xid in 1..=4 {
        pair.call(xid, 40, 28);
        pair.settle();
        assert!(pair.take());
    }
    let ids: Vec<RequestId> = pair.handed.iter().map(|request| request.id).collect();
    let fates = |pair: &Pair| ids.iter().map(|id| pair.server.engine.fate(*id)).collect::<Vec<_>>();
    use Fate::{Answered, PassedOver, Waits};
    // One of them is answered before its routine has returned.
    pair.server.engine.answered_elsewhere(ids[3]);
    assert!(pair.server.engine.has_handed());
    // The oldest last, whose routine has taken its time.
    [1, 2, 0, 3].into_iter().for_each(|at| pair.defer(at));
    assert!(!pair.server.engine.has_handed());
    assert_eq!(fates(&pair), [PassedOver, PassedOver, Waits, Answered]);
    assert_eq!(pair.server.engine.deferred().collect::<Vec<_>>(), [ids[2]]);
    pair.server.engine.answered_elsewhere(ids[2]);
    assert_eq!(fates(&pair), [PassedOver, PassedOver, Answered, Answered]);
    for (at, why) in [(0, "too many later requests"), (3, "was answered before")] {
        let reply = pair.buf(&reply_message(at as u32 + 1, 28));
        let error = pair.server.engine.reply(ids[at], reply).unwrap_err();
        assert!(error.text().contains(why), "{error}");
    }
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
