//! Shared memory between two processes of one host: software iWARP whose stream goes through rings of memory instead of a
//! TCP connection. The TCP connection stays: it names the connection, shows its end, and wakes whoever waits.
//!
//! # How two ends find each other
//! The TCP connection is made as usual. A client whose server has an address of this host listens at a Unix socket with a
//! random abstract name, and writes that name and a secret into the private data of its MPA Request, behind the words of RFC
//! 8797. Peers that do not know them ignore them. A server that does connects to the name, which exists only in this network
//! namespace of this host. There the server shows the client's secret and passes the segment of memory that it writes; in
//! the MPA Reply it sends a secret of its own. The client shows that secret and passes its own segment over the same Unix
//! connection, and sends a byte over TCP; the server answers with [`SHARED`], or with another byte if it cannot use what it
//! got. If any of this fails, the connection goes on as software iWARP at once: nobody waits for any step longer than for
//! the MPA startup.
//!
//! # Why that is safe
//! Whoever has shown the secrets has read both directions of the TCP connection. So the memory is shared with nobody but its
//! two ends, whoever they are: the same parties that would otherwise have read and written the bytes. Every user of the host
//! sees the names (`/proc/net/unix`), and nobody sees the secrets. Anybody else who connects to a name shows no secret, and
//! is ignored. Anybody who takes a name after its owner has gone is shown the secret of a connection that has ended, and a
//! segment into which nothing is ever written, since they cannot answer with the server's secret, which went over TCP. A
//! secret is 128 bits from getrandom(2), and good for one connection.
//!
//! `peer` says what somebody may do with the Unix sockets, `memory::shared` what the other end may do with the memory, and
//! `rings` what it may do with the numbers in it.
#![forbid(unsafe_code)]

use std::io;
#[cfg(feature = "tool")]
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::net::SocketAddrUnix;

use super::iwarp::{self, Iwarp};
use super::{Device, Options, QueuePair, Traits, Way};
use crate::error::{Error, Kind};
use crate::memory::Areas;
use crate::memory::shared::Own;
use crate::{process, socket};

mod peer;
mod rings;

use peer::{Listener, Peer, SECRET, Secret};
pub use rings::Rings;

/// What the layers above know about it.
pub static TRAITS: Traits = Traits {
    name: "local",
    title: "shared memory",
    socket: true,
    one_event: true,
    locked_memory: false,
    own_memory: false,
    place_min: 0,
    loopback: true,
};

/// Shared memory with a peer on this host that agrees; with any other, software iWARP, unless nothing but this may be used.
pub struct Local;

impl Device for Local {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    /// Unit tests look at what goes over sockets, unless they say otherwise.
    #[cfg(test)]
    fn usable(&self, only: bool) -> Result<(), Error> {
        if only { Ok(()) } else { Err(Error::new(Kind::Os(libc::ENODEV), "a unit test does not name it")) }
    }

    #[cfg(feature = "tool")]
    fn ready(&self, _options: &Options) -> Result<(), Error> {
        possible()
    }

    #[cfg(feature = "tool")]
    fn leads(&self, to: SocketAddr, _only: bool) -> Result<String, Error> {
        let here = to.ip().to_canonical();
        let own = || socket::local_addresses(None).iter().any(|at| at.ip().to_canonical() == here);
        if !here.is_loopback() && !own() {
            return Err(Error::new(Kind::Os(libc::ENODEV), "the address is none of this host's"));
        }
        possible().map(|()| String::new())
    }

    fn connect(
        &self,
        way: Way,
        options: &Options,
        _areas: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error> {
        let Way::Socket(fd) = way else { return Err(way.unknown()) };
        Ok(Box::new(Iwarp::initiator(fd, with(options, fd)?)?))
    }

    fn accept(&self, socket: RawFd, options: &Options) -> Result<Box<dyn QueuePair>, Error> {
        Ok(Box::new(Iwarp::responder(socket, with(options, socket)?)?))
    }
}

/// Whether memory can be shared here, tried between two ends in this process.
///
/// # Errors
/// What the system does not allow.
#[cfg(feature = "tool")]
fn possible() -> Result<(), Error> {
    let cannot = |what: &str, e: io::Error| {
        let e = Error::from(e);
        Error::new(e.kind(), format!("{what}: {e}"))
    };
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    let asked = Asked::new(&mut request).map_err(|e| cannot("a Unix socket with an abstract name", e))?;
    Own::new().map_err(|e| cannot("a sealed memfd", e))?;
    let lost =
        || Error::new(Kind::Os(libc::EPERM), "a memfd cannot be passed over a Unix socket, or not be mapped");
    let mut offered = Offered::new(&request, &mut reply).ok_or_else(lost)?;
    let _theirs = asked.end(&reply, false).ok_or_else(lost)?;
    match offered.answer(false) {
        Answer::Accepted(_) => Ok(()),
        Answer::Nothing | Answer::Declined | Answer::Useless => Err(lost()),
    }
}

/// Whether a connection may share memory, or must.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// It is software iWARP.
    #[default]
    Never,
    /// If the peer does.
    May,
    /// Else there is no connection.
    Must,
}

fn with(options: &Options, fd: RawFd) -> Result<iwarp::Options, Error> {
    let sharing = match (socket::own_host(fd), options.only) {
        (_, true) => Sharing::Must,
        (true, false) => Sharing::May,
        (false, false) => Sharing::Never,
    };
    Ok(iwarp::Options { sharing, spins: options.spins, ..iwarp::Options::of(options, fd) })
}

/// The error of a peer that does not share memory, where nothing else may be used.
pub fn missing() -> Error {
    let text = "the peer shares no memory with us: it is on another host or in another network namespace, or does not \
                know how to, and RPCRDMA_PROVIDER=local takes nothing else";
    Error::new(Kind::Peer, text)
}

/// Begins what private data says about shared memory. The last byte is the version.
const MARK: &[u8; 8] = b"RPCRloc\x06";

/// The answer of a server that has its client's segment.
pub const SHARED: u8 = 1;

fn random() -> io::Result<Secret> {
    let mut bytes = [0; SECRET];
    process::random(&mut bytes)?;
    Ok(bytes)
}

fn name(of: &Secret) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(&[b"rpcrdma-", &of[..]].concat())?)
}

/// What follows [`MARK`] in private data.
fn find<const N: usize>(private_data: &[u8]) -> Option<[u8; N]> {
    let at = private_data.windows(MARK.len()).position(|window| window == MARK)?;
    private_data[at + MARK.len()..].first_chunk().copied()
}

/// A client's end, which waits for its server.
pub struct Asked(Listener);

impl Asked {
    /// Begins to listen. What is to be said in the MPA Request is appended to `private_data`.
    ///
    /// # Errors
    /// The errno of what the system refuses; `EACCES` if strangers have been in the way too often.
    pub fn new(private_data: &mut Vec<u8>) -> io::Result<Asked> {
        let (public, secret) = (random()?, random()?);
        let listener = Listener::new(&name(&public)?, secret)?;
        private_data.extend_from_slice(&[&MARK[..], &public, &secret].concat());
        Ok(Asked(listener))
    }

    /// The outcome, once the MPA Reply is here. `None`: the server does not share memory, or something failed.
    pub fn end(mut self, private_data: &[u8], spins: bool) -> Option<Rings> {
        let answer: Secret = find(private_data)?;
        // A server that connected before it said so in the Reply is already here. What fails from here on fails for good.
        let (peer, theirs) = self.0.find()?;
        let (own, file) = Own::new().ok()?;
        peer.pass(&answer, file.as_fd()).ok()?;
        Some(Rings::new(own, theirs, spins))
    }
}

/// A server's end, which waits for its client's answer.
pub struct Offered {
    /// What was passed, for as long as the client has not answered: when it is closed, before `peer`, there is a descriptor for
    /// the answer.
    file: Option<OwnedFd>,
    peer: Peer,
    own: Option<Own>,
}

/// What a client has answered.
pub enum Answer {
    /// Nothing yet.
    Nothing,
    /// The client goes on without shared memory.
    Declined,
    /// Something that cannot be used: the client has to be told.
    Useless,
    /// The rings.
    Accepted(Rings),
}

impl Offered {
    /// An offer to a client that has asked for it. What is to be said in the MPA Reply is appended to `reply`. `None`: the
    /// client has not asked, or is elsewhere, or is not trusted, or something failed.
    pub fn new(private_data: &[u8], reply: &mut Vec<u8>) -> Option<Offered> {
        let asked: [u8; 2 * SECRET] = find(private_data)?;
        let (public, theirs) = asked.split_first_chunk::<SECRET>()?;
        let theirs: &Secret = theirs.first_chunk()?;
        let mut offer = || {
            let secret = random()?;
            let peer = Peer::connect(&name(public)?, secret)?;
            let (own, file) = Own::new()?;
            peer.pass(theirs, file.as_fd())?;
            reply.extend_from_slice(&[&MARK[..], &secret].concat());
            Ok::<_, io::Error>(Offered { peer, own: Some(own), file: Some(file) })
        };
        offer().ok()
    }

    /// What the client has answered by now.
    pub fn answer(&mut self, spins: bool) -> Answer {
        self.file = None;
        match self.peer.take() {
            Ok(Some(theirs)) => match self.own.take() {
                Some(own) => Answer::Accepted(Rings::new(own, theirs, spins)),
                None => Answer::Useless,
            },
            Ok(None) => Answer::Useless,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Answer::Nothing,
            Err(_) => Answer::Declined,
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(all(test, shuttle))]
mod schedules;
