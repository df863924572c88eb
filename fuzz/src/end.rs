//! One end of a connection: an engine, a device that is a table, and what must hold of it at any time, whatever its peer does.
//!
//! - Only the ends of calls follow a Close, and each call ends once.
//! - What is sent can be read, is no longer than the peer takes, and is never more calls than the peer has granted.
//! - Only memory that the peer has named in a message is read, written or invalidated.
//! - What a call has exposed is no longer exposed when it ends.
//! - Receives and the memory of pulled calls are bounded.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};

use rpcrdma::binding::Registry;
use rpcrdma::fuzz::{
    Buf, Connection, Error, Expect, Kind, Memory, Output, Region, Registrar, Request, Role, Settings, Sink,
};
use rpcrdma::provider::{WorkId, WorkRequest};
use rpcrdma::wire::header::{self, Body, Direction, Versions};
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::{Handle, Segment, Xid};

use crate::input::Input;

/// A program with a binding of its own: data in arguments and results.
pub const PROGRAM: u32 = 0x2000_4653;

/// Most Receives of a device.
const RECEIVES: u32 = 96;

/// What both ends of a pair, and all inputs, share: making it takes longer than most inputs do.
fn common() -> (Arc<Memory>, Arc<Registry>) {
    static COMMON: OnceLock<(Arc<Memory>, Arc<Registry>)> = OnceLock::new();
    let made = COMMON.get_or_init(|| {
        let registry = Registry::built_in();
        let text = "0x20004653 1 1 arguments=unsigned,data results=data<65536>\n";
        assert_eq!(registry.add_text("text", text), Vec::<String>::new());
        (Memory::new(65536, 1 << 20, 1 << 22), Arc::new(registry))
    });
    made.clone()
}

/// Settings as a program may have them.
pub fn settings(input: &mut Input<'_>) -> Settings {
    let flags = input.byte();
    let inline = input.one_of(&[1024, 4096, 2048, 65536]);
    Settings {
        credits: input.one_of(&[1, 2, 4, 16]),
        receives: RECEIVES,
        reverse_chunks: flags & 1 != 0,
        inline,
        versions: [Versions::ONE, Versions::BOTH, Versions::TWO, Versions::ONE][usize::from(flags >> 1 & 3)],
        receive: inline.max(4096),
        receive_max: 65536,
        first_xid: 0x7000_0000,
        max_call: 1 << 17,
        many_chunks: flags & 8 != 0,
        remote_invalidation: flags & 16 != 0,
    }
}

pub fn private_data(settings: &Settings) -> PrivateData {
    let Settings { remote_invalidation, inline, .. } = *settings;
    PrivateData { remote_invalidation, send_size: inline, receive_size: inline }
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

pub fn bytes(regions: &[Region]) -> Vec<u8> {
    regions.iter().flat_map(|region| region.iter().copied()).collect()
}

/// Memory that the peer has a handle of.
pub enum Exposed {
    Source(Region),
    Sink(Sink),
}

impl Exposed {
    fn len(&self) -> usize {
        match self {
            Exposed::Source(region) => region.len(),
            Exposed::Sink(sink) => sink.len(),
        }
    }
}

/// The device's own state.
pub struct Device {
    next: u32,
    pub exposed: BTreeMap<u32, Exposed>,
    /// Bytes of each Receive.
    pub receives: VecDeque<usize>,
    max_segment: usize,
    /// Exposures that succeed before one fails.
    pub failing: Option<u32>,
    pub read: BTreeSet<u32>,
}

impl Device {
    fn expose(&mut self, exposed: Exposed) -> Result<Segment, Error> {
        let length = exposed.len();
        assert!(length > 0 && length <= self.max_segment, "a segment of {length} bytes");
        if let Some(left) = &mut self.failing {
            if *left == 0 {
                self.failing = None;
                return Err(Error::new(Kind::Os(libc::ENOMEM), "no handle left"));
            }
            *left -= 1;
        }
        self.next = self.next.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        assert!(self.exposed.insert(self.next, exposed).is_none());
        Ok(Segment { handle: Handle(self.next), length: length as u32, offset: offset_of(self.next) })
    }

    /// The memory that a peer names, if it may use it.
    pub fn access(&self, segment: Segment) -> Option<(&Exposed, usize)> {
        let exposed = self.exposed.get(&segment.handle.0)?;
        let at = usize::try_from(segment.offset.checked_sub(offset_of(segment.handle.0))?).ok()?;
        (at.checked_add(segment.length as usize)? <= exposed.len()).then_some((exposed, at))
    }
}

/// Offsets are opaque: not zero, and different for every handle.
pub fn offset_of(handle: u32) -> u64 {
    u64::from(handle) << 20 | 0x7
}

impl Registrar for Device {
    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        self.expose(Exposed::Source(region))
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        self.expose(Exposed::Sink(sink))
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        self.exposed.remove(&handle.0);
        Ok(())
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        if let Some(Exposed::Sink(sink)) = self.exposed.get_mut(&handle.0) {
            *sink = Buf::with_capacity(sink.len()).expect("memory").into_sink(sink.len());
        }
        Ok(())
    }

    fn was_read(&self, handle: Handle) -> Option<bool> {
        Some(self.read.contains(&handle.0))
    }

    fn withdraw(&mut self) -> usize {
        let kept = self.receives.len() / 2;
        let taken = self.receives.len() - kept;
        self.receives.truncate(kept);
        taken
    }

    fn max_segment(&self) -> usize {
        self.max_segment
    }

    fn read_depth(&self) -> u32 {
        16
    }
}

/// A call of this end's.
struct Call {
    one_way: bool,
    abandoned: bool,
    ended: bool,
    handles: Vec<Handle>,
}

pub struct End {
    pub engine: Connection,
    pub device: Device,
    pub settings: Settings,
    /// Work that the device has not done yet.
    pub sends: VecDeque<WorkRequest>,
    pub reads: VecDeque<(WorkId, Sink, usize, Segment)>,
    pub handed: Vec<Request>,
    /// The ends of calls, to be looked at by whoever made them.
    pub outcomes: Vec<(u32, Result<Vec<u8>, Error>)>,
    pub closing: Option<Error>,
    calls: BTreeMap<u32, Call>,
    /// Segments that the peer has named.
    named: BTreeMap<u32, Vec<Segment>>,
    in_flight: usize,
}

impl End {
    pub fn new(role: Role, settings: Settings, peer: PrivateData, max_segment: usize) -> End {
        let (memory, bindings) = common();
        let memory = memory.of_peer(None).connection(None, None);
        let seed = if role == Role::Client { 1 } else { 2 };
        let mut end = End {
            engine: Connection::new(role, settings, peer, memory, bindings),
            device: Device {
                next: seed,
                exposed: BTreeMap::new(),
                receives: VecDeque::new(),
                max_segment,
                failing: None,
                read: BTreeSet::new(),
            },
            settings,
            sends: VecDeque::new(),
            reads: VecDeque::new(),
            handed: Vec::new(),
            outcomes: Vec::new(),
            closing: None,
            calls: BTreeMap::new(),
            named: BTreeMap::new(),
            in_flight: 0,
        };
        end.drain();
        end
    }

    pub fn is_open(&self) -> bool {
        self.closing.is_none() && self.engine.closed().is_none()
    }

    /// The calls that were made and have not ended.
    pub fn awaited(&self) -> Vec<u32> {
        let awaited = |(xid, call): (&u32, &Call)| (!call.ended && !call.abandoned).then_some(*xid);
        self.calls.iter().filter_map(awaited).collect()
    }

    pub fn call(&mut self, xid: u32, message: &[u8], expect: Expect) {
        let one_way = matches!(expect, Expect::Nothing);
        let again = self.calls.contains_key(&xid);
        let call = Call { one_way, abandoned: false, ended: false, handles: Vec::new() };
        let before = if again { None } else { self.calls.insert(xid, call) };
        assert!(before.is_none());
        let mut buf = Buf::with_capacity(message.len()).expect("memory");
        buf.extend(message).expect("memory");
        if let Err(error) = self.engine.call(Xid(xid), buf, expect, &mut self.device) {
            assert!(again || !self.is_open(), "{error}");
            if !again {
                self.calls.remove(&xid);
            }
        }
        self.drain();
    }

    pub fn abandon(&mut self, xid: u32) {
        if let Some(call) = self.calls.get_mut(&xid) {
            call.abandoned |= !call.ended;
            self.engine.abandon(Xid(xid), &mut self.device);
            self.drain();
        }
    }

    /// Takes the oldest request.
    pub fn take(&mut self) -> bool {
        let Some(request) = self.engine.poll_request() else { return false };
        let length: usize = request.message.iter().map(|piece| piece.len()).sum();
        assert!(length <= self.settings.max_call + self.settings.receive_max);
        assert_eq!(bytes(&request.message).first_chunk().copied(), Some(request.xid.0.to_be_bytes()));
        self.handed.push(request);
        self.drain();
        true
    }

    pub fn reply(&mut self, at: usize, message: &[u8]) {
        let request = self.handed.remove(at);
        let mut buf = Buf::with_capacity(message.len()).expect("memory");
        buf.extend(message).expect("memory");
        // If the reply fits nowhere, the peer is told.
        let _ = self.engine.reply(request.id, buf);
        self.drain();
    }

    pub fn discard(&mut self, at: usize) {
        let request = self.handed.remove(at);
        self.engine.discard(request.id);
        self.drain();
    }

    /// Receives a Send of the peer. False where a device ends the connection: there is no Receive, or it is too short.
    pub fn receive(&mut self, message: &[u8], invalidated: Option<Handle>) -> bool {
        let Some(room) = self.device.receives.pop_front() else { return false };
        if message.len() > room || invalidated.is_some_and(|h| self.device.exposed.remove(&h.0).is_none()) {
            return false;
        }
        if let Ok(header) = header::decode(message, Versions::BOTH)
            && let Body::Msg { chunks, .. } | Body::Nomsg { chunks } = header.body
        {
            let reads = chunks.reads().map(|read| read.target);
            let others =
                chunks.writes().chain(chunks.reply()).flat_map(|chunk| chunk.iter().collect::<Vec<_>>());
            for segment in reads.chain(others) {
                self.named.entry(segment.handle.0).or_default().push(segment);
            }
        }
        let mut buf = Buf::with_capacity(room).expect("memory");
        buf.extend(message).expect("memory");
        self.engine.handle_receive(buf, invalidated, &mut self.device);
        self.drain();
        true
    }

    /// An RDMA Read is done.
    pub fn read_done(&mut self, id: WorkId) {
        self.engine.handle_read(id);
        self.drain();
    }

    /// The connection is gone.
    pub fn close(&mut self, error: &Error) {
        self.sends.clear();
        self.reads.clear();
        self.closing.get_or_insert_with(|| error.clone());
        self.engine.handle_closed(error.clone());
        if self.engine.must_fall_back() {
            // Calls that wait are taken for another connection; then this one is at its end.
            for (xid, ..) in self.engine.take_waiting() {
                self.calls.get_mut(&xid.0).expect("a call that was made").ended = true;
            }
            self.engine.handle_closed(error.clone());
        }
        // What a dead queue pair does.
        self.device.exposed.clear();
        self.drain();
        assert!(self.awaited().is_empty(), "calls are left behind the end: {:?}", self.awaited());
        assert!(self.engine.closed().is_some() && self.engine.is_idle());
    }

    pub fn drain(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Done { xid, outcome } => self.done(xid.0, outcome.map(|reply| reply.pieces)),
                other => {
                    assert!(self.closing.is_none(), "{other:?} behind the close");
                    match other {
                        Output::Receive(bytes) => {
                            assert!((1024..=65536).contains(&bytes), "a Receive of {bytes} bytes");
                            self.device.receives.push_back(bytes);
                        }
                        Output::Post(work) => self.post(work),
                        Output::Close(error) => {
                            // As the driver does, at once.
                            self.closing = Some(error.clone());
                            self.device.exposed.clear();
                            self.engine.handle_closed(error);
                        }
                        Output::Done { .. } => unreachable!("above"),
                    }
                }
            }
        }
        assert!(self.device.receives.len() <= RECEIVES as usize, "more Receives than the device has");
        // No more calls under way than there were before, or than are granted.
        let in_flight = self.calls.keys().filter(|xid| self.engine.transmitted(Xid(**xid))).count();
        let granted = self.engine.granted().min(self.engine.asked()).max(1) as usize;
        assert!(in_flight <= self.in_flight.max(granted), "{in_flight} calls under way of {granted}");
        self.in_flight = in_flight;
    }

    fn post(&mut self, work: WorkRequest) {
        match work {
            WorkRequest::Send { gather, invalidate } => {
                self.inspect(&bytes(&gather));
                if let Some(handle) = invalidate {
                    assert!(self.named.contains_key(&handle.0), "{handle:?} was named by nobody");
                }
                self.sends.push_back(WorkRequest::Send { gather, invalidate });
            }
            WorkRequest::Write { gather, to } => {
                assert_eq!(gather.iter().map(|region| region.len()).sum::<usize>(), to.length as usize);
                self.allowed(to);
                self.sends.push_back(WorkRequest::Write { gather, to });
            }
            WorkRequest::Read { id, sink, at, from } => {
                assert!(at + from.length as usize <= sink.len() && from.length > 0);
                assert!(sink.len() <= self.settings.max_call + 4096, "a pull of {} bytes", sink.len());
                self.allowed(from);
                self.reads.push_back((id, sink, at, from));
            }
        }
    }

    /// Checks that a segment of the peer's contains what is read or written.
    fn allowed(&self, segment: Segment) {
        assert!(segment.length as usize <= self.device.max_segment);
        let within = |named: &Segment| {
            let at = segment.offset.wrapping_sub(named.offset);
            at <= u64::from(named.length) && at + u64::from(segment.length) <= u64::from(named.length)
        };
        let named = self.named.get(&segment.handle.0).is_some_and(|all| all.iter().any(within));
        assert!(named, "{segment} was named by nobody");
    }

    fn inspect(&mut self, message: &[u8]) {
        let header = header::decode(message, Versions::BOTH).expect("what we send can be read");
        // A call is answered in its own version. Before a version is agreed on, the first message has to suit every peer.
        let (send, _) = self.engine.thresholds();
        let reply = header.direction != Some(Direction::Call);
        let other = reply && self.engine.version() != Some(header.version);
        let most = if other { 65536 } else { send };
        assert!(message.len() <= most, "a Send of {} bytes over {most}", message.len());
        assert!(!matches!(header.body, Body::Msgp | Body::Done));
        if let Body::Msg { payload, .. } = header.body {
            assert_eq!(payload.first_chunk().copied(), Some(header.xid.0.to_be_bytes()));
        }
        if let Body::Msg { chunks, .. } | Body::Nomsg { chunks } = header.body
            && let Some(call) = self.calls.get_mut(&header.xid.0)
            && call.handles.is_empty()
        {
            // A reply to a call of the peer's with the same XID has handles of the peer's.
            let own = |segment: &Segment| self.device.exposed.contains_key(&segment.handle.0);
            let reads = chunks.reads().map(|read| read.target);
            let others =
                chunks.writes().chain(chunks.reply()).flat_map(|chunk| chunk.iter().collect::<Vec<_>>());
            call.handles = reads.chain(others).filter(own).map(|segment| segment.handle).collect();
        }
    }

    fn done(&mut self, xid: u32, outcome: Result<rpcrdma::fuzz::Regions, Error>) {
        let call = self.calls.get_mut(&xid).expect("the end of a call that nobody made");
        assert!(!call.ended && !call.abandoned, "call {xid} ends twice, or though nobody waits for it");
        call.ended = true;
        if !call.one_way && self.closing.is_none() {
            let left = call.handles.iter().any(|handle| self.device.exposed.contains_key(&handle.0));
            assert!(!left, "call {xid} is exposed after its end");
        }
        self.outcomes.push((xid, outcome.map(|regions| bytes(&regions))));
    }
}
