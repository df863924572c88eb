//! What each thread owns: values that are dropped when the thread ends.
//!
//! A `thread_local!` of a type that needs dropping does the same, but uses a block of the heap to remember that there is
//! something to drop. If the heap has none, glibc and Rust's standard library end the process, which is a stranger's. Here a
//! thread's values form a list, linked through the values themselves, and the first one is the thread's value of a key
//! (pthread_key_create(3)). If there is no room for that, the values are not dropped, which does no other harm.
//!
//! The values of the main thread live until the process ends, unless that thread ends before (pthread_exit(3)).
//!
//! A signal handler may interrupt all of this, and use it too. If it meets a value that the thread is working on, it does
//! without.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;
use std::mem::{ManuallyDrop, needs_drop};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst, compiler_fence};
use std::thread::LocalKey;

use crate::ffi::guard_passing;
use crate::signals::BlockedSignals;

/// A place for a value, in a `thread_local!`.
#[repr(C)]
pub struct Owned<T> {
    link: Link,
    /// The thread is working on it.
    busy: AtomicBool,
    value: Cell<ManuallyDrop<Option<T>>>,
}

/// An element of the list.
struct Link {
    next: Cell<*const Link>,
    /// Whether it is in the list.
    listed: Cell<bool>,
    /// Drops the value of the place that begins here.
    clear: unsafe fn(*const Link),
}

impl<T: 'static> Owned<T> {
    /// A place without a value.
    pub const fn new() -> Owned<T> {
        const { assert!(!needs_drop::<Owned<T>>()) };
        let link = Link { next: Cell::new(ptr::null()), listed: Cell::new(false), clear: clear::<T> };
        Owned { link, busy: AtomicBool::new(false), value: Cell::new(ManuallyDrop::new(None)) }
    }

    /// Returns the previous value; or the new one as an error, if this interrupts another use of the place.
    #[inline]
    fn replace(&self, value: Option<T>) -> Result<Option<T>, Option<T>> {
        if self.busy.load(Relaxed) {
            return Err(value);
        }
        self.busy.store(true, Relaxed);
        compiler_fence(SeqCst);
        let before = self.value.replace(ManuallyDrop::new(value));
        compiler_fence(SeqCst);
        self.busy.store(false, Relaxed);
        Ok(ManuallyDrop::into_inner(before))
    }

    /// Makes the thread drop its value when it ends. `self` lies in thread-local storage.
    #[cold]
    fn list(&self) {
        let Some(key) = key() else { return };
        // A handler may list this place or another.
        let _blocked = BlockedSignals::all();
        if self.link.listed.get() {
            return;
        }
        // SAFETY: `key` is one of ours, and is never deleted.
        let first = unsafe { libc::pthread_getspecific(key) };
        self.link.next.set(first.cast_const().cast());
        // SAFETY: as above.
        let done = unsafe { libc::pthread_setspecific(key, ptr::from_ref(self).cast()) };
        self.link.listed.set(done == 0);
    }
}

/// Takes the value of the calling thread, which then has none.
#[inline]
pub fn take<T: 'static>(key: &'static LocalKey<Owned<T>>) -> Option<T> {
    key.with(|place| place.replace(None).ok().flatten())
}

/// Gives the calling thread a value. Returns the previous one.
///
/// # Errors
/// The new value, in a signal handler that interrupts another use of the thread's place.
#[inline]
pub fn put<T: 'static>(key: &'static LocalKey<Owned<T>>, value: T) -> Result<Option<T>, T> {
    key.with(|place| {
        if !place.link.listed.get() {
            place.list();
        }
        // What comes back is what was given.
        place.replace(Some(value)).map_err(|back| back.expect("a value"))
    })
}

/// A copy of the value of the calling thread.
pub fn get<T: Clone + 'static>(key: &'static LocalKey<Owned<T>>) -> Option<T> {
    let value = take(key)?;
    let copy = value.clone();
    let _ = put(key, value);
    Some(copy)
}

/// The key of the process; `None` if the process has as many as it may have.
fn key() -> Option<libc::pthread_key_t> {
    /// The key plus one; 0: there is none.
    static KEY: AtomicUsize = AtomicUsize::new(0);
    if let Some(key) = KEY.load(Relaxed).checked_sub(1) {
        return Some(key as libc::pthread_key_t);
    }
    let mut key = 0;
    // SAFETY: `key` is writable; the library, and with it the function, stays mapped.
    if unsafe { libc::pthread_key_create(&mut key, Some(at_end)) } != 0 {
        return None;
    }
    match KEY.compare_exchange(0, key as usize + 1, Relaxed, Relaxed) {
        Ok(_) => Some(key),
        Err(other) => {
            // SAFETY: nobody else has this key.
            unsafe { libc::pthread_key_delete(key) };
            Some((other - 1) as libc::pthread_key_t)
        }
    }
}

/// A thread ends. Values that it is given from here on make a new list, for which this is called again, up to four times in
/// all.
unsafe extern "C" fn at_end(first: *mut c_void) {
    // Nobody cancels a thread that is ending.
    guard_passing(|| {
        let mut next: *const Link = first.cast_const().cast();
        while !next.is_null() {
            let at = next;
            // SAFETY: it lies in the storage of this thread, which exists as long as such functions are called.
            let link = unsafe { &*at };
            next = link.next.get();
            link.listed.set(false);
            // SAFETY: the place that begins here.
            unsafe { (link.clear)(at) };
        }
        Ok(())
    });
}

/// # Safety
/// The place that begins at `link` is alive, of this type and of the calling thread.
unsafe fn clear<T: 'static>(link: *const Link) {
    // SAFETY: by the contract; the link is the first field, and the pointer is that of the whole place.
    let place = unsafe { &*link.cast::<Owned<T>>() };
    let _ = place.replace(None);
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread::spawn;

    use super::*;

    /// Leaves another value when it is dropped.
    struct Leaves(Option<Arc<()>>);

    thread_local! {
        static FIRST: Owned<Arc<()>> = const { Owned::new() };
        static SECOND: Owned<Leaves> = const { Owned::new() };
    }

    impl Drop for Leaves {
        fn drop(&mut self) {
            if let Some(left) = self.0.take() {
                let _ = put(&FIRST, left.clone());
                let _ = put(&SECOND, Leaves(None));
            }
        }
    }

    #[test]
    fn a_value_is_the_threads_own_and_dropped_when_it_ends() {
        let value = Arc::new(());
        let given = value.clone();
        let (tell, told) = mpsc::channel();
        let thread = spawn(move || {
            assert!(take(&FIRST).is_none() && get(&FIRST).is_none());
            assert!(put(&FIRST, given.clone()) == Ok(None));
            assert!(put(&FIRST, given.clone()).is_ok_and(|before| before.is_some()));
            assert!(get(&FIRST).is_some() && take(&FIRST).is_some() && take(&FIRST).is_none());
            put(&FIRST, given.clone()).unwrap();
            tell.send(Arc::strong_count(&given)).unwrap();
        });
        assert_eq!(told.recv().unwrap(), 3);
        thread.join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
        assert!(take(&FIRST).is_none());
    }

    #[test]
    fn who_interrupts_another_use_of_a_value_does_without() {
        let value = Arc::new(());
        assert!(put(&FIRST, value.clone()) == Ok(None));
        FIRST.with(|place| place.busy.store(true, Relaxed));
        assert!(take(&FIRST).is_none() && get(&FIRST).is_none() && put(&FIRST, value.clone()).is_err());
        FIRST.with(|place| place.busy.store(false, Relaxed));
        assert!(get(&FIRST).is_some());
        drop(take(&FIRST));
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn what_a_value_leaves_when_it_is_dropped_is_dropped_too() {
        let value = Arc::new(());
        let given = value.clone();
        spawn(move || {
            let _ = put(&FIRST, given.clone());
            let _ = put(&SECOND, Leaves(Some(given)));
        })
        .join()
        .unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
        let given = value.clone();
        spawn(move || drop(put(&SECOND, Leaves(Some(given))))).join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
