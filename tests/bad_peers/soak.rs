//! Hostile clients of the soak (c-tests/soak.h), which starts this test with `SOAK_PORTS`, the ports of its servers that are
//! never killed, and `SOAK_SEED`. They hold as many conversations as there is time for, until standard input ends. What the
//! server says to them is checked as everywhere here. The soak itself checks that others are served meanwhile, and that
//! nothing is left behind.

use std::cell::Cell;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::peer::*;
use crate::pulls::{Bad, MANNERS};
use rpcrdma::provider::iwarp::mpa::Which;

/// The interval between steps of a client that is slow on purpose.
const BEAT: Duration = Duration::from_millis(20);

/// A server waits twice as long for the first bytes of a connection.
const SLOW: Duration = Duration::from_secs(5);

/// The procedures of the soak's program.
const DO: u32 = 1;
const PROCEDURES: u64 = 8;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// What a thread works with.
struct Part<'a> {
    port: u16,
    random: Random,
    stop: &'a AtomicBool,
}

impl Part<'_> {
    /// A connection in full operation. None: the server has no room for it, which is legitimate for the cramped one; or this
    /// thread was kept from asking for longer than any server waits.
    fn open(&self, crc: bool) -> Option<Peer> {
        let begin = Instant::now();
        let mut peer = Peer::connect(self.port);
        peer.push(&request_with(crc));
        let was_away = begin.elapsed() > SLOW;
        let start = self.or_refused(|| match peer.start_frame(Which::Reply) {
            Err(_) if was_away => None,
            frame => Some(frame.expect("an MPA Reply")),
        });
        start.flatten().map(|_| peer)
    }

    fn or_refused<T>(&self, open: impl FnOnce() -> T) -> Option<T> {
        if QUIET.get() { catch_unwind(AssertUnwindSafe(open)).ok() } else { Some(open()) }
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Relaxed)
    }

    /// Goes on with its clients, beat by beat, for at most `seconds` seconds.
    fn keep(&self, seconds: u64, mut step: impl FnMut()) {
        let begin = Instant::now();
        while self.goes_on() && begin.elapsed() < Duration::from_secs(seconds) {
            step();
            thread::park_timeout(BEAT);
        }
    }
}

/// A call that the soak's server takes for one of client 99, whose results nobody checks. It has no contents, and so is
/// valid, and asks for `want` bytes.
fn call(xid: u32, procedure: u32, want: u32) -> Vec<u8> {
    let tag = 99u64 << 40 | u64::from(xid);
    let step =
        |sum: u64, value: u32| (sum ^ sum >> 32 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // SOAK_CHECK; the first step uses the tag as it is.
    let first = (tag ^ 0x736f_616b ^ u64::from(want)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let check = (step(step(first, 0), 0) >> 32) as u32;
    let head = words(&[xid, 0, 2, 0x2000_4c44, 1, procedure, 0, 0, 0, 0]);
    let ask = words(&[(tag >> 32) as u32, tag as u32, want, check, 0, 0]);
    [head, ask].concat()
}

/// A frame of a good client.
fn frame(random: &mut Random, msn: u32) -> Vec<u8> {
    let procedure = random.below(PROCEDURES) as u32;
    let want = 1 << random.below(21);
    let lists = |reply: u32| rpcrdma::wire::lists::Lists {
        reply: (reply > 0).then(|| [segment(7, reply, 0)].into()),
        ..Default::default()
    };
    let msg = rpcrdma::wire::header::Proc::Msg;
    match random.below(6) {
        0 => send(msn, &message(msn, 32, msg, &lists(0), &call(msn, DO, want.min(1024)))),
        1 => send(msn, &message(msn, 32, msg, &lists(2 << 20), &call(msn, DO, want))),
        2 => send(msn, &message(msn, 32, msg, &lists(0), &call(msn, procedure, 16))),
        3 => send(msn, &long_call(msn, &[segment(9, want, 0)])),
        4 => write(7, 0, &vec![3; want.min(4096) as usize]),
        _ => read_response(9, 0, &vec![5; want.min(30_000) as usize], true),
    }
}

fn damage(random: &mut Random, frame: &mut Vec<u8>) {
    for _ in 0..=random.below(3) {
        let at = random.below(frame.len() as u64) as usize;
        match random.below(8) {
            0 => frame.truncate(at.max(1)),
            1 => frame.insert(at, random.below(256) as u8),
            2 => frame[at] = 0xff,
            // Mainly the headers.
            3..=5 => {
                let near = at % frame.len().min(100);
                frame[near] ^= 1 << random.below(8);
            }
            _ => frame[at] ^= random.below(256) as u8,
        }
    }
    if random.below(2) == 0 {
        seal(frame);
    }
}

/// Live streams that are damaged, from the first byte on or later.
fn fuzz(part: &mut Part) {
    let random = &mut part.random;
    if random.below(8) == 0 {
        let mut start = request();
        damage(random, &mut start);
        let mut peer = Peer::connect(part.port);
        peer.push(&start);
        peer.push(&send(1, &inline_call(1, NULL, b"")));
        peer.finish();
        peer.swallow();
        return;
    }
    let crc = random.below(2) == 0;
    let Some(mut peer) = part.open(crc) else { return };
    let random = &mut part.random;
    let mut frames = Vec::new();
    for msn in 1..=1 + random.below(30) as u32 {
        let mut bytes = frame(random, msn);
        // Most frames are right, so that there is something to damage.
        if random.below(6) == 0 {
            damage(random, &mut bytes);
        }
        if !peer.push_if_open(&bytes) || peer.available(&mut frames) {
            return;
        }
        for frame in frames.drain(..) {
            let Frame::ReadRequest(request) = frame else { continue };
            let mut bytes = answer(&request, &vec![1; request.size.min(1 << 20) as usize], false);
            if random.below(4) == 0 {
                damage(random, &mut bytes);
            }
            if !peer.push_if_open(&bytes) {
                return;
            }
        }
    }
    match random.below(3) {
        0 => peer.reset(),
        1 => peer.finish(),
        _ => {}
    }
}

/// Uses all credits of some connections, and more, and takes the replies one by one.
fn hoard(part: &mut Part) {
    let mut peers: Vec<Peer> = (0..8).filter_map(|_| part.open(true)).collect();
    let want = part.random.one_of(&[0, 1000, 30_000]);
    for peer in &mut peers {
        let calls = (1..=100).flat_map(|n| {
            send(
                n,
                &message(n, 32, rpcrdma::wire::header::Proc::Msg, &Default::default(), &call(n, DO, want)),
            )
        });
        peer.push_if_open(&calls.collect::<Vec<u8>>());
    }
    let seconds = 1 + part.random.below(15);
    part.keep(seconds, || {
        for peer in &mut peers {
            peer.sip(300);
        }
    });
}

/// Long replies that nobody takes.
fn never_read(part: &mut Part) {
    let mut peers: Vec<Peer> = (0..8).filter_map(|_| part.open(true)).collect();
    let chunk =
        rpcrdma::wire::lists::Lists { reply: Some([segment(1, 2 << 20, 0)].into()), ..Default::default() };
    for peer in &mut peers {
        let one =
            |n| send(n, &message(n, 32, rpcrdma::wire::header::Proc::Msg, &chunk, &call(n, DO, 1 << 20)));
        peer.push_if_open(&(1..=16).flat_map(one).collect::<Vec<u8>>());
    }
    let seconds = 1 + part.random.below(15);
    part.keep(seconds, || {});
}

/// Long calls that are offered but can hardly be read.
fn trickle(part: &mut Part) {
    let length = 1 << (18 + part.random.below(8));
    let manners = [(); 6].map(|()| part.random.one_of(MANNERS));
    let open = |manner| part.or_refused(|| Bad::open_with(part.port, manner, length));
    let mut bad: Vec<Bad> = manners.into_iter().filter_map(open).collect();
    let seconds = 1 + part.random.below(25);
    part.keep(seconds, || bad.iter_mut().for_each(Bad::step));
}

/// Connections that say nothing, or half of the first frame.
fn silent(part: &mut Part) {
    let start = request();
    let mut peers: Vec<Peer> = (0..30).map(|_| Peer::connect(part.port)).collect();
    for peer in &mut peers {
        let length = part.random.below(start.len() as u64) as usize;
        peer.push_if_open(&start[..length]);
    }
    let seconds = 1 + part.random.below(15);
    part.keep(seconds, || {});
}

/// Connections that end in the midst of a frame.
fn resets(part: &mut Part) {
    let Some(mut peer) = part.open(true) else { return };
    for msn in 1..=1 + part.random.below(5) as u32 {
        let bytes = frame(&mut part.random, msn);
        if !peer.push_if_open(&bytes) {
            return;
        }
    }
    let bytes = frame(&mut part.random, 1);
    let half = part.random.below(bytes.len() as u64) as usize;
    peer.push_if_open(&bytes[..half]);
    peer.reset();
}

thread_local! {
    /// Panics of this thread are expected.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

type Conversation = fn(&mut Part);
const KINDS: &[(&str, Conversation)] = &[
    ("fuzz", fuzz),
    ("hoard", hoard),
    ("never read", never_read),
    ("trickle", trickle),
    ("silent", silent),
    ("resets", resets),
];

#[test]
#[ignore = "a part of make soak"]
fn hostile_clients() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set"));
    let ports: Vec<u16> =
        variable("SOAK_PORTS").split(',').map(|port| port.parse().expect("a port")).collect();
    let seed: u64 = variable("SOAK_SEED").parse().expect("a number");
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !QUIET.get() {
            told(panic);
        }
    }));
    let stop = AtomicBool::new(false);
    let failed = AtomicUsize::new(0);
    let ports = &ports;
    thread::scope(|scope| {
        let (stop, failed) = (&stop, &failed);
        let kinds = ports.iter().flat_map(|&port| KINDS.iter().map(move |&kind| (port, kind)));
        let threads: Vec<_> = (1..)
            .zip(kinds)
            .map(|(n, (port, (name, conversation)))| {
                scope.spawn(move || {
                    let random = Random((seed ^ n << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
                    let mut part = Part { port, random, stop };
                    let mut count = 0;
                    QUIET.set(port != ports[0]);
                    while part.goes_on() && failed.load(Relaxed) < 10 {
                        count += 1;
                        let failure = catch_unwind(AssertUnwindSafe(|| conversation(&mut part))).is_err();
                        // The second server has too few descriptors for all: a client that is not answered there has no
                        // cause to complain.
                        if failure && port == ports[0] {
                            eprintln!(
                                "hostile: conversation {count} of {name:?} with seed {seed} has failed"
                            );
                            failed.fetch_add(1, Relaxed);
                        }
                        // Fast conversations leave the honest clients a processor.
                        thread::park_timeout(Duration::from_millis(5));
                    }
                    (name, count)
                })
            })
            .collect();
        // The soak writes nothing, and closes it in the end.
        std::io::stdin().read_to_end(&mut Vec::new()).expect("the standard input");
        stop.store(true, Relaxed);
        for thread in threads {
            thread.thread().unpark();
            let (name, count) = thread.join().expect("its part");
            eprintln!("hostile: {count} {name}");
        }
    });
    assert_eq!(failed.load(Relaxed), 0, "the server has failed hostile clients");
}
