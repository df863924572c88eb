//! Streams of bytes for software iWARP: as TCP gives them to a socket, but in virtual time. A write is taken in part, a buffer
//! fills up, bytes arrive one by one, and the connection is lost at any byte.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use super::super::*;
use super::network::{Clock, Medium, Simulated, Terms, Time};
use crate::provider::iwarp::{Iwarp, Options};
use crate::provider::{Limits, QueuePair};
use crate::socket::simulated::{Socket, Stream};

/// The streams of one connection, both ways.
pub struct Streams {
    clock: Clock,
    random: Random,
    terms: Terms,
    /// To end 0 and to end 1.
    pipes: [Pipe; 2],
    wakes: Vec<(Time, usize)>,
    /// The connection is being set up: nothing takes time or goes wrong.
    starting: bool,
    /// One in this many reads and writes is short; 0: none.
    short: usize,
    segment: usize,
}

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<(Time, Vec<u8>)>,
    count: usize,
    last: Time,
    /// When the end of the stream comes, and whether it is an error.
    end: Option<(Time, bool)>,
    /// The sender waits for room.
    full: bool,
    /// The receiver no longer looks.
    deaf: bool,
}

struct Half {
    end: usize,
    streams: Arc<Mutex<Streams>>,
}

impl Streams {
    fn finish(&mut self, to: usize, error: bool) {
        let at = self.pipes[to].last.max(self.clock.load(Relaxed) + 1);
        if self.pipes[to].end.is_none() {
            self.pipes[to].end = Some((at, error));
            self.wakes.push((at, to));
        }
    }
}

impl Medium for Streams {
    fn wakes(&mut self) -> Vec<(Time, usize)> {
        std::mem::take(&mut self.wakes)
    }

    fn cut(&mut self) {
        for to in 0..2 {
            if self.pipes[to].end.is_none() {
                let left = self.random.below(self.pipes[to].bytes.len() + 1);
                self.pipes[to].bytes.truncate(left);
                let some = self.random.next() as usize;
                if let Some((_, last)) = self.pipes[to].bytes.back_mut() {
                    last.truncate(1 + some % last.len());
                }
                let error = some.is_multiple_of(3);
                self.finish(to, error);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.pipes.iter().all(|pipe| pipe.deaf || pipe.bytes.is_empty())
    }
}

impl Stream for Half {
    fn room(&mut self) -> io::Result<usize> {
        let streams = &mut *self.streams.lock().unwrap();
        let pipe = &mut streams.pipes[1 - self.end];
        if pipe.deaf || pipe.end.is_some() {
            // TCP hears of it later, or at once.
            return if streams.random.below(2) == 0 {
                Err(io::ErrorKind::BrokenPipe.into())
            } else {
                Ok(usize::MAX)
            };
        }
        if streams.starting {
            return Ok(usize::MAX);
        }
        let room = streams.terms.window.max(4000).saturating_sub(pipe.count);
        if room == 0 {
            pipe.full = true;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if streams.short > 0 && streams.random.below(streams.short) == 0 {
            // Room comes later.
            let now = streams.clock.load(Relaxed);
            streams.wakes.push((now + 1000, self.end));
            return match streams.random.below(4) {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                1 => Ok(1),
                _ => Ok(room.min(1 + streams.random.below(3000))),
            };
        }
        // A write that takes less than it was given is followed by another one when there is room again.
        pipe.full = true;
        Ok(room)
    }

    fn put(&mut self, bytes: Vec<u8>) {
        let streams = &mut *self.streams.lock().unwrap();
        let to = 1 - self.end;
        let Terms { latency, jitter, .. } = streams.terms;
        let delay = if streams.starting { 0 } else { latency + streams.random.next() % (jitter + 1) };
        let pipe = &mut streams.pipes[to];
        if bytes.is_empty() || pipe.deaf || pipe.end.is_some() {
            return;
        }
        pipe.last = pipe.last.max(streams.clock.load(Relaxed) + delay);
        pipe.count += bytes.len();
        streams.wakes.push((pipe.last, to));
        pipe.bytes.push_back((pipe.last, bytes));
    }

    fn get(&mut self, most: usize) -> io::Result<Vec<u8>> {
        let streams = &mut *self.streams.lock().unwrap();
        let now = streams.clock.load(Relaxed);
        let short = streams.short > 0 && streams.random.below(streams.short) == 0;
        let most = if short { most.min(1 + streams.random.below(most.min(100))) } else { most };
        let pipe = &mut streams.pipes[self.end];
        let mut got = Vec::new();
        while got.len() < most
            && let Some((at, bytes)) = pipe.bytes.front_mut()
            && *at <= now
        {
            let some = bytes.len().min(most - got.len());
            got.extend(bytes.drain(..some));
            if bytes.is_empty() {
                pipe.bytes.pop_front();
            }
        }
        pipe.count -= got.len();
        if !got.is_empty() {
            if std::mem::take(&mut pipe.full) {
                streams.wakes.push((now, 1 - self.end));
            }
            // Like a descriptor that is still readable.
            if pipe.bytes.front().is_some_and(|(at, _)| *at <= now)
                || pipe.end.is_some_and(|(at, _)| at <= now)
            {
                streams.wakes.push((now + 1, self.end));
            }
            return Ok(got);
        }
        match pipe.end {
            Some((at, error)) if at <= now => {
                if error {
                    Err(io::ErrorKind::ConnectionReset.into())
                } else {
                    Ok(Vec::new())
                }
            }
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn unacknowledged(&self) -> usize {
        self.streams.lock().unwrap().pipes[1 - self.end].count
    }

    fn segment(&self) -> usize {
        self.streams.lock().unwrap().segment
    }

    fn shutdown(&mut self) {
        let streams = &mut *self.streams.lock().unwrap();
        let error = streams.random.below(4) == 0;
        streams.finish(1 - self.end, error);
        streams.pipes[self.end].deaf = true;
        streams.pipes[self.end].bytes.clear();
    }
}

impl Simulated for Iwarp {
    fn receives(&self) -> usize {
        self.posted_receives()
    }

    fn exposes(&self, handle: Handle) -> bool {
        Iwarp::exposes(self, handle)
    }

    fn exposures(&self) -> usize {
        Iwarp::exposures(self)
    }

    // Its handles are numbers, which never run out, and go away when told to.
    fn run_out(&mut self, _left: (u32, u32)) {}

    fn jam(&mut self) {}

    fn is_jammed(&self) -> bool {
        false
    }
}

/// An established connection of software iWARP: its medium, and the device and the socket of each end. `said`: the private data
/// of both.
pub fn connect(
    clock: Clock,
    seed: u64,
    terms: Terms,
    said: [PrivateData; 2],
) -> (Arc<Mutex<Streams>>, [(Iwarp, Socket); 2]) {
    let mut random = Random(seed | 1);
    let short = random.pick(&[0, 2, 10, 100]);
    let segment = random.pick(&[536, 1448, 8948, 65_483]);
    let crc = random.below(4) > 0;
    let pipes = [Pipe::default(), Pipe::default()];
    let streams = Streams { clock, random, terms, pipes, wakes: Vec::new(), starting: true, short, segment };
    let streams = Arc::new(Mutex::new(streams));
    let sockets = [0, 1].map(|end| Socket::new(Box::new(Half { end, streams: streams.clone() })));
    let Limits { read_depth, .. } = terms.limits;
    let options = |end: usize| Options {
        crc,
        ird: read_depth as u16,
        ord: read_depth as u16,
        private_data: said[end].encode().to_vec(),
        ..Options::default()
    };
    let mut client = Iwarp::initiator(sockets[0].0, options(0)).unwrap();
    let mut server = Iwarp::responder(sockets[1].0, options(1)).unwrap();
    let mut tries = 0;
    while !(server.establish().unwrap() & client.establish().unwrap()) {
        tries += 1;
        assert!(tries < 1000, "the connection is not established");
    }
    streams.lock().unwrap().starting = false;
    let [first, second] = sockets;
    (streams, [(client, first), (server, second)])
}
