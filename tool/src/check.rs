//! `rpcrdma check`.

use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: &Args) -> ExitCode {
    eprintln!("rpcrdma check: not built yet");
    ExitCode::FAILURE
}
