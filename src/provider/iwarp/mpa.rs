//! MPA (RFC 5044 with RFC 6581): startup frames, the terms that they agree on, and the frame around every segment.
//!
//! Pure: bytes in, bytes out. The queue pair moves the bytes; `ddp` handles what is inside a ULPDU.
//!
//! An FPDU is `length(2) | ULPDU | pad | CRC32C(4)`, a multiple of four bytes. The CRC word is the only one in iWARP that
//! is sent low byte first.
//!
//! # Left out
//! Sending markers. RFC 5044 §4.3 asks every sender to be able to; the Linux siw driver cannot, known adapters leave them
//! off, and nothing here could test it. A peer that asks for them in a Request gets a Reply with R=1 (as from siw); if a
//! peer asks for them in its Reply, we leave. We never ask for markers ourselves, so none has to be removed.
//!
//! Read first: RFC 5044 §4, §7.1; RFC 6581 §6, §9.
#![forbid(unsafe_code)]

use crate::error::{Error, Kind};

/// Bytes of a startup frame before its private data.
pub const START_HEADER: usize = 20;
/// Most private data that a startup frame may carry, the enhanced part included.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Bytes of the enhanced part of the private data (RFC 6581 §9).
pub const ENHANCED: usize = 4;
/// IRD or ORD value that asks to leave the setting alone.
pub const NOT_NEGOTIATED: u16 = 0x3FFF;
/// Most Reads that we serve at a time, whatever a peer asks for; siw has the same limit.
pub const MAX_DEPTH: u16 = 128;
/// Smallest and largest ULPDU that a sender may be limited to.
///
/// RFC 5044 §4.1: "The range of MULPDU values MUST be between 128 octets and 64768 octets, inclusive."
const MULPDU: std::ops::RangeInclusive<usize> = 128..=64768;

const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";
const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED_FLAG: u8 = 0x10;

/// Which of the two startup frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// MPA Request Frame, sent by the initiator.
    Request,
    /// MPA Reply Frame, sent by the responder.
    Reply,
}

/// A startup frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartFrame {
    /// Request or Reply.
    pub which: Which,
    /// M: the sender wants markers in what it receives.
    pub markers: bool,
    /// C: the sender wants CRCs.
    pub crc: bool,
    /// R: the responder refuses.
    pub reject: bool,
    /// Revision of MPA.
    pub revision: u8,
    /// S: the private data begins with connection data of RFC 6581.
    pub enhanced: Option<Enhanced>,
    /// The upper layer's share of the private data.
    pub private_data: Vec<u8>,
}

/// Connection data of RFC 6581 §9.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enhanced {
    /// A: the peer-to-peer model, in which the initiator sends an RTR message first.
    pub peer_to_peer: bool,
    /// B: a zero-length Send may be the RTR.
    pub rtr_send: bool,
    /// C: a zero-length RDMA Write may be the RTR.
    pub rtr_write: bool,
    /// D: a zero-length RDMA Read may be the RTR.
    pub rtr_read: bool,
    /// Reads that the sender of the frame serves at a time.
    pub ird: u16,
    /// Reads that the sender of the frame has outstanding at most.
    pub ord: u16,
}

/// What one end brings to the negotiation.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Whether we want CRCs.
    pub crc: bool,
    /// Reads that we serve at a time.
    pub ird: u16,
    /// Reads that we want outstanding at a time.
    pub ord: u16,
}

/// What both ends have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Whether CRCs are generated and checked, in both directions.
    pub crc: bool,
    /// Reads that we serve at a time.
    pub ird: u16,
    /// Reads that we have outstanding at most.
    pub ord: u16,
}

/// Why an initiator cannot accept a Reply.
#[derive(Debug)]
pub enum Refusal {
    /// Leave without a word: the Reply is a reject or malformed.
    Leave(Error),
    /// Tell the peer that it wants more Reads than we serve (Terminate 2/0/6), then close.
    InsufficientIrd(Error),
}

impl StartFrame {
    /// The frame's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut flags = 0;
        flags |= if self.markers { MARKERS } else { 0 };
        flags |= if self.crc { CRC } else { 0 };
        flags |= if self.reject { REJECT } else { 0 };
        flags |= if self.enhanced.is_some() { ENHANCED_FLAG } else { 0 };
        let enhanced = self.enhanced.map(|e| e.encode());
        let enhanced = enhanced.as_ref().map_or(&[][..], |e| &e[..]);
        let length = enhanced.len() + self.private_data.len();
        let mut bytes = Vec::with_capacity(START_HEADER + length);
        bytes.extend_from_slice(match self.which {
            Which::Request => REQUEST_KEY,
            Which::Reply => REPLY_KEY,
        });
        bytes.push(flags);
        bytes.push(self.revision);
        bytes.extend_from_slice(&(length as u16).to_be_bytes());
        bytes.extend_from_slice(enhanced);
        bytes.extend_from_slice(&self.private_data);
        bytes
    }

    /// Decodes the frame at the start of `bytes`: the frame and its length, or `None` while it is incomplete.
    ///
    /// # Errors
    /// Kind `Protocol` as soon as the bytes cannot become the expected frame.
    pub fn decode(bytes: &[u8], expected: Which) -> Result<Option<(StartFrame, usize)>, Error> {
        let (key, other) = match expected {
            Which::Request => (REQUEST_KEY, REPLY_KEY),
            Which::Reply => (REPLY_KEY, REQUEST_KEY),
        };
        let seen = bytes.len().min(key.len());
        // RFC 5044 §7.1.2: "If a received "Key" does not match the expected value (see Section 7.1.1, MPA Request
        // and Reply Frame Format) the TCP/DDP connection MUST be closed, and an error returned to the ULP."
        if bytes[..seen] != key[..seen] {
            return Err(protocol(if seen == other.len() && bytes[..seen] == other[..] {
                "MPA: the peer started in the same role as we did"
            } else {
                "MPA: the peer does not speak MPA"
            }));
        }
        let Some(header) = bytes.get(..START_HEADER) else { return Ok(None) };
        let (flags, revision) = (header[16], header[17]);
        let length = usize::from(u16::from_be_bytes([header[18], header[19]]));
        // RFC 5044 §7.1.1: "If the MPA receiver cannot interoperate with the received version, then it MUST close
        // the connection and report an error locally."
        if !matches!(revision, 1 | 2) {
            return Err(protocol(format!("MPA: revision {revision} is not supported")));
        }
        // RFC 5044 §7.1.2: "the amount of Private Data MUST not exceed the PD_Length or the application buffer."
        if length > MAX_PRIVATE_DATA {
            return Err(protocol(format!("MPA: {length} bytes of private data, more than 512")));
        }
        // In revision 1 the S bit is reserved: "set to zero when sending, and not checked on reception".
        let enhanced = revision >= 2 && flags & ENHANCED_FLAG != 0;
        if enhanced && length < ENHANCED {
            return Err(protocol("MPA: S is set, but the private data has no room for IRD and ORD"));
        }
        let total = START_HEADER + length;
        let Some(data) = bytes.get(START_HEADER..total) else { return Ok(None) };
        let (enhanced, private_data) = match data.split_first_chunk::<ENHANCED>() {
            Some((words, rest)) if enhanced => (Some(Enhanced::decode(*words)), rest),
            _ => (None, data),
        };
        let frame = StartFrame {
            which: expected,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            // RFC 5044 §7.1.1: R "is set to zero, and not checked on reception in the MPA Request Frame."
            reject: expected == Which::Reply && flags & REJECT != 0,
            revision,
            enhanced,
            private_data: private_data.to_vec(),
        };
        Ok(Some((frame, total)))
    }

    /// The Request of an initiator: client-server model, no markers.
    pub fn request(offer: &Offer, revision: u8, private_data: &[u8]) -> StartFrame {
        StartFrame {
            which: Which::Request,
            markers: false,
            crc: offer.crc,
            reject: false,
            revision,
            // RFC 6581 §9.2: "If Control Flag A is set to 0, then Control Flags B, C, and D MUST also be set to 0."
            enhanced: (revision >= 2).then_some(Enhanced {
                ird: offer.ird,
                ord: offer.ord,
                ..Enhanced::default()
            }),
            private_data: private_data.to_vec(),
        }
    }

    /// A responder's answer to this Request, and the terms under which it works. The Reply has `reject` set when the peer
    /// asks for what we do not have.
    pub fn answer(&self, offer: &Offer, private_data: &[u8]) -> (StartFrame, Terms) {
        let mut terms = Terms {
            // RFC 5044 §7.1.1: "When this bit is '1' in either the MPA Request Frame or MPA Reply Frame, CRCs MUST
            // be generated and checked by both endpoints."
            crc: self.crc || offer.crc,
            ird: offer.ird,
            ord: offer.ord,
        };
        // RFC 6581 §10: "If the responder receives an enhanced MPA message, it MUST respond with an enhanced MPA
        // message." and "If the responder receives an unenhanced MPA message ('S' is set to 0), it MUST respond
        // with an unenhanced MPA message."
        let enhanced = self.enhanced.map(|theirs| {
            let mut ours = Enhanced::default();
            // RFC 6581 §9.2: "If Control Flag A is 1 in the MPA Request message, then the responder MUST set Control
            // Flag A to 1 in the MPA reply message." A Send is not offered as RTR: it would use up a Receive.
            if theirs.peer_to_peer {
                (ours.peer_to_peer, ours.rtr_write, ours.rtr_read) = (true, true, true);
                // Adapters that offer only the Read RTR would otherwise ask for no Reads.
                terms.ird = terms.ird.max(1);
            }
            if theirs.ord == NOT_NEGOTIATED {
                // RFC 6581 §9.1: "The responder MUST respond to an initiator ORD value of 0x3FFF by leaving its
                // local endpoint IRD value unchanged and setting the IRD to 0x3FFF in its reply message."
                ours.ird = NOT_NEGOTIATED;
            } else {
                terms.ird = terms.ird.max(theirs.ord.min(MAX_DEPTH));
                ours.ird = terms.ird;
            }
            if theirs.ird == NOT_NEGOTIATED {
                ours.ord = NOT_NEGOTIATED;
            } else {
                // RFC 6581 §9.1: "The responder MUST set its ORD at most to the initiator IRD."
                terms.ord = terms.ord.min(theirs.ird);
                ours.ord = terms.ord;
            }
            ours
        });
        let reply = StartFrame {
            which: Which::Reply,
            markers: false,
            crc: terms.crc,
            reject: self.markers,
            revision: self.revision,
            enhanced,
            private_data: private_data.to_vec(),
        };
        (reply, terms)
    }

    /// An initiator's terms after this Reply to a Request that was made from `offer`.
    ///
    /// # Errors
    /// A [`Refusal`] when there can be no connection.
    pub fn accept(&self, offer: &Offer, revision: u8) -> Result<Terms, Refusal> {
        if self.reject {
            return Err(Refusal::Leave(Error::new(
                Kind::Peer,
                "MPA: the peer rejected the connection (Reply with R=1)",
            )));
        }
        if self.markers {
            return Err(Refusal::Leave(protocol("MPA: the peer wants markers, which are not implemented")));
        }
        let mut terms = Terms { crc: self.crc || offer.crc, ird: offer.ird, ord: offer.ord };
        match self.enhanced {
            None if revision >= 2 => {
                return Err(Refusal::Leave(protocol("MPA: a plain Reply to an enhanced Request")));
            }
            Some(_) if revision < 2 => {
                return Err(Refusal::Leave(protocol("MPA: an enhanced Reply to a plain Request")));
            }
            None => {}
            Some(theirs) => {
                // RFC 6581 §9.1: "The initiator MUST leave its local endpoint ORD value unchanged upon receiving a
                // responder IRD value of 0x3FFF."
                if theirs.ird != NOT_NEGOTIATED {
                    terms.ord = terms.ord.min(theirs.ird);
                }
                if theirs.ord != NOT_NEGOTIATED && theirs.ord > terms.ird {
                    // RFC 6581 §9.1: "If the initiator does not have sufficient resources for the required IRD, it
                    // MUST send a TERM message to the responder indicating insufficient resources and terminate the
                    // connection due to insufficient resources."
                    return Err(Refusal::InsufficientIrd(protocol(format!(
                        "MPA: the peer wants {} Reads at a time, we serve {}",
                        theirs.ord, terms.ird
                    ))));
                }
            }
        }
        Ok(terms)
    }
}

impl Enhanced {
    fn encode(self) -> [u8; ENHANCED] {
        let bit = |on: bool, at: u32| if on { 1u32 << at } else { 0 };
        let word = bit(self.peer_to_peer, 31)
            | bit(self.rtr_send, 30)
            | u32::from(self.ird & NOT_NEGOTIATED) << 16
            | bit(self.rtr_write, 15)
            | bit(self.rtr_read, 14)
            | u32::from(self.ord & NOT_NEGOTIATED);
        word.to_be_bytes()
    }

    fn decode(bytes: [u8; ENHANCED]) -> Enhanced {
        let word = u32::from_be_bytes(bytes);
        let peer_to_peer = word >> 31 & 1 == 1;
        Enhanced {
            peer_to_peer,
            // RFC 6581 §9.2: "On reception, if Control Flag A is set to 0, then Control Flags B, C, and D MUST be
            // ignored."
            rtr_send: peer_to_peer && word >> 30 & 1 == 1,
            rtr_write: peer_to_peer && word >> 15 & 1 == 1,
            rtr_read: peer_to_peer && word >> 14 & 1 == 1,
            ird: (word >> 16) as u16 & NOT_NEGOTIATED,
            ord: word as u16 & NOT_NEGOTIATED,
        }
    }
}

/// Pad bytes after a ULPDU of `ulpdu` bytes.
pub const fn pad_len(ulpdu: usize) -> usize {
    (4 - (2 + ulpdu) % 4) % 4
}

/// Bytes of the whole FPDU around a ULPDU of `ulpdu` bytes.
pub const fn fpdu_len(ulpdu: usize) -> usize {
    2 + ulpdu + pad_len(ulpdu) + 4
}

/// Largest ULPDU whose FPDU fits one TCP segment of `mss` bytes, without markers.
pub fn mulpdu(mss: usize) -> usize {
    mss.saturating_sub(6 + mss % 4).clamp(*MULPDU.start(), *MULPDU.end())
}

/// The CRC word of an FPDU. When CRCs are off, it is present and zero.
pub fn crc_word(crc: Option<u32>) -> [u8; 4] {
    crc.unwrap_or(0).to_le_bytes()
}

fn protocol(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::Protocol, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    const EXAMPLE: [u8; 32] =
        hex!("4d504120494420526571204672616d65 50 02 000c 0010 0000 f6ab0e18 01 01 03 03");

    fn offer() -> Offer {
        Offer { crc: true, ird: 16, ord: 16 }
    }

    fn enhanced_request(word: u32) -> StartFrame {
        let mut frame = StartFrame::request(&offer(), 2, b"");
        frame.enhanced = Some(Enhanced::decode(word.to_be_bytes()));
        frame
    }

    #[test]
    fn the_example_request_is_encoded_and_decoded_byte_for_byte() {
        let private_data = hex!("f6ab0e18 01 01 03 03");
        let frame = StartFrame::request(&Offer { crc: true, ird: 16, ord: 0 }, 2, &private_data);
        assert_eq!(frame.encode(), EXAMPLE);
        assert_eq!(StartFrame::decode(&EXAMPLE, Which::Request).unwrap(), Some((frame, 32)));
    }

    #[test]
    fn a_truncated_frame_is_incomplete_and_never_an_error() {
        for n in 0..EXAMPLE.len() {
            assert_eq!(StartFrame::decode(&EXAMPLE[..n], Which::Request).unwrap(), None, "{n} bytes");
        }
    }

    #[test]
    fn every_flipped_bit_gives_a_frame_or_an_error() {
        let mut errors = 0;
        for bit in 0..EXAMPLE.len() * 8 {
            let mut bytes = EXAMPLE;
            bytes[bit / 8] ^= 1 << (bit % 8);
            match StartFrame::decode(&bytes, Which::Request) {
                Err(e) => {
                    assert_eq!(e.kind(), Kind::Protocol);
                    errors += 1;
                }
                // A longer PD_Length waits for more; anything else decodes and encodes to itself, except for bits that a
                // receiver must not check (reserved, R of a Request, B, C and D without A).
                Ok(None) => assert!((18 * 8..20 * 8).contains(&bit)),
                Ok(Some((frame, n))) => assert_eq!(frame.encode().len(), n),
            }
        }
        // 128 key bits; every revision but 1 and 2 (three, in fact: 2^1 = 0 is one of the eight); PD_Length.
        assert!(errors >= 128 + 8, "{errors}");
    }

    #[test]
    fn the_wrong_key_is_refused_at_its_first_byte_and_names_the_role() {
        assert!(StartFrame::decode(b"G", Which::Request).is_err());
        assert!(StartFrame::decode(b"MPA ID Rex", Which::Reply).is_err());
        let e = StartFrame::decode(&EXAMPLE, Which::Reply).unwrap_err();
        assert!(e.text().contains("same role"), "{e}");
    }

    #[test]
    fn private_data_of_512_bytes_is_taken_and_of_513_refused() {
        let mut frame = StartFrame::request(&offer(), 2, &[7; 508]);
        let bytes = frame.encode();
        assert_eq!(StartFrame::decode(&bytes, Which::Request).unwrap(), Some((frame.clone(), 532)));
        frame.private_data.push(7);
        assert!(StartFrame::decode(&frame.encode(), Which::Request).is_err());
    }

    #[test]
    fn revision_one_has_no_enhanced_part_even_with_the_s_bit() {
        let mut bytes = EXAMPLE;
        bytes[17] = 1;
        let (frame, _) = StartFrame::decode(&bytes, Which::Request).unwrap().unwrap();
        assert_eq!((frame.enhanced, frame.private_data.len()), (None, 12));
        let (reply, terms) = frame.answer(&offer(), b"x");
        assert_eq!((reply.revision, reply.enhanced, terms.ird, terms.ord), (1, None, 16, 16));
    }

    #[test]
    fn an_enhanced_request_without_room_for_its_words_is_refused() {
        let mut bytes = EXAMPLE;
        bytes[19] = 3;
        assert!(StartFrame::decode(&bytes, Which::Request).is_err());
    }

    #[test]
    fn the_responder_fits_its_depths_to_the_request() {
        // IRD 4, ORD 64: we may have 4 outstanding and serve 64.
        let (reply, terms) = enhanced_request(4 << 16 | 64).answer(&offer(), b"");
        assert_eq!((terms.ird, terms.ord), (64, 4));
        assert_eq!(reply.enhanced.unwrap(), Enhanced { ird: 64, ord: 4, ..Enhanced::default() });
        // An absurd ORD is cut to the most that we ever serve.
        let (_, terms) = enhanced_request(0x3FFE).answer(&offer(), b"");
        assert_eq!((terms.ird, terms.ord), (MAX_DEPTH, 0));
        // Not negotiated: our values stay, and the words are mirrored.
        let (reply, terms) = enhanced_request(0x3FFF_3FFF).answer(&offer(), b"");
        assert_eq!((terms.ird, terms.ord), (16, 16));
        let enhanced = reply.enhanced.unwrap();
        assert_eq!((enhanced.ird, enhanced.ord), (NOT_NEGOTIATED, NOT_NEGOTIATED));
    }

    #[test]
    fn a_peer_to_peer_request_is_answered_with_write_and_read_rtr_and_room_for_the_read() {
        let none = Offer { crc: true, ird: 0, ord: 0 };
        let (reply, terms) = enhanced_request(0x8000_4000).answer(&none, b"");
        assert_eq!(reply.encode()[20..], hex!("8001 c000"));
        assert_eq!(terms.ird, 1);
        // Without A the other flags mean nothing.
        let (reply, _) = enhanced_request(0x4000_C000).answer(&none, b"");
        assert_eq!(reply.encode()[20..], hex!("0000 0000"));
    }

    #[test]
    fn crc_is_on_when_either_side_wants_it() {
        for (theirs, ours) in [(false, false), (false, true), (true, false), (true, true)] {
            let request = StartFrame::request(&Offer { crc: theirs, ..offer() }, 2, b"");
            let (reply, terms) = request.answer(&Offer { crc: ours, ..offer() }, b"");
            assert_eq!((reply.crc, terms.crc), (theirs || ours, theirs || ours));
            let mut reply = reply;
            reply.crc = ours;
            assert_eq!(reply.accept(&Offer { crc: theirs, ..offer() }, 2).unwrap().crc, theirs || ours);
        }
    }

    #[test]
    fn markers_are_refused_in_both_roles() {
        let mut request = StartFrame::request(&offer(), 2, b"");
        request.markers = true;
        let (mut reply, _) = request.answer(&offer(), b"");
        assert!(reply.reject && !reply.markers);
        (reply.reject, reply.markers) = (false, true);
        assert!(matches!(reply.accept(&offer(), 2), Err(Refusal::Leave(e)) if e.kind() == Kind::Protocol));
    }

    #[test]
    fn the_initiator_takes_the_responders_depths_and_refuses_too_deep_ones() {
        let reply = |ird, ord| {
            let (mut reply, _) = StartFrame::request(&offer(), 2, b"").answer(&offer(), b"");
            reply.enhanced = Some(Enhanced { ird, ord, ..Enhanced::default() });
            reply.accept(&offer(), 2)
        };
        assert_eq!(reply(4, 16).unwrap(), Terms { crc: true, ird: 16, ord: 4 });
        assert_eq!(reply(NOT_NEGOTIATED, NOT_NEGOTIATED).unwrap(), Terms { crc: true, ird: 16, ord: 16 });
        assert!(matches!(reply(4, 17), Err(Refusal::InsufficientIrd(_))));
    }

    #[test]
    fn a_reply_of_the_other_form_or_a_reject_is_no_connection() {
        let (mut reply, _) = StartFrame::request(&offer(), 2, b"").answer(&offer(), b"");
        assert!(matches!(reply.accept(&offer(), 1), Err(Refusal::Leave(_))));
        reply.enhanced = None;
        assert!(matches!(reply.accept(&offer(), 2), Err(Refusal::Leave(_))));
        assert!(reply.accept(&offer(), 1).is_ok());
        reply.reject = true;
        assert!(matches!(reply.accept(&offer(), 1), Err(Refusal::Leave(e)) if e.kind() == Kind::Peer));
    }

    #[test]
    fn fpdus_are_multiples_of_four_and_fit_the_segment() {
        for ulpdu in 0..200 {
            assert_eq!(fpdu_len(ulpdu) % 4, 0);
            assert!(pad_len(ulpdu) < 4);
        }
        for mss in 136..70000 {
            let most = mulpdu(mss);
            assert!(fpdu_len(most) <= mss.min(65535), "{mss}");
            assert!(most == 64768 || fpdu_len(most + 4) > mss, "{mss}");
        }
        assert_eq!((mulpdu(0), mulpdu(1448), mulpdu(65483)), (128, 1442, 64768));
    }
}
