//! The responder: the calls of the peer, from the header to the reply. Its rules are those of the module above.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use smallvec::smallvec;

use super::chunks::{self, Assembly, Pull};
use super::common::Common;
use super::{Answered, Output, Registrar, Role, first_xid, payload_xid};
use crate::binding::{Binding, Head};
use crate::error::{Error, Kind};
use crate::memory::shared::Shown;
use crate::memory::{Message, Pass, PassStage, Payload, Region, Regions, Sink};
use crate::provider::{WorkId, WorkRequest};
use crate::stats::{self, Counter};
use crate::wire::header::{self, Answer, Body, Direction, Header, Plain, Proc, RdmaError};
use crate::wire::lists::{Chunk, ChunkLists, Lists};
use crate::wire::{Handle, Segment, Xid, v1};

/// Most bytes of one RDMA Read: between two Reads other messages of the peer get their turn.
const PULL_MAX: usize = 1 << 20;

/// Shorter replies are not shown: the requester fetches only a page of a shown reply before it decodes.
const SHOWN_MIN: usize = 16 << 10;

/// Most Calls under way for which extra Receives are posted: as many as there can be serving threads.
const PAST_MAX: usize = 1024;

/// Most bytes of RDMA Reads under way: at first (1 MiB of arguments and the call's header), and once the peer has answered such
/// Reads. What a peer leaves unanswered counts as memory held.
const READS_MIN: usize = PULL_MAX + 4096;
pub(super) const READS_MAX: usize = 8 << 20;

/// The same for a peer whose Call has waited for memory: it may have stopped by now, like many of those that wait with it, and
/// then it keeps no more than this from others.
const READS_TRY: u32 = 64 << 10;

/// Names a request that was handed up.
///
/// A later request compares greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

impl RequestId {
    /// Counted from the first request of the connection.
    pub fn number(self) -> u64 {
        self.0
    }

    /// The request with this number.
    pub fn of(number: u64) -> RequestId {
        RequestId(number)
    }
}

/// What has become of a request that was deferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It can be answered.
    Waits,
    /// It was answered.
    Answered,
    /// Too many were deferred after it. Or it was answered: that is no longer known.
    PassedOver,
}

/// A request for the upper layer.
pub struct Request {
    /// For `reply` or `discard`.
    pub id: RequestId,
    /// Of the RPC message.
    pub xid: Xid,
    /// The RPC Call in stream order, from its XID on.
    pub message: Payload,
    /// What is known of its procedure; nothing if RPCSEC_GSS wraps the arguments.
    pub binding: Option<Binding>,
    /// RPCSEC_GSS wraps arguments and results.
    pub wrapped: bool,
    /// The first argument that came in a Read chunk of its own, as it lies in memory: without padding.
    pub placed: Option<Region>,
}

/// The calls of the peer.
pub(super) struct Responder {
    next: u64,
    /// In the order of their Sends; the front is handed up next.
    queue: VecDeque<Pending>,
    /// Handed up, not yet answered or discarded.
    handed: Handed,
    /// The latest deferred requests: one, until the next request is handed up, or `late` of them.
    deferred: BTreeMap<RequestId, Chunks>,
    late: usize,
    /// The latest request dropped from `deferred`.
    passed_over: Option<RequestId>,
    /// Another process may answer requests too.
    shared: bool,
    /// The latest request that was answered: the requester may take those before it for done.
    answered: RequestId,
    /// Bytes of Calls in `queue` that were asked for.
    staged: usize,
    /// Bytes of each Read under way, in order, and of all Reads so far.
    reads: VecDeque<usize>,
    asked: u64,
    /// How many bytes the peer has shown that it sends when asked for them: no more than these are under way.
    reads_max: usize,
    /// Most bytes that the device moves by one Read or Write; known with the first Call.
    transfer_max: usize,
    /// A Call waits for memory that other connections hold.
    waits: bool,
    /// No Reads of further Calls are started.
    held: bool,
    /// Reads of a Call begin with a pass; otherwise as soon as they can.
    in_turn: bool,
    /// The next pass.
    pass: Option<Pass>,
    /// Bytes of the Call that waits for a pass, and for nothing else; 0: none does.
    asks: usize,
}

/// A request on its way up.
struct Pending {
    id: RequestId,
    chunks: Chunks,
    /// Bytes of staging memory that it holds: those that were asked for.
    staged: usize,
    state: State,
}

/// What the requester offers for the reply.
struct Chunks {
    xid: Xid,
    /// Of the Call, and so of the Reply.
    version: u32,
    /// Known when the Call is whole.
    binding: Option<Binding>,
    wrapped: bool,
    offers: Offers,
}

/// What the header of a Call names.
#[derive(Default)]
struct Offers {
    writes: Vec<Chunk>,
    reply: Option<Chunk>,
    /// The only handle that the Call names, if there is exactly one.
    handle: Option<Handle>,
}

enum State {
    /// RDMA Reads are fetching it. Boxed, so that a Call that is whole at once, as most are, does not carry the space for it.
    Pulling(Box<Pulling>),
    Ready(Whole),
}

struct Pulling {
    assembly: Assembly,
    /// What came in the Send.
    inline: Region,
    /// `None` before the first Read.
    staging: Option<Sink>,
    /// Reads that are not posted yet.
    rest: VecDeque<Pull>,
    /// Reads under way.
    left: usize,
}

/// A Call of which every byte is here.
#[derive(Default)]
struct Whole {
    message: Payload,
    placed: Option<Region>,
}

impl Chunks {
    fn new(xid: Xid, version: u32, offers: Offers) -> Chunks {
        Chunks { xid, version, binding: None, wrapped: false, offers }
    }

    /// The Reply chunk to return, unused, with a reply of `length` bytes that goes inline and has no Write chunks. `None`: the
    /// reply must be planned. `send`: the largest Send that the requester takes.
    fn unused(&self, length: usize, send: usize) -> Option<Option<Segment>> {
        let Offers { writes, reply, .. } = &self.offers;
        let (reply, chunk) = match reply.as_deref() {
            _ if !writes.is_empty() => return None,
            None => (None, 0),
            // RFC 8166 §4.3.3: "the Responder MUST copy that chunk into the Transport header of the RPC Reply message."
            Some([segment]) => (Some(Segment { length: 0, ..*segment }), chunks::REPLY_CHUNK),
            Some(_) => return None,
        };
        (chunks::header_min(self.version) + chunk + length <= send).then_some(reply)
    }
}

/// Requests under way in the upper layer, with the chunks for their replies.
///
/// They arrive in the order of their numbers and are kept in it, and there are few at a time: looking at the latest, or a binary
/// search, finds one in fewer steps than a hash table would.
#[derive(Default)]
struct Handed(VecDeque<(RequestId, Chunks)>);

impl Handed {
    fn len(&self) -> usize {
        self.0.len()
    }

    /// The only one there is.
    #[inline]
    fn only(&self) -> Option<&(RequestId, Chunks)> {
        if self.0.len() == 1 { self.0.front() } else { None }
    }

    fn push(&mut self, id: RequestId, chunks: Chunks) {
        debug_assert!(
            self.0.back().is_none_or(|(last, _)| *last < id),
            "requests are handed up in their order"
        );
        self.0.push_back((id, chunks));
    }

    fn find(&self, id: RequestId) -> Option<usize> {
        match self.0.back() {
            Some((last, _)) if *last == id => Some(self.0.len() - 1),
            _ => self.0.binary_search_by_key(&id, |(id, _)| *id).ok(),
        }
    }

    fn take(&mut self, id: RequestId) -> Option<Chunks> {
        let (_, chunks) = match self.find(id)? {
            at if at + 1 == self.0.len() => self.0.pop_back(),
            at => self.0.remove(at),
        }?;
        Some(chunks)
    }

    /// Puts back one that was taken or deferred.
    #[cold]
    fn put_back(&mut self, id: RequestId, chunks: Chunks) {
        let at = self.0.partition_point(|(other, _)| *other < id);
        self.0.insert(at, (id, chunks));
    }
}

/// How many of `requests`, which are in order, came before `id`: nearly always none.
fn before<T>(requests: &VecDeque<T>, id: RequestId, of: impl Fn(&T) -> RequestId) -> usize {
    match requests.front() {
        Some(first) if of(first) < id => requests.partition_point(|request| of(request) < id),
        _ => 0,
    }
}

impl Responder {
    pub(super) fn new() -> Responder {
        Responder {
            next: 0,
            queue: VecDeque::new(),
            handed: Handed::default(),
            deferred: BTreeMap::new(),
            late: 0,
            passed_over: None,
            shared: false,
            answered: RequestId(0),
            staged: 0,
            reads: VecDeque::new(),
            asked: 0,
            reads_max: READS_MIN,
            transfer_max: 0,
            waits: false,
            held: false,
            in_turn: false,
            pass: None,
            asks: 0,
        }
    }

    /// Posts the Receives that are missing. A Call under way keeps its own.
    pub(super) fn replenish(&self, common: &mut Common) {
        // Calls without a reply give their credit back with the reply to a later call, though other threads may still be serving
        // them. Which calls these are is not known here, nor which ones other processes have answered, until they say so.
        let handed = match self.shared {
            true => self.handed.len(),
            false => before(&self.handed.0, self.answered, |(id, _)| *id),
        };
        let handed = handed.min(PAST_MAX);
        // Only a refused Call can overtake those that have not been handed up.
        let queued = before(&self.queue, self.answered, |pending| pending.id);
        common.replenish(self.working() - handed - queued.min(common.settings.credits as usize));
    }

    /// Calls under way: received, and neither answered nor given up.
    pub(super) fn working(&self) -> usize {
        self.queue.len() + self.handed.len()
    }

    /// Whether a Call waits for memory that other connections hold.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Whether `poll_request` would return one.
    pub(super) fn request_ready(&self) -> bool {
        matches!(self.queue.front(), Some(Pending { state: State::Ready(_), .. }))
    }

    /// Requests received and not yet handed up, ready or not.
    #[cfg(test)]
    pub(super) fn requests_queued(&self) -> usize {
        self.queue.len()
    }

    /// The oldest request, once all of it has arrived.
    pub(super) fn poll_request(&mut self, common: &mut Common) -> Option<Request> {
        if !self.request_ready() {
            return None;
        }
        let Pending { id, chunks, staged, state } = self.queue.pop_front()?;
        let State::Ready(Whole { message, placed }) = state else { return None };
        let (xid, binding, wrapped) = (chunks.xid, chunks.binding.clone(), chunks.wrapped);
        if staged > 0 {
            for piece in message.pieces.iter().chain(&placed) {
                piece.reach(PassStage::Dispatched);
            }
        }
        if self.late == 0
            && let Some((latest, _)) = self.deferred.pop_last()
        {
            self.passed_over = self.passed_over.max(Some(latest));
            self.deferred.clear();
        }
        self.handed.push(id, chunks);
        self.staged -= staged;
        self.waits = false;
        if self.shared {
            self.replenish(common);
        }
        if !self.queue.is_empty() {
            self.start_pulls(common);
        }
        Some(Request { id, xid, message, binding, wrapped, placed })
    }

    /// Bytes that RDMA Reads have asked for so far, if some are under way.
    pub(super) fn pulling(&self) -> Option<u64> {
        (!self.reads.is_empty()).then_some(self.asked)
    }

    /// Holds back the Reads of further Calls, or lets them start again: a peer that does not take replies gets no memory for
    /// more Calls.
    pub(super) fn hold(&mut self, held: bool, common: &mut Common) {
        if std::mem::replace(&mut self.held, held) && !held && common.life.closed().is_none() {
            self.start_pulls(common);
        }
    }

    /// From now on the Reads of each Call begin when it gets a pass.
    pub(super) fn pull_in_turn(&mut self) {
        self.in_turn = true;
    }

    /// Bytes of the oldest Call that waits for a pass, if one does.
    pub(super) fn asks(&self) -> usize {
        self.asks
    }

    /// That Call may be pulled. The pass lives as long as the Call's memory.
    pub(super) fn pull(&mut self, pass: Pass, common: &mut Common) {
        if self.asks > 0 {
            self.pass = Some(pass);
            self.start_pulls(common);
        }
    }

    /// Answers a request with the RPC Reply `message` (first word: the XID).
    ///
    /// # Errors
    /// `TooLong` when the reply fits nowhere: the requester is told with ERR_CHUNK. `Invalid` when the request was
    /// answered before, or the message has another XID (the request can still be answered). The reason of the close
    /// when the connection is closed.
    pub(super) fn reply(
        &mut self,
        id: RequestId,
        mut message: Message,
        common: &mut Common,
    ) -> Result<(), Error> {
        let deferred = self.deferred.remove(&id);
        let is_deferred = deferred.is_some();
        let Some(chunks) = deferred.or_else(|| self.handed.take(id)) else {
            return Err(Error::new(
                Kind::Invalid,
                match self.fate(id) {
                    Fate::PassedOver => {
                        "too many later requests are waiting for their replies, or it was answered before"
                    }
                    Fate::Waits | Fate::Answered => "the request was answered before",
                },
            ));
        };
        // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
        if first_xid(message.body()) != Some(chunks.xid) {
            let text = format!("the reply does not begin with the XID {} of its call", chunks.xid);
            match is_deferred {
                true => drop(self.deferred.insert(id, chunks)),
                false => self.handed.put_back(id, chunks),
            }
            return Err(Error::new(Kind::Invalid, text));
        }
        if let Some(error) = common.life.closed() {
            return Err(error.clone());
        }
        let in_order = self.begin_answer(id, common);
        let send = common.reply_limit(chunks.version);
        let gather = match chunks.unused(message.len(), send) {
            // Nearly every short one: it goes as it is.
            Some(reply) => {
                stats::add(Counter::BytesCopied, message.copy_in(|_, _| true) as u64);
                let whole = (chunks.version, chunks.xid);
                sent_or_closed(common.gather_plain(whole, Direction::Reply, reply, message), common)?
            }
            None => self.place(&chunks, message, send, common)?,
        };
        send_answer(&chunks, gather, in_order, common);
        Ok(())
    }

    /// The reply to this request is about to be sent. Returns whether it may invalidate what the requester has offered.
    fn begin_answer(&mut self, id: RequestId, common: &mut Common) -> bool {
        // If the requester takes this for a one-way call, it may have taken the reply to a later call for the end of this one.
        // Then it has invalidated the handle itself, and RFC 5040 §5.3 lets a second invalidation end the connection.
        let in_order = self.answered <= id && !self.shared;
        self.answered = self.answered.max(id);
        // Before the reply, which gives the credit back.
        self.replenish(common);
        in_order
    }

    /// Answers a request with a long reply that the requester fetches itself: its Reply chunk, which would come back as it was
    /// (RFC 8166 §4.3.3), comes back with the offset at which the reply lies. Only ends that both use this library show each
    /// other anything. Returns the message where this is not possible.
    pub(super) fn reply_shown(
        &mut self,
        id: RequestId,
        message: Message,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Option<Message>, Error> {
        let length = message.len();
        if length < SHOWN_MIN || !message.is_in_outbox() {
            return Ok(Some(message));
        }
        let chunk = |chunks: &Chunks| match (&chunks.offers.writes[..], chunks.offers.reply.as_deref()) {
            ([], Some([segment])) if segment.length as usize >= length => Some(*segment),
            _ => None,
        };
        let place = self.handed.find(id).and_then(|at| {
            let (_, chunks) = self.handed.0.get(at)?;
            let own = first_xid(message.body()) == Some(chunks.xid);
            let long = chunks.unused(length, common.reply_limit(chunks.version)).is_none();
            chunk(chunks).filter(|_| own && long && common.life.closed().is_none())
        });
        let Some(place) = place else { return Ok(Some(message)) };
        let handle = place.handle;
        let Some(offset) = registrar.show(message.body().as_ptr().addr(), handle) else {
            return Ok(Some(message));
        };
        let Some(chunks) = self.handed.take(id) else { return Ok(Some(message)) };
        let in_order = self.begin_answer(id, common);
        let pieces = message.freeze();
        let all = 0..length;
        pieces.gather(all).into_iter().for_each(|region| registrar.keep(region, handle));
        let segment = Segment { handle, length: length as u32, offset };
        let lists = Lists { reply: Some(smallvec![segment]), ..Lists::default() };
        let whole = (chunks.version, chunks.xid);
        let gather = common.gather(whole, (Proc::Nomsg, Direction::Reply), &lists, pieces, &[]);
        let gather = sent_or_closed(gather, common)?;
        send_answer(&chunks, gather, in_order, common);
        Ok(None)
    }

    /// Answers a request in the usual case: it is the only one under way and came as a plain Call of Version One, and the reply
    /// fits into its Send and names no memory of the program. Does what `reply` would do, but returns what is to be posted.
    pub(super) fn answer(&mut self, id: RequestId, message: Message, common: &mut Common) -> Answered {
        let plain = |chunks: &Chunks| {
            let whole = message.is_whole() && first_xid(message.body()) == Some(chunks.xid);
            let reply = chunks.unused(message.len(), common.reply_limit(v1::VERSION))?;
            (whole && chunks.version == v1::VERSION).then_some((chunks.xid, reply, chunks.offers.handle))
        };
        let alone = self.queue.is_empty() && common.output.is_empty();
        let only = self.handed.only().filter(|(only, _)| *only == id && alone && common.life.is_open());
        let Some((xid, reply, handle)) = only.and_then(|(_, chunks)| plain(chunks)) else {
            return Answered::Not(message);
        };
        // The Call's own Receive.
        let Some(receive) = common.next_receive(1) else { return Answered::Not(message) };
        self.handed.0.clear();
        let in_order = self.answered <= id && !self.shared;
        self.answered = self.answered.max(id);
        common.characteristics.posted();
        let gather = common.gather_plain((v1::VERSION, xid), Direction::Reply, reply, message);
        match sent_or_closed(gather, common) {
            Ok(gather) => {
                let invalidate = handle.filter(|_| in_order && common.may_invalidate(v1::VERSION));
                Answered::Sent { gather, receive, invalidate }
            }
            Err(error) => Answered::Failed(error),
        }
    }

    /// Writes those parts of a reply that have a place at the requester. Returns what is to be sent then, at most `send` bytes.
    #[inline(never)]
    fn place(
        &self,
        chunks: &Chunks,
        mut message: Message,
        send: usize,
        common: &mut Common,
    ) -> Result<Regions, Error> {
        // RFC 8166 §4.3.2: "When a Requester provides a Write list, the Responder MUST push data corresponding to
        // DDP-eligible result data items to Requester memory referenced in the Write list."
        let (writes, reply) = (&chunks.offers.writes[..], chunks.offers.reply.as_deref());
        let items = match &chunks.binding {
            Some(binding) if !writes.is_empty() => binding.reply(&[message.body()]).items,
            _ => Vec::new(),
        };
        let (version, max) = (chunks.version, self.transfer_max);
        let plan = match chunks::plan_reply(version, &mut message, &items, writes, reply, send, max) {
            Ok(plan) => plan,
            Err(error) => {
                self.send_error((chunks.xid, version, RdmaError::BadHeader), common);
                return Err(error);
            }
        };
        stats::add(Counter::BytesCopied, plan.copied as u64);
        let proc = if plan.inline.is_some() { Proc::Msg } else { Proc::Nomsg };
        let pieces = message.freeze();
        let writes: Vec<_> = plan
            .pushes
            .into_iter()
            .map(|push| {
                let gather = push.from.into_iter().flat_map(|range| pieces.gather(range)).collect();
                Output::Post(WorkRequest::Write { gather, to: push.to })
            })
            .collect();
        let (kind, inline) = ((proc, Direction::Reply), plan.inline.unwrap_or_default());
        let gather = common.gather((chunks.version, chunks.xid), kind, &plan.lists, pieces, &inline);
        let gather = sent_or_closed(gather, common)?;
        common.output.extend(writes);
        Ok(gather)
    }

    /// The request has no reply yet, and may never get one (a one-way call): its Receive is free again. The latest such request
    /// can still be answered until the next one is handed up; with [`Responder::keep_deferred`], the latest `late` can.
    pub(super) fn defer(&mut self, id: RequestId, common: &mut Common) {
        if let Some(chunks) = self.handed.take(id) {
            self.deferred.insert(id, chunks);
            if self.deferred.len() > self.late.max(1)
                && let Some((oldest, _)) = self.deferred.pop_first()
            {
                // The routine that serves an older one may return later.
                self.passed_over = self.passed_over.max(Some(oldest));
            }
        }
        self.replenish(common);
    }

    /// Keeps up to `late` deferred requests answerable, whatever is handed up meanwhile.
    pub(super) fn keep_deferred(&mut self, late: usize) {
        self.late = late;
    }

    /// Another process may answer requests too. No reply invalidates a handle then, since the order of the replies is not known,
    /// and there is a Receive for each credit besides those of the Calls that were handed up.
    pub(super) fn shares(&mut self, common: &mut Common) {
        if !std::mem::replace(&mut self.shared, true) {
            self.replenish(common);
        }
    }

    /// Another process has answered this request.
    pub(super) fn answered_elsewhere(&mut self, id: RequestId) {
        if self.deferred.remove(&id).is_none() {
            // No Receive is posted for it: a shared connection has one for each credit besides those of up to [`PAST_MAX`] Calls
            // that are handed up.
            self.handed.take(id);
        }
    }

    /// What has become of a request that was deferred.
    pub(super) fn fate(&self, id: RequestId) -> Fate {
        if self.deferred.contains_key(&id) || self.handed.find(id).is_some() {
            Fate::Waits
        } else if Some(id) <= self.passed_over {
            Fate::PassedOver
        } else {
            Fate::Answered
        }
    }

    /// Deferred requests that can still be answered.
    pub(super) fn deferred(&self) -> impl Iterator<Item = RequestId> {
        self.deferred.keys().copied()
    }

    /// Whether a request has been handed up and is neither answered nor deferred.
    pub(super) fn has_handed(&self) -> bool {
        self.handed.len() > 0
    }

    /// The request gets no reply: its Receive is free again.
    pub(super) fn discard(&mut self, id: RequestId, common: &mut Common) {
        self.handed.take(id);
        self.replenish(common);
    }

    /// Takes in a plain Call of Version One when no other Call waits and no binding has a say, which is nearly always so. Does
    /// what `handle_call` and `replenish` would do. Otherwise returns false, and nothing has changed.
    pub(super) fn take_call(
        &mut self,
        message: &Region,
        plain: &Plain<'_>,
        common: &mut Common,
        registrar: &(impl Registrar + ?Sized),
    ) -> bool {
        let payload = plain.payload;
        let quiet = self.queue.is_empty() && common.next_receive(self.working()).is_some();
        let alone = common.role == Role::Server && common.bindings.leaves_alone(Some(payload));
        if !quiet || !alone || first_xid(payload) != Some(plain.xid) || !self.make_room() {
            return false;
        }
        // The Call keeps its own Receive.
        common.characteristics.consumed();
        let id = RequestId(self.next);
        self.next += 1;
        self.transfer_max = registrar.max_segment();
        let (reply, handle) =
            (plain.reply().map(|segment| smallvec![segment]), plain.reply().map(|s| s.handle));
        let chunks = Chunks::new(plain.xid, v1::VERSION, Offers { writes: Vec::new(), reply, handle });
        let message = smallvec![message.slice(message.len() - payload.len(), payload.len())];
        let state = State::Ready(Whole { message: message.into(), placed: None });
        self.queue.push_back(Pending { id, chunks, staged: 0, state });
        true
    }

    /// A Call has arrived.
    pub(super) fn handle_call(
        &mut self,
        message: &Region,
        header: &Header<'_>,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        self.transfer_max = registrar.max_segment();
        let Header { xid, version, .. } = *header;
        let (lists, inline) = match header.body {
            Body::Msg { chunks, payload } => (chunks, payload.len()),
            Body::Nomsg { chunks } => (chunks, 0),
            // RFC 8166 §4.6.1: "Responders SHOULD reply with an RDMA_ERROR procedure, setting the rdma_err field to
            // ERR_CHUNK"
            Body::Msgp => return self.refuse((xid, version), common),
            // RFC 8166 §4.2.4: "A Responder MUST silently discard RDMA_ERROR procedures."
            // RFC 8166 §4.6.2: "Receivers MUST silently discard RDMA_DONE messages."
            Body::Done | Body::Error(_) | Body::Optional { .. } => return,
        };
        // RFC 8167 §5.3: "If a reverse-direction requester provides a non-empty chunk list to a Responder that does not
        // support chunks, the Responder MUST reply with an RDMA_ERROR message with rdma_err field set to ERR_CHUNK."
        let chunks =
            common.role == Role::Server || (common.window.serves() && common.settings.reverse_chunks);
        if !chunks && !lists.is_empty() {
            return self.refuse((xid, version), common);
        }
        let id = RequestId(self.next);
        self.next += 1;
        let mut chunks = Chunks::new(xid, version, Offers::default());
        let payload = message.slice(message.len() - inline, inline);
        let state = if lists.is_empty() && inline > 0 {
            // As most are.
            let message = smallvec![payload];
            bind(&mut chunks, &message, None, common)
                .then_some(State::Ready(Whole { message: message.into(), placed: None }))
        } else {
            self.assemble(&mut chunks, lists, payload, common, registrar)
        };
        let Some(state) = state else { return self.refuse((xid, version), common) };
        if !self.make_room() {
            return common.close(Error::new(Kind::Os(libc::ENOMEM), "no memory for one more request"));
        }
        self.queue.push_back(Pending { id, chunks, staged: 0, state });
        // A Call that is whole and alone leaves nothing to ask for.
        if self.queue.len() > 1 || !self.request_ready() {
            self.start_pulls(common);
        }
    }

    /// The state of a Call with chunks; `None` when it must be refused.
    #[inline(never)]
    fn assemble(
        &self,
        chunks: &mut Chunks,
        lists: ChunkLists<'_>,
        inline: Region,
        common: &Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Option<State> {
        if !lists.is_empty() {
            let writes = lists.writes().map(|c| c.iter().collect()).collect();
            let reply = lists.reply().map(|c| c.iter().collect());
            chunks.offers = Offers { writes, reply, handle: only_handle(&lists) };
        }
        // RFC 8166 §8.1.4: "A Responder is not obliged to pull Read chunks that are unreasonably large. The Responder can
        // use an RDMA_ERROR response to terminate RPCs with unreadable Read chunks."
        let (assembly, pulls) = Assembly::new(lists.reads(), inline.len(), common.settings.max_call).ok()?;
        // Read chunks without a byte need no Read: a Call that waited for one would wait for ever.
        if pulls.is_empty() {
            let message = smallvec![inline];
            return bind(chunks, &message, Some(&assembly), common)
                .then_some(State::Ready(Whole { message: message.into(), placed: None }));
        }
        if registrar.read_depth() == 0 {
            return None;
        }
        if let [Pull { from, .. }] = pulls[..]
            && inline.is_empty()
            && let Some(shown) = registrar.shown(from)
            && let Some(whole) = taken(chunks, shown, common)
        {
            return Some(State::Ready(whole));
        }
        let most = self.transfer_max.min(PULL_MAX);
        let parts =
            |Pull { at, from }| transfers(from, most).map(move |(done, from)| Pull { at: at + done, from });
        let rest = pulls.into_iter().flat_map(parts).collect();
        Some(State::Pulling(Box::new(Pulling { assembly, inline, staging: None, rest, left: 0 })))
    }

    /// Makes room for one more request, until it is answered: all that are queued will be handed up. With many requests this
    /// takes more memory than the reserve has.
    fn make_room(&mut self) -> bool {
        self.queue.try_reserve(1).is_ok() && self.handed.0.try_reserve(self.queue.len() + 1).is_ok()
    }

    /// Asks for more of the Calls, oldest first, as far as the peer answers and memory allows.
    pub(super) fn start_pulls(&mut self, common: &mut Common) {
        let Responder { queue, staged, reads, asked, reads_max, waits, held, in_turn, pass, asks, .. } = self;
        let mut first = true;
        let mut under_way: usize = reads.iter().sum();
        let tries = *waits && under_way == 0;
        (*waits, *asks) = (false, 0);
        for pending in queue {
            if let State::Pulling(pulling) = &mut pending.state {
                let Pulling { assembly, staging, rest, left, .. } = &mut **pulling;
                if *held && staging.is_none() {
                    return;
                }
                while let Some(Pull { at, from }) = rest.front().copied() {
                    let from = Segment {
                        length: if tries { from.length.min(READS_TRY) } else { from.length },
                        ..from
                    };
                    let bytes = from.length as usize;
                    if under_way > 0 && under_way + bytes > *reads_max {
                        return;
                    }
                    if !first && *staged + bytes > common.settings.max_call {
                        return;
                    }
                    let sink = match staging {
                        Some(sink) => sink,
                        // A waiting Call has no block yet: the blocks that others have just used are in the cache.
                        None if *in_turn && pass.is_none() => {
                            *asks = assembly.staging;
                            return;
                        }
                        None => match common.memory.staging(assembly.staging, pass.take()) {
                            Ok(sink) => staging.insert(sink),
                            // Out of memory with the Call half received: nothing can be answered in order any more.
                            Err(error) => return common.close(error.into()),
                        },
                    };
                    if !common.memory.may_pull(sink, bytes, first) {
                        *waits = true;
                        return;
                    }
                    if reads.try_reserve(1).is_err() || common.output.try_reserve(1).is_err() {
                        let text = "no memory for one more RDMA Read";
                        return common.close(Error::new(Kind::Os(libc::ENOMEM), text));
                    }
                    let read = WorkRequest::Read { id: WorkId(pending.id.0), sink: sink.clone(), at, from };
                    common.output.push_back(Output::Post(read));
                    advance(rest, bytes);
                    reads.push_back(bytes);
                    *left += 1;
                    *asked += bytes as u64;
                    under_way += bytes;
                    *staged += bytes;
                    pending.staged += bytes;
                    if tries {
                        return;
                    }
                }
            }
            first = false;
        }
    }

    /// An RDMA Read is done: the oldest one.
    pub(super) fn handle_read(&mut self, id: WorkId, common: &mut Common) {
        let Responder { queue, reads, reads_max, .. } = self;
        let Some(at) = queue.iter().position(|p| p.id.0 == id.0) else { return };
        let State::Pulling(pulling) = &mut queue[at].state else { return };
        *reads_max = (*reads_max + reads.pop_front().unwrap_or(0)).min(READS_MAX);
        pulling.left = pulling.left.saturating_sub(1);
        if pulling.left == 0 && pulling.rest.is_empty() {
            self.pulled(at, common);
        }
        self.start_pulls(common);
    }

    /// All of a Call has arrived.
    fn pulled(&mut self, at: usize, common: &mut Common) {
        let Some(mut pending) = self.queue.remove(at) else { return };
        let State::Pulling(pulling) = std::mem::replace(&mut pending.state, State::Ready(Whole::default()))
        else {
            return;
        };
        let Pulling { assembly, inline, staging, .. } = *pulling;
        let Some(staging) = staging.and_then(|sink| sink.into_buf(assembly.staging).ok()) else {
            let error = Error::new(Kind::Protocol, "the device still holds memory of finished RDMA Reads");
            return common.close(error);
        };
        let (message, placed) = assembly.assemble(inline, staging);
        if bind(&mut pending.chunks, &message, Some(&assembly), common) {
            pending.state = State::Ready(Whole { message: message.into(), placed });
            self.queue.insert(at, pending);
        } else {
            self.staged -= pending.staged;
            self.answered = self.answered.max(pending.id);
            self.send_error((pending.chunks.xid, pending.chunks.version, RdmaError::BadHeader), common);
        }
    }

    /// Refuses the latest Call, which is not handed up.
    fn refuse(&mut self, (xid, version): (Xid, u32), common: &mut Common) {
        self.answered = RequestId(self.next);
        self.send_error((xid, version, RdmaError::BadHeader), common);
    }

    /// Answers a message that is not handed up. Its Receive is free again before the peer hears of it.
    pub(super) fn send_error(&self, answer: Answer, common: &mut Common) {
        self.replenish(common);
        // RFC 8166 §4.5: "The rdma_xid field MUST contain the same XID that was in the rdma_xid field in the failing
        // request" and "The rdma_vers field MUST contain the same version that was in the rdma_vers field in the
        // failing request".
        let mut bytes = Vec::new();
        header::encode_error(&mut bytes, answer, common.window.told(Direction::Reply));
        if common.send_bytes(&bytes) {
            stats::add(Counter::ErrorsSent, 1);
        }
    }

    /// The connection is gone: every request that is not ready is dropped.
    pub(super) fn handle_closed(&mut self) {
        // Requests that had become ready before are served, up to the first that had not: a call without a reply has no other
        // chance.
        let ready = |pending: &&Pending| matches!(pending.state, State::Ready(_));
        let ready = self.queue.iter().take_while(ready).count();
        self.queue.truncate(ready);
        self.reads.clear();
        self.staged = self.queue.iter().map(|pending| pending.staged).sum();
        (self.pass, self.asks, self.waits) = (None, 0, false);
    }
}

/// Sends a reply, which invalidates the only handle that its Call names, where it may.
fn send_answer(chunks: &Chunks, gather: Regions, in_order: bool, common: &mut Common) {
    let invalidate = chunks.offers.handle.filter(|_| in_order && common.may_invalidate(chunks.version));
    common.output.push_back(Output::Post(WorkRequest::Send { gather, invalidate }));
}

/// The Send of a reply; without one the connection ends.
fn sent_or_closed(gather: Result<Regions, Error>, common: &mut Common) -> Result<Regions, Error> {
    if let Err(error) = &gather {
        // RFC 8166 §4.5.4: "If a Responder is unable to construct and transmit an RPC Reply or RPC-over-RDMA error
        // message, the Responder MUST close the connection to signal to the Requester that a reply was lost."
        common.close(error.clone());
    }
    gather
}

/// `message` is all of a Call: finds its binding. Returns false when the Call must be refused. `assembly`: that of its Read
/// chunks, if it has any.
fn bind(chunks: &mut Chunks, message: &[Region], assembly: Option<&Assembly>, common: &Common) -> bool {
    // RFC 8166 §4.5.2: "the value of the rdma_xid field does not match the value of the XID field in the
    // accompanying RPC message" is an XDR error.
    if payload_xid(message) != Some(chunks.xid) {
        return false;
    }
    let reduced = assembly.filter(|assembly| assembly.normal().next().is_some());
    if reduced.is_none() && common.bindings.leaves_alone(message.first().map(|piece| &piece[..])) {
        return true;
    }
    let (one, all): ([&[u8]; 1], Vec<&[u8]>);
    let slices = match message {
        [whole] => {
            one = [whole];
            &one[..]
        }
        pieces => {
            all = pieces.iter().map(|piece| &piece[..]).collect();
            &all[..]
        }
    };
    // What is not an RPC Call is for the upper layer to refuse.
    if let Some(head) = Head::of(slices) {
        let Head { program, version, procedure, wrapped, .. } = head;
        let binding = common.bindings.find(program, version, procedure).filter(|_| !wrapped);
        if reduced.is_some_and(|chunks| !may_be_reduced(slices, wrapped, binding.as_ref(), chunks)) {
            return false;
        }
        (chunks.binding, chunks.wrapped) = (binding, wrapped);
    }
    true
}

/// A Call whose arguments we fetch from the peer when they are decoded. `None`: all of it is wanted at once.
fn taken(chunks: &Chunks, shown: Shown, common: &Common) -> Option<Whole> {
    // A page of it, which shows what call it is.
    let (head, rest) = shown.split(common.memory.header().ok()?)?;
    let message: Regions = smallvec![head];
    let plain = payload_xid(&message) == Some(chunks.xid)
        && common.bindings.leaves_alone(message.first().map(|piece| &piece[..]));
    plain.then(|| Whole { message: Payload { pieces: message, rest: Some(Box::new(rest)) }, placed: None })
}

/// The handle that a Call names, if all its segments name the same one.
fn only_handle(lists: &ChunkLists<'_>) -> Option<Handle> {
    let reads = lists.reads().map(|read| read.target.handle);
    let writes = lists.writes().chain(lists.reply()).flat_map(|chunk| chunk.iter()).map(|s| s.handle);
    let mut handles = reads.chain(writes);
    let first = handles.next()?;
    handles.all(|handle| handle == first).then_some(first)
}

/// Whether every normal Read chunk of a whole Call is one eligible item, as far as its binding can tell.
fn may_be_reduced(call: &[&[u8]], wrapped: bool, binding: Option<&Binding>, chunks: &Assembly) -> bool {
    // RFC 8166 §8.2.2.3: "Effectively, no data item is DDP-eligible in this situation".
    if wrapped {
        return false;
    }
    let Some(shape) = binding.map(|binding| binding.call(call)) else { return true };
    // RFC 8166 §3.4.5.2: the chunk may contain the roundup padding. §3.4.4.4: "a chunk MUST contain exactly one XDR data
    // item."
    let is_item = |position: usize, bytes: usize| {
        let item = shape.items.iter().find(|item| item.position == position);
        item.is_some_and(|item| bytes == item.length || bytes == item.length.next_multiple_of(4))
    };
    // What the binding did not understand may hold any item.
    !shape.complete || chunks.normal().all(|(position, bytes)| is_item(position, bytes))
}

/// The parts of `whole` that are moved one by one, each at most `max` bytes, with their places in it.
fn transfers(whole: Segment, max: usize) -> impl Iterator<Item = (usize, Segment)> {
    chunks::cut(whole.length as usize, max).map(move |(at, length)| {
        // An offset is opaque: one that wraps is the peer's mistake, found by its device.
        let offset = whole.offset.wrapping_add(at as u64);
        (at, Segment { length: length as u32, offset, ..whole })
    })
}

/// Removes the first `bytes` bytes, of which the Read was started.
fn advance(rest: &mut VecDeque<Pull>, bytes: usize) {
    let Some(Pull { at, from }) = rest.front_mut() else { return };
    *at += bytes;
    from.length -= bytes as u32;
    from.offset = from.offset.wrapping_add(bytes as u64);
    if from.length == 0 {
        rest.pop_front();
    }
}

/// For tests: what is inside.
#[cfg(test)]
impl Responder {
    /// Bytes of pulled Calls, and their sum as the Calls tell it.
    pub(super) fn staged(&self) -> (usize, usize) {
        (self.staged, self.queue.iter().map(|pending| pending.staged).sum())
    }

    /// Bytes of Reads under way, and of all Reads so far.
    pub(super) fn reads(&self) -> (usize, u64) {
        (self.reads.iter().sum(), self.asked)
    }

    pub(super) fn all_ready(&self) -> bool {
        self.queue.iter().all(|pending| matches!(pending.state, State::Ready(_)))
    }
}
