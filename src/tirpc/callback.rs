//! Serving callbacks over a connection that this process has opened: the program's dispatch routines, and the transport that
//! wakes its service loop.
//!
//! A dispatch routine gets an SVCXPRT like a server's (`transport::Transport`), but not a registered one: requests come from the
//! driver, one at a time, and are treated as libtirpc's `svc_getreq_common` treats them. So that `svc_run` serves callbacks too,
//! one bare transport of the process is registered (`waker`), whose descriptor is readable when there is something to do on any
//! connection.
//!
//! # Invariants
//! - The connection owns its `Callbacks`; they end when the last CLIENT on it is destroyed, or serves no program any more
//!   and no routine runs.
//! - The transport that requests are answered on lives as long as one connection: libtirpc ties RPCSEC_GSS contexts to it.
//! - The waker's transport and descriptor last as long as the process: the loop may be about to look at them whenever a
//!   connection ends.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use crate::connection::Request;
use crate::driver::callback::Serve;
use crate::driver::{Callee, Caller, Client, Mask};
use crate::error::{Error, Kind};
use crate::ffi::{Uncancelled, guard_passing_in_steps, step};
use crate::tirpc::bare::{LISTENING, bare};
use crate::tirpc::programs::Found;
use crate::tirpc::transport::{Transport, outlive};
use crate::tirpc::{SVCXPRT, bool_t, dispatch_t, rpc_msg, xp_ops, xprt_register, xprt_unregister};
use crate::{fork, signals};

/// A program that is served.
struct Program {
    number: u32,
    version: u32,
    dispatch: dispatch_t,
    /// Unique among all programs that the connection has ever served.
    serial: u64,
}

/// The programs of one connection.
struct Callbacks {
    client: Weak<Client>,
    programs: Mutex<Programs>,
    /// Signaled when a routine has returned.
    returned: Condvar,
    transport: Mutex<Own>,
    /// Fork generation of the process that serves.
    generation: u64,
}

#[derive(Default)]
struct Programs {
    served: Vec<Program>,
    /// Routines that run, by the serial numbers of their programs.
    running: Vec<u64>,
    serial: u64,
}

/// The transport that requests are answered on, and the connection that it was made for.
struct Own {
    transport: Option<Arc<Transport>>,
    connection: u32,
}

/// Has `dispatch` serve the callbacks of a program; NULL ends that. `greeting`: the program and version of the forward direction
/// with which a new connection is greeted.
///
/// A routine that is replaced or ended no longer runs when this returns, unless the calling thread is inside a routine itself:
/// see `in_routine`.
///
/// # Errors
/// `EMFILE`; `Invalid` when the program to be ended is not served.
pub fn serve(
    client: &Arc<Client>,
    greeting: (u32, u32),
    number: u32,
    version: u32,
    dispatch: dispatch_t,
) -> Result<(), Error> {
    static CHANGES: fork::Lock<()> = fork::Lock::new();
    // Two threads may each serve a first program on one connection, or one end and the other begin: one goes first.
    let one_at_a_time = CHANGES.lock();
    let callbacks = find(client);
    let Some(callbacks) = callbacks.or_else(|| dispatch.map(|_| Callbacks::of(client))) else {
        return Err(Error::new(Kind::Invalid, "no program is served on this connection"));
    };
    let mut programs = callbacks.programs();
    let before = programs.served.iter().position(|p| (p.number, p.version) == (number, version));
    let before = before.map(|at| programs.served.swap_remove(at));
    if dispatch.is_some() {
        // The same routine goes on.
        let same = before.as_ref().filter(|p| p.dispatch.map(|f| f as usize) == dispatch.map(|f| f as usize));
        let serial = same.map(|p| p.serial).unwrap_or_else(|| {
            programs.serial += 1;
            programs.serial
        });
        programs.served.push(Program { number, version, dispatch, serial });
    } else if before.is_none() {
        let text = format!("program {number} version {version} is not served on this connection");
        return Err(Error::new(Kind::Invalid, text));
    }
    let none = programs.served.is_empty();
    drop(programs);
    if none {
        client.stop_serving();
    } else if !client.is_serving() {
        if let Err(error) = client.start_serving(callbacks.clone(), greeting.0, greeting.1) {
            callbacks.programs().served.retain(|p| (p.number, p.version) != (number, version));
            return Err(error);
        }
        client.learn_credits();
    }
    drop(one_at_a_time);
    if let Some(before) = before {
        callbacks.wait_for_end_of(before.serial);
    }
    Ok(())
}

/// The `Callbacks` of this process, by [`key`].
fn table() -> MutexGuard<'static, HashMap<u64, Weak<Callbacks>>> {
    static TABLE: fork::Lock<HashMap<u64, Weak<Callbacks>>> = fork::Lock::new();
    TABLE.lock()
}

/// The connection's identity, while somebody holds a share of it, even a weak one as its `Callbacks` do.
fn key(client: *const Client) -> u64 {
    client.addr() as u64
}

/// The programs of a connection, if it serves some or one of its routines runs.
fn find(client: &Arc<Client>) -> Option<Arc<Callbacks>> {
    // No `Callbacks` may end under the lock of the table: its end takes the lock.
    let callbacks = table().get(&key(Arc::as_ptr(client))).and_then(Weak::upgrade)?;
    // A forked child does not serve what its parent did.
    (callbacks.generation == fork::generation()).then_some(callbacks)
}

/// What the program's loop polls for the callbacks of all connections, and for requests that others have read in its place.
///
/// It is created and registered when `svc_run` begins, because `svc_run` looks at what is registered only between its sleeps: a
/// connection that begins to serve later wakes it. A program with a loop of its own has it from when it first serves.
///
/// In a forked child it still belongs to the parent: the child gets one of its own when it needs one.
pub(super) mod waker {
    use super::*;
    use crate::driver::service_loop::PROGRAM;
    use crate::tirpc::left::serve_left;
    use crate::tirpc::{library, nothing_is_registered, xprt_register_beside};
    use crate::wait::WakeSet;
    use crate::{fork, log_warn};

    struct Waker {
        set: WakeSet,
        xprt: *mut SVCXPRT,
        registered: bool,
        generation: u64,
    }

    // SAFETY: the bare transport's memory lives for ever, and is used here only under the lock.
    unsafe impl Send for Waker {}

    static WAKER: fork::Lock<Option<Waker>> = fork::Lock::new();

    fn lock() -> MutexGuard<'static, Option<Waker>> {
        WAKER.lock()
    }

    /// Loses the waker, as a fork does while another thread has it.
    #[cfg(test)]
    pub fn lose() {
        std::mem::forget(lock().take());
    }

    /// The waker of this process.
    fn own(waker: &mut Option<Waker>) -> Result<&mut Waker, Error> {
        let generation = fork::generation();
        match waker {
            Some(waker) => {
                if waker.generation != generation {
                    let set = WakeSet::new()?;
                    // Taken out of this process's table only.
                    // SAFETY: it lives for ever.
                    unsafe { xprt_unregister(waker.xprt) };
                    // SAFETY: as above; in no table any more.
                    unsafe { (*waker.xprt).xp_fd = set.fd() };
                    // The parent's descriptor numbers may be other files by now: a child closes what it likes.
                    std::mem::forget(std::mem::replace(&mut waker.set, set));
                    (waker.registered, waker.generation) = (false, generation);
                }
                Ok(waker)
            }
            None => {
                let set = WakeSet::new()?;
                let xprt = bare(set.fd(), &WAKE);
                Ok(waker.insert(Waker { set, xprt, registered: false, generation }))
            }
        }
    }

    /// Has the loop call [`Client::serve_now`] when `fd` is readable.
    ///
    /// # Errors
    /// The errno.
    pub fn watch(fd: RawFd, key: u64) -> Result<(), Error> {
        let mut waker = lock();
        let waker = own(&mut waker)?;
        waker.set.nest(fd, key)?;
        waker.register()
    }

    /// Sees to it that [`ring`] wakes a loop of the program's own. Called in its thread, or before it begins.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn registered() -> Result<(), Error> {
        own(&mut lock())?.register()
    }

    /// Has the loop look, soon, at what others have left for it; wakes it if it sleeps. May be called in any thread.
    pub fn ring() {
        if let Some(waker) = lock().as_ref().filter(|waker| waker.generation == fork::generation())
            && let Err(error) = waker.set.alarm(Some(Duration::ZERO))
        {
            log_warn!("requests may be late: {error}");
        }
    }

    impl Waker {
        fn register(&mut self) -> Result<(), Error> {
            // After svc_exit(3), registering this one transport would keep svc_run going.
            let ended = in_svc_run() && nothing_is_registered();
            if !self.registered && !ended {
                self.registered = true;
                // SAFETY: complete.
                unsafe { xprt_register(self.xprt) }?;
                if in_svc_run() {
                    self.hide()?;
                }
            }
            Ok(())
        }

        /// Programs made by rpcgen count what is in this set to find out whether they are idle; svc_run does not look at it.
        fn hide(&self) -> Result<(), Error> {
            let set = library()?.svc_fdset;
            if usize::try_from(self.set.fd()).is_ok_and(|fd| fd < libc::FD_SETSIZE) {
                // SAFETY: libtirpc's own variable, written as its users do to remove a descriptor; the number fits.
                unsafe { libc::FD_CLR(self.set.fd(), set) };
            }
            Ok(())
        }
    }

    /// Ends [`watch`]. Called before `fd` is closed.
    pub fn forget(fd: RawFd) {
        if let Some(waker) = lock().as_ref().filter(|waker| waker.generation == fork::generation())
            && let Err(error) = waker.set.watch(fd, 0)
        {
            log_warn!("fd {fd}: is still watched for calls back: {error}");
        }
    }

    /// The program enters libtirpc's loop.
    pub fn enter_loop() {
        IN_SVC_RUN.fetch_add(1, Relaxed);
        // With nothing registered the loop ends at once, as it should.
        let alone = nothing_is_registered();
        if alone && table().is_empty() {
            return;
        }
        let mut waker = lock();
        let registered = own(&mut waker).and_then(|waker| {
            if !waker.registered && alone {
                waker.registered = true;
                // SAFETY: complete.
                unsafe { xprt_register(waker.xprt) }?;
            } else if !waker.registered {
                // SAFETY: complete.
                waker.registered = unsafe { xprt_register_beside(waker.xprt) }?;
            }
            waker.hide()
        });
        if let Err(error) = registered {
            log_warn!("svc_run serves no calls back that begin from now on: {error}");
        }
    }

    /// The program has left the loop: because of svc_exit(3), upon which libtirpc forgets what was registered and all loops end,
    /// or because poll(2) has failed in this one.
    pub fn leave_loop() {
        let others = IN_SVC_RUN.fetch_sub(1, Relaxed) > 1;
        if others && !nothing_is_registered() {
            return;
        }
        if let Some(waker) = lock().as_mut() {
            // libtirpc's table of transports still has it.
            // SAFETY: it lives for ever.
            unsafe { xprt_unregister(waker.xprt) };
            waker.registered = false;
        }
    }

    /// Number of threads in libtirpc's loop.
    static IN_SVC_RUN: AtomicUsize = AtomicUsize::new(0);

    fn in_svc_run() -> bool {
        IN_SVC_RUN.load(Relaxed) > 0
    }

    static WAKE: xp_ops = xp_ops { xp_recv: Some(wake), ..LISTENING };

    /// The program's loop has found the descriptor readable.
    unsafe extern "C-unwind" fn wake(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> bool_t {
        guard_passing_in_steps(|| {
            step(|| {
                let _uncancelled = Uncancelled::now();
                // What is served here is called from deeper in the stack.
                PROGRAM.dispatches(message.addr());
                serve_ready(xprt);
                Ok(())
            })?;
            serve_left();
            Ok(0)
        })
    }

    /// The part of [`wake`] that serves the calls that have come over connections of this process's CLIENTs.
    fn serve_ready(xprt: *mut SVCXPRT) {
        let ready = {
            let waker = lock();
            let own = |waker: &&Waker| waker.generation == fork::generation() && waker.xprt == xprt;
            match waker.as_ref().filter(own) {
                Some(waker) => {
                    waker.set.silence();
                    waker.set.ready()
                }
                None => {
                    // The loop of a forked child, which inherits libtirpc's table: it would take the parent's callbacks.
                    // SAFETY: alive; libtirpc's loop looks it up in its table before it goes on with it.
                    unsafe { xprt_unregister(xprt) };
                    Vec::new()
                }
            }
        };
        for key in ready {
            let callbacks = table().get(&key).and_then(Weak::upgrade);
            if let Some(client) = callbacks.and_then(|callbacks| callbacks.client.upgrade()) {
                client.serve_now(None);
            }
        }
    }
}

impl Callbacks {
    /// New `Callbacks` for a connection that has none.
    fn of(client: &Arc<Client>) -> Arc<Callbacks> {
        let callbacks = Arc::new(Callbacks {
            client: Arc::downgrade(client),
            programs: Mutex::default(),
            returned: Condvar::new(),
            transport: Mutex::new(Own { transport: None, connection: 0 }),
            generation: fork::generation(),
        });
        table().insert(key(Arc::as_ptr(client)), Arc::downgrade(&callbacks));
        callbacks
    }

    fn programs(&self) -> MutexGuard<'_, Programs> {
        self.programs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until the routine of a program that is not served any more has returned.
    fn wait_for_end_of(&self, serial: u64) {
        if in_routine() {
            return;
        }
        let mut programs = self.programs();
        while programs.running.contains(&serial) {
            programs = self.returned.wait(programs).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// The transport for requests of the current connection.
    fn transport(&self, client: &Arc<Client>) -> Arc<Transport> {
        let mut own = self.transport.lock().unwrap_or_else(|e| e.into_inner());
        let connection = client.connections();
        if let Some(transport) = &own.transport
            && (own.connection == connection || !transport.is_idle())
        {
            return transport.clone();
        }
        let responder: Weak<dyn Callee> = Weak::<Client>::clone(&self.client);
        let fresh = Transport::callback(responder, Caller::fd(&**client), client.to());
        let old = own.transport.replace(fresh.clone());
        own.connection = connection;
        drop(own);
        // Disposing of it takes other locks.
        outlive(old.into_iter());
        fresh
    }

    fn dispatch(&self, transport: &Arc<Transport>, request: Request) {
        let part = transport.lend_beside(&request, |_, _| true);
        let own = part.as_ref().unwrap_or(transport).clone();
        own.dispatch(request, |program, version| self.find(program, version), None);
        if let Some(part) = part {
            transport.take_back(part);
        }
    }

    /// The dispatch routine of a program, marked as running from now on, or else the range of its versions that are served.
    fn find(&self, number: u32, version: u32) -> Found<Running<'_>> {
        let mut programs = self.programs();
        let named = programs.served.iter().filter(|program| program.number == number);
        if let Some(found) = named.clone().find(|p| p.version == version)
            && let Some(dispatch) = found.dispatch
        {
            let serial = found.serial;
            programs.running.push(serial);
            ROUTINES.set(ROUTINES.get() + 1);
            return Ok((dispatch, Running { callbacks: self, serial }));
        }
        let versions = named.map(|program| program.version);
        Err(versions.clone().min().zip(versions.max()))
    }
}

thread_local! {
    /// Routines that run in this thread, one inside the other.
    static ROUTINES: Cell<u32> = const { Cell::new(0) };
}

/// Whether the calling thread is inside a routine that serves a callback.
///
/// Such a thread waits for no other routine, nor for a call, which may be serving one: that routine may be ending the very
/// connection that this one belongs to. What is to happen after the end of a routine or call is done by the thread that ends it.
pub(super) fn in_routine() -> bool {
    ROUTINES.get() > 0
}

/// A dispatch routine that is running, in the thread in which this is created and dropped.
struct Running<'a> {
    callbacks: &'a Callbacks,
    serial: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        ROUTINES.set(ROUTINES.get().saturating_sub(1));
        let mut programs = self.callbacks.programs();
        if let Some(at) = programs.running.iter().position(|running| *running == self.serial) {
            programs.running.swap_remove(at);
        }
        self.callbacks.returned.notify_all();
    }
}

impl Serve for Callbacks {
    fn serve(&self, request: Request, mask: Mask<'_>) {
        let Some(client) = self.client.upgrade() else { return };
        let own = self.transport(&client);
        match mask {
            Some(mask) => signals::under_mask(mask, || self.dispatch(&own, request)),
            None => self.dispatch(&own, request),
        }
    }

    fn watch(&self, fd: RawFd) -> Result<(), Error> {
        waker::watch(fd, key(self.client.as_ptr()))
    }

    fn forget(&self, fd: RawFd) {
        waker::forget(fd);
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        let mut table = table();
        let key = key(self.client.as_ptr());
        // Other `Callbacks` may have begun on the same connection.
        if table.get(&key).is_some_and(|known| std::ptr::eq(known.as_ptr(), self)) {
            table.remove(&key);
        }
        drop(table);
        let own = self.transport.get_mut().unwrap_or_else(|e| e.into_inner());
        outlive(own.transport.take().into_iter());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::testing::fork;
    use crate::tirpc::{library, polled};

    #[test]
    fn a_child_that_has_lost_its_parents_waker_takes_it_out_of_its_loop() {
        // What is registered here is not for other tests.
        let child = fork(|| {
            // SAFETY: as its loop does; the thread is the only one.
            let is_polled = |fd| unsafe { polled() }.any(|polled| polled == fd);
            waker::registered().unwrap();
            // SAFETY: as above.
            let parents = unsafe { polled() }.next().unwrap();
            waker::lose();
            waker::registered().unwrap();
            // SAFETY: as above.
            let both = is_polled(parents) && unsafe { polled() }.count() == 2;
            // SAFETY: as above.
            unsafe { (library().unwrap().svc_getreq_common)(parents) };
            // SAFETY: as above.
            both && !is_polled(parents) && unsafe { polled() }.count() == 1
        });
        assert!(child.succeeded());
    }
}
