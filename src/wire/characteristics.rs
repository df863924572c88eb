//! The transport-characteristics extension of Version Two: bytes <-> values, as in draft-dnoveck-nfsv4-rpcrdma-xcharext-01 (July
//! 2016). Each of its messages is an RDMA2_OPTIONAL without payload; this file holds what is inside.
//!
//! ```text
//! 1 INIT_XCHAR  count {which length bytes} .. | words of the subset that will not change
//! 2 REQ_XCHAR   count {which length bytes} ..
//! 3 RESP_XCHAR  subset done | subset rejected | subset pending
//! 4 UPD_XCHAR   which length bytes | whether a request is no longer pending
//! ```
//!
//! An unknown characteristic is skipped, whatever its bytes. A known one with a value that its type does not allow is an XDR
//! error, and makes the whole message one (section 2.1 of the draft): the answer is BAD_HEADER.
//!
//! # Invariants
//! - [`decode`] allocates nothing; a [`Spec`] is a validated view whose iteration cannot fail.
#![forbid(unsafe_code)]

use std::fmt;

use super::{Reader, put};

/// A characteristic of an endpoint, with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Characteristic {
    /// XCHAR_RBSIZ: fewest bytes of each Receive that the sender of this has posted.
    ReceiveSize(u32),
    /// XCHAR_RQREMINV: replies to the sender's calls with chunks may use Send with Invalidate.
    RemoteInvalidation(bool),
    /// XCHAR_BRS: what the sender of this takes in the reverse direction.
    Backward(Backward),
}

/// Support of the reverse direction (`bkrqsup`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backward {
    /// To be found out by other means.
    Unknown = 0,
    /// None.
    None = 1,
    /// Short messages only.
    SizeLimited = 2,
    /// As in the forward direction.
    General = 3,
}

/// The first of the ids for experiments, which go up to the last possible id.
pub const EXPERIMENTAL: u32 = 0xffff_ff00;

const RBSIZ: u32 = 1;
const RQREMINV: u32 = 2;
const BRS: u32 = 3;

/// `rdma_opttype` of the four messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Init = 1,
    Request = 2,
    Response = 3,
    Update = 4,
}

impl Kind {
    /// The message with this number; `None` for one of another extension.
    pub fn of(opttype: u32) -> Option<Kind> {
        [Kind::Init, Kind::Request, Kind::Response, Kind::Update].into_iter().find(|k| *k as u32 == opttype)
    }
}

/// A decoded message.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// What the sender is like, and which of that will not change.
    Init {
        /// The characteristics.
        start: Spec<'a>,
        /// Those of them that stay.
        unchanging: Subset<'a>,
    },
    /// What the sender would like the receiver to be.
    Request {
        /// The characteristics.
        want: Spec<'a>,
    },
    /// What became of a Request, by the places in its Spec.
    Response {
        /// In force.
        done: Subset<'a>,
        /// Refused.
        rejected: Subset<'a>,
        /// To be settled by an Update.
        pending: Subset<'a>,
    },
    /// What the sender is like from now on.
    Update {
        /// Its id, and the characteristic if it is known.
        now: Value,
        /// A request to change it is no longer pending, whether it was changed or not.
        settled: bool,
    },
}

/// One characteristic of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// `xcharid`.
    pub which: u32,
    /// `None` for an unknown one.
    pub known: Option<Characteristic>,
}

/// A list of characteristics: a view of validated bytes.
#[derive(Clone, Copy)]
pub struct Spec<'a> {
    bytes: &'a [u8],
    count: usize,
}

impl<'a> Spec<'a> {
    /// The characteristics, in list order. Their places are what a [`Subset`] names.
    pub fn iter(&self) -> impl Iterator<Item = Value> + use<'a> {
        let mut reader = Reader { rest: self.bytes };
        std::iter::from_fn(move || value(&mut reader).ok())
    }

    /// How many there are, known or not.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl fmt::Debug for Spec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Some places of a [`Spec`].
///
/// Place N is bit N mod 32 of word N div 32. The draft does not say from which end bits are counted; here from the least
/// significant one, as in the bitmaps of NFSv4. Places beyond the list name nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subset<'a> {
    words: &'a [u8],
}

impl Subset<'_> {
    /// Whether it names this place. Missing words count as 0.
    pub fn contains(&self, place: usize) -> bool {
        let at = place / 32 * 4;
        let word = self.words.get(at..at + 4).and_then(|word| word.first_chunk());
        word.is_some_and(|word| u32::from_be_bytes(*word) >> (place % 32) & 1 == 1)
    }
}

/// In the draft's words, for the log.
impl fmt::Display for Operation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Init { start, unchanging } => write!(f, "INIT_XCHAR {start} nochg {unchanging}"),
            Operation::Request { want } => write!(f, "REQ_XCHAR {want}"),
            Operation::Response { done, rejected, pending } => {
                write!(f, "RESP_XCHAR done {done} rej {rejected} pend {pending}")
            }
            Operation::Update { now, settled } => {
                write!(f, "UPD_XCHAR {now}{}", if *settled { " pendclr" } else { "" })
            }
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known {
            Some(Characteristic::ReceiveSize(bytes)) => write!(f, "RBSIZ {bytes}"),
            Some(Characteristic::RemoteInvalidation(allowed)) => write!(f, "RQREMINV {allowed}"),
            Some(Characteristic::Backward(support)) => {
                let name = match support {
                    Backward::Unknown => "UNKNOWN",
                    Backward::None => "NONE",
                    Backward::SizeLimited => "SZLIM",
                    Backward::General => "GENL",
                };
                write!(f, "BRS {name}")
            }
            None => write!(f, "xcharid {}", self.which),
        }
    }
}

impl fmt::Display for Spec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (place, value) in self.iter().enumerate() {
            write!(f, "{}{value}", if place == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

/// The places that a list of 32 can have; there are no others yet.
impl fmt::Display for Subset<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries((0..32).filter(|place| self.contains(*place))).finish()
    }
}

/// Decodes `rdma_optinfo` of a message of this extension. Bytes after it are an error: nothing gives them a meaning.
///
/// # Errors
/// What is wrong, in words: an XDR error.
pub fn decode(kind: Kind, info: &[u8]) -> Result<Operation<'_>, &'static str> {
    let mut reader = Reader { rest: info };
    let operation = match kind {
        Kind::Init => Operation::Init { start: spec(&mut reader)?, unchanging: subset(&mut reader)? },
        Kind::Request => Operation::Request { want: spec(&mut reader)? },
        Kind::Response => Operation::Response {
            done: subset(&mut reader)?,
            rejected: subset(&mut reader)?,
            pending: subset(&mut reader)?,
        },
        Kind::Update => Operation::Update { now: value(&mut reader)?, settled: boolean(&mut reader)? },
    };
    if reader.rest.is_empty() { Ok(operation) } else { Err("bytes behind the characteristics") }
}

const CUT: &str = "the characteristics are cut short";

fn boolean(reader: &mut Reader<'_>) -> Result<bool, &'static str> {
    match reader.word().ok_or(CUT)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err("a bool is neither 0 nor 1"),
    }
}

fn spec<'a>(reader: &mut Reader<'a>) -> Result<Spec<'a>, &'static str> {
    let count = usize::try_from(reader.word().ok_or(CUT)?).map_err(|_| CUT)?;
    let start = reader.rest;
    // The count is the peer's: each iteration takes at least eight bytes that are there.
    for _ in 0..count {
        value(reader)?;
    }
    Ok(Spec { bytes: &start[..start.len() - reader.rest.len()], count })
}

fn subset<'a>(reader: &mut Reader<'a>) -> Result<Subset<'a>, &'static str> {
    let count = usize::try_from(reader.word().ok_or(CUT)?).map_err(|_| CUT)?;
    let (words, rest) = count.checked_mul(4).and_then(|n| reader.rest.split_at_checked(n)).ok_or(CUT)?;
    reader.rest = rest;
    Ok(Subset { words })
}

fn value(reader: &mut Reader<'_>) -> Result<Value, &'static str> {
    let which = reader.word().ok_or(CUT)?;
    // The draft, section 2.1: a length that runs past the end of the message is an XDR error, even in an unknown characteristic.
    let data = reader.opaque().ok_or(CUT)?;
    if !matches!(which, RBSIZ | RQREMINV | BRS) {
        return Ok(Value { which, known: None });
    }
    // The draft mentions a length that is too short. One that is too long is refused too: it is not a value of the type.
    let word = data
        .try_into()
        .map(u32::from_be_bytes)
        .map_err(|_| "a characteristic of another length than its type")?;
    let known = Characteristic::of(which, word);
    let known = known.ok_or("a characteristic with a value that its type does not have")?;
    Ok(Value { which, known: Some(known) })
}

impl Characteristic {
    /// The one with this `xcharid` and this word as its value, if there is one.
    pub fn of(which: u32, word: u32) -> Option<Characteristic> {
        Some(match (which, word) {
            (RBSIZ, bytes) => Characteristic::ReceiveSize(bytes),
            (RQREMINV, 0) => Characteristic::RemoteInvalidation(false),
            (RQREMINV, 1) => Characteristic::RemoteInvalidation(true),
            (BRS, 0) => Characteristic::Backward(Backward::Unknown),
            (BRS, 1) => Characteristic::Backward(Backward::None),
            (BRS, 2) => Characteristic::Backward(Backward::SizeLimited),
            (BRS, 3) => Characteristic::Backward(Backward::General),
            _ => return None,
        })
    }

    /// `xcharid`, and the word that is its value.
    pub fn words(self) -> (u32, u32) {
        match self {
            Characteristic::ReceiveSize(bytes) => (RBSIZ, bytes),
            Characteristic::RemoteInvalidation(allowed) => (RQREMINV, allowed.into()),
            Characteristic::Backward(support) => (BRS, support as u32),
        }
    }
}

fn put_value(out: &mut Vec<u8>, value: Characteristic) {
    let (which, word) = value.words();
    put(out, &[which, 4, word]);
}

fn put_spec(out: &mut Vec<u8>, values: &[Characteristic]) {
    put(out, &[values.len() as u32]);
    values.iter().for_each(|value| put_value(out, *value));
}

/// An empty subset has no words; at most 32 places are ever named.
fn put_subset(out: &mut Vec<u8>, places: u32) {
    match places {
        0 => put(out, &[0]),
        _ => put(out, &[1, places]),
    }
}

/// `rdma_optinfo` of an INIT_XCHAR; bit N of `unchanging` is the place N.
pub fn init(start: &[Characteristic], unchanging: u32) -> Vec<u8> {
    let mut out = Vec::new();
    put_spec(&mut out, start);
    put_subset(&mut out, unchanging);
    out
}

/// `rdma_optinfo` of a REQ_XCHAR.
pub fn request(want: &[Characteristic]) -> Vec<u8> {
    let mut out = Vec::new();
    put_spec(&mut out, want);
    out
}

/// `rdma_optinfo` of a RESP_XCHAR to a REQ_XCHAR of at most 32 characteristics, by their places.
pub fn response(done: u32, rejected: u32, pending: u32) -> Vec<u8> {
    let mut out = Vec::new();
    [done, rejected, pending].into_iter().for_each(|places| put_subset(&mut out, places));
    out
}

/// `rdma_optinfo` of an UPD_XCHAR.
pub fn update(now: Characteristic, settled: bool) -> Vec<u8> {
    let mut out = Vec::new();
    put_value(&mut out, now);
    put(&mut out, &[settled.into()]);
    out
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::*;
    use crate::wire::header::{self, Body, Direction, Versions};
    use crate::wire::v2;
    use crate::wire::{Credits, Xid};

    /// XID, direction and kind of a message, what is inside, and all its bytes.
    type Golden = (u32, Direction, Kind, Vec<u8>, Vec<u8>);

    /// One message of each kind.
    fn golden() -> [Golden; 4] {
        let size = Characteristic::ReceiveSize;
        [
            (
                0x1122_3344,
                Direction::Call,
                Kind::Init,
                init(&[size(16384), Characteristic::Backward(Backward::SizeLimited)], 1),
                hex!(
                    "11223344 00000002 00000020 00000005 00000000 00000001 00000024"
                    "00000002 00000001 00000004 00004000 00000003 00000004 00000002 00000001 00000001"
                )
                .to_vec(),
            ),
            (
                0x1122_3345,
                Direction::Call,
                Kind::Request,
                request(&[size(8192)]),
                hex!(
                    "11223345 00000002 00000020 00000005 00000000 00000002 00000010"
                    "00000001 00000001 00000004 00002000"
                )
                .to_vec(),
            ),
            (
                0x1122_3345,
                Direction::Reply,
                Kind::Response,
                response(1, 0, 0),
                hex!(
                    "11223345 00000002 00000020 00000005 00000001 00000003 00000010"
                    "00000001 00000001 00000000 00000000"
                )
                .to_vec(),
            ),
            (
                0x1122_3346,
                Direction::Call,
                Kind::Update,
                update(size(8192), true),
                hex!(
                    "11223346 00000002 00000020 00000005 00000000 00000004 00000010"
                    "00000001 00000004 00002000 00000001"
                )
                .to_vec(),
            ),
        ]
    }

    #[test]
    fn golden_messages_are_encoded_and_decoded() {
        for (xid, direction, kind, info, wanted) in golden() {
            let mut message = Vec::new();
            v2::encode_optional(&mut message, Xid(xid), Credits(32), direction, kind as u32, &info);
            assert_eq!(message, wanted);
            let header = header::decode(&wanted, Versions::TWO).unwrap();
            let Body::Optional { kind: opttype, info: got } = header.body else { panic!("{kind:?}") };
            assert_eq!((header.direction, Kind::of(opttype), got), (Some(direction), Some(kind), &info[..]));
            decode(kind, got).unwrap();
        }
        assert_eq!((Kind::of(0), Kind::of(5)), (None, None));
    }

    #[test]
    fn what_they_say_comes_out_of_them() {
        let [first, second, third, fourth] = golden();
        let Operation::Init { start, unchanging } = decode(Kind::Init, &first.3).unwrap() else { panic!() };
        let known: Vec<_> = start.iter().map(|value| value.known.unwrap()).collect();
        let support = Characteristic::Backward(Backward::SizeLimited);
        assert_eq!(known, [Characteristic::ReceiveSize(16384), support]);
        assert_eq!((start.len(), unchanging.contains(0), unchanging.contains(1)), (2, true, false));
        assert!(!unchanging.contains(32) && !unchanging.contains(usize::MAX));
        let Operation::Request { want } = decode(Kind::Request, &second.3).unwrap() else { panic!() };
        assert_eq!((want.len(), want.is_empty()), (1, false));
        let Operation::Response { done, rejected, pending } = decode(Kind::Response, &third.3).unwrap()
        else {
            panic!()
        };
        assert_eq!((done.contains(0), rejected.contains(0), pending.contains(0)), (true, false, false));
        let Operation::Update { now, settled } = decode(Kind::Update, &fourth.3).unwrap() else { panic!() };
        assert_eq!((now.known, settled), (Some(Characteristic::ReceiveSize(8192)), true));
    }

    #[test]
    fn operations_are_one_readable_line() {
        let lines = golden().map(|(_, _, kind, info, _)| decode(kind, &info).unwrap().to_string());
        assert_eq!(
            lines,
            [
                "INIT_XCHAR [RBSIZ 16384, BRS SZLIM] nochg {0}",
                "REQ_XCHAR [RBSIZ 8192]",
                "RESP_XCHAR done {0} rej {} pend {}",
                "UPD_XCHAR RBSIZ 8192 pendclr",
            ]
        );
    }

    #[test]
    fn unknown_and_experimental_characteristics_are_passed_over_whatever_they_hold() {
        let mut info = Vec::new();
        put(&mut info, &[3, 4, 5, 0x0102_0304, 0x0500_0000, EXPERIMENTAL, 0, 2, 4, 1]);
        let Operation::Request { want } = decode(Kind::Request, &info).unwrap() else { panic!() };
        let values: Vec<_> = want.iter().collect();
        let unknown = |which| Value { which, known: None };
        assert_eq!(values[..2], [unknown(4), unknown(EXPERIMENTAL)]);
        assert_eq!(values[2].known, Some(Characteristic::RemoteInvalidation(true)));
    }

    /// The five kinds of bad value.
    #[test]
    fn a_value_that_is_none_of_its_type_is_an_error() {
        let bad = |words: &[u32]| {
            let mut info = Vec::new();
            put(&mut info, &[1]);
            words.iter().for_each(|word| put(&mut info, &[*word]));
            decode(Kind::Request, &info).unwrap_err()
        };
        assert_eq!(bad(&[4, 100, 0]), CUT, "a length past the end");
        assert!(bad(&[2, 4, 2]).contains("value that its type does not have"), "no bool");
        assert!(bad(&[3, 4, 4]).contains("value that its type does not have"), "no bkrqsup");
        assert!(bad(&[1, 0]).contains("another length"), "too short");
        assert!(bad(&[1, 8, 0, 4096]).contains("another length"), "too long");
        assert_eq!(bad(&[u32::MAX, u32::MAX, 0]), CUT);
    }

    #[test]
    fn messages_cut_short_or_changed_anywhere_are_errors_or_sense() {
        for (_, _, kind, info, _) in golden() {
            for length in 0..info.len() {
                assert!(decode(kind, &info[..length]).is_err(), "{length} bytes of {kind:?}");
            }
            let longer = [&info[..], &[0; 4]].concat();
            assert!(decode(kind, &longer).is_err(), "bytes behind {kind:?}");
            for at in 0..info.len() {
                for byte in 0..=255 {
                    let mut changed = info.clone();
                    changed[at] = byte;
                    if let Ok(Operation::Init { start, .. } | Operation::Request { want: start }) =
                        decode(kind, &changed)
                    {
                        assert_eq!(start.iter().count(), start.len());
                    }
                }
            }
        }
        let absurd = [0xff; 64];
        for kind in [Kind::Init, Kind::Request, Kind::Response, Kind::Update] {
            assert!(decode(kind, &absurd).is_err());
        }
    }
}
