//! The simulated network: virtual time, ordered streams of packets that take as long as chance decides, and the device at each
//! end of a connection.
//!
//! A [`Card`] has the semantics of the trait's contract and of RFC 5040 §5.5, like `provider::fault::Loopback`, and goes beyond
//! it: packets take time, a stream holds only so many bytes, and it may be cut at any place in either direction. Between two
//! honest engines no remote access may ever fail and every Send finds a Receive that is long enough, so anything that would end a
//! real connection is a panic here.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use rustc_hash::FxHashMap;

use super::super::*;
use crate::memory::ration;
use crate::provider::{self, Completion, Limits, QueuePair, Traits, WorkId};

/// Virtual time, nanoseconds.
pub type Time = u64;

/// The time of one simulation, which all its networks share.
pub type Clock = Arc<AtomicU64>;

/// What a connection's streams are like.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub limits: Limits,
    /// Time of the fastest packet.
    pub latency: Time,
    /// Most that chance adds.
    pub jitter: Time,
    /// Bytes under way in one direction before the sender has to wait.
    pub window: usize,
    /// The device tells what its peer has read.
    pub tells_reads: bool,
}

/// The streams of one connection.
pub struct Network {
    clock: Clock,
    random: Random,
    terms: Terms,
    /// To end 0 and to end 1.
    wires: [Wire; 2],
    /// Ends to be polled, and when.
    wakes: Vec<(Time, usize)>,
}

#[derive(Default)]
struct Wire {
    packets: VecDeque<(Time, Packet)>,
    bytes: usize,
    last: Time,
    /// Nothing more arrives.
    cut: bool,
    /// The sender waits for room.
    full: bool,
}

enum Packet {
    /// With the CRC of what was posted: frozen memory stays as it was until it is sent.
    Send {
        gather: Regions,
        crc: u32,
        invalidate: Option<Handle>,
    },
    Write {
        gather: Regions,
        crc: u32,
        to: Segment,
    },
    ReadRequest(Segment),
    ReadResponse(Region),
    /// The last one.
    Close(Error),
}

impl Packet {
    /// From here on the packet names no memory that is lent; returns the bytes copied.
    fn own(&mut self) -> usize {
        let mut copied = 0;
        if let Packet::Send { gather, .. } | Packet::Write { gather, .. } = self {
            for region in gather.iter_mut().filter(|region| region.is_lent()) {
                *region = own(region);
                copied += region.len();
            }
        }
        copied
    }

    fn bytes(&self) -> usize {
        let sum = |gather: &Regions| gather.iter().map(|region| region.len()).sum::<usize>();
        40 + match self {
            Packet::Send { gather, .. } | Packet::Write { gather, .. } => sum(gather),
            Packet::ReadResponse(region) => region.len(),
            Packet::ReadRequest(_) | Packet::Close(_) => 0,
        }
    }
}

/// A copy in memory that never runs out, like that of the network.
fn own(region: &Region) -> Region {
    let left = ration::pause();
    let own = region.owned().unwrap();
    ration::fail_after(left);
    own
}

pub fn crc(gather: &[Region]) -> u32 {
    gather.iter().fold(0, |crc, piece| crc32c::crc32c_append(crc, piece))
}

impl Network {
    pub fn new(clock: Clock, seed: u64, terms: Terms) -> Arc<Mutex<Network>> {
        let wires = [Wire::default(), Wire::default()];
        Arc::new(Mutex::new(Network { clock, random: Random(seed | 1), terms, wires, wakes: Vec::new() }))
    }

    fn now(&self) -> Time {
        self.clock.load(Relaxed)
    }

    fn push(&mut self, to: usize, packet: Packet) {
        let delay = self.terms.latency + self.random.next() % (self.terms.jitter + 1);
        let wire = &mut self.wires[to];
        wire.last = wire.last.max(self.clock.load(Relaxed) + delay);
        wire.bytes += packet.bytes();
        wire.packets.push_back((wire.last, packet));
        self.wakes.push((wire.last, to));
    }
}

/// What lies between the two ends of a connection.
pub trait Medium {
    /// Ends to be polled, and when.
    fn wakes(&mut self) -> Vec<(Time, usize)>;
    /// Loses the connection: chance decides how much of what is under way to each end still arrives.
    fn cut(&mut self);
    /// Nothing is under way to anybody.
    fn is_empty(&self) -> bool;
}

impl Medium for Network {
    fn wakes(&mut self) -> Vec<(Time, usize)> {
        std::mem::take(&mut self.wakes)
    }

    fn cut(&mut self) {
        for to in 0..2 {
            if self.wires[to].cut {
                continue;
            }
            let left = self.random.below(self.wires[to].packets.len() + 1);
            self.wires[to].packets.truncate(left);
            self.push(to, Packet::Close(Error::new(Kind::ConnectionLost, "the network was cut")));
            self.wires[to].cut = true;
        }
    }

    fn is_empty(&self) -> bool {
        self.wires.iter().all(|wire| wire.packets.is_empty())
    }
}

/// A device of the simulation.
pub trait Simulated: QueuePair {
    /// Receives posted and not used.
    fn receives(&self) -> usize;
    fn exposes(&self, handle: Handle) -> bool;
    fn exposures(&self) -> usize;
    /// From here on `left.0` exposures succeed, and then `left.1` fail.
    fn run_out(&mut self, left: (u32, u32));
    /// From here on nothing can be invalidated.
    fn jam(&mut self);
    fn is_jammed(&self) -> bool;
}

impl Simulated for Card {
    fn receives(&self) -> usize {
        self.receives.len()
    }

    fn exposes(&self, handle: Handle) -> bool {
        self.exposed.contains_key(&handle.0)
    }

    fn exposures(&self) -> usize {
        self.exposed.len()
    }

    fn run_out(&mut self, left: (u32, u32)) {
        self.exposures_left = Some(left);
    }

    fn jam(&mut self) {
        self.jammed = true;
    }

    fn is_jammed(&self) -> bool {
        self.jammed
    }
}

enum Exposed {
    /// And how many bytes of it were asked for.
    Source(Region, u64),
    Sink(Sink),
    Discard,
}

struct Read {
    id: WorkId,
    sink: Sink,
    at: usize,
    from: Segment,
}

/// The device of one end.
pub struct Card {
    end: usize,
    network: Arc<Mutex<Network>>,
    terms: Terms,
    random: Random,
    private_data: Vec<u8>,
    memory: Option<Arc<Memory>>,
    /// Bytes of each Receive, oldest first.
    receives: VecDeque<usize>,
    exposed: FxHashMap<u32, (Segment, Exposed)>,
    reads: VecDeque<Read>,
    stalled: VecDeque<Read>,
    /// What the stream has no room for.
    unsent: VecDeque<Packet>,
    dead: Option<Error>,
    exposures_left: Option<(u32, u32)>,
    jammed: bool,
    moved: u64,
}

impl Card {
    /// The device of end 0 or 1. `own` and `peer`: the private data of this end and of the other.
    pub fn new(end: usize, network: &Arc<Mutex<Network>>, seed: u64, [own, peer]: [&PrivateData; 2]) -> Card {
        let mut terms = network.lock().unwrap().terms;
        terms.limits.remote_invalidation = own.remote_invalidation;
        Card {
            end,
            network: network.clone(),
            terms,
            random: Random(seed | 1),
            private_data: peer.encode().to_vec(),
            memory: None,
            receives: VecDeque::new(),
            exposed: FxHashMap::default(),
            reads: VecDeque::new(),
            stalled: VecDeque::new(),
            unsent: VecDeque::new(),
            dead: None,
            exposures_left: None,
            jammed: false,
            moved: 0,
        }
    }

    /// The same with segments of at most `most` bytes.
    pub fn with_segments(mut self, most: u32) -> Card {
        self.terms.limits.max_segment = most;
        self
    }

    fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap()
    }

    fn transmit(&mut self, packet: Packet) {
        self.unsent.push_back(packet);
        self.send();
    }

    /// Hands the stream what it has room for.
    fn send(&mut self) {
        let to = 1 - self.end;
        let Card { network, unsent, terms, .. } = self;
        let mut network = network.lock().unwrap();
        while !unsent.is_empty() {
            let wire = &mut network.wires[to];
            if wire.cut {
                unsent.clear();
                return;
            }
            wire.full = wire.bytes >= terms.window;
            if wire.full {
                return;
            }
            let mut packet = unsent.pop_front().unwrap();
            // As with bytes that go into a socket.
            packet.own();
            network.push(to, packet);
        }
    }

    fn start_reads(&mut self) {
        while self.reads.len() < self.terms.limits.read_depth as usize {
            let Some(read) = self.stalled.pop_front() else { return };
            self.transmit(Packet::ReadRequest(read.from));
            self.reads.push_back(read);
        }
    }

    fn die(&mut self, error: Error) {
        self.receives.clear();
        self.exposed.clear();
        self.reads.clear();
        self.stalled.clear();
        self.unsent.clear();
        // What has arrived by then is no longer looked at.
        let mut network = self.network();
        network.wires[self.end].packets.clear();
        network.wires[self.end].cut = true;
        drop(network);
        self.dead = Some(error);
    }

    fn expose(&mut self, memory: Exposed, len: usize) -> Result<Segment, Error> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        assert!(len > 0 && len <= self.terms.limits.max_segment as usize, "a segment of {len} bytes");
        match self.exposures_left {
            None => {}
            Some((0, 0)) => self.exposures_left = None,
            Some((0, fail)) => {
                self.exposures_left = Some((0, fail - 1));
                return Err(Error::new(Kind::Os(libc::ENOMEM), "no handle left"));
            }
            Some((left, fail)) => self.exposures_left = Some((left - 1, fail)),
        }
        let handle = loop {
            let handle = self.random.next() as u32;
            if !self.exposed.contains_key(&handle) {
                break Handle(handle);
            }
        };
        let segment = Segment { handle, length: len as u32, offset: self.random.next() >> 1 };
        self.exposed.insert(handle.0, (segment, memory));
        Ok(segment)
    }

    fn find(&mut self, named: &Segment) -> Option<(&mut Exposed, usize)> {
        let (segment, memory) = self.exposed.get_mut(&named.handle.0)?;
        let at = named.offset.checked_sub(segment.offset)?;
        let end = at.checked_add(u64::from(named.length))?;
        (end <= u64::from(segment.length)).then_some((memory, at as usize))
    }

    fn arrived(&mut self) -> Option<Packet> {
        let end = self.end;
        let mut network = self.network();
        let now = network.now();
        let window = network.terms.window;
        let wire = &mut network.wires[end];
        if wire.packets.front().is_none_or(|(at, _)| *at > now) {
            return None;
        }
        let (_, packet) = wire.packets.pop_front()?;
        wire.bytes -= packet.bytes();
        if wire.full && wire.bytes < window {
            wire.full = false;
            network.wakes.push((now, 1 - end));
        }
        Some(packet)
    }

    fn take(&mut self, packet: Packet) -> Result<Option<Completion>, Error> {
        self.moved += packet.bytes() as u64;
        match packet {
            Packet::Send { gather, crc: posted, invalidate } => {
                assert_eq!(crc(&gather), posted, "a message was changed after it was posted");
                let room = self.receives.pop_front().expect("a Send finds a Receive");
                let len = gather.iter().map(|piece| piece.len()).sum::<usize>();
                assert!(len <= room, "a Send of {len} bytes for a Receive of {room}");
                let memory = self.memory.as_ref().expect("Receives were posted");
                let Ok(sink) = memory.receive(len.max(1), room) else {
                    return Err(Error::new(Kind::Os(libc::ENOMEM), "there is no memory for what arrives"));
                };
                assert!(place(&sink, 0, &gather));
                if let Some(handle) = invalidate {
                    assert!(
                        self.terms.limits.remote_invalidation,
                        "an end that takes no Send with Invalidate"
                    );
                    let known = self.exposed.remove(&handle.0).is_some();
                    assert!(known, "{handle:?} is not exposed and cannot be invalidated");
                }
                Ok(Some(Completion::Received { sink, len, invalidated: invalidate }))
            }
            Packet::Write { gather, crc: posted, to } => {
                assert_eq!(crc(&gather), posted, "a message was changed after it was posted");
                match self.find(&to) {
                    Some((Exposed::Sink(sink), at)) => assert!(place(sink, at, &gather)),
                    Some((Exposed::Discard, _)) => {}
                    _ => panic!("a Write to {to}, which is not exposed for it"),
                }
                Ok(None)
            }
            Packet::ReadRequest(from) => {
                let tells = self.terms.tells_reads;
                match self.find(&from) {
                    Some((Exposed::Source(region, asked), at)) => {
                        *asked += u64::from(from.length);
                        let data = own(&region.slice(at, from.length as usize));
                        self.transmit(Packet::ReadResponse(data));
                        Ok(None)
                    }
                    // A call without a reply is taken for read after a while, where the device cannot tell.
                    _ if !tells => Err(Error::new(Kind::Protocol, "remote access error")),
                    _ => panic!("a Read from {from}, which is not exposed for it"),
                }
            }
            Packet::ReadResponse(data) => {
                let Read { id, sink, at, .. } =
                    self.reads.pop_front().expect("a Read waits for its Response");
                assert!(sink.place(at, &data));
                drop(sink);
                self.start_reads();
                Ok(Some(Completion::Read { id }))
            }
            Packet::Close(error) => Err(error),
        }
    }
}

fn place(sink: &Sink, mut at: usize, gather: &[Region]) -> bool {
    gather.iter().all(|region| {
        let placed = sink.place(at, region);
        at += region.len();
        placed
    })
}

impl QueuePair for Card {
    fn traits(&self) -> &'static Traits {
        &provider::iwarp::TRAITS
    }

    fn limits(&self) -> Limits {
        self.terms.limits
    }

    fn describe(&self) -> String {
        "simulated".to_owned()
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        let len = region.len();
        self.expose(Exposed::Source(region, 0), len)
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        let len = sink.len();
        self.expose(Exposed::Sink(sink), len)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        if self.jammed && self.dead.is_none() {
            return Err(Error::new(Kind::Os(libc::EIO), "cannot invalidate"));
        }
        self.exposed.remove(&handle.0);
        Ok(())
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        if let Some((_, memory)) = self.exposed.get_mut(&handle.0) {
            match memory {
                Exposed::Source(region, _) => *region = region.owned()?,
                Exposed::Sink(_) | Exposed::Discard => *memory = Exposed::Discard,
            }
        }
        Ok(())
    }

    fn was_read(&self, handle: Handle) -> Option<bool> {
        let asked = |(_, memory): &(Segment, Exposed)| match memory {
            Exposed::Source(region, asked) => *asked >= region.len() as u64,
            _ => false,
        };
        self.terms.tells_reads.then(|| self.exposed.get(&handle.0).is_none_or(asked))
    }

    fn release_lent(&mut self) -> Result<usize, Error> {
        Ok(self.unsent.iter_mut().map(Packet::own).sum())
    }

    fn post_recv(&mut self, sink: Sink) {
        self.receives.push_back(sink.len());
    }

    fn post_recv_of(&mut self, memory: &Arc<Memory>, bytes: usize) -> Result<(), Error> {
        self.memory.get_or_insert_with(|| memory.clone());
        self.receives.push_back(bytes);
        Ok(())
    }

    fn withdraw(&mut self) -> usize {
        // A device that has begun to use the oldest Receive keeps it.
        let keeps = self.random.below(2).min(self.receives.len());
        let held = self.receives.len();
        self.receives.truncate(keeps);
        held - keeps
    }

    fn post(&mut self, request: WorkRequest) {
        if self.dead.is_some() {
            return;
        }
        let max = self.terms.limits.max_segment;
        match request {
            WorkRequest::Send { gather, invalidate } => {
                let crc = crc(&gather);
                self.transmit(Packet::Send { gather, crc, invalidate });
            }
            WorkRequest::Write { gather, to } => {
                let sum: usize = gather.iter().map(|region| region.len()).sum();
                assert!(
                    sum == to.length as usize && sum > 0 && to.length <= max,
                    "a Write of {sum} bytes to {to}"
                );
                let crc = crc(&gather);
                self.transmit(Packet::Write { gather, crc, to });
            }
            WorkRequest::Read { id, sink, at, from } => {
                let fits = at + from.length as usize <= sink.len() && from.length > 0 && from.length <= max;
                assert!(fits && self.terms.limits.read_depth > 0, "a Read from {from} to {at} of {sink:?}");
                self.stalled.push_back(Read { id, sink, at, from });
                self.start_reads();
            }
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        loop {
            if let Some(error) = &self.dead {
                return Err(error.clone());
            }
            self.send();
            let Some(packet) = self.arrived() else { return Ok(None) };
            match self.take(packet) {
                Ok(None) => {}
                Ok(completion) => return Ok(completion),
                Err(error) => {
                    self.close();
                    self.dead = Some(error);
                }
            }
        }
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.send();
        Ok(self.unsent.is_empty())
    }

    fn fd(&self) -> std::os::fd::RawFd {
        -1
    }

    fn wants_write(&self) -> bool {
        false
    }

    fn moved(&self) -> u64 {
        self.moved
    }

    fn taken(&self) -> u64 {
        self.moved
    }

    fn pulled(&self) -> u64 {
        self.moved
    }

    fn close(&mut self) {
        if self.dead.is_some() {
            return;
        }
        let to = 1 - self.end;
        {
            let mut network = self.network();
            if !network.wires[to].cut {
                // Some of what was handed to the stream may be lost with it.
                let lost = network.random.below(4) == 0;
                if lost {
                    let left = network.wires[to].packets.len();
                    let left = network.random.below(left + 1);
                    network.wires[to].packets.truncate(left);
                }
                network.push(to, Packet::Close(Error::new(Kind::ConnectionLost, "the peer closed")));
                network.wires[to].cut = true;
            }
        }
        self.die(Error::new(Kind::ConnectionLost, "this end closed the connection"));
    }

    fn unsent(&self) -> usize {
        self.unsent.iter().map(Packet::bytes).sum()
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        self.close();
    }
}
