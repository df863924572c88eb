//! What is exposed and for how long, and the ends of connections at any step.
#![forbid(unsafe_code)]

use super::*;

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

/// rule 67: a lost reply loses nothing but that call.
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
