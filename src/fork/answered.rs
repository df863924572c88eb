//! What forked children have answered of the requests that they share with their parent.
#![allow(unsafe_code)]

use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicPtr, AtomicU64};

/// So many of the latest are known: more than a parent keeps for an answer.
const MOST: usize = 512;

/// Numbers of requests in anonymous MAP_SHARED memory, from the first fork on that concerns them. No heap, and no lock.
#[derive(Default)]
pub struct Answered {
    /// NULL, or a mapping of so many words that lasts as long as this: 0, or one more than a request's number.
    words: AtomicPtr<[AtomicU64; MOST]>,
}

impl Answered {
    /// The calling thread is about to fork a child that may answer. Without memory what that does stays unknown.
    pub fn share(&self) {
        if self.is_shared() {
            return;
        }
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let words = unsafe {
            libc::mmap(
                null_mut(),
                size_of::<[AtomicU64; MOST]>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if words != libc::MAP_FAILED
            && self.words.compare_exchange(null_mut(), words.cast(), AcqRel, Relaxed).is_err()
        {
            unmap(words.cast());
        }
    }

    /// Whether a child may have answered something.
    #[inline]
    pub fn is_shared(&self) -> bool {
        !self.words.load(Relaxed).is_null()
    }

    fn word(&self, request: u64) -> Option<&AtomicU64> {
        // SAFETY: NULL, or a mapping that lasts as long as `self`; zero bytes are words of 0.
        let words = unsafe { self.words.load(Acquire).as_ref() }?;
        words.get((request % MOST as u64) as usize)
    }

    /// The request has its answer.
    pub fn note(&self, request: u64) {
        if let Some(word) = self.word(request) {
            word.store(request + 1, Relaxed);
        }
    }

    /// Whether that was noted.
    pub fn has(&self, request: u64) -> bool {
        self.word(request).is_some_and(|word| word.load(Relaxed) == request + 1)
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        let words = *self.words.get_mut();
        if !words.is_null() {
            unmap(words);
        }
    }
}

fn unmap(words: *mut [AtomicU64; MOST]) {
    // SAFETY: a mapping of ours of this length, which nobody else in this process knows any more.
    unsafe { libc::munmap(words.cast(), size_of::<[AtomicU64; MOST]>()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::testing::fork;

    #[test]
    fn a_parent_knows_what_its_children_have_answered() {
        let answered = Answered::default();
        answered.note(1);
        assert!(!answered.has(1) && !answered.is_shared());
        answered.share();
        assert!(!answered.has(0) && answered.is_shared());
        assert!(
            fork(|| {
                answered.note(0);
                answered.note(7);
                answered.has(0)
            })
            .succeeded()
        );
        assert!(answered.has(0) && answered.has(7) && !answered.has(8));
        answered.note(7 + MOST as u64);
        assert!(!answered.has(7) && answered.has(7 + MOST as u64));
    }
}
