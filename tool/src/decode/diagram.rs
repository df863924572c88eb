//! Calls as a sequence diagram: the client on the left, the server on the right, one step below the other. Heights do not
//! follow times, for a Read may take a thousand times as long as a Send; times stand beside the steps, at the end that has
//! seen them.

use super::log::{Message, Time};
use super::show::{credits, details, is_back, since, title};
use super::trace::{Call, Connection, Kind, Step, Trace};
use crate::numbers::grouped;
use crate::picture::{Anchor, Picture, Style, colour, width};
use crate::programs::Programs;

const WIDTH: f64 = 820.0;
const LEFT: f64 = 130.0;
const RIGHT: f64 = WIDTH - 130.0;
const MIDDLE: f64 = WIDTH / 2.0;
const HEAD: f64 = 132.0;

const STRONG: Style = Style::new(13.0, colour::INK).at(Anchor::Middle).bold();
const PLAIN: Style = Style::new(11.5, colour::INK).at(Anchor::Middle);
const TIME: Style = Style::new(11.0, colour::FAINT);

/// Draws calls of one connection.
///
/// # Errors
/// The calls are of several connections.
pub fn draw(trace: &Trace, chosen: &[usize], names: &Programs) -> Result<Picture, String> {
    let calls: Vec<&Call> = chosen.iter().map(|&at| &trace.calls[at]).collect();
    let Some(first) = calls.first() else { return Err("no call to draw".into()) };
    if calls.iter().any(|call| call.connection(trace) != first.connection(trace)) {
        return Err("these calls are of several connections: a picture shows one".into());
    }
    let end = |end: Option<usize>| end.map(|end| &trace.connections[end]);
    let mut steps: Vec<(&Call, &Step)> =
        calls.iter().flat_map(|call| call.steps.iter().map(move |step| (*call, step))).collect();
    // A stable sort: each call's own steps stay in order.
    steps.sort_by_key(|(_, step)| step.at.or(step.done));
    let began = steps.iter().find_map(|(_, step)| step.at.or(step.done));
    let name = |call: &Call| {
        let name =
            call.program.map_or_else(|| format!("xid {:#010x}", call.xid), |program| names.call(program));
        if is_back(trace, call) && calls.len() == 1 { format!("{name}, called back") } else { name }
    };
    let of = |call: &Call| (calls.len() > 1).then(|| name(call));
    let height = HEAD + steps.iter().map(|(call, step)| tall(step, of(call).as_deref())).sum::<f64>() + 46.0;

    let heading = match calls.as_slice() {
        [_] => name(first),
        several => format!("{} calls of one connection", several.len()),
    };
    let mut picture = Picture::new(WIDTH, height, &heading);
    picture.text(24.0, 32.0, Style::new(17.0, colour::INK).bold(), &fitting(&heading, 19.0, WIDTH - 48.0));
    picture.text(24.0, 52.0, TIME, &fitting(&about(trace, &calls), TIME.size, WIDTH - 48.0));

    // The client, which has opened the connection, stands on the left.
    let (client, server) = match is_back(trace, first) {
        true => (first.callee, first.caller),
        false => (first.caller, first.callee),
    };
    for (x, word, end) in [(LEFT, "client", end(client)), (RIGHT, "server", end(server))] {
        picture.line((x, HEAD - 14.0), (x, height - 26.0), colour::FAINT, 1.2, true);
        picture.box_((x - 70.0, HEAD - 58.0), (140.0, 44.0), colour::PALE, Some(colour::FAINT), 5.0);
        picture.text(x, HEAD - 39.0, STRONG, word);
        let process = |end: &Connection| match end.process {
            0 => end.place(),
            process => format!("process {process}"),
        };
        picture.text(x, HEAD - 23.0, TIME.at(Anchor::Middle), &end.map_or_else(String::new, process));
    }
    let mut y = HEAD;
    for (call, step) in steps {
        let of = of(call);
        draw_step(&mut picture, step, y, !is_back(trace, call), began, of.as_deref());
        y += tall(step, of.as_deref());
    }
    Ok(picture)
}

/// What the diagram is of, in a line.
fn about(trace: &Trace, calls: &[&Call]) -> String {
    let mut parts = Vec::new();
    let connection = &trace.connections[calls[0].connection(trace)];
    if let [call] = calls {
        parts.push(format!("xid {:#010x}", call.xid));
        if let Some(took) = call.took() {
            parts.push(format!("{} \u{b5}s", grouped(took.max(0).unsigned_abs())));
        }
        match (&call.error, call.replied) {
            (Some(error), _) => parts.push(format!("failed: {error}")),
            (None, false) => parts.push("no reply".into()),
            (None, true) => {}
        }
    }
    parts.extend(connection.how.as_deref().map(str::to_owned));
    parts.join(", ")
}

/// The height of a step. `of`: what is called, if a picture has several calls.
fn tall(step: &Step, of: Option<&str>) -> f64 {
    match &step.kind {
        Kind::Call(message) | Kind::Reply(message) => {
            let call = matches!(step.kind, Kind::Call(_));
            40.0 + 15.0 * lines(message, call, of).len() as f64
        }
        Kind::Read(_) => 62.0,
        Kind::Write(_) => 50.0,
        Kind::Invalidated { .. } => 26.0,
    }
}

/// The lines above a message's arrow, below its name.
fn lines(message: &Message, call: bool, of: Option<&str>) -> Vec<String> {
    let room = RIGHT - LEFT - 24.0;
    let mut lines: Vec<String> = of.map(|of| fitting(of, PLAIN.size, room)).into_iter().collect();
    for part in
        [credits(message, call)].into_iter().chain(details(message, call)).filter(|part| !part.is_empty())
    {
        match lines.last_mut() {
            Some(line) if width(line, PLAIN.size) + width(&part, PLAIN.size) + 16.0 < room => {
                line.push_str("; ");
                line.push_str(&part);
            }
            _ => lines.push(fitting(&part, PLAIN.size, room)),
        }
    }
    lines
}

fn draw_step(
    picture: &mut Picture,
    step: &Step,
    y: f64,
    forward: bool,
    began: Option<Time>,
    of: Option<&str>,
) {
    let (caller, callee) = if forward { (LEFT, RIGHT) } else { (RIGHT, LEFT) };
    let inset = |from: f64, to: f64| (from + 2.0 * (to - from).signum(), to - 2.0 * (to - from).signum());
    match &step.kind {
        Kind::Call(message) | Kind::Reply(message) => {
            let call = matches!(step.kind, Kind::Call(_));
            let (from, to) = if call { (caller, callee) } else { (callee, caller) };
            let ink = if message.is_error() { colour::RED } else { colour::BLUE };
            let word = match (call, forward) {
                (true, true) => "Call",
                (true, false) => "Call back",
                (false, true) => "Reply",
                (false, false) => "Reply to the call back",
            };
            let text = format!("{word}: {}", title(message));
            picture.text(MIDDLE, y + 14.0, Style { colour: ink, ..STRONG }, &text);
            let mut at = y + 14.0;
            for line in lines(message, call, of) {
                at += 15.0;
                picture.text(MIDDLE, at, PLAIN, &line);
            }
            let level = at + 9.0;
            let (x1, x2) = inset(from, to);
            picture.arrow((x1, level), (x2, level), ink, 1.6, false);
            time(picture, from, level, began, step.at);
            time(picture, to, level, began, step.done);
        }
        Kind::Read(segment) => {
            // The callee asks, and the caller's device answers.
            let text =
                format!("RDMA Read: {} bytes from {:#010x}", grouped(segment.length.into()), segment.handle);
            picture.text(MIDDLE, y + 14.0, Style { colour: colour::ORANGE, ..STRONG }, &text);
            let (x1, x2) = inset(callee, caller);
            picture.arrow((x1, y + 24.0), (x2, y + 24.0), colour::ORANGE, 1.2, true);
            picture.arrow((x2, y + 40.0), (x1, y + 40.0), colour::ORANGE, 4.5, false);
            time(picture, callee, y + 24.0, began, step.at);
            time(picture, callee, y + 40.0, began, step.done);
        }
        Kind::Write(segment) => {
            let text =
                format!("RDMA Write: {} bytes to {:#010x}", grouped(segment.length.into()), segment.handle);
            picture.text(MIDDLE, y + 14.0, Style { colour: colour::GREEN, ..STRONG }, &text);
            let (x1, x2) = inset(callee, caller);
            picture.arrow((x1, y + 27.0), (x2, y + 27.0), colour::GREEN, 4.5, false);
            time(picture, callee, y + 27.0, began, step.at);
        }
        Kind::Invalidated { handle, caller: by_caller } => {
            let x = if *by_caller { caller } else { callee };
            let (anchor, aside) = if x == LEFT { (Anchor::Start, 10.0) } else { (Anchor::End, -10.0) };
            picture.box_((x - 3.5, y + 6.5), (7.0, 7.0), colour::PURPLE, None, 3.5);
            let style = Style { colour: colour::PURPLE, ..PLAIN }.at(anchor);
            picture.text(x + aside, y + 14.0, style, &format!("{handle:#010x} is invalidated"));
            time(picture, x, y + 10.0, began, step.at);
        }
    }
}

/// Writes a time beside an end, on the outside.
fn time(picture: &mut Picture, x: f64, y: f64, began: Option<Time>, at: Option<Time>) {
    let text = since(began, at).replace("us", "\u{b5}s");
    let (anchor, aside) = if x == LEFT { (Anchor::End, -10.0) } else { (Anchor::Start, 10.0) };
    picture.text(x + aside, y + 4.0, TIME.at(anchor), &text);
}

/// As much of a text as there is room for.
fn fitting(text: &str, size: f64, room: f64) -> String {
    if width(text, size) <= room {
        return text.to_owned();
    }
    let most = (room / width("x", size)) as usize;
    text.chars().take(most.saturating_sub(1)).chain(['\u{2026}']).collect()
}
