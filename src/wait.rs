//! Waiting: for descriptors, for a set of them that a program's own loop can poll, and for an event of another thread.
//!
//! Every function is one system call (or one family of them) with checked arguments; what readiness means is the
//! caller's.
//!
//! # Invariants
//! - `EINTR` never reaches a caller: waits return early with nothing ready.
//! - Only [`poll`], [`until`] and [`Event::wait`] sleep.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use crate::process::check;
use crate::signals::{SignalMask, under_mask};

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
    let mask = mask.map_or(std::ptr::null(), |mask| mask.as_ptr());
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

/// [`until`] for readability.
pub const IN: i16 = libc::POLLIN;
/// [`until`] for writability.
pub const OUT: i16 = libc::POLLOUT;

/// As [`poll`], for one descriptor and `events` ([`IN`], [`OUT`]); whether it is ready.
///
/// # Errors
/// As [`poll`].
pub fn until(
    fd: RawFd,
    events: i16,
    timeout: Option<Duration>,
    mask: Option<&SignalMask>,
) -> io::Result<bool> {
    Ok(poll(&mut [PollFd(libc::pollfd { fd, events, revents: 0 })], timeout, mask)? > 0)
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::signals::BlockedSignals;

    #[test]
    fn waiting_ends_with_the_time_or_with_readiness() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut fds = [PollFd::new(b.as_raw_fd(), true, false), PollFd::new(a.as_raw_fd(), false, true)];
        let blocked = BlockedSignals::all();
        assert_eq!(poll(&mut fds, Some(Duration::ZERO), Some(blocked.before())).unwrap(), 1);
        assert!(!fds[0].readable() && fds[1].writable());
        assert!(!until(b.as_raw_fd(), IN, Some(Duration::from_millis(1)), None).unwrap());
        (&a).write_all(b"x").unwrap();
        assert!(until(b.as_raw_fd(), IN, None, None).unwrap());
    }
}
