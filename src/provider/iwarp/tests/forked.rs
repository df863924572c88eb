//! After fork(2).
#![forbid(unsafe_code)]

use super::*;

#[test]
fn a_forked_child_replies_and_the_parent_goes_on() {
    let mut pair = Pair::plain();
    pair.swap();
    for round in 0..3u8 {
        // Work that the parent has queued but not sent is not sent twice.
        pair.b.post_recv(sink(10));
        pair.b.post_recv(sink(10));
        pair.a.transmit.blocked = true;
        pair.a.post(WorkRequest::Send { gather: smallvec![region(&[round, 0])], invalidate: None });
        let a = &mut pair.a;
        let child = fork::testing::fork(|| {
            a.post(WorkRequest::Send { gather: smallvec![region(&[round, 1])], invalidate: None });
            a.terminate();
            a.unsent() == 0
        });
        assert!(child.succeeded());
        pair.run(|p| p.got_b.len() == 2);
        assert_eq!(received(pair.got_b.pop_front().unwrap()).0, [round, 1]);
        assert_eq!(received(pair.got_b.pop_front().unwrap()).0, [round, 0]);
        pair.send(&pattern(100_000, 1), 1);
        pair.read(b"still here");
        pair.swap();
        pair.send(b"and back", 1);
        pair.swap();
    }
}

#[test]
fn a_child_waits_while_its_parent_is_inside_a_message_and_notices_its_end() {
    let mut bench = Bench::initiator();
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(1 << 20, 0))], invalidate: None });
    assert!(bench.qp.transmit.is_inside_message());
    let mut stream = bench.sent();
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        qp.post(WorkRequest::Send { gather: smallvec![region(b"later")], invalidate: None });
        qp.wants_write() && !qp.flush().unwrap() && qp.unsent() >= 5
    });
    assert!(child.succeeded());
    // The socket had room the whole time.
    assert!(bench.sent().is_empty());
    while !bench.qp.flush().unwrap() {
        stream.extend(bench.sent());
    }
    stream.extend(bench.sent());
    assert!(parse(&stream).iter().all(|(_, crc)| *crc));
    // The other way round: a child that ends inside a message leaves a stream that nobody can use.
    let mut bench = Bench::initiator();
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(1 << 20, 0))], invalidate: None });
        qp.transmit.is_inside_message()
    });
    let id = child.id();
    child.wait_for_zombie();
    assert!(fork::process_gone(id));
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: None });
    assert_eq!(bench.qp.flush().unwrap_err().kind(), Kind::ConnectionLost);
    assert_eq!(drain(&mut bench.qp).unwrap_err().kind(), Kind::ConnectionLost);
    assert!(child.succeeded());
}

#[test]
fn whoever_reads_first_after_a_fork_goes_on_reading_and_the_other_notices() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"x"));
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| drain(qp).unwrap().len() == 1);
    assert!(child.succeeded());
    bench.feed(&untagged(Untagged { msn: 2, ..SEND }, b"y"));
    assert_eq!(drain(&mut bench.qp).unwrap_err().kind(), Kind::ConnectionLost);

    let mut bench = Bench::responder();
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    bench.qp.post_recv(sink(10));
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        theirs.read_exact(&mut [0]).unwrap();
        drain(qp).unwrap().is_empty()
    });
    assert_eq!(bench.give(&untagged(SEND, b"x")).unwrap().len(), 1);
    bench.feed(&untagged(Untagged { msn: 2, ..SEND }, b"y"));
    ours.write_all(b"!").unwrap();
    assert!(child.succeeded());
}

#[test]
fn whoever_has_missed_bytes_knows_and_ends_the_connection_for_nobody_else() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let qp = &mut bench.qp;
    let child = fork::testing::fork(|| {
        theirs.read_exact(&mut [0]).unwrap();
        let has_missed = qp.has_missed() && drain(qp).unwrap().is_empty() && qp.rest();
        qp.close();
        has_missed
    });
    assert_eq!(bench.give(&untagged(SEND, b"x")).unwrap().len(), 1);
    ours.write_all(b"!").unwrap();
    assert!(child.succeeded() && !bench.qp.has_missed());
    // The child has not shut it down. Where one has read, it goes on there, and its parent shuts it down only if it has ended.
    for goes_on in [true, false] {
        let mut bench = Bench::responder();
        bench.qp.post_recv(sink(10));
        bench.feed(&untagged(SEND, b"x"));
        let qp = &mut bench.qp;
        let child = fork::testing::fork(|| {
            let has_read = drain(qp).unwrap().len() == 1;
            theirs.write_all(&[0]).unwrap();
            if goes_on {
                theirs.read_exact(&mut [0]).unwrap();
            }
            has_read
        });
        ours.read_exact(&mut [0]).unwrap();
        if !goes_on {
            child.wait_for_zombie();
        }
        assert_eq!(drain(&mut bench.qp).unwrap_err().kind(), Kind::ConnectionLost);
        bench.qp.close();
        let is_there =
            matches!(socket::peek(bench.qp.fd()), Err(error) if error.kind() == ErrorKind::WouldBlock);
        assert_eq!(is_there, goes_on);
        ours.write_all(&[0]).unwrap();
        assert!(child.succeeded());
    }
}

/// What a child finds of a connection that its parent, which has ended, had made. `after`: what the parent did after the fork.
fn orphaned<const N: usize>(
    make: impl FnOnce() -> Bench,
    after: impl FnOnce(&mut Bench),
    find: impl FnOnce(&mut Bench) -> [bool; N],
) -> [bool; N] {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let parent = fork::testing::fork(|| {
        let mut bench = make();
        let parent = fork::process_id();
        let _child = fork::testing::fork(|| {
            while !fork::process_gone(parent) {
                std::thread::yield_now();
            }
            theirs.write_all(&find(&mut bench).map(u8::from)).unwrap();
            true
        });
        after(&mut bench);
        true
    });
    assert!(parent.succeeded());
    drop(theirs);
    let mut found = [0; N];
    ours.read_exact(&mut found).unwrap();
    found.map(|found| found == 1)
}

#[test]
fn nobody_takes_over_from_a_process_that_has_ended_in_the_midst_of_reading() {
    for inside in [false, true] {
        let after = |bench: &mut Bench| {
            bench.qp.shared.begin_to_read();
            if !inside {
                bench.qp.shared.end_to_read();
            }
        };
        let found = orphaned(Bench::responder, after, |bench| [bench.qp.has_missed(), bench.qp.claim(true)]);
        assert_eq!(found, [inside, !inside]);
    }
}

#[test]
fn who_takes_over_gets_what_was_asked_for_and_asks_for_the_rest() {
    for asked_after in [false, true] {
        let from = Segment { handle: Handle(0x77), length: 400, offset: 0 };
        let read = |id| WorkRequest::Read { id: WorkId(id), sink: sink(400), at: 0, from };
        // One has been requested, one finds no room, and the last one is in the queue.
        let make = || {
            let mut bench = Bench::initiator();
            bench.qp.transmit.ord = 1;
            bench.qp.post(read(0));
            bench.qp.post(read(1));
            bench.qp.flush().unwrap();
            bench.qp.post(read(2));
            bench
        };
        let request = |sent: &[u8]| parse(sent).into_iter().find(|(frame, _)| frame[3] & 15 == 1);
        let stag = |sent: &[u8]| {
            request(sent).map(|(frame, _)| u32::from_be_bytes(frame[20..24].try_into().unwrap()))
        };
        let respond = |bench: &mut Bench, stag| bench.give(&tagged(2, true, stag, 0, &pattern(400, 9)));
        let is =
            |done: &[Completion], id| matches!(done, [Completion::Read { id: WorkId(done) }] if *done == id);
        // The parent asks for one more: nobody knows what is to come.
        let after = |bench: &mut Bench| {
            if asked_after {
                bench.qp.transmit.ord = 2;
                bench.qp.flush().unwrap();
            }
        };
        let found = orphaned(make, after, |bench| {
            let first = stag(&bench.sent()).unwrap();
            let claimed = bench.qp.claim(true);
            if asked_after {
                return [claimed, drain(&mut bench.qp).is_err(), true, true];
            }
            let done = respond(bench, first).unwrap();
            let mut found = [claimed, is(&done, 0), false, false];
            for id in [1, 2] {
                bench.qp.flush().unwrap();
                let next = stag(&bench.sent()).unwrap();
                found[1 + id] = is(&respond(bench, next).unwrap(), id as u64);
            }
            found
        });
        assert_eq!(found, [true; 4]);
    }
}

#[test]
fn of_two_children_one_takes_over_and_the_other_one_knows() {
    let found = orphaned(
        Bench::responder,
        |_| {},
        |bench| {
            let qp = &mut bench.qp;
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            let before = qp.has_missed();
            let sibling = fork::testing::fork(|| {
                let claimed = qp.claim(true);
                theirs.write_all(&[u8::from(claimed)]).unwrap();
                theirs.read_exact(&mut [0]).unwrap();
                claimed
            });
            ours.read_exact(&mut [0]).unwrap();
            let after = qp.has_missed() && !qp.claim(true);
            ours.write_all(&[0]).unwrap();
            [before, sibling.succeeded(), after]
        },
    );
    assert_eq!(found, [false, true, true]);
}

#[test]
fn calls_belong_to_one_process_and_are_taken_over_from_one_that_has_ended() {
    let sends =
        |qp: &mut Iwarp| qp.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: None });
    // While the parent lives, no child gets the calls, and the parent keeps them.
    let mut bench = Bench::initiator();
    let qp = &mut bench.qp;
    assert!(fork::testing::fork(|| !qp.claim(false)).succeeded());
    assert!(bench.qp.claim(false));
    for sent_after in [false, true] {
        let make = || {
            let mut bench = Bench::initiator();
            sends(&mut bench.qp);
            bench
        };
        let after = |bench: &mut Bench| {
            if sent_after {
                // The child knows nothing of this Send.
                sends(&mut bench.qp);
            }
        };
        let found = orphaned(make, after, |bench| {
            let qp = &mut bench.qp;
            // Of two processes that inherit it, only the first gets it.
            let claimed = qp.claim(false);
            let other = fork::testing::fork(|| qp.claim(true)).succeeded();
            // Who only answers need not know what was sent.
            let answers = qp.claim(true);
            // What is its own it may end.
            qp.close();
            let ended = matches!(socket::peek(qp.fd()), Ok(None));
            [claimed, answers, ended, other]
        });
        assert_eq!(found, [!sent_after, true, true, sent_after]);
    }
    // A process that has missed bytes can make nothing of what follows, whichever process it is.
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"x"));
    let qp = &mut bench.qp;
    assert!(fork::testing::fork(|| drain(qp).unwrap().len() == 1).succeeded());
    assert!(!bench.qp.claim(false));
}
