//! An RPC message on its way out: bytes of our own, with parts that were left in the program's memory.
#![forbid(unsafe_code)]

use std::io;
use std::ops::Range;

use super::{Buf, Loan, Memory, Region, Regions};

/// An encoded message whose lent parts can still be copied in.
///
/// `body` is as long as the message and holds every byte at its position, except those of `lent`: there it has a hole
/// of the same size. (A hole costs addresses, not pages.)
///
/// # Invariants
/// - Lent parts are in stream order, do not overlap, and lie inside the body.
pub struct Message {
    body: Buf,
    lent: Vec<(usize, Region)>,
}

impl Message {
    /// A message of `body`, in which the bytes of `lent` are still missing: `(position, bytes)` in stream order.
    ///
    /// # Panics
    /// When the parts overlap or lie outside.
    pub fn new(body: Buf, lent: Vec<(usize, Region)>) -> Message {
        let mut end = 0;
        for (at, part) in &lent {
            assert!(*at >= end, "lent parts overlap");
            end = at + part.len();
        }
        assert!(end <= body.len(), "a lent part lies outside its message");
        Message { body, lent }
    }

    /// Bytes of the message.
    pub fn len(&self) -> usize {
        self.body.len()
    }

    /// The message with holes: for readers that want headers and skip what was lent.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The loans of this message, all of which must be over before its memory is the program's again.
    pub fn loans(&self) -> Vec<Loan> {
        self.lent.iter().map(|(_, part)| part.loan()).collect()
    }

    /// Copies in the lent parts that `which` chooses by their position and length. Returns the bytes copied.
    pub fn copy_in(&mut self, mut which: impl FnMut(usize, usize) -> bool) -> usize {
        let mut copied = 0;
        let body = &mut self.body;
        self.lent.retain(|(at, part)| {
            let copy = which(*at, part.len());
            if copy {
                body[*at..at + part.len()].copy_from_slice(part);
                copied += part.len();
            }
            !copy
        });
        copied
    }

    /// Whether a lent part overlaps the `len` bytes at `address`.
    pub fn lends_of(&self, address: usize, len: usize) -> bool {
        let meets = |part: &Region| {
            let start = part.as_ptr().addr();
            start < address.saturating_add(len) && address < start + part.len()
        };
        self.lent.iter().any(|(_, part)| meets(part))
    }

    /// Whether all of it lies in an outbox.
    pub fn is_in_outbox(&self) -> bool {
        self.is_whole() && self.body.is_outbox()
    }

    /// Whether every byte is our own.
    pub fn is_whole(&self) -> bool {
        self.lent.is_empty()
    }

    /// Positions and lengths of the lent parts.
    pub fn lent(&self) -> impl Iterator<Item = (usize, usize)> {
        self.lent.iter().map(|(at, part)| (*at, part.len()))
    }

    /// Lengths of the pieces of memory that a range lies in, in order.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = usize> {
        let ends = self.lent().flat_map(|(at, len)| [at, at + len]).chain([self.len()]);
        let mut from = range.start;
        ends.filter_map(move |end| {
            let end = end.min(range.end);
            let len = end.checked_sub(from).filter(|len| *len > 0)?;
            from = end;
            Some(len)
        })
    }

    /// The message with every lent part copied in.
    #[cfg(test)]
    pub fn into_body(mut self) -> Buf {
        self.copy_in(|_, _| true);
        self.body
    }

    /// Ends all changes.
    pub fn freeze(self) -> Pieces {
        Pieces { body: self.body.freeze(), head: 0, lent: self.lent }
    }
}

impl From<Buf> for Message {
    fn from(body: Buf) -> Message {
        Message { body, lent: Vec::new() }
    }
}

/// A frozen [`Message`].
pub struct Pieces {
    body: Region,
    /// Bytes in front of the message.
    head: usize,
    lent: Vec<(usize, Region)>,
}

impl Pieces {
    /// The regions that hold a range of the message, in order; none is empty.
    ///
    /// # Panics
    /// When the range lies outside.
    pub fn gather(&self, range: Range<usize>) -> Regions {
        let mut pieces = Regions::new();
        self.gather_into(range, &mut pieces);
        pieces
    }

    /// The regions of `header` and, after it, ranges of the message. The header lies in front of the message if there is room,
    /// and none of the message has been gathered yet.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn send(mut self, header: &[u8], ranges: &[Range<usize>], memory: &Memory) -> io::Result<Regions> {
        let mut pieces = Regions::new();
        if self.body.extend_front(header) {
            self.head = header.len();
            // Nearly every message: all of it, in one piece.
            if let [whole] = ranges
                && self.lent.is_empty()
                && *whole == (0..self.body.len() - self.head)
            {
                pieces.push(self.body);
                return Ok(pieces);
            }
            pieces.push(self.body.slice(0, self.head));
        } else {
            let mut own = memory.header()?;
            own.extend(header)?;
            pieces.push(own.freeze());
        }
        for range in ranges {
            self.gather_into(range.clone(), &mut pieces);
        }
        Ok(pieces)
    }

    /// Appends the regions that hold a range of the message, as [`Pieces::gather`].
    fn gather_into(&self, range: Range<usize>, pieces: &mut Regions) {
        let Range { start: at, end } = range;
        let len = self.body.len() - self.head;
        assert!(end <= len, "a range that ends at {end} of {len}");
        let own = |from: usize, to: usize, pieces: &mut Regions| {
            if from == 0 && self.head > 0 {
                // One piece with the header, which is all that is there yet.
                pieces.pop();
                pieces.push(self.body.slice(0, self.head + to));
            } else if from < to {
                pieces.push(self.body.slice(self.head + from, to - from));
            }
        };
        let mut next = at;
        for (start, part) in &self.lent {
            let (from, to) = ((*start).max(at), (start + part.len()).min(end));
            if from < to {
                own(next, from, pieces);
                pieces.push(part.slice(from - start, to - from));
                next = to;
            }
        }
        own(next, end, pieces);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(pieces: &[Region]) -> Vec<u8> {
        pieces.iter().flat_map(|p| p.iter().copied()).collect()
    }

    fn message() -> Message {
        let mut body = Buf::with_capacity(20).unwrap();
        body.extend(&[b'.'; 20]).unwrap();
        let part = |text: &[u8]| Region::copy_from(text).unwrap();
        Message::new(body, vec![(0, part(b"abc")), (3, part(b"def")), (10, part(b"ghij"))])
    }

    #[test]
    fn every_range_is_gathered_from_the_body_and_from_what_was_lent() {
        let whole = b"abcdef....ghij......";
        for at in 0..=20 {
            for len in 0..=20 - at {
                let pieces = message().freeze().gather(at..at + len);
                assert_eq!(bytes(&pieces), whole[at..at + len]);
                assert!(pieces.iter().all(|p| !p.is_empty()));
                let lengths: Vec<usize> = pieces.iter().map(|p| p.len()).collect();
                assert_eq!(message().pieces(at..at + len).collect::<Vec<_>>(), lengths);
            }
        }
    }

    #[test]
    fn a_message_that_goes_whole_is_one_piece_with_its_header_and_has_the_bytes_of_one_that_does_not() {
        let memory = Memory::new(4096, 4096, 1 << 20).connection(None, None);
        let send = |lent: bool, ranges: &[Range<usize>]| {
            let mut body = memory.message().unwrap();
            body.extend(b"abcdefghij").unwrap();
            let part = Region::copy_from(b"def").unwrap();
            let message = Message::new(body, if lent { vec![(3, part)] } else { Vec::new() });
            message.freeze().send(b"head", ranges, &memory).unwrap()
        };
        let whole = 0..10;
        let whole = std::slice::from_ref(&whole);
        assert_eq!((send(false, whole).len(), send(true, whole).len()), (1, 3));
        for pieces in [send(false, whole), send(true, whole), send(false, &[0..4, 4..10])] {
            assert_eq!(bytes(&pieces), b"headabcdefghij");
        }
        assert_eq!(bytes(&send(false, &[0..4, 8..10])), b"headabcdij");
        let shorter = 0..9;
        assert_eq!(bytes(&send(false, std::slice::from_ref(&shorter))), b"headabcdefghi");
    }

    #[test]
    fn what_was_lent_is_known_by_its_address() {
        let message = message();
        let (_, part) = &message.lent[2];
        let at = part.as_ptr().addr();
        assert!(message.lends_of(at, 1) && message.lends_of(at - 5, 6) && message.lends_of(at + 3, 9));
        assert!(!message.lends_of(at - 5, 5) && !message.lends_of(at + 4, 9));
    }

    #[test]
    fn parts_that_are_copied_in_are_not_lent_any_more() {
        let mut message = message();
        assert_eq!(message.copy_in(|at, len| at == 3 || len == 4), 7);
        assert_eq!(message.body()[3..], *b"def....ghij......");
        assert_eq!(message.lent().collect::<Vec<_>>(), [(0, 3)]);
        assert_eq!(bytes(&message.freeze().gather(0..20)), *b"abcdef....ghij......");
    }
}
