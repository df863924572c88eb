//! `rpcrdma info`.

use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: &Args) -> ExitCode {
    eprintln!("rpcrdma info: not built yet");
    ExitCode::FAILURE
}
