//! What adding a device takes, shown by something that is not really one: software iWARP on TCP sockets of its own, which
//! the program does not see, at another loopback address. For tests.
#![forbid(unsafe_code)]

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::iwarp::{self, Iwarp};
use super::{Accepted, Completion, Device, Knock, Limits, Listener, Options, Places, QueuePair};
use super::{Shortage, Traits, Way, WorkRequest};
use crate::error::{Error, Kind};
use crate::fork;
use crate::memory::{Areas, Memory, Region, Sink};
use crate::wire::{Handle, Segment};

static TRAITS: Traits = Traits {
    name: "toy",
    title: "toys",
    socket: false,
    one_event: false,
    locked_memory: false,
    own_memory: false,
    place_min: 0,
    loopback: true,
};

pub struct Toy;

impl Device for Toy {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn usable(&self, only: bool) -> Result<(), Error> {
        // Tests of other devices do not choose a device.
        if only { Ok(()) } else { Err(Error::new(Kind::Os(libc::ENODEV), "it is a toy")) }
    }

    fn connect(
        &self,
        way: Way,
        options: &Options,
        _: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error> {
        let Way::Address(to) = way else { return Err(way.unknown()) };
        let socket = TcpStream::connect(beside(to))?;
        let fd = socket.as_raw_fd();
        let inner = Iwarp::initiator(fd, iwarp::Options::of(options, fd))?;
        Ok(Box::new(ToyPair { inner, _socket: socket }))
    }

    fn listen(&self, places: Places, _only: bool) -> Result<Box<dyn Listener>, Error> {
        let sockets: Vec<SocketAddr> = places.addresses.into_iter().map(beside).collect();
        let socket = TcpListener::bind(&*sockets)?;
        socket.set_nonblocking(true)?;
        Ok(Box::new(Listening { socket, generation: fork::generation() }))
    }
}

fn beside(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(127, 0, 0, 77).into(), at.port())
}

struct Listening {
    socket: TcpListener,
    generation: u64,
}

impl Listener for Listening {
    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn forked(&self) -> bool {
        self.generation != fork::generation()
    }

    fn lost(&self) -> bool {
        false
    }

    fn places(&self) -> usize {
        1
    }

    fn accept(
        &mut self,
        options: &Options,
        _known: bool,
        _make_room: &mut dyn FnMut(Shortage, IpAddr) -> bool,
    ) -> Result<Knock, Error> {
        let (socket, peer) = match self.socket.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Knock::Nobody),
            Err(e) => return Err(e.into()),
        };
        let (fd, local) = (socket.as_raw_fd(), socket.local_addr().ok());
        let inner = Iwarp::responder(fd, iwarp::Options::of(options, fd))?;
        let device = Box::new(ToyPair { inner, _socket: socket });
        Ok(Knock::Accepted(Accepted { device, local, peer: Some(peer) }))
    }
}

struct ToyPair {
    inner: Iwarp,
    _socket: TcpStream,
}

impl QueuePair for ToyPair {
    fn establish(&mut self) -> Result<bool, Error> {
        self.inner.establish()
    }

    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn private_data(&self) -> &[u8] {
        self.inner.private_data()
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        self.inner.expose_source(region)
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        self.inner.expose_sink(sink)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        self.inner.invalidate(handle)
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        self.inner.detach(handle)
    }

    fn was_read(&self, handle: Handle) -> Option<bool> {
        self.inner.was_read(handle)
    }

    fn release_lent(&mut self) -> Result<usize, Error> {
        self.inner.release_lent()
    }

    fn post_recv(&mut self, sink: Sink) {
        self.inner.post_recv(sink)
    }

    fn post_recv_of(&mut self, memory: &Arc<Memory>, bytes: usize) -> Result<(), Error> {
        self.inner.post_recv_of(memory, bytes)
    }

    fn withdraw(&mut self) -> usize {
        self.inner.withdraw()
    }

    fn post(&mut self, request: WorkRequest) {
        self.inner.post(request)
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        self.inner.poll()
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.inner.flush()
    }

    fn nudge(&mut self) {
        self.inner.nudge()
    }

    fn probe(&mut self) -> Result<(), Error> {
        self.inner.probe()
    }

    fn claim(&mut self, answers: bool) -> bool {
        self.inner.claim(answers)
    }

    fn has_missed(&mut self) -> bool {
        self.inner.has_missed()
    }

    fn fd(&self) -> RawFd {
        self.inner.fd()
    }

    fn wants_write(&self) -> bool {
        self.inner.wants_write()
    }

    fn moved(&self) -> u64 {
        self.inner.moved()
    }

    fn taken(&self) -> u64 {
        self.inner.taken()
    }

    fn pulled(&self) -> u64 {
        self.inner.pulled()
    }

    fn close(&mut self) {
        self.inner.close()
    }

    fn unsent(&self) -> usize {
        self.inner.unsent()
    }
}

#[cfg(test)]
mod tests {
    use crate::sync::Mutex;
    use std::os::fd::IntoRawFd;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::config::{Config, Provider};
    use crate::driver::start::{self, START_TIMEOUT};
    use crate::driver::{Callee, Caller, Room, Server, Shared};
    use crate::wait;

    /// Serves the first connection that comes until it ends; returns how many calls came.
    fn serve(listener: &mut dyn Listener, config: &'static Config) -> usize {
        let options = start::options(config, &TRAITS);
        let Accepted { device, peer, .. } = loop {
            assert!(wait::until(listener.fd(), wait::IN, Some(START_TIMEOUT), None).unwrap());
            if let Knock::Accepted(accepted) = listener.accept(&options, false, &mut |_, _| false).unwrap() {
                break accepted;
            }
        };
        let server: Shared = Mutex::new(Server::new(device, peer, config).unwrap());
        let mut served = 0;
        while server.lock().unwrap().closed().is_none() {
            let request = server.lock().unwrap().receive();
            let Some(request) = request else {
                assert!(
                    wait::until(server.lock().unwrap().fd(), wait::IN, Some(START_TIMEOUT), None).unwrap()
                );
                continue;
            };
            let mut reply = server.message().unwrap();
            reply.extend(&request.message[0][..40]).unwrap();
            // This makes it a reply.
            reply[7] = 1;
            server.reply(request.id, reply.into()).unwrap();
            served += 1;
        }
        served
    }

    #[test]
    fn a_further_device_is_used_by_its_word_in_the_configuration() {
        let config: &'static Config = {
            let mut config = Config::default();
            config.apply_variable("RPCRDMA_PROVIDER".as_ref(), "toy".as_ref()).unwrap();
            Box::leak(Box::new(config))
        };
        assert_eq!(config.provider, Provider::Only("toy"));
        // The program's socket, on which nobody accepts.
        let program = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = program.local_addr().unwrap();
        assert!(start::may_serve(config).is_ok());
        assert!(
            start::may_accept(config)
                .unwrap_err()
                .text()
                .contains("RPCRDMA_PROVIDER=toy takes nothing but toys")
        );
        let device = start::listening(config).next().expect("it listens beside the socket");
        let mut listener = device.listen(Places { addresses: vec![to], interface: None }, true).unwrap();
        thread::scope(|scope| {
            let served = scope.spawn(|| serve(&mut *listener, config));
            // The client closes it.
            let fd = TcpListener::bind("127.0.0.1:0").unwrap().into_raw_fd();
            let client = start::open(fd, to, false, START_TIMEOUT, Room::Same, config, None);
            let client = client.map_err(|_| "refused").unwrap();
            assert_eq!(client.traits(), &TRAITS);
            client.null(&[0; 40], Instant::now() + Duration::from_secs(20), None).unwrap();
            client.shut(true);
            drop(client);
            assert_eq!(served.join().unwrap(), 1);
        });
    }
}
