//! Replies that peers do not take as fast as they are made.
//!
//! A reply of any permitted length is queued as a whole, and the program gets its memory back. What bounds the queue is that
//! no more requests of the connection are taken while more than [`BACKLOG`] waits ([`Link::next_request`]). Those requests
//! have been read and lie in the engine, as many as there are credits. The connection goes on being read, because nothing else
//! would keep poll(2) from reporting it. So a client that asks for much at a time is never cut off for being slower than its
//! server.
//!
//! A connection is closed only for lack of progress: after [`STOPPED`] in ordinary times, sooner while all connections
//! together hold much. Those that have stalled longest go first ([`Backlog::has_stopped`]).
//!
//! What still waits when the program leaves its loop, or exits, is sent then, as long as the peers take it ([`send_rest`]).
#![forbid(unsafe_code)]

use crate::fork;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::connection::{Answered, Request, RequestId};
use crate::error::{Error, Kind};
use crate::memory::Message;
use crate::provider::QueuePair;
use crate::stats::layout::Slot;

use crate::log_debug;

use super::link::Link;

/// No more requests of a connection are taken while more than this waits for its peer. The kernel and the network hold as much
/// again or more, so that a fast peer never waits for the next reply to be made.
pub(super) const BACKLOG: usize = 1 << 20;

/// The most bytes other than replies that may wait: errors, refusals and characteristics for a peer that talks without
/// reading.
pub(super) const TALK: usize = 64 << 20;

/// A peer that takes nothing for this long has stopped.
const STOPPED: Duration = Duration::from_secs(60);

/// The same while the replies that wait in this process exceed [`CROWDED`] bytes: then a peer must take [`LEAST`] bytes
/// within the time.
const STOPPED_CROWDED: Duration = Duration::from_secs(2);
const CROWDED: usize = 128 << 20;
const LEAST: u64 = 16 << 10;

/// The same beyond [`FULL`] bytes. Longer than a reply waits for its peer.
const STOPPED_FULL: Duration = Duration::from_millis(200);
const FULL: usize = 256 << 20;

/// How long to wait for peers that do not take at once what is sent.
#[derive(Clone, Copy)]
pub struct Wait {
    /// While the peer takes not a single byte.
    idle: Duration,
    /// In all.
    most: Duration,
}

impl Wait {
    /// For a reply, before the rest of it is queued: other connections have something to do.
    pub(super) const SHORT: Wait = Wait { idle: Duration::from_millis(20), most: Duration::from_millis(20) };

    /// Nobody else is known to wait: the next thing that the program does may be to exit.
    pub(super) const ALONE: Wait = Wait { idle: Duration::from_millis(20), most: Duration::from_millis(100) };

    /// In a forked child, which may exit right after its reply: nobody would send a queue, and nobody else waits.
    pub(super) const CHILD: Wait = Wait { idle: Duration::from_secs(30), most: Duration::from_secs(300) };

    /// The program has left its loop, or is exiting: nobody would send what is left.
    pub const END: Wait = Wait { idle: Duration::from_secs(1), most: Duration::from_secs(10) };

    /// The program closes the connection; its loop serves others.
    pub const CLOSE: Wait = Wait { idle: Duration::from_millis(500), most: Duration::from_secs(2) };
}

/// The progress of the replies of one connection.
pub(super) struct Backlog {
    /// `None`: nothing waits.
    held: Option<Held>,
    total: &'static Total,
}

/// Bytes that wait in this process.
#[derive(Default)]
struct Total {
    bytes: AtomicUsize,
    /// The process whose bytes these are: a forked child starts again from zero.
    generation: AtomicU64,
}

struct Held {
    /// What this connection adds to the total.
    bytes: usize,
    /// [`QueuePair::taken`] when it last grew, and when that was.
    taken: (u64, Instant),
    /// The same for the last time that it had grown by [`LEAST`].
    moved: (u64, Instant),
    generation: u64,
}

impl Default for Backlog {
    fn default() -> Backlog {
        static TOTAL: Total = Total { bytes: AtomicUsize::new(0), generation: AtomicU64::new(0) };
        Backlog { held: None, total: &TOTAL }
    }
}

impl Total {
    fn change(&self, before: usize, now: usize) {
        let generation = fork::generation();
        if self.generation.swap(generation, Relaxed) != generation {
            self.bytes.store(0, Relaxed);
        }
        // Of the first two threads of a child, one may have counted before the other one resets the count.
        let change = |bytes: usize| Some((bytes + now).saturating_sub(before));
        let _ = self.bytes.fetch_update(Relaxed, Relaxed, change);
    }

    /// How long a peer may stall; and the total, if that makes the time short.
    fn patience(&self) -> (Duration, Option<usize>) {
        match self.bytes.load(Relaxed) {
            0..=CROWDED => (STOPPED, None),
            total @ ..=FULL => (STOPPED_CROWDED, Some(total)),
            total => (STOPPED_FULL, Some(total)),
        }
    }
}

impl Backlog {
    /// Notes what waits now.
    pub(super) fn note(&mut self, device: &dyn QueuePair) {
        match device.unsent() {
            0 if self.held.is_none() => {}
            0 => self.clear(),
            unsent => self.grow(unsent, device.taken(), Instant::now()),
        }
    }

    /// Nothing waits any more.
    pub(super) fn clear(&mut self) {
        if let Some(held) = self.held.take() {
            self.total.change(held.counted(), 0);
        }
    }

    fn grow(&mut self, bytes: usize, taken: u64, now: Instant) {
        let generation = fork::generation();
        let fresh = || Held { bytes: 0, taken: (taken, now), moved: (taken, now), generation };
        let held = self.held.get_or_insert_with(fresh);
        self.total.change(held.counted(), bytes);
        (held.bytes, held.generation) = (bytes, generation);
        if taken != held.taken.0 {
            held.taken = (taken, now);
        }
        if taken.wrapping_sub(held.moved.0) >= LEAST {
            held.moved = (taken, now);
        }
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_none()
    }

    /// Since when the peer has stalled though something waits for it.
    pub(super) fn since(&self) -> Option<Instant> {
        let held = self.held.as_ref()?;
        Some(if self.total.patience().1.is_some() { held.moved.1 } else { held.taken.1 })
    }

    /// When to check whether the peer has stopped.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.since()? + self.total.patience().0)
    }

    /// Why the connection is to be closed, if it is. The caller asks those first whose peers have stalled longest: each one
    /// that is closed makes room for the others.
    pub(super) fn has_stopped(&self, now: Instant) -> Option<Error> {
        let stood = now.saturating_duration_since(self.since()?);
        let (patience, total) = self.total.patience();
        if stood < patience {
            return None;
        }
        let (bytes, seconds) = (self.held.as_ref()?.bytes, stood.as_secs_f32());
        let all = total.map_or_else(String::new, |total| format!(", {total} for all peers together"));
        let text = format!("the peer has not taken its replies for {seconds:.1} s: {bytes} bytes wait{all}");
        Some(Error::new(Kind::NotSent, text))
    }
}

impl Held {
    /// Its share of the total of this process.
    fn counted(&self) -> usize {
        if self.generation == fork::generation() { self.bytes } else { 0 }
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Link {
    /// Whether so much waits for the peer that no more of its requests are taken.
    pub(super) fn is_behind(&self) -> bool {
        self.engine.closed().is_none() && self.device.unsent() > BACKLOG
    }

    /// Whether something is queued that the peer has no room for.
    pub(super) fn is_unsent(&self) -> bool {
        self.engine.closed().is_none() && self.device.unsent() > 0
    }

    /// Whether `next_request` would return one.
    pub(super) fn request_ready(&self) -> bool {
        self.engine.request_ready() && !self.is_behind()
    }

    /// The oldest complete request, unless its peer is behind with taking replies.
    pub(super) fn next_request(&mut self) -> Option<Request> {
        let request = if self.is_behind() { None } else { self.engine.poll_request() };
        // No event of the device would resume a connection that has paused.
        if std::mem::take(&mut self.paused) {
            self.pump();
        }
        // Handing up the request made room: Reads of the next long Calls may start.
        self.drain();
        request
    }

    /// Lets the engine pull long Calls of a peer that takes its replies, and of no other.
    pub(super) fn pace(&mut self) {
        self.engine.hold(self.is_behind());
        self.drain();
    }

    /// Closes the connection of a peer that talks without reading.
    pub(super) fn limit_talk(&mut self) {
        if self.device.unsent() == 0 {
            // As nearly always.
            self.talk_max = self.talk_max.min(TALK);
            return;
        }
        // Calls of our own are bounded by their credits.
        let calls = (self.engine.asked() as usize).saturating_mul(self.engine.thresholds().0);
        let unsent = self.device.unsent().saturating_sub(calls);
        // The limit for talk lies above the replies that are still queued, and falls as they leave.
        self.talk_max = self.talk_max.min(unsent.saturating_add(TALK));
        if unsent > self.talk_max {
            let text = format!("the peer does not take its replies: {unsent} bytes wait");
            self.fail(Error::new(Kind::NotSent, text));
        }
    }

    /// Queues a reply and sends what the device takes of it. See [`session::reply`].
    pub(super) fn begin_reply(&mut self, id: RequestId, message: Message, forked: bool) -> Reply {
        // A peer that has let one reply wait is not waited for again until it has taken all.
        let behind = self.device.unsent() > 0 && !forked;
        let lent = message.lent().next().is_some();
        let timed = self.timing.take(id).and_then(|(names, began)| {
            // A peer can invent procedures that do not exist: only success shows that one does.
            Some((self.recent.served(names, || is_success(message.body()))?, began))
        });
        let queued = match self.engine.answer(id, message) {
            Answered::Sent { gather, receive, invalidate } => {
                // RFC 8166 §3.3.1: the Receive is there before the peer hears that it may call again.
                match self.device.post_recv_of(&self.memory, receive) {
                    Ok(()) => self.send(gather, invalidate),
                    Err(error) => self.fail(error),
                }
                Ok(())
            }
            Answered::Failed(error) => Err(error),
            Answered::Not(message) => match self.engine.reply_shown(id, message, &mut *self.device) {
                Ok(Some(message)) => self.engine.reply(id, message),
                shown => shown.map(|_| ()),
            },
        };
        self.drain();
        let posted = queued.is_ok() && self.engine.closed().is_none();
        // What is queued now does not count as talk.
        self.talk_max = self.device.unsent().saturating_add(TALK);
        let mut reply = Reply { queued, lent, posted, gone: false, waits: false };
        reply.advance(self);
        reply.waits &= !behind;
        self.answered();
        match timed {
            Some((histogram, began)) if posted => histogram.took_since(began),
            _ if !posted => self.shown.add(Slot::Errors, 1),
            _ => {}
        }
        reply
    }

    /// What the peer has not taken of a reply goes out from a copy, so that the program gets its results back.
    pub(super) fn release(&mut self) {
        match self.device.release_lent() {
            Ok(copied) if copied > 0 => {
                log_debug!("fd {}: {copied} bytes kept for a slow peer", self.device.fd());
            }
            Ok(_) => {}
            Err(error) => self.fail(error),
        }
    }

    /// How a reply has ended.
    ///
    /// # Errors
    /// As [`Connection::reply`](crate::connection::Connection::reply); or why the connection was closed before the peer had
    /// the reply.
    pub(super) fn end_reply(&mut self, reply: Reply) -> Result<(), Error> {
        reply.queued?;
        // A peer that disconnects as soon as it has its reply has had it.
        if reply.posted && (reply.gone || self.device.unsent() == 0) {
            return Ok(());
        }
        self.engine.closed().map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// Whether the program has answered with results (RFC 5531 §9): what was called exists.
#[inline]
fn is_success(reply: &[u8]) -> bool {
    let word = |at: usize| {
        reply.get(at..at + 4).map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]))
    };
    // MSG_ACCEPTED; after the verifier, SUCCESS.
    let verifier = word(16).map_or(usize::MAX, |len| (len as usize).next_multiple_of(4));
    word(8) == Some(0) && verifier <= 400 && word(20 + verifier) == Some(0)
}

/// A reply on its way.
pub(super) struct Reply {
    queued: Result<(), Error>,
    /// It refers to memory of the program.
    pub(super) lent: bool,
    posted: bool,
    /// The device has taken all of it.
    gone: bool,
    /// The peer is waited for.
    pub(super) waits: bool,
}

impl Reply {
    /// Sends what the device takes.
    pub(super) fn advance(&mut self, link: &mut Link) {
        let all = link.flush();
        self.look(link, all);
    }

    /// Checks whether the device, which has just moved what it could, has taken the reply. `all`: the device has nothing left
    /// to do.
    pub(super) fn look(&mut self, link: &Link, all: bool) {
        let open = link.engine.closed().is_none();
        // There may be nothing left of the reply though `all` is false: Reads may still wait for their turn.
        self.gone = open && (all || link.device.unsent() == 0);
        self.waits = open && !self.gone;
    }
}

/// A wait that goes on as long as bytes are taken.
pub(super) struct Progress {
    wait: Wait,
    end: Instant,
    until: Instant,
    taken: u64,
}

impl Progress {
    pub(super) fn new(wait: Wait, taken: u64) -> Progress {
        let now = Instant::now();
        Progress { wait, end: now + wait.most, until: now + wait.idle, taken }
    }

    /// How long to sleep at most; `None` when it is over.
    pub(super) fn left(&mut self, taken: impl FnOnce() -> u64) -> Option<Duration> {
        let now = Instant::now();
        if now >= self.until {
            let before = std::mem::replace(&mut self.taken, taken());
            if self.taken == before {
                return None;
            }
            self.until = now + self.wait.idle;
        }
        let left = self.until.min(self.end).saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::sync::atomic::AtomicBool;
    use std::thread::scope;

    use super::super::client::tests::PATIENCE;
    use super::super::server::locked;
    use super::super::server::{PULL_STALL, Phase, Server, Shared};
    use smallvec::smallvec;

    use super::*;
    use crate::config::{Config, Provider};
    use crate::connection::Expect;
    use crate::connection::Role;
    use crate::driver::Callee;
    use crate::driver::memory;
    use crate::driver::pulls;
    use crate::driver::server::Next;
    use crate::driver::service_loop::Owner;
    use crate::driver::start::{connect_over, versions};
    use crate::driver::{server, session};
    use crate::fork::testing::fork;
    use crate::memory::{Buf, IoVecMut, Payload, Program, Region, Sink};
    use crate::provider::WorkRequest;
    use crate::reserve::testing::NoLongBlocks;
    use crate::socket;
    use crate::wait;
    use crate::wire::Xid;
    use std::sync::{Weak, mpsc};

    use crate::sync::Mutex;

    /// About how many bytes a socket of these tests holds.
    const SOCKET: i32 = 128 << 10;

    /// A connection whose ends hold little.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        socket::testing::set_buffers(listener.as_raw_fd(), SOCKET);
        let active = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        socket::testing::set_buffers(active.as_raw_fd(), SOCKET);
        (active, listener.accept().unwrap().0)
    }

    fn config() -> &'static Config {
        Box::leak(Box::new(Config { inline: Some(4096), ..Config::default() }))
    }

    /// Answers with as many bytes as the call asks for.
    fn answer(server: &Shared, request: Request) -> Result<(), Error> {
        let call: Vec<u8> = request.message.iter().flat_map(|piece| piece.iter().copied()).collect();
        let len = u32::from_be_bytes(call[4..8].try_into().unwrap()) as usize;
        let mut bytes = vec![7; len];
        bytes[..4].copy_from_slice(&call[..4]);
        let mut reply = server.message()?;
        reply.extend(&bytes)?;
        server.reply(request.id, reply.into())
    }

    fn unsent(server: &Shared) -> usize {
        match &locked(server).phase {
            Phase::Open(link) => link.device.unsent(),
            Phase::Starting(_) | Phase::Failed(_) => 0,
        }
    }

    /// Two ends of a connection that leaves the kernel little room. The client's end does only what a test makes it do.
    fn join() -> (Link, Shared, [TcpStream; 2]) {
        join_with(config())
    }

    fn join_with(config: &'static Config) -> (Link, Shared, [TcpStream; 2]) {
        let (active, passive) = pair();
        let mut device = connect_over(active.as_raw_fd(), config).unwrap();
        let mut server = Server::accept(passive.as_raw_fd(), config).unwrap();
        while !device.establish().unwrap() {
            assert!(server.receive().is_none());
        }
        let link = Link::new(Role::Client, config, versions(config), device, &memory(config));
        // Another test may be running the process's loop.
        server.home = Box::leak(Box::default());
        (link, Mutex::new(server), [active, passive])
    }

    /// Starts a call whose reply is to have `len` bytes; `next` makes it arrive.
    fn begin(client: &mut Link, xid: u32, len: usize) {
        let mut message = client.memory.message().unwrap();
        message.extend(&[xid, len as u32].map(u32::to_be_bytes).concat()).unwrap();
        client.begin(Xid(xid), message.into(), Expect::Reply { max: len, places: Vec::new() }).unwrap();
    }

    fn next(server: &Shared) -> Request {
        loop {
            if let Some(request) = locked(server).receive() {
                return request;
            }
            assert!(wait::until(locked(server).fd(), wait::IN, Some(PATIENCE), None).unwrap(), "no request");
        }
    }

    /// Moves both ends until the client has its reply.
    fn settle(client: &mut Link, server: &Shared) -> Result<usize, Error> {
        loop {
            client.pump();
            if let Some((_, outcome)) = client.done.pop() {
                return outcome.map(|reply| reply.iter().map(|piece| piece.len()).sum());
            }
            locked(server).push();
            std::thread::yield_now();
        }
    }

    /// Each call takes a place in the tables, including the one of calls that end with the connection.
    #[test]
    fn a_table_of_calls_that_gets_no_memory_fails_a_call_and_no_other() {
        let config = Box::leak(Box::new(Config::default()));
        let (mut client, _server, _sockets) = join_with(config);
        let none = NoLongBlocks::from_here();
        let mut begun = 0;
        let refused = loop {
            let mut message = client.memory.message().unwrap();
            message.extend(&[begun, 8].map(u32::to_be_bytes).concat()).unwrap();
            match client.begin(Xid(begun), message.into(), Expect::Reply { max: 8, places: Vec::new() }) {
                Ok(()) => begun += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), Kind::Os(libc::ENOMEM));
        assert!(begun > 10 && client.engine.calls() == begun as usize && client.engine.closed().is_none());
        client.fail(Error::new(Kind::ConnectionLost, "the end"));
        client.drain();
        assert_eq!(client.done.len(), begun as usize);
        drop(none);
    }

    #[test]
    fn a_client_that_asks_faster_than_it_reads_gets_all_and_little_waits_for_it() {
        const CALLS: u32 = 20;
        const LENGTH: usize = 4 << 20;
        let (mut client, server, _sockets) = join();
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        (0..CALLS).for_each(|n| begin(&mut client, 2 + n, LENGTH));
        let (mut most, mut came) = (0, Vec::new());
        while came.len() < CALLS as usize {
            // The client reads only while the server has nothing else to do.
            loop {
                let Some(request) = locked(&server).receive() else { break };
                answer(&server, request).unwrap();
                most = most.max(unsent(&server));
            }
            client.pump();
            came.append(&mut client.done);
            locked(&server).push();
            assert!(locked(&server).closed().is_none(), "{:?}", locked(&server).closed());
        }
        assert!(came.iter().all(|(_, outcome)| outcome.is_ok()));
        assert!(most > BACKLOG, "nothing ever waited");
        assert!(most < BACKLOG + LENGTH + (64 << 10), "{most} bytes waited");
    }

    /// Where the messages of the whole process hold too much memory, a server reads only up to its share, and comes back for
    /// the rest.
    #[test]
    fn a_server_that_holds_much_serves_before_it_reads_on_and_needs_no_event_for_the_rest() {
        const CALLS: u32 = 30;
        const LENGTH: usize = 60 << 10;
        let config = Box::leak(Box::new(Config::default()));
        let (mut client, server, _sockets) = join_with(config);
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        let full = memory(config).fill();
        for n in 0..CALLS {
            let mut message = client.memory.message().unwrap();
            message.extend(&[2 + n, 8].map(u32::to_be_bytes).concat()).unwrap();
            message.extend(&[9; LENGTH]).unwrap();
            client.begin(Xid(2 + n), message.into(), Expect::Reply { max: 8, places: Vec::new() }).unwrap();
        }
        let (mut served, mut most) = (0, 0);
        while served < CALLS {
            client.pump();
            let Some(request) = locked(&server).receive() else { continue };
            let held = match &locked(&server).phase {
                Phase::Open(link) => link.memory.own_received(),
                Phase::Starting(_) | Phase::Failed(_) => 0,
            };
            most = most.max(held);
            answer(&server, request).unwrap();
            served += 1;
        }
        assert!(most > 200 << 10, "{most}: nothing paused");
        assert!(most < 500 << 10, "{most} bytes were held");
        drop(full);
        while client.done.len() < CALLS as usize {
            client.pump();
            locked(&server).push();
        }
        assert!(client.done.iter().all(|(_, outcome)| outcome.is_ok()));
    }

    /// A server that has paused, with requests that nobody takes. The process holds too much memory as long as the last of
    /// these values lives. `before`: what both ends do first.
    fn pause(before: impl FnOnce(&mut Link, &Shared)) -> (Link, Shared, [TcpStream; 2], Sink) {
        let config = Box::leak(Box::new(Config::default()));
        let (mut client, server, sockets) = join_with(config);
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        before(&mut client, &server);
        let full = memory(config).fill();
        for n in 0..30 {
            let mut message = client.memory.message().unwrap();
            message.extend(&[1000 + n, 8].map(u32::to_be_bytes).concat()).unwrap();
            message.extend(&[9; 60 << 10]).unwrap();
            client
                .begin(Xid(1000 + n), message.into(), Expect::Reply { max: 8, places: Vec::new() })
                .unwrap();
        }
        loop {
            client.pump();
            let mut state = locked(&server);
            let link = state.link().unwrap();
            link.pump();
            if link.paused {
                break;
            }
        }
        (client, server, sockets, full)
    }

    /// What is done before the check. Returns whether the delay is the peer's doing.
    type Doing = fn(&mut Server, Instant) -> bool;

    #[test]
    fn who_has_answered_reads_while_the_loop_was_away_is_not_too_slow() {
        let doings: [Doing; 3] = [
            |_, _| true,
            |server, long_ago| {
                server.looked = long_ago;
                false
            },
            |server, _| {
                server.link().unwrap().paused = true;
                false
            },
        ];
        for doing in doings {
            let (mut client, server, sockets) = pulling();
            // The peer answers, and nobody looks.
            client.pump();
            client.flush();
            assert_eq!(sockets[1].peek(&mut [0]).unwrap(), 1);
            let slow = gives_way(&server, doing);
            assert_eq!(locked(&server).closed().is_some(), slow);
            if !slow {
                answer(&server, next(&server)).unwrap();
                assert!(matches!(settle(&mut client, &server), Ok(8)));
            }
        }
    }

    /// Procedures may take so long that the loop is away before each look.
    #[test]
    fn who_has_not_answered_reads_while_the_loop_was_away_is_too_slow() {
        let (client, server, _sockets) = pulling();
        gives_way(&server, |server, long_ago| {
            server.looked = long_ago;
            true
        });
        assert!(locked(&server).closed().is_some(), "others wait for its memory for ever");
        drop(client);
    }

    /// A client whose call is to be pulled, and which has not seen the Read Requests yet.
    fn pulling() -> (Link, Shared, [TcpStream; 2]) {
        let config = Box::leak(Box::new(Config { inline: Some(4096), ..Config::default() }));
        let (mut client, server, sockets) = join_with(config);
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        let mut message = client.memory.message().unwrap();
        message.extend(&[2, 8].map(u32::to_be_bytes).concat()).unwrap();
        message.extend(&[9; 80 << 10]).unwrap();
        client.begin(Xid(2), message.into(), Expect::Reply { max: 8, places: Vec::new() }).unwrap();
        while !locked(&server).pulling() {
            assert!(locked(&server).receive().is_none());
            assert!(client.flush());
        }
        (client, server, sockets)
    }

    /// Makes the server check whether a peer that should have answered long ago is too slow, now that others wait. Returns
    /// what `doing` says.
    fn gives_way(server: &Shared, doing: Doing) -> bool {
        let mut state = locked(server);
        let long_ago = Instant::now() - 2 * PULL_STALL;
        state.pulling = state.pulling.map(|(wanted, _)| (wanted, long_ago));
        let memory = memory(state.config).crowded();
        state.link().unwrap().memory = memory;
        let slow = doing(&mut state, long_ago);
        state.give_way();
        slow
    }

    /// The device has read ahead, and poll(2) tells only of what is in the socket.
    #[test]
    fn what_was_read_ahead_before_a_pause_is_served_without_an_event() {
        const LONG: u32 = 5;
        let config = Box::leak(Box::new(Config { poll: Duration::ZERO, ..Config::default() }));
        let (mut client, server, _sockets) = join_with(config);
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        let _full = memory(config).fill();
        for n in 0..=LONG {
            let mut message = client.memory.message().unwrap();
            message.extend(&[2 + n, 8].map(u32::to_be_bytes).concat()).unwrap();
            message.extend(&vec![9; if n < LONG { 60 << 10 } else { 40 }]).unwrap();
            client.begin(Xid(2 + n), message.into(), Expect::Reply { max: 8, places: Vec::new() }).unwrap();
        }
        while !client.flush() {
            locked(&server).link().unwrap().pump();
        }
        while !locked(&server).link().unwrap().paused {
            locked(&server).link().unwrap().pump();
        }
        let mut served = 0;
        while server::next(&server, || false, None) != Next::Arrival || has_come(&server) {
            let request = locked(&server).receive();
            if let Some(request) = request {
                answer(&server, request).unwrap();
                served += 1;
            }
        }
        assert_eq!(served, LONG + 1);
    }

    /// The thread that waits may not be one that serves, and the procedure that holds the loop up may wait for that thread.
    #[test]
    fn a_server_that_has_paused_reads_the_reply_to_its_call_back() {
        let (mut client, server, _sockets, _full) = pause(|client, _| {
            client.engine.grant(2);
        });
        let mut state = locked(&server);
        let link = state.link().unwrap();
        link.engine.ask(2, &mut *link.device);
        let mut message = link.memory.message().unwrap();
        message.extend(&[7, 0, 2, 100_000, 2, 0, 0, 0, 0, 0].map(u32::to_be_bytes).concat()).unwrap();
        link.begin(Xid(7), message.into(), Expect::Reply { max: 24, places: Vec::new() }).unwrap();
        let end = Instant::now() + PATIENCE;
        while link.done.is_empty() {
            assert!(Instant::now() < end, "no reply was read");
            // The client serves no calls back, and says so.
            client.pump();
            link.pump();
        }
        assert!(matches!(&link.done[..], [(Xid(7), Ok(_))]) && link.request_ready());
        // With nothing to wait for, it pauses again.
        link.paused = false;
        link.pump();
        assert!(link.paused);
    }

    /// Nobody serves any more at exit, and a client may read only when it has written everything.
    #[test]
    fn a_server_that_has_paused_sends_at_exit_what_waits_for_a_client_that_writes_first() {
        let (mut client, server, _sockets, _full) = pause(|client, server| {
            begin(client, 2, BACKLOG - (64 << 10));
            answer(server, next(server)).unwrap();
            assert!(unsent(server) > 0);
        });
        let end = Instant::now() + PATIENCE;
        while !client.flush() {
            assert!(Instant::now() < end, "the server does not read: {} bytes", client.device.unsent());
            assert!(locked(&server).rest().is_some());
        }
        while locked(&server).rest().is_some() {
            assert!(Instant::now() < end, "{} bytes are not sent", unsent(&server));
            client.pump();
        }
        client.pump();
        assert!(client.done.iter().any(|(xid, outcome)| *xid == Xid(2) && outcome.is_ok()));
    }

    #[test]
    fn requests_behind_a_reply_that_is_not_taken_wait_in_the_engine_with_the_socket_read() {
        let (mut client, server, _sockets) = join();
        // The first reply tells how many credits there are.
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));

        begin(&mut client, 2, 2 * BACKLOG);
        answer(&server, next(&server)).unwrap();
        assert!(unsent(&server) > BACKLOG);
        for xid in 3..10 {
            begin(&mut client, xid, 8);
        }
        // A long call, which is to be pulled.
        let mut message = client.memory.message().unwrap();
        message.extend(&[10u32, 8].map(u32::to_be_bytes).concat()).unwrap();
        message.extend(&vec![0; 300 << 10]).unwrap();
        client.begin(Xid(10), message.into(), Expect::Reply { max: 8, places: Vec::new() }).unwrap();
        let fd = locked(&server).fd();
        assert!(wait::until(fd, wait::IN, Some(PATIENCE), None).unwrap());
        assert!(locked(&server).receive().is_none());
        assert_eq!(server::next(&server, || false, None), Next::Arrival);
        // A loop that polls for bytes would spin if some were left; what wakes it is room to write, or the clock.
        assert!(!wait::until(fd, wait::IN, Some(Duration::ZERO), None).unwrap());
        let server_end = locked(&server);
        assert!(server_end.wants_write() && server_end.deadline().is_some());
        assert!(!server_end.pulling(), "memory is taken for more calls of a client that takes no replies");
        drop(server_end);

        while !locked(&server).request_ready() {
            client.pump();
            locked(&server).push();
        }
        for _ in 3..10 {
            answer(&server, next(&server)).unwrap();
        }
        let long = loop {
            client.pump();
            if let Some(request) = locked(&server).receive() {
                break request;
            }
        };
        answer(&server, long).unwrap();
        for _ in 2..=10 {
            settle(&mut client, &server).unwrap();
        }
        assert_eq!(locked(&server).deadline(), None);
    }

    #[test]
    fn one_reply_of_any_length_is_queued_as_a_whole_and_talk_beside_it_is_bounded() {
        let (mut client, server, _sockets) = join();
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        // Longer than all the talk that is tolerated.
        begin(&mut client, 2, TALK + BACKLOG);
        answer(&server, next(&server)).unwrap();
        let mut server_end = locked(&server);
        let Phase::Open(link) = &mut server_end.phase else { panic!("closed") };
        link.pump();
        assert!(link.engine.closed().is_none());
        let reply = link.device.unsent();
        let mut talk = 0;
        while link.engine.closed().is_none() {
            let mut message = link.memory.header().unwrap();
            message.extend(&[0; 28]).unwrap();
            link.device.post(WorkRequest::Send { gather: smallvec![message.freeze()], invalidate: None });
            talk += 1;
            link.limit_talk();
            assert!(talk < TALK, "nothing stops this client");
        }
        println!("{talk} answers beside {reply} bytes of a reply");
        assert!(talk * 28 <= TALK + (64 << 10));
    }

    #[test]
    fn a_reply_that_waits_for_its_peer_keeps_nobody_else_from_the_connection() {
        const LENGTH: usize = 4 << 20;
        let wait = Wait { idle: PATIENCE, most: PATIENCE };
        let (mut client, server, _sockets) = join();
        begin(&mut client, 1, LENGTH + 4);
        let request = next(&server);
        let mut reply = server.message().unwrap();
        reply.extend(&1u32.to_be_bytes()).unwrap();
        reply.extend(&vec![7; LENGTH]).unwrap();
        let sent = AtomicBool::new(false);
        scope(|scope| {
            scope.spawn(|| {
                let fd = locked(&server).fd();
                let state = locked(&server);
                let (state, outcome) =
                    session::reply(&&server, state, (fd, request.id), reply.into(), || wait, false);
                sent.store(true, Relaxed);
                drop(state);
                outcome.unwrap();
            });
            while unsent(&server) == 0 {
                std::thread::yield_now();
            }
            assert!(!sent.load(Relaxed), "the lock was free only when the peer was given up");
            assert!(settle(&mut client, &server).is_ok());
        });
    }

    #[test]
    fn a_reply_waits_as_long_as_its_peer_takes_something_and_no_longer() {
        const LENGTH: usize = 4 << 20;
        let wait = Wait { idle: Duration::from_millis(500), most: PATIENCE };
        let (mut client, server, _sockets) = join();
        let reply = |xid: u32, request: Request| {
            let mut reply = server.message().unwrap();
            reply.extend(&xid.to_be_bytes()).unwrap();
            reply.extend(&vec![7; LENGTH]).unwrap();
            let fd = locked(&server).fd();
            let start = Instant::now();
            let server_end = locked(&server);
            let (mut server_end, sent) =
                session::reply(&&server, server_end, (fd, request.id), reply.into(), || wait, false);
            sent.unwrap();
            (start.elapsed(), server_end.link().unwrap().device.unsent())
        };
        begin(&mut client, 1, LENGTH + 4);
        let request = next(&server);
        let came = AtomicBool::new(false);
        // The client takes at most what the sockets hold at a time.
        let pause = Duration::from_millis(100);
        scope(|scope| {
            scope.spawn(|| {
                while !came.load(Relaxed) {
                    client.pump();
                    std::thread::sleep(pause);
                }
            });
            let (time, left) = reply(1, request);
            came.store(true, Relaxed);
            assert_eq!(left, 0, "after {time:?}");
            assert!(time > 2 * wait.idle, "{time:?}: the client was not slow");
        });
        assert!(settle(&mut client, &server).is_ok());
        // A client that takes nothing at all.
        begin(&mut client, 2, LENGTH + 4);
        let (time, left) = reply(2, next(&server));
        assert!(left > 0 && time >= wait.idle && time < wait.most, "{left} bytes left after {time:?}");
        // And it is not waited for again.
        assert!(settle(&mut client, &server).is_ok());
    }

    /// The rest of the reply goes out while the connection is read: no event tells that it is gone.
    #[test]
    fn a_reply_through_shared_memory_is_not_waited_for_when_all_of_it_is_taken() {
        const LENGTH: usize = 4 << 20;
        let config = Config { provider: Provider::Only("local"), poll: Duration::ZERO, ..config().clone() };
        let (mut client, server, _sockets) = join_with(Box::leak(Box::new(config)));
        let over = AtomicBool::new(false);
        for xid in 1..50 {
            begin(&mut client, xid, LENGTH + 4);
            let request = next(&server);
            scope(|scope| {
                scope.spawn(|| {
                    while !over.load(Relaxed) {
                        client.pump();
                        std::thread::yield_now();
                    }
                });
                let mut reply = server.message().unwrap();
                reply.extend(&xid.to_be_bytes()).unwrap();
                reply.extend(&vec![7; LENGTH]).unwrap();
                let (server_end, wait) = (locked(&server), Wait { idle: PATIENCE, most: PATIENCE });
                let fd = server_end.fd();
                let start = Instant::now();
                let (server_end, sent) =
                    session::reply(&&server, server_end, (fd, request.id), reply.into(), || wait, false);
                drop(server_end);
                over.store(true, Relaxed);
                sent.unwrap();
                assert!(start.elapsed() < PATIENCE, "reply {xid} was waited for in vain");
            });
            over.store(false, Relaxed);
            assert!(matches!(settle(&mut client, &server), Ok(length) if length == LENGTH + 4));
        }
    }

    const BESIDE: usize = 1 << 20;

    /// Two ends that share memory.
    fn join_beside() -> (Link, Shared, [TcpStream; 2]) {
        let config = Config { provider: Provider::Only("local"), inline: Some(4096), ..Config::default() };
        join_with(Box::leak(Box::new(config)))
    }

    /// All bytes of a message, if the peer has not taken back those that are not here.
    fn bytes(payload: &Payload) -> Option<Vec<u8>> {
        let mut bytes = payload.iter().flat_map(|piece| piece.iter().copied()).collect::<Vec<_>>();
        let here = bytes.len();
        bytes.resize(payload.bytes(), 0);
        let rest = payload.rest.as_ref();
        rest.is_none_or(|rest| rest.copy(0, IoVecMut::from_mut(&mut bytes[here..]))).then_some(bytes)
    }

    /// A Call of [`BESIDE`] bytes, which may serve as a reply as well.
    fn fill(mut buf: Buf, xid: u32) -> (Buf, Vec<u8>) {
        let mut bytes: Vec<u8> = (0..BESIDE).map(|at| (at % 251) as u8).collect();
        bytes[..40]
            .copy_from_slice(&[xid, 0, 2, 0x2000_0000, 1, 1, 0, 0, 0, 0].map(u32::to_be_bytes).concat());
        buf.extend(&bytes).unwrap();
        (buf, bytes)
    }

    fn begin_beside(client: &mut Link, xid: u32) -> Vec<u8> {
        let (message, bytes) = fill(client.device.outbox().unwrap(), xid);
        let expect = Expect::Reply { max: BESIDE, places: Vec::new() };
        client.begin(Xid(xid), message.into(), expect).unwrap();
        bytes
    }

    /// A Call of two words, which lies in the outbox too.
    fn begin_short_beside(client: &mut Link, xid: u32, max: usize) {
        let mut message = client.device.outbox().unwrap();
        message.extend(&[xid, 8].map(u32::to_be_bytes).concat()).unwrap();
        client.begin(Xid(xid), message.into(), Expect::Reply { max, places: Vec::new() }).unwrap();
    }

    fn done(client: &mut Link) -> Payload {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "no reply");
            client.pump();
            if let Some((_, outcome)) = client.done.pop() {
                return outcome.unwrap();
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_long_call_and_its_reply_are_taken_from_where_they_were_encoded() {
        let (mut client, server, _sockets) = join_beside();
        for xid in 1..4 {
            let called = begin_beside(&mut client, xid);
            assert!(client.device.outbox().is_none(), "its message is there");
            let request = next(&server);
            assert_eq!(request.message[0].len(), 4096);
            assert!(bytes(&request.message).unwrap() == called);
            let (reply, replied) = fill(Callee::outbox(&server).unwrap(), xid);
            let (mut reply, mut replied) = (reply, replied);
            (reply[BESIDE - 1], replied[BESIDE - 1]) = (0xfe, 0xfe);
            server.reply(request.id, reply.into()).unwrap();
            let reply = done(&mut client);
            assert_eq!(reply[0].len(), 4096);
            assert!(Callee::outbox(&server).is_none() && bytes(&reply).unwrap() == replied);
            assert!(bytes(&request.message).is_none(), "the call is over");
            drop(reply);
            assert!(Callee::outbox(&server).is_some(), "its client has taken the reply");
        }
    }

    fn answer_short(server: &Shared, request: Request) {
        let mut reply = Callee::outbox(server).unwrap();
        reply.extend(&[request.xid.0, 1].map(u32::to_be_bytes).concat()).unwrap();
        server.reply(request.id, reply.into()).unwrap();
    }

    #[test]
    fn what_is_not_there_alone_goes_as_ever() {
        let (mut client, server, _sockets) = join_beside();
        let (message, called) = fill(client.memory.message().unwrap(), 1);
        client.begin(Xid(1), message.into(), Expect::Reply { max: BESIDE, places: Vec::new() }).unwrap();
        let first = loop {
            client.pump();
            if let Some(request) = locked(&server).receive() {
                break request;
            }
        };
        assert!(first.message.rest.is_none() && bytes(&first.message).unwrap() == called);
        answer_short(&server, first);
        assert_eq!(done(&mut client).bytes(), 8);
        // A Call that goes inline, and lies in the outbox.
        begin_short_beside(&mut client, 2, 8);
        let second = next(&server);
        assert!(second.message.rest.is_none());
        answer_short(&server, second);
        assert_eq!(done(&mut client).bytes(), 8);
        // A reply that is longer than what goes inline, and no longer than a page.
        begin_short_beside(&mut client, 9, 4096);
        let page = next(&server);
        let mut reply = Callee::outbox(&server).unwrap();
        reply.extend(&[9, 1].map(u32::to_be_bytes).concat()).unwrap();
        reply.extend(&[7; 4080]).unwrap();
        server.reply(page.id, reply.into()).unwrap();
        assert_eq!(done(&mut client).bytes(), 4088);
        // A reply for which no Reply chunk was offered.
        assert!(client.device.outbox().is_some(), "the Call was copied");
        begin_short_beside(&mut client, 3, 8);
        let (reply, _) = fill(Callee::outbox(&server).unwrap(), 3);
        let third = next(&server);
        assert_eq!(server.reply(third.id, reply.into()).unwrap_err().kind(), Kind::TooLong);
        assert!(Callee::outbox(&server).is_some());
        // And a reply that was encoded in the outbox of another connection.
        let (mut other, elsewhere, _others) = join_beside();
        begin_beside(&mut other, 7);
        let request = next(&elsewhere);
        let (reply, replied) = fill(Callee::outbox(&server).unwrap(), 7);
        std::thread::scope(|scope| {
            scope.spawn(|| elsewhere.reply(request.id, reply.into()).unwrap());
            let reply = done(&mut other);
            assert!(reply.rest.is_none() && bytes(&reply).unwrap() == replied);
        });
        assert!(Callee::outbox(&server).is_some());
    }

    #[test]
    fn a_parent_learns_that_its_child_has_answered_though_the_reply_was_too_long() {
        let (mut client, server, _sockets) = join();
        begin(&mut client, 1, 8);
        let id = next(&server).id;
        locked(&server).answered().share();
        let child = fork(|| {
            let (reply, _) = fill(server.message().unwrap(), 1);
            server.reply(id, reply.into()).is_err_and(|error| error.kind() == Kind::TooLong)
        });
        assert!(child.succeeded());
        assert!(settle(&mut client, &server).is_err());
        let mut server = locked(&server);
        assert!(server.receive().is_none());
        assert!(!server.link().unwrap().engine.has_handed());
    }

    /// What the child would ask for would come to its parent, which has not asked.
    #[test]
    fn a_forked_child_that_answers_a_call_asks_for_none_of_those_that_wait_behind_it() {
        struct Nobody;
        impl pulls::Waits for Nobody {
            fn turn(&self) -> bool {
                false
            }
        }
        let (mut client, server, _sockets) = join();
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        begin(&mut client, 2, 8);
        let request = next(&server);
        let (message, _) = fill(client.memory.message().unwrap(), 3);
        locked(&server).link().unwrap().engine.pull_in_turn();
        client.begin(Xid(3), message.into(), Expect::Reply { max: 8, places: Vec::new() }).unwrap();
        let asks = |server: &Shared| {
            let mut server = locked(server);
            assert!(server.receive().is_none());
            server.link().is_some_and(|link| link.engine.asks() > 0)
        };
        while !asks(&server) {
            client.pump();
        }
        let has_its_turn = || {
            let own: Weak<dyn pulls::Waits> = Weak::<Nobody>::new();
            locked(&server).link().unwrap().place = Some(pulls::Place::new(own, false));
        };
        let child = fork(|| {
            has_its_turn();
            answer(&server, request).is_ok()
        });
        assert!(child.succeeded());
        let reply = settle(&mut client, &server);
        assert!(matches!(reply, Ok(8)), "{reply:?}");
        has_its_turn();
        let third = loop {
            client.pump();
            let mut server = locked(&server);
            if let Some(request) = server.receive() {
                break request;
            }
            server.link().unwrap().drain();
        };
        assert_eq!(third.message.bytes(), BESIDE);
    }

    /// The bytes of the item may be anything, and look like a Call.
    #[test]
    fn an_item_that_lies_in_the_outbox_is_no_call() {
        let (mut client, server, _sockets) = join_beside();
        let (item, forged) = fill(client.device.outbox().unwrap(), 1);
        let item = client.device.expose_source(item.freeze()).unwrap();
        let call = [1, 0, 2, 0x2000_0000, 1, 99, 0, 0, 0, 0, BESIDE as u32].map(u32::to_be_bytes).concat();
        let [high, low] = [(item.offset >> 32) as u32, item.offset as u32];
        let header = [1, 1, 1, 0, 1, call.len() as u32, item.handle.0, item.length, high, low, 0, 0, 0];
        let message = [header.map(u32::to_be_bytes).concat(), call.clone()].concat();
        let gather = smallvec::smallvec![Region::copy_from(&message).unwrap()];
        client.device.post(WorkRequest::Send { gather, invalidate: None });
        let request = loop {
            client.pump();
            if let Some(request) = locked(&server).receive() {
                break request;
            }
        };
        assert!(bytes(&request.message).unwrap() == [call, forged].concat());
    }

    #[test]
    fn a_reply_that_nobody_waits_for_is_taken_all_the_same() {
        let (mut client, server, _sockets) = join_beside();
        begin_beside(&mut client, 1);
        let request = next(&server);
        client.abandon(Xid(1));
        let (reply, _) = fill(Callee::outbox(&server).unwrap(), 1);
        server.reply(request.id, reply.into()).unwrap();
        while Callee::outbox(&server).is_none() {
            client.pump();
        }
        assert!(client.done.is_empty() && client.device.outbox().is_some());
    }

    #[test]
    fn what_was_shown_can_be_taken_when_its_connection_is_over() {
        let (mut client, server, _sockets) = join_beside();
        let called = begin_beside(&mut client, 1);
        let request = next(&server);
        let (reply, replied) = fill(Callee::outbox(&server).unwrap(), 1);
        server.reply(request.id, reply.into()).unwrap();
        let reply = done(&mut client);
        locked(&server).shut();
        drop(server);
        assert!(bytes(&reply).unwrap() == replied);
        let (mut client, server, _sockets) = join_beside();
        assert_eq!(begin_beside(&mut client, 1), called);
        let request = next(&server);
        drop(client);
        assert!(bytes(&request.message).unwrap() == called);
    }

    #[test]
    fn who_takes_a_reply_is_not_idle_and_what_is_given_up_is_not_waited_for() {
        let (mut client, server, _sockets) = join();
        begin(&mut client, 1, 4 << 20);
        answer(&server, next(&server)).unwrap();
        let before = unsent(&server);
        assert!(before > 0 && locked(&server).rest().is_some());
        let heard = locked(&server).idle_since();
        while unsent(&server) == before {
            client.pump();
            locked(&server).push();
        }
        assert!(unsent(&server) > 0 && locked(&server).idle_since() > heard);
        locked(&server).shut();
        assert!(locked(&server).rest().is_none());
    }

    #[test]
    fn a_reply_that_the_kernel_has_taken_has_succeeded_though_its_client_is_gone() {
        let (mut client, server, sockets) = join();
        begin(&mut client, 1, 8);
        let request = next(&server);
        // The end of the connection is there to be read as soon as the reply has left.
        sockets[0].shutdown(Shutdown::Write).unwrap();
        let mut results = Program::new(&[7; 4]);
        let mut body = server.message().unwrap();
        body.extend(&[0, 0, 0, 1, 0, 0, 0, 0]).unwrap();
        let reply = Message::new(body, vec![(4, results.source())]);
        server.reply(request.id, reply).unwrap();
        assert!(results.is_back());
        assert!(locked(&server).closed().is_some(), "the end was not seen");
        client.pump();
        let (_, outcome) = client.done.pop().unwrap();
        let came: Vec<u8> = outcome.unwrap().iter().flat_map(|piece| piece.iter().copied()).collect();
        assert_eq!(came, [0, 0, 0, 1, 7, 7, 7, 7]);
    }

    /// A connection with one request to be answered with lent memory, and a second one that nobody has read.
    fn two_requests() -> (Link, Shared, [TcpStream; 2], impl Fn(&Shared)) {
        let (mut client, server, sockets) = join();
        begin(&mut client, 1, 8);
        answer(&server, next(&server)).unwrap();
        assert!(matches!(settle(&mut client, &server), Ok(8)));
        begin(&mut client, 2, 16);
        let request = next(&server);
        begin(&mut client, 3, 8);
        assert!(wait::until(locked(&server).fd(), wait::IN, Some(PATIENCE), None).unwrap());
        let reply = move |server: &Shared| {
            let mut body = server.message().unwrap();
            body.extend(&[0, 0, 0, 2, 0, 0, 0, 0]).unwrap();
            let mut results = Program::new(&[7; 4]);
            server.reply(request.id, Message::new(body, vec![(4, results.source())])).unwrap();
            assert!(results.is_back());
        };
        (client, server, sockets, reply)
    }

    fn has_come(server: &Shared) -> bool {
        wait::until(locked(server).fd(), wait::IN, Some(Duration::ZERO), None).unwrap()
    }

    /// What the replying thread takes off the connection would not wake the loop.
    #[test]
    fn who_replies_beside_a_loop_that_sleeps_leaves_it_what_has_come() {
        let (_client, server, _sockets, reply) = two_requests();
        let home = locked(&server).home;
        scope(|scope| scope.spawn(|| home.look()).join().unwrap());
        reply(&server);
        assert!(has_come(&server), "a request was taken that the loop is not told of");
    }

    #[test]
    fn who_replies_while_the_loop_is_inside_a_routine_tells_it_of_what_has_come() {
        let (_client, server, _sockets, reply) = two_requests();
        let home = locked(&server).home;
        let (begun, is_begun) = mpsc::channel();
        let (enough, is_enough) = mpsc::channel();
        scope(|scope| {
            scope.spawn(move || {
                let routine = home.begin(0, Weak::<Nobody>::new());
                begun.send(()).unwrap();
                is_enough.recv().unwrap();
                drop(routine);
            });
            // If something fails, the thread ends too.
            let enough = enough;
            is_begun.recv().unwrap();
            reply(&server);
            assert!(!has_come(&server));
            assert_eq!(home.take_left(), Some(locked(&server).fd()));
            enough.send(()).unwrap();
        });
    }

    #[test]
    fn who_replies_beside_a_routine_that_waits_for_its_call_back_leaves_it_what_has_come() {
        let (_client, server, _sockets, reply) = two_requests();
        let home = locked(&server).home;
        let routine = home.begin(0, Weak::<Nobody>::new());
        locked(&server).session.drive_as(usize::MAX);
        reply(&server);
        assert!(has_come(&server), "what the routine sleeps for was taken");
        drop(routine);
    }

    struct Nobody;

    impl Owner for Nobody {
        fn thrown(&self, _: u64) {}
        fn ended(&self, _: bool) {}
        fn look_again(&self) {}
    }

    /// The time for a policy: so many seconds after the start.
    fn after(start: Instant, seconds: f32) -> Instant {
        start + Duration::from_secs_f32(seconds)
    }

    fn backlog(total: &'static Total) -> Backlog {
        Backlog { held: None, total }
    }

    /// One thread of a child finds that the count is its parent's, another one counts, and then the first one resets the
    /// count.
    #[test]
    fn what_was_counted_before_a_child_has_begun_anew_leaves_nobody_short_of_time() {
        let total: &'static Total = Box::leak(Box::default());
        let mut one = backlog(total);
        one.grow(16 << 20, 0, Instant::now());
        total.bytes.store(0, Relaxed);
        one.clear();
        assert_eq!(total.patience(), (STOPPED, None));
    }

    #[test]
    fn a_peer_is_given_up_only_when_it_takes_nothing_at_all_for_a_minute() {
        let total: &'static Total = Box::leak(Box::default());
        let start = Instant::now();
        let mut one = backlog(total);
        assert!(one.deadline().is_none() && one.has_stopped(after(start, 1e6)).is_none());
        one.grow(16 << 20, 1000, start);
        assert_eq!(one.deadline(), Some(after(start, 60.0)));
        assert!(one.has_stopped(after(start, 59.9)).is_none());
        // One byte.
        one.grow(16 << 20, 1001, after(start, 59.9));
        assert!(one.has_stopped(after(start, 119.8)).is_none());
        let text = one.has_stopped(after(start, 120.0)).expect("stopped").to_string();
        assert!(text.contains("16777216 bytes wait") && !text.contains("together"), "{text}");
        one.clear();
        assert!(one.has_stopped(after(start, 1e6)).is_none());
    }

    #[test]
    fn where_much_waits_in_the_process_those_that_have_stood_longest_go_first_and_the_moving_stay() {
        let total: &'static Total = Box::leak(Box::default());
        let start = Instant::now();
        let mut moving = backlog(total);
        moving.grow(40 << 20, 0, start);
        let mut trickling = backlog(total);
        trickling.grow(40 << 20, 0, start);
        let mut stopped: Vec<Backlog> = (0..4).map(|_| backlog(total)).collect();
        for (n, stopped) in stopped.iter_mut().enumerate() {
            stopped.grow(16 << 20, 0, after(start, n as f32 / 10.0));
        }
        let now = after(start, 2.15);
        moving.grow(40 << 20, 17 << 10, after(start, 2.0));
        trickling.grow(40 << 20, 1 << 10, after(start, 2.0));
        assert!(moving.has_stopped(now).is_none());
        // In the order of their deadlines, as the loop asks them.
        assert!(stopped[0].deadline() < stopped[1].deadline());
        let mut gone = Vec::new();
        for (n, one) in stopped.iter_mut().enumerate() {
            if let Some(error) = one.has_stopped(now) {
                assert!(error.to_string().contains("together"), "{error}");
                one.clear();
                gone.push(n);
            }
        }
        // 144 MiB waited: without the first there is room.
        assert_eq!(gone, [0]);
        assert!(trickling.has_stopped(now).is_none());
        // More waits: a peer that takes too little is no better than one that has stopped.
        let mut more = backlog(total);
        more.grow(17 << 20, 0, now);
        assert!(trickling.has_stopped(now).is_some() && moving.has_stopped(now).is_none());
        // And when very much waits, a peer has less than a second.
        more.grow(200 << 20, 0, now);
        assert!(more.has_stopped(after(start, 2.2)).is_none());
        assert!(more.has_stopped(after(start, 2.4)).is_some());
        drop((more, moving, trickling, stopped));
        assert_eq!(total.bytes.load(Relaxed), 0);
    }
}
