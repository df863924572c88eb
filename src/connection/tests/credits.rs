//! Credits, and the Receives behind them.
#![forbid(unsafe_code)]

use super::*;

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

/// A call that nobody answers holds the only credit; nothing arrives that would let the others go out.
#[test]
fn calls_that_wait_for_a_credit_go_out_when_more_are_asked_for() {
    let mut pair = Pair::warm(Setup { client: Settings { credits: 1, ..SETTINGS }, ..SETUP });
    pair.hold_replies = true;
    for xid in 1..=3 {
        pair.call(xid, 40, 28);
    }
    assert_eq!((pair.sends(Client), pair.client.engine.credits_left()), (1, 0));
    // The credits that are told are constant in these tests, except here.
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

/// rule 30: an error is not a valid reply.
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
            // A reply that exceeds the room for it ends in RDMA_ERROR, which carries the field as well.
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

/// rule 23: what was sent stays with its connection, what was not sent goes over the next one.
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
    // Before the first reply nobody knows the grant.
    let mut pair = Pair::new();
    pair.one_way(1, 40);
    pair.succeeded(1);
}

/// Linux answers the next call while it is still reading.
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
        // The next reply, or one of those that follow, shows that it is over.
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
            // Calls that offer a Reply chunk; the later one is answered first.
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

/// RFC 8166 §3.3.1: in place of calls that another process has answered, the peer may send further ones, whether or not that is
/// known here.
#[test]
fn where_another_process_answers_too_there_is_a_receive_for_each_credit() {
    let mut pair = Pair::warm(SETUP);
    let receives = pair.server.device.receives;
    let take = |pair: &mut Pair, xid| {
        pair.call(xid, 40, 28);
        pair.settle();
        assert!(pair.take());
        pair.server.device.receives
    };
    assert_eq!(take(&mut pair, 1), receives - 1, "a Call keeps its own");
    pair.server.engine.shares();
    pair.drain(Server);
    assert_eq!(pair.server.device.receives, receives);
    assert_eq!(take(&mut pair, 2), receives);
    pair.server.engine.answered_elsewhere(pair.handed[0].id);
    assert_eq!(take(&mut pair, 3), receives);
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
    // A reply that nobody waits for any more shows it just as well.
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

/// Each call takes a place in tables until it is answered. If memory for these runs out, that ends the connection, and no more.
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

/// Several threads serve, and some calls take long: the reply to a later call gives back the credit of a one-way call.
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
    // And no more than can be posted.
    while !pair.handed.is_empty() {
        pair.discard(0);
    }
    pair.settle();
    pair.still_serves(300);
}

#[test]
fn there_are_receives_for_the_credits_while_one_way_calls_wait_beside_calls_that_are_refused() {
    let mut pair = Pair::warm(SETUP);
    // As many as there are credits: if a peer has more calls refused, this end holds no more for it.
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
