//! What a dispatch routine does with its request: it takes the arguments, replies, and frees what was decoded.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Transport, Unanswered, pull_next, transport};
use crate::config;
use crate::connection::RequestId;
use crate::driver::service_loop;
use crate::error::{Error, Kind};
use crate::ffi::{guard, guard_in_steps, step};
use crate::stats::{self, Counter};
use crate::tirpc::lending::lending;
use crate::tirpc::{
    PLAIN_REPLY, SVCAUTH, SVCXPRT, accepted_reply, ar_results, auth_stat, bool_t, library, msg, reply_body,
    rpc_msg,
};
use crate::wire::Xid;
use crate::xdr::{self, Decoder, Encoder, XDR, XdrProc};
use crate::{log_debug, log_warn};

/// Results of at least this length are sent from where they lie: copying shorter ones is faster than waiting for the transfer.
const RESULT_LEND_MIN: usize = 64 << 10;

pub(super) unsafe extern "C-unwind" fn getargs(
    xprt: *mut SVCXPRT,
    decode: XdrProc,
    args: *mut c_void,
) -> bool_t {
    guard_in_steps(|| {
        // SAFETY: libtirpc's loop and its transport.
        let Some(mut taken) = step(|| unsafe { Taken::from(xprt) })? else { return Ok(0) };
        // SAFETY: the program's procedure and object; the stream and the authenticator are alive, and nothing of ours is
        // locked or borrowed but the stream.
        let decoded =
            taken.unwrap.map_or(0, |unwrap| unsafe { unwrap(taken.auth, taken.xdrs, decode, args) });
        step(move || {
            let pulled = taken.arguments.as_ref().is_some_and(Decoder::end_pass);
            taken.give_back();
            drop(taken);
            if pulled {
                pull_next();
            }
            // As over tcp, whatever nonzero value the procedure returns for TRUE.
            Ok((decoded != 0).into())
        })
    })
}

/// `svc_ah_wrap` and `svc_ah_unwrap`.
type Wrap = unsafe extern "C-unwind" fn(*mut SVCAUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t;

/// The arguments of a request while the program decodes them. The open request owns a share of its transport. A share here would
/// keep the connection forever after a jump out of the xdrproc.
struct Taken {
    own: Weak<Transport>,
    id: RequestId,
    arguments: Option<Decoder>,
    before: u64,
    xdrs: *mut XDR,
    auth: *mut SVCAUTH,
    unwrap: Option<Wrap>,
}

impl Taken {
    /// Takes the stream out of the request while the program decodes: whatever else the xdrproc does meanwhile, its request is on
    /// the stack until the dispatch routine returns. `None` if there is no request, or the program is already decoding it.
    ///
    /// # Safety
    /// `xprt` is NULL or a live transport of any kind.
    unsafe fn from(xprt: *mut SVCXPRT) -> Result<Option<Taken>, Error> {
        // SAFETY: by the contract.
        let own = unsafe { transport(xprt) }?;
        let taken =
            own.state().open.last_mut().and_then(|request| Some((request.id, request.arguments.take()?)));
        let Some((id, mut arguments)) = taken else { return Ok(None) };
        let (before, xdrs, auth) = (arguments.copied(), arguments.xdr(), own.auth());
        // SAFETY: set by _gss_authenticate before the request was dispatched.
        let unwrap = unsafe { operation(auth, |ops| ops.svc_ah_unwrap) };
        let own = own.this.clone();
        Ok(Some(Taken { own, id, arguments: Some(arguments), before, xdrs, auth, unwrap }))
    }

    fn give_back(&mut self) {
        let Some(arguments) = self.arguments.take() else { return };
        stats::add(Counter::BytesCopied, arguments.copied() - self.before);
        if let Some(own) = self.own.upgrade()
            && let Some(request) = own.state().find(self.id)
        {
            request.arguments = Some(arguments);
        }
    }
}

/// Also when the program has thrown: it may go on with the request.
impl Drop for Taken {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// An operation of the authenticator, if it has any.
///
/// # Safety
/// `auth` is alive; its ops are NULL or libtirpc's.
unsafe fn operation<F>(
    auth: *const SVCAUTH,
    pick: fn(&crate::tirpc::svc_auth_ops) -> Option<F>,
) -> Option<F> {
    // SAFETY: by the contract.
    let ops = unsafe { (*auth).svc_ah_ops };
    // SAFETY: by the contract.
    unsafe { crate::ffi::reference(ops) }.and_then(pick)
}

pub(super) unsafe extern "C-unwind" fn reply(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> bool_t {
    guard_in_steps(|| {
        // SAFETY: libtirpc's loop, its transport, and the caller's message, which it lets the transport change.
        let Some(mut begun) = step(|| unsafe { Reply::begin(xprt, message) })? else { return Ok(0) };
        if let Some(results) = begun.results {
            // SAFETY: the program's procedure and object; the stream and the authenticator are alive, and nothing of ours
            // is locked or borrowed but the stream.
            let wrapped = begun.wrap.is_some_and(|wrap| unsafe {
                wrap(begun.auth, begun.encoder.xdr(), results.r#proc, results.r#where.cast()) != 0
            });
            if !wrapped {
                // Nothing was sent: the program answers with svcerr_systemerr.
                return step(|| {
                    drop(begun);
                    Ok(0)
                });
            }
        }
        step(|| begun.send())
    })
}

/// A reply whose header is encoded. If the program throws instead of encoding results, the request stays unanswered. It may also
/// jump out of the results' xdrproc, as with [`Taken`].
struct Reply {
    own: Weak<Transport>,
    /// A share of the transport, if the request is no longer open.
    late: Option<Late>,
    id: RequestId,
    xid: u32,
    encoder: Encoder,
    /// Of a successful reply: the authenticator wraps them, after the header.
    results: Option<ar_results>,
    auth: *mut SVCAUTH,
    wrap: Option<Wrap>,
}

/// The request to be answered now, and whether it is open. Waits a moment while it is in doubt which one that is.
fn to_answer(own: &Transport) -> Option<(Unanswered, bool)> {
    /// libtirpc refuses a call within microseconds, unless its thread loses the processor; a routine that runs instead may answer
    /// by itself, or wait for this thread.
    const REFUSED: Duration = Duration::from_millis(250);
    let mut until = None;
    loop {
        let mut state = own.state();
        if !state.is_in_doubt() || until.is_some_and(|until| Instant::now() >= until) {
            let request = state.unanswered()?.clone();
            let is_open = state.find(request.id).is_some();
            return Some((request, is_open));
        }
        drop(state);
        until.get_or_insert_with(|| Instant::now() + REFUSED);
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A share in the transport whose request is answered late.
struct Late(Arc<Transport>);

impl Late {
    /// None where the connection was closed.
    fn begin(own: Arc<Transport>) -> Option<Late> {
        // Either the thread that closes the connection sees this count, or this thread sees that it was closed.
        own.answering.fetch_add(1, SeqCst);
        let late = Late(own);
        (!late.0.is_closed()).then_some(late)
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.0.answering.fetch_sub(1, SeqCst);
    }
}

impl Reply {
    /// # Errors
    /// When out of memory; `Invalid`. `None` when nothing is to be answered, or the header cannot be encoded.
    ///
    /// # Safety
    /// `xprt` is NULL or a live transport of any kind; `message` is NULL or a reply whose results, if any, fit their
    /// procedure and are the program's until the entry that asks for this returns.
    unsafe fn begin(xprt: *mut SVCXPRT, message: *mut rpc_msg) -> Result<Option<Reply>, Error> {
        // SAFETY: by the contract.
        let own = unsafe { transport(xprt) }?;
        let Some((request, is_open)) = to_answer(&own) else { return Ok(None) };
        let Unanswered { id, xid, binding, wrapped, plain } = request;
        let late = if is_open { None } else { Late::begin(own.clone()) };
        if late.is_none() && !is_open {
            return Ok(None);
        }
        let Some(responder) = own.responder.upgrade() else { return Ok(None) };
        // The latest reply was long, so this one probably is, too.
        let outbox = if plain && own.long.load(Relaxed) { responder.outbox() } else { None };
        let mut encoder = Encoder::new(match outbox.map_or_else(|| responder.message(), Ok) {
            Ok(message) => message,
            Err(error) => {
                // RFC 8166 §4.5.4: "If a Responder is unable to construct and transmit an RPC Reply or RPC-over-RDMA error
                // message, the Responder MUST close the connection to signal to the Requester that a reply was lost."
                responder.lose(error.clone());
                own.tell_loop();
                return Err(error);
            }
        });
        if message.is_null() {
            return Err(Error::new(Kind::Invalid, "reply is NULL"));
        }
        // SAFETY: the caller's message, which may be written (contract).
        unsafe { (*message).rm_xid = xid };
        if !wrapped
            && let Some(lending) =
                lending(config::get()?, binding.as_ref(), RESULT_LEND_MIN, |b, reply| b.reply(reply).items)
        {
            // SAFETY: the results are the program's until `svc_sendreply` returns, and the loans end before that.
            unsafe { encoder.lend(lending) };
        }
        // SAFETY: by the contract.
        let results = unsafe { take_results(message) };
        // SAFETY: as above.
        let put = if results.is_some() && unsafe { has_no_verifier(message) } {
            encoder.put(&xid.to_be_bytes()) && encoder.put(&PLAIN_REPLY)
        } else {
            // SAFETY: the stream is alive, the message complete.
            unsafe { (library()?.xdr_replymsg)(encoder.xdr(), message) != 0 }
        };
        if !put {
            return Ok(None);
        }
        let auth = own.auth();
        // SAFETY: set by _gss_authenticate before the request was dispatched.
        let wrap = unsafe { operation(auth, |ops| ops.svc_ah_wrap) };
        Ok(Some(Reply { own: own.this.clone(), late, id, xid, encoder, results, auth, wrap }))
    }

    /// Sends the reply once its results are encoded. Returns 1, or 0 if that fails.
    fn send(self) -> Result<bool_t, Error> {
        let Reply { own, late: _late, id, xid, encoder, results, .. } = self;
        let Some(own) = own.upgrade() else { return Ok(0) };
        let Some(responder) = own.responder.upgrade() else { return Ok(0) };
        stats::add(Counter::BytesCopied, encoder.copied());
        let message = encoder.finish()?;
        let loans = message.loans();
        let long = message.len() > config::INLINE;
        if own.long.load(Relaxed) != long {
            own.long.store(long, Relaxed);
        }
        let mut state = own.state();
        // A routine may still decode arguments after it has replied, but not after it has refused the call.
        let request = state.find(id).filter(|_| results.is_some());
        if let Some(arguments) = request.and_then(|request| request.arguments.as_mut()) {
            arguments.fetch();
        }
        // Unless the xdrproc has replied already.
        if !state.answer(id) {
            return Ok(0);
        }
        // While a request is open, the loop asks for more requests when its routine has returned.
        let put_off = state.open.is_empty();
        drop(state);
        if put_off && let Some(whole) = own.whole.as_ref().and_then(Weak::upgrade) {
            whole.answered_late.store(true, Relaxed);
        }
        log_debug!("fd {}: reply {}: {} bytes", own.fd, Xid(xid), message.len());
        let sent = responder.reply(id, message);
        responder.end(&loans);
        own.watch_progress();
        // In another thread, the routine may have returned while the reply waited for its peer.
        if put_off || !service_loop::PROGRAM.is_mine() && own.state().open.is_empty() {
            own.tell_loop();
        }
        match sent {
            Ok(()) => Ok(1),
            Err(error) => {
                log_warn!("fd {}: no reply: {error}", own.fd);
                Ok(0)
            }
        }
    }
}

/// Whether the verifier of a reply is the empty one of AUTH_NONE.
///
/// # Safety
/// `message` is an accepted reply, to be read.
unsafe fn has_no_verifier(message: *const rpc_msg) -> bool {
    // SAFETY: a message (contract).
    let direction = unsafe { (*message).rm_direction };
    let accepted = offset_of!(rpc_msg, ru) + offset_of!(reply_body, ru);
    // SAFETY: accepted, so this member of both unions is in force; union members start where the union does.
    let verifier = unsafe { (*message.wrapping_byte_add(accepted).cast::<accepted_reply>()).ar_verf };
    direction == msg::REPLY && (verifier.oa_flavor, verifier.oa_length) == (auth_stat::AUTH_NONE, 0)
}

/// Takes the results out of a successful reply and leaves empty ones in their place.
///
/// # Safety
/// `message` is a reply, to be read and written.
unsafe fn take_results(message: *mut rpc_msg) -> Option<ar_results> {
    unsafe extern "C-unwind" fn nothing(_: *mut XDR, _: *mut c_void) -> bool_t {
        guard(|| Ok(1))
    }
    // Union members start where the union does.
    let reply = message.wrapping_byte_add(offset_of!(rpc_msg, ru)).cast::<reply_body>();
    // SAFETY: a reply (contract).
    if unsafe { (*reply).rp_stat } != msg::MSG_ACCEPTED {
        return None;
    }
    let accepted = reply.wrapping_byte_add(offset_of!(reply_body, ru)).cast::<accepted_reply>();
    // SAFETY: accepted, so this member is in force.
    if unsafe { (*accepted).ar_stat } != msg::SUCCESS {
        return None;
    }
    let results = accepted.wrapping_byte_add(offset_of!(accepted_reply, ru)).cast::<ar_results>();
    let none = ar_results { r#where: null_mut::<c_char>(), r#proc: Some(nothing) };
    // SAFETY: successful, so this member is in force; writable (contract).
    Some(unsafe { results.replace(none) })
}

pub(super) unsafe extern "C-unwind" fn freeargs(
    xprt: *mut SVCXPRT,
    decode: XdrProc,
    args: *mut c_void,
) -> bool_t {
    guard_in_steps(|| {
        // SAFETY: libtirpc's loop and its transport.
        step(|| unsafe { transport(xprt) }.map(drop))?;
        // SAFETY: the program's procedure and the object that it decoded.
        Ok(unsafe { xdr::free(decode, args) })
    })
}
