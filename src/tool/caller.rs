//! A CLIENT of libtirpc, as any program makes one.
//!
//! Over netids rdma and rdma6 it belongs to this library, and is reached by the same functions as by a C program; over tcp
//! and tcp6 it is libtirpc's own, whatever `RPCRDMA_REDIRECT` says.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::config;
use crate::driver::Agreed;
use crate::error::{Error, Kind, clnt_stat};
use crate::ffi::{self, Inside};
use crate::socket::Sockaddr;
use crate::tirpc::interpose::{clnt_create_timed, clnt_spcreateerror, clnt_sperror, clnt_tli_create};
use crate::tirpc::netid::Netid;
use crate::tirpc::{
    CLIENT, RPC_ANYFD, client, clnt_ops, control, creation_started, library, netbuf, real, rpc_err,
};
use crate::xdr::XdrProc;

/// A CLIENT, which is destroyed when this is dropped.
pub struct Caller {
    raw: *mut CLIENT,
    name: CString,
}

// SAFETY: libtirpc lets any thread use a CLIENT; calls over tcp wait for each other in it.
unsafe impl Send for Caller {}
// SAFETY: as above.
unsafe impl Sync for Caller {}

/// Why a call failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// In the words of `clnt_perror`.
    pub text: String,
    /// The versions of the program that the server has, if it does not have the one that was asked for.
    pub versions: Option<(u32, u32)>,
}

impl Caller {
    /// A CLIENT for a program that is registered at `host` on `netid`: rdma, rdma6, tcp or tcp6.
    ///
    /// # Errors
    /// In the words of `clnt_pcreateerror`.
    pub fn of(host: &str, netid: &str, prog: u32, vers: u32, timeout: Duration) -> Result<Caller, Error> {
        let (name, netid) = (string(host)?, string(netid)?);
        let timeout = timeval(timeout);
        let stock = stock(&netid);
        creation_started();
        let raw = match &stock {
            // SAFETY: three strings and a time that outlive the call.
            Some(_inside) => unsafe {
                real::CLNT_CREATE_TIMED.get()?(name.as_ptr(), prog, vers, netid.as_ptr(), &timeout)
            },
            // SAFETY: as above.
            None => unsafe { clnt_create_timed(name.as_ptr(), prog, vers, netid.as_ptr(), &timeout) },
        };
        drop(stock);
        Caller::made(raw, name)
    }

    /// A CLIENT for a program at an address, without asking rpcbind.
    ///
    /// # Errors
    /// As [`Caller::of`].
    pub fn at(to: SocketAddr, name: &str, netid: &str, prog: u32, vers: u32) -> Result<Caller, Error> {
        let (name, netid) = (string(name)?, string(netid)?);
        let mut address = Sockaddr::from(to);
        let mut address = address.netbuf();
        let ours = Netid::of_address(to);
        let stock = stock(&netid);
        creation_started();
        let raw = match &stock {
            // SAFETY: the entry is static, and the address outlives the call.
            Some(_inside) => unsafe {
                real::CLNT_TLI_CREATE.get()?(RPC_ANYFD, ours.stock(), &mut address, prog, vers, 0, 0)
            },
            // SAFETY: as above.
            None => unsafe { clnt_tli_create(RPC_ANYFD, ours.entry(), &mut address, prog, vers, 0, 0) },
        };
        drop(stock);
        Caller::made(raw, name)
    }

    fn made(raw: *mut CLIENT, name: CString) -> Result<Caller, Error> {
        if raw.is_null() {
            // SAFETY: a string that outlives the call.
            let text = text(|| unsafe { clnt_spcreateerror(name.as_ptr()) });
            return Err(Error::new(Kind::NotSent, text));
        }
        Ok(Caller { raw, name })
    }

    fn ops(&self) -> &clnt_ops {
        // SAFETY: alive as long as this; nobody else writes to it.
        let ops = unsafe { (*self.raw).cl_ops };
        // SAFETY: every handle names its operations, which live as long as it does.
        unsafe { &*ops }
    }

    /// Calls procedure 0.
    ///
    /// # Errors
    /// No answer, or not the one that was wanted.
    pub fn null(&self, timeout: Duration) -> Result<(), Failed> {
        let void = match library() {
            Ok(library) => Some(library.xdr_void as _),
            Err(error) => return Err(Failed { text: error.text().into(), versions: None }),
        };
        // SAFETY: xdr_void needs no object.
        unsafe { self.call(0, (void, null_mut()), (void, null_mut()), timeout) }
    }

    /// Calls a procedure: `arguments` and `results` are each an XDR procedure and the object that it is for.
    ///
    /// # Errors
    /// No answer, or not the one that was wanted.
    ///
    /// # Safety
    /// Each XDR procedure is for what lies at its pointer.
    pub unsafe fn call(
        &self,
        procedure: u32,
        arguments: (XdrProc, *mut c_void),
        results: (XdrProc, *mut c_void),
        timeout: Duration,
    ) -> Result<(), Failed> {
        let Some(call) = self.ops().cl_call else {
            return Err(Failed { text: "the CLIENT makes no calls".into(), versions: None });
        };
        let ((encode, from), (decode, to)) = (arguments, results);
        // SAFETY: alive; the rest by the contract.
        let status = unsafe { call(self.raw, procedure, encode, from, decode, to, timeval(timeout)) };
        if status == clnt_stat::SUCCESS {
            return Ok(());
        }
        let mut error = rpc_err::new(status, 0);
        if let Some(geterr) = self.ops().cl_geterr {
            // SAFETY: alive, and `error` may be written.
            unsafe { geterr(self.raw, &mut error) };
        }
        // SAFETY: alive, and a string.
        let text = text(|| unsafe { clnt_sperror(self.raw, self.name.as_ptr()) });
        // SAFETY: every variant of the union is made of integers, and all of it is initialised.
        let [low, high] = unsafe { error.ru.re_vers };
        let versions = (status == clnt_stat::PROGVERSMISMATCH).then_some((low, high));
        Err(Failed { text, versions })
    }

    /// The address to which the calls go.
    pub fn address(&self) -> Option<SocketAddr> {
        let mut address = netbuf { maxlen: 0, len: 0, buf: null_mut() };
        let get = self.ops().cl_control?;
        // SAFETY: alive; this request writes a netbuf.
        let done = unsafe { get(self.raw, control::CLGET_SVC_ADDR, (&raw mut address).cast()) };
        // SAFETY: a netbuf of the handle's own, whose buffer lives as long as the handle.
        let bytes = (done != 0).then(|| unsafe { client::address_bytes(&address) })?;
        Sockaddr::parse(&bytes)
    }

    /// The descriptor by which programs know it.
    pub fn fd(&self) -> Option<RawFd> {
        let mut fd: c_int = -1;
        let get = self.ops().cl_control?;
        // SAFETY: alive; this request writes an int.
        let done = unsafe { get(self.raw, control::CLGET_FD, (&raw mut fd).cast()) };
        (done != 0 && fd >= 0).then_some(fd)
    }

    /// What the connection runs on; `None` over tcp.
    pub fn agreed(&self) -> Option<Agreed> {
        // SAFETY: alive.
        unsafe { client::agreed(self.raw) }.ok()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(destroy) = self.ops().cl_destroy {
            // SAFETY: alive, and not used after this.
            unsafe { destroy(self.raw) };
        }
    }
}

/// What is wrong with the settings of this process, if anything is: in that case nothing goes over rdma.
pub fn settings() -> Result<(), Error> {
    config::get().map(drop)
}

/// The mark under which tcp means libtirpc's own, if `netid` asks for that.
fn stock(netid: &CStr) -> Option<Inside> {
    Netid::named(netid).is_none().then(Inside::enter).flatten()
}

fn string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::new(Kind::Invalid, "a NUL in a name"))
}

fn timeval(time: Duration) -> libc::timeval {
    libc::timeval {
        tv_sec: time.as_secs() as libc::time_t,
        tv_usec: libc::suseconds_t::from(time.subsec_micros()),
    }
}

/// A text of libtirpc, which lies in a buffer that all threads share.
fn text(of: impl FnOnce() -> *mut c_char) -> String {
    static BUFFER: Mutex<()> = Mutex::new(());
    let _held = BUFFER.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: NULL, or a string that nobody else changes now.
    let text = unsafe { ffi::cstr(of()) }.map_or("no reason is known".into(), CStr::to_string_lossy);
    text.trim().to_owned()
}
