//! Long messages: Read and Reply chunks.
#![forbid(unsafe_code)]

use super::*;

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

/// What a peer has placed counts, even if it is of no use; and only calls hold memory for replies.
#[test]
fn what_chunks_have_moved_is_known_and_none_outlives_its_call() {
    // Bytes of the Call, and what a reply that comes inline says about its Reply chunk.
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

/// rule 107: what a peer announces costs nothing, and what it leaves unanswered costs little.
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

/// rule 14, rule 107: each Call of a connection that pulls in turn.
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
    // A Call that waits when the connection ends no longer asks.
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
