//! The layout of the page that `rpcrdma stat` reads: words of 64 bits in the byte order of the machine.
//!
//! A header ([`Head`]), the table of counters, [`SLOTS`] connections of [`Slot`] words each, and [`HISTOGRAMS`] histograms.
//! Offsets, sizes and numbers are in the header, and a reader goes by them: new counters and words go at the end of their part
//! without a new [`VERSION`]; any other change needs a new one.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
#[cfg(any(test, feature = "tool"))]
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6};

/// The name of the file in memory, which the kernel shows as `/memfd:rpcrdma-stats (deleted)`.
pub const NAME: &str = "rpcrdma-stats";

/// The first word, written last: once it is there, the rest is too.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"rpcrdma\x01");

/// The version of this layout.
pub const VERSION: u64 = 1;

/// Connections that have a place of their own.
pub const SLOTS: usize = 256;

/// Histograms; the first is for whatever has no other.
pub const HISTOGRAMS: usize = 128;

/// Words of the header.
pub const HEAD_WORDS: usize = 32;

/// Room for counters, in words: more than there are, and whole cache lines.
pub const COUNTER_ROOM: usize = 96;

/// Words of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Head {
    /// [`MAGIC`].
    Magic,
    /// [`VERSION`].
    Version,
    /// Bytes of the page.
    Size,
    /// Where the counters are, in bytes from the beginning.
    Counters,
    /// How many.
    CounterCount,
    /// Where the connections are, in bytes.
    Slots,
    /// Bytes of each.
    SlotSize,
    /// How many there is room for.
    SlotCount,
    /// Where the histograms are, in bytes.
    Histograms,
    /// Bytes of each.
    HistogramSize,
    /// How many there is room for.
    HistogramCount,
    /// The process, by its own namespace.
    Pid,
    /// When the page was made: nanoseconds since 1970.
    Since,
    /// Connections that are there now and have no place.
    WithoutSlot,
    /// The version of the library: 4 words of text.
    Library = 16,
    /// The name of the program: 8 words of text.
    Program = 20,
}

/// Words of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Slot {
    /// Odd while the words up to [`Slot::Local`] change; when the number differs from before, it is another connection.
    Sequence,
    /// 0: nobody's; 1: we have opened it; 2: we have accepted it.
    End,
    /// Since when: nanoseconds since 1970.
    Since,
    /// The descriptor that the program knows it by.
    Fd,
    /// What it goes over: 8 words of text.
    Device = 4,
    /// The other end: [`ADDRESS_WORDS`].
    Peer = 12,
    /// This end.
    Local = 16,
    /// The version of RPC-over-RDMA; 0 before it is agreed on.
    Version = 20,
    /// Credits that we ask for with our calls.
    Asked,
    /// Credits that the peer has granted.
    Granted,
    /// Credits that we grant.
    Granting,
    /// Our calls under way, each with a credit.
    InFlight,
    /// Requests of the peer that have no reply yet.
    Open,
    /// Calls that we have made.
    Calls,
    /// Those that had to wait for a credit.
    Waited,
    /// Requests that we have served.
    Served,
    /// Calls, ours or the peer's, that ended in an error of the transport.
    Errors,
    /// Bytes that we have sent inside messages.
    BytesInline,
    /// Bytes that our RDMA Reads have moved.
    BytesRead,
    /// Bytes that our RDMA Writes have moved.
    BytesWritten,
    /// Bytes that the peer's RDMA Reads and Writes have moved, from and to memory that calls of ours named.
    BytesPlaced,
}

/// Words of a connection in all.
pub const SLOT_WORDS: usize = 40;

/// Words of an address: its family and port, and the address in 16 bytes.
pub const ADDRESS_WORDS: usize = 4;

/// Words of a histogram before its buckets: the procedure ([`super::Procedure`]; 0: there is none), and the sum of all times
/// in nanoseconds.
pub const HISTOGRAM_HEAD: usize = 2;

/// Powers of two that have four buckets each: from a microsecond up to 137 seconds.
pub const POWERS: usize = 27;

/// Buckets of a histogram: four below those, and the last for what takes longer than all others hold.
pub const BUCKETS: usize = 4 + 4 * POWERS + 1;

/// Words of a histogram in all.
pub const HISTOGRAM_WORDS: usize = 120;

const _: () = assert!(HISTOGRAM_HEAD + BUCKETS <= HISTOGRAM_WORDS);
const _: () = assert!(super::COUNT <= COUNTER_ROOM);
const _: () = assert!(Slot::BytesPlaced as usize <= SLOT_WORDS);
const _: () = assert!(Head::Program as usize + 8 <= HEAD_WORDS);

/// Bytes of the page: whole pages of any machine.
pub const SIZE: usize = (8 * (HEAD_WORDS + COUNTER_ROOM + SLOTS * SLOT_WORDS + HISTOGRAMS * HISTOGRAM_WORDS))
    .next_multiple_of(64 << 10);

/// Text in words: cut between two characters, the rest zeros.
pub fn text<const N: usize>(text: &str) -> [u64; N] {
    let mut end = text.len().min(8 * N);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let bytes = &text.as_bytes()[..end];
    std::array::from_fn(|at| {
        let mut word = [0; 8];
        let part = bytes.get(8 * at..).unwrap_or_default();
        let len = part.len().min(8);
        word[..len].copy_from_slice(&part[..len]);
        u64::from_ne_bytes(word)
    })
}

/// The text of words, whatever they hold: what is not UTF-8 is replaced.
#[cfg(any(test, feature = "tool"))]
pub fn text_of(words: &[u64]) -> String {
    let bytes: Vec<u8> =
        words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// An address in words.
pub fn address(address: Option<SocketAddr>) -> [u64; ADDRESS_WORDS] {
    let Some(address) = address else { return [0; ADDRESS_WORDS] };
    let (family, bits) = match address.ip() {
        IpAddr::V4(ip) => (4, u128::from(ip.to_bits())),
        IpAddr::V6(ip) => (6, ip.to_bits()),
    };
    let scope = match address {
        SocketAddr::V6(address) => address.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    [family << 32 | u64::from(address.port()), scope.into(), (bits >> 64) as u64, bits as u64]
}

/// The address of words; `None` where there is none, or no valid one.
#[cfg(any(test, feature = "tool"))]
pub fn address_of(words: &[u64]) -> Option<SocketAddr> {
    let &[head, scope, high, low] = words else { return None };
    let port = u16::try_from(head & 0xffff_ffff).ok()?;
    match head >> 32 {
        4 if high == 0 => Some((Ipv4Addr::from_bits(u32::try_from(low).ok()?), port).into()),
        6 => {
            let ip = Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low));
            Some(SocketAddrV6::new(ip, port, 0, u32::try_from(scope).ok()?).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back_as_far_as_it_has_room() {
        assert_eq!(text_of(&text::<4>("0.1.0")), "0.1.0");
        assert_eq!(text_of(&text::<1>("12345678")), "12345678");
        assert_eq!(text_of(&text::<1>("1234567ü")), "1234567", "no half character");
        assert_eq!(text_of(&[u64::from_ne_bytes(*b"a\xff\x1bb\0cde")]), "a\u{fffd}\x1bb");
    }

    #[test]
    fn addresses_come_back_and_what_is_none_does_not() {
        for text in ["127.0.0.1:20049", "255.1.2.3:65535", "[fe80::1%7]:1", "[::ffff:1.2.3.4]:0"] {
            let given: SocketAddr = text.parse().unwrap();
            assert_eq!(address_of(&address(Some(given))), Some(given));
        }
        assert_eq!(address_of(&address(None)), None);
        for wrong in
            [[4 << 32 | 1 << 16, 0, 0, 1], [4 << 32, 0, 1, 1], [5 << 32, 0, 0, 0], [6 << 32, u64::MAX, 0, 0]]
        {
            assert_eq!(address_of(&wrong), None);
        }
        assert_eq!(address_of(&[0; 3]), None);
    }
}
