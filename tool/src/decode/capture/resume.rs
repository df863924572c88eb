//! Finds where the next FPDU begins in the midst of a stream: after bytes that a capture lacks.
//!
//! FPDUs begin at multiples of four bytes. With CRCs an FPDU is recognized by its own; without, by headers that are right
//! and lead to each other.
#![forbid(unsafe_code)]

use rpcrdma::provider::iwarp::ddp::{self, Header};
use rpcrdma::provider::iwarp::mpa;

/// The weight of headers that lead to each other, up to certainty: the header of a message names its queue in 32 bits; one
/// of data does not.
const SURE: u32 = 4;
const MESSAGE: u32 = 3;
const DATA: u32 = 1;

#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// An FPDU begins here.
    At(usize),
    /// None begins before this; whether one begins here or later is known when more has come.
    NotBefore(usize),
}

/// Looks for the next FPDU from `first` on. Adds to `effort` the bytes that were looked at.
pub fn next(bytes: &[u8], first: usize, crc: bool, effort: &mut usize) -> Found {
    let mut perhaps = None;
    for at in (first..bytes.len()).step_by(4) {
        match judge(&bytes[at..], crc, effort) {
            Some(true) => return Found::At(at),
            Some(false) => {}
            // Mostly this is data that looks like a length, with nothing after it.
            None => perhaps = perhaps.or(Some(at)),
        }
    }
    Found::NotBefore(perhaps.unwrap_or(bytes.len()))
}

/// Whether an FPDU begins here; `None`: more bytes are needed.
fn judge(bytes: &[u8], crc: bool, effort: &mut usize) -> Option<bool> {
    let (mut rest, mut weight) = (bytes, 0);
    loop {
        let Some(head) = rest.first_chunk::<{ ddp::ENOUGH }>() else {
            // What has come ends with an FPDU.
            return (rest.is_empty() && weight >= MESSAGE).then_some(true);
        };
        *effort += head.len();
        let Ok((header, _)) = ddp::Header::decode(head) else { return Some(false) };
        let length = mpa::fpdu_len(u16::from_be_bytes([head[0], head[1]]).into());
        if crc {
            let (covered, word) = rest.get(..length)?.split_last_chunk::<4>()?;
            *effort += length;
            return Some(*word == mpa::crc_word(Some(crc32c::crc32c(covered))));
        }
        weight += if matches!(header, Header::Tagged { .. }) { DATA } else { MESSAGE };
        if weight >= SURE {
            return Some(true);
        }
        rest = rest.get(length..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &[u8], crc: bool) -> Vec<u8> {
        let header = Header::Untagged { opcode: ddp::Opcode::Send, last: true, invalidate: 0, msn: 3, mo: 0 };
        let mut bytes = vec![0; ddp::ENOUGH];
        let length = header.encode(payload.len(), &mut bytes);
        bytes.truncate(length);
        bytes.extend_from_slice(payload);
        bytes.resize(mpa::fpdu_len(length - 2 + payload.len()) - 4, 0);
        let word = mpa::crc_word(crc.then(|| crc32c::crc32c(&bytes)));
        bytes.extend_from_slice(&word);
        bytes
    }

    #[test]
    fn the_first_that_is_whole_is_found_behind_the_rest_of_another() {
        for crc in [false, true] {
            let all = [message(&[0x55; 401], crc), message(&[7; 90], crc), message(b"end", crc)].concat();
            let second = message(&[0x55; 401], crc).len();
            for cut in (4..second).step_by(4) {
                let rest = &all[cut..];
                assert_eq!(next(rest, 0, crc, &mut 0), Found::At(second - cut), "{cut}");
                // Not before there is enough of it.
                for length in 0..second - cut {
                    assert!(matches!(next(&rest[..length], 0, crc, &mut 0), Found::NotBefore(_)), "{cut}");
                }
            }
        }
    }

    #[test]
    fn what_only_looks_like_one_is_passed_over() {
        // A right header, and nothing that it leads to.
        let mut bytes = message(&[9; 60], false);
        bytes.extend([0xff; 64]);
        let whole = bytes.len();
        bytes.extend(message(b"this one", false));
        assert_eq!(next(&bytes, 0, false, &mut 0), Found::At(whole));
        // A right header, and a CRC that is wrong.
        let mut bytes = message(&[9; 60], true);
        bytes[30] ^= 1;
        let whole = bytes.len();
        bytes.extend(message(b"this one", true));
        let mut effort = 0;
        assert_eq!(next(&bytes, 0, true, &mut effort), Found::At(whole));
        assert!(effort >= bytes.len());
    }
}
