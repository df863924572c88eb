//! A trace for people, line by line, and as JSON.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::{Serialize, Serializer};

use super::log::{Message, Refused, Time};
use super::trace::{Call, Connection, Kind, Remark, Role, Step, Trace};
use crate::numbers::grouped;
use crate::programs::Programs;
use crate::words::shown;

/// Prints everything, by connection.
///
/// # Errors
/// Those of `out`.
pub fn text(trace: &Trace, names: &Programs, out: &mut impl Write) -> io::Result<()> {
    let mut count = 0;
    let mut by_end: Vec<Vec<usize>> = vec![Vec::new(); trace.connections.len()];
    for &number in &trace.shown {
        by_end[trace.calls[number].connection(trace)].push(number);
    }
    for (at, connection) in trace.connections.iter().enumerate() {
        if trace.first_end(at) != at {
            continue;
        }
        count += 1;
        let shown_here = &by_end[at];
        if shown_here.is_empty() && trace.shown.len() < trace.calls.len() {
            continue;
        }
        writeln!(out, "connection {count}: {}", heading(trace, connection))?;
        let other = connection.other.map(|other| &trace.connections[other]);
        for remark in connection.remarks.iter().chain(other.iter().flat_map(|other| &other.remarks)) {
            print_remark(out, remark)?;
        }
        for &number in shown_here {
            let call = &trace.calls[number];
            let back = is_back(trace, call);
            writeln!(out, "\n{}", shown(&summary(number, call, names, back)))?;
            let began = call.began();
            for step in &call.steps {
                let time = since(began, step.at.or(step.done));
                writeln!(out, "{time:>14}  {}", shown(&words(step)))?;
            }
        }
        writeln!(out)?;
    }
    for remark in &trace.remarks {
        print_remark(out, remark)?;
    }
    if !trace.remarks.is_empty() {
        writeln!(out)?;
    }
    let without = trace.calls.iter().filter(|call| !call.replied).count();
    let errors = trace.calls.iter().filter(|call| call.error.is_some()).count();
    writeln!(
        out,
        "{}: {}; connections: {count}; calls: {}, without a reply: {without}, answered by an RDMA_ERROR: {errors}",
        if trace.is_capture { "packets" } else { "lines" },
        trace.lines,
        trace.calls.len()
    )
}

fn print_remark(out: &mut impl Write, remark: &Remark) -> io::Result<()> {
    let time = remark.at.map_or_else(String::new, |at| format!("{} ", of_day(at)));
    let of = if remark.process == 0 { String::new() } else { format!("process {}: ", remark.process) };
    writeln!(out, "  {time}{of}{}", shown(&remark.text))
}

/// What was passed over, for stderr.
pub fn refused(trace: &Trace) -> Vec<String> {
    let kinds = trace.refused.iter().map(|(why, (lines, first, text))| {
        let what = match why {
            Refused::Foreign => "not of the library's log",
            Refused::Cut => "cut short",
            Refused::Unknown => "of an unknown form",
        };
        let text: String = shown(text).chars().take(60).collect();
        format!("lines that are {what}: {lines} of {}; line {first} is the first: {text}", trace.lines)
    });
    kinds.collect()
}

fn heading(trace: &Trace, connection: &Connection) -> String {
    let mut text = connection.place();
    if let Some(peer) = &connection.peer {
        let from = if connection.role == Some(Role::Server) { "from" } else { "to" };
        let _ = write!(text, " {from} {}", shown(peer));
    }
    if let Some(other) = connection.other {
        let _ = write!(text, " ({})", trace.connections[other].place());
    }
    if let Some(how) = &connection.how {
        let _ = write!(text, ", {}", shown(how));
    }
    text
}

/// Whether a call was made by the end that has accepted the connection.
pub fn is_back(trace: &Trace, call: &Call) -> bool {
    let role = |end: Option<usize>| end.and_then(|end| trace.connections[end].role);
    role(call.caller) == Some(Role::Server) || role(call.callee) == Some(Role::Client)
}

/// A call in a line.
pub fn summary(number: usize, call: &Call, names: &Programs, back: bool) -> String {
    let kind = if back { "call back" } else { "call" };
    let mut text = format!("{kind} {}", number + 1);
    if let Some(at) = call.began() {
        let _ = write!(text, "  {}", of_day(at));
    }
    let _ = write!(text, "  xid {:#010x}", call.xid);
    if let Some(program) = call.program {
        let _ = write!(text, "  {}", names.call(program));
    }
    let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "?".into(), grouped);
    if call.call_bytes.or(call.reply_bytes).is_some() {
        let _ = write!(text, "  {} bytes, answered by {}", bytes(call.call_bytes), bytes(call.reply_bytes));
    }
    match (&call.error, call.replied) {
        (Some(error), _) => {
            let _ = write!(text, "  failed: {error}");
        }
        (None, false) => text.push_str("  no reply"),
        (None, true) => {}
    }
    if let Some(took) = call.took() {
        let _ = write!(text, "  {} us", grouped(took.max(0).unsigned_abs()));
    }
    text
}

/// A step in a line, from the caller's side: `>` towards the callee.
fn words(step: &Step) -> String {
    let arrives = match (step.at, step.done) {
        (Some(at), Some(done)) => {
            let word = if matches!(step.kind, Kind::Read(_)) { "done" } else { "there" };
            format!("  ({word} after {} us)", grouped(done.saturating_sub(at).max(0).unsigned_abs()))
        }
        _ => String::new(),
    };
    match &step.kind {
        Kind::Call(message) | Kind::Reply(message) => {
            let call = matches!(step.kind, Kind::Call(_));
            let parts = [title(message), credits(message, call)].into_iter().chain(details(message, call));
            let parts: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
            format!("{} {}{arrives}", if call { '>' } else { '<' }, parts.join(", "))
        }
        Kind::Read(segment) => {
            format!(
                "> RDMA Read of {} bytes from {:#010x}{arrives}",
                grouped(segment.length.into()),
                segment.handle
            )
        }
        Kind::Write(segment) => {
            format!(
                "< RDMA Write of {} bytes to {:#010x}{arrives}",
                grouped(segment.length.into()),
                segment.handle
            )
        }
        Kind::Invalidated { handle, caller } => {
            format!("  {handle:#010x} is invalidated by the {}", if *caller { "caller" } else { "callee" })
        }
    }
}

/// What a message is.
pub fn title(message: &Message) -> String {
    let with = if message.invalidates.is_some() { " (Send with Invalidate)" } else { "" };
    format!("{}{with}", message.procedure)
}

/// What a message says of credits.
pub fn credits(message: &Message, call: bool) -> String {
    let word = if call { "asks for" } else { "grants" };
    match message.credits {
        _ if message.is_error() => String::new(),
        1 => format!("{word} 1 credit"),
        n => format!("{word} {} credits", grouped(n.into())),
    }
}

/// What a message contains and what it names.
pub fn details(message: &Message, call: bool) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(bytes) = message.payload {
        parts.push(format!("{} bytes inline", grouped(bytes)));
    }
    let sum = |lengths: &mut dyn Iterator<Item = u32>| -> String {
        let (mut count, mut bytes) = (0, 0u64);
        for length in lengths {
            (count, bytes) = (count + 1, bytes + u64::from(length));
        }
        let segments = if count == 1 { String::new() } else { format!(" in {count} segments") };
        format!("{} bytes{segments}", grouped(bytes))
    };
    for chunk in message.reads.chunk_by(|a, b| a.position == b.position) {
        let bytes = sum(&mut chunk.iter().map(|read| read.segment.length));
        parts.push(match chunk[0].position {
            0 => format!("Read chunk of the whole call: {bytes}"),
            position => format!("Read chunk at {}: {bytes}", grouped(position.into())),
        });
    }
    let room = if call { "room for " } else { "" };
    for chunk in &message.writes {
        parts.push(format!("Write chunk: {room}{}", sum(&mut chunk.iter().map(|segment| segment.length))));
    }
    if let Some(chunk) = &message.reply {
        let used = chunk.iter().any(|segment| segment.length > 0);
        parts.push(match used {
            true => format!("Reply chunk: {room}{}", sum(&mut chunk.iter().map(|segment| segment.length))),
            false => "Reply chunk: not used".into(),
        });
    }
    if message.cut {
        parts.push("more chunks than the log shows".into());
    }
    if let Some(rest) = &message.rest {
        parts.push(rest.to_string());
    }
    if let Some(handle) = message.invalidates {
        parts.push(format!("invalidates {handle:#010x}"));
    }
    parts
}

/// Microseconds from a moment on.
pub fn since(began: Option<Time>, at: Option<Time>) -> String {
    match (began, at) {
        (Some(began), Some(at)) => {
            let us = at.saturating_sub(began);
            format!("{}{} us", if us < 0 { "-" } else { "+" }, grouped(us.unsigned_abs()))
        }
        _ => String::new(),
    }
}

/// A time of day, in UTC.
fn of_day(at: Time) -> String {
    let (seconds, us) = (at.div_euclid(1_000_000).rem_euclid(86_400), at.rem_euclid(1_000_000));
    format!("{:02}:{:02}:{:02}.{us:06}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

// ---- JSON ---------------------------------------------------------------------------------------------------------

/// The whole document; times are microseconds since 1970, and calls name connections by their places.
#[derive(Serialize)]
pub struct Document<'a> {
    connections: Ends<'a>,
    calls: Calls<'a>,
    remarks: &'a [Remark],
    lines: u64,
    skipped: Skipped,
}

#[derive(Serialize)]
struct End<'a> {
    process: u32,
    fd: i32,
    role: Option<Role>,
    peer: Option<&'a str>,
    how: Option<&'a str>,
    other_end: Option<usize>,
    remarks: &'a [Remark],
}

#[derive(Serialize)]
struct CallOf<'a> {
    number: usize,
    caller: Option<usize>,
    callee: Option<usize>,
    back: bool,
    xid: String,
    program: Option<[u32; 3]>,
    name: Option<String>,
    call_bytes: Option<u64>,
    reply_bytes: Option<u64>,
    latency_us: Option<Time>,
    replied: bool,
    error: Option<&'a str>,
    steps: Vec<StepOf<'a>>,
}

#[derive(Serialize)]
struct StepOf<'a> {
    what: &'static str,
    at_us: Option<Time>,
    done_us: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    segment: Option<super::log::Segment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    handle: Option<u32>,
}

#[derive(Serialize)]
struct Skipped {
    foreign: u64,
    cut: u64,
    unknown: u64,
}

/// All connections, written one after the other, so that none is copied.
struct Ends<'a>(&'a Trace);

impl<'a> Serialize for Ends<'a> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let end = |connection: &'a Connection| {
            let Connection { process, fd, role, peer, how, other, remarks } = connection;
            End {
                process: *process,
                fd: *fd,
                role: *role,
                peer: peer.as_deref(),
                how: how.as_deref(),
                other_end: *other,
                remarks,
            }
        };
        serializer.collect_seq(self.0.connections.iter().map(end))
    }
}

/// The calls that are shown, likewise.
struct Calls<'a>(&'a Trace, &'a Programs);

impl Serialize for Calls<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Calls(trace, names) = self;
        let call = |&number: &usize| {
            let call = &trace.calls[number];
            CallOf {
                number: number + 1,
                caller: call.caller,
                callee: call.callee,
                back: is_back(trace, call),
                xid: format!("{:#010x}", call.xid),
                program: call.program,
                name: call.program.map(|program| names.call(program)),
                call_bytes: call.call_bytes,
                reply_bytes: call.reply_bytes,
                latency_us: call.took(),
                replied: call.replied,
                error: call.error.as_deref(),
                steps: call.steps.iter().map(step).collect(),
            }
        };
        serializer.collect_seq(trace.shown.iter().map(call))
    }
}

impl<'a> Document<'a> {
    /// The document of what is asked for.
    pub fn new(trace: &'a Trace, names: &'a Programs) -> Document<'a> {
        let skipped = |why| trace.refused.get(&why).map_or(0, |(lines, ..)| *lines);
        Document {
            connections: Ends(trace),
            calls: Calls(trace, names),
            remarks: &trace.remarks,
            lines: trace.lines,
            skipped: Skipped {
                foreign: skipped(Refused::Foreign),
                cut: skipped(Refused::Cut),
                unknown: skipped(Refused::Unknown),
            },
        }
    }
}

fn step(step: &Step) -> StepOf<'_> {
    let (what, message, segment, handle) = match &step.kind {
        Kind::Call(message) => ("call", Some(&**message), None, None),
        Kind::Reply(message) => ("reply", Some(&**message), None, None),
        Kind::Read(segment) => ("read", None, Some(*segment), None),
        Kind::Write(segment) => ("write", None, Some(*segment), None),
        Kind::Invalidated { handle, .. } => ("invalidated", None, None, Some(*handle)),
    };
    StepOf { what, at_us: step.at, done_us: step.done, message, segment, handle }
}
