//! How a connection begins: over which device, and with what.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{Config, Crc, Provider, Version};
use crate::connection::{Role, receive_margin};
use crate::error::{Error, Kind};
use crate::memory::{AREAS_MAX, Areas, areas};
use crate::process;
use crate::provider::iwarp::{self, Options};
use crate::provider::{QueuePair, verbs};
use crate::socket;
use crate::wait;
use crate::wire::header::Versions;
use crate::wire::private_data::PrivateData;

use super::client::Client;
use super::link::Link;
use super::{Mask, REPLY_HEADER, memory};

/// How long the passive side waits for the MPA Request and the first message of a peer (RFC 5044 §7.1.2: "SHOULD"), and
/// the active side for a startup.
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// The room for replies on a connection over an adapter, where no setting says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Little: the calls of the program that have long replies have bindings, it is to be hoped.
    Little,
    /// As much as over any other device: the program has no bindings.
    Same,
}

impl Room {
    /// Memory for it, which the connection has from its beginning.
    ///
    /// # Errors
    /// `ENOMEM`: so much cannot be locked. Where nothing but adapters may be used, it is less then.
    fn areas(self, config: &Config, most: usize) -> Result<Option<Arc<Areas>>, Error> {
        if self == Room::Little || config.max_reply.is_some() {
            return Ok(None);
        }
        let whole = config.max_reply(false) + REPLY_HEADER;
        if let Some(areas) = Areas::new(whole, most)? {
            return Ok(Some(areas));
        }
        let left = areas::left(most);
        if config.provider == Provider::Verbs {
            let less = left & !4095;
            return if less > config.max_reply(true) { Ok(Areas::new(less, most)?) } else { Ok(None) };
        }
        let text = format!(
            "{whole} bytes for replies cannot be locked, for which {left} are left of {most}: {}",
            verbs::NEEDS_ROOM
        );
        Err(Error::new(Kind::Os(libc::ENOMEM), text))
    }

    /// Bytes that this process may lock for replies: what slabs leave.
    fn most() -> usize {
        process::lockable().map_or(AREAS_MAX, |bytes| AREAS_MAX.min(bytes - bytes / 2))
    }
}

/// A connection over an adapter that is being made.
pub struct Attempt {
    pub(super) device: Box<dyn QueuePair>,
    to: SocketAddr,
    room: Room,
    config: &'static Config,
}

impl Attempt {
    /// Whether there is an adapter of a kind that the configuration allows.
    pub fn is_possible(config: &Config) -> bool {
        match config.provider {
            Provider::Auto => verbs::present(false) && !verbs::are_refused(),
            Provider::Verbs => true,
            Provider::Iwarp => false,
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// No adapter leads there. `ENOMEM`: there may be one, but not the room.
    pub fn start(to: SocketAddr, room: Room, config: &'static Config) -> Result<Attempt, Error> {
        let areas = room.areas(config, Room::most())?;
        Ok(Attempt { device: verbs::connect(to, &adapter_options(config), areas)?, to, room, config })
    }

    /// Waits for its end. False when it has none by `deadline`.
    ///
    /// # Errors
    /// It has failed.
    pub fn wait(&mut self, deadline: Instant, mask: Mask<'_>) -> Result<bool, Error> {
        establish(&mut *self.device, deadline, mask)
    }

    /// The connection, when `wait` has said that it is there. `fd` is the socket that it is known by.
    pub fn into_client(self, fd: RawFd) -> Arc<Client> {
        let Attempt { device, to, room, config } = self;
        let memory = memory(config);
        let link = Link::new(Role::Client, config, versions(config), device, &memory);
        Client::with(fd, Some(to), Some(room), config, link)
    }
}

/// The versions that the configuration allows.
pub(super) fn versions(config: &Config) -> Versions {
    match config.version {
        Version::One => Versions::ONE,
        Version::Auto => Versions::BOTH,
        Version::Two => Versions::TWO,
    }
}

/// What a connection over an adapter is made with.
pub fn adapter_options(config: &Config) -> verbs::Options {
    let (receive, slab) = config.receive_sizes(true);
    verbs::Options {
        inline: config.inline,
        receive,
        slab,
        remote_invalidation: config.remote_invalidation,
        credits: config.credits.saturating_add(config.reverse_credits),
        margin: receive_margin(versions(config)),
        iwarp: config.provider == Provider::Verbs,
    }
}

/// Drives a startup until it is done. False when it is not by `deadline`.
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

/// What the MPA startup of a socket offers.
pub(super) fn options(config: &Config, fd: RawFd) -> Options {
    // The CRC protects what TCP's checksum lets through on a wire; towards this host's own address there is no wire,
    // and the kernel computes no TCP checksum there either.
    let own_host = socket::own_host(fd);
    let crc = match config.crc {
        Crc::Yes => true,
        Crc::No => false,
        Crc::Auto => !own_host,
    };
    let private_data = PrivateData {
        remote_invalidation: iwarp::REMOTE_INVALIDATION && config.remote_invalidation,
        send_size: config.inline,
        receive_size: config.inline,
    };
    Options { crc, private_data: private_data.encode().to_vec(), ..Options::default() }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::driver::client::tests::pair;

    #[test]
    fn the_peer_is_told_whether_it_may_invalidate() {
        let (socket, _peer) = pair().unwrap();
        for remote_invalidation in [true, false] {
            let config = Config { remote_invalidation, ..Config::default() };
            let told = PrivateData::find(&options(&config, socket.as_raw_fd()).private_data).unwrap();
            assert_eq!(told.remote_invalidation, remote_invalidation);
            assert_eq!(adapter_options(&config).remote_invalidation, remote_invalidation);
        }
    }

    #[test]
    fn a_program_without_bindings_has_the_same_room_over_an_adapter_or_is_told_what_lacks() {
        let _alone = areas::ALONE.lock().unwrap();
        let config = |provider| Config { provider, ..Config::default() };
        let (auto, only) = (config(Provider::Auto), config(Provider::Verbs));
        let whole = (16 << 20) + REPLY_HEADER;
        let size = |room: Room, config: &Config, most| {
            room.areas(config, most).map(|areas| areas.map(|areas| areas.size()))
        };
        assert_eq!(size(Room::Same, &auto, whole).unwrap(), Some(whole));
        assert_eq!(size(Room::Same, &only, whole).unwrap(), Some(whole));
        assert_eq!(size(Room::Little, &auto, 0).unwrap(), None);
        assert_eq!(
            size(Room::Same, &Config { max_reply: Some(1024), ..config(Provider::Auto) }, 0).unwrap(),
            None
        );
        let error = size(Room::Same, &auto, 4 << 20).unwrap_err();
        assert_eq!(error.kind(), Kind::Os(libc::ENOMEM));
        assert!(
            error
                .text()
                .starts_with("16781312 bytes for replies cannot be locked, for which 4194304 are left")
        );
        // Nothing else is there then.
        assert_eq!(size(Room::Same, &only, (4 << 20) + 5).unwrap(), Some(4 << 20));
        assert_eq!(size(Room::Same, &only, 256 << 10).unwrap(), None);
    }

    #[test]
    fn an_adapter_has_room_for_the_receives_that_a_peer_may_ask_for_and_says_nothing_of_it() {
        let max_inline = Some(16 << 10);
        let config = Config { inline: 1024, version: Version::Auto, max_inline, ..Config::default() };
        let verbs::Options { inline, receive, slab, .. } = adapter_options(&config);
        assert_eq!((inline, receive, slab), (1024, 4096, 16 << 10));
    }
}
