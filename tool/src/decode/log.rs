//! Lines of the library's log, as src/log.rs and those who log through it write them: text -> values.
//!
//! A line is somebody else's: nothing in it is taken for granted, and what is kept of it as text is shown only through
//! [`crate::words::shown`].

use std::hash::Hash;

use serde::Serialize;

/// Microseconds since 1970.
pub type Time = i64;

/// A line of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Optional: the README's logs have no time.
    pub at: Option<Time>,
    pub process: u32,
    pub level: Level,
    /// The connection's descriptor.
    pub fd: Option<i32>,
    pub event: Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Wire,
}

/// What a line tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A message goes out or has come.
    Message { out: bool, message: Box<Message> },
    /// An RDMA Read or Write of the peer's memory begins.
    Rdma { write: bool, segment: Segment },
    /// The oldest RDMA Read is complete.
    ReadDone,
    /// The peer cannot reach this memory any more.
    Invalidated { handle: u32 },
    /// A program's call, before its message.
    Call { xid: u32, program: [u32; 3], bytes: u64 },
    /// The length of an RPC call whose message has gone; nothing else is known of it.
    CallBytes { xid: u32, bytes: u64 },
    /// A request, after its message.
    Request { xid: u32, program: [u32; 3] },
    /// The length of an RPC reply.
    Reply { xid: u32, bytes: u64 },
    /// A client's connection.
    Opened { to: Box<str>, how: Box<str> },
    /// A server's connection.
    Accepted { from: Box<str>, how: Box<str> },
    /// Its end.
    Closed { why: Box<str> },
    /// Any other text.
    Said(Box<str>),
}

/// A header and what came with it. It is small, since a log has very many and all of them are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Message {
    /// RDMA_MSG and so on.
    pub procedure: &'static str,
    pub xid: u32,
    pub credits: u32,
    /// Known in Version Two only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_call: Option<bool>,
    pub reads: Box<[ReadSegment]>,
    pub writes: Box<[Box<[Segment]>]>,
    pub reply: Option<Box<[Segment]>>,
    /// The lists are longer than the log shows.
    pub cut: bool,
    /// Bytes of the RPC message in it.
    pub payload: Option<u64>,
    /// Of an RDMA_ERROR or of an extension's message, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rest: Option<Box<str>>,
    /// The handle, if it was sent with Invalidate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invalidates: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Segment {
    pub handle: u32,
    pub offset: u64,
    pub length: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ReadSegment {
    pub position: u32,
    #[serde(flatten)]
    pub segment: Segment,
}

impl Message {
    pub fn is_error(&self) -> bool {
        self.procedure.ends_with("_ERROR")
    }

    /// What is the same for a message at both ends, however it was sent.
    pub fn likeness(&self) -> impl PartialEq + Hash {
        let Message { procedure, xid, credits, is_call, reads, writes, reply, cut, payload, rest, .. } = self;
        (procedure, xid, credits, is_call, reads, writes, reply, cut, payload, rest)
    }
}

/// Why a line tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// Of another program.
    Foreign,
    /// Its end is missing.
    Cut,
    /// Of a form that this program does not know.
    Unknown,
}

/// Takes a line apart, without its newline.
///
/// # Errors
/// When it tells nothing.
pub fn parse(line: &str) -> Result<Line, Refused> {
    let mut rest = Text(line.trim_end_matches('\r'));
    // Something may precede it, such as a name that a service manager has added.
    let start = rest.0.find("rpcrdma[").ok_or(Refused::Foreign)?;
    let (before, from) = rest.0.split_at(start);
    let at = before.trim_end().rsplit(' ').next().and_then(time);
    rest = Text(from);
    let head = |rest: &mut Text| {
        rest.take("rpcrdma[")?;
        let process = rest.number()?;
        rest.take("] ")?;
        let (word, text) = rest.0.split_once(": ")?;
        let level = match word {
            "error" => Level::Error,
            "warn" => Level::Warn,
            "info" => Level::Info,
            "debug" => Level::Debug,
            "wire" => Level::Wire,
            _ => return None,
        };
        rest.0 = text;
        Some((process, level))
    };
    let cut = line.ends_with("...");
    let (process, level) = head(&mut rest).ok_or(Refused::Foreign)?;
    let whole = rest.0;
    let (fd, event) = match on_connection(&mut rest) {
        Some((fd, event)) if rest.0.is_empty() => (Some(fd), event),
        _ if level == Level::Wire => return Err(if cut { Refused::Cut } else { Refused::Unknown }),
        _ => {
            let mut text = Text(whole);
            let fd = fd(&mut text).filter(|_| text.take(": ").is_some());
            (fd, Event::Said(if fd.is_some() { text.0 } else { whole }.into()))
        }
    };
    Ok(Line { at, process, level, fd, event })
}

/// Whether a line is too short to tell whose it is: the rest may have been cut off.
pub fn is_beginning(line: &str) -> bool {
    const TIME: &str = "0000-00-00T00:00:00.000000Z ";
    let form: String = line.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    let rest = form.strip_prefix(TIME).unwrap_or(&form);
    let Some(rest) = rest.strip_prefix("rpcrdma[") else {
        return TIME.starts_with(rest) || "rpcrdma[".starts_with(rest);
    };
    let rest = rest.trim_start_matches('0');
    match rest.strip_prefix("] ") {
        Some(rest) => {
            ["error: ", "warn: ", "info: ", "debug: ", "wire: "].iter().any(|level| level.starts_with(rest))
        }
        None => "] ".starts_with(rest),
    }
}

fn fd(text: &mut Text) -> Option<i32> {
    text.take("fd ")?;
    text.number()
}

fn on_connection(text: &mut Text) -> Option<(i32, Event)> {
    let fd = fd(text)?;
    if text.take(" > ").is_some() {
        return Some((fd, traffic(text, true)?));
    }
    if text.take(" < ").is_some() {
        return Some((fd, traffic(text, false)?));
    }
    text.take(": ")?;
    let event = if text.take("call ").is_some() {
        let xid = text.hex()?;
        text.take(": ")?;
        let program = program(text)?;
        text.take(", ")?;
        let bytes = text.number()?;
        text.take(" bytes")?;
        Event::Call { xid, program, bytes }
    } else if text.take("request ").is_some() {
        let xid = text.hex()?;
        text.take(": ")?;
        Event::Request { xid, program: program(text)? }
    } else if text.take("reply ").is_some() {
        let xid = text.hex()?;
        text.take(": ")?;
        let bytes = text.number()?;
        text.take(" bytes")?;
        Event::Reply { xid, bytes }
    } else if text.take("invalidated ").is_some() {
        Event::Invalidated { handle: text.hex()? }
    } else if text.take("connection closed: ").is_some() {
        Event::Closed { why: text.all() }
    } else if text.take("accepted ").is_some() {
        let (from, how) = text.0.split_once(" over rdma (")?;
        let event = Event::Accepted { from: from.into(), how: how.strip_suffix(')')?.into() };
        text.0 = "";
        event
    } else if text.take("program ").is_some() {
        let (_, to) = text.0.split_once(" goes over rdma to ")?;
        let (to, how) = to.split_once(" (")?;
        let event = Event::Opened { to: to.into(), how: how.strip_suffix(')')?.into() };
        text.0 = "";
        event
    } else {
        return None;
    };
    Some((fd, event))
}

fn program(text: &mut Text) -> Option<[u32; 3]> {
    text.take("program ")?;
    let program = text.number()?;
    text.take(" version ")?;
    let version = text.number()?;
    text.take(" procedure ")?;
    Some([program, version, text.number()?])
}

fn traffic(text: &mut Text, out: bool) -> Option<Event> {
    if text.take("RDMA Read Response").is_some() {
        return Some(Event::ReadDone);
    }
    if text.take("RDMA Read ").is_some() {
        return Some(Event::Rdma { write: false, segment: segment(text)? });
    }
    if text.take("RDMA Write ").is_some() {
        return Some(Event::Rdma { write: true, segment: segment(text)? });
    }
    if text.0.starts_with("xid ") || text.0.starts_with("message of ") {
        // A header that breaks the rules, in words.
        return Some(Event::Said(format!("{} {}", if out { "sends" } else { "has got" }, text.all()).into()));
    }
    Some(Event::Message { out, message: Box::new(message(text)?) })
}

const PROCEDURES: [&str; 12] = [
    "RDMA_MSG",
    "RDMA_NOMSG",
    "RDMA_MSGP",
    "RDMA_DONE",
    "RDMA_ERROR",
    "RDMA_OPTIONAL",
    "RDMA2_MSG",
    "RDMA2_NOMSG",
    "RDMA2_MSGP",
    "RDMA2_DONE",
    "RDMA2_ERROR",
    "RDMA2_OPTIONAL",
];

/// Most entries of a list. The library shows no more than eight; without a limit every two bytes, `[]`, would make a chunk.
const LISTED: usize = 16;

fn message(text: &mut Text) -> Option<Message> {
    let (procedure, rest) = text.0.split_once(' ')?;
    let procedure = *PROCEDURES.iter().find(|known| **known == procedure)?;
    text.0 = rest;
    text.take("xid ")?;
    let mut message = Message { procedure, xid: text.hex()?, ..Message::default() };
    text.take(" credits ")?;
    message.credits = text.number()?;
    if text.take(" CALL").is_some() {
        message.is_call = Some(true);
    } else if text.take(" REPLY").is_some() {
        message.is_call = Some(false);
    }
    if text.take(" reads [").is_some() {
        message.reads = list(text, &mut message.cut, read_segment)?;
        text.take(" writes [")?;
        let mut cut = false;
        message.writes = list(text, &mut message.cut, |text| {
            text.take("[")?;
            list(text, &mut cut, segment)
        })?;
        message.cut |= cut;
        text.take(" reply ")?;
        if text.take("none").is_none() {
            text.take("[")?;
            message.reply = Some(list(text, &mut message.cut, segment)?);
        }
        if text.take(" payload ").is_some() {
            message.payload = Some(text.number()?);
        }
    }
    if let Some((before, handle)) = text.0.rsplit_once(" invalidates ") {
        let mut handle = Text(handle);
        message.invalidates = Some(handle.hex().filter(|_| handle.0.is_empty())?);
        text.0 = before;
    }
    if procedure.ends_with("_ERROR") || procedure.ends_with("_OPTIONAL") {
        let rest = text.all();
        message.rest = Some(rest.trim()).filter(|rest| !rest.is_empty()).map(Into::into);
    }
    Some(message)
}

/// A message as a line of the log has it.
pub fn message_of(text: &str) -> Option<Message> {
    let mut text = Text(text);
    message(&mut text).filter(|_| text.0.is_empty())
}

/// Up to the closing bracket: entries, and perhaps `and N more`.
fn list<T>(
    text: &mut Text,
    cut: &mut bool,
    mut entry: impl FnMut(&mut Text) -> Option<T>,
) -> Option<Box<[T]>> {
    let mut list = Vec::new();
    while text.take("]").is_none() {
        match entry(text) {
            Some(entry) if list.len() < LISTED => list.push(entry),
            Some(_) => return None,
            None => more(text, cut)?,
        }
        text.take(" ");
    }
    Some(list.into())
}

fn read_segment(text: &mut Text) -> Option<ReadSegment> {
    let mut ahead = text.clone();
    let position = ahead.number()?;
    ahead.take(":")?;
    let segment = segment(&mut ahead)?;
    *text = ahead;
    Some(ReadSegment { position, segment })
}

fn segment(text: &mut Text) -> Option<Segment> {
    let mut ahead = text.clone();
    let handle = ahead.hex()?;
    ahead.take("+")?;
    let offset = ahead.hex()?;
    ahead.take(":")?;
    let length = ahead.number()?;
    *text = ahead;
    Some(Segment { handle, offset, length })
}

/// `and N more`.
fn more(text: &mut Text, cut: &mut bool) -> Option<()> {
    text.take("and ")?;
    let _: u64 = text.number()?;
    text.take(" more")?;
    *cut = true;
    Some(())
}

/// `2026-11-22T09:30:00.123456Z`
fn time(text: &str) -> Option<Time> {
    let mut text = Text(text);
    let year: i64 = text.number()?;
    text.take("-")?;
    let month: i64 = text.number()?;
    text.take("-")?;
    let day: i64 = text.number()?;
    text.take("T")?;
    let hour: i64 = text.number()?;
    text.take(":")?;
    let minute: i64 = text.number()?;
    text.take(":")?;
    let second: i64 = text.number()?;
    text.take(".")?;
    let micros = text.0.strip_suffix('Z').filter(|digits| digits.len() == 6)?.parse::<i64>().ok()?;
    let fits = (1970..10_000).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60
        && micros >= 0;
    // Years begin in March: see src/log.rs, of which this is the inverse.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    fits.then(|| (((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000_000 + micros)
}

/// The rest of a line.
#[derive(Clone)]
struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    fn take(&mut self, word: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(word)?;
        Some(())
    }

    fn number<T: std::str::FromStr>(&mut self) -> Option<T> {
        let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(end);
        self.0 = rest;
        digits.parse().ok()
    }

    fn hex<T: TryFrom<u64>>(&mut self) -> Option<T> {
        let digits = self.0.strip_prefix("0x")?;
        let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
        let value = u64::from_str_radix(&digits[..end], 16).ok()?;
        self.0 = &digits[end..];
        T::try_from(value).ok()
    }

    fn all(&mut self) -> Box<str> {
        std::mem::take(&mut self.0).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_page_on_troubleshooting_are_understood() {
        let line = parse(
            "rpcrdma[52] wire: fd 3 > RDMA_NOMSG xid 0x5b0a4432 credits 32 reads [0:0xeb93fd92+0x0:270064] writes [] reply [0x308e89b6+0x0:16781312]",
        )
        .unwrap();
        let Event::Message { out: true, message } = &line.event else { panic!("{line:?}") };
        assert_eq!((line.process, line.fd, line.at), (52, Some(3), None));
        assert_eq!((message.procedure, message.xid, message.credits), ("RDMA_NOMSG", 0x5b0a4432, 32));
        assert_eq!(message.reads[0].segment.length, 270064);
        assert_eq!(message.reply.as_ref().unwrap()[0].length, 16781312);
        let line = parse("2026-11-22T09:30:00.123456Z rpcrdma[4711] debug: fd 3: call 0x5b0a4432: program 536888915 version 1 procedure 4, 270064 bytes").unwrap();
        assert_eq!(line.at, Some(1_795_339_800_123_456));
        assert_eq!(line.event, Event::Call { xid: 0x5b0a4432, program: [536888915, 1, 4], bytes: 270064 });
    }

    #[test]
    fn lists_that_are_cut_and_sends_that_invalidate_are_understood() {
        let text = "rpcrdma[1] wire: fd 3 < RDMA2_MSG xid 0x00000001 credits 4 REPLY reads [4:0x1+0x2:3 4:0x1+0x5:6 and 2 more] writes [[0x1+0x0:1 and 9 more] [] and 3 more] reply [] payload 28 invalidates 0x0000000f";
        let Event::Message { out: false, message } = parse(text).unwrap().event else { panic!() };
        assert_eq!((message.reads.len(), message.writes.len(), message.reply), (2, 2, Some(Box::default())));
        assert_eq!(
            (message.cut, message.is_call, message.payload, message.invalidates),
            (true, Some(false), Some(28), Some(15))
        );
        let text = "rpcrdma[1] wire: fd 3 > RDMA_ERROR xid 0x00000001 credits 4 ERR_VERS 1..2";
        let Event::Message { message, .. } = parse(text).unwrap().event else { panic!() };
        assert!(message.is_error() && message.rest.as_deref() == Some("ERR_VERS 1..2"), "{message:?}");
    }

    #[test]
    fn what_is_not_of_this_log_says_so() {
        assert_eq!(parse("Segmentation fault"), Err(Refused::Foreign));
        assert_eq!(parse("rpcrdma[x] wire: fd 3"), Err(Refused::Foreign));
        assert_eq!(parse("rpcrdma[1] wire: fd 3 > RDMA_MSG xid 0x1 cre..."), Err(Refused::Cut));
        assert_eq!(parse("rpcrdma[1] wire: fd 3 > RDMA_MSG xid 0x1 cre"), Err(Refused::Unknown));
        for whole in ["2026-11-22T09:30:00.123456Z rpcrdma[4711] debug: ", "rpcrdma[52] wire: "] {
            assert!((1..=whole.len()).all(|length| is_beginning(&whole[..length])), "{whole}");
        }
        for foreign in ["2026 apples", "20:30", "rpcrdma: ", "rpcrdma[1] w: ", "rpcrdma[x", "wire: "] {
            assert!(!is_beginning(foreign), "{foreign}");
        }
        assert!(
            matches!(parse("rpcrdma[1] warn: anything").unwrap().event, Event::Said(text) if *text == *"anything")
        );
    }
}
