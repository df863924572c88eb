//! SVCXPRTs for single requests of a connection, beside the connection's own. They are used where the latter belongs to a request
//! that may be answered later, and where threads serve several requests at a time.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use super::{CALLBACK, OPS, Transport, copied, lock_if_free};
use crate::binding::Head;
use crate::connection::{Fate, Request, RequestId};
use crate::driver::{self, service_loop};
use crate::error::Error;
use crate::ffi::step;
use crate::fork;
use crate::sync::MutexGuard;
use crate::tirpc::{auth_stat, programs, threads};

/// Transports for requests that threads serve, each in its own time.
#[derive(Default)]
pub(super) struct Parts {
    idle: Vec<Arc<Transport>>,
    /// Those whose routines are running.
    lent: Vec<Weak<Transport>>,
    /// Those whose routines have returned without a reply, by request: the program may reply later, or has done so.
    late: BTreeMap<RequestId, Arc<Transport>>,
    /// Those that had waited longest when there were too many, oldest first. The program may still reply, in vain.
    passed_over: VecDeque<(RequestId, Arc<Transport>)>,
    /// Requests with RPCSEC_GSS, which libtirpc serves on the transport of the connection: one at a time.
    in_order: VecDeque<Request>,
    /// A thread is serving `in_order`.
    is_served: bool,
}

/// When the connection has ended, its transports for unanswered requests are kept.
impl Drop for Parts {
    fn drop(&mut self) {
        let late = std::mem::take(&mut self.late).into_values();
        let passed_over = std::mem::take(&mut self.passed_over).into_iter().map(|(_, part)| part);
        outlive(late.chain(passed_over));
    }
}

impl Transport {
    /// A transport of its own for a request of this connection.
    pub fn lend(&self) -> Arc<Transport> {
        let idle = self.parts().idle.pop();
        let part = idle.unwrap_or_else(|| self.make_part());
        self.parts().lent.push(Arc::downgrade(&part));
        part
    }

    fn make_part(&self) -> Arc<Transport> {
        // SAFETY: alive; nobody writes there once it is made.
        let own = unsafe { self.xprt().read() };
        // SAFETY: libtirpc's own string, or ours.
        let netid = unsafe { crate::ffi::cstr(own.xp_netid) }.unwrap_or(c"tcp");
        // SAFETY: our own netbuf.
        let local = unsafe { copied(&own.xp_ltaddr) };
        // SAFETY: as above.
        let remote = unsafe { copied(&own.xp_rtaddr) };
        let address = (own.xp_raddr, own.xp_addrlen);
        let (responder, server) = (self.responder.clone(), self.server.clone());
        let ops = if server.is_some() { &OPS } else { &CALLBACK };
        let whole = Some(self.this.clone());
        Transport::with(whole, responder, server, (self.fd, ops), netid, local, remote, address)
    }

    /// Takes back a transport whose routine has returned.
    pub fn take_back(&self, part: Arc<Transport>) {
        if self.is_lost() {
            return;
        }
        let unanswered = |part: &Transport| part.state_beside().deferred.as_ref().map(|request| request.id);
        let mut parts = self.parts();
        let Parts { idle, lent, late, .. } = &mut *parts;
        lent.retain(|other| other.strong_count() > 0 && other.as_ptr() != Arc::as_ptr(&part));
        match unanswered(&part) {
            Some(id) => late.insert(id, part),
            None => return idle.push(part),
        };
        threads::put_off();
        if late.len() <= driver::LATE {
            return;
        }
        if self.answered_late.swap(false, Relaxed) || self.children.is_shared() {
            let ids: Vec<RequestId> = late.keys().copied().collect();
            drop(parts);
            let fates = ids.into_iter().map(|id| (id, self.fate(id))).collect::<Vec<_>>();
            parts = self.parts();
            let Parts { idle, late, passed_over, .. } = &mut *parts;
            for (id, fate) in fates {
                if fate == Fate::Waits {
                    continue;
                }
                let Some(part) = late.remove(&id) else { continue };
                if fate == Fate::Answered || unanswered(&part).is_none() {
                    part.state_beside().deferred = None;
                    idle.push(part);
                } else {
                    passed_over.push_back((id, part));
                }
            }
        }
        let Parts { idle, late, passed_over, .. } = &mut *parts;
        // As the connection itself does.
        if late.len() > driver::LATE {
            passed_over.extend(late.pop_first());
        }
        // Not reused at once: a reply to the old request would answer the new one.
        let again = passed_over.len().saturating_sub(driver::LATE);
        let again: Vec<_> = passed_over.drain(..again).collect();
        let Some(latest) = again.iter().map(|(id, _)| *id).max() else { return };
        for (_, part) in again {
            part.state_beside().deferred = None;
            idle.push(part);
        }
        drop(parts);
        self.state().deferred.take_if(|request| request.id < latest);
    }

    /// An SVCXPRT of its own for a request, if the connection's belongs to a request that may still be answered; to be
    /// [taken back](Transport::take_back). `knows`: whether there is a routine for a program and version.
    pub fn lend_beside(
        &self,
        request: &Request,
        knows: impl FnOnce(u32, u32) -> bool,
    ) -> Option<Arc<Transport>> {
        if !self.has_put_off() {
            return None;
        }
        let [program, version, _, flavor] =
            request.message.first().and_then(|piece| Head::names(&piece[..]))?;
        (flavor != auth_stat::RPCSEC_GSS as u32 && knows(program, version)).then(|| self.lend())
    }

    /// Whether no thread holds the lock of a single request whose routine runs, or has just returned.
    pub(super) fn are_lent_free(&self) -> bool {
        let is_free = |part: Arc<Transport>| lock_if_free(&part.state).is_some();
        let parts = lock_if_free(&self.parts);
        parts.is_some_and(|parts| parts.lent.iter().filter_map(Weak::upgrade).all(is_free))
    }

    /// What has become of a request that was put off. The caller holds no lock of the connection.
    fn fate(&self, id: RequestId) -> Fate {
        self.responder.upgrade().map_or(Fate::PassedOver, |responder| responder.fate(id))
    }

    /// Whether the connection's own SVCXPRT belongs to a request that the program may still answer.
    fn has_put_off(&self) -> bool {
        let own = {
            let state = self.state();
            match &state.deferred {
                _ if !state.open.is_empty() => return true,
                None => return false,
                Some(request) => request.id,
            }
        };
        let is_answered = self.children.is_shared() && self.fate(own) == Fate::Answered;
        if is_answered {
            self.state().deferred.take_if(|request| request.id == own);
        }
        !is_answered
    }

    pub(super) fn parts(&self) -> MutexGuard<'_, Parts> {
        fork::lock(&self.parts, self.number())
    }

    /// Queues a request behind others of the connection that are served in order. Returns whether nobody serves them yet.
    pub fn put_in_order(&self, request: Request) -> bool {
        let mut parts = self.parts();
        parts.in_order.push_back(request);
        !std::mem::replace(&mut parts.is_served, true)
    }

    /// The next of these requests.
    pub fn next_in_order(&self) -> Option<Request> {
        self.parts().in_order.pop_front()
    }

    /// One of them was served. Returns whether there are more, for a thread to serve.
    pub fn goes_on_in_order(&self) -> bool {
        let mut parts = self.parts();
        parts.is_served = !parts.in_order.is_empty();
        parts.is_served
    }
}

/// Keeps the transports of requests whose connection has ended: the program is not told and may still reply.
pub fn outlive(late: impl Iterator<Item = Arc<Transport>>) {
    /// At most this many, over all connections.
    const MOST: usize = 1024;
    /// Oldest first.
    static ENDED: fork::Lock<VecDeque<Arc<Transport>>> = fork::Lock::new();
    let late = late.filter(|part| !part.is_lost() && part.state_beside().deferred.is_some());
    let mut late = late.inspect(|part| _ = part.without_fd()).peekable();
    if late.peek().is_some() {
        let mut ended = ENDED.lock();
        ended.extend(late);
        let over = ended.len().saturating_sub(MOST);
        let gone: Vec<Arc<Transport>> = ended.drain(..over).collect();
        drop(ended);
        drop(gone);
    }
}

/// A request that is served on an SVCXPRT of its own, in libtirpc's loop but not by it.
pub(super) struct Beside {
    pub part: Arc<Transport>,
    pub request: Request,
}

impl Beside {
    /// The routine may throw or longjmp.
    pub fn serve(self, frame: usize) -> Result<(), Error> {
        let Beside { part, request } = self;
        let dispatching = step(|| Ok(service_loop::PROGRAM.begin(frame, part.this.clone())))?;
        part.dispatch(request, programs::find, Some(dispatching));
        Ok(())
    }
}
