//! Memory that this process shares with its peer, in another process of the host: a ring of bytes, an outbox, and a few words,
//! which one end writes and the other maps for reading.
//!
//! # The outbox
//! A long message is encoded in the outbox, and the other end copies it from there to where it wants it: one copy, where a ring
//! takes two, and needs both ends at the same time. A Call is exposed under a handle like any other memory, with an offset that
//! begins with [`IN_OUTBOX`]; a reply is shown under the handle of the Reply chunk that it would have been written to.
//! [`Word::Shown`] says which handle. That word is cleared before anything else is written to the outbox, and read before and
//! after each copy: an end that has copied what was no longer there finds out. One message at a time has the outbox: a Call until
//! its end, a reply until [`Word::Taken`] says that it was decoded. Other messages go through the ring.
//!
//! # Who can do what
//! A server makes both segments ([`blank`]) and passes them to its client. Each end becomes the writer of one ([`Own::of`]), after
//! which nobody else can, not even through the descriptor (`F_SEAL_FUTURE_WRITE`).
//!
//! **The peer is hostile.** What it writes may change at any moment. There is never a reference to its memory, nor a slice or a
//! `Region` of it: words are loaded as atomics, each once, and bytes are copied into memory of our own before anybody looks at
//! them. It cannot shrink under our hands (`F_SEAL_SHRINK`), which would be a SIGBUS. Nor can holes be made in it from when it is
//! mapped here: the kernel would go through all mappings of the file, of which a peer can make as many as it likes, and have
//! us wait for that when we map it or give it back. Nor can huge pages be made of it, which would be the same: see
//! [`super::pins`]. The pages that are pinned are the file's, because it was not changed before ([`mark`]).
//!
//! The server that has made a client's segment may have mapped it for writing before, so that what lies in the client's outbox may
//! change too. That is why a client takes a segment only from those who could write to its memory in other ways, root and its
//! own user, unless its program wants nothing but shared memory.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
use std::time::Duration;

use rustix::fs::{
    Mode, SealFlags, Timespec, Timestamps, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, futimens,
};
use rustix::io::Errno;

use super::pins::Pins;
use super::{Buf, IoVec, IoVecMut, Region};
use crate::wire::{Handle, Segment};
use crate::{fork, process, stats, sync, wait};

/// Bytes of the ring, a power of two: more than the caches of two processors, and enough for most messages to go into it whole
/// while their receiver is busy elsewhere.
pub const RING: usize = 4 << 20;

/// Bytes of the ring that short messages, and connections beyond the first few, use: a power of two.
pub const NARROW: usize = 256 << 10;

/// Bytes of the outbox, which lies after the ring: most long messages fit.
pub const OUTBOX: usize = 4 << 20;

/// The beginning of the offsets of what lies in an outbox.
const IN_OUTBOX: u64 = u64::from_be_bytes(*b"outbx\0\0\0");

/// Bytes before the ring, for the words.
const HEAD: usize = 4 << 10;

/// Bytes of a segment. Not a multiple of a huge page: memory of huge pages passed by a peer, which may run out under our hands,
/// cannot have this length.
pub const SIZE: usize = HEAD + RING + OUTBOX;

/// Segments that a process maps: a process may have 65,530 mappings, and its program needs some.
const MOST: usize = 16 << 10;

/// How many are mapped now.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// What nobody may do to a segment: change its length.
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Nor, once it has its writer, write it except through a mapping that exists, or make a hole in it.
const WRITTEN: SealFlags = FIXED.union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// How many a bell wakes: more than threads of a peer and of its children sleep at once.
const RUNG_MOST: u32 = 8;

/// A ring that takes this long is suspect, in nanoseconds: the kernel walks everything that sleeps in the same place of its table,
/// and a peer could have a million sleep there, on other words of the segment.
const RING_SLOW: u64 = 5_000_000;

/// How many rings of a suspect bell may be slow by the processor's time, before it is rung no more. Its sleepers look by
/// themselves after a while. After so many others it is suspect no longer: to ask for that time takes longer than to ring.
const RINGS_SLOW: u32 = 2;
const RINGS_TIMED: u32 = 64;

/// A word of a segment. Those that are written on different occasions lie in different cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// Bytes that have been put into the ring.
    Produced = 0,
    /// The number of the one that lies, or will lie, at the ring's beginning.
    Base = 1,
    /// Nonzero while the ring is as long as [`RING`]; otherwise it is as long as [`NARROW`].
    Wide = 2,
    /// Bytes that have been taken from the other end's ring.
    Consumed = 16,
    /// Whether this end waits and has to be woken, how, and which of its waits this is.
    Waits = 32,
    /// Nonzero while this end waits for room in its ring too.
    WantsRoom = 33,
    /// How many other peers this end is serving now.
    Company = 34,
    /// How often this end has woken the other by a byte.
    Woken = 48,
    /// How often this end has rung for the other: see [`Bell`].
    Rung = 49,
    /// The handle under which the other end may take what lies in the outbox; 0: it may not.
    Shown = 64,
    /// The handle of what this end last took from the other's outbox and no longer needs.
    Taken = 80,
}

/// A mapping of [`SIZE`] bytes.
struct Mapping {
    base: NonNull<u8>,
    /// See [`Own::pinned`].
    pins: Option<Pins>,
}

// SAFETY: the bytes are accessed through atomics and by copies between distinct memory only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, protection: libc::c_int) -> io::Result<Mapping> {
        if COUNT.load(Relaxed) >= MOST {
            return Err(Errno::NOMEM.into());
        }
        // SAFETY: a mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // What a peer says does not belong in a core dump. Where the kernel cannot leave it out, it is in there.
        // SAFETY: the mapping that was just made.
        unsafe { libc::madvise(base, SIZE, libc::MADV_DONTDUMP) };
        // From here on Drop unmaps.
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        COUNT.fetch_add(1, Relaxed);
        Ok(Mapping { base, pins: None })
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        sync::meet();
        let place = self.base.as_ptr().cast::<AtomicU64>().wrapping_add(word as usize);
        // SAFETY: inside the mapping, which lives as long as `self` and is aligned to a page; accessed as atomics only.
        unsafe { &*place }
    }

    /// Half of a word, which futex(2) can wait for.
    fn half(&self, word: Word) -> &AtomicU32 {
        sync::meet();
        let place = self.base.as_ptr().cast::<AtomicU32>().wrapping_add(2 * word as usize);
        // SAFETY: as in `word`; accessed as this half only.
        unsafe { &*place }
    }

    fn outbox(&self) -> NonNull<u8> {
        // SAFETY: inside the mapping, which has SIZE bytes.
        unsafe { self.base.add(HEAD + RING) }
    }

    /// The address of the byte with this number in a ring of this length, [`NARROW`] or [`RING`], and how many bytes there are
    /// from it to the ring's end.
    fn ring(&self, number: u64, wide: bool) -> (*mut u8, usize) {
        let width = width(wide);
        let at = number as usize & (width - 1);
        (self.base.as_ptr().wrapping_add(HEAD + at), width - at)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which nobody holds a reference.
        unsafe { libc::munmap(self.base.as_ptr().cast(), SIZE) };
        COUNT.fetch_sub(1, Relaxed);
    }
}

/// Bytes of a ring.
pub fn width(wide: bool) -> usize {
    if wide { RING } else { NARROW }
}

/// The segment that this end writes.
pub struct Own {
    mapping: Mapping,
    /// The process that made it: in a process forked from it, the outbox is the parent's.
    generation: u64,
    /// The outbox is in use.
    taken: AtomicBool,
    /// The connection is over: what the peer has not taken yet stays as it is.
    over: AtomicBool,
    /// How many more rings are timed since one has taken long; and how many of all timed ones have, by the processor's time.
    timed: AtomicU32,
    slow: AtomicU32,
}

/// A segment of zeros, which nobody writes yet.
///
/// # Errors
/// As [`process::file_in_memory`].
pub fn blank() -> io::Result<OwnedFd> {
    let file = process::file_in_memory("rpcrdma", SIZE)?;
    // Another user who has its descriptor can give it no attributes, either.
    fchmod(&file, Mode::empty())?;
    fcntl_add_seals(&file, FIXED)?;
    Ok(file)
}

/// When a segment was last changed, as [`mark`] says, in seconds since 1970.
const MARKED: i64 = 1;

/// Marks a segment that is passed to its writer: each hole that is made in it, and each byte that is written to it, removes the
/// mark, which only the owner of the file and root can set.
///
/// # Errors
/// `EPERM` if the owner is another user than this process's: one whose rights it only borrows. The errno of what the kernel
/// refuses.
pub fn mark(file: &OwnedFd) -> io::Result<()> {
    let owner = fstat(file)?.st_uid;
    if owner != 0 && process::only_user() != Some(owner) {
        return Err(Errno::PERM.into());
    }
    let time = Timespec { tv_sec: MARKED, tv_nsec: 0 };
    Ok(futimens(file, &Timestamps { last_access: time, last_modification: time })?)
}

/// Whether a segment still has its mark.
pub fn is_marked(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|stat| (stat.st_mtime, stat.st_mtime_nsec) == (MARKED, 0))
}

/// Whether a segment of ours has a writer: from then on there is no other one.
pub fn is_written(file: &OwnedFd) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(WRITTEN))
}

/// Whether this file has the length of a segment. To be asked only of files that have seals, which are in memory: others may
/// take their time to answer.
fn is_as_long(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|stat| stat.st_size == SIZE as i64)
}

impl Own {
    /// A segment of zeros that this process writes, and the descriptor for the peer.
    ///
    /// # Errors
    /// As [`blank`]; `EINVAL` from a kernel before 5.1.
    pub fn new() -> io::Result<(Own, OwnedFd)> {
        let file = blank()?;
        Ok((Own::of(&file)?, file))
    }

    /// Becomes the writer of a blank segment. If that fails, the segment is as it was.
    ///
    /// # Errors
    /// `EINVAL` for anything but a segment whose length is fixed; `EPERM` if it has a writer; the errno of what the kernel refuses.
    pub fn of(file: &OwnedFd) -> io::Result<Own> {
        if !fcntl_get_seals(file)?.contains(FIXED) || !is_as_long(file) {
            return Err(Errno::INVAL.into());
        }
        let own = Own {
            mapping: Mapping::new(file, libc::PROT_READ | libc::PROT_WRITE)?,
            generation: fork::generation(),
            taken: AtomicBool::new(false),
            over: AtomicBool::new(false),
            timed: AtomicU32::new(0),
            slow: AtomicU32::new(0),
        };
        fcntl_add_seals(file, WRITTEN)?;
        Ok(own)
    }

    /// The same segment, whose pages these keep where they are for as long as it is mapped.
    pub fn pinned(mut self, pins: Pins) -> Own {
        self.mapping.pins = Some(pins);
        self
    }

    /// One of its words. A child that was forked from us has them too.
    pub fn word(&self, word: Word) -> &AtomicU64 {
        self.mapping.word(word)
    }

    /// Rings for a peer that sleeps on a [`Bell`] of this segment.
    pub fn ring(&self) {
        let rung = self.mapping.half(Word::Rung);
        rung.fetch_add(1, Release);
        if self.slow.load(Relaxed) >= RINGS_SLOW {
            return;
        }
        // Only the peer sleeps there, usually one thread, and never for long.
        let wake = || wait::tell_some(rung, RUNG_MOST);
        // The clock tells nothing of a thread that had to wait for a processor, but the processor's time takes longer to ask for.
        let timed = self.timed.load(Relaxed);
        let clock = if timed > 0 { stats::processor_time } else { stats::clock };
        let before = clock();
        wake();
        if clock().saturating_sub(before) > RING_SLOW {
            self.timed.store(RINGS_TIMED, Relaxed);
            self.slow.fetch_add((timed > 0).into(), Relaxed);
        } else if timed > 0 {
            self.timed.store(timed - 1, Relaxed);
        }
    }

    /// Puts `len` bytes into the ring: those that `from` names, from its byte `at` on. `number`: that of the first byte, counted
    /// from the one at the ring's beginning; `wide`: whether the ring is [`RING`] long.
    ///
    /// # Panics
    /// When `from` has fewer bytes, or the ring is shorter.
    pub fn fill(&self, (number, wide): (u64, bool), from: &IoVec<'_>, at: usize, len: usize) {
        assert!(len <= width(wide) && at <= from.len() && len <= from.len() - at);
        let source = from.raw.iov_base.cast::<u8>().cast_const().wrapping_add(at);
        let (place, before_end) = self.mapping.ring(number, wide);
        let first = len.min(before_end);
        // SAFETY: `from` names readable bytes as long as it lives (its invariant), enough of them (checked above); the target
        // lies in our mapping, to which there is no reference, and which nothing that an IoVec can name overlaps.
        unsafe { libc::memcpy(place.cast(), source.cast(), first) };
        let (start, _) = self.mapping.ring(number.wrapping_add(first as u64), wide);
        // SAFETY: as above, from the ring's beginning on.
        unsafe { libc::memcpy(start.cast(), source.wrapping_add(first).cast(), len - first) };
    }

    /// The outbox, if it is free: address and bytes. It is the caller's until [`Own::give_back`].
    pub fn take_outbox(&self) -> Option<(NonNull<u8>, usize)> {
        let is_free = || self.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok();
        (self.is_in_use() && is_free()).then(|| {
            // That nothing is shown precedes what is written from here on: a peer that copies some of that finds out.
            fence(Release);
            (self.outbox(), OUTBOX)
        })
    }

    /// Whether this process may write what the peer fetches by itself.
    fn is_in_use(&self) -> bool {
        self.generation == fork::generation() && !self.over.load(Relaxed)
    }

    /// The connection is over. The peer may still take what lies in the outbox.
    pub fn end(&self) {
        self.over.store(true, Relaxed);
    }

    /// What lies in the outbox is no longer needed.
    pub fn give_back(&self) {
        if self.is_in_use() {
            self.word(Word::Shown).store(0, Relaxed);
            self.taken.store(false, Release);
        }
    }

    /// The offset under which the peer knows what lies at this address. `None`: it is not in the outbox.
    pub fn offset_of(&self, address: usize) -> Option<u64> {
        let at = address.checked_sub(self.outbox().addr().get()).filter(|at| *at < OUTBOX)?;
        Some(IN_OUTBOX | at as u64)
    }

    /// Lets the peer take what lies at this address, under `handle`. Returns what [`Own::offset_of`] does, but `None` in a forked
    /// child and once the connection is over.
    pub fn show(&self, address: usize, handle: u32) -> Option<u64> {
        let offset = self.offset_of(address).filter(|_| self.is_in_use())?;
        self.word(Word::Shown).store(handle.into(), Release);
        Some(offset)
    }

    fn outbox(&self) -> NonNull<u8> {
        self.mapping.outbox()
    }
}

/// Something on which a thread can sleep, without a descriptor, until the peer rings. The sleep must have a time limit of its
/// own: a peer that has gone does not ring.
pub struct Bell {
    theirs: Arc<Theirs>,
    /// How often it had rung when this was made.
    rung: u32,
}

impl Bell {
    /// The peer's bell, as it is now: no ring from here on is missed.
    pub fn of(theirs: &Arc<Theirs>) -> Bell {
        Bell { theirs: theirs.clone(), rung: theirs.0.half(Word::Rung).load(Acquire) }
    }

    /// Whether it has rung.
    #[cfg(all(test, shuttle))]
    pub fn has_rung(&self) -> bool {
        self.theirs.0.half(Word::Rung).load(Acquire) != self.rung
    }

    /// Sleeps until it has rung, for `time` at most.
    pub fn wait(&self, time: Duration) {
        wait::for_change(self.theirs.0.half(Word::Rung), self.rung, time);
    }
}

/// The segment that the peer, or whoever it may be, writes.
pub struct Theirs(Mapping);

impl Theirs {
    /// Maps a segment that the peer writes.
    ///
    /// # Errors
    /// `EINVAL` for anything but a segment that has its writer; the errno of what the kernel refuses.
    pub fn new(file: &OwnedFd) -> io::Result<Theirs> {
        if !is_written(file) || !is_as_long(file) {
            return Err(Errno::INVAL.into());
        }
        Ok(Theirs(Mapping::new(file, libc::PROT_READ)?))
    }

    /// As [`Own::pinned`].
    pub fn pinned(mut self, pins: Pins) -> Theirs {
        self.0.pins = Some(pins);
        self
    }

    /// What a word says now. What was written before it is visible too.
    pub fn get(&self, word: Word) -> u64 {
        self.0.word(word).load(Acquire)
    }

    /// Copies `len` bytes of the ring to what `to` names, from its byte `at` on. `number`, `wide`: as in [`Own::fill`].
    ///
    /// # Panics
    /// When `to` has fewer bytes, or the ring is shorter.
    pub fn take(&self, (number, wide): (u64, bool), to: &mut IoVecMut<'_>, at: usize, len: usize) {
        assert!(len <= width(wide) && at <= to.len() && len <= to.len() - at);
        let target = to.raw.iov_base.cast::<u8>().wrapping_add(at);
        let (place, before_end) = self.0.ring(number, wide);
        let first = len.min(before_end);
        // SAFETY: `to` names bytes that are ours to write as long as it lives (its invariant), enough of them (checked above);
        // the source lies in the mapping. The peer may write it meanwhile: the bytes may then be anything.
        unsafe { libc::memcpy(target.cast(), place.cast_const().cast(), first) };
        let (start, _) = self.0.ring(number.wrapping_add(first as u64), wide);
        // SAFETY: as above, from the ring's beginning on.
        unsafe { libc::memcpy(target.wrapping_add(first).cast(), start.cast_const().cast(), len - first) };
    }
}

/// Bytes in the outbox of a peer, for as long as it shows them.
///
/// The peer may change them at any time, and take them back: each byte is copied once, and what was copied counts only if the
/// bytes were shown all the while.
pub struct Shown {
    /// To say that they were taken.
    own: Arc<Own>,
    theirs: Arc<Theirs>,
    handle: u32,
    at: usize,
    len: usize,
}

impl Shown {
    /// The bytes that a segment of the peer names, if they lie in its outbox and are shown.
    pub fn of(own: &Arc<Own>, theirs: &Arc<Theirs>, segment: Segment) -> Option<Shown> {
        let Segment { handle: Handle(handle), length, offset } = segment;
        let (at, len) = (usize::try_from(offset ^ IN_OUTBOX).ok()?, length as usize);
        let inside = at <= OUTBOX && len <= OUTBOX - at;
        let is_there = inside && handle != 0 && theirs.get(Word::Shown) == u64::from(handle);
        is_there.then(|| Shown { own: own.clone(), theirs: theirs.clone(), handle, at, len })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The handle under which they are shown.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Splits off as many of them as `head` has room for; returns these and the rest. `None` where there is no rest, or they are
    /// no longer shown.
    pub fn split(mut self, mut head: Buf) -> Option<(Region, Shown)> {
        let n = head.capacity();
        let left = self.len.checked_sub(n).filter(|left| *left > 0)?;
        head.set_len(n);
        let whole = self.copy(0, IoVecMut::from_mut(&mut head));
        (self.at, self.len) = (self.at + n, left);
        whole.then(|| (head.freeze(), self))
    }

    fn is_there(&self) -> bool {
        self.theirs.get(Word::Shown) == u64::from(self.handle)
    }

    /// Fills `to` with a copy of them, from byte `from` on. Returns false when the peer has taken them back: what was copied must
    /// be discarded then.
    ///
    /// # Panics
    /// When there are fewer.
    #[must_use]
    pub fn copy(&self, from: usize, mut to: IoVecMut<'_>) -> bool {
        assert!(from <= self.len && to.len() <= self.len - from);
        if !self.is_there() {
            return false;
        }
        let source = self.theirs.0.outbox().as_ptr().wrapping_add(self.at + from);
        // SAFETY: `to` names bytes that are ours to write as long as it lives (its invariant); as many lie in the mapping from
        // `source` on (checked above, and in `of`). The peer may write them meanwhile: the bytes may then be anything.
        unsafe { libc::memcpy(to.as_mut_ptr(), source.cast_const().cast(), to.len()) };
        fence(Acquire);
        self.is_there()
    }
}

/// Says that they are no longer needed.
impl Drop for Shown {
    fn drop(&mut self) {
        if self.own.is_in_use() {
            self.own.word(Word::Taken).store(self.handle.into(), Release);
        }
    }
}

/// What a hostile peer may try.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Has the kernel make huge pages of each part of a segment, through a mapping of one's own; returns how many it has made.
    /// Older kernels know no way.
    pub(crate) fn collapse(file: &OwnedFd) -> usize {
        const HUGE: usize = 2 << 20;
        const COLLAPSE: libc::c_int = 25;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let shared = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: a mapping at an address of the kernel's choice.
        let room =
            unsafe { libc::mmap(std::ptr::null_mut(), SIZE + 2 * HUGE, libc::PROT_NONE, anonymous, -1, 0) };
        assert_ne!(room, libc::MAP_FAILED);
        let base = room.wrapping_byte_add(room.cast::<u8>().align_offset(HUGE));
        // SAFETY: replaces a part of the mapping from above, to which nobody has a reference.
        let base = unsafe { libc::mmap(base, SIZE, libc::PROT_READ, shared, file.as_raw_fd(), 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let made = (0..SIZE).step_by(HUGE).filter(|at| {
            let part = base.wrapping_byte_add(*at);
            // A page may be locked, or on its way between two of the kernel's lists, for a moment.
            (0..20).any(|_| {
                // SAFETY: read as a whole, so that it has pages.
                unsafe { part.cast::<u8>().read_volatile() };
                // SAFETY: changes nothing that the memory holds; what is beyond the segment has no access.
                unsafe { libc::madvise(part, HUGE, COLLAPSE) == 0 }
            })
        });
        let made = made.count();
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(room, SIZE + 2 * HUGE) };
        made
    }
}
