//! DDP (RFC 5041) and RDMAP (RFC 5040) on the wire: segment headers, the Read Request header and the Terminate message.
//!
//! Pure: no state, no I/O. Whether a header fits the state (sequence numbers, buffers, handles) is for the queue pair to
//! check; this file checks what one header can show by itself, and names every error as the RFCs do.
//!
//! Offsets count from the start of the FPDU, its length field included, because that is how the bytes lie in memory:
//! control at 2 and 3, tagged payload at 16, untagged payload at 20.
//!
//! Read first: RFC 5041 §4 and §7; RFC 5040 §4.3, §4.4 and §4.8.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

use super::mpa;

/// Offset of a tagged segment's payload in its FPDU.
pub const TAGGED: usize = 16;
/// Offset of an untagged segment's payload in its FPDU.
pub const UNTAGGED: usize = 20;
/// Bytes of a whole Read Request before pad and CRC.
pub const READ_REQUEST: usize = UNTAGGED + 28;
/// Most bytes of a Terminate that we send, before its CRC.
pub const MAX_TERMINATE: usize = UNTAGGED + 4 + 2 + 18 + 28;
/// Bytes of an FPDU that are always there and hold every segment header: no valid FPDU is shorter.
pub const ENOUGH: usize = 20;

/// Queue of Sends.
pub const SEND_QUEUE: u32 = 0;
/// Queue of Read Requests.
pub const READ_QUEUE: u32 = 1;
/// Queue of the one Terminate.
pub const TERMINATE_QUEUE: u32 = 2;

const TAGGED_BIT: u8 = 0x80;
const LAST_BIT: u8 = 0x40;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION: u8 = 1;

/// RDMAP messages (RFC 5040 §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Opcode {
    Write = 0,
    ReadRequest = 1,
    ReadResponse = 2,
    Send = 3,
    SendInvalidate = 4,
    SendSolicited = 5,
    SendSolicitedInvalidate = 6,
    Terminate = 7,
}

impl Opcode {
    fn from_bits(bits: u8) -> Option<Opcode> {
        Some(match bits {
            0 => Opcode::Write,
            1 => Opcode::ReadRequest,
            2 => Opcode::ReadResponse,
            3 => Opcode::Send,
            4 => Opcode::SendInvalidate,
            5 => Opcode::SendSolicited,
            6 => Opcode::SendSolicitedInvalidate,
            7 => Opcode::Terminate,
            _ => return None,
        })
    }

    /// Whether its segments carry an STag of the receiver.
    pub fn is_tagged(self) -> bool {
        matches!(self, Opcode::Write | Opcode::ReadResponse)
    }

    /// Whether it is a Send with Invalidate.
    pub fn invalidates(self) -> bool {
        matches!(self, Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate)
    }

    /// The queue that its segments name, if untagged.
    pub fn queue(self) -> u32 {
        match self {
            Opcode::ReadRequest => READ_QUEUE,
            Opcode::Terminate => TERMINATE_QUEUE,
            _ => SEND_QUEUE,
        }
    }
}

/// The header of one DDP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// Names its place by STag and offset.
    Tagged {
        /// Write or Read Response.
        opcode: Opcode,
        /// Last segment of its message.
        last: bool,
        /// The receiver's handle.
        stag: u32,
        /// Tagged offset of the first payload byte.
        to: u64,
    },
    /// Names its place by queue, message and offset.
    Untagged {
        /// A Send, Read Request or Terminate.
        opcode: Opcode,
        /// Last segment of its message.
        last: bool,
        /// RsvdULP: the handle to invalidate, else 0.
        invalidate: u32,
        /// Message sequence number in the opcode's queue.
        msn: u32,
        /// Offset of the first payload byte in its message.
        mo: u32,
    },
}

impl Header {
    /// Writes the header for `payload` bytes into the start of an FPDU; returns its length.
    pub fn encode(&self, payload: usize, to_bytes: &mut [u8]) -> usize {
        let length = self.len();
        to_bytes[..2].copy_from_slice(&((length - 2 + payload) as u16).to_be_bytes());
        let last_bit = |last| if last { LAST_BIT } else { 0 };
        match *self {
            Header::Tagged { opcode, last, stag, to } => {
                to_bytes[2] = TAGGED_BIT | last_bit(last) | DDP_VERSION;
                to_bytes[3] = RDMAP_VERSION << 6 | opcode as u8;
                to_bytes[4..8].copy_from_slice(&stag.to_be_bytes());
                to_bytes[8..16].copy_from_slice(&to.to_be_bytes());
            }
            Header::Untagged { opcode, last, invalidate, msn, mo } => {
                to_bytes[2] = last_bit(last) | DDP_VERSION;
                to_bytes[3] = RDMAP_VERSION << 6 | opcode as u8;
                to_bytes[4..8].copy_from_slice(&invalidate.to_be_bytes());
                to_bytes[8..12].copy_from_slice(&opcode.queue().to_be_bytes());
                to_bytes[12..16].copy_from_slice(&msn.to_be_bytes());
                to_bytes[16..20].copy_from_slice(&mo.to_be_bytes());
            }
        }
        length
    }

    /// Decodes the header at the start of an FPDU of which at least [`ENOUGH`] bytes are there. Returns it with the
    /// number of payload bytes in the segment.
    ///
    /// # Errors
    /// The first thing that is wrong with it, in the order in which the layers check it.
    pub fn decode(fpdu: &[u8; ENOUGH]) -> Result<(Header, usize), Fault> {
        let ulpdu = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
        let (ddp, rdmap) = (fpdu[2], fpdu[3]);
        let tagged = ddp & TAGGED_BIT != 0;
        let last = ddp & LAST_BIT != 0;
        // RFC 5041 §4.1: the version "MUST be set to one to indicate the version of the specification described in
        // this document." The reserved bits are not checked.
        if ddp & 0x03 != DDP_VERSION {
            return Err(if tagged { Fault::TAGGED_VERSION } else { Fault::UNTAGGED_VERSION });
        }
        let header = if tagged { TAGGED } else { UNTAGGED };
        let Some(payload) = (2 + ulpdu).checked_sub(header) else { return Err(Fault::TOO_SHORT) };
        let queue = be32(fpdu, 8);
        if !tagged && queue > TERMINATE_QUEUE {
            return Err(Fault::QUEUE);
        }
        // RFC 5040 §7.2: "The RDMA Version MUST be valid." and "The RDMA OpCode MUST be valid."
        if rdmap >> 6 != RDMAP_VERSION {
            return Err(Fault::RDMAP_VERSION);
        }
        let Some(opcode) = Opcode::from_bits(rdmap & 0x0F) else { return Err(Fault::OPCODE) };
        if opcode.is_tagged() != tagged {
            return Err(Fault::OPCODE);
        }
        if tagged {
            let to = u64::from(be32(fpdu, 8)) << 32 | u64::from(be32(fpdu, 12));
            return Ok((Header::Tagged { opcode, last, stag: be32(fpdu, 4), to }, payload));
        }
        if queue != opcode.queue() {
            return Err(Fault::QUEUE);
        }
        let header = Header::Untagged {
            opcode,
            last,
            invalidate: be32(fpdu, 4),
            msn: be32(fpdu, 12),
            mo: be32(fpdu, 16),
        };
        Ok((header, payload))
    }

    /// Its message.
    pub fn opcode(&self) -> Opcode {
        match *self {
            Header::Tagged { opcode, .. } | Header::Untagged { opcode, .. } => opcode,
        }
    }

    /// Whether this segment ends its message.
    pub fn is_last(&self) -> bool {
        match *self {
            Header::Tagged { last, .. } | Header::Untagged { last, .. } => last,
        }
    }

    /// Bytes before the payload, the length field included.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            Header::Tagged { .. } => TAGGED,
            Header::Untagged { .. } => UNTAGGED,
        }
    }
}

/// If the header is that of an FPDU that is one whole Send and nothing else: its MSN, and the bytes of its payload. `None`
/// for any other header, and for one that is wrong.
pub fn whole_send(fpdu: &[u8; ENOUGH]) -> Option<(u32, usize)> {
    let [l0, l1, kind @ .., s0, s1, s2, s3, o0, o1, o2, o3] = *fpdu;
    const { assert!(ENOUGH == UNTAGGED) };
    let payload = (2 + usize::from(u16::from_be_bytes([l0, l1]))).checked_sub(UNTAGGED)?;
    let is_one = kind == WHOLE_SEND && [o0, o1, o2, o3] == [0; 4];
    is_one.then(|| (u32::from_be_bytes([s0, s1, s2, s3]), payload))
}

/// Control fields, RsvdULP and queue number of such a Send.
const WHOLE_SEND: [u8; 10] = {
    let rdmap = RDMAP_VERSION << 6 | Opcode::Send as u8;
    [LAST_BIT | DDP_VERSION, rdmap, 0, 0, 0, 0, 0, 0, 0, SEND_QUEUE as u8]
};

/// The header of an RDMA Read Request (RFC 5040 §4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Where the requester wants the bytes: STag.
    pub sink_stag: u32,
    /// Where the requester wants the bytes: offset.
    pub sink_to: u64,
    /// Bytes wanted.
    pub size: u32,
    /// What to read: our STag.
    pub source_stag: u32,
    /// What to read: offset.
    pub source_to: u64,
}

impl ReadRequest {
    /// The 28 bytes after the untagged header.
    pub fn encode(&self) -> [u8; READ_REQUEST - UNTAGGED] {
        let mut bytes = [0; READ_REQUEST - UNTAGGED];
        bytes[..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        bytes[4..12].copy_from_slice(&self.sink_to.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.size.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        bytes[20..].copy_from_slice(&self.source_to.to_be_bytes());
        bytes
    }

    /// Decodes the 28 bytes after the untagged header; `None` when there are more or fewer.
    pub fn decode(bytes: &[u8]) -> Option<ReadRequest> {
        if bytes.len() != READ_REQUEST - UNTAGGED {
            return None;
        }
        let be64 = |at| u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4));
        Some(ReadRequest {
            sink_stag: be32(bytes, 0),
            sink_to: be64(4),
            size: be32(bytes, 12),
            source_stag: be32(bytes, 16),
            source_to: be64(20),
        })
    }
}

/// An error as a Terminate message names it: layer, error type, error code (RFC 5040 §4.8, RFC 5041 §7.2,
/// RFC 5044 §8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// 0 RDMAP, 1 DDP, 2 the layer below (MPA).
    pub layer: u8,
    /// Error type within the layer.
    pub kind: u8,
    /// Error code within the type.
    pub code: u8,
}

#[allow(missing_docs)]
impl Fault {
    pub const LOCAL: Fault = Fault::new(0, 0, 0);
    pub const READ_STAG: Fault = Fault::new(0, 1, 0);
    pub const READ_BOUNDS: Fault = Fault::new(0, 1, 1);
    pub const READ_RIGHTS: Fault = Fault::new(0, 1, 2);
    pub const READ_WRAP: Fault = Fault::new(0, 1, 4);
    pub const CANNOT_INVALIDATE: Fault = Fault::new(0, 1, 9);
    pub const RDMAP_VERSION: Fault = Fault::new(0, 2, 5);
    pub const OPCODE: Fault = Fault::new(0, 2, 6);
    /// Neither DDP nor RDMAP has a code for a segment shorter than its own header or a malformed Read Request.
    pub const TOO_SHORT: Fault = Fault::new(0, 2, 7);
    pub const UNSPECIFIED: Fault = Fault::new(0, 2, 0xFF);
    pub const STAG: Fault = Fault::new(1, 1, 0);
    pub const BOUNDS: Fault = Fault::new(1, 1, 1);
    pub const WRAP: Fault = Fault::new(1, 1, 3);
    pub const TAGGED_VERSION: Fault = Fault::new(1, 1, 4);
    pub const QUEUE: Fault = Fault::new(1, 2, 1);
    pub const NO_BUFFER: Fault = Fault::new(1, 2, 2);
    pub const MSN: Fault = Fault::new(1, 2, 3);
    pub const OFFSET: Fault = Fault::new(1, 2, 4);
    pub const TOO_LONG: Fault = Fault::new(1, 2, 5);
    pub const UNTAGGED_VERSION: Fault = Fault::new(1, 2, 6);
    pub const CRC: Fault = Fault::new(2, 0, 2);
    pub const INSUFFICIENT_IRD: Fault = Fault::new(2, 0, 6);

    const fn new(layer: u8, kind: u8, code: u8) -> Fault {
        Fault { layer, kind, code }
    }

    /// The name of the error in the RFCs; `None` if they have none.
    pub fn name(&self) -> Option<&'static str> {
        Some(match (self.layer, self.kind, self.code) {
            (0, 0, _) => "RDMAP local catastrophic error",
            (0, 1, 0x00) => "remote protection error: invalid STag",
            (0, 1, 0x01) => "remote protection error: base or bounds violation",
            (0, 1, 0x02) => "remote protection error: access rights violation",
            (0, 1, 0x03) => "remote protection error: STag not associated with RDMAP stream",
            (0, 1, 0x04) => "remote protection error: TO wrap",
            (0, 1, 0x09) => "remote protection error: STag cannot be invalidated",
            (0, 1, 0xFF) => "remote protection error: unspecified",
            (0, 2, 0x05) => "remote operation error: invalid RDMAP version",
            (0, 2, 0x06) => "remote operation error: unexpected opcode",
            (0, 2, 0x07) => "remote operation error: catastrophic error of the RDMAP stream",
            (0, 2, 0x08) => "remote operation error: catastrophic error, global",
            (0, 2, 0x09) => "remote operation error: STag cannot be invalidated",
            (0, 2, 0xFF) => "remote operation error: unspecified",
            (1, 0, _) => "DDP local catastrophic error",
            (1, 1, 0x00) => "tagged buffer error: invalid STag",
            (1, 1, 0x01) => "tagged buffer error: base or bounds violation",
            (1, 1, 0x02) => "tagged buffer error: STag not associated with DDP stream",
            (1, 1, 0x03) => "tagged buffer error: TO wrap",
            (1, 1, 0x04) => "tagged buffer error: invalid DDP version",
            (1, 2, 0x01) => "untagged buffer error: invalid queue number",
            (1, 2, 0x02) => "untagged buffer error: invalid MSN, no buffer available",
            (1, 2, 0x03) => "untagged buffer error: invalid MSN, out of range",
            (1, 2, 0x04) => "untagged buffer error: invalid message offset",
            (1, 2, 0x05) => "untagged buffer error: message too long for its buffer",
            (1, 2, 0x06) => "untagged buffer error: invalid DDP version",
            (2, 0, 0x01) => "MPA error: TCP connection lost",
            (2, 0, 0x02) => "MPA error: CRC mismatch",
            (2, 0, 0x03) => "MPA error: marker and length field disagree",
            (2, 0, 0x04) => "MPA error: invalid startup frame",
            (2, 0, 0x05) => "MPA error: local catastrophic error",
            (2, 0, 0x06) => "MPA error: insufficient IRD resources",
            (2, 0, 0x07) => "MPA error: no matching RTR option",
            _ => return None,
        })
    }

    /// Encodes a Terminate for this error, without CRC, into `fpdu`; returns the bytes used (pad included). `cause`
    /// is the start of the FPDU that caused it, as much as was there.
    pub fn encode_terminate(&self, cause: Option<&[u8]>, fpdu: &mut [u8; MAX_TERMINATE]) -> usize {
        *fpdu = [0; MAX_TERMINATE];
        let header = Header::Untagged { opcode: Opcode::Terminate, last: true, invalidate: 0, msn: 1, mo: 0 };
        let mut at = UNTAGGED;
        fpdu[at] = self.layer << 4 | self.kind;
        fpdu[at + 1] = self.code;
        at += 4;
        // RFC 5040 §4.8, figure 10: which headers go with which error.
        let with_headers = match (self.layer, self.kind) {
            (0 | 1, 0) | (2.., _) => None,
            _ => cause,
        };
        if let Some(cause) = with_headers.filter(|c| c.len() >= UNTAGGED) {
            let tagged = cause[2] & TAGGED_BIT != 0;
            let ddp = if tagged { &cause[2..TAGGED] } else { &cause[2..UNTAGGED] };
            fpdu[UNTAGGED + 2] = 0x80 | 0x40;
            fpdu[at..at + 2].copy_from_slice(&cause[..2]);
            at += 2;
            fpdu[at..at + ddp.len()].copy_from_slice(ddp);
            at += ddp.len();
            // "The Terminated RDMA Header is only sent back if the terminate is associated with an RDMA Read Request
            // Message."
            let request = cause.get(UNTAGGED..READ_REQUEST);
            if let Some(request) = request.filter(|_| {
                !tagged && (self.layer, self.kind) == (0, 1) && cause[3] & 0x0F == Opcode::ReadRequest as u8
            }) {
                fpdu[UNTAGGED + 2] |= 0x20;
                fpdu[at..at + request.len()].copy_from_slice(request);
                at += request.len();
            }
        }
        header.encode(at - UNTAGGED, fpdu);
        at + mpa::pad_len(at - 2)
    }

    /// Reads the error out of a received Terminate, given the bytes after its untagged header.
    ///
    /// The siw driver on little-endian machines swaps the two nibbles of the first byte, so the text gives both
    /// readings where both mean something.
    pub fn decode_terminate(bytes: &[u8]) -> Option<(Fault, Cow<'static, str>)> {
        let [first, code, ..] = *bytes else { return None };
        let fault = Fault::new(first >> 4, first & 0x0F, code);
        let swapped = Fault::new(first & 0x0F, first >> 4, code);
        let text = match (fault.name(), swapped.name()) {
            (Some(_), Some(_)) if fault != swapped => {
                Cow::Owned(format!("{fault}, or in siw's nibble order {swapped}"))
            }
            (None, Some(_)) => Cow::Owned(format!("{swapped}, in siw's nibble order")),
            _ => Cow::Owned(fault.to_string()),
        };
        Some((fault, text))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name().unwrap_or("unknown error");
        write!(f, "{name} ({:x}/{:x}/{:02x})", self.layer, self.kind, self.code)
    }
}

/// A big-endian word; the caller has checked that it is there.
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    /// The whole FPDU of a header and what follows it.
    fn fpdu(header: Header, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; ENOUGH];
        let n = header.encode(rest.len(), &mut bytes);
        bytes.truncate(n);
        bytes.extend_from_slice(rest);
        bytes.resize(bytes.len() + mpa::pad_len(bytes.len() - 2), 0);
        let crc = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&mpa::crc_word(Some(crc)));
        bytes
    }

    fn send(opcode: Opcode, invalidate: u32, msn: u32) -> Header {
        Header::Untagged { opcode, last: true, invalidate, msn, mo: 0 }
    }

    fn check(bytes: &[u8], header: Header, rest: &[u8]) {
        assert_eq!(fpdu(header, rest), bytes);
        let head = bytes.first_chunk().unwrap();
        assert_eq!(Header::decode(head).unwrap(), (header, rest.len()));
    }

    #[test]
    fn the_vectors_are_encoded_and_decoded_byte_for_byte() {
        check(
            &hex!("0017 4143 00000000 00000000 00000001 00000000 0102030405 000000 16053efb"),
            send(Opcode::Send, 0, 1),
            &[1, 2, 3, 4, 5],
        );
        check(
            &hex!("0016 4144 12345678 00000000 00000002 00000000 61626364 ea5e61fb"),
            send(Opcode::SendInvalidate, 0x1234_5678, 2),
            b"abcd",
        );
        check(
            &hex!("0012 c140 12345678 0000000000001000 5758595a c3f72578"),
            Header::Tagged { opcode: Opcode::Write, last: true, stag: 0x1234_5678, to: 0x1000 },
            b"WXYZ",
        );
        check(
            &hex!("000e c140 00000001 0000000000000000 ebd34c5f"),
            Header::Tagged { opcode: Opcode::Write, last: true, stag: 1, to: 0 },
            b"",
        );
        let request = ReadRequest {
            sink_stag: 0xAABB_CC00,
            sink_to: 0x2000,
            size: 4096,
            source_stag: 0x1122_3300,
            source_to: 0x3000,
        };
        check(
            &hex!(
                "002e 4141 00000000 00000001 00000001 00000000 aabbcc00 0000000000002000 00001000 11223300"
                "0000000000003000 7f768c49"
            ),
            send(Opcode::ReadRequest, 0, 1),
            &request.encode(),
        );
        assert_eq!(ReadRequest::decode(&request.encode()), Some(request));
    }

    #[test]
    fn the_crc_vectors_of_rfc_5044_hold() {
        let start = hex!("002a 4143 00000000 00000000 00000001 00000000");
        let zeros = [0; 24];
        let crc = |parts: &[&[u8]]| mpa::crc_word(Some(crc32c::crc32c(&parts.concat())));
        assert_eq!(crc(&[&[0; 4], &start, &zeros]), hex!("52239983"));
        let start2 = hex!("002a 4143 00000000 00000000 00000002 00000000");
        assert_eq!(crc(&[&start2, &hex!("00000014"), &zeros]), hex!("84925898"));
        assert_eq!(crc(&[&start, &zeros]), hex!("b7243ec3"));
        assert_eq!(crc32c::crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(mpa::crc_word(None), [0; 4]);
    }

    #[test]
    fn a_terminate_without_headers_is_the_vector() {
        let mut bytes = [0; MAX_TERMINATE];
        let n = Fault::CRC.encode_terminate(Some(&[0xFF; 48]), &mut bytes);
        assert_eq!(bytes[..n], hex!("0016 4147 00000000 00000002 00000001 00000000 20020000"));
        assert_eq!(mpa::crc_word(Some(crc32c::crc32c(&bytes[..n]))), hex!("7fe42585"));
        assert_eq!(Fault::decode_terminate(&bytes[UNTAGGED..n]).unwrap().0, Fault::CRC);
    }

    #[test]
    fn a_terminate_carries_the_headers_that_its_error_asks_for() {
        let request = fpdu(send(Opcode::ReadRequest, 0, 3), &[0x5A; 28]);
        let write = fpdu(Header::Tagged { opcode: Opcode::Write, last: true, stag: 9, to: 8 }, b"1234");
        let mut bytes = [0; MAX_TERMINATE];
        // Remote protection: segment length, DDP header and Read Request header.
        let n = Fault::READ_STAG.encode_terminate(Some(&request), &mut bytes);
        assert_eq!(bytes[20..26], hex!("01 00 e0 00 002e"));
        assert_eq!((&bytes[26..44], &bytes[44..72], n), (&request[2..20], &request[20..48], 72));
        // For another message: no RDMAP header.
        let n = Fault::BOUNDS.encode_terminate(Some(&write), &mut bytes);
        assert_eq!(bytes[20..26], hex!("11 01 c0 00 0012"));
        assert_eq!((&bytes[26..40], n), (&write[2..16], 40));
        // A DDP error of a Read Request: the DDP header only.
        let n = Fault::MSN.encode_terminate(Some(&request), &mut bytes);
        assert_eq!((bytes[22], n), (0xC0, 44));
        // A local error: no headers. Nor are there any when too little of the FPDU was there.
        assert_eq!(Fault::LOCAL.encode_terminate(Some(&request), &mut bytes), 24);
        assert_eq!(Fault::OPCODE.encode_terminate(Some(&request[..10]), &mut bytes), 24);
        let (header, length) = Header::decode(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!((header, length), (send(Opcode::Terminate, 0, 1), 4));
    }

    #[test]
    fn siws_swapped_nibbles_are_read_both_ways() {
        let text = |first, code| Fault::decode_terminate(&[first, code, 0, 0]).unwrap().1.into_owned();
        assert_eq!(text(0x20, 2), "MPA error: CRC mismatch (2/0/02)");
        // siw's CRC error: layer 2 in the low nibble. As written it names nothing.
        assert_eq!(text(0x02, 2), "MPA error: CRC mismatch (2/0/02), in siw's nibble order");
        let both = text(0x20, 6);
        assert!(both.contains("insufficient IRD") && both.contains("unexpected opcode"), "{both}");
        assert_eq!(text(0x11, 0), "tagged buffer error: invalid STag (1/1/00)");
        assert_eq!(text(0x77, 7), "unknown error (7/7/07)");
        assert_eq!(Fault::decode_terminate(&[1]), None);
    }

    #[test]
    fn each_wrong_field_is_named_by_its_own_error() {
        let untagged = fpdu(send(Opcode::Send, 0, 1), b"abcd");
        let tagged = fpdu(Header::Tagged { opcode: Opcode::Write, last: true, stag: 9, to: 8 }, b"1234");
        let with = |fpdu: &[u8], at: usize, value: u8| {
            let mut bytes: [u8; ENOUGH] = *fpdu.first_chunk().unwrap();
            bytes[at] = value;
            Header::decode(&bytes).map(|_| ()).unwrap_err()
        };
        assert_eq!(with(&tagged, 2, 0xC0), Fault::TAGGED_VERSION);
        assert_eq!(with(&tagged, 2, 0xC2), Fault::TAGGED_VERSION);
        assert_eq!(with(&untagged, 2, 0x43), Fault::UNTAGGED_VERSION);
        assert_eq!(with(&tagged, 3, 0x00), Fault::RDMAP_VERSION);
        assert_eq!(with(&untagged, 3, 0x83), Fault::RDMAP_VERSION);
        for opcode in 8..16 {
            assert_eq!(with(&untagged, 3, 0x40 | opcode), Fault::OPCODE);
        }
        for opcode in [0, 2] {
            assert_eq!(with(&untagged, 3, 0x40 | opcode), Fault::OPCODE, "tagged opcode, untagged header");
        }
        for opcode in [1, 3, 4, 5, 6, 7] {
            assert_eq!(with(&tagged, 3, 0x40 | opcode), Fault::OPCODE, "untagged opcode, tagged header");
        }
        for queue in 1..=4 {
            assert_eq!(with(&untagged, 11, queue), Fault::QUEUE);
        }
        assert_eq!(with(&untagged, 1, 17), Fault::TOO_SHORT);
        assert_eq!(with(&tagged, 1, 13), Fault::TOO_SHORT);
        // Reserved bits are not checked (RFC 5041 §4.1, RFC 5040 §4.1).
        let mut bytes: [u8; ENOUGH] = *untagged.first_chunk().unwrap();
        (bytes[2], bytes[3]) = (0x7D, 0x73);
        assert_eq!(Header::decode(&bytes).unwrap(), (send(Opcode::Send, 0, 1), 4));
    }

    #[test]
    fn no_header_makes_the_decoder_panic() {
        let mut state = 1u64;
        for _ in 0..200_000 {
            let mut bytes = [0; ENOUGH];
            for byte in &mut bytes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = (state >> 33) as u8;
            }
            // Mostly right control bytes, so that the deeper checks are reached.
            (bytes[2], bytes[3]) = (bytes[2] & 0xC0 | 1, bytes[3] & 7 | 0x40);
            if let Ok((header, payload)) = Header::decode(&bytes) {
                let ulpdu = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
                assert_eq!(header.len() + payload, 2 + ulpdu);
            }
        }
    }
}
