//! What the other end is like (draft-dnoveck-nfsv4-rpcrdma-xcharext-01), and waiting for that to change.
//!
//! The engine keeps one request at a time; several threads may wait for the same one. What became of it is noted for each of
//! them as soon as it comes in, because the engine forgets it with the next request, and with the connection.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::connection::characteristics::{Endpoint, Wish};
use crate::error::{Error, Kind};
use crate::wire::characteristics::Characteristic;
use crate::wire::v1;

use super::link::Link;

/// What is known of the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The version of RPC-over-RDMA that our calls are made in; `None` before it is agreed.
    pub version: Option<u32>,
    /// Whether the peer knows the transport characteristics; `None` before it has shown that.
    pub extension: Option<bool>,
    /// What the peer is like.
    pub endpoint: Endpoint,
    /// How often it has said something about itself on this connection.
    pub updates: u32,
    /// Bytes of our Receives, as the peer was told.
    pub own_receive_size: usize,
    /// Distinguishes the connections of one requester.
    pub connection: usize,
}

impl Peer {
    /// What is known of the peer of the connection with this number.
    ///
    /// # Errors
    /// The reason for the close when the connection is closed.
    pub(super) fn of(link: &Link, connection: usize) -> Result<Peer, Error> {
        if let Some(error) = link.lost() {
            return Err(error.clone());
        }
        let (engine, version) = (&link.engine, link.engine.version());
        let known = engine.characteristics().known();
        Ok(Peer {
            version,
            extension: if version == Some(v1::VERSION) { Some(false) } else { known },
            endpoint: engine.peer(),
            updates: engine.characteristics().updates(),
            own_receive_size: engine.thresholds().1,
            connection,
        })
    }
}

/// Requests to the peer that threads wait for.
#[derive(Default)]
pub(super) struct Requests {
    next: u32,
    /// By their numbers: what was asked for, and what became of that.
    waited: HashMap<u32, (Characteristic, Option<Result<Wish, Error>>)>,
}

impl Requests {
    /// Asks the peer to change a characteristic. The number returned is for the other functions.
    ///
    /// # Errors
    /// As [`Connection::request`].
    pub fn begin(&mut self, link: &mut Link, what: Characteristic) -> Result<u32, Error> {
        ask(link, what)?;
        link.flush();
        self.next = self.next.wrapping_add(1);
        self.waited.insert(self.next, (what, None));
        Ok(self.next)
    }

    /// The requests of which nothing has become yet.
    fn open(&mut self) -> impl Iterator<Item = (Characteristic, &mut Option<Result<Wish, Error>>)> {
        self.waited
            .values_mut()
            .map(|(what, outcome)| (*what, outcome))
            .filter(|(_, outcome)| outcome.is_none())
    }

    /// Notes what has become of the requests.
    pub fn settle(&mut self, link: &mut Link) {
        if let Some(error) = link.lost() {
            return self.end(error);
        }
        let (wish, version) = (link.engine.characteristics().wish(), link.engine.version());
        for (what, outcome) in self.open() {
            *outcome = match wish {
                // The version was refused, and nothing was asked.
                Some((_, Wish::Rejected)) if version == Some(v1::VERSION) => ask(link, what).err().map(Err),
                Some((wanted, end @ (Wish::Done | Wish::Rejected))) if wanted == what => Some(Ok(end)),
                _ => None,
            };
        }
    }

    /// The connection is lost: ends the requests.
    pub fn end(&mut self, error: &Error) {
        let text = format!("the connection was lost before the peer answered: {error}");
        self.open().for_each(|(_, outcome)| {
            *outcome = Some(Err(Error::new(Kind::ConnectionLost, text.clone())));
        });
    }

    /// Asks on a new connection, because no version was agreed on the one before.
    pub fn repeat(&mut self, link: &mut Link) {
        self.open().for_each(|(what, outcome)| *outcome = ask(link, what).err().map(Err));
    }

    /// Whether anybody waits.
    pub fn is_empty(&self) -> bool {
        self.waited.is_empty()
    }

    /// Whether something has become of a request.
    pub fn is_over(&self, number: u32) -> bool {
        self.waited.get(&number).is_some_and(|(_, outcome)| outcome.is_some())
    }

    /// What has become of a request that nobody waits for any more.
    pub fn take(&mut self, number: u32) -> Result<Wish, Error> {
        self.waited.remove(&number).and_then(|(_, outcome)| outcome).unwrap_or(Ok(Wish::Pending))
    }
}

/// Asks the peer, unless it has been asked for the same already.
fn ask(link: &mut Link, what: Characteristic) -> Result<(), Error> {
    match link.engine.characteristics().wish() {
        Some((wanted, Wish::Asked | Wish::Pending)) if wanted == what && link.engine.closed().is_none() => {
            Ok(())
        }
        _ => link.engine.request(what),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::thread::{Scope, ScopedJoinHandle, scope};

    use super::super::client::tests::{PATIENCE, pair, until};
    use super::*;
    use crate::config::Config;
    use crate::config::Version;
    use crate::connection::Request;
    use crate::driver::Callee;
    use crate::driver::Caller;
    use crate::driver::Mask;
    use crate::driver::callback;
    use crate::driver::client::Client;
    use crate::driver::server::Server;
    use crate::driver::server::{Shared, locked};
    use crate::driver::start::establish;
    use crate::driver::start::tests::iwarp_options;
    use crate::provider::iwarp::Iwarp;
    use crate::wait;

    use crate::sync::Mutex;
    use crate::wire::characteristics::Backward;
    use std::sync::Arc;
    use std::time::Duration;
    use std::time::Instant;

    const LARGER: Characteristic = Characteristic::ReceiveSize(16384);

    fn config(version: Version) -> &'static Config {
        Box::leak(Box::new(Config { version, inline: Some(4096), ..Config::default() }))
    }

    fn next(listener: &TcpListener) -> TcpStream {
        assert!(wait::until(listener.as_raw_fd(), wait::IN, Some(PATIENCE), None).unwrap());
        listener.accept().unwrap().0
    }

    fn accept(socket: &TcpStream, version: Version) -> Shared {
        Mutex::new(Server::accept(socket.as_raw_fd(), config(version)).unwrap())
    }

    /// Answers calls until the connection ends, or `enough` says so after something has come.
    fn serve(server: &Shared, enough: impl Fn(&Server) -> bool) {
        loop {
            let request = locked(server).receive();
            if let Some(Request { id, message, .. }) = request {
                let mut reply = server.message().unwrap();
                reply.extend(&message[0]).unwrap();
                // Now it is a reply.
                reply[7] = 1;
                server.reply(id, reply.into()).unwrap();
            }
            if enough(&locked(server)) || locked(server).closed().is_some() {
                return;
            }
            locked(server).push();
            let fd = locked(server).fd();
            wait::until(fd, wait::IN, Some(PATIENCE), None).unwrap();
        }
    }

    fn for_ever(_: &Server) -> bool {
        false
    }

    /// A call has been answered.
    fn has_answered(server: &Server) -> bool {
        server.received > 0
    }

    /// When a test fails, this lets go of what waits for the other end.
    struct Hangup<'a>(&'a TcpStream);

    impl Drop for Hangup<'_> {
        fn drop(&mut self) {
            let _ = self.0.shutdown(Shutdown::Both);
        }
    }

    fn open(socket: &TcpStream, version: Version) -> Arc<Client> {
        Client::open(socket.as_raw_fd(), config(version), Instant::now() + PATIENCE, None).unwrap()
    }

    fn call(client: &Client) {
        let xid = client.fresh_xid();
        let mut message = Caller::message(client).unwrap();
        message.extend(&[xid.0.to_be_bytes(), [0; 4]].concat()).unwrap();
        client.call(xid, message.into(), 8, Vec::new(), Instant::now() + PATIENCE, None).unwrap();
    }

    fn ask(client: &Client, what: Characteristic) -> Result<Wish, Error> {
        client.request(what, Instant::now() + PATIENCE, None)
    }

    /// Threads that wait for the same request.
    fn asking<'a>(scope: &'a Scope<'a, '_>, client: &Arc<Client>) -> Vec<Asking<'a>> {
        let client = |_| client.clone();
        (0..3).map(client).map(|client| scope.spawn(move || ask(&client, LARGER))).collect()
    }

    type Asking<'a> = ScopedJoinHandle<'a, Result<Wish, Error>>;

    #[test]
    fn what_a_peer_is_asked_for_before_the_first_call_is_done_when_the_version_is_agreed() {
        let (to_server, to_client) = pair().unwrap();
        let server = accept(&to_client, Version::Auto);
        scope(|scope| {
            let _hangup = Hangup(&to_server);
            scope.spawn(|| serve(&server, for_ever));
            let client = open(&to_server, Version::Auto);
            assert!(client.describe().ends_with("version 2 if the peer speaks it"), "{}", client.describe());
            let before = client.peer(false).unwrap();
            assert_eq!((before.version, before.extension, before.updates), (None, None, 0));
            assert_eq!(before.endpoint.receive_size, 1024);

            assert_eq!(ask(&client, LARGER).unwrap(), Wish::Done);
            let after = client.peer(true).unwrap();
            assert_eq!((after.version, after.extension), (Some(2), Some(true)));
            assert_eq!((after.endpoint.receive_size, after.endpoint.backward), (16384, Backward::General));
            assert_eq!(after.own_receive_size, 4096);
            // A size that is too large is refused, and changes nothing.
            assert_eq!(ask(&client, Characteristic::ReceiveSize(1 << 20)).unwrap(), Wish::Rejected);
            assert_eq!(client.peer(true).unwrap().endpoint.receive_size, 16384);
            let error = ask(&client, Characteristic::ReceiveSize(1000)).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
        });
    }

    #[test]
    fn in_version_one_a_request_is_an_error_that_names_the_setting_and_the_rest_is_known() {
        for (own, other) in [(Version::Auto, Version::One), (Version::One, Version::Auto)] {
            let (to_server, to_client) = pair().unwrap();
            let server = accept(&to_client, other);
            scope(|scope| {
                let _hangup = Hangup(&to_server);
                scope.spawn(|| serve(&server, for_ever));
                let client = open(&to_server, own);
                let error = ask(&client, LARGER).unwrap_err();
                assert!(error.text().contains("RPCRDMA_VERSION=auto"), "{error}");
                let error = client.raise_receives(16384).unwrap_err();
                assert!(error.text().contains("RPCRDMA_VERSION=auto"), "{error}");
                let peer = client.peer(true).unwrap();
                assert_eq!((peer.version, peer.extension, peer.updates), (Some(1), Some(false), 0));
                assert_eq!((peer.endpoint.receive_size, peer.own_receive_size), (4096, 4096));
                assert!(peer.endpoint.remote_invalidation && peer.endpoint.backward == Backward::Unknown);
            });
        }
    }

    /// With a peer that drops what it does not know: the request outlasts the connection that was only an offer.
    #[test]
    fn a_request_made_before_the_version_is_agreed_waits_for_the_connection_that_agrees() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to_server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        scope(|scope| {
            let _hangup = Hangup(&to_server);
            scope.spawn(|| {
                let first = next(&listener);
                let mut device =
                    Iwarp::responder(first.as_raw_fd(), iwarp_options(config(Version::One), 0)).unwrap();
                assert!(establish(&mut device, Instant::now() + PATIENCE, None).unwrap());
                drop((device, first));
                let second = next(&listener);
                serve(&accept(&second, Version::One), for_ever);
            });
            let client = open(&to_server, Version::Auto);
            let error = ask(&client, LARGER).unwrap_err();
            assert!(error.text().contains("RPCRDMA_VERSION=auto"), "{error}");
            assert_eq!((client.connections(), client.peer(true).unwrap().version), (2, Some(1)));
        });
    }

    #[test]
    fn threads_that_ask_for_the_same_get_one_answer_and_others_are_refused_meanwhile() {
        let (to_server, to_client) = pair().unwrap();
        let server = accept(&to_client, Version::Auto);
        scope(|scope| {
            let _hangup = Hangup(&to_server);
            let served = scope.spawn(|| serve(&server, has_answered));
            let client = open(&to_server, Version::Auto);
            call(&client);
            served.join().unwrap();
            // Nobody answers.
            assert_eq!(client.request(LARGER, Instant::now(), None).unwrap(), Wish::Pending);
            let asking = asking(scope, &client);
            until(&client, |state| state.session.calls.requests.waited.len() == 3);
            let error = ask(&client, Characteristic::RemoteInvalidation(true)).unwrap_err();
            assert!(error.text().contains("not settled"), "{error}");
            let before = Instant::now();
            scope.spawn(|| serve(&server, for_ever));
            for thread in asking {
                assert_eq!(thread.join().unwrap().unwrap(), Wish::Done);
            }
            assert!(before.elapsed() < PATIENCE / 2, "they were woken");
            assert!(client.lock().session.calls.requests.is_empty());
            assert_eq!(ask(&client, Characteristic::RemoteInvalidation(false)).unwrap(), Wish::Rejected);
        });
    }

    #[test]
    fn a_connection_that_is_lost_ends_the_request_and_says_so() {
        let (to_server, to_client) = pair().unwrap();
        let server = accept(&to_client, Version::Auto);
        scope(|scope| {
            let _hangup = Hangup(&to_server);
            let served = scope.spawn(|| serve(&server, has_answered));
            let client = open(&to_server, Version::Auto);
            call(&client);
            served.join().unwrap();
            let asking = asking(scope, &client);
            until(&client, |state| state.session.calls.requests.waited.len() == 3);
            to_client.shutdown(Shutdown::Both).unwrap();
            for thread in asking {
                let error = thread.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), Kind::ConnectionLost);
                assert!(
                    error.text().starts_with("the connection was lost before the peer answered"),
                    "{error}"
                );
            }
            assert!(client.peer(true).is_err());
        });
    }

    /// Serves nothing.
    struct Silent;

    impl callback::Serve for Silent {
        fn serve(&self, _: Request, _: Mask<'_>) {}
    }

    #[test]
    fn receives_that_were_made_longer_are_so_on_the_next_connection_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to_server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let told = |server: &Server| server.peer().is_ok_and(|peer| peer.endpoint.receive_size == 16384);
        scope(|scope| {
            let _hangup = Hangup(&to_server);
            let served = scope.spawn(move || {
                for _ in 0..2 {
                    let socket = next(&listener);
                    let server = accept(&socket, Version::Auto);
                    serve(&server, told);
                    assert!(told(&locked(&server)), "the client has told of its Receives");
                }
            });
            let client = open(&to_server, Version::Auto);
            client.start_serving(Arc::new(Silent), 1, 1).unwrap();
            client.raise_receives(16384).unwrap();
            assert_eq!(client.raise_receives(1 << 20).unwrap_err().kind(), Kind::Invalid);
            let end = Instant::now() + PATIENCE;
            while !served.is_finished() {
                assert!(Instant::now() < end, "in time");
                let soon = Instant::now() + Duration::from_millis(20);
                let _ = client.poll_callbacks(soon, None);
            }
            assert!(client.connections() >= 2);
        });
    }
}
