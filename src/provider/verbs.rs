//! InfiniBand, RoCE and iWARP adapters, through libibverbs and librdmacm.
//!
//! This file covers the way from an address to an established connection. `ready` is what a connection then does with its
//! device, `listener` what a server does, `locked` the memory that devices may keep locked. `cm` and `queues` own the
//! device's objects; unsafe code is only there and in `library`, which finds the functions.
//!
//! **Memory.** Each connection has its own protection domain and its own slabs, registered once, for Receives and for what
//! is sent; the peer has no handle for them. The peer may touch exactly the bytes that one RPC names: through a memory
//! window, which the peer's Send may invalidate, where the device has windows, else through a registration made for those
//! bytes. The program's memory is registered if it is 64 KiB or longer; anything shorter, or that cannot be registered, is
//! copied first. The slabs of all connections together take at most half of RLIMIT_MEMLOCK.
//!
//! Registering memory takes longer than a short call. So Reply chunks, and copies that the peer reads, lie in blocks of
//! `Areas`, which are registered once, and each call gets its own window into one. rxe checks the bounds of the block and
//! not those of the window, and a device without windows has only the block's key. A block therefore serves one call at a
//! time, and holds only what this peer has sent or was meant to read. Without windows the peer may use a block for as long
//! as the connection lasts, so replies are copied out of it before anything looks at them.
//!
//! **Sends** go out unsignalled except for every eighth. What lies in slabs is gathered from there, and a short message is
//! posted inline. Everything else is copied into a slab, or registered if it is longer than a slab: the peer may have longer
//! Receives than we do. Requests that are posted together cost one doorbell.
//!
//! **Errors.** Any error completion ends the connection, and no event is waited for: with rxe the other end may never get
//! one. A queue pair is destroyed before its memory is used again.
//!
//! **Fork.** Devices belong to the process that opened them: in a forked child every operation fails with an error that says
//! so.
#![deny(unsafe_code)] // Not forbid: `cm`, `queues` and `library` speak C.

use std::ffi::c_int;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
#[cfg(feature = "tool")]
use std::time::{Duration, Instant};

use crate::error::{Error, Kind};
use crate::fork;
use crate::log_warn;
use crate::memory::{Areas, Region, Sink, Slabs};
use crate::provider::{
    self, Completion, Device, Limits, Options, Places, QueuePair, Traits, Way, WorkRequest,
};
#[cfg(feature = "tool")]
use crate::wait;
use crate::wait::Readables;
use crate::wire::{Handle, Segment};

use cm::{Channel, Event, Id, Request, Terms};
use listener::Listener;
use locked::{Locked, lacks};
use queues::Fabric;
use ready::Ready;

mod cm;
mod library;
mod listener;
mod locked;
#[cfg(any(test, feature = "fuzz"))]
pub mod mock;
mod queues;
mod ready;
#[cfg(test)]
pub(crate) mod tests;

/// RDMA Reads that we offer in either direction, as software iWARP does too. (A Linux server refuses a client that serves
/// none.)
const READS: u8 = 16;
/// The program's memory is registered from this length on; copying anything shorter is faster than pinning it.
const LEND_MIN: usize = 64 << 10;
/// How long address resolution and route resolution may each take.
const RESOLVE_MS: c_int = 5000;

// ------------------------------------------------------------------------------------------------------- devices

/// What the layers above know about adapters.
pub static TRAITS: Traits = Traits {
    name: "verbs",
    title: "adapters",
    socket: false,
    one_event: true,
    locked_memory: true,
    own_memory: true,
    // Copying anything shorter is faster than registering it.
    place_min: LEND_MIN,
    loopback: false,
};

/// RDMA adapters, including iWARP ones only if no other provider may be used.
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

    /// Checks for rdma-core and for memory that may be locked.
    #[cfg(feature = "tool")]
    fn ready(&self, options: &Options) -> Result<(), Error> {
        library::get()?;
        Locked::least(options, false).map(drop).map_err(|shortage| lacks(shortage, options))
    }

    #[cfg(feature = "tool")]
    fn leads(&self, to: SocketAddr, only: bool) -> Result<String, Error> {
        some_device(only)?;
        let channel = Channel::new()?;
        let id = Id::new(&channel)?;
        id.resolve_address(to, RESOLVE_MS)?;
        let end = Instant::now() + Duration::from_millis(RESOLVE_MS as u64);
        loop {
            match channel.next()? {
                Some(Event::AddressResolved) => break,
                Some(Event::Failed(error)) => return Err(error),
                Some(_) => {}
                None => {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() || !wait::until(channel.fd(), wait::IN, Some(left), None)? {
                        let text = "the way to the address was not found in time";
                        return Err(Error::new(Kind::Timeout, text));
                    }
                }
            }
        }
        suits(&id, only)?;
        Ok(queues::name(&id).map_or(String::new(), |name| format!("{name} port {}", id.port())))
    }

    fn connect(
        &self,
        way: Way,
        options: &Options,
        areas: Option<Arc<Areas>>,
    ) -> Result<Box<dyn QueuePair>, Error> {
        match way {
            Way::Address(to) => {
                some_device(options.only)?;
                Ok(Box::new(Verbs::request(to, options.clone(), areas)?))
            }
            Way::Socket(_) => Err(way.unknown()),
        }
    }

    fn listen(&self, places: Places, only: bool) -> Result<Box<dyn provider::Listener>, Error> {
        Ok(Box::new(Listener::new(places, only)?))
    }
}

/// Whether this machine has a device that is not an iWARP one or, with `iwarp`, any device; without asking rdma-core.
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

/// 0, or one more than the [`fork::generation`] of the process that first used rdma-core.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// Notes that this process opens the connection manager, and will open devices.
fn note_opened() {
    let _ = OPENED.compare_exchange(0, fork::generation() + 1, Relaxed, Relaxed);
}

/// Whether the devices were opened by a process that this one was forked from.
///
/// rdma-core opens a device once per process. A child inherits its descriptors, but the kernel refuses to let it use them,
/// as they belong to another process. The doorbells are not mapped in the child: a driver that touches one there crashes.
fn are_inherited() -> bool {
    let opened = OPENED.load(Relaxed);
    opened != 0 && opened != fork::generation() + 1
}

/// The kernel refuses this process devices that the process itself has opened: see [`are_refused`].
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether this process can no longer use the machine's devices: it was forked from the process that opened them, or it has
/// changed its credentials since it opened one.
///
/// The kernel allows a write to a device, or to the connection manager, only with the very credentials that it was opened
/// with, and compares their addresses: once a process has changed its credentials they stay different for ever, even if it
/// changes them back. Every post is such a write where the driver has no doorbell in mapped memory, and so is everything
/// that has to do with connecting.
fn are_refused() -> bool {
    are_inherited() || REFUSED.load(Relaxed)
}

/// The error for `EACCES` from something that was opened before; `None` for any other errno.
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

/// For each RDMA device, whether it is an iWARP device.
fn devices() -> impl Iterator<Item = bool> {
    let entries = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    entries.map(|entry| {
        fs::read_to_string(entry.path().join("node_type")).is_ok_and(|text| text.contains("RNIC"))
    })
}

fn lost(text: &'static str) -> Error {
    Error::new(Kind::ConnectionLost, text)
}

// ---------------------------------------------------------------------------------------------------- connection

/// A connection on a device, from the start of address resolution to its end.
pub struct Verbs {
    generation: u64,
    channel: Arc<Channel>,
    watch: Arc<Readables>,
    state: State,
}

enum State {
    /// The active side is looking for its device.
    Resolving(Resolving),
    /// There is a queue pair; [`Ready`] knows whether the peer is there too.
    Ready(Box<Ready>),
    Failed(Failed),
}

/// What the active side has before it knows its device.
struct Resolving {
    id: Arc<Id>,
    options: Options,
    areas: Option<Arc<Areas>>,
}

/// What is left of a connection: why it ended, and the counts that [`QueuePair`] must give even then.
struct Failed {
    error: Error,
    taken: u64,
    unsent: usize,
    moved: u64,
    pulled: u64,
}

/// Checks whether the device that leads to an address may be used.
///
/// # Errors
/// `ENODEV`.
fn suits(id: &Id, only: bool) -> Result<(), Error> {
    if !only && matches!(queues::fabric(id), None | Some(Fabric::Iwarp)) {
        let text = "an iWARP device leads there, which RPCRDMA_PROVIDER=verbs would use";
        return Err(Error::new(Kind::Os(libc::ENODEV), text));
    }
    Ok(())
}

impl Resolving {
    /// The device is found: next, the route to the peer.
    fn resolve_route(&self) -> Result<(), Error> {
        suits(&self.id, self.options.only)?;
        self.id.resolve_route(RESOLVE_MS)
    }

    /// The route is found: next, the queue pair.
    fn ready(&self, channel: &Arc<Channel>, watch: &Arc<Readables>) -> Result<Ready, Error> {
        let locked =
            Locked::least(&self.options, false).map_err(|shortage| lacks(shortage, &self.options))?;
        let terms = Terms { our_reads: READS, their_reads: READS, ..Terms::default() };
        let (id, options) = (self.id.clone(), self.options.clone());
        let mut ready =
            Ready::new(id, channel.clone(), watch.clone(), locked, terms, options, self.areas.clone())?;
        ready.extend();
        Ok(ready)
    }
}

impl Verbs {
    /// Active side: starts to connect; the caller then drives the startup to its end. `areas` are for Reply chunks, if the
    /// device can have them at once.
    ///
    /// # Errors
    /// rdma-core is missing, or no device leads to the address.
    fn request(address: SocketAddr, options: Options, areas: Option<Arc<Areas>>) -> Result<Verbs, Error> {
        let channel = Channel::new()?;
        let id = Arc::new(Id::new(&channel)?);
        id.resolve_address(address, RESOLVE_MS)?;
        Verbs::new(channel, |_, _| Ok(State::Resolving(Resolving { id, options, areas })))
    }

    /// A connection of the [`mock`] device, which this thread has from here on. `None` if its startup has failed.
    #[cfg(feature = "fuzz")]
    pub fn mocked(options: Options, prepare: impl FnOnce(&mut mock::Device)) -> Option<Verbs> {
        mock::install();
        mock::with(prepare);
        let mut verbs = Verbs::request(([10, 1, 2, 3], 7).into(), options, None).ok()?;
        verbs.establish().ok()?.then_some(verbs)
    }

    /// Bytes that the connections of this process have locked.
    #[cfg(feature = "fuzz")]
    pub fn locked() -> usize {
        locked::LOCKED.load(Relaxed)
    }

    /// Passive side: accepts a request.
    fn respond(request: Request, locked: Locked, options: Options) -> Result<Verbs, Error> {
        let Request { mut id, terms } = request;
        let channel = Channel::new().and_then(|channel| id.migrate(&channel).map(|()| channel));
        let id = Arc::new(id);
        let made = channel.and_then(|channel| {
            Verbs::new(channel, |channel, watch| {
                let (channel, watch) = (channel.clone(), watch.clone());
                let ready = Ready::new(id.clone(), channel, watch, locked, terms, options, None)?;
                Ok(State::Ready(Box::new(ready)))
            })
        });
        let mut verbs = made.inspect_err(|_| id.reject())?;
        verbs.ready()?.accept().inspect_err(|_| id.reject())?;
        Ok(verbs)
    }

    fn new(
        channel: Arc<Channel>,
        state: impl FnOnce(&Arc<Channel>, &Arc<Readables>) -> Result<State, Error>,
    ) -> Result<Verbs, Error> {
        let watch = Arc::new(Readables::new(&[channel.fd()])?);
        let state = state(&channel, &watch)?;
        Ok(Verbs { generation: fork::generation(), channel, watch, state })
    }

    /// Takes one step of the startup for each event that is there.
    fn start_up(&mut self) -> Result<bool, Error> {
        loop {
            if let State::Ready(ready) = &self.state
                && ready.is_open()
            {
                return Ok(true);
            }
            let Some(event) = self.channel.next()? else { return Ok(false) };
            match (event, &mut self.state) {
                (Event::AddressResolved, State::Resolving(resolving)) => resolving.resolve_route()?,
                (Event::RouteResolved, State::Resolving(resolving)) => {
                    let ready = resolving.ready(&self.channel, &self.watch)?;
                    self.state = State::Ready(Box::new(ready));
                    self.ready()?.connect()?;
                }
                (Event::Established(terms), State::Ready(ready)) => ready.established(terms),
                (Event::Failed(error), _) => return Err(error),
                (Event::Disconnected, _) => return Err(lost("the peer gave up while connecting")),
                _ => {}
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        if let State::Failed(failed) = &self.state {
            return Err(failed.error.clone());
        }
        if self.generation != fork::generation() {
            let text = "an RDMA connection cannot be used in a forked process";
            return Err(Error::new(Kind::Os(libc::EACCES), text));
        }
        Ok(())
    }

    /// The queue pair, if this process may use it.
    fn ready(&mut self) -> Result<&mut Ready, Error> {
        self.check()?;
        match &mut self.state {
            State::Ready(ready) => Ok(ready),
            State::Resolving(_) | State::Failed(_) => Err(lost("not connected")),
        }
    }

    /// The queue pair, if there is one, for uses that ask nothing of the device.
    fn look(&self) -> Option<&Ready> {
        match &self.state {
            State::Ready(ready) => Some(ready),
            State::Resolving(_) | State::Failed(_) => None,
        }
    }

    /// Does something with the queue pair; an error ends the connection.
    fn with<R>(&mut self, f: impl FnOnce(&mut Ready) -> Result<R, Error>) -> Result<R, Error> {
        f(self.ready()?).map_err(|error| self.fail(error))
    }

    /// A count that outlives the connection.
    fn count<N: Default>(&self, ready: fn(&Ready) -> N, failed: fn(&Failed) -> N) -> N {
        match &self.state {
            State::Ready(now) => ready(now),
            State::Failed(then) => failed(then),
            State::Resolving(_) => N::default(),
        }
    }

    /// Ends the connection. Every handle is dead and no memory is in use when this returns.
    fn fail(&mut self, error: Error) -> Error {
        if let State::Failed(failed) = &self.state {
            return failed.error.clone();
        }
        let failed = State::Failed(Failed { error: error.clone(), taken: 0, unsent: 0, moved: 0, pulled: 0 });
        let areas = match std::mem::replace(&mut self.state, failed) {
            State::Ready(ready) => {
                ready.disconnect();
                self.state = State::Failed(ready.end(error.clone()));
                None
            }
            State::Resolving(resolving) => resolving.areas,
            State::Failed(_) => None,
        };
        if let Some(areas) = areas {
            areas.end();
        }
        // The watched descriptors go away without waking another thread that sleeps on them. If this fails for lack of a
        // descriptor, that thread sleeps until its own timeout.
        if self.generation == fork::generation()
            && let Err(error) = self.watch.end()
        {
            log_warn!("verbs: calls may learn late that their connection has ended: {error}");
        }
        error
    }
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
        self.look().map_or_else(Limits::default, Ready::limits)
    }

    fn describe(&self) -> String {
        self.look().map_or_else(|| "verbs".to_owned(), Ready::describe)
    }

    fn private_data(&self) -> &[u8] {
        self.look().map_or(&[], Ready::peers_private_data)
    }

    fn slabs(&self) -> Option<Arc<Slabs>> {
        self.look().map(|ready| ready.slabs().clone())
    }

    fn areas(&self) -> Option<Arc<Areas>> {
        self.look().and_then(Ready::areas).cloned()
    }

    fn expose_source(&mut self, region: Region) -> Result<Segment, Error> {
        self.ready()?.expose_source(region)
    }

    fn expose_sink(&mut self, sink: Sink) -> Result<Segment, Error> {
        self.ready()?.expose_sink(sink)
    }

    fn invalidate(&mut self, handle: Handle) -> Result<(), Error> {
        match &mut self.state {
            State::Ready(ready) => ready.invalidate(handle),
            State::Resolving(_) | State::Failed(_) => Ok(()),
        }
    }

    fn detach(&mut self, handle: Handle) -> Result<(), Error> {
        self.look().map_or(Ok(()), |ready| ready.detach(handle))
    }

    fn release_lent(&mut self) -> Result<usize, Error> {
        match &mut self.state {
            State::Ready(ready) => ready.release_lent(),
            State::Resolving(_) | State::Failed(_) => Ok(0),
        }
    }

    fn post_recv(&mut self, sink: Sink) {
        if let State::Ready(ready) = &mut self.state {
            ready.post_recv(sink);
        }
    }

    fn post(&mut self, request: WorkRequest) {
        if let State::Ready(ready) = &mut self.state {
            ready.post(request);
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>, Error> {
        self.with(Ready::advance)
    }

    fn spin(&mut self) -> bool {
        self.ready().map(Ready::spin).is_ok()
    }

    /// If that ends the connection, [`QueuePair::poll`] says why.
    fn rest(&mut self) -> bool {
        self.ready().is_err() || self.with(Ready::rest).unwrap_or(false)
    }

    fn leave(&mut self) -> bool {
        self.ready().map_or(true, Ready::leave)
    }

    fn flush(&mut self) -> Result<bool, Error> {
        self.with(Ready::flush)
    }

    fn probe(&mut self) -> Result<(), Error> {
        self.with(Ready::ask)
    }

    /// Only the process that made it, even when that one has ended: nobody else can use what belongs to a device.
    fn claim(&mut self, _: bool) -> bool {
        self.generation == fork::generation()
    }

    fn nudge(&mut self) {
        if let State::Ready(ready) = &mut self.state {
            ready.nudge();
        }
    }

    fn fd(&self) -> RawFd {
        self.watch.fd()
    }

    /// Whatever is queued waits for a completion.
    fn wants_write(&self) -> bool {
        false
    }

    fn moved(&self) -> u64 {
        self.count(Ready::moved, |failed| failed.moved)
    }

    fn pulled(&self) -> u64 {
        self.count(Ready::pulled, |failed| failed.pulled)
    }

    fn taken(&self) -> u64 {
        self.count(Ready::taken, |failed| failed.taken)
    }

    fn unsent(&self) -> usize {
        self.count(Ready::unsent, |failed| failed.unsent)
    }

    fn close(&mut self) {
        if let Ok(ready) = self.ready() {
            ready.farewell();
        }
        self.fail(lost("the connection was closed by this side"));
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        self.close();
    }
}
