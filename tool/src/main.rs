//! `rpcrdma`: one command for those who install, watch and measure RPC over RDMA.
//!
//! Each subcommand is a file of its own with its arguments, `Args`, and `run`, which gives the exit status. Output for
//! people goes to stdout, errors to stderr as `rpcrdma COMMAND: text`; `--json` prints one JSON document in place of the
//! output for people. Exit status: 0 all is well, 1 something is not as it should be, 2 the command line was wrong.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod check;
mod columns;
mod decode;
mod devices;
mod generate;
mod info;
mod interrupt;
mod library;
mod numbers;
mod out;
mod perf;
mod picture;
mod ping;
mod programs;
mod rpc;
mod run;
mod stat;
mod times;
mod top;
mod watch;
mod words;

/// RPC over RDMA for programs of libtirpc: asks, watches, measures.
#[derive(Parser)]
#[command(name = "rpcrdma", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a program with the library in front of libtirpc.
    Run(run::Args),
    /// Says whether RPC over RDMA will work here, and how.
    Info(info::Args),
    /// Says what is wrong with the settings and bindings.
    Check(check::Args),
    /// Asks a host which transports it answers on, again and again.
    Ping(ping::Args),
    Perf(perf::Args),
    Stat(stat::Args),
    Top(top::Args),
    Decode(decode::Args),
    /// Writes manual pages and completions to a folder.
    #[command(hide = true)]
    Generate(generate::Args),
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(said) => return out::of_clap(&said),
    };
    if !matches!(command, Command::Ping(_) | Command::Perf(_)) {
        out::restore_sigpipe();
    }
    match command {
        Command::Run(args) => run::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Ping(args) => ping::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Decode(args) => decode::run(&args),
        Command::Generate(args) => generate::run(&args),
    }
}
