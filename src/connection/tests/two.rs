//! Version Two: what two engines agree on, and its transport characteristics, as they change under traffic.
//!
//! [`Model`] joins two engines of any settings by devices that hold Receives of the sizes that they were posted with, oldest
//! first. At every step: a Send finds a Receive, and one that is long enough; it is of a version that both speak, and that its
//! Call was made in; nothing is sent after an offer; no more of the messages that no credit counts are under way than the rules
//! allow; a handle is invalidated only at an end that takes it.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use hex_literal::hex;

use super::pair::*;
use super::*;
use crate::connection::characteristics::Wish;
use crate::wire::characteristics::Operation;
use crate::wire::header::Body;

/// A device whose Receives have sizes.
struct Slots {
    device: Device,
    receives: VecDeque<usize>,
    /// It gives Receives back, all but this many of the oldest ones.
    keeps: Option<usize>,
}

impl Registrar for Slots {
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        self.device.expose_source(region)
    }
    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        self.device.expose_sink(sink)
    }
    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        self.device.invalidate(handle)
    }
    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        self.device.detach(handle)
    }
    fn was_read(&self, handle: Handle) -> Option<bool> {
        self.device.was_read(handle)
    }
    fn withdraw(&mut self) -> usize {
        let held = self.receives.len();
        self.receives.truncate(self.keeps.unwrap_or(held));
        held - self.receives.len()
    }
    fn max_segment(&self) -> usize {
        self.device.max_segment
    }
    fn read_depth(&self) -> u32 {
        self.device.read_depth
    }
}

struct Made {
    version: Option<u32>,
    outcome: Option<Result<Vec<u8>, Error>>,
}

struct Half {
    engine: Connection,
    slots: Slots,
    settings: Settings,
    sends: VecDeque<WorkRequest>,
    reads: VecDeque<WorkRequest>,
    made: BTreeMap<u32, Made>,
    handed: Vec<Request>,
    /// Versions of the Calls that were delivered here and are not answered, by XID.
    asked_in: BTreeMap<u32, u32>,
    /// What this end has sent that waits for a reply, by XID: its place in the order of Sends.
    sent: BTreeMap<u32, usize>,
    count: usize,
    /// The message without a reply that is under way: its place.
    unfunded: Option<usize>,
    /// REQ_XCHARs of this end without an answer, and what the peer owes it: UPD_XCHARs that settle one.
    requests: usize,
    owed: usize,
    /// It has received a message of Version Two.
    heard_two: bool,
    /// It has asked for shorter Receives, or changed what the reverse direction may have: calls may fail because of that.
    narrowed: bool,
    next: u32,
}

struct Model {
    memory: Arc<Memory>,
    halves: [Half; 2],
    wire: Vec<(Side, Vec<u8>)>,
    closing: bool,
}

const BOTH: Settings = Settings {
    versions: Versions::BOTH,
    receive: 4096,
    receive_max: 65_536,
    remote_invalidation: true,
    ..SETTINGS
};

fn other(side: Side) -> Side {
    if side == Client { Server } else { Client }
}

impl Model {
    fn new(client: Settings, server: Settings) -> Model {
        Model::with(client, server, [Some(0), Some(0)])
    }

    fn with(client: Settings, server: Settings, keeps: [Option<usize>; 2]) -> Model {
        let memory = Memory::new(4096, 1 << 20, 1 << 26);
        let half = |role, settings: Settings, peer: Settings, keeps, seed| Half {
            engine: Connection::new(role, settings, sizes(peer), memory.clone(), bindings()),
            slots: Slots {
                device: Device {
                    next: seed,
                    exposed: BTreeMap::new(),
                    invalidated: Vec::new(),
                    receives: 0,
                    max_segment: 20_000,
                    read_depth: 16,
                    exposures_left: u32::MAX,
                    fail_invalidate: false,
                    read: std::collections::BTreeSet::new(),
                    tells_reads: true,
                },
                receives: VecDeque::new(),
                keeps,
            },
            settings,
            sends: VecDeque::new(),
            reads: VecDeque::new(),
            made: BTreeMap::new(),
            handed: Vec::new(),
            asked_in: BTreeMap::new(),
            sent: BTreeMap::new(),
            count: 0,
            unfunded: None,
            requests: 0,
            owed: 0,
            heard_two: false,
            narrowed: false,
            next: 0,
        };
        let halves = [
            half(Role::Client, client, server, keeps[0], 1),
            half(Role::Server, server, client, keeps[1], 2),
        ];
        let mut model = Model { memory, halves, wire: Vec::new(), closing: false };
        model.drain(Client);
        model.drain(Server);
        model
    }

    fn half(&mut self, side: Side) -> &mut Half {
        &mut self.halves[side as usize]
    }

    fn engine(&self, side: Side) -> &Connection {
        &self.halves[side as usize].engine
    }

    fn buf(&self, bytes: &[u8]) -> Buf {
        let mut buf = self.memory.message().unwrap();
        buf.extend(bytes).unwrap();
        buf
    }

    fn call(&mut self, side: Side, len: usize, reply: usize) -> u32 {
        let half = self.half(side);
        half.next += 1;
        let xid = half.next;
        half.made.insert(xid, Made { version: None, outcome: None });
        let message = self.buf(&call_message(xid, len, reply, false));
        let Half { engine, slots, .. } = self.half(side);
        if let Err(error) = engine.call(Xid(xid), message, reply_of(reply), slots) {
            assert!(engine.closed().is_some(), "{error}");
            self.done(side, xid, Err(error));
        }
        self.drain(side);
        xid
    }

    fn take(&mut self, side: Side) -> bool {
        let Some(request) = self.half(side).engine.poll_request() else { return false };
        self.drain(side);
        self.half(side).handed.push(request);
        true
    }

    fn answer(&mut self, side: Side, at: usize) {
        let Request { id, xid, message, .. } = self.half(side).handed.remove(at);
        let call = bytes(&message);
        drop(message);
        let reply = u32::from_be_bytes(call[12..16].try_into().unwrap()) as usize;
        assert!(call == call_message(xid.0, call.len(), reply, false), "call {xid} was changed on its way");
        let reply = self.buf(&reply_message(xid.0, reply));
        // A reply that fits nowhere, or comes too late, is an outcome, which the caller of the other side sees.
        let _ = self.half(side).engine.reply(id, reply);
        self.drain(side);
    }

    fn request(&mut self, side: Side, what: Characteristic) -> Result<(), Error> {
        let now = self.engine(other(side)).characteristics().goal();
        if let Characteristic::ReceiveSize(bytes) = what {
            self.half(side).narrowed |= (bytes as usize) < now;
        }
        let result = self.half(side).engine.request(what);
        self.drain(side);
        result
    }

    fn raise(&mut self, side: Side, bytes: usize) -> Result<(), Error> {
        let Half { engine, slots, .. } = self.half(side);
        let result = engine.raise_receives(bytes, slots);
        self.drain(side);
        result
    }

    fn allow_chunks(&mut self, side: Side, allowed: bool) {
        self.half(side).narrowed = true;
        self.half(side).engine.set_reverse_chunks(allowed);
        self.drain(side);
    }

    /// Carries the oldest Send or Write of an end to the other one.
    fn deliver(&mut self, from: Side) -> bool {
        let Some(request) = self.half(from).sends.pop_front() else { return false };
        let to = other(from);
        match request {
            WorkRequest::Write { gather, to: place } => {
                let Some((Exposed::Sink(sink), at)) = self.halves[to as usize].slots.device.access(place)
                else {
                    panic!("a Write to {place}, which is not exposed");
                };
                assert!(sink.place(at, &bytes(&gather)));
            }
            WorkRequest::Send { gather, invalidate } => {
                let message = bytes(&gather);
                drop(gather);
                self.arrive(to, &message, invalidate);
            }
            WorkRequest::Read { .. } => unreachable!("Reads have a queue of their own"),
        }
        true
    }

    fn arrive(&mut self, to: Side, message: &[u8], invalidate: Option<Handle>) {
        let buf = self.buf(message);
        let half = self.half(to);
        let room = half.slots.receives.pop_front().expect("a Send finds a Receive");
        assert!(message.len() <= room, "a Send of {} bytes for a Receive of {room}", message.len());
        if let Some(handle) = invalidate {
            assert!(half.settings.remote_invalidation, "an end that takes no Send with Invalidate");
            assert!(half.slots.device.exposed.remove(&handle.0).is_some());
        }
        half.note_arrival(message);
        half.engine.handle_receive(buf, invalidate, &mut half.slots);
        half.engine.handle_quiet(&mut half.slots);
        self.drain(to);
    }

    fn read(&mut self, by: Side) -> bool {
        let Some(request) = self.half(by).reads.pop_front() else { return false };
        let WorkRequest::Read { id, sink, at, from } = request else { unreachable!() };
        let Some((Exposed::Source(region), start)) =
            self.halves[other(by) as usize].slots.device.access(from)
        else {
            panic!("a Read from {from}, which is not exposed");
        };
        assert!(sink.place(at, &region.slice(start, from.length as usize)));
        drop(sink);
        self.half(by).engine.handle_read(id);
        self.drain(by);
        true
    }

    fn step(&mut self) -> bool {
        !self.closing && [Client, Server].into_iter().any(|side| self.deliver(side) || self.read(side))
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    fn serve(&mut self, side: Side) -> bool {
        let any = self.take(side) || !self.half(side).handed.is_empty();
        if any {
            self.answer(side, 0);
        }
        any
    }

    fn drive(&mut self) {
        while self.step() || self.serve(Client) || self.serve(Server) {}
    }

    /// Calls until they have consumed every short Receive, and everything is settled.
    fn wash(&mut self) {
        for _ in 0..200 {
            let open = |half: &Half| {
                matches!(half.engine.characteristics().wish(), Some((_, Wish::Asked | Wish::Pending)))
            };
            if !self.halves.iter().any(|half| half.engine.characteristics().lags() || open(half)) {
                return;
            }
            self.call(Client, 16, 16);
            self.drive();
        }
    }

    fn close(&mut self, error: Error) {
        self.closing = true;
        for side in [Client, Server] {
            let half = self.half(side);
            half.sends.clear();
            half.reads.clear();
            half.engine.handle_closed(error.clone());
            half.slots.device.exposed.clear();
            self.drain(side);
        }
    }

    fn drain(&mut self, side: Side) {
        while let Some(output) = self.half(side).engine.poll_output() {
            assert!(!self.closing || matches!(output, Output::Done { .. }), "{output:?} after the close");
            match output {
                Output::Receive(bytes) => self.half(side).slots.receives.push_back(bytes),
                Output::Post(request @ WorkRequest::Read { .. }) => self.half(side).reads.push_back(request),
                Output::Post(request) => {
                    if let WorkRequest::Send { gather, .. } = &request {
                        let message = bytes(gather);
                        self.half(side).note_departure(side, &message);
                        let peer = self.half(other(side));
                        match operation(&message) {
                            Some(Operation::Response { pending, .. }) => {
                                peer.owed += usize::from(pending.contains(0));
                            }
                            Some(Operation::Update { settled: true, .. }) => {
                                assert!(peer.owed > 0, "an UPD_XCHAR settles what nobody asked for");
                                peer.owed -= 1;
                            }
                            _ => {}
                        }
                        self.wire.push((side, message));
                    }
                    self.half(side).sends.push_back(request);
                }
                Output::Done { xid, outcome } => {
                    self.done(side, xid.0, outcome.map(|regions| bytes(&regions)));
                }
                Output::Close(error) => {
                    self.close(error);
                }
            }
        }
    }

    fn done(&mut self, side: Side, xid: u32, outcome: Result<Vec<u8>, Error>) {
        let made = self.half(side).made.get_mut(&xid).expect("the end of a call that nobody made");
        assert!(made.outcome.is_none(), "call {xid} ends twice");
        if let Ok(reply) = &outcome {
            assert!(*reply == reply_message(xid, reply.len()), "the reply {xid} is another one's");
        }
        made.outcome = Some(outcome);
    }

    fn outcome(&self, side: Side, xid: u32) -> &Result<Vec<u8>, Error> {
        self.halves[side as usize].made[&xid].outcome.as_ref().expect("the call has ended")
    }

    /// Checks that what each end believes about the other is true.
    fn agree(&self) {
        for side in [Client, Server] {
            let (own, seen) = (self.engine(side), self.engine(other(side)).characteristics().peer());
            if own.characteristics().known() == Some(true) {
                assert_eq!(
                    own.characteristics().own(),
                    seen,
                    "what {side:?} has told, and what was understood"
                );
            }
        }
    }

    fn last(&self, side: Side) -> &[u8] {
        &self.wire.iter().rev().find(|(from, _)| *from == side).expect("no Send").1
    }

    fn sizes(&self, side: Side) -> (usize, usize) {
        self.engine(side).thresholds()
    }
}

/// The characteristics operation in a message, if it is one.
fn operation(message: &[u8]) -> Option<Operation<'_>> {
    let header = header::decode(message, Versions::BOTH).ok()?;
    let Body::Optional { kind, info } = header.body else { return None };
    operations::decode(operations::Kind::of(kind)?, info).ok()
}

impl Half {
    fn ask(&mut self, credits: u32) -> u32 {
        self.engine.ask(credits, &mut self.slots)
    }

    fn note_departure(&mut self, side: Side, message: &[u8]) {
        self.count += 1;
        let header = header::decode(message, Versions::BOTH).unwrap();
        let (xid, version) = (header.xid.0, header.version);
        let range = self.settings.versions;
        let refusal = matches!(header.body, Body::Error(RdmaError::Version { .. }));
        assert!(refusal || range.include(version), "version {version} at an end that has {range:?}");
        assert!(header.credits.0 > 0, "credit 0");
        if side == Server {
            assert!(version == 1 || self.heard_two, "a server speaks version 2 unasked");
        }
        if side == Client && range.high == 2 && !self.heard_two && version == 2 {
            assert!(self.count == 1 && message.len() <= 1024, "the first message is short, and the only one");
        }
        match (header.body, header.direction) {
            (Body::Error(error), _) => {
                let asked = self.asked_in.remove(&xid);
                assert!(asked.is_none_or(|asked| asked == version));
                assert!(!matches!(error, RdmaError::InvalidOption) || version == 2);
            }
            (Body::Optional { .. }, _) => match operation(message).unwrap() {
                Operation::Init { .. } | Operation::Update { settled: false, .. } => {
                    assert!(self.unfunded.is_none(), "two messages without a reply are under way");
                    self.unfunded = Some(self.count);
                }
                Operation::Request { .. } => {
                    assert_eq!(self.requests, 0, "two REQ_XCHARs are under way");
                    self.requests += 1;
                    self.sent.insert(xid, self.count);
                }
                Operation::Response { .. } | Operation::Update { .. } => {}
            },
            (_, Some(Direction::Call)) => {
                assert!(range.include(version));
                let made = self.made.get_mut(&xid).unwrap();
                assert!(made.version.replace(version).is_none(), "call {xid} was sent twice");
                self.sent.insert(xid, self.count);
            }
            _ => {
                assert_eq!(self.asked_in.remove(&xid), Some(version), "every call is answered in its version")
            }
        }
    }

    fn note_arrival(&mut self, message: &[u8]) {
        let Ok(header) = header::decode(message, Versions::BOTH) else { return };
        self.heard_two |=
            header.version == 2 && !matches!(header.body, Body::Error(RdmaError::Version { .. }));
        let (xid, version) = (header.xid.0, header.version);
        match (header.body, header.direction) {
            (Body::Optional { .. }, _) => {
                if let Some(Operation::Response { .. }) = operation(message) {
                    self.requests -= 1;
                    self.replied(xid);
                }
            }
            (_, Some(Direction::Call)) => drop(self.asked_in.insert(xid, version)),
            _ => self.replied(xid),
        }
    }

    fn replied(&mut self, xid: u32) {
        if let Some(sent) = self.sent.remove(&xid)
            && self.unfunded.is_some_and(|own| own < sent)
        {
            self.unfunded = None;
        }
    }
}

fn cut() -> Error {
    Error::new(Kind::ConnectionLost, "cut")
}

const SIZE: fn(u32) -> Characteristic = Characteristic::ReceiveSize;

/// All pairs: the highest version that both speak, or an error that helps.
#[test]
fn both_ends_agree_on_the_highest_version_that_both_speak() {
    let all = [Versions::ONE, Versions::BOTH, Versions::TWO];
    for client in all {
        for server in all {
            let mut model =
                Model::new(Settings { versions: client, ..BOTH }, Settings { versions: server, ..BOTH });
            let calls = [model.call(Client, 40, 40), model.call(Client, 3000, 3000)];
            model.drive();
            let common = client.high.min(server.high);
            for xid in calls {
                match model.outcome(Client, xid) {
                    Ok(_) => assert_eq!(model.halves[0].made[&xid].version, Some(common)),
                    Err(error) => {
                        assert!(client.low > server.high || server.low > client.high);
                        assert!(error.text().contains("set RPCRDMA_VERSION=auto"), "{error}");
                    }
                }
            }
            let both = client.include(common) && server.include(common);
            assert_eq!(model.outcome(Client, calls[1]).is_ok(), both, "{client:?} and {server:?}");
            assert_eq!(model.engine(Client).version().filter(|_| both), Some(common).filter(|_| both));
            model.agree();
        }
    }
}

#[test]
fn a_client_offers_version_two_by_saying_what_it_is_like_and_a_server_answers_with_the_same_xid() {
    let mut model = Model::new(Settings { first_xid: 0x1122_3343, ..BOTH }, BOTH);
    let init = |backward: u32| {
        let head = hex!(
            "11223344 00000002 00000004 00000005" "00000000 00000001 00000030"
            "00000003" "00000001 00000004 00001000" "00000002 00000004 00000001" "00000003 00000004"
        );
        [&head[..], &backward.to_be_bytes(), &hex!("00000001 00000002")].concat()
    };
    assert_eq!(model.wire, [(Client, init(1))], "a client that serves nothing takes no calls back");
    model.settle();
    let mut answer = init(3);
    // It asks for no credits: it makes no calls.
    answer[11] = 1;
    assert_eq!(model.wire[1..], [(Server, answer)]);
    assert_eq!(model.engine(Client).credits_left(), 1);
    assert_eq!(model.engine(Client).version(), Some(2));
    model.agree();
}

/// Version One is what it was, whatever size the Receives have by now.
#[test]
fn a_refused_offer_leaves_version_one_with_its_own_thresholds() {
    for (version, error) in [(1, [1, 1, 1]), (2, [1, 1, 1]), (2, [1, 0, 1]), (1, [2, 0, 0])] {
        let mut model = Model::new(BOTH, BOTH);
        let xid = model.call(Client, 40, 40);
        let offer = u32::from_be_bytes(model.wire[0].1[..4].try_into().unwrap());
        let len = if error[0] == 1 { 28 } else { 20 };
        let refusal = words(&[&[offer, version, 1, 4], &error[..]].concat());
        model.arrive(Client, &refusal[..len], None);
        assert_eq!(model.engine(Client).version(), Some(1));
        assert_eq!(model.sizes(Client), (1024, 1024));
        assert_eq!(model.halves[0].made[&xid].version, Some(1), "the call goes out in version 1");
        assert_eq!(unwords(&model.last(Client)[4..28]), [1, 4, 0, 0, 0, 0]);
        assert!(model.request(Client, SIZE(8192)).unwrap_err().text().contains("RPCRDMA_VERSION=auto"));
    }
}

/// A peer that has Version Two and no extensions.
#[test]
fn a_peer_that_knows_no_characteristics_speaks_version_two_with_4096_bytes() {
    for error in [2, 3] {
        let settings = Settings { inline: 2048, ..BOTH };
        let mut model = Model::new(settings, settings);
        let offer = u32::from_be_bytes(model.wire[0].1[..4].try_into().unwrap());
        model.arrive(Client, &words(&[offer, 2, 1, 4, error]), None);
        assert_eq!((model.engine(Client).version(), model.sizes(Client).0), (Some(2), 4096));
        assert_eq!(model.engine(Client).credits_left(), 1, "a refusal grants nothing");
        assert!(model.request(Client, SIZE(8192)).unwrap_err().text().contains("does not know"));
        // It has no Receive for more of this.
        model.half(Client).engine.grant(4);
        model.drain(Client);
        assert_eq!(model.wire.len(), 1);
    }
    // A peer that calls in Version Two and says nothing about itself is told nothing either.
    let mut model =
        Model::new(Settings { versions: Versions::ONE, ..BOTH }, Settings { inline: 2048, ..BOTH });
    let call = [&words(&[7, 2, 4, 0, 0, 0, 0, 0])[..], &call_message(7, 40, 3000, false)].concat();
    model.arrive(Server, &call, None);
    assert!(model.serve(Server));
    assert_eq!(unwords(&model.last(Server)[..32]), [7, 2, 4, 0, 1, 0, 0, 0], "3000 bytes go inline");
    assert_eq!(model.wire.iter().filter(|(side, _)| *side == Server).count(), 1);
}

#[test]
fn a_reply_in_another_version_than_its_call_is_discarded() {
    let mut model = Model::new(BOTH, BOTH);
    model.settle();
    let xid = model.call(Client, 40, 40);
    model.arrive(Client, &msg(xid, 4, &reply_message(xid, 40)), None);
    assert!(model.halves[0].made[&xid].outcome.is_none());
    model.drive();
    assert!(model.outcome(Client, xid).is_ok());
}

#[test]
fn an_offer_that_is_not_answered_leaves_its_calls_for_another_connection() {
    let mut model = Model::new(BOTH, BOTH);
    let xid = model.call(Client, 40, 40);
    let engine = &mut model.half(Client).engine;
    assert!(engine.may_fall_back() && !engine.must_fall_back());
    engine.handle_closed(Error::new(Kind::ConnectionLost, "closed"));
    assert!(engine.must_fall_back() && engine.poll_output().is_none());
    let taken = engine.take_waiting();
    assert!(taken.len() == 1 && taken[0].0 == Xid(xid));

    // Refused, and closed before anything could be sent in Version One.
    let mut model = Model::new(BOTH, BOTH);
    let xid = model.call(Client, 40, 40);
    let offer = u32::from_be_bytes(model.wire[0].1[..4].try_into().unwrap());
    let refusal = model.buf(&words(&[offer, 2, 1, 4, 1, 1, 1]));
    let Half { engine, slots, .. } = model.half(Client);
    engine.handle_receive(refusal, None, slots);
    assert!(engine.refused() && engine.version().is_none() && !engine.transmitted(Xid(xid)));
    engine.handle_closed(Error::new(Kind::ConnectionLost, "closed"));
    engine.handle_quiet(slots);
    assert!(engine.must_fall_back() && engine.take_waiting().len() == 1);

    let mut model = Model::new(BOTH, BOTH);
    let xid = model.call(Client, 40, 40);
    model.closing = true;
    for text in ["closed", "and cannot be made again"] {
        assert!(model.halves[0].made[&xid].outcome.is_none());
        model.half(Client).engine.handle_closed(Error::new(Kind::ConnectionLost, text));
        model.drain(Client);
    }
    assert_eq!(model.outcome(Client, xid).as_ref().unwrap_err().kind(), Kind::NotSent);

    // Nothing to fall back to.
    let mut model = Model::new(Settings { versions: Versions::TWO, ..BOTH }, BOTH);
    let xid = model.call(Client, 40, 40);
    model.close(cut());
    assert!(model.outcome(Client, xid).is_err() && !model.engine(Client).must_fall_back());
}

/// Calls back may come before the answer. Their data is out of reach once the connection has ended.
#[test]
fn nothing_is_read_of_a_peer_whose_answer_to_the_offer_was_the_end() {
    let mut model = Model::new(Settings { max_call: 8192, ..BOTH }, BOTH);
    model.half(Client).engine.grant(4);
    model.drain(Client);
    for xid in [5, 6] {
        let long = [words(&[xid, 1, 4, 1, 1, 0, 77, 8000, 0, 0, 0, 0, 0])].concat();
        let message = model.buf(&long);
        let Half { engine, slots, .. } = model.half(Client);
        engine.handle_receive(message, None, slots);
    }
    let engine = &mut model.half(Client).engine;
    let mut reads = Vec::new();
    while let Some(output) = engine.poll_output() {
        if let Output::Post(WorkRequest::Read { id, sink, .. }) = output {
            assert!(sink.place(0, &call_message(5, 8000, 40, false)));
            reads.push(id);
        }
    }
    assert_eq!(reads.len(), 1, "there is room for one");
    engine.handle_read(reads[0]);
    engine.handle_closed(Error::new(Kind::ConnectionLost, "closed"));
    assert!(engine.must_fall_back() && engine.pulling().is_none());
    assert!(engine.poll_request().is_some() && engine.poll_request().is_none());
    let output = engine.poll_output();
    assert!(output.is_none(), "{output:?} behind the end");
}

#[test]
fn a_raise_is_told_when_no_short_receive_is_left() {
    for (keeps, at_once) in [(Some(0), true), (Some(1), false), (None, false)] {
        let mut model = Model::with(BOTH, BOTH, [Some(0), keeps]);
        model.settle();
        model.request(Client, SIZE(16_384)).unwrap();
        model.settle();
        let wish = Some((SIZE(16_384), if at_once { Wish::Done } else { Wish::Pending }));
        assert_eq!(model.engine(Client).characteristics().wish(), wish, "keeps {keeps:?}");
        let held = model.halves[1].slots.receives.iter().filter(|bytes| **bytes == 4096).count();
        assert_eq!(held == 0, at_once);
        for left in (0..held).rev() {
            assert_eq!(model.sizes(Client).0, 4096, "{left} left");
            let xid = model.call(Client, 16, 16);
            model.drive();
            assert!(model.outcome(Client, xid).is_ok());
        }
        assert_eq!(model.engine(Client).characteristics().wish(), Some((SIZE(16_384), Wish::Done)));
        assert_eq!((model.sizes(Client).0, model.sizes(Server).0), (16_384, 4096));
        model.agree();
        let xid = model.call(Client, 16_384 - 32, 40);
        assert_eq!(model.last(Client).len(), 16_384, "inline");
        model.drive();
        assert!(model.outcome(Client, xid).is_ok());
    }
}

#[test]
fn whoever_asks_for_less_sends_less_from_then_on_and_gets_it_at_once() {
    let mut model = Model::new(Settings { receive: 8192, ..BOTH }, Settings { receive: 8192, ..BOTH });
    model.call(Client, 40, 40);
    model.drive();
    assert_eq!(model.sizes(Client), (8192, 8192));
    model.request(Client, SIZE(2048)).unwrap();
    assert_eq!(model.sizes(Client).0, 2048);
    model.call(Client, 4000, 40);
    assert!(model.last(Client).len() < 200, "a Read chunk");
    model.drive();
    assert_eq!(model.engine(Client).characteristics().wish(), Some((SIZE(2048), Wish::Done)));
    assert_eq!(
        (model.engine(Server).characteristics().own().receive_size, model.sizes(Client).0),
        (2048, 2048)
    );
    // What is refused binds nobody.
    for refused in
        [SIZE(65_537), Characteristic::RemoteInvalidation(false), Characteristic::Backward(Backward::None)]
    {
        model.request(Client, refused).unwrap();
        model.settle();
        assert_eq!(model.engine(Client).characteristics().wish(), Some((refused, Wish::Rejected)));
    }
    model.request(Client, SIZE(8192)).unwrap();
    model.settle();
    assert_eq!(model.sizes(Client).0, 8192);
    assert!(model.request(Client, SIZE(1023)).is_err());
    assert!(model.raise(Client, 4096).is_err(), "nobody asked for less");
    assert!(model.raise(Client, 65_537).is_err());
    model.agree();
}

/// The funding rule: after a message without a reply, no further one before the reply to something sent later.
#[test]
fn what_has_no_reply_waits_for_the_reply_to_something_later() {
    let mut model = Model::new(BOTH, BOTH);
    model.settle();
    let before = model.wire.len();
    model.half(Client).engine.grant(4);
    model.drain(Client);
    // The INIT_XCHAR is under way for all that we know: a REQ_XCHAR for nothing brings a reply.
    assert!(matches!(operation(&model.wire[before].1), Some(Operation::Request { want }) if want.is_empty()));
    assert_eq!(model.wire.len(), before + 1);
    model.settle();
    let told = operation(model.last(Client));
    assert!(matches!(told, Some(Operation::Update { settled: false, .. })), "{told:?}");
    assert_eq!(model.engine(Server).characteristics().peer().backward, Backward::General);
    // Replies to calls under way do so as well.
    model.allow_chunks(Client, false);
    model.call(Client, 40, 40);
    model.drive();
    assert_eq!(model.engine(Server).characteristics().peer().backward, Backward::SizeLimited);
    model.agree();
}

#[test]
fn calls_back_and_their_chunks_go_by_what_the_client_has_told() {
    let mut model = Model::new(BOTH, BOTH);
    model.call(Client, 40, 40);
    model.drive();
    model.half(Server).ask(4);
    model.drain(Server);
    let xid = model.call(Server, 40, 40);
    let error = model.outcome(Server, xid).as_ref().unwrap_err();
    assert!(error.text().contains("takes no calls back"), "{error}");
    model.half(Client).engine.grant(4);
    model.drain(Client);
    model.drive();
    for allowed in [true, false, true] {
        model.half(Client).engine.set_reverse_chunks(allowed);
        model.drain(Client);
        model.drive();
        let (short, long) = (model.call(Server, 40, 40), model.call(Server, 9000, 40));
        model.drive();
        assert!(model.outcome(Server, short).is_ok());
        assert_eq!(model.outcome(Server, long).is_ok(), allowed);
    }
}

#[test]
fn that_a_client_serves_is_told_before_the_calls_that_waited_for_a_credit() {
    let mut model = Model::new(BOTH, BOTH);
    model.half(Client).engine.grant(4);
    model.drain(Client);
    model.call(Client, 40, 40);
    let second = model.call(Client, 40, 40);
    // A server that answers each call before it looks at what comes after it.
    while model.deliver(Client) {
        model.serve(Server);
        while model.deliver(Server) {}
    }
    let told = |message: &[u8]| matches!(operation(message), Some(Operation::Update { .. }));
    let called = |message: &[u8]| operation(message).is_none() && message[..4] == second.to_be_bytes();
    let first = |is: &dyn Fn(&[u8]) -> bool| {
        model.wire.iter().position(|(side, message)| *side == Client && is(message))
    };
    let (told, called) = (first(&told), first(&called));
    assert!(told.is_some() && told < called, "told as message {told:?}, called as {called:?}");
}

#[test]
fn a_reply_invalidates_where_the_requester_has_told_that_it_may() {
    for (client, server, used) in
        [(true, true, true), (false, true, false), (true, false, false), (false, false, false)]
    {
        let settings = |remote_invalidation| Settings { remote_invalidation, ..BOTH };
        let mut model = Model::new(settings(client), settings(server));
        model.settle();
        let xid = model.call(Client, 9000, 40);
        let handle = model.halves[0].slots.device.exposed.keys().next().copied();
        model.settle();
        assert!(model.serve(Server));
        let Some(WorkRequest::Send { invalidate, .. }) = model.halves[1].sends.back() else { panic!() };
        assert_eq!(*invalidate, handle.map(Handle).filter(|_| used), "{client} {server}");
        model.drive();
        assert!(model.outcome(Client, xid).is_ok());
    }
}

#[test]
fn bad_values_are_told_and_change_nothing() {
    let mut model = Model::new(BOTH, BOTH);
    model.call(Client, 40, 40);
    model.drive();
    let message =
        |kind: u32, info: &[u32]| words(&[&[77, 2, 4, 5, 0, kind, 4 * info.len() as u32], info].concat());
    let before = *model.engine(Server).characteristics().peer();
    let bad: [(u32, &[u32]); 8] = [
        (1, &[1, 1, 8, 8192, 0, 0]),
        (1, &[2, 1, 4, 8192, 2, 4, 2, 0]),
        (1, &[2, 1, 4, 8192, 3, 4, 4, 0]),
        (1, &[1, 9, 400, 1, 0]),
        (1, &[2, 3, 4, 3, 1, 4, 1023, 0]),
        (4, &[1, 4, 1023, 0]),
        (4, &[1, 0, 0]),
        (2, &[1, 2, 4, 2]),
    ];
    for (kind, info) in bad {
        model.arrive(Server, &message(kind, info), None);
        assert_eq!(unwords(model.last(Server)), [77, 2, 4, 4, 2], "{kind} {info:?}");
        assert_eq!(*model.engine(Server).characteristics().peer(), before);
    }
    // Nobody is told of a nonsensical answer.
    let sends = model.wire.len();
    model.arrive(Server, &message(3, &[1, 1]), None);
    assert_eq!(model.wire.len(), sends);
    for kind in [0, 5, 0xffff_ffff] {
        model.arrive(Server, &message(kind, &[]), None);
        assert_eq!(unwords(model.last(Server)), [77, 2, 4, 4, 3]);
    }
    // Unknown and experimental ones are skipped.
    model.arrive(Server, &message(1, &[3, 4, 0, 0xffff_ff01, 4, 9, 1, 4, 8192, 0]), None);
    assert_eq!(model.sizes(Server).0, 8192);
    // All of a long list are answered for, those that cannot be named are left out.
    let want: Vec<u32> = (0..40).flat_map(|_| [1, 4, 4096]).collect();
    model.arrive(Server, &message(2, &[&[40], &want[..]].concat()), None);
    assert_eq!(unwords(model.last(Server)), [77, 2, 4, 5, 1, 3, 16, 1, u32::MAX, 0, 0]);
}

/// A peer that answers a request otherwise than it should.
#[test]
fn an_answer_that_leaves_the_request_out_or_names_it_twice_is_a_refusal() {
    let subsets: [([u32; 3], Wish); 5] = [
        ([1, 0, 0], Wish::Done),
        ([0, 1, 0], Wish::Rejected),
        ([0, 0, 1], Wish::Pending),
        ([0, 0, 0], Wish::Rejected),
        ([1, 0, 1], Wish::Rejected),
    ];
    for (subset, wish) in subsets {
        let mut model = Model::new(BOTH, BOTH);
        model.settle();
        model.request(Client, SIZE(2048)).unwrap();
        let xid = u32::from_be_bytes(model.last(Client)[..4].try_into().unwrap());
        let [done, rejected, pending] = subset;
        model.arrive(Client, &words(&[xid + 1, 2, 4, 5, 1, 3, 24, 1, 1, 1, 0, 1, 0]), None);
        assert_eq!(
            model.engine(Client).characteristics().wish(),
            Some((SIZE(2048), Wish::Asked)),
            "another one's answer"
        );
        model.half(Client).requests = 1;
        model.arrive(Client, &words(&[xid, 2, 4, 5, 1, 3, 24, 1, done, 1, rejected, 1, pending]), None);
        assert_eq!(model.engine(Client).characteristics().wish(), Some((SIZE(2048), wish)));
        let limit = if wish == Wish::Rejected { 4096 } else { 2048 };
        assert_eq!(model.sizes(Client).0, limit);
        if wish == Wish::Pending {
            // Section 3.1: a larger size that takes effect ends the limit only when it settles the request.
            model.arrive(Client, &words(&[9, 2, 4, 5, 0, 4, 16, 1, 4, 8192, 0]), None);
            assert_eq!(model.sizes(Client).0, 2048);
            model.arrive(Client, &words(&[9, 2, 4, 5, 0, 4, 16, 1, 4, 8192, 1]), None);
            assert_eq!(model.sizes(Client).0, 8192);
            assert_eq!(model.engine(Client).characteristics().wish(), Some((SIZE(2048), Wish::Rejected)));
        }
    }
}

/// A model's run: settings, devices and everything that is done are random. Returns whether Version Two was agreed on, and
/// how many requests were settled.
fn run(seed: u64) -> (bool, u32) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let settings = |random: &mut Random| {
        let inline = random.pick(&[1024, 2048, 4096, 8192]);
        let receive = inline.max(4096);
        Settings {
            credits: random.pick(&[1, 2, 4, 8]),
            inline,
            versions: random.pick(&[Versions::ONE, Versions::BOTH, Versions::BOTH, Versions::TWO]),
            receive,
            receive_max: receive.max(random.pick(&[4096, 16_384, 65_536])),
            reverse_chunks: random.below(2) == 0,
            remote_invalidation: random.below(2) == 0,
            ..SETTINGS
        }
    };
    let (client, server) = (settings(&mut random), settings(&mut random));
    let keeps = |random: &mut Random| random.pick(&[None, Some(0), Some(1), Some(3)]);
    let keeps = [keeps(&mut random), keeps(&mut random)];
    let mut model = Model::with(client, server, keeps);
    let mut settled = 0;
    for _ in 0..random.pick(&[20, 60, 150]) {
        if model.closing {
            break;
        }
        let side = random.pick(&[Client, Server]);
        match random.below(24) {
            0..4 => {
                let length = |random: &mut Random| {
                    let most = random.pick(&[100, 4100, 20_000]);
                    16 + random.below(most)
                };
                let (len, reply) = (length(&mut random), length(&mut random));
                let started = model.engine(Server).asked() > 0;
                if side == Client || started {
                    model.call(side, len, reply);
                }
            }
            4..11 => drop(model.deliver(side)),
            11..13 => drop(model.read(side)),
            13..15 => drop(model.take(side)),
            15..17 => {
                let handed = model.half(side).handed.len();
                if handed > 0 {
                    model.answer(side, random.below(handed));
                }
            }
            17..19 => {
                let size = SIZE(random.pick(&[1024, 2048, 4096, 8192, 10_000, 16_384, 65_536, 100_000]));
                let what = match random.below(6) {
                    0 => Characteristic::RemoteInvalidation(random.below(2) == 0),
                    1 => Characteristic::Backward(random.pick(&[Backward::None, Backward::General])),
                    _ => size,
                };
                let free = !matches!(
                    model.engine(side).characteristics().wish(),
                    Some((_, Wish::Asked | Wish::Pending))
                );
                settled += u32::from(model.request(side, what).is_ok() && free);
            }
            19 => drop(model.raise(side, random.pick(&[4096, 8192, 16_384, 65_536]))),
            20 => model.allow_chunks(side, random.below(2) == 0),
            21 => {
                model.half(side).engine.grant(1 + random.below(8) as u32);
                model.drain(side);
            }
            22 => {
                model.half(side).ask(1 + random.below(8) as u32);
                model.drain(side);
            }
            _ if random.below(40) == 0 => model.close(cut()),
            _ => {}
        }
    }
    if !model.closing {
        model.drive();
        model.agree();
        // Traffic consumes what the devices did not give back.
        model.wash();
        model.drive();
        model.agree();
    }
    if model.closing {
        let text = "and not made anew";
        model.half(Client).engine.handle_closed(Error::new(Kind::ConnectionLost, text));
        model.drain(Client);
    }
    let narrowed = model.halves.iter().any(|half| half.narrowed);
    let common = client.versions.high.min(server.versions.high);
    let common = client.versions.include(common) && server.versions.include(common);
    for side in [Client, Server] {
        let engine = model.engine(side);
        if side == Server && engine.version().is_none() {
            // It has not learned what the client speaks, and never will if they have nothing in common.
            continue;
        }
        if !model.closing {
            assert!(!engine.characteristics().lags(), "seed {seed}: short Receives are left");
            let wish = engine.characteristics().wish();
            let open = matches!(wish, Some((_, Wish::Asked | Wish::Pending)));
            assert!(!open, "seed {seed}: a request is not settled: {wish:?}");
        }
        for (xid, made) in &model.halves[side as usize].made {
            let outcome = made
                .outcome
                .as_ref()
                .unwrap_or_else(|| panic!("seed {seed}, {side:?}: call {xid} has no end"));
            let excused = model.closing || narrowed || !common || side == Server;
            assert!(excused || outcome.is_ok(), "seed {seed}, {side:?}: call {xid}: {outcome:?}");
        }
        let device = &model.halves[side as usize].slots.device;
        assert!(device.exposed.is_empty(), "seed {seed}: memory stays exposed");
    }
    (model.engine(Client).version() == Some(2), settled)
}

fn runs(seeds: std::ops::Range<u64>) {
    let (mut two, mut settled, mut all) = (0, 0, 0);
    for seed in seeds {
        let (agreed, requests) = run(seed);
        (two, settled, all) = (two + u32::from(agreed), settled + requests, all + 1);
    }
    assert!(two > all / 4 && settled > all, "{two} of {all} runs in version 2, {settled} requests");
}

#[test]
fn whatever_both_ends_want_no_message_is_too_long_and_they_agree_when_all_is_quiet() {
    runs(1..2001);
}

#[test]
#[ignore = "long: make check-long"]
fn whatever_both_ends_want_a_hundred_thousand_times() {
    runs(1..100_001);
}
