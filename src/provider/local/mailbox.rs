//! The Unix socket over which a server passes memory to its client, and what others can do with it.
//!
//! A descriptor can be of anything, also of what takes as long to close as somebody likes: a TCP connection that lingers, or a file
//! of a file system that a user provides, which holds up each process that has a copy when it closes it or ends. So a server
//! receives no descriptor: it makes the memory that its client writes, too. A client receives them from whom it trusts: root and
//! its own user, who can stop it in other ways as well. Nobody else even gets something into its socket, because a filter of
//! the socket discards what does not have the secret, while it is still the sender's.
//!
//! That leaves a server that has the secret and is not trusted. What it has sent is never received, but would be closed with
//! the socket. Such a socket stays open until the process ends, when the kernel waits for nothing, or until the program closes
//! it or executes another one; and once there are [`LEFT_MOST`] of them, nobody is asked for memory any more.
//!
//! # Invariants
//! - No system call here waits for another process that is not trusted.
//! - What a child has of a socket that is its parent's changes nothing for the parent.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
#[cfg(test)]
use std::os::fd::RawFd;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::fs::stat;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg,
    sendmsg_addr, shutdown, socket_with, sockopt,
};
use rustix::process::{Resource, getrlimit, getuid};

use crate::process::{self, Kept};
use crate::{fork, log_info, log_warn, socket};

/// Bytes of a secret.
pub const SECRET: usize = 16;
/// What a server shows that has read its client's Request.
pub type Secret = [u8; SECRET];

/// Once so many sockets are left open, nobody is asked for memory any more.
const LEFT_MOST: usize = 16;

/// How many are.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// The most messages that nobody has received, as when as many clients connect at once, of a process whose capabilities allow
/// more: to the kernel, which may have a limit of its own (wmem_max), each has [`MESSAGE`] bytes.
const UNRECEIVED_MOST: usize = 256;
const MESSAGE: usize = 768;

/// The same of any other process. The descriptors of all of a user's processes count together against `RLIMIT_NOFILE` of whichever
/// passes one, which is 1,024 as a rule.
const UNRECEIVED_FEW: usize = 64;

/// Descriptors that are left to the program.
const SPARE: u64 = 64;

/// What the kernel calls every user who has no number in our user namespace, unless /proc/sys/kernel/overflowuid says otherwise.
const NO_NUMBER: u32 = 65534;

/// From whom a client takes memory: root, and this user, in this user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trust {
    user: u32,
    /// Its inode; 0: not known.
    namespace: u64,
}

impl Trust {
    /// Bytes of [`Trust::to_bytes`].
    pub const BYTES: usize = 12;

    /// From whoever it may be. No user has this number.
    pub const ANYBODY: Trust = Trust { user: u32::MAX, namespace: 0 };

    /// This process's. One that has another user's rights too, another group's, or more than its caller has, trusts only root:
    /// that user or caller may not be its equal.
    pub fn own() -> Trust {
        let user = process::only_user().filter(|_| !process::is_secure()).unwrap_or(0);
        Trust { user, namespace: process::user_namespace() }
    }

    /// For a Request.
    pub fn to_bytes(self) -> [u8; Trust::BYTES] {
        let mut bytes = [0; Trust::BYTES];
        bytes[..4].copy_from_slice(&self.user.to_be_bytes());
        bytes[4..].copy_from_slice(&self.namespace.to_be_bytes());
        bytes
    }

    /// What a Request says.
    pub fn of(bytes: &[u8; Trust::BYTES]) -> Trust {
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        Trust { user: number(&bytes[..4]) as u32, namespace: number(&bytes[4..]) }
    }

    /// Whether it includes a user, by the number in this user namespace.
    fn includes(self, user: u32) -> bool {
        let is_known = user != NO_NUMBER || self.namespace == process::INITIAL;
        self == Trust::ANYBODY || user == 0 || user == self.user && is_known
    }

    /// Whether it includes this process.
    pub fn includes_us(self) -> bool {
        self == Trust::ANYBODY
            || self.namespace == process::user_namespace() && self.includes(getuid().as_raw())
    }
}

impl fmt::Display for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "root and user {} of user namespace {}", self.user, self.namespace)
    }
}

/// A client's socket.
pub struct Mailbox {
    /// Always there, until it is dropped.
    socket: Option<OwnedFd>,
    from: Trust,
    /// The process that it belongs to: a child that was forked has a copy.
    generation: u64,
}

impl Mailbox {
    /// A socket with this name, to which only those can send who know `secret`. What others send than `from` is not taken.
    ///
    /// # Errors
    /// `EACCES` if there is too much left of others; `EMFILE` if the program may soon need the descriptors; the errno of what
    /// the system refuses.
    pub fn new(at: &SocketAddrUnix, secret: &Secret, from: Trust) -> io::Result<Mailbox> {
        if LEFT.load(Relaxed) >= LEFT_MOST {
            return Err(Errno::ACCESS.into());
        }
        let socket = unix()?;
        if from != Trust::ANYBODY {
            leaves_some(&socket)?;
        }
        // Before it has a name, nobody can send to it.
        socket::accept_only(socket.as_raw_fd(), secret)?;
        sockopt::set_socket_passcred(&socket, true)?;
        bind(&socket, at)?;
        Ok(Mailbox { socket: Some(socket), from, generation: fork::generation() })
    }

    /// What the server has passed.
    ///
    /// # Errors
    /// `EAGAIN` if nothing has come; `EACCES` if its sender is not trusted; `EPROTO` if it is not two descriptors, or there is no
    /// room for them; the errno of what the system refuses.
    pub fn take(&self) -> io::Result<[OwnedFd; 2]> {
        let socket = self.socket.as_ref().ok_or(Errno::BADF)?;
        let user = socket::sender(socket.as_raw_fd())?;
        if !self.from.includes(user) {
            log_info!("memory of a server that user {user} runs is not taken");
            return Err(Errno::ACCESS.into());
        }
        // Not beside the descriptors: a process of another namespace has no number, for which rustix's type has no value.
        sockopt::set_socket_passcred(socket, false)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let taken = recvmsg(socket, &mut [], &mut control, flags);
        sockopt::set_socket_passcred(socket, true)?;
        taken?;
        let passed = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let files: Vec<_> = passed.flatten().collect();
        files.try_into().map_err(|_| Errno::PROTO.into())
    }

    /// Whether the socket can be closed, and nobody who is not trusted can have us wait for that. Nothing more comes, whatever
    /// the answer.
    fn is_harmless(&self, socket: &OwnedFd) -> bool {
        // In a child, it is the parent's too, and so is what is in it.
        let own = self.generation == fork::generation();
        if own && shutdown(socket, Shutdown::Read).is_err() {
            return false;
        }
        let discard = || recvmsg(socket, &mut [], &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT);
        loop {
            match socket::sender(socket.as_raw_fd()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                // A server that has died since, perhaps.
                Ok(user) if own && self.from.includes(user) && discard().is_ok() => {}
                _ => return false,
            }
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if self.is_harmless(&socket) {
            return;
        }
        let _ = socket.into_raw_fd();
        if self.generation == fork::generation() && LEFT.fetch_add(1, Relaxed) + 1 == LEFT_MOST {
            log_warn!(
                "servers of other users have passed memory that was not taken: no server is asked for any more"
            );
        }
    }
}

/// The socket over which this process passes descriptors. Children that were forked from it go on with it, so that what all of
/// them pass is bounded.
static SENDER: fork::Lock<Option<Kept>> = fork::Lock::new();

/// It, if there is one.
#[cfg(test)]
pub fn sender() -> Option<RawFd> {
    SENDER.lock().as_ref().and_then(Kept::get).map(|fd| fd.as_raw_fd())
}

/// Passes two descriptors to a client, and shows it its secret.
///
/// # Errors
/// The errno of what the system refuses: `ECONNREFUSED` if nobody has this name, `EPIPE` if its owner receives no more, `EAGAIN`
/// if clients have not received too much of what was passed to them.
pub fn pass(to: &SocketAddrUnix, secret: &Secret, files: [BorrowedFd<'_>; 2]) -> io::Result<()> {
    let mut sender = SENDER.lock();
    if let Some(fd) = sender.as_ref().and_then(Kept::get) {
        let sent = send(fd, to, secret, &files);
        if sent != Err(Errno::PIPE) || !is_shut(fd)? {
            return Ok(sent?);
        }
        // A child or parent of ours, which has a copy of it, has shut it down.
    }
    let new = sender.insert(new_sender()?).get().ok_or(Errno::BADF)?;
    Ok(send(new, to, secret, &files)?)
}

fn send(
    over: BorrowedFd<'_>,
    to: &SocketAddrUnix,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg_addr(over, to, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Whether nothing can be sent over this socket any more, to anybody. A client that has shut down its own socket does not make
/// it so: it would get a new one made for itself, and another one, each with as much on the way as the first.
fn is_shut(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let nobody = super::name(&super::random()?)?;
    Ok(send(fd, &nobody, &[], &[]) == Err(Errno::PIPE))
}

/// A socket to pass descriptors over. It has no name, so nobody can send to it.
fn new_sender() -> io::Result<Kept> {
    let socket = Kept::new(unix()?)?;
    let most = if process::may_exceed_limits() { UNRECEIVED_MOST } else { UNRECEIVED_FEW };
    // The kernel doubles it.
    sockopt::set_socket_send_buffer_size(socket.get().ok_or(Errno::BADF)?, most * MESSAGE / 2)?;
    Ok(socket)
}

/// Whether the program has descriptors left, when this one has got the lowest number that was free.
///
/// # Errors
/// `EMFILE` if there are few.
pub fn leaves_some(file: &OwnedFd) -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // Where lower ones have been closed, its number says little. How many there are is the size of this directory, since Linux
    // 6.2.
    let count = stat("/proc/self/fd").map_or(0, |stat| stat.st_size as u64);
    let few = count.max(file.as_raw_fd() as u64) >= limit - SPARE.min(limit / 2);
    if few { Err(Errno::MFILE.into()) } else { Ok(()) }
}

/// A socket without a name.
fn unix() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?)
}
