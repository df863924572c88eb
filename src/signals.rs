//! The signal mask of a thread: all signals are blocked around a call, as in libtirpc, except where the program's code
//! runs, which keeps the mask that the program knows.
//!
//! # Invariants
//! - A mask that is changed here is restored by the thread that had it, even if the work in between panics.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use once_cell::race::OnceBox;

/// A signal mask.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct SignalMask(libc::sigset_t);

impl SignalMask {
    /// For functions that take a `const sigset_t *`.
    pub fn as_ptr(&self) -> *const libc::sigset_t {
        &raw const self.0
    }
}

/// All signals.
static FULL: OnceBox<SignalMask> = OnceBox::new();

/// All signals of this thread are blocked while this lives, as libtirpc does around a call.
pub struct BlockedSignals {
    before: SignalMask,
    /// A mask belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks all signals of the calling thread.
    pub fn all() -> BlockedSignals {
        let all = FULL.get_or_init(|| {
            let mut all = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: sigfillset writes the whole set.
            unsafe { libc::sigfillset(all.as_mut_ptr()) };
            // SAFETY: just written.
            Box::new(SignalMask(unsafe { all.assume_init() }))
        });
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `all` is a whole set, `before` is writable. It cannot fail: the operation is a valid constant.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: a sigset_t is plain integers: the zeroed one was valid even had nothing been written.
        let before = unsafe { before.assume_init() };
        BlockedSignals { before: SignalMask(before), thread: PhantomData }
    }

    /// The mask that the thread had before, to wait under.
    pub fn before(&self) -> &SignalMask {
        &self.before
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: `before` is the mask that this thread had (the type is not Send); the old mask is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before.0, std::ptr::null_mut()) };
    }
}

/// The signal mask of the calling thread.
pub fn mask() -> SignalMask {
    let mut own = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `own` is writable, and nothing is changed.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), own.as_mut_ptr()) };
    // SAFETY: a sigset_t is plain integers: the zeroed one was valid even had nothing been written.
    SignalMask(unsafe { own.assume_init() })
}

/// Gives the calling thread this mask if all of its signals are blocked, and otherwise leaves them as they are.
pub fn lift(lifted: &SignalMask) {
    let own = mask();
    // SAFETY: a whole set, and numbers of signals.
    let is_blocked = |signal| unsafe { libc::sigismember(own.as_ptr(), signal) } == 1;
    let mut all = (1..=libc::SIGSYS).chain(libc::SIGRTMIN()..=libc::SIGRTMAX());
    if all.all(|signal| matches!(signal, libc::SIGKILL | libc::SIGSTOP) || is_blocked(signal)) {
        // SAFETY: a whole set; the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, lifted.as_ptr(), std::ptr::null_mut()) };
    }
}

/// Runs `work` of the program under the signal mask that the program knows, in the middle of something that blocks
/// signals.
pub fn under_mask<T>(mask: &SignalMask, work: impl FnOnce() -> T) -> T {
    struct Restore(SignalMask);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: a mask that this thread had; the old one is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0.0, std::ptr::null_mut()) };
        }
    }
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `mask` is readable, `before` is writable. It cannot fail: the operation is a valid constant.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &mask.0, before.as_mut_ptr()) };
    // SAFETY: a sigset_t is plain integers: the zeroed one was valid even had nothing been written.
    let _restore = Restore(SignalMask(unsafe { before.assume_init() }));
    work()
}
