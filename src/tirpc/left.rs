//! Requests that no descriptor tells of, and how the program's loop comes to them.
//!
//! Other threads leave some for it, which they have read while they waited for replies to calls back; and a loop that a dispatch
//! routine runs, with poll(2) of its own, knows nothing of what the loop outside would look at when the routine has returned:
//! requests that were read together with the routine's own, and busy connections ([`busy`]), whose peers wake nobody. Nor would
//! anybody look at those if the routine is left by longjmp(3) or an exception. So where there may be such requests, the loop
//! is woken a while after a routine has begun: a loop inside of it, or the one outside, which finds out that it was left. Where
//! the routine has returned by then there is nothing to do.
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

/// A loop inside of a routine is woken so long after that has begun. To look costs a few system calls, and ends a spin.
const SOON: Duration = Duration::from_millis(100);

/// Where a routine has run a loop, others are woken at once, for so long.
const EAGER: Duration = Duration::from_secs(60);

/// The process whose loop is to be woken, counted from 1 as [`fork::generation`] does from 0; 0: none.
static ARMED: AtomicU64 = AtomicU64::new(0);

/// Until when it is woken at once, by [`stats::tick`].
static EAGER_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Has libtirpc take requests from a connection, as its own loop does when the descriptor is readable.
pub fn serve_fd(fd: RawFd) {
    // None without libtirpc, with which every transport is registered.
    if let Ok(library) = library() {
        // SAFETY: a descriptor that is not registered is passed over; the calling thread is the loop's.
        unsafe { (library.svc_getreq_common)(fd) };
    }
}

/// Serves what was left for the loop. Called in its thread, and under no guard: a dispatch routine may throw.
pub fn serve_left() {
    /// So many are not looked at yet. A routine may be left otherwise than by returning: the loop's next turn sees to them.
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

    // What is left meanwhile has its own turn.
    let mut rest = Rest(step(|| Ok(PROGRAM.left())).unwrap_or_default());
    while let Some(less) = rest.0.checked_sub(1) {
        rest.0 = less;
        // One may have gone since, and its number be that of a connection of libtirpc's, which reads until a request is whole.
        if let Ok(Some(fd)) = step(|| Ok(PROGRAM.take_left().filter(|fd| idle::is_own(*fd)))) {
            serve_fd(fd);
        }
    }
}

/// Has the loop look in its next turn at what calls back have left for it.
pub fn wake_left() {
    progress::call_at(Errand::Left, Instant::now(), serve_left);
}

/// A dispatch routine begins in the loop's thread while `more` requests of its connection are there, or come, of which no
/// descriptor tells.
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

/// Looks at what only the loop outside would look at, if a routine is under way: this is a loop inside of it.
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
