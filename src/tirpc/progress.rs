//! What wakes the program's loop besides a readable connection: one transport of ours whose descriptor is an epoll set.
//!
//! It is registered only while a connection has unsent bytes or a startup under way, or there is an errand: programs made
//! by rpcgen count the registered descriptors to find out whether they are idle.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::driver::service_loop::PROGRAM;
use crate::driver::{self, Shared, Wait, send_rest};
use crate::error::Error;
use crate::ffi::{Uncancelled, guard, guard_passing_in_steps, step};
use crate::reserve::as_many_as_fit;
use crate::tirpc::bare::{LISTENING, bare};
use crate::tirpc::{
    SVCXPRT, bool_t, nothing_is_registered, rpc_msg, xp_ops, xprt_register_beside, xprt_unregister,
};
use crate::wait::WakeSet;
use crate::{fork, log_warn, memory, process, stats, wait};

/// How long an entry that was looked at and is still late is left alone.
const LATER: Duration = Duration::from_millis(10);

struct Progress {
    /// Made at first use.
    set: Option<WakeSet>,
    /// The process that made it, or last renewed it.
    generation: u64,
    /// A tree: it takes small blocks, which the memory reserve can supply too.
    entries: BTreeMap<RawFd, Entry>,
    /// The deadlines of those entries that have one.
    deadlines: BTreeSet<(Instant, RawFd)>,
    /// Entries that hold memory that others may wait for, and how many entries wait.
    holding: BTreeSet<RawFd>,
    waiting: usize,
    /// How many entries wake the loop.
    waking: usize,
    /// When the alarm goes off.
    armed: Option<Instant>,
    /// The functions of the errands, once somebody has asked for them.
    errands: Errands,
    xprt: *mut SVCXPRT,
}

/// The transport whose set libtirpc's loop polls. A signal handler may call svc_exit(3), with which libtirpc forgets it.
static REGISTERED: AtomicPtr<SVCXPRT> = AtomicPtr::new(null_mut());

// SAFETY: the bare transport's memory is ours and lives for ever; the table is used under its lock only.
unsafe impl Send for Progress {}

struct Entry {
    who: Weak<dyn Watched>,
    wants: Wants,
}

/// A transport that the program's loop is woken for: a connection of ours, or what may become one.
pub trait Watched: Send + Sync {
    /// Makes what progress is possible; destroys what took too long. `crowded`: others wait for memory that it may hold.
    fn wake(&self, crowded: bool);

    /// The connection, if this process has accepted it.
    fn accepted(&self) -> Option<&Arc<Shared>> {
        None
    }

    /// Since when nothing has happened; `None` while a request of either end is under way.
    fn idle_since(&self) -> Option<Instant>;

    /// What libtirpc knows it by.
    fn xprt(&self) -> *mut SVCXPRT;
}

/// What a connection waits for besides being readable.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Wants {
    pub write: bool,
    pub deadline: Option<Instant>,
    /// Its RDMA Reads hold memory. By itself this wakes nobody.
    pub pulling: bool,
    /// Since when it waits for memory that others hold.
    pub memory: Option<Instant>,
    /// Since when its peer has taken nothing of what waits to be sent to it.
    pub stands: Option<Instant>,
}

impl Wants {
    fn wakes(&self) -> bool {
        self.write || self.deadline.is_some()
    }

    fn holds(&self) -> bool {
        self.pulling || self.stands.is_some()
    }
}

/// Something that the loop does once, in its next turn or later. Each is kept under a number of its own, in place of a
/// descriptor.
#[derive(Clone, Copy)]
pub enum Errand {
    /// Listeners on adapters are to be opened or ended.
    Adapters,
    /// The same for those beside datagram transports.
    Beside,
    /// There are requests that were left for the loop.
    Left,
    /// A routine may be running a loop that does not know of all requests ([`crate::tirpc::left`]).
    Inside,
    /// Long Calls are to be pulled that nobody else may attend to.
    Pulls,
    /// Pages that were kept for long messages are to be given back.
    Pages,
}

/// Indexed by [`Errand`].
type Errands = [Option<fn()>; 6];

impl Errand {
    fn key(self) -> RawFd {
        -1 - self as RawFd
    }
}

/// Has the loop call `what` at `time`, replacing any earlier or later time that this errand had. No guard is in force during that
/// call.
pub fn call_at(errand: Errand, time: Instant, what: fn()) {
    table().errands[errand as usize] = Some(what);
    again(errand, time);
}

/// The same with the function that was given last. Does nothing if there was none.
pub fn again(errand: Errand, time: Instant) {
    if table().errands[errand as usize].is_some() {
        want(errand.key(), Wants { deadline: Some(time), ..Wants::default() }, nobody);
    }
}

/// When the loop looks at kept pages, by [`stats::tick`]; 0: it will not.
static COOLS: AtomicU64 = AtomicU64::new(0);

/// Sees to it that memory kept for a series of messages is given back when none has come for a while, even if nothing else
/// happens. Called by whoever may have put back such memory: the loop before it sleeps, and what serves beside it.
#[inline]
pub fn cool_down() {
    if driver::is_warm() {
        cool_in_time();
    }
}

#[cold]
fn cool_in_time() {
    /// An errand this late was lost, with a loop that the program has left or with the process that this one was forked from.
    const LOST: u64 = 10_000_000_000;
    let (now, at) = (stats::tick(), COOLS.load(Relaxed));
    if at == 0 || now > at + LOST {
        cool_later(memory::SERIES);
    }
}

fn cool_later(time: Duration) {
    COOLS.store(stats::tick() + time.as_nanos() as u64, Relaxed);
    call_at(Errand::Pages, Instant::now() + time, || {
        guard(|| {
            COOLS.store(0, Relaxed);
            if let Some(time) = driver::cool() {
                cool_later(time);
            }
            Ok(())
        });
    });
}

/// The `who` of an errand, and of what wants nothing.
fn nobody() -> Weak<dyn Watched> {
    enum Nobody {}
    impl Watched for Nobody {
        fn wake(&self, _: bool) {
            match *self {}
        }
        fn idle_since(&self) -> Option<Instant> {
            match *self {}
        }
        fn xprt(&self) -> *mut SVCXPRT {
            match *self {}
        }
    }
    Weak::<Nobody>::new()
}

static WAKE: xp_ops = xp_ops { xp_recv: Some(wake), ..LISTENING };

static TABLE: fork::Lock<Progress> = fork::Lock::new();

/// The descriptor that the loop polls for all of this; -1 before there is anything.
pub fn fd() -> RawFd {
    table().set.as_ref().map_or(-1, WakeSet::fd)
}

fn table() -> MutexGuard<'static, Progress> {
    TABLE.lock()
}

impl Default for Progress {
    fn default() -> Progress {
        Progress {
            set: None,
            generation: 0,
            entries: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            holding: BTreeSet::new(),
            waiting: 0,
            waking: 0,
            armed: None,
            errands: Errands::default(),
            xprt: null_mut(),
        }
    }
}

/// Says what connection `fd` waits for besides being readable, and `who` that is.
pub fn want(fd: RawFd, wants: Wants, who: impl FnOnce() -> Weak<dyn Watched>) {
    // The common case costs one lock and one look-up.
    let mut table = table();
    let before = table.entries.get(&fd).map(|e| e.wants).unwrap_or_default();
    if before == wants {
        return;
    }
    table.note(fd, wants, who);
    if wants.stands.is_some() {
        send_at_exit();
    }
    if (before.wakes() || wants.wakes())
        && let Err(error) = table.update(fd, before.write, wants.write)
    {
        log_warn!("fd {fd}: cannot be watched: {error}");
    }
}

/// svc_exit(3): libtirpc has forgotten all that was registered.
pub fn all_is_forgotten() {
    REGISTERED.store(null_mut(), Relaxed);
}

/// Whether the loop will get to what is due.
pub fn is_polled() -> bool {
    !REGISTERED.load(Relaxed).is_null()
}

/// The program enters libtirpc's loop, perhaps once more.
pub fn enter_loop() {
    let mut table = table();
    let is_inherited = table.set.is_some() && table.generation != fork::generation();
    if (table.waking > 0 && !table.is_registered() || is_inherited)
        && let Err(error) = table.settle(false)
    {
        log_warn!("what waits for time or memory may wait longer: {error}");
    }
}

/// libtirpc's loop has ended, and forgotten all that was registered.
pub fn left_loop() {
    all_is_forgotten();
    finish();
}

/// Sends what waits to be sent, now that the program has left its loop or is ending: nobody else would.
pub fn finish() {
    // exit(3) may have been called in the middle of anything, even while this lock is held.
    let mut tries = 100;
    let table = loop {
        match TABLE.try_lock() {
            Some(table) => break table,
            None if tries > 0 => tries -= 1,
            None => return,
        }
        let _ = wait::poll(&mut [], Some(Duration::from_millis(1)), None);
    };
    let waits = table.entries.values().filter(|entry| entry.wants.stands.is_some());
    let waits = as_many_as_fit(waits.map(|entry| entry.who.clone()));
    // A transport that ends here takes the lock.
    drop(table);
    let waits = as_many_as_fit(waits.iter().filter_map(Weak::upgrade));
    let servers = as_many_as_fit(waits.iter().filter_map(|own| own.accepted().cloned()));
    send_rest(&servers, Wait::END);
}

/// Has exit(3) call [`finish`].
fn send_at_exit() {
    extern "C" fn exits() {
        guard(|| {
            finish();
            Ok(())
        });
    }
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Relaxed)
        && let Err(error) = process::at_exit(exits)
    {
        log_warn!("what waits for slow peers will be lost at the end of the process: {error}");
    }
}

/// The connection is gone. Called before its descriptor is closed.
pub fn forget(fd: RawFd) {
    want(fd, Wants::default(), nobody);
}

fn is_gone(fd: RawFd) -> bool {
    table().entries.get(&fd).is_some_and(|e| e.who.strong_count() == 0)
}

impl Progress {
    fn note(&mut self, fd: RawFd, wants: Wants, who: impl FnOnce() -> Weak<dyn Watched>) {
        let before = if wants == Wants::default() {
            self.entries.remove(&fd)
        } else {
            self.entries.insert(fd, Entry { who: who(), wants })
        };
        if let Some(Entry { wants, .. }) = before {
            wants.deadline.map(|at| self.deadlines.remove(&(at, fd)));
            self.holding.remove(&fd);
            self.waiting -= usize::from(wants.memory.is_some());
            self.waking -= usize::from(wants.wakes());
        }
        wants.deadline.map(|at| self.deadlines.insert((at, fd)));
        if wants.holds() {
            self.holding.insert(fd);
        }
        self.waiting += usize::from(wants.memory.is_some());
        self.waking += usize::from(wants.wakes());
    }

    /// What is to be looked at: what can be written, what is late and, while some wait for memory, what holds it, starting with
    /// those whose peers have taken nothing for longest; then those that wait for memory, the oldest first. If there is no memory
    /// for all of them, some are returned, and the others when these have had their turn.
    fn due(&self, now: Instant) -> Vec<(RawFd, Weak<dyn Watched>)> {
        let writable = self.set.iter().flat_map(WakeSet::ready).map(|key| key as RawFd);
        let late = self.deadlines.range(..=(now, RawFd::MAX)).map(|(_, fd)| *fd);
        let holding = self.holding.iter().filter(|_| self.waiting > 0).copied();
        let mut due = as_many_as_fit(writable.chain(late).chain(holding));
        due.sort_unstable();
        due.dedup();
        let entries = due.into_iter().filter_map(|fd| Some((fd, self.entries.get(&fd)?)));
        let mut due = as_many_as_fit(entries);
        // A stable sort would ask for memory.
        due.sort_unstable_by_key(|(fd, e)| (e.wants.memory, e.wants.stands.is_none(), e.wants.stands, *fd));
        as_many_as_fit(due.into_iter().map(|(fd, e)| (fd, e.who.clone())))
    }

    /// Sets the alarm to the first deadline. `looked`: all that is late has been looked at, and is left alone for a while.
    fn arm(&mut self, looked: bool) -> Result<(), Error> {
        let now = Instant::now();
        let first =
            self.deadlines.first().map(|(at, _)| if looked && *at <= now { now + LATER } else { *at });
        // An alarm that is over but still recorded here was consumed by another process that shared it: it is set again.
        if (first != self.armed || first.is_some_and(|at| at <= now))
            && let Some(set) = &self.set
        {
            set.alarm(first.map(|at| at.saturating_duration_since(now)))?;
            self.armed = first;
        }
        Ok(())
    }

    /// Takes the first errand that is due out of the table; whatever else is late is left alone for a while.
    fn take_errand(&mut self, now: Instant) -> Option<fn()> {
        let mut late = self.deadlines.range(..=(now, RawFd::MAX)).map(|(_, key)| *key);
        let key = late.find(|key| *key < 0);
        if let Some(key) = key {
            self.note(key, Wants::default(), nobody);
        }
        if let Err(error) = self.settle(true) {
            log_warn!("what waits for time or memory may wait longer: {error}");
        }
        let index = key.and_then(|key| usize::try_from(-1 - key).ok());
        index.and_then(|index| *self.errands.get(index)?)
    }

    /// Makes sure that this process has a set of its own. Returns true if the set is a fresh one, which then knows every entry:
    /// one that cannot be watched does not affect the others.
    fn own_set(&mut self) -> Result<bool, Error> {
        let generation = fork::generation();
        match &mut self.set {
            // In a forked child the set still belongs to the parent as well: the child gets one of its own.
            Some(set) if self.generation != generation => {
                let before = set.fd();
                set.renew()?;
                let fd = set.fd();
                if fd != before && self.is_registered() {
                    REGISTERED.store(null_mut(), Relaxed);
                    // This affects only the table of this process.
                    // SAFETY: registered before.
                    unsafe { xprt_unregister(self.xprt) };
                }
                if fd != before && !self.xprt.is_null() {
                    // SAFETY: it lives for ever; in no table any more.
                    unsafe { (*self.xprt).xp_fd = fd };
                }
            }
            Some(_) => return Ok(false),
            None => self.set = Some(WakeSet::new()?),
        }
        self.generation = generation;
        self.armed = None;
        for fd in self.entries.iter().filter(|(_, e)| e.wants.write).map(|(fd, _)| *fd) {
            if let Some(set) = &self.set
                && let Err(error) = set.watch_writable(fd, true)
            {
                log_warn!("fd {fd}: cannot be watched: {error}");
            }
        }
        Ok(true)
    }

    fn update(&mut self, fd: RawFd, before: bool, now: bool) -> Result<(), Error> {
        if !self.own_set()?
            && before != now
            && let Some(set) = &self.set
            && let Err(error) = set.watch_writable(fd, now)
        {
            log_warn!("fd {fd}: cannot be watched: {error}");
        }
        self.settle(false)
    }

    /// Sets the alarm, as [`Progress::arm`] does, and has the loop poll for it if there is something to wait for.
    fn settle(&mut self, looked: bool) -> Result<(), Error> {
        self.own_set()?;
        self.arm(looked)?;
        self.set.as_ref().map(WakeSet::fd).map_or(Ok(()), |fd| self.register(fd))
    }

    /// False if the table is a forked child's own and the registered transport is one inherited from its parent.
    fn is_registered(&self) -> bool {
        !self.xprt.is_null() && REGISTERED.load(Relaxed) == self.xprt
    }

    fn register(&mut self, fd: RawFd) -> Result<(), Error> {
        // After svc_exit(3) a registration would make svc_run go on, with this one transport.
        let wanted = self.waking > 0 && !nothing_is_registered();
        if wanted == self.is_registered() {
            return Ok(());
        }
        if self.xprt.is_null() {
            self.xprt = bare(fd, &WAKE);
        }
        REGISTERED.store(if wanted { self.xprt } else { null_mut() }, Relaxed);
        if wanted {
            // SAFETY: complete.
            if !unsafe { xprt_register_beside(self.xprt) }? {
                all_is_forgotten();
            }
        } else {
            // SAFETY: registered before.
            unsafe { xprt_unregister(self.xprt) };
        }
        Ok(())
    }
}

/// Makes what progress is possible; destroys what took too long; does the errands that are due.
unsafe extern "C-unwind" fn wake(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> bool_t {
    guard_passing_in_steps(|| {
        let now = Instant::now();
        let mut errand = step(|| {
            let _uncancelled = Uncancelled::now();
            // Whatever an errand serves is called from deeper in the stack.
            PROGRAM.dispatches(message.addr());
            move_on(xprt, now)
        })?;
        // An errand may run the program, which may not return: the remaining ones stay in the table meanwhile.
        while let Some(what) = errand {
            what();
            errand = step(|| Ok(table().take_errand(now)))?;
        }
        Ok(0)
    })
}

/// What [`wake`] does itself. Returns the first errand that is due.
fn move_on(xprt: *mut SVCXPRT, now: Instant) -> Result<Option<fn()>, Error> {
    let (crowded, due) = {
        let mut table = table();
        if table.xprt != xprt {
            // It is the transport of a parent whose table was taken at the fork: what makes it readable is not for this process.
            // SAFETY: registered; it lives for ever.
            unsafe { xprt_unregister(xprt) };
            return Ok(None);
        }
        // A child leaves its parent's alarm alone, if it can have its own.
        if !table.own_set().unwrap_or(false)
            && let Some(set) = &table.set
        {
            set.silence();
        }
        table.armed = None;
        (table.waiting > 0, table.due(now))
    };
    for (fd, who) in due.into_iter().filter(|(fd, _)| *fd >= 0) {
        match who.upgrade() {
            Some(who) => who.wake(crowded),
            // Unless another one has its number by now.
            None if is_gone(fd) => forget(fd),
            None => {}
        }
    }
    Ok(table().take_errand(now))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn after_a_fork_one_that_cannot_be_watched_leaves_no_other_unwatched() {
        let streams: Vec<UnixStream> =
            (0..16).map(|_| UnixStream::pair().unwrap()).flat_map(|(one, other)| [one, other]).collect();
        let wants = Wants { write: true, ..Wants::default() };
        let numbers = streams.iter().map(AsRawFd::as_raw_fd).chain([RawFd::MAX]);
        let mut progress = Progress {
            set: Some(WakeSet::new().unwrap()),
            generation: fork::generation() + 1,
            ..Progress::default()
        };
        numbers.for_each(|fd| progress.note(fd, wants, nobody));
        assert!(progress.own_set().unwrap());
        let set = progress.set.as_ref().unwrap();
        for stream in &streams {
            // It cannot be added a second time.
            let added = set.watch_writable(stream.as_raw_fd(), true);
            assert_eq!(added.unwrap_err().raw_os_error(), Some(libc::EEXIST));
        }
        assert!(!progress.own_set().unwrap());
    }

    #[test]
    fn an_errand_that_does_not_return_leaves_the_others_in_the_table() {
        let now = Instant::now();
        let mut progress = Progress { set: Some(WakeSet::new().unwrap()), ..Progress::default() };
        progress.generation = fork::generation();
        for errand in [Errand::Left, Errand::Inside, Errand::Pages] {
            progress.errands[errand as usize] = Some(|| {});
            let deadline = Some(if matches!(errand, Errand::Pages) { now + LATER * 100 } else { now });
            progress.note(errand.key(), Wants { deadline, ..Wants::default() }, nobody);
        }
        assert!(progress.take_errand(now).is_some());
        // What is late is looked at again soon.
        let armed = progress.armed.unwrap();
        assert_eq!((progress.waking, armed < Instant::now() + LATER), (2, true));
        assert!(progress.take_errand(now).is_some() && progress.take_errand(now).is_none());
        assert_eq!(progress.waking, 1);
    }

    #[test]
    fn tables_of_thousands_of_connections_need_no_block_that_the_reserve_does_not_have() {
        let now = Instant::now();
        let wants = |late: bool| Wants {
            deadline: Some(if late { now } else { now + Duration::from_secs(60) }),
            memory: Some(now),
            ..Wants::default()
        };
        let _none = crate::reserve::testing::NoLongBlocks::from_here();
        let mut progress = Progress::default();
        for fd in 0..5000 {
            progress.note(fd, wants(fd % 2 == 0), nobody);
        }
        // All have their turn in the end.
        let mut looked = 0;
        loop {
            let due = progress.due(now);
            let Some((last, _)) = due.last() else { break };
            assert!(*last % 2 == 0 && due.len() <= 2500);
            looked += due.len();
            due.iter().for_each(|(fd, _)| progress.note(*fd, Wants::default(), nobody));
        }
        assert_eq!((looked, progress.entries.len(), progress.waiting), (2500, 2500, 2500));
    }

    #[test]
    fn a_child_that_is_forked_while_the_table_is_taken_is_woken_for_its_parent_once_at_most() {
        use crate::fork::testing::fork;
        use crate::tirpc::{library, polled, xprt_register};
        // What is registered here is not for other tests.
        let parent = fork(|| {
            let listener = UnixStream::pair().unwrap();
            // SAFETY: complete.
            unsafe { xprt_register(bare(listener.0.as_raw_fd(), &LISTENING)) }.unwrap();
            call_at(Errand::Left, Instant::now(), || {});
            let parents = fd();
            let table = TABLE.lock();
            let child = || {
                // SAFETY: the child has one thread.
                let is_polled = || unsafe { polled() }.any(|fd| fd == parents);
                let before = is_polled() && wait::until(parents, wait::IN, None, None).unwrap();
                call_at(Errand::Left, Instant::now() + Duration::from_secs(60), || {});
                // SAFETY: as the child's loop does when it finds the descriptor readable.
                unsafe { (library().unwrap().svc_getreq_common)(parents) };
                // SAFETY: as above.
                let own = unsafe { polled() }.any(|polled| polled == fd());
                before && own && !is_polled()
            };
            let succeeded =
                std::thread::scope(|scope| scope.spawn(|| fork(child).succeeded()).join().unwrap());
            drop(table);
            succeeded
        });
        assert!(parent.succeeded());
    }
}
