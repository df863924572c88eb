//! Tests that need no device and, for a machine with one, tests that do: those named `on_a_device` are ignored unless asked
//! for, and connect to VERBS_ADDRESS, an address of the device.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rdma_sys::{ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode, rdma_cm_event_type};

use super::listener::Refusals;
use super::locked::*;
use super::queues::WITH_INVALIDATE;
use super::ready::{COPIES_UNTIL, DRAIN, cut};
use smallvec::smallvec;

use super::*;
use crate::memory::{Buf, Program, Regions, areas};
use crate::provider::Listener as _;
use crate::provider::fault::contract;
use crate::provider::{Accepted, Knock, Shortage};
use crate::{process, wait};

fn options() -> Options {
    Options {
        inline: 4096,
        receive: 4096,
        slab: 4096,
        remote_invalidation: true,
        credits: 4,
        margin: 4,
        crc: crate::config::Crc::Auto,
        only: true,
        spins: false,
    }
}

fn address() -> SocketAddr {
    let address = std::env::var("VERBS_ADDRESS").expect("VERBS_ADDRESS names an address of an RDMA device");
    let port = 21_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    (address + ":0").parse::<SocketAddr>().map(|at| SocketAddr::new(at.ip(), port)).expect("an address")
}

fn listener(at: SocketAddr) -> Listener {
    Listener::new(Places { addresses: vec![at], interface: None }, true).expect("a listener")
}

/// A connected pair on the device of VERBS_ADDRESS: the passive end first.
pub(crate) fn connected(options: &Options) -> [Box<dyn QueuePair>; 2] {
    let to = address();
    pair(&mut listener(to), to, [options, options])
}

/// A connected pair, each end on the device: the active one first.
fn pair(listener: &mut Listener, to: SocketAddr, options: [&Options; 2]) -> [Box<dyn QueuePair>; 2] {
    let way = Way::Address(to);
    let mut active = Adapters.connect(way, options[0], None).expect("a device leads there");
    let mut passive = None;
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let open = active.establish().expect("the startup goes on");
        if passive.is_none() {
            passive = match listener.accept(options[1], true, &mut |_, _| false).expect("the listener lives")
            {
                Knock::Accepted(accepted) => Some(accepted),
                Knock::Nobody | Knock::Refused => None,
            };
        }
        let there = passive.as_mut().is_some_and(|accepted| accepted.device.establish().expect("accepted"));
        if let Some(Accepted { device, .. }) = passive.take_if(|_| open && there) {
            return [active, device];
        }
        assert!(Instant::now() < deadline, "no connection");
        std::thread::yield_now();
    }
}

/// LOCKED belongs to the process: tests that make connections without a device come one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// A connection of the mock device, the only one that this process has.
fn mocked(options: Options) -> (MutexGuard<'static, ()>, Verbs) {
    let alone = alone();
    COPIES_UNTIL.store(0, Relaxed);
    mock::install();
    (alone, established(options))
}

fn established(options: Options) -> Verbs {
    let mut verbs = Verbs::request("10.1.2.3:7".parse().unwrap(), options, None).expect("an identifier");
    assert!(verbs.establish().expect("the startup goes on"));
    verbs
}

#[test]
fn a_connection_that_has_failed_gives_back_its_share_of_the_locked_memory_at_once() {
    let (_alone, mut verbs) = mocked(options());
    assert_ne!(LOCKED.load(Relaxed), 0);
    mock::complete(ibv_wc_status::IBV_WC_RETRY_EXC_ERR, ibv_wc_opcode::IBV_WC_SEND, 0);
    assert_eq!(verbs.poll().unwrap_err().kind(), Kind::ConnectionLost);
    for kind in ["qp", "cq", "mr", "pd"] {
        assert_eq!(mock::there(kind), 0, "{kind}");
    }
    assert_eq!(LOCKED.load(Relaxed), 0, "the next connection needs it");
    drop(verbs);
    assert_eq!(LOCKED.load(Relaxed), 0);
}

#[test]
fn who_sleeps_on_a_connection_wakes_when_this_side_ends_it() {
    let (_alone, mut verbs) = mocked(options());
    let woken = |verbs: &Verbs| wait::until(verbs.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    assert!(!woken(&verbs));
    verbs.close();
    assert!(woken(&verbs));
    // However late somebody goes to sleep.
    assert!(verbs.poll().is_err() && woken(&verbs));
}

#[test]
fn who_looks_without_a_pause_leaves_events_alone_and_the_descriptor_tells_of_what_comes_after_that() {
    let (_alone, mut verbs) = mocked(options());
    let woken = |verbs: &Verbs| wait::until(verbs.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    let mut numbers = 0..;
    let mut comes = || {
        let (success, receive) = (ibv_wc_status::IBV_WC_SUCCESS, ibv_wc_opcode::IBV_WC_RECV);
        mock::completion(success, receive, numbers.next().unwrap(), 28, 0, 0);
    };
    let post = |verbs: &mut Verbs| {
        let slab = verbs.slabs().and_then(|slabs| slabs.take()).expect("a slab");
        verbs.post_recv(slab.into_sink(4096));
    };
    let finds = |verbs: &mut Verbs| {
        let found = matches!(verbs.poll(), Ok(Some(Completion::Received { len: 28, .. })));
        post(verbs);
        found
    };
    (0..4).for_each(|_| post(&mut verbs));
    assert!(verbs.poll().unwrap().is_none() && verbs.rest() && !woken(&verbs));
    assert!(verbs.spin());
    comes();
    mock::announce();
    assert!(finds(&mut verbs) && verbs.poll().unwrap().is_none());
    assert!(woken(&verbs), "the event is nobody's business");
    assert!(verbs.rest() && !woken(&verbs), "what was found is not told of again");
    comes();
    mock::announce();
    assert!(woken(&verbs) && finds(&mut verbs) && verbs.poll().unwrap().is_none() && !woken(&verbs));
    // What has come between the last look and the request for an event makes no event.
    assert!(verbs.spin());
    comes();
    mock::announce();
    assert!(finds(&mut verbs));
    comes();
    assert!(!verbs.rest() && !verbs.rest(), "until it is taken");
    assert!(finds(&mut verbs) && verbs.poll().unwrap().is_none() && verbs.rest());
    // The event of what a spin has found may come late.
    assert!(verbs.spin());
    comes();
    assert!(finds(&mut verbs) && verbs.rest() && !woken(&verbs));
    mock::announce();
    comes();
    assert!(woken(&verbs) && finds(&mut verbs) && verbs.poll().unwrap().is_none() && !woken(&verbs));
    // Where nobody waits, no event is asked for; one that is already there is taken when somebody does wait.
    let event = || mock::makes_event().then(mock::announce).is_some();
    assert!(verbs.spin());
    comes();
    assert!(event() && finds(&mut verbs) && verbs.leave());
    for _ in 0..3 {
        assert!(verbs.spin());
        comes();
        assert!(!event() && finds(&mut verbs) && verbs.poll().unwrap().is_none() && verbs.leave());
    }
    assert!(woken(&verbs) && verbs.rest() && !woken(&verbs));
    // What comes meanwhile is there when somebody looks, or wants to wait.
    comes();
    assert!(event() && verbs.spin() && finds(&mut verbs) && verbs.leave());
    comes();
    assert!(!event() && finds(&mut verbs) && verbs.poll().unwrap().is_none() && !woken(&verbs));
    comes();
    assert!(event() && verbs.spin() && finds(&mut verbs) && verbs.leave());
    comes();
    assert!(
        !event() && !verbs.rest() && finds(&mut verbs) && verbs.poll().unwrap().is_none() && verbs.rest()
    );
    // A spin that finds nothing, and one that finds the end.
    assert!(verbs.spin() && verbs.poll().unwrap().is_none() && verbs.rest() && !woken(&verbs));
    assert!(verbs.spin());
    mock::complete(ibv_wc_status::IBV_WC_RETRY_EXC_ERR, ibv_wc_opcode::IBV_WC_SEND, 0);
    assert!(verbs.poll().is_err() && !verbs.spin() && verbs.rest());
}

#[test]
fn what_waits_for_room_goes_on_with_a_completion_before_an_event_is_asked_for_or_just_then() {
    for (late, spins) in [(false, false), (true, false), (false, true)] {
        let (_alone, mut verbs) = mocked(options());
        assert!(verbs.poll().unwrap().is_none());
        mock::with(|device| device.completes = false);
        let send = |verbs: &mut Verbs| {
            let gather = smallvec![Region::copy_from(b"a call").unwrap()];
            verbs.post(WorkRequest::Send { gather, invalidate: None });
            verbs.flush().expect("posted")
        };
        while send(&mut verbs) {}
        let posted = || mock::with(|device| device.posted.len());
        let before = posted();
        mock::with(|device| device.completes = true);
        let (number, _) = mock::with(|device| *device.posted.last().expect("a request"));
        mock::complete(ibv_wc_status::IBV_WC_SUCCESS, ibv_wc_opcode::IBV_WC_SEND, number);
        if late {
            mock::with(|device| device.late = std::mem::take(&mut device.completions));
        }
        mock::announce();
        assert_eq!(spins && verbs.spin(), spins);
        assert!(verbs.poll().unwrap().is_none() && (!spins || verbs.rest()));
        assert!(posted() > before && verbs.flush().unwrap(), "nothing else tells that there is room");
    }
}

/// A device that behaves as it should: one event for each time that one was asked for, which may come late.
struct Honest {
    verbs: Verbs,
    /// How many Receives have completed, and how many of those were reported.
    received: u64,
    told: u64,
    /// An event has still to come.
    event: bool,
}

impl Honest {
    fn post(&mut self) {
        if let Some(slab) = self.verbs.slabs().and_then(|slabs| slabs.take()) {
            self.verbs.post_recv(slab.into_sink(4096));
        }
    }

    /// Whether there was something.
    fn poll(&mut self) -> bool {
        let found = self.verbs.poll().expect("it works").is_some();
        if found {
            self.told += 1;
            self.post();
        }
        found
    }

    fn receives(&mut self) {
        let told = mock::with(|device| device.completions.iter().filter(|wc| wc.opcode == RECEIVED).count());
        if mock::with(|device| device.receives.len()) > told + 1 {
            mock::completion(ibv_wc_status::IBV_WC_SUCCESS, RECEIVED, self.received, 28, 0, 0);
            self.received += 1;
            self.event |= mock::makes_event();
        }
    }

    fn sends(&mut self, count: usize) {
        for _ in 0..count {
            let gather = smallvec![Region::copy_from(b"a call").unwrap()];
            self.verbs.post(WorkRequest::Send { gather, invalidate: None });
        }
        self.verbs.flush().expect("it works");
    }

    fn writes(&mut self, count: usize) {
        let long = Region::copy_from(&[7; 100_000]).unwrap();
        for _ in 0..count {
            let to = Segment { handle: Handle(9), length: long.len() as u32, offset: 0 };
            self.verbs.post(WorkRequest::Write { gather: smallvec![long.clone()], to });
        }
        self.verbs.flush().expect("it works");
    }

    /// Completes the first signalled Send under way, or all of them.
    fn sent(&mut self, all: bool) {
        let number = mock::with(|device| {
            let of_sends = device.completions.iter().filter(|wc| wc.opcode != RECEIVED);
            let next = of_sends.map(|wc| wc.wr_id + 1).max().unwrap_or(0);
            let mut left =
                device.queue.iter().filter(|it| it.signalled && it.number >= next).map(|it| it.number);
            if all { left.next_back() } else { left.next() }
        });
        if let Some(number) = number {
            mock::complete(ibv_wc_status::IBV_WC_SUCCESS, ibv_wc_opcode::IBV_WC_SEND, number);
            self.event |= mock::makes_event();
        }
    }

    /// What nobody would ever be told of, if somebody waited for the descriptor now.
    fn hides(&self) -> Option<&'static str> {
        let woken = wait::until(self.verbs.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
        if woken || self.event {
            return None;
        }
        let (lies, under_way) =
            mock::with(|device| (!device.completions.is_empty(), device.queue.iter().any(|it| it.signalled)));
        let hidden = [
            (lies, "a completion"),
            (self.told < self.received, "a message"),
            (self.verbs.unsent() > 0 && !under_way, "room for what waits"),
            (!mock::with(|device| device.armed), "what comes next"),
        ];
        hidden.into_iter().find_map(|(is_hidden, what)| is_hidden.then_some(what))
    }
}

const RECEIVED: ibv_wc_opcode::Type = ibv_wc_opcode::IBV_WC_RECV;

#[test]
fn whatever_the_order_the_descriptor_tells_of_all_that_is_left_to_do() {
    let mut random = 88_172_645_463_325_252u64;
    for _ in 0..150 {
        let (_alone, verbs) = mocked(options());
        mock::with(|device| (device.completes, device.depth) = (false, 1 << 20));
        let mut device = Honest { verbs, received: 0, told: 0, event: false };
        (0..6).for_each(|_| device.post());
        assert!(!device.poll());
        let (mut steps, mut spins, mut waits) = (Vec::new(), false, false);
        for _ in 0..60 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let rare = random & 0x10000 != 0;
            let step = random % 12;
            steps.push(step);
            // Somebody waits for the descriptor from when he may until something wakes him; others send meanwhile.
            match step {
                0 => {
                    spins = device.verbs.spin();
                    waits = false;
                }
                1 | 2 => {
                    let mut found = device.poll();
                    while rare && found {
                        found = device.poll();
                    }
                    waits = !found && !spins;
                }
                3 | 4 => {
                    spins = false;
                    waits = device.verbs.rest();
                }
                5 => device.receives(),
                6 => {
                    if std::mem::take(&mut device.event) {
                        mock::announce();
                    }
                }
                7 => device.sends(if rare { 300 } else { 1 }),
                8 => device.writes(if rare { 40 } else { 1 }),
                9 => {
                    (spins, waits) = (false, false);
                    device.verbs.leave();
                }
                10 => drop(device.verbs.flush().expect("it works")),
                _ => device.sent(rare),
            }
            if waits {
                assert_eq!(device.hides(), None, "after {steps:?}");
            }
        }
        // Otherwise its end would wait for what is under way.
        mock::with(|device| device.broken = true);
    }
}

#[test]
fn the_end_is_told_when_nothing_else_has_come() {
    let (_alone, mut verbs) = mocked(options());
    assert!(verbs.poll().unwrap().is_none());
    mock::happens(rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED, 0);
    assert_eq!(verbs.poll().err().map(|error| error.kind()), Some(Kind::ConnectionLost));
    // The event of a reply that a spin has found is still there before it.
    let mut verbs = established(options());
    assert!(verbs.poll().unwrap().is_none() && verbs.spin());
    mock::completion(ibv_wc_status::IBV_WC_SUCCESS, RECEIVED, 0, 28, 0, 0);
    mock::announce();
    assert!(verbs.poll().unwrap().is_some() && verbs.poll().unwrap().is_none() && verbs.leave());
    mock::happens(rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED, 0);
    assert!(verbs.poll().is_err());
    // No descriptor tells of what fails on the way.
    let mut verbs = established(options());
    assert!(verbs.poll().unwrap().is_none() && verbs.rest());
    // The last one is not in memory that the device knows; those before it count as posted.
    (0..=4).for_each(|_| verbs.post_recv(Buf::with_capacity(100).unwrap().into_sink(100)));
    assert!(!verbs.rest() && verbs.poll().is_err() && verbs.rest());
}

/// By RFC 8166 §4.5.4 memory is taken back before it is used again.
#[test]
fn memory_that_the_device_does_not_take_back_is_kept_and_the_connection_ends() {
    for function in ["ibv_dereg_mr", "ibv_dealloc_mw"] {
        let (_alone, mut verbs) = mocked(options());
        let mut program = Program::new(&[0; 8192]);
        let exposed = verbs.expose_sink(program.sink()).expect("exposed");
        verbs.flush().expect("bound");
        // A key that cannot be invalidated in time goes with its window.
        mock::with(|device| device.completes = false);
        mock::with(|device| device.fails.insert(function));
        let error = verbs.invalidate(exposed.handle).expect_err(function);
        assert!(error.text().contains("take back"), "{error}");
        assert!(!program.is_back(), "the peer may still write there: {function}");
        assert!(verbs.poll().is_err(), "{function}");
        assert_eq!(mock::there("qp"), 0, "{function}: the connection has ended");
        let kept = if function == "ibv_dereg_mr" { "mr" } else { "mw" };
        assert_ne!(mock::there(kept), 0);
        assert_ne!(LOCKED.load(Relaxed), 0, "what is locked counts");
        LOCKED.store(0, Relaxed);
    }
}

/// A driver reads the registration that a window is to be bound to.
#[test]
fn a_key_that_ends_before_the_device_has_it_is_bound_to_nothing() {
    let (_alone, mut verbs) = mocked(options());
    mock::with(|device| device.completes = false);
    let small = || Region::copy_from(b"a message").unwrap();
    while mock::with(|device| device.queue.len() < device.depth) {
        verbs.post(WorkRequest::Send { gather: smallvec![small()], invalidate: None });
        verbs.flush().expect("posted");
    }
    let exposed = verbs.expose_sink(Program::new(&[0; 8192]).sink()).expect("exposed");
    mock::completion(
        ibv_wc_status::IBV_WC_SUCCESS,
        ibv_wc_opcode::IBV_WC_RECV,
        0,
        9,
        WITH_INVALIDATE,
        exposed.handle.0,
    );
    let Ok(Some(Completion::Received { invalidated, .. })) = verbs.poll() else { panic!("a message") };
    assert_eq!(invalidated, Some(exposed.handle));
    // Now there is room.
    let last = mock::with(|device| device.queue.back().map(|work| work.number)).unwrap();
    mock::complete(ibv_wc_status::IBV_WC_SUCCESS, ibv_wc_opcode::IBV_WC_SEND, last);
    assert!(verbs.poll().expect("alive").is_none());
    let bound = |device: &mut mock::Device| {
        device.posted.iter().any(|(_, opcode)| *opcode == ibv_wr_opcode::IBV_WR_BIND_MW)
    };
    assert!(!mock::with(bound) && mock::there("mr") > 0);
    mock::with(|device| device.completes = true);
}

#[test]
fn a_queue_pair_that_does_not_go_keeps_no_right_to_memory() {
    let (_alone, mut verbs) = mocked(options());
    let mut program = Program::new(&[0; 8192]);
    verbs.expose_sink(program.sink()).expect("exposed");
    mock::with(|device| device.fails.extend(["ibv_destroy_qp", "ibv_dealloc_pd"]));
    verbs.close();
    assert!(program.is_back() && mock::there("mr") == 0 && mock::there("mw") == 0);
    assert_eq!((mock::there("qp"), mock::there("cq")), (1, 1), "it still writes completions");
    assert_eq!(LOCKED.load(Relaxed), 0, "the slabs are the device's no more");
}

/// Only what the device keeps counts, for reply chunks as for slabs, and whenever it fails.
#[test]
fn what_counts_as_locked_is_what_the_device_keeps() {
    let most = 64 << 20;
    let block = 1 << 20;
    let _alone_too = areas::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _alone = alone();
    mock::install();
    let requested = || {
        let areas = Areas::new(block, most).unwrap();
        Verbs::request("10.1.2.3:7".parse().unwrap(), options(), areas).expect("an identifier")
    };
    // All of it.
    let mut verbs = requested();
    assert!(verbs.establish().expect("the startup goes on"));
    let slabs = LOCKED.load(Relaxed);
    mock::with(|device| device.fails.insert("ibv_dereg_mr"));
    verbs.close();
    drop(verbs);
    assert_eq!((LOCKED.swap(0, Relaxed), areas::forget_kept()), (slabs, block));
    // A block that was made for one call: the other one and the slabs are free.
    mock::install();
    let mut verbs = requested();
    assert!(verbs.establish().expect("the startup goes on"));
    let memory = crate::memory::Memory::new(4096, 4096, 4096).connection(verbs.slabs(), verbs.areas());
    let calls = [memory.reply_area(1000).unwrap(), memory.reply_area(1000).unwrap()];
    for area in &calls {
        verbs.expose_sink(area.clone()).expect("exposed");
    }
    let last = mock::latest_key();
    mock::with(|device| device.keeps = last);
    verbs.close();
    drop((verbs, calls, memory));
    assert_eq!((LOCKED.swap(0, Relaxed), areas::forget_kept()), (0, block));
    // Before the connection is there at all.
    mock::install();
    mock::with(|device| device.fails.extend(["rdma_create_qp", "ibv_dereg_mr"]));
    let mut verbs = requested();
    assert!(verbs.establish().is_err());
    drop(verbs);
    assert_eq!(areas::forget_kept(), 0, "no block was registered");
    assert_ne!(LOCKED.swap(0, Relaxed), 0);
}

#[test]
fn what_the_device_takes_back_with_the_end_of_the_connection_is_free() {
    let (_alone, mut verbs) = mocked(options());
    let mut program = Program::new(&[0; 8192]);
    let exposed = verbs.expose_sink(program.sink()).expect("exposed");
    mock::with(|device| device.fails.insert("ibv_dereg_mr"));
    verbs.invalidate(exposed.handle).unwrap_err();
    assert!(!program.is_back());
    mock::with(|device| device.fails.clear());
    verbs.close();
    assert!(program.is_back());
    assert_eq!((mock::there("mr"), mock::there("pd"), LOCKED.load(Relaxed)), (0, 0, 0));
}

#[test]
fn a_block_for_reply_chunks_is_registered_once_and_given_back_with_the_connection() {
    let most = 64 << 20;
    let _alone_too = areas::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _alone = alone();
    mock::install();
    let block = 1 << 20;
    let areas = Areas::new(block, most).unwrap();
    let to = "10.1.2.3:7".parse().unwrap();
    let mut verbs = Verbs::request(to, options(), areas.clone()).expect("an identifier");
    assert!(verbs.establish().expect("the startup goes on"));
    let memory = crate::memory::Memory::new(4096, 4096, 4096).connection(verbs.slabs(), verbs.areas());
    let before = mock::made("mr");
    let (mut keys, mut handles) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let area = memory.reply_area(300_000).unwrap();
        let exposed = verbs.expose_sink(area.clone()).expect("exposed");
        assert_eq!((exposed.offset as usize, exposed.length), (area.address(), 300_000));
        assert!(area.clone().into_region(0).is_err(), "the device has it");
        verbs.flush().expect("bound");
        keys.push(exposed.handle);
        verbs.invalidate(exposed.handle).expect("unbound");
        assert!(area.into_region(0).is_ok());
    }
    keys.dedup();
    assert_eq!((mock::made("mr"), keys.len()), (before, 3), "a key of its own for each call");
    // Calls at the same time have blocks of their own, and anything longer is registered for one call.
    for (len, registered) in [(1000, 0), (1000, 1), (1000, 2), (block + 1, 3)] {
        let area = memory.reply_area(len).unwrap();
        handles.push((verbs.expose_sink(area.clone()).expect("exposed").handle, area));
        assert_eq!(mock::made("mr"), before + registered);
    }
    assert_eq!(areas::left(most), most - 3 * block);
    verbs.close();
    assert_eq!((mock::there("mr"), mock::there("mw"), areas::left(most)), (0, 0, most));
    drop((verbs, handles));
    assert_eq!(LOCKED.load(Relaxed), 0);
}

/// A connection of the mock device that has blocks, of `size` bytes for replies, and its memory.
fn with_blocks(size: usize, most: usize) -> (Verbs, Arc<crate::memory::Memory>) {
    let to = "10.1.2.3:7".parse().unwrap();
    let mut verbs = Verbs::request(to, options(), Some(Areas::lazy(size, most))).expect("an identifier");
    assert!(verbs.establish().expect("the startup goes on"));
    let memory = crate::memory::Memory::new(4096, 4096, 4096).connection(verbs.slabs(), verbs.areas());
    (verbs, memory)
}

#[test]
fn what_a_peer_reads_of_short_calls_is_copied_into_blocks_that_are_registered_once() {
    let most = 64 << 20;
    let _alone_too = areas::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _alone = alone();
    mock::install();
    let (mut verbs, _memory) = with_blocks(1 << 20, most);
    let before = mock::made("mr");
    let mut keys = Vec::new();
    let mut program = Program::new(&[7; 5000]);
    for n in 0..3 {
        let source = if n == 1 { program.source() } else { Region::copy_from(&[7; 5000]).unwrap() };
        let exposed = verbs.expose_source(source).expect("exposed");
        assert!(program.is_back(), "copied");
        verbs.flush().expect("bound");
        keys.push(exposed.handle);
        verbs.invalidate(exposed.handle).expect("unbound");
    }
    keys.dedup();
    assert_eq!((mock::made("mr"), keys.len()), (before + 1, 3), "a key of its own for each call");
    for (len, registered) in [(1, 1), (LEND_MIN - 1, 2), (LEND_MIN, 3), (LEND_MIN, 4)] {
        verbs.expose_source(Region::copy_from(&vec![7; len]).unwrap()).expect("exposed");
        assert_eq!(mock::made("mr"), before + registered, "{len}");
    }
    assert_eq!(areas::left(most), most - 2 * LEND_MIN);
    verbs.close();
    assert_eq!((mock::there("mr"), mock::there("mw"), areas::left(most)), (0, 0, most));
    assert_eq!(LOCKED.load(Relaxed), 0);
}

/// Memory that may be locked is the system's to give, whatever is left by our own count.
#[test]
fn where_no_block_can_be_registered_what_a_call_needs_is() {
    let most = 64 << 20;
    for windowless in [false, true] {
        let _alone_too = areas::ALONE.lock().unwrap_or_else(|e| e.into_inner());
        let _alone = alone();
        mock::install();
        mock::with(|device| device.windowless = windowless);
        let (mut verbs, memory) = with_blocks(1 << 20, most);
        mock::with(|device| device.refuses = LEND_MIN);
        let before = mock::made("mr");
        for _ in 0..2 {
            let area = memory.reply_area(1000).unwrap();
            let sink = verbs.expose_sink(area.clone()).expect("registered for itself");
            assert!(!memory.stays_open(&area));
            let source = verbs.expose_source(Region::copy_from(b"a call").unwrap()).expect("as well");
            verbs.flush().expect("bound");
            verbs.invalidate(sink.handle).expect("let go");
            verbs.invalidate(source.handle).expect("let go");
            assert!(area.into_region(0).is_ok());
        }
        assert_eq!((mock::made("mr"), areas::left(most)), (before + 4, most), "and nothing counts as locked");
        verbs.close();
        assert_eq!((mock::there("mr"), LOCKED.load(Relaxed)), (0, 0));
    }
}

#[test]
fn a_device_without_windows_registers_the_room_for_replies_once_too() {
    let _alone_too = areas::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _alone = alone();
    mock::install();
    mock::with(|device| device.windowless = true);
    let (mut verbs, memory) = with_blocks(1 << 20, 64 << 20);
    let before = mock::made("mr");
    for _ in 0..3 {
        let area = memory.reply_area(300_000).unwrap();
        assert!(memory.stays_open(&area), "looked at as a copy only");
        let exposed = verbs.expose_sink(area.clone()).expect("exposed");
        assert_eq!((exposed.handle.0, exposed.offset as usize), (mock::latest_key(), area.address()));
        verbs.invalidate(exposed.handle).expect("let go");
        assert_eq!(mock::made("mr"), before + 1);
    }
    // Calls at the same time cannot be told apart by anything but their keys.
    let areas = [(); 2].map(|()| memory.reply_area(1000).unwrap());
    let [one, two] = areas.each_ref().map(|area| verbs.expose_sink(area.clone()).expect("exposed").handle);
    assert_ne!(one, two);
    for _ in 0..3 {
        let source = verbs.expose_source(Region::copy_from(b"a call").unwrap()).expect("exposed");
        verbs.invalidate(source.handle).expect("let go");
        assert_eq!(mock::made("mr"), before + 3);
    }
    assert!(!memory.stays_open(&memory.reply_area(2 << 20).unwrap()), "not one of the blocks");
    verbs.close();
    assert_eq!((mock::there("mr"), mock::made("mw"), LOCKED.load(Relaxed)), (0, 0, 0));
}

#[test]
fn a_device_that_refuses_who_has_opened_it_is_not_used_any_more() {
    let (_alone, mut verbs) = mocked(options());
    assert!(!are_refused());
    // As the siw driver returns it, and as others do.
    for errno in [-libc::EACCES, libc::EACCES] {
        REFUSED.store(false, Relaxed);
        mock::with(|device| device.errno = errno);
        verbs.post(WorkRequest::Send {
            gather: smallvec![Region::copy_from(b"reply").unwrap()],
            invalidate: None,
        });
        let error = verbs.flush().expect_err("refused");
        assert_eq!(error.kind(), Kind::ConnectionLost);
        assert!(error.text().contains("has changed its user or group"), "{error}");
        assert!(are_refused());
        mock::with(|device| device.errno = 0);
        verbs = established(options());
    }
    REFUSED.store(false, Relaxed);
    mock::with(|device| device.errno = libc::ENOMEM);
    verbs.post(WorkRequest::Send {
        gather: smallvec![Region::copy_from(b"reply").unwrap()],
        invalidate: None,
    });
    assert!(verbs.flush().expect_err("another reason").text().ends_with("posting a request failed (12)"));
    assert!(!are_refused());
}

/// A listener of the mock device, and what reaches it.
fn mock_listener() -> Listener {
    mock::install();
    Listener {
        channel: Channel::new().expect("a channel"),
        ids: Vec::new(),
        places: Places { addresses: vec!["0.0.0.0:7".parse().unwrap()], interface: None },
        generation: fork::generation(),
        lost: false,
        refusals: Refusals::default(),
    }
}

impl Listener {
    fn asked_by(&self, from: &str) {
        mock::request(self.channel.as_ptr(), from.parse().unwrap(), "10.1.2.3:7".parse().unwrap());
    }

    fn next(&mut self, options: &Options) -> Knock {
        self.accept(options, false, &mut |_, _| false).expect("the listener lives")
    }
}

#[test]
fn a_connection_gets_its_memory_when_it_is_established_and_those_before_share_a_part() {
    let _alone = alone();
    let mut listener = mock_listener();
    let options = Options { credits: 32, ..options() };
    let few = bytes(&options, least(&options));
    let mut starting = Vec::new();
    let mut asked = Vec::new();
    for _ in 0..2 * STARTING_MAX {
        listener.asked_by("10.1.2.4:1000");
        let shortage = &mut |shortage, peer: IpAddr| {
            asked.push((shortage, peer.to_string()));
            false
        };
        match listener.accept(&options, false, shortage).unwrap() {
            Knock::Accepted(accepted) => starting.push(accepted.device),
            _ => break,
        }
    }
    assert_eq!(asked, [(Shortage::Starting, "10.1.2.4".to_owned())]);
    assert!(starting.len() <= STARTING_MAX, "{} are being made", starting.len());
    assert_eq!(LOCKED.load(Relaxed), few * starting.len());
    assert!(LOCKED.load(Relaxed) <= budget() / 2, "the others have the rest");
    // A connection that goes makes room, and so does one that is established.
    listener.asked_by("10.1.2.5:1000");
    let mut gone = false;
    let mut make_room = |_, _| {
        drop(starting.pop());
        !std::mem::replace(&mut gone, true)
    };
    let knock = listener.accept(&options, false, &mut make_room).unwrap();
    let Knock::Accepted(Accepted { mut device, .. }) = knock else { panic!("there is room now") };
    assert!(device.limits().receives < options.credits);
    let before = (LOCKED.load(Relaxed), STARTING.load(Relaxed));
    assert!(device.establish().unwrap());
    let credits = device.limits().receives - options.margin;
    assert!(credits > least(&options));
    assert_eq!(device.slabs().unwrap().left(), count(&options, credits) - options.margin as usize);
    let grown = bytes(&options, credits) - few;
    assert_eq!((LOCKED.load(Relaxed), STARTING.load(Relaxed)), (before.0 + grown, before.1 - few));
    // Every slab is known to the device.
    let slabs = device.slabs().unwrap();
    while let Some(slab) = slabs.take() {
        device.post_recv(slab.into_sink(4096));
    }
    assert!(device.poll().is_ok());
    drop((device, starting));
    assert_eq!((LOCKED.load(Relaxed), STARTING.load(Relaxed)), (0, 0));
}

#[test]
fn a_peer_that_answers_lives_and_one_that_does_not_is_gone_by_the_next_time() {
    let (_alone, mut verbs) = mocked(options());
    let before = mock::with(|device| device.posted.len());
    verbs.probe().expect("asked");
    assert_eq!(mock::with(|device| device.posted.len()), before + 1);
    verbs.probe().expect("the peer has answered");
    assert!(verbs.poll().expect("open").is_none());
    assert_eq!((verbs.moved(), verbs.unsent()), (0, 0), "nothing was said");
    mock::with(|device| device.completes = false);
    verbs.probe().expect("asked again");
    let error = verbs.probe().expect_err("no answer");
    assert_eq!(error.kind(), Kind::ConnectionLost);
    assert_eq!((mock::there("qp"), LOCKED.load(Relaxed)), (0, 0));
}

#[test]
fn closing_does_not_wait_for_a_peer_that_has_not_answered() {
    let (_alone, mut verbs) = mocked(options());
    mock::with(|device| device.completes = false);
    verbs.probe().expect("asked");
    let before = Instant::now();
    verbs.close();
    assert!(before.elapsed() < DRAIN / 2, "{:?}", before.elapsed());
}

#[test]
fn closing_does_not_wait_for_what_was_sent_long_ago() {
    let (_alone, mut verbs) = mocked(options());
    mock::with(|device| device.completes = false);
    verbs.post(WorkRequest::Send {
        gather: smallvec![Region::copy_from(b"reply").unwrap()],
        invalidate: None,
    });
    assert!(verbs.flush().expect("posted"));
    let ready = verbs.ready().expect("open");
    assert!(ready.leaves());
    // No completion will tell of it, since it is not signalled.
    ready.posted = Some(Instant::now() - DRAIN);
    let before = Instant::now();
    verbs.close();
    assert!(before.elapsed() < DRAIN / 2, "{:?}", before.elapsed());
}

/// A server that has no memory for what comes in goes on sending, and knows that its peer is there.
#[test]
fn what_the_peer_takes_is_known_though_nobody_takes_what_comes() {
    let (_alone, mut verbs) = mocked(options());
    mock::with(|device| device.completes = false);
    let post = |verbs: &mut Verbs| {
        let slab = verbs.slabs().and_then(|slabs| slabs.take()).expect("a slab");
        verbs.post_recv(slab.into_sink(4096));
    };
    (0..3).for_each(|_| post(&mut verbs));
    assert!(verbs.poll().unwrap().is_none());
    let short = Region::copy_from(b"a call").unwrap();
    while mock::with(|device| device.queue.len() + 1 < device.depth) {
        verbs.post(WorkRequest::Send { gather: smallvec![short.clone()], invalidate: None });
        assert!(verbs.flush().expect("posted"));
    }
    let long = Region::copy_from(&[7; 100_000]).unwrap();
    for offset in [0, 1 << 20] {
        let to = Segment { handle: Handle(9), length: long.len() as u32, offset };
        verbs.post(WorkRequest::Write { gather: smallvec![long.clone()], to });
    }
    assert!(!verbs.flush().expect("one is posted") && verbs.unsent() == 2 * long.len());
    let taken = verbs.taken();
    let written =
        |number| mock::complete(ibv_wc_status::IBV_WC_SUCCESS, ibv_wc_opcode::IBV_WC_RDMA_WRITE, number);
    let last = || mock::with(|device| device.queue.back().map_or(0, |work| work.number));
    mock::completion(ibv_wc_status::IBV_WC_SUCCESS, RECEIVED, 0, 28, 0, 0);
    written(last());
    assert!(verbs.flush().expect("the other one is too"));
    assert!(verbs.unsent() == long.len() && verbs.taken() >= taken + long.len() as u64);
    written(last());
    assert!(verbs.flush().unwrap() && verbs.unsent() == 0 && !verbs.rest());
    assert!(matches!(verbs.poll(), Ok(Some(Completion::Received { len: 28, .. }))));
}

#[test]
fn a_forked_child_leaves_devices_alone_that_its_parent_has_opened() {
    let (_alone, mut verbs) = mocked(options());
    assert!(!are_refused() && verbs.claim(false));
    let child = fork::testing::fork(|| {
        assert!(!verbs.claim(false));
        let Err(error) = Adapters.connect(Way::Address("10.1.2.3:7".parse().unwrap()), &options(), None)
        else {
            return false;
        };
        are_refused() && error.kind() == Kind::Os(libc::EACCES) && error.text().contains("was forked")
    });
    assert!(child.succeeded());
}

#[test]
fn who_is_refused_costs_one_turn_each_and_nothing_is_made_for_it() {
    let _alone = alone();
    let mut listener = mock_listener();
    // All that may be locked is taken.
    let before = LOCKED.swap(usize::MAX, Relaxed);
    (0..20).for_each(|_| listener.asked_by("10.1.2.4:1000"));
    for refused in 1..=20 {
        assert!(matches!(listener.next(&options()), Knock::Refused));
        assert_eq!(mock::with(|device| device.rejected), refused, "one at a time");
    }
    assert!(matches!(listener.next(&options()), Knock::Nobody));
    LOCKED.store(before, Relaxed);
    assert_eq!((mock::made("event channel"), mock::made("pd"), mock::there("id")), (1, 0, 0));
    // The one that has room is accepted.
    listener.asked_by("10.1.2.4:1000");
    assert!(matches!(listener.next(&options()), Knock::Accepted(_)));
    assert_eq!(mock::made("pd"), 1);
}

#[test]
fn the_log_tells_of_refused_requests_once_a_second() {
    let (mut refusals, now) = (Refusals::default(), Instant::now());
    assert_eq!(refusals.tell(now), Some(0));
    for _ in 0..100 {
        assert_eq!(refusals.tell(now + Duration::from_millis(999)), None);
    }
    assert_eq!(refusals.tell(now + Duration::from_secs(1)), Some(100));
    assert_eq!(refusals.tell(now + Duration::from_secs(2)), Some(0));
}

#[test]
fn an_rdma_write_with_immediate_data_is_no_message() {
    let (_alone, mut verbs) = mocked(options());
    let with_immediate = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
    mock::complete(ibv_wc_status::IBV_WC_SUCCESS, with_immediate, 0);
    let error = verbs.poll().map(|done| done.is_some()).expect_err("no Receive holds a message");
    assert_eq!(error.kind(), Kind::Protocol);
    assert!(error.text().contains("Immediate"), "{error}");
}

#[test]
fn a_reply_whose_peer_stands_holds_the_loop_once_and_not_for_long() {
    let long = |verbs: &mut Verbs| {
        let mut program = Program::new(&[7; 100_000]);
        verbs.post(WorkRequest::Send { gather: smallvec![program.source()], invalidate: None });
        assert!(verbs.flush().expect("posted"));
        let before = Instant::now();
        let kept = verbs.release_lent();
        (kept, program.is_back(), before.elapsed())
    };
    let (_alone, mut verbs) = mocked(options());
    mock::with(|device| device.completes = false);
    let (kept, _, time) = long(&mut verbs);
    assert!(kept.is_err() && time < Duration::from_millis(500), "{kept:?} {time:?}");
    let before = Instant::now();
    verbs.close();
    assert!(before.elapsed() < DRAIN / 2, "closing waits for it once more: {:?}", before.elapsed());
    // What is sent to other peers while one stalls does not depend on them.
    let mut other = established(options());
    let (kept, over, time) = long(&mut other);
    assert!(kept.is_ok() && over && time < Duration::from_millis(50), "{kept:?} {time:?}");
    assert!(other.poll().is_ok(), "it lives on");
}

#[test]
#[ignore = "needs an RDMA device: VERBS_ADDRESS"]
fn the_contract_is_kept_on_a_device() {
    let to = address();
    let listener = std::cell::RefCell::new(listener(to));
    // The second end has longer Receives.
    let longer = Options { receive: 64 << 10, slab: 64 << 10, ..options() };
    contract::check(&|| pair(&mut listener.borrow_mut(), to, [&options(), &longer]));
    assert_eq!(LOCKED.load(Relaxed), 0, "every slab was given back");
}

#[test]
#[ignore = "needs an RDMA device: VERBS_ADDRESS"]
fn what_is_posted_after_the_early_receives_has_its_own_length_on_a_device() {
    let options = options();
    let mut pair = contract::Ends::new(connected(&options));
    pair.receives(1, options.margin as usize);
    pair.receives_of(1, 1, 10);
    for _ in 0..options.margin {
        pair.send(0, &[7; 11]);
        assert_eq!(pair.message(1).0, [7; 11]);
    }
    pair.send(0, &[7; 11]);
    pair.next(1).expect_err("longer than its Receive");
}

#[test]
fn later_connections_get_fewer_credits_until_no_more_fit() {
    let _alone = alone();
    let limit = process::memlock_limit().filter(|bytes| *bytes < 1 << 30);
    let Some(_) = limit else { return };
    let options = Options { credits: 32, margin: 8, ..options() };
    for (slab, setting) in [(4096, " RPCRDMA_INLINE"), (8192, " RPCRDMA_MAX_INLINE")] {
        let options = Options { slab, ..options.clone() };
        let mut held = Vec::new();
        let error = loop {
            match Locked::least(&options, false) {
                Ok(mut locked) => {
                    let credits = locked.grow(&options);
                    held.push((locked, credits));
                }
                Err(shortage) => break lacks(shortage, &options),
            }
        };
        assert!(held.iter().all(|(locked, credits)| locked.bytes == slab * count(&options, *credits)));
        assert!(held.windows(2).all(|two| two[0].1 >= two[1].1), "credits only shrink");
        assert_eq!(held[held.len() - 1].1, CREDITS_MIN);
        assert!(error.text().contains("RLIMIT_MEMLOCK") && error.text().ends_with(setting), "{error}");
        assert_eq!(error.errno(), libc::ENOMEM);
        held.clear();
        assert_eq!(LOCKED.load(Relaxed), 0);
    }
}

#[test]
fn a_long_write_is_cut_at_the_same_bytes_whatever_its_pieces() {
    let bytes: Vec<u8> = (0..100u8).collect();
    let to = Segment { handle: Handle(7), length: 100, offset: u64::MAX - 200 };
    for piece in [1, 3, 10, 64, 100] {
        let gather: Regions = bytes.chunks(piece).map(|part| Region::copy_from(part).unwrap()).collect();
        let mut written = Vec::new();
        for part in cut(&gather, to, 30) {
            let WorkRequest::Write { gather, to: at } = part else { panic!("a Write is cut into Writes") };
            assert_eq!(at.offset, to.offset + written.len() as u64);
            assert_eq!((at.handle, at.length as usize), (to.handle, gather.iter().map(|p| p.len()).sum()));
            assert!(at.length <= 30 && gather.iter().all(|piece| !piece.is_empty()));
            written.extend(gather.iter().flat_map(|piece| piece.iter().copied()));
        }
        assert_eq!(written, bytes);
    }
}

/// Results in memory that the program has registered stay where they lie, however many there are.
#[test]
fn a_long_write_of_more_pieces_than_the_send_queue_has_places_goes_out() {
    for pieces in [255, 256, 257, 2000] {
        let (_alone, mut verbs) = mocked(options());
        let piece = Region::copy_from(&[7; 4000]).unwrap();
        let to = Segment { handle: Handle(7), length: pieces * 4000, offset: 0 };
        let gather: Regions = (0..pieces).map(|_| piece.clone()).collect();
        verbs.post(WorkRequest::Write { gather, to });
        let send = Region::copy_from(b"a reply").unwrap();
        verbs.post(WorkRequest::Send { gather: smallvec![send], invalidate: None });
        for _ in 0..100 {
            assert!(verbs.poll().expect("it goes on").is_none());
        }
        assert!(verbs.flush().expect("posted"), "{pieces} pieces wait for ever");
        let last = mock::with(|device| device.posted.last().copied());
        assert_eq!(last.map(|(_, opcode)| opcode), Some(ibv_wr_opcode::IBV_WR_SEND));
        verbs.close();
    }
}

/// Nothing but a completion tells that there is room again.
#[test]
fn a_send_queue_that_is_just_full_awaits_a_completion() {
    let _alone_too = areas::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _alone = alone();
    mock::install();
    let (mut verbs, _memory) = with_blocks(1 << 20, 64 << 20);
    let send = |verbs: &mut Verbs, binds: usize| {
        for _ in 0..binds {
            verbs.expose_source(Region::copy_from(b"a call").unwrap()).expect("exposed");
        }
        let gather = smallvec![Region::copy_from(b"a call").unwrap()];
        verbs.post(WorkRequest::Send { gather, invalidate: None });
        let posted = verbs.flush().expect("posted") || {
            assert!(verbs.poll().expect("it goes on").is_none());
            verbs.flush().expect("posted")
        };
        assert!(posted, "no completion comes");
    };
    let depth = mock::with(|device| device.depth);
    for calls in 1..7 {
        // With the requests of the first ones it is full.
        for call in 0..calls {
            send(&mut verbs, depth * (call + 1) / calls - depth * call / calls - 1);
        }
        send(&mut verbs, 0);
        // So that the next round begins with an empty one.
        for _ in 0..8 {
            send(&mut verbs, 0);
        }
    }
    verbs.close();
}

#[test]
fn a_listener_takes_what_its_socket_would() {
    let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let places = |addresses: &[&str], interface: Option<&str>| Places {
        addresses: addresses.iter().map(|text| at(text)).collect(),
        interface: interface.map(str::to_owned),
    };
    let any = places(&["0.0.0.0:7"], None);
    assert!(any.contain(at("10.1.2.3:7")));
    assert!(!any.contain(at("127.0.0.1:7")) && !any.contain(at("[fd00::1]:7")));
    assert!(places(&["0.0.0.0:7", "[::]:7"], None).contain(at("[fd00::1]:7")));
    assert!(!places(&["10.1.2.4:7"], None).contain(at("10.1.2.3:7")));
    assert!(!places(&["127.0.0.1:7"], None).contain(at("127.0.0.1:7")));
    // The interface has no such address.
    assert!(!places(&["0.0.0.0:7"], Some("lo")).contain(at("10.1.2.3:7")));
}
