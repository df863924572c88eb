//! Tries schedules of serving threads one after the other: each job is served once, one thread at a time is the loop, and nobody
//! waits for ever.
#![forbid(unsafe_code)]

use std::sync::Arc;

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::{JoinHandle, spawn, yield_now};

use super::*;
use crate::sync::{Condvar, in_schedules};

/// What a routine does.
#[derive(Clone, Copy)]
enum Does {
    /// Something short.
    Little,
    /// It ends when this other request has been served.
    WaitsFor(u32),
    /// It ends the loop.
    Exits,
    /// This many more are served after it, each in a turn of its own.
    Goes(u32),
}

/// A request, of one of the sources.
struct Request {
    number: u32,
    does: Does,
    latest: Arc<AtomicU64>,
}

impl Waits for Request {
    fn place(&self, now: u64) -> Place {
        let place = Place::next(now, self.latest.load(Relaxed));
        self.latest.store(place.turn, Relaxed);
        place
    }
}

/// The transports.
#[derive(Default)]
struct Net {
    state: Mutex<State>,
    /// Something has come, or the bell was rung.
    came: Condvar,
    /// A request was served.
    done: Condvar,
    over: AtomicBool,
    /// A thread is the loop.
    looks: AtomicBool,
    clock: AtomicU64,
    /// All requests take long.
    slow: AtomicBool,
}

#[derive(Default)]
struct State {
    arrived: VecDeque<Request>,
    rings: bool,
    served: Vec<u32>,
}

impl Net {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn send(&self, request: Request) {
        self.state().arrived.push_back(request);
        self.came.notify_one();
    }

    fn exit(&self) {
        self.over.store(true, Relaxed);
        self.ring();
    }

    fn wait_for(&self, all: impl Fn(&[u32]) -> bool) {
        let mut state = self.state();
        while !all(&state.served) {
            state = self.done.wait(state).unwrap();
        }
    }

    /// Does what only one thread at a time may do; nothing if the loop has ended.
    fn as_loop<T>(&self, is_over: bool, what: impl FnOnce() -> Option<T>) -> Option<T> {
        if is_over {
            return None;
        }
        assert!(!self.looks.swap(true, Relaxed), "two threads are the loop");
        let found = what();
        self.looks.store(false, Relaxed);
        found
    }

    fn ring(&self) {
        self.state().rings = true;
        self.came.notify_one();
    }
}

impl Service for Arc<Net> {
    type Job = Request;
    type Source = Arc<AtomicU64>;

    fn wait(&self, is_over: impl Fn() -> bool) -> Option<VecDeque<Request>> {
        self.as_loop(is_over(), || {
            let mut state = self.state();
            while !is_over() && state.arrived.is_empty() && !state.rings {
                state = self.came.wait(state).unwrap();
            }
            state.rings = false;
            (!is_over()).then(|| std::mem::take(&mut state.arrived))
        })
    }

    fn glance(&self, is_over: impl Fn() -> bool) -> VecDeque<Request> {
        self.as_loop(is_over(), || Some(std::mem::take(&mut self.state().arrived))).unwrap_or_default()
    }

    fn more_of(&self, source: Arc<AtomicU64>) -> VecDeque<Request> {
        let is_next = |next: &Request| Arc::ptr_eq(&next.latest, &source);
        let more = self.as_loop(self.is_over(), || {
            let mut state = self.state();
            let next = state.arrived.iter().position(is_next)?;
            state.arrived.remove(next)
        });
        more.into_iter().collect()
    }

    fn source(&self, job: &Request) -> Option<Arc<AtomicU64>> {
        Some(job.latest.clone())
    }

    fn keeps_seat(&self, _: &Request, _: &VecDeque<Request>) -> bool {
        !self.slow.load(Relaxed) && thread_rng().gen_bool(0.5)
    }

    fn serve(&self, job: Request) -> Option<Request> {
        let Request { number, does, latest } = job;
        match does {
            Does::Little | Does::Goes(_) => yield_now(),
            Does::WaitsFor(other) => self.wait_for(|served| served.contains(&other)),
            Does::Exits => self.exit(),
        }
        self.state().served.push(number);
        self.done.notify_all();
        match does {
            Does::Goes(more) if more > 0 => {
                Some(Request { number: number + 1, does: Does::Goes(more - 1), latest })
            }
            _ => None,
        }
    }

    fn ring(&self) {
        Net::ring(self);
    }

    fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    fn is_child(&self) -> bool {
        false
    }

    fn clock(&self) -> u64 {
        let passes = self.slow.load(Relaxed) || thread_rng().gen_bool(0.5);
        self.clock.fetch_add(if passes { TICK.as_nanos() as u64 } else { 0 }, Relaxed)
    }
}

/// A server and its threads.
struct Server {
    net: Arc<Net>,
    workers: Arc<Workers<Arc<Net>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    fn new(threads: u32) -> Server {
        let net = Arc::new(Net::default());
        let workers = Arc::new(Workers::new(threads, net.clone()));
        let work = |_| {
            let workers = workers.clone();
            spawn(move || workers.work())
        };
        let threads = (0..threads).map(work).collect();
        Server { net, workers, threads }
    }

    fn send(&self, requests: Vec<Request>) {
        requests.into_iter().for_each(|request| self.net.send(request));
    }

    /// Waits until the requests numbered below `count` are served, and then for the end: those were all.
    fn serves(self, count: u32) {
        self.net.wait_for(|served| served.len() as u32 == count);
        self.net.exit();
        assert_eq!(self.ended(), (0..count).collect::<Vec<_>>());
    }

    /// Waits for the end of all threads; returns what was served, in the order of its numbers.
    fn ended(self) -> Vec<u32> {
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(self.workers.jobs.is_empty() && self.workers.kept().is_empty(), "something is left");
        let mut served = std::mem::take(&mut self.net.state().served);
        served.sort_unstable();
        served
    }
}

/// Requests with these numbers, of one source.
fn requests(numbers: impl IntoIterator<Item = (u32, Does)>) -> Vec<Request> {
    let latest = Arc::<AtomicU64>::default();
    numbers.into_iter().map(|(number, does)| Request { number, does, latest: latest.clone() }).collect()
}

#[test]
fn each_request_is_served_once_whoever_is_the_loop() {
    in_schedules(3000, || {
        let server = Server::new(3);
        let sources = [
            requests([(0, Does::Little), (1, Does::Little)]),
            requests([(2, Does::Goes(2))]),
            requests([(5, Does::Little), (6, Does::Little)]),
        ];
        sources.into_iter().for_each(|requests| server.send(requests));
        server.serves(7);
    });
}

/// All threads but one are at a routine that lasts until another request is served, which comes later or at once.
#[test]
fn routines_that_take_long_keep_nobody_waiting() {
    in_schedules(3000, || {
        let server = Server::new(3);
        server.send(requests([(0, Does::WaitsFor(2)), (1, Does::WaitsFor(3)), (2, Does::Little)]));
        // A request of another source comes when the loop may have nothing to do but these.
        server.net.wait_for(|served| served.contains(&2));
        server.send(requests([(3, Does::Little)]));
        server.serves(4);
    });
}

/// A thread that has watched, or was busy when it was asked to, watches again.
#[test]
fn long_routines_one_after_the_other_keep_nobody_waiting() {
    in_schedules(3000, || {
        let server = Server::new(2);
        for first in [0, 2] {
            server.send(requests([(first, Does::WaitsFor(first + 1)), (first + 1, Does::Little)]));
            server.net.wait_for(|served| served.len() as u32 == first + 2);
        }
        server.serves(4);
    });
}

/// What the loop has found when it ends is served; what it has not found is not.
#[test]
fn all_threads_end_and_lose_nothing_that_was_found() {
    in_schedules(3000, || {
        let server = Server::new(3);
        let sources = [
            requests([(0, Does::Little), (1, Does::Exits), (2, Does::Little)]),
            requests([(3, Does::Goes(1)), (5, Does::Little)]),
        ];
        sources.into_iter().for_each(|requests| server.send(requests));
        let net = server.net.clone();
        let mut served = server.ended();
        for left in std::mem::take(&mut net.state().arrived) {
            served.push(left.number);
            if let Does::Goes(more) = left.does {
                served.extend((1..=more).map(|n| left.number + n));
            }
        }
        served.sort_unstable();
        assert_eq!(served, [0, 1, 2, 3, 4, 5]);
    });
}

/// As with callbacks, whose threads read requests. A thread that watched meanwhile goes on watching.
#[test]
fn what_other_threads_than_the_loop_find_is_served_too() {
    in_schedules(3000, || {
        let server = Server::new(2);
        server.send(requests([(0, Does::WaitsFor(4)), (1, Does::Little)]));
        let gives = {
            let workers = server.workers.clone();
            spawn(move || {
                requests([(2, Does::Little), (3, Does::Little)]).into_iter().for_each(|it| workers.give(it))
            })
        };
        server.net.wait_for(|served| served.len() == 3);
        server.send(requests([(4, Does::Little)]));
        gives.join().unwrap();
        server.serves(5);
    });
}

#[test]
fn one_thread_serves_all_there_is() {
    in_schedules(3000, || {
        let server = Server::new(1);
        server.send(requests([(0, Does::Little), (1, Does::Goes(1)), (3, Does::Little)]));
        server.serves(4);
    });
}

/// A request that comes beside a source that always has more is found, and has its turn.
#[test]
fn more_of_one_source_keeps_no_other_one_waiting() {
    in_schedules(3000, || {
        let server = Server::new(1);
        server.net.slow.store(true, Relaxed);
        server.send(requests([(100, Does::Goes(30))]));
        server.net.wait_for(|served| served.len() > 2);
        let before = server.net.state().served.len();
        server.send(requests([(0, Does::Little)]));
        server.net.wait_for(|served| served.contains(&0) && served.len() > 31);
        let at = server.net.state().served.iter().position(|number| *number == 0).unwrap();
        // What is being served, what was given already, and what is served until the loop has looked.
        assert!(at <= before.max(2) + 4, "{at}th, sent after {before}");
        server.net.exit();
        server.ended();
    });
}

/// As when a thread cannot be made.
#[test]
fn all_threads_end_when_they_are_told_to() {
    in_schedules(3000, || {
        let server = Server::new(3);
        server.send(requests([(0, Does::Little), (1, Does::Goes(1))]));
        if thread_rng().gen_bool(0.5) {
            server.net.wait_for(|served| served.len() == 3);
        }
        server.workers.end();
        server.ended();
    });
}
