//! Standard output: what cannot be written is an error, even if standard output was never opened.
#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::Serialize;

use crate::words;

/// Like `println!`, which would panic when nothing more can be written, for example on a full disk.
macro_rules! say {
    ($($what:tt)*) => { $crate::out::line(format_args!($($what)*)) };
}
pub(crate) use say;

/// Like `eprintln!`, which would panic when nothing more can be written: the exit status tells all the same.
macro_rules! complain {
    ($($what:tt)*) => { $crate::out::complaint(format_args!($($what)*)) };
}
pub(crate) use complain;

pub fn complaint(text: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Standard output, named in its errors. It replaces the standard library's, which uses /dev/null for one that is closed.
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
    io::Error::new(error.kind(), format!("standard output: {}", words::reason(&error)))
}

/// Writes a document, on several lines or on one.
///
/// # Errors
/// Those of standard output.
pub fn json(document: &impl Serialize, on_lines: bool) -> io::Result<()> {
    let mut out = Plain(BufWriter::new(stdout()));
    let written = match on_lines {
        true => serde_json::to_writer_pretty(&mut out, document),
        false => serde_json::to_writer(&mut out, document),
    };
    written?;
    writeln!(out)?;
    out.flush()
}

/// JSON in which everything that a terminal would obey is escaped: the format itself requires that of the first 32
/// characters only.
struct Plain<W>(W);

impl<W: Write> Write for Plain<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Each write is a whole string, or digits and brackets, or newlines between them.
        match std::str::from_utf8(bytes) {
            Ok(text) if bytes.iter().any(|byte| *byte >= 0x7f) => {
                for c in text.chars() {
                    match c {
                        '\n' => self.0.write_all(b"\n")?,
                        _ if words::is_harmful(c) => {
                            for unit in c.encode_utf16(&mut [0; 2]) {
                                write!(self.0, "\\u{unit:04x}")?;
                            }
                        }
                        _ => self.0.write_all(c.encode_utf8(&mut [0; 4]).as_bytes())?,
                    }
                }
            }
            _ => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Writes a line. If that fails this program ends: like any other one if its reader has gone, else with a message.
pub fn line(text: fmt::Arguments) {
    if let Err(error) = writeln!(stdout(), "{text}") {
        failed(&error);
    }
}

/// Prints what clap says: help and the version on standard output, what is wrong with the arguments on standard error.
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

/// The same, but if that fails it ends this program as [`line`] does.
pub fn document(document: &impl Serialize) {
    if let Err(error) = json(document, true) {
        failed(&error);
    }
}

fn failed(error: &io::Error) -> ! {
    if error.kind() == io::ErrorKind::BrokenPipe {
        restore_sigpipe();
        // SAFETY: no preconditions.
        unsafe { libc::raise(libc::SIGPIPE) };
    }
    complain!("rpcrdma: {error}");
    process::exit(1)
}

/// Restores SIGPIPE, which Rust ignores: a reader that has gone ends this program like any other one.
///
/// Not to be used while libtirpc writes to sockets: a peer that has gone would end this program too.
pub fn restore_sigpipe() {
    // SAFETY: the default action is not a function of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Standard output was closed when this program was started.
static CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn look() {
    // SAFETY: asks for the flags of a descriptor, which need not exist.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Relaxed);
}

// Before the standard library opens /dev/null in its place.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_moves_no_cursor_and_says_the_same() {
        let text = "a\u{9b}31m \u{202e}\u{7f}\u{1b}[2J\n\u{10ffff} \u{fc}\"\\";
        let mut written = Vec::new();
        serde_json::to_writer_pretty(Plain(&mut written), &[text]).unwrap();
        let written = String::from_utf8(written).unwrap();
        assert!(written.chars().all(|c| c == '\n' || !words::is_harmful(c)), "{written:?}");
        assert!(
            written.contains("\\u009b31m \\u202e\\u007f") && written.contains("\\udbff\\udfff \u{fc}"),
            "{written}"
        );
        assert_eq!(serde_json::from_str::<[String; 1]>(&written).unwrap(), [text]);
    }
}
