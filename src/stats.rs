//! What this process has done, and is doing: one table of counters, its connections, and how long its calls take.
//!
//! Owns the counters and their names, and the page that others may watch (`page`): the counters move there with the first
//! connection; the connections (`connections`) and the histograms (`latency`) live only there. The modules that do the work count
//! it; `capi`, the log and `rpcrdma stat` show it. Counters are process-wide, begin at 0 and only grow; a forked child goes on
//! from its parent's values. They are relaxed atomics: each is exact, but a snapshot is not a consistent cut through all of them.
//!
//! # Invariants
//! - The table is an array of 64-bit numbers in the order of [`NAMES`], which C programs see: a new counter
//!   is added at the end, and none is ever removed or moved.
//! - Nothing that this process does depends on what the page holds: others of the same user may have changed it.
#![deny(unsafe_code)] // Not forbid: the page is a mapping.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

mod connections;
pub mod latency;
pub mod layout;
mod page;

pub use connections::{Connection, Facts, Figures};
pub use latency::{Names, Procedure, Recent, clock, instant, processor_time, tick};
pub use page::{begin, is_watched};

macro_rules! counters {
    ($(#[doc = $doc:literal] $variant:ident $name:literal,)*) => {
        /// One counter; its value is its place in the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        #[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "adapters alone count some"))]
        pub enum Counter {
            $(#[doc = $doc] $variant,)*
        }

        /// The counters' names, in the order of the table.
        pub const NAMES: &[&str] = &[$($name),*];

        /// What each of them counts, for those who collect them.
        #[cfg(feature = "tool")]
        pub const HELP: &[&str] = &[$($doc),*];
    };
}

counters! {
    /// Calls given to the transport by this process as a client.
    Calls "calls",
    /// Replies that completed such a call.
    Replies "replies",
    /// Requests handed to a program of this process as a server.
    Served "served",
    /// Payload bytes sent or received inside RDMA_MSG.
    BytesInline "bytes_inline",
    /// Bytes moved by our RDMA Reads.
    BytesRead "bytes_read",
    /// Bytes moved by our RDMA Writes.
    BytesWritten "bytes_written",
    /// Payload bytes copied in user space, beyond what the device does.
    BytesCopied "bytes_copied",
    /// Payload bytes copied out of a socket's read-ahead buffer; not part of `bytes_copied`.
    BytesReadAhead "bytes_read_ahead",
    /// Registrations of memory with a device, for a handle given to a peer or for a request of our own.
    Registrations "registrations",
    /// Handles that were invalidated, by us or by the peer.
    Invalidations "invalidations",
    /// Sends posted.
    Sends "sends",
    /// Receives completed.
    Receives "receives",
    /// System calls on the data path.
    Syscalls "syscalls",
    /// Connections established, both ends counted.
    Connections "connections",
    /// Calls that had to wait for a credit.
    CreditsWaited "credits_waited",
    /// RDMA_ERROR messages sent.
    ErrorsSent "errors_sent",
    /// RDMA_ERROR messages received.
    ErrorsReceived "errors_received",
    /// Connections re-established for a CLIENT that had lost its connection.
    Reconnects "reconnects",
    /// Clients that fell back from rdma to tcp.
    Fallbacks "fallbacks",
    /// Calls that timed out with their credit still out.
    Orphans "orphans",
    /// Chains of requests that were handed to an adapter, each with one doorbell.
    Doorbells "doorbells",
    /// Memory windows bound, in such a chain: handles for memory that is already registered.
    Binds "binds",
}

/// Counters in the table.
pub const COUNT: usize = NAMES.len();

/// Where the counters are until there is a page, and where there is none.
static TABLE: Table = [const { AtomicU64::new(0) }; COUNT];

type Table = [AtomicU64; COUNT];

/// Called in a forked child, which has only one thread: what may be watched is its parent's. Uses only system calls and atomic
/// words.
pub fn forked() {
    page::forked();
    connections::forget();
    latency::forget();
}

/// Adds `n` to a counter.
#[inline]
pub fn add(counter: Counter, n: u64) {
    // Most calls copy or register nothing: that must not take the cache line from another thread.
    if n > 0 {
        page::counters()[counter as usize].fetch_add(n, Relaxed);
    }
}

/// The table at this moment, in the order of [`NAMES`].
pub fn snapshot() -> [u64; COUNT] {
    let moved = page::moved_counters();
    // A thread that had this table in hand while the page was made has counted there.
    std::array::from_fn(|at| {
        TABLE[at].load(Relaxed).wrapping_add(moved.map_or(0, |table| table[at].load(Relaxed)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Other tests of this process count too, so only lower bounds hold.
    #[test]
    fn what_is_added_to_a_counter_is_seen_in_its_place() {
        let before = snapshot();
        add(Counter::Calls, 1);
        add(Counter::Binds, 1 << 40);
        let after = snapshot();
        assert!(after[0] > before[0]);
        assert!(after[COUNT - 1] - before[COUNT - 1] >= 1 << 40);
    }

    #[test]
    fn every_counter_has_a_name_of_its_own_in_its_place() {
        assert_eq!(NAMES[Counter::BytesCopied as usize], "bytes_copied");
        assert_eq!(NAMES[Counter::Binds as usize], "binds");
        assert_eq!(Counter::Binds as usize, COUNT - 1);
        let mut names = NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), COUNT);
    }
}
