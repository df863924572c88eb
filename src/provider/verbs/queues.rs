//! A queue pair with its completion queue, its protection domain and the memory that the device knows.
//!
//! The types keep the one promise that the device needs: memory that a work request or a registration names stays where
//! it is until the request is complete, or the registration or the queue pair is gone. Everything that is posted is
//! therefore owned here, together with its memory, and taken apart in that order.
//!
//! # Invariants
//! - The send queue completes in order (RC): a completion also ends the unsignalled requests before it. RDMA Reads are
//!   always signalled, and end with their own completion only.
//! - Receives complete in the order in which they were posted.
//! - A memory region has one Registration, which owns the memory; the device's rights end before the memory goes. If the
//!   device does not end them, the memory stays ([`Domain::taken_back`] tells). Deregistering is tried again when the queue
//!   pair is gone, and what is left then stays for ever.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::{CStr, c_int};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use rdma_sys::*;

use super::cm::{Id, failed};
use crate::error::{Error, Kind};
use crate::log_error;
use crate::memory::{Area, Region, Regions, Sink, Slabs};
use crate::process;
use crate::provider::WorkId;
use crate::socket;
use crate::wire::{Handle, Segment};

/// What a device can do, as far as it matters here.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// The device's name: "mlx5_0".
    pub name: String,
    /// It is an iWARP device: a Read's sink is named on the wire.
    pub iwarp: bool,
    /// RDMA Reads by the peer that it serves at a time for one queue pair.
    pub their_reads: u8,
    /// RDMA Reads that one queue pair may have outstanding.
    pub our_reads: u8,
    /// Pieces of memory that a request may name.
    pub pieces: u32,
    /// Most bytes of one registration.
    pub registration: u64,
    /// Most requests of one queue.
    pub depth: u32,
    /// Most entries of a completion queue.
    pub completions: u32,
    /// It has memory windows of type 2: keys for a part of a registration, which the peer's Send may invalidate.
    pub windows: bool,
}

/// A protection domain, on the device of an identifier.
pub struct Domain {
    pd: NonNull<ibv_pd>,
    capabilities: Capabilities,
    id: Arc<Id>,
    /// What the device has not taken back, and whether there is or ever was such a thing.
    kept: Mutex<Vec<Kept>>,
    stuck: AtomicBool,
    released: bool,
}

/// What the device has not taken back: the peer may still have rights to the memory.
enum Kept {
    Window(NonNull<ibv_mw>),
    /// With its length in bytes.
    Registration(NonNull<ibv_mr>, Memory, usize),
}

// SAFETY: calls of libibverbs are thread-safe; the pointer is freed by the last owner.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// A domain on the device that the identifier is bound to.
    ///
    /// # Errors
    /// The device refuses.
    pub fn new(id: Arc<Id>) -> Result<Arc<Domain>, Error> {
        let none = || Error::new(Kind::Os(libc::ENODEV), "verbs: the address belongs to no device");
        let context = id.device().ok_or_else(none)?;
        let capabilities = capabilities(&id, context)?;
        // SAFETY: the device is open as long as the identifier lives.
        let pd = unsafe { (id.library().ibv_alloc_pd)(context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| failed("a protection domain"))?;
        let (kept, stuck, released) = (Mutex::default(), AtomicBool::new(false), false);
        Ok(Arc::new(Domain { pd, capabilities, id, kept, stuck, released }))
    }

    /// The identifier.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// What the device can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
}

impl Domain {
    /// Checks that the device has taken back everything that it was to take back.
    ///
    /// # Errors
    /// The peer may still use memory that it must not: the connection is to be closed.
    pub fn taken_back(&self) -> Result<(), Error> {
        if !self.stuck.load(Relaxed) {
            return Ok(());
        }
        let text =
            format!("device {} does not take back memory that the peer may use", self.capabilities.name);
        Err(Error::new(Kind::ConnectionLost, text))
    }

    /// Ends the domain, if this is its last owner. Returns how many bytes of slabs the device keeps for ever, so that they
    /// stay locked.
    pub fn end(self: Arc<Domain>) -> usize {
        Arc::into_inner(self).map_or(0, |mut domain| domain.release())
    }

    fn keep(&self, what: Kept, errno: c_int) {
        self.stick("memory", errno);
        self.kept.lock().unwrap_or_else(|e| e.into_inner()).push(what);
    }

    fn stick(&self, what: &str, errno: c_int) {
        let name = &self.capabilities.name;
        log_error!(
            "verbs: device {name} does not take back {what} (error {errno}): the connection is closed"
        );
        self.stuck.store(true, Relaxed);
    }

    fn release(&mut self) -> usize {
        if std::mem::replace(&mut self.released, true) || self.id.forked() {
            return 0;
        }
        let library = self.id.library();
        // Windows come first: the registrations that they are bound to cannot go before them.
        let mut kept = std::mem::take(self.kept.get_mut().unwrap_or_else(|e| e.into_inner()));
        kept.sort_by_key(|kept| matches!(kept, Kept::Registration(..)));
        let mut locked = 0;
        for kept in kept {
            match kept {
                Kept::Window(mw) => {
                    // If this fails and the window is bound, the registration that it is bound to does not go either.
                    // SAFETY: alive, since it was not taken back; nobody else knows it.
                    unsafe { ibv_dealloc_mw(mw.as_ptr()) };
                }
                Kept::Registration(mr, memory, len) => {
                    // SAFETY: as above.
                    if unsafe { (library.ibv_dereg_mr)(mr.as_ptr()) } != 0 {
                        locked += if matches!(memory, Memory::Slabs(_)) { len } else { 0 };
                        // The device may write there for ever.
                        std::mem::forget(memory);
                    }
                }
            }
        }
        // A device does not end a domain that still has a queue pair. Such a domain keeps no memory of ours: its
        // registrations are gone.
        // SAFETY: its last owner goes; registrations and queues own it too, so none that is still used is left.
        unsafe { (library.ibv_dealloc_pd)(self.pd.as_ptr()) };
        locked
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        self.release();
    }
}

/// What carries the packets of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// TCP, which vouches for the addresses of both ends.
    Iwarp,
    /// Ethernet: a GID there is an IP address.
    Roce,
    /// InfiniBand, or unknown: a GID has nothing to do with IP addresses.
    InfiniBand,
}

/// The name of the device that an identifier is bound to; `None` before it is.
pub fn name(id: &Id) -> Option<String> {
    let context = id.device()?;
    // SAFETY: the device is open as long as the identifier lives.
    let device = unsafe { (*context.as_ptr()).device };
    // SAFETY: a context's device lives as long as the context.
    let name = unsafe { &(*device).name };
    // SAFETY: a string in an array.
    Some(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// The fabric of the port that an identifier is bound to; `None` before it is.
pub fn fabric(id: &Id) -> Option<Fabric> {
    let context = id.device()?;
    // SAFETY: the device is open as long as the identifier lives.
    let device = unsafe { (*context.as_ptr()).device };
    // SAFETY: a context's device lives as long as the context.
    if unsafe { (*device).transport_type } == ibv_transport_type::IBV_TRANSPORT_IWARP {
        return Some(Fabric::Iwarp);
    }
    let name = name(id)?;
    let layer = format!("/sys/class/infiniband/{name}/ports/{}/link_layer", id.port());
    let ethernet = std::fs::read_to_string(layer).is_ok_and(|text| text.trim() == "Ethernet");
    Some(if ethernet { Fabric::Roce } else { Fabric::InfiniBand })
}

/// Either sub-type will do: a window is used on the queue pair that has bound it.
pub(super) const WINDOWS: u32 = ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A.0
    | ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0;

fn capabilities(id: &Id, context: NonNull<ibv_context>) -> Result<Capabilities, Error> {
    // SAFETY: plain numbers and characters.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the device is open as long as the identifier lives; `attr` may be written.
    if unsafe { (id.library().ibv_query_device)(context.as_ptr(), &mut attr) } != 0 {
        return Err(failed("asking the device"));
    }
    // SAFETY: as above.
    let device = unsafe { (*context.as_ptr()).device };
    // SAFETY: a context's device lives as long as the context.
    let name = unsafe { &(*device).name };
    // SAFETY: a string in an array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let byte = |n: c_int| u8::try_from(n.max(0)).unwrap_or(u8::MAX);
    let count = |n: c_int| u32::try_from(n).unwrap_or(0);
    Ok(Capabilities {
        name: name.to_string_lossy().into_owned(),
        iwarp: fabric(id) == Some(Fabric::Iwarp),
        their_reads: byte(attr.max_qp_rd_atom),
        our_reads: byte(attr.max_qp_init_rd_atom),
        pieces: count(attr.max_sge).max(1),
        registration: attr.max_mr_size,
        depth: count(attr.max_qp_wr),
        completions: count(attr.max_cqe),
        windows: attr.max_mw > 0 && attr.device_cap_flags & WINDOWS != 0,
    })
}

/// Memory that a device knows, and who may do what with it.
pub struct Registration {
    mr: NonNull<ibv_mr>,
    start: usize,
    len: usize,
    domain: Arc<Domain>,
    /// Dropped after `Drop::drop` has ended the device's rights; `None` only there.
    memory: Option<Memory>,
}

enum Memory {
    Source(Region),
    Sink(Sink),
    Slabs(#[expect(dead_code, reason = "what it keeps mapped is the point")] Arc<Slabs>),
    Area(#[expect(dead_code, reason = "what it keeps mapped, and counts, is the point")] Area),
}

// SAFETY: as for Domain.
unsafe impl Send for Registration {}
// SAFETY: as for Domain; what it owns is only looked at.
unsafe impl Sync for Registration {}

/// Who may use a registration.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// This end's work requests only.
    Local,
    /// The peer too, by the registration's own key.
    Remote,
    /// The peer too, through a [`Window`].
    Windows,
}

impl Access {
    /// The access flags of verbs for it.
    fn flags(self, write: bool) -> u32 {
        let local = if write { ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 } else { 0 };
        let peers = match (self, write) {
            (Access::Local, _) => 0,
            (Access::Remote, true) => ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
            (Access::Remote, false) => ibv_access_flags::IBV_ACCESS_REMOTE_READ.0,
            (Access::Windows, _) => ibv_access_flags::IBV_ACCESS_MW_BIND.0,
        };
        local | peers
    }
}

impl Registration {
    /// Memory to be read: by this end's work requests, and by the peer if it is remote.
    ///
    /// # Errors
    /// The device or the system refuses.
    pub fn source(domain: &Arc<Domain>, source: Region, access: Access) -> Result<Registration, Error> {
        let (start, len) = (source.as_ptr().addr(), source.len());
        Registration::new(domain, start, len, access.flags(false), Memory::Source(source))
    }

    /// Memory to be written.
    ///
    /// # Errors
    /// The device or the system refuses.
    pub fn sink(domain: &Arc<Domain>, sink: Sink, access: Access) -> Result<Registration, Error> {
        let (start, len) = (sink.address(), sink.len());
        Registration::new(domain, start, len, access.flags(true), Memory::Sink(sink))
    }

    /// A block of [`Areas`](crate::memory::Areas), to be written or read as these are.
    ///
    /// # Errors
    /// The device or the system refuses.
    pub fn area(
        domain: &Arc<Domain>,
        block: Area,
        access: Access,
        write: bool,
    ) -> Result<Registration, Error> {
        let (start, len) = block.span();
        Registration::new(domain, start, len, access.flags(write), Memory::Area(block))
    }

    /// Slabs, for Sends and Receives: up to number `count`, from number `from` on.
    ///
    /// # Errors
    /// The device or the system refuses.
    pub fn slabs(
        domain: &Arc<Domain>,
        slabs: Arc<Slabs>,
        from: usize,
        count: usize,
    ) -> Result<Registration, Error> {
        let (start, len) = slabs.part(from, count);
        let flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        Registration::new(domain, start, len, flags, Memory::Slabs(slabs))
    }

    fn new(
        domain: &Arc<Domain>,
        start: usize,
        len: usize,
        flags: u32,
        memory: Memory,
    ) -> Result<Registration, Error> {
        let library = domain.id.library();
        let address = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the domain is alive. `memory` keeps the bytes mapped, and its type makes sure that what the device is
        // allowed to do is harmless: a Region is only read, nobody can reach the bytes of a Sink, and a slab is written only
        // where a posted Receive names it, or a window whose holder keeps a Sink. Blocks of Areas that the peer may write at
        // any time only become Sinks, which are copied (`Areas::stay_open`).
        let mr = unsafe { (library.ibv_reg_mr)(domain.pd.as_ptr(), address, len, flags as c_int) };
        let mr = NonNull::new(mr).ok_or_else(|| unregistered(len))?;
        Ok(Registration { mr, start, len, domain: domain.clone(), memory: Some(memory) })
    }

    /// Whether it is the program's memory.
    pub fn is_lent(&self) -> bool {
        match &self.memory {
            Some(Memory::Source(region)) => region.is_lent(),
            Some(Memory::Sink(sink)) => sink.is_lent(),
            Some(Memory::Slabs(_) | Memory::Area(_)) | None => false,
        }
    }

    /// All of it, as the peer names it.
    pub fn segment(&self) -> Segment {
        // SAFETY: alive.
        let rkey = unsafe { (*self.mr.as_ptr()).rkey };
        Segment { handle: Handle(rkey), length: self.len as u32, offset: self.start as u64 }
    }

    /// A part of it for a work request; `None` when it lies outside.
    pub fn piece(&self, address: usize, len: usize) -> Option<Piece> {
        let at = address.checked_sub(self.start)?;
        if at > self.len || len > self.len - at {
            return None;
        }
        // SAFETY: alive.
        let lkey = unsafe { (*self.mr.as_ptr()).lkey };
        Some(Piece(ibv_sge { addr: address as u64, length: u32::try_from(len).ok()?, lkey }))
    }
}

/// The error of a refused registration, with the limit, if that is the cause, and the remedy.
fn unregistered(len: usize) -> Error {
    let error = failed(&format!("registering {len} bytes"));
    if error.errno() != libc::ENOMEM {
        return error;
    }
    let limit =
        process::memlock_limit().map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    let text = format!(
        "{error}; RLIMIT_MEMLOCK is {limit}: raise it (ulimit -l, LimitMEMLOCK=), or lower RPCRDMA_MAX_REPLY or \
         RPCRDMA_CREDITS"
    );
    Error::new(Kind::Os(libc::ENOMEM), text)
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.domain.id.forked() {
            return;
        }
        // SAFETY: its owner goes. The device's rights end with this call, and the memory goes after it.
        let errno = unsafe { (self.domain.id.library().ibv_dereg_mr)(self.mr.as_ptr()) };
        if errno != 0
            && let Some(memory) = self.memory.take()
        {
            self.domain.keep(Kept::Registration(self.mr, memory, self.len), errno);
        }
    }
}

/// A memory window of type 2: a key of its own for a registration, on one connection.
pub struct Window {
    mw: NonNull<ibv_mw>,
    domain: Arc<Domain>,
    /// The key that it was last bound with. The window itself gets it at the next bind only: the device reads the window
    /// when a bind is posted.
    next: Option<u32>,
}

// SAFETY: as for Domain.
unsafe impl Send for Window {}

impl Window {
    /// A window that is bound to nothing.
    ///
    /// # Errors
    /// The device has no more.
    pub fn new(domain: &Arc<Domain>) -> Result<Window, Error> {
        // SAFETY: the domain is alive.
        let mw = unsafe { ibv_alloc_mw(domain.pd.as_ptr(), ibv_mw_type::IBV_MW_TYPE_2) };
        let mw = mw.and_then(NonNull::new).ok_or_else(|| failed("a memory window"))?;
        Ok(Window { mw, domain: domain.clone(), next: None })
    }

    /// The key, and the request that makes it valid for a part of the registration. The registration must be nobody else's:
    /// rxe checks its bounds, and not those of a window in it.
    pub fn bind(&mut self, to: &Registration, part: Segment, write: bool) -> (Handle, Work) {
        if let Some(key) = self.next {
            // The device has bound it since, and leaves it to us to note the key.
            // SAFETY: alive; no request that names it is being posted: it is bound to nothing.
            unsafe { (*self.mw.as_ptr()).rkey = key };
        }
        // SAFETY: alive.
        let before = unsafe { (*self.mw.as_ptr()).rkey };
        // The lowest byte is ours to choose, and a key is not used twice in a row.
        // SAFETY: only computes; touches no memory.
        let key = unsafe { ibv_inc_rkey(before) };
        self.next = Some(key);
        let rights = if write {
            ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
        } else {
            ibv_access_flags::IBV_ACCESS_REMOTE_READ
        };
        let part = ibv_mw_bind_info {
            mr: to.mr.as_ptr(),
            addr: part.offset,
            length: u64::from(part.length),
            mw_access_flags: rights.0,
        };
        let operation = Operation::Bind(Bind(bind_mw_t { mw: self.mw.as_ptr(), rkey: key, bind_info: part }));
        let (pieces, inline, holds) = (Vec::new(), Regions::new(), Vec::new());
        (Handle(key), Work { operation, pieces, inline, holds, signalled: false })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.domain.id.forked() {
            return;
        }
        // SAFETY: its owner goes. The peer's rights end with this call.
        let errno = unsafe { ibv_dealloc_mw(self.mw.as_ptr()) };
        if errno != 0 {
            self.domain.keep(Kept::Window(self.mw), errno);
        }
    }
}

/// A window, and what it is bound to.
#[derive(Clone, Copy)]
pub struct Bind(bind_mw_t);

impl Bind {
    /// The key.
    pub fn key(&self) -> u32 {
        self.0.rkey
    }
}

// SAFETY: as for Domain: the pointers are given to the device and not followed here.
unsafe impl Send for Bind {}

/// A piece of registered memory, as a work request names it.
#[derive(Clone, Copy)]
pub struct Piece(ibv_sge);

/// What must live until a work request is complete.
pub enum Hold {
    /// Memory inside the slabs.
    Region(Region),
    /// Memory with a registration of its own.
    Registration(Registration),
}

impl Hold {
    /// Bytes outside of the slabs.
    fn bytes(&self) -> usize {
        match self {
            Hold::Region(_) => 0,
            Hold::Registration(registration) => registration.len,
        }
    }

    /// Whether it is the program's memory.
    fn is_lent(&self) -> bool {
        match self {
            Hold::Region(region) => region.is_lent(),
            Hold::Registration(registration) => registration.is_lent(),
        }
    }
}

/// A request for the send queue.
pub struct Work {
    /// What to do.
    pub operation: Operation,
    /// Where the bytes are, or go.
    pub pieces: Vec<Piece>,
    /// Bytes that go into the request itself, instead of `pieces`; they need not be held afterwards.
    pub inline: Regions,
    /// What the pieces lie in.
    pub holds: Vec<Hold>,
    /// Whether its completion is reported as soon as it is there.
    pub signalled: bool,
}

/// What a request does.
#[derive(Clone, Copy)]
pub enum Operation {
    /// A Send, which may invalidate a handle of the peer.
    Send(Option<Handle>),
    /// An RDMA Write to the start of the peer's memory.
    Write(Segment),
    /// An RDMA Read from the start of the peer's memory.
    Read(WorkId, Segment),
    /// Makes the key of a window valid.
    Bind(Bind),
    /// Ends the key of a window.
    Invalidate(Handle),
}

/// What is complete.
pub enum Done {
    /// A message lies in a Receive.
    Received {
        /// The Receive.
        sink: Sink,
        /// Bytes of the message.
        len: usize,
        /// The handle that it invalidates, if it names one. There may be no such handle of ours.
        invalidated: Option<Handle>,
    },
    /// An RDMA Read.
    Read(WorkId),
}

/// The queue pair of an identifier.
pub struct Queues {
    cq: NonNull<ibv_cq>,
    channel: NonNull<ibv_comp_channel>,
    /// Events received and not acknowledged: destroying the completion queue waits until they are.
    events: u32,
    /// The next completion makes an event.
    armed: bool,
    /// A completion has been found since that event was asked for: the event may be there.
    found: bool,
    depth: usize,
    pieces: usize,
    inline: usize,
    posted: VecDeque<Posted>,
    /// Bytes that `posted` holds outside of the slabs.
    held: usize,
    /// Bytes of requests that are complete; one in the slabs counts as [`Queues::SLAB`].
    released: u64,
    posts: u64,
    receives: VecDeque<(u64, Sink)>,
    received: u64,
    done: VecDeque<Done>,
    failed: Option<Error>,
    slabs: Vec<Registration>,
    domain: Arc<Domain>,
}

// SAFETY: calls of libibverbs are thread-safe, and the pointers are freed by the owner.
unsafe impl Send for Queues {}

struct Posted {
    number: u64,
    signalled: bool,
    read: Option<WorkId>,
    holds: Vec<Hold>,
}

/// Marks the completion of a Send with Invalidate. rxe passes on the kernel's number for the flag, which in user space means
/// something that concerns no connection.
pub(super) const WITH_INVALIDATE: u32 = ibv_wc_flags::IBV_WC_WITH_INV.0 | ibv_wc_flags::IBV_WC_IP_CSUM_OK.0;

/// Requests on the send queue, if the device has room for this many.
const DEPTH: u32 = 256;
/// The fewest that are of any use.
const DEPTH_MIN: u32 = 16;
/// Pieces of a gathered request.
const PIECES: u32 = 4;
/// Bytes that may travel in a Send's own request: a short Call with its header.
const INLINE: u32 = 256;
/// Completions that are taken at a time.
const BATCH: usize = 16;

impl Queues {
    /// What a request without memory outside of the slabs counts for in `released`.
    const SLAB: u64 = 4096;

    /// A queue pair with room for `receives` Receives, in memory of the first `count` of `slabs`.
    ///
    /// # Errors
    /// The device or the system refuses, even with short queues.
    pub fn new(domain: Arc<Domain>, slabs: Arc<Slabs>, count: usize, receives: u32) -> Result<Queues, Error> {
        let slabs = vec![Registration::slabs(&domain, slabs, 0, count)?];
        let library = domain.id.library();
        let context = domain.id.device().ok_or_else(|| failed("the device"))?;
        // SAFETY: the device is open as long as the identifier lives.
        let channel = unsafe { (library.ibv_create_comp_channel)(context.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(|| failed("a completion channel"))?;
        let close = |error| {
            // SAFETY: just made, with no completion queue on it.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
            error
        };
        // SAFETY: alive.
        let fd = unsafe { (*channel.as_ptr()).fd };
        socket::set_nonblocking(fd).map_err(|error| close(error.into()))?;
        let limits = &domain.capabilities;
        let mut depth = DEPTH.min(limits.depth.max(DEPTH_MIN));
        let mut inline = INLINE;
        // The limits that a device reports need not be available all at once: less is asked for until it accepts.
        loop {
            let entries = (depth + receives).min(limits.completions) as c_int;
            // SAFETY: the device is open, the channel its own.
            let cq = unsafe {
                (library.ibv_create_cq)(context.as_ptr(), entries, null_mut(), channel.as_ptr(), 0)
            };
            let Some(cq) = NonNull::new(cq) else { return Err(close(failed("a completion queue"))) };
            // SAFETY: numbers and pointers, for which zero is nothing.
            let mut wanted: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
            wanted.send_cq = cq.as_ptr();
            wanted.recv_cq = cq.as_ptr();
            wanted.qp_type = ibv_qp_type::IBV_QPT_RC;
            wanted.cap = ibv_qp_cap {
                max_send_wr: depth,
                max_recv_wr: receives,
                max_send_sge: PIECES.min(limits.pieces),
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let (id, pd) = (domain.id.as_ptr(), domain.pd.as_ptr());
            // SAFETY: all are alive and of one device; the attributes may be written.
            if unsafe { (library.rdma_create_qp)(id, pd, &mut wanted) } == 0 {
                return Ok(Queues {
                    cq,
                    channel,
                    events: 0,
                    armed: false,
                    found: false,
                    depth: depth as usize,
                    pieces: PIECES.min(limits.pieces) as usize,
                    inline: inline as usize,
                    posted: VecDeque::new(),
                    held: 0,
                    released: 0,
                    posts: 0,
                    receives: VecDeque::new(),
                    received: 0,
                    done: VecDeque::new(),
                    failed: None,
                    slabs,
                    domain: domain.clone(),
                });
            }
            let error = failed("a queue pair");
            // SAFETY: just made, used by nothing.
            unsafe { (library.ibv_destroy_cq)(cq.as_ptr()) };
            match error.errno() {
                libc::ENOMEM | libc::EINVAL if inline > 0 => inline = 0,
                libc::ENOMEM | libc::EINVAL if depth > DEPTH_MIN => depth = (depth / 2).max(DEPTH_MIN),
                _ => return Err(close(error)),
            }
        }
    }

    /// Readable when there is an event, if [`Queues::arm`] was called.
    pub fn fd(&self) -> RawFd {
        // SAFETY: alive.
        unsafe { (*self.channel.as_ptr()).fd }
    }

    /// Requests that the send queue has room for now.
    pub fn room(&self) -> usize {
        self.depth - self.posted.len()
    }

    /// The number of the latest request.
    pub fn latest(&self) -> u64 {
        self.posts.wrapping_sub(1)
    }

    /// Whether a request is not yet known to be complete.
    pub fn pending(&self, number: u64) -> bool {
        self.posted.iter().any(|posted| posted.number == number)
    }

    /// Pieces that one request may have.
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Bytes that a request may carry itself.
    pub fn inline(&self) -> usize {
        self.inline
    }

    /// Registers more of the slabs.
    ///
    /// # Errors
    /// The device or the system refuses.
    pub fn add(&mut self, slabs: Arc<Slabs>, from: usize, count: usize) -> Result<(), Error> {
        self.slabs.push(Registration::slabs(&self.domain, slabs, from, count)?);
        Ok(())
    }

    /// A piece of the slabs; `None` for what lies elsewhere.
    pub fn known(&self, address: usize, len: usize) -> Option<Piece> {
        self.slabs.iter().find_map(|slabs| slabs.piece(address, len))
    }

    /// Whether a posted request names memory of the program.
    pub fn lent(&self) -> bool {
        self.posted.iter().any(|posted| posted.holds.iter().any(Hold::is_lent))
    }

    /// Bytes that posted requests hold outside of the slabs.
    pub fn held(&self) -> usize {
        self.held
    }

    /// A count that grows while the peer takes what was posted.
    pub fn released(&self) -> u64 {
        self.released
    }

    /// Whether a completion will come for something that was posted.
    pub fn awaits(&self) -> bool {
        self.posted.iter().any(|posted| posted.signalled)
    }

    /// Whether a request has failed, after which nothing more completes.
    pub fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Whether some posted request is not yet known to be complete.
    pub fn busy(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Posts a Receive.
    ///
    /// # Errors
    /// `sink` is not in the slabs, or the device refuses: the connection is of no use then.
    pub fn post_receive(&mut self, sink: Sink) -> Result<(), Error> {
        let piece = self.known(sink.address(), sink.len());
        let Piece(mut piece) =
            piece.ok_or_else(|| Error::new(Kind::Panic, "a Receive outside of the slabs"))?;
        let number = self.received + self.receives.len() as u64;
        let mut work = ibv_recv_wr { wr_id: number, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut bad = null_mut();
        let qp = self.qp();
        // SAFETY: the queue pair is alive; the piece lies in memory that is held until the Receive is complete or the
        // queue pair is gone, and that nobody else can reach.
        let posted = unsafe { ibv_post_recv(qp, &mut work, &mut bad) };
        if posted != 0 {
            return Err(unposted(posted, "posting a Receive"));
        }
        self.receives.push_back((number, sink));
        Ok(())
    }

    /// Posts requests in order, with one doorbell.
    ///
    /// # Errors
    /// The device refuses: the connection is of no use then.
    pub fn post(&mut self, work: Vec<Work>) -> Result<(), Error> {
        let inline = |region: &Region| ibv_sge {
            addr: region.as_ptr().addr() as u64,
            length: region.len() as u32,
            lkey: 0,
        };
        let mut pieces: Vec<Vec<ibv_sge>> = work
            .iter()
            .map(|w| w.inline.iter().map(inline).chain(w.pieces.iter().map(|Piece(sge)| *sge)).collect())
            .collect();
        let mut requests: Vec<ibv_send_wr> = Vec::with_capacity(work.len());
        for (work, pieces) in work.iter().zip(&mut pieces) {
            // SAFETY: numbers and pointers, for which zero is nothing.
            let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
            request.wr_id = self.posts + requests.len() as u64;
            request.sg_list = pieces.as_mut_ptr();
            request.num_sge = pieces.len() as c_int;
            if work.signalled {
                request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            if !work.inline.is_empty() {
                request.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
            }
            match work.operation {
                Operation::Send(None) => request.opcode = ibv_wr_opcode::IBV_WR_SEND,
                Operation::Send(Some(handle)) => {
                    request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
                    request.imm_data_invalidated_rkey_union.invalidated_rkey = handle.0;
                    // Where the siw driver looks for it.
                    request.wr.rdma = rdma_t { remote_addr: 0, rkey: handle.0 };
                }
                Operation::Write(to) => {
                    request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                    request.wr.rdma = rdma_t { remote_addr: to.offset, rkey: to.handle.0 };
                }
                Operation::Read(_, from) => {
                    request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                    request.wr.rdma = rdma_t { remote_addr: from.offset, rkey: from.handle.0 };
                }
                Operation::Bind(Bind(bind)) => {
                    request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
                    request.bind_mw_tso_union.bind_mw = bind;
                }
                Operation::Invalidate(handle) => {
                    request.opcode = ibv_wr_opcode::IBV_WR_LOCAL_INV;
                    request.imm_data_invalidated_rkey_union.invalidated_rkey = handle.0;
                }
            }
            requests.push(request);
        }
        for at in 1..requests.len() {
            requests[at - 1].next = &raw mut requests[at];
        }
        let Some(first) = requests.first_mut() else { return Ok(()) };
        let (first, mut bad): (*mut ibv_send_wr, _) = (first, null_mut());
        let qp = self.qp();
        // SAFETY: the queue pair is alive; the chain and its lists live across the call. Inline bytes are read by it; the
        // other pieces lie in memory that is held from here on until the request is complete or the queue pair is gone.
        let posted = unsafe { ibv_post_send(qp, first, &mut bad) };
        // Even if this failed, a part of the chain may have been taken: the memory of all of it is held.
        for work in work {
            let read = match work.operation {
                Operation::Read(id, _) => Some(id),
                _ => None,
            };
            self.held += work.holds.iter().map(Hold::bytes).sum::<usize>();
            let (number, signalled, holds) = (self.posts, work.signalled, work.holds);
            self.posted.push_back(Posted { number, signalled, read, holds });
            self.posts += 1;
        }
        if posted == 0 { Ok(()) } else { Err(unposted(posted, "posting a request")) }
    }

    fn qp(&self) -> *mut ibv_qp {
        // SAFETY: alive; the queue pair was made with this object and goes with it.
        unsafe { (*self.domain.id.as_ptr()).qp }
    }

    /// The next completion that matters.
    ///
    /// # Errors
    /// The first request that failed: the connection is of no use then.
    pub fn poll(&mut self) -> Result<Option<Done>, Error> {
        while self.done.is_empty() && self.failed.is_none() && self.collect()? {}
        match (self.done.pop_front(), &self.failed) {
            (None, Some(error)) => Err(error.clone()),
            (done, _) => Ok(done),
        }
    }

    /// Takes some completions from the device, for a later [`Queues::poll`], which reports failures too. False when there
    /// are none.
    ///
    /// # Errors
    /// The completion queue is broken.
    pub fn collect(&mut self) -> Result<bool, Error> {
        // SAFETY: numbers, and a union of numbers.
        let mut batch: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is alive; the array has room for as many.
        let n = unsafe { ibv_poll_cq(self.cq.as_ptr(), BATCH as i32, batch.as_mut_ptr()) };
        let n = usize::try_from(n)
            .map_err(|_| Error::new(Kind::ConnectionLost, "the completion queue cannot be read"))?;
        self.found |= n > 0;
        for wc in batch.iter().take(n) {
            if self.failed.is_none()
                && let Err(error) = self.complete(wc)
            {
                // What came before it is reported first.
                self.failed = Some(error);
            }
        }
        Ok(n > 0)
    }

    fn complete(&mut self, wc: &ibv_wc) -> Result<(), Error> {
        if wc.status != ibv_wc_status::IBV_WC_SUCCESS {
            return Err(self.failure(wc));
        }
        let receive = wc.opcode & ibv_wc_opcode::IBV_WC_RECV != 0;
        if receive && wc.opcode != ibv_wc_opcode::IBV_WC_RECV {
            // Such a Write takes a Receive and leaves nothing in it.
            let text = "the peer uses RDMA Write with Immediate Data, which is no message of RPC-over-RDMA";
            return Err(Error::new(Kind::Protocol, text));
        }
        if receive {
            let next = self.receives.pop_front();
            let Some((_, sink)) = next.filter(|(number, _)| *number == wc.wr_id) else {
                return Err(Error::new(Kind::ConnectionLost, "the device completed Receives out of order"));
            };
            self.received += 1;
            let with_invalidate = wc.wc_flags & WITH_INVALIDATE != 0;
            // SAFETY: all members are numbers.
            let key = unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey };
            let len = (wc.byte_len as usize).min(sink.len());
            self.done.push_back(Done::Received {
                sink,
                len,
                invalidated: with_invalidate.then_some(Handle(key)),
            });
            return Ok(());
        }
        // Only its own completion tells that a Read is done: iWARP devices may report later requests before it.
        let done = |posted: &mut Posted| match posted.read {
            Some(_) => posted.number == wc.wr_id,
            None => posted.number <= wc.wr_id,
        };
        let mut at = 0;
        while let Some(posted) = self.posted.get_mut(at).filter(|posted| posted.number <= wc.wr_id) {
            if !done(posted) {
                at += 1;
                continue;
            }
            let Some(Posted { read, holds, .. }) = self.posted.remove(at) else { break };
            let bytes = holds.iter().map(Hold::bytes).sum::<usize>();
            self.held -= bytes;
            self.released += (bytes as u64).max(Queues::SLAB);
            self.done.extend(read.map(Done::Read));
        }
        Ok(())
    }

    fn failure(&self, wc: &ibv_wc) -> Error {
        use ibv_wc_status::*;
        let longest = self.receives.front().map_or(0, |(_, sink)| sink.len());
        let (kind, text) = match wc.status {
            IBV_WC_WR_FLUSH_ERR => (Kind::ConnectionLost, "the connection was lost".to_owned()),
            IBV_WC_LOC_LEN_ERR => {
                let text = format!(
                    "a message of the peer is longer than the {longest} bytes that were announced to it; raise \
                     RPCRDMA_INLINE"
                );
                (Kind::Protocol, text)
            }
            IBV_WC_REM_ACCESS_ERR => (
                Kind::Protocol,
                "the peer's memory is not what its chunks say: a handle, a range or a right is wrong"
                    .to_owned(),
            ),
            IBV_WC_RNR_RETRY_EXC_ERR => (
                Kind::Protocol,
                "the peer has no Receive for a message that it granted a credit for".to_owned(),
            ),
            IBV_WC_RETRY_EXC_ERR => (Kind::ConnectionLost, "the peer does not answer any more".to_owned()),
            status => (
                Kind::ConnectionLost,
                format!("the device reports an error (status {status}, vendor {:#x})", wc.vendor_err),
            ),
        };
        Error::new(kind, text)
    }

    /// Whether there was a completion since an event was asked for, so that the event is there or will be soon.
    pub fn found(&self) -> bool {
        self.found
    }

    /// Makes the descriptor tell of what comes from here on. False if something is there already.
    ///
    /// # Errors
    /// The device refuses, or the completion queue is broken.
    pub fn rest(&mut self) -> Result<bool, Error> {
        let came = self.arm()? && self.collect()?;
        Ok(!came && self.has_nothing())
    }

    /// Whether nothing that was taken from the device is left for [`Queues::poll`].
    pub fn has_nothing(&self) -> bool {
        self.done.is_empty() && self.failed.is_none()
    }

    /// Asks for an event at the next completion. True if none had been asked for: completions that came before make no
    /// event.
    ///
    /// # Errors
    /// The device refuses.
    pub fn arm(&mut self) -> Result<bool, Error> {
        if self.armed {
            return Ok(false);
        }
        // SAFETY: alive.
        let armed = unsafe { ibv_req_notify_cq(self.cq.as_ptr(), 0) };
        if armed != 0 {
            return Err(unposted(armed, "watching the completion queue"));
        }
        (self.armed, self.found) = (true, false);
        Ok(true)
    }

    /// Takes an event, if there is one.
    pub fn take_event(&mut self) -> bool {
        let (mut cq, mut context) = (null_mut(), null_mut());
        let get = self.domain.id.library().ibv_get_cq_event;
        // SAFETY: the channel is alive and non-blocking; both may be written.
        let is_there = unsafe { get(self.channel.as_ptr(), &mut cq, &mut context) } == 0;
        if is_there {
            self.events += 1;
            self.armed = false;
        }
        is_there
    }
}

/// The error for what the device's driver returns: an errno, which from the siw driver is negative, or -1 with errno set.
fn unposted(returned: c_int, what: &str) -> Error {
    let errno = match returned {
        -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
        errno => errno.saturating_abs(),
    };
    super::refused(errno, what)
        .unwrap_or_else(|| Error::new(Kind::ConnectionLost, format!("{what} failed ({returned})")))
}

impl Drop for Queues {
    fn drop(&mut self) {
        if self.domain.id.forked() {
            return;
        }
        let library = self.domain.id.library();
        // Does what rdma_destroy_qp(3) does, which does not tell whether it has worked.
        // SAFETY: made with this object. What was posted is dropped after this.
        let errno = unsafe { (library.ibv_destroy_qp)(self.qp()) };
        if errno != 0 {
            // The queue pair lives on with its completion queue, in a domain that the device keeps. Its rights to memory end
            // with the registrations.
            return self.domain.stick("a queue pair", errno);
        }
        // SAFETY: alive; the queue pair is gone.
        unsafe { (*self.domain.id.as_ptr()).qp = null_mut() };
        // SAFETY: alive; as many as were taken.
        unsafe { (library.ibv_ack_cq_events)(self.cq.as_ptr(), self.events) };
        // SAFETY: no queue pair uses it, and every event is acknowledged.
        unsafe { (library.ibv_destroy_cq)(self.cq.as_ptr()) };
        // SAFETY: no completion queue uses it.
        unsafe { (library.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
    }
}
