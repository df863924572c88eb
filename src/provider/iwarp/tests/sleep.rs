//! What arrives while a thread sleeps on the stream, and through memory that is shared with the peer.
#![forbid(unsafe_code)]

use super::*;

#[test]
fn a_peer_that_gives_byte_after_byte_through_memory_keeps_nobody() {
    let (own, seen) = Own::new().unwrap();
    let (peer, file) = Own::new().unwrap();
    let seen = Theirs::new(&seen).unwrap();
    let mut bench = Bench::responder();
    bench.qp.stream.share(local::Rings::new(own, Theirs::new(&file).unwrap(), true));
    // FPDUs none of which ends a message.
    let part = pattern(60_000, 5);
    let fpdu = |n: u32| untagged(Untagged { last: false, mo: n * part.len() as u32, ..SEND }, &part);
    let stream: Vec<u8> = (0..30).flat_map(fpdu).collect();
    bench.qp.post_recv(sink(30 * part.len()));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (at, byte) in (0u64..).zip(&stream) {
                peer.fill((at, false), &IoVec::from_slice(&[*byte]), 0, 1);
                peer.word(Word::Produced).store(at + 1, SeqCst);
                while seen.get(Word::Consumed) + 8 <= at && !over.load(Relaxed) {}
            }
        });
        let until = Instant::now() + Duration::from_secs(2);
        let mut most = 0;
        while bench.qp.receive.total < stream.len() as u64 && Instant::now() < until {
            let before = bench.qp.receive.total;
            assert!(bench.qp.poll().unwrap().is_none());
            most = most.max(bench.qp.receive.total - before);
        }
        over.store(true, Relaxed);
        assert!(most <= 4096, "{most} bytes were taken one by one, while others waited");
    });
}

/// What a thread takes while it sleeps on the stream comes in pieces of any size, and from a peer that may break any
/// rule.
#[test]
fn what_a_sleep_on_the_stream_brings_comes_to_the_same_as_what_is_polled_for() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let bench = || {
        let mut bench = Bench::initiator();
        (0..3).for_each(|_| bench.qp.post_recv_of(&memory, 1000).unwrap());
        assert!(bench.qp.poll().unwrap().is_none() && bench.dozes());
        bench
    };
    let (first, second) = (pattern(100, 1), pattern(300, 2));
    let mut stream = untagged(SEND, &first);
    stream.extend(untagged(Untagged { msn: 2, ..SEND }, &second));
    for cut in 0..=stream.len() {
        let mut bench = bench();
        let before = bench.qp.receive.total;
        bench.qp.arrived(Some(&stream[..cut]));
        assert!(cut == 0 || cut == stream.len() || !bench.dozes(), "{cut}: there is something to do");
        let mut got = drain(&mut bench.qp).unwrap();
        got.extend(bench.give(&stream[cut..]).unwrap());
        let got: Vec<_> = got.into_iter().map(|completion| received(completion).0).collect();
        assert!(got == [first.clone(), second.clone()], "{cut}");
        let counted = before + stream.len() as u64;
        assert_eq!((bench.qp.receive.total, bench.qp.shared.received()), (counted, counted));
    }
    // As much as one sleep takes: there may be more behind it.
    let mut bench = Bench::initiator();
    bench.qp.post_recv_of(&memory, 2 * NAP_BYTES).unwrap();
    assert!(bench.qp.poll().unwrap().is_none() && bench.dozes());
    let sent = pattern(NAP_BYTES + 400, 3);
    let long = untagged(SEND, &sent);
    bench.feed(&long[NAP_BYTES..]);
    bench.qp.arrived(Some(&long[..NAP_BYTES]));
    let got = bench.qp.poll().unwrap().map(|completion| received(completion).0);
    assert!(got.as_deref() == Some(&sent[..]), "it had to be asked for twice");
    // A message that breaks the protocol.
    let mut bench = self::Bench::initiator();
    bench.qp.post_recv_of(&memory, 1000).unwrap();
    let mut wrong = untagged(SEND, &first);
    wrong[50] ^= 1;
    bench.qp.arrived(Some(&wrong));
    assert!(bench.qp.poll().is_err() && !bench.dozes());
    bench.qp.arrived(Some(&stream));
    assert!(bench.qp.poll().is_err());
}

#[test]
fn what_another_process_has_read_in_between_ends_the_connection() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let mut bench = Bench::initiator();
    bench.qp.post_recv_of(&memory, 1000).unwrap();
    bench.qp.shared.set_received(bench.qp.receive.total + 30);
    bench.qp.arrived(Some(&untagged(SEND, b"of another place")));
    assert!(bench.qp.poll().is_err());
}

impl Bench {
    /// Whether a thread may sleep on the stream.
    fn dozes(&mut self) -> bool {
        self.qp.doze().is_some()
    }
}
