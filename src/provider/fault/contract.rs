//! The contract of [`QueuePair`], checked on any device.

use std::time::{Duration, Instant};

use smallvec::smallvec;

use super::*;
use crate::memory::{Buf, Program};

/// Makes a connected pair.
pub(crate) type Make<'a> = &'a dyn Fn() -> [Box<dyn QueuePair>; 2];

/// Two ends: whichever completion a test waits for, both move.
pub(crate) struct Ends {
    pub(crate) ends: [Box<dyn QueuePair>; 2],
    got: [VecDeque<Completion>; 2],
    failed: [Option<Error>; 2],
}

impl Ends {
    pub(crate) fn new(ends: [Box<dyn QueuePair>; 2]) -> Ends {
        Ends { ends, got: [VecDeque::new(), VecDeque::new()], failed: [None, None] }
    }

    /// The next completion of end `i`, or the error that ended it.
    pub(crate) fn next(&mut self, i: usize) -> Result<Completion, Error> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(completion) = self.got[i].pop_front() {
                return Ok(completion);
            }
            if let Some(error) = &self.failed[i] {
                return Err(error.clone());
            }
            let others = (&self.got[1 - i], &self.failed[1 - i]);
            assert!(Instant::now() < deadline, "nothing happens at end {i}; at the other: {others:?}");
            for end in 0..2 {
                match self.ends[end].poll() {
                    Ok(Some(completion)) => self.got[end].push_back(completion),
                    Ok(None) => std::thread::yield_now(),
                    Err(error) => self.failed[end] = Some(error),
                }
            }
        }
    }

    /// The bytes of the next message that end `i` receives, and the handle that it invalidates.
    pub(crate) fn message(&mut self, i: usize) -> (Vec<u8>, Option<Handle>) {
        match self.next(i) {
            Ok(Completion::Received { sink, len, invalidated }) => {
                (sink.into_buf(len).expect("the device lets go").to_vec(), invalidated)
            }
            other => panic!("no message: {other:?}"),
        }
    }

    pub(crate) fn send(&mut self, i: usize, bytes: &[u8]) {
        self.ends[i].post(WorkRequest::Send { gather: smallvec![region(bytes)], invalidate: None });
    }

    pub(crate) fn receives(&mut self, i: usize, n: usize) {
        self.receives_of(i, n, 4096);
    }

    pub(crate) fn receives_of(&mut self, i: usize, n: usize, len: usize) {
        let slabs = self.ends[i].slabs();
        for _ in 0..n {
            let slab = slabs.as_ref().and_then(|slabs| slabs.take());
            self.ends[i].post_recv(slab.map_or_else(|| sink(len), |slab| slab.into_sink(len)));
        }
    }

    /// Uses up the Receives that an adapter has posted by itself.
    fn use_up_early_receives(&mut self, i: usize) {
        let early = if self.adapter() { self.ends[i].limits().receives } else { 0 };
        self.receives(i, early as usize);
        for _ in 0..early {
            self.send(1 - i, b"early");
            assert_eq!(self.message(i).0, b"early");
        }
    }

    /// Exposes a sink of end `i`, and lets its peer know of it.
    fn sink_at(&mut self, i: usize, sink: Sink) -> Segment {
        let segment = self.ends[i].expose_sink(sink).unwrap();
        self.tell(i);
        segment
    }

    /// Exposes a source of end `i`, and lets its peer know of it.
    fn source_at(&mut self, i: usize, source: Region) -> Segment {
        let segment = self.ends[i].expose_source(source).unwrap();
        self.tell(i);
        segment
    }

    /// A peer learns of a handle from a message: by then, all that the device has to do for the handle is done.
    fn tell(&mut self, i: usize) {
        if self.adapter() {
            self.receives(1 - i, 1);
            self.send(i, b"a handle");
            assert_eq!(self.message(1 - i).0, b"a handle");
        }
    }

    /// Whether it is an adapter: it has memory and Receives of its own, and what a key names cannot be changed.
    fn adapter(&self) -> bool {
        self.ends[0].slabs().is_some()
    }

    /// Sends end 0 more messages than it has Receives.
    fn too_many(&mut self) {
        let receives = if self.adapter() { self.ends[0].limits().receives } else { 0 };
        (0..=receives).for_each(|_| self.send(1, b"unexpected"));
    }

    /// The error of end `i`, whatever comes before it.
    fn error(&mut self, i: usize) -> Option<Error> {
        loop {
            match self.next(i) {
                Ok(Completion::Received { .. }) => {}
                other => return other.err(),
            }
        }
    }
}

pub(crate) fn region(bytes: &[u8]) -> Region {
    Region::copy_from(bytes).unwrap()
}

pub(crate) fn sink(len: usize) -> Sink {
    Buf::with_capacity(len).unwrap().into_sink(len)
}

pub(crate) fn part(whole: Segment, at: u64, length: u32) -> Segment {
    Segment { length, offset: whole.offset + at, ..whole }
}

/// Checks every sentence of the contract that a pair can show.
pub(crate) fn check(make: Make) {
    messages_arrive_whole_and_in_order(make);
    a_message_may_be_longer_than_the_slabs_of_its_sender(make);
    a_write_is_placed_before_the_send_that_follows_it(make);
    reads_complete_in_order_with_the_right_bytes(make);
    a_read_is_not_complete_before_its_bytes_are_here(make);
    invalidated_memory_is_let_go(make);
    a_remote_invalidation_is_reported(make);
    kept_work_goes_out_as_it_was(make);
    a_detached_handle_goes_on_working(make);
    an_invalidation_ends_the_loan(make);
    receives_that_were_withdrawn_are_let_go_and_others_take_their_place(make);
    every_end_ends_all_loans(make);
    every_violation_ends_both_ends(make);
    a_close_comes_after_what_was_sent_before_it(make);
}

fn messages_arrive_whole_and_in_order(make: Make) {
    let mut pair = Ends::new(make());
    for (from, to) in [(0, 1), (1, 0)] {
        pair.receives(to, 3);
        let gather = vec![region(b"one"), region(b""), region(b", and more")];
        pair.ends[from].post(WorkRequest::Send { gather: gather.into(), invalidate: None });
        pair.send(from, &[7; 4096]);
        pair.send(from, b"three");
        assert_eq!(pair.message(to), (b"one, and more".to_vec(), None));
        assert_eq!(pair.message(to), (vec![7; 4096], None));
        assert_eq!(pair.message(to), (b"three".to_vec(), None));
    }
}

/// Adapters: the second end is made with Receives of 64 KiB, the first with shorter slabs.
fn a_message_may_be_longer_than_the_slabs_of_its_sender(make: Make) {
    let mut pair = Ends::new(make());
    let body: Vec<u8> = (0..40 << 10).map(|i: u32| (i % 251) as u8).collect();
    let (first, rest) = body.split_at(10_000);
    let mut lent = Program::new(rest);
    let known = pair.ends[0].slabs().and_then(|slabs| slabs.take());
    let mut known = known.unwrap_or_else(|| Buf::with_capacity(5).unwrap());
    known.extend(b"known").unwrap();
    let gathers = [
        vec![region(&body)],
        vec![region(b""), known.freeze(), region(first), lent.source()],
        body.chunks(1000).map(region).collect(),
    ];
    for gather in gathers {
        let message: Vec<u8> = gather.iter().flat_map(|piece| piece.iter().copied()).collect();
        pair.receives_of(1, 1, 64 << 10);
        pair.ends[0].post(WorkRequest::Send { gather: gather.into(), invalidate: None });
        assert!(pair.message(1).0 == message);
    }
    pair.ends[0].release_lent().unwrap();
    assert_eq!(lent.bytes(), rest);
}

fn a_write_is_placed_before_the_send_that_follows_it(make: Make) {
    let mut pair = Ends::new(make());
    let memory = sink(300_000);
    let target = pair.sink_at(0, memory.part(8, 200_000));
    assert_eq!(target.length, 200_000);
    pair.receives(0, 1);
    let body: Vec<u8> = (0..150_000u32).map(|i| (i % 241) as u8).collect();
    let gather = vec![region(&body[..70_001]), region(&body[70_001..])];
    pair.ends[1].post(WorkRequest::Write { gather: gather.into(), to: part(target, 50_000, 150_000) });
    pair.send(1, b"done");
    assert_eq!(pair.message(0).0, b"done");
    pair.ends[0].invalidate(target.handle).unwrap();
    let memory = memory.into_buf(300_000).expect("the device lets go");
    assert!(memory[50_008..200_008] == body && memory[200_008..].iter().all(|byte| *byte == 0));
}

fn reads_complete_in_order_with_the_right_bytes(make: Make) {
    let mut pair = Ends::new(make());
    let depth = u64::from(pair.ends[0].limits().read_depth);
    assert!(depth > 0, "the check needs a peer that serves Reads");
    let body: Vec<u8> = (0..150_000u32).map(|i| (i % 239) as u8).collect();
    let source = pair.source_at(1, region(&body));
    let memory = sink(100_000);
    let small = |id: u64| 60_000 + 16 * id as usize;
    let ids = 1..=2 * depth + 1;
    // A long Read first, then more short ones than may be outstanding.
    let long =
        WorkRequest::Read { id: WorkId(0), sink: memory.clone(), at: 0, from: part(source, 8, 60_000) };
    pair.ends[0].post(long);
    for id in ids.clone() {
        let from = part(source, id, 10);
        pair.ends[0].post(WorkRequest::Read { id: WorkId(id), sink: memory.clone(), at: small(id), from });
    }
    for expected in 0..=2 * depth + 1 {
        let next = pair.next(0);
        assert!(matches!(next, Ok(Completion::Read { id: WorkId(id) }) if id == expected), "{next:?}");
    }
    let memory = memory.into_buf(100_000).expect("the device lets go");
    assert!(memory[..60_000] == body[8..60_008]);
    for id in ids {
        assert_eq!(memory[small(id)..small(id) + 10], body[id as usize..id as usize + 10]);
    }
}

/// Not even when work that was posted after it is complete before it.
fn a_read_is_not_complete_before_its_bytes_are_here(make: Make) {
    let mut pair = Ends::new(make());
    let body: Vec<u8> = (0..900_000u32).map(|i| (i % 251) as u8).collect();
    let from = pair.source_at(1, region(&body));
    let memory = sink(900_000);
    pair.receives(1, 8);
    pair.ends[0].post(WorkRequest::Read { id: WorkId(3), sink: memory.clone(), at: 0, from });
    (0..8).for_each(|_| pair.send(0, b"meanwhile"));
    assert!(matches!(pair.next(0), Ok(Completion::Read { id: WorkId(3) })));
    assert!(memory.into_buf(900_000).expect("the device lets go")[..] == body);
    (0..8).for_each(|_| assert_eq!(pair.message(1).0, b"meanwhile"));
}

fn invalidated_memory_is_let_go(make: Make) {
    let mut pair = Ends::new(make());
    let memory = sink(64);
    let first = pair.sink_at(0, memory.clone());
    let second = pair.sink_at(0, memory.clone());
    assert_ne!(first.handle, second.handle);
    pair.ends[0].invalidate(first.handle).unwrap();
    let memory = memory.into_buf(64).expect_err("still exposed");
    pair.ends[0].invalidate(second.handle).unwrap();
    pair.ends[0].invalidate(second.handle).expect("twice is no error");
    memory.into_buf(64).expect("the device lets go");
    pair.receives(1, 1);
    pair.send(0, b"alive");
    assert_eq!(pair.message(1).0, b"alive");
}

fn a_remote_invalidation_is_reported(make: Make) {
    let mut pair = Ends::new(make());
    if !pair.ends[0].limits().remote_invalidation {
        return;
    }
    let memory = sink(64);
    let handle = pair.sink_at(0, memory.clone()).handle;
    pair.receives(0, 1);
    let gather = vec![region(b"reply")];
    pair.ends[1].post(WorkRequest::Send { gather: gather.into(), invalidate: Some(handle) });
    assert_eq!(pair.message(0), (b"reply".to_vec(), Some(handle)));
    memory.into_buf(64).expect("the device lets go");
}

fn kept_work_goes_out_as_it_was(make: Make) {
    let mut pair = Ends::new(make());
    let body: Vec<u8> = (0..150_000u32).map(|i| (i % 241) as u8).collect();
    let (mut text, mut data) = (Program::new(b", lent, "), Program::new(&body));
    let mut read = Program::new(&[0; 100]);
    let from = pair.source_at(0, region(&[5; 100]));
    let memory = sink(150_000);
    let target = pair.sink_at(0, memory.clone());
    pair.receives(0, 2);
    pair.ends[1].post(WorkRequest::Write { gather: smallvec![data.source()], to: target });
    let gather = vec![region(b"own"), text.source(), region(b"own")];
    pair.ends[1].post(WorkRequest::Read { id: WorkId(1), sink: read.sink(), at: 0, from });
    pair.ends[1].post(WorkRequest::Send { gather: gather.into(), invalidate: None });
    pair.send(1, b"end");
    let copied = pair.ends[1].release_lent().unwrap();
    assert!(copied <= 150_008, "{copied} bytes copied");
    assert_eq!(pair.ends[1].release_lent().unwrap(), 0);
    text.bytes().fill(b'!');
    data.bytes().fill(b'!');
    assert_eq!(pair.message(0).0, b"own, lent, own");
    assert_eq!(pair.message(0).0, b"end");
    assert!(matches!(pair.next(1), Ok(Completion::Read { id: WorkId(1) })));
    // The release waited for the adapter.
    assert_eq!(read.bytes(), if pair.adapter() { [5; 100] } else { [0; 100] });
    pair.ends[0].invalidate(target.handle).unwrap();
    assert!(memory.into_buf(150_000).unwrap()[..] == body);
}

fn a_detached_handle_goes_on_working(make: Make) {
    let mut pair = Ends::new(make());
    let (mut source, mut target) = (Program::new(b"asked for"), Program::new(&[7; 9]));
    let from = pair.source_at(0, source.source());
    let to = pair.sink_at(0, target.sink());
    if pair.adapter() {
        let error = pair.ends[0].detach(to.handle).expect_err("a key names what it names");
        assert_eq!(error.kind(), Kind::Timeout);
        let own = pair.sink_at(0, sink(9));
        return pair.ends[0].detach(own.handle).expect("nobody waits for that memory");
    }
    pair.ends[0].detach(to.handle).unwrap();
    pair.ends[0].detach(from.handle).unwrap();
    pair.ends[0].detach(from.handle).expect("twice is no error");
    source.bytes().fill(0);
    assert_eq!(target.bytes(), [7; 9]);
    let memory = sink(9);
    pair.ends[1].post(WorkRequest::Write { gather: smallvec![region(b"unwanted.")], to });
    pair.ends[1].post(WorkRequest::Read { id: WorkId(1), sink: memory.clone(), at: 0, from });
    pair.next(1).unwrap();
    assert_eq!(memory.into_buf(9).unwrap()[..], *b"asked for");
    assert_eq!(target.bytes(), [7; 9]);
    pair.ends[0].invalidate(from.handle).unwrap();
    pair.ends[0].invalidate(to.handle).unwrap();
    pair.receives(1, 1);
    pair.send(0, b"alive");
    assert_eq!(pair.message(1).0, b"alive");
}

fn an_invalidation_ends_the_loan(make: Make) {
    let mut pair = Ends::new(make());
    let remote = pair.ends[0].limits().remote_invalidation;
    for sending in [false, true] {
        let mut program = Program::new(&[1; 100]);
        let handle = if sending {
            pair.source_at(0, program.source()).handle
        } else {
            pair.sink_at(0, program.sink()).handle
        };
        if remote {
            pair.receives(0, 1);
            pair.ends[1].post(WorkRequest::Send { gather: smallvec![], invalidate: Some(handle) });
            assert_eq!(pair.message(0).1, Some(handle));
        } else {
            pair.ends[0].invalidate(handle).unwrap();
        }
        assert!(program.is_back());
    }
}

fn receives_that_were_withdrawn_are_let_go_and_others_take_their_place(make: Make) {
    let mut pair = Ends::new(make());
    if pair.adapter() {
        pair.receives(0, 2);
        return assert_eq!(pair.ends[0].withdraw(), 0);
    }
    pair.receives(0, 1);
    pair.send(1, b"before");
    assert_eq!(pair.message(0).0, b"before");
    let short = sink(10);
    pair.ends[0].post_recv(short.clone());
    pair.receives(0, 1);
    assert_eq!((pair.ends[0].withdraw(), pair.ends[0].withdraw()), (2, 0));
    short.into_buf(10).expect("the device lets go");
    pair.ends[0].post_recv(sink(100));
    pair.send(1, &[7; 100]);
    assert_eq!(pair.message(0).0, [7; 100]);
}

fn every_end_ends_all_loans(make: Make) {
    type End = fn(&mut Ends);
    let ends: [(&str, End); 3] = [
        ("close", |pair| pair.ends[0].close()),
        ("drop", |pair| pair.ends[0] = Box::new(super::pair(pair.ends[1].limits()).0)),
        ("the peer's end", |pair| {
            // Software has no Receive for the Send below.
            if pair.adapter() {
                pair.ends[1].close();
            }
            while pair.next(0).is_ok() {}
        }),
    ];
    for (what, end) in ends {
        let mut pair = Ends::new(make());
        let mut programs: Vec<Program> = (0..5).map(|_| Program::new(&[5; 100_000])).collect();
        let [source, target, sent, written, read] = &mut programs[..] else { unreachable!() };
        let from = pair.source_at(1, region(&[6; 100_000]));
        let to = pair.sink_at(1, sink(100_000));
        pair.source_at(0, source.source());
        pair.sink_at(0, target.sink());
        pair.ends[0].post(WorkRequest::Write { gather: smallvec![written.source()], to });
        pair.ends[0].post(WorkRequest::Read { id: WorkId(1), sink: read.sink(), at: 0, from });
        pair.ends[0].post(WorkRequest::Send { gather: smallvec![sent.source()], invalidate: None });
        end(&mut pair);
        assert!(programs.iter().all(Program::is_back), "{what}");
    }
}

fn every_violation_ends_both_ends(make: Make) {
    type Violation = fn(&mut Ends);
    fn write(pair: &mut Ends, to: Segment) {
        let gather = vec![region(&vec![1; to.length as usize])];
        pair.ends[1].post(WorkRequest::Write { gather: gather.into(), to });
    }
    fn read(pair: &mut Ends, from: Segment) {
        pair.ends[1].post(WorkRequest::Read { id: WorkId(1), sink: sink(4096), at: 0, from });
    }
    let violations: [(&str, Violation); 9] = [
        ("no Receive", Ends::too_many),
        ("a Receive that is too short", |pair| {
            pair.use_up_early_receives(0);
            pair.receives_of(0, 1, 10);
            pair.send(1, &[0; 11]);
        }),
        ("a Write beyond the memory", |pair| {
            let target = pair.sink_at(0, sink(100));
            write(pair, part(target, 1, 100));
        }),
        ("a Write before the memory", |pair| {
            let target = pair.sink_at(0, sink(100));
            write(pair, Segment { offset: target.offset.wrapping_sub(1), length: 50, ..target });
        }),
        ("a Write at the end of the address space", |pair| {
            let target = pair.sink_at(0, sink(100));
            write(pair, Segment { offset: u64::MAX - 9, length: 50, ..target });
        }),
        ("a Write to a source", |pair| {
            let source = pair.source_at(0, region(&[0; 100]));
            write(pair, source);
        }),
        ("a Write after the invalidation", |pair| {
            let target = pair.sink_at(0, sink(100));
            pair.ends[0].invalidate(target.handle).unwrap();
            write(pair, target);
        }),
        ("a Read of a sink", |pair| {
            let target = pair.sink_at(0, sink(100));
            read(pair, target);
        }),
        ("a Read beyond the memory", |pair| {
            let source = pair.source_at(0, region(&[0; 100]));
            read(pair, part(source, 100, 1));
        }),
    ];
    for (what, violate) in violations {
        let mut pair = Ends::new(make());
        // The siw driver, which has no windows, lets a peer read what it may only write.
        if what == "a Read of a sink" && pair.adapter() && !pair.ends[0].limits().remote_invalidation {
            continue;
        }
        let memory = sink(64);
        let posted = sink(64);
        let handle = pair.sink_at(0, memory.clone()).handle;
        violate(&mut pair);
        for end in [0, 1] {
            let error = pair.error(end).expect(what);
            // RFC 8166 §4.5.4 and the contract: the error is permanent, and no handle works.
            assert_eq!(pair.ends[end].poll().expect_err(what).text(), error.text());
        }
        pair.ends[0].invalidate(handle).unwrap();
        memory.into_buf(64).expect("a dead device holds no memory");
        pair.ends[0].post_recv(posted.clone());
        posted.into_buf(64).expect("a dead device takes no Receive");
    }
}

fn a_close_comes_after_what_was_sent_before_it(make: Make) {
    let mut pair = Ends::new(make());
    if pair.adapter() {
        // With iWARP the active end speaks first.
        pair.receives(1, 1);
        pair.send(0, b"hello");
        assert_eq!(pair.message(1).0, b"hello");
    }
    pair.receives(0, 2);
    pair.send(1, b"last words");
    let deadline = Instant::now() + Duration::from_secs(20);
    while !pair.ends[1].flush().unwrap() {
        assert!(Instant::now() < deadline, "does not flush");
    }
    pair.ends[1].close();
    assert_eq!(pair.message(0).0, b"last words");
    assert_eq!(pair.next(0).expect_err("closed").kind(), Kind::ConnectionLost);
    assert_eq!(pair.ends[0].poll().expect_err("closed").kind(), Kind::ConnectionLost);
}
