//! Logs of real programs (tool/tests/logs), as they are and with whatever can be wrong with them.

use std::io::Cursor;

use super::show;
use super::trace::{Call, Kind, Role};
use super::*;

const CALL_BACK: &str = include_str!("../../tests/logs/call-back.log");
const CHUNKS: &str = include_str!("../../tests/logs/chunks.log");

fn trace(text: &str) -> Trace {
    read(Cursor::new(text), Some(0), Wanted::All).unwrap()
}

fn kinds(call: &Call) -> String {
    let letter = |step: &trace::Step| match step.kind {
        Kind::Call(_) => 'c',
        Kind::Read(_) => 'r',
        Kind::Write(_) => 'w',
        Kind::Reply(_) => 'R',
        Kind::Invalidated { .. } => 'i',
    };
    call.steps.iter().map(letter).collect()
}

/// Everything in a trace, except what depends on the order of ends.
fn digest(trace: &Trace) -> Vec<String> {
    let mut calls: Vec<String> = trace
        .calls
        .iter()
        .map(|call| {
            let process = |end: Option<usize>| end.map(|end| trace.connections[end].process);
            format!(
                "{:x} {:?} {:?} {:?} {} {:?}",
                call.xid,
                process(call.caller),
                process(call.callee),
                call.program,
                kinds(call),
                call.took()
            )
        })
        .collect();
    calls.sort();
    calls
}

fn printed(trace: &Trace) -> String {
    let mut out = Vec::new();
    show::text(trace, &Programs::read(), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn both_ends_of_calls_and_calls_back_are_found() {
    let trace = trace(CALL_BACK);
    assert!(trace.refused.is_empty(), "{:?}", trace.refused);
    assert_eq!((trace.connections.len(), trace.calls.len()), (4, 6));
    assert!(trace.connections.iter().all(|connection| connection.other.is_some()));
    assert!(trace.calls.iter().all(|call| call.replied && call.caller.is_some() && call.callee.is_some()));
    let back: Vec<&Call> = trace.calls.iter().filter(|call| show::is_back(&trace, call)).collect();
    let [back] = back.as_slice() else { panic!("{back:?}") };
    assert_eq!((back.xid, back.program, back.reply_bytes), (0x92d08e1e, Some([536893252, 1, 1]), Some(24)));
    assert_eq!(trace.connections[back.caller.unwrap()].role, Some(Role::Server));
    // 19:09:02.881388 to 02.885216.
    assert_eq!(back.took(), Some(3828));
    let text = printed(&trace);
    assert!(text.contains("lines: 52; connections: 2; calls: 6, without a reply: 0"), "{text}");
    assert!(text.contains("process 4224: closed: the peer closed the connection"), "{text}");
}

#[test]
fn reads_writes_and_invalidations_belong_to_their_calls() {
    let trace = trace(CHUNKS);
    let [write, read] = trace.calls.as_slice() else { panic!("{:?}", trace.calls) };
    assert_eq!((kinds(write).as_str(), kinds(read).as_str()), ("crRii", "cwR"));
    let Kind::Read(segment) = &write.steps[1].kind else { panic!() };
    assert_eq!(u64::from(segment.length), write.call_bytes.unwrap());
    assert!(write.steps[1].done > write.steps[1].at);
    let Kind::Write(segment) = &read.steps[1].kind else { panic!() };
    assert_eq!(u64::from(segment.length), read.reply_bytes.unwrap());
    let Kind::Reply(reply) = &read.steps[2].kind else { panic!() };
    assert_eq!(reply.invalidates, Some(segment.handle));
    let text = printed(&trace);
    assert!(text.contains("perf 1 WRITE") && text.contains("RDMA Write of 262,172 bytes"), "{text}");
}

#[test]
fn the_order_of_logs_does_not_matter_and_one_end_is_enough() {
    for log in [CALL_BACK, CHUNKS] {
        let whole = trace(log);
        let process = |line: &&str| line.split(['[', ']']).nth(1).map(str::to_owned);
        let mut processes: Vec<String> = log.lines().filter_map(|line| process(&line)).collect();
        processes.sort();
        processes.dedup();
        let part = |of: &String| -> String {
            log.lines()
                .filter(|line| process(line).as_ref() == Some(of))
                .map(|line| format!("{line}\n"))
                .collect()
        };
        let again: String = processes.iter().map(part).collect();
        assert_eq!(digest(&trace(&again)), digest(&whole));
        let reversed: String = processes.iter().rev().map(part).collect();
        assert_eq!(digest(&trace(&reversed)), digest(&whole));
        let parts: usize = processes.iter().map(|of| trace(&part(of)).calls.len()).sum();
        assert_eq!(parts, 2 * whole.calls.len());
        let one = trace(&part(&processes[0]));
        assert!(one.calls.iter().all(|call| call.replied && call.caller.is_some() != call.callee.is_some()));
        // The README's form.
        let bare: String = log.lines().map(|line| format!("{}\n", line.split_once(' ').unwrap().1)).collect();
        let bare = trace(&bare);
        assert_eq!(
            bare.calls.iter().map(kinds).collect::<Vec<_>>(),
            whole.calls.iter().map(kinds).collect::<Vec<_>>()
        );
    }
}

#[test]
fn a_log_that_one_can_go_back_in_and_one_that_comes_through_a_pipe_tell_the_same() {
    // In order; and out of order, with another log after it, from the midst of a file on.
    let twice = format!("{CHUNKS}{CALL_BACK}nonsense\n{CHUNKS}");
    for log in [CHUNKS, CALL_BACK, &twice] {
        let mut file = Cursor::new(format!("of another time\n{log}"));
        file.set_position(16);
        let back = read(file, Some(16), Wanted::All).unwrap();
        let pipe = read(Cursor::new(log), None, Wanted::All).unwrap();
        assert_eq!(printed(&back), printed(&pipe));
        assert_eq!(show::refused(&back), show::refused(&pipe));
    }
}

#[test]
fn of_calls_that_nobody_asks_for_there_are_no_steps() {
    let all = trace(CALL_BACK);
    for (at, call) in all.calls.iter().enumerate() {
        for wanted in [Wanted::Numbers(at + 1, at + 1), Wanted::Xid(call.xid)] {
            for start in [None, Some(0)] {
                let some = read(Cursor::new(CALL_BACK), start, wanted).unwrap();
                assert_eq!(some.shown, [at]);
                assert!(some.calls.iter().enumerate().all(|(one, call)| one == at || call.steps.is_empty()));
                // Otherwise as in the whole, down to the numbers and to which ends belong together.
                let mut whole = trace(CALL_BACK);
                whole.shown = vec![at];
                assert_eq!(printed(&some), printed(&whole));
            }
        }
    }
}

#[test]
fn the_longest_lists_are_those_of_the_library() {
    let log = |chunks: usize| {
        let writes = "[] ".repeat(chunks);
        format!("rpcrdma[1] wire: fd 3 > RDMA_MSG xid 0x1 credits 1 reads [] writes [{writes}] reply none\n")
    };
    assert_eq!(trace(&log(8)).calls.len(), 1);
    assert_eq!(trace(&log(100)).refused.keys().collect::<Vec<_>>(), [&Refused::Unknown]);
}

#[test]
fn what_is_passed_over_is_named() {
    let long = "x".repeat(3 * LONGEST as usize);
    let cut = &CHUNKS[..CHUNKS.len() - 40];
    let cut = &cut[..cut.rfind("credits").unwrap() + 3];
    let text = format!("some words\n{long}\nrpcrdma[1] wire: fd 1 ? what\n{CALL_BACK}{cut}");
    let trace = trace(&text);
    let told: Vec<(Refused, u64, u64)> =
        trace.refused.iter().map(|(why, (lines, first, _))| (*why, *lines, *first)).collect();
    let lines = text.lines().count() as u64;
    assert_eq!(told, [(Refused::Foreign, 2, 1), (Refused::Cut, 1, lines), (Refused::Unknown, 1, 3)]);
    assert!(show::refused(&trace)[0].contains("line 1 is the first: some words"));
}

#[test]
fn a_log_that_is_cut_anywhere_has_no_line_of_others() {
    let bare: String = CHUNKS.lines().map(|line| format!("{}\n", line.split_once(' ').unwrap().1)).collect();
    for log in [CHUNKS, CALL_BACK, &bare] {
        for end in 0..log.len() {
            let trace = trace(&log[..end]);
            let others = trace.refused.keys().find(|why| **why != Refused::Cut);
            assert_eq!(others, None, "{:?}", log[..end].lines().last());
        }
    }
}

#[test]
fn a_log_with_anything_in_it_is_read_and_moves_no_cursor() {
    let logs = [CALL_BACK, CHUNKS];
    let bad = [
        "\u{1b}[2J",
        "\u{202e}",
        "\0",
        "9999999999999999999999",
        "-",
        "0x",
        "[[",
        "]",
        " and 3 more",
        "fd 4 > ",
        "\u{fffd}",
    ];
    let names = Programs::read();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: usize| {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    for round in 0..600 {
        let mut bytes = logs[round % 2].as_bytes().to_vec();
        for _ in 0..=next(30) {
            let at = next(bytes.len());
            match next(5) {
                0 => bytes[at] = next(256) as u8,
                1 => bytes.truncate(bytes.len() - next(bytes.len().min(50))),
                2 => drop(bytes.splice(at..at, bad[next(bad.len())].bytes())),
                3 => {
                    let end = (at + next(200)).min(bytes.len());
                    bytes.drain(at..end);
                }
                _ => {
                    let end = (at + next(300)).min(bytes.len());
                    let copy = bytes[at..end].to_vec();
                    let to = next(bytes.len());
                    bytes.splice(to..to, copy);
                }
            }
        }
        let trace = read(Cursor::new(&bytes), Some(0), Wanted::All).unwrap();
        let told = printed(&trace) + &show::refused(&trace).join("\n");
        assert!(
            told.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'),
            "round {round}: {told}"
        );
        serde_json::to_string(&Document::new(&trace, &names)).unwrap();
        for at in 0..trace.calls.len() {
            let picture = diagram::draw(&trace, &[at], &names).unwrap().to_string();
            assert!(picture.chars().all(|c| c == '\n' || !c.is_control()), "round {round}");
        }
    }
}

#[test]
fn every_step_of_a_call_is_in_its_picture() {
    let names = Programs::read();
    let log = trace(CHUNKS);
    let picture = diagram::draw(&log, &[0], &names).unwrap().to_string();
    for wanted in [
        "perf 1 WRITE",
        "RDMA Read: 262,192 bytes",
        "Call: RDMA_NOMSG",
        "grants 32 credits",
        "is invalidated",
        "+0 \u{b5}s",
    ] {
        assert!(picture.contains(wanted), "{wanted}: {picture}");
    }
    let log = trace(CALL_BACK);
    let of = |wanted: u32| log.calls.iter().position(|call| call.xid == wanted).unwrap();
    let picture = diagram::draw(&log, &[of(0x92d08e1e), of(0x26d81094)], &names).unwrap().to_string();
    assert!(
        picture.contains("Call back: RDMA_MSG") && picture.contains("Reply to the call back"),
        "{picture}"
    );
    assert!(diagram::draw(&log, &[of(0x92d08e1e), of(0x867d303b)], &names).is_err());
    assert!(diagram::draw(&log, &[], &names).is_err());
}

#[test]
fn calls_are_chosen_by_number_and_xid() {
    assert_eq!((xid("0x5b0a4432"), xid("7")), (Ok(0x5b0a4432), Ok(7)));
    assert_eq!((range("3"), range("3-5")), (Ok((3, 3)), Ok((3, 5))));
    for wrong in ["", "0", "5-3", "x", "1-", "-1"] {
        assert!(range(wrong).is_err(), "{wrong}");
    }
    assert!(xid("0x1_").is_err() && xid("").is_err());
}
