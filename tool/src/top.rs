//! `rpcrdma top`: shows all processes that use the library, live, and the connections of one of them.

use std::io::{self, IsTerminal};
use std::process::{self, ExitCode};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table, TableState};
use ratatui::{DefaultTerminal, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::columns;
use crate::interrupt;
use crate::numbers::{bytes, time};
use crate::out::complain;
use crate::programs::Programs;
use crate::stat::{Rates, age, connection_count, connection_lines, in_use, names};
use crate::watch::{self, Figures, Latency, Refusal, difference};
use crate::words::within;
use rpcrdma::tool::latency::percentile;

/// Shows live what processes that use the library do, the busiest first.
///
/// Keys: q quits, s sorts by the next column, up and down choose, Enter shows the connections and procedures of one process, Esc
/// goes back, Ctrl-Z leaves the terminal to the shell.
///
/// Figures are for the time since the last look. BY/S: bytes a second, in messages and by RDMA Reads and Writes; CONNS:
/// connections; INUSE: credits in use; P50 and P99: the time that half of the calls, and 99 of a hundred, took at most. The
/// columns of connections are described in rpcrdma-stat(1). A narrow screen has fewer columns.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 it was ended by a key or a signal, 1 there is no terminal or it fails, 2 the command line \
                        was wrong."
)]
pub struct Args {
    /// Seconds between two looks.
    #[arg(short, long, default_value = "1", value_parser = seconds)]
    delay: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.1..=3_600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "a number of seconds from 0.1 to 3600".to_owned())
}

pub fn run(args: &Args) -> ExitCode {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        complain!("rpcrdma top: this needs a terminal; `rpcrdma stat --all 1` writes lines anywhere");
        return ExitCode::FAILURE;
    }
    // On a terminal that can only be written line by line, the screen would be a heap of escape sequences.
    if matches!(std::env::var("TERM").as_deref(), Ok("dumb")) {
        complain!(
            "rpcrdma top: this terminal has no screen (TERM=dumb); `rpcrdma stat --all 1` writes lines"
        );
        return ExitCode::FAILURE;
    }
    // Not in the loop below, which may be in the midst of writing to a terminal that does not take the output.
    let ended = interrupt::on(|_| {
        let _screen = SCREEN.lock();
        let _ = ratatui::try_restore();
        process::exit(0)
    });
    // Restores the terminal after a panic too.
    let outcome = ended.and_then(|()| ratatui::try_init()).and_then(|mut terminal| {
        let outcome = show(&mut terminal, args.delay);
        let _screen = SCREEN.lock();
        // If the terminal has gone, there is nothing to restore.
        let _ = ratatui::try_restore();
        // Dropping it would write once more, and panic if that fails.
        std::mem::forget(terminal);
        outcome
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain!("rpcrdma top: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Held by whoever writes to the terminal.
static SCREEN: Mutex<()> = Mutex::new(());

/// Whether there is input within that time.
///
/// # Errors
/// The terminal has gone. crossterm would then try to read from it again and again, for ever.
fn input(within: Duration) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut waited = [PollFd::new(&stdin, PollFlags::IN)];
    let within = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    match poll(&mut waited, Some(&within)) {
        // Perhaps the size of the terminal has changed.
        Err(Errno::INTR) => return Ok(true),
        done => done?,
    };
    let found = waited[0].revents();
    if found.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
        return Err(io::Error::other("the terminal has gone"));
    }
    Ok(found.contains(PollFlags::IN))
}

/// What to do after a key.
enum Then {
    Go,
    /// The shell takes over, until it calls this program back to the foreground.
    Stop,
    End,
}

/// Ctrl-Z: restores the terminal as it was, and sets it up again afterwards.
#[allow(unsafe_code)]
fn stopped() -> io::Result<DefaultTerminal> {
    let _screen = SCREEN.lock();
    ratatui::try_restore()?;
    // SAFETY: no preconditions. Returns when this program continues.
    unsafe { libc::raise(libc::SIGTSTP) };
    ratatui::try_init()
}

/// The columns that processes are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Calls,
    Connections,
    Median,
    Tail,
    Pid,
}

impl Sort {
    fn next(self) -> Sort {
        match self {
            Sort::Calls => Sort::Connections,
            Sort::Connections => Sort::Median,
            Sort::Median => Sort::Tail,
            Sort::Tail => Sort::Pid,
            Sort::Pid => Sort::Calls,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Sort::Calls => "calls/s",
            Sort::Connections => "connections",
            Sort::Median => "p50",
            Sort::Tail => "p99",
            Sort::Pid => "pid",
        }
    }
}

/// What is seen.
struct View {
    programs: Programs,
    /// Each with the figures of the previous look, if there are any.
    processes: Vec<(Figures, Option<Figures>)>,
    foreign: usize,
    /// Processes whose figures are not understood.
    unknown: u32,
    sort: Sort,
    chosen: Option<u32>,
    table: TableState,
    /// The process whose connections are shown.
    inside: Option<u32>,
    /// How many lines are scrolled past there.
    skipped: u16,
}

fn show(terminal: &mut DefaultTerminal, delay: Duration) -> io::Result<()> {
    let mut view = View {
        programs: Programs::read(),
        processes: Vec::new(),
        foreign: 0,
        unknown: 0,
        sort: Sort::Calls,
        chosen: None,
        table: TableState::default(),
        inside: None,
        skipped: 0,
    };
    loop {
        view.look()?;
        let until = Instant::now() + delay;
        loop {
            view.arrange();
            {
                let _screen = SCREEN.lock();
                terminal.draw(|frame| view.draw(frame))?;
            }
            let left = until.saturating_duration_since(Instant::now());
            match input(left.min(Duration::from_millis(200))) {
                Ok(true) => {
                    // All keys: crossterm keeps those that it has read already. There may be no whole key yet.
                    while event::poll(Duration::ZERO)? {
                        let Event::Key(key) = event::read()? else { continue };
                        match if key.kind == KeyEventKind::Press { view.key(key) } else { Then::Go } {
                            Then::Go => {}
                            Then::Stop => *terminal = stopped()?,
                            Then::End => return Ok(()),
                        }
                    }
                }
                Ok(_) if left.is_zero() => break,
                Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl View {
    /// Takes new figures.
    fn look(&mut self) -> io::Result<()> {
        let found = watch::processes()?;
        (self.foreign, self.unknown) = (found.foreign, 0);
        let before = std::mem::take(&mut self.processes);
        for process in found.watched {
            let figures = match process.figures() {
                Ok(figures) => figures,
                Err(why) => {
                    self.unknown += u32::from(matches!(why, Refusal::Unknown(_)));
                    continue;
                }
            };
            let before =
                before.iter().map(|(figures, _)| figures).find(|before| figures.follows(before)).cloned();
            self.processes.push((figures, before));
        }
        Ok(())
    }

    fn rates(&self, at: usize) -> Option<Rates> {
        let (now, before) = &self.processes[at];
        before.as_ref().map(|before| Rates::of(before, now))
    }

    /// Sorts, and keeps the chosen process chosen.
    fn arrange(&mut self) {
        let mut keyed: Vec<(f64, (Figures, Option<Figures>))> = Vec::new();
        for at in 0..self.processes.len() {
            let rates = self.rates(at);
            let percentile =
                |which: usize| rates.as_ref().and_then(|r| r.percentiles[which]).unwrap_or(0) as f64;
            let figures = &self.processes[at].0;
            let key = match self.sort {
                Sort::Calls => rates.as_ref().map_or(0.0, |rates| rates.calls + rates.served),
                Sort::Connections => connection_count(figures) as f64,
                Sort::Median => percentile(0),
                Sort::Tail => percentile(1),
                Sort::Pid => -f64::from(figures.pid),
            };
            keyed.push((key, self.processes[at].clone()));
        }
        keyed.sort_by(|(a, x), (b, y)| b.total_cmp(a).then(x.0.pid.cmp(&y.0.pid)));
        self.processes = keyed.into_iter().map(|(_, process)| process).collect();
        let at =
            self.chosen.and_then(|pid| self.processes.iter().position(|(figures, _)| figures.pid == pid));
        let at = at.or((!self.processes.is_empty()).then_some(0));
        self.table.select(at);
        self.chosen = at.map(|at| self.processes[at].0.pid);
    }

    /// What a key asks for.
    fn key(&mut self, key: KeyEvent) -> Then {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('q') => return Then::End,
            KeyCode::Char('c') if control => return Then::End,
            KeyCode::Char('z') if control => return Then::Stop,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Up => self.step(-1),
            KeyCode::Down => self.step(1),
            KeyCode::Enter => (self.inside, self.skipped) = (self.chosen, 0),
            KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => self.inside = None,
            _ => {}
        }
        Then::Go
    }

    fn step(&mut self, by: i16) {
        if self.inside.is_some() {
            self.skipped = self.skipped.saturating_add_signed(by);
            return;
        }
        let at = self.table.selected().unwrap_or(0).saturating_add_signed(by.into());
        if let Some((figures, _)) = self.processes.get(at) {
            self.chosen = Some(figures.pid);
        }
    }

    fn draw(&mut self, frame: &mut Frame) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        let keys = if self.inside.is_some() {
            "q quit  Esc back  up/down scroll"
        } else {
            "q quit  s sort  up/down choose  Enter connections"
        };
        frame.render_widget(Line::from(keys).style(Style::new().add_modifier(Modifier::DIM)), foot);
        let inside = self.inside.map(|pid| (pid, self.processes.iter().position(|(f, _)| f.pid == pid)));
        match inside {
            Some((pid, None)) => {
                frame.render_widget(
                    Paragraph::new(format!("process {pid} has ended, or shows nothing any more")),
                    head,
                );
            }
            Some((_, Some(at))) => {
                let (figures, before) = &self.processes[at];
                frame.render_widget(Paragraph::new(self.summary(at)), head);
                let lines = inside_lines(figures, before.as_ref(), &self.programs, body.width.into());
                let all = u16::try_from(lines.len()).unwrap_or(u16::MAX);
                let most = all.saturating_sub(body.height);
                self.skipped = self.skipped.min(most);
                frame.render_widget(Paragraph::new(lines).scroll((self.skipped, 0)), body);
            }
            None => {
                frame.render_widget(Paragraph::new(self.title()), head);
                self.draw_processes(frame, body);
            }
        }
    }

    fn title(&self) -> Vec<Line<'static>> {
        let connections: u64 =
            self.processes.iter().map(|(figures, _)| connection_count(figures)).fold(0, u64::saturating_add);
        let rates = (0..self.processes.len()).filter_map(|at| self.rates(at));
        let (calls, served) = rates.fold((0.0, 0.0), |(c, s), rates| (c + rates.calls, s + rates.served));
        let first = format!(
            "rpcrdma top: {} processes, {connections} connections, {calls:.0} calls/s, {served:.0} served/s, by {}",
            self.processes.len(),
            self.sort.name()
        );
        let mut second = Vec::new();
        if self.unknown > 0 {
            second.push(format!("{} not understood: see `rpcrdma stat`", self.unknown));
        }
        if self.foreign > 0 {
            second.push(watch::foreign_text(self.foreign));
        }
        if second.is_empty() && self.processes.is_empty() {
            second.push("no process with a connection over rdma".to_owned());
        }
        let second = second.join("; ");
        vec![Line::from(first), Line::from(second)]
    }

    fn summary(&self, at: usize) -> Vec<Line<'static>> {
        let figures = &self.processes[at].0;
        let rates = self.rates(at);
        let rate = |of: fn(&Rates) -> f64| {
            rates.as_ref().map_or_else(|| "-".to_owned(), |r| format!("{:.0}", of(r)))
        };
        vec![
            Line::from(format!(
                "{}, process {} of {}, librpcrdma {}, {}",
                figures.program,
                figures.pid,
                figures.user,
                figures.library,
                age(figures.since)
            )),
            Line::from(format!(
                "{} connections, {} calls/s, {} served/s, {} errors",
                connection_count(figures),
                rate(|rates| rates.calls),
                rate(|rates| rates.served),
                figures.counter("errors_sent").saturating_add(figures.counter("errors_received"))
            )),
        ]
    }

    fn draw_processes(&mut self, frame: &mut Frame, area: ratatui::layout::Rect) {
        let columns = fitting(area.width);
        let rows: Vec<Row> = (0..self.processes.len())
            .map(|at| {
                let figures = &self.processes[at].0;
                let rates = self.rates(at);
                let rate = |of: fn(&Rates) -> f64| {
                    rates.as_ref().map_or_else(|| "-".to_owned(), |rates| format!("{:.0}", of(rates)))
                };
                let percentile =
                    |which: usize| time(rates.as_ref().and_then(|rates| rates.percentiles[which]));
                let cell = |column: Column| match column {
                    Column::Pid => figures.pid.to_string(),
                    Column::User => within(&figures.user, column.width().into()),
                    Column::Program => within(&figures.program, column.width().into()),
                    Column::Calls => rate(|rates| rates.calls),
                    Column::Served => rate(|rates| rates.served),
                    Column::Bytes => {
                        rates.as_ref().map_or_else(|| "-".to_owned(), |r| bytes(r.all_bytes() as u64))
                    }
                    Column::Connections => connection_count(figures).to_string(),
                    Column::InUse => {
                        figures.connections.iter().map(in_use).fold(0, u64::saturating_add).to_string()
                    }
                    Column::Median => percentile(0),
                    Column::Tail => percentile(1),
                };
                Row::new(columns.iter().map(|column| column.aligned(&cell(*column))))
            })
            .collect();
        let title = columns.iter().map(|column| column.aligned(column.title()));
        let title: Vec<String> = title.collect();
        let widths = columns.iter().map(|column| Constraint::Length(column.width()));
        let table = Table::new(rows, widths)
            .header(Row::new(title).style(Style::new().add_modifier(Modifier::BOLD)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut self.table);
    }
}

/// The columns of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Pid,
    User,
    Program,
    Calls,
    Served,
    Bytes,
    Connections,
    InUse,
    Median,
    Tail,
}

impl Column {
    /// All columns, in order.
    const ALL: [Column; 10] = [
        Column::Pid,
        Column::User,
        Column::Program,
        Column::Calls,
        Column::Served,
        Column::Bytes,
        Column::Connections,
        Column::InUse,
        Column::Median,
        Column::Tail,
    ];

    /// Which of them a narrow screen leaves out, the first one first; it never leaves out the others.
    const LEAVE: [Column; 8] = [
        Column::User,
        Column::InUse,
        Column::Bytes,
        Column::Connections,
        Column::Tail,
        Column::Median,
        Column::Served,
        Column::Program,
    ];

    fn title(self) -> &'static str {
        match self {
            Column::Pid => "PID",
            Column::User => "USER",
            Column::Program => "PROGRAM",
            Column::Calls => "CALLS/S",
            Column::Served => "SERVED/S",
            Column::Bytes => "BY/S",
            Column::Connections => "CONNS",
            Column::InUse => "INUSE",
            Column::Median => "P50",
            Column::Tail => "P99",
        }
    }

    fn width(self) -> u16 {
        match self {
            Column::User => 10,
            Column::Program => 16,
            Column::Calls | Column::Served => 9,
            Column::Connections | Column::InUse => 6,
            Column::Pid | Column::Bytes | Column::Median | Column::Tail => 8,
        }
    }

    /// Names are left-aligned, numbers right-aligned.
    fn aligned(self, text: &str) -> String {
        let width = self.width().into();
        match self {
            Column::User | Column::Program => format!("{text:<width$}"),
            _ => format!("{text:>width$}"),
        }
    }
}

/// The columns that a screen has room for, each whole: half a number is a different number.
fn fitting(width: u16) -> Vec<Column> {
    let mut columns = Column::ALL.to_vec();
    // With a space between columns.
    let needed = |columns: &[Column]| columns.iter().map(|column| column.width() + 1).sum::<u16>() - 1;
    let mut leave = Column::LEAVE.iter();
    while needed(&columns) > width
        && let Some(column) = leave.next()
    {
        columns.retain(|other| other != column);
    }
    columns
}

const PROCEDURES: [columns::Column; 6] = [
    columns::Column::name("PROGRAM", 16, 6),
    columns::Column::name("PROCEDURE", 12, 4),
    columns::Column::name("END", 6, 1),
    columns::Column::number("CALLS/S", 9, 5),
    columns::Column::number("P50", 9, 3),
    columns::Column::number("P99", 9, 2),
];

/// The connections and procedures of a process; times are those since the previous look.
fn inside_lines(
    figures: &Figures,
    before: Option<&Figures>,
    programs: &Programs,
    screen: usize,
) -> Vec<Line<'static>> {
    let titled = |lines: Vec<String>| {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut lines = lines.into_iter().map(Line::from);
        lines.next().map(|title| title.style(bold)).into_iter().chain(lines)
    };
    let mut lines: Vec<Line> = titled(connection_lines(&figures.connections, Some(screen))).collect();
    if figures.without_slot > 0 {
        lines.push(Line::from(format!("and {} more, which have no room here", figures.without_slot)));
    }
    lines.push(Line::default());
    let row = |latency: &Latency| {
        let same = |other: &&Latency| (other.numbers, other.served) == (latency.numbers, latency.served);
        let earlier = before.and_then(|before| before.latencies.iter().find(same));
        let buckets = difference(&latency.buckets, earlier.map_or(&[], |earlier| &earlier.buckets));
        let calls = buckets.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
        let seconds =
            before.map_or(0.0, |before| figures.at.saturating_duration_since(before.at).as_secs_f64());
        let rate = if seconds > 0.0 { format!("{:.0}", calls as f64 / seconds) } else { "-".to_owned() };
        let (program, procedure) = names(latency.numbers, programs);
        let end = if latency.served { "server" } else { "client" };
        let [p50, p99] = [0.5, 0.99].map(|part| time(percentile(&buckets, part)));
        [program, procedure, end.to_owned(), rate, p50, p99]
    };
    let rows: Vec<_> = figures.latencies.iter().map(row).collect();
    lines.extend(titled(columns::lines(&PROCEDURES, &rows, Some(screen))));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_is_reached_by_the_key() {
        let mut sort = Sort::Calls;
        let mut seen = Vec::new();
        while !seen.contains(&sort) {
            seen.push(sort);
            sort = sort.next();
        }
        assert_eq!(seen.len(), 5);
    }

    #[test]
    fn a_narrow_screen_has_fewer_columns_and_each_is_whole() {
        assert_eq!(fitting(97), Column::ALL);
        assert_eq!(fitting(96).len(), 9);
        assert_eq!(fitting(80), {
            let mut most = Column::ALL.to_vec();
            most.retain(|column| ![Column::User, Column::InUse].contains(column));
            most
        });
        for width in 18..200 {
            let used: u16 = fitting(width).iter().map(|column| column.width() + 1).sum();
            assert!(used <= width + 1, "{width}");
        }
        assert_eq!(fitting(0), [Column::Pid, Column::Calls]);
    }

    #[test]
    fn delays_have_limits() {
        assert_eq!(seconds("2"), Ok(Duration::from_secs(2)));
        assert!(["0", "x", "1e9", "nan"].iter().all(|wrong| seconds(wrong).is_err()));
    }
}
