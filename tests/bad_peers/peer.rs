//! A handmade peer: frames with the crate's codecs, a plain TcpStream, and a deadline on every wait.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rpcrdma::provider::iwarp::ddp::{ENOUGH, Fault, Header, MAX_TERMINATE, Opcode, ReadRequest};
use rpcrdma::provider::iwarp::mpa::{self, Enhanced, Offer, StartFrame, Which};
use rpcrdma::wire::header::{self, Body, Direction, Proc, Versions};
use rpcrdma::wire::lists::{Chunk, Lists};
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::{Credits, Handle, Position, ReadSegment, Segment, Xid, v1};

/// Longer than anything that works takes here; a wait that reaches it is a hang.
pub fn hang() -> Duration {
    patient(Duration::from_secs(20))
}

/// A limit on the time that the tests' own processes take, extended where the machine is busy with other things. Every such
/// limit goes through here; the library's own times do not.
///
/// The factor is `TEST_PATIENCE`, or else comes from how many processes compete for a processor now or did in the last
/// minute. The tests themselves do not count, up to three processes a processor: on a machine of their own the limits are as
/// written.
pub fn patient(limit: Duration) -> Duration {
    limit.mul_f64(patience())
}

fn patience() -> f64 {
    if let Ok(factor) = std::env::var("TEST_PATIENCE") {
        return factor.parse().expect("TEST_PATIENCE is a number");
    }
    // 16.11 14.73 10.52 33/400 28833
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let runs = |field: &str| field.split('/').next().and_then(|number| number.parse::<f64>().ok());
    let mut fields = load.split(' ');
    let minute = fields.next().and_then(runs).unwrap_or(0.0);
    let now = fields.nth(2).and_then(runs).unwrap_or(0.0);
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let each = minute.max(now) / processors as f64;
    if each > 3.0 { each } else { 1.0 }
}

pub const PROGRAM: u32 = 0x2000_5355;
pub const VERSION: u32 = 2;

/// Procedures of the suite's program.
pub const NULL: u32 = 0;
pub const ECHO: u32 = 1;
pub const SINK: u32 = 3;
pub const SOURCE: u32 = 4;
pub const STATIC_SOURCE: u32 = 22;

// -------------------------------------------------------------------------------------------------------- frames

/// The MPA Request of a well-behaved client.
pub fn request() -> Vec<u8> {
    request_with(true)
}

pub fn request_with(crc: bool) -> Vec<u8> {
    let private = PrivateData { remote_invalidation: false, send_size: 4096, receive_size: 4096 };
    StartFrame::request(&Offer { crc, ird: 16, ord: 16 }, 2, &private.encode()).encode()
}

/// The MPA Reply of a well-behaved server.
pub fn reply() -> StartFrame {
    let private = PrivateData { remote_invalidation: false, send_size: 4096, receive_size: 4096 };
    StartFrame {
        which: Which::Reply,
        markers: false,
        crc: true,
        reject: false,
        revision: 2,
        enhanced: Some(Enhanced { ird: 16, ord: 16, ..Enhanced::default() }),
        private_data: private.encode().to_vec(),
    }
}

/// An FPDU: header, payload, pad, CRC.
pub fn fpdu(header: Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; ENOUGH];
    let length = header.encode(payload.len(), &mut bytes);
    bytes.truncate(length);
    bytes.extend_from_slice(payload);
    bytes.resize(bytes.len() + mpa::pad_len(bytes.len() - 2), 0);
    bytes.extend_from_slice(&[0; 4]);
    seal(&mut bytes);
    bytes
}

/// Puts the right CRC at the end, whatever the bytes before it are.
pub fn seal(fpdu: &mut [u8]) {
    if let Some(at) = fpdu.len().checked_sub(4) {
        let crc = crc32c::crc32c(&fpdu[..at]);
        fpdu[at..].copy_from_slice(&mpa::crc_word(Some(crc)));
    }
}

pub fn send(msn: u32, message: &[u8]) -> Vec<u8> {
    send_as(Opcode::Send, 0, msn, message)
}

pub fn send_as(opcode: Opcode, invalidate: u32, msn: u32, message: &[u8]) -> Vec<u8> {
    fpdu(Header::Untagged { opcode, last: true, invalidate, msn, mo: 0 }, message)
}

pub fn write(stag: u32, to: u64, bytes: &[u8]) -> Vec<u8> {
    fpdu(Header::Tagged { opcode: Opcode::Write, last: true, stag, to }, bytes)
}

pub fn read_request(msn: u32, request: ReadRequest) -> Vec<u8> {
    send_as(Opcode::ReadRequest, 0, msn, &request.encode())
}

pub fn read_response(stag: u32, to: u64, bytes: &[u8], last: bool) -> Vec<u8> {
    fpdu(Header::Tagged { opcode: Opcode::ReadResponse, last, stag, to }, bytes)
}

/// The Read Response of a request; `cut`: without its last byte.
pub fn answer(request: &ReadRequest, bytes: &[u8], cut: bool) -> Vec<u8> {
    let bytes = &bytes[..bytes.len() - usize::from(cut)];
    let count = bytes.chunks(60_000).count();
    let piece = |(n, piece): (usize, &[u8])| {
        read_response(request.sink_stag, request.sink_to + 60_000 * n as u64, piece, n + 1 == count && !cut)
    };
    bytes.chunks(60_000).enumerate().flat_map(piece).collect()
}

/// A Terminate that reports this fault.
pub fn terminate(fault: Fault) -> Vec<u8> {
    let mut bytes = [0; MAX_TERMINATE];
    let length = fault.encode_terminate(None, &mut bytes);
    let mut fpdu = [&bytes[..length], &[0; 4]].concat();
    seal(&mut fpdu);
    fpdu
}

/// The XDR of `words`.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// An RPC Call with AUTH_NONE (RFC 5531 §9).
pub fn rpc_call(xid: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
    let mut call = words(&[xid, 0, 2, PROGRAM, VERSION, procedure, 0, 0, 0, 0]);
    call.extend_from_slice(arguments);
    call
}

/// A successful RPC Reply.
pub fn rpc_reply(xid: u32, results: &[u8]) -> Vec<u8> {
    let mut reply = words(&[xid, 1, 0, 0, 0, 0]);
    reply.extend_from_slice(results);
    reply
}

/// `opaque<>`
pub fn opaque(bytes: &[u8]) -> Vec<u8> {
    let mut xdr = words(&[bytes.len() as u32]);
    xdr.extend_from_slice(bytes);
    xdr.resize(xdr.len().next_multiple_of(4), 0);
    xdr
}

/// A transport header and what follows it.
pub fn message(xid: u32, credits: u32, proc: Proc, lists: &Lists, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    header::encode(&mut bytes, v1::VERSION, Xid(xid), Credits(credits), proc, Direction::Call, lists);
    bytes.extend_from_slice(payload);
    bytes
}

/// A Call that is sent inline.
pub fn inline_call(xid: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
    message(xid, 32, Proc::Msg, &Lists::default(), &rpc_call(xid, procedure, arguments))
}

pub fn segment(handle: u32, length: u32, offset: u64) -> Segment {
    Segment { handle: Handle(handle), length, offset }
}

/// A header of either version and what follows it: nothing if the payload lies in a chunk.
pub fn message_in(
    version: u32,
    xid: u32,
    direction: Direction,
    lists: &Lists,
    payload: Option<&[u8]>,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let proc = if payload.is_some() { Proc::Msg } else { Proc::Nomsg };
    header::encode(&mut bytes, version, Xid(xid), Credits(32), proc, direction, lists);
    bytes.extend_from_slice(payload.unwrap_or_default());
    bytes
}

/// A NULL call of either version.
pub fn null_call(version: u32, xid: u32) -> Vec<u8> {
    let payload = rpc_call(xid, NULL, b"");
    message_in(version, xid, Direction::Call, &Lists::default(), Some(&payload))
}

/// A Call whose bytes lie in the Position-Zero Read chunk `chunk`.
pub fn long_call(xid: u32, chunk: &[Segment]) -> Vec<u8> {
    let reads = chunk.iter().map(|&target| ReadSegment { position: Position(0), target }).collect();
    message(xid, 32, Proc::Nomsg, &Lists { reads, ..Lists::default() }, b"")
}

/// A Call with a Reply chunk.
pub fn call_with_reply_chunk(xid: u32, procedure: u32, arguments: &[u8], chunk: &[Segment]) -> Vec<u8> {
    let lists = Lists { reply: Some(Chunk::from(chunk)), ..Lists::default() };
    message(xid, 32, Proc::Msg, &lists, &rpc_call(xid, procedure, arguments))
}

// ---------------------------------------------------------------------------------------------------- connection

/// One FPDU of the other side, whole and with a right CRC.
#[derive(Debug)]
pub enum Frame {
    Send { last: bool, bytes: Vec<u8> },
    Write { stag: u32, to: u64, bytes: Vec<u8> },
    ReadRequest(ReadRequest),
    ReadResponse(Vec<u8>),
    Terminate(Fault),
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// FIN.
    Closed,
    /// RST: the other side closed with bytes of ours unread.
    Reset,
}

/// A TCP connection; every wait on it ends after [`hang`].
pub struct Peer {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// How many Sends we, and the other side, have made.
    sent: u32,
    heard: u32,
    /// The version in which `null` calls.
    pub version: u32,
}

impl Peer {
    pub fn new(stream: TcpStream) -> Peer {
        stream.set_nodelay(true).expect("TCP_NODELAY");
        stream.set_read_timeout(Some(hang())).expect("SO_RCVTIMEO");
        stream.set_write_timeout(Some(hang())).expect("SO_SNDTIMEO");
        Peer { stream, buffer: Vec::new(), sent: 0, heard: 0, version: v1::VERSION }
    }

    pub fn connect(port: u16) -> Peer {
        // The soak's servers may be elsewhere.
        let address = std::env::var("LOAD_ADDRESS").unwrap_or_else(|_| "127.0.0.1".to_owned());
        Peer::new(TcpStream::connect((address.as_str(), port)).expect("the server accepts connections"))
    }

    /// A connection in full operation.
    pub fn open(port: u16) -> Peer {
        Peer::open_with(port, true)
    }

    /// The same; without CRCs if the server wants none either.
    pub fn open_with(port: u16, crc: bool) -> Peer {
        let mut peer = Peer::connect(port);
        peer.push(&request_with(crc));
        peer.start_frame(Which::Reply).expect("an MPA Reply");
        peer
    }

    /// Whether the other side closes the connection, or sends something, within this time.
    pub fn stirs_within(&mut self, time: Duration) -> bool {
        self.stream.set_read_timeout(Some(time)).expect("SO_RCVTIMEO");
        let stirs = !matches!(self.stream.peek(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock);
        self.stream.set_read_timeout(Some(hang())).expect("SO_RCVTIMEO");
        stirs
    }

    /// Writes. It is no error here if the other side has closed the connection: `frame` shows that.
    pub fn push(&mut self, bytes: &[u8]) {
        self.push_if_open(bytes);
    }

    /// Writes. False when the other side has closed the connection.
    pub fn push_if_open(&mut self, bytes: &[u8]) -> bool {
        match self.stream.write_all(bytes) {
            Ok(()) => true,
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => false,
            Err(e) => panic!("the other side does not take {} bytes: {e}", bytes.len()),
        }
    }

    /// Sends a message in the next Send.
    pub fn send(&mut self, message: &[u8]) {
        let msn = self.next_msn();
        self.push(&send(msn, message));
    }

    pub fn next_msn(&mut self) -> u32 {
        self.sent += 1;
        self.sent
    }

    /// Tells a server in this process that no more connections will come.
    pub fn goodbye(mut self) {
        self.push(b"bye");
    }

    /// Whether the connection is one of [`Peer::goodbye`]; looks at its first byte without taking it.
    pub fn is_goodbye(&self) -> bool {
        let mut first = [0];
        matches!(self.stream.peek(&mut first), Ok(1)) && first == *b"b"
    }

    /// Closes our half: no more bytes of ours will come.
    pub fn finish(&mut self) {
        // An error means that the connection is gone, which `frame` shows too.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        self.set_option(libc::SOL_SOCKET, libc::SO_LINGER, libc::linger { l_onoff: 1, l_linger: 0 });
    }

    /// Writes, and ends the connection with the same TCP segment.
    pub fn last(mut self, bytes: &[u8]) {
        self.set_option(libc::IPPROTO_TCP, libc::TCP_CORK, 1i32);
        self.push(bytes);
        self.finish();
    }

    #[allow(unsafe_code)]
    fn set_option<T>(&self, level: i32, name: i32, value: T) {
        let length = size_of::<T>() as libc::socklen_t;
        let fd = self.stream.as_raw_fd();
        // SAFETY: the descriptor is open, and `value` is readable for `length` bytes.
        let failed = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), length) };
        assert_eq!(failed, 0, "setsockopt {name}");
    }

    /// Reads until `enough` finds something at the start of the buffer and says how long it is.
    fn fill<T>(&mut self, enough: impl Fn(&[u8]) -> Option<(T, usize)>) -> Result<T, End> {
        loop {
            if let Some((found, length)) = enough(&self.buffer) {
                self.buffer.drain(..length);
                return Ok(found);
            }
            let mut bytes = [0; 65536];
            match self.stream.read(&mut bytes) {
                Ok(0) if self.buffer.is_empty() => return Err(End::Closed),
                Ok(0) => panic!("the stream ends inside a frame: {:02x?}", self.buffer),
                Ok(n) => self.buffer.extend_from_slice(&bytes[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                    return Err(End::Reset);
                }
                // A read with a timeout is not restarted when the process has been stopped for a moment.
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => panic!("no answer within {:?}: {e}", hang()),
            }
        }
    }

    /// The startup frame of the other side.
    pub fn start_frame(&mut self, which: Which) -> Result<StartFrame, End> {
        self.fill(|bytes| StartFrame::decode(bytes, which).expect("a valid startup frame"))
    }

    /// The next FPDU of the other side, which must be valid.
    pub fn frame(&mut self) -> Result<Frame, End> {
        let (header, payload) = self.fill(|bytes| {
            let ulpdu = usize::from(u16::from_be_bytes(*bytes.first_chunk()?));
            let fpdu = bytes.get(..mpa::fpdu_len(ulpdu))?;
            let (covered, crc) = fpdu.split_at(fpdu.len() - 4);
            let right = mpa::crc_word(Some(crc32c::crc32c(covered)));
            assert!(crc == right || crc == [0; 4], "CRC {crc:02x?}, not {right:02x?}");
            let (header, length) = Header::decode(fpdu.first_chunk()?).expect("a valid segment header");
            let payload = covered[header.len()..header.len() + length].to_vec();
            Some(((header, payload), fpdu.len()))
        })?;
        Ok(match header {
            Header::Tagged { opcode: Opcode::Write, stag, to, .. } => {
                Frame::Write { stag, to, bytes: payload }
            }
            Header::Tagged { .. } => Frame::ReadResponse(payload),
            Header::Untagged { opcode: Opcode::ReadRequest, .. } => {
                Frame::ReadRequest(ReadRequest::decode(&payload).expect("28 bytes"))
            }
            Header::Untagged { opcode: Opcode::Terminate, .. } => {
                Frame::Terminate(Fault::decode_terminate(&payload).expect("a Terminate").0)
            }
            Header::Untagged { last, msn, .. } => {
                assert_eq!(msn, self.heard + 1, "the sequence of Sends");
                self.heard += u32::from(last);
                Frame::Send { last, bytes: payload }
            }
        })
    }

    /// The next frame, which must be a Send of one segment.
    pub fn message(&mut self) -> Vec<u8> {
        match self.frame() {
            Ok(Frame::Send { last: true, bytes, .. }) => bytes,
            other => panic!("{other:?} where a message was due"),
        }
    }

    /// Everything that the other side still sends, up to the end of the connection.
    pub fn rest(&mut self) -> (Vec<Frame>, End) {
        let mut frames = Vec::new();
        loop {
            match self.frame() {
                Ok(frame) => frames.push(frame),
                Err(end) => return (frames, end),
            }
        }
    }

    /// Makes a NULL call and requires its reply, without anything in between.
    pub fn null(&mut self) {
        self.sent += 1;
        let (msn, xid) = (self.sent, 0x6000_0000 + self.sent);
        self.push(&send(msn, &null_call(self.version, xid)));
        let start = Instant::now();
        let answer = self.message();
        let header = header::decode(&answer, Versions::BOTH).expect("a valid header");
        assert_eq!((header.xid, header.version), (Xid(xid), self.version));
        match header.body {
            Body::Msg { payload, .. } => assert_eq!(payload, rpc_reply(xid, b"")),
            other => panic!("{other:?} where a reply was due"),
        }
        assert!(start.elapsed() < hang() / 4, "a good client waited {:?}", start.elapsed());
    }
}

impl Peer {
    /// Takes the frames that have come already. True when the connection has ended.
    pub fn available(&mut self, frames: &mut Vec<Frame>) -> bool {
        loop {
            self.stream.set_nonblocking(true).expect("O_NONBLOCK");
            let mut bytes = vec![0; 1 << 16];
            let read = self.stream.read(&mut bytes);
            self.stream.set_nonblocking(false).expect("O_NONBLOCK");
            let ended = match read {
                Ok(0) => true,
                Ok(n) => {
                    self.buffer.extend_from_slice(&bytes[..n]);
                    false
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => true,
            };
            while self.has_frame() {
                frames.extend(self.frame());
            }
            if ended {
                return true;
            }
        }
    }

    /// Takes at most `most` of the bytes that have come, whatever they are.
    pub fn sip(&mut self, most: usize) {
        self.stream.set_nonblocking(true).expect("O_NONBLOCK");
        // It does not matter if the connection has ended or nothing has come.
        let _ = self.stream.read(&mut vec![0; most]);
        self.stream.set_nonblocking(false).expect("O_NONBLOCK");
    }

    /// Takes what comes up to the end of the connection, whatever it is.
    pub fn swallow(mut self) {
        let end = std::io::copy(&mut self.stream, &mut std::io::sink());
        let timed_out = |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        assert!(!end.is_err_and(|e| timed_out(&e)), "no end within {:?}", hang());
    }

    fn has_frame(&self) -> bool {
        let length = self.buffer.first_chunk().map(|bytes| usize::from(u16::from_be_bytes(*bytes)));
        length.is_some_and(|ulpdu| self.buffer.len() >= mpa::fpdu_len(ulpdu))
    }
}
