//! Whether a wait spins first, and how long.
//!
//! A spin keeps its processor from everybody else. It saves a sleep and a wake-up where the peer has a processor of its own;
//! where it has not, or others want this one, it may cost a time slice, which is longer than a hundred short calls.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::link::Link;
use crate::fork;
use crate::thread::processors;

/// Bytes that a peer copies in a nanosecond, at least.
const COPIED: u64 = 8;

/// Who has not come to look for so long has lost its processor meanwhile: a look that finds nothing takes less than a microsecond.
pub(super) const LOST: Duration = Duration::from_micros(20);

/// A look takes no longer that brings less.
const SHORT: u64 = 16 << 10;

/// Less than what it costs to sleep and to be woken.
const GLANCE: Duration = Duration::from_micros(5);

/// Whether spinning before a sleep has paid lately.
///
/// It pays only where the peer has a processor of its own. A spin that finds something although the thread lost its
/// processor meanwhile has found what it had kept the peer from sending: when that is the rule it counts as a failure. How
/// often a second that happens says nothing: some hundred times on an idle machine, for the kernel's own threads.
pub(super) struct Spin {
    /// How long a spin is; zero: there is none.
    poll: Duration,
    /// Waits that sleep at once before the next spin.
    skip: u32,
    /// What the next failure costs: 1, 2, 4 ... 1024 waits; a success halves it.
    penalty: u32,
    /// Rises with each spin in which the processor was lost, falls with each other one.
    crowded: u32,
}

impl Spin {
    /// `poll`: [`Config::poll`](crate::config::Config::poll).
    pub(super) fn new(poll: Duration) -> Spin {
        Spin { poll, skip: 0, penalty: 0, crowded: 0 }
    }

    pub(super) fn is_on(&self) -> bool {
        !self.poll.is_zero()
    }

    /// How long to spin now.
    /// `company`: [`QueuePair::company`](crate::provider::QueuePair::company).
    pub(super) fn allowed(&mut self, company: u32) -> Option<Duration> {
        if !self.is_on() {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        if is_crowded(company) {
            return None;
        }
        // After many failures the peer may sleep before each message too, and takes longer than a spin: one of us must
        // wait for the other now and then, or both sleep for ever.
        Some(if self.penalty >= 64 { self.poll * 3 } else { self.poll })
    }

    /// How long to look where a look costs nothing, though spinning has not paid: a peer that is awake may answer at once.
    fn glance(&self, company: u32) -> Option<Duration> {
        (self.is_on() && !is_crowded(company)).then(|| self.poll.min(GLANCE))
    }

    /// `lost`: meanwhile the thread has lost its processor.
    pub(super) fn found(&mut self, lost: bool) {
        if !lost {
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

/// A thread that waits on a connection as its driver, or spins for the next request.
pub(super) struct Waiting {
    generation: u64,
}

/// How many there are in this process, in the lower half; and in the upper one the process, as
/// [`fork::generation`] counts them: the threads of a parent do not count in its child.
static WAITING: AtomicU64 = AtomicU64::new(0);

impl Waiting {
    pub(super) fn begin() -> Waiting {
        let generation = fork::generation();
        // Never without an answer.
        let _ = WAITING.fetch_update(Relaxed, Relaxed, |all| {
            Some(if all >> 32 == generation { all + 1 } else { generation << 32 | 1 })
        });
        Waiting { generation }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = WAITING.fetch_update(Relaxed, Relaxed, |all| (all >> 32 == self.generation).then(|| all - 1));
    }
}

/// Whether so many threads of this process wait that, if one of them spins, what wakes the others may find no processor:
/// one is left to the peer. Or whether the peer, which is on this host, serves so many others that they, this thread and the peer
/// are more than there are processors.
fn is_crowded(company: u32) -> bool {
    let most = processors();
    WAITING.load(Relaxed) as u32 as usize >= most || company > 0 && company as usize + 2 > most
}

/// A spin under way: it goes on as long as bytes move, and its limit beyond, and as long as the peer may take to copy what has
/// moved; but never longer than [`Patience::MOST`] limits: somebody else may wait for this thread.
pub(super) struct Patience {
    limit: Duration,
    /// It is no more than a [`Spin::glance`], which says nothing of whether spinning pays.
    glance: bool,
    until: Instant,
    end: Instant,
    moved: u64,
    /// What had moved when it began.
    before: u64,
    /// When to look whether somebody else waits.
    look: Instant,
    now: Instant,
    /// Whether the processor was lost.
    lost: bool,
    company: u32,
}

impl Patience {
    const MOST: u32 = 40;

    /// How often a spin looks round, within its limit: not at once, for what comes soon shall cost no more.
    const LOOKS: u32 = 4;

    /// `None`: there is to be no spin now.
    pub(super) fn new(spin: &mut Spin, link: &mut Link) -> Option<Patience> {
        if !spin.is_on() {
            return None;
        }
        let company = link.device.company();
        let (limit, glance) = match spin.allowed(company) {
            Some(limit) => (limit, false),
            None => (spin.glance(company).filter(|_| link.device.spin())?, true),
        };
        let now = Instant::now();
        Some(Patience {
            limit,
            glance,
            until: now + limit,
            end: now + limit * Patience::MOST,
            moved: link.device.moved(),
            before: link.device.moved(),
            look: now + limit / Patience::LOOKS,
            now,
            lost: false,
            company,
        })
    }

    /// Tells `spin` what has come of it.
    pub(super) fn ends(&self, spin: &mut Spin, found: bool) {
        match found {
            _ if self.glance => {}
            true => spin.found(self.lost),
            false => spin.failed(),
        }
    }

    pub(super) fn is_over(&mut self, link: &Link) -> bool {
        let moved = link.device.moved();
        let now = Instant::now();
        let before = std::mem::replace(&mut self.now, now);
        self.lost |= moved.wrapping_sub(self.moved) < SHORT && now - before > LOST;
        if std::mem::replace(&mut self.moved, moved) != moved {
            let copies = Duration::from_nanos(moved.wrapping_sub(self.before) / COPIED).min(self.limit * 4);
            self.until = self.end.min(now + self.limit + copies);
        }
        now >= self.until
    }

    /// The next look begins.
    pub(super) fn goes_on(&mut self) {
        let now = Instant::now();
        self.lost |= now - std::mem::replace(&mut self.now, now) > LOST;
    }

    /// Whether it has turned out that somebody else waits for this thread or its processor. `others`: whether another
    /// descriptor has something.
    pub(super) fn must_end(&mut self, others: impl FnOnce() -> bool) -> bool {
        if self.now < self.look {
            return false;
        }
        self.look = self.now + self.limit / Patience::LOOKS;
        is_crowded(self.company) || others()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::testing::fork;

    #[test]
    fn a_thread_whose_peer_serves_as_many_others_as_there_are_processors_does_not_spin() {
        let mut spin = Spin::new(Duration::from_micros(50));
        let many = processors() as u32;
        assert_eq!(spin.allowed(many), None);
        assert_eq!(spin.glance(many), None);
        assert!(is_crowded(u32::MAX) && is_crowded(many.saturating_sub(1).max(1)));
    }

    #[test]
    fn spins_that_find_something_after_they_have_lost_their_processor_fail_in_the_end() {
        let mut spin = Spin::new(Duration::from_micros(50));
        for _ in 0..100 {
            spin.found(false);
        }
        assert_eq!(spin.skip, 0);
        for _ in 0..4 {
            spin.found(true);
        }
        assert_eq!(spin.skip, 1);
    }

    #[test]
    fn threads_of_the_parent_do_not_wait_in_its_child() {
        let here = || WAITING.load(Relaxed) >> 32 == fork::generation();
        let _waiting = Waiting::begin();
        assert!(here());
        let child = fork(|| {
            let begun = Waiting::begin();
            let one = here() && WAITING.load(Relaxed) as u32 == 1;
            // That of the parent ends here too, as when fork(2) was called in a dispatch routine.
            drop(Waiting { generation: begun.generation - 1 });
            let still = WAITING.load(Relaxed) as u32 == 1;
            drop(begun);
            one && still && WAITING.load(Relaxed) as u32 == 0
        });
        assert!(child.succeeded());
    }
}
