//! `rpcrdma top`.

use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: &Args) -> ExitCode {
    eprintln!("rpcrdma top: not built yet");
    ExitCode::FAILURE
}
