//! The Unix sockets over which two ends pass memory to each other, and what a process that may be anybody's can do with them.
//!
//! It can pass any descriptor, also one that takes as long to close as it likes: a TCP connection that lingers, or a file of a
//! file system that it provides itself. Whatever was passed over a socket and not taken is closed with the socket, and a
//! descriptor that was taken has to be closed too. So descriptors are looked at before they are taken (as copies, which the
//! kernel makes with MSG_PEEK), and a socket with one that may take long to close stays open until the process ends.
//!
//! That is bounded: a client asks for memory no more once strangers have left [`STRANGERS_MOST`] such sockets, and a server
//! offers none to a user who has left one, nor to anybody once there are [`DISTRUSTED_MOST`] such users.
//!
//! # Invariants
//! - No system call here waits for another process.
//! - What a child has of a socket that is its parent's changes nothing for the parent.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, shutdown, socket_with, socketpair, sockopt,
};
use rustix::process::geteuid;

use crate::memory::shared::Theirs;
use crate::{fork, log_warn, socket};

/// Bytes of a secret.
pub const SECRET: usize = 16;
/// What an end shows that has read the TCP connection.
pub type Secret = [u8; SECRET];

/// How many connections to a listener wait at most, beside the first.
const WAITING_MOST: i32 = 16;

/// The most messages that are looked at when a socket is closed: the kernel keeps fewer.
const MESSAGES_MOST: usize = 512;

/// The most sockets of strangers that a client keeps open.
pub const STRANGERS_MOST: usize = 16;

/// How many there are.
pub static STRANGERS: AtomicUsize = AtomicUsize::new(0);

/// The most users that a server distrusts; with that many, it trusts nobody.
const DISTRUSTED_MOST: usize = 16;

/// Who they are: the numbers of users, plus 1; 0 for nobody.
static DISTRUSTED: [AtomicU64; DISTRUSTED_MOST] = [const { AtomicU64::new(0) }; DISTRUSTED_MOST];

/// The most offers to processes of other users at a time: each may end with a socket that stays open.
pub const OFFERS_MOST: usize = 32;

/// How many there are.
static OFFERS: AtomicUsize = AtomicUsize::new(0);

/// Whether memory is offered to processes of this user.
pub fn is_trusted(user: u32) -> bool {
    let mut all = DISTRUSTED.iter().map(|one| one.load(Relaxed));
    // They are filled in from the first one on.
    all.next_back() == Some(0) && all.all(|one| one != u64::from(user) + 1)
}

/// From now on it is not.
fn distrust(user: u32) {
    let user = u64::from(user) + 1;
    let takes = |one: &AtomicU64| {
        one.compare_exchange(0, user, Relaxed, Relaxed).map_or_else(|is| is == user, |_| true)
    };
    DISTRUSTED.iter().any(takes);
}

/// One of the offers to other users' processes.
pub struct Offer(());

impl Offer {
    /// `None` if there are too many.
    pub fn new() -> Option<Offer> {
        // One too many is given back at once.
        let offer = Offer(());
        (OFFERS.fetch_add(1, Relaxed) < OFFERS_MOST).then_some(offer)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        OFFERS.fetch_sub(1, Relaxed);
    }
}

/// A socket that is connected to the other end, or to somebody who would like to be taken for it.
pub struct Peer {
    /// Always there, until it is dropped.
    socket: Option<OwnedFd>,
    /// What the other end has to show.
    secret: Secret,
    /// At a server: whose process the client is.
    client: Option<u32>,
    /// At a server: if that is another user.
    _offer: Option<Offer>,
    /// Whether the next message is known to have a descriptor that may take long to close.
    is_harmful: bool,
    /// The process that it belongs to: a child that was forked has a copy.
    generation: u64,
}

impl Peer {
    fn new(socket: OwnedFd, secret: Secret, client: Option<u32>, offer: Option<Offer>) -> Peer {
        Peer {
            socket: Some(socket),
            secret,
            client,
            _offer: offer,
            is_harmful: false,
            generation: fork::generation(),
        }
    }

    /// Connects a server to its client, which has to show `secret`.
    ///
    /// # Errors
    /// `EACCES` if the client's user is not trusted, or has too many offers already; the errno of what the system refuses.
    pub fn connect(to: &SocketAddrUnix, secret: Secret) -> io::Result<Peer> {
        if DISTRUSTED[0].load(Relaxed) != 0 {
            // First over a socket on which nothing can be passed: a user who is not trusted any more could be quick.
            let deaf = unix()?;
            shutdown(&deaf, Shutdown::Read)?;
            connect(&deaf, to)?;
            if !is_trusted(socket::peer_user(deaf.as_raw_fd())?) {
                return Err(Errno::ACCESS.into());
            }
        }
        let socket = unix()?;
        connect(&socket, to)?;
        let user = socket::peer_user(socket.as_raw_fd())?;
        let own = user == 0 || user == geteuid().as_raw();
        let offer = if own { None } else { Offer::new() };
        let may = is_trusted(user) && (own || offer.is_some());
        // From here on it is closed as any other is.
        let peer = Peer::new(socket, secret, Some(user), offer);
        if may { Ok(peer) } else { Err(Errno::ACCESS.into()) }
    }

    fn socket(&self) -> io::Result<&OwnedFd> {
        self.socket.as_ref().ok_or_else(|| Errno::BADF.into())
    }

    /// Passes a segment, and shows the secret of the end that is to have it.
    ///
    /// # Errors
    /// The errno of sendmsg(2).
    pub fn pass(&self, secret: &Secret, file: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(Errno::NOBUFS.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(self.socket()?, &[IoSlice::new(secret)], &mut control, flags)?;
        Ok(())
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
    pub fn take(&mut self) -> io::Result<Option<Theirs>> {
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
            passed => {
                self.is_harmful = passed.is_none();
                Ok(None)
            }
        }
    }

    /// Whether this socket can be closed at once. Nothing more can be passed over it, whatever the answer.
    fn is_harmless(&self, socket: &OwnedFd) -> bool {
        if self.generation != fork::generation() {
            // Its messages are the parent's.
            let seen = look(socket, &mut [0], &mut RecvAncillaryBuffer::default());
            return seen.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        }
        if shutdown(socket, Shutdown::Both).is_err() || self.is_harmful {
            return false;
        }
        let mut memory = 0;
        for _ in 0..MESSAGES_MOST {
            // An error of the connection comes before its messages, once.
            let Ok((bytes, flags)) = look(socket, &mut [0], &mut RecvAncillaryBuffer::default()) else {
                continue;
            };
            if bytes == 0 && flags.is_empty() {
                // None, or one of no bytes. With credentials, every message has something for which there is no room here.
                return sockopt::set_socket_passcred(socket, true).is_ok()
                    && look(socket, &mut [0], &mut RecvAncillaryBuffer::default())
                        .is_ok_and(|(bytes, flags)| bytes == 0 && flags.is_empty());
            }
            if flags.contains(ReturnFlags::CTRUNC) {
                // Of somebody who is distrusted already, not even copies are made.
                let files = if self.is_distrusted() { None } else { files(socket).ok().flatten() };
                let Some(files) = files else { return false };
                memory += files.iter().filter_map(Theirs::bytes_of).sum::<u64>();
                if memory > Theirs::BYTES_MOST {
                    return false;
                }
            }
            if drop_message(socket).is_err() {
                return false;
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
        keep(socket);
        if self.generation != fork::generation() {
            return;
        }
        match self.client {
            Some(user) if is_trusted(user) => {
                distrust(user);
                let all = if is_trusted(u32::MAX) { "" } else { ", nor to any other" };
                log_warn!(
                    "user {user} has passed what is no memory to share: none is offered to that user any more{all}"
                );
            }
            Some(_) => {}
            None => {
                if STRANGERS.fetch_add(1, Relaxed) + 1 == STRANGERS_MOST {
                    log_warn!(
                        "others have passed what is no memory to share: no server is asked for any more"
                    );
                }
            }
        }
    }
}

/// A client's socket, to which its server connects, and perhaps others.
pub struct Listener {
    socket: Option<OwnedFd>,
    /// What the server has to show.
    secret: Secret,
    /// So that those who have connected can be looked at when the program has no descriptors left.
    spare: Option<(OwnedFd, OwnedFd)>,
    generation: u64,
}

impl Listener {
    /// Listens at a name for a server, which has to show `secret`.
    ///
    /// # Errors
    /// `EACCES` if strangers have left too much; the errno of what the system refuses.
    pub fn new(at: &SocketAddrUnix, secret: Secret) -> io::Result<Listener> {
        if STRANGERS.load(Relaxed) >= STRANGERS_MOST {
            return Err(Errno::ACCESS.into());
        }
        let spare = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let socket = unix()?;
        bind(&socket, at)?;
        listen(&socket, WAITING_MOST)?;
        Ok(Listener { socket: Some(socket), secret, spare: Some(spare), generation: fork::generation() })
    }

    /// The segment of the server, and the connection to it. `None` if it is not among those who have connected so far.
    pub fn find(&mut self) -> Option<(Peer, Theirs)> {
        for _ in 0..=WAITING_MOST {
            let mut peer = self.accept().ok()?;
            if let Ok(Some(theirs)) = peer.take() {
                return Some((peer, theirs));
            }
        }
        None
    }

    /// # Errors
    /// `EAGAIN` when nobody has connected.
    fn accept(&mut self) -> io::Result<Peer> {
        self.spare = None;
        let socket = self.socket.as_ref().ok_or(Errno::BADF)?;
        let peer = accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        Ok(Peer::new(peer, self.secret, None, None))
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

/// A socket that is neither bound nor connected.
pub fn unix() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
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
    let (harmless, others): (Vec<_>, Vec<_>) = passed.flatten().partition(|file| {
        // A file in memory. Even the length of a pipe would have to wait for whoever writes to it.
        Theirs::bytes_of(file).is_some_and(|bytes| bytes <= Theirs::BYTES_MOST)
    });
    let all = others.is_empty() && !flags.contains(ReturnFlags::CTRUNC);
    others.into_iter().for_each(keep);
    Ok(all.then_some(harmless))
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
