//! Busy connections that the library's own service loop looks at itself, because a look costs nothing: they share memory with
//! their peers, which then need not wake anybody.
//!
//! For other connections the loop relies on their descriptors. Where several of them are being served, the next call is never
//! far off: the loop checks the descriptors a few times before it sleeps, so that clients need not wake it for each call
//! ([`asks`]).
//!
//! A connection is added here when it has served and nothing more has come ([`Next::Soon`](super::Next::Soon)). It leaves when
//! something has come, or when the loop goes to sleep: then it rests, and its descriptor tells of what comes.
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

/// Connections beyond this number rely on their descriptors, so that a look at all of them stays short.
const MOST: usize = 64;

/// How long the loop looks here before it looks at its descriptors too.
const ASK: Duration = Duration::from_micros(100);

/// How many times it checks the descriptors before it sleeps.
const ASKS: u32 = 8;

/// How long the loop may keep its processor before it offers it to its clients.
const KEPT: Duration = Duration::from_micros(150);

/// The connections, and how long the loop looks at them.
#[derive(Default)]
struct Busy {
    list: Vec<(RawFd, Weak<Shared>)>,
    /// Those that have been found to have something in or since the latest look: they may not have been served yet.
    found: Vec<(RawFd, Weak<Shared>)>,
    spin: Option<Spin>,
    /// Whether checking the descriptors before a sleep has paid.
    asks: Option<Spin>,
    /// When the descriptors were last checked.
    asked: Option<Instant>,
    /// When the loop last offered its processor to its clients.
    offered: Option<Instant>,
    /// When the loop last looked in the present round, and whether it has lost its processor since the round began.
    looked: Option<Instant>,
    lost: bool,
    /// The process that they belong to.
    generation: u64,
}

static BUSY: fork::Lock<Busy> = fork::Lock::new();

/// How many connections are in the list.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether there are any, in the list or found and perhaps not served yet.
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

/// Adds a connection to a list, unless it is there already.
fn note(all: &mut Vec<(RawFd, Weak<Shared>)>, one: (RawFd, Weak<Shared>)) {
    if !all.iter().any(|(_, other)| other.ptr_eq(&one.1)) {
        all.push(one);
    }
}

/// Those that were found have been served: the loop begins a new turn, outside any routine.
pub fn are_served() {
    let mut busy = lock();
    busy.found.clear();
    busy.count();
}

impl Busy {
    /// Whether the loop has kept the processor for so long that clients may be waiting for it.
    fn keeps(&self, now: Instant) -> bool {
        self.offered.is_none_or(|offered| now - offered >= KEPT)
    }

    fn count(&self) {
        COUNT.store(self.list.len(), Relaxed);
        UNTOLD.store(!self.list.is_empty() || !self.found.is_empty(), Relaxed);
    }
}

/// The outcome of a look.
pub enum Look {
    /// Something has come on some of them.
    Found,
    /// It is time to check the descriptors too, without waiting.
    Ask,
    /// Nothing has come.
    Nothing,
}

/// The loop looks at this connection from here on. Returns false if the list is full, or if the connection is still in it:
/// then the loop has not looked when it should have, and others have found what had come. The program may have another loop,
/// in a routine or since it has left this one.
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

/// Removes those for which `are_told` is true: their descriptors have told of something, and the loop serves them.
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

/// Whether there are any in the list.
pub fn any() -> bool {
    COUNT.load(Relaxed) > 0
}

/// Until when the loop may look, if at all. `poll` is as in [`Config::poll`](crate::config::Config::poll).
pub fn begin(poll: Duration) -> Option<Instant> {
    let mut busy = lock();
    let now = Instant::now();
    (busy.looked, busy.lost) = (Some(now), false);
    let limit = busy.spin.get_or_insert_with(|| Spin::new(poll)).allowed()?;
    Some(now + limit)
}

/// Looks once at all of them. Removes those that have something, if `taken` accepts them.
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

/// Pauses between two looks. `after`: how long the loop has looked so far. Where clients want more processors than there are, or
/// others may, this thread yields its own to one of them. Returns false if it takes long to get it back: a thread that sleeps
/// gets it sooner.
pub fn pause(after: Duration) -> bool {
    if PROGRAM.active() < processors() && after < ALONE {
        std::hint::spin_loop();
        return true;
    }
    let before = Instant::now();
    std::thread::yield_now();
    let now = Instant::now();
    spin::made(now - before);
    // This gap does not mean that the loop has lost its processor.
    lock().looked = Some(now);
    now - before < LONG
}

/// Offers the processor to clients, if the loop has kept it for long while several were calling. A client that waits offers
/// its own processor to others. If the loop takes that processor and does not offer it in turn, the client gets it back only
/// when a time slice is over, up to 4 ms later, though its reply has long been there. Where nobody spins, the one kept waiting
/// is the client that the loop has woken.
pub fn hand_over() {
    // With a single processor, those who wait for it send nothing that would keep the loop busy.
    if PROGRAM.active() >= 2 && processors() > 1 && lock().keeps(Instant::now()) {
        offer();
        lock().offered = Some(Instant::now());
    }
}

/// How many times the loop may check its descriptors before it sleeps. `poll` is as in [`begin`].
pub fn asks(poll: impl FnOnce() -> Duration) -> u32 {
    // For a single connection, `next` knows better how long to look.
    if PROGRAM.active() < 2 {
        return 0;
    }
    let allowed = lock().asks.get_or_insert_with(|| Spin::new(poll())).allowed();
    allowed.map_or(0, |_| ASKS)
}

/// Notes whether such checks have found anything.
pub fn asked(found: bool) {
    if let Some(asks) = &mut lock().asks {
        match found {
            true => asks.found(false),
            false => asks.failed(),
        }
    }
}

/// Whether there are connections whose peers wake nobody, in the list or found and not served yet.
pub fn are_untold() -> bool {
    UNTOLD.load(Relaxed)
}

/// Makes all of them rest. `failed`: nothing has come in the time allowed. Those that have something already stay, unless
/// `taken` accepts them.
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
        // The memory of the list is used again next time.
        busy.list = list;
    }
}

/// As [`rest`], where this loop does not go on looking: those that have something already are left to the loop that does.
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
