//! The parts of a header that are specific to Version Two, as in draft-cel-nfsv4-rpcrdma-version-two-01 (June 2016).
//!
//! ```text
//! xid | vers=2 | credit | 0 or 1 | direction | Read list | Write list | Reply chunk | payload (0: RDMA2_MSG)
//! xid | vers=2 | credit | 4      | 1 low high (VERS), 2 (BAD_HEADER) or 3 (INVAL_OPTION)
//! xid | vers=2 | credit | 5      | direction | opttype | length | optinfo, padded
//! ```
//!
//! The draft was never finished, and its successors gave the same numbers other meanings: codes of -02 and later are deliberately
//! not understood here. This is the text that the transport-characteristics draft builds on. The lists are those of Version One.
#![forbid(unsafe_code)]

use super::header::{Body, Direction, Proc};
use super::lists::ChunkLists;
use super::{Credits, Position, Reader, Xid, put};

/// The version of the protocol that this file speaks.
pub const VERSION: u32 = 2;

/// Bytes that every receiver takes in one Send, once Version Two is agreed.
pub const INLINE_DEFAULT: usize = 4096;

/// Decodes what follows the first four words: the direction that the message gives itself, and the rest.
pub(super) fn decode<'a>(
    proc: Option<Proc>,
    reader: &mut Reader<'a>,
) -> (Option<Direction>, Result<Body<'a>, &'static str>) {
    let word = reader.word();
    let direction = word.and_then(Direction::of);
    let body = match (proc, direction, word) {
        (None | Some(Proc::Msgp | Proc::Done | Proc::Error), ..) => Err("unknown procedure"),
        (_, _, None) => Err("the message ends before its direction"),
        (_, None, _) => Err("the direction is neither 0 nor 1"),
        (Some(Proc::Optional), ..) => optional(reader).ok_or("the message ends inside the optional part"),
        (Some(proc @ (Proc::Msg | Proc::Nomsg)), Some(direction), _) => {
            reader.chunk_lists().and_then(|chunks| lists(proc, direction, chunks, reader.rest))
        }
    };
    (direction, body)
}

/// Bytes after an extension's part are ignored.
fn optional<'a>(reader: &mut Reader<'a>) -> Option<Body<'a>> {
    Some(Body::Optional { kind: reader.word()?, info: reader.opaque()? })
}

/// Checks the lists of a message, by its direction.
fn lists<'a>(
    proc: Proc,
    direction: Direction,
    chunks: ChunkLists<'a>,
    payload: &'a [u8],
) -> Result<Body<'a>, &'static str> {
    if direction == Direction::Reply && chunks.read_count() > 0 {
        return Err("a Reply with a Read list");
    }
    let zero = chunks.reads().any(|read| read.position == Position(0));
    if proc == Proc::Nomsg {
        return match direction {
            Direction::Call if !zero => Err("RDMA2_NOMSG of a Call without a Position-Zero Read chunk"),
            Direction::Reply if chunks.reply().is_none() => {
                Err("RDMA2_NOMSG of a Reply without a Reply chunk")
            }
            _ => Ok(Body::Nomsg { chunks }),
        };
    }
    if zero {
        return Err("RDMA2_MSG with a Position-Zero Read chunk");
    }
    // The draft, section 4.2: the direction is that of the RPC message. A message that contradicts itself is malformed.
    match payload.get(4..8) {
        Some(word) if word != (direction as u32).to_be_bytes() => {
            Err("the direction is not that of the RPC message")
        }
        _ => Ok(Body::Msg { chunks, payload }),
    }
}

/// Appends an RDMA2_OPTIONAL without payload, a whole message. `info` is XDR: a multiple of four bytes.
pub fn encode_optional(
    out: &mut Vec<u8>,
    xid: Xid,
    credits: Credits,
    direction: Direction,
    kind: u32,
    info: &[u8],
) {
    put(out, &[xid.0, VERSION, credits.0, Proc::Optional as u32, direction as u32, kind, info.len() as u32]);
    out.extend_from_slice(info);
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::super::header::{self, DecodeError, Header, RdmaError, Versions, encode_error};
    use super::super::lists::Lists;
    use super::*;

    fn decode(message: &[u8]) -> Result<Header<'_>, DecodeError> {
        header::decode(message, Versions::TWO)
    }

    fn header_len(lists: &Lists) -> usize {
        header::header_len(VERSION, lists)
    }

    /// A Call without chunks; the payload is its XID and the word CALL.
    const SHORT: [u8; 40] = hex!(
        "00000001 00000002 00000020 00000000" "00000000"
        "00000000 00000000 00000000"
        "00000001 00000000"
    );
    const SHORT_REPLY: [u8; 40] = hex!(
        "00000001 00000002 00000020 00000000" "00000001"
        "00000000 00000000 00000000"
        "00000001 00000001"
    );
    /// A normal Read chunk, a Write chunk and a Reply chunk.
    const CHUNKS: [u8; 108] = hex!(
        "00000005 00000002 00000020 00000000" "00000000"
        "00000001 00000098 deadbeef 00001000 0000000011223344" "00000000"
        "00000001 00000001 000000a1 00000100 0000000000000000" "00000000"
        "00000001 00000001 aabbccdd 00000064 0000000000000000"
        "00000005 00000000"
    );
    const LONG: [u8; 56] = hex!(
        "00000001 00000002 00000020 00000001" "00000000"
        "00000001 00000000 11223344 00001000 0000000000000000" "00000000"
        "00000000 00000000"
    );
    const LONG_REPLY: [u8; 52] = hex!(
        "00000001 00000002 00000020 00000001" "00000001"
        "00000000 00000000"
        "00000001 00000001 aabbccdd 00000064 0000000000000000"
    );
    const VERS: [u8; 28] = hex!("00000009 00000002 00000020 00000004 00000001 00000001 00000002");
    const BAD_HEADER: [u8; 20] = hex!("00000009 00000002 00000020 00000004 00000002");
    const INVAL_OPTION: [u8; 20] = hex!("11223344 00000002 00000020 00000004 00000003");
    const REQUEST: [u8; 44] = hex!(
        "11223345 00000002 00000020 00000005 00000000 00000002 00000010"
        "00000001 00000001 00000004 00002000"
    );
    const GOLDEN: [&[u8]; 9] =
        [&SHORT, &SHORT_REPLY, &CHUNKS, &LONG, &LONG_REPLY, &VERS, &BAD_HEADER, &INVAL_OPTION, &REQUEST];

    fn again(header: &Header<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        let Header { version, xid, credits, direction, body } = *header;
        let direction = direction.expect("each message says which way it goes");
        let mut lists = |proc, lists| header::encode(&mut out, version, xid, credits, proc, direction, lists);
        match body {
            Body::Msg { chunks, payload } => {
                lists(Proc::Msg, &chunks.to_lists());
                out.extend_from_slice(payload);
            }
            Body::Nomsg { chunks } => lists(Proc::Nomsg, &chunks.to_lists()),
            Body::Error(error) => encode_error(&mut out, (xid, version, error), credits),
            Body::Optional { kind, info } => {
                encode_optional(&mut out, xid, credits, direction, kind, info);
                out.resize(out.len().next_multiple_of(4), 0);
            }
            Body::Msgp | Body::Done => panic!("{header} is none of Version Two"),
        }
        out
    }

    fn malformed(message: &[u8]) -> &'static str {
        match decode(message) {
            Err(DecodeError::Malformed { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn golden_messages_decode_to_what_they_say_and_encode_to_the_same_bytes() {
        for message in GOLDEN {
            assert_eq!(again(&decode(message).unwrap()), message);
        }
        let header = decode(&CHUNKS).unwrap();
        let Body::Msg { chunks, payload } = header.body else { panic!() };
        assert_eq!((header.direction, payload.len()), (Some(Direction::Call), 8));
        assert_eq!((chunks.read_count(), chunks.write_count()), (1, 1));
        assert_eq!(header_len(&chunks.to_lists()) + payload.len(), CHUNKS.len());
        assert_eq!(header_len(&Lists::default()), 32);
        let header = decode(&REQUEST).unwrap();
        let Body::Optional { kind, info } = header.body else { panic!() };
        assert_eq!((header.direction, kind, info.len()), (Some(Direction::Call), 2, 16));
        let error = |message| match decode(message).unwrap().body {
            Body::Error(error) => error,
            other => panic!("{other:?}"),
        };
        assert_eq!(error(&VERS), RdmaError::Version { low: 1, high: 2 });
        assert_eq!(error(&BAD_HEADER), RdmaError::BadHeader);
        assert_eq!(error(&INVAL_OPTION), RdmaError::InvalidOption);
    }

    #[test]
    fn a_message_cut_short_is_an_error_at_every_length() {
        for message in GOLDEN {
            let whole = decode(message).unwrap();
            // The payload of an RDMA2_MSG may have any length.
            let payload = match whole.body {
                Body::Msg { payload, .. } => payload.len(),
                _ => 0,
            };
            for length in 0..message.len() - payload {
                assert!(decode(&message[..length]).is_err(), "{length} bytes of {whole}");
            }
        }
    }

    #[test]
    fn a_message_with_any_byte_changed_is_an_error_or_encodes_to_the_same_bytes() {
        for message in GOLDEN {
            for at in 0..message.len() {
                for bits in [0x01, 0x80, 0xff] {
                    let mut changed = message.to_vec();
                    changed[at] ^= bits;
                    if let Ok(header) = decode(&changed) {
                        let again = again(&header);
                        // Padding of an extension's part is not kept, nor what follows an error.
                        assert!(changed.starts_with(&again[..again.len().min(28)]), "{header}");
                        assert!(again.len() <= changed.len());
                    }
                }
            }
        }
    }

    #[test]
    fn a_message_of_another_version_is_none_of_ours() {
        let mut one = SHORT;
        one[7] = 1;
        assert_eq!(
            decode(&one).unwrap_err(),
            DecodeError::Version { xid: Xid(1), version: 1, spoken: Versions::TWO }
        );
    }

    #[test]
    fn the_direction_is_that_of_the_rpc_message_and_decides_which_lists_there_may_be() {
        let changed = |message: &[u8], word: usize, to: u32| {
            let mut message = message.to_vec();
            message[4 * word..4 * word + 4].copy_from_slice(&to.to_be_bytes());
            message
        };
        assert!(malformed(&changed(&SHORT, 4, 1)).contains("not that of the RPC message"));
        assert!(malformed(&changed(&SHORT, 4, 2)).contains("neither 0 nor 1"));
        assert!(malformed(&changed(&REQUEST, 4, 7)).contains("neither 0 nor 1"));
        assert!(malformed(&changed(&LONG, 4, 1)).contains("a Reply with a Read list"));
        assert!(malformed(&changed(&LONG, 6, 4)).contains("without a Position-Zero"));
        assert!(malformed(&changed(&LONG, 3, 0)).contains("with a Position-Zero"));
        assert!(malformed(&changed(&LONG_REPLY, 4, 0)).contains("without a Position-Zero"));
        for proc in [2, 3, 6, u32::MAX] {
            assert_eq!(malformed(&changed(&SHORT, 3, proc)), "unknown procedure");
        }
        // Codes of later drafts.
        for code in [0, 4, 5, 6] {
            let unknown = DecodeError::UnknownError { xid: Xid(0x1122_3344), version: 2, code };
            assert_eq!(decode(&changed(&INVAL_OPTION, 4, code)).unwrap_err(), unknown);
        }
    }

    #[test]
    fn messages_are_one_readable_line() {
        for message in GOLDEN {
            let line = decode(message).unwrap().to_string();
            assert!(line.starts_with("RDMA2_") && !line.contains('\n'), "{line}");
        }
        assert_eq!(
            decode(&REQUEST).unwrap().to_string(),
            "RDMA2_OPTIONAL xid 0x11223345 credits 32 CALL type 2 bytes 16"
        );
    }
}
