//! `rpcrdma run`: `rpcrdma-run` under the name of a subcommand. What it checks, and how it reports errors, is in that
//! program.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::ValueHint;

use crate::library;
use crate::out::complain;

#[derive(clap::Args)]
#[command(
    after_help = "Exit status: that of PROGRAM; 125 if it was not run, by a wrong setting or for want of the library; \
                        126 if PROGRAM cannot be run, or not with the library; 127 if it is not found; 2 for a wrong \
                        option. rpcrdma-run(1) describes what is looked at."
)]
pub struct Args {
    /// Moves programs that ask for these transports: tcp, udp, tcp6, udp6, separated by commas. The same as
    /// RPCRDMA_REDIRECT.
    #[arg(long = "move", value_name = "LIST")]
    moved: Option<OsString>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM", value_hint = ValueHint::CommandWithArguments)]
    program: Vec<OsString>,
}

/// The same as for `rpcrdma-run`.
const FAILED: u8 = 125;

pub fn run(args: &Args) -> ExitCode {
    let runner = match library::runner() {
        Ok(runner) => runner,
        Err(error) => {
            complain!("rpcrdma run: {error}");
            return ExitCode::from(FAILED);
        }
    };
    let mut command = Command::new(&runner);
    if let Some(list) = &args.moved {
        command.env("RPCRDMA_REDIRECT", list);
    }
    // Returns only if it fails.
    let error = command.arg("--").args(&args.program).exec();
    complain!("rpcrdma run: {}: {error}", runner.display());
    ExitCode::from(FAILED)
}
