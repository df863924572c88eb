//! Calls back, at the end that accepted the connection: [`Reverse`] makes them.
//!
//! The connection belongs to the program's service loop, which reads it whenever something comes. So it is moved by
//!
//! - the loop, while another thread's call waits for the reply that the loop will find;
//! - the calling thread itself, where that is the loop's own: from a dispatch routine, or between two turns of the loop.
//!   It then serves the requests of the connection too, for the callback may call forward before it answers;
//! - the calling thread, while the loop's thread is inside a dispatch routine, and perhaps waits for this one;
//! - the calling thread, while nobody is in the loop, as far as can be told: it has been left, or what has come for this
//!   connection has been there for a while and nobody has looked at any connection.
//!
//! What a thread beside the loop has taken off the connection, the loop must be told of: poll(2) will not.
//! [`service_loop`] knows where the loop is.
#![forbid(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::connection::characteristics::Wish;
use crate::connection::{Expect, RPC_HEADER_MAX};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Message, Region};
use crate::process;
use crate::stats::{self, Counter};
use crate::thread;
use crate::wait;
use crate::wire::Xid;
use crate::wire::characteristics::Characteristic;

use super::calls::{Waiter, sleep};
use super::link::Link;
use super::peer::Peer;
use super::server::{Phase, Server, Shared, locked};
use super::service_loop;
use super::spin::Patience;
use super::{Mask, Requester, Responder, Standing};

/// How long a call back trusts that the loop reads its connection, before it looks whether the loop is busy.
const STAND_IN: Duration = Duration::from_millis(20);

/// Makes calls back to the client of a connection, and to the same client on another connection later.
pub struct Reverse {
    slot: Mutex<Slot>,
    config: &'static Config,
    hooks: &'static Hooks,
}

struct Slot {
    server: Arc<Shared>,
    /// Credits that are asked for, on the next connection too.
    credits: u32,
    chunks: bool,
    /// Least bytes of our Receives, if the program has said so.
    receive_size: Option<u32>,
}

/// What only the program's loop can do.
pub struct Hooks {
    /// Has the loop serve what is there of the connection with this descriptor.
    pub serve: fn(RawFd),
    /// Has the loop look at [`service_loop::take_left`] in its next turn. Called in its own thread.
    pub wake: fn(),
    /// The same, in any thread: a loop that sleeps wakes.
    pub ring: fn(),
}

impl Reverse {
    /// Calls back over `server`.
    ///
    /// # Errors
    /// `ConnectionLost` when it is closed, `Invalid` before it is established.
    pub fn new(
        server: Arc<Shared>,
        config: &'static Config,
        hooks: &'static Hooks,
    ) -> Result<Arc<Reverse>, Error> {
        let (credits, chunks) = (config.reverse_credits, config.reverse_chunks);
        let slot = Slot { server, credits, chunks, receive_size: None };
        slot.begin()?;
        Ok(Arc::new(Reverse { slot: Mutex::new(slot), config, hooks }))
    }

    /// Goes on over another connection, on which the same client has come back.
    ///
    /// # Errors
    /// As [`Reverse::new`].
    pub fn rebind(&self, server: Arc<Shared>) -> Result<(), Error> {
        let mut slot = self.slot();
        let fresh = Slot { server, ..*slot };
        fresh.begin()?;
        *slot = fresh;
        Ok(())
    }

    /// Whether calls may have chunks.
    pub fn set_chunks(&self, allowed: bool) {
        let mut slot = self.slot();
        slot.chunks = allowed;
        if let Some(link) = locked(&slot.server).link() {
            link.engine.set_reverse_chunks(allowed);
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn server(&self) -> Arc<Shared> {
        self.slot().server.clone()
    }

    /// Waits until what is waited for is there, or until `deadline`.
    fn wait_for<'a>(
        &self,
        server: &'a Shared,
        mut state: MutexGuard<'a, Server>,
        waiter: Waiter,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Server> {
        let own = Arc::new(Condvar::new());
        // The loop serves nothing more of this connection.
        let mut stuck = false;
        // Something has come, and since when the loop has not looked at any connection.
        let mut unread = None;
        while !state.calls.is_over(waiter) {
            let now = Instant::now();
            if now >= deadline {
                break;
            }
            let serves = !stuck && service_loop::may_nest();
            if serves && state.request_ready() {
                let nested = service_loop::nest();
                let (fd, received) = (state.fd, state.received);
                drop(state);
                (self.hooks.serve)(fd);
                drop(nested);
                state = locked(server);
                stuck = state.received == received;
                continue;
            }
            let reads = service_loop::may_read();
            if state.driver.is_none() && (reads || state.wants_write()) {
                state = self.drive(server, state, waiter, (reads, serves), deadline, mask);
            } else {
                state.calls.sleepers.insert(waiter, own.clone());
                let mine = service_loop::is_mine();
                if mine {
                    state.calls.servant = Some(own.clone());
                } else if !reads {
                    let looks = service_loop::looks();
                    let came = wait::until(state.fd, wait::IN, Some(Duration::ZERO), None).unwrap_or(false);
                    if came && unread.take() == Some(looks) {
                        service_loop::is_away();
                        state.calls.sleepers.remove(&waiter);
                        continue;
                    }
                    unread = came.then_some(looks);
                }
                state = sleep(&own, state, deadline.min(now + STAND_IN));
                state.calls.sleepers.remove(&waiter);
                state.retry();
                if mine {
                    state.calls.servant = None;
                }
            }
        }
        state
    }

    /// This thread waits no more: somebody else drives, and the loop hears of what is left for it.
    fn leave(&self, mut state: MutexGuard<'_, Server>) {
        if state.driver.is_none() {
            state.calls.wake_one();
        }
        if service_loop::is_mine() && (state.request_ready() || state.link().is_none()) {
            service_loop::leave(state.fd);
        }
        drop(state);
        if service_loop::is_idle_here() {
            (self.hooks.wake)();
        }
    }

    /// Spins, then sleeps once, then moves what has come; sends only, unless it `reads`. Until the wait is over, or a
    /// request is there that this thread `serves`.
    fn drive<'a>(
        &self,
        server: &'a Shared,
        mut state: MutexGuard<'a, Server>,
        waiter: Waiter,
        (reads, serves): (bool, bool),
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Server> {
        state.driver = Some(thread::this());
        let own = service_loop::is_mine();
        let limit = if own { state.spin.allowed(self.config) } else { None };
        let patience = limit.and_then(|limit| Patience::new(limit, state.link()?));
        if let Some(mut patience) = patience {
            loop {
                state.pump();
                let request = serves && state.request_ready();
                if request || state.calls.is_over(waiter) || state.link().is_none() {
                    state.spin.found();
                    state.driver = None;
                    return state;
                }
                if state.link().is_none_or(|link| patience.is_over(link)) {
                    state.spin.failed();
                    break;
                }
                drop(state);
                std::hint::spin_loop();
                state = locked(server);
            }
        }
        let events = if reads { wait::IN } else { 0 } | if state.wants_write() { wait::OUT } else { 0 };
        let (fd, retry) = (state.fd, state.link().and_then(|link| link.retry_at()));
        drop(state);
        let mut left = deadline.saturating_duration_since(Instant::now());
        if !own {
            // The loop may take from the connection what this thread sleeps for.
            left = left.min(STAND_IN);
        }
        if let Some(at) = retry {
            left = left.min(at.saturating_duration_since(Instant::now()));
        }
        // An error of poll(2) itself shows up in the next pump, as an error of the device; EINTR is no error here.
        let _ = wait::until(fd, events, Some(left), mask);
        let mut state = locked(server);
        if own {
            state.pump();
        } else {
            match service_loop::stand_in(|| state.read_for_loop()) {
                Some(true) => (self.hooks.ring)(),
                Some(false) => {}
                None => state.send(),
            }
        }
        state.driver = None;
        state
    }
}

impl Slot {
    fn begin(&self) -> Result<(), Error> {
        let mut server = locked(&self.server);
        let link = server.usable()?;
        link.engine.ask(self.credits);
        link.engine.set_reverse_chunks(self.chunks);
        link.raise_again(self.receive_size);
        link.drain();
        Ok(())
    }
}

impl Server {
    /// Whether `receive` has one.
    pub fn request_ready(&self) -> bool {
        matches!(&self.phase, Phase::Open(link) if link.request_ready())
    }

    /// Moves everything that moves without waiting.
    fn pump(&mut self) {
        if let Phase::Open(link) = &mut self.phase {
            link.pump();
            self.calls.settle(link);
        }
    }

    /// As `pump`, beside the loop, which is told of requests.
    fn read_for_loop(&mut self) -> Option<RawFd> {
        self.pump();
        // The end of the connection is the loop's to see, and so is what the peer does not take now.
        (self.request_ready() || self.link().is_none() || self.wants_write()).then_some(self.fd)
    }

    /// Goes on with what waits for memory.
    fn retry(&mut self) {
        if let Phase::Open(link) = &mut self.phase {
            link.retry();
            self.calls.settle(link);
        }
    }

    fn send(&mut self) {
        if let Phase::Open(link) = &mut self.phase {
            link.retry();
            link.flush();
            self.calls.settle(link);
        }
    }

    /// The connection, for calls back.
    fn usable(&mut self) -> Result<&mut Link, Error> {
        if self.forked() {
            return Err(Error::new(Kind::Invalid, "the connection belongs to the parent of this process"));
        }
        if self.link().is_none() {
            return Err(self.phase.why_not());
        }
        match &mut self.phase {
            Phase::Open(link) => Ok(link),
            phase => Err(phase.why_not()),
        }
    }

    /// What is known of the client.
    ///
    /// # Errors
    /// Why the connection is lost.
    pub fn peer(&self) -> Result<Peer, Error> {
        match &self.phase {
            Phase::Open(link) => Peer::of(link, self.id),
            phase => Err(phase.why_not()),
        }
    }
}

impl Phase {
    /// Why there can be no calls back.
    fn why_not(&self) -> Error {
        let text = match self {
            Phase::Starting(_) => "the connection is not established yet",
            Phase::Open(link) => link.engine.closed().map_or("closed", |error| error.text()),
            Phase::Failed(error) => error.text(),
        };
        let text = format!(
            "the connection to the client is gone ({text}); only the client can make a new one: \
             see rpcrdma_clnt_rebind"
        );
        Error::new(Kind::NotSent, text)
    }
}

impl Requester for Reverse {
    fn fd(&self) -> RawFd {
        locked(&self.server()).fd
    }

    fn adapter(&self) -> bool {
        locked(&self.server()).adapter
    }

    fn message(&self) -> Result<Buf, Error> {
        Responder::message(&*self.server())
    }

    fn fresh_xid(&self) -> Xid {
        let server = self.server();
        let Server { calls, phase, .. } = &mut *locked(&server);
        match phase {
            Phase::Open(link) => calls.fresh_xid(&link.engine),
            Phase::Starting(_) | Phase::Failed(_) => Xid(process::random_u32()),
        }
    }

    fn exchange(
        &self,
        xid: Xid,
        message: Message,
        expect: Expect,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Vec<Region>, Error> {
        let server = self.server();
        let mut state = locked(&server);
        state.usable()?.begin(xid, message, expect)?;
        state.settle();
        let waiter = Waiter::Call(xid);
        state = self.wait_for(&server, state, waiter, deadline, mask);
        let outcome = state.calls.outcomes.remove(&xid).unwrap_or_else(|| {
            let mut text = "no reply to the call back within its time".to_owned();
            if let Phase::Open(link) = &mut state.phase {
                if link.engine.lacks_room(xid).is_some() {
                    text = link.why_no_reply(xid);
                }
                link.engine.abandon(xid, &mut *link.device);
                link.drain();
            }
            state.settle();
            stats::add(Counter::Orphans, 1);
            Err(Error::new(Kind::Timeout, text))
        });
        if outcome.is_ok() {
            // A client that only answers says something too.
            state.heard = Instant::now();
        }
        self.leave(state);
        outcome
    }

    fn peer(&self, wanted: bool) -> Result<Peer, Error> {
        let server = self.server();
        let mut state = locked(&server);
        state.usable()?;
        if !wanted {
            return state.peer();
        }
        if service_loop::is_mine() {
            state.pump();
        } else if service_loop::stand_in(|| state.read_for_loop()) == Some(true) {
            (self.hooks.ring)();
        }
        state.send();
        let peer = state.peer();
        self.leave(state);
        peer
    }

    fn request(&self, what: Characteristic, deadline: Instant, mask: Mask<'_>) -> Result<Wish, Error> {
        let server = self.server();
        let mut state = locked(&server);
        state.usable()?;
        let Server { calls, phase: Phase::Open(link), .. } = &mut *state else {
            return Err(state.phase.why_not());
        };
        let number = calls.requests.begin(link, what)?;
        let waiter = Waiter::Peer(number);
        state.settle();
        state = self.wait_for(&server, state, waiter, deadline, mask);
        let outcome = state.calls.requests.take(number);
        self.leave(state);
        outcome
    }

    fn raise_receives(&self, bytes: u32) -> Result<(), Error> {
        let mut slot = self.slot();
        let server = slot.server.clone();
        let mut state = locked(&server);
        state.usable()?.raise_receives(bytes)?;
        slot.receive_size = Some(bytes);
        Ok(())
    }

    fn standing(&self) -> Standing {
        let server = self.server();
        let mut state = locked(&server);
        match &mut state.phase {
            Phase::Open(link) => Standing::of(&link.engine),
            Phase::Starting(_) | Phase::Failed(_) => Standing { credits_left: 1, short: usize::MAX },
        }
    }

    fn end(&self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            Responder::end(&*self.server(), loans);
        }
    }

    fn comes_back(&self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error> {
        // Nobody else could bring it back meanwhile.
        if service_loop::is_mine() {
            return Ok(false);
        }
        loop {
            if locked(&self.server()).link().is_some() {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "the client did not come back within the time of the call";
                return Err(Error::new(Kind::Timeout, text));
            }
            // poll(2) could only object to the time, which is valid.
            let _ = wait::poll(&mut [], Some(left.min(STAND_IN)), mask);
        }
    }

    fn credits(&self, ask: Option<u32>) -> u32 {
        let mut slot = self.slot();
        let server = slot.server.clone();
        let mut state = locked(&server);
        let Some(link) = state.link() else {
            slot.credits = ask.unwrap_or(slot.credits);
            return slot.credits;
        };
        if let Some(credits) = ask {
            slot.credits = link.engine.ask(credits);
            link.drain();
        }
        link.engine.asked()
    }

    fn reply_header(&self) -> usize {
        RPC_HEADER_MAX
    }

    fn max_reply(&self, _: &Config) -> usize {
        // What fits inline needs no Reply chunk, which a size-limited peer would not bear.
        let server = self.server();
        let mut state = locked(&server);
        state.link().map_or(1024, |link| link.engine.largest_short().1).saturating_sub(RPC_HEADER_MAX)
    }
}
