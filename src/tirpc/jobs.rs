//! What the threads of `workers` wait for: jobs, and the seat of the loop.
//!
//! Jobs of one source do not keep those of others waiting: each source has one job per turn, and what arrives while the jobs of a
//! turn are being taken belongs to a later turn. So a turn ends, however many arrive.
//!
//! Only the queue allocates memory here, and nothing is thread-local.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Duration;

use crate::stats;
use crate::sync::{Condvar, Mutex, MutexGuard, wait_within};

/// Something that waits for a thread.
pub trait Waits {
    /// Its place in the queue, where `now` is the turn of the job taken last.
    fn place(&self, now: u64) -> Place;
}

/// The place of a job among others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Jobs of an earlier turn come first.
    pub turn: u64,
    /// Whether its source has another job waiting, in an earlier turn. Sources that have none come first in each turn.
    again: bool,
}

impl Place {
    /// The place of the next job of a source whose latest job was or is in turn `latest`.
    pub fn next(now: u64, latest: u64) -> Place {
        Place { turn: now.max(latest) + 1, again: latest > now }
    }

    /// Ahead of all but what is left of the turn `now`.
    pub fn foremost(now: u64) -> Place {
        Place { turn: now, again: true }
    }
}

/// Jobs that wait for a thread, and whether the seat waits for one.
pub struct Jobs<J> {
    state: Mutex<State<J>>,
    /// For the threads that wait for nothing else.
    free: Condvar,
    /// For the thread that watches the loop while it waits.
    watch: Condvar,
}

struct State<J> {
    /// With their places, and sorted by them.
    jobs: VecDeque<(Place, J)>,
    /// The turn of the job taken last.
    turn: u64,
    vacant: bool,
    /// How many threads wait for nothing else. One that was woken counts until it runs.
    free: usize,
    /// How many threads wait while they watch.
    watching: usize,
}

/// What a thread gets.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<J> {
    /// A job.
    Job(J),
    /// The seat of the loop.
    Seat,
}

impl<J: Waits> Default for Jobs<J> {
    fn default() -> Jobs<J> {
        // Later than any turn of an earlier queue: no queue has a turn every nanosecond.
        let state =
            State { jobs: VecDeque::new(), turn: stats::clock(), vacant: false, free: 0, watching: 0 };
        Jobs { state: Mutex::new(state), free: Condvar::new(), watch: Condvar::new() }
    }
}

impl<J: Waits> Jobs<J> {
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job, and wakes a thread if one waits.
    pub fn give(&self, job: J) {
        let mut state = self.lock();
        state.push(job);
        self.wake(&state);
    }

    /// Nobody is the loop any more: the next free thread becomes it.
    pub fn vacate(&self) {
        let mut state = self.lock();
        state.vacant = true;
        self.wake(&state);
    }

    /// Wakes one more thread, if one waits: without this check it would cost a system call each time.
    fn wake(&self, state: &State<J>) {
        let waiting = state.jobs.len() + usize::from(state.vacant);
        if waiting <= state.free {
            self.free.notify_one();
        } else if state.watching > 0 {
            self.watch.notify_one();
        }
    }

    /// Takes the next job, if there is one.
    pub fn take(&self) -> Option<J> {
        self.lock().pop()
    }

    /// Whether no job waits.
    pub fn is_empty(&self) -> bool {
        self.lock().jobs.is_empty()
    }

    /// As [`Jobs::next`] without a preference for the seat, but waits only for `time`. For the thread that watches.
    pub fn next_within(&self, time: Duration) -> Option<Next<J>> {
        let mut state = self.lock();
        state.watching += 1;
        let nothing = |state: &mut State<J>| state.jobs.is_empty() && !state.vacant;
        let mut state = wait_within(&self.state, &self.watch, state, time, nothing);
        state.watching -= 1;
        state.next(false)
    }

    /// Takes the next job, or else the seat, which may be preferred; waits until there is either.
    pub fn next(&self, prefers_seat: impl Fn() -> bool) -> Next<J> {
        let mut state = self.lock();
        loop {
            let prefers_seat = state.vacant && prefers_seat();
            if let Some(next) = state.next(prefers_seat) {
                return next;
            }
            state.free += 1;
            state = self.free.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.free -= 1;
        }
    }
}

impl<J: Waits> State<J> {
    fn push(&mut self, job: J) {
        let place = job.place(self.turn);
        let at = self.jobs.partition_point(|(other, _)| *other <= place);
        self.jobs.insert(at, (place, job));
    }

    fn pop(&mut self) -> Option<J> {
        let (place, job) = self.jobs.pop_front()?;
        self.turn = place.turn;
        Some(job)
    }

    fn next(&mut self, prefers_seat: bool) -> Option<Next<J>> {
        if !prefers_seat && let Some(job) = self.pop() {
            return Some(Next::Job(job));
        }
        if std::mem::take(&mut self.vacant) {
            return Some(Next::Seat);
        }
        // A job after all, although the seat was preferred.
        self.pop().map(Next::Job)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::mpsc;
    use std::thread::scope;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    impl Waits for u32 {
        fn place(&self, now: u64) -> Place {
            Place::next(now, 0)
        }
    }

    /// A job of a source, with the latest turn of that source.
    #[derive(Debug)]
    struct Of<'a>(&'a Cell<u64>, u32);

    impl Waits for Of<'_> {
        fn place(&self, now: u64) -> Place {
            let place = Place::next(now, self.0.get());
            self.0.set(place.turn);
            place
        }
    }

    #[test]
    fn sources_take_turns_and_who_comes_later_joins_in() {
        let (jobs, one, other) = (Jobs::default(), Cell::default(), Cell::default());
        (0..5).for_each(|n| jobs.give(Of(&one, n)));
        let next = || jobs.take().map(|job| job.1);
        assert_eq!([next(), next()], [0, 1].map(Some));
        // In the next turn it comes before the source that has more.
        jobs.give(Of(&other, 10));
        jobs.give(Of(&other, 11));
        assert_eq!([next(), next(), next(), next()], [10, 2, 3, 11].map(Some));
        assert_eq!([next(), next()], [Some(4), None]);
    }

    #[test]
    fn sources_that_come_and_go_keep_nobody_waiting() {
        let old = Cell::default();
        let new = [const { Cell::new(0) }; 20];
        let jobs = Jobs::default();
        jobs.give(Of(&old, 0));
        jobs.give(Of(&old, 1));
        jobs.give(Of(&new[0], 10));
        // For each job that is taken, another one arrives from a source that was not there before.
        let taken = new[1..].iter().zip(11..).map(|(source, n)| {
            jobs.give(Of(source, n));
            jobs.take().unwrap().1
        });
        assert_eq!(taken.collect::<Vec<_>>()[..7], [0, 10, 11, 12, 13, 14, 1]);
    }

    #[test]
    fn the_seat_comes_first_for_whoever_prefers_it() {
        let jobs = Jobs::default();
        jobs.give(1);
        jobs.vacate();
        assert_eq!(jobs.next(|| true), Next::Seat);
        assert_eq!(jobs.next(|| true), Next::Job(1), "there is none");
        assert!(jobs.is_empty());
    }

    #[test]
    fn jobs_come_in_their_order_and_before_the_seat() {
        let jobs = Jobs::<u32>::default();
        jobs.vacate();
        jobs.give(1);
        jobs.give(2);
        jobs.give(3);
        assert_eq!((jobs.next(|| false), jobs.take()), (Next::Job(1), Some(2)));
        assert_eq!((jobs.next_within(LONG), jobs.take()), (Some(Next::Job(3)), None));
        assert_eq!((jobs.next(|| false), jobs.next_within(Duration::ZERO)), (Next::Seat, None));
        jobs.vacate();
        assert_eq!(jobs.next_within(LONG), Some(Next::Seat));
    }

    #[test]
    fn who_waits_gets_what_comes() {
        let jobs = Jobs::default();
        let (got, gets) = mpsc::channel();
        scope(|scope| {
            for _ in 0..3 {
                let (jobs, got) = (&jobs, got.clone());
                scope.spawn(move || got.send(jobs.next(|| false)).unwrap());
            }
            jobs.give(1);
            jobs.vacate();
            jobs.give(2);
            let mut all = [(); 3].map(|()| gets.recv_timeout(LONG).unwrap());
            all.sort_by_key(|next| matches!(next, Next::Seat));
            assert!(all[..2].contains(&Next::Job(1)) && all[..2].contains(&Next::Job(2)), "{all:?}");
            assert_eq!(all[2], Next::Seat);
        });
    }

    /// Where nobody is free, or the free threads have been woken already.
    #[test]
    fn who_watches_is_woken_for_what_the_others_do_not_take() {
        let jobs = Jobs::default();
        let (got, gets) = mpsc::channel();
        let next = || gets.recv_timeout(LONG).unwrap();
        scope(|scope| {
            let watch = || {
                let got = got.clone();
                let jobs = &jobs;
                scope.spawn(move || got.send(jobs.next_within(LONG)).unwrap());
            };
            watch();
            jobs.give(1);
            assert_eq!(next(), Some(Next::Job(1)));
            watch();
            jobs.vacate();
            assert_eq!(next(), Some(Next::Seat));
            let (jobs, got) = (&jobs, got.clone());
            scope.spawn(move || got.send(Some(jobs.next(|| false))).unwrap());
            while jobs.lock().free == 0 {
                std::thread::yield_now();
            }
            watch();
            // The free thread has not run yet when the second job arrives.
            let mut state = jobs.lock();
            for job in [2, 3] {
                state.push(job);
                jobs.wake(&state);
            }
            drop(state);
            let both = [next(), next()];
            assert!(both.contains(&Some(Next::Job(2))) && both.contains(&Some(Next::Job(3))), "{both:?}");
        });
    }
}
