//! Two rings of bytes, one each way, that are used as the stream of a TCP socket would be: what does not fit now waits, and
//! what has not come yet would block. The socket stays: its end is the end, and its bytes wake who waits on it.
//!
//! # Waking
//! Each end says whether it waits, and how it has to be woken: [`Word::Waits`]. Who puts bytes into its ring, or takes some
//! while the other end wants room, wakes the other end if that waits, once for each time that it does: by one byte over the
//! socket, which every loop polls; or, cheaper, by a [`Bell`], on which a thread sleeps that waits for nothing else
//! ([`Rings::doze`]), and for a short time only, because the end of the connection does not ring. An end says that it waits and
//! looks again, in this order; the other one acts and then looks whether somebody waits: one of them sees the other. While an
//! end looks by itself ([`Rings::spin`]) it costs its peer no system call. Its program may have left it in the midst of that:
//! who waits for it wakes it all the same, after a while ([`Rings::remind`]).
//!
//! The bytes that wake are counted in [`Word::Woken`], so that nobody asks the socket for such as are not there. Now and then
//! it is asked all the same: for the end of the connection, and for bytes that nobody counted.
//!
//! # Invariants
//! - What is in the ring lies between `Consumed` and `Produced`: more than [`RING`] bytes is a lie of the peer's.
//! - `Base` and `Wide` change only while the ring is empty.
//! - The numbers of our own segment are its words: a process that was forked from us goes on where we are.
//!
//! # Which bytes of a ring are used
//! To write a line of memory that the other end's processor has read is dear while it is in that one's cache: 64 KiB took
//! 10 us, and 2 us where neither had them. (Two processors with 1 MiB of their own.) So a long message begins where the latest
//! one ended, and a line is written again when a ring that is longer than the caches has been gone round. Several connections
//! push each other's lines out: the more there are, the less of it each goes round, and 16 of them no more than a message: so
//! they keep to their own caches, and 64 KiB written by 16 were a quarter quicker. Short messages, of which several fit into the
//! nearest cache, lie at the ring's beginning: 4 KiB there took 0.2 us, elsewhere 0.5.
//!
//! A long ring takes a long message as a whole too, so that an end that sleeps or serves others is not woken for each part of
//! it. Only [`WIDE_MOST`] connections of a process have one, each until it ends: the pages are not given back before. To make a
//! hole in the file (`MADV_REMOVE`) the kernel goes through all mappings of it, and a hostile peer makes as many as it likes;
//! with 120,000 of them that took 270 ms.
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

/// So many bytes are copied before the other end is told of them: it copies them while we copy the next.
const STEP: usize = 16 << 10;

/// How long who sends waits for room before it sleeps: as long as it takes to wake the other end. A peer that takes less than a
/// [`STEP`] in the time, byte after byte perhaps, is waited for no longer.
const ROOM: Duration = Duration::from_micros(50);

/// After such waits that were in vain, or brought less than a [`STEP`], so many others sleep at once.
const HASTE: u32 = 16;

/// An end that has heard nothing for so long asks the socket whether its peer is there.
const QUIET: Duration = Duration::from_millis(1);

/// Of so many looks in vain one asks the socket; and one while it is looked at without a pause.
const ASKED: u32 = 8;
const ASKED_BUSY: u32 = 1 << 12;

/// A peer that says that it looks, and has taken nothing for so long, may be elsewhere: in a routine of its program.
const OVERLOOKED: Duration = Duration::from_millis(5);

/// What is sent in one go and is shorter than this goes into a narrow ring.
pub(super) const LONG: usize = 16 << 10;

/// Connections of a process whose rings may be long: together they have 64 MiB.
pub(super) const WIDE_MOST: usize = 16;

/// How many there are.
pub(super) static WIDE: AtomicUsize = AtomicUsize::new(0);

/// Bits of [`Word::Waits`]: it waits for a byte, or for a bell. The others count its waits.
const BY_BYTE: u64 = 1;
const BY_BELL: u64 = 2;
const WAITS: u64 = BY_BYTE | BY_BELL;
const NEXT: u64 = 4;

/// How often something is looked for in one go.
const ROUNDS: usize = 16;

/// How often less than a [`STEP`] is taken in one go: more may have come meanwhile, byte after byte perhaps.
const SHORT: usize = 4;

/// Both rings of a connection.
pub struct Rings {
    own: Arc<Own>,
    theirs: Arc<Theirs>,
    generation: u64,
    /// The wait of the peer that it was woken from.
    woken: u64,
    /// How often it was.
    wakes: u64,
    /// Bytes that have woken us.
    heard_bytes: u64,
    /// What had been taken when it was waited for a bell last.
    dozed: Option<u64>,
    /// Whether somebody looks without a pause.
    busy: bool,
    /// Looks in vain.
    looks: u32,
    /// When something came last, by [`stats::tick`].
    heard: u64,
    /// Whether it may be waited for room without a sleep; how often it is not.
    spins: bool,
    haste: u32,
    /// Whether this process waits for room. What [`Word::WantsRoom`] says may be the word of a child that has ended.
    wants: bool,
    /// One of [`WIDE`].
    wide: bool,
    /// Where a long ring goes on, from its beginning.
    next: u64,
    /// What a peer that says that it looks had taken when it was found not to; and when it is woken, if it was not.
    overlooks: Option<(u64, Option<Instant>)>,
    ended: bool,
    /// What the peer is to take from the outbox, and under which handle.
    kept: Option<(Region, u32)>,
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

    /// Puts the concatenation of `pieces` into the ring; how many bytes it took.
    ///
    /// # Errors
    /// `EAGAIN` when it takes nothing now; `EPIPE` when the peer has gone; `EPROTO` when it lies.
    pub fn send(&mut self, socket: RawFd, pieces: &[IoVec<'_>]) -> io::Result<usize> {
        let total: usize = pieces.iter().map(IoVec::len).sum();
        // What is written for a peer that has gone was never sent: the call may be made again.
        if self.ended || self.is_quiet() && !self.is_there(socket) {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut pieces = pieces.iter();
        let (mut piece, mut at, mut sent) = (None, 0, 0);
        let mut produced = self.own.word(Word::Produced).load(Relaxed);
        self.want_room(false);
        // Since when there is little room, and how much was sent then.
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
            // It takes this while we copy the next. Where it does not, for it shares a processor with somebody, it is not woken
            // for every step.
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

    /// Takes what is there; how many bytes came. 0 means that the peer has gone.
    ///
    /// # Errors
    /// `EAGAIN` when nothing is there now: the socket tells when there is, unless somebody looks without a pause. `EPROTO` when
    /// the peer lies; what the socket says.
    pub fn receive(&mut self, socket: RawFd, pieces: &mut [IoVecMut<'_>]) -> io::Result<usize> {
        if pieces.iter().all(|piece| piece.is_empty()) {
            return Err(ErrorKind::InvalidInput.into());
        }
        // A peer that wakes us without end does not keep us.
        for _ in 0..ROUNDS {
            let taken = self.take(pieces)?;
            if taken > 0 {
                self.heard_now();
                self.wake_for_room(socket);
                if self.is_woken() {
                    // What has woken us for this would do so once more. An error shows up in the next look.
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

    /// The connection is this process's, whoever made it.
    pub fn claim(&mut self) {
        self.generation = fork::generation();
    }

    /// Somebody looks without a pause from here on, until [`Rings::rest`]: it need not be woken.
    /// False where another process may be waiting on it.
    pub fn spin(&mut self) -> bool {
        if self.is_forked() {
            return false;
        }
        self.busy = true;
        self.stop_waiting();
        true
    }

    /// Says that this end waits. False if there is something to do already. What has woken us is left: who asks may not be
    /// the one that it has to wake.
    pub fn rest(&mut self) -> bool {
        self.busy = false;
        if self.is_forked() {
            return true;
        }
        self.may_sleep(BY_BYTE)
    }

    /// The same for a thread that sleeps on this, and on nothing else, for a short time: one that has slept so in vain has to
    /// [`Rings::rest`]. `None` too where there is something to do; and, where threads look before they sleep, while the peer
    /// sleeps: it is off its processor as soon as it has woken us, and a socket has the kernel put who is woken there. A bell
    /// has it look for another one. Who never looks sleeps here before each message, and then what counts is that a bell takes
    /// 3 us less of both ends' time than a byte that is sent, polled for and read.
    pub fn doze(&mut self) -> Option<Bell> {
        if self.spins && self.theirs.get(Word::Waits) & WAITS != 0 {
            return None;
        }
        let consumed = self.own.word(Word::Consumed).load(Relaxed);
        if self.is_forked() || self.dozed.replace(consumed) == Some(consumed) {
            return None;
        }
        self.busy = false;
        // Before it is said that this end waits: what is rung from then on ends the sleep.
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

    /// Wakes a peer that says that it looks, and has not for a while: once for what it overlooks. When to see to that again.
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

    /// Whether nothing more has come since less than asked for was there; then the socket tells when it does.
    pub fn drained(&mut self) -> bool {
        self.busy || self.begin_to_wait(None).is_ok_and(|quiet| quiet)
    }

    /// Whether this end waits for room.
    pub fn wants_room(&self) -> bool {
        self.wants
    }

    /// Says whether it does.
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

    /// How many more it takes.
    fn room(&self, produced: u64) -> io::Result<usize> {
        Ok(width(self.is_wide()).saturating_sub(self.used(produced)?))
    }

    /// Decides where in the ring so many bytes lie, the first of which has this number. There is nothing in it. Whether it is
    /// long now.
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

    /// Whether so many bytes go into a long ring.
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

    /// Waits for room, a little while. False if there is none: the peer will see that this end wants some.
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
                // It may be waiting for this processor.
                yield_now();
            }
            self.haste = HASTE;
        }
        self.haste = self.haste.saturating_sub(1);
        self.asks_for_room(produced, 1)
    }

    /// Says that this end waits for room. False if there is not so much of it: the peer will see that when it takes something.
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
            // A process that was forked from us, or from which we were, may take them too: one of them has them.
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

    /// Whether this process was forked from the one that made the connection, which may wait on it yet.
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

    /// Says that this end waits, and how; `None`: as it does, or for a byte. False if something has come.
    fn begin_to_wait(&mut self, by: Option<u64>) -> io::Result<bool> {
        let waits = self.own.word(Word::Waits);
        let now = waits.load(Relaxed);
        // A process that was forked says so all the time, and each time is a new one.
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

    /// Has the peer's socket tell something.
    pub fn call(&mut self, socket: RawFd) {
        self.own.word(Word::Woken).fetch_add(1, Release);
        sync::meet();
        // A socket that takes nothing has something that will wake the peer; and its end shows when it is read.
        let _ = socket::send(socket, &[IoVec::from_slice(&[0])]);
    }

    /// The same for a peer that waits for room.
    fn wake_for_room(&mut self, socket: RawFd) {
        fence(SeqCst);
        if self.theirs.get(Word::WantsRoom) != 0 {
            self.wake(socket);
        }
    }

    /// Whether the socket tells something, or will.
    fn is_woken(&self) -> bool {
        self.theirs.get(Word::Woken) != self.heard_bytes
    }

    /// Takes what the socket has to say, if it may be something. True if what has come has to be looked at once more.
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
            // What the peer gave before it went is taken first: the next call of the socket says that it has gone.
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
