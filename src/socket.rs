//! The TCP sockets that programs and libtirpc hand us: what they are, connecting them, and moving data.
//!
//! A descriptor here is borrowed: nothing in this file closes one. Every function is one system call (or one family of
//! them) with checked arguments; policy, retries after `EAGAIN` and the meaning of an errno are the caller's.
//!
//! # Invariants
//! - `EINTR` reaches only the caller of [`await_bytes`]: every other transfer is repeated.
//! - No transfer raises SIGPIPE (`MSG_NOSIGNAL`), and only [`await_bytes`] blocks (the others pass `MSG_DONTWAIT`): the
//!   sockets belong to programs and may be in blocking mode.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::time::Duration;

use libc::c_int;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd};
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, connect_unspec, getpeername, getsockname,
    socket_with, sockopt,
};

use crate::memory::{IoVec, IoVecMut};
use crate::process::{borrow, check, random_u32, repeat, replace};
use crate::wait;

/// Most elements of one gathered or scattered transfer (`IOV_MAX` of Linux).
pub const IOV_MAX: usize = 1024;

/// Sends the concatenation of `pieces`; returns how many bytes the socket took.
///
/// # Errors
/// The errno; `EAGAIN` when the socket takes nothing now.
pub fn send(fd: RawFd, pieces: &[IoVec<'_>]) -> io::Result<usize> {
    #[cfg(test)]
    if let Some(sent) = simulated::send(fd, pieces) {
        return sent;
    }
    const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    if let [whole] = pieces {
        // The kernel has less to copy and check than for sendmsg(2), which saves a tenth of the time of a short message. Not
        // send(2): a program may have a function of that name, which would be called instead.
        return repeat(|| {
            // SAFETY: `whole` names bytes that are alive for the lifetime that it carries; the kernel only reads them.
            unsafe { libc::sendto(fd, whole.as_ptr(), whole.len(), FLAGS, std::ptr::null(), 0) }
        });
    }
    // INVARIANT: IoVec is repr(transparent) over iovec. sendmsg(2) only reads the array: the cast to *mut is the
    // shape of msghdr, which recvmsg(2) shares.
    let message = message(pieces.as_ptr().cast::<libc::iovec>().cast_mut(), pieces.len());
    repeat(|| {
        // SAFETY: `message` names `msg_iovlen` live elements of `pieces`, each alive for the lifetime that it
        // carries; the kernel reads from them only.
        unsafe { libc::sendmsg(fd, &message, FLAGS) }
    })
}

/// Receives into `pieces`, in order; returns how many bytes came. 0 means that the peer has closed its side.
///
/// # Errors
/// The errno; `EAGAIN` when nothing is there now.
pub fn receive(fd: RawFd, pieces: &mut [IoVecMut<'_>]) -> io::Result<usize> {
    #[cfg(test)]
    if let Some(received) = simulated::receive(fd, pieces) {
        return received;
    }
    if let [whole] = pieces {
        // As in `send`.
        return repeat(|| {
            // SAFETY: `whole` is a target that its lifetime lends exclusively (or a `Sink`, of which no slice exists).
            unsafe {
                libc::recvfrom(
                    fd,
                    whole.as_mut_ptr(),
                    whole.len(),
                    libc::MSG_DONTWAIT,
                    null_mut(),
                    null_mut(),
                )
            }
        });
    }
    let mut message = message(pieces.as_mut_ptr().cast::<libc::iovec>(), pieces.len());
    repeat(|| {
        // SAFETY: `message` names `msg_iovlen` live elements of `pieces`, each a target that its lifetime lends
        // exclusively (or a `Sink`, of which no slice exists).
        unsafe { libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT) }
    })
}

/// As [`receive`], but sleeps until something comes, for at most the time that [`set_patience`] has set, unless the
/// descriptor is in non-blocking mode.
///
/// # Errors
/// The errno; `EAGAIN` when nothing has come in that time, `EINTR` also when the process was stopped and continued. If the
/// call were repeated then, it would sleep for the whole time again.
pub fn await_bytes(fd: RawFd, bytes: &mut [MaybeUninit<u8>]) -> io::Result<&[u8]> {
    let (address, length) = (null_mut(), null_mut());
    // SAFETY: `bytes` is writable for its length, and no address is asked for.
    let came = unsafe { libc::recvfrom(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0, address, length) };
    let came = usize::try_from(came).map_err(|_| io::Error::last_os_error())?;
    let bytes = &bytes[..came];
    // SAFETY: the kernel has written all of them.
    Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
}

/// Sets how long [`await_bytes`] sleeps.
///
/// # Errors
/// The errno of setsockopt(2).
pub fn set_patience(fd: RawFd, time: Duration) -> io::Result<()> {
    #[cfg(test)]
    if simulated::is(fd) {
        return Err(Errno::NOTSOCK.into());
    }
    Ok(sockopt::set_socket_timeout(borrow(fd)?, sockopt::Timeout::Recv, Some(time))?)
}

/// What [`set_patience`] or the program has set, in whole ticks of the kernel. `None`: no limit.
///
/// # Errors
/// The errno of getsockopt(2).
pub fn patience(fd: RawFd) -> io::Result<Option<Duration>> {
    Ok(sockopt::socket_timeout(borrow(fd)?, sockopt::Timeout::Recv)?)
}

/// Has a Unix socket for messages discard every message but this one, before it becomes the socket's: whoever does not know
/// `bytes` can leave nothing in it.
///
/// # Errors
/// The errno of setsockopt(2).
pub fn accept_only(fd: RawFd, bytes: &[u8; 16]) -> io::Result<()> {
    let load = |from: u32, k: u32| libc::sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | from) as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let end = |k: u32| libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k };
    // Goes on if the word that was loaded is this one, else to the end, over so many steps.
    let same = |k: u32, jf: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf,
        k,
    };
    let mut steps = vec![load(libc::BPF_LEN, 0), same(bytes.len() as u32, 9)];
    for (at, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
        steps.push(load(libc::BPF_ABS, 4 * at as u32));
        steps.push(same(u32::from_be_bytes(*word), 7 - 2 * at as u8));
    }
    steps.extend([end(u32::MAX), end(0)]);
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let length = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: `program` has `length` bytes, and names as many steps as there are; the kernel copies them.
    check(unsafe {
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, (&raw const program).cast(), length)
    })?;
    Ok(())
}

/// Who has sent the next message to a Unix socket that asks for this (`SO_PASSCRED`): the number of a user. The message stays
/// where it is, and descriptors that are passed with it are not received.
///
/// # Errors
/// `EAGAIN` when there is no message; `EACCES` when it does not say; else the errno of recvmsg(2).
pub fn sender(fd: RawFd) -> io::Result<u32> {
    // SAFETY: a computation with a length.
    const ROOM: usize = unsafe { libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) } as usize;
    // Aligned as the headers in it have to be. There is room for one thing.
    let mut control = [0u64; ROOM / size_of::<u64>()];
    const { assert!(ROOM.is_multiple_of(size_of::<u64>()) && align_of::<libc::cmsghdr>() <= align_of::<u64>()) };
    let mut header = message(null_mut(), 0);
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = ROOM as _;
    repeat(|| {
        // SAFETY: `header` names no bytes, and ROOM writable bytes for control data.
        unsafe { libc::recvmsg(fd, &raw mut header, libc::MSG_PEEK | libc::MSG_DONTWAIT) }
    })?;
    // SAFETY: the kernel has filled in `header`.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: null, or inside `control`, which is initialized and aligned for it.
    let is_there = unsafe { first.as_ref() }
        .is_some_and(|it| (it.cmsg_level, it.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS));
    if !is_there {
        return Err(Errno::ACCESS.into());
    }
    // SAFETY: the header's data, which lie behind it.
    let data = unsafe { libc::CMSG_DATA(first) };
    // SAFETY: the kernel puts a whole `ucred` there or nothing; ROOM is for one.
    Ok(unsafe { data.cast::<libc::ucred>().read_unaligned() }.uid)
}

/// The next byte of the stream without taking it; `None` when the peer has closed its side.
///
/// # Errors
/// The errno; `EAGAIN` when nothing is there now.
pub fn peek(fd: RawFd) -> io::Result<Option<u8>> {
    let mut byte = [0u8];
    // Not recv(2): see `send`.
    let n = repeat(|| {
        let (flags, address, length) = (libc::MSG_PEEK | libc::MSG_DONTWAIT, null_mut(), null_mut());
        // SAFETY: `byte` is writable for its length, and no address is asked for.
        unsafe { libc::recvfrom(fd, byte.as_mut_ptr().cast(), byte.len(), flags, address, length) }
    })?;
    Ok((n == 1).then_some(byte[0]))
}

/// A message of `pieces` pieces, without an address or control data.
fn message(first: *mut libc::iovec, pieces: usize) -> libc::msghdr {
    libc::msghdr {
        msg_name: null_mut(),
        msg_namelen: 0,
        msg_iov: first,
        msg_iovlen: pieces.min(IOV_MAX),
        msg_control: null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

/// Whether the descriptor is in non-blocking mode.
pub fn is_nonblocking(fd: RawFd) -> bool {
    borrow(fd).is_ok_and(|fd| fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)))
}

/// Puts the descriptor into non-blocking mode.
///
/// # Errors
/// The errno of fcntl(2).
#[cfg(feature = "verbs")]
pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    let fd = borrow(fd)?;
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}

/// Switches Nagle's algorithm off. A socket that has none (not TCP) is left as it is.
///
/// # Errors
/// The errno of setsockopt(2), except that the socket is not TCP.
pub fn set_nodelay(fd: RawFd) -> io::Result<()> {
    #[cfg(test)]
    if simulated::is(fd) {
        return Ok(());
    }
    match sockopt::set_tcp_nodelay(borrow(fd)?, true) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOPROTOOPT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Bytes that TCP now puts into one segment of this connection; `None` when the socket is not TCP.
pub fn tcp_mss(fd: RawFd) -> Option<usize> {
    #[cfg(test)]
    if let Some(segment) = simulated::segment(fd) {
        return Some(segment);
    }
    let mut mss: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: value and length point to live variables of the sizes that they state.
    let result = check(unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG, (&raw mut mss).cast(), &raw mut len)
    });
    match result {
        Ok(_) => usize::try_from(mss).ok().filter(|mss| *mss > 0),
        Err(_) => None,
    }
}

/// Bytes in the send buffer of a TCP socket that its peer has not acknowledged; 0 if the system does not say.
pub fn unacknowledged(fd: RawFd) -> u64 {
    #[cfg(test)]
    if let Some(bytes) = simulated::unacknowledged(fd) {
        return bytes;
    }
    let mut bytes: c_int = 0;
    // SAFETY: SIOCOUTQ, which is TIOCOUTQ, writes one int; other descriptors refuse it.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 { 0 } else { u64::try_from(bytes).unwrap_or(0) }
}

/// Makes the kernel notice that the peer of an idle TCP connection is gone, after about two minutes of silence.
pub fn keep_alive(fd: RawFd) {
    let Ok(fd) = borrow(fd) else { return };
    // A socket that cannot do it stays as it is.
    let _ = sockopt::set_socket_keepalive(fd, true);
    let _ = sockopt::set_tcp_keepidle(fd, Duration::from_secs(60));
    let _ = sockopt::set_tcp_keepintvl(fd, Duration::from_secs(15));
    let _ = sockopt::set_tcp_keepcnt(fd, 4);
}

/// Whether the peer of a TCP socket is this host: what is sent there crosses no wire.
pub fn own_host(fd: RawFd) -> bool {
    // TCP takes the destination address as its own source address when that address is local.
    match (peer(fd), local(fd)) {
        (Some(peer), Some(local)) => {
            let (peer, local) = (peer.ip().to_canonical(), local.ip().to_canonical());
            peer.is_loopback() || peer == local
        }
        _ => false,
    }
}

/// A TCP socket that is being connected to `to`: connect(2) is under way, and [`connected`] tells when it is done.
///
/// It later takes the place of `fd` ([`take_place`]). If `fd` has a reserved port, the new socket gets another reserved
/// port, as servers that trust such ports demand.
///
/// # Errors
/// The errno.
pub fn connect_beside(fd: RawFd, to: SocketAddr) -> io::Result<OwnedFd> {
    let fresh = new(to, SocketType::STREAM, SocketFlags::NONBLOCK)?;
    if local(fd).is_some_and(|at| at.port() < RESERVED.end) {
        // A failure leaves the socket unbound, which may be good enough.
        let _ = bind_reserved(&fresh, to.is_ipv4());
    }
    match rustix::net::connect(&fresh, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(fresh),
        Err(error) => Err(error.into()),
    }
}

/// A socket of the family of `address`.
fn new(address: SocketAddr, kind: SocketType, flags: SocketFlags) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Ok(socket_with(family, kind, flags | SocketFlags::CLOEXEC, None)?)
}

/// Whether a connect(2) that was under way is done.
///
/// # Errors
/// Why it has failed.
pub fn connected(fd: RawFd) -> io::Result<bool> {
    if !wait::until(fd, wait::OUT, Some(Duration::ZERO), None)? {
        return Ok(false);
    }
    sockopt::socket_error(borrow(fd)?)??;
    Ok(true)
}

/// Puts `fresh` in the place of `fd`, which keeps its number and its flags.
///
/// The old connection is closed in an orderly way, unless another process has it too: what was sent on it still arrives,
/// which connect(2) on the same socket would cut off with a reset.
///
/// # Errors
/// The errno; the old connection is still there then.
pub fn take_place(fresh: OwnedFd, fd: RawFd) -> io::Result<()> {
    let old = borrow(fd)?;
    fcntl_setfl(&fresh, fcntl_getfl(old)?)?;
    replace(fd, fresh, fcntl_getfd(old)?.contains(FdFlags::CLOEXEC))
}

/// Ports that only root may bind, except those below 600, which belong to well-known services, as in bindresvport(3).
const RESERVED: std::ops::Range<u16> = 600..1024;

/// Binds a socket to any address and a reserved port. bindresvport(3) of the C library knows IPv4 only.
fn bind_reserved(socket: &OwnedFd, v4: bool) -> rustix::io::Result<()> {
    let any = if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let start = random_u32() as u16;
    for n in 0..RESERVED.len() as u16 {
        let port = RESERVED.start + start.wrapping_add(n) % RESERVED.len() as u16;
        match bind(socket, &SocketAddr::new(any, port)) {
            Err(Errno::ADDRINUSE) => {}
            bound => return bound,
        }
    }
    Err(Errno::ADDRINUSE)
}

/// Ends both directions of a connection: the peer learns of it even though descriptors of the connection remain open.
pub fn shutdown(fd: RawFd) {
    #[cfg(test)]
    simulated::shutdown(fd);
    // A connection that is gone already is no concern.
    let _ = borrow(fd).map(|fd| rustix::net::shutdown(fd, Shutdown::Both));
}

/// The address that the socket is bound to; `None` for anything but an internet socket.
pub fn local(fd: RawFd) -> Option<SocketAddr> {
    getsockname(borrow(fd).ok()?).ok()?.try_into().ok()
}

/// The address that the socket is connected to; `None` if it is not.
pub fn peer(fd: RawFd) -> Option<SocketAddr> {
    getpeername(borrow(fd).ok()?).ok()??.try_into().ok()
}

/// Whether the socket carries a byte stream.
pub fn is_stream(fd: RawFd) -> bool {
    borrow(fd).is_ok_and(|fd| sockopt::socket_type(fd) == Ok(SocketType::STREAM))
}

/// Whether the socket listens.
pub fn listens(fd: RawFd) -> bool {
    borrow(fd).is_ok_and(|fd| sockopt::socket_acceptconn(fd) == Ok(true))
}

/// Whether it is a socket that does not listen.
pub fn has_messages(fd: RawFd) -> bool {
    borrow(fd).is_ok_and(|fd| sockopt::socket_acceptconn(fd) == Ok(false))
}

/// connect(2), waiting as long as the socket's own mode says.
///
/// # Errors
/// The errno.
pub fn connect(fd: RawFd, address: SocketAddr) -> io::Result<()> {
    Ok(rustix::net::connect(borrow(fd)?, &address)?)
}

/// Undoes a connect(2): the socket can be connected again, from the port that it was bound to, if any.
///
/// # Errors
/// The errno.
pub fn disconnect(fd: RawFd) -> io::Result<()> {
    Ok(connect_unspec(borrow(fd)?)?)
}

/// Closes a descriptor that belongs to us.
pub fn close(fd: RawFd) {
    // SAFETY: no memory is passed.
    unsafe { libc::close(fd) };
}

/// listen(2), with the longest queue that the system allows.
///
/// # Errors
/// The errno.
pub fn listen(fd: RawFd) -> io::Result<()> {
    Ok(rustix::net::listen(borrow(fd)?, libc::SOMAXCONN)?)
}

/// Whether an IPv6 socket bound to any address accepts IPv4 too.
pub fn takes_both_families(fd: RawFd) -> bool {
    borrow(fd).is_ok_and(|fd| sockopt::ipv6_v6only(fd) == Ok(false))
}

/// The interface that the socket is bound to by `SO_BINDTODEVICE`, if any.
pub fn interface(fd: RawFd) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    let mut length = name.len() as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
    // SAFETY: the name is writable for the length that is passed.
    let done = unsafe { libc::getsockopt(fd, level, option, name.as_mut_ptr().cast(), &mut length) };
    let name = name.split(|byte| *byte == 0).next().filter(|name| done == 0 && !name.is_empty())?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// The addresses of this host's interfaces, or of the interface of this name, with port 0; none if the system does not
/// say.
pub fn local_addresses(interface: Option<&str>) -> Vec<SocketAddr> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` may be written.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next: *const libc::ifaddrs = list;
    // SAFETY: NULL, or an entry of the list, which is alive.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: a string, or NULL.
        let name = unsafe { crate::ffi::cstr(entry.ifa_name) }.map(|name| name.to_string_lossy());
        if interface.is_some_and(|wanted| name.as_deref() != Some(wanted)) {
            continue;
        }
        // SAFETY: NULL, or an address of the family that it names.
        let family = unsafe { entry.ifa_addr.as_ref() }.map_or(0, |address| i32::from(address.sa_family));
        let length = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        // SAFETY: an address of that family has that length.
        found.extend(Sockaddr::parse(unsafe { std::slice::from_raw_parts(entry.ifa_addr.cast(), length) }));
    }
    // SAFETY: made by getifaddrs, and no longer used.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// A port that nobody else gets, and on which nobody listens yet.
pub struct Reserved(#[expect(dead_code, reason = "held")] OwnedFd);

impl Reserved {
    /// Ends a listening socket and keeps its port. The number of its descriptor stays, and never becomes ready.
    ///
    /// # Errors
    /// The errno.
    pub fn in_place_of(fd: RawFd, address: SocketAddr) -> io::Result<Reserved> {
        let socket = new(address, SocketType::STREAM, SocketFlags::empty())?;
        // A device that binds the port too sets the same option.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        // Bound beside the socket that still listens, so that the port is never free: Linux checks this option of both at
        // this moment.
        let listening = borrow(fd)?;
        let shares = sockopt::socket_reuseport(listening)?;
        sockopt::set_socket_reuseport(listening, true)?;
        let bound = sockopt::set_socket_reuseport(&socket, true)
            .and_then(|()| bind(&socket, &address))
            .and_then(|()| sockopt::set_socket_reuseport(&socket, false));
        sockopt::set_socket_reuseport(listening, shares)?;
        bound?;
        replace(fd, Reserved::deaf(address)?, true)?;
        // Linux keeps for the port the setting of its latest socket: without one that does not share it, others that do may
        // bind it.
        let last = new(address, SocketType::STREAM, SocketFlags::empty())?;
        sockopt::set_socket_reuseaddr(&last, true)?;
        bind(&last, &address)?;
        Ok(Reserved(socket))
    }

    /// A socket that is never ready, and still knows the address if asked: a datagram socket that drops all datagrams, or
    /// an eventfd(2) if the address is taken for datagrams.
    fn deaf(address: SocketAddr) -> io::Result<OwnedFd> {
        let socket = new(address, SocketType::DGRAM, SocketFlags::empty())?;
        // "Return 0": nothing of a packet is kept.
        let mut drop_all =
            libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let filter = libc::sock_fprog { len: 1, filter: &mut drop_all };
        let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
        let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
        // SAFETY: the program is readable for the one instruction that it says, and is copied.
        check(unsafe {
            libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const filter).cast(), size)
        })?;
        match bind(&socket, &address) {
            Ok(()) => Ok(socket),
            Err(_) => Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
        }
    }
}

/// A second descriptor of the same socket, above the standard ones.
///
/// # Errors
/// The errno.
pub fn duplicate(fd: RawFd) -> io::Result<RawFd> {
    Ok(fcntl_dupfd_cloexec(borrow(fd)?, 3)?.into_raw_fd())
}

/// A socket address in the form that C functions want.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct Sockaddr {
    bytes: [u8; 28],
    len: u32,
}

impl Sockaddr {
    /// For functions that take a `struct sockaddr *`; valid as long as `self` is not moved.
    pub fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        self.bytes.as_mut_ptr().cast()
    }

    /// The bytes of the `sockaddr_in` or `sockaddr_in6`.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }

    /// The address that a `sockaddr_storage` holds.
    #[cfg(feature = "verbs")]
    pub fn stored(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
        let bytes: *const libc::sockaddr_storage = storage;
        // SAFETY: every byte of a sockaddr_storage may be read, and it is longer than this.
        Sockaddr::parse(unsafe { std::slice::from_raw_parts(bytes.cast(), 28) })
    }

    /// Reads a `sockaddr_in` or `sockaddr_in6`.
    pub fn parse(bytes: &[u8]) -> Option<SocketAddr> {
        let (family, rest) = bytes.split_first_chunk::<2>()?;
        let (port, rest) = rest.split_first_chunk::<2>()?;
        let port = u16::from_be_bytes(*port);
        match i32::from(u16::from_ne_bytes(*family)) {
            libc::AF_INET => {
                let ip = Ipv4Addr::from(*rest.first_chunk::<4>()?);
                // A sockaddr_in has eight bytes of padding, which nobody reads; libtirpc counts them.
                Some(SocketAddr::V4(SocketAddrV4::new(ip, port)))
            }
            libc::AF_INET6 => {
                let (flow, rest) = rest.split_first_chunk::<4>()?;
                let (ip, rest) = rest.split_first_chunk::<16>()?;
                let scope = u32::from_ne_bytes(*rest.first_chunk::<4>()?);
                let flow = u32::from_be_bytes(*flow);
                Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(*ip), port, flow, scope)))
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for Sockaddr {
    fn from(address: SocketAddr) -> Sockaddr {
        let mut bytes = [0; 28];
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        let len = match address {
            SocketAddr::V4(v4) => {
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                size_of::<libc::sockaddr_in6>()
            }
        };
        Sockaddr { bytes, len: len as u32 }
    }
}

/// Sockets for tests.
#[cfg(test)]
pub mod testing {
    /// Leaves the socket room for only a few messages.
    pub fn shrink_buffers(fd: super::RawFd) {
        set_buffers(fd, 8 << 10);
    }

    /// Sets roughly how much a socket holds.
    pub fn set_buffers(fd: super::RawFd, bytes: i32) {
        let fd = super::borrow(fd).unwrap();
        super::sockopt::set_socket_send_buffer_size(fd, bytes as usize).unwrap();
        super::sockopt::set_socket_recv_buffer_size(fd, bytes as usize).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_is_disconnected_and_connected_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = TcpStream::connect(to).unwrap();
        let fd = stream.as_raw_fd();
        drop(listener.accept().unwrap());
        disconnect(fd).unwrap();
        assert_eq!(peer(fd), None);
        connect(fd, to).unwrap();
        assert_eq!(peer(fd), Some(to));
        assert!(is_stream(fd) && !listens(fd));
    }

    #[test]
    fn what_is_no_socket_has_no_address() {
        assert_eq!((local(-1), peer(-1)), (None, None));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(local(file.as_raw_fd()), None);
        assert!(!is_stream(file.as_raw_fd()));
    }

    #[test]
    fn a_reserved_port_serves_nobody_and_its_descriptor_is_never_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (fd, at) = (listener.as_raw_fd(), listener.local_addr().unwrap());
        let reserved = Reserved::in_place_of(fd, at).unwrap();
        assert_eq!(local(fd), Some(at));
        assert_eq!(TcpStream::connect(at).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"noise", at).unwrap();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        assert_eq!(unsafe { libc::poll(&mut poll, 1, 50) }, 0);
        let another = || TcpListener::bind(at).map(drop).map_err(|error| error.kind());
        assert_eq!(another(), Ok(()), "a device binds the port beside it");
        let strict = new(at, SocketType::STREAM, SocketFlags::empty()).unwrap();
        assert_eq!(bind(&strict, &at), Err(rustix::io::Errno::ADDRINUSE), "nobody else does");
        sockopt::set_socket_reuseport(&strict, true).unwrap();
        assert_eq!(bind(&strict, &at), Err(rustix::io::Errno::ADDRINUSE), "nor who would share it");
        drop(reserved);
    }

    #[test]
    fn a_gathered_send_arrives_in_a_scattered_receive_and_nothing_blocks() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut byte = [0u8; 1];
        let empty = receive(b.as_raw_fd(), &mut [IoVecMut::from_mut(&mut byte)]);
        assert_eq!(empty.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(send(a.as_raw_fd(), &[IoVec::from_slice(b"ab"), IoVec::from_slice(b"cde")]).unwrap(), 5);
        assert_eq!(peek(b.as_raw_fd()).unwrap(), Some(b'a'));
        let (mut x, mut y) = ([0u8; 3], [0u8; 9]);
        let n =
            receive(b.as_raw_fd(), &mut [IoVecMut::from_mut(&mut x), IoVecMut::from_mut(&mut y)]).unwrap();
        assert_eq!((n, &x, &y[..2]), (5, b"abc", &b"de"[..]));
        drop(a);
        assert_eq!(peek(b.as_raw_fd()).unwrap(), None);
        let gone = send(b.as_raw_fd(), &[IoVec::from_slice(b"x")]).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::EPIPE));
    }

    #[test]
    fn more_pieces_than_one_call_takes_are_sent_in_part() {
        let (a, _b) = UnixStream::pair().unwrap();
        let pieces = vec![IoVec::from_slice(b"x"); IOV_MAX + 5];
        assert_eq!(send(a.as_raw_fd(), &pieces).unwrap(), IOV_MAX);
    }

    #[test]
    fn options_of_tcp_are_set_on_tcp_and_ignored_elsewhere() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        set_nodelay(stream.as_raw_fd()).unwrap();
        assert!(stream.nodelay().unwrap());
        assert!(tcp_mss(stream.as_raw_fd()).unwrap() > 500);
        assert!(own_host(stream.as_raw_fd()));
        let (a, _b) = UnixStream::pair().unwrap();
        set_nodelay(a.as_raw_fd()).unwrap();
        assert_eq!(tcp_mss(a.as_raw_fd()), None);
        assert!(set_nodelay(-1).is_err());
    }

    /// As [`connect_beside`], but waits until the connection is there.
    fn beside(fd: RawFd, to: SocketAddr) -> io::Result<OwnedFd> {
        let fresh = connect_beside(fd, to)?;
        while !connected(fresh.as_raw_fd())? {
            wait::until(fresh.as_raw_fd(), wait::OUT, None, None)?;
        }
        Ok(fresh)
    }

    #[test]
    fn a_socket_is_connected_anew_to_the_same_peer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_first, _) = listener.accept().unwrap();
        let fresh = beside(stream.as_raw_fd(), stream.peer_addr().unwrap()).unwrap();
        take_place(fresh, stream.as_raw_fd()).unwrap();
        let (second, _) = listener.accept().unwrap();
        (&stream).write_all(b"x").unwrap();
        assert!(
            wait::poll(&mut [wait::PollFd::new(second.as_raw_fd(), true, false)], None, None).unwrap() == 1
        );
        assert_eq!(peek(second.as_raw_fd()).unwrap(), Some(b'x'));
    }

    #[test]
    fn connecting_does_not_wait_and_tells_how_it_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = TcpStream::connect(to).unwrap();
        // No queue: a second connection that nobody accepts gets no answer.
        rustix::net::listen(&listener, 0).unwrap();
        let fresh = connect_beside(stream.as_raw_fd(), to).unwrap();
        assert!(!connected(fresh.as_raw_fd()).unwrap());
        drop((fresh, listener));
        let refused = beside(stream.as_raw_fd(), to).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ECONNREFUSED));
    }

    #[test]
    fn a_reserved_port_is_followed_by_another_over_both_families() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else { continue };
            let to = listener.local_addr().unwrap();
            let old = new(to, SocketType::STREAM, SocketFlags::empty()).unwrap();
            match bind_reserved(&old, to.is_ipv4()) {
                // Only root may.
                Err(Errno::ACCESS) => return,
                bound => bound.unwrap(),
            }
            let fresh = beside(old.as_raw_fd(), to).unwrap();
            let (before, now) = (local(old.as_raw_fd()), local(fresh.as_raw_fd()));
            let (before, now) = (before.unwrap().port(), now.unwrap().port());
            assert!(
                RESERVED.contains(&before) && RESERVED.contains(&now) && before != now,
                "{host}: {before}, {now}"
            );
        }
    }
}

/// For tests: streams of bytes in place of sockets, for one thread. Their descriptors are not real ones.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::io;

    use super::{IoVec, IoVecMut, RawFd};

    /// One end of a connection.
    pub(crate) trait Stream {
        /// Bytes that it takes now.
        fn room(&mut self) -> io::Result<usize>;
        fn put(&mut self, bytes: Vec<u8>);
        /// At most this many of the bytes that have come; none: the peer has closed its side.
        fn get(&mut self, most: usize) -> io::Result<Vec<u8>>;
        fn unacknowledged(&self) -> usize;
        fn segment(&self) -> usize;
        fn shutdown(&mut self);
    }

    const FIRST: RawFd = -1000;

    thread_local! {
        static STREAMS: RefCell<BTreeMap<RawFd, Box<dyn Stream>>> = const { RefCell::new(BTreeMap::new()) };
    }

    /// The descriptor of an end, which is closed when this is dropped.
    pub(crate) struct Socket(pub(crate) RawFd);

    impl Socket {
        pub(crate) fn new(stream: Box<dyn Stream>) -> Socket {
            STREAMS.with_borrow_mut(|streams| {
                let fd = streams.first_key_value().map_or(FIRST, |(lowest, _)| lowest - 1);
                streams.insert(fd, stream);
                Socket(fd)
            })
        }
    }

    impl Drop for Socket {
        fn drop(&mut self) {
            shutdown(self.0);
            STREAMS.with_borrow_mut(|streams| streams.remove(&self.0));
        }
    }

    pub(super) fn is(fd: RawFd) -> bool {
        fd <= FIRST
    }

    fn with<R>(fd: RawFd, then: impl FnOnce(&mut dyn Stream) -> R) -> Option<R> {
        if !is(fd) {
            return None;
        }
        STREAMS.with_borrow_mut(|streams| streams.get_mut(&fd).map(|stream| then(&mut **stream)))
    }

    pub(super) fn send(fd: RawFd, pieces: &[IoVec<'_>]) -> Option<io::Result<usize>> {
        with(fd, |stream| {
            let mut left = stream.room()?;
            let mut bytes = Vec::with_capacity(left.min(1 << 16));
            for piece in pieces {
                piece.copy_to(&mut bytes, left);
                left -= piece.len().min(left);
            }
            let count = bytes.len();
            stream.put(bytes);
            Ok(count)
        })
    }

    pub(super) fn receive(fd: RawFd, pieces: &mut [IoVecMut<'_>]) -> Option<io::Result<usize>> {
        with(fd, |stream| {
            let bytes = stream.get(pieces.iter().map(IoVecMut::len).sum())?;
            let mut rest = &bytes[..];
            for piece in pieces {
                let (now, later) = rest.split_at(piece.len().min(rest.len()));
                piece.copy_from(now);
                rest = later;
            }
            Ok(bytes.len())
        })
    }

    pub(super) fn segment(fd: RawFd) -> Option<usize> {
        with(fd, |stream| stream.segment())
    }

    pub(super) fn unacknowledged(fd: RawFd) -> Option<u64> {
        with(fd, |stream| stream.unacknowledged() as u64)
    }

    pub(super) fn shutdown(fd: RawFd) {
        with(fd, |stream| stream.shutdown());
    }
}
