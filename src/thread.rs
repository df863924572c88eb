//! The calling thread: its name, its stack and what it has used. Also how many threads can run at a time.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Names the calling thread; no other thread of this process ever has the same name, which is never 0.
pub fn this() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    #[cfg(shuttle)]
    use shuttle::thread_local;
    #[cfg(not(shuttle))]
    use std::thread_local;
    thread_local! {
        static NAME: usize = NEXT.fetch_add(1, Relaxed);
    }
    NAME.with(|name| *name)
}

/// The number of processors that this process may use.
pub fn processors() -> usize {
    // Not a OnceLock: the answer takes a while, and a fork(2) by another thread in the meantime would leave the child
    // waiting for ever.
    static PROCESSORS: AtomicUsize = AtomicUsize::new(0);
    match PROCESSORS.load(Relaxed) {
        0 => {
            let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
            PROCESSORS.store(processors, Relaxed);
            processors
        }
        processors => processors,
    }
}

/// Addresses of the calling thread's own stack; a coroutine that it runs has a different one. `None` if the system does not
/// say.
pub fn own_stack() -> Option<Range<usize>> {
    thread_local! {
        static STACK: Option<Range<usize>> = find();
    }
    fn find() -> Option<Range<usize>> {
        let mut attributes = MaybeUninit::<libc::pthread_attr_t>::zeroed();
        // SAFETY: takes nothing.
        let thread = unsafe { libc::pthread_self() };
        // SAFETY: the calling thread is alive, and `attributes` is writable.
        if unsafe { libc::pthread_getattr_np(thread, attributes.as_mut_ptr()) } != 0 {
            return None;
        }
        let (mut lowest, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: initialised above; both places are writable.
        let found = unsafe { libc::pthread_attr_getstack(attributes.as_ptr(), &mut lowest, &mut size) } == 0;
        // SAFETY: initialised above, and not used any more.
        unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
        let stack = lowest.addr()..lowest.addr() + size;
        found.then(|| {
            if is_first(&stack) {
                stack.start.min(stack.end.saturating_sub(most()))..stack.end
            } else {
                stack
            }
        })
    }
    /// Whether it is the stack with which the program began, where the kernel puts some bytes first. For this stack, the system
    /// reports only the uppermost mapping, and there are several if, say, the program has locked a part of it.
    fn is_first(stack: &Range<usize>) -> bool {
        // SAFETY: a number.
        stack.contains(&(unsafe { libc::getauxval(libc::AT_RANDOM) } as usize))
    }
    /// How long that stack can be. The kernel has nothing else in the 128 MiB below its end.
    fn most() -> usize {
        const APART: usize = 128 << 20;
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is writable.
        unsafe { libc::getrlimit(libc::RLIMIT_STACK, &mut limit) };
        usize::try_from(limit.rlim_cur).map_or(APART, |limit| limit.min(APART))
    }
    STACK.with(Clone::clone)
}

/// What a thread has used.
#[derive(Clone, Copy)]
pub struct Usage {
    /// Time with a processor.
    pub processor: Duration,
    /// How often it gave up the processor to wait for something.
    pub sleeps: u64,
}

impl Usage {
    /// What the calling thread has used. `None` if the system does not say.
    pub fn now() -> Option<Usage> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut usage = MaybeUninit::<libc::rusage>::uninit();
        // The times of getrusage(2) are those of the last tick.
        // SAFETY: `time` is writable.
        if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } != 0 {
            return None;
        }
        // SAFETY: `usage` is writable.
        if unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call has succeeded, which writes all of it.
        let usage = unsafe { usage.assume_init() };
        let processor = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        Some(Usage { processor, sleeps: usage.ru_nvcsw as u64 })
    }

    /// What it has used since `before`.
    pub fn since(self, before: Usage) -> Usage {
        let processor = self.processor.saturating_sub(before.processor);
        Usage { processor, sleeps: self.sleeps.wrapping_sub(before.sleeps) }
    }
}
