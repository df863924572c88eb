//! Calls back, at the end that accepted the connection: [`Reverse`] makes them.
//!
//! The connection belongs to the program's service loop, which reads it whenever something comes. So its bytes are moved by
//!
//! - the loop, while another thread's call waits for the reply that the loop will find;
//! - the calling thread itself, where it is the loop's own: from a dispatch routine, or between two turns of the loop. It then
//!   serves the requests of the connection too, because the callback may call forward before it answers;
//! - the calling thread, while the loop's thread is inside a dispatch routine, and perhaps waits for this one;
//! - the calling thread, while nobody is in the loop, as far as can be told: it has been left, or what has come for this
//!   connection has been there for a while and nobody has looked at any connection.
//!
//! The loop must be told of what a thread beside it has taken off the connection: poll(2) will not tell it.
//! [`service_loop`] knows where the loop is.
#![forbid(unsafe_code)]

use crate::process;
use crate::provider::Traits;
use crate::stats;
use crate::wait;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::connection::characteristics::Wish;
use crate::connection::{Expect, RPC_HEADER_MAX};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Message, Payload};
use crate::wire::Xid;
use crate::wire::characteristics::Characteristic;

use super::calls::Waiter;
use super::link::Link;
use super::peer::Peer;
use super::server::{Phase, Server, Shared, locked};
use super::service_loop;
use super::session::{self, Locked, Policy, State, Turn, Wake};
use super::{Callee, Caller, Mask, SendRoom};

/// How long a call back trusts that the loop reads its connection, before it checks whether the loop is busy.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Makes calls back to the client of a connection, and later to the same client on another connection.
pub struct Reverse {
    slot: Mutex<Slot>,
    hooks: &'static Hooks,
}

struct Slot {
    server: Arc<Shared>,
    /// Credits that are requested, on the next connection too.
    credits: u32,
    chunks: bool,
    /// The least size of our Receives, in bytes, if the program has set one.
    receive_size: Option<u32>,
}

/// What only the program's loop can do.
pub struct Hooks {
    /// Makes the loop serve what is there of the connection with this descriptor.
    pub serve: fn(RawFd),
    /// Makes the loop look at [`ServiceLoop::take_left`](service_loop::ServiceLoop::take_left) in its next turn. Called in its
    /// own thread.
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
        Ok(Arc::new(Reverse { slot: Mutex::new(slot), hooks }))
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

    /// Waits until what `waiter` waits for is there, or until `deadline`.
    fn wait_for<'a>(
        &self,
        server: &'a Shared,
        state: MutexGuard<'a, Server>,
        waiter: Waiter,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> MutexGuard<'a, Server> {
        let caller = Awaiting { server, hooks: self.hooks, stuck: Cell::new(false), unread: Cell::new(None) };
        session::wait_for(&caller, state, waiter, deadline, mask)
    }

    /// This thread no longer waits: somebody else drives, and the loop hears of what is left for it.
    fn leave(&self, mut state: MutexGuard<'_, Server>) {
        let home = state.home;
        if !state.session.is_driven() {
            state.session.wake_one();
        }
        if home.is_mine()
            && let Some(fd) = state.for_loop()
        {
            home.leave(fd);
        }
        drop(state);
        if home.is_idle_here() {
            (self.hooks.wake)();
        }
    }
}

/// A thread that waits for the reply to a call back.
struct Awaiting<'a> {
    server: &'a Shared,
    hooks: &'static Hooks,
    /// The loop serves nothing more on this connection.
    stuck: Cell<bool>,
    /// Something has come; and how often the loop had looked at any connection by then.
    unread: Cell<Option<u64>>,
}

impl<'a> Locked<'a> for Awaiting<'a> {
    type State = Server;

    fn lock(&self) -> MutexGuard<'a, Server> {
        locked(self.server)
    }
}

impl Awaiting<'_> {
    /// Whether this thread serves a request that is there.
    fn may_serve(&self, state: &Server) -> bool {
        !self.stuck.get() && state.home.may_nest() && state.request_ready()
    }
}

impl<'a> Policy<'a> for Awaiting<'a> {
    fn serve(&self, state: MutexGuard<'a, Server>, _: Mask<'_>) -> (MutexGuard<'a, Server>, bool) {
        if !self.may_serve(&state) {
            return (state, false);
        }
        let nested = service_loop::nest();
        let (fd, received) = (state.fd, state.received);
        drop(state);
        (self.hooks.serve)(fd);
        drop(nested);
        let state = self.lock();
        self.stuck.set(state.received == received);
        (state, true)
    }

    fn turn(&self, state: &mut Server, _: Waiter) -> Turn {
        let home = state.home;
        let reads = home.may_read();
        let free = match state.parts() {
            (session, Some(link)) => session.may_drive(link),
            (session, None) => !session.is_driven(),
        };
        if free && (reads || state.wants_write()) {
            return Turn::Drive { spins: home.is_mine() };
        }
        let serves = home.is_mine();
        if !serves && !reads {
            let looks = home.looks();
            // The descriptor does not tell of what the loop was about to look at by itself.
            let came = state.link().is_some_and(|link| !link.device.rest())
                || wait::until(state.fd, wait::IN, Some(Duration::ZERO), None).unwrap_or(false);
            if came && self.unread.take() == Some(looks) {
                home.is_away();
                return Turn::Look;
            }
            self.unread.set(came.then_some(looks));
        }
        Turn::Sleep { until: Some(Instant::now() + LOOK_EVERY), serves }
    }

    fn is_over(&self, state: &mut Server, waiter: Waiter) -> bool {
        self.may_serve(state) || state.session.calls.is_over(waiter) || state.link().is_none()
    }

    fn wake(&self, state: &mut Server, _: bool) -> Wake {
        let home = state.home;
        let retry = state.link().and_then(|link| link.retry_at());
        // The loop may take from the connection what this thread sleeps for; and where one event tells of everything, so may a
        // thread that answers a request.
        let look = !home.is_mine() || state.traits.one_event;
        let look = look.then(|| Instant::now() + LOOK_EVERY);
        let until = retry.into_iter().chain(look).min();
        let reads = home.may_read();
        let at_once = reads && state.link().is_some_and(|link| !link.device.rest());
        Wake { at_once, ..Wake::new((state.fd, reads, state.wants_write()), -1, until) }
    }

    fn move_on(&self, state: &mut Server, _: &Wake, _: bool) {
        let home = state.home;
        if state.session.another_reads() {
            // That thread was woken by the same bytes, and waits for them.
            return state.send();
        }
        if home.is_mine() {
            return state.pump();
        }
        match home.read_instead(|| state.read_for_loop()) {
            Some(true) => (self.hooks.ring)(),
            Some(false) => {}
            None => state.send(),
        }
    }
}

impl Slot {
    fn begin(&self) -> Result<(), Error> {
        let mut server = locked(&self.server);
        let link = server.usable()?;
        link.ask(self.credits);
        link.engine.set_reverse_chunks(self.chunks);
        link.raise_again(self.receive_size);
        link.drain();
        Ok(())
    }
}

impl Server {
    /// Whether `receive` would return one.
    pub fn request_ready(&self) -> bool {
        matches!(&self.phase, Phase::Open(link) if link.request_ready())
    }

    /// As `pump`, beside the loop, which is to be told of requests.
    pub(super) fn read_for_loop(&mut self) -> Option<RawFd> {
        self.pump();
        self.for_loop()
    }

    /// The connection, if there is something in memory that the loop is to see to.
    pub(super) fn for_loop(&mut self) -> Option<RawFd> {
        // The end of the connection is the loop's to see. So is what the peer does not take now, and a long Call that waits
        // for memory or makes others wait.
        let watched = self.awaits_peer() || self.waits_for_memory().is_some() || self.pulling();
        (watched || self.request_ready() || self.link().is_none()).then_some(self.fd)
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

impl Caller for Reverse {
    fn fd(&self) -> RawFd {
        locked(&self.server()).fd
    }

    fn traits(&self) -> &'static Traits {
        locked(&self.server()).traits
    }

    fn message(&self) -> Result<Buf, Error> {
        Callee::message(&*self.server())
    }

    fn fresh_xid(&self) -> Xid {
        let server = self.server();
        let Server { session, phase, .. } = &mut *locked(&server);
        match phase {
            Phase::Open(link) => session.calls.fresh_xid(&link.engine),
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
    ) -> Result<Payload, Error> {
        let server = self.server();
        let mut state = locked(&server);
        let others = state.usable()?.engine.calls();
        state.session.calls.make_room(xid, others)?;
        state.usable()?.begin(xid, message, expect)?;
        state.settle();
        let waiter = Waiter::Call(xid);
        state = self.wait_for(&server, state, waiter, deadline, mask);
        let (session, link) = state.parts();
        let outcome = session.outcome(link, xid);
        if outcome.is_ok() {
            // A client that only answers has been heard too.
            state.heard = stats::clock();
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
        let home = state.home;
        if home.is_mine() {
            state.pump();
        } else if home.read_instead(|| state.read_for_loop()) == Some(true) {
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
        let Server { session, phase: Phase::Open(link), .. } = &mut *state else {
            return Err(state.phase.why_not());
        };
        let number = session.calls.requests.begin(link, what)?;
        let waiter = Waiter::Peer(number);
        state.settle();
        state = self.wait_for(&server, state, waiter, deadline, mask);
        let outcome = state.session.calls.requests.take(number);
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

    fn room_to_send(&self) -> SendRoom {
        let server = self.server();
        let mut state = locked(&server);
        match &mut state.phase {
            Phase::Open(link) => SendRoom::of(&link.engine),
            Phase::Starting(_) | Phase::Failed(_) => SendRoom { credits_left: 1, short: usize::MAX },
        }
    }

    fn end(&self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            Callee::end(&*self.server(), loans);
        }
    }

    fn await_reconnect(&self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error> {
        loop {
            let server = self.server();
            let mut state = locked(&server);
            if state.home.is_mine() {
                // Nobody else could bring the connection back meanwhile.
                return Ok(false);
            }
            if state.link().is_some() {
                return Ok(true);
            }
            drop(state);
            drop(server);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "the client did not come back within the time of the call";
                return Err(Error::new(Kind::Timeout, text));
            }
            // poll(2) could only object to the time, which is valid.
            let _ = wait::poll(&mut [], Some(left.min(LOOK_EVERY)), mask);
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
            slot.credits = link.ask(credits);
            link.flush();
        }
        link.engine.asked()
    }

    fn reply_header(&self) -> usize {
        RPC_HEADER_MAX
    }

    fn max_reply(&self, _: &Config) -> usize {
        // What fits inline needs no Reply chunk, which a size-limited peer would not tolerate.
        let server = self.server();
        let mut state = locked(&server);
        state.link().map_or(1024, |link| link.engine.largest_short().1).saturating_sub(RPC_HEADER_MAX)
    }
}
