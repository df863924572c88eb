//! Captures that a writer of ours makes: of one connection with calls, in every format, and with whatever can be wrong with
//! them.

use std::io::Cursor;

use rpcrdma::wire::Xid;
use rpcrdma::wire::header::{Direction, Proc};
use rpcrdma::wire::lists::Lists;
use rpcrdma::wire::{Credits, Handle, Position, ReadSegment, Segment as Chunk};

use super::super::trace::{Call, Kind, Trace, Wanted};
use super::*;

const XID: u32 = 0x0102_0304;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// One segment with its MPA frame, without a CRC.
fn fpdu(header: &ddp::Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 20];
    let length = header.encode(payload.len(), &mut bytes);
    bytes.truncate(length);
    bytes.extend_from_slice(payload);
    bytes.resize(mpa::fpdu_len(length - 2 + payload.len()), 0);
    bytes
}

fn send(opcode: Opcode, invalidate: u32, msn: u32, message: &[u8]) -> Vec<u8> {
    // In two segments.
    let (one, two) = message.split_at(message.len() / 2);
    let header = |last, mo| ddp::Header::Untagged { opcode, last, invalidate, msn, mo };
    [fpdu(&header(false, 0), one), fpdu(&header(true, one.len() as u32), two)].concat()
}

fn message(proc: Proc, direction: Direction, lists: &Lists, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    header::encode(&mut bytes, 1, Xid(XID), Credits(7), proc, direction, lists);
    bytes.extend_from_slice(payload);
    bytes
}

/// What both ends send, piece by piece: a long call that the server reads, a long reply that it writes.
fn conversation() -> Vec<(usize, Vec<u8>)> {
    let start = |which| StartFrame {
        which,
        markers: false,
        crc: false,
        reject: false,
        revision: 1,
        enhanced: None,
        private_data: PrivateData { remote_invalidation: true, send_size: 4096, receive_size: 8192 }
            .encode()
            .into(),
    };
    let chunk = |handle, offset, length| Chunk { handle: Handle(handle), length, offset };
    let lists = Lists {
        reads: vec![ReadSegment { position: Position(0), target: chunk(0xaa, 16, 6000) }],
        writes: Vec::new(),
        reply: Some([chunk(0xbb, 32, 9000)].into()),
    };
    let call = message(Proc::Nomsg, Direction::Call, &lists, &[]);
    let lists = Lists { reply: Some([chunk(0xbb, 32, 5000)].into()), ..Lists::default() };
    let reply = message(Proc::Nomsg, Direction::Reply, &lists, &[]);
    let read = ReadRequest { sink_stag: 5, sink_to: 0, size: 6000, source_stag: 0xaa, source_to: 16 };
    let queue = |opcode| ddp::Header::Untagged { opcode, last: true, invalidate: 0, msn: 1, mo: 0 };
    let tagged = |opcode, last, stag, to| ddp::Header::Tagged { opcode, last, stag, to };
    let mut data = words(&[XID, 0, 2, 100_003, 3, 7]);
    data.resize(6000, 0x55);
    let [inline, inline_reply] =
        [vec![XID + 1, 0, 2, 100_003, 3, 0, 0, 0, 0, 0], vec![XID + 1, 1, 0, 0, 0, 0]]
            .map(|rpc| [words(&[XID + 1, 1, 7, 0, 0, 0, 0]), words(&rpc)].concat());
    vec![
        (CLIENT, start(Which::Request).encode()),
        (SERVER, start(Which::Reply).encode()),
        (CLIENT, send(Opcode::Send, 0, 1, &call)),
        (SERVER, fpdu(&queue(Opcode::ReadRequest), &read.encode())),
        (CLIENT, fpdu(&tagged(Opcode::ReadResponse, false, 5, 0), &data[..4000])),
        (CLIENT, fpdu(&tagged(Opcode::ReadResponse, true, 5, 4000), &data[4000..])),
        (SERVER, fpdu(&tagged(Opcode::Write, false, 0xbb, 32), &[1; 3000])),
        (SERVER, fpdu(&tagged(Opcode::Write, true, 0xbb, 3032), &[1; 2000])),
        (SERVER, send(Opcode::SendInvalidate, 0xaa, 1, &reply)),
        (CLIENT, send(Opcode::Send, 0, 2, &inline)),
        (SERVER, send(Opcode::Send, 0, 2, &inline_reply)),
    ]
}

#[derive(Clone, Debug)]
struct Packet {
    from: usize,
    flags: u8,
    sequence: u32,
    ack: u32,
    data: Vec<u8>,
}

const SYN: u8 = 2;
const ACK: u8 = 16;

/// Packets of a connection, which cut what is sent anywhere; sequence numbers wrap.
fn packets(cut: usize) -> Vec<Packet> {
    let mut sequences = [u32::MAX - 3000, 9];
    let mut packets = vec![
        Packet { from: CLIENT, flags: SYN, sequence: sequences[CLIENT], ack: 0, data: Vec::new() },
        Packet {
            from: SERVER,
            flags: SYN | ACK,
            sequence: sequences[SERVER],
            ack: sequences[CLIENT].wrapping_add(1),
            data: Vec::new(),
        },
    ];
    sequences = sequences.map(|sequence| sequence.wrapping_add(1));
    for (from, bytes) in conversation() {
        for data in bytes.chunks(cut) {
            packets.push(Packet {
                from,
                flags: ACK,
                sequence: sequences[from],
                ack: sequences[1 - from],
                data: data.to_vec(),
            });
            sequences[from] = sequences[from].wrapping_add(data.len() as u32);
        }
    }
    for from in [CLIENT, SERVER] {
        packets.push(Packet {
            from,
            flags: 1 | ACK,
            sequence: sequences[from],
            ack: sequences[1 - from],
            data: Vec::new(),
        });
    }
    packets
}

fn ip(packet: &Packet, six: bool) -> Vec<u8> {
    let ports = if packet.from == CLIENT { [700u16, 2049] } else { [2049, 700] };
    let mut tcp: Vec<u8> = ports.iter().flat_map(|port| port.to_be_bytes()).collect();
    tcp.extend(packet.sequence.to_be_bytes());
    tcp.extend(packet.ack.to_be_bytes());
    tcp.extend([0x60, packet.flags, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]);
    tcp.extend(&packet.data);
    let ends = if packet.from == CLIENT { [1u8, 2] } else { [2, 1] };
    if six {
        let mut bytes = vec![0x60, 0, 0, 0];
        // After options that tell nothing.
        bytes.extend((tcp.len() as u16 + 8).to_be_bytes());
        bytes.extend([0, 64]);
        ends.iter().for_each(|end| bytes.extend([&[0; 15][..], &[*end]].concat()));
        bytes.extend([6, 0, 1, 4, 0, 0, 0, 0]);
        return [bytes, tcp].concat();
    }
    let mut bytes = vec![0x45, 0];
    bytes.extend((tcp.len() as u16 + 20).to_be_bytes());
    bytes.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
    ends.iter().for_each(|end| bytes.extend([192, 0, 2, *end]));
    // The padding that Ethernet adds to short packets.
    [bytes, tcp, vec![0; 6]].concat()
}

fn ethernet(packet: &Packet) -> Vec<u8> {
    [&[0; 12][..], &[0x81, 0, 0, 5, 8, 0], &ip(packet, false)].concat()
}

fn pcap(packets: &[Packet]) -> Vec<u8> {
    pcap_of(packets.iter().map(|packet| (700, packet)))
}

/// A capture of connections with these client ports.
fn pcap_of<'a>(packets: impl Iterator<Item = (u16, &'a Packet)>) -> Vec<u8> {
    let mut file = words(&[0xa1b2_c3d4, 0x0002_0004, 0, 0, 65535, 1]);
    for (at, (port, packet)) in packets.enumerate() {
        let mut bytes = ethernet(packet);
        let place = if packet.from == CLIENT { 38 } else { 40 };
        bytes[place..place + 2].copy_from_slice(&port.to_be_bytes());
        file.extend(words(&[100, at as u32, bytes.len() as u32, bytes.len() as u32]));
        file.extend(bytes);
    }
    file
}

/// Low byte first, times in nanoseconds, IPv6 without a link header.
fn pcapng(packets: &[Packet]) -> Vec<u8> {
    let block = |kind: u32, body: &[u8]| {
        let mut body = body.to_vec();
        body.resize(body.len().next_multiple_of(4), 0);
        let length = (body.len() as u32 + 12).to_le_bytes();
        [&kind.to_le_bytes()[..], &length, &body, &length].concat()
    };
    let mut file =
        block(0x0a0d_0d0a, &[0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
    file.extend(block(1, &[101, 0, 0, 0, 0, 0, 0, 0, 9, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0]));
    for (at, packet) in packets.iter().enumerate() {
        let bytes = ip(packet, true);
        let time = 100_000_000_000 + 1000 * at as u64;
        let head = [0, (time >> 32) as u32, time as u32, bytes.len() as u32, bytes.len() as u32];
        let head: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.extend(block(6, &[head, bytes].concat()));
        file.extend(block(5, &[0; 8]));
    }
    file
}

/// All lines, and the number of packets.
fn told(file: &[u8]) -> io::Result<(Vec<Line>, u64)> {
    let mut lines = Vec::new();
    let count = read(Cursor::new(file), |line| {
        lines.push(line);
        true
    })?;
    Ok((lines, count.unwrap()))
}

fn trace(file: &[u8]) -> Trace {
    Trace::read(told(file).unwrap().0, Wanted::All)
}

fn kinds(call: &Call) -> String {
    let letter = |kind: &Kind| match kind {
        Kind::Call(_) => 'c',
        Kind::Read(_) => 'r',
        Kind::Write(_) => 'w',
        Kind::Reply(_) => 'R',
        Kind::Invalidated { .. } => 'i',
    };
    call.steps.iter().map(|step| letter(&step.kind)).collect()
}

fn remarks(trace: &Trace) -> String {
    let all = trace.connections.iter().flat_map(|connection| &connection.remarks).chain(&trace.remarks);
    all.map(|remark| format!("{}\n", remark.text)).collect()
}

fn all_is_there(trace: &Trace) {
    let [long, short] = trace.calls.as_slice() else { panic!("{:?}", trace.calls) };
    assert_eq!((kinds(long).as_str(), kinds(short).as_str()), ("crwR", "cR"));
    assert_eq!((long.xid, long.program, short.program), (XID, Some([100_003, 3, 7]), Some([100_003, 3, 0])));
    assert_eq!((long.call_bytes, long.reply_bytes), (Some(6000), Some(5000)));
    assert_eq!((short.call_bytes, short.reply_bytes), (Some(40), Some(24)));
    let Kind::Reply(reply) = &long.steps[3].kind else { panic!() };
    assert_eq!(reply.invalidates, Some(0xaa));
    let Kind::Write(segment) = &long.steps[2].kind else { panic!() };
    assert_eq!((segment.handle, segment.offset, segment.length), (0xbb, 32, 5000));
    assert!(long.steps[1].done > long.steps[1].at && long.took().unwrap() > 0);
    let [connection] = trace.connections.as_slice() else { panic!() };
    assert!(
        connection.how.as_deref().unwrap().contains("inline 4096 bytes out and 4096 in"),
        "{connection:?}"
    );
    assert_eq!(remarks(trace), "closed: both ends have closed it\n");
}

#[test]
fn a_call_is_found_however_it_is_cut_and_captured() {
    for cut in [1, 7, 100, 1460, 65000] {
        let packets = packets(cut);
        all_is_there(&trace(&pcap(&packets)));
        all_is_there(&trace(&pcapng(&packets)));
        assert_eq!(trace(&pcap(&packets)).calls[0].began().unwrap() / 1_000_000, 100);
        assert_eq!(trace(&pcapng(&packets)).calls[0].began().unwrap() / 1_000_000, 100);
    }
}

#[test]
fn connections_that_have_ended_or_are_silent_make_room_for_others() {
    let mine = packets(1460);
    let (open, end) = mine.split_at(mine.len() - 2);
    let mut other = mine[..2].to_vec();
    other.push(Packet { data: b"GET / HTTP/1.0".to_vec(), ..mine[2].clone() });
    // Many that come and go, then one that counts.
    let ended: Vec<Packet> = other.iter().chain(end).cloned().collect();
    let many = (0..4 * STREAMS as u16).flat_map(|n| ended.iter().map(move |packet| (1000 + n, packet)));
    let found = trace(&pcap_of(many.chain(mine.iter().map(|packet| (700, packet)))));
    assert_eq!((found.calls.len(), found.connections.len()), (2, 1));
    // Many that stay: one that goes on meanwhile is not forgotten, and those that are forgotten have told their calls
    // before.
    let (first, rest) = mine.split_at(mine.len() / 2);
    let many = (0..4 * STREAMS as u16).flat_map(|n| {
        let another = other.iter().map(move |packet| (1000 + n, packet));
        another.chain([(700, &first[1])])
    });
    let whole =
        first.iter().map(|packet| (700, packet)).chain(many).chain(rest.iter().map(|packet| (700, packet)));
    let found = trace(&pcap_of(whole));
    assert_eq!((found.calls.len(), found.connections.len()), (2, 1));
    let silent = (0..2 * STREAMS as u16).flat_map(|n| open.iter().map(move |packet| (1000 + n, packet)));
    let found = trace(&pcap_of(silent));
    assert_eq!((found.calls.len(), found.connections.len()), (4 * STREAMS, 2 * STREAMS));
    assert!(
        remarks(&found).contains("connections that were silent for long and have made room"),
        "{}",
        remarks(&found)
    );
}

#[test]
fn packets_in_another_order_and_twice_are_put_together() {
    let mut packets = packets(500);
    let last = packets.len() - 2;
    let in_turn = packets[4..last].chunk_by_mut(|one, next| one.from == next.from);
    in_turn.flat_map(|turn| turn.chunks_mut(3)).for_each(|three| three.reverse());
    // Again, and a piece that covers what was there and what was not.
    let again: Vec<Packet> = packets[5..last].iter().step_by(3).cloned().collect();
    packets.splice(last..last, again);
    all_is_there(&trace(&pcap(&packets)));
}

/// As when a client of root's connects again: reserved ports are few.
#[test]
fn a_connection_from_the_port_of_one_before_is_another_one() {
    let packets = packets(500);
    let syn = |sequence| Packet { sequence, ..packets[0].clone() };
    let reset = Packet { from: SERVER, flags: 4 | ACK, sequence: 0, ack: 78, data: Vec::new() };
    // Refused; not answered; another protocol's, which is skipped; the same segment once more.
    let http = Packet { flags: ACK, sequence: 78, data: b"GET / HTTP/1.0".to_vec(), ..packets[0].clone() };
    let before = [vec![syn(77), reset], vec![syn(77)], vec![syn(77), http], vec![packets[0].clone()]];
    for (before, others) in before.into_iter().zip([1, 1, 1, 0]) {
        let all = [&before[..], &packets].concat();
        let trace = trace(&pcap(&all));
        assert_eq!(trace.calls.len(), 2, "{}", remarks(&trace));
        let passed_over = remarks(&trace).contains("1 TCP connections that are no iWARP");
        assert_eq!(passed_over, others == 1, "{before:?}: {}", remarks(&trace));
    }
    let twice = [&packets[..], &packets].concat();
    assert_eq!(trace(&pcap(&twice)).calls.len(), 4);
    // The capture lacks a part, and the end, of the connection before.
    let mut torn = packets[..packets.len() - 2].to_vec();
    torn.remove(4);
    torn.iter_mut().for_each(|packet| packet.sequence = packet.sequence.wrapping_add(5000));
    assert!(trace(&pcap(&[torn, packets].concat())).calls.len() >= 2);
    // The answer before what it answers.
    let mut packets = self::packets(500);
    packets.swap(0, 1);
    all_is_there(&trace(&pcap(&packets)));
}

/// As when several processors send by turns.
#[test]
fn what_is_captured_behind_the_end_of_both_ends_is_read() {
    for last in 1..4 {
        let mut packets = packets(500);
        let ends = packets.len() - 2;
        packets[ends - last..].rotate_left(last);
        all_is_there(&trace(&pcap(&packets)));
    }
}

#[test]
fn what_is_missing_is_said_and_nothing_behind_it_is_taken_for_something() {
    let whole = packets(500);
    for lost in 2..whole.len() - 2 {
        let mut packets = whole.clone();
        let gone = packets.remove(lost);
        let trace = trace(&pcap(&packets));
        let text = remarks(&trace);
        let is_start = lost < 4;
        let is_last = !packets[lost..].iter().any(|other| other.from == gone.from && !other.data.is_empty());
        let who = if gone.from == CLIENT { "client" } else { "server" };
        let wanted = format!(
            "segments are missing in the capture: {} bytes of what the {who} has sent",
            gone.data.len()
        );
        assert!(is_start || is_last || text.contains(&wanted), "{lost}: {text}");
        assert!(
            trace.calls.len() <= 2 && trace.calls.iter().all(|call| call.xid == XID || call.xid == XID + 1)
        );
    }
}

/// The messages that a packet was part of are lost, and no others.
#[test]
fn behind_what_is_missing_the_next_message_is_found() {
    // Also in the midst of a message, and at any byte of a word.
    for cut in [500, 41] {
        let whole = packets(cut);
        let ends = whole.len() - 2;
        // The call and the reply after the long ones.
        let last: usize = conversation()[9..].iter().map(|(_, bytes)| bytes.len().div_ceil(cut)).sum();
        let began = whole[..ends].iter().rposition(|packet| packet.from == CLIENT).unwrap() as i64;
        for lost in 2..ends {
            let mut packets = whole.clone();
            packets.remove(lost);
            let trace = trace(&pcap(&packets));
            let text = remarks(&trace);
            assert!(!text.contains(" sends ") && !text.contains("not understood"), "{cut}, {lost}: {text}");
            let short = trace.calls.iter().find(|call| call.xid == XID + 1);
            let is_there = short.map(kinds).as_deref() == Some("cR");
            let is_start =
                whole[2..lost].iter().filter(|packet| packet.from == whole[lost].from).count() * cut < 28;
            assert_eq!(is_there, !is_start && lost < ends - last, "{cut}, {lost}: {text} {trace:?}");
            if let Some(short) = short.filter(|_| is_there) {
                // The time when it came, though it had waited.
                assert_eq!(short.began().unwrap(), 100_000_000 + began - 1, "{cut}, {lost}");
            }
        }
    }
}

/// Nothing waits for the end of a capture if the other end goes on.
#[test]
fn what_was_acknowledged_and_is_not_there_is_not_waited_for() {
    let mut packets = packets(500);
    let ends = packets.len() - 2;
    packets.truncate(ends);
    // The last packet that the client sends before its short call.
    let lost = packets[..ends - 2].iter().rposition(|packet| packet.from == CLIENT).unwrap();
    packets.remove(lost);
    let last = packets.last().unwrap().clone();
    let ack =
        Packet { sequence: last.sequence.wrapping_add(last.data.len() as u32), data: Vec::new(), ..last };
    let told = |acks: u32| {
        let mut all = packets.clone();
        all.extend((0..acks).map(|_| ack.clone()));
        let mut reader = Reader::default();
        let file = pcap(&all);
        let mut parts = Packets::open(Cursor::new(&file)).unwrap();
        while let Some(part) = parts.next().unwrap() {
            reader.take(part);
        }
        reader.lines.iter().any(|line| matches!(&line.event, Event::Said(text) if text.contains("missing")))
    };
    assert!(!told(ACKNOWLEDGED - 2));
    assert!(told(ACKNOWLEDGED));
}

#[test]
fn a_wrong_crc_is_said_where_there_are_crcs() {
    let crcs = |wrong: Option<usize>| {
        let mut packets = packets(65000);
        // The start frames ask for them: the second bit of their flags.
        packets[2].data[16] |= 0x40;
        packets[3].data[16] |= 0x40;
        let ends = packets.len() - 2;
        for (at, packet) in packets[4..ends].iter_mut().enumerate() {
            let mut from = 0;
            while let Some(length) = packet.data[from..].first_chunk::<2>() {
                let end = from + mpa::fpdu_len(u16::from_be_bytes(*length).into());
                let crc = mpa::crc_word(Some(crc32c::crc32c(&packet.data[from..end - 4])));
                packet.data[end - 4..end].copy_from_slice(&crc);
                from = end;
            }
            if wrong == Some(at) {
                *packet.data.last_mut().unwrap() ^= 1;
            }
        }
        trace(&pcap(&packets))
    };
    all_is_there(&crcs(None));
    for (at, who) in [(0, "client"), (1, "server"), (4, "server")] {
        let trace = crcs(Some(at));
        let text = remarks(&trace);
        assert!(
            text.contains("the CRC of ")
                && text.contains(&format!(" bytes that the {who} has sent is wrong"))
        );
        assert_eq!((text.lines().count(), trace.calls.len()), (2, 2), "{text}");
    }
    // Without CRCs these words say nothing.
    all_is_there(&trace(&pcap(&packets(65000))));
}

#[test]
fn connections_that_are_none_of_ours_are_counted() {
    let mut packets = packets(500);
    // The beginning is not there.
    packets.drain(..4);
    let trace = trace(&pcap(&packets));
    assert!(trace.calls.is_empty() && trace.connections.is_empty());
    assert_eq!(
        remarks(&trace),
        "1 TCP connections that are no iWARP, or whose beginning is not in the capture\n"
    );
}

#[test]
fn whatever_is_in_a_file_it_is_read_to_its_end() {
    let packets = packets(700);
    let mut state = 7u32;
    let mut next = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    for file in [pcap(&packets), pcapng(&packets)] {
        for length in 0..file.len() {
            let cut = &file[..length];
            if packets::is_capture(cut) && length > 32 {
                let _ = told(cut).map(|(lines, _)| Trace::read(lines, Wanted::All));
            }
        }
        for _ in 0..3000 {
            let mut bytes = file.clone();
            for _ in 0..=next(4) {
                let at = next(bytes.len());
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff, next(256) as u8][next(6)];
            }
            let _ = told(&bytes).map(|(lines, _)| Trace::read(lines, Wanted::All));
        }
    }
}

#[test]
fn a_length_that_nothing_is_behind_takes_no_memory() {
    let mut file = words(&[0xa1b2_c3d4, 0x0002_0004, 0, 0, 65535, 1]);
    file.extend(words(&[1, 1, u32::MAX, u32::MAX]));
    assert_eq!(told(&file).unwrap_err().kind(), io::ErrorKind::InvalidData);
    let mut file = pcap(&packets(500));
    file.extend(words(&[1, 1, LONG, LONG]));
    let (lines, count) = told(&file).unwrap();
    assert!(count > 10);
    assert!(
        matches!(&lines.last().unwrap().event, Event::Said(text) if text.contains("cut short")),
        "{lines:?}"
    );
}

const LONG: u32 = 10 << 20;

#[test]
fn early_segments_of_a_hostile_capture_are_bounded() {
    let mut packets = packets(500);
    packets.truncate(4);
    let next = packets[2].sequence.wrapping_add(packets[2].data.len() as u32);
    for at in 0..100_000u32 {
        let sequence = next.wrapping_add(10 + 2 * at);
        packets.push(Packet { from: CLIENT, flags: ACK, sequence, ack: 0, data: vec![0] });
    }
    let mut reader = Reader::default();
    let file = pcap(&packets);
    let mut all = Packets::open(Cursor::new(&file)).unwrap();
    let mut most = 0;
    while let Some(part) = all.next().unwrap() {
        reader.take(part);
        most = most.max(reader.waiting);
    }
    reader.end(&all.counts);
    assert!(most <= WAITING && most > 0 && reader.waiting == 0, "{most}");
    assert!(
        reader.lines.iter().any(|line| matches!(&line.event, Event::Said(text) if text.contains("missing")))
    );
}
