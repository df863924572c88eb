//! The stream of bytes that a queue pair uses: that of the TCP connection, or rings of memory beside it.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

use crate::memory::shared::Shown;
use crate::memory::{Buf, IoVec, IoVecMut, Region};
use crate::provider::Bell;
use crate::provider::local::Rings;
use crate::socket;
use crate::wire::Segment;

/// A stream, in both directions.
pub(super) struct Stream {
    pub(super) socket: RawFd,
    rings: Option<Box<Rings>>,
}

impl Stream {
    /// The stream of a TCP connection.
    pub(super) fn new(socket: RawFd) -> Stream {
        Stream { socket, rings: None }
    }

    /// From here on the stream goes through memory.
    pub(super) fn share(&mut self, rings: Rings) {
        self.rings = Some(Box::new(rings));
    }

    /// Whether it goes through memory.
    pub(super) fn is_shared(&self) -> bool {
        self.rings.is_some()
    }

    /// As [`socket::send`].
    pub(super) fn send(&mut self, pieces: &[IoVec<'_>]) -> io::Result<usize> {
        match &mut self.rings {
            None => socket::send(self.socket, pieces),
            Some(rings) => rings.send(self.socket, pieces),
        }
    }

    /// As [`socket::receive`].
    pub(super) fn receive(&mut self, pieces: &mut [IoVecMut<'_>]) -> io::Result<usize> {
        match &mut self.rings {
            None => socket::receive(self.socket, pieces),
            Some(rings) => rings.receive(self.socket, pieces),
        }
    }

    /// As [`socket::tcp_mss`]: `None` where nothing is cut into segments.
    pub(super) fn segment(&self) -> Option<usize> {
        if self.is_shared() { None } else { socket::tcp_mss(self.socket) }
    }

    /// Bytes that were sent and that the peer has not taken yet.
    pub(super) fn unacknowledged(&self) -> u64 {
        self.rings.as_ref().map_or_else(|| socket::unacknowledged(self.socket), |rings| rings.unconsumed())
    }

    /// Whether it waits for room, of which it is told by becoming readable.
    pub(super) fn wants_room(&self) -> bool {
        self.rings.as_ref().is_some_and(|rings| rings.wants_room())
    }

    /// As [`crate::provider::QueuePair::claim`], once that has succeeded.
    pub(super) fn claim(&mut self) {
        if let Some(rings) = &mut self.rings {
            rings.claim();
        }
    }

    /// As [`crate::provider::QueuePair::spin`].
    pub(super) fn spin(&mut self) -> bool {
        self.rings.as_mut().is_some_and(|rings| rings.spin())
    }

    /// As [`crate::provider::QueuePair::drained`], when less has come than was asked for.
    pub(super) fn drained(&mut self) -> bool {
        self.rings.as_mut().is_none_or(|rings| rings.drained())
    }

    /// As [`crate::provider::QueuePair::has_come`].
    pub(super) fn has_come(&self) -> bool {
        self.rings.as_ref().is_none_or(|rings| rings.has_come())
    }

    /// As [`crate::provider::QueuePair::remind`].
    pub(super) fn remind(&mut self) -> Option<Instant> {
        let socket = self.socket;
        self.rings.as_mut().and_then(|rings| rings.remind(socket))
    }

    /// As [`crate::provider::QueuePair::tell_company`].
    pub(super) fn tell_company(&mut self, others: u32) {
        if let Some(rings) = &mut self.rings {
            rings.tell_company(others);
        }
    }

    /// As [`crate::provider::QueuePair::company`].
    pub(super) fn company(&self) -> u32 {
        self.rings.as_ref().map_or(0, |rings| rings.company())
    }

    /// As [`crate::provider::QueuePair::outbox`].
    pub(super) fn outbox(&mut self) -> Option<Buf> {
        self.rings.as_mut()?.outbox()
    }

    /// As [`crate::provider::QueuePair::show`].
    pub(super) fn show(&self, address: usize, handle: u32) -> Option<u64> {
        self.rings.as_ref()?.show(address, handle)
    }

    /// The offset at which this region begins for the peer.
    pub(super) fn base(&self, region: &Region) -> u64 {
        self.rings.as_ref().and_then(|rings| rings.offset_of(region)).unwrap_or(0)
    }

    /// As [`crate::provider::QueuePair::keep`].
    pub(super) fn keep(&mut self, region: Region, handle: u32) {
        if let Some(rings) = &mut self.rings {
            rings.keep(region, handle);
        }
    }

    /// The connection is over: the peer may still take what it can see.
    pub(super) fn end(&self) {
        if let Some(rings) = &self.rings {
            rings.end();
        }
    }

    /// As [`crate::provider::QueuePair::shown`].
    pub(super) fn shown(&self, segment: Segment) -> Option<Shown> {
        self.rings.as_ref()?.shown(segment)
    }

    /// As [`crate::provider::QueuePair::wakes`].
    pub(super) fn wakes(&self) -> u64 {
        self.rings.as_ref().map_or(0, |rings| rings.wakes())
    }

    /// As [`crate::provider::QueuePair::doze`].
    pub(super) fn doze(&mut self) -> Option<Bell> {
        self.rings.as_mut().and_then(|rings| rings.doze())
    }

    /// As [`crate::provider::QueuePair::rest`].
    pub(super) fn rest(&mut self) -> bool {
        self.rings.as_mut().is_none_or(|rings| rings.rest())
    }
}
