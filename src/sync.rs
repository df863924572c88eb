//! Locks whose schedules a test tries one after the other (`--cfg shuttle`): elsewhere those of the standard library.
#![forbid(unsafe_code)]

#[cfg(shuttle)]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};

/// Whether a thread has panicked while it had the lock.
pub fn is_poisoned<T>(lock: &Mutex<T>) -> bool {
    #[cfg(shuttle)]
    return lock.try_lock().is_err();
    #[cfg(not(shuttle))]
    lock.is_poisoned()
}
