//! The programs under test: the C suite's server and caller, compiled against libtirpc alone, with the library
//! preloaded.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::peer::{Peer, hang, patient, request};

/// More than pools and the allocator retain after the worst of the peers here, in kB.
const KEPT: usize = 48 << 10;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library, which must exist and be up to date with the sources.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if let Some(named) = std::env::var_os("LIBRPCRDMA") {
            let named = PathBuf::from(named).canonicalize().expect("LIBRPCRDMA names a file");
            return named;
        }
        let built = root().join("build/librpcrdma.so.0");
        let time = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
        let made = time(&built).unwrap_or_else(|| panic!("{} is missing: run make", built.display()));
        let mut folders = vec![root().join("src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("src is readable") {
                let path = entry.expect("src is readable").path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let newer = time(&path).is_some_and(|changed| changed > made);
                    assert!(!newer, "{} is older than {}: run make", built.display(), path.display());
                }
            }
        }
        built
    })
}

/// A program of c-tests, which is built when it is first asked for.
fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let out = BUILT.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad_peers");
        let made = Command::new("make")
            .args(["-s", "-j2", "-C"])
            .arg(root().join("c-tests"))
            .arg(format!("OUT={}", out.display()))
            .args([out.join("server"), out.join("caller")])
            .output()
            .expect("make is installed");
        assert!(made.status.success(), "the C programs do not build:\n{}", text(&made.stderr));
        out
    });
    out.join(name)
}

/// The setting that gives these bindings to a program.
pub fn bindings(name: &str, text: &str) -> String {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.conf", std::process::id()));
    fs::write(&file, text).expect("the folder of the tests can be written");
    format!("RPCRDMA_BINDINGS={}", file.display())
}

/// Fails at once if a program or the library is missing.
pub fn prepare() {
    program("caller");
    library();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A command that does not outlive the thread that starts it, with the library preloaded.
fn command(memory: &str, words: &[&str], program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    // A damaged call may ask a program for gigabytes: the limit refuses that before the machine runs out of memory.
    command.args(["--pdeathsig", "KILL", "prlimit", memory, "env"]);
    command.arg(format!("LD_PRELOAD={}", library().display()));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RPCRDMA_") {
            command.env_remove(name);
        }
    }
    command.args(words).arg(program);
    command
}

/// Ends a process that is still running after [`hang`] times `hangs`, unless the returned sender is dropped before that.
fn watchdog(pid: u32, hangs: u32) -> mpsc::Sender<()> {
    let (alive, end) = mpsc::channel::<()>();
    thread::spawn(move || {
        if end.recv_timeout(hang() * hangs) == Err(RecvTimeoutError::Timeout) {
            signal(pid, libc::SIGKILL);
        }
    });
    alive
}

#[allow(unsafe_code)]
fn signal(pid: u32, signal: i32) {
    // SAFETY: takes two numbers; the process is a child that was not waited for, so the number is still its own.
    unsafe { libc::kill(pid as i32, signal) };
}

// ------------------------------------------------------------------------------------------------------- server

/// A single-threaded server in svc_run, moved from tcp, and a good client of it, which stays to the end.
pub struct Server {
    child: Child,
    /// Read only for the first line. A call may be damaged into one that writes here, or waits for the standard
    /// input, which has ended.
    _stdout: BufReader<ChildStdout>,
    pub port: u16,
    /// The version in which its clients call: One, unless it speaks Version Two only.
    pub version: u32,
    pub good: Peer,
    log: PathBuf,
    normal: Vitals,
}

#[derive(Clone, Copy, Debug)]
struct Vitals {
    descriptors: usize,
    threads: usize,
    /// Resident memory in kB: now, and the maximum so far.
    resident: usize,
    peak: usize,
}

impl Server {
    /// Starts a server with these settings, as `NAME=value`.
    pub fn start(settings: &[&str]) -> Server {
        Server::start_on("tcp", settings)
    }

    /// The same on this netid: "tcp" is moved.
    pub fn start_on(netid: &str, settings: &[&str]) -> Server {
        Server::start_with(netid, &[], settings)
    }

    /// The same with further arguments.
    pub fn start_with(netid: &str, arguments: &[&str], settings: &[&str]) -> Server {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("server-{}-{}.log", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        // Without polling: a server that polls answers the good client several times in one round, see `settle`.
        let mut words = vec!["RPCRDMA_REDIRECT=tcp", "RPCRDMA_LOG=info", "RPCRDMA_POLL=0"];
        words.extend_from_slice(settings);
        let mut child = command("--as=536870912", &words, &program("server"))
            .args(["-n", netid, "-c", "tli", "-l", "run"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).expect("the log can be written"))
            .spawn()
            .expect("setpriv is installed");
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let alive = watchdog(child.id(), 1);
        stdout.read_line(&mut line).expect("the server says something");
        drop(alive);
        let port = line.split(' ').nth(1).and_then(|port| port.parse().ok());
        let port =
            port.unwrap_or_else(|| panic!("{line:?}: {}", fs::read_to_string(&log).unwrap_or_default()));
        let version = if settings.contains(&"RPCRDMA_VERSION=2") { 2 } else { 1 };
        let mut good = Peer::open(port);
        good.version = version;
        let normal = Vitals { descriptors: 0, threads: 0, resident: 0, peak: 0 };
        let mut server = Server { child, _stdout: stdout, port, version, good, log, normal };
        // Causes what is made once and stays to be made: the set that wakes the loop for a startup under way.
        let mut half = Peer::connect(port);
        half.push(&request()[..5]);
        // Accepted, looked at, taken over.
        for _ in 0..3 {
            server.settle();
        }
        let with_half = server.vitals();
        drop(half);
        server.settle();
        while server.vitals().descriptors >= with_half.descriptors {
            server.settle();
        }
        server.normal = server.vitals();
        server
    }

    /// A connection of another client.
    pub fn open(&self) -> Peer {
        let mut peer = Peer::open(self.port);
        peer.version = self.version;
        peer
    }

    /// When this returns, the server has seen and answered everything that was sent to it before, and the good client was
    /// served meanwhile.
    ///
    /// The first call may be answered in a round of the server's loop that began before. The second is answered in
    /// a later round, and the third after that round has ended.
    pub fn settle(&mut self) {
        for _ in 0..3 {
            self.good.null();
        }
    }

    /// What the server has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the log is readable")
    }

    /// The most memory that the server has had resident, in kB beyond what it had at its start.
    pub fn peak(&self) -> usize {
        self.vitals().peak.saturating_sub(self.normal.resident)
    }

    fn vitals(&self) -> Vitals {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let status = fs::read_to_string(proc.join("status")).expect("the server runs");
        let number = |key: &str| {
            let line = status.lines().find(|line| line.starts_with(key)).expect("a line of /proc/PID/status");
            line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
        };
        let descriptors = fs::read_dir(proc.join("fd")).expect("the server runs").count();
        let (resident, peak) = (number("VmRSS:"), number("VmHWM:"));
        Vitals { descriptors, threads: number("Threads:"), resident, peak }
    }

    /// To be called when all other clients are gone: the server must be as it was at its start, serve a new client, and end
    /// when told to.
    pub fn end(mut self) {
        let start = Instant::now();
        while self.vitals().descriptors > self.normal.descriptors {
            assert!(start.elapsed() < hang(), "descriptors leak: {:?}, {:?}", self.vitals(), self.normal);
            self.settle();
        }
        let now = self.vitals();
        assert_eq!(now.threads, 1);
        assert!(now.resident < self.normal.resident + KEPT, "memory leaks: {now:?}, {:?}", self.normal);
        self.open().null();
        signal(self.child.id(), libc::SIGTERM);
        let alive = watchdog(self.child.id(), 1);
        let status = self.child.wait().expect("a child");
        drop(alive);
        assert_eq!(status.signal(), Some(libc::SIGTERM), "{status}");
        let log = self.log();
        assert!(!log.contains("panic") && !log.contains("defect"), "{log}");
        fs::remove_file(&self.log).expect("our file");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(10).collect();
            eprintln!("server: {:?}; its log, latest line first: {tail:#?}", self.child.try_wait());
            let _ = fs::remove_file(&self.log);
        }
        // The end of a failed test; after `end` both are errors that do not matter.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// -------------------------------------------------------------------------------------------------------- caller

/// How a caller ended.
#[derive(Debug)]
pub struct Outcome {
    /// `enum clnt_stat` of the creation (negative) or of each call.
    pub statuses: Vec<i32>,
    /// The texts of clnt_sperror and clnt_spcreateerror, a line each.
    pub text: String,
    pub took: Duration,
}

/// Starts a caller of the server at `port` with these settings: see c-tests/caller.c. The first argument, the milliseconds
/// that a call may take, is extended by [`patient`], except when written as `=1000`, for use beside a time of the library's
/// own. `valgrind`: under valgrind.
pub fn start_caller(port: u16, settings: &[&str], arguments: &[&str], valgrind: bool) -> Caller {
    let mut words = settings.to_vec();
    if valgrind {
        words.extend(["valgrind", "-q", "--error-exitcode=99", "--leak-check=no"]);
    }
    let [milliseconds, steps @ ..] = arguments else { panic!("the time that a call may take, and steps") };
    let exactly = milliseconds.strip_prefix('=');
    let limit = Duration::from_millis(exactly.unwrap_or(milliseconds).parse().expect("milliseconds"));
    let limit = if exactly.is_some() { limit } else { patient(limit) };
    let child = command("--as=4294967296", &words, &program("caller"))
        .arg(port.to_string())
        .arg(limit.as_millis().to_string())
        .args(steps)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("setpriv is installed");
    Caller { child, start: Instant::now() }
}

pub struct Caller {
    child: Child,
    start: Instant,
}

impl Caller {
    /// Waits until it ends.
    pub fn end(self) -> Ended {
        let alive = watchdog(self.child.id(), 2);
        let output = self.child.wait_with_output().expect("a child");
        drop(alive);
        Ended { output, took: self.start.elapsed() }
    }
}

pub struct Ended {
    output: Output,
    took: Duration,
}

impl Ended {
    /// What the caller said, if it ended in an orderly way.
    pub fn outcome(self) -> Outcome {
        let Output { status, stdout, stderr } = self.output;
        let (stdout, stderr) = (text(&stdout), text(&stderr));
        assert!(status.success(), "{status}\n{stdout}{stderr}");
        // libtirpc itself prints a message when a length in a reply is more than it can allocate.
        let unexpected = stderr.lines().find(|line| !line.ends_with("out of memory"));
        assert_eq!(unexpected, None, "the library or valgrind speaks");
        let number =
            |line: &str| line.split(' ').next().and_then(|n| n.parse().ok()).expect("a status first");
        Outcome { statuses: stdout.lines().map(number).collect(), text: stdout, took: self.took }
    }
}

/// Whether valgrind is installed.
pub fn valgrind() -> bool {
    Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success())
}
