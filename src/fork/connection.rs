//! The locks of a connection while a thread forks a child that may reply to one of its requests: the child inherits their state
//! at that moment, so other threads leave them alone meanwhile.
//!
//! # Invariants
//! - No lock is held across the fork: an atfork handler of the program (pthread_atfork(3)) may wait for a thread that wants it.
//!   Nobody waits for a fork longer than [`MOST`] once its thread has checked the locks, nor for a lock longer than [`QUEUE`],
//!   nor to fork longer than [`LATE`].
//! - A thread that has waited runs before the next one forks.
//! - If a thread never returns from fork(2), its fork no longer counts as under way after [`MOST`].
//! - No heap: a signal handler that has interrupted malloc(3) may fork.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::TryLockError;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::thread;
use std::time::Duration;

use crate::stats;
use crate::sync::{Mutex, MutexGuard};

/// How long a thread waits for another thread's fork, in nanoseconds: forking a process of many gigabytes takes as long.
const MOST: u64 = 50_000_000;
/// The same for several forks in a row.
const QUEUE: u64 = 4 * MOST;
/// How long a thread waits to fork, however many fork at once. It then takes over from another fork, whose child may find locks
/// taken. The kernel performs forks one after the other in any case.
const LATE: u64 = 5 * QUEUE;
/// How long the next fork waits after one for which threads have waited, so that these can go on. They take a few locks, one
/// after the other.
const GAP: u64 = 200_000;
/// How often waiting threads look again.
const LOOK: Duration = Duration::from_micros(50);
/// Where several threads wait to fork, each looks again only after that many times as long, up to this factor, so that they leave
/// the processors to the thread that forks.
const LINE: u32 = 32;

/// The forks that concern one connection, or several whose numbers hash to the same place.
struct Forks {
    /// When the fork that is under way began, by [`stats::clock`]; 0 if there is none.
    began: AtomicU64,
    /// When the latest fork ended for which a thread had waited.
    ended: AtomicU64,
    /// Threads that wait for the end of a fork.
    sleeping: AtomicU32,
    /// Threads that wait for one of the connection's locks, or are checking `began` before they do.
    waiting: AtomicU32,
}

/// Threads that wait to fork.
static IN_LINE: AtomicU32 = AtomicU32::new(0);

const PLACES: usize = 1024;
static FORKS: [Forks; PLACES] = [const { Forks::new() }; PLACES];

/// `connection`: an address that belongs to it alone.
#[inline(always)]
fn place(connection: usize) -> usize {
    // Fibonacci hashing: the upper ten bits depend on all of the address.
    ((connection as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize
}

/// Counts one thread fewer. In a child that a signal handler has forked, the count may have been reset to zero already.
fn less(threads: &AtomicU32) {
    let _ = threads.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
}

thread_local! {
    /// How many nested forks the calling thread is in: an atfork handler or a signal handler may fork as well.
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

    /// Checked wherever a lock is taken, at no cost.
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

    /// Begins a fork, recorded as begun at `stamp`, if it may begin now: no other one is under way or has just ended. `late`: it
    /// may in any case. Returns whether it has begun.
    fn takes(&self, now: u64, stamp: u64, late: bool) -> bool {
        let before = self.began.load(SeqCst);
        let is_free = before == 0 && now.saturating_sub(self.ended.load(SeqCst)) >= GAP;
        let is_lost = before != 0 && now.saturating_sub(before) >= QUEUE;
        (is_free || is_lost || late) && self.moves(before, stamp)
    }

    fn moves(&self, before: u64, stamp: u64) -> bool {
        self.began.compare_exchange(before, stamp, SeqCst, SeqCst).is_ok()
    }

    /// Ends the fork, unless another one has begun since because this one took too long.
    fn ends(&self, stamp: u64) {
        if self.sleeping.load(SeqCst) != 0 {
            self.ended.store(stats::clock(), SeqCst);
        }
        self.moves(stamp, 0);
    }

    /// The slow path of [`lock`]: another thread holds the lock, or may be forking.
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
            // Either this thread sees the forking one, or that one sees this thread and waits until it has had its turn.
            let guard = (!leaves_alone()).then(|| lock.lock().unwrap_or_else(|e| e.into_inner()));
            less(&self.waiting);
            match guard {
                Some(guard) if !leaves_alone() => return guard,
                given_back => drop(given_back),
            }
        }
    }
}

/// Takes a lock of a connection, even if a holder panicked; but not while another thread makes a fork that concerns the
/// connection. The caller holds no other lock of the connection.
#[inline(always)]
pub fn lock<T>(lock: &Mutex<T>, connection: usize) -> MutexGuard<'_, T> {
    let forks = Forks::of(connection);
    if !forks.may_be_under_way() {
        let guard = match lock.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        // A forking thread announces its fork before it finds the lock free.
        if let Some(guard) = guard
            && !forks.may_be_under_way()
        {
            return guard;
        }
    }
    forks.lock(lock)
}

/// Whether another thread is making a fork that concerns the connection: a caller with other things to do leaves it alone.
#[inline]
pub fn is_under_way(connection: usize) -> bool {
    Forks::of(connection).concerns_us()
}

/// The same, after waiting up to half a millisecond while that lasts and `others` returns false: a loop that would come straight
/// back then neither keeps a processor from the forking thread, nor keeps taking locks of libtirpc that the child would find
/// taken.
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

/// The connections that a thread's fork concerns, by their places, and when the fork began.
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

    /// Lowest places first: all threads use the same order, or two of them would wait for each other.
    fn all(&self) -> impl Iterator<Item = usize> {
        (0..PLACES).filter(|place| self.has(*place))
    }

    fn has(&self, place: usize) -> bool {
        self.places[place / 64] & 1 << (place % 64) != 0
    }

    /// Marks all of them as begun at `stamp`, and drops those that another thread has taken.
    fn renew(&mut self, stamp: u64) {
        let before = *self;
        for place in before.all().filter(|place| !FORKS[*place].moves(before.stamp, stamp)) {
            self.places[place / 64] &= !(1 << (place % 64));
        }
        self.stamp = stamp;
    }
}

/// The calling thread is about to fork, and first has `see` check whether the locks of these connections are free. One such
/// thread at a time, since each check takes the locks for a moment while another thread might fork; and after the threads that
/// already wait for these locks. `connections` is asked again if the calling thread has waited.
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
                // Waiting for the next place does not prolong the time for which the places taken so far are left alone.
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
            // Meanwhile the program may have come to owe replies on other connections too.
            ask(&mut wanted);
        }
        // The time of all of them starts now. A place that was held for too long may have been taken by another thread: it is
        // taken again.
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

/// The fork is over.
pub fn ends() {
    let marks = MARKS.replace(Marks::NONE);
    marks.all().for_each(|place| FORKS[place].ends(marks.stamp));
}

/// The calling thread forks. Returns whether this is not inside another fork of its own.
pub fn enter() -> bool {
    DEPTH.replace(DEPTH.get() + 1) == 0
}

/// The calling thread has forked. Returns whether it is in no fork any more.
pub fn leave() -> bool {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    DEPTH.get() == 0
}

/// Called in a child, where only the calling thread is left.
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
                    // It comes back for the lock, but not yet.
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
        // Nor does a new fork wait for the lost one for ever.
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
            // Another thread takes the place, and is then waited for.
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
                // A fork that never returns: it is waited for until QUEUE after its stamp.
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
