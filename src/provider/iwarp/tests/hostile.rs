//! Peers that break the protocol, and streams cut and changed anywhere.
#![forbid(unsafe_code)]

use super::*;

/// A responder with memory exposed and a Read outstanding, and the messages of a peer that uses all of it correctly.
struct Scene {
    bench: Bench,
    written: Sink,
    read: Sink,
    messages: Vec<Vec<u8>>,
}

const EXPOSED: usize = 600;

impl Scene {
    fn new() -> Scene {
        let mut bench = Bench::responder();
        for _ in 0..3 {
            bench.qp.post_recv(sink(300));
        }
        // The exposed parts lie between guards of the same blocks.
        let (written, read) = (sink(EXPOSED + 200), sink(EXPOSED + 200));
        let to = bench.qp.expose_sink(written.part(100, EXPOSED)).unwrap().handle.0;
        let source = bench.qp.expose_source(region(&pattern(EXPOSED, 8)).slice(50, 500)).unwrap().handle.0;
        let from = Segment { handle: Handle(0x77), length: EXPOSED as u32, offset: 0x1000 };
        bench.qp.transmit.may_send = true;
        bench.qp.post(WorkRequest::Read { id: WorkId(5), sink: read.clone(), at: 100, from });
        bench.qp.flush().unwrap();
        let request = bench.sent();
        let stag = u32::from_be_bytes(request[20..24].try_into().unwrap());
        let messages = vec![
            tagged(0, true, 1, 0, b""),
            tagged(0, false, to, 0, &pattern(301, 1)),
            untagged(Untagged { last: false, ..SEND }, &pattern(100, 2)),
            tagged(0, true, to, 301, &pattern(299, 3)),
            untagged(Untagged { mo: 100, ..SEND }, &pattern(99, 4)),
            tagged(2, false, stag, 0, &pattern(400, 5)),
            read_request(1, 0xDEAD, 0xBEEF, 500, source, 0),
            tagged(2, true, stag, 400, &pattern(200, 6)),
            untagged(Untagged { opcode: 5, msn: 2, ..SEND }, b""),
            untagged(Untagged { opcode: 4, msn: 3, invalidate: to, ..SEND }, b"end"),
        ];
        Scene { bench, written, read, messages }
    }

    /// Checks that everything has happened exactly as it should.
    fn check(mut self, completions: Vec<Completion>) {
        let mut completions = completions.into_iter();
        let first = received(completions.next().unwrap());
        assert!(first.0[..100] == pattern(100, 2) && first.0[100..] == pattern(99, 4));
        assert!(matches!(completions.next(), Some(Completion::Read { id: WorkId(5) })));
        assert_eq!(received(completions.next().unwrap()).0, b"");
        let (end, invalidated) = received(completions.next().unwrap());
        assert!(end == b"end" && invalidated.is_some() && completions.next().is_none());
        let written = bytes(self.written, EXPOSED + 200);
        assert!(written[100..401] == pattern(301, 1) && written[401..700] == pattern(299, 3));
        let read = bytes(self.read, EXPOSED + 200);
        assert!(read[100..500] == pattern(400, 5) && read[500..700] == pattern(200, 6));
        guards(&written);
        guards(&read);
        let sent = parse(&self.bench.sent());
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0].0[2..16], hex!("c142 0000dead 000000000000beef"));
        assert!(sent[0].0[16..] == pattern(EXPOSED, 8)[50..550]);
    }

    /// Checks that nothing has been written outside what was exposed.
    fn check_guards(mut self) {
        self.bench.qp.terminate();
        while self.bench.qp.poll().is_ok() {}
        for sink in [self.written, self.read] {
            guards(&bytes(sink, EXPOSED + 200));
        }
    }
}

fn guards(memory: &[u8]) {
    assert!(memory[..100].iter().chain(&memory[100 + EXPOSED..]).all(|b| *b == 0), "guard bytes");
}

#[test]
fn a_stream_may_be_split_at_every_byte() {
    let length = Scene::new().messages.concat().len();
    for at in 0..=length {
        let mut scene = Scene::new();
        let stream = scene.messages.concat();
        let mut got = scene.bench.give(&stream[..at]).unwrap();
        got.extend(scene.bench.give(&stream[at..]).unwrap());
        scene.check(got);
    }
    let mut scene = Scene::new();
    let mut got = Vec::new();
    for byte in scene.messages.concat() {
        got.extend(scene.bench.give(&[byte]).unwrap());
    }
    scene.check(got);
}

#[test]
fn large_fpdus_may_be_split_anywhere() {
    let data = pattern(30_001, 1);
    let more = pattern(20_000, 2);
    let whole = {
        let first = tagged(0, false, 0, 0, &data).len();
        let second = tagged(0, true, 0, 0, &more).len();
        [1, 2, 15, 16, 17, 19, 20, 21, 40, 2047, 2048, 2049, 8191, 8192, 8193]
            .into_iter()
            .chain(first - 25..first + 25)
            .chain(first + second - 30..first + second + 20)
            .collect::<Vec<_>>()
    };
    for at in whole {
        let mut bench = Bench::responder();
        let memory = sink(60_000);
        let to = bench.qp.expose_sink(memory.part(5_000, 50_001)).unwrap().handle;
        bench.qp.post_recv(sink(3));
        let mut stream = tagged(0, false, to.0, 0, &data);
        stream.extend(tagged(0, true, to.0, 30_001, &more));
        stream.extend(untagged(SEND, b"end"));
        let mut got = bench.give(&stream[..at]).unwrap();
        got.extend(bench.give(&stream[at..]).unwrap());
        assert_eq!(received(got.pop().unwrap()).0, b"end", "split at {at}");
        bench.qp.invalidate(to).unwrap();
        let memory = bytes(memory, 60_000);
        assert!(memory[5_000..35_001] == data && memory[35_001..55_001] == more, "split at {at}");
        assert!(memory[..5_000].iter().chain(&memory[55_001..]).all(|b| *b == 0));
    }
}

#[test]
fn a_stream_that_ends_at_any_byte_is_a_lost_connection() {
    let length = Scene::new().messages.concat().len();
    for at in 0..length {
        let mut scene = Scene::new();
        let stream = scene.messages.concat();
        scene.bench.feed(&stream[..at]);
        scene.bench.peer.shutdown(std::net::Shutdown::Write).unwrap();
        let error = loop {
            match scene.bench.qp.poll() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), Kind::ConnectionLost, "{at}: {error}");
        scene.check_guards();
    }
}

/// Feeds the scene with one message changed; returns whether that ended the connection.
fn with_message(index: usize, change: impl Fn(&mut Vec<u8>)) -> bool {
    let mut scene = Scene::new();
    change(&mut scene.messages[index]);
    let stream = scene.messages.concat();
    let result = scene.bench.give(&stream);
    scene.check_guards();
    result.is_err()
}

#[test]
fn a_changed_byte_with_a_stale_crc_always_ends_the_connection() {
    let lengths: Vec<_> = Scene::new().messages.iter().map(Vec::len).collect();
    for (index, length) in lengths.into_iter().enumerate() {
        for at in (0..length).filter(|at| *at < 52 || at % 7 == 0 || *at + 8 > length) {
            for bit in [1, 0x10, 0x80] {
                let ended = with_message(index, |message| message[at] ^= bit);
                // A longer length field may swallow the messages that follow and wait for more.
                assert!(ended || at < 2, "message {index}, byte {at}, bit {bit:#x}");
            }
        }
    }
}

#[test]
fn a_changed_byte_with_a_right_crc_is_harmless_or_ends_the_connection() {
    let lengths: Vec<_> = Scene::new().messages.iter().map(Vec::len).collect();
    let (mut ended, mut harmless) = (0, 0);
    for (index, length) in lengths.into_iter().enumerate() {
        for at in 0..length.min(52) {
            for value in [0x00, 0x01, 0x41, 0x7F, 0x80, 0xFF] {
                let end = with_message(index, |message| {
                    message[at] = value;
                    reseal(message);
                });
                *(if end { &mut ended } else { &mut harmless }) += 1;
            }
        }
    }
    assert!(ended > 500 && harmless > 100, "{ended} ended, {harmless} harmless");
}

#[test]
fn a_changed_byte_of_a_large_fpdu_writes_nothing_outside() {
    for at in (0..20).chain([10_000, 20_019, 20_020, 20_021, 20_022]) {
        for with_crc in [false, true] {
            let mut bench = Bench::responder();
            let memory = sink(40_000);
            let to = bench.qp.expose_sink(memory.part(10_000, 20_000)).unwrap().handle.0;
            let mut write = tagged(0, true, to, 0, &pattern(20_000, 1));
            let at = at.min(write.len() - 1);
            write[at] ^= 0x41;
            if with_crc {
                reseal(&mut write);
            }
            let result = bench.give(&write);
            assert!(result.is_err() || at < 2 || with_crc && at > 15, "byte {at}");
            bench.qp.terminate();
            let memory = bytes(memory, 40_000);
            assert!(memory[..10_000].iter().chain(&memory[30_000..]).all(|b| *b == 0), "byte {at}");
        }
    }
}

/// rule 103: what RFC 5042 asks of handles: bounds, rights, their own connection, and an end.
#[test]
fn a_handle_gives_its_own_range_and_right_on_its_own_connection_only() {
    let fault = |bytes: &dyn Fn(u32, u32) -> Vec<u8>, fault: Fault| {
        let mut bench = Bench::responder();
        let to = bench.qp.expose_sink(sink(100)).unwrap().handle.0;
        let from = bench.qp.expose_source(region(&[1; 100])).unwrap().handle.0;
        // The responder may answer with a Terminate once it has seen one FPDU.
        bench.give(&tagged(0, true, 0, 0, b"")).unwrap();
        bench.expect_fault(&bytes(to, from), fault);
    };
    let mut other = Bench::responder();
    let foreign_sink = other.qp.expose_sink(sink(100)).unwrap().handle.0;
    let foreign_source = other.qp.expose_source(region(&[1; 100])).unwrap().handle.0;
    let write = |stag, to, len: usize| tagged(0, true, stag, to, &vec![9; len]);
    let read = |stag, to, len| read_request(1, 1, 0, len, stag, to);
    fault(&|_, _| write(foreign_sink, 0, 4), Fault::STAG);
    fault(&|_, _| write(0, 0, 4), Fault::STAG);
    fault(&|to, _| write(to ^ 1, 0, 4), Fault::STAG);
    fault(&|_, from| write(from, 0, 4), Fault::STAG);
    fault(&|to, _| write(to, 97, 4), Fault::BOUNDS);
    fault(&|to, _| write(to, 100, 1), Fault::BOUNDS);
    fault(&|to, _| write(to, 0, 101), Fault::BOUNDS);
    fault(&|to, _| write(to, 0, 20_000), Fault::BOUNDS);
    fault(&|to, _| write(to, 1 << 32, 4), Fault::BOUNDS);
    fault(&|to, _| write(to, u64::MAX - 4, 4), Fault::BOUNDS);
    fault(&|to, _| write(to, u64::MAX - 3, 4), Fault::WRAP);
    fault(&|to, _| write(to, u64::MAX, 4), Fault::WRAP);
    fault(&|_, _| read(foreign_source, 0, 4), Fault::READ_STAG);
    fault(&|to, _| read(to, 0, 4), Fault::READ_RIGHTS);
    fault(&|_, from| read(from, 97, 4), Fault::READ_BOUNDS);
    fault(&|_, from| read(from, 0, u32::MAX), Fault::READ_BOUNDS);
    fault(&|_, from| read(from, u64::MAX, 4), Fault::READ_WRAP);
    // Zero bytes are checked against nothing.
    let mut bench = Bench::responder();
    assert!(bench.give(&write(0xBAD, u64::MAX, 0)).unwrap().is_empty());
    assert!(bench.give(&read(0xBAD, u64::MAX, 0)).unwrap().is_empty());
    assert_eq!(parse(&bench.sent())[0].0, hex!("000e c142 00000001 0000000000000000"));
}

#[test]
fn sends_that_do_not_fit_their_stream_are_refused() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    // With Receives whose memory is there beforehand, and with those whose memory is taken when something comes.
    let fault = |bytes: &[u8], fault: Fault| {
        for lazily in [false, true] {
            let mut bench = Bench::responder();
            for size in [1, 50, 50] {
                match lazily {
                    true => bench.qp.post_recv_of(&memory, size).unwrap(),
                    false => bench.qp.post_recv(sink(size)),
                }
            }
            bench.give(&untagged(SEND, b"x")).unwrap();
            bench.give(&untagged(Untagged { msn: 2, last: false, ..SEND }, b"part")).unwrap();
            bench.expect_fault(bytes, fault);
        }
    };
    // The same for a Send of which no part has come before.
    let alone = |bytes: &[u8], fault: Fault| {
        let mut bench = Bench::responder();
        (0..2).for_each(|_| bench.qp.post_recv_of(&memory, 50).unwrap());
        bench.give(&untagged(SEND, b"x")).unwrap();
        bench.expect_fault(bytes, fault);
    };
    alone(&untagged(Untagged { msn: 3, ..SEND }, b"x"), Fault::MSN);
    alone(&untagged(Untagged { msn: 2, mo: 1, ..SEND }, b"x"), Fault::OFFSET);
    let next = || Untagged { msn: 2, mo: 4, ..SEND };
    for msn in [0, 1, 3, u32::MAX] {
        fault(&untagged(Untagged { msn, ..next() }, b"x"), Fault::MSN);
    }
    for mo in [0, 3, 5, u32::MAX] {
        fault(&untagged(Untagged { mo, ..next() }, b"x"), Fault::OFFSET);
    }
    fault(&untagged(next(), &[0; 47]), Fault::TOO_LONG);
    fault(&untagged(next(), &[0; 60_000]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 5, ..next() }, b"x"), Fault::OPCODE);
    fault(&untagged(Untagged { invalidate: 9, ..next() }, b"x"), Fault::UNSPECIFIED);
    fault(&untagged(Untagged { queue: 1, ..next() }, b"x"), Fault::QUEUE);
    fault(&untagged(Untagged { queue: 3, ..next() }, b"x"), Fault::QUEUE);
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(4));
    bench.give(&untagged(SEND, b"last")).unwrap();
    bench.expect_fault(&untagged(Untagged { msn: 2, ..SEND }, b""), Fault::NO_BUFFER);
}

#[test]
fn an_exactly_full_receive_is_filled() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(20_000));
    bench.give(&untagged(Untagged { last: false, ..SEND }, &pattern(19_000, 1))).unwrap();
    let got = bench.give(&untagged(Untagged { mo: 19_000, ..SEND }, &pattern(1_000, 2))).unwrap();
    let got = received(got.into_iter().next().unwrap()).0;
    assert!(got[..19_000] == pattern(19_000, 1) && got[19_000..] == pattern(1_000, 2));
}

#[test]
fn read_responses_must_match_the_oldest_read() {
    let fault = |bytes: &dyn Fn(u32) -> Vec<u8>, fault: Fault| {
        let mut bench = Bench::initiator();
        let from = Segment { handle: Handle(1), length: 10, offset: 0 };
        bench.qp.post(WorkRequest::Read { id: WorkId(0), sink: sink(10), at: 0, from });
        bench.qp.flush().unwrap();
        let stag = u32::from_be_bytes(bench.sent()[20..24].try_into().unwrap());
        bench.expect_fault(&bytes(stag), fault);
    };
    fault(&|stag| tagged(2, true, stag ^ 1, 0, &[0; 10]), Fault::STAG);
    fault(&|stag| tagged(2, false, stag, 1, &[0; 9]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, 0, &[0; 11]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, 0, &[0; 9]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, 0, &[]), Fault::BOUNDS);
    fault(&|stag| tagged(2, true, stag, u64::MAX, &[0; 2]), Fault::WRAP);
    // The handle of a Read is not a target for Writes.
    fault(&|stag| tagged(0, true, stag, 0, &[0; 10]), Fault::STAG);
    let mut bench = Bench::initiator();
    bench.expect_fault(&tagged(2, true, 1, 0, b""), Fault::OPCODE);
}

#[test]
fn read_requests_that_are_malformed_or_too_many_are_refused() {
    let fault = |bytes: &[u8], fault: Fault| Bench::initiator().expect_fault(bytes, fault);
    let request = Untagged { opcode: 1, queue: 1, ..SEND };
    fault(&untagged(Untagged { msn: 2, ..request }, &[0; 28]), Fault::MSN);
    fault(&untagged(Untagged { opcode: 1, queue: 1, mo: 4, ..SEND }, &[0; 28]), Fault::OFFSET);
    fault(&untagged(Untagged { opcode: 1, queue: 1, ..SEND }, &[0; 27]), Fault::TOO_SHORT);
    fault(&untagged(Untagged { opcode: 1, queue: 1, ..SEND }, &[0; 29]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 1, queue: 1, ..SEND }, &[0; 60_000]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 1, queue: 1, last: false, ..SEND }, &[0; 28]), Fault::TOO_LONG);
    fault(&untagged(Untagged { opcode: 1, queue: 0, ..SEND }, &[0; 28]), Fault::QUEUE);
    // 16 requests are served at a time; those that are answered make room.
    let mut bench = Bench::initiator();
    for msn in 1..=40 {
        bench.give(&read_request(msn, 1, 0, 0, 0, 0)).unwrap();
    }
    assert_eq!(parse(&bench.sent()).len(), 40);
    let from = bench.qp.expose_source(region(&pattern(3 << 20, 0))).unwrap().handle.0;
    for msn in 41..=56 {
        bench.give(&read_request(msn, 1, 0, 3 << 20, from, 0)).unwrap();
    }
    let error = bench.give(&read_request(57, 1, 0, 3 << 20, from, 0)).unwrap_err();
    assert!(error.text().contains("no buffer"), "{error}");
}

#[test]
fn the_terminate_of_a_refused_read_returns_its_headers() {
    let mut bench = Bench::initiator();
    let request = read_request(1, 0xAB, 3, 4, 0xBAD, 0);
    bench.feed(&request);
    drain(&mut bench.qp).unwrap_err();
    let terminate = parse(&bench.sent()).remove(0).0;
    assert_eq!(terminate[20..26], hex!("01 00 e0 00 002e"));
    assert_eq!(terminate[26..], request[2..48]);
}

#[test]
fn length_fields_have_their_limits() {
    for ulpdu in 0..14 {
        let mut bench = Bench::initiator();
        bench.expect_fault(&seal(&vec![0x41; ulpdu]), Fault::TOO_SHORT);
    }
    for ulpdu in 14..18 {
        let mut bytes = vec![0; ulpdu];
        (bytes[0], bytes[1]) = (0x41, 0x43);
        Bench::initiator().expect_fault(&seal(&bytes), Fault::TOO_SHORT);
    }
    // Larger than we send, as siw does on loopback.
    let mut bench = Bench::responder();
    let memory = sink(65_521);
    let to = bench.qp.expose_sink(memory.clone()).unwrap().handle;
    bench.give(&tagged(0, true, to.0, 0, &pattern(65_521, 1))).unwrap();
    bench.qp.invalidate(to).unwrap();
    assert!(bytes(memory, 65_521)[..] == pattern(65_521, 1));
}

#[test]
fn a_wrong_crc_is_terminated_with_the_code_of_mpa() {
    let mut bench = Bench::initiator();
    let mut send = untagged(SEND, b"abc");
    send[21] ^= 1;
    bench.expect_fault(&send, Fault::CRC);
    let mut bench = Bench::initiator();
    let to = bench.qp.expose_sink(sink(50_000)).unwrap().handle.0;
    let mut write = tagged(0, true, to, 0, &pattern(50_000, 0));
    write[30_000] ^= 1;
    bench.expect_fault(&write, Fault::CRC);
}

#[test]
fn a_responder_says_nothing_about_a_bad_first_fpdu() {
    let mut bench = Bench::responder();
    let mut send = untagged(SEND, b"abc");
    send[21] ^= 1;
    assert_eq!(bench.give(&send).unwrap_err().kind(), Kind::Protocol);
    assert!(bench.sent().is_empty());
}

#[test]
fn a_terminate_is_reported_and_not_answered() {
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(3));
    bench.feed(&untagged(SEND, b"abc"));
    bench.feed(&hex!("0016 4147 00000000 00000002 00000001 00000000 20020000 7fe42585"));
    assert_eq!(received(bench.qp.poll().unwrap().unwrap()).0, b"abc");
    let error = bench.qp.poll().unwrap_err();
    assert_eq!(error.kind(), Kind::ConnectionLost);
    assert!(error.text().contains("CRC mismatch (2/0/02)"), "{error}");
    assert!(bench.sent().is_empty());
}

#[test]
fn terminating_sends_a_terminate_and_ends_everything() {
    let mut bench = Bench::initiator();
    let memory = sink(10);
    bench.qp.expose_sink(memory.clone()).unwrap();
    bench.qp.post_recv(memory.clone());
    bench.qp.terminate();
    assert_eq!(bench.sent()[..24], hex!("0016 4147 00000000 00000002 00000001 00000000 00000000"));
    assert!(bench.qp.poll().is_err() && bench.qp.flush().is_err());
    bytes(memory, 10);
    bench.qp.terminate();
    bench.qp.post(WorkRequest::Send { gather: smallvec![], invalidate: None });
    assert!(bench.sent().is_empty());
}

#[test]
fn random_streams_never_panic_or_write_outside() {
    let mut state = 7u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    for _ in 0..1500 {
        let mut scene = Scene::new();
        let mut stream = Vec::new();
        for _ in 0..6 {
            let mut message = scene.messages[random() % scene.messages.len()].clone();
            for _ in 0..random() % 3 {
                let at = random() % message.len().min(48);
                message[at] = [0, 1, 2, 0x40, 0x41, 0x80, 0xFF][random() % 7];
            }
            reseal(&mut message);
            stream.extend(message);
        }
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let (part, after) = rest.split_at((1 + random() % 700).min(rest.len()));
            rest = after;
            if scene.bench.give(part).is_err() {
                break;
            }
        }
        scene.check_guards();
    }
}
