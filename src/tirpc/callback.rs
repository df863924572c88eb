//! Serving what is called back over a connection that this process has opened: the program's dispatch routines, and the
//! transport that wakes its service loop.
//!
//! A dispatch routine gets an SVCXPRT as a server's does (`server::Transport`), which is not registered: requests come
//! from the driver, one at a time, and are treated as libtirpc's `svc_getreq_common` treats them. What is registered is a
//! bare transport whose descriptor is readable when there is something to do, so that `svc_run` serves callbacks too.
//!
//! # Invariants
//! - The connection owns its `Callbacks`; they end when the last CLIENT on it is destroyed, or serves no program any more.
//! - The transport that requests are answered on lives as long as one connection: libtirpc ties RPCSEC_GSS contexts to it.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use crate::connection::Request;
use crate::driver::callback::Serve;
use crate::driver::{Client, Mask, Requester, Responder};
use crate::error::{Error, Kind};
use crate::ffi::guard;
use crate::tirpc::server::{self, LISTENING, Transport, bare};
use crate::tirpc::{
    _gss_authenticate, SVCXPRT, auth_stat, bool_t, dispatch_t, opaque_auth, real, rpc_msg, svc_req,
    svcerr_auth, svcerr_noprog, svcerr_progvers, xp_ops, xprt_unregister,
};
use crate::{log_info, sys};

/// A program that is served.
struct Program {
    number: u32,
    version: u32,
    dispatch: dispatch_t,
}

/// The programs of one connection.
struct Callbacks {
    client: Weak<Client>,
    programs: Mutex<Vec<Program>>,
    transport: Mutex<Own>,
    /// What is registered with libtirpc.
    waker: Waker,
    /// Of the process that serves.
    generation: u64,
}

/// The transport that requests are answered on, and the connection that it was made for.
struct Own {
    transport: Option<Arc<Transport>>,
    connection: u32,
}

struct Waker(*mut SVCXPRT);

// SAFETY: libtirpc's table and this value know it; it is freed when it is in neither.
unsafe impl Send for Waker {}
// SAFETY: as above: the pointer is never followed here before the drop.
unsafe impl Sync for Waker {}

/// Has `dispatch` serve calls back of a program, or nobody if it is NULL. `greeting`: the program and version of the
/// forward direction that a new connection is greeted with.
///
/// # Errors
/// `EMFILE`; `Invalid` when a program ends that is not served.
pub fn serve(
    client: &Arc<Client>,
    greeting: (u32, u32),
    number: u32,
    version: u32,
    dispatch: dispatch_t,
) -> Result<(), Error> {
    static FIRST: Mutex<()> = Mutex::new(());
    // Of two threads that serve their first program on one connection, one is first.
    let _first = FIRST.lock().unwrap_or_else(|e| e.into_inner());
    // Under the lock of the table nothing may end: its end takes the lock.
    let all: Vec<Arc<Callbacks>> = table().values().filter_map(Weak::upgrade).collect();
    let Some(callbacks) = all.iter().find(|known| std::ptr::eq(known.client.as_ptr(), &**client)) else {
        if dispatch.is_none() {
            return Err(Error::new(Kind::Invalid, "no program is served on this connection"));
        }
        return start(client, greeting, Program { number, version, dispatch });
    };
    let mut programs = callbacks.programs();
    let before = programs.len();
    programs.retain(|p| (p.number, p.version) != (number, version));
    if dispatch.is_some() {
        programs.push(Program { number, version, dispatch });
    } else if programs.len() == before {
        let text = format!("program {number} version {version} is not served on this connection");
        return Err(Error::new(Kind::Invalid, text));
    }
    let none = programs.is_empty();
    drop(programs);
    if none {
        client.stop_serving();
    }
    Ok(())
}

fn start(client: &Arc<Client>, (program, version): (u32, u32), served: Program) -> Result<(), Error> {
    let waker = bare(-1, &WAKE);
    let callbacks = Arc::new(Callbacks {
        client: Arc::downgrade(client),
        programs: Mutex::new(vec![served]),
        transport: Mutex::new(Own { transport: None, connection: 0 }),
        waker: Waker(waker),
        generation: sys::fork_generation(),
    });
    let fd = client.start_serving(callbacks.clone(), program, version)?;
    // SAFETY: just made, and known to nobody else.
    unsafe { (*waker).xp_fd = fd };
    table().insert(fd, Arc::downgrade(&callbacks));
    // SAFETY: complete; the real function, since our own looks for stock transports.
    unsafe { real::XPRT_REGISTER.get()?(waker) };
    client.learn_credits();
    Ok(())
}

/// Those of this process, by the descriptor that is registered.
fn table() -> MutexGuard<'static, HashMap<RawFd, Weak<Callbacks>>> {
    static TABLE: OnceLock<Mutex<HashMap<RawFd, Weak<Callbacks>>>> = OnceLock::new();
    TABLE.get_or_init(Default::default).lock().unwrap_or_else(|e| e.into_inner())
}

static WAKE: xp_ops = xp_ops { xp_recv: Some(wake), ..LISTENING };

/// The program's loop has found the descriptor readable.
unsafe extern "C" fn wake(xprt: *mut SVCXPRT, _: *mut rpc_msg) -> bool_t {
    guard(|| {
        // SAFETY: libtirpc's loop and its transport.
        let fd = unsafe { (*xprt).xp_fd };
        let Some(callbacks) = table().get(&fd).and_then(Weak::upgrade) else { return Ok(0) };
        if callbacks.generation != sys::fork_generation() {
            // The loop of a forked child, which inherits libtirpc's table: it would take the parent's callbacks.
            // SAFETY: alive; libtirpc's loop looks at its table before it goes on with it.
            unsafe { xprt_unregister(xprt) };
        } else if let Some(client) = callbacks.client.upgrade() {
            client.serve_now(None);
        }
        Ok(0)
    })
}

impl Callbacks {
    fn programs(&self) -> MutexGuard<'_, Vec<Program>> {
        self.programs.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The transport for requests of the present connection.
    fn transport(&self, client: &Arc<Client>) -> Arc<Transport> {
        let mut own = self.transport.lock().unwrap_or_else(|e| e.into_inner());
        let connection = client.connections();
        if let Some(transport) = &own.transport
            && (own.connection == connection || !transport.is_idle())
        {
            return transport.clone();
        }
        let responder: Weak<dyn Responder> = Weak::<Client>::clone(&self.client);
        let fresh = Transport::callback(responder, Requester::fd(&**client), client.to());
        let old = own.transport.replace(fresh.clone());
        own.connection = connection;
        drop(own);
        // Its end takes other locks.
        drop(old);
        fresh
    }

    /// As libtirpc's `svc_getreq_common`.
    fn dispatch(&self, transport: &Arc<Transport>, request: Request) {
        // Where libtirpc's functions decode a credential, a verifier, and what a flavour makes of the credential.
        let mut area = [[0u64; auth_stat::MAX_AUTH_BYTES / 8]; 3];
        let [credential, verifier, cooked] = area.each_mut().map(|part| part.as_mut_ptr());
        let room = |base: *mut u64| opaque_auth { oa_flavor: 0, oa_base: base.cast(), oa_length: 0 };
        // SAFETY: all zero is a valid message.
        let mut message: rpc_msg = unsafe { std::mem::zeroed() };
        message.ru.rm_call.cb_cred = room(credential);
        message.ru.rm_call.cb_verf = room(verifier);
        // SAFETY: room for credential and verifier was made above.
        if !unsafe { transport.open(request, &mut message, None) } {
            return log_info!("a call back is not an RPC call: dropped");
        }
        let xprt = transport.xprt();
        // SAFETY: decoded as a call, so this member of the union is in force.
        let call = unsafe { message.ru.rm_call };
        let mut request = svc_req {
            rq_prog: call.cb_prog,
            rq_vers: call.cb_vers,
            rq_proc: call.cb_proc,
            rq_cred: call.cb_cred,
            rq_clntcred: cooked.cast(),
            rq_xprt: xprt,
            rq_clntname: std::ptr::null_mut(),
            rq_svcname: std::ptr::null_mut(),
        };
        let mut answered = 0;
        // SAFETY: request, message and transport are as libtirpc's own loop makes them.
        let why = unsafe { _gss_authenticate(&mut request, &mut message, &mut answered) };
        if why != auth_stat::AUTH_OK {
            // SAFETY: the transport is alive, with a request open.
            unsafe { svcerr_auth(xprt, why) };
        } else if answered == 0 {
            match self.find(call.cb_prog, call.cb_vers) {
                // SAFETY: the program's dispatch routine, with what it expects.
                Ok(dispatch) => unsafe { dispatch(&mut request, xprt) },
                // SAFETY: the transport is alive, with a request open.
                Err(Some((low, high))) => unsafe { svcerr_progvers(xprt, low, high) },
                // SAFETY: as above.
                Err(None) => unsafe { svcerr_noprog(xprt) },
            }
        }
        transport.close_request();
    }

    /// The dispatch routine of a program, or the versions of it that there are.
    fn find(&self, number: u32, version: u32) -> Result<Dispatch, Option<(u32, u32)>> {
        let programs = self.programs();
        let named = programs.iter().filter(|program| program.number == number);
        if let Some(dispatch) = named.clone().find(|p| p.version == version).and_then(|p| p.dispatch) {
            return Ok(dispatch);
        }
        let versions = named.map(|program| program.version);
        Err(versions.clone().min().zip(versions.max()))
    }
}

type Dispatch = unsafe extern "C" fn(*mut svc_req, *mut SVCXPRT);

impl Serve for Callbacks {
    fn serve(&self, request: Request, mask: Mask<'_>) {
        let Some(client) = self.client.upgrade() else { return };
        let own = self.transport(&client);
        match mask {
            Some(mask) => sys::under_mask(mask, || self.dispatch(&own, request)),
            None => self.dispatch(&own, request),
        }
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        let waker = self.waker.0;
        // SAFETY: made by `bare`, and freed below only.
        let fd: RawFd = unsafe { (*waker).xp_fd };
        if fd >= 0 {
            table().remove(&fd);
            // SAFETY: alive; nothing happens if it was not registered.
            unsafe { xprt_unregister(waker) };
        }
        // SAFETY: made by `bare`; not registered any more, and after its `xp_recv` the loop looks at the table first.
        unsafe { server::free_bare(waker) };
    }
}
