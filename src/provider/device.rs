//! The devices: what each is like, how a connection over it begins, and the table of them.
//!
//! A further one is a file of its own that implements [`Device`], a line in [`DEVICES`] and its word in
//! [`crate::config::DEVICES`]. Who takes which of them, and in which order, is up to the driver.

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

/// Every device. Where more than one leads to a peer the first one has a start; the last is what all machines have.
pub static DEVICES: &[&dyn Device] = &[
    #[cfg(test)]
    &super::toy::Toy,
    #[cfg(feature = "verbs")]
    &verbs::Adapters,
    &local::Local,
    &iwarp::Software,
];

/// What the layers above know of a device.
#[derive(Debug, PartialEq, Eq)]
pub struct Traits {
    /// The word of the configuration for it.
    pub name: &'static str,
    /// What it is, for the log: "adapters".
    pub title: &'static str,
    /// It goes over the TCP socket that the program knows the connection by; else that is no more than its name.
    pub socket: bool,
    /// Its descriptor becomes readable also when queued work can go on, and never tells that by being writable.
    pub one_event: bool,
    /// The memory that it uses is locked, and there is little of that.
    pub locked_memory: bool,
    /// A connection has memory of its own for messages, which ends with it.
    pub own_memory: bool,
    /// Results from this length on are received in the program's own memory.
    pub place_min: usize,
    /// It leads to loopback addresses.
    pub loopback: bool,
}

/// What a connection is made with.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the peer is told: bytes of a Receive, and of the longest Send.
    pub inline: usize,
    /// Bytes of the Receives that the connection begins with.
    pub receive: usize,
    /// Bytes of the longest Receive that the peer may ask for: at least `receive`.
    pub slab: usize,
    /// Whether the peer may invalidate handles.
    pub remote_invalidation: bool,
    /// Receives beyond `margin`, if memory allows: as many as there are credits.
    pub credits: u32,
    /// Receives for messages without a credit.
    pub margin: u32,
    /// Whether what goes over a network that it may damage has checksums.
    pub crc: Crc,
    /// No other device may be used: this one takes what others would be better for.
    pub only: bool,
    /// Whether a thread may wait for its peer without sleeping.
    pub spins: bool,
}

/// What a connection is made over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To this address, of a device that does not go over a socket.
    Address(SocketAddr),
    /// A TCP socket that is connected, of one that does.
    Socket(RawFd),
}

impl Way {
    /// The error of a device that does not go this way.
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

    /// Whether this process can use one. `only`: as [`Options::only`].
    ///
    /// # Errors
    /// Why not, and what to do: `ENODEV` where there is none.
    fn usable(&self, _only: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Whether this process cannot use any more what it has used.
    fn is_refused(&self) -> bool {
        false
    }

    /// Whether it takes TCP ports for itself where `only` it is used.
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

    /// What of it leads to an address, by name where there are several. Nothing is sent there.
    ///
    /// # Errors
    /// Why it does not.
    #[cfg(feature = "tool")]
    fn leads(&self, _to: SocketAddr, _only: bool) -> Result<String, Error> {
        Ok(String::new())
    }

    /// Starts to connect; the startup is then to be driven to its end. `areas` are for Reply chunks, if the device can have
    /// them at once.
    ///
    /// # Errors
    /// Nothing leads there.
    fn connect(
        &self,
        way: Way,
        options: &Options,
        areas: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error>;

    /// The connection of a TCP socket that was accepted, whose startup is then to be driven to its end.
    ///
    /// # Errors
    /// The device goes over no socket, or cannot be set up.
    fn accept(&self, socket: RawFd, _options: &Options) -> Result<Box<dyn QueuePair>, Error> {
        Err(Way::Socket(socket).unknown())
    }

    /// Listens where a TCP socket does, beside it. A device that goes over sockets has that one.
    ///
    /// # Errors
    /// There is no device, or none has such an address, or the port is taken.
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

    /// Whether a device has gone, and with it what listened there.
    fn lost(&self) -> bool;

    /// In how many places it listens.
    fn places(&self) -> usize;

    /// What the next request has come to: a connection whose startup is then to be driven to its end, or nothing where it
    /// was refused. Each costs the loop its time. `known`: only from peers of which something else than their own word tells
    /// the address. `make_room` closes some other connection for one of this peer; false when none is to go.
    ///
    /// # Errors
    /// Nothing can be accepted any more.
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
    /// The part of it for connections that are not established.
    Starting,
}

/// Where a TCP socket listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Its addresses, IPv4 ones as such: one, or any of each family. All have the same port.
    pub addresses: Vec<SocketAddr>,
    /// The only interface that it listens at.
    pub interface: Option<String>,
}

impl Places {
    /// Whether a connection to `local` would come to the socket too, and not from this host itself.
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
    /// It was refused, or was none.
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
