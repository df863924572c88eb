//! Both directions of one connection under load, and cut off: real devices, threads at either end, and a service loop like
//! the program's. What the engine owes its peer, credits above all, is asserted by a [`Fault`] around each device.
#![forbid(unsafe_code)]

#[cfg(feature = "verbs")]
use crate::config::Provider;
use crate::driver::REPLY_HEADER;
#[cfg(feature = "verbs")]
use crate::driver::start::options;
use crate::driver::start::tests::iwarp_options;
#[cfg(feature = "verbs")]
use crate::provider::verbs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::thread::scope;
use std::time::{Duration, Instant};

use super::callback::Serve;
use super::calls::Waiter;
use super::client::{Client, Waiting};
use super::link::Link;
use super::reverse::{Hooks, Reverse};
use super::server::{Next, Server, Shared, locked, next};
use super::service_loop;
use super::session::State;
use super::start::{Room, versions};
use super::{Callee, Caller, Mask, memory};
use crate::config::{Config, Version};
use crate::connection::characteristics::Wish;
use crate::connection::{Expect, Request, Role};
use crate::error::{Error, Kind};
use crate::memory::Sink;
use crate::provider::QueuePair;
use crate::provider::fault::{Control, Fault};
use crate::provider::iwarp::Iwarp;
use crate::socket;
use crate::wait::{self, PollFd, WakeSet};
use crate::wire::Xid;
use crate::wire::characteristics::{Backward, Characteristic};

/// Longer than anything here takes, also where the machine stands still for a minute: a call that hangs fails.
const PATIENCE: Duration = Duration::from_secs(180);

/// A process has one service loop, and so has this one: one test at a time.
static ONE: Mutex<()> = Mutex::new(());

/// The connection that the loop serves, and what wakes the loop beside it.
static LOOP: Mutex<Option<Arc<Ends>>> = Mutex::new(None);

static HOOKS: Hooks = Hooks {
    serve: |_| {
        let ends = LOOP.lock().unwrap().clone();
        serve_once(&ends.expect("the loop runs"));
    },
    wake: || {
        if let Some(ends) = &*LOOP.lock().unwrap() {
            ends.waker.alarm(Some(Duration::ZERO)).unwrap();
        }
    },
    ring: || {
        if let Some(ends) = &*LOOP.lock().unwrap() {
            ends.waker.alarm(Some(Duration::ZERO)).unwrap();
        }
    },
};

struct Ends {
    client: Arc<Client>,
    server: Arc<Shared>,
    reverse: Arc<Reverse>,
    devices: [Control; 2],
    waker: WakeSet,
    stop: AtomicBool,
    /// Callbacks that the client has served.
    served: AtomicU32,
    /// These keep the descriptors open.
    _sockets: Vec<TcpStream>,
}

fn config(change: impl FnOnce(&mut Config)) -> &'static Config {
    let mut config = Config { inline: Some(4096), ..Config::default() };
    change(&mut config);
    Box::leak(Box::new(config))
}

/// Two ends of a connection, established; both directions use the same XIDs.
fn join(
    config: &'static Config,
    fds: [RawFd; 2],
    devices: [Box<dyn QueuePair>; 2],
    sockets: Vec<TcpStream>,
) -> Arc<Ends> {
    let [(active, first), (passive, second)] = devices.map(Fault::new);
    let link = Link::new(Role::Client, config, versions(config), Box::new(active), &memory(config));
    let client = Client::with(fds[0], socket::peer(fds[0]), Room::Same, config, link);
    let mut server = Server::with(fds[1], Box::new(passive), None, config);
    server.receive();
    assert!(server.link().is_some(), "established");
    server.session.calls.next_xid = 1000;
    client.lock().session.calls.next_xid = 1000;
    let server = Arc::new(crate::sync::Mutex::new(server));
    let reverse = Reverse::new(server.clone(), config, &HOOKS).unwrap();
    let ends = Arc::new(Ends {
        client,
        server,
        reverse,
        devices: [first, second],
        waker: WakeSet::new().unwrap(),
        stop: AtomicBool::new(false),
        served: AtomicU32::new(0),
        _sockets: sockets,
    });
    ends.client.start_serving(Arc::new(Answers(Arc::downgrade(&ends))), 1, 1).unwrap();
    *LOOP.lock().unwrap() = Some(ends.clone());
    ends
}

fn over_tcp(config: &'static Config) -> Arc<Ends> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let active = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (passive, _) = listener.accept().unwrap();
    let fds = [active.as_raw_fd(), passive.as_raw_fd()];
    let mut first = Iwarp::initiator(fds[0], iwarp_options(config, fds[0])).unwrap();
    let mut second = Iwarp::responder(fds[1], iwarp_options(config, fds[1])).unwrap();
    while !(second.establish().unwrap() & first.establish().unwrap()) {}
    join(config, fds, [Box::new(first), Box::new(second)], vec![active, passive])
}

/// XID, direction, what the receiver is to do, length of the reply; and a pattern.
fn message(xid: Xid, reply: bool, todo: u32, answer: u32, len: usize) -> Vec<u8> {
    let head = [xid.0, reply.into(), todo, answer].map(u32::to_be_bytes).concat();
    // It repeats itself: without an optimiser most of the time would go into asking for each byte.
    let pattern: Vec<u8> = (16..16 + 256).map(|at: u32| (at * 5).wrapping_add(xid.0 + todo) as u8).collect();
    let mut message = [head, pattern.repeat(len / pattern.len() + 1)].concat();
    message.truncate(len.max(16));
    message
}

fn word(bytes: &[u8], n: usize) -> u32 {
    u32::from_be_bytes(bytes[4 * n..4 * n + 4].try_into().unwrap())
}

/// Makes a call of `len` bytes whose reply has `answer` bytes, and checks the reply. `todo`: how often the two ends call one
/// another in turn before it is answered.
fn call(from: &dyn Caller, todo: u32, len: usize, answer: usize) -> Result<(), Error> {
    call_with_room(from, (todo, len, answer), answer, Instant::now() + PATIENCE)
}

/// The same with room for a longer reply.
fn call_with_room(
    from: &dyn Caller,
    (todo, len, answer): (u32, usize, usize),
    room: usize,
    deadline: Instant,
) -> Result<(), Error> {
    let xid = from.fresh_xid();
    let mut buf = from.message()?;
    buf.extend(&message(xid, false, todo, answer as u32, len))?;
    let reply = from.call(xid, buf.into(), room, Vec::new(), deadline, None)?;
    let reply = reply.iter().map(|part| &part[..]).collect::<Vec<_>>().concat();
    assert!(reply == message(xid, true, todo, answer as u32, answer), "the reply {xid} is another one's");
    Ok(())
}

/// Checks a call, calls back if it asks for it, and answers.
fn answer(to: &dyn Callee, back: &dyn Caller, request: Request) -> Result<(), Error> {
    let Request { id, xid, message: pieces, .. } = request;
    let bytes = pieces.iter().map(|part| &part[..]).collect::<Vec<_>>().concat();
    drop(pieces);
    let (todo, length) = (word(&bytes, 2), word(&bytes, 3));
    assert!(bytes == message(xid, false, todo, length, bytes.len()), "the call {xid} was changed on its way");
    if todo > 0 {
        call(back, todo - 1, 100, 100)?;
    }
    let mut reply = to.message()?;
    reply.extend(&message(xid, true, todo, length, length as usize))?;
    to.reply(id, reply.into())
}

/// The client's program.
struct Answers(std::sync::Weak<Ends>);

impl Serve for Answers {
    fn serve(&self, request: Request, _: Mask<'_>) {
        let Some(ends) = self.0.upgrade() else { return };
        ends.served.fetch_add(1, Relaxed);
        // The connection may be cut: then the caller at the other end knows.
        let _ = answer(&*ends.client, &*ends.client, request);
    }
}

/// Nothing is thrown here.
fn no_owner() -> Weak<dyn service_loop::Owner> {
    struct Nobody;
    impl service_loop::Owner for Nobody {
        fn thrown(&self, _: u64) {}
        fn ended(&self, _: bool) {}
        fn look_again(&self) {}
    }
    Weak::<Nobody>::new()
}

/// One request of the server's program, as libtirpc's loop takes it. False when there is none.
fn serve_once(ends: &Ends) -> bool {
    let Some(request) = locked(&ends.server).receive() else { return false };
    let dispatching = service_loop::PROGRAM.begin(0, no_owner());
    let _ = answer(&*ends.server, &*ends.reverse, request);
    drop(dispatching);
    true
}

/// A thread that panics ends the others, which would wait for it.
struct Alarm<'a>(&'a Ends);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Relaxed);
            let _ = self.0.waker.alarm(Some(Duration::ZERO));
        }
    }
}

/// The service loop: it sleeps until the connection or the waker is readable, and never by a clock.
fn service(ends: &Ends) {
    let _alarm = Alarm(ends);
    while !ends.stop.load(Relaxed) {
        let mut fds = {
            let server = locked(&ends.server);
            [PollFd::new(server.fd(), true, server.wants_write()), PollFd::new(ends.waker.fd(), true, false)]
        };
        wait::poll(&mut fds, Some(PATIENCE), None).unwrap();
        ends.waker.silence();
        while service_loop::PROGRAM.take_left().is_some() {}
        locked(&ends.server).push();
        while serve_once(ends) || matches!(next(&ends.server, || false, None), Next::Request | Next::Later) {}
        if service_loop::PROGRAM.has_left() {
            (HOOKS.wake)();
        }
        if locked(&ends.server).closed().is_some() {
            return;
        }
    }
}

/// Somebody serves callbacks when no thread of the client waits for a reply.
fn callbacks(ends: &Ends) {
    let _alarm = Alarm(ends);
    while !ends.stop.load(Relaxed) {
        let _ = ends.client.poll_callbacks(Instant::now() + Duration::from_millis(10), None);
    }
}

impl Ends {
    fn end(&self) {
        self.stop.store(true, Relaxed);
        self.waker.alarm(Some(Duration::ZERO)).unwrap();
        *LOOP.lock().unwrap() = None;
    }
}

/// `calls` in all, by eight threads at each end. Either the credits of both directions change meanwhile; or the ends call
/// one another in turn, which takes a credit for each turn.
fn load(ends: &Ends, calls: u32, in_turn: bool) {
    const THREADS: u32 = 8;
    ends.devices.iter().for_each(Control::count_only);
    let each = calls / (2 * THREADS);
    let running = AtomicU32::new(2 * THREADS);
    let worker = |from: &dyn Caller, seed: u32| {
        let alarm = Alarm(ends);
        let mut random = seed.wrapping_mul(0x9e37_79b9) | 1;
        for n in 0..each {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let pick = |bits: u32, most: u32| (random >> bits) % most;
            // Most fit inline; some need chunks, either way; some make the ends call one another.
            let len = if pick(8, 16) == 0 { 20_000 } else { 40 + pick(4, 3000) as usize };
            let reply = if pick(12, 16) == 0 { 20_000 } else { 16 + pick(6, 3000) as usize };
            let todo = if in_turn && n % 4 == 0 { pick(16, 4) } else { 0 };
            call(from, todo, len, reply).unwrap_or_else(|error| panic!("call {n} of {seed}: {error}"));
        }
        if running.fetch_sub(1, Relaxed) == 1 {
            ends.end();
        }
        drop(alarm);
    };
    scope(|scope| {
        scope.spawn(|| service(ends));
        scope.spawn(|| callbacks(ends));
        // There is one credit before the first reply, and with one nobody can call in turn.
        introduce(ends);
        call(&*ends.reverse, 0, 40, 40).unwrap();
        for thread in 0..THREADS {
            let worker = &worker;
            scope.spawn(move || worker(&*ends.client, thread + 1));
            scope.spawn(move || worker(&*ends.reverse, thread + 101));
        }
        scope.spawn(|| {
            let mut random = 7u32;
            while !in_turn && !ends.stop.load(Relaxed) {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let credits = Some(1 + (random >> 8) % 128);
                match random >> 30 {
                    0 => ends.client.credits(credits),
                    1 => Callee::grants(&*ends.client, credits),
                    2 => ends.server.grants(credits),
                    _ => ends.reverse.credits(credits),
                };
                std::thread::yield_now();
            }
        });
    });
    assert!(ends.served.load(Relaxed) >= calls / 2, "every call back was served by the client");
    for control in &ends.devices {
        assert_eq!((control.reads(), control.exposed()), (0, 0), "nothing is left");
    }
}

/// Calls until the server knows that the client takes calls back: in Version Two it is told when the client knows that the
/// server understands.
fn introduce(ends: &Ends) {
    loop {
        call(&*ends.client, 0, 40, 40).unwrap();
        let peer = ends.reverse.peer(false).unwrap();
        if peer.version == Some(1) || peer.endpoint.backward == Backward::General {
            return;
        }
    }
}

/// rule 125, rule 127, rule 130, rule 131, rule 132: twenty thousand calls; a million with `--ignored`.
#[test]
fn both_directions_under_load_lose_nothing_and_exceed_no_credit() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    load(&over_tcp(config(|_| {})), 20_000, false);
}

#[test]
fn both_directions_under_load_lose_nothing_in_version_two() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    load(&over_tcp(config(|config| config.version = Version::Auto)), 10_000, false);
}

/// A callback that calls forward before it answers, and one made in the midst of another.
#[test]
fn ends_that_call_one_another_in_turn_do_not_wait_for_ever() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let many = config(|config| (config.credits, config.reverse_credits) = (64, 64));
    load(&over_tcp(many), 4000, true);
}

#[test]
#[ignore = "long: make check-long"]
fn both_directions_under_a_million_calls_lose_nothing_and_exceed_no_credit() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    load(&over_tcp(config(|_| {})), 1_000_000, false);
}

#[cfg(feature = "verbs")]
#[test]
#[ignore = "needs an RDMA device: VERBS_ADDRESS"]
fn both_directions_under_load_on_a_device() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    // iWARP devices too.
    let config = config(|config| config.provider = Provider::Only("verbs"));
    let devices = verbs::tests::connected(&options(config, &verbs::TRAITS));
    let fds = [devices[1].fd(), devices[0].fd()];
    let [passive, active] = devices;
    load(&join(config, fds, [active, passive], Vec::new()), 3200, false);
}

/// An adapter does not give Receives back: the calls consume the short ones.
#[cfg(feature = "verbs")]
#[test]
#[ignore = "needs an RDMA device: VERBS_ADDRESS"]
fn receives_grow_under_load_on_a_device() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let config = config(|config| {
        (config.provider, config.version) = (Provider::Only("verbs"), Version::Auto);
        config.max_inline = Some(64 << 10);
    });
    let devices = verbs::tests::connected(&options(config, &verbs::TRAITS));
    let fds = [devices[1].fd(), devices[0].fd()];
    let [passive, active] = devices;
    longer_receives(&join(config, fds, [active, passive], Vec::new()));
}

/// At the default settings these calls expose much more than the memory for replies may be in a process.
#[test]
fn a_full_connection_of_calls_with_the_longest_room_gets_every_reply() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let ends = &*over_tcp(config(|_| {}));
    ends.devices.iter().for_each(Control::count_only);
    let left = &AtomicU32::new(24);
    scope(|scope| {
        scope.spawn(|| service(ends));
        call(&*ends.client, 0, 40, 40).unwrap();
        for _ in 0..24 {
            scope.spawn(|| {
                let _alarm = Alarm(ends);
                let deadline = Instant::now() + PATIENCE;
                call_with_room(&*ends.client, (0, 100, 2 << 20), (16 << 20) + REPLY_HEADER, deadline)
                    .unwrap();
                if left.fetch_sub(1, Relaxed) == 1 {
                    ends.end();
                }
            });
        }
    });
}

/// Whoever lets go of the memory is not on this connection, and wakes nobody.
#[test]
fn calls_wait_for_room_for_their_replies_within_their_time() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let ends = &*over_tcp(config(|_| {}));
    scope(|scope| {
        let _alarm = Alarm(ends);
        scope.spawn(|| service(ends));
        call(&*ends.client, 0, 40, 40).unwrap();
        let full = crate::memory::AREAS_MAX;
        let area = ends.client.lock().link.memory.reply_area(full).unwrap();
        assert!(area.place(full - 1, b"x"));
        let soon = Instant::now() + Duration::from_millis(50);
        let error = call_with_room(&*ends.client, (0, 40, 40), 100_000, soon).unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout);
        for word in ["no room for a reply of 100000 bytes", "268435456", "RPCRDMA_MAX_REPLY"] {
            assert!(error.text().contains(word), "{error}");
        }
        // Several wait, one of them in poll(2); what needs no room is not held up.
        let waiting: Vec<_> =
            (0..3).map(|_| scope.spawn(|| call(&*ends.client, 0, 40, 100_000).unwrap())).collect();
        while ends.client.lock().session.sleeping() < 2 {
            std::thread::yield_now();
        }
        call(&*ends.client, 0, 40, 40).unwrap();
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
        drop(area);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        ends.end();
    });
}

/// Answers callbacks, and counts the threads that sleep beside it.
struct Counts {
    ends: std::sync::Weak<Ends>,
    asleep: Mutex<Vec<usize>>,
}

impl Serve for Counts {
    fn serve(&self, request: Request, _: Mask<'_>) {
        let Some(ends) = self.ends.upgrade() else { return };
        self.asleep.lock().unwrap().push(ends.client.lock().session.sleeping());
        answer(&*ends.client, &*ends.client, request).unwrap();
    }
}

/// A thread that has slept and is awake would be woken to drive, and all others would sleep on.
#[test]
fn whoever_serves_a_callback_is_not_taken_for_one_who_sleeps() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let ends = &over_tcp(config(|config| config.poll = Duration::ZERO));
    let counts = Arc::new(Counts { ends: Arc::downgrade(ends), asleep: Mutex::default() });
    ends.client.start_serving(counts.clone(), 1, 1).unwrap();
    let until = |so: &dyn Fn(&Waiting) -> bool| {
        while !so(&ends.client.lock()) {
            std::thread::yield_now();
        }
    };
    let next = || loop {
        if let Some(request) = locked(&ends.server).receive() {
            return request;
        }
        std::thread::yield_now();
    };
    scope(|scope| {
        let _alarm = Alarm(ends);
        let make = || scope.spawn(|| call(&*ends.client, 0, 40, 40).unwrap());
        // The first reply tells how many credits there are.
        let first = make();
        answer(&*ends.server, &*ends.reverse, next()).unwrap();
        first.join().unwrap();
        let driver = make();
        until(&|state| state.session.is_driven());
        let sleeper = make();
        until(&|state| state.session.sleeping() == 1);
        let (first, second) = (next(), next());
        answer(&*ends.server, &*ends.reverse, first).unwrap();
        driver.join().unwrap();
        until(&|state| state.session.is_driven());
        let dispatching = service_loop::PROGRAM.begin(0, no_owner());
        call(&*ends.reverse, 0, 40, 40).unwrap();
        drop(dispatching);
        assert_eq!(*counts.asleep.lock().unwrap(), [0]);
        answer(&*ends.server, &*ends.reverse, second).unwrap();
        sleeper.join().unwrap();
        ends.end();
    });
}

/// Neither the server's silence nor its speed is limited, but what it makes us hold.
#[test]
fn a_server_that_fills_much_more_than_its_calls_have_taken_is_cut_off() {
    const AREA: usize = 64 << 20;
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let ends = &*over_tcp(config(|_| {}));
    scope(|scope| {
        let _alarm = Alarm(ends);
        scope.spawn(|| service(ends));
        call(&*ends.client, 0, 40, 40).unwrap();
        let memory = ends.client.lock().link.memory.clone();
        let filled = || {
            let area = memory.reply_area(AREA).unwrap();
            assert!(area.place(AREA - 1, b"x"));
            area
        };
        let areas: Vec<Sink> = (0..16).map(|_| filled()).collect();
        call(&*ends.client, 0, 40, 40).unwrap();
        let last = filled();
        let error = call(&*ends.client, 0, 40, 40).unwrap_err();
        assert!(error.text().contains("faster than they are taken: it has filled 114085"), "{error}");
        drop((areas, last));
        ends.end();
    });
}

/// rule 141: a sample with real sockets; the pure engine is cut at every step.
#[test]
fn a_connection_cut_during_a_call_back_ends_it_once_with_the_right_status() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let mut kinds = Vec::new();
    for (end, at) in (0..2).flat_map(|end| (1..16).map(move |at| (end, at))) {
        let ends = &*over_tcp(config(|_| {}));
        scope(|scope| {
            scope.spawn(|| service(ends));
            scope.spawn(|| callbacks(ends));
            call(&*ends.client, 0, 40, 40).unwrap();
            call(&*ends.reverse, 0, 40, 40).unwrap();
            let served = ends.served.load(Relaxed);
            let (wait, now) = (ends.client.lock(), locked(&ends.server));
            let control = &ends.devices[end];
            control.fail_at(control.trace().len() + at, Error::new(Kind::Os(libc::EIO), "cut"));
            drop((wait, now));
            let outcome = call(&*ends.reverse, 0, 6000, 6000);
            let kind = outcome.as_ref().err().map(Error::kind);
            match kind {
                // Whether it was served is not known, and never will be.
                None | Some(Kind::ConnectionLost) => {}
                // An exposure that failed ends its call alone.
                Some(Kind::NotSent | Kind::Os(libc::EIO)) => assert_eq!(ends.served.load(Relaxed), served),
                // The client could not answer, and said so; or the memory of the reply could not be taken back.
                Some(Kind::Peer) => {}
                Some(_) => panic!("end {end}, operation {at}: {outcome:?}"),
            }
            kinds.push(kind);
            assert!(
                locked(&ends.server).session.calls.outcomes.is_empty()
                    && locked(&ends.server).session.sleeping() == 0
            );
            ends.end();
        });
    }
    for wanted in [None, Some(Kind::ConnectionLost)] {
        assert!(kinds.contains(&wanted), "{kinds:?}");
    }
}

#[test]
fn both_ends_ask_one_another_for_longer_receives_under_load() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    longer_receives(&over_tcp(config(|config| config.version = Version::Auto)));
}

/// Each end makes its Receives longer, and asks the other for the same, while calls go both ways.
fn longer_receives(ends: &Ends) {
    let size = |from: &dyn Caller| from.peer(true).unwrap().endpoint.receive_size;
    let asking = AtomicBool::new(true);
    scope(|scope| {
        let _alarm = Alarm(ends);
        scope.spawn(|| service(ends));
        scope.spawn(|| callbacks(ends));
        introduce(ends);
        let ask = |from: &dyn Caller, bytes| {
            let what = Characteristic::ReceiveSize(bytes);
            assert_eq!(from.request(what, Instant::now() + PATIENCE, None).unwrap(), Wish::Done);
        };
        let calls: Vec<_> = [&*ends.client as &dyn Caller, &*ends.reverse]
            .into_iter()
            .map(|from| {
                let asking = &asking;
                scope.spawn(move || {
                    while asking.load(Relaxed) {
                        call(from, 0, 3000, 3000).unwrap();
                    }
                })
            })
            .collect();
        for bytes in [16384, 8192, 32768] {
            ask(&*ends.client, bytes);
            ask(&*ends.reverse, bytes);
            assert_eq!((size(&*ends.client), size(&*ends.reverse)), (bytes as usize, bytes as usize));
        }
        ends.client.raise_receives(65536).unwrap();
        ends.reverse.raise_receives(65536).unwrap();
        asking.store(false, Relaxed);
        calls.into_iter().for_each(|thread| thread.join().unwrap());
        while (size(&*ends.client), size(&*ends.reverse)) != (65536, 65536) {
            call(&*ends.client, 0, 40, 40).unwrap();
        }
        ends.end();
    });
    locked(&ends.server).shut();
    let error =
        ends.reverse.request(Characteristic::ReceiveSize(4096), Instant::now() + PATIENCE, None).unwrap_err();
    assert!(error.text().contains("rpcrdma_clnt_rebind"), "{error}");
}

/// RFC 8167 §5.4: a call back waits for its client, up to its time; the loop's own thread, which alone could bring the
/// client back, does not.
#[test]
fn a_call_back_waits_for_its_client_to_come_back_on_another_connection() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let first = over_tcp(config(|_| {}));
    let second = over_tcp(config(|_| {}));
    locked(&first.server).shut();
    let error = call(&*first.reverse, 0, 40, 40).unwrap_err();
    assert_eq!(error.kind(), Kind::NotSent);
    assert!(error.text().contains("rpcrdma_clnt_rebind"), "{error}");
    scope(|scope| {
        // The loop is another thread's from here on.
        let before = service_loop::PROGRAM.looks();
        scope.spawn(|| service(&second));
        call(&*second.client, 0, 40, 40).unwrap();
        while service_loop::PROGRAM.looks() == before {
            call(&*second.client, 0, 40, 40).unwrap();
        }
        let soon = Instant::now() + Duration::from_millis(30);
        assert_eq!(first.reverse.await_reconnect(soon, None).unwrap_err().kind(), Kind::Timeout);
        let waits = scope.spawn(|| first.reverse.await_reconnect(Instant::now() + PATIENCE, None));
        first.reverse.rebind(second.server.clone()).unwrap();
        assert!(waits.join().unwrap().unwrap());
        scope.spawn(|| callbacks(&second));
        call(&*first.reverse, 0, 40, 40).unwrap();
        second.end();
    });
}

/// Defers its replies.
struct Defers(std::sync::Weak<Ends>, Mutex<Vec<Request>>);

impl Serve for Defers {
    fn serve(&self, request: Request, _: Mask<'_>) {
        self.0.upgrade().unwrap().client.defer(request.id, false);
        self.1.lock().unwrap().push(request);
    }
}

/// No routine runs that would look for more when it is done.
#[test]
fn a_call_back_that_comes_in_while_a_reply_waits_for_its_peer_is_served_though_no_routine_runs() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let ends = &over_tcp(config(|config| config.poll = Duration::ZERO));
    for socket in &ends._sockets {
        socket::testing::set_buffers(socket.as_raw_fd(), 64 << 10);
    }
    let defers = Arc::new(Defers(Arc::downgrade(ends), Mutex::default()));
    let set = ends.client.start_serving(defers.clone(), 1, 1).unwrap();
    const LONG: usize = 1 << 20;
    let call_back = |xid| {
        let mut server = locked(&ends.server);
        let link = server.link().unwrap();
        let mut call = link.memory.message().unwrap();
        call.extend(&message(xid, false, 0, LONG as u32, 40)).unwrap();
        link.begin(xid, call.into(), Expect::Reply { max: LONG, places: Vec::new() }).unwrap();
    };
    let came = |fd| wait::until(fd, wait::IN, Some(PATIENCE), None).unwrap();
    let client = ends._sockets[0].as_raw_fd();
    // The end that has accepted a connection sends nothing before its peer has (RFC 5044).
    ends.client.learn_credits();
    while locked(&ends.server).receive().is_none() {
        assert!(came(ends._sockets[1].as_raw_fd()));
    }
    // The first reply tells how many credits there are.
    for n in 0..2 {
        call_back(Xid(n));
        assert!(came(client), "{n}");
        assert_eq!(ends.client.serve_now(None), 1);
        if n == 0 {
            let Request { id, xid, .. } = defers.1.lock().unwrap().pop().unwrap();
            let mut reply = Callee::message(&*ends.client).unwrap();
            reply.extend(&message(xid, true, 0, 0, 40)).unwrap();
            ends.client.reply(id, reply.into()).unwrap();
            while !locked(&ends.server).session.calls.is_over(Waiter::Call(xid)) {
                assert!(came(ends._sockets[1].as_raw_fd()), "{xid}");
                locked(&ends.server).pump();
            }
        }
    }
    call_back(Xid(2));
    assert!(came(client));
    let Request { id, xid, .. } = defers.1.lock().unwrap().pop().unwrap();
    let mut reply = Callee::message(&*ends.client).unwrap();
    reply.extend(&message(xid, true, 0, 0, LONG)).unwrap();
    scope(|scope| {
        let _alarm = Alarm(ends);
        scope.spawn(|| {
            while !ends.client.lock().link.request_ready() && !ends.stop.load(Relaxed) {
                std::thread::yield_now();
            }
            while !locked(&ends.server).session.calls.is_over(Waiter::Call(xid)) && !ends.stop.load(Relaxed) {
                locked(&ends.server).pump();
            }
        });
        ends.client.reply(id, reply.into()).unwrap();
        assert!(ends.client.lock().link.request_ready(), "it lies in memory");
        assert!(wait::until(set, wait::IN, Some(Duration::ZERO), None).unwrap(), "and the loop is not told");
        ends.end();
    });
    assert_eq!(ends.client.serve_now(None), 1);
}
