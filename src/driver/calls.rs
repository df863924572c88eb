//! The calls of one direction of a connection, and how they ended.
#![forbid(unsafe_code)]

use crate::connection::Connection;
use crate::error::Error;
use crate::memory::Regions;
use crate::process;
use crate::wire::Xid;

use super::peer;

/// Calls of either end.
#[derive(Default)]
pub(super) struct Calls {
    /// Of calls that ended, until whoever waits for them has taken them: mostly none or one, and never more than there are
    /// threads that wait.
    pub(super) outcomes: Vec<(Xid, Result<Regions, Error>)>,
    /// Calls of procedure 0 that nobody waits for: their replies give credits.
    pub(super) greetings: Vec<Xid>,
    /// What the peer is asked to be.
    pub(super) requests: peer::Requests,
    pub(super) next_xid: u32,
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

    /// Whether what is waited for is there. Callbacks have no such end.
    pub(super) fn is_over(&self, waiter: Waiter) -> bool {
        match waiter {
            Waiter::Call(xid) => self.outcomes.iter().any(|(ended, _)| *ended == xid),
            Waiter::Peer(number) => self.requests.is_over(number),
            Waiter::Version(_) | Waiter::Callbacks(_) => false,
        }
    }

    /// Notes how a call ended. False when nobody is to take it.
    pub(super) fn end(&mut self, xid: Xid, outcome: Result<Regions, Error>) -> bool {
        if let Some(at) = self.greetings.iter().position(|greeting| *greeting == xid) {
            self.greetings.swap_remove(at);
            return false;
        }
        self.outcomes.push((xid, outcome));
        true
    }

    /// How a call has ended, for whoever waits for it.
    pub(super) fn take(&mut self, xid: Xid) -> Option<Result<Regions, Error>> {
        let at = self.outcomes.iter().position(|(ended, _)| *ended == xid)?;
        Some(self.outcomes.swap_remove(at).1)
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
}
