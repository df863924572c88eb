//! Devices for tests: a pair joined in memory, and a wrapper that watches any device and injects faults into it.
//!
//! [`pair`] gives two [`Loopback`] ends with the semantics of the trait's contract and of RFC 5040 §5.5: one
//! ordered stream each way, rights and ranges checked where the memory is, a Terminate to the peer on any
//! violation. Nothing moves except inside a call, and an end takes in what its peer sent only in its own `poll`, as bytes
//! wait in a socket: a test decides the interleaving. There is no fd.
//!
//! [`Fault`] wraps a device; its [`Control`] stays with the test. It records every operation, makes the n-th fail, holds
//! completions back, drops, duplicates and changes received messages, and reports smaller limits. Meanwhile it asserts
//! what the layers above owe the device and, for RPC-over-RDMA Version One messages, the rules of RFC 8166 §3.3.1 on
//! credits and Receives. These checks never object to a correct engine; when replies come out of order, they may miss
//! something. A check that fails is a panic that gives the reason.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::{Completion, Doze, Limits, QueuePair, Traits, WorkId, WorkRequest, iwarp};
use crate::error::{Error, Kind};
use crate::memory::shared::Shown;
use crate::memory::{Buf, Region, Regions, Sink, Slabs};
use crate::wire::header::{self, Body, Versions};
use crate::wire::{Credits, Handle, Segment, Xid, v1};

// -------------------------------------------------------------------------------------------------- loopback

/// Two connected devices in memory, both with `limits`.
pub fn pair(limits: Limits) -> (Loopback, Loopback) {
    let wires = Arc::new(Mutex::new([VecDeque::new(), VecDeque::new()]));
    let end = |end| Loopback {
        end,
        wires: Arc::clone(&wires),
        limits,
        traits: &iwarp::TRAITS,
        private_data: Vec::new(),
        receives: VecDeque::new(),
        exposed: HashMap::new(),
        reads: VecDeque::new(),
        stalled: VecDeque::new(),
        serial: end as u32,
        dead: None,
    };
    (end(0), end(1))
}

/// One end of a pair. See [`pair`].
pub struct Loopback {
    end: usize,
    /// What is under way to end 0 and to end 1.
    wires: Arc<Mutex<[VecDeque<Packet>; 2]>>,
    limits: Limits,
    traits: &'static Traits,
    private_data: Vec<u8>,
    /// Posted but not used, oldest first.
    receives: VecDeque<Sink>,
    exposed: HashMap<Handle, (Segment, Exposed)>,
    /// RDMA Reads under way, oldest first; at most `read_depth`.
    reads: VecDeque<Read>,
    /// RDMA Reads that wait for one of those to end. Other work passes them.
    stalled: VecDeque<Read>,
    /// Source of handles: even on one end and odd on the other.
    serial: u32,
    dead: Option<Error>,
}

struct Read {
    id: WorkId,
    /// `None` when it was lent and has been taken back.
    sink: Option<Sink>,
    at: usize,
    from: Segment,
}

enum Exposed {
    Source(Region),
    Sink(Sink),
    /// A sink that was detached.
    Discard,
}

/// What travels to the other end.
enum Packet {
    Send {
        gather: Regions,
        invalidate: Option<Handle>,
    },
    Write {
        gather: Regions,
        to: Segment,
    },
    ReadRequest(Segment),
    ReadResponse(Vec<u8>),
    /// The last packet: the sender's end is dead, or was dropped.
    Close(Error),
}

impl Loopback {
    /// The same device with `bytes` as the private data of the peer.
    pub fn with_private_data(mut self, bytes: &[u8]) -> Loopback {
        self.private_data = bytes.to_vec();
        self
    }

    /// The same device with other traits than software iWARP's.
    pub fn with_traits(mut self, traits: &'static Traits) -> Loopback {
        self.traits = traits;
        self
    }

    /// Receives posted but not used.
    pub fn receives(&self) -> usize {
        self.receives.len()
    }

    fn wires(&self) -> MutexGuard<'_, [VecDeque<Packet>; 2]> {
        self.wires.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn transmit(&self, packet: Packet) {
        self.wires()[1 - self.end].push_back(packet);
    }

    fn alive(&self) -> Result<(), Error> {
        self.dead.clone().map_or(Ok(()), Err)
    }

    /// Hands over what was posted to the peer's side, as bytes go into a socket: from here on it names no lent memory.
    /// Returns the bytes copied.
    fn hand_over(&self) -> io::Result<usize> {
        let mut copied = 0;
        for packet in &mut self.wires()[1 - self.end] {
            let (Packet::Send { gather, .. } | Packet::Write { gather, .. }) = packet else { continue };
            for region in gather.iter_mut().filter(|region| region.is_lent()) {
                *region = region.owned()?;
                copied += region.len();
            }
        }
        Ok(copied)
    }

    /// Ends the queue pair: all memory is released.
    fn die(&mut self, error: Error) {
        self.hand_over().expect("memory for what a test sends");
        self.receives.clear();
        self.exposed.clear();
        self.reads.clear();
        self.stalled.clear();
        self.dead = Some(error);
    }

    /// Ends the queue pair because of an error at this end, and tells the peer.
    fn terminate(&mut self, error: Error) {
        let text = format!("the peer ended the connection: {error}");
        self.transmit(Packet::Close(Error::new(Kind::ConnectionLost, text)));
        self.die(error);
    }

    /// Starts as many RDMA Reads as the peer serves at a time.
    fn start_reads(&mut self) {
        while self.reads.len() < self.limits.read_depth as usize {
            let Some(read) = self.stalled.pop_front() else { return };
            self.transmit(Packet::ReadRequest(read.from));
            self.reads.push_back(read);
        }
    }

    fn expose(&mut self, memory: Exposed, len: usize) -> Result<Segment, Error> {
        self.alive()?;
        let length = u32::try_from(len).ok().filter(|length| *length <= self.limits.max_segment);
        let Some(length) = length else {
            let text = format!("{len} bytes in one segment; the device takes {}", self.limits.max_segment);
            return Err(Error::new(Kind::Invalid, text));
        };
        self.serial = self.serial.wrapping_add(2);
        // Multiplication by an odd number is a permutation that keeps the lowest bit: handles are unique, and those of
        // the two ends differ.
        let handle = Handle(self.serial.wrapping_mul(0x9e37_79b1));
        let offset = u64::from(handle.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1;
        let segment = Segment { handle, length, offset };
        self.exposed.insert(handle, (segment, memory));
        Ok(segment)
    }

    /// The memory that the peer names, and where in it the bytes lie.
    fn find(&self, named: &Segment) -> Result<(&Exposed, usize), Error> {
        let refuse = |why: &str| Error::new(Kind::Protocol, format!("remote access to {named}: {why}"));
        let (segment, memory) = self.exposed.get(&named.handle).ok_or_else(|| refuse("no such handle"))?;
        let at = named.offset.checked_sub(segment.offset).ok_or_else(|| refuse("before its memory"))?;
        match at.checked_add(u64::from(named.length)) {
            Some(end) if end <= u64::from(segment.length) => Ok((memory, at as usize)),
            _ => Err(refuse("beyond its memory")),
        }
    }

    /// Takes in one packet of the peer.
    fn take(&mut self, packet: Packet) -> Result<Option<Completion>, Error> {
        match packet {
            Packet::Send { gather, invalidate } => {
                let Some(sink) = self.receives.pop_front() else {
                    return Err(Error::new(Kind::Protocol, "a Send of the peer found no Receive"));
                };
                let Some(len) = place(&sink, 0, &gather) else {
                    return Err(Error::new(Kind::Protocol, "a Send of the peer is longer than its Receive"));
                };
                if let Some(handle) = invalidate {
                    let known = self.exposed.remove(&handle).is_some();
                    if !(known && self.limits.remote_invalidation) {
                        let text = format!("the peer may not invalidate {:#010x}", handle.0);
                        return Err(Error::new(Kind::Protocol, text));
                    }
                }
                Ok(Some(Completion::Received { sink, len, invalidated: invalidate }))
            }
            Packet::Write { gather, to } => match self.find(&to)? {
                (Exposed::Sink(sink), at) => match place(sink, at, &gather) {
                    Some(_) => Ok(None),
                    None => Err(Error::new(Kind::Protocol, "RDMA Write beyond the memory")),
                },
                (Exposed::Discard, _) => Ok(None),
                _ => Err(Error::new(Kind::Protocol, format!("RDMA Write to {to}: it may only be read"))),
            },
            Packet::ReadRequest(from) => match self.find(&from)? {
                (Exposed::Source(region), at) => {
                    let bytes = region[at..at + from.length as usize].to_vec();
                    self.transmit(Packet::ReadResponse(bytes));
                    Ok(None)
                }
                _ => {
                    Err(Error::new(Kind::Protocol, format!("RDMA Read from {from}: it may only be written")))
                }
            },
            Packet::ReadResponse(bytes) => match self.reads.pop_front() {
                Some(Read { id, sink, at, .. })
                    if sink.as_ref().is_none_or(|sink| sink.place(at, &bytes)) =>
                {
                    self.start_reads();
                    Ok(Some(Completion::Read { id }))
                }
                _ => Err(Error::new(Kind::Protocol, "an RDMA Read Response that nobody waits for")),
            },
            Packet::Close(error) => Err(error),
        }
    }

    /// Why the device cannot do `request`: a mistake of the layers above.
    fn refusal(&self, request: &WorkRequest) -> Option<String> {
        let max = self.limits.max_segment;
        match request {
            WorkRequest::Send { .. } => None,
            WorkRequest::Write { gather, to } => {
                let sum: usize = gather.iter().map(|region| region.len()).sum();
                (sum != to.length as usize || to.length > max)
                    .then(|| format!("RDMA Write of {sum} bytes to {to}; the limit is {max}"))
            }
            WorkRequest::Read { sink, at, from, .. } => {
                let fits = at.checked_add(from.length as usize).is_some_and(|end| end <= sink.len());
                let served = self.limits.read_depth > 0;
                (!fits || !served || from.length > max).then(|| {
                    format!("RDMA Read from {from} to {at} of {sink:?}; the limits are {:?}", self.limits)
                })
            }
        }
    }
}

impl QueuePair for Loopback {
    fn traits(&self) -> &'static Traits {
        self.traits
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn moved(&self) -> u64 {
        0
    }

    fn taken(&self) -> u64 {
        0
    }

    fn pulled(&self) -> u64 {
        0
    }

    fn close(&mut self) {
        self.terminate(Error::new(Kind::ConnectionLost, "this side closed the connection"));
    }

    fn describe(&self) -> String {
        "loopback".to_owned()
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        let len = region.len();
        self.expose(Exposed::Source(region), len)
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        let len = sink.len();
        self.expose(Exposed::Sink(sink), len)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        self.exposed.remove(&handle);
        Ok(())
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        if let Some((_, memory)) = self.exposed.get_mut(&handle) {
            *memory = match memory {
                Exposed::Source(region) => Exposed::Source(region.owned()?),
                Exposed::Sink(_) | Exposed::Discard => Exposed::Discard,
            };
        }
        Ok(())
    }

    fn release_lent(&mut self) -> Result<usize, Error> {
        for read in self.reads.iter_mut().chain(&mut self.stalled) {
            read.sink.take_if(|sink| sink.is_lent());
        }
        Ok(self.hand_over()?)
    }

    fn post_recv(&mut self, sink: Sink) {
        if self.dead.is_none() {
            self.receives.push_back(sink);
        }
    }

    fn withdraw(&mut self) -> usize {
        self.receives.drain(..).count()
    }

    fn post(&mut self, request: WorkRequest) {
        if self.dead.is_some() {
            return;
        }
        if let Some(why) = self.refusal(&request) {
            return self.terminate(Error::new(Kind::Invalid, why));
        }
        match request {
            WorkRequest::Send { gather, invalidate } => self.transmit(Packet::Send { gather, invalidate }),
            WorkRequest::Write { gather, to } => self.transmit(Packet::Write { gather, to }),
            WorkRequest::Read { id, sink, at, from } => {
                self.stalled.push_back(Read { id, sink: Some(sink), at, from });
                self.start_reads();
            }
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        self.alive()?;
        loop {
            let Some(packet) = self.wires()[self.end].pop_front() else { return Ok(None) };
            let closed = matches!(packet, Packet::Close(_));
            match self.take(packet) {
                Ok(None) => {}
                Ok(completion) => return Ok(completion),
                Err(error) if closed => self.die(error),
                Err(error) => self.terminate(error),
            }
            self.alive()?;
        }
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.alive()?;
        self.hand_over()?;
        Ok(self.stalled.is_empty())
    }

    fn fd(&self) -> RawFd {
        -1
    }

    fn wants_write(&self) -> bool {
        false
    }

    fn unsent(&self) -> usize {
        0
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        if self.dead.is_none() {
            self.hand_over().expect("memory for what a test sends");
            self.transmit(Packet::Close(Error::new(Kind::ConnectionLost, "the peer closed the connection")));
        }
    }
}

/// Places the pieces one after the other; returns the number of bytes, or `None` when they do not fit.
fn place(sink: &Sink, at: usize, gather: &[Region]) -> Option<usize> {
    let mut len = 0;
    for region in gather {
        if !sink.place(at + len, region) {
            return None;
        }
        len += region.len();
    }
    Some(len)
}

// ----------------------------------------------------------------------------------------------------- fault

/// A device that wraps another one, watches it and injects faults into it.
pub struct Fault {
    inner: Box<dyn QueuePair>,
    control: Control,
}

/// The test's hold on a [`Fault`]; all clones share one state.
#[derive(Clone)]
pub struct Control(Arc<Mutex<State>>);

/// One line of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Event {
    ExposeSource(Segment),
    ExposeSink(Segment),
    Invalidate(Handle),
    Detach(Handle),
    Keep,
    Probe,
    PostReceive(usize),
    Withdraw(usize),
    Send {
        bytes: Vec<u8>,
        invalidate: Option<Handle>,
    },
    Write(Segment),
    Read {
        id: WorkId,
        from: Segment,
    },
    /// A message as the layer above got it.
    Received {
        bytes: Vec<u8>,
        invalidated: Option<Handle>,
    },
    ReadDone(WorkId),
    /// The operation that failed on command, or the error that ended the device.
    Failed(String),
}

/// A kind of completion that can be held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// [`Completion::Received`].
    Receives,
    /// [`Completion::Read`].
    Reads,
}

/// What happens to a received message.
#[allow(clippy::type_complexity)]
pub enum Damage {
    /// It is lost; its Receive is posted again.
    Drop,
    /// It arrives twice: it also uses up the next Receive that is posted.
    Duplicate,
    /// It is changed. It must still fit its Receive.
    Change(Box<dyn FnOnce(&mut Vec<u8>) + Send>),
}

struct State {
    trace: Vec<Event>,
    tracing: bool,
    /// Index in the trace of the operation that fails, and its error.
    failure: Option<(usize, Error)>,
    /// Set when an operation that returns nothing has failed, or when the device has.
    dead: Option<Error>,
    /// By number of the message, counted from 0.
    damage: HashMap<usize, Damage>,
    /// Messages that the device has delivered.
    arrived: usize,
    duplicates: VecDeque<Vec<u8>>,
    /// Taken from the device, not yet handed up.
    completions: VecDeque<Completion>,
    /// For Receives and Reads: `Some(n)` holds all but the next `n`.
    held: [Option<usize>; 2],
    limits: Limits,
    /// Receives posted minus Receives used or taken back.
    receives: usize,
    /// Reads posted minus Reads completed.
    reads: usize,
    exposed: HashSet<Handle>,
    /// How often it was told to spin, to rest and to leave.
    told: [usize; 3],
    credits: Ledger,
}

impl Fault {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn QueuePair>) -> (Fault, Control) {
        let state = State {
            trace: Vec::new(),
            tracing: true,
            failure: None,
            dead: None,
            damage: HashMap::new(),
            arrived: 0,
            duplicates: VecDeque::new(),
            completions: VecDeque::new(),
            held: [None; 2],
            limits: inner.limits(),
            receives: 0,
            reads: 0,
            exposed: HashSet::new(),
            told: [0; 3],
            credits: Ledger::new(),
        };
        let control = Control(Arc::new(Mutex::new(state)));
        (Fault { inner, control: control.clone() }, control)
    }
}

impl Control {
    /// All operations so far. A `poll` that returned nothing does not count, nor do `flush` and getters.
    pub fn trace(&self) -> Vec<Event> {
        self.state().trace.clone()
    }

    /// The operation with index `n` in the trace fails with `error`, and the device with it, unless the operation was an
    /// exposure. An operation that returns nothing fails in the next `poll`.
    pub fn fail_at(&self, n: usize, error: Error) {
        let mut state = self.state();
        assert!(n >= state.trace.len(), "operation {n} is over");
        state.failure = Some((n, error));
    }

    /// How often the device was told to spin, to rest and to leave.
    pub fn told(&self) -> [usize; 3] {
        self.state().told
    }

    /// From now on nothing is added to the trace (for long runs), and a reply ends no call but its own (for a layer above
    /// that makes no calls without a reply).
    pub fn count_only(&self) {
        let mut state = self.state();
        state.tracing = false;
        state.credits.exact = true;
    }

    /// Damages message number `n` of those that the device delivers, counted from 0.
    pub fn damage(&self, n: usize, damage: Damage) {
        self.state().damage.insert(n, damage);
    }

    /// From now on, holds completions of a kind back. Their bytes still move.
    pub fn hold(&self, kind: Held) {
        self.state().held[kind as usize] = Some(0);
    }

    /// Lets `n` more completions of a held kind pass.
    pub fn release(&self, kind: Held, n: usize) {
        if let Some(pass) = &mut self.state().held[kind as usize] {
            *pass += n;
        }
    }

    /// Stops holding completions of a kind back.
    pub fn release_all(&self, kind: Held) {
        self.state().held[kind as usize] = None;
    }

    /// From now on, reports limits no higher than these. How many RDMA Reads are under way at a time is still up to the
    /// device.
    pub fn shrink(&self, limits: Limits) {
        let now = &mut self.state().limits;
        *now = Limits {
            read_depth: now.read_depth.min(limits.read_depth),
            max_segment: now.max_segment.min(limits.max_segment),
            remote_invalidation: now.remote_invalidation && limits.remote_invalidation,
            receives: now.receives.min(limits.receives),
        };
    }

    /// Receives posted minus Receives used or taken back.
    pub fn receives(&self) -> usize {
        self.state().receives
    }

    /// RDMA Reads posted minus RDMA Reads completed.
    pub fn reads(&self) -> usize {
        self.state().reads
    }

    /// Handles that work: exposed, and not invalidated by either end.
    pub fn exposed(&self) -> usize {
        self.state().exposed.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic of an assertion below must not be hidden by that of a poisoned lock.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl State {
    /// The error of the next operation, if it is to fail.
    fn failing(&mut self, what: &str) -> Option<Error> {
        let (_, error) = self.failure.take_if(|(n, _)| *n == self.trace.len())?;
        self.note(Event::Failed(format!("{what}: {error}")));
        Some(error)
    }

    fn alive(&self) -> Result<(), Error> {
        self.dead.clone().map_or(Ok(()), Err)
    }

    fn note(&mut self, event: Event) {
        if self.tracing {
            self.trace.push(event);
        }
    }

    /// Notes that the device is dead, for the first reason only.
    fn die(&mut self, error: Error) -> Error {
        self.exposed.clear();
        self.dead.get_or_insert(error).clone()
    }

    fn expose(&mut self, segment: Segment, event: fn(Segment) -> Event) {
        assert!(self.exposed.insert(segment.handle), "the device gave out {segment} twice");
        self.note(event(segment));
    }

    fn check_length(&self, len: usize) -> Result<(), Error> {
        if len > self.limits.max_segment as usize {
            let text = format!("{len} bytes in one segment; the device takes {}", self.limits.max_segment);
            return Err(Error::new(Kind::Invalid, text));
        }
        Ok(())
    }

    fn note_post(&mut self, request: &WorkRequest) {
        let max = self.limits.max_segment;
        match request {
            WorkRequest::Send { gather, invalidate } => {
                let bytes: Vec<u8> = gather.iter().flat_map(|region| region.iter().copied()).collect();
                self.credits.sent(&bytes, self.receives);
                self.note(Event::Send { bytes, invalidate: *invalidate });
            }
            WorkRequest::Write { gather, to } => {
                let sum: usize = gather.iter().map(|region| region.len()).sum();
                assert_eq!(sum, to.length as usize, "RDMA Write to {to} of another number of bytes");
                assert!(to.length <= max, "RDMA Write to {to}: the device moves {max} bytes");
                self.note(Event::Write(*to));
            }
            WorkRequest::Read { id, sink, at, from } => {
                let fits = at.checked_add(from.length as usize).is_some_and(|end| end <= sink.len());
                assert!(fits, "RDMA Read from {from} to {at} of {sink:?}");
                assert!(from.length <= max, "RDMA Read from {from}: the device moves {max} bytes");
                assert!(self.limits.read_depth > 0, "RDMA Read from {from} of a peer that serves none");
                self.reads += 1;
                self.note(Event::Read { id: *id, from: *from });
            }
        }
    }

    /// Takes a completion from the device; returns a Receive that must be posted again.
    fn arrive(&mut self, completion: Completion) -> Option<Sink> {
        let Completion::Received { sink, len, invalidated } = completion else {
            self.completions.push_back(completion);
            return None;
        };
        assert!(self.receives > 0, "the device completed a Receive that nobody posted");
        assert!(len <= sink.len(), "the device received {len} bytes into {sink:?}");
        if let Some(handle) = invalidated {
            self.exposed.remove(&handle);
        }
        let damage = self.damage.remove(&self.arrived);
        self.arrived += 1;
        match damage {
            None => self.completions.push_back(Completion::Received { sink, len, invalidated }),
            Some(Damage::Drop) => return Some(sink),
            Some(Damage::Duplicate) => {
                let (sink, bytes) = read(sink, len);
                self.duplicates.push_back(bytes);
                self.completions.push_back(Completion::Received { sink, len, invalidated });
            }
            Some(Damage::Change(change)) => {
                let (sink, mut bytes) = read(sink, len);
                change(&mut bytes);
                assert!(sink.place(0, &bytes), "the changed message does not fit its Receive");
                self.completions.push_back(Completion::Received { sink, len: bytes.len(), invalidated });
            }
        }
        None
    }

    /// Index of the next completion that is not held back.
    fn ready(&self) -> Option<usize> {
        self.completions.iter().position(|c| self.held[held(c) as usize] != Some(0))
    }

    fn hand_up(&mut self, n: usize) -> Option<Completion> {
        let completion = self.completions.remove(n)?;
        if let Some(pass) = &mut self.held[held(&completion) as usize] {
            *pass -= 1;
        }
        Some(match completion {
            Completion::Received { sink, len, invalidated } => {
                let (sink, bytes) = read(sink, len);
                self.receives -= 1;
                self.credits.received(&bytes);
                self.note(Event::Received { bytes, invalidated });
                Completion::Received { sink, len, invalidated }
            }
            Completion::Read { id } => {
                assert!(self.reads > 0, "the device completed an RDMA Read that nobody posted");
                self.reads -= 1;
                self.note(Event::ReadDone(id));
                Completion::Read { id }
            }
        })
    }
}

impl QueuePair for Fault {
    fn traits(&self) -> &'static Traits {
        self.inner.traits()
    }

    fn establish(&mut self) -> Result<bool, Error> {
        self.inner.establish()
    }

    fn slabs(&self) -> Option<Arc<Slabs>> {
        self.inner.slabs()
    }

    fn nudge(&mut self) {
        self.inner.nudge();
    }

    fn limits(&self) -> Limits {
        self.control.state().limits
    }

    fn moved(&self) -> u64 {
        self.inner.moved()
    }

    fn taken(&self) -> u64 {
        self.inner.taken()
    }

    fn pulled(&self) -> u64 {
        self.inner.pulled()
    }

    fn close(&mut self) {
        self.inner.close();
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn private_data(&self) -> &[u8] {
        self.inner.private_data()
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        let mut state = self.control.state();
        if let Some(error) = state.failing("expose_source") {
            return Err(error);
        }
        state.alive()?;
        state.check_length(region.len())?;
        let segment = self.inner.expose_source(region)?;
        state.expose(segment, Event::ExposeSource);
        Ok(segment)
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        let mut state = self.control.state();
        if let Some(error) = state.failing("expose_sink") {
            return Err(error);
        }
        state.alive()?;
        state.check_length(sink.len())?;
        let segment = self.inner.expose_sink(sink)?;
        state.expose(segment, Event::ExposeSink);
        Ok(segment)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        let mut state = self.control.state();
        if let Some(error) = state.failing("invalidate") {
            return Err(state.die(error));
        }
        self.inner.invalidate(handle)?;
        state.exposed.remove(&handle);
        state.note(Event::Invalidate(handle));
        Ok(())
    }

    fn was_read(&self, handle: Handle) -> Option<bool> {
        self.inner.was_read(handle)
    }

    fn claim(&mut self, answers: bool) -> bool {
        self.inner.claim(answers)
    }

    fn has_missed(&mut self) -> bool {
        self.inner.has_missed()
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        let mut state = self.control.state();
        if let Some(error) = state.failing("detach") {
            return Err(state.die(error));
        }
        self.inner.detach(handle)?;
        state.note(Event::Detach(handle));
        Ok(())
    }

    fn probe(&mut self) -> Result<(), Error> {
        let mut state = self.control.state();
        if let Some(error) = state.failing("probe") {
            return Err(state.die(error));
        }
        self.inner.probe()?;
        state.note(Event::Probe);
        Ok(())
    }

    fn release_lent(&mut self) -> Result<usize, Error> {
        let mut state = self.control.state();
        if let Some(error) = state.failing("keep") {
            return Err(state.die(error));
        }
        let copied = self.inner.release_lent()?;
        state.note(Event::Keep);
        Ok(copied)
    }

    fn post_recv(&mut self, sink: Sink) {
        let mut state = self.control.state();
        if let Some(error) = state.failing("post_recv") {
            state.die(error);
        }
        if state.dead.is_some() {
            return;
        }
        state.receives += 1;
        state.note(Event::PostReceive(sink.len()));
        match state.duplicates.pop_front() {
            Some(bytes) => {
                assert!(sink.place(0, &bytes), "the duplicate does not fit the next Receive");
                let len = bytes.len();
                state.completions.push_back(Completion::Received { sink, len, invalidated: None });
            }
            None => self.inner.post_recv(sink),
        }
    }

    fn withdraw(&mut self) -> usize {
        let mut state = self.control.state();
        if let Some(error) = state.failing("withdraw") {
            state.die(error);
        }
        if state.dead.is_some() {
            return 0;
        }
        let withdrawn = self.inner.withdraw();
        state.receives -= withdrawn;
        state.note(Event::Withdraw(withdrawn));
        withdrawn
    }

    fn post(&mut self, request: WorkRequest) {
        let mut state = self.control.state();
        if let Some(error) = state.failing("post") {
            state.die(error);
        }
        if state.dead.is_none() {
            state.note_post(&request);
            self.inner.post(request);
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        let mut state = self.control.state();
        while state.ready().is_none() && state.dead.is_none() {
            match self.inner.poll() {
                Ok(Some(completion)) => {
                    if let Some(sink) = state.arrive(completion) {
                        self.inner.post_recv(sink);
                    }
                }
                Ok(None) => return Ok(None),
                Err(error) => {
                    state.note(Event::Failed(error.to_string()));
                    state.die(error);
                }
            }
        }
        match (state.ready(), &state.dead) {
            (Some(n), _) => match state.failing("poll") {
                None => Ok(state.hand_up(n)),
                Some(error) => {
                    state.completions.clear();
                    Err(state.die(error))
                }
            },
            // What came before the error is delivered before it.
            (None, Some(error)) if state.completions.is_empty() => Err(error.clone()),
            (None, _) => Ok(None),
        }
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.control.state().alive()?;
        self.inner.flush()
    }

    fn spin(&mut self) -> bool {
        self.control.state().told[0] += 1;
        self.inner.spin()
    }

    fn has_come(&self) -> bool {
        self.inner.has_come()
    }

    fn rest(&mut self) -> bool {
        self.control.state().told[1] += 1;
        self.inner.rest()
    }

    fn leave(&mut self) -> bool {
        self.control.state().told[2] += 1;
        self.inner.leave()
    }

    fn doze(&mut self) -> Option<Doze> {
        self.inner.doze()
    }

    fn arrived(&mut self, bytes: Option<&[u8]>) {
        self.inner.arrived(bytes);
    }

    fn tell_company(&mut self, others: u32) {
        self.inner.tell_company(others);
    }

    fn company(&self) -> u32 {
        self.inner.company()
    }

    fn outbox(&mut self) -> Option<Buf> {
        self.inner.outbox()
    }

    fn show(&mut self, address: usize, handle: Handle) -> Option<u64> {
        self.inner.show(address, handle)
    }

    fn keep(&mut self, region: Region, handle: Handle) {
        self.inner.keep(region, handle);
    }

    fn shown(&mut self, segment: Segment) -> Option<Shown> {
        self.inner.shown(segment)
    }

    fn is_receiver(&self) -> bool {
        self.inner.is_receiver()
    }

    fn wakes(&self) -> u64 {
        self.inner.wakes()
    }

    fn remind(&mut self) -> Option<Instant> {
        self.inner.remind()
    }

    fn fd(&self) -> RawFd {
        self.inner.fd()
    }

    fn wants_write(&self) -> bool {
        self.inner.wants_write()
    }

    fn unsent(&self) -> usize {
        self.inner.unsent()
    }
}

fn held(completion: &Completion) -> Held {
    match completion {
        Completion::Received { .. } => Held::Receives,
        Completion::Read { .. } => Held::Reads,
    }
}

/// The bytes of a completed Receive, of which the device must have let go.
fn read(sink: Sink, len: usize) -> (Sink, Vec<u8>) {
    let room = sink.len();
    let buf = sink.into_buf(len).expect("the device holds on to a completed Receive");
    let bytes = buf.to_vec();
    (buf.into_sink(room), bytes)
}

/// What the messages of a connection say about credits, each direction by itself.
struct Ledger {
    /// Our calls, oldest first, that the peer may not have consumed: a reply also ends all calls sent before its own,
    /// unless `exact`.
    calls: VecDeque<Xid>,
    exact: bool,
    /// Our calls that were ended that way, without a reply of their own.
    overtaken: HashSet<Xid>,
    /// Granted to us by the last reply.
    granted: Credits,
    /// Calls of the peer without a reply.
    unanswered: Vec<Xid>,
    /// Granted by us in the last reply.
    promised: Credits,
}

impl Ledger {
    fn new() -> Ledger {
        Ledger {
            calls: VecDeque::new(),
            exact: false,
            overtaken: HashSet::new(),
            // RFC 8166 §3.3.3: "a Requester MUST NOT assume more than one credit is available and MUST
            // receive a valid reply from the Responder carrying the actual number of available credits, prior
            // to sending its next request."
            granted: Credits(1),
            unanswered: Vec::new(),
            promised: Credits(0),
        }
    }

    /// We send `bytes` and have `receives` Receives posted.
    fn sent(&mut self, bytes: &[u8], receives: usize) {
        let Some(Fixed { xid, credits, error, call }) = Fixed::of(bytes) else { return };
        // RFC 8166 §3.3.1: "The granted value MUST NOT be zero, since such a value would result in deadlock."
        assert_ne!(credits, Credits(0), "a message without credits: {xid}");
        let answered = self.unanswered.iter().position(|x| *x == xid).filter(|_| call != Some(true));
        if let Some(n) = answered {
            self.unanswered.remove(n);
            self.promised = credits;
        } else if !error {
            assert_ne!(call, Some(false), "a reply to {xid}, which the peer did not call");
            self.calls.push_back(xid);
            // RFC 8166 §3.3.1: "The number of allowed new requests the Requester may send is then the lower of the
            // current requested and granted credit values, minus the number of requests in flight."
            let (calls, limit) = (self.calls.len(), self.granted.0.min(credits.0) as usize);
            assert!(calls <= limit, "{calls} calls with {limit} credits");
        }
        // RFC 8166 §3.3.1: "A Requester MUST maintain enough receive resources to accommodate expected replies." and "The
        // Responder MUST ensure that an increase in receive resources is effected before the next RPC Reply message is
        // sent." RFC 8167 §4.3: both directions share them.
        let needed = self.calls.len() + (self.promised.0 as usize).saturating_sub(self.unanswered.len());
        assert!(receives >= needed, "{needed} Receives are needed, and {receives} are posted");
    }

    fn received(&mut self, bytes: &[u8]) {
        let Some(Fixed { xid, credits, error, call }) = Fixed::of(bytes) else { return };
        let own = self.calls.iter().position(|x| *x == xid).filter(|_| call != Some(true));
        // An error says nothing about credits: it may be the answer to either direction.
        let granted = if error { self.granted } else { credits };
        if let Some(n) = own {
            if self.exact {
                self.calls.remove(n);
            } else {
                self.overtaken.extend(self.calls.drain(..n));
                self.calls.pop_front();
            }
            self.granted = granted;
        } else if call != Some(true) && self.overtaken.remove(&xid) {
            self.granted = granted;
        } else if !error && call != Some(false) {
            self.unanswered.push(xid);
        }
    }
}

/// What the ledger looks at in a Version One message (RFC 8166 §4.2).
struct Fixed {
    xid: Xid,
    credits: Credits,
    /// `RDMA_ERROR`: answers a call, perhaps one whose XID could not be trusted; is never a call.
    error: bool,
    /// Whether it is a Call, if it says so.
    call: Option<bool>,
}

impl Fixed {
    fn of(bytes: &[u8]) -> Option<Fixed> {
        let word = |n: usize| Some(u32::from_be_bytes(*bytes.get(4 * n..)?.first_chunk()?));
        if word(1)? != v1::VERSION || word(3)? > 4 {
            return None;
        }
        let call = match header::decode(bytes, Versions::ONE).map(|header| header.body) {
            Ok(Body::Msg { payload, .. }) => match payload.get(4..8) {
                Some([0, 0, 0, 0]) => Some(true),
                Some([0, 0, 0, 1]) => Some(false),
                _ => None,
            },
            Ok(Body::Nomsg { chunks }) => Some(chunks.read_count() > 0),
            _ => None,
        };
        Some(Fixed { xid: Xid(word(0)?), credits: Credits(word(2)?), error: word(3)? == 4, call })
    }
}

#[cfg(test)]
pub(crate) mod contract;

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::contract::{Ends, region, sink};
    use super::*;

    const LIMITS: Limits =
        Limits { read_depth: 4, max_segment: 1 << 20, remote_invalidation: true, receives: u32::MAX };

    /// End 0 is watched.
    fn watched() -> (Ends, Control) {
        let (a, b) = pair(LIMITS);
        let (fault, control) = Fault::new(Box::new(a));
        (Ends::new([Box::new(fault), Box::new(b)]), control)
    }

    /// A Version One message: XID, credits, direction irrelevant.
    fn message(xid: u32, credits: u32) -> Vec<u8> {
        [xid, 1, credits, 0].into_iter().flat_map(u32::to_be_bytes).collect()
    }

    fn poll(pair: &mut Ends, end: usize) -> Option<Completion> {
        pair.ends[end].poll().unwrap()
    }

    fn read(pair: &mut Ends, id: u64, from: Segment) {
        pair.ends[0].post(WorkRequest::Read { id: WorkId(id), sink: sink(16), at: 0, from });
    }

    #[test]
    fn the_loopback_keeps_the_contract() {
        for remote_invalidation in [false, true] {
            let limits = Limits { remote_invalidation, ..LIMITS };
            contract::check(&|| {
                let (a, b) = pair(limits);
                [Box::new(a), Box::new(b)]
            });
        }
    }

    #[test]
    fn a_watched_device_keeps_the_contract() {
        contract::check(&|| {
            let (a, b) = pair(LIMITS);
            [Box::new(Fault::new(Box::new(a)).0), Box::new(Fault::new(Box::new(b)).0)]
        });
    }

    #[test]
    fn handles_of_both_ends_are_distinct_and_private_data_is_the_peers() {
        let (a, b) = pair(LIMITS);
        let mut ends = [a.with_private_data(b"of b"), b];
        let mut handles = HashSet::new();
        for i in 0..2000 {
            assert!(handles.insert(ends[i % 2].expose_sink(sink(1)).unwrap().handle));
        }
        assert_eq!((ends[0].private_data(), ends[1].private_data()), (&b"of b"[..], &b""[..]));
    }

    #[test]
    fn a_loopback_refuses_what_its_limits_exclude() {
        let (mut a, _b) = pair(Limits { read_depth: 0, max_segment: 100, ..LIMITS });
        assert_eq!(a.expose_sink(sink(101)).unwrap_err().kind(), Kind::Invalid);
        let from = a.expose_source(region(&[0; 100])).unwrap();
        assert!(a.poll().unwrap().is_none());
        a.post(WorkRequest::Read { id: WorkId(0), sink: sink(100), at: 0, from });
        assert_eq!(a.poll().unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn a_loopback_takes_no_invalidation_that_it_does_not_offer() {
        for (remote_invalidation, known) in [(true, true), (true, false), (false, true)] {
            let (mut a, mut b) = pair(Limits { remote_invalidation, ..LIMITS });
            let mut handle = b.expose_sink(sink(8)).unwrap().handle;
            if !known {
                handle.0 ^= 1;
            }
            b.post_recv(sink(8));
            a.post(WorkRequest::Send { gather: smallvec![region(b"x")], invalidate: Some(handle) });
            assert_eq!(b.poll().is_ok(), remote_invalidation && known);
        }
    }

    #[test]
    fn a_dead_loopback_holds_no_memory() {
        let (mut a, b) = pair(LIMITS);
        let memory = sink(8);
        a.expose_sink(memory.clone()).unwrap();
        let from = a.expose_source(region(&[0; 8])).unwrap();
        a.post_recv(memory.clone());
        for id in 0..5 {
            a.post(WorkRequest::Read { id: WorkId(id), sink: memory.clone(), at: 0, from });
        }
        drop(b);
        a.poll().unwrap_err();
        memory.into_buf(8).expect("nobody holds it");
    }

    #[test]
    fn the_trace_tells_what_happened() {
        let (mut pair, control) = watched();
        pair.receives(0, 1);
        let from = pair.ends[1].expose_source(region(&[5; 16])).unwrap();
        let to = pair.ends[0].expose_sink(sink(9)).unwrap();
        assert_eq!((control.exposed(), control.receives()), (1, 1));
        pair.send(0, b"hello");
        read(&mut pair, 77, from);
        let reply = WorkRequest::Send { gather: smallvec![region(b"reply")], invalidate: Some(to.handle) };
        pair.ends[1].post(reply);
        pair.receives(1, 1);
        assert_eq!(pair.message(0).1, Some(to.handle));
        pair.next(0).unwrap();
        assert_eq!((control.exposed(), control.receives()), (0, 0));
        let expected = [
            Event::PostReceive(4096),
            Event::ExposeSink(to),
            Event::Send { bytes: b"hello".to_vec(), invalidate: None },
            Event::Read { id: WorkId(77), from },
            Event::Received { bytes: b"reply".to_vec(), invalidated: Some(to.handle) },
            Event::ReadDone(WorkId(77)),
        ];
        assert_eq!(control.trace(), expected);
    }

    #[test]
    fn each_operation_can_be_made_to_fail() {
        // Returns what the operations returned, if anything, and the error of the end.
        let run = |fail: Option<usize>| {
            let (mut pair, control) = watched();
            if let Some(n) = fail {
                control.fail_at(n, Error::new(Kind::Os(libc::EIO), format!("number {n}")));
            }
            let mut errors = Vec::new();
            pair.receives(0, 1);
            assert!(fail == Some(0) || poll(&mut pair, 0).is_none(), "a poll for nothing is no operation");
            let source = pair.ends[0].expose_source(region(b"abc"));
            errors.extend(source.as_ref().err().cloned());
            errors.extend(pair.ends[0].expose_sink(sink(3)).err());
            pair.send(0, b"call");
            pair.send(1, b"reply");
            errors.extend(pair.ends[0].poll().err());
            errors.extend(source.and_then(|s| pair.ends[0].invalidate(s.handle)).err());
            let end = pair.ends[0].poll().err();
            let refused = pair.ends[0].expose_source(region(b"d")).is_err() && pair.ends[0].flush().is_err();
            let dead = refused && pair.ends[0].expose_sink(sink(3)).is_err();
            assert_eq!(dead, end.is_some());
            // The source has been invalidated; the sink and the source above are left.
            let left = if fail == Some(2) { 1 } else { 2 };
            assert_eq!(control.exposed(), if dead { 0 } else { left });
            let mut trace = control.trace();
            trace.truncate(6);
            (trace, errors, end)
        };
        let (trace, errors, end) = run(None);
        assert_eq!((trace.len(), errors.len(), end.is_none()), (6, 0, true));
        for n in 0..6 {
            let (broken, errors, end) = run(Some(n));
            assert_eq!(broken[..n], trace[..n], "all is well before operation {n}");
            assert!(matches!(&broken[n], Event::Failed(text) if text.ends_with(&format!("number {n}"))));
            assert!(!errors.is_empty() && errors.iter().all(|e| e.text() == format!("number {n}")));
            // A failed exposure does not end the device.
            assert_eq!(end.is_some(), ![1, 2].contains(&n), "operation {n}");
        }
    }

    #[test]
    fn held_completions_pass_on_command_and_others_overtake_them() {
        let (mut pair, control) = watched();
        pair.receives(0, 2);
        let from = pair.ends[1].expose_source(region(&[5; 16])).unwrap();
        control.hold(Held::Reads);
        (1..=3).for_each(|id| read(&mut pair, id, from));
        assert!(poll(&mut pair, 1).is_none());
        pair.send(1, b"later");
        assert_eq!(pair.message(0).0, b"later");
        assert!(poll(&mut pair, 0).is_none());
        control.release(Held::Reads, 1);
        assert!(matches!(poll(&mut pair, 0), Some(Completion::Read { id: WorkId(1) })));
        assert!(poll(&mut pair, 0).is_none());
        control.hold(Held::Receives);
        pair.send(1, b"last");
        drop(std::mem::replace(&mut pair.ends[1], Box::new(super::pair(LIMITS).0)));
        assert!(poll(&mut pair, 0).is_none());
        control.release_all(Held::Reads);
        control.release_all(Held::Receives);
        assert!(matches!(poll(&mut pair, 0), Some(Completion::Read { id: WorkId(2) })));
        assert!(matches!(poll(&mut pair, 0), Some(Completion::Read { id: WorkId(3) })));
        assert!(matches!(poll(&mut pair, 0), Some(Completion::Received { len: 4, .. })));
        assert_eq!(pair.ends[0].poll().unwrap_err().kind(), Kind::ConnectionLost);
    }

    #[test]
    fn messages_are_lost_doubled_and_changed() {
        let (mut pair, control) = watched();
        control.damage(0, Damage::Drop);
        control.damage(1, Damage::Duplicate);
        control.damage(3, Damage::Change(Box::new(|bytes| bytes.truncate(2))));
        pair.receives(0, 4);
        for text in ["lost", "twice", "plain", "changed"] {
            pair.send(1, text.as_bytes());
        }
        assert_eq!(pair.message(0).0, b"twice");
        assert_eq!(pair.message(0).0, b"plain");
        assert_eq!(pair.message(0).0, b"ch");
        assert!(poll(&mut pair, 0).is_none() && control.receives() == 1);
        pair.receives(0, 1);
        assert_eq!(pair.message(0).0, b"twice");
        pair.send(1, b"end");
        assert_eq!(pair.message(0).0, b"end");
        assert_eq!(control.receives(), 0);
    }

    #[test]
    fn a_message_that_is_held_back_keeps_its_receive_when_the_others_are_withdrawn() {
        let (mut pair, control) = watched();
        pair.receives(0, 3);
        control.hold(Held::Receives);
        pair.send(1, b"held");
        assert!(poll(&mut pair, 0).is_none());
        assert_eq!((pair.ends[0].withdraw(), control.receives()), (2, 1));
        assert_eq!(control.trace().last(), Some(&Event::Withdraw(2)));
        control.release_all(Held::Receives);
        assert_eq!((pair.message(0).0, control.receives()), (b"held".to_vec(), 0));
    }

    #[test]
    fn limits_shrink_and_never_grow() {
        let (mut pair, control) = watched();
        let less = Limits { read_depth: 1, max_segment: 50, remote_invalidation: false, receives: u32::MAX };
        control.shrink(less);
        control.shrink(LIMITS);
        assert_eq!(pair.ends[0].limits(), less);
        assert!(pair.ends[0].expose_sink(sink(50)).is_ok());
        assert!(
            pair.ends[0].expose_sink(sink(51)).is_err()
                && pair.ends[0].expose_source(region(&[0; 51])).is_err()
        );
    }

    #[test]
    fn a_peer_is_asked_for_no_more_reads_than_it_serves() {
        let (mut pair, control) = watched();
        let from = pair.ends[1].expose_source(region(&[5; 16])).unwrap();
        (0..6).for_each(|id| read(&mut pair, id, from));
        pair.send(0, b"passes");
        pair.receives(1, 1);
        assert!(!pair.ends[0].flush().unwrap() && control.reads() == 6);
        // Four are served before the Send, and their completions make room for the other two.
        assert!(matches!(poll(&mut pair, 1), Some(Completion::Received { len: 6, .. })));
        for id in 0..4 {
            assert!(matches!(poll(&mut pair, 0), Some(Completion::Read { id: WorkId(n) }) if n == id));
        }
        assert!(poll(&mut pair, 0).is_none() && control.reads() == 2);
        assert!(poll(&mut pair, 1).is_none() && pair.ends[0].flush().unwrap());
        assert!(matches!(poll(&mut pair, 0), Some(Completion::Read { id: WorkId(4) })));
        assert!(matches!(poll(&mut pair, 0), Some(Completion::Read { id: WorkId(5) })));
        assert_eq!(control.reads(), 0);
    }

    #[test]
    #[should_panic(expected = "of a peer that serves none")]
    fn a_read_of_a_peer_that_serves_none_is_caught() {
        let (mut pair, control) = watched();
        control.shrink(Limits { read_depth: 0, ..LIMITS });
        let from = pair.ends[1].expose_source(region(&[5; 16])).unwrap();
        read(&mut pair, 1, from);
    }

    #[test]
    fn calls_within_the_grant_are_fine_whatever_the_order_of_the_replies() {
        let (mut pair, _control) = watched();
        pair.receives(0, 8);
        pair.receives(1, 8);
        let step = |pair: &mut Ends, from: usize, xid, credits| {
            pair.send(from, &message(xid, credits));
            assert_eq!(pair.message(1 - from).0, message(xid, credits));
        };
        step(&mut pair, 0, 1, 8);
        step(&mut pair, 1, 1, 3);
        (2..=4).for_each(|xid| step(&mut pair, 0, xid, 8));
        step(&mut pair, 1, 3, 1);
        step(&mut pair, 1, 2, 2);
        step(&mut pair, 0, 5, 8);
        // An error in answer to a message that was not understood is not a call.
        let mut error = message(0x2000, 8);
        error[15] = 4;
        pair.send(0, &error);
        assert_eq!(pair.message(1).0, error);
        // A call of the peer has its own credits.
        step(&mut pair, 1, 0x1000, 3);
        step(&mut pair, 0, 0x1000, 2);
    }

    #[test]
    #[should_panic(expected = "2 calls with 1 credits")]
    fn a_second_call_before_the_first_reply_is_caught() {
        let (mut pair, _control) = watched();
        pair.receives(0, 8);
        pair.send(0, &message(1, 8));
        pair.send(0, &message(2, 8));
    }

    #[test]
    #[should_panic(expected = "3 calls with 2 credits")]
    fn a_call_beyond_the_last_grant_is_caught() {
        let (mut pair, _control) = watched();
        pair.receives(0, 8);
        pair.send(0, &message(1, 8));
        pair.send(1, &message(1, 2));
        assert_eq!(pair.message(0).0, message(1, 2));
        (2..=4).for_each(|xid| pair.send(0, &message(xid, 8)));
    }

    #[test]
    #[should_panic(expected = "1 Receives are needed, and 0 are posted")]
    fn a_call_without_a_receive_for_its_reply_is_caught() {
        let (mut pair, _control) = watched();
        pair.send(0, &message(1, 8));
    }

    #[test]
    #[should_panic(expected = "3 Receives are needed, and 2 are posted")]
    fn a_grant_without_its_receives_is_caught() {
        let (mut pair, _control) = watched();
        pair.receives(0, 3);
        pair.send(1, &message(1, 8));
        assert_eq!(pair.message(0).0, message(1, 8));
        pair.send(0, &message(1, 3));
    }

    #[test]
    fn unanswered_calls_have_used_their_receives() {
        let (mut pair, control) = watched();
        pair.receives(0, 4);
        for xid in [1, 2] {
            pair.send(1, &message(xid, 8));
            assert_eq!(pair.message(0).0, message(xid, 8));
        }
        pair.send(0, &message(2, 3));
        pair.receives(0, 1);
        pair.send(0, &message(1, 3));
        assert_eq!(control.receives(), 3);
    }

    #[test]
    #[should_panic(expected = "a message without credits")]
    fn a_message_without_credits_is_caught() {
        let (mut pair, _control) = watched();
        pair.receives(0, 3);
        pair.send(0, &message(1, 0));
    }
}
