//! Headers of both versions, the messages of the characteristics and the private data of a connection.
//!
//! The first byte says which; the rest is what a peer sent.

use rpcrdma::wire::characteristics::{self, Characteristic, Kind, Operation};
use rpcrdma::wire::header::{self, Body, Direction, Header, Proc, Versions};
use rpcrdma::wire::lists::{ChunkLists, Lists};
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::{Credits, v1, v2};

pub fn run(data: &[u8]) {
    let Some((&which, message)) = data.split_first() else { return };
    match which % 4 {
        0 | 1 => headers(message),
        2 => operations(message),
        _ => private_data(message, which),
    }
}

fn headers(message: &[u8]) {
    for versions in [Versions::ONE, Versions::BOTH, Versions::TWO] {
        match header::decode(message, versions) {
            Ok(header) => decoded(message, versions, &header),
            Err(error) => {
                assert!(error.to_string().len() < 200);
                let Some(answer) = error.answer() else { continue };
                let mut bytes = Vec::new();
                header::encode_error(&mut bytes, answer, Credits(3));
                let (xid, version, why) = answer;
                // RFC 8166 §4.5: the XID and the version of an error are those of what it answers.
                assert_eq!(xid.0.to_be_bytes(), message[..4]);
                assert_eq!(version.to_be_bytes(), message[4..8]);
                let back = header::decode(&bytes, Versions { low: 1, high: version.clamp(1, 2) });
                let back = back.expect("our own error can be read");
                assert_eq!((back.xid, back.version, back.credits), (xid, version, Credits(3)));
                assert!(matches!(back.body, Body::Error(error) if error == why));
            }
        }
    }
}

fn decoded(message: &[u8], versions: Versions, header: &Header<'_>) {
    let cut = header.to_string();
    assert!(cut.len() < 20_000, "a line of {} bytes", cut.len());
    let mut encoded = Vec::new();
    let Header { version, xid, credits, direction, body } = *header;
    // An end that speaks both versions reads what an end that speaks one reads.
    let both = header::decode(message, Versions::BOTH).map(|header| header.to_string());
    if versions != Versions::BOTH && versions.include(version) {
        assert_eq!(both.ok().as_ref(), Some(&cut));
    }
    match body {
        Body::Msg { chunks, payload } => {
            let lists = lists(&chunks);
            let said = direction.unwrap_or(Direction::Call);
            header::encode(&mut encoded, version, xid, credits, Proc::Msg, said, &lists);
            assert_eq!([&encoded, payload].concat(), message, "another encoding");
            // The payload is not part of the header: with less of it the header is the same.
            let shorter = encoded.len() + payload.len() / 2;
            if let Ok(Header { body: Body::Msg { chunks, payload: half }, .. }) =
                header::decode(&message[..shorter], versions)
            {
                assert_eq!(chunks.to_lists(), lists);
                assert!(payload.starts_with(half) && half.len() == payload.len() / 2);
            } else {
                assert!(shorter < 28, "a header that needs its payload");
            }
        }
        Body::Nomsg { chunks } => {
            let said = direction.unwrap_or(Direction::Reply);
            let lists = lists(&chunks);
            header::encode(&mut encoded, version, xid, credits, Proc::Nomsg, said, &lists);
            assert_eq!(message[..encoded.len()], encoded, "another encoding");
        }
        Body::Error(error) => {
            header::encode_error(&mut encoded, (xid, version, error), credits);
            assert_eq!(message[..encoded.len()], encoded, "another encoding");
        }
        Body::Optional { kind, info } => {
            assert_eq!(version, v2::VERSION);
            let direction = direction.expect("it says so");
            v2::encode_optional(&mut encoded, xid, credits, direction, kind, info);
            assert_eq!(message[..encoded.len()], encoded, "another encoding");
            operations(info);
        }
        Body::Msgp | Body::Done => assert_eq!(version, v1::VERSION),
    }
}

/// A copy of the lists, which the views agree with.
fn lists(chunks: &ChunkLists<'_>) -> Lists {
    let lists = chunks.to_lists();
    assert_eq!(lists.reads.len(), chunks.read_count());
    assert_eq!(lists.writes.len(), chunks.write_count());
    for (view, copy) in chunks.writes().zip(&lists.writes).chain(chunks.reply().zip(lists.reply.as_ref())) {
        assert_eq!((view.len(), view.is_empty()), (copy.len(), copy.is_empty()));
        assert_eq!(view.total_length(), copy.iter().map(|segment| u64::from(segment.length)).sum::<u64>());
    }
    assert!(lists.reads.iter().all(|read| read.position.0 % 4 == 0));
    let none = lists.reads.is_empty() && lists.writes.is_empty() && lists.reply.is_none();
    assert_eq!(chunks.is_empty(), none);
    lists
}

fn operations(info: &[u8]) {
    assert!(Kind::of(0).is_none() && Kind::of(5).is_none());
    for kind in (1..5).filter_map(Kind::of) {
        let Ok(operation) = characteristics::decode(kind, info) else { continue };
        assert!(!operation.to_string().is_empty());
        let places = |names: &dyn Fn(usize) -> bool| {
            assert!(!names(usize::MAX / 8) && !names(info.len() * 8));
            (0..32).filter(|place| names(*place)).fold(0, |word, place| word | 1 << place)
        };
        let encoded = match operation {
            Operation::Init { start, unchanging } => {
                let Some(values) = known(&start) else { continue };
                characteristics::init(&values, places(&|place| unchanging.contains(place)))
            }
            Operation::Request { want } => {
                let Some(values) = known(&want) else { continue };
                let encoded = characteristics::request(&values);
                assert_eq!(encoded, info, "another encoding");
                encoded
            }
            Operation::Response { done, rejected, pending } => characteristics::response(
                places(&|place| done.contains(place)),
                places(&|place| rejected.contains(place)),
                places(&|place| pending.contains(place)),
            ),
            Operation::Update { now, settled } => {
                let Some(known) = now.known else { continue };
                let encoded = characteristics::update(known, settled);
                assert_eq!(encoded, info, "another encoding");
                encoded
            }
        };
        // A subset has encodings of several lengths; ours means the same, as far as places have names.
        let again = characteristics::decode(kind, &encoded).expect("our own encoding");
        assert_eq!(again.to_string(), operation.to_string());
    }
}

/// The characteristics of a list, if all are known.
fn known(spec: &characteristics::Spec<'_>) -> Option<Vec<Characteristic>> {
    assert_eq!((spec.iter().count(), spec.is_empty()), (spec.len(), spec.iter().next().is_none()));
    spec.iter()
        .map(|value| {
            let known = value.known?;
            let (which, word) = known.words();
            assert_eq!((which, Characteristic::of(which, word)), (value.which, Some(known)));
            Some(known)
        })
        .collect()
}

fn private_data(bytes: &[u8], ours: u8) {
    let found = PrivateData::find(bytes);
    let theirs = found.unwrap_or(PrivateData::ABSENT);
    let sizes = |data: &PrivateData| [data.send_size, data.receive_size];
    assert!(sizes(&theirs).into_iter().all(|size| size % 1024 == 0 && (1024..=262_144).contains(&size)));
    let encoded = theirs.encode();
    assert_eq!(PrivateData::find(&encoded), Some(theirs));
    // What follows it is ignored.
    if found.is_some() {
        assert_eq!(PrivateData::find(&[bytes, &encoded].concat()), found);
    }
    let size = 1024 << (ours >> 2 & 7);
    let ours = PrivateData { remote_invalidation: ours & 0x80 != 0, send_size: size, receive_size: size * 2 };
    assert_eq!(ours.send_threshold(&theirs), theirs.receive_threshold(&ours));
    assert!(ours.send_threshold(&theirs) <= size.min(theirs.receive_size));
    assert_eq!(ours.may_invalidate(&theirs), theirs.may_invalidate(&ours));
}
