//! `rpcrdma ping`: shows which transports a program at a host answers on, over which device, and how fast.
//!
//! Calls are made with an ordinary CLIENT, so what is measured, and what is said when it fails, is what a program would see.
//! The library tells what the connection runs on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::{self, ExitCode};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use clap::{ValueEnum, ValueHint};
use rpcrdma::tool::caller::{self, Caller, Failed};
use rpcrdma::tool::{Agreed, Row, host};
use serde::Serialize;

use crate::out::{self, complain, say};
use crate::times::Times;
use crate::words::{reason, shown};
use crate::{interrupt, library, programs};

#[derive(clap::Args)]
#[command(
    after_help = "Each call is one of procedure 0, which does nothing. Ctrl-C ends it, with a summary: mdev is the \
                  standard deviation, p50 the median to within 2 %.\n\n\
                        Exit status: 0 there was an answer, 1 there was none, 2 the command line was wrong."
)]
pub struct Args {
    /// Name or address.
    #[arg(value_hint = ValueHint::Hostname)]
    host: String,
    /// Number, or name in /etc/rpc. Without it: the first program that rpcbind at HOST has on the netid.
    program: Option<String>,
    /// Without it: the highest version that there is.
    version: Option<u32>,
    /// Ends after this many calls.
    #[arg(short, long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Seconds from call to call.
    #[arg(short, long, default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Seconds to wait for an answer.
    #[arg(short = 'W', long, default_value = "5", value_parser = seconds)]
    timeout: Duration,
    /// The port of the program, instead of asking rpcbind.
    #[arg(short, long, requires = "program", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// What the calls go over. Without it: rdma, or rdma6 if HOST has no IPv4 address.
    #[arg(long, value_enum)]
    netid: Option<Netid>,
    /// Prints one JSON document at the end, instead of the lines.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Netid {
    Rdma,
    Rdma6,
    Tcp,
}

impl Netid {
    fn name(self) -> &'static str {
        match self {
            Netid::Rdma => "rdma",
            Netid::Rdma6 => "rdma6",
            Netid::Tcp => "tcp",
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "must be a number of seconds from 0.001 to 86400".to_owned();
    let number: f64 = text.parse().map_err(|_| wrong())?;
    if (0.001..=86400.0).contains(&number) { Ok(Duration::from_secs_f64(number)) } else { Err(wrong()) }
}

pub fn run(args: &Args) -> ExitCode {
    library::forget_name();
    match ping(args) {
        Ok(answered) => ExitCode::from(u8::from(!answered)),
        Err(error) => {
            complain!("rpcrdma ping: {}", shown(&error));
            ExitCode::FAILURE
        }
    }
}

/// Whether there was an answer.
fn ping(args: &Args) -> Result<bool, String> {
    let target = Target::of(args)?;
    let session = Arc::new(Mutex::new(Session::new(&target, args.json)));
    let at_interrupt = session.clone();
    interrupt::on(move |_| {
        let status = i32::from(!locked(&at_interrupt).end());
        process::exit(status)
    })
    .map_err(|error| error.to_string())?;

    let mut caller = match target.connect(args) {
        Ok(caller) => Some(caller),
        Err(error) if args.json => {
            let mut session = locked(&session);
            session.lost(&error);
            return Ok(session.end());
        }
        Err(error) => return Err(error),
    };
    let mut again = Attempt::default();
    let mut first = true;
    let mut next = Instant::now();
    loop {
        // A lost connection is made anew: over rdma by the library, over tcp here.
        if caller.is_none() {
            caller = again
                .wait(&target, target.netid, args.timeout)
                .map_err(|error| locked(&session).lost(&error))
                .ok();
        }
        if let Some(one) = caller.as_mut() {
            locked(&session).sent += 1;
            let started = Instant::now();
            let outcome = one.null(args.timeout);
            let took = started.elapsed();
            let answered = outcome.is_ok();
            if first && answered {
                // Asked without the lock: Ctrl-C needs it.
                let tcp = target.tcp_beside(args);
                locked(&session).describe(one, tcp);
                first = false;
            }
            locked(&session).note(outcome, took);
            if !answered && target.netid == Netid::Tcp {
                caller = None;
            }
        }
        if args.count.is_some_and(|count| locked(&session).rounds() >= count) {
            break;
        }
        next += args.interval;
        let now = Instant::now();
        // Calls that were missed because one took longer than the interval are not made up for.
        next = next.max(now);
        thread::sleep(next - now);
    }
    let answered = locked(&session).end();
    Ok(answered)
}

fn locked(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

// ------------------------------------------------------------------------------------------------------- what is asked

/// Where calls go.
struct Target {
    host: String,
    netid: Netid,
    program: u32,
    version: u32,
    /// Other programs that rpcbind has there.
    others: Vec<u32>,
    /// The address, if rpcbind is not asked.
    at: Option<SocketAddr>,
}

impl Target {
    fn of(args: &Args) -> Result<Target, String> {
        let host = args.host.clone();
        let program = args.program.as_deref().map(programs::number).transpose()?;
        let found = (host.as_str(), args.port.unwrap_or(0)).to_socket_addrs();
        let found: Vec<SocketAddr> = found.map_err(|error| format!("{host}: {}", reason(&error)))?.collect();
        let netid = args.netid.unwrap_or_else(|| {
            if found.iter().any(SocketAddr::is_ipv4) { Netid::Rdma } else { Netid::Rdma6 }
        });
        if netid != Netid::Tcp {
            caller::settings().map_err(|error| format!("nothing goes over rdma: {error}"))?;
        }
        let family = |address: &&SocketAddr| match netid {
            Netid::Rdma => address.is_ipv4(),
            Netid::Rdma6 => address.is_ipv6(),
            Netid::Tcp => true,
        };
        if args.port.is_some() {
            let at = found.iter().find(family).copied();
            let at = at.ok_or_else(|| format!("{host} has no address for netid {}", netid.name()))?;
            let program = program.ok_or("a port needs a program")?;
            let mut target = Target { host, netid, program, version: 0, others: Vec::new(), at: Some(at) };
            target.version = match args.version {
                Some(version) => version,
                None => target.highest(args)?,
            };
            return Ok(target);
        }
        let six = netid == Netid::Rdma6 || !found.iter().any(SocketAddr::is_ipv4);
        let rows = match host::registered(Some(&host), six, args.timeout) {
            Ok((_, rows)) => rows,
            Err(error) => return Err(error.to_string()),
        };
        let there = Versions::of(&rows, netid.name());
        let program = match program {
            Some(program) => program,
            None => there.first().ok_or_else(|| there.nothing(&host, netid, &rows))?,
        };
        // If it is not registered, the CLIENT's look-up explains that, as to any program.
        let version = args.version.or_else(|| there.highest(program)).unwrap_or(1);
        let others = there.0.keys().copied().filter(|one| *one != program).collect();
        Ok(Target { host, netid, program, version, others, at: None })
    }

    fn connect(&self, args: &Args) -> Result<Caller, String> {
        Attempt::default().wait(self, self.netid, args.timeout)
    }

    /// The highest version of a program for which rpcbind is not asked: the refusal of a version that does not exist names
    /// it.
    fn highest(&self, args: &Args) -> Result<u32, String> {
        match self.connect(args)?.null(args.timeout) {
            Ok(()) => Ok(self.version),
            Err(Failed { versions: Some((_, high)), .. }) => Ok(high),
            Err(failed) => Err(failed.text),
        }
    }

    /// Whether the same program answers over tcp too. Returns where, or why not.
    fn tcp_beside(&self, args: &Args) -> Option<Result<SocketAddr, String>> {
        if self.netid == Netid::Tcp {
            return None;
        }
        // libtirpc uses tcp for both families.
        Some(Attempt::default().wait(self, Netid::Tcp, args.timeout).and_then(|caller| {
            caller.null(args.timeout).map_err(|failed| failed.text)?;
            caller.address().ok_or_else(|| "its address is not known".to_owned())
        }))
    }
}

/// A connection that is being made, in a thread of its own: the library and libtirpc wait longer for a peer that accepts it
/// and is then silent than the user may wish.
#[derive(Default)]
struct Attempt(Option<mpsc::Receiver<Result<Caller, String>>>);

impl Attempt {
    /// Waits for the attempt under way, or else begins one. The attempt goes on after the timeout.
    fn wait(&mut self, target: &Target, netid: Netid, timeout: Duration) -> Result<Caller, String> {
        let outcome = match self.0.take() {
            Some(outcome) => outcome,
            None => Attempt::begin(target, netid.name(), timeout)?,
        };
        match outcome.recv_timeout(timeout) {
            Ok(made) => made,
            Err(_) => {
                self.0 = Some(outcome);
                let hint = if netid == Netid::Tcp { "" } else { "; does its server run with librpcrdma?" };
                let (to, netid) = (target.at.map_or(target.host.clone(), |at| at.to_string()), netid.name());
                Err(format!("no connection over {netid} to {to} within {} s{hint}", timeout.as_secs_f64()))
            }
        }
    }

    fn begin(
        target: &Target,
        netid: &'static str,
        timeout: Duration,
    ) -> Result<mpsc::Receiver<Result<Caller, String>>, String> {
        let (host, at, program, version) = (target.host.clone(), target.at, target.program, target.version);
        let (done, outcome) = mpsc::channel();
        let connect = move || {
            let made = match at {
                Some(at) => Caller::at(at, &host, netid, program, version),
                None => Caller::of(&host, netid, program, version, timeout),
            };
            // If nobody waits for the connection any more, it is destroyed.
            let _ = done.send(made.map_err(|error| error.to_string()));
        };
        thread::Builder::new().spawn(connect).map_err(|error| format!("no thread: {error}"))?;
        Ok(outcome)
    }
}

/// The programs that rpcbind has on a netid, with their versions.
struct Versions(BTreeMap<u32, BTreeSet<u32>>);

/// rpcbind itself, which is not reached over rdma.
const RPCBIND: u32 = 100_000;

impl Versions {
    fn of(rows: &[Row], netid: &str) -> Versions {
        let mut programs: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for row in rows.iter().filter(|row| row.netid == netid && row.prog != RPCBIND) {
            programs.entry(row.prog).or_default().insert(row.vers);
        }
        Versions(programs)
    }

    fn first(&self) -> Option<u32> {
        self.0.keys().next().copied()
    }

    fn highest(&self, program: u32) -> Option<u32> {
        self.0.get(&program).and_then(|versions| versions.last()).copied()
    }

    /// What to say if nothing is registered.
    fn nothing(&self, host: &str, netid: Netid, rows: &[Row]) -> String {
        let tcp = Versions::of(rows, "tcp");
        let names: Vec<String> = tcp.0.keys().map(|program| programs::described(*program)).collect();
        let hint = match (netid, names.as_slice()) {
            (Netid::Tcp, _) => String::new(),
            (_, []) => ", and none on tcp: is a server running?".to_owned(),
            (_, names) => format!(
                ", but on tcp: {}; its server must run with librpcrdma, and with RPCRDMA_REDIRECT=tcp if it knows tcp only",
                names.join(", ")
            ),
        };
        format!("no program is registered on netid {} at {host}{hint}", netid.name())
    }
}

// ------------------------------------------------------------------------------------------------------- what comes of it

/// What has been sent and answered.
struct Session {
    json: bool,
    title: String,
    document: Document,
    sent: u64,
    /// Attempts without a connection to send on.
    unsent: u64,
    times: RoundTrips,
    started: Instant,
}

/// What the summary is made of. It takes the same room for one answer as for those of a year.
#[derive(Default)]
struct RoundTrips {
    /// For the median.
    times: Times,
    count: u64,
    /// In milliseconds, as all that follows.
    min: f64,
    max: f64,
    avg: f64,
    /// The sum of the squared differences from the mean, by Welford's method: a plain sum of squares would lose precision.
    squares: f64,
}

#[derive(Serialize)]
struct Document {
    host: String,
    netid: &'static str,
    program: u32,
    name: Option<String>,
    version: u32,
    address: Option<SocketAddr>,
    connection: Option<Connection>,
    tcp: Option<Beside>,
    sent: u64,
    answered: u64,
    lost: u64,
    errors: Vec<String>,
    /// Of the answers, in milliseconds.
    round_trip: Option<Summary>,
}

#[derive(Serialize)]
struct Connection {
    device: &'static str,
    description: String,
    rpc_over_rdma: Option<u32>,
    inline_out: usize,
    inline_in: usize,
    credits_asked: u32,
    credits_granted: u32,
}

#[derive(Serialize)]
struct Beside {
    answers: bool,
    address: Option<SocketAddr>,
    why_not: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Summary {
    min: f64,
    avg: f64,
    max: f64,
    mdev: f64,
    p50: f64,
}

impl Session {
    fn new(target: &Target, json: bool) -> Session {
        let title = format!(
            "{} program {} version {} on {}",
            target.host,
            programs::described(target.program),
            target.version,
            target.netid.name()
        );
        if !json {
            say!("PING {}", shown(&title));
            if !target.others.is_empty() {
                let others: Vec<String> = target.others.iter().map(|one| programs::described(*one)).collect();
                say!("{} has there too: {}", shown(&target.host), others.join(", "));
            }
        }
        let document = Document {
            host: target.host.clone(),
            netid: target.netid.name(),
            program: target.program,
            name: programs::name(target.program),
            version: target.version,
            address: target.at,
            connection: None,
            tcp: None,
            sent: 0,
            answered: 0,
            lost: 0,
            errors: Vec::new(),
            round_trip: None,
        };
        Session {
            json,
            title,
            document,
            sent: 0,
            unsent: 0,
            times: RoundTrips::default(),
            started: Instant::now(),
        }
    }

    /// What the connection runs on: known with the first answer.
    fn describe(&mut self, caller: &Caller, tcp: Option<Result<SocketAddr, String>>) {
        let address = caller.address();
        let to = address.map_or("an unknown address".to_owned(), |address| address.to_string());
        let connection = caller.agreed().map(Connection::from);
        if let (false, Some(one)) = (self.json, &connection) {
            let version = one.rpc_over_rdma.map_or("not agreed".to_owned(), |version| version.to_string());
            let (out, back) = (one.inline_out, one.inline_in);
            let (asked, granted) = (one.credits_asked, one.credits_granted);
            say!(
                "{to}: {} ({}), RPC-over-RDMA version {version}, inline {out} bytes out and {back} in, credits {granted} \
                 granted of {asked} asked",
                one.description,
                one.device
            );
        }
        match (&tcp, self.json) {
            (Some(Ok(at)), false) => say!("{at}: answers over tcp too"),
            (Some(Err(why)), false) => say!("not over tcp: {}", shown(why)),
            _ => {}
        }
        self.document.tcp = tcp.map(|tcp| Beside {
            answers: tcp.is_ok(),
            address: tcp.as_ref().ok().copied(),
            why_not: tcp.err(),
        });
        self.document.address = address;
        self.document.connection = connection;
    }

    fn note(&mut self, outcome: Result<(), Failed>, took: Duration) {
        let number = self.sent;
        match outcome {
            Ok(()) => {
                self.times.add(took);
                if !self.json {
                    let from = self.document.address.map_or(self.document.host.clone(), |at| at.to_string());
                    say!("answer from {from}: seq={number} time={:.3} ms", milliseconds(took));
                }
            }
            Err(failed) => self.say(&format!("seq={number}: {}", failed.text), failed.text),
        }
    }

    /// There is no connection to send on.
    fn lost(&mut self, error: &str) {
        self.unsent += 1;
        self.say(error, error.to_owned());
    }

    fn say(&mut self, line: &str, error: String) {
        // For a server that is away for a night, the latest ones are enough.
        const MOST: usize = 100;
        if self.document.errors.len() == MOST {
            self.document.errors.remove(0);
        }
        self.document.errors.push(error);
        if !self.json {
            say!("{}", shown(line));
        }
    }

    fn rounds(&self) -> u64 {
        self.sent + self.unsent
    }

    /// Shows the summary. Returns whether there was an answer.
    fn end(&mut self) -> bool {
        let (sent, answered) = (self.sent, self.times.count);
        let lost = sent - answered.min(sent);
        let summary = self.times.summary();
        if self.json {
            (self.document.sent, self.document.answered, self.document.lost) = (sent, answered, lost);
            self.document.round_trip = summary;
            out::document(&self.document);
            return answered > 0;
        }
        say!("\n--- {} ping statistics ---", shown(&self.title));
        let percent = if sent == 0 { 0.0 } else { lost as f64 * 100.0 / sent as f64 };
        let time = self.started.elapsed().as_millis();
        say!("{sent} calls sent, {answered} answered, {lost} lost ({percent:.0}%), time {time} ms");
        if let Some(Summary { min, avg, max, mdev, p50 }) = summary {
            say!("rtt min/avg/max/mdev = {min:.3}/{avg:.3}/{max:.3}/{mdev:.3} ms, p50 {p50:.3} ms");
        }
        answered > 0
    }
}

impl From<Agreed> for Connection {
    fn from(agreed: Agreed) -> Connection {
        Connection {
            device: agreed.name,
            description: agreed.device,
            rpc_over_rdma: agreed.version,
            inline_out: agreed.inline.0,
            inline_in: agreed.inline.1,
            credits_asked: agreed.credits.0,
            credits_granted: agreed.credits.1,
        }
    }
}

impl RoundTrips {
    fn add(&mut self, time: Duration) {
        self.times.add(time);
        let time = milliseconds(time);
        self.count += 1;
        (self.min, self.max) =
            if self.count == 1 { (time, time) } else { (self.min.min(time), self.max.max(time)) };
        let off = time - self.avg;
        self.avg += off / self.count as f64;
        self.squares += off * (time - self.avg);
    }

    /// As ping(8): mdev is the standard deviation. `None` without answers.
    fn summary(&self) -> Option<Summary> {
        let p50 = self.times.quantile(0.5)? / 1000.0;
        let Self { count, min, max, avg, squares, .. } = *self;
        Some(Summary { min, avg, max, mdev: (squares / count as f64).sqrt(), p50: p50.clamp(min, max) })
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(words: &[&str]) -> Result<Args, clap::Error> {
        Line::try_parse_from([&["ping"], words].concat()).map(|line| line.args)
    }

    #[test]
    fn a_command_line_is_understood_or_refused() {
        let args = parsed(&["h", "nfs", "3", "-c", "5", "-i", "0.2", "-W", "2", "-p", "2049"]).unwrap();
        assert_eq!((args.count, args.port, args.version), (Some(5), Some(2049), Some(3)));
        assert_eq!((args.interval, args.timeout), (Duration::from_millis(200), Duration::from_secs(2)));
        assert_eq!(parsed(&["h", "--netid", "rdma6"]).unwrap().netid, Some(Netid::Rdma6));
        let wrong: [&[&str]; 9] = [
            &[],
            &["h", "-c", "0"],
            &["h", "-i", "0"],
            &["h", "-i", "-1"],
            &["h", "-i", "nan"],
            &["h", "-W", "inf"],
            &["h", "-p", "1"],
            &["h", "1", "-p", "0"],
            &["h", "--netid", "udp"],
        ];
        for words in wrong {
            assert!(parsed(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_summary_is_as_ping_has_it() {
        let of = |times: &[u64]| {
            let mut trips = RoundTrips::default();
            times.iter().for_each(|ms| trips.add(Duration::from_millis(*ms)));
            trips.summary()
        };
        assert_eq!(of(&[]), None);
        let Summary { min, avg, max, mdev, p50 } = of(&[3, 1, 2, 6]).unwrap();
        assert_eq!((min, avg, max), (1.0, 3.0, 6.0));
        assert!((mdev - 3.5_f64.sqrt()).abs() < 1e-9);
        assert!((p50 - 2.0).abs() < 2.0 / 64.0, "{p50}");
        assert_eq!(of(&[7]), Some(Summary { min: 7.0, avg: 7.0, max: 7.0, mdev: 0.0, p50: 7.0 }));
    }

    #[test]
    fn answers_of_days_are_summed_up_as_those_of_a_minute() {
        let mut trips = RoundTrips::default();
        // 100 us and 200 us in turn, every millisecond for most of an hour.
        for at in 0..3_000_000 {
            trips.add(Duration::from_micros(100 + 100 * (at % 2)));
        }
        let Summary { avg, mdev, p50, .. } = trips.summary().unwrap();
        assert!((avg - 0.15).abs() < 1e-9 && (mdev - 0.05).abs() < 1e-9, "{avg} {mdev}");
        assert!((p50 / 0.1 - 1.0).abs() < 1.0 / 64.0, "{p50}");
    }

    #[test]
    fn nothing_on_rdma_says_what_is_on_tcp() {
        let row = |prog, netid: &str| Row {
            prog,
            vers: 1,
            netid: netid.into(),
            uaddr: "0.0.0.0.8.1".into(),
            owner: "superuser".into(),
        };
        let rows = [row(RPCBIND, "tcp"), row(400_000, "tcp"), row(400_001, "udp")];
        let there = Versions::of(&rows, "rdma");
        assert_eq!(there.first(), None);
        let text = there.nothing("h", Netid::Rdma, &rows);
        assert!(
            text.starts_with("no program is registered on netid rdma at h, but on tcp: 400000; "),
            "{text}"
        );
        let rows = [row(7, "rdma"), Row { vers: 4, ..row(7, "rdma") }];
        assert_eq!(Versions::of(&rows, "rdma").highest(7), Some(4));
    }
}
