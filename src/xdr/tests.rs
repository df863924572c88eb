//! The streams compared with those of libtirpc: the same bytes, positions and refusals.

use std::sync::Arc;

use smallvec::smallvec;

use super::*;
use crate::ffi::last_error;
use crate::memory::Pool;
use crate::memory::shared::{Own, Theirs};
use crate::wire::{Handle, Segment};

// The real procedures, and the stream of libtirpc that ours are compared with. A module above declares some
// of them with structures of its own.
#[allow(clashing_extern_declarations)]
#[link(name = "tirpc")]
unsafe extern "C" {
    fn xdrmem_create(xdrs: *mut XDR, addr: *mut c_char, size: c_uint, op: c_int);
    fn xdr_u_int(xdrs: *mut XDR, value: *mut c_uint) -> c_int;
    fn xdr_long(xdrs: *mut XDR, value: *mut c_long) -> c_int;
    fn xdr_hyper(xdrs: *mut XDR, value: *mut i64) -> c_int;
    fn xdr_double(xdrs: *mut XDR, value: *mut f64) -> c_int;
    fn xdr_bytes(xdrs: *mut XDR, data: *mut *mut c_char, len: *mut c_uint, max: c_uint) -> c_int;
    fn xdr_string(xdrs: *mut XDR, data: *mut *mut c_char, max: c_uint) -> c_int;
    fn xdr_opaque(xdrs: *mut XDR, data: *mut c_char, len: c_uint) -> c_int;
    fn xdr_array(
        xdrs: *mut XDR,
        data: *mut *mut c_char,
        len: *mut c_uint,
        max: c_uint,
        size: c_uint,
        proc: XdrProc,
    ) -> c_int;
    fn xdr_callmsg(xdrs: *mut XDR, msg: *mut RpcMsg) -> c_int;
    fn xdr_callhdr(xdrs: *mut XDR, msg: *mut RpcMsg) -> c_int;
    fn xdr_replymsg(xdrs: *mut XDR, msg: *mut RpcMsg) -> c_int;
}

#[repr(C)]
#[derive(Clone, Copy)]
struct OpaqueAuth {
    flavor: c_int,
    base: *mut c_char,
    length: c_uint,
}

/// `struct rpc_msg` with its call, or its accepted reply.
#[repr(C)]
struct RpcMsg {
    xid: u32,
    direction: c_int,
    body: Body,
}

#[repr(C)]
union Body {
    call: Call,
    reply: Reply,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Call {
    rpcvers: u32,
    prog: u32,
    vers: u32,
    proc: u32,
    cred: OpaqueAuth,
    verf: OpaqueAuth,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Reply {
    stat: c_int,
    verf: OpaqueAuth,
    accept_stat: c_int,
    r#where: *mut c_void,
    proc: XdrProc,
}

const _: () = assert!(size_of::<RpcMsg>() == 72 && size_of::<Reply>() == 56);

fn auth(flavor: c_int, body: &mut [u8]) -> OpaqueAuth {
    OpaqueAuth { flavor, base: body.as_mut_ptr().cast(), length: body.len() as c_uint }
}

fn call_message(cred: OpaqueAuth, verf: OpaqueAuth) -> RpcMsg {
    let call = Call { rpcvers: 2, prog: 0x2000_0001, vers: 3, proc: 7, cred, verf };
    RpcMsg { xid: 0x1234_5678, direction: 0, body: Body { call } }
}

#[test]
fn a_stream_is_made_in_the_memory_of_the_one_that_has_ended_before_it() {
    let encoder = || Encoder::new(Buf::with_capacity(STEP).unwrap());
    let (first, mut second) = (encoder(), encoder());
    let (one, two) = (first.stream, second.stream);
    assert_ne!(one, two);
    assert!(second.put(b"word"));
    drop(first);
    let third = encoder();
    assert_eq!(third.stream, one);
    // Nothing is left there of the stream before.
    assert_eq!((third.position(), third.copied()), (0, 0));
    assert_eq!(second.finish().unwrap().body(), b"word");
    assert_eq!(encoder().stream, two);
    let decoder = || Decoder::new(smallvec![Region::copy_from(b"word").unwrap()]);
    let at = decoder().stream;
    assert_eq!(decoder().stream, at);
}

/// One object with every kind of item.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sample {
    int: c_uint,
    long: c_long,
    hyper: i64,
    double: f64,
    bytes: *mut c_char,
    bytes_len: c_uint,
    string: *mut c_char,
    array: *mut c_char,
    array_len: c_uint,
    opaque: [u8; 7],
}

impl Sample {
    const EMPTY: Sample = Sample {
        int: 0,
        long: 0,
        hyper: 0,
        double: 0.0,
        bytes: ptr::null_mut(),
        bytes_len: 0,
        string: ptr::null_mut(),
        array: ptr::null_mut(),
        array_len: 0,
        opaque: [0; 7],
    };

    /// Calls `f` with a sample whose pointers lead to live data.
    fn with<T>(f: impl FnOnce(&mut Sample) -> T) -> T {
        let mut bytes = *b"\x01\x02\x03\x04\x05\x06\x07\x08\x09";
        let mut string = *b"a string of 22 letters\0";
        let mut array = [1u32, 0x8000_0000, u32::MAX, 4, 5];
        f(&mut Sample {
            int: 0xfedc_ba98,
            long: -1,
            hyper: -0x0123_4567_89ab_cdef,
            double: 1.5e300,
            bytes: bytes.as_mut_ptr().cast(),
            bytes_len: 9,
            string: string.as_mut_ptr().cast(),
            array: array.as_mut_ptr().cast(),
            array_len: 5,
            opaque: *b"OPAQUE!",
        })
    }

    /// Whether `self`, which was decoded, is the sample of `with`.
    fn check(&self) {
        assert_eq!((self.int, self.long), (0xfedc_ba98, 0xffff_ffff));
        assert_eq!((self.hyper, self.double), (-0x0123_4567_89ab_cdef, 1.5e300));
        assert_eq!((self.bytes_len, self.array_len, &self.opaque), (9, 5, b"OPAQUE!"));
        // SAFETY: xdr_bytes has decoded 9 bytes.
        let bytes = unsafe { std::slice::from_raw_parts(self.bytes.cast::<u8>(), 9) };
        assert_eq!(bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08\x09");
        // SAFETY: xdr_string ends what it decodes with NUL.
        let string = unsafe { std::ffi::CStr::from_ptr(self.string) };
        assert_eq!(string, c"a string of 22 letters");
        // SAFETY: xdr_array has decoded 5 words.
        let array = unsafe { std::slice::from_raw_parts(self.array.cast::<u32>(), 5) };
        assert_eq!(array, [1, 0x8000_0000, u32::MAX, 4, 5]);
    }
}

unsafe extern "C-unwind" fn word(xdrs: *mut XDR, object: *mut c_void) -> c_int {
    // SAFETY: called by xdr_array with a word.
    unsafe { xdr_u_int(xdrs, object.cast()) }
}

/// As rpcgen would write it.
unsafe extern "C-unwind" fn sample(xdrs: *mut XDR, object: *mut c_void) -> c_int {
    // SAFETY: the tests pass a Sample.
    let s = unsafe { &mut *object.cast::<Sample>() };
    let steps: [&mut dyn FnMut() -> c_int; 8] = [
        // SAFETY: a live stream, and an object of the procedure's type; the same holds below.
        &mut || unsafe { xdr_u_int(xdrs, &mut s.int) },
        // SAFETY: as above.
        &mut || unsafe { xdr_long(xdrs, &mut s.long) },
        // SAFETY: as above.
        &mut || unsafe { xdr_hyper(xdrs, &mut s.hyper) },
        // SAFETY: as above.
        &mut || unsafe { xdr_double(xdrs, &mut s.double) },
        // SAFETY: as above.
        &mut || unsafe { xdr_bytes(xdrs, &mut s.bytes, &mut s.bytes_len, 100) },
        // SAFETY: as above.
        &mut || unsafe { xdr_string(xdrs, &mut s.string, 100) },
        // SAFETY: as above.
        &mut || unsafe { xdr_array(xdrs, &mut s.array, &mut s.array_len, 100, 4, Some(word)) },
        // SAFETY: as above.
        &mut || unsafe { xdr_opaque(xdrs, s.opaque.as_mut_ptr().cast(), 7) },
    ];
    steps.into_iter().all(|step| step() == TRUE).into()
}

/// Runs `f` over libtirpc's own memory stream, and returns what it encoded.
fn on_xdrmem(f: impl FnOnce(*mut XDR)) -> Vec<u8> {
    let mut memory = vec![0xaau64; 256];
    let mut xdr = std::mem::MaybeUninit::<XDR>::zeroed();
    let xdrs = xdr.as_mut_ptr();
    // SAFETY: `xdrs` has the size of an XDR, `memory` has 2048 bytes; both outlive the stream.
    unsafe { xdrmem_create(xdrs, memory.as_mut_ptr().cast(), 2048, op::ENCODE) };
    f(xdrs);
    let len = getpos(xdrs) as usize;
    memory.iter().flat_map(|word| word.to_ne_bytes()).take(len).collect()
}

fn on_encoder(f: impl FnOnce(*mut XDR)) -> Vec<u8> {
    let mut encoder = encoder();
    f(encoder.xdr());
    encoder.finish().unwrap().into_body().to_vec()
}

fn encoder() -> Encoder {
    Encoder::new(Buf::with_capacity(STEP).unwrap())
}

fn decoder(pieces: &[&[u8]]) -> Decoder {
    Decoder::new(pieces.iter().map(|piece| Region::copy_from(piece).unwrap()).collect::<Regions>())
}

fn ops(xdrs: *mut XDR) -> &'static XdrOps {
    // SAFETY: a live handle.
    let ops = unsafe { (*xdrs).x_ops };
    // SAFETY: the operations of all streams are static.
    unsafe { &*ops }
}

fn putlong(xdrs: *mut XDR, value: c_long) -> bool {
    // SAFETY: a live handle and a live long.
    unsafe { (ops(xdrs).putlong)(xdrs, &value) == TRUE }
}

fn getlong(xdrs: *mut XDR) -> Option<c_long> {
    let mut value = -7;
    // SAFETY: a live handle and a live long.
    let there = unsafe { (ops(xdrs).getlong)(xdrs, &mut value) };
    (there == TRUE).then_some(value)
}

fn putbytes(xdrs: *mut XDR, bytes: &[u8]) -> bool {
    // SAFETY: a live handle and live bytes.
    unsafe { (ops(xdrs).putbytes)(xdrs, bytes.as_ptr().cast(), bytes.len() as c_uint) == TRUE }
}

fn getbytes(xdrs: *mut XDR, n: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0x55; n];
    // SAFETY: a live handle and `n` writable bytes.
    let there = unsafe { (ops(xdrs).getbytes)(xdrs, bytes.as_mut_ptr().cast(), n as c_uint) };
    (there == TRUE).then_some(bytes)
}

fn getpos(xdrs: *mut XDR) -> c_uint {
    // SAFETY: a live handle.
    unsafe { (ops(xdrs).getpostn)(xdrs) }
}

fn setpos(xdrs: *mut XDR, position: c_uint) -> bool {
    // SAFETY: a live handle.
    unsafe { (ops(xdrs).setpostn)(xdrs, position) == TRUE }
}

/// XDR_INLINE; the bytes are usable until the next operation. NULL because of a panic does not pass.
fn inline<'a>(xdrs: *mut XDR, n: usize) -> Option<&'a mut [u8]> {
    // SAFETY: a live handle.
    let at = unsafe { (ops(xdrs).inline)(xdrs, n as c_uint) };
    assert!(last_error().is_none());
    // SAFETY: what this test is about: NULL or `n` bytes, which no reference of the stream covers.
    (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(at.cast(), n) })
}

fn xorshift(seed: &mut u64) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 8) as usize
}

#[test]
fn the_real_procedures_encode_the_same_bytes_as_on_xdrmem() {
    let run = |xdrs: *mut XDR| {
        // SAFETY: a live stream and a Sample.
        Sample::with(|s| assert_eq!(unsafe { sample(xdrs, ptr::from_mut(s).cast()) }, TRUE));
    };
    assert_eq!(on_encoder(run), on_xdrmem(run));
    assert_eq!(on_encoder(run).len(), 4 + 4 + 8 + 8 + 16 + 28 + 24 + 8);
}

#[test]
fn call_and_reply_headers_are_encoded_as_on_xdrmem() {
    let calls = |xdrs: *mut XDR| {
        let (mut cred, mut verf) = ([7u8; 37], [9u8; 5]);
        let mut msg = call_message(auth(1, &mut cred), auth(2, &mut verf));
        // SAFETY: a live stream and a call. This one uses XDR_INLINE.
        assert_eq!(unsafe { xdr_callmsg(xdrs, &mut msg) }, TRUE);
        // SAFETY: as above.
        assert_eq!(unsafe { xdr_callhdr(xdrs, &mut msg) }, TRUE);
    };
    assert_eq!(on_encoder(calls), on_xdrmem(calls));
    assert_eq!(on_encoder(calls).len(), 40 + 40 + 8 + 20);
    let reply = |xdrs: *mut XDR| {
        Sample::with(|s| {
            let mut verf = [3u8; 11];
            let reply = Reply {
                stat: 0,
                verf: auth(6, &mut verf),
                accept_stat: 0,
                r#where: ptr::from_mut(s).cast(),
                proc: Some(sample),
            };
            let mut msg = RpcMsg { xid: 1, direction: 1, body: Body { reply } };
            // SAFETY: a live stream and an accepted reply whose procedure fits its object.
            assert_eq!(unsafe { xdr_replymsg(xdrs, &mut msg) }, TRUE);
        });
    };
    assert_eq!(on_encoder(reply), on_xdrmem(reply));
}

#[test]
fn an_object_decodes_over_every_split() {
    let message = on_encoder(|xdrs| {
        // SAFETY: a live stream and a Sample.
        Sample::with(|s| assert_eq!(unsafe { sample(xdrs, ptr::from_mut(s).cast()) }, TRUE));
    });
    let decode = |pieces: &[&[u8]]| {
        let mut decoder = decoder(pieces);
        let mut object = Sample::EMPTY;
        // SAFETY: a live stream and an empty Sample.
        assert_eq!(unsafe { sample(decoder.xdr(), (&raw mut object).cast()) }, TRUE);
        object.check();
        assert_eq!((decoder.position(), decoder.remaining()), (message.len(), 0));
        // SAFETY: decoded by this very procedure.
        unsafe { free(Some(sample), (&raw mut object).cast()) };
        assert!(object.bytes.is_null() && object.string.is_null() && object.array.is_null());
    };
    for split in 0..=message.len() {
        let (head, tail) = message.split_at(split);
        decode(&[head, tail]);
        let (middle, end) = tail.split_at(tail.len().min(1 + split % 6));
        decode(&[head, middle, b"", end]);
    }
    decode(&message.chunks(1).collect::<Vec<_>>());
}

#[test]
fn a_call_header_decodes_over_every_split() {
    let (mut cred, mut verf) = ([7u8; 36], [9u8; 8]);
    let message = on_encoder(|xdrs| {
        let mut msg = call_message(auth(1, &mut cred), auth(2, &mut verf));
        // SAFETY: a live stream and a call.
        assert_eq!(unsafe { xdr_callmsg(xdrs, &mut msg) }, TRUE);
    });
    for split in 0..=message.len() {
        let (head, tail) = message.split_at(split);
        let mut decoder = decoder(&[head, tail]);
        let (mut cred, mut verf) = ([0u8; 400], [0u8; 400]);
        let mut msg = call_message(auth(0, &mut cred), auth(0, &mut verf));
        msg.xid = 0;
        // SAFETY: a live stream and a message with 400 bytes for each body, as libtirpc's own loop gives.
        assert_eq!(unsafe { xdr_callmsg(decoder.xdr(), &mut msg) }, TRUE);
        // SAFETY: a call was decoded; a union of plain data.
        let call = unsafe { msg.body.call };
        assert_eq!((msg.xid, call.prog, call.vers, call.proc), (0x1234_5678, 0x2000_0001, 3, 7));
        assert_eq!((call.cred.flavor, call.cred.length, &cred[..36]), (1, 36, &[7; 36][..]));
        assert_eq!((call.verf.flavor, call.verf.length, &verf[..8]), (2, 8, &[9; 8][..]));
        assert_eq!(decoder.remaining(), 0);
    }
}

#[test]
fn a_message_cut_at_any_length_is_refused() {
    let message = on_encoder(|xdrs| {
        // SAFETY: a live stream and a Sample.
        Sample::with(|s| assert_eq!(unsafe { sample(xdrs, ptr::from_mut(s).cast()) }, TRUE));
    });
    for len in 0..message.len() {
        let (head, tail) = message[..len].split_at(len / 2);
        let mut decoder = decoder(&[head, tail]);
        let mut object = Sample::EMPTY;
        // SAFETY: a live stream and an empty Sample.
        assert_eq!(unsafe { sample(decoder.xdr(), (&raw mut object).cast()) }, FALSE);
        let xdrs = decoder.xdr();
        // SAFETY: a live handle.
        unsafe { (*xdrs).x_op = op::FREE };
        // SAFETY: half decoded by this very procedure.
        assert_eq!(unsafe { sample(xdrs, (&raw mut object).cast()) }, TRUE);
    }
}

#[test]
fn a_body_is_rewritten_in_place_as_gss_privacy_does_it() {
    // authgss: marshal signs bytes 0 .. GETPOS.
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    for word in 0..10 {
        assert!(putlong(xdrs, word));
    }
    let signed = getpos(xdrs);
    assert!(setpos(xdrs, 0));
    assert_eq!(inline(xdrs, signed as usize).unwrap()[36..], [0, 0, 0, 9]);
    assert_eq!(getpos(xdrs), signed);
    // xdr_rpc_gss_wrap_data: leaves room for a length, encodes, reads the body back, writes another.
    let start = getpos(xdrs);
    assert!(setpos(xdrs, start + 4));
    let body: Vec<u8> = (0..100_001u32).map(|i| (i % 251) as u8).collect();
    assert!(putlong(xdrs, 42) && putbytes(xdrs, &body) && putbytes(xdrs, &[0; 3]));
    let end = getpos(xdrs);
    assert!(setpos(xdrs, start + 4));
    let clear = inline(xdrs, (end - start - 4) as usize).unwrap().to_vec();
    assert_eq!((&clear[..4], &clear[4..100_005]), (&[0, 0, 0, 42][..], &body[..]));
    let sealed: Vec<u8> = clear.iter().map(|byte| byte ^ 0xff).chain([1, 2, 3, 4]).collect();
    assert!(setpos(xdrs, start) && putlong(xdrs, sealed.len() as c_long) && putbytes(xdrs, &sealed));
    let message = encoder.finish().unwrap().into_body();
    assert_eq!(message.len(), start as usize + 4 + sealed.len());
    assert_eq!(message[start as usize + 4..], sealed);
}

#[test]
fn a_message_ends_where_the_stream_stands() {
    let message = on_encoder(|xdrs| {
        assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && putlong(xdrs, 3));
        assert!(setpos(xdrs, 4) && putlong(xdrs, 9));
    });
    assert_eq!(message, [0, 0, 0, 1, 0, 0, 0, 9]);
    let message = on_encoder(|xdrs| {
        assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && putlong(xdrs, 3));
        assert!(setpos(xdrs, 4) && putlong(xdrs, 9) && setpos(xdrs, 12));
    });
    assert_eq!(message, [0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 3]);
}

#[test]
fn memory_of_an_earlier_message_does_not_show_in_bytes_left_out() {
    let pool = Pool::new(STEP, STEP, 1);
    let mut earlier = pool.take().unwrap();
    earlier.extend(&[0xee; STEP]).unwrap();
    drop(earlier);
    let mut encoder = Encoder::new(pool.take().unwrap());
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && setpos(xdrs, 4));
    assert_eq!(inline(xdrs, 12).unwrap(), [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(encoder.finish().unwrap().into_body()[4..], [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn growing_over_16_mib_keeps_every_byte() {
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    let mut word = 0u32;
    while encoder.position() < 17 << 20 {
        assert!(putlong(xdrs, c_long::from(word)));
        let piece: Vec<u8> = (1..=64).flat_map(|i| (word + i).to_be_bytes()).collect();
        assert!(putbytes(xdrs, &piece));
        inline(xdrs, 4).unwrap().copy_from_slice(&(word + 65).to_be_bytes());
        word += 66;
    }
    let copied = encoder.copied();
    let message = encoder.finish().unwrap().into_body();
    assert_eq!(copied, u64::from(word / 66 * 256));
    for (i, bytes) in message.chunks(4).enumerate() {
        assert_eq!(bytes, (i as u32).to_be_bytes());
    }
}

/// An encoder that lends items of at least 10 bytes.
fn lending(which: impl Fn(&[u8], *const u8, usize) -> bool + Send + 'static) -> Encoder {
    let mut encoder = encoder();
    // SAFETY: the tests keep what they put until the message is gone.
    unsafe { encoder.lend(Lending { at_least: 10, which: Box::new(which), stop: false }) };
    encoder
}

#[test]
fn an_item_that_is_lent_stays_where_it_lies_and_leaves_a_hole_of_its_size() {
    let (short, long) = ([1u8; 9], vec![2u8; 5000]);
    let mut encoder = lending(|so_far, _, n| so_far.len() == 16 && n == 5000);
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 7) && putbytes(xdrs, &short) && putbytes(xdrs, &[0; 3]));
    assert!(putbytes(xdrs, &long) && putlong(xdrs, 8));
    assert_eq!((encoder.position(), encoder.copied()), (5020, 12));
    assert_eq!(encoder.first_lent(), Some((long.as_ptr(), 5000)));
    let message = encoder.finish().unwrap();
    assert_eq!(message.lent().collect::<Vec<_>>(), [(16, 5000)]);
    let pieces = message.freeze().gather(0..5020);
    assert_eq!(pieces.iter().map(|p| p.len()).collect::<Vec<_>>(), [16, 5000, 4]);
    assert_eq!(pieces[1].as_ptr(), long.as_ptr());
    assert_eq!((&pieces[0][..5], &pieces[2][..]), (&[0, 0, 0, 7, 1][..], &[0, 0, 0, 8][..]));
}

#[test]
fn an_item_is_copied_after_all_when_something_is_put_over_it_or_the_message_ends_inside() {
    let long = vec![2u8; 5000];
    let put = |then: &dyn Fn(*mut XDR)| {
        let mut encoder = lending(|_, _, _| true);
        let xdrs = encoder.xdr();
        assert!(putlong(xdrs, 7) && putbytes(xdrs, &long) && putbytes(xdrs, &long));
        then(xdrs);
        let copied = encoder.copied();
        let message = encoder.finish().unwrap();
        (copied, message.lent().count(), message.into_body().to_vec())
    };
    let end = |xdrs: *mut XDR| assert!(setpos(xdrs, 10_004));
    let (copied, lent, bytes) = put(&|xdrs| {
        assert!(setpos(xdrs, 5002) && putlong(xdrs, 9));
        end(xdrs);
    });
    assert_eq!((copied, lent), (10_000, 0));
    assert_eq!(bytes[5000..5008], [2, 2, 0, 0, 0, 9, 2, 2]);
    let (copied, lent, bytes) = put(&|xdrs| {
        assert!(setpos(xdrs, 8));
        assert_eq!(inline(xdrs, 8).unwrap(), [2; 8]);
        end(xdrs);
    });
    assert_eq!((copied, lent, bytes[4], bytes[10_003]), (5000, 1, 2, 2));
    let (_, lent, bytes) = put(&|xdrs| assert!(setpos(xdrs, 3000)));
    assert_eq!((lent, bytes.len(), bytes[2999]), (0, 3000, 2));
    let (copied, lent, _) = put(&|xdrs| {
        assert!(setpos(xdrs, 0) && putlong(xdrs, 9));
        end(xdrs);
    });
    assert_eq!((copied, lent), (0, 2));
}

#[test]
fn a_probe_stops_at_the_first_item_that_it_looks_for() {
    let long = vec![2u8; 5000];
    let mut encoder = encoder();
    let which = Box::new(|so_far: &[u8], _: *const u8, _: usize| so_far.len() == 104);
    // SAFETY: nothing is sent.
    unsafe { encoder.lend(Lending { at_least: 10, which, stop: true }) };
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 7) && putbytes(xdrs, &long[..100]) && !putbytes(xdrs, &long[7..3000]));
    assert_eq!(encoder.first_lent(), Some((long[7..].as_ptr(), 2993)));
}

#[test]
fn a_result_that_lies_in_its_place_is_not_copied() {
    let words: Vec<u8> = (0..24).collect();
    let region = Region::copy_from(&words).unwrap();
    let place = region[8..20].as_ptr().cast_mut();
    let mut decoder = Decoder::new(smallvec![region.slice(0, 8), region.slice(8, 12), region.slice(20, 4)]);
    let xdrs = decoder.xdr();
    assert!(getbytes(xdrs, 8).is_some());
    // SAFETY: not written, which is what the test is about: the bytes are there.
    assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, place.cast(), 12) }, TRUE);
    assert_eq!((decoder.copied(), decoder.position()), (8, 20));
    assert_eq!(getbytes(xdrs, 4).unwrap(), words[20..]);
}

#[test]
fn an_encoder_may_move_between_operations() {
    let mut encoders: Vec<Encoder> = (0..3).map(|_| encoder()).collect();
    let handles: Vec<*mut XDR> = encoders.iter_mut().map(Encoder::xdr).collect();
    encoders.reverse();
    let encoders = std::thread::spawn(move || encoders).join().unwrap();
    for (i, xdrs) in handles.into_iter().enumerate() {
        assert!(putlong(xdrs, i as c_long));
    }
    let last: Vec<u8> = encoders.into_iter().map(|e| e.finish().unwrap().into_body()[3]).collect();
    assert_eq!(last, [2, 1, 0]);
}

#[test]
fn a_put_over_the_limit_fails_and_the_error_names_it() {
    let mut encoder = encoder();
    encoder.set_limit(10);
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 1) && putbytes(xdrs, &[5; 6]) && getpos(xdrs) == 10);
    assert!(!putbytes(xdrs, &[5]));
    assert!(!putlong(xdrs, 1));
    assert_eq!((getpos(xdrs), encoder.copied()), (10, 6));
    // A put that fits afterwards does not mend the message.
    assert!(setpos(xdrs, 0) && putlong(xdrs, 1));
    let error = encoder.finish().map(Message::into_body).unwrap_err();
    assert_eq!(
        (error.kind(), error.text()),
        (Kind::TooLong, "the message is longer than its limit of 10 bytes")
    );
}

#[test]
fn a_limit_below_the_position_stops_every_put() {
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    assert!(putbytes(xdrs, &[1; 100]));
    encoder.set_limit(50);
    assert!(!putlong(xdrs, 1) && inline(xdrs, 0).is_none());
    assert!(setpos(xdrs, 48) && !putlong(xdrs, 1));
    assert!(setpos(xdrs, 46) && putlong(xdrs, 1));
    assert_eq!(encoder.finish().map(Message::into_body).unwrap_err().kind(), Kind::TooLong);
}

#[test]
fn a_position_that_cannot_be_set_leaves_the_stream_where_it_was() {
    let mut encoder = encoder();
    encoder.set_limit(10);
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 1) && putlong(xdrs, 2) && setpos(xdrs, 4));
    // Over the limit by a little, and farther than anybody skips.
    for position in [11, 5000] {
        assert!(!setpos(xdrs, position));
        assert_eq!(getpos(xdrs), 4);
    }
    assert!(putlong(xdrs, 3));
    assert_eq!(encoder.encoded(), [0, 0, 0, 1, 0, 0, 0, 3]);
}

#[test]
fn an_inline_over_the_limit_is_no_failure_by_itself() {
    let mut encoder = encoder();
    encoder.set_limit(8);
    let xdrs = encoder.xdr();
    assert!(inline(xdrs, 12).is_none() && putlong(xdrs, 1));
    assert_eq!(encoder.finish().unwrap().into_body()[..], [0, 0, 0, 1]);
}

#[test]
fn encoding_inline_gives_no_misaligned_words() {
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    assert!(putbytes(xdrs, b"abc") && inline(xdrs, 4).is_none() && getpos(xdrs) == 3);
    assert!(putbytes(xdrs, b"d") && inline(xdrs, 4).is_some() && getpos(xdrs) == 8);
}

#[test]
fn a_message_of_no_bytes_has_none() {
    for pieces in [&[][..], &[&[][..]], &[&[][..], &[]]] {
        let mut decoder = decoder(pieces);
        let xdrs = decoder.xdr();
        assert!(getlong(xdrs).is_none() && inline(xdrs, 4).is_none() && getbytes(xdrs, 0).is_some());
        assert!(setpos(xdrs, 0) && !setpos(xdrs, 1) && getpos(xdrs) == 0);
    }
    assert!(encoder().finish().unwrap().into_body().is_empty());
}

#[test]
fn positions_and_lengths_up_to_the_last_u32_do_not_overflow() {
    const MAX: c_uint = u32::MAX;
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 1) && putlong(xdrs, 2));
    for n in [MAX, MAX - 1, MAX - 4096, MAX - 4095, MAX - 7] {
        // SAFETY: the length is refused before a byte is read.
        assert_eq!(unsafe { (ops(xdrs).putbytes)(xdrs, c"".as_ptr(), n) }, FALSE);
        assert!(inline(xdrs, n as usize).is_none());
        assert!(!setpos(xdrs, n));
    }
    assert!(!setpos(xdrs, 8 + 4097) && setpos(xdrs, 8));
    encoder.set_limit(usize::MAX);
    assert_eq!(encoder.finish().map(Message::into_body).unwrap_err().kind(), Kind::TooLong);

    let mut decoder = decoder(&[&[0; 4], &[0; 4]]);
    let xdrs = decoder.xdr();
    assert_eq!(getlong(xdrs), Some(0));
    let mut byte: c_char = 7;
    for n in [MAX, MAX - 1, MAX - 3, 5] {
        // SAFETY: the length is refused before a byte is written.
        assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, &mut byte, n) }, FALSE);
        assert!(inline(xdrs, n as usize).is_none());
        assert!(!setpos(xdrs, n + 4 * u32::from(n == 5)));
    }
    assert_eq!((byte, getpos(xdrs), decoder.remaining()), (7, 4, 4));
    assert!(setpos(xdrs, 8) && getlong(xdrs).is_none() && getpos(xdrs) == 8);
}

#[test]
fn longs_use_their_low_32_bits_and_come_back_extended_by_zero() {
    for (long, word) in [(-1, u32::MAX), (0xffff_ffff, u32::MAX), (0x1_0000_0001, 1), (c_long::MIN, 0)] {
        let message = on_encoder(|xdrs| assert!(putlong(xdrs, long)));
        assert_eq!(message, word.to_be_bytes());
        assert_eq!(getlong(decoder(&[&message]).xdr()), Some(c_long::from(word)));
    }
}

#[test]
fn null_for_data_is_refused_unless_it_is_empty() {
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    // SAFETY: no byte is read from NULL.
    assert_eq!(unsafe { (ops(xdrs).putbytes)(xdrs, ptr::null(), 0) }, TRUE);
    // SAFETY: what the test is about.
    assert_eq!(unsafe { (ops(xdrs).putbytes)(xdrs, ptr::null(), 1) }, FALSE);
    assert_eq!(encoder.finish().map(Message::into_body).unwrap_err().kind(), Kind::Encode);
    let mut decoder = decoder(&[&[1; 8]]);
    let xdrs = decoder.xdr();
    // SAFETY: no byte is written to NULL.
    assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, ptr::null_mut(), 0) }, TRUE);
    // SAFETY: what the test is about.
    assert_eq!(unsafe { (ops(xdrs).getbytes)(xdrs, ptr::null_mut(), 1) }, FALSE);
    assert_eq!((decoder.position(), decoder.copied()), (0, 0));
}

#[test]
fn decoding_inline_gives_whole_aligned_ranges_of_one_source() {
    let words: Vec<u8> = (0..24).collect();
    let region = Region::copy_from(&words).unwrap();
    let sources = [(0, 8), (9, 8), (16, 8)].map(|(at, len)| region.slice(at, len));
    let mut decoder = Decoder::new(sources.into_iter().collect::<Regions>());
    let xdrs = decoder.xdr();
    assert!(inline(xdrs, 12).is_none(), "over the end of a source");
    assert_eq!(inline(xdrs, 8).unwrap(), &words[..8]);
    assert!(inline(xdrs, 4).is_none(), "not aligned");
    assert_eq!(getbytes(xdrs, 8).unwrap(), words[9..17]);
    assert_eq!(inline(xdrs, 8).unwrap(), &words[16..]);
    assert!(inline(xdrs, 4).is_none(), "over the end");
    assert_eq!(decoder.copied(), 8);
}

#[test]
fn streams_refuse_the_operations_of_the_other_direction_and_outlive_a_destroy() {
    let mut encoder = encoder();
    let xdrs = encoder.xdr();
    assert!(putlong(xdrs, 5) && setpos(xdrs, 0));
    assert!(getlong(xdrs).is_none() && getbytes(xdrs, 4).is_none());
    assert!(ops(xdrs).control.is_none());
    // SAFETY: a live handle.
    unsafe { ops(xdrs).destroy.unwrap()(xdrs) };
    assert!(putlong(xdrs, 6));
    assert_eq!(encoder.finish().unwrap().into_body()[..], [0, 0, 0, 6]);
    let mut decoder = decoder(&[&[0, 0, 0, 6]]);
    let xdrs = decoder.xdr();
    assert!(!putlong(xdrs, 5) && !putbytes(xdrs, b"abcd"));
    // SAFETY: a live handle.
    unsafe { ops(xdrs).destroy.unwrap()(xdrs) };
    assert_eq!(getlong(xdrs), Some(6));
}

#[test]
fn freeing_runs_the_procedure_on_a_stream_that_refuses_everything() {
    unsafe extern "C-unwind" fn curious(xdrs: *mut XDR, object: *mut c_void) -> c_int {
        // SAFETY: a live handle.
        assert_eq!(unsafe { (*xdrs).x_op }, op::FREE);
        assert!(!putlong(xdrs, 1) && getlong(xdrs).is_none() && inline(xdrs, 0).is_none());
        assert!(!putbytes(xdrs, b"a") && getbytes(xdrs, 1).is_none());
        assert!(getpos(xdrs) == 0 && !setpos(xdrs, 0));
        // SAFETY: the test passes a counter.
        unsafe { *object.cast::<u32>() += 1 };
        TRUE
    }
    let mut calls = 0u32;
    // SAFETY: the procedure fits the object.
    unsafe { free(Some(curious), (&raw mut calls).cast()) };
    // SAFETY: NULL is allowed.
    unsafe { free(None, ptr::null_mut()) };
    assert_eq!(calls, 1);
}

#[test]
fn random_operations_behave_as_on_a_plain_vector() {
    for seed in 1..=60u64 {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut encoder = encoder();
        let xdrs = encoder.xdr();
        let (mut model, mut at) = (Vec::<u8>::new(), 0);
        let put = |model: &mut Vec<u8>, at: &mut usize, bytes: &[u8]| {
            model.resize(model.len().max(*at + bytes.len()), 0);
            model[*at..*at + bytes.len()].copy_from_slice(bytes);
            *at += bytes.len();
        };
        for _ in 0..300 {
            let n = xorshift(&mut random) % 700;
            let bytes: Vec<u8> = (0..n).map(|_| xorshift(&mut random) as u8).collect();
            match xorshift(&mut random) % 6 {
                0 => {
                    assert!(putlong(xdrs, n as c_long));
                    put(&mut model, &mut at, &(n as u32).to_be_bytes());
                }
                1 | 2 => {
                    assert!(putbytes(xdrs, &bytes));
                    put(&mut model, &mut at, &bytes);
                }
                3 => match inline(xdrs, n) {
                    Some(there) => {
                        let known = (model.len() - at).min(n);
                        assert_eq!(there[..known], model[at..at + known]);
                        assert!(there[known..].iter().all(|&byte| byte == 0));
                        there.copy_from_slice(&bytes);
                        put(&mut model, &mut at, &bytes);
                    }
                    None => assert_ne!(at % 4, 0),
                },
                4 => {
                    at = xorshift(&mut random) % (model.len() + 9);
                    assert!(setpos(xdrs, at as c_uint));
                    model.resize(model.len().max(at), 0);
                }
                _ => {
                    assert!(setpos(xdrs, model.len() as c_uint));
                    at = model.len();
                }
            }
            assert_eq!(getpos(xdrs) as usize, at);
        }
        assert!(setpos(xdrs, model.len() as c_uint));
        assert_eq!(encoder.finish().unwrap().into_body()[..], model);

        let mut rest = &model[..];
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((xorshift(&mut random) % 3000).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        let mut decoder = decoder(&pieces);
        let xdrs = decoder.xdr();
        let mut at = 0;
        for _ in 0..300 {
            let n = xorshift(&mut random) % 700;
            match xorshift(&mut random) % 4 {
                0 => {
                    let word = model[at..].first_chunk().map(|b| c_long::from(u32::from_be_bytes(*b)));
                    assert_eq!(getlong(xdrs), word);
                    at += word.map_or(0, |_| 4);
                }
                1 => {
                    let there = model.get(at..at + n).map(<[u8]>::to_vec);
                    assert_eq!(getbytes(xdrs, n), there);
                    at += there.map_or(0, |_| n);
                }
                2 => {
                    if let Some(there) = inline(xdrs, n) {
                        assert_eq!(there, &model[at..at + n]);
                        at += n;
                    }
                }
                _ => {
                    let to = xorshift(&mut random) % (model.len() + 9);
                    assert_eq!(setpos(xdrs, to as c_uint), to <= model.len());
                    at = if to <= model.len() { to } else { at };
                }
            }
            assert_eq!((getpos(xdrs) as usize, decoder.remaining()), (at, model.len() - at));
        }
    }
}

/// Bytes in the outbox of a peer, which are in our hands too.
fn shown(bytes: &[u8]) -> (Region, Shown) {
    let (own, file) = Own::new().unwrap();
    let (own, theirs) = (Arc::new(own), Arc::new(Theirs::new(&file).unwrap()));
    let mut buf = Buf::outbox(&own).unwrap();
    buf.extend(bytes).unwrap();
    let region = buf.freeze();
    let offset = own.show(region.as_ptr().addr(), 7).unwrap();
    let segment = Segment { handle: Handle(7), length: bytes.len() as u32, offset };
    (region, Shown::of(&own, &theirs, segment).unwrap())
}

#[test]
fn what_a_peer_shows_is_decoded_as_if_it_were_here_and_each_byte_is_taken_once() {
    let mut random = 0x1234_5678_9abc_def1;
    for _ in 0..200 {
        let head = xorshift(&mut random) % 3 * 1001;
        let whole: Vec<u8> =
            (0..head + 1 + xorshift(&mut random) % 200_000).map(|at| (at % 251) as u8).collect();
        let (theirs, rest) = shown(&whole[head..]);
        let pieces = whole[..head].chunks(700).map(|piece| Region::copy_from(piece).unwrap()).collect();
        let mut decoder = Decoder::new(Payload { pieces, rest: Some(Box::new(rest)) });
        let mut at = 0;
        for _ in 0..60 {
            let n = [4, 3, 400, 20_000, 100_000][xorshift(&mut random) % 5].min(1 + whole.len() - at);
            let xdrs = decoder.xdr();
            match xorshift(&mut random) % 6 {
                0 => {
                    let long = whole
                        .get(at..at + 4)
                        .map(|word| c_long::from(u32::from_be_bytes(word.try_into().unwrap())));
                    assert_eq!(getlong(xdrs), long);
                    at += if long.is_some() { 4 } else { 0 };
                }
                1 | 2 => {
                    let bytes = whole.get(at..at + n);
                    assert_eq!(getbytes(xdrs, n).as_deref(), bytes);
                    at += bytes.map_or(0, <[u8]>::len);
                }
                3 => {
                    if let Some(words) = inline(xdrs, n) {
                        assert_eq!(words, &whole[at..at + n]);
                        at += n;
                    }
                }
                4 => {
                    let to = at + xorshift(&mut random) % (whole.len() + 2 - at);
                    assert_eq!(setpos(xdrs, to as c_uint), to <= whole.len());
                    at = if to <= whole.len() { to } else { at };
                }
                _ => {
                    let to = at - [1, 4, 1000].map(|n| n.min(at))[xorshift(&mut random) % 3];
                    if setpos(xdrs, to as c_uint) {
                        at = to;
                    } else {
                        assert!(at > head, "what is here can be gone back to");
                    }
                }
            }
            assert_eq!((getpos(decoder.xdr()) as usize, decoder.remaining()), (at, whole.len() - at));
            // From now on the peer has something else there.
            let taken = decoder.state().end.saturating_sub(head);
            // SAFETY: that many bytes are the region's, of a mapping that we may write; no slice of it exists.
            unsafe { ptr::write_bytes(theirs.as_ptr().cast_mut(), 0xfe, taken) };
        }
    }
}

#[test]
fn a_stream_ends_where_its_peer_has_taken_the_rest_back() {
    for n in [4, 10_000] {
        let bytes: Vec<u8> = (0..WINDOW + 20_000).map(|at| (at % 251) as u8).collect();
        let (theirs, rest) = shown(&bytes);
        let mut decoder = Decoder::new(Payload {
            pieces: smallvec![Region::copy_from(b"head").unwrap()],
            rest: Some(Box::new(rest)),
        });
        assert_eq!(getlong(decoder.xdr()), Some(0x6865_6164));
        assert_eq!(getbytes(decoder.xdr(), 5).unwrap(), bytes[..5]);
        drop(theirs);
        // One window has been taken already.
        assert_eq!(getbytes(decoder.xdr(), WINDOW - 5).unwrap(), bytes[5..WINDOW]);
        assert_eq!((getbytes(decoder.xdr(), n), decoder.remaining()), (None, 0));
        assert!(getlong(decoder.xdr()).is_none() && inline(decoder.xdr(), 4).is_none());
        assert!(setpos(decoder.xdr(), 4 + WINDOW as c_uint) && !setpos(decoder.xdr(), 5 + WINDOW as c_uint));
    }
}

#[test]
fn what_a_peer_shows_is_gone_back_to_within_a_window_and_is_passed_over_untaken() {
    let bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    let (_theirs, rest) = shown(&bytes);
    let mut decoder = Decoder::new(Payload {
        pieces: smallvec![Region::copy_from(b"head").unwrap()],
        rest: Some(Box::new(rest)),
    });
    assert!(setpos(decoder.xdr(), 2) && setpos(decoder.xdr(), 0) && setpos(decoder.xdr(), 4));
    assert_eq!(getbytes(decoder.xdr(), 100).unwrap(), bytes[..100]);
    assert!(setpos(decoder.xdr(), 4) && !setpos(decoder.xdr(), 3));
    assert_eq!(getbytes(decoder.xdr(), 10).unwrap(), bytes[..10]);
    assert!(setpos(decoder.xdr(), 50_004));
    assert_eq!(getbytes(decoder.xdr(), AT_ONCE).unwrap(), bytes[50_000..50_000 + AT_ONCE]);
    assert!(!setpos(decoder.xdr(), 50_004), "it went to where it belongs");
    assert_eq!(getbytes(decoder.xdr(), 4).unwrap(), bytes[50_000 + AT_ONCE..][..4]);
    assert_eq!(decoder.copied(), 100 + 10 + AT_ONCE as u64 + 4);
}

/// Found by fuzzing: the window was taken for it, and the head was out of reach.
#[test]
fn an_inline_that_gets_nothing_takes_nothing_of_what_a_peer_shows() {
    for n in [0, WINDOW + 1, 40_000] {
        let bytes: Vec<u8> = (0..30_000).map(|at| (at % 251) as u8).collect();
        let (theirs, rest) = shown(&bytes);
        let pieces = smallvec![Region::copy_from(b"head").unwrap()];
        let mut decoder = Decoder::new(Payload { pieces, rest: Some(Box::new(rest)) });
        assert_eq!(getlong(decoder.xdr()), Some(0x6865_6164));
        assert!(inline(decoder.xdr(), n).is_none_or(|words| words.is_empty()));
        assert!(setpos(decoder.xdr(), 0) && getlong(decoder.xdr()) == Some(0x6865_6164));
        assert_eq!(inline(decoder.xdr(), WINDOW).unwrap(), &bytes[..WINDOW]);
        assert!(inline(decoder.xdr(), WINDOW).is_none());
        drop(theirs);
        assert!(setpos(decoder.xdr(), 4) && inline(decoder.xdr(), WINDOW).is_some());
    }
}

#[test]
fn what_a_peer_shows_is_fetched_before_it_goes() {
    let bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    for before in [0, 2, 4, 10, 30_000, 100_004] {
        let (theirs, rest) = shown(&bytes);
        let pieces = smallvec![Region::copy_from(b"head").unwrap()];
        let mut decoder = Decoder::new(Payload { pieces, rest: Some(Box::new(rest)) });
        let whole = [b"head", &bytes[..]].concat();
        assert_eq!(getbytes(decoder.xdr(), before).unwrap(), whole[..before]);
        decoder.fetch();
        drop(theirs);
        assert_eq!((getpos(decoder.xdr()) as usize, decoder.remaining()), (before, whole.len() - before));
        let left = whole.len() - before;
        assert_eq!(getbytes(decoder.xdr(), left).unwrap(), whole[before..]);
        assert!(getlong(decoder.xdr()).is_none());
        assert!(
            setpos(decoder.xdr(), before as c_uint)
                && (before == 0 || !setpos(decoder.xdr(), before as c_uint - 1))
        );
        assert_eq!(getbytes(decoder.xdr(), left.min(9)).unwrap(), whole[before..][..left.min(9)]);
        decoder.fetch();
    }
}

#[test]
fn what_is_here_stays_where_what_a_peer_shows_comes_too_late() {
    let bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    let whole = [b"headhead", &bytes[..]].concat();
    for (before, here) in [(0, 8), (3, 8), (12, 8 + WINDOW)] {
        let (theirs, rest) = shown(&bytes);
        let pieces = whole[..8].chunks(4).map(|piece| Region::copy_from(piece).unwrap()).collect();
        let mut decoder = Decoder::new(Payload { pieces, rest: Some(Box::new(rest)) });
        assert_eq!(getbytes(decoder.xdr(), before).unwrap(), whole[..before]);
        drop(theirs);
        decoder.fetch();
        assert_eq!((getpos(decoder.xdr()) as usize, decoder.remaining()), (before, here - before));
        assert_eq!(getbytes(decoder.xdr(), here - before).unwrap(), whole[before..here]);
        assert!(getlong(decoder.xdr()).is_none() && setpos(decoder.xdr(), here as c_uint - 1));
    }
}
