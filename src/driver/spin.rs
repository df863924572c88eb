//! Whether a wait spins first, and how long.
#![forbid(unsafe_code)]

use crate::thread;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::link::Link;

/// Whether spinning before a sleep has paid lately.
///
/// It pays only where the peer has a processor of its own. A spin that finds something although the thread lost its
/// processor meanwhile has found what it had kept the peer from sending: when that is the rule it counts as a failure.
pub(super) struct Spin {
    /// How long a spin is; zero: there is none.
    poll: Duration,
    /// Waits that sleep at once before the next spin.
    skip: u32,
    /// What the next failure costs: 1, 2, 4 ... 1024 waits; a success halves it.
    penalty: u32,
    /// [`thread::preemptions`] at the end of the latest spin.
    preemptions: i64,
    /// Rises with each spin in which the processor was lost, falls with each other one.
    crowded: u32,
}

impl Spin {
    /// `poll`: [`Config::poll`](crate::config::Config::poll).
    pub(super) fn new(poll: Duration) -> Spin {
        Spin { poll, skip: 0, penalty: 0, preemptions: 0, crowded: 0 }
    }

    /// How long to spin now.
    pub(super) fn allowed(&mut self) -> Option<Duration> {
        if self.poll.is_zero() {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        // After many failures the peer may sleep before each message too, and takes longer than a spin: one of us must
        // wait for the other now and then, or both sleep for ever.
        Some(if self.penalty >= 64 { self.poll * 3 } else { self.poll })
    }

    pub(super) fn found(&mut self) {
        let before = std::mem::replace(&mut self.preemptions, thread::preemptions());
        if self.preemptions == before {
            self.penalty /= 2;
            self.crowded = self.crowded.saturating_sub(1);
            return;
        }
        self.crowded += 4;
        if self.crowded >= 16 {
            self.crowded = 0;
            self.failed();
        }
    }

    pub(super) fn failed(&mut self) {
        self.skip = self.penalty.max(1);
        self.penalty = (self.skip * 2).min(1024);
    }
}

/// A spin under way: it goes on as long as bytes move, and its limit beyond, but never longer than [`Patience::MOST`]
/// limits: somebody else may wait for this thread.
pub(super) struct Patience {
    limit: Duration,
    until: Instant,
    end: Instant,
    moved: u64,
    /// When to look whether somebody else waits.
    look: Instant,
    now: Instant,
}

/// Threads of this process that spin: one processor is left to others.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

impl Patience {
    const MOST: u32 = 40;

    /// How often a spin looks round, within its limit: not at once, for what comes soon shall cost no more.
    const LOOKS: u32 = 4;

    /// `None` when as many threads spin already as there are processors to spare.
    pub(super) fn new(limit: Duration, link: &Link) -> Option<Patience> {
        if SPINNING.fetch_add(1, Relaxed) + 1 >= processors() {
            SPINNING.fetch_sub(1, Relaxed);
            return None;
        }
        let now = Instant::now();
        Some(Patience {
            limit,
            until: now + limit,
            end: now + limit * Patience::MOST,
            moved: link.device.moved(),
            look: now + limit / Patience::LOOKS,
            now,
        })
    }

    pub(super) fn is_over(&mut self, link: &Link) -> bool {
        let moved = link.device.moved();
        let now = Instant::now();
        self.now = now;
        if std::mem::replace(&mut self.moved, moved) != moved {
            self.until = self.end.min(now + self.limit);
        }
        now >= self.until
    }

    /// Whether it is time to see if somebody else waits for this thread, as of the latest `is_over`.
    pub(super) fn looks_round(&mut self) -> bool {
        let due = self.now >= self.look;
        if due {
            self.look = self.now + self.limit / Patience::LOOKS;
        }
        due
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Relaxed);
    }
}

fn processors() -> usize {
    // Not a OnceLock: the answer takes a while, and a fork(2) of another thread in between would leave the child waiting for
    // ever.
    static PROCESSORS: AtomicUsize = AtomicUsize::new(0);
    match PROCESSORS.load(Relaxed) {
        0 => {
            let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
            PROCESSORS.store(processors, Relaxed);
            processors
        }
        processors => processors,
    }
}
