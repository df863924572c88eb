//! Memory that this process shares with its peer, in another process of the host: a ring of bytes, and words beside it, that
//! one end writes and the other maps to read.
//!
//! **The peer is hostile.** What it writes changes at any moment. Of its memory there is never a reference, a slice or a
//! `Region`: words are loaded as atomics, each once, and bytes are copied into memory of our own before anybody looks at them.
//! What it has passed to us cannot shrink under our hands (`F_SEAL_SHRINK`), which would be a SIGBUS, and is of exactly the
//! length that we map.
//!
//! What we write the peer can only read: it gets a descriptor that is open for reading, of a file that nobody but its owner
//! may open again.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::fs::{fchmod, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create, open};
use rustix::io::Errno;

use super::{IoVec, IoVecMut};
use crate::{process, wait};

/// Bytes of the ring, a power of two: more than the caches of two processors, and so many that most messages go into it as a
/// whole, while their receiver is elsewhere.
pub const RING: usize = 4 << 20;

/// Bytes of it that are used by short messages, and by connections beyond the first few: a power of two.
pub const NARROW: usize = 256 << 10;

/// Bytes before it, for the words.
const HEAD: usize = 4 << 10;

/// Bytes of a segment. No multiple of a huge page: memory that the peer has of those, which may run out under our hands, does
/// not have this length.
pub const SIZE: usize = HEAD + RING;

/// Segments that a process maps: a process may have 65,530 mappings, and its program needs some.
const MOST: usize = 16 << 10;

/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// What nobody may do to a segment any more.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A word of a segment. Those that are written on different occasions lie in different cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// Bytes that have been put into the ring.
    Produced = 0,
    /// Which of them lies, or will lie, at its beginning.
    Base = 1,
    /// Not 0 while the ring is as long as [`RING`], else it is as long as [`NARROW`].
    Wide = 2,
    /// Bytes that have been taken from the other end's ring.
    Consumed = 16,
    /// Whether this end waits and has to be woken, how, and which of its waits it is.
    Waits = 32,
    /// Not 0 while it waits for room in its ring too.
    WantsRoom = 33,
    /// How many other peers it serves just now.
    Company = 34,
    /// How often it has woken the other end by a byte.
    Woken = 48,
    /// How often it has rung for it: see [`Bell`].
    Rung = 49,
}

/// A mapping of [`SIZE`] bytes.
struct Mapping(NonNull<u8>);

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
        // What a peer says is not for a core dump. Where the kernel cannot leave it out it is there.
        // SAFETY: the mapping that was just made.
        unsafe { libc::madvise(base, SIZE, libc::MADV_DONTDUMP) };
        // From here on Drop unmaps.
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        COUNT.fetch_add(1, Relaxed);
        Ok(Mapping(base))
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        let place = self.0.as_ptr().cast::<AtomicU64>().wrapping_add(word as usize);
        // SAFETY: inside the mapping, which lives as long as `self` and is aligned to a page; accessed as atomics only.
        unsafe { &*place }
    }

    /// Half of a word, which futex(2) can wait for.
    fn half(&self, word: Word) -> &AtomicU32 {
        let place = self.0.as_ptr().cast::<AtomicU32>().wrapping_add(2 * word as usize);
        // SAFETY: as in `word`; accessed as this half only.
        unsafe { &*place }
    }

    /// The byte of a ring of this length, [`NARROW`] or [`RING`], with this number, and how many follow it before the ring
    /// begins anew.
    fn ring(&self, number: u64, wide: bool) -> (*mut u8, usize) {
        let width = width(wide);
        let at = number as usize & (width - 1);
        (self.0.as_ptr().wrapping_add(HEAD + at), width - at)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which nobody holds a reference.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
        COUNT.fetch_sub(1, Relaxed);
    }
}

/// Bytes of a ring.
pub fn width(wide: bool) -> usize {
    if wide { RING } else { NARROW }
}

/// The segment that this end writes.
pub struct Own(Mapping);

impl Own {
    /// A segment of zeros, and the descriptor for the peer.
    ///
    /// # Errors
    /// The errno of what the kernel refuses: `EMFILE`, `ENOMEM`, `ENOSYS`, `EFBIG`.
    pub fn new() -> io::Result<(Own, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems want it said that nothing in it is run; older ones do not know that.
        let file = match memfd_create("rpcrdma", flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("rpcrdma", flags)?,
            file => file?,
        };
        // To the kernel it is a file: one that is too long for RLIMIT_FSIZE would end the program.
        process::quietly(|| ftruncate(&file, SIZE as u64).map_err(Errno::raw_os_error))
            .map_err(io::Error::from_raw_os_error)?;
        let own = Own(Mapping::new(&file, libc::PROT_READ | libc::PROT_WRITE)?);
        fchmod(&file, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let (file, seals) = match open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(to_read) => {
                fcntl_add_seals(&file, SEALS)?;
                return Ok((own, to_read));
            }
            // Without /proc: then nobody writes it but through mappings that are there, which nobody but us has.
            Err(_) => (file, SEALS | SealFlags::FUTURE_WRITE),
        };
        fcntl_add_seals(&file, seals)?;
        Ok((own, file))
    }

    /// One of its words. A child that was forked from us has them too.
    pub fn word(&self, word: Word) -> &AtomicU64 {
        self.0.word(word)
    }

    /// Rings for a peer that sleeps on a [`Bell`] of this segment.
    pub fn ring(&self) {
        let rung = self.0.half(Word::Rung);
        rung.fetch_add(1, Release);
        wait::tell_change(rung);
    }

    /// Puts `len` bytes into the ring, of those that `from` names from byte `at` on. `number`: of the first, counted from the
    /// one that lies at the ring's beginning; `wide`: whether that is [`RING`] long.
    ///
    /// # Panics
    /// When `from` has not so many, or the ring is shorter.
    pub fn fill(&self, (number, wide): (u64, bool), from: &IoVec<'_>, at: usize, len: usize) {
        assert!(len <= width(wide) && at <= from.len() && len <= from.len() - at);
        let source = from.raw.iov_base.cast::<u8>().cast_const().wrapping_add(at);
        let (place, before_end) = self.0.ring(number, wide);
        let first = len.min(before_end);
        // SAFETY: `from` names readable bytes as long as it lives (its invariant), so many (checked above); the target lies in
        // our mapping, of which there is no reference, and which nothing that can be named by an IoVec overlaps.
        unsafe { libc::memcpy(place.cast(), source.cast(), first) };
        let (start, _) = self.0.ring(number.wrapping_add(first as u64), wide);
        // SAFETY: as above, from the ring's beginning on.
        unsafe { libc::memcpy(start.cast(), source.wrapping_add(first).cast(), len - first) };
    }
}

/// What a thread may sleep on, without a descriptor, until the peer rings for it. It must have a limit of its own: a peer that
/// has gone does not.
pub struct Bell {
    theirs: Arc<Theirs>,
    /// How often it had rung when this was made.
    rung: u32,
}

impl Bell {
    /// The peer's, as it is now: what it does from here on is not missed.
    pub fn of(theirs: &Arc<Theirs>) -> Bell {
        Bell { theirs: theirs.clone(), rung: theirs.0.half(Word::Rung).load(Acquire) }
    }

    /// Sleeps until it has rung, for `time` at most.
    pub fn wait(&self, time: Duration) {
        wait::for_change(self.theirs.0.half(Word::Rung), self.rung, time);
    }
}

/// The segment that the peer writes, or whoever it may be.
pub struct Theirs(Mapping);

impl Theirs {
    /// Maps what a peer has passed.
    ///
    /// # Errors
    /// `EINVAL` for anything but a segment that keeps its length; the errno of what the kernel refuses.
    pub fn new(file: OwnedFd) -> io::Result<Theirs> {
        // Other files than those of memory have no seals.
        let seals = fcntl_get_seals(file.as_fd())?;
        if !seals.contains(SEALS) || fstat(&file)?.st_size != SIZE as i64 {
            return Err(Errno::INVAL.into());
        }
        Ok(Theirs(Mapping::new(&file, libc::PROT_READ)?))
    }

    /// What a word says now. What was written before it is seen too.
    pub fn get(&self, word: Word) -> u64 {
        self.0.word(word).load(Acquire)
    }

    /// Copies `len` bytes of the ring to what `to` names from byte `at` on. `number`, `wide`: as in [`Own::fill`].
    ///
    /// # Panics
    /// When `to` has not so many, or the ring is shorter.
    pub fn take(&self, (number, wide): (u64, bool), to: &mut IoVecMut<'_>, at: usize, len: usize) {
        assert!(len <= width(wide) && at <= to.len() && len <= to.len() - at);
        let target = to.raw.iov_base.cast::<u8>().wrapping_add(at);
        let (place, before_end) = self.0.ring(number, wide);
        let first = len.min(before_end);
        // SAFETY: `to` names bytes that are ours to write as long as it lives (its invariant), so many (checked above); the
        // source lies in the mapping. The peer may write it meanwhile: the bytes are then any bytes.
        unsafe { libc::memcpy(target.cast(), place.cast_const().cast(), first) };
        let (start, _) = self.0.ring(number.wrapping_add(first as u64), wide);
        // SAFETY: as above, from the ring's beginning on.
        unsafe { libc::memcpy(target.wrapping_add(first).cast(), start.cast_const().cast(), len - first) };
    }
}
