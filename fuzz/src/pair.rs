//! Two engines against each other, one of which may be hostile: its messages are changed on their way, left out, or sent
//! again.
//!
//! Until something is changed, every request and every reply is what was sent, no connection ends, and in whatever order
//! things move, all calls have ended at the end. After a change, what `end` says holds for the other engine.
//!
//! ```text
//! settings of both | who is hostile | operations ..
//! ```

use std::collections::BTreeMap;

use rpcrdma::fuzz::{Buf, Error, Expect, Kind, Role};
use rpcrdma::provider::WorkRequest;

use crate::end::{self, End, Exposed, PROGRAM, bytes, words};
use crate::input::Input;

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut pair = Pair::new(&mut input);
    for _ in 0..300 {
        if input.is_empty() || pair.closed {
            break;
        }
        pair.step(&mut input);
    }
    pair.finish();
}

/// What a call should have.
struct Made {
    arguments: Vec<u8>,
    reply: Vec<u8>,
    one_way: bool,
    fits: bool,
}

struct Pair {
    /// The end that opened the connection, and the other.
    ends: [End; 2],
    /// Calls of each.
    made: [BTreeMap<u32, Made>; 2],
    hostile: Option<usize>,
    /// Something was changed.
    changed: bool,
    /// An exposure has failed, or Receives are shorter than they were: calls may end with an error.
    lacks: bool,
    /// An end takes no chunks in calls back, or sends none; or it has to say first that it takes calls back.
    short: bool,
    /// There are calls back.
    back: bool,
    closed: bool,
    next: u32,
    /// A message of the hostile end, to be sent again.
    old: Vec<u8>,
}

impl Pair {
    fn new(input: &mut Input<'_>) -> Pair {
        let settings = [end::settings(input), end::settings(input)];
        let choices = input.byte();
        let max_segment = [1 << 20, 8192][usize::from(choices >> 2 & 1)];
        let data = settings.map(|settings| end::private_data(&settings));
        let ends = [
            End::new(Role::Client, settings[0], data[1], max_segment),
            End::new(Role::Server, settings[1], data[0], max_segment),
        ];
        let hostile = [None, Some(0), Some(1), None][usize::from(choices & 3)];
        let mut pair = Pair {
            ends,
            made: [BTreeMap::new(), BTreeMap::new()],
            hostile,
            changed: false,
            lacks: false,
            short: settings.iter().any(|settings| !settings.reverse_chunks || settings.versions.high == 2),
            back: choices & 8 != 0,
            closed: false,
            next: 1,
            old: Vec::new(),
        };
        if pair.back {
            pair.ends[0].engine.grant(4);
            let End { engine, device, .. } = &mut pair.ends[1];
            engine.ask(4, device);
            pair.ends.iter_mut().for_each(End::drain);
        }
        pair
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let operation = input.byte();
        let side = usize::from(operation >> 4 & 1);
        match operation % 16 {
            0 | 1 => self.call(side, input),
            2..=4 => drop(self.deliver(side)),
            5 => drop(self.read(side)),
            6 | 7 => drop(self.serve(side, input.byte())),
            8 => {
                if let Some(xid) = self.ends[side].awaited().first() {
                    self.ends[side].abandon(*xid);
                }
            }
            9 => {
                while self.ends[side].take() {}
                self.requests(side);
            }
            10 if !self.ends[side].handed.is_empty() && operation & 0x20 != 0 => {
                self.ends[side].discard(0);
                // Whoever waits for its reply waits for ever.
                self.changed = true;
            }
            11 => self.change(operation, input),
            12 => {
                let held = operation & 0x20 != 0;
                self.ends[side].engine.hold(held);
                self.ends[side].drain();
            }
            13 => self.speak(side, operation, input),
            14 if operation & 0xE0 == 0xE0 => self.end(&Error::new(Kind::ConnectionLost, "cut")),
            14 if operation & 0xE0 == 0x20 => {
                self.ends[side].device.failing = Some(u32::from(input.byte() % 4));
                self.lacks = true;
            }
            _ => while self.moves() {},
        }
        self.look();
    }

    /// What both ends say of themselves and ask of each other.
    fn speak(&mut self, side: usize, operation: u8, input: &mut Input<'_>) {
        let End { engine, device, .. } = &mut self.ends[side];
        match operation >> 5 {
            0 => drop(engine.raise_receives(1024 * usize::from(input.byte() % 65), device)),
            1 => {
                // An end that asks for shorter Receives keeps to that at once (draft-dnoveck-nfsv4-rpcrdma-xcharext-01
                // §3.1): what it then has to answer may not fit.
                self.lacks = true;
                drop(engine.request(crate::engine::characteristic(input)));
            }
            // An end that was not told that it may call back does not.
            2 if side == 1 || self.back => drop(engine.grant(u32::from(input.byte() % 32))),
            3 if side == 0 || self.back => drop(engine.ask(u32::from(input.byte() % 32), device)),
            4 => {
                engine.set_reverse_chunks(input.chance());
                self.short = true;
            }
            5 => engine.handle_quiet(device),
            _ => engine.resume(device),
        }
        self.ends[side].drain();
    }

    fn call(&mut self, side: usize, input: &mut Input<'_>) {
        let (kind, xid) = (input.byte(), self.next);
        self.next += 1;
        // A server makes calls only if the client takes any.
        if side == 1 && self.ends[1].engine.asked() == 0 {
            return;
        }
        let length = usize::from(input.half()) % 20_000 * if kind & 0x20 != 0 { 3 } else { 1 };
        let answer = usize::from(input.half()) % 20_000 * if kind & 0x40 != 0 { 3 } else { 1 };
        let data = |length: usize, seed: u32| -> Vec<u8> {
            (0..length.next_multiple_of(4))
                .map(|at| if at < length { (at as u32 * 7).wrapping_add(seed) as u8 } else { 0 })
                .collect()
        };
        let head = |program, version, procedure| words(&[xid, 0, 2, program, version, procedure, 0, 0, 0, 0]);
        let ok = words(&[xid, 1, 0, 0, 0, 0]);
        let (arguments, reply) = match kind & 3 {
            // No binding.
            0 => ([head(0x2000_0001, 1, 1), data(length, xid)].concat(), [ok, data(answer, !xid)].concat()),
            // WRITE of NFS version 3.
            1 => {
                let file = words(&[4, 9, 0, 0, length as u32, 2, length as u32]);
                let written = words(&[0, 0, 0, length as u32, 2, 0, 0]);
                ([head(100_003, 3, 7), file, data(length, xid)].concat(), [ok, written].concat())
            }
            // READ.
            2 => {
                let file = words(&[4, 9, 0, 0, answer as u32]);
                let read = words(&[0, 0, answer as u32, 1, answer as u32]);
                ([head(100_003, 3, 6), file].concat(), [ok, read, data(answer, !xid)].concat())
            }
            _ => {
                let arguments = [head(PROGRAM, 1, 1), words(&[3, length as u32]), data(length, xid)].concat();
                (arguments, [ok, words(&[answer as u32]), data(answer, !xid)].concat())
            }
        };
        let one_way = kind & 0x1C == 0x1C;
        let max = if kind & 0x0C == 0x0C { 100 } else { reply.len() };
        let expect = match one_way {
            true => Expect::Nothing,
            false => {
                let place = || Buf::with_capacity(answer.max(1)).expect("memory").into_sink(answer.max(1));
                let places = if kind & 0x80 != 0 { vec![place()] } else { Vec::new() };
                Expect::Reply { max, places }
            }
        };
        let fits = reply.len() <= max && arguments.len() <= self.ends[1 - side].settings.max_call;
        self.ends[side].call(xid, &arguments, expect);
        self.made[side].insert(xid, Made { arguments, reply, one_way, fits });
    }

    /// Delivers the oldest Send or Write of a side.
    fn deliver(&mut self, from: usize) -> bool {
        if self.closed {
            return false;
        }
        let Some(work) = self.ends[from].sends.pop_front() else { return false };
        let to = 1 - from;
        let fine = match work {
            WorkRequest::Send { gather, invalidate } => {
                let message = bytes(&gather);
                drop(gather);
                if self.hostile == Some(from) {
                    self.old.clone_from(&message);
                }
                self.ends[to].receive(&message, invalidate)
            }
            WorkRequest::Write { gather, to: segment } => match self.ends[to].device.access(segment) {
                Some((Exposed::Sink(sink), at)) => sink.place(at, &bytes(&gather)),
                _ => false,
            },
            WorkRequest::Read { .. } => unreachable!("Reads have a queue of their own"),
        };
        self.requests(to);
        if !fine {
            assert!(self.changed, "a right peer breaks the connection");
            self.end(&Error::new(Kind::ConnectionLost, "remote access error"));
        }
        true
    }

    /// Does the oldest RDMA Read of a side.
    fn read(&mut self, side: usize) -> bool {
        if self.closed {
            return false;
        }
        let Some((id, sink, at, from)) = self.ends[side].reads.pop_front() else { return false };
        let placed = match self.ends[1 - side].device.access(from) {
            Some((Exposed::Source(region), start)) => {
                sink.place(at, &region[start..start + from.length as usize])
            }
            _ => false,
        };
        drop(sink);
        if placed {
            self.ends[1 - side].device.read.insert(from.handle.0);
            self.ends[side].read_done(id);
        } else {
            assert!(self.changed, "a right peer reads what it may not");
            self.end(&Error::new(Kind::ConnectionLost, "remote access error"));
        }
        true
    }

    /// Checks that requests are what was called.
    fn requests(&self, side: usize) {
        for request in self.ends[side].handed.iter().filter(|_| !self.changed) {
            let made = &self.made[1 - side][&request.xid.0];
            assert!(bytes(&request.message) == made.arguments, "call {} was changed", request.xid);
        }
    }

    fn serve(&mut self, side: usize, which: u8) -> bool {
        while self.ends[side].take() {}
        self.requests(side);
        let handed = self.ends[side].handed.len();
        if handed == 0 {
            return false;
        }
        let at = usize::from(which) % handed;
        let xid = self.ends[side].handed[at].xid.0;
        match self.made[1 - side].get(&xid) {
            Some(made) if made.one_way => self.ends[side].discard(at),
            Some(made) => {
                let reply = made.reply.clone();
                self.ends[side].reply(at, &reply);
            }
            None => self.ends[side].reply(at, &words(&[xid, 1, 0, 0, 0, 0])),
        }
        true
    }

    /// Changes something that the hostile end has sent.
    fn change(&mut self, operation: u8, input: &mut Input<'_>) {
        let Some(from) = self.hostile.filter(|_| !self.closed) else { return };
        let next = self.ends[from].sends.iter().position(|work| matches!(work, WorkRequest::Send { .. }));
        let (mut message, mut invalidate) = (self.old.clone(), None);
        if operation & 0xC0 != 0xC0 {
            // Not the Writes before it.
            let Some(at) = next else { return };
            let Some(WorkRequest::Send { gather, invalidate: named }) = self.ends[from].sends.remove(at)
            else {
                return;
            };
            (message, invalidate) = (bytes(&gather), named);
        }
        self.changed = true;
        for _ in 0..1 + (operation >> 5 & 1) {
            let at = input.below(message.len().min(256));
            match (input.byte(), message.get_mut(at)) {
                (0, _) => message.truncate(at),
                (1, _) => message.extend_from_slice(input.bytes(at)),
                // A whole word.
                (by @ 2..=31, Some(_)) => {
                    let at = at & !3;
                    if let Some(word) = message.get_mut(at..at + 4) {
                        let number = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
                        word.copy_from_slice(
                            &number.wrapping_add(u32::from(by)).wrapping_sub(16).to_be_bytes(),
                        );
                    }
                }
                (by, Some(byte)) => *byte ^= by,
                (_, None) => {}
            }
        }
        if operation & 0xC0 == 0x80 {
            return;
        }
        if !self.ends[1 - from].receive(&message, invalidate) {
            self.end(&Error::new(Kind::ConnectionLost, "no Receive for it"));
        }
    }

    /// Moves one message, RDMA Read or reply.
    fn moves(&mut self) -> bool {
        (0..2).any(|side| self.deliver(side) || self.read(side)) || (0..2).any(|side| self.serve(side, 0))
    }

    /// Looks at what has ended, and whether an end wants the connection to end.
    fn look(&mut self) {
        let [client, server] = [0, 1].map(|side| self.ends[side].settings.versions);
        let differ = client.low > server.high || server.low > client.high;
        for side in 0..2 {
            for (xid, outcome) in std::mem::take(&mut self.ends[side].outcomes) {
                let made = &self.made[side][&xid];
                match outcome {
                    _ if self.changed => {}
                    Ok(reply) if made.one_way => assert!(reply.is_empty()),
                    Ok(reply) => assert!(reply == made.reply, "the reply to {xid} was changed"),
                    Err(error) => {
                        // Calls back may have to be short.
                        let short = side == 1 && self.short;
                        let fails = !made.fits || self.lacks || self.closed || short || differ;
                        // A call without a reply needs two credits.
                        let few = made.one_way && error.kind() == Kind::NotSent;
                        assert!(fails || few, "call {xid}: {error}");
                    }
                }
            }
        }
        if let Some(error) = self.ends.iter().find_map(|end| end.closing.clone())
            && !self.closed
        {
            assert!(self.changed || self.lacks || differ, "{error}");
            self.end(&error);
        }
    }

    fn end(&mut self, error: &Error) {
        self.closed = true;
        self.ends.iter_mut().for_each(|end| end.close(error));
    }

    /// Moves everything until nothing moves any more: then all calls have ended.
    fn finish(&mut self) {
        for side in 0..2 {
            self.ends[side].engine.hold(false);
            self.ends[side].drain();
        }
        for _ in 0..4 {
            let mut left = 20_000;
            while self.moves() && left > 0 {
                left -= 1;
                self.look();
            }
            assert!(left > 0, "it does not end");
            for end in &mut self.ends {
                if end.is_open() {
                    end.engine.handle_quiet(&mut end.device);
                    end.engine.resume(&mut end.device);
                    end.drain();
                }
            }
        }
        self.look();
        if !self.changed && !self.closed {
            for (side, end) in self.ends.iter().enumerate() {
                // Calls that nobody waits for may hold every credit; and a server must hear from its client first.
                let waits = end.engine.starved() || side == 1 && end.engine.version().is_none();
                assert!(waits || end.awaited().is_empty(), "calls {:?} do not end", end.awaited());
            }
        }
        self.end(&Error::new(Kind::ConnectionLost, "the end"));
        self.changed = true;
        self.look();
    }
}
