//! The beginning of a connection: the MPA Request and Reply (RFC 5044 §7.1, RFC 6581) and, between two ends on one host,
//! the question whether they share memory.
#![forbid(unsafe_code)]

use std::io;

use super::ddp::Fault;
use super::mpa::{Offer, Refusal, StartFrame, Terms, Which};
use super::receive::SMALL;
use super::{Iwarp, Options, lost};
use crate::error::{Error, Kind, os_text};
use crate::memory::IoVecMut;
use crate::provider::NAP;
use crate::provider::local::{self, Answer, Offered, Sealed, Sharing};
use crate::socket;

// One byte, because every message asks for it.
#[repr(u8)]
pub(super) enum Stage {
    AwaitRequest,
    AwaitReply,
    /// The Reply, how much of it the socket has taken, and what comes after it.
    SendReply(Vec<u8>, usize, Result<Terms, Error>),
    /// Waiting for the peer to share memory, or to decline.
    AwaitAnswer(Terms),
    /// Waiting for the peer, which has been given memory, to say whether it can use it.
    AwaitShared(Terms, Box<Sealed>),
    Open,
}

impl Iwarp {
    pub(super) fn start(&mut self) -> Result<bool, Error> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Open) {
                Stage::Open => return Ok(true),
                Stage::SendReply(reply, sent, then) => {
                    let n = match self.send(&reply[sent..]) {
                        Ok(n) => n,
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                        Err(e) => return Err(lost(format!("sending the MPA Reply failed: {e}"))),
                    };
                    if sent + n < reply.len() {
                        self.stage = Stage::SendReply(reply, sent + n, then);
                        return Ok(false);
                    }
                    let terms = then?;
                    match self.offered {
                        Some(_) => self.stage = Stage::AwaitAnswer(terms),
                        None => self.agree(&terms)?,
                    }
                }
                Stage::AwaitAnswer(terms) => {
                    let spins = self.options.spins;
                    // The peer has answered before it says anything.
                    if startup(socket::peek(self.stream.socket).map(|said| said.map_or(0, |_| 1)))?.is_none()
                    {
                        self.stage = Stage::AwaitAnswer(terms);
                        return Ok(false);
                    }
                    let answer = self.offered.as_mut().map_or(Answer::Declined, |it| it.answer(spins));
                    let (rings, said) = match answer {
                        Answer::Accepted(rings) => (Some(rings), Some(local::SHARED)),
                        Answer::Useless => (None, Some(0)),
                        Answer::Declined => (None, None),
                        Answer::Taken => return Err(lost("a forked process goes on with this connection")),
                    };
                    if let Some(said) = said {
                        let mut called = [0];
                        let called = &mut [IoVecMut::from_mut(&mut called)];
                        at_once(socket::receive(self.stream.socket, called))?;
                        at_once(self.send(&[said]))?;
                    }
                    rings.into_iter().for_each(|rings| self.stream.share(rings));
                    self.agree(&terms)?;
                }
                Stage::AwaitShared(terms, sealed) => {
                    let mut said = [0];
                    let came = socket::receive(self.stream.socket, &mut [IoVecMut::from_mut(&mut said)]);
                    if startup(came)?.is_none() {
                        self.stage = Stage::AwaitShared(terms, sealed);
                        return Ok(false);
                    }
                    if said == [local::SHARED] {
                        self.stream.share(sealed.begin(self.options.spins));
                    }
                    self.begin(&terms)?;
                }
                stage => {
                    let expected =
                        if matches!(stage, Stage::AwaitReply) { Which::Reply } else { Which::Request };
                    self.stage = stage;
                    match StartFrame::decode(self.receive.unread(), expected)? {
                        Some((frame, length)) => {
                            self.receive.start += length;
                            self.take_start_frame(frame)?;
                        }
                        None => {
                            if !self.read_start_frame()? {
                                return Ok(false);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Reads a part of a startup frame; false when there is nothing to read now.
    fn read_start_frame(&mut self) -> Result<bool, Error> {
        self.receive.have_buffer()?;
        let end = self.receive.end;
        self.syscalls += 1;
        match socket::receive(self.stream.socket, &mut [IoVecMut::from_mut(&mut self.receive.buffer[end..])])
        {
            Ok(0) => Err(lost("the peer closed the connection during the MPA startup")),
            Ok(n) => {
                self.receive.end += n;
                self.count_received(n);
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(lost(format!("the connection was lost during the MPA startup: {}", os_text(&e)))),
        }
    }

    fn take_start_frame(&mut self, frame: StartFrame) -> Result<(), Error> {
        let offer = self.options.offer();
        if frame.which == Which::Reply {
            // The rest of the buffer holds FPDUs.
            return match frame.accept(&offer, self.options.revision) {
                Ok(terms) => {
                    self.private_data = frame.private_data;
                    if let Some(asked) = self.asked.take()
                        && let Some(sealed) = asked.end(&self.private_data)
                    {
                        at_once(self.send(&[0]))?;
                        self.stage = Stage::AwaitShared(terms, Box::new(sealed));
                        return Ok(());
                    }
                    self.begin(&terms)
                }
                Err(Refusal::Leave(error)) => Err(error),
                Err(Refusal::InsufficientIrd(error)) => {
                    self.transmit.crc = frame.crc || offer.crc;
                    self.transmit.may_send = true;
                    self.send_terminate(Fault::INSUFFICIENT_IRD, None);
                    Err(error)
                }
            };
        }
        // The initiator waits for the Reply before it sends an FPDU (RFC 5044 §7.1.2: "Since the receiver's ability to
        // deal with Markers is unknown until the Request and Reply Frames have been received, sending FPDUs before
        // this occurs is not possible.")
        if !self.receive.unread().is_empty() {
            return Err(Error::new(Kind::Protocol, "MPA: bytes after the Request, before the Reply"));
        }
        if self.options.sharing != Sharing::Never && !frame.markers {
            let must = self.options.sharing == Sharing::Must;
            let offered = Offered::new(&frame.private_data, &mut self.options.private_data, must);
            self.offered = offered.map(Box::new);
        }
        let (reply, terms) = frame.answer(&offer, &self.options.private_data);
        let then = if reply.reject {
            Err(Error::new(Kind::Protocol, "MPA: the peer wants markers, which are not implemented"))
        } else {
            Ok(terms)
        };
        self.private_data = frame.private_data;
        self.stage = Stage::SendReply(reply.encode(), 0, then);
        Ok(())
    }

    /// The initiator's end of the startup.
    fn begin(&mut self, terms: &Terms) -> Result<(), Error> {
        self.agree(terms)?;
        self.transmit.may_send = true;
        self.naps = !self.stream.is_shared() && socket::set_patience(self.stream.socket, NAP).is_ok();
        Ok(())
    }

    fn agree(&mut self, terms: &Terms) -> Result<(), Error> {
        if self.options.sharing == Sharing::Must && !self.stream.is_shared() {
            return Err(local::missing());
        }
        (self.asked, self.offered) = (None, None);
        self.stage = Stage::Open;
        self.ird = usize::from(terms.ird);
        self.transmit.ord = usize::from(terms.ord);
        self.transmit.crc = terms.crc;
        self.transmit.look_at_path(&self.stream);
        self.receive.small_path = self.transmit.fpdu() < SMALL;
        Ok(())
    }
}

impl Options {
    pub(super) fn offer(&self) -> Offer {
        Offer { crc: self.crc, ird: self.ird, ord: self.ord }
    }
}

/// The outcome of a call on the socket during the startup; `None`: nothing yet.
fn startup(result: io::Result<usize>) -> Result<Option<usize>, Error> {
    match result {
        Ok(0) => Err(lost("the peer closed the connection during the startup")),
        Ok(n) => Ok(Some(n)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(lost(format!("the connection was lost during the startup: {e}"))),
    }
}

/// The same where the socket has the byte, or room for one more.
fn at_once(result: io::Result<usize>) -> Result<(), Error> {
    startup(result)?
        .map(drop)
        .ok_or_else(|| lost("the socket did not take or give a byte during the startup"))
}
