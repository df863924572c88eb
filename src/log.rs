//! Diagnostics for people: off unless asked for, and unnoticed by the program.
//!
//! Owns the level, the place that lines go to (stderr, or a file that is appended to) and their form,
//! `rpcrdma[pid] level: text`. Knows no configuration: `config` starts it, and until then it is off. The
//! macros [`log_error!`](crate::log_error) .. [`log_wire!`](crate::log_wire) evaluate their arguments only
//! when the level is on.
//!
//! # Invariants
//! - A line is one write(2) of at most PIPE_BUF bytes without control characters: lines of several processes
//!   do not mix, and no peer can forge one.
//! - Nothing waits, fails, allocates per line, raises a signal or changes errno; stdout is never used. A line
//!   that cannot be written at once is counted, and the next one that can be is preceded by the count.
//! - Daemons close descriptors that they do not know and reuse the numbers: a line goes only to what was
//!   there when the log was started. A log file is opened again; for a closed or replaced stderr the lines
//!   are dropped.
#![forbid(unsafe_code)]

use std::fmt::{self, Write as _};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering::Relaxed};

use crate::process::{self, Identity};

/// How much is said; each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What made a call or a connection fail.
    Error = 1,
    /// What works, but not as intended.
    Warn,
    /// Connections and the choices made for them.
    Info,
    /// Calls, and why they took the way they took.
    Debug,
    /// Every header sent and received.
    Wire,
}

impl Level {
    /// All levels, least first.
    pub const ALL: [Level; 5] = [Level::Error, Level::Warn, Level::Info, Level::Debug, Level::Wire];

    /// The level's name in settings and lines.
    pub fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Wire => "wire",
        }
    }

    /// The level of that name.
    pub fn from_name(name: &str) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.name() == name)
    }
}

/// Writes a line at level error: what made a call or a connection fail.
#[macro_export]
macro_rules! log_error {
    ($($arg:tt)+) => { $crate::log_at!(Error, $($arg)+) };
}

/// Writes a line at level warn: what works, but not as intended.
#[macro_export]
macro_rules! log_warn {
    ($($arg:tt)+) => { $crate::log_at!(Warn, $($arg)+) };
}

/// Writes a line at level info: connections and the choices made for them.
#[macro_export]
macro_rules! log_info {
    ($($arg:tt)+) => { $crate::log_at!(Info, $($arg)+) };
}

/// Writes a line at level debug: calls, and why they took the way they took.
#[macro_export]
macro_rules! log_debug {
    ($($arg:tt)+) => { $crate::log_at!(Debug, $($arg)+) };
}

/// Writes a line at level wire: a header.
#[macro_export]
macro_rules! log_wire {
    ($($arg:tt)+) => { $crate::log_at!(Wire, $($arg)+) };
}

#[doc(hidden)]
#[macro_export]
macro_rules! log_at {
    ($level:ident, $($arg:tt)+) => {
        if $crate::log::enabled($crate::log::Level::$level) {
            $crate::log::write($crate::log::Level::$level, ::std::format_args!($($arg)+));
        }
    };
}

static LOG: Log = Log::new();

/// Whether lines of `level` are wanted.
pub fn enabled(level: Level) -> bool {
    LOG.enabled(level)
}

/// Writes a line; for the macros, which ask [`enabled`] first.
pub fn write(level: Level, text: fmt::Arguments<'_>) {
    LOG.write(level, text);
}

/// Starts the log: lines up to `level`, to the end of `file`, or else to stderr.
///
/// # Errors
/// When `file` cannot be opened; one line on stderr says so, since somebody asked for a log, and the log
/// stays off.
pub fn start(level: Level, file: Option<&Path>) -> io::Result<()> {
    process::keeping_errno(|| {
        let Some(path) = file else {
            LOG.start_on(level, libc::STDERR_FILENO);
            return Ok(());
        };
        LOG.start_file(level, path).inspect_err(|error| {
            let stderr = Log::new();
            stderr.start_on(Level::Error, libc::STDERR_FILENO);
            stderr.write(Level::Error, format_args!("no log: cannot open {}: {error}", path.display()));
        })
    })
}

/// A level and a place. One exists per process; tests make their own.
struct Log {
    /// 0: off.
    level: AtomicU8,
    /// -1: none yet.
    fd: AtomicI32,
    /// Identity of what `fd` referred to when it was set.
    device: AtomicU64,
    inode: AtomicU64,
    /// The absolute path behind `fd`; unset for stderr.
    path: OnceLock<PathBuf>,
    /// Lines that could not be written since the last one that could.
    lost: AtomicU64,
}

impl Log {
    const fn new() -> Log {
        Log {
            level: AtomicU8::new(0),
            fd: AtomicI32::new(-1),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            path: OnceLock::new(),
            lost: AtomicU64::new(0),
        }
    }

    fn enabled(&self, level: Level) -> bool {
        level as u8 <= self.level.load(Relaxed)
    }

    fn start_on(&self, level: Level, fd: RawFd) {
        // A server started by inetd has its client there, who expects RPC records.
        if process::is_network_socket(fd) {
            return;
        }
        if let Some(identity) = process::identify(fd) {
            self.set(fd, identity);
            self.level.store(level as u8, Relaxed);
        }
    }

    fn start_file(&self, level: Level, path: &Path) -> io::Result<()> {
        // Absolute, because daemons change their directory.
        let path = self.path.get_or_init(|| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        self.open(path)?;
        self.level.store(level as u8, Relaxed);
        Ok(())
    }

    /// Opens the log file. The descriptor belongs to the process and is never closed: once the program has
    /// closed it, its number is not ours.
    fn open(&self, path: &Path) -> io::Result<RawFd> {
        // Non-blocking, so that opening a FIFO without a reader fails instead of waiting.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path)?;
        let mut fd = OwnedFd::from(file);
        if fd.as_raw_fd() <= libc::STDERR_FILENO {
            // The program runs without its standard descriptors; what it writes to stdout must not land in
            // the log, nor may the log be in its way when it opens them. A duplicate gets a number above
            // them.
            fd = fd.as_fd().try_clone_to_owned()?;
        }
        let identity = process::identify(fd.as_raw_fd()).ok_or_else(io::Error::last_os_error)?;
        let fd = fd.into_raw_fd();
        self.set(fd, identity);
        Ok(fd)
    }

    /// Not one atomic step: a thread that sees half of it finds a wrong identity, and opens the file once
    /// more or drops its line.
    fn set(&self, fd: RawFd, identity: Identity) {
        self.device.store(identity.device, Relaxed);
        self.inode.store(identity.inode, Relaxed);
        self.fd.store(fd, Relaxed);
    }

    fn write(&self, level: Level, text: fmt::Arguments<'_>) {
        process::keeping_errno(|| {
            let Some(fd) = self.checked_fd() else { return };
            let lost = self.lost.swap(0, Relaxed);
            if lost > 0 {
                let line = Line::new(Level::Warn, format_args!("{lost} lines lost: no room to write them"));
                if process::write_quietly(fd, line.bytes()).is_err() {
                    self.lost.fetch_add(lost + 1, Relaxed);
                    return;
                }
            }
            if process::write_quietly(fd, Line::new(level, text).bytes()).is_err() {
                self.lost.fetch_add(1, Relaxed);
            }
        });
    }

    /// The descriptor, if it is still what it was.
    fn checked_fd(&self) -> Option<RawFd> {
        let fd = self.fd.load(Relaxed);
        let expected = Identity { device: self.device.load(Relaxed), inode: self.inode.load(Relaxed) };
        if process::identify(fd) == Some(expected) {
            return Some(fd);
        }
        self.open(self.path.get()?).ok()
    }
}

/// A line under construction, on the stack.
struct Line {
    bytes: [u8; libc::PIPE_BUF],
    len: usize,
    cut: bool,
}

impl Line {
    fn new(level: Level, text: fmt::Arguments<'_>) -> Line {
        let mut line = Line { bytes: [0; libc::PIPE_BUF], len: 0, cut: false };
        // Err only comes from a broken Display; what it wrote before is a line all the same.
        let _ = write!(line, "rpcrdma[{}] {}: {text}", std::process::id(), level.name());
        let end: &[u8] = if line.cut { b"...\n" } else { b"\n" };
        line.bytes[line.len..line.len + end.len()].copy_from_slice(end);
        line.len += end.len();
        line
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Room for the end of the line is always left.
        const ROOM: usize = libc::PIPE_BUF - "...\n".len();
        for c in text.chars() {
            let c = if c.is_control() { '?' } else { c };
            if self.cut || self.len + c.len_utf8() > ROOM {
                self.cut = true;
                break;
            }
            self.len += c.encode_utf8(&mut self.bytes[self.len..]).len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    /// A log at `level`, and the socket on which each of its writes arrives as one datagram.
    fn log_and_reader(level: Level) -> (Log, UnixDatagram, UnixDatagram) {
        let (writer, reader) = UnixDatagram::pair().unwrap();
        reader.set_nonblocking(true).unwrap();
        let log = Log::new();
        log.start_on(level, writer.as_raw_fd());
        (log, reader, writer)
    }

    fn next(reader: &UnixDatagram) -> Option<String> {
        let mut bytes = [0; 2 * libc::PIPE_BUF];
        let n = reader.recv(&mut bytes).ok()?;
        Some(String::from_utf8(bytes[..n].to_vec()).unwrap())
    }

    /// A path of this test's own, removed at the end.
    struct TempPath(PathBuf);

    impl TempPath {
        fn new(name: &str) -> TempPath {
            TempPath(std::env::temp_dir().join(format!("rpcrdma-log-{}-{name}", std::process::id())))
        }
    }

    impl Drop for TempPath {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn a_line_names_the_process_and_the_level_and_is_one_write() {
        let (log, reader, _writer) = log_and_reader(Level::Wire);
        log.write(Level::Warn, format_args!("{} of {}", 1, 2));
        log.write(Level::Wire, format_args!("next"));
        let pid = std::process::id();
        assert_eq!(next(&reader), Some(format!("rpcrdma[{pid}] warn: 1 of 2\n")));
        assert_eq!(next(&reader), Some(format!("rpcrdma[{pid}] wire: next\n")));
        assert_eq!(next(&reader), None);
    }

    #[test]
    fn a_level_includes_those_before_it() {
        let (log, _reader, _writer) = log_and_reader(Level::Info);
        let on = Level::ALL.map(|level| log.enabled(level));
        assert_eq!(on, [true, true, true, false, false]);
        assert_eq!(Level::ALL.map(|level| Log::new().enabled(level)), [false; 5]);
    }

    #[test]
    fn every_level_is_found_by_its_name_only() {
        for level in Level::ALL {
            assert_eq!(Level::from_name(level.name()), Some(level));
        }
        assert_eq!([Level::from_name("Error"), Level::from_name(""), Level::from_name("off")], [None; 3]);
    }

    #[test]
    fn macros_evaluate_their_arguments_only_when_their_level_is_on() {
        let mut evaluated = 0;
        crate::log_error!("{}", {
            evaluated += 1;
            evaluated
        });
        assert_eq!(evaluated, 0, "nothing asked for a log");

        let (writer, mut reader) = UnixStream::pair().unwrap();
        LOG.start_on(Level::Error, writer.as_raw_fd());
        crate::log_error!("unmistakable {}", {
            evaluated += 1;
            evaluated
        });
        crate::log_warn!("{}", {
            evaluated += 1;
            evaluated
        });
        LOG.level.store(0, Relaxed);
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert!(text.contains("error: unmistakable 1\n"), "{text}");
        assert_eq!(evaluated, 1);
    }

    #[test]
    fn control_characters_cannot_forge_a_line() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        log.write(Level::Error, format_args!("a\nrpcrdma[1] error: b\x1b[2J\u{9b}c"));
        let line = next(&reader).unwrap();
        assert!(line.ends_with(": a?rpcrdma[1] error: b?[2J?c\n"), "{line}");
    }

    #[test]
    fn a_long_line_is_cut_at_a_character_and_marked() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        for fill in 0..4 {
            log.write(Level::Error, format_args!("{}{} behind", "x".repeat(fill), "\u{20ac}".repeat(2000)));
            let line = next(&reader).unwrap();
            assert!(line.ends_with("\u{20ac}...\n"), "{line}");
            assert!((libc::PIPE_BUF - 2..=libc::PIPE_BUF).contains(&line.len()), "{}", line.len());
        }
    }

    #[test]
    fn a_line_that_just_fits_is_whole_and_nothing_shorter_follows_a_cut() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        log.write(Level::Error, format_args!(""));
        let room = libc::PIPE_BUF - 4 - (next(&reader).unwrap().len() - 1);
        log.write(Level::Error, format_args!("{}", "x".repeat(room)));
        assert!(next(&reader).unwrap().ends_with("xx\n"));
        log.write(Level::Error, format_args!("{}{}", "x".repeat(room + 1), "y"));
        assert!(next(&reader).unwrap().ends_with("xx...\n"));
        log.write(Level::Error, format_args!("{}\u{20ac}{}", "x".repeat(room - 1), "y"));
        assert!(next(&reader).unwrap().ends_with("xx...\n"));
    }

    #[test]
    fn lines_without_room_are_lost_and_counted() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        for n in 0..1000 {
            log.write(Level::Error, format_args!("{n}"));
        }
        let mut received = 0;
        while next(&reader).is_some() {
            received += 1;
        }
        assert!(received > 0 && received < 1000, "{received}");
        log.write(Level::Error, format_args!("after"));
        let lost = next(&reader).unwrap();
        assert!(lost.contains(&format!("warn: {} lines lost", 1000 - received)), "{lost}");
        assert!(next(&reader).unwrap().ends_with("after\n"));
        log.write(Level::Error, format_args!("last"));
        assert!(next(&reader).unwrap().ends_with("last\n"));
    }

    #[test]
    fn a_closed_reader_and_a_full_disk_disturb_nobody() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        drop(reader);
        log.write(Level::Error, format_args!("nobody reads"));
        let log = Log::new();
        log.start_file(Level::Error, Path::new("/dev/full")).unwrap();
        log.write(Level::Error, format_args!("no room"));
        assert_eq!(log.lost.load(Relaxed), 1);
    }

    #[test]
    fn a_file_is_appended_to() {
        let path = TempPath::new("append");
        fs::write(&path.0, "before\n").unwrap();
        let log = Log::new();
        log.start_file(Level::Error, &path.0).unwrap();
        log.write(Level::Error, format_args!("after"));
        let text = fs::read_to_string(&path.0).unwrap();
        assert_eq!(text, format!("before\nrpcrdma[{}] error: after\n", std::process::id()));
        assert!(log.fd.load(Relaxed) > libc::STDERR_FILENO);
    }

    #[test]
    fn a_log_file_whose_descriptor_was_reused_is_opened_again() {
        let (path, innocent) = (TempPath::new("reopened"), TempPath::new("innocent"));
        let log = Log::new();
        log.start_file(Level::Error, &path.0).unwrap();
        let other = fs::File::create(&innocent.0).unwrap();
        log.fd.store(other.as_raw_fd(), Relaxed);
        log.write(Level::Error, format_args!("one"));
        log.write(Level::Error, format_args!("two"));
        assert_eq!(fs::read_to_string(&innocent.0).unwrap(), "");
        assert_eq!(fs::read_to_string(&path.0).unwrap().lines().count(), 2);
    }

    #[test]
    fn a_replaced_stderr_gets_nothing() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        let (other_writer, other_reader) = UnixDatagram::pair().unwrap();
        other_reader.set_nonblocking(true).unwrap();
        log.fd.store(other_writer.as_raw_fd(), Relaxed);
        log.write(Level::Error, format_args!("for the first"));
        assert_eq!((next(&reader), next(&other_reader)), (None, None));
    }

    #[test]
    fn a_client_that_inetd_made_stderr_gets_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let log = Log::new();
        log.start_on(Level::Wire, client.as_raw_fd());
        assert!(!log.enabled(Level::Error));
        log.write(Level::Error, format_args!("not for a peer"));
        drop(client);
        let mut received = vec![];
        listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
        assert!(received.is_empty());
    }

    #[test]
    fn a_file_that_cannot_be_opened_leaves_the_log_off() {
        let log = Log::new();
        assert!(log.start_file(Level::Wire, Path::new("/does/not/exist")).is_err());
        assert!(!log.enabled(Level::Error));
    }

    #[test]
    fn a_broken_display_is_still_a_line() {
        struct Broken;
        impl fmt::Display for Broken {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("half")?;
                Err(fmt::Error)
            }
        }
        let (log, reader, _writer) = log_and_reader(Level::Error);
        log.write(Level::Error, format_args!("{Broken} and more"));
        assert!(next(&reader).unwrap().ends_with("error: half\n"));
    }
}
