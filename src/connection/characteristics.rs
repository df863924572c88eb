//! The transport characteristics of both ends (draft-dnoveck-nfsv4-rpcrdma-xcharext-01): what we have told, what the peer is
//! like, and what is under way. The engine sends what [`Characteristics::next`] says and hands in what arrives.
//!
//! # The size of Receives
//! The peer may send messages as long as the size that we have told it. So that size is raised only when no shorter Receive is
//! left on the device, and lowered only because the peer has asked for it: an end that asks keeps to the smaller size from then
//! on (section 3.1). Receives are consumed in the order in which they were posted; where the device does not give them back, a
//! raise is complete when traffic has consumed the last short one.
//!
//! # Messages without a reply
//! No credit counts them, so both ends keep Receives for them, and a sender has only one of them under way at a time: until the
//! reply to something that it sent later. An UPD_XCHAR that answers a REQ_XCHAR is exempt, since the end that asked keeps a
//! Receive for it. Where nothing else is sent, a REQ_XCHAR that asks for nothing brings such a reply.
//!
//! # Where the draft leaves it open
//! - Only the first 32 places of a REQ_XCHAR's list can be named in 32 bits; those after them are in no subset, and so rejected.
//! - A place that RESP_XCHAR leaves out, or names twice, counts as rejected.
//! - A second INIT_XCHAR replaces what it names. If a characteristic is named twice, the last value counts.
//! - Fewer than [`RECEIVE_MIN`] bytes are a bad value: a header with chunks would not fit, nor the first message.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::wire::Xid;
use crate::wire::characteristics::{Backward, Characteristic, Operation, Spec};

/// Smallest size of a Receive that is told or asked for: the size that a first message may have.
pub const RECEIVE_MIN: usize = 1024;

/// What an end of a connection is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Bytes of its shortest Receives.
    pub receive_size: usize,
    /// Replies to its calls may use Send with Invalidate.
    pub remote_invalidation: bool,
    /// What it takes in the reverse direction.
    pub backward: Backward,
}

impl Endpoint {
    /// The characteristic of the same kind as `like`.
    pub fn get(&self, like: Characteristic) -> Characteristic {
        match like {
            Characteristic::ReceiveSize(_) => Characteristic::ReceiveSize(self.receive_size as u32),
            Characteristic::RemoteInvalidation(_) => {
                Characteristic::RemoteInvalidation(self.remote_invalidation)
            }
            Characteristic::Backward(_) => Characteristic::Backward(self.backward),
        }
    }

    fn set(&mut self, value: Characteristic) {
        match value {
            Characteristic::ReceiveSize(bytes) => self.receive_size = bytes as usize,
            Characteristic::RemoteInvalidation(allowed) => self.remote_invalidation = allowed,
            Characteristic::Backward(support) => self.backward = support,
        }
    }
}

/// What became of a request of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// No answer yet.
    Asked,
    /// The peer will do it or refuse it later.
    Pending,
    /// In force.
    Done,
    /// Refused.
    Rejected,
}

/// A message of the extension to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// INIT_XCHAR: what we are like.
    Init,
    /// REQ_XCHAR for one characteristic, or for none.
    Request(Option<Characteristic>),
    /// UPD_XCHAR, and whether it settles a request of the peer.
    Update(Characteristic, bool),
}

/// The answer to a REQ_XCHAR: places done, rejected and pending.
pub type Response = (u32, u32, u32);

/// See the top of this file.
pub struct Characteristics {
    own: Endpoint,
    peer: Endpoint,
    /// INIT_XCHAR was sent.
    told: bool,
    /// Whether the peer knows the extension; `None` before it has shown that.
    known: Option<bool>,
    /// How often the peer has said something about itself.
    updates: u32,
    /// Receives that the device holds, oldest first, as runs: the size in bytes, and how many.
    receives: VecDeque<(usize, u32)>,
    /// Bytes of the Receives that we post.
    goal: usize,
    /// Largest Receives that we may agree to.
    most: usize,
    /// A request of the peer to change the size of our Receives is pending.
    owed: bool,
    /// What we now take in the reverse direction.
    backward: Backward,
    /// Our latest request, and what became of it.
    wish: Option<(Characteristic, Wish)>,
    /// The REQ_XCHAR under way: its XID, its place in the order of what we send, what it asks for.
    request: Option<(Xid, u64, Option<Characteristic>)>,
    /// The message under way that has no reply: its XID and its place in the order of what we send.
    unfunded: Option<(Xid, u64)>,
}

impl Characteristics {
    /// At the start: what we would tell, what the peer is taken to be, and Receives of `goal` bytes.
    pub fn new(own: Endpoint, peer: Endpoint, goal: usize, most: usize) -> Characteristics {
        let most = most.max(goal);
        Characteristics {
            own,
            peer,
            told: false,
            known: None,
            updates: 0,
            receives: VecDeque::new(),
            goal,
            most,
            owed: false,
            backward: own.backward,
            wish: None,
            request: None,
            unfunded: None,
        }
    }

    /// What we have told the peer, or what it assumes.
    pub fn own(&self) -> &Endpoint {
        &self.own
    }

    /// What the peer is like, as far as we know.
    pub fn peer(&self) -> &Endpoint {
        &self.peer
    }

    /// Whether the peer knows the extension; `None` before it has shown that.
    pub fn known(&self) -> Option<bool> {
        self.known
    }

    /// How often the peer has said something about itself.
    pub fn updates(&self) -> u32 {
        self.updates
    }

    /// Our latest request, and what became of it.
    pub fn wish(&self) -> Option<(Characteristic, Wish)> {
        self.wish
    }

    /// Longest Send that the peer takes.
    ///
    /// Section 3.1: an end that asks for a smaller size keeps to it from the moment of asking, until the request is rejected or
    /// no longer pending.
    pub fn send_limit(&self) -> usize {
        match self.wish {
            Some((Characteristic::ReceiveSize(bytes), Wish::Asked | Wish::Pending)) if self.was_sent() => {
                self.peer.receive_size.min(bytes as usize)
            }
            _ => self.peer.receive_size,
        }
    }

    /// Whether the latest wish has been sent.
    fn was_sent(&self) -> bool {
        match self.wish {
            Some((what, Wish::Asked)) => self.request.is_some_and(|(.., asked)| asked == Some(what)),
            wish => wish.is_some(),
        }
    }

    // ------------------------------------------------------------------------------------------------- Receives

    /// Receives that the device holds.
    pub fn held(&self) -> u32 {
        match self.receives.front() {
            // They nearly always have one size.
            Some((_, count)) if self.receives.len() == 1 => *count,
            _ => self.receives.iter().map(|(_, count)| count).sum(),
        }
    }

    /// The same, if all of them have the size that is posted from now on.
    pub fn held_alike(&self) -> Option<u32> {
        match self.receives.front() {
            Some((bytes, count)) if self.receives.len() == 1 && *bytes == self.goal => Some(*count),
            _ => None,
        }
    }

    /// Bytes of the Receives that are posted from now on.
    pub fn goal(&self) -> usize {
        self.goal
    }

    /// A Receive was posted; returns its size.
    pub fn posted(&mut self) -> usize {
        match self.receives.back_mut() {
            Some((bytes, count)) if *bytes == self.goal => *count += 1,
            _ => self.receives.push_back((self.goal, 1)),
        }
        self.goal
    }

    /// The oldest Receive was consumed.
    pub fn consumed(&mut self) {
        if let Some((_, count)) = self.receives.front_mut() {
            *count -= 1;
            if *count == 0 {
                self.receives.pop_front();
            }
        }
    }

    /// The device gave back the newest `count` Receives.
    pub fn withdrawn(&mut self, mut count: u32) {
        while count > 0
            && let Some((_, last)) = self.receives.back_mut()
        {
            let taken = count.min(*last);
            (count, *last) = (count - taken, *last - taken);
            if *last == 0 {
                self.receives.pop_back();
            }
        }
    }

    /// Bytes of the shortest Receive that a message of the peer may meet.
    fn shortest(&self) -> usize {
        self.receives.iter().map(|(bytes, _)| *bytes).fold(self.goal, usize::min)
    }

    /// Whether the device holds Receives shorter than the goal.
    pub fn lags(&self) -> bool {
        self.shortest() < self.goal
    }

    /// Posts Receives of `bytes` bytes from now on. Returns false when they would be shorter than the peer was told, or longer
    /// than allowed.
    pub fn raise(&mut self, bytes: usize) -> bool {
        let allowed = (self.own.receive_size..=self.most).contains(&bytes);
        if allowed {
            self.goal = bytes;
        }
        allowed
    }

    /// We take this in the reverse direction from now on.
    pub fn set_backward(&mut self, support: Backward) {
        self.backward = support;
        if !self.told {
            self.own.backward = support;
        }
    }

    // -------------------------------------------------------------------------------------------------- messages

    /// Notes that we want the peer to have this characteristic. Returns false while another wish is not settled.
    pub fn want(&mut self, what: Characteristic) -> bool {
        let free = !matches!(self.wish, Some((_, Wish::Asked | Wish::Pending)));
        if free {
            self.wish = Some((what, Wish::Asked));
        }
        free
    }

    /// Whether a message of the extension with this XID is under way.
    pub fn holds(&self, xid: Xid) -> bool {
        self.unfunded.is_some_and(|(own, _)| own == xid) || self.request.is_some_and(|(own, ..)| own == xid)
    }

    /// Whether the peer has yet to say what becomes of our latest request.
    pub fn is_asking(&self) -> bool {
        matches!(self.wish, Some((_, Wish::Asked | Wish::Pending)))
    }

    /// What is to be sent now. [`Self::sent`] then marks it as sent.
    pub fn next(&self) -> Option<Note> {
        if !self.told {
            return Some(Note::Init);
        }
        if self.known != Some(true) {
            return None;
        }
        let mut blocked = false;
        if (self.owed || self.goal != self.own.receive_size) && !self.lags() {
            if self.owed || self.unfunded.is_none() {
                return Some(Note::Update(Characteristic::ReceiveSize(self.goal as u32), self.owed));
            }
            blocked = true;
        }
        if self.backward != self.own.backward {
            if self.unfunded.is_none() {
                return Some(Note::Update(Characteristic::Backward(self.backward), false));
            }
            blocked = true;
        }
        match self.wish {
            _ if self.request.is_some() => None,
            Some((what, Wish::Asked)) => Some(Note::Request(Some(what))),
            _ => blocked.then_some(Note::Request(None)),
        }
    }

    /// A note was sent as message `xid`, which is the `sequence`th that we sent.
    pub fn sent(&mut self, note: Note, xid: Xid, sequence: u64) {
        match note {
            Note::Init => {
                self.told = true;
                self.own.receive_size = self.shortest();
                self.unfunded = Some((xid, sequence));
            }
            Note::Request(what) => self.request = Some((xid, sequence, what)),
            Note::Update(value, settled) => {
                self.own.set(value);
                if settled {
                    self.owed = false;
                } else {
                    self.unfunded = Some((xid, sequence));
                }
            }
        }
    }

    /// What an INIT_XCHAR of ours says, and which of its places will not change.
    pub fn introduction(&self) -> ([Characteristic; 3], u32) {
        let Endpoint { remote_invalidation, backward, .. } = self.own;
        let size = Characteristic::ReceiveSize(self.shortest() as u32);
        let invalidation = Characteristic::RemoteInvalidation(remote_invalidation);
        ([size, invalidation, Characteristic::Backward(backward)], 1 << 1)
    }

    /// A reply to the `sequence`th message that we sent has arrived: those before it were consumed.
    pub fn replied(&mut self, sequence: u64) {
        if self.unfunded.is_some_and(|(_, own)| own < sequence) {
            self.unfunded = None;
        }
    }

    /// An RDMA2_ERROR has arrived for message `xid`: the peer does not know it. Returns false when the message is none of these.
    pub fn refused(&mut self, xid: Xid) -> bool {
        if let Some((_, sequence, what)) = self.request.take_if(|(own, ..)| *own == xid) {
            self.replied(sequence);
            // Support of REQ_XCHAR is OPTIONAL (section 4): a peer without it does none of what is asked for.
            self.settle(what, Wish::Rejected);
            return true;
        }
        if self.unfunded.take_if(|(own, _)| *own == xid).is_none() {
            return false;
        }
        if self.known.is_none() {
            self.unavailable();
        }
        true
    }

    /// The peer does not know the extension.
    pub fn unavailable(&mut self) {
        self.known = Some(false);
        self.unfunded = None;
        let what = self.wish.map(|(what, _)| what);
        self.settle(what, Wish::Rejected);
    }

    fn settle(&mut self, what: Option<Characteristic>, end: Wish) {
        if let (Some(what), Some((wanted, wish @ (Wish::Asked | Wish::Pending)))) = (what, &mut self.wish)
            && *wanted == what
        {
            *wish = end;
        }
    }

    fn learn(&mut self, values: impl Iterator<Item = Characteristic>) {
        values.for_each(|value| self.peer.set(value));
        self.updates = self.updates.wrapping_add(1);
    }

    /// Takes in a message of the extension and returns the answer that it needs. `withdraw` makes the device give Receives back
    /// and counts them.
    ///
    /// # Errors
    /// If a value makes no sense; then nothing in the message counts.
    pub fn handle(
        &mut self,
        xid: Xid,
        operation: Operation<'_>,
        withdraw: &mut dyn FnMut() -> usize,
    ) -> Result<Option<Response>, &'static str> {
        let too_small = |value| matches!(value, Some(Characteristic::ReceiveSize(bytes)) if (bytes as usize) < RECEIVE_MIN);
        match operation {
            Operation::Init { start, .. } if start.iter().any(|value| too_small(value.known)) => {
                return Err("Receives too small for a header");
            }
            Operation::Update { now, .. } if too_small(now.known) => {
                return Err("Receives too small for a header");
            }
            _ => self.known = Some(true),
        }
        match operation {
            Operation::Init { start, .. } => {
                self.learn(start.iter().filter_map(|value| value.known));
            }
            Operation::Request { want } => return Ok(Some(self.asked(want, withdraw))),
            Operation::Response { done, rejected, pending } => {
                let Some((_, sequence, what)) = self.request.take_if(|(own, ..)| *own == xid) else {
                    return Ok(None);
                };
                self.replied(sequence);
                match (done.contains(0), rejected.contains(0), pending.contains(0)) {
                    (true, false, false) => {
                        self.learn(what.into_iter());
                        self.settle(what, Wish::Done);
                    }
                    (false, false, true) => self.settle(what, Wish::Pending),
                    _ => self.settle(what, Wish::Rejected),
                }
            }
            Operation::Update { now, settled } => {
                let Some(value) = now.known else { return Ok(None) };
                self.learn(std::iter::once(value));
                if settled
                    && let Some((wanted, Wish::Pending)) = self.wish
                    && self.peer.get(wanted) == value
                {
                    let end = if wanted == value { Wish::Done } else { Wish::Rejected };
                    self.settle(Some(wanted), end);
                }
            }
        }
        Ok(None)
    }

    /// The peer wants us to change a characteristic.
    fn asked(&mut self, want: Spec<'_>, withdraw: &mut dyn FnMut() -> usize) -> Response {
        let (mut done, mut rejected, mut pending) = (0, 0, 0);
        for (place, value) in want.iter().take(32).enumerate() {
            let answer = match value.known {
                Some(Characteristic::ReceiveSize(bytes)) => self.resize(bytes as usize, withdraw),
                Some(value) if self.own.get(value) == value => Wish::Done,
                _ => Wish::Rejected,
            };
            *match answer {
                Wish::Done => &mut done,
                Wish::Pending => &mut pending,
                Wish::Rejected | Wish::Asked => &mut rejected,
            } |= 1 << place;
        }
        (done, rejected, pending)
    }

    /// The peer wants our Receives to have `bytes` bytes.
    fn resize(&mut self, bytes: usize, withdraw: &mut dyn FnMut() -> usize) -> Wish {
        if !(RECEIVE_MIN..=self.most).contains(&bytes) {
            return Wish::Rejected;
        }
        self.goal = bytes;
        self.renew(withdraw);
        if self.lags() {
            self.owed = true;
            return Wish::Pending;
        }
        // An earlier request that is still pending is settled by an UPD_XCHAR with this same value.
        self.own.receive_size = bytes;
        Wish::Done
    }

    /// Makes the device give back Receives that are too short.
    pub fn renew(&mut self, withdraw: &mut dyn FnMut() -> usize) {
        if self.lags() {
            let count = withdraw();
            self.withdrawn(count as u32);
        }
    }
}
