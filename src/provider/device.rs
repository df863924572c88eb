//! The devices: what each is like, how a connection over it begins, and the table of them.
//!
//! To add one, write a file that implements [`Device`], and add a line to [`DEVICES`] and its word to
//! [`crate::config::DEVICES`]. The driver decides who uses which device, and in which order they are tried.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{QueuePair, iwarp, local};
use crate::config::Crc;
use crate::error::{Error, Kind};
use crate::memory::Areas;
use crate::socket;

/// Every device. Where more than one leads to a peer, earlier ones have a head start; the last is the one that all
/// machines have.
pub static DEVICES: &[&dyn Device] = &[
    #[cfg(test)]
    &super::toy::Toy,
    #[cfg(feature = "verbs")]
    &verbs::Adapters,
    &local::Local,
    &iwarp::Software,
];

/// What the layers above know about a device.
#[derive(Debug, PartialEq, Eq)]
pub struct Traits {
    /// The word of the configuration for it.
    pub name: &'static str,
    /// What it is, for the log: "adapters".
    pub title: &'static str,
    /// It goes over the TCP socket by which the program knows the connection; otherwise that socket is only the
    /// connection's name.
    pub socket: bool,
    /// Its descriptor also becomes readable when queued work can go on, and never reports that by becoming writable.
    pub one_event: bool,
    /// The memory that it uses is locked, and little memory may be locked.
    pub locked_memory: bool,
    /// A connection has its own memory for messages, which ends with the connection.
    pub own_memory: bool,
    /// Results of this length or more are received in the program's own memory.
    pub place_min: usize,
    /// It can reach loopback addresses.
    pub loopback: bool,
}

/// What a connection is made with.
#[derive(Clone, Debug)]
pub struct Options {
    /// What we tell the peer: bytes of a Receive, and of the longest Send.
    pub inline: usize,
    /// Bytes of each Receive that the connection begins with.
    pub receive: usize,
    /// Bytes of the longest Receive that the peer may ask for: at least `receive`.
    pub slab: usize,
    /// Whether the peer may invalidate handles.
    pub remote_invalidation: bool,
    /// Number of Receives beyond `margin`, if memory allows: as many as there are credits.
    pub credits: u32,
    /// Receives for messages without a credit.
    pub margin: u32,
    /// Whether what crosses a network that may damage it has checksums.
    pub crc: Crc,
    /// No other device may be used: this one also takes what others would be better for.
    pub only: bool,
    /// Whether a thread may wait for its peer without sleeping.
    pub spins: bool,
}

/// What a connection is made over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To this address, for a device that does not go over a socket.
    Address(SocketAddr),
    /// A connected TCP socket, for a device that goes over one.
    Socket(RawFd),
}

impl Way {
    /// The error of a device that cannot go this way.
    pub fn unknown(self) -> Error {
        let text = match self {
            Way::Address(_) => "the device goes over TCP sockets only",
            Way::Socket(_) => "the device goes over no TCP socket",
        };
        Error::new(Kind::Invalid, text)
    }
}

/// A kind of device.
pub trait Device: Sync {
    /// What it is like.
    fn traits(&self) -> &'static Traits;

    /// Whether this process can use a device of this kind. `only`: as [`Options::only`].
    ///
    /// # Errors
    /// Why not, and what to do: `ENODEV` where there is none.
    fn usable(&self, _only: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Whether this process can no longer use what it has used.
    fn is_refused(&self) -> bool {
        false
    }

    /// Whether it takes TCP ports for itself when it is the only device that may be used.
    fn takes_ports(&self) -> bool {
        false
    }

    /// Whether a first connection would have what the device needs of this host and process.
    ///
    /// # Errors
    /// What is missing, and what to do.
    #[cfg(feature = "tool")]
    fn ready(&self, _options: &Options) -> Result<(), Error> {
        Ok(())
    }

    /// Which part of the device leads to an address, by name if there are several. Nothing is sent to the address.
    ///
    /// # Errors
    /// Why it does not.
    #[cfg(feature = "tool")]
    fn leads(&self, _to: SocketAddr, _only: bool) -> Result<String, Error> {
        Ok(String::new())
    }

    /// Starts to connect; the caller then drives the startup to its end. `areas` are for Reply chunks, if the device can
    /// have them at once.
    ///
    /// # Errors
    /// Nothing leads there.
    fn connect(
        &self,
        way: Way,
        options: &Options,
        areas: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error>;

    /// The connection of an accepted TCP socket; the caller then drives its startup to its end.
    ///
    /// # Errors
    /// The device goes over no socket, or cannot be set up.
    fn accept(&self, socket: RawFd, _options: &Options) -> Result<Box<dyn QueuePair>, Error> {
        Err(Way::Socket(socket).unknown())
    }

    /// Listens where a TCP socket does, beside it. A device that goes over sockets uses that TCP socket itself.
    ///
    /// # Errors
    /// There is no device, none has such an address, or the port is taken.
    fn listen(&self, _places: Places, _only: bool) -> Result<Box<dyn Listener>, Error> {
        Err(Error::new(Kind::Os(libc::ENODEV), "the device listens at TCP sockets only"))
    }
}

/// Where a device listens.
pub trait Listener: Send {
    /// Readable when somebody wants to connect.
    fn fd(&self) -> RawFd;

    /// Whether this process was forked from the one that listens.
    fn forked(&self) -> bool;

    /// Whether a device has gone away, and with it what listened there.
    fn lost(&self) -> bool;

    /// The number of places in which it listens.
    fn places(&self) -> usize;

    /// What has become of the next request: a connection, whose startup the caller then drives to its end, or nothing if it
    /// was refused. Each request costs the loop time. `known`: accept only peers whose address is known from something other
    /// than their own word. `make_room` closes some other connection to make room for one from this peer; false when none
    /// can be closed.
    ///
    /// # Errors
    /// Nothing more can be accepted.
    fn accept(
        &mut self,
        options: &Options,
        known: bool,
        make_room: &mut dyn FnMut(Shortage, IpAddr) -> bool,
    ) -> Result<Knock, Error>;
}

/// What there is too little of for another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// Memory that may be locked.
    Memory,
    /// The part of that memory for connections that are not yet established.
    Starting,
}

/// Where a TCP socket listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Its addresses, with IPv4 ones given as IPv4: one, or any of each family. All have the same port.
    pub addresses: Vec<SocketAddr>,
    /// The only interface on which it listens.
    pub interface: Option<String>,
}

impl Places {
    /// Whether a connection to `local` would reach the socket too, and does not come from this host itself.
    pub fn contain(&self, local: SocketAddr) -> bool {
        let own = |at: &SocketAddr| {
            at.is_ipv4() == local.is_ipv4() && (at.ip().is_unspecified() || at.ip() == local.ip())
        };
        let there = || {
            let interface = self.interface.as_deref();
            interface.is_none() || socket::local_addresses(interface).iter().any(|at| at.ip() == local.ip())
        };
        !local.ip().is_loopback() && self.addresses.iter().any(own) && there()
    }
}

/// What has become of a request to connect.
pub enum Knock {
    /// There is none.
    Nobody,
    /// It was refused, or was not a request.
    Refused,
    /// A connection.
    Accepted(Accepted),
}

/// A connection that a listener has accepted.
pub struct Accepted {
    /// Not yet established.
    pub device: Box<dyn QueuePair>,
    /// The address of this end.
    pub local: Option<SocketAddr>,
    /// The address of the peer.
    pub peer: Option<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn every_device_has_a_word_in_the_configuration_and_every_word_a_device() {
        let mut devices: Vec<&str> = DEVICES.iter().map(|device| device.traits().name).collect();
        let mut words = config::DEVICES.to_vec();
        devices.sort_unstable();
        words.retain(|word| cfg!(feature = "verbs") || *word != "verbs");
        words.sort_unstable();
        assert_eq!(devices, words);
    }
}
