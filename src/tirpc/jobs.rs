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
    /// Threads that wait for nothing else.
    free: Condvar,
    /// The one that watches the loop meanwhile.
    watch: Condvar,
}

struct State<J> {
    jobs: VecDeque<J>,
    vacant: bool,
    /// How many threads wait for nothing else. One that was woken counts until it runs.
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
        self.wake(&state);
    }

    /// Nobody is the loop any more: the next thread that is free is.
    pub fn vacate(&self) {
        let mut state = self.lock();
        state.vacant = true;
        self.wake(&state);
    }

    /// Wakes one thread more.
    fn wake(&self, state: &State<J>) {
        let waiting = state.jobs.len() + usize::from(state.vacant);
        if waiting <= state.free { self.free.notify_one() } else { self.watch.notify_one() }
    }

    /// The oldest one, if there is one.
    pub fn take(&self) -> Option<J> {
        self.lock().jobs.pop_front()
    }

    /// As [`Jobs::next`]; waits for so long only. For the thread that watches.
    pub fn next_within(&self, time: Duration) -> Option<Next<J>> {
        let state = self.lock();
        let nothing = |state: &mut State<J>| state.jobs.is_empty() && !state.vacant;
        let waited = self.watch.wait_timeout_while(state, time, nothing);
        waited.unwrap_or_else(PoisonError::into_inner).0.next()
    }

    /// The oldest one, or else the seat; waits until there is one of them.
    pub fn next(&self) -> Next<J> {
        let mut state = self.lock();
        loop {
            if let Some(next) = state.next() {
                return next;
            }
            state.free += 1;
            state = self.free.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.free -= 1;
        }
    }
}

impl<J> State<J> {
    fn next(&mut self) -> Option<Next<J>> {
        let job = self.jobs.pop_front().map(Next::Job);
        job.or_else(|| std::mem::take(&mut self.vacant).then_some(Next::Seat))
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
        assert_eq!((jobs.next(), jobs.take()), (Next::Job(1), Some(2)));
        assert_eq!((jobs.next_within(LONG), jobs.take()), (Some(Next::Job(3)), None));
        assert_eq!((jobs.next(), jobs.next_within(Duration::ZERO)), (Next::Seat, None));
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

    /// Where nobody is free, or they are woken already.
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
            scope.spawn(move || got.send(Some(jobs.next())).unwrap());
            while jobs.lock().free == 0 {
                std::thread::yield_now();
            }
            watch();
            // The one that is free has not run when the second comes.
            let mut state = jobs.lock();
            for job in [2, 3] {
                state.jobs.push_back(job);
                jobs.wake(&state);
            }
            drop(state);
            let both = [next(), next()];
            assert!(both.contains(&Some(Next::Job(2))) && both.contains(&Some(Next::Job(3))), "{both:?}");
        });
    }
}
