//! InfiniBand, RoCE and iWARP adapters, through libibverbs and librdmacm.
//!
//! Owns what a connection does with its device: what goes out from where it lies and what is copied, when a completion
//! is asked for, the registrations that the peer may use, and the way from an address to an established connection.
//! `cm` and `queues` own the device's objects and are the only ones that are unsafe; `library` finds the functions.
//!
//! **Memory.** A connection has its own protection domain and its own slabs, registered once, for Receives and for
//! what is sent: no handle names them. What the peer may touch is exactly the bytes that one RPC names: through a memory
//! window where the device has them, which the peer's Send may invalidate, else by a registration of their own. The
//! program's memory is registered from 64 KiB on; what is shorter, or cannot be registered, is copied first. Slabs of
//! all connections together take at most half of RLIMIT_MEMLOCK. A block of `Areas` is registered once, and each call gets
//! a window of it.
//!
//! **Sends** go out unsignalled but for every eighth. What lies in slabs is gathered from there, a short message travels
//! inside its request, all else is copied into a slab, or registered if it is longer than one: the peer may have
//! longer Receives than we do. Requests that are posted together cost one doorbell.
//!
//! **Errors.** Any error completion ends the connection: rxe may leave the other end without an event, so none is
//! waited for. A queue pair is destroyed before its memory is used again.
//!
//! **Fork.** Devices belong to the process that opened them: in a forked child every operation fails, and says so.
#![deny(unsafe_code)] // Not forbid: `cm`, `queues` and `library` speak C.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use once_cell::race::OnceBox;

use crate::error::{Error, Kind};
use crate::fork;
use crate::memory::{Areas, Buf, Region, Sink, Slabs};
use crate::process;
use crate::provider::{
    self, Accepted, Completion, Device, Knock, Limits, NEEDS_ROOM, Options, Places, QueuePair, Shortage,
    Traits, Way, WorkId, WorkRequest,
};
use crate::stats::{self, Counter};
use crate::wait::{self, Readables};
use crate::wire::private_data::PrivateData;
use crate::wire::{Handle, Segment};
use crate::{log_debug, log_info, log_warn, socket};

use cm::{Channel, Event, Id, Request, Terms};
use queues::{Access, Domain, Done, Fabric, Hold, Operation, Piece, Queues, Registration, Window, Work};

mod cm;
mod library;
#[cfg(test)]
mod mock;
mod queues;
#[cfg(test)]
pub(crate) mod tests;

/// RDMA Reads in either direction that we offer: what software iWARP offers too. (A Linux server refuses a client that
/// serves none.)
const READS: u8 = 16;
/// Memory of the program is registered from this length on; what is shorter is copied sooner than pinned.
const LEND_MIN: usize = 64 << 10;
/// Longest RDMA Write that is registered at a time: a long reply need not be pinned as a whole.
const WRITE_MAX: usize = 1 << 20;
/// Longest exposure.
const SEGMENT_MAX: u64 = 1 << 30;
/// A completion is asked for after so many requests without one.
const UNSIGNALLED: u32 = 7;
/// How long the device may take with the program's memory after the peer's answer is out: as long as the peer takes
/// something, and in all.
const KEEP_IDLE: Duration = Duration::from_millis(100);
const KEEP_WAIT: Duration = Duration::from_secs(1);
/// When a peer has let somebody wait so, results are copied for so long: whoever stands holds the program's loop once.
const KEEP_COPIES: Duration = Duration::from_secs(10);
/// How long the device may take to end the key of a window; without the window it ends at once.
const INVALIDATE: Duration = Duration::from_millis(100);
/// How long a connection that the program closes may take to send what is queued.
const DRAIN: Duration = Duration::from_millis(200);
/// How long looking for an address and for a route may take, each.
const RESOLVE_MS: c_int = 5000;
/// Requests that may wait for this process at a listener.
const BACKLOG: c_int = 128;
/// Where no byte can be written, and none is.
const NOWHERE: Segment = Segment { handle: Handle(0), length: 0, offset: 0 };
/// Fewest credits that a connection is made with when memory is short.
const CREDITS_MIN: u32 = 4;
/// Most connections that may be in the making on the passive side.
const STARTING_MAX: usize = 64;
/// Connections that may have to go for another one to be accepted.
const MAKE_ROOM: usize = 4;

// ------------------------------------------------------------------------------------------------------- devices

/// What the layers above know of adapters.
pub static TRAITS: Traits = Traits {
    name: "verbs",
    title: "adapters",
    socket: false,
    locked_memory: true,
    own_memory: true,
    // What is shorter is copied sooner than registered.
    place_min: LEND_MIN,
    loopback: false,
};

/// RDMA adapters: iWARP ones too where nothing else may be used.
pub struct Adapters;

impl Device for Adapters {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn usable(&self, only: bool) -> Result<(), Error> {
        some_device(only)?;
        if !only && are_refused() {
            return Err(Error::new(
                Kind::Os(libc::EACCES),
                "the kernel refuses this process its own devices",
            ));
        }
        Ok(())
    }

    fn is_refused(&self) -> bool {
        are_refused()
    }

    /// An iWARP device shares its ports with TCP.
    fn takes_ports(&self) -> bool {
        devices().any(|rnic| rnic)
    }

    fn connect(
        &self,
        way: Way,
        options: &Options,
        areas: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error> {
        match way {
            Way::Address(to) => connect(to, options, areas),
            Way::Socket(_) => Err(way.unknown()),
        }
    }

    fn listen(&self, places: Places, only: bool) -> Result<Box<dyn provider::Listener>, Error> {
        Ok(Box::new(Listener::new(places, only)?))
    }
}

/// Whether this machine has a device of the kind, without asking rdma-core.
fn present(iwarp: bool) -> bool {
    devices().any(|rnic| iwarp || !rnic)
}

/// The same, as a result.
///
/// # Errors
/// `ENODEV`, with a text that says what to do.
fn some_device(iwarp: bool) -> Result<(), Error> {
    if are_inherited() {
        let text = "this process was forked from one that has used RDMA devices, and cannot use them itself; \
                    RPCRDMA_PROVIDER=auto goes over software iWARP";
        return Err(Error::new(Kind::Os(libc::EACCES), text));
    }
    if !present(iwarp) {
        let text = "this machine has no RDMA device; RPCRDMA_PROVIDER=auto does without";
        return Err(Error::new(Kind::Os(libc::ENODEV), text));
    }
    Ok(())
}

/// 0, or one more than the [`fork::generation`] of the process that was the first to use rdma-core.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The connection manager is opened by this process, and devices will be.
fn note_opened() {
    let _ = OPENED.compare_exchange(0, fork::generation() + 1, Relaxed, Relaxed);
}

/// Whether the devices were opened by a process that this one was forked from.
///
/// rdma-core opens a device once for the process. A child has its descriptors, which the kernel refuses it as those of
/// somebody else, but not the doorbells: a driver that touches one there crashes.
fn are_inherited() -> bool {
    let opened = OPENED.load(Relaxed);
    opened != 0 && opened != fork::generation() + 1
}

/// The kernel refuses this process what it has opened itself: see [`are_refused`].
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether this process cannot use the machine's devices any more: they are those of the process that it was forked from,
/// or it has changed its credentials since it opened one.
///
/// The kernel lets nobody write to a device, or to the connection manager, but with the very credentials that it was opened
/// with, and compares where they lie: once they were changed, be it to what they were before, they are others for ever. Every
/// post is such a write where the driver has no doorbell in mapped memory, and so is all that has to do with connecting.
fn are_refused() -> bool {
    are_inherited() || REFUSED.load(Relaxed)
}

/// What `EACCES` means from what was opened, if that is the errno.
fn refused(errno: c_int, what: &str) -> Option<Error> {
    if errno != libc::EACCES {
        return None;
    }
    if !REFUSED.swap(true, Relaxed) {
        log_warn!(
            "verbs: the kernel refuses this process its own devices: it has changed its user or group (setfsuid, seteuid) \
             since it opened them. RDMA adapters are not used any more, but for RPCRDMA_PROVIDER=verbs; software iWARP is"
        );
    }
    let text =
        format!("{what} is refused: the process has changed its user or group since it opened the device");
    Some(Error::new(Kind::ConnectionLost, text))
}

/// Of each RDMA device, whether it is an iWARP device.
fn devices() -> impl Iterator<Item = bool> {
    let entries = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    entries.map(|entry| {
        fs::read_to_string(entry.path().join("node_type")).is_ok_and(|text| text.contains("RNIC"))
    })
}

/// Bytes of slabs of this process.
static LOCKED: AtomicUsize = AtomicUsize::new(0);

/// Until when what the program lends is copied, in milliseconds of [`now_ms`]: some peer has just stood.
static COPIES_UNTIL: AtomicU64 = AtomicU64::new(0);

fn now_ms() -> u64 {
    static START: OnceBox<Instant> = OnceBox::new();
    START.get_or_init(|| Box::new(Instant::now())).elapsed().as_millis() as u64
}

/// Bytes of those that belong to connections whose peers have not yet shown that they are there.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// A share of the memory that may be locked, given back with this.
struct Locked {
    bytes: usize,
    starting: bool,
}

impl Locked {
    /// Room for a connection with the fewest credits. `starting`: of a peer that has not yet shown that it is there.
    fn least(options: &Options, starting: bool) -> Result<Locked, Shortage> {
        let (budget, bytes) = (budget(), bytes(options, least(options)));
        let take = |of: &AtomicUsize, most: usize| {
            let fits = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= most);
            of.fetch_update(Relaxed, Relaxed, fits).is_ok()
        };
        let starting_max = (budget / 2).max(bytes).min(bytes.saturating_mul(STARTING_MAX));
        if starting && !take(&STARTING, starting_max) {
            return Err(Shortage::Starting);
        }
        let mut locked = Locked { bytes: 0, starting };
        if !take(&LOCKED, budget) {
            if starting {
                STARTING.fetch_sub(bytes, Relaxed);
                locked.starting = false;
            }
            return Err(Shortage::Memory);
        }
        locked.bytes = bytes;
        Ok(locked)
    }

    /// The peer is there.
    fn established(&mut self) {
        if std::mem::replace(&mut self.starting, false) {
            STARTING.fetch_sub(self.bytes, Relaxed);
        }
    }

    /// Room for as many credits as it may have: how many. The first connections leave room for others.
    fn grow(&mut self, options: &Options) -> u32 {
        let (budget, least) = (budget(), least(options));
        let mut credits = options.credits;
        while credits > least {
            let bytes = bytes(options, credits);
            let fits = |held: usize| {
                let others = held - self.bytes;
                (bytes <= budget.saturating_sub(others) / 7).then(|| others + bytes)
            };
            if LOCKED.fetch_update(Relaxed, Relaxed, fits).is_ok() {
                self.bytes = bytes;
                break;
            }
            credits = (credits / 2).max(least);
        }
        credits
    }

    /// Room for the fewest credits is enough.
    fn shrink(&mut self, options: &Options) {
        let bytes = bytes(options, least(options)).min(self.bytes);
        LOCKED.fetch_sub(self.bytes - bytes, Relaxed);
        self.bytes = bytes;
    }

    /// Gives back all but so many bytes, which count for ever.
    fn end(mut self, kept: usize) {
        self.established();
        self.bytes = self.bytes.saturating_sub(kept);
    }
}

/// What a connection that lacks it fails with.
fn lacks(shortage: Shortage, options: &Options) -> Error {
    let bytes = bytes(options, least(options));
    let text = match shortage {
        Shortage::Memory => format!(
            "no room for another RDMA connection: its buffers take {bytes} bytes, {} are taken, and half of \
                 RLIMIT_MEMLOCK is {}; raise it (ulimit -l, LimitMEMLOCK=), or lower {}",
            LOCKED.load(Relaxed),
            budget(),
            if options.slab > options.receive { "RPCRDMA_MAX_INLINE" } else { "RPCRDMA_INLINE" }
        ),
        Shortage::Starting => format!(
            "too many connections are being made: their buffers take {} bytes",
            STARTING.load(Relaxed)
        ),
    };
    Error::new(Kind::Os(libc::ENOMEM), text)
}

/// Bytes of slabs that the process may lock.
fn budget() -> usize {
    process::memlock_limit().map_or(usize::MAX, |bytes| bytes / 2)
}

/// Slabs of a connection with so many credits: Receives, as many messages in the hands of the program, and some Sends, of
/// two slabs each.
fn count(options: &Options, credits: u32) -> usize {
    (2 * credits + options.margin + 2 * credits.min(16)) as usize
}

fn bytes(options: &Options, credits: u32) -> usize {
    options.slab.next_multiple_of(4096).saturating_mul(count(options, credits))
}

fn least(options: &Options) -> u32 {
    CREDITS_MIN.min(options.credits)
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.established();
        LOCKED.fetch_sub(self.bytes, Relaxed);
    }
}

// ------------------------------------------------------------------------------------------------------ listener

/// Listens at the addresses of one TCP socket, on every device that one of them belongs to.
pub struct Listener {
    channel: Arc<Channel>,
    ids: Vec<Id>,
    places: Places,
    generation: u64,
    lost: bool,
    refusals: Refusals,
}

/// What the log is told of requests that were refused: a line a second, however many they are.
#[derive(Default)]
struct Refusals {
    told: Option<Instant>,
    untold: u32,
}

impl Refusals {
    /// How many were not told of since the last line; `None` if it is not time for one.
    fn tell(&mut self, now: Instant) -> Option<u32> {
        if self.told.is_some_and(|told| now.duration_since(told) < Duration::from_secs(1)) {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

impl Listener {
    /// Listens at `places`. Where iWARP devices are left out, and there is one, every other device's addresses are
    /// listened at one by one: an iWARP device shares its ports with TCP, so that a listener on all would fail.
    ///
    /// # Errors
    /// There is no device, or none has such an address, or the port is taken.
    pub fn new(places: Places, iwarp: bool) -> Result<Listener, Error> {
        some_device(iwarp)?;
        let channel = Channel::new()?;
        let mut ids = Vec::new();
        for address in &places.addresses {
            let any = address.ip().is_unspecified();
            if any && places.interface.is_none() && (iwarp || !devices().any(|rnic| rnic)) {
                let id = Id::new(&channel)?;
                id.bind(*address)?;
                id.listen(BACKLOG)?;
                ids.push(id);
                continue;
            }
            let mut ends =
                if any { socket::local_addresses(places.interface.as_deref()) } else { vec![*address] };
            // RDMA-CM takes a listener at a loopback address for one at any address.
            ends.retain(|at| at.is_ipv4() == address.is_ipv4() && places.contain(*at));
            for mut at in ends {
                at.set_port(address.port());
                let id = Id::new(&channel)?;
                match id.bind(at) {
                    Ok(())
                        if iwarp
                            || matches!(queues::fabric(&id), Some(Fabric::Roce | Fabric::InfiniBand)) =>
                    {
                        id.listen(BACKLOG)?;
                        ids.push(id);
                    }
                    Ok(()) => {}
                    Err(error) => log_debug!("verbs: not listening at {at}: {error}"),
                }
            }
        }
        if ids.is_empty() {
            let text = "no address that it listens at belongs to an RDMA device";
            return Err(Error::new(Kind::Os(libc::ENODEV), text));
        }
        let (generation, refusals) = (fork::generation(), Refusals::default());
        Ok(Listener { channel, ids, places, generation, lost: false, refusals })
    }

    /// Checks who wants to connect to what: the addresses of this end and of the peer, as the program is to see them.
    ///
    /// On RoCE and InfiniBand both come from the private data of the request, which whoever can send a datagram writes as
    /// he likes. What he cannot choose is where our answers go: to the GID of the path, which on RoCE is an IP address
    /// too. A port proves nothing there: the first 1024, which tell a privileged caller over TCP, are shown as others.
    fn admit(&self, id: &Id, known: bool) -> Result<(SocketAddr, SocketAddr), Error> {
        let refused = |text: String| Err(Error::new(Kind::Refused, text));
        let (Some(local), Some(mut peer)) = id.addresses() else {
            return refused("the request names no addresses".into());
        };
        if !self.places.contain(local) {
            return refused(format!("the connection is to {local}, where the program does not listen"));
        }
        match queues::fabric(id) {
            Some(Fabric::Iwarp) => return Ok((local, peer)),
            Some(Fabric::Roce) => {
                let claimed = match peer.ip() {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                match id.peer_gid() {
                    Some(gid) if gid == claimed => {}
                    Some(gid) => {
                        let (says, gid) = (peer.ip(), gid.to_canonical());
                        return refused(format!("it says that it is {says}, but its answers go to {gid}"));
                    }
                    None => return refused("the device does not tell where its answers go".into()),
                }
            }
            Some(Fabric::InfiniBand) | None if known => {
                let text = "over InfiniBand nothing but the caller's own word tells its IP address, which a moved program \
                            may trust; RPCRDMA_REDIRECT_ADAPTERS=yes serves it nevertheless";
                return refused(text.into());
            }
            Some(Fabric::InfiniBand) | None => {}
        }
        peer.set_port(unprivileged(peer.port()));
        Ok((local, peer))
    }
}

impl provider::Listener for Listener {
    fn fd(&self) -> RawFd {
        self.channel.fd()
    }

    fn forked(&self) -> bool {
        self.generation != fork::generation()
    }

    fn lost(&self) -> bool {
        self.lost
    }

    fn accept(
        &mut self,
        options: &Options,
        known: bool,
        make_room: &mut dyn FnMut(Shortage, IpAddr) -> bool,
    ) -> Result<Knock, Error> {
        let Some(event) = self.channel.next()? else { return Ok(Knock::Nobody) };
        match event {
            Event::Request(request) => {
                let peer = request.id.addresses().1;
                let admitted = self.admit(&request.id, known).and_then(|ends| {
                    // Before anything is made for it: who is refused is to cost little.
                    let mut locked = Locked::least(options, true);
                    for _ in 0..MAKE_ROOM {
                        match locked {
                            Err(shortage) if make_room(shortage, ends.1.ip()) => {
                                locked = Locked::least(options, true);
                            }
                            _ => break,
                        }
                    }
                    Ok((ends, locked.map_err(|shortage| lacks(shortage, options))?))
                });
                if admitted.is_err() {
                    request.id.reject();
                }
                let verbs = admitted.and_then(|((local, peer), locked)| {
                    let device = Box::new(Verbs::respond(*request, locked, options.clone())?);
                    Ok(Accepted { device, local: Some(local), peer: Some(peer) })
                });
                match verbs {
                    Ok(accepted) => return Ok(Knock::Accepted(accepted)),
                    Err(error) => {
                        if let Some(others) = self.refusals.tell(Instant::now()) {
                            let peer = peer.map_or_else(|| "a peer".to_owned(), |at| at.to_string());
                            let others = match others {
                                0 => String::new(),
                                others => format!(" ({others} others were refused since the last such line)"),
                            };
                            log_warn!("verbs: {peer} is refused: {error}{others}");
                        }
                    }
                }
            }
            Event::Failed(error) => {
                log_warn!("verbs: a listener has ended: {error}");
                self.lost = true;
            }
            _ => {}
        }
        Ok(Knock::Refused)
    }

    fn places(&self) -> usize {
        self.ids.len()
    }
}

/// A port that no program takes for one of a privileged caller.
fn unprivileged(port: u16) -> u16 {
    if port < 1024 { port + 1024 } else { port }
}

/// Starts to connect to `address`; the startup is then to be driven to its end. `areas` are for Reply chunks, if the device
/// can have them at once.
///
/// # Errors
/// rdma-core is missing, or no device leads to the address.
fn connect(
    address: SocketAddr,
    options: &Options,
    areas: Option<Arc<Areas>>,
) -> Result<Box<dyn QueuePair>, Error> {
    some_device(options.only)?;
    let mut verbs = Verbs::request(address, options.clone())?;
    verbs.areas = areas;
    Ok(Box::new(verbs))
}

// ---------------------------------------------------------------------------------------------------- connection

/// Memory that the peer may use by a key.
struct Exposed {
    /// `None` for a registration's own key.
    window: Option<Window>,
    memory: Memory,
}

enum Memory {
    Own(Registration),
    /// A part of one of [`Verbs::blocks`].
    Area(#[expect(dead_code, reason = "held")] Sink),
}

enum Stage {
    /// Looking for the device.
    Address,
    /// Looking for the way.
    Route,
    /// The peer has been asked.
    Connecting,
    /// The peer has been answered.
    Accepting,
    Open,
}

/// A queue pair on a device.
pub struct Verbs {
    options: Options,
    stage: Stage,
    generation: u64,
    channel: Arc<Channel>,
    watch: Readables,
    /// Until its device is known.
    id: Option<Id>,
    queues: Option<Queues>,
    exposed: HashMap<u32, Exposed>,
    /// For Reply chunks, and those of its blocks that are registered.
    areas: Option<Arc<Areas>>,
    blocks: Vec<Registration>,
    /// Requests that make the keys of windows good, before anything that names them.
    binds: VecDeque<Work>,
    /// Windows that are bound to nothing.
    windows: Vec<Window>,
    domain: Option<Arc<Domain>>,
    slabs: Option<Arc<Slabs>>,
    locked: Option<Locked>,
    /// What waits for room on the send queue or for a slab.
    pending: VecDeque<WorkRequest>,
    /// Requests since the last one that was signalled.
    unsignalled: u32,
    /// When the last ones were posted.
    posted: Option<Instant>,
    /// Receives that were posted before they were asked for.
    early: u32,
    receives: u32,
    /// Slabs whose Receive was handed up as a copy: the next Receive lies in one of them.
    spare: Vec<Buf>,
    /// Bytes of RDMA Reads under way.
    reads: HashMap<WorkId, u32>,
    terms: Terms,
    /// The latest request that sees, or has shown, whether the peer is there.
    probe: Option<u64>,
    moved: u64,
    pulled: u64,
    /// What [`QueuePair::taken`] and [`QueuePair::unsent`] say after the end.
    last: (u64, usize),
    /// The peer has gone: what it sent before is still taken.
    ending: Option<Error>,
    failed: Option<Error>,
}

impl Verbs {
    /// Active side: starts to connect.
    fn request(address: SocketAddr, options: Options) -> Result<Verbs, Error> {
        let channel = Channel::new()?;
        let id = Id::new(&channel)?;
        id.resolve_address(address, RESOLVE_MS)?;
        Verbs::new(channel, id, Stage::Address, options)
    }

    /// Passive side: accepts a request.
    fn respond(request: Request, locked: Locked, options: Options) -> Result<Verbs, Error> {
        let Request { mut id, terms } = request;
        let refused = |id: &Id, error| {
            id.reject();
            error
        };
        let channel = match Channel::new() {
            Ok(channel) => channel,
            Err(error) => return Err(refused(&id, error)),
        };
        if let Err(error) = id.migrate(&channel) {
            return Err(refused(&id, error));
        }
        let mut verbs = Verbs::new(channel, id, Stage::Accepting, options)?;
        verbs.terms = terms;
        verbs.locked = Some(locked);
        if let Err(error) = verbs.equip().and_then(|()| verbs.answer()) {
            if let Some(id) = verbs.domain.as_ref().map(|domain| domain.id()).or(verbs.id.as_ref()) {
                id.reject();
            }
            return Err(error);
        }
        Ok(verbs)
    }

    fn new(channel: Arc<Channel>, id: Id, stage: Stage, options: Options) -> Result<Verbs, Error> {
        Ok(Verbs {
            options,
            stage,
            generation: fork::generation(),
            watch: Readables::new(&[channel.fd()])?,
            channel,
            id: Some(id),
            queues: None,
            exposed: HashMap::new(),
            areas: None,
            blocks: Vec::new(),
            binds: VecDeque::new(),
            windows: Vec::new(),
            domain: None,
            slabs: None,
            locked: None,
            pending: VecDeque::new(),
            unsignalled: 0,
            posted: None,
            early: 0,
            receives: 0,
            spare: Vec::new(),
            reads: HashMap::new(),
            terms: Terms::default(),
            probe: None,
            moved: 0,
            pulled: 0,
            last: (0, 0),
            ending: None,
            failed: None,
        })
    }

    /// Makes the queue pair and posts the first Receives, before the peer can send. If that fails, `fail` sees to what is
    /// there already, for the device may keep it.
    fn equip(&mut self) -> Result<(), Error> {
        let id = self.id.take().ok_or_else(|| lost("no identifier"))?;
        if self.locked.is_none() {
            let locked = Locked::least(&self.options, false);
            self.locked = Some(locked.map_err(|shortage| lacks(shortage, &self.options))?);
        }
        let (few, most) = (least(&self.options), self.options.credits);
        let (few, most) = (count(&self.options, few), count(&self.options, most));
        let slabs = Slabs::with_room(self.options.slab, few, most)?;
        let domain = Domain::new(id)?;
        self.domain = Some(domain.clone());
        self.receives = least(&self.options) + self.options.margin;
        let receives = self.options.credits + self.options.margin;
        let queues = self.queues.insert(Queues::new(domain.clone(), slabs.clone(), few, receives)?);
        let events = queues.fd();
        // For what a peer may send before the layer above posts its own: one call, and what needs no credit.
        // Were they more than that posts at first, Receives of another length would come later than it thinks.
        self.early = self.options.margin;
        for _ in 0..self.early {
            let slab = slabs.take().ok_or_else(|| lost("no slab for a Receive"))?;
            queues.post_receive(slab.into_sink(self.options.receive))?;
        }
        if let Some(areas) = &self.areas {
            match areas.first().filter(|_| domain.capabilities().windows) {
                Some(block) => self.blocks.push(Registration::area(&domain, block)?),
                // Each call would register all of the room.
                None if !self.options.only => {
                    let text = format!("{} has no memory windows: {NEEDS_ROOM}", domain.capabilities().name);
                    return Err(Error::new(Kind::Os(libc::ENOMEM), text));
                }
                None => areas.end(),
            }
        }
        self.watch.add(events)?;
        self.terms.our_reads = self.terms.our_reads.min(READS).min(domain.capabilities().our_reads);
        self.terms.their_reads = self.terms.their_reads.min(READS).min(domain.capabilities().their_reads);
        self.slabs = Some(slabs);
        Ok(())
    }

    /// The peer is there: it gets as many credits as memory allows.
    fn extend(&mut self) {
        let (Some(locked), Some(slabs)) = (&mut self.locked, self.slabs.clone()) else { return };
        locked.established();
        let credits = locked.grow(&self.options);
        let (few, all) = (count(&self.options, least(&self.options)), count(&self.options, credits));
        if all <= few {
            return;
        }
        match self.queues.as_mut().map(|queues| queues.add(slabs.clone(), few, all)) {
            Some(Ok(())) => {
                slabs.grow(all);
                self.receives = credits + self.options.margin;
            }
            // What it has will do.
            Some(Err(error)) => {
                log_info!("verbs: a connection has few credits: {error}");
                locked.shrink(&self.options);
            }
            None => locked.shrink(&self.options),
        }
    }

    fn private_data(&self) -> [u8; PrivateData::LEN] {
        PrivateData {
            remote_invalidation: self.has_windows() && self.options.remote_invalidation,
            send_size: self.options.inline,
            receive_size: self.options.inline,
        }
        .encode()
    }

    fn answer(&self) -> Result<(), Error> {
        let Terms { our_reads, their_reads, .. } = self.terms;
        self.domain()?.id().accept(&self.private_data(), their_reads, our_reads)
    }

    fn domain(&self) -> Result<&Arc<Domain>, Error> {
        self.domain.as_ref().ok_or_else(|| lost("no device yet"))
    }

    /// One step of the startup for each event that is there.
    fn start_up(&mut self) -> Result<bool, Error> {
        while !matches!(self.stage, Stage::Open) {
            let Some(event) = self.channel.next()? else { return Ok(false) };
            match (event, &self.stage) {
                (Event::AddressResolved, Stage::Address) => {
                    let id = self.id.as_ref().ok_or_else(|| lost("no identifier"))?;
                    if !self.options.only && matches!(queues::fabric(id), None | Some(Fabric::Iwarp)) {
                        let text = "an iWARP device leads there, which RPCRDMA_PROVIDER=verbs would use";
                        return Err(Error::new(Kind::Os(libc::ENODEV), text));
                    }
                    id.resolve_route(RESOLVE_MS)?;
                    self.stage = Stage::Route;
                }
                (Event::RouteResolved, Stage::Route) => {
                    (self.terms.our_reads, self.terms.their_reads) = (READS, READS);
                    self.equip()?;
                    self.extend();
                    let Terms { our_reads, their_reads, .. } = self.terms;
                    self.domain()?.id().connect(&self.private_data(), their_reads, our_reads)?;
                    self.stage = Stage::Connecting;
                }
                (Event::Established(terms), Stage::Connecting) => {
                    self.terms.our_reads = self.terms.our_reads.min(terms.our_reads);
                    self.terms.private_data = terms.private_data;
                    self.stage = Stage::Open;
                }
                (Event::Established(_), Stage::Accepting) => {
                    self.extend();
                    self.stage = Stage::Open;
                }
                (Event::Failed(error), _) => return Err(error),
                (Event::Disconnected, _) => return Err(lost("the peer gave up while connecting")),
                _ => {}
            }
        }
        Ok(true)
    }

    fn check(&self) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.generation != fork::generation() {
            let text = "an RDMA connection cannot be used in a forked process";
            return Err(Error::new(Kind::Os(libc::EACCES), text));
        }
        Ok(())
    }

    /// Ends the connection. Every handle is dead and no memory is in use when this returns.
    fn fail(&mut self, error: Error) -> Error {
        if self.failed.is_none() {
            self.last = (self.taken(), self.unsent());
            self.failed = Some(error.clone());
            if let Some(domain) = &self.domain {
                domain.id().disconnect();
            }
            // What it watches goes without a word to another thread that sleeps there. Without a descriptor that one sleeps
            // until its own time is over.
            if self.generation == fork::generation()
                && let Err(error) = self.watch.end()
            {
                log_warn!("verbs: calls may learn late that their connection has ended: {error}");
            }
            // A window that is bound keeps a queue pair of rxe for a while.
            self.exposed.clear();
            self.windows.clear();
            self.blocks.clear();
            if let Some(areas) = &self.areas {
                areas.end();
            }
            self.queues = None;
            self.binds.clear();
            self.pending.clear();
            self.spare.clear();
            self.reads.clear();
            // A device that is removed waits for the last object on it.
            let kept = self.domain.take().map_or(0, Domain::end);
            self.id = None;
            // The next connection may need it at once. What the device keeps stays locked.
            if let Some(locked) = self.locked.take() {
                locked.end(kept);
            }
        }
        self.failed.clone().unwrap_or(error)
    }

    // ---------------------------------------------------------------------------------------------------- sending

    /// Posts what is pending, as far as there is room, with one doorbell.
    fn start(&mut self) -> Result<(), Error> {
        let room = self.queues()?.room().min(self.binds.len());
        let mut work: Vec<Work> = self.binds.drain(..room).collect();
        while let Some(request) = self.pending.pop_front() {
            if !self.binds.is_empty() {
                self.pending.push_front(request);
                break;
            }
            let room = self.queues()?.room().saturating_sub(work.len());
            if room < needs(&request) {
                self.pending.push_front(request);
                break;
            }
            // Whether completions will come that give memory back.
            let others = !work.is_empty() || self.queues()?.busy();
            match self.prepare(request, others)? {
                Prepared::Work(more) => work.extend(more),
                Prepared::Later(request) => {
                    self.pending.push_front(request);
                    break;
                }
                Prepared::Parts(parts) => {
                    for part in parts.into_iter().rev() {
                        self.pending.push_front(part);
                    }
                }
            }
        }
        if !(self.pending.is_empty() && self.binds.is_empty()) {
            // Nothing else would ever tell that there is room again.
            match work.last_mut() {
                Some(last) => last.signalled = true,
                None if self.queues()?.awaits() => {}
                None => work.push(Work::nothing()),
            }
        }
        if work.is_empty() {
            return Ok(());
        }
        stats::add(Counter::Doorbells, 1);
        self.posted = Some(Instant::now());
        self.queues()?.post(work)
    }

    fn queues(&mut self) -> Result<&mut Queues, Error> {
        self.queues.as_mut().ok_or_else(|| lost("not connected"))
    }

    fn signal(&mut self, wanted: bool) -> bool {
        let signalled = wanted || self.unsignalled >= UNSIGNALLED;
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
        signalled
    }

    fn prepare(&mut self, request: WorkRequest, others: bool) -> Result<Prepared, Error> {
        match request {
            WorkRequest::Send { gather, invalidate } => {
                let operation = Operation::Send(invalidate);
                let total: usize = gather.iter().map(|piece| piece.len()).sum();
                let queues = self.queues()?;
                if total <= queues.inline() && gather.len() <= queues.pieces() {
                    let (pieces, holds) = (Vec::new(), Vec::new());
                    let signalled = self.signal(false);
                    return Ok(Work { operation, pieces, inline: gather, holds, signalled }.into());
                }
                if total > self.slab() {
                    return self.prepare_long_send(gather, invalidate, others);
                }
                match self.slab_work(operation, &gather)? {
                    Some(work) => Ok(work.into()),
                    None if others => Ok(Prepared::Later(WorkRequest::Send { gather, invalidate })),
                    None => Err(lost("no slab is left to send from")),
                }
            }
            WorkRequest::Write { gather, to } => self.prepare_write(gather, to, others),
            WorkRequest::Read { id, sink, at, from } => {
                let domain = self.domain()?.clone();
                // RFC 5040 has an iWARP Read name its sink to the peer, by a key that lets the peer write there.
                let access = if domain.capabilities().iwarp { Access::Remote } else { Access::Local };
                let part = sink.part(at, from.length as usize);
                let address = part.address();
                let registration = match Registration::sink(&domain, part, access) {
                    Ok(registration) => registration,
                    Err(_) if others => return Ok(Prepared::Later(WorkRequest::Read { id, sink, at, from })),
                    Err(error) => return Err(error),
                };
                stats::add(Counter::Registrations, 1);
                let piece = registration.piece(address, from.length as usize);
                let pieces = vec![piece.ok_or_else(|| lost("a Read outside of its sink"))?];
                self.reads.insert(id, from.length);
                let holds = vec![Hold::Registration(registration)];
                let signalled = self.signal(true);
                let operation = Operation::Read(id, from);
                Ok(Work { operation, pieces, inline: Vec::new(), holds, signalled }.into())
            }
        }
    }

    /// A Send longer than a slab, which goes as one request whatever its pieces are.
    fn prepare_long_send(
        &mut self,
        mut gather: Vec<Region>,
        invalidate: Option<Handle>,
        others: bool,
    ) -> Result<Prepared, Error> {
        if gather.len() > self.queues()?.pieces() {
            gather = vec![joined(&gather)?];
        }
        let (pieces, holds) = match self.name(&gather) {
            Ok(named) => named,
            Err(_) if others => return Ok(Prepared::Later(WorkRequest::Send { gather, invalidate })),
            // Memory of a program may be of a kind that cannot be registered.
            Err(_) => self.name(&[joined(&gather)?])?,
        };
        let signalled = self.signal(true);
        let operation = Operation::Send(invalidate);
        Ok(Work { operation, pieces, inline: Vec::new(), holds, signalled }.into())
    }

    fn prepare_write(&mut self, gather: Vec<Region>, to: Segment, others: bool) -> Result<Prepared, Error> {
        let total = to.length as usize;
        let slab = self.slab();
        if total <= slab {
            return match self.slab_work(Operation::Write(to), &gather)? {
                Some(work) => Ok(work.into()),
                None if others => Ok(Prepared::Later(WorkRequest::Write { gather, to })),
                None => Err(lost("no slab is left to send from")),
            };
        }
        if total > WRITE_MAX {
            return Ok(Prepared::Parts(cut(&gather, to, WRITE_MAX)));
        }
        let most = self.queues()?.pieces();
        let mut work = Vec::new();
        let mut rest = to;
        for group in gather.chunks(most) {
            let (pieces, holds) = match self.name(group) {
                Ok(named) => named,
                Err(_) if others => return Ok(Prepared::Later(WorkRequest::Write { gather, to })),
                // Memory that cannot be pinned goes out through slabs.
                Err(_) => return Ok(Prepared::Parts(cut(&gather, to, slab))),
            };
            let length = group.iter().map(|piece| piece.len() as u32).sum();
            let operation = Operation::Write(Segment { length, ..rest });
            rest = Segment { offset: rest.offset + u64::from(length), ..rest };
            let signalled = self.signal(true);
            work.push(Work { operation, pieces, inline: Vec::new(), holds, signalled });
        }
        Ok(Prepared::Work(work))
    }

    /// Names memory for a request: by the slabs' registration what lies there, all else by one of its own.
    fn name(&mut self, gather: &[Region]) -> Result<(Vec<Piece>, Vec<Hold>), Error> {
        let domain = self.domain()?.clone();
        let queues = self.queues()?;
        let (mut pieces, mut holds) = (Vec::new(), Vec::new());
        for source in gather.iter().filter(|source| !source.is_empty()) {
            let (address, len) = (source.as_ptr().addr(), source.len());
            if let Some(piece) = queues.known(address, len) {
                pieces.push(piece);
                holds.push(Hold::Region(source.clone()));
                continue;
            }
            let registration = Registration::source(&domain, source.clone(), Access::Local)?;
            stats::add(Counter::Registrations, 1);
            pieces.push(registration.piece(address, len).ok_or_else(|| lost("memory outside of itself"))?);
            holds.push(Hold::Registration(registration));
        }
        Ok((pieces, holds))
    }

    /// Bytes of a slab.
    fn slab(&self) -> usize {
        self.slabs.as_ref().map_or(0, |slabs| slabs.size())
    }

    /// A request for the bytes of at most one slab's length: from where they lie if the device knows that place, else
    /// copied into a slab. `None` when no slab is free.
    fn slab_work(&mut self, operation: Operation, gather: &[Region]) -> Result<Option<Work>, Error> {
        let slabs = self.slabs.clone().ok_or_else(|| lost("not connected"))?;
        let queues = self.queues()?;
        let known = |piece: &Region| queues.known(piece.as_ptr().addr(), piece.len());
        let pieces: Option<Vec<Piece>> = gather.iter().map(known).collect();
        let (pieces, holds) = match pieces.filter(|pieces| pieces.len() <= queues.pieces()) {
            Some(pieces) => (pieces, gather.iter().cloned().map(Hold::Region).collect()),
            None => {
                let Some(mut copy) = slabs.take() else { return Ok(None) };
                for piece in gather {
                    copy.extend(piece)?;
                }
                stats::add(Counter::BytesCopied, copy.len() as u64);
                self.name(&[copy.freeze()])?
            }
        };
        let signalled = self.signal(false);
        Ok(Some(Work { operation, pieces, inline: Vec::new(), holds, signalled }))
    }

    // -------------------------------------------------------------------------------------------------- receiving

    fn advance(&mut self) -> Result<Option<Completion>, Error> {
        loop {
            self.taken_back()?;
            self.start()?;
            let queues = self.queues()?;
            match queues.poll()? {
                Some(Done::Received { sink, len, invalidated }) => {
                    let ended = invalidated.and_then(|handle| self.exposed.remove(&handle.0));
                    let invalidated = invalidated.filter(|_| ended.is_some());
                    if let Some(Exposed { window, memory }) = ended {
                        stats::add(Counter::Invalidations, 1);
                        self.windows.extend(window);
                        drop(memory);
                        self.taken_back()?;
                    }
                    self.moved += len as u64;
                    return self.received(sink, len, invalidated).map(Some);
                }
                Some(Done::Read(id)) => {
                    let bytes = u64::from(self.reads.remove(&id).unwrap_or(0));
                    self.moved += bytes;
                    self.pulled += bytes;
                    return Ok(Some(Completion::Read { id }));
                }
                None => {}
            }
            if let Some(error) = self.ending.take() {
                return Err(error);
            }
            self.look_around()?;
            if !self.queues()?.arm()? && self.ending.is_none() {
                return Ok(None);
            }
        }
    }

    /// Takes the events that are there.
    fn look_around(&mut self) -> Result<(), Error> {
        stats::add(Counter::Syscalls, 1);
        for ready in self.watch.ready() {
            if ready != self.channel.fd() {
                self.queues()?.take_event();
                continue;
            }
            while let Some(event) = self.channel.next()? {
                self.ending = match event {
                    Event::Disconnected => Some(lost("the peer closed the connection")),
                    Event::Failed(error) => Some(error),
                    _ => continue,
                };
            }
        }
        Ok(())
    }

    /// Hands a Receive up as it is while there are slabs to spare, else as a copy: the Receives must never run out.
    fn received(&mut self, sink: Sink, len: usize, invalidated: Option<Handle>) -> Result<Completion, Error> {
        let left = self.slabs.as_ref().map_or(0, |slabs| slabs.left());
        let reserve = (self.receives - self.options.margin).min(16) as usize;
        if left > self.spare.len() + reserve {
            return Ok(Completion::Received { sink, len, invalidated });
        }
        let slab = sink.into_buf(len).map_err(|_| lost("a Receive is still held"))?;
        let mut copy = Buf::with_capacity(len)?;
        copy.extend(&slab)?;
        stats::add(Counter::BytesCopied, len as u64);
        self.spare.push(slab);
        Ok(Completion::Received { sink: copy.into_sink(len), len, invalidated })
    }
}

impl Work {
    /// Zero bytes to nowhere: it is complete when everything before it is.
    fn nothing() -> Work {
        let (pieces, inline, holds) = (Vec::new(), Vec::new(), Vec::new());
        Work { operation: Operation::Write(NOWHERE), pieces, inline, holds, signalled: true }
    }
}

/// Requests on the send queue that a request may become.
fn needs(request: &WorkRequest) -> usize {
    match request {
        WorkRequest::Write { gather, .. } => gather.len().max(1),
        _ => 1,
    }
}

/// What became of a request.
enum Prepared {
    Work(Vec<Work>),
    /// It waits for something that a completion frees.
    Later(WorkRequest),
    /// It goes in parts.
    Parts(Vec<WorkRequest>),
}

impl From<Work> for Prepared {
    fn from(work: Work) -> Prepared {
        Prepared::Work(vec![work])
    }
}

/// The bytes of several pieces in one.
fn joined(gather: &[Region]) -> Result<Region, Error> {
    let mut copy = Buf::with_capacity(gather.iter().map(|piece| piece.len()).sum())?;
    for piece in gather {
        copy.extend(piece)?;
    }
    stats::add(Counter::BytesCopied, copy.len() as u64);
    Ok(copy.freeze())
}

/// An RDMA Write in parts of at most `most` bytes.
fn cut(gather: &[Region], to: Segment, most: usize) -> Vec<WorkRequest> {
    let mut parts = Vec::new();
    let (mut part, mut bytes, mut offset) = (Vec::new(), 0, to.offset);
    let mut close = |part: &mut Vec<Region>, bytes: &mut usize| {
        let to = Segment { length: *bytes as u32, offset, ..to };
        offset += *bytes as u64;
        *bytes = 0;
        parts.push(WorkRequest::Write { gather: std::mem::take(part), to });
    };
    for source in gather {
        let mut at = 0;
        while at < source.len() {
            let len = (source.len() - at).min(most - bytes);
            part.push(source.slice(at, len));
            at += len;
            bytes += len;
            if bytes == most {
                close(&mut part, &mut bytes);
            }
        }
    }
    if bytes > 0 {
        close(&mut part, &mut bytes);
    }
    parts
}

fn lost(text: &'static str) -> Error {
    Error::new(Kind::ConnectionLost, text)
}

impl QueuePair for Verbs {
    fn traits(&self) -> &'static Traits {
        &TRAITS
    }

    fn establish(&mut self) -> Result<bool, Error> {
        self.check()?;
        self.start_up().map_err(|error| self.fail(error))
    }

    fn limits(&self) -> Limits {
        let registration = self.domain.as_ref().map_or(0, |domain| domain.capabilities().registration);
        Limits {
            read_depth: u32::from(self.terms.our_reads),
            max_segment: registration.min(SEGMENT_MAX) as u32,
            // A key of ibv_reg_mr cannot be invalidated by the peer, a window's can.
            remote_invalidation: self.has_windows(),
            receives: self.receives,
        }
    }

    fn describe(&self) -> String {
        self.domain.as_ref().map_or_else(
            || "verbs".to_owned(),
            |domain| {
                let Terms { our_reads, their_reads, .. } = self.terms;
                format!(
                    "verbs device {}, {our_reads} Reads out and {their_reads} in",
                    domain.capabilities().name
                )
            },
        )
    }

    fn private_data(&self) -> &[u8] {
        &self.terms.private_data
    }

    fn slabs(&self) -> Option<Arc<Slabs>> {
        self.slabs.clone()
    }

    fn areas(&self) -> Option<Arc<Areas>> {
        self.areas.clone()
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        self.check()?;
        let (domain, access) = (self.domain()?.clone(), self.access());
        let lent = region.is_lent();
        let copied = |region: &Region| -> Result<Registration, Error> {
            stats::add(Counter::BytesCopied, region.len() as u64);
            Registration::source(&domain, region.owned()?, access)
        };
        let registration = if lent && region.len() < LEND_MIN {
            copied(&region)?
        } else {
            match Registration::source(&domain, region.clone(), access) {
                // Memory of a program may be of a kind that cannot be registered.
                Err(_) if lent => copied(&region)?,
                other => other?,
            }
        };
        self.expose(registration, false)
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        self.check()?;
        let domain = self.domain()?.clone();
        let place = Segment { handle: Handle(0), length: sink.len() as u32, offset: sink.address() as u64 };
        let block = self.areas.as_ref().and_then(|areas| areas.block_of(place.offset as usize, sink.len()));
        if let Some(block) = block {
            let known = |registration: &Registration| registration.piece(place.offset as usize, sink.len());
            let at = match self.blocks.iter().position(|block| known(block).is_some()) {
                Some(at) => at,
                None => {
                    self.blocks.push(Registration::area(&domain, block)?);
                    self.blocks.len() - 1
                }
            };
            let mut window = self.window()?;
            let (handle, bind) = window.bind(&self.blocks[at], place, true);
            self.binds.push_back(bind);
            stats::add(Counter::Registrations, 1);
            self.exposed.insert(handle.0, Exposed { window: Some(window), memory: Memory::Area(sink) });
            return Ok(Segment { handle, ..place });
        }
        let registration = Registration::sink(&domain, sink, self.access())?;
        self.expose(registration, true)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        let Some(exposed) = self.exposed.remove(&handle.0) else { return Ok(()) };
        stats::add(Counter::Invalidations, 1);
        self.unbind(handle, exposed)?;
        self.taken_back()
    }

    /// A key cannot be made to name other memory, and using a dead one costs the peer the connection anyhow.
    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        let lent = |exposed: &Exposed| matches!(&exposed.memory, Memory::Own(own) if own.is_lent());
        if !self.exposed.get(&handle.0).is_some_and(lent) {
            return Ok(());
        }
        let text = "a call timed out whose memory the server may still use: the connection ends with it";
        Err(Error::new(Kind::Timeout, text))
    }

    fn keep(&mut self) -> Result<usize, Error> {
        let mut copied = 0;
        for request in &mut self.pending {
            let (WorkRequest::Send { gather, .. } | WorkRequest::Write { gather, .. }) = request else {
                continue;
            };
            for piece in gather.iter_mut().filter(|piece| piece.is_lent()) {
                copied += piece.len();
                *piece = piece.owned()?;
            }
        }
        let lent = |verbs: &Verbs| verbs.queues.as_ref().is_some_and(Queues::lent);
        let began = Instant::now();
        let mut taken = self.taken();
        while lent(self) && began.elapsed() < KEEP_WAIT {
            self.settle(KEEP_IDLE, |queues| queues.lent() && queues.released() == taken)?;
            if self.taken() == taken {
                break;
            }
            taken = self.taken();
        }
        if began.elapsed() >= KEEP_IDLE {
            let until = now_ms() + KEEP_COPIES.as_millis() as u64;
            COPIES_UNTIL.store(until, Relaxed);
        }
        if lent(self) {
            // Closing need not wait for it once more.
            self.probe = self.queues.as_ref().map(Queues::latest);
            return Err(Error::new(Kind::NotSent, "the peer does not take its reply"));
        }
        Ok(copied)
    }

    fn post_recv(&mut self, sink: Sink) {
        if self.early > 0 {
            self.early -= 1;
            return;
        }
        let sink = match self.spare.pop() {
            Some(slab) if slab.capacity() >= sink.len() => slab.into_sink(sink.len()),
            _ => sink,
        };
        if let Some(queues) = &mut self.queues
            && let Err(error) = queues.post_receive(sink)
        {
            self.ending.get_or_insert(error);
        }
    }

    fn post(&mut self, mut request: WorkRequest) {
        if self.failed.is_some() {
            return;
        }
        if now_ms() < COPIES_UNTIL.load(Relaxed)
            && let WorkRequest::Send { gather, .. } | WorkRequest::Write { gather, .. } = &mut request
        {
            for piece in gather.iter_mut().filter(|piece| piece.is_lent()) {
                // Where there is no memory for a copy it goes from where it lies.
                let Ok(copy) = piece.owned() else { continue };
                stats::add(Counter::BytesCopied, copy.len() as u64);
                *piece = copy;
            }
        }
        self.pending.push_back(request);
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        self.check()?;
        self.advance().map_err(|error| self.fail(error))
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.check()?;
        match self.start() {
            Ok(()) => Ok(self.pending.is_empty()),
            Err(error) => Err(self.fail(error)),
        }
    }

    fn probe(&mut self) -> Result<(), Error> {
        self.check()?;
        self.ask().map_err(|error| self.fail(error))
    }

    /// Also when the process that made it has ended: nobody else can use what belongs to a device.
    fn claim(&mut self) -> bool {
        self.generation == fork::generation()
    }

    fn nudge(&mut self) {
        if self.domain.as_ref().is_some_and(|domain| domain.capabilities().iwarp) {
            self.post(WorkRequest::Write { gather: Vec::new(), to: NOWHERE });
        }
    }

    fn fd(&self) -> RawFd {
        self.watch.fd()
    }

    /// What waits, waits for a completion.
    fn wants_write(&self) -> bool {
        false
    }

    fn moved(&self) -> u64 {
        self.moved
    }

    fn pulled(&self) -> u64 {
        self.pulled
    }

    fn taken(&self) -> u64 {
        self.queues.as_ref().map_or(self.last.0, Queues::released)
    }

    fn unsent(&self) -> usize {
        if self.failed.is_some() {
            return self.last.1;
        }
        let pending = |request: &WorkRequest| match request {
            WorkRequest::Send { gather, .. } | WorkRequest::Write { gather, .. } => {
                gather.iter().map(|piece| piece.len()).sum()
            }
            WorkRequest::Read { .. } => 0,
        };
        let held = self.queues.as_ref().map_or(0, Queues::held);
        self.pending.iter().map(pending).sum::<usize>() + held
    }

    fn close(&mut self) {
        if self.check().is_ok() && matches!(self.stage, Stage::Open) {
            // What was sent before comes first, unless it is there by now or the peer is as good as gone.
            let leaves = self.leaves();
            if leaves && !self.stands() {
                let _ = self.drain();
            }
            // And it is to see an end, not a reset: an iWARP device that is torn down at once may take back the last words.
            if leaves && let Some(domain) = self.domain.as_ref().filter(|domain| domain.capabilities().iwarp)
            {
                domain.id().disconnect();
                let _ = self.settle(DRAIN, |_| true);
            }
        }
        self.fail(lost("the connection was closed by this side"));
    }
}

impl Verbs {
    fn has_windows(&self) -> bool {
        self.domain.as_ref().is_some_and(|domain| domain.capabilities().windows)
    }

    fn access(&self) -> Access {
        if self.has_windows() { Access::Windows } else { Access::Remote }
    }

    /// One that is bound to nothing.
    fn window(&mut self) -> Result<Window, Error> {
        self.windows.pop().map_or_else(|| Window::new(self.domain()?), Ok)
    }

    /// Whether the peer has lost its rights to all that was taken from it.
    fn taken_back(&self) -> Result<(), Error> {
        self.domain.as_ref().map_or(Ok(()), |domain| domain.taken_back())
    }

    /// Ends the peer's key for memory, and the registration of that.
    fn unbind(&mut self, handle: Handle, exposed: Exposed) -> Result<(), Error> {
        let Exposed { window: Some(window), .. } = exposed else { return Ok(()) };
        let unbound = |work: &Work| matches!(work.operation, Operation::Bind(bind) if bind.key() == handle.0);
        if let Some(at) = self.binds.iter().position(unbound) {
            self.binds.remove(at);
        } else {
            let operation = Operation::Invalidate(handle);
            let (pieces, inline, holds) = (Vec::new(), Vec::new(), Vec::new());
            let queues = self.queues()?;
            if queues.room() == 0 {
                // Without the window its key is dead too.
                return Ok(());
            }
            stats::add(Counter::Doorbells, 1);
            queues.post(vec![Work { operation, pieces, inline, holds, signalled: true }])?;
            let number = queues.latest();
            self.settle(INVALIDATE, |queues| queues.pending(number))?;
            if self.queues()?.pending(number) {
                return Ok(());
            }
        }
        self.windows.push(window);
        Ok(())
    }

    /// Gives the peer a key for the memory of a registration.
    fn expose(&mut self, registration: Registration, write: bool) -> Result<Segment, Error> {
        let whole = registration.segment();
        let (handle, window) = if self.has_windows() {
            let mut window = self.window()?;
            let (handle, bind) = window.bind(&registration, whole, write);
            self.binds.push_back(bind);
            (handle, Some(window))
        } else {
            (whole.handle, None)
        };
        stats::add(Counter::Registrations, 1);
        self.exposed.insert(handle.0, Exposed { window, memory: Memory::Own(registration) });
        Ok(Segment { handle, ..whole })
    }

    /// Posts what the peer's device answers by itself; what was posted the last time must be complete.
    fn ask(&mut self) -> Result<(), Error> {
        let before = self.probe;
        let queues = self.queues()?;
        // For the next poll.
        queues.collect()?;
        if before.is_some_and(|number| queues.pending(number)) {
            return Err(lost("the peer does not answer any more"));
        }
        if queues.room() > 0 {
            queues.post(vec![Work::nothing()])?;
        }
        self.probe = Some(queues.latest());
        Ok(())
    }

    /// Whether something may still be on its way. Of what is not signalled nobody tells: that is, if it was posted long ago.
    fn leaves(&self) -> bool {
        let lately = self.posted.is_some_and(|posted| posted.elapsed() < DRAIN);
        lately || !self.pending.is_empty() || self.queues.as_ref().is_some_and(Queues::awaits)
    }

    /// Whether the peer has not answered yet, and nothing was sent since it was asked.
    fn stands(&self) -> bool {
        let asked = |number| {
            self.queues.as_ref().is_some_and(|queues| queues.pending(number) && queues.latest() == number)
        };
        self.pending.is_empty() && self.probe.is_some_and(asked)
    }

    /// Sees what was posted on its way: destroying the queue pair would throw it away.
    fn drain(&mut self) -> Result<(), Error> {
        self.start()?;
        let queues = self.queues()?;
        if queues.busy() {
            queues.post(vec![Work::nothing()])?;
        }
        self.settle(DRAIN, Queues::busy)
    }

    /// Waits as long as `so` holds of what was posted, the peer is there, and the time lasts.
    fn settle(&mut self, time: Duration, so: impl Fn(&Queues) -> bool) -> Result<(), Error> {
        let deadline = Instant::now() + time;
        while let Some(queues) = self.queues.as_mut().filter(|queues| so(queues) && !queues.failed()) {
            if queues.collect()? || queues.arm()? {
                continue;
            }
            if let Some(error) = &self.ending {
                return Err(error.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait::until(self.watch.fd(), wait::IN, Some(left), None)?;
            self.look_around()?;
        }
        Ok(())
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        self.close();
    }
}
