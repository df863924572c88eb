use std::cell::RefCell;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, bind, recvmsg, sendmsg_addr, socket_with,
    sockopt,
};
use rustix::process::{Resource, getrlimit, setrlimit};

use super::rings::{LONG, WIDE, WIDE_MOST};
use super::*;
use crate::fork;
use crate::memory::shared::{Bell, NARROW, OUTBOX, RING, SIZE, Shown, Theirs, Word};
use crate::memory::{Buf, IoVec, IoVecMut};
use crate::provider::fault::contract;
use crate::provider::{Completion, Doze, WorkId, WorkRequest};
use crate::wait;
use crate::wire::{Handle, Segment};

type Sockets = (TcpStream, TcpStream);

fn sockets() -> Sockets {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn sharing(sharing: Sharing) -> iwarp::Options {
    iwarp::Options { sharing, ..iwarp::Options::default() }
}

/// Both ends, established.
fn pair([client, server]: [iwarp::Options; 2]) -> Result<(Sockets, [Iwarp; 2]), Error> {
    let sockets = sockets();
    let mut a = Iwarp::initiator(sockets.0.as_raw_fd(), client)?;
    let mut b = Iwarp::responder(sockets.1.as_raw_fd(), server)?;
    let until = Instant::now() + Duration::from_secs(10);
    let (mut a_done, mut b_done) = (false, false);
    while !(a_done && b_done) {
        assert!(Instant::now() < until, "the startup does not end");
        b_done = b_done || b.establish()?;
        a_done = a_done || a.establish()?;
        if a_done && !b_done {
            // One that goes on as software iWARP waits for the first FPDU.
            b_done = b.establish()?;
        }
    }
    Ok((sockets, [a, b]))
}

fn shared() -> (Sockets, [Iwarp; 2]) {
    pair([sharing(Sharing::Must), sharing(Sharing::Must)]).unwrap()
}

/// The same, of two ends that look before they sleep.
fn looking() -> (Sockets, [Iwarp; 2]) {
    let looks = || iwarp::Options { spins: true, ..sharing(Sharing::Must) };
    pair([looks(), looks()]).unwrap()
}

/// What comes to `qp` next.
fn next(qp: &mut Iwarp) -> Result<Completion, Error> {
    loop {
        if let Some(completion) = qp.poll()? {
            return Ok(completion);
        }
        if qp.rest() {
            assert!(wait::until(qp.fd(), wait::IN, Some(Duration::from_secs(10)), None).unwrap());
        }
    }
}

fn sink(bytes: usize) -> crate::memory::Sink {
    Buf::with_capacity(bytes).unwrap().into_sink(bytes)
}

fn send(qp: &mut Iwarp, bytes: &[u8]) {
    let gather = smallvec::smallvec![crate::memory::Region::copy_from(bytes).unwrap()];
    qp.post(WorkRequest::Send { gather, invalidate: None });
}

fn message(completion: Completion) -> Vec<u8> {
    let Completion::Received { sink, len, .. } = completion else { panic!("{completion:?}") };
    sink.into_buf(len).unwrap().to_vec()
}

#[test]
fn the_contract_is_kept_over_shared_memory() {
    let sockets = RefCell::new(Vec::new());
    contract::check(&|| {
        let (both, [mut a, mut b]) = shared();
        // The responder may not send before it has heard from the initiator.
        b.post_recv(sink(16));
        send(&mut a, b"hello");
        assert_eq!(message(next(&mut b).unwrap()), b"hello");
        sockets.borrow_mut().push(both);
        [Box::new(a), Box::new(b)]
    });
}

#[test]
fn both_ends_share_memory_only_if_both_know_how_and_else_go_on_without() {
    use Sharing::{May, Must, Never};
    for (client, server, shares) in [
        (May, May, Some(true)),
        (Must, May, Some(true)),
        (May, Must, Some(true)),
        (May, Never, Some(false)),
        (Never, May, Some(false)),
        (Never, Never, Some(false)),
        (Must, Never, None),
        (Never, Must, None),
    ] {
        let made = pair([sharing(client), sharing(server)]);
        let Some(shares) = shares else {
            let error = made.map(|_| ()).unwrap_err();
            assert!(error.text().contains("shares no memory with us"), "{error}");
            continue;
        };
        let (_sockets, [mut a, mut b]) = made.unwrap();
        for qp in [&a, &b] {
            assert_eq!(qp.traits().name == "local", shares, "{client:?} {server:?}");
            assert_eq!(qp.describe() == "shared memory", shares);
        }
        b.post_recv(sink(100));
        a.post_recv(sink(100));
        send(&mut a, b"call");
        assert_eq!(message(next(&mut b).unwrap()), b"call");
        send(&mut b, b"reply");
        assert_eq!(message(next(&mut a).unwrap()), b"reply");
    }
}

#[test]
fn who_sleeps_is_woken_once_and_who_looks_is_not() {
    let (_sockets, [mut a, mut b]) = shared();
    let readable = |qp: &Iwarp| wait::until(qp.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    for _ in 0..3 {
        b.post_recv(sink(100));
    }
    assert!(b.poll().unwrap().is_none() && b.rest() && !readable(&b));
    send(&mut a, b"one");
    assert!(readable(&b));
    assert_eq!(message(next(&mut b).unwrap()), b"one");
    assert!(b.poll().unwrap().is_none() && b.rest() && !readable(&b), "the byte that has woken it is gone");
    b.spin();
    send(&mut a, b"two");
    assert!(!readable(&b) && b.has_come());
    assert!(!b.rest(), "what has come nothing else tells");
    assert_eq!(message(next(&mut b).unwrap()), b"two");
    b.spin();
    assert!(b.rest() && !b.has_come());
    send(&mut a, b"three");
    assert!(readable(&b));
    assert!(!b.rest() && readable(&b), "who asks is perhaps not the one that sleeps");
    assert_eq!(message(next(&mut b).unwrap()), b"three");
    assert!(b.rest() && !readable(&b));
}

#[test]
fn who_waits_for_room_is_woken_when_there_is_some() {
    let (_sockets, [mut a, mut b]) = shared();
    let long = vec![7; 3 * RING];
    b.post_recv(sink(long.len()));
    send(&mut a, &long);
    assert!(a.poll().unwrap().is_none() && a.unsent() > 0 && !a.wants_write());
    let mut rounds = 0;
    let got = loop {
        assert!(a.rest(), "it waits for room");
        if let Some(completion) = b.poll().unwrap() {
            break completion;
        }
        assert!(wait::until(a.fd(), wait::IN, Some(Duration::from_secs(10)), None).unwrap());
        assert!(a.poll().unwrap().is_none());
        rounds += 1;
    };
    assert!(rounds >= 2 && message(got) == long && a.unsent() == 0);
}

#[test]
fn the_end_of_the_peer_is_seen_behind_what_it_has_sent() {
    let (sockets, [mut a, mut b]) = shared();
    b.post_recv(sink(100));
    b.post_recv(sink(100));
    send(&mut a, b"last");
    a.close();
    drop((a, sockets.0));
    assert_eq!(message(next(&mut b).unwrap()), b"last");
    assert_eq!(next(&mut b).unwrap_err().kind(), Kind::ConnectionLost);
}

#[test]
fn a_child_that_was_forked_leaves_the_connection_to_its_parent() {
    let (_sockets, [mut a, mut b]) = shared();
    a.post_recv(sink(100));
    b.post_recv(sink(100));
    send(&mut a, b"call");
    assert_eq!(message(next(&mut b).unwrap()), b"call");
    assert!(a.rest());
    let child = fork::testing::fork(|| {
        a.spin();
        let claimed = a.claim(false);
        // It answers what its parent has taken.
        send(&mut b, b"reply");
        !claimed
    });
    assert!(child.succeeded());
    assert_eq!(message(next(&mut a).unwrap()), b"reply");
}

#[test]
fn a_child_that_reads_says_that_it_waits_though_its_parent_was_looking_without_a_pause() {
    let (_sockets, [mut b, mut a]) = shared();
    a.post_recv(sink(100));
    assert!(a.spin());
    let child = fork::testing::fork(|| {
        assert!(a.poll().unwrap().is_none());
        assert!(a.rest());
        send(&mut b, b"call");
        // It has something to do now.
        let told = wait::until(a.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
        told && !a.rest() && message(next(&mut a).unwrap()) == b"call"
    });
    assert!(child.succeeded());
}

// ----------------------------------------------------------------------------------------------------------- outboxes

/// A segment, and what its peer sees of it.
fn segment() -> (Arc<Own>, Arc<Theirs>) {
    let (own, file) = Own::new().unwrap();
    (Arc::new(own), Arc::new(Theirs::new(&file).unwrap()))
}

/// A copy of all of it, if the copy is good.
fn copied(shown: &Shown) -> Option<Vec<u8>> {
    let mut bytes = vec![0; shown.len()];
    shown.copy(0, IoVecMut::from_mut(&mut bytes)).then_some(bytes)
}

#[test]
fn one_message_at_a_time_has_the_outbox_and_none_of_a_child_that_was_forked() {
    let (own, theirs) = segment();
    let mut buf = Buf::outbox(&own);
    let address = buf.as_ref().unwrap().as_ptr().addr();
    assert!(Buf::outbox(&own).is_none());
    assert!(own.show(address, 7).is_some());
    let child = fork::testing::fork(|| {
        drop(buf.take());
        Buf::outbox(&own).is_none() && own.show(address, 8).is_none() && theirs.get(Word::Shown) == 7
    });
    assert!(child.succeeded());
    let (own, theirs) = segment();
    for handle in [7, 8] {
        let buf = Buf::outbox(&own).unwrap();
        own.show(buf.as_ptr().addr(), handle).unwrap();
        assert_eq!(theirs.get(Word::Shown), u64::from(handle));
        drop(buf.freeze().slice(0, 0));
        assert_eq!(theirs.get(Word::Shown), 0);
    }
}

#[test]
fn a_message_that_outgrows_the_outbox_goes_on_in_memory_of_its_own() {
    let (own, _) = segment();
    let mut buf = Buf::outbox(&own).unwrap();
    let bytes: Vec<u8> = (0..OUTBOX + 5).map(|at| (at % 251) as u8).collect();
    buf.extend(&bytes[..OUTBOX]).unwrap();
    assert!(own.show(buf.as_ptr().addr(), 7).is_some());
    buf.extend(&bytes[OUTBOX..]).unwrap();
    assert!(buf[..] == bytes && own.show(buf.as_ptr().addr(), 8).is_none());
    assert!(Buf::outbox(&own).is_some(), "it has given it back");
}

#[test]
fn what_lies_in_an_outbox_is_taken_only_while_it_is_shown_and_only_from_there() {
    let (own, theirs) = segment();
    let mut buf = Buf::outbox(&own).unwrap();
    buf.extend(b"0123456789").unwrap();
    let region = buf.freeze();
    let offset = own.show(region.as_ptr().addr() + 2, 7).unwrap();
    let segment = Segment { handle: Handle(7), length: 8, offset };
    let shown = Shown::of(&own, &theirs, segment).unwrap();
    assert_eq!(copied(&shown).unwrap(), b"23456789");
    let lies = [
        Segment { offset: 2, ..segment },
        Segment { offset: offset ^ 1 << 63, ..segment },
        Segment { offset: offset + OUTBOX as u64, ..segment },
        Segment { length: OUTBOX as u32 - 1, ..segment },
        Segment { length: u32::MAX, offset: offset + OUTBOX as u64 - 2, ..segment },
        Segment { handle: Handle(8), ..segment },
        Segment { handle: Handle(0), ..segment },
    ];
    assert!(lies.into_iter().all(|lie| Shown::of(&own, &theirs, lie).is_none()));
    let whole = Segment { length: OUTBOX as u32 - 2, ..segment };
    assert_eq!(Shown::of(&own, &theirs, whole).unwrap().len(), OUTBOX - 2);
    drop(region);
    assert!(copied(&shown).is_none() && Shown::of(&own, &theirs, segment).is_none());
    // Nor is it mistaken for what is there next.
    let next = Buf::outbox(&own).unwrap();
    own.show(next.as_ptr().addr(), 9).unwrap();
    assert!(copied(&shown).is_none());
    // No handle is 0.
    own.word(Word::Shown).store(0, SeqCst);
    assert!(Shown::of(&own, &theirs, Segment { handle: Handle(0), ..segment }).is_none());
}

#[test]
fn a_peer_takes_what_is_exposed_in_the_outbox_or_asks_for_it() {
    let (_sockets, [mut a, mut b]) = shared();
    // Both may send now.
    b.post_recv(sink(1));
    send(&mut a, b"a");
    assert_eq!(message(next(&mut b).unwrap()), b"a");
    let bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    let mut buf = a.outbox().unwrap();
    buf.extend(&bytes).unwrap();
    assert!(a.outbox().is_none());
    let moved = (a.moved(), b.moved());
    let region = buf.freeze();
    let segment = a.expose_source(region.slice(8, bytes.len() - 8)).unwrap();
    drop(region);
    let shown = b.shown(segment).unwrap();
    assert_eq!(copied(&shown).unwrap(), bytes[8..]);
    let all = bytes.len() as u64 - 8;
    assert_eq!((a.moved(), b.moved()), (moved.0 + all, moved.1 + all), "a spin knows what was moved");
    // The same by an RDMA Read.
    let to = sink(1000);
    let from = Segment { length: 1000, offset: segment.offset + 50, ..segment };
    b.post(WorkRequest::Read { id: WorkId(1), sink: to.clone(), at: 0, from });
    let read = loop {
        assert!(a.poll().unwrap().is_none());
        if let Some(completion) = b.poll().unwrap() {
            break completion;
        }
    };
    assert!(matches!(read, Completion::Read { id: WorkId(1) }));
    assert_eq!(to.into_buf(1000).unwrap()[..], bytes[58..1058]);
    assert!(b.shown(Segment { handle: Handle(segment.handle.0 ^ 1), ..segment }).is_none());
    a.invalidate(segment.handle).unwrap();
    assert!(copied(&shown).is_none() && b.shown(segment).is_none());
    assert!(a.outbox().is_some());
    // What lies elsewhere has to be asked for.
    let elsewhere = a.expose_source(crate::memory::Region::copy_from(&bytes).unwrap()).unwrap();
    assert!(elsewhere.offset == 0 && b.shown(elsewhere).is_none());
}

// ------------------------------------------------------------------------------------------------------ hostile peers

/// A ring of ours, and the peer's end of it in our hands.
fn hostile() -> (Sockets, Rings, Own) {
    let (own, _) = Own::new().unwrap();
    let (peers, file) = Own::new().unwrap();
    (sockets(), Rings::new(own, Theirs::new(&file).unwrap(), false), peers)
}

#[test]
fn numbers_that_cannot_be_are_an_error_and_nothing_is_copied() {
    let (sockets, mut rings, peer) = hostile();
    let fd = sockets.0.as_raw_fd();
    let mut bytes = [1; 64];
    for produced in [RING as u64 + 1, u64::MAX, 1 << 63] {
        peer.word(Word::Produced).store(produced, SeqCst);
        let error = rings.receive(fd, &mut [IoVecMut::from_mut(&mut bytes)]).unwrap_err();
        assert_eq!((error.raw_os_error(), bytes), (Some(libc::EPROTO), [1; 64]));
        assert!(!rings.rest() && rings.has_come());
    }
    peer.word(Word::Produced).store(0, SeqCst);
    for consumed in [1, RING as u64, u64::MAX / 2] {
        peer.word(Word::Consumed).store(consumed, SeqCst);
        let error = rings.send(fd, &[IoVec::from_slice(&bytes)]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPROTO));
        assert_eq!(rings.unconsumed(), 0);
    }
}

#[test]
fn a_peer_that_moves_the_beginning_of_its_ring_has_other_bytes_of_it_read() {
    let (sockets, mut rings, peer) = hostile();
    let fd = sockets.0.as_raw_fd();
    let mut bytes = vec![1; RING];
    for base in [0, 1, RING as u64 - 1, u64::MAX, 0x8000_0000_0000_0001] {
        peer.word(Word::Base).store(base, Relaxed);
        peer.word(Word::Produced).fetch_add(RING as u64, SeqCst);
        assert_eq!(rings.receive(fd, &mut [IoVecMut::from_mut(&mut bytes)]).unwrap(), RING);
        assert!(bytes.iter().all(|byte| *byte == 0), "nobody has written there");
        bytes.fill(1);
    }
}

#[test]
fn a_peer_that_wakes_without_end_or_without_reason_keeps_nobody() {
    let (sockets, mut rings, peer) = hostile();
    let fd = sockets.0.as_raw_fd();
    socket::send(sockets.1.as_raw_fd(), &[IoVec::from_slice(&[9; 4096])]).unwrap();
    let mut bytes = [0; 8];
    let mut receive = |rings: &mut Rings| rings.receive(fd, &mut [IoVecMut::from_mut(&mut bytes)]);
    assert_eq!(receive(&mut rings).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    // Whatever the peer says of the bytes, in the end they are gone.
    let until = Instant::now() + Duration::from_secs(10);
    while wait::until(fd, wait::IN, Some(Duration::ZERO), None).unwrap() {
        assert!(Instant::now() < until);
        assert_eq!(receive(&mut rings).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
    peer.word(Word::Woken).store(77, SeqCst);
    assert_eq!(receive(&mut rings).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn only_a_segment_that_nobody_else_can_write_or_shorten_is_mapped() {
    let file = |bytes: u64, seals: SealFlags| {
        let file = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let refused = |result: io::Result<()>| result.map_err(|e| e.raw_os_error().unwrap());
    let fixed = SealFlags::SHRINK | SealFlags::GROW;
    let written = fixed | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    let of = |file: &OwnedFd| refused(Own::of(file).map(|_| ()));
    let new = |file: &OwnedFd| refused(Theirs::new(file).map(|_| ()));
    let long = SIZE as u64;
    let good = file(long, fixed);
    assert_eq!((new(&good), of(&good), new(&good)), (Err(libc::EINVAL), Ok(()), Ok(())));
    assert_eq!(of(&good), Err(libc::EPERM), "it has a writer");
    assert_eq!(new(&file(long, written)), Ok(()));
    for (bytes, seals) in
        [(long, SealFlags::GROW), (long, SealFlags::SHRINK), (long - 1, fixed), (long + 1, fixed), (0, fixed)]
    {
        assert_eq!(of(&file(bytes, seals)), Err(libc::EINVAL), "{bytes} {seals:?}");
    }
    for (bytes, seals) in [
        (long, written ^ SealFlags::GROW),
        (long, written ^ SealFlags::SHRINK),
        (long, written ^ SealFlags::FUTURE_WRITE),
        (long, written ^ SealFlags::SEAL),
        (long - 1, written),
        (0, written),
    ] {
        assert_eq!(new(&file(bytes, seals)), Err(libc::EINVAL), "{bytes} {seals:?}");
    }
    for path in ["/proc/self/exe", "/dev/zero"] {
        let file = std::fs::File::open(path).unwrap().into();
        assert!(of(&file).is_err() && new(&file).is_err(), "{path}");
    }
}

#[test]
fn what_the_peer_writes_can_be_read_and_nothing_else() {
    let (own, file) = Own::new().unwrap();
    own.word(Word::Produced).store(5, SeqCst);
    assert!(ftruncate(&file, 0).is_err() && ftruncate(&file, 2 * SIZE as u64).is_err());
    assert_eq!(rustix::io::write(&file, &[1]), Err(Errno::PERM));
    assert_eq!(Own::of(&file).err().and_then(|e| e.raw_os_error()), Some(libc::EPERM));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, hole, 0, SIZE as u64), Err(Errno::PERM));
    assert_eq!(fallocate(&file, FallocateFlags::KEEP_SIZE, SIZE as u64, 4096), Err(Errno::PERM));
    assert_eq!(Theirs::new(&file).unwrap().get(Word::Produced), 5);
}

/// The name and the secret that a client has sent.
fn said(private_data: &[u8]) -> (SocketAddrUnix, Secret) {
    let asked: [u8; 32] = find(private_data).unwrap();
    (name(asked.first_chunk().unwrap()).unwrap(), *asked.last_chunk().unwrap())
}

/// Does something in a process of its own, which may be left without descriptors, or with some for ever.
fn elsewhere(work: impl FnOnce()) {
    let child = fork::testing::fork(|| {
        // It comes to have a socket of its own, which stays.
        drop(Offered::new(&asked().1, &mut Vec::new(), false));
        work();
        true
    });
    assert!(child.succeeded());
}

fn unix() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap()
}

/// What a client has asked for at a socket of a test.
fn asked() -> (OwnedFd, Vec<u8>) {
    let public = random().unwrap();
    let socket = unix();
    bind(&socket, &name(&public).unwrap()).unwrap();
    (socket, [&MARK[..], &public, &[1; SECRET], &Trust::ANYBODY.to_bytes()].concat())
}

/// What a server has passed.
fn passed(to: &OwnedFd) -> Vec<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(to, &mut [], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let all = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    all.flatten().collect()
}

/// A descriptor that is closed only after minutes, unless others have it too.
fn lingering() -> OwnedFd {
    let (client, server) = sockets();
    sockopt::set_socket_linger(&client, Some(Duration::from_secs(200))).unwrap();
    client.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &client, &[0; 1 << 16]).is_ok() {}
    std::mem::forget(server);
    client.into()
}

/// Sends this with these files.
fn show(to: &SocketAddrUnix, bytes: &[u8], files: &[OwnedFd]) {
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg_addr(unix(), to, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

/// What a server passes: what it writes, and what the client is to write.
fn segments() -> [OwnedFd; 2] {
    [Own::new().unwrap().1, shared::blank().unwrap()]
}

/// How many descriptors this process has.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn who_does_not_know_the_secret_leaves_nothing_with_a_client() {
    elsewhere(|| {
        let (began, before) = (Instant::now(), descriptors());
        let mut request = Vec::new();
        let asked = Asked::new(&mut request, Trust::own()).unwrap();
        let (to, secret) = said(&request);
        for at in 0..SECRET {
            let mut wrong = secret;
            wrong[at] ^= 1;
            show(&to, &wrong, &segments());
        }
        show(&to, &secret[1..], &[]);
        show(&to, &[&secret[..], &[0]].concat(), &[]);
        show(&to, &[], &[]);
        assert_eq!(asked.0.take().err().map(|e| e.kind()), Some(io::ErrorKind::WouldBlock));
        let mut reply = Vec::new();
        let mut offered = Offered::new(&request, &mut reply, false).unwrap();
        let rings = asked.end(&reply).unwrap();
        assert!(matches!(offered.answer(false), Answer::Accepted(_)));
        drop((rings, offered));
        assert_eq!(descriptors(), before);
        // What takes long to close stays with those who sent it.
        let mut request = Vec::new();
        let asked = Asked::new(&mut request, Trust::own()).unwrap();
        let kept = lingering();
        show(&said(&request).0, &[7; SECRET], std::slice::from_ref(&kept));
        std::mem::forget(kept);
        drop(asked);
        assert!(began.elapsed() < Duration::from_secs(100));
    });
}

#[test]
fn a_server_offers_nothing_to_who_would_not_take_it() {
    let own = Trust::own();
    let mut elsewhere = own.to_bytes();
    elsewhere[Trust::BYTES - 1] ^= 1;
    let mut another = own.to_bytes();
    another[3] ^= 1;
    for (trust, offers) in [
        (own, true),
        (Trust::ANYBODY, true),
        // Root is trusted, but only of the same user namespace.
        (Trust::of(&another), process::is_privileged()),
        (Trust::of(&elsewhere), false),
    ] {
        let mut request = Vec::new();
        let _asked = Asked::new(&mut request, trust).unwrap();
        assert_eq!(Offered::new(&request, &mut Vec::new(), false).is_some(), offers, "{trust}");
    }
}

#[test]
fn what_nobody_receives_is_bounded_and_passing_goes_on_when_it_was() {
    elsewhere(|| {
        let mut waiting = Vec::new();
        let mut tries = 0;
        let mut refused = |waiting: &mut Vec<(OwnedFd, Vec<u8>)>| {
            // A socket takes ten of them.
            if tries % 8 == 0 {
                waiting.push(asked());
            }
            tries += 1;
            assert!(tries < 700);
            Offered::new(&waiting.last().unwrap().1, &mut Vec::new(), false).is_none()
        };
        let mut passes = 0;
        while !refused(&mut waiting) {
            passes += 1;
        }
        // To newer kernels a message is longer.
        let many = passes > 80;
        assert!(refused(&mut waiting) && passes > 40 && (!many || process::may_exceed_limits()), "{passes}");
        // A client that receives no more by its own doing gets no other socket made.
        let sender = mailbox::sender();
        let (shut, request) = asked();
        socket::shutdown(shut.as_raw_fd());
        assert!(Offered::new(&request, &mut Vec::new(), false).is_none());
        assert_eq!(mailbox::sender(), sender);
        assert!(refused(&mut waiting));
        // Nor does a child.
        assert!(fork::testing::fork(|| refused(&mut waiting)).succeeded());
        passed(&waiting[0].0);
        drop(waiting.drain(1..3));
        assert!(!refused(&mut waiting) && !refused(&mut waiting));
        drop(waiting);
        let (shut, request) = asked();
        socket::shutdown(shut.as_raw_fd());
        assert!(Offered::new(&request, &mut Vec::new(), false).is_none());
        assert_eq!(mailbox::sender(), sender);
        // A child shuts it down.
        let (socket, request) = asked();
        socket::shutdown(sender.unwrap());
        let descriptors_before = descriptors();
        assert!(Offered::new(&request, &mut Vec::new(), false).is_some());
        assert_eq!(descriptors(), descriptors_before);
        drop(socket);
        // A program that closes what it does not know, and opens something else.
        for file in 3..300 {
            socket::close(file);
        }
        let taken: Vec<_> = (0..300).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let (socket, request) = asked();
        assert!(Offered::new(&request, &mut Vec::new(), false).is_some());
        assert_eq!(passed(&socket).len(), 2);
        std::mem::forget(taken);
    });
}

#[test]
fn a_client_takes_two_segments_and_nothing_else() {
    elsewhere(|| {
        let before = descriptors();
        let [one, other] = segments();
        for wrong in 0..6 {
            let files = match wrong {
                0 => vec![],
                1 => vec![one.try_clone().unwrap()],
                2 => vec![one.try_clone().unwrap(), other.try_clone().unwrap(), other.try_clone().unwrap()],
                // In the wrong order; what it is to write has a writer; what the server is to write has none.
                3 => vec![other.try_clone().unwrap(), one.try_clone().unwrap()],
                4 => vec![one.try_clone().unwrap(), one.try_clone().unwrap()],
                _ => vec![other.try_clone().unwrap(), other.try_clone().unwrap()],
            };
            let mut request = Vec::new();
            let asked = Asked::new(&mut request, Trust::own()).unwrap();
            let (to, secret) = said(&request);
            show(&to, &secret, &files);
            assert!(asked.end(MARK).is_none(), "{wrong}");
        }
        assert!(!shared::is_written(&other), "nothing was changed");
        drop((one, other));
        assert_eq!(descriptors(), before);
    });
}

#[test]
fn a_server_shares_memory_with_who_has_become_the_writer() {
    for (seals, is_writer) in [
        (SealFlags::empty(), false),
        (SealFlags::SEAL, false),
        (SealFlags::FUTURE_WRITE, false),
        (SealFlags::FUTURE_WRITE | SealFlags::SEAL, true),
    ] {
        let (socket, request) = asked();
        let mut reply = Vec::new();
        let mut offered = Offered::new(&request, &mut reply, false).unwrap();
        assert_eq!(reply, MARK);
        let files: [OwnedFd; 2] = passed(&socket).try_into().unwrap();
        fcntl_add_seals(&files[1], seals).unwrap();
        assert!(files.iter().all(|file| shared::testing::collapse(file) == 0));
        match offered.answer(false) {
            Answer::Accepted(_) => assert!(is_writer),
            Answer::Declined => assert!(!is_writer),
            Answer::Useless | Answer::Taken => panic!(),
        }
    }
}

#[test]
fn a_server_takes_no_segment_that_was_changed_before_it_has_looked() {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for change in 0..4 {
        let (socket, request) = asked();
        let mut offered = Offered::new(&request, &mut Vec::new(), false).unwrap();
        let [_, file]: [OwnedFd; 2] = passed(&socket).try_into().unwrap();
        match change {
            0 => {}
            // The pages that are pinned are no longer the file's.
            1 => fallocate(&file, hole, 0, SIZE as u64).unwrap(),
            2 => fallocate(&file, hole, SIZE as u64 - 1, 1).unwrap(),
            _ => assert_eq!(rustix::io::pwrite(&file, &[1], 4096), Ok(1)),
        }
        let own = Own::of(&file).unwrap();
        assert!(match offered.answer(false) {
            Answer::Accepted(_) => change == 0,
            Answer::Useless => change > 0,
            Answer::Declined | Answer::Taken => false,
        });
        drop(own);
    }
}

#[test]
fn one_of_two_processes_takes_the_answer_that_both_wait_for() {
    let (socket, request) = asked();
    let mut offered = Offered::new(&request, &mut Vec::new(), false).unwrap();
    let [_, file]: [OwnedFd; 2] = passed(&socket).try_into().unwrap();
    let own = Own::of(&file).unwrap();
    let child = fork::testing::fork(|| matches!(offered.answer(false), Answer::Accepted(_)));
    assert!(child.succeeded());
    // The client has been told, and goes on with the other one.
    own.word(Word::Produced).store(1, SeqCst);
    assert!(matches!(offered.answer(false), Answer::Taken));
}

#[test]
fn whoever_goes_away_in_the_midst_costs_the_other_nothing() {
    elsewhere(|| {
        let before = descriptors();
        for _ in 0..20 {
            // A client, with what was passed to it unread.
            let (socket, request) = asked();
            let mut offered = Offered::new(&request, &mut Vec::new(), false).unwrap();
            drop(socket);
            assert!(matches!(offered.answer(false), Answer::Declined));
            // A server that has not come, or has not said so.
            drop(Asked::new(&mut Vec::new(), Trust::own()).unwrap());
            let mut request = Vec::new();
            let asked = Asked::new(&mut request, Trust::own()).unwrap();
            assert!(asked.end(MARK).is_none());
            // One that has died then.
            let asked = Asked::new(&mut request, Trust::own()).unwrap();
            drop(Offered::new(&request.split_off(MARK.len() + ASKED), &mut Vec::new(), false).unwrap());
            drop(asked);
        }
        assert_eq!(descriptors(), before);
    });
}

#[test]
fn who_has_no_descriptors_left_goes_on_without_memory_and_loses_none() {
    elsewhere(|| {
        let sockets = sockets();
        let before = descriptors();
        let limit = |most| {
            let maximum = getrlimit(Resource::Nofile).maximum;
            setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(most), maximum }).unwrap();
        };
        for free in 0..4 {
            let mut request = Vec::new();
            let asked = Asked::new(&mut request, Trust::own()).unwrap();
            let mut reply = Vec::new();
            let mut offered = Offered::new(&request, &mut reply, false).unwrap();
            let mut taken = Vec::new();
            limit(256);
            while let Ok(file) = rustix::io::dup(sockets.0.as_fd()) {
                taken.push(file);
            }
            taken.truncate(taken.len() - free);
            assert_eq!(asked.end(&reply).is_some(), free >= 2);
            let accepted = matches!(offered.answer(false), Answer::Accepted(_));
            assert_eq!(accepted, free >= 2);
            let fails = Offered::new(&request, &mut Vec::new(), false).is_none();
            assert!(fails, "its name has gone");
            drop((taken, offered));
            assert_eq!(descriptors(), before);
        }
    });
}

#[test]
fn a_program_that_has_few_descriptors_left_keeps_them() {
    elsewhere(|| {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(256), maximum }).unwrap();
        let mut taken = Vec::new();
        while taken.last().is_none_or(|file: &OwnedFd| file.as_raw_fd() < 256 - 64) {
            taken.push(std::fs::File::open("/dev/null").unwrap().into());
        }
        let share = |from: Trust, must: bool| {
            let mut request = Vec::new();
            let error = Asked::new(&mut request, from).err();
            assert_eq!(error.and_then(|e| e.raw_os_error()), (!must).then_some(libc::EMFILE));
            // Whatever a client says.
            let (_socket, mut request) = self::asked();
            request.truncate(MARK.len() + 2 * SECRET);
            request.extend_from_slice(&from.to_bytes());
            let mut reply = Vec::new();
            assert_eq!(Offered::new(&request, &mut reply, must).is_some(), must);
            assert_eq!(!reply.is_empty(), must);
        };
        share(Trust::own(), false);
        share(Trust::ANYBODY, true);
        let (_socket, request) = self::asked();
        assert!(Offered::new(&request, &mut Vec::new(), false).is_none());
        // Lower ones have become free, and there are as few all the same.
        if std::fs::metadata("/proc/self/fd").unwrap().len() > 0 {
            let more: Vec<_> = std::iter::from_fn(|| rustix::io::dup(&taken[0]).ok()).collect();
            taken.drain(..8);
            share(Trust::own(), false);
            share(Trust::ANYBODY, true);
            drop(more);
        }
    });
}

#[test]
fn who_goes_on_without_memory_and_not_with_software_iwarp_is_refused() {
    let sockets = sockets();
    let mut server = Iwarp::responder(sockets.1.as_raw_fd(), sharing(Sharing::May)).unwrap();
    let (_socket, private_data) = asked();
    let offer = iwarp::mpa::Offer { crc: false, ird: 1, ord: 1 };
    let request = iwarp::mpa::StartFrame::request(&offer, 2, &private_data).encode();
    let say = |bytes: &[u8]| socket::send(sockets.0.as_raw_fd(), &[IoVec::from_slice(bytes)]).unwrap();
    say(&request);
    assert!(!server.establish().unwrap() && !server.establish().unwrap(), "it waits");
    say(&[0xFF; 64]);
    assert!(server.establish().unwrap());
    assert_eq!(next(&mut server).unwrap_err().kind(), Kind::Protocol);
}

#[test]
fn a_name_that_leads_nowhere_is_software_iwarp() {
    let request = [&MARK[..], &[0xFF; ASKED]].concat();
    assert!(Offered::new(&request, &mut Vec::new(), false).is_none());
    for cut in 0..request.len() {
        assert!(Offered::new(&request[..cut], &mut Vec::new(), false).is_none());
    }
}

/// A ring of ours, the peer's end of it in our hands, and what it sees of ours.
fn watched(spins: bool) -> (Sockets, Rings, Own, Theirs) {
    let (own, seen) = Own::new().unwrap();
    let (peers, file) = Own::new().unwrap();
    (sockets(), Rings::new(own, Theirs::new(&file).unwrap(), spins), peers, Theirs::new(&seen).unwrap())
}

#[test]
fn a_long_message_begins_where_the_latest_one_ended_and_a_short_one_at_the_beginning() {
    // In a process of its own: how far a ring goes depends on how many are long.
    let child = fork::testing::fork(|| {
        let (sockets, mut rings, peer, seen) = watched(false);
        let bytes = vec![7; RING];
        let mut lies = |len: usize| {
            let produced = seen.get(Word::Produced);
            let sent = rings.send(sockets.0.as_raw_fd(), &[IoVec::from_slice(&bytes[..len])]).unwrap();
            peer.word(Word::Consumed).store(seen.get(Word::Produced), SeqCst);
            (sent, produced.wrapping_sub(seen.get(Word::Base)) as usize, seen.get(Word::Wide) != 0)
        };
        WIDE.store(0, Relaxed);
        assert_eq!(lies(5), (5, 0, false));
        let half = RING / 2;
        assert_eq!([lies(half), lies(LONG)], [(half, 0, true), (LONG, half, true)]);
        assert_eq!(lies(LONG - 1), (LONG - 1, 0, false));
        assert_eq!([lies(half), lies(LONG)], [(half, half + LONG, true), (LONG, LONG, true)]);
        // With others there, it uses fewer bytes of its ring.
        WIDE.fetch_add(1, Relaxed);
        let quarter = RING / 4;
        assert_eq!([lies(quarter), lies(LONG)], [(quarter, 2 * LONG, true), (LONG, 0, true)]);
        true
    });
    assert!(child.succeeded());
}

#[test]
fn no_more_connections_than_some_have_long_rings() {
    // In a process of its own: other tests have some.
    let child = fork::testing::fork(|| {
        let long = vec![7; RING];
        let sends = |(sockets, rings, ..): &mut (Sockets, Rings, Own, Theirs)| {
            rings.send(sockets.0.as_raw_fd(), &[IoVec::from_slice(&long)]).unwrap()
        };
        let left = WIDE_MOST - WIDE.load(Relaxed);
        let mut all: Vec<_> = (0..left).map(|_| watched(false)).collect();
        let wide = all.iter_mut().all(|one| sends(one) == RING);
        let narrow = sends(&mut watched(false)) == NARROW;
        all.pop();
        wide && narrow && sends(&mut watched(false)) == RING && sends(&mut watched(false)) == RING
    });
    assert!(child.succeeded());
}

#[test]
fn bytes_come_as_they_were_sent_through_rings_whose_length_changes() {
    let (a, to_b) = Own::new().unwrap();
    let (b, to_a) = Own::new().unwrap();
    let sockets = sockets();
    let (at_a, at_b) = (sockets.0.as_raw_fd(), sockets.1.as_raw_fd());
    let mut from = Rings::new(a, Theirs::new(&to_a).unwrap(), false);
    let mut to = Rings::new(b, Theirs::new(&to_b).unwrap(), false);
    let all: Vec<u8> = (0..8 * RING).map(|at| (at % 251) as u8).collect();
    let (mut sent, mut came, mut bytes) = (0, 0, vec![0; RING + 1]);
    let (mut widths, mut round) = ([false; 2], 0);
    while came < all.len() {
        round += 1;
        // The receiving end sleeps, or looks.
        assert!(if round % 3 == 0 { to.spin() } else { to.rest() || sent > came });
        let step = [5, 3 * NARROW, 100_001, 2 * RING][round % 4].min(all.len() - sent);
        if step > 0 {
            sent += from.send(at_a, &[IoVec::from_slice(&all[sent..sent + step])]).unwrap_or(0);
        }
        widths[usize::from(from.is_wide())] = true;
        // Sometimes all, sometimes a part.
        let most = if round % 5 == 0 { 70_000 } else { bytes.len() };
        while let Ok(n) = to.receive(at_b, &mut [IoVecMut::from_mut(&mut bytes[..most])]) {
            assert!(bytes[..n] == all[came..came + n]);
            came += n;
            if round % 5 == 0 {
                break;
            }
        }
    }
    assert_eq!(widths, [true; 2]);
}

#[test]
fn who_has_sent_all_waits_for_no_room_though_some_came_at_the_last_moment() {
    let (sockets, mut rings, peer, seen) = watched(false);
    let fd = sockets.0.as_raw_fd();
    let (long, over) = (vec![7; 2 * RING], AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                peer.word(Word::Consumed).store(seen.get(Word::Produced), SeqCst);
                peer.word(Word::Waits).fetch_add(4, SeqCst);
            }
        });
        let end = Instant::now() + Duration::from_secs(2);
        let mut stays = false;
        while !stays && Instant::now() < end {
            let mut left = long.len();
            while left > 0 {
                left -= rings.send(fd, &[IoVec::from_slice(&long[..left])]).unwrap_or(0);
            }
            stays = rings.wants_room() || seen.get(Word::WantsRoom) != 0;
        }
        over.store(true, Relaxed);
        assert!(!stays, "it would never rest");
    });
}

#[test]
fn a_child_that_is_killed_while_it_waits_for_room_leaves_its_parent_in_peace() {
    let (sockets, mut rings, peer, seen) = watched(false);
    let fd = sockets.0.as_raw_fd();
    let long = vec![7; 2 * RING];
    assert!(rings.rest());
    let child = fork::testing::fork(|| {
        let sent = rings.send(fd, &[IoVec::from_slice(&long)]);
        sent.is_ok_and(|sent| sent == RING) && rings.wants_room()
    });
    assert!(child.succeeded());
    peer.word(Word::Consumed).store(seen.get(Word::Produced), SeqCst);
    assert!(rings.rest(), "what it waited for is nothing to its parent");
}

#[test]
fn a_peer_that_takes_byte_after_byte_keeps_nobody() {
    let long = vec![7; 2 * RING];
    // On a busy machine the peer may not be fast enough to be waited for.
    for _ in 0..5 {
        let (sockets, mut rings, peer, seen) = watched(true);
        let fd = sockets.0.as_raw_fd();
        rings.send(fd, &[IoVec::from_slice(&long)]).unwrap();
        let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    let consumed = peer.word(Word::Consumed);
                    let full = seen.get(Word::Produced).wrapping_sub(consumed.load(Relaxed)) == RING as u64;
                    consumed.fetch_add(u64::from(full), SeqCst);
                    begun.store(true, Relaxed);
                }
            });
            while !begun.load(Relaxed) {
                std::thread::yield_now();
            }
            // While the last wait was in vain, the peer is not waited for.
            let most = (0..20).filter_map(|_| rings.send(fd, &[IoVec::from_slice(&long)]).ok()).max();
            over.store(true, Relaxed);
            assert!(most < Some(4096), "{most:?} bytes went out one by one, while others waited");
        });
    }
}

#[test]
fn a_peer_that_says_that_it_looks_and_does_not_is_woken_once_after_a_while() {
    let (_sockets, [mut a, mut b]) = shared();
    let readable = |qp: &Iwarp| wait::until(qp.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    let wakes = |qp: &mut Iwarp| {
        let until = Instant::now() + Duration::from_secs(10);
        while let Some(at) = qp.remind() {
            assert!(Instant::now() < until, "it reminds without end");
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
        }
    };
    for _ in 0..2 {
        b.post_recv(sink(100));
        assert!(b.poll().unwrap().is_none() && b.spin());
        assert_eq!(a.remind(), None, "there is nothing to take");
        send(&mut a, b"one");
        assert!(a.remind().is_some() && !readable(&b), "it may just be about to look");
        wakes(&mut a);
        assert!(readable(&b) && a.remind().is_none());
        assert_eq!(message(next(&mut b).unwrap()), b"one");
        assert!(b.rest() && !readable(&b), "the byte is gone");
        b.post_recv(sink(100));
        send(&mut a, b"two");
        assert!(readable(&b) && a.remind().is_none(), "it was woken");
        assert_eq!(message(next(&mut b).unwrap()), b"two");
    }
}

/// The bell that an end may sleep on, if there is one.
fn bell_of(end: &mut Iwarp) -> Option<Bell> {
    end.doze().map(|doze| match doze {
        Doze::Bell(bell) => bell,
        Doze::Stream(_) => panic!("its stream is memory"),
    })
}

/// Waits until the peer rings, or `limit` is over. Returns whether it rang.
fn rings_within(bell: &Bell, limit: Duration) -> bool {
    let before = Instant::now();
    bell.wait(limit);
    before.elapsed() < limit
}

#[test]
fn who_sleeps_on_a_bell_is_woken_by_it_and_by_nothing_else() {
    const LONG: Duration = Duration::from_secs(10);
    let (_sockets, [mut a, mut b]) = looking();
    let readable = |qp: &Iwarp| wait::until(qp.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    b.post_recv(sink(100));
    assert!(b.poll().unwrap().is_none() && bell_of(&mut b).is_none(), "a sleeps too");
    assert!(a.spin());
    for round in 0..3 {
        b.post_recv(sink(100));
        assert!(b.poll().unwrap().is_none());
        let bell = bell_of(&mut b).unwrap();
        assert!(!rings_within(&bell, Duration::from_millis(1)), "nobody has rung");
        // Rung before the sleep, which must end at once.
        send(&mut a, b"one");
        assert!(rings_within(&bell, LONG) && !readable(&b), "{round}");
        assert_eq!(message(next(&mut b).unwrap()), b"one");
    }
    b.post_recv(sink(100));
    assert!(b.poll().unwrap().is_none());
    let bell = bell_of(&mut b).unwrap();
    std::thread::scope(|scope| {
        let sleeps = scope.spawn(move || rings_within(&bell, LONG));
        std::thread::sleep(Duration::from_millis(20));
        send(&mut a, b"two");
        assert!(sleeps.join().unwrap());
    });
    assert!(bell_of(&mut b).is_none(), "there is something");
    assert_eq!(message(next(&mut b).unwrap()), b"two");
}

#[test]
fn who_never_looks_sleeps_on_a_bell_though_its_peer_sleeps_too() {
    let (_sockets, [mut a, mut b]) = shared();
    let readable = |qp: &Iwarp| wait::until(qp.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    a.post_recv(sink(100));
    assert!(a.poll().unwrap().is_none() && a.rest());
    for _ in 0..3 {
        b.post_recv(sink(100));
        assert!(b.poll().unwrap().is_none());
        let bell = bell_of(&mut b).unwrap();
        send(&mut a, b"one");
        assert!(rings_within(&bell, Duration::from_secs(10)) && !readable(&b));
        assert_eq!(message(next(&mut b).unwrap()), b"one");
        assert!(a.rest());
    }
}

#[test]
fn who_has_slept_on_a_bell_in_vain_waits_for_its_descriptor() {
    let (sockets, [mut a, mut b]) = shared();
    let readable = |qp: &Iwarp| wait::until(qp.fd(), wait::IN, Some(Duration::ZERO), None).unwrap();
    assert!(a.spin());
    b.post_recv(sink(100));
    assert!(b.poll().unwrap().is_none() && bell_of(&mut b).is_some());
    assert!(bell_of(&mut b).is_none() && b.rest());
    send(&mut a, b"one");
    assert!(readable(&b), "by a byte from here on");
    assert_eq!(message(next(&mut b).unwrap()), b"one");
    b.post_recv(sink(100));
    assert!(b.poll().unwrap().is_none() && bell_of(&mut b).is_some(), "that was another wait");
    // The end of the connection does not ring.
    drop(sockets.0);
    assert!(bell_of(&mut b).is_none() && b.rest() && readable(&b));
    assert!(next(&mut b).is_err());
}

#[test]
fn the_peer_is_told_how_many_others_are_served() {
    let (_sockets, [mut a, mut b]) = shared();
    assert_eq!(a.company(), 0);
    b.tell_company(3);
    assert_eq!((a.company(), b.company()), (3, 0));
    a.tell_company(u32::MAX);
    assert_eq!(b.company(), u32::MAX);
}

/// Of many short sleeps with pauses in bad places, the peer ends each long before its time is over.
#[test]
fn no_wake_up_is_lost() {
    const LIMIT: Duration = Duration::from_secs(5);
    const ROUNDS: u32 = 5_000;
    /// Any numbers will do.
    struct Dice(u32);
    impl Dice {
        fn below(&mut self, most: u32) -> u32 {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (self.0 >> 16) % most
        }
        fn pause(&mut self) {
            match self.below(16) {
                0 => std::thread::yield_now(),
                1..8 => (0..self.below(2000)).for_each(|_| std::hint::spin_loop()),
                _ => {}
            }
        }
    }
    fn take(qp: &mut Iwarp, dice: &mut Dice) {
        let begun = Instant::now();
        if dice.below(2) == 0 {
            qp.spin();
        }
        loop {
            if let Some(completion) = qp.poll().unwrap() {
                if matches!(completion, Completion::Received { .. }) {
                    assert_eq!(message(completion), b"ball");
                    break;
                }
                continue;
            }
            dice.pause();
            let bell = if dice.below(4) > 0 { bell_of(qp) } else { None };
            match bell {
                Some(bell) => {
                    dice.pause();
                    bell.wait(LIMIT);
                }
                None if qp.rest() => {
                    dice.pause();
                    let _ = wait::until(qp.fd(), wait::IN, Some(LIMIT), None).unwrap();
                }
                None => {}
            }
            assert!(begun.elapsed() < LIMIT, "it was not woken");
        }
        qp.post_recv(sink(100));
    }
    for (_sockets, [mut a, mut b]) in [looking(), shared()] {
        a.post_recv(sink(100));
        b.post_recv(sink(100));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut dice = Dice(1);
                for _ in 0..ROUNDS {
                    take(&mut b, &mut dice);
                    dice.pause();
                    send(&mut b, b"ball");
                }
            });
            let mut dice = Dice(2);
            for _ in 0..ROUNDS {
                send(&mut a, b"ball");
                take(&mut a, &mut dice);
                dice.pause();
            }
        });
    }
}

#[test]
fn what_is_shared_leaves_the_program_mappings_for_itself() {
    // In a process of its own: other tests would find none left.
    let child = fork::testing::fork(|| {
        let mut all = Vec::new();
        let refused = loop {
            match Own::new() {
                Ok((own, _)) => all.push(own),
                Err(error) => break error,
            }
        };
        let most = all.len();
        all.pop();
        let again = Own::new().is_ok();
        refused.raw_os_error() == Some(libc::ENOMEM) && (8192..40_000).contains(&most) && again
    });
    assert!(child.succeeded());
}

#[test]
fn what_the_peer_gave_before_its_connection_was_reset_is_taken() {
    let end = Instant::now() + Duration::from_secs(1);
    while Instant::now() < end {
        let (sockets, mut rings, peer, _seen) = watched(false);
        let (fd, begun) = (sockets.0.as_raw_fd(), AtomicBool::new(false));
        // Left unread, this makes the end of that socket reset the connection.
        socket::send(fd, &[IoVec::from_slice(b"x")]).unwrap();
        std::thread::scope(|scope| {
            let theirs = sockets.1;
            let (peer, begun) = (&peer, &begun);
            scope.spawn(move || {
                while !begun.load(Relaxed) {
                    std::thread::yield_now();
                }
                peer.word(Word::Produced).store(1, SeqCst);
                drop(theirs);
            });
            let mut byte = [0];
            let came = loop {
                let came = rings.receive(fd, &mut [IoVecMut::from_mut(&mut byte)]);
                begun.store(true, Relaxed);
                if !came.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
                    break came;
                }
            };
            assert_eq!(came.unwrap(), 1, "it was there");
        });
    }
}
