//! The loop's seat while its thread serves something itself (`workers`): another thread watches, and takes the seat if the loop
//! does not come back.
//!
//! Whoever begins to serve in the seat asks a thread to watch, unless one already does or has been asked. The watcher looks now
//! and then: if it finds the same turn at two looks in a row, the owner has lost its seat. A thread that stops watching, because
//! it has something else to do or has seen no turn for a while, makes sure that no turn has begun without a watcher meanwhile.
#![forbid(unsafe_code)]

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// Watching stops after this many looks without a turn.
const QUIET: u32 = if cfg!(shuttle) { 2 } else { 20 };

/// The seat of a loop.
#[derive(Default)]
pub struct Seat {
    /// Counts each time its owner begins or stops serving something: odd while the owner serves.
    turns: AtomicU64,
    /// Whether a thread watches, or has been asked to.
    watched: AtomicBool,
}

/// What a look has shown.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// All is well.
    Nothing,
    /// The watcher has the seat now, and no longer watches.
    Taken,
    /// Nobody needs to watch.
    Quiet,
}

/// A thread that watches.
pub struct Watch<'a> {
    seat: &'a Seat,
    last: u64,
    quiet: u32,
}

impl Seat {
    /// Its owner begins to serve. Returns the turn, and whether a thread is to be asked to watch.
    pub fn begin(&self) -> (u64, bool) {
        let turn = self.turns.fetch_add(1, SeqCst) + 1;
        (turn, !self.watched.swap(true, SeqCst))
    }

    /// Its owner is done. Returns false if the seat is now another thread's.
    pub fn end(&self, turn: u64) -> bool {
        self.turns.compare_exchange(turn, turn + 1, SeqCst, SeqCst).is_ok()
    }

    /// The calling thread, which was asked to, begins to watch.
    pub fn watch(&self) -> Watch<'_> {
        Watch { seat: self, last: self.turns.load(SeqCst), quiet: 0 }
    }

    /// Nobody else was free: the request to watch has come to the owner itself, which is serving nothing.
    pub fn is_unwatched(&self) {
        self.watched.store(false, SeqCst);
    }
}

impl Watch<'_> {
    /// Looks once more.
    pub fn look(&mut self) -> Seen {
        let Watch { seat, .. } = self;
        let turns = seat.turns.load(SeqCst);
        let is_same = turns == std::mem::replace(&mut self.last, turns);
        if is_same && turns % 2 == 1 {
            if !seat.end(turns) {
                return Seen::Nothing;
            }
            seat.watched.store(false, SeqCst);
            return Seen::Taken;
        }
        self.quiet = if is_same { self.quiet + 1 } else { 0 };
        if self.quiet < QUIET {
            return Seen::Nothing;
        }
        self.quiet = 0;
        seat.watched.store(false, SeqCst);
        // A turn may have begun just before, without asking anybody.
        if seat.turns.load(SeqCst) == turns || seat.watched.swap(true, SeqCst) {
            Seen::Quiet
        } else {
            Seen::Nothing
        }
    }

    /// The thread has something else to do. Returns whether another one is to be asked.
    pub fn leave(self) -> bool {
        let Watch { seat, .. } = self;
        seat.watched.store(false, SeqCst);
        seat.turns.load(SeqCst) % 2 == 1 && !seat.watched.swap(true, SeqCst)
    }
}

/// Tries thread schedules one after the other.
#[cfg(all(test, shuttle))]
mod schedules {
    use std::sync::Arc;

    use shuttle::sync::mpsc::{Receiver, Sender, channel};
    use shuttle::thread::{spawn, yield_now};

    use super::*;
    use crate::sync::{Condvar, Mutex, in_schedules};

    /// How often the seat was taken.
    #[derive(Default)]
    struct Owners {
        now: Mutex<u32>,
        taken: Condvar,
    }

    /// Takes short turns, and then one that ends only with the loss of the seat.
    fn owns(seat: &Seat, owners: &Owners, ask: &Sender<()>, short: u32) {
        let begin = || {
            let (turn, asks) = seat.begin();
            if asks {
                ask.send(()).unwrap();
            }
            turn
        };
        for _ in 0..short {
            let turn = begin();
            yield_now();
            // A look may have found it too long.
            if !seat.end(turn) {
                return;
            }
        }
        let turn = begin();
        let mut now = owners.now.lock().unwrap();
        while *now == 0 {
            now = owners.taken.wait(now).unwrap();
        }
        assert!(!seat.end(turn));
    }

    /// Watches when it is asked, until it has the seat; `busy`: at first it has something else to do.
    fn watches(seat: &Seat, owners: &Owners, asked: &Mutex<Receiver<()>>, ask: &Sender<()>, mut busy: bool) {
        loop {
            asked.lock().unwrap().recv().unwrap();
            if *owners.now.lock().unwrap() > 0 {
                return;
            }
            let mut watch = seat.watch();
            loop {
                if std::mem::take(&mut busy) {
                    if watch.leave() {
                        ask.send(()).unwrap();
                    }
                    break;
                }
                yield_now();
                match watch.look() {
                    Seen::Nothing => {}
                    Seen::Quiet => break,
                    Seen::Taken => {
                        let mut now = owners.now.lock().unwrap();
                        *now += 1;
                        assert_eq!(*now, 1, "the seat is taken twice");
                        owners.taken.notify_all();
                        return;
                    }
                }
            }
        }
    }

    fn scenario(short: u32) {
        let (seat, owners) = (Arc::new(Seat::default()), Arc::new(Owners::default()));
        let (ask, asked) = channel();
        let asked = Arc::new(Mutex::new(asked));
        let watchers = [false, true].map(|busy| {
            let (seat, owners, asked, ask) = (seat.clone(), owners.clone(), asked.clone(), ask.clone());
            spawn(move || watches(&seat, &owners, &asked, &ask, busy))
        });
        owns(&seat, &owners, &ask, short);
        // It may have been a short turn that was found too long: then there is a new owner too.
        for watcher in watchers {
            ask.send(()).unwrap();
            ask.send(()).unwrap();
            watcher.join().unwrap();
        }
        assert_eq!(*owners.now.lock().unwrap(), 1);
    }

    #[test]
    fn a_turn_that_does_not_end_loses_the_seat_to_one_thread() {
        for short in 0..3 {
            in_schedules(2000, move || scenario(short));
        }
    }
}
