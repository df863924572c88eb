//! A queue pair on its device: what is sent from where it lies and what is copied first, when a completion is asked for, and
//! the registrations that the peer may use.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use once_cell::race::OnceBox;
use rustc_hash::FxHashMap;
use smallvec::smallvec;

use crate::error::{Error, Kind};
use crate::log_info;
use crate::memory::{Areas, Buf, Region, Regions, Sink, Slabs};
use crate::provider::{Completion, Limits, Options, WorkId, WorkRequest};
use crate::stats::{self, Counter};
use crate::wait::{self, Readables};
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Segment};

use super::cm::{Channel, Event, Id, Terms};
use super::locked::{Locked, count, least};
use super::queues::{Access, Domain, Done, Hold, Operation, Piece, Queues, Registration, Window, Work};
use super::{Failed, LEND_MIN, READS, lost};

/// Longest RDMA Write that is registered at a time: a long reply need not be pinned as a whole.
const WRITE_MAX: usize = 1 << 20;
/// Most requests that such a Write becomes: every send queue has room for this many. If it has more pieces than these
/// requests can name, a copy costs less than registering the pieces.
const WRITES_MAX: usize = 8;
/// Longest segment that is exposed.
const SEGMENT_MAX: u64 = 1 << 30;
/// A completion is asked for after this many requests without one.
const UNSIGNALLED: u32 = 7;
/// How long the device may keep the program's memory after the reply to the peer is out: without the peer taking anything,
/// and in all.
const RELEASE_IDLE: Duration = Duration::from_millis(100);
const RELEASE_WAIT: Duration = Duration::from_secs(1);
/// After a peer has made the program wait like that, results are copied for this long: a stalled peer holds up the program's
/// loop only once.
const RELEASE_COPIES: Duration = Duration::from_secs(10);
/// How long the device may take to invalidate the key of a window; after that the window is freed, which ends its key at
/// once.
const INVALIDATE: Duration = Duration::from_millis(100);
/// How long a connection that the program closes may take to send what is queued.
pub(super) const DRAIN: Duration = Duration::from_millis(200);
/// The target of a Write of zero bytes: nothing can be written there.
const NOWHERE: Segment = Segment { handle: Handle(0), length: 0, offset: 0 };

/// Until when memory that the program lends is copied, in milliseconds of [`now_ms`]: some peer has just stalled.
pub(super) static COPIES_UNTIL: AtomicU64 = AtomicU64::new(0);

fn now_ms() -> u64 {
    static START: OnceBox<Instant> = OnceBox::new();
    START.get_or_init(|| Box::new(Instant::now())).elapsed().as_millis() as u64
}

/// Memory that the peer may use by a key.
struct Exposed {
    /// `None` for a registration's own key.
    window: Option<Window>,
    memory: Memory,
}

enum Memory {
    Own(Registration),
    /// A part of one of [`Ready::blocks`], to be written.
    Sink(#[expect(dead_code, reason = "held")] Sink),
    /// The same, to be read.
    Source(#[expect(dead_code, reason = "held")] Region),
}

enum Stage {
    /// Nobody has been told of it.
    Prepared,
    /// The peer has been asked.
    Connecting,
    /// The peer has been answered.
    Accepting,
    Open,
}

/// A queue pair that can be used; the peer can use it too as soon as it is there.
pub struct Ready {
    stage: Stage,
    options: Options,
    channel: Arc<Channel>,
    watch: Arc<Readables>,
    domain: Arc<Domain>,
    queues: Queues,
    slabs: Arc<Slabs>,
    locked: Locked,
    exposed: FxHashMap<u32, Exposed>,
    /// For Reply chunks, and for what the peer reads of short ones.
    areas: Option<Arc<Areas>>,
    sources: Option<Arc<Areas>>,
    /// The blocks of both that are registered.
    blocks: Vec<Registration>,
    /// Requests that make the keys of windows valid; they are posted before anything that names those keys.
    binds: VecDeque<Work>,
    /// Windows that are bound to nothing.
    windows: Vec<Window>,
    /// Requests that wait for room on the send queue or for a slab.
    pending: VecDeque<WorkRequest>,
    /// Requests since the last one that was signalled.
    unsignalled: u32,
    /// When requests were last posted.
    pub(super) posted: Option<Instant>,
    /// Receives that were posted before they were asked for.
    early: u32,
    receives: u32,
    /// Slabs whose message was handed up as a copy: the next Receive uses one of them.
    spare: Vec<Buf>,
    /// Bytes of RDMA Reads under way.
    reads: FxHashMap<WorkId, u32>,
    terms: Terms,
    /// The latest request whose completion shows, or has shown, that the peer is there.
    probe: Option<u64>,
    moved: u64,
    pulled: u64,
    /// The peer has gone: what it sent before that is still received.
    ending: Option<Error>,
    looked_at: LookedAt,
}

/// When the caller looks for something to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LookedAt {
    /// When the descriptor becomes readable.
    Told,
    /// Without a pause; events are left unread.
    Always,
    /// Now and then; events that were left unread are still there.
    Sometime,
}

impl Ready {
    /// Makes the queue pair and posts the first Receives, before the peer can send.
    ///
    /// # Errors
    /// The device refuses, or lacks what the connection needs. Then nothing is left of the connection except what the device
    /// keeps.
    pub fn new(
        id: Arc<Id>,
        channel: Arc<Channel>,
        watch: Arc<Readables>,
        locked: Locked,
        terms: Terms,
        options: Options,
        areas: Option<Arc<Areas>>,
    ) -> Result<Ready, Error> {
        let (few, most) = (count(&options, least(&options)), count(&options, options.credits));
        let slabs = Slabs::with_room(options.slab, few, most)?;
        let domain = Domain::new(id)?;
        let receives = options.credits + options.margin;
        let queues = match Queues::new(domain.clone(), slabs.clone(), few, receives) {
            Ok(queues) => queues,
            Err(error) => {
                locked.end(domain.end());
                return Err(error);
            }
        };
        let mut ready = Ready {
            stage: Stage::Prepared,
            receives: least(&options) + options.margin,
            // For what a peer may send before the layer above posts its own Receives: one call, and what needs no credit. If
            // there were more of them than that layer posts at first, Receives of another length would be posted later than
            // it thinks.
            early: options.margin,
            options,
            channel,
            watch,
            domain,
            queues,
            slabs,
            locked,
            exposed: FxHashMap::default(),
            areas,
            sources: None,
            blocks: Vec::new(),
            binds: VecDeque::new(),
            windows: Vec::new(),
            pending: VecDeque::new(),
            unsignalled: 0,
            posted: None,
            spare: Vec::new(),
            reads: FxHashMap::default(),
            terms,
            probe: None,
            moved: 0,
            pulled: 0,
            ending: None,
            looked_at: LookedAt::Told,
        };
        match ready.equip() {
            Ok(()) => Ok(ready),
            Err(error) => Err(ready.end(error).error),
        }
    }

    /// Sets up what the peer needs to be able to send.
    fn equip(&mut self) -> Result<(), Error> {
        for _ in 0..self.early {
            let slab = self.slabs.take().ok_or_else(|| lost("no slab for a Receive"))?;
            self.queues.post_receive(slab.into_sink(self.options.receive))?;
        }
        let capabilities = self.domain.capabilities();
        if let Some(areas) = &self.areas {
            if let Some(block) = areas.first() {
                self.blocks.push(Registration::area(&self.domain, block, self.access(), true)?);
            }
            if !capabilities.windows {
                areas.stay_open();
            }
            // Replies have priority: the other half is left to them.
            self.sources = Some(Areas::lazy(LEND_MIN, areas.most() / 2));
        }
        self.watch.add(self.queues.fd())?;
        self.terms.our_reads = self.terms.our_reads.min(READS).min(capabilities.our_reads);
        self.terms.their_reads = self.terms.their_reads.min(READS).min(capabilities.their_reads);
        Ok(())
    }

    /// The peer is there: it gets as many credits as memory allows.
    pub fn extend(&mut self) {
        self.locked.established();
        let credits = self.locked.grow(&self.options);
        let (few, all) = (count(&self.options, least(&self.options)), count(&self.options, credits));
        if all <= few {
            return;
        }
        match self.queues.add(self.slabs.clone(), few, all) {
            Ok(()) => {
                self.slabs.grow(all);
                self.receives = credits + self.options.margin;
            }
            // What it has will do.
            Err(error) => {
                log_info!("verbs: a connection has few credits: {error}");
                self.locked.shrink(&self.options);
            }
        }
    }

    /// Active side: asks the peer to connect.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn connect(&mut self) -> Result<(), Error> {
        self.stage = Stage::Connecting;
        let Terms { our_reads, their_reads, .. } = self.terms;
        self.domain.id().connect(&self.private_data(), their_reads, our_reads)
    }

    /// Passive side: answers the peer.
    ///
    /// # Errors
    /// The kernel refuses, or the peer has gone.
    pub fn accept(&mut self) -> Result<(), Error> {
        self.stage = Stage::Accepting;
        let Terms { our_reads, their_reads, .. } = self.terms;
        self.domain.id().accept(&self.private_data(), their_reads, our_reads)
    }

    /// The peer is there; on the active side, with these terms.
    pub fn established(&mut self, terms: Terms) {
        match self.stage {
            Stage::Connecting => {
                self.terms.our_reads = self.terms.our_reads.min(terms.our_reads);
                self.terms.private_data = terms.private_data;
            }
            Stage::Accepting => self.extend(),
            Stage::Prepared | Stage::Open => return,
        }
        self.stage = Stage::Open;
    }

    /// Whether the peer is there.
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    fn private_data(&self) -> [u8; PrivateData::LEN] {
        PrivateData {
            remote_invalidation: self.has_windows() && self.options.remote_invalidation,
            send_size: self.options.inline,
            receive_size: self.options.inline,
        }
        .encode()
    }

    /// Tells the peer that this is the end.
    pub fn disconnect(&self) {
        self.domain.id().disconnect();
    }

    /// Ends the connection. Every handle is dead and no memory is in use when this returns.
    pub fn end(self, error: Error) -> Failed {
        let failed = Failed {
            error,
            taken: self.taken(),
            unsent: self.unsent(),
            moved: self.moved,
            pulled: self.pulled,
        };
        let Ready {
            exposed,
            windows,
            blocks,
            areas,
            sources,
            queues,
            binds,
            pending,
            spare,
            domain,
            locked,
            ..
        } = self;
        // With rxe, a window that is bound keeps the queue pair alive for a while.
        drop((exposed, windows, blocks));
        for areas in areas.iter().chain(&sources) {
            areas.end();
        }
        drop((queues, binds, pending, spare));
        // Removal of a device waits for the last object on it, and the next connection may need the memory at once. What the
        // device keeps stays locked.
        locked.end(domain.end());
        failed
    }

    pub fn limits(&self) -> Limits {
        Limits {
            read_depth: u32::from(self.terms.our_reads),
            max_segment: self.domain.capabilities().registration.min(SEGMENT_MAX) as u32,
            // A key of ibv_reg_mr cannot be invalidated by the peer, a window's can.
            remote_invalidation: self.has_windows(),
            receives: self.receives,
        }
    }

    /// The device, and the Reads that may be under way.
    pub fn describe(&self) -> String {
        let Terms { our_reads, their_reads, .. } = self.terms;
        format!(
            "verbs device {}, {our_reads} Reads out and {their_reads} in",
            self.domain.capabilities().name
        )
    }

    /// The private data of the peer's connection request or reply.
    pub fn peers_private_data(&self) -> &[u8] {
        &self.terms.private_data
    }

    pub fn slabs(&self) -> &Arc<Slabs> {
        &self.slabs
    }

    pub fn areas(&self) -> Option<&Arc<Areas>> {
        self.areas.as_ref()
    }

    pub fn moved(&self) -> u64 {
        self.moved
    }

    pub fn pulled(&self) -> u64 {
        self.pulled
    }

    pub fn taken(&self) -> u64 {
        self.queues.released()
    }

    pub fn unsent(&self) -> usize {
        let pending = |request: &WorkRequest| match request {
            WorkRequest::Send { gather, .. } | WorkRequest::Write { gather, .. } => {
                gather.iter().map(|piece| piece.len()).sum()
            }
            WorkRequest::Read { .. } => 0,
        };
        self.pending.iter().map(pending).sum::<usize>() + self.queues.held()
    }

    // ---------------------------------------------------------------------------------------------------- sending

    pub fn post(&mut self, mut request: WorkRequest) {
        if now_ms() < COPIES_UNTIL.load(Relaxed)
            && let WorkRequest::Send { gather, .. } | WorkRequest::Write { gather, .. } = &mut request
        {
            for piece in gather.iter_mut().filter(|piece| piece.is_lent()) {
                // If there is no memory for a copy, the piece is sent from where it lies.
                let Ok(copy) = piece.owned() else { continue };
                stats::add(Counter::BytesCopied, copy.len() as u64);
                *piece = copy;
            }
        }
        self.pending.push_back(request);
    }

    pub fn release_lent(&mut self) -> Result<usize, Error> {
        let mut copied = 0;
        for request in &mut self.pending {
            let (WorkRequest::Send { gather, .. } | WorkRequest::Write { gather, .. }) = request else {
                continue;
            };
            for piece in gather.iter_mut().filter(|piece| piece.is_lent()) {
                copied += piece.len();
                *piece = piece.owned()?;
            }
        }
        let began = Instant::now();
        let mut taken = self.taken();
        while self.queues.lent() && began.elapsed() < RELEASE_WAIT {
            self.settle(RELEASE_IDLE, |queues| queues.lent() && queues.released() == taken)?;
            if self.taken() == taken {
                break;
            }
            taken = self.taken();
        }
        if began.elapsed() >= RELEASE_IDLE {
            let until = now_ms() + RELEASE_COPIES.as_millis() as u64;
            COPIES_UNTIL.store(until, Relaxed);
        }
        if self.queues.lent() {
            // So that closing does not wait for it once more.
            self.probe = Some(self.queues.latest());
            return Err(Error::new(Kind::NotSent, "the peer does not take its reply"));
        }
        Ok(copied)
    }

    /// Posts what is pending, as far as there is room, with one doorbell.
    fn start(&mut self) -> Result<(), Error> {
        let room = self.queues.room().min(self.binds.len());
        let mut work: Vec<Work> = self.binds.drain(..room).collect();
        while let Some(request) = self.pending.pop_front() {
            if !self.binds.is_empty() {
                self.pending.push_front(request);
                break;
            }
            let room = self.queues.room().saturating_sub(work.len());
            if room < self.needs(&request) {
                self.pending.push_front(request);
                break;
            }
            // Whether completions that free memory are still to come.
            let others = !work.is_empty() || self.queues.busy();
            match self.prepare(request, others)? {
                Prepared::Work(more) => work.extend(more),
                Prepared::Later(request) => {
                    self.pending.push_front(request);
                    break;
                }
                Prepared::Parts(parts) => {
                    for part in parts.into_iter().rev() {
                        self.pending.push_front(part);
                    }
                }
            }
        }
        let full = !work.is_empty() && work.len() == self.queues.room();
        if full || !(self.pending.is_empty() && self.binds.is_empty()) {
            // Only a completion tells that there is room again, and asking for one takes room as well.
            match work.last_mut() {
                Some(last) => last.signalled = true,
                None if self.queues.awaits() => {}
                None => work.push(Work::nothing()),
            }
        }
        if work.is_empty() {
            return Ok(());
        }
        stats::add(Counter::Doorbells, 1);
        self.posted = Some(Instant::now());
        self.queues.post(work)
    }

    /// Posts what waits: the completions that were found may have made room, and nothing else tells of that.
    fn go_on(&mut self) -> Result<(), Error> {
        if self.pending.is_empty() && self.binds.is_empty() {
            return Ok(());
        }
        self.start()
    }

    /// Posts what there is room for. Returns whether nothing is left pending.
    ///
    /// # Errors
    /// The device refuses.
    pub fn flush(&mut self) -> Result<bool, Error> {
        self.start()?;
        // Completions of what the peer has taken are collected, and more is posted, even if nobody polls for what has come
        // in meanwhile.
        while (!self.pending.is_empty() || self.queues.held() > 0) && self.queues.collect()? {
            self.go_on()?;
        }
        Ok(self.pending.is_empty())
    }

    /// Posts a Write of zero bytes, which an iWARP peer notices.
    pub fn nudge(&mut self) {
        if self.domain.capabilities().iwarp {
            self.post(WorkRequest::Write { gather: Regions::new(), to: NOWHERE });
        }
    }

    fn signal(&mut self, wanted: bool) -> bool {
        let signalled = wanted || self.unsignalled >= UNSIGNALLED;
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
        signalled
    }

    fn prepare(&mut self, request: WorkRequest, others: bool) -> Result<Prepared, Error> {
        match request {
            WorkRequest::Send { gather, invalidate } => {
                let operation = Operation::Send(invalidate);
                let total: usize = gather.iter().map(|piece| piece.len()).sum();
                let queues = &self.queues;
                if total <= queues.inline() && gather.len() <= queues.pieces() {
                    let (pieces, holds) = (Vec::new(), Vec::new());
                    let signalled = self.signal(false);
                    return Ok(Work { operation, pieces, inline: gather, holds, signalled }.into());
                }
                if total > self.slab() {
                    return self.prepare_long_send(gather, invalidate, others);
                }
                match self.slab_work(operation, &gather)? {
                    Some(work) => Ok(work.into()),
                    None if others => Ok(Prepared::Later(WorkRequest::Send { gather, invalidate })),
                    None => Err(lost("no slab is left to send from")),
                }
            }
            WorkRequest::Write { gather, to } => self.prepare_write(gather, to, others),
            WorkRequest::Read { id, sink, at, from } => {
                let domain = &self.domain;
                // By RFC 5040 an iWARP Read names its sink to the peer, by a key that lets the peer write there.
                let access = if domain.capabilities().iwarp { Access::Remote } else { Access::Local };
                let part = sink.part(at, from.length as usize);
                let address = part.address();
                let registration = match Registration::sink(domain, part, access) {
                    Ok(registration) => registration,
                    Err(_) if others => return Ok(Prepared::Later(WorkRequest::Read { id, sink, at, from })),
                    Err(error) => return Err(error),
                };
                stats::add(Counter::Registrations, 1);
                let piece = registration.piece(address, from.length as usize);
                let pieces = vec![piece.ok_or_else(|| lost("a Read outside of its sink"))?];
                self.reads.insert(id, from.length);
                let holds = vec![Hold::Registration(registration)];
                let signalled = self.signal(true);
                let operation = Operation::Read(id, from);
                Ok(Work { operation, pieces, inline: Regions::new(), holds, signalled }.into())
            }
        }
    }

    /// How many requests on the send queue a request may become.
    fn needs(&self, request: &WorkRequest) -> usize {
        match request {
            WorkRequest::Write { gather, to } if self.is_gathered(to) && !self.is_scattered(gather) => {
                gather.len().div_ceil(self.queues.pieces())
            }
            _ => 1,
        }
    }

    /// Whether a Write is sent from where its pieces lie.
    fn is_gathered(&self, to: &Segment) -> bool {
        (self.slab() + 1..=WRITE_MAX).contains(&(to.length as usize))
    }

    /// Whether there are so many pieces that the send queue might never have room for them.
    fn is_scattered(&self, gather: &[Region]) -> bool {
        gather.len() > WRITES_MAX * self.queues.pieces()
    }

    /// A Send longer than a slab, which becomes one request whatever its pieces are.
    fn prepare_long_send(
        &mut self,
        mut gather: Regions,
        invalidate: Option<Handle>,
        others: bool,
    ) -> Result<Prepared, Error> {
        if gather.len() > self.queues.pieces() {
            gather = smallvec![joined(&gather)?];
        }
        let (pieces, holds) = match self.name(&gather) {
            Ok(named) => named,
            Err(_) if others => return Ok(Prepared::Later(WorkRequest::Send { gather, invalidate })),
            // Memory of a program may be of a kind that cannot be registered.
            Err(_) => self.name(&[joined(&gather)?])?,
        };
        let signalled = self.signal(true);
        let operation = Operation::Send(invalidate);
        Ok(Work { operation, pieces, inline: Regions::new(), holds, signalled }.into())
    }

    fn prepare_write(&mut self, mut gather: Regions, to: Segment, others: bool) -> Result<Prepared, Error> {
        let total = to.length as usize;
        let slab = self.slab();
        if total <= slab {
            return match self.slab_work(Operation::Write(to), &gather)? {
                Some(work) => Ok(work.into()),
                None if others => Ok(Prepared::Later(WorkRequest::Write { gather, to })),
                None => Err(lost("no slab is left to send from")),
            };
        }
        if total > WRITE_MAX {
            return Ok(Prepared::Parts(cut(&gather, to, WRITE_MAX)));
        }
        if self.is_scattered(&gather) {
            gather = smallvec![joined(&gather)?];
        }
        let most = self.queues.pieces();
        let mut work = Vec::new();
        let mut rest = to;
        for group in gather.chunks(most) {
            let (pieces, holds) = match self.name(group) {
                Ok(named) => named,
                Err(_) if others => return Ok(Prepared::Later(WorkRequest::Write { gather, to })),
                // Memory that cannot be pinned goes out through slabs.
                Err(_) => return Ok(Prepared::Parts(cut(&gather, to, slab))),
            };
            let length = group.iter().map(|piece| piece.len() as u32).sum();
            let operation = Operation::Write(Segment { length, ..rest });
            rest = Segment { offset: rest.offset + u64::from(length), ..rest };
            let signalled = self.signal(true);
            work.push(Work { operation, pieces, inline: Regions::new(), holds, signalled });
        }
        Ok(Prepared::Work(work))
    }

    /// Names memory for a request: what lies in the slabs by their registration, anything else by a registration of its own.
    fn name(&mut self, gather: &[Region]) -> Result<(Vec<Piece>, Vec<Hold>), Error> {
        let (mut pieces, mut holds) = (Vec::new(), Vec::new());
        for source in gather.iter().filter(|source| !source.is_empty()) {
            let (address, len) = (source.as_ptr().addr(), source.len());
            if let Some(piece) = self.queues.known(address, len) {
                pieces.push(piece);
                holds.push(Hold::Region(source.clone()));
                continue;
            }
            let registration = Registration::source(&self.domain, source.clone(), Access::Local)?;
            stats::add(Counter::Registrations, 1);
            pieces.push(registration.piece(address, len).ok_or_else(|| lost("memory outside of itself"))?);
            holds.push(Hold::Registration(registration));
        }
        Ok((pieces, holds))
    }

    /// Bytes of a slab.
    fn slab(&self) -> usize {
        self.slabs.size()
    }

    /// A request for at most one slab's length of bytes: from where they lie if they are in the slabs, else copied into a
    /// slab. `None` when no slab is free.
    fn slab_work(&mut self, operation: Operation, gather: &[Region]) -> Result<Option<Work>, Error> {
        let queues = &self.queues;
        let known = |piece: &Region| queues.known(piece.as_ptr().addr(), piece.len());
        let pieces: Option<Vec<Piece>> = gather.iter().map(known).collect();
        let (pieces, holds) = match pieces.filter(|pieces| pieces.len() <= queues.pieces()) {
            Some(pieces) => (pieces, gather.iter().cloned().map(Hold::Region).collect()),
            None => {
                let Some(mut copy) = self.slabs.take() else { return Ok(None) };
                for piece in gather {
                    copy.extend(piece)?;
                }
                stats::add(Counter::BytesCopied, copy.len() as u64);
                self.name(&[copy.freeze()])?
            }
        };
        let signalled = self.signal(false);
        Ok(Some(Work { operation, pieces, inline: Regions::new(), holds, signalled }))
    }

    // -------------------------------------------------------------------------------------------------- receiving

    pub fn post_recv(&mut self, sink: Sink) {
        if self.early > 0 {
            self.early -= 1;
            return;
        }
        let sink = match self.spare.pop() {
            Some(slab) if slab.capacity() >= sink.len() => slab.into_sink(sink.len()),
            _ => sink,
        };
        if let Err(error) = self.queues.post_receive(sink) {
            self.ending.get_or_insert(error);
        }
    }

    pub fn advance(&mut self) -> Result<Option<Completion>, Error> {
        loop {
            self.domain.taken_back()?;
            self.start()?;
            match self.queues.poll()? {
                Some(Done::Received { sink, len, invalidated }) => {
                    let ended = invalidated.and_then(|handle| self.exposed.remove(&handle.0));
                    let invalidated = invalidated.filter(|_| ended.is_some());
                    if let Some(Exposed { window, memory }) = ended {
                        stats::add(Counter::Invalidations, 1);
                        // The device may report a key whose Bind is not posted yet. The memory that it would be bound to
                        // goes here, so the Bind goes too.
                        let binds = |work: &Work| {
                            invalidated.is_some_and(|handle| matches!(work.operation, Operation::Bind(bind) if bind.key() == handle.0))
                        };
                        self.binds.retain(|work| !binds(work));
                        self.windows.extend(window);
                        drop(memory);
                        self.domain.taken_back()?;
                    }
                    self.moved += len as u64;
                    return self.received(sink, len, invalidated).map(Some);
                }
                Some(Done::Read(id)) => {
                    let bytes = u64::from(self.reads.remove(&id).unwrap_or(0));
                    self.moved += bytes;
                    self.pulled += bytes;
                    return Ok(Some(Completion::Read { id }));
                }
                None => {}
            }
            if let Some(error) = self.ending.take() {
                return Err(error);
            }
            self.go_on()?;
            if self.looked_at == LookedAt::Always {
                return Ok(None);
            }
            let told = std::mem::replace(&mut self.looked_at, LookedAt::Told) == LookedAt::Told;
            // If the descriptor told of something, this is nearly always the only event.
            if !self.takes_event_of_found() || !told {
                self.look_around()?;
            }
            if self.queues.rest()? && self.ending.is_none() {
                return Ok(None);
            }
        }
    }

    /// The caller polls without a pause until [`Ready::rest`] or [`Ready::leave`]. That takes no system call: events are
    /// left unread.
    pub fn spin(&mut self) {
        self.looked_at = LookedAt::Always;
    }

    /// Nobody waits for the descriptor, so no event is asked for. Returns whether there is nothing to do, as far as is
    /// known.
    pub fn leave(&mut self) -> bool {
        self.looked_at = LookedAt::Sometime;
        self.queues.has_nothing() && self.ending.is_none()
    }

    /// Returns whether the descriptor tells of everything that is left to do.
    ///
    /// # Errors
    /// The device refuses.
    pub fn rest(&mut self) -> Result<bool, Error> {
        if std::mem::replace(&mut self.looked_at, LookedAt::Told) != LookedAt::Told {
            self.takes_event_of_found();
        }
        self.go_on()?;
        Ok(self.queues.rest()? && self.ending.is_none())
    }

    /// Takes the event of completions that were found. False if there is none.
    fn takes_event_of_found(&mut self) -> bool {
        self.queues.found() && {
            stats::add(Counter::Syscalls, 1);
            self.queues.take_event()
        }
    }

    /// Takes the events that are there.
    fn look_around(&mut self) -> Result<(), Error> {
        stats::add(Counter::Syscalls, 1);
        for ready in self.watch.ready() {
            if ready != self.channel.fd() {
                self.queues.take_event();
                continue;
            }
            while let Some(event) = self.channel.next()? {
                self.ending = match event {
                    Event::Disconnected => Some(lost("the peer closed the connection")),
                    Event::Failed(error) => Some(error),
                    _ => continue,
                };
            }
        }
        Ok(())
    }

    /// Hands a Receive up as it is while there are slabs to spare, else as a copy: the Receives must never run out.
    fn received(&mut self, sink: Sink, len: usize, invalidated: Option<Handle>) -> Result<Completion, Error> {
        let left = self.slabs.left();
        let reserve = (self.receives - self.options.margin).min(16) as usize;
        if left > self.spare.len() + reserve {
            return Ok(Completion::Received { sink, len, invalidated });
        }
        let slab = sink.into_buf(len).map_err(|_| lost("a Receive is still held"))?;
        let mut copy = Buf::with_capacity(len)?;
        copy.extend(&slab)?;
        stats::add(Counter::BytesCopied, len as u64);
        self.spare.push(slab);
        Ok(Completion::Received { sink: copy.into_sink(len), len, invalidated })
    }

    // ------------------------------------------------------------------------------------------ the peer's rights

    pub fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        let lent = region.is_lent();
        // Registering costs far more than copying so little.
        if region.len() < LEND_MIN
            && let Some(sources) = self.sources.clone()
            && let Some(mut copy) = sources.take(region.len())
        {
            copy.extend(&region)?;
            stats::add(Counter::BytesCopied, region.len() as u64);
            let copy = copy.freeze();
            let place =
                Segment { handle: Handle(0), length: copy.len() as u32, offset: copy.as_ptr().addr() as u64 };
            // If a whole block cannot be locked, what this call needs perhaps can.
            if let Ok(exposed) = self.expose_part(&sources, place, false, Memory::Source(copy)) {
                return Ok(exposed);
            }
        }
        let (domain, access) = (&self.domain, self.access());
        let copied = |region: &Region| -> Result<Registration, Error> {
            stats::add(Counter::BytesCopied, region.len() as u64);
            Registration::source(domain, region.owned()?, access)
        };
        let registration = if lent && region.len() < LEND_MIN {
            copied(&region)?
        } else {
            match Registration::source(domain, region.clone(), access) {
                // Memory of a program may be of a kind that cannot be registered.
                Err(_) if lent => copied(&region)?,
                other => other?,
            }
        };
        self.expose(registration, false)
    }

    pub fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        let place = Segment { handle: Handle(0), length: sink.len() as u32, offset: sink.address() as u64 };
        if let Some(areas) = self.areas.clone()
            && areas.block_of(place.offset as usize, sink.len()).is_some()
            // If a whole block cannot be locked, what this call needs perhaps can.
            && let Ok(exposed) = self.expose_part(&areas, place, true, Memory::Sink(sink.clone()))
        {
            return Ok(exposed);
        }
        let registration = Registration::sink(&self.domain, sink, self.access())?;
        self.expose(registration, true)
    }

    /// Gives the peer a key for a part of a block, which is registered at its first use.
    fn expose_part(
        &mut self,
        areas: &Areas,
        place: Segment,
        write: bool,
        memory: Memory,
    ) -> Result<Segment, Error> {
        let (address, len) = (place.offset as usize, place.length as usize);
        let at = match self.blocks.iter().position(|block| block.piece(address, len).is_some()) {
            Some(at) => at,
            None => {
                let block = areas.block_of(address, len).ok_or_else(|| lost("a part of no block"))?;
                let start = block.span().0;
                let registration = Registration::area(&self.domain, block, self.access(), write)
                    .inspect_err(|_| areas.refuse(start))?;
                self.blocks.push(registration);
                stats::add(Counter::Registrations, 1);
                self.blocks.len() - 1
            }
        };
        let (handle, window) = if self.has_windows() {
            let mut window = self.window()?;
            let (handle, bind) = window.bind(&self.blocks[at], place, write);
            self.binds.push_back(bind);
            stats::add(Counter::Binds, 1);
            (handle, Some(window))
        } else {
            let key = self.blocks[at].segment().handle;
            if self.exposed.contains_key(&key.0) {
                return Err(lost("a block has one exposure at a time"));
            }
            (key, None)
        };
        self.exposed.insert(handle.0, Exposed { window, memory });
        Ok(Segment { handle, ..place })
    }

    pub fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        let Some(exposed) = self.exposed.remove(&handle.0) else { return Ok(()) };
        stats::add(Counter::Invalidations, 1);
        self.unbind(handle, exposed)?;
        self.domain.taken_back()
    }

    /// A key cannot be made to name other memory, and if the peer uses a dead one the connection ends anyhow.
    pub fn detach(&self, handle: Handle) -> Result<(), Error> {
        let lent = |exposed: &Exposed| matches!(&exposed.memory, Memory::Own(own) if own.is_lent());
        if !self.exposed.get(&handle.0).is_some_and(lent) {
            return Ok(());
        }
        let text = "a call timed out whose memory the server may still use: the connection ends with it";
        Err(Error::new(Kind::Timeout, text))
    }

    fn has_windows(&self) -> bool {
        self.domain.capabilities().windows
    }

    fn access(&self) -> Access {
        if self.has_windows() { Access::Windows } else { Access::Remote }
    }

    /// A window that is bound to nothing.
    fn window(&mut self) -> Result<Window, Error> {
        self.windows.pop().map_or_else(|| Window::new(&self.domain), Ok)
    }

    /// Ends the peer's key for memory, and the memory's registration.
    fn unbind(&mut self, handle: Handle, exposed: Exposed) -> Result<(), Error> {
        let Exposed { window: Some(window), .. } = exposed else { return Ok(()) };
        let unbound = |work: &Work| matches!(work.operation, Operation::Bind(bind) if bind.key() == handle.0);
        if let Some(at) = self.binds.iter().position(unbound) {
            self.binds.remove(at);
        } else {
            let operation = Operation::Invalidate(handle);
            let (pieces, inline, holds) = (Vec::new(), Regions::new(), Vec::new());
            let queues = &mut self.queues;
            if queues.room() == 0 {
                // Freeing the window ends its key too.
                return Ok(());
            }
            stats::add(Counter::Doorbells, 1);
            queues.post(vec![Work { operation, pieces, inline, holds, signalled: true }])?;
            let number = queues.latest();
            self.settle(INVALIDATE, |queues| queues.pending(number))?;
            if self.queues.pending(number) {
                return Ok(());
            }
        }
        self.windows.push(window);
        Ok(())
    }

    /// Gives the peer a key for the memory of a registration.
    fn expose(&mut self, registration: Registration, write: bool) -> Result<Segment, Error> {
        let whole = registration.segment();
        let (handle, window) = if self.has_windows() {
            let mut window = self.window()?;
            let (handle, bind) = window.bind(&registration, whole, write);
            self.binds.push_back(bind);
            stats::add(Counter::Binds, 1);
            (handle, Some(window))
        } else {
            (whole.handle, None)
        };
        stats::add(Counter::Registrations, 1);
        self.exposed.insert(handle.0, Exposed { window, memory: Memory::Own(registration) });
        Ok(Segment { handle, ..whole })
    }

    // ---------------------------------------------------------------------------------------------------- the end

    /// Waits for what was sent before the program closed, unless it has arrived by now or the peer is as good as gone.
    pub fn farewell(&mut self) {
        if !self.is_open() {
            return;
        }
        let leaves = self.leaves();
        if leaves && !self.stands() {
            let _ = self.drain();
        }
        // The peer should also see an orderly end, not a reset: an iWARP connection that is torn down at once may lose what
        // was sent last.
        if leaves && self.domain.capabilities().iwarp {
            self.disconnect();
            let _ = self.settle(DRAIN, |_| true);
        }
    }

    /// Posts a request that the peer's device answers by itself; the one that was posted the last time must be complete.
    pub fn ask(&mut self) -> Result<(), Error> {
        let before = self.probe;
        let queues = &mut self.queues;
        // What is collected is for the next poll.
        queues.collect()?;
        if before.is_some_and(|number| queues.pending(number)) {
            return Err(lost("the peer does not answer any more"));
        }
        if queues.room() > 0 {
            queues.post(vec![Work::nothing()])?;
        }
        self.probe = Some(queues.latest());
        Ok(())
    }

    /// Whether something may still be on its way. No completion tells of an unsignalled request: it counts as arrived if it
    /// was posted long ago.
    pub(super) fn leaves(&self) -> bool {
        let lately = self.posted.is_some_and(|posted| posted.elapsed() < DRAIN);
        lately || !self.pending.is_empty() || self.queues.awaits()
    }

    /// Whether the peer has not answered the latest probe yet, and nothing was sent since.
    fn stands(&self) -> bool {
        let asked = |number| self.queues.pending(number) && self.queues.latest() == number;
        self.pending.is_empty() && self.probe.is_some_and(asked)
    }

    /// Waits until what was posted has gone out: destroying the queue pair would throw it away.
    fn drain(&mut self) -> Result<(), Error> {
        self.start()?;
        let queues = &mut self.queues;
        if queues.busy() {
            queues.post(vec![Work::nothing()])?;
        }
        self.settle(DRAIN, Queues::busy)
    }

    /// Waits while `so` holds for what was posted, the peer is there, and time is left.
    fn settle(&mut self, time: Duration, so: impl Fn(&Queues) -> bool) -> Result<(), Error> {
        let deadline = Instant::now() + time;
        while so(&self.queues) && !self.queues.failed() {
            if self.queues.collect()? || self.queues.arm()? {
                continue;
            }
            if let Some(error) = &self.ending {
                return Err(error.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait::until(self.watch.fd(), wait::IN, Some(left), None)?;
            self.look_around()?;
        }
        Ok(())
    }
}

impl Work {
    /// A Write of zero bytes: it is complete when everything before it is.
    fn nothing() -> Work {
        let (pieces, inline, holds) = (Vec::new(), Regions::new(), Vec::new());
        Work { operation: Operation::Write(NOWHERE), pieces, inline, holds, signalled: true }
    }
}

/// What became of a request.
enum Prepared {
    Work(Vec<Work>),
    /// It waits for something that a completion frees.
    Later(WorkRequest),
    /// It goes in parts.
    Parts(Vec<WorkRequest>),
}

impl From<Work> for Prepared {
    fn from(work: Work) -> Prepared {
        Prepared::Work(vec![work])
    }
}

/// The bytes of several pieces in one.
fn joined(gather: &[Region]) -> Result<Region, Error> {
    let mut copy = Buf::with_capacity(gather.iter().map(|piece| piece.len()).sum())?;
    for piece in gather {
        copy.extend(piece)?;
    }
    stats::add(Counter::BytesCopied, copy.len() as u64);
    Ok(copy.freeze())
}

/// An RDMA Write in parts of at most `most` bytes.
pub(super) fn cut(gather: &[Region], to: Segment, most: usize) -> Vec<WorkRequest> {
    let mut parts = Vec::new();
    let (mut part, mut bytes, mut offset) = (Regions::new(), 0, to.offset);
    let mut close = |part: &mut Regions, bytes: &mut usize| {
        let to = Segment { length: *bytes as u32, offset, ..to };
        offset += *bytes as u64;
        *bytes = 0;
        parts.push(WorkRequest::Write { gather: std::mem::take(part), to });
    };
    for source in gather {
        let mut at = 0;
        while at < source.len() {
            let len = (source.len() - at).min(most - bytes);
            part.push(source.slice(at, len));
            at += len;
            bytes += len;
            if bytes == most {
                close(&mut part, &mut bytes);
            }
        }
    }
    if bytes > 0 {
        close(&mut part, &mut bytes);
    }
    parts
}
