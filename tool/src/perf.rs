//! `rpcrdma perf`: compares calls over tcp, as stock libtirpc makes them, with the same calls over rdma, in one run.
//!
//! One server answers both on one port, as a moved one does (RPCRDMA_REDIRECT): a process of ours on this host, or
//! somebody's `rpcrdma perf --serve`. In each round each row is measured over both, one after the other, so that whatever
//! else happens on the machine affects both; the figures are the medians of the rounds.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{self, Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use clap::ValueHint;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::interrupt;
use crate::library;
use crate::numbers;
use crate::out::{self, complain};
use crate::picture::can_be_saved;
use crate::rpc::{self, Client, Netid, PROGRAM};
use crate::times::Times;
use crate::words;

mod draw;
mod figures;
mod measure;

use figures::{Figures, Latency, Measured, Row, Totals, Way};
use measure::{Call, Case, Sample, measure, median};

/// Compares calls over rdma with the same calls over tcp.
///
/// Measures null calls, and calls that write or read data of several sizes, by one thread and by several, each with a
/// connection of its own. tcp is stock libtirpc; rdma is the same program with netid rdma. Both are measured in one run, in
/// turn, and the table shows the medians of the rounds. Contents are checked: a call that brings anything else ends the run.
///
/// Without HOST a server is started on this host for the time of the run; the two then share memory, unless --device says
/// otherwise. Between two hosts, start `rpcrdma perf --serve` on one and `rpcrdma perf HOST` on the other. No rpcbind is
/// needed.
#[derive(clap::Args)]
#[command(after_long_help = HELP)]
pub struct Args {
    /// Where `rpcrdma perf --serve` runs.
    #[arg(conflicts_with_all = ["serve", "draw"], value_hint = ValueHint::Hostname)]
    host: Option<String>,
    /// Serves until it is stopped. Anyone who can reach the port may make calls; no call makes it take more memory than the
    /// largest of --sizes, and nothing that it is sent is kept.
    #[arg(long, conflicts_with = "draw")]
    serve: bool,
    /// With --serve: the address to serve at.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED), requires = "serve")]
    listen: IpAddr,
    /// TCP port of the server, which answers both tcp and rdma there; with --serve, 0 takes any free port and says which.
    #[arg(short, long, default_value_t = 20490)]
    port: u16,
    /// RPC program number of the benchmark.
    #[arg(long, value_name = "N", default_value_t = PROGRAM, value_parser = program)]
    program: u32,
    /// Bytes of data, with K or M; 0 for null calls.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,4K,64K,1M,16M", value_parser = size)]
    sizes: Vec<u32>,
    /// Numbers of threads that make calls at the same time.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Vec<u32>,
    /// Seconds for each row over each of tcp and rdma, all rounds together.
    #[arg(long, value_name = "N", default_value_t = 1.0, value_parser = seconds)]
    seconds: f64,
    /// Number of rounds, whose median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// What rdma goes over: adapters (verbs), memory shared within one host (local), software iWARP (iwarp), or whichever
    /// fits (auto). A server that somebody else has started has to allow it.
    #[arg(long, value_name = "DEVICE", value_parser = ["auto", "verbs", "local", "iwarp"])]
    device: Option<String>,
    /// Prints the figures as one JSON document.
    #[arg(long, conflicts_with = "serve")]
    json: bool,
    /// Draws the figures too.
    #[arg(long, value_name = "FILE", conflicts_with = "serve", value_hint = ValueHint::FilePath)]
    svg: Option<PathBuf>,
    /// Measures nothing, and uses the figures of a JSON document that --json has printed.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    draw: Option<PathBuf>,
    /// The server of another rpcrdma perf, which it ends with.
    #[arg(long, hide = true, requires = "serve")]
    child: bool,
}

const HELP: &str = "\
Ctrl-C ends the run: what was measured until then is shown. A second one ends it at once.

Exit status: 0 the figures are complete, or Ctrl-C has ended the run after at least one row; 1 a call has failed, or nothing \
could be measured; 2 the command line was wrong.

Examples:
  rpcrdma perf                                     within this host, through shared memory
  rpcrdma perf --device iwarp                      the same over software iWARP
  rpcrdma perf --serve                             on host filer ...
  rpcrdma perf filer --sizes 0,64K --threads 1,16  ... and from another one
  rpcrdma perf --json >run.json; rpcrdma perf --draw run.json --svg run.svg";

fn size(text: &str) -> Result<u32, String> {
    let (digits, shift) = match text.trim_end_matches(['K', 'k', 'M', 'm']) {
        digits if digits.len() + 1 < text.len() => (text, 0),
        digits if text.ends_with(['K', 'k']) => (digits, 10),
        digits if text.ends_with(['M', 'm']) => (digits, 20),
        digits => (digits, 0),
    };
    let bytes = digits.parse::<u32>().ok().and_then(|n| n.checked_mul(1 << shift));
    bytes.filter(|n| *n <= LARGEST).ok_or_else(|| "a number of bytes from 0 to 256M, such as 4K".into())
}

const LARGEST: u32 = 256 << 20;

fn program(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0x");
    let number = digits.map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok());
    let number = number.filter(|n| (0x2000_0000..0x4000_0000).contains(n));
    number.ok_or_else(|| "a number from 0x20000000 to 0x3fffffff, which nobody assigns".into())
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.001..=86_400.0).contains(s));
    seconds.ok_or_else(|| "a number of seconds from 0.001 to 86400".into())
}

pub fn run(args: &Args) -> ExitCode {
    library::forget_name();
    // Now, and not only after a long run.
    let writable = args.svg.as_deref().map_or(Ok(()), |file| {
        can_be_saved(file).map_err(|error| format!("{}: {}", file.display(), words::reason(&error)))
    });
    let outcome = if let Err(text) = writable {
        Err(text)
    } else if let Some(file) = &args.draw {
        draw_again(args, file)
    } else if args.serve {
        serve(args)
    } else {
        benchmark(args)
    };
    match outcome {
        Ok(status) => status,
        Err(text) => {
            complain!("rpcrdma perf: {}", words::shown(&text));
            ExitCode::FAILURE
        }
    }
}

fn draw_again(args: &Args, file: &PathBuf) -> Result<ExitCode, String> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("{}: {}", file.display(), words::reason(&error)))?;
    let figures: Figures = serde_json::from_str(&text)
        .map_err(|error| format!("{}: not the figures of a benchmark: {error}", file.display()))?;
    show(args, &figures)?;
    Ok(ExitCode::SUCCESS)
}

fn show(args: &Args, figures: &Figures) -> Result<(), String> {
    // No more calls are made.
    out::restore_sigpipe();
    let mut out = out::stdout();
    let written = if args.json {
        out::json(figures, true)
    } else if args.draw.is_some() && args.svg.is_some() {
        Ok(())
    } else {
        // A document that was read may have anything in it.
        figures.table().lines().try_for_each(|line| writeln!(out, "{}", words::shown(line)))
    };
    written.map_err(|error| error.to_string())?;
    match &args.svg {
        Some(file) => draw::draw(figures)
            .save(file)
            .map_err(|error| format!("{}: {}", file.display(), words::reason(&error))),
        None => Ok(()),
    }
}

// ---- Server -------------------------------------------------------------------------------------------------------

fn serve(args: &Args) -> Result<ExitCode, String> {
    let largest = args.sizes.iter().copied().max().unwrap_or(0);
    if args.child {
        let end = rustix::process::Signal::TERM;
        rustix::process::set_parent_process_death_signal(Some(end)).map_err(|error| error.to_string())?;
    }
    if let Some(device) = &args.device {
        rpc::set_variable("RPCRDMA_PROVIDER", device);
    }
    // One port for both, so that a firewall needs one rule only. Whoever starts the server knows whether this network is to
    // be trusted.
    rpc::set_variable("RPCRDMA_REDIRECT", "tcp");
    rpc::set_variable("RPCRDMA_REDIRECT_PROGRAMS", "all");
    rpc::set_variable("RPCRDMA_REDIRECT_ADAPTERS", "yes");
    // A call has a header besides its data. Several may wait for their turn, but never many of the longest.
    let call = (u64::from(largest) + 4096).next_multiple_of(1024);
    rpc::set_variable("RPCRDMA_MAX_CALL", &call.to_string());
    rpc::set_variable("RPCRDMA_MAX_PULLED", &(4 * call).clamp(1 << 20, 1 << 30).to_string());
    let at = SocketAddr::new(args.listen, args.port);
    let listener =
        TcpListener::bind(at).map_err(|error| format!("cannot listen at {at}: {}", words::reason(&error)))?;
    let at = listener.local_addr().map_err(|error| error.to_string())?;
    let mut out = out::stdout();
    let told = if args.child {
        writeln!(out, "READY {}", at.port())
    } else {
        writeln!(
            out,
            "serving at {at}: program {}, calls of up to {} bytes; Ctrl-C ends it",
            args.program,
            numbers::grouped(largest.into())
        )
    };
    told.and_then(|()| out.flush()).map_err(|error| error.to_string())?;
    drop(out);
    rpc::serve(listener, args.program, largest)?;
    Err("the service loop has ended".into())
}

/// A server of our own, which ends with us.
struct Own(Child);

impl Own {
    fn start(args: &Args) -> Result<(Own, u16), String> {
        let sizes = args.sizes.iter().copied().max().unwrap_or(0);
        let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
        let mut command = Command::new(program);
        command
            .args(["perf", "--serve", "--child", "--listen", "127.0.0.1", "--port", "0"])
            .args(["--program", &args.program.to_string(), "--sizes", &sizes.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C is for us.
            .process_group(0);
        if let Some(device) = &args.device {
            command.args(["--device", device]);
        }
        let mut own = Own(command.spawn().map_err(|error| format!("no server: {error}"))?);
        let mut line = String::new();
        if let Some(out) = own.0.stdout.take() {
            BufReader::new(out).read_line(&mut line).map_err(|error| format!("no server: {error}"))?;
        }
        let port = line.trim().strip_prefix("READY ").and_then(|port| port.parse().ok());
        Ok((own, port.ok_or("the server has not started")?))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// ---- Client -------------------------------------------------------------------------------------------------------

fn benchmark(args: &Args) -> Result<ExitCode, String> {
    if let Some(device) = &args.device {
        rpc::set_variable("RPCRDMA_PROVIDER", device);
    }
    // Otherwise what should be stock could be moved. Only servers are moved from udp; an empty list would leave the choice
    // to the file.
    rpc::set_variable("RPCRDMA_REDIRECT", "udp");
    let largest = args.sizes.iter().copied().max().unwrap_or(0);
    if u64::from(largest) + 8 > DEFAULT_MAX_REPLY && std::env::var_os("RPCRDMA_MAX_REPLY").is_none() {
        rpc::set_variable("RPCRDMA_MAX_REPLY", &(largest + 4096).to_string());
    }
    let (_own, addresses) = match &args.host {
        None => {
            let (own, port) = Own::start(args)?;
            (Some(own), vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)])
        }
        Some(host) => {
            let found = (host.as_str(), args.port).to_socket_addrs();
            (None, found.map_err(|error| format!("{host}: {}", words::reason(&error)))?.collect())
        }
    };
    // After the server is started, since the signals would not reach it either.
    let stop = Stop::on_signals()?;
    let (address, control) = reach(&addresses, args)?;
    let status = control.status()?;
    if status.largest < largest {
        return Err(format!(
            "the server takes calls of up to {} bytes: start it with --sizes {largest}, or give smaller ones here",
            status.largest
        ));
    }
    let most = args.threads.iter().copied().max().unwrap_or(1);
    let connect = |over| -> Result<Vec<Client>, String> {
        (0..most).map(|_| Client::connect(over, address, args.program)).collect()
    };
    let tcp = connect(Netid::Tcp)?;
    let rdma = connect(Netid::Rdma)?;
    let device = rdma.iter().find_map(Client::device).unwrap_or_default();
    let mut run = Run {
        ways: [("tcp", tcp), ("rdma", rdma)],
        control,
        pattern: rpc::pattern(largest as usize),
        cases: cases(args),
        samples: BTreeMap::new(),
    };
    let counters = (rpc::own_counters(), status.counters);
    stop.measures(&run);
    let outcome = run.all(args, &stop.asked);
    let interrupted = stop.asked.load(Relaxed);
    let mut figures = run.figures(args, &device, interrupted);
    figures.totals = run.totals(counters);
    if figures.rows.is_empty() {
        outcome?;
        return Err("ended before anything was measured".into());
    }
    show(args, &figures)?;
    outcome?;
    Ok(ExitCode::SUCCESS)
}

/// What a signal does. While nothing is measured yet it ends the process. After that it ends the measurement, whose figures
/// are shown. A silent server is not waited for.
#[derive(Clone)]
struct Stop {
    asked: Arc<AtomicBool>,
    /// The sockets that calls wait on, once there are some.
    measuring: Arc<OnceLock<Vec<RawFd>>>,
}

impl Stop {
    fn on_signals() -> Result<Stop, String> {
        let stop = Stop { asked: Arc::default(), measuring: Arc::default() };
        let at_signal = stop.clone();
        interrupt::on(move |status| {
            let Some(sockets) = at_signal.measuring.get() else { process::exit(status) };
            at_signal.asked.store(true, Relaxed);
            thread::sleep(GRACE);
            sockets.iter().for_each(|socket| rpc::hang_up(*socket));
        })
        .map_err(|error| format!("signals: {error}"))?;
        Ok(stop)
    }

    fn measures(&self, run: &Run) {
        let clients = run.ways.iter().flat_map(|(_, clients)| clients).chain([&run.control]);
        let _ = self.measuring.set(clients.filter_map(Client::socket).collect());
    }
}

/// How long calls that are under way may take when the run is to end.
const GRACE: Duration = Duration::from_millis(500);

/// RPCRDMA_MAX_REPLY, where nobody has set it.
const DEFAULT_MAX_REPLY: u64 = 16 << 20;

/// The address that answers, and a connection over tcp, which is not measured.
fn reach(addresses: &[SocketAddr], args: &Args) -> Result<(SocketAddr, Client), String> {
    let mut why = "no address".to_owned();
    for address in addresses {
        match Client::connect(Netid::Tcp, *address, args.program) {
            Ok(client) => return Ok((*address, client)),
            Err(error) => why = format!("{address}: {error}"),
        }
    }
    let hint = if args.host.is_some() { "; is `rpcrdma perf --serve` running there?" } else { "" };
    Err(format!("{why}{hint}"))
}

fn cases(args: &Args) -> Vec<Case> {
    let mut cases = Vec::new();
    for &bytes in &args.sizes {
        let calls: &[Call] = if bytes == 0 { &[Call::Null] } else { &[Call::Write, Call::Read] };
        for &call in calls {
            for &threads in &args.threads {
                let case = Case { call, bytes, threads };
                if !cases.contains(&case) {
                    cases.push(case);
                }
            }
        }
    }
    cases
}

struct Run {
    ways: [(&'static str, Vec<Client>); 2],
    control: Client,
    pattern: Box<[u8]>,
    cases: Vec<Case>,
    /// Samples by case and way.
    samples: BTreeMap<(usize, usize), Vec<Sample>>,
}

impl Run {
    fn all(&mut self, args: &Args, stopped: &AtomicBool) -> Result<(), String> {
        let time = Duration::from_secs_f64(args.seconds / f64::from(args.rounds));
        let steps = u64::from(args.rounds) * (2 * self.cases.len()) as u64;
        let bar = progress(steps);
        for round in 0..args.rounds as usize {
            for (at, &case) in self.cases.iter().enumerate() {
                // Whichever is measured second finds the caches in another state.
                for turn in 0..2 {
                    let way = (turn + round + at) % 2;
                    let (name, clients) = &self.ways[way];
                    bar.set_message(format!(
                        "{} {} over {name}, threads: {}",
                        case.call.name(),
                        numbers::bytes(case.bytes.into()),
                        case.threads
                    ));
                    let found = measure(clients, &self.control, case, &self.pattern, time, stopped);
                    let found = found.map_err(|error| {
                        format!("{} of {} bytes over {name}: {error}", case.call.name(), case.bytes)
                    });
                    // A call that has failed since the stop is one that was not to be waited for.
                    let found = if stopped.load(Relaxed) { Ok(None) } else { found };
                    match found {
                        Ok(Some(sample)) => self.samples.entry((at, way)).or_default().push(sample),
                        Ok(None) => {
                            bar.finish_and_clear();
                            return Ok(());
                        }
                        Err(error) => {
                            bar.finish_and_clear();
                            return Err(error);
                        }
                    }
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    fn figures(&self, args: &Args, device: &str, interrupted: bool) -> Figures {
        let host = args.host.as_deref().unwrap_or("this host");
        let what = [
            "stock libtirpc".to_owned(),
            if device.is_empty() { "librpcrdma".into() } else { format!("librpcrdma, {device}") },
        ];
        let rows = self.cases.iter().enumerate().filter_map(|(at, case)| {
            let mut row = Row {
                call: case.call.name().into(),
                bytes: case.bytes.into(),
                threads: case.threads,
                ways: BTreeMap::new(),
            };
            for (way, (name, _)) in self.ways.iter().enumerate() {
                let samples = self.samples.get(&(at, way))?;
                row.ways.insert((*name).into(), measured(samples, case.bytes)?);
            }
            Some(row)
        });
        let rounds =
            if args.rounds == 1 { "one round".into() } else { format!("medians of {} rounds", args.rounds) };
        Figures {
            title: format!("RPC over tcp and over rdma, to {host}"),
            notes: vec![format!(
                "{rounds}, {} s for each row and way; rpcrdma {}",
                args.seconds,
                rpcrdma::tool::VERSION
            )],
            ways: self
                .ways
                .iter()
                .zip(what)
                .map(|((name, _), what)| Way { name: (*name).into(), what })
                .collect(),
            rows: rows.collect(),
            interrupted,
            totals: None,
        }
    }

    /// What the counters of both ends have grown by. `None`: the server does not say, or a sample is missing.
    fn totals(&self, (client, server): (Vec<u64>, Vec<u64>)) -> Option<Totals> {
        let grown = |before: &[u64], after: &[u64]| -> BTreeMap<String, u64> {
            let names = rpcrdma::tool::COUNTERS.iter().map(|name| (*name).to_owned());
            names.zip(before.iter().zip(after).map(|(before, after)| after.saturating_sub(*before))).collect()
        };
        let calls = self.samples.iter().filter(|((_, way), _)| *way == 1).flat_map(|(_, samples)| samples);
        Some(Totals {
            calls: calls.map(|sample| sample.made).sum(),
            client: grown(&client, &rpc::own_counters()),
            server: grown(&server, &self.control.status().ok()?.counters),
        })
    }
}

fn measured(samples: &[Sample], bytes: u32) -> Option<Measured> {
    let rate = |sample: &Sample| sample.times.calls() as f64 / sample.took.as_secs_f64();
    let calls_per_second = median(samples.iter().map(rate))?;
    let quantile = |part| median(samples.iter().filter_map(|sample| sample.times.quantile(part)));
    let mut all = Times::default();
    samples.iter().for_each(|sample| all.merge(&sample.times));
    Some(Measured {
        rounds: samples.len() as u32,
        calls: all.calls(),
        calls_per_second,
        megabytes_per_second: calls_per_second * f64::from(bytes) / 1e6,
        latency_us: Latency {
            p10: quantile(0.1),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
        },
        cpu_us: median(samples.iter().map(|sample| sample.cpu as f64 / 1e3 / sample.made as f64))?,
    })
}

fn progress(steps: u64) -> ProgressBar {
    let target =
        if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    match ProgressStyle::with_template("[{bar:30}] {pos}/{len} {eta} left: {msg}") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_a_bound() {
        assert_eq!(
            ["0", "1", "4K", "4k", "16M", "256M"].map(size),
            [0, 1, 4096, 4096, 16 << 20, 256 << 20].map(Ok)
        );
        for wrong in ["", "K", "4KK", "4KM", "-1", "257M", "5000M", "4G", "x"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(
            seconds("0.5").is_ok()
                && seconds("0").is_err()
                && seconds("NaN").is_err()
                && seconds("1e9").is_err()
        );
    }

    #[test]
    fn a_measurement_is_the_median_of_its_rounds() {
        let sample = |calls: u64, us: u64| {
            let mut times = Times::default();
            (0..calls).for_each(|_| times.add(Duration::from_micros(us)));
            Sample { times, took: Duration::from_secs(1), cpu: calls * 5_000, made: calls }
        };
        let found = measured(&[sample(100, 10), sample(900, 30), sample(300, 20)], 1_000_000).unwrap();
        assert_eq!((found.rounds, found.calls, found.calls_per_second), (3, 1300, 300.0));
        assert_eq!((found.megabytes_per_second, found.cpu_us), (300.0, 5.0));
        let middle = found.latency_us.p50.unwrap();
        assert!((19.0..21.0).contains(&middle), "{middle}");
        assert!(measured(&[], 0).is_none());
    }
}
