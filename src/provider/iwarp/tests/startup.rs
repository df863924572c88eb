//! The MPA startup.
#![forbid(unsafe_code)]

use super::*;

#[test]
fn private_data_reaches_both_ends_and_depths_are_agreed() {
    let pair = Pair::new(
        Options { private_data: b"from a".to_vec(), ird: 5, ord: 40, ..Options::default() },
        Options { private_data: b"from b".to_vec(), ird: 2, ord: 9, ..Options::default() },
    );
    assert_eq!((pair.a.private_data(), pair.b.private_data()), (&b"from b"[..], &b"from a"[..]));
    assert_eq!((pair.a.limits().read_depth, pair.a.ird), (40, 5));
    assert_eq!((pair.b.limits().read_depth, pair.b.ird), (5, 40));
}

#[test]
fn a_peer_of_revision_one_is_answered_in_revision_one() {
    let request = hex!("4d504120494420526571204672616d65 40 01 0003 616263");
    let options = Options { private_data: b"xyz".to_vec(), ..Options::default() };
    let (bench, reply) = Bench::responder_to(&request, options);
    assert_eq!(reply, hex!("4d504120494420526570204672616d65 40 01 0003 78797a"));
    assert_eq!((bench.qp.private_data(), bench.qp.limits().read_depth), (&b"abc"[..], 16));
    let one = Options { revision: 1, ..Options::default() };
    let mut pair = Pair::new(one, Options::default());
    pair.read(&pattern(70_000, 1));
}

#[test]
fn an_rtr_write_or_read_opens_a_peer_to_peer_connection() {
    let request = hex!("4d504120494420526571204672616d65 50 02 0004 8000 4000");
    for read in [false, true] {
        let options = Options { ird: 0, ord: 0, ..Options::default() };
        let (mut bench, reply) = Bench::responder_to(&request, options);
        assert_eq!(reply[16..], hex!("50 02 0004 8001 c000"));
        // Nothing leaves before the first FPDU of the peer.
        bench.qp.post(WorkRequest::Send { gather: smallvec![region(b"first")], invalidate: None });
        assert!(drain(&mut bench.qp).unwrap().is_empty());
        assert!(!bench.qp.flush().unwrap() && bench.sent().is_empty() && !bench.qp.wants_write());
        let rtr = if read { read_request(1, 1, 0, 0, 1, 0) } else { tagged(0, true, 1, 0, b"") };
        assert!(bench.give(&rtr).unwrap().is_empty());
        let mut sent: Vec<_> = parse(&bench.sent()).into_iter().map(|(fpdu, _)| fpdu).collect();
        sent.sort_by_key(|fpdu| fpdu[3]);
        if read {
            assert_eq!(sent.remove(0), hex!("000e c142 00000001 0000000000000000"));
        }
        assert_eq!(sent[0][20..], *b"first");
    }
}

#[test]
fn a_request_in_any_number_of_pieces_is_taken() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut qp = Iwarp::responder(ours.as_raw_fd(), Options::default()).unwrap();
    for (i, byte) in REQUEST.iter().enumerate() {
        theirs.write_all(&[*byte]).unwrap();
        assert_eq!(qp.establish().unwrap(), i + 1 == REQUEST.len());
    }
}

#[test]
fn a_peer_that_closes_during_the_startup_is_told_apart_from_one_that_talks_rubbish() {
    for n in [0, 1, 16, 19, 23] {
        let (mut bench, _) = Bench::unreplied(Options::default());
        bench.feed(&REPLY[..n]);
        let Bench { mut qp, _socket, peer } = bench;
        drop(peer);
        assert_eq!(qp.establish().unwrap_err().kind(), Kind::ConnectionLost, "after {n} bytes");
        assert_eq!(qp.establish().unwrap_err().kind(), Kind::ConnectionLost);
    }
    let (mut bench, _) = Bench::unreplied(Options::default());
    bench.feed(b"HTTP/1.1 400");
    assert_eq!(bench.qp.establish().unwrap_err().kind(), Kind::Protocol);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = Iwarp::initiator(ours.as_raw_fd(), Options::default()).err().unwrap();
    assert_eq!(error.kind(), Kind::ConnectionLost);
}

#[test]
fn bytes_after_the_request_are_an_error_and_after_the_reply_are_fpdus() {
    let mut early = REQUEST.to_vec();
    early.extend(untagged(SEND, b"x"));
    let (mut bench, done) = Bench::unanswered(&early, Options::default());
    assert_eq!(done.unwrap_err().kind(), Kind::Protocol);
    assert!(bench.sent().is_empty());

    let (mut bench, _) = Bench::unreplied(Options::default());
    let mut reply = REPLY.to_vec();
    reply.extend(untagged(SEND, b"at once"));
    bench.feed(&reply);
    bench.qp.post_recv(sink(10));
    assert!(bench.qp.establish().unwrap());
    assert_eq!(received(drain(&mut bench.qp).unwrap().pop().unwrap()).0, b"at once");
}

#[test]
fn a_request_for_markers_is_rejected_and_a_rejected_request_is_the_peers_fault() {
    let mut request = REQUEST;
    request[16] |= 0x80;
    let (mut bench, done) = Bench::unanswered(&request, Options::default());
    assert_eq!(done.unwrap_err().kind(), Kind::Protocol);
    assert_eq!(bench.sent()[16..18], hex!("70 02"));
    let (mut bench, _) = Bench::unreplied(Options::default());
    let mut reply = REPLY;
    reply[16] |= 0x20;
    bench.feed(&reply);
    assert_eq!(bench.qp.establish().unwrap_err().kind(), Kind::Peer);
}

#[test]
fn a_reply_that_wants_more_reads_than_we_serve_is_terminated() {
    let (mut bench, _) = Bench::unreplied(Options::default());
    let mut reply = REPLY;
    reply[23] = 17;
    bench.feed(&reply);
    assert_eq!(bench.qp.establish().unwrap_err().kind(), Kind::Protocol);
    let sent = parse(&bench.sent());
    assert_eq!(sent[0].0[20..], hex!("20060000"));
}
