//! Version Two in the engine: which version is spoken, and the messages of the transport-characteristics extension.
//!
//! A client offers Version Two with its first message, an INIT_XCHAR, and makes calls once that is answered; a server goes by the
//! first message that it receives. [`Characteristics`] decides what is said; this module says it. The drafts are
//! draft-cel-nfsv4-rpcrdma-version-two-01 and draft-dnoveck-nfsv4-rpcrdma-xcharext-01; `docs/version-two.md` lists what they
//! leave open.
#![forbid(unsafe_code)]

use super::characteristics::{self, Characteristics, Note};
use super::{Connection, Registrar, Role};
use crate::error::{Error, Kind};
use crate::wire::characteristics::{self as operations, Backward, Characteristic};
use crate::wire::header::{Body, Direction, Header, RdmaError, Versions};
use crate::wire::{Xid, v1, v2};

impl Connection {
    /// Tells the peer what we take in the reverse direction, if that has changed.
    pub(super) fn update_backward(&mut self) {
        // The draft speaks of requests only, and of the wrong end. It is taken to mean what the sender of the value can receive
        // in that direction: requests for a client, replies for a server.
        let serves = self.common.role == Role::Server || self.common.window.serves();
        self.common.characteristics.set_backward(match self.common.settings.reverse_chunks {
            _ if !serves => Backward::None,
            true => Backward::General,
            false => Backward::SizeLimited,
        });
        self.speak();
    }

    /// Whether Version Two is offered and not answered, and Version One would do.
    pub fn may_fall_back(&self) -> bool {
        self.common.may_fall_back()
    }

    /// The connection was closed before a version was agreed, and calls wait for another one that speaks Version One. What was
    /// not sent is left for `take_waiting`; another `handle_closed` ends it.
    pub fn must_fall_back(&self) -> bool {
        self.closed().is_some() && self.may_fall_back()
    }

    /// Learns from a message which version the peer speaks.
    pub(super) fn agree(&mut self, header: &Header<'_>) {
        match header.body {
            // The draft of Version Two, section 5.2. Only our first message can be meant, whatever version is written on it.
            Body::Error(RdmaError::Version { low, high }) if self.common.offers() => {
                if self.may_fall_back() && (Versions { low, high }).include(v1::VERSION) {
                    self.common.life.refuse();
                } else {
                    let text = versions_differ(low, high, "2");
                    self.common.close(Error::new(Kind::Peer, text));
                }
            }
            // The peer speaks Version One only, and checked the kind of the message before its version.
            Body::Error(_) if self.common.offers() && header.version == v1::VERSION => {
                if self.may_fall_back() {
                    self.common.life.refuse();
                } else {
                    let text = versions_differ(1, 1, "2");
                    self.common.close(Error::new(Kind::Peer, text));
                }
            }
            Body::Error(RdmaError::Version { .. }) => {}
            _ if header.version == v2::VERSION => self.common.life.agree(v2::VERSION),
            _ if self.common.role == Role::Server && self.version().is_none() => self.speak_version_one(),
            _ => {}
        }
    }

    /// Nothing more has arrived so far. Only now does a refused offer switch the connection to Version One: if the peer closed it
    /// along with the refusal, the calls are still there for another connection.
    pub fn handle_quiet(&mut self, registrar: &mut (impl Registrar + ?Sized)) {
        if self.refused() {
            self.speak_version_one();
            self.requester.transmit_waiting(&mut self.common, registrar);
        }
    }

    /// Whether the engine waits for `handle_quiet`.
    pub fn refused(&self) -> bool {
        self.common.life.is_refused()
    }

    fn speak_version_one(&mut self) {
        self.common.life.agree(v1::VERSION);
        self.common.characteristics.unavailable();
    }

    /// What both ends are like, as far as they have told each other.
    pub fn characteristics(&self) -> &Characteristics {
        &self.common.characteristics
    }

    /// Asks the peer to change a characteristic, now or as soon as the version is agreed. [`Characteristics::wish`] tells
    /// what became of it.
    ///
    /// # Errors
    /// `Invalid` when an earlier request is not settled, or the value makes no sense; `Peer` when the peer does not know
    /// the extension; the reason of the close when the connection is closed.
    pub fn request(&mut self, what: Characteristic) -> Result<(), Error> {
        if let Some(error) = self.closed() {
            return Err(error.clone());
        }
        if matches!(what, Characteristic::ReceiveSize(bytes) if (bytes as usize) < characteristics::RECEIVE_MIN)
        {
            return Err(Error::new(Kind::Invalid, "Receives have at least 1024 bytes"));
        }
        if self.version() == Some(v1::VERSION) {
            let text = "the connection speaks RPC-over-RDMA version 1, which has no characteristics: \
                        set RPCRDMA_VERSION=auto at both ends";
            return Err(Error::new(Kind::Peer, text));
        }
        if self.common.characteristics.known() == Some(false) {
            let text = "the peer does not know the transport-characteristics extension";
            return Err(Error::new(Kind::Peer, text));
        }
        if !self.common.characteristics.want(what) {
            return Err(Error::new(Kind::Invalid, "an earlier request to the peer is not settled yet"));
        }
        self.speak();
        Ok(())
    }

    /// Posts Receives of `bytes` bytes from now on, and tells a Version Two peer when no shorter one is left.
    ///
    /// # Errors
    /// `Invalid` for fewer bytes than the peer was told, since only the peer may ask for that; and for more than memory was set
    /// aside for.
    pub fn raise_receives(
        &mut self,
        bytes: usize,
        registrar: &mut (impl Registrar + ?Sized),
    ) -> Result<(), Error> {
        let (told, most) = (self.common.characteristics.own().receive_size, self.common.settings.receive_max);
        if !self.common.characteristics.raise(bytes) {
            let text = format!(
                "Receives of {bytes} bytes: at least {told}, which the peer counts on, and at most {most}; \
                 raise RPCRDMA_MAX_INLINE"
            );
            return Err(Error::new(Kind::Invalid, text));
        }
        self.common.characteristics.renew(&mut || registrar.withdraw());
        self.responder.replenish(&mut self.common);
        self.speak();
        Ok(())
    }

    /// Sends what the other end must be told by now.
    pub(super) fn speak(&mut self) {
        while self.version() == Some(v2::VERSION)
            && self.common.life.is_open()
            && let Some(note) = self.common.characteristics.next()
        {
            // A server introduces itself only once the client has used the extension, and so has a Receive for the message.
            if note == Note::Init && self.common.characteristics.known() != Some(true) {
                return;
            }
            let xid = self.fresh_xid();
            if !self.send_note(note, xid) {
                return;
            }
        }
    }

    /// Sends a message of the extension. False when it could not be made; the connection ends then.
    pub(super) fn send_note(&mut self, note: Note, xid: Xid) -> bool {
        let (kind, info) = match note {
            Note::Init => {
                let (start, unchanging) = self.common.characteristics.introduction();
                (operations::Kind::Init, operations::init(&start, unchanging))
            }
            Note::Request(what) => (operations::Kind::Request, operations::request(what.as_slice())),
            Note::Update(now, settled) => (operations::Kind::Update, operations::update(now, settled)),
        };
        let sent = self.send_optional(xid, Direction::Call, kind, &info);
        if sent {
            let sequence = self.requester.next_sequence();
            self.common.characteristics.sent(note, xid, sequence);
        }
        sent
    }

    /// Answers the peer's INIT_XCHAR with ours, unless it was sent before.
    ///
    /// The draft of Version Two, section 5.1, has the answer to a first message carry its XID, which no call of ours has used by
    /// then.
    fn introduce(&mut self, xid: Xid) {
        if self.common.characteristics.next() == Some(Note::Init) {
            let xid = if self.knows(xid) { self.fresh_xid() } else { xid };
            self.send_note(Note::Init, xid);
        }
    }

    /// A message of an extension of Version Two.
    pub(super) fn handle_optional(
        &mut self,
        header: &Header<'_>,
        kind: u32,
        info: &[u8],
        registrar: &mut (impl Registrar + ?Sized),
    ) {
        let refuse = |error| (header.xid, v2::VERSION, error);
        // The draft of Version Two, section 3.1: an unknown kind MUST be answered with this error.
        let Some(kind) = operations::Kind::of(kind) else {
            return self.responder.send_error(refuse(RdmaError::InvalidOption), &mut self.common);
        };
        // The drafts nowhere give the directions of INIT_XCHAR and UPD_XCHAR: what they are tells enough.
        let result = operations::decode(kind, info).and_then(|operation| {
            self.common.characteristics.handle(header.xid, operation, &mut || registrar.withdraw())
        });
        match result {
            Ok(None) if kind == operations::Kind::Init => self.introduce(header.xid),
            Ok(None) => {}
            Ok(Some((done, rejected, pending))) => {
                // So that what the response says is true when it leaves.
                self.responder.replenish(&mut self.common);
                let info = operations::response(done, rejected, pending);
                self.send_optional(header.xid, Direction::Reply, operations::Kind::Response, &info);
            }
            // A nonsensical answer counts as a refusal.
            Err(_) if kind == operations::Kind::Response => {
                self.common.characteristics.refused(header.xid);
            }
            // The draft of the characteristics, section 2.1, wants an XDR error, which has no number of its own.
            Err(_) => self.responder.send_error(refuse(RdmaError::BadHeader), &mut self.common),
        }
    }

    /// An XID for a message without an RPC message. The draft of Version Two, section 4.2.2: it is one of the XIDs of the
    /// message's direction.
    pub(super) fn fresh_xid(&mut self) -> Xid {
        loop {
            self.next_xid = self.next_xid.wrapping_add(1);
            let xid = Xid(self.next_xid);
            if !self.knows(xid) {
                return xid;
            }
        }
    }

    fn send_optional(&mut self, xid: Xid, direction: Direction, kind: operations::Kind, info: &[u8]) -> bool {
        let credits = self.common.window.told(direction);
        let mut bytes = Vec::new();
        v2::encode_optional(&mut bytes, xid, credits, direction, kind as u32, info);
        self.common.send_bytes(&bytes)
    }
}

/// Why the ends do not understand one another, and what helps.
pub(super) fn versions_differ(low: u32, high: u32, spoken: &str) -> String {
    format!(
        "the peer speaks RPC-over-RDMA versions {low} to {high}, not {spoken}; set RPCRDMA_VERSION=auto, \
         which speaks 1 and 2"
    )
}
