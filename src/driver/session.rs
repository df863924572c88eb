//! One place to wait. **Whoever waits for something on a connection does the connection's work**: one thread drives it, which
//! means that it spins, sleeps in poll(2) and moves what has come. The others sleep until it wakes them, because what they
//! wait for is there or because nobody drives any more.
//!
//! Whose turn it is, what a thread does beside waiting, and what there is to do when something has come, is up to the
//! [`Policy`] of each kind of connection: that of the end that opened it (`client`), which serves calls back meanwhile, and
//! that of a thread that calls back (`reverse`), which must not take what the program's service loop sleeps for. The loop
//! itself waits in the program; before that it spins here (`server`).
//!
//! No lock is held while a thread sleeps.
#![forbid(unsafe_code)]

use crate::thread;
use crate::wire::Xid;
use std::io::ErrorKind;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::connection::RequestId;
use crate::error::{Error, Kind};
use crate::memory::{Message, Payload};
use crate::provider::{Doze, NAP, NAP_BYTES};
use crate::socket;
use crate::stats::layout::Slot;
use crate::stats::{self, Counter};
use crate::sync::{Condvar, MutexGuard};
use crate::wait::{self, PollFd};

use super::Mask;
use super::backlog::{Progress, Wait};
use super::calls::{Calls, Waiter};
use super::link::{Link, Outcome};
use super::spin::{Beside, Patience, Spin, Waiting};

/// How often a child checks whether its peer takes what it sends, where the descriptor tells that to its parent; and how often
/// a thread that makes a new connection checks whether anybody still reads from the old one.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// How long a new connection waits for threads that poll the old one, whose end wakes them: longer than a busy machine keeps them
/// from it.
const LEAVING: Duration = Duration::from_secs(1);

/// How long, over a whole wait, a thread may sleep without watching its descriptors, and with signals blocked as in all of
/// libtirpc's calls: to let them through takes two more system calls.
const DOZE: Duration = Duration::from_millis(10);

/// A thread that has less time than this does not sleep on the stream: the kernel counts the time in ticks of up to 10 ms, and
/// lets one more pass.
const NAP_SPARE: Duration = NAP.saturating_mul(2);

/// When a peer that has not answered the first call is nudged: Linux's siw may overlook what comes right after its answer to
/// the startup until more comes.
const NUDGE_AFTER: Duration = Duration::from_millis(100);

/// The threads that wait on one connection, and which of them drive it.
pub(super) struct Session {
    pub(super) calls: Calls,
    /// Threads that sleep until they are woken, each on its own condition.
    sleepers: FxHashMap<Waiter, Arc<Condvar>>,
    /// The one of these that may have to serve a request in the midst of its own, which nobody else would do.
    serving_sleeper: Option<Arc<Condvar>>,
    /// The threads that poll the connection: one, except as [`Session::may_drive`] says.
    drivers: Vec<Driver>,
    /// Those that were in poll(2), or about to be, when the connection was given up, each by its thread; and when that was. A
    /// descriptor number that becomes another socket's before they are there keeps them asleep.
    leavers: Vec<usize>,
    left: Option<Instant>,
    /// How many threads sleep on the stream itself, or are about to: they read from whatever file has its descriptor number
    /// then.
    naps: usize,
    /// Somebody waits for the end of these sleeps.
    pub(super) naps_awaited: bool,
    /// What one of these threads reads into. Its stack is the program's, and may be a short one.
    nap: Vec<u8>,
    spin: Spin,
}

/// A thread that polls the connection.
struct Driver {
    thread: usize,
    /// It will wake when something comes.
    reads: bool,
    /// It will wake when the descriptor takes bytes.
    writes: bool,
    /// It is in poll(2), or about to be.
    polls: bool,
}

impl Session {
    /// `poll`: see [`Spin::new`].
    pub(super) fn new(poll: Duration) -> Session {
        Session {
            calls: Calls::new(),
            sleepers: FxHashMap::default(),
            serving_sleeper: None,
            drivers: Vec::new(),
            leavers: Vec::new(),
            left: None,
            naps: 0,
            naps_awaited: false,
            nap: Vec::new(),
            spin: Spin::new(poll),
        }
    }

    /// Begins anew in a forked child: the threads that wait are its parent's.
    pub(super) fn inherit(&mut self) {
        (self.calls, self.serving_sleeper) = (Calls::new(), None);
        self.sleepers.clear();
        self.drivers.clear();
        self.leavers.clear();
        self.naps = 0;
    }

    /// Whether the descriptor number of the connection's socket must not become another file's now: a thread is about to read
    /// from it, with no lock held.
    pub(super) fn naps(&self) -> bool {
        self.naps > 0
    }

    /// The same for threads that are about to poll it. This thread, in whose sleep a signal handler makes a call, does not count:
    /// it cannot go on before the handler ends. Nor do those that do not come back in time: a signal handler may have jumped.
    pub(super) fn is_polled(&self) -> bool {
        let (own, left) = (thread::this(), self.left);
        self.leavers.iter().any(|thread| *thread != own) && left.is_some_and(|left| left.elapsed() < LEAVING)
    }

    /// Hands outcomes to their waiters.
    pub(super) fn settle(&mut self, link: &mut Link) {
        if !link.done.is_empty() {
            self.end(&mut link.done);
        }
        if let Some(condition) = &self.serving_sleeper
            && link.request_ready()
        {
            condition.notify_one();
        }
        if !self.calls.requests.is_empty() {
            self.calls.requests.settle(link);
            for (waiter, condition) in &self.sleepers {
                if matches!(waiter, Waiter::Peer(number) if self.calls.requests.is_over(*number)) {
                    condition.notify_one();
                }
            }
        }
    }

    /// Hands outcomes to their waiters.
    fn end(&mut self, done: &mut Vec<Outcome>) {
        // As nearly always, this thread's own.
        if self.sleepers.is_empty() && self.calls.take_all(done) {
            return;
        }
        for (xid, outcome) in done.drain(..) {
            if self.calls.end(xid, outcome)
                && let Some(condition) = self.sleepers.get(&Waiter::Call(xid))
            {
                condition.notify_one();
            }
        }
    }

    /// Whether the program wants waits to spin at all.
    pub(super) fn may_spin(&self) -> bool {
        self.spin.is_on()
    }

    /// How many threads sleep beside the driver.
    pub(super) fn sleeping(&self) -> usize {
        self.sleepers.len()
    }

    /// Whether nobody waits on the connection.
    pub(super) fn is_unattended(&self) -> bool {
        self.drivers.is_empty() && self.sleepers.is_empty()
    }

    /// Whether anybody polls the connection.
    pub(super) fn is_driven(&self) -> bool {
        !self.drivers.is_empty()
    }

    /// Whether another thread sleeps until something comes. If this thread took that, the other one would sleep on.
    pub(super) fn another_reads(&self) -> bool {
        self.drivers.iter().any(|driver| driver.reads && driver.thread != thread::this())
    }

    /// Whether somebody has to poll the connection, or to see to what it could not send at once.
    pub(super) fn lacks_driver(&self, link: &Link) -> bool {
        self.drivers.is_empty()
            || (link.device.wants_write() && !self.drivers.iter().any(|driver| driver.writes))
    }

    /// Whether this thread may poll the connection.
    ///
    /// Beside another driver it does so in two cases. The other one sleeps until something comes, and there is something to
    /// send by now. Or the other one is this very thread, in whose sleep a signal handler makes a call: it cannot go on before
    /// the handler ends.
    pub(super) fn may_drive(&self, link: &Link) -> bool {
        self.lacks_driver(link) || self.own_driver().is_some()
    }

    /// This thread's latest entry among the drivers.
    fn own_driver(&self) -> Option<usize> {
        let thread = thread::this();
        self.drivers.iter().rposition(|driver| driver.thread == thread)
    }

    fn begin_to_drive(&mut self) {
        self.drivers.push(Driver { thread: thread::this(), reads: true, writes: false, polls: false });
    }

    /// This thread, which drives, goes to sleep. If it was spinning while the connection was replaced, it was forgotten with
    /// the old connection, and sleeps on the new one.
    fn sleeps_for(&mut self, reads: bool, writes: bool) {
        let driver = Driver { thread: thread::this(), reads, writes, polls: false };
        match self.own_driver() {
            Some(own) => self.drivers[own] = driver,
            None => self.drivers.push(driver),
        }
    }

    /// Whether this thread, which drives, is the only one that does.
    fn drives_alone(&self) -> bool {
        matches!(&self.drivers[..], [only] if only.thread == thread::this())
    }

    /// As if a thread slept in poll(2) already.
    #[cfg(test)]
    pub(super) fn drive_as(&mut self, thread: usize) {
        self.drivers.push(Driver { thread, reads: true, writes: thread == thread::this(), polls: false });
    }

    /// As if a thread were about to sleep on the stream, or had done so.
    #[cfg(test)]
    pub(super) fn nap_as(&mut self, naps: bool) {
        self.naps = if naps { self.naps + 1 } else { self.naps - 1 };
    }

    /// As if a thread were about to poll the connection that was given up last, however long ago, or had done so.
    #[cfg(test)]
    pub(super) fn leave_as(&mut self, polls: bool) {
        self.left = Some(Instant::now() + Duration::from_secs(3600));
        if polls { self.leavers.push(usize::MAX) } else { self.leavers.clear() }
    }

    /// As if so many threads slept that one more needs a longer block of memory than the reserve has.
    #[cfg(test)]
    pub(super) fn fill_sleepers(&mut self) {
        for thread in 0.. {
            if self.sleepers.capacity() >= 1000 && self.sleepers.len() == self.sleepers.capacity() {
                break;
            }
            self.sleepers.insert(Waiter::Version(thread), Arc::new(Condvar::new()));
        }
    }

    fn end_to_drive(&mut self) {
        if let Some(driver) = self.own_driver() {
            self.drivers.remove(driver);
        }
    }

    /// This thread, which drives, is about to poll.
    fn begins_to_poll(&mut self) {
        if let Some(own) = self.own_driver() {
            self.drivers[own].polls = true;
        }
    }

    /// It has polled. The connection may have been given up meanwhile.
    fn has_polled(&mut self) {
        let own = thread::this();
        match self.own_driver() {
            Some(at) if self.drivers[at].polls => self.drivers[at].polls = false,
            _ => {
                let left = self.leavers.iter().rposition(|thread| *thread == own);
                left.map(|at| self.leavers.remove(at));
            }
        }
    }

    /// Forgets those who drive: they poll a descriptor that is of no use any more. `ended`: the end of the connection wakes them.
    pub(super) fn forget_drivers(&mut self, ended: bool) {
        let polling = self.drivers.drain(..).filter(|driver| driver.polls && ended);
        self.leavers.extend(polling.map(|driver| driver.thread));
        self.left = Some(Instant::now());
    }

    /// There is a new connection: whoever has not left the old one by now is not waited for again.
    pub(super) fn forget_leavers(&mut self) {
        self.leavers.clear();
    }

    /// Whether a thread is in poll(2), or about to be.
    #[cfg(test)]
    pub(super) fn polls(&self) -> bool {
        self.drivers.iter().any(|driver| driver.polls)
    }

    /// How many threads were polling when the connection was given up, and have not come back.
    #[cfg(test)]
    pub(super) fn leavers(&self) -> usize {
        self.leavers.len()
    }

    /// Wakes one of those who sleep without an outcome. Returns false when there is none.
    pub(super) fn wake_one(&self) -> bool {
        let sleeper = self.sleepers.iter().find(|(waiter, _)| !self.calls.is_over(**waiter));
        let sleeper = sleeper.map(|(_, condition)| condition);
        sleeper.map(|condition| condition.notify_one()).is_some()
    }

    /// Makes every thread look again at what it waits for.
    pub(super) fn wake_all(&self) {
        self.sleepers.values().for_each(|condition| condition.notify_one());
    }

    /// How a call has ended. A call that has not ended is abandoned, for its time is over.
    pub(super) fn outcome(&mut self, link: Option<&mut Link>, xid: Xid) -> Result<Payload, Error> {
        if let Some(outcome) = self.calls.take(xid) {
            return outcome;
        }
        let text = link.map(|link| {
            let text = link.why_no_reply(xid);
            link.shown.add(Slot::Errors, 1);
            link.abandon(xid);
            // A peer that did not answer this call keeps the credits of the greetings too.
            self.calls.greetings.drain(..).for_each(|greeting| link.abandon(greeting));
            self.settle(link);
            text
        });
        stats::add(Counter::Orphans, 1);
        Err(Error::new(Kind::Timeout, text.unwrap_or_else(|| "the connection was closed".to_owned())))
    }
}

/// What is behind the lock of a connection.
pub(super) trait State {
    /// Who waits on it, and the link, if there is one: it may be closed.
    fn parts(&mut self) -> (&mut Session, Option<&mut Link>);

    /// Something has moved: what there is to watch may have changed.
    fn moved(&mut self) {}

    /// Moves everything that can move without waiting.
    fn pump(&mut self) {
        if let (_, Some(link)) = self.parts() {
            link.pump();
            self.settle();
        }
    }

    /// Goes on with what waits for memory, and sends what the device takes.
    fn send(&mut self) {
        if let (_, Some(link)) = self.parts() {
            link.retry();
            link.flush();
            self.settle();
        }
    }

    /// Goes on with what waits for memory.
    fn retry(&mut self) {
        if let (_, Some(link)) = self.parts() {
            link.retry();
            self.settle();
        }
    }

    /// Hands outcomes to their waiters.
    fn settle(&mut self) {
        if let (session, Some(link)) = self.parts() {
            session.settle(link);
            self.moved();
        }
    }
}

/// A connection behind its lock.
pub(super) trait Locked<'a> {
    /// What is behind it.
    type State: State + 'a;

    /// Takes the lock.
    fn lock(&self) -> MutexGuard<'a, Self::State>;

    /// Whether this thread may take what comes: no other one sleeps until something does.
    fn may_read(&self, state: &mut Self::State) -> bool {
        !state.parts().0.another_reads()
    }

    /// Moves what has come, if this thread may; otherwise only sends.
    fn read(&self, state: &mut Self::State) {
        match self.may_read(state) {
            true => state.pump(),
            false => state.send(),
        }
    }

    /// This thread has taken what another one sleeps for.
    fn taken(&self, _: &mut Self::State) {}

    /// Whether somebody may wait for the descriptor though no thread waits in here.
    fn is_watched(&self, _: &mut Self::State) -> bool {
        true
    }

    /// Whether a spin may offer its processor to others when it takes long. Not where threads beside it wait for what only it
    /// reads: they would get the processor, and have nothing to do with it.
    fn may_offer(&self, state: &mut Self::State) -> bool {
        state.parts().0.sleeping() == 0
    }
}

/// Whose turn it is to do the work of a connection, and what that is.
pub(super) trait Policy<'a>: Locked<'a> {
    /// Does what a thread has to do beside waiting, if there is anything: it serves one request. Returns whether it did.
    fn serve(
        &self,
        state: MutexGuard<'a, Self::State>,
        mask: Mask<'_>,
    ) -> (MutexGuard<'a, Self::State>, bool);

    /// What this thread does next.
    fn turn(&self, state: &mut Self::State, waiter: Waiter) -> Turn;

    /// Whether a spin has found what the thread waits for.
    fn is_over(&self, state: &mut Self::State, waiter: Waiter) -> bool;

    /// Whether a thread looks a few times before it sleeps beside a driver: it does if the driver hands it what it waits for.
    fn looks_beside(&self, _: Waiter) -> bool {
        false
    }

    /// What to sleep for. `may_doze`: this may be a bell, or the stream itself.
    fn wake(&self, state: &mut Self::State, may_doze: bool) -> Wake;

    /// Sleeps for that, at most for `left`. Returns false when nothing came in that time.
    fn sleep(&self, wake: &mut Wake, left: Duration, mask: Mask<'_>) -> bool {
        if let Some(Doze::Bell(bell)) = &wake.doze {
            bell.wait(left);
            return true;
        }
        // An error of poll(2) itself shows up in the next pump, as an error of the device; EINTR is no error here.
        !matches!(wait::poll(&mut wake.fds, Some(left), mask), Ok(0))
    }

    /// A thread no longer sleeps on the stream.
    fn napped(&self, _: &mut Self::State) {}

    /// Moves what has come. `nothing`: nothing has, and the time is over.
    fn move_on(&self, state: &mut Self::State, wake: &Wake, nothing: bool);
}

/// What a thread that waits on a connection does next.
pub(super) enum Turn {
    /// It looks again: something has changed.
    Look,
    /// It sleeps beside the driver, at most until `until`. `serves`: it may have to serve a request in the midst of its own.
    Sleep { until: Option<Instant>, serves: bool },
    /// It drives.
    Drive { spins: bool },
}

/// What a driver sleeps for.
pub(super) struct Wake {
    /// The connection, and what else there is.
    pub(super) fds: [PollFd; 2],
    /// Whether the driver wakes when something comes, and when the connection takes bytes.
    pub(super) reads: bool,
    pub(super) writes: bool,
    /// When there is something to do though nothing comes.
    pub(super) until: Option<Instant>,
    /// The peer is nudged if nothing comes within [`NUDGE_AFTER`].
    pub(super) nudges: bool,
    /// There is something to do of which no descriptor tells ([`QueuePair::rest`](crate::provider::QueuePair::rest)).
    pub(super) at_once: bool,
    /// What to sleep on in place of descriptors, for [`DOZE`] at most: neither the end of the connection rings the bell, nor
    /// does anybody in this process.
    pub(super) doze: Option<Doze>,
}

impl Wake {
    /// `other`: what else wakes it, or -1.
    pub(super) fn new(
        (fd, reads, writes): (RawFd, bool, bool),
        other: RawFd,
        until: Option<Instant>,
    ) -> Wake {
        let fds = [PollFd::new(fd, reads, writes), PollFd::new(other, true, false)];
        Wake { fds, reads, writes, until, nudges: false, at_once: false, doze: None }
    }

    /// Whether the other descriptor is readable.
    pub(super) fn other_came(&self) -> bool {
        self.fds[1].readable()
    }
}

/// Waits until what is waited for is there, or until `deadline`.
pub(super) fn wait_for<'a, P: Policy<'a>>(
    policy: &P,
    mut state: MutexGuard<'a, P::State>,
    waiter: Waiter,
    deadline: Instant,
    mask: Mask<'_>,
) -> MutexGuard<'a, P::State> {
    let (mut steps, mut first) = (Steps::default(), true);
    // The time matters only when the first wait was in vain, which it rarely is.
    while !state.parts().0.calls.is_over(waiter) && (std::mem::take(&mut first) || Instant::now() < deadline)
    {
        state = wait_once(policy, state, waiter, &mut steps, deadline, mask);
    }
    steps.beside.ends(state.parts().0.calls.is_over(waiter));
    state
}

/// What a thread keeps from one step of waiting to the next.
#[derive(Default)]
pub(super) struct Steps {
    condition: Option<Arc<Condvar>>,
    /// When it first went to sleep as the driver.
    slept: Option<Instant>,
    beside: Beside,
}

/// One step of waiting: serves, sleeps beside the driver, or drives.
pub(super) fn wait_once<'a, P: Policy<'a>>(
    policy: &P,
    state: MutexGuard<'a, P::State>,
    waiter: Waiter,
    steps: &mut Steps,
    deadline: Instant,
    mask: Mask<'_>,
) -> MutexGuard<'a, P::State> {
    let (mut state, served) = policy.serve(state, mask);
    if served {
        return state;
    }
    match policy.turn(&mut state, waiter) {
        Turn::Look => state,
        Turn::Drive { spins } => {
            steps.beside.ends(true);
            drive(policy, state, waiter, spins, &mut steps.slept, deadline, mask)
        }
        // Not for a thread that may have to serve a request: only one that sleeps is told of that.
        Turn::Sleep { serves: false, .. }
            if policy.looks_beside(waiter) && steps.beside.offers(&state.parts().0.spin) =>
        {
            drop(state);
            steps.beside.offer();
            policy.lock()
        }
        Turn::Sleep { until, serves } => {
            steps.beside.ends(false);
            let own = steps.condition.get_or_insert_with(|| Arc::new(Condvar::new())).clone();
            let session = state.parts().0;
            // Without memory for this nobody can wake the thread, and it looks again by itself.
            let known = session.sleepers.try_reserve(1).is_ok();
            if known {
                session.sleepers.insert(waiter, own.clone());
            }
            let looks = (!known).then(|| Instant::now() + DOZE);
            let until = until.into_iter().chain(looks).min();
            if serves {
                session.serving_sleeper = Some(own.clone());
            }
            let mut state = sleep(&own, state, until.map_or(deadline, |until| deadline.min(until)));
            // Once awake it may serve a request whose own calls wait here too: notifying this condition would then wake
            // nobody.
            let session = state.parts().0;
            if known {
                session.sleepers.remove(&waiter);
            }
            if serves {
                session.serving_sleeper = None;
            }
            // The driver may have gone to sleep before the time for a retry.
            state.retry();
            state
        }
    }
}

/// Sleeps on a condition, at most until `deadline`.
fn sleep<'a, T>(condition: &Condvar, state: MutexGuard<'a, T>, deadline: Instant) -> MutexGuard<'a, T> {
    let left = deadline.saturating_duration_since(Instant::now());
    condition.wait_timeout(state, left).map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state)
}

/// Spins, then sleeps once, then moves what has come.
fn drive<'a, P: Policy<'a>>(
    policy: &P,
    mut state: MutexGuard<'a, P::State>,
    waiter: Waiter,
    spins: bool,
    slept: &mut Option<Instant>,
    deadline: Instant,
    mask: Mask<'_>,
) -> MutexGuard<'a, P::State> {
    state.parts().0.begin_to_drive();
    let _waiting = Waiting::begin();
    if spins {
        let found;
        (state, found) = spin(policy, state, |state| policy.is_over(state, waiter), || false);
        if found {
            state.parts().0.end_to_drive();
            return state;
        }
    }
    let now = Instant::now();
    // Signals get through after this time, however often something comes for others, or a part of what is waited for.
    let blocked = slept.map_or(DOZE, |slept| DOZE.saturating_sub(now - slept));
    slept.get_or_insert(now);
    let mut wake = policy.wake(&mut state, !blocked.is_zero());
    let until = wake.until.map_or(deadline, |until| deadline.min(until));
    let mut left = if wake.at_once { Duration::ZERO } else { until.saturating_duration_since(now) };
    let (session, link) = state.parts();
    // A thread that polls beside this one waits for room to send, and is told of that in any case.
    let nap = match (&wake.doze, link) {
        (Some(Doze::Stream(fd)), Some(link))
            if left >= NAP_SPARE
                && blocked >= NAP
                && session.drives_alone()
                && link.engine.closed().is_none() =>
        {
            Some((*fd, link.serial))
        }
        _ => None,
    };
    session.sleeps_for(wake.reads, wake.writes);
    let mut bytes = Vec::new();
    let nap = nap.filter(|_| {
        bytes = std::mem::take(&mut session.nap);
        bytes.try_reserve_exact(NAP_BYTES).is_ok()
    });
    if nap.is_some() {
        session.naps += 1;
    } else if session.naps() {
        // A thread that sleeps on the stream may take what this one waits for, and no descriptor tells of that then.
        left = left.min(DOZE);
    }
    if matches!(wake.doze, Some(Doze::Bell(_))) {
        left = left.min(blocked);
    }
    if wake.nudges {
        left = left.min(NUDGE_AFTER);
    }
    if nap.is_none() {
        session.begins_to_poll();
    }
    drop(state);
    let Some((fd, serial)) = nap else {
        let came = policy.sleep(&mut wake, left, mask);
        let mut state = policy.lock();
        state.parts().0.has_polled();
        policy.move_on(&mut state, &wake, !came);
        state.parts().0.end_to_drive();
        return state;
    };
    let came = match socket::await_bytes(fd, bytes.spare_capacity_mut()) {
        Ok(came) => Some(came),
        // If at once: the program has put the socket into non-blocking mode.
        Err(error) if error.kind() == ErrorKind::WouldBlock => (now.elapsed() >= NAP / 2).then_some(&[][..]),
        // What the error is shows at the next look.
        Err(_) => Some(&[][..]),
    };
    let mut state = policy.lock();
    let (session, link) = state.parts();
    session.naps -= 1;
    match link {
        // Otherwise it is another connection by now, of which nothing was taken.
        Some(link) if link.serial == serial => link.device.arrived(came),
        _ => {}
    }
    match came {
        Some([_, ..]) => state.pump(),
        _ => policy.move_on(&mut state, &wake, true),
    }
    policy.napped(&mut state);
    let session = state.parts().0;
    session.nap = bytes;
    session.end_to_drive();
    state
}

/// Moves what has come until `found`, for as long as spinning pays. Returns true when it was found. `others`: whether there is
/// something else to do. Does not spin beside a thread that sleeps until something comes: what is taken here would not wake
/// that thread.
pub(super) fn spin<'a, L: Locked<'a>>(
    locked: &L,
    mut state: MutexGuard<'a, L::State>,
    mut found: impl FnMut(&mut L::State) -> bool,
    others: impl Fn() -> bool,
) -> (MutexGuard<'a, L::State>, bool) {
    if state.parts().0.another_reads() {
        let is_found = found(&mut state);
        return (state, is_found);
    }
    let (session, Some(link)) = state.parts() else { return (state, false) };
    let Some(mut patience) = Patience::new(&mut session.spin, link) else { return (state, false) };
    link.device.spin();
    let (mut state, mut is_found) = spin_for(locked, state, &mut patience, &mut found, others);
    // Nobody looks any more. The descriptor tells of what comes from here on, if somebody waits for it, but nothing tells of
    // what came in between.
    let leaves = is_found && !state.parts().0.another_reads() && !locked.is_watched(&mut state);
    if let (_, Some(link)) = state.parts()
        && !(if leaves { link.device.leave() } else { link.device.rest() })
        && !state.parts().0.another_reads()
    {
        state.pump();
        is_found = is_found || found(&mut state);
    }
    (state, is_found)
}

fn spin_for<'a, L: Locked<'a>>(
    locked: &L,
    mut state: MutexGuard<'a, L::State>,
    patience: &mut Patience,
    found: &mut impl FnMut(&mut L::State) -> bool,
    others: impl Fn() -> bool,
) -> (MutexGuard<'a, L::State>, bool) {
    loop {
        let alone = !state.parts().0.another_reads();
        if alone && state.parts().1.is_none_or(|link| patience.finds(link)) {
            state.pump();
        }
        if found(&mut state) {
            let (session, link) = state.parts();
            if let Some(link) = link {
                patience.is_over(link);
            }
            patience.ends(&mut session.spin, true);
            return (state, true);
        }
        if !alone {
            return (state, false);
        }
        let (session, link) = state.parts();
        if link.is_none_or(|link| patience.is_over(link)) {
            patience.ends(&mut session.spin, false);
            return (state, false);
        }
        if patience.must_end(&others) {
            return (state, false);
        }
        let may_offer = locked.may_offer(&mut state);
        drop(state);
        patience.pause(may_offer);
        state = locked.lock();
        patience.goes_on();
    }
}

/// Sends a reply, and waits a little while for a peer that does not take it. Reading goes on meanwhile, because two ends that
/// only write would wait for each other. `fd`: what to wait for. `forked`: reading is left to the parent.
pub(super) fn reply<'a, L: Locked<'a>>(
    locked: &L,
    mut state: MutexGuard<'a, L::State>,
    (fd, id): (RawFd, RequestId),
    message: Message,
    patience: impl Fn() -> Wait,
    forked: bool,
) -> (MutexGuard<'a, L::State>, Result<(), Error>) {
    let closed = || Err(Error::new(Kind::NotSent, "the connection is closed"));
    let Some(link) = state.parts().1 else { return (state, closed()) };
    let (serial, one_event) = (link.serial, link.device.traits().one_event);
    let mut reply = link.begin_reply(id, message, forked);
    let mut progress = None;
    while reply.waits
        && let (_, Some(link)) = state.parts()
        && let taken = link.device.taken()
        && let Some(left) = progress.get_or_insert_with(|| Progress::new(patience(), taken)).left(|| taken)
    {
        let (events, left) = match (forked, one_event || locked.may_read(&mut state)) {
            // What the descriptor tells is for the process that reads.
            (true, _) if one_event => (0, left.min(LOOK)),
            (false, true) if one_event && !state.parts().1.is_none_or(|link| link.device.rest()) => {
                (wait::IN, Duration::ZERO)
            }
            (false, true) if one_event => (wait::IN, left),
            (false, true) => (wait::IN | wait::OUT, left),
            _ => (wait::OUT, left),
        };
        drop(state);
        // An error of poll(2) itself shows up in what follows.
        let _ = wait::until(fd, events, Some(left), None);
        state = locked.lock();
        let (session, Some(link)) = state.parts() else { break };
        if link.serial != serial {
            break;
        }
        reply.advance(link);
        session.settle(link);
        if reply.waits && !forked {
            read_beside(locked, &mut state, one_event);
            match state.parts().1 {
                Some(link) if link.serial == serial => reply.look(link, false),
                _ => break,
            }
        }
    }
    // Somebody else may have ended the connection meanwhile, and the loan with it; a new one may have taken its place.
    let same = |link: &&mut Link| link.serial == serial;
    if reply.lent
        && let Some(link) = state.parts().1.filter(same)
    {
        link.release();
        match forked {
            true => state.settle(),
            false => read_beside(locked, &mut state, one_event),
        }
    }
    let (session, link) = state.parts();
    let Some(link) = link.filter(same) else { return (state, closed()) };
    let sent = link.end_reply(reply);
    session.settle(link);
    (state, sent)
}

/// Moves what has come, which another thread may sleep for. Where one event tells of everything, there is no telling apart
/// what comes from what may be sent: the other thread is told of what this one has taken.
fn read_beside<'a, L: Locked<'a>>(locked: &L, state: &mut L::State, one_event: bool) {
    if !one_event {
        return locked.read(state);
    }
    let others = !locked.may_read(state);
    state.pump();
    if others {
        locked.taken(state);
    }
}

#[cfg(all(test, shuttle))]
mod schedules;
