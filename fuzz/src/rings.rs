//! The rings of shared memory, with a peer that follows the rules until it lies: any word of its segment may become anything.
//!
//! Until then what one end puts in comes out at the other, in order and complete, and an end that waits is woken.
//!
//! ```text
//! flags | pairs of an operation and its argument ..
//! ```

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;

use rpcrdma::fuzz::{IoVec, IoVecMut, Own, RING, Theirs, Word, width};
use rpcrdma::provider::local::Rings;

use crate::input::Input;

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut bench = Bench::new(input.byte());
    while !input.is_empty() {
        let operation = input.byte();
        bench.step(operation, &mut input);
    }
}

struct Bench {
    rings: Rings,
    socket: UnixStream,
    /// `None`: the peer has gone.
    peer: Option<UnixStream>,
    /// The segment that the peer writes, and ours as it sees it.
    theirs: Own,
    ours: Theirs,
    /// Bytes put in and taken out, each way.
    sent: u64,
    taken: u64,
    put: u64,
    received: u64,
    /// The wait from which the peer was woken, and the bell's count then.
    woken: u64,
    rung: u64,
    lied: bool,
}

/// How an end says that it waits: for a byte or for a bell, and which of its waits it is.
const BY_BYTE: u64 = 1;
const BY_BELL: u64 = 2;
const WAITS: u64 = BY_BYTE | BY_BELL;
const NEXT: u64 = 4;

/// The byte with this number on the way out, and on the way in.
fn out(number: u64) -> u8 {
    (number ^ number >> 8) as u8
}

fn inward(number: u64) -> u8 {
    (number.wrapping_mul(7) ^ number >> 9) as u8 | 1
}

impl Bench {
    fn new(flags: u8) -> Bench {
        let (own, fd) = Own::new().expect("a segment");
        let ours = Theirs::new(&fd).expect("a segment");
        let (theirs, fd) = Own::new().expect("a segment");
        let (socket, peer) = UnixStream::pair().expect("sockets");
        peer.set_nonblocking(true).expect("a socket");
        let mut bench = Bench {
            rings: Rings::new(own, Theirs::new(&fd).expect("a segment"), flags & 1 != 0),
            socket,
            peer: Some(peer),
            theirs,
            ours,
            sent: 0,
            taken: 0,
            put: 0,
            received: 0,
            woken: 0,
            rung: 0,
            lied: false,
        };
        if flags & 2 != 0 {
            assert!(bench.rings.spin());
        }
        bench
    }

    fn step(&mut self, operation: u8, input: &mut Input<'_>) {
        let amount = usize::from(input.byte()) * [1, 33, 129, 1025][usize::from(operation >> 6)];
        match operation % 12 {
            0 | 1 => self.send(amount, operation),
            2 | 3 => self.receive(amount, operation),
            4 => self.put(amount),
            5 => self.take(amount),
            // The peer waits, perhaps for room too.
            6 => {
                let waits = self.theirs.word(Word::Waits);
                let now = waits.load(SeqCst);
                let by = if operation & 0x40 != 0 { BY_BELL } else { BY_BYTE };
                let stops = now & WAITS != 0 && operation & 0x10 == 0;
                let next = if stops { now & !WAITS } else { (now & !WAITS).wrapping_add(NEXT) | by };
                waits.store(next, SeqCst);
                self.theirs.word(Word::WantsRoom).store(u64::from(operation & 0x20 != 0), SeqCst);
            }
            7 => self.wake(amount % 100),
            8 => {
                let _ = (self.rings.has_come(), self.rings.wants_room(), self.rings.drained());
                assert!(self.rings.unconsumed() <= RING as u64);
                assert!(self.lied || self.rings.unconsumed() == self.sent - self.taken);
            }
            9 => self.rest(operation),
            10 => self.lie(operation, input),
            _ if operation & 0xF0 == 0xF0 => self.peer = None,
            _ => self.hear(),
        }
        self.sane();
    }

    /// Checks that what our own segment says is true, whatever the other one says.
    fn sane(&self) {
        assert_eq!(self.ours.get(Word::Produced), self.sent);
        assert_eq!(self.ours.get(Word::Consumed), self.received);
        assert!(self.ours.get(Word::Base) <= self.sent);
        assert!(self.lied || self.sent - self.taken <= RING as u64);
    }

    fn send(&mut self, amount: usize, operation: u8) {
        let bytes: Vec<u8> = (0..amount as u64).map(|at| out(self.sent + at)).collect();
        // In pieces, some of them empty.
        let (first, rest) = bytes.split_at(amount / 3);
        let pieces = [IoVec::from_slice(first), IoVec::from_slice(&[]), IoVec::from_slice(rest)];
        let pieces = if operation & 0x10 != 0 { &pieces[..] } else { &[IoVec::from_slice(&bytes)] };
        let waits = self.theirs.word(Word::Waits).load(SeqCst);
        match self.rings.send(self.socket.as_raw_fd(), pieces) {
            Ok(sent) => {
                assert!(sent <= amount && (sent > 0 || amount == 0));
                self.sent += sent as u64;
                if sent > 0 {
                    self.must_wake(waits);
                }
            }
            Err(error) => self.refused(&error, amount),
        }
    }

    fn receive(&mut self, amount: usize, operation: u8) {
        const GUARD: usize = 16;
        let mut bytes = vec![0; amount + 2 * GUARD];
        let place = &mut bytes[GUARD..GUARD + amount];
        let waits = self.theirs.word(Word::Waits).load(SeqCst);
        let wants = self.theirs.word(Word::WantsRoom).load(SeqCst) != 0;
        let (first, rest) = place.split_at_mut(amount / 3);
        let got = if operation & 0x10 != 0 {
            let mut pieces =
                [IoVecMut::from_mut(first), IoVecMut::from_mut(&mut []), IoVecMut::from_mut(rest)];
            self.rings.receive(self.socket.as_raw_fd(), &mut pieces)
        } else {
            self.rings.receive(self.socket.as_raw_fd(), &mut [IoVecMut::from_mut(place)])
        };
        let end = match &got {
            Ok(n) => GUARD + n,
            Err(_) => GUARD,
        };
        let untouched = bytes[..GUARD].iter().chain(&bytes[GUARD + amount..]);
        assert!(
            untouched.chain(&bytes[end.min(GUARD + amount)..]).all(|byte| *byte == 0)
                || got.is_err() && self.lied
        );
        match got {
            Ok(0) => assert!(self.peer.is_none() || self.lied, "an end without an end"),
            Ok(n) => {
                assert!(n <= amount);
                if !self.lied {
                    let right = (self.received..)
                        .zip(&bytes[GUARD..end])
                        .all(|(number, byte)| *byte == inward(number));
                    assert!(right, "other bytes than were put in");
                    assert!(n == amount || self.received + n as u64 == self.put, "less than was there");
                }
                self.received += n as u64;
                if wants {
                    self.must_wake(waits);
                }
            }
            Err(error) => {
                let nothing = self.lied || self.received == self.put || amount == 0;
                assert!(nothing, "{error} though something is there");
                self.refused(&error, amount);
            }
        }
        // Bytes that were taken before a lie was seen are gone with the connection.
        self.received = if self.lied { self.ours.get(Word::Consumed) } else { self.received };
    }

    fn refused(&mut self, error: &std::io::Error, amount: usize) {
        match (error.kind(), error.raw_os_error()) {
            (ErrorKind::WouldBlock, _) => {}
            (ErrorKind::BrokenPipe, _) => assert!(self.peer.is_none() || self.lied),
            (ErrorKind::InvalidInput, _) => assert_eq!(amount, 0),
            (_, Some(libc::EPROTO)) => assert!(self.lied, "the truth is called a lie"),
            _ => assert!(self.peer.is_none(), "{error}"),
        }
        // How much was put in before a lie was seen is not reported.
        self.sent = if self.lied { self.ours.get(Word::Produced) } else { self.sent };
    }

    /// A peer that waited, and has not been woken from that wait, finds a byte in its socket, or hears the bell.
    fn must_wake(&mut self, waits: u64) {
        if waits & WAITS == 0 || waits == self.woken || self.lied {
            return;
        }
        self.woken = waits;
        let rung = self.ours.get(Word::Rung);
        let before = std::mem::replace(&mut self.rung, rung);
        if waits & BY_BELL != 0 {
            return assert_ne!(rung, before, "nobody has rung for the peer");
        }
        let Some(peer) = &mut self.peer else { return };
        let mut byte = [0; 1];
        let woken = peer.read(&mut byte).is_ok_and(|n| n == 1);
        assert!(woken, "nobody has woken the peer");
    }

    /// The peer puts bytes in.
    fn put(&mut self, amount: usize) {
        let used = (self.put.wrapping_sub(self.ours.get(Word::Consumed)) as usize).min(RING);
        if used == 0 && !self.lied {
            // The bytes may begin anywhere, in a ring of the other length.
            self.theirs.word(Word::Base).store(self.put, SeqCst);
            self.theirs.word(Word::Wide).store(amount as u64 & 1, SeqCst);
        }
        let wide = self.theirs.word(Word::Wide).load(SeqCst) != 0;
        let amount = amount.min(width(wide).saturating_sub(used));
        let bytes: Vec<u8> = (0..amount as u64).map(|at| inward(self.put + at)).collect();
        let base = self.theirs.word(Word::Base).load(SeqCst);
        self.theirs.fill((self.put.wrapping_sub(base), wide), &IoVec::from_slice(&bytes), 0, amount);
        self.put += amount as u64;
        if !self.lied {
            self.theirs.word(Word::Produced).store(self.put, SeqCst);
        }
    }

    /// The peer takes bytes out.
    fn take(&mut self, amount: usize) {
        let there = (self.ours.get(Word::Produced) - self.taken) as usize;
        let amount = amount.min(there);
        let mut bytes = vec![0; amount];
        let wide = self.ours.get(Word::Wide) != 0;
        if amount <= width(wide) {
            let number = self.taken.wrapping_sub(self.ours.get(Word::Base));
            self.ours.take((number, wide), &mut IoVecMut::from_mut(&mut bytes), 0, amount);
        }
        let right = (self.taken..).zip(&bytes).all(|(number, byte)| *byte == out(number));
        assert!(right || self.lied, "other bytes than were sent");
        self.taken += amount as u64;
        if !self.lied {
            self.theirs.word(Word::Consumed).store(self.taken, SeqCst);
        }
    }

    /// The peer wakes us, or sends bytes that it does not count.
    fn wake(&mut self, bytes: usize) {
        if bytes.is_multiple_of(2) {
            self.theirs.word(Word::Woken).fetch_add(bytes as u64, SeqCst);
        }
        if let Some(peer) = &mut self.peer {
            // A socket that is full takes none.
            let _ = peer.write(&vec![0; bytes]);
        }
    }

    /// An end that says that it may sleep has nothing to do, and has said that it waits.
    fn rest(&mut self, operation: u8) {
        if operation & 0x10 != 0 {
            assert!(self.rings.spin());
            return assert!(self.ours.get(Word::Waits) & WAITS == 0);
        }
        if self.rings.rest() {
            assert!(self.ours.get(Word::Waits) & 1 == 1);
            assert!(self.lied || self.received == self.put, "it sleeps with something there");
        }
    }

    fn lie(&mut self, operation: u8, input: &mut Input<'_>) {
        let words = [
            Word::Produced,
            Word::Base,
            Word::Wide,
            Word::Consumed,
            Word::Waits,
            Word::WantsRoom,
            Word::Woken,
        ];
        let word = self.theirs.word(input.one_of(&words));
        let by = u64::from(input.word());
        let value = match operation >> 4 & 3 {
            0 => by,
            1 => word.load(SeqCst).wrapping_add(by % (2 * RING as u64)),
            2 => word.load(SeqCst).wrapping_sub(by % (2 * RING as u64)),
            _ => by.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        };
        self.lied = true;
        word.store(value, SeqCst);
    }

    /// The peer reads what has woken it.
    fn hear(&mut self) {
        if let Some(peer) = &mut self.peer {
            let _ = peer.read(&mut [0; 64]);
        }
    }
}
