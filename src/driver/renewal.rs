//! A new connection in the place of one that is of no use any more.
//!
//! A connection is of no use when timed-out calls hold every credit of it; when it was only the offer of a version that the
//! peer does not speak; when it is lost, and the server may still want to call back over it (RFC 8167 §5.4); when it had to be
//! closed to take memory back; or when it belongs to another process, from which this one was forked.
//!
//! The old connection is given up at once: what had come over it is handed out, and its calls end. Calls that it has not sent,
//! and those that are made meanwhile, wait for the new one, each within its own time. Making the new one never waits under the
//! lock. Whoever waits does the work: the driver of the connection takes one step after the other, and the next driver goes on
//! where it has stopped. So an attempt outlives the call that began it, and calls with little time get it done together.
//!
//! A signal handler may make a call on the connection while the thread that it interrupts sleeps in one: the attempt lies in
//! the state, which no sleeping thread holds, so the handler's call takes the next step itself.
#![forbid(unsafe_code)]

use crate::fork;
use crate::socket;
use crate::sync::MutexGuard;
use crate::thread;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use crate::connection::{Expect, RPC_HEADER_MAX, Role};
use crate::error::{Error, Kind};
use crate::memory::Message;
use crate::process;
use crate::provider::{Device, QueuePair};
use crate::stats::layout::Slot;
use crate::stats::{self, Counter};
use crate::wait::{self};
use crate::wire::Xid;
use crate::wire::header::Versions;
use crate::{log_info, log_warn};

use super::calls::Waiter;
use super::client::{Client, Waiting};
use super::link::Link;
use super::session::{self, State};
use super::start::{self, Anew, START_TIMEOUT};
use super::{Caller, Mask, memory, null_call, with_xid};

/// How long a device may take where another one may take its place: a host without such a device may never answer.
const FIRST_ALONE: Duration = Duration::from_secs(2);

/// A connection that is to be replaced.
pub(super) struct Renewal {
    /// Why it is replaced.
    why: Error,
    /// The attempt, and when it is given up. `None`: nobody needs the new connection yet, or the last attempt has failed.
    attempt: Option<(Anew, Instant)>,
    /// Attempts that have failed for good, and why the last one did.
    failed: (u32, Option<Error>),
    /// The device that is tried in place of the one that the connection went over, over which the last attempt has failed.
    instead: Option<&'static dyn Device>,
    /// Calls that go over the new connection, in their order.
    parked: Vec<(Xid, Message, Expect)>,
}

impl Renewal {
    /// Keeps a call for the new connection.
    ///
    /// # Errors
    /// `Invalid` when another one has its XID.
    pub(super) fn park(&mut self, xid: Xid, message: Message, expect: Expect) -> Result<(), Error> {
        if self.parked.iter().any(|(other, ..)| *other == xid) {
            return Err(Error::new(Kind::Invalid, format!("a call with XID {xid} is under way")));
        }
        self.parked
            .try_reserve(1)
            .map_err(|_| Error::new(Kind::Os(libc::ENOMEM), "no memory for one more call"))?;
        self.parked.push((xid, message, expect));
        Ok(())
    }

    /// How many calls wait for a new connection.
    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Nobody waits for the call any more. Returns why it has failed, if it is one of these.
    pub(super) fn abandon(&mut self, xid: Xid) -> Option<Error> {
        let at = self.parked.iter().position(|(other, ..)| *other == xid)?;
        self.parked.remove(at);
        let text = format!("no new connection within the time of the call: {}", self.why());
        Some(Error::new(Kind::Timeout, text))
    }

    /// Why there is no connection.
    pub(super) fn why(&self) -> &Error {
        self.failed.1.as_ref().unwrap_or(&self.why)
    }

    /// Whether an attempt is under way, what to wait for, and when it is given up.
    pub(super) fn under_way(&self) -> Option<(RawFd, bool, Instant)> {
        let (attempt, until) = self.attempt.as_ref()?;
        let (fd, writes) = attempt.fd();
        Some((fd, writes, *until))
    }
}

impl Client {
    /// Gives the connection up if it is of no use any more.
    pub(super) fn look(&self, state: &mut Waiting) {
        // A thread that sleeps on a device's own descriptor would not notice that there is another one by now.
        if state.renewal.is_some() || (!self.traits().socket && state.session.is_driven()) {
            return;
        }
        let open = state.link.engine.closed().is_none();
        if open && state.link.offer_ends().is_some_and(|end| end <= Instant::now()) {
            let text = "no answer to the offer of RPC-over-RDMA version 2";
            state.link.fail(Error::new(Kind::Timeout, text));
        }
        let why = match state.link.engine.closed() {
            Some(error) if state.link.engine.must_fall_back() => {
                log_warn!("fd {}: connecting anew, with RPC-over-RDMA version 1 only: {error}", self.fd);
                let error = error.clone();
                state.wishes.versions = Versions::ONE;
                error
            }
            // A call that timed out has ended the connection, because the device could not take the call's memory back
            // otherwise.
            Some(error) if error.kind() == Kind::Timeout => {
                log_warn!("fd {}: connecting anew: {error}", self.fd);
                error.clone()
            }
            // RFC 8167 §5.4: "forward-direction Requesters SHOULD maintain a transport connection as long as there is the
            // possibility that the connection peer can send reverse-direction requests."
            Some(error) if state.serving.is_some() => {
                log_info!("fd {}: connecting anew: {error}", self.fd);
                error.clone()
            }
            None if !state.link.device.claim(false) => return state.leave_to_others(),
            None if state.link.starved() => {
                let text = "timed-out calls hold every credit";
                if state.session.another_reads() {
                    let fd = state.link.device.fd();
                    if wait::until(fd, wait::IN, Some(Duration::ZERO), None).unwrap_or(false) {
                        // The thread that sleeps takes it in, and looks again.
                        return;
                    }
                } else {
                    // A late reply gives a credit back.
                    state.link.pump();
                    state.settle();
                    if !state.link.starved() || state.link.engine.closed().is_some() {
                        return;
                    }
                }
                log_warn!("fd {}: {text}: connecting anew", self.fd);
                Error::new(Kind::Timeout, text)
            }
            _ => return,
        };
        state.give_up(why);
    }

    /// Takes the next step towards a new connection, or the first one if nobody has yet. A step does not wait.
    pub(super) fn step(&self, state: &mut Waiting) {
        if !state.is_own(self.fd) {
            // Another file has the number by now, and would be replaced.
            return state.attempt_failed(Error::new(Kind::NotSent, "the descriptor was closed"));
        }
        // A descriptor that an attempt leaves in the set would stay there under its number.
        state.watch_nothing();
        let Some(renewal) = &mut state.renewal else { return };
        let now = Instant::now();
        // An attempt that nobody has looked after until its time is over may have been given up by the peer.
        let (mut attempt, until) = match renewal.attempt.take() {
            Some((attempt, until)) if now < until => (attempt, until),
            Some(_) => {
                let text = "the peer did not accept the new connection in time";
                return self.attempt_failed(state, Error::new(Kind::Timeout, text));
            }
            None => {
                let device = renewal.instead.unwrap_or(self.device());
                match Anew::start(device, self.fd, self.to, self.room, self.config) {
                    Ok(attempt) => {
                        let next = start::next(self.config, device.traits());
                        (attempt, now + if next.is_some() { FIRST_ALONE } else { START_TIMEOUT })
                    }
                    Err(error) => return self.attempt_failed(state, error),
                }
            }
        };
        // The last step, which may be the first one, makes another socket take the descriptor number of the one that a thread
        // may be about to read from, or to poll.
        if state.session.naps() || state.session.is_polled() {
            renewal.attempt = Some((attempt, until));
            return state.rearm();
        }
        match attempt.step(self.config) {
            Ok(false) => {
                renewal.attempt = Some((attempt, until));
                state.rearm();
            }
            Ok(true) => match attempt.finish(self.fd) {
                Ok(device) => {
                    self.changes_to(device.traits());
                    self.install(state, device);
                }
                Err(error) => self.attempt_failed(state, error),
            },
            Err(error) => self.attempt_failed(state, error),
        }
    }

    /// An attempt has failed: the next one takes another way, if there is one.
    fn attempt_failed(&self, state: &mut Waiting, error: Error) {
        if let Some(renewal) = &mut state.renewal {
            let failed = renewal.instead.unwrap_or(self.device()).traits();
            renewal.instead = start::next(self.config, failed);
            if let Some(next) = renewal.instead {
                let (fd, title) = (self.fd, next.traits().title);
                log_info!("fd {fd}: no new connection over {}: {title} is tried: {error}", failed.name);
                renewal.attempt = None;
                return self.step(state);
            }
        }
        state.attempt_failed(error);
    }

    /// Goes on over the new connection.
    fn install(&self, state: &mut Waiting, device: Box<dyn QueuePair>) {
        let Some(Renewal { parked, .. }) = state.renewal.take() else { return };
        state.session.forget_leavers();
        let mut link =
            Link::new(Role::Client, self.config, state.wishes.versions, device, &memory(self.config));
        stats::add(Counter::Reconnects, 1);
        link.known_as(self.fd, self.to);
        let offered = state.link.engine.version().is_none();
        link.first_reply = state.link.first_reply_of_next();
        // The old connection was closed, and what it had was handed out, before anybody began to connect. The exceptions are
        // calls back that wait for a thread which serves another one all the time: they are lost with the connection, as are
        // those that were on their way.
        state.link = link;
        state.identity = process::identify(self.fd);
        state.nudges = 0;
        // The greetings that went over the old connection have ended with it.
        state.session.calls.greetings.retain(|xid| parked.iter().any(|(other, ..)| other == xid));
        state.connections += 1;
        let Waiting { link, wishes, session, .. } = &mut *state;
        if let Some(credits) = wishes.credits {
            link.ask(credits);
        }
        link.engine.set_reverse_chunks(wishes.reverse_chunks);
        link.raise_again(wishes.receive_size);
        if offered {
            session.calls.requests.repeat(link);
        }
        link.drain();
        if state.serving.is_some() && self.traits().socket {
            socket::keep_alive(self.fd);
        }
        state.resume_serving();
        for (xid, message, expect) in parked {
            state.make_way(&message, &expect);
            let Waiting { link, session, .. } = &mut *state;
            match link.engine.call(xid, message, expect, &mut *link.device) {
                Ok(()) => link.shown.add(Slot::Calls, 1),
                Err(error) => drop(session.calls.end(xid, Err(error))),
            }
        }
        // The driver sleeps until something comes, and nothing would before these calls have left.
        state.link.flush();
        state.settle();
        state.session.wake_all();
    }

    /// Waits until there is a connection that is not to be replaced.
    ///
    /// # Errors
    /// `Timeout` at `deadline`, or why no new one could be made.
    pub(super) fn connected<'a>(
        &'a self,
        mut state: MutexGuard<'a, Waiting>,
        deadline: Instant,
        mask: Mask<'_>,
    ) -> Result<MutexGuard<'a, Waiting>, Error> {
        let waiter = Waiter::Version(thread::this());
        let mut steps = session::Steps::default();
        self.look(&mut state);
        let before = state.renewal.as_ref().map(|renewal| renewal.failed.0);
        let outcome = loop {
            match &state.renewal {
                None => break Ok(()),
                Some(renewal) if Some(renewal.failed.0) != before => break Err(renewal.why().clone()),
                Some(renewal) if Instant::now() >= deadline => {
                    let text = format!("no new connection within the time: {}", renewal.why());
                    break Err(Error::new(Kind::Timeout, text));
                }
                Some(_) => state = session::wait_once(&self, state, waiter, &mut steps, deadline, mask),
            }
        };
        state.hand_over();
        outcome.map(|()| state)
    }
}

impl Waiting {
    /// See [`Renewal::under_way`].
    pub(super) fn attempt(&self) -> Option<(RawFd, bool, Instant)> {
        self.renewal.as_ref().and_then(Renewal::under_way)
    }

    /// Ends the connection: what had come is handed out, and calls that were sent end; calls that were not sent are kept for
    /// the next connection.
    fn give_up(&mut self, why: Error) {
        let parked = self.link.engine.take_waiting();
        self.link.fail(why.clone());
        self.retire(why, parked, true);
    }

    /// The connection is another process's: nothing is sent on it, not even its end.
    fn leave_to_others(&mut self) {
        let fd = self.link.device.fd();
        log_info!("fd {fd}: another process has the connection: connecting anew");
        let why = Error::new(Kind::NotSent, "the connection belongs to another process");
        let parked = self.link.engine.take_waiting();
        // Twice: while a version is offered, the first of these keeps the calls.
        self.link.engine.handle_closed(why.clone());
        self.link.engine.handle_closed(why.clone());
        self.retire(why, parked, false);
    }

    /// `ended`: the connection has ended, and its descriptor shows that.
    fn retire(&mut self, why: Error, parked: Vec<(Xid, Message, Expect)>, ended: bool) {
        self.link.drain();
        self.settle();
        if self.link.engine.version().is_some() {
            self.session
                .calls
                .requests
                .end(&Error::new(Kind::ConnectionLost, "it was replaced by a new one"));
        }
        // The drivers sleep on the old connection, whose end wakes them, and see what has become of it.
        self.session.forget_drivers(ended);
        self.renewal = Some(Renewal { why, attempt: None, failed: (0, None), instead: None, parked });
        self.session.wake_all();
    }

    /// This process is a forked child now. The threads of its parent are not here, and what they wait for is theirs.
    pub(super) fn inherit(&mut self) {
        self.generation = fork::generation();
        self.session.inherit();
        self.server = None;
        // Its set is the parent's too, and libtirpc's table in this process still has its descriptor.
        std::mem::forget(self.serving.take());
        if let Some(renewal) = &mut self.renewal {
            (renewal.attempt, renewal.parked) = (None, Vec::new());
            return;
        }
        let idle = self.link.engine.is_idle();
        if self.link.engine.closed().is_none() && !(idle && self.link.device.claim(false)) {
            self.leave_to_others();
            if let Some(renewal) = &mut self.renewal {
                renewal.parked.clear();
            }
            self.session.inherit();
        }
    }

    /// An attempt has failed. If it was only slow, the calls that wait go on waiting: there will be another one.
    pub(super) fn attempt_failed(&mut self, error: Error) {
        let fd = self.link.device.fd();
        let Some(renewal) = &mut self.renewal else { return };
        log_info!("fd {fd}: no new connection: {error}");
        renewal.attempt = None;
        renewal.failed.1 = Some(error.clone());
        if error.kind() != Kind::Timeout {
            renewal.failed.0 += 1;
            for (xid, ..) in renewal.parked.drain(..) {
                let text = format!("no new connection: {error}");
                self.session.calls.end(xid, Err(Error::new(Kind::NotSent, text)));
            }
            self.session.calls.requests.end(&error);
        }
        self.retry_later();
        self.rearm();
        self.session.wake_all();
    }

    /// Sends a call of procedure 0 ahead of a call without a reply that would take the last credit, because only a reply gives
    /// it back. Besides, the first reply on a connection tells how many credits there are.
    pub(super) fn make_way(&mut self, message: &Message, expect: &Expect) {
        let engine = &self.link.engine;
        if matches!(expect, Expect::Nothing) && engine.credits_left() <= 1 && engine.closed().is_none() {
            self.greet(null_call(message.body()));
        }
    }

    /// Sends a call of procedure 0 whose reply nobody waits for.
    pub(super) fn greet(&mut self, null: [u8; 40]) {
        let Waiting { link, session, .. } = self;
        let xid = session.calls.fresh_xid(&link.engine);
        let expect = Expect::Reply { max: RPC_HEADER_MAX, places: Vec::new() };
        let sent = link.memory.message().map_err(Error::from).and_then(|message| {
            let message = with_xid(message, &null, xid)?;
            link.begin(xid, message.into(), expect)
        });
        match sent {
            Ok(()) => session.calls.greetings.push(xid),
            Err(error) => log_info!("fd {}: no call for credits: {error}", link.device.fd()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;
    use std::thread::scope;

    use super::super::client::tests::{PATIENCE, call_for, pair, sleeping, until};
    use super::*;
    use crate::config::Config;
    #[cfg(feature = "verbs")]
    use crate::config::Provider;
    use crate::config::Version;
    use crate::connection::Request;
    use crate::driver::Callee;
    use crate::driver::callback;
    use crate::driver::link::FIRST_REPLY;
    use crate::driver::server::Server;
    use crate::driver::server::Shared;
    use crate::driver::server::locked;
    use crate::driver::session::Session;
    use crate::driver::start::Room;
    use crate::provider::{Limits, fault};
    use crate::sync::Mutex;
    use std::sync::Arc;

    fn config(credits: u32) -> &'static Config {
        // Without spinning, a driver that others can see is asleep.
        Box::leak(Box::new(Config { credits, inline: Some(4096), poll: Duration::ZERO, ..Config::default() }))
    }

    fn soon() -> Instant {
        Instant::now() + PATIENCE
    }

    fn message(client: &Client, xid: Xid) -> Message {
        let mut message = Caller::message(client).unwrap();
        message
            .extend(
                &[[xid.0, 0, 2, 1, 1, 0], [0; 6]]
                    .concat()
                    .iter()
                    .flat_map(|w| w.to_be_bytes())
                    .collect::<Vec<_>>(),
            )
            .unwrap();
        message.into()
    }

    fn reply() -> Expect {
        Expect::Reply { max: 1024, places: Vec::new() }
    }

    fn call(client: &Client, deadline: Instant) -> Result<(), Error> {
        let xid = client.fresh_xid();
        client.call(xid, message(client, xid), 1024, Vec::new(), deadline, None).map(drop)
    }

    /// Makes a call that is sent, and that nobody waits for.
    fn orphan(client: &Client) {
        assert_eq!(call(client, Instant::now()).unwrap_err().kind(), Kind::Timeout);
    }

    /// Starts a call for a thread that never comes to wait for it.
    fn begin(client: &Client, expect: Expect) -> Xid {
        let xid = client.fresh_xid();
        let message = message(client, xid);
        client.lock().link.begin(xid, message, expect).unwrap();
        xid
    }

    struct Peer {
        _socket: TcpStream,
        server: Shared,
    }

    impl Peer {
        fn accept(listener: &TcpListener, config: &'static Config) -> Peer {
            assert!(
                wait::until(listener.as_raw_fd(), wait::IN, Some(PATIENCE), None).unwrap(),
                "nobody comes"
            );
            let socket = listener.accept().unwrap().0;
            let server = Mutex::new(Server::accept(socket.as_raw_fd(), config).unwrap());
            Peer { _socket: socket, server }
        }

        /// The next request; `None` at the end of the connection.
        fn next(&self) -> Option<Request> {
            loop {
                let request = locked(&self.server).receive();
                if request.is_some() || locked(&self.server).closed().is_some() {
                    return request;
                }
                assert!(wait::until(locked(&self.server).fd(), wait::IN, Some(PATIENCE), None).unwrap());
            }
        }

        fn answer(&self, request: Request) {
            let mut reply = self.server.message().unwrap();
            reply.extend(&request.message[0][..40]).unwrap();
            // Now it is a reply.
            reply[7] = 1;
            self.server.reply(request.id, reply.into()).unwrap();
        }

        /// Answers everything until the connection ends.
        fn serve(&self) {
            while let Some(request) = self.next() {
                self.answer(request);
            }
        }
    }

    fn connect(config: &'static Config) -> (TcpListener, TcpStream, &'static Config) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener, socket, config)
    }

    fn open(socket: &TcpStream, config: &'static Config) -> Arc<Client> {
        Client::open(socket.as_raw_fd(), config, soon(), None).unwrap()
    }

    /// When a test fails, this lets go of what waits for the other end.
    struct Hangup<'a>(&'a TcpStream);

    impl Drop for Hangup<'_> {
        fn drop(&mut self) {
            socket::shutdown(self.0.as_raw_fd());
        }
    }

    /// What a test has: a CLIENT, and a thread beside it that is the other end.
    struct Bench<'scope, 'env, T> {
        scope: &'scope std::thread::Scope<'scope, 'env>,
        socket: &'env TcpStream,
        client: Arc<Client>,
        peer: std::thread::ScopedJoinHandle<'scope, T>,
    }

    /// A CLIENT, and `peer` at the other end.
    fn beside<T: Send + 'static>(
        config: &'static Config,
        peer: impl FnOnce(TcpListener) -> T + Send + 'static,
        test: impl for<'scope, 'env> FnOnce(Bench<'scope, 'env, T>),
    ) {
        let (listener, socket, config) = connect(config);
        scope(|scope| {
            let _hangup = Hangup(&socket);
            let peer = scope.spawn(move || peer(listener));
            let client = open(&socket, config);
            test(Bench { scope, socket: &socket, client, peer });
        });
    }

    /// Serves calls back, and tells of each.
    struct Tells(Mutex<mpsc::Sender<()>>, Mutex<std::sync::Weak<Client>>);

    impl callback::Serve for Tells {
        fn serve(&self, request: Request, _: Mask<'_>) {
            let client = self.1.lock().unwrap().upgrade().unwrap();
            Callee::discard(&*client, request.id);
            self.0.lock().unwrap().send(()).unwrap();
        }
    }

    #[test]
    fn who_sleeps_for_a_credit_gets_a_new_connection_when_another_threads_call_is_abandoned_with_it() {
        let (listener, socket, config) = connect(config(1));
        scope(|scope| {
            let hangup = Hangup(&socket);
            let server = scope.spawn(move || {
                let first = Peer::accept(&listener, config);
                first.answer(first.next().unwrap());
                let _unanswered = first.next().unwrap();
                Peer::accept(&listener, config).serve();
            });
            let client = open(&socket, config);
            // From now on nobody is nudged.
            call(&client, soon()).unwrap();
            let abandoned = begin(&client, reply());
            let caller = client.clone();
            let waiting = scope.spawn(move || call(&caller, soon()));
            until(&client, |state| state.session.is_driven());
            let outcome = client.wait(client.lock(), abandoned, Instant::now(), None);
            assert_eq!(outcome.unwrap_err().kind(), Kind::Timeout);
            waiting.join().unwrap().unwrap();
            assert_eq!(client.connections(), 2);
            drop(hangup);
            server.join().unwrap();
        });
    }

    #[test]
    fn a_call_back_that_comes_while_a_call_looks_for_credits_is_served_before_it_sleeps() {
        let (listener, socket, config) = connect(config(1));
        scope(|scope| {
            let _hangup = Hangup(&socket);
            let (came, served) = mpsc::channel();
            let (told, sent) = mpsc::channel();
            scope.spawn(move || {
                let peer = Peer::accept(&listener, config);
                peer.answer(peer.next().unwrap());
                let orphan = peer.next().unwrap();
                let mut server = locked(&peer.server);
                let link = server.link().unwrap();
                link.engine.ask(1, &mut *link.device);
                let mut back = link.memory.message().unwrap();
                back.extend(&[7, 0, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0].map(u32::to_be_bytes).concat()).unwrap();
                link.begin(Xid(7), back.into(), reply()).unwrap();
                drop(server);
                peer.answer(orphan);
                told.send(()).unwrap();
                let call = peer.next().unwrap();
                // The peer waits until what it has called back for is done.
                if served.recv_timeout(PATIENCE / 2).is_ok() {
                    peer.answer(call);
                }
                peer.next();
            });
            let client = open(&socket, config);
            let serve = Arc::new(Tells(Mutex::new(came), Mutex::new(Arc::downgrade(&client))));
            client.start_serving(serve, 1, 1).unwrap();
            call(&client, soon()).unwrap();
            let orphan = begin(&client, reply());
            let waits = begin(&client, reply());
            sent.recv().unwrap();
            assert!(wait::until(socket.as_raw_fd(), wait::IN, Some(PATIENCE), None).unwrap());
            let mut state = client.lock();
            state.link.abandon(orphan);
            assert!(state.link.engine.holds_back());
            client.wait(state, waits, soon(), None).unwrap();
        });
    }

    #[test]
    fn nobody_waits_for_calls_back_on_a_lost_connection_that_is_not_served_any_more() {
        let (listener, socket, config) = connect(config(2));
        scope(|scope| {
            let _hangup = Hangup(&socket);
            scope.spawn(move || Peer::accept(&listener, config).serve());
            let client = open(&socket, config);
            let serve = Tells(Mutex::new(mpsc::channel().0), Mutex::new(Arc::downgrade(&client)));
            client.start_serving(Arc::new(serve), 1, 1).unwrap();
            call(&client, soon()).unwrap();
            let poller = client.clone();
            let polls = scope.spawn(move || poller.poll_callbacks(soon(), None));
            until(&client, |state| state.session.is_driven());
            client.stop_serving();
            let lost = Instant::now();
            socket::shutdown(socket.as_raw_fd());
            let error = polls.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), Kind::ConnectionLost);
            assert!(lost.elapsed() < PATIENCE / 2, "{:?}", lost.elapsed());
        });
    }

    /// Over a device that holds few Receives: those that one direction does not take are the other's.
    #[test]
    fn both_directions_have_as_many_credits_on_the_connection_that_follows() {
        const LIMITS: Limits =
            Limits { read_depth: 16, max_segment: 1 << 20, remote_invalidation: true, receives: 32 };
        let config: &'static Config =
            Box::leak(Box::new(Config { version: Version::One, ..Config::default() }));
        let (socket, _other) = pair().unwrap();
        let link =
            Link::new(Role::Client, config, Versions::ONE, Box::new(fault::pair(LIMITS).0), &memory(config));
        let client = Client::with(socket.as_raw_fd(), None, Room::Same, config, link);
        let credits = || (Caller::credits(&*client, None), Callee::grants(&*client, None));
        let serve = Tells(Mutex::new(mpsc::channel().0), Mutex::default());
        client.start_serving(Arc::new(serve), 1, 1).unwrap();
        let before = credits();
        assert!(before.1 > 1, "{before:?}");
        let anew = || {
            let mut state = client.lock();
            state.give_up(Error::new(Kind::Timeout, "gone"));
            client.install(&mut state, Box::new(fault::pair(LIMITS).0));
        };
        anew();
        assert_eq!(credits(), before);
        // What the program has set lasts.
        Caller::credits(&*client, Some(7));
        anew();
        assert_eq!(credits(), (7, before.1));
    }

    /// The same, except for the choice of the device.
    #[cfg(feature = "verbs")]
    fn any_device(config: &Config) -> &'static Config {
        Box::leak(Box::new(Config { provider: Provider::Auto, ..config.clone() }))
    }

    #[cfg(feature = "verbs")]
    /// A connection that went over an adapter, as far as its CLIENT knows.
    fn over_adapter(socket: &TcpStream, config: &'static Config) -> Arc<Client> {
        let link =
            Client::start(socket.as_raw_fd(), any_device(config), Versions::ONE, soon(), None).unwrap();
        let to = socket.peer_addr().ok();
        let client = Client::with(socket.as_raw_fd(), to, Room::Same, config, link);
        client.changes_to(&crate::provider::verbs::TRAITS);
        client
    }

    #[cfg(feature = "verbs")]
    #[test]
    fn what_an_adapter_does_not_bring_back_software_iwarp_does_if_it_may() {
        for (provider, returns) in [(Provider::Auto, true), (Provider::Only("verbs"), false)] {
            let config: &'static Config =
                Box::leak(Box::new(Config { provider, version: Version::One, ..config(2).clone() }));
            let (listener, socket, config) = connect(config);
            scope(|scope| {
                let _hangup = Hangup(&socket);
                let (told, over) = mpsc::channel::<()>();
                scope.spawn(move || {
                    let first = Peer::accept(&listener, any_device(config));
                    first.answer(first.next().unwrap());
                    let _lost = first.next().unwrap();
                    drop(first);
                    if returns {
                        Peer::accept(&listener, any_device(config)).serve();
                    }
                    let _ = over.recv();
                });
                let client = over_adapter(&socket, config);
                call(&client, soon()).unwrap();
                assert!(!client.traits().socket);
                // The server goes, and its adapter with it; a call that timed out has the connection replaced.
                assert!(call(&client, soon()).is_err());
                client.lock().give_up(Error::new(Kind::Timeout, "gone"));
                let outcome = call(&client, soon());
                assert_eq!(outcome.is_ok(), returns, "{provider:?}: {outcome:?}");
                assert_eq!(client.traits().socket, returns);
                drop(told);
            });
        }
    }

    #[test]
    fn a_reply_that_came_before_its_connection_was_replaced_is_not_lost() {
        let config = config(2);
        let (told, answered) = mpsc::channel();
        let peer = move |listener: TcpListener| {
            let first = Peer::accept(&listener, config);
            first.answer(first.next().unwrap());
            let _orphan = first.next().unwrap();
            first.answer(first.next().unwrap());
            told.send(()).unwrap();
            Peer::accept(&listener, config).serve();
        };
        beside(config, peer, |Bench { socket, client, .. }| {
            call(&client, soon()).unwrap();
            orphan(&client);
            let (awaited, batched) = (begin(&client, reply()), begin(&client, Expect::Nothing));
            answered.recv().unwrap();
            assert!(wait::until(socket.as_raw_fd(), wait::IN, Some(PATIENCE), None).unwrap());
            // The reply gives a credit to the call without a reply, which leaves none.
            call(&client, soon()).unwrap();
            let mut state = client.lock();
            assert_eq!(state.connections, 2);
            for xid in [awaited, batched] {
                assert!(state.session.calls.take(xid).unwrap().is_ok());
            }
        });
    }

    #[test]
    fn what_another_thread_sleeps_for_is_left_to_it() {
        let config = config(2);
        let (told, answered) = mpsc::channel();
        let peer = move |listener: TcpListener| {
            let first = Peer::accept(&listener, config);
            first.answer(first.next().unwrap());
            first.answer(first.next().unwrap());
            told.send(()).unwrap();
            first.serve();
        };
        beside(config, peer, |Bench { socket, client, .. }| {
            call(&client, soon()).unwrap();
            begin(&client, reply());
            // Another thread sleeps in poll(2), and nothing else wakes it.
            client.lock().session.drive_as(usize::MAX);
            answered.recv().unwrap();
            assert!(wait::until(socket.as_raw_fd(), wait::IN, Some(PATIENCE), None).unwrap());
            client.room_to_send();
            assert_eq!(call(&client, Instant::now()).unwrap_err().kind(), Kind::Timeout);
            assert!(wait::until(socket.as_raw_fd(), wait::IN, Some(Duration::ZERO), None).unwrap());
        });
    }

    #[test]
    fn a_call_without_reply_is_not_the_first_on_a_connection() {
        let config = config(2);
        let peer = move |listener: TcpListener| {
            let peer = Peer::accept(&listener, config);
            let first = peer.next().unwrap();
            let xid = first.xid;
            peer.answer(first);
            (xid, peer.next().unwrap().xid)
        };
        beside(config, peer, |Bench { client, peer, .. }| {
            let xid = client.fresh_xid();
            // This call would hold the only credit.
            client.exchange(xid, message(&client, xid), Expect::Nothing, soon(), None).unwrap();
            let (first, second) = peer.join().unwrap();
            assert!(first != xid && second == xid, "{first}, {second}");
            assert_eq!(client.connections(), 1);
        });
    }

    /// The peer has answered one call; two others hold its credits for ever.
    fn starve(client: &Client) {
        call(client, soon()).unwrap();
        orphan(client);
        orphan(client);
    }

    /// Answers the first call, and no other.
    fn starving(listener: &TcpListener, config: &'static Config) -> Peer {
        let first = Peer::accept(listener, config);
        first.answer(first.next().unwrap());
        first
    }

    #[test]
    fn calls_that_wait_for_a_credit_go_over_the_new_connection_in_their_order() {
        let config = config(2);
        let peer = move |listener: TcpListener| {
            let _first = starving(&listener, config);
            let second = Peer::accept(&listener, config);
            let mut xids = Vec::new();
            while let Some(request) = second.next() {
                xids.push(request.xid);
                second.answer(request);
            }
            xids
        };
        beside(config, peer, |Bench { socket, client, peer, .. }| {
            starve(&client);
            let batched = [begin(&client, Expect::Nothing), begin(&client, Expect::Nothing)];
            let awaited = begin(&client, reply());
            call(&client, soon()).unwrap();
            call(&client, soon()).unwrap();
            let mut state = client.lock();
            // Otherwise the calls without a reply would have taken its only credit.
            assert_eq!(state.connections, 2);
            for xid in batched.iter().chain([&awaited]) {
                assert!(state.session.calls.take(*xid).unwrap().is_ok());
            }
            assert!(state.session.calls.greetings.is_empty() && state.session.calls.outcomes.is_empty());
            drop(state);
            socket::shutdown(socket.as_raw_fd());
            let xids = peer.join().unwrap();
            // Each call without a reply follows one whose reply makes room for it.
            assert_eq!([xids[1], xids[3], xids[4]], [batched[0], batched[1], awaited], "{xids:?}");
        });
    }

    /// Such a thread would take the first bytes of the new connection for the last of the old one.
    #[test]
    fn a_new_connection_takes_the_number_when_nobody_is_about_to_read_from_the_old_one() {
        takes_the_number_after(Session::nap_as);
    }

    /// Such a thread would sleep until something comes on the new connection, however long ago the old one has ended.
    #[test]
    fn a_new_connection_takes_the_number_when_nobody_is_about_to_poll_the_old_one() {
        takes_the_number_after(Session::leave_as);
    }

    #[test]
    fn threads_that_poll_a_connection_that_is_given_up_are_known_until_they_have_left() {
        let sockets = pair().unwrap();
        let (_, _server, client) = sleeping(&sockets);
        scope(|scope| {
            let waits = scope.spawn(|| call_for(&client, PATIENCE).map(drop));
            until(&client, |state| state.session.polls());
            let mut state = client.lock();
            state.give_up(Error::new(Kind::ConnectionLost, "a test"));
            assert_eq!((state.session.leavers(), state.session.is_polled()), (1, true));
            drop(state);
            // It is woken by that, and its call ends.
            until(&client, |state| state.session.leavers() == 0);
            assert!(waits.join().unwrap().is_err());
        });
    }

    /// `holds`: begins and ends what keeps the number.
    fn takes_the_number_after(holds: fn(&mut Session, bool)) {
        let config = config(2);
        let peer = move |listener: TcpListener| {
            let _first = starving(&listener, config);
            Peer::accept(&listener, config).serve();
        };
        beside(config, peer, |Bench { scope, client, .. }| {
            starve(&client);
            let holds = |it| holds(&mut client.lock().session, it);
            client.lock().give_up(Error::new(Kind::ConnectionLost, "a test"));
            holds(true);
            // In vain until then, whatever the step would be.
            let steps = || {
                let mut state = client.lock();
                client.look(&mut state);
                client.step(&mut state);
                state.attempt().map(|(fd, ..)| fd)
            };
            let fd = steps().unwrap();
            assert!(wait::until(fd, wait::OUT, Some(PATIENCE), None).unwrap());
            for _ in 0..3 {
                assert_eq!(
                    call(&client, Instant::now() + Duration::from_millis(30)).unwrap_err().kind(),
                    Kind::Timeout
                );
                assert_eq!((steps(), client.connections()), (Some(fd), 1));
            }
            let waiter = client.clone();
            let waits = scope.spawn(move || call(&waiter, soon()));
            until(&client, |state| state.session.is_driven());
            holds(false);
            waits.join().unwrap().unwrap();
            assert_eq!(client.connections(), 2);
        });
    }

    #[test]
    fn a_call_ends_in_its_own_time_when_the_new_connection_does_not_come() {
        let (listener, socket, config) = connect(config(2));
        scope(|scope| {
            let _hangup = Hangup(&socket);
            let client = scope.spawn(|| open(&socket, config));
            let first = scope.spawn(|| starving(&listener, config));
            let client = client.join().unwrap();
            starve(&client);
            let _first = first.join().unwrap();
            let times = (0..5).map(|_| {
                let start = Instant::now();
                let error = call(&client, start + Duration::from_millis(30)).unwrap_err();
                assert_eq!(error.kind(), Kind::Timeout);
                assert!(error.text().starts_with("no new connection within the time of the call"), "{error}");
                start.elapsed()
            });
            let fastest = times.min().unwrap();
            assert!(fastest < Duration::from_secs(1), "{fastest:?}");
        });
    }

    #[test]
    fn while_one_call_waits_for_the_new_connection_others_end_in_their_time() {
        let config = config(2);
        let (tell, go_on) = mpsc::channel();
        let peer = move |listener: TcpListener| {
            let _first = starving(&listener, config);
            // The kernel has already accepted the second connection; nobody answers on it before the other call has ended.
            go_on.recv().unwrap();
            Peer::accept(&listener, config).serve();
        };
        beside(config, peer, |Bench { scope, client, .. }| {
            starve(&client);
            let other = client.clone();
            let waits = scope.spawn(move || call(&other, soon()));
            until(&client, |state| state.renewal.is_some() && state.session.is_driven());
            let short = Instant::now() + Duration::from_millis(30);
            assert_eq!(call(&client, short).unwrap_err().kind(), Kind::Timeout);
            assert!(!waits.is_finished());
            tell.send(()).unwrap();
            waits.join().unwrap().unwrap();
            assert_eq!(client.connections(), 2);
        });
    }

    #[test]
    fn calls_with_little_time_get_on_with_one_attempt_together() {
        let (listener, socket, few) = connect(config(2));
        let many = config(32);
        let (tell, go_on) = mpsc::channel();
        scope(|scope| {
            let _hangup = Hangup(&socket);
            let served = scope.spawn(move || {
                let _first = starving(&listener, many);
                go_on.recv().unwrap();
                Peer::accept(&listener, many).serve();
                listener.set_nonblocking(true).unwrap();
                listener.accept().is_err()
            });
            let client = open(&socket, few);
            starve(&client);
            // The connection is given up with the next call, which does not even have time to sleep; the one that follows has
            // more credits.
            orphan(&client);
            client.credits(Some(32));
            for _ in 0..3 {
                orphan(&client);
            }
            tell.send(()).unwrap();
            let end = soon();
            while call(&client, Instant::now() + Duration::from_millis(5)).is_err() {
                assert!(Instant::now() < end, "none of them has come through");
                client.lock().link.first_reply = PATIENCE;
            }
            assert_eq!(client.connections(), 2);
            socket::shutdown(socket.as_raw_fd());
            assert!(served.join().unwrap(), "one attempt");
        });
    }

    #[test]
    fn calls_end_at_once_when_the_new_connection_is_refused_and_the_next_one_tries_again() {
        let (listener, socket, config) = connect(config(2));
        let to = listener.local_addr().unwrap();
        scope(|scope| {
            let _hangup = Hangup(&socket);
            let first = scope.spawn(move || starving(&listener, config));
            let client = open(&socket, config);
            starve(&client);
            let _first = first.join().unwrap();
            let queued = begin(&client, reply());
            let error = call(&client, Instant::now() + 100 * PATIENCE).unwrap_err();
            assert_eq!(error.kind(), Kind::NotSent);
            assert!(error.text().contains("cannot connect to 127.0.0.1"), "{error}");
            let ended = client.lock().session.calls.take(queued).unwrap();
            assert_eq!(ended.unwrap_err().kind(), Kind::NotSent);
            let listener = TcpListener::bind(to).unwrap();
            scope.spawn(move || Peer::accept(&listener, config).serve());
            call(&client, soon()).unwrap();
        });
    }

    /// The call of a signal handler that runs while its thread sleeps for the new connection.
    #[test]
    fn a_call_made_in_the_midst_of_one_that_waits_for_the_new_connection_makes_it() {
        let config = config(2);
        let (tell, go_on) = mpsc::channel();
        let peer = move |listener: TcpListener| {
            let _first = starving(&listener, config);
            go_on.recv().unwrap();
            Peer::accept(&listener, config).serve();
        };
        beside(config, peer, |Bench { client, .. }| {
            starve(&client);
            orphan(&client);
            // As if a call of this very thread were asleep.
            client.lock().session.drive_as(thread::this());
            tell.send(()).unwrap();
            call(&client, soon()).unwrap();
            assert!(client.lock().session.is_driven());
        });
    }

    /// Otherwise a server that is slower than the calls' time would see a new connection with each of them.
    #[test]
    fn a_connection_that_follows_one_without_a_reply_has_time_for_its_first_reply() {
        let config = config(2);
        let (tell, go_on) = mpsc::channel();
        let peer = move |listener: TcpListener| {
            let first = Peer::accept(&listener, config);
            let _never_answered = first.next().unwrap();
            let second = Peer::accept(&listener, config);
            let request = second.next().unwrap();
            go_on.recv().unwrap();
            second.answer(request);
            second.serve();
        };
        beside(config, peer, |Bench { client, .. }| {
            let end = soon();
            while client.connections() < 2 {
                orphan(&client);
                assert!(Instant::now() < end, "the first connection stays");
            }
            {
                let link = &mut client.lock().link;
                assert!(link.first_reply == FIRST_REPLY && link.first_reply_of_next() == 2 * FIRST_REPLY);
                // However slow this machine is.
                link.first_reply = PATIENCE;
            }
            for _ in 0..5 {
                orphan(&client);
            }
            assert_eq!(client.connections(), 2);
            tell.send(()).unwrap();
            call(&client, soon()).unwrap();
            assert_eq!(client.connections(), 2);
            assert_eq!(client.lock().link.first_reply_of_next(), Duration::ZERO);
        });
    }

    #[test]
    fn a_connection_whose_first_call_is_never_answered_is_replaced_in_the_end() {
        let config = config(2);
        let peer = move |listener: TcpListener| {
            let peer = Peer::accept(&listener, config);
            let _never_answered = peer.next().unwrap();
            Peer::accept(&listener, config).serve();
        };
        beside(config, peer, |Bench { client, .. }| {
            client.lock().link.first_reply = Duration::from_millis(300);
            orphan(&client);
            // It is not the time of the waiting call that ends the wait.
            call(&client, Instant::now() + 10 * PATIENCE).unwrap();
            assert_eq!(client.connections(), 2);
        });
    }

    /// Accepts whoever comes, until `enough` have, and serves each.
    fn serve_all<'a>(
        scope: &'a std::thread::Scope<'a, '_>,
        listener: TcpListener,
        config: &'static Config,
        enough: usize,
    ) {
        scope.spawn(move || {
            for _ in 0..enough {
                let peer = Peer::accept(&listener, config);
                scope.spawn(move || peer.serve());
            }
        });
    }

    #[test]
    fn a_client_is_used_by_its_process_and_by_the_children_that_inherit_it() {
        let (listener, socket, config) = connect(config(32));
        scope(|scope| {
            let _hangup = Hangup(&socket);
            serve_all(scope, listener, config, 4);
            let client = open(&socket, config);
            let three = || (0..3).all(|_| call(&client, soon()).is_ok());
            assert!(three());
            let child = || fork::testing::fork(|| three() && client.connections() == 2);
            assert!(child().succeeded());
            assert!(three());
            // All at the same time, with a call of the parent under way.
            let awaited = begin(&client, reply());
            let children = [child(), child()];
            assert!(three());
            assert!(children.map(fork::testing::Child::succeeded) == [true; 2]);
            assert!(three());
            let mut state = client.lock();
            assert!(state.session.calls.take(awaited).unwrap().is_ok());
            assert_eq!(state.connections, 1);
        });
    }

    #[test]
    fn a_child_whose_parent_has_ended_goes_on_with_its_connection() {
        let (listener, socket, config) = connect(config(32));
        let (mut ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        scope(|scope| {
            let _hangup = Hangup(&socket);
            serve_all(scope, listener, config, 1);
            let parent = fork::testing::fork(|| {
                let client = open(&socket, config);
                call(&client, soon()).unwrap();
                let parent = fork::process_id();
                // A daemon.
                let _daemon = fork::testing::fork(|| {
                    while !fork::process_gone(parent) {
                        std::thread::yield_now();
                    }
                    let done = call(&client, soon()).is_ok() && client.connections() == 1;
                    theirs.write_all(&[u8::from(done)]).unwrap();
                    true
                });
                true
            });
            assert!(parent.succeeded());
            assert!(wait::until(ours.as_raw_fd(), wait::IN, Some(PATIENCE), None).unwrap());
            let mut done = [0];
            ours.read_exact(&mut done).unwrap();
            assert_eq!(done, [1]);
        });
    }
}
