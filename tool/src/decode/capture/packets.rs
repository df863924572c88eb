//! Files of captured packets, pcap and pcapng -> what each packet holds of a TCP connection.
//!
//! A file is somebody else's: lengths in it are only bounds, for which no memory is reserved, and what is not understood is
//! counted and skipped.
//!
//! Read first: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::super::log::Time;

/// Anything longer than this is not a packet or block.
const LONGEST: u32 = 16 << 20;

/// More interfaces than any capture has.
const INTERFACES: usize = 4096;

/// A part of a TCP connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub at: Option<Time>,
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub sequence: u32,
    pub syn: bool,
    /// Up to where its sender has received everything, if it says that.
    pub ack: Option<u32>,
    pub fin: bool,
    pub rst: bool,
    /// As much of it as was captured.
    pub data: Vec<u8>,
}

/// What was skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub packets: u64,
    /// Fragments of IP packets.
    pub fragments: u64,
    /// Packets to the port of RoCE.
    pub roce: u64,
    /// Packets of an unknown link type.
    pub links: u64,
    /// The file ends within a packet.
    pub cut: bool,
}

/// A capture that is read packet by packet.
pub struct Packets<R> {
    input: R,
    big: bool,
    format: Format,
    pub counts: Counts,
}

enum Format {
    /// How many units make a second, and the link type.
    Pcap {
        unit: u64,
        link: u16,
    },
    Pcapng {
        interfaces: Vec<Interface>,
    },
}

/// When it was captured, its link type, and its bytes.
type Packet = (Option<Time>, u16, Vec<u8>);

struct Interface {
    link: u16,
    /// Ticks a second.
    ticks: u128,
}

/// Whether a file that begins like this is a capture.
pub fn is_capture(start: &[u8]) -> bool {
    let Some(&magic) = start.first_chunk::<4>() else { return false };
    magic == SECTION || pcap(magic).is_some()
}

const SECTION: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// Whether it has the high byte first, and the unit of its times.
fn pcap(magic: [u8; 4]) -> Option<(bool, u64)> {
    match magic {
        [0xa1, 0xb2, 0xc3, 0xd4] => Some((true, 1_000_000)),
        [0xd4, 0xc3, 0xb2, 0xa1] => Some((false, 1_000_000)),
        [0xa1, 0xb2, 0x3c, 0x4d] => Some((true, 1_000_000_000)),
        [0x4d, 0x3c, 0xb2, 0xa1] => Some((false, 1_000_000_000)),
        _ => None,
    }
}

impl<R: Read> Packets<R> {
    /// Opens a file for which [`is_capture`] is true, from its first byte on.
    ///
    /// # Errors
    /// Of the file.
    pub fn open(mut input: R) -> io::Result<Packets<R>> {
        let mut magic = [0; 4];
        input.read_exact(&mut magic)?;
        let mut packets = Packets {
            input,
            big: false,
            format: Format::Pcapng { interfaces: Vec::new() },
            counts: Counts::default(),
        };
        match pcap(magic) {
            Some((big, unit)) => {
                packets.big = big;
                let head = packets.bytes(20)?;
                let link = packets.word(&head, 16).unwrap_or(u32::MAX) as u16;
                packets.format = Format::Pcap { unit, link };
            }
            None => packets.section()?,
        }
        Ok(packets)
    }

    /// The next part of a TCP connection.
    ///
    /// # Errors
    /// Those of the file, and that it is not a capture from there on.
    pub fn next(&mut self) -> io::Result<Option<Part>> {
        while let Some((at, link, bytes)) = self.packet()? {
            self.counts.packets += 1;
            if let Some(part) = self.part(at, link, &bytes) {
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    fn packet(&mut self) -> io::Result<Option<Packet>> {
        if let Format::Pcap { unit, link } = self.format {
            let head = self.bytes(16)?;
            let (Some(seconds), Some(parts), Some(length)) =
                (self.word(&head, 0), self.word(&head, 4), self.word(&head, 8))
            else {
                return Ok(self.end(&head));
            };
            let bytes = self.bytes(length)?;
            self.counts.cut |= bytes.len() < length as usize;
            let at = i64::from(seconds) * 1_000_000 + (u64::from(parts) * 1_000_000 / unit) as i64;
            return Ok(Some((Some(at), link, bytes)));
        }
        loop {
            let head = self.bytes(4)?;
            let Some(&kind) = head.first_chunk::<4>() else { return Ok(self.end(&head)) };
            if kind == SECTION {
                self.section()?;
                continue;
            }
            let (kind, body) = (self.number(kind), self.block(8)?);
            let Format::Pcapng { interfaces } = &self.format else { return Ok(None) };
            let interface = |number: u32| interfaces.get(number as usize);
            let word = |at| self.word(&body, at);
            let held = |from: usize, length: u32| {
                let rest = body.get(from..).unwrap_or_default();
                rest[..rest.len().min(length as usize)].to_vec()
            };
            match kind {
                1 => self.interface(&body),
                // A packet with its time, and one without.
                6 => {
                    let known = word(0).and_then(interface);
                    if let (Some(known), Some(high), Some(low), Some(length)) =
                        (known, word(4), word(8), word(12))
                    {
                        let ticks = u128::from(u64::from(high) << 32 | u64::from(low));
                        let at = i64::try_from(ticks * 1_000_000 / known.ticks).ok();
                        return Ok(Some((at, known.link, held(20, length))));
                    }
                }
                3 => {
                    if let (Some(first), Some(length)) = (interface(0), word(0)) {
                        return Ok(Some((None, first.link, held(4, length))));
                    }
                }
                _ => {}
            }
        }
    }

    fn end<T>(&mut self, rest: &[u8]) -> Option<T> {
        self.counts.cut |= !rest.is_empty();
        None
    }

    /// The head of a section, after its type.
    fn section(&mut self) -> io::Result<()> {
        let length = self.bytes(4)?;
        let order = self.bytes(4)?;
        self.big = match order[..] {
            [0x1a, 0x2b, 0x3c, 0x4d] => true,
            [0x4d, 0x3c, 0x2b, 0x1a] => false,
            _ => return Err(wrong("a section without its byte order")),
        };
        let length = self.word(&length, 0).unwrap_or(0);
        self.rest_of_block(length, 12)?;
        self.format = Format::Pcapng { interfaces: Vec::new() };
        Ok(())
    }

    /// The rest of a block after its type.
    fn block(&mut self, read: u32) -> io::Result<Vec<u8>> {
        let length = self.bytes(4)?;
        let Some(length) = self.word(&length, 0) else {
            self.counts.cut = true;
            return Ok(Vec::new());
        };
        self.rest_of_block(length, read)
    }

    fn rest_of_block(&mut self, length: u32, read: u32) -> io::Result<Vec<u8>> {
        let rest = length.checked_sub(read + 4).filter(|_| length.is_multiple_of(4));
        let rest = rest.ok_or_else(|| wrong(&format!("a block of {length} bytes")))?;
        let body = self.bytes(rest)?;
        self.counts.cut |= self.bytes(4)?.len() < 4;
        Ok(body)
    }

    fn interface(&mut self, body: &[u8]) {
        let link = self.half(body, 0);
        let mut ticks = 1_000_000;
        let mut rest = body.get(8..).unwrap_or_default();
        while let (Some(code), Some(length)) = (self.half(rest, 0), self.half(rest, 2)) {
            let Some(value) = rest.get(4..4 + usize::from(length)) else { break };
            if let (9, Some(resolution)) = (code, value.first()) {
                // A power of ten or of two.
                let (base, power) =
                    if resolution & 0x80 == 0 { (10u128, *resolution) } else { (2, resolution & 0x7f) };
                ticks = base.checked_pow(u32::from(power)).unwrap_or(u128::MAX);
            }
            rest = rest.get(4 + usize::from(length).next_multiple_of(4)..).unwrap_or_default();
        }
        if let Format::Pcapng { interfaces } = &mut self.format
            && interfaces.len() < INTERFACES
        {
            interfaces.push(Interface { link: link.unwrap_or(u16::MAX), ticks });
        }
    }

    /// This many bytes, or those that are left.
    fn bytes(&mut self, length: u32) -> io::Result<Vec<u8>> {
        if length > LONGEST {
            return Err(wrong(&format!("a packet or block of {length} bytes")));
        }
        let mut bytes = Vec::new();
        self.input.by_ref().take(length.into()).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&self, bytes: [u8; 4]) -> u32 {
        if self.big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
    }

    fn word(&self, bytes: &[u8], at: usize) -> Option<u32> {
        Some(self.number(*bytes.get(at..)?.first_chunk()?))
    }

    fn half(&self, bytes: &[u8], at: usize) -> Option<u16> {
        let half = *bytes.get(at..)?.first_chunk()?;
        Some(if self.big { u16::from_be_bytes(half) } else { u16::from_le_bytes(half) })
    }

    // ---- What is in a packet: high bytes first from here on ----

    fn part(&mut self, at: Option<Time>, link: u16, packet: &[u8]) -> Option<Part> {
        let ip = match link {
            1 => {
                let mut from = 12;
                // VLAN tags.
                while matches!(be16(packet, from)?, 0x8100 | 0x88a8) {
                    from += 4;
                }
                packet.get(from + 2..)
            }
            // BSD's loopback, raw, and Linux's "any".
            0 | 108 => packet.get(4..),
            12 | 14 | 101 | 228 | 229 => Some(packet),
            113 => packet.get(16..),
            276 => packet.get(20..),
            _ => {
                self.counts.links += 1;
                None
            }
        }?;
        let (from, to, kind, payload) = match ip.first()? >> 4 {
            4 => self.version_4(ip)?,
            6 => self.version_6(ip)?,
            _ => return None,
        };
        if kind == 17 && be16(payload, 2) == Some(4791) {
            self.counts.roce += 1;
        }
        if kind != 6 {
            return None;
        }
        let flags = *payload.get(13)?;
        let head = usize::from(payload.get(12)? >> 4) * 4;
        Some(Part {
            at,
            from: SocketAddr::new(from, be16(payload, 0)?),
            to: SocketAddr::new(to, be16(payload, 2)?),
            sequence: be32(payload, 4)?,
            fin: flags & 1 != 0,
            syn: flags & 2 != 0,
            rst: flags & 4 != 0,
            ack: if flags & 16 != 0 { be32(payload, 8) } else { None },
            data: payload.get(head.max(20)..).unwrap_or_default().to_vec(),
        })
    }

    fn version_4<'a>(&mut self, ip: &'a [u8]) -> Option<(IpAddr, IpAddr, u8, &'a [u8])> {
        let address = |at: usize| Some(IpAddr::V4(Ipv4Addr::from(*ip.get(at..)?.first_chunk::<4>()?)));
        let head = usize::from(ip.first()? & 15) * 4;
        if be16(ip, 6)? & 0x3fff != 0 {
            self.counts.fragments += 1;
            return None;
        }
        // What the network card is to cut into packets has no length.
        let length = match usize::from(be16(ip, 2)?) {
            0 => ip.len(),
            length => length.min(ip.len()),
        };
        Some((address(12)?, address(16)?, *ip.get(9)?, ip.get(head.max(20)..length)?))
    }

    fn version_6<'a>(&mut self, ip: &'a [u8]) -> Option<(IpAddr, IpAddr, u8, &'a [u8])> {
        let address = |at: usize| Some(IpAddr::V6(Ipv6Addr::from(*ip.get(at..)?.first_chunk::<16>()?)));
        let length = match usize::from(be16(ip, 4)?) {
            0 => ip.len(),
            length => (40 + length).min(ip.len()),
        };
        let (mut kind, mut rest) = (*ip.get(6)?, ip.get(40..length)?);
        while matches!(kind, 0 | 43 | 60) {
            let skip = (usize::from(*rest.get(1)?) + 1) * 8;
            (kind, rest) = (rest[0], rest.get(skip..)?);
        }
        self.counts.fragments += u64::from(kind == 44);
        Some((address(8)?, address(24)?, kind, rest))
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("no capture from here on: {what}"))
}
