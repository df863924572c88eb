//! The threads of `rpcrdma_svc_run` among themselves, whatever they serve ([`Service`]).
//!
//! One of them at a time is the loop: it waits for jobs, and gives up that seat with the first one that it has, which it serves
//! itself. What it has found beside goes to the others (`jobs`).
//!
//! While that pays ([`Service::keeps_seat`]) the loop keeps its seat and serves what it has found, and another thread looks every
//! [`TICK`] whether it still is at the same job: then that one takes the seat (`seat`).
//!
//! # Invariants
//! - Each job is served once, also what is given or found while the loop ends.
//! - While the loop serves something itself, a thread watches it, or is about to, as soon as one is free.
//! - A thread that is free takes the seat for a glance before it does what waits for one, where nobody has looked for a [`TICK`];
//!   but not twice in a row.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard};
use crate::tirpc::handover::TICK;
use crate::tirpc::jobs::{Jobs, Next, Place, Waits};
use crate::tirpc::seat::{Seat, Seen};

/// What the threads do.
pub trait Service {
    /// Something to do for a thread.
    type Job: Waits;
    /// Where jobs come from.
    type Source;

    /// Sleeps until there are jobs, or what wakes it; `None` when the loop ends, also because it `is_over`.
    fn wait(&self, is_over: impl Fn() -> bool) -> Option<VecDeque<Self::Job>>;

    /// The same without a sleep, and without telling whether the loop ends.
    fn glance(&self, is_over: impl Fn() -> bool) -> VecDeque<Self::Job>;

    /// What else has come from a source whose job was served in the seat.
    fn more_of(&self, source: Self::Source) -> VecDeque<Self::Job>;

    /// Where a job comes from, if more of it may follow at once.
    fn source(&self, job: &Self::Job) -> Option<Self::Source>;

    /// Whether the loop serves this job and those that wait behind it in its seat.
    fn keeps_seat(&self, job: &Self::Job, behind: &VecDeque<Self::Job>) -> bool;

    /// Does it; what is left of it waits for its next turn.
    fn serve(&self, job: Self::Job) -> Option<Self::Job>;

    /// Wakes who sleeps in [`Service::wait`].
    fn ring(&self);

    /// Whether the program has ended the loop.
    fn is_over(&self) -> bool;

    /// Whether this is a forked child, which has the calling thread only.
    fn is_child(&self) -> bool;

    /// Nanoseconds.
    fn clock(&self) -> u64;
}

/// What waits for a thread.
#[derive(Debug, PartialEq, Eq)]
enum Task<J> {
    Job(J),
    /// The loop serves.
    Watch,
}

impl<J: Waits> Waits for Task<J> {
    fn place(&self, now: u64) -> Place {
        match self {
            Task::Job(job) => job.place(now),
            // There is one, for which no job waits long.
            Task::Watch => Place::foremost(now),
        }
    }
}

/// The threads that serve.
pub struct Workers<S: Service> {
    service: S,
    /// More than one.
    several: bool,
    /// What waits for one of them.
    jobs: Jobs<Task<S::Job>>,
    /// What the loop is going to serve itself.
    kept: Mutex<VecDeque<S::Job>>,
    /// While it does.
    seat: Seat,
    /// When the loop has looked for jobs, by [`Service::clock`].
    looked_at: AtomicU64,
    /// The loop has ended.
    ended: AtomicBool,
}

impl<S: Service> Workers<S> {
    /// So many are going to [`work`](Workers::work).
    pub fn new(count: u32, service: S) -> Workers<S> {
        let workers = Workers {
            service,
            several: count > 1,
            jobs: Jobs::default(),
            kept: Mutex::default(),
            seat: Seat::default(),
            looked_at: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        };
        workers.jobs.vacate();
        workers
    }

    /// A job that another thread than the loop's has found.
    pub fn give(&self, job: S::Job) {
        self.jobs.give(Task::Job(job));
        self.service.ring();
    }

    /// Has all of them end when they have nothing under way.
    pub fn end(&self) {
        self.ended.store(true, Relaxed);
        self.jobs.vacate();
        self.service.ring();
    }

    /// What each of them does until the loop ends; in a forked child until its thread has served what it was at.
    pub fn work(&self) {
        let long_ago = || self.service.clock() >= self.looked_at.load(Relaxed) + TICK.as_nanos() as u64;
        // Between two glances it does something, however long these take.
        let mut may_glance = true;
        loop {
            let next = match self.ended.load(Relaxed) {
                false => self.jobs.next(|| may_glance && long_ago()),
                // What was given meanwhile.
                true => match self.jobs.take() {
                    Some(task) => Next::Job(task),
                    None => break,
                },
            };
            may_glance = !self.go_on(next);
            if self.service.is_child() {
                return;
            }
        }
    }

    /// Whether that was a glance.
    fn go_on(&self, next: Next<Task<S::Job>>) -> bool {
        match next {
            Next::Job(Task::Job(job)) => self.serve(job),
            Next::Job(Task::Watch) => self.watch(),
            Next::Seat => return self.lead(),
        }
        false
    }

    /// Is the loop until there is something to do that takes time, and does one thing of it; or glances, and tells that.
    fn lead(&self) -> bool {
        let found = self.take_kept();
        let glances = found.is_empty() && !self.jobs.is_empty();
        match glances {
            true => self.glance(),
            false => self.loop_on(found),
        }
        glances
    }

    /// See [`Workers::lead`]. `found`: what it begins with.
    fn loop_on(&self, mut found: VecDeque<S::Job>) {
        loop {
            if found.is_empty() {
                match self.jobs.take() {
                    // No other thread is free.
                    Some(Task::Watch) => {
                        self.seat.is_unwatched();
                        continue;
                    }
                    Some(Task::Job(job)) => found.push_back(job),
                    None => {}
                }
            }
            if found.is_empty() {
                match self.service.wait(|| self.is_over()) {
                    Some(jobs) => found = jobs,
                    None => return self.end(),
                }
                self.has_looked();
            }
            let Some(own) = found.pop_front() else { continue };
            if !self.service.keeps_seat(&own, &found) {
                self.give_all(found);
                self.jobs.vacate();
                return self.serve(own);
            }
            let source = self.service.source(&own);
            self.keep(&mut found);
            if !self.serve_in_seat(own) {
                return;
            }
            found = self.take_kept();
            if found.is_empty()
                && self.jobs.is_empty()
                && let Some(source) = source
            {
                found = self.service.more_of(source);
            }
        }
    }

    /// Is the loop for a moment, while there are jobs: those of others who have come meanwhile have their turn too.
    fn glance(&self) {
        // What waits is served though the loop has ended: the next one finds that out when nothing does.
        let found = self.service.glance(|| self.is_over());
        self.has_looked();
        self.give_all(found);
        self.jobs.vacate();
    }

    fn has_looked(&self) {
        self.looked_at.store(self.service.clock(), Relaxed);
    }

    fn give_all(&self, found: VecDeque<S::Job>) {
        found.into_iter().for_each(|job| self.jobs.give(Task::Job(job)));
    }

    fn is_over(&self) -> bool {
        self.ended.load(Relaxed) || self.service.is_over()
    }

    /// For whoever has the seat next.
    fn keep(&self, found: &mut VecDeque<S::Job>) {
        if !found.is_empty() {
            self.kept().append(found);
        }
    }

    fn take_kept(&self) -> VecDeque<S::Job> {
        std::mem::take(&mut *self.kept())
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<S::Job>> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The loop serves something itself. False when it has lost its seat meanwhile.
    fn serve_in_seat(&self, job: S::Job) -> bool {
        let (turn, asks) = self.seat.begin();
        if asks && self.several {
            self.jobs.give(Task::Watch);
        }
        self.serve(job);
        !self.service.is_child() && self.seat.end(turn)
    }

    fn serve(&self, job: S::Job) {
        if let Some(rest) = self.service.serve(job) {
            self.jobs.give(Task::Job(rest));
        }
    }

    /// Watches a loop that serves.
    fn watch(&self) {
        let mut watch = self.seat.watch();
        while !self.ended.load(Relaxed) {
            if let Some(next) = self.jobs.next_within(TICK) {
                if watch.leave() {
                    self.jobs.give(Task::Watch);
                }
                self.go_on(next);
                return;
            }
            match watch.look() {
                Seen::Nothing => {}
                Seen::Taken => {
                    self.lead();
                    return;
                }
                Seen::Quiet => return,
            }
        }
    }
}

#[cfg(all(test, shuttle))]
mod schedules;
