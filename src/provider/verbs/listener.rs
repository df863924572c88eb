//! Connection requests of peers: where they are awaited, and who is let in.
#![forbid(unsafe_code)]

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind};
use crate::provider::{self, Accepted, Knock, Options, Places, Shortage};
use crate::{fork, log_debug, log_warn, socket};

use super::cm::{Channel, Event, Id};
use super::locked::{Locked, lacks};
use super::queues::{self, Fabric};
use super::{Verbs, devices, some_device};

/// Requests that may wait for this process at a listener.
const BACKLOG: c_int = 128;
/// How many connections may have to go so that another one can be accepted.
const MAKE_ROOM: usize = 4;

/// Listens at the addresses of one TCP socket, on every device that one of them belongs to.
pub struct Listener {
    pub(super) channel: Arc<Channel>,
    pub(super) ids: Vec<Id>,
    pub(super) places: Places,
    pub(super) generation: u64,
    pub(super) lost: bool,
    pub(super) refusals: Refusals,
}

/// What the log is told of requests that were refused: a line a second, however many they are.
#[derive(Default)]
pub(super) struct Refusals {
    told: Option<Instant>,
    untold: u32,
}

impl Refusals {
    /// How many refusals the log was not told of since the last line; `None` if it is not yet time for another.
    pub(super) fn tell(&mut self, now: Instant) -> Option<u32> {
        if self.told.is_some_and(|told| now.duration_since(told) < Duration::from_secs(1)) {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

impl Listener {
    /// Listens at `places`. If iWARP devices are left out and there is one, it listens at every other device's addresses one
    /// by one: an iWARP device shares its ports with TCP, so a listener on all addresses would fail.
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
            // RDMA-CM treats a listener at a loopback address as one at any address.
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

    /// Checks who wants to connect, and to what. Returns the addresses of this end and of the peer, as the program is to see
    /// them.
    ///
    /// On RoCE and InfiniBand both come from the private data of the request, where anybody who can send a datagram can
    /// write anything. They cannot choose where our answers go: to the GID of the path, which on RoCE is an IP address
    /// too. A port proves nothing there: the first 1024, which over TCP indicate a privileged caller, are shown as other
    /// ports.
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
                    // Before anything is allocated for the connection: refusing a peer should cost little.
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

/// A port that no program takes for a privileged caller's.
fn unprivileged(port: u16) -> u16 {
    if port < 1024 { port + 1024 } else { port }
}
