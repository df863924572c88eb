//! Memory of the program, which takes it back when its call ends.
#![forbid(unsafe_code)]

use super::*;

#[test]
fn kept_work_goes_out_from_copies_of_what_the_socket_has_not_taken() {
    for options in [Options::default(), Options { max_fpdu: Some(1448), ..Options::default() }] {
        let mut bench = Bench::responder_to(&REQUEST, options).0;
        bench.qp.post_recv(sink(0));
        bench.give(&untagged(SEND, b"")).unwrap();
        let data: Vec<_> = (0..6).map(|i| pattern((1 << 20) - i, i)).collect();
        let mut programs: Vec<_> = data.iter().map(|data| Program::new(data)).collect();
        let own = region(b"own");
        let lent: Vec<_> = programs.iter_mut().map(Program::source).collect();
        // A Send of many pieces, the first of which have gone when the socket is full, then a Write and a Send in the
        // queue, and a Read Response between the frames.
        let from = bench.qp.expose_source(lent[5].clone()).unwrap();
        let mut first = vec![own.clone(), lent[0].slice(0, 3), lent[0].slice(3, 20_000)];
        let middle = lent[1].len() / 10_000;
        first.extend((0..middle).map(|i| lent[1].slice(i * 10_000, 10_000)));
        first.push(lent[1].slice(middle * 10_000, lent[1].len() - middle * 10_000));
        first.push(own.clone());
        let to = Segment { handle: Handle(7), length: data[2].len() as u32 + 3, offset: 0 };
        let last = vec![lent[3].clone(), own.clone(), lent[4].slice(0, 0)];
        bench.qp.post(WorkRequest::Send { gather: first.into(), invalidate: None });
        bench.qp.post(WorkRequest::Write { gather: smallvec![own, lent[2].clone()], to });
        bench.qp.post(WorkRequest::Send { gather: last.into(), invalidate: None });
        bench.give(&read_request(1, 0xAB, 0, 1_000_000, from.handle.0, 0)).unwrap();
        drop(lent);
        let mut stream = Vec::new();
        for _ in 0..2 {
            stream.extend(bench.sent());
            assert!(!bench.qp.flush().unwrap());
        }
        assert!(bench.qp.transmit.is_half_sent());
        let (unsent, copied) = (bench.qp.unsent(), bench.qp.copied_bytes);
        assert!(unsent < 3 << 20, "the first pieces are gone");
        let counted = || stats::snapshot()[Counter::BytesCopied as usize];
        let before = counted();
        let kept = bench.qp.release_lent().unwrap();
        assert!(counted() - before >= kept as u64);
        // What is left of a frame counts as a whole; the last piece of each list is our own; one Send is in the queue.
        let left = unsent - transmit::PAGE;
        assert!((left - 9..=left).contains(&kept), "{kept} bytes copied of {left} left");
        assert_eq!(bench.qp.copied_bytes - copied, kept as u64);
        assert_eq!((bench.qp.release_lent().unwrap(), bench.qp.unsent()), (0, unsent));
        for program in &mut programs[..5] {
            program.bytes().fill(0xEE);
        }
        assert!(!programs[5].is_back(), "handles are not touched");
        bench.qp.detach(from.handle).unwrap();
        programs[5].bytes().fill(0xEE);
        stream.extend(bench.sent_to_the_end());
        let sends = [b"own", &data[0][..20_003], &data[1], b"own", &data[3], b"own"].concat();
        assert!(payloads(&stream, 3) == sends);
        assert!(payloads(&stream, 0) == [b"own", &data[2][..]].concat());
        assert!(payloads(&stream, 2) == data[5][..1_000_000]);
    }
}

#[test]
fn reads_into_lent_memory_complete_without_it_after_keep() {
    let mut bench = Bench::initiator();
    bench.qp.transmit.ord = 2;
    let mut programs: Vec<_> = (0..4).map(|_| Program::new(&[0; 40_000])).collect();
    let own = sink(40_000);
    let from = Segment { handle: Handle(0x77), length: 40_000, offset: 0 };
    // Of the five Reads, two have been requested, two find no room, and the last one is in the queue.
    let read = |qp: &mut Iwarp, id, sink| qp.post(WorkRequest::Read { id: WorkId(id), sink, at: 0, from });
    for (id, program) in (0..).zip(&mut programs[..3]) {
        read(&mut bench.qp, id, program.sink());
    }
    read(&mut bench.qp, 3, own.clone());
    bench.qp.post(WorkRequest::Send { gather: smallvec![], invalidate: None });
    read(&mut bench.qp, 4, programs[3].sink());
    let stags = |sent: &[u8]| -> Vec<u32> {
        let requests: Vec<_> = parse(sent).into_iter().filter(|(f, _)| f[3] & 15 == 1).collect();
        requests.iter().map(|(f, _)| u32::from_be_bytes(f[20..24].try_into().unwrap())).collect()
    };
    let mut asked: VecDeque<_> = stags(&bench.sent()).into();
    assert_eq!(asked.len(), 2);
    let response = |stag| tagged(2, true, stag, 0, &pattern(40_000, 9));
    let first = response(asked.pop_front().unwrap());
    bench.give(&first[..20_000]).unwrap();
    assert!(bench.qp.receive.is_placing());
    assert_eq!(bench.qp.release_lent().unwrap(), 0);
    assert!(programs[0].bytes()[..10_000] == pattern(40_000, 9)[..10_000]);
    for program in &mut programs {
        program.bytes().fill(0);
    }
    let mut done = bench.give(&first[20_000..]).unwrap();
    while done.len() < 5 {
        asked.extend(stags(&bench.sent()));
        done.extend(bench.give(&response(asked.pop_front().expect("a Read is asked for"))).unwrap());
    }
    for (id, completion) in (0..).zip(done) {
        assert!(matches!(completion, Completion::Read { id: WorkId(done) } if done == id));
    }
    assert!(programs.iter_mut().all(|program| program.bytes().iter().all(|byte| *byte == 0)));
    assert!(bytes(own, 40_000)[..] == pattern(40_000, 9));
}

#[test]
fn a_remote_invalidation_ends_the_loan_or_the_connection() {
    for owed in [false, true] {
        let mut bench = Bench::responder();
        bench.qp.post_recv(sink(0));
        bench.qp.post_recv(sink(0));
        let (mut source, mut target) = (Program::new(&pattern(3 << 20, 1)), Program::new(&[0; 100]));
        let from = bench.qp.expose_source(source.source()).unwrap().handle.0;
        let to = bench.qp.expose_sink(target.sink()).unwrap().handle.0;
        let size = if owed { 3 << 20 } else { 50_000 };
        bench.give(&read_request(1, 0xAB, 0, size, from, 0)).unwrap();
        let end = |msn, invalidate| untagged(Untagged { opcode: 4, invalidate, msn, ..SEND }, b"");
        assert_eq!(bench.give(&end(1, to)).unwrap().len(), 1);
        assert!(target.is_back() && !source.is_back());
        let result = bench.give(&end(2, from));
        source.bytes().fill(0);
        if owed {
            let error = result.expect_err("the peer gives up what it waits for");
            assert!(error.text().contains(&Fault::CANNOT_INVALIDATE.to_string()), "{error}");
        } else {
            assert_eq!(result.unwrap().len(), 1);
            assert!(payloads(&bench.sent_to_the_end(), 2) == pattern(50_000, 1));
        }
    }
}

/// A queue pair that holds lent memory in every way: exposed, half read by the peer, half written by the peer, queued and
/// half sent. Also returns the rest of what the peer writes.
fn laden() -> (Bench, Vec<Program>, Vec<u8>) {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(0));
    bench.give(&untagged(SEND, b"")).unwrap();
    let mut programs: Vec<_> = (0..6).map(|i| Program::new(&pattern(1 << 20, i))).collect();
    let from = bench.qp.expose_source(programs[0].source()).unwrap().handle.0;
    let to = bench.qp.expose_sink(programs[1].sink()).unwrap().handle.0;
    let theirs = Segment { handle: Handle(7), length: 1 << 20, offset: 0 };
    for (id, n) in [(WorkId(1), 2), (WorkId(2), 3)] {
        bench.qp.post(WorkRequest::Read { id, sink: programs[n].sink(), at: 0, from: theirs });
    }
    bench.qp.post(WorkRequest::Send { gather: smallvec![programs[4].source()], invalidate: None });
    bench.qp.post(WorkRequest::Write { gather: smallvec![programs[5].source()], to: theirs });
    bench.give(&read_request(1, 0xAB, 0, 1 << 20, from, 0)).unwrap();
    let mut write = tagged(0, true, to, 0, &pattern(40_000, 1));
    let rest = write.split_off(20_000);
    bench.give(&write).unwrap();
    assert!(bench.qp.receive.is_placing() && bench.qp.transmit.is_half_sent());
    assert!(programs.iter().all(|program| !program.is_back()));
    (bench, programs, rest)
}

#[test]
fn every_end_of_the_connection_ends_all_loans() {
    type End = fn(&mut Bench, Vec<u8>);
    let ends: [(&str, End); 5] = [
        ("close", |bench, _| bench.qp.close()),
        ("drop", |bench, _| bench.qp = Bench::responder().qp),
        ("the peer closes", |bench, _| {
            bench.peer.shutdown(std::net::Shutdown::Write).unwrap();
            bench.qp.poll().unwrap_err();
        }),
        ("the peer terminates", |bench, rest| {
            assert!(bench.give(&rest).unwrap().is_empty());
            bench.feed(&hex!("0016 4147 00000000 00000002 00000001 00000000 20020000 7fe42585"));
            assert!(bench.qp.poll().unwrap_err().text().contains("terminated"));
        }),
        ("a wrong CRC", |bench, mut rest| {
            *rest.last_mut().unwrap() ^= 1;
            assert_eq!(bench.give(&rest).unwrap_err().kind(), Kind::Protocol);
        }),
    ];
    for (what, end) in ends {
        let (mut bench, programs, rest) = laden();
        end(&mut bench, rest);
        assert!(programs.iter().all(Program::is_back), "{what}");
    }
}
