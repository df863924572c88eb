//! Whether the loop (`workers`) hands its seat over before it serves what it has found, so that others serve beside it.
//!
//! Waking another thread takes longer than a short routine, which is therefore served in the seat. A longer one is served beside
//! others, except for pulled Calls where clients keep all processors busy. No more of these come at a time than one cache holds
//! ([`pulls`](crate::driver::pulls)): so few that threads sleep and are woken for each of them, on processors that others had.
//! With sixteen clients on the same two processors, which wrote 1 MiB each, four threads served a fifth less than one did, and
//! switched 2.6 times for each Call. So this measures how long the routines of pulled Calls wait for a processor while no other
//! thread serves. Where they do, the loop keeps its seat for those that take no longer than [`LITTLE`].
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::thread::Usage;

/// The most nanoseconds for all that the loop serves in the seat before it waits again.
const SHORT: u64 = 50_000;

/// The most nanoseconds for each pulled Call that the loop serves in the seat where processors are busy: for a longer one, waking
/// a thread still pays. Together they take no more than [`TICK`].
const LITTLE: u64 = 250_000;

/// How long, at least, the loop may spend on one request and keep its seat.
pub const TICK: Duration = Duration::from_millis(1);

/// Processors are busy where routines spend more than one part in this many of their time without one.
const CROWDED: u64 = 8;

/// What the routines of a process have taken of late, in nanoseconds. If threads end routines at the same moment, what one of
/// them has measured may be lost.
#[derive(Default)]
pub struct Routines {
    /// The longest; fades gradually.
    taken: AtomicU64,
    /// The longest of those that are measured, without the time for which others had its processor.
    used: AtomicU64,
    /// The sum of those measured that have not slept, and the time for which others had their processor: older ones count less.
    all: AtomicU64,
    waited: AtomicU64,
    /// How many are running.
    running: AtomicUsize,
}

/// A routine that is running.
pub struct Routine {
    began: Instant,
    /// Usage of its thread when it began, if it is measured.
    usage: Option<Usage>,
}

impl Routines {
    /// Whether `count` requests may be served in the seat; `pulled`: all of them are Calls that were pulled.
    pub fn keep_seat(&self, count: usize, pulled: bool) -> bool {
        let all = |each: u64| each.saturating_mul(count as u64);
        let used = self.used.load(Relaxed);
        let little = used <= LITTLE && all(used) <= TICK.as_nanos() as u64;
        all(self.taken.load(Relaxed)) <= SHORT || pulled && little && self.is_crowded()
    }

    fn is_crowded(&self) -> bool {
        self.waited.load(Relaxed) > self.all.load(Relaxed) / CROWDED
    }

    /// The calling thread begins a routine. Short ones are not worth the system calls that measure them.
    pub fn begin(&self, pulled: bool) -> Routine {
        let is_alone = self.running.fetch_add(1, Relaxed) == 0;
        let measured = is_alone && pulled && self.taken.load(Relaxed) > SHORT;
        Routine { began: Instant::now(), usage: measured.then(Usage::now).flatten() }
    }

    /// The calling thread has ended a routine.
    pub fn end(&self, routine: Routine) {
        let taken = routine.began.elapsed().as_nanos() as u64;
        let is_alone = self.running.fetch_sub(1, Relaxed) == 1;
        let since = |before| Some(Usage::now()?.since(before));
        self.took(taken, routine.usage.filter(|_| is_alone).and_then(since));
    }

    /// A routine has taken this long; `usage`: that of its thread meanwhile, if known.
    fn took(&self, taken: u64, usage: Option<Usage>) {
        longest(&self.taken, taken);
        let Some(usage) = usage else { return };
        if usage.sleeps > 0 {
            return longest(&self.used, taken);
        }
        let used = taken.min(usage.processor.as_nanos() as u64);
        longest(&self.used, used);
        sum(&self.all, taken);
        sum(&self.waited, taken - used);
    }
}

fn longest(of: &AtomicU64, now: u64) {
    let before = of.load(Relaxed);
    of.store(now.max(before - before / 16), Relaxed);
}

fn sum(of: &AtomicU64, now: u64) {
    let before = of.load(Relaxed);
    of.store((before - before / 16).saturating_add(now), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: u64 = 1000;

    /// Routines that have each taken `taken` microseconds, and had a processor for `processor` of them.
    fn routines(taken: u64, processor: u64, sleeps: u64) -> Routines {
        let routines = Routines::default();
        let usage = Usage { processor: Duration::from_micros(processor), sleeps };
        (0..20).for_each(|_| routines.took(taken * MICRO, Some(usage)));
        routines
    }

    #[test]
    fn short_ones_are_served_in_the_seat_and_long_ones_beside_others() {
        let short = routines(10, 10, 0);
        assert!(short.keep_seat(5, false) && !short.keep_seat(6, false));
        let long = routines(300, 300, 0);
        assert!(!long.keep_seat(1, false) && !long.keep_seat(1, true), "there are processors");
    }

    #[test]
    fn pulled_calls_are_served_in_the_seat_where_processors_are_busy() {
        let crowded = routines(300, 240, 0);
        assert!(crowded.keep_seat(4, true) && !crowded.keep_seat(5, true));
        assert!(!routines(400, 300, 0).keep_seat(1, true), "it is worth a thread");
        assert!(!crowded.keep_seat(1, false), "others come all at once");
        // Nobody takes the processor any more.
        let alone = Usage { processor: Duration::from_micros(300), sleeps: 0 };
        (0..20).for_each(|_| crowded.took(300 * MICRO, Some(alone)));
        assert!(!crowded.keep_seat(1, true));
    }

    #[test]
    fn who_sleeps_has_taken_all_of_its_time_and_tells_nothing_of_processors() {
        assert!(!routines(5000, 100, 3).keep_seat(1, true));
        let crowded = routines(300, 240, 0);
        crowded.took(5000 * MICRO, Some(Usage { processor: Duration::from_micros(100), sleeps: 1 }));
        assert!(!crowded.keep_seat(1, true));
        // It was a single one.
        let usual = Usage { processor: Duration::from_micros(240), sleeps: 0 };
        (0..64).for_each(|_| crowded.took(300 * MICRO, Some(usual)));
        assert!(crowded.keep_seat(1, true));
    }

    #[test]
    fn what_a_routine_uses_is_measured_where_it_takes_a_while_and_its_call_was_pulled() {
        let routines = routines(300, 300, 0);
        let not_pulled = routines.begin(false);
        assert!(not_pulled.usage.is_none() && Routines::default().begin(true).usage.is_none());
        routines.end(not_pulled);
        // A routine that is not served alone also waits for the threads beside it.
        let [first, second] = [true, true].map(|pulled| routines.begin(pulled));
        assert!(first.usage.is_some() && second.usage.is_none());
        let before = routines.all.load(Relaxed);
        routines.end(first);
        assert_eq!(routines.all.load(Relaxed), before);
        routines.end(second);
        let routine = routines.begin(true);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(3) {
            std::hint::spin_loop();
        }
        routines.end(routine);
        let used = routines.used.load(Relaxed);
        let taken = routines.taken.load(Relaxed);
        assert!(taken >= 3_000_000 && used >= 300 * MICRO && used <= taken, "{used} of {taken}");
    }
}
