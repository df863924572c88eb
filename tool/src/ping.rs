//! `rpcrdma ping`: what a host speaks, and how long a call takes there.
//!
//! The calls are NULLPROC's of a program that the host serves, made through libtirpc like any program's.

use std::io::Read;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rpcrdma::tool::host::{Row, registered};
use serde::Serialize;
use signal_hook::consts::SIGINT;

use crate::programs::Programs;
use crate::rpc::{Client, Netid};

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  rpcrdma ping filer\n  rpcrdma ping -c 5 filer nfs 3\n  \
                        rpcrdma ping -p 20049 filer 100003 3    (asks no rpcbind)\n\n\
                        Exit status: 0 if a reply has come, 1 if none has, 2 for a wrong command line.")]
pub struct Args {
    /// Who is asked.
    host: String,
    /// A program, by its name in /etc/rpc or its number. Without it: one that the host's rpcbind lists.
    program: Option<String>,
    /// Its version. Without it: the highest one that rpcbind lists.
    version: Option<u32>,
    /// Calls that are made; until Ctrl-C without it.
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Seconds from one call to the next.
    #[arg(short, long, default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Seconds that a reply is waited for.
    #[arg(short = 'W', long, default_value = "5", value_parser = seconds)]
    timeout: Duration,
    /// The port of the program. rpcbind is not asked then.
    #[arg(short, long, requires = "program")]
    port: Option<u16>,
    /// What the calls go over.
    #[arg(long, value_enum, default_value = "rdma")]
    netid: Over,
    /// Prints one JSON document at the end.
    #[arg(long)]
    json: bool,
}

/// The transport; of addresses of version 6, that of IPv6.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Over {
    Rdma,
    Tcp,
}

fn seconds(word: &str) -> Result<Duration, String> {
    let wrong = || "must be seconds, from 0 to 3600, such as 0.2".to_owned();
    let seconds = word.parse().ok().filter(|seconds| (0.0..=3600.0).contains(seconds)).ok_or_else(wrong)?;
    Ok(Duration::from_secs_f64(seconds))
}

/// What is said at the end.
#[derive(Serialize)]
struct Summary {
    host: String,
    address: SocketAddr,
    program: u32,
    version: u32,
    netid: &'static str,
    /// What the connection runs on, if it is RDMA.
    device: Option<String>,
    rpc_over_rdma: Option<u32>,
    credits: Option<u32>,
    /// Whether the program answers over tcp too; not known where rpcbind was not asked.
    tcp: Option<SocketAddr>,
    sent: u64,
    received: u64,
    /// Round-trip times, in microseconds, in the order of the calls.
    rtt_us: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<Times>,
    errors: Vec<String>,
}

/// Of round-trip times, in microseconds.
#[derive(Serialize)]
struct Times {
    min: f64,
    avg: f64,
    max: f64,
    mdev: f64,
    p50: f64,
}

impl Times {
    fn of(rtt: &[f64]) -> Option<Times> {
        let mut sorted = rtt.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let avg = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let square = sorted.iter().map(|time| (time - avg).powi(2)).sum::<f64>() / sorted.len() as f64;
        Some(Times { min, avg, max, mdev: square.sqrt(), p50: sorted[(sorted.len() - 1) / 2] })
    }
}

pub fn run(args: &Args) -> ExitCode {
    match ping(args) {
        Ok(received) if received > 0 => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("rpcrdma ping: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Where a program is.
struct Target {
    address: SocketAddr,
    program: u32,
    version: u32,
    tcp: Option<SocketAddr>,
}

fn ping(args: &Args) -> Result<u64, String> {
    let programs = Programs::read();
    let program = match &args.program {
        Some(word) => Some(programs.number(word).ok_or_else(|| format!("{word}: no program of that name in /etc/rpc"))?),
        None => None,
    };
    let target = find(args, program, &programs)?;
    let mut stop = interrupted().map_err(|error| format!("Ctrl-C cannot be waited for: {error}"))?;
    let over = if args.netid == Over::Rdma { Netid::Rdma } else { Netid::Tcp };
    let client = Client::of(over, target.address, target.program, target.version)?;
    let peer = client.peer();
    let mut summary = Summary {
        host: args.host.clone(),
        address: target.address,
        program: target.program,
        version: target.version,
        netid: if args.netid == Over::Rdma { "rdma" } else { "tcp" },
        device: client.device(),
        rpc_over_rdma: peer.map(|peer| peer.version),
        credits: client.credits(),
        tcp: target.tcp,
        sent: 0,
        received: 0,
        rtt_us: Vec::new(),
        times: None,
        errors: Vec::new(),
    };
    if !args.json {
        begin(&summary, &programs);
    }
    let mut next = Instant::now();
    while args.count.is_none_or(|count| summary.sent < count) && !wait_until(&mut stop, next) {
        next = Instant::now() + args.interval;
        summary.sent += 1;
        let start = Instant::now();
        match client.null_within(args.timeout) {
            Ok(()) => {
                let micros = start.elapsed().as_secs_f64() * 1e6;
                summary.received += 1;
                summary.rtt_us.push(micros);
                if !args.json {
                    println!("reply from {}: seq={} time={:.3} ms", summary.address, summary.sent, micros / 1e3);
                }
            }
            Err(text) => {
                if !args.json {
                    println!("no reply: seq={} {text}", summary.sent);
                }
                summary.errors.push(text);
            }
        }
    }
    summary.times = Times::of(&summary.rtt_us);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&summary).map_err(|error| error.to_string())?);
    } else {
        end(&summary);
    }
    Ok(summary.received)
}

fn begin(summary: &Summary, programs: &Programs) {
    let Summary { host, address, version, netid, .. } = summary;
    println!("PING {host}: program {} version {version}, over {netid}", programs.program(summary.program));
    if let Some(device) = &summary.device {
        let credits = summary.credits.map_or(String::new(), |credits| format!(", {credits} credits"));
        let spoken = summary.rpc_over_rdma.map_or(String::new(), |spoken| format!(", RPC-over-RDMA version {spoken}"));
        println!("  rdma at {address}: {device}{credits}{spoken}");
    }
    if let Some(tcp) = summary.tcp {
        println!("  tcp at {tcp}");
    }
}

fn end(summary: &Summary) {
    let lost = summary.sent - summary.received;
    let percent = lost * 100 / summary.sent.max(1);
    println!("\n--- {} ping statistics ---", summary.host);
    println!("{} calls, {} replies, {percent}% lost", summary.sent, summary.received);
    if let Some(Times { min, avg, max, mdev, p50 }) = summary.times {
        let [min, avg, max, mdev, p50] = [min, avg, max, mdev, p50].map(|micros| micros / 1e3);
        println!("rtt min/avg/max/mdev = {min:.3}/{avg:.3}/{max:.3}/{mdev:.3} ms, half of them within {p50:.3} ms");
    }
}

/// The program that is asked, and where.
fn find(args: &Args, program: Option<u32>, programs: &Programs) -> Result<Target, String> {
    if let (Some(port), Some(program)) = (args.port, program) {
        let found = (args.host.as_str(), port).to_socket_addrs().map_err(|error| format!("{}: {error}", args.host))?;
        let address = found.into_iter().next().ok_or_else(|| format!("{} has no address", args.host))?;
        return Ok(Target { address, program, version: args.version.unwrap_or(1), tcp: None });
    }
    let (at, rows) = registered(&args.host).map_err(|error| error.text().to_owned())?;
    let wanted = if args.netid == Over::Rdma { "rdma" } else { "tcp" };
    let row = choose(&rows, wanted, program, args.version, at).ok_or_else(|| {
        let others = |row: &&Row| program.is_none_or(|program| row.prog == program) && row.prog != RPCBIND;
        let mut others: Vec<String> = rows
            .iter()
            .filter(others)
            .map(|row| format!("{} on {}", programs.program(row.prog), row.netid))
            .collect();
        others.sort_unstable();
        others.dedup();
        let what = program.map_or("nothing".into(), |program| format!("program {} is not", programs.program(program)));
        let there = if others.is_empty() { "nothing else".into() } else { others.join(", ") };
        format!(
            "{what} registered on netid {wanted} at {}; there is {there}: a server needs librpcrdma, and \
             RPCRDMA_REDIRECT=tcp if it knows tcp only",
            args.host
        )
    })?;
    let tcp = choose(&rows, "tcp", Some(row.prog), Some(row.vers), at).and_then(|row| row.address(at));
    let address = row.address(at).ok_or_else(|| format!("{}: rpcbind's address leads nowhere", row.uaddr))?;
    Ok(Target { address, program: row.prog, version: args.version.unwrap_or(row.vers), tcp })
}

/// The row of a program on a netid, that of IPv6 too; the highest version, where none is named.
fn choose<'a>(
    rows: &'a [Row],
    netid: &str,
    program: Option<u32>,
    version: Option<u32>,
    at: IpAddr,
) -> Option<&'a Row> {
    let of_family = |row: &&Row| row.netid == if at.is_ipv4() { netid.to_owned() } else { format!("{netid}6") };
    let fits = |row: &&Row| {
        row.prog != RPCBIND
            && program.is_none_or(|program| row.prog == program)
            && version.is_none_or(|version| row.vers == version)
            && row.address(at).is_some()
    };
    let found = rows.iter().filter(of_family).filter(fits);
    found.min_by_key(|row| (row.prog, std::cmp::Reverse(row.vers)))
}

const RPCBIND: u32 = 100_000;

/// Readable from Ctrl-C on.
fn interrupted() -> std::io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGINT, theirs)?;
    Ok(ours)
}

/// Whether Ctrl-C came before that moment.
fn wait_until(stop: &mut UnixStream, moment: Instant) -> bool {
    let left = moment.saturating_duration_since(Instant::now()).max(Duration::from_micros(1));
    stop.set_read_timeout(Some(left)).is_ok() && stop.read(&mut [0]).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_ping() {
        let times = Times::of(&[1.0, 2.0, 3.0, 6.0]).expect("some");
        assert_eq!((times.min, times.avg, times.max, times.p50), (1.0, 3.0, 6.0, 2.0));
        assert!((times.mdev - 3.5f64.sqrt()).abs() < 1e-9);
        assert!(Times::of(&[]).is_none());
    }

    #[test]
    fn the_program_is_the_one_that_is_named_or_the_first_one_in_its_highest_version() {
        let row = |prog, vers, netid: &str, uaddr: &str| Row {
            prog,
            vers,
            netid: netid.into(),
            uaddr: uaddr.into(),
            owner: "superuser".into(),
        };
        let rows = [
            row(100_000, 4, "rdma", "0.0.0.0.0.111"),
            row(100_005, 3, "rdma", "0.0.0.0.8.2"),
            row(100_003, 3, "rdma", "0.0.0.0.8.1"),
            row(100_003, 4, "rdma", "0.0.0.0.8.1"),
            row(100_003, 3, "tcp", "0.0.0.0.8.1"),
            row(100_003, 3, "rdma6", "::.8.9"),
        ];
        let at = IpAddr::from([10, 0, 0, 1]);
        let found = |program, version| choose(&rows, "rdma", program, version, at).map(|row| (row.prog, row.vers));
        assert_eq!(found(None, None), Some((100_003, 4)));
        assert_eq!(found(Some(100_003), Some(3)), Some((100_003, 3)));
        assert_eq!(found(Some(100_005), None), Some((100_005, 3)));
        assert_eq!(found(Some(9), None), None);
        let six = choose(&rows, "rdma", None, None, "fe80::1".parse().expect("an address"));
        assert_eq!(six.map(|row| row.uaddr.as_str()), Some("::.8.9"));
        assert_eq!(rows[1].address(at), Some("10.0.0.1:2050".parse().expect("an address")));
    }

    #[test]
    fn seconds_are_bounded() {
        assert_eq!(seconds("0.2"), Ok(Duration::from_millis(200)));
        for word in ["-1", "nan", "1e9", "x", ""] {
            assert!(seconds(word).is_err(), "{word}");
        }
    }
}
