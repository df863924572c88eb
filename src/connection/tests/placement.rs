//! Direct data placement between two engines: whatever is encoded arrives as the plain XDR stream, and only what a
//! binding names travels in chunks of its own.
//!
//! The messages here are RPC Calls and Replies, made by hand. A [`Duo`] is two engines and the devices between them; it
//! checks every Send ([`Duo::inspect`]).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use smallvec::smallvec;

use super::pair::*;
use super::*;
use crate::binding::Item;
use crate::memory::{Program, Regions};
use crate::wire::lists::Chunk;

const NFS: u32 = 100_003;
/// Programs with text bindings: at both ends, at the client only, at the server only; and one without.
const BOTH: u32 = 0x2000_0001;
const CLIENT_ONLY: u32 = 0x2000_0002;
const SERVER_ONLY: u32 = 0x2000_0003;
const UNBOUND: u32 = 0x2000_0004;

fn registry(programs: [u32; 2]) -> Arc<Registry> {
    let registry = Registry::built_in();
    for program in programs {
        let text = format!(
            "{program} 1 1 arguments=string,data,int,data results=int\n\
             {program} 1 2 arguments=count results=status,int,data"
        );
        assert_eq!(registry.add_text("test", &text), [""; 0]);
    }
    Arc::new(registry)
}

/// Bytes of a message, and its eligible items.
#[derive(Clone, Default, Debug)]
struct Xdr {
    bytes: Vec<u8>,
    items: Vec<Item>,
    /// All opaques of some length: what an encoder may leave in the program's memory.
    opaques: Vec<Item>,
}

impl Xdr {
    fn words(mut self, words: &[u32]) -> Xdr {
        self.bytes.extend(words.iter().flat_map(|word| word.to_be_bytes()));
        self
    }

    /// Bytes and pad that look like nothing else.
    fn fixed(mut self, len: usize) -> Xdr {
        let start = self.bytes.len();
        let pattern = patterned(Vec::new(), len, |at| (at * 7 + start * 3 + 1) as u8);
        self.bytes.extend_from_slice(&pattern);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    fn opaque(mut self, len: usize) -> Xdr {
        self = self.words(&[len as u32]);
        self.opaques.push(Item { position: self.bytes.len(), length: len });
        self.fixed(len)
    }

    fn item(self, len: usize) -> Xdr {
        let mut xdr = self.opaque(len);
        xdr.items.extend(xdr.opaques.last().copied());
        xdr
    }
}

fn call_head(xid: u32, procedure: (u32, u32, u32), flavor: (u32, usize)) -> Xdr {
    let (program, version, number) = procedure;
    let xdr = Xdr::default().words(&[xid, 0, 2, program, version, number, flavor.0, flavor.1 as u32]);
    xdr.fixed(flavor.1).words(&[0, 0])
}

fn reply_head(xid: u32, verifier: usize) -> Xdr {
    Xdr::default().words(&[xid, 1, 0, 0, verifier as u32]).fixed(verifier).words(&[0])
}

/// RPCSEC_GSS data with a service: 1 none, 2 integrity, 3 privacy.
fn gss_head(xid: u32, procedure: (u32, u32, u32), gss_proc: u32, service: u32) -> Xdr {
    let (program, version, number) = procedure;
    let head = [xid, 0, 2, program, version, number, 6, 24, 1, gss_proc, 77, service, 4, 0x1234];
    Xdr::default().words(&head).words(&[6, 40]).fixed(40)
}

fn write_3(head: Xdr, len: usize) -> Xdr {
    head.opaque(28).words(&[0, 0, len as u32, 2]).item(len)
}

fn read_3(head: Xdr, count: usize) -> Xdr {
    head.opaque(28).words(&[0, 0, count as u32])
}

fn read_3_reply(head: Xdr, len: usize) -> Xdr {
    head.words(&[0, 1]).fixed(84).words(&[len as u32, 1]).item(len)
}

/// What a test asks of a call.
struct Plan {
    call: Xdr,
    reply: Xdr,
    /// Most bytes of the reply, if no binding says so.
    max: usize,
    /// RPCSEC_GSS protects it.
    wrapped: bool,
    /// Longest eligible result.
    most: usize,
}

struct Sent {
    plan: Plan,
    /// Memory that was lent for it.
    lent: Vec<Program>,
    place: Option<Program>,
    abandoned: bool,
    outcome: Option<Result<Vec<u8>, Error>>,
    lists: Option<Lists>,
}

struct Duo {
    memory: Arc<Memory>,
    client: Connection,
    server: Connection,
    at_client: Device,
    at_server: Device,
    many: bool,
    invalidates: bool,
    /// Handles that the server has invalidated.
    remote: usize,
    /// Each side's, in the order in which they were posted.
    sends: BTreeMap<bool, VecDeque<WorkRequest>>,
    reads: VecDeque<WorkRequest>,
    sent: BTreeMap<u32, Sent>,
    /// What the server lent, per reply under way.
    results: Vec<Program>,
    /// Every message of the server.
    replies: Vec<Vec<u8>>,
    closed: Option<Error>,
}

#[derive(Clone, Copy)]
struct Shape {
    client: Settings,
    server: Settings,
    max_segment: usize,
}

const ENDS: Settings =
    Settings { credits: 8, inline: 4096, max_call: 1 << 22, remote_invalidation: true, ..SETTINGS };

const SHAPE: Shape = Shape { client: ENDS, server: ENDS, max_segment: 1 << 30 };

fn device(seed: u32, max_segment: usize) -> Device {
    Device {
        next: seed,
        exposed: BTreeMap::new(),
        invalidated: Vec::new(),
        receives: 0,
        max_segment,
        read_depth: 16,
        exposures_left: u32::MAX,
        fail_invalidate: false,
        read: std::collections::BTreeSet::new(),
        tells_reads: true,
    }
}

impl Duo {
    fn new(shape: Shape) -> Duo {
        let Shape { client, server, max_segment } = shape;
        let memory = Memory::new(client.inline.max(server.inline), 1 << 22, 1 << 26);
        let engine = |role, own: Settings, peer: Settings, programs| {
            Connection::new(role, own, sizes(peer), memory.clone(), registry(programs))
        };
        Duo {
            client: engine(Role::Client, client, server, [BOTH, CLIENT_ONLY]),
            server: engine(Role::Server, server, client, [BOTH, SERVER_ONLY]),
            memory,
            at_client: device(1, max_segment),
            at_server: device(2, max_segment),
            many: client.many_chunks,
            invalidates: client.remote_invalidation && server.remote_invalidation,
            remote: 0,
            sends: BTreeMap::from([(true, VecDeque::new()), (false, VecDeque::new())]),
            reads: VecDeque::new(),
            sent: BTreeMap::new(),
            results: Vec::new(),
            replies: Vec::new(),
            closed: None,
        }
    }

    /// A message with some of its opaques lent, as an encoder leaves them.
    fn message(
        &self,
        xdr: &Xdr,
        lend: impl Fn(usize, &Item) -> bool,
        programs: &mut Vec<Program>,
    ) -> Message {
        let mut body = self.memory.message().unwrap();
        body.extend(&xdr.bytes).unwrap();
        let mut lent = Vec::new();
        let lent_ones = |(at, item): &(usize, &Item)| item.length > 400 && lend(*at, item);
        for (_, item) in xdr.opaques.iter().enumerate().filter(lent_ones) {
            let mut program = Program::new(&xdr.bytes[item.range()]);
            lent.push((item.position, program.source()));
            programs.push(program);
            // What the hole holds is never sent.
            body[item.range()].fill(0xdd);
        }
        Message::new(body, lent)
    }

    fn call(&mut self, xid: u32, plan: Plan, lend: impl Fn(usize, &Item) -> bool, place: Option<usize>) {
        let mut lent = Vec::new();
        let message = self.message(&plan.call, lend, &mut lent);
        let mut place = place.map(|len| Program::new(&vec![0xaa; len]));
        let places = place.iter_mut().map(Program::sink).collect();
        let expect = Expect::Reply { max: plan.max, places };
        self.sent.insert(xid, Sent { plan, lent, place, abandoned: false, outcome: None, lists: None });
        if let Err(error) = self.client.call(Xid(xid), message, expect, &mut self.at_client) {
            self.sent.get_mut(&xid).unwrap().outcome = Some(Err(error));
        }
        self.drain(true);
    }

    fn abandon(&mut self, xid: u32) {
        self.client.abandon(Xid(xid), &mut self.at_client);
        self.drain(true);
        let sent = self.sent.get_mut(&xid).unwrap();
        sent.abandoned |= sent.outcome.is_none();
        self.all_back(xid);
    }

    /// Nothing of the program's memory is held once its call is over.
    fn all_back(&mut self, xid: u32) {
        let sent = self.sent.get_mut(&xid).unwrap();
        assert!(sent.lent.iter().all(Program::is_back), "arguments of call {xid} are still in use");
        assert!(sent.place.iter().all(Program::is_back), "the results' buffer of call {xid} is still in use");
        // It is the program's to write again.
        for program in &mut sent.lent {
            program.bytes().fill(0x55);
        }
    }

    fn drain(&mut self, client: bool) {
        loop {
            let engine = if client { &mut self.client } else { &mut self.server };
            let Some(output) = engine.poll_output() else { return };
            match output {
                Output::Receive(_) => {}
                Output::Post(read @ WorkRequest::Read { .. }) => self.reads.push_back(read),
                Output::Post(request) => {
                    if let WorkRequest::Send { gather, .. } = &request {
                        let message = bytes(gather);
                        self.inspect(client, &message);
                    }
                    self.sends.get_mut(&client).unwrap().push_back(request);
                }
                Output::Done { xid, outcome } => self.done(xid.0, outcome.map(|reply| reply.pieces)),
                Output::Close(error) => self.close(error),
            }
        }
    }

    fn close(&mut self, error: Error) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(error.clone());
        self.at_client.exposed.clear();
        self.sends.values_mut().for_each(VecDeque::clear);
        self.reads.clear();
        for client in [true, false] {
            let engine = if client { &mut self.client } else { &mut self.server };
            engine.handle_closed(error.clone());
            self.drain(client);
        }
    }

    fn done(&mut self, xid: u32, outcome: Result<Regions, Error>) {
        let sent = self.sent.get_mut(&xid).unwrap();
        assert!(
            sent.outcome.is_none() && !sent.abandoned,
            "call {xid} ends twice, or after it was abandoned"
        );
        // The pieces, which may lie in the program's buffer, end with this line.
        sent.outcome = Some(outcome.map(|pieces| bytes(&pieces)));
        self.all_back(xid);
    }

    /// What must hold for every Send.
    fn inspect(&mut self, client: bool, message: &[u8]) {
        let (send, _) = if client { self.client.thresholds() } else { self.server.thresholds() };
        assert!(
            message.len() <= send,
            "rule 12, rule 13: {} bytes over the threshold of {send}",
            message.len()
        );
        let header = header::decode(message, Versions::ONE).unwrap();
        let (Body::Msg { chunks, .. } | Body::Nomsg { chunks }) = header.body else {
            self.replies.push(message.to_vec());
            return;
        };
        let lists = chunks.to_lists();
        assert!(lists.writes.iter().chain(&lists.reply).all(|chunk| chunk.len() <= chunks::SEGMENTS_MAX));
        if !client {
            // rule 56
            assert!(lists.reads.is_empty());
            let sent = &self.sent[&header.xid.0];
            let offered = sent.lists.as_ref().unwrap();
            // rule 74, rule 97: what was offered comes back with its handles, its number and its order.
            let names = |chunk: &Chunk| chunk.iter().map(|s| (s.handle, s.offset)).collect::<Vec<_>>();
            assert_eq!(
                lists.writes.iter().map(names).collect::<Vec<_>>(),
                offered.writes.iter().map(names).collect::<Vec<_>>()
            );
            assert_eq!(lists.reply.as_ref().map(names), offered.reply.as_ref().map(names));
            // rule 39, rule 76, rule 78: a Write chunk holds one eligible result, and no pad.
            let mut lengths = lists.writes.iter().map(|c| c.iter().map(|s| s.length as usize).sum::<usize>());
            let items = &sent.plan.reply.items;
            assert!(lengths.all(|len| len == 0 || items.iter().any(|item| item.length == len)));
            self.replies.push(message.to_vec());
            return;
        }
        let sent = self.sent.get_mut(&header.xid.0).unwrap();
        let mut normal: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for read in &lists.reads {
            let (len, segments) = normal.entry(read.position.0).or_default();
            (*len, *segments) = (*len + read.target.length as usize, *segments + 1);
        }
        assert!(normal.values().all(|(_, segments)| *segments <= chunks::SEGMENTS_MAX));
        let long = normal.remove(&0).is_some();
        // rule 19, rule 90: a Position-Zero chunk is the payload of an RDMA_NOMSG, and of nothing else.
        assert_eq!(long, matches!(header.body, Body::Nomsg { .. }));
        for (position, (len, _)) in &normal {
            // rule 39, rule 43, rule 44, rule 51, rule 52, rule 53: one whole eligible item, at its place in the
            // unreduced stream, without its count and its pad.
            let item = Item { position: *position as usize, length: *len };
            assert!(sent.plan.call.items.contains(&item), "{item:?} of {:?}", sent.plan.call.items);
        }
        if sent.plan.wrapped {
            // rule 119, rule 120: nothing is reduced; there may be Position-Zero and Reply chunks.
            assert!(normal.is_empty() && lists.writes.is_empty());
        }
        if !self.many {
            assert!(normal.len() <= usize::from(!long) && lists.writes.len() <= 1);
        }
        sent.lists = Some(lists);
    }

    /// Does one thing that may be done. `pick` chooses among what is possible.
    fn step(&mut self, pick: usize) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let choices = [!self.sends[&true].is_empty(), !self.sends[&false].is_empty(), !self.reads.is_empty()];
        let open: Vec<usize> = (0..3).filter(|n| choices[*n]).collect();
        if open.is_empty() {
            return false;
        }
        match open[pick % open.len()] {
            2 => {
                let Some(WorkRequest::Read { id, sink, at, from }) = self.reads.pop_front() else {
                    unreachable!()
                };
                let placed = match self.at_client.access(from) {
                    Some((Exposed::Source(region), start)) => {
                        sink.place(at, &region.slice(start, from.length as usize))
                    }
                    _ => false,
                };
                drop(sink);
                assert!(placed, "rule 102: a Read of what is not exposed");
                self.server.handle_read(id);
                self.drain(false);
            }
            side => self.deliver(side == 0),
        }
        true
    }

    fn deliver(&mut self, client: bool) {
        let Some(request) = self.sends.get_mut(&client).unwrap().pop_front() else { return };
        match request {
            WorkRequest::Write { gather, to } => {
                let data = bytes(&gather);
                let placed = match self.at_client.access(to) {
                    Some((Exposed::Sink(sink), at)) => sink.place(at, &data),
                    _ => false,
                };
                assert!(placed, "rule 102: a Write to what is not exposed");
            }
            WorkRequest::Send { gather, invalidate } => {
                let message = bytes(&gather);
                drop(gather);
                let mut buf = self.memory.message().unwrap();
                buf.extend(&message).unwrap();
                if client {
                    self.server.handle_receive(buf, None, &mut self.at_server);
                } else {
                    if let Some(handle) = invalidate {
                        assert!(self.invalidates);
                        self.remote += 1;
                        assert!(self.at_client.exposed.remove(&handle.0).is_some());
                    }
                    self.client.handle_receive(buf, invalidate, &mut self.at_client);
                }
            }
            WorkRequest::Read { .. } => unreachable!("Reads have a queue of their own"),
        }
        self.drain(!client);
    }

    /// Answers the oldest request that is whole.
    fn serve(&mut self, lend: impl Fn(usize, &Item) -> bool) -> bool {
        let Some(request) = self.server.poll_request() else { return false };
        self.drain(false);
        let xid = request.xid.0;
        let sent = &self.sent[&xid];
        assert!(bytes(&request.message) == sent.plan.call.bytes, "call {xid} was changed on its way");
        assert_eq!(request.wrapped, sent.plan.wrapped);
        let reply = sent.plan.reply.clone();
        let wrapped = request.wrapped;
        let mut programs = Vec::new();
        let message = self.message(&reply, |at, item| !wrapped && lend(at, item), &mut programs);
        // A reply that fits nowhere is an outcome, which the caller sees.
        let _ = self.server.reply(request.id, message);
        self.results.extend(programs);
        self.drain(false);
        true
    }

    fn settle(&mut self) {
        while self.step(0) || self.serve(|_, _| true) {}
        assert!(self.closed.is_some() || self.results.iter().all(Program::is_back));
    }

    fn make(&mut self, xid: u32, plan: Plan) -> &Result<Vec<u8>, Error> {
        self.call(xid, plan, |_, _| true, None);
        self.settle();
        self.sent[&xid].outcome.as_ref().expect("the call has ended")
    }

    /// Checks that it ended with its reply, byte for byte.
    fn succeeded(&self, xid: u32) {
        let Sent { plan, outcome, .. } = &self.sent[&xid];
        match outcome.as_ref().expect("the call has ended") {
            Ok(reply) => assert!(*reply == plan.reply.bytes, "the reply to {xid} was changed on its way"),
            Err(error) => panic!("call {xid}: {error}"),
        }
    }

    fn lists(&self, xid: u32) -> &Lists {
        self.sent[&xid].lists.as_ref().expect("sent")
    }
}

fn plan(call: Xdr, reply: Xdr) -> Plan {
    let max = reply.bytes.len();
    let most = reply.items.iter().map(|item| item.length).max().unwrap_or(0);
    Plan { call, reply, max, wrapped: false, most }
}

/// A Call and its Reply of any kind.
fn any(random: &mut Random, xid: u32) -> Plan {
    let lengths = [0, 1, 2, 3, 5, 399, 400, 401, 1000, 1023, 4000, 4097, 8191, 8193, 65537, 100_001, 300_000];
    let len = random.pick(&lengths);
    let auth = random.pick(&[(0, 0), (1, 28), (1, 399), (1, 400)]);
    let verifier = random.pick(&[0, 0, 3, 40, 400]);
    let service = random.below(8) as u32;
    let gss = random.below(6) == 0;
    let procedure = random.pick(&[
        (NFS, 3, 7),
        (NFS, 3, 6),
        (NFS, 3, 6),
        (NFS, 3, 10),
        (NFS, 3, 5),
        (NFS, 3, 17),
        (NFS, 4, 1),
        (BOTH, 1, 1),
        (BOTH, 1, 2),
        (CLIENT_ONLY, 1, 1),
        (CLIENT_ONLY, 1, 2),
        (SERVER_ONLY, 1, 1),
        (SERVER_ONLY, 1, 2),
        (UNBOUND, 1, 1),
    ]);
    let (head, wrapped) = if gss {
        let gss_proc = u32::from(service == 4);
        let service = service % 3 + 1;
        (gss_head(xid, procedure, gss_proc, service), gss_proc != 0 || service != 1)
    } else {
        (call_head(xid, procedure, auth), false)
    };
    let back = reply_head(xid, verifier);
    let failed = random.below(8) == 0;
    let short = random.below(len + 1);
    let mut most = 0;
    let (call, reply) = match procedure {
        _ if wrapped => (head.opaque(len), back.opaque(random.pick(&lengths))),
        (NFS, 3, 7) => (write_3(head, len), back.words(&[0]).fixed(128)),
        (NFS, 3, 6) => {
            most = len;
            let reply = if failed { back.words(&[5, 0]) } else { read_3_reply(back, short) };
            (read_3(head, len), reply)
        }
        (NFS, 3, 10) => {
            let target = len.min(4095);
            let attributes = [1, 0o777, 0, 0, 1, 0, 9, 1, 2, 5, 6];
            let call = head.opaque(28).opaque(7).words(&attributes[..8]).words(&[2, 5, 6]).item(target);
            (call, back.words(&[0]).fixed(200))
        }
        (NFS, 3, 5) => {
            most = 4096;
            let reply = if failed {
                back.words(&[22, 1]).fixed(84)
            } else {
                back.words(&[0, 0]).item(short.min(4096))
            };
            (head.opaque(32), reply)
        }
        (NFS, 3, 17) => {
            let call = head.opaque(28).words(&[0, 0, 0, 0, 512, len as u32]);
            (call, back.words(&[0, 0]).fixed(random.below(len + 1)))
        }
        (NFS, 4, 1) => compound(random, head, back, &mut most),
        (_, _, 2) => {
            most = len;
            let reply = if failed { back.words(&[3]) } else { back.words(&[0, 9]).item(short) };
            (head.words(&[len as u32]), reply)
        }
        (_, _, 1) => {
            let second = random.pick(&lengths);
            (head.opaque(5).item(len).words(&[7]).item(second), back.words(&[1]))
        }
        _ => (head.opaque(len), back.opaque(short)),
    };
    let (mut call, mut reply) = (call, reply);
    let bound_at = |ends: [u32; 2]| procedure.0 == NFS || ends.contains(&procedure.0);
    if wrapped || !bound_at([BOTH, CLIENT_ONLY]) {
        call.items.clear();
    }
    if wrapped || !bound_at([BOTH, SERVER_ONLY]) {
        reply.items.clear();
    }
    let max = reply.bytes.len().max(4000 * random.below(2));
    Plan { call, reply, max, wrapped, most }
}

/// PUTFH and some of READ, WRITE, CREATE of a link, READLINK, of which one may fail.
fn compound(random: &mut Random, head: Xdr, back: Xdr, most: &mut usize) -> (Xdr, Xdr) {
    let count = 1 + random.below(4);
    let fails = if random.below(4) == 0 { random.below(count) } else { count };
    let mut call = head.opaque(3).words(&[1, 1 + count as u32, 22]).opaque(20);
    let done = 1 + (fails + 1).min(count) as u32;
    let mut reply = back.words(&[if fails < count { 5 } else { 0 }]).opaque(3).words(&[done, 22, 0]);
    for at in 0..count {
        let len = random.pick(&[0, 1, 399, 5000, 20_001]);
        let (number, arguments, results): (u32, Xdr, Xdr) = match random.below(4) {
            0 => {
                *most = (*most).max(len);
                call = call.words(&[25]).fixed(16).words(&[0, 0, len as u32]);
                (25, call, reply.clone().words(&[25, 0, 1]).item(random.below(len + 1)))
            }
            1 => {
                call = call.words(&[38]).fixed(16).words(&[0, 0, 2]).item(len);
                (38, call, reply.clone().words(&[38, 0, len as u32, 2]).fixed(8))
            }
            2 => {
                let len = len.min(4000);
                call = call.words(&[6, 5]).item(len).opaque(4).words(&[0, 0]);
                (6, call, reply.clone().words(&[6, 0]).fixed(20).words(&[0]))
            }
            _ => {
                *most = (*most).max(4096);
                (27, call.words(&[27]), reply.clone().words(&[27, 0]).item(len.min(4096)))
            }
        };
        call = arguments;
        match at.cmp(&fails) {
            std::cmp::Ordering::Less => reply = results,
            std::cmp::Ordering::Equal => reply = reply.words(&[number, 5]),
            std::cmp::Ordering::Greater => {}
        }
    }
    (call, reply)
}

/// rule 101, rule 102: lent or copied. rule 113: whatever the connection's parameters are. rule 114: programs share a
/// connection.
fn run(seed: u64) -> (usize, usize, usize) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let settings = |random: &mut Random| Settings {
        credits: random.pick(&[1, 2, 8]),
        inline: random.pick(&[1024, 2048, 4096, 65536, 262_144]),
        max_call: 1 << 22,
        many_chunks: random.below(2) == 0,
        remote_invalidation: random.below(2) == 0,
        ..SETTINGS
    };
    let shape = Shape {
        client: settings(&mut random),
        server: settings(&mut random),
        max_segment: random.pick(&[40_000, 1 << 16, 1 << 20, 1 << 30]),
    };
    let mut duo = Duo::new(shape);
    let cut = if random.below(5) == 0 { random.below(200) } else { usize::MAX };
    let (mut next, mut steps, mut reduced, mut written, mut placed) = (1, 0, 0, 0, 0);
    while next <= 12 || duo.sent.values().any(|sent| sent.outcome.is_none() && !sent.abandoned) {
        steps += 1;
        if steps >= cut {
            duo.close(Error::new(Kind::ConnectionLost, "cut"));
            break;
        }
        let lend = random.below(4);
        let which = move |at: usize, _: &Item| lend == 0 || (lend == 1 && at.is_multiple_of(2));
        match random.below(8) {
            0 | 1 if next <= 12 => {
                let plan = any(&mut random, next);
                let place = (random.below(2) == 0).then(|| plan.most.max(1) + random.below(3));
                duo.call(next, plan, which, place);
                next += 1;
            }
            2 if random.below(20) == 0 => {
                let alive: Vec<u32> = duo
                    .sent
                    .iter()
                    .filter(|(_, s)| s.outcome.is_none() && !s.abandoned)
                    .map(|(x, _)| *x)
                    .collect();
                if !alive.is_empty() && shape.client.credits > 1 && shape.server.credits > 1 {
                    let xid = random.pick(&alive);
                    duo.abandon(xid);
                }
            }
            3 => {
                duo.serve(which);
            }
            pick => {
                duo.step(pick);
            }
        }
        assert!(steps < 100_000, "seed {seed} hangs");
        if duo.client.starved() {
            break;
        }
    }
    if duo.closed.is_none() {
        duo.settle();
    }
    assert!(steps >= cut || duo.closed.is_none(), "seed {seed}: {:?}", duo.closed);
    for (xid, sent) in &mut duo.sent {
        assert!(sent.lent.iter().chain(&sent.place).all(Program::is_back), "seed {seed}: call {xid}");
        let Some(lists) = &sent.lists else { continue };
        reduced += lists.reads.iter().filter(|read| read.position.0 > 0).count();
        written += lists.writes.len();
        match &sent.outcome {
            Some(Ok(reply)) => {
                assert!(*reply == sent.plan.reply.bytes, "seed {seed}: the reply to {xid} was changed");
                if let (Some(place), Some(item)) = (&mut sent.place, sent.plan.reply.items.first())
                    && !lists.writes.is_empty()
                    && item.length > 0
                {
                    // It came into the program's own buffer.
                    assert!(place.bytes()[..item.length] == reply[item.range()], "seed {seed}: call {xid}");
                    placed += 1;
                }
            }
            Some(Err(error)) => assert!(steps >= cut, "seed {seed}: call {xid}: {error}"),
            None => assert!(sent.abandoned || duo.client.starved() || steps >= cut),
        }
    }
    (reduced, written, placed)
}

fn runs(seeds: std::ops::Range<u64>) {
    let (mut reduced, mut written, mut placed) = (0, 0, 0);
    for seed in seeds.clone() {
        let (r, w, p) = run(seed);
        (reduced, written, placed) = (reduced + r, written + w, placed + p);
    }
    let n = (seeds.end - seeds.start) as usize;
    assert!(
        reduced > n && written > n && placed > n / 4,
        "{reduced} reduced, {written} written, {placed} placed"
    );
}

#[test]
fn whatever_is_placed_arrives_as_the_plain_stream() {
    runs(1..600);
}

#[test]
#[ignore = "long: make check-long"]
fn whatever_is_placed_arrives_as_the_plain_stream_many_times() {
    runs(1000..60_000);
}

// ---------------------------------------------------------------------------------------------------------- the rules

/// Two engines that know each other's credits.
fn warm(shape: Shape) -> Duo {
    let mut duo = Duo::new(shape);
    duo.make(0xffff, plan(call_head(0xffff, (UNBOUND, 1, 0), (0, 0)), reply_head(0xffff, 0)))
        .as_ref()
        .unwrap();
    duo
}

fn shape(inline: usize) -> Shape {
    let settings = Settings { inline, ..SHAPE.client };
    Shape { client: settings, server: settings, ..SHAPE }
}

impl Duo {
    /// A Call that our own requester would not send: `reads` are `(position, bytes)`, each a segment of its own.
    fn foreign(&mut self, xid: u32, proc: Proc, reads: &[(u32, &[u8])], payload: &[u8]) {
        let mut lists = Lists::default();
        for (position, data) in reads {
            let target = match data.len() {
                0 => Segment { handle: Handle(9), length: 0, offset: 0 },
                _ => self.at_client.expose_source(Region::copy_from(data).unwrap()).unwrap(),
            };
            lists.reads.push(ReadSegment { position: Position(*position), target });
        }
        self.foreign_lists(xid, proc, &lists, payload);
    }

    fn foreign_lists(&mut self, xid: u32, proc: Proc, lists: &Lists, payload: &[u8]) {
        let mut message = Vec::new();
        header::encode(&mut message, v1::VERSION, Xid(xid), Credits(8), proc, Direction::Call, lists);
        message.extend(payload);
        let mut buf = self.memory.message().unwrap();
        buf.extend(&message).unwrap();
        self.server.handle_receive(buf, None, &mut self.at_server);
        self.drain(false);
        while !self.reads.is_empty() {
            self.step(2);
        }
    }

    /// What the server made of it: the Call, or `None` if it answered ERR_CHUNK and handed nothing up.
    fn understood(&mut self, xid: u32) -> Option<Vec<u8>> {
        let request = self.server.poll_request();
        let refused = self.replies.last().is_some_and(|reply| *reply == words(&[xid, 1, 8, 4, 2]));
        assert_eq!(request.is_none(), refused, "a Call is either handed up or answered");
        self.replies.clear();
        self.sends.values_mut().for_each(VecDeque::clear);
        request.map(|request| {
            self.server.discard(request.id);
            self.drain(false);
            bytes(&request.message)
        })
    }
}

/// A message without an item and its pad.
fn without(message: &[u8], item: Item) -> Vec<u8> {
    [&message[..item.position], &message[item.range().end.next_multiple_of(4)..]].concat()
}

/// rule 48, rule 49, rule 51: the chunk has no pad; what follows it inline begins on a multiple of four.
#[test]
fn a_read_chunk_has_the_item_alone_and_what_follows_it_is_aligned() {
    for len in 5000..5005 {
        let mut duo = warm(SHAPE);
        let call = call_head(1, (BOTH, 1, 1), (0, 0)).opaque(5).item(len).words(&[7]).item(3);
        let item = call.items[0];
        duo.make(1, plan(call, reply_head(1, 0).words(&[1]))).as_ref().unwrap();
        let lists = duo.lists(1);
        assert_eq!(
            lists.reads.iter().map(|r| (r.position.0, r.target.length)).collect::<Vec<_>>(),
            [(item.position as u32, len as u32)]
        );
        assert_eq!(item.position % 4, 0);
        duo.succeeded(1);
    }
}

/// rule 49, rule 50, rule 51: with and without pad, in one segment or with the pad in one of its own.
#[test]
fn a_read_chunk_is_taken_with_and_without_its_pad() {
    for len in 1..6 {
        let call = write_3(call_head(1, (NFS, 3, 7), (0, 0)), len);
        let item = call.items[0];
        let payload = without(&call.bytes, item);
        let position = item.position as u32;
        let padded = &call.bytes[item.position..item.range().end.next_multiple_of(4)];
        let (data, pad) = padded.split_at(len);
        for chunk in
            [vec![(position, data)], vec![(position, padded)], vec![(position, data), (position, pad)]]
        {
            let mut duo = warm(SHAPE);
            duo.foreign(1, Proc::Msg, &chunk, &payload);
            assert!(duo.understood(1).unwrap() == call.bytes, "{len} bytes in {} segments", chunk.len());
        }
    }
}

/// rule 43, rule 45: one item, all of it, and nothing else.
#[test]
fn a_read_chunk_of_another_length_than_its_item_is_refused() {
    for len in [8, 9] {
        let call = write_3(call_head(1, (NFS, 3, 7), (0, 0)), len);
        let item = call.items[0];
        let payload = without(&call.bytes, item);
        // A chunk that is too short leaves a message that ends too early, which is for the program to refuse (rule 59).
        for wrong in [len + 4, len + 5, 2 * len] {
            let mut duo = warm(SHAPE);
            duo.foreign(1, Proc::Msg, &[(item.position as u32, &vec![1; wrong])], &payload);
            assert_eq!(duo.understood(1), None, "{wrong} bytes for an item of {len}");
        }
    }
}

/// rule 53
#[test]
fn a_position_that_is_no_multiple_of_four_is_refused() {
    let call = write_3(call_head(1, (NFS, 3, 7), (0, 0)), 8);
    let item = call.items[0];
    for off in [1, 2, 3] {
        let mut duo = warm(SHAPE);
        let at = (item.position + off) as u32;
        duo.foreign(1, Proc::Msg, &[(at, &call.bytes[item.range()])], &without(&call.bytes, item));
        assert_eq!(duo.understood(1), None);
    }
}

/// rule 42, rule 54: any number of segments, cut anywhere, at Position Zero too, empty ones among them.
#[test]
fn segments_of_one_position_are_one_chunk_in_list_order() {
    let call = write_3(call_head(1, (NFS, 3, 7), (0, 0)), 41);
    let item = call.items[0];
    let data = &call.bytes[item.range()];
    let mut chunk: Vec<(u32, &[u8])> = data.chunks(1).map(|byte| (item.position as u32, byte)).collect();
    chunk.insert(7, (item.position as u32, &[]));
    let mut duo = warm(SHAPE);
    duo.foreign(1, Proc::Msg, &chunk, &without(&call.bytes, item));
    assert!(duo.understood(1).unwrap() == call.bytes);
    let chunk: Vec<(u32, &[u8])> = call.bytes.chunks(5).map(|part| (0, part)).collect();
    assert!(chunk.len() > 16);
    duo.foreign(2, Proc::Nomsg, &[], &[]);
    assert_eq!(duo.understood(2), None);
    let mut duo = warm(SHAPE);
    duo.foreign(1, Proc::Nomsg, &chunk, &[]);
    assert!(duo.understood(1).unwrap() == call.bytes);
}

/// rule 39, rule 60
#[test]
fn a_call_with_an_item_reduced_that_is_not_eligible_is_refused() {
    let lookup = call_head(1, (NFS, 3, 3), (0, 0)).opaque(28).opaque(12);
    let name = lookup.opaques[1];
    let mut duo = warm(SHAPE);
    duo.foreign(
        1,
        Proc::Msg,
        &[(name.position as u32, &lookup.bytes[name.range()])],
        &without(&lookup.bytes, name),
    );
    assert_eq!(duo.understood(1), None);
    // For a program without a binding nobody can say what is eligible: any Position is accepted.
    let unbound = call_head(1, (UNBOUND, 1, 1), (0, 0)).opaque(28).opaque(12);
    let item = unbound.opaques[1];
    duo.foreign(
        1,
        Proc::Msg,
        &[(item.position as u32, &unbound.bytes[item.range()])],
        &without(&unbound.bytes, item),
    );
    assert!(duo.understood(1).unwrap() == unbound.bytes);
}

/// rule 118, rule 119: nothing of what RPCSEC_GSS wraps, nor of its own calls, is reduced.
#[test]
fn a_reduced_call_under_integrity_or_privacy_is_refused() {
    for (gss_proc, service) in [(0, 2), (0, 3), (1, 1), (3, 1)] {
        let call = write_3(gss_head(1, (NFS, 3, 7), gss_proc, service), 9);
        let item = call.items[0];
        let mut duo = warm(SHAPE);
        duo.foreign(
            1,
            Proc::Msg,
            &[(item.position as u32, &call.bytes[item.range()])],
            &without(&call.bytes, item),
        );
        assert_eq!(duo.understood(1), None, "gss_proc {gss_proc}, service {service}");
    }
    let call = write_3(gss_head(1, (NFS, 3, 7), 0, 1), 9);
    let item = call.items[0];
    let mut duo = warm(SHAPE);
    duo.foreign(
        1,
        Proc::Msg,
        &[(item.position as u32, &call.bytes[item.range()])],
        &without(&call.bytes, item),
    );
    assert!(duo.understood(1).unwrap() == call.bytes);
}

/// rule 120, rule 121: Long Call and Long reply instead, and room for the largest verifier.
#[test]
fn rpcsec_gss_has_long_messages_and_room_for_its_verifier() {
    let mut duo = warm(shape(1024));
    let reply = reply_head(1, 400).opaque(9000);
    duo.make(1, Plan { wrapped: true, ..plan(gss_head(1, (NFS, 3, 7), 0, 2).opaque(9000), reply) })
        .as_ref()
        .unwrap();
    let lists = duo.lists(1);
    assert!(lists.reads[0].position == Position(0) && lists.reply.is_some() && lists.writes.is_empty());
    // A bound reply: 400 bytes of verifier fit, however small the threshold is.
    for (xid, verifier) in [(2, 0), (3, 400)] {
        let reply = read_3_reply(reply_head(xid, verifier), 3001);
        duo.make(xid, Plan { max: 0, ..plan(read_3(gss_head(xid, (NFS, 3, 6), 0, 1), 3001), reply) })
            .as_ref()
            .unwrap();
        duo.succeeded(xid);
    }
}

/// rule 55: the reply tells that the Read chunks are done with, and nothing before it.
#[test]
fn sources_stay_exposed_until_the_reply_and_no_longer() {
    let mut duo = warm(SHAPE);
    duo.call(
        1,
        plan(write_3(call_head(1, (NFS, 3, 7), (0, 0)), 9001), reply_head(1, 0).words(&[0])),
        |_, _| true,
        None,
    );
    while duo.step(0) {}
    assert!(duo.server.request_ready() && duo.at_client.exposed.len() == 1);
    assert!(!duo.sent[&1].lent[0].is_back());
    duo.settle();
    duo.succeeded(1);
    assert!(duo.at_client.exposed.is_empty());
}

/// rule 40, rule 108, rule 109, rule 117: a program without a binding is served, with Long messages; so are eligible items for
/// which no chunk of their own is possible.
#[test]
fn what_is_not_reduced_travels_inside_long_messages() {
    let mut duo = warm(SHAPE);
    let reply = reply_head(1, 0).opaque(70_001);
    duo.make(1, plan(call_head(1, (UNBOUND, 1, 1), (0, 0)).opaque(70_001), reply)).as_ref().unwrap();
    let lists = duo.lists(1);
    assert!(lists.reads.iter().all(|read| read.position == Position(0)) && !lists.reads.is_empty());
    assert!(lists.writes.is_empty() && lists.reply.is_some());
    // Two large items: one chunk would not be enough, and an unknown responder does not bear more.
    let call = call_head(2, (BOTH, 1, 1), (0, 0)).opaque(5).item(9000).words(&[7]).item(9000);
    duo.make(2, plan(call, reply_head(2, 0).words(&[1]))).as_ref().unwrap();
    assert!(duo.lists(2).reads.iter().all(|read| read.position == Position(0)));
    duo.succeeded(2);
}

/// As with a binding that is wrong about its program, or an xdrproc that encodes a count but fewer bytes.
#[test]
fn a_message_that_ends_inside_an_item_travels_as_it_is() {
    let cut = |mut xdr: Xdr| {
        xdr.bytes.truncate(xdr.bytes.len() - 1000);
        xdr.items.clear();
        xdr.opaques.clear();
        xdr
    };
    let mut duo = warm(SHAPE);
    let call = cut(write_3(call_head(1, (NFS, 3, 7), (0, 0)), 9001));
    duo.make(1, plan(call, reply_head(1, 0).words(&[0]))).as_ref().unwrap();
    duo.succeeded(1);
    let reply = |xid, len| cut(reply_head(xid, 0).words(&[0, 9]).item(len));
    for (xid, len) in [(2, 1900), (3, 4900)] {
        let call = call_head(xid, (BOTH, 1, 2), (0, 0)).words(&[5000]);
        duo.make(xid, plan(call, reply(xid, len))).as_ref().unwrap();
        duo.succeeded(xid);
    }
}

/// rule 20, rule 87: several chunks of a kind, a Long Call with further Read chunks, a Write list with a Reply chunk.
#[test]
fn among_our_own_a_call_has_as_many_chunks_as_it_needs() {
    let settings = Settings { many_chunks: true, ..SHAPE.client };
    let mut duo = warm(Shape { client: settings, server: settings, ..SHAPE });
    let two =
        |xid, second| call_head(xid, (BOTH, 1, 1), (0, 0)).opaque(5).item(9000).words(&[7]).item(second);
    duo.make(1, plan(two(1, 9001), reply_head(1, 0).words(&[1]))).as_ref().unwrap();
    assert_eq!(duo.lists(1).reads.len(), 2);
    // A name of 5000 bytes is not eligible: it makes the rest long.
    let call = call_head(2, (BOTH, 1, 1), (0, 0)).opaque(5000).item(9000).words(&[7]).item(3);
    duo.make(2, plan(call, reply_head(2, 0).words(&[1]))).as_ref().unwrap();
    let positions: Vec<u32> = duo.lists(2).reads.iter().map(|read| read.position.0).collect();
    assert!(positions.contains(&0) && positions.iter().any(|position| *position > 0), "{positions:?}");
    let read = |xdr: Xdr, count: u32| xdr.words(&[25]).fixed(16).words(&[0, 0, count]);
    let call =
        read(read(call_head(3, (NFS, 4, 1), (0, 0)).opaque(0).words(&[1, 3]), 5000), 7001).words(&[9, 1, 8]);
    let done = |xdr: Xdr, len: usize| xdr.words(&[25, 0, 1]).item(len);
    let reply = done(done(reply_head(3, 0).words(&[0]).opaque(0).words(&[3]), 5000), 7001);
    let reply = reply.words(&[9, 0, 1, 8, 6000]).fixed(6000);
    duo.make(3, plan(call, reply)).as_ref().unwrap();
    assert!(duo.lists(3).writes.len() == 2 && duo.lists(3).reply.is_some());
    duo.succeeded(1);
    duo.succeeded(2);
    duo.succeeded(3);
}

/// What a responder of another implementation says to a READ that offered one Write chunk of 5000 bytes.
fn answered(
    program: (u32, u32, u32),
    answer: impl Fn(&Lists, &Xdr) -> (Vec<u8>, Option<Handle>),
) -> (Duo, Xdr) {
    let mut duo = warm(SHAPE);
    let call = match program.0 {
        NFS => read_3(call_head(1, program, (0, 0)), 5000),
        _ => call_head(1, program, (0, 0)).words(&[5000]),
    };
    let reply = match program.0 {
        NFS => read_3_reply(reply_head(1, 0), 700),
        _ => reply_head(1, 0).words(&[0, 9]).item(700),
    };
    duo.call(1, plan(call, reply.clone()), |_, _| false, None);
    duo.sends.values_mut().for_each(VecDeque::clear);
    let lists = duo.lists(1).clone();
    assert_eq!(lists.writes.len(), 1);
    if let Some(Exposed::Sink(sink)) = duo.at_client.exposed.get(&lists.writes[0][0].handle.0) {
        assert!(sink.place(0, &reply.bytes[reply.items[0].range()]));
    }
    let (message, invalidated) = answer(&lists, &reply);
    let mut buf = duo.memory.message().unwrap();
    buf.extend(&message).unwrap();
    duo.client.handle_receive(buf, invalidated, &mut duo.at_client);
    duo.drain(true);
    (duo, reply)
}

/// A reply with this Write list.
fn reply_with(writes: Vec<Chunk>, payload: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    header::encode(
        &mut message,
        v1::VERSION,
        Xid(1),
        Credits(8),
        Proc::Msg,
        Direction::Call,
        &Lists { writes, ..Lists::default() },
    );
    message.extend(payload);
    message
}

fn used(lists: &Lists, length: u32) -> Vec<Chunk> {
    vec![smallvec![Segment { length, ..lists.writes[0][0] }]]
}

/// rule 61, first half; rule 79, rule 80, rule 86: a chunk that comes back unused, empty, or not at all.
#[test]
fn a_result_outside_of_its_write_chunk_is_an_error_of_nfs_and_none_of_private_bindings() {
    for way in 0..3 {
        let answer = |lists: &Lists, reply: &Xdr| {
            let writes = [used(lists, 0), vec![Chunk::new()], vec![]][way].clone();
            (reply_with(writes, &reply.bytes), None)
        };
        let (duo, _) = answered((NFS, 3, 6), answer);
        let error = duo.sent[&1].outcome.as_ref().unwrap().as_ref().unwrap_err();
        assert_eq!(error.kind(), Kind::Peer, "{error}");
        assert!(duo.closed.is_none());
        let (mut duo, reply) = answered((CLIENT_ONLY, 1, 2), answer);
        assert!(*duo.sent[&1].outcome.as_ref().unwrap().as_ref().unwrap() == reply.bytes);
        // That is remembered: no Write chunk any more.
        let call = call_head(2, (CLIENT_ONLY, 1, 2), (0, 0)).words(&[5000]);
        let mut unreduced = reply_head(2, 0).words(&[0, 9]).opaque(4500);
        unreduced.items.clear();
        duo.make(2, plan(call, unreduced)).as_ref().unwrap();
        assert!(duo.lists(2).writes.is_empty() && duo.lists(2).reply.is_some());
    }
}

/// rule 61, second half: what is not eligible, or not all of what is.
#[test]
fn a_reply_that_reduces_something_else_ends_its_call_and_no_other() {
    let failed = reply_head(1, 0).words(&[5, 0]);
    type Case<'a> = &'a dyn Fn(&Lists, &Xdr) -> Vec<u8>;
    let cases: [Case<'_>; 4] = [
        &|lists, _| reply_with(used(lists, 700), &failed.bytes),
        &|lists, reply| reply_with(used(lists, 699), &without(&reply.bytes, reply.items[0])),
        &|lists, reply| reply_with(used(lists, 5001), &without(&reply.bytes, reply.items[0])),
        &|lists, reply| {
            let more = [used(lists, 700), used(lists, 0)].concat();
            reply_with(more, &without(&reply.bytes, reply.items[0]))
        },
    ];
    for (at, case) in cases.iter().enumerate() {
        let (mut duo, _) = answered((NFS, 3, 6), |lists, reply| (case(lists, reply), None));
        let error = duo.sent[&1].outcome.as_ref().unwrap().as_ref().unwrap_err();
        assert_eq!(error.kind(), Kind::Peer, "case {at}: {error}");
        let reply = read_3_reply(reply_head(2, 0), 4999);
        duo.make(2, plan(read_3(call_head(2, (NFS, 3, 6), (0, 0)), 5000), reply)).as_ref().unwrap();
        duo.succeeded(2);
    }
    let honest = |lists: &Lists, reply: &Xdr| {
        (reply_with(used(lists, 700), &without(&reply.bytes, reply.items[0])), None)
    };
    let (duo, _) = answered((NFS, 3, 6), honest);
    duo.succeeded(1);
}

/// rule 153: a handle of that Call, or the connection ends; and none need be.
#[test]
fn an_invalidated_handle_must_be_one_of_the_call_that_the_reply_answers() {
    for (own, fine) in [(true, true), (false, false)] {
        let answer = |lists: &Lists, reply: &Xdr| {
            let handle = if own { lists.writes[0][0].handle } else { Handle(0x7777) };
            (reply_with(used(lists, 700), &without(&reply.bytes, reply.items[0])), Some(handle))
        };
        let (duo, _) = answered((NFS, 3, 6), answer);
        assert_eq!(duo.closed.is_none(), fine);
        if fine {
            duo.succeeded(1);
        }
    }
    // Ours invalidates where a Call names exactly one handle, and where both ends have said that it may.
    for (client, server, invalidates) in [(true, true, true), (true, false, false), (false, true, false)] {
        let with = |remote_invalidation| Settings { remote_invalidation, ..SHAPE.client };
        let mut duo = warm(Shape { client: with(client), server: with(server), ..SHAPE });
        duo.make(1, plan(write_3(call_head(1, (NFS, 3, 7), (0, 0)), 9001), reply_head(1, 0).words(&[0])))
            .as_ref()
            .unwrap();
        // Never assumed: the requester ends the exposure itself all the same.
        assert_eq!(duo.at_client.invalidated.len(), 1);
        assert_eq!(duo.remote, usize::from(invalidates));
        duo.succeeded(1);
    }
}

/// A binding at both ends is known after the first reply that uses its Write chunk: no Reply chunk is needed then.
#[test]
fn a_private_binding_is_relied_on_once_the_peer_has_shown_it() {
    let mut duo = warm(SHAPE);
    for xid in 1..4 {
        let call = call_head(xid, (BOTH, 1, 2), (0, 0)).words(&[9000]);
        duo.make(xid, plan(call, reply_head(xid, 0).words(&[0, 9]).item(8999))).as_ref().unwrap();
        duo.succeeded(xid);
        assert_eq!((duo.lists(xid).writes.len(), duo.lists(xid).reply.is_some()), (1, xid == 1));
    }
}

#[test]
fn err_chunk_to_a_chunked_call_names_the_program_and_the_next_call_does_without() {
    let mut duo = warm(SHAPE);
    let two = |xid| call_head(xid, (CLIENT_ONLY, 1, 1), (0, 0)).opaque(5).item(9000).words(&[7]).item(3);
    duo.call(1, plan(two(1), reply_head(1, 0).words(&[1])), |_, _| true, None);
    assert_eq!(duo.lists(1).reads[0].position, Position(56));
    duo.sends.values_mut().for_each(VecDeque::clear);
    let mut buf = duo.memory.message().unwrap();
    buf.extend(&err_chunk(1)).unwrap();
    duo.client.handle_receive(buf, None, &mut duo.at_client);
    duo.drain(true);
    let error = duo.sent[&1].outcome.as_ref().unwrap().as_ref().unwrap_err();
    assert!(error.text().contains(&format!("no binding for program {CLIENT_ONLY} version 1")), "{error}");
    duo.make(2, plan(two(2), reply_head(2, 0).words(&[1]))).as_ref().unwrap();
    assert!(duo.lists(2).reads.iter().all(|read| read.position == Position(0)));
    duo.succeeded(2);
}

/// rule 107: what is unreasonable is not pulled.
#[test]
fn absurd_chunks_are_refused_before_a_byte_is_read() {
    let call = write_3(call_head(1, (NFS, 3, 7), (0, 0)), 8);
    let item = call.items[0];
    let payload = without(&call.bytes, item);
    let read = |position: usize, length: u32| ReadSegment {
        position: Position(position as u32),
        target: Segment { handle: Handle(77), length, offset: u64::MAX },
    };
    let at = item.position;
    for reads in [
        vec![read(at, u32::MAX)],
        vec![read(at, 1 << 30), read(at, 1 << 30), read(at, 1 << 30), read(at, 1 << 30)],
        vec![read(at, 8), read(at + 4, 8)],
        vec![read(u32::MAX as usize - 3, 8)],
        vec![read(at, 8), read(at, 8), read(at + 400, 1)],
    ] {
        let mut duo = warm(SHAPE);
        duo.foreign_lists(1, Proc::Msg, &Lists { reads, ..Lists::default() }, &payload);
        assert_eq!(duo.understood(1), None);
    }
}

/// Memory of pulled Calls is bounded in all: one goes on beyond that, and a peer that comes too late waits until there is room,
/// and is then asked for little until it has answered.
#[test]
fn calls_wait_for_memory_that_other_connections_hold() {
    let mut first = warm(SHAPE);
    let memory = Memory::new(4096, 1 << 20, 400_000);
    let mut others: Vec<Connection> = (0..3)
        .map(|_| {
            Connection::new(
                Role::Server,
                SHAPE.server,
                sizes(SHAPE.client),
                memory.clone(),
                registry([BOTH; 2]),
            )
        })
        .collect();
    let call = call_head(1, (UNBOUND, 1, 1), (0, 0)).opaque(150_000);
    let source = first.at_client.expose_source(Region::copy_from(&call.bytes).unwrap()).unwrap();
    let reads = vec![ReadSegment { position: Position(0), target: source }];
    let mut message = Vec::new();
    header::encode(
        &mut message,
        v1::VERSION,
        Xid(1),
        Credits(8),
        Proc::Nomsg,
        Direction::Call,
        &Lists { reads, ..Lists::default() },
    );
    for engine in &mut others {
        let mut buf = first.memory.message().unwrap();
        buf.extend(&message).unwrap();
        engine.handle_receive(buf, None, &mut first.at_server);
    }
    let pulls = |engine: &Connection| (engine.pulling().is_some(), engine.waits_for_memory());
    assert_eq!([0, 1, 2].map(|n| pulls(&others[n])), [(true, false), (true, false), (false, true)]);
    assert_eq!(others[0].responder.reads().0, call.bytes.len());
    others[2].resume(&mut first.at_server);
    assert!(others[2].waits_for_memory());
    others[1].handle_closed(Error::new(Kind::ConnectionLost, "gone"));
    drop(others.remove(1));
    let last = &mut others[1];
    last.resume(&mut first.at_server);
    assert_eq!(pulls(last), (true, false), "the lead is free");
    let mut done = 0;
    for part in [64 << 10, call.bytes.len() - (64 << 10)] {
        assert_eq!(last.responder.reads().0, part);
        let posted = std::iter::from_fn(|| last.poll_output()).find_map(|output| match output {
            Output::Post(WorkRequest::Read { id, sink, at, from }) => Some((id, sink, at, from)),
            _ => None,
        });
        let (id, sink, at, from) = posted.unwrap();
        assert_eq!((at, from.offset - source.offset, from.length), (done, done as u64, part as u32));
        assert!(sink.place(at, &call.bytes[done..done + part]));
        drop(sink);
        done += part;
        last.handle_read(id);
    }
    assert!(last.request_ready());
}

// -------------------------------------------------------------------------------------------- what the Linux kernel does

/// A READ as Linux's client sends it: one Write chunk, of a segment for the data and, where their length is odd, another
/// of four bytes, with a handle of its own, for the pad. Returns what came back.
fn read_of_linux(count: usize, len: usize) -> (Duo, Vec<Segment>, [Sink; 2]) {
    let mut duo = warm(SHAPE);
    let memory = [count, 4].map(|len| Buf::with_capacity(len).unwrap().into_sink(len));
    let offered = memory.each_ref().map(|sink| duo.at_client.expose_sink(sink.clone()).unwrap());
    assert_ne!(offered[0].handle, offered[1].handle);
    let call = read_3(call_head(7, (NFS, 3, 6), (0, 0)), count);
    let plan = plan(call.clone(), read_3_reply(reply_head(7, 0), len));
    let lists = Lists { writes: vec![Chunk::from_slice(&offered)], ..Lists::default() };
    let (lent, place, outcome) = (Vec::new(), None, None);
    let sent = Sent { plan, lent, place, abandoned: false, outcome, lists: Some(lists.clone()) };
    duo.sent.insert(7, sent);
    duo.foreign_lists(7, Proc::Msg, &lists, &call.bytes);
    assert!(duo.serve(|_, _| false));
    duo.drain(false);
    // The RDMA Writes, as the client's device places them.
    for request in duo.sends.values_mut().flat_map(std::mem::take) {
        if let WorkRequest::Write { gather, to } = request {
            let at = offered.iter().position(|segment| segment.handle == to.handle).expect("offered");
            let bytes: Vec<u8> = gather.iter().flat_map(|piece| piece.iter().copied()).collect();
            assert!(memory[at].place((to.offset - offered[at].offset) as usize, &bytes));
        }
    }
    let reply = duo.replies.last().expect("a reply").clone();
    let Body::Msg { chunks, .. } = header::decode(&reply, Versions::ONE).unwrap().body else {
        panic!("RDMA_MSG is asked for")
    };
    assert!(chunks.reply().is_none() && chunks.write_count() == 1);
    let returned = chunks.writes().flat_map(|chunk| chunk.iter().collect::<Vec<_>>()).collect();
    (duo, returned, memory)
}

#[test]
fn the_segment_for_the_pad_in_a_write_chunk_of_linux_is_returned_unused() {
    for (count, len) in [(1001, 1001), (4097, 4097), (4097, 5), (9001, 0)] {
        let (duo, returned, [data, pad]) = read_of_linux(count, len);
        assert_eq!(returned.iter().map(|s| s.length).collect::<Vec<_>>(), [len as u32, 0], "{count} {len}");
        let reply = &duo.sent[&7].plan.reply;
        drop(duo.at_client.exposed);
        assert!(data.into_buf(len).unwrap()[..] == reply.bytes[reply.items[0].range()]);
        assert_eq!(pad.into_buf(4).unwrap()[..], [0; 4], "the pad is never written");
    }
}

/// Linux's server uses a Reply chunk for every reply to a Call that offers one, however short.
#[test]
fn a_short_reply_in_a_reply_chunk_is_understood() {
    let mut duo = warm(SHAPE);
    let call = call_head(1, (UNBOUND, 1, 0), (0, 0));
    let reply = reply_head(1, 0).words(&[5]);
    duo.call(1, Plan { max: 100_000, ..plan(call, reply.clone()) }, |_, _| false, None);
    duo.sends.values_mut().for_each(VecDeque::clear);
    let offered = duo.lists(1).reply.clone().expect("a Reply chunk");
    match duo.at_client.exposed.get(&offered[0].handle.0) {
        Some(Exposed::Sink(sink)) => assert!(sink.place(0, &reply.bytes)),
        _ => panic!("a Reply chunk is a sink"),
    }
    let used = Some(smallvec![Segment { length: reply.bytes.len() as u32, ..offered[0] }]);
    let mut message = Vec::new();
    header::encode(
        &mut message,
        v1::VERSION,
        Xid(1),
        Credits(8),
        Proc::Nomsg,
        Direction::Call,
        &Lists { reply: used, ..Lists::default() },
    );
    let mut buf = duo.memory.message().unwrap();
    buf.extend(&message).unwrap();
    duo.client.handle_receive(buf, None, &mut duo.at_client);
    duo.drain(true);
    duo.succeeded(1);
}

/// Linux's server does not look at what a client has announced: a Reply chunk or a Write chunk must be there for whatever
/// may be longer than a Receive.
#[test]
fn whatever_a_reply_may_be_longer_than_a_receive_has_a_chunk_for_it() {
    for (count, most) in [(100, 100), (3000, 3000), (4000, 4000), (5000, 5000), (1 << 20, 1 << 20)] {
        let mut duo = warm(SHAPE);
        let call = read_3(call_head(1, (NFS, 3, 6), (0, 0)), count);
        duo.call(1, Plan { most, ..plan(call, read_3_reply(reply_head(1, 0), 0)) }, |_, _| false, None);
        let lists = duo.lists(1);
        // 28 bytes of transport header, and a READ's reply without its data.
        let inline = 28 + 24 + 400 + 4 + 4 + 84 + 12;
        let fits = inline + count <= SHAPE.client.inline;
        assert!(fits || !lists.writes.is_empty() || lists.reply.is_some(), "{count}");
    }
}
