//! Joins the engine and a device, and waits: whatever a call or a reply waits for, it waits here.
//!
//! [`Link`] is the joint (`link`): it carries out what the engine asks for and feeds it what the device reports. Which device
//! that is, and how a connection begins, is in `start`. Around the link
//!
//! - [`Client`] is the connection of the end that opened it (`client`), shared by the threads and CLIENTs that use its socket.
//!   **Whoever waits does the work**: one thread drives, the others sleep until it wakes them with their reply or with
//!   the driver's seat. There is no thread of our own. What the server calls back is served by `callback`; a connection
//!   that is of no use any more is replaced by `renewal`.
//! - [`Server`] is the connection of the end that accepted it, driven by the program's own loop (`server`). Its calls back
//!   to the client are made by [`Reverse`].
//!
//! What either knows of its peer, and may ask of it, is in `peer`; what becomes of replies that it does not take, in
//! `backlog`.
//!
//! Waiting first spins, if that has paid lately and nobody else wants the processor (`spin`): on two idle processors a reply
//! comes sooner than a sleep takes. A spin that finds nothing makes the next waits sleep at once.
//!
//! # Invariants
//! - A lock is never held while sleeping, but for the moments that an adapter takes to let go of memory (see `provider`).
//!   No C code of the program runs under it but the walks of bindings, which call nothing.
//! - Memory of the program that a call or a reply lends is not used any more when the call or the reply is over.
//! - After every input to the engine its output is drained (`Link::pump`).
#![forbid(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use once_cell::race::OnceBox;

use crate::config::Config;
use crate::connection::characteristics::Wish;
use crate::connection::{Connection, Expect, Fate, RPC_HEADER_MAX, RequestId};
use crate::error::Error;
use crate::memory::{Buf, Loan, Memory, Message, Payload, Sink};
use crate::provider::Traits;
use crate::signals;
use crate::stats::{self, Counter};
use crate::wire::Xid;
use crate::wire::characteristics::Characteristic;
use crate::xdr::LEND_MIN;

mod backlog;
pub mod busy;
pub mod callback;
mod calls;
mod client;
mod link;
#[cfg(test)]
mod load;
pub mod peer;
pub mod pulls;
mod renewal;
pub mod reverse;
mod server;
pub mod service_loop;
mod session;
mod spin;
pub mod start;
mod timing;

pub use backlog::Wait;
pub use client::Client;
#[cfg(feature = "tool")]
pub use link::Agreed;
pub use peer::Peer;
pub use reverse::Reverse;
pub use server::{Next, Server, Shared, Stage, locked, next, peer as peer_of, send_rest};
pub use start::{Room, START_TIMEOUT};

/// Of a connection, so many latest requests may be answered after their routines have returned.
pub const LATE: usize = 64;

/// Requests of one connection that are served before the program's loop looks at the others again.
const TURN: u32 = 64;

/// How long it serves them: a longer turn keeps others waiting, though not by less than one request takes.
const TURN_TIME: Duration = Duration::from_millis(1);

/// That of the software devices, once somebody has needed it.
static MEMORY: OnceBox<Arc<Memory>> = OnceBox::new();

/// As [`Memory::is_warm`].
#[inline]
pub fn is_warm() -> bool {
    MEMORY.get().is_some_and(|memory| memory.is_warm())
}

/// As [`Memory::cool`].
pub fn cool() -> Option<Duration> {
    MEMORY.get()?.cool()
}

/// The pools that all software connections of the process share.
pub fn memory(config: &Config) -> Arc<Memory> {
    if let Some(memory) = MEMORY.get() {
        return memory.clone();
    }
    let (_, receive) = config.receive_sizes(false);
    // A process has one configuration, but for the tests.
    let receive = if cfg!(test) { receive.max(256 << 10) } else { receive };
    let memory = Memory::new(receive, config.max_reply(false) + REPLY_HEADER, config.max_pulled);
    MEMORY.get_or_init(|| Box::new(memory)).clone()
}

/// See [`Caller::reply_header`].
pub const REPLY_HEADER: usize = 4096;

/// Makes calls on a connection: the end that opened it, or the other one in the reverse direction.
pub trait Caller: Send + Sync {
    /// The descriptor that the program knows the connection by.
    fn fd(&self) -> RawFd;

    /// What the device is like that it goes over.
    fn traits(&self) -> &'static Traits;

    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn message(&self) -> Result<Buf, Error>;

    /// The same for a long one, if the peer may read it while it is encoded, and then takes it without asking.
    fn outbox(&self) -> Option<Buf> {
        None
    }

    /// An XID that no call of this direction of the connection uses.
    fn fresh_xid(&self) -> Xid;

    /// Makes a call and waits for its end. See [`Caller::call`].
    ///
    /// # Errors
    /// As there.
    fn exchange(
        &self,
        xid: Xid,
        message: Message,
        expect: Expect,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Payload, Error>;

    /// Takes in what has arrived, and tells what can be sent now.
    fn room_to_send(&self) -> SendRoom;

    /// What is known of the peer; with what has arrived of it by now, if that is `wanted`.
    ///
    /// # Errors
    /// Why the connection is lost.
    fn peer(&self, wanted: bool) -> Result<Peer, Error>;

    /// Asks the peer to change a characteristic, and waits until that is done or rejected: pending if it is not by
    /// `deadline`.
    ///
    /// # Errors
    /// `Invalid` when an earlier request is not settled; `Peer` when the peer does not know the extension, or not even
    /// Version Two; `ConnectionLost`.
    fn request(&self, what: Characteristic, deadline: Instant, mask: Mask<'_>) -> Result<Wish, Error>;

    /// Has our Receives grow to so many bytes, on the next connection too.
    ///
    /// # Errors
    /// As [`Connection::raise_receives`]; `Peer` in Version One.
    fn raise_receives(&self, bytes: u32) -> Result<(), Error>;

    /// Sees to it that memory which the program gets back is not used any more.
    fn end(&self, loans: &[Loan]);

    /// After a call that failed as `NotSent`: whether the connection is there again, or will be for the next call. Waits
    /// for that if somebody else has to see to it.
    ///
    /// # Errors
    /// `Timeout` at `deadline`.
    fn await_reconnect(&self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error>;

    /// Credits that are asked for; sets them if some are given.
    fn credits(&self, ask: Option<u32>) -> u32;

    /// Longest replies that calls make room for unless the program says more, in bytes of results.
    fn max_reply(&self, config: &Config) -> usize;

    /// Room beside the results of a procedure without a binding: a reply's header, and what RPCSEC_GSS wraps around results.
    fn reply_header(&self) -> usize {
        REPLY_HEADER
    }

    /// Results from this length on are received in the program's own memory.
    fn place_min(&self) -> usize {
        self.traits().place_min.max(LEND_MIN)
    }

    /// Makes a call: `message` begins with `xid`. Returns the RPC reply in stream order.
    ///
    /// `max_reply` bytes are made room for where no binding bounds the reply; eligible results go into `places`, in their
    /// order. When this returns and its reply is dropped, nothing of `message` and `places` is held any more.
    ///
    /// # Errors
    /// `Timeout` at `deadline` (the call becomes an orphan, the connection lives on), or why the call failed.
    fn call(
        &self,
        xid: Xid,
        message: Message,
        max_reply: usize,
        places: Vec<Sink>,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Payload, Error> {
        stats::add(Counter::Calls, 1);
        let outcome = self.exchange(xid, message, Expect::Reply { max: max_reply, places }, deadline, mask);
        stats::add(Counter::Replies, outcome.is_ok().into());
        outcome
    }

    /// Sends a call that has no reply, or whose reply nobody awaits (batching).
    ///
    /// Does not take the last credit, which only a reply gives back: then a call of procedure 0 of the same program goes
    /// first, whose reply shows that the earlier ones were consumed. A message too long for one Send is followed by
    /// such a call too, so that the peer has pulled it when this returns.
    ///
    /// # Errors
    /// As [`Caller::call`]; `NotSent` when there is one credit in all.
    fn call_one_way(
        &self,
        xid: Xid,
        message: Message,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<(), Error> {
        stats::add(Counter::Calls, 1);
        let null = null_call(message.body());
        let room = self.room_to_send();
        let long = message.len() > room.short;
        if room.credits_left <= 1 {
            self.null(&null, deadline, mask)?;
        }
        self.exchange(xid, message, Expect::Nothing, deadline, mask)?;
        if long {
            self.null(&null, deadline, mask)?;
        }
        Ok(())
    }

    /// Makes a call of procedure 0.
    ///
    /// # Errors
    /// As [`Caller::call`].
    fn null(&self, call: &[u8; 40], deadline: Instant, mask: Mask<'_>) -> Result<(), Error> {
        let xid = self.fresh_xid();
        let message = with_xid(self.message()?, call, xid)?;
        drop(self.call(xid, message.into(), RPC_HEADER_MAX, Vec::new(), deadline, mask)?);
        Ok(())
    }
}

/// What a requester can send now.
#[derive(Clone, Copy, Debug)]
pub struct SendRoom {
    /// Calls that may be transmitted now.
    credits_left: u32,
    /// Longest message that goes without chunks, bytes.
    short: usize,
}

impl SendRoom {
    fn of(engine: &Connection) -> SendRoom {
        SendRoom { credits_left: engine.credits_left(), short: engine.largest_short().0 }
    }
}

/// Answers calls of a connection: the end that accepted it, or the other one in the reverse direction.
pub trait Callee: Send + Sync {
    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn message(&self) -> Result<Buf, Error>;

    /// As [`Caller::outbox`], for a long reply.
    fn outbox(&self) -> Option<Buf> {
        None
    }

    /// Sends a reply: the kernel has every byte when this returns, unless the peer is too slow to take them.
    ///
    /// # Errors
    /// As [`Connection::reply`]; the reason of the close when the connection is closed.
    ///
    /// No memory that was lent to `message` is in use when this returns.
    fn reply(&self, id: RequestId, message: Message) -> Result<(), Error>;

    /// A reply cannot be made: the connection is closed, since nothing else tells the peer.
    fn lose(&self, error: Error);

    /// The request has no reply yet: see [`Connection::defer`]. `to_child`: its routine has forked, and has most likely left it to
    /// the child.
    fn defer(&self, id: RequestId, to_child: bool);

    /// What has become of a request that was deferred.
    fn fate(&self, id: RequestId) -> Fate;

    /// The request gets no reply.
    fn discard(&self, id: RequestId);

    /// Sees to it that memory which the program gets back is not used any more.
    fn end(&self, loans: &[Loan]);

    /// Credits that are granted; sets them if some are given.
    fn grants(&self, grant: Option<u32>) -> u32;

    /// A panic of ours has happened while the connection was in use: it is not to be trusted.
    fn is_poisoned(&self) -> bool;
}

/// The signal mask of the caller, in force while it sleeps.
pub type Mask<'a> = Option<&'a signals::SignalMask>;

/// `call` with this XID.
fn with_xid(mut message: Buf, call: &[u8; 40], xid: Xid) -> Result<Buf, Error> {
    message.extend(call)?;
    message[..4].copy_from_slice(&xid.0.to_be_bytes());
    Ok(message)
}

/// A Call of procedure 0 with the program and version of `call`, AUTH_NONE, XID still to be set (RFC 5531 §9, §12.1).
fn null_call(call: &[u8]) -> [u8; 40] {
    let mut null = [0; 40];
    let same = call.len().min(20);
    null[..same].copy_from_slice(&call[..same]);
    null
}
