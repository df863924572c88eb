//! XDR streams against a model: decoding over a list of pieces, and encoding into memory that grows, with items lent.
//!
//! ```text
//! mode | what the mode takes | pairs of an operation and its argument ..
//! ```

use std::ffi::{c_long, c_uint};

use std::sync::Arc;

use rpcrdma::fuzz::{
    Buf, Decoder, Encoder, LEND_MIN, Lending, Own, Payload, Region, Regions, Shown, Theirs, XDR, XdrOps,
};
use rpcrdma::wire::{Handle, Segment};

use crate::input::Input;

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mode = input.byte();
    if mode & 1 == 0 { decode(mode, &mut input) } else { encode(mode, &mut input) }
}

/// The operations, as C calls them.
struct Operations {
    xdr: *mut XDR,
    table: &'static XdrOps,
}

impl Operations {
    fn of(xdr: *mut XDR) -> Operations {
        // SAFETY: a live handle, whose table is a static of the library.
        Operations { xdr, table: unsafe { &*(*xdr).x_ops } }
    }

    fn get_long(&self) -> Option<i32> {
        let mut long: c_long = 0x55;
        // SAFETY: the handle is alive as long as its stream, which outlives this; `long` is a long.
        let there = unsafe { (self.table.getlong)(self.xdr, &mut long) } == 1;
        there.then_some(long as i32)
    }

    fn put_long(&self, long: c_long) -> bool {
        // SAFETY: as in `get_long`.
        unsafe { (self.table.putlong)(self.xdr, &long) == 1 }
    }

    fn get_bytes(&self, bytes: &mut [u8]) -> bool {
        // SAFETY: as in `get_long`; that many bytes can be written.
        unsafe { (self.table.getbytes)(self.xdr, bytes.as_mut_ptr().cast(), bytes.len() as c_uint) == 1 }
    }

    fn put_bytes(&self, bytes: &[u8]) -> bool {
        // SAFETY: as in `get_long`; that many bytes can be read.
        unsafe { (self.table.putbytes)(self.xdr, bytes.as_ptr().cast(), bytes.len() as c_uint) == 1 }
    }

    fn position(&self) -> usize {
        // SAFETY: as in `get_long`.
        unsafe { (self.table.getpostn)(self.xdr) as usize }
    }

    fn set_position(&self, position: u32) -> bool {
        // SAFETY: as in `get_long`.
        unsafe { (self.table.setpostn)(self.xdr, position) == 1 }
    }

    /// The next bytes in place, if the stream hands them out. They belong to C, as its streams do.
    #[allow(clippy::mut_from_ref)]
    fn inline(&self, bytes: usize) -> Option<&mut [u8]> {
        // SAFETY: as in `get_long`.
        let place = unsafe { (self.table.inline)(self.xdr, bytes as c_uint) };
        assert_eq!(place.addr() % 4, 0);
        // SAFETY: that many bytes belong to the caller, until the next operation.
        (!place.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(place.cast(), bytes) })
    }
}

/// Where SETPOS goes: anywhere, or somewhere near.
fn target(operation: u8, argument: usize, length: usize, position: usize) -> u32 {
    let near = position.wrapping_add(argument).wrapping_sub(128);
    (if operation & 0x80 != 0 { length } else { near }) as u32
}

fn decode(mode: u8, input: &mut Input<'_>) {
    let (mut model, mut sources) = (Vec::new(), Regions::new());
    for index in 0..=input.below(6) {
        let length = usize::from(input.byte()) * if mode & 2 != 0 { 33 } else { 1 };
        let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + index * 31) as u8).collect();
        model.extend_from_slice(&bytes);
        // At the beginning of a page, or anywhere.
        let before = if mode & 4 != 0 { index + 1 } else { 0 };
        let region = Region::copy_from(&[&vec![9; before], &bytes[..]].concat()).expect("memory");
        sources.push(region.slice(before, length));
    }
    let here = model.len();
    let rest = (mode & 8 != 0).then(|| shown(&mut model, 1 + usize::from(input.byte()) * 257));
    let mut decoder = Decoder::new(Payload { pieces: sources, rest: rest.map(Box::new) });
    let stream = Operations::of(decoder.xdr());
    let (mut at, mut reached, mut copied) = (0, 0, 0);
    while !input.is_empty() {
        reached = at.max(reached);
        let (operation, argument) = (input.byte(), usize::from(input.byte()));
        let length = argument * if operation & 0x40 != 0 { 37 } else { 1 };
        let fits = at + length <= model.len();
        match operation % 8 {
            0 => {
                let expected = model[at..].first_chunk().map(|word| i32::from_be_bytes(*word));
                assert_eq!(stream.get_long(), expected);
                at += if expected.is_some() { 4 } else { 0 };
            }
            1 | 2 => {
                let mut bytes = vec![0xEE; length];
                assert_eq!(stream.get_bytes(&mut bytes), fits);
                if fits {
                    assert_eq!(bytes, model[at..at + length]);
                    at += length;
                    copied += length;
                }
            }
            3 => assert_eq!(stream.position(), at),
            4 => {
                let to = target(operation, argument, length, at);
                // Once some of what lies with the peer was taken, it is not taken a second time.
                let (inside, back) = (to as usize <= model.len(), (to as usize) < at && reached > here);
                let there = stream.set_position(to);
                assert!(there == inside || back && !there);
                at = if there { to as usize } else { at };
            }
            5 | 6 => {
                if let Some(bytes) = stream.inline(length) {
                    assert_eq!(*bytes, model[at..at + length]);
                    at += length;
                }
            }
            _ => {
                let next = model[at..].first_chunk::<4>();
                let take = argument & 1 == 1;
                let taken = decoder.take_if(|word: &[u8; 4]| {
                    assert_eq!(Some(word), next);
                    take
                });
                assert!(!taken || take);
                at += if taken { 4 } else { 0 };
            }
        }
        assert_eq!((decoder.position(), decoder.remaining()), (at, model.len() - at));
    }
    assert_eq!(decoder.copied(), copied as u64);
}

/// `length` more bytes of the message, which a peer shows in its outbox.
fn shown(model: &mut Vec<u8>, length: usize) -> Shown {
    let (own, file) = Own::new().expect("memory");
    let (own, theirs) = (Arc::new(own), Arc::new(Theirs::new(&file).expect("a segment")));
    let bytes: Vec<u8> = (0..length).map(|at| (at * 11 + 3) as u8).collect();
    model.extend_from_slice(&bytes);
    let mut buf = Buf::outbox(&own).expect("nobody has it");
    buf.extend(&bytes).expect("it fits");
    let offset = own.show(buf.as_ptr().addr(), 7).expect("it is there");
    // It stays as it is.
    own.end();
    Shown::of(&own, &theirs, Segment { handle: Handle(7), length: length as u32, offset })
        .expect("it is shown")
}

/// What was put, and where the next item goes.
#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    at: usize,
}

impl Model {
    fn put(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        self.bytes.resize(end.max(self.bytes.len()), 0);
        self.bytes[self.at..end].copy_from_slice(bytes);
        self.at = end;
    }
}

fn encode(mode: u8, input: &mut Input<'_>) {
    let mut encoder = Encoder::new(Buf::with_capacity(if mode & 2 != 0 { 1 } else { 9000 }).expect("memory"));
    let limit = if mode & 8 != 0 { usize::from(input.byte()) * 64 } else { usize::MAX };
    encoder.set_limit(limit);
    // What the program puts, which outlives the message.
    let program: Vec<u8> = (0..12_000).map(|at| (at * 13 + 5) as u8).collect();
    if mode & 4 != 0 {
        let which = Box::new(|encoded: &[u8], _: *const u8, length: usize| {
            !(encoded.len() + length).is_multiple_of(3)
        });
        // SAFETY: `program` is not changed, and outlives the message.
        unsafe { encoder.lend(Lending { at_least: LEND_MIN, which, stop: mode & 16 != 0 }) }
    }
    let stream = Operations::of(encoder.xdr());
    let (mut model, mut failed, mut stopped) = (Model::default(), false, false);
    while !input.is_empty() && !stopped {
        let (operation, argument) = (input.byte(), usize::from(input.byte()));
        let length = argument * if operation & 0x40 != 0 { 41 } else { 1 };
        match operation % 8 {
            0 => {
                let long = argument as c_long * 0x0102_0304 - 77;
                match stream.put_long(long) {
                    true => model.put(&(long as i32).to_be_bytes()),
                    false => failed = true,
                }
            }
            1 | 2 | 7 => {
                let from = usize::from(operation) * 11 % 200;
                let bytes = &program[from..from + length];
                match stream.put_bytes(bytes) {
                    true => model.put(bytes),
                    // The first item that would be lent ends the message, if no more of it is wanted.
                    false if mode & 20 == 20 && encoder.position() != model.at => {
                        stopped = true;
                        model.put(bytes);
                    }
                    false => failed = true,
                }
            }
            3 => assert_eq!(stream.position(), model.at),
            4 => {
                let to = target(operation, argument, length, model.at);
                if stream.set_position(to) {
                    // What is left out reads as zeros.
                    model.bytes.resize(model.bytes.len().max(to as usize), 0);
                    model.at = to as usize;
                } else {
                    assert!(to as usize > model.bytes.len());
                    failed |= to as usize > limit && to as usize - model.bytes.len() <= 4096;
                }
            }
            _ => {
                // What nobody has written is zero, and not left over from another message.
                let end = model.at + length;
                if let Some(bytes) = stream.inline(length) {
                    let fresh = model.bytes.len().clamp(model.at, end) - model.at;
                    assert!(bytes[fresh..].iter().all(|byte| *byte == 0));
                    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 3) as u8);
                    model.put(&(0..length).map(|at| (at * 3) as u8).collect::<Vec<_>>());
                }
            }
        }
        assert_eq!(encoder.position(), model.at);
        assert!(model.at <= limit.max(4096) && model.bytes.len() <= limit);
    }
    assert!(encoder.encoded().len() <= model.at);
    if let Some((address, length)) = encoder.first_lent() {
        assert!(program.as_ptr_range().contains(&address) && length >= LEND_MIN && mode & 4 != 0);
    }
    let Model { mut bytes, at } = model;
    bytes.truncate(at);
    match encoder.finish() {
        Ok(message) => {
            assert!(!failed, "a put that failed was forgotten");
            assert_eq!(message.len(), bytes.len());
            let all: Vec<u8> =
                message.freeze().gather(0..bytes.len()).iter().flat_map(|r| r.to_vec()).collect();
            assert!(all == bytes, "other bytes than were put");
        }
        Err(error) => assert!(failed, "{error}"),
    }
}
