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
//! What the other end passes may be any descriptor, also one that takes as long to close as that end likes; `Peer` says
//! what is done about that.
//!
//! `memory::shared` says what the other end may do with the memory, and `rings` what it may do with the numbers in it.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
#[cfg(feature = "tool")]
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, shutdown, socket_with, socketpair, sockopt,
};
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::geteuid;

use super::iwarp::{self, Iwarp};
use super::{Device, Options, QueuePair, Traits, Way};
use crate::error::{Error, Kind};
use crate::memory::Areas;
use crate::memory::shared::{Own, Theirs};
use crate::{fork, log_warn, process, socket};

mod rings;

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

const SECRET: usize = 16;
type Secret = [u8; SECRET];

/// Begins what private data says about shared memory. The last byte is the version.
const MARK: &[u8; 8] = b"RPCRloc\x06";

/// The answer of a server that has its client's segment.
pub const SHARED: u8 = 1;

/// Most connections to a name that are looked at: others than the peer may connect.
const TRIES: usize = 16;

fn random() -> io::Result<Secret> {
    let mut bytes = [0; SECRET];
    process::random(&mut bytes)?;
    Ok(bytes)
}

fn name(of: &Secret) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(&[b"rpcrdma-", &of[..]].concat())?)
}

fn unix() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// What follows [`MARK`] in private data.
fn find<const N: usize>(private_data: &[u8]) -> Option<[u8; N]> {
    let at = private_data.windows(MARK.len()).position(|window| window == MARK)?;
    private_data[at + MARK.len()..].first_chunk().copied()
}

/// The most messages that are looked at when a socket is closed: the kernel keeps fewer.
const MESSAGES_MOST: usize = 512;

/// How many sockets are kept open for what is left in them (`Peer`). With that many, the process shares memory with nobody new.
const KEPT_MOST: usize = 16;

/// How many are.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Whose they are: the numbers of users, plus 1.
static DISTRUSTED: [AtomicU64; KEPT_MOST] = [const { AtomicU64::new(0) }; KEPT_MOST];

/// The most offers to processes of other users at a time: each may end with a socket that is kept.
const OFFERS_MOST: usize = 32;

/// How many there are.
static OFFERS: AtomicUsize = AtomicUsize::new(0);

/// Whether memory may be shared with processes of this user.
fn is_trusted(user: u32) -> bool {
    let kept = KEPT.load(Relaxed);
    kept < KEPT_MOST && DISTRUSTED[..kept].iter().all(|one| one.load(Relaxed) != u64::from(user) + 1)
}

/// A Unix socket to a process that may be anybody's.
///
/// close(2) can take as long as that process likes: for a TCP connection that lingers, or a file of a file system that the
/// process itself provides. Whatever was passed over a socket and not taken is closed with the socket, and a
/// descriptor that was taken has to be closed too. So descriptors are looked at before they are taken (as copies, which the
/// kernel makes with MSG_PEEK), and a socket with one that may take long to close stays open until the process ends. Memory
/// is shared no more with the user whose socket that was, nor with anybody once there are `KEPT_MOST` of them.
struct Peer {
    /// Always there, until it is dropped.
    socket: Option<OwnedFd>,
    /// What the other end has to show.
    secret: Secret,
    /// Whose process that is, at a server.
    client: Option<u32>,
    /// The process that it belongs to: a child that was forked has a copy.
    generation: u64,
}

impl Peer {
    fn new(socket: OwnedFd, secret: Secret, client: Option<u32>) -> Peer {
        Peer { socket: Some(socket), secret, client, generation: fork::generation() }
    }

    fn socket(&self) -> io::Result<&OwnedFd> {
        self.socket.as_ref().ok_or_else(|| Errno::BADF.into())
    }

    /// Whether it belongs to a client whose user has come to be distrusted.
    fn is_distrusted(&self) -> bool {
        self.client.is_some_and(|user| !is_trusted(user))
    }

    /// The segment that was passed with our secret. `None` if the secret is not ours, or what was passed is not a segment, or
    /// cannot be mapped.
    ///
    /// # Errors
    /// `EAGAIN` when nothing has come yet; another errno when nothing will.
    fn take(&self) -> io::Result<Option<Theirs>> {
        let socket = self.socket()?;
        // One byte too many, so that anything longer is refused.
        let mut shown = [0; SECRET + 1];
        let (bytes, flags) = look(socket, &mut shown, &mut RecvAncillaryBuffer::default())?;
        if bytes == 0 && flags.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if bytes != SECRET || shown[..SECRET] != self.secret[..] || self.is_distrusted() {
            return Ok(None);
        }
        match files(socket)? {
            Some(mut files) if files.len() == 1 && Theirs::is_segment(&files[0]) => {
                drop_message(socket)?;
                Ok(files.pop().and_then(|file| Theirs::new(file).ok()))
            }
            _ => Ok(None),
        }
    }

    /// Whether this socket can be closed at once. Nothing more can be passed over it, whatever the answer.
    fn is_harmless(&self, socket: &OwnedFd) -> bool {
        if self.generation != fork::generation() {
            // Its messages are the parent's.
            let seen = look(socket, &mut [0], &mut RecvAncillaryBuffer::default());
            return seen.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        }
        if shutdown(socket, Shutdown::Both).is_err() {
            return false;
        }
        let mut memory = 0;
        for _ in 0..MESSAGES_MOST {
            let (bytes, flags) = match look(socket, &mut [0], &mut RecvAncillaryBuffer::default()) {
                Ok(seen) => seen,
                // An error of the connection comes before its messages, once.
                Err(_) => continue,
            };
            if flags.contains(ReturnFlags::CTRUNC) {
                // Of somebody who is distrusted already, not even copies are made.
                let files = if self.is_distrusted() { None } else { files(socket).ok().flatten() };
                let Some(files) = files else { return false };
                memory += files.iter().filter_map(Theirs::bytes_of).sum::<u64>();
                if memory > Theirs::BYTES_MOST || drop_message(socket).is_err() {
                    return false;
                }
            } else if bytes > 0 {
                if drop_message(socket).is_err() {
                    return false;
                }
            } else {
                // None, or one of no bytes. With credentials, every message has something for which there is no room here.
                let shown = sockopt::set_socket_passcred(socket, true)
                    .map_err(io::Error::from)
                    .and_then(|()| look(socket, &mut [0], &mut RecvAncillaryBuffer::default()));
                return shown.is_ok_and(|(bytes, flags)| bytes == 0 && flags.is_empty());
            }
        }
        false
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if self.is_harmless(&socket) {
            return;
        }
        if self.generation == fork::generation() {
            let user = user(&socket).unwrap_or(u32::MAX);
            let known = !is_trusted(user);
            let kept = KEPT.fetch_add(1, Relaxed);
            if let Some(one) = DISTRUSTED.get(kept) {
                one.store(u64::from(user) + 1, Relaxed);
            }
            if !known {
                let others = if kept + 1 < KEPT_MOST { "" } else { ", nor with anybody else" };
                log_warn!(
                    "user {user} has passed something else than memory: none will be shared with that user{others}"
                );
            }
        }
        keep(socket);
    }
}

/// The number of the user whose process has connected to this socket, or listened.
fn user(of: &OwnedFd) -> io::Result<u32> {
    socket::peer_user(of.as_raw_fd())
}

/// Copies of the descriptors that the next message has, which stays where it is. `None` if there are too many, or some may take
/// long to close: a copy may do so too, and is left open.
fn files(socket: &OwnedFd) -> io::Result<Option<Vec<OwnedFd>>> {
    // The kernel has room for two here, and says so if there are more.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let (_, flags) = look(socket, &mut [0], &mut control)?;
    let passed = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let (harmless, others): (Vec<_>, Vec<_>) = passed.flatten().partition(closes_at_once);
    let all = others.is_empty() && !flags.contains(ReturnFlags::CTRUNC);
    others.into_iter().for_each(keep);
    Ok(all.then_some(harmless))
}

/// Whether closing this takes no time that the peer decides about: a pipe, or a file in memory that is no longer than a segment.
/// Nothing is asked that a file system of the peer's would have to answer.
fn closes_at_once(file: &OwnedFd) -> bool {
    fcntl_getpipe_size(file).is_ok()
        || Theirs::bytes_of(file).is_some_and(|bytes| bytes <= Theirs::BYTES_MOST)
}

/// Takes the next message, and closes what was passed with it.
fn drop_message(socket: &OwnedFd) -> io::Result<()> {
    recvmsg(socket, &mut [], &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT)?;
    Ok(())
}

/// Leaves a descriptor open until the process ends.
fn keep(file: OwnedFd) {
    let _ = file.into_raw_fd();
}

/// Looks at the next message, and leaves it there. Returns its bytes, and whether they or its control data were cut off.
fn look(
    from: &OwnedFd,
    bytes: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
) -> io::Result<(usize, ReturnFlags)> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(from, &mut [IoSliceMut::new(bytes)], control, flags)?;
    Ok((got.bytes, got.flags & (ReturnFlags::CTRUNC | ReturnFlags::TRUNC)))
}

/// Passes files, and shows the secret of the end that is to have them.
fn pass(to: &OwnedFd, secret: &Secret, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::NOBUFS.into());
    }
    sendmsg(to, &[IoSlice::new(secret)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A socket that listens at a name. Whoever has connected and was not accepted is treated as any other `Peer`.
struct Listener {
    socket: Option<OwnedFd>,
    /// What the server has to show.
    secret: Secret,
    /// So that those who have connected can be looked at when the program has no descriptors left.
    spare: Option<(OwnedFd, OwnedFd)>,
    generation: u64,
}

impl Listener {
    fn new(at: &SocketAddrUnix, secret: Secret) -> io::Result<Listener> {
        let spare = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let socket = unix()?;
        bind(&socket, at)?;
        listen(&socket, TRIES as i32)?;
        Ok(Listener { socket: Some(socket), secret, spare: Some(spare), generation: fork::generation() })
    }

    /// # Errors
    /// `EAGAIN` when nobody has connected.
    fn accept(&mut self) -> io::Result<Peer> {
        self.spare = None;
        let socket = self.socket.as_ref().ok_or(Errno::BADF)?;
        Ok(Peer::new(accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?, self.secret, None))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // In a child, those who wait are the parent's.
        let own = self.generation == fork::generation();
        if own && self.socket.as_ref().is_some_and(|socket| shutdown(socket, Shutdown::Read).is_ok()) {
            // Nobody can connect from now on.
            loop {
                match self.accept() {
                    Ok(peer) => drop(peer),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                    Err(_) => break,
                }
            }
        }
        self.socket.take().into_iter().for_each(keep);
    }
}

/// A client's end, which waits for its server.
pub struct Asked(Listener);

impl Asked {
    /// Begins to listen. What is to be said in the MPA Request is appended to `private_data`.
    ///
    /// # Errors
    /// The errno of what the system refuses; `EACCES` if strangers have used it too often (`Peer`).
    pub fn new(private_data: &mut Vec<u8>) -> io::Result<Asked> {
        if KEPT.load(Relaxed) >= KEPT_MOST {
            return Err(Errno::ACCESS.into());
        }
        let (public, secret) = (random()?, random()?);
        let listener = Listener::new(&name(&public)?, secret)?;
        private_data.extend_from_slice(&[&MARK[..], &public, &secret].concat());
        Ok(Asked(listener))
    }

    /// The outcome, once the MPA Reply is here. `None`: the server does not share memory, or something failed.
    pub fn end(mut self, private_data: &[u8], spins: bool) -> Option<Rings> {
        let answer: Secret = find(private_data)?;
        // A server that connected before it said so in the Reply is already here. The kernel lets one more wait than it was told.
        for _ in 0..=TRIES {
            let Ok(peer) = self.0.accept() else { break };
            let Ok(Some(theirs)) = peer.take() else { continue };
            // This is the server: what fails from here on fails for good.
            let (own, file) = Own::new().ok()?;
            pass(peer.socket().ok()?, &answer, &[file.as_fd()]).ok()?;
            return Some(Rings::new(own, theirs, spins));
        }
        None
    }
}

/// A server's end, which waits for its client's answer.
pub struct Offered {
    peer: Peer,
    own: Option<Own>,
    /// What was passed, for as long as the client has not answered: when it is closed, there is a descriptor for the answer.
    file: Option<OwnedFd>,
    _among: Option<Among>,
}

/// One of the offers to other users' processes.
struct Among;

impl Among {
    fn new() -> Option<Among> {
        let among = Among;
        (OFFERS.fetch_add(1, Relaxed) < OFFERS_MOST).then_some(among)
    }
}

impl Drop for Among {
    fn drop(&mut self) {
        OFFERS.fetch_sub(1, Relaxed);
    }
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
    /// client has not asked, or is elsewhere, or is not trusted (`Peer`), or something failed.
    pub fn new(private_data: &[u8], reply: &mut Vec<u8>) -> Option<Offered> {
        let asked: [u8; 2 * SECRET] = find(private_data)?;
        let (public, theirs) = asked.split_first_chunk::<SECRET>()?;
        let theirs: &Secret = theirs.first_chunk()?;
        let offer = || {
            let socket = unix()?;
            connect(&socket, &name(public)?)?;
            let (secret, user) = (random()?, user(&socket)?);
            let among = if user == 0 || user == geteuid().as_raw() {
                None
            } else {
                Some(Among::new().ok_or(Errno::ACCESS)?)
            };
            let peer = Peer::new(socket, secret, Some(user));
            if !is_trusted(user) {
                return Err(Errno::ACCESS.into());
            }
            let (own, file) = Own::new()?;
            pass(peer.socket()?, theirs, &[file.as_fd()])?;
            Ok::<_, io::Error>(Offered { peer, own: Some(own), file: Some(file), _among: among })
        };
        let offered = offer().ok()?;
        reply.extend_from_slice(&[&MARK[..], &offered.peer.secret].concat());
        Some(offered)
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
