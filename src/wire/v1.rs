//! The parts of a header that are specific to Version One (RFC 8166 §4): what the lists of its procedures hold.
//!
//! ```text
//! xid | vers=1 | credit | 0 or 1 | Read list | Write list | Reply chunk | payload (0: RDMA_MSG)
//! xid | vers=1 | credit | 4      | 1 low high (ERR_VERS) or 2 (ERR_CHUNK)
//! ```
#![forbid(unsafe_code)]

use super::header::{Body, Direction, Header, Proc};
use super::lists::{ChunkLists, SegmentArray};
use super::{Credits, Position, Reader, Segment, Xid};

/// The version of the protocol that this file speaks.
pub const VERSION: u32 = 1;

/// Decodes what follows the first four words: the direction, if the message says so itself, and the rest.
pub(super) fn decode<'a>(
    proc: Option<Proc>,
    reader: &mut Reader<'a>,
) -> (Option<Direction>, Result<Body<'a>, &'static str>) {
    let body = body(proc, reader);
    let direction = match &body {
        Ok(Body::Msg { payload, .. }) => direction(payload),
        // RFC 8166 §4.3.1: "Responders MUST leave the Read list empty in all replies.", so a message with a Read list is a Call.
        Ok(Body::Nomsg { chunks }) => (chunks.read_count() > 0).then_some(Direction::Call),
        _ => None,
    };
    (direction, body)
}

/// A message of this version that is like nearly every short one: without chunks, or with a Reply chunk of one segment. All other
/// words of its header except two are always the same.
#[derive(Clone, Copy, Debug)]
pub struct Plain<'a> {
    /// The transaction.
    pub xid: Xid,
    /// Asked for or granted.
    pub credits: Credits,
    /// The Reply chunk.
    reply: Option<SegmentArray<'a>>,
    /// The RPC message, from its XID on.
    pub payload: &'a [u8],
}

impl<'a> Plain<'a> {
    /// The only segment of the Reply chunk, if there is one.
    #[inline]
    pub fn reply(&self) -> Option<Segment> {
        self.reply?.iter().next()
    }

    /// Its direction.
    #[inline]
    pub fn direction(&self) -> Option<Direction> {
        direction(self.payload)
    }

    /// The header that decoding it like any other message gives.
    #[inline]
    pub(super) fn header(&self) -> Header<'a> {
        let Plain { xid, credits, reply, payload } = *self;
        let body = Body::Msg { chunks: ChunkLists::reply_only(reply), payload };
        Header { version: VERSION, xid, credits, direction: self.direction(), body }
    }
}

/// The words of such a header after the XID; the second is that of the credits.
const PLAIN: [u8; 24] = {
    let mut words = [0; 24];
    // rdma_vers. RDMA_MSG, and the absence of each of the three lists, are zeros.
    words[3] = VERSION as u8;
    words
};

/// The last of these words where there is a Reply chunk, and the number of its segments.
const PRESENT: [u8; 4] = 1u32.to_be_bytes();
const ONE: [u8; 4] = 1u32.to_be_bytes();

/// Decodes a message if it is a plain one.
#[inline]
pub fn decode_plain(message: &[u8]) -> Option<Plain<'_>> {
    let ([x0, x1, x2, x3, rest @ ..], behind) = message.split_first_chunk::<PLAIN_LEN>()?;
    let mut same = *rest;
    let credits = u32::from_be_bytes([same[4], same[5], same[6], same[7]]);
    same[4..8].fill(0);
    let (reply, payload) = if same[20..] == PRESENT {
        same[20..].fill(0);
        let (segment, payload) = behind.strip_prefix(&ONE)?.split_first_chunk()?;
        (Some(SegmentArray::of_one(segment)), payload)
    } else {
        (None, behind)
    };
    (same == PLAIN).then(|| Plain {
        xid: Xid(u32::from_be_bytes([*x0, *x1, *x2, *x3])),
        credits: Credits(credits),
        reply,
        payload,
    })
}

/// The header of a plain message, which its payload follows on the wire: the first bytes of `header`.
#[inline]
pub fn encode_plain(
    header: &mut [u8; PLAIN_MAX],
    xid: Xid,
    credits: Credits,
    reply: Option<Segment>,
) -> &[u8] {
    header[..4].copy_from_slice(&xid.0.to_be_bytes());
    header[4..PLAIN_LEN].copy_from_slice(&PLAIN);
    header[8..12].copy_from_slice(&credits.0.to_be_bytes());
    let Some(Segment { handle, length, offset }) = reply else {
        return &header[..PLAIN_LEN];
    };
    header[24..28].copy_from_slice(&PRESENT);
    header[28..32].copy_from_slice(&ONE);
    header[32..36].copy_from_slice(&handle.0.to_be_bytes());
    header[36..40].copy_from_slice(&length.to_be_bytes());
    header[40..].copy_from_slice(&offset.to_be_bytes());
    header
}

/// Bytes of that header without a Reply chunk, and with one.
const PLAIN_LEN: usize = 28;
pub(crate) const PLAIN_MAX: usize = PLAIN_LEN + 20;

/// The direction that an RPC message gives itself.
///
/// RFC 8167 §4.1: "an accompanying RPC message payload with a call direction field"
#[inline]
fn direction(payload: &[u8]) -> Option<Direction> {
    let (_, rest) = payload.split_first_chunk::<4>()?;
    Direction::of(u32::from_be_bytes(*rest.first_chunk()?))
}

fn body<'a>(proc: Option<Proc>, reader: &mut Reader<'a>) -> Result<Body<'a>, &'static str> {
    match proc {
        Some(Proc::Msg) => {
            let chunks = reader.chunk_lists()?;
            // A chunk at Position 0 would replace the XID, which the payload of an RDMA_MSG begins with.
            if chunks.reads().any(|read| read.position == Position(0)) {
                return Err("RDMA_MSG with a Position-Zero Read chunk");
            }
            Ok(Body::Msg { chunks, payload: reader.rest })
        }
        Some(Proc::Nomsg) => {
            let chunks = reader.chunk_lists()?;
            // RFC 8166 §4.2.4: "Though any of these MAY be marked as not present, one MUST be present and
            // MUST hold the Payload stream for this RPC-over-RDMA message." A Reply has no Read list, so what
            // has one is a Call.
            let has_payload = match chunks.read_count() {
                0 => chunks.reply().is_some(),
                _ => chunks.reads().any(|read| read.position == Position(0)),
            };
            if !has_payload {
                return Err("RDMA_NOMSG with neither a Position-Zero Read chunk nor a Reply chunk");
            }
            Ok(Body::Nomsg { chunks })
        }
        Some(Proc::Msgp) => Ok(Body::Msgp),
        Some(Proc::Done) => Ok(Body::Done),
        Some(Proc::Error | Proc::Optional) | None => Err("unknown procedure"),
    }
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use smallvec::smallvec;

    use super::super::header::{self, DecodeError, Header, RdmaError, Versions};
    use super::super::lists::{Chunk, ChunkLists, Lists};
    use super::super::{Credits, Handle, ReadSegment, Segment, Xid, put};
    use super::*;

    const MSG: u32 = Proc::Msg as u32;
    const NOMSG: u32 = Proc::Nomsg as u32;
    const MSGP: u32 = Proc::Msgp as u32;

    fn decode(message: &[u8]) -> Result<Header<'_>, DecodeError> {
        header::decode(message, Versions::ONE)
    }

    fn header_len(lists: &Lists) -> usize {
        header::header_len(VERSION, lists)
    }

    fn encode(out: &mut Vec<u8>, xid: Xid, credits: Credits, proc: Proc, lists: &Lists) {
        header::encode(out, VERSION, xid, credits, proc, Direction::Call, lists);
    }

    fn encode_error(out: &mut Vec<u8>, xid: Xid, version: u32, credits: Credits, error: RdmaError) {
        header::encode_error(out, (xid, version, error), credits);
    }

    /// A Call without chunks; the payload is its XID and the word CALL.
    const SHORT: [u8; 36] = hex!(
        "00000001 00000001 00000020 00000000"
        "00000000 00000000 00000000"
        "00000001 00000000"
    );

    /// A Call with two Read segments at Position 152, and a Reply chunk without segments.
    const READS: [u8; 84] = hex!(
        "01020304 00000001 00000001 00000000"
        "00000001 00000098 deadbeef 00001000 0000000011223344"
        "00000001 00000098 00000007 00000003 ffffffffffffffff"
        "00000000 00000000"
        "00000001 00000000"
        "01020304"
    );

    /// The Write list of RFC 8166 §4.7, `1 3 HLOO HLOO HLOO 1 2 HLOO HLOO 0`, with an empty chunk at its end.
    const WRITES: [u8; 132] = hex!(
        "00000005 00000001 00000020 00000000"
        "00000000"
        "00000001 00000003"
        "000000a1 00000100 0000000000000000"
        "000000a2 00000200 0000000000000100"
        "000000a3 00000300 0000000000000300"
        "00000001 00000002"
        "000000b1 ffffffff 0000000000000000"
        "000000b2 ffffffff ffffffff00000000"
        "00000001 00000000"
        "00000000"
        "00000000"
    );

    /// A Long Call: a Position-Zero Read chunk of two segments, and a Reply chunk.
    const LONG: [u8; 96] = hex!(
        "00000001 00000001 00000020 00000001"
        "00000001 00000000 11223344 00001000 0000000000000000"
        "00000001 00000000 11223345 00000004 0000000000000008"
        "00000000 00000000"
        "00000001 00000001 aabbccdd 01000000 0000000000000000"
    );

    /// A Long Reply: the Reply chunk alone.
    const LONG_REPLY: [u8; 52] = hex!(
        "00000001 00000001 00000020 00000001"
        "00000000 00000000"
        "00000001 00000001 aabbccdd 00000064 0000000000000000"
        "00000000"
    );

    const MSGP_28: [u8; 28] = hex!("00000009 00000001 00000020 00000002 00000000 00000000 00000000");
    const DONE_28: [u8; 28] = hex!("00000009 00000001 00000020 00000003 00000000 00000000 00000000");
    const ERROR_CHUNK: [u8; 20] = hex!("00000009 00000001 00000020 00000004 00000002");
    const ERROR_VERS: [u8; 28] = hex!("00000009 00000001 00000020 00000004 00000001 00000001 00000002");
    const ERROR_VERS_ECHOING_2: [u8; 28] =
        hex!("00000009 00000002 00000020 00000004 00000001 00000001 00000001");

    const GOLDEN: [&[u8]; 10] = [
        &SHORT,
        &READS,
        &WRITES,
        &LONG,
        &LONG_REPLY,
        &MSGP_28,
        &DONE_28,
        &ERROR_CHUNK,
        &ERROR_VERS,
        &ERROR_VERS_ECHOING_2,
    ];

    fn segment(handle: u32, length: u32, offset: u64) -> Segment {
        Segment { handle: Handle(handle), length, offset }
    }

    fn read(position: u32, target: Segment) -> ReadSegment {
        ReadSegment { position: Position(position), target }
    }

    /// The lists and the payload (none of an RDMA_NOMSG) of a message that has them.
    fn parts<'a>(header: &Header<'a>) -> (ChunkLists<'a>, Option<&'a [u8]>) {
        match header.body {
            Body::Msg { chunks, payload } => (chunks, Some(payload)),
            Body::Nomsg { chunks } => (chunks, None),
            other => panic!("{other:?} has no lists"),
        }
    }

    fn encoded(xid: u32, credits: u32, proc: Proc, lists: &Lists) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&mut out, Xid(xid), Credits(credits), proc, lists);
        out
    }

    /// A message with the first words of SHORT, then `words`.
    fn message(proc: u32, words: &[u32]) -> Vec<u8> {
        let mut out = Vec::new();
        put(&mut out, &[7, VERSION, 1, proc]);
        words.iter().for_each(|word| put(&mut out, &[*word]));
        out
    }

    fn malformed(message: &[u8]) -> &'static str {
        match decode(message) {
            Err(error @ DecodeError::Malformed { what, .. }) => {
                assert_eq!(error.answer(), Some((Xid(7), VERSION, RdmaError::BadHeader)));
                what
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn golden_messages_decode_to_what_they_say() {
        let header = decode(&SHORT).unwrap();
        let (chunks, payload) = parts(&header);
        assert_eq!((header.xid, header.credits), (Xid(1), Credits(32)));
        assert!(chunks.is_empty());
        assert_eq!(payload, Some(&hex!("00000001 00000000")[..]));

        let header = decode(&READS).unwrap();
        let (chunks, payload) = parts(&header);
        let first = read(152, segment(0xdeadbeef, 4096, 0x11223344));
        let second = read(152, segment(7, 3, u64::MAX));
        assert_eq!(chunks.reads().collect::<Vec<_>>(), [first, second]);
        assert_eq!((chunks.read_count(), chunks.write_count()), (2, 0));
        assert_eq!(chunks.reply().map(|chunk| (chunk.len(), chunk.is_empty())), Some((0, true)));
        assert_eq!(payload, Some(&hex!("01020304")[..]));

        let (chunks, payload) = parts(&decode(&WRITES).unwrap());
        assert_eq!((chunks.read_count(), chunks.write_count()), (0, 3));
        let totals = chunks.writes().map(|chunk| (chunk.len(), chunk.total_length())).collect::<Vec<_>>();
        assert_eq!(totals, [(3, 0x600), (2, 2 * u64::from(u32::MAX)), (0, 0)]);
        let last = chunks.writes().nth(1).and_then(|chunk| chunk.iter().last());
        assert_eq!(last, Some(segment(0xb2, u32::MAX, 0xffffffff00000000)));
        assert_eq!((chunks.reply().is_none(), payload), (true, Some(&[][..])));

        let (chunks, payload) = parts(&decode(&LONG).unwrap());
        let long = [read(0, segment(0x11223344, 4096, 0)), read(0, segment(0x11223345, 4, 8))];
        assert_eq!(chunks.reads().collect::<Vec<_>>(), long);
        assert_eq!(chunks.reply().map(|chunk| chunk.total_length()), Some(16 << 20));
        assert_eq!(payload, None);

        assert!(matches!(decode(&MSGP_28).unwrap().body, Body::Msgp));
        assert!(matches!(decode(&DONE_28).unwrap().body, Body::Done));
        assert!(matches!(decode(&ERROR_CHUNK).unwrap().body, Body::Error(RdmaError::BadHeader)));
        let versions = RdmaError::Version { low: 1, high: 2 };
        assert!(matches!(decode(&ERROR_VERS).unwrap().body, Body::Error(e) if e == versions));
    }

    #[test]
    fn golden_messages_encode_to_the_same_bytes() {
        let lists = Lists {
            reads: vec![read(152, segment(0xdeadbeef, 4096, 0x11223344)), read(152, segment(7, 3, u64::MAX))],
            reply: Some(smallvec![]),
            ..Lists::default()
        };
        assert_eq!(encoded(0x01020304, 1, Proc::Msg, &lists), READS[..80]);
        assert_eq!(encoded(1, 32, Proc::Msg, &Lists::default()), SHORT[..28]);
        let mut out = vec![];
        encode_error(&mut out, Xid(9), 1, Credits(32), RdmaError::BadHeader);
        encode_error(&mut out, Xid(9), 2, Credits(32), RdmaError::Version { low: 1, high: 1 });
        assert_eq!(out, [&ERROR_CHUNK[..], &ERROR_VERS_ECHOING_2[..]].concat());
    }

    #[test]
    fn a_header_is_one_readable_line() {
        let line = |bytes: &[u8]| decode(bytes).unwrap().to_string();
        assert_eq!(
            line(&SHORT),
            "RDMA_MSG xid 0x00000001 credits 32 reads [] writes [] reply none payload 8"
        );
        assert_eq!(
            line(&LONG),
            "RDMA_NOMSG xid 0x00000001 credits 32 \
             reads [0:0x11223344+0x0:4096 0:0x11223345+0x8:4] writes [] reply [0xaabbccdd+0x0:16777216]"
        );
        assert_eq!(
            line(&WRITES),
            "RDMA_MSG xid 0x00000005 credits 32 reads [] \
             writes [[0x000000a1+0x0:256 0x000000a2+0x100:512 0x000000a3+0x300:768] \
             [0x000000b1+0x0:4294967295 0x000000b2+0xffffffff00000000:4294967295] []] reply none payload 0"
        );
        assert_eq!(line(&ERROR_VERS), "RDMA_ERROR xid 0x00000009 credits 32 ERR_VERS 1..2");
        assert_eq!(line(&ERROR_CHUNK), "RDMA_ERROR xid 0x00000009 credits 32 ERR_CHUNK");
        assert_eq!(line(&DONE_28), "RDMA_DONE xid 0x00000009 credits 32");
    }

    #[test]
    fn a_long_list_is_shown_by_its_first_eight_entries_and_a_count() {
        let chunk = smallvec![segment(1, 2, 3); 9];
        let shown = ["0x00000001+0x3:2"; 8].join(" ");
        let lists = Lists { reply: Some(chunk), ..Lists::default() };
        let line = decode(&encoded(1, 1, Proc::Nomsg, &lists)).unwrap().to_string();
        assert!(line.ends_with(&format!("reply [{shown} and 1 more]")), "{line}");
        let lists = Lists { reply: Some(smallvec![segment(1, 2, 3); 8]), ..Lists::default() };
        let line = decode(&encoded(1, 1, Proc::Nomsg, &lists)).unwrap().to_string();
        assert!(line.ends_with(&format!("reply [{shown}]")), "{line}");
    }

    #[test]
    fn random_lists_survive_a_round_trip() {
        let mut random = XorShift(0x9e3779b97f4a7c15);
        for _ in 0..2000 {
            let chunk =
                |random: &mut XorShift| (0..random.below(4)).map(|_| random.segment()).collect::<Chunk>();
            let nomsg = random.below(2) == 0;
            let mut lists = Lists {
                reads: (0..random.below(4)).map(|i| read(4 * (i + 1), random.segment())).collect(),
                writes: (0..random.below(4)).map(|_| chunk(&mut random)).collect(),
                reply: (random.below(2) == 0).then(|| chunk(&mut random)),
            };
            if nomsg && !lists.reads.is_empty() {
                lists.reads[0].position = Position(0);
            } else if nomsg && lists.reply.is_none() {
                lists.reply = Some(chunk(&mut random));
            }
            let (xid, credits) = (random.next() as u32, random.next() as u32);
            let proc = if nomsg { Proc::Nomsg } else { Proc::Msg };
            let mut bytes = encoded(xid, credits, proc, &lists);
            assert_eq!(bytes.len(), header_len(&lists));
            bytes.extend_from_slice(&[0xcc; 4]);

            let header = decode(&bytes).unwrap();
            let (chunks, payload) = parts(&header);
            assert_eq!((header.xid, header.credits), (Xid(xid), Credits(credits)));
            assert_eq!(payload, (!nomsg).then_some(&[0xcc; 4][..]));
            assert_eq!(chunks.to_lists(), lists);
            assert_eq!((chunks.read_count(), chunks.write_count()), (lists.reads.len(), lists.writes.len()));
            assert_eq!(chunks.is_empty(), lists == Lists::default());
            for (got, sent) in chunks.writes().zip(&lists.writes) {
                assert_eq!((got.len(), got.is_empty()), (sent.len(), sent.is_empty()));
                assert_eq!(got.total_length(), sent.iter().map(|s| u64::from(s.length)).sum::<u64>());
            }
        }
    }

    #[test]
    fn a_message_cut_short_is_an_error_at_every_length() {
        for whole in GOLDEN {
            let header = decode(whole).unwrap();
            // Payload and the bytes after an RDMA_NOMSG may be missing; of the rest every byte is needed.
            let needed = match header.body {
                Body::Msg { chunks, .. } | Body::Nomsg { chunks } => header_len(&chunks.to_lists()),
                Body::Error(RdmaError::BadHeader) => 20,
                _ => 28,
            };
            for length in 0..whole.len() {
                let result = decode(&whole[..length]);
                assert_eq!(result.is_ok(), length >= needed, "{length} of {header}: {result:?}");
                if let Err(error) = result {
                    assert_eq!(error.answer().is_some(), length >= 28, "{length} of {header}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_message_with_any_byte_changed_is_an_error_or_encodes_to_the_same_bytes() {
        for whole in GOLDEN {
            for at in 0..whole.len() {
                for value in (0..8).map(|bit| whole[at] ^ (1 << bit)).chain([0, 0xff, !whole[at]]) {
                    let mut bytes = whole.to_vec();
                    bytes[at] = value;
                    let Ok(header) = decode(&bytes) else { continue };
                    assert!(header.to_string().starts_with("RDMA"));
                    let mut again = vec![];
                    match header.body {
                        Body::Msg { chunks, payload } => {
                            encode(&mut again, header.xid, header.credits, Proc::Msg, &chunks.to_lists());
                            again.extend_from_slice(payload);
                            assert_eq!(again, bytes);
                        }
                        Body::Nomsg { chunks } => {
                            encode(&mut again, header.xid, header.credits, Proc::Nomsg, &chunks.to_lists());
                            assert!(bytes.starts_with(&again));
                        }
                        Body::Error(error) => {
                            encode_error(&mut again, header.xid, header.version, header.credits, error);
                            assert!(bytes.starts_with(&again));
                        }
                        Body::Msgp | Body::Done | Body::Optional { .. } => {}
                    }
                }
            }
        }
    }

    #[test]
    fn random_bytes_never_panic_and_lists_yield_what_they_counted() {
        let mut random = XorShift(88172645463325252);
        let mut decoded = 0;
        for _ in 0..20_000 {
            // Meaningful words make the parser go deep.
            let words = (0..random.below(40))
                .map(|_| [0, 0, 0, 0, 1, 1, 1, 8, random.next() as u32][random.below(9) as usize])
                .collect::<Vec<u32>>();
            let bytes = message(random.below(5), &words);
            match decode(&bytes) {
                Ok(Header { body: Body::Msg { chunks, .. } | Body::Nomsg { chunks }, .. }) => {
                    decoded += 1;
                    assert_eq!(chunks.reads().count(), chunks.read_count());
                    assert_eq!(chunks.writes().count(), chunks.write_count());
                    assert!(chunks.writes().chain(chunks.reply()).all(|c| c.iter().count() == c.len()));
                }
                Ok(_) => {}
                Err(error) => assert!(!error.to_string().contains('\n')),
            }
        }
        assert!(decoded > 100, "{decoded}");
    }

    #[test]
    fn a_count_larger_than_the_message_is_refused() {
        for count in [2, 3, 0x0fff_ffff, 0x1000_0000, 0x1000_0001, 0x8000_0000, u32::MAX] {
            let writes = message(MSG, &[0, 1, count, 1, 2, 3, 4, 0, 0]);
            assert_eq!(malformed(&writes), "the message ends inside the Write list");
            let reply = message(NOMSG, &[0, 0, 1, count, 1, 2, 3, 4]);
            assert_eq!(malformed(&reply), "the message ends inside the Reply chunk");
        }
    }

    #[test]
    fn a_discriminator_other_than_0_and_1_is_refused_in_every_list() {
        for lists in [[2, 0, 0], [0, u32::MAX, 0], [0, 0, 2]] {
            assert_eq!(malformed(&message(MSG, &lists)), "a list's discriminator is neither 0 nor 1");
        }
        let second = message(MSG, &[1, 4, 1, 2, 3, 4, 2, 4, 1, 2, 3, 4, 0, 0, 0]);
        assert_eq!(malformed(&second), "a list's discriminator is neither 0 nor 1");
    }

    #[test]
    fn rules_8_and_57_another_version_is_named_and_answered_with_its_own_version_word() {
        for version in [0, 2, u32::MAX] {
            let mut bytes = SHORT.to_vec();
            bytes[4..8].copy_from_slice(&version.to_be_bytes());
            let error = decode(&bytes).unwrap_err();
            assert_eq!(error, DecodeError::Version { xid: Xid(1), version, spoken: Versions::ONE });
            assert_eq!(error.answer(), Some((Xid(1), version, RdmaError::Version { low: 1, high: 1 })));
        }
    }

    #[test]
    fn rule_9_an_err_vers_is_understood_whatever_version_it_echoes() {
        for version in [0, 1, 2, u32::MAX] {
            let mut bytes = ERROR_VERS.to_vec();
            bytes[4..8].copy_from_slice(&version.to_be_bytes());
            let header = decode(&bytes).unwrap();
            assert_eq!(header.xid, Xid(9));
            assert!(matches!(header.body, Body::Error(RdmaError::Version { low: 1, high: 2 })));
        }
    }

    #[test]
    fn rule_10_each_list_of_an_rdma_msg_may_be_absent() {
        for which in 0..8 {
            let mut lists = Lists::default();
            if which & 1 != 0 {
                lists.reads.push(read(4, segment(1, 1, 1)));
            }
            if which & 2 != 0 {
                lists.writes.push(smallvec![segment(2, 2, 2)]);
            }
            if which & 4 != 0 {
                lists.reply = Some(smallvec![segment(3, 3, 3)]);
            }
            let bytes = encoded(1, 1, Proc::Msg, &lists);
            assert_eq!(parts(&decode(&bytes).unwrap()).0.to_lists(), lists);
        }
    }

    #[test]
    fn rule_11_an_rdma_nomsg_without_a_list_that_holds_its_payload_is_malformed() {
        let what = "RDMA_NOMSG with neither a Position-Zero Read chunk nor a Reply chunk";
        assert_eq!(malformed(&message(NOMSG, &[0, 0, 0])), what);
        let only_writes = message(NOMSG, &[0, 1, 1, 1, 2, 3, 4, 0, 0]);
        assert_eq!(malformed(&only_writes), what);
        let call_without_payload = message(NOMSG, &[1, 8, 1, 2, 3, 4, 0, 0, 1, 1, 1, 2, 3, 4]);
        assert_eq!(malformed(&call_without_payload), what);
    }

    #[test]
    fn rules_15_and_17_msgp_and_done_and_errors_cannot_be_encoded_as_messages() {
        for proc in [Proc::Msgp, Proc::Done, Proc::Error] {
            let result = std::panic::catch_unwind(|| encoded(1, 1, proc, &Lists::default()));
            assert!(result.is_err(), "{proc:?}");
        }
    }

    #[test]
    fn rule_16_the_contents_of_an_rdma_msgp_are_not_looked_at() {
        assert!(matches!(decode(&message(MSGP, &[9, 9, 9])).unwrap().body, Body::Msgp));
    }

    #[test]
    fn rule_19_an_rdma_msg_with_a_position_zero_read_chunk_is_malformed() {
        let bytes = message(MSG, &[1, 8, 1, 2, 3, 4, 1, 0, 1, 2, 3, 4, 0, 0, 0]);
        assert_eq!(malformed(&bytes), "RDMA_MSG with a Position-Zero Read chunk");
    }

    #[test]
    fn rule_20_a_long_call_may_carry_more_read_chunks_and_a_long_reply_a_write_list() {
        let call = message(NOMSG, &[1, 0, 1, 2, 3, 4, 1, 8, 1, 2, 3, 4, 0, 0, 0]);
        assert!(decode(&call).is_ok());
        let reply = message(NOMSG, &[0, 1, 1, 1, 2, 3, 4, 0, 1, 1, 1, 2, 3, 4]);
        assert!(decode(&reply).is_ok());
    }

    #[test]
    fn rule_53_a_position_that_is_no_multiple_of_four_is_malformed() {
        for position in [1, 2, 3, 6, u32::MAX] {
            let bytes = message(MSG, &[1, position, 1, 2, 3, 4, 0, 0, 0]);
            assert_eq!(malformed(&bytes), "a Read chunk's Position is not a multiple of four");
        }
    }

    #[test]
    fn rules_58_and_156_an_unknown_procedure_is_malformed() {
        for proc in [5, 6, 255, 256, u32::MAX] {
            assert_eq!(malformed(&message(proc, &[0, 0, 0])), "unknown procedure");
        }
    }

    #[test]
    fn rule_62_an_error_carries_the_xid_and_the_version_of_the_failing_message() {
        let mut out = vec![];
        encode_error(&mut out, Xid(0xabcd), 77, Credits(5), RdmaError::Version { low: 1, high: 1 });
        assert_eq!(out, hex!("0000abcd 0000004d 00000005 00000004 00000001 00000001 00000001"));
    }

    #[test]
    fn rule_64_an_rdma_error_that_cannot_be_decoded_is_not_answered() {
        let unknown_code = message(4, &[77, 0, 0]);
        let no_range = message(4, &[1, 1]);
        let mut chunk_of_another_version = ERROR_CHUNK.to_vec();
        chunk_of_another_version[7] = 2;
        for bytes in [unknown_code, no_range, chunk_of_another_version] {
            let error = decode(&bytes).unwrap_err();
            assert!(matches!(error, DecodeError::UnknownError { .. }), "{error}");
            assert_eq!(error.answer(), None);
        }
    }

    #[test]
    fn rule_66_a_message_shorter_than_a_header_is_not_answered() {
        for proc in [0, 1, 2, 3, 5] {
            let bytes = message(proc, &[0, 0, 0]);
            for length in 0..28 {
                let error = decode(&bytes[..length]).unwrap_err();
                assert!(matches!(error, DecodeError::TooShort { length: l, .. } if l == length));
                assert_eq!(error.answer(), None);
            }
        }
        let mut other_version = SHORT.to_vec();
        other_version[7] = 2;
        assert!(matches!(decode(&other_version[..27]), Err(DecodeError::TooShort { .. })));
    }

    #[test]
    fn errors_are_one_readable_line() {
        let line = |bytes: &[u8]| decode(bytes).unwrap_err().to_string();
        assert_eq!(line(&[0; 5]), "message of 5 bytes where a header needs 16");
        assert_eq!(line(&SHORT[..27]), "message of 27 bytes where a header needs 28");
        assert_eq!(line(&ERROR_CHUNK[..19]), "message of 19 bytes where a header needs 20");
        assert_eq!(line(&message(9, &[0; 3])), "xid 0x00000007: malformed header: unknown procedure");
        assert_eq!(
            line(&message(4, &[77])),
            "xid 0x00000007: RDMA_ERROR of version 1 with unknown or incomplete error 77"
        );
    }

    /// Marsaglia's xorshift64: enough randomness for a test, and the same every time.
    struct XorShift(u64);

    impl XorShift {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn below(&mut self, limit: u32) -> u32 {
            (self.next() >> 33) as u32 % limit
        }

        fn segment(&mut self) -> Segment {
            segment(self.next() as u32, self.next() as u32, self.next())
        }
    }
}
