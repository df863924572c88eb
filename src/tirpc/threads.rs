//! `rpcrdma_svc_run`: several threads serve the transports of the program.
//!
//! How they share the work is described in `workers`. Of the requests that the loop has found, each connection has one per turn.
//! Requests of one connection are served concurrently, each with a transport of its own ([`Transport::lend`]); those with
//! RPCSEC_GSS, whose contexts libtirpc keeps in the transport, are served one at a time, on the transport of their connection. A
//! stock transport of libtirpc is served by one thread at a time, and nobody waits for it meanwhile.
//!
//! # Invariants
//! - Only the loop, or the program itself, ends a connection; the loop does so only when no thread has a request of it.
//! - A forked child has one thread, which goes on as `svc_run` does.
//! - A transport that the program destroys lives on until the loop is out of libtirpc's functions.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{CString, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use crate::binding::Head;
use crate::connection::Request;
use crate::driver::pulls;
use crate::driver::service_loop::PROGRAM;
use crate::error::{Error, Kind};
use crate::ffi::{self, guard, guard_passing};
use crate::memory::PassStage;
use crate::per_thread::{self, Owned};
use crate::signals::{self, BlockedSignals, SignalMask};
use crate::tirpc::handover::Routines;
use crate::tirpc::idle;
use crate::tirpc::jobs::{Place, Waits};
use crate::tirpc::left::serve_fd;
use crate::tirpc::programs::find;
use crate::tirpc::progress;
use crate::tirpc::run::{self, Ready};
use crate::tirpc::transport::Transport;
use crate::tirpc::workers::{Service, Workers};
use crate::{fork, socket, stats};

/// How many threads one process may have for this.
const MOST: u32 = 1024;

/// The minimum size of their stacks.
const LEAST_STACK: usize = 2 << 20;

/// Requests that are served in order share a turn as long as they take less than this together.
const FEW_SHORT: Duration = Duration::from_micros(50);

/// Something to do for a thread.
enum Job {
    /// A request of that connection.
    Request(Arc<Transport>, Request),
    /// The next of that connection's requests that are served in order.
    InOrder(Arc<Transport>),
    /// What has arrived on a transport of libtirpc, which is [muted](run::mute).
    Stock(RawFd, u64),
}

impl Job {
    fn connection(&self) -> Option<&Arc<Transport>> {
        match self {
            Job::Request(connection, _) | Job::InOrder(connection) => Some(connection),
            Job::Stock(..) => None,
        }
    }

    /// Whether it is a Call whose message was pulled.
    fn is_pulled(&self) -> bool {
        let Job::Request(_, request) = self else { return false };
        request.message.last().is_some_and(|piece| piece.reach(PassStage::Coming))
    }
}

impl Waits for Job {
    fn place(&self, now: u64) -> Place {
        match self {
            // There is at most one for each transport.
            Job::Stock(..) => Place::next(now, 0),
            Job::Request(connection, _) | Job::InOrder(connection) => connection.next_place(now),
        }
    }
}

/// A request of this connection that a thread is serving: dropped when it is done, even by a panic of ours.
struct Done<'a>(&'a Transport);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.request_done();
    }
}

/// The threads that serve.
pub struct Threads {
    count: u32,
    workers: Workers<Program>,
    /// How many have been named.
    named: AtomicU32,
    /// The signal mask of the thread that called `rpcrdma_svc_run`.
    mask: SignalMask,
    generation: u64,
}

/// What they serve: the transports of this process.
struct Program {
    routines: Routines,
    /// More than one thread serves.
    several: bool,
    generation: u64,
}

/// The threads of this process, if it has any.
static THREADS: fork::Lock<Option<Arc<Threads>>> = fork::Lock::new();

/// Their generation plus one; 0 if there are none.
static SERVE: AtomicU64 = AtomicU64::new(0);

/// svc_exit(3) was called. That libtirpc's table is empty is no reliable sign of it: the loop may accept a connection meanwhile.
static EXIT: AtomicBool = AtomicBool::new(false);

/// Transports destroyed while the loop may be using them, in libtirpc's `svc_getreq_common`.
static BURIED: fork::Lock<Vec<Arc<Transport>>> = fork::Lock::new();

/// The transport of a connection that was accepted, with its [`Transport::number`].
struct Accepted(usize, NonNull<Transport>);

// SAFETY: used only with [`ACCEPTED`] locked, and a transport leaves that list before it is gone.
unsafe impl Send for Accepted {}

static ACCEPTED: fork::Lock<Vec<Accepted>> = fork::Lock::new();

/// Routines of the program have returned without a reply.
static PUT_OFF: AtomicBool = AtomicBool::new(false);

/// Routines of the program have forked.
static ROUTINES_FORK: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// What the loop has found: set only in its thread.
    static FOUND: Owned<VecDeque<Job>> = const { Owned::new() };
    /// The connection whose request this thread serves.
    static SERVED: Owned<Arc<Transport>> = const { Owned::new() };
    /// Whether the routine that has begun last in this thread has forked.
    static HAS_FORKED: Cell<bool> = const { Cell::new(false) };
}

/// The connection whose request the calling thread serves, in a thread of ours or in the program's loop.
fn served() -> Option<Arc<Transport>> {
    let in_loop = || {
        let owner: Arc<dyn Any + Send + Sync> = PROGRAM.innermost()?;
        owner.downcast::<Transport>().ok()?.whole().upgrade()
    };
    per_thread::get(&SERVED).or_else(in_loop)
}

/// A transport was made for an accepted connection: its requests may be left to a forked child.
pub fn accepted(connection: &Arc<Transport>) {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.swap(true, Relaxed) {
        // SAFETY: the handlers look at locks of ours, in the thread that forks, and use no heap.
        unsafe { fork::run_at_fork(before_fork, after_fork, after_fork) };
    }
    let mut known = ACCEPTED.lock();
    // Without memory for this, a child forked for its requests may find a lock taken.
    if known.try_reserve(1).is_ok() {
        known.push(Accepted(connection.number(), NonNull::from(&**connection)));
    }
}

/// The transport is about to be freed.
pub fn gone(connection: &Transport) {
    let mut known = ACCEPTED.lock();
    if let Some(at) = known.iter().position(|Accepted(_, other)| std::ptr::eq(other.as_ptr(), connection)) {
        known.swap_remove(at);
    }
}

/// A routine begins.
#[inline]
pub fn begins() {
    if ROUTINES_FORK.load(Relaxed) {
        HAS_FORKED.set(false);
    }
}

/// A routine has ended: if its thread counts as forking, it has left an atfork handler by longjmp(3).
#[inline]
pub fn ends() {
    if ROUTINES_FORK.load(Relaxed) {
        fork::quit();
    }
}

/// Whether the routine that the calling thread began last has forked.
pub fn has_forked() -> bool {
    ROUTINES_FORK.load(Relaxed) && HAS_FORKED.get()
}

/// A routine has returned without a reply: any thread may fork a child that does reply.
pub fn put_off() {
    PUT_OFF.store(true, Relaxed);
}

/// No lock is held across the fork: another atfork handler may wait for a thread that wants it.
unsafe extern "C" fn before_fork() {
    guard(|| {
        /// Whoever holds a lock gives it back sooner than this, even on a busy machine. A child sees for itself whether that was
        /// in time.
        const PATIENCE: Duration = Duration::from_millis(200);
        // If a signal handler that has interrupted this thread in here, perhaps with locks held, makes the fork, the child can
        // answer nothing.
        if !fork::enter() || ffi::is_guard_inside_another() {
            return Ok(());
        }
        let own = served();
        if own.is_some() {
            ROUTINES_FORK.store(true, Relaxed);
            HAS_FORKED.set(true);
        }
        // The thread may have been given requests of other connections by routines that have returned, or if it is in no routine
        // itself also by those that run. Whether some run is asked first: one may return meanwhile.
        let others = own.is_none() && (PROGRAM.is_dispatching() || serve()) || PUT_OFF.load(Relaxed);
        if own.is_none() && !others {
            return Ok(());
        }
        // One thread at a time does this, even for its own connection.
        let concerned = |look: &mut dyn FnMut(&Transport)| {
            let accepted = ACCEPTED.lock();
            if let Some(own) = &own {
                look(own);
            }
            if !others {
                return;
            }
            let number = own.as_ref().map(|own| own.number());
            for Accepted(other, transport) in &*accepted {
                // SAFETY: not gone as long as it is in the list and the lock is held.
                let transport = unsafe { transport.as_ref() };
                if number != Some(*other) && transport.concerns_child(number.is_none()) {
                    look(transport);
                }
            }
        };
        let await_locks = || {
            let until = Instant::now() + PATIENCE;
            loop {
                let (mut may_fork, is_late) = (true, Instant::now() >= until);
                concerned(&mut |transport| may_fork &= transport.may_fork(is_late));
                if may_fork || is_late {
                    break;
                }
                std::thread::yield_now();
            }
        };
        let mut are_any = own.is_some();
        if !are_any {
            concerned(&mut |_| are_any = true);
        }
        if !are_any {
            return Ok(());
        }
        let concerns = |mark: &mut dyn FnMut(usize)| {
            concerned(&mut |transport| {
                transport.share();
                mark(transport.number());
            });
        };
        fork::begins(concerns, await_locks);
        Ok(())
    });
}

unsafe extern "C" fn after_fork() {
    guard(|| {
        if fork::leave() {
            fork::ends();
        }
        Ok(())
    });
}

/// Whether threads of this process serve its transports.
#[inline]
pub fn serve() -> bool {
    // Whoever finds that there are none any more also sees what their routines have left.
    let serve = SERVE.load(Acquire);
    serve != 0 && serve == fork::generation() + 1
}

/// svc_exit(3) is called. A signal handler may do that.
pub fn exit() {
    EXIT.store(true, Relaxed);
}

/// Gives up libtirpc's reference to a transport that was destroyed: at once, or in the loop's next turn where another thread may
/// be the loop.
pub fn bury(share: Arc<Transport>) {
    if !serve() {
        return;
    }
    BURIED.lock().push(share);
    run::ring();
    if !serve() {
        // The threads have ended meanwhile.
        forget_buried();
    }
}

fn forget_buried() {
    let buried = std::mem::take(&mut *BURIED.lock());
    drop(buried);
}

fn threads() -> Option<Arc<Threads>> {
    THREADS.lock().clone()
}

/// Gives a request of the connection to a thread.
pub fn hand_out(connection: Arc<Transport>, request: Request) {
    /// Flavor of a credential (RFC 2203 §5).
    const RPCSEC_GSS: u32 = 6;
    let names = request.message.first().and_then(|piece| Head::names(&piece[..]));
    if names.is_some_and(|[.., flavor]| flavor == RPCSEC_GSS) {
        if connection.put_in_order(request) {
            give(Job::InOrder(connection));
        }
    } else {
        give(Job::Request(connection, request));
    }
}

fn give(job: Job) {
    if let Some(mut found) = per_thread::take(&FOUND) {
        found.push_back(job);
        let _ = per_thread::put(&FOUND, found);
    } else if let Some(threads) = threads() {
        // In a thread other than the loop's.
        threads.workers.give(job);
    }
}

/// Has `count` threads serve the transports of this process, from [`Threads::run`] on.
///
/// # Errors
/// `Invalid` for an impossible number of threads, or while others serve.
pub fn claim(count: u32) -> Result<Arc<Threads>, Error> {
    if !(1..=MOST).contains(&count) {
        return Err(Error::new(Kind::Invalid, format!("{count} threads: from 1 to {MOST} can serve")));
    }
    let mut known = THREADS.lock();
    if known.as_ref().is_some_and(|known| known.generation == fork::generation()) {
        return Err(Error::new(Kind::Invalid, "rpcrdma_svc_run() runs already"));
    }
    EXIT.store(false, Relaxed);
    let generation = fork::generation();
    let program = Program { routines: Routines::default(), several: count > 1, generation };
    let workers = Workers::new(count, program);
    let own =
        Arc::new(Threads { count, workers, named: AtomicU32::new(0), mask: signals::mask(), generation });
    Ok(known.insert(own).clone())
}

impl Threads {
    /// Serves until svc_exit(3); the calling thread serves too.
    ///
    /// # Errors
    /// When a thread cannot be made.
    ///
    /// # Safety
    /// As libtirpc's `svc_run`; the program's routines may run in several threads at a time.
    pub unsafe fn run(self: &Arc<Self>) -> Result<(), Error> {
        SERVE.store(self.generation + 1, Relaxed);
        pulls::serve_with(self.count);
        let (others, failed) = self.start();
        if failed.is_some() {
            self.workers.end();
        }
        self.work();
        // A child has none of the other threads.
        if self.generation == fork::generation() {
            for other in others {
                // SAFETY: a thread of ours that nobody else joins; it ends when there is nothing more to do.
                unsafe { libc::pthread_join(other, null_mut()) };
            }
            SERVE.store(0, SeqCst);
            pulls::serve_with(1);
            forget_buried();
            *THREADS.lock() = None;
        }
        failed.map_or(Ok(()), Err)
    }

    /// Starts the other threads. Returns those that have started, and the error if not all have.
    fn start(self: &Arc<Self>) -> (Vec<libc::pthread_t>, Option<Error>) {
        // Signals are for the program's own threads.
        let _blocked = BlockedSignals::all();
        let mut started = Vec::new();
        for number in 1..self.count {
            match self.start_one() {
                Ok(thread) => started.push(thread),
                Err(error) => {
                    let text = format!("thread {} of {} cannot be made: {error}", number + 1, self.count);
                    return (started, Some(Error::new(Kind::Os(libc::EAGAIN), text)));
                }
            }
        }
        (started, None)
    }

    /// Starts one thread. Not through Rust's library: that ends the process if there is no memory for thread-local data.
    fn start_one(self: &Arc<Self>) -> io::Result<libc::pthread_t> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: initialises the attributes.
        done(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
        let (mut thread, mut size) = (0, 0);
        // SAFETY: initialised; `size` is writable.
        unsafe { libc::pthread_attr_getstacksize(attributes.as_ptr(), &raw mut size) };
        // The size that the program's own threads get, as its routines may need it.
        // SAFETY: initialised.
        unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), size.max(LEAST_STACK)) };
        let own = Arc::into_raw(self.clone());
        // SAFETY: `thread` is writable, the attributes are initialised, and the function takes what it is given.
        let made = unsafe {
            libc::pthread_create(&raw mut thread, attributes.as_ptr(), work, own.cast_mut().cast())
        };
        // SAFETY: initialised; used no more.
        unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
        if let Err(error) = done(made) {
            // SAFETY: from just above, and no thread has it.
            drop(unsafe { Arc::from_raw(own) });
            return Err(error);
        }
        Ok(thread)
    }

    /// Names the calling thread, one of those that were started.
    fn name(&self) {
        let number = self.named.fetch_add(1, Relaxed) + 1;
        let name = CString::new(format!("rpcrdma {number}")).unwrap_or_default();
        // SAFETY: takes nothing.
        let own = unsafe { libc::pthread_self() };
        // SAFETY: the calling thread, and a string. To name another thread would take a file.
        unsafe { libc::pthread_setname_np(own, name.as_ptr()) };
    }

    /// What each thread does.
    fn work(&self) {
        self.workers.work();
        if self.generation != fork::generation() {
            // Nobody else takes the child's signals.
            signals::lift(&self.mask);
            // SAFETY: as the caller of `run`, in the only thread there is.
            unsafe { run::run() };
        }
    }
}

impl Service for Program {
    type Job = Job;
    type Source = Arc<Transport>;

    fn wait(&self, is_over: impl Fn() -> bool) -> Option<VecDeque<Job>> {
        forget_buried();
        let mut ready = Ready::none();
        // SAFETY: this thread is the loop; the contract is that of `Threads::run`.
        unsafe { run::turn(&mut ready, is_over) }.then(|| found_by(|| ready.fds().for_each(look)))
    }

    fn glance(&self, is_over: impl Fn() -> bool) -> VecDeque<Job> {
        forget_buried();
        let mut ready = Ready::none();
        // SAFETY: this thread is the loop; the contract is that of `Threads::run`.
        unsafe { run::glance(&mut ready, is_over) };
        found_by(|| ready.fds().for_each(look))
    }

    fn more_of(&self, connection: Arc<Transport>) -> VecDeque<Job> {
        match connection.finds_more() {
            true => found_by(|| look(connection.fd())),
            false => VecDeque::new(),
        }
    }

    fn source(&self, job: &Job) -> Option<Arc<Transport>> {
        job.connection().cloned()
    }

    fn keeps_seat(&self, job: &Job, behind: &VecDeque<Job>) -> bool {
        let pulled = job.is_pulled() && behind.iter().all(Job::is_pulled);
        self.routines.keep_seat(behind.len() + 1, pulled)
    }

    fn serve(&self, job: Job) -> Option<Job> {
        let routine = self.routines.begin(self.several && job.is_pulled());
        let in_order = if let Job::InOrder(connection) = &job { Some(connection.clone()) } else { None };
        guard(|| {
            self.do_job(job);
            Ok(())
        });
        let mut rest = None;
        guard(|| {
            // A child leaves the rest to its parent, whose other threads may have left locks taken.
            rest = in_order.filter(|it| !self.is_child() && it.goes_on_in_order()).map(Job::InOrder);
            Ok(())
        });
        self.routines.end(routine);
        // The loop may be asleep.
        progress::cool_down();
        rest
    }

    fn ring(&self) {
        run::ring();
    }

    fn is_over(&self) -> bool {
        EXIT.load(Relaxed)
    }

    fn is_child(&self) -> bool {
        self.generation != fork::generation()
    }

    fn clock(&self) -> u64 {
        stats::clock()
    }
}

impl Program {
    fn do_job(&self, job: Job) {
        if let Some(connection) = job.connection() {
            let _ = per_thread::put(&SERVED, connection.clone());
        }
        match job {
            Job::Request(connection, request) => {
                let _done = Done(&connection);
                let part = connection.lend();
                let serving = ffi::Serving::now();
                part.clone().dispatch(request, find, None);
                drop(serving);
                connection.take_back(part);
            }
            Job::InOrder(connection) => {
                let began = Instant::now();
                while let Some(request) = connection.next_in_order() {
                    let _done = Done(&connection);
                    let serving = ffi::Serving::now();
                    connection.clone().dispatch(request, find, None);
                    drop(serving);
                    if began.elapsed() >= FEW_SHORT || self.is_child() {
                        break;
                    }
                }
            }
            // It may have been destroyed meanwhile, and another one may have its number.
            Job::Stock(fd, serial) if run::is_muted(fd, serial) => {
                let serving = ffi::Serving::now();
                serve_fd(fd);
                drop(serving);
                run::unmute(fd, serial);
            }
            Job::Stock(..) => {}
        }
        drop(per_thread::take(&SERVED));
    }
}

/// What a pthreads function has returned.
fn done(error: c_int) -> io::Result<()> {
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// The start routine of the other threads.
extern "C" fn work(own: *mut c_void) -> *mut c_void {
    guard_passing(|| {
        // SAFETY: what `start_one` has given to this thread alone.
        let own = unsafe { Arc::from_raw(own.cast_const().cast::<Threads>()) };
        own.name();
        own.work();
        Ok(null_mut())
    })
}

/// Returns the jobs that are given to this thread, which is the loop, while `what` runs.
fn found_by(what: impl FnOnce()) -> VecDeque<Job> {
    let _ = per_thread::put(&FOUND, VecDeque::new());
    guard(|| {
        what();
        Ok(())
    });
    per_thread::take(&FOUND).unwrap_or_default()
}

/// What the loop does with a descriptor that is ready.
fn look(fd: RawFd) {
    // Listeners, connections of ours and what wakes the loop take no time; nor does a silent connection that becomes one of ours.
    let becomes_own = || idle::is_silent(fd) && matches!(socket::peek(fd), Ok(Some(b'M')));
    // And where libtirpc closes idle connections to make room, it might close one that a thread is serving.
    let alone = || idle::are_expendable();
    if idle::is_own(fd) || !socket::has_messages(fd) || becomes_own() || alone() {
        serve_fd(fd);
    } else {
        give(Job::Stock(fd, run::mute(fd)));
    }
}
