//! The TCP sockets that programs and libtirpc hand us: what they are, and connecting them.
//!
//! A descriptor here is borrowed: nothing in this file closes one. Data moves in `sys`, which knows nothing of
//! addresses; this file knows nothing of data.
#![allow(unsafe_code)]

use std::io;
use std::mem::{ManuallyDrop, size_of};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{FromRawFd, RawFd};

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
    let mut value: c_int = 0;
    let mut length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: value and length are writable and of the size that is passed.
    let done = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut length) };
    if done == 0 { Some(value) } else { None }
}

/// connect(2), waiting as long as the socket's own mode says.
///
/// # Errors
/// The errno.
pub fn connect(fd: RawFd, address: SocketAddr) -> io::Result<()> {
    // SAFETY: all zero is a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let length = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage has room and alignment for every address family.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    connect_raw(fd, &storage, length)
}

/// Undoes a connect(2): the socket can be connected again, from the port that it was bound to, if it was.
///
/// # Errors
/// The errno.
pub fn disconnect(fd: RawFd) -> io::Result<()> {
    // SAFETY: all zero is a valid sockaddr_storage, and its family is AF_UNSPEC.
    let storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    connect_raw(fd, &storage, size_of::<libc::sockaddr>())
}

fn connect_raw(fd: RawFd, storage: &libc::sockaddr_storage, length: usize) -> io::Result<()> {
    let address: *const libc::sockaddr_storage = storage;
    // SAFETY: the address is readable for `length` bytes, which is at most its size.
    let done = unsafe { libc::connect(fd, address.cast(), length as libc::socklen_t) };
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

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
}
