//! One call: XID, header, AUTH and arguments; the exchange; reply, AUTH and results, or a refreshed AUTH and all of it again.
//!
//! The program's procedures run between the steps of a call, where nothing of ours is locked or borrowed but the call's stream.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use crate::binding::{Binding, Head};
use crate::config;
use crate::connection::RPC_HEADER_MAX;
use crate::driver::Caller;
use crate::error::{Error, Kind, clnt_stat};
use crate::ffi::{guard, step};
use crate::log_debug;
use crate::memory::{Loan, Message, Payload, Sink, registered};
use crate::signals::BlockedSignals;
use crate::stats::{self, Counter, Procedure};
use crate::tirpc::auth::{self, Held, Share};
use crate::tirpc::lending::{self, lending};
use crate::tirpc::{
    AUTH, PLAIN_REPLY, accepted_reply, accepted_reply_ru, ar_results, auth_ops, auth_stat, bool_t, library,
    msg, opaque_auth, reply_body, reply_body_ru, rpc_err, rpc_err_ru, rpc_msg, rpc_msg_ru,
};
use crate::wire::Xid;
use crate::xdr::{Decoder, Encoder, LEND_MIN, XDR, XdrProc, op};

use super::{Connected, Handle, duration, valid};

/// Time allowed for sending a call whose own timeout is zero, if the handle has none.
const SEND_TIMEOUT: Duration = Duration::from_secs(25);

/// How often a refused call is made again with a refreshed AUTH, as in libtirpc.
const REFRESHES: u32 = 2;

/// One call of a CLIENT, with the arguments of `clnt_call`.
pub(super) struct Call<'a> {
    pub(super) handle: &'a Handle,
    pub(super) auth: *mut AUTH,
    pub(super) proc: u32,
    pub(super) encode: XdrProc,
    pub(super) args: *mut c_void,
    pub(super) decode: XdrProc,
    pub(super) results: *mut c_void,
    pub(super) signals: &'a BlockedSignals,
}

/// What all attempts at a call have in common, and what they lead to.
struct Terms {
    program: (u32, u32),
    /// Nobody waits for a reply.
    one_way: bool,
    limit: Duration,
    max_reply: usize,
    /// How often the call may be made again with a refreshed AUTH.
    refreshes: u32,
    /// Deadline of a call that has to wait for a connection.
    until: Option<Instant>,
}

/// `ah_wrap` and `ah_unwrap`.
type Wrap = unsafe extern "C-unwind" fn(*mut AUTH, *mut XDR, XdrProc, *mut c_void) -> bool_t;

/// A Call before its arguments.
struct Begun {
    encoder: Encoder,
    xid: Xid,
    /// The credential is RPCSEC_GSS.
    gss: bool,
    binding: Option<Binding>,
    /// `None` when the AUTH could not be marshalled.
    wrap: Option<Wrap>,
    limit: Duration,
    held: Option<Held>,
}

/// A Call that is ready to go.
struct Encoded {
    message: Message,
    xid: Xid,
    gss: bool,
    limit: Duration,
    held: Option<Held>,
}

/// Finds where the program's own buffer for the first eligible result lies, by encoding the results.
struct Probe {
    encoder: Encoder,
    decode: unsafe extern "C-unwind" fn(*mut XDR, *mut c_void) -> c_int,
    /// The greatest length of that result.
    most: usize,
    /// The buffer need not be registered.
    preset: bool,
}

/// The outcome that the program finds for a call that was left by an exception of its own.
struct Thrown<'a> {
    handle: &'a Handle,
    status: c_uint,
}

impl Thrown<'_> {
    fn not(self) {
        std::mem::forget(self);
    }
}

impl Drop for Thrown<'_> {
    fn drop(&mut self) {
        self.handle.control().error = rpc_err::new(self.status, libc::EINVAL);
    }
}

/// Memory of the program that is in use until this is dropped, and no longer.
struct Loans<'a> {
    connection: &'a dyn Caller,
    loans: Vec<Loan>,
}

impl Drop for Loans<'_> {
    fn drop(&mut self) {
        if !self.loans.is_empty() {
            self.connection.end(&self.loans);
        }
    }
}

/// A reply before its results.
struct Received<'a> {
    decoder: Decoder,
    message: rpc_msg,
    /// It is an RPC reply.
    readable: bool,
    error: rpc_err,
    /// How its results are decoded.
    unwrap: Option<Wrap>,
    _loans: Loans<'a>,
    _held: Option<Held>,
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        if self.readable {
            let xdrs = self.decoder.xdr();
            // SAFETY: the stream is alive; the verifier belongs to the message.
            unsafe { free_verifier(xdrs, &mut self.message) };
        }
    }
}

/// How a call goes on.
enum Next {
    /// The arguments are encoded: memory for the results is to be found first.
    Probe,
    /// The final `clnt_stat`; it is recorded.
    Status(c_uint),
    /// The results are to be decoded.
    Results,
    /// The call is to be made again: the AUTH was refreshed, or there is a new connection.
    Again,
}

/// What a call has in use while the program's procedures run.
#[derive(Default)]
struct Parts<'a> {
    begun: Option<Begun>,
    encoded: Option<Encoded>,
    probe: Option<Probe>,
    received: Option<Received<'a>>,
}

impl<'a> Call<'a> {
    /// Whether the program decodes no results: it nearly always uses libtirpc's own procedure for that.
    fn has_no_results(&self) -> bool {
        let nothing = |decode| library().is_ok_and(|library| std::ptr::fn_addr_eq(decode, library.xdr_void));
        self.decode.is_none_or(nothing)
    }

    /// Makes the call. Returns its `clnt_stat`.
    ///
    /// # Errors
    /// `Invalid` without an AUTH, and whatever kept the call from being made or answered.
    ///
    /// # Safety
    /// As `clnt_call`: the AUTH is alive, and each procedure fits its object.
    pub(super) unsafe fn run(&self, timeout: libc::timeval) -> Result<c_uint, Error> {
        let mut parts = Parts::default();
        let mut terms = step(|| {
            let (terms, xid) = self.terms(&timeout)?;
            // SAFETY: by the contract.
            unsafe { self.begin(&terms, xid, &mut parts) }?;
            Ok(terms)
        })?;
        loop {
            let mut wrapped = false;
            if let Some(Begun { encoder, wrap: Some(wrap), .. }) = &mut parts.begun {
                let thrown = Thrown { handle: self.handle, status: clnt_stat::CANTENCODEARGS };
                // SAFETY: the procedure fits its object (contract); the stream outlives the call, and nothing of ours is
                // locked or borrowed but the stream.
                wrapped = unsafe { wrap(self.auth, encoder.xdr(), self.encode, self.args) } != 0;
                thrown.not();
            }
            // SAFETY: by the contract.
            let mut next = step(|| unsafe { self.finish(wrapped, &mut terms, &mut parts) })?;
            if let (Next::Probe, Some(probe)) = (&next, &mut parts.probe) {
                let thrown = Thrown { handle: self.handle, status: clnt_stat::CANTDECODERES };
                // SAFETY: results that can be decoded into are zeroed, or hold memory of the program's; the procedure fits them
                // (contract). Its return value does not matter: it is stopped at the item.
                unsafe { (probe.decode)(probe.encoder.xdr(), self.results) };
                thrown.not();
                // SAFETY: by the contract.
                next = step(|| unsafe { self.exchange(&mut terms, &mut parts) })?;
            }
            match next {
                Next::Status(status) => return Ok(status),
                Next::Results => break,
                // SAFETY: by the contract.
                Next::Again | Next::Probe => step(|| unsafe { self.begin(&terms, self.xid(), &mut parts) })?,
            }
        }
        let mut decoded = false;
        if let Some(Received { decoder, unwrap: Some(unwrap), .. }) = &mut parts.received {
            let thrown = Thrown { handle: self.handle, status: clnt_stat::CANTDECODERES };
            // SAFETY: the procedure fits its object (contract); the stream is alive, and nothing of ours is locked or
            // borrowed but the stream.
            decoded = unsafe { unwrap(self.auth, decoder.xdr(), self.decode, self.results) } != 0;
            thrown.not();
        }
        step(|| {
            if let Some(received) = parts.received.as_mut().filter(|_| !decoded) {
                received.error = rpc_err::new(clnt_stat::CANTDECODERES, libc::EINVAL);
            }
            Ok(self.conclude(&mut parts, None))
        })
    }

    /// What the program asks for, and the XID of the first attempt.
    fn terms(&self, timeout: &libc::timeval) -> Result<(Terms, Xid), Error> {
        let fresh = self.handle.connection.fresh_xid();
        let mut control = self.handle.control();
        // An internal failure must not leave the handle saying "Success".
        control.error = rpc_err::new(clnt_stat::FAILED, libc::ENOTRECOVERABLE);
        if self.auth.is_null() {
            return Err(Error::new(Kind::Invalid, "the CLIENT has no AUTH"));
        }
        let one_way = timeout.tv_sec == 0 && timeout.tv_usec == 0;
        if !control.fixed && valid(timeout) {
            control.timeout = *timeout;
        }
        let limit = match duration(&control.timeout) {
            // The call must still be sent: within the handle's time, or else this one.
            limit if one_way && limit.is_zero() => SEND_TIMEOUT,
            limit => limit,
        };
        let (program, max_reply) = ((control.program, control.version), control.max_reply);
        let terms = Terms { program, one_way, limit, max_reply, refreshes: REFRESHES, until: None };
        Ok((terms, control.next(fresh)))
    }

    /// The AUTH for the whole call, if the call needs it, and how long the wait took, which is part of the time of the call.
    ///
    /// # Safety
    /// The AUTH is alive.
    unsafe fn for_the_call(
        &self,
        until: Option<Instant>,
        limit: Duration,
    ) -> Result<(Option<Held>, Duration), Error> {
        // SAFETY: by the contract.
        if unsafe { auth::share(self.auth) } != Share::Call {
            return Ok((None, Duration::ZERO));
        }
        let start = Instant::now();
        let held = auth::lock(self.auth, until.unwrap_or(start + limit), self.signals.before())?;
        Ok((held, start.elapsed()))
    }

    /// The AUTH for a step that only reads or writes it.
    ///
    /// # Safety
    /// The AUTH is alive.
    unsafe fn for_a_step(&self) -> Option<Held> {
        // SAFETY: by the contract.
        match unsafe { auth::share(self.auth) } {
            Share::Steps => auth::step(self.auth),
            Share::Nothing | Share::Call => None,
        }
    }

    /// # Safety
    /// The AUTH is alive.
    unsafe fn ops(&self) -> &auth_ops {
        // SAFETY: by the contract.
        let ops = unsafe { (*self.auth).ah_ops };
        // SAFETY: libtirpc's static operations.
        unsafe { &*ops }
    }

    /// The XID of another attempt.
    fn xid(&self) -> Xid {
        let fresh = self.handle.connection.fresh_xid();
        self.handle.control().next(fresh)
    }

    /// # Safety
    /// As [`Call::run`]; `exchange` ends the loans of the message.
    unsafe fn begin(&self, terms: &Terms, xid: Xid, parts: &mut Parts<'a>) -> Result<(), Error> {
        // SAFETY: by the contract.
        let (held, waited) = unsafe { self.for_the_call(terms.until, terms.limit) }?;
        let limit = terms.limit.saturating_sub(waited);
        let config = config::get()?;
        // Memory that the peer may read before the Call is sent is only for an AUTH that does not change the Call afterwards.
        // SAFETY: by the contract.
        let shows =
            !terms.one_way && self.handle.is_long() && unsafe { auth::share(self.auth) } != Share::Call;
        let outbox = if shows { self.handle.connection.outbox() } else { None };
        let mut encoder = Encoder::new(match outbox {
            Some(outbox) => outbox,
            None => self.handle.connection.message()?,
        });
        let program = terms.program;
        let head = [xid.0, msg::CALL, msg::RPC_MSG_VERSION, program.0, program.1, self.proc];
        let mut bytes = [0u8; 24];
        for (place, word) in bytes.chunks_exact_mut(4).zip(head) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        let put = encoder.put(&bytes);
        // SAFETY: by the contract.
        let ops = unsafe { self.ops() };
        // SAFETY: as above.
        let for_a_step = unsafe { self.for_a_step() };
        // SAFETY: as above; the stream outlives the call.
        let marshalled = put && unsafe { ops.ah_marshal.is_some_and(|f| f(self.auth, encoder.xdr()) != 0) };
        // SAFETY: as above. An RPCSEC_GSS AUTH shows its flavor only now.
        let gss = unsafe { (*self.auth).ah_cred.oa_flavor } == auth_stat::RPCSEC_GSS;
        drop(for_a_step);
        let wrapped = gss && Head::of(&[encoder.encoded()]).is_none_or(|head| head.wrapped);
        let binding = config::bindings().find(program.0, program.1, self.proc).filter(|_| !wrapped);
        // Nobody waits until a one-way call is sent, so all of it is copied.
        if !terms.one_way
            && !wrapped
            && let Some(lending) = lending(config, binding.as_ref(), LEND_MIN, |b, call| b.call(call).items)
        {
            // SAFETY: the arguments are the program's until `clnt_call` returns, and the loans end before that.
            unsafe { encoder.lend(lending) };
        }
        let wrap = ops.ah_wrap.filter(|_| marshalled);
        parts.begun = Some(Begun { encoder, xid, gss, binding, wrap, limit, held });
        Ok(())
    }

    /// Goes on after the program has encoded its arguments.
    ///
    /// # Safety
    /// As [`Call::run`].
    unsafe fn finish(&self, wrapped: bool, terms: &mut Terms, parts: &mut Parts<'a>) -> Result<Next, Error> {
        let Some(begun) = parts.begun.take() else { return Ok(Next::Again) };
        let Begun { encoder, xid, gss, binding, limit, held, .. } = begun;
        stats::add(Counter::BytesCopied, encoder.copied());
        let message = encoder.finish()?;
        if !wrapped {
            return Err(Error::new(Kind::Encode, "the arguments could not be encoded"));
        }
        parts.probe = match &binding {
            Some(binding) if !terms.one_way => self.probe(binding, &message)?,
            _ => None,
        };
        parts.encoded = Some(Encoded { message, xid, gss, limit, held });
        if parts.probe.is_some() {
            return Ok(Next::Probe);
        }
        // SAFETY: by the contract.
        unsafe { self.exchange(terms, parts) }
    }

    /// A stream with which to find the program's memory for the first eligible result, if there may be some: a non-empty opaque
    /// that the program has put into its results. The results' procedure shows it by encoding them.
    fn probe(&self, binding: &Binding, call: &Message) -> Result<Option<Probe>, Error> {
        let Some(decode) = self.decode.filter(|_| !self.results.is_null()) else { return Ok(None) };
        let most = binding.call(&[call.body()]).results.first().copied().unwrap_or(0);
        let preset = binding.preset();
        if most < self.handle.connection.place_min() || !(preset || registered::any()) {
            return Ok(None);
        }
        let mut encoder = Encoder::new(self.handle.connection.message()?);
        let put = encoder.put(&[&[0; 4], &PLAIN_REPLY[..]].concat());
        // SAFETY: nothing is sent from there: only the address is used.
        unsafe { encoder.lend(lending::probe(binding, LEND_MIN, |b, reply| b.reply(reply).items)) };
        Ok(put.then_some(Probe { encoder, decode, most, preset }))
    }

    /// Sends the Call, and waits for the reply.
    ///
    /// # Safety
    /// As [`Call::run`]; the results' procedure has encoded to the probe.
    unsafe fn exchange(&self, terms: &mut Terms, parts: &mut Parts<'a>) -> Result<Next, Error> {
        let Some(encoded) = parts.encoded.take() else { return Ok(Next::Again) };
        let Encoded { message, xid, gss, limit, held } = encoded;
        // SAFETY: by the contract.
        let place = parts.probe.take().and_then(|probe| unsafe { probe.found(&message) });
        let places: Vec<Sink> = place.into_iter().collect();
        let mut loans = message.loans();
        loans.extend(places.iter().map(Sink::loan));
        let connection: &'a dyn Caller = &*self.handle.connection;
        let loans = Loans { connection, loans };
        if terms.one_way {
            let deadline = Instant::now() + limit;
            connection.call_one_way(xid, message, deadline, Some(self.signals.before()))?;
            let status = if self.decode.is_none() { clnt_stat::SUCCESS } else { clnt_stat::TIMEDOUT };
            let mut control = self.handle.control();
            control.error = rpc_err::new(status, 0);
            control.explanation = None;
            return Ok(Next::Status(status));
        }
        // RFC 5531 §12.1: procedure 0 has no results, by convention. RPCSEC_GSS puts results of its own into replies to it.
        let header = connection.reply_header();
        let empty = self.proc == 0 && !gss && self.has_no_results();
        let room = if empty { RPC_HEADER_MAX } else { terms.max_reply + header };
        // The clock is read once, for the deadline and for the histogram.
        let began = stats::clock();
        let deadline = terms.until.unwrap_or_else(|| stats::instant(began) + limit);
        let (program, version) = terms.program;
        let histogram = Procedure::new(program, version, self.proc, false).histogram(|| true);
        let fd = connection.fd();
        let length = message.len();
        self.handle.tell_length(length);
        log_debug!(
            "fd {fd}: call {xid}: program {program} version {version} procedure {}, {length} bytes",
            self.proc
        );
        let mask = Some(self.signals.before());
        let reply = match connection.call(xid, message, room, places, deadline, mask) {
            Err(error) if error.kind() == Kind::NotSent => {
                drop((loans, held));
                // A server that closes one connection after another is asked for one new connection only.
                let enough = terms.until.is_some() && matches!(self.handle.connection, Connected::Forward(_));
                if enough || !connection.await_reconnect(deadline, mask)? {
                    return Err(error);
                }
                log_debug!("call {xid} was not sent, and is made again: {error}");
                terms.until = Some(deadline);
                return Ok(Next::Again);
            }
            reply => reply?,
        };
        if let Some(histogram) = histogram {
            histogram.took_since(began);
        }
        log_debug!("fd {fd}: reply {xid}: {} bytes", reply.bytes());
        // SAFETY: by the contract.
        let next = unsafe { self.receive((reply, gss), terms, (loans, held), parts) };
        if let Next::Again = next {
            log_debug!("call {xid} is made again with a refreshed AUTH");
        }
        Ok(next)
    }

    /// Decodes the reply up to its results, and keeps what is in use until they are decoded.
    ///
    /// # Safety
    /// As [`Call::run`].
    unsafe fn receive(
        &self,
        (reply, gss): (Payload, bool),
        terms: &mut Terms,
        (_loans, _held): (Loans<'a>, Option<Held>),
        parts: &mut Parts<'a>,
    ) -> Next {
        let (decoder, message) = (Decoder::new(reply), empty_reply());
        let error = rpc_err::new(clnt_stat::CANTDECODERES, libc::EINVAL);
        let readable = false;
        let received = parts.received.insert(Received {
            decoder,
            message,
            readable,
            error,
            unwrap: None,
            _loans,
            _held,
        });
        // Nearly every reply is accepted, without a verifier, and successful. The message is set up as one of these.
        let xid = &mut received.message.rm_xid;
        received.readable = received.decoder.take_if(|header: &[u8; 24]| {
            let (first, rest) = header.split_at(4);
            *xid = first.try_into().map_or(0, u32::from_be_bytes);
            *rest == PLAIN_REPLY
        });
        if received.readable {
            received.error.re_status = clnt_stat::SUCCESS;
        } else {
            let library = match library() {
                Ok(library) => library,
                Err(error) => return Next::Status(self.conclude(parts, Some(error.text().to_owned()))),
            };
            let xdrs = received.decoder.xdr();
            // SAFETY: the stream outlives the call, and the message is set up as a decoder expects it.
            received.readable = unsafe { (library.xdr_replymsg)(xdrs, &mut received.message) } != 0;
            if !received.readable {
                let explanation = Some("the reply is not an RPC reply".to_owned());
                return Next::Status(self.conclude(parts, explanation));
            }
            // SAFETY: the message was decoded; `error` is writable.
            unsafe { (library._seterr_reply)(&mut received.message, &mut received.error) };
        }
        // SAFETY: by the contract.
        let ops = unsafe { self.ops() };
        if received.error.re_status == clnt_stat::SUCCESS {
            // SAFETY: accepted, so this member of both unions is in force.
            let verifier = unsafe { &raw mut received.message.ru.rm_reply.ru.rp_ar.ar_verf };
            // SAFETY: the AUTH is alive (contract).
            let held = unsafe { self.for_a_step() };
            // SAFETY: as above; the verifier is decoded.
            let valid = unsafe { ops.ah_validate.is_some_and(|f| f(self.auth, verifier) != 0) };
            drop(held);
            if valid {
                received.unwrap = ops.ah_unwrap;
                return Next::Results;
            }
            received.error.re_status = clnt_stat::AUTHERROR;
            received.error.ru = rpc_err_ru { re_why: auth_stat::AUTH_INVALIDRESP };
        } else if !gss && terms.refreshes > 0 {
            terms.refreshes -= 1;
            // SAFETY: the AUTH is alive (contract).
            let held = unsafe { self.for_a_step() };
            let message = (&raw mut received.message).cast();
            // SAFETY: as above; the message is libtirpc's `struct rpc_msg`.
            let refreshed = ops.ah_refresh.is_some_and(|f| unsafe { f(self.auth, message) } != 0);
            drop(held);
            if refreshed {
                parts.received = None;
                return Next::Again;
            }
        }
        Next::Status(self.conclude(parts, None))
    }

    /// Records the outcome, and ends what was in use for the call.
    fn conclude(&self, parts: &mut Parts<'_>, explanation: Option<String>) -> c_uint {
        let Some(received) = &parts.received else { return clnt_stat::FAILED };
        stats::add(Counter::BytesCopied, received.decoder.copied());
        let error = received.error;
        let mut control = self.handle.control();
        control.error = error;
        control.explanation = explanation;
        drop(control);
        parts.received = None;
        error.re_status
    }
}

impl Probe {
    /// Memory of the program for the eligible result.
    ///
    /// # Safety
    /// The results may be written until `clnt_call` returns, and the loan of the place ends before that.
    unsafe fn found(self, call: &Message) -> Option<Sink> {
        let most = self.most;
        let own = |at: &(*const u8, usize)| self.preset || registered::cover(at.0.addr(), most);
        // A program may pass one buffer for both arguments and results. Then results are copied: no memory is read and written at
        // the same time.
        let apart = |at: &(*const u8, usize)| !call.lends_of(at.0.addr(), most);
        let place = self.encoder.first_lent().filter(|(_, len)| *len >= most).filter(own).filter(apart);
        // SAFETY: by the contract.
        place.map(|(at, _)| unsafe { Sink::lend(at.cast_mut(), most) })
    }
}

/// A reply to decode into: no memory of its own for the verifier, and no results.
fn empty_reply() -> rpc_msg {
    unsafe extern "C-unwind" fn nothing(_: *mut XDR, _: *mut c_void) -> bool_t {
        guard(|| Ok(1))
    }
    // libtirpc's `_null_auth`.
    let ar_verf = opaque_auth { oa_flavor: 0, oa_base: null_mut(), oa_length: 0 };
    let results = ar_results { r#where: null_mut(), r#proc: Some(nothing) };
    let accepted = accepted_reply { ar_verf, ar_stat: 0, ru: accepted_reply_ru { ar_results: results } };
    let reply = reply_body { rp_stat: 0, ru: reply_body_ru { rp_ar: accepted } };
    rpc_msg { rm_xid: 0, rm_direction: msg::REPLY, ru: rpc_msg_ru { rm_reply: reply } }
}

/// # Safety
/// `reply` was decoded by `xdr_replymsg`; `xdrs` is alive.
unsafe fn free_verifier(xdrs: *mut XDR, reply: &mut rpc_msg) {
    // SAFETY: every decoded reply has this member.
    if unsafe { reply.ru.rm_reply.rp_stat } != msg::MSG_ACCEPTED {
        return;
    }
    // SAFETY: every decoded reply has this member.
    let body = unsafe { &mut reply.ru.rm_reply };
    // SAFETY: accepted, so this member is in force.
    let accepted = unsafe { &mut body.ru.rp_ar };
    let verifier = &mut accepted.ar_verf;
    if verifier.oa_base.is_null() {
        return;
    }
    // libtirpc is there: it has decoded the verifier.
    let Ok(library) = library() else { return };
    // SAFETY: the stream is alive (contract).
    unsafe { (*xdrs).x_op = op::FREE };
    // SAFETY: the verifier's memory came from decoding.
    unsafe { (library.xdr_opaque_auth)(xdrs, verifier) };
}
