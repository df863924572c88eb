//! The locks of a connection while a thread forks whose child may reply to one of its requests: the child gets them as they are
//! then, so other threads leave them alone for that time.
//!
//! # Invariants
//! - Nothing is kept taken over the fork: a handler of the program's (pthread_atfork(3)) may wait for a thread that wants it. And
//!   nobody waits for one longer than [`MOST`] once its thread has seen to the locks, nor for a lock longer than [`QUEUE`], nor to
//!   fork longer than [`LATE`].
//! - Who has waited goes on before the next one forks.
//! - What a thread leaves behind that never comes back from fork(2) is no fork any more after [`MOST`].
//! - No heap: the handler of a signal may fork that has come in the midst of malloc(3).
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::TryLockError;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::thread;
use std::time::Duration;

use crate::stats;
use crate::sync::{Mutex, MutexGuard};

/// How long somebody waits for another thread's fork, in nanoseconds: a process of many gigabytes takes as long.
const MOST: u64 = 50_000_000;
/// The same for several, one after the other.
const QUEUE: u64 = 4 * MOST;
/// The same for a fork, of as many threads as may fork at once: it takes the place of another one then, whose child may find locks
/// taken. The kernel makes them one after the other in any case.
const LATE: u64 = 5 * QUEUE;
/// After a fork the next one leaves those that have waited so long for what they do. They take a few locks, one after the other.
const GAP: u64 = 200_000;
/// And looks again after so long.
const LOOK: Duration = Duration::from_micros(50);
/// As many times as long where so many threads wait to fork, up to this, so that they leave the processors to the one that does.
const LINE: u32 = 32;

/// What concerns one connection, or those whose numbers lead to the same.
struct Forks {
    /// When the one that is under way has begun, by [`stats::clock`]; 0: none is.
    began: AtomicU64,
    /// When the latest one has ended for which somebody had waited.
    ended: AtomicU64,
    /// Threads that wait for the end of a fork.
    sleeping: AtomicU32,
    /// Threads that wait for one of its locks, or are about to have looked at `began` before they do.
    waiting: AtomicU32,
}

/// Threads that wait to fork.
static IN_LINE: AtomicU32 = AtomicU32::new(0);

const PLACES: usize = 1024;
static FORKS: [Forks; PLACES] = [const { Forks::new() }; PLACES];

/// `connection`: an address that it has to itself.
#[inline(always)]
fn place(connection: usize) -> usize {
    // Fibonacci hashing: the upper ten bits depend on all of the address.
    ((connection as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize
}

/// One thread less; in a child that the handler of a signal has forked it may not be among them.
fn less(threads: &AtomicU32) {
    let _ = threads.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
}

thread_local! {
    /// Forks in which the calling thread is: a handler, or that of a signal, may fork as well.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static MARKS: Cell<Marks> = const { Cell::new(Marks::NONE) };
}

impl Forks {
    const fn new() -> Forks {
        Forks {
            began: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            sleeping: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
        }
    }

    #[inline(always)]
    fn of(connection: usize) -> &'static Forks {
        &FORKS[place(connection)]
    }

    /// Looked at where a lock is taken, at no cost.
    #[inline(always)]
    fn may_be_under_way(&self) -> bool {
        self.began.load(SeqCst) != 0
    }

    fn is_under_way(&self, now: u64) -> bool {
        let began = self.began.load(SeqCst);
        began != 0 && now.saturating_sub(began) < MOST
    }

    /// Whether the calling thread has to leave the locks alone.
    fn concerns_us(&self) -> bool {
        self.may_be_under_way() && DEPTH.get() == 0 && self.is_under_way(stats::clock())
    }

    /// Waits for a moment.
    fn sleep(&self) {
        self.sleeping.fetch_add(1, SeqCst);
        thread::sleep(LOOK);
        less(&self.sleeping);
    }

    /// Whether a fork may begin now, told as begun at `stamp`: no other one is under way, nor has just been. `late`: in any case.
    fn takes(&self, now: u64, stamp: u64, late: bool) -> bool {
        let before = self.began.load(SeqCst);
        let is_free = before == 0 && now.saturating_sub(self.ended.load(SeqCst)) >= GAP;
        let is_lost = before != 0 && now.saturating_sub(before) >= QUEUE;
        (is_free || is_lost || late) && self.moves(before, stamp)
    }

    fn moves(&self, before: u64, stamp: u64) -> bool {
        self.began.compare_exchange(before, stamp, SeqCst, SeqCst).is_ok()
    }

    /// Unless another one has begun since, for which that one had taken too long.
    fn ends(&self, stamp: u64) {
        if self.sleeping.load(SeqCst) != 0 {
            self.ended.store(stats::clock(), SeqCst);
        }
        self.moves(stamp, 0);
    }

    /// Takes a lock that somebody has, or had just now.
    #[cold]
    #[inline(never)]
    fn lock<'a, T>(&self, lock: &'a Mutex<T>) -> MutexGuard<'a, T> {
        let until = stats::clock() + QUEUE;
        let leaves_alone = || self.concerns_us() && stats::clock() < until;
        loop {
            while leaves_alone() {
                self.sleep();
            }
            self.waiting.fetch_add(1, SeqCst);
            // Either this thread sees who forks, or that one sees this thread, and waits until it has had its turn.
            let guard = (!leaves_alone()).then(|| lock.lock().unwrap_or_else(|e| e.into_inner()));
            less(&self.waiting);
            match guard {
                Some(guard) if !leaves_alone() => return guard,
                given_back => drop(given_back),
            }
        }
    }
}

/// Takes a lock of a connection, also after a panic of who had it; but not while another thread forks who concerns it. The
/// caller has no other lock of the connection.
#[inline(always)]
pub fn lock<T>(lock: &Mutex<T>, connection: usize) -> MutexGuard<'_, T> {
    let forks = Forks::of(connection);
    if !forks.may_be_under_way() {
        let guard = match lock.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        // Who forks has said so before it has found the lock free.
        if let Some(guard) = guard
            && !forks.may_be_under_way()
        {
            return guard;
        }
    }
    forks.lock(lock)
}

/// Whether another thread forks who concerns the connection: who has other things to do lets it be.
#[inline]
pub fn is_under_way(connection: usize) -> bool {
    Forks::of(connection).concerns_us()
}

/// The same, after half a millisecond if it takes that long and nothing comes of `others`: a loop that comes back to it at once need
/// neither keep a processor from who forks, nor take locks of libtirpc's over and over again that the child would find taken.
pub fn is_still_under_way(connection: usize, others: impl Fn() -> bool) -> bool {
    let forks = Forks::of(connection);
    for _ in 0..10 {
        if !forks.concerns_us() {
            return false;
        }
        if others() {
            break;
        }
        forks.sleep();
    }
    forks.concerns_us()
}

/// The connections for which a thread forks, by their places, and when that has begun.
#[derive(Clone, Copy)]
struct Marks {
    places: [u64; PLACES / 64],
    stamp: u64,
}

impl Marks {
    const NONE: Marks = Marks { places: [0; PLACES / 64], stamp: 0 };

    fn add(&mut self, place: usize) {
        self.places[place / 64] |= 1 << (place % 64);
    }

    /// The lowest places first: in one order, or two threads would wait for each other.
    fn all(&self) -> impl Iterator<Item = usize> {
        (0..PLACES).filter(|place| self.has(*place))
    }

    fn has(&self, place: usize) -> bool {
        self.places[place / 64] & 1 << (place % 64) != 0
    }

    /// They have begun at `stamp`, but for those that another thread has taken.
    fn renew(&mut self, stamp: u64) {
        let before = *self;
        for place in before.all().filter(|place| !FORKS[*place].moves(before.stamp, stamp)) {
            self.places[place / 64] &= !(1 << (place % 64));
        }
        self.stamp = stamp;
    }
}

/// The calling thread is about to see whether the locks of these connections are free: one such thread after the other, or each
/// would take them for a moment while another forks; and after those that wait for them by now. `see` does that. Asked for the
/// connections again where it has waited.
pub fn begins(connections: impl Fn(&mut dyn FnMut(usize)), see: impl FnOnce()) {
    let mut wanted = Marks::NONE;
    let ask = |wanted: &mut Marks| connections(&mut |connection| wanted.add(place(connection)));
    ask(&mut wanted);
    let mut marks = Marks { stamp: stats::clock(), ..Marks::NONE };
    let until = marks.stamp + LATE;
    let line = IN_LINE.fetch_add(1, SeqCst).clamp(1, LINE);
    loop {
        let mut has_waited = false;
        for place in wanted.all() {
            while !marks.has(place) {
                let now = stats::clock();
                // While it waits for the next one, those that it has are not left alone for longer.
                let stamp = if now.saturating_sub(marks.stamp) < MOST { marks.stamp } else { now };
                if FORKS[place].takes(now, stamp, now >= until) {
                    marks.renew(stamp);
                    marks.add(place);
                } else {
                    thread::sleep(LOOK * line);
                    has_waited = true;
                }
            }
        }
        if has_waited {
            // The program may have come to owe replies to others.
            ask(&mut wanted);
        }
        // All of them from here on. What it had for too long another thread may have taken meanwhile.
        marks.renew(stats::clock());
        if marks.places == wanted.places || marks.stamp >= until {
            break;
        }
    }
    less(&IN_LINE);
    let until = marks.stamp + MOST;
    while marks.stamp < until && marks.all().any(|place| FORKS[place].waiting.load(SeqCst) != 0) {
        thread::sleep(LOOK);
        marks.renew(stats::clock());
    }
    see();
    marks.renew(stats::clock());
    MARKS.set(marks);
}

/// It is over.
pub fn ends() {
    let marks = MARKS.replace(Marks::NONE);
    marks.all().for_each(|place| FORKS[place].ends(marks.stamp));
}

/// The calling thread forks. Whether it is not inside of another fork of its own.
pub fn enter() -> bool {
    DEPTH.replace(DEPTH.get() + 1) == 0
}

/// It has done so. Whether it is in none any more.
pub fn leave() -> bool {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    DEPTH.get() == 0
}

/// In a child: nobody but the calling thread is left.
pub fn forked() {
    for forks in &FORKS {
        forks.began.store(0, SeqCst);
        forks.sleeping.store(0, SeqCst);
        forks.waiting.store(0, SeqCst);
    }
    IN_LINE.store(0, SeqCst);
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    impl Forks {
        fn begins(&self) -> u64 {
            let begin = stats::clock();
            loop {
                let now = stats::clock();
                if self.takes(now, now, now >= begin + LATE) {
                    return now;
                }
                thread::sleep(LOOK);
            }
        }
    }

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
                    let began = forks.begins();
                    while forks.waiting.load(SeqCst) != 0 && forks.is_under_way(stats::clock()) {
                        thread::sleep(LOOK);
                    }
                    let taken = lock.try_lock().is_err();
                    // It comes back for it, but not yet.
                    let left_alone = !taken && !waits.is_finished();
                    let in_time = forks.is_under_way(stats::clock());
                    forks.ends(began);
                    assert!(left_alone || !in_time);
                    in_time
                });
                while !forks.may_be_under_way() && !forker.is_finished() {
                    thread::yield_now();
                }
                drop(first);
                forker.join().unwrap()
            })
        });
        assert!(in_time, "each time it took {MOST} ns");
    }

    #[test]
    fn nobody_waits_long_for_a_thread_that_does_not_come_back_from_its_fork() {
        let (lock, forks) = (Mutex::new(()), Forks::new());
        let lost = forks.begins();
        let begin = stats::clock();
        drop(forks.lock(&lock));
        assert!(stats::clock() >= lost + MOST);
        // One that begins anew need not wait for it for ever either.
        let next = forks.begins();
        assert!(next >= lost + QUEUE && next > begin);
        forks.ends(lost);
        assert!(forks.may_be_under_way());
        forks.ends(next);
        assert!(!forks.may_be_under_way());
    }

    #[test]
    fn who_has_waited_goes_on_before_the_next_fork() {
        let forks = Forks::new();
        let began = forks.begins();
        thread::scope(|scope| {
            scope.spawn(|| forks.sleep());
            while forks.sleeping.load(SeqCst) == 0 && forks.is_under_way(stats::clock()) {
                thread::yield_now();
            }
            let slept = forks.sleeping.load(SeqCst) != 0;
            forks.ends(began);
            let ended = forks.ended.load(SeqCst);
            assert!(ended != 0 || !slept || forks.sleeping.load(SeqCst) == 0);
            let began = forks.begins();
            assert!(began >= ended + GAP);
            forks.ends(began);
        });
        // Nobody has waited for that one.
        let ended = forks.ended.load(SeqCst);
        let began = forks.begins();
        forks.ends(began);
        assert_eq!(forks.ended.load(SeqCst), ended);
    }

    #[test]
    fn a_connection_is_not_left_alone_for_longer_while_its_fork_waits_for_another_one() {
        let connections = [0x10_0000, 0x20_0000];
        let mut places = connections.map(place);
        places.sort_unstable();
        let [quiet, busy] = places.map(|place| &FORKS[place]);
        let mut began = stats::clock();
        assert!(busy.takes(began, began, false));
        thread::scope(|scope| {
            let forker = scope.spawn(|| {
                begins(|mark| connections.into_iter().for_each(mark), || ());
                ends();
            });
            while !quiet.may_be_under_way() {
                thread::yield_now();
            }
            let until = stats::clock() + 4 * MOST;
            while quiet.is_under_way(stats::clock()) && stats::clock() < until {
                let now = stats::clock();
                assert!(busy.moves(began, now) && !forker.is_finished());
                began = now;
                thread::sleep(LOOK);
            }
            assert!(stats::clock() < until && quiet.may_be_under_way());
            // Another thread takes it, which is waited for then.
            let other = stats::clock();
            assert!(quiet.takes(other, other, true));
            busy.ends(began);
            while stats::clock() < other + MOST {
                assert!(!forker.is_finished() || stats::clock() >= other + QUEUE);
                thread::sleep(LOOK);
            }
            quiet.ends(other);
        });
        assert!(!quiet.may_be_under_way() && !busy.may_be_under_way());
    }

    #[test]
    fn what_concerns_a_fork_only_by_the_end_of_its_wait_is_left_alone_too() {
        let connections = [0x30_0000, 0x40_0000];
        let [busy, late] = connections.map(Forks::of);
        let (asked, mut has_seen) = (Cell::new(0), false);
        let concerned = |mark: &mut dyn FnMut(usize)| {
            asked.set(asked.get() + 1);
            if asked.get() == 1 {
                // One that never comes back: it is waited for until QUEUE after that.
                let now = stats::clock();
                assert!(busy.takes(now, now + 2 * QUEUE, false));
            }
            connections.iter().take(asked.get()).for_each(|it| mark(*it));
        };
        begins(concerned, || has_seen = late.may_be_under_way());
        ends();
        assert!(has_seen && asked.get() == 2);
        assert!(!busy.may_be_under_way() && !late.may_be_under_way());
    }

    #[test]
    fn a_thread_that_forks_waits_for_no_other_and_knows_the_first_from_those_inside() {
        let forks = Forks::new();
        let _began = forks.begins();
        assert!(forks.concerns_us());
        assert!(enter());
        assert!(!forks.concerns_us());
        assert!(!enter());
        assert!(!leave());
        assert!(leave());
        assert!(forks.concerns_us() || !forks.is_under_way(stats::clock()));
    }
}
