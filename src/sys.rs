//! Thin, safe wrappers of the system calls that std does not offer in the form that a queue pair needs.
//!
//! Owns nothing but the fork generation and the cached process id. Every function is one system call (or one family
//! of them) with checked arguments; policy, retries after `EAGAIN` and the meaning of an errno are the caller's.
//!
//! # Invariants
//! - `EINTR` never reaches a caller: transfers are repeated, waits return early with nothing ready.
//! - Nothing here raises SIGPIPE (`MSG_NOSIGNAL`) or blocks (`MSG_DONTWAIT`) except [`poll`], [`wait`],
//!   [`Event::wait`] and, for at most [`LOCK_PATIENCE_MS`], [`SharedPage::lock`]. The sockets belong to programs and may
//!   be in blocking mode.
//! - A [`SharedPage`] holds only its lock and atomic words: no pointer, no state that a process could leave torn.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;

use crate::ffi::guard;
use crate::memory::{IoVec, IoVecMut};
use crate::socket::Sockaddr;

/// Most elements of one gathered or scattered transfer (`IOV_MAX` of Linux).
pub const IOV_MAX: usize = 1024;

/// How long [`SharedPage::lock`] waits for another process, in milliseconds. A holder keeps the lock for one
/// non-blocking send; only a stopped process keeps it longer.
pub const LOCK_PATIENCE_MS: i64 = 10;

/// Sends the concatenation of `pieces`; how many bytes the socket took.
///
/// # Errors
/// The errno; `EAGAIN` when the socket takes nothing now.
pub fn send(fd: RawFd, pieces: &[IoVec<'_>]) -> io::Result<usize> {
    let mut message = empty_message();
    // INVARIANT: IoVec is repr(transparent) over iovec. sendmsg(2) only reads the array: the cast to *mut is the
    // shape of msghdr, which recvmsg(2) shares.
    message.msg_iov = pieces.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = pieces.len().min(IOV_MAX) as _;
    repeat(|| {
        // SAFETY: `message` names `msg_iovlen` live elements of `pieces`, each alive for the lifetime that it
        // carries; the kernel reads from them only.
        unsafe { libc::sendmsg(fd, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
    })
}

/// Receives into `pieces`, in order; how many bytes came. 0 means that the peer has closed its side.
///
/// # Errors
/// The errno; `EAGAIN` when nothing is there now.
pub fn receive(fd: RawFd, pieces: &mut [IoVecMut<'_>]) -> io::Result<usize> {
    let mut message = empty_message();
    message.msg_iov = pieces.as_mut_ptr().cast::<libc::iovec>();
    message.msg_iovlen = pieces.len().min(IOV_MAX) as _;
    repeat(|| {
        // SAFETY: `message` names `msg_iovlen` live elements of `pieces`, each a target that its lifetime lends
        // exclusively (or a `Sink`, of which no slice exists).
        unsafe { libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT) }
    })
}

/// The next byte of the stream without taking it; `None` when the peer has closed its side.
///
/// # Errors
/// The errno; `EAGAIN` when nothing is there now.
pub fn peek(fd: RawFd) -> io::Result<Option<u8>> {
    let mut byte = 0u8;
    let n = repeat(|| {
        // SAFETY: `byte` is one writable byte.
        unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) }
    })?;
    Ok((n == 1).then_some(byte))
}

/// Whether the descriptor is in non-blocking mode.
pub fn is_nonblocking(fd: RawFd) -> bool {
    // SAFETY: touches no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// Puts the descriptor into non-blocking mode.
///
/// # Errors
/// The errno of fcntl(2).
pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_GETFL takes no argument and touches no memory.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: F_SETFL takes an int and touches no memory.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Switches Nagle's algorithm off. A socket that has none (not TCP) is left as it is.
///
/// # Errors
/// The errno of setsockopt(2), except that the socket is not TCP.
pub fn set_nodelay(fd: RawFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option value is a live c_int of the size that is passed.
    let result = check(unsafe {
        libc::setsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    });
    match result {
        Err(e) if !matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOPROTOOPT)) => Err(e),
        _ => Ok(()),
    }
}

/// Bytes that TCP now puts into one segment of this connection; `None` when the socket is not TCP.
pub fn tcp_mss(fd: RawFd) -> Option<usize> {
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

/// Bytes in the send buffer of a TCP socket that its peer has not acknowledged; 0 where there is no such number.
pub fn unacknowledged(fd: RawFd) -> u64 {
    let mut bytes: c_int = 0;
    // SAFETY: SIOCOUTQ, which is TIOCOUTQ, writes one int; other descriptors refuse it.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 { 0 } else { u64::try_from(bytes).unwrap_or(0) }
}

/// Fills `bytes` from the kernel's generator.
///
/// # Errors
/// The errno of getrandom(2).
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &mut bytes[done..];
        done += repeat(|| {
            // SAFETY: `rest` is writable for its length.
            unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) }
        })?;
    }
    Ok(())
}

/// A number that cannot be guessed; where the generator fails, one that is merely unlikely to repeat.
pub fn random_u32() -> u32 {
    let mut bytes = [0; 4];
    match random(&mut bytes) {
        Ok(()) => u32::from_ne_bytes(bytes),
        Err(_) => std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |t| t.subsec_nanos() ^ (t.as_secs() as u32).rotate_left(16) ^ process_id()),
    }
}

/// Whether the peer of a TCP socket is this host: what is sent there crosses no wire.
pub fn own_host(fd: RawFd) -> bool {
    // TCP takes the address that is reached as its own source address when that address is local.
    match (borrowed(fd).peer_addr(), borrowed(fd).local_addr()) {
        (Ok(peer), Ok(local)) => {
            let (peer, local) = (peer.ip().to_canonical(), local.ip().to_canonical());
            peer.is_loopback() || peer == local
        }
        _ => false,
    }
}

/// A TCP socket that is on its way to `to`: connect(2) is under way, and [`connected`] tells when it is done.
///
/// It takes the place of `fd` later ([`take_place`]): where that one has a reserved port this one gets another, as servers
/// that trust them demand.
///
/// # Errors
/// The errno.
pub fn connect_beside(fd: RawFd, to: SocketAddr) -> io::Result<OwnedFd> {
    let address = Sockaddr::from(to);
    let address = address.as_bytes();
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: touches no memory.
    let fresh = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: just made, and owned by nobody else.
    let fresh = unsafe { OwnedFd::from_raw_fd(fresh) };
    let new = fresh.as_raw_fd();
    if borrowed(fd).local_addr().is_ok_and(|at| at.port() < RESERVED.end) {
        // A failure leaves the socket unbound, which may be good enough.
        let _ = bind_reserved(new, to.is_ipv4());
    }
    // SAFETY: `address` is readable for its length.
    match check(unsafe { libc::connect(new, address.as_ptr().cast(), address.len() as libc::socklen_t) }) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(fresh),
    }
}

/// Whether a connect(2) that was under way is done.
///
/// # Errors
/// Why it has failed.
pub fn connected(fd: RawFd) -> io::Result<bool> {
    if !wait(fd, OUT, Some(Duration::ZERO), None)? {
        return Ok(false);
    }
    borrowed(fd).take_error()?.map_or(Ok(true), Err)
}

/// Puts `fresh` in the place of `fd`, which keeps its number and its flags.
///
/// The old connection is closed in an orderly way, unless another process has it too: what was sent on it still arrives,
/// which connect(2) on the same socket would cut off with a reset.
///
/// # Errors
/// The errno; the old connection is still there then.
pub fn take_place(fresh: OwnedFd, fd: RawFd) -> io::Result<()> {
    // SAFETY: touches no memory.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: as above.
    let close = check(unsafe { libc::fcntl(fd, libc::F_GETFD) })? & libc::FD_CLOEXEC;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fresh.as_raw_fd(), libc::F_SETFL, flags) })?;
    let close = if close != 0 { libc::O_CLOEXEC } else { 0 };
    // SAFETY: touches no memory; both descriptors are open.
    check(unsafe { libc::dup3(fresh.as_raw_fd(), fd, close) }).map(drop)
}

/// Ports that only root binds; below 600 are those of well-known services, as bindresvport(3) has it.
const RESERVED: std::ops::Range<u16> = 600..1024;

/// Binds a socket to any address and a reserved port. bindresvport(3) of the C library knows IPv4 only.
fn bind_reserved(fd: RawFd, v4: bool) -> io::Result<()> {
    let start = random_u32() as u16;
    let mut result = Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    for n in 0..RESERVED.len() as u16 {
        let port = RESERVED.start + start.wrapping_add(n) % RESERVED.len() as u16;
        let any = if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let address = Sockaddr::from(SocketAddr::new(any, port));
        let address = address.as_bytes();
        // SAFETY: `address` is readable for its length.
        result = check(unsafe { libc::bind(fd, address.as_ptr().cast(), address.len() as libc::socklen_t) })
            .map(drop);
        if !matches!(&result, Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE)) {
            return result;
        }
    }
    result
}

/// std's view of a socket that stays its owner's.
fn borrowed(fd: RawFd) -> ManuallyDrop<TcpStream> {
    // SAFETY: never dropped, so the descriptor is not closed; std only makes calls that fail on a wrong one.
    ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd) })
}

/// One descriptor to wait for.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct PollFd(libc::pollfd);

impl PollFd {
    /// Waits for readability if `read`, for writability if `write`; errors and hang-ups always count.
    pub fn new(fd: RawFd, read: bool, write: bool) -> PollFd {
        let events = if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 };
        PollFd(libc::pollfd { fd, events, revents: 0 })
    }

    /// Whether a read would not block (data, end of stream, or an error to fetch).
    pub fn readable(&self) -> bool {
        self.0.revents & (libc::POLLIN | libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
    }

    /// Whether a write would not block.
    pub fn writable(&self) -> bool {
        self.0.revents & (libc::POLLOUT | libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
    }

    /// Whether the descriptor is not open.
    pub fn invalid(&self) -> bool {
        self.0.revents & libc::POLLNVAL != 0
    }
}

/// Waits until one of `fds` is ready or the time is over (`None`: no limit), with `mask` as the thread's signal mask
/// meanwhile (`None`: as it is). How many are ready; 0 also when a signal came: the caller looks at its clock and
/// its flags.
///
/// # Errors
/// The errno of ppoll(2), except `EINTR`.
pub fn poll(fds: &mut [PollFd], timeout: Option<Duration>, mask: Option<&SignalMask>) -> io::Result<usize> {
    let time = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos() as _,
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), |mask| std::ptr::from_ref(&mask.0));
    // SAFETY: PollFd is repr(transparent) over pollfd and `fds` is exclusively ours; `time` and `mask` are null or
    // point to live values.
    let n = unsafe { libc::ppoll(fds.as_mut_ptr().cast(), fds.len() as libc::nfds_t, time, mask) };
    if n < 0 {
        let e = io::Error::last_os_error();
        // revents are undefined now: nothing is ready.
        fds.iter_mut().for_each(|fd| fd.0.revents = 0);
        return if e.raw_os_error() == Some(libc::EINTR) { Ok(0) } else { Err(e) };
    }
    Ok(n as usize)
}

/// Has exit(3), and the return from main, call `handler` first.
///
/// # Errors
/// There is no memory for it.
pub fn at_exit(handler: extern "C" fn()) -> io::Result<()> {
    // SAFETY: the handler is safe to call. The library is linked with -z nodelete: it stays mapped.
    let refused = unsafe { libc::atexit(handler) };
    if refused == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOMEM)) }
}

/// Ends both directions of a connection: the peer learns of it although descriptors of it remain open.
pub fn shutdown(fd: RawFd) {
    // SAFETY: touches no memory. A connection that is gone already is no concern.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

/// How often this thread lost its processor although it wanted to go on.
pub fn preemptions() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is writable.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: plain numbers, zeroed where the call wrote nothing.
    unsafe { usage.assume_init() }.ru_nivcsw
}

/// [`wait`] for readability.
pub const IN: i16 = libc::POLLIN;
/// [`wait`] for writability.
pub const OUT: i16 = libc::POLLOUT;

/// As [`poll`], for one descriptor and `events` ([`IN`], [`OUT`]); whether it is ready.
///
/// # Errors
/// As [`poll`].
pub fn wait(
    fd: RawFd,
    events: i16,
    timeout: Option<Duration>,
    mask: Option<&SignalMask>,
) -> io::Result<bool> {
    Ok(poll(&mut [PollFd(libc::pollfd { fd, events, revents: 0 })], timeout, mask)? > 0)
}

/// Most bytes that this process may lock in memory; `None`: as many as there are.
pub fn memlock_limit() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` may be written. An error leaves it as it is.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    if limit.rlim_cur == libc::RLIM_INFINITY { None } else { usize::try_from(limit.rlim_cur).ok() }
}

/// The same, for a process that may have the right to lock more than that.
pub fn lockable() -> Option<usize> {
    const CAP_IPC_LOCK: u32 = 14;
    // struct __user_cap_header_struct, version 3, of the calling thread, and two struct __user_cap_data_struct: what is
    // effective, permitted and inheritable, the lower half first.
    let mut header = [0x2008_0522u32, 0];
    let mut data = [0u32; 6];
    // SAFETY: both may be written, and have the lengths that this version asks for.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), data.as_mut_ptr()) };
    if got == 0 && data[0] & 1 << CAP_IPC_LOCK != 0 { None } else { memlock_limit() }
}

/// Some descriptors that are waited for as one.
pub struct Readables {
    set: OwnedFd,
    /// Readable for ever, once there is one.
    ended: Option<OwnedFd>,
}

impl Readables {
    /// A set of `fds`.
    ///
    /// # Errors
    /// The errno.
    pub fn new(fds: &[RawFd]) -> io::Result<Readables> {
        // SAFETY: touches no memory.
        let set = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: just made, and owned by nobody else.
        let set = unsafe { OwnedFd::from_raw_fd(set) };
        let readables = Readables { set, ended: None };
        for fd in fds {
            readables.add(*fd)?;
        }
        Ok(readables)
    }

    /// One more.
    ///
    /// # Errors
    /// The errno.
    pub fn add(&self, fd: RawFd) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        // SAFETY: the event is readable; the number may be anything.
        check(unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) }).map(drop)
    }

    /// Is readable from now on, whatever becomes of the others: who sleeps on the set wakes.
    ///
    /// # Errors
    /// The errno.
    pub fn end(&mut self) -> io::Result<()> {
        if self.ended.is_none() {
            // SAFETY: touches no memory.
            let fd = check(unsafe { libc::eventfd(1, libc::EFD_CLOEXEC) })?;
            // SAFETY: just made, and owned by nobody else.
            let ended = unsafe { OwnedFd::from_raw_fd(fd) };
            self.add(ended.as_raw_fd())?;
            self.ended = Some(ended);
        }
        Ok(())
    }

    /// Readable when one of them is.
    pub fn fd(&self) -> RawFd {
        self.set.as_raw_fd()
    }

    /// Which are readable now: up to four.
    pub fn ready(&self) -> impl Iterator<Item = RawFd> + use<> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        // SAFETY: there is room for as many events as are asked for; a timeout of 0 returns at once.
        let n = unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), 4, 0) };
        events.into_iter().take(usize::try_from(n).unwrap_or(0)).map(|event| event.u64 as RawFd)
    }
}

/// An epoll set and its alarm, as one descriptor that a program's own loop can poll.
#[derive(Debug)]
pub struct WakeSet {
    set: RawFd,
    timer: RawFd,
}

impl WakeSet {
    /// An empty set without an alarm.
    ///
    /// # Errors
    /// The errno.
    pub fn new() -> io::Result<WakeSet> {
        // SAFETY: touches no memory.
        let set = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        let mut wake = WakeSet { set, timer: -1 };
        wake.add_timer()?;
        Ok(wake)
    }

    /// Puts a fresh set and alarm in the place of those that a fork(2) left shared with the parent, whose
    /// descriptors would otherwise go on waking this process. The number stays.
    ///
    /// # Errors
    /// The errno.
    pub fn renew(&mut self) -> io::Result<()> {
        // SAFETY: touches no memory.
        let fresh = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: touches no memory; both descriptors are ours.
        let done = check(unsafe { libc::dup3(fresh, self.set, libc::O_CLOEXEC) });
        // SAFETY: ours, and used no more.
        unsafe { libc::close(fresh) };
        done?;
        // SAFETY: ours, and used no more.
        unsafe { libc::close(self.timer) };
        self.add_timer()
    }

    fn add_timer(&mut self) -> io::Result<()> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: touches no memory.
        self.timer = check(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) })?;
        self.control(libc::EPOLL_CTL_ADD, self.timer, libc::EPOLLIN)
    }

    /// The descriptor to poll for readability.
    pub fn fd(&self) -> RawFd {
        self.set
    }

    /// Wakes when `fd` is writable, or no longer.
    ///
    /// # Errors
    /// The errno.
    pub fn watch_writable(&self, fd: RawFd, on: bool) -> io::Result<()> {
        if on {
            return self.control(libc::EPOLL_CTL_ADD, fd, libc::EPOLLOUT);
        }
        match self.control(libc::EPOLL_CTL_DEL, fd, 0) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EBADF)) => Ok(()),
            other => other,
        }
    }

    /// Wakes for these `events` ([`IN`], [`OUT`]) of `fd`, and no longer for others; with none, not even for its end.
    ///
    /// # Errors
    /// The errno.
    pub fn watch(&self, fd: RawFd, events: i16) -> io::Result<()> {
        if events == 0 {
            return self.watch_writable(fd, false);
        }
        let epoll = |event: i16, flag: i32| if events & event != 0 { flag } else { 0 };
        let events = epoll(IN, libc::EPOLLIN) | epoll(OUT, libc::EPOLLOUT);
        match self.control(libc::EPOLL_CTL_MOD, fd, events) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => self.control(libc::EPOLL_CTL_ADD, fd, events),
            other => other,
        }
    }

    /// Wakes when `fd`, the descriptor of another set, is readable; [`WakeSet::ready`] tells of it by `key`, which is
    /// the number of no descriptor.
    ///
    /// # Errors
    /// The errno.
    pub fn nest(&self, fd: RawFd, key: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: key };
        // SAFETY: the event is readable; both numbers may be anything.
        check(unsafe { libc::epoll_ctl(self.set, libc::EPOLL_CTL_ADD, fd, &raw mut event) }).map(drop)
    }

    /// The keys of nested sets that are readable now: some of them, others at the next time.
    pub fn ready(&self) -> Vec<u64> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: room for so many events. An error leaves none.
        let count = unsafe { libc::epoll_wait(self.set, events.as_mut_ptr(), events.len() as c_int, 0) };
        let events = &events[..usize::try_from(count).unwrap_or(0)];
        events.iter().map(|event| event.u64).filter(|key| *key != self.timer as u64).collect()
    }

    /// Becomes readable when the alarm goes off, and stays so until it is silenced.
    pub fn alarm_fd(&self) -> RawFd {
        self.timer
    }

    fn control(&self, operation: i32, fd: RawFd, events: i32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: fd as u64 };
        // SAFETY: the event is readable; both numbers may be anything.
        check(unsafe { libc::epoll_ctl(self.set, operation, fd, &raw mut event) }).map(drop)
    }

    /// Wakes once after `time`, replacing an earlier alarm; `None`: never.
    ///
    /// # Errors
    /// The errno.
    pub fn alarm(&self, time: Option<Duration>) -> io::Result<()> {
        // Zero would disarm.
        let time = time.map_or(Duration::ZERO, |t| t.max(Duration::from_nanos(1)));
        // SAFETY: an itimerspec is plain numbers.
        let mut spec: libc::itimerspec = unsafe { MaybeUninit::zeroed().assume_init() };
        spec.it_value.tv_sec = libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX);
        spec.it_value.tv_nsec = time.subsec_nanos() as _;
        // SAFETY: `spec` is readable; no old value is asked for.
        check(unsafe { libc::timerfd_settime(self.timer, 0, &raw const spec, std::ptr::null_mut()) })
            .map(drop)
    }

    /// Takes note of an alarm that has gone off.
    pub fn silence(&self) {
        let mut count = 0u64;
        // SAFETY: `count` has eight writable bytes. EAGAIN means that no alarm was due.
        unsafe { libc::read(self.timer, (&raw mut count).cast(), 8) };
    }
}

impl Drop for WakeSet {
    fn drop(&mut self) {
        for fd in [self.timer, self.set] {
            // SAFETY: ours, and used no more.
            unsafe { libc::close(fd) };
        }
    }
}

/// A signal mask.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct SignalMask(libc::sigset_t);

/// All signals of this thread are blocked while this lives, as libtirpc does around a call.
pub struct BlockedSignals {
    before: SignalMask,
    /// A mask belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks all signals of the calling thread.
    pub fn all() -> BlockedSignals {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigfillset writes the whole set.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `all` was filled above, `before` is writable. It cannot fail: the operation is a valid constant.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: a sigset_t is plain integers: the zeroed one was valid even had nothing been written.
        let before = unsafe { before.assume_init() };
        BlockedSignals { before: SignalMask(before), thread: PhantomData }
    }

    /// The mask that the thread had before, for [`poll`].
    pub fn before(&self) -> &SignalMask {
        &self.before
    }
}

/// Runs `work` of the program under the signal mask that it knows, in the middle of something that blocks signals.
pub fn under_mask<T>(mask: &SignalMask, work: impl FnOnce() -> T) -> T {
    struct Restore(SignalMask);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: a mask that this thread had; the old one is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0.0, std::ptr::null_mut()) };
        }
    }
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `mask` is readable, `before` is writable. It cannot fail: the operation is a valid constant.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &mask.0, before.as_mut_ptr()) };
    // SAFETY: a sigset_t is plain integers: the zeroed one was valid even had nothing been written.
    let _restore = Restore(SignalMask(unsafe { before.assume_init() }));
    work()
}

/// Something that happens once, and that a thread can sleep for with its signals let through.
#[derive(Debug, Default)]
pub struct Event(AtomicU32);

impl Event {
    /// One that has not happened.
    pub const fn new() -> Event {
        Event(AtomicU32::new(0))
    }

    /// Whether it has happened: what was written before it did can be read then.
    pub fn has_happened(&self) -> bool {
        self.0.load(Acquire) != 0
    }

    /// Lets it happen, and wakes whoever sleeps for it.
    pub fn happen(&self) {
        self.0.store(1, Release);
        // SAFETY: the kernel compares the address with those of sleepers, and touches no memory.
        unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), FUTEX_WAKE, c_int::MAX) };
    }

    /// Sleeps until it happens, the time is over (`None`: no limit) or a signal came, with `mask` as the thread's signal
    /// mask meanwhile (`None`: as it is). A handler may sleep for other events: none of them is lost.
    pub fn wait(&self, timeout: Option<Duration>, mask: Option<&SignalMask>) {
        let time = timeout.map(|t| libc::timespec {
            tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: t.subsec_nanos() as _,
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let sleep = || {
            // SAFETY: the word is alive, and the kernel only reads it; `time` is null or points to a live value.
            unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), FUTEX_WAIT, 0, time) };
        };
        match mask {
            Some(mask) => under_mask(mask, sleep),
            None => sleep(),
        }
    }
}

const FUTEX_WAIT: c_int = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
const FUTEX_WAKE: c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;

/// Names the calling thread; no other one of this process ever has its name, which is never 0.
pub fn this_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    thread_local! {
        static NAME: usize = NEXT.fetch_add(1, Relaxed);
    }
    NAME.with(|name| *name)
}

/// Addresses of the calling thread's own stack; what it runs as a coroutine has another. `None` if the system does not tell.
pub fn own_stack() -> Option<Range<usize>> {
    thread_local! {
        static STACK: Option<Range<usize>> = find();
    }
    fn find() -> Option<Range<usize>> {
        let mut attributes = MaybeUninit::<libc::pthread_attr_t>::zeroed();
        // SAFETY: takes nothing.
        let thread = unsafe { libc::pthread_self() };
        // SAFETY: the calling thread is alive, and `attributes` is writable.
        if unsafe { libc::pthread_getattr_np(thread, attributes.as_mut_ptr()) } != 0 {
            return None;
        }
        let (mut lowest, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: initialised above; both places are writable.
        let found = unsafe { libc::pthread_attr_getstack(attributes.as_ptr(), &mut lowest, &mut size) } == 0;
        // SAFETY: initialised above, and not used any more.
        unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
        found.then(|| lowest.addr()..lowest.addr() + size)
    }
    STACK.with(Clone::clone)
}

/// Has the kernel find out that the peer of an idle TCP connection is gone: after about two minutes of silence.
pub fn keep_alive(fd: RawFd) {
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 60),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 15),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4),
    ];
    for (level, option, value) in options {
        let value: c_int = value;
        // SAFETY: `value` is readable. A socket that cannot do it stays as it is.
        unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), size_of::<c_int>() as _) };
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: `before` is the mask that this thread had (the type is not Send); the old mask is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before.0, std::ptr::null_mut()) };
    }
}

/// How many forks lie between this process and the one that first asked: it differs between parent and child.
///
/// Counted by a pthread_atfork handler, so it costs one load, not a system call.
pub fn fork_generation() -> u64 {
    watch_forks();
    GENERATION.load(Relaxed)
}

/// getpid(2) without the system call.
pub fn process_id() -> u32 {
    watch_forks();
    PID.load(Relaxed)
}

/// Whether the process has ended, also if its parent has not waited for it yet (when the parent is us).
pub fn process_gone(pid: u32) -> bool {
    let Ok(id) = libc::pid_t::try_from(pid) else { return true };
    // SAFETY: signal 0 is only a check.
    if unsafe { libc::kill(id, 0) } < 0 {
        return io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    }
    // It exists, but perhaps as our zombie. WNOWAIT leaves it to the program's own wait.
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is writable.
    if unsafe { libc::waitid(libc::P_PID, pid, info.as_mut_ptr(), options) } < 0 {
        return false;
    }
    // SAFETY: zeroed, and filled by waitid when there was something to report: plain integers in both cases.
    let info = unsafe { info.assume_init() };
    // SAFETY: waitid fills the SIGCHLD member, of which si_pid is a part; zero when nothing has ended.
    (unsafe { info.si_pid() }) == id
}

static GENERATION: AtomicU64 = AtomicU64::new(0);
static PID: AtomicU32 = AtomicU32::new(0);

fn watch_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Also the first guard: what it sets up must not be under way while somebody forks.
        guard(|| {
            note_process();
            Ok(())
        });
        // SAFETY: `after_fork` only stores atomics and calls getpid, which is allowed in the child of a
        // multi-threaded process. The library is linked with -z nodelete: the handler stays mapped.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    });
}

unsafe extern "C" fn after_fork() {
    guard(|| {
        GENERATION.fetch_add(1, Relaxed);
        note_process();
        Ok(())
    });
}

fn note_process() {
    // SAFETY: getpid has no arguments and cannot fail.
    PID.store(unsafe { libc::getpid() } as u32, Relaxed);
}

/// Words and a lock that this process and its forked children share: one anonymous MAP_SHARED page.
///
/// # Invariants
/// `layout` points to our own mapping of at least one `Layout`, whose mutex is initialised.
pub struct SharedPage {
    layout: NonNull<Layout>,
}

#[repr(C)]
struct Layout {
    mutex: libc::pthread_mutex_t,
    words: [AtomicU64; SharedPage::WORDS],
}

// SAFETY: the page is used through a process-shared mutex and atomics only.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Number of words.
    pub const WORDS: usize = 8;

    /// A new page, all words 0.
    ///
    /// # Errors
    /// The errno of mmap(2) or of making the mutex.
    pub fn new() -> io::Result<SharedPage> {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Layout>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let layout =
            NonNull::new(base.cast::<Layout>()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // From here on Drop unmaps. The words are zero bytes, which is what an AtomicU64 of 0 is.
        let page = SharedPage { layout };
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let a = attributes.as_mut_ptr();
        // SAFETY: initialises the attributes.
        check_code(unsafe { libc::pthread_mutexattr_init(a) })?;
        // SAFETY: `a` was initialised above.
        check_code(unsafe { libc::pthread_mutexattr_setpshared(a, libc::PTHREAD_PROCESS_SHARED) })?;
        // SAFETY: as above.
        check_code(unsafe { libc::pthread_mutexattr_setrobust(a, libc::PTHREAD_MUTEX_ROBUST) })?;
        // SAFETY: the mapping is ours alone until the next fork, and large enough for the mutex.
        check_code(unsafe { libc::pthread_mutex_init(page.mutex(), a) })?;
        Ok(page)
    }

    /// Takes the lock; `None` when another process has kept it for too long.
    ///
    /// # Errors
    /// When the lock is unusable.
    pub fn lock(&self) -> io::Result<Option<PageLock<'_>>> {
        // SAFETY: the mutex is initialised (invariant).
        let mut code = unsafe { libc::pthread_mutex_trylock(self.mutex()) };
        if code == libc::EBUSY {
            let until = deadline(LOCK_PATIENCE_MS);
            // SAFETY: as above; `until` is a live timespec.
            code = unsafe { libc::pthread_mutex_timedlock(self.mutex(), &until) };
        }
        let owner_died = match code {
            0 => false,
            libc::EOWNERDEAD => {
                // SAFETY: we hold the lock, which was inherited from a dead owner.
                check_code(unsafe { libc::pthread_mutex_consistent(self.mutex()) })?;
                true
            }
            libc::EBUSY | libc::ETIMEDOUT => return Ok(None),
            code => return Err(io::Error::from_raw_os_error(code)),
        };
        Ok(Some(PageLock { page: self, owner_died, thread: PhantomData }))
    }

    /// A word of the page.
    ///
    /// # Panics
    /// When `index` is not below [`SharedPage::WORDS`].
    pub fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the mapping lives as long as `self` (invariant), and the words are only ever accessed as atomics.
        let words = unsafe { &(*self.layout.as_ptr()).words };
        &words[index]
    }

    fn mutex(&self) -> *mut libc::pthread_mutex_t {
        // SAFETY: the mapping holds a Layout (invariant); no reference to it is made.
        unsafe { &raw mut (*self.layout.as_ptr()).mutex }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // The mutex is not destroyed: another process may still use it. It holds no resource but its bytes.
        // SAFETY: `layout` is our own mapping; a PageLock borrows the page, so nobody holds the lock here.
        unsafe { libc::munmap(self.layout.as_ptr().cast(), size_of::<Layout>()) };
    }
}

/// The lock of a page, held.
pub struct PageLock<'a> {
    page: &'a SharedPage,
    owner_died: bool,
    /// A mutex is unlocked by the thread that locked it.
    thread: PhantomData<*const ()>,
}

impl PageLock<'_> {
    /// Whether the last holder ended while it held the lock.
    pub fn owner_died(&self) -> bool {
        self.owner_died
    }
}

impl Drop for PageLock<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the lock: a PageLock is made only by `lock` and is not Send.
        unsafe { libc::pthread_mutex_unlock(self.page.mutex()) };
    }
}

fn deadline(ms: i64) -> libc::timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable. timedlock counts in CLOCK_REALTIME.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    let nsec = now.tv_nsec + ms * 1_000_000;
    libc::timespec { tv_sec: now.tv_sec + nsec / 1_000_000_000, tv_nsec: nsec % 1_000_000_000 }
}

fn empty_message() -> libc::msghdr {
    // SAFETY: msghdr is plain integers and pointers, for which zero is valid and means "none".
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Repeats a transfer that a signal interrupted.
fn repeat(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        let n = call();
        if n >= 0 {
            return Ok(n as usize);
        }
        let e = io::Error::last_os_error();
        if e.raw_os_error() != Some(libc::EINTR) {
            return Err(e);
        }
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_code(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

/// Processes for tests.
#[cfg(test)]
pub mod testing {
    /// A forked child process.
    pub struct Child(libc::pid_t);

    /// Forks; the child runs `work` and exits with 0 when it returns true.
    pub fn fork(work: impl FnOnce() -> bool) -> Child {
        // SAFETY: the child runs only `work` and _exit; glibc keeps malloc usable in a child of threads.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
            // SAFETY: ends the process at once, without the destructors and buffers that are the parent's.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        Child(pid)
    }

    /// Leaves the socket room for a few messages only.
    pub fn shrink_buffers(fd: super::RawFd) {
        set_buffers(fd, 8 << 10);
    }

    /// How much a socket holds, about.
    pub fn set_buffers(fd: super::RawFd, bytes: libc::c_int) {
        for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
            let (value, length) = ((&raw const bytes).cast(), size_of::<libc::c_int>() as libc::socklen_t);
            // SAFETY: the option value is a live c_int of the size that is passed.
            let result = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, value, length) };
            assert_eq!(result, 0);
        }
    }

    impl Child {
        /// Its process id.
        pub fn id(&self) -> u32 {
            self.0 as u32
        }

        /// Waits for its end; whether its work returned true.
        pub fn succeeded(self) -> bool {
            let mut status = 0;
            loop {
                // SAFETY: `status` is writable.
                let pid = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
                if pid == self.0 {
                    return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
                }
            }
        }

        /// Waits until it has ended, without reaping it.
        pub fn wait_for_zombie(&self) {
            let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
            // SAFETY: `info` is writable.
            unsafe { libc::waitid(libc::P_PID, self.id(), info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

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

    /// Until the connection is there.
    fn beside(fd: RawFd, to: SocketAddr) -> io::Result<OwnedFd> {
        let fresh = connect_beside(fd, to)?;
        while !connected(fresh.as_raw_fd())? {
            wait(fresh.as_raw_fd(), OUT, None, None)?;
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
        assert!(poll(&mut [PollFd::new(second.as_raw_fd(), true, false)], None, None).unwrap() == 1);
        assert_eq!(peek(second.as_raw_fd()).unwrap(), Some(b'x'));
    }

    #[test]
    fn connecting_does_not_wait_and_tells_how_it_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = TcpStream::connect(to).unwrap();
        // SAFETY: touches no memory. No queue: a second connection that nobody accepts gets no answer.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
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
            let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
            let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
            // SAFETY: touches no memory.
            let old = check(unsafe { libc::socket(family, kind, 0) }).unwrap();
            // SAFETY: just made, and owned by nobody else.
            let old = unsafe { OwnedFd::from_raw_fd(old) };
            match bind_reserved(old.as_raw_fd(), to.is_ipv4()) {
                // Only root may.
                Err(e) if e.raw_os_error() == Some(libc::EACCES) => return,
                bound => bound.unwrap(),
            }
            let fresh = beside(old.as_raw_fd(), to).unwrap();
            let (before, now) =
                (borrowed(old.as_raw_fd()).local_addr(), borrowed(fresh.as_raw_fd()).local_addr());
            let (before, now) = (before.unwrap().port(), now.unwrap().port());
            assert!(
                RESERVED.contains(&before) && RESERVED.contains(&now) && before != now,
                "{host}: {before}, {now}"
            );
        }
    }

    #[test]
    fn waiting_ends_with_the_time_or_with_readiness() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut fds = [PollFd::new(b.as_raw_fd(), true, false), PollFd::new(a.as_raw_fd(), false, true)];
        let blocked = BlockedSignals::all();
        assert_eq!(poll(&mut fds, Some(Duration::ZERO), Some(blocked.before())).unwrap(), 1);
        assert!(!fds[0].readable() && fds[1].writable());
        assert!(!wait(b.as_raw_fd(), IN, Some(Duration::from_millis(1)), None).unwrap());
        (&a).write_all(b"x").unwrap();
        assert!(wait(b.as_raw_fd(), IN, None, None).unwrap());
    }

    #[test]
    fn random_bytes_differ() {
        let (mut a, mut b) = ([0; 32], [0; 32]);
        random(&mut a).unwrap();
        random(&mut b).unwrap();
        assert_ne!(a, b);
    }

    #[test]
    fn a_forked_child_has_another_generation_and_process_id() {
        let (generation, pid) = (fork_generation(), process_id());
        let child = testing::fork(|| fork_generation() == generation + 1 && process_id() != pid);
        let id = child.id();
        assert!(!process_gone(process_id()));
        child.wait_for_zombie();
        assert!(process_gone(id), "a zombie counts as gone");
        assert!(child.succeeded());
        assert!(process_gone(id));
        assert_eq!((fork_generation(), process_id()), (generation, pid));
    }

    #[test]
    fn a_page_is_shared_with_a_child_and_its_lock_survives_a_dead_holder() {
        let page = SharedPage::new().unwrap();
        let child = testing::fork(|| {
            page.word(3).store(7, Relaxed);
            std::mem::forget(page.lock().unwrap().unwrap());
            true
        });
        assert!(child.succeeded());
        assert_eq!(page.word(3).load(Relaxed), 7);
        assert!(page.lock().unwrap().unwrap().owner_died());
        assert!(!page.lock().unwrap().unwrap().owner_died());
    }

    #[test]
    fn a_lock_that_another_process_keeps_is_given_up_after_a_while() {
        let page = SharedPage::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = testing::fork(|| {
            let _lock = page.lock().unwrap().unwrap();
            (&theirs).write_all(b"x").unwrap();
            // Until the parent has seen it.
            wait(theirs.as_raw_fd(), IN, None, None).unwrap()
        });
        assert!(wait(ours.as_raw_fd(), IN, None, None).unwrap());
        assert!(page.lock().unwrap().is_none());
        (&ours).write_all(b"x").unwrap();
        assert!(child.succeeded());
        assert!(!page.lock().unwrap().unwrap().owner_died());
    }
}
