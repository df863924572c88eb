//! The simulated world: a server, clients, their programs and connections, and what goes wrong. Everything happens in the order
//! of virtual time, and everything that chance decides comes from one seed.
//!
//! The world does what the driver does with an engine and a device, with the device of [`network`](super::network). [`Call`]s
//! hold what the programs do, and what must hold for it.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex};

use rustc_hash::FxHashMap;

use super::super::*;
use super::bytes;
use super::network::{Card, Clock, Medium, Network, Simulated, Terms, Time, crc};
use crate::memory::{Program, ration};
use crate::process::chance;
use crate::provider::{Completion, Limits};
use crate::socket::simulated::Socket;

/// Ends of a connection.
const CLIENT: usize = 0;
const SERVER: usize = 1;

const MICROSECOND: Time = 1000;
const MILLISECOND: Time = 1000 * MICROSECOND;

/// What a world is like: each has some of what can happen and not the rest, so that nothing hides behind something else.
#[derive(Clone, Debug)]
struct Plan {
    calls: usize,
    clients: usize,
    /// Calls at a time.
    most: usize,
    /// Of 1000 calls: in the reverse direction, without a reply, of NFS, with a deadline.
    back: usize,
    one_way: usize,
    nfs: usize,
    deadline: usize,
    /// The reply is at times longer than the program has said.
    underestimates: bool,
    /// Of 1000 actions each is: a cancellation, ...
    cancel: usize,
    cut: usize,
    restart_client: usize,
    restart_server: usize,
    jump: usize,
    shortage: usize,
    no_handles: usize,
    stuck_handles: usize,
    hold: usize,
    /// A change of credits, characteristics and what the reverse direction may have.
    talk: usize,
    /// Of 1000 requests: never answered.
    discard: usize,
    /// Time between two actions, at most.
    pace: Time,
    /// Time that the server takes for a request, at most.
    service: Time,
    terms: Terms,
    staging_max: usize,
    settings: [Settings; 2],
    /// Of 1000 calls: with arguments, or results, that lie in the program's own memory.
    lend: usize,
    /// Of 1000 actions: a fork after which every process goes on as the child.
    fork: usize,
    /// Many messages are long.
    long: bool,
    /// Most bytes of a segment at each end.
    segments: [u32; 2],
    /// Connections are of software iWARP.
    bytes: bool,
    /// Of 1000 calls without a reply: answered all the same.
    stray: usize,
}

impl Plan {
    fn new(random: &mut Random) -> Plan {
        let mut some = |odds: usize, of: &[usize]| if random.below(odds) == 0 { random.pick(of) } else { 0 };
        let mut plan = Plan {
            calls: 1000,
            clients: 1,
            most: 0,
            back: some(2, &[20, 300, 700]),
            one_way: some(2, &[20, 300]),
            nfs: some(2, &[50, 300]),
            deadline: some(2, &[100, 900]),
            underestimates: some(3, &[1]) == 1,
            cancel: some(2, &[5, 100]),
            cut: some(2, &[1, 10]),
            restart_client: some(4, &[1, 5]),
            restart_server: some(4, &[1, 5]),
            jump: some(4, &[1, 10]),
            shortage: some(4, &[2, 20]),
            no_handles: some(4, &[2, 20]),
            stuck_handles: some(6, &[1, 5]),
            hold: some(4, &[5]),
            talk: some(2, &[2, 50]),
            discard: some(6, &[5]),
            pace: 0,
            service: 0,
            terms: Terms {
                limits: Limits {
                    read_depth: 16,
                    max_segment: 1 << 30,
                    remote_invalidation: true,
                    receives: u32::MAX,
                },
                latency: 0,
                jitter: 0,
                window: 0,
                tells_reads: true,
            },
            staging_max: 0,
            settings: [SETTINGS; 2],
            lend: some(2, &[50, 500]),
            fork: some(6, &[5]),
            long: some(6, &[1]) == 1,
            segments: [1 << 30; 2],
            bytes: some(6, &[1]) == 1,
            stray: some(2, &[20, 500]),
        };
        plan.clients = random.pick(&[1, 1, 2, 3]);
        plan.most = random.pick(&[1, 4, 16, 64]);
        plan.pace = random.pick(&[MICROSECOND, 20 * MICROSECOND, MILLISECOND]);
        plan.service = random.pick(&[1, 20 * MICROSECOND, 5 * MILLISECOND]);
        plan.terms.latency = random.pick(&[MICROSECOND, 50 * MICROSECOND, 5 * MILLISECOND]);
        plan.terms.jitter = random.pick(&[1, 100 * MICROSECOND, 20 * MILLISECOND]);
        plan.terms.window = random.pick(&[1, 5000, 100_000, usize::MAX]);
        plan.terms.tells_reads = random.below(4) > 0;
        plan.terms.limits.read_depth = random.pick(&[1, 2, 16]);
        plan.segments = [0; 2].map(|_| random.pick(&[600, 4096, 1 << 20, 1 << 30]));
        plan.staging_max = random.pick(&[200_000, 4 << 20, 64 << 20]);
        let versions =
            random.pick(&[Versions::ONE, Versions::ONE, Versions::BOTH, Versions::BOTH, Versions::TWO]);
        for settings in &mut plan.settings {
            let inline = random.pick(&[1024, 1024, 2048, 4096, 16_384]);
            let receive = inline.max(4096);
            *settings = Settings {
                credits: random.pick(&[1, 2, 3, 8, 32]),
                receives: random.pick(&[40, 64, u32::MAX]),
                reverse_chunks: random.below(3) > 0,
                inline,
                versions: if random.below(4) == 0 { Versions::BOTH } else { versions },
                receive,
                receive_max: receive.max(random.pick(&[4096, 65_536])),
                first_xid: random.next() as u32,
                max_call: random.pick(&[20_000, 1 << 20, 16 << 20]),
                many_chunks: random.below(2) == 0,
                remote_invalidation: random.below(3) > 0,
            };
        }
        plan
    }
}

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Plain,
    OneWay,
    /// NFS version 3 READ and WRITE, of which the data may be placed.
    Read,
    Write,
}

/// A call of a program, and all that is known about it.
#[derive(Debug)]
struct Call {
    sort: Sort,
    connection: usize,
    end: usize,
    xid: u32,
    len: usize,
    reply: usize,
    /// Its Send was posted; its place among those of its end.
    posted: Option<u32>,
    /// Its end was told to the program, or it was abandoned, or the program died.
    ended: bool,
    /// The program was told that it was not sent, or the call was taken back before it was sent: nobody may ever execute it.
    forbidden: bool,
    executed: bool,
    /// The peer has said that it refuses it or cannot answer.
    refused: bool,
    /// What its header named.
    handles: Vec<Handle>,
    /// Which memory of the program it uses.
    loan: Option<usize>,
}

/// A request that a program works on.
struct Serving {
    call: u32,
    request: Request,
}

struct End {
    engine: Connection,
    card: Box<dyn Simulated>,
    /// What the card runs over, which is dropped after it.
    _socket: Option<Socket>,
    /// Calls that the program waits for, by XID.
    own: FxHashMap<u32, u32>,
    /// Calls posted and not known to be done at the peer, in the order of their Sends: XID and number.
    under_way: VecDeque<(u32, u32)>,
    /// Calls of the peer that have arrived and were not answered, by XID.
    unanswered: FxHashMap<u32, u32>,
    posted: u32,
    granted: u32,
    /// The most credits told to the peer: those granted in replies, and those asked for in calls.
    told: [u32; 2],
    /// Place of the latest call of the peer that was handed up, counted from 1.
    handed: u32,
    serving: Vec<Serving>,
    next_xid: u32,
    /// It is about to try again to get memory.
    resuming: bool,
}

impl End {
    /// Checks what it has when nothing moves any more.
    fn check_rest(&self, calls: &[Call]) {
        let End { engine, card, own, under_way, serving, .. } = self;
        assert!(serving.is_empty() && own.is_empty());
        if engine.closed().is_some() {
            return;
        }
        assert_eq!(engine.responder.working(), 0, "a request is neither answered nor given up");
        assert_eq!(engine.responder.staged(), (0, 0));
        let wanted = engine.common.window.receives() + receive_margin(engine.common.settings.versions);
        assert_eq!(card.receives(), wanted as usize, "Receives at rest");
        let in_flight = engine.common.window.in_flight() as usize;
        // Calls without a reply that expose much keep their credit.
        let few = engine.requester.past() < 20;
        assert!(in_flight == under_way.len() || !few, "a credit is lost: {}", self.state());
        let exposed: usize = under_way.iter().map(|(_, number)| calls[*number as usize].handles.len()).sum();
        if in_flight == under_way.len() && engine.requester.past() == 0 && !card.is_jammed() {
            assert_eq!(card.exposures(), exposed, "exposed for no call: {}", self.state());
        }
    }

    /// For people to read.
    fn state(&self) -> String {
        let End { engine, own, under_way, serving, .. } = self;
        let (left, asked, granted) = (engine.credits_left(), engine.asked(), engine.granted());
        let (version, closed) = (engine.version(), engine.closed());
        let (starved, back) = (engine.starved(), engine.may_fall_back());
        let (own, serving) = (own.len(), serving.len());
        let window = &engine.common.window;
        let flight = (window.in_flight(), window.abandoned(), engine.responder.working(), engine.waits());
        format!(
            "version {version:?} closed {closed:?} credits {left} of {asked} and {granted} starved {starved} may fall back \
             {back} own {own} serving {serving} under way {under_way:?} {flight:?}"
        )
    }
}

/// The device of an end, and the socket that it runs over.
type Way = (Box<dyn Simulated>, Option<Socket>);

struct Link {
    client: usize,
    network: Arc<Mutex<dyn Medium>>,
    /// Answers under way to calls that asked for none.
    strays: usize,
    ends: [Option<End>; 2],
    /// The client will open another one soon.
    renewing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Poll { link: usize, end: usize },
    Act,
    Deadline(u32),
    Serve { link: usize, end: usize, call: u32 },
    Resume { link: usize, end: usize },
    Release { link: usize },
    Renew { link: usize },
    Connect { client: usize },
}

/// What happened in a world, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// A hash of everything that happened, in order.
    pub trace: u64,
    pub calls: u64,
    pub answered: u64,
    pub refused: u64,
    pub not_sent: u64,
    pub lost: u64,
    pub abandoned: u64,
    pub one_way: u64,
    pub back: u64,
    pub version_two: u64,
    /// Over software iWARP.
    pub software: u64,
    pub connections: u64,
    pub shortages: u64,
    pub renewals: u64,
    pub fallbacks: u64,
    pub waits: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.trace = self.trace.rotate_left(5) ^ other.trace;
        self.calls += other.calls;
        self.answered += other.answered;
        self.refused += other.refused;
        self.not_sent += other.not_sent;
        self.lost += other.lost;
        self.abandoned += other.abandoned;
        self.one_way += other.one_way;
        self.back += other.back;
        self.version_two += other.version_two;
        self.software += other.software;
        self.connections += other.connections;
        self.shortages += other.shortages;
        self.renewals += other.renewals;
        self.fallbacks += other.fallbacks;
        self.waits += other.waits;
    }
}

pub struct World {
    random: Random,
    clock: Clock,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    scheduled: u64,
    plan: Plan,
    /// Of the server, and of each client.
    memory: Vec<Arc<Memory>>,
    bindings: Arc<Registry>,
    links: Vec<Link>,
    calls: Vec<Call>,
    /// Actions so far.
    acts: usize,
    /// Calls that programs wait for.
    open: usize,
    /// Replies that a program keeps, and the calls that they answer.
    kept: VecDeque<(u32, Regions)>,
    /// Memory of programs, and which of it no call uses.
    programs: Vec<Program>,
    idle: Vec<usize>,
    /// No more calls are made, and nothing goes wrong.
    quiet: bool,
    scratch: Vec<u8>,
    expected: Vec<u8>,
    tally: Tally,
}

thread_local! {
    /// Memory of programs is never freed: the next world uses it again.
    static PROGRAMS: std::cell::Cell<Vec<Program>> = const { std::cell::Cell::new(Vec::new()) };
}

/// Bytes of a program's memory.
const LENT: usize = 64 << 10;

/// What messages are filled with.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Random(0x1234_5678_9abc_def1);
    (0..1 << 19).flat_map(|_| random.next().to_le_bytes()).collect()
});

fn fill(bytes: &mut Vec<u8>, len: usize, salt: u32) {
    let at = (salt.wrapping_mul(0x9e37_79b1) >> 15) as usize;
    bytes.extend_from_slice(&PATTERN[at..at + len]);
}

fn push_words(bytes: &mut Vec<u8>, words: &[u32]) {
    words.iter().for_each(|word| bytes.extend_from_slice(&word.to_be_bytes()));
}

/// Bytes of a message of our own before its filling, and of an answer to it.
const PLAIN: usize = 16;
const NFS: u32 = 100_003;
/// Marks an answer to a call that asked for none.
const STRAY: u32 = u32::MAX;
/// Longest message of a program.
const LONGEST: usize = 600_000;
const VERY_LONG: usize = 3_000_000;

impl Call {
    /// The RPC Call number `number`.
    fn message(&self, number: u32, bytes: &mut Vec<u8>) {
        bytes.clear();
        let len = self.len as u32;
        match self.sort {
            Sort::Plain | Sort::OneWay => {
                push_words(bytes, &[self.xid, 0, u32::MAX, number]);
                fill(bytes, self.len, number);
            }
            Sort::Write => {
                push_words(bytes, &[self.xid, 0, 2, NFS, 3, 7, 0, 0, 0, 0, 4, number, 0, 0, len, 2, len]);
                fill(bytes, self.len, number);
                bytes.resize(bytes.len().next_multiple_of(4), 0);
            }
            Sort::Read => {
                let count = self.reply as u32;
                push_words(bytes, &[self.xid, 0, 2, NFS, 3, 6, 0, 0, 0, 0, 4, number, 0, 0, count]);
            }
        }
    }

    /// The RPC Reply to it.
    fn answer(&self, number: u32, bytes: &mut Vec<u8>) {
        bytes.clear();
        match self.sort {
            Sort::Plain => {
                push_words(bytes, &[self.xid, 1, 0, number]);
                fill(bytes, self.reply, !number);
            }
            // Nobody has asked for it.
            Sort::OneWay => push_words(bytes, &[self.xid, 1, STRAY, number]),
            Sort::Write => {
                push_words(bytes, &[self.xid, 1, 0, 0, 0, 0, 0, 0, 0, self.len as u32, 2, number, 0])
            }
            Sort::Read => {
                // Now and then there is less than was asked for.
                let len = if number.is_multiple_of(8) { self.reply / 2 } else { self.reply };
                push_words(bytes, &[self.xid, 1, 0, 0, 0, 0, 0, 0, len as u32, 0, len as u32]);
                fill(bytes, len, !number);
                bytes.resize(bytes.len().next_multiple_of(4), 0);
            }
        }
    }
}

/// Whether the pieces are these bytes.
fn same(pieces: &[Region], mut bytes: &[u8]) -> bool {
    for piece in pieces {
        match bytes.split_at_checked(piece.len()) {
            Some((head, rest)) if head == &piece[..] => bytes = rest,
            _ => return false,
        }
    }
    bytes.is_empty()
}

/// The number of a call in a request.
fn number_of(pieces: &[Region]) -> u32 {
    let word = |at: usize| {
        let mut bytes = pieces.iter().flat_map(|piece| piece.iter().copied()).skip(4 * at);
        u32::from_be_bytes(std::array::from_fn(|_| bytes.next().expect("a word of a request")))
    };
    if word(2) == 2 { word(11) } else { word(3) }
}

impl World {
    /// Runs a world from its beginning to its end.
    pub fn run(seed: u64) -> Tally {
        let mapped = ration::mapped();
        let mut world = World::new(seed);
        world.live();
        world.finish(mapped);
        let tally = std::mem::take(&mut world.tally);
        PROGRAMS.set(std::mem::take(&mut world.programs));
        drop(world);
        ration::fail_after(None);
        chance::begin(0);
        crate::fork::pretend(0);
        assert_eq!(ration::mapped(), mapped, "memory is left over at the end");
        tally
    }

    fn new(seed: u64) -> World {
        // Makes seeds that are close to one another give worlds that are not (splitmix64).
        let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let mut random = Random((mixed ^ (mixed >> 31)) | 1);
        let plan = Plan::new(&mut random);
        chance::begin(random.next() | 1);
        thread_local! {
            static BINDINGS: Arc<Registry> = bindings();
        }
        crate::fork::pretend(0);
        let mut world = World {
            random,
            clock: Clock::new(AtomicU64::new(0)),
            now: 0,
            events: BinaryHeap::new(),
            scheduled: 0,
            memory: Vec::new(),
            bindings: BINDINGS.with(Arc::clone),
            links: Vec::new(),
            calls: Vec::with_capacity(plan.calls),
            acts: 0,
            open: 0,
            kept: VecDeque::new(),
            programs: PROGRAMS.take(),
            idle: Vec::new(),
            quiet: false,
            scratch: Vec::new(),
            expected: Vec::new(),
            tally: Tally::default(),
            plan,
        };
        if world.programs.is_empty() {
            world.programs.extend((0..64).map(|_| Program::new(&[0; LENT])));
        }
        world.idle.extend(0..world.programs.len());
        for _ in 0..=world.plan.clients {
            let memory = world.fresh_memory();
            world.memory.push(memory);
        }
        for client in 1..=world.plan.clients {
            world.connect(client, None);
        }
        world.at(1, Event::Act);
        world
    }

    fn fresh_memory(&self) -> Arc<Memory> {
        let [client, server] = &self.plan.settings;
        Memory::new(client.receive_max.max(server.receive_max), 1 << 16, self.plan.staging_max).of_peer(None)
    }

    fn note(&mut self, what: u64) {
        self.tally.trace = (self.tally.trace.rotate_left(5) ^ what).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn at(&mut self, time: Time, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((time.max(self.now), self.scheduled, event)));
    }

    fn after(&mut self, most: Time, event: Event) {
        let delay = 1 + self.random.next() % most.max(1);
        self.at(self.now + delay, event);
    }

    fn chance(&mut self, of_1000: usize) -> bool {
        of_1000 > 0 && self.random.below(1000) < of_1000
    }

    /// Makes everything happen that is to happen, in order.
    fn live(&mut self) {
        let mut left = 2000 * self.plan.calls;
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now = self.now.max(time);
            self.clock.store(self.now, Relaxed);
            self.happen(event);
            left -= 1;
            assert!(left > 0, "the world does not come to rest; the latest is {event:?}");
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Poll { link, end } => self.poll(link, end),
            Event::Act => self.act(),
            Event::Deadline(call) => self.abandon(call),
            Event::Serve { link, end, call } => self.serve(link, end, call),
            Event::Resume { link, end } => {
                if let Some(End { engine, card, resuming, .. }) = &mut self.links[link].ends[end] {
                    *resuming = false;
                    engine.resume(&mut **card);
                    self.settle(link, end);
                }
            }
            Event::Release { link } => {
                if let Some(End { engine, .. }) = &mut self.links[link].ends[SERVER] {
                    engine.hold(false);
                    self.settle(link, SERVER);
                }
            }
            Event::Renew { link } => self.renew(link),
            Event::Connect { client } => {
                self.connect(client, None);
            }
        }
    }

    // ------------------------------------------------------------------------------------------- connections

    /// Opens a connection for a client; `versions`: of the client, if not those of the plan.
    fn connect(&mut self, client: usize, versions: Option<Versions>) -> usize {
        let mut settings = self.plan.settings;
        if let Some(versions) = versions {
            settings[CLIENT].versions = versions;
        }
        for settings in &mut settings {
            settings.first_xid = self.random.next() as u32;
        }
        let said = settings.map(sizes);
        let (terms, seed) = (self.plan.terms, self.random.next());
        let (network, mut cards): (Arc<Mutex<dyn Medium>>, [Option<Way>; 2]) = if self.plan.bytes {
            let (streams, ends) = bytes::connect(self.clock.clone(), seed, terms, said);
            let boxed = |(iwarp, socket)| Some((Box::new(iwarp) as Box<dyn Simulated>, Some(socket)));
            (streams, ends.map(boxed))
        } else {
            let network = Network::new(self.clock.clone(), seed, terms);
            let card = |end: usize| {
                let card = Card::new(end, &network, self.random.next(), [&said[end], &said[1 - end]]);
                let card = card.with_segments(self.plan.segments[end]);
                Some((Box::new(card) as Box<dyn Simulated>, None))
            };
            let cards = [CLIENT, SERVER].map(card);
            (network, cards)
        };
        let mut end = |end: usize, role, host: usize| {
            let memory = self.memory[host].connection(None, None);
            let (card, _socket) = cards[end].take().unwrap();
            let peer = PrivateData::find(card.private_data()).unwrap_or(PrivateData::ABSENT);
            End {
                engine: Connection::new(role, settings[end], peer, memory, self.bindings.clone()),
                card,
                _socket,
                own: FxHashMap::default(),
                under_way: VecDeque::new(),
                unanswered: FxHashMap::default(),
                posted: 0,
                granted: 1,
                told: [0; 2],
                handed: 0,
                serving: Vec::new(),
                next_xid: settings[end].first_xid,
                resuming: false,
            }
        };
        let mut ends = [end(CLIENT, Role::Client, client), end(SERVER, Role::Server, 0)];
        if self.plan.back > 0 {
            ends[CLIENT].engine.grant(self.random.pick(&[1, 2, 8]));
            let End { engine, card, .. } = &mut ends[SERVER];
            engine.ask(self.random.pick(&[1, 2, 8]), &mut **card);
        }
        let link = self.links.len();
        self.links.push(Link { client, network, strays: 0, ends: ends.map(Some), renewing: false });
        self.tally.connections += 1;
        self.note(0x100 + link as u64);
        for end in [SERVER, CLIENT] {
            self.settle(link, end);
        }
        link
    }

    /// Takes in what has arrived at an end.
    fn poll(&mut self, link: usize, at: usize) {
        loop {
            let Some(End { engine, card, .. }) = &mut self.links[link].ends[at] else { return };
            if engine.closed().is_some() {
                break;
            }
            match card.poll() {
                Ok(Some(Completion::Received { sink, len, invalidated })) => {
                    let message = sink.into_buf(len).expect("the device has let go of a Receive");
                    self.note(self.now ^ crc32c::crc32c(&message) as u64);
                    self.hear(link, at, &message);
                    let Some(End { engine, card, .. }) = &mut self.links[link].ends[at] else {
                        unreachable!()
                    };
                    engine.handle_receive(message, invalidated, &mut **card);
                }
                Ok(Some(Completion::Read { id })) => {
                    engine.handle_read(id);
                    self.note(id.0);
                }
                Ok(None) if engine.refused() => engine.handle_quiet(&mut **card),
                Ok(None) => break,
                Err(error) => {
                    assert_ne!(error.kind(), Kind::Protocol, "between honest ends: {error}");
                    self.fail(link, at, error);
                }
            }
            self.drain(link, at);
            self.take(link, at);
        }
        self.settle(link, at);
    }

    /// Ends a connection at one end, as a driver does.
    fn fail(&mut self, link: usize, at: usize, error: Error) {
        let Some(End { engine, card, .. }) = &mut self.links[link].ends[at] else { return };
        if engine.closed().is_none() {
            card.close();
            engine.handle_closed(error);
            self.note(0xdead);
        }
    }

    /// Carries out what an engine wants, and what follows from it for the world.
    fn settle(&mut self, link: usize, at: usize) {
        self.drain(link, at);
        self.take(link, at);
        // This sends work after which nothing comes from the peer.
        if let Some(End { engine, card, .. }) = &mut self.links[link].ends[at]
            && engine.closed().is_none()
            && let Err(error) = card.flush()
        {
            self.fail(link, at, error);
            self.drain(link, at);
        }
        let Link { network, ends, renewing, client, .. } = &mut self.links[link];
        let wakes: Vec<(Time, usize)> = network.lock().unwrap().wakes();
        let client = *client;
        let mut renew = false;
        let mut resume = false;
        let mut over = false;
        if let Some(end) = &mut ends[at] {
            match end.engine.closed() {
                None => {
                    // A message that has arrived and is not taken in yet has no Receive any more.
                    let held = end.engine.common.characteristics.held() as usize;
                    assert!(end.card.receives() <= held && (end.card.receives() == held || self.plan.bytes));
                    // Every call that the peer may make finds a Receive, and so does every reply, and every message that no
                    // credit counts.
                    let wanted = (end.told[0] + end.told[1]) as usize;
                    let wanted = wanted + receive_margin(end.engine.common.settings.versions) as usize;
                    let there = held + end.engine.responder.working();
                    assert!(there >= wanted, "{there} Receives of {wanted}: {}", end.state());
                    let in_flight = end.engine.common.window.in_flight() as usize;
                    assert!(in_flight >= end.under_way.len(), "a credit is free while its call is under way");
                    renew = at == CLIENT && end.engine.holds_back() && !*renewing;
                    *renewing |= renew;
                    resume = end.engine.waits() && !end.resuming;
                    end.resuming |= resume;
                }
                Some(_) => over = true,
            }
        }
        for (time, end) in wakes {
            self.at(time, Event::Poll { link, end });
        }
        if renew {
            self.after(10 * MILLISECOND, Event::Renew { link });
        }
        if resume {
            self.tally.waits += 1;
            self.after(MILLISECOND, Event::Resume { link, end: at });
        }
        if over {
            self.over(link, at, client);
        }
    }

    /// The connection has ended at one end.
    fn over(&mut self, link: usize, at: usize, client: usize) {
        let Some(end) = &mut self.links[link].ends[at] else { return };
        if at == CLIENT && end.engine.must_fall_back() {
            self.tally.fallbacks += 1;
            return self.replace(link, Some(Versions::ONE));
        }
        assert!(end.engine.is_idle() && end.engine.requester.waiting().is_empty());
        assert!(end.own.is_empty(), "the connection has ended, and a call on it has not");
        assert_eq!(end.card.exposures(), 0);
        // An end that serves may go on with what had arrived.
        if end.serving.is_empty() || self.quiet {
            self.links[link].ends[at] = None;
        }
        if at == CLIENT && !std::mem::replace(&mut self.links[link].renewing, true) {
            self.after(20 * MILLISECOND, Event::Connect { client });
        }
    }

    /// Calls that nobody waits for hold every credit: the client opens another connection.
    fn renew(&mut self, link: usize) {
        self.links[link].renewing = false;
        let Some(end) = &self.links[link].ends[CLIENT] else { return };
        if end.engine.closed().is_none() && end.engine.holds_back() {
            self.tally.renewals += 1;
            self.replace(link, None);
        }
    }

    /// Moves the calls that wait to a new connection.
    fn replace(&mut self, link: usize, versions: Option<Versions>) {
        self.links[link].renewing = true;
        let client = self.links[link].client;
        let end = self.links[link].ends[CLIENT].as_mut().unwrap();
        let waiting = end.engine.take_waiting();
        let moved: Vec<u32> = waiting
            .iter()
            .map(|(xid, ..)| end.own.remove(&xid.0).expect("a waiting call is known"))
            .collect();
        if end.engine.must_fall_back() {
            end.engine.handle_closed(Error::new(Kind::ConnectionLost, "connecting anew"));
        }
        self.fail(link, CLIENT, Error::new(Kind::Timeout, "connecting anew"));
        self.drain(link, CLIENT);
        let end = self.links[link].ends[CLIENT].take().unwrap();
        assert!(end.own.is_empty(), "the connection is given up, and a call on it has not ended");
        drop(end);
        self.settle(link, SERVER);
        let next = self.connect(client, versions);
        for ((xid, message, expect), number) in waiting.into_iter().zip(moved) {
            let call = &mut self.calls[number as usize];
            call.connection = next;
            let Some(end) = self.links[next].ends[CLIENT].as_mut() else {
                // It has ended already, and nothing was sent there.
                call.ended = true;
                call.forbidden = true;
                self.open -= 1;
                drop((message, expect));
                self.give_back(number);
                continue;
            };
            end.own.insert(xid.0, number);
            if let Err(error) = end.engine.call(xid, message, expect, &mut *end.card) {
                self.done(next, CLIENT, xid.0, Err(error));
            }
            self.settle(next, CLIENT);
        }
    }

    fn drain(&mut self, link: usize, at: usize) {
        loop {
            let Some(End { engine, card, .. }) = &mut self.links[link].ends[at] else { return };
            let Some(output) = engine.poll_output() else { return };
            let over = engine.closed().is_some();
            assert!(!over || matches!(output, Output::Done { .. }), "{output:?} after the close");
            match output {
                Output::Receive(bytes) => {
                    let memory = engine.common.memory.clone();
                    card.post_recv_of(&memory, bytes).unwrap();
                }
                Output::Post(request) => {
                    if let WorkRequest::Send { gather, .. } = &request {
                        self.inspect(link, at, gather);
                    }
                    self.links[link].ends[at].as_mut().unwrap().card.post(request);
                }
                Output::Done { xid, outcome } => {
                    self.done(link, at, xid.0, outcome.map(|reply| reply.pieces))
                }
                Output::Close(error) => {
                    let (short, jammed) = (self.tally.shortages > 0, card.is_jammed());
                    let why = match error.kind() {
                        Kind::Os(libc::ENOMEM) => short,
                        Kind::Os(libc::EIO) => jammed,
                        // They speak no common version.
                        Kind::Peer => true,
                        _ => false,
                    };
                    assert!(why, "an engine ends the connection to an honest peer: {error}");
                    self.fail(link, at, error);
                }
            }
        }
    }

    // ------------------------------------------------------------------------------------------- what must hold

    /// A message is posted.
    fn inspect(&mut self, link: usize, at: usize, gather: &Regions) {
        let mut message = std::mem::take(&mut self.scratch);
        message.clear();
        gather.iter().for_each(|piece| message.extend_from_slice(piece));
        self.note(crc(gather) as u64 ^ (at as u64) << 32);
        let link = &mut self.links[link];
        let [first, second] = &mut link.ends;
        let (own, peer) = if at == CLIENT { (first, second) } else { (second, first) };
        let own = own.as_mut().unwrap();
        let (most, _) = own.engine.thresholds();
        let header = header::decode(&message, Versions::BOTH).expect("what is sent can be decoded");
        assert!(header.credits.0 > 0, "no credit");
        assert!(message.len() <= most.max(own.engine.common.reply_limit(header.version)), "{header}");
        check_xid(&header);
        let xid = header.xid.0;
        if !matches!(header.body, Body::Optional { .. }) {
            let told = &mut own.told[usize::from(is_call(&header))];
            *told = header.credits.0.max(*told);
        }
        match header.body {
            Body::Error(_) => {
                // The call of the peer ends with an error. It may not exist any more, nor the peer.
                if let Some(number) = peer.as_ref().and_then(|peer| peer.own.get(&xid)) {
                    self.calls[*number as usize].refused = true;
                }
            }
            Body::Msg { chunks, .. } | Body::Nomsg { chunks } if is_call(&header) => {
                let number = own.own[&xid];
                let call = &mut self.calls[number as usize];
                assert!(
                    call.posted.is_none() && !call.ended,
                    "call {number} is sent twice, or after its end"
                );
                call.handles.extend(chunks.reads().map(|read| read.target.handle));
                call.handles.extend(chunks.reply().iter().flat_map(|c| c.iter()).map(|s| s.handle));
                call.handles.extend(chunks.writes().flat_map(|c| c.iter()).map(|s| s.handle));
                own.posted += 1;
                call.posted = Some(own.posted);
                own.under_way.push_back((xid, number));
                let limit = own.engine.asked().min(own.granted) as usize;
                let count = own.under_way.len();
                assert!(count <= limit, "{count} calls under way, {limit} allowed");
                self.tally.version_two += u64::from(header.version == v2::VERSION);
            }
            Body::Msg { chunks, .. } | Body::Nomsg { chunks } => {
                assert_eq!(chunks.read_count(), 0, "a Read list in a reply");
                let unanswered = own.unanswered.get_mut(&xid).filter(|count| **count > 0);
                *unanswered.unwrap_or_else(|| panic!("the call {xid:#x} is answered twice")) -= 1;
            }
            _ => {}
        }
        self.scratch = message;
    }

    /// A message has arrived.
    fn hear(&mut self, link: usize, at: usize, message: &[u8]) {
        let Ok(header) = header::decode(message, Versions::BOTH) else { panic!("the peer sent nonsense") };
        let end = self.links[link].ends[at].as_mut().unwrap();
        let is_error = matches!(header.body, Body::Error(_));
        if is_call(&header) {
            *end.unanswered.entry(header.xid.0).or_default() += 1;
            return;
        }
        if matches!(header.body, Body::Optional { .. }) {
            return;
        }
        // An answer to a one-way call is under way no longer.
        if !is_error && let Some(number) = answered(&header) {
            let one_way = self.calls[number as usize].sort == Sort::OneWay;
            self.links[link].strays -= usize::from(one_way);
        }
        let end = self.links[link].ends[at].as_mut().unwrap();
        // The answered call is done, and so are the one-way calls before it.
        if let Some(place) = end.under_way.iter().position(|(xid, _)| *xid == header.xid.0) {
            if !is_error {
                end.granted = header.credits.0.max(1);
            }
            let (calls, mut at) = (&self.calls, 0);
            end.under_way.retain(|(_, number)| {
                at += 1;
                let earlier = at <= place && calls[*number as usize].sort == Sort::OneWay;
                at - 1 != place && !earlier
            });
        }
    }

    /// A call has ended.
    fn done(&mut self, link: usize, at: usize, xid: u32, outcome: Result<Regions, Error>) {
        let end = self.links[link].ends[at].as_mut().unwrap();
        let number = end.own.remove(&xid).expect("the end of a call that nobody waits for");
        let call = &mut self.calls[number as usize];
        assert!(!call.ended, "call {number} ends twice");
        call.ended = true;
        self.open -= 1;
        if call.sort != Sort::OneWay || outcome.is_err() {
            let exposed = call.handles.iter().any(|handle| end.card.exposes(*handle));
            assert!(!exposed || end.card.is_jammed(), "call {number} is exposed after its end");
        }
        let what = match outcome {
            Ok(reply) => {
                assert!(call.posted.is_some() && !call.refused);
                if call.sort == Sort::OneWay {
                    assert!(reply.is_empty());
                } else {
                    assert!(call.executed, "call {number} was answered by nobody");
                    call.answer(number, &mut self.expected);
                    assert!(same(&reply, &self.expected), "call {number} has an answer that is not its own");
                    if call.loan.is_none() && self.random.below(8) == 0 {
                        self.kept.push_back((number, reply));
                    }
                }
                self.tally.answered += 1;
                1
            }
            Err(error) => {
                let short = || self.tally.shortages > 0;
                match error.kind() {
                    Kind::NotSent => {
                        assert!(call.posted.is_none(), "call {number} was sent: {error}");
                        self.tally.not_sent += 1;
                    }
                    Kind::ConnectionLost => {
                        assert!(call.posted.is_some() && end.engine.closed().is_some(), "{error}");
                        self.tally.lost += 1;
                    }
                    Kind::Peer if call.posted.is_none() => assert!(at == SERVER, "{error}"),
                    // The device keeps what is not invalidated, and the connection is closed.
                    Kind::Peer if end.card.is_jammed() && !call.refused => {}
                    Kind::Peer => {
                        assert!(call.refused, "call {number}, which nobody refused: {error}");
                        self.tally.refused += 1;
                    }
                    Kind::TooLong => assert!(call.posted.is_none(), "{error}"),
                    Kind::Os(libc::ENOMEM) => assert!(short(), "{error}"),
                    _ => panic!("call {number}: {error:?}"),
                }
                call.forbidden = call.posted.is_none();
                assert!(!(call.forbidden && call.executed), "call {number} was executed: {error}");
                2 + call.forbidden as u64
            }
        };
        self.give_back(number);
        self.note(what << 40 ^ u64::from(number));
        if self.kept.len() > 16 {
            self.look_at_kept();
        }
    }

    /// A call has ended: the memory that it used is the program's alone again, to do with as it likes.
    fn give_back(&mut self, number: u32) {
        if let Some(loan) = self.calls[number as usize].loan.take() {
            self.programs[loan].bytes()[..1024].fill(0xee);
            self.idle.push(loan);
        }
    }

    /// What a program keeps stays as it was.
    fn look_at_kept(&mut self) {
        if let Some((number, reply)) = self.kept.pop_front() {
            self.calls[number as usize].answer(number, &mut self.expected);
            assert!(same(&reply, &self.expected), "the answer of call {number} was changed after its end");
        }
    }

    fn check_request(&mut self, number: u32, pieces: &[Region]) {
        self.calls[number as usize].message(number, &mut self.expected);
        assert!(same(pieces, &self.expected), "call {number} was changed on its way");
    }

    // ------------------------------------------------------------------------------------------- programs

    /// Hands requests to the program of an end.
    fn take(&mut self, link: usize, at: usize) {
        loop {
            let Some(end) = &mut self.links[link].ends[at] else { return };
            let Some(request) = end.engine.poll_request() else { return };
            let number = number_of(&request.message);
            let call = &mut self.calls[number as usize];
            assert_eq!(
                (call.connection, call.end, call.xid),
                (link, 1 - at, request.xid.0),
                "another one's call"
            );
            assert!(!call.executed, "call {number} is executed twice");
            assert!(!call.forbidden, "call {number} is executed, and nobody has sent it");
            call.executed = true;
            let place = call.posted.expect("a call that was sent");
            assert!(place > end.handed, "calls are handed up in another order");
            end.handed = place;
            self.check_request(number, &request.message);
            let end = self.links[link].ends[at].as_mut().unwrap();
            end.serving.push(Serving { call: number, request });
            self.note(0x3_0000_0000 + u64::from(number));
            self.after(self.plan.service, Event::Serve { link, end: at, call: number });
            self.drain(link, at);
        }
    }

    /// A program is done with a request.
    fn serve(&mut self, link: usize, at: usize, number: u32) {
        let Some(end) = &mut self.links[link].ends[at] else { return };
        let Some(place) = end.serving.iter().position(|serving| serving.call == number) else { return };
        let Request { id, message, .. } = end.serving.swap_remove(place).request;
        self.check_request(number, &message);
        drop(message);
        let one_way = self.calls[number as usize].sort == Sort::OneWay;
        // There are Receives for only a few of them.
        let stray = one_way && !self.quiet && self.links[link].strays < 4 && self.chance(self.plan.stray);
        self.links[link].strays += usize::from(stray);
        let silent = (one_way && !stray) || (!one_way && !self.quiet && self.chance(self.plan.discard));
        let memory = &self.memory[if at == SERVER { 0 } else { self.links[link].client }];
        let buf = if silent { None } else { memory.message().ok() };
        self.calls[number as usize].answer(number, &mut self.expected);
        let buf = buf.and_then(|mut buf| buf.extend(&self.expected).ok().map(|()| buf));
        let defers = one_way && self.random.below(2) == 0;
        let End { engine, .. } = self.links[link].ends[at].as_mut().unwrap();
        match buf {
            None => {
                if defers {
                    engine.defer(id)
                } else {
                    engine.discard(id)
                }
                if !one_way {
                    // Its program loses patience at some time.
                    self.after(100 * MILLISECOND, Event::Deadline(number));
                }
            }
            Some(buf) => {
                if let Err(error) = engine.reply(id, buf) {
                    let closed = engine.closed().is_some();
                    let short = error.kind() == Kind::Os(libc::ENOMEM) && self.tally.shortages > 0;
                    assert!(closed || short || error.kind() == Kind::TooLong, "{error}");
                }
            }
        }
        self.settle(link, at);
    }

    /// Nobody waits for a call any more.
    fn abandon(&mut self, number: u32) {
        let call = &mut self.calls[number as usize];
        if call.ended {
            return;
        }
        call.ended = true;
        call.forbidden = call.posted.is_none();
        assert!(!(call.forbidden && call.executed));
        let (link, at, xid) = (call.connection, call.end, call.xid);
        self.open -= 1;
        self.tally.abandoned += 1;
        self.note(0x4_0000_0000 + u64::from(number));
        let end = self.links[link].ends[at].as_mut().expect("a call has an end before its connection");
        end.own.remove(&xid);
        end.engine.abandon(Xid(xid), &mut *end.card);
        self.drain(link, at);
        if self.calls[number as usize].loan.is_some()
            && let Some(end) = &mut self.links[link].ends[at]
            && let Err(error) = end.card.release_lent()
        {
            self.fail(link, at, error);
            self.drain(link, at);
        }
        self.give_back(number);
        self.settle(link, at);
    }

    /// A length of a message.
    fn length(&mut self) -> usize {
        let inline = self.plan.settings[self.random.below(2)].inline;
        if self.plan.long && self.random.below(16) == 0 {
            return if self.random.below(16) == 0 {
                self.random.below(VERY_LONG)
            } else {
                self.random.below(60_000)
            };
        }
        match self.random.below(256) {
            0 => self.random.below(LONGEST),
            1..=6 => self.random.below(40_000),
            7..=40 => (inline - 80 + self.random.below(100)).saturating_sub(PLAIN),
            41..=80 => self.random.below(4000),
            _ => self.random.below(300),
        }
    }

    /// Something that a program does, or that goes wrong.
    fn act(&mut self) {
        self.acts += 1;
        if self.calls.len() >= self.plan.calls || self.acts > 50 * self.plan.calls {
            self.quiet = true;
            ration::fail_after(None);
            return;
        }
        let Terms { latency, jitter, .. } = self.plan.terms;
        // A program that can do nothing waits for what is under way.
        let busy = self.open >= self.plan.most;
        let pace = if busy { self.plan.pace.max((latency + jitter) / 4) } else { self.plan.pace };
        self.after(pace, Event::Act);
        let Plan { cancel, cut, restart_client, restart_server, jump, shortage, .. } = self.plan;
        let Plan { no_handles, stuck_handles, hold, talk, .. } = self.plan;
        let link = self.recent_link();
        let end = self.random.below(2);
        if self.chance(cancel) {
            let latest = self.calls.len();
            if latest > 0 {
                let number = latest - 1 - self.random.below(latest.min(2 * self.plan.most));
                self.abandon(number as u32);
            }
        } else if self.chance(cut) {
            self.note(0xc0de);
            self.links[link].network.lock().unwrap().cut();
            self.settle(link, CLIENT);
        } else if self.chance(restart_client) {
            let client = 1 + self.random.below(self.plan.clients);
            self.restart(client);
        } else if self.chance(restart_server) {
            self.restart(0);
        } else if self.chance(jump) {
            self.jump();
        } else if self.chance(shortage) {
            self.tally.shortages += 1;
            let after = self.random.below(6);
            ration::fail_after(Some((after, 1 + self.random.below(3))));
        } else if !self.plan.bytes && self.chance(self.plan.fork) {
            self.note(0xf0_0000_0000);
            crate::fork::pretend(1 + self.acts as u64);
        } else if self.chance(no_handles) {
            self.tally.shortages += 1;
            let some = (self.random.below(4) as u32, 1 + self.random.below(2) as u32);
            if let Some(end) = &mut self.links[link].ends[end] {
                end.card.run_out(some);
            }
        } else if self.chance(stuck_handles) {
            if let Some(end) = &mut self.links[link].ends[end] {
                end.card.jam();
            }
        } else if self.chance(hold) {
            if let Some(end) = &mut self.links[link].ends[SERVER] {
                end.engine.hold(true);
                self.after(50 * MILLISECOND, Event::Release { link });
            }
        } else if self.chance(talk) {
            self.talk(link, end);
        } else if self.open < self.plan.most {
            self.call(link);
        }
    }

    /// A connection of some client: its latest one.
    fn recent_link(&mut self) -> usize {
        let client = 1 + self.random.below(self.plan.clients);
        self.links.iter().rposition(|link| link.client == client).expect("each client has connected")
    }

    fn call(&mut self, link: usize) {
        let back = self.chance(self.plan.back);
        let at = if back { SERVER } else { CLIENT };
        let (mut len, mut reply) = (self.length(), self.length());
        let sort = match self.random.below(1000) {
            n if n < self.plan.one_way => Sort::OneWay,
            n if n < self.plan.one_way + self.plan.nfs => {
                if self.random.below(2) == 0 {
                    Sort::Read
                } else {
                    Sort::Write
                }
            }
            _ => Sort::Plain,
        };
        match sort {
            Sort::Read => len = 0,
            Sort::Write => reply = 0,
            Sort::Plain | Sort::OneWay => {}
        }
        let underestimates = self.plan.underestimates && self.random.below(8) == 0;
        let deadline = self.chance(self.plan.deadline) || back;
        let jumps = self.random.below(4) == 0;
        let far = self.random.next() as u32;
        let Some(end) = &mut self.links[link].ends[at] else { return };
        if end.engine.closed().is_some() {
            return;
        }
        // As a driver does: never with the last credit.
        let sort = if sort == Sort::OneWay && end.engine.credits_left() < 2 { Sort::Plain } else { sort };
        if jumps {
            end.next_xid = far;
        }
        let less = if self.random.below(2) == 0 { reply / 2 } else { self.random.below(200) };
        let room = PLAIN + if underestimates { reply.saturating_sub(less) } else { reply };
        self.begin(link, at, (sort, len, reply, room), deadline);
    }

    /// Makes a call; there is `room` for its reply.
    fn begin(&mut self, link: usize, at: usize, what: (Sort, usize, usize, usize), deadline: bool) {
        let (sort, len, reply, room) = what;
        let end = self.links[link].ends[at].as_mut().unwrap();
        let mut xid = end.next_xid.wrapping_add(1);
        while end.engine.knows(Xid(xid)) || end.own.contains_key(&xid) {
            xid = xid.wrapping_add(1);
        }
        end.next_xid = xid;
        let number = self.calls.len() as u32;
        let call = Call {
            sort,
            connection: link,
            end: at,
            xid,
            len,
            reply,
            posted: None,
            ended: false,
            forbidden: false,
            executed: false,
            refused: false,
            handles: Vec::new(),
            loan: None,
        };
        call.message(number, &mut self.expected);
        let memory = &self.memory[if at == SERVER { 0 } else { self.links[link].client }];
        let message = memory.message().and_then(|mut buf| buf.extend(&self.expected).map(|()| buf));
        let Ok(mut message) = message else { return };
        let mut call = call;
        let lends = self.plan.lend > 0 && self.random.below(1000) < self.plan.lend && !self.quiet;
        let eligible = sort == Sort::Read || (sort == Sort::Plain && len > 64);
        let (mut lent, mut places) = (Vec::new(), Vec::new());
        if lends
            && eligible
            && let Some(loan) = self.idle.pop()
        {
            call.loan = Some(loan);
            let program = &mut self.programs[loan];
            if sort == Sort::Read {
                places.push(program.sink());
            } else {
                // The bytes are in the program's memory, and nowhere else.
                let part = PLAIN + 8..PLAIN + (len - len % 4).min(LENT);
                program.bytes()[..part.len()].copy_from_slice(&self.expected[part.clone()]);
                message[part.clone()].fill(0x55);
                lent.push((part.start, program.source().slice(0, part.len())));
            }
        }
        let message = Message::new(message, lent);
        self.calls.push(call);
        self.open += 1;
        self.tally.calls += 1;
        self.tally.back += u64::from(at == SERVER);
        self.tally.software += u64::from(self.plan.bytes);
        self.tally.one_way += u64::from(sort == Sort::OneWay);
        self.note(0x5_0000_0000 + u64::from(number));
        let expect = match sort {
            Sort::OneWay => Expect::Nothing,
            _ => Expect::Reply { max: room.max(64), places },
        };
        let end = self.links[link].ends[at].as_mut().unwrap();
        end.own.insert(xid, number);
        if let Err(error) = end.engine.call(Xid(xid), message, expect, &mut *end.card) {
            self.done(link, at, xid, Err(error));
        }
        if deadline {
            let patience = 20 * (self.plan.terms.latency + self.plan.terms.jitter + self.plan.service);
            self.after(patience, Event::Deadline(number));
        }
        self.settle(link, at);
    }

    /// A host restarts: everything that its programs had is gone, without a word.
    fn restart(&mut self, host: usize) {
        self.note(0x6_0000_0000 + host as u64);
        for link in 0..self.links.len() {
            let at = match self.links[link].client {
                _ if host == 0 => SERVER,
                client if client == host => CLIENT,
                _ => continue,
            };
            let Some(end) = self.links[link].ends[at].take() else { continue };
            let mut own: Vec<u32> = end.own.values().copied().collect();
            own.sort_unstable();
            for number in &own {
                let call = &mut self.calls[*number as usize];
                assert!(!std::mem::replace(&mut call.ended, true));
                call.forbidden = call.posted.is_none();
                self.open -= 1;
            }
            self.links[link].network.lock().unwrap().cut();
            drop(end);
            own.into_iter().for_each(|number| self.give_back(number));
            if at == CLIENT && !std::mem::replace(&mut self.links[link].renewing, true) {
                self.after(20 * MILLISECOND, Event::Connect { client: host });
            }
            self.settle(link, 1 - at);
        }
        self.memory[host] = self.fresh_memory();
    }

    /// The clock jumps: everybody loses patience at once.
    fn jump(&mut self) {
        self.note(0x7_0000_0000);
        self.now += 3600 * 1000 * MILLISECOND;
        self.clock.store(self.now, Relaxed);
        let deadlines: Vec<u32> = self
            .events
            .iter()
            .filter_map(|Reverse((_, _, event))| match event {
                Event::Deadline(call) => Some(*call),
                _ => None,
            })
            .collect();
        let mut deadlines = deadlines;
        deadlines.sort_unstable();
        deadlines.into_iter().for_each(|call| self.abandon(call));
    }

    /// An end changes what it has told its peer.
    fn talk(&mut self, link: usize, at: usize) {
        let what = self.random.below(6);
        let (few, bytes) =
            (self.random.pick(&[1, 2, 8, 40]), self.random.pick(&[1024, 4096, 5000, 16_384, 65_536]));
        let back = self.plan.back > 0;
        let Some(End { engine, card, .. }) = &mut self.links[link].ends[at] else { return };
        if engine.closed().is_some() {
            return;
        }
        match what {
            0 if at == CLIENT || back => drop(engine.ask(few, &mut **card)),
            1 if at == SERVER || back => drop(engine.grant(few)),
            2 => drop(engine.raise_receives(bytes, &mut **card)),
            3 => drop(engine.request(Characteristic::ReceiveSize(bytes as u32))),
            4 => engine.set_reverse_chunks(few > 2),
            _ => {}
        }
        self.settle(link, at);
    }

    // ------------------------------------------------------------------------------------------- the end

    /// Nothing goes wrong any more: every call has ended, every connection still serves, and nothing is left over.
    fn finish(&mut self, mapped: isize) {
        self.check_ends();
        // Where a handle is stuck for ever, the connection ends with the next call.
        for link in 0..self.links.len() {
            let open = |end: &Option<End>| end.as_ref().is_some_and(|end| end.engine.closed().is_none());
            if self.links[link].ends.iter().all(open) {
                self.begin(link, CLIENT, (Sort::Plain, 100, 100, 200), false);
            }
        }
        self.live();
        self.check_ends();
        while !self.kept.is_empty() {
            self.look_at_kept();
        }
        let mut exposures = 0;
        for link in 0..self.links.len() {
            let ends = self.links[link].ends.each_ref().map(|end| end.as_ref().map(End::state));
            let empty = self.links[link].network.lock().unwrap().is_empty();
            assert!(empty, "packets are under way for ever: {ends:?}");
            for end in self.links[link].ends.iter().flatten() {
                end.check_rest(&self.calls);
                exposures += end.card.exposures();
            }
        }
        if exposures == 0 {
            let idle: usize = self.memory.iter().map(|memory| memory.idle_bytes()).sum();
            assert_eq!(ration::mapped() - mapped, idle as isize, "memory is held, and nothing needs it");
        }
    }

    fn check_ends(&self) {
        for (number, call) in self.calls.iter().enumerate() {
            let end = self.links[call.connection].ends[call.end].as_ref();
            assert!(call.ended, "call {number} has no end: {call:?}, {:?}", end.map(End::state));
        }
        assert_eq!(self.open, 0);
    }
}

/// The number of the one-way call that this message answers all the same: such replies are plain and short.
fn answered(header: &Header<'_>) -> Option<u32> {
    let Body::Msg { payload, .. } = header.body else { return None };
    let word = |at: usize| payload.get(4 * at..4 * at + 4).map(|w| u32::from_be_bytes(w.try_into().unwrap()));
    (word(2)? == STRAY).then(|| word(3))?
}

/// Whether a valid message is a Call.
fn is_call(header: &Header<'_>) -> bool {
    match (header.direction, header.body) {
        (_, Body::Error(_) | Body::Optional { .. }) => false,
        (Some(direction), _) => direction == Direction::Call,
        (None, Body::Msg { payload, .. }) => payload[4..8] == [0; 4],
        (None, Body::Nomsg { chunks }) => chunks.read_count() > 0,
        _ => false,
    }
}
