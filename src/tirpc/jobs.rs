//! What the threads of `threads` wait for: jobs, and the seat of the loop.
//!
//! Nothing here takes memory but the queue, and nothing is a thread's own.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Jobs that wait for a thread, and whether the seat does.
pub struct Jobs<J> {
    state: Mutex<State<J>>,
    /// Threads that take whatever comes.
    free: Condvar,
    /// The one that watches the seat, and takes nothing but jobs.
    watch: Condvar,
}

struct State<J> {
    jobs: VecDeque<J>,
    vacant: bool,
    /// How many threads are free.
    free: usize,
}

/// What a thread has got.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<J> {
    /// A job.
    Job(J),
    /// The seat: there is no job.
    Seat,
}

impl<J> Default for Jobs<J> {
    fn default() -> Jobs<J> {
        let state = State { jobs: VecDeque::new(), vacant: false, free: 0 };
        Jobs { state: Mutex::new(state), free: Condvar::new(), watch: Condvar::new() }
    }
}

impl<J> Jobs<J> {
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more, which wakes a thread if one waits.
    pub fn give(&self, job: J) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if state.free > 0 { self.free.notify_one() } else { self.watch.notify_one() }
    }

    /// Nobody is the loop any more: the next thread that is free is.
    pub fn vacate(&self) {
        self.lock().vacant = true;
        self.free.notify_one();
    }

    /// The oldest one, if there is one.
    pub fn take(&self) -> Option<J> {
        self.lock().jobs.pop_front()
    }

    /// The same; waits for one for so long. For the thread that watches.
    pub fn take_within(&self, time: Duration) -> Option<J> {
        let state = self.lock();
        let nothing = |state: &mut State<J>| state.jobs.is_empty();
        let waited = self.watch.wait_timeout_while(state, time, nothing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.jobs.pop_front()
    }

    /// The oldest one, or else the seat; waits until there is one of them.
    pub fn next(&self) -> Next<J> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Next::Job(job);
            }
            if std::mem::take(&mut state.vacant) {
                return Next::Seat;
            }
            state.free += 1;
            state = self.free.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.free -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::scope;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn jobs_come_in_their_order_and_before_the_seat() {
        let jobs = Jobs::default();
        jobs.vacate();
        jobs.give(1);
        jobs.give(2);
        jobs.give(3);
        assert_eq!((jobs.next(), jobs.take(), jobs.take_within(LONG)), (Next::Job(1), Some(2), Some(3)));
        assert_eq!((jobs.take(), jobs.take_within(Duration::ZERO)), (None, None));
        assert_eq!(jobs.next(), Next::Seat);
    }

    #[test]
    fn who_waits_gets_what_comes() {
        let jobs = Jobs::default();
        let (got, gets) = mpsc::channel();
        scope(|scope| {
            for _ in 0..3 {
                let (jobs, got) = (&jobs, got.clone());
                scope.spawn(move || got.send(jobs.next()).unwrap());
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

    #[test]
    fn who_watches_gets_a_job_where_nobody_is_free_and_leaves_the_seat_to_others() {
        let jobs = Jobs::default();
        let (got, gets) = mpsc::channel();
        scope(|scope| {
            scope.spawn(|| got.send(jobs.take_within(LONG)).unwrap());
            jobs.vacate();
            jobs.give(1);
            assert_eq!(gets.recv_timeout(LONG).unwrap(), Some(1));
        });
        assert_eq!(jobs.next(), Next::Seat);
    }
}
