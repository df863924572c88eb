//! Puts together what belongs together: lines -> connections, and their calls with everything that moved for them.
//!
//! A call is a message and the next one the other way with its XID on the same connection. RDMA Reads and Writes belong to
//! the call that names their handles, and so do invalidations. If both ends have logged, a call that one end has sent and
//! the other has received, alike to the last chunk, is one call, and from then on their connections are one.
//!
//! # Invariants
//! - Nothing that a log says makes this fail, loop, or take more memory than a few times the log.
//! - No step is kept of a call that was not asked for.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};

use serde::Serialize;

use super::log::{Event, Level, Line, Message, Refused, Segment, Time};

/// Everything that was read.
#[derive(Debug, Default)]
pub struct Trace {
    pub connections: Vec<Connection>,
    pub calls: Vec<Call>,
    /// The calls that were asked for.
    pub shown: Vec<usize>,
    /// Remarks that belong to no connection.
    pub remarks: Vec<Remark>,
    /// Lines that tell nothing: how many, the number of the first one, and its text.
    pub refused: BTreeMap<Refused, (u64, u64, String)>,
    /// Lines of the log, or packets of the capture.
    pub lines: u64,
    pub is_capture: bool,
}

/// One end of a connection, as its process sees it.
#[derive(Debug)]
pub struct Connection {
    pub process: u32,
    pub fd: i32,
    pub role: Option<Role>,
    /// Where the client has connected to, or where it comes from.
    pub peer: Option<Box<str>>,
    /// What it runs on and what was agreed.
    pub how: Option<Box<str>>,
    /// The other end, if it has logged too.
    pub other: Option<usize>,
    pub remarks: Vec<Remark>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Client,
    Server,
}

/// Something said for people.
#[derive(Clone, Debug, Serialize)]
pub struct Remark {
    pub at: Option<Time>,
    pub process: u32,
    pub text: Box<str>,
}

/// The calls that are asked for: their numbers are those of all calls, from 1 on.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    All,
    Numbers(usize, usize),
    Xid(u32),
}

impl Wanted {
    fn has(self, index: usize, xid: u32) -> bool {
        match self {
            Wanted::All => true,
            Wanted::Numbers(from, to) => (from..=to).contains(&(index + 1)),
            Wanted::Xid(wanted) => wanted == xid,
        }
    }
}

#[derive(Debug)]
pub struct Call {
    /// The end that has made the call, and the one that it has come to; `None` for one that did not log.
    pub caller: Option<usize>,
    pub callee: Option<usize>,
    pub xid: u32,
    /// Program, version, procedure.
    pub program: Option<[u32; 3]>,
    pub call_bytes: Option<u64>,
    pub reply_bytes: Option<u64>,
    pub steps: Vec<Step>,
    pub replied: bool,
    /// The RDMA_ERROR that it was answered with.
    pub error: Option<Box<str>>,
    /// What its message has in common at both ends, as a number.
    likeness: u64,
    /// The previous half of a call with the same XID.
    half_before: Option<u32>,
}

/// Something that moved or ended.
#[derive(Clone, Debug)]
pub struct Step {
    pub kind: Kind,
    /// When it began, where it began.
    pub at: Option<Time>,
    /// When it was complete or had arrived.
    pub done: Option<Time>,
    /// The place of its line, for steps without a time.
    order: usize,
}

#[derive(Clone, Debug)]
pub enum Kind {
    Call(Box<Message>),
    /// By the callee.
    Read(Segment),
    /// By the callee.
    Write(Segment),
    Reply(Box<Message>),
    /// The handle is of the caller's memory, or else of the callee's.
    Invalidated {
        handle: u32,
        caller: bool,
    },
}

impl Connection {
    /// Where the connection was seen: at one end, or on the wire.
    pub fn place(&self) -> String {
        match self.process {
            0 => format!("TCP stream {}", self.fd),
            process => format!("process {process} fd {}", self.fd),
        }
    }
}

impl Call {
    /// The time from its first message to its last one, in microseconds, at the calling end if that is known.
    pub fn took(&self) -> Option<Time> {
        let find = |wanted: fn(&Kind) -> bool| self.steps.iter().find(|step| wanted(&step.kind));
        let call = find(|kind| matches!(kind, Kind::Call(_)))?;
        let reply = find(|kind| matches!(kind, Kind::Reply(_)))?;
        Some(reply.done.or(reply.at)?.saturating_sub(call.at.or(call.done)?))
    }

    /// When it began.
    pub fn began(&self) -> Option<Time> {
        self.steps.iter().find_map(|step| step.at.or(step.done))
    }

    /// The connection that the call is shown under.
    pub fn connection(&self, trace: &Trace) -> usize {
        let end = self.caller.or(self.callee).unwrap_or_default();
        trace.first_end(end)
    }
}

impl Trace {
    /// Of a connection's two ends, the one that it is shown under: the client's, or the one that was seen first.
    pub fn first_end(&self, end: usize) -> usize {
        match self.connections[end].other {
            Some(other) if self.connections[other].role == Some(Role::Client) => other,
            Some(other) if self.connections[end].role != Some(Role::Client) => end.min(other),
            _ => end,
        }
    }

    /// Reads lines, which may come from several logs, one after the other.
    pub fn read(mut lines: Vec<Line>, wanted: Wanted) -> Trace {
        let mut reader = Reader::new(wanted);
        if !lines.iter().filter_map(|line| line.at).is_sorted() {
            // Lines without a time stay after the line that they follow.
            let mut latest = Time::MIN;
            let mut at: Vec<Time> = Vec::with_capacity(lines.len());
            for line in &lines {
                latest = line.at.unwrap_or(latest);
                at.push(latest);
            }
            let mut order: Vec<usize> = (0..lines.len()).collect();
            order.sort_by_key(|&index| at[index]);
            drop(at);
            for index in order {
                let nothing =
                    Line { at: None, process: 0, level: Level::Debug, fd: None, event: Event::ReadDone };
                reader.take(std::mem::replace(&mut lines[index], nothing));
            }
        } else {
            lines.into_iter().for_each(|line| reader.take(line));
        }
        reader.trace()
    }
}

/// Puts together what belongs together, line by line in the order of their times.
pub struct Reader {
    trace: Trace,
    wanted: Wanted,
    /// Lines so far.
    order: usize,
    /// The connections under way, by process and descriptor.
    current: HashMap<(u32, i32), usize>,
    /// What is under way on each connection, if anything.
    states: Vec<Option<Box<State>>>,
    /// The latest call one end of which is not known yet, by XID.
    halves: HashMap<u32, u32>,
    hasher: RandomState,
}

/// What is under way on a connection.
#[derive(Default)]
struct State {
    /// Calls without a reply, by XID: those of this end, and those of the other one.
    ours: HashMap<u32, usize>,
    theirs: HashMap<u32, usize>,
    /// The latest call of an XID.
    latest: HashMap<u32, usize>,
    /// A program's call, known before its message goes out.
    announced: HashMap<u32, ([u32; 3], u64)>,
    handles: HashMap<u32, usize>,
    /// RDMA Reads under way: call and step.
    reads: VecDeque<Option<(usize, usize)>>,
    /// The latest call whose chunks the log does not show completely.
    cut: Option<usize>,
    /// Something was sent or has come.
    used: bool,
}

impl Reader {
    pub fn new(wanted: Wanted) -> Reader {
        Reader {
            trace: Trace::default(),
            wanted,
            order: 0,
            current: HashMap::new(),
            states: Vec::new(),
            halves: HashMap::new(),
            hasher: RandomState::new(),
        }
    }

    /// The result.
    pub fn trace(self) -> Trace {
        let Reader { mut trace, wanted, .. } = self;
        for call in &mut trace.calls {
            call.steps.sort_by_key(|step| (step.at.or(step.done), step.order));
        }
        let calls = trace.calls.iter().enumerate();
        trace.shown = calls.filter(|(at, call)| wanted.has(*at, call.xid)).map(|(at, _)| at).collect();
        trace
    }

    pub fn take(&mut self, line: Line) {
        let order = self.order;
        self.order += 1;
        let Line { at, process, level, fd, event } = line;
        let Some(fd) = fd else {
            if let Event::Said(text) = event {
                self.trace.remarks.push(Remark { at, process, text });
            }
            return;
        };
        if level == Level::Debug && matches!(event, Event::Said(_)) {
            return;
        }
        let anew = matches!(event, Event::Opened { .. } | Event::Accepted { .. });
        let on = self.connection(process, fd, anew);
        let remark = |text| Remark { at, process, text };
        match event {
            Event::Opened { to, how } => self.name(on, Role::Client, to, how),
            Event::Accepted { from, how } => self.name(on, Role::Server, from, how),
            Event::Message { out, message } => {
                self.state(on).used = true;
                self.message(order, at, on, out, message);
            }
            Event::Rdma { write, segment } => self.rdma(order, at, on, write, segment),
            Event::ReadDone => {
                if let Some(Some((call, step))) = self.state(on).reads.pop_front()
                    && let Some(step) = self.trace.calls[call].steps.get_mut(step)
                {
                    step.done = at;
                }
            }
            Event::Invalidated { handle } => self.invalidated(order, at, on, handle),
            Event::Call { xid, program, bytes } => {
                self.state(on).announced.insert(xid, (program, bytes));
            }
            Event::CallBytes { xid, bytes } => {
                if let Some(call) = self.latest(on, xid) {
                    call.call_bytes.get_or_insert(bytes);
                }
            }
            Event::Request { xid, program } => {
                if let Some(call) = self.latest(on, xid) {
                    call.program.get_or_insert(program);
                }
            }
            Event::Reply { xid, bytes } => {
                if let Some(call) = self.latest(on, xid) {
                    call.reply_bytes.get_or_insert(bytes);
                }
            }
            Event::Closed { why } => {
                self.remark(on, remark(format!("closed: {why}").into()));
                self.current.remove(&(process, fd));
                self.states[on] = None;
            }
            Event::Said(text) => self.remark(on, remark(text)),
        }
    }

    fn remark(&mut self, on: usize, remark: Remark) {
        let remarks = &mut self.trace.connections[on].remarks;
        // Most connections have one.
        if remarks.is_empty() {
            remarks.reserve_exact(1);
        }
        remarks.push(remark);
    }

    fn state(&mut self, on: usize) -> &mut State {
        self.states[on].get_or_insert_default()
    }

    fn latest(&mut self, on: usize, xid: u32) -> Option<&mut Call> {
        let call = self.states[on].as_ref()?.latest.get(&xid)?;
        Some(&mut self.trace.calls[*call])
    }

    /// `anew`: a new connection begins here, unless the one that is there has only just begun.
    fn connection(&mut self, process: u32, fd: i32, anew: bool) -> usize {
        if let Some(&on) = self.current.get(&(process, fd)) {
            let used = self.states[on].as_ref().is_some_and(|state| state.used);
            if !(anew && (used || self.trace.connections[on].how.is_some())) {
                return on;
            }
            self.states[on] = None;
        }
        let connection =
            Connection { process, fd, role: None, peer: None, how: None, other: None, remarks: Vec::new() };
        self.trace.connections.push(connection);
        self.states.push(None);
        let on = self.trace.connections.len() - 1;
        self.current.insert((process, fd), on);
        on
    }

    fn name(&mut self, on: usize, role: Role, peer: Box<str>, how: Box<str>) {
        let connection = &mut self.trace.connections[on];
        (connection.role, connection.peer, connection.how) = (Some(role), Some(peer), Some(how));
    }

    fn message(&mut self, order: usize, at: Option<Time>, on: usize, out: bool, message: Box<Message>) {
        let xid = message.xid;
        if message.procedure.ends_with("_OPTIONAL") {
            let process = self.trace.connections[on].process;
            let text = format!(
                "{} {} {}",
                if out { "sends" } else { "has got" },
                message.procedure,
                message.rest.unwrap_or_default()
            );
            self.remark(on, Remark { at, process, text: text.into() });
            return;
        }
        let state = self.state(on);
        // What goes out answers a call of the other end, if there is one.
        let open = if out { &mut state.theirs } else { &mut state.ours };
        let answers = match message.is_call {
            Some(true) => None,
            _ => open.remove(&xid),
        };
        let Some(index) = answers else { return self.call(order, at, on, out, message) };
        let call = &mut self.trace.calls[index];
        call.replied = true;
        if message.is_error() {
            call.error = Some(message.rest.clone().unwrap_or_else(|| message.procedure.into()));
        }
        if !self.wanted.has(index, xid) {
            return;
        }
        let other = call
            .steps
            .iter_mut()
            .find(|step| matches!(&step.kind, Kind::Reply(known) if known.likeness() == message.likeness()));
        match other {
            Some(step) if out => step.at = at,
            Some(step) => step.done = at,
            None => {
                let (began, done) = if out { (at, None) } else { (None, at) };
                // Most calls have these two.
                if call.steps.len() == 1 {
                    call.steps.reserve_exact(1);
                }
                call.steps.push(Step { kind: Kind::Reply(message), at: began, done, order });
            }
        }
    }

    /// The other end's half of a call, if that end has logged: the latest one with the same message.
    fn half(&mut self, on: usize, out: bool, xid: u32, likeness: u64) -> Option<usize> {
        let known = self.trace.connections[on].other;
        let (mut index, mut behind) = (self.halves.get(&xid).copied(), None);
        // Nobody has this many calls under way whose other end comes later in the log.
        for _ in 0..64 {
            let at = index?;
            let call = &self.trace.calls[at as usize];
            let before = call.half_before;
            let (missing, there) = if out { (call.caller, call.callee) } else { (call.callee, call.caller) };
            let fits = missing.is_none()
                && there.is_some_and(|there| there != on && known.is_none_or(|other| other == there))
                && call.likeness == likeness;
            if fits {
                match (behind, before) {
                    (Some(behind), _) => self.trace.calls[behind as usize].half_before = before,
                    (None, Some(before)) => drop(self.halves.insert(xid, before)),
                    (None, None) => drop(self.halves.remove(&xid)),
                }
                return Some(at as usize);
            }
            (behind, index) = (index, before);
        }
        None
    }

    fn call(&mut self, order: usize, at: Option<Time>, on: usize, out: bool, message: Box<Message>) {
        let xid = message.xid;
        let announced = if out { self.state(on).announced.remove(&xid) } else { None };
        let likeness = self.hasher.hash_one(message.likeness());
        let handles: Vec<u32> = handles(&message).collect();
        let cut = message.cut;
        let index = match self.half(on, out, xid, likeness) {
            Some(index) => {
                let call = &mut self.trace.calls[index];
                let there = if out { call.callee } else { call.caller };
                *(if out { &mut call.caller } else { &mut call.callee }) = Some(on);
                for step in &mut call.steps {
                    if matches!(step.kind, Kind::Call(_)) {
                        *(if out { &mut step.at } else { &mut step.done }) = at;
                    }
                }
                if let Some(there) = there {
                    self.trace.connections[on].other = Some(there);
                    self.trace.connections[there].other = Some(on);
                }
                index
            }
            None => {
                let (began, done) = if out { (at, None) } else { (None, at) };
                let ends = if out { (Some(on), None) } else { (None, Some(on)) };
                let index = self.trace.calls.len();
                let mut steps = Vec::new();
                if self.wanted.has(index, xid) {
                    steps = vec![Step { kind: Kind::Call(message), at: began, done, order }];
                }
                let half = u32::try_from(index).ok();
                self.trace.calls.push(Call {
                    caller: ends.0,
                    callee: ends.1,
                    xid,
                    program: None,
                    call_bytes: None,
                    reply_bytes: None,
                    steps,
                    replied: false,
                    error: None,
                    likeness,
                    half_before: half.and_then(|half| self.halves.insert(xid, half)),
                });
                index
            }
        };
        if let Some((program, bytes)) = announced {
            let call = &mut self.trace.calls[index];
            (call.program, call.call_bytes) = (Some(program), Some(bytes));
        }
        let state = self.state(on);
        state.latest.insert(xid, index);
        if out { &mut state.ours } else { &mut state.theirs }.insert(xid, index);
        for handle in handles {
            state.handles.insert(handle, index);
        }
        if cut {
            state.cut = Some(index);
        }
    }

    fn rdma(&mut self, order: usize, at: Option<Time>, on: usize, write: bool, segment: Segment) {
        let state = self.state(on);
        let call = state.handles.get(&segment.handle).copied().or(state.cut);
        let kind = if write { Kind::Write(segment) } else { Kind::Read(segment) };
        let place = call.filter(|&call| self.wanted.has(call, self.trace.calls[call].xid)).map(|call| {
            let steps = &mut self.trace.calls[call].steps;
            steps.push(Step { kind, at, done: None, order });
            (call, steps.len() - 1)
        });
        if !write {
            self.state(on).reads.push_back(place);
        }
    }

    fn invalidated(&mut self, order: usize, at: Option<Time>, on: usize, handle: u32) {
        // Only once: what the peer has invalidated is ended at this end too.
        let Some(index) = self.state(on).handles.remove(&handle) else { return };
        let call = &mut self.trace.calls[index];
        if !self.wanted.has(index, call.xid) {
            return;
        }
        let caller = call.caller == Some(on);
        let by_peer = call
            .steps
            .iter()
            .any(|step| matches!(&step.kind, Kind::Reply(m) if m.invalidates == Some(handle)));
        if !by_peer {
            call.steps.push(Step { kind: Kind::Invalidated { handle, caller }, at, done: None, order });
        }
    }
}

/// The handles that a message names.
fn handles(message: &Message) -> impl Iterator<Item = u32> {
    let written = message.writes.iter().chain(&message.reply).flatten();
    message.reads.iter().map(|read| read.segment.handle).chain(written.map(|segment| segment.handle))
}
