//! Shared memory between two processes of one host: software iWARP whose stream goes through rings of memory instead of a
//! TCP connection. The TCP connection stays: it names the connection, shows its end, and wakes whoever waits.
//!
//! # How two ends find each other
//! The TCP connection is made as usual. A client whose server has an address of this host binds a Unix socket to a random
//! abstract name, and writes that name and a secret into the private data of its MPA Request, behind the words of RFC 8797.
//! Peers that do not know them ignore them. A server that does makes two segments of memory, one for each end to write, sends
//! both with the secret to that name, which exists only in this network namespace of this host, and says so in the MPA Reply.
//! The client maps them, seals its own so that it has no other writer, and sends a byte over TCP; the server, which has kept a
//! descriptor of that segment, sees the seal, maps it, and answers with [`SHARED`], or with another byte if it cannot. Only then
//! the client writes to it: until then nothing has changed there, least of all by a hole, which would take away the pages that the
//! server has pinned. If any of this fails, the connection goes on as software iWARP at once: nobody waits for any step longer
//! than for the MPA startup.
//!
//! # Why that is safe
//! Whoever has shown the secret has read the TCP connection, and whoever has sealed the segment has got it and can write to it.
//! So the memory is shared with nobody but the two ends, whoever they are: the same parties that would otherwise have read and
//! written the bytes. Every user of the host sees the names (`/proc/net/unix`), and nobody sees the secrets. What anybody else
//! sends to a name is discarded. Anybody who takes a name after its owner has gone gets the segments of a connection that has
//! ended, into which nothing is ever written, because nobody answers over TCP. A secret is 128 bits from getrandom(2), and good
//! for one connection.
//!
//! A client takes memory from root and from its own user, unless nothing but memory may be used, and its Request says so.
//! `mailbox` says why, and what somebody may do with the Unix socket; `memory::shared` what the other end may do with the
//! memory, and `rings` what it may do with the numbers in it.
#![forbid(unsafe_code)]

use std::io;
#[cfg(feature = "tool")]
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::iwarp::{self, Iwarp};
use super::{Device, Options, QueuePair, Traits, Way};
use crate::error::{Error, Kind};
use crate::memory::Areas;
use crate::memory::pins::{self, Pins};
use crate::memory::shared::{self, Own, Theirs};
use crate::{log_info, process, socket};

mod mailbox;
mod rings;

pub use mailbox::Trust;
use mailbox::{Mailbox, SECRET, Secret};
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
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    let asked = Asked::new(&mut request, Trust::ANYBODY)
        .map_err(|e| cannot("a Unix socket with an abstract name", e))?;
    Own::new().map_err(|e| cannot("a sealed memfd", e))?;
    let lost =
        || Error::new(Kind::Os(libc::EPERM), "a memfd cannot be passed over a Unix socket, or not be mapped");
    let mut offered = Offered::new(&request, &mut reply, true).ok_or_else(lost)?;
    let _sealed = asked.end(&reply).ok_or_else(lost)?;
    match offered.answer(false) {
        Answer::Accepted(_) => Ok(()),
        Answer::Declined | Answer::Useless | Answer::Taken => Err(lost()),
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

/// The error of a system that refuses something.
pub fn cannot(what: &str, e: io::Error) -> Error {
    let e = Error::from(e);
    Error::new(e.kind(), format!("{what}: {e}"))
}

/// The error of a peer that does not share memory, where nothing else may be used.
pub fn missing() -> Error {
    let text = "the peer shares no memory with us: it is on another host or in another network namespace, takes none but \
                root's or its own user's, does not know how to, or one end has too few descriptors left or more clients at \
                a time than it may pass memory to (RPCRDMA_LOG=info at both ends says which), and \
                RPCRDMA_PROVIDER=local takes nothing else";
    Error::new(Kind::Peer, text)
}

/// Begins what private data says about shared memory. The last byte is the version.
const MARK: &[u8; 8] = b"RPCRloc\x08";

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
pub struct Asked(Mailbox);

/// Bytes of what it says: the name, the secret, and from whom it takes memory.
const ASKED: usize = 2 * SECRET + Trust::BYTES;

impl Asked {
    /// Asks for memory. What is to be said in the MPA Request is appended to `private_data`.
    ///
    /// # Errors
    /// The errno of what the system refuses; `EACCES` if it was in vain too often; `EMFILE` if the program may soon need the
    /// descriptors.
    pub fn new(private_data: &mut Vec<u8>, from: Trust) -> io::Result<Asked> {
        let (public, secret) = (random()?, random()?);
        let mailbox = Mailbox::new(&name(&public)?, &secret, from)?;
        private_data.extend_from_slice(&[&MARK[..], &public, &secret, &from.to_bytes()].concat());
        Ok(Asked(mailbox))
    }

    /// The outcome, once the MPA Reply is here. `None`: the server does not share memory, or something failed.
    pub fn end(self, private_data: &[u8]) -> Option<Sealed> {
        // A server that says so in the Reply has passed it.
        find::<0>(private_data)?;
        let take = || {
            let [theirs, own] = self.0.take()?;
            let theirs = Theirs::new(&theirs)?;
            // Last, because this is the answer: nothing fails from here on.
            Ok(Sealed { own: Own::of(&own)?, theirs })
        };
        let failed = |e: &io::Error| log_info!("the memory that a server has passed is not used: {e}");
        take().inspect_err(failed).ok()
    }
}

/// A client's end, which has answered, and waits for its server to agree.
pub struct Sealed {
    own: Own,
    theirs: Theirs,
}

impl Sealed {
    /// The server has agreed.
    pub fn begin(self, spins: bool) -> Rings {
        Rings::new(self.own, self.theirs, spins)
    }
}

/// A server's end, which waits for its client's answer.
pub struct Offered {
    own: Option<Own>,
    /// What the client is to write.
    theirs: OwnedFd,
    pins: Pins,
}

/// What a client has answered.
pub enum Answer {
    /// The client goes on without shared memory.
    Declined,
    /// The client shares memory, but it cannot be mapped here: the client has to be told.
    Useless,
    /// A forked process has taken the answer. What comes now is not for this one.
    Taken,
    /// The rings.
    Accepted(Rings),
}

impl Offered {
    /// Passes memory to a client that has asked for it. What is to be said in the MPA Reply is appended to `reply`. `None`: the
    /// client has not asked, or is elsewhere, or something failed. `must`: nothing but memory may be used, so the program spares
    /// no descriptors for anything else.
    pub fn new(private_data: &[u8], reply: &mut Vec<u8>, must: bool) -> Option<Offered> {
        let asked: [u8; ASKED] = find(private_data)?;
        let (public, rest) = asked.split_first_chunk::<SECRET>()?;
        let (secret, from) = rest.split_first_chunk::<SECRET>()?;
        let from = Trust::of(from.first_chunk()?);
        // It would not be taken, and be in the client's way.
        if !from.includes_us() {
            log_info!("no memory is offered to a client that takes it from {from} only");
            return None;
        }
        let mut offer = || {
            let file = shared::blank()?;
            if !must {
                mailbox::leaves_some(&file)?;
            }
            let files = [file, shared::blank()?];
            let pins = pins::hold(&files, shared::SIZE)?;
            let [file, theirs] = files;
            shared::mark(&theirs)?;
            let own = Some(Own::of(&file)?.pinned(pins.clone()));
            mailbox::pass(&name(public)?, secret, [file.as_fd(), theirs.as_fd()])?;
            reply.extend_from_slice(MARK);
            Ok(Offered { own, theirs, pins })
        };
        let refused = |e: &io::Error| log_info!("no memory is passed to a client: {e}");
        offer().inspect_err(refused).ok()
    }

    /// What the client has answered, once it has said something.
    pub fn answer(&mut self, spins: bool) -> Answer {
        if !shared::is_written(&self.theirs) {
            log_info!("a client has not taken the memory that was passed to it");
            return Answer::Declined;
        }
        // Even a look at the segment says nothing any more, once another process has told the client that it may write.
        if !self.own.as_ref().is_some_and(rings::claim) {
            return Answer::Taken;
        }
        let map = |own| {
            // It has no writer but this client, who has changed nothing before that.
            if !shared::is_marked(&self.theirs) {
                return Err(io::Error::other("it was changed too early"));
            }
            Ok(Rings::new(own, Theirs::new(&self.theirs)?.pinned(self.pins.clone()), spins))
        };
        match self.own.take().ok_or_else(|| Errno::INVAL.into()).and_then(map) {
            Ok(rings) => Answer::Accepted(rings),
            Err(e) => {
                log_info!("the memory that a client shares is not used: {e}");
                Answer::Useless
            }
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(all(test, shuttle))]
mod schedules;
