//! Upper-layer bindings: which opaque items of which procedures may be placed directly, and how long replies can get.
//!
//! Owns the registry of bindings and [`Walk`], the one vocabulary in which all of them are written: those
//! built in (`nfs`, `nfs4`), those of text files (`text`), those of C programs. A binding is a function
//! over the encoded message and not a table of offsets, because a COMPOUND or an arm of a union can be
//! described no other way. Leaves to `connection` what is then done: which of the eligible items become chunks, and what happens
//! to a message that breaks the rules.
//!
//! A message is the concatenation of its pieces, position 0 being the XID: no transport header.
//!
//! # Invariants
//! - What no binding names is not eligible.
//! - A walk ends where the bytes end. It trusts no count: every loop consumes bytes in each round.
//! - A walk over the beginning of a message finds the items that a walk over all of it finds there.
//!
//! Read first: RFC 8166 §6 and §4.3.2, RFC 8267.
#![forbid(unsafe_code)]

use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use once_cell::race::OnceBox;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::error::{Error, Kind};

mod nfs;
mod nfs4;
mod text;

const CALL: u32 = 0;
const RPC_VERSION: u32 = 2;
/// The flavour of RFC 2203 §5.
const RPCSEC_GSS: u32 = 6;

/// The fixed part of an RPC Call (RFC 5531 §9).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Head {
    pub program: u32,
    pub version: u32,
    pub procedure: u32,
    /// Where the arguments begin: after the verifier.
    pub arguments: usize,
    /// RPCSEC_GSS wraps the arguments (integrity, privacy) or the Call is one of its own (not RPCSEC_GSS_DATA):
    /// nothing may be reduced, in the Call or in its reply.
    pub wrapped: bool,
}

impl Head {
    /// The head of a whole Call, or of any part of it that reaches to the arguments. `None`: not a Call of RPC version 2, too
    /// short, or with more than the 400 bytes of credential or verifier that RFC 5531 §8.2 allows.
    pub fn of(call: &[&[u8]]) -> Option<Head> {
        Head::walk(&mut Walk::new(call)).ok()
    }

    /// Program, version, procedure, and flavour of the credential, which lie in the same place in every Call: for most Calls no
    /// more is needed. `None` for what is not a Call of RPC version 2, or does not have all of this in its first piece.
    pub fn names(first: &[u8]) -> Option<[u32; 4]> {
        let words = first.first_chunk::<28>()?;
        let word = |n: usize| {
            u32::from_be_bytes([words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3]])
        };
        (word(1) == CALL && word(2) == RPC_VERSION).then(|| [word(3), word(4), word(5), word(6)])
    }

    /// Reads the head, and leaves the walk at the arguments.
    fn walk(walk: &mut Walk<'_>) -> Result<Head, Stop> {
        walk.word()?;
        if walk.word()? != CALL || walk.word()? != RPC_VERSION {
            return Err(Stop::Unknown);
        }
        let [program, version, procedure, flavor] = [walk.word()?, walk.word()?, walk.word()?, walk.word()?];
        let wrapped = credential_wraps(walk, flavor)?;
        walk.skip(4)?;
        authenticator(walk)?;
        Ok(Head { program, version, procedure, arguments: walk.position, wrapped })
    }
}

/// Walks over the body of a credential. Returns whether it says that the arguments are wrapped (RFC 2203 §5).
fn credential_wraps(walk: &mut Walk<'_>, flavor: u32) -> Result<bool, Stop> {
    const VERSION_1: u32 = 1;
    const DATA: u32 = 0;
    const SERVICE_NONE: u32 = 1;
    if flavor != RPCSEC_GSS {
        return authenticator(walk).map(|()| false);
    }
    let mut body = walk.clone();
    authenticator(walk)?;
    // The body is read only as far as it reaches: a shorter one is not a plain RPCSEC_GSS credential.
    let length = body.word()?;
    if length < 16 {
        return Ok(true);
    }
    let [version, procedure, _sequence, service] = [body.word()?, body.word()?, body.word()?, body.word()?];
    // RFC 8166 §8.2.2.3: "a sender MUST NOT reduce a Payload stream when RPCSEC_GSS integrity or encryption
    // services are in use."
    Ok((version, procedure, service) != (VERSION_1, DATA, SERVICE_NONE))
}

/// Walks over the body of a credential or verifier.
fn authenticator(walk: &mut Walk<'_>) -> Walked {
    // RFC 5531 §8.2: "opaque body<400>".
    const MAX: usize = 400;
    if walk.counted()? > MAX { Err(Stop::Unknown) } else { Ok(()) }
}

/// An eligible item in the unreduced stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Position of its first byte, after its length word: a multiple of 4.
    pub position: usize,
    /// Bytes, without pad. Items of no bytes are listed too: in replies they count when chunks are matched.
    pub length: usize,
}

impl Item {
    /// Its bytes in the stream.
    pub fn range(&self) -> Range<usize> {
        self.position..self.position.saturating_add(self.length)
    }
}

/// What a Call's binding says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// In stream order; the last one's bytes may not be there yet (a Call that is being encoded).
    pub items: Vec<Item>,
    /// Eligible results that the reply may hold, in their order: most bytes of each.
    pub results: Vec<usize>,
    /// Most bytes of the results (after the reply's header), unreduced, pads included. `None`: not bounded by the arguments.
    pub max_results: Option<usize>,
    /// Whether the walk understood all of the arguments. If not, items may exist that are not listed.
    pub complete: bool,
}

/// What a binding says about a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyShape {
    /// In stream order; the last one's bytes may not be there yet.
    pub items: Vec<Item>,
    /// Whether the walk understood all of the results. If not, items may exist that are not listed.
    pub complete: bool,
}

/// An eligible result that came in a Write chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Index in the Write list.
    pub chunk: usize,
    /// Offset in the reduced message where its bytes (and pad) are missing.
    pub at: usize,
    /// Bytes, without pad: what the length word says and the responder wrote.
    pub length: usize,
}

/// A reduced reply, its results matched with Write chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reduced {
    /// In stream order.
    pub placed: Vec<Placed>,
    /// An eligible, non-empty result lies in the stream although a non-empty Write chunk was there for it: a
    /// violation (RFC 8166 §6.1), or a responder without this binding.
    pub unreduced: bool,
    /// Whether the walk understood all of the results.
    pub complete: bool,
}

/// Who says what a procedure's binding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This library.
    BuiltIn,
    /// The program, by a call.
    Registered,
    /// A text file.
    Text,
}

/// Walks the arguments or results of one procedure.
pub type Walker = Box<dyn Fn(&mut Walk<'_>) -> Walked + Send + Sync>;

/// How a walk, or a step of it, ended.
pub type Walked = Result<(), Stop>;

/// Why nothing more is said about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The bytes end here.
    End,
    /// What follows is not known.
    Unknown,
}

/// The binding of one procedure.
#[derive(Clone)]
pub struct Binding(Arc<Procedure>);

struct Procedure {
    origin: Origin,
    preset: bool,
    arguments: Walker,
    results: Walker,
}

impl Binding {
    /// Who gave it.
    pub fn origin(&self) -> Origin {
        self.0.origin
    }

    /// Whether the results object that a program passes may be looked at beforehand for a buffer of its own.
    pub fn preset(&self) -> bool {
        self.0.preset
    }

    /// What may be reduced in a Call, and what its reply may be like. Nothing, in a Call that is
    /// [wrapped](Head::wrapped).
    pub fn call(&self, message: &[&[u8]]) -> CallShape {
        let mut walk = Walk::new(message);
        let walked = match Head::walk(&mut walk) {
            // Only the arguments' walker says something, and about a wrapped Call there is nothing to say.
            Ok(head) if head.wrapped => Ok(()),
            Ok(_) => (self.0.arguments)(&mut walk),
            Err(stop) => Err(stop),
        };
        let complete = walked.is_ok();
        let max_results = walk.most.filter(|_| complete && !walk.unbounded);
        CallShape { items: walk.items, results: walk.results, max_results, complete }
    }

    /// What may be reduced in a reply, or in the part of it that exists so far. Not for the reply to a Call that is
    /// [wrapped](Head::wrapped), which looks no different. A reply without results has no items and is complete.
    pub fn reply(&self, message: &[&[u8]]) -> ReplyShape {
        let mut walk = Walk::new(message);
        let complete = self.walk_reply(&mut walk).is_ok();
        ReplyShape { items: walk.items, complete }
    }

    /// Matches the results of a reduced reply with the Write chunks of the Call. `chunks` has `None` for each chunk to which the
    /// Call gave no segments (an "empty" chunk); otherwise the bytes that the responder says it wrote.
    ///
    /// # Errors
    /// `Peer` for a chunk with bytes that belongs to no eligible result or has another length: the responder reduced what is not
    /// eligible, or wrote another number of bytes than the reply says.
    pub fn reduced(&self, message: &[&[u8]], chunks: &[Option<usize>]) -> Result<Reduced, Error> {
        let mut walk = Walk::new(message);
        walk.chunks =
            Some(Chunks { written: chunks, next: 0, placed: Vec::new(), unreduced: false, mismatch: None });
        let complete = self.walk_reply(&mut walk).is_ok();
        let chunks = walk.chunks.take().unwrap_or_default();
        let wrong = |text: String| Err(Error::new(Kind::Peer, text));
        if let Some((written, length)) = chunks.mismatch {
            let index = chunks.next;
            return wrong(format!(
                "the server placed {written} bytes in Write chunk {index} for a result of {length}"
            ));
        }
        // RFC 8166 §6.1: "A Responder reduces a non-DDP-eligible result data item.  The Requester MUST
        // terminate the pending RPC transaction"
        let left = chunks.written.iter().enumerate().skip(chunks.next);
        if let Some((index, written)) = left.filter_map(|(i, w)| w.map(|w| (i, w))).find(|&(_, w)| w > 0) {
            return wrong(format!(
                "the server placed {written} bytes in Write chunk {index}, which belongs to no eligible result"
            ));
        }
        Ok(Reduced { placed: chunks.placed, unreduced: chunks.unreduced, complete })
    }

    fn walk_reply(&self, walk: &mut Walk<'_>) -> Walked {
        const REPLY: u32 = 1;
        const MSG_ACCEPTED: u32 = 0;
        const SUCCESS: u32 = 0;
        walk.word()?;
        if walk.word()? != REPLY {
            return Err(Stop::Unknown);
        }
        if walk.word()? != MSG_ACCEPTED {
            return Ok(());
        }
        walk.word()?;
        authenticator(walk)?;
        if walk.word()? != SUCCESS { Ok(()) } else { (self.0.results)(walk) }
    }
}

/// All bindings of a process.
///
/// There is no lock: calls look here, and a lock that another thread held at a fork(2) would be held for ever in the child. A new
/// binding is appended to one of several chains, and the last one given for a procedure counts. A call looks at one chain only: a
/// program may add a binding for each of a thousand procedures.
pub struct Registry {
    built_in: FxHashMap<Key, Binding>,
    /// A bit for each program that has a binding; other programs may share it. Most calls are for a program without one.
    programs: AtomicU64,
    chains: [Chain; CHAINS],
}

/// Program, version and procedure.
type Key = (u32, u32, u32);

/// The first entry of a chain.
type Chain = OnceBox<Said>;

/// A binding that was given for one procedure.
struct Said {
    key: Key,
    binding: Binding,
    next: Chain,
}

const CHAINS: usize = 64;

/// The bit of a program in [`Registry::programs`].
#[inline]
fn bit(program: u32) -> u64 {
    // By the upper bits of a product: related programs differ in their lower bits.
    1 << (program.wrapping_mul(0x9e37_79b9) >> 26)
}

fn said(chain: &Chain) -> impl Iterator<Item = &Said> {
    std::iter::successors(chain.get(), |said| said.next.get())
}

/// Program, version and procedure of each line of a text that is understood.
pub fn procedures(text: &str) -> Vec<(u32, u32, u32)> {
    text::parse("", text).0.into_iter().map(|(key, _)| key).collect()
}

impl Registry {
    /// Every procedure of NFS version 2, 3 and 4, of NFSACL and of the NFSv4.0 callbacks.
    pub fn built_in() -> Registry {
        let procedures = nfs::procedures().map(|(program, version, row)| {
            let binding = Procedure {
                origin: Origin::BuiltIn,
                preset: true,
                arguments: Box::new(row.arguments),
                results: Box::new(row.results),
            };
            ((program, version, row.number), Binding(Arc::new(binding)))
        });
        let built_in: FxHashMap<Key, Binding> = procedures.collect();
        let programs = built_in.keys().fold(0, |all, (program, ..)| all | bit(*program));
        let chains = [const { OnceBox::new() }; CHAINS];
        Registry { built_in, programs: AtomicU64::new(programs), chains }
    }

    /// The binding of a procedure, if it has one.
    pub fn find(&self, program: u32, version: u32, procedure: u32) -> Option<Binding> {
        if self.programs.load(Acquire) & bit(program) == 0 {
            return None;
        }
        let key = (program, version, procedure);
        let added = said(self.chain(key)).filter(|said| said.key == key).last();
        added.map(|said| &said.binding).or_else(|| self.built_in.get(&key)).cloned()
    }

    fn chain(&self, key: Key) -> &Chain {
        &self.chains[FxBuildHasher.hash_one(key) as usize % CHAINS]
    }

    /// Appends a binding to the others, unless `refused` because of what these say.
    fn append(&self, key: Key, binding: Procedure, refused: impl Fn() -> Option<Error>) -> Result<(), Error> {
        self.programs.fetch_or(bit(key.0), AcqRel);
        let chain = self.chain(key);
        let mut fresh = Box::new(Said { key, binding: Binding(Arc::new(binding)), next: OnceBox::new() });
        loop {
            let end = said(chain).last().map_or(chain, |said| &said.next);
            if let Some(error) = refused() {
                return Err(error);
            }
            match end.set(fresh) {
                Ok(()) => return Ok(()),
                // Another thread was faster.
                Err(back) => fresh = back,
            }
        }
    }

    /// Whether a Call that begins with this has neither a binding nor a credential of RPCSEC_GSS: then there is nothing to find
    /// out about it.
    pub fn leaves_alone(&self, first: Option<&[u8]>) -> bool {
        first.and_then(Head::names).is_some_and(|[program, version, procedure, flavor]| {
            flavor != RPCSEC_GSS && self.find(program, version, procedure).is_none()
        })
    }

    /// Whether any procedure of the program has a binding.
    pub fn knows(&self, program: u32, version: u32) -> bool {
        let added = self.chains.iter().flat_map(said).map(|said| &said.key);
        self.built_in.keys().chain(added).any(|(one, other, _)| (*one, *other) == (program, version))
    }

    /// Adds the procedures of a text in the form of rpcrdma-bindings(5); returns why the other lines are not understood, each as
    /// "NAME:LINE:COLUMN: reason". Replaces earlier bindings of a procedure, whether from other texts or from the program.
    pub fn add_text(&self, name: &str, text: &str) -> Vec<String> {
        let (entries, errors) = text::parse(name, text);
        for (key, procedure) in entries {
            let unrefused = self.append(key, procedure, || None);
            debug_assert!(unrefused.is_ok());
        }
        errors
    }

    /// Adds a procedure of the program's own; replaces what a text said about it.
    ///
    /// # Errors
    /// `Invalid` for a program whose binding is built in, and for a procedure that was added before.
    pub fn add(
        &self,
        program: u32,
        version: u32,
        procedure: u32,
        arguments: Walker,
        results: Walker,
    ) -> Result<(), Error> {
        if let Some(reason) = reserved(program) {
            let text = format!("no binding can be added for program {program}: {reason}");
            return Err(Error::new(Kind::Invalid, text));
        }
        let binding = Procedure { origin: Origin::Registered, preset: true, arguments, results };
        self.append((program, version, procedure), binding, || {
            let there = self.find(program, version, procedure)?;
            let text =
                format!("program {program} version {version} procedure {procedure} already has a binding");
            (there.origin() == Origin::Registered).then(|| Error::new(Kind::Invalid, text))
        })
    }
}

/// Why nobody can add a binding for a program.
fn reserved(program: u32) -> Option<&'static str> {
    match program {
        0 => Some("there is no such program"),
        100_000 => Some("rpcbind is not reached over rdma"),
        nfs::NFS | nfs::NFSACL | nfs::CALLBACK => Some("its binding is built in"),
        _ => None,
    }
}

/// A walk over a message, and what is found on the way.
#[derive(Clone)]
pub struct Walk<'a> {
    /// What is left of the piece that the walk has come to.
    piece: &'a [u8],
    /// The pieces after it.
    rest: &'a [&'a [u8]],
    /// Bytes walked over: the position in the message as it is given.
    position: usize,
    items: Vec<Item>,
    results: Vec<usize>,
    /// Most bytes of the results, as far as is known; `None`: nothing was said about them.
    most: Option<usize>,
    unbounded: bool,
    /// In a reduced reply, the chunks that its items are matched with.
    chunks: Option<Chunks<'a>>,
}

/// Write chunks while results are matched with them.
#[derive(Clone, Default)]
struct Chunks<'a> {
    written: &'a [Option<usize>],
    /// The chunk of the next eligible result.
    next: usize,
    placed: Vec<Placed>,
    unreduced: bool,
    /// Bytes written into `next`, and the result's.
    mismatch: Option<(usize, usize)>,
}

impl<'a> Walk<'a> {
    /// An XDR word: int, unsigned, bool, enum, a count.
    #[inline]
    pub fn word(&mut self) -> Result<u32, Stop> {
        self.bytes().map(u32::from_be_bytes)
    }

    /// An XDR hyper.
    pub fn hyper(&mut self) -> Result<u64, Stop> {
        self.bytes().map(u64::from_be_bytes)
    }

    /// A fixed opaque or any number of bytes, rounded up to whole words as XDR does.
    pub fn skip(&mut self, bytes: usize) -> Walked {
        let mut left = padded(bytes);
        while left > 0 {
            self.next_piece()?;
            let here = left.min(self.piece.len());
            self.piece = &self.piece[here..];
            self.position += here;
            left -= here;
        }
        Ok(())
    }

    /// A counted opaque or string that is not eligible.
    pub fn opaque(&mut self) -> Walked {
        self.counted().map(drop)
    }

    /// A counted opaque or string that is eligible.
    pub fn item(&mut self) -> Walked {
        let length = self.word()? as usize;
        match &mut self.chunks {
            Some(chunks) => {
                if chunks.take(self.position, length)? {
                    return Ok(());
                }
            }
            None if self.items.len() == MAX_ITEMS => return Err(Stop::Unknown),
            None => self.items.push(Item { position: self.position, length }),
        }
        self.skip(length)
    }

    /// In arguments: the reply may hold an eligible result of at most `most` bytes. Also says that the results have that many
    /// more bytes, plus length word and pad.
    pub fn result(&mut self, most: usize) {
        if self.results.len() < MAX_RESULTS {
            self.results.push(most);
        }
        self.reply(padded(most).saturating_add(4));
    }

    /// In arguments: the results have at most `bytes` more.
    pub fn reply(&mut self, bytes: usize) {
        self.most = Some(self.most.unwrap_or(0).saturating_add(bytes));
    }

    /// In arguments: the results are not bounded by the arguments.
    pub fn unbounded(&mut self) {
        self.unbounded = true;
    }

    fn new(message: &'a [&'a [u8]]) -> Walk<'a> {
        Walk {
            piece: &[],
            rest: message,
            position: 0,
            items: Vec::new(),
            results: Vec::new(),
            most: None,
            unbounded: false,
            chunks: None,
        }
    }

    /// A counted opaque; returns its bytes without pad.
    fn counted(&mut self) -> Result<usize, Stop> {
        let length = self.word()? as usize;
        self.skip(length)?;
        Ok(length)
    }

    /// A counted array; returns the number of its elements, each of which consumes bytes.
    fn list(&mut self, element: fn(&mut Self) -> Walked) -> Result<usize, Stop> {
        let count = self.word()?;
        for _ in 0..count {
            element(self)?;
        }
        Ok(count as usize)
    }

    #[inline]
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let Some((here, behind)) = self.piece.split_first_chunk() else { return self.split_bytes() };
        self.piece = behind;
        self.position += N;
        Ok(*here)
    }

    /// Bytes that lie in the next piece, or in several.
    fn split_bytes<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        if self.piece.is_empty() {
            self.next_piece()?;
            if let Some((here, behind)) = self.piece.split_first_chunk() {
                self.piece = behind;
                self.position += N;
                return Ok(*here);
            }
        }
        let mut bytes = [0; N];
        for byte in &mut bytes {
            self.next_piece()?;
            (*byte, self.piece) = (self.piece[0], &self.piece[1..]);
            self.position += 1;
        }
        Ok(bytes)
    }

    /// Moves on to a piece that has bytes.
    fn next_piece(&mut self) -> Walked {
        while self.piece.is_empty() {
            (self.piece, self.rest) = self.rest.split_first().ok_or(Stop::End)?;
        }
        Ok(())
    }
}

impl Chunks<'_> {
    /// Whether the result of `length` bytes whose place is `at` came in a chunk and not in the stream.
    fn take(&mut self, at: usize, length: usize) -> Result<bool, Stop> {
        match self.written.get(self.next) {
            // More results than chunks.
            None => return Ok(false),
            // RFC 8166 §4.3.2.3: "The Responder MUST return the corresponding result data item inline"
            Some(None) => {}
            Some(Some(0)) => self.unreduced |= length > 0,
            // A result of no bytes uses up its chunk, but there are servers that keep it for the next one.
            Some(Some(_)) if length == 0 => return Ok(false),
            Some(&Some(written)) if written == length => {
                self.placed.push(Placed { chunk: self.next, at, length });
                self.next += 1;
                return Ok(true);
            }
            Some(&Some(written)) => {
                self.mismatch = Some((written, length));
                return Err(Stop::Unknown);
            }
        }
        self.next += 1;
        Ok(false)
    }
}

/// `bytes`, and the pad that makes whole words of them (RFC 4506 §3).
fn padded(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(4).unwrap_or(usize::MAX)
}

/// Most eligible items that are listed for one message: more than any peer sends, and few enough to be held.
const MAX_ITEMS: usize = 1024;

/// Eligible results that one Call announces; further ones come in the stream.
const MAX_RESULTS: usize = 64;

/// One row of a table of procedures or operations that is built in.
struct Row {
    number: u32,
    arguments: fn(&mut Walk<'_>) -> Walked,
    results: fn(&mut Walk<'_>) -> Walked,
}

const fn row(
    number: u32,
    arguments: fn(&mut Walk<'_>) -> Walked,
    results: fn(&mut Walk<'_>) -> Walked,
) -> Row {
    Row { number, arguments, results }
}

/// Arguments or results with nothing eligible, which need not be walked over.
fn nothing(_: &mut Walk<'_>) -> Walked {
    Ok(())
}

/// Arguments of `bytes` with nothing eligible, and at most `results` bytes of results.
fn fixed(walk: &mut Walk<'_>, bytes: usize, results: usize) -> Walked {
    walk.skip(bytes)?;
    walk.reply(results);
    Ok(())
}

/// Most bytes of the pathname of a symbolic link. From version 3 on the protocols set no limit; this is PATH_MAX of the systems
/// that we know, which resolve no longer one.
const PATH: usize = 4096;

#[cfg(test)]
mod tests;
