//! Locks whose schedules a test tries one after the other (`--cfg shuttle`); otherwise those of the standard library.
#![forbid(unsafe_code)]

use std::sync::PoisonError;
use std::time::Duration;

#[cfg(shuttle)]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};

/// Whether a thread has panicked while it held the lock.
pub fn is_poisoned<T>(lock: &Mutex<T>) -> bool {
    #[cfg(shuttle)]
    return lock.try_lock().is_err();
    #[cfg(not(shuttle))]
    lock.is_poisoned()
}

/// A point where two processes meet without a lock: in a schedule, another thread may run here.
#[inline(always)]
pub fn meet() {
    #[cfg(shuttle)]
    atomic::AtomicBool::new(false).load(atomic::Ordering::SeqCst);
}

/// Waits while a condition holds, but for at most `time`. Schedules have no time: in them the wait is over at once, or a
/// moment later.
pub fn wait_within<'a, T>(
    lock: &'a Mutex<T>,
    told: &Condvar,
    guard: MutexGuard<'a, T>,
    time: Duration,
    waits: impl Fn(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    #[cfg(shuttle)]
    return {
        let (mut guard, _) = (guard, (told, time));
        if waits(&mut guard) {
            drop(guard);
            shuttle::thread::yield_now();
            guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        }
        guard
    };
    #[cfg(not(shuttle))]
    return {
        let _ = lock;
        told.wait_timeout_while(guard, time, waits).unwrap_or_else(PoisonError::into_inner).0
    };
}

/// Tries a scenario in `count` random schedules, and in as many with few preemptions in the worst places.
#[cfg(all(test, shuttle))]
pub fn in_schedules(count: usize, scenario: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(scenario, count);
    shuttle::check_pct(scenario, count, 3);
}
