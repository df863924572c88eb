//! Words and a lock, for each connection, that a process shares with the children that it forks.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::time::{ClockId, clock_gettime};

use super::{Lock, forks, generation};

/// How long [`SharedWords::lock`] waits for another process, in milliseconds. A holder keeps the lock for one
/// non-blocking send; only a stopped process keeps it longer.
pub const LOCK_PATIENCE_MS: i64 = 10;

/// Words and a lock in anonymous MAP_SHARED memory.
///
/// # Invariants
/// - The words and the lock have a place of `slab` to themselves, and the mutex is initialised.
/// - A place is reused only if no child was forked since it was taken: such a child would still have it.
pub struct SharedWords {
    slab: Arc<Slab>,
    place: usize,
    /// [`forks`] when the place was taken.
    forks: u64,
}

#[repr(C, align(128))]
struct Layout {
    mutex: libc::pthread_mutex_t,
    words: [AtomicU64; SharedWords::WORDS],
}

/// One mapping for many connections: a process may have no more than 65,530 mappings.
struct Slab(NonNull<Layout>);

// SAFETY: the mapping is used through process-shared mutexes and atomics only.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

/// The places that can be taken next.
#[derive(Default)]
struct Places {
    /// The process that mapped them: in a child they would be its parent's too.
    generation: u64,
    /// Places given back.
    free: Vec<(Arc<Slab>, usize)>,
    /// The latest slab, and the first of its places that were never taken.
    fresh: Option<(Arc<Slab>, usize)>,
}

static PLACES: Lock<Places> = Lock::new();

impl Slab {
    const PLACES: usize = 64;

    fn new() -> io::Result<Slab> {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Slab::PLACES * size_of::<Layout>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // From here on, Drop unmaps it.
        NonNull::new(base.cast()).map(Slab).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    fn layout(&self, place: usize) -> *mut Layout {
        debug_assert!(place < Slab::PLACES);
        self.0.as_ptr().wrapping_add(place)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // The mutexes are not destroyed: another process may still use them. They hold no resource but their bytes.
        // SAFETY: our own mapping; every holder of a place keeps the slab alive, so nobody holds a lock here.
        unsafe { libc::munmap(self.0.as_ptr().cast(), Slab::PLACES * size_of::<Layout>()) };
    }
}

impl Places {
    fn take(&mut self) -> io::Result<(Arc<Slab>, usize)> {
        if self.generation != generation() {
            *self = Places { generation: generation(), ..Places::default() };
        }
        if let Some(free) = self.free.pop() {
            return Ok(free);
        }
        let (slab, place) = match self.fresh.take() {
            Some(fresh) => fresh,
            None => (Arc::new(Slab::new()?), 0),
        };
        self.fresh = (place + 1 < Slab::PLACES).then(|| (slab.clone(), place + 1));
        Ok((slab, place))
    }
}

impl SharedWords {
    /// Number of words.
    pub const WORDS: usize = 8;

    /// A new set, all words 0.
    ///
    /// # Errors
    /// The errno of mmap(2) or of making the mutex.
    pub fn new() -> io::Result<SharedWords> {
        let mut places = PLACES.lock();
        let forks = forks();
        let (slab, place) = places.take()?;
        drop(places);
        let own = SharedWords { slab, place, forks };
        // SAFETY: nobody else has the place (invariant); zero bytes are an AtomicU64 of 0.
        unsafe { own.slab.layout(place).write_bytes(0, 1) };
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let a = attributes.as_mut_ptr();
        // SAFETY: initialises the attributes.
        check_code(unsafe { libc::pthread_mutexattr_init(a) })?;
        // SAFETY: `a` was initialised above.
        check_code(unsafe { libc::pthread_mutexattr_setpshared(a, libc::PTHREAD_PROCESS_SHARED) })?;
        // SAFETY: as above.
        check_code(unsafe { libc::pthread_mutexattr_setrobust(a, libc::PTHREAD_MUTEX_ROBUST) })?;
        // SAFETY: the place is ours alone until the next fork, and large enough for the mutex.
        check_code(unsafe { libc::pthread_mutex_init(own.mutex(), a) })?;
        Ok(own)
    }

    /// Whether no other process can have the words: no child was forked since they were made, nor is one being forked.
    #[inline]
    pub fn are_unshared(&self) -> bool {
        self.forks == forks()
    }

    /// Takes the lock; `None` when another process has kept it for too long.
    ///
    /// # Errors
    /// When the lock is unusable.
    pub fn lock(&self) -> io::Result<Option<WordsLock<'_>>> {
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
        Ok(Some(WordsLock { words: self, owner_died, thread: PhantomData }))
    }

    /// The word at `index`.
    ///
    /// # Panics
    /// When `index` is not below [`SharedWords::WORDS`].
    pub fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the mapping lives as long as `self` (invariant), and the words are only ever accessed as atomics.
        let words = unsafe { &(*self.slab.layout(self.place)).words };
        &words[index]
    }

    fn mutex(&self) -> *mut libc::pthread_mutex_t {
        // SAFETY: the place holds a Layout (invariant); no reference to it is made.
        unsafe { &raw mut (*self.slab.layout(self.place)).mutex }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        let mut places = PLACES.lock();
        // A fork that is under way already counts.
        if self.are_unshared() && places.generation == generation() {
            places.free.push((self.slab.clone(), self.place));
        }
    }
}

/// The lock, held.
pub struct WordsLock<'a> {
    words: &'a SharedWords,
    owner_died: bool,
    /// Not Send: a mutex is unlocked by the thread that locked it.
    thread: PhantomData<*const ()>,
}

impl WordsLock<'_> {
    /// Whether the last holder ended while it held the lock.
    pub fn owner_died(&self) -> bool {
        self.owner_died
    }
}

impl Drop for WordsLock<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the lock: a WordsLock is made only by `lock` and is not Send.
        unsafe { libc::pthread_mutex_unlock(self.words.mutex()) };
    }
}

fn deadline(ms: i64) -> libc::timespec {
    // pthread_mutex_timedlock uses this clock.
    let now = clock_gettime(ClockId::Realtime);
    let nsec = now.tv_nsec + ms * 1_000_000;
    libc::timespec { tv_sec: now.tv_sec + nsec / 1_000_000_000, tv_nsec: nsec % 1_000_000_000 }
}

fn check_code(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::fork::testing::fork;
    use crate::wait;

    /// Where its words are.
    fn place(words: &SharedWords) -> usize {
        std::ptr::from_ref(words.word(0)).addr()
    }

    #[test]
    fn words_are_shared_with_a_child_and_their_lock_survives_a_dead_holder() {
        let words = SharedWords::new().unwrap();
        let child = fork(|| {
            words.word(3).store(7, Relaxed);
            std::mem::forget(words.lock().unwrap().unwrap());
            true
        });
        assert!(child.succeeded());
        assert_eq!(words.word(3).load(Relaxed), 7);
        assert!(words.lock().unwrap().unwrap().owner_died());
        assert!(!words.lock().unwrap().unwrap().owner_died());
    }

    #[test]
    fn a_lock_that_another_process_keeps_is_given_up_after_a_while() {
        let words = SharedWords::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = fork(|| {
            let _lock = words.lock().unwrap().unwrap();
            (&theirs).write_all(b"x").unwrap();
            // Until the parent has seen it.
            wait::until(theirs.as_raw_fd(), wait::IN, None, None).unwrap()
        });
        assert!(wait::until(ours.as_raw_fd(), wait::IN, None, None).unwrap());
        assert!(words.lock().unwrap().is_none());
        (&ours).write_all(b"x").unwrap();
        assert!(child.succeeded());
        assert!(!words.lock().unwrap().unwrap().owner_died());
    }

    #[test]
    fn a_place_is_another_ones_again_only_if_no_child_can_have_it() {
        // Other tests take places and fork too; in a child they do not run.
        let child = fork(|| {
            let one = SharedWords::new().unwrap();
            let first = place(&one);
            one.word(2).store(7, Relaxed);
            drop(one);
            let again = SharedWords::new().unwrap();
            let is_reused = place(&again) == first && again.word(2).load(Relaxed) == 0;
            let own = || {
                // It takes none of its parent's places, neither fresh ones nor free ones.
                let here = SharedWords::new().unwrap();
                here.word(1).store(9, Relaxed);
                again.word(1).store(5, Relaxed);
                place(&again) == first
            };
            let child = fork(own).succeeded();
            let next = SharedWords::new().unwrap();
            let is_apart = next.word(1).load(Relaxed) == 0 && again.word(1).load(Relaxed) == 5;
            drop(again);
            let after = SharedWords::new().unwrap();
            is_reused && child && is_apart && place(&after) != first
        });
        assert!(child.succeeded());
    }

    /// As if another thread took a place after the prepare handlers of pthread_atfork(3) ran and before the child exists.
    #[test]
    fn what_is_taken_while_a_child_is_forked_is_its_parents_in_the_child() {
        let child = fork(|| {
            super::super::count_fork();
            let both = SharedWords::new().unwrap();
            let first = place(&both);
            // SAFETY: there is one thread. From here on this is the child.
            unsafe { super::super::after_fork() };
            let own = SharedWords::new().unwrap();
            drop(both);
            let next = SharedWords::new().unwrap();
            place(&own) != first && place(&next) != first
        });
        assert!(child.succeeded());
    }

    #[test]
    fn many_take_few_mappings() {
        let child = fork(|| {
            let all: Vec<SharedWords> = (0..640).map(|_| SharedWords::new().unwrap()).collect();
            let mut pages: Vec<usize> = all.iter().map(|words| place(words) >> 13).collect();
            pages.sort_unstable();
            pages.dedup();
            // Slabs of 8 KiB, wherever they begin.
            (10..=20).contains(&pages.len())
        });
        assert!(child.succeeded());
    }
}
