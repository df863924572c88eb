//! Both directions of one connection (RFC 8167): two engines that call one another, and what lies between them.
//!
//! Every Send, Read and Write is one step. At every step: no credit of either direction is exceeded, a Receive is there
//! for every Send, nothing is longer than its threshold, and no call ends twice. Both ends use the same XIDs on purpose.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::pair::*;
use super::*;

/// One direction, as its messages show it: who has called, how it ended, and the credits.
#[derive(Default)]
struct Made {
    posted: bool,
    outcome: Option<Result<Vec<u8>, Error>>,
}

struct Both {
    memory: Arc<Memory>,
    ends: [End; 2],
    /// Calls of each end, by XID.
    made: [BTreeMap<u32, Made>; 2],
    /// Requests handed up at each end.
    handed: [Vec<Request>; 2],
    /// Granted to each end by the last reply.
    granted: [u32; 2],
    wire: Vec<(Side, Vec<u8>)>,
    cut_at: Option<usize>,
    steps: usize,
    cut: bool,
    closing: bool,
}

fn other(side: Side) -> Side {
    if side == Client { Server } else { Client }
}

impl Both {
    fn with(client: Settings, server: Settings) -> Both {
        let memory = Memory::new(client.inline.max(server.inline), 1 << 20, 1 << 26);
        let end = |role, settings: Settings, peer: Settings, seed| End {
            engine: Connection::new(role, settings, sizes(peer), memory.clone(), bindings()),
            device: Device {
                next: seed,
                exposed: BTreeMap::new(),
                invalidated: Vec::new(),
                receives: 0,
                max_segment: 1900,
                read_depth: 16,
                exposures_left: u32::MAX,
                fail_invalidate: false,
                read: std::collections::BTreeSet::new(),
                tells_reads: true,
            },
            settings,
            sends: VecDeque::new(),
            reads: VecDeque::new(),
            closes: Vec::new(),
        };
        let ends = [end(Role::Client, client, server, 1), end(Role::Server, server, client, 2)];
        let mut both = Both {
            memory,
            ends,
            made: Default::default(),
            handed: Default::default(),
            granted: [1, 1],
            wire: Vec::new(),
            cut_at: None,
            steps: 0,
            cut: false,
            closing: false,
        };
        both.drain(Client);
        both.drain(Server);
        both
    }

    /// A server that may call back, and a client that serves.
    fn ready(client: Settings, server: Settings) -> Both {
        let mut both = Both::with(client, server);
        both.end(Client).engine.grant(4);
        both.drain(Client);
        both.end(Server).ask(4);
        both.drain(Server);
        both
    }

    /// The same, once each has learned the other's grant.
    fn warm(client: Settings, server: Settings) -> Both {
        let mut both = Both::ready(client, server);
        for side in [Client, Server] {
            both.call(side, 0xffff_fff0, 40, 40);
            both.drive();
        }
        both.wire.clear();
        both
    }

    fn end(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }

    fn buf(&self, bytes: &[u8]) -> Buf {
        let mut buf = self.memory.message().unwrap();
        buf.extend(bytes).unwrap();
        buf
    }

    fn call(&mut self, side: Side, xid: u32, len: usize, reply: usize) {
        self.tick();
        let message = self.buf(&call_message(xid, len, reply, false));
        let earlier = self.made[side as usize].insert(xid, Made::default());
        assert!(earlier.is_none_or(|made| made.outcome.is_some()), "XID {xid} is in use");
        let End { engine, device, .. } = self.end(side);
        if let Err(error) = engine.call(Xid(xid), message, reply_of(reply), device) {
            assert!(engine.closed().is_some(), "{error}");
            self.done(side, xid, Err(error));
        }
        self.drain(side);
    }

    /// Takes the oldest request of an end up. Returns false when none is ready.
    fn take(&mut self, side: Side) -> bool {
        if !self.end(side).engine.request_ready() {
            return false;
        }
        self.tick();
        let Some(request) = self.end(side).engine.poll_request() else { return false };
        self.drain(side);
        self.handed[side as usize].push(request);
        true
    }

    /// Answers a request with as many bytes as it asks for.
    fn answer(&mut self, side: Side, at: usize) {
        self.tick();
        let Request { id, xid, message, .. } = self.handed[side as usize].remove(at);
        let call = bytes(&message);
        drop(message);
        let reply = u32::from_be_bytes(call[12..16].try_into().unwrap()) as usize;
        assert!(call == call_message(xid.0, call.len(), reply, false), "call {xid} was changed on its way");
        let reply = self.buf(&reply_message(xid.0, reply));
        // A reply that fits nowhere, or comes too late, is an outcome, which the caller of the other side sees.
        let _ = self.end(side).engine.reply(id, reply);
        self.drain(side);
    }

    fn serve(&mut self, side: Side) -> bool {
        let any = self.take(side);
        if any {
            self.answer(side, self.handed[side as usize].len() - 1);
        }
        any
    }

    fn deliver(&mut self, from: Side) -> bool {
        let Some(request) = self.end(from).sends.pop_front() else { return false };
        self.tick();
        if self.closing {
            return false;
        }
        let to = other(from);
        match request {
            WorkRequest::Write { gather, to: place } => {
                let Some((Exposed::Sink(sink), at)) = self.ends[to as usize].device.access(place) else {
                    panic!("a Write to {place}, which is not exposed");
                };
                assert!(sink.place(at, &bytes(&gather)));
            }
            WorkRequest::Send { gather, .. } => {
                let message = bytes(&gather);
                drop(gather);
                self.deliver_to(to, &message);
            }
            WorkRequest::Read { .. } => unreachable!("Reads have a queue of their own"),
        }
        true
    }

    fn deliver_to(&mut self, to: Side, message: &[u8]) {
        if let Ok(header) = header::decode(message, Versions::ONE)
            && !matches!(header.body, Body::Error(_))
            && !is_call(message)
        {
            self.granted[to as usize] = header.credits.0.max(1);
        }
        let buf = self.buf(message);
        let End { engine, device, settings, .. } = self.end(to);
        assert!(device.receives > 0, "a Send without a posted Receive");
        assert!(message.len() <= settings.inline);
        device.receives -= 1;
        engine.handle_receive(buf, None, device);
        self.drain(to);
    }

    fn read(&mut self, by: Side) -> bool {
        let Some(request) = self.end(by).reads.pop_front() else { return false };
        self.tick();
        if self.closing {
            return false;
        }
        let WorkRequest::Read { id, sink, at, from } = request else { unreachable!() };
        let Some((Exposed::Source(region), start)) = self.ends[other(by) as usize].device.access(from) else {
            panic!("a Read from {from}, which is not exposed");
        };
        assert!(sink.place(at, &region.slice(start, from.length as usize)));
        drop(sink);
        self.end(by).engine.handle_read(id);
        self.drain(by);
        true
    }

    fn step(&mut self) -> bool {
        [Client, Server].into_iter().any(|side| self.deliver(side) || self.read(side))
    }

    fn drive(&mut self) {
        while self.step() || self.serve(Client) || self.serve(Server) {}
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    fn tick(&mut self) {
        self.steps += 1;
        if self.cut_at.is_some_and(|at| self.steps >= at) && !self.closing {
            self.cut = true;
            self.close();
        }
    }

    fn close(&mut self) {
        self.closing = true;
        for side in [Client, Server] {
            let end = self.end(side);
            end.sends.clear();
            end.reads.clear();
            end.engine.handle_closed(Error::new(Kind::ConnectionLost, "cut"));
            end.device.exposed.clear();
            self.drain(side);
        }
    }

    fn drain(&mut self, side: Side) {
        while let Some(output) = self.end(side).engine.poll_output() {
            assert!(!self.closing || matches!(output, Output::Done { .. }), "{output:?} after the close");
            match output {
                Output::Receive(_) => self.end(side).device.receives += 1,
                Output::Post(request @ WorkRequest::Read { .. }) => self.end(side).reads.push_back(request),
                Output::Post(request) => {
                    if let WorkRequest::Send { gather, .. } = &request {
                        let message = bytes(gather);
                        self.inspect(side, &message);
                        self.wire.push((side, message));
                    }
                    self.end(side).sends.push_back(request);
                }
                Output::Done { xid, outcome } => {
                    self.done(side, xid.0, outcome.map(|regions| bytes(&regions)));
                }
                Output::Close(error) => panic!("an honest peer's connection is closed: {error}"),
            }
        }
    }

    fn inspect(&mut self, side: Side, message: &[u8]) {
        let (send, _) = self.end(side).engine.thresholds();
        assert!(message.len() <= send, "a Send of {} bytes over the threshold of {send}", message.len());
        let header = header::decode(message, Versions::ONE).unwrap();
        // rule 128
        assert!(header.credits.0 > 0, "credit 0");
        check_xid(&header);
        if !is_call(message) {
            return;
        }
        let made = &mut self.made[side as usize];
        let own = made.get_mut(&header.xid.0).unwrap();
        assert!(!std::mem::replace(&mut own.posted, true), "sent twice");
        // rule 127: the credits of this direction, and of no other.
        let under_way = made.values().filter(|made| made.posted && made.outcome.is_none()).count();
        let limit = header.credits.0.min(self.granted[side as usize]) as usize;
        assert!(under_way <= limit, "{side:?}: {under_way} calls under way, {limit} allowed");
        // rule 131, rule 132: a Receive for each of them is there.
        assert!(self.end(side).device.receives as usize >= under_way);
    }

    fn done(&mut self, side: Side, xid: u32, outcome: Result<Vec<u8>, Error>) {
        let cut = self.cut;
        let made = self.made[side as usize].get_mut(&xid).expect("the end of a call that nobody made");
        assert!(made.outcome.is_none(), "call {xid} ends twice");
        match &outcome {
            Ok(reply) => {
                assert!(*reply == reply_message(xid, reply.len()), "the reply {xid} is another one's")
            }
            Err(error) if cut => {
                let wanted = if made.posted { Kind::ConnectionLost } else { Kind::NotSent };
                assert_eq!(error.kind(), wanted, "call {xid}");
            }
            Err(_) => {}
        }
        made.outcome = Some(outcome);
    }

    fn outcome(&self, side: Side, xid: u32) -> &Result<Vec<u8>, Error> {
        self.made[side as usize][&xid].outcome.as_ref().expect("the call has ended")
    }

    fn last(&self, side: Side) -> &[u8] {
        &self.wire.iter().rev().find(|(from, _)| *from == side).expect("no Send").1
    }
}

/// Whether a valid message is a Call: by its Read list, or by the RPC message in it.
fn is_call(message: &[u8]) -> bool {
    match header::decode(message, Versions::ONE).unwrap().body {
        Body::Msg { payload, .. } => payload[4..8] == [0; 4],
        Body::Nomsg { chunks } => chunks.read_count() > 0,
        _ => false,
    }
}

/// rule 125, rule 133, rule 134, rule 135: the words of both directions, and one XID in both at a time.
#[test]
fn a_call_back_with_the_xid_of_a_call_under_way_is_another_transaction() {
    let mut both = Both::ready(SETTINGS, SETTINGS);
    both.call(Client, 7, 40, 60);
    both.settle();
    both.take(Server);
    both.call(Server, 7, 44, 48);
    assert_eq!(unwords(&both.last(Server)[..28]), [7, 1, 4, 0, 0, 0, 0], "a Call asks for credits");
    assert_eq!(unwords(&both.last(Server)[28..36]), [7, 0]);
    both.settle();
    both.take(Client);
    both.answer(Client, 0);
    assert_eq!(unwords(&both.last(Client)[..28]), [7, 1, 4, 0, 0, 0, 0], "a Reply grants them");
    assert_eq!(unwords(&both.last(Client)[28..36]), [7, 1]);
    both.settle();
    assert_eq!(both.outcome(Server, 7).as_ref().unwrap().len(), 48);
    assert!(both.made[Client as usize][&7].outcome.is_none(), "its own call goes on");
    both.answer(Server, 0);
    both.settle();
    assert_eq!(both.outcome(Client, 7).as_ref().unwrap().len(), 60);
}

/// rule 126, rule 142: the engine makes no call back before it is told that it may.
#[test]
fn a_server_calls_nobody_back_before_it_asks() {
    let mut both = Both::with(SETTINGS, SETTINGS);
    both.call(Client, 1, 40, 40);
    both.drive();
    both.call(Server, 2, 40, 40);
    both.settle();
    assert!(
        both.wire.iter().all(|(side, message)| *side == Client || !is_call(message)),
        "nothing was called"
    );
    both.end(Client).engine.grant(1);
    both.end(Server).ask(1);
    both.drain(Client);
    both.drain(Server);
    both.call(Server, 3, 40, 40);
    both.drive();
    assert!(both.outcome(Server, 2).is_ok() && both.outcome(Server, 3).is_ok());
}

/// rule 127: the grant of one direction does nothing to the other.
#[test]
fn each_direction_has_the_credits_that_its_own_replies_grant() {
    let mut both = Both::with(Settings { credits: 9, ..SETTINGS }, Settings { credits: 5, ..SETTINGS });
    both.end(Client).engine.grant(3);
    both.drain(Client);
    both.end(Server).ask(7);
    both.drain(Server);
    for side in [Client, Server] {
        both.call(side, 1, 40, 40);
        both.drive();
    }
    assert_eq!((both.ends[0].engine.granted(), both.ends[1].engine.granted()), (5, 3));
    assert_eq!((both.ends[0].engine.credits_left(), both.ends[1].engine.credits_left()), (5, 3));
    for xid in 10..20 {
        both.call(Client, xid, 40, 40);
        both.call(Server, xid, 40, 40);
    }
    both.settle();
    assert_eq!((both.ends[0].engine.credits_left(), both.ends[1].engine.credits_left()), (0, 0));
    assert_eq!((both.ends[0].engine.requests_queued(), both.ends[1].engine.requests_queued()), (3, 5));
    both.drive();
}

/// rule 129: an error says nothing about credits, whatever its credit word is, and is about a call of its receiver.
#[test]
fn an_error_ends_a_call_back_and_changes_no_credit() {
    let mut both = Both::warm(SETTINGS, SETTINGS);
    both.call(Client, 5, 40, 40);
    both.settle();
    both.take(Server);
    both.call(Server, 5, 40, 40);
    both.end(Server).sends.clear();
    both.deliver_to(Server, &err_chunk(5));
    assert_eq!(both.outcome(Server, 5).as_ref().unwrap_err().kind(), Kind::Peer);
    assert_eq!(both.ends[1].engine.granted(), 4);
    assert!(both.made[0][&5].outcome.is_none(), "the call of the other direction goes on");
    both.answer(Server, 0);
    both.settle();
    assert!(both.outcome(Client, 5).is_ok());
}

/// rule 130: the most that a client sends as a Call is the most that it sends as a Reply.
#[test]
fn thresholds_of_the_reverse_direction_are_those_of_the_forward_direction_mirrored() {
    let small = Settings { inline: 1024, ..SETTINGS };
    let large = Settings { inline: 4096, ..SETTINGS };
    let mut both = Both::warm(small, large);
    assert_eq!(both.ends[0].engine.thresholds(), (1024, 1024));
    assert_eq!(both.ends[1].engine.thresholds(), (1024, 1024));
    both.call(Server, 1, 1024 - 28, 1024 - 28);
    assert_eq!(unwords(&both.last(Server)[12..28]), [0, 0, 0, 0], "short");
    both.call(Server, 2, 1024 - 27, 40);
    assert_eq!(unwords(&both.last(Server)[12..20]), [1, 1], "long");
    both.drive();
    assert!(both.outcome(Server, 1).is_ok() && both.outcome(Server, 2).is_ok());
}

/// rule 136: chunks work in the reverse direction as in the forward direction.
#[test]
fn long_calls_back_and_long_replies_to_them_go_by_chunks() {
    let mut both = Both::warm(SETTINGS, SETTINGS);
    for (xid, len, reply) in [(1, 5000, 40), (2, 40, 5000), (3, 9000, 9000)] {
        both.call(Server, xid, len, reply);
        both.call(Client, xid, len, reply);
        both.drive();
        assert_eq!(both.outcome(Server, xid).as_ref().unwrap().len(), reply);
    }
    assert!(both.ends.iter().all(|end| end.device.exposed.is_empty()));
}

/// rule 137, rule 139: a size-limited requester refuses, with a text that names both sizes and the remedy.
#[test]
fn a_call_back_that_needs_chunks_is_refused_where_they_are_not_allowed() {
    let mut both = Both::warm(SETTINGS, Settings { reverse_chunks: false, ..SETTINGS });
    both.call(Server, 1, 1024 - 28, 3000);
    assert_eq!(unwords(&both.last(Server)[12..28]), [0, 0, 0, 0], "no chunk is offered for a reply");
    both.call(Server, 2, 1024 - 27, 40);
    let error = both.outcome(Server, 2).as_ref().unwrap_err().clone();
    assert_eq!(error.kind(), Kind::TooLong);
    for word in ["1025 bytes", "1024", "CLSET_RDMA_REVERSE_CHUNKS"] {
        assert!(error.text().contains(word), "{error}");
    }
    both.drive();
    let error = both.outcome(Server, 1).as_ref().unwrap_err();
    assert!(error.text().contains("exceeds the inline threshold of 1024"), "{error}");
}

/// rule 138: a call back with chunks is refused by a client that does not support them, or has no RDMA Reads left.
#[test]
fn chunks_of_a_call_back_are_answered_with_err_chunk_where_they_are_not_supported() {
    for limited in [true, false] {
        let client = Settings { reverse_chunks: !limited, ..SETTINGS };
        let mut both = Both::warm(client, SETTINGS);
        if !limited {
            both.end(Client).device.read_depth = 0;
        }
        both.call(Server, 1, 5000, 40);
        both.drive();
        assert!(both.outcome(Server, 1).as_ref().unwrap_err().text().contains("ERR_CHUNK"));
        // A Reply chunk needs no Read.
        both.call(Server, 2, 40, 5000);
        both.drive();
        assert_eq!(both.outcome(Server, 2).is_ok(), !limited);
        both.call(Server, 3, 40, 40);
        both.call(Client, 3, 5000, 5000);
        both.drive();
        assert!(
            both.outcome(Server, 3).is_ok() && both.outcome(Client, 3).is_ok(),
            "the connection lives on"
        );
    }
}

/// A client that serves nothing has a Receive for a call back all the same, and takes no chunks from it.
#[test]
fn a_client_that_does_not_serve_survives_a_call_back() {
    let mut both = Both::with(SETTINGS, SETTINGS);
    both.call(Client, 1, 40, 40);
    both.drive();
    both.end(Server).ask(16);
    both.drain(Server);
    both.call(Server, 2, 5000, 40);
    both.drive();
    assert!(both.outcome(Server, 2).is_err());
    both.call(Server, 3, 40, 40);
    both.settle();
    assert!(both.take(Client), "it is the driver's to answer that there is no such program");
    both.answer(Client, 0);
    both.settle();
    assert_eq!(both.ends[1].engine.granted(), 1);
}

/// A malformed message is a reply if it names a call under way, otherwise a call, which an end that serves must answer.
#[test]
fn a_malformed_message_is_answered_unless_it_may_be_a_reply() {
    let bad = |xid: u32| words(&[xid, 1, 4, 0, 7, 0, 0]);
    let mut both = Both::warm(SETTINGS, SETTINGS);
    both.call(Client, 5, 40, 40);
    both.call(Server, 6, 40, 40);
    both.settle();
    both.wire.clear();
    both.deliver_to(Client, &bad(5));
    both.deliver_to(Server, &bad(6));
    assert!(both.wire.is_empty(), "RFC 8166 §4.5: a Requester discards it");
    both.deliver_to(Client, &bad(6));
    both.deliver_to(Server, &bad(5));
    assert_eq!(unwords(both.last(Client)), [6, 1, 4, 4, 2]);
    assert_eq!(unwords(both.last(Server)), [5, 1, 4, 4, 2]);
}

/// More credits bring their Receives with them; fewer credits leave the Receives, since the peer may not have heard of it.
#[test]
fn receives_follow_the_credits_up_and_never_down() {
    let mut both = Both::warm(SETTINGS, SETTINGS);
    let receives = |both: &Both, side: Side| both.ends[side as usize].device.receives;
    let before = receives(&both, Client);
    assert_eq!(before, 4 + 4 + RECEIVE_MARGIN);
    both.end(Client).engine.grant(20);
    both.drain(Client);
    assert_eq!(receives(&both, Client), before + 16);
    both.end(Client).engine.grant(2);
    both.end(Client).ask(2);
    both.drain(Client);
    assert_eq!(receives(&both, Client), before + 16);
    both.call(Server, 1, 40, 40);
    both.drive();
    assert_eq!((both.ends[1].engine.granted(), receives(&both, Client)), (2, before + 16));
}

/// Where the device holds few Receives, each direction gets what the other leaves.
#[test]
fn credits_are_bounded_by_the_receives_of_the_device() {
    let few = Settings { receives: 20, ..SETTINGS };
    let mut both = Both::with(few, few);
    assert_eq!(both.end(Client).engine.grant(16), 20 - 4 - RECEIVE_MARGIN);
    assert_eq!(both.end(Client).ask(100), 4);
    both.drain(Client);
    assert_eq!(both.ends[0].device.receives, 20);
    assert_eq!(both.end(Server).ask(100), 20 - 4 - RECEIVE_MARGIN);
}

/// rule 141: a call back, with the calls that it is nested in and those nested in it, cut at every step.
#[test]
fn a_connection_cut_at_any_step_of_a_call_back_ends_every_call_once_with_the_right_status() {
    type Scenario = fn(&mut Both);
    let scenarios: [(&str, Scenario); 5] = [
        ("a short call back", |b| b.call(Server, 1, 40, 40)),
        ("a long one with a long reply", |b| b.call(Server, 1, 5000, 5000)),
        ("more of them than credits", |b| {
            for xid in 1..=9 {
                b.call(Server, xid, 40, 3000);
                b.call(Client, xid, 3000, 40);
            }
        }),
        ("in the midst of a call, and with a call in its own midst", |b| {
            b.call(Client, 1, 40, 40);
            b.settle();
            b.take(Server);
            b.call(Server, 1, 3000, 40);
            b.settle();
            b.take(Client);
            b.call(Client, 2, 40, 3000);
            b.settle();
            b.serve(Server);
            b.settle();
            if !b.handed[Client as usize].is_empty() {
                b.answer(Client, 0);
            }
            b.settle();
            if !b.handed[Server as usize].is_empty() {
                b.answer(Server, 0);
            }
        }),
        ("answered after a second one was made", |b| {
            b.call(Server, 1, 40, 40);
            b.settle();
            b.take(Client);
            b.call(Server, 2, 40, 40);
            b.settle();
            b.serve(Client);
            if !b.handed[Client as usize].is_empty() {
                b.answer(Client, 0);
            }
        }),
    ];
    for (what, scenario) in scenarios {
        let mut cuts = 0;
        loop {
            let mut both = Both::warm(SETTINGS, SETTINGS);
            both.cut_at = Some(both.steps + cuts + 1);
            scenario(&mut both);
            both.drive();
            for (xid, made) in both.made.iter().flatten() {
                assert!(made.outcome.is_some(), "{what}, cut at {cuts}: call {xid} has no end");
            }
            assert!(both.ends.iter().all(|end| end.device.exposed.is_empty()));
            if !both.cut {
                break;
            }
            cuts += 1;
        }
        assert!(cuts >= 4, "{what}: {cuts}");
    }
}

/// Whatever both ends do, in whatever order, with credits of 1 to 128 that change all the time.
#[test]
fn both_directions_keep_every_rule_at_every_step_whatever_is_done() {
    for seed in 1..=100u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let settings = |random: &mut Random| Settings {
            credits: random.pick(&[1, 2, 8, 32]),
            inline: random.pick(&[1024, 2048]),
            ..SETTINGS
        };
        let (client, server) = (settings(&mut random), settings(&mut random));
        let mut both = Both::ready(client, server);
        let mut next = [0u32; 2];
        for _ in 0..400 {
            let side = random.pick(&[Client, Server]);
            match random.below(9) {
                0 | 1 => {
                    next[side as usize] += 1;
                    let (len, reply) = (16 + random.below(5000), 12 + random.below(5000));
                    both.call(side, next[side as usize], len, reply);
                }
                2 | 3 => drop(both.deliver(side)),
                4 => drop(both.read(side)),
                5 => drop(both.take(side)),
                6 => {
                    let handed = both.handed[side as usize].len();
                    if handed > 0 {
                        both.answer(side, random.below(handed));
                    }
                }
                7 => {
                    both.end(side).engine.grant(1 + random.below(128) as u32);
                    both.drain(side);
                }
                _ => {
                    both.end(side).ask(1 + random.below(128) as u32);
                    both.drain(side);
                }
            }
        }
        for side in [Client, Server] {
            while !both.handed[side as usize].is_empty() {
                both.answer(side, 0);
            }
        }
        both.drive();
        for (side, made) in both.made.iter().enumerate() {
            for (xid, made) in made {
                let outcome =
                    made.outcome.as_ref().unwrap_or_else(|| panic!("{side}: call {xid} has no end"));
                assert!(outcome.is_ok(), "seed {seed}, {side}: call {xid}: {outcome:?}");
            }
        }
    }
}

/// rule 143: the binding of the program tells what is eligible, whichever way its calls go.
#[test]
fn an_eligible_argument_of_a_call_back_travels_in_a_chunk_of_its_own() {
    let mut both = Both::warm(SETTINGS, SETTINGS);
    // NFS version 3 WRITE: a file handle, offset, count, stability, and 1500 bytes.
    let head = [9, 0, 2, 100_003, 3, 7, 0, 0, 0, 0, 4, 0x0102_0304, 0, 0, 1500, 2, 1500];
    let message: Vec<u8> = words(&head).into_iter().chain((0..1500).map(|at| at as u8)).collect();
    let buf = both.buf(&message);
    both.made[Server as usize].insert(9, Made::default());
    let End { engine, device, .. } = both.end(Server);
    engine.call(Xid(9), buf, reply_of(200), device).unwrap();
    both.drain(Server);
    let header = header::decode(both.last(Server), Versions::ONE).unwrap();
    let Body::Msg { chunks, payload } = header.body else { panic!("{header}") };
    let read = chunks.reads().next().unwrap();
    assert_eq!((read.position, read.target.length), (Position(4 * head.len() as u32), 1500));
    assert_eq!(payload.len(), 4 * head.len());
    both.settle();
    let request = both.end(Client).engine.poll_request().unwrap();
    assert!(bytes(&request.message) == message && request.placed.is_some_and(|placed| placed.len() == 1500));
}
