//! Everything tunable, under one name: `RPCRDMA_CREDITS` in the environment, `credits = 32` in the file
//! `/etc/rpcrdma.conf`; and the bindings that are written in files.
//!
//! Owns THE table of settings: names, defaults, parsers and the text that the manual repeats; and the rule for what
//! is not understood. Leaves to `capi` and `tirpc` the controls of one handle, which start from these values, and to
//! `binding` what a line of a binding means. Starts the log.
//!
//! The environment wins over the file, the file over the default. The file has one `key = value` a line; `#`
//! at the start of a line or after a blank begins a comment. Anything that cannot be understood (a setting, a binding or
//! a whole file) is an error that names the place, the value and what is allowed, even where another place would win: a
//! typing error must be noticed.
//!
//! # Invariants
//! - [`get`] reads once per process; every caller gets the same settings, or the same error.
//! - Nothing is passed over: a single error leaves no settings, so nothing goes over rdma. Only the log starts, as far as
//!   its settings are understood, to report the errors.
//! - In a process with more rights than its caller, only the files count.
#![forbid(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use once_cell::race::OnceBox;

use crate::binding::{self, Registry};
use crate::error::{Error, Kind};
use crate::log::{self, Level};
use crate::process;
use crate::textfile::{self, Line, digits, program_number, quoted, shortened, size, words};

/// The settings of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Calls in flight on a connection: asked for as a client, granted as a server. 1 to 4096.
    pub credits: u32,
    /// The same for calls back: asked for as a server, granted as a client. 1 to 4096.
    pub reverse_credits: u32,
    /// Whether calls back may have chunks, towards a peer that supports them.
    pub reverse_chunks: bool,
    /// Most bytes of one Send, header included, in either direction: a multiple of 1024 from 1024 to 262144; see
    /// [`Config::inline`].
    pub inline: Option<usize>,
    /// Versions of RPC-over-RDMA that are spoken.
    pub version: Version,
    /// Largest Receives that a Version Two peer may ask for; see [`Config::receive_sizes`].
    pub max_inline: Option<usize>,
    /// Whether a peer may end the exposure of our memory itself, by its Send.
    pub remote_invalidation: bool,
    /// Longest reply that a client makes room for, in bytes of results; see [`Config::max_reply`].
    pub max_reply: Option<usize>,
    /// Longest Call that a server pulls, in bytes.
    pub max_call: usize,
    /// Bytes of long Calls that a server holds at a time, over all connections.
    pub max_pulled: usize,
    /// Whether Calls may have more chunks than a Linux server accepts.
    pub many_chunks: bool,
    /// Files with bindings, in addition to those of the system.
    pub bindings: Vec<PathBuf>,
    /// Whether all large items stay in the program's memory until they are sent.
    pub by_reference: bool,
    /// Checksums on iWARP connections.
    pub crc: Crc,
    /// How long a waiting thread polls before it sleeps; zero: not at all.
    pub poll: Duration,
    /// The device.
    pub provider: Provider,
    /// Transports of unchanged programs that are moved to rdma.
    pub redirect: Vec<Netid>,
    /// The programs that are moved; `None`: all.
    pub redirect_programs: Option<Vec<u32>>,
    /// Whether moved servers are served over adapters.
    pub redirect_adapters: RedirectAdapters,
    /// Whether a moved client may go on over tcp when the server does not speak rdma.
    pub fallback: bool,
    /// Whether `rpcrdma stat` may watch this process.
    pub stats: bool,
    /// What is logged; `None`: nothing.
    pub log: Option<Level>,
    /// Where it is logged; `None`: stderr.
    pub log_file: Option<PathBuf>,
}

/// Versions of RPC-over-RDMA that are spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Version One only.
    One,
    /// Version Two is offered as a client, and served beside Version One as a server.
    Auto,
    /// Version Two only.
    Two,
}

/// When iWARP connections carry a CRC32C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crc {
    /// Except towards this host's own addresses, where no wire can damage a byte.
    Auto,
    /// Always.
    Yes,
    /// Only if the peer insists.
    No,
}

/// The words for devices: software iWARP, shared memory, and adapters (iWARP ones among them).
pub const DEVICES: &[&str] = &[
    #[cfg(test)]
    "toy",
    "iwarp",
    "local",
    "verbs",
];

/// A choice of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The best one for each peer.
    Auto,
    /// The device with this word.
    Only(&'static str),
}

/// Whether moved servers, which may trust the address of a caller, are served over adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedirectAdapters {
    /// Where the fabric vouches for the caller's address: RoCE and iWARP.
    Auto,
    /// Over InfiniBand too.
    Yes,
    /// Over none.
    No,
}

/// A netid of netconfig(5) whose programs can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Netid {
    Tcp,
    Udp,
    Tcp6,
    Udp6,
}

impl Netid {
    /// The netid as libtirpc spells it.
    pub fn name(self) -> &'static str {
        match self {
            Netid::Tcp => "tcp",
            Netid::Udp => "udp",
            Netid::Tcp6 => "tcp6",
            Netid::Udp6 => "udp6",
        }
    }
}

/// The settings of this process, read at the first call; that call also starts the log.
///
/// # Errors
/// The first thing that is wrong: `Invalid` for a setting or a binding that is not understood, `Os` for a file that
/// exists and cannot be read. The same at every call.
pub fn get() -> Result<&'static Config, Error> {
    let Read { config, errors, .. } = process();
    errors.first().map_or(Ok(config), |error| Err(error.clone()))
}

/// The settings as far as they are understood; [`get`] tells whether they all are.
pub fn understood() -> &'static Config {
    &process().config
}

/// The bindings of this process: the built-in ones, those of the files, and what the program registers.
pub fn bindings() -> &'static Arc<Registry> {
    &process().bindings
}

/// What [`get`] would report about the environment and the files as they are now: all errors. The log is left alone.
pub fn check() -> Vec<Error> {
    process::keeping_errno(|| Read::now(Path::new(FILE), process::is_secure()).errors)
}

/// Where the value of a setting comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nothing sets it.
    Default,
    /// This line of the file of settings.
    File {
        /// From 1.
        line: usize,
    },
    /// The environment variable of the setting.
    Environment,
}

/// A setting and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its name in the environment.
    pub env: &'static str,
    /// Its name in the file.
    pub key: &'static str,
    /// Its value as written.
    pub value: String,
    /// Where the value comes from.
    pub source: Source,
}

/// A file with bindings.
#[derive(Debug)]
pub struct BindingFile {
    /// Which one.
    pub path: PathBuf,
    /// Program, version and procedure of what is understood of it.
    pub procedures: Vec<(u32, u32, u32)>,
}

/// All that is set, for people.
#[derive(Debug)]
pub struct Report {
    /// The file of settings, and whether it is there.
    pub file: (&'static Path, bool),
    /// Every setting, in the order of the table; its default if what is set is not understood.
    pub settings: Vec<Standing>,
    /// The files with bindings that could be read.
    pub bindings: Vec<BindingFile>,
    /// What [`check`] returns.
    pub errors: Vec<Error>,
}

/// What `env` and the files make of the settings, and where each value comes from. Has no other effect.
pub fn report(env: impl IntoIterator<Item = (OsString, OsString)>) -> Report {
    let file = Path::new(FILE);
    let Read { config, taken, errors, .. } = Read::from(env, file, process::is_secure());
    let settings = TABLE.iter().map(|setting| {
        let last = taken.iter().rfind(|taken| taken.key == setting.key);
        let default = (setting.default.to_owned(), Source::Default);
        let (value, source) = last.map_or(default, |last| (last.value.clone(), last.source));
        Standing { env: setting.env, key: setting.key, value, source }
    });
    let readable = |(path, text): (PathBuf, Result<String, Error>)| {
        Some(BindingFile { path, procedures: binding::procedures(&text.ok()?) })
    };
    Report {
        file: (file, file.exists()),
        settings: settings.collect(),
        bindings: config.binding_texts().into_iter().filter_map(readable).collect(),
        errors,
    }
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Settings, as rpcrdma.conf(5) has them.
    Settings,
    /// Bindings, as rpcrdma-bindings(5) has them.
    Bindings,
}

/// What a file holds, and what is wrong with it. Bindings begin with a number, and settings with a word.
///
/// # Errors
/// It cannot be read.
pub fn check_file(path: &Path) -> Result<(Holds, Vec<Error>), Error> {
    let text = textfile::read_named(path)?;
    let first = textfile::lines(&text).next();
    if first.is_some_and(|line| line.says.starts_with(|c: char| c.is_ascii_digit())) {
        let wrong = Registry::built_in().add_text(&path.display().to_string(), &text);
        return Ok((Holds::Bindings, wrong.into_iter().map(invalid).collect()));
    }
    Ok((Holds::Settings, Config::understood([], Some((path, &text)), false).1))
}

/// What was read, and why the rest is not understood.
struct Read {
    config: Config,
    taken: Vec<Taken>,
    bindings: Arc<Registry>,
    errors: Vec<Error>,
}

fn process() -> &'static Read {
    static PROCESS: OnceBox<Read> = OnceBox::new();
    if let Some(process) = PROCESS.get() {
        return process;
    }
    // If another thread has read it meanwhile, that result counts.
    let read = process::keeping_errno(|| Read::now(Path::new(FILE), process::is_secure()));
    let first = PROCESS.set(Box::new(read)).is_ok();
    let process = PROCESS.get().expect("it was set, here or meanwhile");
    if first {
        process.start_log();
    }
    process
}

/// A value that was given for a setting and understood: the last one counts.
struct Taken {
    key: &'static str,
    value: String,
    source: Source,
}

impl Read {
    fn now(file: &Path, secure: bool) -> Read {
        Read::from(std::env::vars_os(), file, secure)
    }

    fn from(env: impl IntoIterator<Item = (OsString, OsString)>, file: &Path, secure: bool) -> Read {
        let (text, unreadable) = match textfile::read(file) {
            Ok(text) => (text, None),
            Err(error) => (None, Some(error)),
        };
        let text = text.as_deref().map(|text| (file, text));
        let (config, taken, mut errors) = Config::gathered(env, text, secure);
        errors.splice(0..0, unreadable);

        let bindings = Registry::built_in();
        for (path, text) in config.binding_texts() {
            match text {
                Ok(text) => {
                    let wrong = bindings.add_text(&path.display().to_string(), &text);
                    errors.extend(wrong.into_iter().map(invalid));
                }
                Err(error) => errors.push(error),
            }
        }
        Read { config, taken, bindings: Arc::new(bindings), errors }
    }

    fn start_log(&self) {
        let Some(level) = self.config.log else { return };
        if log::start(level, self.config.log_file.as_deref()).is_err() {
            return;
        }
        for error in &self.errors {
            crate::log_error!("{error}; until that is fixed nothing goes over rdma");
        }
    }
}

/// All settings, as `(environment variable, key in the file, default, meaning)`: the manual is checked against them.
pub fn table() -> impl Iterator<Item = (&'static str, &'static str, &'static str, &'static str)> {
    TABLE.iter().map(|s| (s.env, s.key, s.default, s.meaning))
}

/// One row of the table.
pub(crate) struct Setting {
    env: &'static str,
    key: &'static str,
    default: &'static str,
    meaning: &'static str,
    /// Parses a value, and on error says what is allowed: "must be" is put before it.
    set: fn(&mut Config, &str) -> Result<(), String>,
}

/// THE table.
const TABLE: &[Setting] = &[
    Setting {
        env: "RPCRDMA_CREDITS",
        key: "credits",
        default: "32",
        meaning: "calls in flight on a connection, asked for as a client and granted as a server; 1 to 4096",
        set: |config, value| number(value, 1, 4096).map(|n| config.credits = n),
    },
    Setting {
        env: "RPCRDMA_REVERSE_CREDITS",
        key: "reverse_credits",
        default: "16",
        meaning: "callbacks in flight on a connection, asked for as a server and granted as a client; 1 to 4096",
        set: |config, value| number(value, 1, 4096).map(|n| config.reverse_credits = n),
    },
    Setting {
        env: "RPCRDMA_REVERSE_CHUNKS",
        key: "reverse_chunks",
        default: "yes",
        meaning: "whether callbacks may have chunks, which Linux peers cannot handle; yes or no",
        set: |config, value| yes_or_no(value).map(|yes| config.reverse_chunks = yes),
    },
    Setting {
        env: "RPCRDMA_INLINE",
        key: "inline",
        default: "auto",
        meaning: "most bytes of one Send, offered to the peer; a multiple of 1024 from 1024 to 262144, auto: 256K, on \
                  adapters 4096",
        set: |config, value| {
            or_auto(value, |value| send_size(value, 1024)).map(|bytes| config.inline = bytes)
        },
    },
    Setting {
        env: "RPCRDMA_VERSION",
        key: "version",
        default: "1",
        meaning: "versions of RPC-over-RDMA: 1, 2, or auto: 2 is offered as a client, and served beside 1",
        set: |config, value| {
            let choices = [("1", Version::One), ("auto", Version::Auto), ("2", Version::Two)];
            one_of(value, &choices).map(|version| config.version = version)
        },
    },
    Setting {
        env: "RPCRDMA_MAX_INLINE",
        key: "max_inline",
        default: "auto",
        meaning: "largest Receives that a Version Two peer may ask for; a multiple of 1024 from 4096 to 262144, \
                  auto: 256K, on adapters what inline says",
        set: |config, value| {
            or_auto(value, |value| send_size(value, 4096)).map(|bytes| config.max_inline = bytes)
        },
    },
    Setting {
        env: "RPCRDMA_REMOTE_INVALIDATION",
        key: "remote_invalidation",
        default: "yes",
        meaning: "whether a peer may end the exposure of memory itself (Send with Invalidate); yes or no",
        set: |config, value| yes_or_no(value).map(|yes| config.remote_invalidation = yes),
    },
    Setting {
        env: "RPCRDMA_MAX_REPLY",
        key: "max_reply",
        default: "auto",
        meaning: "longest reply that a client makes room for, in result bytes; 1K to 1G, auto: 16M, on adapters 256K for \
                  programs with bindings",
        set: |config, value| or_auto(value, message_size).map(|bytes| config.max_reply = bytes),
    },
    Setting {
        env: "RPCRDMA_MAX_CALL",
        key: "max_call",
        default: "64M",
        meaning: "longest call that a server pulls, in bytes; 1K to 1G",
        set: |config, value| message_size(value).map(|bytes| config.max_call = bytes),
    },
    Setting {
        env: "RPCRDMA_MAX_PULLED",
        key: "max_pulled",
        default: "256M",
        meaning: "bytes of long calls that a server holds at a time, all connections together; 1K to 1G",
        set: |config, value| message_size(value).map(|bytes| config.max_pulled = bytes),
    },
    Setting {
        env: "RPCRDMA_BINDINGS",
        key: "bindings",
        default: "",
        meaning: "files with bindings, separated by commas, beside those in /etc/rpcrdma.d",
        set: |config, value| {
            let files = value.split(',').map(str::trim).filter(|file| !file.is_empty());
            config.bindings = files.map(PathBuf::from).collect();
            Ok(())
        },
    },
    Setting {
        env: "RPCRDMA_BY_REFERENCE",
        key: "by_reference",
        default: "no",
        meaning: "whether large items stay in the program's memory until sent, without a binding too; yes or no",
        set: |config, value| yes_or_no(value).map(|yes| config.by_reference = yes),
    },
    Setting {
        env: "RPCRDMA_MANY_CHUNKS",
        key: "many_chunks",
        default: "no",
        meaning: "whether a call may have several chunks of a kind, which Linux servers cannot handle; yes or no",
        set: |config, value| yes_or_no(value).map(|yes| config.many_chunks = yes),
    },
    Setting {
        env: "RPCRDMA_CRC",
        key: "crc",
        default: "auto",
        meaning: "checksums: yes, no, or auto: yes except towards this host's own addresses",
        set: |config, value| {
            let choices = [("auto", Crc::Auto), ("yes", Crc::Yes), ("no", Crc::No)];
            one_of(value, &choices).map(|crc| config.crc = crc)
        },
    },
    Setting {
        env: "RPCRDMA_POLL",
        key: "poll",
        default: "50",
        meaning: "microseconds that a waiting thread polls before it sleeps; 0 to 1000, 0 turns polling off",
        set: |config, value| {
            number(value, 0, 1000).map(|n| config.poll = Duration::from_micros(u64::from(n)))
        },
    },
    Setting {
        env: "RPCRDMA_PROVIDER",
        key: "provider",
        default: "auto",
        meaning: "the device: verbs (RDMA adapters), local (memory shared within one host), iwarp (software iWARP over TCP), \
                  or auto",
        set: |config, value| {
            let devices = DEVICES.iter().map(|word| (*word, Provider::Only(word)));
            let choices = [("auto", Provider::Auto)].into_iter().chain(devices).collect::<Vec<_>>();
            one_of(value, &choices).map(|provider| config.provider = provider)
        },
    },
    Setting {
        env: "RPCRDMA_REDIRECT",
        key: "redirect",
        default: "",
        meaning: "transports of unchanged programs that are moved to rdma: a list of tcp, udp, tcp6, udp6; \
            udp and udp6 move servers only",
        set: |config, value| {
            let choices =
                [Netid::Tcp, Netid::Udp, Netid::Tcp6, Netid::Udp6].map(|netid| (netid.name(), netid));
            let netids = words(value).map(|word| one_of(word, &choices)).collect::<Result<_, _>>();
            netids.map(|netids| config.redirect = netids).map_err(|allowed| format!("a list of {allowed}"))
        },
    },
    Setting {
        env: "RPCRDMA_REDIRECT_PROGRAMS",
        key: "redirect_programs",
        default: "all",
        meaning: "the programs that are moved: all, or a list of program numbers; never rpcbind, 100000",
        set: |config, value| {
            const ALLOWED: &str = "all, or a list of program numbers without 100000 (rpcbind)";
            let program = |word: &str| program_number(word).filter(|&number| number != RPCBIND);
            let programs = match value {
                "all" => Some(None),
                _ => words(value)
                    .map(program)
                    .collect::<Option<Vec<u32>>>()
                    .filter(|p| !p.is_empty())
                    .map(Some),
            };
            programs.map(|programs| config.redirect_programs = programs).ok_or_else(|| ALLOWED.into())
        },
    },
    Setting {
        env: "RPCRDMA_REDIRECT_ADAPTERS",
        key: "redirect_adapters",
        default: "auto",
        meaning: "whether moved servers are served over adapters: yes, no, or auto: where the fabric vouches for the \
                  caller's address",
        set: |config, value| {
            use RedirectAdapters::{Auto, No, Yes};
            one_of(value, &[("auto", Auto), ("yes", Yes), ("no", No)])
                .map(|choice| config.redirect_adapters = choice)
        },
    },
    Setting {
        env: "RPCRDMA_FALLBACK",
        key: "fallback",
        default: "yes",
        meaning: "whether a moved client goes on over tcp when the server does not speak rdma; yes or no",
        set: |config, value| yes_or_no(value).map(|fallback| config.fallback = fallback),
    },
    Setting {
        env: "RPCRDMA_STATS",
        key: "stats",
        default: "yes",
        meaning: "whether rpcrdma stat and rpcrdma top can show the process to users who may trace it; yes or no",
        set: |config, value| yes_or_no(value).map(|stats| config.stats = stats),
    },
    Setting {
        env: "RPCRDMA_LOG",
        key: "log",
        default: "off",
        meaning: "what is logged: off, error, warn, info, debug or wire; each includes those before it",
        set: |config, value| {
            let level = log_level(value);
            // Somebody asks for a log, so there is one, to say that this is not a level.
            config.log = level.as_ref().map_or(Some(Level::Error), |level| *level);
            level.map(drop)
        },
    },
    Setting {
        env: "RPCRDMA_LOG_FILE",
        key: "log_file",
        default: "",
        meaning: "the file that the log is appended to, instead of stderr",
        set: |config, value| {
            config.log_file = (!value.is_empty()).then(|| PathBuf::from(value));
            Ok(())
        },
    },
];

const FILE: &str = "/etc/rpcrdma.conf";
/// Where the system's bindings are: every file that ends in `.conf`, by name.
const BINDINGS: &str = "/etc/rpcrdma.d";
const PREFIX: &str = "RPCRDMA_";
const RPCBIND: u32 = 100_000;

/// Longest replies unless set otherwise. On an adapter the memory for them is locked, so a program with bindings, which
/// tell how long its long replies are, gets less there.
const MAX_REPLY: usize = 16 << 20;
const MAX_REPLY_ADAPTER: usize = 256 << 10;

/// Most bytes of one Send unless set otherwise. Software takes memory for a Receive only when a message comes, and a Send
/// is cheaper than chunks, which cost another trip: so this is the most that RFC 8797 can express. An adapter locks the
/// memory of every Receive, whatever comes.
pub(crate) const INLINE: usize = 256 << 10;
const INLINE_ADAPTER: usize = 4096;

impl Default for Config {
    fn default() -> Config {
        let mut config = Config {
            credits: 0,
            reverse_credits: 0,
            reverse_chunks: true,
            inline: None,
            version: Version::One,
            max_inline: None,
            remote_invalidation: true,
            max_reply: None,
            max_call: 0,
            max_pulled: 0,
            many_chunks: false,
            bindings: Vec::new(),
            by_reference: false,
            crc: Crc::Auto,
            poll: Duration::ZERO,
            provider: Provider::Auto,
            redirect: Vec::new(),
            redirect_programs: None,
            redirect_adapters: RedirectAdapters::Auto,
            fallback: true,
            stats: true,
            log: None,
            log_file: None,
        };
        for setting in TABLE {
            (setting.set)(&mut config, setting.default)
                .expect("a default of our own table is valid (tested)");
        }
        config
    }
}

impl Config {
    /// Longest reply that a client makes room for, in bytes of results. `locked`: in memory that is locked.
    pub fn max_reply(&self, locked: bool) -> usize {
        self.max_reply.unwrap_or(if locked { MAX_REPLY_ADAPTER } else { MAX_REPLY })
    }

    /// Most bytes of one Send, and of the Receives that wait for the peer's. `locked`: in memory that is locked.
    pub fn inline(&self, locked: bool) -> usize {
        self.inline.unwrap_or(if locked { INLINE_ADAPTER } else { INLINE })
    }

    /// Bytes of the Receives that a connection begins with, and most bytes of those that its peer may ask for. `locked`: in
    /// memory that is locked.
    pub fn receive_sizes(&self, locked: bool) -> (usize, usize) {
        if self.version == Version::One {
            return (self.inline(locked), self.inline(locked));
        }
        // draft-cel-nfsv4-rpcrdma-version-two-01 §2.3: "RPC-over-RDMA Version Two receiver implementations MUST
        // support an inline threshold of 4096 bytes, but MAY support larger inline threshold values."
        let first = self.inline(locked).max(4096);
        (first, first.max(self.max_inline.unwrap_or(if locked { first } else { INLINE })))
    }

    /// The settings that an environment and the text of a file make, as far as they are understood, and what is wrong
    /// with the others: `Invalid`, naming the variable or the line, the value and what is allowed. `secure`: the
    /// environment does not count.
    pub(crate) fn understood(
        env: impl IntoIterator<Item = (OsString, OsString)>,
        file: Option<(&Path, &str)>,
        secure: bool,
    ) -> (Config, Vec<Error>) {
        let (config, _, errors) = Config::gathered(env, file, secure);
        (config, errors)
    }

    /// As [`Config::understood`], and also the values that were taken.
    fn gathered(
        env: impl IntoIterator<Item = (OsString, OsString)>,
        file: Option<(&Path, &str)>,
        secure: bool,
    ) -> (Config, Vec<Taken>, Vec<Error>) {
        let mut config = Config::default();
        let (mut taken, mut errors) = (Vec::new(), Vec::new());
        if let Some((path, text)) = file {
            config.apply_file(path, text, &mut taken, &mut errors);
        }
        if !secure {
            for (name, value) in env {
                match config.apply_variable(&name, &value) {
                    Ok(set) => taken.extend(set.map(|setting| Taken {
                        key: setting.key,
                        value: value.to_string_lossy().trim().to_owned(),
                        source: Source::Environment,
                    })),
                    Err(error) => errors.push(error),
                }
            }
        }
        (config, taken, errors)
    }

    /// Whether programs on this transport are moved.
    pub fn redirects(&self, netid: Netid) -> bool {
        self.redirect.contains(&netid)
    }

    /// Whether this program is moved, if its transport is.
    pub fn redirects_program(&self, program: u32) -> bool {
        // Everybody finds rpcbind where it always was.
        program != RPCBIND && self.redirect_programs.as_ref().is_none_or(|list| list.contains(&program))
    }

    /// The files with bindings, those of the system first, and what they hold or why they cannot be read.
    fn binding_texts(&self) -> Vec<(PathBuf, Result<String, Error>)> {
        let mut files = match system_bindings(Path::new(BINDINGS)) {
            Ok(files) => files,
            Err(error) => return vec![(BINDINGS.into(), Err(error))],
        };
        files.extend(self.bindings.iter().cloned());
        files.into_iter().map(|path| (path.clone(), textfile::read_named(&path))).collect()
    }

    fn apply_file(&mut self, path: &Path, text: &str, taken: &mut Vec<Taken>, errors: &mut Vec<Error>) {
        let mut seen: Vec<(&str, usize)> = Vec::new();
        for line in textfile::lines(text) {
            match self.apply_line(line, &mut seen) {
                Ok(set) => taken.push(set),
                Err((part, wrong)) => {
                    errors.push(invalid(format!("{}:{}: {wrong}", path.display(), line.place(part))));
                }
            }
        }
    }

    /// The error is the part of the line that is not understood, and why.
    fn apply_line<'a>(
        &mut self,
        line: Line<'a>,
        seen: &mut Vec<(&'a str, usize)>,
    ) -> Result<Taken, (&'a str, String)> {
        let Some((key, value)) = line.says.split_once('=') else {
            return Err((line.says, format!("{}: must be `key = value`", quoted(line.says))));
        };
        let (key, value) = (key.trim(), value.trim());
        if let Some((_, first)) = seen.iter().find(|(seen, _)| *seen == key) {
            return Err((key, format!("{} is already set in line {first}", quoted(key))));
        }
        seen.push((key, line.number));
        let Some(setting) = TABLE.iter().find(|setting| setting.key == key) else {
            let suggestion = suggestion(key, |setting| setting.key);
            return Err((key, format!("{}: no such setting; {suggestion}", quoted(key))));
        };
        let source = Source::File { line: line.number };
        (setting.set)(self, value)
            .map(|()| Taken { key: setting.key, value: value.to_owned(), source })
            .map_err(|allowed| (value, format!("{key} = {}: must be {allowed}", quoted(value))))
    }

    /// Applies a variable as it stands in the environment. Returns the setting, if it is one of ours.
    ///
    /// # Errors
    /// `Invalid`.
    pub(crate) fn apply_variable(
        &mut self,
        name: &OsStr,
        value: &OsStr,
    ) -> Result<Option<&'static Setting>, Error> {
        let name = name.to_string_lossy();
        if !name.starts_with(PREFIX) {
            return Ok(None);
        }
        if let Some(setting) = TABLE.iter().find(|setting| setting.env == name) {
            let Some(value) = value.to_str() else {
                return Err(invalid(format!("{name}={}: must be UTF-8", quoted(&value.to_string_lossy()))));
            };
            return (setting.set)(self, value.trim())
                .map(|()| Some(setting))
                .map_err(|allowed| invalid(format!("{name}={}: must be {allowed}", quoted(value))));
        }
        let suggestion = suggestion(&name, |setting| setting.env);
        // As written, except for what a terminal would obey: the environment is not always the user's.
        let shown = shortened(&name);
        Err(invalid(format!("{}: no such environment variable; {suggestion}", shown.escape_debug())))
    }
}

/// The files in the folder of the system's bindings, by name; none if there is no folder.
///
/// # Errors
/// The folder exists but cannot be read.
fn system_bindings(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |error: io::Error| textfile::cannot(folder, &error);
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|end| end == "conf") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn invalid(text: String) -> Error {
    Error::new(Kind::Invalid, text)
}

fn number(value: &str, low: u32, high: u32) -> Result<u32, String> {
    let n = digits(value).and_then(|n| u32::try_from(n).ok()).filter(|n| (low..=high).contains(n));
    n.ok_or_else(|| format!("a whole number from {low} to {high}"))
}

/// Every chunk of a message of this size has a 32-bit length, with room to spare.
fn message_size(value: &str) -> Result<usize, String> {
    size(value, 1 << 10, 1 << 30).ok_or_else(|| "a size from 1K to 1G, such as 65536, 256K or 16M".into())
}

/// Bytes of a Send, in the units of RFC 8797.
fn send_size(value: &str, low: usize) -> Result<usize, String> {
    let bytes = size(value, low, 262_144).filter(|bytes| bytes % 1024 == 0);
    bytes.ok_or_else(|| format!("a multiple of 1024 from {low} to 262144"))
}

/// `None` for a value that is left to the library.
fn or_auto(value: &str, parse: impl FnOnce(&str) -> Result<usize, String>) -> Result<Option<usize>, String> {
    if value == "auto" {
        return Ok(None);
    }
    parse(value).map(Some).map_err(|allowed| format!("auto, or {allowed}"))
}

fn one_of<T: Copy>(value: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let found = choices.iter().find(|(name, _)| *name == value);
    found.map(|&(_, choice)| choice).ok_or_else(|| {
        let names = choices.iter().map(|&(name, _)| name).collect::<Vec<_>>();
        let (last, others) = names.split_last().unwrap_or((&"", &[]));
        format!("{} or {last}", others.join(", "))
    })
}

fn yes_or_no(value: &str) -> Result<bool, String> {
    one_of(value, &[("yes", true), ("no", false)])
}

fn log_level(value: &str) -> Result<Option<Level>, String> {
    let off = [("off", None)].into_iter();
    let choices = off.chain(Level::ALL.map(|level| (level.name(), Some(level)))).collect::<Vec<_>>();
    // An empty variable asks for nothing.
    if value.is_empty() { Ok(None) } else { one_of(value, &choices) }
}

/// What to write instead of a name that no setting has: the name with the fewest letters changed, inserted or left out
/// (Levenshtein), if one is near. The prefix of environment variables and capitals make no difference.
fn suggestion(name: &str, of: fn(&Setting) -> &'static str) -> String {
    let plain = |name: &str| name.to_lowercase().replace('-', "_").trim_start_matches("rpcrdma_").to_owned();
    let name = plain(&shortened(name));
    let near = TABLE.iter().map(|setting| (distance(&name, setting.key), setting)).min_by_key(|near| near.0);
    match near {
        // Up to every other letter may be wrong: what is farther off is something else.
        Some((distance, setting)) if distance <= name.chars().count() / 2 => {
            format!("did you mean {}?", of(setting))
        }
        _ => "rpcrdma.conf(5) lists them all".into(),
    }
}

fn distance(a: &str, b: &str) -> usize {
    let b = b.chars().collect::<Vec<_>>();
    let mut row = (0..=b.len()).collect::<Vec<_>>();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let change = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn from(
        env: impl IntoIterator<Item = (OsString, OsString)>,
        file: Option<(&Path, &str)>,
        secure: bool,
    ) -> Result<Config, Error> {
        let (config, errors) = Config::understood(env, file, secure);
        errors.into_iter().next().map_or(Ok(config), Err)
    }

    fn from_env(variables: &[(&str, &str)]) -> Result<Config, Error> {
        from(variables.iter().map(|(n, v)| (OsString::from(n), OsString::from(v))), None, false)
    }

    fn from_file(text: &str) -> Result<Config, Error> {
        from([], Some((Path::new("/etc/rpcrdma.conf"), text)), false)
    }

    fn set(name: &str, value: &str) -> Config {
        from_env(&[(name, value)]).unwrap()
    }

    #[track_caller]
    fn refused(result: Result<Config, Error>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        error.text().to_owned()
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let config = from_env(&[("HOME", "/"), ("RPCRDM_X", "1"), ("rpcrdma_credits", "0")]).unwrap();
        assert_eq!(config, Config::default());
        assert_eq!((config.credits, config.inline), (32, None));
        assert_eq!((config.inline(false), config.inline(true)), (256 << 10, 4096));
        assert_eq!((config.max_reply(false), config.max_reply(true)), (16 << 20, 256 << 10));
        assert_eq!(config.max_call, 64 << 20);
        assert_eq!((config.version, config.remote_invalidation), (Version::One, true));
        assert_eq!((config.crc, config.provider), (Crc::Auto, Provider::Auto));
        assert_eq!((config.poll, config.fallback), (Duration::from_micros(50), true));
        assert_eq!((config.redirect, config.redirect_programs), (vec![], None));
        assert_eq!((config.log, config.log_file), (None, None));
    }

    #[test]
    fn a_setting_has_one_name_in_all_places() {
        for (env, key, default, meaning) in table() {
            assert_eq!(env, format!("RPCRDMA_{}", key.to_uppercase()));
            assert!(!meaning.is_empty() && !meaning.ends_with('.'));
            // Setting the default changes nothing, in either place.
            assert_eq!(set(env, default), Config::default(), "{env}");
            assert_eq!(from_file(&format!("{key} = {default}")).unwrap(), Config::default(), "{key}");
        }
    }

    #[test]
    fn every_setting_sets_its_own_field() {
        let want = Config {
            credits: 4096,
            reverse_credits: 3,
            reverse_chunks: false,
            inline: Some(262144),
            version: Version::Auto,
            max_inline: Some(32 << 10),
            remote_invalidation: false,
            max_reply: Some(256 << 10),
            max_call: 1 << 30,
            max_pulled: 1 << 20,
            many_chunks: true,
            bindings: vec!["/etc/a".into(), "b c".into()],
            by_reference: true,
            crc: Crc::No,
            poll: Duration::ZERO,
            provider: Provider::Only("iwarp"),
            redirect: vec![Netid::Tcp, Netid::Udp6],
            redirect_programs: Some(vec![100003, 0x20000001]),
            redirect_adapters: RedirectAdapters::No,
            fallback: false,
            stats: false,
            log: Some(Level::Wire),
            log_file: Some("/tmp/a b#c".into()),
        };
        let variables = [
            ("RPCRDMA_CREDITS", "4096"),
            ("RPCRDMA_REVERSE_CREDITS", "3"),
            ("RPCRDMA_REVERSE_CHUNKS", "no"),
            ("RPCRDMA_INLINE", "256K"),
            ("RPCRDMA_VERSION", "auto"),
            ("RPCRDMA_MAX_INLINE", "32K"),
            ("RPCRDMA_REMOTE_INVALIDATION", "no"),
            ("RPCRDMA_MAX_REPLY", "262144"),
            ("RPCRDMA_MAX_CALL", "1G"),
            ("RPCRDMA_MAX_PULLED", "1M"),
            ("RPCRDMA_MANY_CHUNKS", "yes"),
            ("RPCRDMA_BINDINGS", "/etc/a, b c"),
            ("RPCRDMA_BY_REFERENCE", "yes"),
            ("RPCRDMA_CRC", "no"),
            ("RPCRDMA_POLL", "0"),
            ("RPCRDMA_PROVIDER", "iwarp"),
            ("RPCRDMA_REDIRECT", "tcp, udp6"),
            ("RPCRDMA_REDIRECT_PROGRAMS", "100003 0x20000001"),
            ("RPCRDMA_REDIRECT_ADAPTERS", "no"),
            ("RPCRDMA_FALLBACK", "no"),
            ("RPCRDMA_STATS", "no"),
            ("RPCRDMA_LOG", "wire"),
            ("RPCRDMA_LOG_FILE", "/tmp/a b#c"),
        ];
        assert_eq!(variables.len(), TABLE.len());
        assert_eq!(from_env(&variables).unwrap(), want);
        let lines = variables.map(|(name, value)| {
            format!("{}={value}\n", name.strip_prefix("RPCRDMA_").unwrap().to_lowercase())
        });
        assert_eq!(from_file(&lines.concat()).unwrap(), want);
    }

    #[test]
    fn the_environment_wins_over_the_file() {
        let file = Some((Path::new("f"), "credits = 5\ninline = 8192"));
        let env = || [("RPCRDMA_CREDITS".into(), "7".into())];
        let config = from(env(), file, false).unwrap();
        assert_eq!((config.credits, config.inline(false)), (7, 8192));
    }

    #[test]
    fn only_the_file_counts_in_a_secure_process() {
        let file = Some((Path::new("f"), "credits = 5"));
        let env = ["RPCRDMA_CREDITS", "RPCRDMA_TYPO", "RPCRDMA_LOG_FILE"];
        let config = from(env.map(|name| (name.into(), "7".into())), file, true).unwrap();
        assert_eq!(config, Config { credits: 5, ..Config::default() });
    }

    #[test]
    fn a_wrong_value_is_an_error_that_names_the_place_the_value_and_what_is_allowed() {
        assert_eq!(
            refused(from_env(&[("RPCRDMA_CREDITS", "0")])),
            r#"RPCRDMA_CREDITS="0": must be a whole number from 1 to 4096"#
        );
        assert_eq!(
            refused(from_file("# c\n\ncredits = many")),
            r#"/etc/rpcrdma.conf:3:11: credits = "many": must be a whole number from 1 to 4096"#
        );
        assert_eq!(
            refused(from_env(&[("RPCRDMA_LOG", "all")])),
            r#"RPCRDMA_LOG="all": must be off, error, warn, info, debug or wire"#
        );
        assert_eq!(
            refused(from_env(&[("RPCRDMA_REDIRECT", "tcp,sctp")])),
            r#"RPCRDMA_REDIRECT="tcp,sctp": must be a list of tcp, udp, tcp6 or udp6"#
        );
        assert_eq!(
            refused(from_env(&[("RPCRDMA_PROVIDER", "tcp")])),
            format!(
                r#"RPCRDMA_PROVIDER="tcp": must be auto, {} or {}"#,
                DEVICES[..DEVICES.len() - 1].join(", "),
                DEVICES[DEVICES.len() - 1]
            )
        );
        let not_utf8 = OsString::from_vec(b"\xff".to_vec());
        let error = from([("RPCRDMA_CRC".into(), not_utf8)], None, false).unwrap_err();
        assert_eq!(error.text(), "RPCRDMA_CRC=\"\u{fffd}\": must be UTF-8");
    }

    #[test]
    fn wrong_values_of_every_setting_are_refused() {
        let wrong = [
            ("RPCRDMA_CREDITS", &["", "0", "4097", "-1", "+1", "1.5", "0x10", "4294967297", "1 2"][..]),
            ("RPCRDMA_INLINE", &["", "0", "1023", "1025", "4095", "263168", "257K", "K", "1M"]),
            ("RPCRDMA_VERSION", &["", "0", "3", "one", "1,2"]),
            ("RPCRDMA_MAX_INLINE", &["", "0", "1024", "4095", "5000", "263168", "257K", "AUTO"]),
            ("RPCRDMA_REMOTE_INVALIDATION", &["", "auto", "1"]),
            ("RPCRDMA_MAX_REPLY", &["", "1023", "1073741825", "2G", "16MB", "M", "-1M", "1 M"]),
            (
                "RPCRDMA_MAX_REPLY",
                &["18014398509481985K", "99999999999999999999", "17179869185G", "1\u{212a}"],
            ),
            ("RPCRDMA_MAX_CALL", &["", "0", "unlimited"]),
            ("RPCRDMA_CRC", &["", "on", "YES", "1"]),
            ("RPCRDMA_POLL", &["", "1001", "-1", "50us"]),
            ("RPCRDMA_PROVIDER", &["", "shm", "siw"]),
            ("RPCRDMA_REDIRECT", &["rdma", "TCP", "tcp;udp", "all"]),
            (
                "RPCRDMA_REDIRECT_PROGRAMS",
                &["", ",", "nfs", "0x", "0x+1", "4294967296", "100000", "1,0x186a0"],
            ),
            ("RPCRDMA_FALLBACK", &["", "true", "0"]),
            ("RPCRDMA_LOG", &["Error", "3", "error,warn"]),
        ];
        for (name, values) in wrong {
            for value in values {
                let text = refused(from_env(&[(name, value)]));
                assert!(text.starts_with(&format!("{name}={value:?}: must be ")), "{text}");
                let key = name.strip_prefix(PREFIX).unwrap().to_lowercase();
                let text = refused(from_file(&format!("{key}={value}")));
                let column = key.len() + 2;
                assert!(
                    text.starts_with(&format!("/etc/rpcrdma.conf:1:{column}: {key} = {value:?}: must be ")),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn limits_are_inside_the_range() {
        assert_eq!(
            (set("RPCRDMA_CREDITS", "1").credits, set("RPCRDMA_INLINE", "1k").inline),
            (1, Some(1024))
        );
        assert_eq!(set("RPCRDMA_MAX_CALL", "1024").max_call, 1024);
        assert_eq!(set("RPCRDMA_POLL", " 1000 ").poll, Duration::from_millis(1));
    }

    #[test]
    fn an_empty_list_or_path_or_level_asks_for_nothing() {
        for name in ["RPCRDMA_REDIRECT", "RPCRDMA_LOG", "RPCRDMA_LOG_FILE"] {
            assert_eq!(set(name, ""), Config::default());
        }
    }

    #[test]
    fn an_unknown_variable_is_an_error_that_suggests_the_nearest_name() {
        for (typo, meant) in [
            ("RPCRDMA_CREDIT", "RPCRDMA_CREDITS"),
            ("RPCRDMA_REDIRECTS", "RPCRDMA_REDIRECT"),
            ("RPCRDMA_REDIRECT_PROGRAM", "RPCRDMA_REDIRECT_PROGRAMS"),
            ("RPCRDMA_MAXREPLY", "RPCRDMA_MAX_REPLY"),
            ("RPCRDMA_LOGFILE", "RPCRDMA_LOG_FILE"),
            ("RPCRDMA_REDIRCT", "RPCRDMA_REDIRECT"),
            ("RPCRDMA_log", "RPCRDMA_LOG"),
        ] {
            let text = refused(from_env(&[(typo, "1")]));
            assert_eq!(text, format!("{typo}: no such environment variable; did you mean {meant}?"));
        }
        let long = format!("RPCRDMA_{}", "X".repeat(1 << 16));
        assert!(refused(from_env(&[(&long, "1")])).len() < 200);
    }

    #[test]
    fn the_name_of_an_unknown_variable_is_shown_without_what_a_terminal_would_obey() {
        for name in ["RPCRDMA_\u{1b}[2J", "RPCRDMA_A\nB", "RPCRDMA_\u{202e}"] {
            let text = refused(from_env(&[(name, "1")]));
            let shown = name.escape_debug();
            assert_eq!(
                text,
                format!("{shown}: no such environment variable; rpcrdma.conf(5) lists them all")
            );
        }
    }

    #[test]
    fn an_unknown_or_repeated_key_or_a_line_without_one_is_an_error() {
        assert_eq!(
            refused(from_file("credit = 3")),
            r#"/etc/rpcrdma.conf:1:1: "credit": no such setting; did you mean credits?"#
        );
        assert_eq!(refused(from_file("\nyes")), r#"/etc/rpcrdma.conf:2:1: "yes": must be `key = value`"#);
        assert_eq!(
            refused(from_file("poll=1\npoll=2")),
            r#"/etc/rpcrdma.conf:2:1: "poll" is already set in line 1"#
        );
        for near in ["Credits", "RPCRDMA_CREDITS", "rpcrdma_credits"] {
            let text = refused(from_file(&format!("{near} = 3")));
            assert_eq!(
                text,
                format!("/etc/rpcrdma.conf:1:1: {near:?}: no such setting; did you mean credits?")
            );
        }
        assert!(refused(from_file("log-file = 3")).ends_with("did you mean log_file?"));
        for far in ["", "x", "threads"] {
            let text = refused(from_file(&format!("{far} = 3")));
            assert!(text.ends_with("no such setting; rpcrdma.conf(5) lists them all"), "{text}");
        }
    }

    #[test]
    fn receives_are_of_one_size_unless_version_two_may_ask_for_more() {
        let sizes = |inline, version, max_inline| {
            let config = from_env(&[
                ("RPCRDMA_INLINE", inline),
                ("RPCRDMA_VERSION", version),
                ("RPCRDMA_MAX_INLINE", max_inline),
            ])
            .unwrap();
            (config.receive_sizes(false), config.receive_sizes(true))
        };
        assert_eq!(sizes("1024", "1", "64K"), ((1024, 1024), (1024, 1024)));
        for version in ["auto", "2"] {
            assert_eq!(sizes("1024", version, "auto"), ((4096, 262144), (4096, 4096)));
            assert_eq!(sizes("128K", version, "auto"), ((131072, 262144), (131072, 131072)));
            assert_eq!(sizes("4096", version, "16K"), ((4096, 16384), (4096, 16384)));
            assert_eq!(sizes("32K", version, "16K"), ((32768, 32768), (32768, 32768)));
        }
    }

    #[test]
    fn comments_blank_lines_and_crlf_are_not_settings() {
        let config =
            from_file("# credits = 1\r\n\r\n  credits=2 # two\r\n\t#\r\npoll = 3\t# three\n").unwrap();
        assert_eq!((config.credits, config.poll), (2, Duration::from_micros(3)));
        assert_eq!(from_file("log_file = /var/log/#1").unwrap().log_file, Some("/var/log/#1".into()));
        assert_eq!(from_file("").unwrap(), Config::default());
    }

    #[test]
    fn a_list_of_programs_limits_what_is_moved_and_rpcbind_never_is() {
        let all = Config::default();
        assert!(all.redirects_program(100003) && !all.redirects_program(100000));
        let some = set("RPCRDMA_REDIRECT_PROGRAMS", "100003,100005");
        assert!(some.redirects_program(100005) && !some.redirects_program(100021));
        let tcp = set("RPCRDMA_REDIRECT", "tcp");
        assert!(tcp.redirects(Netid::Tcp) && !tcp.redirects(Netid::Tcp6));
    }

    #[test]
    fn a_missing_folder_of_bindings_is_no_error_and_an_unreadable_one_is() {
        assert!(system_bindings(Path::new("/does/not/exist")).unwrap().is_empty());
        let error = system_bindings(Path::new("/dev/null")).unwrap_err();
        assert_eq!((error.kind(), error.text()), (Kind::Os(libc::ENOTDIR), "/dev/null: Not a directory"));
    }

    /// What `get` writes to stderr in a process of its own with these variables. (The test harness uses stdout.)
    fn stderr_of_get(variables: &[(&str, &str)]) -> String {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "config::tests::get_in_a_child_process", "--nocapture"]);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with(PREFIX)) {
            child.env_remove(name);
        }
        child.env("CONFIG_TEST_CHILD", "1").envs(variables.iter().copied());
        let output = child.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// The body of those processes. `get` is not called in this one, where it would start the log of all tests.
    #[test]
    fn get_in_a_child_process() {
        if std::env::var_os("CONFIG_TEST_CHILD").is_some() {
            let now = check().first().map(|error| error.text().to_owned());
            match (get(), get()) {
                (Ok(one), Ok(two)) => {
                    assert!(std::ptr::eq(one, two));
                    assert_eq!(now, None);
                }
                (Err(one), Err(two)) => {
                    assert_eq!(one.text(), two.text());
                    assert_eq!(now.as_deref(), Some(one.text()));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn nothing_is_printed_unless_asked_for() {
        assert_eq!(stderr_of_get(&[]), "");
        assert_eq!(stderr_of_get(&[("RPCRDMA_CREDITS", "0")]), "");
        assert_eq!(stderr_of_get(&[("RPCRDMA_LOG", "error"), ("RPCRDMA_CRC", "no")]), "");
    }

    #[test]
    fn the_log_works_when_other_settings_are_wrong_and_says_which() {
        let text =
            stderr_of_get(&[("RPCRDMA_LOG", "error"), ("RPCRDMA_CREDITS", "0"), ("RPCRDMA_CRC", "on")]);
        assert!(text.contains("] error: RPCRDMA_CREDITS=\"0\": must be a whole number"), "{text}");
        assert!(
            text.contains("] error: RPCRDMA_CRC=\"on\": must be auto, yes or no; until that is fixed"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 2);
    }

    #[test]
    fn who_asks_for_a_log_by_a_level_that_there_is_not_is_told_so() {
        let text = stderr_of_get(&[("RPCRDMA_LOG", "inof")]);
        assert!(text.contains("] error: RPCRDMA_LOG=\"inof\": must be off, error, warn"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn a_wrong_line_or_file_of_bindings_is_a_wrong_setting() {
        let path = std::env::temp_dir().join(format!("rpcrdma-config-bindings-{}", std::process::id()));
        std::fs::write(&path, "# mine\n0x20000001 1 1 max-reply=8\n0x20000001 1 2 arguments=itn\n").unwrap();
        let name = path.display().to_string();
        let both = format!("{name},/does/not/exist,/dev/null");
        let text = stderr_of_get(&[("RPCRDMA_LOG", "error"), ("RPCRDMA_BINDINGS", &both)]);
        std::fs::remove_file(&path).unwrap();
        assert!(text.contains(&format!("] error: {name}:3:26: \"itn\": must be int, ")), "{text}");
        assert!(text.contains("] error: /does/not/exist: No such file or directory; until"), "{text}");
        assert!(
            text.contains("] error: /dev/null: must be a regular file, and is a device; until"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn a_log_file_that_cannot_be_opened_is_named_on_stderr() {
        let text = stderr_of_get(&[("RPCRDMA_LOG", "wire"), ("RPCRDMA_LOG_FILE", "/does/not/exist")]);
        assert!(text.contains("] error: no log: cannot open /does/not/exist: "), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn each_setting_tells_who_has_set_it() {
        let text = "# mine\ncredits = 5\n\n inline = 8K # large\npoll = 7\ncrc = on";
        let env = [("RPCRDMA_POLL", " 9 "), ("RPCRDMA_VERSION", "two"), ("HOME", "/")];
        let env = env.map(|(name, value)| (name.into(), value.into()));
        let (_, taken, errors) = Config::gathered(env, Some((Path::new("f"), text)), false);
        let said: Vec<_> = taken.iter().map(|set| (set.key, set.value.as_str(), set.source)).collect();
        let file = |line| Source::File { line };
        let want = [
            ("credits", "5", file(2)),
            ("inline", "8K", file(4)),
            ("poll", "7", file(5)),
            ("poll", "9", Source::Environment),
        ];
        assert_eq!((said.as_slice(), errors.len()), (&want[..], 2));
    }

    #[test]
    fn a_report_has_every_setting_once_and_what_counts_of_it() {
        let report = report(
            [("RPCRDMA_CREDITS", "7"), ("RPCRDMA_BINDINGS", "/does/not/exist")]
                .map(|(name, value)| (OsString::from(name), OsString::from(value))),
        );
        let keys: Vec<_> = report.settings.iter().map(|setting| setting.key).collect();
        assert_eq!(keys, TABLE.iter().map(|setting| setting.key).collect::<Vec<_>>());
        let credits = &report.settings[0];
        assert_eq!((credits.value.as_str(), credits.source), ("7", Source::Environment));
        assert!(
            report.errors.iter().any(|error| error.text() == "/does/not/exist: No such file or directory")
        );
        assert!(report.bindings.iter().all(|file| file.path != Path::new("/does/not/exist")));
    }

    #[test]
    fn a_file_is_checked_for_what_it_holds() {
        let path = std::env::temp_dir().join(format!("rpcrdma-config-holds-{}", std::process::id()));
        let check = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let (holds, errors) = check_file(&path).unwrap();
            let name = path.display().to_string();
            (holds, errors.iter().map(|error| error.text().replace(&name, "f")).collect::<Vec<_>>())
        };
        assert_eq!(check(""), (Holds::Settings, vec![]));
        assert_eq!(check("# 9\ncredits = 9"), (Holds::Settings, vec![]));
        assert_eq!(check("0x9 1 1 max-reply=8"), (Holds::Bindings, vec![]));
        let wrong =
            "f:2:7: \"max_reply=8\": must be arguments=SHAPE, results=SHAPE, max-reply=SIZE or preset";
        assert_eq!(check("9 1 1 max-reply=8\n9 1 2 max_reply=8"), (Holds::Bindings, vec![wrong.into()]));
        let wrong = "f:1:8: crc = \"on\": must be auto, yes or no";
        assert_eq!(check(" crc = on"), (Holds::Settings, vec![wrong.into()]));
        std::fs::remove_file(&path).unwrap();
        assert!(check_file(&path).unwrap_err().text().ends_with(": No such file or directory"));
    }

    #[test]
    fn distance_counts_the_letters_changed() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!((distance("", "abc"), distance("abc", ""), distance("abc", "abc")), (3, 3, 0));
    }

    #[test]
    fn the_example_file_says_nothing_new_with_its_comments_taken_away() {
        let example = include_str!("../packaging/rpcrdma.conf");
        let settings =
            |line: &str| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).map(str::to_owned);
        let uncommented: Vec<String> = example.lines().filter_map(settings).collect();
        assert_eq!(uncommented.len(), TABLE.len());
        assert_eq!(from_file(&uncommented.join("\n")).expect("settings"), Config::default());
        assert_eq!(from_file(example).expect("nothing but comments"), Config::default());
    }
}
