//! Messages of Version One and of Version Two, as far as they say the same: for an engine that speaks both.
//!
//! What a message of one version lacks is filled in as the other would have it: ERR_CHUNK is BAD_HEADER, and the direction
//! of a Version One message is that of the RPC message in it, where there is one.
#![forbid(unsafe_code)]

use super::v1::{self, ChunkLists, Lists};
use super::v2::{self, Direction, RdmaError};
use super::{Credits, Xid};

/// The versions that somebody speaks, lowest and highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Lowest version spoken.
    pub low: u32,
    /// Highest version spoken.
    pub high: u32,
}

impl Versions {
    /// Version One only.
    pub const ONE: Versions = Versions { low: v1::VERSION, high: v1::VERSION };
    /// Both.
    pub const BOTH: Versions = Versions { low: v1::VERSION, high: v2::VERSION };
    /// Version Two only.
    pub const TWO: Versions = Versions { low: v2::VERSION, high: v2::VERSION };

    /// Whether this version is spoken.
    pub fn include(self, version: u32) -> bool {
        (self.low..=self.high).contains(&version)
    }
}

/// A decoded message.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// Of the header.
    pub version: u32,
    /// The transaction.
    pub xid: Xid,
    /// Asked for in a Call, granted in a Reply.
    pub credits: Credits,
    /// Which way it goes, if it says so itself.
    pub direction: Option<Direction>,
    /// The rest, by procedure.
    pub body: Body<'a>,
}

/// What follows the first four words.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// RDMA_MSG, RDMA2_MSG.
    Msg {
        /// The three lists.
        chunks: ChunkLists<'a>,
        /// The (perhaps reduced) RPC message, from its XID on.
        payload: &'a [u8],
    },
    /// RDMA_NOMSG, RDMA2_NOMSG.
    Nomsg {
        /// The three lists.
        chunks: ChunkLists<'a>,
    },
    /// RDMA_MSGP of Version One.
    Msgp,
    /// RDMA_DONE of Version One.
    Done,
    /// RDMA_ERROR, RDMA2_ERROR.
    Error(RdmaError),
    /// RDMA2_OPTIONAL.
    Optional {
        /// Which message of which extension.
        kind: u32,
        /// Its contents.
        info: &'a [u8],
    },
}

/// What a Responder must answer to a message that it cannot use: XID, version word, error.
pub type Answer = (Xid, u32, RdmaError);

/// Decodes one received message.
///
/// # Errors
/// What a Responder must answer to it; `None`: nothing.
pub fn decode(message: &[u8], versions: Versions) -> Result<Header<'_>, Option<Answer>> {
    let version = message.get(4..8).and_then(|word| word.first_chunk()).map(|word| u32::from_be_bytes(*word));
    let one = |xid, version| (xid, version, RdmaError::Version { low: versions.low, high: versions.high });
    if version == Some(v2::VERSION) && versions.include(v2::VERSION) {
        return v2::decode(message).map(Header::from).map_err(|error| match error {
            // RFC 8166 §4.5, which the draft goes by: an error in a Reply is silently discarded.
            v2::DecodeError::Malformed { xid, .. } if !says_reply(message) => {
                Some((xid, v2::VERSION, RdmaError::BadHeader))
            }
            _ => None,
        });
    }
    match v1::decode(message) {
        Ok(header) => match header.body {
            // RFC 8166 §4.5: the place of RDMA_ERROR and of its contents is "fixed for all versions of the protocol".
            v1::Body::Error(_) => Ok(header.into()),
            _ if versions.include(v1::VERSION) => Ok(header.into()),
            _ => Err(Some(one(header.xid, v1::VERSION))),
        },
        Err(error) => Err(error.answer().map(|(xid, version, error)| match error {
            v1::RdmaError::Version { .. } => one(xid, version),
            v1::RdmaError::Chunk => (xid, version, RdmaError::BadHeader),
        })),
    }
}

/// Whether the direction word of a Version Two message says Reply.
fn says_reply(message: &[u8]) -> bool {
    message.get(16..20) == Some(&(Direction::Reply as u32).to_be_bytes())
}

impl<'a> From<v2::Header<'a>> for Header<'a> {
    fn from(header: v2::Header<'a>) -> Header<'a> {
        let v2::Header { xid, credits, body } = header;
        let (direction, body) = match body {
            v2::Body::Msg { direction, chunks, payload } => (direction, Body::Msg { chunks, payload }),
            v2::Body::Nomsg { direction, chunks } => (direction, Body::Nomsg { chunks }),
            v2::Body::Error(error) => (Direction::Reply, Body::Error(error)),
            v2::Body::Optional { direction, kind, info, .. } => (direction, Body::Optional { kind, info }),
        };
        Header { version: v2::VERSION, xid, credits, direction: Some(direction), body }
    }
}

impl<'a> From<v1::Header<'a>> for Header<'a> {
    fn from(header: v1::Header<'a>) -> Header<'a> {
        let v1::Header { xid, credits, body } = header;
        let (direction, body) = match body {
            // RFC 8167 §4.1: "an accompanying RPC message payload with a call direction field"
            v1::Body::Msg { chunks, payload } => {
                let direction = match payload.get(4..8) {
                    Some([0, 0, 0, 0]) => Some(Direction::Call),
                    Some([0, 0, 0, 1]) => Some(Direction::Reply),
                    _ => None,
                };
                (direction, Body::Msg { chunks, payload })
            }
            // RFC 8166 §4.3.1: "Responders MUST leave the Read list empty in all replies.", so one with it is a Call.
            v1::Body::Nomsg { chunks } => {
                ((chunks.read_count() > 0).then_some(Direction::Call), Body::Nomsg { chunks })
            }
            v1::Body::Error(v1::RdmaError::Version { low, high }) => {
                (Some(Direction::Reply), Body::Error(RdmaError::Version { low, high }))
            }
            v1::Body::Error(v1::RdmaError::Chunk) => {
                (Some(Direction::Reply), Body::Error(RdmaError::BadHeader))
            }
            v1::Body::Msgp => (None, Body::Msgp),
            v1::Body::Done => (None, Body::Done),
        };
        Header { version: v1::VERSION, xid, credits, direction, body }
    }
}

/// Bytes of a header with these lists, the payload not counted.
pub fn header_len(version: u32, lists: &Lists) -> usize {
    if version == v2::VERSION { v2::header_len(lists) } else { v1::header_len(lists) }
}

/// Appends the header of a message of `version` with or without a payload behind it.
pub fn encode(
    out: &mut Vec<u8>,
    version: u32,
    xid: Xid,
    credits: Credits,
    payload: bool,
    direction: Direction,
    lists: &Lists,
) {
    if version == v2::VERSION {
        return v2::encode(out, xid, credits, payload, direction, lists);
    }
    let proc = if payload { v1::Proc::Msg } else { v1::Proc::Nomsg };
    v1::encode(out, xid, credits, proc, lists);
}

/// Appends an answer, a whole message.
pub fn encode_error(out: &mut Vec<u8>, (xid, version, error): Answer, credits: Credits) {
    let one = match error {
        _ if version == v2::VERSION => return v2::encode_error(out, xid, credits, error),
        RdmaError::Version { low, high } => v1::RdmaError::Version { low, high },
        RdmaError::BadHeader | RdmaError::InvalidOption => v1::RdmaError::Chunk,
    };
    v1::encode_error(out, xid, version, credits, one);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn what_is_not_spoken_is_answered_with_what_is() {
        let one = message(&[7, 1, 4, 0, 0, 0, 0, 7, 0]);
        let two = message(&[7, 2, 4, 0, 0, 0, 0, 0, 7, 0]);
        let three = message(&[7, 3, 4, 0, 0, 0, 0, 0, 7, 0]);
        let none = message(&[7, 0, 4, 0, 0, 0, 0, 0, 7, 0]);
        let refusal = |bytes: &[u8], versions| decode(bytes, versions).unwrap_err().unwrap();
        let range = |low, high| RdmaError::Version { low, high };
        for (versions, low, high) in [(Versions::ONE, 1, 1), (Versions::BOTH, 1, 2), (Versions::TWO, 2, 2)] {
            assert_eq!(refusal(&three, versions), (Xid(7), 3, range(low, high)));
            assert_eq!(refusal(&none, versions), (Xid(7), 0, range(low, high)));
            for (version, bytes) in [(1, &one), (2, &two)] {
                if (low..=high).contains(&version) {
                    let header = decode(bytes, versions).unwrap();
                    assert_eq!((header.version, header.direction), (version, Some(Direction::Call)));
                } else {
                    assert_eq!(refusal(bytes, versions), (Xid(7), version, range(low, high)));
                }
            }
        }
    }

    #[test]
    fn an_err_vers_is_understood_in_any_version_and_whatever_is_spoken() {
        for version in [1, 2, 3, 77] {
            let bytes = message(&[7, version, 4, 4, 1, 1, 5]);
            for versions in [Versions::ONE, Versions::BOTH, Versions::TWO] {
                let header = decode(&bytes, versions).unwrap();
                assert!(matches!(header.body, Body::Error(RdmaError::Version { low: 1, high: 5 })));
                let mut again = Vec::new();
                encode_error(
                    &mut again,
                    (Xid(7), version, RdmaError::Version { low: 1, high: 5 }),
                    Credits(4),
                );
                assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn only_a_call_of_version_two_is_told_that_its_header_is_bad() {
        for (direction, answer) in [(0, Some((Xid(7), 2, RdmaError::BadHeader))), (1, None)] {
            let cut = message(&[7, 2, 4, 0, direction, 0]);
            assert_eq!(decode(&cut, Versions::BOTH).unwrap_err(), answer);
        }
        let cut = message(&[7, 1, 4, 0, 1, 0, 0]);
        assert_eq!(decode(&cut, Versions::BOTH).unwrap_err(), Some((Xid(7), 1, RdmaError::BadHeader)));
    }
}
