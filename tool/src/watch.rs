//! The figures of running processes: which processes have the library, and what its page in each of them says (`layout` in
//! the library, `src/stats/layout.rs`).
//!
//! The page is a file in memory that the process holds open, or only has mapped if it has closed its descriptors. The kernel
//! decides who may open it. **Another user's process may have written it, and this program may run as root:** it is read
//! with pread(2) and never mapped, every offset, number and text in it is checked, and only letters, digits and punctuation
//! of its texts reach the terminal. Only memory files of the kernel are opened, not what a user's file system says is one.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rpcrdma::tool::layout::{self, Head, Slot};
use rpcrdma::tool::{COUNTERS, latency};
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, SealFlags, StatxFlags};
use rustix::fs::{fcntl_get_seals, memfd_create, open, statx};

use crate::words::shown;

/// Pages larger than this are not ours, of whatever version.
const SIZE_MAX: u64 = 16 << 20;

/// More counters than any version of the library has.
const COUNTERS_MAX: usize = 1024;

/// Why a process cannot be watched.
#[derive(Debug)]
pub enum Refusal {
    /// There is no such process.
    Missing,
    /// It was there, and has ended.
    Ended,
    /// It belongs to somebody else.
    Foreign { owner: String },
    /// It does not use the library.
    NotLoaded,
    /// It has made no connection yet.
    Unconnected,
    /// Its settings say so.
    Off,
    /// It has closed its descriptors, and only root may look at what it has mapped.
    Closed,
    /// What it shows is not understood.
    Unknown(String),
    /// The system refuses something.
    System(io::Error),
}

impl Refusal {
    /// In words, for process `pid`.
    pub fn text(&self, pid: u32) -> String {
        match self {
            Refusal::Missing => format!("there is no process {pid}"),
            Refusal::Ended => format!("process {pid} has ended"),
            Refusal::Foreign { owner } if is_root() => {
                format!("process {pid} of {owner} may not be looked at from here: this needs CAP_SYS_PTRACE")
            }
            Refusal::Foreign { owner } => format!("process {pid} belongs to {owner}: run as root"),
            Refusal::NotLoaded => {
                format!(
                    "process {pid} does not use the library: start it with `rpcrdma run`, or see rpcrdma(7)"
                )
            }
            Refusal::Unconnected => {
                format!("process {pid} uses the library, and has made no connection over rdma yet")
            }
            Refusal::Off => {
                format!(
                    "process {pid} is not to be watched: RPCRDMA_STATS=no, or stats = no in /etc/rpcrdma.conf"
                )
            }
            Refusal::Closed => {
                format!(
                    "process {pid} has closed its descriptors, and its memory may not be read: run as root"
                )
            }
            Refusal::Unknown(why) => format!("process {pid}: {why}"),
            Refusal::System(error) => format!("process {pid}: {error}"),
        }
    }
}

/// Whether this program runs as root, who may look into nearly all processes.
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

/// The text about processes that could not be looked at.
pub fn foreign_text(number: usize) -> String {
    let processes = if number == 1 { "1 process".to_owned() } else { format!("{number} processes") };
    let remedy = if is_root() { "this needs CAP_SYS_PTRACE" } else { "run as root" };
    format!("{processes} could not be looked at: {remedy}")
}

/// A process that can be watched.
pub struct Watched {
    pub pid: u32,
    pub user: String,
    source: Source,
}

/// Where its page is.
enum Source {
    /// The file itself.
    File(File),
    /// The memory of the process, with the page's address there.
    Memory(File, u64),
}

impl Source {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Source::File(file) => file.read_exact_at(bytes, offset),
            Source::Memory(file, base) => {
                let at = base.checked_add(offset).ok_or(io::ErrorKind::InvalidData)?;
                file.read_exact_at(bytes, at)
            }
        }
    }

    fn words(&self, offset: u64, count: usize) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; 8 * count];
        self.read(offset, &mut bytes)?;
        Ok(words_of(&bytes))
    }
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes"))).collect()
}

/// What a process has done so far.
#[derive(Clone, Debug)]
pub struct Figures {
    pub pid: u32,
    pub user: String,
    pub program: String,
    pub library: String,
    /// When it made its first connection: nanoseconds since 1970.
    pub since: u64,
    pub at: Instant,
    /// In the order of the library's table.
    pub counters: Vec<(String, u64)>,
    pub connections: Vec<Connection>,
    /// Connections beyond those.
    pub without_slot: u64,
    pub latencies: Vec<Latency>,
}

/// A connection.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Differs between two connections that have the same place one after the other.
    pub key: (usize, u64),
    pub accepted: bool,
    pub since: u64,
    pub fd: i32,
    pub device: String,
    pub peer: Option<SocketAddr>,
    pub local: Option<SocketAddr>,
    pub version: u64,
    pub asked: u64,
    pub granted: u64,
    pub granting: u64,
    pub in_flight: u64,
    pub open: u64,
    pub calls: u64,
    pub waited: u64,
    pub served: u64,
    pub errors: u64,
    pub bytes_inline: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub bytes_placed: u64,
}

/// How long the calls of a procedure took.
#[derive(Clone, Debug)]
pub struct Latency {
    /// Program, version, procedure; `None`: all that have no histogram of their own.
    pub numbers: Option<(u32, u32, u32)>,
    /// Whether the process served these calls; else it made them.
    pub served: bool,
    /// Of all calls, in nanoseconds.
    pub sum: u64,
    pub buckets: Vec<u64>,
}

impl Latency {
    pub fn calls(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// In nanoseconds.
    pub fn percentile(&self, part: f64) -> Option<u64> {
        latency::percentile(&self.buckets, part)
    }

    /// In nanoseconds.
    pub fn mean(&self) -> Option<u64> {
        self.sum.checked_div(self.calls())
    }
}

impl Figures {
    /// A counter by its name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.iter().find(|(other, _)| other == name).map_or(0, |(_, n)| *n)
    }

    /// Buckets of all procedures together.
    pub fn all_buckets(&self) -> Vec<u64> {
        let mut all = vec![0u64; layout::BUCKETS];
        for latency in &self.latencies {
            for (sum, n) in all.iter_mut().zip(&latency.buckets) {
                *sum = sum.saturating_add(*n);
            }
        }
        all
    }

    /// Whether `before` are earlier figures of the same page.
    pub fn follows(&self, before: &Figures) -> bool {
        (self.pid, self.since) == (before.pid, before.since)
    }
}

/// How buckets have grown between two looks.
pub fn difference(now: &[u64], before: &[u64]) -> Vec<u64> {
    now.iter().enumerate().map(|(at, n)| n.saturating_sub(before.get(at).copied().unwrap_or(0))).collect()
}

/// The processes that can be watched, those that use the library and cannot be, and how many could not be looked at.
pub struct Processes {
    pub watched: Vec<Watched>,
    pub others: Vec<(u32, Refusal)>,
    pub foreign: usize,
}

/// Looks through all processes.
pub fn processes() -> io::Result<Processes> {
    let mut found = Processes { watched: Vec::new(), others: Vec::new(), foreign: 0 };
    let users = Users::read();
    let mut pids: Vec<u32> = fs::read_dir("/proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id())
        .collect();
    pids.sort_unstable();
    for pid in pids {
        match look(pid, &users) {
            Ok(watched) => found.watched.push(watched),
            Err(Refusal::Foreign { .. }) => found.foreign += 1,
            Err(Refusal::Missing | Refusal::Ended | Refusal::NotLoaded) => {}
            Err(why) => found.others.push((pid, why)),
        }
    }
    Ok(found)
}

/// Looks for the page of a process.
pub fn look(pid: u32, users: &Users) -> Result<Watched, Refusal> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let owner = match fs::metadata(&folder) {
        Ok(meta) => users.name(meta.uid()),
        Err(_) => return Err(Refusal::Missing),
    };
    let refused = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => Refusal::Foreign { owner: owner.clone() },
        io::ErrorKind::NotFound => Refusal::Ended,
        _ if error.raw_os_error() == Some(libc::ESRCH) => Refusal::Ended,
        _ => Refusal::System(error),
    };
    let inner = inner_pid(&folder).map_err(refused)?;
    let watched = |source| Watched { pid, user: owner.clone(), source };
    // A child that was not forked through the C library has inherited its parent's page, which says whose it is.
    let is_own = |source: &Source| {
        source.words(0, layout::HEAD_WORDS).is_ok_and(|head| {
            head[Head::Magic as usize] == layout::MAGIC && head[Head::Pid as usize] == u64::from(inner)
        })
    };
    for entry in fs::read_dir(folder.join("fd")).map_err(refused)? {
        let Ok(entry) = entry else { continue };
        if fs::read_link(entry.path()).is_ok_and(|target| is_page(&target))
            && let Ok(file) = memory_file(&entry.path())
            && let source = Source::File(file)
            && is_own(&source)
        {
            return Ok(watched(source));
        }
    }
    let maps = fs::read(folder.join("maps")).map_err(refused)?;
    let maps = String::from_utf8_lossy(&maps);
    let mut hidden = false;
    for range in maps.lines().filter_map(mapped_page) {
        hidden = true;
        let file = memory_file(&folder.join("map_files").join(range.0));
        let memory = || File::open(folder.join("mem")).map(|memory| Source::Memory(memory, range.1));
        // As root the file; else, if the process is ours, its memory. But not if the file is not one of the kernel's:
        // reading a page of it may block for ever.
        let file = file.map(Source::File);
        let source = file.or_else(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => memory(),
            _ => Err(error),
        });
        if let Ok(source) = source
            && is_own(&source)
        {
            return Ok(watched(source));
        }
    }
    if maps.is_empty() {
        // A zombie; or a thread of the kernel.
        return Err(if is_zombie(&folder) { Refusal::Ended } else { Refusal::NotLoaded });
    }
    let loaded = maps.lines().filter_map(path_of).any(|path| {
        Path::new(path).file_name().is_some_and(|name| name.to_string_lossy().starts_with("librpcrdma.so"))
    });
    Err(match (hidden, loaded) {
        (true, _) => Refusal::Closed,
        (_, false) => Refusal::NotLoaded,
        (_, true) if is_off(&folder) => Refusal::Off,
        _ => Refusal::Unconnected,
    })
}

/// The path of a line of /proc/PID/maps.
fn path_of(line: &str) -> Option<&str> {
    Some(&line[line.find(['/', '['])?..])
}

/// Whether this is how the kernel shows our file.
fn is_page(target: &Path) -> bool {
    target.to_str().and_then(|target| target.strip_prefix("/memfd:"))
        == Some(&format!("{} (deleted)", layout::NAME))
}

/// If a line of /proc/PID/maps is the beginning of a page: the name of its link in map_files, and the address where it
/// begins.
fn mapped_page(line: &str) -> Option<(&str, u64)> {
    if !is_page(Path::new(path_of(line)?)) {
        return None;
    }
    let mut words = line.split_whitespace();
    let range = words.next()?;
    // Only shared mappings, from byte 0 of the file on.
    let (rights, offset) = (words.next()?, words.next()?);
    let (start, _) = range.split_once('-')?;
    (rights.ends_with('s') && u64::from_str_radix(offset, 16) == Ok(0)).then_some(())?;
    Some((range, u64::from_str_radix(start, 16).ok()?))
}

/// Opens what a link in /proc leads to, if it is a file in the kernel's memory that cannot shrink.
fn memory_file(link: &Path) -> io::Result<File> {
    let wrong = || io::Error::from(io::ErrorKind::InvalidData);
    // Which file system it is on is asked without opening it: a user's file system may block us for ever.
    let device = |fd: &dyn AsFd| {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        statx(fd.as_fd(), "", flags, StatxFlags::TYPE).map(|stat| (stat.stx_dev_major, stat.stx_dev_minor))
    };
    let path = open(link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let own = memfd_create("rpcrdma", MemfdFlags::CLOEXEC)?;
    if device(&path)? != device(&own)? {
        return Err(wrong());
    }
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&path));
    let file: File = open(again, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?.into();
    let stays = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
    (stays && file.metadata()?.len() <= SIZE_MAX).then_some(file).ok_or_else(wrong)
}

/// The PID that the process has in its own namespace.
fn inner_pid(folder: &Path) -> io::Result<u32> {
    let status = fs::read_to_string(folder.join("status"))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let last = numbers.and_then(|numbers| numbers.split_whitespace().next_back()?.parse().ok());
    last.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn is_zombie(folder: &Path) -> bool {
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && line.contains('Z'))
}

/// Whether the process's settings keep others from watching it.
fn is_off(folder: &Path) -> bool {
    let environment = fs::read(folder.join("environ")).unwrap_or_default();
    let mut values =
        environment.split(|byte| *byte == 0).filter_map(|entry| entry.strip_prefix(b"RPCRDMA_STATS="));
    if let Some(value) = values.next() {
        return value.trim_ascii() == b"no";
    }
    let file = fs::read_to_string("/etc/rpcrdma.conf").unwrap_or_default();
    let mut values =
        file.lines().filter_map(|line| line.split_once('=')).filter(|(key, _)| key.trim() == "stats");
    values.any(|(_, value)| value.split('#').next().unwrap_or("").trim() == "no")
}

impl Watched {
    /// What the process has done until now.
    ///
    /// # Errors
    /// The process has ended (a page that is a file stays readable, so the process itself is checked), or the page is not
    /// ours.
    pub fn figures(&self) -> Result<Figures, Refusal> {
        let ended = || !Path::new(&format!("/proc/{}", self.pid)).exists();
        if ended() || is_zombie(Path::new(&format!("/proc/{}", self.pid))) {
            return Err(Refusal::Ended);
        }
        let failed = |error: io::Error| match error.kind() {
            _ if ended() => Refusal::Ended,
            io::ErrorKind::UnexpectedEof => damaged(),
            _ => Refusal::System(error),
        };
        let head = self.source.words(0, layout::HEAD_WORDS).map_err(failed)?;
        let frame = Frame::of(&head)?;
        let mut bytes = vec![0; frame.size as usize];
        self.source.read(0, &mut bytes).map_err(failed)?;
        let page = words_of(&bytes);
        let counters = page[frame.counters.words()].iter().enumerate();
        let name =
            |at: usize| COUNTERS.get(at).map_or_else(|| format!("counter_{at}"), |name| (*name).to_owned());
        let mut connections = Vec::new();
        for at in 0..frame.slots.count {
            if page[frame.slots.item(at)][Slot::End as usize] != 0 {
                connections.extend(self.connection(&frame.slots, at).map_err(failed)?);
            }
        }
        let latencies = (0..frame.histograms.count)
            .filter_map(|at| Latency::of(&page[frame.histograms.item(at)]))
            .filter(|latency| latency.calls() > 0)
            .collect();
        Ok(Figures {
            pid: self.pid,
            user: self.user.clone(),
            program: text(&head[Head::Program as usize..][..8]),
            library: text(&head[Head::Library as usize..][..4]),
            since: head[Head::Since as usize],
            at: Instant::now(),
            counters: counters.map(|(at, n)| (name(at), *n)).collect(),
            connections,
            without_slot: head[Head::WithoutSlot as usize],
            latencies,
        })
    }

    /// A consistent copy of a connection; `None` if it is just beginning or ending.
    fn connection(&self, slots: &Table, at: usize) -> io::Result<Option<Connection>> {
        for _ in 0..4 {
            let offset = 8 * slots.item(at).start as u64;
            let sequence = self.source.words(offset, 1)?[0];
            let words = self.source.words(offset, layout::SLOT_WORDS)?;
            if sequence % 2 == 0 && self.source.words(offset, 1)?[0] == sequence {
                return Ok(Connection::of((at, sequence), &words));
            }
        }
        Ok(None)
    }
}

impl Connection {
    fn of(key: (usize, u64), words: &[u64]) -> Option<Connection> {
        let word = |slot: Slot| words[slot as usize];
        let accepted = match word(Slot::End) {
            1 => false,
            2 => true,
            _ => return None,
        };
        let address = |slot: Slot| layout::address_of(&words[slot as usize..][..layout::ADDRESS_WORDS]);
        Some(Connection {
            key,
            accepted,
            since: word(Slot::Since),
            fd: word(Slot::Fd) as i32,
            device: text(&words[Slot::Device as usize..][..8]),
            peer: address(Slot::Peer),
            local: address(Slot::Local),
            version: word(Slot::Version),
            asked: word(Slot::Asked),
            granted: word(Slot::Granted),
            granting: word(Slot::Granting),
            in_flight: word(Slot::InFlight),
            open: word(Slot::Open),
            calls: word(Slot::Calls),
            waited: word(Slot::Waited),
            served: word(Slot::Served),
            errors: word(Slot::Errors),
            bytes_inline: word(Slot::BytesInline),
            bytes_read: word(Slot::BytesRead),
            bytes_written: word(Slot::BytesWritten),
            bytes_placed: word(Slot::BytesPlaced),
        })
    }
}

impl Latency {
    fn of(words: &[u64]) -> Option<Latency> {
        let procedure = latency::Procedure::of_word(words[0])?;
        Some(Latency {
            numbers: procedure.numbers(),
            served: procedure.is_served(),
            sum: words[1],
            buckets: words[layout::HISTOGRAM_HEAD..][..layout::BUCKETS].to_vec(),
        })
    }
}

/// Where things are in a page, checked.
struct Frame {
    size: u64,
    counters: Table,
    slots: Table,
    histograms: Table,
}

/// A table in a page, in words.
struct Table {
    start: usize,
    each: usize,
    count: usize,
}

impl Table {
    fn item(&self, at: usize) -> std::ops::Range<usize> {
        let start = self.start + at * self.each;
        start..start + self.each
    }

    fn words(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.each * self.count
    }
}

impl Frame {
    fn of(head: &[u64]) -> Result<Frame, Refusal> {
        let word = |word: Head| head[word as usize];
        if word(Head::Magic) != layout::MAGIC {
            return Err(Refusal::Unconnected);
        }
        if word(Head::Version) != layout::VERSION {
            let library = text(&head[Head::Library as usize..][..4]);
            let text = format!(
                "its library, version {library}, shows its figures in another way (layout {}, here {})",
                word(Head::Version),
                layout::VERSION
            );
            return Err(Refusal::Unknown(text));
        }
        let size = word(Head::Size);
        let table = |offset: u64, each: u64, least: usize, count: u64| {
            let end = each.checked_mul(count).and_then(|bytes| bytes.checked_add(offset));
            let fits = end.is_some_and(|end| end <= size)
                && offset.is_multiple_of(8)
                && each.is_multiple_of(8)
                && each / 8 >= least as u64;
            fits.then_some(Table {
                start: (offset / 8) as usize,
                each: (each / 8) as usize,
                count: count as usize,
            })
        };
        if size > SIZE_MAX || !size.is_multiple_of(8) {
            return Err(damaged());
        }
        let counters = table(word(Head::Counters), 8, 1, word(Head::CounterCount)).ok_or_else(damaged)?;
        if counters.count > COUNTERS_MAX {
            return Err(damaged());
        }
        let slots = table(word(Head::Slots), word(Head::SlotSize), layout::SLOT_WORDS, word(Head::SlotCount));
        let (each, count) = (word(Head::HistogramSize), word(Head::HistogramCount));
        let histograms = table(word(Head::Histograms), each, layout::HISTOGRAM_WORDS, count);
        let (slots, histograms) = (slots.ok_or_else(damaged)?, histograms.ok_or_else(damaged)?);
        Ok(Frame { size, counters, slots, histograms })
    }
}

fn damaged() -> Refusal {
    Refusal::Unknown("its figures are damaged".to_owned())
}

fn text(words: &[u64]) -> String {
    shown(&layout::text_of(words))
}

/// The names of users, by their numbers.
pub struct Users(HashMap<u32, String>);

impl Users {
    pub fn read() -> Users {
        let text = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let user = |line: &str| {
            let mut fields = line.split(':');
            Some((fields.nth(1).and_then(|_| fields.next())?.parse().ok()?, shown(line.split(':').next()?)))
        };
        Users(text.lines().filter_map(user).collect())
    }

    pub fn name(&self, uid: u32) -> String {
        self.0.get(&uid).cloned().unwrap_or_else(|| format!("user {uid}"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A page as the library makes it, with one connection and one histogram.
    fn page() -> Vec<u64> {
        let mut words = vec![0; layout::SIZE / 8];
        let start = |offset: usize| layout::HEAD_WORDS + offset;
        let (slots, histograms) = (start(layout::COUNTER_ROOM), start(layout::COUNTER_ROOM + 40 * 256));
        for (word, value) in [
            (Head::Magic, layout::MAGIC),
            (Head::Version, layout::VERSION),
            (Head::Size, layout::SIZE as u64),
            (Head::Counters, 8 * layout::HEAD_WORDS as u64),
            (Head::CounterCount, COUNTERS.len() as u64),
            (Head::Slots, 8 * slots as u64),
            (Head::SlotSize, 8 * layout::SLOT_WORDS as u64),
            (Head::SlotCount, layout::SLOTS as u64),
            (Head::Histograms, 8 * histograms as u64),
            (Head::HistogramSize, 8 * layout::HISTOGRAM_WORDS as u64),
            (Head::HistogramCount, layout::HISTOGRAMS as u64),
            (Head::Pid, std::process::id().into()),
        ] {
            words[word as usize] = value;
        }
        words[Head::Program as usize] = u64::from_ne_bytes(*b"a\x1b[2Jb\0\0");
        words[layout::HEAD_WORDS] = 17;
        words[slots + Slot::End as usize] = 1;
        words[slots + Slot::Calls as usize] = 5;
        let peer = layout::address(Some("192.0.2.1:7".parse().unwrap()));
        words[slots + Slot::Peer as usize..][..4].copy_from_slice(&peer);
        words[histograms] = 3;
        words[histograms + layout::HISTOGRAM_HEAD + 9] = 2;
        words
    }

    fn watched(words: &[u64]) -> Watched {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(fd);
        file.write_all(&words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>()).unwrap();
        Watched { pid: std::process::id(), user: "me".to_owned(), source: Source::File(file) }
    }

    #[test]
    fn a_page_is_read_and_its_text_is_harmless() {
        let figures = watched(&page()).figures().unwrap();
        assert_eq!((figures.program.as_str(), figures.counter("calls")), ("a?[2Jb", 17));
        let [connection] = &figures.connections[..] else { panic!("one connection") };
        assert_eq!((connection.calls, connection.accepted), (5, false));
        assert_eq!(connection.peer.unwrap().to_string(), "192.0.2.1:7");
        let [latency] = &figures.latencies[..] else { panic!("one histogram") };
        assert_eq!((latency.calls(), latency.served), (2, true));
        assert!(figures.follows(&figures));
    }

    #[test]
    fn whatever_a_page_says_it_is_read_or_refused() {
        let values = [0, 1, 7, 8, 64, 4096, 1 << 20, 1 << 32, 1 << 61, u64::MAX - 7, u64::MAX];
        for at in 0..layout::HEAD_WORDS {
            for value in values {
                let mut words = page();
                words[at] = value;
                let figures = watched(&words).figures();
                let frame =
                    [Head::Size, Head::Counters, Head::Slots, Head::Histograms].map(|word| word as usize);
                if frame.contains(&at) && value > 1 << 20 {
                    assert!(figures.is_err(), "word {at} is {value}");
                }
            }
        }
        // Words with any other contents.
        for value in [u64::MAX, 1 << 63, 0x1b5b_324a_1b5b_324a] {
            let mut words = page();
            words[layout::HEAD_WORDS..].fill(value);
            let figures = watched(&words).figures().unwrap();
            let other = watched(&page()).figures().unwrap();
            let _ = crate::stat::Rates::of(&other, &figures);
            let _ = crate::stat::Rates::of(&figures, &other);
            assert!(figures.latencies.iter().all(|latency| latency.percentile(0.99).is_some()));
        }
    }

    #[test]
    fn a_page_that_is_cut_is_an_error() {
        let words = page();
        for len in [0, 1, layout::HEAD_WORDS - 1, layout::HEAD_WORDS, words.len() - 1] {
            assert!(watched(&words[..len]).figures().is_err(), "{len}");
        }
    }

    #[test]
    fn only_files_in_the_kernels_memory_are_opened() {
        let other = File::open("/etc/passwd").unwrap();
        let link =
            |file: &dyn std::os::fd::AsRawFd| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        assert!(memory_file(&link(&other)).is_err());
        // A file that can be cut is not ours.
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(memory_file(&link(&unsealed)).is_err());
        rustix::fs::fcntl_add_seals(&unsealed, SealFlags::SHRINK).unwrap();
        assert!(memory_file(&link(&unsealed)).is_ok());
    }

    #[test]
    fn lines_of_maps_name_the_page() {
        let line = "7f0000000000-7f0000040000 rw-s 00000000 00:01 1025  /memfd:rpcrdma-stats (deleted)";
        assert_eq!(mapped_page(line), Some(("7f0000000000-7f0000040000", 0x7f00_0000_0000)));
        for wrong in [
            line.replace("rw-s", "rw-p"),
            line.replace("00000000 00:01", "00001000 00:01"),
            line.replace("-stats", "-stat"),
            line.replace(" (deleted)", ""),
            "7f0000000000-7f0000040000 rw-s 00000000 00:01 1025".to_owned(),
            String::new(),
        ] {
            assert_eq!(mapped_page(&wrong), None, "{wrong}");
        }
    }
}
