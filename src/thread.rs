//! The calling thread: its name, its stack and what it has used. What others see of a thread. How many threads can run at a time.
#![allow(unsafe_code)]

use std::fmt;
use std::io::{Read, Write};
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

/// The kernel's number of the calling thread (gettid(2)).
pub fn id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// How much processor time a thread of this process has taken, in nanoseconds. `None` if there is no such thread.
pub fn processor_time(id: u32) -> Option<u64> {
    /// CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of the kernel, which pthread_getcpuclockid(3) puts together in the same way.
    const OF_A_THREAD: i32 = 4 | 2;
    read_clock(!(id as i32) << 3 | OF_A_THREAD).map(|time| time.as_nanos() as u64)
}

fn read_clock(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    let known = unsafe { libc::clock_gettime(clock, &mut time) } == 0;
    known.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Whether a thread of this process runs, or waits for a processor or for the kernel itself (its page tables, a disk): not for
/// another thread, nor for time to pass. False also if the system does not say. Uses no heap. A child that another thread forks
/// meanwhile may inherit an open file.
pub fn is_at_work(id: u32) -> bool {
    with_stat(format_args!("/proc/self/task/{id}/stat"), |[state, _]| matches!(state, b"R" | b"D"))
}

/// Whether a process is there only for its parent to learn of its end. Otherwise as [`is_at_work`].
pub fn has_ended(process: i32) -> bool {
    // The first thread may have ended before others.
    with_stat(format_args!("/proc/{process}/stat"), |stat| matches!(stat, [b"Z" | b"X", b"1" | b"0"]))
}

/// Asks the state, and the number of threads, in a file of proc(5).
fn with_stat(path: fmt::Arguments<'_>, ask: impl FnOnce([&[u8]; 2]) -> bool) -> bool {
    /// How many fields there are between the two.
    const BETWEEN: usize = 16;
    let mut whole = [0; 64];
    let mut rest = &mut whole[..];
    let written = rest.write_fmt(path);
    let left = rest.len();
    let Some(path) = written.ok().and_then(|()| std::str::from_utf8(&whole[..whole.len() - left]).ok())
    else {
        return false;
    };
    let mut stat = [0; 512];
    let read = std::fs::File::open(path).and_then(|mut file| file.read(&mut stat));
    let stat = &stat[..read.unwrap_or(0)];
    // "id (name) state ...": the name, of at most 15 bytes, may contain anything.
    let fields = stat.iter().rposition(|byte| *byte == b')').and_then(|end| stat.get(end + 2..));
    let mut fields = fields.unwrap_or_default().split(|byte| *byte == b' ');
    let (state, threads) = (fields.next(), fields.nth(BETWEEN));
    state.zip(threads).is_some_and(|(state, threads)| ask([state, threads]))
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
        let mut usage = MaybeUninit::<libc::rusage>::uninit();
        // The times of getrusage(2) are those of the last tick.
        let processor = read_clock(libc::CLOCK_THREAD_CPUTIME_ID)?;
        // SAFETY: `usage` is writable.
        if unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call has succeeded, which writes all of it.
        let usage = unsafe { usage.assume_init() };
        Some(Usage { processor, sleeps: usage.ru_nvcsw as u64 })
    }

    /// What it has used since `before`.
    pub fn since(self, before: Usage) -> Usage {
        let processor = self.processor.saturating_sub(before.processor);
        Usage { processor, sleeps: self.sleeps.wrapping_sub(before.sleeps) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn others_see_whether_a_thread_is_at_work_and_what_it_has_taken() {
        let own = processor_time(id()).unwrap();
        assert!(is_at_work(id()) && processor_time(id()).unwrap() > own);
        let (says, heard) = channel();
        let (may_end, waits) = channel::<()>();
        let other = std::thread::spawn(move || {
            says.send(id()).unwrap();
            let _ = waits.recv();
        });
        let other_id = heard.recv().unwrap();
        while is_at_work(other_id) {
            std::thread::yield_now();
        }
        assert!(other_id != id() && processor_time(other_id).is_some());
        drop(may_end);
        other.join().unwrap();
        while processor_time(other_id).is_some() {
            std::thread::yield_now();
        }
        assert!(!is_at_work(other_id));
    }
}
