//! Requests that no descriptor signals, and how the program's loop gets to them.
//!
//! Other threads leave some for the loop, which they have read while waiting for replies to callbacks. And a loop that a dispatch
//! routine runs, with a poll(2) of its own, knows nothing about what the outer loop would look at after the routine has returned:
//! requests that were read together with the routine's own, and busy connections ([`busy`]), whose peers wake nobody. Nor would
//! anybody look at these if the routine is left through longjmp(3) or an exception. So where there may be such requests, the loop
//! is woken a while after a routine has begun: either a loop inside the routine, or the outer one, which finds out that the
//! routine was left. If the routine has returned by then, there is nothing to do.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::driver::busy;
use crate::driver::service_loop::PROGRAM;
use crate::ffi::{guard, step};
use crate::tirpc::progress::{self, Errand};
use crate::tirpc::{idle, library};
use crate::{fork, stats};

/// A loop inside a routine is woken this long after the routine has begun. Looking costs a few system calls, and ends a spin.
const SOON: Duration = Duration::from_millis(100);

/// For this long after a routine has run a loop, loops inside routines are woken at once.
const EAGER: Duration = Duration::from_secs(60);

/// The process whose loop is to be woken, counted from 1 as [`fork::generation`] does from 0; 0: none.
static ARMED: AtomicU64 = AtomicU64::new(0);

/// Until when they are woken at once, in the time of [`stats::tick`].
static EAGER_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Has libtirpc take requests from a connection, as its own loop does when the descriptor is readable.
pub fn serve_fd(fd: RawFd) {
    // Without libtirpc there are no transports: every one is registered with it.
    if let Ok(library) = library() {
        // SAFETY: a descriptor that is not registered is ignored; the calling thread is the loop's.
        unsafe { (library.svc_getreq_common)(fd) };
    }
}

/// Serves what was left for the loop. Called in its thread, and under no guard: a dispatch routine may throw.
pub fn serve_left() {
    /// How many are yet to be looked at. If a routine is left other than by returning, the loop's next turn sees to them.
    struct Rest(usize);

    impl Drop for Rest {
        fn drop(&mut self) {
            if self.0 > 0 {
                guard(|| {
                    wake_left();
                    Ok(())
                });
            }
        }
    }

    // What is left meanwhile gets a turn of its own.
    let mut rest = Rest(step(|| Ok(PROGRAM.left())).unwrap_or_default());
    while let Some(less) = rest.0.checked_sub(1) {
        rest.0 = less;
        // A connection may have gone since, and its number be that of a libtirpc connection, which reads until a request is
        // complete.
        if let Ok(Some(fd)) = step(|| Ok(PROGRAM.take_left().filter(|fd| idle::is_own(*fd)))) {
            serve_fd(fd);
        }
    }
}

/// Has the loop look, in its next turn, at what callbacks have left for it.
pub fn wake_left() {
    progress::call_at(Errand::Left, Instant::now(), serve_left);
}

/// A dispatch routine begins in the loop's thread. `more`: its connection has further requests, or is getting some, that no
/// descriptor signals.
pub fn begins(more: bool) {
    if more || busy::are_untold() || PROGRAM.has_left() {
        watch();
    }
}

fn watch() {
    let eager = EAGER_UNTIL.load(Relaxed);
    if eager != 0 && stats::tick() < eager {
        look_after(Duration::ZERO);
    } else if ARMED.load(Relaxed) != fork::generation() + 1 || !progress::is_polled() {
        look_after(SOON);
    }
}

#[cold]
fn look_after(time: Duration) {
    ARMED.store(fork::generation() + 1, Relaxed);
    progress::call_at(Errand::Inside, Instant::now() + time, look);
}

/// Looks at what only the outer loop would look at, if a routine is under way: then this runs in a loop inside the routine.
fn look() {
    let _ = step(|| {
        ARMED.store(0, Relaxed);
        let owners = PROGRAM.owners();
        if !owners.is_empty() {
            EAGER_UNTIL.store(stats::tick() + EAGER.as_nanos() as u64, Relaxed);
            busy::leave_all();
            owners.iter().filter_map(Weak::upgrade).for_each(|owner| owner.look_again());
        }
        Ok(())
    });
    serve_left();
}
