//! Joins the engine to a device, and does all the waiting for calls and replies.
//!
//! [`Link`] is the joint (`link`): it carries out what the engine asks for and feeds it what the device reports. Which device
//! that is, and how a connection begins, is in `start`. Around the link
//!
//! - [`Client`] is the connection of the end that opened it (`client`), shared by the threads and CLIENTs that use its socket.
//!   **Whoever waits does the work**: one thread drives, the others sleep until it wakes them to take their reply or to drive
//!   in their turn. The library has no thread of its own. Calls back from the server are served by `callback`. A connection
//!   that is of no use any more is replaced by `renewal`.
//! - [`Server`] is the connection of the end that accepted it, driven by the program's own loop (`server`). Its calls back
//!   to the client are made by [`Reverse`].
//!
//! What either end knows of its peer, and may ask of it, is in `peer`. What becomes of replies that the peer does not take is
//! in `backlog`.
//!
//! A wait first spins, if that has paid lately and nobody else wants the processor (`spin`): on two idle processors a reply
//! comes in less time than a sleep takes. A spin that finds nothing makes the next waits sleep at once.
//!
//! # Invariants
//! - A lock is never held while sleeping, except for the moments that an adapter takes to release memory (see `provider`). No
//!   C code of the program runs under a lock except the walks of bindings, which call nothing.
//! - Memory that the program lends for a call or a reply is no longer used once that call or reply is over.
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

/// How many of a connection's latest requests may be answered after their routines have returned.
pub const LATE: usize = 64;

/// Requests of one connection that are served before the program's loop looks at the others again.
const TURN: u32 = 64;

/// How long it serves them: a longer turn would keep others waiting. A turn serves at least one request, however long that
/// takes.
const TURN_TIME: Duration = Duration::from_millis(1);

/// The memory of the software devices, once somebody has needed it.
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
    // A process has one configuration, except in the tests.
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

    /// The properties of the device that the connection runs on.
    fn traits(&self) -> &'static Traits;

    /// Memory to encode into.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn message(&self) -> Result<Buf, Error>;

    /// Memory to encode a long message into, if the peer may read it while it is being encoded, and then takes it without
    /// asking.
    fn outbox(&self) -> Option<Buf> {
        None
    }

    /// An XID that no call of this direction of the connection uses.
    fn fresh_xid(&self) -> Xid;

    /// Makes a call and waits for its end. See [`Caller::call`].
    ///
    /// # Errors
    /// As [`Caller::call`].
    fn exchange(
        &self,
        xid: Xid,
        message: Message,
        expect: Expect,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Payload, Error>;

    /// Takes in what has arrived, and returns what can be sent now.
    fn room_to_send(&self) -> SendRoom;

    /// What is known of the peer, including what has arrived from it by now if that is `wanted`.
    ///
    /// # Errors
    /// Why the connection is lost.
    fn peer(&self, wanted: bool) -> Result<Peer, Error>;

    /// Asks the peer to change a characteristic, and waits until the change is made or rejected. The result is pending if
    /// neither has happened by `deadline`.
    ///
    /// # Errors
    /// `Invalid` when an earlier request is not settled; `Peer` when the peer does not know the extension, or not even
    /// Version Two; `ConnectionLost`.
    fn request(&self, what: Characteristic, deadline: Instant, mask: Mask<'_>) -> Result<Wish, Error>;

    /// Makes our Receives grow to `bytes`, on the next connection too.
    ///
    /// # Errors
    /// As [`Connection::raise_receives`]; `Peer` in Version One.
    fn raise_receives(&self, bytes: u32) -> Result<(), Error>;

    /// Ensures that memory which goes back to the program is no longer used.
    fn end(&self, loans: &[Loan]);

    /// After a call that failed as `NotSent`: whether the connection is up again, or will be for the next call. Waits if
    /// somebody else has to see to that.
    ///
    /// # Errors
    /// `Timeout` at `deadline`.
    fn await_reconnect(&self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error>;

    /// How many credits are requested; sets that number if `ask` is given.
    fn credits(&self, ask: Option<u32>) -> u32;

    /// The longest reply that a call makes room for unless the program asks for more, in bytes of results.
    fn max_reply(&self, config: &Config) -> usize;

    /// Room beside the results of a procedure without a binding: a reply's header, and what RPCSEC_GSS wraps around results.
    fn reply_header(&self) -> usize {
        REPLY_HEADER
    }

    /// Results of at least this length are received in the program's own memory.
    fn place_min(&self) -> usize {
        self.traits().place_min.max(LEND_MIN)
    }

    /// Makes a call: `message` begins with `xid`. Returns the RPC reply in stream order.
    ///
    /// Makes room for `max_reply` bytes where no binding bounds the reply. Eligible results go into `places`, in order. Once
    /// this has returned and its reply is dropped, nothing of `message` and `places` is held any more.
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
    /// Does not take the last credit, which only a reply gives back: in that case a call of procedure 0 of the same program
    /// goes first, and its reply shows that the earlier calls were consumed. A message too long for one Send is followed by
    /// such a call too, so that the peer has pulled the message when this returns.
    ///
    /// # Errors
    /// As [`Caller::call`]; `NotSent` when there is only one credit in all.
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
    /// As [`Connection::reply`]; the reason for the close when the connection is closed.
    ///
    /// No memory that was lent to `message` is in use when this returns.
    fn reply(&self, id: RequestId, message: Message) -> Result<(), Error>;

    /// Closes the connection because a reply cannot be made: nothing else would tell the peer.
    fn lose(&self, error: Error);

    /// The request has no reply yet: see [`Connection::defer`]. `to_child`: its routine has forked, and has most likely left
    /// the reply to the child.
    fn defer(&self, id: RequestId, to_child: bool);

    /// What has become of a deferred request.
    fn fate(&self, id: RequestId) -> Fate;

    /// The request gets no reply.
    fn discard(&self, id: RequestId);

    /// Ensures that memory which goes back to the program is no longer used.
    fn end(&self, loans: &[Loan]);

    /// How many credits are granted; sets that number if `grant` is given.
    fn grants(&self, grant: Option<u32>) -> u32;

    /// Whether the library has panicked while the connection was in use: the connection is not to be trusted then.
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
