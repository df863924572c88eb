//! The credits of a connection, of both directions (RFC 8166 §3.3, RFC 8167 §4), and the Receives that they need.
#![forbid(unsafe_code)]

use super::Role;
use crate::wire::Credits;
use crate::wire::header::Direction;

/// The credits that an end tells its peer: asked for in Calls, granted in Replies.
#[derive(Clone, Copy)]
struct Advertised {
    /// Told from now on; 0: nothing is sent in this direction yet.
    now: u32,
    /// The most so far. Receives for them are kept to the end of the connection: nothing says when the peer has learned that
    /// there are fewer.
    most: u32,
}

impl Advertised {
    fn set(&mut self, credits: u32) {
        *self = Advertised { now: credits, most: self.most.max(credits) };
    }
}

/// The credits of a connection.
pub(super) struct Window {
    /// Receives of the device that credits may take, those of both directions together.
    capacity: u32,
    asked: Advertised,
    granting: Advertised,
    /// Granted by the last reply; 1 before the first one.
    granted: u32,
    /// A reply has told `granted`.
    told: bool,
    /// Calls transmitted and not ended: each holds a credit.
    in_flight: u32,
    /// Those of them that nobody waits for.
    abandoned: u32,
}

impl Window {
    pub(super) fn new(role: Role, credits: u32, capacity: u32) -> Window {
        let none = Advertised { now: 0, most: 0 };
        // RFC 8166 §3.3.3: "a Requester MUST NOT assume more than one credit is available and MUST receive a valid
        // reply from the Responder carrying the actual number of available credits, prior to sending its next
        // request."
        let mut window = Window {
            capacity,
            asked: none,
            granting: none,
            granted: 1,
            told: false,
            in_flight: 0,
            abandoned: 0,
        };
        match role {
            Role::Client => window.ask(credits),
            Role::Server => window.grant(credits),
        };
        window
    }

    /// Asks for this many from now on; returns how many it will be.
    pub(super) fn ask(&mut self, credits: u32) -> u32 {
        let credits = self.fit(credits, self.granting);
        self.asked.set(credits);
        credits
    }

    /// Grants this many from now on; returns how many it will be.
    pub(super) fn grant(&mut self, credits: u32) -> u32 {
        let credits = self.fit(credits, self.asked);
        self.granting.set(credits);
        credits
    }

    /// Each direction leaves one Receive to the other.
    fn fit(&self, credits: u32, other: Advertised) -> u32 {
        // RFC 8166 §3.3.1: "The granted value MUST NOT be zero, since such a value would result in deadlock."
        credits.min(self.capacity.saturating_sub(other.most.max(1))).max(1)
    }

    /// The credits in a header of ours: never 0, as above.
    pub(super) fn told(&self, direction: Direction) -> Credits {
        let Advertised { now, .. } = match direction {
            Direction::Call => self.asked,
            Direction::Reply => self.granting,
        };
        Credits(now.max(1))
    }

    /// Receives that the credits told so far need.
    pub(super) fn receives(&self) -> u32 {
        self.asked.most + self.granting.most
    }

    /// Whether the peer may call.
    pub(super) fn serves(&self) -> bool {
        self.granting.most > 0
    }

    /// Credits asked for; 0: we make no calls.
    pub(super) fn asked(&self) -> u32 {
        self.asked.now
    }

    /// The grant of the last reply (1 before the first).
    pub(super) fn granted(&self) -> u32 {
        self.granted
    }

    /// Whether a reply has told how many credits there are.
    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    /// A reply grants this many.
    pub(super) fn set_granted(&mut self, credits: Credits) {
        // RFC 8166 §3.3.1: "The granted value MUST NOT be zero": a zero is taken as one, or nothing moves again.
        self.granted = credits.0.max(1);
        self.told = true;
    }

    /// Most calls at a time.
    pub(super) fn limit(&self) -> u32 {
        self.asked.now.min(self.granted)
    }

    /// Calls that may be transmitted now.
    pub(super) fn left(&self) -> u32 {
        // RFC 8166 §3.3.1: "The number of allowed new requests the Requester may send is then the lower of the current
        // requested and granted credit values, minus the number of requests in flight."
        self.limit().saturating_sub(self.in_flight)
    }

    /// A call is transmitted.
    pub(super) fn take(&mut self) {
        self.in_flight += 1;
    }

    /// Nobody waits for a transmitted call any more.
    pub(super) fn abandon(&mut self) {
        self.abandoned += 1;
    }

    /// A transmitted call has ended.
    pub(super) fn give_back(&mut self, abandoned: bool) {
        self.in_flight -= 1;
        self.abandoned -= u32::from(abandoned);
    }

    /// Transmitted calls that nobody waits for.
    pub(super) fn abandoned(&self) -> u32 {
        self.abandoned
    }

    /// Whether calls that nobody waits for hold every credit.
    ///
    /// False while a call that somebody waits for is under way, as after a smaller grant: its reply may help.
    pub(super) fn starved(&self) -> bool {
        self.abandoned >= self.limit() && self.abandoned == self.in_flight
    }

    /// Calls transmitted and not ended.
    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_credit_until_a_reply_tells_and_then_the_lower_of_asked_and_granted() {
        let mut window = Window::new(Role::Client, 8, 64);
        assert_eq!((window.left(), window.is_told()), (1, false));
        window.take();
        assert_eq!(window.left(), 0);
        window.set_granted(Credits(32));
        assert_eq!((window.left(), window.limit()), (7, 8));
        window.set_granted(Credits(2));
        window.take();
        window.take();
        // A smaller grant does not call back what is under way.
        assert_eq!((window.limit(), window.left(), window.in_flight()), (2, 0, 3));
        window.set_granted(Credits(0));
        assert_eq!(window.limit(), 1, "a grant of zero is taken as one");
    }

    #[test]
    fn only_calls_that_nobody_waits_for_starve_a_connection() {
        let mut window = Window::new(Role::Client, 2, 64);
        window.set_granted(Credits(2));
        window.take();
        window.take();
        assert!(!window.starved(), "they are waited for");
        window.abandon();
        assert!(!window.starved(), "one is");
        window.abandon();
        assert!(window.starved());
        window.give_back(true);
        assert_eq!((window.starved(), window.abandoned(), window.left()), (false, 1, 1));
    }

    #[test]
    fn the_directions_share_the_receives_and_none_is_left_without() {
        let mut window = Window::new(Role::Server, 100, 16);
        assert_eq!((window.receives(), window.serves(), window.asked()), (15, true, 0));
        assert_eq!(window.ask(8), 1, "one Receive is left to the other direction");
        assert_eq!(window.grant(4), 4);
        // The earlier credits were told, and may still be used.
        assert_eq!((window.receives(), window.told(Direction::Reply)), (16, Credits(4)));
        assert_eq!(
            Window::new(Role::Client, 4, 16).told(Direction::Reply),
            Credits(1),
            "a grant is never zero"
        );
    }
}
