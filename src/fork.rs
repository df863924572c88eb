//! How fork(2) affects a process: whether this is still the same process, and what it shares with its children.
//!
//! Owns the fork generation; the cached process id; the process-wide locks ([`Lock`]), of which a forked child never waits for
//! one that another thread of its parent holds; the taking of a connection's locks while another thread forks a child that may
//! reply ([`lock`]); and what a process shares with its children ([`SharedWords`], [`Answered`]).
//!
//! # Invariants
//! - [`SharedWords`] are only a lock and atomic words: no pointer, no state that a process could leave torn.
//! - Nothing here blocks except [`SharedWords::lock`], for at most [`shared::LOCK_PATIENCE_MS`], and, for a bounded time while
//!   other threads fork, [`lock`], [`begins`] and [`is_still_under_way`].
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard, TryLockError};

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, test_kill_process, waitid};

use crate::ffi::guard;
use crate::stats;
use crate::thread::has_ended;

mod answered;
mod connection;
mod shared;

pub use answered::Answered;
pub use connection::{begins, ends, enter, is_still_under_way, is_under_way, leave, lock, quit};
pub use shared::SharedWords;

/// The number of forks between the process that first asked and this one: it differs between parent and child.
///
/// Counted by a pthread_atfork handler, so it costs one load, not a system call.
#[inline]
pub fn generation() -> u64 {
    watch_forks();
    #[cfg(test)]
    return GENERATION.load(Relaxed) + PRETENDED.get();
    #[cfg(not(test))]
    GENERATION.load(Relaxed)
}

#[cfg(test)]
thread_local! {
    static PRETENDED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// For tests: makes [`generation`] count `forks` more in this thread, as if it were in a child.
#[cfg(test)]
pub(crate) fn pretend(forks: u64) {
    PRETENDED.set(forks);
}

/// getpid(2) without the system call.
#[inline]
pub fn process_id() -> u32 {
    watch_forks();
    PID.load(Relaxed)
}

/// Whether the process has ended, even if nobody has waited for it yet.
pub fn process_gone(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    if let Err(error) = test_kill_process(pid) {
        return error == Errno::SRCH;
    }
    // It exists, but may be a zombie. NOWAIT leaves a child of ours for the program's own wait.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid), options) {
        Ok(ended) => ended.is_some(),
        // No child of ours. Not asked through a descriptor of it (pidfd_open), which valgrind reports as unknown.
        Err(_) => has_ended(pid.as_raw_nonzero().get()),
    }
}

/// Changes when a child is forked, or is being forked, that may have inherited what existed in between. Sequentially consistent:
/// if a thread writes to shared memory with that ordering and then finds the number unchanged, every child sees what it wrote.
#[inline]
pub fn forks() -> u64 {
    watch_forks();
    FORKS.load(SeqCst)
}

static GENERATION: AtomicU64 = AtomicU64::new(0);
static FORKS: AtomicU64 = AtomicU64::new(0);
static PID: AtomicU32 = AtomicU32::new(0);

/// Not a Once: a fork(2) in the middle of one would leave the child waiting for ever. If two threads register the handlers at
/// once, each fork is counted twice, which does no harm.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Runs several times per call, so it only checks the flag.
#[inline]
fn watch_forks() {
    if !WATCHED.load(Relaxed) {
        begin_to_watch();
    }
}

#[cold]
fn begin_to_watch() {
    // Also runs the first guard: its setup must not be in progress while a thread forks.
    guard(|| {
        note_process();
        Ok(())
    });
    // SAFETY: `after_fork` only stores atomics, tries locks and calls getpid, which is allowed in the child of a
    // multi-threaded process.
    unsafe { run_at_fork(before_fork, after_fork_in_parent, after_fork) };
    WATCHED.store(true, Relaxed);
}

/// A handler of pthread_atfork(3).
pub type Handler = unsafe extern "C" fn();

/// As pthread_atfork(3), for the life of the process.
///
/// # Safety
/// The handlers may be called in any thread that forks, and `child` in the child of a process with several threads. The library
/// is linked with -z nodelete: they stay mapped.
pub unsafe fn run_at_fork(prepare: Handler, parent: Handler, child: Handler) {
    unsafe extern "C" {
        fn __register_atfork(
            prepare: Option<Handler>,
            parent: Option<Handler>,
            child: Option<Handler>,
            library: *mut c_void,
        ) -> c_int;
    }
    // pthread_atfork(3) names the library here, and exit(3) then removes its handlers. Where another thread is in one of them,
    // glibc does not find the next one, and aborts.
    // SAFETY: handlers that may be called (contract), of no library.
    unsafe { __register_atfork(Some(prepare), Some(parent), Some(child), null_mut()) };
}

/// Runs last before the fork, but for handlers that were registered before the library's first use. A constructor could register
/// it sooner; but in a program that makes no RPC the library does nothing at all.
unsafe extern "C" fn before_fork() {
    guard(|| {
        count_fork();
        connection::measure();
        Ok(())
    });
}

unsafe extern "C" fn after_fork_in_parent() {
    guard(|| {
        connection::measured();
        count_fork();
        Ok(())
    });
}

/// Before the fork, and after it in the parent: the child may or may not have what another thread takes in between.
fn count_fork() {
    FORKS.fetch_add(1, SeqCst);
}

unsafe extern "C" fn after_fork() {
    guard(|| {
        GENERATION.fetch_add(1, Relaxed);
        answered::forked();
        connection::forked();
        // What was taken since the prepare handlers ran belongs to the parent.
        FORKS.fetch_add(1, SeqCst);
        note_process();
        stats::forked();
        let mut next = LOCKS.load(Acquire);
        // SAFETY: NULL, or a link that was made by `Lock::place` and is never freed.
        while let Some(link) = unsafe { next.as_ref() } {
            link.lock.forked();
            next = link.next;
        }
        Ok(())
    });
}

/// All locks that have ever been used.
static LOCKS: AtomicPtr<Link> = AtomicPtr::new(null_mut());

struct Link {
    lock: &'static dyn Forked,
    next: *mut Link,
}

trait Forked: Sync {
    /// Called in the child, which has only one thread.
    fn forked(&self);
}

/// A process-wide lock that no fork(2) leaves taken: a child forked while another thread holds it finds it free and containing
/// the default, since the value may be half changed.
pub struct Lock<T: 'static> {
    /// Null before the first use, and in such a child.
    place: AtomicPtr<Mutex<T>>,
    known: AtomicBool,
}

impl<T: Default + Send> Lock<T> {
    /// A lock containing the default value.
    pub const fn new() -> Lock<T> {
        Lock { place: AtomicPtr::new(null_mut()), known: AtomicBool::new(false) }
    }

    /// Takes the lock, even if a holder panicked.
    pub fn lock(&'static self) -> MutexGuard<'static, T> {
        self.place().lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes the lock if nobody holds it.
    pub fn try_lock(&'static self) -> Option<MutexGuard<'static, T>> {
        match self.place().try_lock() {
            Ok(value) => Some(value),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn place(&'static self) -> &'static Mutex<T> {
        let place = self.place.load(Acquire);
        // SAFETY: NULL, or a mutex that was made below and is never freed.
        if let Some(mutex) = unsafe { place.as_ref() } {
            return mutex;
        }
        watch_forks();
        if !self.known.load(Acquire) {
            let link = Box::leak(Box::new(Link { lock: self, next: LOCKS.load(Relaxed) }));
            while let Err(other) = LOCKS.compare_exchange(link.next, link, AcqRel, Relaxed) {
                link.next = other;
            }
            // If two threads get here at once, both add the lock, which does no harm; if a fork comes before this, the child adds
            // it again.
            self.known.store(true, Release);
        }
        let fresh = Box::into_raw(Box::<Mutex<T>>::default());
        match self.place.compare_exchange(null_mut(), fresh, AcqRel, Acquire) {
            // SAFETY: made above, and never freed.
            Ok(_) => unsafe { &*fresh },
            Err(first) => {
                // SAFETY: made above, and shown to nobody.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: as at the start.
                unsafe { &*first }
            }
        }
    }
}

impl<T: Send> Forked for Lock<T> {
    fn forked(&self) {
        // SAFETY: NULL, or a mutex that was made by `place` and is never freed.
        let Some(mutex) = (unsafe { self.place.load(Relaxed).as_ref() }) else { return };
        if matches!(mutex.try_lock(), Err(TryLockError::WouldBlock)) {
            // The old mutex stays as it is, in case the forking thread itself holds it.
            self.place.store(null_mut(), Release);
        }
    }
}

fn note_process() {
    PID.store(std::process::id(), Relaxed);
}

/// Processes for tests.
#[cfg(test)]
pub mod testing {
    /// A forked child process.
    pub struct Child(libc::pid_t);

    /// Forks; the child runs `work` and exits with 0 when it returns true.
    pub fn fork(work: impl FnOnce() -> bool) -> Child {
        // SAFETY: the child runs only `work` and _exit; glibc keeps malloc usable in the child of a multi-threaded process.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
            // SAFETY: ends the process at once, without the destructors and buffers that are the parent's.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        Child(pid)
    }

    impl Child {
        /// Its process id.
        pub fn id(&self) -> u32 {
            self.0 as u32
        }

        /// Waits for the child to end; returns whether its work returned true.
        pub fn succeeded(self) -> bool {
            let mut status = 0;
            loop {
                // SAFETY: `status` is writable.
                let pid = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
                if pid == self.0 {
                    return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
                }
            }
        }

        /// Waits until it has ended, without reaping it.
        pub fn wait_for_zombie(&self) {
            let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
            // SAFETY: `info` is writable.
            unsafe { libc::waitid(libc::P_PID, self.id(), info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_forked_child_has_another_generation_and_process_id() {
        let (before, pid) = (generation(), process_id());
        let child = testing::fork(|| generation() != before && process_id() != pid);
        let id = child.id();
        assert!(!process_gone(process_id()));
        child.wait_for_zombie();
        assert!(process_gone(id), "a zombie counts as gone");
        assert!(child.succeeded());
        assert!(process_gone(id));
        assert_eq!((generation(), process_id()), (before, pid));
        // Neither a child of ours that lives nor a child of another process.
        let [(mut ours, mut theirs), (hold, mut release)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let child = testing::fork(|| {
            let lives = testing::fork(|| (&hold).read(&mut [0]).is_ok());
            let ended = testing::fork(|| true);
            ended.wait_for_zombie();
            let ids = [lives.id(), ended.id()];
            theirs.write_all(&ids.map(u32::to_ne_bytes).concat()).unwrap();
            // Until the other side has looked.
            lives.succeeded() && ended.succeeded()
        });
        let mut ids = [[0; 4]; 2];
        ids.iter_mut().for_each(|id| ours.read_exact(id).unwrap());
        let [lives, ended] = ids.map(u32::from_ne_bytes);
        assert_eq!([child.id(), lives, ended].map(process_gone), [false, false, true]);
        release.write_all(&[0]).unwrap();
        assert!(child.succeeded());
    }

    #[test]
    fn a_lock_that_another_thread_has_at_a_fork_is_free_in_the_child() {
        static HELD: Lock<Vec<u32>> = Lock::new();
        static FREE: Lock<Vec<u32>> = Lock::new();
        FREE.lock().push(2);
        let held = HELD.lock();
        std::thread::scope(|scope| {
            let forks = || {
                let nested = || HELD.try_lock().is_some_and(|held| held.is_empty());
                let child =
                    testing::fork(|| nested() && testing::fork(nested).succeeded() && *FREE.lock() == [2]);
                assert!(child.succeeded());
                assert!(HELD.try_lock().is_none());
            };
            scope.spawn(forks).join().unwrap();
        });
        drop(held);
        assert!(testing::fork(|| HELD.try_lock().is_some()).succeeded());
    }
}
