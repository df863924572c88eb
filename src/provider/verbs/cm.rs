//! RDMA-CM: event channels and connection identifiers, each with an owner.
//!
//! Everything is non-blocking: a command starts something, an [`Event`] tells how it ended. An event's contents are copied
//! and it is acknowledged at once, so that nothing waits for us when an identifier is destroyed.
//!
//! **Fork.** The kernel's objects belong to the process that made them, but a forked child has the same descriptors and its
//! commands would act on them: in a child nothing here talks to the kernel, and owners leak what they own.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use rdma_sys::*;

use super::library::{self, Library};
use super::refused;
use crate::error::{Error, Kind, os_text};
use crate::fork;
use crate::socket;
use crate::socket::Sockaddr;

/// RDMA-CM's option level for identifiers, and two options of that level.
const OPTION_ID: c_int = 0;
const OPTION_REUSE_ADDRESS: c_int = 1;
const OPTION_ONE_FAMILY: c_int = 2;

/// How often a message without an acknowledgement is sent again: as Linux's NFS has it; seven is the most.
const RETRIES: u8 = 6;

/// A queue of events, readable when there is one.
pub struct Channel {
    raw: NonNull<rdma_event_channel>,
    library: &'static Library,
    generation: u64,
}

// SAFETY: librdmacm's calls on a channel are thread-safe, and the pointer is freed by the last owner only.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

/// What has happened to an identifier.
pub enum Event {
    /// The address belongs to a device.
    AddressResolved,
    /// The route to the peer is known.
    RouteResolved,
    /// A peer wants to connect to a listener.
    Request(Box<Request>),
    /// The connection is established.
    Established(Terms),
    /// The peer has disconnected.
    Disconnected,
    /// The attempt has failed, or the device or its address is gone.
    Failed(Error),
    /// Nothing that matters here.
    Other,
}

/// A request of a peer, to be accepted or dropped.
pub struct Request {
    /// Its identifier, still on the listener's channel.
    pub id: Id,
    /// What the peer offers.
    pub terms: Terms,
}

/// What comes with a connection request or its reply.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// As received; devices pad it with zeros.
    pub private_data: Vec<u8>,
    /// RDMA Reads that the peer wants to have outstanding towards us.
    pub their_reads: u8,
    /// RDMA Reads of ours that the peer serves at a time.
    pub our_reads: u8,
}

impl Channel {
    /// A channel of this process.
    ///
    /// # Errors
    /// The libraries are missing, or the kernel refuses.
    pub fn new() -> Result<Arc<Channel>, Error> {
        let library = library::get()?;
        super::note_opened();
        // SAFETY: no preconditions.
        let raw = unsafe { (library.rdma_create_event_channel)() };
        let raw = NonNull::new(raw).ok_or_else(|| failed("an event channel"))?;
        let channel = Arc::new(Channel { raw, library, generation: fork::generation() });
        socket::set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    /// Readable when [`Channel::next`] has something.
    pub fn fd(&self) -> RawFd {
        // SAFETY: alive; the number never changes.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// The pointer that librdmacm knows it by.
    #[cfg(test)]
    pub fn as_ptr(&self) -> *mut rdma_event_channel {
        self.raw.as_ptr()
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// The device or the kernel's side is gone.
    pub fn next(self: &Arc<Channel>) -> Result<Option<Event>, Error> {
        let mut event = null_mut();
        // SAFETY: the channel is alive, and `event` may be written.
        let got = unsafe { (self.library.rdma_get_cm_event)(self.raw.as_ptr(), &mut event) };
        if got != 0 {
            let error = std::io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                errno => Err(refused(errno.unwrap_or(0), "the next event").unwrap_or_else(|| {
                    Error::new(Error::from(error).kind(), "the connection manager gives no events")
                })),
            };
        }
        // SAFETY: just received, and not acknowledged before the reference has gone.
        let copied = self.copy(unsafe { &*event });
        // SAFETY: received, and acknowledged once.
        unsafe { (self.library.rdma_ack_cm_event)(event) };
        Ok(Some(copied))
    }

    fn copy(self: &Arc<Channel>, event: &rdma_cm_event) -> Event {
        use rdma_cm_event_type::*;
        match event.event {
            RDMA_CM_EVENT_ADDR_RESOLVED => Event::AddressResolved,
            RDMA_CM_EVENT_ROUTE_RESOLVED => Event::RouteResolved,
            RDMA_CM_EVENT_CONNECT_REQUEST => match NonNull::new(event.id) {
                Some(raw) => {
                    let id = Id { raw, channel: self.clone(), library: self.library };
                    Event::Request(Box::new(Request { id, terms: terms(event) }))
                }
                None => Event::Other,
            },
            RDMA_CM_EVENT_ESTABLISHED => Event::Established(terms(event)),
            RDMA_CM_EVENT_DISCONNECTED => Event::Disconnected,
            RDMA_CM_EVENT_TIMEWAIT_EXIT | RDMA_CM_EVENT_CONNECT_RESPONSE => Event::Other,
            other => Event::Failed(failure(other, event.status)),
        }
    }
}

fn terms(event: &rdma_cm_event) -> Terms {
    // SAFETY: events of connections, which these are, have this member.
    let conn = unsafe { event.param.conn };
    let len = if conn.private_data.is_null() { 0 } else { usize::from(conn.private_data_len) };
    // SAFETY: librdmacm's own copy of `len` bytes, until the event is acknowledged.
    let private_data =
        unsafe { crate::ffi::bytes(conn.private_data.cast(), len) }.unwrap_or_default().to_vec();
    // librdmacm tells both numbers as the receiver of the event sees them.
    Terms { private_data, their_reads: conn.responder_resources, our_reads: conn.initiator_depth }
}

fn failure(event: rdma_cm_event_type::Type, status: c_int) -> Error {
    use rdma_cm_event_type::*;
    // A rejection carries a reason of InfiniBand's CM (8: no such service), or an errno where iWARP's TCP was refused.
    let errno = match (event, status) {
        (_, ..0) => -status,
        (RDMA_CM_EVENT_REJECTED, _) => libc::ECONNREFUSED,
        _ => libc::EHOSTUNREACH,
    };
    let why = os_text(&std::io::Error::from_raw_os_error(errno));
    match event {
        RDMA_CM_EVENT_ADDR_ERROR => {
            Error::new(Kind::Os(errno), format!("no RDMA device leads to the address: {why}"))
        }
        RDMA_CM_EVENT_ROUTE_ERROR => Error::new(Kind::Os(errno), format!("no route to the address: {why}")),
        RDMA_CM_EVENT_REJECTED => {
            let text = format!("the peer does not accept RDMA connections there (status {status}: {why})");
            Error::new(Kind::Refused, text)
        }
        RDMA_CM_EVENT_DEVICE_REMOVAL => Error::new(Kind::ConnectionLost, "the RDMA device was removed"),
        RDMA_CM_EVENT_ADDR_CHANGE => {
            Error::new(Kind::ConnectionLost, "the address has moved to another RDMA device")
        }
        _ => Error::new(Kind::Os(errno), format!("the peer cannot be reached (status {status}: {why})")),
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.generation == fork::generation() {
            // SAFETY: its last owner goes; identifiers own it too, so none is left.
            unsafe { (self.library.rdma_destroy_event_channel)(self.raw.as_ptr()) };
        }
    }
}

/// An identifier: one end of a connection, or a listener.
pub struct Id {
    raw: NonNull<rdma_cm_id>,
    channel: Arc<Channel>,
    library: &'static Library,
}

// SAFETY: librdmacm's calls on an identifier are thread-safe, and the pointer is freed by its owner only.
unsafe impl Send for Id {}
// SAFETY: as above; a queue pair is made and destroyed by the one `Queues` that owns it.
unsafe impl Sync for Id {}

impl Id {
    /// An identifier without an address.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(channel: &Arc<Channel>) -> Result<Id, Error> {
        let (library, mut raw) = (channel.library, null_mut());
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is alive; `raw` may be written.
        let made = unsafe { (library.rdma_create_id)(channel.raw.as_ptr(), &mut raw, null_mut(), space) };
        let raw = NonNull::new(raw).filter(|_| made == 0).ok_or_else(|| failed("a connection identifier"))?;
        Ok(Id { raw, channel: channel.clone(), library })
    }

    /// Binds to an address, for its family only; [`Id::device`] then tells which device has it, unless it is the wildcard
    /// address.
    ///
    /// # Errors
    /// The address is taken or no device has it.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Error> {
        self.option(OPTION_REUSE_ADDRESS)?;
        self.option(OPTION_ONE_FAMILY)?;
        let mut at = Sockaddr::from(address);
        // SAFETY: alive; a socket address of its family's length.
        self.check(unsafe { (self.library.rdma_bind_addr)(self.as_ptr(), at.as_mut_ptr()) }, "binding")
    }

    /// Listens.
    ///
    /// # Errors
    /// The port is taken.
    pub fn listen(&self, backlog: c_int) -> Result<(), Error> {
        // SAFETY: alive and bound.
        self.check(unsafe { (self.library.rdma_listen)(self.as_ptr(), backlog) }, "listening")
    }

    fn option(&self, option: c_int) -> Result<(), Error> {
        let mut on: c_int = 1;
        let value: *mut c_void = (&raw mut on).cast();
        let set = self.library.rdma_set_option;
        // SAFETY: alive; the value is readable for the length that is given.
        self.check(unsafe { set(self.as_ptr(), OPTION_ID, option, value, size_of::<c_int>()) }, "an option")
    }

    /// Starts to look for the device that leads to `address`.
    ///
    /// # Errors
    /// No device does.
    pub fn resolve_address(&self, address: SocketAddr, timeout_ms: c_int) -> Result<(), Error> {
        let mut to = Sockaddr::from(address);
        let resolve = self.library.rdma_resolve_addr;
        // SAFETY: alive; a socket address of its family's length; no source is asked for.
        let done = unsafe { resolve(self.as_ptr(), null_mut(), to.as_mut_ptr(), timeout_ms) };
        self.check(done, "looking for an RDMA device")
    }

    /// Starts to look for the route to the peer.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resolve_route(&self, timeout_ms: c_int) -> Result<(), Error> {
        // SAFETY: alive.
        self.check(unsafe { (self.library.rdma_resolve_route)(self.as_ptr(), timeout_ms) }, "the route")
    }

    /// The device, once the address is resolved.
    pub fn device(&self) -> Option<NonNull<ibv_context>> {
        // SAFETY: alive.
        NonNull::new(unsafe { (*self.as_ptr()).verbs })
    }

    /// The device's port that it is bound to.
    pub fn port(&self) -> u8 {
        // SAFETY: alive.
        unsafe { (*self.as_ptr()).port_num }
    }

    /// Of a request: the GID that our answers go to, as an IPv6 address, which it is on RoCE (an IPv4 address is mapped).
    pub fn peer_gid(&self) -> Option<Ipv6Addr> {
        // SAFETY: alive.
        let route = unsafe { &(*self.as_ptr()).route };
        if route.num_paths < 1 {
            return None;
        }
        // SAFETY: NULL, or as many path records as that, which live as long as the identifier.
        let path = unsafe { route.path_rec.as_ref() }?;
        // SAFETY: both members of the union are sixteen bytes.
        Some(Ipv6Addr::from(unsafe { path.dgid.raw }))
    }

    /// Starts to connect. `private_data` has at most 56 bytes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn connect(&self, private_data: &[u8], their_reads: u8, our_reads: u8) -> Result<(), Error> {
        let mut param = param(private_data, their_reads, our_reads);
        // SAFETY: alive, with a queue pair; the parameters and their private data are readable during the call.
        self.check(unsafe { (self.library.rdma_connect)(self.as_ptr(), &mut param) }, "connecting")
    }

    /// Accepts a request.
    ///
    /// # Errors
    /// The kernel refuses, or the peer has gone.
    pub fn accept(&self, private_data: &[u8], their_reads: u8, our_reads: u8) -> Result<(), Error> {
        let mut param = param(private_data, their_reads, our_reads);
        // SAFETY: alive, with a queue pair; the parameters and their private data are readable during the call.
        let accepted = unsafe { (self.library.rdma_accept)(self.as_ptr(), &mut param) };
        self.check(accepted, "accepting")
            .map_err(|error| refused(error.errno(), "accepting").unwrap_or(error))
    }

    /// Refuses a request.
    pub fn reject(&self) {
        // SAFETY: alive; no private data.
        unsafe { (self.library.rdma_reject)(self.as_ptr(), null(), 0) };
    }

    /// Ends a connection; the queue pair's work is flushed.
    pub fn disconnect(&self) {
        if !self.forked() {
            // SAFETY: alive.
            unsafe { (self.library.rdma_disconnect)(self.as_ptr()) };
        }
    }

    /// Moves the identifier and its events to another channel.
    ///
    /// # Errors
    /// The kernel refuses; the identifier stays where it is.
    pub fn migrate(&mut self, to: &Arc<Channel>) -> Result<(), Error> {
        let migrate = self.library.rdma_migrate_id;
        // SAFETY: both are alive, and no event of the identifier is unacknowledged.
        self.check(unsafe { migrate(self.as_ptr(), to.raw.as_ptr()) }, "a channel of its own")?;
        self.channel = to.clone();
        Ok(())
    }

    /// The addresses of this end and of the peer, where they are known.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        // SAFETY: alive; librdmacm fills both in before it tells of a connection.
        let route = unsafe { &(*self.as_ptr()).route.addr };
        // SAFETY: every member of these unions begins with the family; the largest is as large as the union.
        let local = unsafe { &route.src_addr_union.src_storage };
        // SAFETY: as above.
        let peer = unsafe { &route.dst_addr_union.dst_storage };
        (Sockaddr::stored(local), Sockaddr::stored(peer))
    }

    /// Whether this process was forked from the one that made it.
    pub fn forked(&self) -> bool {
        self.channel.generation != fork::generation()
    }

    /// For calls that need the identifier itself.
    pub fn as_ptr(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// The libraries.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    fn check(&self, result: c_int, what: &str) -> Result<(), Error> {
        if result == 0 { Ok(()) } else { Err(failed(what)) }
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        if !self.forked() {
            // SAFETY: its owner goes; its queue pair is destroyed (`Queues` owns a share of it), and every event of it
            // was acknowledged.
            unsafe { (self.library.rdma_destroy_id)(self.as_ptr()) };
        }
    }
}

fn param(private_data: &[u8], their_reads: u8, our_reads: u8) -> rdma_conn_param {
    rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: u8::try_from(private_data.len()).unwrap_or(0),
        responder_resources: their_reads,
        initiator_depth: our_reads,
        flow_control: 0,
        retry_count: RETRIES,
        // Receives are posted before the first message can come (RFC 8166 §3.3.1): a peer without one is broken.
        rnr_retry_count: 0,
        srq: 0,
        qp_num: 0,
    }
}

/// The errno of a call of these libraries that has just failed, in words.
pub fn failed(what: &str) -> Error {
    let error = std::io::Error::last_os_error();
    let text = format!("verbs: {what} failed: {}", os_text(&error));
    let kind = match Error::from(error).kind() {
        Kind::Os(libc::ECONNREFUSED) => Kind::Refused,
        kind => kind,
    };
    Error::new(kind, text)
}
