//! Handles, and what becomes of their memory when they are taken back.
#![forbid(unsafe_code)]

use super::*;

#[test]
fn a_source_was_read_when_all_of_it_was_asked_for_and_is_framed() {
    let mut bench = Bench::responder();
    let source = bench.qp.expose_source(region(&pattern(1 << 20, 1))).unwrap();
    let stag = source.handle.0;
    assert_eq!(bench.qp.was_read(source.handle), Some(false));
    bench.give(&read_request(1, 5, 0, 1000, stag, 0)).unwrap();
    assert_eq!(bench.qp.was_read(source.handle), Some(false));
    bench.give(&read_request(2, 6, 0, (1 << 20) - 1000, stag, 1000)).unwrap();
    // The socket does not take all of it at once.
    assert_eq!(bench.qp.was_read(source.handle), Some(false));
    while !bench.qp.transmit.is_all_framed() {
        bench.sent();
        let _ = bench.qp.flush().unwrap();
    }
    assert_eq!(bench.qp.was_read(source.handle), Some(true));
    bench.qp.invalidate(source.handle).unwrap();
    assert_eq!(bench.qp.was_read(source.handle), Some(true), "nothing is left");
    assert!(bench.qp.failed.is_none());
}

#[test]
fn a_handle_works_until_it_is_taken_back() {
    let mut bench = Bench::responder();
    let memory = sink(100);
    let to = bench.qp.expose_sink(memory.clone()).unwrap();
    assert_eq!((to.length, to.offset), (100, 0));
    bench.give(&tagged(0, true, to.handle.0, 0, b"here")).unwrap();
    let memory = memory.into_buf(100).unwrap_err();
    bench.qp.invalidate(to.handle).unwrap();
    bench.qp.invalidate(to.handle).unwrap();
    assert_eq!(bytes(memory, 100)[..5], *b"here\0");
    bench.expect_fault(&tagged(0, true, to.handle.0, 0, b"here"), Fault::STAG);
}

/// rule 105
#[test]
fn handles_are_random_and_each_its_own() {
    let mut bench = Bench::responder();
    let mut all: Vec<_> = (0..1000).map(|_| bench.qp.expose_source(region(b"x")).unwrap().handle.0).collect();
    assert!(all.windows(2).filter(|w| w[1] > w[0]).count() < 700, "they do not count up");
    all.sort_unstable();
    all.dedup();
    assert!(all.len() == 1000 && all[0] != 0);
    assert!(all.iter().fold(0, |bits, stag| bits | stag) == u32::MAX);
}

#[test]
fn a_write_under_way_stops_when_its_handle_is_taken_back() {
    for detach in [false, true] {
        let mut bench = Bench::initiator();
        let mut program = Program::new(&[0; 40_000]);
        let to = bench.qp.expose_sink(program.sink()).unwrap();
        let write = tagged(0, true, to.handle.0, 0, &pattern(40_000, 1));
        bench.give(&write[..20_000]).unwrap();
        assert!(bench.qp.receive.is_placing());
        if detach {
            bench.qp.detach(to.handle).unwrap();
        } else {
            bench.qp.invalidate(to.handle).unwrap();
        }
        let memory = program.bytes();
        assert!(memory[100] != 0 && memory[20_000..].iter().all(|b| *b == 0));
        memory.fill(0);
        if detach {
            // The peer notices nothing, not in another Write either, and the stream stays in step.
            bench.give(&write[20_000..]).unwrap();
            bench.give(&tagged(0, true, to.handle.0, 39_990, b"1234567890")).unwrap();
            let big = tagged(0, true, to.handle.0, 0, &pattern(39_999, 1));
            for part in big.chunks(15_000) {
                bench.give(part).unwrap();
            }
            bench.qp.post_recv(sink(1));
            assert_eq!(bench.give(&untagged(SEND, b"x")).unwrap().len(), 1);
            bench.expect_fault(&tagged(0, true, to.handle.0, 39_991, b"1234567890"), Fault::BOUNDS);
        } else {
            bench.expect_fault(&write[20_000..20_010], Fault::STAG);
        }
        assert!(program.bytes().iter().all(|b| *b == 0));
    }
}

#[test]
fn receives_are_withdrawn_but_for_the_one_that_a_message_has_begun_to_fill() {
    let part = |bytes: &[u8]| untagged(Untagged { last: false, ..SEND }, bytes);
    let rest = |mo, bytes: &[u8]| untagged(Untagged { mo, ..SEND }, bytes);
    let large = rest(0, &pattern(20_000, 1));
    // What has come of the first message, what is still to come, its bytes, and whether its Receive has to stay.
    let cases = [
        (vec![], rest(0, b"whole"), b"whole".to_vec(), false),
        (rest(0, b"whole")[..25].to_vec(), rest(0, b"whole")[25..].to_vec(), b"whole".to_vec(), false),
        (part(b"one, "), rest(5, b"two"), b"one, two".to_vec(), true),
        (large[..9_000].to_vec(), large[9_000..].to_vec(), pattern(20_000, 1), true),
        (
            [part(b"one, "), rest(5, &pattern(20_000, 1))[..9_000].to_vec()].concat(),
            rest(5, &pattern(20_000, 1))[9_000..].to_vec(),
            [b"one, ".to_vec(), pattern(20_000, 1)].concat(),
            true,
        ),
    ];
    for (before, after, message, begun) in cases {
        let mut bench = Bench::responder();
        let first = sink(20_005);
        bench.qp.post_recv(first.clone());
        (0..3).for_each(|_| bench.qp.post_recv(sink(10)));
        assert!(bench.give(&before).unwrap().is_empty());
        let qp = &mut bench.qp;
        assert!(fork::testing::fork(|| qp.withdraw() == 0).succeeded());
        assert_eq!(bench.qp.withdraw(), if begun { 3 } else { 4 });
        assert_eq!(first.into_buf(0).is_err(), begun);
        assert_eq!(bench.qp.withdraw(), 0);
        (0..2).for_each(|_| bench.qp.post_recv(sink(30_000)));
        let got = bench.give(&after).unwrap();
        assert!(received(got.into_iter().next().unwrap()).0 == message);
        let long = untagged(Untagged { msn: 2, ..SEND }, &pattern(30_000, 2));
        assert!(received(bench.give(&long).unwrap().remove(0)).0 == pattern(30_000, 2));
        assert_eq!(bench.qp.withdraw(), usize::from(begun));
    }
    // A Write under way has nothing to do with Receives.
    let mut bench = Bench::responder();
    let to = bench.qp.expose_sink(sink(20_000)).unwrap();
    bench.qp.post_recv(sink(10));
    bench.give(&tagged(0, true, to.handle.0, 0, &pattern(20_000, 1))[..9_000]).unwrap();
    assert_eq!(bench.qp.withdraw(), 1);
}

#[test]
fn memory_that_is_being_read_is_taken_back_by_ending_the_connection() {
    let mut bench = Bench::responder();
    let mut program = Program::new(&pattern(3 << 20, 1));
    let from = bench.qp.expose_source(program.source()).unwrap();
    bench.give(&read_request(1, 0xAB, 0, 3 << 20, from.handle.0, 0)).unwrap();
    assert!(bench.qp.transmit.is_half_sent(), "the socket is full");
    // Now the socket has room, but there can be no Terminate inside an FPDU.
    let stream = bench.sent();
    assert!(stream.len() > 100_000 && stream[2..4] == hex!("8142"));
    bench.qp.invalidate(from.handle).unwrap();
    assert_eq!(bench.qp.poll().unwrap_err().kind(), Kind::ConnectionLost);
    assert!(bench.sent().is_empty());
    assert!(program.is_back());
}

#[test]
fn what_is_framed_already_goes_out_from_a_copy_when_its_handle_is_taken_back() {
    let mut bench = Bench::responder();
    let data = pattern(150_000, 1);
    let mut program = Program::new(&data);
    let from = bench.qp.expose_source(program.source()).unwrap();
    // Fill the socket first, then ask.
    bench.qp.transmit.may_send = true;
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(300_000, 2))], invalidate: None });
    bench.give(&read_request(1, 0xAB, 7, 150_000, from.handle.0, 0)).unwrap();
    assert!(!bench.qp.flush().unwrap());
    assert!(bench.qp.transmit.is_all_framed(), "framed");
    assert!(bench.qp.transmit.is_inside_message(), "and not sent");
    let copied = bench.qp.copied_bytes;
    bench.qp.invalidate(from.handle).unwrap();
    assert_eq!(bench.qp.copied_bytes - copied, 150_000);
    program.bytes().fill(0);
    assert!(payloads(&bench.sent_to_the_end(), 2) == data);
}

#[test]
fn a_detached_source_is_served_from_a_copy() {
    for options in [Options::default(), Options { max_fpdu: Some(1448), ..Options::default() }] {
        let mut bench = Bench::responder_to(&REQUEST, options).0;
        let data = pattern(3 << 20, 1);
        let mut program = Program::new(&data);
        let from = bench.qp.expose_source(program.source()).unwrap();
        // Half a response has left, and another one waits.
        bench.give(&read_request(1, 0xAB, 0, (3 << 20) - 1, from.handle.0, 1)).unwrap();
        bench.give(&read_request(2, 0xAB, 0, 7000, from.handle.0, 3000)).unwrap();
        assert!(bench.qp.transmit.is_half_sent());
        bench.qp.detach(from.handle).unwrap();
        program.bytes().fill(0);
        let copied = bench.qp.copied_bytes;
        bench.qp.detach(from.handle).unwrap();
        assert_eq!(bench.qp.copied_bytes, copied, "the second time there is nothing to do");
        assert!(payloads(&bench.sent_to_the_end(), 2) == [&data[1..], &data[3000..10_000]].concat());
        bench.give(&read_request(3, 0xAB, 0, 5, from.handle.0, 1)).unwrap();
        assert_eq!(payloads(&bench.sent(), 2), data[1..6]);
    }
}

#[test]
fn a_detached_source_of_our_own_is_not_copied() {
    let mut bench = Bench::responder();
    let from = bench.qp.expose_source(region(b"frozen")).unwrap();
    bench.qp.detach(from.handle).unwrap();
    assert_eq!(bench.qp.copied_bytes, 0);
    bench.give(&read_request(1, 0xAB, 0, 6, from.handle.0, 0)).unwrap();
    assert_eq!(payloads(&bench.sent(), 2), b"frozen");
}
