//! When the requests of a connection were handed up, until they are answered: for the histograms of `stats`.
#![forbid(unsafe_code)]

use crate::connection::{Request, RequestId};
use crate::stats::Names;

/// How many requests are timed at once. Beyond that the oldest are forgotten: these are one-way calls, which get no reply.
const MOST: usize = 4096;

/// The requests that have no reply yet.
#[derive(Default)]
pub(super) struct Timing {
    /// The last one: mostly there is no other.
    last: Option<Open>,
    /// Those before it.
    others: Vec<Open>,
}

#[derive(Clone, Copy)]
struct Open {
    id: RequestId,
    names: Names,
    began: u64,
}

impl Timing {
    /// A request is handed up, `now` by [`clock`](crate::stats::clock).
    #[inline]
    pub(super) fn handed_up(&mut self, request: &Request, now: u64) {
        let head = request.message.first().map_or(&[][..], |piece| &piece[..]);
        if self.last.is_some() {
            self.keep();
        }
        self.last = Some(Open { id: request.id, names: Names::of(head), began: now });
    }

    /// Moves what was the last request to the others.
    #[inline(never)]
    fn keep(&mut self) {
        if self.others.len() >= MOST {
            self.others.drain(..MOST / 2);
        }
        // With many requests this takes a longer block than the reserve of memory has.
        if self.others.try_reserve(1).is_ok() {
            self.others.extend(self.last.take());
        }
    }

    /// What a request was for, and when it was handed up. Tells this once, when the request is answered or never will be.
    #[inline]
    pub(super) fn take(&mut self, id: RequestId) -> Option<(Names, u64)> {
        let open = match self.last {
            Some(last) if last.id == id => {
                self.last = None;
                last
            }
            _ => self.take_other(id)?,
        };
        Some((open.names, open.began))
    }

    #[inline(never)]
    fn take_other(&mut self, id: RequestId) -> Option<Open> {
        // Most replies are to one of the latest requests.
        let at = self.others.iter().rposition(|open| open.id == id)?;
        Some(self.others.remove(at))
    }
}
