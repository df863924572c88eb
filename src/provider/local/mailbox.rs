//! The Unix socket over which a server passes memory to its client, and what others can do with it.
//!
//! A descriptor can be of anything, also of what takes as long to close as somebody likes: a TCP connection that lingers, or a file
//! of a file system that a user provides, which holds up each process that has a copy when it closes it or ends. So a server
//! receives no descriptor: it makes the memory that its client writes, too. A client receives them from whom it trusts: root and
//! its own user, who could harm it in other ways as well. Nobody else even gets something into its socket, because a filter of
//! the socket discards what does not have the secret, while it is still the sender's.
//!
//! That leaves a server that has the secret and is not trusted. What it has sent is never received, but would be closed with
//! the socket. Such a socket stays open until the process ends, when the kernel waits for nothing; and once there are
//! [`LEFT_MOST`] of them, nobody is asked for memory any more.
//!
//! # Invariants
//! - No system call here waits for another process.
//! - What a child has of a socket that is its parent's changes nothing for the parent.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg,
    sendmsg_addr, shutdown, socket_with, sockopt,
};
use rustix::process::{geteuid, getuid};

use crate::{fork, log_info, log_warn, socket};

/// Bytes of a secret.
pub const SECRET: usize = 16;
/// What a server shows that has read its client's Request.
pub type Secret = [u8; SECRET];

/// The most sockets that are left open.
const LEFT_MOST: usize = 16;

/// How many are.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// What the kernel calls every user who has no number in our user namespace, unless /proc/sys/kernel/overflowuid says otherwise.
const NO_NUMBER: u32 = 65534;

/// From whom a client takes memory: root, and this user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trust(pub u32);

impl Trust {
    /// From whoever it may be. No user has this number.
    pub const ANYBODY: Trust = Trust(u32::MAX);

    /// This process's.
    pub fn own() -> Trust {
        Trust(geteuid().as_raw())
    }

    fn includes(self, user: u32) -> bool {
        self == Trust::ANYBODY || user != NO_NUMBER && (user == 0 || user == self.0)
    }

    /// Whether it includes this process.
    pub fn includes_us(self) -> bool {
        self.includes(getuid().as_raw())
    }
}

/// A client's socket.
pub struct Mailbox {
    /// Always there, until it is dropped.
    socket: Option<OwnedFd>,
    /// The process that it belongs to: a child that was forked has a copy.
    generation: u64,
}

impl Mailbox {
    /// A socket with this name, to which only those can send who know `secret`.
    ///
    /// # Errors
    /// `EACCES` if there is too much left of others; the errno of what the system refuses.
    pub fn new(at: &SocketAddrUnix, secret: &Secret) -> io::Result<Mailbox> {
        if LEFT.load(Relaxed) >= LEFT_MOST {
            return Err(Errno::ACCESS.into());
        }
        let socket = unix()?;
        // Before it has a name, nobody can send to it.
        socket::accept_only(socket.as_raw_fd(), secret)?;
        sockopt::set_socket_passcred(&socket, true)?;
        bind(&socket, at)?;
        Ok(Mailbox { socket: Some(socket), generation: fork::generation() })
    }

    /// What the server has passed.
    ///
    /// # Errors
    /// `EAGAIN` if nothing has come; `EACCES` if its sender is not trusted; `EPROTO` if it is not two descriptors, or there is no
    /// room for them; the errno of what the system refuses.
    pub fn take(&self, from: Trust) -> io::Result<[OwnedFd; 2]> {
        let socket = self.socket.as_ref().ok_or(Errno::BADF)?;
        let user = socket::sender(socket.as_raw_fd())?;
        if !from.includes(user) {
            log_info!("memory of a server that user {user} runs is not taken");
            return Err(Errno::ACCESS.into());
        }
        // Not beside the descriptors: a process of another namespace has no number, for which rustix's type has no value.
        sockopt::set_socket_passcred(socket, false)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        recvmsg(socket, &mut [], &mut control, flags)?;
        sockopt::set_socket_passcred(socket, true)?;
        let passed = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let files: Vec<_> = passed.flatten().collect();
        files.try_into().map_err(|_| Errno::PROTO.into())
    }
}

impl Mailbox {
    /// Whether the socket can be closed without waiting for anything. Nothing more comes, whatever the answer.
    fn is_harmless(&self, socket: &OwnedFd) -> bool {
        // In a child, it is the parent's too, and so is what is in it.
        let own = self.generation == fork::generation();
        if own && shutdown(socket, Shutdown::Read).is_err() {
            return false;
        }
        loop {
            match socket::sender(socket.as_raw_fd()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                // A server that has died since, perhaps.
                Ok(user) if own && Trust::own().includes(user) => {
                    if recvmsg(socket, &mut [], &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT)
                        .is_err()
                    {
                        return false;
                    }
                }
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

/// Passes two descriptors to a client, and shows it its secret.
///
/// # Errors
/// The errno of what the system refuses: `ECONNREFUSED` if nobody has this name.
pub fn pass(to: &SocketAddrUnix, secret: &Secret, files: [BorrowedFd<'_>; 2]) -> io::Result<()> {
    // It has no name, so nobody can send to it.
    let socket = unix()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::NOBUFS.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg_addr(&socket, to, &[IoSlice::new(secret)], &mut control, flags)?;
    Ok(())
}

/// A socket without a name.
fn unix() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?)
}
