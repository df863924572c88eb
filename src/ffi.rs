//! The C boundary in general: what every `extern "C"` function of this library starts with.
//!
//! Owned here: [`guard`], which turns errors and panics into the value that tells a C caller of failure; the panic hook;
//! conversion of C pointers, strings and slices; [`Inside`], the thread's mark of being inside this library; the text of
//! the thread's last error. Nothing here knows a protocol or libtirpc.
//!
//! Invariants:
//! - No panic crosses into C. `panic = "unwind"` stays: an abort would kill a stranger's process.
//! - What the program's functions throw passes through where they are called from [`guard_in_steps`]; a guard around them
//!   would end the process, since it can catch panics only.
//! - A thread is not cancelled inside this library, except while libtirpc's own function is at work for it, and at the
//!   end of a call.
//! - Nothing is printed. A panic inside a guard leaves its text in the thread's last error; a panic outside any
//!   guard (a Rust program that uses the crate) goes to the hook that was there before.
//! - The thread-locals behind [`Inside`] and [`guard`] have no destructor and no lazy initialiser, so that they may be
//!   used in a signal handler: mountd, for one, un-registers itself from its SIGTERM handler.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::error::{Error, Kind};
use crate::unwind;

/// A return type of a C function that has a value for "failed".
pub trait FromFailure {
    /// The value that tells the C caller about `error`.
    fn from_failure(error: &Error) -> Self;
}

impl FromFailure for () {
    fn from_failure(_: &Error) {}
}

/// `bool_t` and status returns alike: 0 is FALSE.
///
/// A function whose failure is -1 returns [`OrMinusOne`].
impl FromFailure for c_int {
    fn from_failure(_: &Error) -> c_int {
        0
    }
}

/// `enum clnt_stat`: the row of the error in the one table.
impl FromFailure for c_uint {
    fn from_failure(error: &Error) -> c_uint {
        error.clnt_stat()
    }
}

impl<T> FromFailure for *mut T {
    fn from_failure(_: &Error) -> *mut T {
        std::ptr::null_mut()
    }
}

impl<T> FromFailure for *const T {
    fn from_failure(_: &Error) -> *const T {
        std::ptr::null()
    }
}

/// An `int` whose failure value is -1.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrMinusOne(pub c_int);

impl FromFailure for OrMinusOne {
    fn from_failure(_: &Error) -> OrMinusOne {
        OrMinusOne(-1)
    }
}

/// Runs the body of a C entry point. Returns its result, or the failure value for an error or a panic.
///
/// pthread_cancel(3) of the thread is deferred meanwhile.
pub fn guard<T: FromFailure>(body: impl FnOnce() -> Result<T, Error>) -> T {
    // One access for both marks: XDR procedures come here for every four bytes.
    let result = MARKS.with(|marks| {
        step_under(marks, || {
            let _uncancelled = Uncancelled::by(marks);
            body()
        })
    });
    match result {
        Ok(value) => value,
        Err(error) => failure(error),
    }
}

/// Runs the body of a C entry point that calls functions of the program, which may throw or end their thread: no guard is
/// around those calls, and when an exception or a thread's end passes through here, it drops what the body holds.
///
/// The body does everything else in [`step`]s. While it calls the program, it holds no lock, and nothing except what
/// restores the state when it is dropped. The caller is `extern "C-unwind"`.
pub fn guard_in_steps<T: FromFailure>(body: impl FnOnce() -> Result<T, Error>) -> T {
    let _uncancelled = Uncancelled::now();
    guard_passing_in_steps(body)
}

/// As [`guard_in_steps`], for a function that ends as a cancellation point: a deferred cancellation takes effect when the
/// body has finished.
///
/// If the program called this function from inside this library, the cancellation is left to the next such function that
/// it calls from outside, because the frames in between do hold something.
pub fn guard_in_steps_cancellable<T: FromFailure + Copy>(body: impl FnOnce() -> Result<T, Error>) -> T {
    let value = guard_in_steps(body);
    cancellation_point();
    value
}

/// As [`guard_in_steps_cancellable`], for a function that passes the call on to libtirpc.
pub fn guard_passing_in_steps_cancellable<T: FromFailure + Copy>(
    body: impl FnOnce() -> Result<T, Error>,
) -> T {
    let value = guard_passing_in_steps(body);
    cancellation_point();
    value
}

/// As [`guard_in_steps`], for what runs functions of the program that may be cancelled wherever they could be without us.
pub fn guard_passing_in_steps<T: FromFailure>(body: impl FnOnce() -> Result<T, Error>) -> T {
    let no_panic = NoPanic::now();
    let result = body();
    std::mem::forget(no_panic);
    match result {
        Ok(value) => value,
        Err(error) => failure(error),
    }
}

/// Whether the caller's guard is inside another guard or a step, and not in a routine of the program: if so, a signal handler has
/// called it.
pub fn is_guard_inside_another() -> bool {
    MARKS.with(|marks| marks.guards.get() > marks.outside.get() + 1)
}

/// While this lives, the thread serves requests from inside guards, and counts as outside of them.
pub struct Serving(u32);

impl Serving {
    /// Begins here.
    pub fn now() -> Serving {
        Serving(MARKS.with(|marks| marks.outside.replace(marks.guards.get())))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        MARKS.with(|marks| marks.outside.set(self.0));
    }
}

/// What [`guard_in_steps`] does between two functions of the program. A panic becomes an error.
///
/// # Errors
/// Those of `work`; `Panic`.
#[inline(always)]
pub fn step<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    MARKS.with(|marks| step_under(marks, work))
}

#[inline(always)]
fn step_under<T>(marks: &Marks, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    install_hook();
    let depth = marks.guards.get();
    marks.guards.set(depth + 1);
    // Unwind safety: after a panic, the owner of the state poisons its handle; nothing else is resumed.
    let result = catch_unwind(AssertUnwindSafe(work));
    marks.guards.set(depth);
    match result {
        Ok(result) => result,
        Err(panic) => Err(panicked(panic)),
    }
}

/// A panic between two steps ends the process: it must not be taken for an exception of the program.
struct NoPanic {
    before: bool,
}

impl NoPanic {
    fn now() -> NoPanic {
        NoPanic { before: std::thread::panicking() }
    }
}

impl Drop for NoPanic {
    fn drop(&mut self) {
        if std::thread::panicking() != self.before {
            std::process::abort();
        }
    }
}

/// Runs a function of libtirpc that runs the program, and then `then`, with an address on the stack above the frames of that
/// function, and with true when the function has returned, or false when something of the program passes through it: an
/// exception, or the end of its thread. No guard is around the function.
pub fn guard_around<F: Copy>(
    find: impl FnOnce() -> Result<F, Error>,
    run: impl FnOnce(F),
    then: impl FnOnce(usize, bool),
) {
    struct Then<T: FnOnce(usize, bool)>(Option<T>, usize);
    impl<T: FnOnce(usize, bool)> Then<T> {
        fn run(&mut self, returned: bool) {
            guard(|| {
                if let Some(then) = self.0.take() {
                    then(self.1, returned);
                }
                Ok(())
            });
        }
    }
    impl<T: FnOnce(usize, bool)> Drop for Then<T> {
        fn drop(&mut self) {
            self.run(false);
        }
    }
    let mut found = None;
    guard(|| {
        found = Some(find()?);
        Ok(())
    });
    let place = 0u8;
    let mut then = Then(Some(then), (&raw const place).addr());
    if let Some(function) = found {
        run(function);
    }
    then.run(true);
}

fn cancellation_point() {
    if MARKS.with(|marks| marks.guards.get()) == 0 {
        // SAFETY: touches no memory. From here to the C caller there is no frame with a destructor, and no other guard.
        unsafe { pthread_testcancel() };
    }
}

/// As [`guard`], for a function that passes the call on to libtirpc: it may be cancelled wherever it could be without us.
pub fn guard_passing<T: FromFailure>(body: impl FnOnce() -> Result<T, Error>) -> T {
    match step(body) {
        Ok(value) => value,
        Err(error) => failure(error),
    }
}

#[cold]
fn failure<T: FromFailure>(error: Error) -> T {
    let value = T::from_failure(&error);
    #[cfg(test)]
    LAST_ERROR.set(Some(error));
    value
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> Error {
    // A payload may panic when it is dropped; a leak is better than that.
    let text = panic_text(&panic);
    std::mem::forget(panic);
    crate::log_error!("{text}");
    // The frames that were unwound have dropped their marks, so `Inside` needs no repair here.
    Error::new(Kind::Panic, text)
}

/// pthread_cancel(3) of this thread is deferred while this lives: cancellation unwinds from wherever the thread does
/// input or output, through frames that catch what they cannot rethrow (which ends the process), and leaves behind
/// handles that name memory which the program frees next.
pub struct Uncancelled {
    /// The state to go back to; `None` inside another `Uncancelled`.
    before: Option<c_int>,
    /// A state belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Defers cancellation of the calling thread.
    #[inline]
    pub fn now() -> Uncancelled {
        MARKS.with(Uncancelled::by)
    }

    #[inline]
    fn by(marks: &Marks) -> Uncancelled {
        let before = if marks.uncancelled.replace(true) {
            None
        } else {
            let mut before = 0;
            // SAFETY: `before` is writable. It cannot fail: the state is a valid constant.
            unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut before) };
            Some(before)
        };
        Uncancelled { before, thread: PhantomData }
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            MARKS.with(|marks| marks.uncancelled.set(false));
            // SAFETY: the state that this thread had (the type is not Send); the old one is not asked for.
            unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
        }
    }
}

/// `<pthread.h>`, x86-64 glibc.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

// This unwinds, if it does anything.
unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// The error of the thread's latest guarded function that failed, unless it has been cleared since.
#[cfg(test)]
pub fn last_error() -> Option<Error> {
    LAST_ERROR.with_borrow(Clone::clone)
}

/// The mark that this thread is inside the library, perhaps with a lock held.
///
/// An interposed function that is entered while the mark is set, by a signal handler or by libtirpc on our own behalf,
/// calls the real function and takes no lock. [`Inside::suspend`] lifts the mark around calls that may come back and are
/// meant to be interposed; no lock may be held there.
#[derive(Debug)]
pub struct Inside(());

impl Inside {
    /// Sets the mark; `None` when it is set already.
    pub fn enter() -> Option<Inside> {
        if INSIDE.replace(true) { None } else { Some(Inside(())) }
    }

    /// Runs `f` with the mark lifted.
    pub fn suspend<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Again;
        impl Drop for Again {
            fn drop(&mut self) {
                INSIDE.set(true);
            }
        }
        INSIDE.set(false);
        let _again = Again;
        f()
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// The bytes of a C string; `None` for NULL.
///
/// # Safety
/// `string` is NULL or points to a NUL-terminated string that outlives `'a` and is not written meanwhile.
pub unsafe fn cstr<'a>(string: *const c_char) -> Option<&'a CStr> {
    if string.is_null() {
        return None;
    }
    // SAFETY: not NULL, and NUL-terminated by the contract.
    Some(unsafe { CStr::from_ptr(string) })
}

/// `length` bytes from `data`; empty for length 0, whatever the pointer.
///
/// # Errors
/// NULL with a nonzero length.
///
/// # Safety
/// Unless `length` is 0 or `data` NULL, `data` points to `length` readable bytes that outlive `'a` and are not
/// written meanwhile.
pub unsafe fn bytes<'a>(data: *const u8, length: usize) -> Result<&'a [u8], Error> {
    if length == 0 {
        return Ok(&[]);
    }
    if data.is_null() || length > isize::MAX as usize {
        return Err(Error::new(Kind::Invalid, format!("NULL or invalid pointer for {length} bytes")));
    }
    // SAFETY: not NULL, and readable by the contract; u8 has no alignment.
    Ok(unsafe { std::slice::from_raw_parts(data, length) })
}

/// A reference from a C pointer; `None` for NULL or a misaligned pointer.
///
/// # Safety
/// Unless NULL, `pointer` points to a valid `T` that outlives `'a` and is not written meanwhile.
pub unsafe fn reference<'a, T>(pointer: *const T) -> Option<&'a T> {
    if !pointer.is_aligned() {
        return None;
    }
    // SAFETY: aligned, and NULL or valid by the contract.
    unsafe { pointer.as_ref() }
}

/// What every guard reads, in one place: an access to a thread-local of a shared library is a call.
struct Marks {
    /// The number of guards that the thread is inside of.
    guards: Cell<u32>,
    /// How many of them are around a routine of the program.
    outside: Cell<u32>,
    /// Whether one of them has deferred cancellation.
    uncancelled: Cell<bool>,
}

thread_local! {
    static MARKS: Marks = const { Marks { guards: Cell::new(0), outside: Cell::new(0), uncancelled: Cell::new(false) } };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static PANIC_AT: Cell<Option<(&'static str, u32)>> = const { Cell::new(None) };
}

#[cfg(test)]
thread_local! {
    static LAST_ERROR: std::cell::RefCell<Option<Error>> = const { std::cell::RefCell::new(None) };
}

/// Installed once, because std's hook would print to the program's stderr.
#[inline]
fn install_hook() {
    // Not a Once: a fork(2) in the middle of it would leave the child waiting for ever. If two threads do it at the same
    // time, the later hook calls the earlier one, which does no harm.
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Relaxed) {
        set_hook();
        DONE.store(true, Relaxed);
    }
}

#[cold]
fn set_hook() {
    unwind::load();
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if MARKS.with(|marks| marks.guards.get()) == 0 {
            before(info);
            return;
        }
        PANIC_AT.set(info.location().map(|at| (own_file(at.file()), at.line())));
    }));
}

/// The location's file name lives only as long as the hook's argument; the paths that matter are ours.
fn own_file(file: &str) -> &'static str {
    [
        "auth",
        "beside",
        "client",
        "server",
        "transport",
        "progress",
        "netid",
        "interpose",
        "driver",
        "connection",
        "chunks",
        "iwarp",
        "memory",
        "xdr",
        "wire",
    ]
    .into_iter()
    .find(|name| file.contains(name))
    .unwrap_or("code")
}

fn panic_text(panic: &Box<dyn Any + Send>) -> String {
    let what = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("unknown panic");
    match PANIC_AT.take() {
        Some((file, line)) => format!("defect in librpcrdma ({file}, line {line}): {what}"),
        None => format!("defect in librpcrdma: {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_the_failure_value_and_its_text_is_kept() {
        let value = guard::<*mut u8>(|| panic!("broken {}", 7));
        assert!(value.is_null());
        let error = last_error().expect("kept");
        assert_eq!(error.kind(), Kind::Panic);
        assert!(error.text().contains("broken 7"), "{error}");
    }

    #[test]
    fn an_error_becomes_the_failure_value_of_each_type() {
        let fail = || Error::new(Kind::Timeout, "too late");
        assert_eq!(guard::<c_int>(|| Err(fail())), 0);
        assert_eq!(guard::<OrMinusOne>(|| Err(fail())), OrMinusOne(-1));
        assert_eq!(guard::<c_uint>(|| Err(fail())), 5);
        assert_eq!(last_error().expect("kept").text(), "too late");
        assert_eq!(guard(|| Ok(3)), 3);
    }

    #[test]
    fn the_mark_is_set_once_lifted_while_suspended_and_gone_after_a_panic() {
        let inside = Inside::enter().expect("first");
        assert!(Inside::enter().is_none());
        inside.suspend(|| assert!(Inside::enter().is_some()));
        assert!(Inside::enter().is_none());
        drop(inside);
        guard::<()>(|| {
            let _inside = Inside::enter().expect("free again");
            panic!("inside")
        });
        assert!(Inside::enter().is_some());
    }

    #[test]
    fn length_zero_is_empty_whatever_the_pointer() {
        // SAFETY: length 0 and NULL are always allowed.
        assert_eq!(unsafe { bytes(std::ptr::null(), 0) }.expect("empty"), b"");
        // SAFETY: length 0 and NULL are always allowed.
        assert!(unsafe { bytes(std::ptr::null(), 1) }.is_err());
        // SAFETY: NULL is allowed.
        assert!(unsafe { cstr(std::ptr::null()) }.is_none());
    }
}
