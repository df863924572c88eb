//! The benchmark's program over libtirpc, both ends: all of the C interface of `rpcrdma perf`.
//!
//! ```text
//! 0 NULL                              3 STATUS: largest, nanoseconds of processor time, counters
//! 1 WRITE(seed, data) -> length       2 READ(seed, length) -> data
//! ```
//!
//! The functions called are those that a program which knows nothing of this library calls; netid "rdma" makes the
//! difference. Data comes from [`pattern`], from an offset on that `seed` gives, so that the leftovers of an earlier call
//! are not mistaken for it.
//!
//! # Invariants
//! - A server takes and gives at most [`Server::largest`] bytes in a call, in memory that it has from the beginning.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{IntoRawFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rpcrdma::tool::caller::Caller;
use rpcrdma::tool::rpc::{
    SVCXPRT, XDR, XdrProc, bool_t, counters, getnetconfigent, svc_req, svc_run, svc_tli_create,
};
use rustix::time::{ClockId, clock_gettime};

/// In the range that is not assigned (RFC 5531 §8.4).
pub const PROGRAM: u32 = 0x2000_5045;
const VERSION: u32 = 1;

const NULL: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;
const STATUS: u32 = 3;

/// The bytes that data of up to `largest` bytes is taken from, with any seed.
pub fn pattern(largest: usize) -> Box<[u8]> {
    (0..largest + OFFSETS * 8).map(|at| (at * 167 + (at >> 8) * 13 + (at >> 16) * 7) as u8).collect()
}

/// The data of a call.
pub fn data(pattern: &[u8], seed: u32, length: usize) -> &[u8] {
    let from = seed as usize % OFFSETS * 8;
    &pattern[from..from + length]
}

/// Whether data is what it has to be. Checks each byte, or one of each page and the last one.
pub fn is_right(pattern: &[u8], seed: u32, found: &[u8], each: bool) -> bool {
    let wanted = data(pattern, seed, found.len());
    if each || found.is_empty() {
        return found == wanted;
    }
    let last = found.len() - 1;
    (0..found.len()).step_by(PAGE).chain([last]).all(|at| found[at] == wanted[at])
}

const OFFSETS: usize = 31;
const PAGE: usize = 4096;

/// This bit of a seed tells the server to check each byte.
pub const EACH: u32 = 1 << 31;
/// The answer to a WRITE whose data is wrong.
const WRONG: u32 = u32::MAX;

/// Sets a variable for the library in this process, which reads it with its first call.
pub fn set_variable(name: &str, value: &str) {
    // SAFETY: the command has made no thread yet.
    unsafe { std::env::set_var(name, value) };
}

/// The processor time of this thread, in nanoseconds.
pub fn thread_time() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What a server says of itself.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Most bytes of a call.
    pub largest: u32,
    /// Processor time of its process so far, in nanoseconds.
    pub time: u64,
    /// Its library's counters, in the order of their names.
    pub counters: Vec<u64>,
}

/// The counters of this process's library.
pub fn own_counters() -> Vec<u64> {
    counters().to_vec()
}

/// A client of the server.
pub struct Client(Caller);

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// Why not, in libtirpc's words.
    pub fn connect(over: Netid, address: SocketAddr, program: u32) -> Result<Client, String> {
        let caller = Caller::at(address, "connecting", over.name(&address), program, VERSION);
        caller.map(Client).map_err(|error| error.text().to_owned())
    }

    /// What the connection runs on, if that is RDMA.
    pub fn device(&self) -> Option<String> {
        self.0.agreed().map(|agreed| agreed.text)
    }

    /// The connection's descriptor, for [`hang_up`].
    pub fn socket(&self) -> Option<RawFd> {
        self.0.fd()
    }

    /// A call without arguments and results.
    ///
    /// # Errors
    /// Why it has failed.
    pub fn null(&self) -> Result<(), String> {
        self.call(NULL, Some(xdr_nothing), null_mut(), Some(xdr_nothing), null_mut())
    }

    /// Sends data, which the server checks.
    ///
    /// # Errors
    /// Why it has failed, or that something else arrived.
    pub fn write(&self, seed: u32, data: &[u8]) -> Result<(), String> {
        let mut arguments =
            Data { seed, bytes: data.as_ptr().cast_mut().cast(), length: data.len() as u32, room: u32::MAX };
        let mut answer = 0u32;
        self.call(
            WRITE,
            Some(xdr_seeded),
            (&raw mut arguments).cast(),
            Some(xdr_word),
            (&raw mut answer).cast(),
        )?;
        match answer as usize {
            length if length == data.len() => Ok(()),
            _ if answer == WRONG => Err("the server has got other data than it was sent".into()),
            length => Err(format!("the server has got {length} bytes of {}", data.len())),
        }
    }

    /// Fetches data. The caller checks it.
    ///
    /// # Errors
    /// Why it has failed.
    pub fn read(&self, seed: u32, into: &mut [u8]) -> Result<(), String> {
        let wanted = into.len() as u32;
        let mut arguments = Wanted { seed, length: wanted };
        let mut data = Data { seed, bytes: into.as_mut_ptr().cast(), length: wanted, room: wanted };
        self.call(
            READ,
            Some(xdr_wanted),
            (&raw mut arguments).cast(),
            Some(xdr_data),
            (&raw mut data).cast(),
        )?;
        if data.length != wanted {
            return Err(format!("the server has given {} bytes of {wanted}", data.length));
        }
        Ok(())
    }

    /// Asks for the server's status.
    ///
    /// # Errors
    /// Why it has failed.
    pub fn status(&self) -> Result<Status, String> {
        let mut status = Numbers::default();
        self.call(STATUS, Some(xdr_nothing), null_mut(), Some(xdr_numbers), (&raw mut status).cast())?;
        let [largest, time, ref counters @ ..] = status.values[..] else {
            return Err("the server does not say how it is".into());
        };
        let largest =
            u32::try_from(largest).map_err(|_| "the server's largest call is no length".to_owned())?;
        Ok(Status { largest, time, counters: counters.to_vec() })
    }

    fn call(
        &self,
        procedure: u32,
        encode: XdrProc,
        arguments: *mut c_void,
        decode: XdrProc,
        results: *mut c_void,
    ) -> Result<(), String> {
        // SAFETY: each XDR procedure matches what it is given, as the callers above ensure.
        let done = unsafe { self.0.call(procedure, (encode, arguments), (decode, results), PATIENCE) };
        done.map_err(|failed| failed.text)
    }
}

/// Ends a connection, so that whoever waits for a reply there waits no longer. A connection of an adapter has no socket, and
/// is left alone.
pub fn hang_up(socket: RawFd) {
    // SAFETY: a number; if it names no socket, this is an error and does nothing.
    unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
}

/// How long a reply is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// What calls go over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Netid {
    /// Stock libtirpc.
    Tcp,
    /// This library.
    Rdma,
}

impl Netid {
    fn name(self, address: &SocketAddr) -> &'static str {
        match (self, address.is_ipv4()) {
            (Netid::Tcp, true) => "tcp",
            (Netid::Tcp, false) => "tcp6",
            (Netid::Rdma, true) => "rdma",
            (Netid::Rdma, false) => "rdma6",
        }
    }
}

/// What the server works with.
struct Server {
    /// Most bytes of a call.
    largest: u32,
    pattern: Box<[u8]>,
    /// Where written data is kept.
    room: Mutex<Box<[u8]>>,
}

static SERVER: OnceLock<Server> = OnceLock::new();

/// Serves on a listening socket, over whatever transport a client begins with there: the library must have been told to move
/// tcp (RPCRDMA_REDIRECT). Returns when the loop has ended, which it does not do by itself.
///
/// # Errors
/// Why not.
pub fn serve(listener: TcpListener, program: u32, largest: u32) -> Result<(), String> {
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    let server = Server {
        largest,
        pattern: pattern(largest as usize),
        room: Mutex::new(vec![0; largest as usize].into_boxed_slice()),
    };
    SERVER.set(server).map_err(|_| "it serves already".to_owned())?;
    let name = if address.is_ipv4() { c"tcp" } else { c"tcp6" };
    // SAFETY: a string. The entry is never given back: there is one.
    let netconfig = unsafe { getnetconfigent(name.as_ptr()) };
    if netconfig.is_null() {
        let why = std::io::Error::last_os_error();
        return Err(format!("netid {} is not to be had: {why}", name.to_string_lossy()));
    }
    // SAFETY: a socket that is given away, and a netconfig.
    let transport = unsafe { svc_tli_create(listener.into_raw_fd(), netconfig, null(), 0, 0) };
    if transport.is_null() {
        return Err("libtirpc makes no transport of the socket".into());
    }
    // SAFETY: a transport, a routine, and no netconfig: rpcbind is told nothing.
    let registered =
        unsafe { rpcrdma::tool::rpc::svc_reg(transport, program, VERSION, Some(dispatch), null()) };
    if registered == 0 {
        return Err(format!("program {program} cannot be registered in this process"));
    }
    // SAFETY: in the one thread that serves.
    unsafe { svc_run() };
    Ok(())
}

unsafe extern "C" fn dispatch(request: *mut svc_req, transport: *mut SVCXPRT) {
    let Some(server) = SERVER.get() else { return };
    // SAFETY: libtirpc gives a request.
    let procedure = unsafe { (*request).rq_proc };
    // SAFETY: and the transport that it came from.
    let answered = unsafe { answer(server, procedure, transport) };
    if answered.is_none() {
        // SAFETY: the same.
        unsafe { svcerr_decode(transport) };
    }
}

/// `None`: the arguments cannot be decoded.
///
/// # Safety
/// `transport` has a request of this procedure.
unsafe fn answer(server: &Server, procedure: u32, transport: *mut SVCXPRT) -> Option<()> {
    // SAFETY: by the contract.
    let operations = unsafe { (*transport).xp_ops };
    // SAFETY: a transport's operations are there as long as it is.
    let get = unsafe { (*operations).xp_getargs }?;
    let arguments = |procedure: XdrProc, place: *mut c_void| {
        // SAFETY: the procedure matches what lies at the place.
        (unsafe { get(transport, procedure, place) } != 0).then_some(())
    };
    let reply = |procedure: XdrProc, place: *mut c_void| {
        // SAFETY: as above. If it fails, the connection is at its end.
        unsafe { svc_sendreply(transport, procedure, place) };
    };
    match procedure {
        NULL => reply(Some(xdr_nothing), null_mut()),
        WRITE => {
            let mut room = server.room.lock().unwrap_or_else(PoisonError::into_inner);
            let mut data = Data { seed: 0, bytes: room.as_mut_ptr().cast(), length: 0, room: server.largest };
            arguments(Some(xdr_seeded), (&raw mut data).cast())?;
            let found = &room[..data.length as usize];
            let right = is_right(&server.pattern, data.seed & !EACH, found, data.seed & EACH != 0);
            let mut length = if right { data.length } else { WRONG };
            reply(Some(xdr_word), (&raw mut length).cast());
        }
        READ => {
            let mut wanted = Wanted { seed: 0, length: 0 };
            arguments(Some(xdr_wanted), (&raw mut wanted).cast())?;
            if wanted.length > server.largest {
                return None;
            }
            let found = data(&server.pattern, wanted.seed & !EACH, wanted.length as usize);
            let mut data = Data {
                seed: 0,
                bytes: found.as_ptr().cast_mut().cast(),
                length: wanted.length,
                room: wanted.length,
            };
            reply(Some(xdr_data), (&raw mut data).cast());
        }
        STATUS => {
            let mut values = vec![u64::from(server.largest), nanoseconds(ClockId::ProcessCPUTime)];
            values.extend(counters());
            let mut numbers = Numbers { values };
            reply(Some(xdr_numbers), (&raw mut numbers).cast());
        }
        // SAFETY: by the contract.
        _ => unsafe { svcerr_noproc(transport) },
    }
    Some(())
}

// ---- XDR ----------------------------------------------------------------------------------------------------------

/// Data; for a WRITE, with its seed.
struct Data {
    seed: u32,
    bytes: *mut c_char,
    length: c_uint,
    /// Most bytes that there is room for.
    room: c_uint,
}

/// The arguments of a READ.
struct Wanted {
    seed: u32,
    length: u32,
}

/// The results of STATUS: the largest call, the time, and as many counters as the server's library has.
#[derive(Default)]
struct Numbers {
    values: Vec<u64>,
}

const MOST_NUMBERS: u32 = 256;

unsafe extern "C-unwind" fn xdr_nothing(_: *mut XDR, _: *mut c_void) -> c_int {
    1
}

unsafe extern "C-unwind" fn xdr_word(xdrs: *mut XDR, word: *mut c_void) -> c_int {
    // SAFETY: whoever names this procedure gives a u32.
    unsafe { xdr_u_int(xdrs, word.cast()) }
}

unsafe extern "C-unwind" fn xdr_wanted(xdrs: *mut XDR, wanted: *mut c_void) -> c_int {
    // SAFETY: whoever names this procedure gives a Wanted.
    let wanted = unsafe { &mut *wanted.cast::<Wanted>() };
    // SAFETY: a u32.
    if unsafe { xdr_u_int(xdrs, &mut wanted.seed) } == 0 {
        return 0;
    }
    // SAFETY: as above.
    unsafe { xdr_u_int(xdrs, &mut wanted.length) }
}

unsafe extern "C-unwind" fn xdr_seeded(xdrs: *mut XDR, data: *mut c_void) -> c_int {
    // SAFETY: whoever names this procedure gives a Data.
    let seed = unsafe { &mut (*data.cast::<Data>()).seed };
    // SAFETY: a u32.
    if unsafe { xdr_u_int(xdrs, seed) } == 0 {
        return 0;
    }
    // SAFETY: as ours.
    unsafe { xdr_data(xdrs, data) }
}

unsafe extern "C-unwind" fn xdr_data(xdrs: *mut XDR, data: *mut c_void) -> c_int {
    // SAFETY: whoever names this procedure gives a Data, with room for as many bytes as it says, or as it has.
    let data = unsafe { &mut *data.cast::<Data>() };
    // SAFETY: the same.
    unsafe { xdr_bytes(xdrs, &mut data.bytes, &mut data.length, data.room) }
}

unsafe extern "C-unwind" fn xdr_numbers(xdrs: *mut XDR, numbers: *mut c_void) -> c_int {
    // SAFETY: whoever names this procedure gives Numbers.
    let numbers = unsafe { &mut *numbers.cast::<Numbers>() };
    let mut count = numbers.values.len() as u32;
    // SAFETY: a u32.
    if unsafe { xdr_u_int(xdrs, &mut count) } == 0 || count > MOST_NUMBERS {
        return 0;
    }
    numbers.values.resize(count as usize, 0);
    numbers.values.iter_mut().all(|value| {
        // SAFETY: a u64.
        unsafe { xdr_u_quad_t(xdrs, value) != 0 }
    }) as c_int
}

// ---- libtirpc -----------------------------------------------------------------------------------------------------

unsafe extern "C-unwind" {
    fn svc_sendreply(transport: *mut SVCXPRT, procedure: XdrProc, results: *mut c_void) -> bool_t;
    fn svcerr_decode(transport: *mut SVCXPRT);
    fn svcerr_noproc(transport: *mut SVCXPRT);
    fn xdr_u_int(xdrs: *mut XDR, word: *mut c_uint) -> bool_t;
    fn xdr_u_quad_t(xdrs: *mut XDR, number: *mut u64) -> bool_t;
    fn xdr_bytes(xdrs: *mut XDR, bytes: *mut *mut c_char, length: *mut c_uint, most: c_uint) -> bool_t;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_one_call_is_not_that_of_another() {
        let pattern = pattern(3 * PAGE);
        for length in [1, 7, PAGE, PAGE + 1, 3 * PAGE] {
            for seed in 0..40 {
                let mut found = data(&pattern, seed, length).to_vec();
                assert!(is_right(&pattern, seed, &found, false) && is_right(&pattern, seed, &found, true));
                assert!(!is_right(&pattern, seed + 1, &found, false), "seed {seed}, {length} bytes");
                found[length / 2] ^= 1;
                assert!(!is_right(&pattern, seed, &found, true));
            }
        }
        assert!(is_right(&pattern, 5, &[], false));
    }
}
