//! Memory that devices keep locked: each connection's share of what RLIMIT_MEMLOCK leaves for slabs.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::error::{Error, Kind};
use crate::process;
use crate::provider::{Options, Shortage};

/// Fewest credits that a connection is made with when memory is short.
pub(super) const CREDITS_MIN: u32 = 4;
/// Most connections that may be in the making on the passive side.
pub(super) const STARTING_MAX: usize = 64;

/// Bytes of slabs of this process.
pub(super) static LOCKED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of those that belong to connections whose peers have not yet shown that they are there.
pub(super) static STARTING: AtomicUsize = AtomicUsize::new(0);

/// A share of the memory that may be locked, given back when this is dropped.
pub(super) struct Locked {
    pub(super) bytes: usize,
    starting: bool,
}

impl Locked {
    /// Takes room for a connection with the fewest credits. `starting`: its peer has not yet shown that it is there.
    pub(super) fn least(options: &Options, starting: bool) -> Result<Locked, Shortage> {
        let (budget, bytes) = (budget(), bytes(options, least(options)));
        let take = |of: &AtomicUsize, most: usize| {
            let fits = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= most);
            of.fetch_update(Relaxed, Relaxed, fits).is_ok()
        };
        let starting_max = (budget / 2).max(bytes).min(bytes.saturating_mul(STARTING_MAX));
        if starting && !take(&STARTING, starting_max) {
            return Err(Shortage::Starting);
        }
        let mut locked = Locked { bytes: 0, starting };
        if !take(&LOCKED, budget) {
            if starting {
                STARTING.fetch_sub(bytes, Relaxed);
                locked.starting = false;
            }
            return Err(Shortage::Memory);
        }
        locked.bytes = bytes;
        Ok(locked)
    }

    /// The peer is there.
    pub(super) fn established(&mut self) {
        if std::mem::replace(&mut self.starting, false) {
            STARTING.fetch_sub(self.bytes, Relaxed);
        }
    }

    /// Takes room for as many credits as the connection may have, and returns how many. The first connections leave room for
    /// others.
    pub(super) fn grow(&mut self, options: &Options) -> u32 {
        let (budget, least) = (budget(), least(options));
        let mut credits = options.credits;
        while credits > least {
            let bytes = bytes(options, credits);
            let fits = |held: usize| {
                let others = held - self.bytes;
                (bytes <= budget.saturating_sub(others) / 7).then(|| others + bytes)
            };
            if LOCKED.fetch_update(Relaxed, Relaxed, fits).is_ok() {
                self.bytes = bytes;
                break;
            }
            credits = (credits / 2).max(least);
        }
        credits
    }

    /// Gives back all but room for the fewest credits.
    pub(super) fn shrink(&mut self, options: &Options) {
        let bytes = bytes(options, least(options)).min(self.bytes);
        LOCKED.fetch_sub(self.bytes - bytes, Relaxed);
        self.bytes = bytes;
    }

    /// Gives back all but `kept` bytes, which count for ever.
    pub(super) fn end(mut self, kept: usize) {
        self.established();
        self.bytes = self.bytes.saturating_sub(kept);
    }
}

/// What a connection that lacks memory fails with.
pub(super) fn lacks(shortage: Shortage, options: &Options) -> Error {
    let bytes = bytes(options, least(options));
    let text = match shortage {
        Shortage::Memory => format!(
            "no room for another RDMA connection: its buffers take {bytes} bytes, {} are taken, and half of \
                 RLIMIT_MEMLOCK is {}; raise it (ulimit -l, LimitMEMLOCK=), or lower {}",
            LOCKED.load(Relaxed),
            budget(),
            if options.slab > options.receive { "RPCRDMA_MAX_INLINE" } else { "RPCRDMA_INLINE" }
        ),
        Shortage::Starting => format!(
            "too many connections are being made: their buffers take {} bytes",
            STARTING.load(Relaxed)
        ),
    };
    Error::new(Kind::Os(libc::ENOMEM), text)
}

/// Bytes of slabs that the process may lock.
pub(super) fn budget() -> usize {
    process::memlock_limit().map_or(usize::MAX, |bytes| bytes / 2)
}

/// Slabs of a connection with this many credits: for Receives, for as many messages in the hands of the program, and for
/// some Sends, two slabs each.
pub(super) fn count(options: &Options, credits: u32) -> usize {
    (2 * credits + options.margin + 2 * credits.min(16)) as usize
}

pub(super) fn bytes(options: &Options, credits: u32) -> usize {
    options.slab.next_multiple_of(4096).saturating_mul(count(options, credits))
}

pub(super) fn least(options: &Options) -> u32 {
    CREDITS_MIN.min(options.credits)
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.established();
        LOCKED.fetch_sub(self.bytes, Relaxed);
    }
}
