//! `rpcrdma decode`: the library's log at level wire, or a capture of packets, call by call.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::ValueHint;
use rustix::fs::{FileType, fstat};

mod capture;
mod diagram;
mod log;
mod show;
mod trace;

use crate::interrupt;
use crate::out::{self, complain};
use crate::picture::can_be_saved;
use crate::programs::Programs;
use crate::words;
use log::{Line, Refused};
use show::Document;
use trace::{Reader, Trace, Wanted};

/// Reads a log of level wire (RPCRDMA_LOG=wire) or a capture of packets, call by call.
///
/// A log may be of several processes and connections. For each connection its calls are printed, and for each call
/// everything that belongs to it: the message with its chunks, the RDMA Reads and Writes, what is invalidated, the reply,
/// and the time of each. If both ends have written to the log, a call shows what both have seen. `>` goes to the end that is
/// called.
///
/// From a capture, pcap or pcapng as tcpdump(8) and Wireshark write it, it reads iWARP: what software iWARP and iWARP
/// adapters send over TCP, from the beginning of a connection on. Each connection is shown as its client sees it. Missing
/// segments are reported, and the messages in them are lost; wrong CRCs are reported too.
///
/// What is not understood is skipped; standard error tells how many lines that were, and which was the first. When it reads
/// from a pipe, Ctrl-C ends the program that writes there, and what has come until then is shown.
#[derive(clap::Args)]
#[command(after_long_help = HELP)]
pub struct Args {
    /// The log or capture; without it, standard input.
    #[arg(value_hint = ValueHint::FilePath)]
    file: Option<PathBuf>,
    /// Prints one JSON document; times are microseconds since 1970.
    #[arg(long)]
    json: bool,
    /// Draws a call as a sequence diagram, and prints nothing: the first call, if neither --xid nor --call chooses another.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    svg: Option<PathBuf>,
    /// Shows only the calls with this XID.
    #[arg(long, value_parser = xid)]
    xid: Option<u32>,
    /// Shows only the call with this number, or those from N to M: the numbers are those of the whole output.
    #[arg(long, value_name = "N[-M]", value_parser = range, conflicts_with = "xid")]
    call: Option<(usize, usize)>,
}

const HELP: &str = "\
Exit status: 0 calls were found; 1 there are none, or a file cannot be read or written; 2 the command line was wrong.

Examples:
  RPCRDMA_LOG=wire RPCRDMA_LOG_FILE=/tmp/log rpcrdma run showmount -e filer
  rpcrdma decode /tmp/log
  tcpdump -i eth0 -w /tmp/capture port 20049
  rpcrdma decode /tmp/capture
  tcpdump -i eth0 -U -w - port 20049 | rpcrdma decode
  rpcrdma decode --call 2 --svg call.svg /tmp/log
  rpcrdma decode --json /tmp/log | jq '.calls[] | select(.latency_us > 1000)'";

fn xid(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0x");
    let xid = digits.map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok());
    xid.ok_or_else(|| "an XID, such as 0x5b0a4432".into())
}

fn range(text: &str) -> Result<(usize, usize), String> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    match (from.parse(), to.parse()) {
        (Ok(from), Ok(to)) if 1 <= from && from <= to => Ok((from, to)),
        _ => Err("a number from 1 on, or two as in 3-5".into()),
    }
}

pub fn run(args: &Args) -> ExitCode {
    match decode(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            complain!("rpcrdma decode: {}", words::shown(&text));
            ExitCode::FAILURE
        }
    }
}

fn decode(args: &Args) -> Result<(), String> {
    if let Some(path) = &args.svg {
        // Now, not only after everything has come through a pipe.
        can_be_saved(path).map_err(|error| format!("{}: {}", path.display(), words::reason(&error)))?;
    }
    let (name, file) = match &args.file {
        Some(path) => {
            let file =
                File::open(path).map_err(|error| format!("{}: {}", path.display(), words::reason(&error)))?;
            (path.display().to_string(), file)
        }
        None => {
            let kind = fstat(io::stdin()).map(|stat| FileType::from_raw_mode(stat.st_mode));
            if kind.is_ok_and(|kind| kind == FileType::Fifo) {
                leave_interrupts_to_the_writer().map_err(|error| format!("signals: {error}"))?;
            }
            let name = "standard input";
            let copy = io::stdin().as_fd().try_clone_to_owned();
            (name.to_owned(), copy.map_err(|error| format!("{name}: {}", words::reason(&error)))?.into())
        }
    };
    let mut input = BufReader::new(file);
    let is_file = input.get_ref().metadata().is_ok_and(|found| found.is_file());
    let start = if is_file { input.stream_position().ok() } else { None };
    let wanted = match (args.xid, args.call) {
        (Some(xid), _) => Wanted::Xid(xid),
        (None, Some((from, to))) => Wanted::Numbers(from, to),
        // A picture shows the first call.
        (None, None) if args.svg.is_some() => Wanted::Numbers(1, 1),
        (None, None) => Wanted::All,
    };
    let trace = read(input, start, wanted);
    READ.get_or_init(Instant::now);
    let trace = trace.map_err(|error| format!("{name}: {}", words::reason(&error)))?;
    for text in show::refused(&trace) {
        complain!("rpcrdma decode: {text}");
    }
    if trace.calls.is_empty() {
        if trace.is_capture {
            let _ = show::text(&trace, &Programs::read(), &mut io::stderr());
            return Err(format!(
                "{name}: no call over iWARP in it; shared memory leaves none on the wire (RPCRDMA_PROVIDER=iwarp)"
            ));
        }
        return Err(format!(
            "{name}: no call in it: is it a capture, or a log that RPCRDMA_LOG=wire has made?"
        ));
    }
    if trace.shown.is_empty() {
        return Err(format!("{name}: no such call among {}", trace.calls.len()));
    }
    let names = Programs::read();
    if let Some(path) = &args.svg {
        let some = trace.shown.len();
        if some > DRAWN {
            return Err(format!("{some} calls are too many for a picture: at most {DRAWN}"));
        }
        let picture = diagram::draw(&trace, &trace.shown, &names)?;
        return picture.save(path).map_err(|error| format!("{}: {}", path.display(), words::reason(&error)));
    }
    let mut out = BufWriter::new(out::stdout());
    let written = if args.json {
        out::json(&Document::new(&trace, &names), true)
    } else {
        show::text(&trace, &names, &mut out)
    };
    written.and_then(|()| out.flush()).map_err(|error| error.to_string())
}

/// When everything had been read.
static READ: OnceLock<Instant> = OnceLock::new();

/// How long after the end of the input a Ctrl-C counts as the writer's: another thread waits for it, and may see it only
/// after the end that it has caused.
const OF_THE_WRITER: Duration = Duration::from_secs(1);

/// Ctrl-C ends the program that writes into the pipe, such as tcpdump(8), and so the input, which is then shown. A second
/// one ends this program too.
fn leave_interrupts_to_the_writer() -> io::Result<()> {
    interrupt::on(|status| {
        if status != 128 + libc::SIGINT || READ.get().is_some_and(|end| end.elapsed() > OF_THE_WRITER) {
            process::exit(status);
        }
    })
}

/// Most calls of one picture.
const DRAWN: usize = 32;

/// The longest line that is looked at: the library writes none of more than PIPE_BUF bytes.
const LONGEST: u64 = 8192;

/// Reads a log or a capture to its end. If its lines are in the order of their times, no line is kept. `start`: where the
/// input begins, if it can be read again from there; if it cannot, lines are kept until they can be put in order.
///
/// # Errors
/// Those of reading the file.
fn read<R: BufRead + Seek>(mut input: R, start: Option<u64>, wanted: Wanted) -> io::Result<Trace> {
    if let Some(start) = start {
        let mut reader = Reader::new(wanted);
        let mut latest = log::Time::MIN;
        let told = lines(&mut input, |line| {
            let in_order = line.at.is_none_or(|at| at >= latest);
            latest = line.at.unwrap_or(latest);
            if in_order {
                reader.take(line);
            }
            in_order
        })?;
        if let Some(told) = told {
            return Ok(told.of(reader.trace()));
        }
        input.seek(SeekFrom::Start(start))?;
    }
    let mut kept = Vec::new();
    let told = lines(&mut input, |line| {
        kept.push(line);
        true
    })?;
    let trace = Trace::read(kept, wanted);
    Ok(told.map_or_else(Trace::default, |told| told.of(trace)))
}

/// What is known of a log as a whole.
struct Told {
    is_capture: bool,
    count: u64,
    refused: BTreeMap<Refused, (u64, u64, String)>,
}

impl Told {
    fn of(self, trace: Trace) -> Trace {
        Trace { is_capture: self.is_capture, lines: self.count, refused: self.refused, ..trace }
    }
}

/// Gives `take` each line of a log, or of what a capture tells, as long as it returns true. `None`: it has returned false.
///
/// # Errors
/// Those of reading the file.
fn lines(mut input: impl BufRead, mut take: impl FnMut(Line) -> bool) -> io::Result<Option<Told>> {
    if capture::packets::is_capture(input.fill_buf()?) {
        let packets = capture::read(input, take)?;
        return Ok(packets.map(|count| Told { is_capture: true, count, refused: BTreeMap::new() }));
    }
    let mut refused = BTreeMap::new();
    let mut count = 0;
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        if (&mut input).take(LONGEST).read_until(b'\n', &mut bytes)? == 0 {
            break;
        }
        count += 1;
        let ended = bytes.ends_with(b"\n");
        let long = !ended && bytes.len() as u64 == LONGEST;
        if long {
            input.skip_until(b'\n')?;
        }
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_end_matches('\n');
        if text.is_empty() {
            continue;
        }
        let why = match log::parse(text) {
            Ok(line) if !long => {
                if !take(line) {
                    return Ok(None);
                }
                continue;
            }
            Ok(_) => Refused::Foreign,
            // The log is being written, or was cut off.
            Err(Refused::Unknown) if !ended => Refused::Cut,
            Err(Refused::Foreign) if !ended && log::is_beginning(text) => Refused::Cut,
            Err(why) => why,
        };
        let entry = refused.entry(why).or_insert_with(|| (0, count, text.chars().take(200).collect()));
        entry.0 += 1;
    }
    Ok(Some(Told { is_capture: false, count, refused }))
}

#[cfg(test)]
mod tests;
