//! Waiting: for descriptors, for a set of them that a program's own loop can poll, and for an event from another thread.
//!
//! Every function is one system call (or one family of them) with checked arguments; what readiness means is the
//! caller's.
//!
//! # Invariants
//! - `EINTR` never reaches a caller: waits return early with nothing ready.
//! - Only [`poll`], [`until`], [`for_change`] and [`Event::wait`] sleep.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

#[cfg(feature = "verbs")]
use once_cell::race::OnceBox;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::process::borrow;
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
    #[cfg(test)]
    pub fn writable(&self) -> bool {
        self.0.revents & (libc::POLLOUT | libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
    }
}

/// Waits until one of `fds` is ready or the time is up (`None`: no limit), with `mask` as the thread's signal mask
/// meanwhile (`None`: unchanged). Returns how many are ready; 0 also when a signal came: the caller checks its clock and
/// its flags.
///
/// # Errors
/// The errno of ppoll(2), except `EINTR`.
pub fn poll(fds: &mut [PollFd], timeout: Option<Duration>, mask: Option<&SignalMask>) -> io::Result<usize> {
    let time = timeout.map(timespec);
    // INVARIANT: on this platform a Timespec is a struct timespec; poll has no form with a signal mask.
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), |mask| mask.as_ptr());
    // SAFETY: PollFd is repr(transparent) over pollfd and `fds` is exclusively ours; `time` and `mask` are null or
    // point to live values.
    let n = unsafe { libc::ppoll(fds.as_mut_ptr().cast(), fds.len() as libc::nfds_t, time.cast(), mask) };
    if n < 0 {
        let e = io::Error::last_os_error();
        // revents are undefined now: nothing is ready.
        fds.iter_mut().for_each(|fd| fd.0.revents = 0);
        return if e.raw_os_error() == Some(libc::EINTR) { Ok(0) } else { Err(e) };
    }
    Ok(n as usize)
}

/// For [`until`]: readability.
pub const IN: i16 = libc::POLLIN;
/// For [`until`]: writability.
pub const OUT: i16 = libc::POLLOUT;

/// As [`poll`], for one descriptor and `events` ([`IN`], [`OUT`]); returns whether it is ready.
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

/// Several descriptors that are waited for as one.
#[cfg(feature = "verbs")]
pub struct Readables {
    set: OwnedFd,
    /// Always readable, once it exists.
    ended: OnceBox<OwnedFd>,
}

#[cfg(feature = "verbs")]
impl Readables {
    /// A set of `fds`.
    ///
    /// # Errors
    /// The errno.
    pub fn new(fds: &[RawFd]) -> io::Result<Readables> {
        let readables = Readables { set: epoll::create(epoll::CreateFlags::CLOEXEC)?, ended: OnceBox::new() };
        for fd in fds {
            readables.add(*fd)?;
        }
        Ok(readables)
    }

    /// Adds a descriptor.
    ///
    /// # Errors
    /// The errno.
    pub fn add(&self, fd: RawFd) -> io::Result<()> {
        Ok(epoll::add(&self.set, borrow(fd)?, key(fd), epoll::EventFlags::IN)?)
    }

    /// Makes the set readable from now on, whatever becomes of the other descriptors: a thread that sleeps on the set
    /// wakes.
    ///
    /// # Errors
    /// The errno.
    pub fn end(&self) -> io::Result<()> {
        let ended = || {
            let ended = eventfd(1, EventfdFlags::CLOEXEC)?;
            self.add(ended.as_raw_fd())?;
            Ok(Box::new(ended))
        };
        self.ended.get_or_try_init(ended).map(drop)
    }

    /// Readable when one of the descriptors is.
    pub fn fd(&self) -> RawFd {
        self.set.as_raw_fd()
    }

    /// The descriptors that are readable now: at most four of them.
    pub fn ready(&self) -> impl Iterator<Item = RawFd> + use<> {
        let mut events = [NO_EVENT; 4];
        let count = epoll::wait(&self.set, &mut events, Some(&NOW)).unwrap_or(0);
        events.into_iter().take(count).map(|event| event.data.u64() as RawFd)
    }
}

/// What wakes a loop that waits for it: readable from the first write of eight bytes until [`silence`].
///
/// # Errors
/// The errno.
pub fn bell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Takes note that the bell has rung.
pub fn silence(bell: &OwnedFd) {
    // EAGAIN means that it has not rung.
    let _ = rustix::io::read(bell, &mut [0u8; 8]);
}

/// Descriptors that a loop waits for, by epoll(7).
#[derive(Debug)]
pub struct PollSet(OwnedFd);

impl PollSet {
    /// An empty set.
    ///
    /// # Errors
    /// The errno.
    pub fn new() -> io::Result<PollSet> {
        Ok(PollSet(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// The descriptor to wait on; each event carries the number of the ready descriptor as its data.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Also waits for `events` of poll(2) on `fd`, in place of any that were set for it before.
    ///
    /// # Errors
    /// The errno: `EPERM` for what is always ready, such as a file.
    pub fn watch(&self, fd: RawFd, events: i16) -> io::Result<()> {
        // The flags of poll have the same values.
        let flags = epoll::EventFlags::from_bits_truncate(u32::from(events.cast_unsigned()));
        let (key, fd) = (key(fd), borrow(fd)?);
        match epoll::add(&self.0, fd, key, flags) {
            Err(Errno::EXIST) => Ok(epoll::modify(&self.0, fd, key, flags)?),
            other => Ok(other?),
        }
    }

    /// Stops waiting for `fd`. A closed descriptor has left the set already, unless another process has the file open
    /// too.
    pub fn forget(&self, fd: RawFd) {
        if let Ok(fd) = borrow(fd) {
            let _ = epoll::delete(&self.0, fd);
        }
    }

    /// Whether `fd` has an event now; for small sets.
    pub fn has(&self, fd: RawFd) -> bool {
        let mut events = [NO_EVENT; 64];
        let count = epoll::wait(&self.0, &mut events, Some(&NOW)).unwrap_or(0);
        events[..count].iter().any(|event| event.data.u64() as RawFd == fd)
    }

    /// Whether a descriptor other than these has an event now.
    pub fn has_others(&self, except: [RawFd; 2]) -> bool {
        let mut events = [NO_EVENT; 3];
        let count = epoll::wait(&self.0, &mut events, Some(&NOW)).unwrap_or(0);
        events[..count].iter().any(|event| !except.contains(&(event.data.u64() as RawFd)))
    }
}

/// An epoll set and its alarm, as one descriptor that a program's own loop can poll.
#[derive(Debug)]
pub struct WakeSet {
    set: OwnedFd,
    timer: OwnedFd,
}

impl WakeSet {
    /// An empty set without an alarm.
    ///
    /// # Errors
    /// The errno.
    pub fn new() -> io::Result<WakeSet> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let timer = timer_in(&set)?;
        Ok(WakeSet { set, timer })
    }

    /// Puts a fresh set and alarm in the place of those that a fork(2) left shared with the parent, whose descriptors would
    /// otherwise go on waking this process. The descriptor's number stays if it still belongs to the set: a child closes
    /// what it likes, and may have other files there.
    ///
    /// # Errors
    /// The errno.
    pub fn renew(&mut self) -> io::Result<()> {
        if !self.is_there() {
            std::mem::forget(std::mem::replace(self, WakeSet::new()?));
            return Ok(());
        }
        let fresh = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        rustix::io::dup3(&fresh, &mut self.set, rustix::io::DupFlags::CLOEXEC)?;
        // Before the next descriptor is made: the process may have only one left.
        drop(fresh);
        self.timer = timer_in(&self.set)?;
        Ok(())
    }

    /// Whether the descriptors are still the set and its alarm: the alarm is in the set then, and cannot be added again.
    fn is_there(&self) -> bool {
        let data = epoll::EventData::new_u64(0);
        match epoll::add(&self.set, &self.timer, data, epoll::EventFlags::empty()) {
            Err(Errno::EXIST) => true,
            Ok(()) => {
                // Both belong to the program.
                let _ = epoll::delete(&self.set, &self.timer);
                false
            }
            Err(_) => false,
        }
    }

    /// The descriptor to poll for readability.
    pub fn fd(&self) -> RawFd {
        self.set.as_raw_fd()
    }

    /// Wakes when `fd` is writable if `on`; otherwise no longer.
    ///
    /// # Errors
    /// The errno.
    pub fn watch_writable(&self, fd: RawFd, on: bool) -> io::Result<()> {
        if on {
            return Ok(epoll::add(&self.set, borrow(fd)?, key(fd), epoll::EventFlags::OUT)?);
        }
        // A descriptor that was never there, or is closed, is not in the set.
        let Ok(fd) = borrow(fd) else { return Ok(()) };
        match epoll::delete(&self.set, fd) {
            Err(Errno::NOENT | Errno::BADF) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Wakes for these `events` ([`IN`], [`OUT`]) of `fd` and for no others; with no events, not even for its end.
    ///
    /// # Errors
    /// The errno.
    pub fn watch(&self, fd: RawFd, events: i16) -> io::Result<()> {
        if events == 0 {
            return self.watch_writable(fd, false);
        }
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, events & IN != 0);
        flags.set(epoll::EventFlags::OUT, events & OUT != 0);
        let (key, fd) = (key(fd), borrow(fd)?);
        match epoll::modify(&self.set, fd, key, flags) {
            Err(Errno::NOENT) => Ok(epoll::add(&self.set, fd, key, flags)?),
            other => Ok(other?),
        }
    }

    /// Wakes when `fd`, the descriptor of another set, is readable. [`WakeSet::ready`] reports it by `key`, which must
    /// not be the number of a descriptor.
    ///
    /// # Errors
    /// The errno.
    pub fn nest(&self, fd: RawFd, key: u64) -> io::Result<()> {
        Ok(epoll::add(&self.set, borrow(fd)?, epoll::EventData::new_u64(key), epoll::EventFlags::IN)?)
    }

    /// The keys of nested sets that are readable now. If there are too many at once, the rest are returned next time.
    pub fn ready(&self) -> Vec<u64> {
        let mut events = [NO_EVENT; 64];
        let count = epoll::wait(&self.set, &mut events, Some(&NOW)).unwrap_or(0);
        let timer = self.timer.as_raw_fd() as u64;
        events[..count].iter().map(|event| event.data.u64()).filter(|key| *key != timer).collect()
    }

    /// Becomes readable when the alarm goes off, and stays so until it is silenced.
    pub fn alarm_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Wakes once after `time`, replacing an earlier alarm; `None`: never.
    ///
    /// # Errors
    /// The errno.
    pub fn alarm(&self, time: Option<Duration>) -> io::Result<()> {
        // Zero would disarm.
        let it_value = time.map_or(NOW, |time| timespec(time.max(Duration::from_nanos(1))));
        let once = Itimerspec { it_interval: NOW, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    /// Takes note of an alarm that has gone off.
    pub fn silence(&self) {
        // EAGAIN means that no alarm was due.
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
    }
}

/// A timer that wakes the set.
fn timer_in(set: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
    let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
    epoll::add(set, timer.as_fd(), key(timer.as_raw_fd()), epoll::EventFlags::IN)?;
    Ok(timer)
}

/// The data by which an epoll set reports a descriptor.
fn key(fd: RawFd) -> epoll::EventData {
    epoll::EventData::new_u64(fd as u64)
}

const NO_EVENT: epoll::Event =
    epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

/// Sleeps while `word`, which another process may write, is `from`, for at most `time`. The caller checks what ended the
/// sleep.
pub fn for_change(word: &AtomicU32, from: u32, time: Duration) {
    let _ = futex::wait(word, futex::Flags::empty(), from, Some(&timespec(time)));
}

/// Wakes all who sleep in [`for_change`] on this word, which has changed.
pub fn tell_change(word: &AtomicU32) {
    tell_some(word, i32::MAX as u32);
}

/// Wakes so many of them.
pub fn tell_some(word: &AtomicU32, most: u32) {
    let _ = futex::wake(word, futex::Flags::empty(), most);
}

/// Something that happens once, and for which a thread can sleep with its signals let through.
#[derive(Debug, Default)]
pub struct Event(AtomicU32);

impl Event {
    /// An event that has not happened.
    pub const fn new() -> Event {
        Event(AtomicU32::new(0))
    }

    /// Whether it has happened: if so, what was written before it happened can be read.
    pub fn has_happened(&self) -> bool {
        self.0.load(Acquire) != 0
    }

    /// Makes it happen, and wakes all who sleep for it.
    pub fn happen(&self) {
        self.0.store(1, Release);
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// Sleeps until it happens, the time is up (`None`: no limit) or a signal comes, with `mask` as the thread's signal
    /// mask meanwhile (`None`: unchanged). A signal handler may sleep for other events: none of them is lost.
    pub fn wait(&self, timeout: Option<Duration>, mask: Option<&SignalMask>) {
        let time = timeout.map(timespec);
        let sleep = || {
            // The caller checks what ended the sleep.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, 0, time.as_ref());
        };
        match mask {
            Some(mask) => under_mask(mask, sleep),
            None => sleep(),
        }
    }
}

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

    #[test]
    fn a_set_whose_numbers_are_other_files_is_renewed_beside_them() {
        let mut set = WakeSet::new().unwrap();
        let numbers = [set.set.as_raw_fd(), set.timer.as_raw_fd()];
        for number in numbers {
            crate::process::replace(number, std::fs::File::open("/dev/null").unwrap().into(), true).unwrap();
        }
        set.renew().unwrap();
        assert!(!numbers.contains(&set.fd()));
        assert!(
            numbers
                .iter()
                .all(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap() == *"/dev/null")
        );
        set.alarm(Some(Duration::ZERO)).unwrap();
        assert!(until(set.fd(), IN, None, None).unwrap());
        numbers.into_iter().for_each(crate::socket::close);
    }

    #[test]
    fn a_set_is_renewed_where_one_descriptor_is_left() {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let child = crate::fork::testing::fork(|| {
            let mut set = WakeSet::new().unwrap();
            let highest = rustix::io::dup(&set.set).unwrap();
            let most = Some(highest.as_raw_fd() as u64 + 1);
            setrlimit(
                Resource::Nofile,
                rustix::process::Rlimit { current: most, ..getrlimit(Resource::Nofile) },
            )
            .unwrap();
            let mut taken: Vec<OwnedFd> = std::iter::from_fn(|| rustix::io::dup(&highest).ok()).collect();
            taken.extend([highest]);
            taken.pop();
            set.renew().is_ok()
                && set.alarm(Some(Duration::ZERO)).is_ok()
                && until(set.fd(), IN, None, None).unwrap()
        });
        assert!(child.succeeded());
    }
}
