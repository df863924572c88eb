//! Upper-layer bindings: which items of which procedures may travel in chunks of their own (RFC 8166 §6).
//!
//! A binding is two walks over an encoded message, one over the arguments and one over the results of a procedure. A
//! [`Walk`] has a small vocabulary, and every binding is written in it: those of NFS (`nfs`, `nfs4`), those of text files
//! (`text`), and those that a program registers. What a walk marks as an item is eligible; everything else never is.
//!
//! The same walk serves both ends and every stage: an encoder asks whether the opaque that comes next is eligible, a
//! requester how much room the results need, a responder whether what was taken out of a Call was allowed to be, and a
//! requester again where the results belong that came in Write chunks.
//!
//! # Invariants
//! - Positions count from the XID of the unreduced message (RFC 8166 §3.4.5), and no walk reads a byte of an item.
//! - A walk ends after at most as many steps as the message has bytes, whatever lengths stand in it.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, RwLock};

use crate::error::{Error, Kind};

mod nfs;
mod nfs4;
mod text;

/// Longest body of a credential or verifier (RFC 5531 §8.2).
const AUTH_MAX: u32 = 400;

/// Most eligible results that a Call announces; what follows travels with the rest of the reply.
const RESULTS_MAX: usize = 64;

/// The fixed part of an RPC Call (RFC 5531 §9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Program number.
    pub program: u32,
    /// Version number.
    pub version: u32,
    /// Procedure number.
    pub procedure: u32,
    /// Where the arguments begin: behind the verifier.
    pub arguments: usize,
    /// RPCSEC_GSS wraps the arguments (integrity, privacy), or the Call is one of its own: nothing may be reduced.
    pub wrapped: bool,
}

impl Head {
    /// Of a Call, or of any part of it that reaches to the arguments. `None` for what is no Call of RPC version 2.
    pub fn of(call: &[&[u8]]) -> Option<Head> {
        Head::read(&mut Walk::new(call)).ok()
    }

    fn read(walk: &mut Walk<'_>) -> Result<Head, Stop> {
        walk.skip(4)?;
        let (direction, rpc) = (walk.word()?, walk.word()?);
        let (program, version, procedure) = (walk.word()?, walk.word()?, walk.word()?);
        if (direction, rpc) != (0, 2) {
            return Err(Stop::Unknown);
        }
        let flavor = walk.word()?;
        let length = walk.auth_length()?;
        let after = walk.at + length;
        // RFC 8166 §8.2.2.3: "Effectively, no data item is DDP-eligible in this situation", which is integrity or privacy;
        // §8.2.2: "RPC-over-RDMA messages that carry RPCSEC_GSS protocol elements" of its own have no such items.
        let wrapped = flavor == RPCSEC_GSS && {
            // RFC 2203 §5: version, gss_proc, seq_num, service.
            let words = if length >= 16 {
                Some((walk.word()?, walk.word()?, walk.word()?, walk.word()?))
            } else {
                None
            };
            !matches!(words, Some((1, RPCSEC_GSS_DATA, _, RPC_GSS_SVC_NONE)))
        };
        walk.skip(after - walk.at)?;
        walk.word()?;
        let length = walk.auth_length()?;
        walk.skip(length)?;
        Ok(Head { program, version, procedure, arguments: walk.at, wrapped })
    }
}

const RPCSEC_GSS: u32 = 6;
const RPCSEC_GSS_DATA: u32 = 0;
const RPC_GSS_SVC_NONE: u32 = 1;

/// An eligible item in the unreduced stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Of its first byte, behind its length word.
    pub position: usize,
    /// Bytes, without pad.
    pub length: usize,
}

impl Item {
    /// Its bytes in the stream.
    pub fn range(&self) -> Range<usize> {
        self.position..self.position.saturating_add(self.length)
    }
}

/// What a binding says of a Call.
#[derive(Debug, PartialEq, Eq)]
pub struct CallShape {
    /// Eligible arguments in stream order. The last one may lie beyond the end: an encoder asks before it puts it.
    pub items: Vec<Item>,
    /// Eligible results that the reply may hold, in their order: most bytes of each.
    pub results: Vec<usize>,
    /// Most bytes of the results, nothing reduced. `None`: not known.
    pub max_results: Option<usize>,
    /// The walk understood all arguments. If not, there may be items that are not listed.
    pub complete: bool,
}

/// What a binding says of a Reply.
#[derive(Debug, PartialEq, Eq)]
pub struct ReplyShape {
    /// Eligible results in stream order; the last one may lie beyond the end.
    pub items: Vec<Item>,
    /// The walk understood all results.
    pub complete: bool,
}

/// A result that came in a Write chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Index in the Write list.
    pub chunk: usize,
    /// Offset in the reduced message where its bytes and their pad are missing.
    pub at: usize,
    /// Bytes.
    pub length: usize,
}

/// What a binding says of a reduced Reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Reduced {
    /// In stream order.
    pub placed: Vec<Placed>,
    /// A result that is eligible and not empty lies in the stream, although a Write chunk was there for it.
    pub unreduced: bool,
    /// The walk understood all results.
    pub complete: bool,
}

/// Where a binding comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A standard: every peer that speaks the program over RDMA has it.
    BuiltIn,
    /// The program.
    Registered,
    /// A text file.
    Text,
}

/// Why a walk ends before its message is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The stream ends here.
    End,
    /// What follows is not known.
    Unknown,
}

/// The result of one step, and of a walk.
pub type Walked = Result<(), Stop>;

/// Walks the arguments or the results of one procedure, in the order of the wire.
pub type Walker = Box<dyn Fn(&mut Walk<'_>) -> Walked + Send + Sync>;

/// The binding of one procedure.
#[derive(Clone)]
pub struct Binding(Arc<Procedure>);

struct Procedure {
    origin: Origin,
    preset: bool,
    arguments: Walker,
    results: Walker,
}

impl fmt::Debug for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Binding({:?})", self.0.origin)
    }
}

impl Binding {
    /// Where it comes from.
    pub fn origin(&self) -> Origin {
        self.0.origin
    }

    /// Whether the object for the results may be looked at beforehand, for a buffer of the program's own in it.
    pub fn preset(&self) -> bool {
        self.0.preset
    }

    /// Of a Call that reaches to its arguments at least.
    pub fn call(&self, message: &[&[u8]]) -> CallShape {
        let mut walk = Walk::new(message);
        let walked = Head::read(&mut walk).and_then(|_| (self.0.arguments)(&mut walk));
        let bounded = walked.is_ok() && walk.said && !walk.unbounded;
        CallShape {
            items: walk.items,
            results: walk.results,
            max_results: bounded.then_some(walk.most),
            complete: walked.is_ok(),
        }
    }

    /// Of a Reply, whole or as far as it is encoded. One that reports no success has no results.
    pub fn reply(&self, message: &[&[u8]]) -> ReplyShape {
        let mut walk = Walk::new(message);
        let walked = self.walk_reply(&mut walk);
        ReplyShape { items: walk.items, complete: walked.is_ok() }
    }

    /// Of a Reply that a responder has reduced. `chunks`: for each Write chunk of the Call the bytes that came in it, or
    /// `None` if it was offered without segments.
    ///
    /// # Errors
    /// `Peer` when a chunk has bytes that no eligible result accounts for.
    pub fn reduced(&self, message: &[&[u8]], chunks: &[Option<usize>]) -> Result<Reduced, Error> {
        let mut walk = Walk::new(message);
        walk.chunks =
            Some(Chunks { lengths: chunks, next: 0, placed: Vec::new(), unreduced: false, error: None });
        let walked = self.walk_reply(&mut walk);
        let Some(Chunks { placed, unreduced, error, .. }) = walk.chunks else {
            return Err(Error::new(Kind::Panic, "a walk has lost its chunks"));
        };
        if let Some(error) = error {
            return Err(error);
        }
        let used = |chunk: usize| placed.iter().any(|placed| placed.chunk == chunk);
        for (chunk, length) in chunks.iter().enumerate() {
            if length.is_some_and(|length| length > 0) && !used(chunk) {
                let text = "the reply has a result in a Write chunk that is not eligible for one";
                return Err(Error::new(Kind::Peer, text));
            }
        }
        Ok(Reduced { placed, unreduced, complete: walked.is_ok() })
    }

    fn walk_reply(&self, walk: &mut Walk<'_>) -> Walked {
        walk.skip(4)?;
        if walk.word()? != 1 {
            return Err(Stop::Unknown);
        }
        // Denied: no results.
        if walk.word()? != 0 {
            return Ok(());
        }
        walk.word()?;
        let length = walk.auth_length()?;
        walk.skip(length)?;
        // Not SUCCESS: no results.
        if walk.word()? != 0 {
            return Ok(());
        }
        (self.0.results)(walk)
    }
}

/// A walk over one message.
pub struct Walk<'a> {
    /// What is left; the first piece is not empty.
    pieces: Vec<&'a [u8]>,
    left: usize,
    /// Position in the unreduced stream, and bytes of it that are not in `pieces`.
    at: usize,
    missing: usize,
    items: Vec<Item>,
    results: Vec<usize>,
    /// Most bytes of the results; `said` that there is such a bound, and that there is none after all.
    most: usize,
    said: bool,
    unbounded: bool,
    chunks: Option<Chunks<'a>>,
}

/// What came in Write chunks.
struct Chunks<'a> {
    lengths: &'a [Option<usize>],
    /// Belongs to the next eligible result.
    next: usize,
    placed: Vec<Placed>,
    unreduced: bool,
    error: Option<Error>,
}

impl<'a> Walk<'a> {
    fn new(message: &[&'a [u8]]) -> Walk<'a> {
        let pieces: Vec<&[u8]> = message.iter().rev().filter(|piece| !piece.is_empty()).copied().collect();
        let left = pieces.iter().map(|piece| piece.len()).sum();
        Walk {
            pieces,
            left,
            at: 0,
            missing: 0,
            items: Vec::new(),
            results: Vec::new(),
            most: 0,
            said: false,
            unbounded: false,
            chunks: None,
        }
    }

    /// One word: int, unsigned, bool, enum.
    ///
    /// # Errors
    /// As every step: where the stream ends.
    pub fn word(&mut self) -> Result<u32, Stop> {
        let mut bytes = [0; 4];
        if self.left < 4 {
            return Err(Stop::End);
        }
        if let Some(piece) = self.pieces.last_mut()
            && let Some((word, rest)) = piece.split_first_chunk::<4>()
            && !rest.is_empty()
        {
            bytes = *word;
            *piece = rest;
        } else {
            for byte in &mut bytes {
                let piece = self.pieces.last_mut().ok_or(Stop::End)?;
                let (first, rest) = piece.split_first().ok_or(Stop::End)?;
                *byte = *first;
                *piece = rest;
                if rest.is_empty() {
                    self.pieces.pop();
                }
            }
        }
        self.left -= 4;
        self.at += 4;
        Ok(u32::from_be_bytes(bytes))
    }

    /// A hyper.
    ///
    /// # Errors
    /// As [`Walk::word`].
    pub fn hyper(&mut self) -> Result<u64, Stop> {
        Ok(u64::from(self.word()?) << 32 | u64::from(self.word()?))
    }

    /// A fixed opaque of `bytes` bytes, or anything else that is not looked at, with its pad.
    ///
    /// # Errors
    /// As [`Walk::word`].
    pub fn skip(&mut self, bytes: usize) -> Walked {
        let bytes = bytes.checked_next_multiple_of(4).filter(|bytes| *bytes <= self.left).ok_or(Stop::End)?;
        self.left -= bytes;
        self.at += bytes;
        let mut skip = bytes;
        while skip > 0 {
            let piece = self.pieces.last_mut().ok_or(Stop::End)?;
            let part = skip.min(piece.len());
            *piece = &piece[part..];
            skip -= part;
            if piece.is_empty() {
                self.pieces.pop();
            }
        }
        Ok(())
    }

    /// A counted opaque or a string that stays in the message.
    ///
    /// # Errors
    /// As [`Walk::word`].
    pub fn opaque(&mut self) -> Walked {
        let length = self.word()? as usize;
        self.skip(length)
    }

    /// A counted opaque or a string that is eligible.
    ///
    /// # Errors
    /// As [`Walk::word`].
    pub fn item(&mut self) -> Walked {
        let length = self.word()? as usize;
        self.items.push(Item { position: self.at, length });
        if self.came_in_a_chunk(length)? {
            let whole = length.next_multiple_of(4);
            self.at += whole;
            self.missing += whole;
            return Ok(());
        }
        self.skip(length)
    }

    /// Whether the item that begins here is missing in the stream because it came in a Write chunk.
    fn came_in_a_chunk(&mut self, length: usize) -> Result<bool, Stop> {
        let at = self.at - self.missing;
        let Some(chunks) = &mut self.chunks else { return Ok(false) };
        // RFC 8166 §4.3.2.1: "the Responder fills in each Write chunk with one DDP-eligible result until there are either
        // no more DDP-eligible results or no more Write chunks."
        let chunk = chunks.next;
        let Some(came) = chunks.lengths.get(chunk) else { return Ok(false) };
        chunks.next += 1;
        match *came {
            // RFC 8166 §4.3.2.3: an empty Write chunk forces its result inline.
            None => Ok(false),
            Some(0) => {
                chunks.unreduced |= length > 0;
                Ok(false)
            }
            // RFC 8166 §3.4.6.2: "a returned Write chunk's total length MUST be the same as the encoded length of the
            // result data item."
            Some(came) if came == length => {
                chunks.placed.push(Placed { chunk, at, length });
                Ok(true)
            }
            Some(came) => {
                let text = format!("a result of {length} bytes came as {came} bytes in its Write chunk");
                chunks.error.get_or_insert(Error::new(Kind::Peer, text));
                Err(Stop::Unknown)
            }
        }
    }

    /// In arguments: the reply may hold an eligible result of at most `most` bytes, which counts with its length word.
    pub fn result(&mut self, most: usize) {
        if self.results.len() < RESULTS_MAX {
            self.results.push(most);
        }
        self.reply(most.saturating_add(7) & !3);
    }

    /// In arguments: the results have at most `bytes` bytes more.
    pub fn reply(&mut self, bytes: usize) {
        self.said = true;
        self.most = self.most.saturating_add(bytes);
    }

    /// In arguments: nothing bounds the results.
    pub fn unbounded(&mut self) {
        self.unbounded = true;
    }

    /// The length of a credential's or verifier's body.
    fn auth_length(&mut self) -> Result<usize, Stop> {
        let length = self.word()?;
        if length > AUTH_MAX { Err(Stop::Unknown) } else { Ok((length as usize).next_multiple_of(4)) }
    }
}

/// The bindings of a process.
pub struct Registry {
    procedures: RwLock<HashMap<(u32, u32, u32), Binding>>,
}

impl Registry {
    /// Those of NFS (RFC 8267).
    pub fn built_in() -> Registry {
        let mut procedures = HashMap::new();
        let mut add = |program, version, procedure, arguments: Walker, results: Walker| {
            let origin = Origin::BuiltIn;
            let binding = Binding(Arc::new(Procedure { origin, preset: true, arguments, results }));
            procedures.insert((program, version, procedure), binding);
        };
        nfs::add(&mut add);
        nfs4::add(&mut add);
        Registry { procedures: RwLock::new(procedures) }
    }

    /// The binding of a procedure, if it has one.
    pub fn find(&self, program: u32, version: u32, procedure: u32) -> Option<Binding> {
        let procedures = self.procedures.read().unwrap_or_else(|e| e.into_inner());
        procedures.get(&(program, version, procedure)).cloned()
    }

    /// Adds the procedures of a text; a later text may change those of an earlier one. Returns what is wrong with the
    /// lines that were left out: "NAME:LINE: reason".
    pub fn add_text(&self, name: &str, text: &str) -> Vec<String> {
        let (procedures, mut errors) = text::parse(name, text);
        let mut known = self.procedures.write().unwrap_or_else(|e| e.into_inner());
        for text::Entry { place, key, preset, arguments, results } in procedures {
            if known.get(&key).is_some_and(|binding| binding.origin() != Origin::Text) {
                let (program, version, procedure) = key;
                errors.push(format!(
                    "{place}: program {program} version {version} procedure {procedure} has a binding that text cannot change"
                ));
                continue;
            }
            let origin = Origin::Text;
            known.insert(key, Binding(Arc::new(Procedure { origin, preset, arguments, results })));
        }
        errors
    }

    /// Adds a procedure of a program.
    ///
    /// # Errors
    /// `Invalid` when it has a binding that is built in or was added before. One of a text is replaced.
    pub fn add(
        &self,
        program: u32,
        version: u32,
        procedure: u32,
        arguments: Walker,
        results: Walker,
    ) -> Result<(), Error> {
        let key = (program, version, procedure);
        let mut known = self.procedures.write().unwrap_or_else(|e| e.into_inner());
        if known.get(&key).is_some_and(|binding| binding.origin() != Origin::Text) {
            let text =
                format!("program {program} version {version} procedure {procedure} has a binding already");
            return Err(Error::new(Kind::Invalid, text));
        }
        let origin = Origin::Registered;
        known.insert(key, Binding(Arc::new(Procedure { origin, preset: true, arguments, results })));
        Ok(())
    }
}
