//! The requester: the calls of this end, from the plan to their outcome. Its rules are those of the module above.
#![forbid(unsafe_code)]

use std::collections::{TryReserveError, VecDeque};

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::chunks::{self, Area, Limits, Needs};
use super::common::{Common, Handles};
use super::{Expect, Output, RPC_HEADER_MAX, Registrar, Role, Started, first_xid, payload_xid, two};
use crate::binding::{Binding, Head, Origin};
use crate::error::{Error, Kind, os_text};
use crate::log_warn;
use crate::memory::shared::Shown as InOutbox;
use crate::memory::{Message, Payload, Region, Regions, Sink};
use crate::provider::WorkRequest;
use crate::stats::{self, Counter};
use crate::wire::characteristics::Backward;
use crate::wire::header::{Body, Direction, Header, Plain, Proc, RdmaError};
use crate::wire::lists::{ChunkLists, Lists};
use crate::wire::{Handle, Position, ReadSegment, Segment, Xid, v1};

/// How much one-way calls whose credit was given back may keep exposed, in calls and in bytes; one such call always may.
pub(super) const PAST_MAX: usize = 64;
const PAST_BYTES: usize = 16 << 20;

/// Number of later replies after which the chunks of such a call are taken to have been read, where the device cannot tell.
pub(super) const PAST_REPLIES: u64 = 32;

/// The calls of this end.
#[derive(Default)]
pub(super) struct Requester {
    /// Messages other than replies transmitted so far: this orders them, so that a reply tells which earlier ones the peer has
    /// consumed.
    transmitted: u64,
    calls: Table,
    /// Calls without a credit, or without room for their reply, oldest first.
    waiting: VecDeque<Xid>,
    /// Some of these have a credit, but lack room.
    crowded: bool,
    /// One-way calls that have given their credit back, oldest first: the peer may still read what they expose.
    past: VecDeque<Past>,
    /// Replies so far.
    replies: u64,
    shown: Shown,
    /// Chunks of a call that has ended, emptied for the next one.
    spare: Option<Box<Chunks>>,
    /// Bytes of Read chunks of calls that were answered, and of the chunks that their replies returned.
    placed: u64,
}

/// By program and version: what the peer's replies have shown about nonstandard bindings.
type Shown = FxHashMap<(u32, u32), Knowledge>;

/// What a peer's replies have shown about a binding.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    /// It puts eligible results into Write chunks.
    Known,
    /// It left an eligible result out of its Write chunk, or refused the chunks of a Call.
    Unknown,
}

/// A call under way. Nearly every one is sent at once and without chunks: what the others need besides is boxed.
struct Outstanding {
    fate: Fate,
    /// Place in the order of transmission; `None` while it waits for a credit.
    sequence: Option<u64>,
    /// The version in which it was transmitted.
    version: u32,
    bound: Option<Bound>,
    /// The call itself until it is transmitted, if that was not at once.
    waiting: Option<Box<Held>>,
    /// What its header names, if anything.
    chunks: Option<Box<Chunks>>,
}

/// Calls by their XIDs. Nearly always there is one, so the latest is kept beside the hash table of the others.
#[derive(Default)]
struct Table {
    latest: Option<(Xid, Outstanding)>,
    others: FxHashMap<Xid, Outstanding>,
}

impl Table {
    fn len(&self) -> usize {
        self.others.len() + usize::from(self.latest.is_some())
    }

    fn is_empty(&self) -> bool {
        self.latest.is_none() && self.others.is_empty()
    }

    /// Makes room for one more, whichever call goes to the table then.
    fn try_reserve(&mut self) -> Result<(), TryReserveError> {
        match self.latest {
            Some(_) => self.others.try_reserve(1),
            None => Ok(()),
        }
    }

    /// Adds a call that is not there yet.
    fn insert(&mut self, xid: Xid, call: Outstanding) {
        if let Some((before, call)) = self.latest.replace((xid, call)) {
            self.others.insert(before, call);
        }
    }

    fn get(&self, xid: Xid) -> Option<&Outstanding> {
        match &self.latest {
            Some((latest, call)) if *latest == xid => Some(call),
            _ if self.others.is_empty() => None,
            _ => self.others.get(&xid),
        }
    }

    fn get_mut(&mut self, xid: Xid) -> Option<&mut Outstanding> {
        match &mut self.latest {
            Some((latest, call)) if *latest == xid => Some(call),
            _ => self.others.get_mut(&xid),
        }
    }

    fn remove(&mut self, xid: Xid) -> Option<Outstanding> {
        match self.latest.take_if(|(latest, _)| *latest == xid) {
            Some((_, call)) => Some(call),
            None => self.others.remove(&xid),
        }
    }

    #[inline]
    fn remove_if(&mut self, xid: Xid, may: impl Fn(&Outstanding) -> bool) -> Option<Outstanding> {
        match &mut self.latest {
            Some((latest, call)) if *latest == xid => {
                if !may(call) {
                    return None;
                }
                self.latest.take().map(|(_, call)| call)
            }
            _ if self.others.get(&xid).is_some_and(may) => self.others.remove(&xid),
            _ => None,
        }
    }

    fn iter(&self) -> impl Iterator<Item = (Xid, &Outstanding)> + Clone {
        let latest = self.latest.iter().map(|(xid, call)| (*xid, call));
        latest.chain(self.others.iter().map(|(xid, call)| (*xid, call)))
    }

    fn drain(&mut self) -> impl Iterator<Item = (Xid, Outstanding)> {
        self.latest.take().into_iter().chain(self.others.drain())
    }
}

/// A call that waits for a credit, or for room.
struct Held {
    message: Message,
    expect: Expect,
    /// Bytes of Reply and Write chunks for which there was no room when last tried.
    lacks: usize,
}

/// The chunks of a call.
#[derive(Default)]
struct Chunks {
    handles: Handles,
    /// Bytes in its Read chunks.
    pulled: usize,
    writes: Vec<Area>,
    reply: Option<Area>,
}

/// A one-way call whose credit was given back.
struct Past {
    xid: Xid,
    handles: Handles,
    /// Bytes behind the handles: copies of our own.
    bytes: usize,
    /// [`Requester::replies`] when the credit was given back.
    since: u64,
}

/// The binding by which a Call was planned.
struct Bound {
    program: u32,
    version: u32,
    binding: Binding,
    /// The maximum reply length comes from the binding, not from the caller.
    bounds: bool,
}

/// The result of an attempt to transmit a call.
enum Attempt {
    Sent(Regions),
    Held(Box<Held>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Awaited,
    OneWay,
    Orphan,
}

impl Requester {
    /// See the field.
    pub(super) fn placed(&self) -> u64 {
        self.placed
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Whether anyone waits for a reply or a credit.
    pub(super) fn is_awaiting(&self) -> bool {
        self.has_waiting() || self.calls.iter().any(|(_, call)| call.fate == Fate::Awaited)
    }

    /// Whether calls wait for a credit or for room.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether calls that have a credit wait for room.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// The place in the order of transmission of one more message that is not a reply.
    pub(super) fn next_sequence(&mut self) -> u64 {
        self.transmitted += 1;
        self.transmitted
    }

    /// Whether a call of this XID names this handle.
    pub(super) fn names(&self, xid: Xid, handle: Handle) -> bool {
        self.calls.get(xid).is_some_and(|call| call.handles().contains(&handle))
    }

    /// Calls that have not ended.
    pub(super) fn calls(&self) -> usize {
        self.calls.len()
    }

    /// Whether something with this XID is under way.
    pub(super) fn knows(&self, xid: Xid) -> bool {
        self.calls.get(xid).is_some() || self.past.iter().any(|call| call.xid == xid)
    }

    /// Takes back the calls that wait for a credit, for another connection.
    pub(super) fn take_waiting(&mut self) -> Vec<(Xid, Message, Expect)> {
        let waiting = std::mem::take(&mut self.waiting);
        let mut taken = Vec::with_capacity(waiting.len());
        for xid in waiting {
            if let Some(held) = self.calls.remove(xid).and_then(|call| call.waiting) {
                taken.push((xid, held.message, held.expect));
            }
        }
        taken
    }

    /// Why a call that has a credit waits for room, if it does.
    pub(super) fn lacks_room(&self, xid: Xid, common: &Common) -> Option<String> {
        let lacks = self.calls.get(xid)?.lacks();
        (lacks > 0 && common.credits_left() > 0)
            .then(|| format!("no room for a reply of {lacks} bytes: {}", common.memory.crowd()))
    }

    /// Whether the call was handed to the device.
    pub(super) fn transmitted(&self, xid: Xid) -> bool {
        self.calls.get(xid).is_some_and(|c| c.sequence.is_some())
    }

    /// Transmits a call at once, as nearly every short one can be: nothing has to be planned, no other call waits before it, and
    /// a reply is expected. Does what `call` would do, but returns the Send.
    pub(super) fn start(
        &mut self,
        xid: Xid,
        message: Message,
        expect: &Expect,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Started {
        let quiet = self.waiting.is_empty() && self.past.is_empty() && common.output.is_empty();
        let free =
            quiet && common.life.is_open() && common.credits_left() > 0 && self.calls.get(xid).is_none();
        let mut call = Outstanding::new(Fate::Awaited);
        call.version = common.version().unwrap_or(v1::VERSION);
        let plain = !matches!(expect, Expect::Nothing)
            && first_xid(message.body()) == Some(xid)
            && !common.characteristics.holds(xid);
        let room = call.plain_room(&message, expect, registrar.max_segment(), common);
        let room = match room.filter(|_| free && plain) {
            Some(room) if (room == 0 || common.memory.has_room(room)) && self.make_room(common) => room,
            _ => return Started::Not(message),
        };
        let spare = if room > 0 { self.spare.take() } else { None };
        match call.send_plain((xid, message), room, spare, common, registrar) {
            Ok(gather) => {
                self.transmitted += 1;
                call.sequence = Some(self.transmitted);
                common.window.take();
                self.calls.insert(xid, call);
                self.crowded = false;
                Started::Sent(gather)
            }
            Err(error) => {
                call.release(common, registrar);
                common.output.push_back(Output::Done { xid, outcome: Err(error) });
                Started::Failed
            }
        }
    }

    /// Makes room for one more call, and for the ends of all calls.
    fn make_room(&mut self, common: &mut Common) -> bool {
        // With many calls this takes more memory than the reserve has. When the connection ends, all calls end at once.
        let all = self.calls.len() + 1;
        self.calls.try_reserve().and_then(|()| common.output.try_reserve(all)).is_ok()
    }

    /// See [`super::Connection::call`].
    pub(super) fn call(
        &mut self,
        xid: Xid,
        message: Message,
        expect: Expect,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<(), Error> {
        if let Some(error) = common.life.closed() {
            return Err(Error::new(Kind::NotSent, error.text().to_owned()));
        }
        if self.knows(xid) || common.characteristics.holds(xid) {
            return Err(Error::new(Kind::Invalid, format!("a call with XID {xid} is under way")));
        }
        // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
        if first_xid(message.body()) != Some(xid) {
            return Err(Error::new(Kind::Invalid, format!("the call does not begin with its XID {xid}")));
        }
        if !self.make_room(common) {
            return Err(Error::new(Kind::Os(libc::ENOMEM), "no memory for one more call"));
        }
        let fate = if matches!(expect, Expect::Nothing) { Fate::OneWay } else { Fate::Awaited };
        let mut call = Outstanding::new(fate);
        // Nearly always there is a credit, and no other call waits for one: this one goes at once.
        let first = self.waiting.is_empty() && common.credits_left() > 0 && common.life.is_open();
        self.crowded &= !first;
        let held = match first {
            true => {
                let order = (&mut self.transmitted, &self.shown);
                call.try_send(xid, (message, expect), order, false, common, registrar)
            }
            false => Ok(Some(Box::new(Held { message, expect, lacks: 0 }))),
        };
        match held {
            Ok(None) => {
                self.calls.insert(xid, call);
            }
            Ok(held) => {
                call.waiting = held;
                self.calls.insert(xid, call);
                self.waiting.push_back(xid);
                self.crowded |= first;
                if !first {
                    self.transmit_waiting(common, registrar);
                }
            }
            Err(error) => common.output.push_back(Output::Done { xid, outcome: Err(error) }),
        }
        Ok(())
    }

    /// See [`super::Connection::abandon`].
    pub(super) fn abandon(
        &mut self,
        xid: Xid,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        let Some(call) = self.calls.get_mut(xid) else { return };
        if call.sequence.is_none() {
            self.calls.remove(xid);
            self.waiting.retain(|w| *w != xid);
        } else if call.fate == Fate::Awaited {
            // Its credit stays with it. RFC 8166 §8.1.4 has a requester "keep the number of concurrent RPC transactions at or
            // under the number of credits granted per connection", and at the responder this call still is one.
            call.fate = Fate::Orphan;
            common.window.abandon();
            // What the device cannot let go of is bounded by the credits, and takes no room from other calls.
            let Some(chunks) = &mut call.chunks else { return };
            chunks.writes.iter().chain(&chunks.reply).for_each(|area| area.sink.uncount());
            (chunks.writes, chunks.reply) = (Vec::new(), None);
            for handle in &chunks.handles {
                if let Err(error) = registrar.detach(*handle) {
                    common.close(error);
                }
            }
        }
    }

    /// Transmits calls that have waited, as far as credits and room allow.
    #[inline]
    pub(super) fn transmit_waiting(
        &mut self,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        if self.has_waiting() {
            self.transmit_some(common, registrar);
        } else {
            self.crowded = false;
        }
    }

    #[cold]
    fn transmit_some(&mut self, common: &mut Common, registrar: &mut (impl Registrar + ?Sized)) {
        // RFC 8166 §3.3.1: "A Requester MUST NOT send unacknowledged requests in excess of the Responder's granted
        // credit limit."
        let mut next = 0;
        self.crowded = false;
        while common.credits_left() > 0 && common.life.is_open() {
            let Some(xid) = self.waiting.get(next).copied() else { return };
            // Calls that lack room keep their order; those that need none go past them.
            let Some(call) = self.calls.get_mut(xid) else {
                self.waiting.remove(next);
                continue;
            };
            let Some(held) = call.waiting.take_if(|held| !self.crowded || held.lacks == 0) else {
                next += 1;
                continue;
            };
            let Held { message, expect, .. } = *held;
            let order = (&mut self.transmitted, &self.shown);
            match call.try_send(xid, (message, expect), order, self.crowded, common, registrar) {
                Ok(None) => {}
                Ok(held) => {
                    call.waiting = held;
                    self.crowded = true;
                    next += 1;
                    continue;
                }
                Err(error) => {
                    self.calls.remove(xid);
                    common.output.push_back(Output::Done { xid, outcome: Err(error) });
                }
            }
            self.waiting.remove(next);
        }
    }

    /// Ends a call that a plain reply of Version One answers, if it has no chunks or its Reply chunk was not used, and nothing
    /// else follows, which is nearly always so. Does what `handle_reply` and `transmit_waiting` would do. Otherwise returns
    /// false, and nothing has changed. `invalidated`: the handle of ours that the reply invalidated.
    pub(super) fn take_reply(
        &mut self,
        reply: &Plain<'_>,
        invalidated: Option<Handle>,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> bool {
        let used = reply.reply().is_some_and(|segment| segment.length > 0);
        let plain = |call: &Outstanding| {
            let sent = call.sequence.is_some() && call.version == v1::VERSION;
            let names = |handle| call.handles() == [handle];
            sent && call.fate == Fate::Awaited
                && call.bound.is_none()
                && call.chunks.as_ref().is_none_or(|chunks| chunks.are_plain())
                && invalidated.is_none_or(names)
        };
        let quiet = self.waiting.is_empty() && self.past.is_empty() && common.window.abandoned() == 0;
        if used || !quiet {
            return false;
        }
        let Some(mut call) = self.calls.remove_if(reply.xid, plain) else { return false };
        common.window.set_granted(reply.credits);
        common.window.give_back(false);
        // RFC 8166 §4.4.1, as in `handle_reply`.
        call.release(common, registrar);
        self.spare = call.chunks.map(|mut chunks| {
            chunks.reply = None;
            chunks
        });
        self.replies += 1;
        self.crowded = false;
        true
    }

    /// A message other than a Call has arrived.
    pub(super) fn handle_reply(
        &mut self,
        message: &Region,
        header: &Header<'_>,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        let xid = header.xid;
        let Some(call) = self.calls.get(xid) else {
            // An answer to a call that asked for none: that call is over.
            if let Some(at) = self.past.iter().position(|call| call.xid == xid)
                && let Some(mut call) = self.past.remove(at)
            {
                common.release(&mut call.handles, registrar);
            }
            return;
        };
        // Every call is answered in the version that it was made in, but an error may come in any version.
        let answers = call.version == header.version || matches!(header.body, Body::Error(_));
        if call.sequence.is_none() || !answers {
            return;
        }
        let outcome = match header.body {
            // RFC 8166 §4.5: "If errors are detected in the RPC-over-RDMA header of an RPC Reply message, a Requester MUST
            // silently discard the message."
            // RFC 8166 §4.3.1: "Responders MUST leave the Read list empty in all replies."
            Body::Msg { chunks, .. } | Body::Nomsg { chunks } if chunks.read_count() > 0 => return,
            Body::Msg { chunks, payload } => {
                let payload = message.slice(message.len() - payload.len(), payload.len());
                // RFC 8166 §4.2.1: "This XID MUST be the same as the XID in the RPC message."
                if first_xid(&payload) != Some(xid) {
                    return;
                }
                Ok((Some(payload), chunks))
            }
            Body::Nomsg { chunks } if chunks.reply().is_none() => return,
            Body::Nomsg { chunks } => Ok((None, chunks)),
            Body::Error(error) => {
                stats::add(Counter::ErrorsReceived, 1);
                Err(error)
            }
            // RFC 8166 §4.6.1: "Requesters MUST silently discard the message." §4.6.2: "Receivers MUST silently
            // discard" RDMA_DONE.
            Body::Msgp | Body::Done | Body::Optional { .. } => return,
        };
        if let Ok((_, lists)) = &outcome
            && (call.pulled() > 0 || !lists.is_empty())
        {
            let returned = lists.writes().chain(lists.reply()).flat_map(|chunk| chunk.iter());
            let returned: u64 = returned.map(|segment| u64::from(segment.length)).sum();
            self.placed = self.placed.wrapping_add(call.pulled() as u64 + returned);
        }
        let Some(mut call) = self.calls.remove(xid) else { return };
        if outcome.is_ok() {
            // RFC 8167 §4.1: "it is not possible for the receiver to tell with certainty whether the header credit value is a
            // request or grant. In such cases, the receiver MUST ignore the header's credit value." An error is such a case.
            common.window.set_granted(header.credits);
        }
        common.window.give_back(call.fate != Fate::Awaited);
        // RFC 8166 §4.4.1: "the Requester must not access these memory regions while the Responder has access to them."
        call.release(common, registrar);
        if let Some(sequence) = call.sequence {
            self.give_back(sequence, common, registrar);
            common.characteristics.replied(sequence);
        }
        let beside = match &outcome {
            Ok((None, lists)) => in_outbox(lists, registrar),
            _ => None,
        };
        // A reply that nobody waits for counts as taken, as far as the peer is concerned.
        if call.fate == Fate::Awaited {
            let outcome = match outcome {
                Ok((inline, lists)) => match beside {
                    Some(shown) => call.take_shown(xid, shown, common),
                    None => self.rebuild(xid, &mut call, inline, &lists, common).map(Payload::from),
                },
                Err(error) => Err(self.explain(error, &call, common)),
            };
            common.output.push_back(Output::Done { xid, outcome });
        }
    }

    /// The RPC reply in stream order: what came inline or in the Reply chunk, with what came in Write chunks.
    fn rebuild(
        &mut self,
        xid: Xid,
        call: &mut Outstanding,
        inline: Option<Region>,
        lists: &ChunkLists<'_>,
        common: &Common,
    ) -> Result<Regions, Error> {
        let stream = match (inline, lists.reply()) {
            (Some(payload), _) => smallvec![payload],
            (None, Some(returned)) => {
                let none = || Error::new(Kind::Peer, "the reply lies in a Reply chunk, but none was offered");
                let area = call.chunks.as_mut().and_then(|chunks| chunks.reply.take());
                let stream = area.ok_or_else(none)?.take(returned.iter())?;
                if payload_xid(&stream) != Some(xid) {
                    let text = format!("the Reply chunk does not hold the reply {xid}");
                    return Err(Error::new(Kind::Peer, text));
                }
                stream
            }
            (None, None) => return Err(Error::new(Kind::Peer, "the reply has no payload")),
        };
        let writes = call.chunks.as_mut().map_or_else(Vec::new, |chunks| std::mem::take(&mut chunks.writes));
        if lists.write_count() > writes.len() {
            return Err(Error::new(Kind::Peer, "the reply returns more Write chunks than were offered"));
        }
        let Some(bound) = call.bound.take().filter(|_| !writes.is_empty()) else { return Ok(stream) };
        // A Write list that does not come back counts as unused: some responders leave it out.
        let mut returned = lists.writes();
        let mut chunks = Vec::with_capacity(writes.len());
        for area in writes {
            chunks.push(area.take(returned.next().into_iter().flat_map(|chunk| chunk.iter()))?);
        }
        let lengths: Vec<Option<usize>> =
            chunks.iter().map(|pieces: &Regions| Some(pieces.iter().map(|p| p.len()).sum())).collect();
        let reduced = {
            let slices: Vec<&[u8]> = stream.iter().map(|piece| &piece[..]).collect();
            // RFC 8166 §6.1: "A Responder reduces a non-DDP-eligible result data item. The Requester MUST terminate the
            // pending RPC transaction and report an appropriate permanent error to the RPC consumer."
            bound.binding.reduced(&slices, &lengths)?
        };
        if reduced.unreduced {
            self.unreduced(&bound)?;
        } else if !reduced.placed.is_empty() {
            self.shown.insert((bound.program, bound.version), Knowledge::Known);
        }
        if reduced.placed.is_empty() {
            return Ok(stream);
        }
        let mut pad = common.memory.header()?;
        pad.extend(&[0; 3])?;
        Ok(chunks::restore(stream, &reduced.placed, &chunks, &pad.freeze()))
    }

    /// The responder did not use a Write chunk for a result that is eligible.
    fn unreduced(&mut self, bound: &Bound) -> Result<(), Error> {
        let Bound { program, version, .. } = bound;
        if bound.binding.origin() == Origin::BuiltIn {
            // RFC 8166 §6.1: "A Responder does not reduce a DDP-eligible result data item into an available Write chunk.
            // The Requester MUST terminate the pending RPC transaction and report an appropriate permanent error to the RPC
            // consumer."
            let text = "the reply has a result outside of the Write chunk that was there for it";
            return Err(Error::new(Kind::Peer, text));
        }
        // A nonstandard binding may be known at our end only. The data has arrived, whichever way it came.
        if self.shown.insert((*program, *version), Knowledge::Unknown) != Some(Knowledge::Unknown) {
            log_warn!(
                "program {program} version {version}: the server has no binding for it; its results come without Write chunks"
            );
        }
        Ok(())
    }

    /// The reply to call `sequence` has arrived: the responder is past the one-way calls before it.
    ///
    /// Nothing else tells that a call without a reply is done, so this frees its credit. But a responder that serves several
    /// requests at a time (Linux) may still be pulling its Read chunks: they stay exposed until that is known to be done.
    fn give_back(&mut self, sequence: u64, common: &mut Common, registrar: &mut (impl Registrar + ?Sized)) {
        self.replies += 1;
        if !self.past.is_empty() {
            self.forget_past(common, registrar);
        }
        if common.window.abandoned() == 0 {
            return;
        }
        let past = |c: &Outstanding| c.fate == Fate::OneWay && c.sequence.is_some_and(|s| s < sequence);
        let mut done: Vec<(u64, Xid)> = (self.calls.iter().filter(|(_, c)| past(c)))
            .map(|(xid, call)| (call.sequence.unwrap_or_default(), xid))
            .collect();
        done.sort_unstable_by_key(|(sequence, _)| *sequence);
        for (_, xid) in done {
            let Some(mut call) = self.calls.remove(xid) else { continue };
            match read_by_peer(call.handles(), registrar) {
                Some(true) => call.release(common, registrar),
                read if self.makes_room(call.pulled(), read.is_none(), common, registrar) => {
                    let Chunks { handles, pulled: bytes, .. } =
                        call.chunks.map_or_else(Chunks::default, |it| *it);
                    self.past.push_back(Past { xid, handles, bytes, since: self.replies });
                }
                _ => {
                    self.calls.insert(xid, call);
                    continue;
                }
            }
            common.window.give_back(true);
        }
    }

    /// Ends the exposures of one-way calls that have been read by now, or are old enough where the device cannot tell.
    fn forget_past(&mut self, common: &mut Common, registrar: &mut (impl Registrar + ?Sized)) {
        let now = self.replies;
        for mut call in std::mem::take(&mut self.past) {
            let old = now - call.since >= PAST_REPLIES;
            if read_by_peer(&call.handles, registrar).unwrap_or(old) {
                common.release(&mut call.handles, registrar);
            } else {
                self.past.push_back(call);
            }
        }
    }

    /// Whether `bytes` more may stay exposed without a credit. `ends_oldest`: the oldest exposures end to make room.
    fn makes_room(
        &mut self,
        bytes: usize,
        ends_oldest: bool,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> bool {
        loop {
            let past = &mut self.past;
            let held: usize = past.iter().map(|call| call.bytes).sum();
            if past.is_empty() || (past.len() < PAST_MAX && held + bytes <= PAST_BYTES) {
                return true;
            }
            match past.pop_front() {
                Some(mut oldest) if ends_oldest => common.release(&mut oldest.handles, registrar),
                oldest => {
                    past.extend(oldest);
                    past.rotate_right(1);
                    return false;
                }
            }
        }
    }

    fn explain(&mut self, error: RdmaError, call: &Outstanding, common: &Common) -> Error {
        let none = Chunks::default();
        let chunks = call.chunks.as_deref().unwrap_or(&none);
        let text = match error {
            RdmaError::Version { low, high } => two::versions_differ(low, high, &call.version.to_string()),
            RdmaError::InvalidOption => String::from("the peer took the call for a message of an extension"),
            RdmaError::BadHeader => {
                let name = error.name(call.version);
                let mut text = format!("the peer answered {name}: it cannot use the chunks of this call");
                let reduced = !chunks.writes.is_empty() || chunks.pulled > 0;
                if let Some(Bound { program, version, binding, .. }) = call.bound.as_ref().filter(|_| reduced)
                    && binding.origin() != Origin::BuiltIn
                {
                    self.shown.insert((*program, *version), Knowledge::Unknown);
                    text += &format!(
                        "; perhaps the peer has no binding for program {program} version {version}, or another one: \
                         further calls do without"
                    );
                }
                let room = match &chunks.reply {
                    Some(area) => {
                        let room: u64 = area.offered.iter().map(|(s, _)| u64::from(s.length)).sum();
                        Some(format!("the Reply chunk of {room} bytes"))
                    }
                    None if chunks.writes.is_empty() => {
                        Some(format!("the inline threshold of {} bytes", common.thresholds().1))
                    }
                    None => None,
                };
                if let Some(room) = room {
                    text += &format!("; its reply probably exceeds {room}");
                    // Tell whoever made the room so small how to make it larger.
                    text += &match call.bound.as_ref().filter(|bound| bound.bounds) {
                        Some(Bound { program, version, .. }) => format!(
                            ", the most that the binding of program {program} version {version} at this end allows for: \
                             is it right?"
                        ),
                        None if common.role == Role::Client => {
                            ": raise CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY".into()
                        }
                        None => {
                            ": raise CLSET_RDMA_MAXREPLY, and let the reverse direction use chunks".into()
                        }
                    };
                }
                if chunks.pulled > 0 {
                    text += "; or the call is longer than it accepts (RPCRDMA_MAX_CALL there)";
                }
                text
            }
        };
        Error::new(Kind::Peer, text)
    }

    /// The connection is gone: every call ends.
    pub(super) fn handle_closed(&mut self, error: &Error, common: &mut Common) {
        self.past.clear();
        for (xid, call) in self.calls.drain() {
            if call.fate == Fate::Awaited || call.sequence.is_none() {
                let kind = if call.sequence.is_some() { Kind::ConnectionLost } else { Kind::NotSent };
                let error = Error::new(kind, error.text().to_owned());
                common.output.push_back(Output::Done { xid, outcome: Err(error) });
            }
        }
        self.waiting.clear();
    }
}

impl Outstanding {
    fn new(fate: Fate) -> Outstanding {
        let (sequence, bound, waiting, chunks) = (None, None, None, None);
        Outstanding { fate, sequence, version: v1::VERSION, bound, waiting, chunks }
    }

    fn handles(&self) -> &[Handle] {
        self.chunks.as_ref().map_or(&[], |chunks| &chunks.handles)
    }

    /// Bytes in its Read chunks.
    fn pulled(&self) -> usize {
        self.chunks.as_ref().map_or(0, |chunks| chunks.pulled)
    }

    /// See [`Held`].
    fn lacks(&self) -> usize {
        self.waiting.as_ref().map_or(0, |held| held.lacks)
    }

    /// Ends what it exposes.
    fn release(&mut self, common: &mut Common, registrar: &mut (impl Registrar + ?Sized)) {
        if let Some(chunks) = &mut self.chunks {
            common.release(&mut chunks.handles, registrar);
        }
    }

    /// The reply that the peer shows instead of writing it into the Reply chunk.
    fn take_shown(&mut self, xid: Xid, shown: InOutbox, common: &Common) -> Result<Payload, Error> {
        let area = self.chunks.as_mut().and_then(|chunks| chunks.reply.take());
        let offered = area.as_ref().map(|area| &area.offered[..]);
        let fits = matches!(offered, Some([(segment, _)])
            if segment.handle.0 == shown.handle() && segment.length as usize >= shown.len());
        if !fits {
            return Err(Error::new(
                Kind::Peer,
                "the reply is shown in the place of a Reply chunk that was not offered",
            ));
        }
        let lost = || {
            Error::new(Kind::Peer, format!("the peer has taken back the reply {xid}, or shows another one"))
        };
        // A page of it, with the header of the reply.
        let (head, rest) = shown.split(common.memory.header()?).ok_or_else(lost)?;
        let pieces: Regions = smallvec![head];
        match payload_xid(&pieces) == Some(xid) {
            true => Ok(Payload { pieces, rest: Some(Box::new(rest)) }),
            false => Err(lost()),
        }
    }

    /// Transmits a call for which there is a credit; or returns it, to wait, where there is no room for its reply.
    ///
    /// # Errors
    /// The call fails, and is over.
    fn try_send(
        &mut self,
        xid: Xid,
        (message, expect): (Message, Expect),
        (order, shown): (&mut u64, &Shown),
        crowded: bool,
        common: &mut Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Option<Box<Held>>, Error> {
        if let Some(error) = too_few_credits(self, common) {
            return Err(error);
        }
        self.version = common.version().unwrap_or(v1::VERSION);
        let attempt = match self.plain_room(&message, &expect, registrar.max_segment(), common) {
            Some(0) => self.send_plain((xid, message), 0, None, common, registrar).map(Attempt::Sent),
            _ => self.send_planned((xid, message, expect), shown, crowded, common, registrar),
        };
        let gather = match attempt {
            Ok(Attempt::Sent(gather)) => gather,
            Ok(Attempt::Held(held)) => return Ok(Some(held)),
            Err(error) => {
                // RFC 8166 §4.5.4: "if a Requester is unable to construct and transmit an RPC Call message, the
                // associated RPC transaction fails immediately."
                self.release(common, registrar);
                return Err(error);
            }
        };
        *order += 1;
        self.sequence = Some(*order);
        common.window.take();
        common.output.push_back(Output::Post(WorkRequest::Send { gather, invalidate: None }));
        if self.fate == Fate::OneWay {
            common.window.abandon();
            common.output.push_back(Output::Done { xid, outcome: Ok(Payload::default()) });
        }
        Ok(None)
    }

    /// Bytes of the Reply chunk of a call that needs no other planning, like nearly every short call of a client: it fits inline,
    /// nothing was lent, and no binding has a say. 0: the reply fits inline too. `None`: the call is for `send_planned`.
    fn plain_room(
        &self,
        message: &Message,
        expect: &Expect,
        max_segment: usize,
        common: &Common,
    ) -> Option<usize> {
        let max = match expect {
            Expect::Reply { max, .. } => *max,
            Expect::Nothing => 0,
        };
        let header = chunks::header_min(self.version);
        let (send, receive) = common.thresholds();
        let (room, header) = match max.saturating_add(header) <= receive {
            true => (0, header),
            false => (max, header + chunks::REPLY_CHUNK),
        };
        let plain = header + message.len() <= send
            && room <= max_segment
            && common.role == Role::Client
            && message.is_whole()
            && common.bindings.leaves_alone(Some(message.body()));
        plain.then_some(room)
    }

    /// The Send of such a call.
    fn send_plain(
        &mut self,
        (xid, message): (Xid, Message),
        room: usize,
        spare: Option<Box<Chunks>>,
        common: &Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Regions, Error> {
        let mut reply = None;
        if room > 0 {
            let chunks = self.chunks.insert(spare.unwrap_or_default());
            reply = chunks.offer_reply(room, common, registrar)?.first().map(|(segment, _)| *segment);
        }
        common.gather_plain((self.version, xid), Direction::Call, reply, message)
    }

    /// Exposes what the plan needs and makes the Send, unless there is no room for the reply.
    #[inline(never)]
    fn send_planned(
        &mut self,
        (xid, mut message, expect): (Xid, Message, Expect),
        shown: &Shown,
        crowded: bool,
        common: &Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Attempt, Error> {
        let max = match &expect {
            Expect::Reply { max, .. } => *max,
            Expect::Nothing => 0,
        };
        let plan = self.plan(&mut message, max, registrar.max_segment(), shown, common)?;
        stats::add(Counter::BytesCopied, plan.copied as u64);
        let needs = plan.reply.saturating_add(plan.writes.iter().sum());
        if needs > 0 && (crowded || !common.memory.has_room(needs)) {
            return Ok(Attempt::Held(Box::new(Held { message, expect, lacks: needs })));
        }
        if plan.is_inline() {
            return self.send_plain((xid, message), 0, None, common, registrar).map(Attempt::Sent);
        }
        let places = match expect {
            Expect::Reply { places, .. } => places,
            Expect::Nothing => Vec::new(),
        };
        let total = message.len();
        let pieces = message.freeze();
        let rest = chunks::rest_of(total, &plan.reduced);

        // Recorded in the call: what was exposed before a failure half-way is released with it.
        let chunks = self.chunks.get_or_insert_default();
        let mut lists = Lists::default();
        let mut expose = |position: usize, source: Region, handles: &mut Handles| -> Result<(), Error> {
            for (at, len) in chunks::cut(source.len(), registrar.max_segment()) {
                let target = registrar.expose_source(source.slice(at, len))?;
                handles.push(target.handle);
                lists.reads.push(ReadSegment { position: Position(position as u32), target });
            }
            Ok(())
        };
        if plan.long {
            // RFC 8166 §3.5.3: "Every RDMA read segment in this chunk MUST contain zero in its Position field."
            for source in rest.iter().flat_map(|range| pieces.gather(range.clone())) {
                expose(0, source, &mut chunks.handles)?;
            }
        }
        for item in &plan.reduced {
            for source in pieces.gather(item.range()) {
                expose(item.position, source, &mut chunks.handles)?;
            }
        }
        chunks.pulled = lists.reads.iter().map(|read| read.target.length as usize).sum();
        let mut places = places.into_iter();
        for most in plan.writes {
            let place = places.next().filter(|place| place.len() >= most);
            let area = chunks.area(most, place, common, registrar)?;
            lists.writes.push(area.offered.iter().map(|(s, _)| *s).collect());
            chunks.writes.push(area);
        }
        if plan.reply > 0 {
            let offered = chunks.offer_reply(plan.reply, common, registrar)?;
            lists.reply = Some(offered.iter().map(|(segment, _)| *segment).collect());
        }
        let proc = if plan.long { Proc::Nomsg } else { Proc::Msg };
        let kind = (proc, Direction::Call);
        let inline = if plan.long { &[] } else { &rest[..] };
        let gather = common.gather((self.version, xid), kind, &lists, pieces, inline)?;
        let (bytes, most) = (gather.iter().map(|piece| piece.len()).sum::<usize>(), common.thresholds().0);
        if bytes > most {
            let text = format!("the call's chunk lists alone exceed the inline threshold of {most} bytes");
            return Err(Error::new(Kind::TooLong, text));
        }
        Ok(Attempt::Sent(gather))
    }

    /// How a call travels, by what is known of its procedure and of the peer.
    fn plan(
        &mut self,
        message: &mut Message,
        max: usize,
        max_segment: usize,
        shown: &Shown,
        common: &Common,
    ) -> Result<chunks::CallPlan, Error> {
        // RFC 8166 §8.2.2.3: "a sender MUST NOT reduce a Payload stream when RPCSEC_GSS integrity or encryption services
        // are in use."
        let bound = Head::names(message.body()).and_then(|[program, version, procedure, _]| {
            let binding = common.bindings.find(program, version, procedure)?;
            Some(Bound { program, version, binding, bounds: false })
        });
        self.bound = bound.filter(|_| Head::of(&[message.body()]).is_some_and(|head| !head.wrapped));
        let shape = self.bound.as_ref().map(|bound| bound.binding.call(&[message.body()]));
        let shown = self.bound.as_ref().and_then(|b| shown.get(&(b.program, b.version)));
        let standard = self.bound.as_ref().is_some_and(|b| b.binding.origin() == Origin::BuiltIn);
        let one_way = self.fate == Fate::OneWay;
        let (items, results) = match &shape {
            Some(shape) if shown != Some(&Knowledge::Unknown) => (&shape.items[..], &shape.results[..]),
            _ => (&[][..], &[][..]),
        };
        let max_reply = match shape.as_ref().and_then(|shape| shape.max_results) {
            Some(bytes) if !one_way => bytes.saturating_add(RPC_HEADER_MAX),
            _ => max,
        };
        if let Some(bound) = &mut self.bound {
            bound.bounds = shape.as_ref().is_some_and(|shape| shape.max_results.is_some());
        }
        let needs = Needs {
            items,
            results: if one_way { &[] } else { results },
            max_reply,
            reduces: standard || shown == Some(&Knowledge::Known),
        };
        let many = common.settings.many_chunks;
        let (send, receive) = common.thresholds();
        let limits = Limits { version: self.version, send, receive, max_segment, many };
        let allowed = match common.characteristics.peer().backward {
            _ if common.role == Role::Client => true,
            _ if self.version == v1::VERSION => common.settings.reverse_chunks,
            Backward::None => {
                let text = "the client has told that it takes no calls back (BRS is NONE)";
                return Err(Error::new(Kind::Peer, text));
            }
            // The draft would have a requester find out. Every Version Two peer takes short messages.
            Backward::Unknown | Backward::SizeLimited => false,
            Backward::General => common.settings.reverse_chunks,
        };
        if allowed {
            return chunks::plan_call(message, needs, limits);
        }
        // RFC 8167 §5.3: "When chunks are not implemented, RPC messages in the reverse direction are always sent using a Short
        // Message". It is for the peer to refuse a reply that does not fit inline.
        let short = chunks::header_min(self.version) + message.len();
        if short > send {
            let text = format!(
                "a call back of {short} bytes, transport header included, exceeds the inline threshold of {send}, and the \
                 reverse direction is limited to short messages; allow chunks with CLSET_RDMA_REVERSE_CHUNKS or \
                 RPCRDMA_REVERSE_CHUNKS if the peer supports them"
            );
            return Err(Error::new(Kind::TooLong, text));
        }
        chunks::plan_call(message, Needs { items: &[], results: &[], max_reply: 0, reduces: true }, limits)
    }
}

impl Chunks {
    /// Whether there is a Reply chunk of one segment, and nothing else.
    fn are_plain(&self) -> bool {
        self.handles.len() == 1 && self.reply.is_some() && self.writes.is_empty() && self.pulled == 0
    }

    /// Exposes memory for a reply of at most `most` bytes. Returns the segments that its Call offers, as in [`Area`].
    fn offer_reply(
        &mut self,
        most: usize,
        common: &Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<&[(Segment, usize)], Error> {
        let area = self.area(most, None, common, registrar)?;
        Ok(&self.reply.insert(area).offered)
    }

    /// Exposes memory for at most `most` bytes of the reply: the program's own, if it gave some.
    fn area(
        &mut self,
        most: usize,
        place: Option<Sink>,
        common: &Common,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<Area, Error> {
        let sink = match place {
            Some(place) => place,
            None => common.memory.reply_area(most).map_err(|error| {
                let text = format!(
                    "no memory for a reply of up to {most} bytes ({}): lower CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY",
                    os_text(&error)
                );
                Error::new(Error::from(error).kind(), text)
            })?,
        };
        let mut offered = SmallVec::new();
        for (at, len) in chunks::cut(most, registrar.max_segment()) {
            let segment = registrar.expose_sink(sink.part(at, len))?;
            self.handles.push(segment.handle);
            offered.push((segment, at));
        }
        Ok(Area { open: common.memory.stays_open(&sink), sink, offered })
    }
}

/// The reply whose results we fetch from the peer when they are decoded, if it is one.
fn in_outbox(lists: &ChunkLists<'_>, registrar: &mut (impl Registrar + ?Sized)) -> Option<InOutbox> {
    let mut returned = lists.reply()?.iter();
    let segment = returned.next().filter(|_| lists.write_count() == 0)?;
    if returned.next().is_none() { registrar.shown(segment) } else { None }
}

/// Why a call without a reply would hold the only credit for ever.
fn too_few_credits(call: &Outstanding, common: &Common) -> Option<Error> {
    if call.fate != Fate::OneWay || !common.window.is_told() || common.window.limit() > 1 {
        return None;
    }
    let setting = match common.role {
        Role::Client => "RPCRDMA_CREDITS",
        Role::Server => "RPCRDMA_REVERSE_CREDITS",
    };
    let text = if common.window.asked() == 1 {
        format!(
            "a call without a reply needs two credits, and this end asks for one: raise {setting} or \
             CLSET_RDMA_CREDITS"
        )
    } else {
        format!("a call without a reply needs two credits, and the peer grants one: raise {setting} there")
    };
    Some(Error::new(Kind::NotSent, text))
}

/// Whether the peer has read all that is behind the handles; `None` when that is not known for one of them.
fn read_by_peer(handles: &[Handle], registrar: &(impl Registrar + ?Sized)) -> Option<bool> {
    handles.iter().try_fold(true, |all, handle| Some(registrar.was_read(*handle)? && all))
}

/// For tests: what is inside.
#[cfg(test)]
impl Requester {
    pub(super) fn waiting(&self) -> &VecDeque<Xid> {
        &self.waiting
    }

    /// Whether the spare chunks hold no memory.
    pub(super) fn holds_no_area(&self) -> bool {
        let kept = |chunks: &Chunks| chunks.reply.is_some() || !chunks.writes.is_empty();
        !self.spare.as_deref().is_some_and(kept)
    }

    /// One-way calls without a credit whose memory is still exposed.
    pub(super) fn past(&self) -> usize {
        self.past.len()
    }

    /// Transmitted calls, and those of them that nobody waits for.
    pub(super) fn counts(&self) -> (usize, usize) {
        let transmitted = self.calls.iter().filter(|(_, call)| call.sequence.is_some());
        (transmitted.clone().count(), transmitted.filter(|(_, call)| call.fate != Fate::Awaited).count())
    }
}
