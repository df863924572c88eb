//! A connection over an adapter that lies: completions in any order, twice or never, with any status, opcode, number, length
//! and handle, events of every kind, and functions that fail, mixed with whatever the layer above asks for.
//!
//! The device ([`rpcrdma::fuzz::mock`]) knows what it may touch, and touches it: memory that it was not told to leave alone
//! must still exist and belong to nobody else, whatever the device has said.
//!
//! ```text
//! flags | operations ..
//! ```

use std::collections::{HashMap, HashSet};

use rpcrdma::config::Crc;
use rpcrdma::fuzz::mock::{self, Right};
use rpcrdma::fuzz::{Buf, Error, Region, Sink, Verbs};
use rpcrdma::provider::{Completion, Options, QueuePair, WorkId, WorkRequest};
use rpcrdma::wire::{Handle, Segment};

use crate::input::Input;

/// Values of C's enumerations, and some that none has.
const SUCCESS: u32 = 0;
const FLUSHED: u32 = 5;
const OPCODES: [u32; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, u32::MAX];
const RECEIVE: u32 = 128;
const WITH_INVALIDATE: u32 = 8;

/// Functions that the device may refuse while it has the queue pair.
const FUNCTIONS: [&str; 2] = ["ibv_dereg_mr", "ibv_dealloc_mw"];

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let Some(mut bench) = Bench::start(&mut input) else { return };
    while !input.is_empty() && !bench.ended {
        bench.step(&mut input);
        bench.check();
    }
    bench.end();
}

/// What the peer was given a handle for.
enum Exposed {
    Source,
    Sink(Sink),
}

struct Bench {
    verbs: Verbs,
    ended: bool,
    exposed: HashMap<u32, (Segment, Exposed)>,
    /// Reads that are under way.
    reads: HashSet<WorkId>,
    ids: u64,
    received: usize,
    read: usize,
    /// The last completion, to be used again.
    last: Option<(u32, u32, u64, u32, u32, u32)>,
}

impl Bench {
    fn start(input: &mut Input<'_>) -> Option<Bench> {
        let flags = input.byte();
        let options = Options {
            inline: 4096,
            receive: 4096,
            slab: 4096,
            remote_invalidation: flags & 1 != 0,
            credits: if flags & 2 != 0 { 32 } else { 4 },
            margin: 4,
            crc: Crc::Auto,
            only: true,
            spins: false,
        };
        let private_data = input.bytes(usize::from(flags >> 4)).to_vec();
        let verbs = Verbs::mocked(options, |device| {
            device.windowless = flags & 4 != 0;
            device.completes = false;
            device.relents = true;
            device.private_data = private_data;
            if flags & 8 != 0 {
                device.refuses = 1 << 12;
            }
        })?;
        let (exposed, reads) = (HashMap::new(), HashSet::new());
        Some(Bench { verbs, ended: false, exposed, reads, ids: 0, received: 0, read: 0, last: None })
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let operation = input.byte();
        match operation % 16 {
            0 => self.complete_next(operation, input),
            1 => self.receive(operation, input),
            2 => self.complete_any(input),
            3 => self.tell(self.last),
            4 => mock::happens(u32::from(input.byte() % 18), i32::from(input.byte() as i8)),
            5 => {
                let sink = Buf::with_capacity(1 << 17).expect("memory").into_sink(length(input));
                self.expose(sink.clone(), Exposed::Sink(sink));
            }
            6 => {
                let source = Region::copy_from(&vec![0x5E; length(input)]).expect("memory");
                let segment = self.verbs.expose_source(source);
                self.note(segment, Exposed::Source);
            }
            7 => self.invalidate(operation, input),
            8 => {
                if let Some(slab) = self.verbs.slabs().and_then(|slabs| slabs.take()) {
                    self.verbs.post_recv(slab.into_sink(usize::from(input.half()) % 4096 + 1));
                }
            }
            9 => {
                let gather = gather(input);
                let invalidate = (operation & 0x10 != 0).then_some(Handle(7));
                self.verbs.post(WorkRequest::Send { gather: gather.into_iter().collect(), invalidate });
            }
            10 => {
                let gather = gather(input);
                let length = gather.iter().map(|piece| piece.len()).sum::<usize>() as u32;
                let to = Segment { handle: Handle(9), length, offset: 1 << 20 };
                self.verbs.post(WorkRequest::Write { gather: gather.into_iter().collect(), to });
            }
            11 => {
                let length = length(input);
                let sink = Buf::with_capacity(length + 100).expect("memory").into_sink(length + 100);
                self.ids += 1;
                self.reads.insert(WorkId(self.ids));
                let from = Segment { handle: Handle(5), length: length as u32, offset: 0 };
                self.verbs.post(WorkRequest::Read { id: WorkId(self.ids), sink, at: 50, from });
            }
            12 => match operation >> 4 {
                0 => self.over(|verbs| verbs.probe()),
                1 => self.over(|verbs| verbs.release_lent().map(drop)),
                2 => self.verbs.nudge(),
                3 => mock::announce(),
                4 => mock::with(|device| device.broken = true),
                5 => mock::with(|device| device.errno = 12),
                6 => {
                    let function = input.one_of(&FUNCTIONS);
                    mock::with(|device| device.fails.insert(function));
                }
                7 => mock::with(|device| device.refuses = 1 + usize::from(input.half())),
                8 => mock::with(|device| device.refuses = usize::MAX),
                9 => drop(self.verbs.spin()),
                10 => drop(self.verbs.rest()),
                11 => drop(self.verbs.leave()),
                _ => {}
            },
            13 => self.over(|verbs| verbs.flush().map(drop)),
            _ => self.poll(),
        }
    }

    fn over(&mut self, what: impl FnOnce(&mut Verbs) -> Result<(), Error>) {
        self.ended |= what(&mut self.verbs).is_err();
    }

    // What the device says.

    fn tell(&mut self, completion: Option<(u32, u32, u64, u32, u32, u32)>) {
        let Some((status, opcode, number, len, flags, key)) = completion else { return };
        mock::completion(status, opcode, number, len, flags, key);
        self.last = completion;
    }

    /// Completes the oldest request, or one of those after it.
    fn complete_next(&mut self, operation: u8, input: &mut Input<'_>) {
        let skip = if operation & 0x10 != 0 { usize::from(input.byte() % 4) } else { 0 };
        let next = mock::with(|device| {
            let signalled = device.queue.iter().filter(|work| work.signalled);
            signalled.map(|work| (work.number, work.opcode)).nth(skip)
        });
        // The opcodes of Sends, Writes and Reads, as a device reports them.
        self.tell(
            next.map(|(number, opcode)| (SUCCESS, [1, 1, 0, 0, 2][opcode.min(4) as usize], number, 0, 0, 0)),
        );
    }

    /// Makes a message come in, which may end a handle.
    fn receive(&mut self, operation: u8, input: &mut Input<'_>) {
        let Some((number, room)) = mock::with(|device| {
            device.receives.front().map(|next| (next.number, next.pieces.first().map_or(0, |piece| piece.1)))
        }) else {
            return;
        };
        let invalidates = operation & 0x10 != 0;
        let key = if invalidates { self.pick(input).unwrap_or(3) } else { 0 };
        let len = u32::from(input.half()) % (room as u32 + 1);
        let flags = if invalidates { WITH_INVALIDATE } else { 0 };
        self.tell(Some((SUCCESS, RECEIVE, number, len, flags, key)));
    }

    fn complete_any(&mut self, input: &mut Input<'_>) {
        let status = input.byte();
        let status = if status < 0x80 { SUCCESS } else { u32::from(status & 0x1F) };
        let opcode = input.one_of(&OPCODES);
        let near = mock::with(|device| match opcode {
            RECEIVE.. => device.receives.front().map_or(0, |next| next.number),
            _ => device.queue.front().map_or(0, |next| next.number),
        });
        let number = match input.byte() {
            0xFF => u64::MAX - u64::from(input.byte()),
            by => near.wrapping_add(u64::from(by)).wrapping_sub(4),
        };
        let flags = u32::from(input.byte());
        let key = self.pick(input).unwrap_or_else(|| input.word());
        self.tell(Some((status, opcode, number, input.word(), flags, key)));
    }

    /// One of the handles.
    fn pick(&self, input: &mut Input<'_>) -> Option<u32> {
        let mut handles: Vec<u32> = self.exposed.keys().copied().collect();
        handles.sort_unstable();
        let choice = usize::from(input.byte());
        handles.get(choice % (handles.len() + 1)).copied()
    }

    // What the layer above does.

    fn expose(&mut self, sink: Sink, exposed: Exposed) {
        let segment = self.verbs.expose_sink(sink);
        self.note(segment, exposed);
    }

    fn note(&mut self, segment: Result<Segment, Error>, exposed: Exposed) {
        // A refusal ends a call, and does not end the connection.
        let Ok(segment) = segment else { return };
        assert!(self.exposed.insert(segment.handle.0, (segment, exposed)).is_none(), "one handle, twice");
    }

    fn invalidate(&mut self, operation: u8, input: &mut Input<'_>) {
        let Some(handle) = self.pick(input) else { return };
        // Completed at once, or the end of everything; never completing it would take time to wait for.
        match operation >> 4 {
            0 => self.tell(Some((FLUSHED, 0, 0, 0, 0, 0))),
            _ => mock::with(|device| device.completes = true),
        }
        let ended = self.verbs.invalidate(Handle(handle));
        mock::with(|device| device.completes = false);
        match ended {
            Ok(()) => self.gone(handle),
            Err(_) => self.ended = true,
        }
    }

    /// Called when a handle has ended: its memory is the program's again.
    fn gone(&mut self, handle: u32) {
        let Some((_, exposed)) = self.exposed.remove(&handle) else { panic!("a handle that is unknown") };
        assert!(!mock::with(|device| device.rights.contains_key(&handle)), "the peer still has it");
        if let Exposed::Sink(sink) = exposed {
            let len = sink.len();
            assert!(sink.into_buf(len).is_ok(), "the device still has it");
        }
    }

    fn poll(&mut self) {
        match self.verbs.poll() {
            Ok(None) => {}
            Ok(Some(Completion::Received { sink, len, invalidated })) => {
                self.received += 1;
                assert!(len <= sink.len() && sink.into_buf(len).is_ok(), "a Receive that is not ours alone");
                if let Some(Handle(handle)) = invalidated {
                    self.gone(handle);
                }
            }
            Ok(Some(Completion::Read { id })) => {
                self.read += 1;
                assert!(self.reads.remove(&id), "a Read that is over, or never was");
            }
            Err(_) => self.ended = true,
        }
    }

    // What must hold.

    fn check(&self) {
        mock::touch();
        mock::with(|device| {
            assert!(self.received <= device.received, "a message that has not come");
            assert!(self.read <= device.read.len(), "a Read that is not complete");
            if self.ended {
                return;
            }
            for (key, right) in &device.rights {
                let (Segment { length, offset, .. }, exposed) =
                    self.exposed.get(key).expect("a right that nobody has given");
                let (address, len) = (*offset as usize, *length as usize);
                let write = matches!(exposed, Exposed::Sink(_));
                assert_eq!(*right, Right { address, len, write }, "other bytes than were given");
            }
        });
    }

    /// The end is an error like any other: nothing is held afterwards.
    fn end(mut self) {
        mock::completion(FLUSHED, 0, 0, 0, 0, 0);
        self.verbs.close();
        assert!(self.verbs.poll().is_err() && self.verbs.flush().is_err());
        assert!(mock::with(|device| device.rights.is_empty()), "the peer still has memory");
        for (_, exposed) in std::mem::take(&mut self.exposed).into_values() {
            if let Exposed::Sink(sink) = exposed {
                let len = sink.len();
                assert!(sink.into_buf(len).is_ok(), "the device still has it");
            }
        }
        drop(self.verbs);
        mock::with(|device| {
            device.there.retain(|_, count| *count > 0);
            assert!(device.there.is_empty(), "{:?} after the end", device.there);
        });
        assert_eq!(Verbs::locked(), 0, "what nobody has is locked");
    }
}

/// Mostly a few bytes, and sometimes more than are copied.
fn length(input: &mut Input<'_>) -> usize {
    let length = usize::from(input.half());
    1 + if length & 0xF == 0xF { 65_536 + length / 16 } else { length / 16 }
}

fn gather(input: &mut Input<'_>) -> Vec<Region> {
    let count = usize::from(input.byte() % 8);
    (0..count).map(|_| Region::copy_from(&vec![0x5E; length(input)]).expect("memory")).collect()
}
