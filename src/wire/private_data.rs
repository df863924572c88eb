//! The RDMA-CM private data of RPC-over-RDMA Version One (RFC 8797): what either end says while connecting.
//!
//! ```text
//! f6ab0e18 | version = 1 | reserved, R | send size | receive size        sizes: bytes / 1024 - 1
//! ```
//!
//! Owns the eight bytes, the search for them among what other layers put beside them, and the arithmetic of
//! two settings: the inline thresholds of a connection and whether Replies may invalidate. Leaves to the
//! provider how private data travels (MPA frames, a connection manager), and to `connection` which memory a
//! Reply may invalidate.
//!
//! Nothing here has state: the settings of a connection come from its own exchange, never from an earlier
//! connection to the same peer.
//!
//! Read first: RFC 8797 §4 and §5.
#![forbid(unsafe_code)]

/// What one end of a connection says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateData {
    /// R: every handle that this end exposes on the connection may be invalidated by the peer's Sends.
    pub remote_invalidation: bool,
    /// Most bytes that this end transmits in one Send: a multiple of 1024 from 1024 to 262144.
    pub send_size: usize,
    /// Most bytes that this end receives in one Receive: a multiple of 1024 from 1024 to 262144.
    pub receive_size: usize,
}

impl PrivateData {
    /// What a peer that sends none is taken to have said.
    // RFC 8797 §5.1: "the peer MUST behave as if a Private Data message was received in which (1) bit 15 of
    // the Flags field is zero and (2) both Size fields contain the value zero." (Bit 15 is R.)
    pub const ABSENT: PrivateData =
        PrivateData { remote_invalidation: false, send_size: UNIT, receive_size: UNIT };

    /// Bytes of the message.
    pub const LEN: usize = 8;

    /// Encodes the message. A size that is not a multiple of 1024 is rounded down, since the end could not keep a larger promise.
    pub fn encode(&self) -> [u8; PrivateData::LEN] {
        let [a, b, c, d] = FORMAT;
        // RFC 8797 §4, of the reserved bits: "Senders MUST set these bits to zero".
        let flags = if self.remote_invalidation { R } else { 0 };
        [a, b, c, d, VERSION, flags, size_code(self.send_size), size_code(self.receive_size)]
    }

    /// Finds and decodes the message in received private data. `None`: the peer is [`PrivateData::ABSENT`].
    ///
    /// Other layers put bytes before it (MPA v2 its read depths) and devices pad after it, so it is searched for. A format
    /// identifier that is not followed by a message that we know is skipped.
    pub fn find(bytes: &[u8]) -> Option<PrivateData> {
        // RFC 8797 §5.2: "The offset of the Format Identifier is not restricted to any alignment."
        bytes.windows(PrivateData::LEN).find_map(|window| match *window {
            // RFC 8797 §4, of the reserved bits: "receivers MUST ignore their value."
            [a, b, c, d, VERSION, flags, send, receive] if [a, b, c, d] == FORMAT => Some(PrivateData {
                remote_invalidation: flags & R != 0,
                send_size: size(send),
                receive_size: size(receive),
            }),
            _ => None,
        })
    }

    /// The inline threshold of messages from this end to `peer`.
    pub fn send_threshold(&self, peer: &PrivateData) -> usize {
        // RFC 8797 §4.2: "The client uses the smaller of its own send size and the server's reported receive
        // size as the client-to-server inline threshold. The server uses the smaller of its own send size and
        // the client's reported receive size as the server-to-client inline threshold." Own sizes count as
        // the peer knows them: rounded.
        size(size_code(self.send_size)).min(size(size_code(peer.receive_size)))
    }

    /// The inline threshold of messages from `peer` to this end.
    pub fn receive_threshold(&self, peer: &PrivateData) -> usize {
        peer.send_threshold(self)
    }

    /// Whether a Responder may use Send with Invalidate for its Replies on this connection.
    pub fn may_invalidate(&self, peer: &PrivateData) -> bool {
        // RFC 8797 §4.1: "When either peer on a connection clears this flag, the responder MUST use only RDMA
        // Send when transmitting RPC Replies."
        self.remote_invalidation && peer.remote_invalidation
    }
}

fn size_code(bytes: usize) -> u8 {
    // RFC 8797 §4.2: "a sender computes the encoded value by dividing its actual buffer size, in octets, by
    // 1024 and subtracting one from the result."
    (bytes / UNIT).saturating_sub(1).try_into().unwrap_or(u8::MAX)
}

fn size(code: u8) -> usize {
    (usize::from(code) + 1) * UNIT
}

/// The Format Identifier, in network byte order.
const FORMAT: [u8; 4] = 0xf6ab_0e18_u32.to_be_bytes();
const VERSION: u8 = 1;
const R: u8 = 0x01;
const UNIT: usize = 1024;

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::*;

    const FOUR_K: PrivateData =
        PrivateData { remote_invalidation: true, send_size: 4096, receive_size: 4096 };

    fn sized(send_size: usize, receive_size: usize) -> PrivateData {
        PrivateData { remote_invalidation: false, send_size, receive_size }
    }

    #[test]
    fn the_message_is_the_eight_bytes_of_the_rfc() {
        assert_eq!(FOUR_K.encode(), hex!("f6ab0e18 01 01 03 03"));
        assert_eq!(PrivateData::ABSENT.encode(), hex!("f6ab0e18 01 00 00 00"));
        assert_eq!(sized(262144, 1024).encode(), hex!("f6ab0e18 01 00 ff 00"));
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 01 00 03 07")), Some(sized(4096, 8192)));
    }

    #[test]
    fn every_size_code_survives_a_round_trip() {
        for code in 0..=255 {
            let bytes = (code + 1) * 1024;
            let said =
                PrivateData { remote_invalidation: code % 2 == 0, send_size: bytes, receive_size: 262144 };
            assert_eq!(said.encode()[6], code as u8);
            assert_eq!(PrivateData::find(&said.encode()), Some(said));
        }
    }

    #[test]
    fn sizes_round_down_and_stay_in_range() {
        for (bytes, code) in
            [(0, 0), (1023, 0), (1024, 0), (2047, 0), (2048, 1), (262143, 254), (262144, 255)]
        {
            assert_eq!((bytes, size_code(bytes)), (bytes, code));
        }
        assert_eq!(size_code(usize::MAX), 255);
    }

    #[test]
    fn rule_1_a_threshold_is_the_smaller_of_the_senders_send_and_the_receivers_receive_size() {
        let client = sized(8192, 2048);
        let server = sized(65536, 4096);
        assert_eq!((client.send_threshold(&server), client.receive_threshold(&server)), (4096, 2048));
        assert_eq!((server.send_threshold(&client), server.receive_threshold(&client)), (2048, 4096));
    }

    #[test]
    fn rule_1_an_unaligned_own_size_counts_as_it_was_advertised() {
        assert_eq!(sized(5000, 5000).send_threshold(&sized(9000, 9000)), 4096);
    }

    #[test]
    fn rule_2_settings_come_from_the_bytes_of_this_connection_alone() {
        assert_eq!(PrivateData::find(&FOUR_K.encode()), Some(FOUR_K));
        assert_eq!(PrivateData::find(&sized(1024, 8192).encode()), Some(sized(1024, 8192)));
        assert_eq!(PrivateData::find(&[]), None);
    }

    #[test]
    fn rule_3_reserved_bits_are_sent_as_zero_and_ignored() {
        assert_eq!(FOUR_K.encode()[5] & !1, 0);
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 01 fe 03 03")), Some(sized(4096, 4096)));
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 01 ff 03 03")), Some(FOUR_K));
    }

    #[test]
    fn rules_4_and_5_replies_may_invalidate_only_when_both_ends_said_r() {
        let plain = sized(4096, 4096);
        assert!(FOUR_K.may_invalidate(&FOUR_K));
        assert!(
            !FOUR_K.may_invalidate(&plain) && !plain.may_invalidate(&FOUR_K) && !plain.may_invalidate(&plain)
        );
    }

    #[test]
    fn rule_6_r_says_what_the_caller_said_and_nothing_else_sets_it() {
        assert_eq!(sized(262144, 262144).encode()[5], 0);
    }

    #[test]
    fn rule_7_a_silent_peer_has_1024_bytes_both_ways_and_no_invalidation() {
        let peer = PrivateData::find(b"something else entirely").unwrap_or(PrivateData::ABSENT);
        assert_eq!((FOUR_K.send_threshold(&peer), FOUR_K.receive_threshold(&peer)), (1024, 1024));
        assert!(!FOUR_K.may_invalidate(&peer));
    }

    #[test]
    fn rule_8_the_message_is_found_at_any_offset_and_before_padding() {
        for before in 0..40 {
            let mut bytes = vec![0xf6; before];
            bytes.extend(FOUR_K.encode());
            bytes.extend([0; 13]);
            assert_eq!(PrivateData::find(&bytes), Some(FOUR_K), "offset {before}");
        }
    }

    #[test]
    fn rule_8_the_search_goes_on_behind_a_format_identifier_without_a_message() {
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 f6ab0e18 01 01 03 03")), Some(FOUR_K));
    }

    #[test]
    fn rules_9_and_10_a_message_cut_short_is_absent() {
        let whole = FOUR_K.encode();
        for length in 0..whole.len() {
            assert_eq!(PrivateData::find(&whole[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn rules_9_and_11_another_version_or_format_is_absent_and_added_fields_are_not() {
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 00 01 03 03")), None);
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 02 01 03 03 01020304")), None);
        assert_eq!(PrivateData::find(&hex!("180eabf6 01 01 03 03")), None);
        assert_eq!(PrivateData::find(&hex!("f6ab0e18 01 01 03 03 01020304")), Some(FOUR_K));
    }
}
