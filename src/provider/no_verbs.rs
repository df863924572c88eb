//! Stands in for `verbs` in a library that was built without the feature of that name: there is no device.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::error::{Error, Kind};
use crate::memory::Areas;
use crate::provider::QueuePair;

/// What a connection is made with.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Options {
    pub inline: usize,
    pub receive: usize,
    pub slab: usize,
    pub remote_invalidation: bool,
    pub credits: u32,
    pub margin: u32,
    pub iwarp: bool,
}

/// See `verbs`.
pub const NEEDS_ROOM: &str = "";

/// There is none.
pub fn present(_iwarp: bool) -> bool {
    false
}

/// There is none.
///
/// # Errors
/// Always.
pub fn some_device(_iwarp: bool) -> Result<(), Error> {
    Err(not_built_in())
}

/// There is nothing to refuse.
pub fn are_refused() -> bool {
    false
}

/// There is none.
pub fn shares_ports() -> bool {
    false
}

fn not_built_in() -> Error {
    Error::new(Kind::Invalid, "verbs is not built in (cargo feature \"verbs\")")
}

/// Nothing can be connected to.
///
/// # Errors
/// Always.
pub fn connect(
    _address: SocketAddr,
    _options: &Options,
    _areas: Option<Arc<Areas>>,
) -> Result<Box<dyn QueuePair>, Error> {
    Err(not_built_in())
}

/// What there is too little of for another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Shortage {
    Memory,
    Starting,
}

/// What has become of a request to connect.
#[allow(missing_docs)]
pub enum Knock {
    Nobody,
    Refused,
    Accepted(Accepted),
}

/// A connection that a listener has accepted.
#[allow(missing_docs)]
pub struct Accepted {
    pub device: Box<dyn QueuePair>,
    pub local: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
}

/// Where a TCP socket listens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Places {
    pub addresses: Vec<SocketAddr>,
    pub interface: Option<String>,
}

/// There is none.
pub enum Listener {}

#[allow(missing_docs, clippy::missing_errors_doc)]
impl Listener {
    pub fn new(_places: Places, _iwarp: bool) -> Result<Listener, Error> {
        Err(not_built_in())
    }
    pub fn fd(&self) -> RawFd {
        match *self {}
    }
    pub fn forked(&self) -> bool {
        match *self {}
    }
    pub fn lost(&self) -> bool {
        match *self {}
    }
    pub fn places(&self) -> usize {
        match *self {}
    }
    pub fn accept(
        &mut self,
        _options: &Options,
        _known: bool,
        _make_room: &mut dyn FnMut(Shortage, IpAddr) -> bool,
    ) -> Result<Knock, Error> {
        match *self {}
    }
}
