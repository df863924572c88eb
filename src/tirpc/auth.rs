//! For which part of a call an AUTH must not be shared, and the locks that ensure it.
//!
//! libtirpc's AUTHs are not made for threads: over its own stream transport each CLIENT makes one call at a time, whereas here
//! calls of several threads are under way together. What they share is taken from libtirpc's source:
//!
//! - AUTH_NONE is one handle for the whole process. It marshals a constant that `authnone_create` has made before anybody had the
//!   handle; its other operations leave it alone. It needs no lock, and must have none: all CLIENTs would share it.
//! - AUTH_SYS and AUTH_SHORT marshal a buffer that validation (of an AUTH_SHORT verifier) and refreshing replace. These three
//!   steps run under the lock. Wrapping calls the program's own procedure, which may wait for whatever it likes, including other
//!   calls with this AUTH, so it runs without the lock.
//! - Any other AUTH is held for one call at a time, from marshalling to the end. RPCSEC_GSS checks the verifier of a reply
//!   against the sequence number of its latest call, and AUTH_DES against the latest timestamp. What an AUTH of the program's own
//!   does is unknown, and over libtirpc's transport it, too, sees one call at a time. A thread that waits for such an AUTH does
//!   so within the time of its call: the holder may be waiting for this very thread.
//!
//! # Invariants
//! - An AUTH has an entry here while it is held, and no longer: the memory of a destroyed AUTH may become another one.
//! - A thread that holds an AUTH and asks for it again, because a procedure of the program or a signal handler makes a
//!   call, gets nothing and goes on.
//! - No lock of the table is held while waiting for or calling anything.
//! - A forked child has a table of its own: the threads that hold anything in its parent's do not exist there.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use crate::error::{Error, Kind};
use crate::fork;
use crate::signals::SignalMask;
use crate::thread;
use crate::tirpc::{AUTH, auth_ops, auth_stat, is_libtirpcs, library};
use crate::wait::Event;

/// The part of a call during which its AUTH must not be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Nothing.
    Nothing,
    /// Marshalling, validating and refreshing, each by itself.
    Steps,
    /// All of it, and one call at a time.
    Call,
}

/// The process's AUTH_NONE handle.
pub fn none() -> *mut AUTH {
    // SAFETY: takes nothing; returns a shared static handle.
    let auth = library().map_or(null_mut(), |library| unsafe { (library.authnone_create)() });
    if !auth.is_null() {
        // SAFETY: just made, and never written again.
        NONE.store(unsafe { (*auth).ah_ops }.cast_mut(), Ordering::Relaxed);
    }
    auth
}

/// For which part of a call `auth` must not be shared.
///
/// Its operations tell: the credential of an RPCSEC_GSS AUTH shows its flavor only after the first call.
///
/// # Safety
/// `auth` is a live AUTH.
pub unsafe fn share(auth: *mut AUTH) -> Share {
    // SAFETY: alive by the contract; nobody changes the operations of an AUTH.
    let ops = unsafe { (*auth).ah_ops }.cast_mut();
    if ops.is_null() {
        Share::Call
    } else if ops == NONE.load(Ordering::Relaxed) {
        Share::Nothing
    } else if ops == SYS.load(Ordering::Relaxed) {
        Share::Steps
    } else if ops == OTHER.load(Ordering::Relaxed) {
        Share::Call
    } else {
        // SAFETY: by the contract.
        unsafe { find_out(auth, ops) }
    }
}

/// The operations of AUTH_NONE and of AUTH_SYS, one static table each, and the latest table that is neither.
static NONE: AtomicPtr<auth_ops> = AtomicPtr::new(null_mut());
static SYS: AtomicPtr<auth_ops> = AtomicPtr::new(null_mut());
static OTHER: AtomicPtr<auth_ops> = AtomicPtr::new(null_mut());

/// # Safety
/// `auth` is a live AUTH with the operations `ops`, which are not NULL.
#[cold]
unsafe fn find_out(auth: *mut AUTH, ops: *mut auth_ops) -> Share {
    // SAFETY: alive; no reference is made.
    let flavor = unsafe { &raw const (*auth).ah_cred.oa_flavor };
    // SAFETY: as above. Volatile: validation in another thread may be about to write AUTH_SHORT over AUTH_SYS.
    let flavor = unsafe { flavor.read_volatile() };
    // SAFETY: alive, and never written.
    let table = unsafe { &*ops };
    let functions = [
        table.ah_marshal.map(|f| f as *const c_void),
        table.ah_validate.map(|f| f as *const c_void),
        table.ah_refresh.map(|f| f as *const c_void),
        table.ah_wrap.map(|f| f as *const c_void),
        table.ah_unwrap.map(|f| f as *const c_void),
    ];
    let sys = matches!(flavor, auth_stat::AUTH_SYS | auth_stat::AUTH_SHORT);
    if sys && functions.iter().all(|f| f.is_some_and(is_libtirpcs)) {
        SYS.store(ops, Ordering::Relaxed);
        Share::Steps
    } else {
        OTHER.store(ops, Ordering::Relaxed);
        Share::Call
    }
}

/// Waits until this thread has `auth` to itself; returns `None` at once if it already has. Meanwhile `mask` lets signals through.
///
/// # Errors
/// `Timeout` if others held it until `deadline`.
pub fn lock(auth: *mut AUTH, deadline: Instant, mask: &SignalMask) -> Result<Option<Held>, Error> {
    acquire(auth.addr(), Some(deadline), Some(mask)).map_err(|Late| {
        let text = "other calls with the same AUTH were under way for the whole time of this one";
        Error::new(Kind::Timeout, text)
    })
}

/// As [`lock`], where others, too, hold the AUTH only for a step: so there is no deadline, and no signal is let through.
pub fn step(auth: *mut AUTH) -> Option<Held> {
    match acquire(auth.addr(), None, None) {
        Ok(held) => held,
        Err(Late) => unreachable!("there is no deadline"),
    }
}

/// The deadline has passed.
struct Late;

fn acquire(auth: usize, deadline: Option<Instant>, mask: Option<&SignalMask>) -> Result<Option<Held>, Late> {
    let table = Table::current();
    let me = thread::this();
    let mut shard = table.shard(auth);
    let Some(entry) = shard.iter_mut().find(|entry| entry.auth == auth) else {
        shard.push(Entry { auth, owner: me, waiters: VecDeque::new() });
        return Ok(Some(Held { table, auth }));
    };
    if entry.owner == me {
        return Ok(None);
    }
    // In a signal handler that has interrupted this thread's wait: the AUTH is handed to both, and the interrupted wait gives it
    // back.
    let own = entry.waiters.iter().find(|(thread, _)| *thread == me).map(|(_, turn)| turn.clone());
    let nested = own.is_some();
    let turn = own.unwrap_or_else(|| {
        let turn = Arc::new(Event::new());
        entry.waiters.push_back((me, turn.clone()));
        turn
    });
    drop(shard);
    let held = || if nested { None } else { Some(Held { table, auth }) };
    loop {
        if turn.has_happened() {
            return Ok(held());
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            break;
        }
        turn.wait(left, mask);
    }
    let mut shard = table.shard(auth);
    if turn.has_happened() {
        // The AUTH was handed over at the last moment, and goes on to the next waiter.
        drop(shard);
        drop(held());
    } else if !nested && let Some(entry) = shard.iter_mut().find(|entry| entry.auth == auth) {
        entry.waiters.retain(|(_, other)| !Arc::ptr_eq(other, &turn));
    }
    Err(Late)
}

/// An AUTH that this thread has to itself.
pub struct Held {
    table: &'static Table,
    auth: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        // A child that was forked meanwhile has another table, in which this is not held.
        if self.table.generation != fork::generation() {
            return;
        }
        let mut shard = self.table.shard(self.auth);
        let Some(index) = shard.iter().position(|entry| entry.auth == self.auth) else { return };
        match shard[index].waiters.pop_front() {
            Some((thread, turn)) => {
                shard[index].owner = thread;
                // Under the lock: a waiter whose time ends now must find either itself in the queue or its turn come.
                turn.happen();
                drop(shard);
            }
            None => drop(shard.swap_remove(index)),
        }
    }
}

/// An AUTH that is held.
struct Entry {
    auth: usize,
    owner: usize,
    /// Those that get it next, in the order in which they came.
    waiters: VecDeque<(usize, Arc<Event>)>,
}

/// Number of shards: with this many, calls rarely meet at one, and together they take a page or two.
const SHARDS: usize = 64;

/// The AUTHs that are held in one process.
struct Table {
    /// The fork generation in which the table was made.
    generation: u64,
    shards: [Shard; SHARDS],
}

/// Has a cache line of its own, so that threads with different AUTHs do not disturb each other.
#[derive(Default)]
#[repr(align(64))]
struct Shard(Mutex<Vec<Entry>>);

impl Table {
    fn current() -> &'static Table {
        static CURRENT: AtomicPtr<Table> = AtomicPtr::new(null_mut());
        let generation = fork::generation();
        loop {
            let current = CURRENT.load(Ordering::Acquire);
            // SAFETY: NULL, or a table that was made below and is never freed.
            if let Some(table) = unsafe { current.as_ref() }
                && table.generation == generation
            {
                return table;
            }
            // The parent's table is left behind: a thread that does not exist here may have had it locked.
            let shards = std::array::from_fn(|_| Shard::default());
            let fresh = Box::into_raw(Box::new(Table { generation, shards }));
            if CURRENT.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                // SAFETY: made above, and shown to nobody.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    fn shard(&self, auth: usize) -> MutexGuard<'_, Vec<Entry>> {
        // An AUTH has 72 bytes: neighbours on the heap are 80 bytes apart.
        let shard = &self.shards[auth / 16 % SHARDS];
        shard.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::signals::BlockedSignals;

    /// Numbers that no other test of this process uses as an AUTH.
    fn fresh() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
        NEXT.fetch_add(16, Ordering::Relaxed)
    }

    fn take(auth: usize, time: Duration) -> Result<Option<Held>, Error> {
        let signals = BlockedSignals::all();
        lock(std::ptr::without_provenance_mut(auth), Instant::now() + time, signals.before())
    }

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    /// Whether nobody holds the AUTH or waits for it.
    fn is_forgotten(auth: usize) -> bool {
        Table::current().shard(auth).iter().all(|entry| entry.auth != auth)
    }

    /// How many threads wait for the AUTH.
    fn waiting(auth: usize) -> usize {
        let shard = Table::current().shard(auth);
        shard.iter().find(|entry| entry.auth == auth).map_or(0, |entry| entry.waiters.len())
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    #[test]
    fn an_auth_is_held_by_one_thread_and_handed_on_in_the_order_of_asking() {
        let auth = fresh();
        let held = take(auth, LONG).unwrap();
        assert!(held.is_some());
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in 0..4 {
                let order = &order;
                scope.spawn(move || {
                    let _held = take(auth, LONG).unwrap().expect("held by another");
                    order.lock().unwrap().push(number);
                });
                until(|| waiting(auth) == number + 1);
            }
            assert!(order.lock().unwrap().is_empty());
            drop(held);
        });
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
        assert!(is_forgotten(auth));
    }

    #[test]
    fn unrelated_auths_of_one_shard_do_not_wait_for_each_other() {
        let auth = fresh();
        let _held = take(auth, LONG).unwrap();
        let other = auth + 16 * SHARDS * 1000;
        thread::scope(|scope| {
            scope.spawn(|| assert!(take(other, Duration::ZERO).unwrap().is_some()));
        });
    }

    #[test]
    fn a_wait_ends_with_its_time_and_leaves_nothing_behind() {
        let auth = fresh();
        let held = take(auth, LONG).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let start = Instant::now();
                let error = take(auth, SHORT).map(drop).unwrap_err();
                assert_eq!(error.kind(), Kind::Timeout);
                assert!(start.elapsed() >= SHORT);
            });
        });
        assert_eq!(waiting(auth), 0);
        drop(held);
        assert!(is_forgotten(auth));
    }

    #[test]
    fn a_thread_that_holds_an_auth_is_not_held_up_by_it() {
        let auth = fresh();
        let held = take(auth, LONG).unwrap();
        assert!(take(auth, Duration::ZERO).unwrap().is_none());
        // What was not taken is not given back either.
        thread::scope(|scope| {
            scope.spawn(|| assert!(take(auth, SHORT).is_err()));
        });
        drop(held);
        assert!(is_forgotten(auth));
    }

    #[test]
    fn two_threads_that_want_each_others_auth_end_by_their_time() {
        let (a, b) = (fresh(), fresh());
        let both = std::sync::Barrier::new(2);
        thread::scope(|scope| {
            for (own, others) in [(a, b), (b, a)] {
                let both = &both;
                scope.spawn(move || {
                    let _held = take(own, LONG).unwrap();
                    both.wait();
                    let outcome = take(others, SHORT).map(drop);
                    both.wait();
                    assert_eq!(outcome.unwrap_err().kind(), Kind::Timeout);
                });
            }
        });
        assert!(is_forgotten(a) && is_forgotten(b));
    }

    #[test]
    fn one_that_is_handed_over_too_late_goes_on_to_the_next() {
        for _ in 0..200 {
            let auth = fresh();
            let held = take(auth, LONG).unwrap();
            thread::scope(|scope| {
                scope.spawn(move || drop(take(auth, Duration::from_micros(60))));
                scope.spawn(move || assert!(take(auth, LONG).unwrap().is_some()));
                until(|| waiting(auth) > 0);
                drop(held);
            });
            assert!(is_forgotten(auth));
        }
    }

    #[test]
    fn a_signal_handler_waits_with_the_thread_that_it_interrupts() {
        static AUTH: AtomicUsize = AtomicUsize::new(0);
        static ENTERED: AtomicUsize = AtomicUsize::new(0);
        static HANDLED: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn handler(_: i32) {
            ENTERED.store(1, Ordering::Relaxed);
            if take(AUTH.load(Ordering::Relaxed), LONG).is_ok_and(|held| held.is_none()) {
                HANDLED.store(1, Ordering::Relaxed);
            }
        }
        let auth = fresh();
        AUTH.store(auth, Ordering::Relaxed);
        // SAFETY: the handler of a signal that nothing else here uses; the wait that it interrupts holds no lock.
        unsafe { libc::signal(libc::SIGURG, handler as *const () as libc::sighandler_t) };
        let held = take(auth, LONG).unwrap();
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                // SAFETY: takes nothing.
                tell.send(unsafe { libc::pthread_self() }).unwrap();
                take(auth, LONG).unwrap().is_some()
            });
            let thread = told.recv().unwrap();
            until(|| waiting(auth) == 1);
            // SAFETY: the thread runs: it waits for what is held here.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGURG) }, 0);
            until(|| ENTERED.load(Ordering::Relaxed) == 1);
            drop(held);
            assert!(waiter.join().unwrap());
        });
        assert_eq!(HANDLED.load(Ordering::Relaxed), 1);
        assert!(is_forgotten(auth));
    }

    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        let auth = fresh();
        let (tell, told) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let own = fresh();
        let held = take(own, LONG).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let _held = take(auth, LONG).unwrap();
                // The lock of the shard too, at the moment of the fork.
                let _shard = Table::current().shard(auth);
                tell.send(()).unwrap();
                let _ = released.recv();
            });
            told.recv().unwrap();
            let child = fork::testing::fork(|| {
                let taken = take(auth, SHORT).is_ok_and(|held| held.is_some());
                // What this thread held in the parent is given up without a trace.
                drop(held);
                taken && take(own, SHORT).is_ok_and(|held| held.is_some())
            });
            assert!(child.succeeded());
            release.send(()).unwrap();
        });
        assert!(is_forgotten(auth));
    }

    #[test]
    fn only_the_auths_of_libtirpc_that_are_known_go_without() {
        #[link(name = "tirpc")]
        unsafe extern "C" {
            fn authunix_create_default() -> *mut AUTH;
        }
        let none = none();
        // SAFETY: alive for ever.
        assert_eq!(unsafe { share(none) }, Share::Nothing);
        // SAFETY: takes nothing.
        let sys = unsafe { authunix_create_default() };
        for _ in 0..2 {
            // SAFETY: just made.
            assert_eq!(unsafe { share(sys) }, Share::Steps);
        }
        // SAFETY: alive, with libtirpc's own operations.
        let theirs = unsafe { (*sys).ah_ops };
        // SAFETY: a static table.
        let copied = unsafe { std::ptr::read(theirs) };
        unsafe extern "C" fn own(_: *mut AUTH, _: *mut crate::xdr::XDR) -> i32 {
            crate::ffi::guard(|| Ok(1))
        }
        let ops = Box::leak(Box::new(auth_ops { ah_marshal: Some(own), ..copied }));
        // SAFETY: alive; the copy is used for its operations and flavour only.
        let mut other = unsafe { std::ptr::read(sys) };
        other.ah_ops = ops;
        for _ in 0..2 {
            // SAFETY: alive.
            assert_eq!(unsafe { share(&mut other) }, Share::Call);
        }
    }
}
