//! Ctrl-C as an event: a thread of its own waits for it, so that what it ends need not look for it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::thread;

/// Runs `then` in another thread when SIGINT, SIGTERM or SIGHUP comes; `then` must end the process, or see to its end. It is
/// given the status that the signal asks for. Threads and processes that are made later are not interrupted by these signals
/// either. A second signal ends the process at once: `then` may be waiting for a reader that does not read.
pub fn on(then: impl FnOnce(i32) + Send + 'static) -> std::io::Result<()> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `set` may be written.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: initialised by sigemptyset.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: as above.
    let set = unsafe { set.assume_init() };
    // SAFETY: an initialised set; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, null_mut()) };
    thread::Builder::new().spawn(move || {
        let next = || {
            let mut which = 0;
            // SAFETY: an initialised set of signals, which this thread has inherited as blocked, and a number that may be
            // written.
            while unsafe { libc::sigwait(&set, &mut which) } != 0 {}
            which
        };
        let mut which = next();
        let status = 128 + which;
        if thread::Builder::new().spawn(move || then(status)).is_ok() {
            which = next();
        }
        std::process::exit(128 + which)
    })?;
    Ok(())
}
