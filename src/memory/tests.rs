//! Blocks from their pools and back: what each type allows, who counts what, and which pages are kept.

use std::sync::Mutex;
use std::thread;

use super::*;

#[test]
fn no_huge_pages_are_made_of_segments_as_long_as_they_are_pinned() {
    use crate::fork::testing::fork;
    use shared::{SIZE, blank, testing::collapse};
    use std::fs::read_dir;
    // In a process of its own, whose descriptors nobody else counts.
    let child = fork(|| {
        let descriptors = || read_dir("/proc/self/fd").unwrap().count();
        let files = || [blank().unwrap(), blank().unwrap()];
        // It comes to have a pipe of its own, whose other end stays.
        drop(pins::hold(&files(), SIZE).unwrap());
        let before = descriptors();
        // More than go into a pipe.
        let all: Vec<_> = (0..60)
            .map(|_| {
                let files = files();
                let pins = pins::hold(&files, SIZE).unwrap();
                (files, pins)
            })
            .collect();
        assert!(all.iter().flat_map(|(files, _)| files).all(|file| collapse(file) == 0));
        let [one, other] = [0, 59].map(|at| all[at].0.each_ref().map(|file| file.try_clone().unwrap()));
        let some = [0, 1].map(|at| all[at].1.clone());
        // One for six.
        assert_eq!(descriptors() - before, 120 + 4 + 10);
        drop(all);
        // The first pipe is still there, the last one is not.
        assert!(one.iter().all(|file| collapse(file) == 0));
        let made = other.iter().map(collapse).sum::<usize>();
        if made == 0 {
            eprintln!("this kernel makes no huge pages of files in memory: nothing was shown");
        }
        drop((some, one, other));
        assert_eq!(descriptors(), before);
        // A program that closes what it does not know, and opens something else.
        let kept = pins::hold(&files(), SIZE).unwrap();
        for file in 3..400 {
            crate::socket::close(file);
        }
        let taken: Vec<_> = (0..400).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let again = files();
        let pins = pins::hold(&again, SIZE).unwrap();
        drop(kept);
        assert!(
            taken.iter().all(|file| file.metadata().is_ok()) && again.iter().all(|file| collapse(file) == 0)
        );
        drop(pins);
        true
    });
    assert!(child.succeeded());
}

#[test]
fn pins_leave_half_of_the_buffers_of_pipes_to_other_programs_of_the_user() {
    use crate::fork::testing::fork;
    use shared::{SIZE, blank};
    let child = fork(|| {
        // Root may have more.
        // SAFETY: three numbers; in a process of its own.
        unsafe { libc::setresuid(4325, 4325, 4325) };
        if crate::process::may_exceed_limits() {
            return true;
        }
        let hold = || pins::hold(&[blank().unwrap(), blank().unwrap()], SIZE);
        let mut one = hold().unwrap();
        let mut all = Vec::new();
        loop {
            match hold() {
                Ok(pins) => all.push(pins),
                Err(e) => {
                    assert_eq!(e.raw_os_error(), Some(libc::EAGAIN));
                    break;
                }
            }
            assert!(all.len() < 128 * 6);
        }
        let most = all.len();
        let whole = rustix::pipe::pipe().map(|(_, write)| rustix::pipe::fcntl_getpipe_size(write).unwrap());
        assert!(most > 500 && whole.unwrap() >= 64 << 10, "{most}");
        // One that stays, and others that come and go, hold no more than a pipe.
        drop(all);
        for _ in 0..2 * most {
            drop(std::mem::replace(&mut one, hold().unwrap()));
        }
        let again: Vec<_> = std::iter::from_fn(|| hold().ok()).collect();
        assert!(again.len() >= most - 6, "{} after {most}", again.len());
        true
    });
    assert!(child.succeeded());
}

#[test]
fn a_forked_child_counts_what_it_holds_itself() {
    use crate::fork::testing::fork;
    let memory = Memory::new(PAGE, PAGE, 4 << 20).of_peer(None);
    let connection = memory.connection(None, None);
    let received = |bytes| {
        let sink = connection.receive(bytes, bytes).unwrap();
        assert!(sink.iovec(0, bytes).is_some());
        sink
    };
    let pulls = || {
        let staging = memory.staging(64 << 20, None).unwrap();
        memory.may_pull(&staging, 1 << 20, true).then_some(staging)
    };
    let full = received(RECEIVES_MAX + 1);
    // One Call goes on beyond the limit.
    let pulled: Vec<Sink> = std::iter::from_fn(pulls).collect();
    assert!(connection.is_full() && memory.is_crowded());
    let inherited = Mutex::new(Some((full, pulled)));
    let child = fork(|| {
        let begins = !connection.is_full() && !memory.is_crowded();
        let own = received(RECEIVES_SHARE + 1);
        let anew = pulls().is_some_and(|staging| !staging.block.charge.as_ref().unwrap().leads.load(Relaxed));
        // What it holds of its parent's counts as nothing when it is dropped.
        drop(inherited.lock().unwrap().take());
        let counted = connection.own_received() == RECEIVES_SHARE + 1;
        drop(own);
        begins && anew && counted && connection.own_received() == 0 && connection.received.bytes() == 0
    });
    assert!(child.succeeded());
    assert!(connection.is_full() && memory.is_crowded());
}

#[test]
fn a_forked_child_does_not_wait_for_a_thread_that_looks_up_a_peer() {
    use std::sync::mpsc;
    let memory = Memory::new(4096, 4096, 64 << 20);
    let peer = Some(IpAddr::from([10, 0, 0, 1]));
    let held = memory.peers.lock();
    let forks = || {
        let child = crate::fork::testing::fork(|| {
            let (found, is_found) = mpsc::channel();
            let memory = memory.clone();
            thread::spawn(move || found.send(memory.of_peer(peer)).is_ok());
            is_found.recv_timeout(std::time::Duration::from_secs(5)).is_ok()
        });
        child.succeeded()
    };
    let succeeded = thread::scope(|scope| scope.spawn(forks).join().unwrap());
    drop(held);
    assert!(succeeded);
}

#[test]
fn a_loan_is_over_when_the_last_clone_is_gone() {
    let mut program = Program::new(b"program");
    let region = program.source();
    assert!(region.is_lent() && region[..] == *b"program");
    let part = region.slice(3, 4);
    drop(region);
    assert!(part.is_lent() && part[..] == *b"gram" && !program.is_back());
    let copy = part.owned().unwrap();
    drop(part);
    program.bytes().fill(b'!');
    assert!(!copy.is_lent() && copy[..] == *b"gram");
}

#[test]
fn a_lent_sink_is_written_in_place_and_frozen_by_its_last_holder() {
    let mut program = Program::new(&[0; 5000]);
    let sink = program.sink();
    let device = sink.part(4000, 1000);
    assert!(device.place(990, b"0123456789") && !device.place(991, b"0123456789"));
    assert_eq!(device.iovec(0, 1000).map(|iovec| iovec.len()), Some(1000));
    assert_eq!(sink.crc32c(0, 4990, 10), crc32c::crc32c(b"0123456789"));
    let device = device.into_region(10).expect_err("a part");
    let sink = sink.into_region(5000).expect_err("a part is left");
    drop(device);
    let region = sink.into_region(4995).expect("the last holder");
    assert!(region.is_lent() && region.len() == 4995 && region[4990..] == *b"01234");
    assert!(!program.is_back());
    drop(region);
    assert_eq!(program.bytes()[4989..], *b"\x000123456789");
}

#[test]
fn a_sink_of_our_own_is_frozen_too() {
    let sink = Buf::with_capacity(100).unwrap().into_sink(100);
    let device = sink.clone();
    assert!(device.place(0, b"abc"));
    let sink = sink.into_region(3).expect_err("a device holds it");
    drop(device);
    let region = sink.into_region(3).unwrap();
    assert!(!region.is_lent() && region[..] == *b"abc");
    let part = Buf::with_capacity(100).unwrap().into_sink(100).part(1, 99);
    assert!(part.into_region(3).is_err());
}

#[test]
fn lent_memory_is_neither_unmapped_nor_trimmed() {
    // A whole mapping with every byte in use, as our own blocks have.
    let mut mapping = Buf::with_capacity(4 * PAGE).unwrap();
    mapping.extend(&[7; 4 * PAGE]).unwrap();
    let start = mapping.as_mut_ptr();
    // SAFETY: the mapping lives on, and nobody looks at it before the sink is gone.
    let sink = unsafe { Sink::lend(start, 4 * PAGE) };
    assert!(sink.place(4 * PAGE - 1, &[8]));
    drop(sink.into_buf(1).expect_err("it cannot grow"));
    assert!(mapping[..4 * PAGE - 1].iter().all(|byte| *byte == 7) && mapping[4 * PAGE - 1] == 8);
}

#[test]
fn no_bytes_may_be_lent_from_nowhere() {
    // SAFETY: no byte is named.
    let region = unsafe { Region::lend(std::ptr::null(), 0) };
    assert!(region[..].is_empty() && region.iovec(0, 0).is_some());
}

const MIB: usize = 1 << 20;

/// Staging memory for a Call of `len` bytes, if `bytes` of it may be pulled.
fn pull(memory: &Memory, len: usize, bytes: usize) -> Option<Sink> {
    let staging = memory.staging(len, None).unwrap();
    memory.may_pull(&staging, bytes, false).then_some(staging)
}

fn peers(memory: &Memory) -> [Arc<Memory>; 3] {
    ["10.0.0.1", "10.0.0.2", "2001:db8::1"]
        .map(|at| memory.of_peer(Some(at.parse().unwrap())).connection(None, None))
}

#[test]
fn a_pulled_call_counts_what_was_asked_for() {
    let memory = Memory::new(4096, 4096, 64 * MIB);
    let one = &peers(&memory)[0];
    let many: Vec<Sink> = (0..100).map(|_| one.staging(1 << 30, None).unwrap()).collect();
    assert!(one.staged.bytes() == 0 && !one.is_crowded());
    assert!(one.may_pull(&many[0], MIB, false) && one.may_pull(&many[0], 10, false));
    assert_eq!((one.staged.bytes(), one.peer.bytes()), (MIB + 10, MIB + 10));
    let call = many.into_iter().next().unwrap().into_buf(MIB).unwrap().freeze();
    let part = call.slice(0, 0);
    drop(call);
    assert_eq!(memory.staged.bytes(), MIB + 10, "a slice holds the block");
    drop(part);
    assert_eq!((memory.staged.bytes(), one.peer.bytes()), (0, 0));
}

#[test]
fn neither_long_calls_nor_one_peer_take_all_memory_of_pulled_calls() {
    let memory = Memory::new(4096, 4096, 64 * MIB);
    let [one, two, six] = peers(&memory);
    let mut held: Vec<Sink> = std::iter::from_fn(|| pull(&one, 8 * MIB, MIB)).collect();
    assert_eq!(held.len(), 24, "half of three quarters");
    assert!(one.is_crowded() && !two.is_crowded());
    held.extend(std::iter::from_fn(|| pull(&two, 8 * MIB, MIB)));
    assert_eq!(held.len(), 48, "three quarters");
    assert!(two.is_crowded() && six.is_crowded() && pull(&six, 8 * MIB, 1).is_none());
    // A quarter is for short ones, and half of it for those of one peer.
    let short: Vec<Sink> = std::iter::from_fn(|| pull(&one, SHORT, MIB)).collect();
    assert_eq!(short.len(), 8);
    let others: Vec<Sink> = std::iter::from_fn(|| pull(&six, SHORT, MIB)).collect();
    assert_eq!(others.len(), 8);
    held.truncate(20);
    assert!(pull(&six, 8 * MIB, 4 * MIB).is_some() && pull(&one, 8 * MIB, 4 * MIB).is_none());
}

#[test]
fn one_call_goes_on_beyond_the_limit_and_takes_no_room_of_others() {
    let memory = Memory::new(4096, 4096, 8 * MIB);
    let [one, two, six] = peers(&memory);
    let [first, second] = [&one, &two].map(|peer| pull(peer, 64 * MIB, 3 * MIB).unwrap());
    // Both are half here, and there is room for neither.
    assert!(!two.may_pull(&second, MIB, false), "another one comes before it");
    assert!(one.may_pull(&first, MIB, true));
    assert!(!two.may_pull(&second, MIB, true));
    for _ in 0..60 {
        assert!(one.may_pull(&first, MIB, true));
    }
    assert_eq!(memory.staged.bytes(), 6 * MIB);
    assert!(pull(&six, SHORT, MIB).is_some());
    let whole = first.into_buf(64 * MIB).unwrap().freeze();
    assert!(!two.may_pull(&second, MIB, true), "until the program has taken it");
    drop(whole);
    assert!(two.may_pull(&second, 4 * MIB, true) && two.may_pull(&second, 40 * MIB, true));
    drop(second);
    assert!(memory.staged.bytes() == 0 && !memory.staged.led.load(Relaxed));
}

#[test]
fn addresses_of_one_network_are_one_peer_and_gone_peers_are_forgotten() {
    let memory = Memory::new(4096, 4096, MIB);
    let of = |at: &str| memory.of_peer(Some(at.parse().unwrap())).peer.clone();
    let same = |a: &str, b: &str| {
        Arc::ptr_eq(&of(a).clone(), &of(b)) || {
            let held = of(a);
            Arc::ptr_eq(&held, &of(b))
        }
    };
    assert!(same("2001:db8::1", "2001:db8::ffff:1") && !same("2001:db8::1", "2001:db8:0:1::1"));
    assert!(same("192.0.2.1", "::ffff:192.0.2.1") && !same("192.0.2.1", "192.0.2.2"));
    assert!(!Arc::ptr_eq(&memory.of_peer(None).peer, &memory.of_peer(None).peer));
    for at in 0..10_000u32 {
        memory.of_peer(Some(std::net::Ipv4Addr::from(at).into()));
    }
    assert!(memory.peers.lock().len() < 100);
}

#[test]
fn a_header_takes_a_page_however_long_the_receives_are() {
    for receive in [1024, 4096, 65_536] {
        let memory = Memory::new(receive, 1 << 20, 1 << 20);
        assert_eq!(memory.header().unwrap().capacity(), PAGE);
        assert!(memory.slab().unwrap().capacity() >= receive);
    }
}

#[test]
fn idle_blocks_for_receives_are_bounded_in_number_and_bytes() {
    for (receive, idle) in [(1, 1024), (4096, 1024), (64 << 10, 64), (256 << 10, 16), (32 << 20, 1)] {
        let memory = Memory::new(receive, 4096, 0);
        let blocks: Vec<Buf> = (0..idle + 2).map(|_| memory.slab().unwrap()).collect();
        assert!(blocks.iter().all(|block| block.capacity() >= receive));
        drop(blocks);
        assert_eq!(memory.slab.idle.lock().unwrap().len(), idle, "{receive}");
        assert!(memory.slab.take_hot().is_some(), "and one beside");
    }
}

#[test]
fn a_reply_chunk_counts_as_far_as_it_was_written() {
    let memory = Memory::new(4096, 64 << 20, 0);
    let (first, other) = (memory.connection(None, None), memory.connection(None, None));
    // Exposing costs nothing: many calls have room for long replies, here and elsewhere.
    let areas: Vec<Sink> = (0..100).map(|_| first.reply_area(64 << 20).unwrap()).collect();
    assert!(first.has_room(usize::MAX) && first.own.bytes() == 0);
    for (at, area) in areas.iter().enumerate().take(4) {
        assert!(first.has_room(1) && other.has_room(1), "{at}");
        assert!(area.place(10, b"abc") && area.part(1000, 1000).iovec(0, 1000).is_some());
        assert!(area.place((64 << 20) - 3, b"abc") && area.place(0, b"abc"));
    }
    // A connection that holds nothing goes on all the same, with one call.
    assert!(!first.has_room(1) && other.has_room(1 << 30));
    assert!(first.crowd().starts_with("268435456 bytes of replies"), "{}", first.crowd());
    let little = other.reply_area(10).unwrap();
    assert!(little.place(0, b"x") && !other.has_room(1));
    areas[0].uncount();
    assert!(first.has_room(1) && other.has_room(1));
    drop((areas, little));
    assert_eq!((memory.exposed.bytes(), first.own.bytes(), other.own.bytes()), (0, 0, 0));
}

#[test]
fn on_an_adapter_a_reply_chunk_counts_whole() {
    let memory = Memory::new(4096, 4096, 0);
    let [first, other] = [(); 2].map(|()| memory.connection(Some(Slabs::new(4096, 1).unwrap()), None));
    assert!(first.has_room(1 << 30), "one of any length");
    let whole = first.reply_area(AREAS_MAX - 10).unwrap();
    assert!(first.has_room(10) && !first.has_room(11) && other.has_room(1 << 30));
    let region = whole.into_region(5).unwrap();
    assert!(!first.has_room(11), "until the program has taken it");
    drop(region);
    assert!(first.has_room(11) && memory.exposed.bytes() == 0);
}

#[test]
fn only_a_server_that_fills_much_more_than_one_reply_floods_us() {
    let memory = Memory::new(4096, FLOOD, 0);
    let [one, many, few] = [(); 3].map(|()| memory.connection(None, None));
    let fill = |memory: &Memory, len: usize| {
        let area = memory.reply_area(len).unwrap();
        // What counts is the highest byte, and only its page is here.
        assert!(area.place(len - 1, b"x"));
        area
    };
    let alone = fill(&one, FLOOD + 1);
    assert!(!one.is_flooded());
    let some = [fill(&few, FLOOD_SHARE / 2), fill(&few, FLOOD_SHARE / 2)];
    let others: Vec<Sink> = (0..5).map(|_| fill(&many, FLOOD_SHARE / 4)).collect();
    assert!(!one.is_flooded() && !few.is_flooded() && many.is_flooded());
    drop(alone);
    assert!(!many.is_flooded());
    drop((some, others));
}

#[test]
fn receives_count_long_messages_as_far_as_they_have_come() {
    let memory = Memory::new(64 << 10, 4096, 0);
    let [many, middle, few] = [(); 3].map(|()| memory.connection(None, None));
    let come = |memory: &Memory, len: usize| {
        let sink = memory.receive(64 << 10, len).unwrap();
        assert!(sink.place(len - 1, b"x"));
        sink
    };
    let short: Vec<Sink> = (0..100).map(|_| come(&few, PAGE)).collect();
    assert_eq!((few.own_received.bytes(), memory.received.bytes()), (0, 0));
    let held: Vec<Sink> = (0..5).map(|_| come(&many, 60_000)).collect();
    let one = come(&few, FLOOD_RECEIVES);
    assert_eq!((many.own_received.bytes(), few.own_received.bytes()), (300_000, FLOOD_RECEIVES));
    let send = come(&middle, FLOOD_RECEIVES + 1);
    assert!(!many.is_full());
    let all = memory.fill();
    assert!(many.is_full() && !few.is_full() && !many.is_flooded());
    let more: Vec<Sink> = (0..3).map(|_| memory.fill()).collect();
    assert!(many.is_flooded() && middle.is_flooded() && !middle.is_full() && !few.is_flooded());
    drop(send);
    // The message counts until the program has done with it.
    let message = held.into_iter().map(|sink| sink.into_buf(60_000).unwrap().freeze()).collect::<Vec<_>>();
    assert!(many.is_full());
    drop((message, short, one));
    assert!(!many.is_full() && many.own_received.bytes() == 0);
    drop((all, more));
    assert_eq!(memory.received.bytes(), 0);
}

/// `count` blocks with `bytes` bytes each.
fn blocks(pool: &Arc<Pool>, count: usize, bytes: usize) -> Vec<Buf> {
    let taken = (0..count).map(|_| {
        let mut buf = pool.take().unwrap();
        buf.extend(&vec![9; bytes]).unwrap();
        buf
    });
    taken.collect()
}

#[test]
fn more_blocks_are_idle_in_a_series_and_not_after_it() {
    const BLOCK: usize = 1 << 20;
    let pool = Pool::new(BLOCK, BLOCK, 4);
    let idle = || pool.idle.lock().unwrap().len();
    drop(blocks(&pool, 50, BLOCK));
    assert_eq!((idle(), pool.keeps()), (36, true), "no more than 36 MiB");
    let again = blocks(&pool, 37, 1);
    assert_eq!((idle(), pool.keeps()), (0, true));
    drop(again);
    assert_eq!((idle(), pool.keeps()), (36, true));
    let now = stats::tick();
    assert_eq!(pool.cool(now), Some(pool::SERIES));
    assert_eq!(pool.cool(now + 2 * pool::SERIES.as_nanos() as u64), None);
    assert_eq!((idle(), pool.keeps()), (4, false));
    // The latest one is taken first: it is in the caches.
    let mut twenty = blocks(&pool, 20, BLOCK);
    let latest = twenty.pop().unwrap();
    let at = latest.as_ptr();
    drop(twenty);
    drop(latest);
    let _hot = pool.take_hot();
    assert_eq!(pool.take().unwrap().block.raw.ptr.as_ptr().cast_const(), at);
    // Nobody calls `cool`: the next block that is given back has the same effect.
    assert!(pool.keeps() && idle() > 4);
    pool.set_long(1);
    drop(pool.take().unwrap());
    assert_eq!((idle(), pool.keeps()), (4, false));
    // Blocks given back after a while are not a series, nor are short ones.
    let some = blocks(&pool, 20, BLOCK);
    for block in some {
        pool.set_long(0);
        drop(block);
    }
    assert_eq!((idle(), pool.keeps()), (4, false));
    let short = Pool::new(PAGE, PAGE, 4);
    drop(blocks(&short, 20, 1));
    assert_eq!(short.idle().map(|idle| idle.len()), Some(4));
}

/// A server that claims more bytes of its reply than it wrote would show the program what was there before.
#[test]
fn a_reply_chunk_shows_one_server_nothing_of_what_another_one_wrote() {
    let memory = Memory::new(4096, 4 << 20, 0);
    let (first, other) = (memory.connection(None, None), memory.connection(None, None));
    let written = |memory: &Memory, at: usize, bytes: &[u8]| {
        let area = memory.reply_area(4 << 20).unwrap();
        assert!(area.place(at, bytes));
        area.into_region(4 << 20).unwrap()
    };
    let mut start = None;
    for at in [0, 5000, WARM - 6, WARM - 3, 3 << 20] {
        drop(written(&first, at, b"secret"));
        // A connection finds its own pages, and what it wrote there: nobody else needs memory.
        let again = written(&first, 100, b"");
        assert!(again[at..].starts_with(b"secret"));
        start = start.or(Some(again.as_ptr()));
        assert_eq!(start, Some(again.as_ptr()));
        drop(again);
        let next = written(&other, 7000, b"theirs");
        assert_eq!(start, Some(next.as_ptr()));
        assert!(next[..7000].iter().chain(&next[7006..]).all(|byte| *byte == 0), "{at}");
    }
    // Of two idle blocks each connection gets its own.
    let both = (written(&first, 0, b"first"), written(&other, 0, b"other"));
    drop(both);
    let (other, first) = (written(&other, 10, b""), written(&first, 10, b""));
    assert!(first.starts_with(b"first") && other.starts_with(b"other"));
}

/// A thread of the parent has the lock at the time of the fork, and is not in the child to release it.
#[test]
fn a_forked_child_does_not_wait_for_a_thread_that_had_the_idle_blocks() {
    let pool = Pool::new(PAGE, PAGE, 8);
    // One block goes where no lock is needed, the other to those behind the lock.
    let two = || [pool.take().unwrap(), pool.take().unwrap()];
    drop(two());
    let (tell, told) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    thread::scope(|scope| {
        let (blocks, inherited) = (&pool, Mutex::new(Some(two())));
        scope.spawn(move || {
            let _idle = blocks.idle.lock().unwrap();
            tell.send(()).unwrap();
            let _ = released.recv();
        });
        told.recv().unwrap();
        let child = crate::fork::testing::fork(|| {
            // SAFETY: touches no memory. It ends a child that hangs.
            unsafe { libc::alarm(20) };
            drop(inherited.lock().unwrap().take());
            let mut fresh = two();
            fresh.iter_mut().for_each(|fresh| fresh.extend(b"fresh").unwrap());
            drop(fresh);
            pool.take_for(7).is_ok()
        });
        let succeeded = child.succeeded();
        release.send(()).unwrap();
        assert!(succeeded);
    });
    assert!(pool.idle().is_some_and(|idle| idle.len() > 0));
}

#[test]
fn a_block_goes_back_to_its_pool_and_is_reused() {
    let pool = Pool::new(8192, 8192, 4);
    let mut buf = pool.take().unwrap();
    buf.extend(b"abc").unwrap();
    let at = buf.as_ptr();
    let region = buf.freeze();
    let part = region.slice(1, 2);
    drop(region);
    assert_eq!(&part[..], b"bc");
    drop(part);
    assert_eq!(pool.take().unwrap().block.raw.ptr.as_ptr().cast_const(), at);
}

#[test]
fn a_sink_is_taken_back_only_by_its_last_holder() {
    let sink = Buf::with_capacity(100).unwrap().into_sink(100);
    let device = sink.clone();
    assert!(device.place(98, b"xy"));
    assert!(!device.place(99, b"xy"));
    assert!(!device.place(usize::MAX, b"xy"));
    let sink = sink.into_buf(100).unwrap_err();
    drop(device);
    assert_eq!(&sink.into_buf(100).unwrap()[98..], b"xy");
}

#[test]
fn slabs_lie_in_one_mapping_and_come_back() {
    let slabs = Slabs::new(1000, 2).unwrap();
    let (start, len) = slabs.span();
    let mut first = slabs.take().unwrap();
    first.extend(&[7; 5]).unwrap();
    let second = slabs.take().unwrap();
    assert_eq!((len, slabs.left(), first.capacity()), (2 * PAGE, 0, PAGE));
    assert!(slabs.take().is_none() && first.as_ptr().addr() - start < len);
    // A block that grows leaves its place, and takes its bytes along.
    first.extend(&[8; PAGE]).unwrap();
    assert_eq!((first[4], first[5], slabs.left()), (7, 8, 1));
    let memory = Memory::new(1000, 1000, 1000).connection(Some(slabs.clone()), None);
    let mut third = memory.slab().unwrap();
    assert_eq!((third.as_ptr().addr(), slabs.left()), (start, 0));
    assert!(memory.message().unwrap().capacity() > PAGE, "an ordinary one");
    let sink = second.into_sink(PAGE);
    assert_eq!(sink.address(), start + PAGE);
    // With a pool for blocks that grow, a block that grows goes there.
    third.extend(&[9; 10]).unwrap();
    third.reserve(PAGE + 1).unwrap();
    assert!(third.block.pool.upgrade().is_some() && third[..] == [9; 10]);
    assert_eq!(slabs.left(), 1);
    drop((third, slabs, memory));
    drop(sink);
}

#[test]
fn growing_keeps_the_bytes() {
    let mut buf = Buf::with_capacity(10).unwrap();
    buf.extend(&[7; 4096]).unwrap();
    buf.extend(&[8; 1 << 20]).unwrap();
    assert_eq!((buf[4095], buf[4096], buf.len()), (7, 8, 4096 + (1 << 20)));
}

#[test]
fn pages_above_the_warm_part_are_given_back() {
    let pool = Pool::new(1 << 20, 8192, 1);
    let mut buf = pool.take().unwrap();
    buf.extend(&vec![9; 1 << 20]).unwrap();
    drop(buf);
    let mut buf = pool.take().unwrap();
    buf.set_len(1 << 20);
    assert_eq!((buf[0], buf[8191], buf[8192]), (9, 9, 0));
}

#[test]
fn long_messages_in_a_series_find_their_pages_and_keep_them_no_longer_than_that() {
    const LONG: usize = 100_000;
    let pool = Pool::new(1 << 20, 8192, 2);
    let used = |bytes: usize| {
        let mut buf = pool.take().unwrap();
        buf.extend(&vec![9; bytes]).unwrap();
        buf
    };
    // Looking uses a block too.
    let found = |at: usize| {
        let mut buf = pool.take().unwrap();
        buf.set_len(at + 1);
        let found = buf[at] == 9;
        let before = pool.set_long(0);
        drop(buf);
        pool.set_long(before);
        found
    };
    drop(used(LONG));
    assert!(found(16_383) && !found(LONG - 1), "one is no series: as much as all idle ones keep");
    drop(used(LONG));
    drop(used(LONG));
    assert!(pool.keeps());
    drop(used(10));
    // A short message beside it does not get its memory, nor does the next long one get that of the short one.
    let long = used(LONG);
    let short = used(10);
    drop(long);
    drop(short);
    let mut long = pool.take().unwrap();
    long.set_len(LONG);
    assert!(long[LONG - 1] == 9 && pool.keeps());
    drop(long);
    let now = stats::tick();
    assert_eq!(pool.cool(now), Some(pool::SERIES));
    assert_eq!(pool.cool(now + 2 * pool::SERIES.as_nanos() as u64), None);
    assert!(!pool.keeps() && found(8191) && !found(8192));
    // Nobody calls `cool`: the next block that is given back has the same effect.
    drop(used(LONG));
    drop(used(LONG));
    assert!(pool.keeps());
    pool.set_long(1);
    drop(used(10));
    assert!(!pool.keeps() && !found(16_384), "the series was over");
}

#[test]
fn pages_are_given_back_though_what_others_keep_is_no_number_of_pages() {
    let pool = Pool::new(1 << 20, 8192, 4);
    let (mut short, mut long) = (pool.take().unwrap(), pool.take().unwrap());
    short.extend(&[9; 8193]).unwrap();
    long.extend(&vec![9; 100_000]).unwrap();
    drop(short);
    // They are not a series.
    pool.set_long(0);
    drop(long);
    let mut long = pool.take().unwrap();
    long.set_len(100_000);
    assert!(long[8191] == 9 && long[99_999] == 0);
}

#[test]
fn one_long_message_finds_its_pages_where_no_other_keeps_any() {
    let pool = Pool::new(1 << 20, 8192, 4);
    let used = |pool: &Arc<Pool>| {
        let mut buf = pool.take().unwrap();
        buf.extend(&[9; 30_000]).unwrap();
        buf
    };
    let (first, second) = (used(&pool), used(&pool));
    drop(first);
    // They are not a series.
    pool.set_long(0);
    drop(second);
    let kept = |buf: &mut Buf| {
        buf.set_len(1 << 20);
        [0, 8191, 8192, 29_999, 4 * 8192].map(|at| buf[at] == 9)
    };
    let (mut second, mut first) = (pool.take().unwrap(), pool.take().unwrap());
    assert_eq!(kept(&mut first), [true, true, true, true, false], "four times 8192 bytes were there to keep");
    assert_eq!(kept(&mut second), [true, true, false, false, false], "of which little was left");
}

#[test]
fn ranges_outside_name_no_memory() {
    let sink = Buf::with_capacity(16).unwrap().into_sink(16);
    assert!(sink.iovec(0, 16).is_some());
    assert!(sink.iovec(1, 16).is_none());
    assert!(sink.iovec(usize::MAX, 2).is_none());
}

/// Address space may be limited: idle blocks take none from a message that arrives. In a child, since the pools of other tests
/// belong to the process too.
#[test]
fn where_there_is_no_memory_idle_blocks_are_given_back() {
    let given_back = || {
        let pool = Pool::new(PAGE, 16 * PAGE, 8);
        let long = [(); 3].map(|()| {
            let mut buf = pool.take().unwrap();
            buf.reserve(64 * PAGE).unwrap();
            buf
        });
        drop(long);
        let kept = pool.idle_bytes() >= 3 * 64 * PAGE;
        let mut buf = Buf::with_capacity(1).unwrap();
        // More than there is, whatever is given back.
        let refused = buf.reserve(1 << 48).is_err();
        kept && refused && pool.idle_bytes() == 0 && buf.reserve(2 * PAGE).is_ok()
    };
    assert!(crate::fork::testing::fork(given_back).succeeded());
}
