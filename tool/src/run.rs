//! `rpcrdma run`: what `rpcrdma-run` is the short form of. That program, which lies beside this one, does it.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

#[derive(clap::Args)]
#[command(
    trailing_var_arg = true,
    after_help = "Exit status: PROGRAM's; 125 if this command fails, 126 if PROGRAM cannot be run so, 127 if it is not \
                  found. rpcrdma-run(1) says more."
)]
pub struct Args {
    /// Move programs that ask for these transports: tcp, udp, tcp6, udp6, with commas between (RPCRDMA_REDIRECT).
    #[arg(long = "move", value_name = "TRANSPORTS")]
    moved: Option<String>,
    /// What is run, and its arguments.
    #[arg(required = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub fn run(args: &Args) -> ExitCode {
    let beside = env::current_exe().ok().and_then(|path| Some(path.parent()?.join("rpcrdma-run")));
    let file = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("rpcrdma-run"));
    let mut command = Command::new(&file);
    if let Some(moved) = &args.moved {
        command.env("RPCRDMA_REDIRECT", moved);
    }
    let error = command.arg("--").args(&args.program).exec();
    eprintln!("rpcrdma run: {}, which does it: {error}", file.display());
    ExitCode::from(125)
}
