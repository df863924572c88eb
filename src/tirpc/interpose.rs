//! The functions of libtirpc that this library stands in front of.
//!
//! libtirpc calls its own exports through the PLT, so a function defined here gets the program's calls and libtirpc's alike; a
//! few are enough. Owned here: what each of them does for netid "rdma", and, under `RPCRDMA_REDIRECT`, for the stock netids.
//! Everything else goes to the real function untouched.
//!
//! # How a transport is moved
//! A listener on netid "rdma" is a stock libtirpc listener on a TCP socket, created by the stock `svc_tli_create`, which learns
//! from `__rpc_nconf2sockinfo` what to create. Each connection that it accepts passes through `xprt_register` and is given to
//! `sniff::watch`. A client's connection passes through `clnt_vc_create` and is given to [`client::vc_create`]. Moved transports,
//! those of stock netids under `RPCRDMA_REDIRECT`, take the same two ways.
//!
//! # Invariants
//! - A configuration that cannot be understood makes creations on netid "rdma" fail, with the text where `clnt_pcreateerror`
//!   finds it, and leaves everything else stock: nothing is moved. Only a client that would be moved and must not fall back to
//!   tcp fails too.
//! - rpcbind's own program, 100000, is never moved, on any netid. Looking it up by netid "rdma" gives an error: RDMA or an error.
//!   A CLIENT that is created for its address asks rpcbind about other programs (libtirpc's own functions and rpcinfo do that
//!   with whatever netid they were given): such a CLIENT is a stock one over tcp, and its netid and the log say so.
//! - Under the mark of [`Inside`] nothing is created or moved: the real function is called. The functions that only say
//!   what a netid is do not need the mark.
//! - What is remembered here lies in fixed arrays of atomics: there is no lock that a fork or a signal handler could find taken.
//!
//! Not needed here: `taddr2uaddr`, `uaddr2taddr`, `__rpc_nconf2fd` and `__rpc_nconf2fd_flags` ask `__rpc_nconf2sockinfo`;
//! `__rpc_fd2sockinfo` is content with a TCP socket; `clnt_perror` and `clnt_pcreateerror` print what `clnt_sperror` and
//! `clnt_spcreateerror` return; `svc_register` and `pmap_unset` end in `rpcb_set` and `rpcb_unset`. Never here: `xdr_*`, and
//! data.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::{self, Config};
use crate::driver::start;
use crate::error::{Error, Kind};
use crate::ffi::{
    self, Inside, OrMinusOne, Uncancelled, guard_around, guard_passing, guard_passing_in_steps_cancellable,
    step,
};
use crate::per_thread::{self, Owned};
use crate::socket::Sockaddr;
use crate::tirpc::client::{self, Intent};
use crate::tirpc::library::Real;
use crate::tirpc::netid::{self, Netid, RPCBIND_PORT, nettype};
use crate::tirpc::{
    __rpc_sockinfo, CLIENT, RPC_ANYFD, RPCBPROG, SVCXPRT, TRUE, bool_t, creation_explained,
    creation_explanation, creation_failed, creation_record, creation_recorded, creation_started, dispatch_t,
    is_libtirpcs, library, netbuf, netconfig, real, registered_t, server, t_bind,
};
use crate::tirpc::{adapters, beside, programs, run, sniff, threads, transport};
use crate::xdr::XdrProc;
use crate::{log_debug, log_error, log_info, log_warn, socket};

// What a netid is.

/// Knows "rdma" and "rdma6", which no netconfig file names.
///
/// # Safety
/// As libtirpc's `getnetconfigent`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getnetconfigent(netid: *const c_char) -> *mut netconfig {
    guard_passing(|| {
        // SAFETY: a netid is NULL or a string.
        match unsafe { ffi::cstr(netid) }.and_then(Netid::named) {
            Some(netid) => netid.allocate(),
            // SAFETY: the caller's own argument.
            None => Ok(unsafe { real::GETNETCONFIGENT.get()?(netid) }),
        }
    })
}

/// Knows the nettypes "rdma" and "rdma6".
///
/// # Safety
/// As libtirpc's `__rpc_setconf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __rpc_setconf(nettype: *const c_char) -> *mut c_void {
    guard_passing(|| {
        // Every creation by nettype begins here, and then tries one netid after the other: the text of the first that
        // fails must outlive the attempt on the next.
        creation_started();
        // SAFETY: a nettype is NULL or a string.
        match unsafe { ffi::cstr(nettype) }.and_then(nettype::open) {
            Some(handle) => handle,
            // SAFETY: the caller's own argument.
            None => Ok(unsafe { real::RPC_SETCONF.get()?(nettype) }),
        }
    })
}

/// Continues with either kind of handle.
///
/// # Safety
/// As libtirpc's `__rpc_getconf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __rpc_getconf(handle: *mut c_void) -> *mut netconfig {
    guard_passing(|| match nettype::next(handle) {
        Some(entry) => Ok(entry.cast_mut()),
        // SAFETY: the caller's own argument.
        None => Ok(unsafe { real::RPC_GETCONF.get()?(handle) }),
    })
}

/// Ends either kind of handle.
///
/// # Safety
/// As libtirpc's `__rpc_endconf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __rpc_endconf(handle: *mut c_void) {
    guard_passing(|| match nettype::close(handle) {
        Some(()) => Ok(()),
        None => {
            // SAFETY: the caller's own argument.
            unsafe { real::RPC_ENDCONF.get()?(handle) };
            Ok(())
        }
    })
}

/// Says that our netids are TCP sockets.
///
/// # Safety
/// As libtirpc's `__rpc_nconf2sockinfo`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __rpc_nconf2sockinfo(nconf: *const netconfig, info: *mut __rpc_sockinfo) -> c_int {
    guard_passing(|| {
        // SAFETY: by the contract.
        match unsafe { Netid::of(nconf) } {
            Some(netid) => {
                // SAFETY: libtirpc passes its own structure.
                unsafe { info.write(netid.sockinfo()) };
                Ok(1)
            }
            // SAFETY: the caller's own arguments.
            None => Ok(unsafe { real::RPC_NCONF2SOCKINFO.get()?(nconf, info) }),
        }
    })
}

// Clients.

/// Finds a program on netid "rdma" in the list of the host's rpcbind, and connects.
///
/// # Safety
/// As libtirpc's `clnt_tp_create_timed`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_tp_create_timed(
    host: *const c_char,
    prog: u32,
    vers: u32,
    nconf: *const netconfig,
    timeout: *const libc::timeval,
) -> *mut CLIENT {
    guard_passing(|| {
        // SAFETY: by the contract.
        let netid = unsafe { Netid::of(nconf) };
        let (Some(netid), Some(inside)) = (netid, Inside::enter()) else {
            // SAFETY: the caller's own arguments.
            return Ok(unsafe { stock(&real::CLNT_TP_CREATE_TIMED)?(host, prog, vers, nconf, timeout) });
        };
        creation(|| {
            config::get()?;
            // SAFETY: NULL, or a string that lives across this call.
            let host = unsafe { ffi::cstr(host) };
            // SAFETY: NULL, or a timeval that lives across this call.
            let timeout = unsafe { ffi::reference(timeout) }.copied();
            let found = netid::look_up(host, prog, vers, netid, timeout, &inside)?;
            let mut address = Sockaddr::from(found);
            let mut address = address.netbuf();
            // SAFETY: the entry and the address live across the call.
            Ok(inside
                .suspend(|| unsafe { clnt_tli_create(RPC_ANYFD, nconf, &mut address, prog, vers, 0, 0) }))
        })
    })
}

/// Tells `clnt_vc_create`, in which this ends, that RDMA is required.
///
/// # Safety
/// As libtirpc's `clnt_tli_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_tli_create(
    fd: c_int,
    nconf: *const netconfig,
    address: *mut netbuf,
    prog: u32,
    vers: u32,
    sendsz: c_uint,
    recvsz: c_uint,
) -> *mut CLIENT {
    guard_passing(|| {
        let real = stock(&real::CLNT_TLI_CREATE)?;
        // SAFETY: by the contract.
        let netid = unsafe { Netid::of(nconf) };
        let (Some(netid), Some(inside)) = (netid, Inside::enter()) else {
            // SAFETY: the caller's own arguments.
            return Ok(unsafe { real(fd, nconf, address, prog, vers, sendsz, recvsz) });
        };
        creation(|| {
            config::get()?;
            if prog == RPCBPROG {
                log_info!(
                    "program {prog} version {vers} (rpcbind) goes over tcp: it is not reached over rdma"
                );
                // SAFETY: the caller's own arguments, and an entry that nobody writes.
                return Ok(unsafe { real(fd, netid.stock(), address, prog, vers, sendsz, recvsz) });
            }
            // The real function reads the address unconditionally; a connected socket knows it.
            let mut peer = None;
            let address = if address.is_null() {
                let connected = socket::peer(fd).ok_or_else(|| {
                    Error::new(Kind::Invalid, "no address, and the descriptor is not connected")
                })?;
                &mut peer.insert(Sockaddr::from(connected)).netbuf()
            } else {
                address
            };
            let _wanted = RdmaWanted::set();
            // SAFETY: the caller's own arguments, and an address that lives across the call.
            Ok(inside.suspend(|| unsafe { real(fd, nconf, address, prog, vers, sendsz, recvsz) }))
        })
    })
}

/// Makes the connection an RDMA one where netid "rdma" or `RPCRDMA_REDIRECT=tcp` asks for it.
///
/// # Safety
/// As libtirpc's `clnt_vc_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_vc_create(
    fd: c_int,
    address: *const netbuf,
    prog: u32,
    vers: u32,
    sendsz: c_uint,
    recvsz: c_uint,
) -> *mut CLIENT {
    guard_passing(|| {
        let intent = if RdmaWanted::take() {
            Some(Intent::Required)
        } else {
            // SAFETY: an address as clnt_vc_create takes it.
            let address = unsafe { socket_address(address) };
            // As far as the settings are understood: `vc_create` decides what follows from the rest.
            let wanted = address.filter(|address| wants(config::understood(), tcp(*address), prog));
            wanted.map(|_| Intent::Try)
        };
        if let Some(intent) = intent
            && let Some(_inside) = Inside::enter()
        {
            let made = creation(|| {
                // SAFETY: the caller's own arguments.
                unsafe { client::vc_create(fd, address, prog, vers, intent) }
            })?;
            if let Some(clnt) = made {
                return Ok(clnt);
            }
        }
        // SAFETY: the caller's own arguments.
        Ok(unsafe { stock(&real::CLNT_VC_CREATE)?(fd, address, prog, vers, sendsz, recvsz) })
    })
}

/// Answers for netid "rdma", where GETADDR would name the TCP port.
///
/// # Safety
/// As libtirpc's `rpcb_getaddr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcb_getaddr(
    prog: u32,
    vers: u32,
    nconf: *const netconfig,
    address: *mut netbuf,
    host: *const c_char,
) -> bool_t {
    guard_passing(|| {
        // SAFETY: by the contract.
        let netid = unsafe { Netid::of(nconf) };
        let (Some(netid), Some(inside)) = (netid, Inside::enter()) else {
            // SAFETY: the caller's own arguments.
            return Ok(unsafe { real::RPCB_GETADDR.get()?(prog, vers, nconf, address, host) });
        };
        creation(|| {
            config::get()?;
            // SAFETY: NULL, or a string that lives across this call.
            let host = unsafe { ffi::cstr(host) };
            let found = Sockaddr::from(netid::look_up(host, prog, vers, netid, None, &inside)?);
            let found = found.as_bytes();
            // SAFETY: NULL, or the caller's structure, which nobody writes meanwhile.
            let Some(room) = (unsafe { ffi::reference(address) }).copied() else {
                return Err(Error::new(Kind::Invalid, "rpcb_getaddr: NULL address"));
            };
            if room.buf.is_null() || (room.maxlen as usize) < found.len() {
                return Err(Error::new(Kind::Invalid, "rpcb_getaddr: the address buffer is too small"));
            }
            // SAFETY: the buffer has `maxlen` bytes, which are enough, and is not ours.
            unsafe { room.buf.cast::<u8>().copy_from_nonoverlapping(found.as_ptr(), found.len()) };
            let filled = netbuf { len: found.len() as c_uint, ..room };
            // SAFETY: not NULL, as above.
            unsafe { address.write(filled) };
            Ok(TRUE)
        })
    })
}

/// Appends our text for a creation that failed.
///
/// # Safety
/// As libtirpc's `clnt_spcreateerror`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_spcreateerror(message: *const c_char) -> *mut c_char {
    guard_passing(|| {
        let explanation = creation_explanation();
        let real = match real::CLNT_SPCREATEERROR.get() {
            Ok(real) => real,
            // SAFETY: the caller's own argument.
            Err(error) => return Ok(unsafe { unstocked(message, explanation, &error) }),
        };
        // SAFETY: the caller's own argument.
        let stock = unsafe { real(message) };
        // SAFETY: a string of libtirpc, this thread's own, until its next call.
        Ok(unsafe { explained(stock, explanation) })
    })
}

/// Appends our text for a call that failed.
///
/// # Safety
/// As libtirpc's `clnt_sperror`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_sperror(clnt: *mut CLIENT, message: *const c_char) -> *mut c_char {
    guard_passing(|| {
        let explanation = if clnt.is_null() {
            None
        } else {
            // SAFETY: a live handle, by the contract.
            Inside::enter().and_then(|_inside| unsafe { client::explanation(clnt) })
        };
        // SAFETY: the caller's own arguments.
        let stock = unsafe { real::CLNT_SPERROR.get()?(clnt, message) };
        // SAFETY: a string of libtirpc, this thread's own, until its next call.
        Ok(unsafe { explained(stock, explanation) })
    })
}

// Servers.

/// Notes a listener of netid "rdma".
///
/// # Safety
/// As libtirpc's `svc_tli_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_tli_create(
    fd: c_int,
    nconf: *const netconfig,
    bind: *const t_bind,
    sendsz: c_uint,
    recvsz: c_uint,
) -> *mut SVCXPRT {
    guard_passing(|| {
        let real = stock(&real::SVC_TLI_CREATE)?;
        // SAFETY: by the contract.
        let ours = unsafe { Netid::of(nconf) }.is_some();
        let inside = if ours { Inside::enter() } else { None };
        let Some(inside) = inside else {
            // SAFETY: the caller's own arguments.
            return Ok(unsafe { real(fd, nconf, bind, sendsz, recvsz) });
        };
        creation(|| {
            let config = config::get()?;
            let listen = |fd: c_int| -> Result<(), Error> {
                listeners::add(fd)?;
                match socket::local(fd) {
                    Some(local) => adapters::listen(local, fd, config),
                    None => Ok(()),
                }
            };
            // SAFETY: the caller's own arguments.
            let xprt = inside.suspend(|| unsafe { real(fd, nconf, bind, sendsz, recvsz) });
            // SAFETY: NULL, or just made and given to nobody yet.
            if let Some(made) = unsafe { ffi::reference(xprt) } {
                let bound = made.xp_fd;
                // A connected descriptor, as from inetd: its one connection is the transport.
                let connected = !socket::listens(bound);
                let served = match connected {
                    // SAFETY: as above; it is registered.
                    true => start::may_accept(config).and_then(|()| unsafe { sniff::watch(xprt, true) }),
                    false => listen(bound),
                };
                if let Err(error) = served {
                    listeners::remove(bound);
                    // SAFETY: as above, and used no more.
                    unsafe { server::discard(xprt, fd == RPC_ANYFD) };
                    return Err(error);
                }
            }
            Ok(xprt)
        })
    })
}

/// Gives each connection that a moved listener has accepted to `sniff::watch`.
///
/// # Safety
/// As libtirpc's `xprt_register`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xprt_register(xprt: *mut SVCXPRT) {
    guard_passing(|| {
        // SAFETY: NULL or a live transport, by the contract.
        let Some(xprt) = (unsafe { transport::to_register(xprt) }) else { return Ok(()) };
        // SAFETY: the caller's own argument.
        unsafe { super::xprt_register(xprt) }?;
        // SAFETY: as above.
        unsafe { transport::registered_again(xprt) };
        if let Some(_inside) = Inside::enter()
            // SAFETY: a live transport, by the contract.
            && let Some(rdma_only) = unsafe { moved(xprt) }
        {
            // SAFETY: it is live, registered and libtirpc's own.
            if let Err(error) = unsafe { sniff::watch(xprt, rdma_only) } {
                // SAFETY: it is live.
                let fd = unsafe { (*xprt).xp_fd };
                log_warn!("fd {fd}: a connection is refused: {error}");
                // The peer learns of it at once, and so does the loop, which destroys the transport.
                socket::shutdown(fd);
            }
        }
        // SAFETY: as above.
        if let Some(listener) = unsafe { moved_listener(xprt) }
            && let Some(_inside) = Inside::enter()
            && let Ok(config) = config::get()
        {
            adapters::beside(listener, false, config);
        }
        Ok(())
    })
}

/// Ends what is served on adapters beside a listener.
///
/// # Safety
/// As libtirpc's `xprt_unregister`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xprt_unregister(xprt: *mut SVCXPRT) {
    guard_passing(|| {
        // SAFETY: NULL or a live transport, by the contract.
        let Some(xprt) = (unsafe { transport::to_register(xprt) }) else { return Ok(()) };
        // SAFETY: as above.
        if let Some(listener) = unsafe { ffi::reference(xprt) }.map(|made| made.xp_fd)
            && let Some(_inside) = Inside::enter()
        {
            adapters::end(listener);
        }
        // SAFETY: the caller's own argument.
        unsafe { super::xprt_unregister(xprt) };
        Ok(())
    })
}

/// libtirpc's loop, for any number of transports ([`run`]). It serves callbacks too, and at its end sends what still waits for
/// slow peers.
///
/// # Safety
/// As libtirpc's `svc_run`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn svc_run() {
    guard_around(
        || {
            // Above the frames of whatever a loop that was left here has called.
            let place = 0u8;
            server::enter_loop((&raw const place).addr());
            Ok(())
        },
        // SAFETY: by the contract.
        |()| unsafe { run::run() },
        server::left_loop,
    );
}

/// Ends the loops, including those that sleep.
///
/// # Safety
/// As libtirpc's `svc_exit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_exit() {
    guard_passing(|| {
        let real = real::SVC_EXIT.get()?;
        run::exit(|| {
            // SAFETY: as the caller's.
            unsafe { real() };
            super::progress::all_is_forgotten();
            threads::exit();
        });
        Ok(())
    });
}

/// Notes the program.
///
/// # Safety
/// As libtirpc's `svc_reg`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_reg(
    xprt: *mut SVCXPRT,
    prog: u32,
    vers: u32,
    routine: dispatch_t,
    nconf: *const netconfig,
) -> bool_t {
    guard_passing(|| {
        let register = real::SVC_REG.get()?;
        // SAFETY: the caller's own arguments.
        let done = unsafe { register(xprt, prog, vers, routine, nconf) };
        // Without rpcbind this fails, yet libtirpc serves the program: then it does not mind registering it once more.
        // SAFETY: as above; without a netconfig rpcbind is not asked.
        let is_served =
            || done == TRUE || unsafe { register(xprt, prog, vers, routine, std::ptr::null()) } == TRUE;
        if let Some(routine) = routine
            && is_served()
        {
            programs::registered(prog, vers, routine);
        }
        Ok(done)
    })
}

/// Notes the program.
///
/// # Safety
/// As libtirpc's `svc_register`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_register(
    xprt: *mut SVCXPRT,
    prog: c_ulong,
    vers: c_ulong,
    routine: dispatch_t,
    protocol: c_int,
) -> bool_t {
    guard_passing(|| {
        let register = real::SVC_REGISTER.get()?;
        // SAFETY: the caller's own arguments.
        let done = unsafe { register(xprt, prog, vers, routine, protocol) };
        // SAFETY: as above; without a protocol rpcbind is not asked, as in `svc_reg`.
        let is_served = || done == TRUE || unsafe { register(xprt, prog, vers, routine, 0) } == TRUE;
        if let Some(routine) = routine
            && is_served()
        {
            programs::registered(prog as u32, vers as u32, routine);
        }
        Ok(done)
    })
}

/// Forgets the program.
///
/// # Safety
/// As libtirpc's `svc_unreg`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_unreg(prog: u32, vers: u32) {
    guard_passing(|| {
        programs::unregistered(prog, vers);
        // SAFETY: the caller's own arguments.
        unsafe { real::SVC_UNREG.get()?(prog, vers) };
        Ok(())
    });
}

/// Forgets the program.
///
/// # Safety
/// As libtirpc's `svc_unregister`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_unregister(prog: c_ulong, vers: c_ulong) {
    guard_passing(|| {
        programs::unregistered(prog as u32, vers as u32);
        // SAFETY: the caller's own arguments.
        unsafe { real::SVC_UNREGISTER.get()?(prog, vers) };
        Ok(())
    });
}

/// Registers a moved program on "rdma" too.
///
/// # Safety
/// As libtirpc's `rpcb_set`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcb_set(
    prog: u32,
    vers: u32,
    nconf: *const netconfig,
    address: *const netbuf,
) -> bool_t {
    guard_passing(|| {
        let real = real::RPCB_SET.get()?;
        // SAFETY: the caller's own arguments.
        let set = unsafe { real(prog, vers, nconf, address) };
        // SAFETY: by the contract.
        if let (0, Some(netid)) = (set, unsafe { Netid::of(nconf) })
            && let Some(inside) = Inside::enter()
        {
            // What libtirpc has recorded is kept: asking rpcbind may record something else.
            let recorded = creation_recorded();
            let text = netid::refused(prog, vers, netid, &inside);
            creation_record(recorded);
            log_error!("{text}");
            creation_explained(text);
        }
        // SAFETY: by the contract.
        let Some((stock, netid)) = (unsafe { Netid::beside(nconf) }) else { return Ok(set) };
        // SAFETY: an address as rpcb_set takes it.
        let local = unsafe { socket_address(address) };
        let (Some(local), true, Some(inside)) = (local, moves(stock, prog), Inside::enter()) else {
            return Ok(set);
        };
        if let Err(error) = start::may_serve(config::get()?) {
            log_error!("program {prog} version {vers} is not registered on netid rdma: {error}");
            return Ok(set);
        }
        if datagrams(stock) {
            beside::registered(netid, local, prog, vers);
            BESIDE.add(local.port());
        }
        PORTS.add(local.port());
        adapters::registered();
        // The program gets rpcbind's answer for the stock netid, on which it stays reachable if the row for "rdma" is refused.
        let recorded = creation_recorded();
        // SAFETY: the entry is static, the address the caller's.
        let beside = unsafe { real(prog, vers, netid.entry(), address) };
        if (set, beside) == (1, 0) {
            log_warn!("{}", netid::refused(prog, vers, netid, &inside));
        }
        creation_record(recorded);
        Ok(set)
    })
}

/// Removes a moved program from "rdma" too.
///
/// # Safety
/// As libtirpc's `rpcb_unset`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcb_unset(prog: u32, vers: u32, nconf: *const netconfig) -> bool_t {
    guard_passing(|| {
        let real = real::RPCB_UNSET.get()?;
        // SAFETY: the caller's own arguments. NULL removes all rows, those of "rdma" among them.
        let unset = unsafe { real(prog, vers, nconf) };
        // SAFETY: by the contract.
        if let Some((stock, netid)) = unsafe { Netid::beside(nconf) }
            && moves(stock, prog)
            && let Some(_inside) = Inside::enter()
        {
            // SAFETY: the entry is static.
            unsafe { real(prog, vers, netid.entry()) };
            if datagrams(stock) {
                beside::withdrawn(netid, prog, vers);
            }
        }
        Ok(unset)
    })
}

// Passed through. Debian's gcc links --as-needed: a program keeps this library only if the program itself names one of its
// functions, so the outermost ones are here too. They also help where a libtirpc was built with its own outer functions inlined
// into each other.

/// Passed through.
///
/// # Safety
/// As libtirpc's `clnt_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_create(
    host: *const c_char,
    prog: u32,
    vers: u32,
    nettype: *const c_char,
) -> *mut CLIENT {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::CLNT_CREATE)?(host, prog, vers, nettype) }))
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `clnt_create_timed`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_create_timed(
    host: *const c_char,
    prog: u32,
    vers: u32,
    nettype: *const c_char,
    timeout: *const libc::timeval,
) -> *mut CLIENT {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::CLNT_CREATE_TIMED)?(host, prog, vers, nettype, timeout) }))
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `clnt_create_vers`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_create_vers(
    host: *const c_char,
    prog: u32,
    vers: *mut u32,
    low: u32,
    high: u32,
    nettype: *const c_char,
) -> *mut CLIENT {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::CLNT_CREATE_VERS)?(host, prog, vers, low, high, nettype) }))
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `clnt_create_vers_timed`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_create_vers_timed(
    host: *const c_char,
    prog: u32,
    vers: *mut u32,
    low: u32,
    high: u32,
    nettype: *const c_char,
    timeout: *const libc::timeval,
) -> *mut CLIENT {
    guard_passing(|| {
        // SAFETY: the caller's own arguments.
        Ok(unsafe { stock(&real::CLNT_CREATE_VERS_TIMED)?(host, prog, vers, low, high, nettype, timeout) })
    })
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `clnt_tp_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnt_tp_create(
    host: *const c_char,
    prog: u32,
    vers: u32,
    nconf: *const netconfig,
) -> *mut CLIENT {
    guard_passing(|| {
        creation_started();
        // SAFETY: the caller's own arguments.
        Ok(unsafe { stock(&real::CLNT_TP_CREATE)?(host, prog, vers, nconf) })
    })
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `clnttcp_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clnttcp_create(
    address: *mut libc::sockaddr_in,
    prog: u32,
    vers: u32,
    fd: *mut c_int,
    sendsz: c_uint,
    recvsz: c_uint,
) -> *mut CLIENT {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::CLNTTCP_CREATE)?(address, prog, vers, fd, sendsz, recvsz) }))
}

/// Passed through; a cancellation point as every call is.
///
/// # Safety
/// As libtirpc's `rpc_call`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rpc_call(
    host: *const c_char,
    prog: u32,
    vers: u32,
    proc: u32,
    encode: XdrProc,
    args: *const c_char,
    decode: XdrProc,
    results: *mut c_char,
    nettype: *const c_char,
) -> c_uint {
    guard_passing_in_steps_cancellable(|| {
        let real = step(|| real::RPC_CALL.get())?;
        // SAFETY: the caller's own arguments.
        Ok(unsafe { real(host, prog, vers, proc, encode, args, decode, results, nettype) })
    })
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `rpc_reg`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpc_reg(
    prog: u32,
    vers: u32,
    proc: u32,
    registered: registered_t,
    decode: XdrProc,
    encode: XdrProc,
    nettype: *mut c_char,
) -> OrMinusOne {
    guard_passing(|| {
        // SAFETY: the caller's own arguments.
        Ok(OrMinusOne(unsafe { real::RPC_REG.get()?(prog, vers, proc, registered, decode, encode, nettype) }))
    })
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `svc_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_create(
    dispatch: dispatch_t,
    prog: u32,
    vers: u32,
    nettype: *const c_char,
) -> c_int {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::SVC_CREATE)?(dispatch, prog, vers, nettype) }))
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `svc_tp_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svc_tp_create(
    dispatch: dispatch_t,
    prog: u32,
    vers: u32,
    nconf: *const netconfig,
) -> *mut SVCXPRT {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::SVC_TP_CREATE)?(dispatch, prog, vers, nconf) }))
}

/// Passed through.
///
/// # Safety
/// As libtirpc's `svctcp_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn svctcp_create(fd: c_int, sendsz: c_uint, recvsz: c_uint) -> *mut SVCXPRT {
    // SAFETY: the caller's own arguments.
    guard_passing(|| Ok(unsafe { stock(&real::SVCTCP_CREATE)?(fd, sendsz, recvsz) }))
}

/// Runs a creation on netid "rdma", and records why it failed: programs that get NULL print what is recorded.
///
/// Not cancelled meanwhile: the functions of libtirpc at work there end in functions of ours again.
///
/// Without libtirpc nothing is created: it would be of no use.
pub(crate) fn creation<T>(create: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let _uncancelled = Uncancelled::now();
    let create = || library().and_then(|_| create());
    let result = catch_unwind(AssertUnwindSafe(create)).unwrap_or_else(|panic| {
        creation_failed(&Error::new(Kind::Panic, "defect in librpcrdma"));
        resume_unwind(panic)
    });
    result.inspect_err(|error| {
        match error.kind() {
            // "rdma" stands for both netids: a host with addresses of only one family is nothing to report.
            Kind::NoAddress => log_debug!("{error}"),
            _ => log_error!("{error}"),
        }
        creation_failed(error);
    })
}

/// A function of libtirpc that creates something. If there is none, that is recorded, too.
fn stock<F: Copy>(function: &Real<F>) -> Result<F, Error> {
    function.get().inspect_err(|error| {
        log_error!("{error}");
        creation_failed(error);
    })
}

/// Whether `RPCRDMA_REDIRECT` moves `prog` from that transport.
fn moves(stock: config::Netid, prog: u32) -> bool {
    config::get().is_ok_and(|config| wants(config, stock, prog))
}

/// Whether these settings move `prog` from that transport.
fn wants(config: &Config, stock: config::Netid, prog: u32) -> bool {
    redirects(config, stock) && config.redirects_program(prog)
}

/// Whether programs on that transport are moved: "tcp" stands for tcp and tcp6, as the nettype of that name does.
fn redirects(config: &Config, stock: config::Netid) -> bool {
    config.redirects(stock)
        || match stock {
            config::Netid::Tcp6 => config.redirects(config::Netid::Tcp),
            config::Netid::Udp6 => config.redirects(config::Netid::Udp),
            _ => false,
        }
}

/// The netid of a TCP address.
fn tcp(address: SocketAddr) -> config::Netid {
    if address.is_ipv4() { config::Netid::Tcp } else { config::Netid::Tcp6 }
}

/// Whether `xprt` is a connection that is to be watched, and if so whether it speaks RDMA only.
///
/// # Safety
/// `xprt` is NULL or a live transport.
unsafe fn moved(xprt: *mut SVCXPRT) -> Option<bool> {
    // SAFETY: by the contract.
    let made = unsafe { ffi::reference(xprt) }?;
    // The stock listener has port -1 here; a transport of another maker is none of our business.
    if made.xp_port != 0 || !is_libtirpcs(made.xp_ops.cast()) {
        return None;
    }
    let fd = made.xp_fd;
    if !socket::is_stream(fd) || socket::listens(fd) {
        return None;
    }
    let local = socket::local(fd)?;
    if listeners::accepted(local) {
        return Some(true);
    }
    serves_moved(local).then_some(false)
}

/// The descriptor of `xprt`, if it is a listener of the program's whose connections are to be watched.
///
/// # Safety
/// `xprt` is NULL or a live transport.
unsafe fn moved_listener(xprt: *mut SVCXPRT) -> Option<c_int> {
    // SAFETY: by the contract.
    let made = unsafe { ffi::reference(xprt) }?;
    let fd = made.xp_fd;
    if !is_libtirpcs(made.xp_ops.cast()) || !socket::is_stream(fd) || !socket::listens(fd) {
        return None;
    }
    let moves = !config::get().ok()?.redirect.is_empty() && socket::local(fd)?.port() != RPCBIND_PORT;
    moves.then_some(fd)
}

/// Whether connections to a listener of the program's are watched: where tcp is moved, for all programs or those registered
/// there; and on the port of a datagram transport that is moved.
pub(super) fn serves_moved(local: SocketAddr) -> bool {
    let Ok(config) = config::get() else { return false };
    let all = config.redirect_programs.is_none();
    let tcp_is_moved = redirects(config, tcp(local)) && (all || PORTS.contain(local.port()));
    local.port() != RPCBIND_PORT && (tcp_is_moved || BESIDE.contain(local.port()))
}

/// The listeners on netid "rdma": descriptor and port of each.
pub(super) mod listeners {
    use super::*;

    /// `port << 32 | fd`, or [`FREE`].
    static SLOTS: [AtomicU64; 256] = [const { AtomicU64::new(FREE) }; 256];
    const FREE: u64 = u64::MAX;

    pub fn add(fd: c_int) -> Result<(), Error> {
        let Some(local) = socket::local(fd) else {
            return Err(Error::new(Kind::Invalid, "a listener on netid rdma needs an internet address"));
        };
        let entry = u64::from(local.port()) << 32 | u64::from(fd as u32);
        for slot in &SLOTS {
            let old = slot.load(Ordering::Relaxed);
            // A listener that was destroyed left its slot behind; nobody tells us of the close.
            let usable = old == FREE || old == entry || alive(old).is_none();
            if usable && slot.compare_exchange(old, entry, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Ok(());
            }
        }
        Err(Error::new(Kind::Os(libc::EMFILE), "more than 256 listeners on netid rdma"))
    }

    /// Removes a listener again.
    pub fn remove(fd: c_int) {
        for slot in &SLOTS {
            let entry = slot.load(Ordering::Relaxed);
            if entry != FREE && entry as u32 == fd as u32 {
                let _ = slot.compare_exchange(entry, FREE, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Whether a connection with this local address came in on one of these listeners.
    pub fn accepted(local: SocketAddr) -> bool {
        SLOTS.iter().any(|slot| {
            let entry = slot.load(Ordering::Relaxed);
            entry != FREE
                && entry >> 32 == u64::from(local.port())
                && alive(entry).is_some_and(|at| {
                    at.is_ipv4() == local.is_ipv4() && (at.ip().is_unspecified() || at.ip() == local.ip())
                })
        })
    }

    /// The address of a listener that is still there: the descriptor may be another file by now.
    fn alive(entry: u64) -> Option<SocketAddr> {
        let fd = entry as u32 as c_int;
        if !socket::listens(fd) {
            return None;
        }
        socket::local(fd).filter(|at| u64::from(at.port()) == entry >> 32)
    }
}

/// A set of ports: a bit for each port there is.
struct Ports([AtomicU64; 1024]);

impl Ports {
    const fn new() -> Ports {
        Ports([const { AtomicU64::new(0) }; 1024])
    }

    fn add(&self, port: u16) {
        self.0[usize::from(port / 64)].fetch_or(1 << (port % 64), Ordering::Relaxed);
    }

    fn contain(&self, port: u16) -> bool {
        self.0[usize::from(port / 64)].load(Ordering::Relaxed) & 1 << (port % 64) != 0
    }
}

/// The ports on which programs that are to be moved were registered, and those of datagram transports among them.
static PORTS: Ports = Ports::new();
static BESIDE: Ports = Ports::new();

/// Whether a transport carries datagrams: RDMA is served beside it, over TCP.
fn datagrams(stock: config::Netid) -> bool {
    matches!(stock, config::Netid::Udp | config::Netid::Udp6)
}

/// The internet address in a netbuf.
///
/// # Safety
/// `address` is NULL or a netbuf whose buffer holds `len` bytes.
unsafe fn socket_address(address: *const netbuf) -> Option<SocketAddr> {
    // SAFETY: by the contract.
    let address = unsafe { ffi::reference(address) }?;
    // SAFETY: by the contract.
    let bytes = unsafe { ffi::bytes(address.buf.cast(), address.len as usize) }.ok()?;
    Sockaddr::parse(bytes)
}

/// `stock` followed by our text, in a buffer of this thread; `stock` itself without a text.
///
/// # Safety
/// `stock` is NULL or a string.
unsafe fn explained(stock: *mut c_char, explanation: Option<String>) -> *mut c_char {
    thread_local! {
        static TEXT: Owned<Vec<u8>> = const { Owned::new() };
    }
    let Some(explanation) = explanation else { return stock };
    // SAFETY: by the contract.
    let start = unsafe { ffi::cstr(stock) }.map_or(&b""[..], CStr::to_bytes).trim_ascii_end();
    // libtirpc has no text for RPC_N2AXLATEFAILURE, and what it says instead only misleads beside ours.
    let start = start.strip_suffix(b" (unknown error code)").unwrap_or(start);
    let mut text = [
        start,
        if start.ends_with(b":") { b" " } else { b"; " },
        explanation.replace('\0', " ").as_bytes(),
        b"\0",
    ]
    .concat();
    // The buffer stays where it is.
    let start = text.as_mut_ptr().cast();
    per_thread::put(&TEXT, text).map_or(stock, |_| start)
}

/// The text in place of libtirpc's where there is no libtirpc.
///
/// # Safety
/// `message` is NULL or a string.
unsafe fn unstocked(message: *const c_char, explanation: Option<String>, error: &Error) -> *mut c_char {
    // SAFETY: by the contract.
    let start = unsafe { ffi::cstr(message) }.unwrap_or_default();
    let start = CString::new([start.to_bytes(), b":"].concat()).unwrap_or_default();
    let explanation = explanation.unwrap_or_else(|| error.text().to_owned());
    // SAFETY: a string, which is copied.
    unsafe { explained(start.as_ptr().cast_mut(), Some(explanation)) }
}

/// Tells the `clnt_vc_create` in which `clnt_tli_create` ends that RDMA is required.
struct RdmaWanted(());

thread_local! {
    static RDMA_WANTED: Cell<bool> = const { Cell::new(false) };
}

impl RdmaWanted {
    fn set() -> RdmaWanted {
        RDMA_WANTED.set(true);
        RdmaWanted(())
    }

    fn take() -> bool {
        RDMA_WANTED.replace(false)
    }
}

impl Drop for RdmaWanted {
    fn drop(&mut self) {
        // The creation may have failed before it reached clnt_vc_create.
        RDMA_WANTED.set(false);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::ffi::guard;

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").expect("loopback")
    }

    #[test]
    fn a_connection_belongs_to_its_listener_until_that_is_closed() {
        let rdma = listener();
        let other = listener();
        listeners::add(rdma.as_raw_fd()).expect("a slot");
        let at = rdma.local_addr().expect("bound");
        assert!(listeners::accepted(at));
        assert!(!listeners::accepted(other.local_addr().expect("bound")));
        drop(rdma);
        assert!(!listeners::accepted(at));
        // Slots of closed listeners are used again: there are not so many.
        for _ in 0..600 {
            listeners::add(listener().as_raw_fd()).expect("a slot");
        }
    }

    #[test]
    fn every_port_has_its_own_bit() {
        let ports = Ports::new();
        for port in [0, 63, 64, 2049, 65535] {
            assert!(!ports.contain(port));
            ports.add(port);
            assert!(ports.contain(port));
        }
        assert!(!ports.contain(1));
    }

    #[test]
    fn the_explanation_follows_the_stock_text_and_cannot_cut_it() {
        let stock = c"client: RPC: Program not registered\n".as_ptr().cast_mut();
        // SAFETY: a string, which is not written.
        assert_eq!(unsafe { explained(stock, None) }, stock);
        // SAFETY: as above.
        let text = unsafe { explained(stock, Some("see\0this".into())) };
        // SAFETY: NUL-terminated by the function.
        let text = unsafe { CStr::from_ptr(text) };
        assert_eq!(text, c"client: RPC: Program not registered; see this");
    }

    #[test]
    fn a_panic_while_creating_is_recorded_for_clnt_pcreateerror() {
        creation_started();
        assert!(guard(|| creation::<*mut CLIENT>(|| panic!("a defect"))).is_null());
        assert_eq!(creation_explanation().as_deref(), Some("defect in librpcrdma"));
    }

    #[test]
    fn the_taddr_of_an_rdma_uaddr_comes_from_the_stock_functions() {
        #[link(name = "tirpc")]
        unsafe extern "C" {
            fn uaddr2taddr(nconf: *const netconfig, uaddr: *const c_char) -> *mut netbuf;
            fn taddr2uaddr(nconf: *const netconfig, address: *const netbuf) -> *mut c_char;
        }
        for (netid, uaddr, address) in [
            (Netid::Rdma, c"127.0.0.1.78.81", "127.0.0.1:20049"),
            (Netid::Rdma6, c"::1.78.81", "[::1]:20049"),
        ] {
            // SAFETY: a static entry and a string.
            let taddr = unsafe { uaddr2taddr(netid.entry(), uaddr.as_ptr()) };
            // SAFETY: made by libtirpc.
            let parsed = unsafe { socket_address(taddr) }.expect("an address");
            assert_eq!(parsed, address.parse().expect("an address"));
            // SAFETY: made by libtirpc.
            let back = unsafe { taddr2uaddr(netid.entry(), taddr) };
            // SAFETY: a string, or NULL.
            assert_eq!(unsafe { ffi::cstr(back) }, Some(uaddr));
        }
    }
}
