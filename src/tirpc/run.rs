//! `svc_run`, at a cost that does not grow with the number of transports.
//!
//! libtirpc's own `svc_run` copies `svc_pollfd` and polls all of it for each event. Here the same descriptors are in an epoll(7)
//! set, which `xprt_register` and `xprt_unregister` maintain, and `svc_getreq_poll` is given those that are ready; if there are
//! only a few, they are polled as in libtirpc, which costs less than epoll's bookkeeping for each message. All else is as in
//! libtirpc: the loop ends after svc_exit(3), a signal does not end it, its thread may be cancelled while it sleeps, and a
//! dispatch routine may throw. The loop may be entered by several threads, and again by a dispatch routine.
//!
//! # Invariants
//! - A program may write into `svc_pollfd` by hand. What it takes out is not served from then on. What it puts in is found by
//!   [`Set::compare`]: at each turn while the table is short, otherwise only every few turns, so that each turn looks at [`EACH`]
//!   entries on average, and [`SOON`] after the last turn at the latest.
//! - What epoll cannot watch (a file, a descriptor that was closed by hand) makes the loop use poll(2) as libtirpc does.
//! - Nothing is locked while the loop sleeps or dispatches, and no value of ours that needs to be dropped is on the stack; but for
//!   the copy of a table of more than 1024 entries, which is lost with a thread that is cancelled while it polls that.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst, fence};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::config;
use crate::driver::busy::{self, Look};
use crate::driver::service_loop::PROGRAM;
use crate::error::Error;
use crate::ffi::{Uncancelled, step};
use crate::tirpc::{library, nothing_is_registered, polled_table, progress};
use crate::wait::PollSet;
use crate::{fork, log_warn, socket, wait};

/// What libtirpc polls a transport for.
const EVENTS: i16 = libc::POLLIN | libc::POLLPRI | libc::POLLRDNORM | libc::POLLRDBAND;

/// Milliseconds after which the table is looked at once more.
const SOON: c_int = 10;

/// Entries of the table that are looked at in each turn, on average.
const EACH: usize = 512;

/// Milliseconds after which a loop without an epoll set checks whether it has been ended: no bell wakes it.
const AGAIN: c_int = 100;

/// Descriptors that one turn hands out.
const MOST: usize = 64;

/// Up to this many transports are polled: with four clients that call, a null call then costs a tenth less.
const FEW: usize = 16;

// Both are cancellation points: a cancelled thread unwinds through them.
unsafe extern "C-unwind" {
    fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
    fn epoll_wait(set: c_int, events: *mut libc::epoll_event, most: c_int, timeout: c_int) -> c_int;
}

/// What the loops of this process wait for.
#[derive(Default)]
struct Set {
    /// `None` while no loop runs.
    epoll: Option<PollSet>,
    /// The process that made it.
    generation: u64,
    /// By descriptor.
    watched: Vec<Watched>,
    /// The table as it was last found, and how many turns ago.
    seen: Vec<(RawFd, i16)>,
    turns: usize,
    /// The table has changed since.
    stale: bool,
    /// Something in it cannot be watched.
    incomplete: bool,
    /// A loop may be asleep in poll(2), and must be woken when something is registered.
    polled: bool,
    /// Counts comparisons.
    mark: u32,
    /// Counts descriptors that were ready.
    served: u64,
    /// Transports of libtirpc that a thread serves.
    muted: FxHashMap<RawFd, u64>,
    /// Wakes a loop.
    bell: Option<OwnedFd>,
}

/// In the order in which they are served.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Listener,
    Datagrams,
    #[default]
    Other,
}

#[derive(Clone, Copy, Default)]
struct Watched {
    /// 0: it is not watched.
    events: i16,
    /// Whether it accepts connections, or takes datagrams, or is served after those.
    kind: Kind,
    /// Where it is in the table.
    place: usize,
    /// The comparison that found it there.
    mark: u32,
    /// [`Set::served`] when it was last ready.
    served: u64,
}

static SET: fork::Lock<Set> = fork::Lock::new();

/// How many loops run. In a forked child, those of its parent count too.
static LOOPS: AtomicUsize = AtomicUsize::new(0);

fn lock() -> MutexGuard<'static, Set> {
    SET.lock()
}

/// The descriptor of [`Set::bell`], for signal handlers; -1: there is none.
static BELL: AtomicI32 = AtomicI32::new(-1);

thread_local! {
    /// How many loops of ours the thread is in.
    static HERE: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread is in the only loop of ours, which goes on when a routine has returned: then no other loop can be
/// asleep and overlook busy connections.
pub fn is_alone_here() -> bool {
    HERE.get() > 0 && LOOPS.load(Relaxed) == 1
}

/// Wakes a loop that sleeps, if there is one. A signal handler may do that.
pub fn ring() {
    // Either this thread sees the bell, or the one that has just made the bell sees what it is rung for.
    fence(SeqCst);
    let bell = BELL.load(Relaxed);
    if bell >= 0 && LOOPS.load(Relaxed) > 0 {
        // SAFETY: eight bytes; at worst it is another file's number, of a program that closes what is not its own.
        unsafe { libc::write(bell, (&raw const ONE).cast(), size_of_val(&ONE)) };
    }
}

static ONE: u64 = 1;

/// What the next turn of a loop waits for.
#[derive(Clone, Copy)]
enum Turn {
    /// The epoll set, and for how long.
    Epoll(RawFd, c_int),
    /// At most [`FEW`] of libtirpc's table, and the bell.
    Few,
    /// All of the table, as libtirpc does.
    Poll,
}

/// A loop begins.
pub fn enter() {
    LOOPS.fetch_add(1, Relaxed);
    HERE.set(HERE.get() + 1);
    if HERE.get() > 1 {
        // Inside another one, or instead of one that the program has jumped out of.
        busy::leave_all();
    }
}

/// A loop has ended.
pub fn leave() {
    HERE.set(HERE.get().saturating_sub(1));
    // Whoever serves the busy connections next learns from their descriptors that something has come.
    busy::leave_all();
    if LOOPS.fetch_sub(1, Relaxed) == 1 {
        let mut set = lock();
        std::mem::take(&mut *set).close();
    }
}

/// The set, while a loop runs.
fn held() -> Option<MutexGuard<'static, Set>> {
    (LOOPS.load(Relaxed) > 0).then(lock)
}

/// The same, if this process has made it. A forked child makes its own when its loop goes on: what it did to its parent's set
/// would take effect in the parent.
fn current() -> Option<MutexGuard<'static, Set>> {
    held().filter(|set| set.generation == fork::generation())
}

/// Runs `what`. If a loop runs, no other thread registers transports meanwhile.
pub fn locked<T>(what: impl FnOnce() -> T) -> T {
    let _set = current();
    what()
}

/// Has libtirpc put `fd` into its table, which no loop looks at and svc_exit(3) does not empty meanwhile. Returns what `real`
/// returns: whether it has done so.
pub fn register(fd: RawFd, real: impl FnOnce() -> bool) -> bool {
    let Some(mut set) = held() else { return real() };
    let done = real();
    if done && set.generation == fork::generation() {
        // libtirpc ignores others.
        // SAFETY: takes nothing.
        if fd >= 0 && library().is_ok_and(|library| fd < unsafe { (library._rpc_dtablesize)() }) {
            set.muted.remove(&fd);
            set.watch(fd, EVENTS);
        }
        set.stale = true;
        if set.polled {
            ring();
        }
    }
    done
}

/// Has libtirpc take `fd` out of its table, which no loop looks at meanwhile. Called before the descriptor is closed: another
/// process may have it too.
pub fn unregister(fd: RawFd, real: impl FnOnce()) {
    let Some(mut set) = current() else { return real() };
    real();
    set.muted.remove(&fd);
    set.forget(fd);
    set.stale = true;
}

/// Has libtirpc forget its table, as svc_exit(3) does. A loop may be looking at it meanwhile only if a signal handler that calls
/// this has interrupted it, as may happen to libtirpc's own loop.
pub fn exit(real: impl FnOnce()) {
    let mut set = SET.try_lock();
    for _ in 0..100 {
        if set.is_some() || LOOPS.load(Relaxed) == 0 {
            break;
        }
        std::thread::yield_now();
        set = SET.try_lock();
    }
    real();
    drop(set);
    ring();
}

/// Leaves a transport to a thread, until [`unmute`] is called with the serial that this returns: the number may be another
/// transport's by then.
pub fn mute(fd: RawFd) -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Relaxed);
    if let Some(mut set) = current() {
        set.forget(fd);
        set.muted.insert(fd, serial);
    }
    serial
}

/// Whether the transport is still left to a thread.
pub fn is_muted(fd: RawFd, serial: u64) -> bool {
    current().is_none_or(|set| set.muted.get(&fd) == Some(&serial))
}

/// Has the loop look at it again, if it is still the same transport.
pub fn unmute(fd: RawFd, serial: u64) {
    if let Some(mut set) = current()
        && set.muted.get(&fd) == Some(&serial)
    {
        set.muted.remove(&fd);
        set.watch(fd, EVENTS);
    }
}

/// Whether a descriptor other than these is ready; `None` where the program has a loop of its own, or where not all descriptors
/// are in the set. Called by the loop's thread.
pub fn others_wait(except: [RawFd; 2]) -> Option<bool> {
    let set = current()?;
    set.epoll.as_ref().filter(|_| !set.incomplete).map(|epoll| epoll.has_others(except))
}

/// libtirpc's table.
///
/// # Safety
/// As [`crate::tirpc::polled`].
unsafe fn table() -> impl Iterator<Item = (RawFd, i16)> {
    let (table, count) = polled_table();
    (0..count).map(move |index| {
        // SAFETY: libtirpc's array has `count` entries; it changes only in xprt_register (contract).
        let entry = unsafe { table.wrapping_add(index).read() };
        (entry.fd, entry.events)
    })
}

/// The descriptor of one of its entries.
///
/// # Safety
/// As [`table`].
unsafe fn entry(index: usize) -> Option<RawFd> {
    let (table, count) = polled_table();
    // SAFETY: libtirpc's array has `count` entries; it changes only in xprt_register (contract).
    (index < count).then(|| unsafe { table.wrapping_add(index).read() }.fd)
}

impl Set {
    /// Makes sure that this process has a set of its own.
    fn own(&mut self) -> Result<(), Error> {
        let generation = fork::generation();
        if self.epoll.is_none() || self.generation != generation {
            let (epoll, bell) = (PollSet::new()?, wait::bell()?);
            epoll.watch(bell.as_raw_fd(), libc::POLLIN)?;
            let is_own = self.generation == generation;
            self.lose(Set::close);
            let muted = if is_own { std::mem::take(&mut self.muted) } else { FxHashMap::default() };
            BELL.store(bell.as_raw_fd(), Relaxed);
            let (epoll, bell) = (Some(epoll), Some(bell));
            *self = Set { epoll, bell, generation, muted, stale: true, ..Set::default() };
        }
        Ok(())
    }

    /// Gives up the epoll set: the next turn makes another one. What threads are serving stays theirs.
    fn lose(&mut self, end: fn(Set)) {
        let (generation, muted) = (self.generation, std::mem::take(&mut self.muted));
        end(std::mem::take(self));
        (self.generation, self.muted) = (generation, muted);
    }

    /// Closes what belongs to this process.
    fn close(self) {
        if self.generation == fork::generation() {
            BELL.store(-1, Relaxed);
        } else {
            self.abandon();
        }
    }

    /// Gives up the set without closing it: the numbers may be other files' by now, since a child may close what it likes.
    fn abandon(self) {
        BELL.store(-1, Relaxed);
        std::mem::forget((self.epoll, self.bell));
    }

    /// As [`Set::own`]; the set then knows all of the table, except for what was written by hand a moment ago.
    ///
    /// # Safety
    /// As [`table`].
    unsafe fn turn(&mut self) -> Result<Turn, Error> {
        self.own()?;
        if self.stale || self.turns * EACH >= self.seen.len() {
            // SAFETY: by the contract.
            unsafe { self.compare() };
        } else {
            self.turns += 1;
        }
        // A loop asleep in poll(2) would not learn of a transport that a thread gives back.
        self.polled = self.seen.len() <= FEW && self.muted.is_empty();
        Ok(match &self.epoll {
            Some(_) if !self.incomplete && self.polled => Turn::Few,
            Some(epoll) if !self.incomplete => {
                Turn::Epoll(epoll.fd(), if self.turns > 0 { SOON } else { -1 })
            }
            _ => Turn::Poll,
        })
    }

    /// Brings the set in line with the table.
    ///
    /// # Safety
    /// As [`table`].
    unsafe fn compare(&mut self) {
        self.turns = 0;
        // SAFETY: by the contract.
        if !self.stale && unsafe { table() }.eq(self.seen.iter().copied()) {
            return;
        }
        (self.stale, self.incomplete) = (false, false);
        self.mark = self.mark.wrapping_add(1);
        let before = std::mem::take(&mut self.seen);
        if self.seen.try_reserve(polled_table().1).is_err() {
            (self.seen, self.incomplete, self.stale) = (before, true, true);
            return;
        }
        // SAFETY: by the contract.
        self.seen.extend(unsafe { table() });
        for place in 0..self.seen.len() {
            let (fd, events) = self.seen[place];
            let Ok(index) = usize::try_from(fd) else { continue };
            if self.watched.get(index).is_none_or(|it| it.events != events) && !self.muted.contains_key(&fd) {
                self.watch(fd, events);
            }
            if let Some(it) = self.watched.get_mut(index) {
                (it.place, it.mark) = (place, self.mark);
            }
        }
        for (fd, _) in before {
            let gone = |it: &Watched| it.events != 0 && it.mark != self.mark;
            if usize::try_from(fd).is_ok_and(|fd| self.watched.get(fd).is_some_and(gone)) {
                self.forget(fd);
            }
        }
    }

    fn watch(&mut self, fd: RawFd, events: i16) {
        let (Some(epoll), Ok(index)) = (&self.epoll, usize::try_from(fd)) else { return };
        let missing = (index + 1).saturating_sub(self.watched.len());
        // This may take more than the memory reserve has: until there is memory, the loop polls.
        if self.watched.try_reserve(missing).is_err() {
            (self.incomplete, self.stale) = (true, true);
            return;
        }
        if epoll.watch(fd, events).is_err() {
            self.incomplete = true;
            return;
        }
        if missing > 0 {
            self.watched.resize(index + 1, Watched::default());
        }
        let kind = match socket::has_messages(fd) && !socket::is_stream(fd) {
            _ if socket::listens(fd) => Kind::Listener,
            true => Kind::Datagrams,
            false => Kind::Other,
        };
        self.watched[index] = Watched { events, kind, ..self.watched[index] };
    }

    fn silence(&self) {
        // The bell rings on after the end: other loops that are still asleep are to end too.
        if let Some(bell) = &self.bell
            && !has_ended()
        {
            wait::silence(bell);
        }
    }

    /// The descriptor `fd`, by which the bell was known, is ready.
    fn hear(&mut self, fd: RawFd) {
        let mut entry = [wait::PollFd::new(fd, true, false)];
        let rings = wait::poll(&mut entry, Some(Duration::ZERO), None).is_ok_and(|ready| ready > 0);
        if !rings || self.bell.as_ref().is_none_or(|bell| bell.as_raw_fd() != fd) {
            // Another loop has heard it.
        } else if self.epoll.as_ref().is_some_and(|epoll| epoll.has(fd)) {
            self.silence();
        } else {
            // The program has closed it: what has its number now is not ours to read.
            self.lose(Set::abandon);
        }
    }

    fn find(&mut self, fd: RawFd) -> Option<&mut Watched> {
        let found = usize::try_from(fd).ok().and_then(|index| self.watched.get_mut(index));
        found.filter(|it| it.events != 0)
    }

    /// The one that was served longest ago comes first: poll(2) and epoll(7) report them in an order of their own. But
    /// connections to a listener are accepted before all else, as where the listener is the first in libtirpc's table: otherwise
    /// a loop run by another transport's routine would accept the connection, and libtirpc's accept(2) here would then wait for
    /// another one. The same goes for datagrams.
    fn put_in_turn(&mut self, ready: &mut Ready) {
        let fds = &mut ready.fds[..ready.count];
        if fds.len() > 1 {
            fds.sort_unstable_by_key(|entry| {
                self.find(entry.fd).map_or((Kind::Listener, 0), |it| (it.kind, it.served))
            });
        }
        for entry in fds {
            self.served += 1;
            let served = self.served;
            if let Some(it) = self.find(entry.fd) {
                it.served = served;
            }
        }
    }

    fn forget(&mut self, fd: RawFd) {
        let Some(found) = self.find(fd) else { return };
        found.events = 0;
        if let Some(epoll) = &self.epoll {
            epoll.forget(fd);
        }
    }

    /// Whether a transport is in the table.
    ///
    /// # Safety
    /// As [`table`].
    unsafe fn has(&mut self, fd: RawFd) -> bool {
        if let Some(place) = self.find(fd).map(|found| found.place)
            // SAFETY: by the contract.
            && unsafe { entry(place) } == Some(fd)
        {
            return true;
        }
        self.stale = true;
        // SAFETY: by the contract.
        unsafe { table() }.any(|(there, _)| there == fd)
    }

    /// Whether a descriptor that epoll reports is to be handed out.
    ///
    /// # Safety
    /// As [`table`].
    unsafe fn is_due(&mut self, fd: RawFd) -> bool {
        if self.bell.as_ref().is_some_and(|bell| bell.as_raw_fd() == fd) {
            self.silence();
            return false;
        }
        let Some(found) = self.find(fd) else {
            if self.muted.contains_key(&fd) {
                return false;
            }
            // It was closed by hand while another process still has it: only a new set gets rid of it.
            self.lose(Set::close);
            return false;
        };
        let place = found.place;
        // SAFETY: by the contract.
        let is_there = unsafe { entry(place) } == Some(fd);
        self.stale |= !is_there;
        is_there
    }
}

/// libtirpc's condition, which svc_exit(3) fulfils.
fn has_ended() -> bool {
    nothing_is_registered() && polled_table().0.is_null()
}

/// The next turn; `None` if the loop has ended.
fn next_turn(is_over: impl Fn() -> bool) -> Option<Turn> {
    if has_ended() || is_over() {
        return None;
    }
    let turn = step(|| {
        // SAFETY: this is the loop.
        unsafe { lock().turn() }
    });
    // Whoever ended it before there was a bell could not ring.
    fence(SeqCst);
    // Without an epoll set the turn is as in libtirpc.
    (!has_ended() && !is_over()).then(|| turn.unwrap_or(Turn::Poll))
}

/// Descriptors that one turn has found ready.
pub struct Ready {
    fds: [libc::pollfd; MOST],
    count: usize,
}

impl Ready {
    /// None.
    pub const fn none() -> Ready {
        Ready { fds: [libc::pollfd { fd: -1, events: 0, revents: 0 }; MOST], count: 0 }
    }

    /// Adds a descriptor, unless there is no room: then it is looked at again later. The descriptor of a busy connection that a
    /// look has found may be reported too.
    fn add(&mut self, fd: RawFd, revents: i16) {
        if self.fds().any(|known| known == fd) {
            return;
        }
        if let Some(place) = self.fds.get_mut(self.count) {
            *place = libc::pollfd { fd, events: EVENTS, revents };
            self.count += 1;
        }
    }

    /// Their numbers.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.fds[..self.count].iter().map(|entry| entry.fd)
    }
}

/// Runs until svc_exit(3), between [`enter`] and [`leave`].
///
/// # Safety
/// As libtirpc's `svc_run`.
pub unsafe fn run() {
    let mut ready = Ready::none();
    // SAFETY: by the contract.
    while unsafe { turn(&mut ready, || false) } {
        // The count is also 0 where libtirpc's function has already been called for all.
        if ready.count > 0 {
            // SAFETY: that many entries.
            unsafe { getreq_poll(ready.fds.as_mut_ptr(), ready.count as c_int) };
        }
    }
}

/// libtirpc's `svc_getreq_poll`. Does nothing without libtirpc, since nothing is registered then. It runs the program's routines,
/// so it is called outside any guard.
///
/// # Safety
/// As libtirpc's.
unsafe fn getreq_poll(fds: *mut libc::pollfd, count: c_int) {
    if let Ok(library) = library() {
        // SAFETY: by the contract.
        unsafe { (library.svc_getreq_poll)(fds, count) };
    }
}

/// Sleeps until something is ready; returns false when the loop ends, including because it `is_over`. What epoll cannot watch is
/// served here, together with all that is ready then.
///
/// # Safety
/// As libtirpc's `svc_run`.
pub unsafe fn turn(ready: &mut Ready, is_over: impl Fn() -> bool) -> bool {
    ready.count = 0;
    step(|| {
        progress::cool_down();
        busy::hand_over();
        Ok(())
    })
    .unwrap_or(());
    loop {
        let Some(turn) = next_turn(&is_over) else { return false };
        if busy::are_untold() && PROGRAM.is_dispatching() {
            // Another loop was to look at them, outside of this one.
            let _uncancelled = Uncancelled::now();
            let _ = step(|| {
                // SAFETY: by the contract.
                busy::rest(false, |fd| unsafe { takes(fd, ready) });
                Ok(())
            });
            if ready.count > 0 {
                return true;
            }
        }
        let looks = busy::any();
        if !looks && busy::are_untold() {
            busy::are_served();
        }
        let waits = !looks || {
            // A connection that comes to rest signals its peer: a cancellation point.
            let _uncancelled = Uncancelled::now();
            let looked = step(|| {
                // SAFETY: by the contract.
                let waits = unsafe { look(ready) };
                if waits {
                    lock().put_in_turn(ready);
                }
                Ok(waits)
            });
            looked.unwrap_or(true)
        };
        if waits && ready.count > 0 {
            return true;
        }
        // SAFETY: by the contract.
        let goes_on = unsafe { turn.ask(waits, waits && !looks, ready) };
        if waits || ready.count > 0 || !goes_on {
            return goes_on;
        }
    }
}

/// As [`turn`], without sleeping, and without telling whether the loop ends. It may find nothing ready.
///
/// # Safety
/// As [`turn`].
pub unsafe fn glance(ready: &mut Ready, is_over: impl Fn() -> bool) {
    ready.count = 0;
    let Some(turn) = next_turn(&is_over) else { return };
    if busy::any() {
        let _ = step(|| {
            // SAFETY: by the contract.
            busy::look(|fd| unsafe { takes(fd, ready) });
            Ok(())
        });
    }
    // A failure shows in the next turn.
    // SAFETY: by the contract.
    unsafe { turn.ask(false, false, ready) };
}

impl Turn {
    /// Checks the descriptors, and if it `waits`, sleeps until one of them is ready; `asks`: it may check a few times before it
    /// sleeps. What is ready is no longer a busy connection. Returns false when the loop ends.
    ///
    /// # Safety
    /// As [`run`].
    unsafe fn ask(self, waits: bool, asks: bool, ready: &mut Ready) -> bool {
        let sleep = |time| Sleep { time: if waits { time } else { 0 }, asks };
        let goes_on = match self {
            // SAFETY: by the contract.
            Turn::Epoll(set, timeout) => unsafe { by_epoll(set, sleep(timeout), ready) },
            // SAFETY: by the contract.
            Turn::Few => unsafe { by_few(sleep(-1), ready) },
            // SAFETY: by the contract.
            Turn::Poll => unsafe { by_poll(waits) },
        };
        if ready.count > 0 {
            busy::leave(|fd| ready.fds().any(|told| told == fd));
        }
        goes_on
    }
}

/// Whether a busy connection is to be served; if so, adds it to `ready`. The program may have taken it out of the table by hand.
///
/// # Safety
/// As [`run`].
unsafe fn takes(fd: RawFd, ready: &mut Ready) -> bool {
    // SAFETY: by the contract.
    let is_there = unsafe { lock().has(fd) };
    if is_there {
        ready.add(fd, libc::POLLIN);
    }
    is_there
}

/// How long the loop may spin, as [`busy::begin`] wants it.
fn poll_time() -> Duration {
    config::get().map_or(Duration::ZERO, |config| config.poll)
}

/// Looks at busy connections as long as it may pay. Returns false if descriptors are only to be checked in between.
///
/// # Safety
/// As [`run`].
unsafe fn look(ready: &mut Ready) -> bool {
    // SAFETY: by the contract.
    let mut taken = |fd| unsafe { takes(fd, ready) };
    let until = busy::begin(poll_time());
    let began = Instant::now();
    while let Some(until) = until {
        match busy::look(&mut taken) {
            Look::Found => return true,
            Look::Ask => return false,
            Look::Nothing => {
                let now = Instant::now();
                if now >= until || !busy::any() || !busy::pause(now - began) {
                    break;
                }
            }
        }
    }
    busy::rest(until.is_some(), &mut taken);
    true
}

/// How a turn waits for descriptors.
struct Sleep {
    /// Milliseconds, -1 for as long as it takes.
    time: c_int,
    /// It may check a few times before it sleeps.
    asks: bool,
}

impl Sleep {
    /// What `wait`, which is called with a timeout, finds. If it has failed, errno says why.
    fn find(&self, wait: impl FnMut(c_int) -> c_int) -> c_int {
        let asks = if self.asks { step(|| Ok(busy::asks(poll_time))).unwrap_or(0) } else { 0 };
        self.ask(asks, wait, |found| {
            let _ = step(|| {
                busy::asked(found);
                Ok(())
            });
        })
    }

    /// Checks `asks` times before it sleeps, and `tells` whether that has found something. It does not tell of a failure: telling
    /// takes a lock, which may change errno.
    fn ask(&self, asks: u32, mut wait: impl FnMut(c_int) -> c_int, tells: impl Fn(bool)) -> c_int {
        for _ in 0..asks {
            let found = wait(0);
            if found > 0 {
                tells(true);
            }
            if found != 0 {
                return found;
            }
            if !busy::offer() {
                break;
            }
        }
        if asks > 0 {
            tells(false);
        }
        wait(self.time)
    }
}

/// Whether the loop goes on after its sleep has failed.
fn sleeps_on(what: &str) -> bool {
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::EINTR) {
        log_warn!("svc_run ends: {what}: {error}");
        return false;
    }
    true
}

/// One turn, with epoll(7).
///
/// # Safety
/// As [`run`].
unsafe fn by_epoll(set: RawFd, sleep: Sleep, ready: &mut Ready) -> bool {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
    // SAFETY: room for that many events.
    let count = sleep.find(|time| unsafe { epoll_wait(set, events.as_mut_ptr(), MOST as c_int, time) });
    let Ok(count) = usize::try_from(count) else {
        let error = std::io::Error::last_os_error();
        if matches!(error.raw_os_error(), Some(libc::EBADF | libc::EINVAL)) {
            // The program has closed the set, and its number may be another file's.
            let _ = step(|| {
                lock().lose(Set::abandon);
                Ok(())
            });
            return true;
        }
        return sleeps_on("epoll_wait");
    };
    // The bits have the same values.
    let events = events[..count].iter().map(|event| (event.u64 as RawFd, event.events as i16));
    // SAFETY: this is the loop.
    unsafe { hand_out(events, false, ready) };
    true
}

/// One turn, where there are few transports.
///
/// # Safety
/// As [`run`].
unsafe fn by_few(sleep: Sleep, ready: &mut Ready) -> bool {
    let mut fds = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; FEW + 1];
    let copied = step(|| {
        let set = lock();
        let Some(bell) = set.bell.as_ref().filter(|_| set.polled && set.muted.is_empty()) else {
            return Ok(0);
        };
        fds[0].fd = bell.as_raw_fd();
        let mut count = 1;
        // SAFETY: this is the loop, and its lock keeps others from registering.
        for (fd, events) in unsafe { table() } {
            let Some(place) = fds.get_mut(count) else { return Ok(0) };
            *place = libc::pollfd { fd, events, revents: 0 };
            count += 1;
        }
        Ok(count)
    });
    let count = match copied {
        Ok(0) | Err(_) => return true,
        Ok(count) => count,
    };
    // SAFETY: that many entries.
    if sleep.find(|time| unsafe { poll(fds.as_mut_ptr(), count as libc::nfds_t, time) }) < 0 {
        return sleeps_on("poll");
    }
    if fds[0].revents != 0 {
        let _ = step(|| {
            lock().hear(fds[0].fd);
            Ok(())
        });
    }
    closed_first(&mut fds[1..count]);
    let events = fds[1..count].iter().filter(|entry| entry.revents != 0);
    // SAFETY: this is the loop.
    unsafe { hand_out(events.map(|entry| (entry.fd, entry.revents)), true, ready) };
    true
}

/// Takes those of the ready descriptors that are due. `polled`: some may have been taken out of the table meanwhile.
///
/// # Safety
/// As [`run`].
unsafe fn hand_out(events: impl Iterator<Item = (RawFd, i16)>, polled: bool, ready: &mut Ready) {
    let _ = step(|| {
        let mut set = lock();
        for (fd, revents) in events {
            if polled && set.find(fd).is_none() {
                continue;
            }
            // SAFETY: this is the loop.
            if unsafe { set.is_due(fd) } {
                ready.add(fd, revents);
            }
        }
        set.put_in_turn(ready);
        Ok(())
    });
}

/// One turn as libtirpc does it, with a copy of the table.
///
/// # Safety
/// As [`run`].
unsafe fn by_poll(waits: bool) -> bool {
    /// Up to this many lie on the stack: a thread that is cancelled in here then leaves nothing to free.
    const FEW: usize = 1024;
    let mut few = [const { MaybeUninit::<libc::pollfd>::uninit() }; FEW];
    let mut many: Vec<MaybeUninit<libc::pollfd>> = Vec::new();
    let copied = step(|| {
        let _set = lock();
        // SAFETY: this is the loop, and its lock keeps others from registering.
        let count = unsafe { table() }.count();
        let fds = if count <= FEW {
            &mut few[..count]
        } else if many.try_reserve_exact(count).is_ok() {
            many.resize(count, MaybeUninit::uninit());
            &mut many[..]
        } else {
            // As many as there is room for, until there is memory.
            &mut few[..]
        };
        let mut copied = 0;
        // SAFETY: as above.
        for (place, (fd, events)) in fds.iter_mut().zip(unsafe { table() }) {
            place.write(libc::pollfd { fd, events, revents: 0 });
            copied += 1;
        }
        Ok((fds.as_mut_ptr().cast::<libc::pollfd>(), copied))
    });
    let Ok((fds, count)) = copied else { return true };
    // SAFETY: that many entries, all written.
    let ready = unsafe { poll(fds, count as libc::nfds_t, if waits { AGAIN } else { 0 }) };
    if ready < 0 {
        return sleeps_on("poll");
    }
    if ready > 0 {
        // SAFETY: as above.
        let found = closed_first(unsafe { std::slice::from_raw_parts_mut(fds, count) });
        // SAFETY: as above.
        unsafe { getreq_poll(fds, found) };
    }
    true
}

/// If poll(2) has found descriptors that were closed by hand, keeps only those: they leave the table before a listener gets
/// another connection with the same number. Returns how many are left.
fn closed_first(fds: &mut [libc::pollfd]) -> c_int {
    if fds.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        fds.iter_mut().for_each(|entry| entry.revents &= libc::POLLNVAL);
    }
    fds.iter().filter(|entry| entry.revents != 0).count() as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_the_number_of_a_bell_that_the_program_has_closed_is_not_read() {
        let mut set = Set { generation: fork::generation(), ..Set::default() };
        set.own().unwrap();
        let rings = |bell: RawFd| wait::until(bell, wait::IN, Some(Duration::ZERO), None).unwrap();
        let bell = set.bell.as_ref().unwrap().as_raw_fd();
        crate::process::write_quietly(bell, &ONE.to_ne_bytes()).unwrap();
        set.hear(bell);
        // Nothing is registered here, so the loop has ended: the bell rings on for others.
        assert!(set.epoll.is_some() && rings(bell));
        wait::silence(set.bell.as_ref().unwrap());
        set.hear(bell);
        assert!(set.epoll.is_some(), "another loop has heard it");
        let other = wait::bell().unwrap();
        crate::process::write_quietly(other.as_raw_fd(), &ONE.to_ne_bytes()).unwrap();
        crate::process::replace(bell, other, true).unwrap();
        set.hear(bell);
        assert!(set.epoll.is_none() && rings(bell), "it is not read");
        crate::socket::close(bell);
    }

    #[test]
    fn a_wait_that_has_failed_leaves_errno_as_it_was() {
        // SAFETY: takes nothing.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the calling thread's own, for as long as it lives; nobody holds another reference.
        let errno = || unsafe { &mut *place };
        let sleep = Sleep { time: -1, asks: true };
        for fails_at in 1..=3 {
            let mut waits = 0;
            let wait = |time: c_int| {
                waits += 1;
                // However often it asks on this machine, the sleep itself fails.
                if waits < fails_at && time == 0 {
                    return 0;
                }
                *errno() = if time == 0 { libc::EINTR } else { libc::EBADF };
                -1
            };
            let found = sleep.ask(2, wait, |_| *errno() = libc::EAGAIN);
            assert!(
                found == -1 && [libc::EINTR, libc::EBADF].contains(errno()),
                "at {fails_at}: {}",
                errno()
            );
        }
        let told = Cell::new(None);
        assert_eq!(sleep.ask(2, |_| 3, |found| told.set(Some(found))), 3);
        assert_eq!(told.get(), Some(true));
    }

    #[test]
    fn what_a_thread_serves_stays_its_own_when_the_set_is_made_anew() {
        let generation = fork::generation();
        let mut set = Set { generation, muted: FxHashMap::from_iter([(9998, 1)]), ..Set::default() };
        set.own().unwrap();
        // SAFETY: nothing is registered here.
        assert!(!unsafe { set.is_due(9999) }, "one that is not known: closed by hand");
        assert!(set.epoll.is_none());
        set.own().unwrap();
        assert!(set.epoll.is_some() && set.muted.contains_key(&9998));
        set.close();
    }
}
