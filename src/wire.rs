//! Bytes of RPC-over-RDMA messages, and nothing else: no state, no I/O, no allocation while decoding.
//!
//! This file holds the words that all versions share (RFC 8166 §3.4 and §4.1). `header` holds a message of any version, `lists`
//! its chunk lists, `v1` and `v2` what is specific to one version; `characteristics` the messages of Version Two's
//! transport-characteristics extension, `private_data` the RDMA-CM private data of RFC 8797. A decoder borrows the message; it
//! never trusts a count or a length of the peer before comparing it with the bytes that are there.
#![forbid(unsafe_code)]

use std::fmt;

pub mod characteristics;
pub mod header;
pub mod lists;
pub mod private_data;
pub mod v1;
pub mod v2;

/// A transaction identifier, in host order (RFC 5531 §9, RFC 8166 §4.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Xid(pub u32);

/// The name of exposed memory: `handle` on the wire, STag in iWARP, rkey in verbs (RFC 8166 §3.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u32);

/// Byte offset in the unreduced payload stream, the XID being at 0 (RFC 8166 §3.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position(pub u32);

/// A number of credits: asked for in a Call, granted in a Reply (RFC 8166 §3.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Credits(pub u32);

/// `HLOO`: exposed memory of one handle (RFC 8166 §4.1, `xdr_rdma_segment`).
#[doc(alias = "xdr_rdma_segment")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Name of the memory.
    pub handle: Handle,
    /// Bytes.
    pub length: u32,
    /// Opaque to the peer, not an address to be checked or sorted.
    pub offset: u64,
}

/// `PHLOO`: a segment of a Read chunk and where its bytes belong (RFC 8166 §4.1, `xdr_read_chunk`).
#[doc(alias = "xdr_read_chunk")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadSegment {
    /// Place in the unreduced payload; segments of one Position form one chunk.
    pub position: Position,
    /// The exposed bytes.
    pub target: Segment,
}

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}+{:#x}:{}", self.handle.0, self.offset, self.length)
    }
}

/// The unread rest of a message. Every read checks that its bytes are there.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn word(&mut self) -> Option<u32> {
        let (word, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u32::from_be_bytes(*word))
    }

    /// A counted opaque and its pad.
    fn opaque(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.word()?).ok()?;
        let (bytes, rest) = self.rest.split_at_checked(length)?;
        let (_, rest) = rest.split_at_checked(length.next_multiple_of(4) - length)?;
        self.rest = rest;
        Some(bytes)
    }
}

/// Appends words.
fn put<const N: usize>(out: &mut Vec<u8>, words: &[u32; N]) {
    out.extend_from_slice(words.map(u32::to_be_bytes).as_flattened());
}
