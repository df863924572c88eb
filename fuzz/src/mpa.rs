//! MPA's startup frames and the agreement that they lead to, and the headers of what is in an FPDU.
//!
//! The first byte says which; the rest is what a peer sent.

use rpcrdma::provider::iwarp::ddp::{self, Fault, Header, ReadRequest};
use rpcrdma::provider::iwarp::mpa::{
    self, Enhanced, NOT_NEGOTIATED, Offer, Refusal, StartFrame, Terms, Which,
};

pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else { return };
    match which % 4 {
        0 => start(bytes, Which::Request, which >> 2),
        1 => start(bytes, Which::Reply, which >> 2),
        2 => segment(bytes),
        _ => terminate(bytes, usize::from(which) << 6),
    }
}

fn start(bytes: &[u8], which: Which, offer: u8) {
    let whole = StartFrame::decode(bytes, which);
    for end in 0..bytes.len().min(mpa::START_HEADER + mpa::MAX_PRIVATE_DATA + 1) {
        match (StartFrame::decode(&bytes[..end], which), &whole) {
            // What cannot become a frame is refused as soon as that is certain, and what can is waited for.
            (Err(_), whole) => assert!(whole.is_err()),
            (Ok(Some((frame, length))), Ok(Some((all, total)))) => {
                assert_eq!((&frame, length), (all, *total));
                assert!(end >= length);
            }
            (Ok(Some(_)), _) => panic!("a frame that goes away with more bytes"),
            (Ok(None), Ok(Some((_, total)))) => assert!(end < *total),
            (Ok(None), _) => {}
        }
    }
    let Ok(Some((frame, total))) = whole else { return };
    assert!(total <= bytes.len() && total <= mpa::START_HEADER + mpa::MAX_PRIVATE_DATA);
    again(&frame);
    let depth = |bits: u8| [0, 1, 16, 128, NOT_NEGOTIATED - 1][usize::from(bits % 5)];
    let ours = Offer { crc: offer & 1 == 1, ird: depth(offer >> 1), ord: depth(offer >> 3) };
    match which {
        Which::Request => requested(&frame, &ours),
        Which::Reply => accepted(&frame, &ours),
    }
}

fn again(frame: &StartFrame) {
    let encoded = frame.encode();
    let decoded = StartFrame::decode(&encoded, frame.which).expect("our own frame").expect("all of it");
    assert_eq!((&decoded.0, decoded.1), (frame, encoded.len()));
}

/// Both ends come to the same terms.
fn requested(request: &StartFrame, ours: &Offer) {
    let (reply, terms) = request.answer(ours, b"private");
    again(&reply);
    let asked = request.enhanced.unwrap_or(Enhanced { ird: 0, ord: 0, ..Enhanced::default() });
    let theirs = Offer { crc: request.crc, ird: asked.ird, ord: asked.ord };
    let revision = if request.enhanced.is_some() { 2 } else { 1 };
    assert_eq!(reply.reject, request.markers, "markers, and nothing else, are refused");
    match reply.accept(&theirs, revision) {
        Ok(Terms { crc, ird, ord }) => {
            assert_eq!(crc, terms.crc);
            assert!(!reply.markers && ird == theirs.ird);
            if request.enhanced.is_some() {
                assert!(ord <= terms.ird || theirs.ord == NOT_NEGOTIATED);
                assert!(terms.ord <= ird || theirs.ird == NOT_NEGOTIATED);
            }
            assert!(terms.ird <= ours.ird.max(mpa::MAX_DEPTH) && terms.ord <= ours.ord);
        }
        Err(Refusal::Leave(_)) => assert!(reply.reject),
        Err(Refusal::InsufficientIrd(error)) => panic!("{error}"),
    }
}

fn accepted(reply: &StartFrame, ours: &Offer) {
    for revision in [1, 2] {
        match reply.accept(ours, revision) {
            Ok(terms) => {
                assert!(terms.ord <= ours.ord && terms.ird == ours.ird && !reply.reject && !reply.markers);
                assert_eq!(terms.crc, ours.crc || reply.crc);
                assert_eq!(reply.enhanced.is_some(), revision == 2);
            }
            Err(Refusal::Leave(_)) => {}
            Err(Refusal::InsufficientIrd(_)) => {
                assert!(reply.enhanced.is_some_and(|theirs| theirs.ord > ours.ird));
            }
        }
    }
}

fn segment(bytes: &[u8]) {
    let Some(start) = bytes.first_chunk::<{ ddp::ENOUGH }>() else { return };
    match Header::decode(start) {
        Ok((header, payload)) => {
            let mut encoded = [0; ddp::ENOUGH];
            let length = header.encode(payload, &mut encoded);
            assert_eq!(length, header.len());
            // Reserved bits are ignored on receipt and not sent.
            encoded[2] |= start[2] & 0x3C;
            encoded[3] |= start[3] & 0x30;
            assert_eq!(encoded[..length], start[..length], "another encoding");
            let opcode = header.opcode();
            assert_eq!(opcode.is_tagged(), matches!(header, Header::Tagged { .. }));
            assert_eq!(header.is_last(), start[2] & 0x40 != 0);
            let ulpdu = length - 2 + payload;
            let frame = mpa::fpdu_len(ulpdu);
            assert!(
                frame.is_multiple_of(4)
                    && frame == 2 + ulpdu + mpa::pad_len(ulpdu) + 4
                    && frame >= ddp::ENOUGH
            );
        }
        Err(fault) => explained(fault, bytes),
    }
    if let Some(request) = ReadRequest::decode(&bytes[ddp::ENOUGH..]) {
        assert_eq!(request.encode(), bytes[ddp::ENOUGH..]);
    }
}

/// Checks that the Terminate for a fault that we find says what it is, and returns as much of the cause as the RFCs ask for.
fn explained(fault: Fault, cause: &[u8]) {
    assert!(fault.name().is_some(), "{fault}");
    for cause in [None, Some(cause), Some(&cause[..cause.len().min(ddp::ENOUGH)])] {
        let mut fpdu = [0xEE; ddp::MAX_TERMINATE];
        let length = fault.encode_terminate(cause, &mut fpdu);
        assert!(length <= fpdu.len() && (length + 4).is_multiple_of(4));
        let start = fpdu.first_chunk().expect("long enough");
        let (header, payload) = Header::decode(start).expect("our own Terminate");
        assert_eq!((header.opcode(), header.is_last()), (ddp::Opcode::Terminate, true));
        assert_eq!(length, ddp::UNTAGGED + payload + mpa::pad_len(ddp::UNTAGGED - 2 + payload));
        let (back, text) = Fault::decode_terminate(&fpdu[ddp::UNTAGGED..length]).expect("our own Terminate");
        assert_eq!(back, fault);
        assert!(text.contains(&fault.to_string()));
    }
}

fn terminate(bytes: &[u8], mss: usize) {
    if let Some((fault, text)) = Fault::decode_terminate(bytes) {
        assert_eq!(bytes[..2], [fault.layer << 4 | fault.kind, fault.code]);
        assert!(!text.is_empty() && text.len() < 300);
    }
    let mss = mss + bytes.len();
    let most = mpa::mulpdu(mss);
    assert!((128..=64768).contains(&most));
    assert!(mpa::fpdu_len(most) <= mss || most == 128, "a frame of {} in {mss}", mpa::fpdu_len(most));
    assert_eq!(mpa::crc_word(Some(u32::from_le_bytes([1, 2, 3, 4]))), [1, 2, 3, 4]);
}
