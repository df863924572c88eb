//! `rpcrdma run`.

use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: &Args) -> ExitCode {
    eprintln!("rpcrdma run: not built yet");
    ExitCode::FAILURE
}
