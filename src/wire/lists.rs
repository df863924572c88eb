//! The chunk lists of a header (RFC 8166 §3.4 and §4.3), which are the same in Version One and Version Two.
//!
//! ```text
//! Read list            | Write list                 | Reply chunk
//! 1 PHLOO 1 PHLOO .. 0   1 n HLOO*n 1 m HLOO*m .. 0   0 | 1 n HLOO*n
//! ```
//!
//! Owns their syntax; leaves to the versions which lists a message of a procedure may have, and to `connection::chunks`
//! what chunks mean.
//!
//! # Invariants
//! - A [`ChunkLists`] is a validated copy-free view: iterating over it yields exactly the entries that were counted, and
//!   cannot fail.
//! - There is one encoding of the lists: encoding what was decoded gives the same bytes.
#![forbid(unsafe_code)]

use std::fmt;

use smallvec::SmallVec;

use super::{Handle, Position, ReadSegment, Reader, Segment, put};

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
    /// Lists that are all absent, except perhaps the Reply chunk.
    pub(super) const fn reply_only(reply: Option<SegmentArray<'a>>) -> ChunkLists<'a> {
        ChunkLists { reads: &[], read_count: 0, writes: &[], write_count: 0, reply }
    }

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

    /// A copy that can be changed and encoded, for a Responder to return the Write list and the Reply chunk.
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
    /// An array of one segment, as it is on the wire.
    pub(super) fn of_one(segment: &'a [u8; SEGMENT_LEN]) -> SegmentArray<'a> {
        SegmentArray { bytes: segment }
    }

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
    #[cfg(any(test, feature = "fuzz"))]
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

/// The segments of a Write chunk or a Reply chunk: nearly always one.
pub type Chunk = SmallVec<[Segment; 1]>;

/// The three lists that a sender puts into a header.
#[derive(Default, Clone, Debug, PartialEq, Eq)]
pub struct Lists {
    /// Read list; Positions are multiples of four.
    pub reads: Vec<ReadSegment>,
    /// Write list: one array per chunk.
    pub writes: Vec<Chunk>,
    /// Reply chunk.
    pub reply: Option<Chunk>,
}

impl Lists {
    /// Whether all three are absent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.reply.is_none()
    }

    /// Bytes of the three lists in a header.
    pub(super) fn encoded_len(&self) -> usize {
        let chunk = |chunk: &Chunk| 4 + chunk.len() * SEGMENT_LEN;
        let reads = self.reads.len() * (8 + SEGMENT_LEN) + 4;
        let writes = self.writes.iter().map(|c| 4 + chunk(c)).sum::<usize>() + 4;
        let reply = 4 + self.reply.as_ref().map_or(0, chunk);
        reads + writes + reply
    }

    /// Appends the three lists.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        if self.is_empty() {
            return put(out, &[0, 0, 0]);
        }
        for read in &self.reads {
            put(out, &[1, read.position.0]);
            put_segment(out, &read.target);
        }
        put(out, &[0]);
        for chunk in &self.writes {
            put(out, &[1]);
            put_array(out, chunk);
        }
        put(out, &[0]);
        match &self.reply {
            None => put(out, &[0]),
            Some(chunk) => {
                put(out, &[1]);
                put_array(out, chunk);
            }
        }
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

impl<'a> Reader<'a> {
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

    /// The three lists of a header.
    pub(super) fn chunk_lists(&mut self) -> Result<ChunkLists<'a>, &'static str> {
        let reads = self.rest;
        // All three absent, as in nearly every short message.
        if let Some(([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], rest)) = self.rest.split_first_chunk() {
            self.rest = rest;
            return Ok(ChunkLists { reads, read_count: 0, writes: reads, write_count: 0, reply: None });
        }
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

/// `HLOO`.
const SEGMENT_LEN: usize = 16;
/// Entries of a list that `Display` shows.
const SHOWN: usize = 8;
