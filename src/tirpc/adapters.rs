//! Adapters: listening on devices that do not go over a TCP socket, beside a TCP listener or in its place.
//!
//! A listener on netid "rdma", or of a moved server, is noted here when it is registered ([`beside`]). The program may still fork
//! to become a daemon, and a device belongs to the process that opens it. So the devices are opened in the first turn of the
//! program's loop, through `progress`. From then on a transport of our own wakes the loop when a peer connects.
//!
//! Where `RPCRDMA_PROVIDER` names a device, nothing else is served. A listener on netid "rdma" is then not created if there is no
//! such device, and its socket gives way to a device that cannot share its port.
//!
//! # Invariants
//! - On a machine without a device nothing here happens: nothing is opened, no transport is registered.
//! - A listener serves nobody who could not connect to the socket beside which it stands. It listens at the socket's own
//!   addresses, at no loopback address, and on the interface to which the socket is bound by then. It ends when the program
//!   unregisters the socket, closes it, or shuts it down.
#![allow(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::config::{self, Config, Provider, RedirectAdapters};
use crate::driver::{Server, start};
use crate::error::{Error, Kind, os_text};
use crate::ffi::guard;
use crate::fork;
use crate::process::{self, Identity};
use crate::provider::{Accepted, Device, Knock, Listener, Places};
use crate::tirpc::bare::{LISTENING, bare};
use crate::tirpc::progress::{self, Errand};
use crate::tirpc::{
    SVCXPRT, bool_t, idle, interpose, rpc_msg, server, xp_ops, xprt_register, xprt_unregister,
};
use crate::{log_debug, log_error, log_info, log_warn, socket};

/// How many connection requests are accepted or refused before the loop looks at other transports again, and how long that may
/// take.
const TURN: usize = 16;
const TURN_TIME: Duration = Duration::from_millis(1);

/// After how long a listener whose device has gone is tried again.
const RETRY: Duration = Duration::from_secs(1);

struct Entry {
    device: &'static dyn Device,
    /// As the program has bound its socket.
    address: SocketAddr,
    places: Places,
    /// The program's listening socket, with which this entry ends.
    socket: (RawFd, Identity),
    /// Keeps the port where no TCP listener does: then `socket` never listens.
    port: Option<Arc<socket::Reserved>>,
    /// Only netid "rdma" is served here, so transports are of that netid.
    rdma_only: bool,
    open: Option<Open>,
    /// The listener was open once: a device that has gone may come back.
    opened: bool,
    /// The log already says why this listener cannot be opened.
    told: bool,
}

/// A listener that is open, and the transport that wakes the loop for it. The transport lives for ever.
struct Open {
    listener: Box<dyn Listener>,
    xprt: Bare,
}

struct Bare(*mut SVCXPRT);

// SAFETY: the transport's memory is ours and lives for ever; it is used by the thread that holds the table.
unsafe impl Send for Bare {}

static ACCEPT: xp_ops = xp_ops { xp_recv: Some(accept), ..LISTENING };

fn table() -> MutexGuard<'static, Vec<Entry>> {
    static TABLE: fork::Lock<Vec<Entry>> = fork::Lock::new();
    TABLE.lock()
}

/// Notes a registered TCP listener that is to be served on adapters too.
pub fn beside(fd: RawFd, rdma_only: bool, config: &Config) {
    if rdma_only || config.redirect_adapters != RedirectAdapters::No {
        add(fd, None, rdma_only, config);
    }
}

/// Serves the address of a listening socket of netid "rdma" on other devices too, or on a device instead, where the only one that
/// may be used takes the socket's port: then the descriptor stays, but is never ready.
///
/// # Errors
/// When the system refuses, or the only device that may be used cannot be used: the socket is then as it was, or closed to
/// connections.
pub fn listen(address: SocketAddr, fd: RawFd, config: &Config) -> Result<(), Error> {
    if !start::gives_way(address, config)? {
        beside(fd, true, config);
        return Ok(());
    }
    let places = places(address, fd);
    let port = socket::Reserved::in_place_of(fd, address).map_err(|error| {
        let text = format!("port {} cannot be kept for RDMA: {}", address.port(), os_text(&error));
        Error::new(Error::from(error).kind(), text)
    })?;
    add(fd, Some((address, places, port)), true, config);
    Ok(())
}

/// `in_place`: for a socket that no longer listens.
fn add(
    fd: RawFd,
    in_place: Option<(SocketAddr, Places, socket::Reserved)>,
    rdma_only: bool,
    config: &Config,
) {
    let devices: Vec<_> = start::listening(config).collect();
    if devices.is_empty() {
        return;
    }
    let Some(identity) = process::identify(fd) else { return };
    let (address, places, port) = match in_place {
        Some((address, places, port)) => (address, places, Some(Arc::new(port))),
        None => match socket::local(fd) {
            Some(address) => (address, places(address, fd), None),
            None => return,
        },
    };
    let mut table = table();
    // A listener that is noted once more was a moved program's before it became one of netid "rdma".
    for mut old in table.extract_if(.., |entry| !entry.is_there() || entry.socket.0 == fd) {
        old.close();
    }
    table.extend(devices.into_iter().map(|device| Entry {
        device,
        address,
        places: places.clone(),
        socket: (fd, identity),
        port: port.clone(),
        rdma_only,
        open: None,
        opened: false,
        told: false,
    }));
    drop(table);
    wake_at(Instant::now());
}

/// Where a socket that is bound to `address` listens.
fn places(address: SocketAddr, fd: RawFd) -> Places {
    let canonical = SocketAddr::new(address.ip().to_canonical(), address.port());
    // A link-local address keeps its scope.
    let mut addresses = vec![if canonical.is_ipv4() { canonical } else { address }];
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && socket::takes_both_families(fd) {
        addresses.push(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()));
    }
    Places { addresses, interface: socket::interface(fd) }
}

/// The program has unregistered a listener.
pub fn end(fd: RawFd) {
    for mut ended in table().extract_if(.., |entry| entry.socket.0 == fd) {
        ended.close();
        log_debug!("fd {fd}: {} is not served any more", ended.address);
    }
}

/// What has become of the program's socket.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Clients reach it as before.
    Same,
    /// It is now bound to another interface, and the entry has been set to that.
    Elsewhere,
    /// Nobody connects to it any more.
    Deaf,
}

impl Entry {
    fn is_there(&self) -> bool {
        let (fd, identity) = self.socket;
        process::identify(fd) == Some(identity)
    }

    /// Looks at the program's socket: it may be closed, shut down, or bound to an interface at any time.
    fn look(&mut self) -> Found {
        let fd = self.socket.0;
        if !self.is_there() || self.port.is_none() && !socket::listens(fd) {
            return Found::Deaf;
        }
        let now = socket::interface(fd);
        // The stand-in for a listening socket does not know to which interface that socket was bound.
        if now == self.places.interface || self.port.is_some() && now.is_none() {
            return Found::Same;
        }
        self.places.interface = now;
        Found::Elsewhere
    }

    /// Whether it is to be served now. A moved listener is, if a moved program is registered there.
    fn wanted(&self) -> bool {
        self.rdma_only || interpose::serves_moved(self.address)
    }
}

/// A program has been registered: has those listeners opened that have waited for this.
pub fn registered() {
    if table().iter().any(|entry| entry.open.is_none()) {
        wake_at(Instant::now());
    }
}

/// Has the program's loop call [`open_all`] at `time`.
fn wake_at(time: Instant) {
    progress::call_at(Errand::Adapters, time, || {
        guard(|| {
            open_all();
            Ok(())
        });
    });
}

/// Opens what is not open yet: called from the program's loop, in the process that serves.
fn open_all() {
    let Ok(config) = config::get() else { return };
    let mut table = table();
    let mut again = false;
    let unusable = |entry: &mut Entry| !start::allows(config, entry.device);
    for mut entry in table.extract_if(.., unusable) {
        entry.close();
        log_debug!("{} is not served on RDMA {} any more", entry.address, entry.title());
    }
    for entry in table.iter_mut() {
        let found = entry.look();
        if found == Found::Same && entry.open.as_ref().is_some_and(|open| !open.listener.forked()) {
            continue;
        }
        // A listener inherited through fork(2) is the parent's.
        entry.close();
        if found == Found::Deaf || !entry.wanted() {
            continue;
        }
        let title = entry.title();
        match entry.listen(config) {
            Ok(open) => {
                let places = open.listener.places();
                log_info!("listening at {} on RDMA {title} ({places} addresses)", entry.address);
                (entry.open, entry.opened, entry.told) = (Some(open), true, false);
            }
            Err(error) => {
                // A device may appear, where it is the only one to be used, or come back.
                let only = config.provider != Provider::Auto;
                again |= entry.opened || only;
                if !std::mem::replace(&mut entry.told, true) {
                    let text = format!("not listening at {} on RDMA {title}: {error}", entry.address);
                    match error.kind() {
                        _ if only => log_error!("{text}"),
                        // Most sockets have addresses that no adapter of the machine has.
                        Kind::Os(libc::ENODEV) => log_info!("{text}"),
                        _ => log_warn!("{text}"),
                    }
                }
            }
        }
    }
    if again {
        wake_at(Instant::now() + RETRY);
    }
}

impl Entry {
    fn title(&self) -> &'static str {
        self.device.traits().title
    }

    fn listen(&self, config: &Config) -> Result<Open, Error> {
        let only = config.provider != Provider::Auto;
        let listener = self.device.listen(self.places.clone(), only)?;
        let xprt = bare(listener.fd(), &ACCEPT);
        // SAFETY: complete.
        unsafe { xprt_register(xprt) }?;
        Ok(Open { listener, xprt: Bare(xprt) })
    }

    /// Ends the listener, if there is one; unregisters its transport before the descriptor goes.
    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            // SAFETY: registered when it was opened; its memory lives for ever.
            unsafe { xprt_unregister(open.xprt.0) };
        }
    }
}

fn map_to_v6(at: SocketAddr) -> SocketAddr {
    match at.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), at.port()),
        IpAddr::V6(_) => at,
    }
}

/// `xp_recv` of a listener: takes the connections that are waiting.
unsafe extern "C-unwind" fn accept(xprt: *mut SVCXPRT, _: *mut rpc_msg) -> bool_t {
    guard(|| {
        let config: &'static Config = config::get()?;
        let mut table = table();
        let found =
            table.iter_mut().find(|entry| entry.open.as_ref().is_some_and(|open| open.xprt.0 == xprt));
        let Some(entry) = found else {
            // The listener of a parent whose table was in use at the fork: connections to it are for the parent.
            // SAFETY: registered; it lives for ever.
            unsafe { xprt_unregister(xprt) };
            return Ok(0);
        };
        let found = entry.look();
        let rdma_only = entry.rdma_only;
        let known = !rdma_only && config.redirect_adapters == RedirectAdapters::Auto;
        // A program that listens at an IPv6 address sees IPv4 callers as its own socket would show them.
        let mapped = entry.address.is_ipv6();
        let mut accepted = Vec::new();
        let mut retry = false;
        if let Some(Open { listener, .. }) = &mut entry.open {
            if found == Found::Same && !listener.forked() {
                let began = Instant::now();
                let options = start::options(config, entry.device.traits());
                // SAFETY: this is the program's loop.
                let mut make_room = |shortage, peer| unsafe { idle::make_room_on_devices(shortage, peer) };
                for _ in 0..TURN {
                    match listener.accept(&options, known, &mut make_room) {
                        Ok(Knock::Accepted(connection)) => accepted.push(connection),
                        Ok(Knock::Refused) => {}
                        Ok(Knock::Nobody) => break,
                        Err(error) => {
                            log_warn!("listener at {}: {error}", entry.address);
                            retry = true;
                            break;
                        }
                    }
                    // What is left wakes the loop again.
                    if began.elapsed() >= TURN_TIME {
                        break;
                    }
                }
                retry |= listener.lost();
            }
            if found != Found::Same || retry || listener.forked() {
                let at_once = listener.forked() || found == Found::Elsewhere;
                entry.close();
                match found {
                    Found::Deaf => log_info!("nobody connects to {} any more", entry.address),
                    // A peer that connects meanwhile may not be meant for this socket: all are refused.
                    Found::Elsewhere => log_info!("{} is bound to another interface now", entry.address),
                    Found::Same => {}
                }
                if at_once || retry {
                    wake_at(Instant::now() + if at_once { Duration::ZERO } else { RETRY });
                }
            }
        }
        drop(table);
        for Accepted { device, local, peer } in accepted {
            let [local, peer] = [local, peer].map(|at| at.map(|at| if mapped { map_to_v6(at) } else { at }));
            log_debug!("fd {}: {} connects", device.fd(), peer.map_or_else(String::new, |at| at.to_string()));
            let served = Server::new(device, peer, config).and_then(|server| {
                // SAFETY: called from libtirpc's loop, as a listener is.
                unsafe { server::serve(server, rdma_only, local, peer) }
            });
            if let Err(error) = served {
                log_warn!("an RDMA connection is closed: {error}");
            }
        }
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::provider::DEVICES;

    fn entry(socket: &TcpListener) -> Entry {
        let (fd, address) = (socket.as_raw_fd(), socket.local_addr().expect("bound"));
        Entry {
            device: DEVICES[0],
            address,
            places: places(address, fd),
            socket: (fd, process::identify(fd).expect("open")),
            port: None,
            rdma_only: true,
            open: None,
            opened: false,
            told: false,
        }
    }

    #[test]
    fn a_socket_that_is_shut_down_or_closed_is_found_deaf() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut entry = entry(&socket);
        assert_eq!(entry.look(), Found::Same);
        // SAFETY: no memory is passed.
        assert_eq!(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) }, 0);
        assert_eq!(entry.look(), Found::Deaf, "it accepts nobody");
        socket::listen(socket.as_raw_fd()).expect("again");
        assert_eq!(entry.look(), Found::Same);
        drop(socket);
        assert_eq!(entry.look(), Found::Deaf);
    }

    #[test]
    fn a_socket_in_whose_place_a_port_is_kept_needs_not_listen() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut entry = entry(&socket);
        let port = socket::Reserved::in_place_of(socket.as_raw_fd(), entry.address).expect("the port");
        entry.socket.1 = process::identify(socket.as_raw_fd()).expect("open");
        (entry.port, entry.places.interface) = (Some(Arc::new(port)), Some("lo".into()));
        assert_eq!(entry.look(), Found::Same);
        assert_eq!(entry.places.interface.as_deref(), Some("lo"), "what the listening socket was bound to");
    }

    #[test]
    fn a_socket_that_is_bound_to_an_interface_later_is_served_there_only() {
        let socket = TcpListener::bind("0.0.0.0:0").expect("a port");
        let mut entry = entry(&socket);
        assert_eq!((entry.look(), &entry.places.interface), (Found::Same, &None));
        let (level, option) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
        // SAFETY: three bytes are readable.
        let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, c"lo".as_ptr().cast(), 3) };
        assert_eq!(done, 0, "Linux 5.7 lets everybody do so once");
        assert_eq!(entry.look(), Found::Elsewhere);
        assert_eq!(entry.places.interface.as_deref(), Some("lo"));
        assert_eq!(entry.look(), Found::Same);
    }

    #[test]
    fn a_child_that_has_lost_its_parents_listener_takes_it_out_of_its_loop() {
        use crate::tirpc::{library, polled};
        // What is registered here is not for other tests.
        let child = crate::fork::testing::fork(|| {
            let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
            let fd = socket.as_raw_fd();
            // SAFETY: as its loop does; the thread is the only one.
            let is_polled = || unsafe { polled() }.any(|polled| polled == fd);
            // SAFETY: complete.
            unsafe { xprt_register(bare(fd, &ACCEPT)) }.expect("libtirpc's");
            let before = is_polled();
            // SAFETY: as above.
            unsafe { (library().unwrap().svc_getreq_common)(fd) };
            before && !is_polled()
        });
        assert!(child.succeeded());
    }
}
