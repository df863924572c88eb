//! The RPC-over-RDMA Version One header: bytes <-> values (RFC 8166 §4).
//!
//! ```text
//! xid | vers=1 | credit | proc | Read list            | Write list                 | Reply chunk   | payload
//!                                1 PHLOO 1 PHLOO .. 0   1 n HLOO*n 1 m HLOO*m .. 0   0 | 1 n HLOO*n
//! xid | vers   | credit | 4    | 1 low high (ERR_VERS) or 2 (ERR_CHUNK)
//! ```
//!
//! Owns what can be said of a header without knowing the connection: lengths, list syntax, Positions, and
//! that an RDMA_NOMSG names its payload. Leaves to `connection` what depends on the role: who may send a Read
//! list or an RDMA_ERROR, credits, and whether an answer is due. Leaves to `connection::chunks` what chunks
//! mean.
//!
//! # Invariants
//! - [`decode`] allocates nothing, and a [`ChunkLists`] is a validated copy-free view: iterating over it
//!   yields exactly the entries that were counted, and cannot fail.
//! - There is one encoding of a header: encoding what was decoded gives the same bytes.
//!
//! Read first: RFC 8166 §4.1.2 (the XDR), §4.2, §4.5 and §4.7 (examples).
#![forbid(unsafe_code)]

use std::fmt;

use super::{Credits, Handle, Position, ReadSegment, Segment, Xid};

/// The version of the protocol that this file speaks.
pub const VERSION: u32 = 1;

/// What a message is: the fourth word (RFC 8166 §4.2.4).
#[doc(alias = "rdma_proc")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proc {
    /// Chunk lists and a payload follow.
    #[doc(alias = "RDMA_MSG")]
    Msg = 0,
    /// Chunk lists follow, one of which holds the payload.
    #[doc(alias = "RDMA_NOMSG")]
    Nomsg = 1,
    /// Not to be used (RFC 8166 §4.6.1).
    #[doc(alias = "RDMA_MSGP")]
    Msgp = 2,
    /// Not to be used (RFC 8166 §4.6.2).
    #[doc(alias = "RDMA_DONE")]
    Done = 3,
    /// A permanent error of the transaction.
    #[doc(alias = "RDMA_ERROR")]
    Error = 4,
}

/// A decoded message: borrows the received bytes.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// The transaction.
    pub xid: Xid,
    /// Asked for in a Call, granted in a Reply, without meaning in an RDMA_ERROR whose direction is unknown.
    pub credits: Credits,
    /// The rest, by procedure.
    pub body: Body<'a>,
}

/// What follows the first three words.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// RDMA_MSG.
    Msg {
        /// The three lists.
        chunks: ChunkLists<'a>,
        /// The (perhaps reduced) RPC message, from its XID on.
        payload: &'a [u8],
    },
    /// RDMA_NOMSG.
    Nomsg {
        /// The three lists: a Position-Zero Read chunk or else a Reply chunk is among them.
        chunks: ChunkLists<'a>,
    },
    /// RDMA_MSGP: a Responder answers ERR_CHUNK, a Requester discards; its contents are not looked at.
    Msgp,
    /// RDMA_DONE: to be discarded by everybody.
    Done,
    /// RDMA_ERROR: completes the transaction at a Requester, discarded by a Responder.
    Error(RdmaError),
}

/// Why a transaction failed in the transport (RFC 8166 §4.5).
#[doc(alias = "rpc_rdma_error")]
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
    /// The responder could not use the header or its chunks.
    #[doc(alias = "ERR_CHUNK")]
    Chunk,
}

impl Header<'_> {
    /// Checks that the RPC message inside an RDMA_MSG begins with the XID of the header.
    ///
    /// Apart from [`decode`], because RFC 8166 §4.2.1 allows a receiver to work from the header's XID alone;
    /// a Responder has to make this check, as §4.5.2 counts a mismatch among the errors to be answered.
    ///
    /// # Errors
    /// [`DecodeError::Malformed`].
    pub fn check_xid(&self) -> Result<(), DecodeError> {
        let Body::Msg { payload, .. } = self.body else { return Ok(()) };
        // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
        if (Reader { rest: payload }).word() == Some(self.xid.0) {
            return Ok(());
        }
        Err(DecodeError::Malformed {
            xid: self.xid,
            what: "the RPC message does not begin with the header's XID",
        })
    }
}

/// The three lists of a message: a view of validated bytes.
#[doc(alias = "rpc_rdma_header")]
#[derive(Clone, Copy)]
pub struct ChunkLists<'a> {
    /// `1 PHLOO ... 0`
    reads: &'a [u8],
    read_count: usize,
    /// `1 n HLOO*n ... 0`
    writes: &'a [u8],
    write_count: usize,
    reply: Option<SegmentArray<'a>>,
}

impl<'a> ChunkLists<'a> {
    /// The Read list, in list order.
    pub fn reads(&self) -> impl Iterator<Item = ReadSegment> + use<'a> {
        let mut reader = Reader { rest: self.reads };
        std::iter::from_fn(move || match reader.word() {
            Some(1) => reader.read_segment(),
            _ => None,
        })
    }

    /// Segments in the Read list.
    pub fn read_count(&self) -> usize {
        self.read_count
    }

    /// The Write list, in list order.
    pub fn writes(&self) -> impl Iterator<Item = SegmentArray<'a>> + use<'a> {
        let mut reader = Reader { rest: self.writes };
        std::iter::from_fn(move || match reader.word() {
            Some(1) => reader.segment_array(),
            _ => None,
        })
    }

    /// Chunks in the Write list.
    pub fn write_count(&self) -> usize {
        self.write_count
    }

    /// The Reply chunk, if there is one; it may have no segment.
    pub fn reply(&self) -> Option<SegmentArray<'a>> {
        self.reply
    }

    /// Whether all three are absent.
    pub fn is_empty(&self) -> bool {
        self.read_count == 0 && self.write_count == 0 && self.reply.is_none()
    }

    /// A copy that can be changed and encoded, as a Responder returns the Write list and the Reply chunk.
    pub fn to_lists(&self) -> Lists {
        Lists {
            reads: self.reads().collect(),
            writes: self.writes().map(|chunk| chunk.iter().collect()).collect(),
            reply: self.reply.map(|chunk| chunk.iter().collect()),
        }
    }
}

impl fmt::Debug for ChunkLists<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A counted array of segments: a Write chunk or the Reply chunk (RFC 8166 §3.4.6).
#[doc(alias = "xdr_write_chunk")]
#[derive(Clone, Copy)]
pub struct SegmentArray<'a> {
    /// `HLOO*n`
    bytes: &'a [u8],
}

impl<'a> SegmentArray<'a> {
    /// Segments in the array.
    pub fn len(&self) -> usize {
        self.bytes.len() / SEGMENT_LEN
    }

    /// Whether there is no segment: an "empty Write chunk".
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The segments, in array order.
    pub fn iter(&self) -> impl Iterator<Item = Segment> + use<'a> {
        let mut reader = Reader { rest: self.bytes };
        std::iter::from_fn(move || reader.segment())
    }

    /// Sum of the segments' lengths: 0 in an empty and in an unused chunk.
    pub fn total_length(&self) -> u64 {
        // No overflow: a message has fewer than 2^32 segments, each shorter than 2^32.
        self.iter().map(|segment| u64::from(segment.length)).sum()
    }
}

impl fmt::Debug for SegmentArray<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Decodes one received message.
///
/// Bytes behind an RDMA_NOMSG or RDMA_ERROR are ignored: no rule names them an error, and some devices pad.
///
/// # Errors
/// What is wrong, and with it what a Responder owes the sender: see [`DecodeError::answer`].
pub fn decode(message: &[u8]) -> Result<Header<'_>, DecodeError> {
    let mut reader = Reader { rest: message };
    let short = |needed| DecodeError::TooShort { length: message.len(), needed };
    let fixed = || short(FIXED_LEN);
    let xid = Xid(reader.word().ok_or_else(fixed)?);
    let version = reader.word().ok_or_else(fixed)?;
    let credits = Credits(reader.word().ok_or_else(fixed)?);
    let proc = reader.word().ok_or_else(fixed)?;

    // Before the version is looked at: the place and the value of RDMA_ERROR are "fixed for all versions",
    // and a responder that does not know our version echoes that version in its error.
    if proc == Proc::Error as u32 {
        let code = reader.word().ok_or_else(|| short(ERROR_LEN))?;
        let error = match (code, version) {
            (ERR_VERS, _) => {
                reader.word().zip(reader.word()).map(|(low, high)| RdmaError::Version { low, high })
            }
            (ERR_CHUNK, VERSION) => Some(RdmaError::Chunk),
            _ => None,
        };
        let error = error.ok_or(DecodeError::UnknownError { xid, version, code })?;
        return Ok(Header { xid, credits, body: Body::Error(error) });
    }

    // RFC 8166 §4.5: "If an incoming RPC-over-RDMA message is not as long as a minimal size RPC-over-RDMA
    // header (28 bytes), the receiver cannot trust the value of the XID field; therefore, it MUST silently
    // discard the message before performing any parsing." An RDMA_ERROR of 20 bytes is whole, so it had to be
    // told apart first.
    if message.len() < MIN_LEN {
        return Err(short(MIN_LEN));
    }
    // RFC 8166 §4.2.2: "For RPC-over-RDMA version 1, this field MUST contain the value one (1)."
    if version != VERSION {
        return Err(DecodeError::Version { xid, version });
    }
    let malformed = |what| DecodeError::Malformed { xid, what };
    let body = match proc {
        MSG => {
            let chunks = reader.chunk_lists().map_err(malformed)?;
            // A chunk at Position 0 would replace the XID, which the payload of an RDMA_MSG begins with.
            if chunks.reads().any(|read| read.position == Position(0)) {
                return Err(malformed("RDMA_MSG with a Position-Zero Read chunk"));
            }
            Body::Msg { chunks, payload: reader.rest }
        }
        NOMSG => {
            let chunks = reader.chunk_lists().map_err(malformed)?;
            // RFC 8166 §4.2.4: "Though any of these MAY be marked as not present, one MUST be present and
            // MUST hold the Payload stream for this RPC-over-RDMA message." A Reply has no Read list, so what
            // has one is a Call.
            let has_payload = match chunks.read_count() {
                0 => chunks.reply().is_some(),
                _ => chunks.reads().any(|read| read.position == Position(0)),
            };
            if !has_payload {
                return Err(malformed(
                    "RDMA_NOMSG with neither a Position-Zero Read chunk nor a Reply chunk",
                ));
            }
            Body::Nomsg { chunks }
        }
        MSGP => Body::Msgp,
        DONE => Body::Done,
        _ => return Err(malformed("unknown procedure")),
    };
    Ok(Header { xid, credits, body })
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
    /// A message of another version.
    Version {
        /// Its transaction.
        xid: Xid,
        /// Its version.
        version: u32,
    },
    /// A header that breaks the rules.
    Malformed {
        /// Its transaction.
        xid: Xid,
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
    /// The XID that an answer would carry; `None` when there must not be one.
    pub fn xid(&self) -> Option<Xid> {
        match *self {
            DecodeError::Version { xid, .. } | DecodeError::Malformed { xid, .. } => Some(xid),
            // RFC 8166 §4.5: "A receiver MUST silently discard an RDMA_ERROR procedure that it cannot
            // decode."
            DecodeError::TooShort { .. } | DecodeError::UnknownError { .. } => None,
        }
    }

    /// What a Responder must answer: XID, version word and error, as [`encode_error`] takes them. `None`:
    /// nothing.
    ///
    /// For a Responder only: "If errors are detected in the RPC-over-RDMA header of an RPC Reply message, a
    /// Requester MUST silently discard the message" (RFC 8166 §4.5).
    pub fn answer(&self) -> Option<(Xid, u32, RdmaError)> {
        match *self {
            // RFC 8166 §4.5.1: "it MUST reply with an RDMA_ERROR procedure and set the rdma_err value to
            // ERR_VERS, also providing the low and high inclusive version numbers it does, in fact, support."
            DecodeError::Version { xid, version } => {
                Some((xid, version, RdmaError::Version { low: VERSION, high: VERSION }))
            }
            // RFC 8166 §4.5.2: "If the rdma_vers field contains a recognized value, but an XDR parsing error
            // occurs, the Responder MUST reply with an RDMA_ERROR procedure and set the rdma_err value to
            // ERR_CHUNK."
            DecodeError::Malformed { xid, .. } => Some((xid, VERSION, RdmaError::Chunk)),
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
            DecodeError::Version { xid, version } => {
                write!(f, "xid {xid}: RPC-over-RDMA version {version} where {VERSION} is spoken")
            }
            DecodeError::Malformed { xid, what } => write!(f, "xid {xid}: malformed header: {what}"),
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

/// The three lists that a sender puts into a header.
#[derive(Default, Clone, Debug, PartialEq, Eq)]
pub struct Lists {
    /// Read list; Positions are multiples of four.
    pub reads: Vec<ReadSegment>,
    /// Write list: one array per chunk.
    pub writes: Vec<Vec<Segment>>,
    /// Reply chunk.
    pub reply: Option<Vec<Segment>>,
}

impl Lists {
    /// Bytes of the three lists in a header.
    pub fn encoded_len(&self) -> usize {
        let chunk = |chunk: &Vec<Segment>| 4 + chunk.len() * SEGMENT_LEN;
        let reads = self.reads.len() * (8 + SEGMENT_LEN) + 4;
        let writes = self.writes.iter().map(|c| 4 + chunk(c)).sum::<usize>() + 4;
        let reply = 4 + self.reply.as_ref().map_or(0, chunk);
        reads + writes + reply
    }
}

/// Bytes of an RDMA_MSG or RDMA_NOMSG header with these lists, the payload of an RDMA_MSG not counted.
pub fn header_len(lists: &Lists) -> usize {
    FIXED_LEN + lists.encoded_len()
}

/// Appends the header of an RDMA_MSG or RDMA_NOMSG to `out`. The payload of an RDMA_MSG follows it on the
/// wire.
///
/// # Panics
/// When `proc` is another procedure: errors have [`encode_error`], and the others are never sent.
pub fn encode(out: &mut Vec<u8>, xid: Xid, credits: Credits, proc: Proc, lists: &Lists) {
    // RFC 8166 §4.6.1: "Therefore, senders MUST NOT send RDMA_MSGP procedures."
    // RFC 8166 §4.6.2: "Therefore, senders MUST NOT send RDMA_DONE messages."
    assert!(matches!(proc, Proc::Msg | Proc::Nomsg), "{proc:?} has no chunk lists or must not be sent");
    out.reserve(header_len(lists));
    put(out, &[xid.0, VERSION, credits.0, proc as u32]);
    put_lists(out, lists);
}

/// Appends the three lists.
pub(super) fn put_lists(out: &mut Vec<u8>, lists: &Lists) {
    for read in &lists.reads {
        put(out, &[1, read.position.0]);
        put_segment(out, &read.target);
    }
    put(out, &[0]);
    for chunk in &lists.writes {
        put(out, &[1]);
        put_array(out, chunk);
    }
    put(out, &[0]);
    match &lists.reply {
        None => put(out, &[0]),
        Some(chunk) => {
            put(out, &[1]);
            put_array(out, chunk);
        }
    }
}

/// Appends an RDMA_ERROR to `out`, a whole message. `version` is that of the failing message.
pub fn encode_error(out: &mut Vec<u8>, xid: Xid, version: u32, credits: Credits, error: RdmaError) {
    // RFC 8166 §4.5: "The rdma_xid field MUST contain the same XID that was in the rdma_xid field in the
    // failing request", "The rdma_vers field MUST contain the same version that was in the rdma_vers field in
    // the failing request", "The rdma_proc field MUST contain the value RDMA_ERROR".
    put(out, &[xid.0, version, credits.0, Proc::Error as u32]);
    match error {
        RdmaError::Version { low, high } => put(out, &[ERR_VERS, low, high]),
        RdmaError::Chunk => put(out, &[ERR_CHUNK]),
    }
}

pub(super) fn put(out: &mut Vec<u8>, words: &[u32]) {
    for word in words {
        out.extend_from_slice(&word.to_be_bytes());
    }
}

fn put_segment(out: &mut Vec<u8>, segment: &Segment) {
    put(out, &[segment.handle.0, segment.length]);
    out.extend_from_slice(&segment.offset.to_be_bytes());
}

fn put_array(out: &mut Vec<u8>, chunk: &[Segment]) {
    // No truncation: the count is bounded by a peer's inline threshold, or by a plan of at most 16 segments.
    put(out, &[chunk.len() as u32]);
    for segment in chunk {
        put_segment(out, segment);
    }
}

/// One tcpdump-like line; lists are cut after eight entries.
impl fmt::Display for Header<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.body {
            Body::Msg { .. } => "RDMA_MSG",
            Body::Nomsg { .. } => "RDMA_NOMSG",
            Body::Msgp => "RDMA_MSGP",
            Body::Done => "RDMA_DONE",
            Body::Error(_) => "RDMA_ERROR",
        };
        write!(f, "{name} xid {} credits {}", self.xid, self.credits.0)?;
        match self.body {
            Body::Msg { chunks, payload } => write!(f, " {chunks} payload {}", payload.len()),
            Body::Nomsg { chunks } => write!(f, " {chunks}"),
            Body::Msgp | Body::Done => Ok(()),
            Body::Error(error) => write!(f, " {error}"),
        }
    }
}

impl fmt::Display for RdmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RdmaError::Version { low, high } => write!(f, "ERR_VERS {low}..{high}"),
            RdmaError::Chunk => f.write_str("ERR_CHUNK"),
        }
    }
}

impl fmt::Display for ChunkLists<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reads = self.reads().map(PositionedSegment);
        f.write_str("reads ")?;
        write_cut(f, reads, self.read_count)?;
        f.write_str(" writes ")?;
        write_cut(f, self.writes(), self.write_count)?;
        match self.reply {
            None => f.write_str(" reply none"),
            Some(chunk) => write!(f, " reply {chunk}"),
        }
    }
}

impl fmt::Display for SegmentArray<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_cut(f, self.iter(), self.len())
    }
}

struct PositionedSegment(ReadSegment);

impl fmt::Display for PositionedSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0.position.0, self.0.target)
    }
}

/// `[a b c]`, or the first [`SHOWN`] entries and how many there are besides.
fn write_cut<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    entries: impl Iterator<Item = T>,
    count: usize,
) -> fmt::Result {
    f.write_str("[")?;
    for (at, entry) in entries.take(SHOWN).enumerate() {
        let space = if at == 0 { "" } else { " " };
        write!(f, "{space}{entry}")?;
    }
    if count > SHOWN {
        write!(f, " and {} more", count - SHOWN)?;
    }
    f.write_str("]")
}

/// The unread rest of a message. Every read checks that its bytes are there.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn word(&mut self) -> Option<u32> {
        let (word, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u32::from_be_bytes(*word))
    }

    fn segment(&mut self) -> Option<Segment> {
        let handle = Handle(self.word()?);
        let length = self.word()?;
        let (offset, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(Segment { handle, length, offset: u64::from_be_bytes(*offset) })
    }

    fn read_segment(&mut self) -> Option<ReadSegment> {
        let position = Position(self.word()?);
        Some(ReadSegment { position, target: self.segment()? })
    }

    /// A count and its segments. The count is the peer's: it is compared with the bytes that are there.
    fn segment_array(&mut self) -> Option<SegmentArray<'a>> {
        let length = usize::try_from(self.word()?).ok()?.checked_mul(SEGMENT_LEN)?;
        let (bytes, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(SegmentArray { bytes })
    }

    /// The discriminator of an optional-data item (RFC 4506 §4.19): a bool, so 0 or 1.
    fn present(&mut self) -> Result<bool, &'static str> {
        match self.word() {
            Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(_) => Err("a list's discriminator is neither 0 nor 1"),
            None => Err("the message ends inside the chunk lists"),
        }
    }

    pub(super) fn chunk_lists(&mut self) -> Result<ChunkLists<'a>, &'static str> {
        let reads = self.rest;
        let mut read_count = 0;
        while self.present()? {
            let read = self.read_segment().ok_or("the message ends inside the Read list")?;
            // RFC 8166 §3.4.5: "The value in this field MUST be a multiple of four."
            if read.position.0 % 4 != 0 {
                return Err("a Read chunk's Position is not a multiple of four");
            }
            read_count += 1;
        }
        let writes = self.rest;
        let mut write_count = 0;
        while self.present()? {
            self.segment_array().ok_or("the message ends inside the Write list")?;
            write_count += 1;
        }
        let reply = match self.present()? {
            false => None,
            true => Some(self.segment_array().ok_or("the message ends inside the Reply chunk")?),
        };
        Ok(ChunkLists { reads, read_count, writes, write_count, reply })
    }
}

/// The four words that all versions share.
pub(super) const FIXED_LEN: usize = 16;
/// An RDMA_ERROR with ERR_CHUNK.
const ERROR_LEN: usize = 20;
/// A header without chunks.
const MIN_LEN: usize = 28;
/// `HLOO`.
const SEGMENT_LEN: usize = 16;
/// Entries of a list that `Display` shows.
const SHOWN: usize = 8;

const MSG: u32 = Proc::Msg as u32;
const NOMSG: u32 = Proc::Nomsg as u32;
const MSGP: u32 = Proc::Msgp as u32;
const DONE: u32 = Proc::Done as u32;

/// "Value fixed for all versions" (RFC 8166 §4.1.2).
const ERR_VERS: u32 = 1;
const ERR_CHUNK: u32 = 2;

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::*;

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
        put(&mut out, words);
        out
    }

    fn malformed(message: &[u8]) -> &'static str {
        match decode(message) {
            Err(error @ DecodeError::Malformed { what, .. }) => {
                assert_eq!(error.answer(), Some((Xid(7), VERSION, RdmaError::Chunk)));
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
        assert!(matches!(decode(&ERROR_CHUNK).unwrap().body, Body::Error(RdmaError::Chunk)));
        let versions = RdmaError::Version { low: 1, high: 2 };
        assert!(matches!(decode(&ERROR_VERS).unwrap().body, Body::Error(e) if e == versions));
    }

    #[test]
    fn golden_messages_encode_to_the_same_bytes() {
        let lists = Lists {
            reads: vec![read(152, segment(0xdeadbeef, 4096, 0x11223344)), read(152, segment(7, 3, u64::MAX))],
            reply: Some(vec![]),
            ..Lists::default()
        };
        assert_eq!(encoded(0x01020304, 1, Proc::Msg, &lists), READS[..80]);
        assert_eq!(encoded(1, 32, Proc::Msg, &Lists::default()), SHORT[..28]);
        let mut out = vec![];
        encode_error(&mut out, Xid(9), 1, Credits(32), RdmaError::Chunk);
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
        let chunk = vec![segment(1, 2, 3); 9];
        let shown = ["0x00000001+0x3:2"; 8].join(" ");
        let lists = Lists { reply: Some(chunk), ..Lists::default() };
        let line = decode(&encoded(1, 1, Proc::Nomsg, &lists)).unwrap().to_string();
        assert!(line.ends_with(&format!("reply [{shown} and 1 more]")), "{line}");
        let lists = Lists { reply: Some(vec![segment(1, 2, 3); 8]), ..Lists::default() };
        let line = decode(&encoded(1, 1, Proc::Nomsg, &lists)).unwrap().to_string();
        assert!(line.ends_with(&format!("reply [{shown}]")), "{line}");
    }

    #[test]
    fn random_lists_survive_a_round_trip() {
        let mut random = XorShift(0x9e3779b97f4a7c15);
        for _ in 0..2000 {
            let chunk = |random: &mut XorShift| {
                (0..random.below(4)).map(|_| random.segment()).collect::<Vec<Segment>>()
            };
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
            assert_eq!((bytes.len(), bytes.len() - 16), (header_len(&lists), lists.encoded_len()));
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
            // Payload and the bytes behind an RDMA_NOMSG may be missing; of the rest every byte is needed.
            let needed = match header.body {
                Body::Msg { chunks, .. } | Body::Nomsg { chunks } => header_len(&chunks.to_lists()),
                Body::Error(RdmaError::Chunk) => 20,
                _ => 28,
            };
            for length in 0..whole.len() {
                let result = decode(&whole[..length]);
                assert_eq!(result.is_ok(), length >= needed, "{length} of {header}: {result:?}");
                if let Err(error) = result {
                    assert_eq!(error.xid().is_some(), length >= 28, "{length} of {header}: {error}");
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
                    assert!(header.to_string().starts_with("RDMA_"));
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
                            let version = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
                            encode_error(&mut again, header.xid, version, header.credits, error);
                            assert!(bytes.starts_with(&again));
                        }
                        Body::Msgp | Body::Done => {}
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
            // Words that mean something make the parser go deep.
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
    fn rule_6_an_xid_that_differs_between_header_and_rpc_message_is_malformed() {
        let check = |payload: &[u32]| {
            let bytes = message(MSG, &[&[0, 0, 0], payload].concat());
            decode(&bytes).unwrap().check_xid()
        };
        assert_eq!(check(&[7, 0]), Ok(()));
        for payload in [&[8, 0][..], &[0x0700_0000], &[]] {
            let error = check(payload).unwrap_err();
            assert_eq!(error.answer(), Some((Xid(7), 1, RdmaError::Chunk)));
        }
        assert_eq!(decode(&LONG).unwrap().check_xid(), Ok(()));
    }

    #[test]
    fn rules_8_and_57_another_version_is_named_and_answered_with_its_own_version_word() {
        for version in [0, 2, u32::MAX] {
            let mut bytes = SHORT.to_vec();
            bytes[4..8].copy_from_slice(&version.to_be_bytes());
            let error = decode(&bytes).unwrap_err();
            assert_eq!(error, DecodeError::Version { xid: Xid(1), version });
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
                lists.writes.push(vec![segment(2, 2, 2)]);
            }
            if which & 4 != 0 {
                lists.reply = Some(vec![segment(3, 3, 3)]);
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
            assert_eq!((error.xid(), error.answer()), (None, None));
        }
    }

    #[test]
    fn rule_66_a_message_shorter_than_a_header_is_not_answered() {
        for proc in [0, 1, 2, 3, 5] {
            let bytes = message(proc, &[0, 0, 0]);
            for length in 0..28 {
                let error = decode(&bytes[..length]).unwrap_err();
                assert!(matches!(error, DecodeError::TooShort { length: l, .. } if l == length));
                assert_eq!((error.xid(), error.answer()), (None, None));
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
