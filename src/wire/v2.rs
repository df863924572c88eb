//! The RPC-over-RDMA Version Two header: bytes <-> values, by draft-cel-nfsv4-rpcrdma-version-two-01 (June 2016).
//!
//! ```text
//! xid | vers=2 | credit | 0 or 1 | direction | Read list | Write list | Reply chunk | payload (0: RDMA2_MSG)
//! xid | vers=2 | credit | 4      | 1 low high (VERS), 2 (BAD_HEADER) or 3 (INVAL_OPTION)
//! xid | vers=2 | credit | 5      | direction | opttype | length | optinfo, padded
//! ```
//!
//! The draft was never finished, and its successors gave the same numbers other meanings: codes of -02 and later are not
//! understood here on purpose. This is the text that the transport-characteristics draft builds on. The lists are those
//! of Version One, whose views and values are used.
//!
//! # Invariants
//! As in [`super::v1`]: [`decode`] allocates nothing, and encoding what was decoded gives the same bytes.
#![forbid(unsafe_code)]

use std::fmt;

use super::v1::{ChunkLists, FIXED_LEN, Lists, Reader, put, put_lists};
use super::{Credits, Position, Xid};

/// The version of the protocol that this file speaks.
pub const VERSION: u32 = 2;

/// Bytes that every receiver takes in one Send, once Version Two is agreed.
pub const INLINE_DEFAULT: usize = 4096;

/// Bytes of a header without chunks.
pub const HEADER_MIN: usize = 32;

/// Which way a message goes: that of the RPC message in it.
#[doc(alias = "msg_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Direction {
    Call = 0,
    Reply = 1,
}

/// A decoded message: borrows the received bytes.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// The transaction.
    pub xid: Xid,
    /// Asked for in a Call, granted in a Reply.
    pub credits: Credits,
    /// The rest, by procedure.
    pub body: Body<'a>,
}

/// What follows the first four words.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// RDMA2_MSG.
    Msg {
        /// Which way it goes.
        direction: Direction,
        /// The three lists.
        chunks: ChunkLists<'a>,
        /// The (perhaps reduced) RPC message, from its XID on.
        payload: &'a [u8],
    },
    /// RDMA2_NOMSG: a Call in a Position-Zero Read chunk, or a Reply in a Reply chunk.
    Nomsg {
        /// Which way it goes.
        direction: Direction,
        /// The three lists.
        chunks: ChunkLists<'a>,
    },
    /// RDMA2_ERROR: always a Reply.
    Error(RdmaError),
    /// RDMA2_OPTIONAL: a message of an extension.
    Optional {
        /// Which way it goes.
        direction: Direction,
        /// Which message of which extension.
        kind: u32,
        /// Its contents, which are XDR themselves.
        info: &'a [u8],
        /// What the extension has follow it.
        payload: &'a [u8],
    },
}

/// Why a transaction failed in the transport.
#[doc(alias = "rpcrdma2_error")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RdmaError {
    /// The responder speaks versions `low..=high` only. The same in all versions.
    Version {
        /// Lowest version spoken.
        low: u32,
        /// Highest version spoken.
        high: u32,
    },
    /// The header, or an extension's part of it, could not be used: ERR_CHUNK of Version One.
    BadHeader,
    /// The extension's message is not known.
    InvalidOption,
}

/// Why a message could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// Too short to trust its words: discard it silently.
    TooShort {
        /// Bytes received.
        length: usize,
    },
    /// Not a message of Version Two.
    Version {
        /// Its version.
        version: u32,
    },
    /// A header that breaks the rules; to be answered with [`RdmaError::BadHeader`].
    Malformed {
        /// Its transaction.
        xid: Xid,
        /// Which rule.
        what: &'static str,
    },
    /// An RDMA2_ERROR that says nothing we know: discard it silently.
    UnknownError {
        /// The transaction that it claims to end.
        xid: Xid,
        /// Its error code.
        code: u32,
    },
}

const MSG: u32 = 0;
const NOMSG: u32 = 1;
const ERROR: u32 = 4;
const OPTIONAL: u32 = 5;

const ERR_VERS: u32 = 1;
const ERR_BAD_HEADER: u32 = 2;
const ERR_INVAL_OPTION: u32 = 3;

/// Decodes one received message of Version Two.
///
/// # Errors
/// What is wrong.
pub fn decode(message: &[u8]) -> Result<Header<'_>, DecodeError> {
    let mut reader = Reader { rest: message };
    let short = DecodeError::TooShort { length: message.len() };
    let xid = Xid(reader.word().ok_or(short)?);
    let version = reader.word().ok_or(short)?;
    let credits = Credits(reader.word().ok_or(short)?);
    let proc = reader.word().ok_or(short)?;
    if version != VERSION {
        return Err(DecodeError::Version { version });
    }
    let malformed = |what| DecodeError::Malformed { xid, what };
    let body = match proc {
        ERROR => {
            let code = reader.word().ok_or(short)?;
            let error = match code {
                ERR_VERS => {
                    reader.word().zip(reader.word()).map(|(low, high)| RdmaError::Version { low, high })
                }
                ERR_BAD_HEADER => Some(RdmaError::BadHeader),
                ERR_INVAL_OPTION => Some(RdmaError::InvalidOption),
                _ => None,
            };
            Body::Error(error.ok_or(DecodeError::UnknownError { xid, code })?)
        }
        MSG | NOMSG => {
            let direction = direction(&mut reader).map_err(malformed)?;
            let chunks = reader.chunk_lists().map_err(malformed)?;
            let body = lists(proc, direction, chunks, reader.rest);
            body.map_err(malformed)?
        }
        OPTIONAL => {
            let direction = direction(&mut reader).map_err(malformed)?;
            let cut = || malformed("the message ends inside the optional part");
            let kind = reader.word().ok_or_else(cut)?;
            let info = opaque(&mut reader).ok_or_else(cut)?;
            Body::Optional { direction, kind, info, payload: reader.rest }
        }
        _ => return Err(malformed("unknown procedure")),
    };
    Ok(Header { xid, credits, body })
}

fn direction(reader: &mut Reader<'_>) -> Result<Direction, &'static str> {
    match reader.word() {
        Some(0) => Ok(Direction::Call),
        Some(1) => Ok(Direction::Reply),
        Some(_) => Err("the direction is neither 0 nor 1"),
        None => Err("the message ends before its direction"),
    }
}

/// A counted opaque and its pad.
pub(super) fn opaque<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let length = usize::try_from(reader.word()?).ok()?;
    let (bytes, rest) = reader.rest.split_at_checked(length)?;
    let (_, rest) = rest.split_at_checked(length.next_multiple_of(4) - length)?;
    reader.rest = rest;
    Some(bytes)
}

/// What the lists of a message must be, by its direction.
fn lists<'a>(
    proc: u32,
    direction: Direction,
    chunks: ChunkLists<'a>,
    payload: &'a [u8],
) -> Result<Body<'a>, &'static str> {
    if direction == Direction::Reply && chunks.read_count() > 0 {
        return Err("a Reply with a Read list");
    }
    let zero = chunks.reads().any(|read| read.position == Position(0));
    if proc == NOMSG {
        return match direction {
            Direction::Call if !zero => Err("RDMA2_NOMSG of a Call without a Position-Zero Read chunk"),
            Direction::Reply if chunks.reply().is_none() => {
                Err("RDMA2_NOMSG of a Reply without a Reply chunk")
            }
            _ => Ok(Body::Nomsg { direction, chunks }),
        };
    }
    if zero {
        return Err("RDMA2_MSG with a Position-Zero Read chunk");
    }
    // The draft, section 4.2: the direction is that of the RPC message. One that contradicts it is neither.
    match payload.get(4..8) {
        Some(word) if word != (direction as u32).to_be_bytes() => {
            Err("the direction is not that of the RPC message")
        }
        _ => Ok(Body::Msg { direction, chunks, payload }),
    }
}

/// Bytes of an RDMA2_MSG or RDMA2_NOMSG header with these lists.
pub fn header_len(lists: &Lists) -> usize {
    FIXED_LEN + 4 + lists.encoded_len()
}

/// Appends the header of an RDMA2_MSG, which its payload follows on the wire, or of an RDMA2_NOMSG.
pub fn encode(
    out: &mut Vec<u8>,
    xid: Xid,
    credits: Credits,
    payload: bool,
    direction: Direction,
    lists: &Lists,
) {
    out.reserve(header_len(lists));
    put(out, &[xid.0, VERSION, credits.0, if payload { MSG } else { NOMSG }, direction as u32]);
    put_lists(out, lists);
}

/// Appends an RDMA2_ERROR, a whole message.
pub fn encode_error(out: &mut Vec<u8>, xid: Xid, credits: Credits, error: RdmaError) {
    put(out, &[xid.0, VERSION, credits.0, ERROR]);
    match error {
        RdmaError::Version { low, high } => put(out, &[ERR_VERS, low, high]),
        RdmaError::BadHeader => put(out, &[ERR_BAD_HEADER]),
        RdmaError::InvalidOption => put(out, &[ERR_INVAL_OPTION]),
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
    put(out, &[xid.0, VERSION, credits.0, OPTIONAL, direction as u32, kind, info.len() as u32]);
    out.extend_from_slice(info);
}

/// One line, as of [`super::v1::Header`].
impl fmt::Display for Header<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.body {
            Body::Msg { .. } => "RDMA2_MSG",
            Body::Nomsg { .. } => "RDMA2_NOMSG",
            Body::Error(_) => "RDMA2_ERROR",
            Body::Optional { .. } => "RDMA2_OPTIONAL",
        };
        write!(f, "{name} xid {} credits {}", self.xid, self.credits.0)?;
        match self.body {
            Body::Msg { direction, chunks, payload } => {
                write!(f, " {direction} {chunks} payload {}", payload.len())
            }
            Body::Nomsg { direction, chunks } => write!(f, " {direction} {chunks}"),
            Body::Error(error) => write!(f, " {error}"),
            Body::Optional { direction, kind, info, .. } => {
                write!(f, " {direction} type {kind} bytes {}", info.len())
            }
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Direction::Call { "CALL" } else { "REPLY" })
    }
}

impl fmt::Display for RdmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RdmaError::Version { low, high } => write!(f, "VERS {low}..{high}"),
            RdmaError::BadHeader => f.write_str("BAD_HEADER"),
            RdmaError::InvalidOption => f.write_str("INVAL_OPTION"),
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecodeError::TooShort { length } => {
                write!(f, "message of {length} bytes, too short for a header")
            }
            DecodeError::Version { version } => write!(f, "version {version} where {VERSION} is spoken"),
            DecodeError::Malformed { xid, what } => write!(f, "xid {xid}: malformed header: {what}"),
            DecodeError::UnknownError { xid, code } => {
                write!(f, "xid {xid}: RDMA2_ERROR with unknown or incomplete error {code}")
            }
        }
    }
}

impl std::error::Error for DecodeError {}

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::*;

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
        let Header { xid, credits, body } = *header;
        match body {
            Body::Msg { direction, chunks, payload } => {
                encode(&mut out, xid, credits, true, direction, &chunks.to_lists());
                out.extend_from_slice(payload);
            }
            Body::Nomsg { direction, chunks } => {
                encode(&mut out, xid, credits, false, direction, &chunks.to_lists());
            }
            Body::Error(error) => encode_error(&mut out, xid, credits, error),
            Body::Optional { direction, kind, info, payload } => {
                encode_optional(&mut out, xid, credits, direction, kind, info);
                out.resize(out.len().next_multiple_of(4), 0);
                out.extend_from_slice(payload);
            }
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
        let Body::Msg { direction, chunks, payload } = decode(&CHUNKS).unwrap().body else { panic!() };
        assert_eq!((direction, payload.len()), (Direction::Call, 8));
        assert_eq!((chunks.read_count(), chunks.write_count()), (1, 1));
        assert_eq!(header_len(&chunks.to_lists()) + payload.len(), CHUNKS.len());
        assert_eq!(header_len(&Lists::default()), HEADER_MIN);
        let Body::Optional { direction, kind, info, payload } = decode(&REQUEST).unwrap().body else {
            panic!()
        };
        assert_eq!((direction, kind, info.len(), payload.len()), (Direction::Call, 2, 16, 0));
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
        assert_eq!(decode(&one).unwrap_err(), DecodeError::Version { version: 1 });
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
            let unknown = DecodeError::UnknownError { xid: Xid(0x1122_3344), code };
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
