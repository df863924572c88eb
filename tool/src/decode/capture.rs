//! Captures of iWARP connections (`packets`): TCP streams -> MPA, DDP and RDMAP -> what a log at level wire would tell.
//!
//! A connection is shown as its client sees it: what the client has sent goes out. A stream is put together in order. If
//! bytes are missing, that is reported once the other end has acknowledged them for a while or there is no more room for
//! what follows them, and the next message is looked for after them (`resume`). A wrong CRC is reported, if the connection
//! has CRCs.
//!
//! # Invariants
//! - Whatever a capture contains, no more is kept for a connection than [`WAITING`], one message, and four FPDUs, each way.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::net::SocketAddr;

use rpcrdma::provider::iwarp::ddp::{self, Opcode, ReadRequest};
use rpcrdma::provider::iwarp::mpa::{self, StartFrame, Which};
use rpcrdma::wire::header::{self, Body, Versions};
use rpcrdma::wire::private_data::PrivateData;

use super::log::{self, Event, Level, Line, Message, Segment, Time};
use packets::{Counts, Packets, Part};
use resume::Found;

pub mod packets;
mod resume;

/// Most bytes that wait for earlier ones: in one direction, and on all connections.
const WAITING: usize = 4 << 20;
const ALL_WAITING: usize = 64 << 20;

/// A capture need not have its packets in order: bytes count as missing when this many packets of the other end have
/// acknowledged them.
const ACKNOWLEDGED: u32 = 16;

/// How many bytes after a gap are looked at in all, some again and again, to find the next message before that is given up.
const EFFORT: usize = 256 << 20;

/// Bytes of a message that are kept: its header, and what an RPC message begins with.
const MESSAGE: usize = 256 << 10;

/// Connections that are followed at a time.
#[cfg(not(test))]
const STREAMS: usize = 1 << 16;
#[cfg(test)]
const STREAMS: usize = 64;

/// Tells what a capture contains, in the order of its packets, and returns how many packets there are. `None`: it was not to
/// go on.
///
/// # Errors
/// Of the file.
pub fn read(input: impl Read, mut tell: impl FnMut(Line) -> bool) -> io::Result<Option<u64>> {
    let mut packets = Packets::open(input)?;
    let mut reader = Reader::default();
    loop {
        if !reader.lines.drain(..).all(&mut tell) {
            return Ok(None);
        }
        match packets.next() {
            Ok(Some(part)) => reader.take(part),
            Ok(None) => break,
            // What came before the error is there.
            Err(error) if error.kind() == io::ErrorKind::InvalidData && packets.counts.packets > 0 => {
                reader.say(None, None, error.to_string());
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let counts = packets.counts;
    reader.end(&counts);
    Ok(reader.lines.drain(..).all(&mut tell).then_some(counts.packets))
}

#[derive(Default)]
struct Reader {
    lines: Vec<Line>,
    /// By the two ends, the lower one first.
    streams: HashMap<(SocketAddr, SocketAddr), Stream>,
    count: i32,
    waiting: usize,
    others: u64,
    /// Packets so far.
    heard: u64,
    /// Connections that were given up to make room for others.
    beyond: u64,
}

/// A TCP connection.
struct Stream {
    number: i32,
    client: SocketAddr,
    server: SocketAddr,
    /// What the client has sent, and what the server has sent.
    halves: [Half; 2],
    request: Option<StartFrame>,
    /// Whether both ends have said that there are CRCs.
    crc: bool,
    /// When the last packet came, and which it was.
    last: Option<Time>,
    heard: u64,
    ended: bool,
}

/// One direction.
#[derive(Default)]
struct Half {
    /// The first sequence number, if that is known.
    first: Option<u32>,
    /// The sequence number of the next byte, once one is known.
    next: Option<u32>,
    /// Bytes in order so far.
    position: u64,
    /// What came too early, and when, by position.
    early: BTreeMap<u64, (Option<Time>, Vec<u8>)>,
    early_bytes: usize,
    /// Bytes in order that are not decoded yet.
    pending: Vec<u8>,
    started: bool,
    /// The position where FPDUs begin.
    begins: u64,
    /// Packets that have acknowledged what is missing.
    acknowledged: u32,
    /// How often bytes were missing, and how many in all.
    gaps: u64,
    lost: u64,
    /// Whether the beginning of the next FPDU is being looked for, and how many bytes were looked at for it.
    searching: bool,
    effort: usize,
    /// It was found in the midst of a message, whose rest is skipped.
    amid: bool,
    /// Nothing more is read of it.
    given_up: bool,
    /// The sequence number after its last byte, once its end is known.
    end: Option<u32>,
    message: Vec<u8>,
    message_bytes: u64,
    write: Option<(Option<Time>, Segment)>,
    response_bytes: u64,
}

const CLIENT: usize = 0;
const SERVER: usize = 1;

impl Stream {
    /// Whether a segment that begins a connection is the one that began this connection, seen again.
    fn was_begun_by(&self, first: &Part) -> bool {
        let half = &self.halves[CLIENT];
        let same = match half.first {
            Some(known) => known == first.sequence,
            // The answer to it may have been captured before it.
            None => half.position == 0 && !half.given_up,
        };
        !self.ended && same && first.from == self.client
    }
}

impl Reader {
    fn say(&mut self, at: Option<Time>, stream: Option<i32>, text: String) {
        self.tell(at, stream, Level::Info, Event::Said(text.into()));
    }

    fn tell(&mut self, at: Option<Time>, stream: Option<i32>, level: Level, event: Event) {
        self.lines.push(Line { at, process: 0, level, fd: stream, event });
    }

    fn take(&mut self, part: Part) {
        let key = if part.from < part.to { (part.from, part.to) } else { (part.to, part.from) };
        let anew = part.syn && part.ack.is_none();
        let mut stream = match self.streams.remove(&key) {
            // A client may use the same port again, for example a reserved one, even if the attempt before came to nothing.
            Some(stream) if !anew || stream.was_begun_by(&part) => stream,
            old => {
                if let Some(mut old) = old.filter(|old| !old.ended) {
                    self.finish(&mut old);
                    self.closed(&old, part.at);
                }
                if self.streams.len() >= STREAMS {
                    self.make_room();
                }
                self.count = self.count.saturating_add(1);
                // The end that answers a SYN is the server.
                let (client, server) =
                    if part.syn && part.ack.is_some() { (part.to, part.from) } else { (part.from, part.to) };
                Stream {
                    number: self.count,
                    client,
                    server,
                    halves: Default::default(),
                    request: None,
                    crc: false,
                    last: None,
                    heard: 0,
                    ended: false,
                }
            }
        };
        self.heard += 1;
        stream.heard = self.heard;
        if !stream.ended {
            let which = if part.from == stream.client { CLIENT } else { SERVER };
            self.segment(&mut stream, which, part);
        }
        self.streams.insert(key, stream);
    }

    /// Forgets the connections that have ended and, if that is not enough, a quarter of the others: those that have been
    /// silent for the longest time.
    fn make_room(&mut self) {
        self.streams.retain(|_, stream| !stream.ended);
        if self.streams.len() <= STREAMS / 4 * 3 {
            return;
        }
        let mut heard: Vec<u64> = self.streams.values().map(|stream| stream.heard).collect();
        let (_, oldest, _) = heard.select_nth_unstable(STREAMS / 4);
        let oldest = *oldest;
        let mut silent: Vec<Stream> =
            self.streams.extract_if(|_, stream| stream.heard < oldest).map(|(_, stream)| stream).collect();
        silent.sort_by_key(|stream| stream.number);
        for mut stream in silent {
            self.finish(&mut stream);
            self.beyond += u64::from(stream.request.is_some());
            self.give_up(&mut stream);
        }
    }

    /// A part of a stream, in order or not.
    fn segment(&mut self, stream: &mut Stream, which: usize, part: Part) {
        stream.last = part.at;
        let Part { at, mut sequence, ack, syn, fin, rst, data, .. } = part;
        let length = data.len() as u32;
        let half = &mut stream.halves[which];
        if syn {
            half.first.get_or_insert(sequence);
            sequence = sequence.wrapping_add(1);
            half.next.get_or_insert(sequence);
        }
        if rst {
            self.finish(stream);
            if stream.request.is_some() {
                let who = if which == CLIENT { "client" } else { "server" };
                self.tell(
                    at,
                    Some(stream.number),
                    Level::Info,
                    Event::Closed { why: format!("reset by the {who}").into() },
                );
            }
            self.give_up(stream);
            return;
        }
        if !data.is_empty() {
            self.place(stream, which, at, sequence, data);
        }
        if let Some(ack) = ack {
            self.acknowledge(stream, CLIENT + SERVER - which, ack);
        }
        if fin {
            stream.halves[which].end.get_or_insert(sequence.wrapping_add(length));
        }
        // What comes before an end may be captured after it.
        if stream.halves.iter().all(|half| half.is_whole()) {
            self.finish(stream);
            self.closed(stream, at);
            self.give_up(stream);
        }
    }

    /// Reports the end of a connection that both ends have closed.
    fn closed(&mut self, stream: &Stream, at: Option<Time>) {
        if stream.request.is_some() && stream.halves.iter().all(|half| half.end.is_some()) {
            let why = "both ends have closed it".into();
            self.tell(at, Some(stream.number), Level::Info, Event::Closed { why });
        }
    }

    /// Puts data where it belongs: with what is in order, or with what waits for earlier bytes.
    fn place(&mut self, stream: &mut Stream, which: usize, at: Option<Time>, sequence: u32, data: Vec<u8>) {
        loop {
            let half = &mut stream.halves[which];
            if half.given_up {
                return;
            }
            let next = *half.next.get_or_insert(sequence);
            let ahead = sequence.wrapping_sub(next) as i32;
            let from = half.position.wrapping_add_signed(ahead.into());
            if ahead <= 0 {
                // Some of it may be known already.
                let known = ahead.unsigned_abs() as usize;
                if let Some(new) = data.get(known..).filter(|new| !new.is_empty()) {
                    half.arrived(new);
                    self.understand(stream, which, at);
                }
                return self.catch_up(stream, which);
            }
            if half.early_bytes + cost(&data) > WAITING || self.waiting + cost(&data) > ALL_WAITING {
                let before = half.early.first_key_value().map_or(from, |(first, _)| from.min(*first));
                self.skip(stream, which, before, at);
                continue;
            }
            if half.early.get(&from).is_none_or(|(_, old)| old.len() < data.len()) {
                half.early_bytes += cost(&data);
                self.waiting += cost(&data);
                if let Some((_, old)) = half.early.insert(from, (at, data)) {
                    half.early_bytes -= cost(&old);
                    self.waiting -= cost(&old);
                }
            }
            return;
        }
    }

    /// The other end has received everything before `ack`: what is not here by now will not come.
    fn acknowledge(&mut self, stream: &mut Stream, which: usize, ack: u32) {
        let half = &mut stream.halves[which];
        let Some((&first, _)) = half.early.first_key_value() else { return };
        let is_beyond = half.next.is_some_and(|next| ack.wrapping_sub(next) as i32 > 0);
        half.acknowledged = if is_beyond { half.acknowledged + 1 } else { 0 };
        if half.acknowledged >= ACKNOWLEDGED {
            self.skip(stream, which, first, None);
        }
    }

    /// Takes what has waited and is now in order.
    fn catch_up(&mut self, stream: &mut Stream, which: usize) {
        loop {
            let half = &mut stream.halves[which];
            let Some(entry) = half.early.first_entry().filter(|entry| *entry.key() <= half.position) else {
                return;
            };
            let (from, (at, data)) = entry.remove_entry();
            half.early_bytes -= cost(&data);
            self.waiting -= cost(&data);
            if let Some(new) = data.get((half.position - from) as usize..) {
                half.arrived(new);
                self.understand(stream, which, at);
            }
        }
    }

    /// What comes before position `to` is missing: reports that, and goes on from there.
    fn skip(&mut self, stream: &mut Stream, which: usize, to: u64, at: Option<Time>) {
        let half = &mut stream.halves[which];
        let (bytes, position, first) = (to.saturating_sub(half.position), half.position, half.gaps == 0);
        let at = half.early.first_key_value().and_then(|(_, (at, _))| *at).or(at);
        half.gaps += 1;
        half.lost += bytes;
        let goes_on = half.started;
        if first && stream.request.is_some() && !half.given_up {
            let who = if which == CLIENT { "client" } else { "server" };
            let then = if goes_on { "" } else { "; what it has sent after them is not read" };
            let text = format!(
                "segments are missing in the capture: {bytes} bytes of what the {who} has sent, behind its first \
                 {position}{then}"
            );
            self.say(at, Some(stream.number), text);
        }
        if !goes_on {
            return self.drop_half(&mut stream.halves[which]);
        }
        stream.halves[which].resume_at(to);
        self.catch_up(stream, which);
    }

    fn drop_half(&mut self, half: &mut Half) {
        self.waiting -= half.early_bytes;
        let Half { first, end, next, gaps, lost, .. } = *half;
        *half = Half { first, end, next, gaps, lost, given_up: true, ..Half::default() };
    }

    /// Nothing more is read of it.
    fn give_up(&mut self, stream: &mut Stream) {
        stream.ended = true;
        for half in &mut stream.halves {
            self.drop_half(half);
        }
    }

    /// Called at the end of a stream, or of the capture.
    fn finish(&mut self, stream: &mut Stream) {
        if stream.request.is_none() && !stream.ended {
            self.others += 1;
        }
        for which in [CLIENT, SERVER] {
            while let Some((&first, _)) = stream.halves[which].early.first_key_value() {
                self.skip(stream, which, first, None);
            }
            let half = &stream.halves[which];
            if half.gaps > 1 && stream.request.is_some() {
                let (gaps, lost) = (half.gaps, half.lost);
                let who = if which == CLIENT { "client" } else { "server" };
                let text = format!("what the {who} has sent lacks {lost} bytes, at {gaps} places");
                self.say(stream.last, Some(stream.number), text);
            }
        }
    }

    fn end(&mut self, counts: &Counts) {
        let mut streams: Vec<Stream> = std::mem::take(&mut self.streams).into_values().collect();
        streams.sort_by_key(|stream| stream.number);
        for stream in streams.iter_mut().filter(|stream| !stream.ended) {
            self.finish(stream);
            self.closed(stream, stream.last);
        }
        let passed_over = [
            (self.others, "TCP connections that are no iWARP, or whose beginning is not in the capture"),
            (self.beyond, "connections that were silent for long and have made room for others"),
            (counts.fragments, "fragments of IP packets, which are not read"),
            (counts.roce, "packets of RoCE, which are not read"),
            (counts.links, "packets of a link that is not known"),
            (counts.cut.into(), "packet at the end that is cut short"),
        ];
        for (number, what) in passed_over {
            if number > 0 {
                self.say(None, None, format!("{number} {what}"));
            }
        }
    }

    // ---- iWARP ----------------------------------------------------------------------------------------------------

    /// Decodes as much of what has arrived as is complete.
    fn understand(&mut self, stream: &mut Stream, which: usize, at: Option<Time>) {
        if stream.halves[which].given_up {
            return;
        }
        let mut pending = std::mem::take(&mut stream.halves[which].pending);
        let mut used = 0;
        if !stream.halves[which].started {
            match self.start(stream, which, at, &pending) {
                Ok(Some(length)) => {
                    let half = &mut stream.halves[which];
                    (used, half.started) = (length, true);
                    half.begins = half.position - (pending.len() - length) as u64;
                }
                Ok(None) => {}
                Err(()) => return self.give_up(stream),
            }
        }
        if stream.halves[which].searching {
            let half = &mut stream.halves[which];
            let from = half.position - pending.len() as u64;
            // FPDUs are whole 32-bit words.
            let first = half.begins.wrapping_sub(from) as usize % 4;
            match resume::next(&pending, first, stream.crc, &mut half.effort) {
                Found::At(at) => (used, half.searching) = (at, false),
                Found::NotBefore(at) => {
                    pending.drain(..at);
                    half.pending = pending;
                    if half.effort > EFFORT {
                        self.drop_half(&mut stream.halves[which]);
                    }
                    return;
                }
            }
        }
        while stream.halves[which].started
            && let Some(&length) = pending[used..].first_chunk::<2>()
            && let Some(fpdu) = pending[used..].get(..mpa::fpdu_len(u16::from_be_bytes(length).into()))
        {
            used += fpdu.len();
            if let Err(text) = self.fpdu(stream, which, at, fpdu) {
                self.say(at, Some(stream.number), text);
                return self.drop_half(&mut stream.halves[which]);
            }
        }
        pending.drain(..used);
        stream.halves[which].pending = pending;
    }

    /// Takes a startup frame and returns its length. `Err`: this is not iWARP, or cannot be read.
    fn start(
        &mut self,
        stream: &mut Stream,
        which: usize,
        at: Option<Time>,
        bytes: &[u8],
    ) -> Result<Option<usize>, ()> {
        let number = Some(stream.number);
        let frame = StartFrame::decode(bytes, if which == CLIENT { Which::Request } else { Which::Reply });
        let (frame, length) = match (frame, &stream.request) {
            (Ok(Some(found)), _) => found,
            (Ok(None), _) => return Ok(None),
            (Err(_), None) => {
                self.others += 1;
                return Err(());
            }
            (Err(error), Some(_)) => {
                self.say(at, number, error.to_string());
                return Err(());
            }
        };
        if which == CLIENT {
            stream.request = Some(frame);
            return Ok(Some(length));
        }
        let Some(request) = &stream.request else {
            self.others += 1;
            return Err(());
        };
        let [client, server] = [request, &frame]
            .map(|frame| PrivateData::find(&frame.private_data).unwrap_or(PrivateData::ABSENT));
        let how = format!(
            "iWARP, MPA revision {}, from {}, inline {} bytes out and {} in",
            frame.revision,
            stream.client,
            client.send_threshold(&server),
            client.receive_threshold(&server)
        );
        let markers = request.markers || frame.markers;
        let crc = request.crc || frame.crc;
        self.tell(
            at,
            number,
            Level::Info,
            Event::Opened { to: stream.server.to_string().into(), how: how.into() },
        );
        if frame.reject {
            self.say(at, number, "the server refuses the connection".into());
        }
        if markers {
            self.say(at, number, "it has markers, which are not read".into());
            return Err(());
        }
        stream.crc = crc;
        Ok(Some(length))
    }

    /// Takes one FPDU. `Err`: why the direction cannot be decoded from here on.
    fn fpdu(
        &mut self,
        stream: &mut Stream,
        which: usize,
        at: Option<Time>,
        fpdu: &[u8],
    ) -> Result<(), String> {
        let number = Some(stream.number);
        let out = which == CLIENT;
        let who = if out { "client" } else { "server" };
        if stream.crc
            && let Some((covered, crc)) = fpdu.split_last_chunk::<4>()
            && *crc != mpa::crc_word(Some(crc32c::crc32c(covered)))
        {
            // Its receiver ends the connection.
            self.say(at, number, format!("the CRC of {} bytes that the {who} has sent is wrong", fpdu.len()));
        }
        let mut head = [0; ddp::ENOUGH];
        let there = fpdu.len().min(head.len());
        head[..there].copy_from_slice(&fpdu[..there]);
        let (header, length) = ddp::Header::decode(&head)
            .map_err(|fault| format!("what the {who} has sent is not understood from here on: {fault}"))?;
        let payload = fpdu.get(header.len()..header.len() + length).unwrap_or_default();
        let half = &mut stream.halves[which];
        match header {
            ddp::Header::Tagged { opcode: Opcode::Write, last, stag, to } => {
                let (_, segment) =
                    half.write.get_or_insert((at, Segment { handle: stag, offset: to, length: 0 }));
                segment.length = segment.length.saturating_add(payload.len() as u32);
                if last && let Some((began, segment)) = half.write.take() {
                    self.tell(began, number, Level::Wire, Event::Rdma { write: true, segment });
                }
            }
            ddp::Header::Tagged { last, .. } => {
                // A long call begins with its program and procedure.
                let begins = half.response_bytes == 0;
                half.response_bytes += payload.len() as u64;
                let total = half.response_bytes;
                if last {
                    half.response_bytes = 0;
                }
                if begins && let Some((xid, program)) = call(payload) {
                    self.tell(at, number, Level::Debug, Event::Request { xid, program });
                }
                if last && total > 0 {
                    self.tell(at, number, Level::Wire, Event::ReadDone);
                }
            }
            ddp::Header::Untagged { opcode: Opcode::ReadRequest, .. } => {
                let read = ReadRequest::decode(payload).filter(|read| read.size > 0);
                if let Some(ReadRequest { size, source_stag, source_to, .. }) = read {
                    let segment = Segment { handle: source_stag, offset: source_to, length: size };
                    self.tell(at, number, Level::Wire, Event::Rdma { write: false, segment });
                }
            }
            ddp::Header::Untagged { opcode: Opcode::Terminate, .. } => {
                let why = ddp::Fault::decode_terminate(payload);
                let why = why.map_or("nothing".to_owned(), |(_, text)| text.into_owned());
                self.say(at, number, format!("the {who} ends the connection with an error: {why}"));
            }
            ddp::Header::Untagged { last, mo, .. } if half.amid && mo > 0 => half.amid = !last,
            ddp::Header::Untagged { opcode, last, invalidate, .. } => {
                half.amid = false;
                let room = MESSAGE.saturating_sub(half.message.len());
                half.message.extend_from_slice(&payload[..payload.len().min(room)]);
                half.message_bytes += payload.len() as u64;
                if last {
                    let message = std::mem::take(&mut half.message);
                    let bytes = std::mem::take(&mut half.message_bytes);
                    // A first message without bytes says that the connection is up.
                    if bytes > 0 {
                        let beyond = bytes - message.len() as u64;
                        self.message(
                            number,
                            at,
                            out,
                            &message,
                            beyond,
                            opcode.invalidates().then_some(invalidate),
                        );
                    }
                }
            }
        }
        Ok(())
    }

    fn message(
        &mut self,
        number: Option<i32>,
        at: Option<Time>,
        out: bool,
        bytes: &[u8],
        beyond: u64,
        invalidates: Option<u32>,
    ) {
        let header = match header::decode(bytes, Versions::BOTH) {
            Ok(header) => header,
            Err(error) => {
                let who = if out { "client" } else { "server" };
                return self.say(at, number, format!("the {who} sends {error}"));
            }
        };
        let Some(message) = log::message_of(&header.to_string()) else { return };
        let payload = message.payload.map(|bytes| bytes + beyond);
        let message = Message { payload, invalidates, ..message };
        let sum = |segments: &mut dyn Iterator<Item = u32>| segments.map(u64::from).sum::<u64>();
        let written = |message: &Message| {
            sum(&mut message.writes.iter().chain(&message.reply).flatten().map(|segment| segment.length))
        };
        let inline = match header.body {
            Body::Msg { payload, .. } => payload,
            _ => &[],
        };
        let xid = message.xid;
        let called = call(inline).filter(|(of, _)| *of == xid);
        let is_long = message.payload.is_none();
        let is_reply =
            is_reply(inline, xid) || is_long && message.reads.is_empty() && message.reply.is_some();
        let reply = is_reply.then(|| payload.unwrap_or(0) + written(&message));
        let read = sum(&mut message.reads.iter().map(|read| read.segment.length));
        let bytes = payload.unwrap_or(0) + read;
        self.tell(at, number, Level::Wire, Event::Message { out, message: Box::new(message) });
        if let Some((_, program)) = called {
            self.tell(at, number, Level::Debug, Event::Request { xid, program });
        }
        if called.is_some() || is_long && read > 0 {
            self.tell(at, number, Level::Debug, Event::CallBytes { xid, bytes });
        }
        if let Some(bytes) = reply {
            self.tell(at, number, Level::Debug, Event::Reply { xid, bytes });
        }
    }
}

/// How much memory waiting bytes take, including their entry.
fn cost(bytes: &[u8]) -> usize {
    bytes.len() + 64
}

impl Half {
    /// Whether its end is known, and nothing before that is still to come.
    fn is_whole(&self) -> bool {
        let there = |end: u32| self.next.is_none_or(|next| end.wrapping_sub(next) as i32 <= 0);
        self.end.is_some_and(|end| self.given_up || there(end))
    }

    /// Expects nothing more before that position.
    fn resume_at(&mut self, position: u64) {
        let lost = position.saturating_sub(self.position);
        self.position += lost;
        self.next = self.next.map(|next| next.wrapping_add(lost as u32));
        (self.searching, self.amid, self.effort, self.acknowledged) = (true, true, 0, 0);
        self.pending.clear();
        self.message.clear();
        (self.message_bytes, self.response_bytes, self.write) = (0, 0, None);
    }

    fn arrived(&mut self, bytes: &[u8]) {
        self.position += bytes.len() as u64;
        self.next = self.next.map(|next| next.wrapping_add(bytes.len() as u32));
        self.acknowledged = 0;
        self.pending.extend_from_slice(bytes);
    }
}

/// The XID of an RPC call, and what it calls (RFC 5531 §9).
fn call(message: &[u8]) -> Option<(u32, [u32; 3])> {
    let words = words::<6>(message)?;
    let [xid, 0, 2, program, version, procedure] = words else { return None };
    Some((xid, [program, version, procedure]))
}

fn is_reply(message: &[u8], xid: u32) -> bool {
    words::<2>(message) == Some([xid, 1])
}

fn words<const N: usize>(bytes: &[u8]) -> Option<[u32; N]> {
    let bytes = bytes.get(..4 * N)?;
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    Some(words)
}

#[cfg(test)]
mod tests;
