//! The locks of a connection while a thread forks a child that may reply to one of its requests: the child inherits their state
//! at that moment, so other threads leave them alone meanwhile.
//!
//! Threads that fork take turns ([`Line`]), as they do in fork(2) itself. Only the thread whose turn it is marks connections that
//! others have to leave alone.
//!
//! # Invariants
//! - No lock is held across the fork: an atfork handler of the program (pthread_atfork(3)) may wait for a thread that wants it.
//!   Nobody waits for a fork much longer than [`most`] once its thread has checked the locks, for which it has [`queue`]; nor
//!   for a lock, or for another thread's turn, longer than [`queue`]. Where the system says that the forking thread is still at
//!   work ([`Line::goes_on`]), they wait up to [`PATIENCE`]: on a busy machine it may have waited for a processor meanwhile.
//! - A thread that has waited runs before the next one forks.
//! - If a thread never returns from fork(2), its fork no longer counts as under way after [`most`], so that those who have
//!   waited go on, and its turn is over after [`queue`]. These times do not grow with the time taken by handlers that were
//!   registered after the library's first use.
//! - No heap: a signal handler that has interrupted malloc(3) may fork.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::TryLockError;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::thread;
use std::time::Duration;

use crate::sync::{Mutex, MutexGuard};
use crate::thread::{id, is_at_work, processor_time};
use crate::{stats, wait};

/// The bounds of [`most`].
const LEAST: u64 = 50_000_000;
const LONGEST: u64 = 500_000_000;
/// How long the next fork waits after one for which threads have waited, so that these can go on. They take a few locks, one
/// after the other.
const GAP: u64 = 200_000;
/// How often waiting threads look again.
const LOOK: Duration = Duration::from_micros(50);
/// How long they wait at most for a thread that is at work, in nanoseconds.
const PATIENCE: u64 = 1_000_000_000;

/// How long the latest fork(2) has taken, in processor time: the kernel copies page tables. Half of what the one before has taken
/// at least, since one that fails takes none.
static TOOK: AtomicU64 = AtomicU64::new(0);

/// How long a thread waits for another thread's fork, in nanoseconds. In a process of many gigabytes each fork takes long.
fn most() -> u64 {
    (2 * TOOK.load(SeqCst)).clamp(LEAST, LONGEST)
}

/// How long a thread waits for a lock while others fork in a row, and how long a turn lasts whose thread does not end it.
fn queue() -> u64 {
    4 * most()
}

/// The forks that concern one connection, or several whose numbers hash to the same place.
struct Forks {
    /// In whose turn the fork is made that is under way: its number in the line; 0 if there is none.
    turn: AtomicU64,
    /// When the latest fork ended for which a thread had waited.
    ended: AtomicU64,
    /// Threads that wait for the end of a fork.
    sleeping: AtomicU32,
    /// Threads that wait for one of the connection's locks, or are checking `turn` before they do.
    waiting: AtomicU32,
}

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
    /// When the outermost of them last made progress.
    static ENTERED: Cell<u64> = const { Cell::new(0) };
    static MARKS: Cell<Marks> = const { Cell::new(Marks::NONE) };
    /// How much processor time the thread had taken before fork(2).
    static BEFORE: Cell<u64> = const { Cell::new(0) };
}

impl Forks {
    const fn new() -> Forks {
        Forks {
            turn: AtomicU64::new(0),
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
        self.turn.load(SeqCst) != 0
    }

    fn is_under_way(&self, line: &Line, now: u64) -> bool {
        let turn = self.turn.load(SeqCst);
        turn != 0 && line.is_on(turn, now)
    }

    /// Whether the calling thread has to leave the locks alone.
    fn concerns_us(&self, line: &Line) -> bool {
        self.may_be_under_way() && {
            let now = stats::clock();
            !is_inside(now) && self.is_under_way(line, now)
        }
    }

    /// Waits for a moment.
    fn sleep(&self) {
        self.sleeping.fetch_add(1, SeqCst);
        thread::sleep(LOOK);
        less(&self.sleeping);
    }

    /// A fork begins, in that turn. If the turn has been passed over meanwhile, that of a later one may have begun.
    fn begins(&self, turn: u64) {
        self.turn.fetch_max(turn, SeqCst);
    }

    /// For how many more nanoseconds the threads that have waited for the latest fork go first.
    fn gap(&self, now: u64) -> u64 {
        GAP.saturating_sub(now.saturating_sub(self.ended.load(SeqCst)))
    }

    /// Ends the fork of that turn, unless that of a later one has begun.
    fn ends(&self, turn: u64) {
        if self.sleeping.load(SeqCst) != 0 {
            self.ended.store(stats::clock(), SeqCst);
        }
        let _ = self.turn.compare_exchange(turn, 0, SeqCst, SeqCst);
    }

    /// The slow path of [`lock`]: another thread holds the lock, or may be forking.
    #[cold]
    #[inline(never)]
    fn lock<'a, T>(&self, line: &Line, lock: &'a Mutex<T>) -> MutexGuard<'a, T> {
        let came = stats::clock();
        let leaves_alone = || {
            let now = stats::clock();
            let waited = now.saturating_sub(came);
            self.concerns_us(line) && (waited < queue() || waited < PATIENCE && line.goes_on(now))
        };
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
    forks.lock(&LINE, lock)
}

/// Whether another thread is making a fork that concerns the connection: a caller with other things to do leaves it alone.
#[inline]
pub fn is_under_way(connection: usize) -> bool {
    Forks::of(connection).concerns_us(&LINE)
}

/// The same, after waiting up to half a millisecond while that lasts and `others` returns false: a loop that would come straight
/// back then neither keeps a processor from the forking thread, nor keeps taking locks of libtirpc that the child would find
/// taken.
pub fn is_still_under_way(connection: usize, others: impl Fn() -> bool) -> bool {
    let forks = Forks::of(connection);
    for _ in 0..10 {
        if !forks.concerns_us(&LINE) {
            return false;
        }
        if others() {
            break;
        }
        forks.sleep();
    }
    forks.concerns_us(&LINE)
}

/// The turns of the threads that fork, in the order of their arrival.
///
/// The other words may be of a turn before for a while, if a thread loses its processor just before it writes one. Then a turn is
/// taken to be over too early, or others wait for [`PATIENCE`].
struct Line {
    /// The number that the next thread to arrive gets.
    next: AtomicU64,
    /// The number of the thread whose turn it is.
    turn: AtomicU64,
    /// When that turn is over, if its thread has not ended it by then and is not at work.
    until: AtomicU64,
    /// When the others no longer leave alone what it has marked: likewise.
    marked: AtomicU64,
    /// The latest turn that has begun, and the [`id`] of its thread in the lower [`Line::ID`] bits.
    thread: AtomicU64,
    /// When its turn began.
    began: AtomicU64,
    /// How much processor time that thread will have taken when its fork is taken to be lost.
    limit: AtomicU64,
    /// When somebody last looked whether that thread is at work.
    looked: AtomicU64,
    /// How many looks in a row have found that it is not.
    idle: AtomicU64,
    /// What the other threads sleep on. The word of number n is at n modulo the length, and changes when its turn comes.
    told: [AtomicU32; Line::WORDS],
}

static LINE: Line = Line::new();

impl Line {
    const WORDS: usize = 64;

    /// No thread has a larger number: the kernel's PID_MAX_LIMIT.
    const ID: u32 = 22;

    const fn new() -> Line {
        // No thread gets 0, which `Marks::NONE` has.
        let [next, turn] = [const { AtomicU64::new(1) }; 2];
        let [until, marked, thread, began, limit, looked, idle] = [const { AtomicU64::new(0) }; 7];
        let told = [const { AtomicU32::new(0) }; Line::WORDS];
        Line { next, turn, until, marked, thread, began, limit, looked, idle, told }
    }

    fn told(&self, number: u64) -> &AtomicU32 {
        &self.told[number as usize % Line::WORDS]
    }

    /// Waits for the calling thread's turn, and returns its number. If another thread's turn has not ended in time, the next one
    /// begins nevertheless; the children of both may then find locks taken.
    fn take_turn(&self) -> u64 {
        let mut number = self.next.fetch_add(1, SeqCst);
        let mut came = stats::clock();
        loop {
            let told = self.told(number);
            let (before, turn, now) = (told.load(SeqCst), self.turn.load(SeqCst), stats::clock());
            ENTERED.set(now);
            if turn == number {
                self.limit_turn(number);
                self.limit_processor_time(number, queue());
                self.began.store(now, SeqCst);
                self.looked.store(0, SeqCst);
                self.idle.store(0, SeqCst);
                self.thread.fetch_max(number << Line::ID | u64::from(id()), SeqCst);
                if self.turn.load(SeqCst) == number {
                    return number;
                }
                continue;
            }
            if turn > number {
                // It had no processor for so long that the others have passed it over.
                (number, came) = (self.next.fetch_add(1, SeqCst), now);
                continue;
            }
            // The next in the line looks most often; nobody sleeps much longer than a turn may last.
            let look = most() / 2 * (number - turn).min(4);
            // A thread that found nobody before it may still be about to say how long its turn lasts.
            match self.until.load(SeqCst).max(came + most()).saturating_sub(now) {
                0 if !self.goes_on(now) => self.pass_turn(turn),
                0 => wait::for_change(told, before, Duration::from_nanos(look)),
                left => wait::for_change(told, before, Duration::from_nanos(left.min(look))),
            }
        }
    }

    /// Whether what was marked in the turn of that number is still to be left alone.
    fn is_on(&self, number: u64, now: u64) -> bool {
        self.turn.load(SeqCst) == number && (now < self.marked.load(SeqCst) || self.goes_on(now))
    }

    /// Whether the thread whose turn it is goes on with its fork: it is not the calling one, and neither sleeps in a handler nor
    /// takes so much processor time that it must be waiting in a loop there.
    fn goes_on(&self, now: u64) -> bool {
        let [turn, thread, began, limit] =
            [&self.turn, &self.thread, &self.began, &self.limit].map(|word| word.load(SeqCst));
        if turn != thread >> Line::ID || now.saturating_sub(began) >= PATIENCE {
            return false;
        }
        let forker = (thread & ((1 << Line::ID) - 1)) as u32;
        if forker == id() {
            return false;
        }
        // Whoever looks does so for all, for a while: it takes longer than most locks are held.
        let [looked, idle] = [&self.looked, &self.idle].map(|word| word.load(SeqCst));
        let is_old = now.saturating_sub(looked) >= most() / 8;
        if is_old && self.looked.compare_exchange(looked, now, SeqCst, SeqCst).is_ok() {
            match processor_time(forker).is_some_and(|taken| taken < limit) && is_at_work(forker) {
                true => self.idle.store(0, SeqCst),
                false => self.idle.store(idle.saturating_add(1), SeqCst),
            }
        }
        // fork(2) itself may sleep for a moment, for a lock of malloc(3).
        self.idle.load(SeqCst) < 2
    }

    /// From now on the turn of that number lasts for [`queue`], or as long as its thread is at work, if it is not over.
    fn limit_turn(&self, number: u64) {
        if self.turn.load(SeqCst) == number {
            let until = stats::clock() + queue();
            self.marked.store(until, SeqCst);
            self.until.store(until, SeqCst);
        }
    }

    /// From now on what is marked in the turn of that number is left alone for this time, in nanoseconds, or likewise.
    fn limit_marks(&self, number: u64, time: u64) {
        if self.turn.load(SeqCst) == number {
            self.marked.store(stats::clock() + time, SeqCst);
        }
    }

    /// From now on the calling thread takes that much processor time at most in the turn of that number, or its fork is lost.
    fn limit_processor_time(&self, number: u64, time: u64) {
        if self.turn.load(SeqCst) == number {
            let taken = processor_time(id()).unwrap_or(0);
            self.limit.store(taken + time, SeqCst);
        }
    }

    /// Ends the turn of that number, if it is not over.
    fn pass_turn(&self, number: u64) {
        // The time of the next turn, whose thread may not come: set first, for those that see that turn.
        self.limit_turn(number);
        if self.turn.compare_exchange(number, number + 1, SeqCst, SeqCst).is_ok() {
            let told = self.told(number + 1);
            told.fetch_add(1, SeqCst);
            wait::tell_change(told);
        }
    }

    /// Forgets all threads that wait, and the one whose turn it is.
    fn clear(&self) {
        self.turn.store(self.next.load(SeqCst), SeqCst);
    }
}

/// A thread's fork.
#[derive(Clone, Copy)]
struct Marks {
    /// The places of the connections that it concerns, one bit each.
    places: [u64; PLACES / 64],
    /// The thread's number in the line.
    turn: u64,
}

impl Marks {
    const NONE: Marks = Marks { places: [0; PLACES / 64], turn: 0 };

    fn add(&mut self, place: usize) {
        self.places[place / 64] |= 1 << (place % 64);
    }

    fn all(&self) -> impl Iterator<Item = &'static Forks> {
        let places = self.places;
        (0..PLACES)
            .filter(move |place| places[place / 64] & 1 << (place % 64) != 0)
            .map(|place| &FORKS[place])
    }
}

/// The calling thread is about to fork. Waits for its turn, marks the `connections` that the fork concerns, lets threads that
/// already wait for their locks have them, and has `see` check whether the locks are free.
pub fn begins(connections: impl FnOnce(&mut dyn FnMut(usize)), see: impl FnOnce()) {
    let mut marks = Marks { turn: LINE.take_turn(), ..Marks::NONE };
    connections(&mut |connection| marks.add(place(connection)));
    let gap = marks.all().map(|forks| forks.gap(stats::clock())).max();
    if let Some(gap) = gap.filter(|gap| *gap != 0) {
        thread::sleep(Duration::from_nanos(gap));
    }
    marks.all().for_each(|forks| forks.begins(marks.turn));
    let until = stats::clock() + most();
    while marks.all().any(|forks| forks.waiting.load(SeqCst) != 0) && stats::clock() < until {
        thread::sleep(LOOK);
    }
    see();
    ENTERED.set(stats::clock());
    MARKS.set(marks);
    LINE.limit_processor_time(marks.turn, most());
    LINE.limit_marks(marks.turn, most());
}

/// The fork is over, or the thread has left it. Does nothing if none has begun.
pub fn ends() {
    let marks = MARKS.replace(Marks::NONE);
    if marks.turn != 0 {
        marks.all().for_each(|forks| forks.ends(marks.turn));
        LINE.pass_turn(marks.turn);
    }
}

/// The calling thread is about to call fork(2), as far as the library's own handlers are concerned.
pub fn measure() {
    BEFORE.set(processor_time(id()).unwrap_or(u64::MAX));
}

/// It has called it, and this is the parent.
pub fn measured() {
    if let Some(took) = processor_time(id()).and_then(|now| now.checked_sub(BEFORE.get())) {
        TOOK.store(took.max(TOOK.load(SeqCst) / 2), SeqCst);
    }
}

/// Whether the calling thread is in a fork, and that has made progress lately. It may have slept for [`queue`].
fn is_inside(now: u64) -> bool {
    DEPTH.get() != 0 && now.saturating_sub(ENTERED.get()) < 2 * queue()
}

/// The calling thread forks. Returns whether this is not inside another fork of its own.
pub fn enter() -> bool {
    let now = stats::clock();
    if is_inside(now) {
        DEPTH.set(DEPTH.get() + 1);
        return false;
    }
    quit();
    DEPTH.set(1);
    ENTERED.set(now);
    true
}

/// The calling thread is in no fork. If it was in one, it has left it by longjmp(3) out of an atfork handler.
#[inline]
pub fn quit() {
    if DEPTH.get() != 0 {
        DEPTH.set(0);
        ends();
    }
}

/// The calling thread has forked. Returns whether it is in no fork any more.
pub fn leave() -> bool {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    DEPTH.get() == 0
}

/// Called in a child, where only the calling thread is left.
pub fn forked() {
    for forks in &FORKS {
        forks.turn.store(0, SeqCst);
        forks.sleeping.store(0, SeqCst);
        forks.waiting.store(0, SeqCst);
    }
    LINE.clear();
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// The calling thread begins a fork for which nobody checks anything.
    fn begins_at_once(forks: &Forks, line: &Line) -> u64 {
        let turn = line.take_turn();
        forks.begins(turn);
        line.limit_marks(turn, LEAST);
        turn
    }

    fn ends_it(forks: &Forks, line: &Line, turn: u64) {
        forks.ends(turn);
        line.pass_turn(turn);
    }

    #[test]
    fn who_waits_for_a_lock_has_given_it_back_when_another_thread_forks() {
        let in_time = (0..100).any(|_| {
            let (lock, forks, line) = (Mutex::new(()), Forks::new(), Line::new());
            let (lock, forks, line) = (&lock, &forks, &line);
            let first = lock.lock().unwrap();
            thread::scope(move |scope| {
                let waits = scope.spawn(|| drop(forks.lock(line, lock)));
                while forks.waiting.load(SeqCst) == 0 {
                    thread::yield_now();
                }
                let forker = scope.spawn(move || {
                    let turn = begins_at_once(forks, line);
                    let is_under_way = || forks.is_under_way(line, stats::clock());
                    while forks.waiting.load(SeqCst) != 0 && is_under_way() {
                        thread::sleep(LOOK);
                    }
                    let mut taken = lock.try_lock().is_err();
                    while taken && is_under_way() {
                        thread::yield_now();
                        taken = lock.try_lock().is_err();
                    }
                    // The waiter comes back for it, but not yet.
                    let left_alone = !taken && !waits.is_finished();
                    let in_time = is_under_way();
                    ends_it(forks, line, turn);
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
        assert!(in_time, "each time it took {LEAST} ns");
    }

    #[test]
    fn nobody_waits_long_for_a_thread_that_does_not_come_back_from_its_fork() {
        let (lock, forks, line, before) = (Mutex::new(()), Forks::new(), Line::new(), stats::clock());
        let lost = begins_at_once(&forks, &line);
        drop(forks.lock(&line, &lock));
        assert!(stats::clock() >= before + LEAST);
        let next = begins_at_once(&forks, &line);
        ends_it(&forks, &line, lost);
        // Late, of a turn that was passed over.
        forks.begins(lost);
        assert!(forks.is_under_way(&line, before) && forks.turn.load(SeqCst) == next);
        ends_it(&forks, &line, next);
        assert!(!forks.may_be_under_way());
    }

    #[test]
    fn threads_fork_one_after_the_other_in_the_order_in_which_they_came() {
        let line = Line::new();
        let done = Mutex::new(Vec::new());
        let first = line.take_turn();
        thread::scope(|scope| {
            for number in first + 1..first + 8 {
                scope.spawn(|| {
                    let number = line.take_turn();
                    done.lock().unwrap().push(number);
                    line.pass_turn(number);
                });
                while line.next.load(SeqCst) <= number {
                    thread::yield_now();
                }
            }
            done.lock().unwrap().push(first);
            line.pass_turn(first);
        });
        let done = done.into_inner().unwrap();
        assert!(done.is_sorted() && done.len() == 8, "{done:?}");
    }

    #[test]
    fn a_turn_that_does_not_end_is_passed_over_after_a_while_and_ends_nobody_elses() {
        let line = Line::new();
        let (begin, lost) = (stats::clock(), line.take_turn());
        let next = line.take_turn();
        assert!(stats::clock() >= begin + 4 * LEAST && next == lost + 1);
        assert!(line.until.load(SeqCst) >= begin + 8 * LEAST);
        let until = line.until.load(SeqCst);
        line.pass_turn(lost);
        line.limit_turn(lost);
        assert_eq!((line.turn.load(SeqCst), line.until.load(SeqCst)), (next, until));
        // In a child nobody else is in it.
        line.next.fetch_add(5, SeqCst);
        line.clear();
        line.pass_turn(next);
        let last = line.take_turn();
        assert_eq!((last, line.turn.load(SeqCst)), (next + 6, next + 6));
    }

    #[test]
    fn a_fork_takes_longer_while_its_thread_is_at_work() {
        let line = Line::new();
        let [may_sleep, is_over] = [const { AtomicU32::new(0) }; 2];
        thread::scope(|scope| {
            scope.spawn(|| {
                let number = line.take_turn();
                while may_sleep.load(SeqCst) == 0 {
                    std::hint::spin_loop();
                }
                while is_over.load(SeqCst) == 0 {
                    wait::for_change(&is_over, 0, Duration::from_secs(60));
                }
                line.pass_turn(number);
            });
            while line.thread.load(SeqCst) == 0 {
                thread::yield_now();
            }
            // What was seen before has been forgotten after this time, also when forks of other tests take long.
            const WHILE: u64 = LONGEST / 8;
            let late = line.began.load(SeqCst) + LONGEST;
            line.limit.store(u64::MAX, SeqCst);
            assert!(line.goes_on(late));
            assert!(!line.goes_on(late + PATIENCE));
            // It has taken too much processor time, which counts when it is seen for the second time, and looked for only now and
            // then.
            line.limit.store(0, SeqCst);
            let looks = [0, 1, 1, 2, 2].map(|n| line.goes_on(late + n * WHILE));
            assert_eq!(looks, [true, true, true, false, false]);
            line.limit.store(u64::MAX, SeqCst);
            assert!(!line.goes_on(late + 2 * WHILE) && line.goes_on(late + 3 * WHILE));
            may_sleep.store(1, SeqCst);
            while line.goes_on(late + 4 * WHILE) {
                line.looked.store(0, SeqCst);
                thread::yield_now();
            }
            is_over.store(1, SeqCst);
            wait::tell_change(&is_over);
        });
        // It is the turn of a thread that has not come yet.
        assert!(!line.goes_on(stats::clock()));
    }

    #[test]
    fn a_thread_that_comes_too_late_for_its_turn_waits_for_another_one() {
        let line = Line::new();
        let first = line.take_turn();
        thread::scope(|scope| {
            let late = scope.spawn(|| line.take_turn());
            while line.next.load(SeqCst) != first + 2 {
                thread::yield_now();
            }
            // Both turns are over before it runs, and a third one has begun.
            let before = stats::clock();
            line.next.fetch_add(1, SeqCst);
            line.turn.store(first + 2, SeqCst);
            line.until.store(before + LEAST, SeqCst);
            assert_eq!(late.join().unwrap(), first + 3);
            assert!(stats::clock() >= before + LEAST);
        });
    }

    #[test]
    fn who_has_waited_goes_on_before_the_next_fork() {
        let (forks, line) = (Forks::new(), Line::new());
        let turn = begins_at_once(&forks, &line);
        assert_eq!(forks.gap(stats::clock()), 0);
        // As if a thread slept.
        forks.sleeping.fetch_add(1, SeqCst);
        ends_it(&forks, &line, turn);
        less(&forks.sleeping);
        let ended = forks.ended.load(SeqCst);
        assert_eq!((forks.gap(ended), forks.gap(ended + GAP)), (GAP, 0));
        // Nobody has waited for that one.
        let turn = begins_at_once(&forks, &line);
        ends_it(&forks, &line, turn);
        assert_eq!(forks.ended.load(SeqCst), ended);
    }

    #[test]
    fn connections_are_left_alone_from_the_turn_of_the_fork_on_which_concerns_them_then() {
        let connections = [0x10_0000, 0x20_0000];
        let [one, other] = connections.map(Forks::of);
        let before = LINE.take_turn();
        let is_over = AtomicU32::new(0);
        thread::scope(|scope| {
            let forker = scope.spawn(|| {
                let concerned = |mark: &mut dyn FnMut(usize)| {
                    // The turn may have been passed over, on a busy machine.
                    assert!(is_over.load(SeqCst) == 1 || LINE.turn.load(SeqCst) > before);
                    connections.into_iter().for_each(mark);
                };
                begins(concerned, || assert!(one.may_be_under_way() && other.may_be_under_way()));
                ends();
            });
            while LINE.next.load(SeqCst) <= before + 1 && !forker.is_finished() {
                thread::yield_now();
            }
            is_over.store(1, SeqCst);
            LINE.pass_turn(before);
            forker.join().unwrap();
        });
        assert!(!one.may_be_under_way() && !other.may_be_under_way());
    }

    #[test]
    fn a_thread_that_forks_waits_for_no_other_and_knows_the_first_from_those_inside() {
        let (forks, line) = (Forks::new(), Line::new());
        let turn = begins_at_once(&forks, &line);
        line.limit_marks(turn, u64::from(u32::MAX));
        assert!(forks.concerns_us(&line));
        assert!(enter());
        assert!(!forks.concerns_us(&line));
        assert!(!enter());
        assert!(!leave());
        assert!(leave());
        assert!(forks.concerns_us(&line));
    }

    #[test]
    fn a_fork_that_a_thread_has_left_without_its_end_holds_up_nobody() {
        assert!(enter());
        begins(|mark| mark(0x50_0000), || ());
        let turn = MARKS.get().turn;
        quit();
        assert!(LINE.turn.load(SeqCst) > turn && !is_inside(stats::clock()));
        assert!(enter());
        assert!(leave());
    }
}
