//! How the threads of `rpcrdma_svc_run` share their work, whatever they serve ([`Service`]).
//!
//! One of them at a time is the loop: it waits for jobs. When it has found some, it gives up the loop's seat and serves the first
//! one itself; the others go to the other threads (`jobs`).
//!
//! While it pays ([`Service::keeps_seat`]), the loop keeps its seat and serves what it has found, and another thread checks every
//! [`TICK`] whether it is still at the same job: if so, that thread takes the seat (`seat`).
//!
//! # Invariants
//! - Each job is served once, including those that are given or found while the loop ends.
//! - While the loop serves something itself, another thread watches it, or will as soon as one is free.
//! - If nobody has looked for jobs for a [`TICK`], a free thread takes the seat for a glance before it serves a waiting job; but
//!   not twice in a row.
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

    /// Sleeps until there are jobs or it is woken; `None` when the loop ends, including because it `is_over`.
    fn wait(&self, is_over: impl Fn() -> bool) -> Option<VecDeque<Self::Job>>;

    /// The same without sleeping, and without telling whether the loop ends.
    fn glance(&self, is_over: impl Fn() -> bool) -> VecDeque<Self::Job>;

    /// Further jobs of a source whose job was served in the seat.
    fn more_of(&self, source: Self::Source) -> VecDeque<Self::Job>;

    /// Where a job comes from, if more of it may follow at once.
    fn source(&self, job: &Self::Job) -> Option<Self::Source>;

    /// Whether the loop keeps its seat to serve this job and those that wait behind it.
    fn keeps_seat(&self, job: &Self::Job, behind: &VecDeque<Self::Job>) -> bool;

    /// Serves the job. What is left of it is returned, to wait for its next turn.
    fn serve(&self, job: Self::Job) -> Option<Self::Job>;

    /// Wakes the thread that sleeps in [`Service::wait`].
    fn ring(&self);

    /// Whether the program has ended the loop.
    fn is_over(&self) -> bool;

    /// Whether this is a forked child, where only the calling thread is left.
    fn is_child(&self) -> bool;

    /// The time, in nanoseconds.
    fn clock(&self) -> u64;
}

/// A task that waits for a thread.
#[derive(Debug, PartialEq, Eq)]
enum Task<J> {
    Job(J),
    /// The loop serves something itself: it is to be watched.
    Watch,
}

impl<J: Waits> Waits for Task<J> {
    fn place(&self, now: u64) -> Place {
        match self {
            Task::Job(job) => job.place(now),
            // There is only one, and no job waits long for it.
            Task::Watch => Place::foremost(now),
        }
    }
}

/// The threads that serve.
pub struct Workers<S: Service> {
    service: S,
    /// Whether there is more than one thread.
    several: bool,
    /// What waits for one of them.
    jobs: Jobs<Task<S::Job>>,
    /// What the loop is going to serve itself.
    kept: Mutex<VecDeque<S::Job>>,
    /// The loop's seat while it does.
    seat: Seat,
    /// When the loop last looked for jobs, by [`Service::clock`].
    looked_at: AtomicU64,
    /// The loop has ended.
    ended: AtomicBool,
}

impl<S: Service> Workers<S> {
    /// For `count` threads, which are going to [`work`](Workers::work).
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

    /// Takes a job that was found by a thread other than the loop's.
    pub fn give(&self, job: S::Job) {
        self.jobs.give(Task::Job(job));
        self.service.ring();
    }

    /// Has all threads end once they have nothing under way.
    pub fn end(&self) {
        self.ended.store(true, Relaxed);
        self.jobs.vacate();
        self.service.ring();
    }

    /// What each thread does until the loop ends; in a forked child, until its thread has served the job that it was at.
    pub fn work(&self) {
        let long_ago = || self.service.clock() >= self.looked_at.load(Relaxed) + TICK.as_nanos() as u64;
        // Between two glances it serves something, however long the glances take.
        let mut may_glance = true;
        loop {
            let next = match self.ended.load(Relaxed) {
                false => self.jobs.next(|| may_glance && long_ago()),
                // Jobs given meanwhile.
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

    /// Returns whether that was a glance.
    fn go_on(&self, next: Next<Task<S::Job>>) -> bool {
        match next {
            Next::Job(Task::Job(job)) => self.serve(job),
            Next::Job(Task::Watch) => self.watch(),
            Next::Seat => return self.lead(),
        }
        false
    }

    /// Acts as the loop until there is something to do that takes time, and serves one job of that; or only glances. Returns
    /// whether it has glanced.
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

    /// Acts as the loop for a moment while jobs wait, so that jobs of others that have arrived meanwhile get their turn too.
    fn glance(&self) {
        // Waiting jobs are served even if the loop has ended: the next thread in the seat finds that out when no job waits.
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

    /// The loop serves something itself. Returns false if it has lost its seat meanwhile.
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
