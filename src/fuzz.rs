//! What the targets in `fuzz/` use of the modules that nobody outside this crate sees. Only with the feature `fuzz`, with which
//! the C library is never built: there is no contract here, and everything is for tests.

pub use crate::connection::{Connection, Expect, Output, Registrar, Request, RequestId, Role, Settings};
pub use crate::error::{Error, Kind};
pub use crate::memory::shared::{Own, RING, Shown, Theirs, Word, width};
pub use crate::memory::{Buf, IoVec, IoVecMut, Memory, Message, Payload, Region, Regions, Sink};
pub use crate::tirpc::{PLAIN_REPLY, library, opaque_auth, rpc_msg};
pub use crate::xdr::{Decoder, Encoder, LEND_MIN, Lending, XDR, XdrOps, op};

#[cfg(feature = "verbs")]
pub use crate::provider::verbs::{Verbs, mock};

use std::ffi::OsString;
use std::path::Path;

use crate::config::Config;

/// The settings that an environment and the text of a file give, and what is wrong with the others.
pub fn settings(
    env: impl IntoIterator<Item = (OsString, OsString)>,
    file: Option<&str>,
    secure: bool,
) -> (Config, Vec<Error>) {
    Config::understood(env, file.map(|text| (Path::new("file"), text)), secure)
}
