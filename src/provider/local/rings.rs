//! Two rings of bytes, one each way, that are used as the stream of a TCP socket would be: what does not fit now waits, and
//! what has not come yet would block. The socket stays: its end is the end of the connection, and its bytes wake whoever
//! waits on it.
//!
//! # Waking
//! Each end says whether it waits, and how it has to be woken: [`Word::Waits`]. An end that puts bytes into its ring, or
//! takes some while the other end wants room, wakes the other end if that one waits, once for each wait. It does so by one
//! byte over the socket, which every loop polls, or, more cheaply, by a [`Bell`]. A thread that waits for nothing else
//! sleeps on the bell ([`Rings::doze`]), and only for a short time, because the end of the connection does not ring it. An
//! end first says that it waits and then looks again; the other one first acts and then looks whether anybody waits: so one
//! of them sees the other. While an end looks by itself ([`Rings::spin`]) it costs its peer no system call. Its program may
//! have gone elsewhere in the midst of that, so a peer that waits for it wakes it all the same, after a while
//! ([`Rings::remind`]).
//!
//! The bytes that wake are counted in [`Word::Woken`], so that nobody reads the socket for bytes that are not there. Now and
//! then it is read all the same: for the end of the connection, and for bytes that nobody counted.
//!
//! # Invariants
//! - What is in the ring lies between `Consumed` and `Produced`: more than [`RING`] bytes is a lie of the peer's.
//! - `Base` and `Wide` change only while the ring is empty.
//! - Our own counters are the words of our segment: a process that was forked from us goes on where we are.
//!
//! # Which bytes of a ring are used
//! Writing a cache line that the other end's processor has read is expensive while the line is in that processor's cache: 64
//! KiB took 10 us, and 2 us where neither cache had them. (Two processors with 1 MiB of cache each.) So a long message
//! begins where the latest one ended, and a line is written again only after a full round of a ring that is longer than the
//! caches. Several connections push each other's lines out of the caches: the more there are, the less of its ring each of
//! them uses, and with 16 of them no more than a message. So they stay within their own caches, and 64 KiB written by 16
//! were a quarter faster. Short messages, of which several fit into the nearest cache, lie at the ring's beginning: 4 KiB
//! there took 0.2 us, elsewhere 0.5.
//!
//! A long ring also takes a long message as a whole, so that an end that sleeps or serves others is not woken for each part
//! of it. Only [`WIDE_MOST`] connections of a process have one, each until it ends: its pages are not given back earlier. To
//! punch a hole in the file (`MADV_REMOVE`) the kernel goes through all mappings of it, and a hostile peer can make as many
//! as it likes; with 120,000 of them that took 270 ms.
#![forbid(unsafe_code)]

use std::hint::spin_loop;
use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst, fence,
};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use crate::memory::shared::{Bell, Own, RING, Shown, Theirs, Word, width};
use crate::memory::{Buf, IoVec, IoVecMut, Region};
use crate::wire::Segment;
use crate::{fork, socket, stats, sync};

/// This many bytes are copied before the other end is told of them: it copies them while we copy the next.
const STEP: usize = 16 << 10;

/// How long a sender waits for room before it sleeps: as long as it takes to wake the other end. It waits no longer for a
/// peer that takes less than a [`STEP`] in that time, perhaps byte by byte.
const ROOM: Duration = Duration::from_micros(50);

/// After such a wait that was in vain, or brought less than a [`STEP`], this many further ones sleep at once.
const HASTE: u32 = 16;

/// An end that has heard nothing for this long asks the socket whether its peer is there.
const QUIET: Duration = Duration::from_millis(1);

/// One in this many looks in vain asks the socket; and the same while somebody looks without a pause.
const ASKED: u32 = 8;
const ASKED_BUSY: u32 = 1 << 12;

/// A peer that says that it looks, but has taken nothing for this long, may be elsewhere: in a routine of its program.
const OVERLOOKED: Duration = Duration::from_millis(5);

/// What is sent in one go and is shorter than this goes into a narrow ring.
pub(super) const LONG: usize = 16 << 10;

/// Most connections of a process that may have long rings: together they have 64 MiB.
pub(super) const WIDE_MOST: usize = 16;

/// How many have one now.
pub(super) static WIDE: AtomicUsize = AtomicUsize::new(0);

/// Bits of [`Word::Waits`]: the end waits for a byte, or for a bell. The other bits count its waits.
const BY_BYTE: u64 = 1;
const BY_BELL: u64 = 2;
const WAITS: u64 = BY_BYTE | BY_BELL;
const NEXT: u64 = 4;

/// How often something is looked for in one go.
const ROUNDS: usize = 16;

/// How often less than a [`STEP`] is taken in one go: more may have come meanwhile, perhaps byte by byte.
const SHORT: usize = 4;

/// Both rings of a connection.
pub struct Rings {
    own: Arc<Own>,
    theirs: Arc<Theirs>,
    generation: u64,
    /// The latest wait of the peer that it was woken from.
    woken: u64,
    /// How often it was woken.
    wakes: u64,
    /// Bytes that have woken us.
    heard_bytes: u64,
    /// How much had been taken when a thread last waited for a bell.
    dozed: Option<u64>,
    /// Whether somebody looks without a pause.
    busy: bool,
    /// Looks in vain.
    looks: u32,
    /// When something last came, by [`stats::tick`].
    heard: u64,
    /// Whether a thread may wait for room without sleeping; and how many more times it does not.
    spins: bool,
    haste: u32,
    /// Whether this process waits for room. What [`Word::WantsRoom`] says may be the word of a child that has ended.
    wants: bool,
    /// Counted in [`WIDE`].
    wide: bool,
    /// Where the next bytes go in a long ring, from its beginning.
    next: u64,
    /// How much a peer that says that it looks had taken when it was found not to look; and when to wake it, unless that is
    /// done.
    overlooks: Option<(u64, Option<Instant>)>,
    ended: bool,
    /// What the peer is to take from the outbox, and under which handle.
    kept: Option<(Region, u32)>,
}

/// Takes the connection, of which no process has taken an end yet. False if a process that was forked from this one, or that it
/// was forked from, has done so.
pub fn claim(own: &Own) -> bool {
    own.word(Word::Waits).compare_exchange(0, BY_BYTE, SeqCst, SeqCst).is_ok()
}

impl Rings {
    /// `spins`: whether a thread may wait for its peer without sleeping.
    pub fn new(own: Own, theirs: Theirs, spins: bool) -> Rings {
        let rings = Rings {
            own: Arc::new(own),
            theirs: Arc::new(theirs),
            generation: fork::generation(),
            woken: 0,
            wakes: 0,
            heard_bytes: 0,
            dozed: None,
            busy: false,
            looks: 0,
            heard: stats::tick(),
            spins,
            haste: 0,
            wants: false,
            wide: false,
            next: 0,
            overlooks: None,
            ended: false,
            kept: None,
        };
        rings.own.word(Word::Waits).store(BY_BYTE, SeqCst);
        rings
    }

    /// Puts the concatenation of `pieces` into the ring. Returns how many bytes it took.
    ///
    /// # Errors
    /// `EAGAIN` when it takes nothing now; `EPIPE` when the peer has gone; `EPROTO` when it lies.
    pub fn send(&mut self, socket: RawFd, pieces: &[IoVec<'_>]) -> io::Result<usize> {
        let total: usize = pieces.iter().map(IoVec::len).sum();
        // What would be written for a peer that has gone counts as never sent: the call may be made again.
        if self.ended || self.is_quiet() && !self.is_there(socket) {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut pieces = pieces.iter();
        let (mut piece, mut at, mut sent) = (None, 0, 0);
        let mut produced = self.own.word(Word::Produced).load(Relaxed);
        self.want_room(false);
        // Since when there has been little room, and how much had been sent then.
        let mut short: Option<(Instant, usize)> = None;
        // How much the other end was told of, and after how much more it is told again.
        let (mut told, mut next) = (0, STEP);
        while sent < total {
            let used = self.used(produced)?;
            let wide = if used == 0 { self.lay(total - sent, produced) } else { self.is_wide() };
            let room = width(wide).saturating_sub(used);
            if room == 0 {
                if std::mem::replace(&mut told, sent) < sent {
                    self.wake(socket);
                }
                if self.waits_for_room(produced)? {
                    continue;
                }
                break;
            }
            let wanted = STEP.min(total - sent);
            if room < wanted {
                let now = Instant::now();
                let (since, before) = *short.get_or_insert((now, sent));
                if sent - before >= STEP {
                    short = Some((now, sent));
                } else if now - since >= ROOM && !self.asks_for_room(produced, wanted)? {
                    self.haste = HASTE;
                    if told < sent {
                        self.wake(socket);
                    }
                    break;
                }
            }
            let base = self.own.word(Word::Base).load(Relaxed);
            let end = sent + room.min(STEP).min(total - sent);
            while sent < end {
                let from: &IoVec<'_> = match piece {
                    Some(piece) => piece,
                    None => match pieces.next() {
                        Some(next) => piece.insert(next),
                        None => return Err(ErrorKind::InvalidInput.into()),
                    },
                };
                let n = (from.len() - at).min(end - sent);
                self.own.fill((produced.wrapping_sub(base), wide), from, at, n);
                (produced, at, sent) = (produced.wrapping_add(n as u64), at + n, sent + n);
                if at == from.len() {
                    (piece, at) = (None, 0);
                }
            }
            if wide {
                self.next = produced.wrapping_sub(base) % RING as u64;
            }
            self.own.word(Word::Produced).store(produced, Release);
            // The other end takes this while we copy the next. If it does not, because it shares a processor with somebody,
            // it is not woken for every step.
            if sent == total || sent - told >= next {
                self.wake(socket);
                (told, next) = (sent, 2 * next);
            }
        }
        match sent {
            0 if total > 0 => Err(ErrorKind::WouldBlock.into()),
            sent => Ok(sent),
        }
    }

    /// Takes what is there. Returns how many bytes came; 0 means that the peer has gone.
    ///
    /// # Errors
    /// `EAGAIN` when nothing is there now: the socket tells when there is, unless somebody looks without a pause. `EPROTO`
    /// when the peer lies; else the socket's errno.
    pub fn receive(&mut self, socket: RawFd, pieces: &mut [IoVecMut<'_>]) -> io::Result<usize> {
        if pieces.iter().all(|piece| piece.is_empty()) {
            return Err(ErrorKind::InvalidInput.into());
        }
        // A peer that wakes us endlessly must not keep us here.
        for _ in 0..ROUNDS {
            let taken = self.take(pieces)?;
            if taken > 0 {
                self.heard_now();
                self.wake_for_room(socket);
                if self.is_woken() {
                    // The byte that woke us for this would do so once more. An error shows up in the next look.
                    let _ = self.hear(socket);
                }
                return Ok(taken);
            }
            if self.ended {
                return Ok(0);
            }
            if self.busy {
                self.looks = self.looks.wrapping_add(1);
                if !self.looks.is_multiple_of(ASKED_BUSY) {
                    return Err(ErrorKind::WouldBlock.into());
                }
            } else if !self.begin_to_wait(None)? {
                continue;
            }
            if !self.hear(socket)? {
                break;
            }
        }
        Err(ErrorKind::WouldBlock.into())
    }

    /// Makes the connection this process's, whoever made it.
    pub fn claim(&mut self) {
        self.generation = fork::generation();
    }

    /// Somebody looks without a pause from here on, until [`Rings::rest`]: this end need not be woken. False if another
    /// process may be waiting on it.
    pub fn spin(&mut self) -> bool {
        if self.is_forked() {
            return false;
        }
        self.busy = true;
        self.stop_waiting();
        true
    }

    /// Says that this end waits. False if there is something to do already. What has woken us is left in the socket: the
    /// caller may not be the one that it has to wake. A process that was forked wakes the one that it was forked from too.
    pub fn rest(&mut self) -> bool {
        self.busy = false;
        self.may_sleep(BY_BYTE)
    }

    /// The same for a thread that sleeps on this, and on nothing else, for a short time. `None` if it has slept like that in
    /// vain and has to [`Rings::rest`]; if there is something to do; and, where threads look before they sleep, while the
    /// peer sleeps. The peer leaves its processor as soon as it has woken us. With a socket the kernel puts the thread that
    /// is woken there; with a bell it looks for another processor. A thread that never looks sleeps here before each
    /// message, and then what counts is that a bell takes 3 us less of both ends' time than a byte that is sent, polled for
    /// and read.
    pub fn doze(&mut self) -> Option<Bell> {
        if self.spins && self.theirs.get(Word::Waits) & WAITS != 0 {
            return None;
        }
        let consumed = self.own.word(Word::Consumed).load(Relaxed);
        if self.is_forked() || self.dozed.replace(consumed) == Some(consumed) {
            return None;
        }
        self.busy = false;
        // Taken before this end says that it waits: any ring from then on ends the sleep.
        let bell = Bell::of(&self.theirs);
        self.may_sleep(BY_BELL).then_some(bell)
    }

    fn may_sleep(&mut self, by: u64) -> bool {
        // A lie shows up in the next look.
        let quiet = !self.ended && self.begin_to_wait(Some(by)).is_ok_and(|quiet| quiet);
        let produced = self.own.word(Word::Produced).load(Relaxed);
        quiet && !(self.wants && self.room(produced).is_ok_and(|room| room > 0))
    }

    /// As [`crate::provider::QueuePair::tell_company`].
    pub fn tell_company(&mut self, others: u32) {
        let word = self.own.word(Word::Company);
        // The peer has the line in its cache.
        if word.load(Relaxed) != u64::from(others) {
            word.store(others.into(), Relaxed);
        }
    }

    /// As [`crate::provider::QueuePair::company`].
    pub fn company(&self) -> u32 {
        self.theirs.get(Word::Company).min(u32::MAX.into()) as u32
    }

    /// As [`crate::provider::QueuePair::outbox`].
    pub fn outbox(&mut self) -> Option<Buf> {
        if !self.goes_wide(LONG) {
            return None;
        }
        let is_taken = |(_, handle): &(Region, u32)| self.theirs.get(Word::Taken) == u64::from(*handle);
        self.kept.take_if(|kept| is_taken(kept));
        Buf::outbox(&self.own)
    }

    /// As [`crate::provider::QueuePair::show`].
    pub fn show(&self, address: usize, handle: u32) -> Option<u64> {
        self.own.show(address, handle)
    }

    /// The offset under which the peer knows what lies there. `None`: it is not in the outbox.
    pub fn offset_of(&self, region: &Region) -> Option<u64> {
        self.own.offset_of(region.as_ptr().addr())
    }

    /// Keeps what is shown under this handle until the peer has taken it.
    pub fn keep(&mut self, region: Region, handle: u32) {
        self.kept = Some((region, handle));
    }

    /// As [`crate::provider::QueuePair::shown`].
    pub fn shown(&self, segment: Segment) -> Option<Shown> {
        Shown::of(&self.own, &self.theirs, segment)
    }

    /// The connection is over.
    pub fn end(&self) {
        self.own.end();
    }

    /// As [`crate::provider::QueuePair::wakes`].
    pub fn wakes(&self) -> u64 {
        self.wakes
    }

    /// Wakes a peer that says that it looks, but has not for a while: once for what it overlooks. Returns when to check
    /// again.
    pub fn remind(&mut self, socket: RawFd) -> Option<Instant> {
        let consumed = self.theirs.get(Word::Consumed);
        let all = consumed == self.own.word(Word::Produced).load(Relaxed);
        if all || self.ended || self.theirs.get(Word::Waits) & WAITS != 0 {
            self.overlooks = None;
            return None;
        }
        let now = Instant::now();
        let at = match self.overlooks {
            Some((before, at)) if before == consumed => at?,
            _ => now + OVERLOOKED,
        };
        let late = at <= now;
        self.overlooks = Some((consumed, (!late).then_some(at)));
        if late {
            self.call(socket);
        }
        (!late).then_some(at)
    }

    /// Whether nothing more has come since there was less than asked for; then the socket tells when it does.
    pub fn drained(&mut self) -> bool {
        self.busy || self.begin_to_wait(None).is_ok_and(|quiet| quiet)
    }

    /// Whether this end waits for room.
    pub fn wants_room(&self) -> bool {
        self.wants
    }

    /// Says whether this end waits for room.
    fn want_room(&mut self, wants: bool) {
        self.wants = wants;
        self.own.word(Word::WantsRoom).store(wants.into(), Relaxed);
    }

    /// Whether there is something to do.
    pub fn has_come(&self) -> bool {
        self.ended || self.there(self.own.word(Word::Consumed).load(Relaxed)).map_or(true, |there| there > 0)
    }

    /// Bytes that the peer has not taken.
    pub fn unconsumed(&self) -> u64 {
        let produced = self.own.word(Word::Produced).load(Relaxed);
        self.used(produced).map_or(0, |used| used as u64)
    }

    /// How many bytes are in the ring.
    fn used(&self, produced: u64) -> io::Result<usize> {
        let used = produced.wrapping_sub(self.theirs.get(Word::Consumed));
        if used > RING as u64 { Err(lie()) } else { Ok(used as usize) }
    }

    /// How many more bytes the ring takes.
    fn room(&self, produced: u64) -> io::Result<usize> {
        Ok(width(self.is_wide()).saturating_sub(self.used(produced)?))
    }

    /// Decides where in the ring, which is empty, this many bytes go; the first of them has the number `produced`. Returns
    /// whether the ring is long now.
    #[inline]
    fn lay(&mut self, bytes: usize, produced: u64) -> bool {
        let wide = self.goes_wide(bytes);
        let mut at = 0;
        if wide {
            let lap = RING / WIDE.load(Relaxed).max(1).pow(2);
            at = if self.next < lap as u64 { self.next } else { 0 };
        }
        self.own.word(Word::Wide).store(wide.into(), Relaxed);
        self.own.word(Word::Base).store(produced.wrapping_sub(at), Relaxed);
        wide
    }

    /// Whether this many bytes go into a long ring.
    #[inline]
    fn goes_wide(&mut self, bytes: usize) -> bool {
        // As nearly always.
        if bytes < LONG {
            return false;
        }
        let one_more = |wide: usize| (wide < WIDE_MOST).then_some(wide + 1);
        self.wide = self.wide || WIDE.fetch_update(Relaxed, Relaxed, one_more).is_ok();
        self.wide
    }

    /// Whether its ring is long just now.
    pub fn is_wide(&self) -> bool {
        self.own.word(Word::Wide).load(Relaxed) != 0
    }

    /// Waits a little while for room. False if there is none: the peer will see that this end wants some.
    fn waits_for_room(&mut self, produced: u64) -> io::Result<bool> {
        if self.spins && self.haste == 0 {
            let until = Instant::now() + ROOM;
            while Instant::now() < until {
                for _ in 0..64 {
                    if self.room(produced)? > 0 {
                        return Ok(true);
                    }
                    spin_loop();
                }
                // The peer may be waiting for this processor.
                yield_now();
            }
            self.haste = HASTE;
        }
        self.haste = self.haste.saturating_sub(1);
        self.asks_for_room(produced, 1)
    }

    /// Says that this end waits for room. False if there are not `bytes` of it: the peer will see that this end waits when
    /// it takes something.
    fn asks_for_room(&mut self, produced: u64, bytes: usize) -> io::Result<bool> {
        self.want_room(true);
        fence(SeqCst);
        let there = self.room(produced)? >= bytes;
        if there {
            self.want_room(false);
        }
        Ok(there)
    }

    fn take(&mut self, pieces: &mut [IoVecMut<'_>]) -> io::Result<usize> {
        let mut pieces = pieces.iter_mut();
        let (mut piece, mut at, mut taken, mut short) = (pieces.next(), 0, 0, 0);
        let mut consumed = self.own.word(Word::Consumed).load(Relaxed);
        while let Some(to) = piece.as_mut() {
            let there = self.there(consumed)?;
            let n = there.min(STEP).min(to.len() - at);
            short += usize::from(n == there && n < STEP);
            if short > SHORT {
                break;
            }
            if n == 0 {
                if at < to.len() {
                    break;
                }
                (piece, at) = (pieces.next(), 0);
                continue;
            }
            let (base, wide) = (self.theirs.get(Word::Base), self.theirs.get(Word::Wide) != 0);
            self.theirs.take((consumed.wrapping_sub(base), wide), to, at, n);
            let after = consumed.wrapping_add(n as u64);
            // A process that was forked from us, or that we were forked from, may take them too: only one gets them.
            match self.own.word(Word::Consumed).compare_exchange(consumed, after, Release, Relaxed) {
                Ok(_) => (consumed, at, taken) = (after, at + n, taken + n),
                Err(actual) => consumed = actual,
            }
        }
        Ok(taken)
    }

    /// Bytes that have come and were not taken.
    fn there(&self, consumed: u64) -> io::Result<usize> {
        let there = self.theirs.get(Word::Produced).wrapping_sub(consumed);
        if there > RING as u64 { Err(lie()) } else { Ok(there as usize) }
    }

    /// Whether nothing has come for [`QUIET`] or, by a clock that ticks more slowly, since its latest tick but one.
    fn is_quiet(&self) -> bool {
        stats::tick().saturating_sub(self.heard) >= QUIET.as_nanos() as u64
    }

    fn heard_now(&mut self) {
        self.heard = stats::tick();
        self.looks = 0;
        self.stop_waiting();
    }

    /// Whether this process was forked from the one that made the connection, which may still wait on it.
    fn is_forked(&self) -> bool {
        self.generation != fork::generation()
    }

    fn stop_waiting(&mut self) {
        let waits = self.own.word(Word::Waits);
        let now = waits.load(Relaxed);
        if now & WAITS != 0 && !self.is_forked() {
            waits.store(now & !WAITS, Relaxed);
        }
    }

    /// Says that this end waits, and how; `None`: as it does already, else for a byte. False if something has come.
    fn begin_to_wait(&mut self, by: Option<u64>) -> io::Result<bool> {
        let waits = self.own.word(Word::Waits);
        let now = waits.load(Relaxed);
        // A process that was forked says so every time, and each time is a new wait.
        let says = now & WAITS != 0 && by.is_none_or(|by| now & WAITS == by);
        if !says || self.is_forked() {
            let by = by.unwrap_or(BY_BYTE);
            waits.store((now & !WAITS).wrapping_add(NEXT) | by, Relaxed);
        }
        fence(SeqCst);
        Ok(self.there(self.own.word(Word::Consumed).load(Acquire))? == 0)
    }

    /// Wakes the peer, if it waits and has not been woken.
    fn wake(&mut self, socket: RawFd) {
        fence(SeqCst);
        let waits = self.theirs.get(Word::Waits);
        if waits & WAITS == 0 || waits == self.woken {
            return;
        }
        self.woken = waits;
        self.wakes += 1;
        match waits & BY_BELL {
            0 => self.call(socket),
            _ => self.own.ring(),
        }
    }

    /// Makes the peer's socket readable.
    fn call(&mut self, socket: RawFd) {
        self.own.word(Word::Woken).fetch_add(1, Release);
        sync::meet();
        // A socket that takes nothing more holds something that will wake the peer; and the end of a socket shows when it is
        // read.
        let _ = socket::send(socket, &[IoVec::from_slice(&[0])]);
    }

    /// The same for a peer that waits for room.
    fn wake_for_room(&mut self, socket: RawFd) {
        fence(SeqCst);
        if self.theirs.get(Word::WantsRoom) != 0 {
            self.wake(socket);
        }
    }

    /// Whether the socket has something to read, or will have.
    fn is_woken(&self) -> bool {
        self.theirs.get(Word::Woken) != self.heard_bytes
    }

    /// Reads the socket, if there may be something in it. True if the caller has to look once more for what has come.
    fn hear(&mut self, socket: RawFd) -> io::Result<bool> {
        self.looks = self.looks.wrapping_add(1);
        if !self.is_woken() && !self.looks.is_multiple_of(ASKED) && !self.is_quiet() {
            return Ok(false);
        }
        let mut bytes = [0; 64];
        match socket::receive(socket, &mut [IoVecMut::from_mut(&mut bytes)]) {
            Ok(0) => self.ended = true,
            Ok(n) => {
                self.heard_bytes = self.heard_bytes.wrapping_add(n as u64);
                // The peer wakes nobody twice from the same wait.
                self.stop_waiting();
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.heard = stats::tick();
                return Ok(false);
            }
            // What the peer sent before it went is taken first: the next read of the socket says that it has gone.
            Err(_) if self.there(self.own.word(Word::Consumed).load(Relaxed))? > 0 => {}
            Err(e) => return Err(e),
        }
        Ok(true)
    }

    /// Whether the connection is there.
    fn is_there(&mut self, socket: RawFd) -> bool {
        match socket::peek(socket) {
            Ok(there) => there.is_some(),
            Err(e) => {
                self.heard = stats::tick();
                e.kind() == ErrorKind::WouldBlock
            }
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.end();
        if self.wide {
            WIDE.fetch_sub(1, Relaxed);
        }
    }
}

fn lie() -> io::Error {
    io::Error::from_raw_os_error(libc::EPROTO)
}
