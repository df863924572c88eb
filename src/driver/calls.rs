//! The calls of one direction of a connection, and how they ended.
#![forbid(unsafe_code)]

use crate::connection::Connection;
use crate::error::{Error, Kind};
use crate::memory::Payload;
use crate::process;
use crate::wire::Xid;

use super::link::Outcome;
use super::peer;

/// Calls of either end.
#[derive(Default)]
pub(super) struct Calls {
    /// How calls ended, until whoever waits for them has taken that: mostly none or one, and never more than there are threads
    /// that wait.
    pub(super) outcomes: Vec<Outcome>,
    /// Calls of procedure 0 that nobody waits for: their replies bring credits.
    pub(super) greetings: Vec<Xid>,
    /// Characteristics that the peer is asked to change.
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
    /// Agreement on a version, in this thread.
    Version(usize),
    /// Callbacks, in this thread.
    Callbacks(usize),
}

impl Calls {
    pub(super) fn new() -> Calls {
        Calls { next_xid: process::random_u32(), ..Calls::default() }
    }

    /// Whether what `waiter` waits for is there. A wait for a version or for callbacks has no such end.
    pub(super) fn is_over(&self, waiter: Waiter) -> bool {
        match waiter {
            Waiter::Call(xid) => self.outcomes.iter().any(|(ended, _)| *ended == xid),
            Waiter::Peer(number) => self.requests.is_over(number),
            Waiter::Version(_) | Waiter::Callbacks(_) => false,
        }
    }

    /// Makes room for the outcome of one more call, beside `others` that are under way. With many calls this takes a longer
    /// block than the reserve of memory has.
    ///
    /// # Errors
    /// `Invalid` when a thread has not taken yet how a call with this XID has ended: it would take the other one's outcome.
    /// `ENOMEM`.
    pub(super) fn make_room(&mut self, xid: Xid, others: usize) -> Result<(), Error> {
        if self.is_over(Waiter::Call(xid)) {
            return Err(Error::new(Kind::Invalid, format!("a call with XID {xid} is under way")));
        }
        self.outcomes
            .try_reserve(others + 1)
            .map_err(|_| Error::new(Kind::Os(libc::ENOMEM), "no memory for how one more call ends"))
    }

    /// Notes how calls ended, if no earlier outcomes are left. In that case `done` is empty afterwards, and has as much room
    /// as before.
    pub(super) fn take_all(&mut self, done: &mut Vec<Outcome>) -> bool {
        let alone = self.outcomes.is_empty() && self.greetings.is_empty();
        if alone {
            // Both have room for the ends of all calls under way.
            std::mem::swap(&mut self.outcomes, done);
        }
        alone
    }

    /// Notes how a call ended. Returns false when nobody is to take the outcome.
    pub(super) fn end(&mut self, xid: Xid, outcome: Result<Payload, Error>) -> bool {
        if let Some(at) = self.greetings.iter().position(|greeting| *greeting == xid) {
            self.greetings.swap_remove(at);
            return false;
        }
        self.outcomes.push((xid, outcome));
        true
    }

    /// How a call has ended, for whoever waits for it.
    pub(super) fn take(&mut self, xid: Xid) -> Option<Result<Payload, Error>> {
        let at = self.outcomes.iter().position(|(ended, _)| *ended == xid)?;
        Some(self.outcomes.swap_remove(at).1)
    }

    /// An XID that no call of this direction of the connection uses.
    pub(super) fn fresh_xid(&mut self, engine: &Connection) -> Xid {
        loop {
            self.next_xid = self.next_xid.wrapping_add(1);
            let xid = Xid(self.next_xid);
            if !engine.knows(xid) && !self.is_over(Waiter::Call(xid)) {
                return xid;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reserve::testing::NoLongBlocks;

    /// Whatever was taken out meanwhile, and whatever that has left in the table.
    #[test]
    fn calls_that_have_begun_end_without_memory() {
        let mut calls = Calls::new();
        let (mut under_way, mut begun) = (std::collections::VecDeque::new(), 0);
        let none = NoLongBlocks::from_here();
        let refused = loop {
            match calls.make_room(Xid(begun), under_way.len()) {
                Ok(()) => under_way.push_back(Xid(begun)),
                Err(error) => break error,
            }
            begun += 1;
            // Of every three calls one ends, and its outcome is taken.
            if begun % 3 == 0
                && let Some(xid) = under_way.pop_front()
            {
                assert!(calls.end(xid, Ok(Payload::default())));
                assert!(calls.take(xid).is_some());
            }
        };
        assert_eq!(refused.kind(), Kind::Os(libc::ENOMEM));
        assert!(under_way.len() > 100);
        let before = calls.outcomes.len();
        let ended = under_way.len();
        assert!(under_way.into_iter().all(|xid| calls.end(xid, Ok(Payload::default()))));
        assert_eq!(calls.outcomes.len(), before + ended);
        drop(none);
        assert!(calls.make_room(Xid(begun), 0).is_ok());
    }
}
