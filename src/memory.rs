//! Memory that a device reads and writes: its type says who may touch it.
//!
//! Three types wrap one reference-counted block:
//!
//! - [`Buf`]: owned by the CPU, exclusive, `Deref<[u8]>`, can grow;
//! - [`Sink`]: handed to a device, which may write it at any moment; its bytes cannot be reached;
//! - [`Region`]: frozen; the CPU and the device read it, nobody writes it.
//!
//! `Buf -> Sink` gives the memory to the device; `Sink -> Buf` is possible only for the last holder, so a
//! provider that still holds a clone (a posted Receive, an exposed handle, a half-placed message) keeps the bytes
//! out of reach. `Buf -> Region` freezes. Nothing parses bytes of a `Sink`.
//!
//! A block comes from a [`Pool`] and goes back to it when its last holder is dropped, so no completion is needed
//! to recycle a sent message. Blocks are anonymous mappings made with MAP_NORESERVE: untouched pages cost nothing.
//!
//! **Reply chunks** count only as far as the peer has written into them: what is exposed but not written is mere address space,
//! so calls to a server that hangs take no room from others. An adapter locks them and writes unseen, so there they count whole.
//! A call waits while [`AREAS_MAX`] bytes count in the process, unless nothing of its own connection counts
//! ([`Memory::has_room`]). This alone does not bound a server that fills what calls under way have exposed: such a server is cut
//! off when it holds more than its share and the process far more than that limit ([`Memory::is_flooded`]).
//!
//! **Pulled Calls** count as far as their bytes have been asked for, one RDMA Read at a time: nobody can send more than that, and
//! what a peer only announces is mere address space too. A quarter of the limit is kept for Calls up to 1 MiB, and one peer may
//! take half of the rest, so that neither long Calls nor one peer take everything. The oldest Call of a connection may take the
//! lead when no other has it, and go on beyond the limit: once whole, it gives back what it holds ([`Memory::may_pull`]). The
//! driver says whose turn it is to be pulled: its [`Pass`] goes with the block.
//!
//! **Receives** of a device that needs no memory beforehand get it when a message begins to arrive, and a message longer than a
//! page counts as far as it has arrived ([`Memory::receive`]). While [`RECEIVES_MAX`] bytes count, a connection that holds more
//! than its share serves what it has before it reads on ([`Memory::is_full`]); one that can only wait is closed when the process
//! holds far more than that ([`Memory::is_flooded`]).
//!
//! Blocks for Reply chunks remember which connection has written them: the next connection gets them with zeros in place of what
//! was written, so that no server can pass off another's reply as its own by claiming bytes that it has not written.
//!
//! A device that must know its memory beforehand gets it from [`Slabs`], one mapping cut into blocks of one length, and Reply
//! chunks from [`Areas`].
//!
//! Memory of the program takes the same forms for a while: [`Region::lend`] and [`Sink::lend`] wrap it, and a [`Loan`] tells when
//! nobody refers to it any more. It never becomes a `Buf`, which could grow.
//!
//! # Invariants
//! - A `Buf` is the only holder of its block, which is ours.
//! - `start + len <= capacity` of the block, always.
//! - While a block has a `Sink`, no slice of it exists.
//! - A `Loan` is never another holder of its block.
#![allow(unsafe_code)]

pub mod areas;
mod message;
pub mod pins;
mod pool;
pub mod registered;
pub mod shared;

#[cfg(feature = "verbs")]
pub use areas::Area;
pub use areas::Areas;
pub use message::{Message, Pieces};
#[cfg(test)]
pub(crate) use pool::ration;
pub use pool::{Pool, SERIES, Slabs};

use pool::{Home, PAGE, RawBlock, round_up};
use shared::{Own, Shown};

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, Ordering::Relaxed, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::SmallVec;

use crate::{fork, stats};

/// The pools of a device. Software devices share one set in the process.
#[derive(Clone)]
pub struct Memory {
    slabs: Option<Arc<Slabs>>,
    known_areas: Option<Arc<Areas>>,
    slab: Arc<Pool>,
    header: Arc<Pool>,
    message: Arc<Pool>,
    areas: Arc<Pool>,
    /// Unique number of the connection; 0: of none.
    writer: u64,
    /// Bytes of Reply chunks that count: of the process, and of the connection.
    exposed: Arc<Held>,
    own: Arc<Held>,
    /// The longest Reply chunk of the connection so far.
    longest: Arc<AtomicUsize>,
    /// Bytes of long messages in Receives: of the process, and of the connection.
    received: Arc<Held>,
    own_received: Arc<Held>,
    /// Bytes of pulled Calls: of the process, and of all connections of the peer.
    staged: Arc<Held>,
    peer: Arc<Held>,
    peers: &'static fork::Lock<HashMap<IpAddr, Weak<Held>>>,
    staging_max: usize,
}

impl Memory {
    /// Pools for Receives of at most `receive` bytes and Reply chunks of `reply` bytes; at most `staging_max` bytes of Calls are
    /// pulled at a time, plus one Call that may always go on.
    pub fn new(receive: usize, reply: usize, staging_max: usize) -> Arc<Memory> {
        let slab = |bytes: usize| Pool::new(bytes, bytes, (SLABS_WARM / bytes).clamp(1, SLABS_IDLE));
        let receives = slab(round_up(receive.max(1)));
        Arc::new(Memory {
            slabs: None,
            known_areas: None,
            // A peer that takes none of its answers makes us hold many headers: a page each, however long the Receives are.
            header: if receives.capacity == PAGE { receives.clone() } else { slab(PAGE) },
            slab: receives,
            message: Pool::new(MESSAGE, WARM, 8),
            areas: Pool::new(reply.max(AREA), WARM, 8),
            writer: 0,
            exposed: Arc::default(),
            own: Arc::default(),
            longest: Arc::default(),
            received: Arc::default(),
            own_received: Arc::default(),
            staged: Arc::default(),
            peer: Arc::default(),
            // Leaked, as the process has only one of these.
            peers: Box::leak(Box::new(fork::Lock::new())),
            staging_max,
        })
    }

    /// The same memory for connections with this peer, which together get a part of it.
    pub fn of_peer(&self, peer: Option<IpAddr>) -> Arc<Memory> {
        let Some(peer) = peer else { return Arc::new(Memory { peer: Arc::default(), ..self.clone() }) };
        // A host that has one IPv6 address has the others of its network too.
        let key = match peer.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
            address => address,
        };
        let mut peers = self.peers.lock();
        if peers.len() == peers.capacity() {
            peers.retain(|_, held| held.strong_count() > 0);
        }
        let held = peers.get(&key).and_then(Weak::upgrade).unwrap_or_else(|| {
            let held = Arc::default();
            peers.insert(key, Arc::downgrade(&held));
            held
        });
        Arc::new(Memory { peer: held, ..self.clone() })
    }

    /// The same memory for one connection, whose device may know `slabs` and `known_areas`.
    pub fn connection(&self, slabs: Option<Arc<Slabs>>, known_areas: Option<Arc<Areas>>) -> Arc<Memory> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if let Some(slabs) = &slabs {
            slabs.larger.get_or_init(|| self.message.clone());
        }
        let writer = NEXT.fetch_add(1, Relaxed);
        let (own, longest, own_received) = (Arc::default(), Arc::default(), Arc::default());
        Arc::new(Memory { slabs, known_areas, writer, own, longest, own_received, ..self.clone() })
    }

    /// A block for one Receive: one that the device knows, if any is left.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn slab(&self) -> io::Result<Buf> {
        self.known().map_or_else(|| self.slab.take(), Ok)
    }

    /// A block for a Receive of `bytes` bytes, into which a message of at most `most` bytes is beginning to arrive. The block may
    /// be shorter than the Receive, but not than `most`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn receive(&self, bytes: usize, most: usize) -> io::Result<Sink> {
        // Most messages are short: credits bound their number well enough, and a page holds each.
        if most <= PAGE {
            return Ok(self.header.take()?.into_sink(bytes.min(PAGE)));
        }
        let mut buf = self.slab.take()?;
        buf.reserve(bytes)?;
        buf.charge(Charge::new(&self.received, &self.own_received, true));
        Ok(buf.into_sink(bytes))
    }

    /// A block for one header, or for a message no longer than that; it grows.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn header(&self) -> io::Result<Buf> {
        self.known().map_or_else(|| self.header.take(), Ok)
    }

    /// A block for one message; it grows. There is room for a header in front.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn message(&self) -> io::Result<Buf> {
        let (mut buf, start) = match self.known() {
            Some(known) => (known, HEADER_MIN),
            None => (self.message.take()?, HEADER),
        };
        buf.start = start;
        Ok(buf)
    }

    fn known(&self) -> Option<Buf> {
        self.slabs.as_ref().and_then(Slabs::take)
    }

    /// A block for `len` bytes of a pulled Call; the block keeps `pass`. It counts as nothing yet: see [`Memory::may_pull`].
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn staging(&self, len: usize, pass: Option<Pass>) -> io::Result<Sink> {
        let mut buf = self.message.take()?;
        buf.reserve(len)?;
        let mut charge = Charge::new(&self.staged, &self.peer, false);
        charge.pass = pass;
        buf.charge(charge);
        Ok(buf.into_sink(len))
    }

    /// Whether `bytes` more bytes may be asked for, to arrive in this block of `staging`; they count from then on, until the
    /// block is released. `first`: no other Call keeps this one from being served once it is whole.
    pub fn may_pull(&self, staging: &Sink, bytes: usize, first: bool) -> bool {
        let Some(charge) = staging.block.charge.as_ref().map(Charge::here) else { return true };
        if charge.leads.load(Relaxed) {
            return true;
        }
        let (most, of_peer) = self.pull_limits(staging.len <= SHORT);
        if self.staged.add(bytes, most) {
            if self.peer.add(bytes, of_peer) {
                charge.bytes.fetch_add(bytes, Relaxed);
                return true;
            }
            self.staged.sub(bytes);
        }
        // Partly received Calls could wait for one another for ever: so one of them goes on, and what it takes beyond the limit
        // takes no room from others.
        let leads = first && !self.staged.here().led.swap(true, Relaxed);
        charge.leads.fetch_or(leads, Relaxed);
        leads
    }

    /// Whether Calls of others may have to wait for memory that this peer's Calls hold.
    pub fn is_crowded(&self) -> bool {
        let (most, of_peer) = self.pull_limits(false);
        self.staged.bytes().saturating_add(SHORT) > most || self.peer.bytes().saturating_add(SHORT) > of_peer
    }

    /// Bytes of Calls that may be pulled in all, and from one peer, before a Call of this kind has to wait.
    fn pull_limits(&self, short: bool) -> (usize, usize) {
        let reserve = self.staging_max / 4;
        let long = self.staging_max - reserve;
        if short { (self.staging_max, long / 2 + reserve / 2) } else { (long, long / 2) }
    }

    /// Whether a call may expose `len` bytes of Reply chunks now. If not, it may later, since other calls end. A connection of
    /// which nothing counts always may: a server can hold up only its own calls, and one reply of any length finds room.
    pub fn has_room(&self, len: usize) -> bool {
        let counts = if self.slabs.is_some() { len } else { 1 };
        let lacks = self.known_areas.as_ref().is_some_and(|areas| areas.lacks(len));
        self.own.bytes() == 0 || !lacks && self.exposed.bytes().saturating_add(counts) <= AREAS_MAX
    }

    /// Why `has_room` says no.
    pub fn crowd(&self) -> String {
        let bytes = self.exposed.bytes();
        let what = if self.slabs.is_some() {
            "bytes of memory are locked for replies"
        } else {
            "bytes of replies have come that the program has not taken"
        };
        format!("{bytes} {what}, and {AREAS_MAX} is the limit of a process")
    }

    /// A Reply chunk of `len` bytes. Ask [`Memory::has_room`] first.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn reply_area(&self, len: usize) -> io::Result<Sink> {
        let known = self.known_areas.as_ref().and_then(|areas| areas.take(len));
        let mut buf = known.map_or_else(|| self.areas.take_for(self.writer), Ok)?;
        buf.reserve(len)?;
        self.longest.fetch_max(len, Relaxed);
        let charge = Charge::new(&self.exposed, &self.own, self.slabs.is_none());
        if self.slabs.is_some() {
            charge.raise(len);
        }
        buf.charge(charge);
        Ok(buf.into_sink(len))
    }

    /// Whether the peer may write this memory even though no handle of it is valid any more.
    pub fn stays_open(&self, sink: &Sink) -> bool {
        self.known_areas.as_ref().is_some_and(|areas| areas.is_open(sink.address()))
    }

    /// Whether the peer of this connection has written so much more than our calls have taken, or sent so much more than has been
    /// served, that the process cannot hold it. The connection is then closed. One reply alone is never too much.
    pub fn is_flooded(&self) -> bool {
        let replies =
            || self.exposed.bytes() > FLOOD && self.own.bytes() > FLOOD_SHARE.max(self.longest.load(Relaxed));
        self.slabs.is_none()
            && (self.received.bytes() > FLOOD && self.own_received.bytes() > FLOOD_RECEIVES || replies())
    }

    /// Whether pages are kept for long messages that may no longer come: see [`Memory::cool`].
    #[inline]
    pub fn is_warm(&self) -> bool {
        self.pools().any(|pool| pool.keeps())
    }

    /// Gives back the pages of long messages if none has come for a while. Returns when to ask again.
    pub fn cool(&self) -> Option<Duration> {
        let now = stats::tick();
        self.pools().filter_map(|pool| pool.cool(now)).max()
    }

    fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        [&self.message, &self.areas, &self.slab, &self.header].into_iter()
    }

    /// What `is_flooded` has found.
    pub fn flood(&self) -> String {
        let (replies, messages) = (self.exposed.bytes(), self.received.bytes());
        let (own_replies, own_messages) = (self.own.bytes(), self.own_received.bytes());
        let share = FLOOD_SHARE.max(self.longest.load(Relaxed));
        format!(
            "it has filled {own_replies} of {replies} bytes of Reply chunks and {own_messages} of {messages} of Receives, and \
             may fill {share} and {FLOOD_RECEIVES} of them where there are more than {FLOOD}"
        )
    }

    /// Whether Receives hold so much that a connection with something to serve must serve it before it reads on.
    pub fn is_full(&self) -> bool {
        self.received.bytes() > RECEIVES_MAX && self.own_received.bytes() > RECEIVES_SHARE
    }
}

/// Bytes of one kind that blocks hold in this process. A forked child starts from zero, since it is not told what its parent
/// holds and gives back.
struct Held {
    bytes: AtomicUsize,
    /// One of the blocks goes on beyond the limit.
    led: AtomicBool,
    /// The process for which this counts.
    generation: AtomicU64,
}

impl Default for Held {
    fn default() -> Held {
        let (bytes, led) = (AtomicUsize::new(0), AtomicBool::new(false));
        Held { bytes, led, generation: AtomicU64::new(fork::generation()) }
    }
}

impl Held {
    /// The count of this process.
    fn here(&self) -> &Held {
        let generation = fork::generation();
        if self.generation.load(Relaxed) != generation
            && self.generation.swap(generation, Relaxed) != generation
        {
            self.bytes.store(0, Relaxed);
            self.led.store(false, Relaxed);
        }
        self
    }

    fn bytes(&self) -> usize {
        self.here().bytes.load(Relaxed)
    }

    /// Counts `bytes` more, unless they would be above `most` in all.
    fn add(&self, bytes: usize, most: usize) -> bool {
        let add = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= most);
        self.here().bytes.fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    fn sub(&self, bytes: usize) {
        // Of the first two threads of a child, one may have counted before the other has reset the count.
        let left = |held: usize| Some(held.saturating_sub(bytes));
        let _ = self.here().bytes.fetch_update(Relaxed, Relaxed, left);
    }
}

/// What a block counts while it lives: for the process, and for a part of it.
struct Charge {
    whole: Arc<Held>,
    part: Arc<Held>,
    bytes: AtomicUsize,
    /// It counts what is written into the block, up to the highest byte.
    written: bool,
    /// This block is the one that goes on beyond the limit. What it takes from then on does not count.
    leads: AtomicBool,
    /// The process for which it counts `bytes`.
    generation: AtomicU64,
    /// Goes with the block.
    pass: Option<Pass>,
}

/// How far a pulled Call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PassStage {
    /// It is under way.
    Coming,
    /// All of it has arrived.
    Here,
    /// It was handed to the program: to its routine, or to the threads that call it.
    Dispatched,
    /// The program has what it wants from it, or its memory is free again.
    Decoded,
}

/// Permission to pull a Call, and how far that Call has come: a [`PassStage`].
#[derive(Clone, Debug, Default)]
pub struct Pass(Arc<AtomicU8>);

impl Pass {
    /// The Call has come to `stage`.
    pub fn reach(&self, stage: PassStage) {
        self.0.fetch_max(stage as u8, Relaxed);
    }

    /// What the giver of the pass sees of it.
    pub fn given(&self) -> Given {
        Given(Arc::downgrade(&self.0))
    }
}

/// A [`Pass`] as its giver sees it.
pub struct Given(Weak<AtomicU8>);

impl Given {
    /// How far the Call has come.
    pub fn stage(&self) -> PassStage {
        match self.0.upgrade().map(|stage| stage.load(Relaxed)) {
            Some(0) => PassStage::Coming,
            Some(1) => PassStage::Here,
            Some(2) => PassStage::Dispatched,
            _ => PassStage::Decoded,
        }
    }
}

impl Charge {
    fn new(whole: &Arc<Held>, part: &Arc<Held>, written: bool) -> Charge {
        let (bytes, leads) = (AtomicUsize::new(0), AtomicBool::new(false));
        let generation = AtomicU64::new(fork::generation());
        Charge { whole: whole.clone(), part: part.clone(), bytes, written, leads, generation, pass: None }
    }

    /// The count of this process.
    fn here(&self) -> &Charge {
        let generation = fork::generation();
        if self.generation.load(Relaxed) != generation
            && self.generation.swap(generation, Relaxed) != generation
        {
            self.bytes.store(0, Relaxed);
            self.leads.store(false, Relaxed);
        }
        self
    }

    /// Counts `bytes` in all, if that is more than before.
    fn raise(&self, bytes: usize) {
        let before = self.here().bytes.fetch_max(bytes, Relaxed);
        if let Some(more) = bytes.checked_sub(before) {
            self.whole.add(more, usize::MAX);
            self.part.add(more, usize::MAX);
        }
    }

    /// Counts nothing from now on.
    fn end(&self) {
        let bytes = self.here().bytes.swap(0, Relaxed);
        self.whole.sub(bytes);
        self.part.sub(bytes);
        if self.leads.swap(false, Relaxed) {
            self.whole.here().led.store(false, Relaxed);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.end();
    }
}

/// While more bytes of Reply chunks than this count in a process, further calls wait.
pub const AREAS_MAX: usize = 256 << 20;

/// While more bytes than this count, a connection that holds more than its share is closed. The share of Receives is less than
/// one Send: otherwise any number of connections with one unfinished Send each would all keep to their share.
const FLOOD: usize = 1 << 30;
const FLOOD_SHARE: usize = 64 << 20;
const FLOOD_RECEIVES: usize = 32 << 10;

/// While Receives of a process hold more bytes of long messages than this, connections that hold more than their share pause.
const RECEIVES_MAX: usize = 256 << 20;
const RECEIVES_SHARE: usize = 256 << 10;

/// Smallest block for Reply chunks: 1 MiB of results and the reply's header.
const AREA: usize = (1 << 20) + PAGE;

/// Staging memory of a short Call: 1 MiB of arguments and the call's header.
const SHORT: usize = (1 << 20) + PAGE;

/// Most blocks for Receives that are kept idle, and most bytes of them, except in a series: see [`Pool`].
const SLABS_IDLE: usize = 1024;
const SLABS_WARM: usize = 4 << 20;

/// Room in front of a message, in bytes: for a header with a Reply chunk of one segment, and two segments of a Write or Read
/// chunk. Longer headers have a block of their own.
const HEADER: usize = 128;
/// The same where a block is as long as one Send: the header without chunks, so that the rest holds all that may follow it.
const HEADER_MIN: usize = 28;

/// Initial capacity of a message, bytes.
const MESSAGE: usize = 64 << 10;

/// Bytes of an idle block that keep their pages: a message of 1 MiB finds them warm.
const WARM: usize = (1 << 20) + (64 << 10);

/// Memory of the CPU: exclusive, readable, writable, growable.
pub struct Buf {
    block: Share,
    /// Bytes left free in front, for what may be put there when the buffer is frozen: see [`Region::extend_front`].
    start: usize,
    len: usize,
}

impl Buf {
    /// A `Buf` outside any pool, for tests and rare uses.
    pub fn with_capacity(capacity: usize) -> io::Result<Buf> {
        let raw = RawBlock::map(round_up(capacity.max(1)))?;
        Ok(Buf { block: Share::new(raw, Weak::new()), start: 0, len: 0 })
    }

    /// The outbox of `own`, if it is free: the peer may read at once what is written there.
    pub fn outbox(own: &Arc<Own>) -> Option<Buf> {
        let block = Share::new(RawBlock::outbox(own)?, Weak::new());
        Some(Buf { block, start: 0, len: 0 })
    }

    /// Whether this is an outbox.
    pub fn is_outbox(&self) -> bool {
        matches!(self.block.raw.home, Home::Outbox(_))
    }

    /// Bytes in use.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no byte is in use.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that fit without growing.
    pub fn capacity(&self) -> usize {
        self.block.raw.cap - self.start
    }

    /// Makes room for `cap` bytes in all. The block may move: mremap moves the pages of a mapping; only the bytes of a slab or an
    /// outbox are copied.
    ///
    /// # Errors
    /// `ENOMEM` when the mapping cannot grow; the `Buf` is unchanged then.
    pub fn reserve(&mut self, cap: usize) -> io::Result<()> {
        if cap <= self.capacity() {
            return Ok(());
        }
        let want = round_up(self.start + cap).max(self.block.raw.cap.saturating_mul(2));
        if let Home::Slabs(slabs) = &self.block.raw.home
            && let Some(larger) = slabs.larger.get()
        {
            let mut fresh = larger.take()?;
            fresh.start = self.start;
            fresh.reserve(want - self.start)?;
            fresh.extend(self)?;
            *self = fresh;
            return Ok(());
        }
        self.block_mut().raw.grow(want)
    }

    /// Sets the number of bytes in use; bytes never written before read as zero or as left by an earlier user.
    ///
    /// # Panics
    /// When `len` is above the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "set_len({len}) above capacity {}", self.capacity());
        self.len = len;
        self.block.raw.touch(self.start + len);
    }

    /// Appends bytes, growing as needed.
    ///
    /// # Errors
    /// As [`Buf::reserve`].
    pub fn extend(&mut self, bytes: &[u8]) -> io::Result<()> {
        let at = self.len;
        self.reserve(at + bytes.len())?;
        self.set_len(at + bytes.len());
        self[at..].copy_from_slice(bytes);
        Ok(())
    }

    /// The block counts as `charge` until its last holder goes.
    fn charge(&mut self, charge: Charge) {
        self.block_mut().charge = Some(charge);
    }

    fn block_mut(&mut self) -> &mut Block {
        self.block.alone().expect("a Buf is the only holder of its block")
    }

    /// Freezes the bytes in use: from here on everybody reads and nobody writes.
    pub fn freeze(self) -> Region {
        let Buf { block, start, len } = self;
        Region { block, start, len }
    }

    /// Hands all the capacity up to `len` bytes to a device, which may write it until the last clone is gone.
    ///
    /// # Panics
    /// When `len` is above the capacity, or room was left in front.
    pub fn into_sink(self, len: usize) -> Sink {
        assert!(
            len <= self.capacity() && self.start == 0,
            "into_sink({len}) above capacity {}",
            self.capacity()
        );
        Sink { block: self.block, start: 0, len }
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is mapped for `cap >= start + len` bytes (invariant), and no other holder exists
        // (invariant), so nothing writes it while this borrow of the Buf lives.
        unsafe { std::slice::from_raw_parts(self.block.raw.ptr.as_ptr().wrapping_add(self.start), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes this the only borrow.
        unsafe {
            std::slice::from_raw_parts_mut(self.block.raw.ptr.as_ptr().wrapping_add(self.start), self.len)
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} of {})", self.len, self.capacity())
    }
}

/// Memory that a device may write at any moment. Its bytes cannot be reached; only ranges of it can be named.
#[derive(Clone)]
pub struct Sink {
    block: Share,
    start: usize,
    len: usize,
}

impl Sink {
    /// Memory of the program, for a device to write. Where `len` is 0, `bytes` may be null.
    ///
    /// # Safety
    /// Until the last clone and part is gone, and the last clone and slice of the Region that it may become:
    /// `bytes .. bytes + len` stays valid for reads and writes on any thread, nobody else writes it, and, as long
    /// as it is a Sink, nobody else reads it, another loan included.
    pub unsafe fn lend(bytes: *mut u8, len: usize) -> Sink {
        // SAFETY: as the caller promises.
        let block = unsafe { Block::lend(bytes, len) };
        Sink { block, start: 0, len }
    }

    /// Tells when nobody refers to the memory any more.
    pub fn loan(&self) -> Loan {
        Loan { block: self.block.downgrade() }
    }

    /// Whether it is memory of the program.
    pub fn is_lent(&self) -> bool {
        self.block.raw.is_lent()
    }

    /// The memory counts as nothing from here on: nobody waits any more for what arrives there, and it is released with the
    /// handle that a device cannot take back.
    pub fn uncount(&self) {
        if let Some(charge) = &self.block.charge {
            charge.end();
        }
    }

    /// Bytes that the device may write.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the device may write no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the memory, to tell a device that writes it unseen by us.
    pub fn address(&self) -> usize {
        self.block.touch(self.start + self.len);
        self.block.raw.ptr.addr().get() + self.start
    }

    /// A part of the memory, for a device that exposes it under a handle of its own.
    ///
    /// # Panics
    /// When `at + len` lies outside.
    pub fn part(&self, at: usize, len: usize) -> Sink {
        assert!(at <= self.len && len <= self.len - at, "part {at}+{len} of {}", self.len);
        Sink { block: self.block.clone(), start: self.start + at, len }
    }

    /// Takes the memory back, `len` bytes in use, if it is ours and nobody else holds it any more.
    ///
    /// # Errors
    /// Returns the `Sink` unchanged while a device still holds a clone, or somebody holds a [`Loan`], and if it is lent.
    ///
    /// # Panics
    /// When `len` is above the sink's length, or the sink is a part.
    pub fn into_buf(self, len: usize) -> Result<Buf, Sink> {
        assert!(len <= self.len && self.start == 0, "into_buf({len}) of {self:?}");
        let mut sink = self;
        if sink.is_lent() || sink.block.alone().is_none() {
            return Err(sink);
        }
        if let Some(pass) = sink.block.charge.as_ref().and_then(|charge| charge.pass.as_ref()) {
            pass.reach(PassStage::Here);
        }
        // INVARIANT: `alone` succeeded, so this is the only holder: a Buf may exist.
        Ok(Buf { block: sink.block, start: 0, len })
    }

    /// Freezes the first `len` bytes, if nobody else holds the memory any more, whether it is ours or lent. A [`Loan`] does not
    /// count as a holder.
    ///
    /// # Errors
    /// Returns the `Sink` unchanged while a device still holds a clone, and if it is a part that starts further on.
    ///
    /// # Panics
    /// When `len` is above the sink's length.
    pub fn into_region(self, len: usize) -> Result<Region, Sink> {
        assert!(len <= self.len, "into_region({len}) of {self:?}");
        if self.start != 0 || self.block.count() != 1 {
            return Err(self);
        }
        // What the last other holder placed, on whatever thread, is visible from here on.
        fence(Ordering::Acquire);
        // INVARIANT: a Loan makes no holder, so `self` was the only one: no Sink is left, and slices may exist.
        Ok(Region { block: self.block, start: 0, len })
    }

    /// Places bytes, as a device does: raw copy, no slice of the memory is made. Returns false when they do not fit.
    #[must_use]
    pub fn place(&self, at: usize, bytes: &[u8]) -> bool {
        let Some(end) = at.checked_add(bytes.len()) else { return false };
        if end > self.len {
            return false;
        }
        self.block.touch(self.start + end);
        // SAFETY: `at <= end <= len` and `start + len <= cap` (invariant): the address stays inside the block.
        let to = unsafe { self.block.raw.ptr.as_ptr().add(self.start + at) };
        // SAFETY: `to .. to + bytes.len()` is inside the block (checked), and `bytes` cannot overlap it: no slice
        // of a block exists while it has a Sink (invariant), nor one of the program's into memory lent as a Sink.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    /// A copy of a range: raw, no slice of the memory is made.
    ///
    /// # Errors
    /// `ENOMEM`.
    ///
    /// # Panics
    /// When `at + len` lies outside.
    pub fn copy(&self, at: usize, len: usize) -> io::Result<Region> {
        assert!(at <= self.len && len <= self.len - at, "copy {at}+{len} of {}", self.len);
        let mut copy = Buf::with_capacity(len)?;
        copy.set_len(len);
        // SAFETY: `at + len <= self.len` (asserted) and `start + self.len <= cap` (invariant): inside the block.
        let from = unsafe { self.block.raw.ptr.as_ptr().add(self.start + at) };
        // SAFETY: `from .. from + len` is inside the block, and `copy` has as many bytes, which nobody else has. What a
        // device writes meanwhile may be seen or not: nobody relies on these bytes, which are a peer's.
        unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), len) };
        Ok(copy.freeze())
    }

    /// The CRC32C of a range, continued from `crc`; read through raw copies, never through a slice.
    pub fn crc32c(&self, crc: u32, at: usize, len: usize) -> u32 {
        assert!(at + len <= self.len);
        let mut crc = crc;
        let mut chunk = [0u8; 4096];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(chunk.len());
            // SAFETY: `at + done + n <= len` (asserted) and `start + len <= cap` (invariant): inside the block.
            let from = unsafe { self.block.raw.ptr.as_ptr().add(self.start + at + done) };
            // SAFETY: `from .. from + n` is inside the block, `chunk` is our own stack.
            unsafe { std::ptr::copy_nonoverlapping(from, chunk.as_mut_ptr(), n) };
            crc = crc32c::crc32c_append(crc, &chunk[..n]);
            done += n;
        }
        crc
    }

    /// The range as a target of readv(2). `None` when it does not lie inside.
    pub fn iovec(&self, at: usize, len: usize) -> Option<IoVecMut<'_>> {
        if at.checked_add(len)? > self.len {
            return None;
        }
        self.block.touch(self.start + at + len);
        // SAFETY: `at <= len` and `start + len <= cap` (invariant): inside the block.
        let base = unsafe { self.block.raw.ptr.as_ptr().add(self.start + at) };
        Some(IoVecMut { raw: libc::iovec { iov_base: base.cast(), iov_len: len }, life: PhantomData })
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sink({})", self.len)
    }
}

/// Frozen memory, or a part of it: read by everybody, written by nobody.
#[derive(Clone)]
pub struct Region {
    block: Share,
    start: usize,
    len: usize,
}

/// Pieces of a message, in order: nearly always one, which takes no memory of its own.
pub type Regions = SmallVec<[Region; 1]>;

/// A message that has arrived: its pieces, in order, and what follows them if the peer still has that.
#[derive(Default)]
pub struct Payload {
    /// What is here already.
    pub pieces: Regions,
    /// What is not. Boxed, since hardly any message has such a part.
    pub rest: Option<Box<Shown>>,
}

impl Payload {
    /// Bytes of the message.
    pub fn bytes(&self) -> usize {
        let here: usize = self.pieces.iter().map(|piece| piece.len()).sum();
        here + self.rest.as_ref().map_or(0, |rest| rest.len())
    }
}

impl From<Regions> for Payload {
    fn from(pieces: Regions) -> Payload {
        Payload { pieces, rest: None }
    }
}

/// The pieces that are here already.
impl Deref for Payload {
    type Target = [Region];

    fn deref(&self) -> &[Region] {
        &self.pieces
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes())
    }
}

impl Region {
    /// A copy of `bytes` in a block of its own: for headers and tests.
    pub fn copy_from(bytes: &[u8]) -> io::Result<Region> {
        let mut buf = Buf::with_capacity(bytes.len())?;
        buf.extend(bytes)?;
        Ok(buf.freeze())
    }

    /// Memory of the program, to be read. Where `len` is 0, `bytes` may be null.
    ///
    /// # Safety
    /// Until the last clone and slice is gone, `bytes .. bytes + len` stays valid for reads on any thread, and
    /// nobody changes it.
    pub unsafe fn lend(bytes: *const u8, len: usize) -> Region {
        // SAFETY: as the caller promises; a Region, which this stays, is never written.
        let block = unsafe { Block::lend(bytes.cast_mut(), len) };
        Region { block, start: 0, len }
    }

    /// Tells when nobody refers to the memory any more.
    pub fn loan(&self) -> Loan {
        Loan { block: self.block.downgrade() }
    }

    /// Whether it is memory of the program.
    pub fn is_lent(&self) -> bool {
        self.block.raw.is_lent()
    }

    /// The region itself, or a copy in memory of our own if it is lent.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn owned(&self) -> io::Result<Region> {
        if self.is_lent() { Region::copy_from(self) } else { Ok(self.clone()) }
    }

    /// The Call that came in this memory has come to `stage`. Returns whether it was pulled with a pass.
    pub fn reach(&self, stage: PassStage) -> bool {
        let pass = self.block.charge.as_ref().and_then(|charge| charge.pass.as_ref());
        pass.is_some_and(|pass| {
            pass.reach(stage);
            true
        })
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of the region.
    ///
    /// # Panics
    /// When `at + len` lies outside.
    pub fn slice(&self, at: usize, len: usize) -> Region {
        assert!(at <= self.len && len <= self.len - at, "slice {at}+{len} of {}", self.len);
        Region { block: self.block.clone(), start: self.start + at, len }
    }

    /// Puts bytes in front, where a [`Memory::message`] has room for a header, unless others already read the block. Returns
    /// false when it cannot.
    pub fn extend_front(&mut self, bytes: &[u8]) -> bool {
        let Some(start) = self.start.checked_sub(bytes.len()) else { return false };
        match self.block.alone() {
            Some(block) if !block.raw.is_lent() => {
                let to = block.raw.ptr.as_ptr().wrapping_add(start);
                // SAFETY: `start + bytes.len()` is where this region begins, inside the block, which is our own and has no
                // other holder: nobody else reads or writes it.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
                (self.start, self.len) = (start, self.len + bytes.len());
                true
            }
            _ => false,
        }
    }

    /// The region as a source of writev(2).
    pub fn iovec(&self, at: usize, len: usize) -> Option<IoVec<'_>> {
        if at.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `start + at <= start + len <= cap` (invariant): inside the block.
        let base = unsafe { self.block.raw.ptr.as_ptr().add(self.start + at) };
        Some(IoVec { raw: libc::iovec { iov_base: base.cast(), iov_len: len }, life: PhantomData })
    }
}

impl Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start <= cap` (invariant): inside the block.
        let base = unsafe { self.block.raw.ptr.as_ptr().add(self.start) };
        // SAFETY: `start + len <= cap` (invariant), and a frozen block is written by nobody; for lent memory its lender promised
        // that.
        unsafe { std::slice::from_raw_parts(base, self.len) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({})", self.len)
    }
}

/// Kept by whoever lent memory, to know when nobody else uses it any more. A loan is not a holder.
pub struct Loan {
    block: Weak<Block>,
}

impl Loan {
    /// Whether the last holder of the memory is gone; what it read or wrote there happened before.
    pub fn is_over(&self) -> bool {
        let over = self.block.strong_count() == 0;
        // Pairs with the release of the last holder, which may have gone on another thread.
        fence(Ordering::Acquire);
        over
    }
}

/// One element of a gathered write, alive as long as the memory that it names.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct IoVec<'a> {
    raw: libc::iovec,
    life: PhantomData<&'a ()>,
}

impl<'a> IoVec<'a> {
    /// A source for writev(2).
    pub fn from_slice(bytes: &'a [u8]) -> IoVec<'a> {
        IoVec {
            raw: libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() },
            life: PhantomData,
        }
    }

    /// Bytes named.
    pub fn len(&self) -> usize {
        self.raw.iov_len
    }

    /// Whether no byte is named.
    pub fn is_empty(&self) -> bool {
        self.raw.iov_len == 0
    }

    /// Address of the first of them, for send(2).
    pub fn as_ptr(&self) -> *const libc::c_void {
        self.raw.iov_base
    }
}

/// One element of a scattered read. A type of its own, so that safe code cannot read into memory that was lent
/// only to be written out.
#[repr(transparent)]
pub struct IoVecMut<'a> {
    raw: libc::iovec,
    life: PhantomData<&'a mut ()>,
}

impl<'a> IoVecMut<'a> {
    /// A target for readv(2).
    pub fn from_mut(bytes: &'a mut [u8]) -> IoVecMut<'a> {
        IoVecMut {
            raw: libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() },
            life: PhantomData,
        }
    }

    /// Memory of the program, which may not be initialized yet.
    ///
    /// # Safety
    /// `len` bytes are writable there, and nobody else uses them, for the life of the value.
    pub unsafe fn of_program(at: *mut u8, len: usize) -> IoVecMut<'a> {
        IoVecMut { raw: libc::iovec { iov_base: at.cast(), iov_len: len }, life: PhantomData }
    }

    /// Bytes named.
    pub fn len(&self) -> usize {
        self.raw.iov_len
    }

    /// Whether no byte is named.
    pub fn is_empty(&self) -> bool {
        self.raw.iov_len == 0
    }

    /// Address of the first of them, for recv(2).
    pub fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.raw.iov_base
    }
}

/// For tests: what sendmsg(2) and recvmsg(2) do, without a socket.
#[cfg(test)]
impl IoVec<'_> {
    pub(crate) fn copy_to(&self, bytes: &mut Vec<u8>, most: usize) {
        let len = self.raw.iov_len.min(most);
        if len > 0 {
            // SAFETY: as for the kernel: `raw` names bytes that live as long as `self`, and nobody writes them meanwhile.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(self.raw.iov_base.cast(), len) });
        }
    }
}

#[cfg(test)]
impl IoVecMut<'_> {
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.raw.iov_len);
        // SAFETY: as for the kernel: `raw` names at least as many bytes (asserted) that live as long as `self`, of which no slice
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.raw.iov_base.cast(), bytes.len()) };
    }
}

/// A mapping and the pool that it returns to, or lent memory.
struct Block {
    raw: RawBlock,
    pool: Weak<Pool>,
    /// What the block counts as held, until its last holder goes.
    charge: Option<Charge>,
}

impl Block {
    /// A block of lent memory.
    ///
    /// # Safety
    /// As [`Region::lend`]; and as [`Sink::lend`] if it becomes a Sink.
    unsafe fn lend(bytes: *mut u8, len: usize) -> Share {
        let ptr = NonNull::new(bytes).unwrap_or(NonNull::dangling());
        let raw = RawBlock {
            ptr,
            cap: len,
            home: Home::Program,
            touched: AtomicUsize::new(len),
            kept: 0,
            writer: 0,
        };
        Share::new(raw, Weak::new())
    }

    /// A device may have written bytes up to `end`.
    fn touch(&self, end: usize) {
        self.raw.touch(end);
        if let Some(charge) = self.charge.as_ref().filter(|charge| charge.written) {
            charge.raise(end);
        }
    }
}

/// For the case that the last two holders go at the same time.
impl Drop for Block {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            let raw = std::mem::replace(&mut self.raw, RawBlock::empty());
            pool.give_back(Share::new(raw, self.pool.clone()));
        }
    }
}

/// A holder's share of a block. With the last share the block goes back to its pool, along with the `Arc` that counts the shares.
struct Share(ManuallyDrop<Arc<Block>>);

impl Share {
    fn new(raw: RawBlock, pool: Weak<Pool>) -> Share {
        Share(ManuallyDrop::new(Arc::new(Block { raw, pool, charge: None })))
    }

    /// The block, if nobody else has a share of it or a [`Loan`].
    fn alone(&mut self) -> Option<&mut Block> {
        Arc::get_mut(&mut self.0)
    }

    /// The block was taken from a pool: what is written from here on is told apart from what was written before.
    fn begin_use(&mut self) {
        if let Some(Block { raw, .. }) = self.alone() {
            raw.kept = raw.kept.max(std::mem::take(raw.touched.get_mut()));
        }
    }

    /// The block will go back to no pool.
    fn forget_pool(&mut self) {
        if let Some(block) = self.alone() {
            block.pool = Weak::new();
        }
    }

    fn count(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    fn downgrade(&self) -> Weak<Block> {
        Arc::downgrade(&self.0)
    }
}

impl Clone for Share {
    fn clone(&self) -> Share {
        Share(self.0.clone())
    }
}

impl Deref for Share {
    type Target = Block;
    fn deref(&self) -> &Block {
        &self.0
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(block) = self.alone()
            && let Some(pool) = block.pool.upgrade()
        {
            block.charge = None;
            // SAFETY: `self.0` is not used any more.
            return pool.give_back(Share(ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.0) })));
        }
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

#[cfg(test)]
impl Memory {
    /// Bytes of blocks that lie in its pools.
    pub(crate) fn idle_bytes(&self) -> usize {
        let pools = [&self.slab, &self.header, &self.message, &self.areas];
        // Receives and headers may have one pool.
        let apart = if Arc::ptr_eq(&self.slab, &self.header) { &pools[1..] } else { &pools };
        apart.iter().map(|pool| pool.idle_bytes()).sum()
    }

    /// Bytes of long messages in Receives of this connection.
    pub(crate) fn own_received(&self) -> usize {
        self.own_received.bytes()
    }

    /// Makes the process hold so much in Receives that connections pause, without using a page of it.
    pub(crate) fn fill(&self) -> Sink {
        let sink = self.connection(None, None).receive(RECEIVES_MAX + 1, RECEIVES_MAX + 1).unwrap();
        assert!(sink.iovec(0, RECEIVES_MAX + 1).is_some());
        sink
    }

    /// The same pools, but as if the system had nothing left for a header: for tests of what is done then.
    pub(crate) fn without_headers(&self) -> Arc<Memory> {
        Arc::new(Memory { header: Pool::new(1 << 60, 0, 0), ..self.clone() })
    }

    /// The same pools, but others have to wait for what peers' Calls hold.
    pub(crate) fn crowded(&self) -> Arc<Memory> {
        Arc::new(Memory { staging_max: 0, ..self.clone() })
    }
}

/// Memory of a program, for tests in safe code: it can be looked at and changed only while none of it is lent. It
/// is never freed, so that a loan that does not end is no more than a failed test.
#[cfg(test)]
pub(crate) struct Program {
    start: NonNull<u8>,
    len: usize,
    loan: Option<Loan>,
}

#[cfg(test)]
impl Program {
    pub(crate) fn new(bytes: &[u8]) -> Program {
        let bytes = Box::leak(Box::<[u8]>::from(bytes));
        Program { start: NonNull::from(&mut *bytes).cast(), len: bytes.len(), loan: None }
    }

    pub(crate) fn source(&mut self) -> Region {
        assert!(self.is_back());
        // SAFETY: the memory is leaked, and `bytes` gives access to it only when the loan is over.
        let region = unsafe { Region::lend(self.start.as_ptr(), self.len) };
        self.loan = Some(region.loan());
        region
    }

    pub(crate) fn sink(&mut self) -> Sink {
        assert!(self.is_back());
        // SAFETY: the memory is leaked, and `bytes` gives access to it only when the loan is over.
        let sink = unsafe { Sink::lend(self.start.as_ptr(), self.len) };
        self.loan = Some(sink.loan());
        sink
    }

    pub(crate) fn is_back(&self) -> bool {
        self.loan.as_ref().is_none_or(Loan::is_over)
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        assert!(self.is_back(), "the memory is still lent");
        // SAFETY: the memory is leaked; `&mut self` and the end of the loan make this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests;
