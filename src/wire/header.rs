//! The header of an RPC-over-RDMA message of any version: bytes <-> values.
//!
//! ```text
//! xid | version | credit | proc | what the version has for this procedure        `v1`, `v2`
//! xid | version | credit | 4    | 1 low high or another code                     errors: one layout in all versions
//! ```
//!
//! Owns what can be said of a header without knowing the connection: lengths, list syntax, Positions, and
//! that an RDMA_NOMSG names its payload. Leaves to `connection` what depends on the role: who may send a Read
//! list or an RDMA_ERROR, credits, and whether an answer is due.
//!
//! What a message of one version lacks is filled in as in the other: ERR_CHUNK is BAD_HEADER, and the direction of a Version One
//! message is that of the RPC message in it, where there is one.
//!
//! # Invariants
//! - [`decode`] allocates nothing.
//! - There is one encoding of a header: encoding what was decoded gives the same bytes.
//!
//! Read first: RFC 8166 §4.1.2 (the XDR), §4.2, §4.5 and §4.7 (examples).
#![forbid(unsafe_code)]

use std::fmt;

use super::lists::{ChunkLists, Lists};
pub use super::v1::{Plain, decode_plain, encode_plain};
use super::{Credits, Reader, Xid, put, v1, v2};

/// The versions that an end speaks, lowest and highest.
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

/// What a message is: the fourth word (RFC 8166 §4.2.4; the draft of Version Two, section 4).
#[doc(alias = "rdma_proc")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proc {
    /// Chunk lists and a payload follow.
    #[doc(alias = "RDMA_MSG")]
    Msg = 0,
    /// Chunk lists follow, one of which holds the payload.
    #[doc(alias = "RDMA_NOMSG")]
    Nomsg = 1,
    /// Not to be used (RFC 8166 §4.6.1); Version One only.
    #[doc(alias = "RDMA_MSGP")]
    Msgp = 2,
    /// Not to be used (RFC 8166 §4.6.2); Version One only.
    #[doc(alias = "RDMA_DONE")]
    Done = 3,
    /// A permanent error of the transaction.
    #[doc(alias = "RDMA_ERROR")]
    Error = 4,
    /// A message of an extension; Version Two only.
    #[doc(alias = "RDMA2_OPTIONAL")]
    Optional = 5,
}

impl Proc {
    fn of(word: u32) -> Option<Proc> {
        Some(match word {
            0 => Proc::Msg,
            1 => Proc::Nomsg,
            2 => Proc::Msgp,
            3 => Proc::Done,
            4 => Proc::Error,
            5 => Proc::Optional,
            _ => return None,
        })
    }
}

/// The direction of a message: that of the RPC message in it.
#[doc(alias = "msg_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Direction {
    Call = 0,
    Reply = 1,
}

impl Direction {
    /// What a word says (RFC 5531 §9, `msg_type`).
    pub(super) fn of(word: u32) -> Option<Direction> {
        match word {
            0 => Some(Direction::Call),
            1 => Some(Direction::Reply),
            _ => None,
        }
    }
}

/// A decoded message: borrows the received bytes.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// Version of the header; in an error, whatever version it echoes.
    pub version: u32,
    /// The transaction.
    pub xid: Xid,
    /// Asked for in a Call, granted in a Reply, without meaning in an error whose direction is unknown.
    pub credits: Credits,
    /// Its direction, if it says so itself.
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
        /// The three lists: a Position-Zero Read chunk or else a Reply chunk is among them.
        chunks: ChunkLists<'a>,
    },
    /// RDMA_MSGP of Version One: a Responder answers ERR_CHUNK, a Requester discards; its contents are not looked at.
    Msgp,
    /// RDMA_DONE of Version One: every receiver discards it.
    Done,
    /// RDMA_ERROR, RDMA2_ERROR: completes the transaction at a Requester; a Responder discards it.
    Error(RdmaError),
    /// RDMA2_OPTIONAL.
    Optional {
        /// Which message of which extension.
        kind: u32,
        /// Its contents, which are XDR themselves.
        info: &'a [u8],
    },
}

/// Why a transaction failed in the transport (RFC 8166 §4.5; the draft of Version Two, section 4).
#[doc(alias = "rpc_rdma_error")]
#[doc(alias = "rpcrdma2_error")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RdmaError {
    /// The responder speaks versions `low..=high` only.
    #[doc(alias = "ERR_VERS")]
    Version {
        /// Lowest version spoken.
        low: u32,
        /// Highest version spoken.
        high: u32,
    },
    /// The responder could not use the header, its chunks, or an extension's part of it.
    #[doc(alias = "ERR_CHUNK")]
    BadHeader,
    /// The extension's message is not known; Version Two only.
    InvalidOption,
}

impl RdmaError {
    /// Its name in the text of a version.
    pub(crate) fn name(self, version: u32) -> &'static str {
        match self {
            RdmaError::Version { .. } if version == v2::VERSION => "VERS",
            RdmaError::Version { .. } => "ERR_VERS",
            RdmaError::BadHeader if version == v2::VERSION => "BAD_HEADER",
            RdmaError::BadHeader => "ERR_CHUNK",
            RdmaError::InvalidOption => "INVAL_OPTION",
        }
    }
}

/// What a Responder must answer to a message that it cannot use: XID, version word, error.
pub type Answer = (Xid, u32, RdmaError);

/// Decodes one received message, where this end speaks `versions`.
///
/// Bytes after an RDMA_NOMSG or RDMA_ERROR are ignored: no rule calls them an error, and some devices pad.
///
/// # Errors
/// What is wrong, and with it what a Responder owes the sender: see [`DecodeError::answer`].
#[inline]
pub fn decode(message: &[u8], versions: Versions) -> Result<Header<'_>, DecodeError> {
    if let Some(plain) = decode_plain(message)
        && versions.include(v1::VERSION)
    {
        return Ok(plain.header());
    }
    decode_any(message, versions)
}

/// Decodes any message, as [`decode`] does.
#[inline(never)]
fn decode_any(message: &[u8], versions: Versions) -> Result<Header<'_>, DecodeError> {
    let mut reader = Reader { rest: message };
    let short = |needed| DecodeError::TooShort { length: message.len(), needed };
    let fixed = || short(FIXED_LEN);
    let xid = Xid(reader.word().ok_or_else(fixed)?);
    let version = reader.word().ok_or_else(fixed)?;
    let credits = Credits(reader.word().ok_or_else(fixed)?);
    let word = reader.word().ok_or_else(fixed)?;
    let proc = Proc::of(word);

    // Before the version is looked at: the place and the value of RDMA_ERROR are "fixed for all versions",
    // and a responder that does not know our version echoes that version in its error.
    if proc == Some(Proc::Error) {
        let code = reader.word().ok_or_else(|| short(ERROR_LEN))?;
        let two = version == v2::VERSION && versions.include(version);
        let error = match code {
            ERR_VERS => reader.word().zip(reader.word()).map(|(low, high)| RdmaError::Version { low, high }),
            // Also where only Version Two is spoken: it tells that the peer does not speak it.
            ERR_CHUNK if two || version == v1::VERSION => Some(RdmaError::BadHeader),
            ERR_INVAL_OPTION if two => Some(RdmaError::InvalidOption),
            _ => None,
        };
        let error = error.ok_or(DecodeError::UnknownError { xid, version, code })?;
        let direction = Some(Direction::Reply);
        return Ok(Header { version, xid, credits, direction, body: Body::Error(error) });
    }
    let (direction, body) = match version {
        v2::VERSION if versions.include(version) => v2::decode(proc, &mut reader),
        // RFC 8166 §4.5: "If an incoming RPC-over-RDMA message is not as long as a minimal size RPC-over-RDMA
        // header (28 bytes), the receiver cannot trust the value of the XID field; therefore, it MUST silently
        // discard the message before performing any parsing." An RDMA_ERROR of 20 bytes is whole, so it had to be
        // told apart first.
        _ if message.len() < MIN_LEN => return Err(short(MIN_LEN)),
        // RFC 8166 §4.2.2: "For RPC-over-RDMA version 1, this field MUST contain the value one (1)."
        v1::VERSION if versions.include(version) => v1::decode(proc, &mut reader),
        _ => return Err(DecodeError::Version { xid, version, spoken: versions }),
    };
    match body {
        Ok(body) => Ok(Header { version, xid, credits, direction, body }),
        Err(what) => Err(DecodeError::Malformed { xid, version, direction, what }),
    }
}

/// Why a message could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// Too short to trust even its XID: discard it silently.
    TooShort {
        /// Bytes received.
        length: usize,
        /// Fewest bytes of a message of this procedure.
        needed: usize,
    },
    /// A message of a version that is not spoken.
    Version {
        /// Its transaction.
        xid: Xid,
        /// Its version.
        version: u32,
        /// What is spoken.
        spoken: Versions,
    },
    /// A header that breaks the rules.
    Malformed {
        /// Its transaction.
        xid: Xid,
        /// Its version.
        version: u32,
        /// Its direction, if it says so itself.
        direction: Option<Direction>,
        /// Which rule.
        what: &'static str,
    },
    /// An RDMA_ERROR that says nothing we know: discard it silently.
    UnknownError {
        /// The transaction that it claims to end.
        xid: Xid,
        /// Its version.
        version: u32,
        /// Its error code.
        code: u32,
    },
}

impl DecodeError {
    /// What a Responder must answer, as [`encode_error`] takes it. `None`: nothing.
    ///
    /// For a Responder only: "If errors are detected in the RPC-over-RDMA header of an RPC Reply message, a
    /// Requester MUST silently discard the message" (RFC 8166 §4.5).
    pub fn answer(&self) -> Option<Answer> {
        match *self {
            // RFC 8166 §4.5.1: "it MUST reply with an RDMA_ERROR procedure and set the rdma_err value to
            // ERR_VERS, also providing the low and high inclusive version numbers it does, in fact, support."
            DecodeError::Version { xid, version, spoken: Versions { low, high } } => {
                Some((xid, version, RdmaError::Version { low, high }))
            }
            // RFC 8166 §4.5, which the draft of Version Two follows: an error in a Reply is silently discarded. A malformed
            // header of Version One does not say whether it is a Reply.
            DecodeError::Malformed { direction: Some(Direction::Reply), .. } => None,
            // RFC 8166 §4.5.2: "If the rdma_vers field contains a recognized value, but an XDR parsing error
            // occurs, the Responder MUST reply with an RDMA_ERROR procedure and set the rdma_err value to
            // ERR_CHUNK."
            DecodeError::Malformed { xid, version, .. } => Some((xid, version, RdmaError::BadHeader)),
            // RFC 8166 §4.5: "A receiver MUST silently discard an RDMA_ERROR procedure that it cannot
            // decode."
            DecodeError::TooShort { .. } | DecodeError::UnknownError { .. } => None,
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecodeError::TooShort { length, needed } => {
                write!(f, "message of {length} bytes where a header needs {needed}")
            }
            DecodeError::Version { xid, version, spoken: Versions { low, high } } => {
                write!(f, "xid {xid}: RPC-over-RDMA version {version} where {low} to {high} are spoken")
            }
            DecodeError::Malformed { xid, what, .. } => write!(f, "xid {xid}: malformed header: {what}"),
            DecodeError::UnknownError { xid, version, code } => {
                write!(
                    f,
                    "xid {xid}: RDMA_ERROR of version {version} with unknown or incomplete error {code}"
                )
            }
        }
    }
}

impl std::error::Error for DecodeError {}

/// Bytes of a header with these lists, not counting the payload.
pub(crate) fn header_len(version: u32, lists: &Lists) -> usize {
    let direction = if version == v2::VERSION { 4 } else { 0 };
    FIXED_LEN + direction + lists.encoded_len()
}

/// Appends the header of an RDMA_MSG, which its payload follows on the wire, or of an RDMA_NOMSG.
///
/// # Panics
/// When `proc` is another procedure: errors have [`encode_error`], extensions `v2::encode_optional`, and the others are
/// never sent.
pub fn encode(
    out: &mut Vec<u8>,
    version: u32,
    xid: Xid,
    credits: Credits,
    proc: Proc,
    direction: Direction,
    lists: &Lists,
) {
    // RFC 8166 §4.6.1: "Therefore, senders MUST NOT send RDMA_MSGP procedures."
    // RFC 8166 §4.6.2: "Therefore, senders MUST NOT send RDMA_DONE messages."
    assert!(matches!(proc, Proc::Msg | Proc::Nomsg), "{proc:?} has no chunk lists or must not be sent");
    out.reserve(header_len(version, lists));
    put(out, &[xid.0, version, credits.0, proc as u32]);
    if version == v2::VERSION {
        put(out, &[direction as u32]);
    }
    lists.encode(out);
}

/// Appends an RDMA_ERROR, a whole message.
pub fn encode_error(out: &mut Vec<u8>, (xid, version, error): Answer, credits: Credits) {
    // RFC 8166 §4.5: "The rdma_xid field MUST contain the same XID that was in the rdma_xid field in the
    // failing request", "The rdma_vers field MUST contain the same version that was in the rdma_vers field in
    // the failing request", "The rdma_proc field MUST contain the value RDMA_ERROR".
    put(out, &[xid.0, version, credits.0, Proc::Error as u32]);
    match error {
        RdmaError::Version { low, high } => put(out, &[ERR_VERS, low, high]),
        RdmaError::InvalidOption if version == v2::VERSION => put(out, &[ERR_INVAL_OPTION]),
        RdmaError::BadHeader | RdmaError::InvalidOption => put(out, &[ERR_CHUNK]),
    }
}

/// One tcpdump-like line; lists are cut after eight entries.
impl fmt::Display for Header<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.version == v2::VERSION { "RDMA2_" } else { "RDMA_" };
        let name = match self.body {
            Body::Msg { .. } => "MSG",
            Body::Nomsg { .. } => "NOMSG",
            Body::Msgp => "MSGP",
            Body::Done => "DONE",
            Body::Error(_) => "ERROR",
            Body::Optional { .. } => "OPTIONAL",
        };
        write!(f, "{prefix}{name} xid {} credits {}", self.xid, self.credits.0)?;
        if self.version == v2::VERSION
            && !matches!(self.body, Body::Error(_))
            && let Some(direction) = self.direction
        {
            write!(f, " {direction}")?;
        }
        match self.body {
            Body::Msg { chunks, payload } => write!(f, " {chunks} payload {}", payload.len()),
            Body::Nomsg { chunks } => write!(f, " {chunks}"),
            Body::Msgp | Body::Done => Ok(()),
            Body::Error(error) => {
                write!(f, " {}", error.name(self.version))?;
                match error {
                    RdmaError::Version { low, high } => write!(f, " {low}..{high}"),
                    RdmaError::BadHeader | RdmaError::InvalidOption => Ok(()),
                }
            }
            Body::Optional { kind, info } => write!(f, " type {kind} bytes {}", info.len()),
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Direction::Call { "CALL" } else { "REPLY" })
    }
}

/// The four words that all versions share.
const FIXED_LEN: usize = 16;
/// An RDMA_ERROR with ERR_CHUNK.
const ERROR_LEN: usize = 20;
/// A header of Version One without chunks.
const MIN_LEN: usize = 28;

/// "Value fixed for all versions" (RFC 8166 §4.1.2).
const ERR_VERS: u32 = 1;
/// BAD_HEADER of Version Two.
const ERR_CHUNK: u32 = 2;
const ERR_INVAL_OPTION: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Handle, Segment};

    fn message(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn a_plain_message_is_read_as_any_other() {
        let short = message(&[0x0102_0304, 1, 32, 0, 0, 0, 0, 0x0102_0304, 1, 5]);
        let chunk = message(&[0x0102_0304, 1, 32, 0, 0, 0, 1, 1, 0xaabb_ccdd, 4096, 9, 8, 0x0102_0304, 1, 5]);
        let same = |bytes: &[u8]| {
            for versions in [Versions::ONE, Versions::BOTH, Versions::TWO] {
                let [one, any] =
                    [decode(bytes, versions), decode_any(bytes, versions)].map(|it| format!("{it:?}"));
                assert_eq!(one, any);
            }
        };
        let segment = Segment { handle: Handle(0xaabb_ccdd), length: 4096, offset: 9 << 32 | 8 };
        for (bytes, reply, length) in [(short, None, 28), (chunk, Some(segment), 48)] {
            let plain = decode_plain(&bytes).unwrap();
            assert_eq!((plain.direction(), plain.reply()), (Some(Direction::Reply), reply));
            let mut header = [0; v1::PLAIN_MAX];
            let header = encode_plain(&mut header, Xid(0x0102_0304), Credits(32), reply);
            assert_eq!(header, &bytes[..length]);
            (0..=bytes.len()).for_each(|length| same(&bytes[..length]));
            for at in 0..bytes.len() {
                for value in [0, 1, 2, 4, 5, 0x80, 0xff] {
                    let mut bytes = bytes.clone();
                    bytes[at] = value;
                    same(&bytes);
                }
            }
        }
    }

    #[test]
    fn what_is_not_spoken_is_answered_with_what_is() {
        let one = message(&[7, 1, 4, 0, 0, 0, 0, 7, 0]);
        let two = message(&[7, 2, 4, 0, 0, 0, 0, 0, 7, 0]);
        let three = message(&[7, 3, 4, 0, 0, 0, 0, 0, 7, 0]);
        let none = message(&[7, 0, 4, 0, 0, 0, 0, 0, 7, 0]);
        let refusal = |bytes: &[u8], versions| decode(bytes, versions).unwrap_err().answer().unwrap();
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
            assert_eq!(decode(&cut, Versions::BOTH).unwrap_err().answer(), answer);
        }
        let cut = message(&[7, 1, 4, 0, 1, 0, 0]);
        assert_eq!(
            decode(&cut, Versions::BOTH).unwrap_err().answer(),
            Some((Xid(7), 1, RdmaError::BadHeader))
        );
    }
}
