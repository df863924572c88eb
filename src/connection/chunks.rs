//! The plan of a message, and its inverse.
//!
//! A sender asks here how a message travels: inline in one Send, or moved by RDMA because it does not fit
//! (RFC 8166 §3.5, "Long" messages). A receiver of a Call asks here which RDMA Reads make the message whole, and gets
//! the pieces in stream order once they are done.
//!
//! Sizes count the transport header too: what must fit the inline threshold is header and message together. No
//! item is reduced here (every program is one without a binding), but chunks of a peer are accepted at any Position.
//! RFC 8166 §3.4 and §3.5 are the text to read first.
#![forbid(unsafe_code)]

use crate::error::{Error, Kind};
use crate::memory::{Buf, Region, Sink};
use crate::wire::v1::{self, Lists};
use crate::wire::{Position, ReadSegment, Segment};

/// Most segments that we put into one chunk.
///
/// RFC 8267 §4.3: servers need not accept more than 16, and Linux accepts no more.
pub const SEGMENTS_MAX: usize = 16;

/// The four fixed words of a header, bytes.
const FIXED_LEN: usize = 16;

/// A header without chunks, bytes.
pub const HEADER_MIN: usize = 28;

/// Encoded length of the three lists of a Call with a Reply chunk of `reply_segments` and nothing else.
fn lists_len(reply_segments: usize) -> usize {
    HEADER_MIN - FIXED_LEN + if reply_segments > 0 { 4 + 16 * reply_segments } else { 0 }
}

/// How a Call travels, decided before memory is exposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// The message itself goes in a Position-Zero Read chunk of this many segments (0: inline).
    pub read_segments: usize,
    /// Segments of the Reply chunk that is offered (0: none).
    pub reply_segments: usize,
}

/// Chooses how a Call of `message` bytes travels whose reply may reach `max_reply` bytes.
///
/// `send` is the largest Send that the peer takes, `receive` the largest that it may send us, `max_segment` the
/// largest segment that our device exposes; all in bytes.
///
/// # Errors
/// `TooLong` when the message or the reply needs more than [`SEGMENTS_MAX`] segments.
pub fn plan_call(
    message: usize,
    max_reply: usize,
    send: usize,
    receive: usize,
    max_segment: usize,
) -> Result<CallPlan, Error> {
    // RFC 8166 §4.3.3: "A Requester MUST provide a Reply chunk whenever the maximum possible size of the RPC Reply
    // message's Transport and Payload streams is larger than the inline threshold for messages from Responder to
    // Requester."
    let reply_segments = if max_reply.saturating_add(HEADER_MIN) > receive {
        segments(max_reply, max_segment, "reply")?
    } else {
        0
    };
    let lists = lists_len(reply_segments);
    // RFC 8166 §3.5.3: "If there are no DDP-eligible data items in the Payload stream, or the Payload stream is still
    // too large after it has been reduced, the RDMA transport MUST use RDMA Read or Write operations to convey the
    // Payload stream itself." The threshold bounds the whole Send, the transport header included (§3.3.2).
    let read_segments =
        if FIXED_LEN + lists + message > send { segments(message, max_segment, "call")? } else { 0 };
    Ok(CallPlan { read_segments, reply_segments })
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

/// The ranges into which `len` bytes are cut for `n` segments of at most `max_segment` bytes.
pub fn cut(len: usize, max_segment: usize) -> impl Iterator<Item = (usize, usize)> {
    let max = max_segment.max(1);
    (0..len).step_by(max).map(move |at| (at, (len - at).min(max)))
}

/// How a Reply travels.
#[derive(Debug)]
pub struct ReplyPlan {
    /// The lists of the reply's header, lengths filled in.
    pub lists: Lists,
    /// RDMA Writes to do before the Send: byte range of the message, target. Empty: the message goes inline.
    pub writes: Vec<(usize, Segment)>,
}

/// Chooses how a reply of `message` bytes travels to a requester that offered `writes` and `reply` in its Call.
///
/// # Errors
/// `TooLong`, naming both sizes, when it fits neither inline nor into the Reply chunk.
pub fn plan_reply(
    message: usize,
    writes: &[Vec<Segment>],
    reply: Option<&[Segment]>,
    send: usize,
) -> Result<ReplyPlan, Error> {
    // RFC 8166 §4.3.2.2: "the Responder MUST return this Write chunk as an unused Write chunk"
    // RFC 8166 §4.3.3: "the Responder MUST copy that chunk into the Transport header of the RPC Reply message."
    let unused = |chunk: &[Segment]| chunk.iter().map(|s| Segment { length: 0, ..*s }).collect::<Vec<_>>();
    let mut lists = Lists {
        reads: Vec::new(),
        writes: writes.iter().map(|c| unused(c)).collect(),
        reply: reply.map(unused),
    };
    if v1::header_len(&lists) + message <= send {
        return Ok(ReplyPlan { lists, writes: Vec::new() });
    }
    // RFC 8166 §3.5.3: "If a Reply chunk was provided and the reduced Payload stream is larger than the reply inline
    // threshold, the Responder MUST use the Requester-provided Reply chunk for the reply."
    let Some(offered) = reply else {
        return Err(Error::new(
            Kind::TooLong,
            format!(
                "reply of {message} bytes exceeds the inline threshold of {send}, and the Call offered no Reply chunk"
            ),
        ));
    };
    let room: u64 = offered.iter().map(|s| u64::from(s.length)).sum();
    if message as u64 > room {
        return Err(Error::new(
            Kind::TooLong,
            format!(
                "reply of {message} bytes exceeds the Reply chunk of {room}; \
                 raise CLSET_RDMA_MAXREPLY or RPCRDMA_MAX_REPLY at the client"
            ),
        ));
    }
    let mut at = 0;
    let mut work = Vec::new();
    let mut returned = Vec::with_capacity(offered.len());
    for segment in offered {
        let length = (message - at).min(segment.length as usize);
        let filled = Segment { length: length as u32, ..*segment };
        if length > 0 {
            work.push((at, filled));
        }
        returned.push(filled);
        at += length;
    }
    lists.reply = Some(returned);
    if v1::header_len(&lists) > send {
        return Err(Error::new(Kind::TooLong, "the reply's chunk lists alone exceed the inline threshold"));
    }
    Ok(ReplyPlan { lists, writes: work })
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
        // RFC 8166 §3.4.5: "The Responder reconstructs the transferred chunk data by concatenating the contents of
        // each RDMA segment, in list order": the sort is stable.
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

    /// Whether every chunk finds its place in the stream.
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

    /// The whole message in stream order. `inline` is the payload of the Send, `staging` what the Reads filled.
    pub fn assemble(&self, inline: Region, mut staging: Buf) -> Vec<Region> {
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
        let mut message = Vec::with_capacity(2 * rest.len() + 1);
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
        message
    }
}

/// The message in a Reply chunk: `returned` holds the lengths that the responder wrote.
///
/// # Errors
/// `Peer` when the responder returned other segments than were offered, or more bytes than they have.
pub fn reply_in_chunk(
    offered: &[(Segment, usize)],
    returned: impl Iterator<Item = Segment>,
    area: Sink,
) -> Result<Vec<Region>, Error> {
    let bad = |what: &'static str| Error::new(Kind::Peer, what);
    let mut ranges = Vec::with_capacity(offered.len());
    let mut given = offered.iter();
    let mut end = 0;
    for segment in returned {
        let (offer, at) =
            given.next().ok_or_else(|| bad("the reply returns more segments than were offered"))?;
        if segment.handle != offer.handle || segment.offset != offer.offset {
            return Err(bad("the reply returns a segment that was not offered"));
        }
        if segment.length > offer.length {
            return Err(bad("the reply claims more bytes than the Reply chunk has"));
        }
        if segment.length > 0 {
            ranges.push((*at, segment.length as usize));
            end = end.max(at + segment.length as usize);
        }
    }
    if given.next().is_some() {
        return Err(bad("the reply returns fewer segments than were offered"));
    }
    let buf = area.into_buf(end).map_err(|_| bad("the device still holds the Reply chunk"))?;
    let region = buf.freeze();
    Ok(ranges.into_iter().map(|(at, len)| region.slice(at, len)).collect())
}

#[cfg(test)]
mod tests {
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
        let message = assembly.assemble(Region::copy_from(inline).unwrap(), staging);
        Ok(message.iter().flat_map(|r| r.to_vec()).collect())
    }

    #[test]
    fn a_call_at_the_threshold_goes_inline_and_one_byte_more_goes_long() {
        let fits = plan_call(4096 - 28, 4096 - 28, 4096, 4096, 1 << 30).unwrap();
        assert_eq!(fits, CallPlan { read_segments: 0, reply_segments: 0 });
        let long = plan_call(4096 - 27, 4096 - 28, 4096, 4096, 1 << 30).unwrap();
        assert_eq!(long, CallPlan { read_segments: 1, reply_segments: 0 });
    }

    #[test]
    fn reply_over_inline_threshold_offers_a_reply_chunk_whose_header_counts() {
        let plan = plan_call(4096 - 28, 4096 - 27, 4096, 4096, 1 << 30).unwrap();
        // The Reply chunk needs a count and one segment: 20 bytes more of header push the call out.
        assert_eq!(plan, CallPlan { read_segments: 1, reply_segments: 1 });
        let plan = plan_call(4096 - 48, 4096 - 27, 4096, 4096, 1 << 30).unwrap();
        assert_eq!(plan, CallPlan { read_segments: 0, reply_segments: 1 });
    }

    #[test]
    fn a_long_message_is_cut_into_segments_of_the_device() {
        let plan = plan_call(10_000, 100, 4096, 4096, 3000).unwrap();
        assert_eq!(plan.read_segments, 4);
        assert_eq!(
            cut(10_000, 3000).collect::<Vec<_>>(),
            [(0, 3000), (3000, 3000), (6000, 3000), (9000, 1000)]
        );
        assert_eq!(plan_call(17 * 3000, 100, 4096, 4096, 3000).unwrap_err().kind(), Kind::TooLong);
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

    #[test]
    fn a_reply_fills_the_segments_in_order_and_keeps_their_number() {
        let offered = [segment(1, 5000), segment(2, 5000), segment(3, 5000)];
        let plan = plan_reply(6000, &[vec![segment(9, 77)]], Some(&offered), 4096).unwrap();
        assert_eq!(plan.writes, [(0, segment(1, 5000)), (5000, segment(2, 1000))]);
        assert_eq!(plan.lists.reply, Some(vec![segment(1, 5000), segment(2, 1000), segment(3, 0)]));
        assert_eq!(plan.lists.writes, [vec![segment(9, 0)]]);
    }

    #[test]
    fn a_small_reply_goes_inline_and_returns_the_chunk_unused() {
        let plan = plan_reply(100, &[], Some(&[segment(1, 5000)]), 4096).unwrap();
        assert!(plan.writes.is_empty());
        assert_eq!(plan.lists.reply, Some(vec![segment(1, 0)]));
    }

    #[test]
    fn a_reply_that_fits_nowhere_names_both_sizes_and_the_remedy() {
        let error = plan_reply(6000, &[], Some(&[segment(1, 5000)]), 4096).unwrap_err();
        assert!(error.text().contains("6000") && error.text().contains("5000"), "{error}");
        assert!(error.text().contains("RPCRDMA_MAX_REPLY"), "{error}");
        assert_eq!(plan_reply(6000, &[], None, 4096).unwrap_err().kind(), Kind::TooLong);
    }

    #[test]
    fn a_reply_chunk_returned_wrongly_is_refused() {
        let offered = [(segment(1, 8), 0), (segment(2, 8), 8)];
        let area = || Buf::with_capacity(16).unwrap().into_sink(16);
        let got = |returned: Vec<Segment>| reply_in_chunk(&offered, returned.into_iter(), area());
        assert_eq!(
            got(vec![segment(1, 8), segment(2, 3)]).unwrap().iter().map(|r| r.len()).sum::<usize>(),
            11
        );
        assert!(got(vec![segment(1, 8)]).is_err());
        assert!(got(vec![segment(1, 9), segment(2, 0)]).is_err());
        assert!(got(vec![segment(2, 8), segment(1, 8)]).is_err());
        assert!(got(vec![segment(1, 8), segment(2, 8), segment(3, 0)]).is_err());
    }
}
