//! A fake device in place of rdma-core: a test says what fails and what completes, and counts what is left.
//!
//! It knows what it may touch: the memory of requests whose completion it has not reported, and what the peer has a key for.
//! [`touch`] touches all of it, as a device may at any time.
//!
//! It belongs to the thread that has called [`install`], and so to one test. [`request`] makes connection requests come in;
//! what is accepted is established at once.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr::null_mut;

use rdma_sys::*;

use super::library::Library;
use crate::socket::Sockaddr;

/// What a test sees of the device, and makes it do.
#[derive(Default)]
pub struct Device {
    /// Objects that exist, by kind.
    pub there: HashMap<&'static str, usize>,
    /// How many of a kind were ever made.
    pub made: HashMap<&'static str, usize>,
    /// Functions that fail with EBUSY.
    pub fails: HashSet<&'static str>,
    /// These functions fail only until the queue pair is gone.
    pub relents: bool,
    /// The key of a registration that it never deregisters.
    pub keeps: u32,
    /// It does not register this many bytes, or more.
    pub refuses: usize,
    /// It has no memory windows.
    pub windowless: bool,
    /// Requests complete as soon as they are posted.
    pub completes: bool,
    /// What posting returns.
    pub errno: c_int,
    /// Requests that were posted: number and operation.
    pub posted: Vec<(u64, ibv_wr_opcode::Type)>,
    /// How many requests the send queue has room for, and how many it holds: only the completion of a signalled request
    /// tells that it and those before it are gone.
    pub depth: usize,
    taken: usize,
    /// What is on the completion queue.
    pub completions: VecDeque<ibv_wc>,
    /// What gets there when an event is asked for.
    pub late: VecDeque<ibv_wc>,
    /// An event was asked for.
    pub armed: bool,
    /// The completion queue cannot be read.
    pub broken: bool,
    /// The peer's private data, with every event of a connection.
    pub private_data: Vec<u8>,
    /// Requests that are under way.
    pub queue: VecDeque<Queued>,
    /// Receives that are under way.
    pub receives: VecDeque<Queued>,
    /// Receives whose completion was reported.
    pub received: usize,
    /// Reads whose completion was reported, by number.
    pub read: HashSet<u64>,
    /// What the peer may touch, by key.
    pub rights: HashMap<u32, Right>,
    /// The key of each window that is bound.
    windows: HashMap<usize, u32>,
    /// Keys that the device has reported dead while no window had them: they stay dead for ever.
    dead: HashSet<u32>,
    /// Requests to connect that were refused.
    pub rejected: usize,
    /// The latest identifier; the latest event channel and the latest completion channel, each with its descriptor.
    id: usize,
    channels: [(usize, c_int); 2],
    /// The status that events carry.
    status: c_int,
    /// For each channel, what has happened to which identifier.
    events: HashMap<usize, VecDeque<(rdma_cm_event_type::Type, usize)>>,
}

/// A request as the device has it.
pub struct Queued {
    /// Its number.
    pub number: u64,
    /// What it does; without meaning for a Receive.
    pub opcode: ibv_wr_opcode::Type,
    /// Whether its completion is to be reported as soon as it is there.
    pub signalled: bool,
    /// Addresses and lengths.
    pub pieces: Vec<(usize, usize)>,
    /// What it invalidates.
    key: u32,
}

/// What the peer may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// The first byte.
    pub address: usize,
    /// How many.
    pub len: usize,
    /// Whether it may write; else it may read.
    pub write: bool,
}

thread_local! {
    static DEVICE: RefCell<Device> = RefCell::default();
    static INSTALLED: Cell<Option<&'static Library>> = const { Cell::new(None) };
}

/// Looks at the device, or changes it.
pub fn with<T>(look: impl FnOnce(&mut Device) -> T) -> T {
    DEVICE.with(|device| look(&mut device.borrow_mut()))
}

/// The device of this thread, if it has one.
pub fn installed() -> Option<&'static Library> {
    INSTALLED.with(Cell::get)
}

/// Gives this thread the device from here on.
pub fn install() {
    INSTALLED.with(|installed| {
        let library = || &*Box::leak(Box::new(library()));
        installed.set(Some(installed.get().unwrap_or_else(library)));
    });
    with(|device| *device = Device { completes: true, refuses: usize::MAX, ..Device::default() });
}

/// Objects of a kind that exist.
pub fn there(kind: &str) -> usize {
    with(|device| device.there.get(kind).copied().unwrap_or(0))
}

/// Objects of a kind that were ever made.
pub fn made(kind: &str) -> usize {
    with(|device| device.made.get(kind).copied().unwrap_or(0))
}

/// The key of the latest registration.
pub fn latest_key() -> u32 {
    made("mr") as u32 * 256
}

/// Makes `from` ask to connect to `to`, at the listener with this channel.
pub fn request(channel: *mut rdma_event_channel, from: SocketAddr, to: SocketAddr) {
    let id = fresh_id(channel);
    // SAFETY: just made.
    let address = unsafe { &mut (*id).route.addr };
    // SAFETY: both unions are large enough for every address.
    unsafe { store(&raw mut address.src_addr_union, to) };
    // SAFETY: as above.
    unsafe { store(&raw mut address.dst_addr_union, from) };
    event(channel, rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST, id);
}

/// Adds a completion with these values.
pub fn complete(status: ibv_wc_status::Type, opcode: ibv_wc_opcode::Type, number: u64) {
    // SAFETY: numbers, and a union of numbers.
    let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
    (wc.status, wc.opcode, wc.wr_id) = (status, opcode, number);
    with(|device| device.completions.push_back(wc));
}

/// The same, with everything that a completion may have.
pub fn completion(status: u32, opcode: u32, number: u64, len: u32, flags: u32, key: u32) {
    // SAFETY: numbers, and a union of numbers.
    let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
    (wc.status, wc.opcode, wc.wr_id) = (status, opcode, number);
    (wc.byte_len, wc.wc_flags) = (len, flags);
    wc.imm_data_invalidated_rkey_union.invalidated_rkey = key;
    with(|device| device.completions.push_back(wc));
}

/// Makes the event with this number happen to the latest identifier or, if it is a request to connect, to a new one.
pub fn happens(what: u32, status: c_int) {
    let (id, (channel, fd)) = with(|device| (device.id, device.channels[0]));
    if fd == 0 {
        return;
    }
    let channel: *mut rdma_event_channel = std::ptr::with_exposed_provenance_mut(channel);
    let id = match what {
        rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST => fresh_id(channel),
        _ => std::ptr::with_exposed_provenance_mut(id),
    };
    with(|device| device.status = status);
    event(channel, what, id);
    ring(fd);
}

/// Whether a completion that has come makes an event, which the caller then has to [`announce`].
#[cfg(test)]
pub fn makes_event() -> bool {
    with(|device| std::mem::take(&mut device.armed))
}

/// Tells that there are completions.
pub fn announce() {
    let (_, fd) = with(|device| device.channels[1]);
    if fd != 0 {
        ring(fd);
    }
}

fn ring(fd: c_int) {
    // SAFETY: touches no memory.
    unsafe { libc::eventfd_write(fd, 1) };
}

/// Whether it has rung since the last time.
fn rang(fd: c_int) -> bool {
    let mut times = 0;
    // SAFETY: a number to write to.
    unsafe { libc::eventfd_read(fd, &mut times) == 0 }
}

/// Reads and writes everything that the device may touch now: AddressSanitizer finds what is freed, and whoever looks finds
/// what is somebody else's.
#[cfg(feature = "fuzz")]
pub fn touch() {
    let each = |(address, len): (usize, usize), write: bool| {
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
        for at in [0, len / 2, len.saturating_sub(1)].into_iter().filter(|at| *at < len) {
            let place = start.wrapping_add(at);
            // SAFETY: the library owes it to the device that this is there.
            let byte = unsafe { place.read_volatile() };
            if write {
                // SAFETY: as above.
                unsafe { place.write_volatile(byte.wrapping_add(1)) };
            }
        }
    };
    with(|device| {
        for receive in &device.receives {
            receive.pieces.iter().for_each(|piece| each(*piece, true));
        }
        for work in &device.queue {
            let write = work.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ;
            work.pieces.iter().for_each(|piece| each(*piece, write));
        }
        for right in device.rights.values() {
            each((right.address, right.len), right.write);
        }
    });
}

/// # Safety
/// `list` has `count` pieces.
unsafe fn pieces(list: *const ibv_sge, count: c_int) -> Vec<(usize, usize)> {
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: by the contract.
    let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
    list.iter().map(|piece| (piece.addr as usize, piece.length as usize)).collect()
}

impl Device {
    /// Reports a completion: the device no longer touches what it says is complete.
    fn tell(&mut self, wc: &ibv_wc) {
        if wc.status != ibv_wc_status::IBV_WC_SUCCESS {
            return;
        }
        if wc.opcode & ibv_wc_opcode::IBV_WC_RECV != 0 {
            self.receives.pop_front();
            self.received += 1;
            if wc.wc_flags & super::queues::WITH_INVALIDATE != 0 {
                // SAFETY: all members are numbers.
                self.unbind(unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey });
            }
            return;
        }
        let is_read = |work: &Queued| work.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ;
        for work in std::mem::take(&mut self.queue) {
            let told = if is_read(&work) { work.number == wc.wr_id } else { work.number <= wc.wr_id };
            if !told {
                self.queue.push_back(work);
            } else if is_read(&work) {
                self.read.insert(work.number);
            } else if work.opcode == ibv_wr_opcode::IBV_WR_LOCAL_INV {
                self.unbind(work.key);
            }
        }
        self.taken = self.queue.len();
    }

    /// Takes a posted request. A window is bound at once, and unbound as late as possible: when the completion is reported.
    fn take(&mut self, work: &ibv_send_wr, pieces: Vec<(usize, usize)>, signalled: bool) {
        let mut key = 0;
        if work.opcode == ibv_wr_opcode::IBV_WR_LOCAL_INV {
            // SAFETY: the member of such requests.
            key = unsafe { work.imm_data_invalidated_rkey_union.invalidated_rkey };
        }
        if work.opcode == ibv_wr_opcode::IBV_WR_BIND_MW {
            // SAFETY: the member of such requests.
            let bind = unsafe { work.bind_mw_tso_union.bind_mw };
            let part = bind.bind_info;
            let write = part.mw_access_flags & ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 != 0;
            let right = Right { address: part.addr as usize, len: part.length as usize, write };
            // As a driver does.
            // SAFETY: the library owes it to the device that this is there.
            let registration = unsafe { &*part.mr };
            assert!(registration.addr.addr() <= right.address && right.len <= registration.length);
            if !self.dead.contains(&bind.rkey) {
                self.windows.insert(bind.mw.addr(), bind.rkey);
                self.rights.insert(bind.rkey, right);
            }
        }
        self.queue.push_back(Queued { number: work.wr_id, opcode: work.opcode, signalled, pieces, key });
    }

    /// Ends the key of a window.
    fn unbind(&mut self, key: u32) {
        if self.windows.values().any(|bound| *bound == key) {
            self.windows.retain(|_, bound| *bound != key);
            self.rights.remove(&key);
        } else {
            self.dead.insert(key);
        }
    }
}

/// # Safety
/// `place` has room for the address.
unsafe fn store<T>(place: *mut T, address: SocketAddr) {
    let address = Sockaddr::from(address);
    let bytes = address.as_bytes();
    // SAFETY: by the contract.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.cast(), bytes.len()) };
}

fn event(channel: *mut rdma_event_channel, event: rdma_cm_event_type::Type, id: *mut rdma_cm_id) {
    let channel = channel.addr();
    with(|device| device.events.entry(channel).or_default().push_back((event, id.expose_provenance())));
}

fn context() -> *mut ibv_context {
    thread_local! {
        static CONTEXT: Cell<*mut ibv_context> = const { Cell::new(null_mut()) };
    }
    CONTEXT.with(|context| {
        if context.get().is_null() {
            let device: *mut ibv_device = zeroed();
            // SAFETY: just made.
            unsafe { (*device).transport_type = ibv_transport_type::IBV_TRANSPORT_IB };
            let fresh: *mut ibv_context = zeroed();
            // SAFETY: just made.
            let all = unsafe { &mut *fresh };
            all.device = device;
            all.ops.alloc_mw = Some(alloc_mw);
            all.ops.dealloc_mw = Some(dealloc_mw);
            all.ops.poll_cq = Some(poll_cq);
            all.ops.req_notify_cq = Some(req_notify_cq);
            all.ops.post_send = Some(post_send);
            all.ops.post_recv = Some(post_recv);
            context.set(fresh);
        }
        context.get()
    })
}

/// An object without anything in it.
fn zeroed<T>() -> *mut T {
    // SAFETY: structs of C: numbers, and pointers that may be NULL.
    Box::into_raw(Box::new(unsafe { std::mem::zeroed::<T>() }))
}

fn make<T>(kind: &'static str) -> *mut T {
    with(|device| {
        *device.there.entry(kind).or_default() += 1;
        *device.made.entry(kind).or_default() += 1;
    });
    zeroed()
}

/// # Safety
/// `object` is from [`make`].
unsafe fn destroy<T>(kind: &'static str, function: &'static str, object: *mut T) -> c_int {
    if with(|device| device.fails.contains(function)) {
        return libc::EBUSY;
    }
    with(|device| *device.there.entry(kind).or_default() -= 1);
    // SAFETY: by the contract.
    drop(unsafe { Box::from_raw(object) });
    0
}

fn fd() -> c_int {
    // SAFETY: touches no memory.
    unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) }
}

fn fresh_id(channel: *mut rdma_event_channel) -> *mut rdma_cm_id {
    let id: *mut rdma_cm_id = make("id");
    // SAFETY: just made.
    let all = unsafe { &mut *id };
    (all.channel, all.verbs, all.port_num) = (channel, context(), 1);
    id
}

fn library() -> Library {
    Library {
        ibv_query_device,
        ibv_alloc_pd,
        ibv_dealloc_pd,
        ibv_reg_mr,
        ibv_dereg_mr,
        ibv_create_comp_channel,
        ibv_destroy_comp_channel,
        ibv_create_cq,
        ibv_destroy_cq,
        ibv_destroy_qp,
        ibv_get_cq_event,
        ibv_ack_cq_events,
        rdma_create_event_channel,
        rdma_destroy_event_channel,
        rdma_create_id,
        rdma_destroy_id,
        rdma_migrate_id,
        rdma_set_option,
        rdma_bind_addr,
        rdma_listen,
        rdma_resolve_addr,
        rdma_resolve_route,
        rdma_create_qp,
        rdma_connect,
        rdma_accept,
        rdma_reject,
        rdma_disconnect,
        rdma_get_cm_event,
        rdma_ack_cm_event,
    }
}

unsafe extern "C" fn ibv_query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: writable, by the function's contract.
    let attr = unsafe { &mut *attr };
    (attr.max_mr_size, attr.max_qp_wr, attr.max_cqe, attr.max_sge) = (u64::MAX, 4096, 8192, 8);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom, attr.max_mw) = (16, 16, 16);
    attr.device_cap_flags = if with(|device| device.windowless) { 0 } else { super::queues::WINDOWS };
    0
}

unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let pd: *mut ibv_pd = make("pd");
    // SAFETY: just made.
    unsafe { (*pd).context = context };
    pd
}

unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: from `ibv_alloc_pd`.
    unsafe { destroy("pd", "ibv_dealloc_pd", pd) }
}

unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    if length >= with(|device| device.refuses) {
        return null_mut();
    }
    let mr: *mut ibv_mr = make("mr");
    let key = latest_key();
    // SAFETY: just made.
    let all = unsafe { &mut *mr };
    (all.pd, all.addr, all.length, all.lkey, all.rkey) = (pd, addr, length, key, key);
    let write = access as u32 & ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 != 0;
    if write || access as u32 & ibv_access_flags::IBV_ACCESS_REMOTE_READ.0 != 0 {
        let right = Right { address: addr.addr(), len: length, write };
        with(|device| device.rights.insert(key, right));
    }
    mr
}

unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // As devices do while a window is bound to it.
    if there("mw") > 0 && with(|device| device.fails.contains("ibv_dealloc_mw")) {
        return libc::EBUSY;
    }
    // SAFETY: from `ibv_reg_mr`.
    let key = unsafe { (*mr).lkey };
    if with(|device| device.keeps == key) {
        return libc::EBUSY;
    }
    // SAFETY: as above.
    let errno = unsafe { destroy("mr", "ibv_dereg_mr", mr) };
    if errno == 0 {
        with(|device| device.rights.remove(&key));
    }
    errno
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, _: ibv_mw_type::Type) -> *mut ibv_mw {
    let mw: *mut ibv_mw = make("mw");
    // SAFETY: just made.
    let all = unsafe { &mut *mw };
    (all.pd, all.context, all.rkey) = (pd, context(), 0x1_0000 * made("mw") as u32);
    mw
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: from `alloc_mw`.
    let errno = unsafe { destroy("mw", "ibv_dealloc_mw", mw) };
    if errno == 0 {
        with(|device| {
            let key = device.windows.remove(&mw.addr());
            key.map(|key| device.rights.remove(&key));
        });
    }
    errno
}

unsafe extern "C" fn ibv_create_comp_channel(_: *mut ibv_context) -> *mut ibv_comp_channel {
    let channel: *mut ibv_comp_channel = make("completion channel");
    let fd = fd();
    // SAFETY: just made.
    unsafe { (*channel).fd = fd };
    with(|device| device.channels[1] = (channel.expose_provenance(), fd));
    channel
}

unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    with(|device| device.channels[1] = (0, 0));
    // SAFETY: from `ibv_create_comp_channel`.
    crate::socket::close(unsafe { (*channel).fd });
    // SAFETY: as above.
    unsafe { destroy("completion channel", "ibv_destroy_comp_channel", channel) }
}

unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    _: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let cq: *mut ibv_cq = make("cq");
    // SAFETY: just made.
    unsafe { (*cq).context = context };
    cq
}

unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: from `ibv_create_cq`.
    unsafe { destroy("cq", "ibv_destroy_cq", cq) }
}

unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // Even a queue pair that is not destroyed has no memory any more when its registrations are gone.
    with(|device| (device.queue.clear(), device.receives.clear()));
    // SAFETY: from `rdma_create_qp`.
    let errno = unsafe { destroy("qp", "ibv_destroy_qp", qp) };
    with(|device| {
        if device.relents {
            device.fails.clear();
        }
    });
    errno
}

unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    _: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    // SAFETY: alive.
    if rang(unsafe { (*channel).fd }) { 0 } else { -1 }
}

unsafe extern "C" fn ibv_ack_cq_events(_: *mut ibv_cq, _: u32) {}

unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let channel: *mut rdma_event_channel = make("event channel");
    let fd = fd();
    // SAFETY: just made.
    unsafe { (*channel).fd = fd };
    with(|device| device.channels[0] = (channel.expose_provenance(), fd));
    channel
}

unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let missed = with(|device| {
        device.channels[0] = (0, 0);
        device.events.remove(&channel.addr()).unwrap_or_default()
    });
    for (what, id) in missed {
        if what == rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST {
            let id: *mut rdma_cm_id = std::ptr::with_exposed_provenance_mut(id);
            // SAFETY: from `fresh_id`, and nobody has learnt of it.
            unsafe { destroy("id", "rdma_destroy_id", id) };
        }
    }
    // SAFETY: from `rdma_create_event_channel`.
    crate::socket::close(unsafe { (*channel).fd });
    // SAFETY: as above.
    unsafe { destroy("event channel", "rdma_destroy_event_channel", channel) };
}

unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    _: *mut c_void,
    _: rdma_port_space::Type,
) -> c_int {
    let fresh = fresh_id(channel);
    with(|device| device.id = fresh.expose_provenance());
    // SAFETY: writable, by the function's contract.
    unsafe { *id = fresh };
    0
}

unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: from `fresh_id`.
    unsafe { destroy("id", "rdma_destroy_id", id) }
}

unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: alive.
    unsafe { (*id).channel = channel };
    0
}

unsafe extern "C" fn rdma_set_option(
    _: *mut rdma_cm_id,
    _: c_int,
    _: c_int,
    _: *mut c_void,
    _: usize,
) -> c_int {
    0
}

unsafe extern "C" fn rdma_bind_addr(_: *mut rdma_cm_id, _: *mut libc::sockaddr) -> c_int {
    0
}

unsafe extern "C" fn rdma_listen(_: *mut rdma_cm_id, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    _: *mut libc::sockaddr,
    _: *mut libc::sockaddr,
    _: c_int,
) -> c_int {
    // SAFETY: alive.
    event(unsafe { (*id).channel }, rdma_cm_event_type::RDMA_CM_EVENT_ADDR_RESOLVED, id);
    0
}

unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _: c_int) -> c_int {
    // SAFETY: alive.
    event(unsafe { (*id).channel }, rdma_cm_event_type::RDMA_CM_EVENT_ROUTE_RESOLVED, id);
    0
}

unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    _: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    if with(|device| device.fails.contains("rdma_create_qp")) {
        // An errno other than those after which the caller asks for less.
        // SAFETY: touches no memory.
        return unsafe { libc::close(-1) };
    }
    let qp: *mut ibv_qp = make("qp");
    // SAFETY: just made.
    let all = unsafe { &mut *qp };
    // SAFETY: readable, by the function's contract.
    let attr = unsafe { &*attr };
    (all.context, all.send_cq) = (context(), attr.send_cq);
    with(|device| (device.depth, device.taken) = (attr.cap.max_send_wr as usize, 0));
    // SAFETY: alive.
    unsafe { (*id).qp = qp };
    0
}

unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, _: *mut rdma_conn_param) -> c_int {
    // SAFETY: alive.
    event(unsafe { (*id).channel }, rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED, id);
    0
}

unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, _: *mut rdma_conn_param) -> c_int {
    // SAFETY: alive.
    event(unsafe { (*id).channel }, rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED, id);
    0
}

unsafe extern "C" fn rdma_reject(_: *mut rdma_cm_id, _: *const c_void, _: u8) -> c_int {
    with(|device| device.rejected += 1);
    0
}

unsafe extern "C" fn rdma_disconnect(_: *mut rdma_cm_id) -> c_int {
    0
}

unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    let Some((what, id)) = with(|device| device.events.get_mut(&channel.addr())?.pop_front()) else {
        // SAFETY: alive.
        rang(unsafe { (*channel).fd });
        // SAFETY: no preconditions.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: this thread's own.
        unsafe { *errno = libc::EAGAIN };
        return -1;
    };
    let fresh: *mut rdma_cm_event = zeroed();
    // SAFETY: just made.
    let all = unsafe { &mut *fresh };
    (all.event, all.id) = (what, std::ptr::with_exposed_provenance_mut(id));
    with(|device| {
        all.status = device.status;
        let data = &device.private_data;
        if !data.is_empty() {
            // SAFETY: a union, of which this is the member of connections.
            let conn = unsafe { &mut all.param.conn };
            (conn.private_data, conn.private_data_len) = (data.as_ptr().cast(), data.len() as u8);
            (conn.responder_resources, conn.initiator_depth) = (data[0], data[0] ^ 3);
        }
    });
    // SAFETY: writable, by the function's contract.
    unsafe { *event = fresh };
    0
}

unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: from `rdma_get_cm_event`.
    drop(unsafe { Box::from_raw(event) });
    0
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, most: c_int, batch: *mut ibv_wc) -> c_int {
    if with(|device| device.broken) {
        return -1;
    }
    let mut n = 0;
    while n < most {
        let next = with(|device| {
            let next = device.completions.pop_front()?;
            device.tell(&next);
            Some(next)
        });
        let Some(next) = next else { break };
        // SAFETY: an array of `most`, by the function's contract.
        let place = unsafe { batch.add(n as usize) };
        // SAFETY: as above.
        unsafe { place.write(next) };
        n += 1;
    }
    n
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    with(|device| {
        device.completions.extend(device.late.drain(..));
        device.armed = true;
    });
    0
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    mut request: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    let errno = with(|device| device.errno);
    if errno != 0 {
        return errno;
    }
    // SAFETY: NULL, or the next request of the chain.
    while let Some(next) = unsafe { request.as_ref() } {
        let signalled = next.send_flags & ibv_send_flags::IBV_SEND_SIGNALED.0 != 0;
        // SAFETY: by the function's contract.
        let pieces = unsafe { pieces(next.sg_list, next.num_sge) };
        let inline = next.send_flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0;
        let fits = with(|device| {
            let fits = device.taken < device.depth;
            device.posted.extend(fits.then_some((next.wr_id, next.opcode)));
            if fits {
                device.take(next, if inline { Vec::new() } else { pieces }, signalled);
            }
            device.taken = if signalled && device.completes { 0 } else { device.taken + 1 };
            fits
        });
        if !fits {
            return libc::ENOMEM;
        }
        if signalled && with(|device| device.completes) {
            complete(ibv_wc_status::IBV_WC_SUCCESS, ibv_wc_opcode::IBV_WC_RDMA_WRITE, next.wr_id);
        }
        request = next.next;
    }
    0
}

unsafe extern "C" fn post_recv(_: *mut ibv_qp, work: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: one request, by the function's contract.
    let work = unsafe { &*work };
    // SAFETY: as above.
    let pieces = unsafe { pieces(work.sg_list, work.num_sge) };
    let queued = Queued { number: work.wr_id, opcode: 0, signalled: true, pieces, key: 0 };
    with(|device| device.receives.push_back(queued));
    0
}
