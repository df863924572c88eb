//! What this host has for RPC over RDMA, and what of it would be used towards another host: the library's own answers.

use std::ffi::CString;
use std::net::SocketAddr;
use std::time::Duration;

use crate::config::Config;
use crate::driver::start;
use crate::error::{Error, Kind};
use crate::ffi::Inside;
use crate::provider::DEVICES;
use crate::tirpc::netid::{self, Netid, Row};
use crate::{process, socket};

/// A kind of device, and whether this process can use a device of that kind.
pub struct Device {
    /// The word of the configuration for it.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    /// Whether it is usable: if not, why, and what to do.
    pub usable: Result<(), Error>,
    /// What a first connection would lack.
    pub ready: Result<(), Error>,
}

/// The kinds of devices that are built in, the best one first.
pub fn devices(config: &Config) -> Vec<Device> {
    let device = |device: &&dyn crate::provider::Device| {
        let traits = device.traits();
        let ready = device.ready(&start::options(config, traits));
        Device { name: traits.name, title: traits.title, usable: device.usable(false), ready }
    };
    DEVICES.iter().map(device).collect()
}

/// Bytes that may be locked: RLIMIT_MEMLOCK, and what a process with the rights of this one may lock. `None`: any number.
pub fn lockable() -> (Option<usize>, Option<usize>) {
    (process::memlock_limit(), process::lockable())
}

/// A kind of device, as seen by connections to an address.
pub struct Candidate {
    /// The word of the configuration for it.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    /// Which part of it leads there, or why none does.
    pub leads: Result<String, Error>,
}

/// The kinds of devices that connections to `to` would be tried over; the first one that leads there is used.
///
/// # Errors
/// What the configuration allows is not built in.
pub fn candidates(to: SocketAddr, config: &Config) -> Result<Vec<Candidate>, Error> {
    let candidates = start::candidates(to, config)?.into_iter();
    let candidate = |one: start::Candidate| Candidate {
        name: one.traits.name,
        title: one.traits.title,
        leads: one.leads,
    };
    Ok(candidates.map(candidate).collect())
}

/// The addresses of an interface.
pub fn addresses(interface: &str) -> Vec<std::net::IpAddr> {
    socket::local_addresses(Some(interface)).iter().map(SocketAddr::ip).collect()
}

/// What rpcbind at `host` (this machine if `None`), reached over the addresses of netid rdma or rdma6, lists; and where
/// rpcbind is.
///
/// # Errors
/// No such host, or no rpcbind.
pub fn registered(host: Option<&str>, six: bool, timeout: Duration) -> Result<(SocketAddr, Vec<Row>), Error> {
    let inside = Inside::enter().ok_or_else(|| Error::new(Kind::Invalid, "asked inside the library"))?;
    let host = host.map(CString::new).transpose();
    let host = host.map_err(|_| Error::new(Kind::UnknownHost, "a name of a host has no NUL"))?;
    let timeout = libc::timeval {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_usec: libc::suseconds_t::from(timeout.subsec_micros()),
    };
    let netid = if six { Netid::Rdma6 } else { Netid::Rdma };
    netid::registered(host.as_deref(), netid, timeout, &inside)
}
