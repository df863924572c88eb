//! The connection of the end that opened it, driven by the threads that wait for something on it.
#![forbid(unsafe_code)]

use crate::fork;
use crate::thread;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::connection::characteristics::Wish;
use crate::connection::{Expect, Role};
use crate::error::{Error, Kind};
use crate::memory::{Buf, Loan, Memory, Message, Payload};
use crate::process::{self, Identity};
use crate::provider::{DEVICES, Device, Traits};
use crate::socket;
use crate::wire::Xid;
use crate::wire::characteristics::Characteristic;
use crate::wire::header::Versions;

use super::callback;
use super::calls::Waiter;
use super::link::{Link, sooner};
use super::peer::Peer;
use super::renewal::Renewal;
use super::session::{self, Locked, Policy, Session, State, Turn, Wake};
use super::start::{Room, connect_over, establish, versions};
use super::{Caller, Mask, REPLY_HEADER, SendRoom, memory};

/// How often a peer that has not answered the first call is nudged.
const NUDGES: u32 = 10;

/// How long the first wait for that answer lasts, while the CLIENT is made; the first call waits for the rest.
const AGREE_WAIT: Duration = Duration::from_secs(2);

/// A requester's connection.
pub struct Client {
    /// The socket that it is known by, and that it runs over if its device goes over one.
    pub(super) fd: RawFd,
    /// The address that it goes to.
    pub(super) to: Option<SocketAddr>,
    /// The device that it goes over, by its place in [`DEVICES`]. Changes together with the state.
    device: AtomicUsize,
    pub(super) room: Room,
    pub(super) config: &'static Config,
    memory: Arc<Memory>,
    pub(super) state: Mutex<Waiting>,
    /// For the thread that ends the connection: no callback is being served any more.
    pub(super) quiet: Condvar,
}

pub(super) struct Waiting {
    pub(super) link: Link,
    pub(super) session: Session,
    /// The file behind `fd`: if the number names another file by now, it is not this connection.
    pub(super) identity: Option<Identity>,
    /// How often the peer was nudged before its first message.
    pub(super) nudges: u32,
    /// How often the connection was made.
    pub(super) connections: u32,
    /// The connection is of no use any more, and will be replaced.
    pub(super) renewal: Option<Renewal>,
    /// Changes in a forked child.
    pub(super) generation: u64,
    /// The program serves what the server calls back.
    pub(super) serving: Option<callback::Serving>,
    /// The thread that serves a callback now. It may go on after the program has stopped serving, or has stopped and begun
    /// again.
    pub(super) server: Option<usize>,
    /// The descriptor is closed, or is about to be.
    pub(super) shut: bool,
    /// It is to be closed by the thread that serves the callback, which `server` names.
    pub(super) close_later: bool,
    pub(super) wishes: Wishes,
}

/// What the program has asked for, on the next connection too.
pub(super) struct Wishes {
    /// `None`: as many as [`Link::new`] asks for, which leaves some to the reverse direction.
    pub(super) credits: Option<u32>,
    pub(super) reverse_credits: u32,
    pub(super) reverse_chunks: bool,
    pub(super) versions: Versions,
    pub(super) receive_size: Option<u32>,
}

impl Client {
    /// Sends the MPA Request on a connected socket and waits for the Reply.
    ///
    /// # Errors
    /// `ConnectionLost` when the peer closed without a Reply (it does not speak MPA), `Timeout` when it stayed silent
    /// until `deadline`, `Peer` when it refused.
    pub fn open(
        fd: RawFd,
        config: &'static Config,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Arc<Client>, Error> {
        // Now: a peer that resets the connection at once leaves a socket without an address.
        let to = socket::peer(fd);
        let link = Client::start(fd, config, versions(config), deadline, mask)?;
        Ok(Client::with(fd, to, Room::Same, config, link))
    }

    pub(super) fn with(
        fd: RawFd,
        to: Option<SocketAddr>,
        room: Room,
        config: &'static Config,
        mut link: Link,
    ) -> Arc<Client> {
        link.known_as(fd, to);
        let traits = link.device.traits();
        let memory = if traits.own_memory { memory(config) } else { link.memory.clone() };
        let state = Waiting {
            link,
            session: Session::new(config.poll),
            identity: process::identify(fd),
            nudges: 0,
            connections: 1,
            renewal: None,
            generation: fork::generation(),
            serving: None,
            server: None,
            shut: false,
            close_later: false,
            wishes: Wishes {
                credits: None,
                reverse_credits: config.reverse_credits,
                reverse_chunks: config.reverse_chunks,
                versions: versions(config),
                receive_size: None,
            },
        };
        let device = AtomicUsize::new(place(traits));
        let state = Mutex::new(state);
        Arc::new(Client { fd, to, device, room, config, memory, state, quiet: Condvar::new() })
    }

    pub(super) fn start(
        fd: RawFd,
        config: &Config,
        versions: Versions,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Link, Error> {
        let mut device = connect_over(fd, config)?;
        if !establish(&mut *device, deadline, mask)? {
            return Err(Error::new(Kind::Timeout, "the peer did not answer the MPA Request in time"));
        }
        Ok(Link::new(Role::Client, config, versions, device, &memory(config)))
    }

    /// The device that it goes over.
    pub(super) fn device(&self) -> &'static dyn Device {
        DEVICES[self.device.load(Relaxed)]
    }

    /// From here on it goes over such a device.
    pub(super) fn changes_to(&self, traits: &Traits) {
        self.device.store(place(traits), Relaxed);
    }

    /// Whether the descriptor is still this connection's socket.
    pub fn alive(&self) -> bool {
        let state = self.lock();
        !state.shut && state.is_own(self.fd)
    }

    /// Ends the connection for good and closes its descriptor, which nothing of ours touches any more. Returns true to the one
    /// caller that does this, and false also when the number belongs to another file by now.
    ///
    /// If another thread serves a callback, this waits for it; or, unless it `waits`, the descriptor stays until the callback
    /// has been served, because the program may look at it until then.
    pub fn shut(&self, waits: bool) -> bool {
        let mut state = self.lock();
        if state.shut || !state.is_own(self.fd) {
            return false;
        }
        state.shut = true;
        let ended = state.serve_no_more();
        let elsewhere = |state: &Waiting| state.server.is_some_and(|thread| thread != thread::this());
        while waits && elsewhere(&state) {
            state = self.quiet.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let why = Error::new(Kind::ConnectionLost, "the CLIENT was destroyed");
        if state.session.another_reads() || state.session.sleeping() > 0 {
            // For calls that others have just begun: nothing else would wake a thread that sleeps in poll(2).
            state.link.fail(why.clone());
        }
        // Nothing is sent: another process may have the connection. Twice: see `leave_to_others`.
        state.link.engine.handle_closed(why.clone());
        state.link.engine.handle_closed(why.clone());
        state.link.drain();
        state.settle();
        state.identity = None;
        state.session.calls.requests.end(&why);
        state.attempt_failed(why);
        state.session.wake_all();
        // A thread that sleeps on the stream is awake soon, but until then it reads from whatever file has the number.
        while state.session.naps() {
            state.session.naps_awaited = true;
            state = self.quiet.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.close_later = elsewhere(&state);
        let closes = !state.close_later;
        drop(state);
        // What ends with it needs other locks.
        drop(ended);
        if closes {
            socket::close(self.fd);
        }
        true
    }

    /// What the connection runs on and what was agreed, in words for the log.
    pub fn describe(&self) -> String {
        self.lock().link.describe()
    }

    /// The same, for programs.
    #[cfg(feature = "tool")]
    pub fn agreed(&self) -> super::link::Agreed {
        self.lock().link.agreed()
    }

    /// The address that it goes to, if that is known.
    pub fn to(&self) -> Option<SocketAddr> {
        self.to
    }

    /// How often the connection was made.
    pub fn connections(&self) -> u32 {
        self.lock().connections
    }

    /// Says whether calls back may have chunks.
    pub fn set_reverse_chunks(&self, allowed: bool) {
        let mut state = self.lock();
        state.wishes.reverse_chunks = allowed;
        state.link.engine.set_reverse_chunks(allowed);
    }

    /// Waits a while for a version to be agreed on, so that the program's calls need not. A server that is busy answers later.
    ///
    /// # Errors
    /// There is none that both ends speak, or the connection was lost.
    pub fn agree(&self, mask: Mask<'_>) -> Result<(), Error> {
        let deadline = Instant::now() + AGREE_WAIT;
        let waiter = Waiter::Version(thread::this());
        let mut state = self.lock();
        let mut steps = session::Steps::default();
        let outcome = loop {
            let engine = &state.link.engine;
            match engine.closed() {
                Some(_) if engine.must_fall_back() => match self.connected(state, deadline, mask) {
                    Ok(connected) => state = connected,
                    // The first call waits for the rest.
                    Err(error) if error.kind() == Kind::Timeout => return Ok(()),
                    Err(error) => return Err(error),
                },
                Some(error) if error.kind() == Kind::ConnectionLost && engine.version().is_none() => {
                    let text =
                        format!("{error}, at the offer of RPC-over-RDMA version 2; set RPCRDMA_VERSION=auto");
                    break Err(Error::new(Kind::Peer, text));
                }
                Some(error) => break Err(error.clone()),
                None if engine.version().is_some() || Instant::now() >= deadline => break Ok(()),
                None => state = session::wait_once(&self, state, waiter, &mut steps, deadline, mask),
            }
        };
        state.hand_over();
        outcome
    }

    /// Waits for the end of a call.
    pub(super) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        xid: Xid,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Payload, Error> {
        state = session::wait_for(&self, state, Waiter::Call(xid), deadline, mask);
        let Waiting { link, session, renewal, .. } = &mut *state;
        let over = |session: &Session| session.calls.is_over(Waiter::Call(xid));
        let parked = renewal.as_mut().filter(|_| !over(session));
        let outcome = match parked.and_then(|renewal| renewal.abandon(xid)) {
            Some(why) => Err(why),
            None => session.outcome(Some(link), xid),
        };
        if state.link.engine.holds_back() {
            // This call has just been abandoned. A thread that drives for one that waits for its credit sleeps for as long as
            // that one has time: nothing more comes on this connection.
            self.look(&mut state);
        }
        state.hand_over();
        outcome
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock means that a thread panicked inside: the connection is closed and stays so. The threads that sleep
        // are told, since that thread was perhaps their driver.
        let mut state = self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.link.fail(Error::new(Kind::Panic, "a defect of librpcrdma ended this connection"));
            state.link.drain();
            state.settle();
            state
        });
        if state.generation != fork::generation() {
            state.inherit();
        }
        state
    }
}

impl<'a> Locked<'a> for &'a Client {
    type State = Waiting;

    fn lock(&self) -> MutexGuard<'a, Waiting> {
        Client::lock(self)
    }

    fn taken(&self, state: &mut Waiting) {
        state.raise_alarm();
    }

    /// It is watched where calls back are served between two calls too, and where the program has the socket itself.
    fn is_watched(&self, state: &mut Waiting) -> bool {
        state.serving.is_some() || state.link.device.traits().socket
    }
}

impl<'a> Policy<'a> for &'a Client {
    fn serve(&self, mut state: MutexGuard<'a, Waiting>, mask: Mask<'_>) -> (MutexGuard<'a, Waiting>, bool) {
        match state.callback() {
            Some(request) => (self.serve_one(state, request, mask), true),
            None => (state, false),
        }
    }

    fn turn(&self, state: &mut Waiting, waiter: Waiter) -> Turn {
        if !state.session.may_drive(&state.link) {
            return Turn::Sleep { until: state.link.retry_at(), serves: state.serves_here() };
        }
        let engine = &state.link.engine;
        let open = state.renewal.is_none() && engine.closed().is_none();
        let held_up = match waiter {
            // As nearly always: it was transmitted at once, as were all calls of this connection.
            Waiter::Call(_) if open && !engine.has_waiting() => false,
            Waiter::Call(xid) => !engine.transmitted(xid),
            Waiter::Peer(_) | Waiter::Version(_) | Waiter::Callbacks(_) => {
                engine.version().is_none() || engine.holds_back()
            }
        };
        if held_up {
            self.look(state);
        }
        if state.renewal.is_some() && state.attempt().is_none() {
            self.step(state);
            if state.attempt().is_none() {
                // There is a new connection, or none; the waiting thread may have waited for just that.
                return Turn::Look;
            }
        }
        if state.session.calls.is_over(waiter) || state.may_serve() {
            // The outcome came with what was looked at. A call back that lies here would not end the sleep, and the call may
            // wait for it.
            return Turn::Look;
        }
        Turn::Drive { spins: state.renewal.is_none() }
    }

    fn is_over(&self, state: &mut Waiting, waiter: Waiter) -> bool {
        let engine = &state.link.engine;
        let agreed = matches!(waiter, Waiter::Version(_)) && engine.version().is_some();
        agreed || engine.closed().is_some() || state.may_serve() || state.session.calls.is_over(waiter)
    }

    fn looks_beside(&self, waiter: Waiter) -> bool {
        matches!(waiter, Waiter::Call(_))
    }

    fn wake(&self, state: &mut Waiting, may_doze: bool) -> Wake {
        let alarm = state.alarm_fd().unwrap_or(-1);
        if let Some((fd, writes, until)) = state.attempt() {
            if state.session.naps() || state.session.is_polled() {
                // The next step waits for the end of these sleeps, see `step`, and the descriptor of the attempt may be ready
                // meanwhile.
                let soon = Some(Instant::now() + session::LOOK);
                return Wake { writes: true, ..Wake::new((-1, true, false), alarm, soon) };
            }
            // Whatever wakes this thread, no other one has to take the step.
            return Wake { writes: true, ..Wake::new((fd, true, writes), alarm, Some(until)) };
        }
        let link = &mut state.link;
        let until = sooner(sooner(link.offer_ends(), link.retry_at()), link.first_reply_due());
        let nudges = state.nudges < NUDGES && !link.heard;
        // A thread that waits for more than the connection's own answers sleeps on descriptors.
        let writes = link.device.wants_write();
        let may_doze = may_doze && alarm < 0 && !nudges && !writes;
        let doze = if may_doze { link.device.doze() } else { None };
        let at_once = doze.is_none() && !link.device.rest();
        Wake { nudges, at_once, doze, ..Wake::new((link.device.fd(), true, writes), alarm, until) }
    }

    fn napped(&self, state: &mut Waiting) {
        if state.session.naps_awaited {
            self.quiet.notify_all();
        }
        if state.attempt().is_some() {
            // The attempt has waited for this.
            self.step(state);
        }
    }

    fn move_on(&self, state: &mut Waiting, wake: &Wake, nothing: bool) {
        if wake.nudges && nothing && !state.link.heard {
            state.nudges += 1;
            state.link.nudge();
        }
        if wake.other_came() {
            state.silence();
        }
        if state.attempt().is_some() {
            self.step(state);
        } else if state.session.another_reads() {
            // That thread was woken by the same bytes. If they were taken here, it would find none and sleep on, with its
            // reply there.
            state.send();
        } else {
            state.pump();
        }
    }
}

impl State for Waiting {
    fn parts(&mut self) -> (&mut Session, Option<&mut Link>) {
        (&mut self.session, Some(&mut self.link))
    }
}

impl Caller for Client {
    fn fd(&self) -> RawFd {
        self.fd
    }

    fn traits(&self) -> &'static Traits {
        self.device().traits()
    }

    fn message(&self) -> Result<Buf, Error> {
        // A new connection may bring new memory with it.
        if self.traits().own_memory {
            Ok(self.lock().link.memory.message()?)
        } else {
            Ok(self.memory.message()?)
        }
    }

    fn outbox(&self) -> Option<Buf> {
        if self.traits().loopback { self.lock().link.device.outbox() } else { None }
    }

    fn fresh_xid(&self) -> Xid {
        let Waiting { session, link, .. } = &mut *self.lock();
        session.calls.fresh_xid(&link.engine)
    }

    fn exchange(
        &self,
        xid: Xid,
        message: Message,
        expect: Expect,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<Payload, Error> {
        // Nothing else would tell that the program has closed a socket that the connection does not go over.
        if !self.traits().socket && !self.alive() {
            return Err(Error::new(Kind::NotSent, "the descriptor was closed"));
        }
        let mut state = self.lock();
        state.take_in();
        self.look(&mut state);
        let Waiting { session, link, renewal, .. } = &mut *state;
        let parked = renewal.as_ref().map_or(0, Renewal::parked);
        session.calls.make_room(xid, link.engine.calls() + parked)?;
        match renewal {
            Some(renewal) => {
                renewal.park(xid, message, expect)?;
                if !state.session.is_driven() {
                    // However little time this call has, it moves the next connection on by a step.
                    self.step(&mut state);
                }
            }
            None => {
                state.make_way(&message, &expect);
                state.link.begin(xid, message, expect)?;
            }
        }
        state.settle();
        self.wait(state, xid, deadline, mask)
    }

    fn room_to_send(&self) -> SendRoom {
        let mut state = self.lock();
        state.take_in();
        SendRoom::of(&state.link.engine)
    }

    fn peer(&self, wanted: bool) -> Result<Peer, Error> {
        let mut state = self.lock();
        // A thread that sleeps until something comes takes it in, and would sleep on if this one took it.
        if wanted && !state.session.another_reads() {
            state.link.pump();
            state.link.flush();
            state.settle();
            state.rearm();
        }
        Peer::of(&state.link, state.connections as usize)
    }

    fn request(&self, what: Characteristic, deadline: Instant, mask: Mask<'_>) -> Result<Wish, Error> {
        let mut state = self.connected(self.lock(), deadline, mask)?;
        let Waiting { session, link, .. } = &mut *state;
        let number = session.calls.requests.begin(link, what)?;
        let waiter = Waiter::Peer(number);
        state.settle();
        state = session::wait_for(&self, state, waiter, deadline, mask);
        let outcome = state.session.calls.requests.take(number);
        state.hand_over();
        outcome
    }

    fn raise_receives(&self, bytes: u32) -> Result<(), Error> {
        let mut state = self.lock();
        if state.renewal.is_none() {
            state.link.raise_receives(bytes)?;
            state.settle();
        }
        state.wishes.receive_size = Some(bytes);
        Ok(())
    }

    fn end(&self, loans: &[Loan]) {
        if !loans.iter().all(Loan::is_over) {
            let mut state = self.lock();
            state.link.end(loans);
            state.settle();
        }
    }

    fn await_reconnect(&self, deadline: Instant, _: Mask<'_>) -> Result<bool, Error> {
        // The next call itself re-establishes the connection.
        Ok(self.lock().serving.is_some() && Instant::now() < deadline && self.alive())
    }

    fn credits(&self, ask: Option<u32>) -> u32 {
        let mut state = self.lock();
        if let Some(credits) = ask {
            let credits = state.link.ask(credits);
            state.wishes.credits = Some(credits);
            state.link.flush();
        }
        state.link.engine.asked()
    }

    fn max_reply(&self, config: &Config) -> usize {
        let areas = config.max_reply.is_none().then(|| self.lock().link.device.areas()).flatten();
        let room = areas.map(|areas| config.max_reply(false).min(areas.size() - REPLY_HEADER));
        room.unwrap_or_else(|| config.max_reply(self.traits().locked_memory))
    }
}

/// The place of a device in [`DEVICES`].
fn place(traits: &Traits) -> usize {
    DEVICES.iter().position(|device| std::ptr::eq(device.traits(), traits)).unwrap_or_default()
}

impl Waiting {
    /// Whether this number is still the descriptor of the connection.
    pub(super) fn is_own(&self, fd: RawFd) -> bool {
        self.identity.is_some() && self.identity == process::identify(fd)
    }

    /// Takes in what has arrived: replies to orphans give credits back before they are missed.
    fn take_in(&mut self) {
        // A thread that sleeps until something comes would sleep on, with its reply there.
        if self.link.engine.credits_left() <= 1 && !self.session.another_reads() {
            self.link.pump();
            self.settle();
        }
    }

    /// Makes sure that what this thread does not do, or no longer waits for, is done: somebody else takes the driver's seat if
    /// it is empty, and serves what is left.
    pub(super) fn hand_over(&self) {
        let serves = self.may_serve();
        if !self.session.lacks_driver(&self.link) && !serves {
            return;
        }
        let woken = self.session.wake_one();
        if serves && !woken {
            // A thread that sleeps in poll(2), or the program's loop.
            self.raise_alarm();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{self, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsRawFd, IntoRawFd};
    use std::sync::mpsc;

    use super::*;
    use crate::config::Version;
    use crate::connection::Request;
    use crate::driver::Callee;
    use crate::driver::server::Server;
    use crate::driver::server::Shared;
    use crate::driver::server::locked;
    use crate::provider::fault::{self, Fault};
    use crate::provider::{Doze, Limits, iwarp};
    use crate::reserve::testing::NoLongBlocks;
    use crate::wait;
    use std::sync::OnceLock;

    pub(in crate::driver) const PATIENCE: Duration = Duration::from_secs(10);

    /// A connection whose client gives the kernel little room.
    pub(in crate::driver) fn pair() -> io::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        socket::testing::shrink_buffers(listener.as_raw_fd());
        let client = TcpStream::connect(listener.local_addr()?)?;
        socket::testing::shrink_buffers(client.as_raw_fd());
        let (server, _) = listener.accept()?;
        Ok((client, server))
    }

    /// Any message will do: the server of these tests answers with it.
    fn message(client: &Client, xid: Xid, len: usize) -> Buf {
        let mut bytes = vec![7; len];
        bytes[..4].copy_from_slice(&xid.0.to_be_bytes());
        let mut message = Caller::message(client).unwrap();
        message.extend(&bytes).unwrap();
        message
    }

    fn call(client: &Client, len: usize) -> Result<Payload, Error> {
        let xid = client.fresh_xid();
        client.call(xid, message(client, xid, len).into(), 1024, Vec::new(), Instant::now() + PATIENCE, None)
    }

    pub(in crate::driver) fn until(client: &Client, so: impl Fn(&Waiting) -> bool) {
        while !so(&client.lock()) {
            std::thread::yield_now();
        }
    }

    /// The next request, or `None` when none comes for two seconds.
    fn next(server: &Shared) -> Option<Request> {
        loop {
            if let Some(request) = locked(server).receive() {
                return Some(request);
            }
            if !wait::until(locked(server).fd(), wait::IN, Some(Duration::from_secs(2)), None).unwrap() {
                return None;
            }
        }
    }

    fn answer(server: &Shared, request: Request) {
        let Request { id, message, .. } = request;
        let mut reply = server.message().unwrap();
        reply.extend(&message[0][..40]).unwrap();
        server.reply(id, reply.into()).unwrap();
    }

    /// A client on its end of a connection, one of whose calls the server at the other end has answered.
    fn opened(fd: RawFd, config: &'static Config, server: &Shared) -> Arc<Client> {
        std::thread::scope(|scope| {
            let opens = scope.spawn(move || {
                let client = Client::open(fd, config, Instant::now() + PATIENCE, None).unwrap();
                call(&client, 40).unwrap();
                client
            });
            let first = next(server).unwrap();
            answer(server, first);
            opens.join().unwrap()
        })
    }

    #[test]
    fn a_call_that_the_socket_does_not_take_at_once_goes_out_while_another_thread_waits_for_its_reply() {
        const CALLERS: usize = 24;
        // Without spinning, a driver that others can see is asleep.
        let config = Config { poll: Duration::ZERO, ..Config::default() };
        let config: &'static Config = Box::leak(Box::new(config));
        let (to_server, to_client) = pair().unwrap();
        let server = Mutex::new(Server::accept(to_client.as_raw_fd(), config).unwrap());
        let shared = OnceLock::new();
        std::thread::scope(|scope| {
            let (opened, open) = mpsc::channel();
            let fd = to_server.as_raw_fd();
            scope.spawn(move || {
                let client = Client::open(fd, config, Instant::now() + PATIENCE, None).unwrap();
                call(&client, 40).unwrap();
                opened.send(client).unwrap();
            });
            let first = next(&server).unwrap();
            answer(&server, first);
            let client: &Arc<Client> = shared.get_or_init(|| open.recv().unwrap());
            // One call is under way, and its caller sleeps: nothing but the end of another call will wake it.
            scope.spawn(move || call(client, 40).unwrap());
            let mut held = vec![next(&server).unwrap()];
            until(client, |state| state.session.is_driven());
            for _ in 0..CALLERS {
                scope.spawn(move || call(client, 3800).unwrap());
            }
            until(client, |state| state.link.engine.credits_left() == config.credits - 1 - CALLERS as u32);
            assert!(client.lock().link.device.unsent() > 0, "the socket has taken all");
            while held.len() < 1 + CALLERS {
                match next(&server) {
                    Some(request) => held.push(request),
                    None => break,
                }
            }
            let came = held.len();
            for request in held {
                answer(&server, request);
            }
            // Calls that were held up are let go, so that a failure does not hang.
            while let Some(request) = next(&server) {
                answer(&server, request);
            }
            assert_eq!(came, 1 + CALLERS);
        });
    }

    /// One thread sleeps until something comes. Another one has something that it cannot send at once, and so polls too. If
    /// the second one took the first one's reply in its spin, the first one would sleep on.
    #[test]
    fn who_polls_beside_a_thread_that_sleeps_until_something_comes_does_not_spin() {
        let config = Config { credits: 128, poll: Duration::from_millis(20), ..Config::default() };
        let config: &'static Config = Box::leak(Box::new(config));
        let (to_server, to_client) = pair().unwrap();
        let server = Mutex::new(Server::accept(to_client.as_raw_fd(), config).unwrap());
        let fd = to_server.as_raw_fd();
        let client = opened(fd, config, &server);
        let begin = |len| {
            let xid = client.fresh_xid();
            let message = message(&client, xid, len).into();
            client.lock().link.begin(xid, message, Expect::Reply { max: 1024, places: Vec::new() }).unwrap();
            xid
        };
        let awaited = begin(40);
        let request = next(&server).unwrap();
        // As that call's thread would, in poll(2).
        client.lock().session.drive_as(usize::MAX);
        for _ in 0..100 {
            begin(3800);
        }
        answer(&server, request);
        assert!(wait::until(fd, wait::IN, Some(PATIENCE), None).unwrap());
        let xid = client.fresh_xid();
        let message = message(&client, xid, 40).into();
        let until = Instant::now() + Duration::from_millis(50);
        let outcome = client.call(xid, message, 1024, Vec::new(), until, None);
        assert_eq!(outcome.unwrap_err().kind(), Kind::Timeout);
        assert!(client.lock().link.device.wants_write(), "the socket has taken all");
        assert!(!client.lock().session.calls.is_over(Waiter::Call(awaited)));
        assert!(wait::until(fd, wait::IN, Some(Duration::ZERO), None).unwrap(), "it was taken");
    }

    #[test]
    fn a_socket_on_which_nobody_can_sleep_is_polled() {
        let config = Config { poll: Duration::ZERO, ..Config::default() };
        let config: &'static Config = Box::leak(Box::new(config));
        let (to_server, to_client) = pair().unwrap();
        let server = Mutex::new(Server::accept(to_client.as_raw_fd(), config).unwrap());
        let client = opened(to_server.as_raw_fd(), config, &server);
        let sleeps = || matches!(client.lock().link.device.doze(), Some(Doze::Stream(_)));
        let calls = || {
            std::thread::scope(|scope| {
                let calls = scope.spawn(|| call(&client, 40).unwrap());
                // The call's thread sleeps before there is a reply.
                until(&client, |state| state.session.is_driven());
                let request = next(&server).unwrap();
                answer(&server, request);
                drop(calls.join().unwrap());
            });
        };
        assert!(sleeps());
        calls();
        assert!(sleeps());
        to_server.set_nonblocking(true).unwrap();
        calls();
        assert!(!sleeps(), "it was of no use");
        calls();
    }

    /// A client that never spins, one of whose calls has been answered, and its server.
    pub(in crate::driver) fn sleeping(
        sockets: &(TcpStream, TcpStream),
    ) -> (&'static Config, Shared, Arc<Client>) {
        let config = Config { poll: Duration::ZERO, ..Config::default() };
        let config: &'static Config = Box::leak(Box::new(config));
        let server = Mutex::new(Server::accept(sockets.1.as_raw_fd(), config).unwrap());
        let client = opened(sockets.0.as_raw_fd(), config, &server);
        (config, server, client)
    }

    pub(in crate::driver) fn call_for(client: &Client, time: Duration) -> Result<Payload, Error> {
        let xid = client.fresh_xid();
        let message = message(client, xid, 40).into();
        client.call(xid, message, 1024, Vec::new(), Instant::now() + time, None)
    }

    struct Nobody;

    impl callback::Serve for Nobody {
        fn serve(&self, _: Request, _: Mask<'_>) {}
    }

    /// What a spin finds makes no event where nobody waits for one: on an adapter an event is an interrupt.
    #[test]
    fn who_has_found_its_reply_asks_for_an_event_only_if_calls_back_are_served_or_the_program_has_the_socket()
    {
        let config = Config { version: Version::One, poll: Duration::from_micros(50), ..Config::default() };
        let config: &'static Config = Box::leak(Box::new(config));
        let limits = Limits { read_depth: 16, max_segment: 1 << 20, remote_invalidation: true, receives: 32 };
        let adapter = Traits { socket: false, one_event: true, ..iwarp::TRAITS };
        let adapter: &'static Traits = Box::leak(Box::new(adapter));
        for (traits, serves, watched) in
            [(adapter, false, false), (adapter, true, true), (&iwarp::TRAITS, false, true)]
        {
            let (fault, control) = Fault::new(Box::new(fault::pair(limits).0.with_traits(traits)));
            let link = Link::new(Role::Client, config, Versions::ONE, Box::new(fault), &memory(config));
            let (socket, _other) = pair().unwrap();
            let client = Client::with(socket.as_raw_fd(), None, Room::Same, config, link);
            if serves {
                client.start_serving(Arc::new(Nobody), 1, 1).unwrap();
            }
            let spin = |finds: bool, meanwhile: fn(&mut Session)| {
                let found = |state: &mut Waiting| {
                    meanwhile(&mut state.session);
                    finds
                };
                let ends = || control.told()[1..].to_vec();
                let before = ends();
                // While others of this process wait, or have waited in vain, there may be no spin.
                while ends() == before {
                    let is_found = session::spin(&&*client, client.lock(), found, || false).1;
                    assert!(is_found == finds || ends() == before);
                }
                (ends()[0] - before[0], ends()[1] - before[1])
            };
            assert_eq!(spin(true, |_| ()), if watched { (1, 0) } else { (0, 1) });
            // A thread that has not found its reply sleeps; and so may another thread, by now.
            assert_eq!(spin(false, |_| ()), (1, 0));
            let rests = || control.told()[1];
            // A program that begins to serve has been told of nothing before.
            if !serves {
                let before = rests();
                client.start_serving(Arc::new(Nobody), 1, 1).unwrap();
                assert_eq!(rests() - before, 1);
            }
            if !traits.socket {
                client.stop_serving();
                assert_eq!(spin(true, |_| ()), (0, 1));
            }
            assert_eq!(spin(true, |session| session.drive_as(usize::MAX)), (1, 0));
        }
    }

    #[test]
    fn the_number_is_not_given_away_while_a_thread_may_be_about_to_read_from_it() {
        let (socket, other) = pair().unwrap();
        let sockets = (socket, other);
        let (.., client) = sleeping(&sockets);
        // The client closes the descriptor.
        let fd = sockets.0.into_raw_fd();
        let identity = process::identify(fd);
        client.lock().session.nap_as(true);
        std::thread::scope(|scope| {
            let shuts = scope.spawn(|| client.shut(true));
            until(&client, |state| state.session.naps_awaited || shuts.is_finished());
            let kept = identity.is_some() && process::identify(fd) == identity;
            let mut state = client.lock();
            state.session.nap_as(false);
            Policy::napped(&&*client, &mut state);
            drop(state);
            assert!(shuts.join().unwrap() && kept, "it was closed");
        });
        assert!(process::identify(fd) != identity);
    }

    #[test]
    fn a_thread_that_sleeps_beside_the_driver_is_woken_with_its_reply() {
        let sockets = pair().unwrap();
        let (_, server, client) = sleeping(&sockets);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let drives = scope.spawn(|| call_for(&client, 2 * PATIENCE).map(drop));
            let first = next(&server).unwrap();
            until(&client, |state| state.session.is_driven());
            let sleeps = scope.spawn(|| call_for(&client, PATIENCE).map(drop));
            let second = next(&server).unwrap();
            until(&client, |state| state.session.sleeping() == 1);
            answer(&server, second);
            sleeps.join().unwrap().unwrap();
            assert!(begin.elapsed() < PATIENCE, "nobody has woken it");
            assert!(!drives.is_finished());
            answer(&server, first);
            drives.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_call_ends_in_its_time_however_long_the_program_lets_reads_last() {
        let sockets = pair().unwrap();
        let (_, server, client) = sleeping(&sockets);
        socket::set_patience(sockets.0.as_raw_fd(), PATIENCE).unwrap();
        let begin = Instant::now();
        let error = call_for(&client, Duration::from_millis(50)).unwrap_err();
        assert!(error.kind() == Kind::Timeout && begin.elapsed() < PATIENCE);
        drop(server);
    }

    #[test]
    fn who_has_little_time_does_not_sleep_on_the_stream() {
        let sockets = pair().unwrap();
        let (_, server, client) = sleeping(&sockets);
        // A thread that sleeps there sleeps for long.
        let long = || socket::set_patience(sockets.0.as_raw_fd(), PATIENCE).unwrap();
        assert!(matches!(client.lock().link.device.doze(), Some(Doze::Stream(_))));
        long();
        let begin = Instant::now();
        assert_eq!(call_for(&client, Duration::from_millis(15)).unwrap_err().kind(), Kind::Timeout);
        assert!(begin.elapsed() < PATIENCE);
        drop(server);
    }

    /// With as many other threads waiting as there are processors, and unless other tests have lost theirs meanwhile.
    #[test]
    fn a_caller_looks_a_few_times_before_it_sleeps_beside_the_driver_and_nobody_else_does() {
        let config: &'static Config = Box::leak(Box::default());
        let (to_server, to_client) = pair().unwrap();
        let server = Mutex::new(Server::accept(to_client.as_raw_fd(), config).unwrap());
        let client = opened(to_server.as_raw_fd(), config, &server);
        client.lock().session.drive_as(usize::MAX);
        let _others: Vec<_> =
            (0..crate::thread::processors()).map(|_| crate::driver::spin::Waiting::begin()).collect();
        let time = Duration::from_millis(200);
        let sleeps = |waiter, steps: &mut session::Steps| {
            let begin = Instant::now();
            drop(session::wait_once(&&*client, client.lock(), waiter, steps, begin + time, None));
            begin.elapsed() >= time
        };
        let looked = (0..100).any(|_| {
            let mut steps = session::Steps::default();
            (0..5).map(|_| sleeps(Waiter::Call(Xid(7)), &mut steps)).eq([false, false, false, false, true])
        });
        assert!(looked);
        assert!(sleeps(Waiter::Callbacks(1), &mut session::Steps::default()));
    }

    #[test]
    fn a_thread_that_cannot_be_noted_among_those_that_sleep_looks_by_itself() {
        let config: &'static Config = Box::leak(Box::default());
        let (to_server, to_client) = pair().unwrap();
        let server = Mutex::new(Server::accept(to_client.as_raw_fd(), config).unwrap());
        let fd = to_server.as_raw_fd();
        let client = opened(fd, config, &server);
        client.lock().session.drive_as(usize::MAX);
        client.lock().session.fill_sleepers();
        let sleepers = client.lock().session.sleeping();
        std::thread::scope(|scope| {
            let calls = scope.spawn(|| {
                let _none = NoLongBlocks::from_here();
                call(&client, 40).map(drop)
            });
            let request = next(&server).unwrap();
            answer(&server, request);
            assert!(wait::until(fd, wait::IN, Some(PATIENCE), None).unwrap());
            let mut state = client.lock();
            assert_eq!(state.session.sleeping(), sleepers);
            // The driver hands out the reply, and knows of nobody to wake.
            state.link.pump();
            state.settle();
            drop(state);
            calls.join().unwrap().unwrap();
        });
    }

    /// Linux's siw looks at what comes right after its answer to the startup only when more comes.
    #[test]
    fn a_peer_that_does_not_answer_the_first_call_is_nudged_by_a_write_of_no_bytes() {
        let config: &'static Config = Box::leak(Box::default());
        let (to_server, mut peer) = pair().unwrap();
        std::thread::scope(|scope| {
            let fd = to_server.as_raw_fd();
            scope.spawn(move || {
                let client = Client::open(fd, config, Instant::now() + PATIENCE, None).unwrap();
                assert_eq!(call(&client, 40).unwrap_err().kind(), Kind::ConnectionLost);
            });
            let mut request = [0; 32];
            peer.read_exact(&mut request).unwrap();
            assert_eq!(request[..16], *b"MPA ID Req Frame");
            // No CRC, revision 2, read depths of 16 and no private data.
            peer.write_all(b"MPA ID Rep Frame\x10\x02\x00\x04\x00\x10\x00\x10").unwrap();
            let mut fpdu = || {
                let mut length = [0; 2];
                peer.read_exact(&mut length).unwrap();
                let length = usize::from(u16::from_be_bytes(length));
                let mut rest = vec![0; (length + 2).next_multiple_of(4) - 2 + 4];
                peer.read_exact(&mut rest).unwrap();
                rest.truncate(length);
                rest
            };
            // An untagged Send; and then, because it gets no answer, a tagged RDMA Write to nowhere.
            assert_eq!(fpdu()[..2], [0x41, 0x43]);
            assert_eq!(fpdu()[..], [0xc1, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            drop(peer);
        });
    }
}
