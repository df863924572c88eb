//! How a connection begins: over which device, and with what.
//!
//! This is the one place that chooses among the [`DEVICES`], by their [`Traits`] and by `RPCRDMA_PROVIDER`, for connections
//! that are opened ([`open`]), re-established (`Anew`, `next`), accepted on a TCP socket (`accept`), and listened for beside
//! one ([`listening`]).
//!
//! Where several devices may do, each has a head start on the next one: that a device of ours leads there says nothing about
//! the peer's end, and a peer that has none may never answer. The first connection that is established is used, and the device
//! that has won is remembered for a while.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::config::{Config, Provider, Version};
use crate::connection::{Role, receive_margin};
use crate::error::{Error, Kind, os_text};
use crate::fork;
use crate::memory::{AREAS_MAX, Areas, areas};
use crate::provider::{DEVICES, Device, Options, QueuePair, Traits, Way};
use crate::wire::header::Versions;
use crate::{log_info, process, socket, wait};

use super::client::Client;
use super::link::Link;
use super::{Mask, REPLY_HEADER, memory};

/// How long the passive side waits for the MPA Request and the first message of a peer (RFC 5044 §7.1.2: "SHOULD"), and
/// the active side for a startup.
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for a device before the next one is tried beside it.
const HEAD_START: Duration = Duration::from_millis(250);

/// How long a server that has just been started may take to listen beside its socket.
const LISTENS_LATE: Duration = Duration::from_secs(2);

/// How many times a device is asked if its port is taken.
const PORTS: u32 = 8;

/// How long to remember what a peer speaks.
const REMEMBERED: Duration = Duration::from_secs(60);

// ------------------------------------------------------------------------------------------------------- devices

/// Whether the configuration allows a device; where it leaves the choice, whether this process can use it.
pub fn allows(config: &Config, device: &dyn Device) -> bool {
    match config.provider {
        Provider::Auto => device.usable(false).is_ok(),
        Provider::Only(word) => device.traits().name == word,
    }
}

/// The devices that may be used, the best one first.
fn allowed(config: &Config) -> impl Iterator<Item = &'static dyn Device> {
    DEVICES.iter().copied().filter(|device| allows(config, *device))
}

/// The only device that may be used, where the configuration says which.
///
/// # Errors
/// It is not built in.
fn only(config: &Config) -> Result<Option<&'static dyn Device>, Error> {
    let Provider::Only(word) = config.provider else { return Ok(None) };
    let device = DEVICES.iter().copied().find(|device| device.traits().name == word);
    let missing = || Error::new(Kind::Invalid, format!("{word} is not built in"));
    device.ok_or_else(missing).map(Some)
}

/// The device for connections over TCP sockets.
///
/// # Errors
/// The configuration allows none.
fn over_sockets(config: &Config) -> Result<&'static dyn Device, Error> {
    allowed(config).find(|device| device.traits().socket).ok_or_else(|| match only(config) {
        Ok(Some(device)) => {
            let Traits { name, title, .. } = device.traits();
            let text =
                format!("it is a TCP connection, and RPCRDMA_PROVIDER={name} takes nothing but {title}");
            Error::new(Kind::Invalid, text)
        }
        Ok(None) => Error::new(Kind::Invalid, "no device goes over TCP sockets"),
        Err(error) => error,
    })
}

/// The devices that connections to `to` without a socket are tried over, in this order. `connected`: the program has connected
/// its socket itself.
fn beside_sockets(to: SocketAddr, connected: bool, config: &Config) -> Vec<&'static dyn Device> {
    let alone = config.provider != Provider::Auto;
    let others = allowed(config).filter(|device| !device.traits().socket);
    let mut others: Vec<&dyn Device> = others.filter(|_| alone || !connected).collect();
    if let (false, Some(Speaks::Rdma(best))) = (alone, peers::known(to)) {
        let from = others.iter().position(|device| device.traits().name == best);
        others.drain(..from.unwrap_or(others.len()));
    }
    others
}

/// A device, and whether it is used towards an address.
#[cfg(feature = "tool")]
pub struct Candidate {
    /// What the device is like.
    pub traits: &'static Traits,
    /// What of it leads there; or why nothing does.
    pub leads: Result<String, Error>,
}

/// The devices in the order in which they are tried for connections to `to`: the first one that leads there is used if the
/// peer answers over it.
#[cfg(feature = "tool")]
pub fn candidates(to: SocketAddr, config: &Config) -> Result<Vec<Candidate>, Error> {
    let only = only(config)?;
    let tried = beside_sockets(to, false, config);
    let tried = tried.into_iter().chain(allowed(config).filter(|device| device.traits().socket));
    let tried: Vec<_> = tried.map(Device::traits).collect();
    let judge = |device: &'static dyn Device| {
        let (traits, alone) = (device.traits(), only.is_some());
        let leads = if tried.contains(&traits) {
            device.leads(to, alone)
        } else if let Some(only) = only {
            let text = format!("RPCRDMA_PROVIDER={} takes nothing else", only.traits().name);
            Err(Error::new(Kind::Invalid, text))
        } else {
            device.usable(false).and_then(|()| device.leads(to, false))
        };
        Candidate { traits, leads }
    };
    Ok(DEVICES.iter().copied().map(judge).collect())
}

/// The device that takes the place of one that has failed, if the configuration leaves the choice.
pub(super) fn next(config: &Config, after: &Traits) -> Option<&'static dyn Device> {
    let mut rest = DEVICES.iter().copied().skip_while(|device| device.traits() != after).skip(1);
    rest.find(|device| config.provider == Provider::Auto && allows(config, *device))
}

/// Whether some device is of no use to this process any more.
pub fn is_refused() -> bool {
    DEVICES.iter().any(|device| device.is_refused())
}

/// The versions that the configuration allows.
pub(super) fn versions(config: &Config) -> Versions {
    match config.version {
        Version::One => Versions::ONE,
        Version::Auto => Versions::BOTH,
        Version::Two => Versions::TWO,
    }
}

/// What a connection over such a device is made with.
pub fn options(config: &Config, traits: &Traits) -> Options {
    let (receive, slab) = config.receive_sizes(traits.locked_memory);
    Options {
        inline: config.inline(traits.locked_memory),
        receive,
        slab,
        remote_invalidation: config.remote_invalidation,
        credits: config.credits.saturating_add(config.reverse_credits),
        margin: receive_margin(versions(config)),
        crc: config.crc,
        only: config.provider != Provider::Auto,
        spins: !config.poll.is_zero(),
    }
}

// ------------------------------------------------------------------------------------------------------- opening

/// The room for replies on a connection over a device whose memory is locked, where no setting says how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Little: in the hope that those calls of the program that have long replies have bindings.
    Little,
    /// As much as over any other device: the program has no bindings.
    Same,
}

impl Room {
    /// Memory for it. From its beginning the connection has the room that need not be asked for over any other device.
    ///
    /// # Errors
    /// `ENOMEM`: that much cannot be locked. Where no other device may be used, there is less room instead.
    fn areas(self, config: &Config, most: usize) -> Result<Arc<Areas>, Error> {
        let little = config.max_reply(true) + REPLY_HEADER;
        if self == Room::Little || config.max_reply.is_some() {
            return Ok(Areas::lazy(little, most));
        }
        let whole = config.max_reply(false) + REPLY_HEADER;
        if let Some(areas) = Areas::new(whole, most)? {
            return Ok(areas);
        }
        let left = areas::left(most);
        if config.provider != Provider::Auto {
            let less = left & !4095;
            let areas = if less > little { Areas::new(less, most)? } else { None };
            return Ok(areas.unwrap_or_else(|| Areas::lazy(little, most)));
        }
        let text = format!(
            "{whole} bytes for replies cannot be locked, for which {left} are left of {most}: {NEEDS_ROOM}"
        );
        Err(Error::new(Kind::Os(libc::ENOMEM), text))
    }

    /// Bytes that this process may lock for replies: what slabs leave.
    fn most() -> usize {
        process::lockable().map_or(AREAS_MAX, |bytes| AREAS_MAX.min(bytes - bytes / 2))
    }
}

/// What lets a program use a device whose memory is locked when there is too little of it.
const NEEDS_ROOM: &str = "a program without bindings gets room for replies as long as over tcp; a binding, \
                              RPCRDMA_MAX_REPLY (256K, say), or more locked memory (ulimit -l, LimitMEMLOCK=) lets it use \
                              the adapter";

/// Why there is no connection.
pub enum Failure {
    /// Nobody listens there, or nothing leads there.
    Connect(Error),
    /// Somebody listens, but no RDMA connection came about.
    Start(Error),
}

/// Starts to connect over a device that goes over no socket.
///
/// # Errors
/// It does not lead there. `ENOMEM`: it may, but there is not enough room.
fn connect(
    device: &dyn Device,
    to: SocketAddr,
    room: Room,
    config: &Config,
) -> Result<Box<dyn QueuePair>, Error> {
    let traits = device.traits();
    let areas = traits.locked_memory.then(|| room.areas(config, Room::most())).transpose()?;
    device.connect(Way::Address(to), &options(config, traits), areas)
}

/// Connects over one device; `alone` where nothing else may be used. The result is false where the startup is not done by
/// `deadline`.
///
/// # Errors
/// It does not lead there.
fn attempt(
    device: &dyn Device,
    to: SocketAddr,
    room: Room,
    config: &Config,
    deadline: Instant,
    alone: bool,
    mask: Mask<'_>,
) -> Result<(Box<dyn QueuePair>, bool), Error> {
    let refused_until = Instant::now() + LISTENS_LATE;
    let mut ports = PORTS;
    loop {
        let started = connect(device, to, room, config).and_then(|mut pair| {
            let done = establish(&mut *pair, deadline, mask)?;
            Ok((pair, done))
        });
        match started {
            // A server listens beside its socket from the first poll of its loop on, which may still be to come.
            Err(error) if alone && error.kind() == Kind::Refused && Instant::now() < refused_until => {
                let _ = wait::poll(&mut [], Some(LISTENS_LATE / 40), mask);
            }
            // An iWARP device has its ports from TCP, and RDMA-CM chooses ours without asking TCP: next time it chooses another.
            Err(error) if error.kind() == Kind::Os(libc::EADDRINUSE) && ports > 1 => ports -= 1,
            started => return started,
        }
    }
}

/// Starts to connect over a TCP socket that is connected.
///
/// # Errors
/// `ConnectionLost` when the peer has closed already.
pub(super) fn connect_over(socket: RawFd, config: &Config) -> Result<Box<dyn QueuePair>, Error> {
    let device = over_sockets(config)?;
    device.connect(Way::Socket(socket), &options(config, device.traits()), None)
}

/// Opens a connection to `to`, known by `fd`: a TCP socket, which it goes over if the device goes over one.
///
/// Where the configuration leaves the choice, a socket that the program has connected itself is what the connection goes over.
///
/// # Errors
/// As [`Failure`] says.
pub fn open(
    fd: RawFd,
    to: SocketAddr,
    connected: bool,
    timeout: Duration,
    room: Room,
    config: &'static Config,
    mask: Mask<'_>,
) -> Result<Arc<Client>, Failure> {
    let alone = only(config).map_err(Failure::Start)?.is_some();
    let over_socket = over_sockets(config);
    let others = beside_sockets(to, connected, config);
    let mut pending = Vec::new();
    let mut last = None;
    for (at, device) in others.iter().enumerate() {
        let name = device.traits().name;
        let next = others.get(at + 1).copied().or(over_socket.as_ref().ok().copied());
        let deadline = Instant::now() + if next.is_some() { HEAD_START } else { timeout };
        let started = attempt(*device, to, room, config, deadline, alone, mask);
        match (started, next) {
            (Ok((attempt, true)), _) => {
                if connected {
                    // As for any connection that does not go over a socket, the socket is no more than its name now.
                    socket::disconnect(fd).map_err(|error| Failure::Start(error.into()))?;
                }
                if !pending.is_empty() {
                    peers::remember(to, Speaks::Rdma(name));
                }
                return Ok(opened(fd, to, room, config, attempt));
            }
            (Ok((_, false)), None) => {
                let text = format!("the peer did not answer over {name} in time");
                last = Some(Error::new(Kind::Timeout, text));
            }
            (Ok((attempt, false)), Some(next)) => {
                let beside = next.traits().title;
                log_info!("{to}: {name} has no answer yet: {beside} is tried beside");
                pending.push((name, attempt));
            }
            (Err(error), None) => last = Some(error),
            (Err(error), Some(next)) => {
                log_info!("{to}: not over {name}: {error}");
                // That memory cannot be locked says nothing about the peer, and another program may need less.
                if error.kind() != Kind::Os(libc::ENOMEM) {
                    peers::remember(to, Speaks::Rdma(next.traits().name));
                }
            }
        }
    }
    let failure = match (over_socket, last) {
        (_, Some(error)) => Failure::Start(error),
        (Err(error), None) => Failure::Start(error),
        (Ok(device), None) => match open_socket(fd, to, connected, timeout, config, mask) {
            Ok(client) => {
                if !pending.is_empty() {
                    peers::remember(to, Speaks::Rdma(device.traits().name));
                }
                return Ok(client);
            }
            Err(failure) => failure,
        },
    };
    // These are all that is left.
    for (name, mut attempt) in pending {
        match establish(&mut *attempt, Instant::now() + timeout, mask) {
            Ok(true) => {
                // The socket is no more than the name of the connection now.
                let _ = socket::disconnect(fd);
                return Ok(opened(fd, to, room, config, attempt));
            }
            Ok(false) => {}
            Err(error) => log_info!("{to}: not over {name}: {error}"),
        }
    }
    Err(failure)
}

fn open_socket(
    fd: RawFd,
    to: SocketAddr,
    connected: bool,
    timeout: Duration,
    config: &'static Config,
    mask: Mask<'_>,
) -> Result<Arc<Client>, Failure> {
    if !connected {
        socket::connect(fd, to).map_err(|e| Failure::Connect(cannot_connect(Some(to), e)))?;
    }
    Client::open(fd, config, Instant::now() + timeout, mask).map_err(Failure::Start)
}

/// The connection that `fd` is the name of, over a device that is established.
fn opened(
    fd: RawFd,
    to: SocketAddr,
    room: Room,
    config: &'static Config,
    device: Box<dyn QueuePair>,
) -> Arc<Client> {
    let link = Link::new(Role::Client, config, versions(config), device, &memory(config));
    Client::with(fd, Some(to), room, config, link)
}

/// Drives a startup until it is done. Returns false when it is not done by `deadline`.
pub(super) fn establish(
    device: &mut dyn QueuePair,
    deadline: Instant,
    mask: Mask<'_>,
) -> Result<bool, Error> {
    while !device.establish()? {
        let events = if device.wants_write() { wait::IN | wait::OUT } else { wait::IN };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        wait::until(device.fd(), events, Some(left), mask)?;
    }
    Ok(true)
}

fn cannot_connect(to: Option<SocketAddr>, e: std::io::Error) -> Error {
    let to = to.map_or_else(String::new, |to| format!(" to {to}"));
    let text = format!("cannot connect{to}: {}", os_text(&e));
    Error::new(Error::from(e).kind(), text)
}

/// A connection on its way, which takes the place of another one.
pub(super) enum Anew {
    /// connect(2) is under way, or the startup over the socket is.
    Socket(OwnedFd, SocketAddr, Option<Box<dyn QueuePair>>),
    Other(Box<dyn QueuePair>),
}

impl Anew {
    /// Starts one in the place of the connection that `fd` is the name of.
    ///
    /// # Errors
    /// The device does not lead there.
    pub(super) fn start(
        device: &dyn Device,
        fd: RawFd,
        to: Option<SocketAddr>,
        room: Room,
        config: &Config,
    ) -> Result<Anew, Error> {
        let Some(to) = to else {
            return Err(Error::new(Kind::Os(libc::ENOTCONN), "the address of the peer is not known"));
        };
        if !device.traits().socket {
            return Ok(Anew::Other(connect(device, to, room, config)?));
        }
        let socket = socket::connect_beside(fd, to).map_err(|e| cannot_connect(Some(to), e))?;
        Ok(Anew::Socket(socket, to, None))
    }

    /// Takes one step, which does not wait. Returns true when the connection is established.
    ///
    /// # Errors
    /// It has failed.
    pub(super) fn step(&mut self, config: &Config) -> Result<bool, Error> {
        match self {
            Anew::Socket(_, _, Some(device)) | Anew::Other(device) => device.establish(),
            Anew::Socket(socket, to, device) => {
                let fd = socket.as_raw_fd();
                if !socket::connected(fd).map_err(|e| cannot_connect(Some(*to), e))? {
                    return Ok(false);
                }
                device.insert(connect_over(fd, config)?).establish()
            }
        }
    }

    /// What to wait for, and whether it is to become writable.
    pub(super) fn fd(&self) -> (RawFd, bool) {
        match self {
            Anew::Socket(socket, _, device) => {
                (socket.as_raw_fd(), device.as_ref().is_none_or(|device| device.wants_write()))
            }
            Anew::Other(device) => (device.fd(), device.wants_write()),
        }
    }

    /// The device, with `fd` as its descriptor if it goes over a socket.
    ///
    /// # Errors
    /// The system refuses, or the connection is not established.
    pub(super) fn finish(self, fd: RawFd) -> Result<Box<dyn QueuePair>, Error> {
        match self {
            Anew::Socket(socket, _, Some(mut device)) => {
                socket::take_place(socket, fd)?;
                device.rename(fd);
                Ok(device)
            }
            Anew::Socket(_, _, None) => Err(Error::new(Kind::Invalid, "the connection is not established")),
            Anew::Other(device) => Ok(device),
        }
    }
}

// ------------------------------------------------------------------------------------------------------ accepting

/// Whether RDMA is served over TCP connections.
///
/// # Errors
/// It is not.
pub fn may_accept(config: &Config) -> Result<(), Error> {
    over_sockets(config).map(drop)
}

/// The passive side of a TCP connection, whose startup is then to be driven to its end.
///
/// # Errors
/// As [`may_accept`]; when the device cannot be set up.
pub(super) fn accept(socket: RawFd, config: &Config) -> Result<Box<dyn QueuePair>, Error> {
    let device = over_sockets(config)?;
    device.accept(socket, &options(config, device.traits()))
}

/// The devices to listen on beside a TCP socket.
pub fn listening(config: &Config) -> impl Iterator<Item = &'static dyn Device> {
    allowed(config).filter(|device| !device.traits().socket)
}

/// Whether there is something to serve over: the only device that may be used, say.
///
/// # Errors
/// There is none.
pub fn may_serve(config: &Config) -> Result<(), Error> {
    only(config)?.map_or(Ok(()), |device| device.usable(true))
}

/// Whether a TCP socket that listens at an address of netid "rdma" is to give way to the only device that may be used.
///
/// # Errors
/// As [`may_serve`]; that device does not lead there.
pub fn gives_way(address: SocketAddr, config: &Config) -> Result<bool, Error> {
    may_serve(config)?;
    let Some(device) = only(config)? else { return Ok(false) };
    let Traits { name, title, loopback, .. } = device.traits();
    if !loopback && address.ip().to_canonical().is_loopback() {
        let text =
            format!("{address} does not lead to {title}, and RPCRDMA_PROVIDER={name} takes nothing else");
        return Err(Error::new(Kind::Os(libc::EADDRNOTAVAIL), text));
    }
    Ok(device.takes_ports())
}

// --------------------------------------------------------------------------------------------------------- memory

/// What a peer speaks, as was found out a moment ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaks {
    /// No RDMA: it closed on an MPA Request.
    Tcp,
    /// The device of this name came first, or no better one leads to the peer.
    Rdma(&'static str),
}

/// Whether a peer has just shown that it speaks no RDMA.
pub fn is_stock(peer: SocketAddr) -> bool {
    peers::known(peer) == Some(Speaks::Tcp)
}

/// Notes that a peer speaks no RDMA.
pub fn note_stock(peer: SocketAddr) {
    peers::remember(peer, Speaks::Tcp);
}

/// What peers speak.
mod peers {
    use super::*;

    type Table = HashMap<SocketAddr, (Speaks, Instant)>;

    fn table() -> MutexGuard<'static, Table> {
        static TABLE: fork::Lock<Table> = fork::Lock::new();
        TABLE.lock()
    }

    pub fn known(peer: SocketAddr) -> Option<Speaks> {
        table().get(&peer).filter(|(_, at)| at.elapsed() < REMEMBERED).map(|(speaks, _)| *speaks)
    }

    pub fn remember(peer: SocketAddr, speaks: Speaks) {
        let mut table = table();
        table.retain(|_, (_, at)| at.elapsed() < REMEMBERED);
        table.insert(peer, (speaks, Instant::now()));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;
    use crate::driver::client::tests::pair;
    use crate::provider::{Listener, Places, iwarp};
    use crate::wire::private_data::PrivateData;

    /// A device like an adapter.
    pub static LOCKED: Traits = Traits {
        name: "locked",
        title: "",
        socket: false,
        one_event: true,
        locked_memory: true,
        own_memory: true,
        place_min: 0,
        loopback: false,
    };

    /// What software iWARP's end of a socket offers.
    pub fn iwarp_options(config: &Config, fd: RawFd) -> iwarp::Options {
        iwarp::Options::of(&options(config, &iwarp::TRAITS), fd)
    }

    #[test]
    fn the_peer_is_told_whether_it_may_invalidate() {
        let (socket, _peer) = pair().unwrap();
        for remote_invalidation in [true, false] {
            let config = Config { remote_invalidation, ..Config::default() };
            let told = PrivateData::find(&iwarp_options(&config, socket.as_raw_fd()).private_data).unwrap();
            assert_eq!(told.remote_invalidation, remote_invalidation);
            assert_eq!(options(&config, &LOCKED).remote_invalidation, remote_invalidation);
        }
    }

    #[test]
    fn a_program_without_bindings_has_the_same_room_over_an_adapter_or_is_told_what_lacks() {
        let _alone = areas::ALONE.lock().unwrap();
        let config = |provider| Config { provider, ..Config::default() };
        let (auto, only) = (config(Provider::Auto), config(Provider::Only("verbs")));
        let whole = (16 << 20) + REPLY_HEADER;
        let size = |room: Room, config: &Config, most| {
            room.areas(config, most).map(|areas| (areas.size(), areas.first().is_some()))
        };
        assert_eq!(size(Room::Same, &auto, whole).unwrap(), (whole, true));
        assert_eq!(size(Room::Same, &only, whole).unwrap(), (whole, true));
        // A program that needs little, or says how much it needs, has the room with the first call.
        let little = (256 << 10) + REPLY_HEADER;
        assert_eq!(size(Room::Little, &auto, 0).unwrap(), (little, false));
        let told = Config { max_reply: Some(1024), ..config(Provider::Auto) };
        assert_eq!(size(Room::Same, &told, 0).unwrap(), (8192, false));
        let error = size(Room::Same, &auto, 4 << 20).unwrap_err();
        assert_eq!(error.kind(), Kind::Os(libc::ENOMEM));
        assert!(
            error
                .text()
                .starts_with("16781312 bytes for replies cannot be locked, for which 4194304 are left")
        );
        // There is no other device then.
        assert_eq!(size(Room::Same, &only, (4 << 20) + 5).unwrap(), (4 << 20, true));
        assert_eq!(size(Room::Same, &only, 256 << 10).unwrap(), (little, false));
    }

    /// A device whose ports are taken, which counts how often it is asked.
    struct Taken(AtomicU32);

    impl Device for Taken {
        fn traits(&self) -> &'static Traits {
            &iwarp::TRAITS
        }

        fn usable(&self, _: bool) -> Result<(), Error> {
            Ok(())
        }

        fn connect(&self, _: Way, _: &Options, _: Option<Arc<Areas>>) -> Result<Box<dyn QueuePair>, Error> {
            self.0.fetch_add(1, Relaxed);
            Err(Error::new(Kind::Os(libc::EADDRINUSE), "taken"))
        }

        fn listen(&self, _: Places, _: bool) -> Result<Box<dyn Listener>, Error> {
            unreachable!("a client")
        }
    }

    #[test]
    fn a_device_whose_port_is_tcps_is_asked_for_another_one_a_few_times() {
        let (taken, config) = (Taken(AtomicU32::new(0)), Config::default());
        let to = "192.0.2.1:7".parse().unwrap();
        let started = attempt(&taken, to, Room::Little, &config, Instant::now(), false, None);
        assert_eq!(started.err().map(|error| error.kind()), Some(Kind::Os(libc::EADDRINUSE)));
        assert_eq!(taken.0.into_inner(), PORTS);
    }

    #[test]
    fn an_adapter_has_room_for_the_receives_that_a_peer_may_ask_for_and_says_nothing_of_it() {
        let max_inline = Some(16 << 10);
        let config = Config { inline: Some(1024), version: Version::Auto, max_inline, ..Config::default() };
        let Options { inline, receive, slab, .. } = options(&config, &LOCKED);
        assert_eq!((inline, receive, slab), (1024, 4096, 16 << 10));
    }
}
