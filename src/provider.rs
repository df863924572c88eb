//! What a device must offer: a connected queue pair that speaks verbs.
//!
//! The engine and the driver above know only this trait and, about the device below it, what its [`Traits`] say. There is
//! one implementation per device of [`DEVICES`], among them [`iwarp`] (software iWARP on a TCP socket) and `verbs`
//! (adapters). How a connection comes about is up to its [`Device`].
//!
//! # Contract
//! - Nothing blocks, except to make a device let go of memory that it is using: `release_lent`, `invalidate` and `close` of
//!   an adapter wait for its completions, for at most a second, a tenth and two tenths of a second, respectively. `post*`
//!   queues work and starts it; [`QueuePair::poll`] moves bytes both ways and returns at most one completion per call,
//!   `None` when there is nothing to do until the fd is ready.
//! - Memory is passed by value: a work request owns a clone of what it names until it is complete, so the caller
//!   needs no completion to keep memory alive (see `memory`).
//! - Memory lent by the program is named by handles and by work requests, never by Receives. `invalidate`, `detach`,
//!   `release_lent`, `close` and drop take it back at once: when they return, the handles and work concerned hold no clone of
//!   it.
//! - Completions of one kind come in the order in which the requests were posted; Receives complete in the order
//!   of the peer's Sends, each after everything that the peer sent before it has been placed (RFC 5040 §5.5).
//! - The first error ends the queue pair: `poll` returns it then and on every later call, and every handle is dead.
#![deny(unsafe_code)] // Not forbid: the device behind `verbs` speaks C.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::memory::shared::Shown;
use crate::memory::{Areas, Buf, Memory, Region, Regions, Sink, Slabs};
use crate::wire::{Handle, Segment};

mod device;
#[cfg(test)]
pub mod fault;
pub mod iwarp;
pub mod local;
#[cfg(test)]
mod toy;
#[cfg(feature = "verbs")]
pub mod verbs;

pub use crate::memory::shared::Bell;
pub use device::{Accepted, DEVICES, Device, Knock, Listener, Options, Places, Shortage, Traits, Way};

/// What a thread that drives a connection, and waits for nothing else, may sleep on.
pub enum Doze {
    /// Until the peer rings.
    Bell(Bell),
    /// In recvfrom(2) on this socket: one system call in place of two, to wait and to receive. The sleep ends by itself
    /// after [`NAP`].
    Stream(RawFd),
}

/// How long a thread may sleep on a stream. At most [`NAP_BYTES`] are taken then: the rest is left to `poll`.
pub const NAP: Duration = Duration::from_millis(10);
/// See [`NAP`]: a page of data with what surrounds it. These bytes lie on the stack, and are copied once more.
pub const NAP_BYTES: usize = 4096 + 512;

/// What a device and the negotiation with the peer allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// RDMA Reads that we may have outstanding (ORD), after negotiation. 0: the peer serves none.
    pub read_depth: u32,
    /// Most bytes that one handle may cover and one Read or Write may move.
    pub max_segment: u32,
    /// Whether every handle that `expose_*` returns may be invalidated by the peer's Send.
    pub remote_invalidation: bool,
    /// Most Receives that may be posted at a time.
    pub receives: u32,
}

/// Names a request in its completion; chosen by the caller, opaque to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkId(pub u64);

/// Work for the send queue, done in order.
#[derive(Debug)]
pub enum WorkRequest {
    /// One Send: the concatenation of `gather`. Never completes visibly; its memory is dropped once it is sent.
    Send {
        /// Pieces of the message, in order.
        gather: Regions,
        /// Send with Invalidate of this handle of the peer.
        invalidate: Option<Handle>,
    },
    /// One RDMA Write of the concatenation of `gather` to the peer's memory from `to.offset` on.
    /// `to.length` is the number of bytes written. Never completes visibly.
    Write {
        /// Source.
        gather: Regions,
        /// The peer's memory; `length` equals the sum of `gather`.
        to: Segment,
    },
    /// One RDMA Read of `from.length` bytes into `sink` from byte `at` on. Completes as [`Completion::Read`].
    Read {
        /// Returned in the completion.
        id: WorkId,
        /// Where the bytes go.
        sink: Sink,
        /// Offset in `sink`.
        at: usize,
        /// The peer's memory.
        from: Segment,
    },
}

/// What happened.
#[derive(Debug)]
pub enum Completion {
    /// A Send of the peer, in the first `len` bytes of a posted Receive.
    Received {
        /// The Receive, oldest first. The device no longer holds a clone of it.
        sink: Sink,
        /// Bytes received.
        len: usize,
        /// The handle of ours that the peer's Send invalidated.
        invalidated: Option<Handle>,
    },
    /// An RDMA Read has placed all its bytes.
    Read {
        /// As posted.
        id: WorkId,
    },
}

/// A connected queue pair, with handles of its own: none of them works on another connection.
pub trait QueuePair: Send {
    /// One non-blocking step of the startup; true when the connection is established. Until then, nothing else may be
    /// asked of the queue pair except what its descriptor waits for.
    ///
    /// # Errors
    /// `ConnectionLost` when the peer closed without a complete answer, `Protocol` for a bad one, `Peer` when it refused.
    /// The connection is of no use after that.
    fn establish(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    /// What the device is like.
    fn traits(&self) -> &'static Traits;

    /// From here on the connection's socket, if it has one, is known by this descriptor.
    fn rename(&mut self, _socket: RawFd) {}

    /// Memory that the device knows already: Receives must lie there, and what lies there is sent without a copy.
    fn slabs(&self) -> Option<Arc<Slabs>> {
        None
    }

    /// As [`QueuePair::slabs`], for Reply chunks.
    fn areas(&self) -> Option<Arc<Areas>> {
        None
    }

    /// What may be asked of the queue pair.
    fn limits(&self) -> Limits;

    /// The device and what it agreed on with its peer, in words for the log: "software iWARP, CRC on".
    fn describe(&self) -> String;

    /// RFC 8797 private data of the peer, as received (empty if none).
    fn private_data(&self) -> &[u8];

    /// Lets the peer read `region` until it is invalidated. The peer learns of it from what is posted later.
    ///
    /// # Errors
    /// When the device cannot register, or the region is longer than [`Limits::max_segment`].
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error>;

    /// Lets the peer write `sink` until it is invalidated. The peer learns of it from what is posted later.
    ///
    /// # Errors
    /// As [`QueuePair::expose_source`].
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error>;

    /// Ends the exposure: when this returns, no byte of that memory moves any more, and the device holds no clone of it.
    /// (For memory that the peer may write all the time, see `Areas::stay_open`.)
    ///
    /// Unknown or already invalidated handles are no error: the peer may have invalidated the handle remotely.
    ///
    /// # Errors
    /// When the device cannot promise this; the connection must then be closed before the memory is used (RFC 8166
    /// §4.5.4).
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error>;

    /// Keeps the handle working for the peer, but lets go of the memory: a sink is replaced by nothing, and what the peer
    /// writes is thrown away; a lent source is replaced by a private copy of what the peer may still read. (A source of
    /// our own is frozen and stays.) For a call that nobody waits for any more.
    ///
    /// A device that cannot replace memory keeps memory of our own until the handle is invalidated.
    ///
    /// # Errors
    /// When the device cannot let go of lent memory; the connection must then be closed before that memory is used.
    fn detach(&mut self, handle: Handle) -> Result<(), Error>;

    /// Whether the peer has asked for every byte of a source, and has been answered as far as the device is concerned;
    /// `None` if the device cannot tell.
    fn was_read(&self, _handle: Handle) -> Option<bool> {
        None
    }

    /// Copies what queued work still names of lent memory, and lets go of that memory; returns the bytes copied. Handles
    /// are not touched. What arrives meanwhile is left to the next `poll`, which is due even if the fd does not say so.
    /// An RDMA Read into lent memory completes as usual, but bytes that have not arrived yet are thrown away.
    ///
    /// # Errors
    /// When there is no memory for the copies; the connection must then be closed before the lent memory is used.
    fn release_lent(&mut self) -> Result<usize, Error>;

    /// Posts a Receive of `sink.len()` bytes of our own memory.
    fn post_recv(&mut self, sink: Sink);

    /// Posts a Receive of `bytes` bytes. A device that writes memory itself takes it from `memory` when a message comes.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn post_recv_of(&mut self, memory: &Arc<Memory>, bytes: usize) -> Result<(), Error> {
        self.post_recv(memory.slab()?.into_sink(bytes));
        Ok(())
    }

    /// Takes back posted Receives in which nothing has been placed, newest first; returns how many. 0 if the device keeps
    /// what it has.
    fn withdraw(&mut self) -> usize {
        0
    }

    /// Queues work and starts as much of it as is possible without blocking (call `poll` for the rest).
    fn post(&mut self, request: WorkRequest);

    /// Sends what the device takes, receives what is there, returns the next completion.
    ///
    /// # Errors
    /// The error that ended the queue pair, or the peer's orderly close as an error of kind `ConnectionLost`.
    fn poll(&mut self) -> Result<Option<Completion>, Error>;

    /// Whether [`QueuePair::poll`] has just found all that there was, so that it need not be called again.
    fn drained(&mut self) -> bool {
        false
    }

    /// Sends what the device takes of the queued work, without receiving. Returns whether all of it has gone.
    ///
    /// # Errors
    /// As [`QueuePair::poll`].
    fn flush(&mut self) -> Result<bool, Error>;

    /// Sends something without meaning, for a peer that may not have noticed our first message.
    fn nudge(&mut self) {}

    /// Checks that the peer is still there, without its program noticing: it must have answered before the next call.
    ///
    /// # Errors
    /// The peer has not answered since the last call: the connection is at its end.
    fn probe(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether the connection, which other processes may have too, by fork(2), is this process's: it made the connection, or the
    /// process that did has ended and has read nothing from it since the fork; nor has any process sent anything since, unless
    /// this end only `answers`, and has no calls that those processes would know. False as well when another process has taken
    /// the connection over.
    fn claim(&mut self, _answers: bool) -> bool {
        true
    }

    /// Whether another process has read from the connection, or has taken it over, since this one was forked, which can make
    /// nothing of what follows.
    fn has_missed(&mut self) -> bool {
        false
    }

    /// Becomes readable when `poll` has something to do, and writable when queued work can go on, unless
    /// [`Traits::one_event`] says otherwise.
    fn fd(&self) -> RawFd;

    /// From here on the connection is polled without a pause until [`QueuePair::rest`]: the fd need report nothing. Returns
    /// whether a look that finds nothing costs no system call.
    fn spin(&mut self) -> bool {
        false
    }

    /// Whether something may have arrived, as far as a look that costs nothing can tell.
    fn has_come(&self) -> bool {
        true
    }

    /// Whether the fd will report all that is left to do, so that a thread may wait for it; otherwise `poll` is due at once,
    /// and this stays false until `poll` has been called. To be called before each wait.
    fn rest(&mut self) -> bool {
        true
    }

    /// The connection is no longer polled without a pause, and nobody waits for the fd either: a thread that waits for it
    /// later calls [`QueuePair::rest`] first. Returns whether `poll` has nothing to do, as far as is known.
    fn leave(&mut self) -> bool {
        self.rest()
    }

    /// As [`QueuePair::rest`], for a thread that sleeps on what this returns and on nothing else, with a time limit of its own.
    /// That is cheaper than the fd, which reports nothing meanwhile. `None` if there is nothing to sleep on, or the last such
    /// sleep was of no use.
    fn doze(&mut self) -> Option<Doze> {
        None
    }

    /// Takes what a sleep on [`Doze::Stream`] has brought, if anything, before anything else is received; `None` if the
    /// socket does not let a thread sleep.
    fn arrived(&mut self, _bytes: Option<&[u8]>) {}

    /// Tells the peer how many others this process is serving now: they want processors of the same host too.
    fn tell_company(&mut self, _others: u32) {}

    /// How many others the peer is serving now, if it is on this host and as far as it tells us.
    fn company(&self) -> u32 {
        0
    }

    /// Memory to encode a long message into; the peer may take what is exposed there without asking. For one message at a
    /// time, and for a connection that has had long ones. The peer can read everything that is written there, even before it
    /// is sent.
    fn outbox(&mut self) -> Option<Buf> {
        None
    }

    /// Lets the peer take what lies at this address without asking, instead of having it written to its memory behind `handle`.
    /// Returns the offset that says so; `None` if the address is not in the outbox. The memory must be kept
    /// ([`QueuePair::keep`]).
    fn show(&mut self, _address: usize, _handle: Handle) -> Option<u64> {
        None
    }

    /// Keeps `region`, which is shown under `handle`, until the peer has taken it.
    fn keep(&mut self, _region: Region, _handle: Handle) {}

    /// What a segment of the peer names, if it can be taken without asking.
    fn shown(&mut self, _segment: Segment) -> Option<Shown> {
        None
    }

    /// Whether what arrives is for this process. A forked child leaves it to its parent, unless the child has received
    /// something.
    fn is_receiver(&self) -> bool {
        true
    }

    /// How often the peer had to be woken for what it was sent, as far as is known: a peer that is woken is late.
    fn wakes(&self) -> u64 {
        0
    }

    /// Wakes a peer that claims to be looking by itself but has not looked for a while. Returns when to call this again, if at
    /// all. To be called before each wait for the peer.
    fn remind(&mut self) -> Option<Instant> {
        None
    }

    /// Whether writability of the fd matters: queued work waits for it.
    fn wants_write(&self) -> bool;

    /// Bytes moved so far, both ways: while this grows, a long message is under way.
    fn moved(&self) -> u64;

    /// Bytes that have left this host for good, as far as the device can tell: grows while the peer takes what it is sent,
    /// whatever else it says.
    fn taken(&self) -> u64;

    /// Bytes that our RDMA Reads have brought so far: shows whether the peer answers them, whatever else it says.
    fn pulled(&self) -> u64;

    /// Ends the connection, and tells the peer if the device can. From here on every handle is dead.
    ///
    /// A process that inherited the connection by fork(2) ends it for itself alone.
    fn close(&mut self);

    /// Bytes of queued work not yet taken by the device, or what the work holds in memory, if that is more. After the end
    /// of the connection: the value at its end.
    fn unsent(&self) -> usize;
}
