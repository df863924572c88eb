//! Lines on standard output, for subcommands that write as they go.
#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, Write};
use std::process;

/// As `println!`, which would panic where nothing can be written any more, on a full disk say.
macro_rules! say {
    ($($what:tt)*) => { $crate::out::line(format_args!($($what)*)) };
}
pub(crate) use say;

/// Writes a line. Where that fails this program ends: as any other one whose reader has gone, or with a word.
pub fn line(text: fmt::Arguments) {
    let Err(error) = writeln!(io::stdout().lock(), "{text}") else { return };
    if error.kind() == io::ErrorKind::BrokenPipe {
        restore_sigpipe();
        // SAFETY: no preconditions.
        unsafe { libc::raise(libc::SIGPIPE) };
    }
    eprintln!("rpcrdma: standard output: {error}");
    process::exit(1)
}

/// SIGPIPE, which Rust ignores: a reader that has gone ends this program as any other one.
///
/// Not where libtirpc writes to sockets: a peer that has gone would end it too.
pub fn restore_sigpipe() {
    // SAFETY: the default action is no function of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
