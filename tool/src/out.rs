//! Standard output: what cannot be written is an error, also where nobody has opened it.
#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, IsTerminal, StdoutLock, Write};
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// As `println!`, which would panic where nothing can be written any more, on a full disk say.
macro_rules! say {
    ($($what:tt)*) => { $crate::out::line(format_args!($($what)*)) };
}
pub(crate) use say;

/// Standard output, which errors name. In place of the standard library's, which takes /dev/null for one that is closed.
pub struct Out(StdoutLock<'static>);

pub fn stdout() -> Out {
    Out(io::stdout().lock())
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match CLOSED.load(Relaxed) {
            true => Err(named(io::Error::from_raw_os_error(libc::EBADF))),
            false => self.0.write(bytes).map_err(named),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(named)
    }
}

fn named(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("standard output: {error}"))
}

/// Writes a line. Where that fails this program ends: as any other one whose reader has gone, or with a word.
pub fn line(text: fmt::Arguments) {
    if let Err(error) = writeln!(stdout(), "{text}") {
        failed(&error);
    }
}

/// What clap says: help and the version on standard output, what is wrong with the arguments on standard error.
pub fn of_clap(said: &clap::Error) -> ExitCode {
    if said.use_stderr() {
        let _ = said.print();
        return ExitCode::from(2);
    }
    restore_sigpipe();
    let mut out = stdout();
    let set = |name: &str| std::env::var(name).unwrap_or_default();
    let styled =
        io::stdout().is_terminal() && set("NO_COLOR").is_empty() && !matches!(&*set("TERM"), "" | "dumb");
    let text = if styled { said.render().ansi().to_string() } else { said.render().to_string() };
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        failed(&error);
    }
    ExitCode::SUCCESS
}

fn failed(error: &io::Error) -> ! {
    if error.kind() == io::ErrorKind::BrokenPipe {
        restore_sigpipe();
        // SAFETY: no preconditions.
        unsafe { libc::raise(libc::SIGPIPE) };
    }
    eprintln!("rpcrdma: {error}");
    process::exit(1)
}

/// SIGPIPE, which Rust ignores: a reader that has gone ends this program as any other one.
///
/// Not where libtirpc writes to sockets: a peer that has gone would end it too.
pub fn restore_sigpipe() {
    // SAFETY: the default action is no function of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Standard output was closed when this program was started.
static CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn look() {
    // SAFETY: asks for the flags of a descriptor, which need not be there.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Relaxed);
}

// Before the standard library opens /dev/null in its place.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;
