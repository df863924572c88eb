//! `rpcrdma check`: says what is wrong with settings and bindings, in the library's own words.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueHint;
use rpcrdma::config::{self, Holds};

use crate::library;
use crate::out::say;
use crate::words::shown;

#[derive(clap::Args)]
#[command(
    after_help = "Each thing that is wrong is a line on standard output: FILE:LINE:COLUMN: what, and what is allowed; or \
                        the environment variable in place of the file. A file whose first line that is no comment begins \
                        with a number holds bindings, rpcrdma-bindings(5); any other one settings, rpcrdma.conf(5).\n\n\
                        Exit status: 0 all is understood, 1 something is not, or a file cannot be read, 2 the command line \
                        was wrong."
)]
pub struct Args {
    /// Files to check, instead of /etc/rpcrdma.conf, /etc/rpcrdma.d/*.conf and the environment.
    #[arg(value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,
    /// Prints nothing about what is right.
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> ExitCode {
    let mut right = true;
    let mut say = |line: String, is_right: bool| {
        right &= is_right;
        if !is_right || !args.quiet {
            // File names may contain anything.
            say!("{}", shown(&line));
        }
    };
    if args.files.is_empty() {
        let report = config::report(library::environment());
        report.errors.iter().for_each(|error| say(error.to_string(), false));
        if report.errors.is_empty() {
            let (file, there) = report.file;
            let set = report.settings.iter().filter(|one| one.source != config::Source::Default).count();
            let file = if there { file.display().to_string() } else { format!("no {}", file.display()) };
            let files = report.bindings.len();
            say(
                format!(
                    "all is understood: {file}, settings that are set: {set}, files with bindings: {files}"
                ),
                true,
            );
        }
    }
    for path in &args.files {
        match config::check_file(path) {
            Ok((holds, errors)) => {
                errors.iter().for_each(|error| say(error.to_string(), false));
                if errors.is_empty() {
                    let what = match holds {
                        Holds::Settings => "settings",
                        Holds::Bindings => "bindings",
                    };
                    say(format!("{}: all is understood ({what})", path.display()), true);
                }
            }
            Err(error) => say(error.to_string(), false),
        }
    }
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
