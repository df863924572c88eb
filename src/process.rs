//! The process that this library is a guest in: small questions to the system that need `unsafe`.
//!
//! Makes the library behave as a guest: it finds out whether the process runs with more rights than its caller, keeps its
//! errno, and writes a diagnostic so that nothing else notices: no signal, no waiting, no byte into a descriptor whose
//! number now belongs to something else. `log` decides what is written, and all sockets are in `socket`.
//!
//! # Invariants
//! - No function here changes the process: signal masks are restored before it returns, and no disposition is
//!   touched.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create, stat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, sockopt};
use rustix::process::{Resource, geteuid, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use rustix::time::Timespec;

/// Whether the process was started with more rights than its caller has (set-user-ID, file capabilities): the environment
/// is then the caller's, and must not be trusted.
pub fn is_secure() -> bool {
    // SAFETY: getauxval(3) takes no pointer and touches no state.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) };
    secure != 0
}

/// The user whose rights this process has, if it has no other's: its real, effective and saved user are the same.
pub fn only_user() -> Option<u32> {
    let (mut real, mut effective, mut saved) = (0, 0, 0);
    // SAFETY: three places for a number.
    check(unsafe { libc::getresuid(&raw mut real, &raw mut effective, &raw mut saved) }).ok()?;
    (real == effective && effective == saved).then_some(real)
}

/// Whether what the process does can harm others than its caller: it is root, or has more rights than the caller.
pub fn is_privileged() -> bool {
    geteuid().is_root() || is_secure()
}

/// The descriptor with this number, which belongs to the program.
///
/// # Errors
/// `EBADF` for a number that no descriptor has.
pub fn borrow(fd: RawFd) -> io::Result<BorrowedFd<'static>> {
    if fd < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: not -1. Whether it is open is up to the program, which may close it at any time: the number is only passed
    // to system calls, which answer a wrong one with an error.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Runs `f` and restores errno: a program may look at it long after the call that set it.
pub fn keeping_errno<R>(f: impl FnOnce() -> R) -> R {
    let saved = errno();
    let result = f();
    // SAFETY: takes no argument; returns a valid pointer for the life of the thread.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: `place` is this thread's own errno.
    unsafe { *place = saved };
    result
}

/// What a descriptor refers to, to notice that its number has been closed and used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// What `fd` refers to; `None` when it is not open.
pub fn identify(fd: RawFd) -> Option<Identity> {
    let stat = fstat(borrow(fd).ok()?).ok()?;
    Some(Identity { device: stat.st_dev, inode: stat.st_ino })
}

/// A file in memory of this length, which can be sealed.
///
/// # Errors
/// The errno of what the kernel refuses: `EMFILE`, `ENOMEM`, `ENOSYS`, `EFBIG`.
pub fn file_in_memory(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Some systems want to be told that nothing in it is executed; older ones do not know that flag.
    let file = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags)?,
        file => file?,
    };
    // To the kernel it is a file: one that is too long for RLIMIT_FSIZE would end the program.
    quietly(|| ftruncate(&file, bytes as u64).map_err(Errno::raw_os_error))
        .map_err(io::Error::from_raw_os_error)?;
    Ok(file)
}

/// Numbers below this one are left to the program, if its limit allows that.
const LOW: RawFd = 200;

/// Gives a descriptor that stays open a number at which the program will not miss one: programs use low ones, for select(2) and
/// as what they have just closed.
///
/// # Errors
/// The errno, if it has the number of a standard descriptor, which a program that has closed its own would write to, and no other
/// is free.
pub fn out_of_the_way(file: OwnedFd) -> io::Result<OwnedFd> {
    match fcntl_dupfd_cloexec(&file, LOW) {
        Ok(high) => Ok(high),
        Err(_) if file.as_raw_fd() < 3 => Ok(fcntl_dupfd_cloexec(&file, 3)?),
        Err(_) => Ok(file),
    }
}

/// A descriptor of ours that stays open: the program, which does not know it, may close it, and its number may then be of something
/// else. It is out of the program's way, and closed when this is dropped.
pub struct Kept {
    fd: RawFd,
    is: Identity,
}

impl Kept {
    /// # Errors
    /// As [`out_of_the_way`].
    pub fn new(file: OwnedFd) -> io::Result<Kept> {
        let file = out_of_the_way(file)?;
        let is = identify(file.as_raw_fd()).ok_or(Errno::BADF)?;
        Ok(Kept { fd: file.into_raw_fd(), is })
    }

    /// The descriptor, if it is still there.
    pub fn get(&self) -> Option<BorrowedFd<'static>> {
        (identify(self.fd) == Some(self.is)).then(|| borrow(self.fd).ok()).flatten()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.get().is_some() {
            // SAFETY: no memory is passed, and the descriptor is ours.
            unsafe { libc::close(self.fd) };
        }
    }
}

/// Makes the number `fd` stand for what `by` refers to, in one step: a thread that is about to write to `fd` writes to
/// either the old or the new file. exec(2) closes it if `close_on_exec`.
///
/// # Errors
/// The errno; the number then still stands for what it did before.
pub fn replace(fd: RawFd, by: OwnedFd, close_on_exec: bool) -> io::Result<()> {
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: touches no memory; `by` is open.
    check(unsafe { libc::dup3(by.as_raw_fd(), fd, flags) }).map(drop)
}

/// Whether `fd` is a socket with a peer on a network: a server started by inetd has its client as its stderr.
pub fn is_network_socket(fd: RawFd) -> bool {
    borrow(fd).is_ok_and(|fd| sockopt::socket_domain(fd).is_ok_and(|domain| domain != AddressFamily::UNIX))
}

/// Writes `bytes` with one write(2), if that is possible at once and without a signal.
///
/// A descriptor that has no room now (a pipe whose reader stands still, a terminal stopped by ^S) gets nothing. A SIGPIPE
/// or SIGXFSZ that the write raises is swallowed.
///
/// Returns how many bytes were written: a disk may fill up before the last.
///
/// # Errors
/// The errno; `EAGAIN` when there is no room.
pub fn write_quietly(fd: RawFd, bytes: &[u8]) -> Result<usize, i32> {
    // As with poll(2): nothing is ever ready there.
    let to = borrow(fd).map_err(|_| libc::EAGAIN)?;
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], Some(&now)).map_err(Errno::raw_os_error)?
        == 0
    {
        return Err(libc::EAGAIN);
    }

    quietly(|| rustix::io::retry_on_intr(|| rustix::io::write(to, bytes)).map_err(Errno::raw_os_error))
}

/// Makes one system call, without the SIGPIPE or SIGXFSZ that it raises: these are sent to this thread alone, so blocking
/// them here is enough, and the program's own disposition is neither needed nor changed.
///
/// # Errors
/// The errno, usually that of the call.
pub fn quietly<T>(call: impl FnOnce() -> Result<T, i32>) -> Result<T, i32> {
    let signals = signal_set(&[libc::SIGPIPE, libc::SIGXFSZ]);
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `signals` is initialised, `before` has room for a set.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signals, before.as_mut_ptr()) };
    if blocked != 0 {
        return Err(blocked);
    }
    let mut pending = signal_set(&[]);
    // SAFETY: `pending` is ours.
    unsafe { libc::sigpending(&raw mut pending) };

    let result = call();

    let raised = match result {
        Err(libc::EPIPE) => Some(libc::SIGPIPE),
        Err(libc::EFBIG) => Some(libc::SIGXFSZ),
        _ => None,
    };
    // A signal that was pending before is the program's own: it stays.
    if let Some(signal) = raised.filter(|&signal| !contains(&pending, signal)) {
        let only = signal_set(&[signal]);
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `only` and `now` are ours; a null siginfo is allowed; a timeout of 0 returns at once.
        unsafe { libc::sigtimedwait(&only, std::ptr::null_mut(), &now) };
    }
    // SAFETY: pthread_sigmask succeeded above, so it filled `before`; a null old set is allowed.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}

/// Fills `bytes` from the kernel's generator.
///
/// # Errors
/// The errno of getrandom(2).
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    #[cfg(test)]
    if chance::fill(bytes) {
        return Ok(());
    }
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
            .map_or(0, |t| t.subsec_nanos() ^ (t.as_secs() as u32).rotate_left(16) ^ std::process::id()),
    }
}

/// Makes exit(3), and the return from main, call `handler` first.
///
/// # Errors
/// There is no memory for it.
pub fn at_exit(handler: extern "C" fn()) -> io::Result<()> {
    // SAFETY: the handler is safe to call. The library is linked with -z nodelete: it stays mapped.
    let refused = unsafe { libc::atexit(handler) };
    if refused == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOMEM)) }
}

/// Most bytes that this process may lock in memory; `None`: no limit.
pub fn memlock_limit() -> Option<usize> {
    getrlimit(Resource::Memlock).current.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// The user namespace in which every user has a number: the kernel has given it this inode since it has namespaces in files.
pub const INITIAL: u64 = 0xEFFF_FFFD;

/// The inode of ours; 0 without /proc.
pub fn user_namespace() -> u64 {
    stat("/proc/self/ns/user").map_or(0, |stat| stat.st_ino)
}

/// Whether the kernel lets the process have more of what it counts for each user: descriptors on their way over sockets, and
/// buffers of pipes.
pub fn may_exceed_limits() -> bool {
    let enough = CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN;
    let has = || capabilities(None).is_ok_and(|sets| sets.effective.intersects(enough));
    user_namespace() == INITIAL && has()
}

/// As [`memlock_limit`], but also `None` for a process that has the right to lock more.
pub fn lockable() -> Option<usize> {
    let may = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if may { None } else { memlock_limit() }
}

/// Repeats a transfer that a signal interrupted.
///
/// # Errors
/// The errno, except `EINTR`.
pub fn repeat(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
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

/// The result of a call that fails with -1 and errno.
///
/// # Errors
/// The errno.
pub fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` has room for a set; sigemptyset initialises all of it and cannot fail.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for &signal in signals {
        // SAFETY: initialised by sigemptyset.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: initialised by sigemptyset.
    unsafe { set.assume_init() }
}

fn contains(set: &libc::sigset_t, signal: libc::c_int) -> bool {
    // SAFETY: `set` is initialised (it is a reference to a value).
    let member = unsafe { libc::sigismember(set, signal) };
    member == 1
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::File;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::FromRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_process_with_the_rights_of_two_users_has_no_only_one() {
        assert_eq!(only_user(), Some(geteuid().as_raw()));
        if !geteuid().is_root() {
            // Only root can have another one's.
            return;
        }
        let child = crate::fork::testing::fork(|| {
            // SAFETY: three numbers; in a process of its own.
            if unsafe { libc::setresuid(0, 1500, 0) } != 0 {
                // Root of a user namespace that has no other users.
                return std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
            }
            let lowered = only_user().is_none();
            // SAFETY: as above.
            lowered && unsafe { libc::setresuid(1500, 1500, 1500) } == 0 && only_user() == Some(1500)
        });
        assert!(child.succeeded());
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        let mut fds = [-1; 2];
        // SAFETY: `fds` has room for two descriptors.
        assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: pipe2 made the descriptor, and nobody else owns it.
        let read = unsafe { OwnedFd::from_raw_fd(fds[0]) };
        // SAFETY: as above.
        let write = unsafe { OwnedFd::from_raw_fd(fds[1]) };
        (read, write)
    }

    thread_local! {
        /// SIGPIPEs delivered to this thread. The kernel sends a SIGPIPE to the thread that wrote.
        static SIGPIPES: Cell<u32> = const { Cell::new(0) };
    }

    extern "C" fn count_sigpipe(_: libc::c_int) {
        SIGPIPES.set(SIGPIPES.get() + 1);
    }

    /// Rust's runtime ignores SIGPIPE; a C program does not. Counting is harmless to other tests.
    fn catch_sigpipe() {
        let handler: extern "C" fn(libc::c_int) = count_sigpipe;
        // SAFETY: the handler touches one const-initialised thread-local Cell only.
        unsafe { libc::signal(libc::SIGPIPE, handler as libc::sighandler_t) };
    }

    #[test]
    fn a_closed_pipe_is_an_error_and_no_signal() {
        catch_sigpipe();
        let (read, write) = pipe();
        drop(read);
        // SAFETY: one byte of a literal.
        let plain = unsafe { libc::write(write.as_raw_fd(), b"x".as_ptr().cast(), 1) };
        assert_eq!((plain, SIGPIPES.get()), (-1, 1), "a plain write raises SIGPIPE here");
        assert_eq!(write_quietly(write.as_raw_fd(), b"x"), Err(libc::EPIPE));
        assert_eq!(SIGPIPES.get(), 1);
        // The mask is as it was: a plain write raises again.
        // SAFETY: as above.
        unsafe { libc::write(write.as_raw_fd(), b"x".as_ptr().cast(), 1) };
        assert_eq!(SIGPIPES.get(), 2);
    }

    #[test]
    fn a_pending_sigpipe_of_the_program_is_not_swallowed() {
        catch_sigpipe();
        let (read, write) = pipe();
        drop(read);
        let set = signal_set(&[libc::SIGPIPE]);
        // SAFETY: an initialised set, and a null old set.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        // SAFETY: no pointer but the thread's own id.
        unsafe { libc::raise(libc::SIGPIPE) };
        assert_eq!(write_quietly(write.as_raw_fd(), b"x"), Err(libc::EPIPE));
        assert_eq!(SIGPIPES.get(), 0);
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut()) };
        assert_eq!(SIGPIPES.get(), 1);
    }

    #[test]
    fn a_full_pipe_does_not_stop_the_writer() {
        let (read, write) = pipe();
        let line = [b'x'; 4096];
        let mut written = 0;
        while write_quietly(write.as_raw_fd(), &line).is_ok() {
            written += line.len();
            assert!(written <= 1 << 24, "a pipe without end");
        }
        assert_eq!(write_quietly(write.as_raw_fd(), &line), Err(libc::EAGAIN));
        drop(write);
        let mut all = vec![];
        File::from(read).read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), written, "every line that was written is whole");
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(write_quietly(full.as_raw_fd(), b"x"), Err(libc::ENOSPC));
    }

    #[test]
    fn a_descriptor_that_is_not_open_is_an_error() {
        assert_eq!(write_quietly(-1, b"x"), Err(libc::EAGAIN), "poll ignores negative descriptors");
        assert_eq!(write_quietly(1 << 20, b"x"), Err(libc::EBADF));
        assert_eq!(identify(-1), None);
    }

    #[test]
    fn errno_is_as_it_was() {
        keeping_errno(|| {
            assert_eq!(write_quietly(1 << 20, b"x"), Err(libc::EBADF));
            let inside = errno();
            keeping_errno(|| assert!(File::open("/does/not/exist").is_err()));
            assert_eq!(errno(), inside);
            assert_ne!(inside, libc::ENOENT);
        });
    }

    #[test]
    fn a_number_is_replaced_by_another_file() {
        let (a, b) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        let zero = identify(b.as_raw_fd());
        replace(a.as_raw_fd(), b.into(), true).unwrap();
        assert_eq!(identify(a.as_raw_fd()), zero);
        assert!(replace(-1, File::open("/dev/null").unwrap().into(), true).is_err());
    }

    #[test]
    fn a_descriptor_number_used_again_has_another_identity() {
        let (a, b) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        let null = identify(a.as_raw_fd());
        assert!(null.is_some());
        assert_ne!(null, identify(b.as_raw_fd()));
        // SAFETY: replaces a descriptor of this test's own.
        assert!(unsafe { libc::dup2(b.as_raw_fd(), a.as_raw_fd()) } >= 0);
        assert_ne!(null, identify(a.as_raw_fd()));
    }

    #[test]
    fn only_sockets_of_a_network_are_network_sockets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (unix, _peer) = UnixStream::pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        assert!(is_network_socket(tcp.as_raw_fd()));
        assert!(!is_network_socket(unix.as_raw_fd()));
        assert!(!is_network_socket(file.as_raw_fd()));
        assert!(!is_network_socket(-1));
    }

    #[test]
    fn a_test_process_is_not_secure() {
        assert!(!is_secure());
    }

    #[test]
    fn random_bytes_differ() {
        let (mut a, mut b) = ([0; 32], [0; 32]);
        random(&mut a).unwrap();
        random(&mut b).unwrap();
        assert_ne!(a, b);
    }
}

/// For tests: random numbers determined by a seed, in one thread.
#[cfg(test)]
pub(crate) mod chance {
    use std::cell::Cell;

    thread_local! {
        static STATE: Cell<u64> = const { Cell::new(0) };
    }

    /// From here on, numbers come from `seed`; 0: from the system.
    pub(crate) fn begin(seed: u64) {
        STATE.set(seed);
    }

    pub(super) fn fill(bytes: &mut [u8]) -> bool {
        let mut state = STATE.get();
        if state == 0 {
            return false;
        }
        for byte in bytes {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = (state >> 24) as u8;
        }
        STATE.set(state);
        true
    }
}
