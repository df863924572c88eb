//! One engine, whose peer is this target: any header with any lists, with handles that are exposed and others, in any order
//! and mixed with what the program above does.
//!
//! ```text
//! role | settings | what the peer says of itself | operations ..
//! ```

use rpcrdma::fuzz::{Buf, Error, Expect, Kind, Role};
use rpcrdma::wire::Handle;
use rpcrdma::wire::characteristics::{Backward, Characteristic};
use rpcrdma::wire::private_data::PrivateData;

use crate::end::{self, End, PROGRAM, offset_of, words};
use crate::input::Input;

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.byte();
    let settings = end::settings(&mut input);
    let role = if flags & 1 == 0 { Role::Client } else { Role::Server };
    let peer = if flags & 2 == 0 { end::private_data(&settings) } else { PrivateData::ABSENT };
    let mut bench = Bench { end: End::new(role, settings, peer, 1 << 20), next: 1 };
    bench.end.device.failing = (flags & 4 != 0).then(|| u32::from(input.byte()));
    if flags & 8 != 0 {
        bench.end.engine.ask(4, &mut bench.end.device);
        bench.end.engine.grant(4);
        bench.end.drain();
    }
    for _ in 0..200 {
        if input.is_empty() || !bench.end.is_open() {
            break;
        }
        bench.step(&mut input);
        bench.end.outcomes.clear();
    }
    let error = bench.end.closing.clone().unwrap_or_else(|| Error::new(Kind::ConnectionLost, "the end"));
    bench.end.close(&error);
    // Requests that were complete before are still there; answers to them have no effect.
    while bench.end.take() {}
    while !bench.end.handed.is_empty() {
        bench.end.reply(0, &words(&[1, 1]));
    }
}

/// A characteristic that a program asks for.
pub fn characteristic(input: &mut Input<'_>) -> Characteristic {
    let value = input.byte();
    match value & 3 {
        0 => Characteristic::ReceiveSize(1024 * u32::from(value >> 2)),
        1 => Characteristic::ReceiveSize(input.word()),
        2 => Characteristic::RemoteInvalidation(value & 4 != 0),
        _ => Characteristic::Backward(
            [Backward::Unknown, Backward::None, Backward::SizeLimited, Backward::General]
                [usize::from(value >> 2 & 3)],
        ),
    }
}

struct Bench {
    end: End,
    next: u32,
}

impl Bench {
    fn step(&mut self, input: &mut Input<'_>) {
        let operation = input.byte();
        match operation % 16 {
            0..=5 => self.message(operation, input),
            6 | 7 => self.call(operation, input),
            8 => {
                if let Some(xid) = self.end.awaited().first() {
                    self.end.abandon(*xid);
                }
            }
            9 => while self.end.take() {},
            10 => self.answer(operation, input),
            11 | 12 => {
                if let Some((id, sink, at, from)) = self.end.reads.pop_front() {
                    let length = usize::from(input.byte()).min(from.length as usize);
                    assert!(sink.place(at, input.bytes(length)));
                    drop(sink);
                    self.end.read_done(id);
                }
            }
            13 => self.command(operation, input),
            14 => {
                let End { engine, device, .. } = &mut self.end;
                if operation & 0x10 == 0 {
                    let _ = engine.request(characteristic(input));
                } else {
                    let _ = engine.raise_receives(1024 * usize::from(input.byte() & 0x7F), device);
                }
                self.end.drain();
            }
            _ => {
                let engine = &self.end.engine;
                let (send, receive) = engine.thresholds();
                let (out, back) = engine.largest_short();
                assert!(out < send && back < receive && send >= 1024 && receive >= 1024);
                assert!(!engine.starved() || engine.credits_left() == 0);
                let _ = (
                    engine.peer(),
                    engine.pulling(),
                    engine.is_awaiting(),
                    engine.holds_back(),
                    engine.waits(),
                );
                self.end.sends.clear();
            }
        }
    }

    fn command(&mut self, operation: u8, input: &mut Input<'_>) {
        let End { engine, device, handed, .. } = &mut self.end;
        match operation >> 4 & 7 {
            0 => assert!(engine.ask(u32::from(input.byte()), device) >= 1),
            1 => assert!(engine.grant(u32::from(input.byte())) >= 1),
            2 => engine.set_reverse_chunks(input.chance()),
            3 => engine.resume(device),
            4 => engine.handle_quiet(device),
            5 => engine.hold(input.chance()),
            6 => engine.keep_deferred(usize::from(input.byte() & 3)),
            _ => {
                if let Some(request) = handed.first() {
                    engine.defer(request.id);
                }
            }
        }
        self.end.drain();
    }

    fn call(&mut self, operation: u8, input: &mut Input<'_>) {
        if self.end.engine.asked() == 0 {
            return;
        }
        let length = 40 + usize::from(input.half()) * if operation & 0x20 != 0 { 3 } else { 1 };
        let program = if operation & 0x40 != 0 { 100_003 } else { PROGRAM };
        let (version, procedure) =
            if program == PROGRAM { (1, 1) } else { (3, u32::from(input.byte()) % 22) };
        let mut message = words(&[self.next, 0, 2, program, version, procedure, 0, 0, 0, 0]);
        let count = usize::from(input.byte());
        message.extend_from_slice(input.bytes(count));
        message.resize(length.max(message.len()).next_multiple_of(4), 0);
        let expect = match operation & 0x10 {
            0 => {
                let max = if input.chance() { 100 } else { input.word() as usize & 0xF_FFFF };
                let place = || Buf::with_capacity(8192).expect("memory").into_sink(8192);
                Expect::Reply { max, places: if operation & 0x80 != 0 { vec![place()] } else { Vec::new() } }
            }
            _ => Expect::Nothing,
        };
        self.end.call(self.next, &message, expect);
        self.next += 1;
    }

    fn answer(&mut self, operation: u8, input: &mut Input<'_>) {
        let handed = self.end.handed.len();
        if handed == 0 {
            return;
        }
        let at = input.below(handed);
        if operation & 0x10 != 0 {
            return self.end.discard(at);
        }
        let xid = self.end.handed[at].xid.0;
        let mut reply = words(&[xid, 1, 0, 0, 0, 0]);
        let length = reply.len() + usize::from(input.half());
        let count = usize::from(input.byte());
        reply.extend_from_slice(input.bytes(count));
        reply.resize(length.max(reply.len()), 0);
        self.end.reply(at, &reply);
    }

    /// A segment that the peer names: one that is exposed to it, or one of its own.
    fn segment(&self, input: &mut Input<'_>) -> [u32; 4] {
        let choice = input.byte();
        let exposed: Vec<u32> = self.end.device.exposed.keys().copied().collect();
        if choice & 1 == 0 && !exposed.is_empty() {
            let handle = exposed[usize::from(choice >> 1) % exposed.len()];
            let length = if choice & 0x40 != 0 { 4096 } else { u32::from(input.half()) };
            let offset = offset_of(handle);
            return [handle, length, (offset >> 32) as u32, offset as u32];
        }
        let length = match choice >> 1 & 3 {
            0 => u32::from(input.byte()),
            1 => u32::from(input.half()),
            2 => input.word(),
            _ => 4096,
        };
        [
            u32::from(input.byte()),
            length,
            if choice & 0x80 != 0 { u32::MAX } else { 0 },
            u32::from(input.byte()),
        ]
    }

    fn chunk(&self, input: &mut Input<'_>, words: &mut Vec<u32>) {
        let segments = input.byte() & 3;
        words.extend([1, segments.into()]);
        for _ in 0..segments {
            words.extend(self.segment(input));
        }
    }

    /// A message of the peer's.
    fn message(&mut self, operation: u8, input: &mut Input<'_>) {
        let kind = input.byte();
        let version = [1, 1, 1, 2, 2, 0x1234, 1, 2][usize::from(kind & 7)];
        let awaited = self.end.awaited();
        let xid = if kind & 8 != 0 && !awaited.is_empty() {
            awaited[usize::from(input.byte()) % awaited.len()]
        } else if kind & 0x10 != 0 {
            0x7000_0000 + u32::from(input.byte() & 7)
        } else {
            1000 + u32::from(input.byte())
        };
        let credits = u32::from(input.byte());
        let proc = [0, 1, 4, 0, 1, 2, 3, 5][usize::from(input.byte() & 7)];
        let mut header = vec![xid, version, credits, proc];
        if version == 2 && proc != 4 {
            header.push(u32::from(input.byte() & 1));
        }
        let mut payload = Vec::new();
        match proc {
            0 | 1 => {
                let lists = input.byte();
                for _ in 0..lists & 3 {
                    header.extend([1, if lists & 4 != 0 { 0 } else { u32::from(input.byte()) * 4 }]);
                    header.extend(self.segment(input));
                }
                header.push(0);
                for _ in 0..lists >> 3 & 3 {
                    self.chunk(input, &mut header);
                }
                header.push(0);
                match lists & 0x20 {
                    0 => header.push(0),
                    _ => self.chunk(input, &mut header),
                }
                if proc == 0 {
                    payload = Bench::payload(xid, lists & 0x40 != 0, input);
                }
            }
            4 => {
                let error = input.byte();
                header.push(1 + u32::from(error & 3));
                if error & 3 == 0 {
                    header.extend([u32::from(error >> 2 & 3), u32::from(error >> 4 & 3)]);
                }
            }
            5 => Bench::optional(input, &mut header),
            _ => {}
        }
        let mut message = [words(&header), payload].concat();
        if kind & 0x80 != 0 && !message.is_empty() {
            let at = input.below(message.len());
            message[at] ^= input.byte();
        }
        if kind & 0x40 != 0 && operation & 0x10 != 0 {
            message.truncate(input.below(message.len() + 1));
        }
        let handles: Vec<u32> = self.end.device.exposed.keys().copied().collect();
        let invalidated = (operation & 0x20 != 0 && !handles.is_empty())
            .then(|| Handle(handles[input.below(handles.len())]));
        if !self.end.receive(&message, invalidated) {
            self.end.close(&Error::new(Kind::ConnectionLost, "no Receive for it"));
        }
    }

    /// A whole RPC message, or the beginning of one.
    fn payload(xid: u32, reply: bool, input: &mut Input<'_>) -> Vec<u8> {
        let mut payload = if reply {
            words(&[xid, 1, 0, 0, 0, u32::from(input.byte() & 1)])
        } else {
            let program = input.one_of(&[100_003, PROGRAM, 0x4000_0000, 100_227]);
            let version = input.one_of(&[3, 4, 1, 2]);
            words(&[xid, 0, 2, program, version, u32::from(input.byte() & 31), 0, 0, 0, 0])
        };
        let length = usize::from(input.byte());
        payload.extend_from_slice(input.bytes(length));
        payload
    }

    /// A message of the characteristics.
    fn optional(input: &mut Input<'_>, header: &mut Vec<u32>) {
        let kind = u32::from(input.byte() & 7);
        let value = |input: &mut Input<'_>| {
            let which = 1 + u32::from(input.byte() & 3);
            [which, 4, if input.chance() { input.word() } else { 1024 * u32::from(input.byte() & 0x7F) }]
        };
        let mut info = Vec::new();
        match kind {
            1 | 2 => {
                let count = input.byte() & 3;
                info.push(count.into());
                for _ in 0..count {
                    info.extend(value(input));
                }
                if kind == 1 {
                    info.extend([1, input.byte().into()]);
                }
            }
            3 => {
                for _ in 0..3 {
                    info.extend([1, input.byte().into()]);
                }
            }
            _ => {
                info.extend(value(input));
                info.push(u32::from(input.byte() & 1));
            }
        }
        header.extend([kind, info.len() as u32 * 4]);
        header.extend(info);
    }
}
