//! `rpcrdma stat`: shows what processes that use the library have done and are doing, as text, as JSON, or for Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rpcrdma::tool::{COUNTER_HELP, COUNTERS, latency};
use serde_json::{Value, json};

use crate::columns::{self, Column};
use crate::numbers::{bytes, time};
use crate::out::{self, complain};
use crate::programs::Programs;
use crate::watch::{self, Connection, Figures, Processes, Refusal, Users, difference};
use crate::words;

/// Shows what processes that use the library do.
///
/// Without arguments: which processes there are. For one process: its counters, its connections, and how long the calls of
/// each procedure took. With an INTERVAL: a line each time, with what was done in between, per second.
///
/// Counters are those of rpcrdma_stats_get, which rpcrdma.h describes. Each connection has a row: END, whether this process
/// has opened it (client) or accepted it (server); VER, the version of RPC-over-RDMA; CREDITS, how many are in use, of how
/// many; CALLS and SERVED, calls made and requests answered; INLINE, bytes sent in messages; READ and WRITTEN, bytes moved
/// by RDMA Reads and Writes of this process; PLACED, bytes moved by those of the peer; WAITED, calls that had to wait for a
/// credit; ERRORS, calls that the transport failed. A procedure has the number of its calls, their mean time, and the times
/// that half of them, 99 of a hundred and 999 of a thousand took at most: at a client from the call to the reply, at a
/// server from the moment when the program gets the request to the reply. Before calls that get no reply the library makes
/// calls of procedure 0 by itself, for the credits that their replies bring: these are counted among the calls, but not
/// timed.
#[derive(clap::Args)]
#[command(
    override_usage = "rpcrdma stat [OPTIONS] [PID [INTERVAL [COUNT]]]\n       rpcrdma stat [OPTIONS] --all [INTERVAL [COUNT]]",
    after_help = "\
A process is watched without having been prepared for it, if you may look into it: it is yours, or you are root. \
RPCRDMA_STATS=no in its environment, or stats = no in /etc/rpcrdma.conf, turns that off.

Exit status: 0 the figures are there; 1 a process cannot be watched, or has ended; 2 the command line is wrong."
)]
pub struct Args {
    /// The process.
    pid: Option<String>,
    /// Seconds between lines: each line shows what was done in between, per second.
    interval: Option<String>,
    /// How many lines to print.
    count: Option<String>,
    /// All processes that may be looked at.
    #[arg(short, long)]
    all: bool,
    /// Prints one JSON document; with an INTERVAL, one per line.
    #[arg(long, conflicts_with = "prometheus")]
    json: bool,
    /// Prints the text format of Prometheus, for one process or for all.
    #[arg(long)]
    prometheus: bool,
}

/// What the arguments mean.
struct What {
    pid: Option<u32>,
    interval: Option<Duration>,
    count: Option<u64>,
}

impl Args {
    fn what(&self) -> Result<What, String> {
        let Args { pid, interval, count, .. } = self;
        let (pid, interval, count) = match (self.all, count) {
            (false, _) => (pid, interval, count),
            (true, None) => (&None, pid, interval),
            (true, Some(_)) => {
                return Err("with --all there are two numbers at most: INTERVAL and COUNT".to_owned());
            }
        };
        let whole = |what: &str, text: &str| {
            let number = text.parse().ok().filter(|number| *number > 0);
            number
                .ok_or_else(|| format!("{what} \"{}\": must be a whole number from 1 on", words::shown(text)))
        };
        let number = |text: &String| {
            let wrong = || format!("PID \"{}\": must be the number of a process", words::shown(text));
            whole("PID", text).ok().and_then(|number: u64| u32::try_from(number).ok()).ok_or_else(wrong)
        };
        let what = What {
            pid: pid.as_ref().map(number).transpose()?,
            interval: interval.as_ref().map(|text| seconds(text)).transpose()?,
            count: count.as_ref().map(|text| whole("COUNT", text)).transpose()?,
        };
        if self.prometheus && what.interval.is_some() {
            return Err("--prometheus has no INTERVAL: a collector asks again by itself".to_owned());
        }
        Ok(what)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.01..=86_400.0).contains(seconds));
    let wrong =
        || format!("INTERVAL \"{}\": must be a number of seconds from 0.01 to 86400", words::shown(text));
    seconds.map(Duration::from_secs_f64).ok_or_else(wrong)
}

pub fn run(args: &Args) -> ExitCode {
    let What { pid, interval, count } = match args.what() {
        Ok(what) => what,
        Err(wrong) => {
            complain!("rpcrdma stat: {wrong}");
            return ExitCode::from(2);
        }
    };
    let outcome = match (pid, interval) {
        (None, None) if !args.prometheus && !args.all => list(args.json),
        (pid, Some(interval)) => follow(pid, interval, count, args.json),
        (pid, None) => once(pid, args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            complain!("rpcrdma stat: {error}");
            ExitCode::FAILURE
        }
    }
}

fn refused(pid: u32, why: &Refusal) -> io::Result<ExitCode> {
    complain!("rpcrdma stat: {}", why.text(pid));
    Ok(ExitCode::FAILURE)
}

/// The text if there is no process to show.
const NOBODY: &str = "No process that may be looked at uses the library.";

/// Lists the processes that there are.
fn list(as_json: bool) -> io::Result<ExitCode> {
    let Processes { watched, mut others, foreign } = watch::processes()?;
    let mut figures = Vec::new();
    for process in &watched {
        match process.figures() {
            Ok(found) => figures.push(found),
            Err(Refusal::Ended) => {}
            Err(why) => others.push((process.pid, why)),
        }
    }
    others.sort_by_key(|(pid, _)| *pid);
    let mut out = out::stdout();
    if as_json {
        let programs = Programs::read();
        let all: Vec<Value> = figures.iter().map(|figures| document(figures, &programs)).collect();
        let others: Vec<Value> =
            others.iter().map(|(pid, why)| json!({ "pid": pid, "why": why.text(*pid) })).collect();
        out::json(&json!({ "processes": all, "not_watched": others, "not_readable": foreign }), true)?;
        return Ok(ExitCode::SUCCESS);
    }
    if figures.is_empty() && others.is_empty() {
        writeln!(out, "{NOBODY}")?;
    } else if !figures.is_empty() {
        writeln!(
            out,
            "{:>8} {:<10} {:<16} {:>6} {:>12} {:>12}  SINCE",
            "PID", "USER", "PROGRAM", "CONNS", "CALLS", "SERVED"
        )?;
    }
    for figures in &figures {
        writeln!(
            out,
            "{:>8} {:<10} {:<16} {:>6} {:>12} {:>12}  {}",
            figures.pid,
            words::within(&figures.user, 10),
            words::within(&figures.program, 16),
            connection_count(figures),
            figures.counter("calls"),
            figures.counter("served"),
            age(figures.since)
        )?;
    }
    for (pid, why) in &others {
        writeln!(out, "{}", why.text(*pid))?;
    }
    if foreign > 0 {
        writeln!(out, "{}", watch::foreign_text(foreign))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The processes that are meant.
fn chosen(pid: Option<u32>) -> io::Result<Result<Processes, (u32, Refusal)>> {
    let Some(pid) = pid else { return watch::processes().map(Ok) };
    let one = |watched| Processes { watched: vec![watched], others: Vec::new(), foreign: 0 };
    Ok(watch::look(pid, &Users::read()).map(one).map_err(|why| (pid, why)))
}

/// Says why there is nothing on standard output.
fn say_nobody(foreign: usize) {
    complain!("{NOBODY}");
    if foreign > 0 {
        complain!("{}", watch::foreign_text(foreign));
    }
}

fn once(pid: Option<u32>, args: &Args) -> io::Result<ExitCode> {
    let Processes { watched, foreign, .. } = match chosen(pid)? {
        Ok(chosen) => chosen,
        Err((pid, why)) => return refused(pid, &why),
    };
    let mut all = Vec::new();
    for process in &watched {
        match process.figures() {
            Ok(figures) => all.push(figures),
            Err(why) if pid.is_some() => return refused(process.pid, &why),
            Err(Refusal::Ended) => {}
            Err(why) => complain!("rpcrdma stat: {}", why.text(process.pid)),
        }
    }
    let programs = Programs::read();
    let mut out = out::stdout();
    if args.prometheus {
        out.write_all(prometheus(&all, &programs).as_bytes())?;
    } else if args.json {
        let documents: Vec<Value> = all.iter().map(|figures| document(figures, &programs)).collect();
        match (pid, &documents[..]) {
            (Some(_), [one]) => out::json(one, true)?,
            _ => out::json(&json!({ "processes": documents }), true)?,
        }
    } else {
        if all.is_empty() {
            say_nobody(foreign);
        }
        for (at, figures) in all.iter().enumerate() {
            let gap = if at > 0 { "\n" } else { "" };
            write!(out, "{gap}{}", text(figures, &programs))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints lines until the process ends or there are enough.
fn follow(pid: Option<u32>, interval: Duration, count: Option<u64>, as_json: bool) -> io::Result<ExitCode> {
    let programs = Programs::read();
    let mut before: Vec<Figures> = Vec::new();
    let mut lines = 0u64;
    let mut turns = 0u64;
    let mut told = BTreeSet::new();
    loop {
        // Processes come and go; one that is named must stay.
        let Processes { watched, foreign, .. } = match chosen(pid)? {
            Ok(chosen) => chosen,
            Err((pid, Refusal::Missing)) if turns > 0 => return refused(pid, &Refusal::Ended),
            Err((pid, why)) => return refused(pid, &why),
        };
        let mut now = Vec::new();
        for process in &watched {
            match process.figures() {
                Ok(figures) => now.push(figures),
                Err(why) if pid.is_some() => return refused(process.pid, &why),
                Err(Refusal::Ended) => {}
                // Only once: it will not be understood next time either.
                Err(why) => {
                    if told.insert(process.pid) {
                        complain!("rpcrdma stat: {}", why.text(process.pid));
                    }
                }
            }
        }
        let mut out = out::stdout();
        if turns > 0 {
            for figures in &now {
                let Some(before) = before.iter().find(|before| figures.follows(before)) else { continue };
                let rates = Rates::of(before, figures);
                if as_json {
                    out::json(&rates.document(figures, &programs), false)?;
                    continue;
                }
                if lines.is_multiple_of(20) {
                    writeln!(out, "{}", Rates::title(pid.is_none()))?;
                }
                lines += 1;
                writeln!(out, "{}", rates.line(figures, pid.is_none()))?;
            }
            out.flush()?;
        }
        if turns == 0 && now.is_empty() {
            // Processes may come; until then there is no line.
            say_nobody(foreign);
        }
        if count == Some(turns) {
            return Ok(ExitCode::SUCCESS);
        }
        turns += 1;
        before = now;
        drop(out);
        thread::sleep(interval);
    }
}

/// What was done per second between two looks.
pub struct Rates {
    seconds: f64,
    pub calls: f64,
    pub served: f64,
    bytes: [f64; 4],
    syscalls: f64,
    waited: f64,
    errors: f64,
    in_use: u64,
    pub percentiles: [Option<u64>; 3],
}

/// The counters of bytes that have a column.
const BYTES: [&str; 4] = ["bytes_inline", "bytes_read", "bytes_written", "bytes_copied"];

/// The percentiles that are shown.
const PARTS: [(f64, &str); 3] = [(0.5, "p50"), (0.99, "p99"), (0.999, "p99.9")];

impl Rates {
    pub fn of(before: &Figures, now: &Figures) -> Rates {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-6);
        let rate = |name: &str| now.counter(name).saturating_sub(before.counter(name)) as f64 / seconds;
        let buckets = difference(&now.all_buckets(), &before.all_buckets());
        Rates {
            seconds,
            calls: rate("calls"),
            served: rate("served"),
            bytes: BYTES.map(rate),
            syscalls: rate("syscalls"),
            waited: rate("credits_waited"),
            errors: rate("errors_sent") + rate("errors_received"),
            in_use: now.connections.iter().map(in_use).fold(0, u64::saturating_add),
            percentiles: PARTS.map(|(part, _)| latency::percentile(&buckets, part)),
        }
    }

    /// Bytes in messages, and those that RDMA Reads and Writes have moved.
    pub fn all_bytes(&self) -> f64 {
        self.bytes[..3].iter().sum()
    }

    fn title(all: bool) -> String {
        let who = if all { format!("{:>8} {:<16}", "PID", "PROGRAM") } else { String::new() };
        format!(
            "{who}{:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>9} {:>6} {:>6} {:>8} {:>7} {:>8} {:>8} {:>8}",
            "calls/s",
            "served/s",
            "inlin/s",
            "read/s",
            "write/s",
            "copy/s",
            "syscall/s",
            "conns",
            "inuse",
            "waited/s",
            "errs/s",
            "p50",
            "p99",
            "p99.9"
        )
    }

    fn line(&self, figures: &Figures, all: bool) -> String {
        let program = words::within(&figures.program, 16);
        let who = if all { format!("{:>8} {program:<16}", figures.pid) } else { String::new() };
        let [inline, read, written, copied] = self.bytes.map(|n| bytes(n as u64));
        let [p50, p99, p999] = self.percentiles.map(time);
        format!(
            "{who}{:>9.0} {:>9.0} {inline:>8} {read:>8} {written:>8} {copied:>8} {:>9.0} {:>6} {:>6} {:>8.0} {:>7.0} \
             {p50:>8} {p99:>8} {p999:>8}",
            self.calls,
            self.served,
            self.syscalls,
            connection_count(figures),
            self.in_use,
            self.waited,
            self.errors
        )
    }

    fn document(&self, figures: &Figures, programs: &Programs) -> Value {
        let mut document = document(figures, programs);
        let mut rates = serde_json::Map::new();
        rates.insert("seconds".into(), json!(self.seconds));
        rates.insert("calls".into(), json!(self.calls));
        rates.insert("served".into(), json!(self.served));
        for (name, rate) in BYTES.iter().zip(self.bytes) {
            rates.insert((*name).to_owned(), json!(rate));
        }
        for ((_, name), nanos) in PARTS.iter().zip(self.percentiles) {
            rates.insert(format!("{name}_us"), json!(nanos.map(micros)));
        }
        document["per_second"] = Value::Object(rates);
        document
    }
}

/// Credits in use at a connection: our calls under way, or the peer's.
pub fn in_use(connection: &Connection) -> u64 {
    connection.in_flight.saturating_add(connection.open)
}

/// All connections, including those that have no row.
pub fn connection_count(figures: &Figures) -> u64 {
    figures.without_slot.saturating_add(figures.connections.len() as u64)
}

const PROCEDURES: [Column; 8] = [
    Column::name("PROGRAM", 16, 8),
    Column::name("PROCEDURE", 12, 7),
    Column::name("END", 6, 3),
    Column::number("CALLS", 10, 6),
    Column::number("p50", 9, 5),
    Column::number("p99", 9, 4),
    Column::number("p99.9", 9, 2),
    Column::number("mean", 9, 1),
];

/// Everything about a process, for people.
fn text(figures: &Figures, programs: &Programs) -> String {
    let mut out = String::new();
    let Figures { pid, user, program, library, .. } = figures;
    let since = age(figures.since);
    let _ = writeln!(
        out,
        "{program}, process {pid} of {user}, librpcrdma {library}, first connection {since} ago\n"
    );
    for (name, n) in &figures.counters {
        let _ = writeln!(out, "{name:<20} {n:>16}");
    }
    out.push('\n');
    for line in connection_lines(&figures.connections, None) {
        let _ = writeln!(out, "{line}");
    }
    if figures.without_slot > 0 {
        let _ = writeln!(out, "and {} more, which have no room here", figures.without_slot);
    }
    if !figures.latencies.is_empty() {
        out.push('\n');
        let row = |latency: &watch::Latency| {
            let (program, procedure) = names(latency.numbers, programs);
            let [p50, p99, p999] = PARTS.map(|(part, _)| time(latency.percentile(part)));
            let (calls, mean) = (latency.calls().to_string(), time(latency.mean()));
            [program, procedure, end(latency.served).to_owned(), calls, p50, p99, p999, mean]
        };
        let rows: Vec<_> = figures.latencies.iter().map(row).collect();
        for line in columns::lines(&PROCEDURES, &rows, None) {
            let _ = writeln!(out, "{line}");
        }
    }
    out
}

const CONNECTIONS: [Column; 14] = [
    Column::name("PEER", 21, 14),
    Column::name("END", 6, 13),
    Column::number("VER", 3, 7),
    Column::number("CREDITS", 7, 12),
    Column::number("CALLS", 8, 11),
    Column::number("SERVED", 8, 10),
    Column::number("INLINE", 7, 8),
    Column::number("READ", 7, 6),
    Column::number("WRITTEN", 7, 5),
    Column::number("PLACED", 7, 2),
    Column::number("WAITED", 6, 4),
    Column::number("ERRORS", 6, 3),
    Column::number("AGE", 4, 1),
    Column::name("DEVICE", 6, 9),
];

/// Connections, a line each, below their title. `screen`: how many characters a line holds.
pub fn connection_lines(connections: &[Connection], screen: Option<usize>) -> Vec<String> {
    let rows: Vec<_> = connections.iter().map(connection_row).collect();
    columns::lines(&CONNECTIONS, &rows, screen)
}

/// The text of each column. Credits: how many are in use, and how many there are.
fn connection_row(connection: &Connection) -> [String; CONNECTIONS.len()] {
    let granted = match connection.accepted {
        true => connection.granting,
        false => connection.asked.min(connection.granted),
    };
    [
        connection.peer.map_or_else(|| "-".to_owned(), |peer| peer.to_string()),
        end(connection.accepted).to_owned(),
        if connection.version == 0 { "-".to_owned() } else { connection.version.to_string() },
        format!("{}/{granted}", in_use(connection)),
        connection.calls.to_string(),
        connection.served.to_string(),
        bytes(connection.bytes_inline),
        bytes(connection.bytes_read),
        bytes(connection.bytes_written),
        bytes(connection.bytes_placed),
        connection.waited.to_string(),
        connection.errors.to_string(),
        age(connection.since),
        connection.device.clone(),
    ]
}

fn end(served: bool) -> &'static str {
    if served { "server" } else { "client" }
}

/// "nfs 3" and "READ".
pub fn names(numbers: Option<(u32, u32, u32)>, programs: &Programs) -> (String, String) {
    match numbers {
        Some((program, version, procedure)) => (
            format!("{} {version}", programs.program(program)),
            programs.procedure(program, version, procedure),
        ),
        None => ("others".to_owned(), "-".to_owned()),
    }
}

/// Everything about a process, for programs.
fn document(figures: &Figures, programs: &Programs) -> Value {
    let counters: serde_json::Map<String, Value> =
        figures.counters.iter().map(|(name, n)| (name.clone(), json!(n))).collect();
    let connection = |c: &Connection| {
        json!({
            "peer": c.peer.map(|peer| peer.to_string()), "local": c.local.map(|local| local.to_string()),
            "end": end(c.accepted), "device": c.device, "fd": c.fd, "since": c.since as f64 / 1e9,
            "version": (c.version != 0).then_some(c.version),
            "credits": {
                "asked": c.asked, "granted": c.granted, "granting": c.granting, "calls_in_flight": c.in_flight,
                "requests_open": c.open, "waited": c.waited,
            },
            "calls": c.calls, "served": c.served, "errors": c.errors, "bytes_inline": c.bytes_inline,
            "bytes_read": c.bytes_read, "bytes_written": c.bytes_written, "bytes_placed": c.bytes_placed,
        })
    };
    let latency = |l: &watch::Latency| {
        let (program, procedure) = names(l.numbers, programs);
        let [p50, p99, p999] = PARTS.map(|(part, _)| l.percentile(part).map(micros));
        json!({
            "program": l.numbers.map(|n| n.0), "version": l.numbers.map(|n| n.1), "procedure": l.numbers.map(|n| n.2),
            "program_name": program, "procedure_name": procedure, "end": end(l.served), "calls": l.calls(),
            "p50_us": p50, "p99_us": p99, "p99.9_us": p999, "mean_us": l.mean().map(micros),
        })
    };
    json!({
        "pid": figures.pid, "user": figures.user, "program": figures.program, "library": figures.library,
        "since": figures.since as f64 / 1e9, "counters": counters,
        "connections": figures.connections.iter().map(connection).collect::<Vec<_>>(),
        "connections_beyond": figures.without_slot,
        "latencies": figures.latencies.iter().map(latency).collect::<Vec<_>>(),
    })
}

/// The text format of Prometheus, 0.0.4: every metric once, with all processes below it.
fn prometheus(all: &[Figures], programs: &Programs) -> String {
    let mut out = String::new();
    let process =
        |f: &Figures| format!("pid=\"{}\",comm=\"{}\",user=\"{}\"", f.pid, label(&f.program), label(&f.user));
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in all.iter().flat_map(|figures| &figures.counters) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    for name in names {
        if let Some(at) = COUNTERS.iter().position(|known| known == name) {
            let _ = writeln!(out, "# HELP rpcrdma_{name}_total {}", COUNTER_HELP[at].trim());
        }
        let _ = writeln!(out, "# TYPE rpcrdma_{name}_total counter");
        for figures in all {
            let _ = writeln!(out, "rpcrdma_{name}_total{{{}}} {}", process(figures), figures.counter(name));
        }
    }
    let _ = writeln!(out, "# HELP rpcrdma_connections_open Connections that are there now.");
    let _ = writeln!(out, "# TYPE rpcrdma_connections_open gauge");
    for figures in all {
        let _ =
            writeln!(out, "rpcrdma_connections_open{{{}}} {}", process(figures), connection_count(figures));
    }
    type Field = fn(&Connection) -> u64;
    let metrics: [(&str, &str, &str, Field); 9] = [
        ("credits_in_use", "gauge", "Credits in use.", in_use),
        ("calls_total", "counter", "Calls made.", |c| c.calls),
        ("served_total", "counter", "Requests answered.", |c| c.served),
        ("credits_waited_total", "counter", "Calls that had to wait for a credit.", |c| c.waited),
        ("errors_total", "counter", "Calls that the transport failed.", |c| c.errors),
        ("bytes_inline_total", "counter", "Bytes sent in messages.", |c| c.bytes_inline),
        ("bytes_read_total", "counter", "Bytes moved by this process's RDMA Reads.", |c| c.bytes_read),
        ("bytes_written_total", "counter", "Bytes moved by this process's RDMA Writes.", |c| c.bytes_written),
        ("bytes_placed_total", "counter", "Bytes moved by the peer's RDMA Reads and Writes.", |c| {
            c.bytes_placed
        }),
    ];
    for (name, kind, help, field) in metrics {
        let _ = writeln!(out, "# HELP rpcrdma_connection_{name} {help}");
        let _ = writeln!(out, "# TYPE rpcrdma_connection_{name} {kind}");
        for (figures, c) in all.iter().flat_map(|f| f.connections.iter().map(move |c| (f, c))) {
            let peer = c.peer.map_or_else(String::new, |peer| peer.to_string());
            let _ = writeln!(
                out,
                "rpcrdma_connection_{name}{{{},connection=\"{}\",peer=\"{peer}\",end=\"{}\",device=\"{}\"}} {}",
                process(figures),
                c.key.0,
                end(c.accepted),
                label(&c.device),
                field(c)
            );
        }
    }
    let _ = writeln!(out, "# HELP rpcrdma_call_seconds How long calls took, from the call to the reply.");
    let _ = writeln!(out, "# TYPE rpcrdma_call_seconds histogram");
    // A page may name a procedure twice; a series must appear once.
    let mut histograms: BTreeMap<String, (Vec<u64>, u64)> = BTreeMap::new();
    for (figures, l) in all.iter().flat_map(|f| f.latencies.iter().map(move |l| (f, l))) {
        let (program, procedure) = self::names(l.numbers, programs);
        let labels = format!(
            "{},program=\"{}\",procedure=\"{}\",end=\"{}\"",
            process(figures),
            label(&program),
            label(&procedure),
            end(l.served)
        );
        let (buckets, sum) = histograms.entry(labels).or_insert_with(|| (vec![0; l.buckets.len()], 0));
        buckets.iter_mut().zip(&l.buckets).for_each(|(all, n)| *all = all.saturating_add(*n));
        *sum = sum.saturating_add(l.sum);
    }
    for (labels, (buckets, sum)) in &histograms {
        // A boundary for each power of two is enough for a collector.
        let mut below = 0u64;
        for (at, n) in buckets.iter().enumerate() {
            below = below.saturating_add(*n);
            if at % 4 == 3 && at + 1 < buckets.len() {
                let bound = latency::begin(at + 1) as f64 / 1e9;
                let _ = writeln!(out, "rpcrdma_call_seconds_bucket{{{labels},le=\"{bound}\"}} {below}");
            }
        }
        let _ = writeln!(out, "rpcrdma_call_seconds_bucket{{{labels},le=\"+Inf\"}} {below}");
        let _ = writeln!(out, "rpcrdma_call_seconds_sum{{{labels}}} {}", *sum as f64 / 1e9);
        let _ = writeln!(out, "rpcrdma_call_seconds_count{{{labels}}} {below}");
    }
    out
}

fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

/// How long ago: "12s", "5m", "3h", "2d".
pub fn age(since: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
    match now.saturating_sub(since) / 1_000_000_000 {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7_200 => format!("{}m", seconds / 60),
        seconds @ 7_200..172_800 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_pages_say_a_collector_gets_each_series_once() {
        let latency = watch::Latency {
            numbers: Some((100_003, 3, 6)),
            served: true,
            sum: u64::MAX,
            buckets: vec![u64::MAX / 2; rpcrdma::tool::layout::BUCKETS],
        };
        let other = watch::Latency { numbers: None, sum: 1, ..latency.clone() };
        let figures = Figures {
            pid: 1,
            user: "a\"b".into(),
            program: "p\\".into(),
            library: "0.1".into(),
            since: 0,
            at: std::time::Instant::now(),
            counters: vec![("calls".into(), 7)],
            connections: Vec::new(),
            without_slot: u64::MAX,
            latencies: vec![latency.clone(), other.clone(), latency, other],
        };
        let again = Figures { pid: 2, ..figures.clone() };
        let text = prometheus(&[figures, again], &Programs::read());
        let mut series: Vec<&str> = text.lines().map(|line| line.rsplit_once(' ').unwrap().0).collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all, "{text}");
        assert_eq!(text.matches("_call_seconds_count{").count(), 4);
    }

    #[test]
    fn a_label_ends_where_it_is_to() {
        assert_eq!(label("a\"b\\\n"), "a\\\"b\\\\\\n");
    }

    #[test]
    fn intervals_are_seconds_and_have_limits() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "x", "1e9", "nan", "inf", ""] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
