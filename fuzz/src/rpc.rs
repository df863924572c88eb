//! Headers of RPC messages with credentials of every flavour: as libtirpc's own functions read them from a stream of ours,
//! in pieces, and from one of libtirpc's; and as the engine reads them, without libtirpc.
//!
//! ```text
//! call or reply | seed of the pieces | an RPC message
//! ```

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use rpcrdma::binding::{Head, Registry};
use rpcrdma::fuzz::{Decoder, PLAIN_REPLY, Region, Regions, XDR, library, op, opaque_auth, rpc_msg};

use crate::input::pieces;

pub fn run(data: &[u8]) {
    let Some(([what, seed], message)) = data.split_first_chunk() else { return };
    if what & 1 == 0 { call(message, *seed) } else { reply(message, *seed) }
}

/// libtirpc's own function, looked up at run time. If linked, it would be AddressSanitizer's interceptor, which looks for
/// the original when the process starts and does not find it.
fn xdrmem_create() -> unsafe extern "C" fn(*mut XDR, *mut c_char, c_uint, c_int) {
    static FOUND: OnceLock<usize> = OnceLock::new();
    let found = *FOUND.get_or_init(|| {
        // SAFETY: two C strings; libtirpc may be loaded at any time.
        unsafe {
            libc::dlsym(libc::dlopen(c"libtirpc.so.3".as_ptr(), libc::RTLD_NOW), c"xdrmem_create".as_ptr())
        }
        .addr()
    });
    assert_ne!(found, 0, "libtirpc is not there");
    // SAFETY: that is its type.
    unsafe { std::mem::transmute(found) }
}

/// RFC 5531 §8.2.
const MAX: usize = 400;

/// Where libtirpc puts a credential and a verifier.
struct Room([[u64; MAX / 8]; 2]);

impl Room {
    fn new() -> Room {
        Room([[0; MAX / 8]; 2])
    }

    fn auth(&mut self, which: usize) -> opaque_auth {
        opaque_auth { oa_flavor: 0, oa_base: self.0[which].as_mut_ptr().cast(), oa_length: 0 }
    }
}

/// A credential or verifier that was decoded.
fn said(auth: opaque_auth) -> (i32, Vec<u8>) {
    assert!(auth.oa_length as usize <= MAX);
    // SAFETY: it was decoded into `Room`, which has that many bytes.
    (
        auth.oa_flavor,
        unsafe { std::slice::from_raw_parts(auth.oa_base.cast(), auth.oa_length as usize) }.to_vec(),
    )
}

fn empty() -> rpc_msg {
    // SAFETY: all zero is a valid message.
    unsafe { std::mem::zeroed() }
}

/// What `read` makes of the message in a stream of ours, in pieces, and in one of libtirpc's; and the position of each
/// afterwards.
fn both_ways<T: PartialEq + std::fmt::Debug>(
    message: &[u8],
    seed: u8,
    read: impl Fn(*mut XDR) -> Option<T>,
) -> Option<(T, usize)> {
    let sources = pieces(message, seed).into_iter().map(|piece| Region::copy_from(piece).expect("memory"));
    let mut decoder = Decoder::new(sources.collect::<Regions>());
    let ours = read(decoder.xdr()).map(|said| (said, decoder.position()));
    let mut copy = message.to_vec();
    let mut xdr = std::mem::MaybeUninit::<XDR>::zeroed();
    // SAFETY: `xdr` is a handle to be filled in; the bytes outlive it.
    unsafe { xdrmem_create()(xdr.as_mut_ptr(), copy.as_mut_ptr().cast(), copy.len() as c_uint, op::DECODE) };
    let xdr = xdr.as_mut_ptr();
    let theirs = read(xdr).map(|said| {
        // SAFETY: `xdrmem_create` has filled it in.
        (said, unsafe { ((*(*xdr).x_ops).getpostn)(xdr) } as usize)
    });
    assert_eq!(ours, theirs);
    ours
}

#[derive(Debug, PartialEq)]
struct Call {
    names: [u32; 4],
    credential: (i32, Vec<u8>),
    verifier: (i32, Vec<u8>),
}

fn call(message: &[u8], seed: u8) {
    let read = |xdr: *mut XDR| {
        let (mut room, mut message) = (Room::new(), empty());
        message.ru.rm_call.cb_cred = room.auth(0);
        message.ru.rm_call.cb_verf = room.auth(1);
        let library = library().expect("libtirpc");
        // SAFETY: the stream is alive, and the message set up as a server sets it up.
        if unsafe { (library.xdr_callmsg)(xdr, &mut message) } == 0 {
            return None;
        }
        // SAFETY: decoded as a call.
        let call = unsafe { message.ru.rm_call };
        Some(Call {
            names: [message.rm_xid, call.cb_prog, call.cb_vers, call.cb_proc],
            credential: said(call.cb_cred),
            verifier: said(call.cb_verf),
        })
    };
    let decoded = both_ways(message, seed, read);
    let head = Head::of(&pieces(message, seed));
    let Some((call, arguments)) = decoded else { return assert_eq!(head, None) };
    let head = head.expect("libtirpc knows it as a Call");
    let [_, program, version, procedure] = call.names;
    assert_eq!((head.program, head.version, head.procedure), (program, version, procedure));
    assert_eq!(head.arguments, arguments);
    let (flavor, body) = &call.credential;
    assert_eq!(Head::names(message), Some([program, version, procedure, *flavor as u32]));
    // RFC 2203 §5: only data with the service "none" is sent as it is.
    let plain = [0, 0, 0, 1, 0, 0, 0, 0];
    let service = body.get(12..16);
    assert_eq!(head.wrapped, *flavor == 6 && !(body.starts_with(&plain) && service == Some(&[0, 0, 0, 1])));
    let registry = Registry::built_in();
    let bound = registry.find(program, version, procedure).is_some();
    assert_eq!(registry.leaves_alone(Some(message)), !bound && *flavor != 6);
}

/// What a reply says before its results.
#[derive(Debug, PartialEq)]
struct Reply {
    xid: u32,
    accepted: bool,
    status: u32,
    verifier: Option<(i32, Vec<u8>)>,
    more: Option<[u32; 2]>,
}

fn reply(message: &[u8], seed: u8) {
    let read = |xdr: *mut XDR| {
        let (mut room, mut message) = (Room::new(), empty());
        message.ru.rm_reply.ru.rp_ar.ar_verf = room.auth(0);
        message.ru.rm_reply.ru.rp_ar.ru.ar_results.r#proc = Some(nothing);
        let library = library().expect("libtirpc");
        // SAFETY: the stream is alive, and the message set up as a client sets it up.
        if unsafe { (library.xdr_replymsg)(xdr, &mut message) } == 0 {
            return None;
        }
        // SAFETY: decoded as a reply.
        let reply = unsafe { message.ru.rm_reply };
        let accepted = reply.rp_stat == 0;
        Some(if accepted {
            // SAFETY: accepted.
            let reply = unsafe { reply.ru.rp_ar };
            // SAFETY: words, whatever they are.
            let versions = unsafe { reply.ru.ar_vers };
            let more = (reply.ar_stat == 2).then_some(versions);
            Reply {
                xid: message.rm_xid,
                accepted,
                status: reply.ar_stat,
                verifier: Some(said(reply.ar_verf)),
                more,
            }
        } else {
            // SAFETY: rejected.
            let reply = unsafe { reply.ru.rp_dr };
            // SAFETY: words, whatever they are.
            let versions = unsafe { reply.ru.rj_vers };
            let more = Some(if reply.rj_stat == 0 { versions } else { [versions[0], 0] });
            Reply { xid: message.rm_xid, accepted, status: reply.rj_stat, verifier: None, more }
        })
    };
    let decoded = both_ways(message, seed, read);
    // The bytes that nearly every reply begins with, and that replies are compared with, mean the same to libtirpc.
    if message.get(4..24) == Some(&PLAIN_REPLY[..]) {
        let (reply, position) = decoded.expect("a plain reply");
        assert_eq!((reply.accepted, reply.status, position), (true, 0, 24));
        assert_eq!(reply.verifier, Some((0, Vec::new())));
    }
}

unsafe extern "C-unwind" fn nothing(_: *mut XDR, _: *mut std::ffi::c_void) -> c_int {
    1
}
