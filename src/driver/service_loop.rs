//! Where the program's service loop is.
//!
//! A loop is run by one thread at a time. A thread that calls back must know whether it is the loop's thread itself, and
//! whether that thread reads connections (it sleeps in poll(2), as far as anybody can tell) or is inside a dispatch routine.
#![forbid(unsafe_code)]

use once_cell::race::OnceBox;

use crate::per_thread::{self, Owned};
use crate::{fork, thread};
use std::any::Any;
use std::cell::Cell;
use std::mem::forget;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Instant;

/// Calls that may be nested in one another, each waiting for a call back: the stack is the program's.
const NEST_MAX: u32 = 64;

/// The program's loop: libtirpc has one table of transports, and all its loops look at that.
pub static PROGRAM: ServiceLoop = ServiceLoop::new();

/// A service loop.
pub struct ServiceLoop {
    /// The thread that ran it last; 0: none yet.
    thread: AtomicUsize,
    /// How many times it has looked at a connection.
    looks: AtomicU64,
    /// It has not read what had come for a while, or has been left, and has not looked since.
    away: AtomicBool,
    state: fork::Lock<State>,
    /// Routines that have begun.
    begun: AtomicU64,
    /// How many routines run.
    dispatching: AtomicUsize,
    /// Whether there is something in [`State::left`].
    left: AtomicBool,
    /// The connection that served last, and since when no other one has, in nanoseconds of [`now_ns`].
    last: AtomicUsize,
    since: AtomicU64,
    /// The present [`PERIOD`], how many connections have served in it, and how many in the one before.
    period: AtomicU64,
    active: AtomicUsize,
    before: AtomicUsize,
}

/// Nanoseconds, as a power of two: about a millisecond.
const PERIOD: u32 = 20;

#[derive(Default)]
struct State {
    /// Dispatch routines that run in the loop's thread, one inside the other.
    dispatching: Vec<Routine>,
    /// Connections with requests that others have read.
    left: Vec<RawFd>,
}

struct Routine {
    serial: u64,
    thread: usize,
    frame: usize,
    /// Its thread has ended.
    ended: bool,
    owner: Weak<dyn Owner>,
}

/// How near to each other on the stack, in bytes, the messages of libtirpc's dispatcher lie when the same loop calls it for
/// one descriptor or another. A message in a loop inside a routine is farther away: beside it the dispatcher has room for a
/// credential and a verifier, 1,200 bytes.
const ALIKE: usize = 1024;

impl Routine {
    /// Whether it has been left, now that `thread` is in the frame at `frame`, or in one that begins up to `above` bytes
    /// above. Addresses mean something only on the thread's own stack: a routine on a coroutine's stack goes on when the
    /// program switches back to it.
    fn is_left(&self, thread: usize, frame: usize, above: usize) -> bool {
        let below = self.thread == thread && self.frame <= frame + above;
        let own = |stack: Range<usize>| stack.contains(&self.frame) && stack.contains(&frame);
        self.ended || below && thread::own_stack().is_some_and(own)
    }
}

/// Whose request a routine serves.
pub trait Owner: Any + Send + Sync {
    /// The routine with this [`Dispatching::serial`] no longer runs: it was left by an exception of the program, by a jump, or
    /// by the end of its thread.
    fn thrown(&self, serial: u64);

    /// The latest routine has `returned`, or else is being left just now.
    fn ended(&self, returned: bool);

    /// Leaves its connection to the loop if the descriptor does not tell of everything that has come, or will come.
    fn look_again(&self);
}

thread_local! {
    static NESTED: Cell<u32> = const { Cell::new(0) };
    static END: Owned<End> = const { Owned::new() };
}

/// Dropped at the end of its thread: the loop that the thread has run.
struct End(&'static ServiceLoop);

impl Drop for End {
    /// Marks the routines that the thread has not returned from: whoever reads a connection next sees to them.
    fn drop(&mut self) {
        let End(home) = *self;
        if !home.is_dispatching() {
            return;
        }
        let (thread, stack) = (thread::this(), thread::own_stack());
        let own = |it: &&mut Routine| {
            it.thread == thread && stack.as_ref().is_some_and(|stack| stack.contains(&it.frame))
        };
        home.state().dispatching.iter_mut().filter(own).for_each(|it| it.ended = true);
    }
}

/// A dispatch routine that runs.
pub struct Dispatching {
    home: &'static ServiceLoop,
    serial: u64,
}

impl Dispatching {
    /// A number unique to this routine.
    pub fn serial(&self) -> u64 {
        self.serial
    }
}

impl Drop for Dispatching {
    fn drop(&mut self) {
        let gone = self.home.remove(self.serial);
        // It may hold the last reference to its owner.
        drop(gone);
    }
}

impl Default for ServiceLoop {
    fn default() -> ServiceLoop {
        ServiceLoop::new()
    }
}

impl ServiceLoop {
    /// A loop that nobody runs yet.
    pub const fn new() -> ServiceLoop {
        ServiceLoop {
            thread: AtomicUsize::new(0),
            looks: AtomicU64::new(0),
            away: AtomicBool::new(false),
            state: fork::Lock::new(),
            begun: AtomicU64::new(0),
            dispatching: AtomicUsize::new(0),
            left: AtomicBool::new(false),
            last: AtomicUsize::new(0),
            since: AtomicU64::new(0),
            period: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            before: AtomicUsize::new(0),
        }
    }

    fn state(&'static self) -> MutexGuard<'static, State> {
        self.state.lock()
    }

    /// The calling thread, which is the loop's, begins to run a dispatch routine. `frame`: where the message of its dispatcher
    /// is on its stack, from which the routine's own frames grow downwards. `owner` is told if the routine is left in another
    /// way than by returning.
    pub fn begin(&'static self, frame: usize, owner: Weak<dyn Owner>) -> Dispatching {
        self.look();
        let thread = thread::this();
        // Dropping the previous value would count as the end of the thread.
        forget(per_thread::put(&END, End(self)));
        let mut state = self.state();
        let serial = self.begun.fetch_add(1, Relaxed);
        state.dispatching.push(Routine { serial, thread, frame, ended: false, owner });
        self.dispatching.store(state.dispatching.len(), Relaxed);
        Dispatching { home: self, serial }
    }

    fn remove(&'static self, serial: u64) -> Option<Routine> {
        let mut state = self.state();
        let gone = match state.dispatching.pop_if(|last| last.serial == serial) {
            Some(last) => last,
            None => {
                let at = state.dispatching.iter().rposition(|routine| routine.serial == serial)?;
                state.dispatching.remove(at)
            }
        };
        self.dispatching.store(state.dispatching.len(), Release);
        Some(gone)
    }

    /// The calling thread is in the frame at `frame`: no routine runs below it on the same stack. One that has not
    /// returned was left by an exception, or a jump; or its thread has ended.
    pub fn unwound_to(&'static self, frame: usize) {
        self.unwind(frame, 0);
    }

    /// The same for libtirpc's dispatcher, whose `message` is there: it runs no routine yet, nor does another one that the
    /// same loop has called. For a dispatcher of the program's own, which has its message elsewhere than on the stack, this
    /// tells nothing.
    pub fn dispatches(&'static self, message: usize) {
        self.unwind(message, ALIKE);
    }

    fn unwind(&'static self, frame: usize, above: usize) {
        while self.is_dispatching() {
            let thread = thread::this();
            let left = |it: &&Routine| it.is_left(thread, frame, above);
            let found = self.state().dispatching.iter().rfind(left).map(|it| (it.serial, it.owner.clone()));
            let Some((serial, owner)) = found else { return };
            if let Some(owner) = owner.upgrade() {
                owner.thrown(serial);
            }
            // Its owner has dropped it, or there is none.
            drop(self.remove(serial));
        }
    }

    /// Whose requests are being served, or were by routines that have not returned.
    pub fn owners(&'static self) -> Vec<Weak<dyn Owner>> {
        if !self.is_dispatching() {
            return Vec::new();
        }
        self.state().dispatching.iter().map(|routine| routine.owner.clone()).collect()
    }

    /// Whose request the routine with this serial serves; `None` if the routine was taken for one that no longer runs.
    pub fn owner(&'static self, serial: u64) -> Option<Weak<dyn Owner>> {
        self.state().dispatching.iter().rfind(|it| it.serial == serial).map(|it| it.owner.clone())
    }

    /// Whose request the innermost routine of the calling thread serves.
    pub fn innermost(&'static self) -> Option<Arc<dyn Owner>> {
        /// Others have the lock only for a moment; this thread may have it itself, where a signal handler asks.
        const TRIES: u32 = 1000;
        if !self.is_dispatching() {
            return None;
        }
        let thread = thread::this();
        let state = (0..TRIES).find_map(|_| {
            self.state.try_lock().or_else(|| {
                std::thread::yield_now();
                None
            })
        })?;
        state.dispatching.iter().rfind(|it| it.thread == thread)?.owner.upgrade()
    }

    /// Whether a routine runs, or one has not returned. Whoever finds that none does also sees what its end has left.
    pub fn is_dispatching(&self) -> bool {
        self.dispatching.load(Acquire) > 0
    }

    /// The calling thread runs the loop: it has come to look at a connection.
    pub fn look(&self) {
        self.thread.store(thread::this(), Relaxed);
        // Only this thread increments the number, except in programs with several loops, of which any one will do.
        self.looks.store(self.looks.load(Relaxed).wrapping_add(1), Relaxed);
        if self.away.load(Relaxed) {
            self.away.store(false, Relaxed);
        }
    }

    /// The loop has come to look at a connection, and belongs to no thread: what it finds is served by several.
    pub fn look_for_others(&self) {
        /// No thread's: none waits in a routine of its own loop, and none but the loop reads.
        const NONE: usize = usize::MAX;
        self.look();
        self.thread.store(NONE, Relaxed);
    }

    /// How many times the loop has looked.
    pub fn looks(&self) -> u64 {
        self.looks.load(Relaxed)
    }

    /// Nobody is in the loop, until somebody looks at a connection again. To be mistaken about this does no harm: both read,
    /// by turns, and what is left for the loop wakes it.
    pub fn is_away(&self) {
        self.away.store(true, Relaxed);
    }

    fn nobody_runs_it(&self) -> bool {
        self.away.load(Relaxed) || self.thread.load(Relaxed) == 0
    }

    /// Whether the loop is run by the calling thread.
    pub fn is_mine(&self) -> bool {
        self.thread.load(Relaxed) == thread::this()
    }

    /// Whether the calling thread may read connections: the loop does not.
    pub fn may_read(&self) -> bool {
        self.is_mine() || self.nobody_runs_it() || self.is_dispatching()
    }

    /// Does `step`, which reads a connection, unless the loop is back; in that case returns `None`. `step` returns the
    /// connection if something of it is left for the loop. The result is true if nothing else will tell the loop of that.
    pub fn read_instead(&'static self, step: impl FnOnce() -> Option<RawFd>) -> Option<bool> {
        // The lock is kept: what `step` leaves must be there when the loop comes back.
        let mut state = self.state();
        if state.dispatching.is_empty() && !self.nobody_runs_it() {
            return None;
        }
        let left = step().filter(|fd| !state.left.contains(fd));
        state.left.extend(left);
        self.left.store(!state.left.is_empty(), Relaxed);
        Some(state.dispatching.is_empty() && left.is_some())
    }

    /// Notes that there are requests of this connection that the loop has not seen.
    pub fn leave(&'static self, fd: RawFd) {
        let mut state = self.state();
        if !state.left.contains(&fd) {
            state.left.push(fd);
        }
        self.left.store(true, Relaxed);
    }

    /// Takes one of the connections that were left, the first.
    pub fn take_left(&'static self) -> Option<RawFd> {
        let mut state = self.state();
        let first = (!state.left.is_empty()).then(|| state.left.remove(0));
        self.left.store(!state.left.is_empty(), Relaxed);
        first
    }

    /// How many connections are left to the loop.
    pub fn left(&'static self) -> usize {
        self.state().left.len()
    }

    /// Whether any are left to the loop.
    pub fn has_left(&self) -> bool {
        self.left.load(Relaxed)
    }

    /// Whether this is the loop's thread outside of dispatch routines, and something was left: nobody else tells it.
    pub fn is_idle_here(&'static self) -> bool {
        self.is_mine() && {
            let state = self.state();
            state.dispatching.is_empty() && !state.left.is_empty()
        }
    }

    /// Whether a dispatch routine may be run while another one waits for a call back: not if this is not the loop's thread,
    /// nor if the nesting is too deep.
    pub fn may_nest(&self) -> bool {
        self.is_mine() && NESTED.get() < NEST_MAX
    }

    /// The connection with this number serves a request.
    pub(super) fn serves(&self, connection: usize) {
        if self.last.swap(connection, Relaxed) != connection {
            self.since.store(now_ns(), Relaxed);
        }
    }

    /// A connection serves a request, `now` by [`stats::clock`](crate::stats::clock). `counted`: when it was last counted.
    /// Returns how many others do so within about a millisecond; threads that come at the same time may miscount.
    pub(super) fn company(&self, counted: &mut u64, now: u64) -> usize {
        let period = now >> PERIOD;
        let last = self.period.load(Relaxed);
        if period != last {
            self.period.store(period, Relaxed);
            let active = self.active.swap(0, Relaxed);
            self.before.store(if period == last + 1 { active } else { 0 }, Relaxed);
        }
        if *counted != period {
            *counted = period;
            self.active.fetch_add(1, Relaxed);
        }
        self.active().saturating_sub(1)
    }

    /// How many connections serve within about a millisecond.
    pub(super) fn active(&self) -> usize {
        self.active.load(Relaxed).max(self.before.load(Relaxed))
    }

    /// Whether this connection is the one that served last.
    pub(super) fn served_last(&self, connection: usize) -> bool {
        self.last.load(Relaxed) == connection
    }

    /// Whether no other connection was active in the last millisecond: a spin then keeps nobody else waiting.
    pub(super) fn is_quiet_for(&self, connection: usize) -> bool {
        self.served_last(connection) && now_ns().saturating_sub(self.since.load(Relaxed)) > 1_000_000
    }
}

fn now_ns() -> u64 {
    ns_of(Instant::now())
}

/// Counted from some moment before the first one asked for; never 0.
fn ns_of(time: Instant) -> u64 {
    static START: OnceBox<Instant> = OnceBox::new();
    let start = START.get_or_init(|| Box::new(time));
    time.saturating_duration_since(*start).as_nanos() as u64 + (1 << PERIOD)
}

/// A dispatch routine that is run while another one waits for a call back.
pub struct Nested(());

/// The calling thread runs one as long as the value lives.
pub fn nest() -> Nested {
    NESTED.set(NESTED.get() + 1);
    Nested(())
}

/// Whether the calling thread serves in the middle of a call back: the call back is to be looked at after each request.
pub fn is_nested() -> bool {
    NESTED.get() > 0
}

impl Drop for Nested {
    fn drop(&mut self) {
        NESTED.set(NESTED.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;
    use crate::fork::testing::fork;

    struct Nobody;

    impl Owner for Nobody {
        fn thrown(&self, _: u64) {}
        fn ended(&self, _: bool) {}
        fn look_again(&self) {}
    }

    #[test]
    fn a_routine_is_left_where_its_loop_dispatches_again_and_not_where_one_inside_of_it_does() {
        struct Left(AtomicUsize);

        impl Owner for Left {
            fn thrown(&self, _: u64) {
                self.0.fetch_add(1, Relaxed);
            }
            fn ended(&self, _: bool) {}
            fn look_again(&self) {}
        }

        static HOME: ServiceLoop = ServiceLoop::new();
        let stack = [0u8; 8192];
        let message = stack.as_ptr().addr() + 6000;
        let left = Arc::new(Left(AtomicUsize::new(0)));
        let owner: Weak<Left> = Arc::downgrade(&left);
        let _routine = HOME.begin(message, owner);
        HOME.dispatches(message - 1416);
        HOME.unwound_to(message - 100);
        assert_eq!(left.0.load(Relaxed), 0);
        HOME.dispatches(message - 500);
        assert_eq!((left.0.load(Relaxed), HOME.is_dispatching()), (1, false));
    }

    #[test]
    fn connections_that_serve_within_a_while_are_counted_once() {
        let home = ServiceLoop::new();
        let period = 1 << PERIOD;
        let mut counted = [0; 3];
        let begun = 7 * period;
        let mut serve = |which: usize, at: u64| home.company(&mut counted[which], at);
        assert_eq!(serve(0, begun), 0);
        assert_eq!(serve(0, begun), 0, "it is no company of its own");
        assert_eq!(serve(1, begun), 1);
        assert_eq!(serve(2, begun), 2);
        assert_eq!(serve(0, begun + period), 2, "they have served a moment ago");
        assert_eq!(serve(0, begun + 2 * period), 0, "and no longer");
        assert_eq!(serve(1, begun + 9 * period), 0);
    }

    #[test]
    fn a_forked_child_does_not_wait_for_a_thread_that_reads_in_the_place_of_its_parents_loop() {
        static HOME: ServiceLoop = ServiceLoop::new();
        HOME.is_away();
        let (reads, is_read) = mpsc::channel();
        let (enough, is_enough) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                HOME.read_instead(|| {
                    reads.send(()).unwrap();
                    is_enough.recv().unwrap();
                    None
                })
            });
            is_read.recv().unwrap();
            let child = fork(|| {
                let (served, is_served) = mpsc::channel();
                std::thread::spawn(move || {
                    HOME.leave(7);
                    drop(HOME.begin(0, Weak::<Nobody>::new()));
                    served.send(HOME.take_left()).unwrap();
                });
                is_served.recv_timeout(Duration::from_secs(5)).is_ok_and(|left| left == Some(7))
            });
            let succeeded = child.succeeded();
            enough.send(()).unwrap();
            assert!(succeeded);
        });
    }
}
