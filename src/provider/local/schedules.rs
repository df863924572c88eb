//! Schedules of two ends of shared memory, tried one after another: all bytes arrive, in order, and nobody sleeps for ever.
//! Reordering by processors is not tried: here both ends see a word as soon as it is written.
//!
//! Only a wake-up ends a sleep. If both ends sleep and nothing has woken either of them, a wake-up was lost, which the
//! timers of a connection would hide.
#![forbid(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::{spawn, yield_now};

use super::rings::{WIDE, WIDE_MOST};
use super::*;
use crate::memory::shared::{NARROW, Theirs};
use crate::memory::{IoVec, IoVecMut};
use crate::socket;
use crate::sync::in_schedules;

/// Which ends are asleep, or have finished: not seen by the schedule.
#[derive(Default)]
struct Sleepers {
    asleep: [AtomicBool; 2],
    /// Looks in vain by an end that sleeps while the other one does nothing.
    vain: AtomicU32,
}

impl Sleepers {
    fn sleep(&self, side: usize, is_woken: impl Fn() -> bool) {
        self.asleep[side].store(true, SeqCst);
        while !is_woken() {
            if self.asleep[1 - side].load(SeqCst) {
                assert!(self.vain.fetch_add(1, SeqCst) < 1000, "both ends sleep");
            }
            yield_now();
        }
        self.asleep[side].store(false, SeqCst);
        self.vain.store(0, SeqCst);
    }
}

/// One end.
struct End {
    side: usize,
    rings: Rings,
    socket: UnixStream,
    sleepers: Arc<Sleepers>,
}

/// What a side sends: each byte shows where it belongs, and whose it is.
fn stream(side: usize, bytes: usize) -> Vec<u8> {
    let part: Vec<u8> = (0..251).map(|number| number + side as u8).collect();
    part.repeat(bytes.div_ceil(part.len()))[..bytes].to_vec()
}

impl End {
    /// Sends this end's share of `bytes`, at most `most` at a time, and takes what the other one sends.
    fn run(mut self, bytes: [usize; 2], most: usize) {
        let fd = self.socket.as_raw_fd();
        let [out, coming] = [self.side, 1 - self.side].map(|side| stream(side, bytes[side]));
        let mut room = vec![0; most];
        let (mut sent, mut received) = (0, 0);
        while sent < out.len() || received < coming.len() {
            let mut moved = false;
            if sent < out.len() {
                let n = thread_rng().gen_range(1..=most).min(out.len() - sent);
                match self.rings.send(fd, &[IoVec::from_slice(&out[sent..sent + n])]) {
                    Ok(n) => (sent, moved) = (sent + n, true),
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            match self.rings.receive(fd, &mut [IoVecMut::from_mut(&mut room)]) {
                Ok(n) => {
                    assert!(n > 0, "the other end has gone");
                    assert!(room[..n] == coming[received..received + n], "bytes have changed");
                    (received, moved) = (received + n, true);
                }
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            if !moved {
                self.wait();
            }
        }
        assert_eq!(received, coming.len());
        self.sleepers.asleep[self.side].store(true, SeqCst);
        // The other one may not have taken all of it yet: the memory has to stay.
        while !self.sleepers.asleep[1 - self.side].load(SeqCst) || self.rings.unconsumed() > 0 {
            yield_now();
        }
    }

    /// Waits as a driver does when it has nothing to do.
    fn wait(&mut self) {
        match thread_rng().gen_range(0..4) {
            0 => drop(self.rings.spin()),
            1 => {
                if let Some(bell) = self.rings.doze() {
                    self.sleepers.sleep(self.side, || bell.has_rung());
                }
            }
            _ => {
                if self.rings.rest() {
                    // Readable, or the kernel says why not.
                    let fd = self.socket.as_raw_fd();
                    self.sleepers.sleep(self.side, || socket::peek(fd).is_ok());
                }
            }
        }
    }
}

/// Each end sends its share of `bytes`, at most `most` at a time.
fn exchange(bytes: [usize; 2], most: usize) {
    let sleepers = Arc::new(Sleepers::default());
    let (one, other) = UnixStream::pair().unwrap();
    let segments = [(); 2].map(|()| Own::new().unwrap());
    let theirs = [1, 0].map(|side: usize| Theirs::new(&segments[side].1).unwrap());
    let ends = segments.into_iter().zip(theirs).zip([one, other]).enumerate();
    let threads: Vec<_> = ends
        .map(|(side, (((own, _), theirs), socket))| {
            socket.set_nonblocking(true).unwrap();
            let end = End { side, rings: Rings::new(own, theirs, false), socket, sleepers: sleepers.clone() };
            spawn(move || end.run(bytes, most))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn short_messages_come_whoever_sleeps() {
    in_schedules(3000, || exchange([200, 200], 40));
}

/// An end that waits for room is woken too.
#[test]
fn more_than_a_ring_holds_comes_whoever_sleeps() {
    // No ring is long.
    WIDE.store(WIDE_MOST, SeqCst);
    in_schedules(1000, || exchange([3 * NARROW, 3 * NARROW], 2 * NARROW));
    // So much at once that the last part that the peer is told of is more than a ring holds.
    in_schedules(2000, || exchange([5 * NARROW, 0], 5 * NARROW));
}
