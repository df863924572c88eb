//! Diagnostics for people: off unless asked for, and unnoticed by the program.
//!
//! Owns the level, the place that lines go to (stderr, or a file that is appended to) and their form,
//! `2026-11-22T09:30:00.123456Z rpcrdma[pid] level: text`. Knows no configuration: `config` starts the log, which is off
//! until then. The macros [`log_error!`](crate::log_error) .. [`log_wire!`](crate::log_wire) evaluate their arguments
//! only when the level is on.
//!
//! # Invariants
//! - A line is one write(2) of at most PIPE_BUF bytes without control characters: lines of several processes
//!   do not mix, and no peer can forge one.
//! - Nothing waits, fails, allocates per line, raises a signal or changes errno; stdout is never used. A line that cannot
//!   be written at once is counted, and the next one that can be is preceded by the count. A file that takes no more is
//!   reported on stderr, once.
//! - Daemons close descriptors that they do not know and reuse the numbers: a line goes only to what was there when the
//!   log was started. A log file is opened again, also when its path has come to name another file (because it was
//!   rotated); for a closed or replaced stderr the lines are dropped.
//! - A log reveals things about memory and callers: its file is created for its owner alone. Root does not follow a
//!   symbolic link to it, which somebody else may have put in a directory like /tmp.
#![forbid(unsafe_code)]

use std::fmt::{self, Write as _};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use once_cell::race::OnceBox;

use crate::error::os_text;
use crate::process::{self, Identity};

/// How much is logged; each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What made a call or a connection fail.
    Error = 1,
    /// What works, but not as intended.
    Warn,
    /// Connections and the choices made for them.
    Info,
    /// Calls, and why they took the path they took.
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

/// Writes a line at level debug: calls, and why they took the path they took.
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
            let link = error.raw_os_error() == Some(libc::ELOOP) && process::is_privileged();
            let why = if link {
                "it is a symbolic link, which root does not follow".into()
            } else {
                os_text(error)
            };
            stderr.write(Level::Error, format_args!("no log: cannot open {}: {why}", path.display()));
        })
    })
}

/// A level and a place. One exists per process; tests make their own.
struct Log {
    /// 0: off.
    level: AtomicU8,
    place: Place,
    /// The absolute path behind `place`; unset for stderr.
    path: OnceBox<PathBuf>,
    /// stderr if the log was started on a file, to report that the file takes no more; -1: not there, or already
    /// reported.
    complaints: Place,
    /// The number of lines that could not be written since the last one that could, and why the latest could not.
    lost: AtomicU64,
    reason: AtomicI32,
    /// The file ends with a part of a line, for the rest of which there was no room.
    torn: AtomicBool,
}

/// A descriptor, and what it referred to when it was set.
struct Place {
    /// -1: none yet.
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Place {
    const fn new() -> Place {
        Place { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Not one atomic step: a thread that sees half of it finds a wrong identity, and then opens the file again or drops
    /// its line.
    fn set(&self, fd: RawFd, identity: Identity) {
        self.device.store(identity.device, Relaxed);
        self.inode.store(identity.inode, Relaxed);
        self.fd.store(fd, Relaxed);
    }

    fn identity(&self) -> Identity {
        Identity { device: self.device.load(Relaxed), inode: self.inode.load(Relaxed) }
    }

    /// The descriptor, if it still refers to what it did.
    fn checked(&self) -> Option<RawFd> {
        let fd = self.fd.load(Relaxed);
        (process::identify(fd) == Some(self.identity())).then_some(fd)
    }
}

impl Log {
    const fn new() -> Log {
        Log {
            level: AtomicU8::new(0),
            place: Place::new(),
            path: OnceBox::new(),
            complaints: Place::new(),
            lost: AtomicU64::new(0),
            reason: AtomicI32::new(0),
            torn: AtomicBool::new(false),
        }
    }

    fn enabled(&self, level: Level) -> bool {
        level as u8 <= self.level.load(Relaxed)
    }

    fn start_on(&self, level: Level, fd: RawFd) {
        if let Some(identity) = usable(fd) {
            self.place.set(fd, identity);
            self.level.store(level as u8, Relaxed);
        }
    }

    fn start_file(&self, level: Level, path: &Path) -> io::Result<()> {
        // Absolute, because daemons change their directory.
        let path =
            self.path.get_or_init(|| Box::new(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())));
        self.open(path, None)?;
        if let Some(identity) = usable(libc::STDERR_FILENO) {
            self.complaints.set(libc::STDERR_FILENO, identity);
        }
        self.level.store(level as u8, Relaxed);
        Ok(())
    }

    /// Opens the log file, in the place of `old` if that is ours. The descriptor belongs to the process and is never
    /// closed: once the program has closed it, its number is no longer ours.
    fn open(&self, path: &Path, old: Option<RawFd>) -> io::Result<RawFd> {
        // Non-blocking, so that opening a FIFO without a reader fails instead of waiting.
        let mut flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        if process::is_privileged() {
            flags |= libc::O_NOFOLLOW;
        }
        let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
        let mut file = OwnedFd::from(file);
        if file.as_raw_fd() <= libc::STDERR_FILENO {
            // The program runs without its standard descriptors; what it writes to stdout must not land in the log, nor
            // may the log be in its way when it opens them. A duplicate gets a number above them.
            file = file.as_fd().try_clone_to_owned()?;
        }
        let identity = process::identify(file.as_raw_fd()).ok_or_else(io::Error::last_os_error)?;
        let fd = match old {
            Some(old) => {
                process::replace(old, file, true)?;
                old
            }
            None => file.into_raw_fd(),
        };
        self.place.set(fd, identity);
        Ok(fd)
    }

    fn write(&self, level: Level, text: fmt::Arguments<'_>) {
        process::keeping_errno(|| {
            let Some(fd) = self.checked_fd() else { return };
            let lost = self.lost.swap(0, Relaxed);
            if lost > 0 {
                let why = reason(self.reason.load(Relaxed));
                if let Err(errno) =
                    self.put(fd, &Line::new(Level::Warn, format_args!("{lost} lines lost: {why}")))
                {
                    self.lose(lost + 1, errno);
                    return;
                }
            }
            if let Err(errno) = self.put(fd, &Line::new(level, text)) {
                self.lose(1, errno);
            }
        });
    }

    /// Writes a line, which begins on a line of its own.
    fn put(&self, fd: RawFd, line: &Line) -> Result<(), i32> {
        if self.torn.load(Relaxed) {
            process::write_quietly(fd, b"\n")?;
            self.torn.store(false, Relaxed);
        }
        let written = process::write_quietly(fd, line.bytes())?;
        if written == line.bytes().len() {
            return Ok(());
        }
        self.torn.store(written > 0, Relaxed);
        Err(libc::ENOSPC)
    }

    fn lose(&self, lines: u64, errno: i32) {
        self.lost.fetch_add(lines, Relaxed);
        self.reason.store(errno, Relaxed);
        // If there is no room now, there may be some soon. Any other reason is reported where it is seen.
        if errno != libc::EAGAIN
            && let (Some(path), Some(fd)) = (self.path.get(), self.complaints.checked())
        {
            self.complaints.fd.store(-1, Relaxed);
            let text = format_args!(
                "the log {} cannot be written: {}; lines are lost",
                path.display(),
                reason(errno)
            );
            let _ = process::write_quietly(fd, Line::new(Level::Error, text).bytes());
        }
    }

    /// The descriptor, if it still refers to what it did, and to what the path names.
    fn checked_fd(&self) -> Option<RawFd> {
        let ours = self.place.checked();
        let Some(path) = self.path.get() else { return ours };
        let fd = self.place.fd.load(Relaxed);
        // Another thread may have opened it again a moment ago: what was read before may be out of date.
        let now = process::identify(fd);
        if now.is_some() && now == named(path) {
            return Some(fd);
        }
        // If it cannot be opened again, the log goes on in the file that was rotated.
        self.open(path, ours).ok().or(ours)
    }
}

/// What `fd` refers to, if lines may go there: a server started by inetd has its client there, which expects RPC records.
fn usable(fd: RawFd) -> Option<Identity> {
    if process::is_network_socket(fd) { None } else { process::identify(fd) }
}

/// What the path names, as [`Log::open`] would open it.
fn named(path: &Path) -> Option<Identity> {
    let found = if process::is_privileged() { fs::symlink_metadata(path) } else { fs::metadata(path) };
    found.ok().map(|found| Identity { device: found.dev(), inode: found.ino() })
}

/// Why a line could not be written, without allocating.
fn reason(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC => "no space left on the device",
        libc::EDQUOT => "the disk quota is exceeded",
        libc::EFBIG => "the file has reached its size limit",
        libc::EPIPE => "nobody reads it",
        libc::EAGAIN => "no room to write them",
        _ => "writing failed",
    }
}

/// A moment as people and programs read it (RFC 3339), in UTC: local time would need files and locks of libc.
struct Utc(Duration);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (days, of_day) = (seconds / 86_400, seconds % 86_400);
        // Years begin in March, so that the odd day is the last of a cycle; cycles of 400 years have 146,097 days. The
        // first one begins on 0000-03-01, 719,468 days before 1970.
        let days = days + 719_468;
        let (cycle, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let year = cycle * 400 + year + u64::from(month >= 10);
        let month = if month < 10 { month + 3 } else { month - 9 };
        let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
        let micros = self.0.subsec_micros();
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
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
        // Err only comes from a broken Display; what that wrote before still makes a line.
        let now = Utc(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        let _ = write!(line, "{now} rpcrdma[{}] {}: {text}", std::process::id(), level.name());
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

    /// The next line, without its time.
    fn next(reader: &UnixDatagram) -> Option<String> {
        next_whole(reader).map(|line| timeless(&line))
    }

    fn next_whole(reader: &UnixDatagram) -> Option<String> {
        let mut bytes = [0; 2 * libc::PIPE_BUF];
        let n = reader.recv(&mut bytes).ok()?;
        Some(String::from_utf8(bytes[..n].to_vec()).unwrap())
    }

    fn timeless(line: &str) -> String {
        let (time, rest) = line.split_once(' ').expect("a time");
        assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 27, "{line}");
        rest.to_owned()
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
            let line = next_whole(&reader).unwrap();
            assert!(line.ends_with("\u{20ac}...\n"), "{line}");
            assert!((libc::PIPE_BUF - 2..=libc::PIPE_BUF).contains(&line.len()), "{}", line.len());
        }
    }

    #[test]
    fn a_line_that_just_fits_is_whole_and_nothing_shorter_follows_a_cut() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        log.write(Level::Error, format_args!(""));
        let room = libc::PIPE_BUF - 4 - (next_whole(&reader).unwrap().len() - 1);
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
        let (before, line) = text.split_once('\n').unwrap();
        assert_eq!(before, "before");
        assert_eq!(timeless(line), format!("rpcrdma[{}] error: after\n", std::process::id()));
        assert!(log.place.fd.load(Relaxed) > libc::STDERR_FILENO);
    }

    #[test]
    fn a_log_file_whose_descriptor_was_reused_is_opened_again() {
        let (path, innocent) = (TempPath::new("reopened"), TempPath::new("innocent"));
        let log = Log::new();
        log.start_file(Level::Error, &path.0).unwrap();
        let other = fs::File::create(&innocent.0).unwrap();
        log.place.fd.store(other.as_raw_fd(), Relaxed);
        log.write(Level::Error, format_args!("one"));
        log.write(Level::Error, format_args!("two"));
        assert_eq!(fs::read_to_string(&innocent.0).unwrap(), "");
        assert_eq!(fs::read_to_string(&path.0).unwrap().lines().count(), 2);
    }

    #[test]
    fn a_file_that_is_made_is_its_owners_alone_and_one_that_is_there_keeps_its_mode() {
        let (fresh, old) = (TempPath::new("fresh"), TempPath::new("old"));
        fs::write(&old.0, "").unwrap();
        let mode = |path: &TempPath| fs::metadata(&path.0).unwrap().mode() & 0o777;
        let before = mode(&old);
        for path in [&fresh, &old] {
            Log::new().start_file(Level::Error, &path.0).unwrap();
        }
        // The umask may take more away.
        assert_eq!((mode(&fresh) & !0o600, mode(&old)), (0, before));
    }

    #[test]
    fn root_follows_no_link_to_its_log_and_others_do() {
        let (target, link) = (TempPath::new("target"), TempPath::new("link"));
        std::os::unix::fs::symlink(&target.0, &link.0).unwrap();
        let log = Log::new();
        let started = log.start_file(Level::Error, &link.0).map_err(|error| error.raw_os_error());
        if process::is_privileged() {
            assert_eq!(started, Err(Some(libc::ELOOP)));
            assert!(!target.0.exists());
        } else {
            started.unwrap();
            log.write(Level::Error, format_args!("there"));
            assert!(fs::read_to_string(&target.0).unwrap().ends_with(": there\n"));
        }
    }

    #[test]
    fn a_log_that_was_rotated_goes_on_in_the_new_file_with_the_same_descriptor() {
        let (path, old) = (TempPath::new("rotated"), TempPath::new("rotated.1"));
        let lines = |path: &TempPath| fs::read_to_string(&path.0).unwrap().lines().count();
        let log = Log::new();
        log.start_file(Level::Error, &path.0).unwrap();
        let fd = log.place.fd.load(Relaxed);
        log.write(Level::Error, format_args!("one"));
        // Renamed, and created again by the next line; then by whoever renamed it.
        fs::rename(&path.0, &old.0).unwrap();
        log.write(Level::Error, format_args!("two"));
        log.write(Level::Error, format_args!("three"));
        assert_eq!((lines(&old), lines(&path)), (1, 2));
        fs::rename(&path.0, &old.0).unwrap();
        fs::write(&path.0, "new\n").unwrap();
        log.write(Level::Error, format_args!("four"));
        assert_eq!((lines(&old), lines(&path)), (2, 2));
        assert_eq!(log.place.fd.load(Relaxed), fd);
        // Nothing can be created in its place: the log goes on in the old file.
        fs::remove_file(&path.0).unwrap();
        fs::create_dir(&path.0).unwrap();
        log.write(Level::Error, format_args!("five"));
        fs::remove_dir(&path.0).unwrap();
        assert_eq!((log.lost.load(Relaxed), log.place.fd.load(Relaxed)), (0, fd));
    }

    #[test]
    fn a_file_that_takes_no_more_is_told_once_on_stderr() {
        let (complaints, reader) = UnixDatagram::pair().unwrap();
        reader.set_nonblocking(true).unwrap();
        let log = Log::new();
        log.start_file(Level::Error, Path::new("/dev/full")).unwrap();
        log.complaints.set(complaints.as_raw_fd(), process::identify(complaints.as_raw_fd()).unwrap());
        for n in 0..3 {
            log.write(Level::Error, format_args!("{n}"));
        }
        let line = next(&reader).unwrap();
        assert!(
            line.ends_with(
                "error: the log /dev/full cannot be written: no space left on the device; lines are lost\n"
            ),
            "{line}"
        );
        assert_eq!((next(&reader), log.lost.load(Relaxed)), (None, 3));
    }

    #[test]
    fn a_line_that_was_torn_stays_on_a_line_of_its_own() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        log.torn.store(true, Relaxed);
        log.lose(1, libc::ENOSPC);
        log.write(Level::Error, format_args!("behind"));
        assert_eq!(next_whole(&reader).as_deref(), Some("\n"));
        assert!(next(&reader).unwrap().ends_with("warn: 1 lines lost: no space left on the device\n"));
        assert!(next(&reader).unwrap().ends_with("error: behind\n"));
        assert_eq!(next(&reader), None);
    }

    #[test]
    fn a_time_is_that_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (68_255_999, "1972-02-29T23:59:59.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_709_251_200, "2024-03-01T00:00:00.000000Z"),
            (1_795_339_412, "2026-11-22T09:23:32.000000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(Utc(Duration::from_secs(seconds)).to_string(), text);
        }
        assert_eq!(Utc(Duration::from_nanos(1_234_567)).to_string(), "1970-01-01T00:00:00.001234Z");
    }

    #[test]
    fn a_replaced_stderr_gets_nothing() {
        let (log, reader, _writer) = log_and_reader(Level::Error);
        let (other_writer, other_reader) = UnixDatagram::pair().unwrap();
        other_reader.set_nonblocking(true).unwrap();
        log.place.fd.store(other_writer.as_raw_fd(), Relaxed);
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
