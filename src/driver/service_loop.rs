//! Where the program's service loop is.
//!
//! A process has one loop, run by one thread at a time. A call back must know whether that thread is its own, whether it
//! reads connections (it sleeps in poll(2), as far as anybody can tell) or is inside a dispatch routine.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, Weak};

use crate::thread;

/// Calls that may be nested in one another, each waiting for a call back: the stack is the program's.
const NEST_MAX: u32 = 64;

/// The thread that ran the loop last; 0: none yet.
static THREAD: AtomicUsize = AtomicUsize::new(0);

/// How often the loop has looked at a connection.
static LOOKS: AtomicU64 = AtomicU64::new(0);

/// It has not read what had come for a while, or has been left, and has not been seen since.
static AWAY: AtomicBool = AtomicBool::new(false);

struct State {
    /// Dispatch routines that run in the loop's thread, one inside the other.
    dispatching: Vec<Routine>,
    /// Routines that have begun.
    begun: u64,
    /// Connections with requests that others have read.
    left: Vec<RawFd>,
}

static STATE: Mutex<State> = Mutex::new(State { dispatching: Vec::new(), begun: 0, left: Vec::new() });

/// How many routines run.
static DISPATCHING: AtomicUsize = AtomicUsize::new(0);

struct Routine {
    serial: u64,
    thread: usize,
    frame: usize,
    /// Its thread has ended.
    ended: bool,
    owner: Weak<dyn Thrown>,
}

impl Routine {
    /// Whether it has been left, now that `thread` is in the frame at `frame`. Addresses tell only on the thread's own
    /// stack: a routine on a coroutine's goes on when the program switches back to it.
    fn is_left(&self, thread: usize, frame: usize) -> bool {
        let below = self.thread == thread && self.frame <= frame;
        let own = |stack: Range<usize>| stack.contains(&self.frame) && stack.contains(&frame);
        self.ended || below && thread::own_stack().is_some_and(own)
    }
}

/// What may be left by an exception of the program's, or by the end of its thread.
pub trait Thrown: Send + Sync {
    /// The routine with this [`Dispatching::serial`] does not run any more.
    fn thrown(&self, serial: u64);
}

thread_local! {
    static NESTED: Cell<u32> = const { Cell::new(0) };
    static END: End = const { End };
}

/// Dropped with its thread.
struct End;

impl Drop for End {
    /// Whoever reads a connection next sees to the routines that the thread has not returned from.
    fn drop(&mut self) {
        if DISPATCHING.load(Relaxed) == 0 {
            return;
        }
        let (thread, stack) = (thread::this(), thread::own_stack());
        let own = |it: &&mut Routine| {
            it.thread == thread && stack.as_ref().is_some_and(|stack| stack.contains(&it.frame))
        };
        state().dispatching.iter_mut().filter(own).for_each(|it| it.ended = true);
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(|e| e.into_inner())
}

/// A dispatch routine that runs.
pub struct Dispatching {
    serial: u64,
}

impl Dispatching {
    /// The calling thread, which is the loop's, begins to run one. `frame`: an address on its stack, from which the
    /// routine's own frames grow downwards. `owner` is told if it is left in another way than by returning.
    pub fn begin(frame: usize, owner: Weak<dyn Thrown>) -> Dispatching {
        look();
        let thread = thread::this();
        // A thread that ends already has marked its routines.
        let _ = END.try_with(|_| ());
        let mut state = state();
        let serial = state.begun;
        state.begun += 1;
        state.dispatching.push(Routine { serial, thread, frame, ended: false, owner });
        DISPATCHING.store(state.dispatching.len(), Relaxed);
        Dispatching { serial }
    }

    /// A number of its own.
    pub fn serial(&self) -> u64 {
        self.serial
    }
}

impl Drop for Dispatching {
    fn drop(&mut self) {
        let mut state = state();
        let at = state.dispatching.iter().rposition(|routine| routine.serial == self.serial);
        let gone = at.map(|at| state.dispatching.remove(at));
        DISPATCHING.store(state.dispatching.len(), Relaxed);
        drop(state);
        // It may be the last to know its owner.
        drop(gone);
    }
}

/// The calling thread is in the frame at `frame`: no routine runs below it on the same stack. One that has not returned
/// was left by an exception; or its thread has ended.
pub fn unwound_to(frame: usize) {
    while DISPATCHING.load(Relaxed) > 0 {
        let thread = thread::this();
        let left = |it: &&Routine| it.is_left(thread, frame);
        let Some(found) = state().dispatching.iter().rfind(left).map(|it| (it.serial, it.owner.clone()))
        else {
            return;
        };
        if let Some(owner) = found.1.upgrade() {
            owner.thrown(found.0);
        }
        // Its owner has dropped it, or there is none.
        let mut state = state();
        state.dispatching.retain(|routine| routine.serial != found.0);
        DISPATCHING.store(state.dispatching.len(), Relaxed);
    }
}

/// The calling thread runs the loop: it has come to look at a connection.
pub fn look() {
    THREAD.store(thread::this(), Relaxed);
    // No thread but this one counts, but for programs with several loops, of which any one will do.
    LOOKS.store(LOOKS.load(Relaxed).wrapping_add(1), Relaxed);
    if AWAY.load(Relaxed) {
        AWAY.store(false, Relaxed);
    }
}

/// How often it has.
pub fn looks() -> u64 {
    LOOKS.load(Relaxed)
}

/// Nobody is in the loop, until somebody looks at a connection again. To be mistaken in that does no harm: both read, by
/// turns, and what is left for the loop wakes it.
pub fn is_away() {
    AWAY.store(true, Relaxed);
}

fn nobody_runs_it() -> bool {
    AWAY.load(Relaxed) || THREAD.load(Relaxed) == 0
}

/// Whether the loop is run by the calling thread.
pub fn is_mine() -> bool {
    THREAD.load(Relaxed) == thread::this()
}

/// Whether the calling thread may read connections: the loop does not.
pub fn may_read() -> bool {
    is_mine() || nobody_runs_it() || !state().dispatching.is_empty()
}

/// Does `step`, which reads a connection, unless the loop is back: `None`. `step` returns the connection if something is
/// left of it for the loop; true if nothing else will tell the loop of it.
pub fn stand_in(step: impl FnOnce() -> Option<RawFd>) -> Option<bool> {
    // The lock is kept: what `step` leaves must be there when the loop comes back.
    let mut state = state();
    if state.dispatching.is_empty() && !nobody_runs_it() {
        return None;
    }
    let left = step().filter(|fd| !state.left.contains(fd));
    state.left.extend(left);
    Some(state.dispatching.is_empty() && left.is_some())
}

/// There are requests of this connection that the loop has not seen.
pub fn leave(fd: RawFd) {
    let mut state = state();
    if !state.left.contains(&fd) {
        state.left.push(fd);
    }
}

/// The connections with such requests.
pub fn take_left() -> Vec<RawFd> {
    std::mem::take(&mut state().left)
}

/// Whether there are some.
pub fn has_left() -> bool {
    !state().left.is_empty()
}

/// Whether this is the loop's thread outside of dispatch routines, and something was left: nobody else tells it.
pub fn is_idle_here() -> bool {
    is_mine() && {
        let state = state();
        state.dispatching.is_empty() && !state.left.is_empty()
    }
}

/// A dispatch routine that is run while another one waits for a call back.
pub struct Nested(());

/// Whether one may be run: not where this is not the loop's thread, nor where the nesting is too deep.
pub fn may_nest() -> bool {
    THREAD.load(Relaxed) == thread::this() && NESTED.get() < NEST_MAX
}

/// One is run as long as the value lives.
pub fn nest() -> Nested {
    NESTED.set(NESTED.get() + 1);
    Nested(())
}

/// Whether the calling thread serves in the middle of a call back: that one is to be looked at after each request.
pub fn is_nested() -> bool {
    NESTED.get() > 0
}

impl Drop for Nested {
    fn drop(&mut self) {
        NESTED.set(NESTED.get() - 1);
    }
}
