//! Bad clients that offer long calls and do not let them be read, until all memory that one peer may take for such calls is
//! held. Others with a long call are served all the same, after a while; others with a short one, pulled or not, at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rpcrdma::wire::header::{self, Body, Versions};

use crate::peer::*;
use crate::programs::Server;

const CALL: u32 = 2 << 20;
/// Of 8 MiB one peer gets 3 for calls of more than 1 MiB, and `CROWD` connections take them: each is asked for 1 MiB. One
/// more may go on beyond that.
const SETTINGS: &[&str] = &["RPCRDMA_CRC=no", "RPCRDMA_MAX_CALL=2M", "RPCRDMA_MAX_PULLED=8M"];
const CROWD: usize = 4;

/// After this long a connection whose Reads have made no progress gives way; and how long a round of the server may take.
const STALL: Duration = Duration::from_secs(5);
const ROUND: Duration = Duration::from_secs(1);

/// What a bad client does when it is asked for the bytes of its call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Manner {
    Silent,
    /// All but the last byte comes.
    Almost,
    /// A byte now and then.
    Trickle,
    /// About 40 kB/s: an hour for 128 MiB.
    Slow,
    /// Other messages come instead, as fast as a good client sends.
    Chatter,
}

pub const MANNERS: &[Manner] =
    &[Manner::Silent, Manner::Almost, Manner::Trickle, Manner::Slow, Manner::Chatter];

/// A client that offers long calls.
pub struct Bad {
    peer: Peer,
    manner: Manner,
    /// It has been asked for bytes of its calls.
    asked: bool,
    frames: Vec<Frame>,
    /// What is left of the Read Response of a client that trickles.
    rest: VecDeque<u8>,
    ended: bool,
}

impl Bad {
    fn open(port: u16, manner: Manner) -> Bad {
        Bad::open_with(port, manner, CALL)
    }

    pub fn open_with(port: u16, manner: Manner, length: u32) -> Bad {
        let mut peer = Peer::open_with(port, false);
        for xid in 1..=3 {
            peer.send(&long_call(xid, &[segment(xid, length, 0)]));
        }
        Bad { peer, manner, asked: false, frames: Vec::new(), rest: VecDeque::new(), ended: false }
    }

    /// Takes its next step.
    pub fn step(&mut self) {
        if self.ended {
            return;
        }
        self.ended = self.peer.available(&mut self.frames);
        for frame in self.frames.drain(..) {
            let Frame::ReadRequest(request) = frame else { continue };
            match self.manner {
                Manner::Almost => {
                    self.peer.push(&answer(&request, &vec![1; request.size as usize], request.source_to > 0))
                }
                Manner::Trickle | Manner::Slow => {
                    self.rest.extend(answer(&request, &vec![1; request.size as usize], false));
                }
                _ => {}
            }
            self.asked = true;
        }
        match self.manner {
            Manner::Trickle | Manner::Slow => {
                let most = if self.manner == Manner::Slow { 2000 } else { 1 };
                let bytes: Vec<u8> = self.rest.drain(..most.min(self.rest.len())).collect();
                self.peer.push(&bytes);
            }
            // RDMA_DONE is discarded, however long it is.
            Manner::Chatter => {
                let done = [words(&[1, 1, 1, 3, 0, 0, 0]), vec![0; 4000]].concat();
                self.peer.send(&done);
            }
            _ => {}
        }
    }
}

/// The time that a call of the good client takes: median and maximum.
fn delays(server: &mut Server, bad: &mut [Bad], span: Duration) -> (Duration, Duration) {
    let begin = Instant::now();
    let mut delays = Vec::new();
    let mut beat = begin;
    while begin.elapsed() < span {
        let start = Instant::now();
        server.good.null();
        delays.push(start.elapsed());
        if beat.elapsed() > Duration::from_millis(50) {
            beat = Instant::now();
            bad.iter_mut().for_each(Bad::step);
        }
    }
    delays.sort();
    (delays[delays.len() / 2], delays[delays.len() - 1])
}

/// Makes a call whose `bytes` bytes are pulled, while the good client and the bad ones go on. Returns how long it took, and
/// the longest delay of the good client.
fn long_call_takes(server: &mut Server, bad: &mut [Bad], bytes: usize) -> (Duration, Duration) {
    let memory = rpc_call(9, SINK, &opaque(&vec![3; bytes]));
    let mut peer = Peer::open_with(server.port, false);
    peer.send(&long_call(9, &[segment(1, memory.len() as u32, 0)]));
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    loop {
        let (_, delay) = delays(server, bad, Duration::from_millis(50));
        longest = longest.max(delay);
        let mut frames = Vec::new();
        assert!(!peer.available(&mut frames), "the connection of a good client was closed: {frames:?}");
        for frame in frames {
            match frame {
                Frame::ReadRequest(read) => {
                    let bytes = &memory[read.source_to as usize..][..read.size as usize];
                    peer.push(&answer(&read, bytes, false));
                }
                Frame::Send { bytes, .. } => {
                    let header = header::decode(&bytes, Versions::ONE).expect("a valid header");
                    assert!(matches!(header.body, Body::Msg { .. }), "{header}");
                    return (start.elapsed(), longest);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(start.elapsed() < 3 * hang(), "a long call was not served within {:?}", start.elapsed());
    }
}

/// Runs `each` bad clients of each of these manners, and a long call beside them.
fn attack(manners: &[Manner], each: usize) -> Duration {
    let mut server = Server::start(SETTINGS);
    let (calm, _) = delays(&mut server, &mut [], ROUND / 2);
    let mut bad: Vec<Bad> = Vec::new();
    for manner in manners.repeat(each) {
        bad.push(Bad::open(server.port, manner));
        server.settle();
    }
    let (attacked, longest) = delays(&mut server, &mut bad, ROUND);
    assert!(bad.iter().any(|bad| bad.asked), "nothing was read");
    let (short, later) = long_call_takes(&mut server, &mut bad, 512 << 10);
    assert!(short < patient(ROUND), "a pulled call of 512 KiB waited {short:?}");
    let longest = longest.max(later);
    let (took, later) = long_call_takes(&mut server, &mut bad, (2 << 20) - 1000);
    let longest = longest.max(later);
    println!(
        "{} bad clients: a short call takes {attacked:?} ({calm:?} without them), {longest:?} at most; \
         a long one waited {took:?}; at most {} kB more were resident",
        bad.len(),
        server.peak()
    );
    assert!(longest < patient(ROUND), "a short call waited {longest:?}");
    assert!(server.peak() < 16 << 10, "{} kB", server.peak());
    let log = server.log();
    assert!(log.contains("answers RDMA Reads too slowly, and others wait"), "{log}");
    assert!(bad.iter().any(|bad| bad.ended), "no bad client was closed");
    drop(bad);
    server.end();
    took
}

#[test]
fn clients_that_do_not_answer_reads_hold_up_a_long_call_for_a_while_only() {
    for manner in [Manner::Silent, Manner::Trickle, Manner::Slow, Manner::Chatter] {
        let took = attack(&[manner], CROWD);
        assert!(took < STALL + patient(ROUND), "{manner:?}: {took:?}");
    }
}

/// Clients that have sent a part are not counted as slow while they wait for memory themselves; each gets its turn.
#[test]
fn a_crowd_of_such_clients_gives_way_two_by_two() {
    const PAIRS: u32 = 3;
    let took = attack(&[Manner::Silent, Manner::Almost], PAIRS as usize);
    assert!(took < STALL * PAIRS + patient(ROUND), "{took:?}");
}

/// Announcing calls costs nothing: a crowd that does not use up what one peer may take holds up nobody.
#[test]
fn slow_clients_do_not_hold_the_memory_of_calls_that_they_only_announce() {
    let mut server = Server::start(&["RPCRDMA_CRC=no", "RPCRDMA_MAX_CALL=64M", "RPCRDMA_MAX_PULLED=64M"]);
    let mut bad: Vec<Bad> = (0..8).map(|_| Bad::open_with(server.port, Manner::Slow, 48 << 20)).collect();
    for _ in 0..2 {
        delays(&mut server, &mut bad, ROUND / 10);
    }
    assert!(bad.iter().all(|bad| bad.asked), "all are pulled at once");
    let (took, _) = long_call_takes(&mut server, &mut bad, 8 << 20);
    assert!(took < STALL, "{took:?}");
    assert!(bad.iter().all(|bad| !bad.ended), "nobody had to give way");
    drop(bad);
    server.end();
}
