//! The plan of a message, and its inverse.
//!
//! A sender asks here how a message travels: inline in one Send; with eligible items taken out of it, to travel in chunks of
//! their own (RFC 8166 §3.4, "reduced"); or moved by RDMA itself because what is left does not fit (§3.5, "Long" messages). A
//! receiver of a Call asks here which RDMA Reads make the message whole, and gets the pieces in stream order once they are done;
//! a receiver of a Reply puts what came in Write chunks back into its place.
//!
//! Sizes count the transport header too: header and message together must fit the inline threshold. The caller says which items
//! are eligible (`binding`). Read RFC 8166 §3.4, §3.5 and §4.3 first.
#![forbid(unsafe_code)]

use std::ops::Range;

use smallvec::SmallVec;

use crate::binding::{Item, Placed};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Message, Region, Regions, Sink};
use crate::stats::{self, Counter};
use crate::wire::header::header_len;
use crate::wire::lists::{Chunk, Lists};
use crate::wire::{Position, ReadSegment, Segment};

/// Most segments that we put into one chunk.
///
/// RFC 8267 §4.3: servers need not accept more than 16, and Linux accepts no more.
pub const SEGMENTS_MAX: usize = 16;

/// Most normal Read chunks in one Call, and most chunks in a Write list.
pub const CHUNKS_MAX: usize = 16;

/// Lent parts below this length are copied where they would make a chunk of several segments: a registration costs
/// more than so short a copy.
const PIECE_MIN: usize = 8 << 10;

/// Bytes of a header without chunks.
pub fn header_min(version: u32) -> usize {
    header_len(version, &Lists::default())
}

/// Bytes of one segment in a Read list, and in an array.
const READ_SEGMENT: usize = 24;
const SEGMENT: usize = 16;

/// Bytes that a Reply chunk of one segment adds to a header.
pub const REPLY_CHUNK: usize = 4 + SEGMENT;

/// What a Call needs besides its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Needs<'a> {
    /// Eligible arguments, in stream order.
    pub items: &'a [Item],
    /// Most bytes of each eligible result.
    pub results: &'a [usize],
    /// Most bytes of the reply, from its XID on, with nothing reduced.
    pub max_reply: usize,
    /// The responder is known to put eligible results into Write chunks; otherwise there must be another way for them too.
    pub reduces: bool,
}

/// What connection, device and peer allow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Version of the header.
    pub version: u32,
    /// Largest Send that the peer takes, bytes.
    pub send: usize,
    /// Largest Send that the peer makes, bytes.
    pub receive: usize,
    /// Largest segment that our device exposes, bytes.
    pub max_segment: usize,
    /// Allows more than one normal Read chunk, one beside a Position-Zero Read chunk, and more than one Write chunk. Linux
    /// servers refuse or corrupt such Calls, and RFC 8267 §4.3 asks no server to accept them.
    pub many: bool,
}

/// How a Call travels, decided before memory is exposed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CallPlan {
    /// Items that travel in Read chunks of their own, in stream order.
    pub reduced: Vec<Item>,
    /// What is left of the message travels in a Position-Zero Read chunk; otherwise it follows the header.
    pub long: bool,
    /// Bytes of each Write chunk that is offered.
    pub writes: Vec<usize>,
    /// Bytes of the Reply chunk that is offered (0: none).
    pub reply: usize,
    /// Bytes of lent memory that were copied into the message for this plan.
    pub copied: usize,
}

impl CallPlan {
    /// Whether the Call goes without chunks, as nearly every short one does.
    pub fn is_inline(&self) -> bool {
        self.reduced.is_empty() && !self.long && self.writes.is_empty() && self.reply == 0
    }
}

/// Chooses how a Call travels. Lent parts that will not be exposed are copied in.
///
/// # Errors
/// `TooLong` when the message or the reply needs more than [`SEGMENTS_MAX`] segments.
pub fn plan_call(message: &mut Message, needs: Needs<'_>, limits: Limits) -> Result<CallPlan, Error> {
    let Limits { send, max_segment, many, .. } = limits;
    let (mut plan, mut header) = plan_reply_room(needs, limits)?;
    let total = message.len();
    if header + total <= send {
        plan.copied = message.copy_in(|_, _| true);
        return Ok(plan);
    }
    // Eligible arguments are taken out, the largest first, until the rest fits.
    let items = there(needs.items, message.len());
    let mut items: Vec<Item> = items.iter().filter(|item| item.length > 0).copied().collect();
    items.sort_by_key(|item| std::cmp::Reverse(item.length));
    items.truncate(if many { CHUNKS_MAX } else { 1 });
    let mut rest = total;
    for item in items {
        let n = pieces(message, std::slice::from_ref(&item.range()), max_segment);
        if header + rest <= send || n > SEGMENTS_MAX {
            break;
        }
        header += READ_SEGMENT * n;
        rest -= without_pad(&item, total).len();
        plan.reduced.push(item);
    }
    if header + rest > send {
        // RFC 8166 §3.5.3: "If there are no DDP-eligible data items in the Payload stream, or the Payload stream is still
        // too large after it has been reduced, the RDMA transport MUST use RDMA Read or Write operations to convey the
        // Payload stream itself."
        plan.long = true;
        plan.reduced.retain(|item| many && item.length >= PIECE_MIN);
    }
    plan.reduced.sort_by_key(|item| item.position);
    let reduced = &plan.reduced;
    let stays = |at: usize| !reduced.iter().any(|i| i.range().contains(&at));
    let long = plan.long;
    plan.copied = message.copy_in(|at, len| stays(at) && (!long || len < PIECE_MIN));
    if long {
        let rest = rest_of(total, reduced);
        segments(rest.iter().map(Range::len).sum(), max_segment, "call")?;
        while pieces(message, &rest, max_segment) > SEGMENTS_MAX {
            let shortest = message.lent().filter(|(at, _)| stays(*at)).map(|(_, len)| len).min();
            let Some(shortest) = shortest else { break };
            plan.copied += message.copy_in(|at, len| stays(at) && len <= shortest);
        }
    }
    Ok(plan)
}

/// Where the reply of a Call will go, and how long that makes the Call's header.
fn plan_reply_room(needs: Needs<'_>, limits: Limits) -> Result<(CallPlan, usize), Error> {
    let Limits { version, receive, max_segment, many, .. } = limits;
    let (mut plan, mut header) = (CallPlan::default(), header_min(version));
    // RFC 8166 §4.3.3: "A Requester MUST provide a Reply chunk whenever the maximum possible size of the RPC Reply
    // message's Transport and Payload streams is larger than the inline threshold for messages from Responder to
    // Requester." Where all of it fits inline, no result needs a Write chunk either.
    if needs.max_reply.saturating_add(header_min(version)) <= receive {
        return Ok((plan, header));
    }
    let mut placed = 0usize;
    for (at, most) in needs.results.iter().enumerate().take(if many { CHUNKS_MAX } else { 1 }) {
        // RFC 8166 §4.3.2.2: "the Requester MUST provision each Write chunk so it can be filled with the largest
        // DDP-eligible data item that can be placed in it": a result that does not exist leaves its chunk to those after it.
        let largest = needs.results[at..].iter().max().copied().unwrap_or(0);
        let Ok(n) = segments(largest, max_segment, "result") else { break };
        header += 8 + SEGMENT * n;
        plan.writes.push(largest);
        placed = placed.saturating_add(most.saturating_add(3) & !3);
    }
    plan.reply = if !needs.reduces { needs.max_reply } else { needs.max_reply.saturating_sub(placed) };
    if needs.reduces && header.saturating_add(plan.reply) <= receive {
        plan.reply = 0;
    }
    if plan.reply > 0 {
        header += 4 + SEGMENT * segments(plan.reply, max_segment, "reply")?;
    }
    Ok((plan, header))
}

/// The bytes that leave the stream with an item: its own and its pad.
///
/// RFC 8166 §3.4.4.4: "When a variable-length XDR data item is reduced, the sender MUST remove XDR roundup padding for
/// that data item from the Payload stream".
fn without_pad(item: &Item, total: usize) -> Range<usize> {
    item.position..item.position.saturating_add(item.length).next_multiple_of(4).min(total)
}

/// The items that a message of `total` bytes contains in full. It ends inside an item where a binding is wrong about its program,
/// or where an xdrproc encodes a count but fewer bytes.
fn there(items: &[Item], total: usize) -> &[Item] {
    &items[..items.partition_point(|item| item.range().end <= total)]
}

/// Ranges of a message, in order: nearly always one.
pub type Ranges = SmallVec<[Range<usize>; 1]>;

/// What is left of a stream of `total` bytes without the items (in stream order) and their pads.
pub fn rest_of(total: usize, reduced: &[Item]) -> Ranges {
    let mut rest = Ranges::new();
    let mut next = 0;
    for gone in reduced.iter().map(|item| without_pad(item, total)) {
        if next < gone.start {
            rest.push(next..gone.start);
        }
        next = gone.end;
    }
    if next < total {
        rest.push(next..total);
    }
    rest
}

/// Segments that the ranges of a message need.
fn pieces(message: &Message, ranges: &[Range<usize>], max_segment: usize) -> usize {
    let cut = |len: usize| len.div_ceil(max_segment.max(1));
    ranges.iter().flat_map(|range| message.pieces(range.clone())).map(cut).sum()
}

fn segments(bytes: usize, max_segment: usize, what: &str) -> Result<usize, Error> {
    let n = bytes.div_ceil(max_segment.max(1));
    if n > SEGMENTS_MAX {
        return Err(Error::new(
            Kind::TooLong,
            format!(
                "a {what} of {bytes} bytes needs {n} segments of {max_segment} bytes; at most {SEGMENTS_MAX} are sent"
            ),
        ));
    }
    Ok(n.max(1))
}

/// Offsets and lengths of the parts into which `len` bytes are cut for segments of at most `max_segment` bytes.
pub fn cut(len: usize, max_segment: usize) -> impl Iterator<Item = (usize, usize)> {
    let max = max_segment.max(1);
    (0..len).step_by(max).map(move |at| (at, (len - at).min(max)))
}

/// One RDMA Write: ranges of the message go, one after the other, to `to`.
#[derive(Debug, PartialEq, Eq)]
pub struct Push {
    /// Ranges of the stream.
    pub from: Vec<Range<usize>>,
    /// The destination, and how many bytes.
    pub to: Segment,
}

/// How a Reply travels.
#[derive(Debug)]
pub struct ReplyPlan {
    /// The lists of the reply's header, lengths filled in.
    pub lists: Lists,
    /// RDMA Writes to do before the Send.
    pub pushes: Vec<Push>,
    /// What follows the header in the Send; `None` when it went into the Reply chunk.
    pub inline: Option<Ranges>,
    /// Bytes of lent memory that were copied into the message for this plan.
    pub copied: usize,
}

/// Chooses how a reply travels to a requester that offered `writes` and `reply` in its Call.
///
/// `version` is that of the Call. `items` are the eligible results in the message, in stream order. `send` is the largest Send
/// that the requester takes and `max_transfer` the most that our device moves by one Write, both in bytes. Lent parts that go
/// inline are copied in.
///
/// # Errors
/// `TooLong`, naming both sizes, when an item does not fit its Write chunk, or the rest fits neither inline nor into the
/// Reply chunk.
pub fn plan_reply(
    version: u32,
    message: &mut Message,
    items: &[Item],
    writes: &[Chunk],
    reply: Option<&[Segment]>,
    send: usize,
    max_transfer: usize,
) -> Result<ReplyPlan, Error> {
    // RFC 8166 §4.3.2.2: "the Responder MUST return this Write chunk as an unused Write chunk"
    // RFC 8166 §4.3.3: "the Responder MUST copy that chunk into the Transport header of the RPC Reply message."
    let unused = |chunk: &[Segment]| chunk.iter().map(|s| Segment { length: 0, ..*s }).collect::<Chunk>();
    let mut lists = Lists {
        reads: Vec::new(),
        writes: writes.iter().map(|c| unused(c)).collect(),
        reply: reply.map(unused),
    };
    let total = message.len();
    let mut pushes = Vec::new();
    let mut reduced = Vec::new();
    // RFC 8166 §4.3.2.1: "the Responder fills in each Write chunk with one DDP-eligible result until there are either no
    // more DDP-eligible results or no more Write chunks." A result that does not exist leaves its chunk to the next one.
    for ((item, offered), returned) in there(items, total).iter().zip(writes).zip(&mut lists.writes) {
        // RFC 8166 §4.3.2.3: "The Responder MUST return the corresponding result data item inline and MUST return an empty
        // Write chunk in that Write list position in the RPC Reply message."
        if offered.is_empty() {
            continue;
        }
        let place = room(offered);
        if item.length as u64 > place {
            let text = format!(
                "a result of {} bytes exceeds the Write chunk of {place} that is there for it",
                item.length
            );
            return Err(Error::new(Kind::TooLong, text));
        }
        // RFC 8166 §3.4.6.2: "A Responder MUST NOT write XDR roundup padding into a Write chunk, even if the Requester
        // made space available for it."
        *returned = fill(offered, std::slice::from_ref(&item.range()), max_transfer, &mut pushes);
        reduced.push(*item);
    }
    let rest = rest_of(total, &reduced);
    let left: usize = rest.iter().map(Range::len).sum();
    let stays = |at: usize| !reduced.iter().any(|i| i.range().contains(&at));
    if header_len(version, &lists) + left <= send {
        let copied = message.copy_in(|at, _| stays(at));
        return Ok(ReplyPlan { lists, pushes, inline: Some(rest), copied });
    }
    // RFC 8166 §3.5.3: "If a Reply chunk was provided and the reduced Payload stream is larger than the reply inline
    // threshold, the Responder MUST use the Requester-provided Reply chunk for the reply."
    let Some(offered) = reply else {
        return Err(Error::new(
            Kind::TooLong,
            format!(
                "reply of {left} bytes exceeds the inline threshold of {send}, and the Call offered no Reply chunk"
            ),
        ));
    };
    let place = room(offered);
    if left as u64 > place {
        return Err(Error::new(
            Kind::TooLong,
            format!(
                "reply of {left} bytes exceeds the Reply chunk of {place}; \
                 raise CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY at the client"
            ),
        ));
    }
    let copied = message.copy_in(|at, len| stays(at) && len < PIECE_MIN);
    lists.reply = Some(fill(offered, &rest, max_transfer, &mut pushes));
    if header_len(version, &lists) > send {
        return Err(Error::new(Kind::TooLong, "the reply's chunk lists alone exceed the inline threshold"));
    }
    Ok(ReplyPlan { lists, pushes, inline: None, copied })
}

fn room(chunk: &[Segment]) -> u64 {
    chunk.iter().map(|s| u64::from(s.length)).sum()
}

/// Spreads ranges over the segments of a chunk, in array order; returns the segments with the lengths used.
///
/// RFC 8166 §3.4.6: "filling the chunk contiguously and in segment array order until that data item has been completely
/// written to the Requester. The Responder MUST copy the segment count and all segments".
fn fill(offered: &[Segment], ranges: &[Range<usize>], max: usize, pushes: &mut Vec<Push>) -> Chunk {
    let mut ranges = ranges.iter().filter(|range| !range.is_empty()).cloned();
    let mut current = ranges.next();
    let mut returned = Chunk::with_capacity(offered.len());
    for segment in offered {
        let mut used = 0usize;
        while let Some(range) = current.clone().filter(|_| used < segment.length as usize) {
            let n = range.len().min(segment.length as usize - used);
            let part = range.start..range.start + n;
            push(segment, used, part, max, pushes);
            used += n;
            current = if n < range.len() { Some(range.start + n..range.end) } else { ranges.next() };
        }
        returned.push(Segment { length: used as u32, ..*segment });
    }
    returned
}

/// Adds the Writes of one range into a segment, from its byte `at` on; short ranges join the Write before them.
fn push(segment: &Segment, at: usize, range: Range<usize>, max: usize, pushes: &mut Vec<Push>) {
    if at > 0
        && let Some(last) = pushes.last_mut()
        && last.to.length as usize + range.len() <= max
    {
        last.to.length += range.len() as u32;
        last.from.push(range);
        return;
    }
    for (done, length) in cut(range.len(), max) {
        // An offset is opaque: one that wraps is the peer's mistake, found by its device.
        let offset = segment.offset.wrapping_add((at + done) as u64);
        let to = Segment { length: length as u32, offset, ..*segment };
        let from = range.start + done..range.start + done + length;
        pushes.push(Push { from: Vec::from([from]), to });
    }
}

/// A Call whose bytes lie partly in the requester's memory: what to read, and how the pieces fit together.
#[derive(Debug, Default)]
pub struct Assembly {
    /// Chunks in Position order: Position, offset in the staging memory, bytes without pad.
    chunks: Vec<(usize, usize, usize)>,
    /// Bytes of staging memory needed, pads included.
    pub staging: usize,
}

/// One RDMA Read of an assembly: `from` goes to byte `at` of the staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Offset in the staging memory.
    pub at: usize,
    /// What to read.
    pub from: Segment,
}

impl Assembly {
    /// Groups the segments of a Read list by Position and lays them out.
    ///
    /// `inline` is the length of the payload that came in the Send (0 for RDMA_NOMSG).
    ///
    /// # Errors
    /// `TooLong` when the whole message exceeds `limit`; `Peer` when the chunks overlap, leave holes, or do not start
    /// at Position zero although nothing came inline. Both are answered with ERR_CHUNK.
    pub fn new(
        reads: impl Iterator<Item = ReadSegment>,
        inline: usize,
        limit: usize,
    ) -> Result<(Assembly, Vec<Pull>), Error> {
        // RFC 8166 §3.4.5: "The Responder reconstructs the transferred chunk data by concatenating the contents of each RDMA
        // segment, in list order": hence a stable sort.
        let mut segments: Vec<ReadSegment> = reads.collect();
        segments.sort_by_key(|s| s.position);
        let mut chunks: Vec<(usize, usize, usize)> = Vec::new();
        let mut pulls = Vec::with_capacity(segments.len());
        let mut staging = 0usize;
        for ReadSegment { position: Position(position), target } in segments {
            let position = position as usize;
            let length = target.length as usize;
            match chunks.last_mut() {
                Some((last, _, bytes)) if *last == position => *bytes += length,
                _ => {
                    // RFC 8166 §3.4.5.2: a chunk without its XDR pad is padded by the responder; one that contains
                    // the pad has a length that needs none.
                    staging = staging.next_multiple_of(4);
                    chunks.push((position, staging, length));
                }
            }
            if length > 0 {
                pulls.push(Pull { at: staging, from: target });
            }
            staging += length;
            if staging + inline > limit {
                return Err(Error::new(
                    Kind::TooLong,
                    format!("call of more than {limit} bytes; raise RPCRDMA_MAX_CALL at the server"),
                ));
            }
        }
        let assembly = Assembly { chunks, staging: staging.next_multiple_of(4) };
        assembly.check(inline)?;
        Ok((assembly, pulls))
    }

    /// Checks that every chunk has a place in the stream.
    fn check(&self, inline: usize) -> Result<(), Error> {
        let bad = |what: &'static str| Err(Error::new(Kind::Peer, what));
        let (base, rest) = match self.chunks.split_first() {
            // RFC 8166 §3.5.3: the Position-Zero Read chunk of a Long Call is the payload itself.
            Some(((0, _, bytes), rest)) => {
                if inline > 0 {
                    return bad("a Position-Zero Read chunk beside an inline payload");
                }
                (*bytes, rest)
            }
            _ if inline == 0 => return bad("no payload: neither inline nor at Position zero"),
            _ => (inline, &self.chunks[..]),
        };
        let (mut stream, mut used) = (0usize, 0usize);
        for (position, _, bytes) in rest {
            let Some(gap) = position.checked_sub(stream) else {
                return bad("Read chunks overlap");
            };
            used += gap;
            if used > base {
                return bad("a Read chunk lies beyond the end of the payload");
            }
            stream = position + bytes.next_multiple_of(4);
        }
        Ok(())
    }

    /// The normal Read chunks: Position and bytes of each, in stream order.
    pub fn normal(&self) -> impl Iterator<Item = (usize, usize)> {
        self.chunks
            .iter()
            .filter(|(position, ..)| *position > 0)
            .map(|(position, _, bytes)| (*position, *bytes))
    }

    /// The whole message in stream order, and the first normal chunk by itself, without pad.
    ///
    /// `inline` is the payload of the Send, `staging` what the Reads filled.
    pub fn assemble(&self, inline: Region, mut staging: Buf) -> (Regions, Option<Region>) {
        staging.set_len(self.staging);
        for (_, at, bytes) in &self.chunks {
            // RFC 8166 §3.4.5.2: the responder supplies the pad that the chunk does not contain.
            staging[at + bytes..(at + bytes).next_multiple_of(4)].fill(0);
        }
        let staging = staging.freeze();
        let (base, rest) = match self.chunks.split_first() {
            Some(((0, at, bytes), rest)) => (staging.slice(*at, *bytes), rest),
            _ => (inline, &self.chunks[..]),
        };
        let mut message = Regions::with_capacity(2 * rest.len() + 1);
        let (mut stream, mut used) = (0, 0);
        for (position, at, bytes) in rest {
            let gap = position - stream;
            if gap > 0 {
                message.push(base.slice(used, gap));
            }
            used += gap;
            let padded = bytes.next_multiple_of(4);
            if padded > 0 {
                message.push(staging.slice(*at, padded));
            }
            stream = position + padded;
        }
        if used < base.len() {
            message.push(base.slice(used, base.len() - used));
        }
        (message, rest.first().map(|(_, at, bytes)| staging.slice(*at, *bytes)))
    }
}

/// Memory that a responder writes: the Reply chunk or a Write chunk.
pub struct Area {
    /// The memory.
    pub sink: Sink,
    /// Whether the responder may still write it when its handles are no longer valid.
    pub open: bool,
    /// The segments offered, with their offsets in the memory: nearly always one.
    pub offered: SmallVec<[(Segment, usize); 1]>,
}

impl Area {
    /// The bytes in it, in stream order: `returned` holds the lengths that the responder wrote. No segment at all stands for an
    /// unused chunk. The handles must no longer be valid.
    ///
    /// # Errors
    /// `Peer` when the responder returned other segments than were offered, or more bytes than they have.
    pub fn take(self, returned: impl Iterator<Item = Segment>) -> Result<Regions, Error> {
        let bad = |what: &'static str| Error::new(Kind::Peer, what);
        let mut ranges = SmallVec::<[_; 1]>::with_capacity(self.offered.len());
        let mut given = self.offered.iter();
        let mut end = 0;
        let mut any = false;
        for segment in returned {
            any = true;
            let (offer, at) =
                given.next().ok_or_else(|| bad("the reply returns more segments than were offered"))?;
            if segment.handle != offer.handle || segment.offset != offer.offset {
                return Err(bad("the reply returns a segment that was not offered"));
            }
            if segment.length > offer.length {
                return Err(bad("the reply claims more bytes than the chunk has"));
            }
            if segment.length > 0 {
                ranges.push((*at, segment.length as usize));
                end = end.max(at + segment.length as usize);
            }
        }
        if any && given.next().is_some() {
            return Err(bad("the reply returns fewer segments than were offered"));
        }
        if self.open {
            // RFC 8166 §8.1.3: the peer can no longer change what the program looks at.
            let copied: usize = ranges.iter().map(|(_, len)| len).sum();
            stats::add(Counter::BytesCopied, copied as u64);
            return ranges.into_iter().map(|(at, len)| Ok(self.sink.copy(at, len)?)).collect();
        }
        let region = self.sink.into_region(end).map_err(|_| bad("the device still holds the chunk"))?;
        Ok(ranges.into_iter().map(|(at, len)| region.slice(at, len)).collect())
    }
}

/// Puts results that came in Write chunks back into the stream that they were taken out of.
///
/// `placed` is in stream order; `chunks` holds the pieces of each Write chunk; `pad` has at least three zero bytes.
pub fn restore(stream: Regions, placed: &[Placed], chunks: &[Regions], pad: &Region) -> Regions {
    let mut message = Regions::with_capacity(stream.len() + 3 * placed.len());
    let mut stream = stream.into_iter();
    let (mut piece, mut used, mut at) = (stream.next(), 0, 0);
    let mut copy_until = |end: usize, message: &mut Regions| {
        while let Some(current) = &piece
            && at < end
        {
            let n = (current.len() - used).min(end - at);
            if n > 0 {
                message.push(current.slice(used, n));
            }
            at += n;
            used += n;
            if used == current.len() {
                (piece, used) = (stream.next(), 0);
            }
        }
    };
    for Placed { chunk, at, length } in placed {
        copy_until(*at, &mut message);
        message.extend(chunks.get(*chunk).into_iter().flatten().cloned());
        let missing = length.next_multiple_of(4) - length;
        if missing > 0 {
            message.push(pad.slice(0, missing));
        }
    }
    copy_until(usize::MAX, &mut message);
    message
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::wire::Handle;

    fn segment(handle: u32, length: u32) -> Segment {
        Segment { handle: Handle(handle), length, offset: 0 }
    }

    fn read(position: u32, length: u32) -> ReadSegment {
        ReadSegment { position: Position(position), target: segment(position + 1, length) }
    }

    fn assemble(reads: &[ReadSegment], inline: &[u8]) -> Result<Vec<u8>, Error> {
        let (assembly, pulls) = Assembly::new(reads.iter().copied(), inline.len(), 1 << 20)?;
        let mut staging = Buf::with_capacity(assembly.staging.max(1)).unwrap();
        staging.set_len(assembly.staging);
        staging.fill(0xee);
        for pull in pulls {
            let byte = pull.from.handle.0 as u8;
            staging[pull.at..pull.at + pull.from.length as usize].fill(byte);
        }
        let (message, _) = assembly.assemble(Region::copy_from(inline).unwrap(), staging);
        Ok(message.iter().flat_map(|r| r.to_vec()).collect())
    }

    fn message(len: usize, lent: &[(usize, usize)]) -> Message {
        let bytes = |len: usize| (0..len).map(|at| at as u8).collect::<Vec<u8>>();
        let mut body = Buf::with_capacity(len).unwrap();
        body.extend(&bytes(len)).unwrap();
        let part = |&(at, len)| (at, Region::copy_from(&bytes(len)).unwrap());
        Message::new(body, lent.iter().map(part).collect())
    }

    fn item(position: usize, length: usize) -> Item {
        Item { position, length }
    }

    const LIMITS: Limits =
        Limits { version: 1, send: 4096, receive: 4096, max_segment: 1 << 30, many: false };
    const MANY: Limits = Limits { many: true, ..LIMITS };

    fn needs(max_reply: usize) -> Needs<'static> {
        Needs { items: &[], results: &[], max_reply, reduces: true }
    }

    fn call(message: &mut Message, needs: Needs<'_>, limits: Limits) -> CallPlan {
        plan_call(message, needs, limits).unwrap()
    }

    #[test]
    fn a_call_at_the_threshold_goes_inline_and_one_byte_more_goes_long() {
        // rule 12, rule 13, rule 89, rule 94: header and message together are compared with the threshold.
        let plan = call(&mut message(4096 - 28, &[]), needs(4096 - 28), LIMITS);
        assert_eq!(plan, CallPlan::default());
        let plan = call(&mut message(4096 - 27, &[]), needs(4096 - 28), LIMITS);
        assert_eq!(plan, CallPlan { long: true, ..CallPlan::default() });
    }

    #[test]
    fn reply_over_inline_threshold_offers_a_reply_chunk_whose_header_counts() {
        // The Reply chunk needs a count and one segment: with 20 bytes more of header the call does not fit inline.
        let plan = call(&mut message(4096 - 28, &[]), needs(4096 - 27), LIMITS);
        assert_eq!(plan, CallPlan { long: true, reply: 4069, ..CallPlan::default() });
        let plan = call(&mut message(4096 - 48, &[]), needs(4096 - 27), LIMITS);
        assert_eq!(plan, CallPlan { reply: 4069, ..CallPlan::default() });
    }

    #[test]
    fn a_long_message_is_cut_into_segments_of_the_device() {
        let small = Limits { max_segment: 3000, ..LIMITS };
        assert!(call(&mut message(10_000, &[]), needs(100), small).long);
        assert_eq!(
            cut(10_000, 3000).collect::<Vec<_>>(),
            [(0, 3000), (3000, 3000), (6000, 3000), (9000, 1000)]
        );
        let error = plan_call(&mut message(17 * 3000, &[]), needs(100), small).unwrap_err();
        assert_eq!(error.kind(), Kind::TooLong);
    }

    #[test]
    fn an_eligible_argument_is_taken_out_when_the_call_does_not_fit() {
        // rule 88
        let items = [item(100, 5001)];
        let plan = call(&mut message(5200, &[(100, 5001)]), Needs { items: &items, ..needs(100) }, LIMITS);
        assert_eq!(plan, CallPlan { reduced: items.to_vec(), ..CallPlan::default() });
        // rule 52: its three bytes of pad go with it.
        assert_eq!(rest_of(5200, &plan.reduced)[..], [0..100, 5104..5200]);
        // What fits inline stays there, and is copied.
        let items = [item(100, 3001)];
        let plan = call(&mut message(3200, &[(100, 3001)]), Needs { items: &items, ..needs(100) }, LIMITS);
        assert_eq!(plan, CallPlan { copied: 3001, ..CallPlan::default() });
    }

    #[test]
    fn a_call_for_strangers_has_one_read_chunk_at_most() {
        let items = [item(100, 5000), item(5104, 6000)];
        let needs = Needs { items: &items, ..needs(100) };
        // Without the larger one the rest is still too long.
        let lent = [(100, 5000), (5104, 6000)];
        let mut stranger = message(11_200, &lent);
        let plan = call(&mut stranger, needs, LIMITS);
        assert_eq!(plan, CallPlan { long: true, copied: 11_000, ..CallPlan::default() });
        let plan = call(&mut message(11_200, &lent), needs, MANY);
        assert_eq!(plan, CallPlan { reduced: items.to_vec(), ..CallPlan::default() });
        // One is enough: the larger.
        let items = [item(100, 2000), item(2104, 6000)];
        let plan = call(&mut message(8200, &[]), Needs { items: &items, ..needs }, MANY);
        assert_eq!(plan, CallPlan { reduced: vec![items[1]], ..CallPlan::default() });
    }

    #[test]
    fn a_long_call_among_our_own_carries_its_eligible_items_in_chunks_of_their_own() {
        // rule 20, rule 41
        let items = [item(100, 9000), item(20_000, 4000)];
        let plan = call(&mut message(40_000, &[]), Needs { items: &items, ..needs(100) }, MANY);
        assert_eq!(plan, CallPlan { reduced: vec![items[0]], long: true, ..CallPlan::default() });
    }

    #[test]
    fn short_lent_parts_of_a_long_call_are_copied_and_at_most_sixteen_segments_are_left() {
        let mut lent: Vec<(usize, usize)> = (0..12).map(|i| (i * 20_000 + 100, 10_000 + i * 4)).collect();
        lent.insert(1, (11_000, 8191));
        let mut long = message(12 * 20_000, &lent);
        let plan = call(&mut long, needs(100), LIMITS);
        assert!(plan.long && plan.reduced.is_empty());
        // The short one, then the shortest of the long ones: each is a segment of its own and separates its neighbours.
        assert_eq!(plan.copied, 8191 + 10_000 + 10_004 + 10_008 + 10_012 + 10_016);
        assert_eq!(long.lent().count(), 7);
        assert!(long.pieces(0..long.len()).count() <= SEGMENTS_MAX);
    }

    #[test]
    fn write_chunks_are_offered_for_results_that_do_not_fit_inline() {
        let results = [8193, 5000];
        let all = Needs { results: &results, ..needs(20_000) };
        // rule 73, rule 77, rule 94: as large as the result may be, no pad; and no Reply chunk where the rest fits inline.
        let plan = call(&mut message(100, &[]), Needs { max_reply: 8196 + 200, ..all }, LIMITS);
        assert_eq!(plan, CallPlan { writes: vec![8193], ..CallPlan::default() });
        // The rest does not fit: a Reply chunk for the rest.
        assert_eq!(call(&mut message(100, &[]), all, LIMITS).reply, 20_000 - 8196);
        let plan = call(&mut message(100, &[]), all, MANY);
        assert_eq!((plan.writes, plan.reply), (vec![8193, 5000], 20_000 - 8196 - 5000));
        // rule 83: the second result goes into the first chunk if there is no first result.
        let plan = call(&mut message(100, &[]), Needs { results: &[5000, 8193], ..all }, MANY);
        assert_eq!((plan.writes, plan.reply), (vec![8193, 8193], 20_000 - 8196 - 5000));
        // A responder that may not know the binding gets room for all of it.
        let plan = call(&mut message(100, &[]), Needs { reduces: false, ..all }, LIMITS);
        assert_eq!((plan.writes, plan.reply), (vec![8193], 20_000));
        // All of the reply fits inline.
        let plan = call(&mut message(100, &[]), Needs { results: &[3000], ..needs(3500) }, LIMITS);
        assert_eq!(plan, CallPlan::default());
    }

    #[test]
    fn the_planned_header_is_as_long_as_the_one_that_is_sent() {
        for max_segment in [700usize, 1000, 1 << 30] {
            let limits = Limits { max_segment, ..MANY };
            let (items, results) = ([item(100, 2001), item(3000, 1400)], [1500, 3]);
            for send in 1024..1400 {
                let limits = Limits { send, receive: 1024, ..limits };
                let needs = Needs { items: &items, results: &results, ..needs(4000) };
                let mut message = message(4500, &[]);
                let plan = call(&mut message, needs, limits);
                let segment = segment(1, 1);
                let array = |len: usize| -> Chunk { smallvec![segment; len.div_ceil(max_segment).max(1)] };
                let cut = |item: &Item| item.length.div_ceil(max_segment);
                let reads: usize = plan.reduced.iter().map(cut).sum();
                let lists = Lists {
                    reads: vec![read(4, 1); reads],
                    writes: plan.writes.iter().map(|most| array(*most)).collect(),
                    reply: (plan.reply > 0).then(|| array(plan.reply)),
                };
                let rest: usize = rest_of(4500, &plan.reduced).iter().map(Range::len).sum();
                assert_eq!(
                    plan.long,
                    header_len(1, &lists) + rest > send || plan.reduced.is_empty(),
                    "{plan:?}"
                );
            }
        }
    }

    #[test]
    fn position_zero_chunk_of_several_segments_is_the_message() {
        assert_eq!(assemble(&[read(0, 3), read(0, 2)], b"").unwrap(), [1, 1, 1, 1, 1]);
    }

    #[test]
    fn chunks_are_inserted_at_their_unreduced_position_with_pads_supplied() {
        // abcd | 5 bytes at 4 + pad 3 | efgh | 4 bytes at 16 | ijkl
        let message = assemble(&[read(16, 4), read(4, 5)], b"abcdefghijkl").unwrap();
        assert_eq!(message, b"abcd\x05\x05\x05\x05\x05\0\0\0efgh\x11\x11\x11\x11ijkl");
    }

    #[test]
    fn a_chunk_that_contains_its_pad_gets_no_second_one() {
        assert_eq!(
            assemble(&[read(4, 8)], b"abcdefgh").unwrap(),
            b"abcd\x05\x05\x05\x05\x05\x05\x05\x05efgh"
        );
    }

    #[test]
    fn a_long_call_may_carry_further_chunks() {
        assert_eq!(assemble(&[read(4, 4), read(0, 8)], b"").unwrap(), [1, 1, 1, 1, 5, 5, 5, 5, 1, 1, 1, 1]);
    }

    #[test]
    fn chunks_without_a_place_are_refused() {
        for (reads, inline) in [
            (vec![read(4, 8), read(8, 4)], &b"abcdefgh"[..]),
            (vec![read(12, 4)], &b"abcdefgh"[..]),
            (vec![read(4, 4)], &b""[..]),
            (vec![read(0, 4)], &b"abcd"[..]),
            (vec![], &b""[..]),
        ] {
            assert_eq!(assemble(&reads, inline).unwrap_err().kind(), Kind::Peer, "{reads:?}");
        }
    }

    #[test]
    fn absurdly_long_chunks_are_refused_before_memory_is_taken() {
        let reads = [read(0, u32::MAX), read(0, u32::MAX)];
        assert_eq!(Assembly::new(reads.into_iter(), 0, 1 << 20).unwrap_err().kind(), Kind::TooLong);
    }

    fn reply(
        len: usize,
        items: &[Item],
        writes: &[Chunk],
        reply: Option<&[Segment]>,
    ) -> Result<ReplyPlan, Error> {
        plan_reply(1, &mut message(len, &[]), items, writes, reply, 4096, 1 << 20)
    }

    fn to(handle: u32, offset: u64, length: u32, from: &[Range<usize>]) -> Push {
        Push { from: from.to_vec(), to: Segment { handle: Handle(handle), length, offset } }
    }

    #[test]
    fn a_reply_fills_the_segments_in_order_and_keeps_their_number() {
        // rule 74, rule 75, rule 79, rule 92, rule 97
        let offered = [segment(1, 5000), segment(2, 5000), segment(3, 5000)];
        let plan = reply(6000, &[], &[smallvec![segment(9, 77)]], Some(&offered)).unwrap();
        assert_eq!(plan.pushes, [to(1, 0, 5000, &[0..5000]), to(2, 0, 1000, &[5000..6000])]);
        assert_eq!(plan.lists.reply, Some(smallvec![segment(1, 5000), segment(2, 1000), segment(3, 0)]));
        assert_eq!(plan.lists.writes, [[segment(9, 0)].into()]);
        assert_eq!(plan.inline, None);
    }

    #[test]
    fn a_small_reply_goes_inline_and_returns_the_chunk_unused() {
        // rule 96
        let plan = reply(100, &[], &[], Some(&[segment(1, 5000)])).unwrap();
        assert_eq!((plan.pushes, plan.inline), (vec![], Some(smallvec![0..100])));
        assert_eq!(plan.lists.reply, Some(smallvec![segment(1, 0)]));
    }

    #[test]
    fn a_reply_that_fits_nowhere_names_both_sizes_and_the_remedy() {
        let error = reply(6000, &[], &[], Some(&[segment(1, 5000)])).unwrap_err();
        assert!(error.text().contains("6000") && error.text().contains("5000"), "{error}");
        assert!(error.text().contains("RPCRDMA_MAX_REPLY"), "{error}");
        assert_eq!(reply(6000, &[], &[], None).unwrap_err().kind(), Kind::TooLong);
    }

    #[test]
    fn eligible_results_go_into_write_chunks_without_their_pads() {
        // rule 76, rule 78, rule 81: however short they are.
        let plan =
            reply(200, &[item(100, 5)], &[smallvec![segment(1, 2), segment(2, 9), segment(3, 9)]], None)
                .unwrap();
        assert_eq!(plan.pushes, [to(1, 0, 2, &[100..102]), to(2, 0, 3, &[102..105])]);
        let used: Chunk = smallvec![segment(1, 2), segment(2, 3), segment(3, 0)];
        assert_eq!(plan.lists.writes, [used]);
        assert_eq!(plan.inline, Some(smallvec![0..100, 108..200]));
    }

    #[test]
    fn the_nth_result_takes_the_nth_chunk_until_one_side_runs_out() {
        // rule 82, rule 84
        let items = [item(40, 4), item(60, 8), item(80, 12)];
        let chunks = [smallvec![segment(1, 100)], smallvec![segment(2, 100)]];
        let plan = reply(100, &items, &chunks, None).unwrap();
        assert_eq!(plan.pushes, [to(1, 0, 4, &[40..44]), to(2, 0, 8, &[60..68])]);
        assert_eq!(plan.inline, Some(smallvec![0..40, 44..60, 68..100]));
        let plan = reply(100, &items[..1], &chunks, None).unwrap();
        assert_eq!(plan.lists.writes, [[segment(1, 4)], [segment(2, 0)]].map(Chunk::from));
        // rule 85: an empty chunk keeps its result inline, and comes back empty.
        let plan = reply(100, &items, &[Chunk::new(), smallvec![segment(2, 100)]], None).unwrap();
        assert_eq!(plan.lists.writes, [Chunk::new(), smallvec![segment(2, 8)]]);
        assert_eq!(plan.inline, Some(smallvec![0..60, 68..100]));
    }

    #[test]
    fn a_result_that_exceeds_its_chunk_is_an_error_that_names_both() {
        let error =
            reply(200, &[item(100, 50)], &[smallvec![segment(1, 20), segment(2, 29)]], None).unwrap_err();
        assert!(error.text().contains("50") && error.text().contains("49"), "{error}");
    }

    #[test]
    fn a_reduced_reply_that_is_still_too_long_uses_both_chunks() {
        // rule 20
        let chunk = [segment(5, 3000), segment(6, 9000)];
        let plan = reply(16_000, &[item(2000, 6001)], &[smallvec![segment(1, 7000)]], Some(&chunk)).unwrap();
        let want = [
            to(1, 0, 6001, &[2000..8001]),
            to(5, 0, 3000, &[0..2000, 8004..9004]),
            to(6, 0, 6996, &[9004..16_000]),
        ];
        assert_eq!((&plan.pushes[..], plan.inline), (&want[..], None));
        assert_eq!(plan.lists.reply, Some(smallvec![segment(5, 3000), segment(6, 6996)]));
    }

    #[test]
    fn writes_are_cut_to_what_the_device_moves_at_a_time() {
        let plan =
            plan_reply(1, &mut message(10_000, &[]), &[], &[], Some(&[segment(1, 20_000)]), 4096, 4000)
                .unwrap();
        let want = [
            to(1, 0, 4000, &[0..4000]),
            to(1, 4000, 4000, &[4000..8000]),
            to(1, 8000, 2000, &[8000..10_000]),
        ];
        assert_eq!(plan.pushes, want);
    }

    #[test]
    fn results_that_go_inline_are_copied_and_those_that_are_pushed_are_not() {
        let mut message = message(5000, &[(100, 600), (1000, 2000)]);
        let chunk = [smallvec![segment(1, 5000)]];
        let plan = plan_reply(1, &mut message, &[item(1000, 2000)], &chunk, None, 4096, 1 << 20).unwrap();
        assert_eq!((plan.copied, message.lent().collect::<Vec<_>>()), (600, vec![(1000, 2000)]));
    }

    fn area(offered: &[Segment]) -> Area {
        let mut at = 0;
        let mut place = |segment: &Segment| {
            at += segment.length as usize;
            (*segment, at - segment.length as usize)
        };
        let offered = offered.iter().map(&mut place).collect();
        let sink = Buf::with_capacity(at).unwrap().into_sink(at);
        assert!(sink.place(0, &(0..at as u8).collect::<Vec<u8>>()));
        Area { sink, open: false, offered }
    }

    #[test]
    fn a_chunk_returned_wrongly_is_refused() {
        let got = |returned: Vec<Segment>| {
            let pieces = area(&[segment(1, 8), segment(2, 8)]).take(returned.into_iter())?;
            Ok::<Vec<u8>, Error>(pieces.iter().flat_map(|piece| piece.to_vec()).collect())
        };
        assert_eq!(got(vec![segment(1, 8), segment(2, 3)]).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(got(vec![segment(1, 2), segment(2, 3)]).unwrap(), [0, 1, 8, 9, 10]);
        // rule 86: a chunk that comes back empty was not used.
        assert!(got(vec![]).unwrap().is_empty());
        assert!(got(vec![segment(1, 8)]).is_err());
        assert!(got(vec![segment(1, 9), segment(2, 0)]).is_err());
        assert!(got(vec![segment(2, 8), segment(1, 8)]).is_err());
        assert!(got(vec![segment(1, 8), segment(2, 8), segment(3, 0)]).is_err());
    }

    #[test]
    fn a_chunk_that_the_responder_may_write_still_is_copied() {
        let area = Area { open: true, ..area(&[segment(1, 8), segment(2, 8)]) };
        let device = area.sink.clone();
        let pieces = area.take([segment(1, 8), segment(2, 3)].into_iter()).unwrap();
        assert!(device.place(0, &[99; 16]));
        let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.to_vec()).collect();
        assert_eq!(bytes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    }

    #[test]
    fn placed_results_go_back_to_where_they_were_taken_out() {
        let region = |text: &[u8]| Region::copy_from(text).unwrap();
        let stream = || smallvec![region(b"abcd"), region(b"efghijkl")];
        let chunks = [smallvec![region(b"123"), region(b"45")], smallvec![], smallvec![region(b"6789")]];
        let placed = |chunk, at, length| Placed { chunk, at, length };
        let got = |placed: &[Placed]| -> Vec<u8> {
            let message = restore(stream(), placed, &chunks, &region(&[0; 3]));
            message.iter().flat_map(|piece| piece.to_vec()).collect()
        };
        assert_eq!(got(&[placed(0, 4, 5), placed(2, 8, 4)]), *b"abcd12345\0\0\0efgh6789ijkl");
        assert_eq!(got(&[placed(0, 12, 5)]), *b"abcdefghijkl12345\0\0\0");
        assert_eq!(got(&[placed(2, 4, 4), placed(2, 4, 4)]), *b"abcd67896789efghijkl");
        assert_eq!(got(&[]), *b"abcdefghijkl");
    }
}
