//! Whether a wait spins first, and how long.
//!
//! A spin keeps its processor from everybody else. It saves a sleep and a wake-up where the peer has a processor of its own.
//! Where the peer has none, or others want this one, the spin may cost a time slice, which is longer than a hundred short
//! calls.
//!
//! Where more threads want a processor than there are, a wait offers its own to the others between its looks: those that wait
//! for the same peer get on meanwhile, and none of them is put to sleep and woken for each call. That pays if all of them do
//! it and nobody else wants the processor, so it is the whole process that goes on with offers, or does without them for a
//! while ([`Offers`]). A spin that takes long makes offers too. That is how it finds out that others want its processor, and
//! whether they keep it.
#![forbid(unsafe_code)]

use std::hint::spin_loop;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use super::link::Link;
use crate::thread::processors;
use crate::{fork, stats};

/// Bytes that a peer copies in a nanosecond, at least.
const COPIED: u64 = 8;

/// A thread that has not come to look for this long has lost its processor meanwhile: a look that finds nothing takes less
/// than a microsecond.
pub(super) const LOST: Duration = Duration::from_micros(20);

/// The same for a thread that has offered its processor to others: a time slice, which lasts a tick at least, 1 to 10 ms. With
/// half a millisecond, sixteen processes that wrote 64 KiB each ended one another's offers: 0.96 of tcp's calls in place of
/// 1.35.
pub(super) const LONG: Duration = Duration::from_millis(1);

/// A thread that gets back an offered processor later than this has let somebody else have it. For [`SHARED`] nanoseconds
/// after that, others may want it again.
const TAKEN: Duration = Duration::from_micros(3);
const SHARED: u64 = 10_000_000;

/// A spin that has found nothing for this long offers its processor too, because somebody who does not wait here may want it.
pub(super) const ALONE: Duration = Duration::from_micros(15);

/// How often a wait offers its processor to others, at most. With 64, sixteen threads that wrote 64 KiB each took 1.2 times the
/// processor time of tcp, in place of 1.03, looking in vain; with 14 or fewer, sixteen processes went to sleep too often.
const OFFERS_MOST: u32 = 20;
/// With more offers than this, if each look costs a system call, a wait costs more than to sleep and to be woken.
const OFFERS_DEAR: u32 = 16;
/// How many offers a thread makes that waits beside the driver: the more threads look, the more often each finds nothing.
const OFFERS_BESIDE: u32 = 4;

/// A look that brings fewer bytes than this takes no longer for them.
const SHORT: u64 = 16 << 10;

/// How many spins long a peer may take to wake: 5 us where its processor is awake, 100 us in some virtual machines.
const WAKING: u32 = 2;

/// Less than it costs to sleep and be woken.
const GLANCE: Duration = Duration::from_micros(5);

/// Whether spinning before a sleep has paid lately.
///
/// It pays only where the peer has a processor of its own. A spin that finds something although the thread lost its processor
/// meanwhile has found what it had kept the peer from sending. When that is the rule, it counts as a failure. How many times a
/// second that happens says nothing: it is some hundred times on an idle machine, because of the kernel's own threads.
pub(super) struct Spin {
    /// How long a spin lasts; zero: there is none.
    poll: Duration,
    /// How many waits sleep at once before the next spin.
    skip: u32,
    /// What the next failure costs: 1, 2, 4 ... 1024 waits; a success halves it.
    penalty: u32,
    /// Rises with each spin in which the processor was lost, falls with each other one.
    crowded: u32,
    /// How many bytes had moved when the latest wait began, and how often the peer had been woken.
    moved: u64,
    wakes: u64,
}

impl Spin {
    /// `poll`: [`Config::poll`](crate::config::Config::poll).
    pub(super) fn new(poll: Duration) -> Spin {
        Spin { poll, skip: 0, penalty: 0, crowded: 0, moved: 0, wakes: 0 }
    }

    pub(super) fn is_on(&self) -> bool {
        !self.poll.is_zero()
    }

    /// How long a loop looks at its connections, if at all.
    pub(super) fn allowed(&mut self) -> Option<Duration> {
        let may = self.is_on() && !self.skips() && !is_crowded(0) && !OFFERS.are_kept();
        may.then(|| self.limit())
    }

    /// How a wait looks before it sleeps, and for how long. `company`:
    /// [`QueuePair::company`](crate::provider::QueuePair::company). `is_free`: whether a look costs no system call, from here
    /// on.
    fn way(&mut self, company: u32, is_free: impl FnOnce() -> bool) -> Option<(Way, Duration)> {
        if !self.is_on() || OFFERS.are_kept() {
            return None;
        }
        if is_crowded(company) || OFFERS.are_taken() {
            let way = |free| Way::Offer { pays: if free { OFFERS_MOST } else { OFFERS_DEAR } };
            return OFFERS.are_allowed().then(|| (way(is_free()), self.poll));
        }
        match self.skips() {
            false => Some((Way::Spin, self.limit())),
            // Though spinning has not paid, a peer that is awake may answer at once.
            true => is_free().then(|| (Way::Glance, self.poll.min(GLANCE))),
        }
    }

    fn limit(&self) -> Duration {
        // After many failures the peer may sleep before each message too, and take longer than a spin: one side must wait for
        // the other now and then, or both sleep for ever.
        if self.penalty >= 64 { self.poll * 3 } else { self.poll }
    }

    /// How much longer a spin lasts that begins when this many bytes have `moved` and the peer has been woken this often. A
    /// peer that has taken or sent many bytes since the spin before works on them, or makes as many again, and either takes as
    /// long as copying them. A peer that slept is late. A thread that goes to sleep too, before the peer comes, will be late
    /// for what the peer sends next.
    fn longer(&mut self, moved: u64, wakes: u64) -> Duration {
        let before = std::mem::replace(&mut self.moved, moved);
        let slept = std::mem::replace(&mut self.wakes, wakes) != wakes;
        let wakes = if slept { self.poll * WAKING } else { Duration::ZERO };
        // Fewer bytes than before: it is another connection.
        copying(moved.saturating_sub(before), self.limit()) + wakes
    }

    /// Whether this wait is one of those that are not to spin.
    fn skips(&mut self) -> bool {
        let skips = self.skip > 0;
        self.skip -= u32::from(skips);
        skips
    }

    /// A spin has found something. `lost`: meanwhile the thread has lost its processor.
    pub(super) fn found(&mut self, lost: bool) {
        if !lost {
            self.penalty /= 2;
            self.crowded = self.crowded.saturating_sub(1);
            return;
        }
        self.crowded += 4;
        if self.crowded >= 16 {
            self.crowded = 0;
            self.failed();
        }
    }

    pub(super) fn failed(&mut self) {
        self.skip = self.penalty.max(1);
        self.penalty = (self.skip * 2).min(1024);
    }
}

/// A thread that waits on a connection as its driver, or spins for the next request.
pub(super) struct Waiting {
    generation: u64,
}

/// The lower half says how many such threads there are in this process. The upper half is the process, as [`fork::generation`]
/// counts them: the threads of a parent do not count in its child.
static WAITING: AtomicU64 = AtomicU64::new(0);

impl Waiting {
    pub(super) fn begin() -> Waiting {
        let generation = fork::generation();
        // This always succeeds.
        let _ = WAITING.fetch_update(Relaxed, Relaxed, |all| {
            Some(if all >> 32 == generation { all + 1 } else { generation << 32 | 1 })
        });
        Waiting { generation }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = WAITING.fetch_update(Relaxed, Relaxed, |all| (all >> 32 == self.generation).then(|| all - 1));
    }
}

/// A thread that waits beside the driver: it offers its processor too, a few times, before it sleeps. What it waits for is
/// handed to it, so that a look costs no system call. A sleep costs one of this thread, and another one of the driver to wake
/// it.
///
/// Here too, waits in vain end all offers of the process ([`Offers::ended`]). Then one thread makes calls and spins, while the
/// others wait for its processor until its time slice is over: for short calls nothing is quicker.
#[derive(Default)]
pub(super) struct Beside {
    offered: u32,
}

impl Beside {
    /// Whether the thread offers its processor once more. `spin`: that of the connection.
    pub(super) fn offers(&self, spin: &Spin) -> bool {
        let may = self.offered < OFFERS_BESIDE && spin.is_on();
        // Schedules that are tried one after the other (shuttle) must not depend on the clock, nor on each other.
        may && (cfg!(shuttle) || Beside::may_pay())
    }

    fn may_pay() -> bool {
        let wanted = || waiting() + 1 >= processors() || OFFERS.are_taken();
        !OFFERS.are_kept() && OFFERS.are_allowed() && wanted()
    }

    /// Offers the processor, with nothing locked.
    pub(super) fn offer(&mut self) {
        let _waiting = Waiting::begin();
        self.offered += 1;
        let before = Instant::now();
        yield_now();
        OFFERS.made(before.elapsed());
    }

    /// The offers are over, if there were any. They have paid if the thread has `found` what it waits for, or that it is to
    /// drive: in both cases nobody had to wake it.
    pub(super) fn ends(&mut self, found: bool) {
        if (1..=OFFERS_BESIDE).contains(&self.offered) {
            self.offered = OFFERS_BESIDE + 1;
            OFFERS.ended(found, true, stats::tick());
        }
    }
}

/// How many threads of this process wait.
fn waiting() -> usize {
    WAITING.load(Relaxed) as u32 as usize
}

/// Whether so many threads of this process wait that, if one of them spins, whatever wakes the others may find no processor:
/// one is left to the peer. Or whether the peer, which is on this host, serves so many others that they, this thread and the
/// peer outnumber the processors.
fn is_crowded(company: u32) -> bool {
    let most = processors();
    waiting() >= most || company > 0 && company as usize + 2 > most
}

/// Whether waits of this process offer their processor to others.
///
/// A thread that takes the processor for long may not be waiting for anything that we do. Beside such a thread, one offer in
/// every few costs a time slice, some milliseconds: as long as a hundred calls. Now and then the peer takes one too, when it
/// has much to do for others that wait, and then nothing is lost: a thread that slept would wait as long for its reply. Where
/// some of many processes make offers and the others sleep, all of them are slower than if each did the same.
///
/// So only three such long offers in short succession end all offers, for four times as long as the three took together. After
/// that a single one does, if it comes soon: it ends them for eight times as long as it took, the next one for sixteen times,
/// and so on. Whatever else runs there costs us a few hundredths of our time, and soon after it has gone there are offers
/// again. Several waits in vain end them too. When offers begin again, they do so for all threads: a peer is quicker when it
/// need not wake anybody, which no thread would find out alone.
struct Offers {
    /// When offers are allowed again, by [`stats::tick`].
    from: AtomicU64,
    /// Rises by [`Offers::FORGOTTEN`] with each offer that took long, falls by one with each other one; and how long the
    /// former took.
    losses: AtomicU64,
    gone: AtomicU64,
    /// For how long offers were suspended, the last time that some took long; and how many times as long as those took.
    paused: AtomicU64,
    times: AtomicU64,
    /// Rises with waits that have paid, falls with others.
    credit: AtomicI64,
    /// Until when others are taken to want a processor, though it is not this process that leaves them none; and until when
    /// they are taken to keep it.
    shared: AtomicU64,
    kept: AtomicU64,
}

static OFFERS: Offers = Offers::new();

impl Offers {
    /// For how long offers are suspended after waits in vain.
    const PAUSE: u64 = Duration::from_millis(100).as_nanos() as u64;
    /// And after some that took long: how many times as long as those took.
    const TIMES: RangeInclusive<u64> = 4..=64;
    const SHORTEST: u64 = Duration::from_millis(10).as_nanos() as u64;
    const LONGEST: u64 = Duration::from_secs(10).as_nanos() as u64;
    /// This many that took long end all offers; and this many others make one of them forgotten.
    const LOSSES: u64 = 3;
    const FORGOTTEN: u64 = 16;
    /// The most credit, which is also the first; and what a wait in vain costs.
    const CREDIT: i64 = 64;
    const IN_VAIN: i64 = 4;

    const fn new() -> Offers {
        let credit = AtomicI64::new(Offers::CREDIT);
        let [from, losses, gone, paused, times, shared, kept] = [const { AtomicU64::new(0) }; 7];
        Offers { from, losses, gone, paused, times, credit, shared, kept }
    }

    fn are_allowed(&self) -> bool {
        stats::tick() >= self.from.load(Relaxed)
    }

    /// Whether somebody has taken a processor that was offered, a moment ago.
    fn are_taken(&self) -> bool {
        let shared = self.shared.load(Relaxed);
        shared != 0 && stats::tick() < shared
    }

    /// Whether somebody keeps the processors that are offered: a thread that sleeps gets one back sooner than a thread that
    /// looks.
    fn are_kept(&self) -> bool {
        let kept = self.kept.load(Relaxed);
        kept != 0 && stats::tick() < kept
    }

    /// A thread that offered its processor has been `away` from it for this long.
    fn made(&self, away: Duration) {
        if away > LONG {
            let now = stats::tick();
            if let Some(gone) = self.adds_up(away, now) {
                self.lost(now, gone);
                self.kept.store(self.from.load(Relaxed), Relaxed);
            }
            return;
        }
        // Nearly always there are none. An update lost between two threads does not matter, here and below.
        let losses = self.losses.load(Relaxed);
        if losses > 0 {
            self.losses.store(losses - 1, Relaxed);
        }
        if away > TAKEN {
            self.shared.store(stats::tick() + SHARED, Relaxed);
        }
    }

    /// An offer has taken long. Returns how long such offers have taken together, if they are enough to end all offers. A time
    /// slice that several threads have waited for counts for each of them: the next one would hold up as many.
    fn adds_up(&self, away: Duration, now: u64) -> Option<Duration> {
        let before = self.losses.load(Relaxed);
        let gone = (if before == 0 { 0 } else { self.gone.load(Relaxed) }).saturating_add(nanoseconds(away));
        let losses = before + Offers::FORGOTTEN;
        let enough = losses > Offers::FORGOTTEN * (Offers::LOSSES - 1) || self.is_soon(now);
        self.losses.store(if enough { 0 } else { losses }, Relaxed);
        self.gone.store(gone, Relaxed);
        enough.then(|| Duration::from_nanos(gone))
    }

    /// A wait has ended. `found`: it has found what it waited for. `paid`: it did so for less than a sleep costs.
    fn ended(&self, found: bool, paid: bool, now: u64) {
        let before = self.credit.load(Relaxed);
        let credit = match (found, paid) {
            (true, true) => (before + 1).min(Offers::CREDIT),
            (true, false) => before - 1,
            (false, _) => before - Offers::IN_VAIN,
        };
        // Nearly always it stays at its maximum.
        if credit != before {
            self.credit.store(credit, Relaxed);
        }
        if credit <= 0 {
            self.stop(now, Offers::PAUSE);
        }
    }

    /// Whether offers have been allowed again for a shorter time than they were suspended, the last time that some took long.
    fn is_soon(&self, now: u64) -> bool {
        now < self.from.load(Relaxed).saturating_add(self.paused.load(Relaxed))
    }

    /// Suspends offers, some of which have taken long: `gone`, all together.
    fn lost(&self, now: u64, gone: Duration) {
        let longer = (self.times.load(Relaxed) * 2).min(*Offers::TIMES.end());
        let times = if self.is_soon(now) { longer } else { *Offers::TIMES.start() };
        let pause = nanoseconds(gone).saturating_mul(times).clamp(Offers::SHORTEST, Offers::LONGEST);
        self.times.store(times, Relaxed);
        self.paused.store(pause, Relaxed);
        self.stop(now, pause);
    }

    /// No offers from `now` on, for the time of `pause`.
    fn stop(&self, now: u64, pause: u64) {
        // Of several threads at a time, the one that has lost most counts.
        self.from.fetch_max(now.saturating_add(pause), Relaxed);
        self.credit.store(Offers::CREDIT, Relaxed);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A thread that offered its processor to others has got it back, after it was `away` for this long.
pub(super) fn made(away: Duration) {
    OFFERS.made(away);
}

/// Offers this processor to others. Returns false if that is not allowed now, or took long.
pub fn offer() -> bool {
    if !OFFERS.are_allowed() {
        return false;
    }
    let before = Instant::now();
    yield_now();
    let away = before.elapsed();
    OFFERS.made(away);
    away <= LONG
}

/// How a wait looks for what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Without a pause, where that has paid lately.
    Spin,
    /// The same for a moment, which says nothing about whether spinning pays.
    Glance,
    /// Offering its processor to others in between.
    Offer {
        /// Up to this many offers cost no more than a sleep.
        pays: u32,
    },
}

/// How long a peer may take to copy this many bytes, but no longer than a few limits of a spin.
fn copying(bytes: u64, limit: Duration) -> Duration {
    Duration::from_nanos(bytes / COPIED).min(limit * 4)
}

/// A spin under way. It goes on as long as bytes move, and beyond that for its limit and for as long as the peer may take to
/// copy what has moved, but never longer than [`Patience::MOST`] limits: somebody else may wait for this thread.
pub(super) struct Patience {
    limit: Duration,
    way: Way,
    /// How often the processor was offered, and how often it had been when something last moved.
    offered: u32,
    offered_before: u32,
    /// From when on a spin offers its processor too, and whether it has just done so.
    alone: Instant,
    has_offered: bool,
    until: Instant,
    end: Instant,
    moved: u64,
    /// How many bytes had moved when it began.
    before: u64,
    /// When to check whether somebody else waits.
    look: Instant,
    now: Instant,
    /// Whether the processor was lost.
    lost: bool,
    company: u32,
}

impl Patience {
    const MOST: u32 = 40;

    /// How many times a spin looks round within its limit. The first look is not at once, so that what comes soon costs no
    /// more.
    const LOOKS: u32 = 4;

    /// `None`: there is to be no spin now.
    pub(super) fn new(spin: &mut Spin, link: &mut Link) -> Option<Patience> {
        let company = link.device.company();
        let (way, limit) = spin.way(company, || link.device.spin())?;
        let now = Instant::now();
        let end = now + limit * Patience::MOST;
        let moved = link.device.moved();
        let longer = spin.longer(moved, link.device.wakes());
        Some(Patience {
            limit,
            way,
            offered: 0,
            offered_before: 0,
            alone: if OFFERS.are_allowed() { now + ALONE } else { end },
            has_offered: false,
            until: match way {
                Way::Spin => now + limit + longer,
                Way::Glance => now + limit,
                Way::Offer { .. } => now + longer,
            },
            end,
            moved,
            before: moved,
            look: now + limit / Patience::LOOKS,
            now,
            lost: false,
            company,
        })
    }

    /// Tells `spin` how it has ended.
    pub(super) fn ends(&self, spin: &mut Spin, found: bool) {
        if let Way::Offer { pays } = self.way {
            // A lost processor is known already.
            if !self.lost {
                OFFERS.ended(found, self.offered <= pays || self.now < self.until, stats::tick());
            }
            return;
        }
        match found {
            _ if self.way == Way::Glance => {}
            true => spin.found(self.lost),
            false => spin.failed(),
        }
    }

    fn offers(&self) -> bool {
        matches!(self.way, Way::Offer { .. })
    }

    /// Whether there may be something to move.
    pub(super) fn finds(&self, link: &Link) -> bool {
        !self.offers() || link.device.has_come()
    }

    pub(super) fn is_over(&mut self, link: &Link) -> bool {
        let moved = link.device.moved();
        if self.offers() {
            if std::mem::replace(&mut self.moved, moved) != moved {
                self.offered_before = self.offered;
                // Moving it has taken a while, in which nobody else had the processor.
                self.now = Instant::now();
                let copies = copying(moved.wrapping_sub(self.before), self.limit);
                self.until = self.end.min(self.now + copies);
            }
            let enough = self.offered - self.offered_before >= OFFERS_MOST && self.now >= self.until;
            return enough || self.lost || self.now >= self.end;
        }
        let now = Instant::now();
        let before = std::mem::replace(&mut self.now, now);
        self.lost |= moved.wrapping_sub(self.moved) < SHORT && now - before > LOST;
        if std::mem::replace(&mut self.moved, moved) != moved {
            let copies = copying(moved.wrapping_sub(self.before), self.limit);
            self.until = self.end.min(now + self.limit + copies);
        }
        now >= self.until
    }

    /// Pauses between two looks, with nothing locked. `may_offer`: the processor, if the spin takes long.
    pub(super) fn pause(&mut self, may_offer: bool) {
        self.has_offered = false;
        match self.way {
            Way::Offer { .. } => {
                self.offered += 1;
                yield_now();
            }
            Way::Spin if may_offer && self.now >= self.alone => {
                self.has_offered = true;
                yield_now();
            }
            Way::Spin | Way::Glance => spin_loop(),
        }
    }

    /// The next look begins.
    pub(super) fn goes_on(&mut self) {
        let now = Instant::now();
        let before = std::mem::replace(&mut self.now, now);
        let away = now - before;
        if self.offers() || self.has_offered {
            OFFERS.made(away);
            self.lost |= away > LONG;
        } else {
            self.lost |= away > LOST;
        }
    }

    /// Whether it has turned out that somebody else waits for this thread or its processor. `others`: whether another
    /// descriptor has something.
    pub(super) fn must_end(&mut self, others: impl FnOnce() -> bool) -> bool {
        if self.now < self.look {
            return false;
        }
        self.look = self.now + self.limit / Patience::LOOKS;
        !self.offers() && is_crowded(self.company) || others()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::testing::fork;

    #[test]
    fn a_thread_whose_peer_serves_as_many_others_as_there_are_processors_offers_its_own() {
        let mut spin = Spin::new(Duration::from_micros(50));
        let many = processors() as u32;
        // Unless another test has lost its processor meanwhile.
        let mut offers = |pays| match spin.way(many, || pays == OFFERS_MOST) {
            Some((way, _)) => way == Way::Offer { pays },
            None => !OFFERS.are_allowed(),
        };
        assert!(offers(OFFERS_MOST) && offers(OFFERS_DEAR));
        assert!(is_crowded(u32::MAX) && is_crowded(many.saturating_sub(1).max(1)));
        assert!(Spin::new(Duration::ZERO).way(many, || true).is_none());
    }

    #[test]
    fn a_thread_beside_the_driver_makes_a_few_offers_before_it_sleeps() {
        let spin = Spin::new(Duration::from_micros(50));
        let others: Vec<_> = (0..processors()).map(|_| Waiting::begin()).collect();
        // While another test has lost its processor, none are made.
        let mut made = (0..1000).map(|_| {
            let until = Instant::now() + Duration::from_secs(20);
            while !OFFERS.are_allowed() && Instant::now() < until {
                yield_now();
            }
            let mut beside = Beside::default();
            (0..100)
                .take_while(|_| {
                    let offers = beside.offers(&spin);
                    if offers {
                        beside.offer();
                    }
                    offers
                })
                .count()
        });
        let most = made.find(|made| *made >= OFFERS_BESIDE as usize);
        assert_eq!(most, Some(OFFERS_BESIDE as usize));
        assert!(!Beside::default().offers(&Spin::new(Duration::ZERO)));
        drop(others);
    }

    #[test]
    fn offers_that_took_long_end_them_only_in_short_succession() {
        let offers = Offers::new();
        let slice = Duration::from_millis(4);
        let are_made = |n: u64, away| (0..n).for_each(|_| offers.made(away));
        for _ in 0..100 {
            are_made(1, slice);
            are_made(Offers::FORGOTTEN, Duration::ZERO);
        }
        assert!(offers.are_allowed() && !offers.are_kept() && !offers.are_taken());
        are_made(2, slice);
        are_made(Offers::FORGOTTEN, LONG);
        are_made(1, slice);
        assert!(offers.are_allowed() && offers.are_taken());
        are_made(Offers::FORGOTTEN - 1, Duration::ZERO);
        let now = stats::tick();
        are_made(1, slice);
        assert!(offers.are_kept() && !offers.are_allowed());
        // All four count, since nothing was left of the losses before them.
        let least = nanoseconds(slice) * 4 * Offers::TIMES.start();
        assert!((now + least..=stats::tick() + least).contains(&offers.from.load(Relaxed)));
        // Soon after that a single long offer ends them; later it does not.
        assert!(offers.adds_up(slice, now + least + 1) == Some(slice));
        assert!(offers.adds_up(slice, stats::tick() + 3 * least).is_none());
    }

    #[test]
    fn who_has_lost_time_slices_by_offers_makes_none_for_a_while_and_for_longer_if_that_is_the_rule() {
        let ms = |n: u64| n * 1_000_000;
        let offers = Offers::new();
        let now = stats::tick();
        assert!(offers.are_allowed());
        offers.lost(now, Duration::from_millis(3));
        assert_eq!(offers.from.load(Relaxed), now + ms(12));
        assert!(!offers.are_allowed());
        let mut at = now;
        for (times, lost) in [(8, 3), (16, 3), (32, 3), (64, 3), (64, 3), (64, 1)] {
            at = offers.from.load(Relaxed) + 1;
            offers.lost(at, Duration::from_millis(lost));
            assert_eq!(offers.from.load(Relaxed), at + ms(times * lost));
        }
        // Of two threads, the one that has lost most counts.
        let from = offers.from.load(Relaxed);
        offers.lost(at, LONG);
        assert_eq!(offers.from.load(Relaxed), from);
        // Earlier pauses make none of the later ones longer.
        let later = from + ms(200);
        offers.lost(later, LONG);
        assert_eq!(offers.from.load(Relaxed), later + Offers::SHORTEST);
        offers.lost(later + ms(60_000), Duration::from_secs(60));
        assert_eq!(offers.from.load(Relaxed), later + ms(60_000) + Offers::LONGEST);
    }

    #[test]
    fn offers_go_on_while_most_of_them_pay_and_end_after_some_in_vain() {
        let offers = Offers::new();
        let (now, end) = (stats::tick(), |offers: &Offers| offers.from.load(Relaxed));
        for _ in 0..1000 {
            offers.ended(false, false, now);
            (0..5).for_each(|_| offers.ended(true, true, now));
        }
        assert_eq!(end(&offers), 0);
        let in_vain = (0..100).take_while(|_| {
            offers.ended(false, false, now);
            end(&offers) == 0
        });
        assert_eq!(
            (in_vain.count() as i64, end(&offers)),
            (Offers::CREDIT / Offers::IN_VAIN - 1, now + Offers::PAUSE)
        );
        let dear = (0..100).take_while(|_| {
            offers.ended(true, false, now + Offers::PAUSE);
            end(&offers) == now + Offers::PAUSE
        });
        assert_eq!(dear.count() as i64, Offers::CREDIT - 1);
    }

    #[test]
    fn spins_that_find_something_after_they_have_lost_their_processor_fail_in_the_end() {
        let mut spin = Spin::new(Duration::from_micros(50));
        for _ in 0..100 {
            spin.found(false);
        }
        assert_eq!(spin.skip, 0);
        for _ in 0..4 {
            spin.found(true);
        }
        assert_eq!(spin.skip, 1);
    }

    #[test]
    fn a_spin_after_many_bytes_is_as_much_longer_as_they_take_to_copy() {
        let mut spin = Spin::new(Duration::from_micros(50));
        let longer = [100, 100, 8_100, 8_100 + (1 << 30), 7].map(|moved| spin.longer(moved, 0).as_nanos());
        assert_eq!(longer, [12, 0, 1_000, 200_000, 0]);
    }

    #[test]
    fn a_spin_for_a_peer_that_had_to_be_woken_is_longer() {
        let mut spin = Spin::new(Duration::from_micros(50));
        let longer = [1, 1, 3, 3].map(|wakes| spin.longer(0, wakes).as_micros());
        assert_eq!(longer, [100, 0, 100, 0]);
    }

    #[test]
    fn threads_of_the_parent_do_not_wait_in_its_child() {
        let here = || WAITING.load(Relaxed) >> 32 == fork::generation();
        let _waiting = Waiting::begin();
        assert!(here());
        let child = fork(|| {
            let begun = Waiting::begin();
            let one = here() && WAITING.load(Relaxed) as u32 == 1;
            // The parent's one ends here too, as when fork(2) was called in a dispatch routine.
            drop(Waiting { generation: begun.generation - 1 });
            let still = WAITING.load(Relaxed) as u32 == 1;
            drop(begun);
            one && still && WAITING.load(Relaxed) as u32 == 0
        });
        assert!(child.succeeded());
    }
}
