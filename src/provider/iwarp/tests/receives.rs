//! Receives, read-ahead buffers, and the memory that they take.
#![forbid(unsafe_code)]

use super::*;

#[test]
fn a_receive_takes_memory_when_a_message_begins_to_arrive() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let block = || memory.slab().unwrap().into_sink(1).address();
    let page = || memory.header().unwrap().into_sink(1).address();
    // The only idle block of each of the two lengths: the next taker gets it.
    let (idle, short) = (block(), page());
    for small in [false, true] {
        let mut pair = if small { Pair::small() } else { Pair::plain() };
        for _ in 0..1000 {
            pair.b.post_recv_of(&memory, 64 << 10).unwrap();
        }
        assert_eq!(block(), idle, "a thousand Receives hold nothing");
        for len in [0, 100, 4096, 5000, 40_000, 64 << 10] {
            let message = pattern(len, 3);
            pair.a.post(WorkRequest::Send { gather: smallvec![region(&message)], invalidate: None });
            pair.run(|p| !p.got_b.is_empty());
            match pair.got_b.pop_front() {
                Some(Completion::Received { sink, len, .. }) => {
                    let counts = memory.own_received();
                    assert!(counts == len || len <= 4096 && counts == 0, "{counts} of {len}");
                    let got = bytes(sink, len);
                    // When a message comes in several segments, the first does not tell how long the message is.
                    let fits = len <= 4096 && (!small || got.as_ptr().addr() == short);
                    assert!(got[..] == message[..]);
                    assert_eq!(got.as_ptr().addr(), if fits { short } else { idle }, "{len}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!((block(), page(), memory.own_received()), (idle, short, 0), "given back");
        }
    }
}

#[test]
fn a_connection_without_bytes_that_it_waits_for_has_no_read_ahead_buffer() {
    let mut pair = Pair::plain();
    let message = pattern(3000, 1);
    pair.a.post(WorkRequest::Send { gather: smallvec![region(&message)], invalidate: None });
    pair.b.post_recv(sink(3000));
    assert_eq!(drain(&mut pair.a).unwrap().len(), 0);
    let mut got = Vec::new();
    while got.is_empty() {
        got = drain(&mut pair.b).unwrap();
    }
    assert!(received(got.remove(0)).0 == message);
    assert!(pair.a.receive.buffer.is_empty() && pair.b.receive.buffer.is_empty());
    // Half an FPDU stays where it is, whoever else reads meanwhile.
    let mut bench = Bench::responder();
    bench.qp.post_recv(sink(100));
    let fpdu = untagged(SEND, b"first and second");
    assert!(bench.give(&fpdu[..20]).unwrap().is_empty() && !bench.qp.receive.buffer.is_empty());
    pair.send(&[7; 5000], 1);
    assert_eq!(received(bench.give(&fpdu[20..]).unwrap().remove(0)).0, b"first and second");
    assert!(bench.qp.receive.buffer.is_empty());
}

#[test]
fn a_connection_has_no_read_ahead_buffer_while_its_startup_or_its_first_message_is_awaited() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let x = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (y, _) = listener.accept().unwrap();
    let mut b = Iwarp::responder(y.as_raw_fd(), Options::default()).unwrap();
    assert!(!b.establish().unwrap() && b.receive.buffer.is_empty());
    let mut a = Iwarp::initiator(x.as_raw_fd(), Options::default()).unwrap();
    while !(b.establish().unwrap() & a.establish().unwrap()) {
        std::thread::yield_now();
    }
    assert!(a.receive.buffer.is_empty() && b.receive.buffer.is_empty());
}

#[test]
fn a_message_that_is_longer_than_its_receive_ends_the_connection_before_it_has_memory() {
    let memory = Memory::new(64 << 10, 4096, 0).connection(None, None);
    let mut pair = Pair::plain();
    let held = memory.slab().unwrap();
    pair.b.post_recv_of(&memory, 1024).unwrap();
    pair.a.post(WorkRequest::Send { gather: smallvec![region(&[0; 1028])], invalidate: None });
    let error = loop {
        match pair.b.poll() {
            Ok(completion) => assert!(completion.is_none()),
            Err(error) => break error,
        }
    };
    assert!(error.text().contains("too long"), "{error}");
    let idle = held.as_ptr();
    drop(held);
    assert_eq!(memory.slab().unwrap().as_ptr(), idle, "no other block was taken and given back");
}
