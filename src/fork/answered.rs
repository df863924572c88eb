//! The requests that forked children have answered, of those that they share with their parent.
//!
//! Each connection has a log: children append to it, and the parent takes from it. The logs of all connections lie in one
//! mapping, so that a fork copies just that one, however many connections there are.
#![allow(unsafe_code)]

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};

/// How many answers a log has room for. The parent takes them whenever it reads, answers or defers a request.
const ROOM: u64 = 511;

/// How many entries at the end children may still be writing. One left unwritten by a child that died holds back no more than
/// this many.
const WRITING: u64 = 64;

/// How many connections can have a log. Each log takes a page, and pages of logs that were never used take no memory.
const LOGS: usize = 4096;

/// A word is 0, or identifies one answer: the connection's serial number in the upper bits, below it the request's number plus
/// one.
const NUMBER_BITS: u32 = 40;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

struct Log {
    /// How many entries have been appended or are just being appended.
    end: AtomicU64,
    words: [AtomicU64; ROOM as usize],
}

/// This process's logs: a child has a mapping of its own for the connections that it accepts. Never unmapped.
static LOGS_MAPPED: AtomicPtr<[Log; LOGS]> = AtomicPtr::new(null_mut());
/// A bit for each log, set while a connection has it.
static TAKEN: [AtomicU64; LOGS / 64] = [const { AtomicU64::new(0) }; LOGS / 64];
/// The serial number of the latest connection that got a log.
static SERIAL: AtomicU64 = AtomicU64::new(0);

fn mapped() -> Option<&'static [Log; LOGS]> {
    // SAFETY: NULL, or a mapping of `LOGS` logs that is never unmapped; zero bytes are empty logs.
    let known = || unsafe { LOGS_MAPPED.load(Acquire).as_ref() };
    if known().is_none() {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let logs = unsafe {
            libc::mmap(
                null_mut(),
                size_of::<[Log; LOGS]>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if logs != libc::MAP_FAILED
            && LOGS_MAPPED.compare_exchange(null_mut(), logs.cast(), AcqRel, Relaxed).is_err()
        {
            // SAFETY: the mapping made above, which nobody else knows.
            unsafe { libc::munmap(logs, size_of::<[Log; LOGS]>()) };
        }
    }
    known()
}

/// Called in a child, which goes on writing to the logs of the connections that it has inherited.
pub fn forked() {
    LOGS_MAPPED.store(null_mut(), Relaxed);
    TAKEN.iter().for_each(|taken| taken.store(0, Relaxed));
}

/// Which requests of a connection children have answered. Uses no heap and no lock.
#[derive(Default)]
pub struct Answered {
    /// NULL before the first fork that concerns the connection, and if there was no room for a log.
    log: AtomicPtr<Log>,
    serial: AtomicU64,
    /// How many the parent has taken.
    taken: AtomicU64,
}

impl Answered {
    /// The calling thread is about to fork a child that may answer requests. Called by one thread at a time. If there is no
    /// memory for a log, what the child answers stays unknown.
    pub fn share(&self) {
        if self.is_shared() {
            return;
        }
        let Some(logs) = mapped() else { return };
        let free = TAKEN.iter().enumerate().find_map(|(at, taken)| {
            let next = |bits: u64| (bits != u64::MAX).then(|| bits | (bits + 1));
            let before = taken.fetch_update(AcqRel, Relaxed, next).ok()?;
            Some(at * 64 + before.trailing_ones() as usize)
        });
        if let Some(log) = free.and_then(|at| logs.get(at)) {
            self.serial.store((SERIAL.fetch_add(1, Relaxed) + 1) << NUMBER_BITS, Relaxed);
            self.taken.store(log.end.load(Relaxed), Relaxed);
            self.log.store((&raw const *log).cast_mut(), Release);
        }
    }

    /// Whether a child may have answered something.
    #[inline]
    pub fn is_shared(&self) -> bool {
        !self.log.load(Relaxed).is_null()
    }

    fn log(&self) -> Option<&'static Log> {
        // SAFETY: NULL, or in a mapping that lasts.
        unsafe { self.log.load(Acquire).as_ref() }
    }

    /// Notes that a child has answered the request.
    pub fn note(&self, request: u64) {
        if let Some(log) = self.log() {
            let at = log.end.fetch_add(1, Relaxed);
            let word = self.serial.load(Relaxed) | (request + 1) & NUMBER;
            log.words[(at % ROOM) as usize].store(word, Release);
        }
    }

    /// The request that a word identifies, if it is one of this connection's.
    fn request(&self, word: u64) -> Option<u64> {
        (word & !NUMBER == self.serial.load(Relaxed)).then_some(())?;
        (word & NUMBER).checked_sub(1)
    }

    /// Whether the request was noted and has not been taken yet.
    pub fn has(&self, request: u64) -> bool {
        self.log().is_some_and(|log| {
            let end = log.end.load(Acquire);
            let first = self.taken.load(Relaxed).max(end.saturating_sub(ROOM));
            let word = |at: u64| log.words[(at % ROOM) as usize].load(Acquire);
            (first..end).any(|at| self.request(word(at)) == Some(request))
        })
    }

    /// In the parent: passes on what was noted, each request once. One thread at a time.
    pub fn take(&self, mut request: impl FnMut(u64)) {
        let Some(log) = self.log() else { return };
        let end = log.end.load(Acquire);
        let mut at = self.taken.load(Relaxed).max(end.saturating_sub(ROOM));
        while at < end {
            match log.words[(at % ROOM) as usize].swap(0, AcqRel) {
                // Not written yet, or never if that child has died.
                0 if end - at < WRITING => break,
                word => self.request(word).into_iter().for_each(&mut request),
            }
            at += 1;
        }
        self.taken.store(at, Relaxed);
    }

    /// The connection has ended: another one may get its log.
    pub fn end(&self) {
        let log = self.log.swap(null_mut(), AcqRel);
        let (Some(log), Some(first)) = (NonNull::new(log), NonNull::new(LOGS_MAPPED.load(Acquire))) else {
            return;
        };
        // A parent's logs are not in this process's mapping.
        let at = log.addr().get().wrapping_sub(first.addr().get()) / size_of::<Log>();
        if let Some(taken) = TAKEN.get(at / 64) {
            taken.fetch_and(!(1 << (at % 64)), Release);
        }
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::testing::fork;

    fn taken(answered: &Answered) -> Vec<u64> {
        let mut all = Vec::new();
        answered.take(|request| all.push(request));
        all
    }

    #[test]
    fn a_parent_knows_what_its_children_have_answered() {
        let answered = Answered::default();
        answered.note(1);
        assert!(!answered.has(1) && !answered.is_shared());
        answered.share();
        assert!(!answered.has(0) && answered.is_shared());
        let answer = |all: &[u64]| {
            assert!(
                fork(|| {
                    all.iter().for_each(|request| answered.note(*request));
                    answered.has(all[0])
                })
                .succeeded()
            );
        };
        answer(&[7, 0]);
        assert!(answered.has(0) && answered.has(7) && !answered.has(8));
        assert_eq!((taken(&answered), answered.has(7)), (vec![7, 0], false));
        for round in 0..10 {
            let all: Vec<u64> = (round * 100..round * 100 + 100).collect();
            answer(&all);
            assert_eq!(taken(&answered), all);
        }
        // A child that has died in the middle of writing.
        let log = answered.log().unwrap();
        log.end.fetch_add(1, Relaxed);
        answer(&[5]);
        assert!(taken(&answered).is_empty());
        let all: Vec<u64> = (0..WRITING).collect();
        answer(&all);
        assert_eq!(taken(&answered).first(), Some(&5));
    }

    #[test]
    fn nothing_of_the_connection_that_had_a_log_before_counts() {
        let before = Answered::default();
        before.share();
        before.note(3);
        let log = before.log().unwrap();
        let after = Answered {
            log: AtomicPtr::new(before.log.load(Relaxed)),
            serial: AtomicU64::new(!before.serial.load(Relaxed) & !NUMBER),
            taken: AtomicU64::new(log.end.load(Relaxed)),
        };
        before.note(4);
        after.note(5);
        before.note(6);
        assert_eq!(taken(&after), [5]);
        std::mem::forget(after);
    }
}
