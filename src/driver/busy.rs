//! Connections that the library's own service loop looks at itself, because they are busy and a look costs nothing: those that
//! share memory with their peers, which then need not wake anybody.
//!
//! Of the others their descriptors tell. Where several of them are served, what comes next is near: the loop asks a few times before
//! it sleeps, so that none of their clients has to wake it for each call ([`asks`]).
//!
//! A connection comes here when it has served and nothing more has come ([`Next::Soon`](super::Next::Soon)), and leaves when
//! something has, or when the loop goes to sleep: then it rests, and its descriptor tells what comes.
#![forbid(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use super::server::{Shared, has_come, rests};
use super::service_loop::PROGRAM;
pub use super::spin::offer;
use super::spin::{self, ALONE, LONG, LOST, Spin};
use crate::fork;
use crate::thread::processors;

/// Connections beyond so many go back to their descriptors: a look at all of them shall be short.
const MOST: usize = 64;

/// How long the loop looks here before it looks at its descriptors too.
const ASK: Duration = Duration::from_micros(100);

/// How often it asks those before it sleeps.
const ASKS: u32 = 8;

/// How long the loop keeps its processor from its clients at a time.
const KEPT: Duration = Duration::from_micros(150);

/// The connections, and how long the loop looks at them.
#[derive(Default)]
struct Busy {
    list: Vec<(RawFd, Weak<Shared>)>,
    /// Those that have been found to have something since the latest look: they may not have been served yet.
    found: Vec<(RawFd, Weak<Shared>)>,
    spin: Option<Spin>,
    /// Whether asking before a sleep has paid.
    asks: Option<Spin>,
    /// When the descriptors were asked.
    asked: Option<Instant>,
    /// When the loop last offered its processor to its clients.
    offered: Option<Instant>,
    /// When it last looked, of this time; and whether it has lost its processor meanwhile.
    looked: Option<Instant>,
    lost: bool,
    /// The process whose they are.
    generation: u64,
}

static BUSY: fork::Lock<Busy> = fork::Lock::new();

/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether there are some, or were in the latest look.
static UNTOLD: AtomicBool = AtomicBool::new(false);

fn lock() -> MutexGuard<'static, Busy> {
    let mut busy = BUSY.lock();
    let generation = fork::generation();
    if busy.generation != generation {
        // A child leaves them to its parent.
        *busy = Busy { generation, ..Busy::default() };
        busy.count();
    }
    busy
}

/// Puts a connection among others, once.
fn note(all: &mut Vec<(RawFd, Weak<Shared>)>, one: (RawFd, Weak<Shared>)) {
    if !all.iter().any(|(_, other)| other.ptr_eq(&one.1)) {
        all.push(one);
    }
}

/// Those that were found have been served: a turn of the loop begins, outside of routines.
pub fn are_served() {
    let mut busy = lock();
    busy.found.clear();
    busy.count();
}

impl Busy {
    /// Whether the processor has been kept for so long that clients may wait for it.
    fn keeps(&self, now: Instant) -> bool {
        self.offered.is_none_or(|offered| now - offered >= KEPT)
    }

    fn count(&self) {
        COUNT.store(self.list.len(), Relaxed);
        UNTOLD.store(!self.list.is_empty() || !self.found.is_empty(), Relaxed);
    }
}

/// What a look has come to.
pub enum Look {
    /// There is something at these.
    Found,
    /// Nothing, but it is time to ask the descriptors, without waiting.
    Ask,
    /// Nothing.
    Nothing,
}

/// The loop looks at this connection from here on. Not where it should have looked by now, and others have found what had come:
/// the program may have another loop, in a routine or since it has left this one.
pub(super) fn add(fd: RawFd, server: &Arc<Shared>) -> bool {
    let mut busy = lock();
    let own = Arc::downgrade(server);
    if busy.list.len() >= MOST || busy.list.iter().any(|(_, other)| other.ptr_eq(&own)) {
        return false;
    }
    busy.list.push((fd, own));
    busy.count();
    true
}

/// The loop serves those that `are_told` of by their descriptors: they are not among them any more.
pub fn leave(are_told: impl Fn(RawFd) -> bool) {
    if any() {
        let mut busy = lock();
        let Busy { list, found, .. } = &mut *busy;
        list.retain_mut(|(fd, weak)| {
            let told = are_told(*fd);
            if told {
                note(found, (*fd, std::mem::take(weak)));
            }
            !told
        });
        busy.count();
    }
}

/// Whether there are any.
pub fn any() -> bool {
    COUNT.load(Relaxed) > 0
}

/// How long the loop may look, if at all: `poll` as in [`Config::poll`](crate::config::Config::poll).
pub fn begin(poll: Duration) -> Option<Instant> {
    let mut busy = lock();
    let now = Instant::now();
    (busy.looked, busy.lost) = (Some(now), false);
    let limit = busy.spin.get_or_insert_with(|| Spin::new(poll)).allowed()?;
    Some(now + limit)
}

/// Looks once at all of them. Those that have something, and are `taken`, are no longer among them.
pub fn look(mut taken: impl FnMut(RawFd) -> bool) -> Look {
    let mut busy = lock();
    let Busy { list, found, .. } = &mut *busy;
    found.clear();
    list.retain_mut(|(fd, weak)| {
        let Some(server) = weak.upgrade() else { return false };
        let goes = has_come(&server, *fd) && taken(*fd);
        if goes {
            found.push((*fd, std::mem::take(weak)));
        }
        !goes
    });
    let any = !found.is_empty();
    busy.count();
    let now = Instant::now();
    if busy.asked.is_none_or(|asked| now - asked >= ASK) {
        busy.asked = Some(now);
        return Look::Ask;
    }
    if let Some(looked) = busy.looked.replace(now) {
        busy.lost |= now - looked > LOST;
    }
    let lost = busy.lost;
    match any {
        true => {
            if let Some(spin) = &mut busy.spin {
                spin.found(lost);
            }
            Look::Found
        }
        false => Look::Nothing,
    }
}

/// Between two looks, `after` so long a time of them: where clients want more processors than there are, or others may, one of
/// them may have this one. False if that takes long: who sleeps gets it sooner.
pub fn pause(after: Duration) -> bool {
    if PROGRAM.active() < processors() && after < ALONE {
        std::hint::spin_loop();
        return true;
    }
    let before = Instant::now();
    std::thread::yield_now();
    let now = Instant::now();
    spin::made(now - before);
    // That it was away is no surprise.
    lock().looked = Some(now);
    now - before < LONG
}

/// Offers the processor to clients, if the loop has kept it for long while several called. A client that waits offers its own to
/// others. If it is the loop that takes it, and does not offer it in turn, the client has it back when a time slice is over, up
/// to 4 ms later, though its reply has long been there. Where nobody spins it is the client that the loop has woken.
pub fn hand_over() {
    // Where there is one only, those who wait for it send nothing that would keep the loop busy.
    if PROGRAM.active() >= 2 && processors() > 1 && lock().keeps(Instant::now()) {
        offer();
        lock().offered = Some(Instant::now());
    }
}

/// How often the loop may ask its descriptors before it sleeps; `poll` as in [`begin`].
pub fn asks(poll: impl FnOnce() -> Duration) -> u32 {
    // Of one alone it is known better how long to look (`next`).
    if PROGRAM.active() < 2 {
        return 0;
    }
    let allowed = lock().asks.get_or_insert_with(|| Spin::new(poll())).allowed();
    allowed.map_or(0, |_| ASKS)
}

/// What has come of that.
pub fn asked(found: bool) {
    if let Some(asks) = &mut lock().asks {
        match found {
            true => asks.found(false),
            false => asks.failed(),
        }
    }
}

/// Whether there are some whose peers wake nobody, in the list or before they are served.
pub fn are_untold() -> bool {
    UNTOLD.load(Relaxed)
}

/// All of them rest. `failed`: nothing has come in the time. Those that have something already are `taken`, or stay.
pub fn rest(failed: bool, mut taken: impl FnMut(RawFd) -> bool) {
    let mut list = {
        let mut busy = lock();
        if failed && let Some(spin) = &mut busy.spin {
            spin.failed();
        }
        let mut list = std::mem::take(&mut busy.list);
        busy.found.drain(..).for_each(|found| note(&mut list, found));
        busy.count();
        list
    };
    for (fd, weak) in list.drain(..) {
        if let Some(server) = weak.upgrade()
            && !rests(&server, fd)
        {
            let goes = taken(fd);
            let mut busy = lock();
            let Busy { list, found, .. } = &mut *busy;
            note(if goes { found } else { list }, (fd, weak));
            busy.count();
        }
    }
    let mut busy = lock();
    if busy.list.capacity() == 0 {
        // Its memory serves the next time too.
        busy.list = list;
    }
}

/// The same where this loop does not go on looking: those that have something already are left to the one that does.
pub fn leave_all() {
    rest(false, |fd| {
        PROGRAM.leave(fd);
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_keeps_its_processor_from_clients_for_a_while_at_a_time() {
        let now = Instant::now();
        let mut busy = Busy::default();
        assert!(busy.keeps(now));
        busy.offered = Some(now);
        assert!(!busy.keeps(now + KEPT - Duration::from_nanos(1)));
        assert!(busy.keeps(now + KEPT));
    }
}
