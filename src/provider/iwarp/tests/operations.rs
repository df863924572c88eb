//! What good peers do: every operation, in every size, both ways.
#![forbid(unsafe_code)]

use super::*;

#[test]
fn a_send_and_a_write_go_out_as_the_vectors() {
    let mut bench = Bench::initiator();
    bench
        .qp
        .post(WorkRequest::Send { gather: smallvec![region(&[1, 2, 3]), region(&[4, 5])], invalidate: None });
    assert_eq!(
        bench.sent(),
        hex!("0017 4143 00000000 00000000 00000001 00000000 0102030405 000000 16053efb")
    );
    let handle = Handle(0x1234_5678);
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"abcd")], invalidate: Some(handle) });
    assert_eq!(bench.sent(), hex!("0016 4144 12345678 00000000 00000002 00000000 61626364 ea5e61fb"));
    let to = Segment { handle, length: 4, offset: 0x1000 };
    bench.qp.post(WorkRequest::Write { gather: smallvec![region(b"WXYZ")], to });
    assert!(bench.qp.wants_write() && bench.qp.unsent() == 4);
    assert!(bench.qp.flush().unwrap());
    assert_eq!(bench.sent(), hex!("0012 c140 12345678 0000000000001000 5758595a c3f72578"));
    assert!(!bench.qp.wants_write() && bench.qp.unsent() == 0);
}

#[test]
fn a_read_request_goes_out_as_the_vector_but_for_its_random_handle() {
    let mut bench = Bench::initiator();
    let from = Segment { handle: Handle(0x1122_3300), length: 4096, offset: 0x3000 };
    bench.qp.post(WorkRequest::Read { id: WorkId(1), sink: sink(4096), at: 0, from });
    bench.qp.flush().unwrap();
    let mut sent = bench.sent();
    let stag = u32::from_be_bytes(sent[20..24].try_into().unwrap());
    assert_ne!(stag, 0);
    sent[20..24].copy_from_slice(&hex!("aabbcc00"));
    sent[24..32].copy_from_slice(&hex!("0000000000002000"));
    reseal(&mut sent);
    assert_eq!(
        sent,
        hex!(
            "002e 4141 00000000 00000001 00000001 00000000 aabbcc00 0000000000002000 00001000 11223300"
            "0000000000003000 7f768c49"
        )
    );
}

fn sizes(fpdu: usize) -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 8191, 8192, 8193];
    for n in [1, 2, 3] {
        for payload in [fpdu - 20, fpdu - 24] {
            sizes.extend([n * payload - 5, n * payload - 1, n * payload, n * payload + 1, n * payload + 4]);
        }
    }
    sizes
}

fn exercise(pair: &mut Pair) {
    for _ in 0..2 {
        let fpdu = pair.a.transmit.fpdu();
        for (seed, size) in sizes(fpdu).into_iter().chain([1 << 20]).enumerate() {
            let data = pattern(size, seed);
            pair.send(&data, 1);
            pair.send(&data, 7);
            pair.write(&data, 3);
            pair.read(&data);
        }
        pair.swap();
    }
}

#[test]
fn every_operation_carries_every_size_both_ways_in_large_fpdus() {
    exercise(&mut Pair::plain());
}

#[test]
fn every_operation_carries_every_size_both_ways_in_small_fpdus() {
    exercise(&mut Pair::small());
}

#[test]
fn sixteen_mebibytes_arrive_whole_by_each_operation() {
    let data = pattern(16 << 20, 3);
    let mut pair = Pair::plain();
    pair.send(&data, 3000);
    pair.write(&data, 2);
    pair.read(&data);
    pair.swap();
    pair.read(&data);
}

#[test]
fn the_contract_is_kept() {
    let sockets = std::cell::RefCell::new(Vec::new());
    contract::check(&|| {
        let Pair { a, b, _sockets, .. } = Pair::plain();
        sockets.borrow_mut().push(_sockets);
        [Box::new(a), Box::new(b)]
    });
}

#[test]
fn a_device_says_that_it_has_handed_over_all_when_nothing_is_left_to_do() {
    let mut pair = Pair::plain();
    for _ in 0..4 {
        pair.b.post_recv(sink(100));
    }
    let polled = |end: &mut Iwarp| loop {
        if let Some(completion) = end.poll().unwrap() {
            return received(completion).0;
        }
        wait::until(end.fd(), wait::IN, Some(Duration::from_secs(10)), None).unwrap();
    };
    for message in [b"one", b"two"] {
        pair.a.post(WorkRequest::Send { gather: smallvec![region(message)], invalidate: None });
    }
    assert_eq!((polled(&mut pair.b), pair.b.drained()), (b"one".to_vec(), false));
    assert_eq!((polled(&mut pair.b), pair.b.drained()), (b"two".to_vec(), true));
    // From here on it would have to look again.
    assert!(!pair.b.drained());
    // An RDMA Read of the peer arrives with what is received, and has to be answered.
    let from = pair.b.expose_source(region(&pattern(1 << 20, 1))).unwrap();
    pair.a.post(WorkRequest::Send { gather: smallvec![region(b"three")], invalidate: None });
    pair.a.post(WorkRequest::Read { id: WorkId(9), sink: sink(1 << 20), at: 0, from });
    pair.a.flush().unwrap();
    assert_eq!((polled(&mut pair.b), pair.b.drained()), (b"three".to_vec(), false));
    pair.run(|p| !p.got_a.is_empty());
}

#[test]
fn without_crc_on_either_side_the_word_is_zero_and_not_checked() {
    let none = Options { crc: false, ..Options::default() };
    let mut pair = Pair::new(none.clone(), none.clone());
    assert!(!pair.a.crc() && !pair.b.crc());
    pair.write(&pattern(100_000, 1), 1);
    pair.read(&pattern(100_000, 2));
    let request = hex!("4d504120494420526571204672616d65 10 02 0004 0010 0010");
    let (mut bench, reply) = Bench::responder_to(&request, none);
    assert_eq!(reply[16], 0x10);
    bench.qp.post_recv(sink(8));
    let mut send = untagged(SEND, b"x");
    let at = send.len() - 1;
    send[at] ^= 1;
    assert_eq!(bench.give(&send).unwrap().len(), 1);
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"y")], invalidate: None });
    let sent = bench.sent();
    assert_eq!(sent[sent.len() - 4..], [0; 4]);
}

#[test]
fn one_side_that_wants_crc_gets_it() {
    for (a, b) in [(true, false), (false, true)] {
        let pair =
            Pair::new(Options { crc: a, ..Options::default() }, Options { crc: b, ..Options::default() });
        assert!(pair.a.crc() && pair.b.crc());
    }
}

#[test]
fn an_rdma_write_of_a_mebibyte_is_hardly_copied_by_its_receiver() {
    let mut pair = Pair::plain();
    // TCP's segments grow with the first data.
    pair.write(&pattern(4 << 20, 0), 1);
    let (copied, calls) = (pair.b.copied_bytes, pair.b.syscalls);
    pair.write(&pattern(1 << 20, 1), 1);
    let (copied, calls) = (pair.b.copied_bytes - copied, pair.b.syscalls - calls);
    assert!(copied < 4096, "{copied} bytes copied");
    assert!(copied > 0, "read-ahead copies a little: is the counter alive?");
    assert!(calls < 100, "{calls} system calls");
    assert!(pair.a.copied_bytes < 4096);
}

#[test]
fn small_fpdus_are_read_many_at_a_time() {
    let mut pair = Pair::small();
    let calls = pair.b.syscalls;
    pair.write(&pattern(1 << 20, 1), 1);
    // 730 FPDUs.
    assert!(pair.b.syscalls - calls < 200, "{}", pair.b.syscalls - calls);
}

#[test]
fn many_requests_in_flight_complete_in_order() {
    let mut pair = Pair::new(
        Options { max_fpdu: Some(2000), ..Options::default() },
        Options { ird: 3, max_fpdu: Some(2000), ..Options::default() },
    );
    assert_eq!(pair.a.limits().read_depth, 16, "the responder raises its IRD");
    pair.a.transmit.ord = 3;
    let data: Vec<_> = (0..20).map(|i| pattern(5000 + i, i)).collect();
    let mut memory = Vec::new();
    for (i, data) in data.iter().enumerate() {
        let from = pair.b.expose_source(region(data)).unwrap();
        let to = sink(data.len());
        memory.push(to.clone());
        pair.a.post(WorkRequest::Read { id: WorkId(i as u64), sink: to, at: 0, from });
        pair.b.post_recv(sink(10));
        pair.a.post(WorkRequest::Send { gather: smallvec![region(&[i as u8])], invalidate: None });
    }
    // The Sends did not wait for the Reads that stepped aside.
    assert_eq!((pair.a.transmit.outstanding.len(), pair.a.unsent()), (3, 0));
    assert!(!pair.a.flush().unwrap() && !pair.a.wants_write());
    pair.run(|p| p.got_a.len() == 20 && p.got_b.len() == 20);
    for (i, completion) in pair.got_a.drain(..).enumerate() {
        assert!(matches!(completion, Completion::Read { id } if id.0 == i as u64));
    }
    for (i, completion) in pair.got_b.drain(..).enumerate() {
        assert_eq!(received(completion).0, [i as u8]);
    }
    for (memory, data) in memory.into_iter().zip(data) {
        assert_eq!(bytes(memory, data.len())[..], data);
    }
    assert!(pair.a.flush().unwrap());
}

#[test]
fn a_read_sees_the_write_that_was_posted_before_it() {
    let mut pair = Pair::plain();
    let memory = sink(200_000);
    let to = pair.b.expose_sink(memory).unwrap();
    let data = pattern(200_000, 5);
    let source = pair.b.expose_source(region(&data)).unwrap();
    let got = sink(200_000);
    pair.b.post_recv(sink(1));
    pair.a.post(WorkRequest::Write { gather: smallvec![region(&data)], to });
    pair.a.post(WorkRequest::Read { id: WorkId(0), sink: got.clone(), at: 0, from: source });
    pair.a.flush().unwrap();
    pair.run(|p| p.got_a.len() == 1);
    assert_eq!(bytes(got, data.len())[..], data);
}

#[test]
fn a_long_read_response_lets_sends_pass_and_a_write_waits_for_it() {
    let mut bench = Bench::responder_to(&REQUEST, Options { max_fpdu: Some(1000), ..Options::default() }).0;
    let source = bench.qp.expose_source(region(&pattern(4000, 1))).unwrap();
    bench.qp.post_recv(sink(0));
    bench.give(&untagged(SEND, b"")).unwrap();
    // Queued together: a response of five frames, then a Send of three and a Write of two.
    let to = Segment { handle: Handle(7), length: 1500, offset: 0 };
    bench.qp.transmit.blocked = true;
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&pattern(2500, 2))], invalidate: None });
    bench.qp.post(WorkRequest::Write { gather: smallvec![region(&pattern(1500, 3))], to });
    bench.qp.transmit.may_send = false;
    bench.feed(&read_request(1, 0xAB, 0, 4000, source.handle.0, 0));
    bench.qp.fill().ok().unwrap();
    bench.qp.process().ok().unwrap();
    assert_eq!(drain(&mut bench.qp).unwrap().len(), 0);
    let order: Vec<_> =
        parse(&bench.sent()).iter().map(|(f, crc)| (f[3] & 15, f[2] & 0x40 != 0, *crc)).collect();
    let (response, send, write) = (2, 3, 0);
    let expected = [
        (send, false),
        (response, false),
        (send, false),
        (response, false),
        (send, true),
        (response, false),
        (response, false),
        (response, true),
        (write, false),
        (write, true),
    ];
    assert_eq!(order, expected.map(|(opcode, last)| (opcode, last, true)));
}

#[test]
fn a_read_response_waits_for_the_end_of_a_write() {
    let mut bench = Bench::initiator();
    let source = bench.qp.expose_source(region(b"answer")).unwrap();
    let to = Segment { handle: Handle(7), length: 1 << 20, offset: 0 };
    bench.qp.post(WorkRequest::Write { gather: smallvec![region(&pattern(1 << 20, 3))], to });
    assert!(!bench.qp.flush().unwrap());
    bench.give(&read_request(1, 0xAB, 0, 6, source.handle.0, 0)).unwrap();
    let mut stream = Vec::new();
    while !bench.qp.flush().unwrap() {
        stream.extend(bench.sent());
    }
    stream.extend(bench.sent());
    let fpdus = parse(&stream);
    let (answer, write) = fpdus.split_last().unwrap();
    assert_eq!(answer.0[16..], *b"answer");
    assert!(write.iter().all(|(fpdu, crc)| fpdu[3] == 0x40 && *crc));
}

#[test]
fn inside_a_run_of_large_fpdus_only_a_header_is_read_ahead() {
    let mut bench = Bench::initiator();
    let to = bench.qp.expose_sink(sink(120_000)).unwrap().handle.0;
    bench.give(&tagged(0, false, to, 0, &pattern(40_000, 1))).unwrap();
    let before = bench.qp.copied_bytes;
    bench.give(&tagged(0, false, to, 40_000, &pattern(40_000, 2))).unwrap();
    assert_eq!(bench.qp.copied_bytes - before, 4, "20 bytes are read, of which 16 are a header");
}

#[test]
fn sequence_numbers_wrap_to_zero() {
    let mut pair = Pair::plain();
    for queue in [0, 1] {
        pair.a.shared.set_msn(queue, u32::MAX);
    }
    (pair.b.receive.send_msn, pair.b.receive.read_msn) = (u32::MAX, u32::MAX);
    for i in 0..3 {
        pair.send(&[i], 1);
        pair.read(&[i]);
    }
    assert_eq!(pair.b.receive.send_msn, 2);
}

#[test]
fn every_kind_of_send_is_received() {
    let mut bench = Bench::responder();
    let handle = bench.qp.expose_sink(sink(10)).unwrap().handle.0;
    let other = bench.qp.expose_source(region(b"x")).unwrap().handle.0;
    for (i, opcode) in [3, 5, 4, 6].into_iter().enumerate() {
        let invalidate = if i < 2 { 0 } else { [handle, other][i - 2] };
        bench.qp.post_recv(sink(10));
        let send = Untagged { opcode, invalidate, msn: i as u32 + 1, ..SEND };
        let got = bench.give(&untagged(send, b"abc")).unwrap().pop().unwrap();
        assert_eq!(received(got), (b"abc".to_vec(), (i >= 2).then_some(invalidate)));
    }
    // Invalidated handles are gone.
    bench.qp.post_recv(sink(10));
    let again = Untagged { opcode: 4, invalidate: handle, msn: 5, ..SEND };
    bench.expect_fault(&untagged(again, b""), Fault::CANNOT_INVALIDATE);
}

#[test]
fn work_that_cannot_be_is_refused_with_an_error_and_no_panic() {
    let bad = |request: WorkRequest| {
        let mut bench = Bench::initiator();
        bench.qp.post(request);
        assert_eq!(bench.qp.poll().unwrap_err().kind(), Kind::Invalid);
        assert!(bench.qp.expose_source(region(b"x")).is_err());
    };
    let from = Segment { handle: Handle(1), length: 10, offset: 0 };
    bad(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: 1, from });
    bad(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: usize::MAX, from });
    bad(WorkRequest::Write { gather: smallvec![region(b"123")], to: from });
    let mut bench = Bench::initiator();
    bench.qp.transmit.ord = 0;
    bench.qp.post(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: 0, from });
    assert_eq!(bench.qp.poll().unwrap_err().kind(), Kind::Invalid);
    let too_long = Options { private_data: vec![0; 249], ..Options::default() };
    assert_eq!(Iwarp::responder(0, too_long).err().unwrap().kind(), Kind::Invalid);
}

#[test]
fn when_the_peer_closes_everything_complete_is_delivered_first() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(10));
    bench.qp.post_recv(sink(10));
    bench.feed(&untagged(SEND, b"one"));
    bench.feed(&untagged(Untagged { msn: 2, ..SEND }, b"two")[..20]);
    let Bench { mut qp, _socket, peer } = bench;
    drop(peer);
    // Sending fails first; that must not hide what has arrived.
    qp.transmit.may_send = true;
    qp.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: None });
    assert!(qp.flush().is_err());
    assert_eq!(received(qp.poll().unwrap().unwrap()).0, b"one");
    let error = qp.poll().unwrap_err();
    assert_eq!(error.kind(), Kind::ConnectionLost);
}

#[test]
fn a_full_socket_is_waited_for_and_nothing_is_lost() {
    let mut bench = Bench::initiator();
    let data = pattern(3 << 20, 9);
    bench.qp.post(WorkRequest::Send { gather: smallvec![region(&data)], invalidate: None });
    assert!(bench.qp.wants_write() && !bench.qp.flush().unwrap());
    assert!(bench.qp.unsent() > 1 << 20 && bench.qp.unsent() <= data.len());
    let mut stream = Vec::new();
    for _ in 0..10_000 {
        stream.extend(bench.sent());
        if bench.qp.flush().unwrap() {
            break;
        }
    }
    stream.extend(bench.sent());
    assert_eq!(bench.qp.unsent(), 0);
    let fpdus = parse(&stream);
    assert!(fpdus.iter().all(|(f, crc)| *crc && f.len() <= 2 + 64768));
    let got: Vec<u8> = fpdus.iter().flat_map(|(f, _)| f[20..].to_vec()).collect();
    assert!(got == data);
}

#[test]
fn fpdus_fit_the_segments_of_the_path() {
    let mut pair = Pair::plain();
    pair.write(&pattern(4 << 20, 0), 1);
    let before = pair.a.transmit.fpdu();
    // TCP raises the MSS step by step, so what we know may be an earlier value.
    let socket = pair.a.fd();
    let Iwarp { transmit, stream, .. } = &mut pair.a;
    transmit.look_at_path(stream);
    let mss = socket::tcp_mss(socket).unwrap();
    let fpdu = pair.a.transmit.fpdu();
    assert!(fpdu >= before && fpdu <= mss && fpdu + 800 > mss, "FPDUs of {fpdu}, segments of {mss}");
}
