//! Schedules of threads that wait on one connection, tried one after the other: nobody sleeps for ever, and each thread gets
//! its own reply. A sleep ends only when the thread is woken (shuttle's conditions know no time), so that a thread that is not
//! woken is found.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use shuttle::thread::spawn;

use super::*;
use crate::memory::Payload;
use crate::sync::{Mutex, in_schedules};

/// A connection whose peer answers calls in any order.
struct Line {
    state: Mutex<Ends>,
    wire: Mutex<Wire>,
    /// A reply has come, or a call.
    came: Condvar,
}

struct Ends {
    session: Session,
    /// Replies that have been read.
    read: Vec<Xid>,
}

#[derive(Default)]
struct Wire {
    calls: VecDeque<Xid>,
    replies: VecDeque<Xid>,
}

impl State for Ends {
    fn parts(&mut self) -> (&mut Session, Option<&mut Link>) {
        (&mut self.session, None)
    }
}

impl Line {
    fn new() -> Arc<Line> {
        Arc::new(Line {
            // A thread that waits beside the driver looks a few times before it sleeps.
            state: Mutex::new(Ends { session: Session::new(Duration::from_micros(1)), read: Vec::new() }),
            wire: Mutex::default(),
            came: Condvar::new(),
        })
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap()
    }

    /// Makes a call and waits for its reply until `deadline`. Returns whether it came.
    fn call(&self, xid: Xid, deadline: Instant) -> bool {
        let state = self.state.lock().unwrap();
        self.wire().calls.push_back(xid);
        self.came.notify_all();
        let mut state = wait_for(&self, state, Waiter::Call(xid), deadline, None);
        let outcome = state.session.calls.take(xid);
        // As every thread does that has waited for something.
        if !state.session.is_driven() {
            state.session.wake_one();
        }
        outcome.is_some()
    }

    /// The peer: answers `count` calls, the second one of each two before the first.
    fn answer(&self, count: usize) {
        let mut held = None;
        for _ in 0..count {
            let mut wire = self.wire();
            while wire.calls.is_empty() {
                wire = self.came.wait(wire).unwrap();
            }
            let call = wire.calls.pop_front();
            match held.take() {
                None if wire.calls.is_empty() => wire.replies.extend(call),
                None => held = call,
                Some(first) => wire.replies.extend(call.into_iter().chain([first])),
            }
            drop(wire);
            self.came.notify_all();
        }
        self.wire().replies.extend(held);
        self.came.notify_all();
    }
}

impl<'a> Locked<'a> for &'a Line {
    type State = Ends;

    fn lock(&self) -> MutexGuard<'a, Ends> {
        self.state.lock().unwrap()
    }
}

impl<'a> Policy<'a> for &'a Line {
    fn serve(&self, state: MutexGuard<'a, Ends>, _: Mask<'_>) -> (MutexGuard<'a, Ends>, bool) {
        (state, false)
    }

    fn turn(&self, state: &mut Ends, _: Waiter) -> Turn {
        match state.session.is_driven() {
            true => Turn::Sleep { until: None, serves: false },
            false => Turn::Drive { spins: false },
        }
    }

    fn is_over(&self, state: &mut Ends, waiter: Waiter) -> bool {
        state.session.calls.is_over(waiter)
    }

    fn looks_beside(&self, _: Waiter) -> bool {
        true
    }

    fn wake(&self, _: &mut Ends, _: bool) -> Wake {
        Wake::new((-1, true, false), -1, None)
    }

    fn sleep(&self, _: &mut Wake, left: Duration, _: Mask<'_>) -> bool {
        let mut wire = self.wire();
        while wire.replies.is_empty() && !left.is_zero() {
            wire = self.came.wait(wire).unwrap();
        }
        !wire.replies.is_empty()
    }

    fn move_on(&self, state: &mut Ends, _: &Wake, _: bool) {
        let replies = std::mem::take(&mut self.wire().replies);
        for xid in replies {
            state.read.push(xid);
            state.session.end(&mut vec![(xid, Ok(Payload::default()))]);
        }
    }
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Threads that make `calls` calls each.
fn callers(line: &Arc<Line>, threads: u32, calls: u32) -> Vec<shuttle::thread::JoinHandle<()>> {
    let caller = |thread: u32| {
        let line = line.clone();
        spawn(move || (0..calls).for_each(|call| assert!(line.call(Xid(100 * thread + call), far()))))
    };
    (1..=threads).map(caller).collect()
}

#[test]
fn everybody_gets_his_reply_whoever_drives() {
    in_schedules(5000, || {
        let line = Line::new();
        let callers = callers(&line, 3, 2);
        line.answer(6);
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        let state = line.state.lock().unwrap();
        assert!(
            state.read.len() == 6 && state.session.calls.outcomes.is_empty() && state.session.is_unattended()
        );
    });
}

/// Threads whose time is over leave the driver's seat to the others.
#[test]
fn a_driver_whose_time_is_over_is_succeeded() {
    in_schedules(5000, || {
        let line = Line::new();
        let callers = callers(&line, 2, 2);
        let hasty = {
            let line = line.clone();
            spawn(move || line.call(Xid(7), Instant::now()))
        };
        line.answer(5);
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        hasty.join().unwrap();
        assert!(line.state.lock().unwrap().session.is_unattended());
    });
}
