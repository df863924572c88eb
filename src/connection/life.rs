//! The life of a connection, from the agreement on a version to its end.
#![forbid(unsafe_code)]

use crate::error::Error;

/// Where a connection is in its life.
pub(super) enum Life {
    /// It is not known what our calls are made in. A client waits for the answer to its first message, an INIT_XCHAR of
    /// Version Two; a server, for the first message of the client.
    Negotiating,
    /// Our offer of Version Two was refused, and nobody has said yet that no more has come.
    Refused,
    /// Our calls are made in this version.
    Open(u32),
    /// [`super::Output::Close`] is out: nothing more is transmitted. With the version, if one was agreed.
    Closing(Option<u32>),
    /// The driver has told that the connection is gone, and why; every later command fails with it.
    Closed(Option<u32>, Error),
}

impl Life {
    /// The version that our calls are made in; `None` before it is agreed.
    pub(super) fn version(&self) -> Option<u32> {
        match *self {
            Life::Negotiating | Life::Refused => None,
            Life::Open(version) => Some(version),
            Life::Closing(version) | Life::Closed(version, _) => version,
        }
    }

    /// Our calls are made in `version`.
    pub(super) fn agree(&mut self, version: u32) {
        match self {
            Life::Negotiating | Life::Refused | Life::Open(_) => *self = Life::Open(version),
            Life::Closing(agreed) | Life::Closed(agreed, _) => *agreed = Some(version),
        }
    }

    /// The peer has refused our offer.
    pub(super) fn refuse(&mut self) {
        if let Life::Negotiating = self {
            *self = Life::Refused;
        }
    }

    /// Whether something may be transmitted.
    pub(super) fn is_open(&self) -> bool {
        !matches!(self, Life::Closing(_) | Life::Closed(..))
    }

    /// The end is asked for. False when it was before.
    pub(super) fn close(&mut self) -> bool {
        let open = self.is_open();
        if open {
            *self = Life::Closing(self.version());
        }
        open
    }

    /// The connection is gone.
    pub(super) fn end(&mut self, error: Error) {
        *self = Life::Closed(self.version(), error);
    }

    /// Why the connection is gone, if it is.
    pub(super) fn closed(&self) -> Option<&Error> {
        match self {
            Life::Closed(_, error) => Some(error),
            _ => None,
        }
    }
}
