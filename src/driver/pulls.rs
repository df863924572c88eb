//! Whose long Calls are pulled: those of all connections of the process together, in the order in which they come, and no more
//! at a time than stay in the processor's cache until they are decoded. Where sixteen clients send 1 MiB each, pulling all of
//! it at once would make each byte leave the cache before the program looks at it.
//!
//! A connection whose next Call is to be pulled asks ([`Place::ask`]). If it is not its turn, it waits in one queue with the
//! others. Whoever is done with a Call lets those go on that can ([`go_on`]), and a timer sees to the rest ([`alarm`]). Of
//! what the program does not have yet, one connection gets half at most: its bytes come one after the other, and would only
//! wait for each other. A connection within this host gets a quarter at most: it takes no time to ask for its next Call, and
//! both ends share the processors and their cache.
//!
//! A Call counts until the program has decoded it, or has asked where its data lies: not while its routine goes on with it.
//!
//! A peer that does not answer holds up nobody: a Call of which nothing has come within a moment ([`SILENT`]) no longer
//! counts, nor does one that is not decoded within a while ([`SLOW`]). But a peer can have any number of connections, and such
//! Calls could hold up others one after the other. So all Calls that do not come hold up others for [`PATIENCE`] together.
//! After that none of them counts, and Calls are pulled at once, as if there were no queue. Calls that are served give that
//! time back, a nanosecond for each byte: where peers trickle, others wait for them hardly longer than they take themselves.
//!
//! So this bounds neither memory, which [`Memory`](crate::memory::Memory) does, nor what goes over a network with long delays:
//! there, as much again may be asked for every moment.
//!
//! # Invariants
//! - The lock of the queue is taken last, and nothing of a connection is touched under it.
//! - [`go_on`] is called without the lock of a connection, and waits for none.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::fork;
use crate::memory::{Given, Pass, PassStage};
use crate::stats;
use crate::thread::processors;

/// Bytes of Calls pulled at a time for each thread that decodes, and twice that for a single one: four Calls of 1 MiB. With
/// fewer, the thread waits for clients that have to be woken. With more, each Call takes longer to decode, because what has
/// come is no longer in the processor's cache. A longer Call counts as half of this, so that others are pulled beside it.
pub(super) const EACH: usize = 2 << 20;

/// What a shorter Call counts as: so few count that it takes no time to look at all of them.
const LEAST: usize = 64 << 10;

/// A Call does not count if nothing has come on its connection for this long since it was asked for, in nanoseconds. More than
/// it takes within a machine, and little beside the way to a distant one.
const SILENT: u64 = 1_000_000;

/// Nor does a Call that is not decoded by then.
const SLOW: u64 = 10_000_000;

/// How long Calls that do not come hold up others, all together, in nanoseconds.
const PATIENCE: u64 = 20_000_000;

/// The most Calls that are looked at: those beyond do not count.
const MANY: usize = 256;
const _: () = assert!(2 * EACH / LEAST < MANY);

/// An alarm that is this late was lost, with the loop that the program has left.
const LOST: u64 = 100_000_000;

/// A connection that may have to wait.
pub trait Waits: Send + Sync {
    /// Asks once more, and begins to pull if it is its turn. Returns false if another thread has the connection in hand.
    fn turn(&self) -> bool;
}

/// Where a connection waits.
pub struct Place {
    number: u64,
    taken: bool,
    /// Since when it waits, and in which process.
    since: u64,
    generation: u64,
    queue: &'static Queue,
    who: Weak<dyn Waits>,
    /// Its part of what is pulled: one part in this many.
    share: usize,
    /// How much its device has brought of pulled Calls, and when that was last found to be more.
    pulled: u64,
    came: Arc<AtomicU64>,
}

/// The connections that wait, and the Calls that are pulled.
struct Queue {
    state: fork::Lock<State>,
    /// How many wait.
    waiting: AtomicUsize,
    /// Threads that decode.
    threads: AtomicUsize,
    /// [`EACH`].
    each: usize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    pulled: Vec<Pulled>,
    /// When the loop will call; 0: it will not.
    armed: u64,
    /// When somebody last began to pull.
    moved: u64,
    /// How much of [`PATIENCE`] is used up.
    spent: u64,
    /// The process that they belong to.
    generation: u64,
}

struct Waiting {
    number: u64,
    share: usize,
    bytes: usize,
    who: Weak<dyn Waits>,
}

/// A Call that is being pulled, or was and is not decoded yet.
struct Pulled {
    /// The connection that it belongs to.
    number: u64,
    /// How many bytes it counts as.
    bytes: usize,
    /// When it began, by [`stats::clock`].
    began: u64,
    came: Arc<AtomicU64>,
    pass: Given,
    /// It no longer counts.
    late: bool,
}

impl Pulled {
    /// For how long it counts, if its memory is not let go of earlier; `spent` is as in [`State`].
    fn counts(&self, spent: u64) -> u64 {
        let silent = self.pass.stage() == PassStage::Coming && self.came.load(Relaxed) <= self.began;
        let most = if silent { SILENT } else { SLOW };
        most.min(PATIENCE - spent)
    }
}

static QUEUE: Queue = Queue::new(EACH);

impl Queue {
    const fn new(each: usize) -> Queue {
        let (state, waiting) = (fork::Lock::new(), AtomicUsize::new(0));
        Queue { state, waiting, threads: AtomicUsize::new(1), each }
    }

    fn lock(&'static self) -> MutexGuard<'static, State> {
        let mut state = self.state.lock();
        let generation = fork::generation();
        if state.generation != generation {
            // A child leaves them to its parent.
            *state = State { generation, ..State::default() };
            self.waiting.store(0, Relaxed);
        }
        state
    }

    fn most(&self) -> usize {
        self.threads.load(Relaxed).min(processors()).max(2) * self.each
    }

    fn are_waiting(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }

    fn remove(&'static self, number: u64) {
        let mut state = self.lock();
        state.queue.retain(|waiting| waiting.number != number);
        self.waiting.store(state.queue.len(), Relaxed);
    }

    /// The one that is next, if it is time for it.
    fn next(&'static self, now: u64) -> Option<(u64, Weak<dyn Waits>)> {
        let (mut state, most) = (self.lock(), self.most());
        state.look(most, now);
        let first = state.first(most).filter(|first| state.has_room(first.bytes, most))?;
        Some((first.number, first.who.clone()))
    }

    /// See [`go_on`].
    fn go_on(&'static self, clock: impl Fn() -> u64) -> bool {
        // Each is asked once, even if it goes on waiting.
        for _ in 0..self.waiting.load(Relaxed) {
            let Some((number, who)) = self.next(clock()) else { return true };
            match who.upgrade() {
                Some(who) if who.turn() => {}
                Some(_) => return false,
                None => self.remove(number),
            }
        }
        true
    }

    /// See [`alarm`].
    fn alarm(&'static self, now: u64) -> Option<Duration> {
        if !self.are_waiting() {
            return None;
        }
        let mut state = self.lock();
        let counting = state.pulled.iter().filter(|call| !call.late);
        let first = counting.map(|call| call.began + call.counts(state.spent)).min();
        // If nothing is pulled, those who wait are being asked.
        let first = first.unwrap_or(now + SILENT).max(now);
        if state.armed != 0 && now < state.armed + LOST && first >= state.armed {
            return None;
        }
        state.armed = first;
        Some(Duration::from_nanos(first - now))
    }
}

impl State {
    /// Finds out which Calls no longer count.
    fn look(&mut self, most: usize, now: u64) {
        let State { pulled, spent, .. } = self;
        pulled.retain_mut(|call| {
            let stage = call.pass.stage();
            if stage == PassStage::Decoded {
                *spent = spent.saturating_sub(call.bytes as u64);
                return false;
            }
            let counts = call.counts(*spent);
            if !call.late && now >= call.began + counts {
                call.late = true;
                // A Call that is complete waits for us, not for its peer.
                let counts = if stage >= PassStage::Here { 0 } else { counts };
                // Others wait while what is pulled leaves no room for the longest Call: `part` is the share of this Call in that.
                let part = counts as u128 * call.bytes as u128 / (most - EACH / 2) as u128;
                *spent = PATIENCE.min(*spent + part as u64);
            }
            now < call.began + SLOW
        });
    }

    /// Whether this many more bytes may be pulled now.
    fn has_room(&self, bytes: usize, most: usize) -> bool {
        fits(self.pulled.iter(), bytes, most)
    }

    /// Whether that connection has its part already, and waits only for itself.
    fn is_full(&self, (number, share): (u64, usize), bytes: usize, most: usize) -> bool {
        let own = |call: &&Pulled| call.number == number && call.pass.stage() < PassStage::Dispatched;
        !fits(self.pulled.iter().filter(own), bytes, most / share)
    }

    /// The one that is next.
    fn first(&self, most: usize) -> Option<&Waiting> {
        self.queue.iter().find(|waiting| !self.is_full((waiting.number, waiting.share), waiting.bytes, most))
    }
}

/// Whether a Call of this many bytes may be pulled beside these.
fn fits<'a>(pulled: impl Iterator<Item = &'a Pulled>, bytes: usize, most: usize) -> bool {
    let held: usize = pulled.filter(|call| !call.late).map(|call| call.bytes).sum();
    held == 0 || held + counted(bytes) <= most
}

/// What a Call of this many bytes counts as.
fn counted(bytes: usize) -> usize {
    bytes.clamp(LEAST, EACH / 2)
}

impl Place {
    /// A place in the queue of the process. `own_host`: the peer is on this host.
    pub fn new(who: Weak<dyn Waits>, own_host: bool) -> Place {
        Place::of(&QUEUE, who, if own_host { 4 } else { 2 })
    }

    fn of(queue: &'static Queue, who: Weak<dyn Waits>, share: usize) -> Place {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        Place {
            number,
            taken: false,
            since: 0,
            generation: 0,
            queue,
            who,
            share,
            pulled: 0,
            came: Arc::default(),
        }
    }

    /// Asks to pull a Call of this many bytes; waits in the queue if it is not time for that.
    pub fn ask(&mut self, bytes: usize, now: u64) -> Option<Pass> {
        let pass = Pass::default();
        let mut state = self.queue.lock();
        if std::mem::replace(&mut self.generation, state.generation) != state.generation {
            // It waited in the parent.
            self.taken = false;
        }
        // This may take a longer block than the reserve of memory has: without it, the Call is pulled and not counted.
        if state.queue.try_reserve(1).is_err() || state.pulled.try_reserve(1).is_err() {
            return Some(pass);
        }
        let (number, share, most) = (self.number, self.share, self.queue.most());
        state.look(most, now);
        let first = state.first(most).is_none_or(|first| first.number == number);
        // If nobody asks the first one: the loop is in a routine that waits for this connection.
        let stands = self.taken && now.saturating_sub(self.since.max(state.moved)) >= SLOW;
        let may =
            (first || stands) && !state.is_full((number, share), bytes, most) && state.has_room(bytes, most);
        if !may {
            if !std::mem::replace(&mut self.taken, true) {
                self.since = now;
                state.queue.push_back(Waiting { number, share, bytes, who: self.who.clone() });
                self.queue.waiting.store(state.queue.len(), Relaxed);
            }
            return None;
        }
        state.moved = now;
        if std::mem::take(&mut self.taken) {
            state.queue.retain(|waiting| waiting.number != number);
            self.queue.waiting.store(state.queue.len(), Relaxed);
        }
        let call = Pulled {
            number,
            bytes: counted(bytes),
            began: now,
            came: self.came.clone(),
            pass: pass.given(),
            late: false,
        };
        if state.pulled.len() < MANY {
            state.pulled.push(call);
        }
        Some(pass)
    }

    /// Whether the connection waits in the queue.
    #[inline]
    pub fn is_taken(&self) -> bool {
        self.taken
    }

    /// It no longer waits.
    pub fn leave(&mut self) {
        if std::mem::take(&mut self.taken) {
            self.queue.remove(self.number);
        }
    }

    /// Whether something of its latest Call is known to have come.
    #[cfg(test)]
    pub fn begins_to_come(&self) -> bool {
        let state = self.queue.lock();
        let latest = state.pulled.iter().rfind(|call| call.number == self.number);
        latest.is_some_and(|call| call.came.load(Relaxed) > call.began)
    }

    /// Its device has brought this many bytes of pulled Calls in all.
    pub fn has_brought(&mut self, pulled: u64, now: u64) {
        if pulled != self.pulled {
            self.pulled = pulled;
            self.came.store(now, Relaxed);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Lets those begin to pull whose turn it is, now that something may have been let go of. Returns false if one has to be asked
/// again soon. Called without any lock of the library.
pub fn go_on() -> bool {
    QUEUE.go_on(stats::clock)
}

/// The program has decoded a Call. A connection that asks at this moment finds that out, or is seen to wait.
pub fn decoded() {
    drop(QUEUE.lock());
}

/// Whether somebody waits.
#[inline]
pub fn are_waiting() -> bool {
    QUEUE.are_waiting()
}

/// When [`go_on`] is to be called though nothing is let go of; `None` if nobody waits, or if that was already told.
pub fn alarm() -> Option<Instant> {
    Some(Instant::now() + QUEUE.alarm(stats::clock())?)
}

/// The time that [`alarm`] has told has come.
pub fn alarmed() {
    QUEUE.lock().armed = 0;
}

/// Sets how many threads serve.
pub fn serve_with(threads: u32) {
    QUEUE.threads.store(threads as usize, Relaxed);
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Two Calls of this length are pulled at a time, from two connections; or four, where a process pulls as much as it may.
    const HALF: usize = EACH / 2;

    /// A connection with one Call after the other.
    struct Peer {
        place: Mutex<Place>,
        bytes: usize,
        pass: Mutex<Option<Pass>>,
        now: Arc<AtomicU64>,
        /// Another thread has it in hand.
        busy: AtomicBool,
    }

    impl Waits for Peer {
        fn turn(&self) -> bool {
            if self.busy.load(Relaxed) {
                return false;
            }
            let pass = self.place.lock().unwrap().ask(self.bytes, self.now.load(Relaxed));
            *self.pass.lock().unwrap() = pass;
            true
        }
    }

    impl Peer {
        fn pulls(&self) -> bool {
            self.pass.lock().unwrap().is_some()
        }

        fn ends(&self) {
            *self.pass.lock().unwrap() = None;
        }
    }

    /// A queue, and the time.
    struct Process {
        queue: &'static Queue,
        now: Arc<AtomicU64>,
    }

    impl Process {
        fn new() -> Process {
            Process::with(EACH / 2)
        }

        fn with(each: usize) -> Process {
            Process { queue: Box::leak(Box::new(Queue::new(each))), now: Arc::new(AtomicU64::new(1 << 40)) }
        }

        /// One more connection, with a Call of this many bytes.
        fn peer(&self, bytes: usize) -> Arc<Peer> {
            let peer = Arc::new_cyclic(|own: &Weak<Peer>| Peer {
                place: Mutex::new(Place::of(self.queue, own.clone(), 2)),
                bytes,
                pass: Mutex::default(),
                now: self.now.clone(),
                busy: AtomicBool::new(false),
            });
            peer.turn();
            peer
        }

        fn go_on(&self) -> bool {
            self.queue.go_on(|| self.now.load(Relaxed))
        }

        fn pass(&self, nanoseconds: u64) {
            self.now.fetch_add(nanoseconds, Relaxed);
        }

        fn waiting(&self) -> usize {
            let waiting = self.queue.waiting.load(Relaxed);
            assert_eq!(waiting, self.queue.lock().queue.len());
            waiting
        }
    }

    fn pulling(peers: &[Arc<Peer>]) -> Vec<usize> {
        (0..peers.len()).filter(|peer| peers[*peer].pulls()).collect()
    }

    #[test]
    fn calls_are_pulled_in_the_order_of_their_coming_as_soon_as_others_are_let_go_of() {
        let process = Process::new();
        let peers = [HALF, HALF - LEAST, HALF, HALF, HALF, HALF].map(|bytes| process.peer(bytes));
        assert_eq!((pulling(&peers), process.waiting()), (vec![0, 1], 4));
        assert!(process.go_on());
        assert_eq!(pulling(&peers), [0, 1], "nothing was let go of");
        let short = process.peer(1000);
        assert!(!short.pulls(), "there is room, but others have come before");
        peers[1].ends();
        assert!(process.go_on());
        assert_eq!(pulling(&peers), [0, 2]);
        // With its next Call it is the last in the queue.
        peers[1].turn();
        for next in [3, 4, 5] {
            peers[next - 1].ends();
            assert!(process.go_on());
            assert_eq!(pulling(&peers), [0, next]);
        }
        peers[5].ends();
        assert!(process.go_on() && short.pulls());
        assert_eq!((pulling(&peers), process.waiting()), (vec![0, 1], 0));
    }

    #[test]
    fn a_connection_has_half_of_what_is_pulled_and_others_do_not_wait_for_it() {
        // As much as a record of 1 MiB takes with its header.
        const RECORD: usize = (1 << 20) + 44;
        let process = Process::with(EACH);
        let peer = process.peer(RECORD);
        let mut passes = Vec::new();
        let mut turn = || {
            passes.extend(peer.pass.lock().unwrap().take());
            peer.turn();
            (peer.pulls(), passes.clone())
        };
        assert!(turn().0 && !turn().0);
        let others = [RECORD; 3].map(|bytes| process.peer(bytes));
        assert_eq!(pulling(&others), [0, 1], "they are not behind one that waits for itself");
        assert!(process.go_on() && !peer.pulls() && process.waiting() == 2);
        // What a routine has taken up counts for all, until it is decoded.
        let passes = turn().1;
        passes[0].reach(PassStage::Dispatched);
        assert!(process.go_on() && !peer.pulls());
        passes[0].reach(PassStage::Decoded);
        assert!(process.go_on() && peer.pulls() && pulling(&others).len() == 2, "it came before the third");
        passes[1].reach(PassStage::Dispatched);
        assert!(!turn().0, "there is room for it, but not in all");
        others[0].ends();
        assert!(
            process.go_on() && !peer.pulls() && pulling(&others) == [1, 2],
            "in the order of their coming"
        );
        others[1].ends();
        assert!(process.go_on() && peer.pulls() && process.waiting() == 0);
    }

    #[test]
    fn who_does_not_answer_holds_up_others_for_a_moment_only() {
        let process = Process::new();
        let peers: Vec<_> = (0..8).map(|_| process.peer(HALF)).collect();
        let wakes = process.queue.alarm(process.now.load(Relaxed));
        assert_eq!(wakes, Some(Duration::from_nanos(SILENT)));
        assert_eq!(process.queue.alarm(process.now.load(Relaxed)), None, "that was told");
        process.pass(SILENT - 1);
        assert!(process.go_on());
        assert_eq!(pulling(&peers), [0, 1]);
        process.pass(1);
        assert!(process.go_on());
        assert_eq!(pulling(&peers), [0, 1, 2, 3]);
        // From one of these something comes now and then.
        process.pass(1);
        peers[2].place.lock().unwrap().has_brought(1, process.now.load(Relaxed));
        process.pass(SILENT);
        assert!(process.go_on());
        assert_eq!(pulling(&peers), [0, 1, 2, 3, 4], "one place is held");
        process.pass(SLOW - SILENT - 1);
        peers[2].place.lock().unwrap().has_brought(2, process.now.load(Relaxed));
        assert!(process.go_on());
        assert_eq!(pulling(&peers), [0, 1, 2, 3, 4, 5, 6], "but not for long");
    }

    /// Goes on pulling whenever it is time, while each Call that is pulled gets a byte now and then, until `honest` is pulled.
    /// Returns how long that took.
    fn trickles(process: &Process, peers: &[Arc<Peer>], honest: &Peer) -> u64 {
        const STEP: u64 = 50_000;
        let (begin, mut alarm) = (process.now.load(Relaxed), None);
        while !honest.pulls() {
            process.pass(STEP);
            let now = process.now.load(Relaxed);
            for peer in peers.iter().filter(|peer| peer.pulls()) {
                peer.place.lock().unwrap().has_brought(now, now);
            }
            if let Some(time) = process.queue.alarm(now) {
                alarm = Some(now + time.as_nanos() as u64);
            }
            if alarm.take_if(|time| *time <= now).is_some() {
                process.queue.lock().armed = 0;
                assert!(process.go_on());
            }
        }
        process.now.load(Relaxed) - begin
    }

    #[test]
    fn a_thousand_that_trickle_hold_up_an_honest_one_for_a_moment_only() {
        const MILLI: u64 = 1_000_000;
        for bytes in [1, 1 << 20, HALF, 64 << 20] {
            let process = Process::new();
            let bad: Vec<_> = (0..1000).map(|_| process.peer(bytes)).collect();
            let honest = process.peer(HALF);
            assert!(!honest.pulls());
            let waited = trickles(&process, &bad, &honest);
            assert!(waited <= PATIENCE + MILLI, "{bytes} bytes: {waited} ns");
            // Others come, and the next Calls of the honest one go on all the same, though each gives a part of the time back.
            for round in 0..20 {
                honest.ends();
                let more: Vec<_> = (0..50).map(|_| process.peer(bytes)).collect();
                honest.turn();
                let waited = trickles(&process, &more, &honest);
                assert!(waited <= HALF as u64 + MILLI, "{bytes} bytes, round {round}: {waited} ns");
            }
        }
    }

    #[test]
    fn who_is_served_in_time_brings_back_the_order_that_others_have_ended() {
        let process = Process::new();
        let bad: Vec<_> = (0..100).map(|_| process.peer(HALF)).collect();
        let honest = process.peer(HALF);
        trickles(&process, &bad, &honest);
        let all: Vec<_> = (0..8).map(|_| process.peer(HALF)).collect();
        assert_eq!(pulling(&all).len(), 8, "nobody waits for anybody");
        drop(bad);
        process.pass(SLOW);
        honest.ends();
        for _ in 0..PATIENCE / HALF as u64 {
            let one = process.peer(HALF);
            assert!(one.pulls());
            one.ends();
        }
        all.iter().for_each(|peer| peer.ends());
        let all: Vec<_> = (0..8).map(|_| process.peer(HALF)).collect();
        assert_eq!(pulling(&all), [0, 1]);
        process.pass(SILENT - 1);
        assert!(process.go_on());
        assert_eq!(pulling(&all), [0, 1], "as patient as in the beginning");
    }

    #[test]
    fn a_call_that_waits_for_the_program_costs_its_peer_nothing() {
        let process = Process::new();
        for _ in 0..10 {
            let all = [HALF; 3].map(|bytes| process.peer(bytes));
            assert_eq!(pulling(&all), [0, 1]);
            for peer in &all[..2] {
                // All of it has come in one go: nobody has noted that it began to.
                peer.pass.lock().unwrap().as_ref().unwrap().reach(PassStage::Here);
            }
            process.pass(SLOW - 1);
            assert!(process.go_on() && !all[2].pulls(), "it counts, though it is here");
            process.pass(1);
            assert!(process.go_on() && all[2].pulls());
            process.pass(SLOW);
        }
    }

    #[test]
    fn an_alarm_is_told_again_when_it_is_to_be_an_earlier_one() {
        let process = Process::new();
        let [slow, other, _third] = [HALF; 3].map(|bytes| process.peer(bytes));
        let alarm = || process.queue.alarm(process.now.load(Relaxed)).map(|time| time.as_nanos() as u64);
        process.pass(1);
        for peer in [&slow, &other] {
            peer.place.lock().unwrap().has_brought(1, process.now.load(Relaxed));
        }
        assert_eq!((alarm(), alarm()), (Some(SLOW - 1), None));
        // The third is pulled, and a fourth waits.
        other.ends();
        assert!(process.go_on());
        let _fourth = process.peer(HALF);
        assert_eq!((alarm(), alarm()), (Some(SILENT), None));
    }

    #[test]
    fn who_is_gone_or_waits_no_more_keeps_nobody_waiting() {
        let process = Process::new();
        let [one, two, gone, leaves, last] = [HALF; 5].map(|bytes| process.peer(bytes));
        assert!(one.pulls() && two.pulls());
        drop(gone);
        leaves.place.lock().unwrap().leave();
        assert_eq!(process.waiting(), 1);
        one.ends();
        assert!(process.go_on() && last.pulls() && !leaves.pulls());
        // Nothing tells of the end of a connection whose place somebody else keeps.
        let [dead, next] = [HALF; 2].map(|bytes| process.peer(bytes));
        let place =
            std::mem::replace(&mut *dead.place.lock().unwrap(), Place::of(process.queue, one_more(), 2));
        drop(dead);
        last.ends();
        assert!(process.go_on() && next.pulls());
        assert_eq!(process.waiting(), 0);
        drop(place);
    }

    #[test]
    fn who_is_first_and_is_not_asked_keeps_another_one_waiting_for_a_while_only() {
        // The loop is in a routine that waits for what the last of them has to say, and asks only for that one.
        let process = Process::new();
        let [one, two, first, last] = [HALF; 4].map(|bytes| process.peer(bytes));
        process.pass(SLOW - 1);
        last.turn();
        assert!(!last.pulls() && !first.pulls());
        process.pass(1);
        last.turn();
        assert!(last.pulls() && !first.pulls());
        assert_eq!(process.waiting(), 1);
        assert!(process.go_on() && first.pulls());
        drop((one, two));
    }

    #[test]
    fn an_alarm_that_never_went_off_is_told_again() {
        let process = Process::new();
        let _peers = [HALF; 3].map(|bytes| process.peer(bytes));
        let alarm = || process.queue.alarm(process.now.load(Relaxed)).is_some();
        assert!(alarm() && !alarm());
        // The program has left its loop, and runs another one.
        process.pass(1_000_000_000);
        assert!(alarm() && !alarm());
    }

    #[test]
    fn what_waited_in_the_parent_waits_in_the_child_too() {
        use crate::fork::testing::fork;
        let process = Process::new();
        let [_one, _two, third] = [HALF; 3].map(|bytes| process.peer(bytes));
        let child = fork(|| {
            let [own, other, _last] = [HALF; 3].map(|bytes| process.peer(bytes));
            third.turn();
            let waits = process.waiting() == 2 && !third.pulls();
            own.ends();
            other.ends();
            waits && process.go_on() && third.pulls()
        });
        assert!(child.succeeded());
    }

    fn one_more() -> Weak<dyn Waits> {
        Weak::<Peer>::new()
    }

    #[test]
    fn one_that_another_thread_has_in_hand_is_asked_again() {
        let process = Process::new();
        let [one, two, busy] = [HALF; 3].map(|bytes| process.peer(bytes));
        busy.busy.store(true, Relaxed);
        one.ends();
        assert!(!process.go_on() && !busy.pulls());
        busy.busy.store(false, Relaxed);
        assert!(process.go_on() && busy.pulls() && two.pulls());
    }

    #[test]
    fn a_call_that_no_cache_holds_goes_beside_others() {
        let process = Process::new();
        let [long, other, third] = [64 << 20, HALF, HALF].map(|bytes| process.peer(bytes));
        assert!(long.pulls() && other.pulls() && !third.pulls());
        let process = Process::new();
        let short: Vec<_> = (0..400).map(|_| process.peer(1)).collect();
        assert_eq!(pulling(&short).len(), EACH / LEAST);
    }

    #[test]
    fn a_forked_child_waits_for_no_call_of_its_parent() {
        use crate::fork::testing::fork;
        let process = Process::new();
        let parents = [HALF; 3].map(|bytes| process.peer(bytes));
        let child = fork(|| {
            let own = process.peer(HALF);
            own.pulls() && process.waiting() == 0
        });
        assert!(child.succeeded());
        assert!(!parents[2].pulls() && process.waiting() == 1);
    }
}
