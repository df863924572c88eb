//! Calls that are waited for, of either end of a connection.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, MutexGuard};
use std::time::Instant;

use crate::connection::Connection;
use crate::error::Error;
use crate::memory::Region;
use crate::process;
use crate::wire::Xid;

use super::link::Link;
use super::peer;

/// Calls that are waited for, of either end.
#[derive(Default)]
pub(super) struct Calls {
    pub(super) outcomes: HashMap<Xid, Result<Vec<Region>, Error>>,
    /// Threads that sleep until they are woken, each on its own condition.
    pub(super) sleepers: HashMap<Waiter, Arc<Condvar>>,
    /// One of them may have to serve a request in the midst of its own: nobody else does.
    pub(super) servant: Option<Arc<Condvar>>,
    pub(super) next_xid: u32,
    /// What the peer is asked to be.
    pub(super) requests: peer::Requests,
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Waiter {
    /// The end of a call.
    Call(Xid),
    /// The answer to a request for a characteristic.
    Peer(u32),
    /// A version, in this thread.
    Version(usize),
    /// Callbacks, in this thread.
    Callbacks(usize),
}

impl Calls {
    pub(super) fn new() -> Calls {
        Calls { next_xid: process::random_u32(), ..Calls::default() }
    }

    /// Hands outcomes to their waiters.
    pub(super) fn settle(&mut self, link: &mut Link) {
        for (xid, outcome) in link.done.drain(..) {
            if let Some(condition) = self.sleepers.get(&Waiter::Call(xid)) {
                condition.notify_one();
            }
            self.outcomes.insert(xid, outcome);
        }
        if link.request_ready()
            && let Some(condition) = &self.servant
        {
            condition.notify_one();
        }
        if !self.requests.is_empty() {
            self.requests.settle(link);
            for (waiter, condition) in &self.sleepers {
                if matches!(waiter, Waiter::Peer(number) if self.requests.is_over(*number)) {
                    condition.notify_one();
                }
            }
        }
    }

    /// Whether what is waited for is there. Callbacks have no such end.
    pub(super) fn is_over(&self, waiter: Waiter) -> bool {
        match waiter {
            Waiter::Call(xid) => self.outcomes.contains_key(&xid),
            Waiter::Peer(number) => self.requests.is_over(number),
            Waiter::Version(_) | Waiter::Callbacks(_) => false,
        }
    }

    /// An XID that no call of this direction of the connection uses.
    pub(super) fn fresh_xid(&mut self, engine: &Connection) -> Xid {
        loop {
            self.next_xid = self.next_xid.wrapping_add(1);
            let xid = Xid(self.next_xid);
            if !engine.knows(xid) {
                return xid;
            }
        }
    }

    /// Wakes one of those who sleep without an outcome. False when there is none.
    pub(super) fn wake_one(&self) -> bool {
        let sleeper = self.sleepers.iter().find(|(waiter, _)| !self.is_over(**waiter));
        let sleeper = sleeper.map(|(_, condition)| condition);
        sleeper.map(|condition| condition.notify_one()).is_some()
    }
}

/// Sleeps on a condition, at most until `deadline`.
pub(super) fn sleep<'a, T>(
    condition: &Condvar,
    state: MutexGuard<'a, T>,
    deadline: Instant,
) -> MutexGuard<'a, T> {
    let left = deadline.saturating_duration_since(Instant::now());
    condition.wait_timeout(state, left).map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state)
}
