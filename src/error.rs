//! One error type, and THE table from its kind to errno, `clnt_stat` and the wire.
//!
//! An error names the thing and the remedy in `text`; the kind decides how the C boundary reports it. The text
//! reaches the program through `clnt_perror`, `clnt_sperror` and `clnt_pcreateerror` (see `tirpc::interpose`).
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

/// What went wrong, to the extent that programs can tell errors apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The time for the call or for a connection attempt ran out.
    Timeout,
    /// The connection was gone before the call was sent.
    NotSent,
    /// The connection was lost with the call under way: whether the server executed it is unknown.
    ConnectionLost,
    /// Nobody accepts connections there.
    Refused,
    /// The program's xdrproc refused to encode, or memory for encoding ran out.
    Encode,
    /// The peer answered RDMA_ERROR, or cannot speak our version (RFC 8166 §4.5).
    Peer,
    /// The peer broke the protocol; the connection is closed.
    Protocol,
    /// The reply or call exceeds a limit that the text names.
    TooLong,
    /// The system refused: the errno.
    Os(i32),
    /// A wrong argument or a wrong setting; the text names it.
    Invalid,
    /// rpcbind has no such program on netid rdma.
    NotRegistered,
    /// rpcbind cannot be reached.
    Rpcbind,
    /// The host's name cannot be resolved.
    UnknownHost,
    /// The host has no address of the netid's family.
    NoAddress,
    /// A defect of this library: the handle is dead.
    Panic,
}

/// An error with its explanation.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    text: Cow<'static, str>,
}

impl Error {
    /// An error of `kind` with a text that names the thing and the remedy.
    pub fn new(kind: Kind, text: impl Into<Cow<'static, str>>) -> Error {
        Error { kind, text: text.into() }
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The explanation, without a final newline.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The errno that the C boundary reports.
    pub fn errno(&self) -> i32 {
        self.kind.row().0
    }

    /// The `clnt_stat` that the C boundary reports.
    pub fn clnt_stat(&self) -> u32 {
        self.kind.row().1
    }
}

/// `enum clnt_stat` of libtirpc, the values that we report.
#[allow(missing_docs)]
pub mod clnt_stat {
    pub const SUCCESS: u32 = 0;
    pub const CANTENCODEARGS: u32 = 1;
    pub const CANTDECODERES: u32 = 2;
    pub const CANTSEND: u32 = 3;
    pub const CANTRECV: u32 = 4;
    pub const TIMEDOUT: u32 = 5;
    pub const AUTHERROR: u32 = 7;
    pub const PROGVERSMISMATCH: u32 = 9;
    pub const SYSTEMERROR: u32 = 12;
    pub const UNKNOWNHOST: u32 = 13;
    pub const RPCBFAILURE: u32 = 14;
    pub const PROGNOTREGISTERED: u32 = 15;
    pub const FAILED: u32 = 16;
    pub const N2AXLATEFAILURE: u32 = 22;
}

impl Kind {
    /// THE table: errno, `clnt_stat`.
    fn row(self) -> (i32, u32) {
        match self {
            Kind::Timeout => (libc::ETIMEDOUT, clnt_stat::TIMEDOUT),
            Kind::NotSent => (libc::EPIPE, clnt_stat::CANTSEND),
            Kind::ConnectionLost => (libc::ECONNRESET, clnt_stat::CANTRECV),
            Kind::Refused => (libc::ECONNREFUSED, clnt_stat::SYSTEMERROR),
            Kind::Encode => (libc::EINVAL, clnt_stat::CANTENCODEARGS),
            Kind::Peer => (libc::EIO, clnt_stat::FAILED),
            Kind::Protocol => (libc::EPROTO, clnt_stat::CANTRECV),
            Kind::TooLong => (libc::EMSGSIZE, clnt_stat::FAILED),
            Kind::Os(errno) => (errno, clnt_stat::SYSTEMERROR),
            Kind::Invalid => (libc::EINVAL, clnt_stat::FAILED),
            Kind::NotRegistered => (libc::ENOENT, clnt_stat::PROGNOTREGISTERED),
            Kind::Rpcbind => (libc::ECONNREFUSED, clnt_stat::RPCBFAILURE),
            Kind::UnknownHost => (libc::EHOSTUNREACH, clnt_stat::UNKNOWNHOST),
            Kind::NoAddress => (libc::EAFNOSUPPORT, clnt_stat::N2AXLATEFAILURE),
            Kind::Panic => (libc::ENOTRECOVERABLE, clnt_stat::FAILED),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

/// What strerror(3) says: std appends a number, which tells a reader nothing more.
pub fn os_text(e: &std::io::Error) -> String {
    let mut text = e.to_string();
    if let Some(at) = text.find(" (os error") {
        text.truncate(at);
    }
    text
}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Error {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        Error::new(Kind::Os(errno), os_text(&e))
    }
}
