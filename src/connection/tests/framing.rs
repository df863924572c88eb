//! What a message looks like on the wire, and which ones are refused.
#![forbid(unsafe_code)]

use super::*;

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
