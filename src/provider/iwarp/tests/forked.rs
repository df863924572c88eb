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

#[test]
fn nobody_takes_over_from_a_process_that_has_ended_in_the_midst_of_reading() {
    for inside in [false, true] {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let parent = fork::testing::fork(|| {
            let mut bench = Bench::responder();
            let (parent, qp) = (fork::process_id(), &mut bench.qp);
            let _child = fork::testing::fork(|| {
                while !fork::process_gone(parent) {
                    std::thread::yield_now();
                }
                let found = [qp.has_missed(), qp.claim(true)];
                theirs.write_all(&found.map(u8::from)).unwrap();
                true
            });
            bench.qp.shared.begin_to_read();
            if !inside {
                bench.qp.shared.end_to_read();
            }
            true
        });
        assert!(parent.succeeded());
        let mut found = [9; 2];
        ours.read_exact(&mut found).unwrap();
        assert_eq!(found, [inside, !inside].map(u8::from));
    }
}

#[test]
fn of_two_children_one_takes_over_and_the_other_one_knows() {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let parent = fork::testing::fork(|| {
        let mut bench = Bench::responder();
        let (parent, qp) = (fork::process_id(), &mut bench.qp);
        let _child = fork::testing::fork(|| {
            while !fork::process_gone(parent) {
                std::thread::yield_now();
            }
            let (mut mine, mut its) = UnixStream::pair().unwrap();
            let before = qp.has_missed();
            let sibling = fork::testing::fork(|| {
                let claimed = qp.claim(true);
                its.write_all(&[u8::from(claimed)]).unwrap();
                its.read_exact(&mut [0]).unwrap();
                claimed
            });
            let mut claimed = [9];
            mine.read_exact(&mut claimed).unwrap();
            let after = qp.has_missed() && !qp.claim(true);
            mine.write_all(&[0]).unwrap();
            assert!(sibling.succeeded());
            theirs.write_all(&[u8::from(before), claimed[0], u8::from(after)]).unwrap();
            true
        });
        true
    });
    assert!(parent.succeeded());
    let mut found = [9; 3];
    ours.read_exact(&mut found).unwrap();
    assert_eq!(found, [0, 1, 1]);
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
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let parent = fork::testing::fork(|| {
            let mut bench = Bench::initiator();
            sends(&mut bench.qp);
            let parent = fork::process_id();
            let qp = &mut bench.qp;
            let _child = fork::testing::fork(|| {
                while !fork::process_gone(parent) {
                    std::thread::yield_now();
                }
                // Of two processes that inherit it, only the first gets it.
                let claimed = qp.claim(false);
                let other = fork::testing::fork(|| qp.claim(true)).succeeded();
                // Who only answers need not know what was sent.
                let answers = qp.claim(true);
                // What is its own it may end.
                qp.close();
                let ended = matches!(socket::peek(qp.fd()), Ok(None));
                theirs.write_all(&[claimed, answers, ended, other].map(u8::from)).unwrap();
                true
            });
            if sent_after {
                // The child knows nothing of this Send.
                sends(&mut bench.qp);
            }
            true
        });
        assert!(parent.succeeded());
        let mut found = [9; 4];
        ours.read_exact(&mut found).unwrap();
        assert_eq!(found, [!sent_after, true, true, sent_after].map(u8::from));
    }
    // A process that has missed bytes can make nothing of what follows, whichever process it is.
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"x"));
    let qp = &mut bench.qp;
    assert!(fork::testing::fork(|| drain(qp).unwrap().len() == 1).succeeded());
    assert!(!bench.qp.claim(false));
}
