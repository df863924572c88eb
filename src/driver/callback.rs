//! Calls back, at the end that opened the connection: who serves them, and how the connection is kept for them.
//!
//! A program that serves calls back need not have a server's loop: calls back are served by a thread that waits for a reply on
//! the same connection, by [`Client::poll_callbacks`], or by the program's service loop if it has one ([`Client::serve_now`]).
//! They are served one at a time, as in a service loop. But a callback that itself waits on the connection serves those that
//! come meanwhile; otherwise two ends that call each other in turn would wait for ever.
//!
//! A lost connection is re-established by whichever of the three comes first (RFC 8167 §5.4), and a call of procedure 0 goes
//! over it, because the end that opens a connection speaks first. What the server's program knew of the old one is its business.
#![forbid(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::sync::{MutexGuard, is_poisoned};
use std::time::{Duration, Instant};

use crate::connection::{Fate, Request, RequestId};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Message};
use crate::stats::{self, Counter};
use crate::thread;
use crate::wait;
use crate::{log_warn, socket};

use super::backlog::Wait;
use super::calls::Waiter;
use super::client::{Client, Waiting};
use super::session::{self, State};
use super::{Callee, Caller, LATE, Mask, TURN, TURN_TIME};

use crate::wait::WakeSet;

/// How long it takes until a connection that could not be made is tried again: at first, and at most.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(30);

/// Hands callbacks to the program.
pub trait Serve: Send + Sync {
    /// Has the program answer or drop `request`, in this thread and under `mask`. No lock of the library is held.
    fn serve(&self, request: Request, mask: Mask<'_>);

    /// Makes the program's loop wake when `fd` is readable, for [`Client::serve_now`]. Called under the connection's lock.
    ///
    /// # Errors
    /// The errno.
    fn watch(&self, _fd: RawFd) -> Result<(), Error> {
        Ok(())
    }

    /// Ends that: `fd` is closed next. Called once for each descriptor that was watched; it may be under the connection's
    /// lock.
    fn forget(&self, _fd: RawFd) {}
}

/// What belongs to a connection that serves calls back.
pub(super) struct Serving {
    serve: Arc<dyn Serve>,
    /// The connection and an alarm, for the program's loop; threads that drive wait for the alarm too.
    set: WakeSet,
    /// The descriptor in the set.
    watched: RawFd,
    /// The call of procedure 0 that a new connection begins with.
    null: [u8; 40],
    /// When a connection that could not be made is tried again, and how long the wait will be after that.
    retry: Option<Instant>,
    delay: Duration,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Before the set's number can be that of another file. A forked child may keep the file itself open, which would go on
        // waking the loop.
        self.serve.forget(self.set.fd());
    }
}

impl Serving {
    fn alarm(&self, time: Option<Duration>) {
        if let Err(error) = self.set.alarm(time) {
            log_warn!("callbacks may be late: {error}");
        }
    }
}

impl Client {
    /// Serves calls back from now on. `program` and `version` are those of the forward direction, for the greeting. Returns
    /// the descriptor that becomes readable when [`Client::serve_now`] has something to do.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn start_serving(&self, serve: Arc<dyn Serve>, program: u32, version: u32) -> Result<RawFd, Error> {
        let set = WakeSet::new()?;
        let fd = set.fd();
        let mut null = [0; 40];
        for (place, word) in null[8..20].chunks_exact_mut(4).zip([2, program, version]) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        if self.traits().socket {
            socket::keep_alive(self.fd);
        }
        let mut state = self.lock();
        if state.shut {
            return Err(Error::new(
                Kind::Invalid,
                "a CLIENT of this connection was destroyed, and has closed it",
            ));
        }
        serve.watch(fd)?;
        state.link.serves = true;
        state.link.engine.keep_deferred(LATE);
        let Waiting { link, wishes, .. } = &mut *state;
        wishes.reverse_credits = link.grant(wishes.reverse_credits);
        link.drain();
        let watched = state.link.device.fd();
        state.serving = Some(Serving { serve, set, watched, null, retry: None, delay: RETRY_FIRST });
        // Nobody has waited for the descriptor, which may tell nothing of what comes now, or has already come.
        if !state.session.is_driven() && !state.link.device.rest() {
            state.pump();
        }
        state.rearm();
        // A thread that sleeps in poll(2) does not know of the alarm yet. It need not: it reads the connection.
        Ok(fd)
    }

    /// Makes a call of procedure 0 so that the peer tells its credits, if it has not yet. Before its first reply a connection
    /// has one credit (RFC 8166 §3.3.1): if the program's first call took it, a callback that this call leads to could call
    /// nobody.
    pub fn learn_credits(&self) {
        let mut state = self.lock();
        if state.link.engine.closed().is_none()
            && state.link.engine.granted() <= 1
            && let Some(null) = state.serving.as_ref().map(|serving| serving.null)
        {
            state.greet(null);
        }
    }

    /// No longer serves calls back. Those that come are answered that there is no such program. One that is being served goes
    /// on, and may be answered.
    pub fn stop_serving(&self) {
        let mut state = self.lock();
        let ended = state.serve_no_more();
        drop(state);
        // What ends with it needs other locks.
        drop(ended);
    }

    /// Whether calls back are served.
    pub fn is_serving(&self) -> bool {
        self.lock().serving.is_some()
    }

    /// Serves what is there without waiting, and re-establishes a lost connection if it is time: for the program's loop.
    /// Returns how many calls back were served.
    pub fn serve_now(&self, mask: Mask<'_>) -> usize {
        let mut state = self.lock();
        state.silence();
        let due = |serving: &Serving| serving.retry.is_none_or(|at| at <= Instant::now());
        if state.link.engine.closed().is_some()
            && !state.session.is_driven()
            && (state.attempt().is_some() || state.serving.as_ref().is_some_and(due))
        {
            self.look(&mut state);
            self.step(&mut state);
        }
        if !state.session.is_driven() {
            state.link.pump();
            state.settle();
        }
        let mut served = 0;
        let until = Instant::now() + TURN_TIME;
        while served < TURN as usize
            && (served == 0 || Instant::now() < until)
            && let Some(request) = state.callback()
        {
            state = self.serve_one(state, request, mask);
            served += 1;
        }
        if !state.session.is_driven() {
            state.link.flush();
            state.settle();
        }
        state.rearm();
        served
    }

    /// Waits for calls back, at most until `deadline`; serves those that are there, and returns how many. Returns 0 at once
    /// when the connection was re-established.
    ///
    /// # Errors
    /// Why the connection is lost, when it could not be re-established by `deadline`, or is not, because service has ended.
    pub fn poll_callbacks(&self, deadline: Instant, mask: Mask<'_>) -> Result<usize, Error> {
        let connections = self.connections();
        let mut served = self.serve_now(mask);
        let waiter = Waiter::Callbacks(thread::this());
        let mut steps = session::Steps::default();
        let mut state = self.lock();
        loop {
            while let Some(request) = state.callback() {
                state = self.serve_one(state, request, mask);
                served += 1;
            }
            let now = Instant::now();
            // The program at the other end of a new connection does not know its client: it calls nothing back until it does.
            let closed = state.link.engine.closed();
            // Nor is a connection re-established for a service that another thread has ended.
            let over = closed.is_some() && state.serving.is_none();
            if served > 0 || now >= deadline || state.connections != connections || over {
                let lost = closed.cloned().filter(|_| served == 0);
                state.hand_over();
                state.rearm();
                return lost.map_or(Ok(served), Err);
            }
            if state.link.engine.closed().is_some() {
                // The driver finds out soon, and leaves the rest to this thread.
                if state.attempt().is_some() || state.session.is_driven() {
                    state = session::wait_once(&self, state, waiter, &mut steps, deadline, mask);
                    continue;
                }
                let retry = state.serving.as_ref().and_then(|serving| serving.retry).unwrap_or(now);
                drop(state);
                // poll(2) could only object to the time, which is valid.
                let _ = wait::poll(&mut [], Some(retry.min(deadline).saturating_duration_since(now)), mask);
                served += self.serve_now(mask);
                state = self.lock();
                continue;
            }
            state = session::wait_once(&self, state, waiter, &mut steps, deadline, mask);
        }
    }

    /// Has the program serve one callback; meanwhile others may drive.
    pub(super) fn serve_one<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        request: Request,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Waiting> {
        let Some(serving) = &state.serving else { return state };
        let serve = serving.serve.clone();
        let outer = state.server.replace(thread::this());
        stats::add(Counter::Served, 1);
        state.hand_over();
        drop(state);
        let served = Served { client: self, outer };
        serve.serve(request, mask);
        drop(served);
        self.lock()
    }
}

/// A callback that is being served; `outer`: the thread that serves the one which it interrupts.
struct Served<'a> {
    client: &'a Client,
    outer: Option<usize>,
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let mut state = self.client.lock();
        state.server = self.outer;
        if state.shut {
            self.client.quiet.notify_all();
        }
        if state.server.is_none() && std::mem::take(&mut state.close_later) {
            drop(state);
            socket::close(self.client.fd);
        }
    }
}

impl Waiting {
    /// Whether a callback is there that this thread may serve.
    pub(super) fn may_serve(&self) -> bool {
        let free = self.server.is_none_or(|thread| thread == thread::this());
        self.serving.is_some() && free && self.link.request_ready()
    }

    /// Ends what [`Client::start_serving`] has begun. What is returned is to be dropped without a lock, because what ends with
    /// it needs other locks.
    pub(super) fn serve_no_more(&mut self) -> Option<Serving> {
        self.link.serves = false;
        while let Some(request) = self.link.engine.poll_request() {
            self.link.decline(request);
        }
        self.link.flush();
        self.settle();
        self.serving.take()
    }

    /// Whether this thread serves a callback now.
    pub(super) fn serves_here(&self) -> bool {
        self.server == Some(thread::this())
    }

    /// A callback for this thread to serve.
    pub(super) fn callback(&mut self) -> Option<Request> {
        if !self.may_serve() {
            return None;
        }
        let request = self.link.next_request();
        if let Some(request) = &request {
            self.link.handed_up(request, stats::clock());
        }
        request
    }

    pub(super) fn alarm_fd(&self) -> Option<RawFd> {
        self.serving.as_ref().map(|serving| serving.set.alarm_fd())
    }

    pub(super) fn raise_alarm(&self) {
        if let Some(serving) = &self.serving {
            serving.alarm(Some(Duration::ZERO));
        }
    }

    pub(super) fn silence(&self) {
        if let Some(serving) = &self.serving {
            serving.set.silence();
        }
    }

    /// Notes that the connection could not be made.
    pub(super) fn retry_later(&mut self) {
        if let Some(serving) = &mut self.serving {
            serving.retry = Some(Instant::now() + serving.delay);
            serving.delay = (serving.delay * 2).min(RETRY_LAST);
        }
    }

    /// Serves on a new connection too.
    pub(super) fn resume_serving(&mut self) {
        let Waiting { link, serving: Some(serving), wishes, .. } = self else { return };
        link.serves = true;
        link.engine.keep_deferred(LATE);
        link.grant(wishes.reverse_credits);
        (serving.retry, serving.delay) = (None, RETRY_FIRST);
        let null = serving.null;
        self.greet(null);
        // Nobody has waited for the descriptor of the new connection, and perhaps nobody does now but the program's loop.
        if !self.link.device.rest() {
            self.pump();
        }
        self.rearm();
    }

    /// Makes the program's loop wait for no descriptor of ours but the alarm.
    pub(super) fn watch_nothing(&mut self) {
        if let Some(serving) = &mut self.serving {
            // A descriptor that is closed is in no set.
            let _ = serving.set.watch(std::mem::replace(&mut serving.watched, -1), 0);
        }
    }

    /// Sets what wakes the program's loop next.
    pub(super) fn rearm(&mut self) {
        let (again, attempt) = (self.may_serve(), self.attempt());
        let Some(serving) = &mut self.serving else { return };
        let open = self.link.engine.closed().is_none();
        // A thread that sleeps in poll(2) sees to what is unsent, and to a connection that is being made.
        let alone = !self.session.is_driven();
        let (fd, events) = match attempt {
            Some((fd, _, _)) if !alone => (fd, 0),
            Some((fd, true, _)) => (fd, wait::IN | wait::OUT),
            Some((fd, false, _)) => (fd, wait::IN),
            None if !open => (self.link.device.fd(), 0),
            None if alone && self.link.device.wants_write() => (self.link.device.fd(), wait::IN | wait::OUT),
            None => (self.link.device.fd(), wait::IN),
        };
        let before = std::mem::replace(&mut serving.watched, fd);
        let done = if before != fd { serving.set.watch(before, 0) } else { Ok(()) };
        if let Err(error) = done.and_then(|()| serving.set.watch(fd, events)) {
            log_warn!("fd {fd}: callbacks may be late: {error}");
        }
        let now = Instant::now();
        let left = |at: Instant| at.saturating_duration_since(now);
        serving.alarm(match (again, open, attempt) {
            (true, ..) => Some(Duration::ZERO),
            (false, true, _) => self.link.retry_at().map(left),
            (false, false, Some((_, _, until))) => Some(left(until)),
            (false, false, None) => Some(serving.retry.map_or(Duration::ZERO, left)),
        });
    }
}

impl Callee for Client {
    fn message(&self) -> Result<Buf, Error> {
        Caller::message(self)
    }

    fn reply(&self, id: RequestId, message: Message) -> Result<(), Error> {
        let state = self.lock();
        let fd = state.link.device.fd();
        let (mut state, sent) = session::reply(&self, state, (fd, id), message, || Wait::SHORT, false);
        if state.link.device.wants_write() {
            state.rearm();
        }
        if state.server.is_none() {
            // A call back may have come in meanwhile, and no routine is running at whose end somebody would look for it.
            state.hand_over();
        }
        sent
    }

    fn lose(&self, error: Error) {
        let mut state = self.lock();
        state.link.fail(error);
        state.link.drain();
        state.settle();
    }

    fn defer(&self, id: RequestId, _to_child: bool) {
        let mut state = self.lock();
        state.link.engine.defer(id);
        state.link.flush();
        state.settle();
    }

    fn fate(&self, id: RequestId) -> Fate {
        self.lock().link.engine.fate(id)
    }

    fn discard(&self, id: RequestId) {
        let mut state = self.lock();
        state.link.engine.discard(id);
        state.link.flush();
        state.settle();
    }

    fn end(&self, loans: &[Loan]) {
        Caller::end(self, loans);
    }

    fn grants(&self, grant: Option<u32>) -> u32 {
        let mut state = self.lock();
        if let Some(credits) = grant {
            let Waiting { link, wishes, serving, .. } = &mut *state;
            // A client grants nothing before it serves.
            wishes.reverse_credits = if serving.is_some() { link.grant(credits) } else { credits };
            link.drain();
        }
        state.link.engine.granting()
    }

    fn is_poisoned(&self) -> bool {
        is_poisoned(&self.state)
    }
}
