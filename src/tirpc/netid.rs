//! The netids "rdma" and "rdma6": what netconfig, name-to-address translation and rpcbind say about them.
//!
//! Owned here: the two netconfig entries, which exist in no file; the handles that `__rpc_setconf` gives out for the nettypes
//! "rdma" and "rdma6"; addresses as libtirpc wants them; the look-up of a program at a host's rpcbind, and the error texts for
//! when rpcbind has no row, or accepts none.
//!
//! Left to others: [`super::interpose`] decides when to ask; the stock `taddr2uaddr`, `uaddr2taddr` and
//! `__rpc_nconf2fd` work for both netids as soon as `__rpc_nconf2sockinfo` says that they are TCP sockets.
//!
//! Invariants:
//! - `/etc/netconfig` never gets such an entry: libtirpc without this library takes the unknown netid for descriptor 0 and closes
//!   it.
//! - `nc_proto` is "rdma", so that neither a class of nettypes nor `__rpc_getconfip("tcp")` picks the entries up, and the flag is
//!   "-", so that only those who ask for them get them.
//! - rpcbind is asked with RPCBPROC_DUMP (RFC 1833 §2.2.1) and never with GETADDR, which ignores the netid in the request,
//!   answers for the transport on which the request came in, and so may return the port of the TCP service.
//! - The handles use no lock and no allocation: forks and signal handlers never find them half changed.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::config;
use crate::error::{Error, Kind, clnt_stat, os_text};
use crate::ffi::{self, Inside};
use crate::socket::Sockaddr;
use crate::tirpc::library::{Library, createerr};
use crate::tirpc::{
    __rpc_sockinfo, CLIENT, RPC_ANYFD, RPCBPROG, bool_t, clnt_ops, control, library, nc, netbuf, netconfig,
    real, rpc_err, rpcb,
};
use crate::xdr::XDR;

/// The port of rpcbind.
pub const RPCBIND_PORT: u16 = 111;

/// A netid of this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Netid {
    /// RPC over RDMA, addressed by IPv4.
    Rdma,
    /// RPC over RDMA, addressed by IPv6.
    Rdma6,
}

impl Netid {
    /// The netid with this name.
    pub fn named(name: &CStr) -> Option<Netid> {
        [Netid::Rdma, Netid::Rdma6].into_iter().find(|netid| netid.name() == name)
    }

    /// The netid of `nconf`, if it is one of ours.
    ///
    /// # Safety
    /// `nconf` is NULL or points to a netconfig entry.
    pub unsafe fn of(nconf: *const netconfig) -> Option<Netid> {
        // SAFETY: by the contract.
        unsafe { name_of(nconf) }.and_then(Netid::named)
    }

    /// The stock transport of `nconf`, and the netid that it is moved to.
    ///
    /// # Safety
    /// `nconf` is NULL or points to a netconfig entry.
    pub unsafe fn beside(nconf: *const netconfig) -> Option<(config::Netid, Netid)> {
        // SAFETY: by the contract.
        match unsafe { name_of(nconf) }?.to_bytes() {
            b"tcp" => Some((config::Netid::Tcp, Netid::Rdma)),
            b"tcp6" => Some((config::Netid::Tcp6, Netid::Rdma6)),
            b"udp" => Some((config::Netid::Udp, Netid::Rdma)),
            b"udp6" => Some((config::Netid::Udp6, Netid::Rdma6)),
            _ => None,
        }
    }

    /// The netid of an address.
    pub fn of_address(address: SocketAddr) -> Netid {
        if address.is_ipv4() { Netid::Rdma } else { Netid::Rdma6 }
    }

    /// The name.
    pub fn name(self) -> &'static CStr {
        match self {
            Netid::Rdma => c"rdma",
            Netid::Rdma6 => c"rdma6",
        }
    }

    /// The arguments for socket(2): to the program a connection is a TCP connection, whatever device it is moved to.
    pub fn sockinfo(self) -> __rpc_sockinfo {
        let (si_af, si_alen) = match self {
            Netid::Rdma => (libc::AF_INET, size_of::<libc::sockaddr_in>()),
            Netid::Rdma6 => (libc::AF_INET6, size_of::<libc::sockaddr_in6>()),
        };
        __rpc_sockinfo {
            si_af,
            si_proto: libc::IPPROTO_TCP,
            si_socktype: libc::SOCK_STREAM,
            si_alen: si_alen as i32,
        }
    }

    /// The entry, for callers that do not free it.
    pub fn entry(self) -> *const netconfig {
        static ENTRIES: [Entry; 2] = [Entry::new(Netid::Rdma), Entry::new(Netid::Rdma6)];
        &ENTRIES[self as usize].0
    }

    /// The entry of tcp in the same address family, for what goes over tcp although one of our netids was asked for.
    pub fn stock(self) -> *const netconfig {
        static ENTRIES: [Entry; 2] = [Entry::tcp(Netid::Rdma), Entry::tcp(Netid::Rdma6)];
        &ENTRIES[self as usize].0
    }

    /// A copy of the entry that `freenetconfigent` can free: the structure and one block of strings, which
    /// starts with the netid.
    ///
    /// # Errors
    /// No memory.
    pub fn allocate(self) -> Result<*mut netconfig, Error> {
        let none = || Error::new(Kind::Os(libc::ENOMEM), "no memory for a netconfig entry");
        let strings = [self.name(), self.family_name(), c"rdma", c"-"];
        let mut block = Vec::new();
        let starts = strings.map(|string| {
            let start = block.len();
            block.extend_from_slice(string.to_bytes_with_nul());
            start
        });
        // SAFETY: malloc has no preconditions.
        let text = unsafe { libc::malloc(block.len()) }.cast::<c_char>();
        if text.is_null() {
            return Err(none());
        }
        // SAFETY: malloc has no preconditions.
        let nconf = unsafe { libc::malloc(size_of::<netconfig>()) }.cast::<netconfig>();
        if nconf.is_null() {
            // SAFETY: allocated above, and given to nobody.
            unsafe { libc::free(text.cast()) };
            return Err(none());
        }
        // SAFETY: `text` has room for the block and cannot overlap it.
        unsafe { text.cast::<u8>().copy_from_nonoverlapping(block.as_ptr(), block.len()) };
        let [nc_netid, nc_protofmly, nc_proto, nc_device] = starts.map(|start| text.wrapping_add(start));
        let fields = netconfig { nc_netid, nc_protofmly, nc_proto, nc_device, ..Entry::new(self).0 };
        // SAFETY: `nconf` has room and malloc's alignment.
        unsafe { nconf.write(fields) };
        Ok(nconf)
    }

    const fn family_name(self) -> &'static CStr {
        match self {
            Netid::Rdma => c"inet",
            Netid::Rdma6 => c"inet6",
        }
    }

    /// The other netid.
    fn other(self) -> Netid {
        match self {
            Netid::Rdma => Netid::Rdma6,
            Netid::Rdma6 => Netid::Rdma,
        }
    }

    /// The family of its addresses, as named in messages.
    fn family(self) -> &'static str {
        match self {
            Netid::Rdma => "IPv4",
            Netid::Rdma6 => "IPv6",
        }
    }

    fn is_family_of(self, address: &SocketAddr) -> bool {
        address.is_ipv4() == (self == Netid::Rdma)
    }
}

/// `nc_netid` of an entry.
///
/// # Safety
/// `nconf` is NULL or points to a netconfig entry, which outlives the name.
unsafe fn name_of<'a>(nconf: *const netconfig) -> Option<&'a CStr> {
    // SAFETY: by the contract.
    let nconf = unsafe { ffi::reference(nconf) }?;
    // SAFETY: a netid is NULL or a NUL-terminated string that lives as long as its entry.
    unsafe { ffi::cstr(nconf.nc_netid) }
}

struct Entry(netconfig);

// SAFETY: the entry and its strings are never written.
unsafe impl Sync for Entry {}

impl Entry {
    const fn new(netid: Netid) -> Entry {
        let (name, family) = match netid {
            Netid::Rdma => (c"rdma", c"inet"),
            Netid::Rdma6 => (c"rdma6", c"inet6"),
        };
        Entry(netconfig {
            nc_netid: name.as_ptr().cast_mut(),
            nc_semantics: nc::NC_TPI_COTS_ORD,
            nc_flag: nc::NC_NOFLAG,
            nc_protofmly: family.as_ptr().cast_mut(),
            nc_proto: c"rdma".as_ptr().cast_mut(),
            nc_device: c"-".as_ptr().cast_mut(),
            nc_nlookups: 0,
            nc_lookups: null_mut(),
            nc_unused: [0 as c_ulong; 9],
        })
    }

    /// What /etc/netconfig says of the stock netid that corresponds to ours.
    const fn tcp(netid: Netid) -> Entry {
        let name = match netid {
            Netid::Rdma => c"tcp",
            Netid::Rdma6 => c"tcp6",
        };
        Entry(netconfig {
            nc_netid: name.as_ptr().cast_mut(),
            nc_flag: nc::NC_VISIBLE,
            nc_proto: c"tcp".as_ptr().cast_mut(),
            ..Entry::new(netid).0
        })
    }
}

/// The handles that `__rpc_setconf` gives out for our nettypes.
///
/// A handle is the address of its slot, so that ours can be told from libtirpc's by where they point. The slot counts the entries
/// that `__rpc_getconf` has still to return, plus one. Programs hold a handle only while they create a client or a server.
pub mod nettype {
    use super::*;

    static SLOTS: [AtomicU8; 4096] = [const { AtomicU8::new(FREE) }; 4096];
    const FREE: u8 = 0;
    const NOTHING_LEFT: u8 = 1;
    const RDMA6_LEFT: u8 = 2;
    const BOTH_LEFT: u8 = 3;

    /// A handle for `nettype`; `None` when it is not ours.
    ///
    /// "rdma" stands for both netids, as "tcp" stands for tcp and tcp6; rdma6 is left out on a machine without IPv6.
    ///
    /// # Errors
    /// When thousands of handles are in use.
    pub fn open(nettype: &CStr) -> Option<Result<*mut c_void, Error>> {
        let start = match nettype.to_bytes() {
            name if name.eq_ignore_ascii_case(b"rdma") => BOTH_LEFT,
            name if name.eq_ignore_ascii_case(b"rdma6") => RDMA6_LEFT,
            _ => return None,
        };
        let free = SLOTS
            .iter()
            .find(|slot| slot.compare_exchange(FREE, start, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        Some(match free {
            Some(slot) => Ok(slot.as_ptr().cast()),
            None => {
                Err(Error::new(Kind::Os(libc::EMFILE), "too many netconfig handles for \"rdma\" are in use"))
            }
        })
    }

    /// The next entry, or NULL after the last; `None` when the handle is not ours.
    pub fn next(handle: *mut c_void) -> Option<*const netconfig> {
        let slot = slot(handle)?;
        let left = slot.load(Ordering::Relaxed);
        let (netid, after) = match left {
            BOTH_LEFT => (Netid::Rdma, RDMA6_LEFT),
            RDMA6_LEFT => (Netid::Rdma6, NOTHING_LEFT),
            _ => return Some(null()),
        };
        slot.store(after, Ordering::Relaxed);
        if netid == Netid::Rdma6 && !has_ipv6() {
            return Some(null());
        }
        Some(netid.entry())
    }

    /// Ends the handle; `None` when it is not ours.
    pub fn close(handle: *mut c_void) -> Option<()> {
        slot(handle)?.store(FREE, Ordering::Relaxed);
        Some(())
    }

    fn slot(handle: *mut c_void) -> Option<&'static AtomicU8> {
        SLOTS.get(handle.addr().wrapping_sub(SLOTS.as_ptr().addr()))
    }

    fn has_ipv6() -> bool {
        // SAFETY: socket has no preconditions.
        let fd = unsafe {
            libc::socket(libc::AF_INET6, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP)
        };
        if fd < 0 {
            return false;
        }
        // SAFETY: opened above, and given to nobody.
        unsafe { libc::close(fd) };
        true
    }
}

impl Sockaddr {
    /// A `netbuf` that points to this address; valid as long as `self` is not moved.
    pub fn netbuf(&mut self) -> netbuf {
        let len = self.as_bytes().len() as u32;
        netbuf { maxlen: len, len, buf: self.as_mut_ptr().cast() }
    }
}

/// The address at which `prog` is registered on `netid` at `host` (this machine if `None`).
///
/// The exact version is preferred; any other version of the program will do, as with GETADDR. `timeout` bounds the call
/// to rpcbind; 60 s, libtirpc's own, if `None`.
///
/// The mark of being inside the library must be set: everything here goes over stock tcp.
///
/// # Errors
/// Unknown host, no address of the netid's family, no rpcbind, not registered. rpcbind itself cannot be reached over rdma.
pub fn look_up(
    host: Option<&CStr>,
    prog: u32,
    vers: u32,
    netid: Netid,
    timeout: Option<libc::timeval>,
    _: &Inside,
) -> Result<SocketAddr, Error> {
    let name = host.map_or("localhost".into(), |host| host.to_string_lossy().into_owned());
    if prog == RPCBPROG {
        let text = format!("program {prog} is rpcbind itself, which is reached over tcp and not over rdma");
        return Err(Error::new(Kind::NotRegistered, text));
    }
    let mut failure = None;
    for at in resolve(host, &name, netid)? {
        match dump(at, netid, timeout, Some(prog)) {
            Ok(rows) => {
                return choose(&rows, vers, at, netid)
                    .ok_or_else(|| not_registered(prog, netid, &name, &rows));
            }
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| not_registered(prog, netid, &name, &[])))
}

/// An error that says where the program is registered instead, and so what to do.
fn not_registered(prog: u32, netid: Netid, host: &str, rows: &[Row]) -> Error {
    let of = |name: &str| rows.iter().filter(|row| row.netid == name).map(|row| row.uaddr.as_str()).next();
    let mut others: Vec<&str> = rows.iter().map(|row| row.netid.as_str()).collect();
    others.sort_unstable();
    others.dedup();
    let (name, other) = (netid.name().to_string_lossy(), netid.other());
    let hint = if let Some(uaddr) = of(&name) {
        format!(", but for {uaddr}, which does not lead there from here")
    } else if of(&other.name().to_string_lossy()).is_some() {
        format!(", but on {}: its server has no {} address", other.name().to_string_lossy(), netid.family())
    } else if others.is_empty() {
        ", and on no other: is its server running?".into()
    } else {
        format!(
            ", but on {}: its server must run with librpcrdma, and with RPCRDMA_REDIRECT=tcp if it knows tcp only",
            others.join(", ")
        )
    };
    let text = format!("program {prog} is not registered on netid {name} at {host}{hint}");
    Error::new(Kind::NotRegistered, text)
}

/// Why this machine's rpcbind has just refused to register the program, as far as can be told.
///
/// The mark of being inside the library must be set.
pub fn refused(prog: u32, vers: u32, netid: Netid, _: &Inside) -> String {
    let name = netid.name().to_string_lossy();
    let why = look_at_rows(netid, prog).map_or_else(
        |error| error.to_string(),
        |rows| match rows.iter().find(|row| row.netid == name && row.vers == vers) {
            Some(Row { uaddr, owner, .. }) => format!(
                "it has a row for {uaddr} already, of {owner}, whom no other user can replace: end that server, or let \
                 its owner or root remove the row with rpcinfo -d {prog} {vers}"
            ),
            None => "it is running, and refuses this user".into(),
        },
    );
    format!("rpcbind does not register program {prog} version {vers} on netid {name}: {why}")
}

/// The rows of this machine's rpcbind.
fn look_at_rows(netid: Netid, prog: u32) -> Result<Vec<Row>, Error> {
    let mut failure = Error::new(Kind::Rpcbind, "no address of this machine");
    // Where IPv6 is off, rpcbind can still be reached over IPv4.
    for netid in [netid, Netid::Rdma] {
        for at in resolve(None, "localhost", netid)? {
            match dump(at, netid, Some(libc::timeval { tv_sec: 5, tv_usec: 0 }), Some(prog)) {
                Ok(rows) => return Ok(rows),
                Err(error) => failure = error,
            }
        }
    }
    Err(failure)
}

/// The addresses of `host` in the family of `netid`, with rpcbind's port; never empty.
fn resolve(host: Option<&CStr>, name: &str, netid: Netid) -> Result<Vec<SocketAddr>, Error> {
    let Some(_) = host else {
        let here = match netid {
            Netid::Rdma => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Netid::Rdma6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        return Ok(vec![SocketAddr::new(here, RPCBIND_PORT)]);
    };
    let found = (name, RPCBIND_PORT)
        .to_socket_addrs()
        .map_err(|error| Error::new(Kind::UnknownHost, format!("{name}: {error}")))?;
    let mut found: Vec<_> = found.filter(|address| netid.is_family_of(address)).collect();
    found.dedup();
    if found.is_empty() {
        let (family, netid, other) = (netid.family(), netid.name(), netid.other().name());
        let text = format!(
            "{name} has no {family} address, as netid {} needs it; perhaps it is there on {}",
            netid.to_string_lossy(),
            other.to_string_lossy()
        );
        return Err(Error::new(Kind::NoAddress, text));
    }
    Ok(found)
}

/// All that rpcbind at `host` (this machine if `None`) lists, and where that rpcbind is.
///
/// The mark of being inside the library must be set.
///
/// # Errors
/// As [`look_up`].
#[cfg(feature = "tool")]
pub fn registered(
    host: Option<&CStr>,
    netid: Netid,
    timeout: libc::timeval,
    _: &Inside,
) -> Result<(SocketAddr, Vec<Row>), Error> {
    let name = host.map_or("localhost".into(), |host| host.to_string_lossy().into_owned());
    let mut failure = Error::new(Kind::Rpcbind, "no address of this machine");
    for at in resolve(host, &name, netid)? {
        match dump(at, netid, Some(timeout), None) {
            Ok(rows) => return Ok((at, rows)),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// A mapping of rpcbind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Row {
    pub prog: u32,
    pub vers: u32,
    pub netid: String,
    pub uaddr: String,
    pub owner: String,
}

/// Chooses a row and returns its address as seen from a client of the host at `at`.
fn choose(rows: &[Row], vers: u32, at: SocketAddr, netid: Netid) -> Option<SocketAddr> {
    let name = netid.name().to_string_lossy();
    let usable = |row: &Row| {
        if row.netid != name {
            return None;
        }
        let mut address = parse_uaddr(&row.uaddr, netid)?;
        if address.ip().is_unspecified() {
            // Its scope comes with it: a link-local host is reachable only through its interface.
            address = SocketAddr::new(at.ip(), address.port());
            if let (SocketAddr::V6(address), SocketAddr::V6(at)) = (&mut address, &at) {
                address.set_scope_id(at.scope_id());
            }
        }
        // Another host's loopback is not ours: connecting there would reach some service of this machine.
        if address.ip().is_loopback() && !at.ip().is_loopback() {
            return None;
        }
        Some(address)
    };
    let exact = rows.iter().filter(|row| row.vers == vers).find_map(usable);
    exact.or_else(|| rows.iter().find_map(usable))
}

/// A universal address (RFC 5665 §5.2.3.3 and §5.2.3.4): the host's address, and the port as two decimal octets.
fn parse_uaddr(uaddr: &str, netid: Netid) -> Option<SocketAddr> {
    let (rest, low) = uaddr.rsplit_once('.')?;
    let (ip, high) = rest.rsplit_once('.')?;
    let ip = match netid {
        Netid::Rdma => IpAddr::V4(ip.parse().ok()?),
        Netid::Rdma6 => IpAddr::V6(ip.split('%').next()?.parse().ok()?),
    };
    let port = u16::from_be_bytes([high.parse().ok()?, low.parse().ok()?]);
    if port == 0 { None } else { Some(SocketAddr::new(ip, port)) }
}

/// What rpcbind at `at`, of the family of `netid`, lists for `prog` (all programs if `None`), on any netid.
fn dump(
    at: SocketAddr,
    netid: Netid,
    timeout: Option<libc::timeval>,
    prog: Option<u32>,
) -> Result<Vec<Row>, Error> {
    let (create, library) = (real::CLNT_TLI_CREATE.get()?, library()?);
    let mut address = Sockaddr::from(at);
    let mut address = address.netbuf();
    // Our own entry will do for the stock function: it asks for a TCP socket of the right family and nothing more.
    // SAFETY: the entry and the address live across the call; the entry is not written.
    let clnt = unsafe { create(RPC_ANYFD, netid.entry(), &mut address, RPCBPROG, RPCBVERS4, 0, 0) };
    // SAFETY: NULL, or a handle that only we know, until it is destroyed below.
    let Some(handle) = (unsafe { ffi::reference(clnt) }) else {
        // SAFETY: only this thread writes it, and it is here.
        let why =
            createerr().map_or(rpc_err::new(clnt_stat::FAILED, 0), |why| unsafe { why.read() }.cf_error);
        return Err(Error::new(
            Kind::Rpcbind,
            format!("no rpcbind at {at}: {}; is it running?", describe(&why)),
        ));
    };
    // SAFETY: every handle of libtirpc names its operations for as long as it lives.
    let Some(ops) = (unsafe { ffi::reference(handle.cl_ops) }) else {
        return Err(Error::new(Kind::Rpcbind, "libtirpc made a client without operations"));
    };
    let timeout = timeout.unwrap_or(libc::timeval { tv_sec: 60, tv_usec: 0 });
    let mut listing = Listing::new(library, prog, timeout);
    let mut status = call_dump(library, clnt, ops, &mut listing, timeout);
    if status == clnt_stat::PROGVERSMISMATCH {
        let mut version = RPCBVERS3;
        if let Some(cl_control) = ops.cl_control {
            // SAFETY: the handle is live, and CLSET_VERS takes a pointer to 32 bits.
            unsafe { cl_control(clnt, control::CLSET_VERS, (&raw mut version).cast()) };
        }
        status = call_dump(library, clnt, ops, &mut listing, timeout);
    }
    let mut error = rpc_err::new(status, 0);
    if let Some(cl_geterr) = ops.cl_geterr {
        // SAFETY: the handle is live and `error` writable.
        unsafe { cl_geterr(clnt, &mut error) };
    }
    if let Some(cl_destroy) = ops.cl_destroy {
        // SAFETY: the handle is live, and not used after this.
        unsafe { cl_destroy(clnt) };
    }
    if listing.given_up {
        return Err(Error::new(
            Kind::Rpcbind,
            format!("rpcbind at {at} does not come to the end of its list"),
        ));
    }
    if status != clnt_stat::SUCCESS {
        return Err(Error::new(
            Kind::Rpcbind,
            format!("rpcbind at {at} does not list: {}", describe(&error)),
        ));
    }
    Ok(listing.rows)
}

fn call_dump(
    library: &Library,
    clnt: *mut CLIENT,
    ops: &clnt_ops,
    listing: &mut Listing,
    timeout: libc::timeval,
) -> u32 {
    let Some(cl_call) = ops.cl_call else { return clnt_stat::FAILED };
    let results = std::ptr::from_mut(listing).cast();
    let nothing = Some(library.xdr_void);
    // SAFETY: `clnt` is live, xdr_void needs no object, and xdr_listing decodes into a Listing.
    unsafe { cl_call(clnt, RPCBPROC_DUMP, nothing, null_mut(), Some(xdr_listing), results, timeout) }
}

/// What is kept of rpcbind's list, which is decoded row by row: it comes from another host, and may be endless.
struct Listing<'a> {
    library: &'a Library,
    /// All programs if `None`.
    prog: Option<u32>,
    rows: Vec<Row>,
    /// Bytes of all rows received so far.
    taken: usize,
    until: Instant,
    /// The list is too long, or takes too long.
    given_up: bool,
}

/// Bytes: enough for thousands of rows.
const MOST: usize = 2 << 20;

impl Listing<'_> {
    fn new(library: &Library, prog: Option<u32>, timeout: libc::timeval) -> Listing<'_> {
        // A caller that waits only for a moment still gets a list that has already arrived.
        let seconds = u64::try_from(timeout.tv_sec).unwrap_or(0).clamp(1, 86_400);
        let until = Instant::now() + Duration::from_secs(seconds + 1);
        Listing { library, prog, rows: Vec::new(), taken: 0, until, given_up: false }
    }

    /// Returns false if the list cannot be decoded, or is given up.
    fn decode(&mut self, xdrs: *mut XDR) -> bool {
        // libtirpc may ask once more with other credentials, and then decodes again.
        self.rows.clear();
        self.taken = 0;
        loop {
            let mut follows: bool_t = 0;
            // SAFETY: libtirpc's own stream, in use, and a writable bool_t.
            if unsafe { (self.library.xdr_bool)(xdrs, &mut follows) } == 0 {
                return false;
            }
            if follows == 0 {
                return true;
            }
            let mut map =
                rpcb { r_prog: 0, r_vers: 0, r_netid: null_mut(), r_addr: null_mut(), r_owner: null_mut() };
            let object: *mut c_void = (&raw mut map).cast();
            // SAFETY: the stream as above; strings that are NULL are allocated.
            let decoded = unsafe { (self.library.xdr_rpcb)(xdrs, object) } != 0;
            if decoded {
                self.take(&map);
            }
            // SAFETY: this is the procedure that decoded the object, or a part of it, and what is kept was copied.
            unsafe { (self.library.xdr_free)(Some(self.library.xdr_rpcb), object) };
            if !decoded {
                return false;
            }
            self.given_up = self.taken > MOST || Instant::now() > self.until;
            if self.given_up {
                return false;
            }
        }
    }

    fn take(&mut self, map: &rpcb) {
        let strings = [map.r_netid, map.r_addr, map.r_owner].map(|string| {
            // SAFETY: a decoded string is NULL or NUL-terminated and lives until it is freed.
            unsafe { ffi::cstr(string) }.unwrap_or_default()
        });
        self.taken += size_of::<Row>() + strings.iter().map(|text| text.count_bytes()).sum::<usize>();
        if self.prog.is_none_or(|prog| map.r_prog == prog) {
            let [netid, uaddr, owner] = strings.map(|text| text.to_string_lossy().into_owned());
            self.rows.push(Row { prog: map.r_prog, vers: map.r_vers, netid, uaddr, owner });
        }
    }
}

unsafe extern "C-unwind" fn xdr_listing(xdrs: *mut XDR, listing: *mut c_void) -> c_int {
    ffi::guard(|| {
        // SAFETY: call_dump passes this procedure a Listing, which nobody else uses meanwhile.
        let listing = unsafe { &mut *listing.cast::<Listing>() };
        Ok(c_int::from(listing.decode(xdrs)))
    })
}

fn describe(error: &rpc_err) -> String {
    // SAFETY: every variant of the union is made of integers, and all of it is initialised.
    let errno = unsafe { error.ru.re_errno };
    match error.re_status {
        clnt_stat::TIMEDOUT => "timed out".into(),
        _ if errno > 0 => os_text(&io::Error::from_raw_os_error(errno)),
        status => format!("RPC error {status}"),
    }
}

const RPCBVERS3: u32 = 3;
const RPCBVERS4: u32 = 4;
const RPCBPROC_DUMP: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;
    #[link(name = "tirpc")]
    unsafe extern "C" {
        fn freenetconfigent(nconf: *mut netconfig);
    }

    fn row(vers: u32, uaddr: &str) -> Row {
        let netid = if uaddr.contains(':') { "rdma6" } else { "rdma" };
        row_on(netid, vers, uaddr)
    }

    fn row_on(netid: &str, vers: u32, uaddr: &str) -> Row {
        Row { prog: 9, vers, netid: netid.into(), uaddr: uaddr.into(), owner: "superuser".into() }
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn an_allocated_entry_equals_the_static_one_and_freenetconfigent_frees_it() {
        for netid in [Netid::Rdma, Netid::Rdma6] {
            let nconf = netid.allocate().expect("memory");
            // SAFETY: allocated above.
            let fields = unsafe { ffi::reference(nconf) }.expect("not NULL");
            let strings = [fields.nc_netid, fields.nc_protofmly, fields.nc_proto, fields.nc_device];
            // SAFETY: all four are NUL-terminated.
            let strings = strings.map(|string| unsafe { ffi::cstr(string) }.expect("not NULL"));
            assert_eq!(strings, [netid.name(), netid.family_name(), c"rdma", c"-"]);
            assert_eq!((fields.nc_semantics, fields.nc_flag), (3, 0));
            assert!(fields.nc_lookups.is_null());
            // SAFETY: a live entry.
            assert_eq!(unsafe { Netid::of(nconf) }, Some(netid));
            // SAFETY: in its layout, and not used after this.
            unsafe { freenetconfigent(nconf) };
            // SAFETY: static.
            assert_eq!(unsafe { Netid::of(netid.entry()) }, Some(netid));
        }
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { Netid::of(null()) }, None);
    }

    #[test]
    fn a_handle_for_rdma_iterates_both_netids_and_others_are_not_ours() {
        assert!(nettype::open(c"tcp").is_none());
        let handle = nettype::open(c"RDMA").expect("ours").expect("free");
        let second = nettype::open(c"rdma6").expect("ours").expect("free");
        assert_ne!(handle, second);
        assert_eq!(nettype::next(handle), Some(Netid::Rdma.entry()));
        nettype::next(handle).expect("ours");
        assert_eq!(nettype::next(handle), Some(null()));
        assert_eq!(nettype::close(handle), Some(()));
        assert_eq!(nettype::close(second), Some(()));
        let mut foreign = 0u8;
        assert_eq!(nettype::next((&raw mut foreign).cast()), None);
        assert_eq!(nettype::close(null_mut()), None);
    }

    #[test]
    fn a_socket_address_survives_the_way_to_libtirpc_and_back() {
        for text in ["10.1.2.3:20049", "[fe80::1%7]:20049", "[::]:1"] {
            let sockaddr = Sockaddr::from(address(text));
            assert_eq!(Sockaddr::parse(sockaddr.as_bytes()), Some(address(text)));
            for length in 0..8 {
                assert_eq!(Sockaddr::parse(&sockaddr.as_bytes()[..length]), None);
            }
        }
        assert_eq!(Sockaddr::parse(&[0; 28]), None);
    }

    #[test]
    fn the_exact_version_is_chosen_before_any_other() {
        let at = address("192.0.2.1:111");
        let rows = [row(1, "192.0.2.1.78.81"), row(3, "192.0.2.1.8.1")];
        assert_eq!(choose(&rows, 3, at, Netid::Rdma), Some(address("192.0.2.1:2049")));
        assert_eq!(choose(&rows, 2, at, Netid::Rdma), Some(address("192.0.2.1:20049")));
        assert_eq!(choose(&[], 2, at, Netid::Rdma), None);
    }

    #[test]
    fn a_wildcard_address_becomes_the_hosts_with_its_scope() {
        let at = address("[fe80::9%3]:111");
        assert_eq!(choose(&[row(1, "::.78.81")], 1, at, Netid::Rdma6), Some(address("[fe80::9%3]:20049")));
        let at = address("192.0.2.1:111");
        assert_eq!(choose(&[row(1, "0.0.0.0.78.81")], 1, at, Netid::Rdma), Some(address("192.0.2.1:20049")));
    }

    #[test]
    fn the_loopback_of_another_host_is_not_connected_to() {
        let rows = [row(1, "127.0.0.1.78.81")];
        assert_eq!(choose(&rows, 1, address("192.0.2.1:111"), Netid::Rdma), None);
        assert_eq!(choose(&rows, 1, address("127.0.0.1:111"), Netid::Rdma), Some(address("127.0.0.1:20049")));
    }

    #[test]
    fn who_does_not_find_a_program_is_told_where_it_is() {
        let text = |rows: &[Row]| not_registered(9, Netid::Rdma, "h", rows).text().to_owned();
        let start = "program 9 is not registered on netid rdma at h";
        assert_eq!(text(&[]), format!("{start}, and on no other: is its server running?"));
        let tcp = [row_on("tcp", 1, "0.0.0.0.3.1"), row_on("udp", 1, "0.0.0.0.3.1"), row_on("tcp", 2, "")];
        assert_eq!(
            text(&tcp),
            format!(
                "{start}, but on tcp, udp: its server must run with librpcrdma, and with RPCRDMA_REDIRECT=tcp if it \
                 knows tcp only"
            )
        );
        let six = [row_on("tcp6", 1, "::.3.1"), row(1, "::.3.1")];
        assert_eq!(text(&six), format!("{start}, but on rdma6: its server has no IPv4 address"));
        let far = [row(1, "127.0.0.1.3.1")];
        assert_eq!(choose(&far, 1, address("192.0.2.1:111"), Netid::Rdma), None);
        assert_eq!(
            text(&far),
            format!("{start}, but for 127.0.0.1.3.1, which does not lead there from here")
        );
    }

    #[test]
    fn rpcbind_itself_is_not_looked_up_over_rdma() {
        let inside = Inside::enter().expect("the mark");
        let error =
            look_up(Some(c"127.0.0.1"), RPCBPROG, 2, Netid::Rdma, None, &inside).expect_err("not there");
        assert_eq!(error.kind(), Kind::NotRegistered);
        assert!(error.text().contains("which is reached over tcp"), "{error}");
    }

    #[test]
    fn the_stock_entry_is_the_one_of_the_machine() {
        for (netid, name) in [(Netid::Rdma, c"tcp"), (Netid::Rdma6, c"tcp6")] {
            // SAFETY: static, and never written.
            let stock = unsafe { ffi::reference(netid.stock()) }.expect("an entry");
            // SAFETY: static strings.
            let strings = [stock.nc_netid, stock.nc_protofmly, stock.nc_proto, stock.nc_device]
                .map(|string| unsafe { ffi::cstr(string) }.expect("not NULL"));
            assert_eq!(strings, [name, netid.family_name(), c"tcp", c"-"]);
            assert_eq!((stock.nc_semantics, stock.nc_flag), (nc::NC_TPI_COTS_ORD, nc::NC_VISIBLE));
        }
    }

    #[test]
    fn an_unreadable_universal_address_is_passed_over() {
        for uaddr in
            ["", ".", "1.2.3.4", "1.2.3.4.5", "1.2.3.4.256.1", "1.2.3.4.0.0", "::1.78.81", "1.2.3.4.78.81.9"]
        {
            assert_eq!(parse_uaddr(uaddr, Netid::Rdma), None, "{uaddr}");
        }
        assert_eq!(parse_uaddr("fe80::1%eth0.78.81", Netid::Rdma6), Some(address("[fe80::1]:20049")));
        assert_eq!(parse_uaddr("1.2.3.4.78.81", Netid::Rdma6), None);
    }

    #[test]
    fn a_host_without_an_address_of_the_family_is_told_from_an_unknown_one() {
        let wrong_family = resolve(Some(c"127.0.0.1"), "127.0.0.1", Netid::Rdma6).expect_err("IPv4 only");
        assert_eq!(wrong_family.kind(), Kind::NoAddress);
        let here = resolve(None, "localhost", Netid::Rdma6).expect("loopback");
        assert_eq!(here, [address("[::1]:111")]);
    }
}
