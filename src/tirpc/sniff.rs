//! How an accepted TCP connection becomes one over RDMA.
//!
//! A listener on netid "rdma" is libtirpc's own TCP listener, and so is that of a moved server. Each connection that it
//! accepts comes here ([`watch`]) and is looked at when its first byte has arrived: an MPA Request begins with 'M', which
//! as a record mark of RPC over TCP would announce a fragment of 1.3 GB. One byte decides for good: the stock transport
//! goes on, or it is replaced by our own SVCXPRT on the same descriptor.
//!
//! libtirpc makes its transport before the connection comes here, and does not check whether there was memory for its record
//! stream: destroying such a transport, or reading from it, would dereference a NULL pointer. It gets an empty stream, and the
//! connection is refused.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_long, c_uint};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

use crate::config;
use crate::driver::Server;
use crate::error::{Error, Kind};
use crate::ffi::guard;
use crate::tirpc::bare::LISTENING;
use crate::tirpc::{
    SVCXPRT, bool_t, idle, nothing_is_registered, rpc_msg, server, xp_ops, xprt_stat, xprt_unregister,
};
use crate::xdr::{XDR, XdrOps};
use crate::{log_info, log_warn, socket};

/// libtirpc's operations for stream connections: the same for all of them.
static STOCK: AtomicPtr<xp_ops> = AtomicPtr::new(null_mut());

/// Operations of a connection on a port that serves tcp and rdma, until its first byte has arrived.
static SNIFF: xp_ops = xp_ops { xp_recv: Some(sniff), ..WATCHED };

/// The same on a listener of netid "rdma", where nothing else is spoken.
static SNIFF_RDMA: xp_ops = xp_ops { xp_recv: Some(sniff_rdma), ..WATCHED };

/// Operations of a connection that is refused, such as one that did not begin with an MPA Request where only that is served.
static REFUSED: xp_ops = xp_ops { xp_stat: Some(refused_stat), ..WATCHED };

const WATCHED: xp_ops = xp_ops { xp_destroy: Some(stock_destroy), ..LISTENING };

/// The beginning of what libtirpc keeps for a stream connection (`struct cf_conn`), the same in all of its versions.
#[repr(C)]
struct Connection {
    stat: c_int,
    xid: u32,
    stream: XDR,
}

const _: () = assert!(std::mem::offset_of!(Connection, stream) == 8);

/// The stream of a connection for which libtirpc had no memory.
static NO_STREAM: XdrOps = XdrOps {
    getlong: no_long,
    putlong: no_put,
    getbytes: no_bytes,
    putbytes: no_bytes_put,
    getpostn: no_position,
    setpostn: no_move,
    inline: no_inline,
    destroy: Some(nothing_to_free),
    control: None,
};

/// Where libtirpc records, after `xprt_register`, that such a connection is non-blocking: in the `RECSTREAM` of 152 bytes that it
/// takes for granted. Nobody reads it.
static NOTES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// Gives an accepted stock connection the operations that look at its first byte.
///
/// `rdma_only`: it came in on a listener of netid "rdma", where nothing else is spoken.
///
/// # Errors
/// `ENOMEM` when libtirpc had no memory for a part of the connection: it can only be destroyed, which the loop does in its next
/// turn.
///
/// # Safety
/// `xprt` is a live, registered connection of libtirpc's stream transport.
pub unsafe fn watch(xprt: *mut SVCXPRT, rdma_only: bool) -> Result<(), Error> {
    // SAFETY: alive by the contract; no reference is made.
    let stock = unsafe { (*xprt).xp_ops };
    // A connection on a descriptor of the program's may come here twice.
    if ![&raw const SNIFF, &raw const SNIFF_RDMA, &raw const REFUSED].contains(&stock) {
        STOCK.store(stock.cast_mut(), Relaxed);
    }
    // SAFETY: by the contract.
    if stock == &raw const REFUSED || unsafe { lacked_stream(xprt) } {
        // SAFETY: as above.
        unsafe { (*xprt).xp_ops = &REFUSED };
        return Err(Error::new(Kind::Os(libc::ENOMEM), "libtirpc had no memory for the connection"));
    }
    let ops = if rdma_only { &raw const SNIFF_RDMA } else { &raw const SNIFF };
    // SAFETY: as above.
    unsafe { (*xprt).xp_ops = ops };
    // SAFETY: as above.
    let fd = unsafe { (*xprt).xp_fd };
    // SAFETY: alive until `stock_destroy`, which forgets it; the caller is the loop, which registers transports, or what has just
    // made this one.
    unsafe { idle::silent(fd, xprt, rdma_only) };
    Ok(())
}

/// Whether libtirpc had no memory for the record stream of a connection. If so, the connection gets an empty stream, so that it
/// can be destroyed.
///
/// # Safety
/// As [`watch`].
unsafe fn lacked_stream(xprt: *mut SVCXPRT) -> bool {
    // SAFETY: alive (contract).
    let connection = unsafe { (*xprt).xp_p1 }.cast::<Connection>();
    if connection.is_null() {
        return false;
    }
    // SAFETY: what a connection of the stream transport (contract) has there, since before it was registered.
    let stream = unsafe { &raw mut (*connection).stream };
    // SAFETY: as above; libtirpc has allocated it zeroed.
    if !unsafe { (*stream).x_ops }.is_null() {
        return false;
    }
    // SAFETY: as above; nothing of it is in use.
    unsafe { (*stream).x_ops = &NO_STREAM };
    // SAFETY: as above.
    unsafe { (*stream).x_private = NOTES.as_ptr().cast_mut().cast() };
    true
}

unsafe extern "C" fn no_long(_: *mut XDR, _: *mut c_long) -> c_int {
    guard(|| Ok(0))
}

unsafe extern "C" fn no_put(_: *mut XDR, _: *const c_long) -> c_int {
    guard(|| Ok(0))
}

unsafe extern "C" fn no_bytes(_: *mut XDR, _: *mut c_char, _: c_uint) -> c_int {
    guard(|| Ok(0))
}

unsafe extern "C" fn no_bytes_put(_: *mut XDR, _: *const c_char, _: c_uint) -> c_int {
    guard(|| Ok(0))
}

unsafe extern "C" fn no_position(_: *mut XDR) -> c_uint {
    guard(|| Ok(0))
}

unsafe extern "C" fn no_move(_: *mut XDR, _: c_uint) -> c_int {
    guard(|| Ok(0))
}

unsafe extern "C" fn no_inline(_: *mut XDR, _: c_uint) -> *mut i32 {
    guard(|| Ok(null_mut()))
}

unsafe extern "C" fn nothing_to_free(_: *mut XDR) {
    guard(|| Ok(()));
}

unsafe extern "C-unwind" fn sniff(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> bool_t {
    // SAFETY: libtirpc's own transport and message.
    guard(|| unsafe { look(xprt, message, false) })
}

unsafe extern "C-unwind" fn sniff_rdma(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> bool_t {
    // SAFETY: libtirpc's own transport and message.
    guard(|| unsafe { look(xprt, message, true) })
}

/// # Safety
/// As `xp_recv` of a watched connection.
unsafe fn look(xprt: *mut SVCXPRT, message: *mut rpc_msg, rdma_only: bool) -> Result<bool_t, Error> {
    // SAFETY: alive (contract).
    let fd = unsafe { (*xprt).xp_fd };
    let first = match socket::peek(fd) {
        Ok(first) => first,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(0),
        Err(_) => None,
    };
    idle::forget(fd);
    // SAFETY: alive (contract).
    if unsafe { (*xprt).xp_rtaddr.buf }.is_null() {
        // Programs that decide by the caller's address would dereference a NULL pointer.
        log_warn!("fd {fd}: a connection is refused: libtirpc had no memory for the address of its peer");
        // SAFETY: alive (contract).
        unsafe { (*xprt).xp_ops = &REFUSED };
        return Ok(0);
    }
    if first == Some(b'M') {
        // SAFETY: by the contract.
        if let Err(error) = unsafe { convert(xprt, fd, rdma_only) } {
            let remedy = match error.kind() {
                Kind::Os(libc::EMFILE) => "; raise its limit (ulimit -n, LimitNOFILE=)",
                _ => "",
            };
            log_warn!("fd {fd}: an RDMA connection is refused: {error}{remedy}");
            // SAFETY: alive: it was not converted.
            unsafe { (*xprt).xp_ops = &REFUSED };
        }
        return Ok(0);
    }
    if rdma_only && first.is_some() {
        log_info!("fd {fd}: closed: the peer does not begin with an MPA Request on a port of netid rdma");
        // SAFETY: alive (contract).
        unsafe { (*xprt).xp_ops = &REFUSED };
        return Ok(0);
    }
    let stock = STOCK.load(Relaxed);
    // SAFETY: alive (contract).
    unsafe { (*xprt).xp_ops = stock };
    // SAFETY: libtirpc's static operations, set by `watch` before any connection was sniffed.
    let recv = unsafe { (*stock).xp_recv };
    // SAFETY: the transport's own operation, with the caller's arguments.
    Ok(recv.map_or(0, |recv| unsafe { recv(xprt, message) }))
}

unsafe extern "C" fn refused_stat(_: *mut SVCXPRT) -> c_uint {
    guard(|| Ok(xprt_stat::XPRT_DIED))
}

unsafe extern "C" fn stock_destroy(xprt: *mut SVCXPRT) {
    guard(|| {
        // SAFETY: alive: it is destroyed below.
        unsafe { idle::forget_silent(xprt) };
        // SAFETY: a connection that `watch` got, so STOCK is set; destroyed once.
        unsafe { destroy_stock(xprt) };
        Ok(())
    });
}

/// # Safety
/// `xprt` is a live connection of libtirpc's stream transport, whatever its operations are now.
unsafe fn destroy_stock(xprt: *mut SVCXPRT) {
    let stock = STOCK.load(Relaxed);
    // SAFETY: alive (contract).
    unsafe { (*xprt).xp_ops = stock };
    // SAFETY: libtirpc's static operations.
    if let Some(destroy) = unsafe { (*stock).xp_destroy } {
        // SAFETY: the transport's own operation.
        unsafe { destroy(xprt) };
    }
}

/// Replaces a stock connection with a transport of our own.
///
/// # Safety
/// As [`look`].
unsafe fn convert(stock: *mut SVCXPRT, fd: c_int, rdma_only: bool) -> Result<(), Error> {
    if nothing_is_registered() {
        return Err(Error::new(Kind::Invalid, "svc_exit() has ended the service loop"));
    }
    let config = config::get()?;
    let expendable = idle::is_expendable(fd);
    let server = Server::accept(fd, config)?;
    // Destroying the stock transport closes its descriptor and unregisters it by number, so it gets another descriptor of the
    // same socket.
    let other = socket::duplicate(fd)?;
    // SAFETY: alive (contract).
    let own = unsafe { server::like(stock, server, rdma_only) };
    // SAFETY: alive and registered (contract).
    unsafe { xprt_unregister(stock) };
    // SAFETY: alive (contract).
    unsafe { (*stock).xp_fd = other };
    // SAFETY: unregistered; nothing refers to it any more: svc_getreq_common compares with its table.
    unsafe { destroy_stock(stock) };
    // SAFETY: just made, complete.
    if let Err(error) = unsafe { server::register(own, expendable) } {
        // Not returned as an error: the stock connection is already gone.
        log_warn!("fd {fd}: an RDMA connection is closed: {error}");
    }
    Ok(())
}
