//! What can be shown without a device, and, for a machine with one, what needs it: tests named `on_a_device` are ignored
//! unless asked for, and connect to VERBS_ADDRESS, an address of the device.

use super::*;
use crate::provider::fault::contract;

fn options() -> Options {
    Options {
        inline: 4096,
        receive: 4096,
        slab: 4096,
        remote_invalidation: true,
        credits: 4,
        margin: 4,
        iwarp: true,
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
    let mut active = connect(to, options[0], None).expect("a device leads there");
    let mut passive = None;
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let open = active.establish().expect("the startup goes on");
        if passive.is_none() {
            passive = listener.accept(options[1], true).expect("the listener lives");
        }
        let there = passive.as_mut().is_some_and(|accepted| accepted.device.establish().expect("accepted"));
        if let Some(Accepted { device, .. }) = passive.take_if(|_| open && there) {
            return [active, device];
        }
        assert!(Instant::now() < deadline, "no connection");
        std::thread::yield_now();
    }
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
    // LOCKED belongs to the process, and no other test uses it without a device.
    let limit = sys::memlock_limit().filter(|bytes| *bytes < 1 << 30);
    let Some(_) = limit else { return };
    let options = Options { credits: 32, margin: 8, ..options() };
    for (slab, setting) in [(4096, " RPCRDMA_INLINE"), (8192, " RPCRDMA_MAX_INLINE")] {
        let options = Options { slab, ..options.clone() };
        let mut held = Vec::new();
        let error = loop {
            match Locked::slabs(&options) {
                Ok((locked, credits, slabs)) => held.push((locked, credits, slabs)),
                Err(error) => break error,
            }
        };
        assert!(held.iter().all(|(_, _, slabs)| slabs.size() == slab));
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
        let gather: Vec<Region> = bytes.chunks(piece).map(|part| Region::copy_from(part).unwrap()).collect();
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
