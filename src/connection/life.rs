//! The life of a connection, from the agreement on a version to its end.
#![forbid(unsafe_code)]

use crate::error::Error;

/// Where a connection is in its life.
pub(super) struct Life {
    /// The version of our calls, once that is agreed.
    version: Option<u32>,
    stage: Stage,
}

// Read several times per message, so a byte of its own tells the variant.
#[repr(u8)]
enum Stage {
    /// The version of our calls is not known yet. A client waits for the answer to its first message, an INIT_XCHAR of Version
    /// Two; a server, for the first message of the client.
    Negotiating,
    /// Our offer of Version Two was refused, and the driver has not said yet that nothing more has arrived.
    Refused,
    /// Calls go out.
    Open,
    /// [`super::Output::Close`] is out: nothing more is transmitted.
    Closing,
    /// The driver has reported that the connection is gone, and why; every later command fails with that error.
    Closed(Error),
}

impl Life {
    /// The beginning. `version`: that of our calls, if it is not to be agreed on.
    pub(super) fn new(version: Option<u32>) -> Life {
        let stage = if version.is_some() { Stage::Open } else { Stage::Negotiating };
        Life { version, stage }
    }

    /// The version that our calls are made in; `None` before it is agreed.
    pub(super) fn version(&self) -> Option<u32> {
        self.version
    }

    /// Our calls are made in `version`.
    pub(super) fn agree(&mut self, version: u32) {
        self.version = Some(version);
        if let Stage::Negotiating | Stage::Refused = self.stage {
            self.stage = Stage::Open;
        }
    }

    /// The peer has refused our offer.
    pub(super) fn refuse(&mut self) {
        if let Stage::Negotiating = self.stage {
            self.stage = Stage::Refused;
        }
    }

    /// Whether the peer has refused our offer, and what follows is not known yet.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::Refused)
    }

    /// Whether something may be transmitted.
    pub(super) fn is_open(&self) -> bool {
        !matches!(self.stage, Stage::Closing | Stage::Closed(_))
    }

    /// Asks for the end. Returns false when it was asked for before.
    pub(super) fn close(&mut self) -> bool {
        let open = self.is_open();
        if open {
            self.stage = Stage::Closing;
        }
        open
    }

    /// The connection is gone.
    pub(super) fn end(&mut self, error: Error) {
        self.stage = Stage::Closed(error);
    }

    /// Why the connection is gone, if it is.
    pub(super) fn closed(&self) -> Option<&Error> {
        match &self.stage {
            Stage::Closed(error) => Some(error),
            _ => None,
        }
    }
}
