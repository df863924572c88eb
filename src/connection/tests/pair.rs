//! The pair that the engine's tests drive: a requester, a responder, and what lies between them.
//!
//! Every Send, Read and Write is one step; after every step the rules that hold at any time are checked (see
//! [`Pair::check`] and [`Pair::inspect`]). Faults are switches of the pair: hold Sends or Reads back, lose replies, let
//! the device fail, cut the connection at the n-th step.
//!
//! Rules that are checked here, in every test: rule 5, rule 6, rule 8, rule 12, rule 15, rule 17, rule 22, rule 23,
//! rule 24, rule 25, rule 26, rule 27, rule 28, rule 30, rule 37, rule 56, rule 63, rule 100, rule 106.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}
pub use Side::{Client, Server};

pub enum Exposed {
    Source(Region),
    Sink(Sink),
}

/// What a device has of its own: handles and Receives.
pub struct Device {
    pub next: u32,
    pub exposed: BTreeMap<u32, Exposed>,
    pub invalidated: Vec<Handle>,
    pub receives: u32,
    pub max_segment: usize,
    pub read_depth: u32,
    /// Exposures that succeed before the next ones fail.
    pub exposures_left: u32,
    pub fail_invalidate: bool,
    /// Handles that the peer has read, and whether the device tells.
    pub read: BTreeSet<u32>,
    pub tells_reads: bool,
}

impl Device {
    pub fn expose(&mut self, len: usize, exposed: Exposed) -> Result<Segment, Error> {
        assert!(len > 0 && len <= self.max_segment, "a segment of {len} bytes");
        if self.exposures_left == 0 {
            return Err(Error::new(Kind::Os(libc::ENOMEM), "no handle left"));
        }
        self.exposures_left -= 1;
        self.next = self.next.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        let handle = self.next;
        assert!(self.exposed.insert(handle, exposed).is_none());
        Ok(Segment { handle: Handle(handle), length: len as u32, offset: offset_of(handle) })
    }

    /// The memory that a peer names, if it may.
    pub fn access(&self, segment: Segment) -> Option<(&Exposed, usize)> {
        let exposed = self.exposed.get(&segment.handle.0)?;
        let len = match exposed {
            Exposed::Source(region) => region.len(),
            Exposed::Sink(sink) => sink.len(),
        };
        let at = usize::try_from(segment.offset.checked_sub(offset_of(segment.handle.0))?).ok()?;
        (at.checked_add(segment.length as usize)? <= len).then_some((exposed, at))
    }
}

/// Offsets are opaque: not zero, and different for every handle.
pub fn offset_of(handle: u32) -> u64 {
    u64::from(handle) << 20 | 0x7
}

impl Registrar for Device {
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        self.expose(region.len(), Exposed::Source(region))
    }
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        self.expose(sink.len(), Exposed::Sink(sink))
    }
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        if self.fail_invalidate {
            return Err(Error::new(Kind::Os(libc::EIO), "cannot invalidate"));
        }
        self.exposed.remove(&handle.0);
        self.invalidated.push(handle);
        Ok(())
    }
    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        match self.exposed.get_mut(&handle.0) {
            Some(Exposed::Source(region)) => *region = Region::copy_from(region)?,
            Some(Exposed::Sink(sink)) => *sink = Buf::with_capacity(sink.len())?.into_sink(sink.len()),
            None => {}
        }
        Ok(())
    }
    fn was_read(&self, handle: Handle) -> Option<bool> {
        self.tells_reads.then(|| self.read.contains(&handle.0))
    }
    fn withdraw(&mut self) -> usize {
        0
    }
    fn max_segment(&self) -> usize {
        self.max_segment
    }
    fn read_depth(&self) -> u32 {
        self.read_depth
    }
}

/// One side: its engine, its device and the work that the device has not done yet.
pub struct End {
    pub engine: Connection,
    pub device: Device,
    pub settings: Settings,
    pub sends: VecDeque<WorkRequest>,
    pub reads: VecDeque<WorkRequest>,
    /// Why the engine asked for the end of the connection.
    pub closes: Vec<Error>,
}

impl End {
    pub fn ask(&mut self, credits: u32) -> u32 {
        self.engine.ask(credits, &mut self.device)
    }
}

/// What a test did with a call, and how it ended.
pub struct Made {
    pub len: usize,
    pub reply: usize,
    pub one_way: bool,
    pub posted: bool,
    pub abandoned: bool,
    pub outcome: Option<Result<Vec<u8>, Error>>,
    /// What its header named.
    pub handles: Vec<Handle>,
}

#[derive(Clone, Copy)]
pub struct Setup {
    pub client: Settings,
    pub server: Settings,
    pub max_segment: usize,
    pub read_depth: u32,
}

pub const SETTINGS: Settings = Settings {
    credits: 4,
    receives: u32::MAX,
    reverse_chunks: true,
    inline: 1024,
    versions: Versions::ONE,
    receive: 1024,
    receive_max: 1024,
    first_xid: 0x7000_0000,
    max_call: 1 << 20,
    many_chunks: false,
    remote_invalidation: false,
};
pub const SETUP: Setup = Setup { client: SETTINGS, server: SETTINGS, max_segment: 1 << 20, read_depth: 16 };

pub struct Pair {
    pub memory: Arc<Memory>,
    pub client: End,
    pub server: End,
    pub hold_calls: bool,
    pub hold_replies: bool,
    pub hold_reads: bool,
    pub lose_replies: bool,
    /// Cut the connection when this many steps are done.
    pub cut_at: Option<usize>,
    pub steps: usize,
    pub cut: bool,
    pub closing: bool,
    /// Foreign bytes were injected: the peer can no longer be assumed honest.
    pub foreign: bool,
    /// Messages have no room for a header in front.
    pub cramped: bool,
    pub made: BTreeMap<u32, Made>,
    /// Calls posted and, as far as the requester can know, not done at the responder: in the order of their Sends.
    pub outstanding: Vec<u32>,
    pub granted: u32,
    /// Calls delivered and not answered, by XID.
    pub unanswered: BTreeMap<u32, u32>,
    /// Requests handed up, in order.
    pub handed: Vec<Request>,
    /// Every Send so far.
    pub wire: Vec<(Side, Vec<u8>)>,
}

impl Pair {
    pub fn new() -> Pair {
        Pair::with(SETUP)
    }

    pub fn with(setup: Setup) -> Pair {
        let memory = Memory::new(setup.client.inline.max(setup.server.inline), 1 << 20, 1 << 26);
        let bindings = bindings();
        let end = |role, settings: Settings, peer: Settings, seed| End {
            engine: Connection::new(role, settings, sizes(peer), memory.clone(), bindings.clone()),
            device: Device {
                next: seed,
                exposed: BTreeMap::new(),
                invalidated: Vec::new(),
                receives: 0,
                max_segment: setup.max_segment,
                read_depth: setup.read_depth,
                exposures_left: u32::MAX,
                fail_invalidate: false,
                read: BTreeSet::new(),
                tells_reads: true,
            },
            settings,
            sends: VecDeque::new(),
            reads: VecDeque::new(),
            closes: Vec::new(),
        };
        let client = end(Role::Client, setup.client, setup.server, 1);
        let server = end(Role::Server, setup.server, setup.client, 2);
        let mut pair = Pair {
            memory,
            client,
            server,
            hold_calls: false,
            hold_replies: false,
            hold_reads: false,
            lose_replies: false,
            cut_at: None,
            steps: 0,
            cut: false,
            closing: false,
            foreign: false,
            cramped: false,
            made: BTreeMap::new(),
            outstanding: Vec::new(),
            granted: 1,
            unanswered: BTreeMap::new(),
            handed: Vec::new(),
            wire: Vec::new(),
        };
        pair.drain(Client);
        pair.drain(Server);
        pair
    }

    /// A pair whose client knows the grant already.
    pub fn warm(setup: Setup) -> Pair {
        let mut pair = Pair::with(setup);
        pair.call(0xffff_fff0, 40, 40);
        pair.drive();
        assert_eq!(pair.client.engine.granted(), setup.server.credits);
        pair.wire.clear();
        pair
    }

    pub fn end(&mut self, side: Side) -> &mut End {
        match side {
            Client => &mut self.client,
            Server => &mut self.server,
        }
    }

    pub fn buf(&self, bytes: &[u8]) -> Buf {
        let cramped = || Buf::with_capacity(bytes.len());
        let mut buf = if self.cramped { cramped().unwrap() } else { self.memory.message().unwrap() };
        buf.extend(bytes).unwrap();
        buf
    }

    // ---- what a test does

    /// A call of `len` bytes whose reply will have `reply` bytes, and may have no more.
    pub fn call(&mut self, xid: u32, len: usize, reply: usize) {
        self.start(xid, len, reply, reply_of(reply));
    }

    pub fn one_way(&mut self, xid: u32, len: usize) {
        self.start(xid, len, 0, Expect::Nothing);
    }

    pub fn start(&mut self, xid: u32, len: usize, reply: usize, expect: Expect) {
        self.tick();
        let one_way = matches!(expect, Expect::Nothing);
        let message = self.buf(&call_message(xid, len, reply, one_way));
        self.note(xid, len, reply, one_way);
        let End { engine, device, .. } = &mut self.client;
        if let Err(error) = engine.call(Xid(xid), message, expect, device) {
            assert!(engine.closed().is_some(), "{error}");
            assert_eq!(error.kind(), Kind::NotSent);
            self.made.get_mut(&xid).unwrap().outcome = Some(Err(error));
        }
        self.drain(Client);
        self.check();
    }

    /// The call that is made next.
    pub fn note(&mut self, xid: u32, len: usize, reply: usize, one_way: bool) {
        let made =
            Made { len, reply, one_way, posted: false, abandoned: false, outcome: None, handles: Vec::new() };
        assert!(self.made.insert(xid, made).is_none(), "XID {xid} is used twice in a test");
    }

    pub fn resume(&mut self) {
        self.tick();
        let End { engine, device, .. } = &mut self.client;
        engine.resume(device);
        self.drain(Client);
        self.check();
    }

    pub fn abandon(&mut self, xid: u32) {
        self.tick();
        let made = self.made.get_mut(&xid).unwrap();
        made.abandoned |= made.outcome.is_none();
        let End { engine, device, .. } = &mut self.client;
        engine.abandon(Xid(xid), device);
        self.drain(Client);
        self.check();
    }

    /// Takes the oldest request up. Returns false when none is ready.
    pub fn take(&mut self) -> bool {
        if !self.server.engine.request_ready() {
            assert!(self.server.engine.poll_request().is_none());
            return false;
        }
        self.tick();
        let Some(request) = self.server.engine.poll_request() else {
            assert!(self.closing, "a ready request was not handed up");
            return false;
        };
        self.drain(Server);
        if !self.foreign {
            let made = &self.made[&request.xid.0];
            let sent = call_message(request.xid.0, made.len, made.reply, made.one_way);
            assert!(bytes(&request.message) == sent, "call {} was changed on its way", request.xid);
        }
        self.handed.push(request);
        self.check();
        true
    }

    /// Answers, or discards, as the call asks for it.
    pub fn answer(&mut self, at: usize) -> Result<(), Error> {
        self.tick();
        let Request { id, xid, message, .. } = self.handed.remove(at);
        let call = bytes(&message);
        let word = |at: usize| call.get(at..at + 4).map(|w| u32::from_be_bytes(w.try_into().unwrap()));
        drop(message);
        let one_way = word(16) == Some(1);
        let len = match self.made.get(&xid.0) {
            Some(made) => made.reply,
            // A header that was tampered with may move the length that is asked for.
            None => word(12).map_or(24, |len| (len as usize).clamp(4, 1 << 17)),
        };
        let result = if one_way {
            self.answered(xid.0);
            self.server.engine.discard(id);
            Ok(())
        } else {
            let reply = self.buf(&reply_message(xid.0, len));
            self.server.engine.reply(id, reply)
        };
        self.drain(Server);
        self.check();
        result
    }

    /// Answers a one-way call all the same.
    pub fn answer_all_the_same(&mut self, at: usize, len: usize) {
        self.tick();
        let Request { id, xid, .. } = self.handed.remove(at);
        let reply = self.buf(&reply_message(xid.0, len));
        self.server.engine.reply(id, reply).unwrap();
        self.drain(Server);
        self.settle();
    }

    /// The request gets no answer, ever.
    pub fn discard(&mut self, at: usize) {
        self.tick();
        let Request { id, xid, .. } = self.handed.remove(at);
        self.answered(xid.0);
        self.server.engine.discard(id);
        self.drain(Server);
        self.check();
    }

    /// The dispatch routine of a request returns without a reply.
    pub fn defer(&mut self, at: usize) {
        self.tick();
        self.server.engine.defer(self.handed[at].id);
        self.drain(Server);
        self.check();
    }

    /// Delivers the oldest Send or Write of a side. Returns false when there is none.
    pub fn deliver(&mut self, from: Side) -> bool {
        let Some(request) = self.end(from).sends.pop_front() else { return false };
        self.tick();
        if self.closing {
            return false;
        }
        match request {
            WorkRequest::Write { gather, to } => {
                let data = bytes(&gather);
                let placed = match self.client.device.access(to) {
                    Some((Exposed::Sink(sink), at)) => sink.place(at, &data),
                    _ => false,
                };
                if !placed {
                    self.close(Error::new(Kind::ConnectionLost, "remote access error"));
                }
            }
            WorkRequest::Send { gather, invalidate } => {
                let message = bytes(&gather);
                drop(gather);
                match from {
                    Client => self.deliver_to(Server, &message),
                    Server if self.lose_replies => {}
                    Server => {
                        if let Some(handle) = invalidate {
                            let known = self.client.device.exposed.remove(&handle.0).is_some();
                            assert!(known, "{handle:?} is not exposed and cannot be invalidated");
                        }
                        self.deliver_with(Client, &message, invalidate);
                    }
                }
            }
            WorkRequest::Read { .. } => unreachable!("Reads have a queue of their own"),
        }
        self.check();
        true
    }

    pub fn deliver_to(&mut self, to: Side, message: &[u8]) {
        self.deliver_with(to, message, None);
    }

    /// `invalidated`: the handle that the device of the receiver has invalidated with it.
    pub fn deliver_with(&mut self, to: Side, message: &[u8], invalidated: Option<Handle>) {
        match (to, header::decode(message, Versions::ONE)) {
            (Client, Ok(header)) => {
                if !matches!(header.body, Body::Error(_)) {
                    self.granted = header.credits.0.max(1);
                }
                // The answered call is done, and so are the one-way calls before it.
                if let Some(at) = self.outstanding.iter().position(|xid| *xid == header.xid.0) {
                    let made = &self.made;
                    let rest = self.outstanding.split_off(at);
                    self.outstanding.retain(|xid| !made[xid].one_way);
                    self.outstanding.extend(&rest[1..]);
                }
            }
            (Server, Ok(header)) => *self.unanswered.entry(header.xid.0).or_default() += 1,
            (_, Err(_)) => {}
        }
        let buf = self.buf(message);
        let End { engine, device, settings, .. } = self.end(to);
        assert!(device.receives > 0, "a Send without a posted Receive");
        assert!(message.len() <= settings.inline, "a Send of {} bytes overruns the Receive", message.len());
        device.receives -= 1;
        engine.handle_receive(buf, invalidated, device);
        self.drain(to);
    }

    /// Does the oldest RDMA Read of the responder. Returns false when there is none.
    pub fn read(&mut self) -> bool {
        let Some(request) = self.server.reads.pop_front() else { return false };
        self.tick();
        if self.closing {
            return false;
        }
        let WorkRequest::Read { id, sink, at, from } = request else { unreachable!() };
        let placed = match self.client.device.access(from) {
            Some((Exposed::Source(region), start)) => {
                sink.place(at, &region.slice(start, from.length as usize))
            }
            _ => false,
        };
        drop(sink);
        if placed {
            self.client.device.read.insert(from.handle.0);
            self.server.engine.handle_read(id);
            self.drain(Server);
        } else {
            self.close(Error::new(Kind::ConnectionLost, "remote access error"));
        }
        self.check();
        true
    }

    /// Moves one thing that may move. Returns false when nothing does.
    pub fn step(&mut self) -> bool {
        (!self.hold_calls && self.deliver(Client))
            || (!self.hold_reads && self.read())
            || (!self.hold_replies && self.deliver(Server))
    }

    /// Moves everything that may move, and serves.
    pub fn drive(&mut self) {
        while self.step() || self.serve() {}
    }

    /// Moves everything that may move, and serves nothing.
    pub fn settle(&mut self) {
        while self.step() {}
    }

    pub fn serve(&mut self) -> bool {
        if !self.take() {
            return false;
        }
        // A reply that fits nowhere is an outcome, which the caller of the other side sees.
        let _ = self.answer(self.handed.len() - 1);
        true
    }

    /// Hands a side bytes that its peer's engine would not send.
    pub fn inject(&mut self, to: Side, message: &[u8]) {
        self.foreign = true;
        self.deliver_to(to, message);
        self.check();
    }

    pub fn close(&mut self, error: Error) {
        if self.closing {
            return;
        }
        self.closing = true;
        for side in [Client, Server] {
            let end = self.end(side);
            end.sends.clear();
            end.reads.clear();
            end.engine.handle_closed(error.clone());
            end.engine.handle_closed(Error::new(Kind::Protocol, "a second close is ignored"));
            assert_eq!(end.engine.closed().unwrap().text(), error.text());
            // What a dead queue pair does.
            end.device.exposed.clear();
            self.drain(side);
        }
        assert!(self.client.engine.is_idle() && self.client.engine.requester.waiting().is_empty());
        // Requests that had arrived before are still handed up; nothing waits for bytes any more.
        assert!(self.server.engine.responder.all_ready());
    }

    pub fn tick(&mut self) {
        self.steps += 1;
        if self.cut_at.is_some_and(|at| self.steps >= at) && !self.closing {
            self.cut = true;
            self.close(Error::new(Kind::ConnectionLost, "cut"));
        }
    }

    /// How the call ended; panics when it has not.
    pub fn outcome(&self, xid: u32) -> &Result<Vec<u8>, Error> {
        self.made[&xid].outcome.as_ref().unwrap_or_else(|| panic!("call {xid} has not ended"))
    }

    pub fn pending(&self, xid: u32) -> bool {
        self.made[&xid].outcome.is_none()
    }

    pub fn failure(&self, xid: u32) -> Kind {
        self.outcome(xid).as_ref().expect_err("the call should have failed").kind()
    }

    pub fn succeeded(&self, xid: u32) {
        if let Err(error) = self.outcome(xid) {
            panic!("call {xid}: {error}");
        }
    }

    /// The newest Send of a side.
    pub fn last(&self, side: Side) -> &[u8] {
        &self.wire.iter().rev().find(|(from, _)| *from == side).expect("no Send").1
    }

    pub fn sends(&self, side: Side) -> usize {
        self.wire.iter().filter(|(from, _)| *from == side).count()
    }

    /// One good call must still get through.
    pub fn still_serves(&mut self, xid: u32) {
        self.hold_calls = false;
        self.hold_reads = false;
        self.hold_replies = false;
        self.call(xid, 2000, 3000);
        self.drive();
        assert!(*self.outcome(xid).as_ref().unwrap() == reply_message(xid, 3000));
    }

    // ---- what must hold at any time

    pub fn drain(&mut self, side: Side) {
        while let Some(output) = self.end(side).engine.poll_output() {
            assert!(!self.closing || matches!(output, Output::Done { .. }), "{output:?} after the close");
            match output {
                Output::Receive(_) => self.end(side).device.receives += 1,
                Output::Post(request) => self.post(side, request),
                Output::Done { xid, outcome } => {
                    assert_eq!(side, Client, "a responder has no calls");
                    self.done(xid.0, outcome.map(|reply| reply.pieces));
                }
                Output::Close(error) => {
                    self.end(side).closes.push(error.clone());
                    self.close(error);
                }
            }
        }
    }

    pub fn post(&mut self, side: Side, request: WorkRequest) {
        // rule 5: only the responder moves data, and it exposes nothing.
        assert!(
            side == Server || matches!(request, WorkRequest::Send { .. }),
            "a requester posts {request:?}"
        );
        match &request {
            WorkRequest::Read { sink, at, from, .. } => {
                assert!(at + from.length as usize <= sink.len() && from.length > 0);
                assert!(from.length as usize <= self.server.device.max_segment);
                return self.server.reads.push_back(request);
            }
            WorkRequest::Write { gather, to } => {
                assert_eq!(gather.iter().map(|r| r.len()).sum::<usize>(), to.length as usize);
                assert!(to.length > 0 && to.length as usize <= self.server.device.max_segment);
                return self.server.sends.push_back(request);
            }
            WorkRequest::Send { gather, .. } => {
                let message = bytes(gather);
                self.inspect(side, &message);
                self.wire.push((side, message));
            }
        }
        self.end(side).sends.push_back(request);
    }

    pub fn inspect(&mut self, side: Side, message: &[u8]) {
        // rule 12: the threshold of the direction bounds the whole Send.
        let (send, _) = self.end(side).engine.thresholds();
        assert!(send <= self.client.settings.inline.min(self.server.settings.inline));
        assert!(message.len() <= send, "a Send of {} bytes over the threshold of {send}", message.len());
        // rule 8, rule 15, rule 17: what was sent can be decoded, is of version 1 and of a procedure in use.
        let header = header::decode(message, Versions::ONE).unwrap();
        assert!(!matches!(header.body, Body::Msgp | Body::Done));
        // rule 22, rule 25: what is asked for and granted is never 0 and never moves with the load.
        assert_eq!(header.credits.0, self.end(side).settings.credits.max(1));
        // rule 6: one XID for header and message.
        check_xid(&header);
        let xid = header.xid.0;
        match side {
            Client => {
                assert!(
                    !matches!(header.body, Body::Error(_)),
                    "rule 63: a requester never sends RDMA_ERROR"
                );
                let made = self.made.get_mut(&xid).unwrap();
                assert!(!made.posted, "call {xid} was sent twice");
                made.posted = true;
                if let Body::Msg { chunks, .. } | Body::Nomsg { chunks } = header.body {
                    made.handles.extend(chunks.reads().map(|read| read.target.handle));
                    made.handles.extend(chunks.reply().iter().flat_map(|c| c.iter()).map(|s| s.handle));
                    made.handles.extend(chunks.writes().flat_map(|c| c.iter()).map(|s| s.handle));
                }
                self.outstanding.push(xid);
                if self.foreign {
                    return;
                }
                // rule 23, rule 24, rule 30: never more than the lower of what was asked for and granted.
                let limit = self.client.settings.credits.max(1).min(self.granted);
                let under_way = self.outstanding.len();
                assert!(under_way <= limit as usize, "{under_way} calls under way, {limit} allowed");
            }
            Server => {
                // rule 28: a responder answers, each Call once at most, and says nothing unasked.
                self.answered(xid);
                if let Body::Msg { chunks, .. } | Body::Nomsg { chunks } = header.body {
                    // rule 56: no Read list in a reply.
                    assert_eq!(chunks.read_count(), 0);
                }
                // rule 26, rule 37: what is granted is there.
                let End { engine, device, settings, .. } = &self.server;
                let working = engine.responder.working();
                assert!(device.receives as usize + working >= settings.credits as usize);
            }
        }
    }

    pub fn answered(&mut self, xid: u32) {
        let count = self.unanswered.get_mut(&xid);
        match count {
            Some(count) if *count > 0 => *count -= 1,
            _ => assert!(self.foreign, "XID {xid} is answered, which nobody called"),
        }
    }

    pub fn done(&mut self, xid: u32, outcome: Result<Regions, Error>) {
        let made = self.made.get_mut(&xid).expect("the end of a call that nobody made");
        assert!(made.outcome.is_none(), "call {xid} ends twice");
        assert!(!made.abandoned, "call {xid} ends though nobody waits for it");
        if self.cut {
            let expected = if made.posted { Kind::ConnectionLost } else { Kind::NotSent };
            assert_eq!(outcome.as_ref().unwrap_err().kind(), expected, "call {xid}");
        }
        if !made.one_way && !self.client.device.fail_invalidate {
            // rule 100, rule 106: nothing of it is exposed any more when the upper layer sees its end.
            for handle in &made.handles {
                assert!(
                    !self.client.device.exposed.contains_key(&handle.0),
                    "call {xid} is exposed after its end"
                );
            }
        }
        let outcome = outcome.map(|regions| bytes(&regions));
        match &outcome {
            Ok(reply) if !self.foreign => {
                let expected = if made.one_way { Vec::new() } else { reply_message(xid, made.reply) };
                assert!(*reply == expected, "the reply to {xid} was changed on its way");
            }
            _ => {}
        }
        made.outcome = Some(outcome);
    }

    pub fn check(&self) {
        let Pair { client, server, .. } = self;
        assert!(server.device.exposed.is_empty() && server.device.next == 2, "a responder exposes nothing");
        assert!(client.engine.granted() >= 1);
        // Memory of pulled Calls is bounded, whatever a requester sends.
        let (counted, staged) = server.engine.responder.staged();
        assert!(self.closing || counted == staged);
        assert!(staged <= server.settings.max_call.next_multiple_of(4), "{staged} bytes are staged");
        if self.closing {
            assert!(client.device.exposed.is_empty(), "memory stays exposed after the end of the connection");
            return;
        }
        let window = &client.engine.common.window;
        let in_flight = window.in_flight();
        let counts = (in_flight as usize, window.abandoned() as usize);
        assert_eq!(client.engine.requester.counts(), counts);
        assert!(in_flight <= client.settings.credits.max(1));
        if self.foreign {
            return;
        }
        assert_eq!(client.engine.granted(), self.granted);
        assert_eq!(in_flight as usize, self.outstanding.len());
        // rule 27: every call under way finds a Receive for its reply.
        assert!(client.device.receives as usize >= self.outstanding.len());
        // What is exposed belongs to a call under way.
        let live: Vec<u32> =
            self.outstanding.iter().flat_map(|xid| &self.made[xid].handles).map(|handle| handle.0).collect();
        assert!(client.device.exposed.keys().all(|handle| live.contains(handle)));
        assert_eq!(client.device.exposed.len(), live.len());
    }
}

pub fn bindings() -> Arc<Registry> {
    Arc::new(Registry::built_in())
}

/// What a peer with these settings says about itself.
pub fn sizes(settings: Settings) -> PrivateData {
    let Settings { remote_invalidation, inline, .. } = settings;
    PrivateData { remote_invalidation, send_size: inline, receive_size: inline }
}

/// A reply of at most `max` bytes.
pub fn reply_of(max: usize) -> Expect {
    Expect::Reply { max, places: Vec::new() }
}

pub fn bytes(regions: &[Region]) -> Vec<u8> {
    regions.iter().map(|region| &region[..]).collect::<Vec<_>>().concat()
}

/// XID, CALL, the version of RPC, length of the reply, whether none is wanted, and a pattern: the beginning of a Call as it
/// stands before a credential, of a program that no binding knows.
pub fn call_message(xid: u32, len: usize, reply: usize, one_way: bool) -> Vec<u8> {
    assert!(len >= 4, "an RPC message holds its XID");
    let head = words(&[xid, 0, 2, reply as u32, u32::from(one_way)]);
    patterned(head, len, |at| (at as u32).wrapping_mul(7).wrapping_add(xid) as u8)
}

pub fn reply_message(xid: u32, len: usize) -> Vec<u8> {
    assert!(len >= 4, "an RPC message holds its XID");
    patterned(words(&[xid, 1]), len, |at| (at as u32).wrapping_mul(13).wrapping_sub(xid) as u8)
}

/// `head`, and a pattern up to `len` bytes: `byte` gives a byte from where it stands in the message, of which only the last eight
/// bits count. Without an optimiser most of the tests' time would go into asking for each byte.
pub fn patterned(head: Vec<u8>, len: usize, byte: impl Fn(usize) -> u8) -> Vec<u8> {
    let period: Vec<u8> = (head.len()..head.len() + 256).map(byte).collect();
    let rest = len.saturating_sub(head.len()).div_ceil(period.len());
    let mut message = [head, period.repeat(rest)].concat();
    message.truncate(len);
    message
}

/// XDR by hand, so that the tests do not lean on the encoder that they test.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

pub fn unwords(bytes: &[u8]) -> Vec<u32> {
    assert_eq!(bytes.len() % 4, 0);
    bytes.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect()
}

/// RDMA_MSG without chunks.
pub fn msg(xid: u32, credits: u32, payload: &[u8]) -> Vec<u8> {
    [words(&[xid, 1, credits, 0, 0, 0, 0]), payload.to_vec()].concat()
}

/// RDMA_NOMSG reply with a Reply chunk of these segments.
pub fn nomsg(xid: u32, credits: u32, reply: &[Segment]) -> Vec<u8> {
    [words(&[xid, 1, credits, 1, 0, 0, 1, reply.len() as u32]), segments(reply)].concat()
}

pub fn segments(list: &[Segment]) -> Vec<u8> {
    let words_of = |s: &Segment| [s.handle.0, s.length, (s.offset >> 32) as u32, s.offset as u32];
    words(&list.iter().flat_map(words_of).collect::<Vec<u32>>())
}

pub fn err_chunk(xid: u32) -> Vec<u8> {
    words(&[xid, 1, 9, 4, 2])
}

pub fn err_vers(xid: u32, version: u32, low: u32, high: u32) -> Vec<u8> {
    words(&[xid, version, 9, 4, 1, low, high])
}

/// The Reply chunk that the newest call offers.
pub fn offered(pair: &Pair) -> Vec<Segment> {
    let header = header::decode(pair.last(Client), Versions::ONE).unwrap();
    let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = header.body else { unreachable!() };
    chunks.reply().map(|chunk| chunk.iter().collect()).unwrap_or_default()
}

pub fn setup(credits: u32, inline: usize) -> Setup {
    let settings = Settings { credits, inline, ..SETTINGS };
    Setup { client: settings, server: settings, ..SETUP }
}

/// rule 6: one XID for header and message.
pub fn check_xid(header: &Header<'_>) {
    if let Body::Msg { payload, .. } = header.body {
        assert_eq!(first_xid(payload), Some(header.xid), "{header}");
    }
}
