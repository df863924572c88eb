//! The locks of a connection while a dispatch routine forks, whose child may be the one that replies: it gets them as they are then,
//! so other threads leave them alone for that time.
//!
//! # Invariants
//! - Nothing is kept taken over the fork: a handler of the program's (pthread_atfork(3)) may wait for a thread that wants it. And
//!   nobody waits for a fork longer than [`MOST`].
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::TryLockError;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::thread;
use std::time::{Duration, Instant};

use crate::sync::{Mutex, MutexGuard};

/// How long somebody waits for another thread's fork: a process of many gigabytes takes as long.
const MOST: Duration = Duration::from_millis(50);
/// And looks again after so long.
const LOOK: Duration = Duration::from_micros(50);

/// What concerns one connection, or those whose numbers lead to the same.
struct Forks {
    /// Threads that fork in one of its routines: one at a time, unless that takes too long.
    forking: AtomicUsize,
    /// Threads that wait for one of its locks, or are about to have looked at `forking` before they do.
    waiting: AtomicUsize,
}

static FORKS: [Forks; 64] = [const { Forks::new() }; 64];

/// How often a thread has begun to fork so.
static BEGUN: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What [`BEGUN`] was when this thread had waited long enough.
    static EXCUSED: Cell<u64> = const { Cell::new(0) };
}

impl Forks {
    const fn new() -> Forks {
        Forks { forking: AtomicUsize::new(0), waiting: AtomicUsize::new(0) }
    }

    /// `connection`: an address that it has to itself.
    #[inline(always)]
    fn of(connection: usize) -> &'static Forks {
        &FORKS[(connection >> 5) % FORKS.len()]
    }

    #[inline(always)]
    fn is_under_way(&self) -> bool {
        self.forking.load(SeqCst) != 0
    }

    /// Whether the calling thread has to leave the locks alone.
    fn concerns_us(&self) -> bool {
        self.is_under_way() && EXCUSED.get() != BEGUN.load(Relaxed)
    }

    #[cold]
    fn wait(&self) {
        let until = Instant::now() + MOST;
        while self.concerns_us() {
            if Instant::now() >= until {
                return EXCUSED.set(BEGUN.load(Relaxed));
            }
            thread::sleep(LOOK);
        }
    }

    fn begins(&self) {
        let until = Instant::now() + MOST;
        let is_over = || {
            thread::sleep(LOOK);
            Instant::now() >= until
        };
        while self.forking.compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            if is_over() {
                self.forking.fetch_add(1, SeqCst);
                break;
            }
        }
        EXCUSED.set(BEGUN.fetch_add(1, Relaxed) + 1);
        while self.waiting.load(SeqCst) != 0 && !is_over() {}
    }

    fn ends(&self) {
        // In a child there is nobody else, and none is counted.
        let _ = self.forking.fetch_update(SeqCst, SeqCst, |forking| forking.checked_sub(1));
    }

    /// Takes a lock that somebody has, or had just now.
    #[cold]
    #[inline(never)]
    fn lock<'a, T>(&self, lock: &'a Mutex<T>) -> MutexGuard<'a, T> {
        loop {
            self.wait();
            self.waiting.fetch_add(1, SeqCst);
            // Either this thread sees who forks, or that one sees this thread, and waits until it has had its turn.
            let guard = (!self.concerns_us()).then(|| lock.lock().unwrap_or_else(|e| e.into_inner()));
            self.waiting.fetch_sub(1, SeqCst);
            match guard {
                Some(guard) if !self.concerns_us() => return guard,
                given_back => drop(given_back),
            }
        }
    }
}

/// Takes a lock of a connection, also after a panic of who had it; but not while another thread forks in one of its routines. The
/// caller has no other lock of the connection.
#[inline(always)]
pub fn lock<T>(lock: &Mutex<T>, connection: usize) -> MutexGuard<'_, T> {
    let forks = Forks::of(connection);
    if !forks.is_under_way() {
        let guard = match lock.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        // Who forks has said so before it has found the lock free.
        if let Some(guard) = guard
            && !forks.is_under_way()
        {
            return guard;
        }
    }
    forks.lock(lock)
}

/// Whether another thread forks in a routine of the connection: who only tries for a lock of it lets it be.
pub fn is_under_way(connection: usize) -> bool {
    Forks::of(connection).is_under_way()
}

/// The calling thread is about to fork in a routine of the connection, and to see whether its locks are free: one such thread after
/// the other, or each would take them for a moment while another forks; and after those that wait for them by now.
pub fn begins(connection: usize) {
    Forks::of(connection).begins();
}

/// It has done so.
pub fn ends(connection: usize) {
    Forks::of(connection).ends();
}

/// In a child: nobody but the calling thread is left.
pub fn forked() {
    for forks in &FORKS {
        forks.forking.store(0, SeqCst);
        forks.waiting.store(0, SeqCst);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_lock_has_given_it_back_when_another_thread_forks() {
        let in_time = (0..100).any(|_| {
            let (lock, forks) = (Mutex::new(()), Forks::new());
            let (lock, forks) = (&lock, &forks);
            let first = lock.lock().unwrap();
            thread::scope(move |scope| {
                let waits = scope.spawn(|| drop(forks.lock(lock)));
                while forks.waiting.load(SeqCst) == 0 {
                    thread::yield_now();
                }
                let forker = scope.spawn(move || {
                    let begin = Instant::now();
                    forks.begins();
                    let taken = lock.try_lock().is_err();
                    // It comes back for it, but not yet.
                    let left_alone = !taken && !waits.is_finished();
                    let in_time = begin.elapsed() < MOST;
                    forks.ends();
                    assert!(left_alone || !in_time);
                    in_time
                });
                while !forks.is_under_way() && !forker.is_finished() {
                    thread::yield_now();
                }
                drop(first);
                forker.join().unwrap()
            })
        });
        assert!(in_time, "each time it took {MOST:?}");
    }
}
