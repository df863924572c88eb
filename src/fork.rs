//! What fork(2) makes of a process: whether this one is still the one that it was, and what it shares with its children.
//!
//! Owns the fork generation, the cached process id, and the locks of the process ([`Lock`]): a forked child never waits for
//! one that another thread of its parent has.
//!
//! # Invariants
//! - A [`SharedPage`] holds only its lock and atomic words: no pointer, no state that a process could leave torn.
//! - Nothing here blocks except, for at most [`LOCK_PATIENCE_MS`], [`SharedPage::lock`].
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard, TryLockError};

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, test_kill_process, waitid};
use rustix::time::{ClockId, clock_gettime};

use crate::ffi::guard;

/// How long [`SharedPage::lock`] waits for another process, in milliseconds. A holder keeps the lock for one
/// non-blocking send; only a stopped process keeps it longer.
pub const LOCK_PATIENCE_MS: i64 = 10;

/// How many forks lie between this process and the one that first asked: it differs between parent and child.
///
/// Counted by a pthread_atfork handler, so it costs one load, not a system call.
#[inline]
pub fn generation() -> u64 {
    watch_forks();
    GENERATION.load(Relaxed)
}

/// getpid(2) without the system call.
#[inline]
pub fn process_id() -> u32 {
    watch_forks();
    PID.load(Relaxed)
}

/// Whether the process has ended, also if its parent has not waited for it yet (when the parent is us).
pub fn process_gone(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    if let Err(error) = test_kill_process(pid) {
        return error == Errno::SRCH;
    }
    // It exists, but perhaps as our zombie. NOWAIT leaves it to the program's own wait.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(pid), options).is_ok_and(|ended| ended.is_some())
}

static GENERATION: AtomicU64 = AtomicU64::new(0);
static PID: AtomicU32 = AtomicU32::new(0);

/// Not a Once: a fork(2) in the midst of it would leave the child waiting for ever. Two threads at a time have a fork
/// counted twice, which changes nothing.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Several times a call: only the flag is looked at.
#[inline]
fn watch_forks() {
    if !WATCHED.load(Relaxed) {
        begin_to_watch();
    }
}

#[cold]
fn begin_to_watch() {
    // Also the first guard: what it sets up must not be under way while somebody forks.
    guard(|| {
        note_process();
        Ok(())
    });
    // SAFETY: `after_fork` only stores atomics, tries locks and calls getpid, which is allowed in the child of a
    // multi-threaded process. The library is linked with -z nodelete: the handler stays mapped.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    WATCHED.store(true, Relaxed);
}

unsafe extern "C" fn after_fork() {
    guard(|| {
        GENERATION.fetch_add(1, Relaxed);
        note_process();
        let mut next = LOCKS.load(Acquire);
        // SAFETY: NULL, or a link that was made by `Lock::place` and is never freed.
        while let Some(link) = unsafe { next.as_ref() } {
            link.lock.forked();
            next = link.next;
        }
        Ok(())
    });
}

/// The locks that were ever used.
static LOCKS: AtomicPtr<Link> = AtomicPtr::new(null_mut());

struct Link {
    lock: &'static dyn Forked,
    next: *mut Link,
}

trait Forked: Sync {
    /// In the child, of which there is one thread.
    fn forked(&self);
}

/// A lock of the process that no fork(2) leaves taken: a child that is forked while another thread has it finds it free,
/// and the default in it, since the value may be half changed.
pub struct Lock<T: 'static> {
    /// Null before the first use, and in such a child.
    place: AtomicPtr<Mutex<T>>,
    known: AtomicBool,
}

impl<T: Default + Send> Lock<T> {
    /// One with the default in it.
    pub const fn new() -> Lock<T> {
        Lock { place: AtomicPtr::new(null_mut()), known: AtomicBool::new(false) }
    }

    /// Takes it, also after a panic of who had it.
    pub fn lock(&'static self) -> MutexGuard<'static, T> {
        self.place().lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes it if nobody has it.
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
            // Of two threads at a time both enter it, which does no harm; a fork before this has the child do it again.
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
            // Left as it is for the thread that forks, should it be the one that has it.
            self.place.store(null_mut(), Release);
        }
    }
}

fn note_process() {
    PID.store(std::process::id(), Relaxed);
}

/// Words and a lock that this process and its forked children share: one anonymous MAP_SHARED page.
///
/// # Invariants
/// `layout` points to our own mapping of at least one `Layout`, whose mutex is initialised.
pub struct SharedPage {
    layout: NonNull<Layout>,
}

#[repr(C)]
struct Layout {
    mutex: libc::pthread_mutex_t,
    words: [AtomicU64; SharedPage::WORDS],
}

// SAFETY: the page is used through a process-shared mutex and atomics only.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Number of words.
    pub const WORDS: usize = 8;

    /// A new page, all words 0.
    ///
    /// # Errors
    /// The errno of mmap(2) or of making the mutex.
    pub fn new() -> io::Result<SharedPage> {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Layout>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let layout =
            NonNull::new(base.cast::<Layout>()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // From here on Drop unmaps. The words are zero bytes, which is what an AtomicU64 of 0 is.
        let page = SharedPage { layout };
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let a = attributes.as_mut_ptr();
        // SAFETY: initialises the attributes.
        check_code(unsafe { libc::pthread_mutexattr_init(a) })?;
        // SAFETY: `a` was initialised above.
        check_code(unsafe { libc::pthread_mutexattr_setpshared(a, libc::PTHREAD_PROCESS_SHARED) })?;
        // SAFETY: as above.
        check_code(unsafe { libc::pthread_mutexattr_setrobust(a, libc::PTHREAD_MUTEX_ROBUST) })?;
        // SAFETY: the mapping is ours alone until the next fork, and large enough for the mutex.
        check_code(unsafe { libc::pthread_mutex_init(page.mutex(), a) })?;
        Ok(page)
    }

    /// Takes the lock; `None` when another process has kept it for too long.
    ///
    /// # Errors
    /// When the lock is unusable.
    pub fn lock(&self) -> io::Result<Option<PageLock<'_>>> {
        // SAFETY: the mutex is initialised (invariant).
        let mut code = unsafe { libc::pthread_mutex_trylock(self.mutex()) };
        if code == libc::EBUSY {
            let until = deadline(LOCK_PATIENCE_MS);
            // SAFETY: as above; `until` is a live timespec.
            code = unsafe { libc::pthread_mutex_timedlock(self.mutex(), &until) };
        }
        let owner_died = match code {
            0 => false,
            libc::EOWNERDEAD => {
                // SAFETY: we hold the lock, which was inherited from a dead owner.
                check_code(unsafe { libc::pthread_mutex_consistent(self.mutex()) })?;
                true
            }
            libc::EBUSY | libc::ETIMEDOUT => return Ok(None),
            code => return Err(io::Error::from_raw_os_error(code)),
        };
        Ok(Some(PageLock { page: self, owner_died, thread: PhantomData }))
    }

    /// A word of the page.
    ///
    /// # Panics
    /// When `index` is not below [`SharedPage::WORDS`].
    pub fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the mapping lives as long as `self` (invariant), and the words are only ever accessed as atomics.
        let words = unsafe { &(*self.layout.as_ptr()).words };
        &words[index]
    }

    fn mutex(&self) -> *mut libc::pthread_mutex_t {
        // SAFETY: the mapping holds a Layout (invariant); no reference to it is made.
        unsafe { &raw mut (*self.layout.as_ptr()).mutex }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // The mutex is not destroyed: another process may still use it. It holds no resource but its bytes.
        // SAFETY: `layout` is our own mapping; a PageLock borrows the page, so nobody holds the lock here.
        unsafe { libc::munmap(self.layout.as_ptr().cast(), size_of::<Layout>()) };
    }
}

/// The lock of a page, held.
pub struct PageLock<'a> {
    page: &'a SharedPage,
    owner_died: bool,
    /// A mutex is unlocked by the thread that locked it.
    thread: PhantomData<*const ()>,
}

impl PageLock<'_> {
    /// Whether the last holder ended while it held the lock.
    pub fn owner_died(&self) -> bool {
        self.owner_died
    }
}

impl Drop for PageLock<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the lock: a PageLock is made only by `lock` and is not Send.
        unsafe { libc::pthread_mutex_unlock(self.page.mutex()) };
    }
}

fn deadline(ms: i64) -> libc::timespec {
    // That is the clock that timedlock counts in.
    let now = clock_gettime(ClockId::Realtime);
    let nsec = now.tv_nsec + ms * 1_000_000;
    libc::timespec { tv_sec: now.tv_sec + nsec / 1_000_000_000, tv_nsec: nsec % 1_000_000_000 }
}

fn check_code(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

/// Processes for tests.
#[cfg(test)]
pub mod testing {
    /// A forked child process.
    pub struct Child(libc::pid_t);

    /// Forks; the child runs `work` and exits with 0 when it returns true.
    pub fn fork(work: impl FnOnce() -> bool) -> Child {
        // SAFETY: the child runs only `work` and _exit; glibc keeps malloc usable in a child of threads.
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

        /// Waits for its end; whether its work returned true.
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
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::wait;

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

    #[test]
    fn a_page_is_shared_with_a_child_and_its_lock_survives_a_dead_holder() {
        let page = SharedPage::new().unwrap();
        let child = testing::fork(|| {
            page.word(3).store(7, Relaxed);
            std::mem::forget(page.lock().unwrap().unwrap());
            true
        });
        assert!(child.succeeded());
        assert_eq!(page.word(3).load(Relaxed), 7);
        assert!(page.lock().unwrap().unwrap().owner_died());
        assert!(!page.lock().unwrap().unwrap().owner_died());
    }

    #[test]
    fn a_lock_that_another_process_keeps_is_given_up_after_a_while() {
        let page = SharedPage::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = testing::fork(|| {
            let _lock = page.lock().unwrap().unwrap();
            (&theirs).write_all(b"x").unwrap();
            // Until the parent has seen it.
            wait::until(theirs.as_raw_fd(), wait::IN, None, None).unwrap()
        });
        assert!(wait::until(ours.as_raw_fd(), wait::IN, None, None).unwrap());
        assert!(page.lock().unwrap().is_none());
        (&ours).write_all(b"x").unwrap();
        assert!(child.succeeded());
        assert!(!page.lock().unwrap().unwrap().owner_died());
    }
}
