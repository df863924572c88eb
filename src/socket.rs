//! The TCP sockets that programs and libtirpc hand us: what they are, and connecting them.
//!
//! A descriptor here is borrowed: nothing in this file closes one. Data moves in `sys`, which knows nothing of
//! addresses; this file knows nothing of data.
#![allow(unsafe_code)]

use std::io;
use std::mem::{ManuallyDrop, size_of};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::c_int;

/// The address that the socket is bound to; `None` for anything but an internet socket.
pub fn local(fd: RawFd) -> Option<SocketAddr> {
    if fd < 0 {
        return None;
    }
    // SAFETY: used for one getsockname and not closed; a number that is no socket is answered with an error.
    let socket = ManuallyDrop::new(unsafe { TcpListener::from_raw_fd(fd) });
    socket.local_addr().ok()
}

/// The address that the socket is connected to; `None` if it is not.
pub fn peer(fd: RawFd) -> Option<SocketAddr> {
    if fd < 0 {
        return None;
    }
    // SAFETY: used for one getpeername and not closed; a number that is no socket is answered with an error.
    let socket = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd) });
    socket.peer_addr().ok()
}

/// Whether the socket carries a byte stream.
pub fn is_stream(fd: RawFd) -> bool {
    option(fd, libc::SO_TYPE) == Some(libc::SOCK_STREAM)
}

/// Whether the socket listens.
pub fn listens(fd: RawFd) -> bool {
    option(fd, libc::SO_ACCEPTCONN) == Some(1)
}

fn option(fd: RawFd, name: c_int) -> Option<c_int> {
    option_of(fd, libc::SOL_SOCKET, name)
}

fn option_of(fd: RawFd, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: value and length are writable and of the size that is passed.
    let done = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut length) };
    if done == 0 { Some(value) } else { None }
}

/// connect(2), waiting as long as the socket's own mode says.
///
/// # Errors
/// The errno.
pub fn connect(fd: RawFd, address: SocketAddr) -> io::Result<()> {
    let mut address = Sockaddr::from(address);
    let length = address.as_bytes().len();
    connect_raw(fd, address.as_mut_ptr(), length)
}

/// Undoes a connect(2): the socket can be connected again, from the port that it was bound to, if it was.
///
/// # Errors
/// The errno.
pub fn disconnect(fd: RawFd) -> io::Result<()> {
    // SAFETY: all zero is a valid sockaddr_storage, and its family is AF_UNSPEC.
    let storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    connect_raw(fd, (&raw const storage).cast(), size_of::<libc::sockaddr>())
}

fn connect_raw(fd: RawFd, address: *const libc::sockaddr, length: usize) -> io::Result<()> {
    // SAFETY: both callers pass an address that is readable for its length.
    let done = unsafe { libc::connect(fd, address, length as libc::socklen_t) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Closes a descriptor that belongs to us.
pub fn close(fd: RawFd) {
    // SAFETY: no memory is passed.
    unsafe { libc::close(fd) };
}

/// listen(2), with the longest queue that the system allows.
///
/// # Errors
/// The errno.
pub fn listen(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    if unsafe { libc::listen(fd, libc::SOMAXCONN) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether an IPv6 socket that is bound to any address takes IPv4 too.
pub fn takes_both_families(fd: RawFd) -> bool {
    option_of(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Some(0)
}

/// The interface that the socket is bound to by `SO_BINDTODEVICE`, if it is.
pub fn interface(fd: RawFd) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    let mut length = name.len() as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
    // SAFETY: the name is writable for the length that is passed.
    let done = unsafe { libc::getsockopt(fd, level, option, name.as_mut_ptr().cast(), &mut length) };
    let name = name.split(|byte| *byte == 0).next().filter(|name| done == 0 && !name.is_empty())?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// The addresses of this host's interfaces, or of the one of this name, with port 0; none where the system does not say.
pub fn local_addresses(interface: Option<&str>) -> Vec<SocketAddr> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` may be written.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next: *const libc::ifaddrs = list;
    // SAFETY: NULL, or an entry of the list, which is alive.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: a string, or NULL.
        let name = unsafe { crate::ffi::cstr(entry.ifa_name) }.map(|name| name.to_string_lossy());
        if interface.is_some_and(|wanted| name.as_deref() != Some(wanted)) {
            continue;
        }
        // SAFETY: NULL, or an address of the family that it names.
        let family = unsafe { entry.ifa_addr.as_ref() }.map_or(0, |address| i32::from(address.sa_family));
        let length = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        // SAFETY: an address of that family has that length.
        found.extend(Sockaddr::parse(unsafe { std::slice::from_raw_parts(entry.ifa_addr.cast(), length) }));
    }
    // SAFETY: made by getifaddrs, and used no more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// A port that nobody else gets, and where nobody listens yet.
pub struct Reserved(#[expect(dead_code, reason = "held")] OwnedFd);

impl Reserved {
    /// Ends a listening socket and keeps its port. The number of its descriptor stays, and is never ready.
    ///
    /// # Errors
    /// The errno.
    pub fn in_place_of(fd: RawFd, address: SocketAddr) -> io::Result<Reserved> {
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // SAFETY: no memory is passed.
        let socket = check(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: just made, and owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // A device that binds the port too says the same.
        let on: c_int = 1;
        let (level, name, size) =
            (libc::SOL_SOCKET, libc::SO_REUSEADDR, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: the value is readable for the length that is passed.
        check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const on).cast(), size) })?;
        let mut address = Sockaddr::from(address);
        let never = Reserved::deaf(family, &mut address)?;
        // SAFETY: no memory is passed. What listened at `fd` ends, and with it what kept the port.
        check(unsafe { libc::dup3(never.as_raw_fd(), fd, libc::O_CLOEXEC) })?;
        let length = address.as_bytes().len() as libc::socklen_t;
        // SAFETY: an address that is readable for its length.
        check(unsafe { libc::bind(socket.as_raw_fd(), address.as_mut_ptr(), length) })?;
        Ok(Reserved(socket))
    }

    /// A socket that is never ready, and still knows the address if asked: of datagrams, all of which it drops. An
    /// eventfd(2) where the address is taken for datagrams.
    fn deaf(family: c_int, address: &mut Sockaddr) -> io::Result<OwnedFd> {
        // SAFETY: no memory is passed.
        let socket = check(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: just made, and owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // "Return 0": of a packet nothing is kept.
        let mut drop_all =
            libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let filter = libc::sock_fprog { len: 1, filter: &mut drop_all };
        let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
        let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
        // SAFETY: the program is readable for the one instruction that it says, and is copied.
        check(unsafe {
            libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const filter).cast(), size)
        })?;
        let length = address.as_bytes().len() as libc::socklen_t;
        // SAFETY: an address that is readable for its length.
        if unsafe { libc::bind(socket.as_raw_fd(), address.as_mut_ptr(), length) } == 0 {
            return Ok(socket);
        }
        // SAFETY: no memory is passed.
        let never = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: just made, and owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(never) })
    }
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A second descriptor of the same socket, above the standard ones.
///
/// # Errors
/// The errno.
pub fn duplicate(fd: RawFd) -> io::Result<RawFd> {
    // SAFETY: no memory is passed.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(copy)
}

/// A socket address in the form that C functions want.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct Sockaddr {
    bytes: [u8; 28],
    len: u32,
}

impl Sockaddr {
    /// For functions that take a `struct sockaddr *`; good as long as `self` is not moved.
    pub fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        self.bytes.as_mut_ptr().cast()
    }

    /// The bytes of the `sockaddr_in` or `sockaddr_in6`.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }

    /// What a `sockaddr_storage` holds.
    pub fn stored(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
        let bytes: *const libc::sockaddr_storage = storage;
        // SAFETY: every byte of a sockaddr_storage may be read, and it is longer than this.
        Sockaddr::parse(unsafe { std::slice::from_raw_parts(bytes.cast(), 28) })
    }

    /// Reads a `sockaddr_in` or `sockaddr_in6`.
    pub fn parse(bytes: &[u8]) -> Option<SocketAddr> {
        let (family, rest) = bytes.split_first_chunk::<2>()?;
        let (port, rest) = rest.split_first_chunk::<2>()?;
        let port = u16::from_be_bytes(*port);
        match i32::from(u16::from_ne_bytes(*family)) {
            libc::AF_INET => {
                let ip = Ipv4Addr::from(*rest.first_chunk::<4>()?);
                // A sockaddr_in has eight bytes of padding, which nobody reads; libtirpc counts them.
                Some(SocketAddr::V4(SocketAddrV4::new(ip, port)))
            }
            libc::AF_INET6 => {
                let (flow, rest) = rest.split_first_chunk::<4>()?;
                let (ip, rest) = rest.split_first_chunk::<16>()?;
                let scope = u32::from_ne_bytes(*rest.first_chunk::<4>()?);
                let flow = u32::from_be_bytes(*flow);
                Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(*ip), port, flow, scope)))
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for Sockaddr {
    fn from(address: SocketAddr) -> Sockaddr {
        let mut bytes = [0; 28];
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        let len = match address {
            SocketAddr::V4(v4) => {
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                size_of::<libc::sockaddr_in6>()
            }
        };
        Sockaddr { bytes, len: len as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_disconnected_and_connected_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = TcpStream::connect(to).unwrap();
        let fd = stream.as_raw_fd();
        drop(listener.accept().unwrap());
        disconnect(fd).unwrap();
        assert_eq!(peer(fd), None);
        connect(fd, to).unwrap();
        assert_eq!(peer(fd), Some(to));
        assert!(is_stream(fd) && !listens(fd));
    }

    #[test]
    fn what_is_no_socket_has_no_address() {
        assert_eq!((local(-1), peer(-1)), (None, None));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(local(file.as_raw_fd()), None);
        assert!(!is_stream(file.as_raw_fd()));
    }

    #[test]
    fn a_reserved_port_serves_nobody_and_its_descriptor_is_never_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (fd, at) = (listener.as_raw_fd(), listener.local_addr().unwrap());
        let reserved = Reserved::in_place_of(fd, at).unwrap();
        assert_eq!(local(fd), Some(at));
        assert_eq!(TcpStream::connect(at).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"noise", at).unwrap();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        assert_eq!(unsafe { libc::poll(&mut poll, 1, 50) }, 0);
        drop(reserved);
    }
}
