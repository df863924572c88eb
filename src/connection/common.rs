//! What the requester and the responder of a connection work with.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::characteristics::{Characteristics, Endpoint, RECEIVE_MIN};
use super::life::Life;
use super::window::Window;
use super::{Output, Registrar, Role, Settings, receive_margin};
use crate::binding::Registry;
use crate::error::Error;
use crate::memory::{Memory, Message, Pieces, Regions};
use crate::provider::WorkRequest;
use crate::wire::characteristics::Backward;
use crate::wire::header::{self, Direction, Proc};
use crate::wire::lists::Lists;
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Segment, Xid, v1, v2};

/// What both ends have said about themselves for Version One (RFC 8797): it lasts as long as the connection.
pub(super) struct VersionOne {
    /// Largest Send that the peer takes: the call inline threshold of a client, the reply threshold of a server.
    pub(super) send: usize,
    /// Largest Send that the peer makes.
    pub(super) receive: usize,
    /// Replies may invalidate a handle of the requester, because both ends have said so.
    invalidate: bool,
}

impl VersionOne {
    pub(super) fn new(settings: &Settings, peer: &PrivateData) -> VersionOne {
        // RFC 8166 §3.3.2: "The inline threshold value is the smaller of the largest number of bytes the sender can
        // post via a single RDMA Send operation and the largest number of bytes the receiver can accept via a single
        // RDMA Receive operation."
        let own = PrivateData {
            remote_invalidation: settings.remote_invalidation,
            send_size: settings.inline,
            receive_size: settings.inline,
        };
        VersionOne {
            send: own.send_threshold(peer),
            receive: own.receive_threshold(peer),
            invalidate: own.may_invalidate(peer),
        }
    }
}

/// Handles of one call: nearly always one.
pub(super) type Handles = SmallVec<[Handle; 1]>;

/// See the first line of this file.
pub(super) struct Common {
    pub(super) role: Role,
    pub(super) settings: Settings,
    pub(super) memory: Arc<Memory>,
    pub(super) bindings: Arc<Registry>,
    pub(super) life: Life,
    pub(super) one: VersionOne,
    /// Version Two, and the Receives of both.
    pub(super) characteristics: Characteristics,
    pub(super) window: Window,
    pub(super) output: VecDeque<Output>,
    /// Where headers are encoded.
    pub(super) scratch: Cell<Vec<u8>>,
}

impl Common {
    /// Calls that may be transmitted now.
    pub(super) fn credits_left(&self) -> u32 {
        if self.version().is_some() { self.window.left() } else { 0 }
    }

    /// Posts the Receives that are missing.
    ///
    /// RFC 8166 §3.3.1: "A Requester MUST maintain enough receive resources to accommodate expected replies." Every call
    /// whose reply is expected holds a credit, so credits bound the Receives of both ends. RFC 8167 §4.3.1: "a client
    /// endpoint posts enough additional Receive buffers to match its advertised reverse-direction credit value."
    ///
    /// Each of the `working` Calls under way keeps its Receive.
    pub(super) fn replenish(&mut self, working: usize) {
        let wanted = self.window.receives() + receive_margin(self.settings.versions);
        let open = self.life.is_open();
        let held = self.characteristics.held() as usize;
        for _ in held..(wanted as usize).saturating_sub(working) {
            if open {
                let bytes = self.characteristics.posted();
                self.output.push_back(Output::Receive(bytes));
            }
        }
    }

    /// Bytes of the Receive that replaces the one that a message has just consumed, if no other is missing and all have the same
    /// length; otherwise `replenish` must see to it. `working` is as there.
    pub(super) fn next_receive(&self, working: usize) -> Option<usize> {
        let wanted = self.window.receives() + receive_margin(self.settings.versions);
        let held = self.characteristics.held_alike()?;
        (held as usize == (wanted as usize).saturating_sub(working)).then(|| self.characteristics.goal())
    }

    /// Inline thresholds in bytes: of our Sends and of the peer's. Until a version is agreed, those of the first message.
    pub(super) fn thresholds(&self) -> (usize, usize) {
        match self.version() {
            Some(v1::VERSION) => (self.one.send, self.one.receive),
            Some(_) => (self.characteristics.send_limit(), self.characteristics.own().receive_size),
            None => (RECEIVE_MIN, self.characteristics.own().receive_size),
        }
    }

    /// The version that our calls are made in; `None` before it is agreed.
    pub(super) fn version(&self) -> Option<u32> {
        self.life.version()
    }

    /// What the peer is like: as it has said itself, or as Version One tells.
    pub(super) fn peer(&self) -> Endpoint {
        let told = |receive_size, remote_invalidation| Endpoint {
            receive_size,
            remote_invalidation,
            backward: Backward::Unknown,
        };
        match self.version() {
            Some(v1::VERSION) => told(self.one.send, self.one.invalidate),
            Some(_) => *self.characteristics.peer(),
            None => told(RECEIVE_MIN, false),
        }
    }

    /// Longest Send to the requester of a Call of this version.
    pub(super) fn reply_limit(&self, version: u32) -> usize {
        if version == v2::VERSION { self.characteristics.send_limit() } else { self.one.send }
    }

    /// Whether a Reply may invalidate the handle of its Call.
    pub(super) fn may_invalidate(&self, version: u32) -> bool {
        if version == v1::VERSION {
            return self.one.invalidate;
        }
        // The draft of the characteristics, section 3.2: "false" allows plain Sends only. Our own value tells what our device can
        // do. The draft does not say which handle it may be: one that the Call itself names, as in RFC 8797.
        self.settings.remote_invalidation && self.characteristics.peer().remote_invalidation
    }

    /// The Send of the header of a Call or Reply, and of ranges of its message.
    pub(super) fn gather(
        &self,
        (version, xid): (u32, Xid),
        (proc, direction): (Proc, Direction),
        lists: &Lists,
        message: Pieces,
        ranges: &[Range<usize>],
    ) -> Result<Regions, Error> {
        let credits = self.window.told(direction);
        let mut bytes = self.scratch.take();
        header::encode(&mut bytes, version, xid, credits, proc, direction, lists);
        let gather = message.send(&bytes, ranges, &self.memory);
        bytes.clear();
        self.scratch.set(bytes);
        Ok(gather?)
    }

    /// The same for all of a message whose header has no more than a Reply chunk of one segment, like nearly every short one.
    pub(super) fn gather_plain(
        &self,
        (version, xid): (u32, Xid),
        direction: Direction,
        reply: Option<Segment>,
        message: Message,
    ) -> Result<Regions, Error> {
        let whole = 0..message.len();
        let (pieces, ranges) = (message.freeze(), std::slice::from_ref(&whole));
        if version != v1::VERSION {
            let lists = Lists { reply: reply.map(|segment| smallvec![segment]), ..Lists::default() };
            return self.gather((version, xid), (Proc::Msg, direction), &lists, pieces, ranges);
        }
        let mut header = [0; v1::PLAIN_MAX];
        let header = header::encode_plain(&mut header, xid, self.window.told(direction), reply);
        Ok(pieces.send(header, ranges, &self.memory)?)
    }

    /// Sends a message without a payload. False when there is no memory for it; the connection ends then.
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> bool {
        let region = self.memory.header().and_then(|mut buf| {
            buf.extend(bytes)?;
            Ok(buf.freeze())
        });
        match region {
            Ok(region) => {
                let send = WorkRequest::Send { gather: smallvec![region], invalidate: None };
                self.output.push_back(Output::Post(send));
                true
            }
            // RFC 8166 §4.5.4: "If a Responder is unable to construct and transmit an RPC Reply or RPC-over-RDMA error
            // message, the Responder MUST close the connection to signal to the Requester that a reply was lost."
            Err(error) => {
                self.close(error.into());
                false
            }
        }
    }

    /// Ends exposures.
    pub(super) fn release(&mut self, handles: &mut Handles, registrar: &mut (impl Registrar + ?Sized)) {
        for handle in handles.drain(..) {
            if let Err(error) = registrar.invalidate(handle) {
                // RFC 8166 §4.5.4: "if it is unable to invalidate a memory region due to an unrecoverable problem, the
                // Requester MUST close the connection to protect that memory from Responder access before the
                // associated RPC transaction is complete."
                self.close(error);
            }
        }
    }

    /// Asks for the end of the connection, once; the driver answers with `handle_closed`.
    pub(super) fn close(&mut self, error: Error) {
        if self.life.close() {
            self.output.push_back(Output::Close(error));
        }
    }

    /// Whether we have offered Version Two and wait for the answer.
    pub(super) fn offers(&self) -> bool {
        self.role == Role::Client && self.version().is_none()
    }

    /// Whether Version Two is offered and not answered, and Version One would do.
    pub(super) fn may_fall_back(&self) -> bool {
        self.offers() && self.settings.versions.include(v1::VERSION)
    }
}
