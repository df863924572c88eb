//! The connection of the end that accepted it, driven by the program's own loop.
#![forbid(unsafe_code)]

use crate::fork;
use std::net::IpAddr;

use crate::sync::{Mutex, MutexGuard, is_poisoned};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::connection::{Fate, Request, RequestId, Role};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Message};
use crate::provider::{QueuePair, Traits};
use crate::stats::{self, Counter};
use crate::{log_info, log_warn, socket};

use super::backlog::Progress;
use super::backlog::{Backlog, Wait};
use super::link::{Link, sooner};
use super::peer::Peer;
use super::pulls::{Place, Waits};
use super::service_loop::{self, ServiceLoop};
use super::session::{self, Locked, Session, State};
use super::spin::Waiting;
use super::start::{self, START_TIMEOUT, versions};
use super::{Callee, LATE, TURN, TURN_TIME, busy, memory};
use crate::wait::{self, PollFd};
use std::sync::{Arc, TryLockError, Weak};

/// While others wait for the memory that pulled Calls hold, a peer has this long to send what it was asked for: all of it, or
/// [`PULL_LEAST`] bytes. So a Call of 64 MiB takes some five minutes at most.
pub(super) const PULL_STALL: Duration = Duration::from_secs(5);
const PULL_LEAST: u64 = 1 << 20;
/// A loop that has not looked at a connection for this long was away.
const PULL_AWAY: Duration = Duration::from_secs(1);

const TURN_NANOS: u64 = TURN_TIME.as_nanos() as u64;

/// How often a connection that waits for the memory of pulled Calls tries again.
const PULL_RETRY: Duration = Duration::from_millis(20);

/// How long a connection that goes over no TCP socket may be silent before its peer is probed. A peer that has not answered by
/// the next time is gone: nothing else would ever tell.
pub(super) const PROBE_EVERY: Duration = Duration::from_secs(30);

/// How often a child that serves looks whether its parent has ended, in nanoseconds: that takes system calls.
const CLAIM_EVERY: u64 = 10_000_000;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is not established yet.
    Starting,
    /// No call has come.
    Unused,
    /// Calls have come.
    Used,
}

/// A responder's connection, driven by the loop of the program through `receive`, `reply` and [`next`].
pub struct Server {
    pub(super) fd: RawFd,
    pub(super) traits: &'static Traits,
    pub(super) peer: Option<SocketAddr>,
    pub(super) config: &'static Config,
    pub(super) phase: Phase,
    /// The loop that drives it.
    pub(super) home: &'static ServiceLoop,
    pub(super) turn: Turn,
    /// Distinguishes connections of this process.
    pub(super) id: usize,
    /// When the startup must be complete.
    pub(super) start_by: Instant,
    /// When something came last, by [`stats::clock`].
    pub(super) heard: u64,
    /// When to probe whether the peer is there.
    probe_at: Instant,
    /// While RDMA Reads are under way: how many bytes they must have brought in all to have made progress, and since when.
    pub(super) pulling: Option<(u64, Instant)>,
    /// When that was last checked.
    pub(super) looked: Instant,
    /// Since when a long Call waits for memory, and when to try again.
    pub(super) retry: Option<(Instant, Instant)>,
    /// Itself, if its Calls are pulled in their turn.
    own: Option<Weak<Shared>>,
    /// Replies that the peer has not taken.
    pub(super) backlog: Backlog,
    pub(super) generation: u64,
    /// Fork generation of the process that has read from it last.
    reader: u64,
    /// When that process, a child, looks next whether its parent has ended.
    claim_at: u64,
    /// Calls back to the client, and who waits for them.
    pub(super) session: Session,
    /// What forked children have answered.
    answered: Arc<fork::Answered>,
    /// Requests that are deferred and most likely left to children.
    left: Vec<RequestId>,
    /// Requests handed up.
    pub(super) received: u64,
    /// When it was last counted among those that serve.
    counted: u64,
}

/// What the program's loop has done for a connection since it had its last chance to look at others.
#[derive(Default)]
pub(super) struct Turn {
    requests: u32,
    /// When the first of them was handed up, by [`stats::clock`].
    began: Option<u64>,
    /// The turn before was ended with requests left, and this one has been put off this many times since.
    put_off: Option<u32>,
    /// This turn has just been put off.
    waits: bool,
}

impl Turn {
    fn handed_up(&mut self, now: u64) {
        self.requests += 1;
        self.began.get_or_insert(now);
    }

    fn is_over(&self) -> bool {
        self.requests >= TURN
            || self.began.is_some_and(|began| stats::clock().saturating_sub(began) >= TURN_NANOS)
    }
}

/// What comes next on a connection: [`next`].
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A complete request lies in memory.
    Request,
    /// The same, but others have their turn first. Nothing in the descriptor tells of the request.
    Later,
    /// Whatever the descriptor tells of.
    Arrival,
    /// Whatever the loop finds, which looks at the connection itself meanwhile (`busy`).
    Soon,
    /// Nothing: it is closed.
    Closed,
}

pub(super) enum Phase {
    Starting(Box<dyn QueuePair>),
    Open(Box<Link>),
    Failed(Error),
}

impl Server {
    /// Waits for the MPA Request on an accepted socket.
    ///
    /// # Errors
    /// When the configuration allows no device for it, or that cannot be set up.
    pub fn accept(fd: RawFd, config: &'static Config) -> Result<Server, Error> {
        Ok(Server::with(fd, start::accept(fd, config)?, socket::peer(fd), config))
    }

    /// Waits for the end of a startup. The connection gets a descriptor of its own, which belongs to the caller.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn new(
        device: Box<dyn QueuePair>,
        peer: Option<SocketAddr>,
        config: &'static Config,
    ) -> Result<Server, Error> {
        Ok(Server::with(socket::duplicate(device.fd())?, device, peer, config))
    }

    pub(super) fn with(
        fd: RawFd,
        device: Box<dyn QueuePair>,
        peer: Option<SocketAddr>,
        config: &'static Config,
    ) -> Server {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Server {
            fd,
            traits: device.traits(),
            peer,
            config,
            phase: Phase::Starting(device),
            home: &service_loop::PROGRAM,
            turn: Turn::default(),
            id: NEXT.fetch_add(1, Relaxed),
            start_by: Instant::now() + START_TIMEOUT,
            heard: stats::clock(),
            probe_at: Instant::now() + PROBE_EVERY,
            pulling: None,
            looked: Instant::now(),
            retry: None,
            own: None,
            backlog: Backlog::default(),
            generation: fork::generation(),
            reader: fork::generation(),
            claim_at: 0,
            session: Session::new(config.poll),
            answered: Arc::default(),
            left: Vec::new(),
            received: 0,
            counted: 0,
        }
    }

    /// Which of its requests children have answered, by number.
    pub fn answered(&self) -> Arc<fork::Answered> {
        self.answered.clone()
    }

    /// Takes account of what children have done, before a Call is read, answered, or kept for an answer.
    #[inline]
    fn heed_children(&mut self) {
        if self.answered.is_shared() {
            self.heed_shared();
        }
    }

    #[cold]
    fn heed_shared(&mut self) {
        if let Phase::Open(link) = &mut self.phase {
            link.engine.shares();
            // Only the parent takes from the log.
            if self.generation == fork::generation() {
                self.answered.take(|number| link.engine.answered_elsewhere(RequestId::of(number)));
            }
        }
    }

    /// Whether a child that a thread is about to fork may answer a request of this connection: one that was deferred and was
    /// not left to another child, or `any`.
    pub fn concerns_child(&self, any: bool) -> bool {
        let Phase::Open(link) = &self.phase else { return false };
        let is_left = |id: &RequestId| !any && self.left.contains(id);
        let waits = |id: RequestId| !is_left(&id) && !self.answered.has(id.number());
        any && link.engine.has_handed() || link.engine.deferred().any(waits)
    }

    /// Makes it one that transport and callers share: its long Calls are pulled in their turn.
    pub fn shared(self) -> Arc<Shared> {
        let shared = Arc::new(Mutex::new(self));
        locked(&shared).own = Some(Arc::downgrade(&shared));
        shared
    }

    /// Moves what has come, and hands out the oldest complete request.
    pub fn receive(&mut self) -> Option<Request> {
        let now = stats::clock();
        if self.traits.socket || matches!(self.phase, Phase::Starting(_)) {
            self.heard = now;
        }
        if let Phase::Starting(device) = &mut self.phase {
            match device.establish() {
                Ok(false) => return None,
                Ok(true) => self.open(),
                Err(error) => {
                    log_info!("fd {}: startup failed: {error}", self.fd);
                    self.phase = Phase::Failed(error);
                    return None;
                }
            }
        }
        if self.forked() {
            self.inherit(now);
        }
        self.heed_children();
        let Phase::Open(link) = &mut self.phase else { return None };
        let before = link.device.moved();
        if !link.request_ready() {
            link.pump();
        }
        // The loop may also have been woken because something of ours is complete.
        if link.device.moved() != before {
            self.heard = now;
        }
        let request = link.next_request();
        if let Some(request) = &request {
            link.handed_up(request, now);
        }
        self.settle();
        let request = request?;
        self.received += 1;
        self.turn.handed_up(now);
        stats::add(Counter::Served, 1);
        self.home.serves(self.id);
        let others = self.home.company(&mut self.counted, now);
        if let Some(link) = self.link() {
            link.device.tell_company(u32::try_from(others).unwrap_or(u32::MAX));
        }
        Some(request)
    }

    /// A forked child serves the connection. If its parent has ended (a daemon's), the connection is this process's from here on.
    #[cold]
    fn inherit(&mut self, now: u64) {
        if self.is_left_to_parent() {
            (self.reader, self.claim_at) = (fork::generation(), now);
            self.session.inherit();
        }
        if now < self.claim_at {
            return;
        }
        self.claim_at = now + CLAIM_EVERY;
        if let Phase::Open(link) = &mut self.phase
            && link.device.claim(true)
        {
            self.generation = fork::generation();
            log_info!("fd {}: the parent has ended: the connection is this process's", self.fd);
        }
    }

    /// Whether this process can no longer read from the connection, because another one does. It may have replies to send.
    pub fn has_missed(&mut self) -> bool {
        self.forked() && self.link().is_some_and(|link| link.device.has_missed())
    }

    /// Whether a request that was handed up, perhaps before a fork, may still be answered.
    pub fn owes_replies(&mut self) -> bool {
        self.link().is_some_and(|link| link.engine.owes_replies())
    }

    /// Keeps [`LATE`] deferred requests answerable, whatever comes meanwhile.
    pub fn keep_deferred(&mut self) {
        if let Some(link) = self.link() {
            link.engine.keep_deferred(LATE);
        }
    }

    /// Notes the progress of replies and Reads.
    pub(super) fn note(&mut self) {
        let Phase::Open(link) = &mut self.phase else { return };
        if link.engine.closed().is_some() {
            self.backlog.clear();
        } else {
            self.backlog.note(&*link.device);
        }
        let (pulling, waits) = (link.engine.pulling(), link.engine.waits_for_memory());
        if pulling.is_none() && !waits {
            // As nearly always: the time does not matter.
            (self.pulling, self.retry) = (None, None);
        } else {
            self.note_pulls(pulling, waits);
        }
    }

    #[cold]
    fn note_pulls(&mut self, pulling: Option<u64>, waits: bool) {
        let Phase::Open(link) = &mut self.phase else { return };
        let now = Instant::now();
        self.looked = now;
        let pulled = link.device.pulled();
        if let Some(place) = &mut link.place {
            place.has_brought(pulled, stats::clock());
        }
        self.pulling = pulling.map(|asked| match self.pulling {
            Some(wanted) if pulled < wanted.0 => wanted,
            _ => (asked.min(pulled + PULL_LEAST), now),
        });
        let since = self.retry.map_or(now, |(since, _)| since);
        self.retry = waits.then_some((since, now + PULL_RETRY));
    }

    /// Whether RDMA Reads are under way, which hold memory that other connections may wait for.
    pub fn pulling(&self) -> bool {
        self.pulling.is_some()
    }

    /// Since when a long Call waits for memory that other connections hold.
    pub fn waits_for_memory(&self) -> Option<Instant> {
        self.retry.map(|(since, _)| since)
    }

    /// The descriptor is about to be closed.
    pub fn shut(&mut self) {
        self.end(Error::new(Kind::ConnectionLost, "the connection was closed"));
    }

    /// Closes the connection; what it has brought is dropped.
    fn end(&mut self, error: Error) {
        if let Phase::Open(link) = &mut self.phase {
            link.fail(error.clone());
            link.drain();
        }
        self.settle();
        self.phase = Phase::Failed(error);
        self.backlog.clear();
    }

    /// The link of an open connection that works.
    pub(super) fn link(&mut self) -> Option<&mut Link> {
        match &mut self.phase {
            Phase::Open(link) if link.engine.closed().is_none() => Some(link),
            _ => None,
        }
    }

    /// Closes the connection if its Reads have made no progress for a while and others wait because of them: for the memory of
    /// all peers, or of this one. Not if that is our own doing: where the loop was away, or has paused, what the peer has
    /// answered lies unread.
    pub fn give_way(&mut self) {
        self.heed_children();
        let now = Instant::now();
        let stalled =
            self.pulling.is_some_and(|(_, since)| now.saturating_duration_since(since) >= PULL_STALL);
        let away = now.saturating_duration_since(self.looked) >= PULL_AWAY;
        if let Phase::Open(link) = &mut self.phase
            && stalled
            && !link.paused
            && link.memory.is_crowded()
        {
            let moved = link.device.moved();
            if away {
                link.pump();
            }
            // A peer that has neither sent nor taken anything all the time is too slow even if the loop is away before each
            // look.
            if away && (link.paused || link.device.moved() != moved || link.engine.closed().is_some()) {
                self.pulling = Some((link.device.pulled() + PULL_LEAST, now));
                self.settle();
                return;
            }
            let text = "the peer answers RDMA Reads too slowly, and others wait for the memory of its call";
            link.fail(Error::new(Kind::Timeout, text));
            link.drain();
            self.settle();
        }
    }

    fn open(&mut self) {
        let closed = Phase::Failed(Error::new(Kind::ConnectionLost, "closed"));
        if let Phase::Starting(device) = std::mem::replace(&mut self.phase, closed) {
            let memory = memory(self.config).of_peer(self.peer.map(|at| at.ip()));
            let mut link = Link::new(Role::Server, self.config, versions(self.config), device, &memory);
            link.known_as(self.fd, self.peer);
            let peer = self.peer.map_or_else(|| "a peer".to_owned(), |at| at.to_string());
            log_info!("fd {}: accepted {peer} over rdma ({})", self.fd, link.describe());
            self.traits = link.device.traits();
            if let Some(own) = &self.own {
                link.pull_in_turn(Place::new(own.clone(), socket::own_host(self.fd)));
            }
            self.phase = Phase::Open(Box::new(link));
        }
    }

    /// Whether the turn that begins now is put off: nobody else was served since the last one was ended, and another
    /// descriptor of the loop has something ([`next`] says that the rest comes later). The loop visits such a connection twice
    /// for each visit to others: for what is in memory, and for what the descriptor tells of.
    pub fn puts_off(&mut self, others: impl FnOnce() -> bool) -> bool {
        // Twice at most: what the others have may be something that their turn does not take away.
        let Some(times @ 0..2) = self.turn.put_off else { return false };
        self.turn.waits = self.home.served_last(self.id) && others();
        self.turn.put_off = self.turn.waits.then_some(times + 1);
        self.turn.waits
    }

    /// What comes next, as far as can be told without waiting; `None` where it may pay to spin for that.
    fn look(&mut self) -> Option<Next> {
        let Phase::Open(link) = &mut self.phase else { return Some(Next::Arrival) };
        if link.request_ready() {
            return Some(if self.turn.is_over() { Next::Later } else { Next::Request });
        }
        // Where replies wait, it is up to the peer to take them.
        let spins = self.session.may_spin()
            && !link.is_behind()
            && !self.turn.is_over()
            && !self.forked()
            && self.home.is_quiet_for(self.id);
        (!spins).then_some(Next::Arrival)
    }

    /// Whether it has just served, and a look at it costs nothing: then nobody need wake the loop for it. A loop that does not
    /// spin looks once, when all others have had their turn.
    fn is_busy(&mut self) -> bool {
        if !self.traits.socket || self.forked() || !self.session.is_unattended() || self.turn.began.is_none()
        {
            return false;
        }
        let Some(link) = self.link().filter(|link| !link.is_behind()) else { return false };
        link.device.spin()
    }

    /// Whether the descriptor tells of what comes next, or another thread looks.
    pub fn rests(&mut self) -> bool {
        let rests = self.is_left_to_parent() || self.link().is_none_or(|link| link.device.rest());
        rests || self.session.another_reads()
    }

    /// Moves what can move. Returns the device if something still waits for the peer and this process is to send it.
    pub(super) fn rest(&mut self) -> Option<&dyn QueuePair> {
        if self.forked() {
            return None;
        }
        self.heed_children();
        let Phase::Open(link) = &mut self.phase else { return None };
        if link.is_unsent() {
            link.pump_on();
            // Another thread may be spinning, or this one may have been interrupted while it was.
            if !link.device.rest() {
                link.pump_on();
            }
        }
        self.settle();
        let link = self.link()?;
        (link.device.unsent() > 0).then_some(&*link.device)
    }

    /// When something came last.
    fn heard_at(&self) -> Instant {
        let ago = Duration::from_nanos(stats::clock().saturating_sub(self.heard));
        let now = Instant::now();
        now.checked_sub(ago).unwrap_or(now)
    }

    /// Why the connection is closed, if it is. A startup that takes too long closes it.
    pub fn closed(&mut self) -> Option<Error> {
        match &self.phase {
            Phase::Starting(_) if Instant::now() >= self.start_by => {
                let error = Error::new(Kind::Timeout, "the peer did not complete the startup in time");
                self.phase = Phase::Failed(error.clone());
                Some(error)
            }
            Phase::Starting(_) => None,
            Phase::Open(link) => link.engine.closed().cloned(),
            Phase::Failed(error) => Some(error.clone()),
        }
    }

    /// When `closed` must be asked again though nothing has arrived.
    pub fn deadline(&self) -> Option<Instant> {
        if matches!(self.phase, Phase::Starting(_)) {
            return Some(self.start_by);
        }
        let probe = (!self.traits.socket && matches!(self.phase, Phase::Open(_))).then_some(self.probe_at);
        sooner(sooner(self.retry.map(|(_, at)| at), self.backlog.deadline()), probe)
    }

    /// Whether there is nothing to look at before its descriptor tells of something: nothing waits for a time, for memory or
    /// for room in the socket, as nearly always.
    pub fn is_quiet(&self) -> bool {
        let waits = self.pulling.is_some() || self.retry.is_some() || !self.backlog.is_empty();
        let waits = |link: &Link| waits || link.awaits_turn() || link.device.wants_write();
        matches!(&self.phase, Phase::Open(link) if self.traits.socket && !waits(link))
    }

    /// Since when the peer has taken nothing of what waits for it.
    pub fn stands_since(&self) -> Option<Instant> {
        self.backlog.since()
    }

    /// Whether unsent bytes wait for the socket to become writable.
    pub fn wants_write(&self) -> bool {
        match &self.phase {
            Phase::Starting(device) => device.wants_write(),
            Phase::Open(link) => link.engine.closed().is_none() && link.device.wants_write(),
            Phase::Failed(_) => false,
        }
    }

    /// Whether something waits until the peer takes it: for a descriptor to become writable, or for room in memory.
    pub fn awaits_peer(&self) -> bool {
        self.wants_write() || matches!(&self.phase, Phase::Open(link) if link.is_unsent())
    }

    /// Sends what the socket takes now; closes the connection of a peer that has stopped taking anything.
    pub fn push(&mut self) {
        if let Err(error) = self.probe(Instant::now()) {
            log_info!("fd {}: {error}", self.fd);
            return self.end(error);
        }
        match &mut self.phase {
            Phase::Open(link) => {
                link.retry();
                link.flush();
                link.pace();
                self.backlog.note(&*link.device);
                if let Some(error) = self.backlog.has_stopped(Instant::now()) {
                    log_warn!("fd {}: {error}", self.fd);
                    return self.end(error);
                }
                self.settle();
            }
            Phase::Starting(device) => {
                if let Ok(true) = device.establish() {
                    self.open();
                }
            }
            Phase::Failed(_) => {}
        }
    }

    /// Probes whether a peer that says nothing is there.
    fn probe(&mut self, now: Instant) -> Result<(), Error> {
        if self.traits.socket || now < self.probe_at {
            return Ok(());
        }
        let quiet = now.saturating_duration_since(self.heard_at());
        // Not changed with each message: this is what the loop is woken for.
        self.probe_at = now + PROBE_EVERY.saturating_sub(quiet).max(PROBE_EVERY / 10);
        if quiet < PROBE_EVERY || self.forked() {
            return Ok(());
        }
        self.probe_at = now + PROBE_EVERY;
        self.link().map_or(Ok(()), |link| link.device.probe())
    }

    /// How far a connection whose memory is locked has come, and the address of its peer. `None` for others.
    pub fn stage(&self) -> Option<(Stage, Option<IpAddr>)> {
        let stage = match self.phase {
            _ if !self.traits.locked_memory => return None,
            Phase::Starting(_) => Stage::Starting,
            _ if self.received == 0 => Stage::Unused,
            _ => Stage::Used,
        };
        Some((stage, self.peer.map(|at| at.ip())))
    }

    /// Since when nothing has come from the peer, and it has taken nothing of what waits for it; `None` while it is called
    /// back.
    pub fn idle_since(&self) -> Option<Instant> {
        let heard = self.heard_at();
        let taken = self.backlog.since().unwrap_or(heard);
        self.session.is_unattended().then_some(heard.max(taken))
    }

    /// What to wait for.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether this process inherited the connection, and it is not its own yet ([`Server::inherit`]).
    pub fn forked(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Whether only the process that has accepted it reads from it, and not this one.
    pub fn is_left_to_parent(&self) -> bool {
        self.reader != fork::generation()
    }
}

/// A server's connection as transport and callers share it.
pub type Shared = Mutex<Server>;

/// Its number for [`fork::lock`].
pub fn number_of(server: &Shared) -> usize {
    std::ptr::from_ref(server).addr()
}

/// A connection whose lock is poisoned is closed by `tirpc::server`, which finds that out.
pub fn locked(server: &Shared) -> MutexGuard<'_, Server> {
    fork::lock(server, number_of(server))
}

/// Sends what waits for the peers of `servers`, as long as one of them takes something.
///
/// Takes no lock that somebody holds for long: it may be called in the midst of anything, by exit(3).
pub fn send_rest(servers: &[Arc<Shared>], wait: Wait) {
    /// A connection is read now and then too: two ends that only write would wait for each other.
    const LOOK: Duration = Duration::from_millis(50);
    /// Somebody else has the lock for microseconds.
    const BUSY: Duration = Duration::from_micros(100);
    let mut patience = Progress::new(wait, 0);
    loop {
        let (mut fds, mut taken, mut bytes, mut busy) = (Vec::new(), 0u64, 0, false);
        for server in servers {
            match server.try_lock() {
                Ok(mut server) => {
                    if let Some(rest) = server.rest() {
                        bytes += rest.unsent();
                        taken = taken.wrapping_add(rest.taken());
                        fds.push(PollFd::new(server.fd, server.traits.one_event, server.wants_write()));
                    }
                }
                Err(TryLockError::WouldBlock) => busy = true,
                Err(TryLockError::Poisoned(_)) => {}
            }
        }
        if fds.is_empty() && !busy {
            return;
        }
        let Some(left) = patience.left(|| taken) else {
            if bytes > 0 {
                log_warn!("{bytes} bytes of replies are lost: their peers do not take them");
            }
            return;
        };
        match fds.is_empty() {
            true => std::thread::sleep(BUSY),
            false => drop(wait::poll(&mut fds, Some(left.min(LOOK)), None)),
        }
    }
}

/// Whether something has come on a connection that the loop looks at, or the descriptor belongs to another one by now. A
/// connection that somebody has locked, or that a fork in one of its routines concerns, is looked at later.
pub(super) fn has_come(server: &Shared, fd: RawFd) -> bool {
    let forks = || fork::is_under_way(number_of(server));
    if forks() {
        return false;
    }
    match server.try_lock() {
        // A fork has begun meanwhile.
        Ok(_) if forks() => false,
        Ok(mut server) => server.fd == fd && server.link().is_none_or(|link| link.device.has_come()),
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Poisoned(_)) => true,
    }
}

/// Whether its descriptor tells of what comes next.
pub(super) fn rests(server: &Shared, fd: RawFd) -> bool {
    if fork::is_under_way(number_of(server)) {
        return false;
    }
    let mut server = locked(server);
    server.fd != fd || server.rests()
}

/// What comes next on a connection, after waiting for a complete request as long as spinning pays. `others`: whether another
/// descriptor of the program's loop has something. `own`: the same connection, if the loop is the library's own, which looks
/// at busy ones itself.
pub fn next(server: &Shared, others: impl Fn() -> bool, own: Option<&Arc<Shared>>) -> Next {
    let mut state = locked(server);
    if std::mem::take(&mut state.turn.waits) {
        return Next::Later;
    }
    let mut next = state.look();
    if next.is_none() {
        let _waiting = Waiting::begin();
        let found = |state: &mut Server| state.request_ready() || state.link().is_none();
        (state, _) = session::spin(&server, state, found, others);
        next = state.request_ready().then_some(Next::Request);
    }
    let mut next = next.unwrap_or(Next::Arrival);
    if next == Next::Arrival
        && let Some(own) = own
        && state.is_busy()
        && busy::add(state.fd, own)
    {
        next = Next::Soon;
    } else if next == Next::Arrival && !state.rests() {
        // Something has come just now, of which the descriptor does not tell.
        state.pump();
        next = match state.request_ready() {
            true if !state.turn.is_over() => Next::Request,
            false if state.rests() => Next::Arrival,
            _ => Next::Later,
        };
    }
    let next = match next {
        Next::Soon if state.closed().is_some() => Next::Closed,
        Next::Arrival if state.closed().is_some() => Next::Closed,
        next => next,
    };
    if next != Next::Request {
        state.turn = Turn { put_off: (next == Next::Later).then_some(0), ..Turn::default() };
    }
    next
}

/// What is known of the client of a connection that was accepted.
///
/// # Errors
/// As [`Server::peer`].
pub fn peer(server: &Shared) -> Result<Peer, Error> {
    locked(server).peer()
}

impl<'a> Locked<'a> for &'a Shared {
    type State = Server;

    fn lock(&self) -> MutexGuard<'a, Server> {
        locked(self)
    }

    fn may_read(&self, state: &mut Server) -> bool {
        state.home.may_read() && !state.session.another_reads()
    }

    fn read(&self, state: &mut Server) {
        let home = state.home;
        if state.session.another_reads() {
            state.send();
        } else if home.is_mine() {
            state.pump();
        } else if home.read_instead(|| state.read_for_loop()).is_none() {
            state.send();
        }
    }

    fn taken(&self, state: &mut Server) {
        if let Some(fd) = state.for_loop() {
            state.home.leave(fd);
        }
    }

    /// Offers it to the clients of other connections, which call the sooner then.
    fn may_offer(&self, state: &mut Server) -> bool {
        state.home.active() > 1
    }
}

impl State for Server {
    fn parts(&mut self) -> (&mut Session, Option<&mut Link>) {
        let link = match &mut self.phase {
            Phase::Open(link) => Some(&mut **link),
            Phase::Starting(_) | Phase::Failed(_) => None,
        };
        (&mut self.session, link)
    }

    fn moved(&mut self) {
        self.note();
    }
}

impl Waits for Shared {
    fn turn(&self) -> bool {
        let mut server = match self.try_lock() {
            Ok(server) => server,
            Err(TryLockError::WouldBlock) => return false,
            Err(TryLockError::Poisoned(server)) => server.into_inner(),
        };
        match &mut server.phase {
            Phase::Open(link) if link.engine.closed().is_none() => link.flush(),
            Phase::Open(link) => {
                link.drain();
                true
            }
            Phase::Starting(_) | Phase::Failed(_) => true,
        };
        server.settle();
        // Its own thread does not know of this: what waits for memory, or for room in the socket, is for the loop to watch.
        if (server.retry.is_some() || server.awaits_peer() || server.closed().is_some()) && !server.forked() {
            server.home.leave(server.fd);
        }
        true
    }
}

impl Callee for Shared {
    fn message(&self) -> Result<Buf, Error> {
        let server = locked(self);
        match &server.phase {
            Phase::Open(link) => Ok(link.memory.message()?),
            Phase::Starting(_) | Phase::Failed(_) => Ok(memory(server.config).message()?),
        }
    }

    fn outbox(&self) -> Option<Buf> {
        match &mut locked(self).phase {
            Phase::Open(link) => link.device.outbox(),
            Phase::Starting(_) | Phase::Failed(_) => None,
        }
    }

    fn reply(&self, id: RequestId, message: Message) -> Result<(), Error> {
        let mut server = locked(self);
        server.heed_children();
        let (fd, forked, home, own) = (server.fd, server.forked(), server.home, server.id);
        let wait = || match forked {
            true => Wait::CHILD,
            false if home.is_quiet_for(own) => Wait::ALONE,
            false => Wait::SHORT,
        };
        let (mut server, sent) = session::reply(&self, server, (fd, id), message, wait, forked);
        // A reply that was too long has been answered too, with ERR_CHUNK.
        if forked && sent.as_ref().err().is_none_or(|error| error.kind() == Kind::TooLong) {
            server.answered.note(id.number());
        }
        server.note();
        sent
    }

    fn lose(&self, error: Error) {
        let mut server = locked(self);
        if let Phase::Open(link) = &mut server.phase {
            link.fail(error);
            link.drain();
        }
        server.settle();
        if !server.forked() {
            // Nothing more comes that would make the loop see the end.
            server.home.leave(server.fd);
        } else if server.traits.socket {
            // The connection is the parent's too, and neither the parent's loop nor the peer would see its end otherwise.
            socket::shutdown(server.fd);
        }
    }

    fn defer(&self, id: RequestId, to_child: bool) {
        let mut server = locked(self);
        server.heed_children();
        let Server { phase, left, .. } = &mut *server;
        if let Phase::Open(link) = phase {
            link.engine.defer(id);
            if to_child {
                left.retain(|id| link.engine.fate(*id) == Fate::Waits);
                left.push(id);
            }
            link.flush();
        }
        server.settle();
    }

    fn fate(&self, id: RequestId) -> Fate {
        let mut server = locked(self);
        server.heed_children();
        match &server.phase {
            Phase::Open(link) => link.engine.fate(id),
            Phase::Starting(_) | Phase::Failed(_) => Fate::PassedOver,
        }
    }

    fn discard(&self, id: RequestId) {
        let mut server = locked(self);
        if let Phase::Open(link) = &mut server.phase {
            link.engine.discard(id);
            link.timing.take(id);
            link.answered();
            link.flush();
        }
        server.settle();
    }

    fn end(&self, loans: &[Loan]) {
        if loans.iter().all(Loan::is_over) {
            return;
        }
        let mut server = locked(self);
        if let Phase::Open(link) = &mut server.phase {
            link.end(loans);
        }
        server.settle();
    }

    fn grants(&self, grant: Option<u32>) -> u32 {
        let mut server = locked(self);
        let Some(link) = server.link() else { return 0 };
        if let Some(credits) = grant {
            link.grant(credits);
            link.drain();
        }
        link.engine.granting()
    }

    fn is_poisoned(&self) -> bool {
        is_poisoned(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::pulls;
    use super::*;
    use crate::connection::Expect;
    use crate::memory::{PassStage, Payload, Sink};
    use crate::provider::fault::{Event, Fault, pair};
    use crate::wire::Xid;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    const LIMITS: crate::provider::Limits = crate::provider::Limits {
        read_depth: 16,
        max_segment: 1 << 20,
        remote_invalidation: true,
        receives: 64,
    };

    /// A client, and the end that has accepted it.
    fn joined() -> Joined {
        let config: &'static Config = Box::leak(Box::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let active = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (passive, _) = listener.accept().unwrap();
        let mut device = start::connect_over(active.as_raw_fd(), config).unwrap();
        let server = Server::accept(passive.as_raw_fd(), config).unwrap().shared();
        locked(&server).home = Box::leak(Box::default());
        while !device.establish().unwrap() {
            assert!(locked(&server).receive().is_none());
        }
        let client = Link::new(Role::Client, config, versions(config), device, &memory(config));
        (client, server, [active, passive])
    }

    /// The queue and the memory belong to the whole process.
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

    fn begin(client: &mut Link, xid: u32, bytes: usize) {
        let mut message = client.memory.message().unwrap();
        message.extend(&xid.to_be_bytes()).unwrap();
        message.extend(&vec![9; bytes - 4]).unwrap();
        client.begin(Xid(xid), message.into(), Expect::Reply { max: 8, places: Vec::new() }).unwrap();
        client.flush();
    }

    /// The next request of a client that answers RDMA Reads.
    fn next_of(client: &mut Link, server: &Shared) -> Request {
        loop {
            client.pump();
            client.flush();
            if let Some(request) = locked(server).receive() {
                return request;
            }
            pulls::go_on();
        }
    }

    /// Lets go of the request's memory, and lets the client get its reply.
    fn answer(client: &mut Link, server: &Shared, request: Request) {
        let (id, xid) = (request.id, request.xid);
        drop(request);
        let mut reply = server.message().unwrap();
        reply.extend(&[xid.0, 1].map(u32::to_be_bytes).concat()).unwrap();
        server.reply(id, reply.into()).unwrap();
        while client.done.pop().is_none() {
            client.pump();
        }
    }

    /// As `joined`, but the first call, which goes alone, has been answered.
    fn warm() -> Joined {
        let (mut client, server, sockets) = joined();
        begin(&mut client, 1, 40);
        let request = next_of(&mut client, &server);
        answer(&mut client, &server, request);
        (client, server, sockets)
    }

    /// As many connections as are pulled from at a time.
    const HELD: usize = 4;

    type Joined = (Link, Arc<Shared>, [TcpStream; 2]);

    /// A call of each of them, which has arrived.
    fn hold(ends: &mut [Joined], xid: u32, bytes: usize) -> Vec<Request> {
        let one = |(client, server, _): &mut Joined| {
            begin(client, xid, bytes);
            next_of(client, server)
        };
        ends.iter_mut().map(one).collect()
    }

    fn answer_all(ends: &mut [Joined], held: Vec<Request>) {
        for ((client, server, _), request) in ends.iter_mut().zip(held) {
            answer(client, server, request);
        }
    }

    /// A client that gives its connection up, because calls whose time is over hold all credits, may have made others to which it
    /// wants no reply.
    #[test]
    fn requests_that_had_come_are_served_though_a_reply_finds_nobody() {
        let (mut client, server, sockets) = warm();
        let mut next = |xid| {
            begin(&mut client, xid, 40);
            next_of(&mut client, &server)
        };
        let replies = [next(2), next(3)].map(|request| {
            let (id, xid) = (request.id, request.xid);
            drop(request);
            let mut reply = server.message().unwrap();
            reply.extend(&[xid.0, 1].map(u32::to_be_bytes).concat()).unwrap();
            (id, reply)
        });
        begin(&mut client, 4, 40);
        begin(&mut client, 5, 40);
        client.fail(Error::new(Kind::ConnectionLost, "given up"));
        let [ours, theirs] = sockets;
        drop(if client.device.fd() == ours.as_raw_fd() { ours } else { theirs });
        for (id, reply) in replies {
            // The first one is sent, and answered by a reset.
            server.reply(id, reply.into()).unwrap();
        }
        let served = std::iter::from_fn(|| locked(&server).receive().map(|request| request.xid.0));
        assert_eq!(served.collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn a_child_that_serves_takes_over_what_no_other_process_has_any_more() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let (mut client, server, _sockets) = joined();
        let another = fork::generation() + 1;
        locked(&server).generation = another;
        locked(&server).reader = another;
        assert!(locked(&server).forked() && locked(&server).is_left_to_parent());
        begin(&mut client, 7, 100);
        next_of(&mut client, &server);
        assert!(!locked(&server).forked() && !locked(&server).is_left_to_parent());
    }

    #[test]
    fn a_long_call_that_waits_is_pulled_as_soon_as_another_one_is_decoded_or_let_go_of() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        const LONG: usize = pulls::EACH / 2;
        let awaits = |server: &Shared| locked(server).link().unwrap().awaits_turn();
        let come = |server: &Shared| {
            while !awaits(server) && !locked(server).pulling() {
                assert!(locked(server).receive().is_none());
            }
            awaits(server)
        };
        let mut ends = [(); HELD + 1].map(|()| joined());
        for (client, server, _) in &mut ends {
            // The first call of a connection goes alone.
            begin(client, 1, 40);
            let request = next_of(client, server);
            answer(client, server, request);
            assert!(!awaits(server));
        }
        // Where others have the processor for long, a call that is not decoded no longer counts: then once more.
        let mut waits = 0;
        for xid in 2.. {
            let [others @ .., (client, server, _)] = &mut ends;
            let mut held = hold(others, xid, LONG);
            begin(client, xid, LONG);
            let waited = come(server);
            assert!(!waited || !locked(server).is_quiet(), "a timer sees to it");
            // The program has decoded one, or its memory is let go of.
            if xid % 2 == 0 {
                assert!(held[0].message.pieces.iter().all(|piece| piece.reach(PassStage::Decoded)));
            } else {
                held[0].message = Payload::default();
            }
            while !pulls::go_on() {}
            assert!(locked(server).pulling() && !awaits(server), "nobody else looks at it");
            let last = next_of(client, server);
            answer(client, server, last);
            answer_all(others, held);
            waits += u32::from(waited);
            if waits == 10 {
                break;
            }
        }
        // A connection that is lost no longer waits.
        for xid in 1000.. {
            let held = hold(&mut ends[..HELD], xid, LONG);
            let (mut client, server, _sockets) = joined();
            begin(&mut client, 1, LONG);
            let waited = come(&server);
            let mut state = locked(&server);
            let link = state.link().unwrap();
            link.fail(Error::new(Kind::ConnectionLost, "lost"));
            link.drain();
            assert!(!link.awaits_turn());
            drop(state);
            answer_all(&mut ends[..HELD], held);
            if waited {
                break;
            }
        }
    }

    #[test]
    fn the_next_long_call_is_asked_for_when_one_is_dispatched_though_another_one_behind_it_waits_on() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        const LONG: usize = pulls::EACH / 2;
        let (mut client, server, _sockets) = warm();
        // Where others have the processor for long, a call that is not dispatched no longer counts: then once more.
        for xid in (2..).step_by(3) {
            (xid..xid + 3).for_each(|xid| begin(&mut client, xid, LONG));
            let first = next_of(&mut client, &server);
            let mut state = locked(&server);
            let link = state.link().unwrap();
            assert!(!link.engine.has_output(), "the client has been asked for the second");
            let waited = link.awaits_turn() && link.engine.pulling().is_some();
            drop(state);
            let second = next_of(&mut client, &server);
            let third = next_of(&mut client, &server);
            for request in [first, second, third] {
                answer(&mut client, &server, request);
            }
            if waited {
                break;
            }
        }
    }

    #[test]
    fn what_has_come_of_a_call_is_not_taken_for_the_beginning_of_the_next_one() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        const LONG: usize = pulls::EACH / 2;
        let (mut client, server, _sockets) = joined();
        for (xid, bytes) in [(1, 40), (2, LONG)] {
            begin(&mut client, xid, bytes);
            let request = next_of(&mut client, &server);
            answer(&mut client, &server, request);
        }
        begin(&mut client, 3, LONG);
        let mut state = locked(&server);
        while !state.pulling() {
            assert!(state.receive().is_none());
        }
        // The client does not answer.
        assert!(state.receive().is_none() && state.pulling());
        let place = state.link().and_then(|link| link.place.as_ref()).unwrap();
        assert!(!place.begins_to_come());
    }

    #[test]
    fn a_reply_that_cannot_be_made_ends_the_connection_and_the_loop_sees_to_it() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let (mut client, server, _sockets) = joined();
        begin(&mut client, 1, 40);
        let request = next_of(&mut client, &server);
        server.lose(Error::new(Kind::Os(libc::ENOMEM), "no memory for a reply"));
        assert!(locked(&server).home.has_left() && locked(&server).closed().is_some());
        while client.engine.closed().is_none() {
            client.pump();
        }
        assert!(matches!(&client.done[..], [(Xid(1), Err(_))]));
        let reply = server.message().unwrap();
        assert!(server.reply(request.id, reply.into()).is_err(), "it is too late");
        // A child ends the connection for everybody.
        let (mut client, server, _sockets) = joined();
        begin(&mut client, 1, 40);
        let request = next_of(&mut client, &server);
        let child = crate::fork::testing::fork(|| {
            server.lose(Error::new(Kind::Os(libc::ENOMEM), "no memory for a reply"));
            true
        });
        assert!(child.succeeded());
        while client.engine.closed().is_none() {
            client.pump();
        }
        drop(request);
    }

    /// Others hold all of the memory for Calls that are pulled, and the lead.
    fn take_memory(server: &Shared) -> [Sink; 2] {
        let memory = locked(server).link().unwrap().memory.clone();
        let all = memory.staging(1 << 40, None).unwrap();
        for step in [1 << 20, 4096, 64, 1] {
            while memory.may_pull(&all, step, false) {}
        }
        let leads = memory.staging(1 << 40, None).unwrap();
        memory.may_pull(&leads, 1, true);
        [all, leads]
    }

    #[test]
    fn a_call_that_whoever_looks_finds_no_memory_for_is_looked_at_again() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let (mut client, server, _sockets) = warm();
        let taken = take_memory(&server);
        begin(&mut client, 2, 2 << 20);
        // As when the loop looks whether there is another request, or a call back waits for its reply.
        let mut state = locked(&server);
        while !state.link().unwrap().engine.waits_for_memory() {
            state.pump();
        }
        assert!(!state.is_quiet() && state.deadline().is_some() && state.for_loop().is_some());
        drop((state, taken));
        let request = next_of(&mut client, &server);
        answer(&mut client, &server, request);
    }

    #[test]
    fn a_call_whose_turn_comes_when_there_is_no_memory_is_looked_at_again_by_the_loop() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        const LONG: usize = 2 << 20;
        let mut ends = [(); HELD + 1].map(|()| joined());
        for (client, server, _) in &mut ends {
            begin(client, 1, 40);
            let request = next_of(client, server);
            answer(client, server, request);
        }
        let [others @ .., (client, server, _)] = &mut ends;
        for xid in 2.. {
            let mut held = hold(others, xid, LONG);
            begin(client, xid, LONG);
            while !locked(server).link().unwrap().awaits_turn() && !locked(server).pulling() {
                assert!(locked(server).receive().is_none());
            }
            let waited = locked(server).link().unwrap().awaits_turn();
            answer(&mut others[0].0, &others[0].1, held.remove(0));
            let taken = take_memory(server);
            if waited {
                while locked(server).link().unwrap().awaits_turn() {
                    pulls::go_on();
                }
                let mut state = locked(server);
                assert!(!state.link().unwrap().awaits_turn() && state.waits_for_memory().is_some());
                assert!(state.home.has_left(), "nothing else has the loop look at it");
            }
            drop(taken);
            if waited {
                break;
            }
            let last = next_of(client, server);
            answer(client, server, last);
            answer_all(&mut others[1..], held);
        }
    }

    #[test]
    fn a_peer_over_an_adapter_that_says_nothing_is_looked_after_and_who_does_not_answer_is_closed() {
        let (inner, _peer) = pair(LIMITS);
        let (device, control) = Fault::new(Box::new(inner.with_traits(&start::tests::LOCKED)));
        let config: &'static Config = Box::leak(Box::default());
        let mut server = Server::with(-1, Box::new(device), None, config);
        assert_eq!(server.stage(), Some((Stage::Starting, None)));
        assert!(server.receive().is_none() && server.closed().is_none());
        assert_eq!(server.stage(), Some((Stage::Unused, None)));
        let probes = || control.trace().iter().filter(|event| **event == Event::Probe).count();
        let long_ago = Instant::now() - PROBE_EVERY;
        let unheard = stats::clock() - PROBE_EVERY.as_nanos() as u64;
        // Nothing has come that wakes the loop, or only a completion of ours.
        server.heard = unheard;
        assert!(server.receive().is_none());
        assert_eq!(server.heard, unheard, "a completion of ours is no word of the peer");
        server.push();
        assert_eq!(probes(), 0, "it is not time");
        server.probe_at = long_ago;
        assert_eq!(server.deadline(), Some(long_ago), "it wakes the loop");
        server.push();
        assert_eq!((probes(), server.closed().is_none()), (1, true));
        assert!(server.deadline().is_some_and(|at| at > Instant::now() + PROBE_EVERY / 2));
        // A peer that has been heard meanwhile is there.
        (server.probe_at, server.heard) = (long_ago, stats::clock());
        server.push();
        assert_eq!(probes(), 1);
        assert!(server.deadline().is_some_and(|at| at > Instant::now() + PROBE_EVERY / 2));
        (server.probe_at, server.heard) = (long_ago, unheard);
        control.fail_at(control.trace().len(), Error::new(Kind::ConnectionLost, "no answer"));
        server.push();
        assert_eq!(server.closed().map(|error| error.text().to_owned()).as_deref(), Some("no answer"));
        assert_eq!(server.deadline(), None);
    }
}
